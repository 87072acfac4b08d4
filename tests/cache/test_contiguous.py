"""The contiguous baseline, and how it compares with paging."""

from __future__ import annotations

import pytest
import torch

from streamgen.cache import BlockPool, KVSpec
from streamgen.cache.contiguous import ContiguousTable
from streamgen.cache.tokens import TokenTable
from streamgen.errors import InvalidRequest, PoolFull

SPEC = KVSpec(num_layers=2, kv_heads=1, head_dim=2, block_tokens=4)


@pytest.fixture
def pool() -> BlockPool:
    """48 slots for tokens, in 12 blocks of 4."""
    return BlockPool(SPEC, 12)


def some(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random K and V of n tokens."""
    g = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, SPEC.num_layers, n, SPEC.kv_heads, SPEC.head_dim, generator=g)
    return k, v


def test_48_slots(pool: BlockPool) -> None:
    """Three requests of 3 tokens in 48 slots: regions of 16 leave 39 of them empty and no room.

    Blocks of 4 leave 3 empty and 36 free.
    """
    token = SPEC.token_bytes
    tables = [ContiguousTable(pool, max_tokens=16) for _ in range(3)]
    for table in tables:
        table.append(*some(3))
    reserved, used = (sum(getattr(x, f"{y}_bytes") for x in tables) for y in ("reserved", "used"))
    assert (used // token, (reserved - used) // token) == (9, 39)
    with pytest.raises(PoolFull, match="a lane of 4 neighbouring slots: 0 of 12"):
        ContiguousTable(pool, max_tokens=16)
    for table in tables:
        table.close()

    paged = [TokenTable(pool) for _ in range(3)]
    for table in paged:
        table.append(*some(3))
    reserved, used = (sum(getattr(x, f"{y}_bytes") for x in paged) for y in ("reserved", "used"))
    assert (used // token, (reserved - used) // token) == (9, 3)
    assert pool.stats().free * SPEC.block_tokens == 36


def test_same_bytes_as_paged(pool: BlockPool) -> None:
    """The same edits give the same K and V in logical order, bitwise."""
    plain, paged = ContiguousTable(pool, 20), TokenTable(pool)
    for seed, (n, left) in enumerate([(1, 1), (6, 7), (5, 9), (2, 11), (1, 3), (8, 11)]):
        for table in (plain, paged):
            table.append(*some(n, seed))
            table.truncate(left)
        assert plain.length == paged.length == left
        assert plain.used_bytes == paged.used_bytes
        for layer in range(SPEC.num_layers):
            for x, y in zip(plain.gather(layer), paged.gather(layer), strict=True):
                assert torch.equal(x, y)


def test_a_fork_is_a_whole_copy(pool: BlockPool) -> None:
    """Its own region, its own bytes."""
    table = ContiguousTable(pool, 10)
    table.append(*some(5))
    twin = table.fork()
    assert pool.stats().free == 12 - 2 * 3
    assert twin.reserved_bytes == 3 * SPEC.block_bytes
    table.append(*some(2, 1))
    twin.append(*some(2, 2))
    k, v = some(5)
    assert torch.equal(twin.gather(1)[0][:5], k[1]) and torch.equal(twin.gather(1)[1][:5], v[1])
    assert torch.equal(twin.gather(0)[0][5:], some(2, 2)[0][0])
    assert torch.equal(table.gather(0)[0][5:], some(2, 1)[0][0])
    assert ContiguousTable(pool, 4).fork().length == 0


def test_external_fragmentation(pool: BlockPool) -> None:
    """Room for a region that lies in pieces is no room; for blocks it is."""
    regions = [ContiguousTable(pool, 8) for _ in range(6)]
    for region in regions[::2]:
        region.close()
        region.close()
    assert pool.stats().free == 6
    with pytest.raises(PoolFull, match="3 neighbouring slots"):
        ContiguousTable(pool, 12)
    TokenTable(pool).append(*some(24))
    assert regions[0].reserved_bytes == 0


def test_bad_use(pool: BlockPool) -> None:
    """Refused with what is accepted, and nothing is written."""
    table = ContiguousTable(pool, 5)
    table.append(*some(3))
    k, v = some(3, 1)
    with pytest.raises(InvalidRequest, match="6 tokens in a region reserved for 5"):
        table.append(k, v)
    with pytest.raises(InvalidRequest, match=r"v is \(2, 2, 1, 2\) .*; accepted: \(2, 3, 1, 2\)"):
        table.append(k, v[:, :2])
    with pytest.raises(InvalidRequest, match="has 3 tokens"):
        table.truncate(4)
    with pytest.raises(InvalidRequest, match="max_tokens=0"):
        ContiguousTable(pool, 0)
    with pytest.raises(InvalidRequest, match="raw pool"):
        ContiguousTable(BlockPool(KVSpec(1, 1, 4, 4, codec="int8"), 2), 4)
    assert torch.equal(table.gather(0)[0], some(3)[0][0])
    table.close()
    for call in (lambda: table.append(k, v), lambda: table.gather(0), table.fork):
        with pytest.raises(InvalidRequest, match="was closed"):
            call()
