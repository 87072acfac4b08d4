"""State of fixed size beside the K/V: what can't be cut at a token, only taken at a moment.

A recurrent layer's state, a video decoder's cache, a generator, a scheduler: named tensors whose
shapes never change. Keys and values can be reused up to any page, state only from a snapshot, and a
model that has both resumes where both are (`resume_point`).

`StatePool` is to states what `BlockPool` is to blocks: slots, handles, reference counts. All
tensors of a state lie in one slot, so they always belong to one moment. Its owner, a `StateSlot`,
updates it in place for every chunk; hence a snapshot is a real copy, and twins made by `fork` share
until one of them writes.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from streamgen.cache.pool import Away, Block
from streamgen.errors import InvalidRequest, PoolFull


@dataclass(frozen=True)
class StateSpec:
    """What one state consists of.

    Args:
        parts: name -> shape and dtype of a tensor.

    Raises:
        InvalidRequest: no part, or a size below 1.
    """

    parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    def __post_init__(self) -> None:
        if not self.parts:
            raise InvalidRequest("a state needs at least one tensor")
        for name, (shape, _) in self.parts.items():
            if any(size < 1 for size in shape):
                raise InvalidRequest(f"state {name!r} {shape}: every size is at least 1")

    @property
    def nbytes(self) -> int:
        """Bytes of one state, and of one snapshot."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.parts.values())


@dataclass(frozen=True)
class StateStats:
    """Counts of slots: of the pool, free, with a state or snapshot in them, shared by forks; and
    the bytes of all."""

    total: int
    free: int
    live: int
    shared: int
    bytes: int


class StatePool:
    """Room for a fixed number of states, allocated once; the verbs are those of `BlockPool`.

    Args:
        spec: what one state consists of.
        num_slots: states and snapshots that it has room for.
        device: of the tensors.

    Attributes:
        tensors: name -> tensor `[slots, *shape]`.

    Raises:
        InvalidRequest: `num_slots` is not positive.
    """

    def __init__(self, spec: StateSpec, num_slots: int, device: torch.device | str = "cpu") -> None:
        if num_slots < 1:
            raise InvalidRequest(f"num_slots={num_slots}: a pool needs at least 1 slot")
        self.spec = spec
        self.lock = threading.RLock()
        with torch.inference_mode(False):  # else a pool made there could not be written elsewhere
            self.tensors = {
                name: torch.zeros((num_slots, *shape), dtype=dtype, device=device)
                for name, (shape, dtype) in spec.parts.items()
            }
        self._blobs: list[Block | None] = [None] * num_slots

    def open(self) -> StateSlot:
        """A new state of zeros, at boundary 0.

        Raises:
            PoolFull: no slot is free.
        """
        with self.lock:
            blob = self._occupy(Block(-1, sealed=True), self.spare(1)[0])
            for tensor in self.tensors.values():
                tensor[blob.slot].zero_()
            return StateSlot(self, blob, 0)

    # Bytes

    def views(self, blob: Block) -> dict[str, Tensor]:
        """The tensors of one state."""
        return {name: tensor[blob.slot] for name, tensor in self.tensors.items()}

    def copy(self, blob: Block, slot: int) -> Block:
        """A sealed state with the same bytes, in an empty slot."""
        for tensor in self.tensors.values():
            tensor[slot].copy_(tensor[blob.slot])
        return self._occupy(Block(-1, sealed=True), slot)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one state outside the pool."""
        return self.spec.nbytes

    def read(self, blob: Block, out: memoryview) -> None:
        """Copy a state's bytes, tensor by tensor, to `out` (`payload_bytes` of them)."""
        at = 0
        for tensor in self.tensors.values():
            part = tensor[blob.slot].cpu().contiguous().flatten().view(torch.uint8).numpy()
            out[at : at + part.nbytes] = part.data
            at += part.nbytes

    def unload(self, blob: Block, away: Away) -> None:
        """Free the slot of a sealed state whose bytes another tier has; every holder follows."""
        assert blob.sealed and blob.slot >= 0, f"{blob} can't leave the pool"
        self._blobs[blob.slot] = None
        blob.slot, blob.away = -1, away

    def load(self, blob: Block, slot: int) -> None:
        """Bring a state back from another tier into an empty slot; every holder follows.

        Raises:
            StreamgenError: the bytes can't be had; the state stays away.
        """
        away = blob.away
        assert away is not None, f"{blob} is not away"
        payload = torch.empty(self.payload_bytes, dtype=torch.uint8)
        away.read(payload.numpy().data)
        at = 0
        for tensor in self.tensors.values():
            target = tensor[slot].flatten().view(torch.uint8)
            target.copy_(payload[at : at + len(target)])
            at += len(target)
        blob.away = None
        self._occupy(blob, slot)
        away.forget()

    def fetch(self, blob: Block) -> None:
        """Bring a state back if it is away.

        Raises:
            PoolFull: no slot is free.
            StreamgenError: the bytes can't be had; the state stays away.
        """
        if blob.away is not None:
            self.load(blob, self.spare(1)[0])

    # Slots

    def spare(self, n: int) -> list[int]:
        """`n` free slots, lowest first; only named, not taken.

        Raises:
            PoolFull: fewer are free.
        """
        free = [slot for slot, blob in enumerate(self._blobs) if blob is None]
        if len(free) < n:
            s = self.stats()
            raise PoolFull(
                f"the state pool has no room for {n} more: {s.free} of {s.total} slots are free "
                f"({self.spec.nbytes:,} bytes each; states and snapshots: {s.live}; shared by "
                f"forks: {s.shared})"
            )
        return free[:n]

    def retain(self, blob: Block) -> None:
        """Count one more holder."""
        assert blob.ref > 0, f"{blob} is dead"
        blob.ref += 1

    def release(self, blob: Block) -> None:
        """Count one holder less; the state dies with its last one."""
        assert blob.ref > 0, f"{blob} is dead"
        blob.ref -= 1
        if blob.ref == 0:
            if blob.away is not None:
                blob.away.forget()
                blob.away = None
            else:
                self._blobs[blob.slot] = None
                blob.slot = -1

    def own(self, blob: Block) -> Block:
        """The state to write to in place of `blob`: itself, unsealed, if nobody else holds it, else
        a copy (copy-on-write), and one holder less of the shared one.

        Raises:
            PoolFull: a slot is needed and none is free; nothing has changed.
        """
        self.fetch(blob)
        if blob.ref > 1:
            blob, shared = self.copy(blob, self.spare(1)[0]), blob
            self.release(shared)
        blob.sealed = False
        return blob

    def _occupy(self, blob: Block, slot: int) -> Block:
        assert self._blobs[slot] is None, f"slot {slot} holds {self._blobs[slot]}"
        self._blobs[slot] = blob
        blob.slot = slot
        return blob

    # Accounts

    def stats(self) -> StateStats:
        """Who holds what, now."""
        live = [blob for blob in self._blobs if blob]
        return StateStats(
            total=len(self._blobs),
            free=len(self._blobs) - len(live),
            live=len(live),
            shared=sum(blob.ref > 1 for blob in live),
            bytes=len(self._blobs) * self.spec.nbytes,
        )

    def check(self) -> None:
        """Assert that slots and handles agree; O(slots), no bytes are read."""
        for slot, blob in enumerate(self._blobs):
            if blob is not None:
                assert blob.slot == slot and blob.ref > 0, f"slot {slot} holds {blob}"
                assert blob.sealed or blob.ref == 1, f"a state being written is shared: {blob}"


