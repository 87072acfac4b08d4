"""The radix tree against a flat list of prefixes; what eviction may take, and what tiers keep.

The naive index is a dictionary from a whole prefix, as a tuple, to its last block: it knows no tree
and no runs, finds the longest prefix by trying them all, and evicts one block at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamgen.cache import Append, Block, BlockPool, BlockTable, KVSpec, Snapshot
from streamgen.cache.keys import Fingerprint, chunk_key, nonce
from streamgen.cache.prefix import PrefixIndex
from streamgen.cache.tier import DiskTier, HostTier, Tiers
from streamgen.errors import InvalidRequest, PoolFull, TierError

SPEC = KVSpec(num_layers=1, kv_heads=1, head_dim=2, block_tokens=2)
PRINT = Fingerprint(model="weights", spec=SPEC)
OTHER = replace(PRINT, salt="somebody else")


def sealed(pool: BlockPool, n: int) -> list[Block]:
    """`n` blocks as if committed."""
    blocks = pool.alloc(n)
    for block in blocks:
        block.sealed = True
    return blocks


def put(index: PrefixIndex, symbols: Sequence[Any], *args: Fingerprint) -> list[Block]:
    """Insert fresh blocks for the symbols; only the index holds them afterwards."""
    blocks = sealed(index.pool, len(symbols) // index.block_symbols)
    index.insert(symbols, blocks, *args)
    drop(index, blocks)
    return blocks


def drop(index: PrefixIndex, blocks: Sequence[Block]) -> None:
    for block in blocks:
        index.pool.release(block)


def look(index: PrefixIndex, symbols: Sequence[Any], *args: Fingerprint) -> list[Block]:
    """Match and hold nothing."""
    blocks, n = index.match(symbols, *args)
    assert n == len(blocks)
    drop(index, blocks)
    return blocks


@pytest.fixture
def index() -> PrefixIndex:
    """Over a pool of 12 blocks of 2 tokens."""
    return PrefixIndex(BlockPool(SPEC, 12), PRINT)


# Longest prefix, reference counts and order of eviction against the naive index


@dataclass
class Naive:
    """Every prefix by itself; see the head of this file."""

    known: dict[tuple[Any, ...], Block] = field(default_factory=dict)
    used: dict[tuple[Any, ...], int] = field(default_factory=dict)
    now: int = 0

    def match(self, symbols: tuple[int, ...], salt: str) -> list[Block]:
        self.now += 1
        found = []
        for end in range(2, len(symbols) + 1, 2):
            prefix = (salt, *symbols[:end])
            if prefix not in self.known:
                break
            self.used[prefix] = self.now
            found.append(self.known[prefix])
        return found

    def insert(self, symbols: tuple[int, ...], salt: str, blocks: list[Block]) -> None:
        for i in range(len(self.match(symbols, salt)), len(blocks)):
            prefix = (salt, *symbols[: 2 * i + 2])
            self.known[prefix], self.used[prefix] = blocks[i], self.now

    def evict(self, n: int, held: list[Block]) -> int:
        freed = 0
        while freed < n:
            leaves = [
                p
                for p in self.known
                if self.known[p] not in held
                and not any(q[: len(p)] == p for q in self.known if len(q) > len(p))
            ]
            if not leaves:
                break
            oldest = min(leaves, key=lambda p: self.used[p])
            del self.known[oldest], self.used[oldest]
            freed += 1
        return freed


PROMPTS = st.lists(st.integers(0, 1), max_size=11).map(tuple)
SALTS = st.sampled_from(["", "somebody else"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), PROMPTS, SALTS, st.integers(0, 3)),
        st.tuples(st.just("match"), PROMPTS, SALTS, st.booleans()),
        st.tuples(st.just("evict"), st.integers(1, 4)),
        st.tuples(st.just("let go"), st.integers(0, 20)),
    ),
    min_size=8,
    max_size=40,
)


@settings(max_examples=60)
@given(steps=STEPS)
def test_against_the_naive_index(steps: list[tuple[Any, ...]]) -> None:
    """Same blocks found, same ones evicted, and each block counted exactly, after every step."""
    pool = BlockPool(SPEC, 12)
    index, naive = PrefixIndex(pool, PRINT), Naive()
    held: list[Block] = []
    for step in steps:
        match step:
            case ("insert", symbols, salt, keep):
                needed = len(symbols) // 2
                missing = max(0, needed - pool.stats().free)
                assert index.evict(missing) == naive.evict(missing, held)
                if pool.stats().free < needed:
                    continue
                blocks = sealed(pool, needed)
                before = len(naive.known)
                naive.insert(symbols, salt, blocks)
                new = index.insert(symbols, blocks, replace(PRINT, salt=salt))
                assert new == len(naive.known) - before
                drop(index, blocks[keep:])
                held += blocks[:keep]
            case ("match", symbols, salt, keep):
                blocks, n = index.match(symbols, replace(PRINT, salt=salt))
                assert n == len(blocks) and blocks == naive.match(symbols, salt)
                if keep:
                    held += blocks
                else:
                    drop(index, blocks)
            case ("evict", n):
                assert index.evict(n) == naive.evict(n, held)
            case ("let go", which):
                if held:
                    pool.release(held.pop(which % len(held)))
        pool.check()
        index.check()
        live = {block for block in pool._blocks if block}
        assert live == {*naive.known.values(), *held}
        for block in live:
            assert block.ref == held.count(block) + (block in naive.known.values())
        assert index.stats().blocks == len(naive.known)
    index.clear()
    drop(index, held)
    assert pool.stats().free == 12


# Whole blocks


def test_match_ends_at_a_whole_block(index: PrefixIndex) -> None:
    """A block that differs in its last symbol, or is asked for in part, is no hit."""
    blocks = put(index, [1, 2, 3, 4, 5, 6])
    assert look(index, [1, 2, 3, 4, 5, 6, 7]) == blocks
    assert look(index, [1, 2, 3, 4, 5]) == blocks[:2]
    assert look(index, [1, 2, 3, 0, 5, 6]) == blocks[:1]
    assert look(index, [3, 4]) == look(index, []) == []


def test_symbols_behind_the_last_whole_block(index: PrefixIndex) -> None:
    """Are left out; a prompt of less than a block leaves nothing behind."""
    assert put(index, [1, 2, 3]) == look(index, [1, 2, 3])
    assert put(index, [9]) == []
    assert index.stats().blocks == 1


def test_sequences_of_every_kind(index: PrefixIndex) -> None:
    """Lists, tuples, arrays of numpy and of the standard library spell the same prefix."""
    blocks = put(index, [1, 2, 3, 4])
    for symbols in ((1, 2, 3, 4), np.arange(1, 5), array("q", [1, 2, 3, 4])):
        assert look(index, symbols) == blocks


def test_packed_token_ids() -> None:
    """As bytes, 8 a token, they are compared by memory; blocks end where tokens of a block end."""
    index = PrefixIndex(BlockPool(SPEC, 12), PRINT, block_symbols=16)
    blocks = put(index, array("q", [1, 2, 3, 400_000, 5]).tobytes())
    assert look(index, array("q", [1, 2, 3, 400_000]).tobytes()) == blocks
    assert look(index, array("q", [1, 2, 3, 4]).tobytes()) == blocks[:1]
    assert (index.stats().asked_tokens, index.stats().hit_tokens) == (8, 6)


def test_frame_keys(index: PrefixIndex) -> None:
    """One symbol a block, of any hashable kind."""
    index = PrefixIndex(index.pool, PRINT, block_symbols=1)
    key = chunk_key(b"", PRINT, "a maze")
    blocks = put(index, [(key, 0), (key, 1), nonce()])
    assert look(index, [(key, 0), (key, 1), nonce()]) == blocks[:2]


def test_insert_twice(index: PrefixIndex) -> None:
    """The blocks that came first stay, the others are not held, and nothing is counted twice."""
    first = put(index, [1, 2, 3, 4])
    again = sealed(index.pool, 3)
    assert index.insert([1, 2, 3, 4, 5, 6], again) == 1
    assert index.insert([1, 2, 3, 4, 5, 6], again) == 0
    assert [block.ref for block in (*first, *again)] == [1, 1, 1, 1, 2]
    assert look(index, [1, 2, 3, 4, 5, 6]) == [*first, again[2]]


def test_what_insert_refuses(index: PrefixIndex) -> None:
    """A wrong number of blocks or a pending one: with both numbers, and nothing has changed."""
    blocks = index.pool.alloc(2)
    with pytest.raises(InvalidRequest, match="2 blocks for 3 symbols: 2 .* accepted are 1"):
        index.insert([1, 2, 3], blocks)
    with pytest.raises(InvalidRequest, match="pending"):
        index.insert([1, 2, 3, 4], blocks)
    assert [block.ref for block in blocks] == [1, 1] and index.stats().blocks == 0


def test_another_geometry_is_refused(index: PrefixIndex) -> None:
    """A fingerprint says how a block is stored; blocks of this pool are not stored so."""
    strange = replace(PRINT, spec=replace(SPEC, block_tokens=3))
    with pytest.raises(InvalidRequest, match="block_tokens=3.*block_tokens=2"):
        PrefixIndex(index.pool, strange)
    with pytest.raises(InvalidRequest, match="block_tokens=3"):
        index.insert([1, 2], sealed(index.pool, 1), strange)
    with pytest.raises(InvalidRequest, match="block_symbols=0"):
        PrefixIndex(index.pool, PRINT, block_symbols=0)


def test_reads_change_no_reads(index: PrefixIndex) -> None:
    """Whatever was asked in between, the same question has the same answer."""
    put(index, [1, 2, 3, 4, 5, 6])
    put(index, [1, 2, 3, 4, 7, 8])
    questions = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9], [1, 2, 0, 0], [1, 2], [0, 0], [])
    answers = [look(index, q) for q in questions]
    for _ in range(2):
        for question, answer in reversed(list(zip(questions, answers, strict=True))):
            assert look(index, question) == answer


def test_radix_example() -> None:
    """Four prompts of a system prompt (400 tokens), one of two documents (1,200) and a question
    (150): 7,000 tokens without reuse, 5,800 with the system prompt cached, 3,400 with the tree."""
    spec = KVSpec(num_layers=1, kv_heads=1, head_dim=2, block_tokens=16)
    system, first, second = ([i] * n for i, n in ((1, 400), (2, 1200), (3, 1200)))
    prompts = [[*system, *doc, *[q] * 150] for q, doc in enumerate((first, first, second, second))]

    def prefilled(known: list[int] | None, learn: bool) -> int:
        index = PrefixIndex(BlockPool(spec, 500), Fingerprint(model="m", spec=spec))
        if known:
            put(index, known)
        total = len(known or [])
        for prompt in prompts:
            total += len(prompt) - 16 * len(look(index, prompt))
            if learn:
                put(index, prompt)
        asked, hit = index.stats().asked_tokens, index.stats().hit_tokens
        assert (asked, total) == (7000, 7000 - hit + len(known or []))
        return total

    assert prefilled(None, learn=False) == 7000
    assert prefilled(system, learn=False) == 5800
    assert prefilled(None, learn=True) == 3400


# Fingerprints

CHANGES: dict[str, Any] = {
    "model": "other weights",
    "adapters": ("one",),
    "positions": "sliding_sink",
    "context_noise": 50.0,
    "salt": "me",
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_fingerprint_never_matches(index: PrefixIndex, name: str) -> None:
    """The same symbols are two prefixes, with blocks of their own."""
    other = replace(PRINT, **{name: CHANGES[name]})
    mine = put(index, [1, 2, 3, 4])
    assert look(index, [1, 2, 3, 4], other) == []
    theirs = put(index, [1, 2], other)
    assert look(index, [1, 2, 3, 4], other) == theirs
    assert look(index, [1, 2, 3, 4]) == mine


# Eviction


def test_evict_takes_the_longest_unused_leaf(index: PrefixIndex) -> None:
    """Not a shared beginning while something hangs on it; a match counts as use."""
    trunk, *_ = put(index, [1, 1])
    a, b, c = (put(index, [1, 1, x, x])[1] for x in (2, 3, 4))
    look(index, [1, 1, 2, 2])
    gone = []
    for _ in range(4):
        assert index.evict(1) == 1
        gone += [x for x in (trunk, a, b, c) if x.slot < 0 and x not in gone]
    assert gone == [b, c, a, trunk]
    assert index.evict(1) == 0


def test_evict_goes_from_the_end(index: PrefixIndex) -> None:
    """A run loses its last blocks first, and those used in part keep that part longer."""
    first = put(index, [1, 2, 3, 4, 5, 6])
    second = put(index, [7, 8, 9, 0])
    look(index, [1, 2])
    index.evict(2)
    assert [block.slot >= 0 for block in first] == [True, False, False]
    index.evict(2)
    assert [block.slot >= 0 for block in (*first, *second)] == [True, False, False, False, False]


def test_held_blocks_stay(index: PrefixIndex) -> None:
    """And so does what leads to them, although nobody holds that."""
    blocks = put(index, [1, 2, 3, 4, 5, 6])
    index.pool.retain(blocks[1])
    assert index.evict(5) == 1
    assert look(index, [1, 2, 3, 4, 5, 6]) == blocks[:2]
    index.pool.release(blocks[1])
    assert index.evict(5) == 2 and index.stats().nodes == 0


def test_a_full_pool(index: PrefixIndex) -> None:
    """An index may fill the pool; evicting as many as are missing makes the allocation possible."""
    put(index, [1, 2] * 6)
    put(index, [3, 4] * 6)
    with pytest.raises(PoolFull):
        index.pool.alloc(3)
    assert index.evict(3) == 3
    index.pool.alloc(3)
    assert (len(look(index, [1, 2] * 6)), len(look(index, [3, 4] * 6))) == (3, 6)


def test_evict_counts_free_slots(index: PrefixIndex) -> None:
    """A block that lies in somebody's lane leaves no slot that others could use."""
    lane = index.pool.reserve(2)
    block = index.pool.put(lane.base)
    block.sealed = True
    index.insert([1, 2], [block])
    index.pool.release(block)
    other = put(index, [3, 4])
    assert index.evict(1) == 1
    assert (block.slot, other[0].slot) == (-1, -1)


