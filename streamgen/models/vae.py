"""Latents to pixels and back, with the decoder's state held by the session.

Axes: F frames, C latent channels, Y and X latent rows and columns, H and W pixel rows and columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from streamgen.errors import WeightsError
from streamgen.weights.load import load_into, read_tensors


class VideoCodec(Protocol):
    """Pixels in and out, a piece at a time.

    Attributes:
        temporal: pixel frames of a latent frame, the first of a video excepted, which gives one.
    """

    temporal: int

    def decode(self, latents_FCYX: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Pixels uint8 `[F', H, W, 3]` of the next latents, and the state after them.

        `state` is whatever the decoder needs of the past (None: a video begins), and never changed
        in place.
        """
        ...

    def encode(self, pixels_FHW3: Tensor) -> Tensor:
        """Normalised latents `[F', C, Y, X]`, float32, of a video's uint8 pixels."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Its weights."""
        ...


class FrameCodec(nn.Module):
    """A diffusers autoencoder that codes every frame by itself, so its state is None.

    Attributes:
        temporal: 1, pixel frames of a latent frame.

    Args:
        vae: `AutoencoderDC` or `AutoencoderTiny`.
        mean, std: per-channel statistics `[C]` that make its latents zero-mean, unit-variance.
    """

    temporal = 1

    def __init__(self, vae: nn.Module, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.vae = vae.eval().requires_grad_(False).to(memory_format=torch.channels_last)
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.vae.parameters()).dtype

    def cast(self, dtype: torch.dtype) -> None:
        """Run the autoencoder in `dtype`; the statistics stay in float32."""
        nn.Module.to(self.vae, dtype=dtype)  # diffusers' own `to` warns without a reason here

    @torch.inference_mode()
    def decode(self, latents_FCYX: Tensor, state: None = None) -> tuple[Tensor, None]:
        """Pixels uint8 `[F, H, W, 3]` on the latents' device."""
        x = (latents_FCYX.float() * self.std + self.mean).to(self.dtype)
        pixels = self.vae.decode(x.contiguous(memory_format=torch.channels_last)).sample
        pixels = pixels.float().add_(1).mul_(127.5).clamp_(0, 255).round_().to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).contiguous(), None

    @torch.inference_mode()
    def encode(self, pixels_FHW3: Tensor) -> Tensor:
        """Normalised latents `[F, C, Y, X]`, float32, of uint8 pixels."""
        x = pixels_FHW3.permute(0, 3, 1, 2).to(self.dtype).div(127.5).sub(1)
        coded = self.vae.encode(x.contiguous(memory_format=torch.channels_last))
        latent = coded.latent if hasattr(coded, "latent") else coded.latents  # DC, Tiny
        return (latent.float() - self.mean) / self.std

    @classmethod
    def from_folder(cls, folder: Path) -> FrameCodec:
        """Load `config.json`, `latent_stats.json` and the weights beside them, in float32.

        Raises:
            WeightsError: a file is missing or damaged, or the class is not one of the two.
        """
        try:
            config = json.loads((folder / "config.json").read_text())
            stats = json.loads((folder / "latent_stats.json").read_text())
            name, channels = config["_class_name"], config["latent_channels"]
            mean, std = ([float(x) for x in stats[key]] for key in ("mean", "std"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"autoencoder in {folder.name!r} can't be read: {error}") from error
        if not len(mean) == len(std) == channels:
            raise WeightsError(
                f"latent_stats.json of {folder.name!r} has {len(mean)} means and {len(std)} "
                f"deviations for {channels} latent channels"
            )
        kind = _autoencoder(name)
        with torch.device("meta"):
            vae = kind.from_config(config)
        vae = nn.Module.to_empty(vae, device="cpu")
        load_into(vae, read_tensors(folder / "diffusion_pytorch_model.safetensors"))
        return cls(vae.float(), mean, std)


def _autoencoder(name: str) -> Any:
    if name == "AutoencoderDC":
        from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC

        return AutoencoderDC
    if name == "AutoencoderTiny":
        from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

        return AutoencoderTiny
    raise WeightsError(f"autoencoder class {name!r}: known are AutoencoderDC and AutoencoderTiny")
