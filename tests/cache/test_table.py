"""One stream: rolling, sharing, going back, and what happens when the pool is full."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from streamgen.cache import Append, Block, BlockPool, BlockTable, KVSpec, SinkWindow
from streamgen.errors import InvalidRequest, PoolFull, TierError


@pytest.fixture
def table(pool: BlockPool) -> BlockTable:
    """Window 6 with a sink of 1, in a pool of 24."""
    return BlockTable(pool, SinkWindow(1, 6))


def held(table: BlockTable) -> list[int]:
    return [ordinal for ordinal, _ in table.entries]


def keys(table: BlockTable) -> dict[int, float]:
    """One key of each committed frame, layer 0."""
    return {f: table.pool.k[0][block.slot, 0, 0, 0].item() for f, block in table.entries}


def trace(pool: BlockPool, *tables: BlockTable) -> tuple[object, ...]:
    """Everything that a refused call must leave alone."""
    slots = [(b, b.ref, b.slot) if (b := pool.at(slot)) else None for slot in range(len(pool.k[0]))]
    content = [x.numpy().tobytes() for x in (*pool.k, *pool.v)]
    return pool.stats(), slots, content, [(t.entries, t.end, t.lane, t.pending) for t in tables]


# Rolling


def test_the_window_rolls(table: BlockTable, roll) -> None:
    """By hand: window 6, sink 1, chunks of three."""
    seen = []
    for _ in range(4):
        roll(table, 1)
        seen.append(held(table))
    assert seen == [[0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 4, 5, 6, 7, 8], [0, 7, 8, 9, 10, 11]]
    assert keys(table) == {f: f for f in seen[-1]}


def test_one_session_uses_its_lane_and_no_more(table: BlockTable, roll) -> None:
    """The lane is reserved by the first chunk; later chunks take nothing."""
    assert table.pool.stats().reserved == 0
    for _ in range(5):
        roll(table, 1)
        assert table.pool.stats().free == 18


def test_chunks_of_any_size(table: BlockTable, roll) -> None:
    """Sizes may change from chunk to chunk."""
    for n in (1, 5, 2, 1, 3, 5):
        roll(table, 1, n=n)
    assert held(table) == [0, 12, 13, 14, 15, 16]
    assert keys(table) == {f: f for f in held(table)}


def test_append(pool: BlockPool, roll) -> None:
    """Keeps all frames in their order and refuses the one too many."""
    table = BlockTable(pool, Append(7))
    roll(table, 3, n=2)
    assert held(table) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(InvalidRequest, match="capacity of 7"):
        table.chunk(2)


def test_one_chunk_at_a_time(table: BlockTable) -> None:
    """While one is pending, nothing else may happen to the table."""
    chunk = table.chunk(3)
    other = BlockTable(table.pool, table.policy).snapshot()
    for call in (
        lambda: table.chunk(3),
        table.fork,
        table.snapshot,
        lambda: table.rewind(other),
    ):
        with pytest.raises(InvalidRequest, match="pending"):
            call()
    assert table.pending is chunk


def test_chunk_that_does_not_fit(table: BlockTable) -> None:
    """The policy's refusal passes through."""
    with pytest.raises(InvalidRequest, match=r"window=6 .* chunk=6"):
        table.chunk(6)


# Abort


def test_abort_of_a_first_chunk(table: BlockTable, write) -> None:
    """Leaves no block."""
    chunk = table.chunk(3)
    write(chunk, 0.0)
    chunk.abort()
    assert (table.end, held(table), table.pool.stats().live) == (0, [], 0)


def test_abort_keeps_what_it_saw(table: BlockTable, roll, write) -> None:
    """Only frames that the chunk had pushed out are gone, and the same chunk can be tried again."""
    roll(table, 3)
    chunk = table.chunk(3)
    write(chunk, 90.0)
    chunk.abort()
    assert (table.end, held(table)) == (9, [0, 7, 8])
    roll(table, 1)
    assert keys(table) == {f: f for f in (0, 7, 8, 9, 10, 11)}


