"""VAR's multi-scale VQ autoencoder: an image is a pyramid of token maps, each a correction.

The encoder and decoder are taming-transformers' (Esser et al. 2021, as latent diffusion has
them); the quantiser is that of VAR (Tian et al. 2024, algorithms 1 and 2). Parameter names are
those of the published `vae_ch160v4096z32.pth`, and every size is read off the tensors.
`quantize.ema_vocab_hit_SV` in that file is a statistic of its training and is left out (`IGNORED`).

Axes: B images, C latent channels, Y and X latent rows and columns, p and q rows and columns of a
token map, N = p * p tokens of a map, V codebook entries, H and W pixel rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamgen.errors import WeightsError

IGNORED = ("quantize.ema_vocab_hit_SV",)
"""Keys of published files that are no weights."""

GROUPS = 32  # of every GroupNorm, so each width is a multiple of it
RESIDUAL = 0.5  # share of phi's convolution; a constant of the published quantiser


@dataclass(frozen=True)
class VQConfig:
    """Sizes of an autoencoder; the names are the published constructor's where it has one.

    Args:
        vocab: entries of the codebook.
        latent_channels: width of an entry.
        ch: channels at full resolution, a multiple of 32.
        ch_mult: channels of every resolution, as a multiple of `ch`; each further one is half.
        num_res_blocks: residual blocks of an encoder's resolution; a decoder's has one more.
        using_sa: attention at the lowest resolution.
        using_mid_sa: attention between the two middle blocks.
        share_phi: convolutions that all scales share among them.
        encoder: whether there is one; without it the autoencoder only decodes.
    """

    vocab: int = 4096
    latent_channels: int = 32
    ch: int = 160
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    using_sa: bool = True
    using_mid_sa: bool = True
    share_phi: int = 4
    encoder: bool = True

    @property
    def factor(self) -> int:
        """Pixels a latent position along each side."""
        return int(2 ** (len(self.ch_mult) - 1))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> VQConfig:
        """Read every size off the weights.

        Raises:
            WeightsError: a tensor that tells a size is missing, or sizes contradict each other.
        """
        vocab, latent_channels = _shape(tensors, "quantize.embedding.weight", 2)
        ch = _shape(tensors, "decoder.norm_out.weight", 1)[0]
        levels = _count(tensors, "decoder.up.{}.block.0.conv1.weight")
        widths = [
            _shape(tensors, f"decoder.up.{level}.block.0.conv1.weight", 4)[0]
            for level in range(levels)
        ]
        phis = _count(tensors, "quantize.quant_resi.qresi_ls.{}.weight")
        blocks = _count(tensors, "decoder.up.0.block.{}.conv1.weight") - 1
        if not levels or not phis or blocks < 1:
            raise WeightsError(
                f"a VQ autoencoder has decoder.up.0.block.*, 2 or more, and "
                f"quantize.quant_resi.qresi_ls.*; found are {blocks + 1} and {phis}"
            )
        if ch % GROUPS or any(width % ch for width in widths):
            raise WeightsError(
                f"decoder widths {widths} are no multiples of {ch}, its first, or that is none "
                f"of {GROUPS}"
            )
        return cls(
            vocab=vocab,
            latent_channels=latent_channels,
            ch=ch,
            ch_mult=tuple(width // ch for width in widths),
            num_res_blocks=blocks,
            using_sa=f"decoder.up.{levels - 1}.attn.0.qkv.weight" in tensors,
            using_mid_sa="decoder.mid.attn_1.qkv.weight" in tensors,
            share_phi=phis,
            encoder=any(key.startswith("encoder.") for key in tensors),
        )


def _shape(tensors: Mapping[str, Tensor], key: str, ndim: int) -> tuple[int, ...]:
    if key not in tensors:
        raise WeightsError(f"no VQ autoencoder: {key} is missing")
    shape = tuple(tensors[key].shape)
    if len(shape) != ndim:
        raise WeightsError(f"{key} is of shape {list(shape)}; expected are {ndim} axes")
    return shape


def _count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    count = 0
    while pattern.format(count) in tensors:
        count += 1
    return count


class ResnetBlock(nn.Module):
    """Two convolutions behind GroupNorm and SiLU, added to the input."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1 = _norm(before)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.norm2 = _norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(before, after, 1) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        """`[B, before, Y, X]` to `[B, after, Y, X]`."""
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        out: Tensor = y + (x if self.nin_shortcut is None else self.nin_shortcut(x))
        return out


class AttnBlock(nn.Module):
    """Self-attention with one head over all positions of a picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, width, Y, X]` to the same."""
        # [B, 3 * width, Y, X] -> three of [B, 1, Y * X, width]
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2)[:, None].chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj_out(y[:, 0].transpose(1, 2).unflatten(2, x.shape[2:]))
        return x + out


class Downsample(nn.Module):
    """Half the resolution by a strided convolution, padded at the right and the bottom only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, width, Y, X]` to `[B, width, Y / 2, X / 2]`."""
        out: Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return out


class Upsample(nn.Module):
    """Twice the resolution: nearest neighbour, then a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, width, Y, X]` to `[B, width, 2 * Y, 2 * X]`."""
        out: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return out


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, width, eps=1e-6)


class Middle(nn.Module):
    """The blocks at the lowest resolution that encoder and decoder both have."""

    def __init__(self, width: int, attention: bool) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(width, width)
        self.attn_1: nn.Module = AttnBlock(width) if attention else nn.Identity()
        self.block_2 = ResnetBlock(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, width, Y, X]` to the same."""
        out: Tensor = self.block_2(self.attn_1(self.block_1(x)))
        return out


class Level(nn.Module):
    """The blocks of one resolution, and the step to the next one (None at the end)."""

    def __init__(
        self, before: int, after: int, blocks: int, attention: bool, step: dict[str, nn.Module]
    ) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            ResnetBlock(before if i == 0 else after, after) for i in range(blocks)
        )
        self.attn = nn.ModuleList(AttnBlock(after) for _ in range(blocks if attention else 0))
        self.step = next(iter(step), None)
        for name, module in step.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, before, Y, X]` to `[B, after, Y', X']`."""
        for i, block in enumerate(self.block):
            x = block(x)
            if i < len(self.attn):
                x = self.attn[i](x)
        return x if self.step is None else getattr(self, self.step)(x)


