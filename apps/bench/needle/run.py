"""How often each eviction policy still knows the answer: `streamgen bench needle`.

A stream is read once, chunk by chunk, in bounded memory; the questions come when it is over. Every
policy reads the same streams with the same decoder through the same tables, and every layer keeps
the same number of tokens, summaries included. Intervals are bootstrapped over streams, because the
questions about one stream hang together.

This is one decoder from one seed in a toy world with salient events. It shows what the machinery
does and how policies differ here, and cannot say which is best for a real video model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor

from streamgen.apps.bench.needle.model import Decoder
from streamgen.apps.bench.needle.reader import Reader
from streamgen.apps.bench.needle.train import Recipe, Training
from streamgen.apps.bench.needle.world import (
    CELLS,
    COLOURS,
    MAX_EVENTS,
    NOW,
    SEEN,
    SHAPE,
    Questions,
    Streams,
    ask,
    make_streams,
)
from streamgen.cache.eviction import LayerBudget
from streamgen.device import capabilities
from streamgen.errors import InvalidRequest, WeightsError

Floats = npt.NDArray[np.float64]

CHUNK_FRAMES = 4
SIDE_BY_SIDE = 50  # streams that are read in step
SAVE_EVERY = 100  # steps of training
RESAMPLES = 2000
GOOD = 0.97  # with less than this at full cache the comparison says little
FULL, HERMES = "full cache", "HERMES, slots aligned"

POLICIES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "sliding window": ("sliding_window", {}),
        "uniform frames": ("uniform", {"unit": CELLS}),
        "random": ("random", {}),
        "H2O": ("h2o", {}),
        "value norm": ("value_norm", {}),
        "guidance": ("guidance", {}),
        HERMES: ("hermes", {}),
        "  without summary": ("hermes", {"summary": False}),
        "HERMES, tokens aligned": ("hermes_token", {}),
        "  without its summary": ("hermes_token", {"summary": False}),
        "shared: guidance": ("shared", {}),
        "shared: HERMES scores": ("shared_hermes", {}),
        "shared: value norm": ("value_norm", {"shared": True}),
        "shared: random": ("random", {"shared": True}),
    }
)
"""Name in the table -> preset of `LayerBudget` and changes to it."""


def run_needle(
    folder: str | Path = "out/needle",
    streams: int = 200,
    frames: int = 32,
    budgets: Sequence[int] = (64, 32, 16),
    seed: int = 2026,
    json_path: str | Path | None = None,
    threads: int | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Measure every policy, print a table, and return (and write) the report.

    Args:
        folder: holds the decoder. If it does not, one is trained (some seven minutes of one core)
            and saved there; a training that was interrupted goes on.
        streams: streams that every policy reads.
        frames: of a stream; it was trained with 16 to 32.
        budgets: tokens that a layer keeps; a frame has 4.
        seed: of the training, if there is one, and of the streams.
        json_path: where to write the report.
        threads: CPU threads; None = torch's own choice.
        quick: as little as there can be, to see that it runs, with an untrained decoder.

    Raises:
        InvalidRequest: a number is out of range.
        WeightsError: the folder's decoder can't be read.
    """
    if quick:
        streams, frames, budgets = 2, 12, (16,)
    if streams < 1 or frames < MAX_EVENTS or not budgets or min(budgets) < 2:
        raise InvalidRequest(
            f"streams={streams}, frames={frames}, budgets={list(budgets)}: accepted are at least "
            f"1, {MAX_EVENTS}, and budgets of at least 2 tokens"
        )
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        decoder = (
            Training(seed).decoder.eval() if quick else load_or_train(Path(folder), seed, Recipe())
        )
        report = measure(decoder, streams, frames, budgets, seed)
    finally:
        torch.set_num_threads(before)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return report


