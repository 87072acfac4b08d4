"""Where the bytes of all streams lie: fixed K and V tensors cut into slots, and handles to them.

A `Block` is a handle: tables, forks and snapshots hold it, and only the pool knows bytes. The slot
is a field of the handle, so a block that moves takes all its holders along; a block that went to
another tier (`unload`) has no slot until it comes back (`load`).

Invariants (`check` asserts what can be seen from here):
    a sealed block's bytes never change while somebody holds it;
    a slot holds at most one live block, a block lies in exactly one slot or in another tier;
    `ref` is the number of holders; a block that nobody holds is gone and its slot is empty;
    a slot of a lane is never handed out, even while it is empty.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from streamgen.cache.codec import make_codecs
from streamgen.cache.spec import KVSpec
from streamgen.cache.staging import Staging
from streamgen.errors import InvalidRequest, PoolFull

# Flags of a slot; 0 is free. A slot of a lane keeps LANE whether or not a block lies in it.
LIVE, LANE = 1, 2


class Block:
    """A handle to the K and V of one latent frame, in every layer.

    Attributes:
        slot: where its bytes lie in the pool; -1 while they lie in another tier, or once nobody
            holds the block.
        ref: number of holders.
        sealed: committed, its bytes are final. An unsealed block is pending and has one owner.
        away: what another tier keeps of it; None while the bytes lie in the pool.
    """

    __slots__ = ("slot", "ref", "sealed", "away")

    def __init__(self, slot: int, sealed: bool = False) -> None:
        self.slot = slot
        self.ref = 1
        self.sealed = sealed
        self.away: Away | None = None

    def __repr__(self) -> str:
        where = f"away={self.away}" if self.away else f"slot={self.slot}"
        return f"Block({where}, ref={self.ref}, sealed={self.sealed})"


class Away(Protocol):
    """The bytes of a block that left the pool, wherever they are (`streamgen.cache.tier`)."""

    def read(self, out: memoryview) -> None:
        """Copy the verified bytes into `out`; raises StreamgenError if they can't be had."""
        ...

    def forget(self) -> None:
        """Nobody wants the bytes any more."""
        ...


@dataclass(frozen=True)
class Lane:
    """A run of `size` slots from slot `base` on, in which only one table places blocks."""

    base: int
    size: int


@dataclass(frozen=True)
class PoolStats:
    """Counts of slots.

    Attributes:
        total: slots of the pool.
        free: slots that can be handed out.
        lanes: lanes in use.
        reserved: slots that belong to lanes, empty or not.
        live: slots with a block in them, in lanes or not.
        shared: blocks with more than one holder.
        bytes: K and V storage of the whole pool, scales included.
        staging: bytes of the buffers in which pending chunks of a coded pool work; 0 if raw.
    """

    total: int
    free: int
    lanes: int
    reserved: int
    live: int
    shared: int
    bytes: int
    staging: int