def test_a_smaller_chunk_after_an_abort(table: BlockTable, roll) -> None:
    """Would see a hole: refused by name, as is a reopen; a larger one is not."""
    roll(table, 3)
    table.chunk(3).abort()
    with pytest.raises(InvalidRequest, match=r"ending at frame 10 must see frames \[5, 6\]"):
        table.chunk(1)
    with pytest.raises(InvalidRequest, match=r"ending at frame 9 must see frames \[4, 5, 6\]"):
        table.reopen(2)
    table.chunk(4).abort()
    assert held(table) == [0, 8]


def test_abort_with_undo(table: BlockTable, roll, write) -> None:
    """Everything is as before, bitwise, and a smaller chunk is fine."""
    roll(table, 3)
    before = keys(table)
    chunk = table.chunk(3, undo=True)
    write(chunk, 90.0)
    assert table.pool.stats().free == 15
    chunk.abort()
    assert (keys(table), table.end) == (before, 9)
    roll(table, 1, n=1)
    assert keys(table) == {f: f for f in (0, 5, 6, 7, 8, 9)}
    assert table.pool.stats().free == 18


def test_commit_with_undo(table: BlockTable, roll, write) -> None:
    """Lets go of what it had held back."""
    roll(table, 3)
    with table.chunk(3, undo=True) as chunk:
        write(chunk, 0.0)
        chunk.commit()
    assert table.pool.stats().free == 18
    assert keys(table) == {f: f for f in (0, 7, 8, 9, 10, 11)}


# Reopen


def test_reopen_rewrites_in_place(table: BlockTable, roll, write) -> None:
    """A frame that nobody else holds keeps its slot; older frames are untouched."""
    roll(table, 3)
    slots = {f: block.slot for f, block in table.entries}
    with table.reopen(3) as chunk:
        assert (chunk.frames, chunk.meta.ordinals) == (range(6, 9), (0, 6, 7, 8, 4, 5))
        write(chunk, 50.0)
        chunk.commit()
    assert keys(table) == {0: 0, 4: 4, 5: 5, 6: 56, 7: 57, 8: 58}
    assert {f: block.slot for f, block in table.entries} == slots
    assert table.end == 9


def test_reopen_leaves_shared_frames_alone(table: BlockTable, roll, write) -> None:
    """A snapshot goes on seeing the old bytes, which have moved out of the lane."""
    roll(table, 3)
    old, before = table.snapshot(), keys(table)
    with table.reopen(3) as chunk:
        write(chunk, 50.0)
        chunk.commit()
    assert keys(table)[8] == 58
    table.rewind(old)
    assert keys(table) == before


def test_reopen_aborted(table: BlockTable, roll) -> None:
    """Drops the frames; the table goes on from before them."""
    roll(table, 2)
    table.reopen(3).abort()
    assert (table.end, held(table)) == (3, [0, 1, 2])
    roll(table, 1)
    assert held(table) == [0, 1, 2, 3, 4, 5]


def test_reopen_aborted_with_undo(table: BlockTable, roll, write) -> None:
    """Brings the old bytes back."""
    roll(table, 3)
    before = keys(table)
    chunk = table.reopen(5, undo=True)
    write(chunk, 50.0)
    chunk.abort()
    assert (keys(table), table.end) == (before, 9)
    roll(table, 1)
    assert keys(table) == {f: f for f in (0, 7, 8, 9, 10, 11)}


def test_reopen_reaches_to_the_window(table: BlockTable, roll) -> None:
    """`tail` says how far: not past the gap behind the sink."""
    roll(table, 2)
    assert table.tail == 6
    roll(table, 1)
    assert table.tail == 5
    for n in (0, 6):
        with pytest.raises(InvalidRequest, match="the last 5 frames"):
            table.reopen(n)


