"""Three caches as other projects write them, behind the `History` that the transformer asks.

What they keep is the same sink and window with keys rotated at absolute positions, so the same
frames come out; only the way there differs:

    Concatenate   past and new tokens are joined anew for every layer of every pass
    Roll          one buffer a layer; a new chunk shifts the window left through a clone, later
                  passes overwrite its right edge (the rule of Self-Forcing, CausVid and SGLang)
    CloneCat      every pass works on a clone of the whole buffer, joins sink and window, and writes
                  back at the end of the pass (the rule of LongLive 2)

The rules are written from their description, none of their code is here. Where a rule leaves a
choice, the cheaper one is taken. `Lane` is ours behind the same verbs: `begin`, `attend`, `commit`.

Axes: N tokens of the chunk, T tokens in view, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from streamgen.cache import Chunk
from streamgen.engine import Engine
from streamgen.kernels.attention import attend
from streamgen.models.history import CachedHistory
from streamgen.models.rope import rotate, rotation


class Lane:
    """Our cache: a `BlockTable` and its `CachedHistory`."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.table, self.seconds = engine, engine.table(), 0.0
        self._chunk: Chunk | None = None
        self._history: CachedHistory | None = None

    def begin(self, frames: int) -> None:
        """Open the next `frames` frames."""
        start = perf_counter()
        self._chunk = self.table.chunk(frames)
        self.seconds += perf_counter() - start
        self._history = self.engine.history(self._chunk)

    def attend(self, layer: int, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """See `streamgen.models.wan.History`."""
        assert self._history is not None
        return self._history.attend(layer, q_BNHD, k_BNHD, v_BNHD)

    def update(self, layer: int, k_BNHD: Tensor, v_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        """Take the chunk's keys and values; return all that it sees, `[1, T, H, D]` each."""
        assert self._chunk is not None
        self._chunk.write(layer, k_BNHD[0], v_BNHD[0])
        keys, values = self._chunk.kv(layer)
        return keys[None], values[None]

    def commit(self) -> None:
        """Seal what was written last."""
        assert self._chunk is not None and self._history is not None
        start = perf_counter()
        self._chunk.commit()
        self.seconds += self._history.seconds + perf_counter() - start

    def close(self) -> None:
        """Give the slots back."""
        self.table.close()


class Peer:
    """What the three have in common: positions, rotation, and the time spent on keys and values.

    Args:
        engine: whose shapes, sink and window to take; its positions must be absolute.

    Attributes:
        seconds: time spent moving keys and values.
    """

    def __init__(self, engine: Engine) -> None:
        spec, config = engine.pool.spec, engine.config
        self.grid, self.device, self.spec = engine.grid, engine.device, spec
        self.tokens = spec.block_tokens
        self.sink, self.window = config.sink * self.tokens, config.window * self.tokens
        self.frames = range(0)
        self.seconds = 0.0
        self.turn: Tensor | None = None  # of the chunk, once it is asked for

    def begin(self, frames: int) -> None:
        """Open the next `frames` frames."""
        self.frames = range(self.frames.stop, self.frames.stop + frames)
        self.turn = None
        self._timed(self._begin)

    def attend(self, layer: int, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """See `streamgen.models.wan.History`."""
        if self.turn is None:
            self.turn = rotation(self.frames, self.grid, self.spec.head_dim, self.device)
        q, k = rotate(q_BNHD, self.turn), rotate(k_BNHD, self.turn)
        start = perf_counter()
        keys, values = self.update(layer, k, v_BNHD)
        self.seconds += perf_counter() - start
        return attend(q, keys, values)

    def commit(self) -> None:
        """Keep what was written last."""
        self._timed(self._commit)

    def close(self) -> None:
        """Nothing to give back."""

    def _begin(self) -> None:
        """Make room, if the rule does so here."""

    def _commit(self) -> None:
        """Write back, if the rule does so here."""

    def update(self, layer: int, k_BNHD: Tensor, v_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        """Take the chunk's keys and values; return all that it sees, `[1, T, H, D]` each."""
        raise NotImplementedError

    def _timed(self, verb: Callable[[], None]) -> None:
        start = perf_counter()
        verb()
        self.seconds += perf_counter() - start

    def _buffers(self, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """K and V `[1, tokens, H, D]` of every layer."""
        shape = (1, tokens, self.spec.kv_heads, self.spec.head_dim)

        def zeros() -> Tensor:
            return torch.zeros(shape, dtype=self.spec.dtype, device=self.device)

        return [(zeros(), zeros()) for _ in range(self.spec.num_layers)]


class Concatenate(Peer):
    """Join past and new tokens for every layer of every pass; cut the past once per chunk."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.past = self._buffers(0)
        self.newest = list(self.past)

    def _begin(self) -> None:
        room = self.window - len(self.frames) * self.tokens
        if self.past[0][0].shape[1] > room:
            self.past = [(self._cut(k, room), self._cut(v, room)) for k, v in self.past]

    def _cut(self, x: Tensor, room: int) -> Tensor:
        newest = x[:, x.shape[1] - (room - self.sink) :]
        return torch.cat([x[:, : self.sink], newest], dim=1)

    def update(self, layer: int, k_BNHD: Tensor, v_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.past[layer]
        joined = torch.cat([k, k_BNHD], dim=1), torch.cat([v, v_BNHD], dim=1)
        self.newest[layer] = joined
        return joined

    def _commit(self) -> None:
        self.past = list(self.newest)


class _Buffered(Peer):
    """A buffer as long as the window for each layer, with the two cursors of Self-Forcing.

    `local_end` counts tokens in the buffer, `global_end` tokens since the start; both are tensors
    of one element for each layer, as in the public codes.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.cache = self._buffers(self.window)
        layers = range(self.spec.num_layers)
        self.local_end = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in layers]
        self.global_end = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in layers]

    def _plan(self, layer: int) -> tuple[int, int]:
        """Where the chunk ends in the buffer, and how many tokens leave behind the sink for it."""
        end, new = self.frames.stop * self.tokens, len(self.frames) * self.tokens
        local_end = int(self.local_end[layer].item())
        global_end = int(self.global_end[layer].item())
        evicted = max(0, new + local_end - self.window) if end > global_end else 0
        return local_end + end - global_end - evicted, evicted

    def _advance(self, layer: int, local_end: int) -> None:
        self.local_end[layer].fill_(local_end)
        self.global_end[layer].fill_(self.frames.stop * self.tokens)

    def _roll(self, x: Tensor, evicted: int, local_end: int, new: int) -> None:
        """Shift what is behind the sink left."""
        stay = local_end - new - self.sink
        start = self.sink + evicted
        x[:, self.sink : self.sink + stay] = x[:, start : start + stay].clone()


class Roll(_Buffered):
    """Roll the window left with a clone on a chunk's first pass, overwrite on the others."""

    def update(self, layer: int, k_BNHD: Tensor, v_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        local_end, evicted = self._plan(layer)
        new = k_BNHD.shape[1]
        for x, fresh in zip(self.cache[layer], (k_BNHD, v_BNHD), strict=True):
            if evicted:
                self._roll(x, evicted, local_end, new)
            x[:, local_end - new : local_end] = fresh
        self._advance(layer, local_end)
        k, v = self.cache[layer]
        return k[:, :local_end], v[:, :local_end]


class CloneCat(_Buffered):
    """Clone the whole buffer for every layer of every pass, then join sink and window."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._deferred: list[tuple[int, int, tuple[Tensor, Tensor]]] = []

    def update(self, layer: int, k_BNHD: Tensor, v_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        local_end, evicted = self._plan(layer)
        new = k_BNHD.shape[1]
        k, v = (x.clone() for x in self.cache[layer])
        for x, fresh in ((k, k_BNHD), (v, v_BNHD)):
            if evicted:
                self._roll(x, evicted, local_end, new)
            x[:, local_end - new : local_end] = fresh
        unchanged = self.sink if evicted else local_end - new
        self._deferred.append((unchanged, local_end, (k, v)))
        if layer == self.spec.num_layers - 1:
            self._write_back()
        return self._joined(k, local_end), self._joined(v, local_end)

    def _joined(self, x: Tensor, local_end: int) -> Tensor:
        cut = min(self.sink, local_end)
        return torch.cat([x[:, :cut], x[:, cut:local_end]], dim=1)

    def _write_back(self) -> None:
        for layer, (start, local_end, clones) in enumerate(self._deferred):
            for x, clone in zip(self.cache[layer], clones, strict=True):
                x[:, start:local_end] = clone[:, start:local_end]
            self._advance(layer, local_end)
        self._deferred = []


PEERS: dict[str, type[Lane] | type[Peer]] = {
    "ours": Lane,
    "concatenate": Concatenate,
    "roll": Roll,
    "clone and cat": CloneCat,
}
"""Every cache of the comparison by its name in the report; ours first."""
