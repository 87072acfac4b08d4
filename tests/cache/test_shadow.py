"""A sink whose keys are rotated for every chunk: raw blocks outside the lane, shadows in it."""

from __future__ import annotations

import pytest
import torch

from streamgen.cache import BlockPool, BlockTable, Chunk, KVSpec, SinkWindow
from streamgen.errors import InvalidRequest


@pytest.fixture
def table(pool: BlockPool) -> BlockTable:
    """Window 6 with a shadowed sink of 2."""
    return BlockTable(pool, SinkWindow(2, 6, shadow_sink=True))


def values(chunk: Chunk) -> list[float]:
    """One value of each frame of the view, layer 0."""
    return chunk.kv(0)[1][::3, 0, 0].tolist()


def test_sink_blocks_lie_outside_the_lane(table: BlockTable, roll) -> None:
    """As neighbours, so that `sink` is one view; the lane's first places hold no block."""
    roll(table, 1)
    slots = [block.slot for _, block in table.entries]
    assert slots == [22, 23, 2]
    assert table.pool.at(0) is None and table.pool.at(1) is None


def test_raw_keys_and_shadow(table: BlockTable, roll) -> None:
    """`sink` gives what `write_sink` stored; `shadow` is the head of the view that `kv` returns."""
    roll(table, 1)
    chunk = table.chunk(3)
    raw, v = chunk.sink(1)
    assert raw[::3, 0, 0].tolist() == pytest.approx([1000.1, 1001.1])
    assert v[::3, 0, 0].tolist() == pytest.approx([-0.1, -1.1])
    assert raw.data_ptr() == table.pool.k[1][22].data_ptr()
    chunk.shadow(1).copy_(raw + 5)
    assert chunk.kv(1)[0][:6:3, 0, 0].tolist() == pytest.approx([1005.1, 1006.1])
    assert chunk.sink(1)[0][0, 0, 0].item() == pytest.approx(1000.1)


def test_first_chunk_has_no_committed_sink(table: BlockTable) -> None:
    """Both views are empty while the sink itself is pending."""
    chunk = table.chunk(3)
    assert chunk.sinks == 2
    assert chunk.shadow(0).shape == chunk.sink(0)[0].shape == (0, 2, 4)


def test_sink_in_two_chunks(table: BlockTable, roll, write) -> None:
    """A chunk may hold a part of the sink; the next one holds the rest."""
    roll(table, 1, n=1)
    with table.chunk(2) as chunk:
        write(chunk, 0.0)
        assert (chunk.sinks, chunk.shadow(0).shape[0]) == (1, 3)
        assert values(chunk) == [0, -1, -2]
        chunk.commit()
    assert values(table.chunk(1))[:3] == [0, -1, -2]


def test_scattered_sink_is_stacked(table: BlockTable, spec: KVSpec, roll) -> None:
    """In a crowded pool the sink's blocks are no neighbours; `sink` then copies, in order."""
    pool = table.pool
    blocks = pool.alloc(18)
    pool.release(blocks[4])  # the 6 slots at the low end are for the lane
    pool.release(blocks[9])
    roll(table, 1)
    assert [block.slot for _, block in table.entries][:2] == [10, 15]
    raw, v = table.chunk(3).sink(0)
    assert raw[::3, 0, 0].tolist() == [1000, 1001]
    assert v[::3, 0, 0].tolist() == [0, -1]


def test_a_fork_shares_the_sink_for_good(table: BlockTable, roll) -> None:
    """The sink is never copied; a new lane gets its values."""
    roll(table, 2)
    child = table.fork()
    chunk = child.chunk(3)
    assert values(chunk)[:2] == [0, -1]
    assert [child.entries[i][1] for i in (0, 1)] == [table.entries[i][1] for i in (0, 1)]


def test_another_sink_gets_its_own_values(table: BlockTable, roll, write) -> None:
    """After a rewind to before a rewritten sink, the shadow's values are the old ones again."""
    roll(table, 1)
    old = table.snapshot()
    with table.reopen(3) as chunk:
        write(chunk, 50.0)
        chunk.commit()
    assert values(table.chunk(1))[:2] == [-50, -51]
    table.pending.abort()
    table.rewind(old)
    assert values(table.chunk(1))[:2] == [0, -1]


def test_undo_brings_the_values_back(table: BlockTable, roll, write) -> None:
    """An aborted rewrite of the sink has overwritten the shadows; the next chunk mends them."""
    roll(table, 1)
    chunk = table.reopen(3, undo=True)
    write(chunk, 50.0)
    chunk.abort()
    assert values(table.chunk(1))[:3] == [0, -1, -2]


def test_write_sink_checks(table: BlockTable, spec: KVSpec, roll) -> None:
    """Shapes are checked, commit wants it, and there must be a pending sink frame."""
    x = torch.ones(9, 2, 4)
    chunk = table.chunk(3)
    with pytest.raises(InvalidRequest, match=r"\(9, 2, 4\) .* take \(6, 2, 4\)"):
        chunk.write_sink(0, x, x)
    for layer in range(spec.num_layers):
        chunk.write(layer, x, x)
    with pytest.raises(InvalidRequest, match="not written"):
        chunk.commit()
    chunk.abort()
    roll(table, 1)
    with pytest.raises(InvalidRequest, match="no shadowed sink frame"):
        table.chunk(3).write_sink(0, x, x)
