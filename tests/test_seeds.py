"""Published sizes and counts that are plain arithmetic, each from our own planner, spec or cache.

Sources: PagedAttention (arXiv 2309.06180), Mistral 7B (2310.06825), GQA (2305.13245), HERMES
(2601.14724), Doc-to-LoRA (2602.15902), and a public page on sizing KV tiers, whose figures mix
units: its GB is 10^9 bytes, its TB 1,024 of them, its MB a 1,024th, and its K 1,024 tokens.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor

import pytest
import torch

from streamgen.cache import Append, BlockPool, BlockTable, KVSpec
from streamgen.cache.planner import (
    FORMATS,
    GB,
    Fleet,
    GiB,
    KVFormat,
    LayerGroup,
    Load,
    plan,
    session_bytes,
)
from streamgen.cache.shapes import GPUS, MODELS

MiB, KiB = 2**20, 2**10
MB = 10**6


def session(model: str, tokens: int, kv: str = "bf16") -> Fraction:
    """K/V bytes of one session."""
    return session_bytes(MODELS[model], Load(1, [(1, tokens)]), kv).kv


def test_opt_13b_keeps_800_kib_a_token() -> None:
    """And a sequence of 2,048 tokens up to 1.6 GB (1.5625 GiB) (2309.06180, section 3)."""
    assert MODELS["opt-13b"].token_bytes() == 800 * KiB
    assert session("opt-13b", 2048) == 1_677_721_600 == 1.5625 * GiB


def test_recompute_costs_501_times_at_1000_tokens() -> None:
    """Keys that are written with a cache, and that would be without: the area of a triangle."""
    table = BlockTable(BlockPool(KVSpec(1, 1, 2, 1), 1000), Append(1000))
    key, computed, recomputed = torch.zeros(1, 1, 2), 0, 0
    for _ in range(1000):
        with table.chunk(1) as chunk:
            chunk.write(0, key, key)
            computed += len(key)
            recomputed += len(chunk.kv(0)[0])
            chunk.commit()
    assert (computed, recomputed) == (1000, 500_500)
    assert floor(recomputed / computed + 0.5) == 501


def test_nvfp4_is_56_percent_of_fp8() -> None:
    """Half a byte and a sixteenth of one against a byte; our blocks add a scale for each head."""
    codes = KVFormat(4, 1, "16 values", "16 values")
    group = LayerGroup(30, 12, 128)
    plain = group.block_bytes(16, FORMATS["fp8_static"])
    assert Fraction(group.block_bytes(16, codes), plain) == Fraction(5625, 10_000)
    for tokens, within in ((16, 0.002), (1560, 0.00002)):
        ours = [group.block_bytes(tokens, FORMATS[name]) for name in ("nvfp4", "fp8")]
        assert ours[0] / ours[1] == pytest.approx(0.5625, abs=within)


def test_planner_example() -> None:
    """DeepSeek R1, 1,000 sessions, 4 nodes of 8 GPUs of 80 GB: every figure that is printed."""
    kinds = {"chat": (50, 16_384), "rag": (30, 65_536), "agent": (20, 163_840)}
    found = plan(
        MODELS["deepseek-r1"],
        Fleet("h100-80", GPUS["h100-80"], nodes=4, gpus_per_node=8, dram=1024 * GB),
        Load(1000, list(kinds.values())),
    )
    assert found.token == 61 * (512 + 64) == 35_136
    assert found.session.tokens == Fraction(606_208, 10)
    assert round(float(found.session.tokens / 1024), 1) == 59.2  # "59K"
    assert round(float(found.session.total / GB), 3) == 2.130  # "2.1 GB"
    assert round(float(found.demand / GB), 1) == 2130.0
    assert round(float(found.demand / (1024 * GB)), 2) == 2.08  # "2.08 TB"
    assert (found.copies, found.gpus_per_copy) == (2, 16)
    assert found.weights == 2 * 671 * GB
    assert found.free == 962 * GB
    assert found.live == 451
    assert round(100 * float(found.fit), 1) == 45.2
    dram = found.tiers[1]
    assert dram.used == found.demand - found.free and not found.unplaced
    assert round(float(dram.used / (1024 * GB)), 2) == 1.14  # "1.14 TB spills"
    alone = [session("deepseek-r1", tokens, "fp8_static") for _, tokens in kinds.values()]
    assert round(float(alone[0] / GB * 1024)) in (589, 590)  # "589 MB"
    assert [round(float(x / GB), 1) for x in alone[1:]] == [2.3, 5.8]


@pytest.mark.parametrize(
    ("name", "token", "frame_tokens", "frame_mb", "frames", "sessions_gb"),
    [
        ("wan2.1-1.3b", 184_320, 1560, 287.5, 21, (6.04, 3.02, 1.70)),
        ("wan2.2-5b", 368_640, 880, 324.4, 32, (10.4, 5.2, 2.9)),
        ("wan2.1-14b", 819_200, 1560, 1278.0, 18, (23.0, 11.5, 6.5)),
    ],
)
def test_video_models(
    name: str,
    token: int,
    frame_tokens: int,
    frame_mb: float,
    frames: int,
    sessions_gb: tuple[float, float, float],
) -> None:
    """Bytes of a token, a latent frame, and a full window in bf16, fp8 and nvfp4."""
    shape = MODELS[name]
    assert (shape.token_bytes("bf16"), shape.frame_tokens) == (token, frame_tokens)
    assert session(name, frame_tokens) / MB == pytest.approx(frame_mb, abs=0.05)
    assert shape.window == frames * frame_tokens
    for kv, size in zip(("bf16", "fp8", "nvfp4"), sessions_gb, strict=True):
        digits = len(str(size).partition(".")[2])
        assert round(float(session(name, shape.window, kv) / GB), digits) == size


def test_an_engine_s_published_window() -> None:
    """vllm-omni states 21.42 GiB for 18 frames of a 14B model."""
    assert float(session("wan2.1-14b", 18 * 1560) / GiB) == pytest.approx(21.42, abs=0.005)


def test_hermes_budgets() -> None:
    """Qwen2.5-VL-7B: 4K and 6K tokens a layer are 235 and 352 MB; 196 tokens of a frame 11.2."""
    assert MODELS["qwen2.5-vl-7b"].token_bytes() == 57_344
    sizes = [float(session("qwen2.5-vl-7b", n) / MB) for n in (4096, 6144)]
    assert sizes == pytest.approx([235, 352], abs=0.5)
    assert 196 * 57_344 / MB == pytest.approx(11.2, abs=0.05)


def test_mistral_saves_eight_times_at_32k() -> None:
    """A window of 4,096 against 32,768 tokens; through 32 layers it could reach 131,072."""
    [group] = MODELS["mistral-7b"].groups
    full = LayerGroup(group.layers, group.heads, group.dim)
    assert full.kept(32_768) / group.kept(32_768) == 8
    assert group.layers * group.window == 131_072
    assert session("mistral-7b", 32_768) == session("mistral-7b", 4096)


def test_grouped_heads_shrink_the_cache_by_their_ratio() -> None:
    """8 of 32 heads: a quarter; one: a 32nd (2305.13245, 2.2)."""
    sizes = [KVSpec(32, heads, 128, 16).block_bytes for heads in (32, 8, 1)]
    assert sizes[0] == 4 * sizes[1] == 32 * sizes[2]


def test_kimi_k3_snapshots() -> None:
    """A state of 414 MiB is 15.7K tokens of K/V; 6,144 tokens are 162 MiB and 8 snapshots."""
    shape = MODELS["kimi-k3"]
    assert shape.token_bytes("bf16") == 27 * KiB
    assert 69 * 96 * 128 * 128 * 4 == shape.state_bytes == 414 * MiB
    assert round(shape.state_bytes / (27 * KiB)) == 15_701
    found = session_bytes(shape, Load(1, [(1, 6144)]), "bf16")
    assert found.kv == 162 * MiB and found.snapshots == 8
    assert round(float(found.snapshot_bytes / GiB), 2) == 3.23


def test_a_document_in_the_cache_of_gemma_2() -> None:
    """128K tokens of gemma-2-2b are over 12 GB (2602.15902, section 4): 26 layers, 4 x 256."""
    size = LayerGroup(26, 4, 256).block_bytes(131_072, FORMATS["bf16"])
    assert round(size / GB, 2) == 13.96


def test_memory_of_common_nodes() -> None:
    """Eight GPUs as sold, in GB of 10^9 bytes."""
    sizes = {name: 8 * GPUS[name] // GB for name in ("h100-80", "h200", "b200", "b300")}
    assert sizes == {"h100-80": 640, "h200": 1128, "b200": 1440, "b300": 2304}
