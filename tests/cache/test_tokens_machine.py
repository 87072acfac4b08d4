"""Sequences of tokens under random use, against lists that never share, move or forget anything.

The naive twin of a `TokenTable` is a list of tokens, each a number to be known by, a position, a
weight and an id. hypothesis chooses what happens in a pool small enough to run full: sequences are
extended (written, rewritten, committed in part or aborted), grow token trees of which a path is
kept, are truncated, compacted with and without a summary, renumbered, forked, selected as beams
are, swapped out and in, and closed. After every step all that can be known must hold (the
invariants at the bottom). HYPOTHESIS_PROFILE=nightly searches longer.

The code broken on purpose, ten ways, must be noticed each (`MUTANTS` below):

1. retain: a fork forgets to count itself as a holder
2. own: an extension writes into a last block that others share
3. pack: compaction packs survivors into blocks that others share
4. accept: the first rows of a tree are kept in place of the path
5. depth: nodes of a tree get positions in order of their rows
6. trim: blocks behind the last token are not given back
7. abort: an aborted tail keeps its blocks
8. values: compaction carries keys but not values
9. weights: compaction leaves weights behind
10. select: beams that were dropped stay open
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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
from pytest import MonkeyPatch
from torch import Tensor

from streamgen.cache import Block, BlockPool, KVSpec, beams
from streamgen.cache.notes import ID, POSITION, Ints, TokenNotes
from streamgen.cache.tail import Tail
from streamgen.cache.tokens import Summary, TokenTable
from streamgen.cache.tree import TokenTree
from streamgen.errors import PoolFull

LAYERS = 2
COMMON = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)
QUICK = settings(COMMON, derandomize=True, max_examples=60, stateful_step_count=25)
NIGHTLY = settings(COMMON, derandomize=False, max_examples=400, stateful_step_count=40)
# For mutants: found is enough, no shrinking.
HUNT = settings(QUICK, max_examples=300, phases=(Phase.generate,), report_multiple_bugs=False)
# How many pending tokens are not kept: none, the last, all, or None to leave them pending.
ALL = 99
LEAVE = st.sampled_from([0, 0, 1, ALL, None])
PROFILE = NIGHTLY if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else QUICK


@dataclass(frozen=True)
class Token:
    """A token as a list holds it."""

    stamp: float
    position: int
    weight: int
    id: int


@dataclass
class Work:
    """A pending tail: what was written last, and where each token looks up to in a tree."""

    tail: Tail
    above: Sequence[int]
    stamps: list[float] | None = None


@dataclass
class Stream:
    """A table and its naive twin."""

    table: TokenTable
    tokens: list[Token] = field(default_factory=list)
    next_id: int = 0
    work: Work | None = None

    @property
    def end(self) -> int:
        return max((token.position for token in self.tokens), default=-1) + 1


class Place:
    """A block on the machine's shelf, which counts what lies there."""

    def __init__(self, shelf: dict[Place, bytes], payload: bytes) -> None:
        self.shelf = shelf
        shelf[self] = payload

    def read(self, out: memoryview) -> None:
        out[:] = self.shelf[self]

    def forget(self) -> None:
        del self.shelf[self]


