"""Blocks go down and come back: the order, the limits, and what happens when bytes are lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamgen.cache import BlockPool, BlockTable, Chunk, KVSpec, SinkWindow
from streamgen.cache.pool import Block
from streamgen.cache.tier import DiskTier, HostTier, PooledTier, Tiers
from streamgen.cache.tier.base import BaseTier
from streamgen.cache.tokens import TokenTable
from streamgen.errors import InvalidRequest, PoolFull, TierError

SPEC = KVSpec(num_layers=2, kv_heads=2, head_dim=4, block_tokens=3)
SIZE = SPEC.block_bytes

Make = Callable[..., BaseTier]
Damage = Callable[[BaseTier, bytes, Callable[[bytes], bytes]], None]
Write = Callable[[Chunk, float], None]


def flip(data: bytes) -> bytes:
    """One bit of the payload is another."""
    return data[:-1] + bytes([data[-1] ^ 1])


def new(pool: BlockPool, x: float) -> Block:
    """A sealed block full of `x` in all that the pool stores."""
    (block,) = pool.alloc(1)
    for tensor in pool._storage:
        tensor[block.slot] = torch.full_like(tensor[block.slot], x, dtype=torch.float32).to(
            tensor.dtype
        )
    block.sealed = True
    return block


def content(pool: BlockPool, block: Block) -> bytes:
    """The bytes of a block in the pool."""
    out = bytearray(pool.payload_bytes)
    pool.read(block, memoryview(out))
    return bytes(out)


def value(pool: BlockPool, block: Block) -> float:
    """The `x` of `new`, if all bytes are still right."""
    assert block.slot >= 0 and block.away is None
    (x,) = {float(number) for t in pool._storage for number in t[block.slot].flatten().unique()}
    return x


def where(tiers: Tiers, block: Block) -> str:
    """The name of what has the bytes of a block, up to its first blank."""
    return repr(block.away).split(" ")[0] if block.away else "pool"


def counts(tiers: Tiers) -> list[int]:
    """Entries of every tier."""
    return [stats.entries for stats in tiers.stats()]


# Down and back


@pytest.mark.parametrize("kind", ["host", "disk", "folder", "memory"])
def test_round_trip(makers: dict[str, Make], kind: str) -> None:
    """Every byte of a block comes back, and nothing of it stays behind."""
    pool = BlockPool(SPEC, 4)
    tiers = Tiers(pool, [makers[kind]()])
    blocks = pool.alloc(4)
    for tensor in pool._storage:
        tensor.view(torch.int32).random_()  # every pattern of bits, NaNs too
    for block in blocks:
        block.sealed = True
    before = [content(pool, block) for block in blocks]
    for block in blocks:
        tiers.demote(block)
        tiers.demote(block)  # it is away: nothing to do
    assert pool.stats().free == 4 and counts(tiers) == [4]
    for tensor in pool._storage:
        tensor.zero_()
    for block in reversed(blocks):
        tiers.promote(block)
        tiers.promote(block)
    assert [content(pool, block) for block in blocks] == before
    assert counts(tiers) == [0] and tiers.stats()[0].bytes == 0
    pool.check()


@pytest.mark.parametrize("codec", ["raw", "fp8_e4m3", "int8", "nvfp4"])
def test_any_pool(codec: str) -> None:
    """Whatever a pool stores, codes and scales: what goes down is what comes back."""
    try:
        spec = KVSpec(num_layers=2, kv_heads=1, head_dim=16, block_tokens=4, codec=codec)
    except InvalidRequest as error:
        pytest.skip(f"no such codec here: {error}")
    pool = BlockPool(spec, 3)
    tiers = Tiers(pool, [HostTier(10 * pool.payload_bytes)])
    for tensor in pool._storage:
        tensor.copy_(torch.arange(tensor.numel()).remainder(5).view(tensor.shape).to(tensor.dtype))
    (block,) = pool.alloc(1)
    block.sealed = True
    before = content(pool, block)
    tiers.demote(block)
    pool.alloc(1)
    tiers.promote(block)
    assert block.slot != 2 and content(pool, block) == before


def test_all_holders_follow(pool: BlockPool) -> None:
    """A demoted block is one handle still; it dies away, with its bytes, when nobody holds it."""
    tiers = Tiers(pool, [HostTier(9 * SIZE)])
    block, other = new(pool, 1), new(pool, 2)
    pool.retain(block)
    tiers.demote(block)
    tiers.demote(other)
    pool.release(block)
    tiers.promote(block)
    assert (block.ref, value(pool, block)) == (1, 1.0)
    pool.release(other)
    assert counts(tiers) == [0] and other.away is None
    pool.check()


def test_what_may_not_leave(pool: BlockPool) -> None:
    """A pending block, one in a lane, one in use: refused, and nothing has changed."""
    tiers = Tiers(pool, [HostTier(9 * SIZE)])
    (pending,) = pool.alloc(1)
    lane = pool.reserve(2)
    resident = pool.put(lane.base)
    resident.sealed = True
    used = new(pool, 3)
    with tiers.using([used, used]), tiers.using([used]):
        for block in (pending, resident, used):
            with pytest.raises(InvalidRequest, match="can't be demoted"):
                tiers.demote(block)
        with pytest.raises(PoolFull):
            tiers.make_room(22)
    assert counts(tiers) == [0] and tiers.pool.stats().live == 3
    tiers.demote(used)
    assert where(tiers, used) == "host"


def test_tiers_are_needed(pool: BlockPool) -> None:
    """None at all is refused."""
    with pytest.raises(InvalidRequest, match="at least one"):
        Tiers(pool, [])


# The tiering walk of the KV-cache explainer: HBM 3, DRAM 4, NVMe 6, pooled 8 blocks


class Walk:
    """The hierarchy as four lists of users, each with the least recently used first."""

    def __init__(self, capacities: list[int]) -> None:
        self.capacities = capacities
        self.levels: list[list[int]] = [[] for _ in capacities]

    def visit(self, user: int) -> None:
        """A user comes, or comes back: to HBM; what is too much goes down, level by level."""
        for level in self.levels:
            if user in level:
                level.remove(user)
        self.levels[0].append(user)
        for level, capacity in enumerate(self.capacities):
            if len(self.levels[level]) > capacity:
                oldest = self.levels[level].pop(0)
                if level + 1 < len(self.levels):
                    self.levels[level + 1].append(oldest)


@pytest.mark.parametrize("nvme", [True, False], ids=["nvme", "no nvme"])
def test_walk(memory_path: Path, fingerprint: bytes, nvme: bool) -> None:
    """Demotion of the least recently used instead of deletion, promotion of who returns: 400
    visits give the same hierarchy as four lists, with every block bitwise right. All 21 places
    are taken in the end, so that a return can only swap places."""
    capacities = [3, 4, 6, 8] if nvme else [3, 4, 8]
    pool = BlockPool(SPEC, 3)
    disk = [DiskTier(memory_path, fingerprint, 6 * SIZE)] if nvme else []
    pooled = PooledTier(f"memory://{memory_path.name}", fingerprint, 8 * SIZE)
    tiers = Tiers(pool, [HostTier(4 * SIZE), *disk, pooled])
    walk, blocks = Walk(capacities), dict[int, Block]()
    generator = torch.Generator().manual_seed(0)
    for step in range(400):
        known = min(sum(capacities), 1 + step // 4)  # now and then somebody new
        user = int(torch.randint(known, (1,), generator=generator))
        if user in blocks:
            tiers.promote(blocks[user])
        else:
            tiers.make_room(1)
            blocks[user] = new(pool, user)
            tiers.touch([blocks[user]])
        walk.visit(user)
        assert value(pool, blocks[user]) == user
        levels: list[list[int]] = [[] for _ in capacities]
        for name, block in blocks.items():
            levels[1 + block.away.level if block.away else 0].append(name)
        assert [sorted(x) for x in levels] == [sorted(x) for x in walk.levels]
    assert len(blocks) == sum(capacities) and counts(tiers) == capacities[1:]

    # One more than there are places: every block is held, so nothing may go.
    with pytest.raises(TierError, match=r"no tier takes .*: host memory is full: .*; pooled tier"):
        tiers.make_room(1)
    assert [stats.entries for stats in tiers.stats()] == capacities[1:]
    pool.release(blocks[walk.levels[-1][0]])
    tiers.make_room(1)  # one user has left for good, and all fit again
    pool.check()


def test_walk_deletes_at_the_end(pool: BlockPool) -> None:
    """What nobody holds falls off the last tier, the least recently used first."""
    tiers = Tiers(pool, [HostTier(2 * SIZE), PooledTier("memory://end", bytes(16), 3 * SIZE)])
    block = new(pool, 0)
    for x in range(6):
        tiers.store(bytes([x]), block)
        assert tiers.has(b"\0")  # which counts as a use
    assert [x for x in range(6) if tiers.has(bytes([x]))] == [0, 2, 3, 4, 5]
    assert counts(tiers) == [2, 3]


# Limits and faults


def test_full_says_what_is_full(pool: BlockPool, tmp_path: Path, fingerprint: bytes) -> None:
    """Every tier is named with its bytes; the block stays, and once one has gone, it fits."""
    tiers = Tiers(pool, [HostTier(SIZE), DiskTier(tmp_path, fingerprint, 2 * SIZE)])
    blocks = [new(pool, x) for x in range(4)]
    for block in blocks[:3]:
        tiers.demote(block)
    with pytest.raises(TierError) as caught:
        tiers.demote(blocks[3])
    assert str(caught.value) == (
        f"no tier takes a block of {SIZE} bytes: host memory is full: blocks in use take {SIZE} of "
        f"{SIZE} bytes; disk tier {tmp_path} is full: blocks in use take {2 * SIZE:,} of "
        f"{2 * SIZE:,} bytes"
    )
    assert value(pool, blocks[3]) == 3 and counts(tiers) == [1, 2]
    pool.release(blocks[0])
    tiers.demote(blocks[3])
    for x, block in enumerate(blocks[1:], 1):
        tiers.promote(block)
        assert value(pool, block) == x


def test_a_block_larger_than_a_tier(pool: BlockPool) -> None:
    """It goes to the first tier that is large enough, without emptying the smaller ones."""
    tiers = Tiers(pool, [HostTier(SIZE - 1), HostTier(SIZE)])
    block = new(pool, 1)
    tiers.demote(block)
    assert counts(tiers) == [0, 1]
    with pytest.raises(TierError, match=f"host memory holds {SIZE - 1} bytes in all; host memory"):
        tiers.demote(new(pool, 2))


def test_unheld_entries_make_way(pool: BlockPool) -> None:
    """In a hierarchy full of held blocks, what nobody needs goes, wherever it is."""
    tiers = Tiers(pool, [HostTier(2 * SIZE), HostTier(SIZE)])
    first, second, third = (new(pool, x) for x in range(3))
    tiers.demote(first)
    tiers.store(b"copy", second)
    tiers.demote(second)  # `first` goes down to make room
    tiers.demote(third)  # nothing can go down any more: the copy is deleted
    assert not tiers.has(b"copy") and counts(tiers) == [2, 1]
    for x, block in enumerate((first, second, third)):
        tiers.promote(block)
        assert value(pool, block) == x


def test_a_failing_tier_is_passed_over(
    pool: BlockPool, tmp_path: Path, fingerprint: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a disk is full, blocks go past it; once it works again, they go there."""
    disk = DiskTier(tmp_path, fingerprint)
    tiers = Tiers(pool, [HostTier(SIZE), disk, PooledTier("memory://past", fingerprint)])
    blocks = [new(pool, x) for x in range(4)]

    def fail(*_: object) -> None:
        raise TierError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "_write", fail)
        for block in blocks[:3]:
            tiers.demote(block)
    assert counts(tiers) == [1, 0, 2]
    tiers.demote(blocks[3])
    assert counts(tiers) == [1, 1, 2]
    for x, block in enumerate(blocks):
        tiers.promote(block)
        assert value(pool, block) == x


