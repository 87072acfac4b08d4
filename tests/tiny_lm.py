"""A causal transformer small enough to recompute everything: the oracle for caches of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy.typing as npt
import torch
from torch import Tensor

from streamgen.cache import KVSpec
from streamgen.cache.tail import Tail

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, VOCAB = 2, 4, 2, 4, 16, 13

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class TinyLM:
    """2 layers, 4 query heads over 2 K/V heads, RoPE by given positions, float64, random weights.

    Queries and keys are large, so that attention is sharp and a wrong mask or position shows.
    """

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)

        def make(*shape: int, gain: float = 1.0) -> Tensor:
            x = torch.randn(*shape, generator=g, dtype=torch.float64)
            return gain * x / shape[0] ** 0.5

        self.embed = make(WIDTH, VOCAB, gain=4.0).T
        self.layers = [
            {
                "q": make(WIDTH, HEADS * DIM, gain=3.0),
                "k": make(WIDTH, KV_HEADS * DIM, gain=3.0),
                "v": make(WIDTH, KV_HEADS * DIM),
                "o": make(HEADS * DIM, WIDTH),
                "up": make(WIDTH, 2 * WIDTH),
                "down": make(2 * WIDTH, WIDTH),
            }
            for _ in range(LAYERS)
        ]

    @staticmethod
    def spec(block_tokens: int, num_layers: int = LAYERS) -> KVSpec:
        """What a pool for this model needs."""
        return KVSpec(num_layers, KV_HEADS, DIM, block_tokens, torch.float64)

    def full(self, tokens: Sequence[int], positions: npt.ArrayLike | None = None) -> Tensor:
        """Logits `[n, vocab]` without any cache."""
        n = len(tokens)
        at = torch.arange(n) if positions is None else torch.as_tensor(positions)
        mask = torch.ones(n, n, dtype=torch.bool).tril()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(rotate(q, at), rotate(k, at), v, mask)

        return self._logits(tokens, attend)

    def step(self, tail: Tail, tokens: Sequence[int], rotated: bool = False) -> Tensor:
        """Logits `[n, vocab]` of a tail's tokens, which see the cache; writes their K and V.

        The cache holds raw keys, rotated by their positions when read, or keys that are `rotated`.
        """
        at, kv_at = torch.as_tensor(tail.positions), torch.as_tensor(tail.kv_positions)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            tail.write(layer, rotate(k, at) if rotated else k, v)
            keys, values = tail.kv(layer)
            return attention(
                rotate(q, at), keys if rotated else rotate(keys, kv_at), values, tail.mask()
            )

        return self._logits(tokens, attend)

    def layered_step(self, tails: Sequence[Tail], tokens: Sequence[int]) -> Tensor:
        """As `step`, with a tail of a single-layer table for each layer, of any lengths."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            tail = tails[layer]
            tail.write(0, k, v)
            keys, values = tail.kv(0)
            at, kv_at = torch.as_tensor(tail.positions), torch.as_tensor(tail.kv_positions)
            return attention(rotate(q, at), rotate(keys, kv_at), values, tail.mask())

        return self._logits(tokens, attend)

    def _logits(self, tokens: Sequence[int], attend: Attend) -> Tensor:
        x = self.embed[torch.as_tensor(tokens)]
        for index, w in enumerate(self.layers):
            h = _norm(x)
            q, k, v = ((h @ w[name]).unflatten(1, (-1, DIM)) for name in "qkv")
            x = x + attend(index, q, k, v) @ w["o"]
            x = x + torch.tanh(_norm(x) @ w["up"]) @ w["down"]
        return _norm(x) @ self.embed.T


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Queries `[n, HEADS, DIM]` over keys and values `[m, KV_HEADS, DIM]`: `[n, HEADS * DIM]`."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) / DIM**0.5
    shares = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", shares, v).flatten(1)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE (split halves, base 100) of `[n, heads, DIM]` at integer positions `[n]`."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1
    )


def _norm(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()
