"""What attention is told."""

from __future__ import annotations

import torch

from streamgen.cache import Append, BlockPool, BlockTable, SinkWindow
from streamgen.cache.meta import merge_runs
from streamgen.cache.policy import RollingBuffer


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


def test_a_causal_chunk_by_hand(pool: BlockPool, roll) -> None:
    """Three frames of three tokens, each sees the last two frames: frames 3 to 5 in a ring of 4."""
    table = BlockTable(pool, RollingBuffer(2, piece=3))
    roll(table, 1)
    meta = table.chunk(3).meta
    assert (meta.mask, meta.span, meta.ordinals) == ("causal", 2, (4, 5, 2, 3))
    by_frame = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 0]], dtype=torch.bool)
    assert torch.equal(meta.materialize(), by_frame.repeat_interleave(3, 0).repeat_interleave(3, 1))


def test_no_mask_where_nothing_is_hidden(pool: BlockPool, roll) -> None:
    """One frame at a time that sees all of its view needs none; a smaller span than view does."""
    table = BlockTable(pool, RollingBuffer(2))
    roll(table, 4, n=1)
    assert table.chunk(1).meta.mask == "none"
    table = BlockTable(pool, RollingBuffer(2, piece=2))
    roll(table, 4, n=1)
    meta = table.chunk(1).meta
    assert (meta.mask, meta.ordinals) == ("causal", (3, 4, 2))
    assert meta.materialize()[0].tolist() == [True] * 6 + [False] * 3


def test_append_may_be_causal(pool: BlockPool, roll) -> None:
    """Frames of a chunk then see those before them in the chunk, and all of the past."""
    table = BlockTable(pool, Append(8, causal=True))
    roll(table, 1, n=2)
    seen = table.chunk(2).meta.materialize()[::3, ::3]
    assert seen.tolist() == [[True, True, True, False], [True, True, True, True]]
