"""Which blocks already hold the K/V of a given prefix: a radix tree over symbols (RadixAttention).

A symbol is a token id, `block_tokens` of which fill a block, or the key of a given frame, one for
each block. A path from the root spells a prefix; a node is a run of whole blocks without a branch,
and holds every one of them once. So prompts share whatever beginning they have in common, down to
the block, without anyone declaring it.

The first symbol of each path is a `Fingerprint` (`streamgen.cache.keys`): with another model, codec
or salt nothing ever matches.

With tiers, what leaves the tree is stored there under the key of its prefix (`chunk_key` over its
blocks), and a match that comes to the end of the tree goes on there: in this process, a later one
or another. Tiers have an order of use of their own, so the tree remembers nothing of what has left.

Order of eviction: whoever uses a path uses all of it from the root on, and a path that is used in
part is split there. So every block of a node was last used at the same time, and no parent earlier
than its children: sorted by (last use, depth from below) children always come before their parent.
The queue is a heap of that; an entry that use has made too early is put right when it comes up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Protocol

from streamgen.cache.keys import Fingerprint, chunk_key
from streamgen.cache.pool import Block, BlockPool
from streamgen.errors import InvalidRequest, StreamgenError, TierError

Symbols = tuple[Any, ...] | bytes


class Store(Protocol):
    """Bytes of blocks under keys, outside the pool (`streamgen.cache.tier.Tiers`)."""

    def store(self, key: bytes, block: Block) -> None:
        """Keep a copy of a sealed block; raises TierError if that can't be done."""
        ...

    def has(self, key: bytes) -> bool:
        """Whether there is such a copy, as far as can be told without reading it."""
        ...

    def fetch(self, key: bytes) -> Block | None:
        """A new block with verified bytes in a free slot of the pool; None if there are none."""
        ...


@dataclass(frozen=True)
class PrefixStats:
    """Counts of an index.

    Attributes:
        nodes: runs of blocks without a branch.
        blocks: blocks that the index holds.
        away: those of them that somebody has moved to another tier.
        bytes: pool memory of the others.
        asked_tokens: tokens that `match` was asked for, since the index was made.
        hit_tokens: those of them whose K/V it found.
        tier_tokens: those of them that came back from the tiers.
    """

    nodes: int
    blocks: int
    away: int
    bytes: int
    asked_tokens: int
    hit_tokens: int
    tier_tokens: int


class _Node:
    """A run of blocks; `end` counts the blocks from the root to its end.

    `keys` are those of the prefixes that end at each block; empty where there are no tiers.
    """

    __slots__ = ("symbols", "blocks", "keys", "children", "parent", "end", "stamp", "entry")

    def __init__(
        self,
        symbols: Symbols,
        blocks: list[Block],
        keys: list[bytes],
        parent: _Node | None,
        stamp: int,
    ) -> None:
        self.symbols = symbols
        self.blocks = blocks
        self.keys = keys
        self.children: dict[Symbols, _Node] = {}  # by the symbols of their first block
        self.parent = parent
        self.end: int = len(blocks) + (parent.end if parent else 0)
        self.stamp = stamp
        self.entry: tuple[int, int, int, _Node] | None = None  # its place in the queue

    @property
    def start(self) -> int:
        return self.end - len(self.blocks)