def test_clear(index: PrefixIndex) -> None:
    """Nothing is held and nothing is found; what others hold lives on."""
    kept, *_ = sealed(index.pool, 1)
    index.insert([1, 2], [kept])
    put(index, [3, 4, 5, 6], OTHER)
    index.clear()
    assert (index.pool.stats().live, kept.ref, look(index, [1, 2])) == (1, 1, [])
    put(index, [1, 2])
    index.check()


def test_queue_stays_small(index: PrefixIndex) -> None:
    """Entries of what is gone are swept out."""
    for i in range(2000):
        put(index, [i, i])
        index.evict(1) if i % 2 else index.clear()
    assert len(index._queue) < 200


# Tables


def test_a_table_begins_with_what_was_found(
    write: Callable[..., None], spec: KVSpec, pool: BlockPool
) -> None:
    """A session's frames go into the index; another begins from there, and neither can change what
    the other sees."""
    policy = Append(8)
    index = PrefixIndex(pool, Fingerprint(model="m", spec=spec), block_symbols=1)
    one, two = BlockTable(pool, policy), BlockTable(pool, policy)
    with one.chunk(3) as chunk:
        write(chunk, 5.0)
        chunk.commit()
    keys = [chunk_key(b"", index.fingerprint, "given", i) for i in range(3)]
    index.insert(keys, [block for _, block in one.entries])
    with one.reopen(3) as chunk:
        write(chunk, 9.0)
        chunk.commit()
    blocks, n = index.match([*keys, nonce()])
    found = Snapshot(pool, policy, dict(enumerate(blocks)), n)
    drop(index, blocks)
    two.rewind(found)
    found.release()
    with two.chunk(1) as chunk:
        write(chunk, 5.0)
        seen = chunk.kv(0)[0].view(4, 3, 2, 4)[:, 0, 0, 0]
        torch.testing.assert_close(seen, torch.tensor([5.0, 6.0, 7.0, 8.0]))
        chunk.commit()
    for table in (one, two):
        table.close()
    assert pool.stats().live == index.evict(8) == 3
    pool.check()


