"""A rolling buffer under a transformer equals full recomputation with a banded mask (Mistral)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import pytest
import torch
from torch import Tensor

from streamgen.cache import BlockPool, BlockTable, CachePolicy, KVSpec, SinkWindow
from streamgen.cache.policy import RollingBuffer
from streamgen.errors import InvalidRequest, PoolFull
from streamgen.kernels.attention import attend

LAYERS, HEADS, KV_HEADS, DIM = 3, 4, 2, 4
SPEC = KVSpec(LAYERS, KV_HEADS, DIM, block_tokens=1, dtype=torch.float64)

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v: each [N, heads, dim]


class Tiny:
    """A grouped-query transformer of random weights; a token is a vector of its own."""

    def __init__(self) -> None:
        make = torch.Generator().manual_seed(7)
        width = HEADS * DIM

        def matrix(rows: int, cols: int) -> Tensor:
            return torch.randn(rows, cols, generator=make, dtype=torch.float64) / rows**0.5

        self.layers = [
            [matrix(width, n * DIM) for n in (HEADS, KV_HEADS, KV_HEADS)] + [matrix(width, width)]
            for _ in range(LAYERS)
        ]
        self.tokens = torch.randn(64, width, generator=make, dtype=torch.float64)

    def __call__(self, x: Tensor, attention: Attention) -> Tensor:
        """Tokens `[N, width]` through all layers."""
        for index, (to_q, to_k, to_v, mix) in enumerate(self.layers):
            normal = torch.nn.functional.layer_norm(x, x.shape[-1:])
            q, k, v = ((normal @ to).unflatten(-1, (-1, DIM)) for to in (to_q, to_k, to_v))
            x = x + torch.tanh(attention(index, q, k, v).flatten(1) @ mix)
        return x


@pytest.fixture(scope="module")
def model() -> Tiny:
    return Tiny()


def recompute(model: Tiny, tokens: Tensor, keys: int) -> Tensor:
    """No cache: all tokens at once, each sees the last `keys` up to itself."""
    age = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        score = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        score = score.masked_fill((age < 0) | (age >= keys), -torch.inf)
        return torch.einsum("hqk,khd->qhd", score.softmax(-1), v)

    return model(tokens, attention)


def feed(model: Tiny, table: BlockTable, tokens: Tensor) -> Tensor:
    """One chunk through the cache."""
    with table.chunk(len(tokens) // table.pool.spec.block_tokens) as chunk:
        mask = None if chunk.meta.mask == "none" else chunk.meta.materialize()

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            chunk.write(layer, k, v)
            keys, values = chunk.kv(layer)
            return attend(q[None], keys[None], values[None], mask)[0]

        out = model(tokens, attention)
        chunk.commit()
    return out


def stream(model: Tiny, table: BlockTable, tokens: Tensor, sizes: Sequence[int]) -> Tensor:
    """All tokens in chunks of these sizes, over and over."""
    ends = [0]
    for size in cycle(sizes):
        ends.append(min(ends[-1] + size, len(tokens)))
        if ends[-1] == len(tokens):
            break
    pairs = zip(ends, ends[1:], strict=False)
    return torch.cat([feed(model, table, tokens[a:b]) for a, b in pairs])


@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.parametrize(
    ("piece", "sizes"),
    [(1, [1]), (5, [5]), (5, [1, 4, 2, 5, 3]), (3, [3]), (7, [7, 1, 1]), (12, [12])],
)
def test_equals_recomputation(model: Tiny, piece: int, sizes: list[int], inclusive: bool) -> None:
    """W = 5, 64 tokens, chunks of one, of W, of less and of more; the pool is the lane."""
    policy = RollingBuffer(5, piece, inclusive)
    pool = BlockPool(SPEC, policy.lane_size)
    table = BlockTable(pool, policy)
    out = stream(model, table, model.tokens, sizes)
    expected = recompute(model, model.tokens, keys=5 + inclusive)
    assert (out - expected).abs().max() < 1e-10
    assert len(table.entries) == policy.lane_size == 5 + inclusive - 1 + piece


def test_slots_are_i_mod_w(model: Tiny) -> None:
    """The buffer holds tokens i - W + 1 to i, each at its number mod W; no mask, no other slot."""
    policy = RollingBuffer(5)
    pool = BlockPool(SPEC, 5)
    table = BlockTable(pool, policy)
    for i in range(13):
        feed(model, table, model.tokens[i : i + 1])
        assert [o for o, _ in table.entries] == list(range(max(0, i - 4), i + 1))
        assert all(block.slot == ordinal % 5 for ordinal, block in table.entries)
    assert table.chunk(1).meta.mask == "none"
    assert pool.stats().free == 0


@pytest.mark.parametrize("prompt", [3, 10, 23])
def test_prefill_in_pieces_of_w_then_decode(model: Tiny, prompt: int) -> None:
    """A prompt in pieces of W needs 2 W - 1 slots; behind it W of them do, and no mask."""
    pool = BlockPool(SPEC, 9)
    table = BlockTable(pool, RollingBuffer(5, piece=5))
    out = [stream(model, table, model.tokens[:prompt], [5])]
    assert pool.stats().reserved == 9
    table.set_policy(RollingBuffer(5))
    out.append(stream(model, table, model.tokens[prompt:40], [1]))
    assert (torch.cat(out) - recompute(model, model.tokens[:40], keys=5)).abs().max() < 1e-10
    stats = pool.stats()
    assert (stats.reserved, stats.free, stats.live) == (5, 4, 5)
    assert table.chunk(1).meta.mask == "none"


@pytest.mark.parametrize("inclusive", [False, True])
def test_reach(model: Tiny, inclusive: bool) -> None:
    """A token sees back exactly layers x (keys - 1) tokens, by the gradient of the last output."""
    policy = RollingBuffer(5, inclusive=inclusive)
    tokens = model.tokens[:30].clone().requires_grad_()
    recompute(model, tokens, keys=policy.span)[-1].sum().backward()
    assert tokens.grad is not None
    touched = tokens.grad.abs().sum(-1).nonzero().flatten()
    assert 29 - touched[0].item() == policy.reach(LAYERS) == (15 if inclusive else 12)


def test_the_papers_arithmetic() -> None:
    """32 layers, W = 4,096: 131,072 tokens of reach; 8x less memory at 32,768 tokens."""
    assert RollingBuffer(4096, inclusive=True).reach(32) == 131_072 == 32 * 4096
    assert RollingBuffer(4096).reach(32) == 131_040
    mistral = KVSpec(32, 8, 128, block_tokens=1, dtype=torch.bfloat16)
    buffer = RollingBuffer(4096).lane_size * mistral.block_bytes
    assert (buffer, 32_768 * mistral.block_bytes / buffer) == (512 * 2**20, 8)
    # A chunked prefill has its price for as long as it runs, which a smaller piece lowers.
    assert 32_768 / RollingBuffer(4096, piece=4096).lane_size == pytest.approx(4.0, abs=1e-3)
    assert 32_768 / RollingBuffer(4096, piece=256).lane_size == pytest.approx(7.53, abs=1e-2)


def test_forked_and_rewound(model: Tiny) -> None:
    """Branches and replays from a mark equal runs of their own."""
    policy = RollingBuffer(5, piece=3)
    pool = BlockPool(SPEC, 3 * policy.lane_size)
    table = BlockTable(pool, policy)
    other = torch.cat([model.tokens[:20], model.tokens[40:60]])
    stream(model, table, model.tokens[:20], [3])
    mark, child = table.snapshot(), table.fork()
    for run, tokens in ((table, model.tokens[:40]), (child, other)):
        out = stream(model, run, tokens[20:], [2, 3])
        assert (out - recompute(model, tokens, keys=5)[20:]).abs().max() < 1e-10
    child.close()
    table.rewind(mark)
    out = stream(model, table, other[20:], [1])
    assert (out - recompute(model, other, keys=5)[20:]).abs().max() < 1e-10
    mark.release()
    table.close()
    assert pool.stats().free == pool.stats().total


def test_whole_frames(model: Tiny) -> None:
    """With blocks of three tokens the band is one of frames: two, the query's own included."""
    pool = BlockPool(KVSpec(LAYERS, KV_HEADS, DIM, 3, torch.float64), 3)
    out = stream(model, BlockTable(pool, RollingBuffer(2, piece=2)), model.tokens[:36], [6, 3])
    frame = torch.arange(36) // 3
    seen = (frame[:, None] - frame >= 0) & (frame[:, None] - frame < 2)
    expected = model(
        model.tokens[:36], lambda _, q, k, v: attend(q[None], k[None], v[None], seen)[0]
    )
    assert (out - expected).abs().max() < 1e-10


