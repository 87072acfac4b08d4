"""How the keys and values of committed blocks are stored: as they are, or in fewer bits.

    name        a value is kept as              scales, each the largest |value| of what shares it
    raw         the compute dtype               none
    fp8_e4m3    4 bits exponent, 3 mantissa     fp32 per (block, head)
    fp8_e5m2    5 bits exponent, 2 mantissa     fp32 per (block, head)
    int8        integer in -127..127            K: fp32 per (block, head, channel)
                                                V: fp32 per (token, head)
    nvfp4       e2m1, two to a byte             e4m3 per 16 channels of a (token, head),
                                                fp32 per (block, head)

Keys have channels that are large in every token (KIVI, arXiv 2402.02750, section 3), so an integer
key needs a scale per channel; a float format brings its own range along. A codec sees whole blocks
and encodes each once, so it may look at all tokens of a block before it chooses a scale.

All codecs: zero stays zero; what is finite stays finite and no larger than the largest of its
group; infinity saturates; NaN spoils all that shares its scale, so a broken forward stays visible.
Encoding and decoding are elementwise but for the scales: same input, same bytes, same output,
however blocks are grouped.

Axes: N blocks, T tokens of a block, H heads, D channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from streamgen.errors import InvalidRequest

CODECS = ("raw", "fp8_e4m3", "fp8_e5m2", "int8", "nvfp4")

# Bounds of an fp32 scale: no division by zero, and `largest code * scale` never overflows.
TINY = torch.finfo(torch.float32).tiny
HUGE = torch.finfo(torch.float32).max * (1 - 1e-6)


def codec_name(name: str) -> str:
    """The name in `CODECS` of what a user asked for; "fp8" is short for "fp8_e4m3".

    Raises:
        InvalidRequest: there is none of that name.
    """
    full = "fp8_e4m3" if name == "fp8" else name
    if full not in CODECS:
        accepted = ", ".join(("raw", "fp8", *CODECS[1:]))
        raise InvalidRequest(f"KV codec {name!r}: accepted are {accepted}")
    return full


@dataclass(frozen=True)
class Part:
    """One tensor of a coded block.

    Attributes:
        shape: of one block in one layer; axis 0 is T, or 1 for what all tokens share.
        dtype: of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one block in one layer."""
        return math.prod(self.shape) * self.dtype.itemsize


class KVCodec(Protocol):
    """One side, K or V, of whole blocks. Neither verb allocates: all they need is passed in."""

    def layout(self, tokens: int, heads: int, dim: int) -> tuple[Part, ...]:
        """What a block of `[T, H, D]` is stored in: the payload, then its scales.

        Raises:
            InvalidRequest: the codec can't take this geometry.
        """
        ...

    def encode(self, x_NTHD: Tensor, out: Sequence[Tensor], work: Tensor) -> None:
        """Store blocks.

        Args:
            x_NTHD: fp32, contiguous; overwritten.
            out: per part of the layout a tensor `[N, *part.shape]`.
            work: int32, shape of `x_NTHD`, contiguous, to work in.
        """
        ...

    def decode(self, coded: Sequence[Tensor], out_NTHD: Tensor, work: Tensor) -> None:
        """Read blocks; `coded` is what `encode` filled, `out_NTHD` is fp32 and contiguous."""
        ...


def make_codecs(
    name: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[KVCodec, KVCodec]:
    """The codecs of K and of V.

    Args:
        name: one of `CODECS`.
        dtype: the compute dtype, in which "raw" stores.
        device: of the tensors that will be encoded.

    Raises:
        InvalidRequest: another name.
    """
    match name:
        case "raw":
            return Raw(dtype), Raw(dtype)
        case "fp8_e4m3" | "fp8_e5m2":
            kind = torch.float8_e4m3fn if name == "fp8_e4m3" else torch.float8_e5m2
            return Scaled(kind, (1, 3), device), Scaled(kind, (1, 3), device)
        case "int8":
            return Scaled(torch.int8, (1,), device), Scaled(torch.int8, (3,), device)
        case "nvfp4":
            return NVFP4(device), NVFP4(device)
    raise InvalidRequest(f"KV codec {name!r}: accepted are {', '.join(CODECS)}")


class Raw:
    """The values themselves."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def layout(self, tokens: int, heads: int, dim: int) -> tuple[Part, ...]:
        """One tensor."""
        return (Part((tokens, heads, dim), self.dtype),)

    def encode(self, x_NTHD: Tensor, out: Sequence[Tensor], work: Tensor) -> None:
        """Copy; exact, since every compute dtype is a part of fp32."""
        out[0].copy_(x_NTHD)

    def decode(self, coded: Sequence[Tensor], out_NTHD: Tensor, work: Tensor) -> None:
        """Copy."""
        out_NTHD.copy_(coded[0])