# Tiers


class Shelf:
    """Tiers of one kind: bytes in a dictionary, which can be full and lose what it has."""

    def __init__(self, pool: BlockPool, room: int = 100) -> None:
        self.pool, self.room = pool, room
        self.kept: dict[bytes, bytearray] = {}

    def store(self, key: bytes, block: Block) -> None:
        if key not in self.kept:
            if len(self.kept) >= self.room:
                raise TierError("the shelf is full")
            self.kept[key] = data = bytearray(self.pool.payload_bytes)
            block.away.read(memoryview(data)) if block.away else self.pool.read(block, data)

    def has(self, key: bytes) -> bool:
        return key in self.kept

    def fetch(self, key: bytes) -> Block | None:
        if key not in self.kept:
            return None
        block = Block(-1, sealed=True)
        block.away = Elsewhere(self.kept[key])
        self.pool.load(block, self.pool.spare(1)[0])
        return block


class Elsewhere:
    """An `Away`."""

    def __init__(self, data: bytearray | None) -> None:
        self.data = data

    def read(self, out: memoryview) -> None:
        if self.data is None:
            raise TierError("lost")
        out[:] = self.data

    def forget(self) -> None:
        self.data = None


def park(pool: BlockPool, block: Block) -> Elsewhere:
    """Move a block elsewhere, as another holder may do."""
    data = bytearray(pool.payload_bytes)
    pool.read(block, memoryview(data))
    away = Elsewhere(data)
    pool.unload(block, away)
    return away