class BlockPool:
    """The K/V memory of one model on one device, allocated once.

    Lanes are taken from the low end, single blocks from the high end, which keeps long runs free.
    `lock` makes every change of a table whole, so sessions on several threads can share a pool.

    Args:
        spec: geometry of a block.
        num_blocks: slots.
        device: of the tensors.

    Attributes:
        k, v: per layer one tensor `[slots, block_tokens, kv_heads, head_dim]`. K and V are separate
            allocations, because a compiler can re-use only one of two aliased outputs in place. In
            a coded pool they hold codes, without which scales mean nothing: see `parts`.
        parts: per layer the tensors of K and those of V, each `[slots, *part.shape]` as in
            `spec.layout`; the first of each is the one in `k` or `v`.
        values: all tensors that hold V.
        codecs: of K and of V; unused if raw.

    Raises:
        InvalidRequest: `num_blocks` is not positive.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        if num_blocks < 1:
            raise InvalidRequest(f"num_blocks={num_blocks}: a pool needs at least 1 block")
        self.spec = spec
        self.lock = threading.RLock()
        self.codecs = make_codecs(spec.codec, spec.dtype, device)
        with torch.inference_mode(False):  # else a pool made there could not be written elsewhere
            self.parts = tuple(
                tuple(
                    tuple(
                        torch.zeros((num_blocks, *part.shape), dtype=part.dtype, device=device)
                        for part in side
                    )
                    for side in spec.layout
                )
                for _ in range(spec.num_layers)
            )
            self.k = tuple(k[0] for k, _ in self.parts)
            self.v = tuple(v[0] for _, v in self.parts)
            self._flat = tuple(
                (k.flatten(0, 1), v.flatten(0, 1))
                for k, v in zip(self.k, self.v, strict=True)
                if spec.codec == "raw"
            )
        self.values = tuple(tensor for _, v in self.parts for tensor in v)
        keys = tuple(tensor for k, _ in self.parts for tensor in k)
        self._storage = (*keys, *self.values)  # everything that has a slot as its first axis
        self._stagings: list[Staging] = []
        self._idle: list[Staging] = []
        self._device = device
        self._flags = bytearray(num_blocks)
        self._blocks: list[Block | None] = [None] * num_blocks
        self._lanes: set[Lane] = set()

    # Bytes

    def rows(self, layer: int, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V of neighbouring slots: views `[count*block_tokens, kv_heads, head_dim]`.

        Of a raw pool; the rows of a coded one must be decoded.
        """
        k, v = self._flat[layer]
        a, b = slot * self.spec.block_tokens, (slot + count) * self.spec.block_tokens
        return k[a:b], v[a:b]

    def move(self, block: Block, slot: int) -> None:
        """Carry a block to an empty slot; every holder follows."""
        self._carry(block.slot, slot)
        self._vacate(block.slot)
        self._occupy(block, slot)

    def copy(self, block: Block, slot: int) -> Block:
        """A private sealed block with the same bytes, in an empty slot."""
        self._carry(block.slot, slot)
        return self._occupy(Block(slot, sealed=True), slot)

    def _carry(self, source: int, target: int) -> None:
        assert source >= 0, "the block's bytes are not in the pool"
        for tensor in self._storage:
            tensor[target].copy_(tensor[source])

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block outside the pool."""
        return sum(tensor[0].nbytes for tensor in self._storage)

    def read(self, block: Block, out: memoryview) -> None:
        """Copy a block's bytes, storage by storage, to `out` (`payload_bytes` of them)."""
        at = 0
        for tensor in self._storage:
            part = _bytes_of(tensor[block.slot].cpu())
            out[at : at + len(part)] = part
            at += len(part)

    def unload(self, block: Block, away: Away) -> None:
        """Free the slot of a sealed block whose bytes another tier has; every holder follows."""
        assert block.sealed and block.slot >= 0, f"{block} can't leave the pool"
        self._vacate(block.slot)
        block.slot, block.away = -1, away

    def load(self, block: Block, slot: int) -> None:
        """Bring a block back from another tier into an empty slot; every holder follows.

        Raises:
            StreamgenError: the bytes can't be had; the block stays away.
        """
        assert block.away is not None, f"{block} is not away"
        payload = torch.empty(self.payload_bytes, dtype=torch.uint8)
        block.away.read(payload.numpy().data)
        at = 0
        for tensor in self._storage:
            target = tensor[slot].flatten().view(torch.uint8)
            target.copy_(payload[at : at + len(target)])
            at += len(target)
        away, block.away = block.away, None
        self._occupy(block, slot)
        away.forget()

    # Codes

    def encode(self, layer: int, slot: int, k: Tensor, v: Tensor, staging: Staging) -> None:
        """Store rows `[n*block_tokens, kv_heads, head_dim]` in `n` neighbouring slots."""
        for codec, x, parts in zip(self.codecs, (k, v), self.parts[layer], strict=True):
            count = len(x) // self.spec.block_tokens
            staging.encode(codec, x, [part[slot : slot + count] for part in parts])

    def decode(self, layer: int, slot: int, k: Tensor, v: Tensor, staging: Staging) -> None:
        """Read `n` neighbouring slots to rows `[n*block_tokens, kv_heads, head_dim]`."""
        for codec, out, parts in zip(self.codecs, (k, v), self.parts[layer], strict=True):
            count = len(out) // self.spec.block_tokens
            staging.decode(codec, [part[slot : slot + count] for part in parts], out)

    def lend(self, lane: int, frames: int, sunk: int, sinks: int) -> Staging | None:
        """Buffers for one pending chunk, until `take_back`; see `Staging.fit`. None if raw."""
        if self.spec.codec == "raw":
            return None
        if not self._idle:
            self._idle.append(Staging(self.spec, self._device))
            self._stagings.append(self._idle[-1])
        self._idle[-1].fit(lane, frames, sunk, sinks)  # if memory is short, nothing was lent
        return self._idle.pop()

    def take_back(self, staging: Staging) -> None:
        """The chunk is over."""
        self._idle.append(staging)

    # Slots

    def at(self, slot: int) -> Block | None:
        """The live block in a slot."""
        return self._blocks[slot]

    @property
    def num_free(self) -> int:
        """Slots that can be handed out."""
        return self._flags.count(0)

    def require(self, run: int, loose: int) -> None:
        """Raise PoolFull unless a lane of `run` slots and `loose` further slots can be had now."""
        if run and self._flags.find(bytes(run)) < 0:
            raise self._full(f"a lane of {run} neighbouring slots")
        if self.num_free < run + loose:
            raise self._full(f"{run + loose} slots")

    def reserve(self, n: int) -> Lane:
        """Take `n` neighbouring free slots, lowest first, as a lane.

        Raises:
            PoolFull: no such run is free; nothing has changed.
        """
        self.require(run=n, loose=0)
        lane = Lane(self._flags.find(bytes(n)), n)
        self._flags[lane.base : lane.base + n] = bytes([LANE]) * n
        self._lanes.add(lane)
        return lane

    def dissolve(self, lane: Lane) -> None:
        """Give a lane back: empty slots are free at once, the others when their block dies."""
        self._lanes.remove(lane)
        for slot in range(lane.base, lane.base + lane.size):
            self._flags[slot] &= ~LANE

    def trim(self, lane: Lane, size: int) -> Lane:
        """Give back all but the first `size` slots of a lane, as `dissolve` does."""
        self.dissolve(lane)
        kept = Lane(lane.base, size)
        for slot in range(kept.base, kept.base + size):
            self._flags[slot] |= LANE
        self._lanes.add(kept)
        return kept

    def loose(self, block: Block) -> bool:
        """Whether the slot of a block belongs to no lane, so that others can have it after it."""
        return block.slot >= 0 and self._flags[block.slot] == LIVE

    def spare(self, n: int) -> list[int]:
        """The `n` free slots to use for blocks outside lanes: neighbours if possible, else any.

        They are only named, not taken.

        Raises:
            PoolFull: fewer than `n` slots are free.
        """
        start = self._flags.rfind(bytes(n))
        if start >= 0:
            return list(range(start, start + n))
        self.require(run=0, loose=n)
        return [slot for slot, flag in enumerate(self._flags) if flag == 0][-n:]

    # Blocks

    def put(self, slot: int) -> Block:
        """A new pending block in an empty slot; its bytes are whatever lay there."""
        return self._occupy(Block(slot), slot)

    def alloc(self, n: int) -> list[Block]:
        """`n` new pending blocks outside lanes, in neighbouring slots if possible.

        Raises:
            PoolFull: fewer than `n` slots are free; nothing has changed.
        """
        blocks = []
        for slot in self.spare(n):  # as `put`, for slots that are known to be free
            block = self._blocks[slot] = Block(slot)
            self._flags[slot] = LIVE
            blocks.append(block)
        return blocks

    def retain_all(self, blocks: Iterable[Block]) -> None:
        """Count one more holder of each."""
        for block in blocks:
            assert block.ref > 0, f"{block} is dead"
            block.ref += 1

    def release_all(self, blocks: Iterable[Block]) -> None:
        """Count one holder less of each."""
        for block in blocks:
            if block.ref > 1:
                block.ref -= 1
            else:
                self.release(block)

    def retain(self, block: Block) -> None:
        """Count one more holder."""
        assert block.ref > 0, f"{block} is dead"
        block.ref += 1

    def release(self, block: Block) -> None:
        """Count one holder less; the block dies with its last one."""
        assert block.ref > 0, f"{block} is dead"
        block.ref -= 1
        if block.ref == 0:
            if block.away is not None:
                block.away.forget()
                block.away = None
            else:
                self._blocks[block.slot] = None
                self._flags[block.slot] &= ~LIVE
                block.slot = -1

    def own(self, block: Block) -> Block:
        """The block to write to in place of `block`: itself, unsealed, if nobody else holds it,
        else a copy in a spare slot (copy-on-write), and one holder less of the shared one.

        Raises:
            PoolFull: a copy is needed and no slot is free; nothing has changed.
        """
        if block.ref > 1:
            block, shared = self.copy(block, self.spare(1)[0]), block
            self.release(shared)
        block.sealed = False
        return block

    def _occupy(self, block: Block, slot: int) -> Block:
        assert self._blocks[slot] is None, f"slot {slot} holds {self._blocks[slot]}"
        self._blocks[slot] = block
        self._flags[slot] |= LIVE
        block.slot = slot
        return block

    def _vacate(self, slot: int) -> None:
        self._blocks[slot] = None
        self._flags[slot] &= ~LIVE

    # Accounts

    def stats(self) -> PoolStats:
        """Who holds what, now."""
        live = [block for block in self._blocks if block]
        return PoolStats(
            total=len(self._blocks),
            free=self.num_free,
            lanes=len(self._lanes),
            reserved=sum(lane.size for lane in self._lanes),
            live=len(live),
            shared=sum(block.ref > 1 for block in live),
            bytes=len(self._blocks) * self.spec.block_bytes,
            staging=sum(staging.nbytes for staging in self._stagings),
        )

    def check(self) -> None:
        """Assert that slots, handles and lanes agree; O(slots), no bytes are read."""
        in_lane = [slot for x in self._lanes for slot in range(x.base, x.base + x.size)]
        assert len(in_lane) == len(set(in_lane)), "two lanes overlap"
        expected = bytearray(len(self._blocks))
        for slot in in_lane:
            expected[slot] = LANE
        for slot, block in enumerate(self._blocks):
            if block is None:
                continue
            assert block.slot == slot and block.ref > 0, f"slot {slot} holds {block}"
            assert block.sealed or block.ref == 1, f"a pending block is shared: {block}"
            expected[slot] |= LIVE
        assert expected == self._flags, "the flags of the slots disagree with lanes and blocks"

    def _full(self, wanted: str) -> PoolFull:
        s = self.stats()
        return PoolFull(
            f"the KV pool has no room for {wanted}: {s.free} of {s.total} slots are free "
            f"(lanes: {s.lanes}, with {s.reserved} slots; live blocks: {s.live}; "
            f"shared by forks or snapshots: {s.shared})"
        )


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
