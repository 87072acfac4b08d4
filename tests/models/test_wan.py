"""The transformer: official names and shapes, what it accepts, and what `store_only` leaves out."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from streamgen.cache import Append, BlockPool, BlockTable, KVSpec
from streamgen.errors import InvalidRequest
from streamgen.models.history import CachedHistory, CachedPrompt
from streamgen.models.wan import WanConfig, WanModel, sinusoid

FOLDER = Path(
    os.environ.get("STREAMGEN_GOLDEN", Path(__file__).parents[2].parent / "shared" / "parity")
)
TINY = WanConfig(
    dim=24,
    ffn_dim=40,
    num_heads=2,
    num_layers=2,
    in_channels=4,
    out_channels=4,
    text_dim=8,
    text_len=3,
    freq_dim=16,
)
LATENT_HW = (4, 6)
WAN21 = {
    "1.3B": WanConfig(dim=1536, ffn_dim=8960, num_heads=12, num_layers=30),
    "14B": WanConfig(dim=5120, ffn_dim=13824, num_heads=40, num_layers=40),
}


def make(config: WanConfig) -> WanModel:
    """Random weights without zeros."""
    torch.manual_seed(0)
    model = WanModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    return model


def table_for(config: WanConfig, frames: int = 6) -> BlockTable:
    grid = config.grid(LATENT_HW)
    spec = KVSpec(config.num_layers, config.num_heads, config.head_dim, grid[0] * grid[1])
    return BlockTable(BlockPool(spec, frames), Append(frames))


def latents(frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 4, frames, *LATENT_HW, generator=generator)


def prompt_of(model: WanModel) -> CachedPrompt:
    text = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(1))
    return CachedPrompt(model.encode_prompt(text))


def official_shapes(name: str) -> dict[str, list[int]]:
    path = FOLDER / "keys" / f"wan2.1_t2v_{name}.json"
    if not path.is_file():
        pytest.skip(f"no {path.name} in the folder of golden files")
    return json.loads(path.read_text())


# Names and sizes


@pytest.mark.parametrize("name", WAN21)
def test_official_keys(name: str) -> None:
    """Every key and shape of the released Wan2.1 state dicts, and no other; no weights are made."""
    with torch.device("meta"):
        state = WanModel(WAN21[name]).state_dict()
    assert {key: list(value.shape) for key, value in state.items()} == official_shapes(name)


@pytest.mark.parametrize("name", WAN21)
def test_config_from_official_tensors(name: str) -> None:
    """The sizes are read off the state dict; only the number of heads is told."""
    shapes = official_shapes(name)
    tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    assert WanConfig.from_tensors(tensors, WAN21[name].num_heads) == WAN21[name]


def test_config_from_tensors_of_an_odd_shape() -> None:
    """Other patches, channels and depths, and what can't be seen is passed on."""
    config = replace(TINY, patch_size=(1, 4, 3), out_channels=2, num_layers=3, eps=1e-5)
    state = WanModel(config).state_dict()
    assert WanConfig.from_tensors(state, 2, text_len=3, eps=1e-5) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "24 must split into 5 heads"),
        ({"num_heads": 8}, "heads of even width"),
        ({"patch_size": (2, 2, 2)}, "one latent frame"),
        ({"prediction": "noise"}, "'flow', 'sample'"),
    ],
)
def test_config_is_checked(changes: dict[str, object], message: str) -> None:
    """A shape that can't be built says why."""
    with pytest.raises(InvalidRequest, match=message):
        replace(TINY, **changes)


def test_patches_must_fit() -> None:
    """Latents that don't divide into patches are refused, by the config and by the forward."""
    with pytest.raises(InvalidRequest, match="4x7 don't divide into 2x2"):
        TINY.grid((4, 7))
    model, table = make(TINY), table_for(TINY)
    history = CachedHistory(table.chunk(1), TINY.grid(LATENT_HW))
    with pytest.raises(InvalidRequest, match="5x6 don't divide"):
        model(torch.zeros(1, 4, 1, 5, 6), torch.zeros(1, 1), history, prompt_of(model))


# Timesteps, actions, places


def test_sinusoid() -> None:
    """Cosines first; feature i of a half turns by t / 10000^(i/half)."""
    (row,) = sinusoid(torch.tensor([437.5]), 8)
    rates = [437.5 / 10_000 ** (i / 4) for i in range(4)]
    expected = [math.cos(r) for r in rates] + [math.sin(r) for r in rates]
    torch.testing.assert_close(row, torch.tensor(expected, dtype=torch.float64))


def test_timesteps_are_per_frame() -> None:
    """Each frame of a pass is modulated by its own: its keys of layer 0, which see nothing of other
    frames, are those of the frame passed alone."""
    model, x = make(TINY), latents(2)
    together, alone = table_for(TINY), table_for(TINY)
    store(model, together, x, torch.tensor([[100.0, 900.0]]))
    for frame, t in enumerate((100.0, 900.0)):
        store(model, alone, x[:, :, frame : frame + 1], torch.tensor([[t]]))
    torch.testing.assert_close(together.pool.k[0], alone.pool.k[0])
    assert (together.pool.k[1][0] - alone.pool.k[1][0]).abs().max() > 1e-4


