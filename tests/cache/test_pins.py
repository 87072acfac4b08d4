"""Frames that stay in view besides the sink (multi-shot sinks), against a list of frames."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from streamgen.cache import BlockPool, BlockTable, Chunk, KVSpec, SinkWindow, Snapshot
from streamgen.cache.policy import PinnedWindow
from streamgen.errors import InvalidRequest

SPEC = KVSpec(num_layers=1, kv_heads=1, head_dim=1, block_tokens=1)


@dataclass
class Naive:
    """The rule, frame by frame: a new frame pushes out the oldest that may go.

    Attributes:
        changes: `(frame, pins)`: the pins in force from that frame on.
    """

    policy: PinnedWindow
    changes: list[tuple[int, tuple[int, ...]]] = field(default_factory=lambda: [(0, ())])

    def pins(self, frame: int) -> tuple[int, ...]:
        return [pins for since, pins in self.changes if since <= frame][-1]

    def lane(self, end: int) -> list[int]:
        """Ordinals by place: a new frame lies at the end, or where the pushed-out one lay."""
        lane: list[int] = []
        for frame in range(end):
            if len(lane) < self.policy.window:
                lane.append(frame)
            else:
                pins = self.pins(frame)
                oldest = min(f for f in lane if f >= self.policy.sink and f not in pins)
                lane[lane.index(oldest)] = frame
        return lane

    def pin(self, frames: list[int], end: int) -> None:
        new = [f for f in frames if f >= self.policy.sink]
        others = [f for f in self.pins(end) if f not in new]
        while len(others) + len(new) > self.policy.limit:
            others.remove(min(others))
        self.changes = [x for x in self.changes if x[0] < end]
        self.changes.append((end, tuple(others + new)))


def views(policy: PinnedWindow, end: int) -> list[int]:
    """Ordinals by place of the lane."""
    by_place = {policy.place(f): f for f in policy.visible(end)}
    return [by_place[place] for place in range(len(by_place))]


# The policy


def test_by_hand() -> None:
    """Window 6, sink 1, up to 2 pins: frame 3 is pinned at frame 5, frames 8 and 9 at frame 10."""
    policy = PinnedWindow(1, 6, 2).pin([3], end=5)
    assert policy.visible(5) == range(5)
    assert views(policy, 8) == [0, 6, 7, 3, 4, 5]  # as without pins, so far
    assert views(policy, 10) == [0, 6, 7, 3, 8, 9]  # 9 goes round 3
    assert views(policy, 11) == [0, 10, 7, 3, 8, 9]
    policy = policy.pin([8, 9], end=10)
    assert policy.pinned == (8, 9)
    assert views(policy, 10) == [0, 6, 7, 3, 8, 9]  # nothing moves
    assert views(policy, 11) == [0, 6, 7, 10, 8, 9]  # the replaced pin is the first to go
    assert views(policy, 20) == [0, 17, 18, 19, 8, 9]
    assert list(policy.visible(20)) == [0, 8, 9, 17, 18, 19]


def test_longlive_2() -> None:
    """Sink 8, window 32, chunks of 8: behind a cut at frame 40 [sink | pins | the last 16]."""
    policy = PinnedWindow(8, 32, limit=8)
    policy.validate(8)
    assert list(policy.visible(64)) == [*range(8), *range(40, 64)]
    policy = policy.pin(range(40, 48), end=48)
    assert list(policy.visible(64)) == [*range(8), *range(40, 64)]
    assert list(policy.visible(72)) == [*range(8), *range(40, 48), *range(56, 72)]
    assert list(policy.visible(800)) == [*range(8), *range(40, 48), *range(784, 800)]
    policy = policy.pin(range(792, 800), end=800)
    assert list(policy.visible(808)) == [*range(8), *range(784, 808)]  # the old shot has left


@settings(max_examples=40)
@given(end=st.integers(1, 60), sink=st.integers(0, 3), room=st.integers(2, 9))
def test_without_pins_it_is_a_sink_window(end: int, sink: int, room: int) -> None:
    """What is seen and where it lies."""
    pinned, plain = PinnedWindow(sink, sink + room, 1), SinkWindow(sink, sink + room)
    assert list(pinned.visible(end)) == list(plain.visible(end))
    assert [pinned.place(f) for f in plain.visible(end)] == [
        plain.place(f) for f in plain.visible(end)
    ]


@settings(max_examples=40)
@given(data=st.data())
def test_any_pins(data: st.DataObject) -> None:
    """Whenever pins change: the rule holds, the view is a prefix of the lane, nothing moves."""
    sink, limit = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
    window = sink + limit + data.draw(st.integers(1, 4))
    policy = PinnedWindow(sink, window, limit)
    naive, end = Naive(policy), 0
    for _ in range(data.draw(st.integers(1, 6))):
        before = views(policy, end)
        for step in range(data.draw(st.integers(1, 12))):
            end += 1
            now = views(policy, end)
            assert now == naive.lane(end), (end, step)
            assert [x for x, y in zip(before, now, strict=False) if x != y and x in now] == []
            before = now
        seen = list(policy.visible(end))
        frames = data.draw(st.lists(st.sampled_from(seen), max_size=limit, unique=True))
        policy = policy.pin(frames, end)
        naive.pin(frames, end)
        assert views(policy, end) == before
        assert len(policy.pinned) <= limit and len(policy.layout) <= window


def test_a_frame_out_of_view_cant_be_pinned() -> None:
    """The message names it and what can be; too many are refused, the sink's are passed over."""
    policy = PinnedWindow(1, 5, 2)
    with pytest.raises(InvalidRequest, match=r"frames \[3\] can't .* \[0, 6, 7, 8, 9\]"):
        policy.pin([3, 7], end=10)
    with pytest.raises(InvalidRequest, match="3 frames can't be pinned: the limit is 2"):
        policy.pin([6, 7, 8], end=10)
    assert policy.pin([0, 6], end=10).pinned == (6,)