class TokenMachine(RuleBasedStateMachine):
    """The rules and the invariants; see the head of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.shelf: dict[Place, bytes] = {}
        self.stamp = 0.0

    @initialize(
        blocks=st.integers(6, 14), size=st.integers(1, 4), n=st.integers(0, 9), twin=st.booleans()
    )
    def start(self, blocks: int, size: int, n: int, twin: bool) -> None:
        """A pool, and a first sequence, or two that share it, already under way."""
        self.pool = BlockPool(KVSpec(LAYERS, 1, 1, size), blocks)
        self.size = size
        self.new(0)
        self.grow(self.streams[0], n)
        if twin:
            self.fork(0, 0)

    # Rules

    @precondition(lambda self: len(self.streams) < 4)
    @rule(reserve=st.sampled_from([0, 0, 5]))
    def new(self, reserve: int) -> None:
        if -(-reserve // self.size) <= self.pool.stats().free:
            self.streams.append(Stream(TokenTable(self.pool, reserve=reserve)))

    @precondition(lambda self: self.idle())
    @rule(which=st.integers(0, 3), n=st.integers(1, 7), skip=st.integers(0, 2), leave=LEAVE)
    def extend(self, which: int, n: int, skip: int, leave: int | None) -> None:
        stream = pick(self.idle(), which)
        at = range(stream.end + skip, stream.end + skip + n) if skip else None
        if self.begin(stream, range(-1, n - 1), lambda: stream.table.extend(n, at)):
            self.end(stream, leave, 0)

    @precondition(lambda self: self.idle())
    @rule(
        which=st.integers(0, 3),
        ups=st.lists(st.integers(0, 9), min_size=1, max_size=6),
        leave=LEAVE,
        node=st.integers(0, 5),
    )
    def scratch(self, which: int, ups: list[int], leave: int | None, node: int) -> None:
        """Each node hangs below a random earlier one, or is a root."""
        stream = pick(self.idle(), which)
        tree = TokenTree([up % (node + 1) - 1 for node, up in enumerate(ups)])
        if self.begin(stream, tree.parents, lambda: stream.table.scratch(tree)):
            self.end(stream, leave, node)

    @precondition(lambda self: self.busy())
    @rule(which=st.integers(0, 3))
    def write(self, which: int) -> None:
        self.fill(pick(self.busy(), which))

    @precondition(lambda self: self.busy())
    @rule(which=st.integers(0, 3), leave=LEAVE, node=st.integers(0, 5))
    def finish(self, which: int, leave: int | None, node: int) -> None:
        self.end(pick(self.busy(), which), leave, node)

    def end(self, stream: Stream, leave: int | None, node: int) -> None:
        """Keep the tokens, or the path to a node, but for the last `leave`; see `LEAVE`."""
        work = stream.work
        assert work
        if leave is None:
            return
        if leave == ALL:
            work.tail.abort()
            stream.work = None
            return
        if work.stamps is None:
            self.fill(stream)
        assert work.stamps is not None
        if work.tail.tree:
            path = list(work.tail.tree.path(node % len(work.above)))
            path = path[: max(0, len(path) - leave)]
            positions = [stream.end + depth for depth in range(len(path))]
            work.tail.accept(path)
        else:
            path = list(range(len(work.above) - min(leave, 1)))
            positions = work.tail.positions.tolist()[: len(path)]
            work.tail.commit(len(path))
        for node, position in zip(path, positions, strict=True):
            stream.tokens.append(Token(work.stamps[node], position, 1, stream.next_id))
            stream.next_id += 1
        stream.work = None

    def grow(self, stream: Stream, n: int) -> None:
        if n and self.begin(stream, range(-1, n - 1), lambda: stream.table.extend(n)):
            self.end(stream, 0, 0)

    @precondition(lambda self: self.idle() and len(self.streams) < 4)
    @rule(which=st.integers(0, 3), n=st.integers(0, 3))
    def fork(self, which: int, n: int) -> None:
        """The child grows at once, or not."""
        stream = pick(self.idle(), which)
        free = self.pool.stats().free
        self.streams.append(
            Stream(stream.table.fork(), list(stream.tokens), next_id=stream.next_id)
        )
        assert self.pool.stats().free == free
        self.grow(self.streams[-1], n)

    @precondition(lambda self: len(self.idle()) > 1)
    @rule(one=st.integers(0, 3), other=st.integers(0, 3), parents=st.lists(st.integers(0, 1)))
    def select(self, one: int, other: int, parents: list[int]) -> None:
        """A step of beam search over two sequences, or one."""
        old = [pick(self.idle(), one), pick(self.idle(), other)]
        parents = parents[: 4 - len(self.streams) + len({id(x) for x in old})]
        children = beams.select([x.table for x in old], parents)
        self.streams = [x for x in self.streams if x not in old]
        for parent, table in zip(parents, children, strict=True):
            twin = old[parent]
            self.streams.append(Stream(table, list(twin.tokens), next_id=twin.next_id))
        if not self.streams:
            self.new(0)

    @precondition(lambda self: self.idle())
    @rule(which=st.integers(0, 3), drop=st.integers(0, 6))
    def truncate(self, which: int, drop: int) -> None:
        stream = pick(self.idle(), which)
        n = max(0, len(stream.tokens) - drop)
        stream.table.truncate(n)
        del stream.tokens[n:]

    @precondition(lambda self: self.idle())
    @rule(which=st.integers(0, 3), pattern=st.integers(0, 2**9 - 1), fold=st.booleans())
    def compact(self, which: int, pattern: int, fold: bool) -> None:
        """Keep the tokens whose bit is set; fold the others into a summary, or not."""
        stream = pick(self.idle(), which)
        keep = [at for at in range(len(stream.tokens)) if pattern >> at % 9 & 1]
        gone = [x for at, x in enumerate(stream.tokens) if at not in keep]
        summary, kept = None, [stream.tokens[at] for at in keep]
        if fold:
            token = Token(self.fresh(), stream.end, 1 + sum(x.weight for x in gone), -1)
            k, v = self.kv([token.stamp])
            summary = Summary(k[:, 0], v[:, 0], token.position, token.weight)
            kept.append(token)
        trace, free = self.trace(), self.pool.stats().free
        try:
            stream.table.compact(keep, summary)
        except PoolFull:
            most = sum((b.ref > 1) + bool(b.away) for b in stream.table.blocks) + fold
            assert free < most, "own blocks that are here can always be packed"
            assert self.trace() == trace
            return
        stream.tokens = kept

    @precondition(lambda self: self.idle())
    @rule(which=st.integers(0, 3), offset=st.integers(0, 9))
    def renumber(self, which: int, offset: int) -> None:
        """To consecutive positions, as an eager re-index does."""
        stream = pick(self.idle(), which)
        at = range(offset, offset + len(stream.tokens))
        stream.table.renumber(list(at))
        stream.tokens = [
            replace(x, position=position) for x, position in zip(stream.tokens, at, strict=True)
        ]

    @precondition(lambda self: self.idle())
    @rule(which=st.integers(0, 3))
    def swap_out(self, which: int) -> None:
        """Only what no busy sequence shares, as an engine would."""
        stream = pick(self.idle(), which)
        used = {block for x in self.busy() for block in x.table._blocks}
        if not used & set(stream.table.blocks):
            stream.table.swap_out(self.store)
            assert all(block.away for block in stream.table.blocks)

    @precondition(lambda self: self.idle())
    @rule(which=st.integers(0, 3))
    def swap_in(self, which: int) -> None:
        stream = pick(self.idle(), which)
        away = sum(bool(block.away) for block in stream.table.blocks)
        if away <= self.pool.stats().free:
            assert stream.table.swap_in() == away
        else:
            trace = self.trace()
            with pytest.raises(PoolFull):
                stream.table.swap_in()
            assert self.trace() == trace

    @precondition(lambda self: len(self.streams) > 1)
    @rule(which=st.integers(0, 3))
    def close(self, which: int) -> None:
        stream = self.streams.pop(which % len(self.streams))
        stream.table.close()
        stream.table.close()

    def teardown(self) -> None:
        """When all are closed, every slot is free again and the shelf is empty."""
        for stream in self.streams:
            stream.table.close()
        if self.streams:
            self.pool.check()
            assert self.pool.stats().free == self.pool.stats().total
            assert not self.shelf

    # What rules share

    def idle(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.work is None]

    def busy(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.work is not None]

    def begin(self, stream: Stream, above: Sequence[int], start: Callable[[], Tail]) -> bool:
        """Begin a tail, or see it refused for lack of room, without a trace."""
        table, length, free = stream.table, len(stream.tokens), self.pool.stats().free
        new = max(0, -(-(length + len(above)) // self.size) - len(table.block_table))
        copied = length % self.size > 0 and table.blocks[-1].ref > 1
        back = sum(bool(block.away) for block in table.blocks)
        trace = self.trace()
        try:
            tail = start()
        except PoolFull:
            assert new + copied + back > free
            assert self.trace() == trace
            return False
        assert self.pool.stats().free == free - new - copied - back, "on demand, one copy at most"
        stream.work = Work(tail, above)
        return True

    def fill(self, stream: Stream) -> None:
        """Write every layer with numbers never used before."""
        work = stream.work
        assert work
        work.stamps = [self.fresh() for _ in work.above]
        k, v = self.kv(work.stamps)
        for layer in range(LAYERS):
            work.tail.write(layer, k[layer], v[layer])

    def fresh(self) -> float:
        self.stamp += 1
        return self.stamp

    def kv(self, stamps: Sequence[float]) -> tuple[Tensor, Tensor]:
        """K and V `[layers, n, 1, 1]` of tokens with these numbers."""
        k = torch.tensor(stamps, dtype=torch.float32) + torch.arange(LAYERS)[:, None] / 4
        return k[..., None, None], -k[..., None, None]

    def store(self, block: Block) -> Place:
        payload = bytearray(self.pool.payload_bytes)
        self.pool.read(block, memoryview(payload))
        return Place(self.shelf, bytes(payload))

    def trace(self) -> tuple[object, ...]:
        """Everything that a refused call must leave alone."""
        tables = [
            [(block, block.slot, block.ref, block.sealed, block.away) for block in x.table._blocks]
            for x in self.streams
        ]
        data = [x.numpy().tobytes() for x in (*self.pool.k, *self.pool.v)]
        return tables, data, dict(self.shelf)

    # What must hold after every step

    @invariant()
    def slots_and_handles_agree(self) -> None:
        """No slot has two owners, and a pending block has one holder."""
        self.pool.check()

    @invariant()
    def refs_are_holders(self) -> None:
        """`ref` is the number of tables that hold a block; nothing lives that nobody holds."""
        holders = Counter(block for x in self.streams for block in x.table._blocks)
        assert all(block.ref == count for block, count in holders.items())
        away = {block.away for block in holders if block.away}
        assert away == set(self.shelf)
        assert self.pool.stats().live == len(holders) - len(away)

    @invariant()
    def integers_are_the_naive_ones(self) -> None:
        """Length, positions, weights, ids, and no block more than the tokens need."""
        for stream in self.streams:
            table, tokens = stream.table, stream.tokens
            assert table.length == len(tokens)
            assert table.positions.tolist() == [x.position for x in tokens]
            assert table.weights.tolist() == [x.weight for x in tokens]
            assert table.ids.tolist() == [x.id for x in tokens]
            assert table.next_position == stream.end
            assert len(table.blocks) == -(-len(tokens) // self.size)
            assert all(block.sealed for block in table.blocks) or stream.work
            if not stream.work and not table._floor:
                assert len(table.block_table) == len(table.blocks)

    @invariant()
    def bytes_are_the_naive_ones(self) -> None:
        """Every token that lies in the pool is bitwise the list's; whole sequences by `gather`."""
        for stream in self.streams:
            k, v = self.kv([x.stamp for x in stream.tokens])
            if not any(block.away for block in stream.table.blocks):
                for layer in range(LAYERS):
                    got = stream.table.gather(layer)
                    assert torch.equal(got[0], k[layer]) and torch.equal(got[1], v[layer])
                continue
            for index, block in enumerate(stream.table.blocks):
                if not block.away:
                    for layer in range(LAYERS):
                        want = k[layer][index * self.size : (index + 1) * self.size]
                        assert torch.equal(self.pool.k[layer][block.slot][: len(want)], want)

    @invariant()
    def tails_see_what_they_should(self) -> None:
        """The past, then what was written; positions go up with depth, masks follow the tree."""
        for stream in self.busy():
            work, past = stream.work, len(stream.tokens)
            assert work
            n = len(work.above)
            mask = torch.zeros(n, n, dtype=torch.bool)
            for node in range(n):
                up = node
                while up >= 0:
                    mask[node, up] = True
                    up = work.above[up]
            assert torch.equal(work.tail.mask()[:, past:], mask)
            assert work.tail.mask()[:, :past].all()
            depths = (mask.sum(1) - 1).tolist()
            first = work.tail.positions[0] if work.tail.tree is None else stream.end
            assert work.tail.positions.tolist() == [first + depth for depth in depths]
            if work.stamps is not None:
                k, v = self.kv([x.stamp for x in stream.tokens] + work.stamps)
                for layer in range(LAYERS):
                    got = work.tail.kv(layer)
                    assert torch.equal(got[0], k[layer]) and torch.equal(got[1], v[layer])


