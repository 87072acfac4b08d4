"""The Wan2.1 video transformer, made causal: one class for the pocket world, 1.3B and 14B.

The network is the public one (Wan2.1; Self-Forcing's `causal_model.py` has the same weights); only
the config differs between sizes, and parameter names are the official ones. What makes it causal is
outside: timesteps are per frame, and each layer asks the `history` it is given to attend, so the
model never knows where keys are stored, which frames are visible or what their positions are.

Axes: B batch, C latent channels, F frames, Y and X latent rows and columns, S tokens a frame,
N = F * S tokens, E model width, H query heads, G key and value heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamgen.errors import InvalidRequest
from streamgen.models.linear import GeluLinear


class History(Protocol):
    """What self-attention sees: takes a chunk's queries, keys and values, returns its outputs."""

    def attend(self, layer: int, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """Attention output `[B, N, H, D]`; q and k come normalised and not rotated."""
        ...


class Prompt(Protocol):
    """What cross-attention sees: one text's (or one text a frame's) keys and values."""

    def attend(self, layer: int, q_BNHD: Tensor) -> Tensor:
        """Attention output `[B, N, H, D]`."""
        ...


@dataclass(frozen=True)
class WanConfig:
    """Shape of a Wan transformer.

    `prediction` says what the head gives: `flow` (noise - x0, as Wan) or `sample` (x0). Three
    options are off (0) for Wan's own weights: `action_dim` is the width of a per-frame action
    vector, `spatial_tokens` the number of tokens a frame where each has a learned embedding of its
    place, and `num_kv_heads` the number of key and value heads where it is not `num_heads`
    (`streamgen.models.gqa`); query heads h and h + 1 share one if they lie in the same run of
    `num_heads / num_kv_heads`.
    """

    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int
    in_channels: int = 16
    out_channels: int = 16
    patch_size: tuple[int, int, int] = (1, 2, 2)
    text_dim: int = 4096
    text_len: int = 512
    freq_dim: int = 256
    action_dim: int = 0
    spatial_tokens: int = 0
    eps: float = 1e-6
    prediction: str = "flow"
    num_kv_heads: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch_size", tuple(self.patch_size))
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise InvalidRequest(
                f"dim {self.dim} must split into {self.num_heads} heads of even width"
            )
        if self.num_kv_heads < 0 or self.num_heads % self.kv_heads:
            raise InvalidRequest(
                f"num_kv_heads {self.num_kv_heads} must divide the {self.num_heads} query heads"
            )
        if self.patch_size[0] != 1:
            raise InvalidRequest(f"patch_size {self.patch_size}: a token lies in one latent frame")
        if self.prediction not in ("flow", "sample"):
            raise InvalidRequest(f"prediction {self.prediction!r}: accepted are 'flow', 'sample'")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads of a layer."""
        return self.num_kv_heads or self.num_heads

    def grid(self, latent_hw: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of tokens for latents of that height and width."""
        rows, cols = (n // p for n, p in zip(latent_hw, self.patch_size[1:], strict=True))
        if (rows * self.patch_size[1], cols * self.patch_size[2]) != tuple(latent_hw):
            raise InvalidRequest(
                f"latents of {latent_hw[0]}x{latent_hw[1]} don't divide into "
                f"{self.patch_size[1]}x{self.patch_size[2]} patches"
            )
        return rows, cols

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], num_heads: int, **other: Any) -> WanConfig:
        """Read the sizes off a state dict with official names; query heads can't be seen in it."""
        patch = tensors["patch_embedding.weight"]
        kv_heads = tensors["blocks.0.self_attn.k.weight"].shape[0] * num_heads // patch.shape[0]
        patch_size = tuple(patch.shape[2:])
        layers = {int(k.split(".")[1]) for k in tensors if k.startswith("blocks.")}
        return cls(
            dim=patch.shape[0],
            ffn_dim=tensors["blocks.0.ffn.0.weight"].shape[0],
            num_heads=num_heads,
            num_layers=len(layers),
            in_channels=patch.shape[1],
            out_channels=tensors["head.head.weight"].shape[0] // math.prod(patch_size),
            patch_size=patch_size,
            text_dim=tensors["text_embedding.0.weight"].shape[1],
            freq_dim=tensors["time_embedding.0.weight"].shape[1],
            num_kv_heads=0 if kv_heads == num_heads else kv_heads,
            **other,
        )


