"""Paged sequences of tokens: blocks, sharing, eviction, swapping, positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_lm import LAYERS, VOCAB, TinyLM, rotate
from torch import Tensor

from streamgen.cache import Block, BlockPool, KVSpec
from streamgen.cache.tokens import Summary, TokenTable
from streamgen.errors import InvalidRequest, PoolFull, StreamgenError, TierError

SPEC = KVSpec(num_layers=2, kv_heads=2, head_dim=4, block_tokens=4)
EXACT = 1e-10


@pytest.fixture
def pool() -> BlockPool:
    """16 blocks of 4 tokens, 2 layers."""
    return BlockPool(SPEC, 16)


def kv(*numbers: float, spec: KVSpec = SPEC) -> tuple[Tensor, Tensor]:
    """K and V `[layers, n, heads, dim]` of tokens that each have a number to be known by."""
    layers = torch.arange(spec.num_layers, dtype=spec.dtype)[:, None, None, None] / 10
    k = torch.tensor(numbers, dtype=spec.dtype)[None, :, None, None] + layers
    k = k.expand(-1, -1, spec.kv_heads, spec.head_dim)
    return k, -k


def new(pool: BlockPool, *numbers: float) -> TokenTable:
    """A table with such tokens."""
    table = TokenTable(pool)
    if numbers:
        table.append(*kv(*numbers, spec=pool.spec))
    return table


def holds(table: TokenTable, *numbers: float) -> bool:
    """Whether these are its tokens, in all layers, K and V."""
    want = kv(*numbers, spec=table.pool.spec)
    return table.length == len(numbers) and all(
        torch.equal(x, y[layer])
        for layer in range(table.pool.spec.num_layers)
        for x, y in zip(table.gather(layer), want, strict=True)
    )


def free(pool: BlockPool) -> int:
    """Slots that can be handed out."""
    return pool.stats().free


def bytes_of(pool: BlockPool) -> list[bytes]:
    """All that is stored."""
    return [x.numpy().tobytes() for x in (*pool.k, *pool.v)]


class Shelf:
    """A tier in memory, with faults on demand."""

    def __init__(self, pool: BlockPool, fail_after: int = 99) -> None:
        self.pool = pool
        self.kept: dict[int, bytes] = {}
        self.count = 0
        self.fail_after = fail_after

    def store(self, block: Block) -> Place:
        """Keep a block's bytes."""
        if self.count == self.fail_after:
            raise TierError("the shelf is full")
        payload = bytearray(self.pool.payload_bytes)
        self.pool.read(block, memoryview(payload))
        self.count += 1
        self.kept[self.count] = bytes(payload)
        return Place(self, self.count)


class Place:
    """Where a block is on the shelf."""

    def __init__(self, shelf: Shelf, key: int) -> None:
        self.shelf, self.key = shelf, key

    def read(self, out: memoryview) -> None:
        """Copy the bytes, if they are still there."""
        if self.key not in self.shelf.kept:
            raise TierError("the shelf has lost it")
        out[:] = self.shelf.kept[self.key]

    def forget(self) -> None:
        """Make room."""
        self.shelf.kept.pop(self.key, None)


# Blocks on demand