def store(
    model: WanModel,
    table: BlockTable,
    x: Tensor,
    t_BF: Tensor,
    actions: Tensor | None = None,
    store_only: bool = False,
) -> Tensor:
    with table.chunk(x.shape[2]) as chunk:
        history = CachedHistory(chunk, model.config.grid(LATENT_HW))
        out = model(x, t_BF, history, prompt_of(model), actions, store_only)
        chunk.commit()
    return out


@pytest.mark.parametrize(
    ("width", "actions"), [(6, None), (0, torch.zeros(1, 2, 6))], ids=["missing", "unwanted"]
)
def test_actions_missing_or_unwanted(width: int, actions: Tensor | None) -> None:
    """A model that takes actions needs them, and another refuses them; nothing is stored."""
    config = replace(TINY, action_dim=width)
    model, table = make(config), table_for(config)
    with pytest.raises(InvalidRequest, match=f"actions of width {width}"):
        store(model, table, latents(2), torch.zeros(1, 2), actions)
    assert table.end == 0 and table.pool.stats().live == 0


def test_actions_are_per_frame() -> None:
    """Another action in the second frame changes that frame, and layer 0 of no other."""
    config = replace(TINY, action_dim=6)
    model, first, second = make(config), table_for(config), table_for(config)
    actions = torch.zeros(1, 2, 6)
    one = store(model, first, latents(2), torch.zeros(1, 2), actions)
    other = actions.index_put(
        (torch.tensor(0), torch.tensor(1), torch.tensor(3)), torch.tensor(1.0)
    )
    two = store(model, second, latents(2), torch.zeros(1, 2), other)
    assert (one - two).abs().max() > 1e-3
    assert torch.equal(first.pool.k[0][0], second.pool.k[0][0])
    assert not torch.equal(first.pool.k[0][1], second.pool.k[0][1])


def test_spatial_embedding_tells_places_apart() -> None:
    """With it, equal patches have unequal keys; without, a uniform frame is uniform before RoPE."""
    model = make(replace(TINY, spatial_tokens=6))
    flat = torch.ones(1, 4, 1, *LATENT_HW)
    plain, placed = table_for(TINY), table_for(TINY)
    store(make(TINY), plain, flat, torch.zeros(1, 1))
    store(model, placed, flat, torch.zeros(1, 1))
    for table, varied in ((plain, False), (placed, True)):
        spread = (table.pool.v[0][0] - table.pool.v[0][0][:1]).abs().max()
        assert (spread > 1e-3) == varied


# The pass that stores


@pytest.mark.parametrize("frames", [1, 3])
def test_store_only_writes_the_same(frames: int) -> None:
    """K and V of all layers, bitwise those of the full pass; the latents come back as they were."""
    model, full, short = make(TINY), table_for(TINY), table_for(TINY)
    for index in range(2):
        x, t = latents(frames, seed=index), torch.zeros(1, frames)
        out = store(model, full, x, t)
        assert store(model, short, x, t, store_only=True) is x
        assert out.shape == x.shape and not torch.equal(out, x)
    for ours, theirs in zip(
        (*full.pool.k, *full.pool.v), (*short.pool.k, *short.pool.v), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_dtype() -> None:
    """Weights in bfloat16 take float32 latents and run in bfloat16, near the float32 result."""
    exact, model = make(TINY), make(TINY).bfloat16()
    assert model.dtype == torch.bfloat16
    spec = KVSpec(2, 2, 12, 6, torch.bfloat16)
    table = BlockTable(BlockPool(spec, 6), Append(6))
    out = store(model, table, latents(2), torch.full((1, 2), 500.0))
    expected = store(exact, table_for(TINY), latents(2), torch.full((1, 2), 500.0))
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).abs().mean() < 0.03 * expected.abs().mean() + 0.01


def test_two_histories_do_not_meet() -> None:
    """Nothing is kept on the module: passes of two streams in turns equal each alone."""
    model = make(TINY)
    tables = [table_for(TINY), table_for(TINY)]
    alone = [table_for(TINY), table_for(TINY)]
    t = torch.zeros(1, 2)
    turns = [store(model, tables[i], latents(2, seed=i), t) for _ in range(2) for i in range(2)]
    apart = [store(model, alone[i], latents(2, seed=i), t) for i in range(2) for _ in range(2)]
    for in_turns, by_itself in zip((0, 2, 1, 3), range(4), strict=True):
        assert torch.equal(turns[in_turns], apart[by_itself])


def test_tokens_lie_in_order() -> None:
    """Layers take over the strides of what they are given, and packed tokens are faster."""
    model = make(TINY)
    assert model.embed(latents(2), torch.zeros(1, 2))[0].is_contiguous()


@torch.no_grad()
def test_feed_forward_is_wans() -> None:
    """Linear, GELU, Linear under Wan's names, though the first layer does the GELU."""
    ffn, x = make(TINY).blocks[0].ffn, torch.randn(1, 3, TINY.dim)
    assert [name for name, _ in ffn.named_parameters()] == [
        "0.weight", "0.bias", "2.weight", "2.bias",
    ]  # fmt: skip
    y = torch.nn.functional.linear(x, ffn[0].weight, ffn[0].bias)
    y = y / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (y + 0.044715 * y**3)))
    expected = torch.nn.functional.linear(y, ffn[2].weight, ffn[2].bias)
    torch.testing.assert_close(ffn(x), expected, atol=1e-5, rtol=0)
