"""A pool and several tables against a naive cache that keeps every frame and never moves a byte.

The naive cache of a stream is a Python list with the K and V of all its frames, from the first on;
what a chunk sees is computed by its own rule, frame by frame. hypothesis chooses what happens:
tables of several policies begin, write, commit, abort and reopen chunks, fork, take snapshots,
rewind and close, interleaved, in a pool small enough to run full. After every step everything
that can be known about the pool must hold (`invariants` at the bottom).
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from streamgen.cache import (
    Append,
    Block,
    BlockPool,
    BlockTable,
    CachePolicy,
    Chunk,
    KVSpec,
    SinkWindow,
    Snapshot,
)
from streamgen.errors import InvalidRequest, PoolFull

SPEC = KVSpec(num_layers=2, kv_heads=1, head_dim=2, block_tokens=2)
POLICIES = (
    SinkWindow(0, 3),
    SinkWindow(1, 5),
    SinkWindow(2, 5),
    SinkWindow(1, 4, shadow_sink=True),
    SinkWindow(2, 5, shadow_sink=True),
    Append(8),
)
COMMON = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)
MODERATE = settings(COMMON, derandomize=True, max_examples=300, stateful_step_count=30)
NIGHTLY = settings(COMMON, derandomize=False, max_examples=300, stateful_step_count=40)
# For mutants: found is enough, no shrinking.
HUNT = settings(MODERATE, phases=(Phase.generate,), report_multiple_bugs=False)
PROFILE = NIGHTLY if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else MODERATE

Frame = tuple[Tensor, Tensor]  # K and V of one frame, each [layers, block_tokens, heads, dim]


@dataclass
class Naive:
    """A stream as a list of all its frames, and the oldest one that an aborted chunk left over."""

    policy: CachePolicy
    frames: list[Frame] = field(default_factory=list)
    floor: int = 0

    def copy(self) -> Naive:
        return Naive(self.policy, list(self.frames), self.floor)

    def sees(self, end: int, frame: int) -> bool:
        if not isinstance(self.policy, SinkWindow):
            return True
        sink, window = self.policy.sink, self.policy.window
        return frame < sink or frame >= end - (window - sink)

    def visible(self, end: int) -> list[int]:
        return [frame for frame in range(end) if self.sees(end, frame)]

    def oldest(self, end: int) -> int:
        """First frame behind the sink that a chunk ending at `end` sees."""
        sink = self.policy.sink if isinstance(self.policy, SinkWindow) else 0
        return min((f for f in self.visible(end) if f >= sink), default=end)

    def lost(self, end: int, first: int) -> list[int]:
        """What a chunk of frames `first..end-1` would have to see and an abort has dropped."""
        sink = self.policy.sink if isinstance(self.policy, SinkWindow) else 0
        return [f for f in self.visible(end) if sink <= f < min(first, self.floor)]


@dataclass
class Work:
    """A pending chunk: what was there before it, what was written so far, and the sink's shadow."""

    chunk: Chunk
    undo: bool
    before: Naive
    raw: list[Frame] | None = None
    lane: list[Frame] | None = None
    shadow: Tensor | None = None


@dataclass
class Stream:
    """A table and its naive twin."""

    table: BlockTable
    naive: Naive
    work: Work | None = None


