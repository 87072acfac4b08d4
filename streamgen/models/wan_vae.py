"""Wan's causal video autoencoder as a stream: what it keeps of the past belongs to the caller.

The network is diffusers' `AutoencoderKLWan` (Wan2.1, and Wan2.2's residual form). Its causal
convolutions look two frames back; diffusers keeps these frames on the module, where two videos
would mix. Here a state is a tuple with one entry for every convolution that looks back, in the
order in which they run: None (nothing yet), "Rep" (a temporal upsampler that has seen the first
latent, which it passes through) or the frames `[1, C, F<=2, y, x]` that it saw last. A call copies
the tuple; the tensors in it are never written.

The first latent frame is one pixel frame, every other one `temporal` (4) of them. The first must go
through the network alone; later ones may go several at once.

Axes: F frames, C latent channels, Y and X latent rows and columns, H and W pixel rows and columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from streamgen.errors import InvalidRequest, SessionFileError, WeightsError
from streamgen.weights.load import find_weights, load_into, read_tensors
from streamgen.weights.wan_vae import convert

Features = tuple[Tensor | str | None, ...]
"""What a side of the network keeps of the past; see the head of the module."""

Pixels = Tensor | np.ndarray[Any, np.dtype[Any]]
"""uint8 pictures `[F, H, W, 3]`, or one picture `[H, W, 3]`."""

_REPEAT = "Rep"  # diffusers' mark
_KINDS = (None, _REPEAT)  # codes 0 and 1 in a state's tensors; 2 is frames
_STATISTICS_OF = 16  # latent channels of the original file whose statistics are known


@dataclass(frozen=True)
class EncoderState:
    """What the encoder keeps of a video between two pieces of it.

    Attributes:
        features: what its convolutions saw last.
        pending_FHW3: uint8 frames that wait for the rest of their group of `temporal`.
        frames: pixel frames taken so far, those that wait included.
    """

    features: Features
    pending_FHW3: Tensor
    frames: int


@dataclass(frozen=True)
class _Slot:
    """A convolution that looks back: its input channels, and its rows to a latent's row."""

    channels: int
    scale: int


