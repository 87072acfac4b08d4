"""Frames, tokens, tiers and a prefix index on ONE pool, in any order, against plain lists.

The machines of the single rooms (`machine.py`, `test_tokens_machine.py`, `tier/`) look closer at
each; here it is what one does to the blocks of another: a window rolls while its fork lies on
disk, a compacted sequence shared its blocks with the index, an evicted prefix comes back from host
memory into a pool that another table filled meanwhile. HYPOTHESIS_PROFILE=nightly searches longer.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

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

from streamgen.cache import Append, Block, BlockPool, BlockTable, KVSpec, SinkWindow, Snapshot
from streamgen.cache.keys import Fingerprint
from streamgen.cache.prefix import PrefixIndex
from streamgen.cache.tier import DiskTier, HostTier, Tiers
from streamgen.cache.tokens import TokenTable
from streamgen.cache.tree import TokenTree
from streamgen.errors import InvalidRequest, PoolFull, TierError

SPEC = KVSpec(num_layers=2, kv_heads=1, head_dim=1, block_tokens=2)
FULL = (PoolFull, TierError)  # there may be no room
QUICK = settings(
    deadline=None,
    database=None,
    derandomize=True,
    max_examples=60,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
NIGHTLY = settings(QUICK, derandomize=False, max_examples=300, stateful_step_count=40)
# For mutants: found is enough, no shrinking.
HUNT = settings(QUICK, max_examples=200, phases=(Phase.generate,), report_multiple_bugs=False)
PROFILE = NIGHTLY if settings.default.max_examples > 1000 else QUICK  # as tests/conftest.py sets


@dataclass
class Frames:
    """A table of frames, and the stamp of every frame that was ever committed."""

    table: BlockTable
    stamps: list[float] = field(default_factory=list)

    @property
    def blocks(self) -> list[Block]:
        return [block for _, block in self.table.entries]


@dataclass
class Tokens:
    """A sequence of tokens, and the stamp of each."""

    table: TokenTable
    stamps: list[float] = field(default_factory=list)

    @property
    def blocks(self) -> list[Block]:
        return list(self.table.blocks)


Stream = Frames | Tokens


def rows(stamps: list[float]) -> torch.Tensor:
    """K of tokens with these stamps; V is its negative."""
    return torch.tensor(stamps)[:, None, None]


class Together(RuleBasedStateMachine):
    """The rules and the invariants; see the head of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.streams: list[Stream] = []
        self.marks: list[tuple[Snapshot, list[float]]] = []
        self.indexed: dict[tuple[float, ...], None] = {}
        self.stamp = 0.0

    @initialize(
        blocks=st.integers(10, 18),
        host=st.integers(1, 4),
        disk=st.integers(4, 30),
        chunks=st.integers(0, 5),
        tokens=st.integers(1, 6),
    )
    def start(self, blocks: int, host: int, disk: int, chunks: int, tokens: int) -> None:
        """A pool over two tiers and an index; a window and a sequence are under way."""
        size = SPEC.block_bytes
        self.pool = BlockPool(SPEC, blocks)
        self.tiers = Tiers(
            self.pool, [HostTier(host * size), DiskTier(self.folder, bytes(16), disk * size)]
        )
        self.index = PrefixIndex(self.pool, Fingerprint(model="test", spec=SPEC), self.tiers)
        self.new_frames(SinkWindow(1, 4))
        for _ in range(chunks):
            self.chunk(0, again=False, commit=True)
        self.new_tokens()
        self.extend(0, tokens, commit=True)
        self.insert(0)

    def teardown(self) -> None:
        """All holders gone, the pool is empty."""
        try:
            if hasattr(self, "pool"):
                for stream in self.streams:
                    stream.table.close()
                for mark, _ in self.marks:
                    mark.release()
                self.index.clear()
                assert self.pool.stats().free == self.pool.stats().total
                self.tiers.close()
        finally:
            shutil.rmtree(self.folder)

    # Frames

    @precondition(lambda self: len(self.streams) < 5)
    @rule(policy=st.sampled_from([SinkWindow(1, 4), SinkWindow(0, 3), Append(5)]))
    def new_frames(self, policy: SinkWindow | Append) -> None:
        self.streams.append(Frames(BlockTable(self.pool, policy)))

    @precondition(lambda self: self.frames())
    @rule(i=st.integers(0), again=st.booleans(), commit=st.booleans())
    def chunk(self, i: int, again: bool, commit: bool) -> None:
        """The next frame, or the last one anew; what it sees is right."""
        stream = self.frames()[i % len(self.frames())]
        table = stream.table
        with suppress(*FULL):
            self.tiers.resume(table, lane=0 if table.lane else table.policy.lane_size)
        before = (table.entries, table.end)
        try:
            chunk = table.reopen(1) if again else table.chunk(1)
        except (*FULL, InvalidRequest):
            assert (table.entries, table.end) == before
            return
        past = stream.stamps[: chunk.frames.start]
        for layer in range(SPEC.num_layers):
            k, v = (x[:: SPEC.block_tokens, 0, 0].tolist() for x in chunk.kv(layer))
            for place, ordinal in enumerate(chunk.meta.ordinals):
                if ordinal < len(past):
                    assert k[place] == past[ordinal] == -v[place]
        self.stamp += 1
        for layer in range(SPEC.num_layers):
            k = rows([self.stamp] * SPEC.block_tokens)
            chunk.write(layer, k, -k)
        if commit:
            chunk.commit()
            past.append(self.stamp)
        else:
            chunk.abort()
        stream.stamps = past

    @precondition(lambda self: self.frames() and len(self.marks) < 3)
    @rule(i=st.integers(0))
    def mark(self, i: int) -> None:
        stream = self.frames()[i % len(self.frames())]
        self.marks.append((stream.table.snapshot(), list(stream.stamps)))

    @precondition(lambda self: self.marks and self.frames())
    @rule(i=st.integers(0), to=st.integers(0), release=st.booleans())
    def rewind(self, i: int, to: int, release: bool) -> None:
        """Any table under the same policy can become what a snapshot holds."""
        mark, stamps = self.marks[to % len(self.marks)]
        stream = self.frames()[i % len(self.frames())]
        if mark.policy == stream.table.policy:
            stream.table.rewind(mark)
            stream.stamps = list(stamps)
        if release:
            self.marks.pop(to % len(self.marks))[0].release()

    # Tokens

    @precondition(lambda self: len(self.streams) < 5)
    @rule()
    def new_tokens(self) -> None:
        self.streams.append(Tokens(TokenTable(self.pool)))

    @precondition(lambda self: self.tokens())
    @rule(i=st.integers(0), n=st.integers(1, 5), commit=st.booleans())
    def extend(self, i: int, n: int, commit: bool) -> None:
        self.grow(i, list(range(-1, n - 1)), range(n) if commit else None, tree=False)

    @precondition(lambda self: self.tokens())
    @rule(
        i=st.integers(0),
        ups=st.lists(st.integers(0, 9), min_size=1, max_size=4),
        end=st.integers(0),
    )
    def grow_tree(self, i: int, ups: list[int], end: int) -> None:
        """Nodes hang below random earlier ones; the path to one of them is accepted."""
        parents = [up % (node + 1) - 1 for node, up in enumerate(ups)]
        self.grow(i, parents, TokenTree(parents).path(end % len(ups)), tree=True)

    def grow(self, i: int, parents: list[int], keep: object, tree: bool) -> None:
        stream = self.tokens()[i % len(self.tokens())]
        before = stream.table.length
        self.room_for(stream.blocks, 4)
        try:
            tail = (
                stream.table.scratch(TokenTree(parents))
                if tree
                else stream.table.extend(len(parents))
            )
        except FULL:
            assert stream.table.length == before
            return
        stamps = [self.stamp + 1 + node for node in range(len(parents))]
        self.stamp += len(parents)
        for layer in range(SPEC.num_layers):
            tail.write(layer, rows(stamps), -rows(stamps))
        if keep is None:
            tail.abort()
            return
        path = list(keep)  # type: ignore[call-overload]
        if tree:
            tail.accept(path)
        else:
            tail.commit()
        stream.stamps += [stamps[node] for node in path]

    @precondition(lambda self: self.tokens())
    @rule(i=st.integers(0), keep=st.sets(st.integers(0, 9)), cut=st.booleans())
    def shorten(self, i: int, keep: set[int], cut: bool) -> None:
        """Cut off the end, or compact to any of the tokens."""
        stream = self.tokens()[i % len(self.tokens())]
        kept = sorted(token for token in keep if token < stream.table.length)
        self.room_for(stream.blocks, 4)
        try:
            if cut:
                stream.table.truncate(len(kept))
                stream.stamps = stream.stamps[: len(kept)]
            else:
                stream.table.compact(kept)
                stream.stamps = [stream.stamps[token] for token in kept]
        except FULL:
            pass  # `every_byte_is_right` sees that nothing changed

    # Both

    @precondition(lambda self: 0 < len(self.streams) < 5)
    @rule(i=st.integers(0), more=st.integers(0, 3))
    def fork(self, i: int, more: int) -> None:
        """The twin of a sequence grows at once, or not."""
        stream = self.streams[i % len(self.streams)]
        self.streams.append(type(stream)(stream.table.fork(), list(stream.stamps)))  # type: ignore[arg-type]
        if isinstance(stream, Tokens) and more:
            self.extend(-1, more, commit=True)

    @precondition(lambda self: self.streams)
    @rule(i=st.integers(0))
    def close(self, i: int) -> None:
        self.streams.pop(i % len(self.streams)).table.close()

    # Tiers

    @precondition(lambda self: self.streams)
    @rule(i=st.integers(0))
    def park(self, i: int) -> None:
        with suppress(*FULL):
            self.tiers.park(self.streams[i % len(self.streams)].table)

    @precondition(lambda self: self.held())
    @rule(i=st.integers(0), down=st.booleans())
    def carry(self, i: int, down: bool) -> None:
        """One block goes down, or comes back."""
        held = list(self.held())
        block = held[i % len(held)]
        with suppress(*FULL, InvalidRequest):
            if down:
                self.tiers.demote(block)
            elif block.away:
                self.tiers.promote(block)

    @rule(n=st.integers(1, 5))
    def make_room(self, n: int) -> None:
        with suppress(*FULL):
            self.tiers.make_room(n)

    # The index

    @precondition(lambda self: self.tokens())
    @rule(i=st.integers(0))
    def insert(self, i: int) -> None:
        """A sequence's whole blocks become a prefix that others can find."""
        stream = self.tokens()[i % len(self.tokens())]
        whole = stream.table.length // SPEC.block_tokens
        blocks = stream.blocks[:whole]
        if all(block.sealed for block in blocks):
            symbols = tuple(stream.stamps[: whole * SPEC.block_tokens])
            self.index.insert(symbols, blocks)
            self.indexed[symbols] = None

    @precondition(lambda self: self.indexed and len(self.streams) < 5)
    @rule(i=st.integers(0), more=st.booleans())
    def match(self, i: int, more: bool) -> None:
        """What is found begins a new sequence."""
        symbols = list(self.indexed)[i % len(self.indexed)] + ((-1.0, -1.0) if more else ())
        blocks, n = self.index.match(symbols)
        assert n == len(blocks) <= len(symbols) // SPEC.block_tokens
        table = TokenTable(self.pool)
        length = n * SPEC.block_tokens
        table.adopt(blocks, length)
        self.pool.release_all(blocks)  # the table holds them now
        self.streams.append(Tokens(table, list(symbols[:length])))

    @rule(n=st.integers(1, 6))
    def evict(self, n: int) -> None:
        """At most what nobody else holds; the table's blocks stay."""
        free = self.pool.stats().free
        freed = self.index.evict(n)
        assert self.pool.stats().free >= free + freed

    # Helpers

    def frames(self) -> list[Frames]:
        return [x for x in self.streams if isinstance(x, Frames)]

    def tokens(self) -> list[Tokens]:
        return [x for x in self.streams if isinstance(x, Tokens)]

    def room_for(self, blocks: list[Block], n: int) -> None:
        with suppress(*FULL), self.tiers.using(blocks):
            self.tiers.make_room(n)

    def held(self) -> Counter[Block]:
        """Every block and how many hold it."""
        holders = Counter(block for stream in self.streams for block in stream.blocks)
        holders.update(block for mark, _ in self.marks for _, block in mark.entries)
        holders.update(block for node in self.index._nodes() for block in node.blocks)
        return holders

    def expected(self) -> Iterator[tuple[Block, list[float]]]:
        """The stamps of a block's tokens, as far as they are known."""
        pairs = [(x.table.entries, x.stamps) for x in self.frames()]
        pairs += [(mark.entries, stamps) for mark, stamps in self.marks]
        for entries, stamps in pairs:
            for ordinal, block in entries:
                yield block, [stamps[ordinal]] * SPEC.block_tokens
        for stream in self.tokens():
            for at, block in enumerate(stream.blocks):
                yield block, stream.stamps[at * SPEC.block_tokens :][: SPEC.block_tokens]

    # What must hold after every step

    @invariant()
    def handles_slots_and_holders_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        self.index.check()
        holders = self.held()
        assert all(block.ref == count for block, count in holders.items())
        live = {b for slot in range(self.pool.stats().total) if (b := self.pool.at(slot))}
        assert live == {block for block in holders if block.slot >= 0}

    @invariant()
    def every_byte_is_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        for block, stamps in self.expected():
            out = torch.empty(SPEC.block_bytes, dtype=torch.uint8)
            payload = memoryview(out.numpy())
            if block.away:
                block.away.read(payload)
            else:
                self.pool.read(block, payload)
            k, v = out.view(torch.float32).view(2, SPEC.num_layers, -1)
            for layer in range(SPEC.num_layers):
                assert k[layer, : len(stamps)].tolist() == stamps
                assert (-v[layer, : len(stamps)]).tolist() == stamps