@pytest.mark.parametrize("block_tokens", [1, 3, 16])
def test_blocks_on_demand(block_tokens: int) -> None:
    """As many blocks as the tokens need, so at most one is partly filled, at any block size."""
    pool = BlockPool(KVSpec(2, 2, 4, block_tokens), 40)
    table, numbers = TokenTable(pool), []
    for n in (1, 2, 1, 5, 16, 1):
        more = [len(numbers) + x for x in range(n)]
        table.append(*kv(*more))
        numbers += more
        used = -(-len(numbers) // block_tokens)
        assert len(table.blocks) == len(table.block_table) == used == 40 - free(pool)
        assert 0 <= table.reserved_bytes - table.used_bytes < pool.spec.block_bytes
        assert holds(table, *numbers)
    assert table.used_bytes == 26 * 2 * 2 * 2 * 4 * 4


def test_a_token_at_a_time_writes_one_row(pool: BlockPool) -> None:
    """What lies beside the new row in its block is not touched."""
    table = new(pool, 0, 1, 2, 3, 4)
    with table.extend(1) as tail:
        before = bytes_of(pool)
        k, v = kv(5)
        tail.write(0, k[0], v[0])
        changed = [one != other for one, other in zip(before, bytes_of(pool), strict=True)]
        assert changed == [True, False, True, False]
        assert holds(table, 0, 1, 2, 3, 4)


def test_gather_is_a_view_of_neighbours(pool: BlockPool) -> None:
    """One run is read where it lies; several are copied, to staging if there is some."""
    table = new(pool, *range(10))
    k, v = table.gather(1)
    assert table.runs == ((13, 3),)
    assert (k.data_ptr(), v.data_ptr()) == (pool.k[1][13].data_ptr(), pool.v[1][13].data_ptr())
    table.append(*kv(*range(10, 14)))
    assert table.runs == ((13, 3), (12, 1))
    assert holds(table, *range(14))
    staging = torch.full((20, 2, 4), 7.0), torch.full((20, 2, 4), 7.0)
    out = table.gather(1, out=staging)
    for x, y, stage in zip(out, table.gather(1), staging, strict=True):
        assert torch.equal(x, y) and x.data_ptr() == stage.data_ptr()
        assert (stage[14:] == 7).all()


def test_staging_must_fit(pool: BlockPool) -> None:
    """Both shapes are in the message."""
    table = new(pool, *range(4))
    other = new(pool, 0)
    table.append(*kv(*range(4, 8)))
    for shape, dtype in (((7, 2, 4), torch.float32), ((8, 2, 4), torch.float64)):
        stage = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        with pytest.raises(InvalidRequest, match=r"staging for k is .*; accepted: \(8, 2, 4\)"):
            table.gather(0, stage)
    assert holds(other, 0)


def test_an_empty_table(pool: BlockPool) -> None:
    """Has nothing and needs nothing."""
    table = TokenTable(pool)
    assert (table.length, table.next_position, table.block_table, table.runs) == (0, 0, (), ())
    assert table.gather(0)[0].shape == (0, 2, 4)
    assert table.fork().length == 0
    assert free(pool) == 16


# Pending tokens


def test_layer_by_layer(pool: BlockPool) -> None:
    """A tail reads what was and what it wrote itself, may rewrite it, and counts at commit."""
    table = new(pool, 0, 1, 2)
    tail = table.extend(3)
    assert table.pending is tail
    assert (tail.start, len(tail), tail.positions.tolist()) == (3, 3, [3, 4, 5])
    assert tail.kv_positions.tolist() == [0, 1, 2, 3, 4, 5]
    for numbers in ((7, 8, 9), (3, 4, 5)):
        for layer in range(2):
            k, v = kv(*numbers)
            tail.write(layer, k[layer], v[layer])
            for x, y in zip(tail.kv(layer), kv(0, 1, 2, *numbers), strict=True):
                assert torch.equal(x, y[layer])
    assert holds(table, 0, 1, 2)
    tail.commit()
    assert holds(table, 0, 1, 2, 3, 4, 5)
    assert table.pending is None


def test_mask_of_a_run(pool: BlockPool) -> None:
    """All that was before, and causally what is new."""
    mask = new(pool, 0, 1).extend(3).mask()
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_commit_some(pool: BlockPool) -> None:
    """The first tokens stay, the others leave no trace."""
    table = new(pool, 0, 1, 2)
    with table.extend(7) as tail:
        for layer, (k, v) in enumerate(zip(*kv(*range(3, 10)), strict=True)):
            tail.write(layer, k, v)
        with pytest.raises(InvalidRequest, match="7 tokens are pending"):
            tail.commit(8)
        tail.commit(2)
    assert holds(table, 0, 1, 2, 3, 4)
    assert (free(pool), table.next_position) == (14, 5)


def test_abort_leaves_no_trace(pool: BlockPool) -> None:
    """Also by leaving the block, by an error, and at the end of a table's life."""
    table = new(pool, 0, 1, 2)
    blocks = table.blocks
    with table.extend(9):
        assert free(pool) == 13
    with pytest.raises(ZeroDivisionError), table.extend(9):
        _ = 1 / 0
    tail = table.extend(1)
    tail.abort()
    tail.abort()
    assert (table.blocks, free(pool), table.positions.tolist()) == (blocks, 15, [0, 1, 2])
    assert holds(table, 0, 1, 2)
    pool.check()
    table.extend(9)
    table.close()
    table.close()
    assert free(pool) == 16


def test_every_layer_must_be_written(pool: BlockPool) -> None:
    """Else commit names those that were not."""
    with TokenTable(pool).extend(2) as tail:
        k, v = kv(0, 1)
        tail.write(1, k[1], v[1])
        with pytest.raises(InvalidRequest, match=r"layers \[0\] of the pending"):
            tail.commit()


@pytest.mark.parametrize(
    ("k", "text"),
    [
        (torch.zeros(3, 2, 4), r"k is \(3, 2, 4\) torch.float32; accepted: \(2, 2, 4\) torch.fl"),
        (torch.zeros(2, 2, 4).half(), "float16; accepted"),
    ],
)
def test_wrong_tensors(pool: BlockPool, k: Tensor, text: str) -> None:
    """Both shapes are in the message, and nothing was written."""
    before = bytes_of(pool)
    with TokenTable(pool).extend(2) as tail, pytest.raises(InvalidRequest, match=text):
        tail.write(0, k, k)
    with pytest.raises(InvalidRequest, match="accepted: .2, n, kv_heads"):
        TokenTable(pool).append(k, k)
    assert bytes_of(pool) == before


def test_one_tail_at_a_time(pool: BlockPool) -> None:
    """While tokens are pending nothing else may change, and nothing after the end."""
    table = new(pool, 0, 1)
    tail = table.extend(1)
    calls: list[Callable[[], object]] = [
        lambda: table.extend(1),
        table.fork,
        lambda: table.truncate(0),
        lambda: table.compact([0]),
        lambda: table.renumber([1, 2]),
        lambda: table.swap_out(Shelf(pool).store),
        table.park,
        lambda: table.adopt([], 0),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest, match="1 tokens are still pending"):
            call()
    tail.abort()
    table.close()
    for call in [*calls, lambda: table.gather(0), table.swap_in, lambda: table.summarize([0], 1)]:
        with pytest.raises(InvalidRequest, match="was closed"):
            call()
    for late in (lambda: tail.kv(0), tail.commit, lambda: tail.write(0, *kv(0))):
        with pytest.raises(InvalidRequest, match="is over"):
            late()


def test_bad_numbers(pool: BlockPool) -> None:
    """Refused with what is accepted, and without a trace."""
    table = new(pool, 0, 1, 2)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: table.extend(0), "at least 1 token"),
        (lambda: table.extend(2, [1]), r"positions are \(1,\) .*; accepted: \(2,\) integers"),
        (lambda: table.extend(2, [1.0, 2.0]), "integers"),
        (lambda: table.extend(2, [-1, 2]), "position -1"),
        (lambda: table.truncate(4), "has 3 tokens"),
        (lambda: table.truncate(-1), "has 3 tokens"),
        (lambda: table.compact([1, 1]), r"ascend within 0..2, none twice; got \[1, 1\]"),
        (lambda: table.compact([2, 1]), "ascend"),
        (lambda: table.compact([0, 3]), "ascend within 0..2"),
        (lambda: table.compact([-1, 0]), "ascend"),
        (lambda: table.compact([[0], [1]]), "a list is needed"),
        (lambda: table.compact([0.5]), "a list is needed"),
        (lambda: table.renumber([0, 1]), r"accepted: \(3,\)"),
        (lambda: table.summarize([], 3), "at least 1 token"),
        (lambda: TokenTable(pool, axes=0), "axes=0"),
        (lambda: TokenTable(pool, reserve=-1), "reserve=-1"),
        (lambda: TokenTable(pool).adopt(table.blocks, 5), "adopt.1 blocks, length=5"),
        (lambda: table.adopt(table.blocks, 3), "with 3 tokens"),
    ]
    for call, text in calls:
        with pytest.raises(InvalidRequest, match=text):
            call()
    assert holds(table, 0, 1, 2)
    assert free(pool) == 15


