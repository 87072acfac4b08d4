"""The planner: each part of a session's bytes by hand, and what fits where."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamgen.cache import KVSpec
from streamgen.cache.codec import CODECS, codec_name
from streamgen.cache.planner import (
    FORMATS,
    GB,
    Fleet,
    GiB,
    KVFormat,
    LayerGroup,
    Load,
    ModelShape,
    Plan,
    expect_format,
    plan,
    session_bytes,
    sharing_saves,
)
from streamgen.cache.shapes import GPUS, MODELS, from_hf
from streamgen.errors import InvalidRequest
from streamgen.models.wan import WanConfig, WanModel

SMALL = ModelShape("small", (LayerGroup(3, 2, 8),), weight_bytes=1000)
TOKEN = 2 * 3 * 2 * 8 * 2  # K and V, layers, heads, channels, bytes of bf16
FLEET = Fleet("some", 100_000, reserve=Fraction(0))


def one(tokens: int, **other: int) -> Load:
    return Load(1, [(1, tokens)], **other)


def kv_of(shape: ModelShape, tokens: int, kv: str = "bf16", **other: int) -> int:
    return int(session_bytes(shape, one(tokens, **other), kv).kv)


# Bytes of a session


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (1000, 63)]
)
def test_whole_blocks(tokens: int, blocks: int) -> None:
    """A session holds whole blocks: the last one may be partly filled, and never more is."""
    assert kv_of(SMALL, tokens) == blocks * 16 * TOKEN


@given(
    layers=st.integers(1, 8),
    heads=st.integers(1, 8),
    dim=st.integers(1, 4).map(lambda n: 16 * n),
    block=st.integers(1, 64),
    name=st.sampled_from(["fp32", "bf16", "fp16", "fp8", *CODECS[1:]]),
)
@settings(max_examples=40)
def test_bytes_are_those_of_the_spec(
    layers: int, heads: int, dim: int, block: int, name: str
) -> None:
    """Every format, scales included, takes what a pool of that codec allocates for a block."""
    raw = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    codec = "raw" if name in raw else codec_name(name)
    spec = KVSpec(layers, heads, dim, block, raw.get(name, torch.float32), codec)
    group = LayerGroup(layers, heads, dim)
    assert group.block_bytes(block, FORMATS[name]) == spec.block_bytes
    assert ModelShape("x", (group,), block_tokens=block).token_bytes(name) * block == (
        spec.block_bytes
    )


@pytest.mark.parametrize(
    ("scale_of", "scales"), [("none", 0), ("block", 1), ("channel", 32), ("token", 16)]
)
def test_scales_are_counted(scale_of: str, scales: int) -> None:
    """Each scale of a head of a block costs its bytes, for keys and values alike."""
    codec = KVFormat(8, 4, scale_of, scale_of)  # type: ignore[arg-type]
    size = LayerGroup(3, 2, 32).block_bytes(16, codec)
    assert size == 3 * 2 * 2 * (16 * 32 + 4 * scales)


def test_four_bits_with_a_scale_of_sixteen() -> None:
    """NVFP4: half a byte a value and a byte for every 16 of them, in one head of one token."""
    codec = KVFormat(4, 1, "16 values", "16 values")
    assert LayerGroup(1, 1, 64).block_bytes(10, codec) == 2 * 10 * (32 + 4)
    assert LayerGroup(1, 1, 20).block_bytes(1, codec) == 2 * (10 + 2)  # a part of 16 has its own


def test_latent_attention_has_no_second_vector() -> None:
    """One latent of 512 + 64 values stands for K and V."""
    group = LayerGroup(61, 1, 576, latent=True)
    assert group.block_bytes(16, FORMATS["bf16"]) == 61 * 16 * 576 * 2


def test_window_sink_and_past() -> None:
    """A window bounds a session; its past and a raw copy of its sink come on top."""
    group = LayerGroup(3, 2, 8, window=64, sink=16, raw_sink=True)
    shape = replace(SMALL, groups=(group,))
    assert kv_of(shape, 32) == (32 + 16) * TOKEN
    assert kv_of(shape, 10_000) == (64 + 16) * TOKEN
    assert kv_of(shape, 10_000, past=32) == (64 + 32 + 16) * TOKEN
    assert kv_of(replace(shape, groups=(replace(group, raw_sink=False),)), 10_000) == 64 * TOKEN


def test_layer_groups_add_up() -> None:
    """Some layers with a window and some without: each keeps what it keeps."""
    both = replace(SMALL, groups=(LayerGroup(1, 2, 8), LayerGroup(2, 2, 8, window=160)))
    assert kv_of(both, 1600) == TOKEN // 3 * 1600 + TOKEN // 3 * 2 * 160
    assert both.window == 0 and replace(both, groups=both.groups[1:]).window == 160


def test_state_snapshots_and_cross_attention() -> None:
    """Besides K/V: one text, the live state, and a copy of it for every so many tokens kept."""
    shape = replace(SMALL, cross_tokens=7, state_bytes=1000, snapshot_tokens=100)
    found = session_bytes(shape, one(350), "fp8")
    assert found.cross == 7 * TOKEN  # in the compute dtype, whatever K/V is kept in
    assert (found.state, found.snapshots, found.snapshot_bytes) == (1000, 3, 3000)
    assert found.total == found.kv + found.cross + 4000


def test_snapshots_where_all_keys_and_values_are() -> None:
    """A window has been cut behind its first frame: only the past behind it can be gone back to."""
    group = LayerGroup(3, 2, 8, window=200)
    shape = replace(SMALL, groups=(group,), state_bytes=10, snapshot_tokens=100, snapshot_bytes=3)
    assert session_bytes(shape, one(5000), "bf16").snapshots == 0
    found = session_bytes(shape, one(5000, past=250), "bf16")
    assert (found.state, found.snapshots, found.snapshot_bytes) == (10, 2, 6)
    mixed = replace(shape, groups=(group, LayerGroup(3, 2, 8)))
    assert session_bytes(mixed, one(5000, past=250), "bf16").snapshots == 2


def test_mix_is_a_mean() -> None:
    """Kinds of sessions count by their share, each in whole blocks."""
    found = session_bytes(SMALL, Load(10, [(3, 17), (1, 160)]), "bf16")
    assert found.kv == Fraction((3 * 32 + 160) * TOKEN, 4)
    assert found.tokens == Fraction(3 * 17 + 160, 4)


# What fits


def test_one_gpu_by_hand() -> None:
    """Memory less weights less reserve, divided by a session."""
    fleet = Fleet("some", 100_000, reserve=Fraction(1, 4))
    found = plan(SMALL, fleet, Load(100, [(1, 160)]))
    assert found.free == 100_000 - 25_000 - 1000
    assert found.live == 74_000 // (160 * TOKEN)
    assert found.demand == 100 * 160 * TOKEN
    assert found.unplaced == found.demand - found.free


@given(
    sessions=st.integers(1, 50),
    tokens=st.integers(1, 5000),
    dram=st.integers(0, 10**6),
    nvme=st.integers(0, 10**6),
    pooled=st.one_of(st.none(), st.integers(0, 10**6)),
)
@settings(max_examples=50)
def test_tiers_fill_in_order(
    sessions: int, tokens: int, dram: int, nvme: int, pooled: int | None
) -> None:
    """Every byte has one place; a tier is used only once the faster ones are full."""
    fleet = replace(FLEET, nodes=2, dram=dram, nvme=nvme, pooled=pooled)
    found = plan(SMALL, fleet, Load(sessions, [(1, tokens)]))
    assert sum(tier.used for tier in found.tiers) + found.unplaced == found.demand
    for tier, slower in zip(found.tiers, found.tiers[1:], strict=False):
        assert tier.capacity is None or tier.used <= tier.capacity
        assert slower.used == 0 or tier.used == tier.capacity
    if pooled is None:
        assert found.unplaced == 0


def test_copies_of_the_weights() -> None:
    """As few whole nodes as hold one copy; what is left over is idle and said so."""
    shape, load = replace(SMALL, weight_bytes=671 * GB), one(16)
    fleet = Fleet("h100-80", 80 * GB, nodes=5, gpus_per_node=8)
    found = plan(shape, fleet, load)
    assert (found.copies, found.gpus_per_copy, found.idle_gpus) == (2, 16, 8)
    found = plan(shape, replace(fleet, gpus_per_copy=10), load)
    assert (found.copies, found.idle_gpus, found.weights) == (4, 0, 4 * 671 * GB)


@pytest.mark.parametrize(
    ("fleet", "needed"),
    [
        (Fleet("x", 80 * GB, nodes=1, gpus_per_node=8), 16),
        (Fleet("x", 80 * GB, nodes=4, gpus_per_node=8, gpus_per_copy=9), 10),
        (Fleet("x", 80 * GB, nodes=1, gpus_per_node=8, gpus_per_copy=12), 12),
    ],
)
def test_weights_must_fit(fleet: Fleet, needed: int) -> None:
    """Else it says how many GPUs they need."""
    with pytest.raises(InvalidRequest, match=f"671.0 GB. needs {needed} GPUs of 80 GB with 10%"):
        plan(replace(SMALL, weight_bytes=671 * GB), fleet, one(16))


# Sharing


def saved(sessions: int, shared: int, own: int) -> Plan:
    return plan(SMALL, FLEET, Load(sessions, [(1, 16 * (shared + own))], prefix=16 * shared))


@given(sessions=st.integers(1, 40), shared=st.integers(0, 20), own=st.integers(1, 20))
@settings(max_examples=50)
def test_sharing_saves_by_the_formula(sessions: int, shared: int, own: int) -> None:
    """(n-1) S of n (S + W): one copy of a common prefix in whole blocks."""
    found, alone = saved(sessions, shared, own), saved(sessions, 0, shared + own)
    share = sharing_saves(sessions, shared, own)
    assert found.saved == (sessions - 1) * shared * 16 * TOKEN == share * alone.demand
    assert found.demand + found.saved == alone.demand
    assert found.live >= alone.live


def test_a_partly_filled_block_is_not_shared() -> None:
    """Sessions write into the block where the prefix ends, so each has its own."""
    found = plan(SMALL, FLEET, Load(3, [(1, 100)], prefix=40))
    assert found.saved == 2 * 32 * TOKEN


def test_a_sink_can_be_shared_and_what_left_the_window_cannot() -> None:
    """16 sessions of 3 + 9 frames with one sink need 23 % less (cache_core.md, 2.5)."""
    group = LayerGroup(3, 2, 8, window=12 * 5, sink=3 * 5)
    shape = replace(SMALL, groups=(group,), frame_tokens=5, block_tokens=5)
    found = plan(shape, FLEET, Load(16, [(1, 1000)], prefix=20))
    assert found.saved / (found.saved + found.demand) == Fraction(15 * 3, 16 * 12)
    plain = replace(shape, groups=(replace(group, sink=0),))
    assert plan(plain, FLEET, Load(16, [(1, 1000)], prefix=20)).saved == 0
    assert plan(plain, FLEET, Load(16, [(1, 60)], prefix=20)).saved == 15 * 20 * TOKEN


def test_each_copy_keeps_the_prefix() -> None:
    """Sessions on another copy of the weights can't read this one's memory."""
    found = plan(SMALL, replace(FLEET, nodes=3), Load(10, [(1, 160)], prefix=16))
    assert found.once == 3 * 16 * TOKEN and found.saved == 7 * 16 * TOKEN


def test_prompts_are_shared_by_text() -> None:
    """With 2 texts among 10 sessions, 8 of 10 copies are spared."""
    shape = replace(SMALL, cross_tokens=7)
    assert plan(shape, FLEET, Load(10, [(1, 16)], prompts=2)).saved == 8 * shape.cross_bytes


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Load(0, [(1, 16)]), "sessions=0: a positive integer"),
        (lambda: Load(1, [(1, 0)]), "tokens=0"),
        (lambda: Load(1, [(0, 5)]), "share=0"),
        (lambda: Load(1, []), "no kind of session"),
        (lambda: Load(1, [(1, 5)], prefix=6), "prefix of 6 tokens is longer than a session of 5"),
        (lambda: Fleet("x", 0), "gpu_bytes=0"),
        (lambda: Fleet("x", 1, dram=-1), "dram=-1: an integer of 0 or more"),
        (lambda: Fleet("x", 1, reserve=Fraction(1)), "reserve 1: accepted are 0 and up to 1"),
        (lambda: expect_format("fp7"), "'fp7': accepted are fp32, bf16"),
        (lambda: plan(MODELS["opt-13b"], FLEET, one(2049)), "2,049 tokens is over the 2,048"),
    ],
)
def test_bad_values(make: object, message: str) -> None:
    """Each is refused with its name, its value and what is accepted."""
    with pytest.raises(InvalidRequest, match=message):
        make()  # type: ignore[operator]


# Shapes


def test_table_of_models() -> None:
    """Bytes of a token in bf16, by the dense formula, for every row with K and V in all layers."""
    known = {
        "opt-13b": 800 * 1024,
        "llama-3.1-8b": 2 * 32 * 8 * 128 * 2,
        "llama-3.1-70b": 2 * 80 * 8 * 128 * 2,
        "mistral-7b": 2 * 32 * 8 * 128 * 2,
        "qwen2.5-vl-7b": 57_344,
        "deepseek-r1": 2 * 35_136,
        "kimi-k3": 27 * 1024,
        "wan2.1-1.3b": 184_320,
        "wan2.1-14b": 819_200,
        "wan2.2-5b": 368_640,
    }
    assert {name: shape.token_bytes("bf16") for name, shape in MODELS.items()} == known
    assert GPUS["h200"] == 141 * GB != 141 * GiB


def _parameters(config: WanConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in WanModel(config).parameters())


def test_parameters_of_video_models() -> None:
    """The rows' weights are those of the transformers that this package builds."""
    configs = {
        "wan2.1-1.3b": WanConfig(1536, 8960, 12, 30),
        "wan2.1-14b": WanConfig(5120, 13824, 40, 40),
        "wan2.2-5b": WanConfig(3072, 14336, 24, 30, in_channels=48, out_channels=48),
    }
    for name, config in configs.items():
        one, two = (_parameters(replace(config, num_layers=n)) for n in (1, 2))
        shape = MODELS[name]
        assert shape.weight_bytes == 2 * (one + (config.num_layers - 1) * (two - one))
        [group] = shape.groups
        assert (group.layers, group.heads, group.dim) == (
            config.num_layers,
            config.num_heads,
            config.head_dim,
        )


LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131_072,
}


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (LLAMA, (LayerGroup(32, 8, 128),)),
        ({"text_config": LLAMA, "num_hidden_layers": 99}, (LayerGroup(32, 8, 128),)),
        ({**LLAMA, "head_dim": 64}, (LayerGroup(32, 8, 64),)),
        ({**LLAMA, "sliding_window": 4096}, (LayerGroup(32, 8, 128, window=4096),)),
        ({**LLAMA, "sliding_window": 9, "use_sliding_window": False}, (LayerGroup(32, 8, 128),)),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, (LayerGroup(12, 12, 64),)),
        (
            {**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            (LayerGroup(32, 1, 576, latent=True),),
        ),
        (
            {
                **LLAMA,
                "sliding_window": 1024,
                "layer_types": ["sliding_attention"] * 26 + ["full_attention"] * 6,
            },
            (LayerGroup(6, 8, 128), LayerGroup(26, 8, 128, window=1024)),
        ),
    ],
)
def test_shapes_from_transformers(config: dict[str, object], groups: tuple[LayerGroup]) -> None:
    """Grouped, windowed, latent and mixed layers, under the names that transformers gives them."""
    assert from_hf("x", config).groups == groups


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no num_hidden_layers or n_layer"),
        ({"num_hidden_layers": 2}, "no num_attention_heads"),
        ({**LLAMA, "num_attention_heads": 0}, "no num_attention_heads"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 32}, "type 'linear_attention'"),
        ({**LLAMA, "is_encoder_decoder": True}, "an encoder"),
    ],
)
def test_configs_that_cannot_be_read(config: dict[str, object], message: str) -> None:
    """What is missing or unknown is named, never guessed."""
    with pytest.raises(InvalidRequest, match=message):
        from_hf("x", config)
