"""A second oracle that needs no files: diffusers' Wan transformer with a mask over self-attention.

It sees all frames in one pass and has no cache; each frame has its own timestep, and the mask lets
a frame see what a cache policy would have kept for its chunk. Self-Forcing's own cache was found to
equal it to 6e-7, so agreement here is agreement with the public code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanTransformer3DModel
from torch import Tensor, nn

from streamgen.cache import Append, BlockPool, BlockTable, CachePolicy, KVSpec, SinkWindow
from streamgen.models.history import CachedHistory, CachedPrompt
from streamgen.models.wan import WanConfig, WanModel

CONFIG = WanConfig(
    dim=48, ffn_dim=80, num_heads=2, num_layers=3, in_channels=4, out_channels=4,
    text_dim=12, text_len=5, freq_dim=32,
)  # fmt: skip
LATENT_HW = (4, 6)
GRID = CONFIG.grid(LATENT_HW)
TOKENS = GRID[0] * GRID[1]
TOLERANCE = 1e-5

POLICIES = {
    "append": Append(15),
    "window6": SinkWindow(0, 6),
    "window7": SinkWindow(0, 7),
    "sink1_window6": SinkWindow(1, 6),
    "sink1_window7": SinkWindow(1, 7),
    "sink3_window9": SinkWindow(3, 9),
}

NAMES = (  # official name -> diffusers' name; norm2 and norm3 trade places
    (r"^time_embedding\.0", "condition_embedder.time_embedder.linear_1"),
    (r"^time_embedding\.2", "condition_embedder.time_embedder.linear_2"),
    (r"^time_projection\.1", "condition_embedder.time_proj"),
    (r"^text_embedding\.0", "condition_embedder.text_embedder.linear_1"),
    (r"^text_embedding\.2", "condition_embedder.text_embedder.linear_2"),
    (r"^head\.modulation", "scale_shift_table"),
    (r"^head\.head", "proj_out"),
    (r"\.modulation$", ".scale_shift_table"),
    (r"\.self_attn\.", ".attn1."),
    (r"\.cross_attn\.", ".attn2."),
    (r"(attn\d)\.([qkv])\.", r"\1.to_\2."),
    (r"(attn\d)\.o\.", r"\1.to_out.0."),
    (r"\.norm3\.", ".norm2."),
    (r"\.ffn\.0\.", ".ffn.net.0.proj."),
    (r"\.ffn\.2\.", ".ffn.net.2."),
)


class Masked(WanAttnProcessor):
    """Diffusers' own processor with a mask where a layer attends to itself."""

    mask: Tensor | None = None

    def __call__(  # type: ignore[override]
        self, attn: Any, x: Tensor, text: Tensor | None = None, mask: Any = None, rope: Any = None
    ) -> Tensor:
        return super().__call__(attn, x, text, self.mask if text is None else mask, rope)


def diffusers_name(name: str) -> str:
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def randomise(module: nn.Module) -> None:
    """No parameter at a special value: a zero or a one would hide that it is not used."""
    for parameter in module.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)


@pytest.fixture(scope="module")
def model() -> WanModel:
    """Ours, with random weights."""
    torch.manual_seed(0)
    model = WanModel(CONFIG).eval().requires_grad_(False)
    randomise(model)
    return model


@pytest.fixture(scope="module")
def oracle(model: WanModel) -> WanTransformer3DModel:
    """Theirs, with the same weights; every key finds its place."""
    oracle = WanTransformer3DModel(
        patch_size=CONFIG.patch_size,
        num_attention_heads=CONFIG.num_heads,
        attention_head_dim=CONFIG.head_dim,
        in_channels=CONFIG.in_channels,
        out_channels=CONFIG.out_channels,
        text_dim=CONFIG.text_dim,
        freq_dim=CONFIG.freq_dim,
        ffn_dim=CONFIG.ffn_dim,
        num_layers=CONFIG.num_layers,
    )
    weights = {diffusers_name(name): value for name, value in model.state_dict().items()}
    oracle.load_state_dict(weights, strict=True)
    return oracle.eval().requires_grad_(False)


def full_pass(
    oracle: WanTransformer3DModel, x: Tensor, t_F: Tensor, text: Tensor, seen_FF: Tensor
) -> Tensor:
    """One pass over all frames, where frame i sees frame j iff `seen_FF[i, j]`."""
    processor = Masked()
    processor.mask = seen_FF.repeat_interleave(TOKENS, 0).repeat_interleave(TOKENS, 1)
    for block in oracle.blocks:
        block.attn1.set_processor(processor)
    t_BN = t_F.repeat_interleave(TOKENS)[None]
    return oracle(x, t_BN, text, return_dict=False)[0]