@pytest.mark.parametrize(("sink", "window", "limit"), [(1, 3, 2), (-1, 5, 1), (0, 5, 0)])
def test_window_without_room(sink: int, window: int, limit: int) -> None:
    """Sink and pins must leave room for a frame, and for the chunk."""
    with pytest.raises(InvalidRequest, match=f"sink={sink}, limit={limit}, window={window}"):
        PinnedWindow(sink, window, limit)
    with pytest.raises(InvalidRequest, match=r"window=6 .* limit=2 pins \+ chunk=4"):
        PinnedWindow(1, 6, 2).validate(4)


def test_no_view_from_before_the_pins() -> None:
    """The arrangement before the last change is gone."""
    policy = PinnedWindow(1, 5, 2).pin([7], end=10)
    with pytest.raises(InvalidRequest, match="changed at frame 10: .* end at frame 9"):
        policy.visible(9)


# The table


def test_nothing_moves(roll) -> None:
    """In a pool that is the lane: every frame lies where it lay, whatever is pinned meanwhile."""
    pool = BlockPool(KVSpec(2, 2, 4, 3), 9)
    table = BlockTable(pool, PinnedWindow(1, 9, 3))
    lay: dict[int, int] = {}
    for step in range(41):
        roll(table, 1, n=1 + step % 3)
        for ordinal, block in table.entries:
            assert lay.setdefault(ordinal, block.slot) == block.slot
        if step % 4 == 3:  # the first frames of a shot
            table.pin(range(table.end - 2, table.end))
    with table.chunk(1) as chunk:
        seen = chunk.kv(0)[0][::3, 0, 0]
        assert chunk.meta.runs == ((0, 9),)
        shown = dict(zip(chunk.meta.ordinals, seen.tolist(), strict=True))
        pinned = table.policy.pinned
        assert [shown[f] for f in pinned] == list(pinned)  # with their own bytes
        assert pinned[0] < min(f for f in shown if f and f not in pinned)


def test_pin_not_held(roll, pool: BlockPool) -> None:
    """After an abort has dropped a frame, it can't be pinned, and the old pins stay."""
    table = BlockTable(pool, PinnedWindow(1, 6, 2))
    roll(table, 4)
    table.chunk(2).abort()
    with pytest.raises(InvalidRequest, match=r"see frames \[7, 8\]"):
        table.pin([8])
    assert table.policy.pinned == ()


