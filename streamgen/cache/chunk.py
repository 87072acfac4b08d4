"""A chunk in the making: its frames are pending, the only bytes of a table that may be written.

`Chunk` writes to the pool and reads a view of it; in a coded pool, `CodedChunk` writes and reads
in buffers of the compute dtype and stores its frames at commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from streamgen.cache.meta import AttnMeta, merge_runs
from streamgen.cache.pool import Block, Lane
from streamgen.cache.staging import Staging
from streamgen.errors import InvalidRequest

if TYPE_CHECKING:
    from streamgen.cache.table import BlockTable

KV = tuple[Tensor, Tensor]
Runs = tuple[tuple[int, int], ...]


class Chunk:
    """The pending frames of a `BlockTable`, from `table.chunk(n)` or `table.reopen(n)`.

    Every denoising step overwrites the same slots by `write` and reads `kv`; the clean pass writes
    last; `commit` seals. As a context manager it aborts on leaving unless it was committed:

        with table.chunk(3) as chunk:
            for step in steps:
                ...  # chunk.write(layer, k, v); attend(q, *chunk.kv(layer))
            chunk.commit()

    Attributes:
        frames: ordinals of the pending frames.
        sinks: how many of them, the first ones, belong to a shadowed sink (see `write_sink`).
        blocks: the block of every visible frame, by ordinal.
        meta: what attention needs, built once.
    """

    def __init__(
        self,
        table: BlockTable,
        lane: Lane,
        frames: range,
        visible: Sequence[int],
        blocks: dict[int, Block],
    ) -> None:
        self.frames = frames
        self.blocks = blocks
        self._table = table
        self._pool = table.pool
        self._lane = lane
        self._open = True
        self._unwritten = set(range(self._pool.spec.num_layers))
        # sink frames committed before this chunk, and those in it
        self._sunk, self.sinks = split_sink(frames, table.policy.shadow)
        self._unsunk = set(self._unwritten) if self.sinks else set()
        self.meta = self._describe(visible)
        # Views of the lane, which stays where it is: made at the first step, used at all others.
        self._seen: dict[int, KV] = {}
        self._written: dict[tuple[int, Runs], list[KV]] = {}

    def _describe(self, visible: Sequence[int]) -> AttnMeta:
        place, tokens = self._table.policy.place, self._pool.spec.block_tokens
        order = {place(ordinal): ordinal for ordinal in visible}
        count = len(order)
        span = self._table.policy.span
        if span is not None and len(self.frames) == 1 and count <= span:
            span = None  # the one query frame sees all of it
        return AttnMeta(
            ordinals=tuple(order[index] for index in range(count)),
            pending=self.frames,
            runs=((self._lane.base, count),),
            writes=merge_runs(self._lane.base + place(ordinal) for ordinal in self.frames),
            q_len=len(self.frames) * tokens,
            kv_len=count * tokens,
            mask="none" if span is None else "causal",
            span=span,
        )

    @property
    def num_layers(self) -> int:
        """Layers of the pool."""
        return self._pool.spec.num_layers

    # Reading and writing

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Overwrite the chunk's K and V of one layer, as often as needed.

        Args:
            layer: index of the layer.
            k, v: `[n*block_tokens, kv_heads, head_dim]` in the pool's dtype, frames in order.

        Raises:
            InvalidRequest: another shape or dtype, or the chunk is over.
        """
        self._expect_open()
        self._expect_rows(len(self.frames), k, v)
        self._store(layer, self.meta.writes, k, v)
        self._unwritten.discard(layer)

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """What the chunk sees of one layer: K and V `[kv_len, kv_heads, head_dim]`.

        One view of the lane, in the order of `meta.ordinals`. Once the window is full, it has the
        same address and shape for every chunk.
        """
        self._expect_open()
        view = self._seen.get(layer)
        if view is None:
            view = self._seen[layer] = self._pool.rows(layer, *self.meta.runs[0])
        return view

    # A shadowed sink: raw keys in the sink's own blocks, rotated ones in the lane

    def write_sink(self, layer: int, k_raw: Tensor, v: Tensor) -> None:
        """Store raw keys and values of those pending frames that belong to a shadowed sink.

        Their places in the lane are written by `write` like all others.

        Args:
            layer: index of the layer.
            k_raw, v: `[m*block_tokens, kv_heads, head_dim]` for the `m` first frames of the chunk.

        Raises:
            InvalidRequest: another shape or dtype, no pending sink frames, or the chunk is over.
        """
        self._expect_open()
        if not self.sinks:
            raise InvalidRequest(f"frames {_span(self.frames)} contain no shadowed sink frame")
        self._expect_rows(self.sinks, k_raw, v)
        self._store_sink(layer, k_raw, v)
        self._unsunk.discard(layer)

    def sink(self, layer: int) -> tuple[Tensor, Tensor]:
        """Raw keys, and values, of the committed sink: `[s*block_tokens, kv_heads, head_dim]` each.

        A view if the sink's blocks are neighbours, as they are unless the pool was crowded.
        """
        self._expect_open()
        runs = self._runs(range(self._sunk))
        if len(runs) == 1:
            return self._pool.rows(layer, *runs[0])
        if not runs:
            return self._pool.rows(layer, self._lane.base, 0)
        parts = [self._pool.rows(layer, *run) for run in runs]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

    def shadow(self, layer: int) -> Tensor:
        """Keys of the lane's shadow slots, a view `[s*block_tokens, kv_heads, head_dim]`.

        The caller fills it for every chunk with `sink(layer)`'s keys, rotated to where this chunk
        should see them. The values beside it are kept right by the table.
        """
        self._expect_open()
        return self._pool.rows(layer, self._lane.base, self._sunk)[0]

    # The end

    def commit(self) -> None:
        """Seal the frames: from now on they are part of the table and never change.

        Raises:
            InvalidRequest: a layer was never written, or the chunk is over.
        """
        self._expect_open()
        if self._unwritten or self._unsunk:
            layers = sorted(self._unwritten | self._unsunk)
            raise InvalidRequest(f"layers {layers} of frames {_span(self.frames)} were not written")
        self._seal()
        self._open = False
        self._table._commit(self)

    def abort(self) -> None:
        """Leave nothing of the chunk; see `BlockTable.chunk` for what comes back. Idempotent."""
        if self._open:
            self._open = False
            self._table._abort(self)

    def __enter__(self) -> Chunk:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    # Helpers

    def _store(self, layer: int, runs: Runs, k: Tensor, v: Tensor) -> None:
        views = self._written.get((layer, runs))
        if views is None:
            views = [self._pool.rows(layer, *run) for run in runs]
            self._written[layer, runs] = views
        if len(views) == 1:
            _copy(views[0], k, v)
            return
        at = 0
        for to in views:
            end = at + len(to[0])
            _copy(to, k[at:end], v[at:end])
            at = end

    def _store_sink(self, layer: int, k_raw: Tensor, v: Tensor) -> None:
        self._store(layer, self._runs(self.frames[: self.sinks]), k_raw, v)

    def _seal(self) -> None:
        """What is left to do before the frames are committed: nothing, they lie in their blocks."""

    def _runs(self, ordinals: range) -> tuple[tuple[int, int], ...]:
        return merge_runs(self.blocks[ordinal].slot for ordinal in ordinals)

    def _expect_rows(self, frames: int, k: Tensor, v: Tensor) -> None:
        spec = self._pool.spec
        shape = (frames * spec.block_tokens, spec.kv_heads, spec.head_dim)
        for name, tensor in (("k", k), ("v", v)):
            if tensor.shape != shape or tensor.dtype != spec.dtype:
                raise InvalidRequest(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype}; frames {_span(self.frames)} "
                    f"take {shape} {spec.dtype}"
                )

    def _expect_open(self) -> None:
        if not self._open:
            raise InvalidRequest(f"the chunk of frames {_span(self.frames)} is over")


