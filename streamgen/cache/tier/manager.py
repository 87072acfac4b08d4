"""The tiers behind a pool: blocks go down as they grow cold, and come back when they are wanted.

    pool  ->  host memory  ->  disk  ->  pooled store

`Tiers` has two sides. Blocks that somebody holds leave the pool with `demote` (or `make_room`, or
`park`): the handle stays, its holders notice nothing, and `promote` or their next chunk brings it
back. Bytes that somebody may want again go under a key with `store` and come back with `fetch`, in
another process or after a restart, too: a prefix index finds blocks by their content that way.

In a tier that is full, the least recently used entry goes one tier down instead of away. What can't
go down is deleted, the oldest first, but never bytes that a block needs: then the tier is full, and
the block stays where it is. All of it happens under the pool's lock.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Protocol

from streamgen.cache.pool import Away, Block, PoolStats
from streamgen.cache.tier.base import CONTENT, PRIVATE, Missing, Tier, TierStats
from streamgen.errors import InvalidRequest, PoolFull, TierError


class Pool(Protocol):
    """Slots with blocks in them, such as a `BlockPool`."""

    lock: RLock

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block outside the pool."""
        ...

    def read(self, block: Block, out: memoryview, /) -> None:
        """Copy a block's bytes to `out`."""
        ...

    def unload(self, block: Block, away: Away, /) -> None:
        """Free the slot of a block whose bytes are elsewhere."""
        ...

    def load(self, block: Block, slot: int, /) -> None:
        """Bring a block back into an empty slot."""
        ...

    def at(self, slot: int, /) -> Block | None:
        """The block in a slot."""
        ...

    def loose(self, block: Block, /) -> bool:
        """Whether the block has a slot, and others can have that after it."""
        ...

    def spare(self, n: int, /) -> list[int]:
        """`n` free slots; raises PoolFull if there are fewer."""
        ...

    def require(self, run: int, loose: int) -> None:
        """Raise PoolFull unless a run of `run` slots and `loose` further slots are free."""
        ...

    def stats(self) -> PoolStats:
        """Counts of slots."""
        ...


class Parkable(Protocol):
    """A table that can give its lane back, such as a `BlockTable`."""

    @property
    def entries(self) -> Sequence[tuple[object, Block]]:
        """Its blocks, each with its place."""
        ...

    def park(self) -> None:
        """Give the lane back and keep the blocks."""
        ...


class Kept:
    """Where the bytes of an away block are: an `Away` (`streamgen.cache.pool`).

    Attributes:
        block: whose bytes they are.
        key: of the entry.
        level: index of the tier that has it; None once it was lost.
    """

    __slots__ = ("block", "key", "level", "_tiers")

    def __init__(self, tiers: Tiers, block: Block, key: bytes) -> None:
        self.block = block
        self.key = key
        self.level: int | None = None
        self._tiers = tiers

    def __repr__(self) -> str:
        return "lost" if self.level is None else self._tiers.tiers[self.level].name

    def read(self, out: memoryview) -> None:
        """Copy the verified bytes into `out`.

        Raises:
            TierError: the entry is damaged or gone, or can't be read now.
        """
        self._tiers._read(self, out)

    def forget(self) -> None:
        """The block is back in the pool, or dead."""
        self._tiers._forget(self)


class InHand:
    """The bytes of a block on the way from a tier to the pool: an `Away`."""

    __slots__ = ("payload",)

    def __init__(self, payload: bytearray) -> None:
        self.payload = payload

    def __repr__(self) -> str:
        return "in hand"

    def read(self, out: memoryview) -> None:
        """Copy the bytes into `out`."""
        out[:] = self.payload

    def forget(self) -> None:
        """Nothing to do: they go with this object."""


