"""Reuse at another place: its two ends, its positions, and whom it chooses, against a naive twin.

The twin sends every token through every layer, but lets attention see the fresh K/V of the chosen
ones only; what becomes of the others is thrown away. So it needs no subsets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from streamgen.cache import BlockPool, BlockTable, CachePolicy, KVSpec, SinkWindow
from streamgen.errors import InvalidRequest
from streamgen.models.blend import (
    ChunkKV,
    Recorder,
    blend,
    budget,
    deviation,
    move,
)
from streamgen.models.history import CachedHistory, CachedPrompt
from streamgen.models.rope import rotate, rotation
from streamgen.models.wan import WanConfig, WanModel

CONFIG = WanConfig(
    dim=24,
    ffn_dim=32,
    num_heads=2,
    num_layers=4,
    in_channels=4,
    out_channels=4,
    text_dim=8,
    text_len=3,
    freq_dim=16,
    action_dim=3,
)
LATENT_HW = (6, 8)
GRID = CONFIG.grid(LATENT_HW)
FRAMES, TOKENS = 2, 2 * GRID[0] * GRID[1]
WINDOW = SinkWindow(1, 6)
SLIDING = SinkWindow(1, 6, shadow_sink=True)


def make(seed: int = 0, **changes: int) -> WanModel:
    """Random weights without zeros, and wide enough that a token's past matters to it."""
    torch.manual_seed(seed)
    model = WanModel(replace(CONFIG, **changes)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
    return model


class Stream:
    """A table, and the way to put chunks into it."""

    def __init__(self, model: WanModel, policy: CachePolicy = WINDOW) -> None:
        self.model = model
        config = model.config
        spec = KVSpec(config.num_layers, config.kv_heads, config.head_dim, GRID[0] * GRID[1])
        self.table = BlockTable(BlockPool(spec, 16), policy)
        text = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(1))
        self.prompt = CachedPrompt(model.encode_prompt(text))

    def inputs(self, seed: int, frames: int = FRAMES) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(1, 4, frames, *LATENT_HW, generator=generator)
        return x, torch.full((1, frames), 50.0), torch.rand(1, frames, 3, generator=generator)

    def store(self, seed: int, frames: int = FRAMES, causal: int | None = None) -> ChunkKV:
        """Commit a chunk of random latents by a clean pass."""
        x, t, actions = self.inputs(seed, frames)
        with self.table.chunk(frames) as chunk:
            history = Recorder(self.history(chunk, causal))
            self.model(x, t, history, self.prompt, actions, store_only=True)
            chunk.commit()
        return history.kv

    def history(self, chunk: object, causal: int | None = None) -> CachedHistory:
        window = WINDOW.window if self.table.policy.shadow else None
        return CachedHistory(chunk, GRID, window, None if causal is None else (0, causal))

    def blend(self, seed: int, cached: ChunkKV, share: float, **other: object) -> object:
        """The same chunk, blended."""
        frames, causal = other.pop("frames", FRAMES), other.pop("causal", None)
        x, t, actions = self.inputs(seed, frames)
        with self.table.chunk(frames) as chunk:
            history = self.history(chunk, causal)
            done = blend(self.model, x, t, history, self.prompt, cached, share, actions, **other)
            chunk.commit()
        return done

    def newest(self, frames: int = FRAMES) -> tuple[Tensor, Tensor]:
        """K and V of the last chunk, `[layers, N, H, D]`, as they lie in the pool."""
        slots = [block.slot for _, block in self.table.entries[-frames:]]
        pool = self.table.pool
        return tuple(
            torch.stack([x[slots].flatten(0, 1) for x in side]) for side in (pool.k, pool.v)
        )

    def past(self, seeds: tuple[int, ...]) -> Stream:
        for seed in seeds:
            self.store(seed)
        return self


def streams(
    model: WanModel, policy: CachePolicy = WINDOW, seeds: tuple[int, ...] = (5, 6, 7)
) -> tuple[ChunkKV, Stream, Stream]:
    """Chunk 9, cached behind chunk 4, and two streams with the same other, longer past."""
    cached = Stream(model, policy).past((4,)).store(9)
    return cached, Stream(model, policy).past(seeds), Stream(model, policy).past(seeds)