# Sharing


def test_fork_and_snapshot_cost_no_bytes(table: BlockTable, roll) -> None:
    """Only holders are counted."""
    roll(table, 3)
    free = table.pool.stats().free
    child, mark = table.fork(), table.snapshot()
    assert table.pool.stats().free == free
    assert child.entries == table.entries == mark.entries
    assert {block.ref for _, block in table.entries} == {3}
    assert child.lane is None


def test_branches_are_independent(table: BlockTable, roll, write) -> None:
    """Parent and child go on from the same past, each with its own future."""
    roll(table, 3)
    child = table.fork()
    for branch, x in ((child, 100.0), (table, 200.0), (child, 300.0)):
        with branch.chunk(3) as chunk:
            write(chunk, x)
            chunk.commit()
    assert keys(table) == {0: 0, 7: 7, 8: 8, 9: 209, 10: 210, 11: 211}
    assert keys(child) == {0: 0, 10: 110, 11: 111, 12: 312, 13: 313, 14: 314}


def test_a_fork_pays_with_its_first_chunk(table: BlockTable, roll) -> None:
    """Then it copies what it goes on seeing into a lane of its own."""
    roll(table, 3)
    child = table.fork()
    child.chunk(3)
    assert table.pool.stats().free == 24 - 12
    assert all(block.ref == 1 for _, block in child.entries)


def test_the_last_heir_moves_in(table: BlockTable, roll) -> None:
    """A fork whose parent has gone takes the blocks over: moved, not copied."""
    roll(table, 2)
    child = table.fork()
    table.close()
    blocks = [block for _, block in child.entries]
    child.chunk(1)
    assert [block for _, block in child.entries] == [blocks[0], *blocks[2:]]
    assert table.pool.stats().free == 18
    child.pool.check()


def test_a_fork_reads_in_the_same_order(table: BlockTable, roll) -> None:
    """Lane order follows from ordinals alone, so a branch's attention sums in the same order."""
    roll(table, 3)
    child, mark = table.fork(), table.snapshot()
    roll(table, 2)
    table.rewind(mark)
    assert child.chunk(3).meta.ordinals == table.chunk(3).meta.ordinals


def test_rewind(table: BlockTable, roll, write) -> None:
    """The past comes back bitwise, as often as wanted, and takes its lane places again."""
    roll(table, 3)
    mark, before = table.snapshot(), keys(table)
    for x in (10.0, 20.0):
        for _ in range(3):
            with table.chunk(3) as chunk:
                write(chunk, x)
                chunk.commit()
        table.rewind(mark)
        assert (keys(table), table.end) == (before, 9)
    mark.release()
    with table.chunk(3) as chunk:
        write(chunk, 0.0)
        assert chunk.kv(0)[0][::3, 0, 0].tolist() == [0, 11, 7, 8, 9, 10]
        chunk.commit()
    assert table.pool.stats().free == 18


def test_snapshots_are_checked(table: BlockTable, pool: BlockPool, spec: KVSpec, roll) -> None:
    """Not a released one, not one of another pool or policy."""
    roll(table, 1)
    mark = table.snapshot()
    for other in (
        BlockTable(pool, SinkWindow(1, 7)),
        BlockTable(BlockPool(spec, 8), SinkWindow(1, 6)),
    ):
        with pytest.raises(InvalidRequest, match="another pool or under another policy"):
            other.rewind(mark)
    mark.release()
    mark.release()
    with pytest.raises(InvalidRequest, match="released"):
        table.rewind(mark)


def test_a_copy_holds_for_itself(table: BlockTable, roll) -> None:
    """It outlives the snapshot it was made from, which can't be copied any more once released."""
    roll(table, 2)
    mark = table.snapshot()
    twin = mark.copy()
    mark.release()
    roll(table, 3)
    table.rewind(twin)
    assert keys(table) == {f: f for f in range(6)}
    with pytest.raises(InvalidRequest, match="frame 6 was released"):
        mark.copy()


