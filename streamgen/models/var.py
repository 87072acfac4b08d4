"""VAR: a transformer that makes an image scale by scale (Tian et al. 2024, arXiv 2404.02905).

Every scale's token map is predicted in one step from an enlarged picture of all coarser ones.
Parameter names are those of the published `var_d16.pth` ... `var_d36.pth`, and every size is read
off the tensors. As with `streamgen.models.wan`, each layer asks the `scales` it is given to
attend, so the model never knows where keys are stored: `MaskedScales` sees all scales at once
(training, and the slow twin), `CachedScales` one after the other through `streamgen.cache`.

Positions are part of the input, so keys need no rotation. What a class changes (adaptive norms)
does not depend on the scale: `condition` computes it once an image, where the published code does
so at every scale, which at the small scales is a third of all weights that are read.

Axes: B images, R rows (images times the branches of guidance), C latent channels, N tokens of a
scale, U tokens of all scales up to and with it, L tokens of all scales, E model width, H heads,
D head width, V codebook entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamgen.cache.scales import VAR_256, NextScale
from streamgen.errors import InvalidRequest, WeightsError
from streamgen.models.linear import GeluLinear

VAR_512 = (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)
"""Sides of the token maps of the published model for 512 pixels; `VAR_256` has those for 256."""

MAX_SCALE = math.log(100)  # of `scale_mul_1H11`
EPS = 1e-6
TINY = 1e-12  # a length that is not divided by


# Configuration


@dataclass(frozen=True)
class VARConfig:
    """Shape of a VAR transformer.

    Args:
        depth: blocks.
        width: channels of a token.
        heads: attention heads; the published models have heads of 64.
        num_classes: classes; the class of that index stands for "no class" in guidance.
        latent_channels: width of a codebook entry.
        vocab: entries of the codebook.
        patch_nums: sides of the token maps, growing.
        hidden: width of the feed-forward layer.
        shared_aln: one adaptive norm's projection for all blocks (d36).
        l2_norm: queries and keys have length 1, and each head a learned scale.
    """

    depth: int
    width: int
    heads: int
    num_classes: int
    latent_channels: int = 32
    vocab: int = 4096
    patch_nums: tuple[int, ...] = VAR_256
    hidden: int = 0
    shared_aln: bool = False
    l2_norm: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch_nums", tuple(self.patch_nums))
        object.__setattr__(self, "hidden", self.hidden or 4 * self.width)
        if self.heads < 1 or self.width % self.heads:
            raise InvalidRequest(f"width {self.width} does not split into {self.heads} heads")
        if not self.patch_nums or min(self.patch_nums) < 1:
            raise InvalidRequest(f"patch_nums={self.patch_nums}: at least one positive side")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each scale."""
        return tuple(side * side for side in self.patch_nums)

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens up to and with each scale."""
        return tuple(accumulate(self.lengths))

    @property
    def no_class(self) -> int:
        """The label that stands for no class."""
        return self.num_classes

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], patch_nums: Sequence[int] | None = None
    ) -> VARConfig:
        """Read every size off a state dict with the published names.

        Args:
            tensors: name -> tensor, on any device (`meta` too).
            patch_nums: sides of the token maps. None = as the `lvl_1L` in the tensors says, or
                those of the published model with as many tokens.

        Raises:
            WeightsError: a tensor that tells a size is missing or of another form, or `patch_nums`
                don't make up its tokens or can't be known.
        """
        tokens, width = _shape(tensors, "pos_1LC", 3)[1:]
        levels = _shape(tensors, "lvl_embed.weight", 2)[0]
        depth = 0
        while f"blocks.{depth}.attn.mat_qkv.weight" in tensors:
            depth += 1
        if not depth:
            raise WeightsError("no VAR transformer: blocks.0.attn.mat_qkv.weight is missing")
        scaled = "blocks.0.attn.scale_mul_1H11" in tensors
        heads = _shape(tensors, "blocks.0.attn.scale_mul_1H11", 4)[1] if scaled else width // 64
        sides = tuple(patch_nums) if patch_nums else _patch_nums(tensors, tokens)
        if sum(side * side for side in sides) != tokens or len(sides) != levels:
            raise WeightsError(
                f"patch_nums {sides} make {sum(side * side for side in sides)} tokens of "
                f"{len(sides)} scales; the weights have {tokens} (pos_1LC) of {levels} (lvl_embed)"
            )
        return cls(
            depth=depth,
            width=width,
            heads=heads,
            num_classes=_shape(tensors, "class_emb.weight", 2)[0] - 1,
            latent_channels=_shape(tensors, "word_embed.weight", 2)[1],
            vocab=_shape(tensors, "head.weight", 2)[0],
            patch_nums=sides,
            hidden=_shape(tensors, "blocks.0.ffn.fc1.weight", 2)[0],
            shared_aln="blocks.0.ada_gss" in tensors,
            l2_norm=scaled,
        )


def _shape(tensors: Mapping[str, Tensor], key: str, ndim: int) -> tuple[int, ...]:
    if key not in tensors:
        raise WeightsError(f"no VAR transformer: {key} is missing")
    shape = tuple(tensors[key].shape)
    if len(shape) != ndim:
        raise WeightsError(f"{key} is of shape {list(shape)}; expected are {ndim} axes")
    return shape


def _patch_nums(tensors: Mapping[str, Tensor], tokens: int) -> tuple[int, ...]:
    """Sides of the maps: from the level of every token, or by the number of tokens."""
    levels = tensors.get("lvl_1L")
    if levels is not None and not levels.is_meta:
        counts = torch.bincount(levels.flatten().long()).tolist()
        return tuple(math.isqrt(count) for count in counts)
    for known in (VAR_256, VAR_512):
        if sum(side * side for side in known) == tokens:
            return known
    raise WeightsError(
        f"{tokens} tokens (pos_1LC) are not those of a published model (680 or 2240): the sides "
        'of the token maps are needed, as "patch_nums" in config.json'
    )


# What attention sees


class Scales(Protocol):
    """What self-attention sees: takes a pass's queries, keys and values, returns its outputs."""

    def attend(self, layer: int, q_RNHD: Tensor, k_RNHD: Tensor, v_RNHD: Tensor) -> Tensor:
        """Attention output `[R, N, H, D]`, softmax with scale 1."""
        ...


