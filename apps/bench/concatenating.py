"""VAR's images the way the published code makes them: the peer of `streamgen bench image`.

It runs on the weights of our `VARModel` and `VQVAE` and draws the same tokens. What differs is how:

    keys, values   heads before tokens; those of every scale, the last one too, are joined with all
                   earlier ones by a concatenation for each layer
    classes        the adaptive norms are projected from the class again at every scale
    layers         one operation after the other: product, activation; norm, scale, shift, gate
    sampling       top-k by a selection of its own, before the sort for top-p
    decoder        pictures channel by channel in memory

Written from the description of the steps; none of their code is here.

Axes: R rows (conditions, then unconditions), N tokens of a scale, E width, H heads, D head width,
V codebook entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from streamgen.models.var import EPS, MAX_SCALE, VARModel
from streamgen.models.vq import VQVAE
from streamgen.sampling.tokens import Sampling, draw, guide, ramp


class Concatenating:
    """A drawing by concatenation.

    Args:
        var: weights; without `shared_aln`, with `l2_norm`, as the published models for 256 pixels.
        vae: codebook.
        sampling: how tokens are drawn; with guidance.

    Attributes:
        kv_peak: the most bytes that keys and values had at any time of the last drawing.
    """

    def __init__(self, var: VARModel, vae: VQVAE, sampling: Sampling) -> None:
        self.var, self.vae, self.sampling = var, vae, sampling
        self.kv: list[list[Tensor]] = []
        self.kv_live = self.kv_peak = 0

    @torch.no_grad()
    def draw(self, labels: Sequence[int], seeds: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """After each scale its tokens `[B, N]` and the latents so far `[B, C, Y, X]`."""
        var: Any = self.var
        config, device = var.config, var.pos_start.device
        self.kv, self.kv_live, self.kv_peak = [[] for _ in range(config.depth)], 0, 0
        generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        rows = [*labels, *[config.no_class] * len(labels)]
        class_RE = var.class_emb(torch.tensor(rows, device=device))
        lengths = torch.tensor(config.lengths, device=device)
        level = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        places = var.lvl_embed(level) + var.pos_1LC
        x = class_RE.unsqueeze(1) + var.pos_start + places[:, : config.lengths[0]]
        side = config.patch_nums[-1]
        f_hat = torch.zeros(len(labels), config.latent_channels, side, side, device=device)
        for scale, side in enumerate(config.patch_nums):
            for layer in range(config.depth):
                x = self._block(layer, x, class_RE)
            logits = self._logits(x, class_RE).float()
            logits = guide(logits, self.sampling.cfg * ramp(scale, len(lengths)))
            tokens = draw(self._keep(logits), generators)
            h = self.vae.quantize.lookup(tokens, side)
            f_hat, seen = self.vae.quantize.add(f_hat, h, scale, config.patch_nums)
            if seen is not None:
                here = slice(config.ends[scale], config.ends[scale + 1])
                x = var.word_embed(seen.flatten(2).transpose(1, 2).to(var.dtype))
                x = (x + places[:, here]).repeat(2, 1, 1)
            yield tokens, f_hat
        self.kv, self.kv_live = [], 0

    @torch.no_grad()
    def decode(self, f_hat_BCYX: Tensor) -> Tensor:
        """Pixels `[B, 3, H, W]` of latents: about -1 to 1, not clamped."""
        pixels: Tensor = self.vae.decoder(self.vae.post_quant_conv(f_hat_BCYX.contiguous()))
        return pixels

    def _block(self, layer: int, x_RNE: Tensor, class_RE: Tensor) -> Tensor:
        block: Any = self.var.blocks[layer]
        gate1, gate2, scale1, scale2, shift1, shift2 = (
            block.ada_lin(class_RE).view(len(class_RE), 1, 6, -1).unbind(2)
        )
        y = self._attention(layer, _norm(x_RNE).mul(scale1.add(1)).add_(shift1))
        x_RNE = x_RNE + y.mul_(gate1)
        y = _norm(x_RNE).mul(scale2.add(1)).add_(shift2)
        y = F.gelu(F.linear(y, block.ffn.fc1.weight, block.ffn.fc1.bias), approximate="tanh")
        return x_RNE + F.linear(y, block.ffn.fc2.weight, block.ffn.fc2.bias).mul_(gate2)

    def _attention(self, layer: int, x_RNE: Tensor) -> Tensor:
        block: Any = self.var.blocks[layer]
        part, config = block.attn, self.var.config
        bias = torch.cat([part.q_bias, torch.zeros_like(part.q_bias), part.v_bias])
        qkv = F.linear(x_RNE, part.mat_qkv.weight, bias)
        qkv = qkv.view(*x_RNE.shape[:2], 3, config.heads, config.head_dim)
        q_RHND, k_RHND, v_RHND = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scale_1H11 = part.scale_mul_1H11.float().clamp_max(MAX_SCALE).exp()
        q = F.normalize(q_RHND.float(), dim=-1).mul(scale_1H11).to(v_RHND.dtype)
        k = F.normalize(k_RHND.float(), dim=-1).to(v_RHND.dtype)
        k, v = self._join(layer, 0, k), self._join(layer, 1, v_RHND)
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        y: Tensor = part.proj(out.transpose(1, 2).reshape(x_RNE.shape))
        return y

    def _join(self, layer: int, which: int, new: Tensor) -> Tensor:
        """Keep a scale's keys (0) or values (1) of a layer behind all earlier ones."""
        kept = self.kv[layer]
        joined = torch.cat([kept[which], new], dim=2) if len(kept) > which else new.contiguous()
        self.kv_live += joined.nbytes
        self.kv_peak = max(self.kv_peak, self.kv_live)
        if len(kept) > which:
            self.kv_live -= kept[which].nbytes
        kept[which : which + 1] = [joined]
        return joined

    def _keep(self, logits_BNV: Tensor) -> Tensor:
        """Top-k by a selection, then top-p by a sort of what it left; in place."""
        top_k, top_p = self.sampling.top_k, self.sampling.top_p
        if top_k > 0:
            likely = logits_BNV.topk(min(top_k, logits_BNV.shape[-1]), dim=-1).values
            logits_BNV.masked_fill_(logits_BNV < likely.amin(-1, keepdim=True), -torch.inf)
        if top_p > 0:
            ascending, order = logits_BNV.sort(dim=-1)
            drop = ascending.softmax(-1).cumsum_(-1) <= 1 - top_p
            drop[..., -1:] = False
            logits_BNV.masked_fill_(drop.scatter(-1, order, drop), -torch.inf)
        return logits_BNV

    def _logits(self, x_RNE: Tensor, class_RE: Tensor) -> Tensor:
        var: Any = self.var
        dtype = var.head.weight.dtype
        scale, shift = (
            var.head_nm.ada_lin(class_RE.to(dtype)).view(len(class_RE), 1, 2, -1).unbind(2)
        )
        out: Tensor = var.head(_norm(x_RNE.to(dtype)).mul(scale.add(1)).add_(shift))
        return out


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def peak_bytes(depth: int, lengths: Sequence[int], token_bytes: int) -> int:
    """What `Concatenating.kv_peak` comes to.

    The last layer's values are joined last: then all of everything is there, and besides them the
    values of the scales before.

    Args:
        depth: layers.
        lengths: tokens of each scale.
        token_bytes: bytes of one layer's keys of one token, all rows together.
    """
    return token_bytes * (2 * depth * sum(lengths) + sum(lengths[:-1]))


def stored_bytes(depth: int, lengths: Sequence[int], token_bytes: int, rows: int) -> int:
    """The same of `streamgen.cache.NextScale` without its last scale, read by its `parts`.

    Every scale but the last is stored; for that one, one layer of half of the rows is staged.

    Args:
        depth, lengths, token_bytes: see `peak_bytes`.
        rows: images times branches.
    """
    stored = 2 * depth * sum(lengths[:-1]) * token_bytes
    return stored + 2 * sum(lengths) * math.ceil(rows / 2) * token_bytes // rows