def load_or_train(folder: Path, seed: int, recipe: Recipe) -> Decoder:
    """The decoder of a folder, trained now if need be.

    Raises:
        WeightsError: its file is damaged or another model's.
    """
    path, unfinished = folder / "decoder.safetensors", folder / "training.pt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        training = Training(seed, recipe)
        if unfinished.exists():
            training.restore(torch.load(unfinished, weights_only=True))
        while training.step < recipe.steps:
            loss, right = training.advance()
            if training.step % SAVE_EVERY == 0:
                _say(f"training step {training.step}/{recipe.steps}: {loss=:.3f}, {right=:.3f}")
                torch.save(training.state(), unfinished)
        save_file(training.decoder.state_dict(), path)
        unfinished.unlink(missing_ok=True)
    decoder = Decoder()
    try:
        decoder.load_state_dict(load_file(path))
    except Exception as error:  # safetensors' own errors, and torch's for other shapes
        raise WeightsError(f"{path}: no decoder of this benchmark; delete it to train") from error
    return decoder.eval().requires_grad_(False)


# Measuring


def measure(
    decoder: Decoder, count: int, frames: int, budgets: Sequence[int], seed: int
) -> dict[str, Any]:
    """The report: per policy and budget the share of right answers, by kind and by age."""
    # Far from the seeds of training and of single streams' draws.
    streams = make_streams(count, frames, Generator().manual_seed(seed + 1_000_000_007))
    questions = final_questions(streams)
    groups = _groups(streams, questions)
    samples = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    rows = []
    baselines: dict[int | None, Floats] = {}
    for name, budget, policy in _policies(budgets):
        _say(f"{name.strip()}, {budget or 'all'} tokens a layer")
        right = read_and_answer(decoder, policy, streams, questions, seed)
        row: dict[str, Any] = {"policy": name, "budget": budget}
        for group, asked in groups.items():
            row[group] = _share(right, asked, samples)
        if name == HERMES:
            baselines[budget] = right
        rows.append((row, right))
    for row, right in rows:  # paired: the same resampled streams for both
        if row["budget"] in baselines:
            row["needle_minus_hermes"] = _share(
                right - baselines[row["budget"]], groups["needle"], samples
            )
    return {
        "about": {
            "parameters": sum(p.numel() for p in decoder.parameters()),
            "layers": decoder.shape.layers,
            "streams": count,
            "frames": frames,
            "tokens": frames * CELLS,
            "chunk_tokens": CHUNK_FRAMES * CELLS,
            "budgets": list(budgets),
            "seed": seed,
            "questions": {group: int(asked.sum()) for group, asked in groups.items()},
            "machine": capabilities().to_json(),
        },
        "rows": [row for row, _ in rows],
    }


def _policies(budgets: Sequence[int]) -> Iterator[tuple[str, int | None, LayerBudget | None]]:
    yield FULL, None, None
    for name, (preset, changes) in POLICIES.items():
        for budget in budgets:
            yield name, budget, LayerBudget.preset(preset, budget, **changes)


def final_questions(streams: Streams) -> Questions:
    """What is now, and for every colour which shape it had and whether it was there."""
    colours = list(range(len(COLOURS)))
    kind = torch.tensor([NOW] + [SHAPE] * len(colours) + [SEEN] * len(colours))
    count = len(streams.hue)
    kinds, colour = kind.expand(count, -1), torch.tensor([0] + 2 * colours).expand(count, -1)
    return ask(streams, kinds, colour, torch.full_like(kinds, streams.frames - 1))


def read_and_answer(
    decoder: Decoder,
    policy: LayerBudget | None,
    streams: Streams,
    questions: Questions,
    seed: int,
) -> Floats:
    """1 where the answer after reading the stream is right, else 0: `[B, Q]`."""
    size = CHUNK_FRAMES * CELLS
    capacity = streams.patches.shape[1] if policy is None else policy.budget + size
    words = [(int(kind), int(colour)) for kind, colour in questions.words[0]]
    right = []
    for first in range(0, len(streams.hue), SIDE_BY_SIDE):
        patches = streams.patches[first : first + SIDE_BY_SIDE]
        answer = questions.answer[first : first + SIDE_BY_SIDE]
        with Reader(decoder, policy, len(patches), capacity, seed + first) as reader:
            for chunk in patches.split(size, dim=1):
                reader.read(chunk)
            logits = reader.ask(words)
        said = torch.stack([x.argmax(-1) for x in logits])
        kind = questions.words[: len(patches), :, 0]
        right.append(said.gather(0, kind[None])[0] == answer)
    return torch.cat(right).numpy().astype(np.float64)


