"""The geometry of one KV cache: what a block is, and how many bytes it takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from streamgen.cache.codec import Part, make_codecs
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
        dtype: in which K and V are computed and attended to; "raw" stores them so.
        codec: how committed blocks are stored (`streamgen.cache.codec`).

    Raises:
        InvalidRequest: a size is not a positive integer, there is no such codec, or it can't take
            this geometry or dtype.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype = torch.float32
    codec: str = "raw"

    def __post_init__(self) -> None:
        for name in ("num_layers", "kv_heads", "head_dim", "block_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidRequest(f"{name}={value!r}: a positive integer is needed")
        if self.codec != "raw" and not self.dtype.is_floating_point:
            raise InvalidRequest(f"dtype={self.dtype}: the {self.codec} codec takes floats")
        _ = self.layout  # refused here, not at the first use

    @cached_property
    def layout(self) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """The tensors that one layer of a block is stored in: those of K, those of V."""
        k, v = (
            codec.layout(self.block_tokens, self.kv_heads, self.head_dim)
            for codec in make_codecs(self.codec, self.dtype)
        )
        return k, v

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: K, V and scales of its own, all layers."""
        return self.num_layers * sum(
            part.nbytes // self.block_tokens
            for side in self.layout
            for part in side
            if part.shape[0] == self.block_tokens
        )

    @property
    def scale_bytes(self) -> int:
        """Bytes of those scales that the tokens of a block share, all layers; 0 if raw."""
        return self.block_bytes - self.block_tokens * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K, V and all scales, all layers."""
        return self.num_layers * sum(part.nbytes for side in self.layout for part in side)
