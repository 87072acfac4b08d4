"""Host memory as a tier: the first stop of a block that leaves the pool of a GPU."""

from __future__ import annotations

from streamgen.cache.tier import format
from streamgen.cache.tier.base import FINGERPRINT_BYTES, BaseTier, Missing


class HostTier(BaseTier):
    """Entries in the memory of this process, in the same form as in a file: verified, too.

    Args:
        capacity: payload bytes it may hold.

    Raises:
        InvalidRequest: the capacity is not positive.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__("host memory", bytes(FINGERPRINT_BYTES), capacity)
        self._entries: dict[bytes, bytearray] = {}

    def _write(self, key: bytes, payload: memoryview) -> None:
        head = format.pack(key, self._fingerprint, payload)
        self._entries[key] = bytearray().join((head, payload))

    def _read(self, key: bytes, out: memoryview) -> None:
        if key not in self._entries:
            raise Missing("it is not there")
        format.unpack(memoryview(self._entries[key]), key, self._fingerprint, out)

    def _remove(self, key: bytes) -> None:
        self._entries.pop(key, None)

    def __contains__(self, key: object) -> bool:
        """See `Tier`."""
        return key in self._entries
