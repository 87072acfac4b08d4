"""Slots, handles and bytes."""

from __future__ import annotations

import pytest
import torch

from streamgen.cache import BlockPool, KVSpec
from streamgen.errors import InvalidRequest, PoolFull


def mark(pool: BlockPool, slot: int, x: float) -> None:
    """Fill a slot with numbers that tell K from V and one layer from another."""
    for layer in range(pool.spec.num_layers):
        pool.k[layer][slot].fill_(x + layer)
        pool.v[layer][slot].fill_(-x - layer)


def marked(pool: BlockPool, slot: int, x: float) -> bool:
    """Whether `mark` wrote what lies there, in all layers, K and V."""
    return all(
        bool((pool.k[layer][slot] == x + layer).all() and (pool.v[layer][slot] == -x - layer).all())
        for layer in range(pool.spec.num_layers)
    )


def test_storage_is_the_spec(pool: BlockPool, spec: KVSpec) -> None:
    """K and V of every layer, separately allocated, and as many bytes as the spec says."""
    tensors = [*pool.k, *pool.v]
    assert {tuple(x.shape) for x in tensors} == {(24, 3, 2, 4)}
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == 4
    assert sum(x.nbytes for x in tensors) == 24 * spec.block_bytes == pool.stats().bytes


def test_rows_are_views(pool: BlockPool) -> None:
    """Neighbouring slots of a layer are one view."""
    k, v = pool.rows(1, slot=2, count=3)
    assert k.shape == v.shape == (9, 2, 4)
    assert (k.data_ptr(), v.data_ptr()) == (pool.k[1][2].data_ptr(), pool.v[1][2].data_ptr())


def test_lanes_from_below_blocks_from_above(pool: BlockPool) -> None:
    """So that blocks outside lanes don't cut up the runs that lanes need."""
    assert pool.reserve(5).base == 0
    assert [block.slot for block in pool.alloc(3)] == [21, 22, 23]
    assert pool.reserve(5).base == 5
    assert pool.stats().free == 24 - 13


def test_reserve_takes_the_lowest_hole_that_fits(pool: BlockPool) -> None:
    """A dissolved lane is used again if it is long enough."""
    small, large, _ = pool.reserve(2), pool.reserve(4), pool.reserve(2)
    pool.dissolve(small)
    pool.dissolve(large)
    pool.reserve(1)
    assert pool.reserve(5).base == 1
    pool.check()


def test_dissolve_leaves_live_blocks(pool: BlockPool) -> None:
    """A block in a dissolved lane stays; its slot is free when it dies, the others at once."""
    lane = pool.reserve(6)
    block = pool.put(lane.base + 2)
    pool.dissolve(lane)
    assert pool.stats().free == 23
    assert pool.reserve(6).base == 3
    pool.release(block)
    assert (pool.stats().free, block.slot) == (18, -1)
    pool.check()


def test_a_lane_keeps_its_empty_slots(pool: BlockPool) -> None:
    """A block that dies in a lane leaves its slot to the lane."""
    lane = pool.reserve(4)
    pool.release(pool.put(lane.base))
    assert (pool.stats().free, pool.stats().live) == (20, 0)


def test_alloc_takes_what_there_is(pool: BlockPool) -> None:
    """Without a long enough run, scattered slots do."""
    blocks = pool.alloc(24)
    for block in blocks[::2]:
        pool.release(block)
    assert [block.slot for block in pool.alloc(12)] == list(range(0, 24, 2))


def test_move_carries_all_holders(pool: BlockPool) -> None:
    """All bytes go along and the old slot is free; the handle is the same."""
    (block,) = pool.alloc(1)
    mark(pool, block.slot, 7)
    block.sealed = True
    pool.retain(block)
    pool.move(block, 4)
    assert (block.slot, block.ref, pool.at(4), pool.at(23)) == (4, 2, block, None)
    assert marked(pool, 4, 7)
    pool.check()


def test_copy_is_private(pool: BlockPool) -> None:
    """A copy has the same bytes and a life of its own."""
    (block,) = pool.alloc(1)
    mark(pool, block.slot, 7)
    twin = pool.copy(block, 0)
    pool.release(block)
    assert (twin.slot, twin.ref, twin.sealed) == (0, 1, True)
    assert marked(pool, 0, 7)
    pool.check()


def test_release_frees_with_the_last_holder(pool: BlockPool) -> None:
    """Not earlier."""
    (block,) = pool.alloc(1)
    pool.retain(block)
    pool.release(block)
    assert pool.stats().free == 23
    pool.release(block)
    assert pool.stats().free == 24


def test_dead_blocks_stay_dead(pool: BlockPool) -> None:
    """Releasing or retaining a dead block is a fault of ours."""
    (block,) = pool.alloc(1)
    pool.release(block)
    with pytest.raises(AssertionError, match="dead"):
        pool.release(block)
    with pytest.raises(AssertionError, match="dead"):
        pool.retain(block)


def test_a_slot_has_one_owner(pool: BlockPool) -> None:
    """Putting a block over a live one is a fault of ours."""
    pool.put(3)
    with pytest.raises(AssertionError, match="slot 3 holds"):
        pool.put(3)


def test_stats(pool: BlockPool) -> None:
    """Counts by hand: a lane of 5 with one block, two blocks outside, one of them shared."""
    pool.put(pool.reserve(5).base)
    pool.retain(pool.alloc(2)[0])
    s = pool.stats()
    assert (s.total, s.free, s.lanes, s.reserved, s.live, s.shared) == (24, 17, 1, 5, 3, 1)


def test_full_says_who_holds_the_memory(pool: BlockPool) -> None:
    """Lanes, blocks and shared blocks are counted in the message, and nothing has changed."""
    pool.reserve(10)
    block = pool.alloc(12)[0]
    block.sealed = True
    pool.retain(block)
    before = pool.stats()
    text = r"2 of 24 .*lanes: 1, with 10 slots; live blocks: 12; shared by .*: 1"
    for call in (pool.reserve, pool.alloc):
        with pytest.raises(PoolFull, match=text):
            call(3)
    assert pool.stats() == before
    pool.check()


def test_full_for_want_of_a_run(pool: BlockPool) -> None:
    """A lane needs neighbours; single blocks don't."""
    blocks = pool.alloc(24)
    for block in blocks[::2]:
        pool.release(block)
    with pytest.raises(PoolFull, match="2 neighbouring slots: 12 of 24"):
        pool.reserve(2)
    assert len(pool.alloc(12)) == 12


def test_check_notices(pool: BlockPool) -> None:
    """A handle that points elsewhere, a shared pending block, a stray flag."""
    (block,) = pool.alloc(1)
    block.slot = 0
    with pytest.raises(AssertionError):
        pool.check()
    block.slot, block.ref = 23, 2
    with pytest.raises(AssertionError, match="pending"):
        pool.check()
    block.ref = 1
    pool._flags[5] = 1
    with pytest.raises(AssertionError, match="flags"):
        pool.check()


def test_a_pool_made_in_inference_mode(spec: KVSpec) -> None:
    """Can be written outside of it too, as when a pipeline builds it at its first step."""
    with torch.inference_mode():
        pool = BlockPool(spec, 2)
    pool.k[0][0].fill_(1.0)


def test_empty_pool(spec: KVSpec) -> None:
    """A pool has at least one block."""
    with pytest.raises(InvalidRequest, match="num_blocks=0"):
        BlockPool(spec, 0)