def test_no_coded_pool() -> None:
    """A codec takes whole blocks once; tokens come one by one."""
    with pytest.raises(InvalidRequest, match="codec=int8: a table of tokens needs a raw pool"):
        TokenTable(BlockPool(KVSpec(1, 1, 4, 4, codec="int8"), 2))


def test_a_model_being_trained(pool: BlockPool) -> None:
    """Writing what needs a gradient does not tie the pool to its graph."""
    table = TokenTable(pool)
    k, v = kv(0, 1)
    table.append((k * torch.ones((), requires_grad=True)), v)
    mean = Summary(k[:, 0] * torch.ones((), requires_grad=True), v[:, 0], 2)
    table.compact([0], mean)
    assert not table.gather(0)[0].requires_grad


# Sharing


def test_fork_costs_no_block(pool: BlockPool) -> None:
    """And then at most one: the writer that finds the last block shared copies it, once."""
    parent = new(pool, *range(6))
    child = parent.fork()
    assert free(pool) == 14
    child.append(*kv(60))
    assert (free(pool), pool.stats().shared) == (13, 1)
    parent.append(*kv(6))
    assert free(pool) == 13  # alone with it now: in place
    child.append(*kv(70, 80))
    assert free(pool) == 12
    assert holds(parent, *range(7))
    assert holds(child, *range(6), 60, 70, 80)
    parent.close()
    assert (free(pool), pool.stats().shared) == (13, 0)
    assert holds(child, *range(6), 60, 70, 80)
    pool.check()


