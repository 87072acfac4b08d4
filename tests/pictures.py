"""A next-scale pipeline of random weights, small enough to be made in every test that needs one."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from streamgen.models.var import VARConfig, VARModel
from streamgen.models.vq import VQVAE, VQConfig
from streamgen.pipelines.next_scale import ImageConfig, NextScalePipeline
from streamgen.sampling.tokens import Sampling

Module = TypeVar("Module", bound=nn.Module)

CLASSES = ("lava, brick", "lava, stone", "Snow, brick", "ocean", "night sky")
SIDES = (1, 2, 3, 5)


def tiny_var(shared_aln: bool = False, patch_nums: tuple[int, ...] = SIDES) -> VARModel:
    """Two blocks of width 32; no parameter is zero, so all of it matters."""
    config = VARConfig(
        depth=2,
        width=32,
        heads=2,
        num_classes=len(CLASSES),
        latent_channels=6,
        vocab=24,
        patch_nums=patch_nums,
        shared_aln=shared_aln,
    )
    return randomised(VARModel(config), 1)


def tiny_vqvae(encoder: bool = True, latent_channels: int = 6) -> VQVAE:
    """Half the resolution, 24 codebook entries."""
    config = VQConfig(
        vocab=24,
        latent_channels=latent_channels,
        ch=32,
        ch_mult=(1, 1),
        num_res_blocks=1,
        using_sa=False,
        using_mid_sa=False,
        encoder=encoder,
    )
    return randomised(VQVAE(config), 2)


def tiny_pictures(
    shared_aln: bool = False, height: int = 0, width: int = 0, encoder: bool = True
) -> NextScalePipeline:
    """10 x 10 pixels, 39 tokens an image, 14 of them stored; all tokens may be drawn."""
    config = ImageConfig(CLASSES, height, width, Sampling(cfg=2.0, top_k=0, top_p=0.0))
    return NextScalePipeline(tiny_var(shared_aln), tiny_vqvae(encoder), config, "tiny")


def randomised(module: Module, seed: int) -> Module:
    """All parameters random: matrices keep the size of what goes through them."""
    make = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        fan_in = max(parameter[0].numel(), 1) if parameter.ndim > 1 else 4
        if "emb" in name or name.startswith("pos"):
            fan_in = 1
        noise = torch.randn(parameter.shape, generator=make) / fan_in**0.5
        parameter.data = noise + (1.0 if parameter.ndim < 2 and "norm" in name else 0.0)
    return module.eval().requires_grad_(False)