class WanCodec(nn.Module):
    """diffusers' `AutoencoderKLWan` in pieces, with a state that the caller holds.

    Any number of videos may be coded at once, in any order and from any thread: the module itself
    does not change. Tensors are brought to where its weights are.

    Attributes:
        latent_channels: C.
        spatial: pixels to a latent, in height and in width.
        temporal: pixel frames to a latent frame, the first one excepted, which is one.
        piece: latents that one call of the decoder takes after the first of a video. 1 gives the
            same bits in any split, those of `AutoencoderKLWan.decode` (but for latents of under 16
            cells on a CPU, where diffusers' own bits depend on their number); more is less work for
            a GPU to start, needs more memory, and differs in the last bits of a float32.

    Args:
        vae: an `AutoencoderKLWan`; its config has the latents' mean and spread.
        piece: see the attribute.
        exact: False changes the network's convolutions to run through oneDNN, channels last, on a
            CPU in float32. torch takes a slow one for small pictures (channels x frames x rows up
            to 20480): 96x128 is several times faster so, and differs in the last bits.

    Raises:
        WeightsError: the config's statistics are not one number for each latent channel.
        InvalidRequest: `piece` is not positive.
    """

    mean: Tensor
    per_std: Tensor

    def __init__(self, vae: Any, piece: int = 1, exact: bool = True) -> None:
        super().__init__()
        if piece < 1:
            raise InvalidRequest(f"piece is {piece}; accepted is 1 or more latents")
        config = vae.config
        self.latent_channels: int = config.z_dim
        self.patch: int = config.patch_size or 1
        self.spatial: int = self.patch * 2 ** (len(config.dim_mult) - 1)
        self.temporal: int = 2 ** sum(config.temperal_downsample)
        self.piece = piece
        self._slots = _decoder_slots(vae.decoder)
        self._encoder_slots = sum(_looks_back(part) for part in vae.encoder.modules())
        self.vae = vae.eval().requires_grad_(False)
        if not exact:
            _use_onednn(self.vae)
        mean, std = (_statistic(config, name) for name in ("latents_mean", "latents_std"))
        self.register_buffer("mean", mean)
        # The original multiplies and divides by the reciprocal, which differs in the last bit.
        self.register_buffer("per_std", 1.0 / std)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype: torch.dtype = next(self.vae.parameters()).dtype
        return dtype

    def cast(self, dtype: torch.dtype) -> None:
        """Run the autoencoder in `dtype`; the statistics stay in float32."""
        nn.Module.to(self.vae, dtype=dtype)  # diffusers' own `to` warns without a reason here

    # Latents to pixels

    @torch.inference_mode()
    def decode(
        self, latents_FCYX: Tensor, state: Features | None = None
    ) -> tuple[Tensor, Features]:
        """Pixels uint8 `[F', H, W, 3]` of the next latents, and the state after them.

        F' is `temporal` F, less `temporal` - 1 where the latents begin a video (state None).

        Args:
            latents_FCYX: normalised latents, at least one.
            state: what the call before returned; it stays as it is and may be used again.

        Raises:
            InvalidRequest: latents of another form, or a state of a video of another size.
        """
        frames = []
        for samples_3FHW, after in self._decoded(latents_FCYX, state):
            scaled = samples_3FHW.float().add(1).mul_(127.5).round_()
            frames.append(scaled.to(torch.uint8).permute(1, 2, 3, 0))
            state = after
        assert state is not None
        return torch.cat(frames).contiguous(), state

    @torch.inference_mode()
    def decode_samples(
        self, latents_FCYX: Tensor, state: Features | None = None
    ) -> tuple[Tensor, Features]:
        """As `decode`, but samples `[3, F', H, W]` in [-1, 1] and the weights' dtype.

        Raises:
            InvalidRequest: as `decode`.
        """
        frames = []
        for samples_3FHW, after in self._decoded(latents_FCYX, state):
            frames.append(samples_3FHW)
            state = after
        assert state is not None
        return torch.cat(frames, dim=1), state

    def _decoded(
        self, latents_FCYX: Tensor, state: Features | None
    ) -> Iterator[tuple[Tensor, Features]]:
        """Samples `[3, f, H, W]` of one decoder call after another, and the state after each."""
        from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

        self._check_latents(latents_FCYX)
        device, dtype = self._place(latents_FCYX), self.dtype
        features = self._begin(state, latents_FCYX.shape[2:], device)
        z_FCYX = latents_FCYX.to(device, torch.float32) / self.per_std.to(device)
        z_1CFYX = (z_FCYX + self.mean.to(device)).to(dtype).transpose(0, 1).contiguous()[None]
        start = 0
        while start < z_1CFYX.shape[2]:
            first = features[0] is None
            end = start + (1 if first else self.piece)
            x = self.vae.post_quant_conv(z_1CFYX[:, :, start:end])
            x = self.vae.decoder(x, feat_cache=features, feat_idx=[0], first_chunk=first)
            yield unpatchify(x, self.patch)[0].clamp(-1.0, 1.0), tuple(features)
            start = end

    def _check_latents(self, latents_FCYX: Tensor) -> None:
        shape = list(latents_FCYX.shape)
        if len(shape) != 4 or shape[1] != self.latent_channels or 0 in shape:
            raise InvalidRequest(
                f"latents of shape {shape}; accepted are [frames, {self.latent_channels} channels, "
                "rows, columns], at least one frame"
            )

    def _begin(
        self, state: Features | None, size: Iterable[int], device: torch.device
    ) -> list[Tensor | str | None]:
        """A list for the decoder to replace entries of; the tensors are those of the state."""
        if state is None:
            return [None] * len(self._slots)
        if len(state) != len(self._slots) or not isinstance(state[0], Tensor):
            raise InvalidRequest("the state is not one that this autoencoder's decoder returned")
        rows, columns = size
        if list(state[0].shape[3:]) != [rows, columns]:
            y, x = state[0].shape[3:]
            raise InvalidRequest(
                f"latents of {rows}x{columns} after a state of {y}x{x}: a video keeps its size"
            )
        return [x.to(device, self.dtype) if isinstance(x, Tensor) else x for x in state]

    def _place(self, given: Tensor) -> torch.device:
        """Where the weights are; where the tensor is, if an offload hook brings them there."""
        weight = next(self.vae.parameters())
        return given.device if weight.is_meta else weight.device

    # Pixels to latents

    @torch.inference_mode()
    def encode(self, pixels_FHW3: Pixels | Iterable[Pixels]) -> Tensor:
        """Normalised latents `[1 + (F - 1) / temporal, C, Y, X]`, float32: the posterior's mode.

        Args:
            pixels_FHW3: a video uint8 `[F, H, W, 3]`, or its pieces in order (any number of frames,
                a single picture `[H, W, 3]` too), of which no more than `temporal` frames and one
                piece are held at a time.

        Raises:
            InvalidRequest: F is not 1 + `temporal` k, or pixels of another form.
        """
        if isinstance(pixels_FHW3, (Tensor, np.ndarray)):
            if pixels_FHW3.ndim == 4:
                self._check_count(len(pixels_FHW3))
            pixels_FHW3 = [pixels_FHW3]
        state, found = None, []
        for piece in pixels_FHW3:
            latents, state = self.encode_next(piece, state)
            found.append(latents)
        self._check_count(state.frames if state else 0)
        return torch.cat(found)

    @torch.inference_mode()
    def encode_next(
        self, pixels: Pixels, state: EncoderState | None = None
    ) -> tuple[Tensor, EncoderState]:
        """Latents `[F', C, Y, X]` of the groups of frames that are now whole, and the state.

        The first frame is a group, then every `temporal` frames; what is left of a group waits in
        the state, so F' may be 0.

        Raises:
            InvalidRequest: pixels of another form, or of another size than those before.
        """
        frames_FHW3 = self._check_pixels(pixels)
        features: list[Tensor | str | None] = [None] * self._encoder_slots
        taken = 0
        if state is not None:
            features, taken = list(state.features), state.frames
            if frames_FHW3.shape[1:] != state.pending_FHW3.shape[1:]:
                sizes = [f"{x.shape[1]}x{x.shape[2]}" for x in (frames_FHW3, state.pending_FHW3)]
                raise InvalidRequest(
                    f"frames of {sizes[0]} after {sizes[1]}: a video keeps its size"
                )
            pending = state.pending_FHW3.to(frames_FHW3.device)
            frames_FHW3 = torch.cat([pending, frames_FHW3])
            taken -= len(pending)
        device = self._place(frames_FHW3)
        features = [x.to(device, self.dtype) if isinstance(x, Tensor) else x for x in features]
        start, means = 0, []
        while start + (size := 1 if taken + start == 0 else self.temporal) <= len(frames_FHW3):
            group_FHW3 = frames_FHW3[start : start + size].to(device)
            means.append(self._encoded(group_FHW3, features))
            start += size
        height, width = frames_FHW3.shape[1:3]
        shape = (0, self.latent_channels, height // self.spatial, width // self.spatial)
        latents_FCYX = torch.cat([torch.empty(shape, device=device), *means])
        rest = frames_FHW3[start:].clone()  # of a clip of gigabytes, not a view that keeps it
        return latents_FCYX, EncoderState(tuple(features), rest, taken + len(frames_FHW3))

    def _encoded(self, pixels_FHW3: Tensor, features: list[Tensor | str | None]) -> Tensor:
        """Normalised latents `[f, C, Y, X]` of one group; entries of `features` are replaced."""
        x_3FHW = pixels_FHW3.permute(3, 0, 1, 2).float().div(127.5).sub(1)
        moments = self.encode_samples(x_3FHW.to(self.dtype).contiguous(), features)
        mean_FCYX = moments[: self.latent_channels].transpose(0, 1).float()
        return (mean_FCYX - self.mean.to(mean_FCYX.device)) * self.per_std.to(mean_FCYX.device)

    @torch.inference_mode()
    def encode_samples(self, samples_3FHW: Tensor, features: list[Tensor | str | None]) -> Tensor:
        """Moments `[2C, f, Y, X]` (means, then log variances) of one group, not normalised.

        The network itself, for those who check it: `encode` is made of these calls.

        Args:
            samples_3FHW: one frame, or (later) `temporal`, in [-1, 1].
            features: entries are replaced by those after the group; None everywhere to begin.
        """
        from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

        x = patchify(samples_3FHW[None], self.patch)
        moments = self.vae.quant_conv(self.vae.encoder(x, feat_cache=features, feat_idx=[0]))
        result: Tensor = moments[0]
        return result

    def _check_pixels(self, pixels: Pixels) -> Tensor:
        """uint8 `[F, H, W, 3]`."""
        if str(pixels.dtype).removeprefix("torch.") != "uint8":
            raise InvalidRequest(f"pixels of {pixels.dtype}; accepted is uint8, 0 to 255")
        if isinstance(pixels, np.ndarray):
            pixels = torch.tensor(pixels)
        if pixels.ndim == 3:
            pixels = pixels[None]
        shape = list(pixels.shape)
        if len(shape) != 4 or shape[3] != 3 or 0 in shape[1:]:
            raise InvalidRequest(
                f"pixels of shape {shape}; accepted are [frames, rows, columns, 3 colours]"
            )
        if shape[1] % self.spatial or shape[2] % self.spatial:
            raise InvalidRequest(
                f"pictures of {shape[1]}x{shape[2]}; accepted are multiples of {self.spatial} in "
                "height and in width"
            )
        return pixels

    def _check_count(self, frames: int) -> None:
        if frames < 1 or (frames - 1) % self.temporal:
            below = 1 + (frames - 1) // self.temporal * self.temporal
            near = f"{below} and {below + self.temporal}" if frames > 1 else "1"
            raise InvalidRequest(
                f"{frames} frames; accepted are 1 + {self.temporal} k frames, nearest {near}"
            )

    # The decoder's state

    @property
    def live(self) -> int:
        """Entries of a decoder state."""
        return len(self._slots)

    def state_bytes(self, height: int, width: int) -> int:
        """Bytes of a decoder state from the second latent on, for a video of that many pixels.

        Two frames of the input of every convolution that looks back.
        """
        area = (height // self.spatial) * (width // self.spatial)
        values = sum(2 * slot.channels * area * slot.scale**2 for slot in self._slots)
        return values * self.dtype.itemsize

    def state_tensors(self, state: Features | None) -> dict[str, Tensor]:
        """A state as a flat dict for a file: "kinds" and "entry.N"; empty for None.

        The tensors are contiguous; those of the state that are so already are not copied.
        """
        if state is None:
            return {}
        kinds = [2 if isinstance(x, Tensor) else _KINDS.index(x) for x in state]
        entries = {
            f"entry.{n}": x.contiguous() for n, x in enumerate(state) if isinstance(x, Tensor)
        }
        return {"kinds": torch.tensor(kinds, dtype=torch.uint8), **entries}

    def state_from(self, tensors: Mapping[str, Tensor]) -> Features | None:
        """The state that `state_tensors` made the dict of.

        Raises:
            SessionFileError: it is not one of this autoencoder.
        """
        if not tensors:
            return None
        try:
            return self._state_from(tensors)
        except (KeyError, ValueError, IndexError, RuntimeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise SessionFileError(
                f"the decoder's state does not fit this autoencoder: {reason}"
            ) from error

    def _state_from(self, tensors: Mapping[str, Tensor]) -> Features:
        kinds = tensors["kinds"].tolist()
        if len(kinds) != len(self._slots):
            raise ValueError(f"{len(kinds)} entries, it has {len(self._slots)}")
        if len(tensors) != 1 + kinds.count(2) or kinds[0] != 2:
            raise ValueError(f"{len(tensors) - 1} tensors for kinds {kinds}")
        state: list[Tensor | str | None] = []
        rows, columns = tensors["entry.0"].shape[-2:]
        for n, (kind, slot) in enumerate(zip(kinds, self._slots, strict=True)):
            if kind != 2:
                state.append(_KINDS[kind])
                continue
            entry = tensors[f"entry.{n}"]
            size = (1, slot.channels, rows * slot.scale, columns * slot.scale)
            if entry.ndim != 5 or (*entry.shape[:2], *entry.shape[3:]) != size:
                raise ValueError(f"entry {n} is {list(entry.shape)}")
            state.append(entry)
        return tuple(state)

    # Files

    @classmethod
    def from_folder(
        cls, folder: Path | str, latent_channels: int | None = None, **options: Any
    ) -> WanCodec:
        """Load a folder in diffusers' layout, in float32: `config.json` and the weights beside it.

        Args:
            folder: has `diffusion_pytorch_model.safetensors`, or its `.index.json` and the shards.
            latent_channels: what the transformer needs; None accepts any number.
            options: `piece`, `exact`; see the class.

        Raises:
            WeightsError: a file is missing or damaged, or it is another autoencoder.
        """
        folder = Path(folder)
        try:
            config = json.loads((folder / "config.json").read_text())
            name = config["_class_name"]
        except KeyError as error:
            raise WeightsError(f"{folder}: config.json has no {error}") from error
        except (OSError, ValueError, TypeError) as error:
            raise WeightsError(f"{folder}: config.json can't be read: {error}") from error
        if name != "AutoencoderKLWan":
            raise WeightsError(f"{folder}: autoencoder class {name!r}; known is AutoencoderKLWan")
        vae = _empty(config, str(folder), latent_channels)
        return cls(_filled(vae, read_tensors(find_weights(folder)), str(folder)), **options)

    @classmethod
    def from_file(
        cls,
        path: Path | str,
        latent_channels: int | None = None,
        *,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        **options: Any,
    ) -> WanCodec:
        """Load the original `Wan2.1_VAE.pth` (or its names in `.safetensors`), in float32.

        Sizes are read off the tensors.

        Args:
            path: the file.
            latent_channels: what the transformer needs; None accepts any number.
            mean, std: the latents' statistics, one number for each channel. The file has none; by
                default they are Wan2.1's, for 16 channels.
            options: `piece`, `exact`; see the class.

        Raises:
            WeightsError: the file is missing or damaged, or holds something else.
        """
        try:
            tensors, config = convert(read_tensors(path))
        except WeightsError as error:
            text = str(error)
            raise WeightsError(text if str(path) in text else f"{path}: {text}") from error
        if mean is not None and std is not None:
            config |= {"latents_mean": list(mean), "latents_std": list(std)}
        elif config["z_dim"] != _STATISTICS_OF:
            raise WeightsError(
                f"{path}: {config['z_dim']} latent channels, whose mean and spread are not known; "
                f"give mean and std, or {_STATISTICS_OF} channels"
            )
        return cls(
            _filled(_empty(config, str(path), latent_channels), tensors, str(path)), **options
        )


def state_nbytes(state: Features | None) -> int:
    """Bytes of a decoder's or an encoder's features."""
    return sum(x.nbytes for x in state or () if isinstance(x, Tensor))


def _use_onednn(vae: nn.Module) -> None:
    for part in vae.modules():
        if isinstance(part, nn.Conv3d):
            part._conv_forward = partial(_convolve, part)  # type: ignore[method-assign]


def _convolve(conv: nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `conv` computes, by oneDNN where it is there and torch might not choose it."""
    onednn = torch.backends.mkldnn.is_available()
    if x.device.type != "cpu" or x.dtype != torch.float32 or not onednn:
        return nn.Conv3d._conv_forward(conv, x, weight, bias)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    sizes = (conv.padding, conv.stride, conv.dilation, conv.groups)
    result: Tensor = torch.mkldnn_convolution(x, weight, bias, *sizes)
    return result


def _looks_back(part: nn.Module) -> bool:
    """Whether it is a causal convolution over time, which keeps an entry (1x1 ones keep none)."""
    return isinstance(part, nn.Conv3d) and part.kernel_size[0] > 1


def _decoder_slots(decoder: nn.Module) -> tuple[_Slot, ...]:
    """The decoder's convolutions that look back, in the order in which they run."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample

    found, scale = [], 1
    for name, part in decoder.named_modules():
        if isinstance(part, WanResample):
            # Time first, then space; the module lists its convolution over time last.
            if hasattr(part, "time_conv"):
                found.append(_Slot(part.time_conv.in_channels, scale))
            scale *= 2
        elif isinstance(part, nn.Conv3d) and _looks_back(part) and not name.endswith("time_conv"):
            found.append(_Slot(part.in_channels, scale))
    return tuple(found)


def _statistic(config: Any, name: str) -> Tensor:
    """`[1, C, 1, 1]`, float32."""
    try:
        values = torch.tensor([float(x) for x in getattr(config, name)])
    except (AttributeError, TypeError, ValueError) as error:
        raise WeightsError(f"{name} of the autoencoder's config: {error}") from error
    if len(values) != config.z_dim:
        raise WeightsError(
            f"{name} of the autoencoder's config has {len(values)} numbers for {config.z_dim} "
            "latent channels"
        )
    return values.view(1, -1, 1, 1)


def _empty(config: Mapping[str, Any], where: str, latent_channels: int | None) -> Any:
    """The network of that config, on the meta device."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    try:
        with torch.device("meta"):
            vae = AutoencoderKLWan.from_config(config)
        channels, means = vae.config.z_dim, len(vae.config.latents_mean)
        spreads = len(vae.config.latents_std)
    except Exception as error:  # whatever a wrong size meets first inside diffusers
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"{where}: sizes that make no autoencoder: {reason}") from error
    if latent_channels is not None and channels != latent_channels:
        raise WeightsError(
            f"{where}: latents of {channels} channels; the transformer's have {latent_channels}"
        )
    if not channels == means == spreads:
        raise WeightsError(
            f"{where}: {means} means and {spreads} deviations for {channels} latent channels"
        )
    return vae


def _filled(vae: Any, tensors: Mapping[str, Tensor], where: str) -> Any:
    try:
        load_into(vae, tensors)
    except WeightsError as error:
        raise WeightsError(f"{where}: {error}") from error
    return nn.Module.to(vae, dtype=torch.float32)