@pytest.mark.parametrize("kind", ["host", "disk", "folder", "memory"])
def test_damaged_block_stays_away(makers: dict[str, Make], damage: Damage, kind: str) -> None:
    """It never comes back wrong: each try is an error; others are not affected; it can die."""
    pool = BlockPool(SPEC, 3)
    tiers = Tiers(pool, [makers[kind]()])
    bad, good = new(pool, 1), new(pool, 2)
    for block in (bad, good):
        tiers.demote(block)
    assert bad.away
    damage(tiers.tiers[0], bad.away.key, flip)
    for reason in ("the payload is damaged", "its bytes were lost"):
        with pytest.raises(TierError, match=f"^a block can't come back: .*{reason}$"):
            tiers.promote(bad)
        assert bad.slot == -1 and pool.stats().free == 3
    assert repr(bad.away) == "lost" and tiers.stats()[0].corrupt == 1
    tiers.promote(good)
    assert value(pool, good) == 2
    pool.release(bad)
    assert counts(tiers) == [0]
    pool.check()


def test_damage_found_on_the_way_down(pool: BlockPool, damage: Damage) -> None:
    """An entry that turns out damaged when it should go down is lost, not copied."""
    tiers = Tiers(pool, [HostTier(SIZE), HostTier(5 * SIZE)])
    bad, good = new(pool, 1), new(pool, 2)
    tiers.demote(bad)
    assert bad.away
    damage(tiers.tiers[0], bad.away.key, flip)
    tiers.demote(good)
    assert counts(tiers) == [1, 0] and repr(bad.away) == "lost"
    with pytest.raises(TierError, match="lost"):
        tiers.promote(bad)
    tiers.promote(good)
    assert value(pool, good) == 2


