"""The state machine of machine.py on coded pools, against a naive list of decode(encode(x)).

Its rules and invariants are used as they are. What differs is here: the naive cache keeps what a
codec makes of a frame, once, and a chunk reads buffers in place of the pool.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from pytest import MonkeyPatch
from torch import Tensor

from streamgen.cache import Block, BlockPool, BlockTable, KVSpec
from streamgen.cache.chunk import CodedChunk
from streamgen.cache.codec import make_codecs

DIM = 16


def coded(machine: ModuleType, patch: MonkeyPatch, codec: str) -> Any:
    """The class of the machine for one codec."""
    old = machine.SPEC
    spec = KVSpec(old.num_layers, old.kv_heads, DIM, old.block_tokens, torch.float32, codec)
    patch.setattr(machine, "SPEC", spec)
    codecs = make_codecs(codec, torch.float32)

    def through(side: int, x: Tensor, parts: list[Tensor] | None = None) -> Tensor:
        """Blocks `[layers, T, H, D]` encoded and decoded; or only decoded, from `parts`."""
        work, out = torch.zeros(x.shape, dtype=torch.int32), torch.zeros(x.shape)
        if parts is None:
            parts = [torch.zeros((len(x), *p.shape), dtype=p.dtype) for p in spec.layout[side]]
            codecs[side].encode(x.clone(), parts, work)
        codecs[side].decode(parts, out, work)
        return out

    class CodedMachine(machine.CacheMachine):  # type: ignore[misc, name-defined]
        def fresh(self) -> tuple[Tensor, Tensor]:
            self.stamp += 1
            generator = torch.Generator().manual_seed(int(self.stamp))
            shape = (2, spec.num_layers, spec.block_tokens, spec.kv_heads, DIM)
            k, v = torch.randn(shape, generator=generator)
            return k, v

        def end(self, stream: Any, commit: bool) -> None:
            before = len(stream.naive.frames)
            super().end(stream, commit)
            if commit:
                rounded = [(through(0, k), through(1, v)) for k, v in stream.naive.frames[before:]]
                stream.naive.frames[before:] = rounded

        def stored(self, slot: int) -> tuple[Tensor, Tensor]:
            k, v = (
                through(
                    side,
                    torch.empty(spec.num_layers, spec.block_tokens, spec.kv_heads, DIM),
                    [torch.stack(x) for x in zip(*self.parts_of(side, slot), strict=True)],
                )
                for side in (0, 1)
            )
            return k, v

        def parts_of(self, side: int, slot: int) -> list[list[Tensor]]:
            return [[part[slot] for part in layer[side]] for layer in self.pool.parts]

        def bytes_of(self, slot: int) -> bytes:
            tensors = [x[slot].flatten().view(torch.uint8) for x in self.pool._storage]
            return torch.cat(tensors).numpy().tobytes()

        def trace(self) -> tuple[object, ...]:
            tables = [(x.table.entries, x.table.end, x.table.lane) for x in self.streams]
            slots = range(len(self.pool.k[0]))
            held = [(b, b.ref) if (b := self.pool.at(slot)) else None for slot in slots]
            lent = len(self.pool._stagings) - len(self.pool._idle)
            return tables, held, [self.bytes_of(slot) for slot in slots], lent

        @machine.invariant()  # type: ignore[untyped-decorator]
        def sealed_bytes_never_change(self) -> None:
            live = [b for slot in range(len(self.pool.k[0])) if (b := self.pool.at(slot))]
            now = {block: self.bytes_of(block.slot) for block in live if block.sealed}
            for block, seal in now.items():
                assert self.seals.get(block, seal) == seal, f"{block} has changed"
            self.seals = now

        @machine.invariant()  # type: ignore[untyped-decorator]
        def chunks_see_the_naive_window(self) -> None:
            """Each frame is a block that lies in its place of the lane; `kv` shows it decoded."""
            for stream in self.busy():
                chunk, naive, work = stream.work.chunk, stream.naive, stream.work
                end = len(naive.frames) + len(chunk.frames)
                assert sorted(chunk.meta.ordinals) == naive.visible(end)
                views = [[x.clone() for x in chunk.kv(i)] for i in range(spec.num_layers)]
                assert views[0][0].shape == (chunk.meta.kv_len, spec.kv_heads, DIM)
                seen = [torch.stack(side) for side in zip(*views, strict=True)]
                for index, ordinal in enumerate(chunk.meta.ordinals):
                    cut = slice(index * spec.block_tokens, (index + 1) * spec.block_tokens)
                    if ordinal >= naive.policy.shadow:
                        assert chunk.blocks[ordinal].slot == stream.table.lane.base + index
                    self.compare(work, naive, ordinal, (seen[0][:, cut], seen[1][:, cut]))

        @machine.invariant()  # type: ignore[untyped-decorator]
        def buffers_are_lent_to_pending_chunks(self) -> None:
            lent = [stream.work.chunk._staging for stream in self.busy()]
            assert len({id(x) for x in (*lent, *self.pool._idle)}) == len(self.pool._stagings)

    return CodedMachine


@pytest.mark.parametrize("codec", ["fp8_e4m3", "int8", "nvfp4"])
def test_random_use(machine: ModuleType, monkeypatch: MonkeyPatch, codec: str) -> None:
    """Whatever tables do, what is seen equals the frames encoded once, bitwise; nothing leaks."""
    few = settings(machine.MODERATE, max_examples=8, stateful_step_count=20)
    profile = few if machine.PROFILE is machine.MODERATE else machine.NIGHTLY
    run_state_machine_as_test(coded(machine, monkeypatch, codec), settings=profile)


# Broken on purpose


def scales(patch: MonkeyPatch) -> None:
    """A block that moves leaves its scales behind."""

    def carry(self: BlockPool, source: int, target: int) -> None:
        for tensor in (*self.k, *self.v):
            tensor[target].copy_(tensor[source])

    patch.setattr(BlockPool, "_carry", carry)


def shadow(patch: MonkeyPatch) -> None:
    """The values of a shadowed sink come into the lane without their scales."""
    cast = BlockTable._cast_shadows

    def cast_codes(self: BlockTable, keep: dict[int, Block], rewritten: list[int]) -> None:
        whole, self.pool.values = self.pool.values, self.pool.v
        cast(self, keep, rewritten)
        self.pool.values = whole

    patch.setattr(BlockTable, "_cast_shadows", cast_codes)


def stale(patch: MonkeyPatch) -> None:
    """The buffers' layer is not noted, so one layer's past is shown for another."""
    kv = CodedChunk.kv

    def first(self: CodedChunk, layer: int) -> tuple[Tensor, Tensor]:
        if self._decoded is not None:
            self._decoded = layer
        return kv(self, layer)

    patch.setattr(CodedChunk, "kv", first)


def twice(patch: MonkeyPatch) -> None:
    """A chunk encodes its past anew at commit."""
    seal = CodedChunk._seal

    def seal_all(self: CodedChunk) -> None:
        seal(self)
        for layer in range(self.num_layers):
            k, v = self.kv(layer)
            for place, count in self._past:
                rows = slice(place * self._pool.spec.block_tokens, None)
                size = count * self._pool.spec.block_tokens
                slot = self._lane.base + place
                past = (k[rows][:size] * 1.5, v[rows][:size])
                self._pool.encode(layer, slot, *past, self._staging)

    patch.setattr(CodedChunk, "_seal", seal_all)


def kept(patch: MonkeyPatch) -> None:
    """A table lends buffers that another pending chunk still uses."""
    patch.setattr(BlockPool, "take_back", lambda self, staging: None)
    lend = BlockPool.lend

    def lend_again(self: BlockPool, *sizes: int) -> object:
        self._idle = self._stagings[:1]
        return lend(self, *sizes)

    patch.setattr(BlockPool, "lend", lend_again)


@pytest.mark.parametrize("mutant", [scales, shadow, stale, twice, kept], ids=lambda f: f.__name__)
def test_mutant_is_noticed(machine: ModuleType, monkeypatch: MonkeyPatch, mutant: Any) -> None:
    """With this fault in the code, an assertion fails."""
    mutant(monkeypatch)
    few = settings(machine.HUNT, max_examples=40, stateful_step_count=20)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(coded(machine, monkeypatch, "int8"), settings=few)
