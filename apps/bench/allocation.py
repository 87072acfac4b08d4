"""What paging and sharing save, by simulation: `run_allocation`.

(a) waste     share of reserved K/V memory that holds a token, contiguous and paged
(b) sampling  memory spared by parallel samples that share their prompt's blocks
(c) beams     memory spared by beams that share their common past, block by block

The PagedAttention paper (arXiv 2309.06180, figures 2, 15 and 18) measured these with an engine and
real conversations. Here requests are drawn from distributions of the same means; the shape of the
results can be compared, the figures are no replication. Everything assumed is in `ASSUMPTIONS` and
printed with the results. One seed gives one result.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import fill
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamgen.errors import InvalidRequest

Lengths = NDArray[np.int64]

SHORTEST, LONGEST, MAX_TOKENS = 4, 1024, 2048
BLOCK, BLOCKS = 16, (16, 64, 128, 256)
WAYS = (2, 4, 6)
EVERY = 8


@dataclass(frozen=True)
class Traffic:
    """Lengths of requests, in tokens.

    Args:
        name: of the data that it resembles.
        prompt, output: mean and coefficient of variation of a lognormal length.
        survival: chance that a beam keeps its own parent in a step.
    """

    name: str
    prompt: tuple[float, float]
    output: tuple[float, float]
    survival: float


SHAREGPT = Traffic("ShareGPT-like", (161.31, 1.5), (337.99, 1.0), 0.97)
ALPACA = Traffic("Alpaca-like", (19.31, 0.8), (58.45, 0.9), 0.9)

ASSUMPTIONS = (
    f"lengths are lognormal, rounded and cut to {SHORTEST}..{LONGEST} tokens",
    "means before the cut, prompt / output: ShareGPT 161.31 / 337.99, Alpaca 19.31 / 58.45 "
    "(recalled from figure 11 of the paper, not verified)",
    "coefficients of variation, prompt / output: ShareGPT 1.5 / 1.0, Alpaca 0.8 / 0.9 (assumed)",
    f"one token a step; memory is summed over all steps of all requests; limit {MAX_TOKENS} tokens",
    "output guess: a region of 2^k tokens for the prompt and the output rounded up to 2^k; oracle: "
    "of 2^k for both at their true length",
    f"sampling and beams: blocks of {BLOCK} tokens; samples are compared at the end of their life",
    "beams: in each step a beam goes on from its own parent with chance s, else from any beam of "
    f"the step before; s = 0.97 for ShareGPT, 0.9 for Alpaca (assumed); seen every {EVERY} steps",
)

PAPER = {
    "contiguous": "20.4-38.2 %",
    "samples": "16.2-30.5 %, 6.1-9.8 %",
    "beams": "44.3-66.3 %, 37.6-55.2 %",
}
"""What the paper measured: one range for both kinds of traffic, or ShareGPT and Alpaca."""


@dataclass(frozen=True)
class Allocation:
    """What `run_allocation` found. Shares are between 0 and 1, by name of the traffic.

    Attributes:
        requests: requests of waste, sampling, beams.
        seed: of all draws.
        means: mean prompt and output after the cut, in tokens.
        contiguous: by policy, the share of reserved memory that holds a token.
        paged: the same by tokens of a block.
        sampling: share of memory that sharing spares, by number of samples.
        beams: the same by number of beams.
    """

    requests: tuple[int, int, int]
    seed: int
    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    contiguous: dict[str, dict[str, float]] = field(default_factory=dict)
    paged: dict[str, dict[int, float]] = field(default_factory=dict)
    sampling: dict[str, dict[int, float]] = field(default_factory=dict)
    beams: dict[str, dict[int, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the assumptions, the paper's figures and the table's lines."""
        fixed = {"assumptions": list(ASSUMPTIONS), "paper": PAPER}
        return {**asdict(self), **fixed, "lines": list(self._lines())}

    def to_json(self) -> str:
        """`as_dict` as text."""
        return json.dumps(self.as_dict(), indent=1)

    def table(self) -> str:
        """As text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield "assumed:"
        for text in ASSUMPTIONS:
            yield fill(text, 96, initial_indent="  - ", subsequent_indent="    ")
        yield f"{'':36}" + "".join(f"{name:>15}" for name in self.means) + "   paper"
        for index, what in enumerate(("prompt", "output")):
            row = "".join(f"{mean[index]:15.1f}" for mean in self.means.values())
            yield f"{f'mean {what} after the cut, tokens':36}{row}"
        yield from self._rows("used, {}", self.contiguous, PAPER["contiguous"])
        yield from self._rows("used, blocks of {}", self.paged)
        yield from self._rows("saved, {} samples", self.sampling, PAPER["samples"])
        yield from self._rows("saved, {} beams", self.beams, PAPER["beams"])

    def _rows(
        self, text: str, found: Mapping[str, Mapping[Any, float]], paper: str = ""
    ) -> Iterator[str]:
        for key in next(iter(found.values())):
            shares = "".join(f"{100 * found[name][key]:13.1f} %" for name in self.means)
            yield f"{text.format(key):36}{shares}   {paper}".rstrip()
            paper = ""


def run_allocation(
    requests: int = 4000,
    sampled: int = 1500,
    beamed: int = 300,
    seed: int = 0,
    traffic: Sequence[Traffic] = (SHAREGPT, ALPACA),
    quick: bool = False,
) -> Allocation:
    """Simulate all three.

    Args:
        requests: requests for the waste.
        sampled: of these, for parallel samples.
        beamed: of these, for beams.
        seed: of all draws.
        traffic: what the requests resemble.
        quick: as few as there can be, to see that it runs; the figures mean nothing.

    Raises:
        InvalidRequest: no requests, or more sampled or beamed ones than there are.
    """
    if quick:
        requests, sampled, beamed = 50, 20, 2
    if not 1 <= min(sampled, beamed) <= max(sampled, beamed) <= requests:
        raise InvalidRequest(
            f"requests={requests}, sampled={sampled}, beamed={beamed}: accepted are at least 1, "
            "and no more sampled or beamed than requests"
        )
    found = Allocation((requests, sampled, beamed), seed)
    for kind in traffic:
        rng = np.random.default_rng(seed)
        prompts, outputs = (lengths(rng, *of, requests) for of in (kind.prompt, kind.output))
        name = kind.name
        found.means[name] = (float(prompts.mean()), float(outputs.mean()))
        found.contiguous[name] = contiguous_use(prompts, outputs)
        found.paged[name] = {block: paged_use(prompts, outputs, block) for block in BLOCKS}
        some = prompts[:sampled], outputs[:sampled]
        found.sampling[name] = {n: sampling_saves(*some, n) for n in WAYS}
        few = prompts[:beamed], outputs[:beamed]
        found.beams[name] = {n: beams_save(rng, *few, n, kind.survival) for n in WAYS}
    return found


def lengths(rng: np.random.Generator, mean: float, variation: float, n: int) -> Lengths:
    """`n` lognormal lengths with that mean and coefficient of variation, then cut."""
    variance = np.log(1 + variation**2)
    drawn = rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), n)
    cut: Lengths = np.clip(np.rint(drawn), SHORTEST, LONGEST).astype(np.int64)
    return cut


def stored(prompts: Lengths, outputs: Lengths) -> int:
    """Tokens in memory, summed over all steps: after step t a request holds its prompt and t."""
    return int((prompts * outputs + outputs * (outputs + 1) // 2).sum())


def contiguous_use(prompts: Lengths, outputs: Lengths) -> dict[str, float]:
    """Share of reserved memory in use when each request has one region, by who knows its length."""
    both = prompts + outputs
    regions = {
        f"contiguous, {MAX_TOKENS} tokens": np.full_like(both, MAX_TOKENS),
        "contiguous, output guessed": power_of_two(prompts + power_of_two(outputs)),
        "contiguous, oracle": power_of_two(both),
    }
    live = stored(prompts, outputs)
    return {name: live / int((region * outputs).sum()) for name, region in regions.items()}


def paged_use(prompts: Lengths, outputs: Lengths, block: int) -> float:
    """Share of allocated blocks in use when a block is taken once the last one is full."""

    def blocks(n: Lengths) -> Lengths:  # of 1, 2, ..., n tokens, all together
        full, rest = np.divmod(n, block)
        return block * full * (full + 1) // 2 + rest * (full + 1)

    taken = block * int((blocks(prompts + outputs) - blocks(prompts)).sum())
    return stored(prompts, outputs) / taken


def sampling_saves(prompts: Lengths, outputs: Lengths, n: int) -> float:
    """Share of blocks that `n` samples spare: they keep the full blocks of their prompt once."""
    spared = (n - 1) * (prompts // BLOCK)
    return int(spared.sum()) / int((n * -(-(prompts + outputs) // BLOCK)).sum())


def beams_save(
    rng: np.random.Generator, prompts: Lengths, outputs: Lengths, n: int, survival: float
) -> float:
    """Share of blocks that `n` beams spare, over all steps that are looked at."""
    apart = together = 0
    for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True):
        beams = Beams(prompt, n)
        for step in range(1, output + 1):
            keeps, others = rng.random(n) < survival, rng.integers(0, n, n)
            beams.step([i if keeps[i] else int(others[i]) for i in range(n)])
            if step % EVERY == 0:
                apart += sum(map(len, beams.tables))
                together += beams.blocks
    return 1 - together / apart if apart else 0.0


class Beams:
    """Block tables of beams over one prompt, copied on write; blocks are numbers.

    Args:
        prompt: its tokens.
        n: beams.
        block: tokens of a block.
    """

    def __init__(self, prompt: int, n: int, block: int = BLOCK) -> None:
        self.tokens, self.block = prompt, block
        shared = list(range(-(-prompt // block)))
        self.tables = [shared] * n
        self._next = len(shared)

    def step(self, parents: Sequence[int]) -> None:
        """Each beam takes its parent's table and one more token."""
        self.tables = [self.tables[parent].copy() for parent in parents]
        if self.tokens % self.block == 0:
            for table in self.tables:
                table.append(self._new())
        else:
            holders = Counter(table[-1] for table in self.tables)
            for table in self.tables:
                if holders[table[-1]] > 1:
                    holders[table[-1]] -= 1
                    table[-1] = self._new()
        self.tokens += 1

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    @property
    def blocks(self) -> int:
        """Blocks in memory."""
        return len({block for table in self.tables for block in table})


def power_of_two(n: Lengths) -> Lengths:
    """The next power of two, or `n` if it is one."""
    exponent: Lengths = np.ceil(np.log2(n)).astype(np.int64)
    power: Lengths = np.left_shift(1, exponent)
    return power