def test_full_blocks_are_never_copied(pool: BlockPool) -> None:
    """Who extends behind them takes a fresh one."""
    parent = new(pool, *range(4))
    child = parent.fork()
    child.append(*kv(4))
    assert (free(pool), pool.stats().shared) == (14, 1)


def test_truncate_then_write_into_a_shared_block(pool: BlockPool) -> None:
    """The other holder's tokens stay, though they lie where the new ones would go."""
    parent = new(pool, *range(8))
    child = parent.fork()
    child.truncate(5)
    assert free(pool) == 14
    child.append(*kv(50))
    assert holds(parent, *range(8))
    assert holds(child, 0, 1, 2, 3, 4, 50)
    child.truncate(4)
    assert free(pool) == 14
    child.truncate(0)
    assert (child.length, free(pool), pool.stats().shared) == (0, 14, 0)


def test_adopt(pool: BlockPool) -> None:
    """Blocks of others are a beginning: no bytes, and the partly filled last one is copied."""
    source = new(pool, *range(10))
    table = TokenTable(pool)
    table.adopt(source.blocks, 10)
    assert holds(table, *range(10)) and free(pool) == 13
    assert table.positions.tolist() == table.ids.tolist() == list(range(10))
    table.append(*kv(100))
    source.append(*kv(10))
    assert holds(source, *range(11)) and holds(table, *range(10), 100)
    source.close()
    table.close()
    assert free(pool) == 16
    tail = (busy := TokenTable(pool)).extend(1)
    with pytest.raises(InvalidRequest, match="pending in another"):
        TokenTable(pool).adopt(busy._blocks, 1)
    tail.abort()


# A full pool


def trace(*tables: TokenTable) -> list[object]:
    """Everything that a refused call must leave alone."""
    return [
        (t.blocks, [b.ref for b in t.blocks], t.block_table, t.positions.tolist(), t.ids.tolist())
        for t in tables
    ]


def test_full_pool_changes_nothing(pool: BlockPool) -> None:
    """Extending, copying a shared block, and packing one are refused whole; freeing helps."""
    filler = new(pool, *range(48))
    table = new(pool, *range(9))
    twin = table.fork()
    last = new(pool, 0)
    assert free(pool) == 0
    before, data = trace(filler, table, twin, last), bytes_of(pool)
    for call in (
        lambda: last.extend(4),
        lambda: table.extend(1),
        lambda: table.compact(range(1, 9)),
        lambda: TokenTable(pool, reserve=1),
    ):
        with pytest.raises(PoolFull, match="0 of 16 slots are free .*; shared by .*: 3"):
            call()
    assert trace(filler, table, twin, last) == before and bytes_of(pool) == data
    filler.truncate(40)
    table.extend(1).abort()
    table.compact(range(5, 9))
    assert holds(table, 5, 6, 7, 8) and holds(twin, *range(9))


def test_room_for_the_copy_but_not_the_rest(pool: BlockPool) -> None:
    """An extension takes all its blocks or none: the shared block is not copied in vain."""
    new(pool, *range(52))
    table = new(pool, 0, 1)
    twin = table.fork()
    assert free(pool) == 2
    with pytest.raises(PoolFull, match="3 slots"):
        table.extend(7)
    assert table.blocks == twin.blocks
    table.extend(6)


# Eviction


def test_compact_packs(pool: BlockPool) -> None:
    """Survivors in order, without gaps; positions, weights and ids go along; the rest is free."""
    table = new(pool, *range(11))
    table.compact([0, 2, 3, 7, 8, 10])
    assert holds(table, 0, 2, 3, 7, 8, 10)
    assert table.positions.tolist() == table.ids.tolist() == [0, 2, 3, 7, 8, 10]
    assert table.weights.tolist() == [1] * 6
    assert (len(table.blocks), free(pool)) == (2, 14)
    table.append(*kv(11))
    assert table.positions.tolist()[-1] == table.ids.tolist()[-1] == 11
    pool.check()