def fill(pool: BlockPool, blocks: Sequence[Block], first: float = 1.0) -> list[float]:
    """Put one number into each block; the numbers."""
    numbers = [first + i for i in range(len(blocks))]
    for block, x in zip(blocks, numbers, strict=True):
        pool.k[0][block.slot].fill_(x)
        pool.v[0][block.slot].fill_(-x)
    return numbers


def filled(pool: BlockPool, blocks: Sequence[Block]) -> list[float]:
    """What `fill` has put there."""
    for block in blocks:
        k, v = pool.k[0][block.slot], pool.v[0][block.slot]
        assert bool((k == k.flatten()[0]).all() and (v == -k).all())
    return [float(pool.k[0][block.slot].flatten()[0]) for block in blocks]


@pytest.fixture
def shelf(index: PrefixIndex) -> Shelf:
    """The tiers of `index`."""
    index.tiers = Shelf(index.pool)
    return index.tiers


@settings(max_examples=40)
@given(
    steps=st.lists(st.tuples(PROMPTS, st.booleans(), st.integers(0, 5)), min_size=5, max_size=25)
)
def test_nothing_is_forgotten_while_a_tier_takes_it(steps: list[tuple[Any, ...]]) -> None:
    """In a pool of 6 blocks: every prefix that was ever inserted is found, with its bytes, as far
    as the pool has room for it beside what is held; each block is counted exactly."""
    pool = BlockPool(SPEC, 6)
    index = PrefixIndex(pool, PRINT, Shelf(pool))
    content: dict[tuple[int, ...], float] = {}
    held: list[Block] = []
    for symbols, keep, n in steps:
        wanted = len(symbols) // 2
        prefixes = [symbols[: 2 * i + 2] for i in range(wanted)]
        blocks, found = index.match(symbols)
        assert found == sum(p in content for p in prefixes) or pool.stats().free == 0
        assert filled(pool, blocks) == [content[p] for p in prefixes[:found]]
        held += blocks
        index.evict(wanted - found)
        if pool.stats().free >= wanted - found:
            fresh = sealed(pool, wanted - found)
            for prefix, block in zip(prefixes[found:], fresh, strict=True):
                fill(pool, [block], content.setdefault(prefix, len(content) + 1.0))
            index.insert(symbols, blocks + fresh)
            drop(index, fresh)
        if not keep:
            drop(index, held)
            held = []
        index.evict(n)
        pool.check()
        index.check()
        inside = [block for node in index._nodes() for block in node.blocks]
        live = {block for block in pool._blocks if block}
        assert live == {*inside, *held} and len(inside) == len(set(inside))
        assert all(block.ref == held.count(block) + (block in inside) for block in live)
        assert index.stats().bytes == len(inside) * pool.payload_bytes
    drop(index, held)
    index.clear()
    assert pool.stats().free == 6


