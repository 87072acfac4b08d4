"""Where a pending chunk of a coded pool works: buffers in the compute dtype, made once.

A coded pool keeps committed blocks only. What a chunk writes stays in the compute dtype until its
commit, and what it reads is decoded one layer at a time, both in a `Staging` that the pool lends to
the chunk. Chunks that follow one another use the same one, so a pool has as many as chunks were
ever pending at once.

Axes: N blocks, T tokens of a block, H heads, D channels of a head, R rows = N x T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from streamgen.cache.codec import KVCodec
from streamgen.cache.spec import KVSpec

# Tokens that are encoded or decoded at once: enough to hide the cost of a call, few enough for
# what lies between two operators to stay in a CPU's cache.
BATCH_TOKENS = 512


class Staging:
    """Buffers for one pending chunk. They grow when a chunk needs more, and never shrink.

    Attributes:
        k, v: what the chunk sees of one layer, `[R, H, D]`.
        pending: per layer K and V of the chunk's frames, `[R, H, D]`.
        raw: per layer raw K, and V, of its frames that belong to a shadowed sink.
        shadow: per layer the rotated keys of the committed sink.
        sink: raw K, and V, of the committed sink in one layer.
    """

    def __init__(self, spec: KVSpec, device: torch.device | str) -> None:
        self.spec, self.device = spec, device
        self._buffers: dict[str, Tensor] = {}
        self._batch = max(1, BATCH_TOKENS // spec.block_tokens)
        shape = (self._batch, spec.block_tokens, spec.kv_heads, spec.head_dim)
        self._work = self._buffer("work", torch.int32, *shape)
        self._wide = self._buffer("wide", torch.float32, *shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def fit(self, lane: int, frames: int, sunk: int, sinks: int) -> None:
        """Make ready for a chunk.

        Args:
            lane: frames that it can see, its own included.
            frames: frames of its own.
            sunk: committed frames of a shadowed sink.
            sinks: own frames that belong to a shadowed sink.
        """
        layers = self.spec.num_layers
        self.k, self.v = self._frames("k", lane), self._frames("v", lane)
        self.pending = self._pairs("pending", layers, frames)
        self.raw = self._pairs("raw", layers, sinks)
        self.shadow = self._frames("shadow", sunk, layers).unbind()
        self.sink = self._pairs("sink", 1, sunk)[0]

    def encode(self, codec: KVCodec, x_RHD: Tensor, parts: Sequence[Tensor]) -> None:
        """Store the rows of whole blocks in `parts`, each `[N, *part.shape]`."""
        blocks = self._blocks(x_RHD)
        for batch, size in self._batches(len(blocks)):
            wide = self._wide[:size]
            wide.copy_(blocks[batch])
            codec.encode(wide, [part[batch] for part in parts], self._work[:size])

    def decode(self, codec: KVCodec, parts: Sequence[Tensor], out_RHD: Tensor) -> None:
        """Read whole blocks from `parts`, each `[N, *part.shape]`."""
        blocks = self._blocks(out_RHD)
        direct = out_RHD.dtype == torch.float32
        for batch, size in self._batches(len(blocks)):
            wide = blocks[batch] if direct else self._wide[:size]
            codec.decode([part[batch] for part in parts], wide, self._work[:size])
            if not direct:
                blocks[batch].copy_(wide)

    def _blocks(self, x_RHD: Tensor) -> Tensor:
        return x_RHD.view(-1, self.spec.block_tokens, *x_RHD.shape[1:])

    def _batches(self, blocks: int) -> list[tuple[slice, int]]:
        starts = range(0, blocks, self._batch)
        return [(slice(x, x + self._batch), min(self._batch, blocks - x)) for x in starts]

    def _pairs(self, name: str, layers: int, frames: int) -> list[tuple[Tensor, Tensor]]:
        k, v = (self._frames(f"{name} {side}", frames, layers).unbind() for side in "kv")
        return list(zip(k, v, strict=True))

    def _frames(self, name: str, frames: int, *layers: int) -> Tensor:
        spec = self.spec
        rows = frames * spec.block_tokens
        return self._buffer(name, spec.dtype, *layers, rows, spec.kv_heads, spec.head_dim)

    def _buffer(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        size, have = math.prod(shape), self._buffers.get(name)
        if have is None or have.numel() < size:
            with torch.inference_mode(False):  # as in the pool
                have = torch.zeros(size, dtype=dtype, device=self.device)
            self._buffers[name] = have
        return have[:size].view(shape)
