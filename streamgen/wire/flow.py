"""When frames are made and sent: a media clock, and a credit window in which the newest wins."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from streamgen.wire.header import Flag, Header


class Pacer:
    """The media clock of one stream: when to make a chunk, and when each of its frames is due.

    Making a chunk starts as late as it can (its due time less the time chunks take lately),
    because a chunk begun later has heard more of the player's keys. It never starts before the
    chunk before it is on the screen, so the stream is at most one chunk ahead of media time.
    Where chunks take longer than they last, their frames are spread over the time they take.
    """

    def __init__(self, fps: float, now: float) -> None:
        self._frame_seconds = 1.0 / fps
        self._took: deque[float] = deque(maxlen=24)
        self.restart(now)

    def restart(self, now: float) -> None:
        """Begin anew: the next chunk is wanted at once."""
        self._next_due = self._earliest = now

    @property
    def start_at(self) -> float:
        """The moment to begin the next chunk."""
        return max(self._earliest, self._next_due - self._lead)

    @property
    def _lead(self) -> float:
        """Seconds to leave for a chunk: what 7 of 8 took lately, and a little more."""
        took = sorted(self._took)
        return took[len(took) * 7 // 8] * 1.15 + 0.004 if took else 0.0

    def schedule(self, frames: int, now: float, took: float | None = None) -> list[float]:
        """The due times of a chunk that is ready now and `took` so many seconds to make."""
        if took is not None:
            self._took.append(took)
        mean = sum(self._took) / len(self._took) if self._took else 0.0
        step = max(self._frame_seconds, min(mean / max(frames, 1), 0.25))
        first = max(self._next_due, now)
        self._earliest = first
        self._next_due = first + frames * step
        return [first + index * step for index in range(frames)]


@dataclass
class Frame:
    """One frame on its way out: its encoded bytes, and its pixels for a recorder."""

    header: Header
    payload: bytes
    due: float = 0.0
    pixels: Any = None

    def to_bytes(self) -> bytes:
        """The binary message."""
        return self.header.pack() + self.payload


@dataclass
class Playout:
    """Frames wait here until they are due, then for a free credit; the newest replaces the rest.

    Args:
        credit: frames that may be sent and not yet acknowledged.
    """

    credit: int = 2
    dropped: int = 0
    sent: int = 0
    shown: int | None = None
    acked_at: float = 0.0
    frozen: bool = False
    _queue: deque[Frame] = field(default_factory=deque)
    _slot: Frame | None = None
    _flying: deque[int] = field(default_factory=deque)
    _mark: bool = False

    @property
    def in_flight(self) -> int:
        """Frames sent and not yet acknowledged."""
        return len(self._flying)

    @property
    def blocked(self) -> bool:
        """True while a frame is ready and no credit is left."""
        return self._slot is not None and len(self._flying) >= self.credit

    @property
    def next_due(self) -> float | None:
        """When the next waiting frame is due; None if none waits."""
        return self._queue[0].due if self._queue and not self.frozen else None

    def post(self, frames: list[Frame]) -> None:
        """Add frames, in the order in which they are due."""
        self._queue.extend(frames)

    def take_due(self, now: float) -> list[Frame]:
        """Move frames that are due into the slot; those moved are returned, for a recorder.

        A frame in the slot is replaced only while it can't be sent: a late loop drops nothing.
        """
        due: list[Frame] = []
        while self._queue and not self.frozen and self._queue[0].due <= now:
            if self._slot is not None:
                if len(self._flying) < self.credit:
                    break
                self.dropped += 1
            self._slot = self._queue.popleft()
            due.append(self._slot)
        return due

    def take(self) -> Frame | None:
        """The frame to send now, or None: nothing is due, or no credit is left."""
        frame = self._slot
        if frame is None or self.frozen or len(self._flying) >= self.credit:
            return None
        self._slot = None
        self._flying.append(frame.header.frame)
        self.sent += 1
        if self._mark:
            flags = frame.header.flags | Flag.DISCONTINUITY
            frame = Frame(frame.header._replace(flags=int(flags)), frame.payload, frame.due)
            self._mark = False
        return frame

    def ack(self, frame: int, now: float) -> None:
        """`frame` is on the screen: it and those sent before it give their credit back."""
        if frame not in self._flying:
            return  # of before a rewind
        while self._flying.popleft() != frame:
            pass
        self.shown, self.acked_at = frame, now

    def freeze(self) -> None:
        """Send nothing more until `cut`."""
        self.frozen = True

    def cut(self, shown: int | None) -> None:
        """The timeline jumps: forget what waits, give all credit back, mark the next frame."""
        self._queue.clear()
        self._flying.clear()
        self._slot = None
        self.frozen = False
        self._mark = True
        self.shown = shown
