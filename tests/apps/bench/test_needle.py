"""The needle benchmark: a true world, a reader that is its decoder, a report that adds up."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator

from streamgen.apps.bench.needle import reader as reading
from streamgen.apps.bench.needle import run as running
from streamgen.apps.bench.needle.model import Decoder, Shape, rotate, rotation
from streamgen.apps.bench.needle.reader import Reader
from streamgen.apps.bench.needle.run import load_or_train, run_needle
from streamgen.apps.bench.needle.train import Recipe, Training, accuracy
from streamgen.apps.bench.needle.world import (
    CELLS,
    COLOURS,
    FIRST_COLOUR,
    GLYPHS,
    HUES,
    NEVER,
    NOW,
    PAD,
    SEEN,
    SHAPE,
    STRENGTH,
    SUM,
    make_streams,
    training_questions,
)
from streamgen.cache.eviction import LayerBudget
from streamgen.errors import InvalidRequest, WeightsError
from streamgen.kernels import reference

FRAMES = 12


def draw(seed: int = 0) -> Generator:
    """A generator of that seed."""
    return Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """Three layers with random weights; large queries and keys, so that attention is not flat."""
    torch.manual_seed(0)
    decoder = Decoder(Shape(layers=3, width=24, heads=2)).eval().requires_grad_(False)
    for layer in decoder.stack:
        layer.qkv.weight[:48] *= 6
    return decoder


# The world


def test_the_pictures_tell_the_truth() -> None:
    """Each event is its glyph in its frame, within the noise; every other patch is background."""
    streams = make_streams(8, FRAMES, draw())
    patches = streams.patches.unflatten(1, (FRAMES, CELLS)).unflatten(-1, (8, 8, 3))
    background = STRENGTH * HUES[streams.hue]
    for stream in range(8):
        events = [c for c in range(len(COLOURS)) if streams.when[stream, c] < NEVER]
        assert 3 <= len(events) <= 6
        assert len({int(streams.when[stream, c]) for c in events}) == len(events)
        for colour in events:
            glyph = GLYPHS[streams.shape[stream, colour]][..., None] * COLOURS[colour]
            frame = patches[stream, streams.when[stream, colour]]
            spread = (frame - glyph).std(dim=(1, 2, 3))
            assert (spread < 0.07).sum() == 1
        plain = [f for f in range(FRAMES) if f not in streams.when[stream].tolist()]
        rest = patches[stream, plain] - background[stream, plain][:, None, None, None]
        assert rest.std() == pytest.approx(0.12, rel=0.1) and abs(rest.mean()) < 0.01


def test_the_answers_are_the_truth() -> None:
    """Every training question against what is known of its stream, one by one."""
    streams = make_streams(6, FRAMES, draw(1))
    questions = training_questions(streams, draw(2))
    assert questions.words.shape == (6, 16, 2)
    for stream in range(6):
        kinds = questions.words[stream, :, 0].tolist()
        assert [kinds.count(kind) for kind in (SHAPE, NOW, SEEN, SUM)] == [9, 2, 2, 3]
        for index, (kind, word) in enumerate(questions.words[stream].tolist()):
            time, answer = int(questions.time[stream, index]), int(questions.answer[stream, index])
            assert FRAMES // 3 <= time < FRAMES
            shown = [bool(when <= time) for when in streams.when[stream]]
            assert questions.seen[stream, index].tolist() == shown
            if kind in (NOW, SUM):
                assert word == PAD
                assert answer == (int(streams.hue[stream, time]) if kind == NOW else -1)
                continue
            colour = word - FIRST_COLOUR
            if kind == SEEN:
                assert answer == shown[colour]
            else:
                assert answer == (int(streams.shape[stream, colour]) if shown[colour] else -1)
                assert shown[colour] or not any(shown)


def test_the_final_questions() -> None:
    """Once what is now, and for each colour its shape and whether it was there; ages by thirds."""
    streams = make_streams(5, FRAMES, draw(3))
    questions = running.final_questions(streams)
    groups = running._groups(streams, questions)
    happened = streams.when < NEVER
    assert questions.words[0, :, 0].tolist() == [NOW] + [SHAPE] * 7 + [SEEN] * 7
    assert groups["needle"][:, 1:8].tolist() == happened.tolist()
    assert groups["now"].sum() == 5 and groups["seen"].sum() == 35
    early = (streams.when < FRAMES / 3).numpy()
    assert groups["needle_early"][:, 1:8].tolist() == early.tolist()
    thirds = sum(groups[f"needle_{age}"].sum() for age in ("early", "middle", "late"))
    assert thirds == groups["needle"].sum() == happened.sum()


# The decoder


def test_the_decoder_has_its_size() -> None:
    """293,877 parameters, 1.2 MB."""
    assert sum(p.numel() for p in Decoder().parameters()) == 293_877


def test_only_differences_of_positions_matter() -> None:
    """The product of a turned query and a turned key is the same anywhere."""
    q, k = torch.randn(2, 1, 1, 2, 12, generator=draw())

    def product(at: int) -> torch.Tensor:
        turned = [rotate(x, rotation(torch.tensor([p]), 12)) for x, p in ((q, at + 7), (k, at))]
        return (turned[0] * turned[1]).sum(-1)

    torch.testing.assert_close(product(0), product(90), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(product(0), (q * k).sum(-1))


def test_a_question_sees_its_past_and_nothing_else(decoder: Decoder) -> None:
    """Neither other questions nor later frames change an answer; an earlier frame does."""
    streams = make_streams(1, FRAMES, draw(4))
    words = torch.tensor([[[NOW, PAD], [SHAPE, FIRST_COLOUR], [SEEN, FIRST_COLOUR + 1]]])
    limit = torch.tensor([[20, 24, 48]])
    together = torch.cat(decoder(streams.patches, words, limit), dim=-1)
    alone = torch.cat(decoder(streams.patches, words[:, 1:2], limit[:, 1:2]), dim=-1)
    torch.testing.assert_close(together[:, 1:2], alone, atol=1e-5, rtol=1e-5)
    changed = streams.patches.clone()
    changed[:, 24:] = 0
    after = torch.cat(decoder(changed, words, limit), dim=-1)
    torch.testing.assert_close(together[:, :2], after[:, :2])
    assert not torch.allclose(together[:, 2], after[:, 2])


# Training


def test_training_goes_on_where_it_was_left() -> None:
    """Two steps are one step, put away and taken up, and another: bitwise."""
    recipe = Recipe(steps=4, streams=2)
    whole, first, second = (Training(1, recipe) for _ in range(3))
    losses = [whole.advance()[0] for _ in range(2)]
    assert first.advance()[0] == losses[0]
    second.restore(first.state())
    assert second.advance()[0] == losses[1] and second.step == 2
    for ours, theirs in zip(whole.decoder.parameters(), second.decoder.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_recipe() -> None:
    """Streams grow with time; the rate rises, then falls along half a cosine to nothing."""
    recipe = Recipe(steps=1000, warm_up=10)
    assert [recipe.frames(step) for step in (0, 199, 200, 400, 999)] == [
        (8, 8),
        (8, 8),
        (16, 16),
        (16, 32),
        (16, 32),
    ]
    assert recipe.learning_rate(4) == pytest.approx(3e-3 * 0.5, rel=1e-3)
    assert recipe.learning_rate(500) == pytest.approx(1.5e-3)
    assert recipe.learning_rate(999) < 1e-7


def test_a_folder_keeps_its_decoder(tmp_path: Path) -> None:
    """Trained once and then read; an unfinished training is finished; a damaged file is named."""
    recipe = Recipe(steps=2, streams=2)
    half = Training(3, recipe)
    half.advance()
    torch.save(half.state(), tmp_path / "training.pt")
    made = load_or_train(tmp_path, 3, recipe)
    half.advance()
    read = load_or_train(tmp_path, 99, recipe)
    for theirs in (half.decoder, read):
        for a, b in zip(made.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
    assert [path.name for path in tmp_path.iterdir()] == ["decoder.safetensors"]
    (tmp_path / "decoder.safetensors").write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="delete it to train"):
        load_or_train(tmp_path, 3, recipe)


# The reader


def answers(decoder: Decoder, policy: LayerBudget | None, chunk: int = 16) -> torch.Tensor:
    """Logits of all questions after two streams were read in chunks."""
    streams = make_streams(2, FRAMES, draw(5))
    words = [(int(a), int(b)) for a, b in running.final_questions(streams).words[0]]
    with Reader(decoder, policy, 2, FRAMES * CELLS + 16, seed=0) as reader:
        for part in streams.patches.split(chunk, dim=1):
            reader.read(part)
        return torch.cat(reader.ask(words), dim=-1)


def test_without_eviction_reading_is_one_forward(decoder: Decoder) -> None:
    """In chunks of any size, over tables, the logits are those of one pass over all of it."""
    streams = make_streams(2, FRAMES, draw(5))
    words = running.final_questions(streams).words
    limit = torch.full(words.shape[:2], FRAMES * CELLS)
    wanted = torch.cat(decoder(streams.patches, words, limit), dim=-1)
    for chunk in (4, 16, 20):
        got = answers(decoder, None, chunk)
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("preset", ["hermes", "shared", "h2o"])
def test_a_budget_that_is_not_reached_changes_nothing(decoder: Decoder, preset: str) -> None:
    """With room for the whole stream every policy is the full cache."""
    policy = LayerBudget.preset(preset, FRAMES * CELLS)
    torch.testing.assert_close(answers(decoder, policy), answers(decoder, None), atol=1e-5, rtol=0)


@pytest.mark.parametrize("preset", ["hermes", "hermes_token", "guidance", "h2o", "random"])
def test_a_table_a_layer_stays_in_its_budget(decoder: Decoder, preset: str) -> None:
    """After every chunk, and a question leaves nothing behind."""
    streams = make_streams(2, FRAMES, draw(6))
    with Reader(decoder, LayerBudget.preset(preset, 10), 2, 26, seed=0) as reader:
        for part in streams.patches.split(16, dim=1):
            reader.read(part)
            for _ in range(2):
                reader.ask([(NOW, PAD)])
            assert {table.length for tables in reader.tables for table in tables} == {10}
            assert [len(tables) for tables in reader.tables] == [3, 3]


def test_streams_do_not_meet(decoder: Decoder) -> None:
    """What is answered about a stream does not depend on the one that is read beside it."""
    streams = make_streams(2, FRAMES, draw(7))
    policy = LayerBudget.preset("hermes_token", 8)

    def read(patches: torch.Tensor) -> torch.Tensor:
        with Reader(decoder, policy, len(patches), 24, seed=0) as reader:
            for part in patches.split(16, dim=1):
                reader.read(part)
            return torch.cat(reader.ask([(NOW, PAD)]), dim=-1)

    both = read(streams.patches)
    torch.testing.assert_close(both[1:], read(streams.patches[1:]), atol=1e-5, rtol=1e-5)


def test_moving_all_positions_changes_nothing(decoder: Decoder) -> None:
    """Keys are turned where they are read, so only differences of positions count."""
    streams = make_streams(1, FRAMES, draw(8))
    with Reader(decoder, LayerBudget.preset("hermes", 12), 1, 28, seed=0) as reader:
        for part in streams.patches.split(16, dim=1):
            reader.read(part)
        here = torch.cat(reader.ask([(NOW, PAD)]), dim=-1)
        for table in reader.tables[0]:
            table.renumber(table.positions + 40)
        there = torch.cat(reader.ask([(NOW, PAD)]), dim=-1)
        reader.tables[0][0].renumber(reader.tables[0][0].positions[::-1].copy())
        elsewhere = torch.cat(reader.ask([(NOW, PAD)]), dim=-1)
    torch.testing.assert_close(here, there, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(here, elsewhere, atol=1e-2)


def test_attention_that_is_received(decoder: Decoder) -> None:
    """Each token read gives away exactly 1, mean over heads, to what it sees."""
    streams = make_streams(1, 8, draw(9))
    with Reader(decoder, LayerBudget.preset("h2o", 64), 1, 64, seed=0) as reader:
        for part in streams.patches.split(16, dim=1):
            reader.read(part)
        for mass in reader._mass[0]:
            assert mass.shape == (32,) and mass.sum() == pytest.approx(32, rel=1e-5)


def test_guidance_is_the_attention_of_the_prompt(decoder: Decoder) -> None:
    """Mean over heads and words, softmax over the prompt's own words too: so it sums to less."""
    streams = make_streams(1, 8, draw(10))
    policy = LayerBudget(64)
    with Reader(decoder, policy, 1, 64, seed=0) as reader:
        reader.read(streams.patches)
        (guidance,) = reader._guidance()
        x, weights = reader._probe([(NOW, PAD, SUM, PAD)])
        _, alone = reader._probe([(SUM, PAD)])
    assert policy.prompts(3) == ("mixed", "mixed", "global")
    torch.testing.assert_close(guidance[1], weights[1][0].mean(0))
    torch.testing.assert_close(guidance[2], alone[2][0].mean(0))
    assert guidance[2].shape == (32,) and 0 < guidance[2].sum() < 1