def sinusoid(t: Tensor, width: int) -> Tensor:
    """Timestep features `[..., width]`, cosines first, computed in float64 (Wan2.1)."""
    half = width // 2
    rates = 10_000.0 ** (-torch.arange(half, dtype=torch.float64, device=t.device) / half)
    angles = t.double()[..., None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def norm(x: Tensor, eps: float) -> Tensor:
    """Layer norm without weights over the last axis."""
    return F.layer_norm(x, x.shape[-1:], eps=eps)


class _Attention(nn.Module):
    """Projections and full-width q/k RMS norms shared by self- and cross-attention."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.head_dim, kv_dim = config.head_dim, config.kv_heads * config.head_dim
        self.q = nn.Linear(config.dim, config.dim)
        self.k = nn.Linear(config.dim, kv_dim)
        self.v = nn.Linear(config.dim, kv_dim)
        self.o = nn.Linear(config.dim, config.dim)
        self.norm_q = nn.RMSNorm(config.dim, eps=config.eps)
        self.norm_k = nn.RMSNorm(kv_dim, eps=config.eps)

    def split(self, x: Tensor) -> Tensor:
        """All heads side by side to heads `[B, N, H, D]`."""
        return x.unflatten(-1, (-1, self.head_dim))

    def query(self, x_BNE: Tensor) -> Tensor:
        """Normalised queries `[B, N, H, D]`."""
        return self.split(self.norm_q(self.q(x_BNE)))

    def keys_values(self, x_BNE: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised keys and values, each `[B, N, G, D]`."""
        return self.split(self.norm_k(self.k(x_BNE))), self.split(self.v(x_BNE))


class _Block(nn.Module):
    def __init__(self, config: WanConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.eps = layer, config.eps
        self.self_attn = _Attention(config)
        self.cross_attn = _Attention(config)
        self.norm3 = nn.LayerNorm(config.dim, eps=config.eps)
        # Named as Wan's Linear, GELU, Linear: the first does the work of the second.
        self.ffn = nn.Sequential(
            GeluLinear(config.dim, config.ffn_dim),
            nn.Identity(),
            nn.Linear(config.ffn_dim, config.dim),
        )
        self.modulation = nn.Parameter(torch.randn(1, 6, config.dim) / config.dim**0.5)

    def forward(
        self, x_BFSE: Tensor, e_BF6E: Tensor, history: History, prompt: Prompt, store_only: bool
    ) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            (self.modulation + e_BF6E).unsqueeze(3).unbind(2)
        )
        frames = x_BFSE.shape[1:3]
        y_BNE = torch.addcmul(shift1, norm(x_BFSE, self.eps), 1 + scale1).flatten(1, 2)
        k, v = self.self_attn.keys_values(y_BNE)
        y = history.attend(self.layer, self.self_attn.query(y_BNE), k, v)
        if store_only:  # the last layer of a pass whose output nobody reads
            return x_BFSE
        x_BFSE = torch.addcmul(x_BFSE, gate1, self.self_attn.o(y.flatten(2)).unflatten(1, frames))
        q = self.cross_attn.query(self.norm3(x_BFSE).flatten(1, 2))
        y = prompt.attend(self.layer, q)
        x_BFSE = x_BFSE + self.cross_attn.o(y.flatten(2)).unflatten(1, frames)
        y = torch.addcmul(shift2, norm(x_BFSE, self.eps), 1 + scale2)
        return torch.addcmul(x_BFSE, gate2, self.ffn(y))


class _Head(nn.Module):
    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.head = nn.Linear(config.dim, math.prod(config.patch_size) * config.out_channels)
        self.modulation = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)

    def forward(self, x_BFSE: Tensor, e_BFE: Tensor) -> Tensor:
        shift, scale = (self.modulation + e_BFE.unsqueeze(2)).unsqueeze(3).unbind(2)
        return self.head(torch.addcmul(shift, norm(x_BFSE, self.eps), 1 + scale))