@pytest.mark.parametrize(("window", "piece"), [(0, 1), (4, 0), (-1, 1)])
def test_empty_buffers(window: int, piece: int) -> None:
    """Are refused."""
    with pytest.raises(InvalidRequest, match=f"window={window}, piece={piece}"):
        RollingBuffer(window, piece)


def test_a_chunk_beyond_the_piece() -> None:
    """Is refused, and says both ways out."""
    with pytest.raises(InvalidRequest, match=r"4 tokens .* pieces of 3: .* piece=4"):
        RollingBuffer(8, piece=3).validate(4)


# A table that changes its policy


def test_what_a_policy_would_see_must_be_held(model: Tiny) -> None:
    """A larger window than the one so far is refused and leaves the table as it was."""
    table = BlockTable(BlockPool(SPEC, 20), RollingBuffer(4))
    stream(model, table, model.tokens[:6], [1])
    with pytest.raises(InvalidRequest, match=r"see frames \[0, 1\]"):
        table.set_policy(RollingBuffer(6))
    assert table.policy == RollingBuffer(4)
    assert table.lane is not None


def test_no_change_under_a_pending_chunk(model: Tiny) -> None:
    """Nor of a closed table."""
    table = BlockTable(BlockPool(SPEC, 4), RollingBuffer(4))
    policy: CachePolicy = RollingBuffer(3)
    with table.chunk(1), pytest.raises(InvalidRequest, match="pending"):
        table.set_policy(policy)
    table.close()
    with pytest.raises(InvalidRequest, match="closed"):
        table.set_policy(policy)