def test_attention_with_weights() -> None:
    """The output is that of the reference; weights are a softmax."""
    q, k, v = (torch.randn(2, n, 2, 6, generator=draw(n)) for n in (3, 5, 5))
    mask = torch.ones(3, 5, dtype=torch.bool).tril(2)
    out, weights = reading.attend(q, k, v, mask)
    torch.testing.assert_close(out, reference.attend(q, k, v, mask))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 3))
    assert not weights[..., ~mask].any()


# The report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One quick run, read back from its file."""
    path = tmp_path_factory.mktemp("needle") / "needle.json"
    returned = run_needle(json_path=path, threads=1, quick=True)
    read: dict[str, Any] = json.loads(path.read_text())
    assert read == json.loads(json.dumps(returned))
    return read


def test_every_policy_is_in_the_report(report: dict[str, Any]) -> None:
    """One row without a budget and one for each policy and budget; shares with intervals."""
    rows = report["rows"]
    assert [row["policy"] for row in rows] == [running.FULL, *running.POLICIES]
    assert [row["budget"] for row in rows] == [None] + [16] * len(running.POLICIES)
    for row in rows:
        for group in ("needle", "now", "seen"):
            share = row[group]
            assert 0 <= share["low"] <= share["mean"] <= share["high"] <= 1
        assert ("needle_minus_hermes" in row) == (row["budget"] is not None)
    hermes = next(row for row in rows if row["policy"] == running.HERMES)
    assert hermes["needle_minus_hermes"] == {"mean": 0, "low": 0, "high": 0}
    assert report["about"]["questions"]["seen"] == 14


