"""Random lives of sessions against the plainest model: replay the same track from scratch.

The model of a session is a list of chunks, each with what was asked before it and the bytes that
came out. `rewind` cuts the list, `fork` copies it, a mark is a copy; a session that goes through a
file remembers less and is the same otherwise. At the end every list is played by a fresh session
without a history, which must make bitwise the same chunks.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import tiny_world

from streamgen.errors import InvalidRequest
from streamgen.pipelines.world import WorldPipeline
from streamgen.session import Mark, Session

TEXTS = ("a brick maze at night", "snow", "day")
RECACHE = ("last_chunk", "window_causal", "window_bidirectional", "off")
MOST_SESSIONS = 3

which = st.integers(0, 3)
key_sets = st.sets(st.sampled_from("wsadqe"), max_size=3).map(frozenset)
prompts = st.tuples(st.sampled_from(TEXTS), st.sampled_from(RECACHE))
VALUES = {  # what may happen and its argument; what is named twice happens twice as often
    "step": st.integers(1, 2),
    "step ": st.integers(1, 2),
    "act": key_sets,
    "act and step": key_sets,
    "prompt": prompts,
    "mark": st.none(),
    "jump": st.tuples(which, st.integers(0, 6)),
    "jump ": st.tuples(which, st.integers(0, 6)),
    "rewind": st.integers(0, 9),
    "fork": st.none(),
    "open": st.integers(0, 1),
    "close": st.none(),
    "reload": st.none(),
    "fail": st.sampled_from(["denoise", "store", "decode"]),
}
operations = st.one_of(
    *[st.tuples(st.just(name.strip()), which, value) for name, value in VALUES.items()]
)


class Break(Exception):
    """What a sabotaged step raises."""


def row(session: Session, frames: np.ndarray) -> bytes:
    latents = torch.stack(session._state.latents[-len(frames) :])
    return frames.tobytes() + latents.numpy().tobytes()


@dataclass
class Life:
    """A session and its model."""

    session: Session
    asked: list[tuple[str, Any]] = field(default_factory=list)  # since the last chunk
    chunks: list[tuple[tuple[tuple[str, Any], ...], bytes]] = field(default_factory=list)

    def ask(self, kind: str, value: Any) -> None:
        ask(self.session, kind, value)
        self.asked.append((kind, value))

    def step(self) -> None:
        chunk = self.session.step()
        assert chunk.first_frame == 2 * len(self.chunks)
        assert [event.kind for event in chunk.applied] == [kind for kind, _ in self.asked]
        self.chunks.append((tuple(self.asked), row(self.session, chunk.frames)))
        self.asked = []

    def cut(self, frame: int) -> None:
        self.chunks, self.asked = self.chunks[: frame // 2], []

    def check(self) -> None:
        """What the session says of itself is what its model says."""
        events = [event for asked, _ in self.chunks for event in asked]
        texts = [value[0] for kind, value in events if kind == "prompt"]
        held = [value for kind, value in events if kind == "act"]
        assert self.session.frame == 2 * len(self.chunks)
        assert self.session.text == (texts or [TEXTS[0]])[-1]
        assert self.session.keys == (held or [frozenset()])[-1]
        assert [event.kind for event in self.session.track] == [kind for kind, _ in events]


def ask(session: Session, kind: str, value: Any) -> None:
    if kind == "act":
        session.act(keys=value)
    else:
        session.prompt(value[0], recache=value[1])


class Oracle:
    """What tracks make: played from scratch by a session without a history, once for each track."""

    def __init__(self) -> None:
        self.world = tiny_world(max_sessions=1, history_frames=0)
        self.known: dict[tuple[Any, ...], bytes] = {}

    def check(self, life: Life) -> None:
        """Every chunk of a life must be bitwise what its track makes."""
        track = (life.session.seed,)
        tracks = [track := (*track, asked) for asked, _ in life.chunks]
        if any(track not in self.known for track in tracks):
            self.play(life.session.seed, tracks)
        for index, (track, (_, made)) in enumerate(zip(tracks, life.chunks, strict=True)):
            assert self.known[track] == made, f"chunk {index} differs"

    def play(self, seed: int, tracks: list[tuple[Any, ...]]) -> None:
        with self.world.session(TEXTS[0], seed=seed, history_seconds=0) as session:
            for track in tracks:
                for kind, value in track[-1]:
                    ask(session, kind, value)
                self.known[track] = row(session, session.step().frames)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """Shared by all examples."""
    return Oracle()


def fail(world: WorldPipeline, life: Life, where: str) -> None:
    """Let a step fail; afterwards all is as before."""

    def broken(*args: Any) -> None:
        raise Break

    owner = world.engine.codec if where == "decode" else world.engine
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Break):
        patch.setattr(owner, where, broken)
        life.session.step()


class Lives:
    """All sessions and marks of one example."""

    def __init__(self, seconds: float, oracle: Oracle) -> None:
        self.world, self.seconds, self.oracle = tiny_world(history_frames=200), seconds, oracle
        self.lives: list[Life] = []
        self.marks: list[tuple[Mark, Life]] = []
        self.open(0)

    def open(self, seed: int) -> None:
        session = self.world.session(TEXTS[0], seed=seed, history_seconds=self.seconds)
        self.lives.append(Life(session))

    def apply(self, name: str, index: int, value: Any) -> None:
        life = self.lives[index % len(self.lives)]
        if name == "step":
            for _ in range(value):
                life.step()
        elif name in ("act", "prompt"):
            life.ask(name, value)
        elif name == "act and step":
            life.ask("act", value)
            life.step()
        elif name == "fail":
            fail(self.world, life, value)
        elif name == "mark":
            self.marks.append((life.session.mark(), Life(life.session, [], list(life.chunks))))
        elif name == "jump" and self.marks:
            mark, then = self.marks[value[0] % len(self.marks)]
            if then.session.seed == life.session.seed:
                assert life.session.rewind(to=mark) == mark.frame
                life.chunks, life.asked = list(then.chunks), []
                self.rewind(life, value[1])
        elif name == "rewind":
            self.rewind(life, value)
        elif name == "reload":
            self.reload(life)
        elif len(self.lives) < MOST_SESSIONS and name == "fork":
            self.lives.append(Life(life.session.fork(), [], list(life.chunks)))
        elif len(self.lives) < MOST_SESSIONS and name == "open":
            self.open(value)
        elif len(self.lives) > 1 and name == "close":
            self.oracle.check(life)
            life.session.close()
            self.lives.remove(life)

    def rewind(self, life: Life, frames: int) -> None:
        stood = life.session.frame
        if frames and stood and not life.session._past:
            with pytest.raises(InvalidRequest, match="nothing before frame"):
                life.session.rewind(frames=frames)
            return
        stands = life.session.rewind(frames=frames)
        assert stands % 2 == 0 and stands <= stood
        if stands < stood:
            life.cut(stands)

    def reload(self, life: Life) -> None:
        """A session goes into a file, and one comes out."""
        with tempfile.TemporaryDirectory() as folder:
            life.session.save(Path(folder, "life.sgs"))
            life.session.close()
            life.session = self.world.load_session(Path(folder, "life.sgs"))

    def finish(self) -> None:
        for life in self.lives:
            self.oracle.check(life)
            life.session.close()
        for mark, _ in self.marks:
            mark.release()
        stats = self.world.engine.pool.stats()
        assert (stats.live, stats.lanes, stats.free) == (0, 0, stats.total)


@settings(max_examples=settings.default.max_examples // 5)
@given(seconds=st.sampled_from([0.3, 8.0]), script=st.lists(operations, min_size=15, max_size=30))
def test_lives(oracle: Oracle, seconds: float, script: list[tuple[str, int, Any]]) -> None:
    """Whatever happens to sessions that share a pool, each is what its own track says."""
    lives = Lives(seconds, oracle)
    for name, index, value in script:
        lives.apply(name, index, value)
        for life in lives.lives:
            life.check()
        lives.world.engine.pool.check()
    lives.finish()
