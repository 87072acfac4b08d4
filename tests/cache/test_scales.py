"""Next-scale images: a growing block per image equals recomputation with a block-causal mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, normalize, scaled_dot_product_attention

from streamgen.cache import BlockPool, KVSpec
from streamgen.cache.scales import VAR_256, NextScale, block_tokens
from streamgen.errors import InvalidRequest, PoolFull

LAYERS, HEADS, DIM, ROWS = 3, 2, 4, 6  # three images, condition and uncondition
SIDES = (1, 2, 3, 4)
LENGTHS = (1, 5, 14, 30)

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v: each [R, N, H, D]


class TinyVAR:
    """VAR's block in small: adaptive norm per row, normalised q and k, scale 1, random weights."""

    def __init__(self) -> None:
        make = torch.Generator().manual_seed(3)
        width = HEADS * DIM

        def tensor(*shape: int) -> Tensor:
            return torch.randn(shape, generator=make, dtype=torch.float64) / width**0.5

        self.layers = [(tensor(width, 3 * width), tensor(width, width)) for _ in range(LAYERS)]
        self.gain = tensor(LAYERS, ROWS, 1, width)  # cond and uncond rows differ from layer 0 on
        self.tokens = tensor(2, ROWS, LENGTHS[-1], width)  # two choices of token maps

    def __call__(self, x: Tensor, attention: Attention) -> Tensor:
        """Tokens `[R, N, width]` through all layers."""
        for index, (to_qkv, mix) in enumerate(self.layers):
            inner = layer_norm(x, x.shape[-1:]) * (1 + self.gain[index])
            q, k, v = (y.unflatten(-1, (HEADS, DIM)) for y in (inner @ to_qkv).chunk(3, -1))
            q, k = normalize(q, dim=-1) * 4, normalize(k, dim=-1)
            x = x + attention(index, q, k, v).flatten(2) @ mix
        return x


def dot(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0).transpose(1, 2)


@pytest.fixture(scope="module")
def model() -> TinyVAR:
    return TinyVAR()


def recompute(model: TinyVAR, tokens: Tensor) -> Tensor:
    """All scales at once: a token sees its own scale and the coarser ones."""
    scale = torch.bucketize(torch.arange(tokens.shape[1]), torch.tensor(LENGTHS), right=True)
    mask = scale[:, None] >= scale
    return model(tokens, lambda _, q, k, v: dot(q, k, v, mask))


def step(model: TinyVAR, cache: NextScale, tokens: Tensor, scale: int) -> Tensor:
    """One scale through the cache."""

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(layer, k, v)
        keys, values = cache.kv(layer)
        assert keys.shape == values.shape == (ROWS, LENGTHS[scale], HEADS, DIM)
        return dot(q, keys, values)

    cache.begin(scale)
    start = LENGTHS[scale - 1] if scale else 0
    out = model(tokens[:, start : LENGTHS[scale]], attention)
    cache.commit()
    return out


def pool_of(blocks: int, store_last: bool = True) -> BlockPool:
    tokens = block_tokens(SIDES, store_last)
    return BlockPool(KVSpec(LAYERS, HEADS, DIM, tokens, torch.float64), blocks)


def close_to(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() < 1e-10)


@pytest.mark.parametrize("store_last", [True, False])
def test_equals_recomputation(model: TinyVAR, store_last: bool) -> None:
    """Every scale of every row, with and without room for the last one; then all is given back."""
    pool = pool_of(ROWS, store_last)
    tokens = model.tokens[0]
    with NextScale(pool, ROWS, SIDES, store_last) as cache:
        out = torch.cat([step(model, cache, tokens, scale) for scale in range(4)], 1)
        assert pool.stats().live == ROWS
        assert cache.scale == 4
    assert close_to(out, recompute(model, tokens))
    pool.check()
    assert pool.stats().free == pool.stats().total


