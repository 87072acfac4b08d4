"""One walk: same seed and same track, same frames, whatever happens on the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import tiny_world

from streamgen.cache import BlockPool
from streamgen.errors import InvalidRequest, PoolFull, SessionClosed
from streamgen.frames import Event
from streamgen.pipelines.world import WorldPipeline
from streamgen.session import Session, _Track

KEYS = ("w", "wa", "", "s", "de", "q", "wd", "a")
BRICK, SNOW = "a brick maze at night", "snow"
HISTORIES = (0.0, 8.0)


@pytest.fixture
def world() -> WorldPipeline:
    """Window 6, sink 1, chunks of 2 frames, 20 frames a second."""
    return tiny_world()


def step(session: Session) -> np.ndarray:
    """One chunk: a row of bytes for each frame, its pixels and, as they tell more, its latents."""
    frames = session.step().frames
    latents = torch.stack(session._state.latents[-len(frames) :]).numpy()
    rows = (frames.reshape(len(frames), -1), latents.reshape(len(frames), -1).view(np.uint8))
    return np.concatenate(rows, axis=1)


def walk(session: Session, chunks: int) -> np.ndarray:
    """Step with keys that depend on the chunk's number alone; a row for each frame, as `step`."""
    rows = []
    for _ in range(chunks):
        session.act(keys=set(KEYS[session.frame // 2 % len(KEYS)]))
        rows.append(step(session))
    return np.concatenate(rows)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def tensors_of(session: Session) -> dict[int, tuple[Tensor, Tensor]]:
    """K and V of every committed frame, `[layers, tokens, heads, head_dim]`."""
    table = session._table
    return {
        frame: tuple(torch.stack([x[block.slot] for x in side]) for side in (k, v))
        for k, v in ((table.pool.k, table.pool.v),)
        for frame, block in table.entries
    }


def watch_actions(world: WorldPipeline, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The keys of every frame that is denoised from now on."""
    seen: list[list[str]] = []
    denoise = world.engine.denoise

    def spy(history: Any, prompt: Any, actions_FA: Tensor, *rest: Any) -> Tensor:
        for row in actions_FA.tolist():
            assert set(row) <= {0.0, 1.0}
            seen.append([key for key, on in zip(world.config.keys, row, strict=True) if on])
        return denoise(history, prompt, actions_FA, *rest)

    monkeypatch.setattr(world.engine, "denoise", spy)
    return seen


class Break(Exception):
    """What a sabotaged step raises."""


def break_at(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int = 0
) -> Callable[[], None]:
    """Make call number `call` of a method, and those after it, fail; returns what mends it."""
    method, calls = getattr(owner, name), [0]

    def sabotaged(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > call:
            raise Break
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, sabotaged)
    return lambda: monkeypatch.setattr(owner, name, method)


# A chunk


def test_chunks(world: WorldPipeline) -> None:
    """Numbered frames of the world's size, as array and tensor, with a timing that adds up."""
    session = world.session(prompt=BRICK)
    for index in range(4):
        assert session.frame == 2 * index
        chunk = session.step()
        assert (chunk.index, chunk.first_frame) == (index, 2 * index)
        assert chunk.frames.shape == (2, 16, 24, 3) and chunk.frames.dtype == np.uint8
        assert same(chunk.tensor.numpy(), chunk.frames)
        timing = chunk.timing
        parts = (timing.dit, timing.cache, timing.decode, timing.other)
        assert min(parts) >= 0 and sum(parts) == pytest.approx(timing.total)


def test_stream(world: WorldPipeline) -> None:
    """So many chunks, or for ever; between two of them the user may act."""
    session, other = world.session(seed=3), world.session(seed=3)
    frames = []
    for chunk in session.stream(chunks=4):
        frames.append(chunk.frames)
        session.act(keys={"w"})
    endless = other.stream()
    expected = []
    for _ in range(4):
        expected.append(next(endless).frames)
        other.act(keys={"w"})
    assert same(np.concatenate(frames), np.concatenate(expected))


def test_defaults(world: WorldPipeline) -> None:
    """No prompt: the first suggestion. The session says what it is."""
    session = world.session(seed=5)
    assert session.text == world.config.suggestions[0]
    assert (session.seed, session.fps, session.keys) == (5, 20, frozenset())
    assert (session.track, session.closed, session.frame) == ([], False, 0)


# Same seed, same track


@pytest.mark.parametrize("positions", ["sliding_sink", "absolute"])
@pytest.mark.parametrize("prediction", ["flow", "sample"])
def test_same_seed_same_frames(positions: str, prediction: str) -> None:
    """Bitwise, in the same world and in another one of the same weights."""
    world = tiny_world(positions=positions, prediction=prediction)
    first = walk(world.session(BRICK, seed=1), 8)
    assert same(walk(world.session(BRICK, seed=1), 8), first)
    again = tiny_world(positions=positions, prediction=prediction)
    assert same(walk(again.session(BRICK, seed=1), 8), first)


def test_everything_matters(world: WorldPipeline) -> None:
    """Another seed, prompt or key gives other frames."""
    plain = walk(world.session(BRICK, seed=1), 3)
    assert not same(walk(world.session(BRICK, seed=2), 3), plain)
    assert not same(walk(world.session(SNOW, seed=1), 3), plain)
    session = world.session(BRICK, seed=1)
    for _ in range(2):
        session.act(keys={"w"})
        step(session)
    assert not same(step(session), plain[4:])


def test_history_changes_nothing(world: WorldPipeline) -> None:
    """How far back a session can go has no influence on its frames."""
    plain = walk(world.session(BRICK, seed=1, history_seconds=0), 8)
    for seconds in (0.1, 0.3, 8.0):
        assert same(walk(world.session(BRICK, seed=1, history_seconds=seconds), 8), plain)


def test_two_sessions_in_turns(world: WorldPipeline) -> None:
    """Stepped in turns, each makes the frames it makes alone."""
    alone = [walk(tiny_world().session(BRICK, seed=seed), 8) for seed in (1, 2)]
    sessions = [world.session(BRICK, seed=seed) for seed in (1, 2)]
    turns = [[walk(session, 1) for session in sessions] for _ in range(8)]
    for index in range(2):
        assert same(np.concatenate([turn[index] for turn in turns]), alone[index])


def test_global_generator_is_left_alone(world: WorldPipeline) -> None:
    """A session draws from its own generator only."""
    state = torch.get_rng_state()
    walk(world.session(seed=1), 2)
    assert torch.equal(torch.get_rng_state(), state)


# Rewind


@pytest.mark.parametrize("how", ["mark", "frames", "seconds"])
def test_rewind_and_replay(world: WorldPipeline, how: str) -> None:
    """Back by 6 frames, the same actions: bitwise the same frames, as often as one likes."""
    session = world.session(BRICK, seed=1)
    walk(session, 5)
    mark = session.mark()
    first = walk(session, 3)
    for _ in range(3):
        back = {
            "mark": lambda: session.rewind(to=mark),
            "frames": lambda: session.rewind(frames=6),
            "seconds": lambda: session.rewind(seconds=0.3),
        }[how]()
        assert back == session.frame == 10 == mark.frame
        assert same(walk(session, 3), first)


def test_rewind_to_the_start(world: WorldPipeline) -> None:
    """Frame 0 is a boundary like all others, sink and first chunk included."""
    session = world.session(BRICK, seed=1)
    first = walk(session, 6)
    assert session.rewind(frames=12) == 0
    assert same(walk(session, 6), first)


def test_rewind_then_other_keys(world: WorldPipeline) -> None:
    """Another way from there equals another walk that turned off at once."""
    session, other = world.session(seed=1), world.session(seed=1)
    walk(session, 6), walk(other, 4)
    session.rewind(frames=4)
    for one in (session, other):
        one.act(keys={"e"})
    assert all(same(step(session), step(other)) for _ in range(5))


@pytest.mark.parametrize(
    ("back", "stands_at"), [(0, 16), (1, 14), (2, 14), (3, 12), (12, 4), (999, 4)]
)
def test_where_a_rewind_lands(world: WorldPipeline, back: int, stands_at: int) -> None:
    """On the newest boundary at least that far back, or on the oldest that is remembered."""
    session = world.session(seed=1, history_seconds=0.6)
    walk(session, 8)
    assert session.rewind(frames=back) == stands_at == session.frame


def test_rewind_restores_what_the_session_says(world: WorldPipeline) -> None:
    """Prompt, keys and track go back; what was asked and not yet applied is dropped."""
    session = world.session(BRICK, seed=1)
    walk(session, 3)
    keys, track = session.keys, session.track
    session.act(keys={"q"})
    session.prompt(SNOW)
    session.step()
    assert (session.text, session.keys) == (SNOW, {"q"})
    session.act(keys={"e"})
    session.prompt("day")
    session.rewind(frames=2)
    assert (session.text, session.keys, session.track) == (BRICK, keys, track)
    assert session.step().applied == ()


def test_rewind_takes_one_argument(world: WorldPipeline) -> None:
    """None, two, or a negative one: refused, and nothing changes."""
    session = world.session(seed=1)
    walk(session, 2)
    for wrong in ({}, {"frames": 2, "seconds": 1.0}, {"frames": -2}, {"seconds": -0.1}):
        with pytest.raises(InvalidRequest):
            session.rewind(**wrong)
    assert session.frame == 4


def test_rewind_with_nothing_remembered(world: WorldPipeline) -> None:
    """Is refused and says how to remember; the start is the start, and nothing changes."""
    session = world.session(BRICK, seed=1, history_seconds=0)
    assert session.rewind(frames=2) == session.rewind(seconds=1) == 0
    first = walk(session, 2)
    mark = session.mark()
    for back in ({"frames": 2}, {"seconds": 0.1}):
        with pytest.raises(InvalidRequest, match=r"before frame 4 .*above 0 \(here 0\).* mark"):
            session.rewind(**back)
    assert session.rewind(frames=0) == session.rewind(to=mark) == session.frame == 4
    expected = walk(world.session(BRICK, seed=1), 4)
    assert same(np.concatenate([first, walk(session, 2)]), expected)


def test_marks_outlive_the_history(world: WorldPipeline) -> None:
    """A mark works at any later time; a released one is refused by name."""
    session = world.session(seed=1, history_seconds=0.2)
    walk(session, 2)
    mark = session.mark()
    first = walk(session, 12)
    assert session.rewind(to=mark) == 4
    assert same(walk(session, 12), first)
    mark.release()
    with pytest.raises(InvalidRequest, match="released"):
        session.rewind(to=mark)


def test_history_is_that_of_the_walk(world: WorldPipeline) -> None:
    """After a jump to a mark on another branch, going back by frames never ends on the branch that
    was left."""
    session, witness = world.session(BRICK, seed=1), world.session(BRICK, seed=1)
    walk(session, 5), walk(witness, 5)
    mark = session.mark()
    session.rewind(frames=8)
    for _ in range(6):  # another way, past the mark's frame
        session.act(keys={"e"})
        session.step()
    session.rewind(to=mark)
    back = session.rewind(frames=4)
    if back < 10:  # it may also remember nothing and stay
        witness.rewind(frames=10 - back)
    assert session.track == witness.track
    assert same(walk(session, 4), walk(witness, 4))


# Fork


def test_twin_goes_the_same_way(world: WorldPipeline) -> None:
    """Parent and twin, stepped in turns with the same keys, make the same frames."""
    session = world.session(BRICK, seed=1)
    walk(session, 5)
    twin = session.fork()
    assert (twin.frame, twin.text, twin.track) == (session.frame, session.text, session.track)
    for _ in range(6):
        assert same(walk(session, 1), walk(twin, 1))


def test_twins_part_without_touching(world: WorldPipeline) -> None:
    """Each goes on as if the other were not there, closing included."""
    expected = walk(tiny_world().session(BRICK, seed=1), 12)
    session = world.session(BRICK, seed=1)
    walk(session, 5)
    twin, third = session.fork(), session.fork()
    twin.prompt(SNOW, recache="window_causal")
    for _ in range(3):
        twin.act(keys={"e"})
        assert not same(step(twin), walk(session, 1))
    twin.close()
    assert same(walk(session, 4), expected[16:])
    session.close()
    assert same(walk(third, 7), expected[10:])


def test_twin_has_a_history_of_its_own(world: WorldPipeline) -> None:
    """It can go back past the fork, also when its parent is closed."""
    session = world.session(BRICK, seed=1)
    first = walk(session, 6)
    twin = session.fork()
    session.rewind(frames=8)
    session.close()
    assert twin.rewind(frames=8) == 4
    assert same(walk(twin, 4), first[4:])


def test_twin_can_rewind_to_its_parents_mark(world: WorldPipeline) -> None:
    """Marks belong to the walk, not to the session that made them."""
    session = world.session(BRICK, seed=1)
    walk(session, 3)
    mark = session.mark()
    first = walk(session, 3)
    twin = session.fork()
    assert twin.rewind(to=mark) == 6
    assert same(walk(twin, 3), first)


def test_sharing_costs_no_bytes(world: WorldPipeline) -> None:
    """Forks and marks take no slot until one of them steps."""
    session = world.session(seed=1, history_seconds=0)
    walk(session, 5)
    before = world.engine.pool.stats()
    twins, marks = [session.fork() for _ in range(5)], [session.mark() for _ in range(5)]
    after = world.engine.pool.stats()
    assert (after.live, after.free, after.lanes) == (before.live, before.free, before.lanes)
    for one in twins:
        one.close()
    for mark in marks:
        mark.release()


# Keys


def test_keys_are_held(world: WorldPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the next chunk until the next `act`; but no key led to the first frames."""
    seen = watch_actions(world, monkeypatch)
    session = world.session()
    session.act(keys={"w"})
    for _ in range(3):
        session.step()
    session.act(keys=["a", "w"])
    session.step()
    session.act(keys=())
    session.step()
    assert seen == [[], [], ["w"], ["w"], ["w"], ["w"], ["w", "a"], ["w", "a"], [], []]


def test_first_keys_are_held_on(world: WorldPipeline) -> None:
    """Asked before the first chunk, they shape the second."""
    session, other = world.session(seed=1), world.session(seed=1)
    session.act(keys={"w"})
    session.step(), other.step()
    other.act(keys={"w"})
    assert same(step(session), step(other))


def test_a_pulse_counts_once(world: WorldPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pressed and released inside one chunk: that chunk has the key, the next has not."""
    seen = watch_actions(world, monkeypatch)
    session = world.session()
    session.step()
    session.act(keys={"q"})
    session.act(keys=())
    session.step()
    session.step()
    assert seen == [[], [], ["q"], ["q"], [], []]
    assert session.keys == frozenset()


def test_opposites_cancel(world: WorldPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and back together are neither; the other keys stay."""
    seen = watch_actions(world, monkeypatch)
    session = world.session()
    for keys in ({"w"}, {"w", "s"}, {"a", "d", "w"}, set("wasdqe")):
        session.act(keys=keys)
        session.step()
    assert seen[2::2] == [[], ["w"], []]


def test_one_key_as_a_text(world: WorldPipeline) -> None:
    """`act("w")` is `act({"w"})`; "wa" is no key."""
    session = world.session()
    session.act("w")
    with pytest.raises(InvalidRequest, match="'wa'"):
        session.act("wa")
    assert session.step().applied[0].value == ["w"]


def test_unknown_key(world: WorldPipeline) -> None:
    """Refused by name with those that are accepted, and nothing is held or queued."""
    session = world.session()
    with pytest.raises(InvalidRequest, match=r"\['jump'\].*\['w', 's', 'a', 'd', 'q', 'e'\]"):
        session.act(keys={"jump", "w"})
    chunk = session.step()
    assert chunk.applied == () and session.keys == frozenset()


def test_receipts(world: WorldPipeline) -> None:
    """A receipt names the first frame that can contain it, and the chunk that does names it too."""
    session = world.session(BRICK)
    walk(session, 2)
    act, ask = session.act(keys={"w"}), session.prompt(SNOW, recache="off")
    assert (act.kind, ask.kind) == ("act", "prompt")
    assert act.applies_at_frame == ask.applies_at_frame == 4
    assert act.id != ask.id
    chunk = session.step()
    assert chunk.first_frame == 4
    assert chunk.applied == (
        Event(act.id, "act", ["w"], 4),
        Event(ask.id, "prompt", {"text": SNOW, "recache": "off"}, 4),
    )
    assert session.track[-2:] == list(chunk.applied)
    assert session.step().applied == ()


def test_receipt_from_inside_a_step(world: WorldPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked while a chunk is being made, it applies to the next one, and the receipt says so."""
    session, receipts = world.session(BRICK), []
    session.step()
    denoise = world.engine.denoise

    def meanwhile(*args: Any) -> Tensor:
        receipts.append(session.act(keys={"w"}))
        return denoise(*args)

    monkeypatch.setattr(world.engine, "denoise", meanwhile)
    assert session.step().applied == ()
    monkeypatch.setattr(world.engine, "denoise", denoise)
    (event,) = session.step().applied
    assert (event.id, event.frame) == (receipts[0].id, 4)
    assert receipts[0].applies_at_frame == 4


def test_a_step_does_not_copy_the_track(world: WorldPipeline) -> None:
    """What was applied before is shared with marks, twins and the next steps, however long it is;
    chunks without an event add nothing."""
    session = world.session(BRICK)
    session.act(keys={"w"})
    session.step()
    track = session._state.track
    session.step()
    assert session._state.track is track is session.mark()._state.track
    session.act(keys=()), session.act(keys={"a"})
    session.step()
    assert session._state.track is not None and session._state.track.before is track
    twin = session.fork()
    twin.act(keys={"q"}), session.act(keys={"e"})
    twin.step(), session.step()
    assert [event.value for event in session.track] == [["w"], [], ["a"], ["e"]]
    assert [event.value for event in twin.track] == [["w"], [], ["a"], ["q"]]


def test_a_long_track(world: WorldPipeline) -> None:
    """Days of it can be listed, and let go of again."""
    session, track = world.session(BRICK), None
    for id in range(200_000):
        track = _Track((Event(id, "act", [], id),), track)
    session._state = replace(session._state, track=track)
    assert [event.id for event in session.track] == list(range(200_000))
    del track
    session._state = replace(session._state, track=None)
    assert session.track == []


# Prompts


def test_a_prompt_applies_at_the_next_chunk(world: WorldPipeline) -> None:
    """From then on the frames are another world's; `text` is the one in force."""
    session, other = world.session(BRICK, seed=1), world.session(BRICK, seed=1)
    walk(session, 3), walk(other, 3)
    session.prompt(SNOW)
    assert session.text == BRICK
    assert not same(walk(session, 1), walk(other, 1))
    assert session.text == SNOW


def test_the_last_of_two_prompts_wins(world: WorldPipeline) -> None:
    """Both are on the track; the frames are those of the second alone."""
    session, other = world.session(BRICK, seed=1), world.session(BRICK, seed=1)
    walk(session, 3), walk(other, 3)
    session.prompt("day")
    session.prompt(SNOW)
    other.prompt(SNOW)
    assert same(walk(session, 3), walk(other, 3))
    assert [event.value["text"] for event in session.track if event.kind == "prompt"] == [
        "day",
        SNOW,
    ]


def test_a_prompt_before_the_first_chunk(world: WorldPipeline) -> None:
    """Is the same as beginning with it."""
    session = world.session(BRICK, seed=1)
    session.prompt(SNOW)
    assert same(walk(session, 4), walk(world.session(SNOW, seed=1), 4))


def test_the_same_prompt_again(world: WorldPipeline) -> None:
    """Changes nothing."""
    session = world.session(BRICK, seed=1)
    walk(session, 3)
    session.prompt(BRICK, recache="window_causal")
    assert same(walk(session, 3), walk(world.session(BRICK, seed=1), 6)[6:])


def test_unknown_words_are_named(world: WorldPipeline) -> None:
    """A warning with the words that are not known and those that are."""
    with pytest.warns(UserWarning, match=r"\['purple', 'ocean'\].* brick stone"):
        session = world.session("a purple ocean maze")
    with pytest.warns(UserWarning, match="'glass'"):
        session.prompt("glass maze")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.prompt(BRICK)


def test_too_long_a_prompt(world: WorldPipeline) -> None:
    """Refused when it is asked, at the start or later, and nothing is queued."""
    long = "a maze at night a maze at night"
    with pytest.raises(InvalidRequest, match="8 words .*up to 6"):
        world.session(long)
    session = world.session(BRICK)
    with pytest.raises(InvalidRequest, match="8 words .*up to 6"):
        session.prompt(long)
    assert session.step().applied == () and session.text == BRICK


def test_unknown_way_to_recache(world: WorldPipeline) -> None:
    """Refused with the three that there are."""
    with pytest.raises(InvalidRequest, match=r"'all': .*last_chunk.*window.*off"):
        world.session().prompt(SNOW, recache="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("recache", ["last_chunk", "window_causal", "window_bidirectional", "off"])
def test_rewind_past_a_switch(world: WorldPipeline, recache: Any) -> None:
    """The old prompt is in force again, in the cache too: the walk without the switch goes on."""
    session, plain = world.session(BRICK, seed=1), world.session(BRICK, seed=1)
    walk(session, 5), walk(plain, 5)
    session.prompt(SNOW, recache)
    switched = walk(session, 4)
    session.rewind(frames=8)
    assert same(walk(session, 4), walk(plain, 4))
    session.rewind(frames=8)
    session.prompt(SNOW, recache)
    assert same(walk(session, 4), switched)


# ReCache: what is rewritten and what is not


def recached(
    world: WorldPipeline, session: Session, how: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[int, tuple[Tensor, Tensor]], dict[int, tuple[Tensor, Tensor]]]:
    """Switch to snow: K and V of the frames before, and when the next chunk begins."""
    before, after, denoise = tensors_of(session), {}, world.engine.denoise

    def look(*args: Any) -> Tensor:
        after.update(tensors_of(session))
        return denoise(*args)

    monkeypatch.setattr(world.engine, "denoise", look)
    session.prompt(SNOW, recache=how)
    session.step()
    monkeypatch.setattr(world.engine, "denoise", denoise)
    return before, after


def worst(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Largest difference in keys or values, `[layers]`."""
    pairs = [(a - b).abs().flatten(1) for a, b in zip(one, other, strict=True)]
    return torch.cat(pairs, dim=1).amax(dim=1)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("positions", ["sliding_sink", "absolute"])
@pytest.mark.parametrize("chunks", [2, 6], ids=["growing", "sliding"])
@pytest.mark.parametrize("how", ["last_chunk", "window_causal", "window_bidirectional", "off"])
def test_recache_rewrites(
    how: str,
    chunks: int,
    positions: str,
    history: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`last_chunk` the newest chunk, `window` all but the sink, `off` nothing. Older frames stay
    bitwise as they were; layer 0 depends on the latents alone and stays too."""
    world = tiny_world(sink=1, window=8, positions=positions)
    session = world.session(BRICK, seed=1, history_seconds=history)
    walk(session, chunks)
    before, after = recached(world, session, how, monkeypatch)
    rewritten = {
        "last_chunk": {2 * chunks - 2, 2 * chunks - 1},
        "window_causal": set(range(1, 2 * chunks)),
        "window_bidirectional": set(range(1, 2 * chunks)),
        "off": set(),
    }[how]
    assert {0, *range(max(0, 2 * chunks - 5), 2 * chunks)} <= set(after)
    # A pass over another number of frames may round its sums otherwise, even in layer 0.
    rounding = 1e-6 if how.startswith("window") else 0.0
    for frame, tensors in after.items():
        change = worst(before[frame], tensors)
        assert change[0] <= (rounding if frame in rewritten else 0.0)
        assert ((change[1:] > 1e-4) if frame in rewritten else (change[1:] == 0)).all()


def test_recache_stays_in_place(world: WorldPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody else holds the frames, they are rewritten in their slots; nothing is copied."""
    session = world.session(BRICK, seed=1, history_seconds=0)
    walk(session, 6)
    slots, stats = dict(session._table.entries), world.engine.pool.stats()
    slots = {frame: block.slot for frame, block in slots.items()}
    monkeypatch.setattr(BlockPool, "_carry", None)
    for how in ("last_chunk", "window_causal", "window_bidirectional"):
        session._recache(how)
        assert {frame: block.slot for frame, block in session._table.entries} == slots
        assert world.engine.pool.stats() == stats


@pytest.mark.parametrize("positions", ["sliding_sink", "absolute"])
@pytest.mark.parametrize("sink", [0, 2])
def test_window_recache_is_a_causal_replay(
    sink: int, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the window grows: the cache of a session whose chunks but the sink's were all committed
    under the new prompt, one after the other."""
    world = tiny_world(sink=sink, window=10, positions=positions)
    session, engine = world.session(BRICK, seed=1), world.engine
    walk(session, 4)
    latents, actions = session._state.latents, session._state.actions
    _, after = recached(world, session, "window_causal", monkeypatch)
    replay, other = engine.table(), world.session(BRICK)
    for first in range(0, 8, 2):
        with replay.chunk(2) as chunk:
            engine.store(
                torch.stack(latents[first : first + 2]),
                engine.history(chunk),
                engine.prompt(BRICK if first < sink else SNOW),
                torch.stack(actions[first : first + 2]),
            )
            chunk.commit()
    other._table = replay
    expected = tensors_of(other)
    assert expected.keys() == after.keys()
    for frame, pair in expected.items():
        for ours, theirs in zip(after[frame], pair, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sink", [0, 1])
def test_window_recache_under_the_same_prompt(sink: int) -> None:
    """Recomputing what is there, before the window slides, gives what is there."""
    session = tiny_world(sink=sink, window=10).session(BRICK, seed=1)
    walk(session, 5)
    before = tensors_of(session)
    session._recache("window_causal")
    for frame, pair in tensors_of(session).items():
        for ours, theirs in zip(pair, before[frame], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_ways_to_recache_differ(world: WorldPipeline) -> None:
    """Each gives another next frame."""
    frames = []
    for how in ("last_chunk", "window_causal", "window_bidirectional", "off"):
        session = world.session(BRICK, seed=1)
        walk(session, 5)
        session.prompt(SNOW, recache=how)  # type: ignore[arg-type]
        frames.append(step(session))
    for one, other in combinations(frames, 2):
        assert not same(one, other)


# A step that fails


FAILURES = {
    "denoise": (lambda w: w.engine, "denoise", 0),
    "store of the recache": (lambda w: w.engine, "store", 0),
    "store of the chunk": (lambda w: w.engine, "store", 1),
    "decode": (lambda w: w.engine.codec, "decode", 0),
}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("chunks", [1, 6])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_step_can_be_repeated(
    world: WorldPipeline,
    failure: str,
    chunks: int,
    history: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys and a prompt are queued and the step fails, twice: nothing has changed, nothing is lost,
    and the next try makes the frames that it would have made."""

    def make(session: Session) -> Session:
        walk(session, chunks)
        session.act(keys={"e"})
        session.act(keys={"a"})
        session.prompt(SNOW)
        return session

    expected = make(tiny_world().session(BRICK, seed=1))
    session = make(world.session(BRICK, seed=1, history_seconds=history))
    was = (session.frame, session.text, session.keys, session.track)
    owner, name, call = FAILURES[failure]
    for _ in range(2):
        mend = break_at(monkeypatch, owner(world), name, call)
        with pytest.raises(Break):
            session.step()
        mend()
        assert (session.frame, session.text, session.keys, session.track) == was
        world.engine.pool.check()
    for _ in range(4):
        assert same(step(session), step(expected))
        assert session.track == expected.track


@pytest.mark.parametrize("history", HISTORIES)
def test_a_prompt_after_a_failed_step(
    world: WorldPipeline, history: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that failed has begun to push frames out; a ReCache can still follow it."""
    session = world.session(BRICK, seed=1, history_seconds=history)
    plain = world.session(BRICK, seed=1)
    walk(session, 6), walk(plain, 6)
    mend = break_at(monkeypatch, world.engine, "denoise")
    with pytest.raises(Break):
        session.step()
    mend()
    for one in (session, plain):
        one.prompt(SNOW, recache="window_causal")
    frames = walk(session, 3)
    if history:  # without one, what was pushed out is gone, and a part of the ReCache with it
        assert same(frames, walk(plain, 3))
    assert session.text == SNOW and session.frame == 18


def test_what_is_asked_during_a_failed_step(
    world: WorldPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`act` and `prompt` may come from other threads at any time; a failure loses none of them."""
    session = world.session(BRICK, seed=1)
    session.step()
    session.act(keys={"w"})

    def meanwhile(*args: Any) -> Tensor:
        session.act(keys={"a"})
        raise Break

    denoise = world.engine.denoise
    monkeypatch.setattr(world.engine, "denoise", meanwhile)
    with pytest.raises(Break):
        session.step()
    monkeypatch.setattr(world.engine, "denoise", denoise)
    assert [event.value for event in session.step().applied] == [["w"], ["a"]]


def test_history_after_a_failed_step(world: WorldPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going back works as before."""
    session = world.session(BRICK, seed=1)
    first = walk(session, 6)
    mend = break_at(monkeypatch, world.engine, "denoise")
    with pytest.raises(Break):
        session.step()
    mend()
    assert session.rewind(frames=4) == 8
    assert same(walk(session, 2), first[8:])


# Memory


@pytest.mark.parametrize("positions", ["sliding_sink", "absolute"])
def test_steady_state_copies_nothing(positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a history: no block is carried, no slot taken, and attention reads one address."""
    world = tiny_world(positions=positions, max_sessions=1, history_frames=0)
    session, pool = world.session(seed=1, history_seconds=0), world.engine.pool
    walk(session, 4)
    stats, views = pool.stats(), set()
    monkeypatch.setattr(BlockPool, "_carry", None)
    monkeypatch.setattr(BlockPool, "copy", None)
    attend = world.engine.history

    def look(chunk: Any, *rest: Any) -> Any:
        views.add(tuple((x.data_ptr(), x.shape) for x in chunk.kv(1)))
        return attend(chunk, *rest)

    monkeypatch.setattr(world.engine, "history", look)
    walk(session, 12)
    assert pool.stats() == stats and len(views) == 1


def test_history_is_bounded(world: WorldPipeline) -> None:
    """A session takes its lane, its sink and the frames it can go back to, and no more."""
    session, pool = world.session(seed=1, history_seconds=0.5), world.engine.pool
    walk(session, 12)
    free = pool.stats().free
    walk(session, 12)
    assert pool.stats().free == free == pool.stats().total - (6 + 1 + 10)


def test_a_full_history_leaves_room_for_a_switch() -> None:
    """The pool is made for `max_sessions` with their history; prompts must not fill it."""
    world = tiny_world(max_sessions=1, history_frames=20)
    session = world.session(BRICK, seed=1, history_seconds=1.0)
    walk(session, 14)
    for text, how in (
        (SNOW, "last_chunk"),
        ("day", "window_causal"),
        (BRICK, "window_bidirectional"),
    ):
        session.prompt(text, recache=how)  # type: ignore[arg-type]
        walk(session, 1)
    assert session.rewind(frames=4) < 34


@pytest.mark.parametrize("how", ["last_chunk", "window_causal", "window_bidirectional"])
def test_a_switch_needs_no_spare_room(how: Any) -> None:
    """Without a history, in a pool that has room for one session's window and sink only."""
    world = tiny_world(max_sessions=1, history_frames=0)
    session, roomy = (w.session(BRICK, seed=1, history_seconds=0) for w in (world, tiny_world()))
    for chunks in (1, 5):
        for one in (session, roomy):
            walk(one, chunks)
            one.prompt(SNOW if one.text == BRICK else BRICK, recache=how)
        assert same(walk(session, 1), walk(roomy, 1))


def test_close_gives_everything_back(world: WorldPipeline) -> None:
    """Sessions, forks and marks, in any order; closing twice is fine."""
    pool = world.engine.pool
    empty = pool.stats()
    session = world.session(BRICK, seed=1)
    walk(session, 5)
    mark, twin = session.mark(), session.fork()
    twin.prompt(SNOW, recache="window_causal")
    walk(twin, 3)
    third = twin.fork()
    session.close(), session.close()
    walk(third, 2)
    third.close(), twin.close()
    mark.release(), mark.release()
    assert pool.stats() == empty
    pool.check()


def test_with_statement(world: WorldPipeline) -> None:
    """Leaving it closes the session, also by an exception."""
    with pytest.raises(Break), world.session(seed=1) as session:
        session.step()
        raise Break
    assert session.closed and world.engine.pool.stats().live == 0


def test_a_closed_session(world: WorldPipeline) -> None:
    """Says so, whatever is asked of it."""
    session = world.session(seed=1)
    session.step()
    mark = session.mark()
    session.close()
    verbs: Iterable[Callable[[], object]] = (
        session.step,
        session.mark,
        session.fork,
        lambda: session.act(keys={"w"}),
        lambda: session.prompt(SNOW),
        lambda: session.rewind(frames=2),
        lambda: session.rewind(to=mark),
        lambda: next(session.stream(1)),
    )
    for verb in verbs:
        with pytest.raises(SessionClosed, match="closed"):
            verb()
    mark.release()


def test_too_many_sessions() -> None:
    """The one too many is told so and stays as it was; closing another makes room for it."""
    world = tiny_world(max_sessions=2, history_frames=0)
    sessions = [world.session(BRICK, seed=seed, history_seconds=0) for seed in range(2)]
    frames = [walk(session, 4) for session in sessions]
    late: Session | None = None
    with pytest.raises(PoolFull):
        late = world.session(BRICK, seed=5, history_seconds=0)
        walk(late, 1)
    assert same(walk(sessions[1], 2), walk(tiny_world().session(BRICK, seed=1), 6)[8:])
    sessions[0].close()
    late = late or world.session(BRICK, seed=5, history_seconds=0)
    assert late.frame == 0
    assert same(walk(late, 4), walk(tiny_world().session(BRICK, seed=5), 4))
    assert len(frames) == 2
    world.engine.pool.check()


# A picture to begin with


def test_image_start(world: WorldPipeline) -> None:
    """The first chunk shows it, as the codec sees it; what follows goes on from there."""
    y, x = np.mgrid[:16, :24]
    image = np.stack([10 * x, 15 * y, 255 - 10 * x], axis=-1).astype(np.uint8)
    codec, session = world.engine.codec, world.session(BRICK, seed=1, image=image)
    shown = codec.decode(codec.encode(torch.from_numpy(image)[None]))[0].numpy()
    chunk = session.step()
    assert np.abs(chunk.frames.astype(int) - shown).max() <= 1
    other = world.session(BRICK, seed=1, image=255 - image)
    other.step()
    assert not same(step(session), step(other))


def test_image_of_any_size(world: WorldPipeline) -> None:
    """It is scaled; an even one stays even."""
    small, large = (np.full((*size, 3), 90, np.uint8) for size in ((5, 7), (480, 640)))
    frames = [world.session(seed=1, image=image).step().frames for image in (small, large)]
    assert same(*frames)


def test_image_after_a_rewind(world: WorldPipeline) -> None:
    """Back at frame 0 it is the first frame again, for a twin too."""
    session = world.session(seed=1, image=np.full((16, 24, 3), 200, np.uint8))
    first = walk(session, 4)
    twin = session.fork()
    assert session.rewind(frames=8) == 0 == twin.rewind(frames=8)
    assert same(walk(session, 4), first) and same(walk(twin, 4), first)


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((16, 24), np.uint8),
        np.zeros((16, 24, 4), np.uint8),
        np.zeros((16, 24, 3), np.float32),
        np.zeros((0, 24, 3), np.uint8),
        np.zeros((1, 16, 24, 3), np.uint8),
        "no such file.png",
    ],
    ids=["gray", "rgba", "float", "empty", "batch", "path"],
)
def test_no_image(world: WorldPipeline, image: Any) -> None:
    """One sentence, and no session holds anything."""
    with pytest.raises(InvalidRequest) as caught:
        world.session(image=image)
    assert "\n" not in str(caught.value)
    assert world.engine.pool.stats().lanes == 0


# Frames that are given


def given(frames: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Frames uint8 `[F, H, W, 3]` and what led to them `[F, A]`."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (frames, 16, 24, 3), dtype=np.uint8)
    return pixels, rng.integers(0, 2, (frames, 6)).astype(np.float32)


def test_watch_is_the_past(world: WorldPipeline) -> None:
    """The cache holds the given frames' K and V, and what follows goes on from them."""
    session, engine = world.session(BRICK, seed=1), world.engine
    pixels, actions = given(6)
    session.watch(pixels, actions)
    assert session.frame == 6
    table, other = engine.table(), world.session(BRICK)
    latents, led_to = engine.codec.encode(torch.from_numpy(pixels)), torch.from_numpy(actions)
    for first in (0, 2, 4):
        part = slice(first, first + 2)
        with table.chunk(2) as chunk:
            prompt = engine.prompt(BRICK)
            engine.store(latents[part], engine.history(chunk), prompt, led_to[part])
            chunk.commit()
    other._table = table
    for frame, pair in tensors_of(other).items():
        for ours, theirs in zip(tensors_of(session)[frame], pair, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    first = walk(session, 4)
    again, changed = world.session(BRICK, seed=1), world.session(BRICK, seed=1)
    again.watch(pixels, actions), changed.watch(*given(6, seed=1))
    assert same(walk(again, 4), first) and not same(walk(changed, 4), first)


def test_watch_and_rewind(world: WorldPipeline) -> None:
    """Given frames are history like all others: one can go back into them, and recache them."""
    session = world.session(BRICK, seed=1)
    session.watch(*given(8))
    session.prompt(SNOW, recache="window_causal")
    first = walk(session, 3)
    assert session.rewind(frames=6) == 8
    session.prompt(SNOW, recache="window_causal")
    assert same(walk(session, 3), first)
    assert session.rewind(frames=10) == 4
    walk(session, 2)


def test_watch_in_mid_walk(world: WorldPipeline) -> None:
    """It goes on from the frame where the session stands; in parts or at once is the same."""
    pixels, actions = given(6)
    sessions = [world.session(BRICK, seed=1) for _ in range(2)]
    for session in sessions:
        walk(session, 3)
    sessions[0].watch(pixels, actions)
    for part in (slice(0, 2), slice(2, 6)):
        sessions[1].watch(pixels[part], actions[part])
    assert sessions[0].frame == sessions[1].frame == 12
    one, other = (tensors_of(session) for session in sessions)
    for frame, pair in one.items():
        assert worst(pair, other[frame]).max() <= 1e-5


@pytest.mark.parametrize("frames", [0, 3])
def test_watch_takes_whole_chunks(world: WorldPipeline, frames: int) -> None:
    """None is nothing to do or refused; a part of a chunk is refused."""
    session = world.session(BRICK, seed=1)
    try:
        session.watch(*given(frames))
    except InvalidRequest as error:
        assert "multiple of 2" in str(error)
    else:
        assert frames == 0
    assert session.frame == 0
    assert same(walk(session, 1), walk(world.session(BRICK, seed=1), 1))


def test_watch_is_checked(world: WorldPipeline) -> None:
    """Another size, type, or number of actions: refused, and nothing has changed."""
    session = world.session(BRICK, seed=1)
    pixels, actions = given(4)
    for wrong in (
        (pixels[:, :8], actions),
        (pixels[0], actions),
        (pixels.astype(np.float32), actions),
        (pixels, actions[:2]),
        (pixels, actions[:, :3]),
    ):
        with pytest.raises(InvalidRequest, match="accepted is"):
            session.watch(*wrong)
    session.close()
    with pytest.raises(SessionClosed):
        session.watch(pixels, actions)


def test_image_keeps_its_proportions(world: WorldPipeline) -> None:
    """A picture that is too wide loses its sides; nothing is stretched."""
    middle = np.full((16, 24, 3), 200, np.uint8)
    side = np.zeros((16, 30, 3), np.uint8)
    wide = np.concatenate([side, middle, side], axis=1)
    frames = [world.session(seed=1, image=image).step().frames for image in (middle, wide)]
    np.testing.assert_array_equal(*frames)


def test_a_full_pool_is_told_at_once(world: WorldPipeline) -> None:
    """Opening a session takes its lane: the next one without room does not open."""
    sessions = []
    with pytest.raises(PoolFull):
        while len(sessions) < 100:
            sessions.append(world.session(BRICK))
    stats = world.engine.pool.stats()
    assert stats.lanes == len(sessions) > 0
    for session in sessions:
        session.close()
    assert world.engine.pool.stats().free == stats.total
