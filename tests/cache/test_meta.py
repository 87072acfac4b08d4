"""What attention is told."""

from __future__ import annotations

from streamgen.cache import BlockPool, BlockTable, SinkWindow
from streamgen.cache.meta import merge_runs


def test_merge_runs() -> None:
    """Neighbours in ascending order merge, others don't."""
    assert merge_runs([4, 5, 1, 2, 9]) == ((4, 2), (1, 2), (9, 1))
    assert merge_runs([2, 1]) == ((2, 1), (1, 1))
    assert merge_runs([]) == ()


def test_meta_of_a_wrapped_chunk(pool: BlockPool, roll) -> None:
    """By hand: window 6, sink 1, the third chunk of three wraps after place 5."""
    BlockTable(pool, SinkWindow(0, 2)).chunk(1)  # so that the lane below does not start at 0
    table = BlockTable(pool, SinkWindow(1, 6))
    roll(table, 3)
    meta = table.chunk(3).meta
    assert meta.ordinals == (0, 11, 7, 8, 9, 10)
    assert meta.pending == range(9, 12)
    assert meta.runs == ((2, 6),)
    assert meta.writes == ((6, 2), (3, 1))
    assert (meta.q_len, meta.kv_len) == (9, 18)


def test_materialize(pool: BlockPool) -> None:
    """A chunk sees all of its view: the mask is all True, queries by keys."""
    meta = BlockTable(pool, SinkWindow(1, 6)).chunk(2).meta
    assert meta.materialize().shape == (6, 6)
    assert meta.materialize().all()
