"""What a tier is: bytes under keys that come back verified, or not at all.

`Tier` is the contract, `BaseTier` the bookkeeping that host memory, disk and pooled store share.
Nothing here or in `format` and `disk` needs torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from streamgen.errors import InvalidRequest, TierError

FINGERPRINT_BYTES: Final = 16
MAX_KEY: Final = 64

# The first byte of a key says who may want the entry. A tier may drop what is PRIVATE once the
# process that put it is gone: nobody else knows what it is.
PRIVATE: Final = b"\0"
CONTENT: Final = b"c"


class Missing(TierError):
    """There is no such entry, or none that can be used here."""


class Corrupt(Missing):
    """What lies there is not what was put; it has been deleted."""


@dataclass(frozen=True)
class TierStats:
    """Counts of one tier.

    Attributes:
        name: the kind of tier and where it lies.
        entries: that this process knows of.
        bytes: their payload.
        capacity: the most that `bytes` may be; None if only the medium sets a limit.
        hits: entries that came back.
        misses: entries that did not, corrupt ones included.
        corrupt: entries that were found damaged, and deleted.
    """

    name: str
    entries: int
    bytes: int
    capacity: int | None
    hits: int
    misses: int
    corrupt: int


class Tier(Protocol):
    """A place for blocks outside the pool. One thread at a time; processes may share a medium."""

    name: str
    capacity: int | None

    def put(self, key: bytes, payload: memoryview) -> None:
        """Make the payload durable, then visible; another one of this key is replaced whole.

        Raises:
            TierError: it can't be stored; nothing of it is visible.
        """
        ...

    def get(self, key: bytes, out: memoryview) -> None:
        """Copy the payload to `out` and verify it there.

        Raises:
            Missing: there is no such entry.
            Corrupt: it was damaged, not of this model or of another size; it has been deleted.
            TierError: it can't be read now.
            In each case `out` may have been written to.
        """
        ...

    def delete(self, key: bytes) -> None:
        """Remove an entry if it is there.

        Raises:
            TierError: it can't be removed.
        """
        ...

    def keys(self) -> Sequence[bytes]:
        """Every entry that can be seen now, the oldest first as far as it is known."""
        ...

    def __contains__(self, key: object) -> bool:
        """Whether an entry lies there; only `get` tells whether it is good."""
        ...

    def stats(self) -> TierStats:
        """Counts, now."""
        ...

    def close(self) -> None:
        """Drop what is private to this process. Idempotent; the tier can't be used any more."""
        ...


class BaseTier(ABC):
    """Sizes, counters and messages; a subclass reads, writes and lists.

    Args:
        name: what messages call the tier.
        fingerprint: 16 bytes, see `format.fingerprint`; entries of another one are never seen.
        capacity: payload bytes it may hold. A header of some hundred bytes comes on top of each
            entry, and on a shared medium the private entries of other processes.

    Raises:
        InvalidRequest: the fingerprint has another length, or the capacity is not positive.
    """

    def __init__(self, name: str, fingerprint: bytes, capacity: int | None) -> None:
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise InvalidRequest(
                f"a fingerprint of {len(fingerprint)} bytes: it takes {FINGERPRINT_BYTES}"
            )
        if capacity is not None and capacity < 1:
            raise InvalidRequest(f"capacity={capacity}: a positive number of bytes is needed")
        self.name = name
        self.capacity = capacity
        self._fingerprint = fingerprint
        self._sizes: dict[bytes, int] = {}  # payload bytes of every known entry, oldest first
        self._bytes = self._hits = self._misses = self._corrupt = 0

    # What a subclass does

    @abstractmethod
    def _write(self, key: bytes, payload: memoryview) -> None:
        """Make it durable, then visible, or raise TierError and leave nothing."""

    @abstractmethod
    def _read(self, key: bytes, out: memoryview) -> None:
        """Copy the verified payload to `out`; Missing and Corrupt say in a few words why not."""

    @abstractmethod
    def _remove(self, key: bytes) -> None:
        """Remove it if it is there."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """See `Tier`."""

    def _listing(self) -> Iterable[tuple[bytes, int]]:
        """Key and payload bytes of every entry in sight, the oldest first as far as is known."""
        return tuple(self._sizes.items())

    def close(self) -> None:
        """See `Tier`."""
        for key in [key for key in self._sizes if key.startswith(PRIVATE)]:
            with suppress(TierError):
                self.delete(key)

    # The contract

    def put(self, key: bytes, payload: memoryview) -> None:
        """See `Tier`."""
        if not 0 < len(key) <= MAX_KEY:
            raise InvalidRequest(f"a key of {len(key)} bytes: a tier takes 1 to {MAX_KEY}")
        payload = memoryview(payload).cast("B")
        if not self._fits(key, len(payload)):
            self._look()
            if not self._fits(key, len(payload)):
                raise TierError(
                    f"{self.name} is full: {self._bytes:,} of {self.capacity:,} bytes are taken, "
                    f"{len(payload):,} more are needed"
                )
        self._write(key, payload)
        self._account(key, len(payload))

    def get(self, key: bytes, out: memoryview) -> None:
        """See `Tier`."""
        try:
            self._read(key, memoryview(out).cast("B"))
        except Missing as error:
            self._misses += 1
            if isinstance(error, Corrupt):
                self._corrupt += 1
                with suppress(TierError):
                    self._remove(key)
            self._account(key, None)
            raise type(error)(f"{self.name}, entry {key.hex()}: {error}") from None
        self._hits += 1

    def delete(self, key: bytes) -> None:
        """See `Tier`."""
        self._remove(key)
        self._account(key, None)

    def keys(self) -> Sequence[bytes]:
        """See `Tier`."""
        self._look()
        return tuple(self._sizes)

    def stats(self) -> TierStats:
        """See `Tier`."""
        return TierStats(
            name=self.name,
            entries=len(self._sizes),
            bytes=self._bytes,
            capacity=self.capacity,
            hits=self._hits,
            misses=self._misses,
            corrupt=self._corrupt,
        )

    def _look(self) -> None:
        """Bring `_sizes` up to date: others may have changed the medium."""
        found = dict(self._listing())
        for key in [key for key in self._sizes if key not in found]:
            self._account(key, None)
        for key, size in found.items():
            if key not in self._sizes:
                self._account(key, size)

    def _fits(self, key: bytes, size: int) -> bool:
        taken = self._bytes - self._sizes.get(key, 0)
        return self.capacity is None or taken + size <= self.capacity

    def _account(self, key: bytes, size: int | None) -> None:
        """Note the payload bytes of an entry, or that it is gone."""
        self._bytes -= self._sizes.pop(key, 0)
        if size is not None:
            self._sizes[key] = size
            self._bytes += size