def test_swap_that_fails(monkeypatch: pytest.MonkeyPatch, fingerprint: bytes) -> None:
    """If nothing can leave a full pool, or no tier takes it, the block that was to come is kept."""
    pool = BlockPool(SPEC, 1)
    host = HostTier(SIZE)
    tiers = Tiers(pool, [host])
    away = new(pool, 1)
    tiers.demote(away)
    resident = new(pool, 2)
    with tiers.using([resident]), pytest.raises(PoolFull):
        tiers.promote(away)
    assert where(tiers, away) == "host" and counts(tiers) == [1]

    def fail(*_: object) -> None:
        raise TierError("host memory is out of order")

    with monkeypatch.context() as patch:
        patch.setattr(host, "_write", fail)
        with pytest.raises(TierError, match="out of order"):
            tiers.promote(away)
    assert repr(away.away) == "in hand" and value(pool, resident) == 2
    tiers.promote(away)
    assert value(pool, away) == 1 and where(tiers, resident) == "host"
    pool.check()


# Room


def test_make_room_takes_the_coldest(pool: BlockPool) -> None:
    """What was never touched goes first, then the least recently touched; no more than needed."""
    tiers = Tiers(pool, [HostTier(24 * SIZE)])
    blocks = [new(pool, x) for x in range(24)]
    tiers.touch(blocks[:23])
    tiers.touch([blocks[0]])
    order = [23, *range(1, 23), 0]
    for free in range(1, 25):
        tiers.make_room(free)
        assert {x for x, block in enumerate(blocks) if block.away} == set(order[:free])
    with pytest.raises(PoolFull, match="25 slots"):
        tiers.make_room(25)


