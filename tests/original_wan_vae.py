"""The parts of the original Wan2.1 autoencoder, written out: names and shapes of its state dict."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


def conv(name: str, out: int, into: int, *kernel: int) -> Shapes:
    return {f"{name}.weight": (out, into, *kernel), f"{name}.bias": (out,)}


def residual(name: str, into: int, out: int) -> Shapes:
    found: Shapes = {f"{name}.residual.0.gamma": (into, 1, 1, 1)}
    found |= conv(f"{name}.residual.2", out, into, 3, 3, 3)
    found |= {f"{name}.residual.3.gamma": (out, 1, 1, 1)}
    found |= conv(f"{name}.residual.6", out, out, 3, 3, 3)
    return found | (conv(f"{name}.shortcut", out, into, 1, 1, 1) if into != out else {})


def middle(side: str, dim: int) -> Shapes:
    found = residual(f"{side}.middle.0", dim, dim)
    found |= {f"{side}.middle.1.norm.gamma": (dim, 1, 1)}
    found |= conv(f"{side}.middle.1.to_qkv", 3 * dim, dim, 1, 1)
    found |= conv(f"{side}.middle.1.proj", dim, dim, 1, 1)
    return found | residual(f"{side}.middle.2", dim, dim)


def head(side: str, dim: int, out: int) -> Shapes:
    return {f"{side}.head.0.gamma": (dim, 1, 1, 1)} | conv(f"{side}.head.2", out, dim, 3, 3, 3)


def shapes(
    dim: int = 96,
    z: int = 16,
    mults: Sequence[int] = (1, 2, 4, 4),
    blocks: int = 2,
    temporal: Sequence[bool] = (False, True, True),
) -> Shapes:
    """Name -> shape of every tensor, in the original's order of construction."""
    found = conv("encoder.conv1", dim, 3, 3, 3, 3)
    number, now = 0, dim
    for level, mult in enumerate(mults):
        for _ in range(blocks):
            found |= residual(f"encoder.downsamples.{number}", now, dim * mult)
            number, now = number + 1, dim * mult
        if level < len(mults) - 1:
            found |= conv(f"encoder.downsamples.{number}.resample.1", now, now, 3, 3)
            if temporal[level]:
                found |= conv(f"encoder.downsamples.{number}.time_conv", now, now, 3, 1, 1)
            number += 1
    found |= middle("encoder", now) | head("encoder", now, 2 * z)
    found |= conv("conv1", 2 * z, 2 * z, 1, 1, 1) | conv("conv2", z, z, 1, 1, 1)
    found |= conv("decoder.conv1", now, z, 3, 3, 3) | middle("decoder", now)
    number = 0
    for level, mult in enumerate(reversed(mults)):
        for _ in range(blocks + 1):
            found |= residual(f"decoder.upsamples.{number}", now, dim * mult)
            number, now = number + 1, dim * mult
        if level < len(mults) - 1:
            found |= conv(f"decoder.upsamples.{number}.resample.1", now // 2, now, 3, 3)
            if temporal[::-1][level]:
                found |= conv(f"decoder.upsamples.{number}.time_conv", 2 * now, now, 3, 1, 1)
            number, now = number + 1, now // 2
    return found | head("decoder", now, 3)


def random_tensors(found: Shapes, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of those shapes that keep a signal's size about the same."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in found.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("gamma"):
            tensors[name] = 1 + 0.1 * noise
        else:
            tensors[name] = noise * (0.05 if len(shape) == 1 else noise[0].numel() ** -0.5)
    return tensors