class CodedChunk(Chunk):
    """A chunk of a coded pool.

    Its own frames stay in the compute dtype, so every step reads what it wrote, and are encoded
    once, at commit. The past is decoded one layer at a time, into buffers that the pool lends to
    the chunk (`Staging`): what `kv` returns holds until the next `kv`, what `sink` returns until
    the next `sink`.
    """

    def __init__(
        self,
        table: BlockTable,
        lane: Lane,
        frames: range,
        visible: Sequence[int],
        blocks: dict[int, Block],
        staging: Staging,
    ) -> None:
        super().__init__(table, lane, frames, visible, blocks)
        self._staging = staging
        self._past = merge_runs(x for x, o in enumerate(self.meta.ordinals) if o not in frames)
        self._decoded: int | None = None  # the layer whose past lies in the buffers

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """What the chunk sees of one layer: K and V `[kv_len, kv_heads, head_dim]`.

        Decoded at the first call for a layer that is not the last one's. Address and shape are as
        steady as those of a raw pool, as long as one chunk of the pool is pending at a time.
        """
        self._expect_open()
        staging, tokens = self._staging, self._pool.spec.block_tokens
        if self._decoded != layer:
            self._decoded = None  # until it is whole
            for place, count in self._past:
                rows = slice(place * tokens, (place + count) * tokens)
                slot = self._lane.base + place
                self._pool.decode(layer, slot, staging.k[rows], staging.v[rows], staging)
            self._decoded = layer
        k, v = staging.pending[layer]
        staging.k[: self._sunk * tokens].copy_(staging.shadow[layer])
        at = 0
        for slot, count in self.meta.writes:
            first, size = (slot - self._lane.base) * tokens, count * tokens
            staging.k[first : first + size].copy_(k[at : at + size])
            staging.v[first : first + size].copy_(v[at : at + size])
            at += size
        return staging.k[: self.meta.kv_len], staging.v[: self.meta.kv_len]

    def sink(self, layer: int) -> tuple[Tensor, Tensor]:
        """Raw keys, and values, of the committed sink: `[s*block_tokens, kv_heads, head_dim]`."""
        self._expect_open()
        k, v = self._staging.sink
        at = 0
        for slot, count in self._runs(range(self._sunk)):
            size = count * self._pool.spec.block_tokens
            rows = slice(at, at + size)
            self._pool.decode(layer, slot, k[rows], v[rows], self._staging)
            at += size
        return k, v

    def shadow(self, layer: int) -> Tensor:
        """Keys that `kv` shows for the committed sink, to be filled: see `Chunk.shadow`."""
        self._expect_open()
        return self._staging.shadow[layer]

    def abort(self) -> None:
        """See `Chunk.abort`."""
        if self._open:
            super().abort()
            self._pool.take_back(self._staging)

    def commit(self) -> None:
        """See `Chunk.commit`."""
        super().commit()
        self._pool.take_back(self._staging)

    def _store(self, layer: int, runs: Runs, k: Tensor, v: Tensor) -> None:
        _copy(self._staging.pending[layer], k, v)

    def _store_sink(self, layer: int, k_raw: Tensor, v: Tensor) -> None:
        _copy(self._staging.raw[layer], k_raw, v)

    def _seal(self) -> None:
        """Encode: the shadowed sink's frames from their raw keys, the others as written."""
        sinks, staging = self.sinks, self._staging
        for layer in range(self.num_layers):
            self._encode(layer, self.frames[:sinks], *staging.raw[layer])
            k, v = (x[sinks * self._pool.spec.block_tokens :] for x in staging.pending[layer])
            self._encode(layer, self.frames[sinks:], k, v)

    def _encode(self, layer: int, ordinals: range, k: Tensor, v: Tensor) -> None:
        at = 0
        for slot, count in self._runs(ordinals):
            size = count * self._pool.spec.block_tokens
            self._pool.encode(layer, slot, k[at : at + size], v[at : at + size], self._staging)
            at += size


def split_sink(frames: range, shadow: int) -> tuple[int, int]:
    """Frames of a shadowed sink, of `shadow` frames, before `frames` and among them."""
    return min(shadow, frames.start), max(0, min(shadow, frames.stop) - frames.start)


def _copy(to: KV, k: Tensor, v: Tensor) -> None:
    with torch.no_grad():  # else writing what needs a gradient would tie the target to its graph
        to[0].copy_(k)
        to[1].copy_(v)


def _span(frames: range) -> str:
    return f"{frames.start}..{frames.stop - 1}"