def test_what_was_evicted_comes_back(index: PrefixIndex, shelf: Shelf) -> None:
    """In new blocks with the same bytes, held by the caller and by the index."""
    numbers = fill(index.pool, put(index, [1, 2, 3, 4, 5, 6]))
    assert index.evict(2) == 2 and len(shelf.kept) == 2
    blocks, n = index.match([1, 2, 3, 4, 5, 6, 7, 8])
    assert n == 3 and filled(index.pool, blocks) == numbers
    assert [block.ref for block in blocks] == [2, 2, 2]
    assert (index.stats().hit_tokens, index.stats().tier_tokens) == (6, 4)
    index.check()


def test_leaves_go_first(index: PrefixIndex, shelf: Shelf) -> None:
    """The same order as without tiers."""
    put(index, [1, 1])
    for x in (2, 3):
        put(index, [1, 1, x, x])
    look(index, [1, 1, 2, 2])
    index.evict(1)
    keys = [*shelf.kept]
    trunk = chunk_key(b"", PRINT, (1, 1))
    assert keys == [chunk_key(trunk, PRINT, (3, 3))]
    index.evict(5)
    assert [*shelf.kept] == [*keys, chunk_key(trunk, PRINT, (2, 2)), trunk]


def test_another_index_finds_it(index: PrefixIndex, shelf: Shelf) -> None:
    """As after a restart: everything that was flushed or evicted, and nothing of others."""
    numbers = fill(index.pool, put(index, [1, 2, 3, 4]))
    index.flush()
    assert index.stats().blocks == 2
    index.clear()
    later = PrefixIndex(index.pool, PRINT, shelf)
    assert look(later, [1, 2, 3, 4], OTHER) == look(later, [3, 4]) == []
    found = look(later, [1, 2, 3, 4])
    assert filled(index.pool, found) == numbers
    assert later.stats().nodes == 1
    later.check()


