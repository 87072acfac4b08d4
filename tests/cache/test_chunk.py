"""Pending frames: what may be written when, and what it costs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamgen.cache import BlockPool, BlockTable, KVSpec, SinkWindow
from streamgen.errors import InvalidRequest


class Ledger(TorchDispatchMode):
    """Counts what torch does: every operator, and storages that are not the pool's."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in (*pool.k, *pool.v)}
        self.ops: list[str] = []
        self.copied = 0
        self.new_storages = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.ops.append(name)
        if name == "copy_":
            self.copied += out.nbytes
        elif name not in ("slice", "select"):  # these are views
            self.new_storages += 1
        elif args[0].untyped_storage().data_ptr() in self.known:
            assert out.untyped_storage().data_ptr() in self.known
        return out


@pytest.fixture
def table(pool: BlockPool) -> BlockTable:
    """Window 6 with a sink of 1."""
    return BlockTable(pool, SinkWindow(1, 6))


def ones(spec: KVSpec, frames: int) -> torch.Tensor:
    return torch.ones(frames * spec.block_tokens, spec.kv_heads, spec.head_dim, dtype=spec.dtype)


def test_every_step_overwrites(table: BlockTable, write) -> None:
    """The last write counts; attention reads each as soon as it is written."""
    with table.chunk(3) as chunk:
        for x in (10.0, 20.0, 30.0):
            write(chunk, x)
            k, v = chunk.kv(1)
            assert k[::3, 0, 0].tolist() == pytest.approx([x + 0.1, x + 1.1, x + 2.1])
            assert torch.equal(v, -k)
        chunk.commit()
    assert table.pool.k[0][:3, 0, 0, 0].tolist() == [30, 31, 32]


def test_frames_wrap_in_the_ring(table: BlockTable, roll, write) -> None:
    """A chunk whose slots are no neighbours is split; each frame lands in its place."""
    roll(table, 3)
    chunk = table.chunk(3)
    write(chunk, 0.0)
    assert chunk.meta.ordinals == (0, 11, 7, 8, 9, 10)
    assert chunk.kv(0)[0][::3, 0, 0].tolist() == [0, 11, 7, 8, 9, 10]
    assert chunk.kv(0)[1][::3, 0, 0].tolist() == [0, -11, -7, -8, -9, -10]


@pytest.mark.parametrize("window", [SinkWindow(1, 6), SinkWindow(2, 7), SinkWindow(0, 4)])
def test_one_view_with_one_address(pool: BlockPool, write, roll, window: SinkWindow) -> None:
    """Once the window is full, every chunk reads the same address and shape, in every layer."""
    pool.reserve(3)
    table = BlockTable(pool, window)
    roll(table, 3)
    seen = set()
    for _ in range(8):
        with table.chunk(3) as chunk:
            write(chunk, 0.0)
            views = [x for layer in range(2) for x in chunk.kv(layer)]
            assert all(x.is_contiguous() and x.shape[0] == window.window * 3 for x in views)
            seen.add(tuple(x.data_ptr() for x in views))
            chunk.commit()
    assert len(seen) == 1


@pytest.mark.parametrize("shadow", [False, True])
def test_steady_state_costs_nothing(pool: BlockPool, spec: KVSpec, roll, shadow: bool) -> None:
    """Begin and commit call no operator of torch; a step copies its own K and V, nothing else."""
    table = BlockTable(pool, SinkWindow(1, 6, shadow_sink=shadow))
    roll(table, 3)
    k, v = ones(spec, 3), ones(spec, 3)
    table.chunk(3).abort()  # the values of a shadowed sink have come into the lane by now
    with Ledger(pool) as ledger:
        for _ in range(6):
            with table.chunk(3) as chunk:
                assert not ledger.ops, "beginning a chunk moved something"
                for _ in range(4):
                    for layer in range(spec.num_layers):
                        chunk.write(layer, k, v)
                        chunk.kv(layer)
                assert ledger.copied == 4 * 3 * spec.block_bytes
                assert ledger.new_storages == 0
                ledger.ops.clear()
                ledger.copied = 0
                chunk.commit()
            assert not ledger.ops, "committing a chunk moved something"


def test_undo_costs_as_many_moves_as_frames(pool: BlockPool, spec: KVSpec, roll) -> None:
    """What `undo=True` says it costs."""
    table = BlockTable(pool, SinkWindow(1, 6))
    roll(table, 3)
    with Ledger(pool) as ledger:
        table.chunk(2, undo=True)
    assert ledger.copied == 2 * spec.block_bytes


@pytest.mark.parametrize("bad", ["shape", "dtype", "v"])
def test_wrong_tensors_are_refused(table: BlockTable, spec: KVSpec, bad: str) -> None:
    """The message says both shapes, and nothing was written."""
    chunk = table.chunk(2)
    k = v = ones(spec, 2)
    if bad == "shape":
        k = ones(spec, 3)
    elif bad == "dtype":
        k = k.double()
    else:
        v = v[:, :1]
    with pytest.raises(InvalidRequest, match=r"\(\d+, \d, 4\) torch.* take \(6, 2, 4\) torch.flo"):
        chunk.write(0, k, v)
    assert not table.pool.k[0].any() and not table.pool.v[0].any()


def test_commit_wants_every_layer(table: BlockTable, spec: KVSpec) -> None:
    """A block with a layer that was never written is not sealed; the chunk stays open."""
    chunk = table.chunk(2)
    chunk.write(0, ones(spec, 2), ones(spec, 2))
    with pytest.raises(InvalidRequest, match=r"layers \[1\] of frames 0\.\.1"):
        chunk.commit()
    chunk.write(1, ones(spec, 2), ones(spec, 2))
    chunk.commit()
    assert table.end == 2


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_chunk_that_is_over(table: BlockTable, spec: KVSpec, write, end: str) -> None:
    """Neither writes nor reads nor commits any more; aborting it again does nothing."""
    chunk = table.chunk(2)
    write(chunk, 0.0)
    getattr(chunk, end)()
    for call in (
        lambda: chunk.write(0, ones(spec, 2), ones(spec, 2)),
        lambda: chunk.kv(0),
        lambda: chunk.shadow(0),
        chunk.commit,
    ):
        with pytest.raises(InvalidRequest, match=r"frames 0\.\.1 is over"):
            call()
    chunk.abort()
    assert table.end == (2 if end == "commit" else 0)


def test_leaving_the_block_aborts(table: BlockTable, write) -> None:
    """Without commit, or by an error, which passes through."""
    with table.chunk(2) as chunk:
        write(chunk, 0.0)
    with pytest.raises(KeyError), table.chunk(2):
        raise KeyError
    assert (table.end, table.entries, table.pending) == (0, (), None)


def test_gradients_stay_outside(table: BlockTable, spec: KVSpec) -> None:
    """Writing a tensor that needs a gradient does not tie the pool to its graph."""
    chunk = table.chunk(1)
    chunk.write(0, ones(spec, 1).requires_grad_(), ones(spec, 1))
    assert not chunk.kv(0)[0].requires_grad