def test_random_use() -> None:
    """Whatever happens to shared blocks, no byte is wrong, nothing is lost, nothing leaks."""
    run_state_machine_as_test(Together, settings=PROFILE)


# The code broken on purpose, where one room relies on another: the machine must notice


def share_the_tail(patch: pytest.MonkeyPatch) -> None:
    """A shared last block is written to."""

    def own(self: BlockPool, block: Block) -> Block:
        block.sealed = False
        return block

    patch.setattr(BlockPool, "own", own)


def borrow(patch: pytest.MonkeyPatch) -> None:
    """The index holds blocks without counting itself."""
    hang = PrefixIndex._hang

    def uncounted(self: PrefixIndex, node: Any, rest: Any, new: list[Block], keys: Any) -> None:
        hang(self, node, rest, new, keys)
        for block in new:
            block.ref -= 1

    patch.setattr(PrefixIndex, "_hang", uncounted)


def keep_the_slot(patch: pytest.MonkeyPatch) -> None:
    """A block that went to a tier still claims its slot."""
    unload = BlockPool.unload

    def half(self: BlockPool, block: Block, away: Any) -> None:
        slot = block.slot
        unload(self, block, away)
        block.slot = slot

    patch.setattr(BlockPool, "unload", half)


@pytest.mark.parametrize("mutant", [share_the_tail, borrow, keep_the_slot])
def test_mutant_is_noticed(monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    """With this fault in the code an assertion fails."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Together, settings=HUNT)
