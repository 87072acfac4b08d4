"""A world of random weights, small enough to be made in every test that needs one."""

from __future__ import annotations

import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from torch import nn

from streamgen.engine import Engine, WorldConfig
from streamgen.models.text import WordEncoder
from streamgen.models.vae import FrameCodec
from streamgen.models.wan import WanConfig, WanModel
from streamgen.pipelines.world import WorldPipeline
from streamgen.sampling.schedule import FewStep

WORDS = ("a", "maze", "brick", "stone", "night", "day", "snow", "heavy", "at")


def tiny_world(
    sink: int = 1,
    window: int = 6,
    positions: str = "sliding_sink",
    max_sessions: int = 4,
    history_frames: int = 64,
    prediction: str = "flow",
) -> WorldPipeline:
    """8 x 12 latents, 12 tokens a frame, 3 layers; no parameter is zero, so all of it matters."""
    torch.manual_seed(0)
    shape = WanConfig(
        dim=48,
        ffn_dim=64,
        num_heads=2,
        num_layers=3,
        in_channels=4,
        out_channels=4,
        patch_size=(1, 4, 2),
        text_dim=16,
        text_len=6,
        freq_dim=32,
        action_dim=6,
        spatial_tokens=12,
        prediction=prediction,
    )
    dit, text = WanModel(shape), WordEncoder(WORDS, 16, 6)
    vae = AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
        latent_channels=4,
    )
    for module in (dit, text, vae):
        randomise(module)
    config = WorldConfig(
        height=16,
        width=24,
        fps=20,
        latent_hw=(8, 12),
        chunk_frames=2,
        sink=sink,
        window=window,
        positions=positions,
        schedule=FewStep((1000, 500), shift=1.0),
        first_schedule=FewStep((1000, 700, 400), shift=1.0),
        keys=("w", "s", "a", "d", "q", "e"),
        opposites=(("w", "s"), ("a", "d"), ("q", "e")),
        suggestions=("a brick maze at night", "snow"),
        vocabulary=WORDS,
        max_words=6,
    )
    codec = FrameCodec(vae, [0.0] * 4, [1.0] * 4)
    for module in (dit, text):
        module.eval().requires_grad_(False)
    return WorldPipeline(Engine(dit, text, codec, config, max_sessions, history_frames), "tiny")


def randomise(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.05 * torch.randn_like(parameter)
        elif parameter.abs().max() == 0:
            nn.init.normal_(parameter, std=0.05)