def test_an_aborted_reopen_before_the_pins(roll, pool: BlockPool) -> None:
    """The next chunk must reach the frame at which they were set; a shorter one is refused."""
    table = BlockTable(pool, PinnedWindow(1, 6, 2))
    roll(table, 3)
    table.pin([7])
    table.reopen(2).abort()
    before = table.entries
    with pytest.raises(InvalidRequest, match="changed at frame 9"):
        table.chunk(1)
    assert table.entries == before
    roll(table, 1, n=2)
    roll(table, 4)
    assert [ordinal for ordinal, _ in table.entries] == [0, 7, 17, 18, 19, 20]


def test_rewind_brings_the_pins_back(roll, pool: BlockPool) -> None:
    """A snapshot holds the pins of its moment; a fork has those of its parent."""
    table = BlockTable(pool, PinnedWindow(1, 6, 2))
    roll(table, 3)
    table.pin([5])
    mark, child = table.snapshot(), table.fork()
    roll(table, 2)
    table.pin([12, 13])
    roll(table, 4)
    assert [ordinal for ordinal, _ in table.entries] == [0, 12, 13, 24, 25, 26]
    table.rewind(mark)
    for run in (table, child):
        roll(run, 4)
        assert [ordinal for ordinal, _ in run.entries] == [0, 5, 17, 18, 19, 20]


def test_only_a_pinned_window_has_pins(roll, pool: BlockPool) -> None:
    """Other policies say which one to take."""
    table = BlockTable(pool, SinkWindow(1, 6))
    with pytest.raises(InvalidRequest, match="SinkWindow.* has no pins: PinnedWindow has"):
        table.pin([0])


# Random use


@dataclass
class Stream:
    table: BlockTable
    naive: Naive
    values: dict[int, float] = field(default_factory=dict)  # what each frame was written with
    held: set[int] = field(default_factory=set)
    chunk: Chunk | None = None
    back: tuple[set[int], dict[int, float], int] | None = None  # what an abort goes back to

    def copy(self, table: BlockTable) -> Stream:
        naive = Naive(self.naive.policy, list(self.naive.changes))
        return Stream(table, naive, dict(self.values), set(self.held))


