"""Video models of random weights, small enough to be made in every test that needs one."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLWan
from worlds import WORDS, randomise, tiny_world

from streamgen.engine import Engine, VideoConfig
from streamgen.models.text import WordEncoder
from streamgen.models.wan import WanConfig, WanModel
from streamgen.models.wan_vae import WanCodec
from streamgen.pipelines.causal_video import CausalVideoPipeline
from streamgen.sampling.schedule import FewStep

SHAPE = WanConfig(
    dim=48,
    ffn_dim=64,
    num_heads=2,
    num_layers=2,
    in_channels=4,
    out_channels=4,
    text_dim=16,
    text_len=6,
    freq_dim=32,
)


def tiny_dit(shape: WanConfig = SHAPE) -> WanModel:
    torch.manual_seed(1)
    dit = WanModel(shape)
    randomise(dit)
    return dit.eval().requires_grad_(False)


def tiny_vae(channels: int = 4) -> AutoencoderKLWan:
    """Wan's autoencoder, 8 x down and 4 frames a latent, 4 channels wide."""
    torch.manual_seed(2)
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1] * channels,
        latents_std=[1.5] * channels,
    )
    randomise(vae)
    return vae.eval().requires_grad_(False)


def tiny_video(
    temporal: bool = True,
    max_sessions: int = 2,
    history_frames: int = 48,
    kv: str = "raw",
    **changes: Any,
) -> CausalVideoPipeline:
    """Latents of 4 x 6, chunks of 2 of them; with `temporal`, four pixel frames a latent."""
    latent_hw = (4, 6) if temporal else (8, 12)
    shape = SHAPE
    if not temporal:
        shape = WanConfig(**{**vars(SHAPE), "patch_size": (1, 4, 4)})
    torch.manual_seed(3)
    text = WordEncoder(WORDS, 16, 6).eval().requires_grad_(False)
    codec: Any = WanCodec(tiny_vae()) if temporal else tiny_world().engine.codec
    values: dict[str, Any] = {
        "height": 32 if temporal else 16,
        "width": 48 if temporal else 24,
        "fps": 16,
        "latent_hw": latent_hw,
        "chunk_frames": 2,
        "sink": 1,
        "window": 6,
        "positions": "absolute",
        "schedule": FewStep((1000, 500)),
        "first_schedule": FewStep((1000, 500)),
        "suggestions": ("a brick maze at night", "snow"),
        "vocabulary": WORDS,
        "max_words": 6,
    }
    config = VideoConfig(**{**values, **changes})
    engine = Engine(tiny_dit(shape), text, codec, config, max_sessions, history_frames, kv)
    return CausalVideoPipeline(engine, "tiny-video")