@pytest.mark.parametrize("store_last", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 6])
def test_parts(rows: int, store_last: bool) -> None:
    """All rows at once, or halves of an unstored last scale, with what `write` and `kv` show."""
    pool = pool_of(2 * rows, store_last)
    whole, cache = (NextScale(pool, rows, SIDES, store_last) for _ in range(2))
    half = -(-rows // 2)
    make = torch.Generator().manual_seed(1)
    for scale, side in enumerate(SIDES):
        for one in (whole, cache):
            one.begin(scale)
        unstored = scale == 3 and not store_last
        for layer in range(LAYERS):
            shape = (2, rows, side * side, HEADS, DIM)
            k, v = torch.randn(shape, generator=make, dtype=torch.float64)
            whole.write(layer, k, v)
            taken = []
            for part, *kv in cache.parts(layer, k, v):  # the next part overwrites this one
                taken += list(range(rows))[part]
                assert part.stop - part.start in ((half, rows - half) if unstored else (rows,))
                for x, y in zip(kv, whole.kv(layer), strict=True):
                    assert torch.equal(x, y[part])
            assert taken == list(range(rows))
        stored = LAYERS * 2 * rows * pool.spec.block_tokens
        staged = 2 * half * LENGTHS[-1] if unstored else 0
        assert cache.nbytes == (stored + staged) * HEADS * DIM * 8
        for one in (whole, cache):
            one.commit()
        assert cache.nbytes == stored * HEADS * DIM * 8


def test_parts_are_checked() -> None:
    """As by `write`; a layer of which not all parts were taken is not written."""
    cache = NextScale(pool_of(2, store_last=False), 2, SIDES, store_last=False)
    with pytest.raises(InvalidRequest, match="no scale is pending"):
        next(cache.parts(0, torch.zeros(1), torch.zeros(1)))
    for scale, side in enumerate(SIDES):
        cache.begin(scale)
        x = torch.zeros(2, side * side, HEADS, DIM, dtype=torch.float64)
        with pytest.raises(InvalidRequest, match=f"scale {scale} takes"):
            next(cache.parts(0, x[:1], x[:1]))
        for layer in range(LAYERS):
            parts = cache.parts(layer, x, x)
            next(parts)
            if layer:
                list(parts)
        if scale < 3:
            cache.commit()
    with pytest.raises(InvalidRequest, match=r"layers \[0\] of scale 3"):
        cache.commit()


def test_vars_lengths() -> None:
    """680 tokens at 256 pixels, 424 without the last scale; 2,240 and 1,216 at 512."""
    assert (block_tokens(VAR_256), block_tokens(VAR_256, store_last=False)) == (680, 424)
    var_512 = (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)
    assert (block_tokens(var_512), block_tokens(var_512, store_last=False)) == (2240, 1216)
    cache = NextScale(BlockPool(KVSpec(1, 1, 1, 680), 2), 2, VAR_256)
    assert cache.lengths == (1, 5, 14, 30, 55, 91, 155, 255, 424, 680)
    # VAR-d16, one image and its uncondition, fp16: 89 MB
    d16 = KVSpec(16, 16, 64, 680, torch.float16)
    assert 2 * d16.block_bytes == 89_128_960


def test_views_not_copies(model: TinyVAR) -> None:
    """One strided view over all rows, at the address of the blocks; what is written is seen."""
    pool = pool_of(ROWS + 1)
    pool.alloc(1)
    cache = NextScale(pool, ROWS, SIDES)
    for scale in range(4):
        step(model, cache, model.tokens[0], scale)
        if scale < 3:
            cache.begin(scale + 1)
            for layer in range(LAYERS):
                for x, stored in zip(cache.kv(layer), (pool.k[layer], pool.v[layer]), strict=True):
                    assert x.data_ptr() == stored.data_ptr()
                    assert x.stride(0) == stored.stride(0)
                    assert torch.equal(x, stored[:ROWS, : LENGTHS[scale + 1]])


def test_a_scale_begun_again(model: TinyVAR) -> None:
    """Is overwritten: the last write counts."""
    cache = NextScale(pool_of(ROWS), ROWS, SIDES)
    step(model, cache, model.tokens[0], 0)
    cache.begin(1)
    junk = torch.ones(ROWS, 4, HEADS, DIM, dtype=torch.float64)
    cache.write(0, junk, junk)
    out = [step(model, cache, model.tokens[0], scale) for scale in (1, 2, 3)]
    assert close_to(torch.cat(out, 1), recompute(model, model.tokens[0])[:, 1:])


# Variations


@pytest.mark.parametrize("store_last", [True, False])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_variations(model: TinyVAR, after: int, store_last: bool) -> None:
    """Two images with the same coarse scales each equal a run of their own, in either order."""
    pool = pool_of(2 * ROWS, store_last)
    one = model.tokens[0]
    two = torch.cat([one[:, : LENGTHS[after]], model.tokens[1][:, LENGTHS[after] :]], 1)
    parent = NextScale(pool, ROWS, SIDES, store_last)
    for scale in range(3):
        step(model, parent, one, scale)
    child = parent.fork_after(after)
    assert pool.stats().live == pool.stats().shared == ROWS
    rest = [step(model, child, two, scale) for scale in range(after + 1, 4)]
    assert close_to(torch.cat(rest, 1), recompute(model, two)[:, LENGTHS[after] :])
    assert (pool.stats().live, pool.stats().shared) == (2 * ROWS, 0)
    assert close_to(step(model, parent, one, 3), recompute(model, one)[:, LENGTHS[2] :])
    pool.check()
    parent.close()
    child.close()
    assert pool.stats().free == pool.stats().total


def test_the_last_relative_keeps_the_blocks(model: TinyVAR) -> None:
    """Copy-on-write copies for the first to write; the other goes on in the old blocks."""
    pool = pool_of(2 * ROWS)
    parent = NextScale(pool, ROWS, SIDES)
    step(model, parent, model.tokens[0], 0)
    child = parent.fork_after(0)
    for cache in (parent, child):
        cache.begin(1)
    assert child.kv(0)[0].data_ptr() == pool.k[0].data_ptr()
    assert parent.kv(0)[0].data_ptr() == pool.k[0][ROWS].data_ptr()
    parent.close()
    child.close()
    heir = NextScale(pool, ROWS, SIDES)
    step(model, heir, model.tokens[0], 0)
    twin = heir.fork_after(0)
    heir.close()
    twin.begin(1)  # nobody else is left: no copy
    assert pool.stats().live == ROWS


def test_full_pool_changes_nothing(model: TinyVAR) -> None:
    """No room for the copy: refused, and the parent's end makes it possible."""
    pool = pool_of(2 * ROWS - 1)
    parent = NextScale(pool, ROWS, SIDES)
    step(model, parent, model.tokens[0], 0)
    child = parent.fork_after(0)
    with pytest.raises(PoolFull, match=f"{ROWS} neighbouring slots"):
        child.begin(1)
    assert (pool.stats().shared, child.scale) == (ROWS, 1)
    parent.close()
    out = [step(model, child, model.tokens[0], scale) for scale in (1, 2, 3)]
    assert close_to(torch.cat(out, 1), recompute(model, model.tokens[0])[:, 1:])
    with pytest.raises(PoolFull):
        NextScale(pool, ROWS, SIDES)


# Refusals


def test_order_of_scales(model: TinyVAR) -> None:
    """One after the other, each once, each layer written."""
    cache = NextScale(pool_of(ROWS), ROWS, SIDES)
    with pytest.raises(InvalidRequest, match=r"no scale is pending: begin\(0\)"):
        cache.kv(0)
    with pytest.raises(InvalidRequest, match="scale 1 can't begin: 0 of 4"):
        cache.begin(1)
    cache.begin(0)
    with pytest.raises(InvalidRequest, match=r"layers \[0, 1, 2\] of scale 0"):
        cache.commit()
    with pytest.raises(InvalidRequest, match="can't fork while scale 0 is pending"):
        cache.fork_after(0)
    for scale in range(4):
        step(model, cache, model.tokens[0], scale)
    with pytest.raises(InvalidRequest, match="scale 4 can't begin: 4 of 4"):
        cache.begin(4)
    cache.close()
    cache.close()
    for call in (lambda: cache.begin(0), lambda: cache.fork_after(0), lambda: cache.kv(0)):
        with pytest.raises(InvalidRequest, match="closed"):
            call()


def test_fork_after_a_scale_that_isnt_there(model: TinyVAR) -> None:
    """Not yet made, or made and not stored."""
    cache = NextScale(pool_of(ROWS, store_last=False), ROWS, SIDES, store_last=False)
    with pytest.raises(InvalidRequest, match="after scale 0: 0 scales are stored"):
        cache.fork_after(0)
    for scale in range(4):
        step(model, cache, model.tokens[0], scale)
    with pytest.raises(InvalidRequest, match="after scale 3: 3 scales are stored"):
        cache.fork_after(3)
    assert cache.fork_after(2).scale == 3


def test_a_last_scale_is_read_layer_by_layer(model: TinyVAR) -> None:
    """Unstored, it is in the staging buffer only until the next layer is written."""
    cache = NextScale(pool_of(ROWS, store_last=False), ROWS, SIDES, store_last=False)
    for scale in range(3):
        step(model, cache, model.tokens[0], scale)
    cache.begin(3)
    x = torch.ones(ROWS, 16, HEADS, DIM, dtype=torch.float64)
    cache.write(0, x, x)
    staged = cache.kv(0)[0].data_ptr()
    cache.write(1, x, x)
    assert cache.kv(1)[0].data_ptr() == staged
    with pytest.raises(InvalidRequest, match="layer 0 isn't staged"):
        cache.kv(0)


@pytest.mark.parametrize("bad", ["rows", "tokens", "dtype"])
def test_wrong_tensors(bad: str) -> None:
    """The message says both shapes."""
    cache = NextScale(pool_of(ROWS), ROWS, SIDES)
    cache.begin(0)
    x = torch.zeros(ROWS - (bad == "rows"), 1 + (bad == "tokens"), HEADS, DIM)
    x = x if bad == "dtype" else x.double()
    with pytest.raises(InvalidRequest, match=r"scale 0 takes \(6, 1, 2, 4\) torch.float64"):
        cache.write(0, x, x)


def test_wrong_numbers() -> None:
    """No rows, no scales, or blocks of another size."""
    with pytest.raises(InvalidRequest, match="blocks have 14 tokens; .* needs 30"):
        NextScale(pool_of(ROWS, store_last=False), ROWS, SIDES)
    with pytest.raises(InvalidRequest, match="rows=0"):
        NextScale(pool_of(ROWS), 0, SIDES)
    for sides in ((), (1, 0)):
        with pytest.raises(InvalidRequest, match="at least one positive"):
            NextScale(pool_of(ROWS), ROWS, sides)
    with pytest.raises(InvalidRequest, match="codec='fp8_e4m3' encodes whole blocks"):
        NextScale(BlockPool(KVSpec(1, 1, 16, 30, codec="fp8_e4m3"), 2), 2, SIDES)


def test_an_error_inside_gives_everything_back(model: TinyVAR) -> None:
    """As a context manager."""
    pool = pool_of(ROWS)
    with pytest.raises(RuntimeError), NextScale(pool, ROWS, SIDES) as cache:
        cache.begin(0)
        raise RuntimeError
    assert pool.stats().free == ROWS
