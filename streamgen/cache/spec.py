"""The geometry of one KV cache: what a block is, and how many bytes it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from streamgen.errors import InvalidRequest


@dataclass(frozen=True)
class KVSpec:
    """Shape of the keys and values of one model.

    A block holds the K and V of one latent frame, in every layer.

    Args:
        num_layers: attention layers that keep keys and values.
        kv_heads: K/V heads of a layer (fewer than query heads under GQA).
        head_dim: channels of a head.
        block_tokens: tokens of a block, any number: a latent frame has height x width of them.
        dtype: of the stored K and V.

    Raises:
        InvalidRequest: a size is not a positive integer.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("num_layers", "kv_heads", "head_dim", "block_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidRequest(f"{name}={value!r}: a positive integer is needed")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: K and V, all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V, all layers."""
        return self.block_tokens * self.token_bytes