def test_what_came_back_is_warm(pool: BlockPool) -> None:
    """A block that its table fetched counts as used at that moment."""
    tiers = Tiers(pool, [HostTier(24 * SIZE)])
    blocks = [new(pool, x) for x in range(24)]
    tiers.touch(blocks)
    tiers.demote(blocks[0])
    pool.load(blocks[0], pool.spare(1)[0])  # as BlockTable.chunk does
    tiers.make_room(23)
    assert [x for x, block in enumerate(blocks) if not block.away] == [0]


def test_make_room_for_a_lane(pool: BlockPool) -> None:
    """Blocks leave until the free slots are neighbours, however many it takes."""
    tiers = Tiers(pool, [HostTier(24 * SIZE)])
    blocks = [new(pool, x) for x in range(24)]
    for block in blocks[::2]:
        pool.release(block)
    assert pool.stats().free == 12
    tiers.make_room(0, run=4)
    assert pool.reserve(4) and pool.stats().live >= 9


def test_the_dead_are_forgotten(pool: BlockPool) -> None:
    """Touching blocks that die does not pile up."""
    tiers = Tiers(pool, [HostTier(SIZE)])
    for x in range(200):
        block = new(pool, x)
        tiers.touch([block])
        pool.release(block)
    assert len(tiers._used) <= 2 * 24 + 1


# Tables


def test_park_and_resume(write: Write, fingerprint: bytes, tmp_path: Path) -> None:
    """A session goes down whole and comes back bitwise, though others had its slots meanwhile."""
    pool = BlockPool(SPEC, 12)
    tiers = Tiers(pool, [HostTier(2 * SIZE), DiskTier(tmp_path, fingerprint)])
    table = BlockTable(pool, SinkWindow(1, 5, shadow_sink=True))

    def step(table: BlockTable, x: float) -> None:
        with table.chunk(1) as chunk:
            write(chunk, x)
            chunk.commit()

    for _ in range(7):
        step(table, 0.0)
    before = {o: content(pool, block) for o, block in table.entries}
    tiers.park(table)
    assert pool.stats().free == 12 and sum(counts(tiers)) == len(before)
    other = BlockTable(pool, SinkWindow(1, 5))
    for _ in range(7):
        step(other, 50.0)
    tiers.park(other)
    tiers.resume(table, lane=5)
    assert {o: content(pool, block) for o, block in table.entries} == before
    step(table, 0.0)
    assert dict(table.entries)[0] and pool.stats().lanes == 1
    table.close()
    other.close()
    assert counts(tiers) == [0, 0] and pool.stats().free == 12
    pool.check()