class PrefixIndex:
    """The blocks of every prefix that was inserted and not evicted.

    Args:
        pool: where the blocks lie.
        fingerprint: of all symbols for which no other is given.
        tiers: keep what `evict` drives out of the pool; None = that is forgotten.
        block_symbols: symbols of a block. None = `block_tokens`, for token ids; 1 for frame keys;
            `8 * block_tokens` for token ids packed as bytes (`array("q", ids).tobytes()`), which
            compare as fast as memory is read.

    Raises:
        InvalidRequest: the fingerprint is of another geometry than the pool.
    """

    def __init__(
        self,
        pool: BlockPool,
        fingerprint: Fingerprint,
        tiers: Store | None = None,
        block_symbols: int | None = None,
    ) -> None:
        self.pool, self.fingerprint, self.tiers = pool, fingerprint, tiers
        self.block_symbols = pool.spec.block_tokens if block_symbols is None else block_symbols
        if self.block_symbols < 1:
            raise InvalidRequest(f"block_symbols={block_symbols}: at least 1 is needed")
        self._top = _Node((), [], [], None, 0)  # above the roots of fingerprints: without blocks
        self._queue: list[tuple[int, int, int, _Node]] = []
        self._queue_limit = 64
        self._serial = count()
        self._clock = self._asked = self._hit = self._fetched = 0
        self._root(fingerprint)

    def match(
        self, symbols: Sequence[Any], fingerprint: Fingerprint | None = None
    ) -> tuple[list[Block], int]:
        """The longest prefix that is cached, in whole blocks.

        What lies in tiers comes back into the pool, if need be in place of what was unused for
        longest and can go there. Where bytes are lost, or there is no room, the prefix ends.

        Args:
            symbols: any sequence; tuples and bytes are taken as they are. A model that needs a
                last token to go on from asks for all but that one.
            fingerprint: None = the index's own.

        Returns:
            blocks, retained: the caller releases each one; and their number.

        Raises:
            InvalidRequest: a fingerprint of another geometry than the pool.
        """
        symbols = _sliceable(symbols)
        with self.pool.lock:
            tokens = self.pool.spec.block_tokens
            self._asked += len(symbols) * tokens // self.block_symbols
            node, blocks = self._walk(self._root(fingerprint), symbols)
            for block in blocks:
                block.ref += 1  # as pool.retain: alive they are, since the index holds them
            found = self._bring(node, blocks)
            if found < len(blocks):
                for block in blocks[found:]:
                    self.pool.release(block)
                del blocks[found:]
            elif self.tiers is not None:
                blocks += self._fetch(node, symbols, fingerprint or self.fingerprint)
            self._hit += len(blocks) * tokens
            return blocks, len(blocks)

    def insert(
        self,
        symbols: Sequence[Any],
        blocks: Sequence[Block],
        fingerprint: Fingerprint | None = None,
    ) -> int:
        """Remember the blocks of a prefix; idempotent: what is known already stays as it is.

        Args:
            symbols: what the blocks hold, from the first block on; those behind the last whole
                block are left out.
            blocks: sealed, one for each whole block of symbols. A block belongs to one prefix.
            fingerprint: None = the index's own.

        Returns:
            How many blocks were new and are held from now on.

        Raises:
            InvalidRequest: another number of blocks, a block that is not sealed, or a fingerprint
                of another geometry; nothing has changed.
        """
        symbols, step = _sliceable(symbols), self.block_symbols
        if len(blocks) != len(symbols) // step:
            raise InvalidRequest(
                f"{len(blocks)} blocks for {len(symbols)} symbols: {step} symbols fill a block, so "
                f"accepted are {len(symbols) // step}"
            )
        if [block for block in blocks if not block.sealed]:
            raise InvalidRequest("a pending block can't be shared: commit it first")
        with self.pool.lock:
            node, known = self._walk(self._root(fingerprint), symbols)
            new = list(blocks[len(known) :])
            if new:
                rest = symbols[len(known) * step : len(blocks) * step]
                keys = list(self._keys(node, rest, fingerprint or self.fingerprint))
                self._hang(node, rest, new, keys)
            return len(new)

    def evict(self, n: int) -> int:
        """Free up to `n` slots of blocks that nobody else holds, those unused for longest first.

        Leaves first, so nothing goes that leads to a block that stays. They go to `tiers`; without
        these, or where none takes them, they are forgotten.

        Returns:
            How many slots are free now that were not: those of lanes do not count.
        """
        with self.pool.lock:
            before = self.pool.num_free
            self._free(before + n, forget=True)
            return self.pool.num_free - before

    def flush(self) -> None:
        """Store everything in the tiers; all of it stays here too.

        A later process finds what a tier kept that outlives this one.

        Raises:
            TierError: no tier takes a block, or its bytes can't be had.
        """
        if self.tiers is not None:
            with self.pool.lock:
                for node in self._nodes():
                    for key, block in zip(node.keys, node.blocks, strict=True):
                        self.tiers.store(key, block)

    def clear(self) -> None:
        """Forget everything that lies here; what was stored in tiers stays there."""
        with self.pool.lock:
            self._cut(self._top, 0)

    def stats(self) -> PrefixStats:
        """Counts, now."""
        with self.pool.lock:
            nodes = [node for node in self._nodes() if node.blocks]
            blocks = sum(len(node.blocks) for node in nodes)
            away = sum(block.slot < 0 for node in nodes for block in node.blocks)
            size = (blocks - away) * self.pool.spec.block_bytes
            return PrefixStats(
                nodes=len(nodes),
                blocks=blocks,
                away=away,
                bytes=size,
                asked_tokens=self._asked,
                hit_tokens=self._hit,
                tier_tokens=self._fetched,
            )

    def check(self) -> None:
        """Assert that nodes, blocks and queue agree; O(blocks)."""
        step, queued = self.block_symbols, {id(entry) for entry in self._queue}
        for node in self._nodes():
            assert all(child.parent is node for child in node.children.values())
            assert all(child.stamp <= node.stamp for child in node.children.values())
            assert all(child.start == node.end for child in node.children.values())
            assert all(child.symbols[:step] == key for key, child in node.children.items())
            assert all(block.ref > 0 and block.sealed for block in node.blocks)
            if node.blocks:
                assert len(node.symbols) == step * len(node.blocks)
                assert len(node.keys) == (0 if self.tiers is None else len(node.blocks))
                assert node.entry and id(node.entry) in queued, "a node is not in the queue"
            else:
                assert node.parent is self._top and node.children, "a node without blocks"

    # Nodes

    def _root(self, fingerprint: Fingerprint | None) -> _Node:
        """The root of a fingerprint, a new one if nothing of it is known."""
        found = fingerprint or self.fingerprint
        symbols = (found.digest,)
        root = self._top.children.get(symbols)
        if root is None:
            if found.spec != self.pool.spec:
                raise InvalidRequest(
                    f"the fingerprint is of {found.spec}, the pool of {self.pool.spec}"
                )
            root = _Node(symbols, [], [], self._top, self._clock)
        return root

    def _walk(self, root: _Node, symbols: Symbols) -> tuple[_Node, list[Block]]:
        """The node where the longest known prefix ends, and its blocks; all of it is used now."""
        node, step, at = root, self.block_symbols, 0
        blocks: list[Block] = []
        self._clock += 1
        self._top.stamp = root.stamp = self._clock
        while child := node.children.get(symbols[at : at + step]):
            if symbols[at : at + len(child.symbols)] != child.symbols:
                child = self._split(child, _common(child.symbols, symbols[at:], step))
            child.stamp = self._clock
            blocks += child.blocks
            at += len(child.symbols)
            node = child
        return node, blocks

    def _split(self, node: _Node, n: int) -> _Node:
        """Make the first `n` blocks of a node its parent, and return that."""
        at, parent = n * self.block_symbols, node.parent
        assert parent is not None
        upper = _Node(node.symbols[:at], node.blocks[:n], node.keys[:n], parent, node.stamp)
        parent.children[upper.symbols[: self.block_symbols]] = upper
        node.symbols, node.blocks, node.keys = node.symbols[at:], node.blocks[n:], node.keys[n:]
        node.parent = upper
        upper.children[node.symbols[: self.block_symbols]] = node
        self._enqueue(upper)
        return upper

    def _hang(
        self, parent: _Node, symbols: Symbols, blocks: list[Block], keys: list[bytes]
    ) -> None:
        """Hold blocks behind a node where the tree does not go on."""
        for block in blocks:
            self.pool.retain(block)
        if parent.parent is self._top:  # a root, in the tree only while something hangs on it
            self._top.children[parent.symbols] = parent
        node = _Node(symbols, blocks, keys, parent, self._clock)
        parent.children[symbols[: self.block_symbols]] = node
        self._enqueue(node)

    def _keys(self, node: _Node, symbols: Symbols, fingerprint: Fingerprint) -> Iterator[bytes]:
        """Keys of the prefixes that go on from a node; none without tiers."""
        key = node.keys[-1] if node.keys else b""
        for at in range(0, len(symbols), self.block_symbols) if self.tiers is not None else ():
            key = chunk_key(key, fingerprint, symbols[at : at + self.block_symbols])
            yield key

    def _cut(self, node: _Node, index: int) -> None:
        """Forget a node's blocks from `index` on, and all nodes below."""
        gone = node.blocks[index:]
        below = list(node.children.values())
        for child in below:
            below += child.children.values()
            gone += child.blocks
            child.entry = None
        if not index:
            self._unlink(node)
        node.end = node.start + index
        node.symbols = node.symbols[: index * self.block_symbols]
        node.blocks, node.keys, node.children = node.blocks[:index], node.keys[:index], {}
        for block in gone:
            self.pool.release(block)

    def _unlink(self, node: _Node) -> None:
        node.entry, parent = None, node.parent
        if parent is not None:
            del parent.children[node.symbols[: self.block_symbols]]
            if not parent.blocks and not parent.children:
                self._unlink(parent)

    def _nodes(self) -> Iterator[_Node]:
        nodes = list(self._top.children.values())
        for node in nodes:
            nodes += node.children.values()
            yield node

    # Room

    def _enqueue(self, node: _Node) -> None:
        node.entry = (node.stamp, -node.end, next(self._serial), node)
        heappush(self._queue, node.entry)
        if len(self._queue) > self._queue_limit:
            self._queue = [entry for entry in self._queue if entry is entry[3].entry]
            heapify(self._queue)
            self._queue_limit = 2 * len(self._queue) + 64

    def _free(self, target: int, forget: bool) -> None:
        """Drive blocks out until so many slots are free; `forget`: those that no tier takes too."""
        stuck: list[_Node] = []
        while self._queue and (wanted := target - self.pool.num_free) > 0:
            entry = heappop(self._queue)
            node = entry[3]
            if entry is not node.entry:  # it is gone
                continue
            if entry[0] < node.stamp:  # it was used since
                self._enqueue(node)
            elif not self._shrink(node, wanted, forget):
                stuck.append(node)
            elif node.entry:
                self._enqueue(node)
        for node in stuck:
            self._enqueue(node)

    def _shrink(self, node: _Node, n: int, forget: bool) -> bool:
        """Drive out a leaf's blocks, last first, until `n` slots are free; whether any went."""
        index = len(node.blocks)
        while index and n and not node.children:
            block = node.blocks[index - 1]
            if block.ref > 1 or not (self._keep(node, index - 1) or forget):
                break
            n -= self.pool.loose(block)
            index -= 1
        if index == len(node.blocks):
            return False
        self._cut(node, index)
        return True

    def _keep(self, node: _Node, index: int) -> bool:
        """Store a block in the tiers; whether that could be done."""
        try:
            if self.tiers is not None:
                self.tiers.store(node.keys[index], node.blocks[index])
        except TierError:
            return False
        return self.tiers is not None

    # What lies in tiers

    def _fetch(self, node: _Node, symbols: Symbols, fingerprint: Fingerprint) -> list[Block]:
        """Blocks that the tiers have behind a node, for the caller to hold; the index does too."""
        step, keys = self.block_symbols, list[bytes]()
        blocks: list[Block] = []
        rest = symbols[node.end * step : len(symbols) // step * step]
        with suppress(InvalidRequest):  # symbols that can't be part of a key were never stored
            for key in self._keys(node, rest, fingerprint):
                block = self._fetch_one(key)
                if block is None:
                    break
                keys.append(key)
                blocks.append(block)
        if blocks:
            self._hang(node, rest[: len(blocks) * step], list(blocks), keys)
            self._fetched += len(blocks) * self.pool.spec.block_tokens
        return blocks

    def _fetch_one(self, key: bytes) -> Block | None:
        assert self.tiers is not None
        try:
            if not self.pool.num_free and self.tiers.has(key):
                self._free(1, forget=False)
            return self.tiers.fetch(key) if self.pool.num_free else None
        except TierError:
            return None

    def _bring(self, node: _Node, blocks: list[Block]) -> int:
        """Bring back what others have moved to tiers; how many first blocks of a path are here."""
        for index, block in enumerate(blocks):
            if block.away is not None and not self._load(block, node, index):
                return index
        return len(blocks)

    def _load(self, block: Block, node: _Node, index: int) -> bool:
        """Bring back block `index` of the path that ends at a node; forget it if it is lost."""
        if not self.pool.num_free:
            self._free(1, forget=False)
        if not self.pool.num_free:
            return False
        try:
            self.pool.load(block, self.pool.spare(1)[0])
        except StreamgenError:
            while node.start > index:
                assert node.parent is not None
                node = node.parent
            self._cut(node, index - node.start)
            return False
        return True


def _sliceable(symbols: Sequence[Any]) -> Symbols:
    """Symbols whose slices can be compared and looked up."""
    return symbols if isinstance(symbols, (tuple, bytes)) else tuple(symbols)


def _common(first: Symbols, second: Symbols, step: int) -> int:
    """How many whole blocks of symbols two sequences have in common, from the first on."""
    low, high = 0, min(len(first), len(second)) // step
    while low < high:  # blocks before `low` are equal, some block up to `high` is not
        middle = (low + high + 1) // 2
        a, b = low * step, middle * step
        if first[a:b] == second[a:b]:
            low = middle
        else:
            high = middle - 1
    return low