def test_keys_of_every_kind_of_sequence(index: PrefixIndex, shelf: Shelf) -> None:
    """A prompt that was inserted as an array is found as a list."""
    put(index, np.array([1, 2, 3, 4]))
    index.evict(2)
    assert len(look(index, [1, 2, 3, 4])) == 2


def test_split_runs_keep_their_keys(index: PrefixIndex, shelf: Shelf) -> None:
    """A branch divides a run, and all of it is still found under what it spells."""
    put(index, [1, 2, 3, 4, 5, 6])
    put(index, [1, 2, 3, 4, 7, 8])
    look(index, [1, 2])
    index.evict(12)
    assert len(look(index, [1, 2, 3, 4, 5, 6])) == len(look(index, [1, 2, 3, 4, 7, 8])) == 3


def test_a_lost_copy_ends_the_prefix(index: PrefixIndex, shelf: Shelf) -> None:
    """Blocks behind it are not reached, though they are there; inserted anew, all is found."""
    put(index, [1, 2, 3, 4, 5, 6])
    index.evict(3)
    del shelf.kept[[*shelf.kept][1]]
    assert len(look(index, [1, 2, 3, 4, 5, 6])) == 1
    put(index, [1, 2, 3, 4, 5, 6])
    assert len(look(index, [1, 2, 3, 4, 5, 6])) == 3


def test_a_read_forgets_nothing(index: PrefixIndex, shelf: Shelf) -> None:
    """Without room in pool and tiers the prefix is shorter this time, and others stay whole."""
    put(index, [1, 2, 3, 4])
    index.evict(2)
    shelf.room = 2
    other = put(index, [5, 6] * 12)
    assert look(index, [1, 2, 3, 4]) == []
    assert look(index, [5, 6] * 12) == other
    shelf.room = 4
    assert len(look(index, [1, 2, 3, 4])) == 2
    assert index.stats().blocks == 12 and len(shelf.kept) == 4


def test_what_no_tier_takes_is_forgotten(index: PrefixIndex, shelf: Shelf) -> None:
    """Then memory comes first."""
    blocks = put(index, [1, 2, 3, 4, 5, 6])
    shelf.room = 0
    assert index.evict(2) == 2
    assert look(index, [1, 2, 3, 4, 5, 6]) == blocks[:1] and not shelf.kept


