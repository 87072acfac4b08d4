"""Pool, tables and tiers under random use, against a naive cache that keeps every frame.

Tables begin, commit, abort and reopen chunks, fork and close; in between they are parked and
resumed, single blocks go down and come back, room is made, bytes are stored and fetched under
keys, and entries are damaged. The tiers are small enough to run full. A damaged block may be lost,
no other may, and no byte may ever be wrong. HYPOTHESIS_PROFILE=nightly searches longer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from streamgen.cache import Append, Block, BlockPool, BlockTable, CachePolicy, KVSpec, SinkWindow
from streamgen.cache.chunk import Chunk
from streamgen.cache.tier import DiskTier, HostTier, PooledTier, Tiers, format
from streamgen.cache.tier.base import PRIVATE, BaseTier
from streamgen.cache.tier.manager import Kept
from streamgen.errors import InvalidRequest, PoolFull, TierError

SPEC = KVSpec(num_layers=2, kv_heads=1, head_dim=2, block_tokens=2)
SIZE = SPEC.block_bytes
POLICIES = (SinkWindow(1, 4), SinkWindow(1, 4, shadow_sink=True), SinkWindow(0, 3), Append(6))
FULL = (PoolFull, TierError)  # there may be no room

COMMON = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)
SMALL = settings(COMMON, derandomize=True, max_examples=120, stateful_step_count=25)
NIGHTLY = settings(COMMON, derandomize=False, max_examples=300, stateful_step_count=40)
HUNT = settings(
    SMALL, max_examples=300, phases=(Phase.generate,), report_multiple_bugs=False
)  # for mutants: found is enough
PROFILE = NIGHTLY if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else SMALL

Frame = tuple[Tensor, Tensor]  # K and V, each [layers, block_tokens, heads, dim]


@dataclass
class Stream:
    """A table and all its frames."""

    table: BlockTable
    frames: list[Frame] = field(default_factory=list)

    @property
    def blocks(self) -> list[Block]:
        return [block for _, block in self.table.entries]


def packed(frame: Frame) -> bytes:
    """A frame as the pool reads it: the keys of all layers, then the values."""
    return b"".join(x.numpy().tobytes() for x in frame)


class TierMachine(RuleBasedStateMachine):
    """The rules and the invariants; see the head of this file."""

    def __init__(self) -> None:
        super().__init__()
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = tempfile.mkdtemp(dir=shm)
        self.streams: list[Stream] = []
        self.fetched: list[tuple[Block, bytes]] = []
        self.stored: dict[bytes, bytes] = {}
        self.doomed: set[Block] = set()
        self.stamp = 0.0

    @initialize(
        blocks=st.integers(8, 16),
        capacities=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 10)),
        policies=st.lists(st.sampled_from(POLICIES), min_size=1, max_size=2),
        count=st.integers(0, 5),
        parked=st.booleans(),
    )
    def start(
        self,
        blocks: int,
        capacities: tuple[int, int, int],
        policies: list[CachePolicy],
        count: int,
        parked: bool,
    ) -> None:
        """A pool over three tiers, and streams that are under way, or parked."""
        self.pool = BlockPool(SPEC, blocks)
        host, disk, pooled = (SIZE * x for x in capacities)
        self.tiers = Tiers(
            self.pool,
            [
                HostTier(host),
                DiskTier(self.folder, bytes(16), disk),
                PooledTier(f"memory://{uuid.uuid4().hex}", bytes(16), pooled),
            ],
        )
        for policy in policies:
            self.new(policy)
            for _ in range(count):
                self.chunk(0, commit=True, ready=True)
            if parked:
                self.park(0)

    def teardown(self) -> None:
        """All holders gone, nothing is left anywhere but what lies under keys."""
        try:
            if hasattr(self, "tiers"):
                for stream in self.streams:
                    stream.table.close()
                for block, _ in self.fetched:
                    self.pool.release(block)
                assert self.pool.stats().free == self.pool.stats().total
                assert not self.private_entries()
                self.tiers.close()
        finally:
            shutil.rmtree(self.folder)

    # Tables

    @precondition(lambda self: len(self.streams) < 3)
    @rule(policy=st.sampled_from(POLICIES))
    def new(self, policy: CachePolicy) -> None:
        self.streams.append(Stream(BlockTable(self.pool, policy)))

    @precondition(lambda self: self.streams)
    @rule(i=st.integers(0), commit=st.booleans(), ready=st.booleans())
    def chunk(self, i: int, commit: bool, ready: bool) -> None:
        """The next frame, after the room for it was made or not."""
        self.step(self.pick(i), reopen=False, commit=commit, ready=ready)

    @precondition(lambda self: any(x.table.tail for x in self.streams))
    @rule(i=st.integers(0), commit=st.booleans())
    def reopen(self, i: int, commit: bool) -> None:
        """The last frame once more."""
        stream = self.pick(i)
        if stream.table.tail:
            self.step(stream, reopen=True, commit=commit, ready=True)

    def step(self, stream: Stream, reopen: bool, commit: bool, ready: bool) -> None:
        table, before = stream.table, (stream.table.entries, stream.table.end)
        try:
            if ready:
                self.tiers.resume(table, lane=0 if table.lane else table.policy.lane_size)
                with self.tiers.using(stream.blocks):
                    self.tiers.make_room(3)
            chunk = table.reopen(1) if reopen else table.chunk(1)
        except (*FULL, InvalidRequest) as error:
            assert (table.entries, table.end) == before
            if "come back" in str(error):
                assert self.doomed & set(stream.blocks)
            return
        frames = stream.frames[: chunk.frames.start]
        with self.tiers.using(chunk.blocks.values()):  # while it is pending, others make room
            with suppress(*FULL):
                self.tiers.make_room(3)
            self.see(chunk, table.policy.shadow, frames)
        frame = self.write(chunk)
        if commit:
            chunk.commit()
            frames.append(frame)
        else:
            chunk.abort()
        stream.frames = frames

    def see(self, chunk: Chunk, shadow: int, frames: list[Frame]) -> None:
        """What the chunk sees of the past is bitwise right."""
        sinks = min(shadow, len(frames))
        for layer in range(SPEC.num_layers):
            kv = [x.unflatten(0, (-1, SPEC.block_tokens)) for x in chunk.kv(layer)]
            for index, ordinal in enumerate(chunk.meta.ordinals):
                if ordinal < len(frames):
                    assert ordinal < shadow or torch.equal(kv[0][index], frames[ordinal][0][layer])
                    assert torch.equal(kv[1][index], frames[ordinal][1][layer])
            for x, y in zip(chunk.sink(layer), (0, 1), strict=True):
                raw = [frames[ordinal][y][layer] for ordinal in range(sinks)]
                assert not raw or torch.equal(x, torch.cat(raw))

    def write(self, chunk: Chunk) -> Frame:
        self.stamp += 1
        k = torch.arange(8.0).view(2, 2, 1, 2) + 8 * self.stamp
        for layer in range(SPEC.num_layers):
            chunk.write(layer, k[layer], -k[layer])
            if chunk.sinks:
                chunk.write_sink(layer, k[layer], -k[layer])
        return k, -k

    @precondition(lambda self: 0 < len(self.streams) < 4)
    @rule(i=st.integers(0))
    def fork(self, i: int) -> None:
        stream = self.pick(i)
        self.streams.append(Stream(stream.table.fork(), list(stream.frames)))

    @precondition(lambda self: len(self.streams) > 1)
    @rule(i=st.integers(0))
    def close(self, i: int) -> None:
        stream = self.pick(i)
        self.streams.remove(stream)
        stream.table.close()

    # Tiers

    @rule(n=st.integers(1, 6))
    def hoard(self, n: int) -> None:
        """Somebody else takes blocks, and lets them grow cold."""
        with suppress(*FULL):
            self.tiers.make_room(n)
            for block in self.pool.alloc(n):
                self.stamp += 1
                for tensor in self.pool._storage:
                    tensor[block.slot] = self.stamp
                block.sealed = True
                out = bytearray(SIZE)
                self.pool.read(block, memoryview(out))
                self.fetched.append((block, bytes(out)))

    @precondition(lambda self: self.streams)
    @rule(i=st.integers(0))
    def park(self, i: int) -> None:
        try:
            self.tiers.park(self.pick(i).table)
        except TierError:
            self.expect_full()

    @precondition(lambda self: self.held())
    @rule(i=st.integers(0))
    def demote(self, i: int) -> None:
        block = self.pick_block(i)
        allowed = self.tiers.demotable(block) or block.away
        try:
            self.tiers.demote(block)
            assert allowed and block.away
        except InvalidRequest:
            assert not allowed
        except TierError:
            self.expect_full()

    @precondition(lambda self: any(block.away for block in self.held()))
    @rule(i=st.integers(0))
    def promote(self, i: int) -> None:
        away = [block for block in self.held() if block.away]
        block = away[i % len(away)]
        try:
            self.tiers.promote(block)
            assert block.slot >= 0 and block not in self.doomed
        except FULL as error:
            assert block.away and block.slot == -1
            assert "come back" not in str(error) or block in self.doomed

    @rule(n=st.integers(1, 6), run=st.sampled_from([0, 0, 3]))
    def make_room(self, n: int, run: int) -> None:
        with suppress(*FULL):
            self.tiers.make_room(n, run)
            self.pool.require(run, n)

    @precondition(lambda self: any(block.away for block in self.held()))
    @rule(i=st.integers(0), at=st.integers(1, SIZE))
    def damage(self, i: int, at: int) -> None:
        """A bit of an away block's payload flips where it lies."""
        away = [block for block in self.held() if isinstance(block.away, Kept)]
        if not away:
            return
        block = away[i % len(away)]
        assert isinstance(block.away, Kept)
        if block.away.level is None or block in self.doomed:
            return
        tier = self.tiers.tiers[block.away.level]
        if isinstance(tier, HostTier):
            tier._entries[block.away.key][-at] ^= 1
        elif isinstance(tier, DiskTier):
            path = tier._path(block.away.key)
            data = bytearray(path.read_bytes())
            data[-at] ^= 1
            path.write_bytes(data)
        elif isinstance(tier, PooledTier):
            name = tier._path(block.away.key)
            data = bytearray(tier._store.cat_file(name))
            data[-at] ^= 1
            tier._store.pipe_file(name, bytes(data))
        self.doomed.add(block)

    @precondition(lambda self: self.held())
    @rule(i=st.integers(0))
    def store(self, i: int) -> None:
        block = self.pick_block(i)
        data = self.naive()[block]
        key = data[:8]
        try:
            self.tiers.store(key, block)
            assert self.tiers.has(key)
            self.stored[key] = data
        except TierError as error:
            assert "come back" not in str(error) or block in self.doomed

    @precondition(lambda self: self.stored)
    @rule(i=st.integers(0))
    def fetch(self, i: int) -> None:
        key = sorted(self.stored)[i % len(self.stored)]
        try:
            block = self.tiers.fetch(key)
        except FULL:
            return
        if block:
            self.fetched.append((block, self.stored[key]))
        else:
            assert not self.tiers.has(key)

    @precondition(lambda self: self.fetched)
    @rule(i=st.integers(0), forget=st.booleans())
    def let_go(self, i: int, forget: bool) -> None:
        block, data = self.fetched.pop(i % len(self.fetched))
        self.pool.release(block)
        if forget:
            self.tiers.forget(data[:8])
            self.stored.pop(data[:8], None)
            assert self.tiers.fetch(data[:8]) is None

    # Helpers

    def pick(self, i: int) -> Stream:
        return self.streams[-1 - i % len(self.streams)]

    def held(self) -> list[Block]:
        blocks = [block for stream in self.streams for block in stream.blocks]
        return list(dict.fromkeys([*blocks, *(block for block, _ in self.fetched)]))

    def pick_block(self, i: int) -> Block:
        held = self.held()
        return held[i % len(held)]

    def naive(self) -> dict[Block, bytes]:
        """What every held block must contain."""
        found = {
            block: packed(stream.frames[ordinal])
            for stream in self.streams
            for ordinal, block in stream.table.entries
        }
        return found | dict(self.fetched)

    def private_entries(self) -> list[tuple[int, bytes]]:
        """Level and key of everything that lies in a tier because a block is away."""
        return [
            (level, key)
            for level, tier in enumerate(self.tiers.tiers)
            for key in tier.keys()
            if key.startswith(PRIVATE)
        ]

    def expect_full(self) -> None:
        """No tier has room for another block that somebody holds."""
        for stats in self.tiers.stats():
            assert stats.capacity is not None and stats.bytes + SIZE > stats.capacity

    # What must hold after every step

    @invariant()
    def slots_and_handles_agree(self) -> None:
        self.pool.check()

    @invariant()
    def refs_are_holders(self) -> None:
        """Of blocks in the pool and away; and nothing lives that nobody holds."""
        holders = Counter(block for stream in self.streams for block in stream.blocks)
        holders.update(block for block, _ in self.fetched)
        live = {b for s in range(self.pool.stats().total) if (b := self.pool.at(s))}
        assert all(block.ref == count for block, count in holders.items())
        assert live == {block for block in holders if block.slot >= 0}

    @invariant()
    def a_block_is_in_one_place(self) -> None:
        """In the pool, or under one key in one tier, or lost if it was damaged."""
        kept = []
        for block in self.held():
            assert (block.away is None) == (block.slot >= 0)
            if isinstance(block.away, Kept):
                if block.away.level is None:
                    assert block in self.doomed
                else:
                    kept.append((block.away.level, block.away.key))
        assert sorted(kept) == sorted(self.private_entries())

    @invariant()
    def tiers_keep_their_limits(self) -> None:
        for stats in self.tiers.stats():
            assert stats.capacity is not None and stats.bytes <= stats.capacity
            assert stats.bytes == stats.entries * SIZE

    @invariant()
    def every_byte_is_right(self) -> None:
        """Wherever it is, unless it was damaged there."""
        for block, data in self.naive().items():
            out = bytearray(SIZE)
            if block.slot >= 0:
                assert block not in self.doomed
                self.pool.read(block, memoryview(out))
            elif block in self.doomed:
                continue
            elif isinstance(block.away, Kept):
                assert block.away.level is not None
                tier = self.tiers.tiers[block.away.level]
                assert isinstance(tier, BaseTier)
                tier._read(block.away.key, memoryview(out))  # past the counters
            else:
                assert block.away
                block.away.read(memoryview(out))
            assert bytes(out) == data