@pytest.mark.parametrize("keep", [[], [0], [3, 4, 5, 6], list(range(9)), list(range(2, 11))])
def test_compact_to_any_set(pool: BlockPool, keep: list[int]) -> None:
    """None, a prefix, a middle, a block's worth and a part, a suffix."""
    table = new(pool, *range(11))
    table.compact(keep)
    assert holds(table, *keep)
    assert free(pool) == 16 - -(-len(keep) // 4)


def test_what_stays_does_not_move(pool: BlockPool) -> None:
    """A kept front keeps its blocks, even shared ones; nothing at all is written for a prefix."""
    table = new(pool, *range(12))
    twin = table.fork()
    front = table.blocks[:1]
    table.compact([0, 1, 2, 3, 4, 9])
    assert table.blocks[:1] == front and front[0].ref == 2
    assert holds(table, 0, 1, 2, 3, 4, 9) and holds(twin, *range(12))
    data = bytes_of(pool)
    twin.compact(range(7))
    assert bytes_of(pool) == data and holds(twin, *range(7))


def test_own_blocks_are_packed_in_place(pool: BlockPool) -> None:
    """So a table that shares nothing can always be compacted, in a pool that is full."""
    new(pool, *range(44))
    table = new(pool, *range(20))
    assert free(pool) == 0
    table.compact(range(3, 20, 2))
    assert holds(table, *range(3, 20, 2))


def test_own_blocks_stand_in_for_shared_ones(pool: BlockPool) -> None:
    """If enough of them are left over, no new one is needed."""
    new(pool, *range(40))
    table = new(pool, *range(8))
    twin = table.fork()
    table.append(*kv(*range(8, 24)))
    assert free(pool) == 0
    table.compact(range(1, 24, 2))
    assert holds(table, *range(1, 24, 2)) and holds(twin, *range(8))
    pool.check()


def summary(x: float, position: int, weight: int = 1) -> Summary:
    """A summary with a number to be known by."""
    k, v = kv(x)
    return Summary(k[:, 0], v[:, 0], position, weight)


def test_summary_token(pool: BlockPool) -> None:
    """One more token at the end, with its own position and weight, and no id of the stream."""
    table = new(pool, *range(8))
    table.compact([1, 6], summary(50, 7, weight=6))
    assert holds(table, 1, 6, 50)
    assert (table.positions.tolist(), table.weights.tolist()) == ([1, 6, 7], [1, 1, 6])
    assert table.ids.tolist() == [1, 6, -1]
    assert table.next_position == 8
    table.append(*kv(8))
    assert (table.positions.tolist()[-1], table.ids.tolist()[-1]) == (8, 8)
    assert holds(table, 1, 6, 50, 8)


def test_summary_behind_all_tokens(pool: BlockPool) -> None:
    """Nothing need be dropped; a shared last block is copied for it, a full one left alone."""
    table = new(pool, *range(6))
    twin = table.fork()
    table.compact(range(6), summary(50, 6))
    assert holds(table, *range(6), 50) and holds(twin, *range(6))
    table.compact(range(7), summary(60, 7))
    blocks = table.blocks
    table.compact(range(8), summary(70, 8))
    assert holds(table, *range(6), 50, 60, 70) and table.blocks[:2] == blocks
    assert free(pool) == 16 - 4
    empty = TokenTable(pool)
    empty.compact([], summary(1, 0))
    assert holds(empty, 1)


def test_bad_summaries(pool: BlockPool) -> None:
    """Shape, dtype, weight and position are looked at before anything moves."""
    table = new(pool, *range(8))
    k, v = kv(0)
    for bad, text in (
        (Summary(k, v[:, 0], 0), r"summary's k is \(2, 1, 2, 4\) .*accepted: \(2, 2, 4\)"),
        (Summary(k[:, 0], v[:, 0].double(), 0), "summary's v .* torch.float64"),
        (summary(0, 0, weight=0), "weight=0"),
        (summary(0, -1), "position -1"),
        (Summary(k[:, 0], v[:, 0], (1, 2, 3)), "positions are"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            table.compact([5], bad)
    assert holds(table, *range(8))


def test_summarize_is_the_mean(pool: BlockPool) -> None:
    """Of what is dropped; by weight it is the mean of all that ever was."""
    table = new(pool, *range(8))
    first = table.summarize([1, 2, 6], 8)
    assert (first.position, first.weight) == (8, 3)
    assert torch.allclose(first.k[:, 0, 0], torch.tensor([3.0, 3.1]))
    assert torch.equal(first.k, -first.v)
    table.compact([0, 3, 4, 5, 7], first)
    plain = table.summarize([4, 5], 9)
    true = table.summarize([4, 5], 9, by_weight=True)
    assert plain.weight == true.weight == 4
    assert plain.k[0, 0, 0].item() == pytest.approx((7 + 3) / 2)
    assert true.k[0, 0, 0].item() == pytest.approx((7 + 1 + 2 + 6) / 4)


def test_mean_of_raw_keys_is_the_rotated_mean() -> None:
    """HERMES' summary key, a mean of keys rotated to the summary's position (alg. 1)."""
    pool = BlockPool(TinyLM.spec(4, num_layers=1), 4)
    table = TokenTable(pool)
    k = torch.randn(1, 7, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table.append(k, k)
    drop, at = torch.tensor([1, 2, 5]), 9
    stored = rotate(k[0, drop], drop)  # what a cache of rotated keys would hold
    moved = rotate(stored, at - drop).mean(0)
    raw = table.summarize(drop.numpy(), at).k
    assert (rotate(raw, torch.tensor([at])) - moved).abs().max() < EXACT


def test_renumber_moves_no_byte() -> None:
    """Shifting all positions leaves the output as it was; packing them changes it."""
    model = TinyLM()
    table = TokenTable(BlockPool(model.spec(4), 8))
    prompt = [1, 5, 2, 8, 3, 9, 4]
    with table.extend(7) as tail:
        model.step(tail, prompt)
        tail.commit()
    table.compact([0, 2, 3, 6])

    def ask() -> Tensor:
        with table.extend(2) as tail:
            return model.step(tail, [3, 7])

    before, writes = ask(), [x._version for x in table.pool.k]
    table.renumber(table.positions + 500)
    assert table.next_position == 507
    assert [x._version for x in table.pool.k] == writes
    assert (ask() - before).abs().max() < EXACT
    table.renumber([0, 1, 2, 3])
    assert (ask() - before).abs().max() > 1e-3


def test_three_axes(pool: BlockPool) -> None:
    """Positions of time, height and width go through every edit; text is alike on all."""
    table = TokenTable(pool, axes=3)
    table.append(*kv(0, 1), positions=[[0, 0, 0], [0, 0, 1]])
    table.append(*kv(2, 3))
    assert table.positions.tolist() == [[0, 0, 0], [0, 0, 1], [2, 2, 2], [3, 3, 3]]
    k, v = kv(9)
    table.compact([1, 3], Summary(k[:, 0], v[:, 0], (4, 5, 6)))
    twin = table.fork()
    assert twin.positions.tolist() == [[0, 0, 1], [3, 3, 3], [4, 5, 6]]
    assert twin.next_position == 7
    twin.renumber([[0, 0, 0], [1, 1, 1], [2, 2, 2]])
    assert table.next_position == 7
    with pytest.raises(InvalidRequest, match=r"accepted: \(1, 3\)"):
        table.extend(1, [4])


def test_ids_are_never_used_twice(pool: BlockPool) -> None:
    """A token that was dropped at the end, as a question is, does not give its id away."""
    table = new(pool, 0, 1, 2)
    table.truncate(1)
    table.append(*kv(5))
    assert table.ids.tolist() == [0, 3]
    assert table.positions.tolist() == [0, 1]
    assert table.fork().ids.tolist() == [0, 3]


def test_reserve_is_one_view(pool: BlockPool) -> None:
    """Through growth, truncation and compaction the sequence lies at one address; no block comes
    or goes."""
    new(pool, 0)
    table = TokenTable(pool, reserve=30)
    assert (free(pool), table.length, table.blocks) == (7, 0, ())
    address, numbers = None, []
    for step in range(12):
        more = [10 * step + x for x in range(3)]
        table.append(*kv(*more))
        numbers += more
        k, _ = table.gather(0)
        address = address or k.data_ptr()
        assert k.data_ptr() == address and free(pool) == 7
        assert holds(table, *numbers)
        if len(numbers) > 24:
            table.compact(range(0, len(numbers), 2), summary(step, 500 + step))
            numbers = [*numbers[::2], step]
        elif step % 2:
            table.truncate(len(numbers) - 1)
            numbers.pop()
        pool.check()
    twin = table.fork()
    assert free(pool) == 7 and len(twin.block_table) == len(table.blocks)
    table.close()
    twin.close()
    assert free(pool) == 15


# Another tier


def test_swap(pool: BlockPool) -> None:
    """All blocks leave and come back, bit by bit the same, and nothing stays on the shelf."""
    shelf = Shelf(pool)
    table = new(pool, *range(10))
    assert table.swap_out(shelf.store) == 3
    assert (free(pool), len(shelf.kept), table.block_table) == (16, 3, (-1, -1, -1))
    assert table.swap_out(shelf.store) == 0
    new(pool, *range(100, 108))
    assert table.swap_in() == 3
    assert holds(table, *range(10)) and not shelf.kept
    assert table.swap_in() == 0
    pool.check()


def test_shared_blocks_go_once(pool: BlockPool) -> None:
    """And come back once, for all who hold them."""
    shelf = Shelf(pool)
    table = new(pool, *range(6))
    twin = table.fork()
    twin.append(*kv(60))
    assert (table.swap_out(shelf.store), twin.swap_out(shelf.store)) == (2, 1)
    assert (free(pool), len(shelf.kept)) == (16, 3)
    assert twin.swap_in() == 2
    assert table.swap_in() == 1
    assert holds(table, *range(6)) and holds(twin, *range(6), 60)


def test_park_gives_the_reserve_back(pool: BlockPool) -> None:
    """And nothing else; what is left is listed for a tier manager."""
    table = TokenTable(pool, reserve=32)
    table.append(*kv(*range(6)))
    assert free(pool) == 8
    table.park()
    assert free(pool) == 14 and holds(table, *range(6))
    assert table.entries == tuple(enumerate(table.blocks)) and len(table.entries) == 2
    reserved = TokenTable(pool, reserve=8)
    reserved.swap_out(Shelf(pool).store)
    assert free(pool) == 14


@pytest.mark.parametrize(
    "use",
    [
        lambda table: table.append(*kv(6)),
        lambda table: table.gather(0),
        lambda table: table.compact([5]),
        lambda table: table.summarize([5], 6),
    ],
)
def test_blocks_come_back_when_needed(pool: BlockPool, use: Callable[[TokenTable], object]) -> None:
    """By whatever reads or writes bytes."""
    table, shelf = new(pool, *range(6)), Shelf(pool)
    table.swap_out(shelf.store)
    use(table)
    assert not shelf.kept
    assert all(block.slot >= 0 for block in table.blocks)


def test_a_fork_that_is_busy_fetches_its_past(pool: BlockPool) -> None:
    """Swapped out under a pending tail, the shared blocks come back for its next layer."""
    table = new(pool, *range(8))
    tail = table.fork().extend(1)
    table.swap_out(Shelf(pool).store)
    assert torch.equal(tail.kv(0)[0][:8], kv(*range(8))[0][0])


def test_integers_need_no_bytes(pool: BlockPool) -> None:
    """Fork, renumber, truncate and close work on a sequence that is away, and forget it there."""
    table, shelf = new(pool, *range(10)), Shelf(pool)
    table.swap_out(shelf.store)
    twin = table.fork()
    twin.renumber(range(5, 15))
    twin.truncate(5)
    table.close()
    assert (free(pool), len(shelf.kept)) == (16, 2)
    twin.append(*kv(50))
    assert holds(twin, 0, 1, 2, 3, 4, 50) and not shelf.kept


def test_a_shelf_that_is_full(pool: BlockPool) -> None:
    """Every block is where it was, and the shelf is left clean."""
    table, shelf = new(pool, *range(10)), Shelf(pool, fail_after=2)
    before = trace(table)
    with pytest.raises(TierError, match="full"):
        table.swap_out(shelf.store)
    assert trace(table) == before and not shelf.kept
    assert holds(table, *range(10))


def test_no_room_to_come_back(pool: BlockPool) -> None:
    """The sequence stays away, whole, until there is."""
    table, shelf = new(pool, *range(10)), Shelf(pool)
    table.swap_out(shelf.store)
    filler = new(pool, *range(56))
    for call in (table.swap_in, lambda: table.extend(1), lambda: table.gather(0)):
        with pytest.raises(PoolFull):
            call()
    assert len(shelf.kept) == 3
    filler.close()
    assert holds(table, *range(10))


def test_lost_bytes(pool: BlockPool) -> None:
    """Are an error, never other bytes; closing still works."""
    table, shelf = new(pool, *range(10)), Shelf(pool)
    table.swap_out(shelf.store)
    shelf.kept.pop(2)
    for call in (table.swap_in, lambda: table.extend(1), lambda: table.compact([5])):
        with pytest.raises(StreamgenError, match="lost"):
            call()
    assert (table.length, table.pending) == (10, None)
    table.close()
    assert free(pool) == 16


# A table per layer, as HERMES needs it


def test_budgets_per_layer() -> None:
    """Single-layer tables of one pool, each with its own survivors, against lists.

    After every chunk each layer keeps a prefix and a budget of its own choice; the last layer also
    folds what it drops into a summary on the common clock. A question is asked and taken back.
    """
    model, g = TinyLM(3), torch.Generator().manual_seed(3)
    pool = BlockPool(model.spec(4, num_layers=1), 32)
    tables = [TokenTable(pool, reserve=24) for _ in range(LAYERS)]
    naive: list[list[tuple[Tensor, Tensor, int, int, int]]] = [[] for _ in range(LAYERS)]
    prefix, budget, count = 3, 8, 0
    front: list[Tensor] = []
    for size in (prefix, 6, 6, 6, 6, 6):
        words = torch.randint(VOCAB, (size,), generator=g).tolist()
        clock = max(table.next_position for table in tables)
        at = range(clock, clock + size)
        tails = [table.extend(size, at) for table in tables]
        logits = model.layered_step(tails, words)
        assert logits.isfinite().all()
        for layer, tail in enumerate(tails):
            k, v = tail.kv(0)
            new = zip(k[-size:].clone(), v[-size:].clone(), at, strict=True)
            naive[layer] += [(*x, 1, count + i) for i, x in enumerate(new)]
            tail.commit()
        count += size
        front = front or [table.gather(0)[0].clone() for table in tables]
        if tables[0].length > prefix + budget:
            clock += size
            for layer, table in enumerate(tables):
                deep = layer == LAYERS - 1
                rest = torch.randperm(table.length - prefix, generator=g) + prefix
                keep = sorted([*range(prefix), *rest[: budget - deep].tolist()])
                drop = sorted(set(range(table.length)) - set(keep))
                folded = table.summarize(drop, clock) if deep else None
                table.compact(keep, folded)
                gone = [naive[layer][i] for i in drop]
                naive[layer] = [naive[layer][i] for i in keep]
                if deep:
                    mean = [torch.stack([x[i] for x in gone]).mean(0) for i in (0, 1)]
                    weight = sum(x[3] for x in gone)
                    naive[layer].append((mean[0], mean[1], clock, weight, -1))
                assert table.length == prefix + budget
        question = [table.extend(2, range(clock, clock + 2)) for table in tables]
        model.layered_step(question, [1, 2])
        for tail in question:
            tail.abort()
        for layer, table in enumerate(tables):
            k, v = table.gather(0)
            for want, got in zip(zip(*naive[layer], strict=True), (k, v), strict=False):
                assert (torch.stack(want) - got).abs().max() < EXACT
            assert table.positions.tolist() == [x[2] for x in naive[layer]]
            assert table.weights.tolist() == [x[3] for x in naive[layer]]
            assert table.ids.tolist() == [x[4] for x in naive[layer]]
            assert torch.equal(k[:prefix], front[layer])
            assert table.weights.sum() == (count if layer == LAYERS - 1 else table.length)
    assert not np.array_equal(tables[0].ids[:-1], tables[1].ids[:-1])
    pool.check()


def test_a_large_budget_is_the_full_cache() -> None:
    """Tables per layer without eviction give the logits of no cache at all."""
    model = TinyLM(4)
    pool = BlockPool(model.spec(5, num_layers=1), 16)
    tables = [TokenTable(pool) for _ in range(LAYERS)]
    words = [1, 4, 2, 8, 5, 7, 1, 3, 9, 6, 0, 2]
    logits = []
    for part in (words[:5], words[5:6], words[6:]):
        tails = [table.extend(len(part)) for table in tables]
        logits.append(model.layered_step(tails, part))
        for tail in tails:
            tail.commit()
        for table in tables:
            table.compact(range(table.length))
    assert (torch.cat(logits) - model.full(words)).abs().max() < EXACT
