"""Which frames a chunk sees, and where in the lane each frame lies: arithmetic on integers.

`ordinal` is the number of a latent frame in its stream, from 0. A policy knows nothing of blocks,
slots or tensors; a `BlockTable` asks it and moves handles.

`place` is a pure function of the ordinal, never of what happened before. So the physical order of a
lane follows from the logical state alone: attention adds its terms in the same order after a rewind
or in a fork as in the first run, and a replay is bitwise equal.

A policy is a value: what changes while a stream lives (other pins, a smaller buffer after a
prefill) is another value, which `BlockTable.set_policy` takes up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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

    @property
    def span(self) -> int | None:
        """Frames that a frame of a chunk sees, itself included, if chunks are causal inside.

        None: every frame of a chunk sees all that the chunk sees, the whole chunk included.
        """
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
    """Keep everything, up to `capacity` frames.

    Args:
        capacity: frames that fit.
        causal: a frame of a chunk doesn't see those after it (text, in blocks of one token).
    """

    capacity: int
    causal: bool = False

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

    @property
    def span(self) -> int | None:
        """Everything up to itself, if causal."""
        return self.capacity if self.causal else None

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

    @property
    def span(self) -> int | None:
        """A chunk sees itself as a whole."""
        return None

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


@dataclass(frozen=True)
class PinnedWindow:
    """A sink, a rolling window, and pins: frames that stay in view after they left the window.

    LongLive 2 calls them a multi-shot sink: on a scene cut the first chunk of the new shot is
    pinned and replaces the one of the shot before. `window` counts everything that a chunk sees, as
    in `SinkWindow`, the pins included. The rule: a new frame pushes out the oldest frame that is
    neither in the sink nor pinned. So a pin costs room only once it would have left, and a pin that
    was replaced is the first to go.

    Pins stay where they lie in the lane and new frames go round them: the view is one run of the
    whole lane, and no byte moves, neither while pins stay nor when they change. A table takes pins
    by `table.pin(range(12, 15))`.

    Equality is that of the geometry, without the pins: a table rewinds to a snapshot with other
    pins, and takes them up.

    There is no form with a shadowed sink. Its keys move to just before the window with every chunk,
    while those of a pinned frame are stored rotated at its own number, in the low precision of the
    cache, and must not be rotated again: the sink would come to stand between pins and window.
    (LongLive 2 has such a form, since it keeps all keys raw and rotates them at each read.)

    Args:
        sink: first frames that never leave; 0 for none.
        window: frames that a chunk sees at most.
        limit: frames that can be pinned at a time.
        pinned, layout: made by `pin`; to be stored and given back as they are. `layout` holds the
            frames in lane order at the moment when the pins last changed.

    Raises:
        InvalidRequest: the window has no room behind the sink and the pins.
    """

    sink: int
    window: int
    limit: int
    pinned: tuple[int, ...] = field(default=(), compare=False)
    layout: tuple[int, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.sink < 0 or self.limit < 1 or self.window <= self.sink + self.limit:
            raise InvalidRequest(
                f"sink={self.sink}, limit={self.limit}, window={self.window}: the window includes "
                "the sink and at least 1 pinned frame and must be larger than both together"
            )

    @property
    def lane_size(self) -> int:
        """The whole window."""
        return self.window

    @property
    def shadow(self) -> int:
        """None; the class says why."""
        return 0

    @property
    def span(self) -> int | None:
        """A chunk sees itself as a whole."""
        return None

    def visible(self, end: int) -> Sequence[int]:
        """The sink, the pins, and the newest others that fit.

        Raises:
            InvalidRequest: `end` is before the frame at which the pins were last changed.
        """
        if end <= self.window and self._start == self.window:
            return range(end)
        if end < self._start:
            raise InvalidRequest(
                f"the pins were changed at frame {self._start}: a chunk can't end at frame {end} "
                "any more; end there or later, or rewind"
            )
        ring = self._ring[end - self._start :]
        new = range(max(self._start, end - len(self._ring)), end)
        return sorted((*range(self.sink), *self.pinned, *ring, *new))

    def place(self, ordinal: int) -> int:
        """Its own number at first, then that of the frame it pushed out."""
        if ordinal >= self._start:
            ordinal = self._ring[(ordinal - self._start) % len(self._ring)]
        return self._places[ordinal] if self._places else ordinal

    def validate(self, chunk: int, end: int = 0) -> None:
        """Raise InvalidRequest if the window can't hold sink, pins and chunk together."""
        _positive(chunk)
        if self.window < self.sink + self.limit + chunk:
            raise InvalidRequest(
                f"window={self.window} is smaller than sink={self.sink} + limit={self.limit} pins "
                f"+ chunk={chunk} latent frames; the window includes all of them"
            )

    def pin(self, frames: Iterable[int], end: int) -> PinnedWindow:
        """This policy with `frames` pinned from frame `end` on.

        Beyond the limit the oldest of the other pins make room. Frames of the sink need no pin and
        are passed over.

        Raises:
            InvalidRequest: more frames than the limit, or one that is not in view at `end`.
        """
        seen = self.visible(end)
        wanted = sorted({frame for frame in frames if frame >= self.sink})
        lost = [frame for frame in wanted if frame not in seen]
        if lost:
            raise InvalidRequest(f"frames {lost} can't be pinned: in view are {list(seen)}")
        if len(wanted) > self.limit:
            raise InvalidRequest(f"{len(wanted)} frames can't be pinned: the limit is {self.limit}")
        others = [frame for frame in self.pinned if frame not in wanted]
        kept = others[max(0, len(others) + len(wanted) - self.limit) :]
        return replace(
            self,
            pinned=tuple(sorted((*kept, *wanted))),
            layout=tuple(sorted(seen, key=self.place)),
        )

    @cached_property
    def _start(self) -> int:
        """First frame that pushes one out under these pins."""
        return max(self.window, max(self.layout, default=-1) + 1)

    @cached_property
    def _places(self) -> dict[int, int]:
        """Where the frames before `_start` lie; empty if each lies at its own number."""
        places = {ordinal: place for place, ordinal in enumerate(self.layout)}
        return places if self._start > self.window else {}

    @cached_property
    def _ring(self) -> tuple[int, ...]:
        """The frames before `_start` that will be pushed out, oldest first."""
        frames = sorted(self._places or range(self.window))
        return tuple(x for x in frames if x >= self.sink and x not in self.pinned)


