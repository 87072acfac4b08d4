"""A tiny geometry, a way to roll a table along, and the state machine that two files share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from streamgen.cache import BlockPool, BlockTable, Chunk, KVSpec

SPEC = KVSpec(num_layers=2, kv_heads=2, head_dim=4, block_tokens=3)


@pytest.fixture
def spec() -> KVSpec:
    """2 layers, 2 heads of 4 channels, 3 tokens a block."""
    return SPEC


@pytest.fixture
def pool() -> BlockPool:
    """A pool of 24 blocks."""
    return BlockPool(SPEC, 24)


@pytest.fixture
def write() -> Callable[[Chunk, float], None]:
    """`write(chunk, x)`: frame f of layer l gets keys x + f + l/10 and values -(x + f + l/10)."""
    return write_chunk


@pytest.fixture
def roll() -> Callable[..., None]:
    """`roll(table, chunks, n=3)`: begin, write and commit `chunks` chunks of `n` frames."""

    def roll(table: BlockTable, chunks: int, n: int = 3) -> None:
        for _ in range(chunks):
            with table.chunk(n) as chunk:
                write_chunk(chunk, 0.0)
                chunk.commit()

    return roll


def write_chunk(chunk: Chunk, x: float = 0.0) -> None:
    """See the fixture `write`; a shadowed sink gets raw keys 1000 higher than those in the lane."""
    frames = torch.tensor(chunk.frames, dtype=torch.float32) + x
    shadow = chunk.sinks * SPEC.block_tokens
    for layer in range(SPEC.num_layers):
        k = (frames + layer / 10).repeat_interleave(SPEC.block_tokens)[:, None, None]
        k = k.expand(-1, SPEC.kv_heads, SPEC.head_dim)
        chunk.write(layer, k, -k)
        if shadow:
            chunk.write_sink(layer, k[:shadow] + 1000, -k[:shadow])


@pytest.fixture(scope="session")
def machine() -> ModuleType:
    """The module `machine.py` beside this file; tests are no package, so it can't be imported."""
    path = Path(__file__).with_name("machine.py")
    spec = importlib.util.spec_from_file_location("cache_machine", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
