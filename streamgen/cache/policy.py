"""Which frames a chunk sees, and where in the lane each frame lies: arithmetic on integers.

`ordinal` is the number of a latent frame in its stream, from 0. A policy knows nothing of blocks,
slots or tensors; a `BlockTable` asks it and moves handles.

`place` is a pure function of the ordinal, never of what happened before. So the physical order of a
lane follows from the logical state alone: attention adds its terms in the same order after a rewind
or in a fork as in the first run, and a replay is bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streamgen.errors import InvalidRequest


class CachePolicy(Protocol):
    """What a `BlockTable` asks.

    For every `end`, `place` maps `visible(end)` one to one onto `range(len(visible(end)))`, so what
    a chunk sees is always a prefix of the lane. A frame that has become invisible stays so.
    """

    @property
    def lane_size(self) -> int:
        """Slots of a lane: the most frames that a chunk can see, itself included."""
        ...

    @property
    def shadow(self) -> int:
        """Frames `0..shadow-1` live outside the lane; their lane places hold rewritable shadows."""
        ...

    def visible(self, end: int) -> Sequence[int]:
        """Ordinals, ascending, that a chunk ending before frame `end` sees, its own included."""
        ...

    def place(self, ordinal: int) -> int:
        """Index in the lane of a frame; depends on nothing but its ordinal."""
        ...

    def validate(self, chunk: int, end: int = 0) -> None:
        """Raise InvalidRequest if a chunk of `chunk` frames ending before `end` can't be cached."""
        ...


@dataclass(frozen=True)
class Append:
    """Keep everything, up to `capacity` frames."""

    capacity: int

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise InvalidRequest(f"capacity={self.capacity}: at least 1 frame is needed")

    @property
    def lane_size(self) -> int:
        """All `capacity` frames."""
        return self.capacity

    @property
    def shadow(self) -> int:
        """None."""
        return 0

    def visible(self, end: int) -> range:
        """Every frame before `end`."""
        return range(end)

    def place(self, ordinal: int) -> int:
        """The ordinal itself."""
        return ordinal

    def validate(self, chunk: int, end: int = 0) -> None:
        """Raise InvalidRequest if the chunk does not fit into the capacity."""
        _positive(chunk)
        if max(chunk, end) > self.capacity:
            raise InvalidRequest(
                f"a chunk of {chunk} ending at frame {max(chunk, end)} exceeds the capacity of "
                f"{self.capacity} latent frames"
            )


@dataclass(frozen=True)
class SinkWindow:
    """Keep the first `sink` frames for ever and a rolling window behind them.

    `window` counts latent frames and is everything a chunk can see: the sink and the chunk itself
    included (the meaning of Self-Forcing's `local_attn_size`). A chunk ending before frame E sees
    frame f iff `f < E and (f < sink or f >= E - (window - sink))`.

    Args:
        sink: first frames that never leave; 0 for a plain rolling window.
        window: frames that a chunk sees at most.
        shadow_sink: the model re-rotates the sink's keys for every chunk. Then the sink's blocks
            hold raw keys and lie outside the lane, and lane places `0..sink-1` are private shadow
            slots for the rotated ones.

    Raises:
        InvalidRequest: the window has no room behind the sink.
    """

    sink: int
    window: int
    shadow_sink: bool = False

    def __post_init__(self) -> None:
        if self.sink < 0 or self.window <= self.sink:
            raise InvalidRequest(
                f"sink={self.sink}, window={self.window}: the window includes the sink and must "
                "be larger than it"
            )

    @property
    def lane_size(self) -> int:
        """The whole window."""
        return self.window

    @property
    def shadow(self) -> int:
        """The sink, if it is shadowed."""
        return self.sink if self.shadow_sink else 0

    def visible(self, end: int) -> Sequence[int]:
        """The sink and the last `window - sink` frames before `end`."""
        if end <= self.window:
            return range(end)
        return (*range(self.sink), *range(end - (self.window - self.sink), end))

    def place(self, ordinal: int) -> int:
        """The sink first, then a ring: a new frame takes the place of the one it pushed out."""
        if ordinal < self.sink:
            return ordinal
        return self.sink + (ordinal - self.sink) % (self.window - self.sink)

    def validate(self, chunk: int, end: int = 0) -> None:
        """Raise InvalidRequest if the window can't hold the sink and the chunk together."""
        _positive(chunk)
        if self.window < self.sink + chunk:
            raise InvalidRequest(
                f"window={self.window} is smaller than sink={self.sink} + chunk={chunk} latent "
                "frames; the window includes both"
            )


def _positive(chunk: int) -> None:
    if chunk < 1:
        raise InvalidRequest(f"a chunk of {chunk} latent frames: at least 1 is needed")