class Encoder(nn.Module):
    """Pixels to latents, before `quant_conv`."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch * mult for mult in config.ch_mult]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(3, config.ch, 3, padding=1)
        self.down = nn.ModuleList(
            Level(
                widths[max(level - 1, 0)] if level else config.ch,
                width,
                config.num_res_blocks,
                config.using_sa and level == last,
                {} if level == last else {"downsample": Downsample(width)},
            )
            for level, width in enumerate(widths)
        )
        self.mid = Middle(widths[-1], config.using_mid_sa)
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], config.latent_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 3, H, W]` to `[B, C, Y, X]`."""
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(self.mid(x))))
        return out


class Decoder(nn.Module):
    """Latents, after `post_quant_conv`, to pixels; level 0 is the full resolution."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch * mult for mult in config.ch_mult]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(config.latent_channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1], config.using_mid_sa)
        self.up = nn.ModuleList(
            Level(
                widths[min(level + 1, last)],
                width,
                config.num_res_blocks + 1,
                config.using_sa and level == last,
                {} if level == 0 else {"upsample": Upsample(width)},
            )
            for level, width in enumerate(widths)
        )
        self.norm_out = _norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, Y, X]` to `[B, 3, H, W]`."""
        x = self.mid(self.conv_in(x))
        for level in reversed(self.up):
            x = level(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


class Phi(nn.Conv2d):
    """What smooths an enlarged token map: half itself, half a convolution of it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, Y, X]` to the same."""
        return x * (1 - RESIDUAL) + super().forward(x) * RESIDUAL


class SharedPhi(nn.Module):
    """A few `Phi`s that stand at ticks along the way from the first scale to the last."""

    def __init__(self, channels: int, count: int) -> None:
        super().__init__()
        self.qresi_ls = nn.ModuleList(Phi(channels) for _ in range(count))
        edge = 1 / 3 / count if count == 4 else 1 / 2 / count  # as published
        # NumPy, as published: scales 2 and 7 of 10 lie midway between ticks, so rounding decides.
        self.ticks = np.linspace(edge, 1 - edge, count)

    def pick(self, scale: int, scales: int) -> Phi:
        """The one nearest to `scale` of `scales`."""
        way = scale / (scales - 1) if scales > 1 else 0.0
        found = self.qresi_ls[int(np.abs(self.ticks - way).argmin())]
        assert isinstance(found, Phi)
        return found


class Quantizer(nn.Module):
    """A codebook, and how its token maps add up to latents.

    A latent picture is the sum of one contribution a scale: the map's entries, enlarged to full
    size (bicubic) and smoothed by `Phi`. `patch_nums` are the sides of all maps, growing; the last
    one is the latent's own side.
    """

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.latent_channels)
        self.quant_resi = SharedPhi(config.latent_channels, config.share_phi)

    def lookup(self, indices_BN: Tensor, side: int) -> Tensor:
        """The entries `[B, C, side, side]` of a map of tokens in row order."""
        return self.embedding(indices_BN).transpose(1, 2).unflatten(2, (side, side))

    def contribution(self, h_BCpp: Tensor, scale: int, patch_nums: Sequence[int]) -> Tensor:
        """What a map of entries adds to the latents, `[B, C, Y, X]`."""
        if scale < len(patch_nums) - 1:  # the last map is full size already
            h_BCpp = F.interpolate(h_BCpp, size=(patch_nums[-1],) * 2, mode="bicubic")
        return self.quant_resi.pick(scale, len(patch_nums))(h_BCpp)

    def add(
        self, f_hat_BCYX: Tensor, h_BCpp: Tensor, scale: int, patch_nums: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Add a map of entries to the latents so far.

        Returns:
            The new latents `[B, C, Y, X]` (a new tensor), and what the model sees of them when it
            predicts the next map, `[B, C, q, q]`; None after the last.
        """
        f_hat_BCYX = f_hat_BCYX + self.contribution(h_BCpp, scale, patch_nums)
        if scale == len(patch_nums) - 1:
            return f_hat_BCYX, None
        return f_hat_BCYX, self.shrink(f_hat_BCYX, patch_nums[scale + 1])

    @staticmethod
    def shrink(f_BCYX: Tensor, side: int) -> Tensor:
        """Latents at a smaller size, `[B, C, side, side]`, by averaging areas."""
        return F.interpolate(f_BCYX, size=(side, side), mode="area")

    def nearest(self, z_BCpp: Tensor) -> Tensor:
        """Index `[B, N]` of the entry nearest to every position."""
        z = z_BCpp.flatten(2).transpose(1, 2).float()
        table = self.embedding.weight.float()
        # |z - e|^2 without the |z|^2 that all entries share
        return (table.square().sum(1) - 2 * (z @ table.T)).argmin(2)

    @torch.no_grad()
    def tokens(self, f_BCYX: Tensor, patch_nums: Sequence[int]) -> list[Tensor]:
        """The token maps `[B, N]` of encoded latents: each codes what the earlier ones left."""
        rest, found = f_BCYX, []
        for scale, side in enumerate(patch_nums):
            last = scale == len(patch_nums) - 1
            found.append(self.nearest(rest if last else self.shrink(rest, side)))
            rest = rest - self.contribution(self.lookup(found[-1], side), scale, patch_nums)
        return found

    def latents(self, maps: Sequence[Tensor], patch_nums: Sequence[int]) -> Tensor:
        """The latents `[B, C, Y, X]` of token maps `[B, N]`; fewer maps than sides are allowed."""
        return sum(
            (
                self.contribution(self.lookup(indices, side), scale, patch_nums)
                for scale, (indices, side) in enumerate(zip(maps, patch_nums, strict=False))
            ),
            start=self.embedding.weight.new_zeros(()),
        )

    def inputs(self, maps: Sequence[Tensor], patch_nums: Sequence[int]) -> Tensor:
        """What a model is shown of all maps but the first, `[B, tokens - 1, C]`, for training."""
        f_hat = self.embedding.weight.new_zeros(())
        shown = []
        for scale, side in enumerate(patch_nums[:-1]):
            f_hat, seen = self.add(f_hat, self.lookup(maps[scale], side), scale, patch_nums)
            assert seen is not None
            shown.append(seen.flatten(2).transpose(1, 2))
        return torch.cat(shown, dim=1)


class VQVAE(nn.Module):
    """Encoder, quantiser and decoder under the published names.

    Args:
        config: sizes; see `VQConfig.from_tensors`.
    """

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.latent_channels
        self.encoder = Encoder(config) if config.encoder else None
        self.decoder = Decoder(config)
        self.quantize = Quantizer(config)
        self.quant_conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.post_quant_conv = nn.Conv2d(channels, channels, 3, padding=1)

    def encode(self, x_B3HW: Tensor) -> Tensor:
        """Latents `[B, C, Y, X]`, not quantised, of pixels in -1 to 1.

        Raises:
            WeightsError: the weights came without an encoder.
        """
        if self.encoder is None:
            raise WeightsError("this VQ autoencoder has no encoder.* weights: it can only decode")
        out: Tensor = self.quant_conv(self.encoder(x_B3HW))
        return out

    def decode(self, f_hat_BCYX: Tensor) -> Tensor:
        """Pixels `[B, 3, H, W]` of latents: about -1 to 1, not clamped."""
        if not torch.is_grad_enabled():  # a CPU's convolutions take a twelfth less time so
            f_hat_BCYX = f_hat_BCYX.contiguous(memory_format=torch.channels_last)
        out: Tensor = self.decoder(self.post_quant_conv(f_hat_BCYX))
        return out
