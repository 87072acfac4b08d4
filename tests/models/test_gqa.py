"""Conversion to fewer key and value heads: what is a mean, when it is exact, and what it saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamgen.cache import Append, BlockPool, BlockTable, KVSpec
from streamgen.errors import InvalidRequest
from streamgen.models.gqa import convert_mha_to_gqa, convert_state, pool_heads
from streamgen.models.history import CachedHistory, CachedPrompt
from streamgen.models.wan import WanConfig, WanModel

CONFIG = WanConfig(
    dim=32,
    ffn_dim=40,
    num_heads=4,
    num_layers=2,
    in_channels=4,
    out_channels=4,
    text_dim=8,
    text_len=3,
    freq_dim=16,
)
LATENT_HW = (4, 6)
GRID = CONFIG.grid(LATENT_HW)


def make(config: WanConfig = CONFIG) -> WanModel:
    """Random weights; no bias is zero and no gain is one."""
    torch.manual_seed(0)
    model = WanModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    return model


def tie(tensors: Iterator[Tensor], heads: int, groups: int) -> None:
    """Make all heads of a group equal to its first one, in place."""
    for x in tensors:
        parts = x.data.unflatten(0, (groups, heads // groups, -1))
        parts.copy_(parts[:, :1].clone().expand_as(parts))


def keys_and_values(model: WanModel) -> Iterator[Tensor]:
    """Weights and biases of K and V, and the gains of keys, in self- and cross-attention."""
    for block in model.blocks:
        for attention in (block.self_attn, block.cross_attn):
            for part in (attention.k, attention.v, attention.norm_k):
                yield from part.parameters()


def spec_of(config: WanConfig) -> KVSpec:
    return KVSpec(config.num_layers, config.kv_heads, config.head_dim, GRID[0] * GRID[1])


def walk(model: WanModel, chunks: int = 3) -> list[Tensor]:
    """Outputs of some chunks, each after the clean pass of those before."""
    random = torch.Generator().manual_seed(1)
    prompt = CachedPrompt(model.encode_prompt(torch.randn(1, 3, 8, generator=random)))
    table = BlockTable(BlockPool(spec_of(model.config), 2 * chunks), Append(2 * chunks))
    out = []
    for _ in range(chunks):
        x = torch.randn(1, 4, 2, *LATENT_HW, generator=random)
        with table.chunk(2) as chunk:
            history = CachedHistory(chunk, GRID)
            out.append(model(x, torch.full((1, 2), 500.0), history, prompt))
            model(x, torch.zeros(1, 2), history, prompt, store_only=True)
            chunk.commit()
    return out


# The mean


def test_groups_are_runs_of_heads() -> None:
    """Of 4 heads, 0 and 1 become group 0, 2 and 3 group 1; channels keep their place."""
    x = torch.arange(4.0)[:, None] * 10 + torch.arange(3)  # head h, channel d: 10 h + d
    pooled = pool_heads(x.flatten(), 4, 2)
    assert pooled.tolist() == [5.0, 6.0, 7.0, 25.0, 26.0, 27.0]


@pytest.mark.parametrize("groups", [1, 2])
def test_values_are_the_mean_of_the_heads(groups: int) -> None:
    """The V of a group is the mean of its heads' V, for any input; so is the K before its norm."""
    model = make()
    twin = convert_mha_to_gqa(model, groups)
    x = torch.randn(1, 5, CONFIG.dim)
    for old, new in zip(model.blocks, twin.blocks, strict=True):
        for name in ("self_attn", "cross_attn"):
            for side in "kv":
                heads = getattr(getattr(old, name), side)(x).unflatten(-1, (groups, -1, 8))
                got = getattr(getattr(new, name), side)(x).unflatten(-1, (groups, 8))
                torch.testing.assert_close(got, heads.mean(-2), atol=1e-5, rtol=0)


def test_halving_twice_is_a_quarter() -> None:
    """A grouped model can be grouped further: a mean of equal means is the mean."""
    twice = convert_mha_to_gqa(convert_mha_to_gqa(make(), 2), 1)
    once = convert_mha_to_gqa(make(), 1)
    assert twice.config == once.config
    for name, x in once.state_dict().items():
        torch.testing.assert_close(twice.state_dict()[name], x, atol=1e-6, rtol=0)


def test_half_precision_is_averaged_in_float32() -> None:
    """16 equal bfloat16 heads have that mean, with no rounding in between."""
    x = torch.full((16, 4), 1.0078125, dtype=torch.bfloat16)
    assert torch.equal(pool_heads(x.flatten(), 16, 1), x[0])


# When it is exact


@pytest.mark.parametrize("groups", [1, 2])
def test_equal_heads_make_it_exact(groups: int) -> None:
    """If the heads of each group are equal, norm included, the grouped model is the same one."""
    model = make()
    tie(keys_and_values(model), 4, groups)
    for old, new in zip(walk(model), walk(convert_mha_to_gqa(model, groups)), strict=True):
        torch.testing.assert_close(new, old, atol=1e-6, rtol=1e-5)


def test_other_heads_do_not() -> None:
    """The test above would see a wrong grouping: unequal heads give another output."""
    model = make()
    pairs = zip(walk(model), walk(convert_mha_to_gqa(model, 2)), strict=True)
    assert all((old - new).abs().max() > 1e-2 for old, new in pairs)


def test_as_many_groups_as_heads_is_the_same_model() -> None:
    """G = H changes nothing, bitwise, and is written as the official shape."""
    model = make()
    twin = convert_mha_to_gqa(model, 4)
    assert twin.config == model.config and twin.config.num_kv_heads == 0
    for old, new in zip(walk(model), walk(twin), strict=True):
        assert torch.equal(old, new)