class CacheMachine(RuleBasedStateMachine):
    """The rules and the invariants; see the head of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.marks: list[tuple[Snapshot, Naive]] = []
        self.seals: dict[Block, tuple[bytes, ...]] = {}
        self.stamp = 0.0

    @initialize(
        blocks=st.integers(12, 32),
        policies=st.lists(st.sampled_from(POLICIES), min_size=1, max_size=2),
        n=st.integers(1, 3),
        count=st.integers(0, 4),
    )
    def start(self, blocks: int, policies: list[CachePolicy], n: int, count: int) -> None:
        """A pool, the policies of this run, and a first stream that is already under way."""
        self.pool = BlockPool(SPEC, blocks)
        self.policies = policies
        self.new(0)
        self.roll(0, n, count)

    # Rules

    @precondition(lambda self: len(self.streams) < 4)
    @rule(which=st.integers(0, 1))
    def new(self, which: int) -> None:
        policy = pick(self.policies, which)
        self.streams.append(Stream(BlockTable(self.pool, policy), Naive(policy)))

    @precondition(lambda self: self.idle())
    @rule(which=st.integers(0, 3), n=st.integers(1, 3), undo=st.booleans())
    def begin(self, which: int, n: int, undo: bool) -> None:
        stream = pick(self.idle(), which)
        self.open(stream, len(stream.naive.frames), n, undo)

    @precondition(lambda self: self.idle())
    @rule(which=st.integers(0, 3), n=st.integers(1, 3), undo=st.booleans())
    def reopen(self, which: int, n: int, undo: bool) -> None:
        stream = pick(self.idle(), which)
        self.open(stream, len(stream.naive.frames) - n, n, undo, reopen=True)

    @precondition(lambda self: self.busy())
    @rule(which=st.integers(0, 3))
    def write(self, which: int) -> None:
        self.fill(pick(self.busy(), which))

    @precondition(lambda self: self.busy())
    @rule(which=st.integers(0, 3), commit=st.booleans())
    def finish(self, which: int, commit: bool) -> None:
        self.end(pick(self.busy(), which), commit)

    @precondition(lambda self: self.idle())
    @rule(which=st.integers(0, 3), n=st.integers(1, 3), count=st.integers(1, 3))
    def roll(self, which: int, n: int, count: int) -> None:
        """A few whole chunks, so that windows fill; the first is rewritten once."""
        stream = pick(self.idle(), which)
        for index in range(count):
            self.open(stream, len(stream.naive.frames), n, undo=False)
            if stream.work is None:
                return
            if index == 0:
                self.fill(stream)
            self.end(stream, commit=True)

    @precondition(lambda self: self.idle() and len(self.streams) < 4)
    @rule(which=st.integers(0, 3), n=st.integers(1, 3), count=st.integers(0, 2))
    def fork(self, which: int, n: int, count: int) -> None:
        """Of one stream; the child rolls on first, or not."""
        stream = pick(self.idle(), which)
        free = self.pool.stats().free
        self.streams.append(Stream(stream.table.fork(), stream.naive.copy()))
        assert self.pool.stats().free == free
        self.roll(0, n, count)

    @precondition(lambda self: self.idle() and len(self.marks) < 3)
    @rule(which=st.integers(0, 3))
    def snapshot(self, which: int) -> None:
        stream = pick(self.idle(), which)
        self.marks.append((stream.table.snapshot(), stream.naive.copy()))

    @precondition(lambda self: self.idle() and self.marks)
    @rule(which=st.integers(0, 3), mark=st.integers(0, 2))
    def rewind(self, which: int, mark: int) -> None:
        """To a mark of this stream or of a relative; under another policy it is refused."""
        stream, (snapshot, naive) = pick(self.idle(), which), pick(self.marks, mark)
        if snapshot.policy != stream.table.policy:
            expect(InvalidRequest, stream.table.rewind, snapshot)
            return
        stream.table.rewind(snapshot)
        stream.naive = naive.copy()

    @precondition(lambda self: self.marks)
    @rule(mark=st.integers(0, 2))
    def forget(self, mark: int) -> None:
        snapshot, _ = self.marks.pop(mark % len(self.marks))
        snapshot.release()
        snapshot.release()

    @precondition(lambda self: len(self.streams) > 1)
    @rule(which=st.integers(0, 3))
    def close(self, which: int) -> None:
        stream = self.streams.pop(which % len(self.streams))
        stream.table.close()
        stream.table.close()

    def teardown(self) -> None:
        """When all are closed, every slot is free again."""
        for stream in self.streams:
            stream.table.close()
        for snapshot, _ in self.marks:
            snapshot.release()
        self.pool.check()
        assert self.pool.stats().free == self.pool.stats().total

    # What rules share

    def idle(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.work is None]

    def busy(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.work is not None]

    def open(self, stream: Stream, first: int, n: int, undo: bool, reopen: bool = False) -> None:
        """Begin a chunk, or see it refused for the right reason and without a trace."""
        naive, table = stream.naive, stream.table
        begin = table.reopen if reopen else table.chunk
        trace = self.trace()
        try:
            chunk = begin(n, undo=undo)
        except InvalidRequest:
            assert self.refusable(naive, first, n, reopen)
            assert self.trace() == trace
            return
        except PoolFull:
            assert not self.roomy(table, n)
            assert self.trace() == trace
            return
        assert not self.refusable(naive, first, n, reopen)
        before = naive.copy()
        del naive.frames[first:]
        if not undo:
            naive.floor = max(naive.floor, naive.oldest(first + n))
        stream.work = Work(chunk, undo, before)

    def refusable(self, naive: Naive, first: int, n: int, reopen: bool) -> bool:
        policy, end = naive.policy, first + n
        if isinstance(policy, Append):
            return first < 0 or end > policy.capacity
        assert isinstance(policy, SinkWindow)
        held = [f for f in naive.visible(len(naive.frames)) if f < policy.sink or f >= naive.floor]
        gap = reopen and (first < 0 or not set(range(first, end)) <= set(held))
        return policy.window < policy.sink + n or gap or bool(naive.lost(end, first))

    def roomy(self, table: BlockTable, n: int) -> bool:
        """Whether there is so much room that no chunk may fail."""
        lane = 0 if table.lane else table.policy.lane_size
        slots = "".join("x" if self.taken(slot) else "." for slot in range(len(self.pool.k[0])))
        room = slots.count(".") - lane >= table.policy.lane_size + n
        return room and "." * lane in slots

    def taken(self, slot: int) -> bool:
        lanes = [stream.table.lane for stream in self.streams if stream.table.lane]
        in_lane = any(lane.base <= slot < lane.base + lane.size for lane in lanes)
        return in_lane or self.pool.at(slot) is not None

    def fill(self, stream: Stream) -> None:
        """Write every layer with numbers never used before, as one denoising step does."""
        assert stream.work
        work, chunk = stream.work, stream.work.chunk
        work.raw = [self.fresh() for _ in chunk.frames]
        sinks = chunk.sinks
        work.lane = [
            (k + 0.5, v) if index < sinks else (k, v) for index, (k, v) in enumerate(work.raw)
        ]
        for layer in range(SPEC.num_layers):
            chunk.write(layer, *joined(work.lane, layer))
            if sinks:
                chunk.write_sink(layer, *joined(work.raw[:sinks], layer))
            chunk.shadow(layer).copy_(chunk.sink(layer)[0] + 0.25)

    def fresh(self) -> Frame:
        shape = (2, SPEC.num_layers, SPEC.block_tokens, SPEC.kv_heads, SPEC.head_dim)
        size = torch.Size(shape).numel()
        self.stamp += size
        k, v = (torch.arange(size, dtype=torch.float32) + self.stamp).view(shape)
        return k, v

    def end(self, stream: Stream, commit: bool) -> None:
        work, naive = stream.work, stream.naive
        assert work
        if commit:
            if work.raw is None:
                expect(InvalidRequest, work.chunk.commit)
                self.fill(stream)
            assert work.raw is not None
            work.chunk.commit()
            naive.frames += work.raw
            naive.floor = max(naive.floor, naive.oldest(len(naive.frames)))
        else:
            work.chunk.abort()
            if work.undo:
                stream.naive = work.before
        stream.work = None

    def trace(self) -> tuple[object, ...]:
        """Everything that a refused chunk must leave alone."""
        tables = [(x.table.entries, x.table.end, x.table.lane) for x in self.streams]
        slots = [(b, b.ref) if (b := self.pool.at(s)) else None for s in range(len(self.pool.k[0]))]
        tensors = [x.numpy().tobytes() for x in (*self.pool.k, *self.pool.v)]
        return tables, slots, tensors

    def stored(self, slot: int) -> Frame:
        return torch.stack([k[slot] for k in self.pool.k]), torch.stack(
            [v[slot] for v in self.pool.v]
        )

    # What must hold after every step

    @invariant()
    def slots_and_handles_agree(self) -> None:
        """No slot has two owners, a block lies in one place."""
        self.pool.check()

    @invariant()
    def refs_are_holders(self) -> None:
        """`ref` is exactly the number of holders, and nothing lives that nobody holds."""
        holders: Counter[Block] = Counter()
        for stream in self.streams:
            holders.update(block for _, block in stream.table.entries)
            if stream.work:
                holders.update(stream.work.chunk.blocks[f] for f in stream.work.chunk.frames)
                holders.update((stream.table._before or ({}, 0))[0].values())
        for snapshot, _ in self.marks:
            holders.update(block for _, block in snapshot.entries)
        live = [b for slot in range(len(self.pool.k[0])) if (b := self.pool.at(slot))]
        assert {block: block.ref for block in live} == dict(holders)

    @invariant()
    def sealed_bytes_never_change(self) -> None:
        """A sealed block has the bytes it had when it was first seen sealed."""
        live = [b for slot in range(len(self.pool.k[0])) if (b := self.pool.at(slot))]
        now = {
            b: tuple(x[b.slot].numpy().tobytes() for x in (*self.pool.k, *self.pool.v))
            for b in live
            if b.sealed
        }
        for block, seal in now.items():
            assert self.seals.get(block, seal) == seal, f"{block} has changed"
        self.seals = now

    @invariant()
    def entries_are_the_naive_frames(self) -> None:
        """Every frame that a table or snapshot holds equals the naive one bitwise, K and V."""
        held = [(dict(x.table.entries), x.naive, x.table.end) for x in self.streams]
        held += [(dict(mark.entries), naive, mark.end) for mark, naive in self.marks]
        for entries, naive, end in held:
            assert end == len(naive.frames)
            for ordinal, block in entries.items():
                assert same(self.stored(block.slot), naive.frames[ordinal])

    @invariant()
    def what_is_visible_is_held(self) -> None:
        """An idle table holds what its last chunk saw, but for what an aborted one has dropped."""
        for stream in self.idle():
            naive, end = stream.naive, stream.table.end
            held = [ordinal for ordinal, _ in stream.table.entries]
            assert held == [f for f in naive.visible(end) if f not in naive.lost(end, end)]

    @invariant()
    def chunks_see_the_naive_window(self) -> None:
        """`kv` is one view of the lane with exactly the visible frames, each bitwise right.

        Each is a block that lies there, not bytes that happen to linger where one was.
        """
        for stream in self.busy():
            assert stream.work and stream.table.lane
            chunk, naive, work = stream.work.chunk, stream.naive, stream.work
            first = len(naive.frames)
            end = first + len(chunk.frames)
            assert list(chunk.frames) == list(range(first, end)) == list(chunk.meta.pending)
            assert sorted(chunk.meta.ordinals) == naive.visible(end)
            assert chunk.meta.materialize().shape == (chunk.meta.q_len, chunk.meta.kv_len)
            for layer in range(SPEC.num_layers):
                for x, pool in zip(chunk.kv(layer), (self.pool.k, self.pool.v), strict=True):
                    assert x.data_ptr() == pool[layer][stream.table.lane.base].data_ptr()
            seen = [torch.stack([chunk.kv(x)[i] for x in range(SPEC.num_layers)]) for i in (0, 1)]
            for index, ordinal in enumerate(chunk.meta.ordinals):
                cut = slice(index * SPEC.block_tokens, (index + 1) * SPEC.block_tokens)
                if ordinal >= naive.policy.shadow:
                    assert chunk.blocks[ordinal].slot == stream.table.lane.base + index
                self.compare(work, naive, ordinal, (seen[0][:, cut], seen[1][:, cut]))

    def compare(self, work: Work, naive: Naive, ordinal: int, seen: Frame) -> None:
        first = len(naive.frames)
        if ordinal >= first:
            assert work.lane is None or same(seen, work.lane[ordinal - first])
        elif ordinal >= naive.policy.shadow:
            assert same(seen, naive.frames[ordinal])
        else:  # the values are right from the start, the keys once the caller has rotated them
            k, v = naive.frames[ordinal]
            assert torch.equal(seen[1], v)
            assert work.lane is None or torch.equal(seen[0], k + 0.25)


def pick(things: list, index: int):  # type: ignore[no-untyped-def, type-arg]
    """One of a list that is not empty; 0, which hypothesis likes best, is the newest."""
    return things[-1 - index % len(things)]


def same(one: Frame, other: Frame) -> bool:
    """Bitwise equality of K and of V."""
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def joined(frames: list[Frame], layer: int) -> Frame:
    """K and V of one layer, frames in order: `[n*block_tokens, heads, dim]`."""
    return torch.cat([k[layer] for k, _ in frames]), torch.cat([v[layer] for _, v in frames])


def expect(error: type[Exception], call, *args) -> None:  # type: ignore[no-untyped-def]
    """Assert that a call is refused."""
    try:
        call(*args)
    except error:
        return
    raise AssertionError(f"{call} was not refused")
