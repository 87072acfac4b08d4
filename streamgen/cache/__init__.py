"""The KV-cache core: what a streaming model remembers, where its bytes lie, and who shares them.

KVSpec        the geometry of a block (one latent frame, all layers)
BlockPool     the bytes, and `Block` handles to them
CachePolicy   integers: which frames a chunk sees, and where each lies (`Append`, `SinkWindow`)
BlockTable    one stream: `chunk`, `reopen`, `fork`, `snapshot`, `rewind`, `close`
Chunk         pending frames: `write`, `kv`, `commit`, `abort`; `AttnMeta` describes them
"""

from __future__ import annotations

from streamgen.cache.chunk import Chunk
from streamgen.cache.meta import AttnMeta
from streamgen.cache.policy import Append, CachePolicy, SinkWindow
from streamgen.cache.pool import Block, BlockPool, Lane, PoolStats
from streamgen.cache.spec import KVSpec
from streamgen.cache.table import BlockTable, Snapshot

__all__ = [
    "Append",
    "AttnMeta",
    "Block",
    "BlockPool",
    "BlockTable",
    "CachePolicy",
    "Chunk",
    "KVSpec",
    "Lane",
    "PoolStats",
    "SinkWindow",
    "Snapshot",
]
