"""`kv=`: worlds whose past is stored in fewer bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from worlds import tiny_world

from streamgen import WorldPipeline
from streamgen.cache.codec import CODECS
from streamgen.engine import Engine, WorldConfig
from streamgen.errors import InvalidRequest
from streamgen.weights import registry

CHUNKS = 6
# Relative L2 error of K and V with outlier channels (tests/cache/test_codec.py).
ERRORS = {"fp8": 0.0265, "fp8_e5m2": 0.053, "int8": 0.0165, "nvfp4": 0.093}


@pytest.fixture(scope="module")
def pocket() -> WorldPipeline:
    """The packaged world in float32, its first chunk made in as few steps as the others."""
    if "pocket-world" not in registry.packaged_names():
        pytest.skip("no packaged world")
    world = WorldPipeline.from_pretrained("pocket-world", device="cpu", dtype="float32")
    config = replace(world.config, first_schedule=world.config.schedule)
    return recoded(world, "raw", config)


def recoded(world: WorldPipeline, kv: str, config: WorldConfig | None = None) -> WorldPipeline:
    """The same weights with another pool."""
    e = world.engine
    return WorldPipeline(Engine(e.dit, e.text, e.codec, config or e.config, 2, 16, kv))


def walk(world: WorldPipeline, chunks: int = CHUNKS) -> np.ndarray:
    """Frames of a short walk, as numbers that can be subtracted."""
    frames = []
    with world.session("a brick maze at night", seed=3, history_seconds=0) as session:
        for index in range(chunks):
            session.act(keys={"wasdqe"[index % 6]})
            frames.append(session.step().frames)
    return np.concatenate(frames).astype(int)


@pytest.fixture(scope="module")
def raw_walk(pocket: WorldPipeline) -> np.ndarray:
    return walk(pocket)


@pytest.mark.parametrize("kv", list(ERRORS))
def test_a_walk(pocket: WorldPipeline, raw_walk: np.ndarray, kv: str) -> None:
    """Six chunks are near those of a raw pool, the first one the same, and the same every time.

    The bound: attention averages values that are off by the codec's relative error at most, and
    what it adds goes into a residual stream that is not coded. So a picture should be off by no
    more than that share of its own contrast (its standard deviation).
    """
    world = recoded(pocket, kv)
    frames = walk(world)
    assert frames.shape == raw_walk.shape
    assert (frames[:2] == raw_walk[:2]).all(), (
        "the first chunk sees only itself, which is not coded"
    )
    assert (frames[2:] != raw_walk[2:]).any()
    error = np.abs(frames[2:] - raw_walk[2:]).mean(axis=(1, 2, 3))
    assert (error < ERRORS[kv] * raw_walk.std()).all()
    assert (walk(world, 4) == frames[:8]).all()


@pytest.mark.parametrize("kv", list(ERRORS))
def test_bytes_of_the_pool(pocket: WorldPipeline, kv: str) -> None:
    """As many as the formats say, scales included, for 6 layers, 4 heads of 64, 32 tokens."""
    pool, raw = recoded(pocket, kv).engine.pool, recoded(pocket, "raw").engine.pool
    values = 32 * 64
    by_hand = {
        "fp8": 2 * (values + 4),
        "fp8_e5m2": 2 * (values + 4),
        "int8": 2 * values + 64 * 4 + 32 * 4,
        "nvfp4": 2 * (values * 9 // 16 + 4),
    }
    assert pool.spec.block_bytes == 6 * 4 * by_hand[kv]
    stats = pool.stats()
    assert stats.bytes == stats.total * pool.spec.block_bytes
    assert stats.bytes == sum(tensor.nbytes for tensor in pool._storage)
    assert stats.total == raw.stats().total and stats.bytes < 0.28 * raw.stats().bytes


@pytest.mark.parametrize("positions", ["absolute", "sliding_sink"])
@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_time_travel(kv: str, positions: str) -> None:
    """Rewind and fork replay bitwise, through a prompt switch that recomputes the window."""
    world = recoded(tiny_world(positions=positions), kv)
    with world.session("a brick maze at night", seed=1) as session:
        for _ in range(4):
            session.step()
        mark, twin = session.mark(), session.fork()
        runs = []
        for who in (session, twin, session):
            if who is session:
                session.rewind(mark)
            who.prompt("heavy snow", recache="window_causal")
            runs.append(np.concatenate([who.step().frames for _ in range(3)]))
        assert (runs[0] == runs[1]).all() and (runs[0] == runs[2]).all()
        twin.close()
        mark.release()
    assert world.engine.pool.stats().live == 0
    world.engine.pool.check()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds") / "tiny"
    tiny_world().save_pretrained(folder, dtype=torch.float32)
    registry.write_manifest(
        folder, name="tiny", kind="world", version="1", licence="Apache-2.0", card="config.json"
    )
    return folder


def test_loading(saved: Path) -> None:
    """`kv=` reaches the pool, "fp8" is e4m3, and the default stores what was computed."""
    for kv, codec in {"fp8": "fp8_e4m3", "int8": "int8", "raw": "raw"}.items():
        world = WorldPipeline.from_pretrained(saved, device="cpu", dtype="bfloat16", kv=kv)
        assert (world.engine.pool.spec.codec, world.engine.pool.spec.dtype) == (
            codec,
            torch.bfloat16,
        )
    assert WorldPipeline.from_pretrained(saved, device="cpu").engine.pool.spec.codec == "raw"


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ("fp7", f"'fp7': accepted are raw, fp8, {', '.join(CODECS[1:])}$"),
        ("", "'': accepted are raw"),
        ("nvfp4", "head_dim=24: the nvfp4 codec takes multiples of 16"),
    ],
)
def test_what_is_refused(saved: Path, kv: str, message: str) -> None:
    """Unknown names, and heads that don't fit, in one line."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        WorldPipeline.from_pretrained(saved, device="cpu", kv=kv)
    assert "\n" not in str(caught.value)