def test_close(table: BlockTable, roll) -> None:
    """Gives everything back, also with a chunk pending, and can be called again."""
    roll(table, 2)
    chunk = table.chunk(3, undo=True)
    table.close()
    table.close()
    assert table.pool.stats().free == 24
    chunk.abort()
    for call in (lambda: table.chunk(1), table.fork, table.snapshot):
        with pytest.raises(InvalidRequest, match="closed"):
            call()
    table.pool.check()


def test_a_snapshot_outlives_its_table(table: BlockTable, roll) -> None:
    """Its blocks stay where they are after the lane was dissolved, until it is released."""
    roll(table, 2)
    mark, policy = table.snapshot(), table.policy
    table.close()
    assert table.pool.stats().free == 18
    heir = BlockTable(table.pool, policy)
    heir.rewind(mark)
    mark.release()
    roll(heir, 1)
    assert keys(heir) == {f: f for f in (0, 4, 5, 6, 7, 8)}
    heir.close()
    assert table.pool.stats().free == 24


# A full pool


def first_chunk(table: BlockTable, roll: Callable[..., None]) -> Callable[[], object]:
    """Needs a lane."""
    return lambda: table.chunk(3)


def pinned_by_a_fork(table: BlockTable, roll: Callable[..., None]) -> Callable[[], object]:
    """Needs room for the frames that the fork still sees."""
    roll(table, 2)
    table.fork()
    return lambda: table.chunk(3)


def with_undo(table: BlockTable, roll: Callable[..., None]) -> Callable[[], object]:
    """Needs room for the frames that are held back."""
    roll(table, 2)
    return lambda: table.chunk(3, undo=True)


def reopened(table: BlockTable, roll: Callable[..., None]) -> Callable[[], object]:
    """Needs room for the frames that a snapshot holds."""
    roll(table, 2)
    table.snapshot()
    return lambda: table.reopen(2)


def first_of_a_fork(table: BlockTable, roll: Callable[..., None]) -> Callable[[], object]:
    """Needs a lane of its own."""
    roll(table, 2)
    child = table.fork()
    return lambda: child.chunk(3)


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize(
    "need", [first_chunk, pinned_by_a_fork, with_undo, reopened, first_of_a_fork]
)
def test_full_pool_changes_nothing(spec: KVSpec, roll, need, shadow: bool) -> None:
    """With one slot too few nothing changes, bytes included; with one more the same call works."""
    pool = BlockPool(spec, 24)
    table = BlockTable(pool, SinkWindow(1, 6, shadow_sink=shadow))
    call = need(table, roll)
    ballast = pool.alloc(pool.stats().free)
    for left in range(len(ballast)):
        before = trace(pool, table)
        try:
            call()
        except PoolFull:
            assert trace(pool, table) == before
            pool.release(ballast[left])
        else:
            break
    else:
        pytest.fail("the call fails however much room there is")
    assert left > 0, "this call needs room"
    pool.check()


def test_full_for_the_sink(spec: KVSpec, roll) -> None:
    """A shadowed sink needs slots beside the lane."""
    pool = BlockPool(spec, 7)
    table = BlockTable(pool, SinkWindow(2, 6, shadow_sink=True))
    with pytest.raises(PoolFull, match="8 slots: 7 of 7"):
        table.chunk(3)
    assert (table.lane, pool.stats().free) == (None, 7)
    roll(BlockTable(pool, SinkWindow(1, 6, shadow_sink=True)), 3)


def test_closing_makes_room(table: BlockTable, spec: KVSpec, roll) -> None:
    """After PoolFull, what another table gives back can be used at once."""
    others = [BlockTable(table.pool, table.policy) for _ in range(4)]
    for other in others:
        roll(other, 2)
    with pytest.raises(PoolFull, match="lanes: 4, with 24 slots"):
        table.chunk(3)
    others[2].close()
    roll(table, 3)
    assert keys(table) == {f: f for f in (0, 4, 5, 6, 7, 8)}