def test_keys_keep_their_length() -> None:
    """The norm gives a mean of unequal heads the length that queries know; without, it shrinks."""
    model = make()
    twin = convert_mha_to_gqa(model, 1)
    for norm in (n for m in (model, twin) for n in m.modules() if isinstance(n, nn.RMSNorm)):
        norm.weight.fill_(1.0)
    x = torch.randn(1, 50, CONFIG.dim)
    old, new = (m.blocks[0].self_attn.keys_values(x)[0] for m in (model, twin))
    assert new.pow(2).mean() == pytest.approx(1.0, abs=1e-4)
    assert old.mean(2).pow(2).mean() < 0.5


# What it saves, and what it leaves alone


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_cache_shrinks_by_heads_over_groups(groups: int) -> None:
    """Exactly: bytes of a block, of the pool and of a prompt."""
    model = make()
    twin = convert_mha_to_gqa(model, groups)
    specs = [spec_of(m.config) for m in (model, twin)]
    pools = [sum(x.nbytes for x in (*p.k, *p.v)) for p in (BlockPool(s, 3) for s in specs)]
    prompts = [CachedPrompt(m.encode_prompt(torch.randn(1, 3, 8))).nbytes for m in (model, twin)]
    for before, after in ([s.block_bytes for s in specs], pools, prompts):
        assert before * groups == after * 4


def test_the_given_model_is_as_before() -> None:
    """The new model shares what was not pooled and owns what was; the old one is untouched."""
    model = make()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    twin = convert_mha_to_gqa(model, 2)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])
    assert twin.blocks[0].self_attn.q.weight is model.blocks[0].self_attn.q.weight
    assert twin.blocks[0].self_attn.k.weight.shape == (16, 32)
    assert model.blocks[0].self_attn.k.out_features == 32


def test_state_without_a_model() -> None:
    """A checkpoint converts to what its model converts to, and loads with strict names."""
    model = make()
    state = convert_state(model.state_dict(), 4, 2)
    twin = convert_mha_to_gqa(model, 2)
    assert state.keys() == twin.state_dict().keys()
    assert all(torch.equal(state[name], x) for name, x in twin.state_dict().items())
    config = WanConfig.from_tensors(state, 4, text_len=3)
    assert config == replace(CONFIG, num_kv_heads=2) == twin.config
    WanModel(config).load_state_dict(state)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: convert_mha_to_gqa(make(), 3), r"4 heads .* 3 groups: accepted are \[1, 2, 4\]"),
        (lambda: convert_mha_to_gqa(make(), 0), "0 groups"),
        (lambda: convert_mha_to_gqa(make(), 8), "8 groups"),
        (lambda: convert_mha_to_gqa(nn.Linear(4, 4), 2), "Linear has no attention"),
        (lambda: convert_state({}, 4, 2), "names of Wan2.1"),
        (lambda: convert_state({}, 4, 3), "3 groups"),
        (lambda: replace(CONFIG, num_kv_heads=3), "num_kv_heads 3 must divide the 4 query heads"),
        (lambda: replace(CONFIG, num_kv_heads=-1), "num_kv_heads -1"),
    ],
)
def test_bad_values(make_it: Any, message: str) -> None:
    """Each says what was given and what is accepted."""
    with pytest.raises(InvalidRequest, match=message):
        make_it()


# Models of transformers


def language_model(kind: str) -> Any:
    """A tiny decoder with random weights."""
    transformers = pytest.importorskip("transformers", reason="the [dev] extra installs it")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **({"head_dim": 8} if kind == "Qwen3" else {}),  # else 128, whatever the width
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    return model


TOKENS = torch.tensor([[5, 9, 33, 12, 60, 7, 7, 1]])
KINDS = ["Llama", "Qwen2", "Mistral", "Qwen3", "Olmo2"]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_equal_heads_are_exact(kind: str, groups: int) -> None:
    """Biases (Qwen2), norms of heads (Qwen3) and of all keys (Olmo2) included."""
    model = language_model(kind)
    for layer in model.model.layers:
        parts = [layer.self_attn.k_proj, layer.self_attn.v_proj]
        parts += [layer.self_attn.k_norm] if kind == "Olmo2" else []
        tie((x for part in parts for x in part.parameters()), 4, groups)
    twin = convert_mha_to_gqa(model, groups)
    torch.testing.assert_close(twin(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_transformers_cache_shrinks(kind: str, groups: int) -> None:
    """By H/G exactly, in the cache that the model itself fills; G = H gives the same logits."""
    model = language_model(kind)
    twin = convert_mha_to_gqa(model, groups)
    assert (twin.config.num_key_value_heads, model.config.num_key_value_heads) == (groups, 4)
    out = [m(TOKENS, use_cache=True) for m in (model, twin)]
    sizes = [sum(x.keys.nbytes + x.values.nbytes for x in o.past_key_values.layers) for o in out]
    assert sizes[0] * groups == sizes[1] * 4
    assert sizes[1] == 2 * 2 * groups * 8 * TOKENS.numel() * 4
    assert groups < 4 or torch.equal(out[0].logits, out[1].logits)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_state_fits_the_config(kind: str) -> None:
    """A converted checkpoint loads, strictly, into a model built from the converted config."""
    model = language_model(kind)
    twin = convert_mha_to_gqa(model, 2)
    again = type(twin)(twin.config)
    again.load_state_dict(convert_state(model.state_dict(), 4, 2))
    again.eval()
    torch.testing.assert_close(again(TOKENS).logits, twin(TOKENS).logits)
