"""What a transformer's attention sees at run time: a cache chunk with positions, and a text.

`CachedHistory` joins the cache core (which slots) to rotary positions (where in time) for one
chunk: it rotates, writes and reads, so the model knows of neither. Build one per chunk and use it
for every denoising step and for the clean pass.

Position policies:
    absolute      a key is stored rotated at its frame number and never touched again
                  (Self-Forcing)
    sliding_sink  as absolute, but the sink keeps its distance: once per chunk it is rotated from
                  raw keys to where it stands just before the window (LongLive's window-relative
                  positions: only differences count, so moving the sink equals moving all else)

Axes: N tokens of the chunk, T tokens in view, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from streamgen.cache import Chunk
from streamgen.kernels.attention import attend
from streamgen.models.rope import rotate, rotation

Positions = Literal["absolute", "sliding_sink"]


class CachedHistory:
    """The `History` of one cache chunk (`streamgen.models.wan.History`).

    Args:
        chunk: the pending chunk, from `table.chunk(n)` or `table.reopen(n)`.
        grid: rows and columns of tokens in a frame.
        window: frames that a chunk can see, sink and chunk included; where a moving sink stands
            follows from it. None where nothing slides.
        blocks: `(start, length)` of the blocks if the chunk's own frames must not see later
            blocks, in frames: one begins at every `start + i * length`. None = the whole chunk
            sees itself.

    Attributes:
        seconds: time spent moving keys and values, the sink's rotation included.
    """

    def __init__(
        self,
        chunk: Chunk,
        grid: tuple[int, int],
        window: int | None = None,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        keys = chunk.kv(0)[0]
        self.chunk, self.seconds = chunk, 0.0
        self.turn = rotation(chunk.frames, grid, keys.shape[-1], keys.device)
        self.mask = None if blocks is None else self._block_causal(*blocks, grid[0] * grid[1])
        self._sunk_tokens = chunk.sinks * grid[0] * grid[1]
        if window is not None and chunk.shadow(0).shape[0]:
            self._place_sink(grid, max(0, chunk.frames.stop - window))

    def _place_sink(self, grid: tuple[int, int], first: int) -> None:
        """Rotate the committed sink's raw keys to frames `first`, `first + 1`, ..."""
        start = perf_counter()
        frames = self.chunk.shadow(0).shape[0] // (grid[0] * grid[1])
        turn = rotation(
            range(first, first + frames), grid, 2 * self.turn.shape[1], self.turn.device
        )
        for layer in range(self.chunk.num_layers):
            raw = self.chunk.sink(layer)[0]
            self.chunk.shadow(layer).copy_(rotate(raw[None], turn)[0])
        self.seconds += perf_counter() - start

    def _block_causal(self, start: int, length: int, frame_tokens: int) -> Tensor:
        queries = (torch.tensor(self.chunk.frames) - start) // length
        keys = (torch.tensor(self.chunk.meta.ordinals) - start) // length
        seen = queries[:, None] >= keys
        seen = seen.repeat_interleave(frame_tokens, 0).repeat_interleave(frame_tokens, 1)
        return seen.to(self.turn.device)

    def attend(self, layer: int, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """Store the chunk's keys and values, then attend to all in view; `[1, N, H, D]`."""
        q, k = rotate(q_BNHD, self.turn), rotate(k_BNHD, self.turn)
        start = perf_counter()
        self.chunk.write(layer, k[0], v_BNHD[0])
        if self._sunk_tokens:
            raw, v = (x[0, : self._sunk_tokens] for x in (k_BNHD, v_BNHD))
            self.chunk.write_sink(layer, raw, v)
        keys, values = self.chunk.kv(layer)
        self.seconds += perf_counter() - start
        return attend(q, keys[None], values[None], self.mask)


class CachedPrompt:
    """The `Prompt` of one text: its cross-attention keys and values, computed once.

    Args:
        layers: `WanModel.encode_prompt` of the text.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.layers = tuple(layers)

    def attend(self, layer: int, q_BNHD: Tensor) -> Tensor:
        """Cross-attention output `[1, N, H, D]`."""
        return attend(q_BNHD, *self.layers[layer])

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.nbytes for pair in self.layers for x in pair)