# Threads


def test_sessions_on_several_threads(spec: KVSpec, roll, write) -> None:
    """Each sees its own frames, and the pool's accounts stay right."""
    pool = BlockPool(spec, 80)
    parent = BlockTable(pool, SinkWindow(1, 6))
    roll(parent, 2)
    branches = [parent.fork() for _ in range(4)]
    wrong: list[object] = []

    def live(table: BlockTable, x: float) -> None:
        marks = []
        for _ in range(20):
            with table.chunk(2) as chunk:
                write(chunk, x)
                expected = [f + (x if f >= 6 else 0) for f in chunk.meta.ordinals]
                got = chunk.kv(0)[0][::3, 0, 0].tolist()
                if got != expected:
                    wrong.append((expected, got))
                chunk.commit()
            marks.append(table.snapshot())
            if len(marks) > 2:
                marks.pop(0).release()
        for mark in marks:
            mark.release()

    threads = [
        threading.Thread(target=live, args=(table, 100.0 * index))
        for index, table in enumerate(branches)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    pool.check()
    for table in (parent, *branches):
        table.close()
    assert pool.stats().free == 80


def test_values_follow_keys(table: BlockTable, roll) -> None:
    """Wherever blocks go, V goes with K, in every layer."""
    roll(table, 3)
    mark = table.snapshot()
    roll(table, 2)
    table.rewind(mark)
    chunk = table.chunk(3)
    for layer in range(table.pool.spec.num_layers):
        k, v = chunk.kv(layer)
        old = [i for i, f in enumerate(chunk.meta.ordinals) if f < 9]
        for index in old:
            cut = slice(index * 3, index * 3 + 3)
            assert torch.equal(v[cut], -k[cut])


class _Kept:
    """A block's bytes outside the pool; `lost` ones can't be read."""

    def __init__(self, pool: BlockPool, block: Block, lost: bool = False) -> None:
        self.payload, self.lost = bytearray(pool.payload_bytes), lost
        pool.read(block, memoryview(self.payload))
        pool.unload(block, self)

    def read(self, out: memoryview) -> None:
        if self.lost:
            raise TierError("lost")
        out[:] = self.payload

    def forget(self) -> None:
        """Nothing to free."""


@pytest.mark.parametrize("shadow", [False, True])
def test_parked_and_back_in_a_pool_of_its_own_size(spec, roll, shadow: bool) -> None:
    """A parked table whose blocks all left comes back into exactly the slots that it had."""
    pool = BlockPool(spec, 6 + shadow)
    table = BlockTable(pool, SinkWindow(1, 6, shadow_sink=shadow))
    roll(table, 4, n=2)
    before = [(o, pool.k[1][b.slot].clone()) for o, b in table.entries]
    table.park()
    for _, block in table.entries:
        _Kept(pool, block)
    assert pool.stats().free == len(pool._blocks)
    with table.chunk(2) as chunk:
        seen = {o: pool.k[1][b.slot] for o, b in chunk.blocks.items()}
        assert list(seen) == [0, *range(5, 10)]
        for ordinal, k in before:
            if ordinal in seen:
                assert torch.equal(seen[ordinal], k), ordinal
    pool.check()


def test_a_lost_block_leaves_the_table(pool: BlockPool, roll) -> None:
    """A chunk that can't see what it must see is not begun; a pool's lane is not kept for it."""
    table = BlockTable(pool, SinkWindow(1, 6))
    roll(table, 2)
    table.park()
    entries = table.entries
    _Kept(pool, entries[3][1])
    _Kept(pool, entries[4][1], lost=True)
    for _ in range(2):
        with pytest.raises(TierError, match="lost"):
            table.chunk(3)
    assert table.entries == entries and table.lane is None and pool.stats().lanes == 0
    pool.check()
