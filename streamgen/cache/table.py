"""One stream of keys and values: which blocks it holds, and where they must lie for the next chunk.

Handles and integers only. `chunk` is the one moment at which anything moves:

    return   visible frames that went to another tier come back
    leave    frames that the chunk can't see are released (or held, with undo)
    evacuate blocks of others that lie where this chunk needs room move out of the lane
    settle   visible frames that lie elsewhere come into the lane: moved if they are ours alone,
             copied if they are shared
    place    the pending frames take their lane slots

In the steady state of one session `leave` and `place` are all there is: the new frames
take the slots that the old ones left, and no byte moves but those that the model writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from streamgen.cache.chunk import Chunk, CodedChunk, split_sink
from streamgen.cache.policy import CachePolicy, PinnedWindow
from streamgen.cache.pool import Block, BlockPool, Lane
from streamgen.errors import InvalidRequest, StreamgenError


class Snapshot:
    """A table as it was: immutable, holds its blocks until `release`. Costs no bytes.

    Attributes:
        entries: `(ordinal, block)` of every frame, ascending.
        end: ordinal of the next frame.
    """

    def __init__(
        self, pool: BlockPool, policy: CachePolicy, blocks: dict[int, Block], end: int
    ) -> None:
        self.pool = pool
        self.policy = policy
        self.entries = tuple(blocks.items())
        self.end = end
        self.released = False
        pool.retain_all(blocks.values())

    def copy(self) -> Snapshot:
        """The same moment, held a second time.

        Raises:
            InvalidRequest: it was released.
        """
        with self.pool.lock:
            self._expect_held()
            return Snapshot(self.pool, self.policy, dict(self.entries), self.end)

    def release(self) -> None:
        """Let the blocks go. Idempotent."""
        with self.pool.lock:
            if not self.released:
                self.released = True
                self.pool.release_all(block for _, block in self.entries)

    def _expect_held(self) -> None:
        if self.released:
            raise InvalidRequest(f"the snapshot of frame {self.end} was released")


class BlockTable:
    """The K/V of one stream, for all layers.

    Args:
        pool: where the bytes lie.
        policy: which frames a chunk sees, and their order in the lane.

    Attributes:
        end: ordinal of the next frame.
        lane: the slots reserved for this table; None before its first chunk.
    """

    def __init__(self, pool: BlockPool, policy: CachePolicy) -> None:
        self.pool = pool
        self.policy = policy
        self.end = 0
        self.lane: Lane | None = None
        self.closed = False
        self._blocks: dict[int, Block] = {}  # ordinals ascending
        self._pending: Chunk | None = None
        self._before: tuple[dict[int, Block], int] | None = None  # what an abort with undo restores
        self._shadowed: dict[int, Block] = {}  # whose values lie in each shadow slot

    @property
    def entries(self) -> tuple[tuple[int, Block], ...]:
        """`(ordinal, block)` of every committed frame that the table still holds, ascending."""
        return tuple(self._blocks.items())

    @property
    def pending(self) -> Chunk | None:
        """The chunk that was begun and neither committed nor aborted."""
        return self._pending

    @property
    def tail(self) -> int:
        """How many of the last frames can be reopened: those held without a gap."""
        first = self.end
        while first - 1 in self._blocks:
            first -= 1
        return self.end - first

    # Chunks

    def reserve(self) -> None:
        """Take the lane now, instead of with the first chunk. Idempotent.

        Raises:
            PoolFull: there is no room; nothing has changed.
            InvalidRequest: the table is closed.
        """
        with self.pool.lock:
            self._expect_idle()
            self.lane = self.lane or self.pool.reserve(self.policy.lane_size)

    def chunk(self, n: int, undo: bool = False) -> Chunk:
        """Begin the next `n` frames.

        An aborted chunk leaves the table as it was, except for the frames that it had pushed out
        of the window: their slots were its own to write, and they stay dropped. Nothing is lost
        for a next chunk that ends at the same frame or later; one that ends earlier (a smaller
        one, or a `reopen`) is refused if it would have to see a dropped frame. With `undo=True`
        these frames are carried out of the lane and held until `commit`, and an abort restores
        them too; that costs `n` block moves.

        Raises:
            InvalidRequest: the policy refuses `n`, a chunk is pending, the table is closed, or a
                visible frame was dropped by an aborted chunk.
            PoolFull: there is no room; the table and the pool are unchanged.
            TierError: a visible frame went to another tier, which has lost it.
        """
        return self._begin(self.end, n, undo)

    def reopen(self, n: int, undo: bool = False) -> Chunk:
        """Make the last `n` committed frames pending again, to be written anew (ReCache).

        A frame that nobody else holds is rewritten in its slot; a shared one is left to its other
        holders, moves out of the lane, and a fresh block takes its place. Nothing is copied, since
        the whole block will be rewritten. An abort drops these frames (`end` goes back by `n`);
        with `undo=True` the old blocks are carried out of the lane and an abort restores them.

        Raises:
            InvalidRequest: fewer than `n` last frames are held (see `tail`), or as for `chunk`.
            PoolFull: there is no room; the table and the pool are unchanged.
        """
        if not 1 <= n <= self.tail:
            raise InvalidRequest(f"reopen({n}): the table holds the last {self.tail} frames")
        return self._begin(self.end - n, n, undo)

    def _begin(self, first: int, n: int, undo: bool) -> Chunk:
        with self.pool.lock:
            self._expect_idle()
            frames = range(first, first + n)
            if first == self.end:  # frames to reopen were accepted when they came
                self.policy.validate(n, frames.stop)
            visible = self.policy.visible(frames.stop)
            keep = self._visible_past(visible, first)
            self._fetch(keep)
            drop = {o: block for o, block in self._blocks.items() if o not in keep}
            dying = [] if undo else [block for block in drop.values() if block.ref == 1]
            strangers = self._strangers(visible, keep, dying)
            sinks = [ordinal for ordinal in frames if ordinal < self.policy.shadow]
            freed = sum(self.pool.loose(block) for block in dying)
            self.pool.require(
                run=0 if self.lane else self.policy.lane_size,
                loose=max(0, len(strangers) + len(sinks) - freed),
            )
            parts = split_sink(frames, self.policy.shadow)
            staging = self.pool.lend(self.policy.lane_size, n, *parts)
            # Nothing below can fail.
            if not undo:
                self._release(drop.values())
            self.lane = lane = self.lane or self.pool.reserve(self.policy.lane_size)
            self._evacuate(strangers)
            self._settle(keep)
            self._cast_shadows(keep, sinks)
            blocks = dict(zip(sinks, self.pool.alloc(len(sinks)), strict=True))
            for ordinal in frames[len(sinks) :]:
                blocks[ordinal] = self.pool.put(self._home(ordinal))
            self._before = (drop, self.end) if undo else None
            self._blocks, self.end = keep, first
            if staging is None:
                self._pending = Chunk(self, lane, frames, visible, keep | blocks)
            else:
                self._pending = CodedChunk(self, lane, frames, visible, keep | blocks, staging)
            return self._pending

    def _visible_past(self, visible: Sequence[int], first: int) -> dict[int, Block]:
        past = [ordinal for ordinal in visible if ordinal < first]
        missing = [ordinal for ordinal in past if ordinal not in self._blocks]
        if missing:
            raise InvalidRequest(
                f"a chunk ending at frame {visible[-1] + 1} must see frames {missing}, which an "
                "aborted chunk has dropped: end at a later frame, rewind, or use undo=True"
            )
        return {ordinal: self._blocks[ordinal] for ordinal in past}

    def _fetch(self, keep: dict[int, Block]) -> None:
        """Bring blocks back from other tiers, to their places where these are empty.

        If one can't be had the table is unchanged, but for those that are back already.
        """
        away = [(ordinal, block) for ordinal, block in keep.items() if block.away]
        if not away:
            return
        parked = self.lane is None
        self.lane = lane = self.lane or self.pool.reserve(self.policy.lane_size)
        try:
            for ordinal, block in away:
                home = self._home(ordinal)
                free = ordinal >= self.policy.shadow and self.pool.at(home) is None
                self.pool.load(block, home if free else self.pool.spare(1)[0])
        except StreamgenError:
            if parked:
                self.pool.dissolve(lane)
                self.lane = None
            raise

    def _strangers(
        self, visible: Sequence[int], keep: dict[int, Block], dying: list[Block]
    ) -> list[Block]:
        """Blocks that lie in our lane where another is to be, and live on in other hands."""
        found: list[Block] = []
        for ordinal in visible if self.lane else ():
            block = self.pool.at(self._home(ordinal))
            if block and block is not keep.get(ordinal) and block not in dying:
                found.append(block)
        return found

    def _evacuate(self, strangers: list[Block]) -> None:
        for block, slot in zip(strangers, self.pool.spare(len(strangers)), strict=True):
            self.pool.move(block, slot)

    def _settle(self, keep: dict[int, Block]) -> None:
        """Bring every visible frame to its place in the lane."""
        for ordinal, block in keep.items():
            home = self._home(ordinal)
            if ordinal < self.policy.shadow or block.slot == home:
                continue
            if block.ref == 1:
                self.pool.move(block, home)
            else:  # copy-on-write: the next frame in this place must not overwrite what others see
                keep[ordinal] = self.pool.copy(block, home)
                self.pool.release(block)

    def _cast_shadows(self, keep: dict[int, Block], rewritten: list[int]) -> None:
        """Put the sink's values into shadow slots that lack them; the keys are the caller's."""
        for ordinal in rewritten:
            self._shadowed.pop(ordinal, None)
        for ordinal in range(self.policy.shadow):
            block = keep.get(ordinal)
            if block and self._shadowed.get(ordinal) is not block:
                for v in self.pool.values:
                    v[self._home(ordinal)].copy_(v[block.slot])
                self._shadowed[ordinal] = block

    def _home(self, ordinal: int) -> int:
        assert self.lane is not None
        return self.lane.base + self.policy.place(ordinal)

    def _commit(self, chunk: Chunk) -> None:
        with self.pool.lock:
            for ordinal in chunk.frames:
                chunk.blocks[ordinal].sealed = True
            if self._before:
                self._release(self._before[0].values())
            self._blocks, self.end = chunk.blocks, chunk.frames.stop
            self._pending = self._before = None

    def _abort(self, chunk: Chunk) -> None:
        with self.pool.lock:
            self._release(chunk.blocks[ordinal] for ordinal in chunk.frames)
            if self._before:
                dropped, self.end = self._before
                self._blocks = dict(sorted((self._blocks | dropped).items()))
            self._pending = self._before = None

    # Sharing

    def fork(self) -> BlockTable:
        """A second table with the same past: handles only, no bytes, no lane until its first chunk.

        Raises:
            InvalidRequest: a chunk is pending or the table is closed.
        """
        with self.pool.lock:
            self._expect_idle()
            twin = BlockTable(self.pool, self.policy)
            twin._adopt(self._blocks, self.end)
            return twin

    def snapshot(self) -> Snapshot:
        """The table as it is now, to `rewind` to; handles only, no bytes.

        Raises:
            InvalidRequest: a chunk is pending or the table is closed.
        """
        with self.pool.lock:
            self._expect_idle()
            return Snapshot(self.pool, self.policy, self._blocks, self.end)

    def rewind(self, snapshot: Snapshot) -> None:
        """Become what the snapshot holds, of this or another table; it can be used again.

        Raises:
            InvalidRequest: the snapshot was released or belongs to another pool or policy, a chunk
                is pending, or the table is closed.
        """
        with self.pool.lock:
            self._expect_idle()
            snapshot._expect_held()
            if snapshot.pool is not self.pool or snapshot.policy != self.policy:
                raise InvalidRequest(
                    "the snapshot was taken in another pool or under another policy"
                )
            old, self.policy = self._blocks, snapshot.policy  # equal, but its pins are its own
            self._adopt(dict(snapshot.entries), snapshot.end)
            self._release(old.values())

    def set_policy(self, policy: CachePolicy) -> None:
        """Follow another policy from the next chunk on: other pins, or another size of the lane.

        No byte moves here; the next chunk brings what it sees to its new places. A smaller lane is
        the head of the old one, a larger one is reserved anew.

        Raises:
            InvalidRequest: the policy would have to see a frame that is not held, it shadows
                another sink, a chunk is pending, or the table is closed.
            PoolFull: there is no room for a larger lane; nothing has changed.
        """
        with self.pool.lock:
            self._expect_idle()
            if policy.shadow != self.policy.shadow:
                raise InvalidRequest(
                    f"a policy that shadows {policy.shadow} frames can't follow one that shadows "
                    f"{self.policy.shadow}: their keys are stored in another form"
                )
            missing = [o for o in policy.visible(self.end) if o not in self._blocks]
            if missing:
                raise InvalidRequest(
                    f"the policy would have to see frames {missing}, which the table doesn't hold"
                )
            if self.lane and policy.lane_size < self.lane.size:
                self.lane = self.pool.trim(self.lane, policy.lane_size)
            elif self.lane and policy.lane_size > self.lane.size:
                larger = self.pool.reserve(policy.lane_size)
                self.park()
                self.lane = larger
            self.policy = policy

    def pin(self, frames: Iterable[int]) -> None:
        """Keep frames in view after they have left the window; see `PinnedWindow.pin`.

        Raises:
            InvalidRequest: the policy has no pins or refuses these, or as for `set_policy`.
        """
        with self.pool.lock:
            if not isinstance(self.policy, PinnedWindow):
                raise InvalidRequest(f"{self.policy} has no pins: PinnedWindow has")
            self.set_policy(self.policy.pin(frames, self.end))

    def park(self) -> None:
        """Give the lane back and keep the blocks: they can go to other tiers until the next chunk.

        Raises:
            InvalidRequest: a chunk is pending or the table is closed.
        """
        with self.pool.lock:
            self._expect_idle()
            if self.lane:
                self.pool.dissolve(self.lane)
            self.lane, self._shadowed = None, {}

    def close(self) -> None:
        """Give everything back: a pending chunk is aborted, blocks released, the lane dissolved.

        Idempotent.
        """
        with self.pool.lock:
            if self.closed:
                return
            if self._pending:
                self._pending.abort()
            self._release(self._blocks.values())
            if self.lane:
                self.pool.dissolve(self.lane)
            self._blocks, self._shadowed, self.lane, self.closed = {}, {}, None, True

    def _adopt(self, blocks: dict[int, Block], end: int) -> None:
        self._blocks, self.end = dict(blocks), end
        self.pool.retain_all(blocks.values())

    def _release(self, blocks: Iterable[Block]) -> None:
        self.pool.release_all(blocks)

    def _expect_idle(self) -> None:
        if self.closed:
            raise InvalidRequest("the block table was closed")
        if self._pending:
            raise InvalidRequest(f"the chunk of frames {self._pending.frames} is still pending")
