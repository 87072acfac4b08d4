"""A coloured world that keeps the contract of `WorldPipeline` and `Session`, without a model.

Its picture pans with the keys over a pattern whose colour is the prompt's. The frame's number and
the newest action are stamped into the pixels as 16 blocks each, black or white, least bit first
(they survive JPEG and H.264), so a test can tell which frame it sees and what shaped it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import cv2
import numpy as np

from streamgen.errors import InvalidRequest, PoolFull, SessionClosed
from streamgen.frames import Chunk, Event, Receipt, Timing

BIT = 8  # pixels along the side of a stamped block
MOVES = {"w": (0, -3), "s": (0, 3), "a": (-3, 0), "d": (3, 0), "q": (-2, 0), "e": (2, 0)}


@dataclass(frozen=True)
class FakeConfig:
    """What apps may read of a world's config."""

    name: str = "fake-world"
    height: int = 96
    width: int = 128
    fps: float = 20
    chunk_frames: int = 2
    keys: tuple[str, ...] = ("w", "s", "a", "d", "q", "e")
    vocabulary: tuple[str, ...] = ("a", "brick", "maze", "at", "night", "heavy", "snow", "lava")
    max_words: int = 16
    suggestions: tuple[str, ...] = ("a brick maze at night", "heavy snow", "lava")


@dataclass(frozen=True)
class _State:
    frame: int = 0
    index: int = 0
    x: int = 0
    y: int = 0
    text: str = ""
    keys: frozenset[str] = frozenset()
    noise: int = 0


@dataclass
class FakeWorld:
    """Stands in for `WorldPipeline`. `step_seconds` is how long a chunk takes to make."""

    config: FakeConfig = field(default_factory=FakeConfig)
    max_sessions: int = 4
    step_seconds: float = 0.0
    live: list[FakeSession] = field(default_factory=list)

    def session(
        self,
        prompt: str = "",
        seed: int = 0,
        image: np.ndarray | None = None,
        history_seconds: float = 8.0,
    ) -> FakeSession:
        """A new walk. Raises PoolFull beyond `max_sessions` x 4 walks."""
        if len(self.live) >= 4 * self.max_sessions:
            raise PoolFull("no free blocks: every session is taken; close one")
        session = FakeSession(self, seed, image, history_seconds)
        session._check(prompt)
        session._state = replace(session._state, text=prompt, noise=seed)
        self.live.append(session)
        return session