def seen(chunks: Sequence[int], sink: int, window: int | None) -> Tensor:
    """The rule of Self-Forcing's cache, written out: a chunk that ends before E sees frame f iff
    `f < E and (f < sink or f >= E - (window - sink))`."""
    rows = []
    for end, size in zip(torch.tensor(chunks).cumsum(0).tolist(), chunks, strict=True):
        rows += [
            [
                f < end and (window is None or f < sink or f >= end - (window - sink))
                for f in range(sum(chunks))
            ]
        ] * size
    return torch.tensor(rows)


def rule_of(policy: CachePolicy) -> tuple[int, int | None]:
    return (policy.sink, policy.window) if isinstance(policy, SinkWindow) else (0, None)


def make_table(policy: CachePolicy) -> BlockTable:
    spec = KVSpec(CONFIG.num_layers, CONFIG.num_heads, CONFIG.head_dim, TOKENS)
    return BlockTable(BlockPool(spec, policy.lane_size), policy)


def inputs(frames: int) -> tuple[Tensor, Tensor, Tensor]:
    """Latents `[1, C, F, Y, X]`, a timestep for each frame, and a text."""
    generator = torch.Generator().manual_seed(frames)
    x = torch.randn(1, CONFIG.in_channels, frames, *LATENT_HW, generator=generator)
    t_F = 1000 * torch.rand(frames, generator=generator)
    text = torch.randn(1, CONFIG.text_len, CONFIG.text_dim, generator=generator)
    return x, t_F, text


@pytest.mark.parametrize("chunks", [(3,) * 5, (1, 3, 3, 3, 3), (2, 1, 4, 3, 5)], ids=str)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_chunked_and_cached_equals_masked(
    model: WanModel, oracle: WanTransformer3DModel, policy: CachePolicy, chunks: tuple[int, ...]
) -> None:
    """Chunk by chunk from the cache, or all frames at once under a mask: the same output."""
    sink, window = rule_of(policy)
    x, t_F, text = inputs(sum(chunks))
    prompt, table = CachedPrompt(model.encode_prompt(text)), make_table(policy)
    outputs = []
    for x_chunk, t_chunk in zip(x.split(chunks, dim=2), t_F.split(chunks), strict=True):
        with table.chunk(x_chunk.shape[2]) as chunk:
            outputs.append(model(x_chunk, t_chunk[None], CachedHistory(chunk, GRID), prompt))
            chunk.commit()
    expected = full_pass(oracle, x, t_F, text, seen(chunks, sink, window))
    torch.testing.assert_close(torch.cat(outputs, dim=2), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_noisy_steps_over_a_clean_past(
    model: WanModel, oracle: WanTransformer3DModel, policy: CachePolicy
) -> None:
    """As in use: each chunk is passed at two noise levels, then stored clean by a short pass."""
    (sink, window), sizes = rule_of(policy), (3,) * 5
    clean, _, text = inputs(15)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    prompt, table = CachedPrompt(model.encode_prompt(text)), make_table(policy)
    end = 0
    for x0, x in zip(clean.split(sizes, dim=2), noise.split(sizes, dim=2), strict=True):
        with table.chunk(3) as chunk:
            history, end = CachedHistory(chunk, GRID), end + 3
            for level in (1.0, 0.6):
                noisy = (1 - level) * x0 + level * x
                t_F = torch.tensor([0.0] * (end - 3) + [1000 * level] * 3)
                ours = model(noisy, t_F[None, -3:], history, prompt)
                frames = torch.cat([clean[:, :, : end - 3], noisy], dim=2)
                mask = seen(sizes[: end // 3], sink, window)
                theirs = full_pass(oracle, frames, t_F, text, mask)[:, :, -3:]
                torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
            model(x0, torch.zeros(1, 3), history, prompt, store_only=True)
            chunk.commit()


def test_the_mask_matters(oracle: WanTransformer3DModel) -> None:
    """Another window or another sink gives another output: the agreement above is not vacuous."""
    x, t_F, text = inputs(15)
    sizes = (3,) * 5
    outputs = [
        full_pass(oracle, x, t_F, text, seen(sizes, sink, window))
        for sink, window in ((0, None), (0, 6), (1, 6), (1, 7), (3, 9))
    ]
    for i, one in enumerate(outputs):
        for other in outputs[:i]:
            assert (one - other).abs().max() > 100 * TOLERANCE
