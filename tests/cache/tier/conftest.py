"""Tiers of every kind on one fingerprint, and a way to damage what lies in them."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamgen.cache.tier import DiskTier, HostTier, PooledTier
from streamgen.cache.tier.base import BaseTier

FINGERPRINT = bytes(range(16))

Make = Callable[..., BaseTier]


@pytest.fixture
def fingerprint() -> bytes:
    """16 bytes."""
    return FINGERPRINT


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if there is such a thing, for tests that write many small files."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        yield Path(folder)


@pytest.fixture
def makers(tmp_path: Path) -> dict[str, Make]:
    """Per kind of tier a function that opens it, again at the same place if called again."""
    name = f"memory://{uuid.uuid4().hex}"

    def disk(capacity: int | None = None, fingerprint: bytes = FINGERPRINT) -> DiskTier:
        return DiskTier(tmp_path / "disk", fingerprint, capacity)

    def shared(capacity: int | None = None, fingerprint: bytes = FINGERPRINT) -> PooledTier:
        return PooledTier(f"file://{tmp_path}/shared", fingerprint, capacity)

    def memory(capacity: int | None = None, fingerprint: bytes = FINGERPRINT) -> PooledTier:
        return PooledTier(name, fingerprint, capacity)

    return {
        "host": lambda capacity=None: HostTier(capacity or 1 << 20),
        "disk": disk,
        "folder": shared,
        "memory": memory,
    }


@pytest.fixture
def damage() -> Callable[[BaseTier, bytes, Callable[[bytes], bytes]], None]:
    """`damage(tier, key, change)`: what lies under a key becomes `change` of it."""

    def damage(tier: BaseTier, key: bytes, change: Callable[[bytes], bytes]) -> None:
        if isinstance(tier, HostTier):
            tier._entries[key] = bytearray(change(bytes(tier._entries[key])))
        elif isinstance(tier, DiskTier):
            path = tier._path(key)
            path.write_bytes(change(path.read_bytes()))
        elif isinstance(tier, PooledTier):
            path = tier._path(key)
            tier._store.pipe_file(path, change(tier._store.cat_file(path)))

    return damage