class FakeSession:
    """Stands in for `Session`."""

    def __init__(
        self, world: FakeWorld, seed: int, image: np.ndarray | None, history_seconds: float
    ) -> None:
        self.world, self.seed, self.image = world, seed, image
        self.closed = False
        self.track: list[Event] = []
        self.stepping = threading.Lock()
        self._history_seconds = history_seconds
        self._state = _State()
        self._queue: list[Event] = []
        self._lock = threading.Lock()
        self._next_id = 0
        self._begun = 0
        config = world.config
        chunks = int(history_seconds * config.fps / config.chunk_frames)
        self._history: deque[_State] = deque(maxlen=chunks + 1)

    @property
    def frame(self) -> int:
        """Number of the next frame."""
        return self._state.frame

    @property
    def text(self) -> str:
        """The prompt in force."""
        return self._state.text

    @property
    def keys(self) -> frozenset[str]:
        """The keys held."""
        return self._state.keys

    def act(self, keys: Any = ()) -> Receipt:
        """Hold these keys from the next chunk on."""
        unknown = sorted(set(keys) - set(self.world.config.keys))
        if unknown:
            accepted = " ".join(self.world.config.keys)
            raise InvalidRequest(f"unknown key {unknown[0]!r}; accepted: {accepted}")
        return self._ask("act", frozenset(keys))

    def prompt(self, text: str, recache: str = "last_chunk") -> Receipt:
        """Show this text from the next chunk on."""
        self._check(text)
        return self._ask("prompt", {"text": text, "recache": recache})

    def _check(self, text: str) -> None:
        if len(text.split()) > self.world.config.max_words:
            raise InvalidRequest(
                f"the prompt has {len(text.split())} words; at most {self.world.config.max_words}"
            )

    def _ask(self, kind: str, value: Any) -> Receipt:
        if self.closed:
            raise SessionClosed("the session is closed")
        with self._lock:
            event = Event(self._next_id, kind, value, self._begun)
            self._next_id += 1
            self._queue.append(event)
            return Receipt(event.id, kind, event.frame)

    def step(self) -> Chunk:
        """Make one chunk. Fails if two threads step one session."""
        if self.closed:
            raise SessionClosed("the session is closed")
        assert self.stepping.acquire(blocking=False), "two threads step one session"
        try:
            return self._step()
        finally:
            self.stepping.release()

    def _step(self) -> Chunk:
        begun, config = time.perf_counter(), self.world.config
        with self._lock:
            applied, self._queue = tuple(self._queue), []
            self._begun = self._state.frame + config.chunk_frames
        self._history.append(self._state)
        state, held = self._state, set(self._state.keys)
        for event in applied:
            if event.kind == "prompt":
                state = replace(state, text=event.value["text"])
            else:
                held |= event.value  # a press and release in one chunk is one pulse
                state = replace(state, keys=event.value)
        first, frames = state.frame, []
        for _ in range(config.chunk_frames):
            for key in held:
                dx, dy = MOVES.get(key, (0, 0))
                state = replace(state, x=state.x + dx, y=state.y + dy)
            frames.append(self._paint(state))
            state = replace(state, frame=state.frame + 1)
        self._state = replace(state, index=state.index + 1)
        self.track += applied
        time.sleep(self.world.step_seconds)
        total = (time.perf_counter() - begun) * 1000
        pixels = np.stack(frames)
        return Chunk(state.index, first, pixels, pixels, Timing(dit=total, total=total), applied)

    def _paint(self, state: _State) -> np.ndarray:
        config = self.world.config
        rows, columns = np.mgrid[0 : config.height, 0 : config.width]
        checks = ((rows + state.y) // 12 + (columns + state.x) // 12) % 2
        hue = sum(map(ord, state.text)) % 180
        hsv = np.full((config.height, config.width, 3), (hue, 120, 0), np.uint8)
        hsv[..., 2] = 70 + 90 * checks + (state.noise % 7)
        if self.image is not None and state.frame < config.fps:
            frame = cv2.resize(self.image, (config.width, config.height))
        else:
            frame = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
        _stamp(frame, 0, state.frame)
        _stamp(frame, 1, sum(1 << config.keys.index(key) for key in state.keys))
        return frame

    def stream(self, chunks: int) -> Iterator[Chunk]:
        """So many chunks, one after the other."""
        for _ in range(chunks):
            yield self.step()

    def mark(self) -> _State:
        """The state, to come back to."""
        return self._state

    def rewind(
        self, to: _State | None = None, seconds: float | None = None, frames: int | None = None
    ) -> int:
        """Go back; returns the number of the next frame."""
        if to is None:
            back = frames if frames is not None else round((seconds or 0) * self.world.config.fps)
            target = self._state.frame - back
            found = [state for state in self._history if state.frame <= target]
            if not found:
                raise InvalidRequest(
                    f"the history of {self._history_seconds:g} s does not reach back {back} frames"
                )
            to = found[-1]
        while self._history and self._history[-1].frame >= to.frame:
            self._history.pop()
        with self._lock:
            self._state, self._queue, self._begun = to, [], to.frame
        self.track = [event for event in self.track if event.frame < to.frame]
        return to.frame

    def fork(self) -> FakeSession:
        """A second walk from here."""
        twin = self.world.session(self.text, self.seed, self.image, self._history_seconds)
        twin._state, twin._history = self._state, self._history.copy()
        twin.track, twin._begun, twin._next_id = list(self.track), self._begun, self._next_id
        return twin

    def close(self) -> None:
        """End the walk."""
        if not self.closed:
            self.closed = True
            self.world.live.remove(self)

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stamp(frame: np.ndarray, row: int, number: int) -> None:
    for bit in range(16):
        top, left = row * BIT, bit * BIT
        frame[top : top + BIT, left : left + BIT] = 255 * (number >> bit & 1)


def read_stamp(frame: np.ndarray, row: int = 0) -> int:
    """The number stamped into a frame: row 0 its index, row 1 the keys held, as a bit mask."""
    line = frame[row * BIT + BIT // 2, BIT // 2 : 16 * BIT : BIT, 1] > 127
    return sum(1 << bit for bit, white in enumerate(line) if white)
