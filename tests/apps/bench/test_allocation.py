"""The simulations of waste and sharing: each closed form against a step-by-step twin."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamgen.apps.bench.allocation import (
    ALPACA,
    ASSUMPTIONS,
    SHAREGPT,
    Beams,
    contiguous_use,
    lengths,
    paged_use,
    power_of_two,
    run_allocation,
    sampling_saves,
)
from streamgen.errors import InvalidRequest

requests = st.lists(st.tuples(st.integers(4, 60), st.integers(4, 60)), min_size=1, max_size=4)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    prompts, outputs = zip(*pairs, strict=True)
    return np.array(prompts), np.array(outputs)


@given(requests, st.integers(1, 40))
@settings(max_examples=30)
def test_paged_use_step_by_step(pairs: list[tuple[int, int]], block: int) -> None:
    """The closed form is the sum over every step of every request."""
    live = taken = 0
    for prompt, output in pairs:
        for step in range(1, output + 1):
            live += prompt + step
            taken += -(-(prompt + step) // block) * block
    assert paged_use(*arrays(pairs), block) == live / taken


@given(requests)
@settings(max_examples=20)
def test_contiguous_use_step_by_step(pairs: list[tuple[int, int]]) -> None:
    """A region stays reserved for every step, however much of it is in use."""

    def up(n: int) -> int:
        return 1 << (n - 1).bit_length()

    live = sum(p + t for p, o in pairs for t in range(1, o + 1))
    found = contiguous_use(*arrays(pairs))
    for share, region in zip(
        found.values(),
        (lambda p, o: 2048, lambda p, o: up(p + up(o)), lambda p, o: up(p + o)),
        strict=True,
    ):
        assert share == live / sum(region(p, o) * o for p, o in pairs)


def test_powers_of_two() -> None:
    """Every length up to the longest rounds up exactly."""
    n = np.arange(1, 4097)
    assert power_of_two(n).tolist() == [1 << (int(x) - 1).bit_length() for x in n]


def test_sampling_by_hand() -> None:
    """A prompt of 40 has 2 full blocks; with 25 more, 5 blocks each: 3 samples spare 4 of 15."""
    assert sampling_saves(np.array([40]), np.array([25]), 3) == 4 / 15
    assert sampling_saves(np.array([40]), np.array([25]), 1) == 0


@given(
    prompt=st.integers(1, 20),
    block=st.integers(1, 6),
    steps=st.lists(st.tuples(*[st.integers(0, 2)] * 3), max_size=25),
)
@settings(max_examples=50)
def test_beams_share_what_is_equal(
    prompt: int, block: int, steps: list[tuple[int, int, int]]
) -> None:
    """Copy-on-write keeps as many blocks as there are different ones by content."""
    beams, texts = Beams(prompt, 3, block), [["p"] * prompt] * 3
    for number, parents in enumerate(steps):
        beams.step(parents)
        texts = [texts[parent] + [f"{number}.{beam}"] for beam, parent in enumerate(parents)]
        contents = {
            (start, tuple(text[: start + block]))
            for text in texts
            for start in range(0, len(text), block)
        }
        assert beams.blocks == len(contents)
        assert [len(table) for table in beams.tables] == [-(-len(text) // block) for text in texts]


def test_lengths_have_the_stated_mean() -> None:
    """Where the cut does not bite; and nothing lies outside it."""
    rng = np.random.default_rng(0)
    assert lengths(rng, 59.0, 0.5, 40_000).mean() == pytest.approx(59.0, rel=0.02)
    drawn = lengths(rng, 338.0, 2.0, 40_000)
    assert (drawn.min(), drawn.max()) == (4, 1024)


def test_known_figures() -> None:
    """cache_core.md 5.5, within 2.5 points: fewer requests, other random numbers."""
    found = run_allocation(requests=2000, sampled=1000, beamed=24)
    known = {
        SHAREGPT.name: (
            (20.4, 30.1, 40.9),
            (98.2, 93.0, 86.8, 76.6),
            (15.8, 23.5, 26.0),
            (45.0, 66.3, 72.6),
        ),
        ALPACA.name: (
            (3.4, 23.3, 39.8),
            (90.4, 68.7, 48.0, 27.0),
            (6.8, 10.2, 11.3),
            (34.5, 48.3, 51.4),
        ),
    }
    for name, rows in known.items():
        parts = (found.contiguous, found.paged, found.sampling, found.beams)
        for part, want, width in zip(parts, rows, (2.5, 2.5, 2.5, 5.0), strict=True):
            assert [100 * x for x in part[name].values()] == pytest.approx(want, abs=width)


def test_same_seed_same_result() -> None:
    """To the last bit; another seed gives another."""
    few = {"requests": 40, "sampled": 20, "beamed": 2}
    assert run_allocation(**few) == run_allocation(**few) != run_allocation(**few, seed=1)


def test_report_prints_every_assumption() -> None:
    """Table and JSON name what was assumed and what the paper measured."""
    found = run_allocation(requests=40, sampled=20, beamed=2)
    table, raw = found.table(), json.loads(found.to_json())
    words = " ".join(table.split())
    assert all(text in words for text in ASSUMPTIONS) and raw["assumptions"] == list(ASSUMPTIONS)
    assert max(map(len, table.splitlines())) <= 100
    assert "20.4-38.2 %" in table and raw["requests"] == [40, 20, 2]


@pytest.mark.parametrize(("requests", "sampled", "beamed"), [(0, 0, 0), (10, 11, 1), (10, 1, 0)])
def test_bad_counts(requests: int, sampled: int, beamed: int) -> None:
    """Counts that can't be drawn are refused."""
    with pytest.raises(InvalidRequest, match=f"requests={requests}, sampled={sampled}"):
        run_allocation(requests, sampled, beamed)