class MaskedScales:
    """All scales in one pass: a token sees its own scale and the coarser ones.

    Args:
        patch_nums: sides of the token maps.
        device: of the tensors that will attend.
    """

    def __init__(self, patch_nums: Sequence[int], device: torch.device | str = "cpu") -> None:
        lengths = torch.tensor([side * side for side in patch_nums], device=device)
        scale_L = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        self.mask_LL = scale_L[:, None] >= scale_L

    def attend(self, layer: int, q_RNHD: Tensor, k_RNHD: Tensor, v_RNHD: Tensor) -> Tensor:
        """See `Scales`."""
        return _attend(q_RNHD, k_RNHD, v_RNHD, self.mask_LL)


class CachedScales:
    """One scale at a time; keys and values are written into the cache and read where they lie.

    Args:
        cache: of all rows, with a pending scale.
    """

    def __init__(self, cache: NextScale) -> None:
        self.cache = cache

    def attend(self, layer: int, q_RNHD: Tensor, k_RNHD: Tensor, v_RNHD: Tensor) -> Tensor:
        """See `Scales`."""
        return _attend_cached(self.cache, layer, q_RNHD, k_RNHD, v_RNHD)


class ForkedScales:
    """As `CachedScales`, for variations of one image, each in a cache of its own.

    Only attention goes cache by cache; all else runs on the whole batch. Its rows are ordered by
    branch, then by image; a cache has one image's branches.

    Args:
        caches: one an image, all with the same pending scale.
    """

    def __init__(self, caches: Sequence[NextScale]) -> None:
        self.caches = tuple(caches)

    def attend(self, layer: int, q_RNHD: Tensor, k_RNHD: Tensor, v_RNHD: Tensor) -> Tensor:
        """See `Scales`."""
        images = len(self.caches)
        outs = []
        for i, cache in enumerate(self.caches):
            q, k, v = (x[i::images] for x in (q_RNHD, k_RNHD, v_RNHD))
            outs.append(_attend_cached(cache, layer, q, k, v))
        return torch.stack(outs, 1).flatten(0, 1)