def test_a_larger_lane(model: Tiny) -> None:
    """Is reserved beside the old one: refused without a trace if there is no room."""
    table = BlockTable(BlockPool(SPEC, 13), RollingBuffer(5))
    stream(model, table, model.tokens[:4], [1])
    before = table.lane, table.entries, table.pool.stats()
    with pytest.raises(PoolFull, match="lane of 9"):
        table.set_policy(RollingBuffer(5, piece=5))
    assert before == (table.lane, table.entries, table.pool.stats())
    table.close()
    table = BlockTable(BlockPool(SPEC, 14), RollingBuffer(5))
    out = [stream(model, table, model.tokens[:4], [1])]
    table.set_policy(RollingBuffer(5, piece=5))
    out.append(stream(model, table, model.tokens[4:30], [5]))
    assert (torch.cat(out) - recompute(model, model.tokens[:30], keys=5)).abs().max() < 1e-10


def test_another_sink_in_shadow(model: Tiny) -> None:
    """Can't be taken up: its keys are stored raw."""
    table = BlockTable(BlockPool(SPEC, 9), SinkWindow(1, 5))
    with pytest.raises(InvalidRequest, match="shadows 1 frames can't follow one that shadows 0"):
        table.set_policy(SinkWindow(1, 5, shadow_sink=True))