def test_random_use() -> None:
    """Whatever happens, no byte is wrong, nothing undamaged is lost, and nothing leaks."""
    run_state_machine_as_test(TierMachine, settings=PROFILE)


# The code broken on purpose: the machine must notice


def leave_behind(patch: pytest.MonkeyPatch) -> None:
    """A block that comes back leaves its bytes in the tier."""
    patch.setattr(Tiers, "_forget", lambda self, kept: None)


def trust(patch: pytest.MonkeyPatch) -> None:
    """Nobody compares checksums."""
    patch.setattr(format, "check", lambda header, payload: None)


def half(patch: pytest.MonkeyPatch) -> None:
    """Only the keys go down."""
    read = BlockPool.read

    def read_keys(self: BlockPool, block: Block, out: memoryview) -> None:
        read(self, block, out)
        if block.sealed and out.obj.__class__ is bytearray and len(out) == SIZE:
            out[SIZE // 2 :] = bytes(SIZE // 2)

    patch.setattr(BlockPool, "read", read_keys)


def level(patch: pytest.MonkeyPatch) -> None:
    """An entry that goes down is looked for where it was."""
    place = Tiers._place

    def forgetful(self: Tiers, key: bytes, payload: bytearray, first: int, kept: Kept) -> None:
        old = kept.level if kept else None
        place(self, key, payload, first, kept)
        if kept and old is not None:
            kept.level = old

    patch.setattr(Tiers, "_place", forgetful)


def held(patch: pytest.MonkeyPatch) -> None:
    """The oldest entry of a full tier goes, whoever needs it."""

    def shrink(self: Tiers, level: int) -> None:
        key, _ = self._levels[level].popitem(last=False)
        self.tiers[level].delete(key)

    patch.setattr(Tiers, "_shrink", shrink)


@pytest.mark.parametrize(
    "mutant", [leave_behind, trust, half, level, held], ids=lambda mutant: mutant.__name__
)
def test_mutant_is_noticed(monkeypatch: pytest.MonkeyPatch, mutant) -> None:  # type: ignore[no-untyped-def]
    """With this fault in the code, an assertion fails or an entry can't be found."""
    mutant(monkeypatch)
    with pytest.raises((AssertionError, TierError, KeyError)):
        run_state_machine_as_test(TierMachine, settings=HUNT)