class Scaled:
    """`x = code * scale`, with a code of 8 bits and one scale for all that lies along `shared`.

    Args:
        dtype: of the code: an fp8 type or int8.
        shared: those of the axes N T H D along which elements share a scale.
        device: of the tensors that will be encoded.
    """

    def __init__(
        self, dtype: torch.dtype, shared: tuple[int, ...], device: torch.device | str
    ) -> None:
        self.dtype, self.shared = dtype, shared
        self.integer = not dtype.is_floating_point
        self.peak = 127.0 if self.integer else torch.finfo(dtype).max
        codes = torch.arange(256, dtype=torch.uint8)
        # torch decodes fp8 one element at a time on a CPU; a look-up is five times as fast
        self.values = None if self.integer else codes.view(dtype).float().to(device)

    def layout(self, tokens: int, heads: int, dim: int) -> tuple[Part, ...]:
        """The codes and the scales; a shared axis of the scales has length 1."""
        shape = (tokens, heads, dim)
        scales = tuple(1 if axis in self.shared else x for axis, x in enumerate(shape, start=1))
        return Part(shape, self.dtype), Part(scales, torch.float32)

    def encode(self, x_NTHD: Tensor, out: Sequence[Tensor], work: Tensor) -> None:
        """Scale the largest of each group to the largest code, round to nearest even."""
        code, scale = out
        _largest(x_NTHD, self.shared, scale)
        scale.div_(self.peak).clamp_(TINY, HUGE / self.peak)
        x_NTHD.div_(scale).clamp_(-self.peak, self.peak)
        code.copy_(x_NTHD.round_() if self.integer else x_NTHD)

    def decode(self, coded: Sequence[Tensor], out_NTHD: Tensor, work: Tensor) -> None:
        """Multiply."""
        code, scale = coded
        if self.values is None:
            out_NTHD.copy_(code)
        else:
            work.copy_(code.view(torch.uint8))
            torch.index_select(self.values, 0, work.flatten(), out=out_NTHD.flatten())
        out_NTHD.mul_(scale)


class NVFP4:
    """NVIDIA's 4-bit format: e2m1 codes, an e4m3 scale for 16 neighbours, an fp32 scale on top.

    A code is a sign bit and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; channel 2i lies in the low half of
    byte i, channel 2i + 1 in the high half. The fp32 scale makes the largest e4m3 scale of a
    (block, head) 448, so that these scales use the whole range of their type ("Introducing NVFP4",
    NVIDIA developer blog, 2025; the weights of a checkpoint have one fp32 scale per tensor).
    """

    GROUP = 16
    MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def __init__(self, device: torch.device | str) -> None:
        positive = torch.tensor(self.MAGNITUDES)
        values = torch.cat([positive, -positive])  # by code
        low, high = values.repeat(16), values.repeat_interleave(16)  # by byte
        self.pairs = torch.complex(low, high).to(device)  # a look-up gives two values at once
        # Borders between the 15 values in ascending order. A tie goes to the even code, hence up
        # at every second border; bucketize sends it down, so these borders are a hair lower.
        ladder = torch.cat([-positive.flip(0), positive[1:]])
        borders = (ladder[:-1] + ladder[1:]) / 2
        borders[::2] = torch.nextafter(borders[::2], torch.tensor(-torch.inf))
        self.borders = borders.to(device)

    def layout(self, tokens: int, heads: int, dim: int) -> tuple[Part, ...]:
        """Pairs of codes, scales of 16 channels, scales of a head.

        Raises:
            InvalidRequest: a head is no whole number of groups of 16 channels.
        """
        if dim % self.GROUP:
            raise InvalidRequest(
                f"head_dim={dim}: the nvfp4 codec takes multiples of {self.GROUP} channels"
            )
        return (
            Part((tokens, heads, dim // 2), torch.uint8),
            Part((tokens, heads, dim // self.GROUP), torch.float8_e4m3fn),
            Part((1, heads, 1), torch.float32),
        )

    def encode(self, x_NTHD: Tensor, out: Sequence[Tensor], work: Tensor) -> None:
        """Scale, round to the nearest code (ties to even), pack."""
        code, scale, head_scale = out
        groups = self._groups(x_NTHD)
        exact = _head(work, scale).view(torch.float32)
        _largest(x_NTHD, (1, 3), head_scale)
        head_scale.div_(6 * 448).clamp_(TINY, HUGE / (6 * 448))
        x_NTHD.div_(head_scale)
        torch.linalg.vector_norm(groups, math.inf, -1, out=exact)
        exact.div_(6).clamp_(2**-9, 448)  # 2^-9 is the smallest e4m3 that is not 0
        scale.copy_(exact)
        exact.copy_(scale)  # divide by what decode will multiply with
        groups.div_(exact[..., None])
        torch.bucketize(x_NTHD, self.borders, out_int32=True, out=work)
        rung, sign = work.sub_(7), x_NTHD.view(torch.int32)  # rung -7..7 of the ladder of values
        sign.copy_(rung).bitwise_and_(8)  # two's complement: bit 3 is set in -7..-1
        nibble = rung.abs_().add_(sign)
        code.copy_(nibble[..., 1::2].mul_(16).add_(nibble[..., ::2]))

    def decode(self, coded: Sequence[Tensor], out_NTHD: Tensor, work: Tensor) -> None:
        """Look up, then multiply by `scale * head_scale`."""
        code, scale, head_scale = coded
        index = _head(work, code)
        index.copy_(code)
        pairs = out_NTHD.view(torch.complex64).flatten()
        torch.index_select(self.pairs, 0, index.flatten(), out=pairs)
        exact = _head(work, scale).view(torch.float32)
        exact.copy_(scale)
        exact.mul_(head_scale)
        self._groups(out_NTHD).mul_(exact[..., None])

    def _groups(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.GROUP)


def _largest(x: Tensor, axes: tuple[int, ...], out: Tensor) -> None:
    """Largest absolute value along `axes`, which stay with length 1; makes no copy of `x`."""
    torch.linalg.vector_norm(x, math.inf, axes, True, out=out)


def _head(work: Tensor, like: Tensor) -> Tensor:
    """The first elements of `work`, in the shape of `like`."""
    return work.flatten()[: like.numel()].view(like.shape)