def errors(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """Distance of two chunks' K/V, relative."""
    off = sum((x - y).square().sum() for x, y in zip(a, b, strict=True))
    return float((off / sum(y.square().sum() for y in b)).sqrt())


# The two ends


@pytest.mark.parametrize("policy", [WINDOW, SLIDING], ids=["absolute", "sliding sink"])
@pytest.mark.parametrize("seeds", [(), (5,), (5, 6, 7)], ids=["first", "second", "rolled"])
def test_all_anew_is_the_full_pass(policy: CachePolicy, seeds: tuple[int, ...]) -> None:
    """With share 1 every K and V is that of the clean pass, wherever the chunk stands, and so is
    whatever is stored behind it."""
    cached, mine, full = streams(make(), policy, seeds)
    done = mine.blend(9, cached, 1.0)
    full.store(9)
    assert done.work == 1
    assert errors(mine.newest(), full.newest()) < 1e-5
    mine.store(11)
    full.store(11)
    assert errors(mine.newest(), full.newest()) < 1e-5
    if policy is SLIDING and not seeds:
        for (_, one), (_, two) in zip(mine.table.entries[:1], full.table.entries[:1], strict=True):
            torch.testing.assert_close(
                mine.table.pool.k[0][one.slot], full.table.pool.k[0][two.slot]
            )


def test_all_anew_under_a_causal_mask() -> None:
    """Blocks of a chunk that must not see later ones don't, though tokens go on in subsets."""
    mine, full = Stream(make()), Stream(make())
    cached = Stream(make()).past((3,)).store(9, frames=4, causal=2)
    mine.blend(9, cached, 1.0, frames=4, causal=2)
    full.store(9, frames=4, causal=2)
    assert errors(mine.newest(4), full.newest(4)) < 1e-5


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_fewer_kv_heads(share: float) -> None:
    """Query heads that share K/V: all anew is the full pass, and a part of it comes near."""
    cached, mine, full = streams(make(num_kv_heads=1))
    mine.blend(9, cached, share)
    full.store(9)
    assert errors(mine.newest(), full.newest()) < (1e-5 if share == 1 else 1)


def test_nothing_anew_is_reuse() -> None:
    """With share 0 the cached values are stored as they are, keys turned to where they stand now;
    the model is not run."""
    cached, mine, _ = streams(make())
    model, mine.model = mine.model, make()
    mine.model.blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in model.blocks)
    done = mine.blend(9, cached, 0.0)
    k, v = mine.newest()
    turn = rotation(range(6, 8), GRID, CONFIG.head_dim)
    for layer, (raw, value) in enumerate(cached.layers):
        torch.testing.assert_close(k[layer], rotate(raw[None], turn)[0])
        assert torch.equal(v[layer], value)
    assert done.work == 0


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_one_layer_is_exact(share: float) -> None:
    """Below the first attention nothing depends on the past: reuse is right at any share, which it
    is only if positions are."""
    cached, mine, full = streams(make(num_layers=1))
    mine.blend(9, cached, share)
    full.store(9)
    assert errors(mine.newest(), full.newest()) < 1e-6


# Positions


def test_first_layer_at_another_position() -> None:
    """Keys of layer 0, reused, equal those computed in place; un-moved ones do not."""
    cached, mine, full = streams(make())
    mine.blend(9, cached, 0.0)
    full.store(9)
    torch.testing.assert_close(mine.newest()[0][0], full.newest()[0][0], rtol=1e-4, atol=1e-5)
    unmoved = rotate(cached.layers[0][0][None], rotation(range(2, 4), GRID, CONFIG.head_dim))[0]
    assert (unmoved - full.newest()[0][0]).abs().max() > 0.1


@pytest.mark.parametrize("by", [0, 1, -3, 5000])
def test_move_is_a_difference_of_positions(by: int) -> None:
    """Rotated keys moved by d frames are the raw ones rotated at p + d, rows and columns kept."""
    raw = torch.randn(1, TOKENS, 2, CONFIG.head_dim, generator=torch.Generator().manual_seed(0))
    at = [rotation(range(p, p + FRAMES), GRID, CONFIG.head_dim) for p in (40, 40 + by)]
    moved = move(rotate(raw, at[0])[0], by)
    torch.testing.assert_close(moved, rotate(raw, at[1])[0], rtol=1e-3, atol=1e-4)


def test_rotated_keys_are_turned_back() -> None:
    """What a table stored, turned back from where it stood, is what passed through its history."""
    stream = Stream(make()).past((4,))
    passed = stream.store(9)
    found = ChunkKV.of_rotated(list(zip(*stream.newest(), strict=True)), range(2, 4), GRID)
    for (k, v), (raw, value) in zip(found.layers, passed.layers, strict=True):
        torch.testing.assert_close(k, raw, rtol=1e-4, atol=1e-5)
        assert torch.equal(v, value)
    assert found.nbytes == passed.nbytes == 2 * 4 * TOKENS * 24 * 4


# Who is computed anew


class AllTokens:
    """The twin's history: all tokens attend, chosen ones are seen fresh, the others as cached."""

    def __init__(self, history: CachedHistory, cached: ChunkKV) -> None:
        self.history, self.cached = history, cached.layers
        self.chosen = torch.ones(TOKENS, dtype=torch.bool)
        self.off = torch.zeros(TOKENS)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        old_k, old_v = self.cached[layer]
        every = torch.arange(TOKENS)
        self.off = deviation(k[0], old_k, every) + deviation(v[0], old_v, every)
        fresh = self.chosen if layer > 1 else torch.ones_like(self.chosen)
        mix = [
            torch.where(fresh[:, None, None], new[0], old) for new, old in ((k, old_k), (v, old_v))
        ]
        return self.history.attend(layer, q, mix[0][None], mix[1][None])