@dataclass(frozen=True)
class RollingBuffer:
    """Every token sees the last `window` tokens; token i lies in slot i mod W (Mistral 7B, §2).

    For a pool with `block_tokens=1`, where a frame is a token; with larger blocks it is a window of
    whole frames. Chunks are causal inside: `AttnMeta.mask` says so when anything is hidden.

    With the default `piece=1` the buffer has exactly as many slots as a token sees, W. A chunk of
    n tokens needs n - 1 more, since all its keys are written before its first query, which still
    sees the full window, is answered. A prefill in pieces of W therefore runs under `piece=W`, in
    2 W - 1 slots, and `table.set_policy(RollingBuffer(W))` goes over to the small buffer behind it.

    The paper doesn't settle whether a token sees W keys, itself included, or W + 1, from i - W to
    i: `inclusive`. Its reach of layers x W (§2) is that of W + 1 keys.

    Args:
        window: W, tokens.
        piece: tokens of the largest chunk.
        inclusive: a token sees W + 1 keys, i - W to i, instead of W; the buffer has one slot more.

    Raises:
        InvalidRequest: a number is not positive.
    """

    window: int
    piece: int = 1
    inclusive: bool = False

    def __post_init__(self) -> None:
        if self.window < 1 or self.piece < 1:
            raise InvalidRequest(
                f"window={self.window}, piece={self.piece}: at least 1 token is needed for each"
            )

    @property
    def span(self) -> int:
        """W, or W + 1 if inclusive."""
        return self.window + self.inclusive

    @property
    def lane_size(self) -> int:
        """What the queries of the largest chunk see together."""
        return self.span - 1 + self.piece

    @property
    def shadow(self) -> int:
        """None."""
        return 0

    def visible(self, end: int) -> range:
        """The last `lane_size` tokens; the mask narrows them down to each query's window."""
        return range(max(0, end - self.lane_size), end)

    def place(self, ordinal: int) -> int:
        """i mod W, W being the slots of the buffer."""
        return ordinal % self.lane_size

    def validate(self, chunk: int, end: int = 0) -> None:
        """Raise InvalidRequest if the chunk is larger than `piece`."""
        _positive(chunk)
        if chunk > self.piece:
            raise InvalidRequest(
                f"a chunk of {chunk} tokens in a rolling buffer for pieces of {self.piece}: feed "
                f"it in pieces, or make the buffer with piece={chunk}"
            )

    def reach(self, layers: int) -> int:
        """How many tokens back information can come from through `layers` layers (Mistral, §2)."""
        return layers * (self.span - 1)


def _positive(chunk: int) -> None:
    if chunk < 1:
        raise InvalidRequest(f"a chunk of {chunk} latent frames: at least 1 is needed")
