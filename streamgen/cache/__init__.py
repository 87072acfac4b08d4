"""The KV-cache core: what a streaming model remembers, where its bytes lie, and who shares them.

Frames:
    KVSpec        the geometry of a block (one latent frame, all layers) and its codec
    BlockPool     the bytes, and `Block` handles to them
    CachePolicy   integers: which frames a chunk sees, and where each lies (`Append`, `SinkWindow`,
                  `PinnedWindow`, `RollingBuffer`)
    BlockTable    one stream: `chunk`, `reopen`, `fork`, `snapshot`, `rewind`, `park`, `close`
    Chunk         pending frames: `write`, `kv`, `commit`, `abort`; `AttnMeta` describes them
Tokens:
    TokenTable    one sequence, paged: `extend`, `scratch`, `truncate`, `compact`, `fork`, swap
    TokenTree     candidates of which one path is accepted; `select` moves beams
    NextScale     images that grow scale by scale, as one strided batch
    LayerBudget   which tokens of which layer stay
Beyond the pool:
    Tiers         host memory, disk and pooled stores behind it (`streamgen.cache.tier`)
    PrefixIndex   blocks by what was put in; `Fingerprint` says what else they depend on
    StatePool     fixed-size states beside K/V, whole or not at all
    plan          how many bytes all this takes (`streamgen.cache.planner`)
"""

from __future__ import annotations

from streamgen.cache.beams import select, sharing
from streamgen.cache.chunk import Chunk, CodedChunk
from streamgen.cache.codec import CODECS, KVCodec
from streamgen.cache.contiguous import ContiguousTable
from streamgen.cache.eviction import LayerBudget
from streamgen.cache.keys import Fingerprint, chunk_key, nonce
from streamgen.cache.meta import AttnMeta
from streamgen.cache.policy import Append, CachePolicy, PinnedWindow, RollingBuffer, SinkWindow
from streamgen.cache.pool import Block, BlockPool, Lane, PoolStats
from streamgen.cache.prefix import PrefixIndex, PrefixStats
from streamgen.cache.scales import NextScale
from streamgen.cache.spec import KVSpec
from streamgen.cache.state import StatePool, StateSlot, StateSpec, resume_point
from streamgen.cache.table import BlockTable, Snapshot
from streamgen.cache.tier import DiskTier, HostTier, PooledTier, Tiers
from streamgen.cache.tokens import Summary, TokenTable
from streamgen.cache.tree import TokenTree

__all__ = [
    "CODECS",
    "Append",
    "AttnMeta",
    "Block",
    "BlockPool",
    "BlockTable",
    "CachePolicy",
    "Chunk",
    "CodedChunk",
    "ContiguousTable",
    "DiskTier",
    "Fingerprint",
    "HostTier",
    "KVCodec",
    "KVSpec",
    "Lane",
    "LayerBudget",
    "NextScale",
    "PinnedWindow",
    "PooledTier",
    "PoolStats",
    "PrefixIndex",
    "PrefixStats",
    "RollingBuffer",
    "SinkWindow",
    "Snapshot",
    "StatePool",
    "StateSlot",
    "StateSpec",
    "Summary",
    "Tiers",
    "TokenTable",
    "TokenTree",
    "chunk_key",
    "nonce",
    "resume_point",
    "select",
    "sharing",
]