class Tiers:
    """An ordered list of tiers behind one pool.

    Args:
        pool: whose blocks move.
        tiers: the fastest first. They belong to this object; processes may share their media.

    Raises:
        InvalidRequest: no tier was given.
        TierError: a tier with a capacity can't be listed.
    """

    def __init__(self, pool: Pool, tiers: Sequence[Tier]) -> None:
        if not tiers:
            raise InvalidRequest("Tiers needs at least one tier, such as a HostTier")
        self.pool = pool
        self.tiers = tuple(tiers)
        # Per tier what it holds, the least recently used first; None: nobody needs it.
        self._levels = tuple(OrderedDict[bytes, Kept | None]() for _ in self.tiers)
        self._slots = pool.stats().total
        self._used: dict[Block, None] = {}  # the least recently used first
        self._pins: Counter[Block] = Counter()
        self._run = os.urandom(8)
        self._serial = itertools.count()
        for level in range(len(self.tiers)):
            self._adopt(level)

    # Blocks that somebody holds

    def touch(self, blocks: Iterable[Block]) -> None:
        """These were used just now: `make_room` takes them last, those never touched first."""
        with self.pool.lock:
            for block in blocks:
                self._used.pop(block, None)
                self._used[block] = None
            if len(self._used) > 2 * self._slots:
                self._forget_gone()

    @contextmanager
    def using(self, blocks: Iterable[Block]) -> Iterator[None]:
        """Within this context, `make_room` and `park` leave these blocks where they are.

        For what is read outside of a lane while other sessions go on: the raw sink of a pending
        chunk, the past of a pending tail. What lies in a lane is never demoted. They count as used.
        """
        pinned = list(blocks)
        with self.pool.lock:
            self._pins.update(pinned)
            self.touch(pinned)
        try:
            yield
        finally:
            with self.pool.lock:
                self._pins.subtract(pinned)
                for block in pinned:
                    if not self._pins[block]:
                        del self._pins[block]

    def demotable(self, block: Block) -> bool:
        """Whether a block may leave the pool: it is sealed, in no lane, and not in use."""
        return block.sealed and self.pool.loose(block) and block not in self._pins

    def demote(self, block: Block) -> None:
        """Move a block's bytes to the first tier that takes them; every holder follows.

        A block that is away already stays where it is.

        Raises:
            InvalidRequest: the block is pending, lies in a lane, or is in use.
            TierError: no tier takes it; the block stays in the pool.
        """
        with self.pool.lock:
            if block.away:
                return
            if not self.demotable(block):
                raise InvalidRequest(
                    f"{block} can't be demoted: only sealed blocks can that lie in no lane and "
                    "are not in use (a table that is parked has no lane)"
                )
            self.pool.unload(block, self.keep(block))
            self._used.pop(block, None)

    def keep(self, block: Block) -> Kept:
        """Store the bytes of a block that lies in the pool, and say where: an `Away`.

        For whoever unloads it afterwards, as `TokenTable.swap_out(tiers.keep)` does for all blocks
        of a sequence or none.

        Raises:
            TierError: no tier takes it; nothing was stored.
        """
        with self.pool.lock:
            payload = bytearray(self.pool.payload_bytes)
            self.pool.read(block, memoryview(payload))
            return self._keep(block, payload)

    def promote(self, block: Block) -> None:
        """Bring a block back to the pool, for which others make room; it counts as used.

        Even a full pool over full tiers can do it: the places are swapped.

        Raises:
            TierError: its bytes can't be had, or there is no room for those of others; it stays
                away.
            PoolFull: no slot is free and no block can leave; it stays away.
        """
        with self.pool.lock:
            if block.away:
                try:
                    (slot,) = self.pool.spare(1)
                except PoolFull:
                    self._swap_in(block)
                else:
                    self.pool.load(block, slot)
            self.touch([block])

    def park(self, table: Parkable) -> None:
        """Give a table's lane back and demote all its blocks that nobody is using.

        Its next chunk brings back what it sees; `resume` makes room for that.

        Raises:
            InvalidRequest: a chunk is pending, or the table is closed.
            TierError: a tier failed and no other took a block; the table holds all its blocks,
                some of which are still in the pool.
        """
        with self.pool.lock:
            table.park()
            for _, block in table.entries:
                if self.demotable(block):
                    self.demote(block)

    def resume(self, table: Parkable, lane: int = 0) -> None:
        """Bring all blocks of a table back, and make room for a lane of `lane` slots beside them.

        Raises:
            TierError: a block's bytes can't be had, or there is no room for those of others.
            PoolFull: there is no such room in the pool.
        """
        blocks = [block for _, block in table.entries]
        with self.pool.lock, self.using(blocks):
            for block in blocks:
                self.promote(block)
            self.make_room(0, run=lane)

    def make_room(self, loose: int, run: int = 0) -> None:
        """Demote the least recently used blocks until that many slots are free.

        Args:
            loose: free slots, anywhere.
            run: and a run of neighbouring free slots, such as a lane needs; 0 if none.

        Raises:
            PoolFull: nothing more can leave the pool; the message names what holds it.
            TierError: no tier takes a block. Blocks that were demoted before stay so.
        """
        with self.pool.lock:
            queue: Iterator[Block] | None = None
            while True:
                try:
                    return self.pool.require(run=run, loose=loose)
                except PoolFull:
                    queue = queue or iter(self._coldest_first())
                    block = next(queue, None)
                    if block is None:
                        raise
                self.demote(block)

    # Bytes that somebody may want again

    def store(self, key: bytes, block: Block) -> None:
        """Keep a copy of a sealed block's bytes under a key, until it is the oldest and room is
        short. A key that is there already counts as used, and nothing is written.

        Args:
            key: what the bytes are a function of, all of it; at most 63 bytes.
            block: in the pool or away.

        Raises:
            InvalidRequest: the block is pending, or the key is too long.
            TierError: no tier takes it, or its bytes can't be had.
        """
        with self.pool.lock:
            if not block.sealed:
                raise InvalidRequest(f"{block} can't be stored: only sealed blocks can")
            name = CONTENT + key
            if self._find(name) is None:
                payload = bytearray(self.pool.payload_bytes)
                if block.away:
                    block.away.read(memoryview(payload))
                else:
                    self.pool.read(block, memoryview(payload))
                self._place(name, payload, 0, None)

    def fetch(self, key: bytes) -> Block | None:
        """A new sealed block with the bytes that were stored under a key, for its caller to hold.

        It lies in the pool, where others make room for it. None if no tier has the key, or none
        can give verified bytes. What a lower tier had lies in the first one, too, from then on.

        Raises:
            PoolFull: no slot is free and no block can leave.
            TierError: no slot is free, and no tier takes the block that should leave.
        """
        with self.pool.lock:
            name = CONTENT + key
            payload = bytearray(self.pool.payload_bytes)
            level = self._get(name, payload)
            if level is None:
                return None
            block = Block(-1, sealed=True)
            block.away = InHand(payload)
            self.make_room(1)
            self.pool.load(block, self.pool.spare(1)[0])
            self.touch([block])
            if level > 0:
                with suppress(TierError):  # it is a copy: where it doesn't fit, it need not be
                    self._room(0, len(payload))
                    self.tiers[0].put(name, memoryview(payload))
                    self._levels[0][name] = None
            return block

    def has(self, key: bytes) -> bool:
        """Whether a tier has this key, as far as can be told without reading the bytes."""
        with self.pool.lock:
            return self._find(CONTENT + key) is not None

    def forget(self, key: bytes) -> None:
        """Delete what was stored under a key, in every tier.

        Raises:
            TierError: a tier can't delete it.
        """
        with self.pool.lock:
            name = CONTENT + key
            for tier, entries in zip(self.tiers, self._levels, strict=True):
                entries.pop(name, None)
                tier.delete(name)

    def stats(self) -> tuple[TierStats, ...]:
        """Counts of every tier, now."""
        with self.pool.lock:
            return tuple(tier.stats() for tier in self.tiers)

    def close(self) -> None:
        """Close every tier: what is away and belongs to this process is lost. Idempotent."""
        with self.pool.lock:
            for tier in self.tiers:
                tier.close()

    # Between pool and tiers

    def _keep(self, block: Block, payload: bytearray) -> Kept:
        key = PRIVATE + self._run + next(self._serial).to_bytes(8, "big")
        kept = Kept(self, block, key)
        self._place(key, payload, 0, kept)
        return kept

    def _swap_in(self, block: Block) -> None:
        """Load a block for which another must leave, perhaps to the very place that it frees."""
        away = block.away
        assert away is not None
        payload = bytearray(self.pool.payload_bytes)
        away.read(memoryview(payload))
        block.away = InHand(payload)
        away.forget()
        try:
            self.make_room(1)
            self.pool.load(block, self.pool.spare(1)[0])
        except (PoolFull, TierError):
            with suppress(TierError):  # no tier takes it back: then this process keeps it
                block.away = self._keep(block, payload)
            raise

    def _coldest_first(self) -> list[Block]:
        self._forget_gone()
        rank = {block: index for index, block in enumerate(self._used)}
        blocks = filter(None, map(self.pool.at, range(self._slots)))
        leaving = [block for block in blocks if self.demotable(block)]
        return sorted(leaving, key=lambda block: rank.get(block, -1))

    def _forget_gone(self) -> None:
        self._used = {block: None for block in self._used if block.slot >= 0}

    def _read(self, kept: Kept, out: memoryview) -> None:
        with self.pool.lock:
            if kept.level is None:
                raise TierError("a block can't come back: its bytes were lost")
            try:
                self.tiers[kept.level].get(kept.key, out)
            except Missing as error:
                self._levels[kept.level].pop(kept.key)
                kept.level = None
                raise TierError(f"a block can't come back: {error}") from error

    def _forget(self, kept: Kept) -> None:
        with self.pool.lock:
            if kept.level is not None:
                self._levels[kept.level].pop(kept.key)
                with suppress(TierError):  # it is in nobody's way
                    self.tiers[kept.level].delete(kept.key)
                kept.level = None
            if kept.block.ref:
                self.touch([kept.block])

    # Between tiers

    def _place(self, key: bytes, payload: bytearray, first: int, kept: Kept | None) -> None:
        """Put an entry into the first tier from `first` on that takes it."""
        reasons = []
        for level in range(first, len(self.tiers)):
            try:
                self._room(level, len(payload))
                self.tiers[level].put(key, memoryview(payload))
            except TierError as error:
                reasons.append(str(error))
                continue
            self._levels[level][key] = kept
            if kept:
                kept.level = level
            return
        raise TierError(f"no tier takes a block of {len(payload):,} bytes: {'; '.join(reasons)}")

    def _room(self, level: int, size: int) -> None:
        """Make a tier's entries leave until `size` bytes fit within its capacity."""
        tier = self.tiers[level]
        if tier.capacity is not None:
            if size > tier.capacity:
                raise TierError(f"{tier.name} holds {tier.capacity:,} bytes in all")
            while tier.stats().bytes + size > tier.capacity:
                self._shrink(level)

    def _shrink(self, level: int) -> None:
        """One entry less: the oldest goes down, or else the oldest that nobody needs goes away."""
        entries = self._levels[level]
        if not entries:
            self._adopt(level)  # what other processes have put
        if entries and self._sink(level, next(iter(entries))):
            return
        for key, kept in entries.items():
            if kept is None:
                del entries[key]
                self.tiers[level].delete(key)
                return
        tier = self.tiers[level].stats()
        raise TierError(
            f"{tier.name} is full: blocks in use take {tier.bytes:,} of {tier.capacity:,} bytes"
        )

    def _sink(self, level: int, key: bytes) -> bool:
        """Move an entry to a lower tier; False if none takes it."""
        kept = self._levels[level][key]
        below = next((x for x in self._below(level) if key in self._levels[x]), None)
        if below is not None:  # a copy
            self._levels[below].move_to_end(key)
        else:
            payload = bytearray(self.pool.payload_bytes)
            try:
                self.tiers[level].get(key, memoryview(payload))
                self._place(key, payload, level + 1, kept)
            except Missing:
                if kept:
                    kept.level = None
            except TierError:
                return False
        del self._levels[level][key]
        self.tiers[level].delete(key)
        return True

    def _below(self, level: int) -> range:
        return range(level + 1, len(self.tiers))

    def _find(self, key: bytes) -> int | None:
        """The first tier that has a key, which counts as used then."""
        for level, entries in enumerate(self._levels):
            if key in entries:
                entries.move_to_end(key)
                return level
        for level, tier in enumerate(self.tiers):
            with suppress(TierError):
                if key in tier:
                    self._levels[level][key] = None
                    return level
        return None

    def _get(self, key: bytes, out: bytearray) -> int | None:
        """Read from the first tier that gives verified bytes; its index."""
        for level, tier in enumerate(self.tiers):
            entries = self._levels[level]
            entries.pop(key, None)
            with suppress(TierError):
                tier.get(key, memoryview(out))
                entries[key] = None
                return level
        return None

    def _adopt(self, level: int) -> None:
        """Note what lies in a tier, as older than all that is known of it.

        Only where it counts: a tier without a limit never deletes, and may be endless.
        """
        tier, entries = self.tiers[level], self._levels[level]
        if tier.capacity is not None:
            for key in reversed(tier.keys()):
                if key.startswith(CONTENT) and key not in entries:
                    entries[key] = None
                    entries.move_to_end(key, last=False)
