"""The baseline that paging is measured against: one region of maximum length per request.

This is how caches were laid out before PagedAttention (arXiv 2309.06180 §3.1): simple, always one
view, and most of it empty. Nothing can be shared; a fork is a copy of the whole region.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamgen.cache.pool import BlockPool
from streamgen.cache.tail import expect_raw, expect_tensor
from streamgen.errors import InvalidRequest


class ContiguousTable:
    """The K/V of one sequence of tokens, in a region reserved for the longest it might get.

    Has the part of `TokenTable`'s interface that a contiguous layout can offer.

    Args:
        pool: where the region is taken, as a lane of whole blocks; a raw one.
        max_tokens: the longest the sequence may get.

    Attributes:
        length: tokens.

    Raises:
        InvalidRequest: `max_tokens` is not positive, or the pool is a coded one.
        PoolFull: no such run of slots is free, even if as many lie scattered.
    """

    def __init__(self, pool: BlockPool, max_tokens: int) -> None:
        expect_raw(pool.spec)
        if max_tokens < 1:
            raise InvalidRequest(f"max_tokens={max_tokens}: at least 1 is needed")
        self.pool = pool
        self.max_tokens = max_tokens
        self.length = 0
        self.closed = False
        with pool.lock:
            self._lane = pool.reserve(-(-max_tokens // pool.spec.block_tokens))

    @property
    def used_bytes(self) -> int:
        """Bytes of the tokens."""
        return self.length * self.pool.spec.token_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the region."""
        return 0 if self.closed else self._lane.size * self.pool.spec.block_bytes

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write the K and V of the next tokens.

        Args:
            k, v: `[num_layers, n, kv_heads, head_dim]` in the pool's dtype.

        Raises:
            InvalidRequest: another shape or dtype, more than `max_tokens`, or it was closed.
        """
        self._expect_held()
        spec = self.pool.spec
        shape = (spec.num_layers, k.shape[1] if k.ndim > 1 else 0, spec.kv_heads, spec.head_dim)
        expect_tensor("k", k, shape, spec.dtype)
        expect_tensor("v", v, shape, spec.dtype)
        end = self.length + shape[1]
        if end > self.max_tokens:
            raise InvalidRequest(f"{end} tokens in a region reserved for {self.max_tokens}")
        with torch.no_grad():
            for layer in range(spec.num_layers):
                for region, new in zip(self._region(layer), (k[layer], v[layer]), strict=True):
                    region[self.length : end].copy_(new)
        self.length = end

    def gather(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of the tokens in order: views `[length, kv_heads, head_dim]`."""
        self._expect_held()
        k, v = self._region(layer)
        return k[: self.length], v[: self.length]

    def truncate(self, n: int) -> None:
        """Drop all tokens but the first `n`; the region stays reserved.

        Raises:
            InvalidRequest: there are fewer tokens, or it was closed.
        """
        self._expect_held()
        if not 0 <= n <= self.length:
            raise InvalidRequest(f"truncate({n}): the table has {self.length} tokens")
        self.length = n

    def fork(self) -> ContiguousTable:
        """A second sequence with the same past, in a region of its own: all bytes are copied.

        Raises:
            InvalidRequest: it was closed.
            PoolFull: there is no second region.
        """
        self._expect_held()
        twin = ContiguousTable(self.pool, self.max_tokens)
        layers = range(self.pool.spec.num_layers)
        k, v = (torch.stack(x) for x in zip(*(self.gather(i) for i in layers), strict=True))
        twin.append(k, v)
        return twin

    def close(self) -> None:
        """Give the region back. Idempotent."""
        if not self.closed:
            with self.pool.lock:
                self.pool.dissolve(self._lane)
            self.length, self.closed = 0, True

    def _region(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.pool.rows(layer, self._lane.base, self._lane.size)

    def _expect_held(self) -> None:
        if self.closed:
            raise InvalidRequest("the contiguous table was closed")
