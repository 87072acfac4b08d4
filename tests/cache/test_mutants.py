"""The code broken on purpose, ten ways: the state machine must notice each.

1. retain: a fork forgets to count itself as a holder
2. copy_on_write: a table takes a shared block into its lane instead of copying it
3. reopen: frames that others hold are rewritten in place
4. close: a closed table forgets to release its blocks
5. values: a block that moves takes its keys along but not its values
6. window: a chunk sees one frame too few
7. sink: the sink leaves with the window
8. shadow: the values of a shadowed sink are not brought into the lane
9. evacuate: new frames are put over blocks that others still hold
10. undo: an aborted chunk with undo does not bring back what it had pushed out
"""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis.stateful import run_state_machine_as_test
from pytest import MonkeyPatch
from torch import Tensor

from streamgen.cache import Block, BlockPool, BlockTable, Chunk, SinkWindow


def retain(patch: MonkeyPatch) -> None:
    """A fork forgets to count itself as a holder."""

    def fork(self: BlockTable) -> BlockTable:
        twin = BlockTable(self.pool, self.policy)
        twin._blocks, twin.end = dict(self._blocks), self.end
        return twin

    patch.setattr(BlockTable, "fork", fork)


def copy_on_write(patch: MonkeyPatch) -> None:
    """A table takes a shared block into its lane instead of copying it."""

    def settle(self: BlockTable, keep: dict[int, Block]) -> None:
        for ordinal, block in keep.items():
            home = self._home(ordinal)
            if ordinal >= self.policy.shadow and block.slot != home:
                self.pool.move(block, home)

    patch.setattr(BlockTable, "_settle", settle)


def reopen(patch: MonkeyPatch) -> None:
    """Frames that others hold are rewritten in place."""
    begin, write = BlockTable.reopen, Chunk.write

    def reopen_in_place(self: BlockTable, n: int, undo: bool = False) -> Chunk:
        old = self._blocks
        chunk = begin(self, n, undo)
        chunk.old = [old[ordinal] for ordinal in chunk.frames]  # type: ignore[attr-defined]
        return chunk

    def write_both(self: Chunk, layer: int, k: Tensor, v: Tensor) -> None:
        write(self, layer, k, v)
        size = self._pool.spec.block_tokens
        for index, block in enumerate(getattr(self, "old", ())):
            if block.ref > 0:
                self._pool.rows(layer, block.slot, 1)[0].copy_(k[index * size : (index + 1) * size])

    patch.setattr(BlockTable, "reopen", reopen_in_place)
    patch.setattr(Chunk, "write", write_both)


def close(patch: MonkeyPatch) -> None:
    """A closed table forgets to release its blocks."""

    def close(self: BlockTable) -> None:
        if self._pending:
            self._pending.abort()
        if self.lane:
            self.pool.dissolve(self.lane)
        self._blocks, self.lane = {}, None

    patch.setattr(BlockTable, "close", close)


def values(patch: MonkeyPatch) -> None:
    """A block that moves takes its keys along but not its values."""

    def carry(self: BlockPool, source: int, target: int) -> None:
        for tensor in self.k:
            tensor[target].copy_(tensor[source])

    patch.setattr(BlockPool, "_carry", carry)


def window(patch: MonkeyPatch) -> None:
    """A chunk sees one frame too few."""

    def visible(self: SinkWindow, end: int) -> tuple[int, ...]:
        first = max(self.sink, end - (self.window - self.sink) + 1)
        return (*range(min(self.sink, end)), *range(first, end))

    patch.setattr(SinkWindow, "visible", visible)


def sink(patch: MonkeyPatch) -> None:
    """The sink leaves with the window."""
    patch.setattr(SinkWindow, "visible", lambda self, end: range(max(0, end - self.window), end))
    patch.setattr(SinkWindow, "place", lambda self, ordinal: ordinal % self.window)


def shadow(patch: MonkeyPatch) -> None:
    """The values of a shadowed sink are not brought into the lane."""
    patch.setattr(BlockTable, "_cast_shadows", lambda self, keep, rewritten: None)


def evacuate(patch: MonkeyPatch) -> None:
    """New frames are put over blocks that others still hold."""

    def put(self: BlockPool, slot: int) -> Block:
        self._blocks[slot] = None
        return self._occupy(Block(slot), slot)

    patch.setattr(BlockTable, "_strangers", lambda self, visible, keep, dying: [])
    patch.setattr(BlockPool, "put", put)


def undo(patch: MonkeyPatch) -> None:
    """An aborted chunk with undo does not bring back what it had pushed out."""

    def abort(self: BlockTable, chunk: Chunk) -> None:
        self._release(chunk.blocks[ordinal] for ordinal in chunk.frames)
        if self._before:
            self._release(self._before[0].values())
            self.end = self._before[1]
        self._pending = self._before = None

    patch.setattr(BlockTable, "_abort", abort)


MUTANTS = (retain, copy_on_write, reopen, close, values, window, sink, shadow, evacuate, undo)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_noticed(machine: ModuleType, monkeypatch: MonkeyPatch, mutant) -> None:
    """With this fault in the code, an assertion fails or a frame can't be found."""
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine.CacheMachine, settings=machine.HUNT)