class WanModel(nn.Module):
    """The transformer; see the module's text. Weights carry the official Wan2.1 names.

    `action_embedding` (only where `config.action_dim` > 0) adds a per-frame action vector to the
    time embedding, as HY-WorldPlay does; `spatial_embedding` (only where `config.spatial_tokens`
    > 0) is added to the patches.
    """

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Conv3d(
            config.in_channels, config.dim, config.patch_size, config.patch_size
        )
        self.text_embedding = _mlp(config.text_dim, config.dim, nn.GELU(approximate="tanh"))
        self.time_embedding = _mlp(config.freq_dim, config.dim, nn.SiLU())
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(config.dim, 6 * config.dim))
        if config.action_dim:
            self.action_embedding = _mlp(config.action_dim, config.dim, nn.SiLU())
        if config.spatial_tokens:
            self.spatial_embedding = nn.Parameter(torch.zeros(config.spatial_tokens, config.dim))
        self.blocks = nn.ModuleList(_Block(config, i) for i in range(config.num_layers))
        self.head = _Head(config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, in which the forward runs."""
        return self.patch_embedding.weight.dtype

    def encode_prompt(self, text_BLT: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Every layer's cross-attention keys and values, each `[B, L, G, D]`, of a text.

        Args:
            text_BLT: `[B, L, text_dim]`; all L rows are attended, since Wan pads with zero rows
                and does not mask them.
        """
        text_BLE = self.text_embedding(text_BLT.to(self.dtype))
        return [block.cross_attn.keys_values(text_BLE) for block in self.blocks]

    def forward(
        self,
        x_BCFYX: Tensor,
        t_BF: Tensor,
        history: History,
        prompt: Prompt,
        actions_BFA: Tensor | None = None,
        store_only: bool = False,
    ) -> Tensor:
        """Predict `config.prediction` for every frame of a chunk, `[B, C, F, Y, X]`.

        Args:
            x_BCFYX: noisy latents.
            t_BF: timestep of each frame, 0 (clean) .. 1000 (noise).
            history: where keys and values go and what attention reads (see `History`).
            prompt: the text's keys and values (see `Prompt`).
            actions_BFA: action of each frame `[B, F, action_dim]`, where the model takes actions.
            store_only: only keys and values are wanted (the clean pass that commits a chunk): the
                last layer stops after storing them and the latents come back unread.

        Raises:
            InvalidRequest: latents that do not divide into patches, or actions missing or unwanted.
        """
        grid = self.config.grid((x_BCFYX.shape[3], x_BCFYX.shape[4]))
        x_BFSE, e_BFE, e_BF6E = self.embed(x_BCFYX, t_BF, actions_BFA)
        last = self.config.num_layers - 1
        for layer, block in enumerate(self.blocks):
            x_BFSE = block(x_BFSE, e_BF6E, history, prompt, store_only and layer == last)
        if store_only:
            return x_BCFYX
        return self._unpatch(self.head(x_BFSE, e_BFE), grid)

    def embed(
        self, x_BCFYX: Tensor, t_BF: Tensor, actions_BFA: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the first block is given; arguments as for `forward`.

        Returns:
            tokens `[B, F, S, E]`, and each frame's embedding of its time and action: `[B, F, E]`
            for the head, `[B, F, 6, E]` for the blocks.
        """
        config = self.config
        if (actions_BFA is None) != (config.action_dim == 0):
            raise InvalidRequest(f"this model takes actions of width {config.action_dim}")
        x_BFSE = self.patch_embedding(x_BCFYX.to(self.dtype)).flatten(3).permute(0, 2, 3, 1)
        x_BFSE = x_BFSE.contiguous()  # else every layer's sums take over the convolution's strides
        if config.spatial_tokens:
            x_BFSE = x_BFSE + self.spatial_embedding
        e_BFE = self.time_embedding(sinusoid(t_BF, config.freq_dim).to(self.dtype))
        if actions_BFA is not None:
            e_BFE = e_BFE + self.action_embedding(actions_BFA.to(self.dtype))
        return x_BFSE, e_BFE, self.time_projection(e_BFE).unflatten(-1, (6, config.dim))

    def _unpatch(self, x_BFSP: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens back to latents: a token's features are (rows, columns, channels) of its patch."""
        _, high, wide = self.config.patch_size
        x = x_BFSP.unflatten(2, grid).unflatten(-1, (high, wide, self.config.out_channels))
        return x.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


def _mlp(width_in: int, width: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width_in, width), activation, nn.Linear(width, width))