def _groups(streams: Streams, questions: Questions) -> dict[str, npt.NDArray[np.bool_]]:
    """Which questions `[B, Q]` belong to each figure of the report."""
    kind, has_answer = questions.words[..., 0], questions.answer >= 0
    needle = (kind == SHAPE) & has_answer
    colour = questions.words[..., 1] - questions.words[0, 1, 1]  # the first SHAPE asks colour 0
    when = streams.when.gather(1, colour.clamp(0, len(COLOURS) - 1))
    third = when * 3 // streams.frames
    groups: dict[str, Tensor] = {
        "needle": needle,
        "needle_early": needle & (third == 0),
        "needle_middle": needle & (third == 1),
        "needle_late": needle & (third == 2),
        "now": kind == NOW,
        "seen": kind == SEEN,
    }
    return {name: asked.numpy() for name, asked in groups.items()}


def _share(
    right: Floats, asked: npt.NDArray[np.bool_], samples: npt.NDArray[np.int64]
) -> dict[str, float | None]:
    """Mean of `right` over the asked questions, and its 95 % interval over resampled streams."""
    sums, counts = (right * asked).sum(1), asked.sum(1)
    if not counts.any():
        return {"mean": None, "low": None, "high": None}
    drawn = sums[samples].sum(1) / np.maximum(counts[samples].sum(1), 1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return {"mean": float(sums.sum() / counts.sum()), "low": float(low), "high": float(high)}


# Telling


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    about, rows = report["about"], report["rows"]
    budgets, tokens = about["budgets"], about["tokens"]
    cells = {(row["policy"], row["budget"]): row for row in rows}
    full = cells[FULL, None]
    names = list(dict.fromkeys(row["policy"] for row in rows if row["policy"] != FULL))
    asked = about["questions"]
    lines = [
        f"{about['streams']} streams of {about['frames']} frames = {about['tokens']} tokens, "
        f"{asked['needle']} needles ({asked['needle_early']} in the first third); one decoder of "
        f"{about['parameters']:,} parameters, seed {about['seed']}: a toy, not a video model",
    ]
    if (full["needle"]["mean"] or 0) < GOOD:
        lines.append(
            f"the decoder finds only {_number(full['needle']['mean'])} of the needles with a full "
            "cache: it is not trained enough for the rest to mean much"
        )
    lines += [
        "",
        "shape of a glyph that was shown once: share of right answers [95 % interval] first third",
        f"{'':24}" + "".join(f"{f'{m} of {tokens} tokens':>26}" for m in budgets),
        f"{FULL:24}{_needle(full):>26}",
    ]
    for name in names:
        lines.append(f"{name:24}" + "".join(f"{_needle(cells[name, m]):>26}" for m in budgets))
    lines += ["", "hue of the background now, and whether a colour was there"]
    lines.append(f"{FULL:24}{_others(full):>26}")
    for name in names:
        lines.append(f"{name:24}" + "".join(f"{_others(cells[name, m]):>26}" for m in budgets))
    return "\n".join(lines)


def _needle(row: dict[str, Any]) -> str:
    needle = row["needle"]
    interval = f"[{_number(needle['low'])} {_number(needle['high'])}]"
    return f"{_number(needle['mean'])} {interval} {_number(row['needle_early']['mean'])}"


def _others(row: dict[str, Any]) -> str:
    return f"{_number(row['now']['mean'])} {_number(row['seen']['mean'])}"


def _number(x: float | None) -> str:
    return "  -  " if x is None else f"{x:.3f}"


def _say(what: str) -> None:
    print(f"bench: {what} ...", file=sys.stderr, flush=True)