def test_park_leaves_what_others_use(write: Write) -> None:
    """A block that lies in the lane of a fork stays there, and both go on."""
    pool = BlockPool(SPEC, 20)
    tiers = Tiers(pool, [HostTier(20 * SIZE)])
    table = BlockTable(pool, SinkWindow(1, 4))
    with table.chunk(2) as chunk:
        write(chunk, 0.0)
        chunk.commit()
    fork = table.fork()
    tiers.park(fork)  # all its blocks lie in the lane of `table`
    assert counts(tiers) == [0]
    tiers.park(table)
    assert counts(tiers) == [2]
    for x in (table, fork):
        with x.chunk(1) as chunk:
            assert torch.equal(chunk.kv(0)[0][3], torch.full((2, 4), 1.0))


def test_lost_frames_leave_a_table_as_it_was(pool: BlockPool, write: Write, damage: Damage) -> None:
    """A chunk that must see a damaged frame is refused; the table and the pool are whole."""
    tiers = Tiers(pool, [HostTier(20 * SIZE)])
    table = BlockTable(pool, SinkWindow(1, 4))
    for _ in range(3):
        with table.chunk(1) as chunk:
            write(chunk, 0.0)
            chunk.commit()
    tiers.park(table)
    entries = table.entries
    damage(tiers.tiers[0], entries[1][1].away.key, flip)  # type: ignore[union-attr]
    for _ in range(2):
        with pytest.raises(TierError, match="can't come back"):
            table.chunk(1)
        assert (table.entries, table.end, table.lane) == (entries, 3, None)
        pool.check()
    table.close()
    assert pool.stats().free == 24 and counts(tiers) == [0]


def test_swap_a_sequence(pool: BlockPool) -> None:
    """A sequence of tokens (PagedAttention) leaves whole or not at all, and comes back bitwise."""
    table = TokenTable(pool)
    x = torch.arange(2 * 2 * 10 * 2 * 4, dtype=torch.float32).view(2, 2, 10, 2, 4)
    table.append(x[:, 0], x[:, 1])
    before = [content(pool, block) for block in table.blocks]
    small = Tiers(pool, [HostTier(3 * SIZE)])
    with pytest.raises(TierError, match="full"):
        table.swap_out(small.keep)
    assert counts(small) == [0] and [content(pool, block) for block in table.blocks] == before
    tiers = Tiers(pool, [HostTier(SIZE), HostTier(3 * SIZE)])
    assert table.swap_out(tiers.keep) == 4
    assert pool.stats().free == 24 and counts(tiers) == [1, 3]
    assert table.swap_in() == 4
    assert [content(pool, block) for block in table.blocks] == before and counts(tiers) == [0, 0]


# Bytes under keys


@pytest.mark.parametrize("kind", ["host", "disk", "folder", "memory"])
def test_store_and_fetch(makers: dict[str, Make], kind: str) -> None:
    """A copy under a key outlives the block; what is fetched is a new sealed block."""
    pool = BlockPool(SPEC, 2)
    tiers = Tiers(pool, [makers[kind]()])
    block = new(pool, 5)
    assert tiers.fetch(b"key") is None and not tiers.has(b"key")
    tiers.store(b"key", block)
    tiers.store(b"key", block)
    pool.release(block)
    first, second = tiers.fetch(b"key"), tiers.fetch(b"key")
    assert first and second and first is not second
    assert (first.ref, first.sealed, value(pool, first), value(pool, second)) == (1, True, 5, 5)
    assert tiers.has(b"key") and counts(tiers) == [1]
    tiers.forget(b"key")
    tiers.forget(b"key")
    assert tiers.fetch(b"key") is None and not tiers.has(b"key") and counts(tiers) == [0]
    pool.check()


def test_store_refuses(pool: BlockPool) -> None:
    """Pending blocks, keys that are too long."""
    tiers = Tiers(pool, [HostTier(9 * SIZE)])
    with pytest.raises(InvalidRequest, match="only sealed"):
        tiers.store(b"key", pool.alloc(1)[0])
    with pytest.raises(InvalidRequest, match="takes 1 to 64"):
        tiers.store(bytes(64), new(pool, 1))