def test_the_table_says_what_it_is(report: dict[str, Any]) -> None:
    """Every policy twice, and a warning that an untrained decoder shows nothing."""
    text = running.table(report)
    for name in (running.FULL, *running.POLICIES):
        assert sum(line.startswith(name) for line in text.splitlines()) >= 2
    assert "a toy" in text and "not trained enough" in text


def test_intervals() -> None:
    """All right is 1 without doubt; half of the streams right is a half, give or take."""
    asked = np.ones((40, 5), dtype=bool)
    samples = np.random.default_rng(0).integers(40, size=(500, 40))
    sure = running._share(np.ones((40, 5)), asked, samples)
    assert sure == {"mean": 1, "low": 1, "high": 1}
    half = running._share(np.repeat(np.arange(40) % 2, 5).reshape(40, 5) * 1.0, asked, samples)
    wide = 1.96 * math.sqrt(0.25 / 40)  # streams count, not questions
    assert half["mean"] == 0.5
    assert half["high"] == pytest.approx(0.5 + wide, abs=0.06) and half["low"] is not None
    assert half["low"] == pytest.approx(0.5 - wide, abs=0.06)
    assert running._share(np.ones((40, 5)), ~asked, samples)["mean"] is None


def test_accuracy_counts_only_what_has_an_answer() -> None:
    """Of a kind; -1 is no answer."""
    streams = make_streams(4, FRAMES, draw(11))
    questions = training_questions(streams, draw(12))
    right = torch.nn.functional.one_hot(questions.answer.clamp(min=0), 8).float()
    logits = (right, right[..., :4], right[..., :2], right)
    assert accuracy(logits, questions, SHAPE) == accuracy(logits, questions, NOW) == 1
    none = replace(questions, answer=torch.full_like(questions.answer, -1))
    assert math.isnan(accuracy(logits, none, SHAPE))


@pytest.mark.parametrize("wrong", [{"streams": 0}, {"frames": 5}, {"budgets": (16, 1)}], ids=str)
def test_refused_numbers(wrong: dict[str, Any]) -> None:
    """The value and what is accepted."""
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        run_needle(**wrong)