def test_a_failing_tier_is_a_miss(index: PrefixIndex, shelf: Shelf) -> None:
    """A match never fails for it; a flush says so."""
    put(index, [1, 2, 3, 4])
    index.evict(1)
    shelf.fetch = shelf.store = raising  # type: ignore[method-assign]
    assert len(look(index, [1, 2, 3, 4])) == 1
    with pytest.raises(TierError, match="no network"):
        index.flush()


def test_symbols_without_content(index: PrefixIndex, shelf: Shelf) -> None:
    """Can't be named in a tier: refused by an insert, a miss for a match; nothing is held."""
    blocks = put(index, [1, 2])
    assert look(index, [1, 2, object(), object()]) == blocks
    with pytest.raises(InvalidRequest, match="object can't be part of a key"):
        put(index, [1, 2, object(), object()])
    assert blocks[0].ref == 1
    index.check()


def raising(*args: object) -> None:
    raise TierError("no network")


@pytest.mark.parametrize("tiers", [False, True])
def test_blocks_that_others_have_moved(index: PrefixIndex, tiers: bool) -> None:
    """They come back with a match, are counted as away until then, and die there if forgotten."""
    if tiers:
        index.tiers = Shelf(index.pool)
    blocks = put(index, [1, 2, 3, 4, 5, 6])
    numbers = fill(index.pool, blocks)
    for block in blocks[1:]:
        park(index.pool, block)
    assert (index.stats().away, index.stats().bytes) == (2, index.pool.payload_bytes)
    assert look(index, [1, 2, 3, 4]) == blocks[:2]
    assert filled(index.pool, blocks[:2]) == numbers[:2] and blocks[2].away
    away = blocks[2].away
    assert index.evict(1) == 1 and away.data is None
    assert len(look(index, [1, 2, 3, 4, 5, 6])) == (3 if tiers else 1)
    index.check()


def test_moved_blocks_can_be_lost(index: PrefixIndex) -> None:
    """A clean miss from there on: forgotten with all behind it, and free to be inserted anew."""
    blocks = put(index, [1, 2, 3, 4, 5, 6])
    put(index, [1, 2, 3, 4, 7, 8])
    park(index.pool, blocks[1]).data = None
    assert look(index, [1, 2, 3, 4, 5, 6]) == blocks[:1]
    assert index.stats().blocks == 1 and blocks[2].ref == 0
    index.check()
    assert len(put(index, [1, 2, 3, 4])) == len(look(index, [1, 2, 3, 4])) == 2


def test_moved_blocks_need_room(index: PrefixIndex) -> None:
    """In a full pool the prefix ends before them, and nothing is forgotten for it."""
    blocks = put(index, [1, 2, 3, 4])
    park(index.pool, blocks[1])
    put(index, [5, 6] * 11)
    assert look(index, [1, 2, 3, 4]) == blocks[:1]
    index.evict(1)
    assert look(index, [1, 2, 3, 4]) == blocks


def test_behind_the_real_tiers(tmp_path: Path) -> None:
    """Host memory for two blocks and a folder: an evicted prefix comes back from both."""
    pool = BlockPool(SPEC, 12)
    room = 2 * pool.payload_bytes
    tiers = Tiers(pool, [HostTier(room), DiskTier(tmp_path, PRINT.digest[:16])])
    index = PrefixIndex(pool, PRINT, tiers)
    numbers = fill(pool, put(index, range(12)))
    assert index.evict(6) == 6
    assert [tier.entries for tier in tiers.stats()] == [2, 4]
    assert filled(pool, look(index, range(12))) == numbers
    tiers.close()


def test_after_a_restart(tmp_path: Path) -> None:
    """What was evicted or flushed to a folder is found by the next process."""
    numbers: list[float] = []
    for run in range(2):
        pool = BlockPool(SPEC, 12)
        tiers = Tiers(pool, [DiskTier(tmp_path, PRINT.digest[:16])])
        index = PrefixIndex(pool, PRINT, tiers)
        if run == 0:
            numbers = fill(pool, put(index, range(12)))
            index.evict(2)
            index.flush()
        assert filled(pool, look(index, range(14))) == numbers
        tiers.close()