class PinMachine(RuleBasedStateMachine):
    """Chunks, reopened and aborted ones, pins, forks and rewinds in any order."""

    @initialize(
        sink=st.integers(0, 2),
        limit=st.integers(1, 2),
        room=st.integers(2, 4),
        count=st.integers(0, 12),
    )
    def start(self, sink: int, limit: int, room: int, count: int) -> None:
        self.pool = BlockPool(SPEC, 60)
        policy = PinnedWindow(sink, sink + limit + room, limit)
        self.room, self.stamp = room, 0.0
        self.streams = [Stream(BlockTable(self.pool, policy), Naive(policy))]
        self.marks: list[tuple[Snapshot, Stream]] = []
        self.roll(0, count)

    def pick(self, which: int, busy: bool) -> Stream:
        fit = [x for x in self.streams if (x.chunk is not None) == busy]
        return fit[which % len(fit)]

    def idle(self) -> bool:
        return any(x.chunk is None for x in self.streams)

    def busy(self) -> bool:
        return any(x.chunk is not None for x in self.streams)

    @precondition(idle)
    @rule(which=st.integers(0, 3), n=st.integers(1, 3), undo=st.booleans(), reopen=st.booleans())
    def begin(self, which: int, n: int, undo: bool, reopen: bool) -> None:
        x = self.pick(which, busy=False)
        end = x.table.end + (0 if reopen else n)
        first, changed = end - n, x.naive.changes[-1][0]
        window = x.naive.policy.window
        past = {f for f in x.naive.lane(end) if f < first}
        bad = (
            (n > x.table.tail if reopen else n > self.room)
            or (window < changed and end < changed)  # before the last change of the pins
            or not past <= x.held
        )
        try:
            chunk = (x.table.reopen if reopen else x.table.chunk)(n, undo=undo)
        except InvalidRequest:
            assert bad
            return
        assert not bad
        x.chunk = chunk
        x.back = (set(x.held), dict(x.values), x.table.end + reopen * n) if undo else None
        x.held = past
        for f in chunk.frames:
            self.stamp += 1
            x.values[f] = self.stamp
        data = torch.tensor([x.values[f] for f in chunk.frames]).view(-1, 1, 1)
        chunk.write(0, data, -data)
        lane = x.naive.lane(end)
        assert list(chunk.meta.ordinals) == lane and chunk.meta.runs[0][1] == len(lane)
        keys, values = chunk.kv(0)
        assert keys.flatten().tolist() == [x.values[f] for f in lane]
        assert torch.equal(values, -keys)

    @precondition(busy)
    @rule(which=st.integers(0, 3), commit=st.booleans())
    def finish(self, which: int, commit: bool) -> None:
        x = self.pick(which, busy=True)
        assert x.chunk is not None
        if commit:
            x.chunk.commit()
            x.held |= set(x.chunk.frames)
        else:
            x.chunk.abort()
            if x.back:
                x.held, x.values, end = x.back
                assert x.table.end == end
        x.chunk = None

    @precondition(idle)
    @rule(which=st.integers(0, 3), count=st.integers(1, 9))
    def roll(self, which: int, count: int) -> None:
        """Frames one by one, so that windows fill."""
        x = self.pick(which, busy=False)
        for _ in range(count):
            self.begin(self.free(x), 1, False, False)
            if x.chunk is None:
                return
            x.chunk.commit()
            x.held |= set(x.chunk.frames)
            x.chunk = None

    def free(self, x: Stream) -> int:
        return [y for y in self.streams if y.chunk is None].index(x)

    @precondition(idle)
    @rule(
        which=st.integers(0, 3),
        picks=st.lists(st.integers(0, 6), min_size=1, max_size=2, unique=True),
        left=st.integers(0, 7),
        count=st.integers(0, 9),
    )
    def pin(self, which: int, picks: list[int], left: int, count: int) -> None:
        """Frames in view, by place, now and then one that may have left; then goes on."""
        x = self.pick(which, busy=False)
        end, policy = x.table.end, x.table.policy
        assert isinstance(policy, PinnedWindow)
        if not end:
            return
        changed = x.naive.changes[-1][0]
        lane = x.naive.lane(end)
        frames = sorted(
            {lane[place % len(lane)] for place in picks} | ({end // 2} if not left else set())
        )
        behind = [f for f in frames if f >= policy.sink]
        bad = (
            (policy.window < changed and end < changed)
            or not set(lane) <= x.held
            or not set(behind) <= set(lane)
            or len(behind) > policy.limit
        )
        try:
            x.table.pin(frames)
        except InvalidRequest:
            assert bad
            return
        assert not bad
        x.naive.pin(frames, end)
        self.roll(self.free(x), count)

    @precondition(lambda self: self.idle() and len(self.streams) < 3)
    @rule(which=st.integers(0, 3))
    def fork(self, which: int) -> None:
        x = self.pick(which, busy=False)
        self.streams.append(x.copy(x.table.fork()))

    @precondition(lambda self: self.idle() and len(self.marks) < 2)
    @rule(which=st.integers(0, 3))
    def mark(self, which: int) -> None:
        x = self.pick(which, busy=False)
        self.marks.append((x.table.snapshot(), x.copy(x.table)))

    @precondition(lambda self: self.idle() and self.marks)
    @rule(which=st.integers(0, 3), mark=st.integers(0, 1), count=st.integers(0, 9))
    def rewind(self, which: int, mark: int, count: int) -> None:
        x = self.pick(which, busy=False)
        snapshot, then = self.marks[mark % len(self.marks)]
        x.table.rewind(snapshot)
        self.streams[self.streams.index(x)] = then = then.copy(x.table)
        self.roll(self.free(then), count)

    @precondition(lambda self: len(self.streams) > 1)
    @rule(which=st.integers(0, 3))
    def close(self, which: int) -> None:
        self.streams.pop(which % len(self.streams)).table.close()

    @invariant()
    def tables_hold_their_frames(self) -> None:
        self.pool.check()
        for x in self.streams:
            if x.chunk is None:
                entries = dict(x.table.entries)
                assert set(entries) == x.held
                for f, block in entries.items():
                    assert self.pool.k[0][block.slot].item() == x.values[f]

    def teardown(self) -> None:
        for x in self.streams:
            x.table.close()
        for snapshot, _ in self.marks:
            snapshot.release()
        self.pool.check()
        assert self.pool.stats().free == self.pool.stats().total


def test_random_use() -> None:
    """Whatever a table does between changes of its pins, it equals the list of frames."""
    run_state_machine_as_test(
        PinMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