class StateSnapshot:
    """A state as it was at `boundary`: a copy that holds a slot until `release`."""

    def __init__(self, pool: StatePool, blob: Block, boundary: int) -> None:
        self.pool, self.boundary = pool, boundary
        self._blob: Block | None = blob

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._blob is None

    def release(self) -> None:
        """Give the slot back. Idempotent."""
        with self.pool.lock:
            if self._blob is not None:
                self.pool.release(self._blob)
                self._blob = None


class StateSlot:
    """One owner's state; made by `StatePool.open` or `fork`.

        with state.update(boundary=2) as tensors:
            tensors["rnn"].mul_(decay).add_(new)
            ...  # every tensor that changes until boundary 2

    Attributes:
        boundary: the moment that all its tensors belong to, in the caller's unit (tokens, frames);
            None from the beginning of an update to its end, and after one that failed.
    """

    def __init__(self, pool: StatePool, blob: Block, boundary: int) -> None:
        self.pool = pool
        self.boundary: int | None = boundary
        self._blob: Block | None = blob

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, to read; a twin may read the same bytes.

        Raises:
            InvalidRequest: the state was closed.
            PoolFull: it went to another tier, and no slot is free.
            StreamgenError: another tier has lost it.
        """
        with self.pool.lock:
            blob = self._held()
            self.pool.fetch(blob)
            return self.pool.views(blob)

    @contextmanager
    def update(self, boundary: int) -> Iterator[dict[str, Tensor]]:
        """The tensors to write in place; leaving makes them the state at `boundary`.

        If the body raises, some tensors may be new and some old: then the state belongs to no
        moment and only `rewind` makes it one again.

        Raises:
            InvalidRequest: the state was closed, is being updated, or an update failed.
            PoolFull: a twin shares the state and there is no slot for a copy; nothing has changed.
            StreamgenError: another tier has lost it; nothing has changed.
        """
        with self.pool.lock:
            self._whole()
            self._blob = blob = self.pool.own(self._held())
            self.boundary = None
        yield self.pool.views(blob)
        self.boundary, blob.sealed = boundary, True

    def snapshot(self) -> StateSnapshot:
        """A copy of the state, to `rewind` to.

        Raises:
            InvalidRequest: as for `update`.
            PoolFull: no slot is free; nothing has changed.
            StreamgenError: another tier has lost it; nothing has changed.
        """
        with self.pool.lock:
            boundary, blob = self._whole(), self._held()
            self.pool.fetch(blob)
            return StateSnapshot(self.pool, self.pool.copy(blob, self.pool.spare(1)[0]), boundary)

    def fork(self) -> StateSlot:
        """A second owner of the same state; the one that writes first gets a copy to write to.

        Raises:
            InvalidRequest: as for `update`.
        """
        with self.pool.lock:
            boundary, blob = self._whole(), self._held()
            self.pool.retain(blob)
            return StateSlot(self.pool, blob, boundary)

    def rewind(self, snapshot: StateSnapshot) -> None:
        """Become what the snapshot holds, all tensors of it; it can be used again.

        Raises:
            InvalidRequest: the state was closed, or the snapshot released or of another pool.
            PoolFull: a twin shares the state and no slot is free; nothing has changed.
            StreamgenError: another tier has lost the snapshot; nothing has changed.
        """
        with self.pool.lock:
            old, source = self._held(), snapshot._blob
            if source is None or snapshot.pool is not self.pool:
                raise InvalidRequest(
                    f"the snapshot of boundary {snapshot.boundary} was released or taken in "
                    "another pool"
                )
            self.pool.fetch(source)
            if old.ref == 1 and old.away is None:  # in place: the owner's address stays
                for name, tensor in self.pool.views(old).items():
                    tensor.copy_(self.pool.tensors[name][source.slot])
                old.sealed = True
            else:
                self._blob = self.pool.copy(source, self.pool.spare(1)[0])
                self.pool.release(old)
            self.boundary = snapshot.boundary

    def close(self) -> None:
        """Give the slot back. Idempotent."""
        with self.pool.lock:
            if self._blob is not None:
                self.pool.release(self._blob)
                self._blob = None

    def _held(self) -> Block:
        if self._blob is None:
            raise InvalidRequest("the state was closed")
        return self._blob

    def _whole(self) -> int:
        if self.boundary is None:
            raise InvalidRequest(
                "the state is being updated, or an update of it failed: rewind it to a snapshot"
            )
        return self.boundary


def resume_point(available: Mapping[str, Collection[int]]) -> int:
    """The largest boundary at which every part exists; 0, the start, needs none.

    All or nothing: a model never resumes from keys of one moment and a state of another.

    Args:
        available: part -> boundaries at which it can be had, such as `{"attention": range(0, 3701,
            16), "state": {768, 1536}}`.

    Raises:
        InvalidRequest: no part is named.
    """
    if not available:
        raise InvalidRequest("resume_point needs at least one part")
    parts = [b if isinstance(b, range) else frozenset(b) for b in available.values()]
    fewest = min(parts, key=len)
    return max((b for b in fewest if all(b in other for other in parts)), default=0)


@dataclass(frozen=True)
class HybridCache:
    """Reuse and bytes of a model with attention pages and periodic state snapshots.

    Args:
        page: tokens of a page of attention K/V, which can be reused up to any page.
        token_bytes: K/V bytes of a token, all attention layers.
        every: tokens between two state snapshots; None for a model without state.
        state_bytes: bytes of one snapshot.

    Raises:
        InvalidRequest: a page or a distance below 1.
    """

    page: int
    token_bytes: int
    every: int | None = None
    state_bytes: int = 0

    def __post_init__(self) -> None:
        if self.page < 1 or (self.every is not None and self.every < 1):
            raise InvalidRequest(f"page={self.page}, every={self.every}: both are at least 1 token")

    def available(self, tokens: int) -> dict[str, range]:
        """What exists after so many tokens, for `resume_point`."""
        parts = {"attention": range(0, tokens + 1, self.page)}
        if self.every is not None:
            parts["state"] = range(0, tokens + 1, self.every)
        return parts

    def reuse(self, shared: int) -> tuple[int, int]:
        """Tokens reused and recomputed by a request that shares its first `shared` tokens."""
        point = resume_point(self.available(shared))
        return point, shared - point

    def kv_bytes(self, tokens: int) -> int:
        """Attention K/V of so many tokens, in whole pages."""
        return -(-tokens // self.page) * self.page * self.token_bytes

    def snapshots(self, tokens: int) -> int:
        """Snapshots taken on the way, the start not counted."""
        return 0 if self.every is None else tokens // self.every

    def snapshot_bytes(self, tokens: int) -> int:
        """All these snapshots."""
        return self.snapshots(tokens) * self.state_bytes

    @property
    def snapshot_tokens(self) -> float:
        """Tokens whose K/V weigh as much as one snapshot."""
        return self.state_bytes / self.token_bytes