def test_store_what_is_away(pool: BlockPool) -> None:
    """A block need not be in the pool to be stored, and stays where it is."""
    tiers = Tiers(pool, [HostTier(9 * SIZE)])
    block = new(pool, 5)
    tiers.demote(block)
    tiers.store(b"key", block)
    assert where(tiers, block) == "host" and counts(tiers) == [2]
    copy = tiers.fetch(b"key")
    assert copy and value(pool, copy) == 5


def test_fetch_makes_room() -> None:
    """A block that can leave makes way; if none can, the pool is full, and no slot is lost."""
    pool = BlockPool(SPEC, 1)
    tiers = Tiers(pool, [HostTier(9 * SIZE)])
    block = new(pool, 5)
    tiers.store(b"key", block)
    with tiers.using([block]), pytest.raises(PoolFull):
        tiers.fetch(b"key")
    copy = tiers.fetch(b"key")
    assert copy and value(pool, copy) == 5 and where(tiers, block) == "host"
    pool.check()


@pytest.mark.parametrize("kind", ["host", "disk", "folder", "memory"])
def test_damaged_content_is_a_miss(makers: dict[str, Make], damage: Damage, kind: str) -> None:
    """Not an error: it is computed again and stored again."""
    pool = BlockPool(SPEC, 2)
    tiers = Tiers(pool, [makers[kind]()])
    tiers.store(b"key", new(pool, 5))
    damage(tiers.tiers[0], b"ckey", flip)
    assert tiers.fetch(b"key") is None and not tiers.has(b"key")
    tiers.store(b"key", new(pool, 5))
    copy = tiers.fetch(b"key")
    assert copy and value(pool, copy) == 5


def test_content_outlives_the_process(tmp_path: Path, fingerprint: bytes, damage: Damage) -> None:
    """A second pool over the same places finds it, in any tier; a lower one helps out a damaged
    one, and what was found below lies above from then on."""

    def open_tiers() -> tuple[BlockPool, Tiers]:
        pool = BlockPool(SPEC, 4)
        disk = DiskTier(tmp_path / "disk", fingerprint, 2 * SIZE)
        shared = PooledTier(f"file://{tmp_path}/shared", fingerprint)
        return pool, Tiers(pool, [disk, shared])

    pool, tiers = open_tiers()
    for x in range(4):
        block = new(pool, x)
        tiers.store(bytes([x]), block)
        pool.release(block)
    assert counts(tiers) == [2, 2]
    tiers.close()

    pool, tiers = open_tiers()
    assert counts(tiers) == [2, 0]  # a store without a limit is not listed
    assert all(tiers.has(bytes([x])) for x in range(4)) and not tiers.has(b"\4")
    for x in range(4):
        block = tiers.fetch(bytes([x]))
        assert block and value(pool, block) == x
    assert set(tiers.tiers[0].keys()) == {b"c\2", b"c\3"} and len(tiers.tiers[1].keys()) == 4
    damage(tiers.tiers[0], b"c\3", flip)
    pool.release(block)
    block = tiers.fetch(b"\3")
    assert block and value(pool, block) == 3 and tiers.stats()[0].corrupt == 1


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    """Keys of one fingerprint are no keys of another."""
    pool = BlockPool(SPEC, 4)
    one = Tiers(pool, [DiskTier(tmp_path, bytes(16))])
    one.store(b"key", new(pool, 1))
    two = Tiers(pool, [DiskTier(tmp_path, bytes([1] * 16))])
    assert not two.has(b"key") and two.fetch(b"key") is None


def test_what_other_processes_put_makes_way(tmp_path: Path, fingerprint: bytes) -> None:
    """A folder that a neighbour has filled is emptied from its oldest entry on."""
    pool = BlockPool(SPEC, 4)
    block = new(pool, 1)
    ours = Tiers(pool, [DiskTier(tmp_path, fingerprint, 3 * SIZE)])
    theirs = Tiers(pool, [DiskTier(tmp_path, fingerprint)])
    for x in range(3):
        theirs.store(bytes([x]), block)
    ours.tiers[0].keys()  # as a put beyond the limit would
    ours.store(b"mine", block)
    assert ours.has(b"mine") and counts(ours) == [3]
    assert theirs.fetch(b"\0") is None and theirs.fetch(b"mine")
