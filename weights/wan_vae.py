"""The original Wan2.1 autoencoder's file -> names and sizes of diffusers' `AutoencoderKLWan`.

The original numbers the parts of each side in one row, `encoder.downsamples.0 .. n` and
`decoder.upsamples.0 .. m`: a level is its residual blocks and then, but for the last level, a
resampler. diffusers keeps that row in the encoder and groups the decoder's by level. Names are from
`wan/modules/vae.py` of Wan2.1 (Apache-2.0) and diffusers 0.42; values and shapes are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from streamgen.errors import WeightsError
from streamgen.weights.keymaps import strip_prefixes

T = TypeVar("T")

_ENDS = {"conv1": "quant_conv", "conv2": "post_quant_conv"}
_SIDE = {
    "conv1": "conv_in",
    "middle.0": "mid_block.resnets.0",
    "middle.1": "mid_block.attentions.0",
    "middle.2": "mid_block.resnets.1",
    "head.0": "norm_out",
    "head.2": "conv_out",
}
_RESIDUAL = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
_ROW = re.compile(r"(encoder\.downsamples|decoder\.upsamples)\.(\d+)\.(.+)")
_PART = re.compile(r"(encoder|decoder)\.((?:middle|head)\.\d+|conv1)\.(.+)")


def convert(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors under diffusers' names (the same objects) and the sizes that they imply.

    The sizes are arguments of `AutoencoderKLWan` without the latents' statistics, which no file of
    the original has: its code has them as constants.

    Args:
        tensors: a state dict of the original class, with or without wrappers' prefixes.

    Raises:
        WeightsError: they are no Wan2.1 autoencoder's; says what they look like, if that is known.
    """
    tensors = strip_prefixes(tensors)
    sizes = infer_sizes(tensors)
    return rename(tensors, sizes["num_res_blocks"]), sizes


def rename(tensors: Mapping[str, T], num_res_blocks: int = 2) -> dict[str, T]:
    """Every original name as diffusers has it; a name that the original lacks stays as it is.

    Args:
        tensors: original name -> anything.
        num_res_blocks: residual blocks in a level of the encoder; the decoder has one more.
    """
    return {_rename(name, num_res_blocks): value for name, value in tensors.items()}


def _rename(name: str, num_res_blocks: int) -> str:
    if match := _ROW.fullmatch(name):
        row, number, rest = match[1], int(match[2]), _residual(match[3])
        if row.startswith("encoder"):
            return f"encoder.down_blocks.{number}.{rest}"
        level, part = divmod(number, num_res_blocks + 2)
        block = "upsamplers.0" if part > num_res_blocks else f"resnets.{part}"
        return f"decoder.up_blocks.{level}.{block}.{rest}"
    if match := _PART.fullmatch(name):
        return f"{match[1]}.{_SIDE.get(match[2], match[2])}.{_residual(match[3])}"
    first, _, rest = name.partition(".")
    return f"{_ENDS.get(first, first)}.{rest}" if rest else name


def _residual(name: str) -> str:
    """A name inside a residual block: "residual.2.weight" -> "conv1.weight"."""
    part, dot, leaf = name.rpartition(".")
    return f"{_RESIDUAL.get(part, part)}{dot}{leaf}"


def infer_sizes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Sizes of the original class, read off its tensors: arguments of `AutoencoderKLWan`.

    Raises:
        WeightsError: they are no Wan2.1 autoencoder's.
    """
    _refuse_others(tensors)
    try:
        width, in_channels = tensors["encoder.conv1.weight"].shape[:2]
        levels, temporal = _levels(tensors)
        if any(out % width for level in levels for out in level):
            raise ValueError(f"level widths {levels} are no multiples of {width}")
        if len({len(level) for level in levels}) != 1:
            raise ValueError(f"levels of {[len(level) for level in levels]} residual blocks")
        multiples = [level[-1] // width for level in levels]
        out_channels, last = tensors["decoder.head.2.weight"].shape[:2]
        return {
            "base_dim": width,
            "decoder_base_dim": last // multiples[0],
            "z_dim": tensors["conv2.weight"].shape[0],
            "dim_mult": multiples,
            "num_res_blocks": len(levels[0]),
            "temperal_downsample": temporal,  # diffusers' own spelling
            "in_channels": in_channels,
            "out_channels": out_channels,
            "scale_factor_temporal": 2 ** sum(temporal),
            "scale_factor_spatial": 2 ** len(temporal),
        }
    except KeyError as error:
        raise WeightsError(f"no Wan2.1 autoencoder: it lacks {error.args[0]}") from error
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise WeightsError(f"no Wan2.1 autoencoder: {error}") from error


def _refuse_others(tensors: Mapping[str, Tensor]) -> None:
    if "encoder.conv_in.weight" in tensors and any("_block" in name for name in tensors):
        raise WeightsError(
            "an autoencoder under diffusers' names: accepted is its folder, which has config.json"
        )
    if any(name.startswith("encoder.downsamples.0.downsamples.") for name in tensors):
        raise WeightsError(
            "the original Wan2.2 autoencoder: accepted is its folder in diffusers' layout, "
            "or the Wan2.1 autoencoder"
        )


def _levels(tensors: Mapping[str, Tensor]) -> tuple[list[list[int]], list[bool]]:
    """The encoder's levels, each the widths of its residual blocks; which resamplers halve time."""
    row: dict[int, set[str]] = {}
    for name in tensors:
        if (match := _ROW.fullmatch(name)) and match[1].startswith("encoder"):
            row.setdefault(int(match[2]), set()).add(match[3])
    if not row:
        raise KeyError("encoder.downsamples")
    levels: list[list[int]] = [[]]
    temporal = []
    for number in range(max(row) + 1):
        parts = row.get(number, set())
        if "residual.2.weight" in parts:
            widths = tensors[f"encoder.downsamples.{number}.residual.2.weight"].shape
            levels[-1].append(widths[0])
        elif "resample.1.weight" in parts:
            temporal.append("time_conv.weight" in parts)
            levels.append([])
        else:
            raise KeyError(f"encoder.downsamples.{number}.residual.2.weight")
    return levels, temporal