def _attend_cached(
    cache: NextScale, layer: int, q_RNHD: Tensor, k_RNHD: Tensor, v_RNHD: Tensor
) -> Tensor:
    parts = [_attend(q_RNHD[rows], *kv) for rows, *kv in cache.parts(layer, k_RNHD, v_RNHD)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    q_RNHD: Tensor, k_RUHD: Tensor, v_RUHD: Tensor, mask_NU: Tensor | None = None
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_RNHD, k_RUHD, v_RUHD))
    if q.device.type == "cpu" and q.dtype != torch.float32:
        # Its kernel reads heads of half precision that lie apart slowly: bringing them together
        # costs a quarter of what it saves.
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_NU, scale=1.0).transpose(1, 2)


# The network


@dataclass(frozen=True)
class Condition:
    """What a class changes in the network; the same at every scale.

    Args:
        class_RE: embedding of the class.
        blocks: for every block gate, gate, scale, scale, shift, shift `[R, 6, 1, E]`.
        head: scale, shift `[R, 2, 1, E]`.
    """

    class_RE: Tensor
    blocks: tuple[Tensor, ...]
    head: Tensor


class _Attention(nn.Module):
    def __init__(self, config: VARConfig) -> None:
        super().__init__()
        self.split = (3, config.heads, config.head_dim)
        if config.l2_norm:
            self.scale_mul_1H11 = nn.Parameter(torch.full((1, config.heads, 1, 1), math.log(4)))
        self.q_bias = nn.Parameter(torch.zeros(config.width))
        self.v_bias = nn.Parameter(torch.zeros(config.width))
        self.mat_qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.proj = nn.Linear(config.width, config.width)

    def qkv(self, x_RNE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, ready for a softmax of scale 1, keys and values, each `[R, N, H, D]`."""
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv_RN3HD = F.linear(x_RNE, self.mat_qkv.weight, bias).unflatten(-1, self.split)
        q, k, v = qkv_RN3HD.unbind(2)
        if not hasattr(self, "scale_mul_1H11"):
            return q * (0.25 / math.sqrt(self.split[-1])), k, v  # a quarter, as published
        scale_H1 = self.scale_mul_1H11.float().clamp_max(MAX_SCALE).exp().view(-1, 1)
        qk_RN2HD = qkv_RN3HD[:, :, :2].float()
        length = torch.linalg.vector_norm(qk_RN2HD, dim=-1, keepdim=True).clamp_min(TINY)
        scales_2H1 = torch.stack([scale_H1, torch.ones_like(scale_H1)])
        q, k = (qk_RN2HD * (scales_2H1 / length)).to(v.dtype).unbind(2)
        return q, k, v


class _FeedForward(nn.Module):
    def __init__(self, config: VARConfig) -> None:
        super().__init__()
        self.fc1 = GeluLinear(config.width, config.hidden)
        self.fc2 = nn.Linear(config.hidden, config.width)

    def forward(self, x_RNE: Tensor) -> Tensor:
        return self.fc2(self.fc1(x_RNE))


class _Block(nn.Module):
    def __init__(self, config: VARConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.attn = _Attention(config)
        self.ffn = _FeedForward(config)
        if config.shared_aln:
            self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, config.width))
        else:
            self.ada_lin = _ada_lin(config.width, 6)

    def modulation(self, class_RE: Tensor, shared_R6E: Tensor | None) -> Tensor:
        """Gates, scales and shifts of this block, `[R, 6, 1, E]`."""
        if shared_R6E is not None:
            return (shared_R6E + self.ada_gss[0]).unsqueeze(2)
        return _modulate(self.ada_lin, class_RE, 6)

    def forward(
        self, x_RNE: Tensor, modulation_R61E: Tensor, scales: Scales, store_only: bool
    ) -> Tensor:
        gate1, gate2, scale1, scale2, shift1, shift2 = modulation_R61E.unbind(1)
        q, k, v = self.attn.qkv(torch.addcmul(shift1, _norm(x_RNE), 1 + scale1))
        y = scales.attend(self.layer, q, k, v)
        if store_only:  # the last layer of a pass whose output nobody reads
            return x_RNE
        x_RNE = torch.addcmul(x_RNE, gate1, self.attn.proj(y.flatten(2)))
        y = self.ffn(torch.addcmul(shift2, _norm(x_RNE), 1 + scale2))
        return torch.addcmul(x_RNE, gate2, y)


class _HeadNorm(nn.Module):
    def __init__(self, config: VARConfig) -> None:
        super().__init__()
        self.ada_lin = _ada_lin(config.width, 2)


def _ada_lin(width: int, parts: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(width, parts * width))


def _table(rows: int, width: int) -> nn.Embedding:
    # Its own random start would load seconds of torch on the meta device; see `init_weights`.
    return nn.Embedding.from_pretrained(torch.zeros(rows, width), freeze=False)


def _modulate(ada_lin: nn.Module, class_RE: Tensor, parts: int) -> Tensor:
    out: Tensor = ada_lin(class_RE)
    return out.view(len(class_RE), parts, 1, -1)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


class VARModel(nn.Module):
    """The transformer; see the module's text. Weights carry the published names.

    A picture is made of `condition`, `start`, then `predict` and `embed` for scale after scale.
    `forward` is the same for all scales of given maps at once. A new model's tables and positions
    are zero: load weights, or call `init_weights`.
    """

    def __init__(self, config: VARConfig) -> None:
        super().__init__()
        self.config = config
        width, tokens = config.width, config.ends[-1]
        self.pos_start = nn.Parameter(torch.zeros(1, config.lengths[0], width))
        self.pos_1LC = nn.Parameter(torch.zeros(1, tokens, width))
        self.word_embed = nn.Linear(config.latent_channels, width)
        self.class_emb = _table(config.num_classes + 1, width)
        self.lvl_embed = _table(len(config.patch_nums), width)
        if config.shared_aln:
            self.shared_ada_lin = _ada_lin(width, 6)
        self.blocks = nn.ModuleList(_Block(config, layer) for layer in range(config.depth))
        self.head_nm = _HeadNorm(config)
        self.head = nn.Linear(width, config.vocab)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the blocks, in which keys and values come."""
        return self.word_embed.weight.dtype

    def cast(self, dtype: torch.dtype) -> VARModel:
        """Convert the weights, but those of the head and the heads' scales, to `dtype`.

        Logits differ by little where they matter, and guidance enlarges their errors.
        """
        self.to(dtype)
        self.head.float()
        self.head_nm.float()
        for name, parameter in self.named_parameters():
            if name.endswith("scale_mul_1H11"):
                parameter.data = parameter.data.float()
        return self

    def condition(self, labels_R: Tensor) -> Condition:
        """What the classes change, for all scales.

        Args:
            labels_R: class of each row; `config.no_class` for an unconditional one.
        """
        class_RE = self.class_emb(labels_R)
        shared = None
        if self.config.shared_aln:
            shared = _modulate(self.shared_ada_lin, class_RE, 6).squeeze(2)
        head = _modulate(self.head_nm.ada_lin, class_RE.to(self.head.weight.dtype), 2)
        blocks = tuple(block.modulation(class_RE, shared) for block in self.blocks)
        return Condition(class_RE, blocks, head)

    def start(self, condition: Condition) -> Tensor:
        """Tokens of the first scale, `[R, N, E]`: the class."""
        return condition.class_RE.unsqueeze(1) + self.pos_start + self._places(0)

    def embed(self, map_RNC: Tensor, scale: int) -> Tensor:
        """Tokens of a later scale, `[R, N, E]`.

        Args:
            map_RNC: the latents so far at that scale's size, `[R, N, C]`.
            scale: from 1.
        """
        return self.word_embed(map_RNC.to(self.dtype)) + self._places(scale)

    def predict(
        self, x_RNE: Tensor, condition: Condition, scales: Scales, store_only: bool = False
    ) -> Tensor:
        """Logits of every token, `[R, N, V]`.

        Args:
            x_RNE: what `start` or `embed` gave.
            condition: what `condition` gave for these rows.
            scales: where keys and values go and what attention reads.
            store_only: only keys and values are wanted: the last layer stops after storing them,
                and what comes back is no logits.
        """
        last = self.config.depth - 1
        for layer, (block, modulation) in enumerate(
            zip(self.blocks, condition.blocks, strict=True)
        ):
            x_RNE = block(x_RNE, modulation, scales, store_only and layer == last)
        if store_only:
            return x_RNE
        scale, shift = condition.head.unbind(1)
        return self.head(torch.addcmul(shift, _norm(x_RNE.to(scale.dtype)), 1 + scale))

    def forward(self, labels_B: Tensor, maps_BMC: Tensor) -> Tensor:
        """Logits `[B, L, V]` of all scales at once, each given the true coarser ones.

        For training, and the slow twin of `predict` through a cache.

        Args:
            labels_B: classes; `config.no_class` where the class is dropped.
            maps_BMC: what `Quantizer.inputs` gives: the latents so far at the size of every scale
                but the first, `[B, L - N_0, C]`.
        """
        condition = self.condition(labels_B)
        maps = maps_BMC.split(self.config.lengths[1:], dim=1)
        x = [self.start(condition)]
        x += [self.embed(one, scale) for scale, one in enumerate(maps, start=1)]
        masked = MaskedScales(self.config.patch_nums, maps_BMC.device)
        return self.predict(torch.cat(x, dim=1), condition, masked)

    @torch.no_grad()
    def init_weights(self, gate: float = 1e-5, modulation: float = 0.5, head: float = 0.02) -> None:
        """Random weights to begin a training from, as VAR's own training does.

        Args:
            gate: how much of the adaptive gates' projections is left; near 0, so that blocks
                begin as almost nothing.
            modulation: the same of the adaptive scales and shifts.
            head: the same of the head, so that all tokens begin equally likely.
        """
        config = self.config
        std = math.sqrt(1 / config.width / 3)
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=std)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif name.endswith("scale_mul_1H11"):
                parameter.fill_(math.log(4))
            elif name.endswith((".proj.weight", ".fc2.weight")):
                parameter.div_(math.sqrt(2 * config.depth))
        shrink = self.pos_1LC.new_tensor([gate] * 2 + [modulation] * 4)
        for block in self.blocks:
            if config.shared_aln:
                nn.init.trunc_normal_(block.ada_gss, std=1 / math.sqrt(config.width))
                block.ada_gss.mul_(shrink[:, None])
            else:
                block.ada_lin[1].weight.mul_(shrink.repeat_interleave(config.width)[:, None])
        self.head_nm.ada_lin[1].weight.mul_(modulation)
        self.head.weight.mul_(head)

    def _places(self, scale: int) -> Tensor:
        """What tells the tokens of a scale where and of which scale they are, `[1, N, E]`."""
        end = self.config.ends[scale]
        places = self.pos_1LC[:, end - self.config.lengths[scale] : end]
        return places + self.lvl_embed.weight[scale]
