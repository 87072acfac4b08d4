"""Tiers behind the pool: host memory, local disk, a pooled store; verified on the way back.

Tier         the contract: `put`, `get`, `delete`, `keys`, `stats`, `close`
HostTier     memory of this process
DiskTier     a folder on a local disk: atomic, durable, shared by processes
PooledTier   whatever fsspec opens: a shared folder, an object store
Tiers        an ordered list of them behind a `BlockPool`: `demote`, `promote`, `store`, `fetch`
"""

from __future__ import annotations

from streamgen.cache.tier.base import Corrupt, Missing, Tier, TierStats
from streamgen.cache.tier.disk import DiskTier
from streamgen.cache.tier.format import fingerprint
from streamgen.cache.tier.manager import Tiers
from streamgen.cache.tier.memory import HostTier
from streamgen.cache.tier.pooled import PooledTier

__all__ = [
    "Corrupt",
    "DiskTier",
    "HostTier",
    "Missing",
    "PooledTier",
    "Tier",
    "TierStats",
    "Tiers",
    "fingerprint",
]