def pick(things: list[Stream], index: int) -> Stream:
    """One of a list that is not empty; 0, which hypothesis likes best, is the newest."""
    return things[-1 - index % len(things)]


def test_random_use() -> None:
    """Whatever sequences do, they equal the lists bitwise, and nothing leaks."""
    run_state_machine_as_test(TokenMachine, settings=PROFILE)


# Mutants


def retain(patch: MonkeyPatch) -> None:
    """A fork forgets to count itself as a holder."""

    def fork(self: TokenTable) -> TokenTable:
        twin = TokenTable(self.pool)
        twin._blocks, twin._notes = list(self.blocks), self._notes.copy()
        return twin

    patch.setattr(TokenTable, "fork", fork)


def own(patch: MonkeyPatch) -> None:
    """An extension writes into a last block that others share."""
    patch.setattr(BlockPool, "own", lambda self, block: block)


def pack(patch: MonkeyPatch) -> None:
    """Compaction packs survivors into blocks that others share."""

    def pack(self: TokenTable, kept: Ints, first: int, total: int) -> None:
        size = self.pool.spec.block_tokens
        self._fetch(further=1)
        source = self._rows(kept[first * size :])
        if self._blocks_for(total) > len(self._blocks):
            self._blocks += self.pool.alloc(1)
        places = torch.arange(first * size, len(kept)).numpy()
        self._carry_rows(source, self._rows(places))

    patch.setattr(TokenTable, "_pack", pack)