def twin(stream: Stream, seed: int, cached: ChunkKV, counts: list[int]) -> list[list[int]]:
    """The chosen tokens of each layer."""
    x, t, actions = stream.inputs(seed)
    x, _, e = stream.model.embed(x, t, actions)
    passed = []
    with stream.table.chunk(FRAMES) as chunk:
        history = AllTokens(stream.history(chunk), cached)
        for layer, block in enumerate(stream.model.blocks):
            if layer == 1:  # nothing deviates in layer 0: its outputs do, and so the next K/V
                block(x, e, history, stream.prompt, True)
            if layer:
                off = torch.where(history.chosen, history.off, -1)
                history.chosen = torch.zeros_like(history.chosen)
                history.chosen[off.argsort(descending=True)[: counts[layer]]] = True
            passed.append(history.chosen.nonzero()[:, 0].tolist())
            x = block(x, e, history, stream.prompt, False)
        chunk.commit()
    return passed


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_against_the_twin(share: float, spread: float) -> None:
    """Same tokens chosen in each layer, and the same keys and values stored."""
    cached, mine, other = streams(make())
    done = mine.blend(9, cached, share, spread=spread)
    passed = twin(other, 9, cached, budget(TOKENS, 4, share, spread))
    assert [tokens.tolist() for tokens in done.passed] == passed
    assert errors(mine.newest(), other.newest()) < 1e-5


def test_the_most_deviating_go_on() -> None:
    """The first choice is by what layer 1's K/V truly are, and later ones are among the earlier."""
    cached, mine, full = streams(make())
    done = mine.blend(9, cached, 0.3)
    true = full.store(9)
    off = torch.zeros(TOKENS)
    for new, old in zip(true.layers[1], cached.layers[1], strict=True):
        off += (new - old).square().sum((1, 2)) / old.square().sum()
    second = done.passed[1]
    rest = sorted(set(range(TOKENS)) - set(second.tolist()))
    assert off[second].min() >= off[rest].max()
    for earlier, later in zip(done.passed, done.passed[1:], strict=False):
        assert set(later.tolist()) <= set(earlier.tolist())
    counts = [len(tokens) for tokens in done.passed]
    assert counts == budget(TOKENS, 4, 0.3)
    assert done.work == sum(counts) / (4 * TOKENS)


def test_the_error_falls_with_the_share() -> None:
    """On average over models, chunks and pasts; and choosing by deviation beats choosing badly."""
    shares = (0.0, 0.15, 0.4, 0.7, 1.0)
    off = torch.zeros(len(shares))
    for seed in range(4):
        for i, share in enumerate(shares):
            cached, mine, full = streams(make(seed), seeds=(seed + 20, seed + 30))
            mine.blend(9, cached, share)
            full.store(9)
            off[i] += errors(mine.newest(), full.newest())
    assert (off[1:] < off[:-1]).all(), off
    assert off[-1] < 1e-5 * 4 and off[0] > 0.1


def test_least_deviating_tokens_help_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Insight 1 of the paper: the same number of tokens, chosen the other way round, is worse."""
    off = {}
    for sign in (1, -1):
        monkeypatch.setattr(
            "streamgen.models.blend.deviation", lambda *x, sign=sign: sign * deviation(*x)
        )
        off[sign] = 0.0
        for seed in range(3):
            cached, mine, full = streams(make(seed))
            mine.blend(9, cached, 0.3)
            full.store(9)
            off[sign] += errors(mine.newest(), full.newest())
    assert off[1] < off[-1]


# Budgets and bad input


@pytest.mark.parametrize("layers", [2, 3, 6, 30])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.15, 0.5, 0.9, 1.0])
def test_budget(layers: int, share: float) -> None:
    """All tokens in the first layer, then fewer and fewer, `share` of them on average; 0 and 1 are
    nothing and everything."""
    first, *rest = budget(1000, layers, share)
    assert first == (1000 if share else 0)
    assert rest == sorted(rest, reverse=True) and max(rest) <= 1000
    assert sum(rest) / len(rest) == pytest.approx(1000 * share, abs=1)
    if 0 < share < 1 and layers > 2:
        assert rest[0] > 1000 * share > rest[-1]
    else:
        assert set(rest) == {round(1000 * share)}


def test_budget_of_one_layer() -> None:
    """There is nothing to choose."""
    assert budget(10, 1, 0.3) == [10]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kv: (kv, -0.1), "share=-0.1"),
        (lambda kv: (kv, 1.5), "share=1.5: accepted are 0 .. 1"),
        (lambda kv: (ChunkKV(kv.layers[:3]), 0.5), "3 layers .* accepted are 4"),
        (
            lambda kv: (ChunkKV(tuple((k[1:], v[1:]) for k, v in kv.layers)), 0.5),
            r"23, 2, 12.*24, 2",
        ),
        (lambda kv: (ChunkKV(()), 0.5), "0 layers"),
    ],
)
def test_bad_input(change: Callable[[ChunkKV], tuple[ChunkKV, float]], message: str) -> None:
    """Says what was given and what is accepted, and nothing is stored."""
    cached, mine, _ = streams(make())
    kv, share = change(cached)
    with pytest.raises(InvalidRequest, match=message):
        mine.blend(9, kv, share)
    assert mine.table.end == 6