def accept(patch: MonkeyPatch) -> None:
    """The first rows of a tree are kept in place of the path."""
    patch.setattr(TokenTable, "_carry", lambda self, source, target: None)


def depth(patch: MonkeyPatch) -> None:
    """Nodes of a tree get positions in order of their rows."""

    def scratch(self: TokenTable, tree: TokenTree) -> Tail:
        return self._begin(self._notes.ahead(range(len(tree))), tree)

    patch.setattr(TokenTable, "scratch", scratch)


def trim(patch: MonkeyPatch) -> None:
    """Blocks behind the last token are not given back."""

    def trim(self: TokenTable) -> None:
        self._blocks = self._blocks[: max(self._floor, self._blocks_for(self.length))]

    patch.setattr(TokenTable, "_trim", trim)


def abort(patch: MonkeyPatch) -> None:
    """An aborted tail keeps its blocks."""

    def abort(self: Tail) -> None:
        self._open, self._table._tail = False, None

    patch.setattr(Tail, "abort", abort)


def values(patch: MonkeyPatch) -> None:
    """Compaction carries keys but not values."""

    def carry(self: TokenTable, source: Ints, target: Ints) -> None:
        for layer in self._layers:
            k, _ = self._all_rows(layer)
            k[self._on_device(target)] = k[self._on_device(source)]

    patch.setattr(TokenTable, "_carry_rows", carry)


def weights(patch: MonkeyPatch) -> None:
    """Compaction leaves weights behind."""

    def keep(self: TokenNotes, kept: Ints) -> None:
        for column in (ID, POSITION):
            self._rows[: len(kept), column] = self._rows[kept, column]
        self._count = len(kept)

    patch.setattr(TokenNotes, "keep", keep)


def select(patch: MonkeyPatch) -> None:
    """Beams that were dropped stay open."""
    patch.setattr(beams, "select", lambda tables, parents: [tables[p].fork() for p in parents])


MUTANTS = (retain, own, pack, accept, depth, trim, abort, values, weights, select)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_noticed(monkeypatch: MonkeyPatch, mutant: Callable[[MonkeyPatch], None]) -> None:
    """With this fault in the code, an assertion fails."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(TokenMachine, settings=HUNT)
