"""How fast a world is, where its time goes, and what its cache is worth: `streamgen bench world`.

(a) speed    frames a second of a session, and milliseconds a chunk by stage
(b) caches   the same model and frames with three caches as other projects write them (`peers`)
(c) length   a chunk's cost and the process's memory far into a walk against near its start

All figures of a ratio come from one run, taken in turns chunk by chunk, so that whatever else the
machine does hits both alike. Frames a second and ratios are medians over the repeats; percentiles
are over all chunks of all repeats.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamgen import wire
from streamgen.apps.bench.clock import use_threads
from streamgen.apps.bench.peers import PEERS, Lane, Peer
from streamgen.apps.bench.share import measure_share
from streamgen.apps.bench.steps import (
    SETTLE,
    advance,
    chunks_to_fill,
    load_average,
    press,
    resident_bytes,
    settle,
    turned,
)
from streamgen.apps.bench.table import table
from streamgen.apps.encode import encode_frame
from streamgen.apps.worlds import as_world
from streamgen.device import capabilities, pick_dtype
from streamgen.engine import Engine
from streamgen.errors import InvalidRequest
from streamgen.frames import Chunk
from streamgen.pipelines.world import WorldPipeline
from streamgen.session import Session
from streamgen.weights import registry

STAGES = ("dit", "cache", "decode", "encode", "other")
JPEG_QUALITY = 80
NEAR_FRAME = 100


def run(
    model: str | WorldPipeline = "pocket-world",
    repeats: int = 5,
    chunks: int = 60,
    json_path: str | Path | None = None,
    threads: int | None = None,
    far_frame: int = 10_000,
    quick: bool = False,
) -> dict[str, Any]:
    """Measure, print a table, and return (and write) the report.

    Args:
        model: a name, folder, hub id, or a loaded world. Where "pocket-world" is not packaged, a
            world of the same shape with random weights stands in for it.
        repeats: how often everything is measured; the median counts.
        chunks: chunks of each measured thing in a repeat.
        json_path: where to write the report.
        threads: CPU threads; None = torch's own choice.
        far_frame: the frame to compare with frame 100.
        quick: as little as there can be, to see that it runs; its figures mean nothing.

    Raises:
        InvalidRequest: no repeats or chunks, or a far frame that is not far.
        UnknownModel, WeightsError: from loading.
    """
    near_frame = NEAR_FRAME
    if quick:
        repeats, chunks, near_frame, far_frame = 2, 2, 12, 24
    if min(repeats, chunks) < 1 or far_frame <= near_frame:
        raise InvalidRequest(
            f"repeats={repeats}, chunks={chunks}, far_frame={far_frame}: accepted are at least 1, "
            f"1 and {near_frame + 1}"
        )
    with use_threads(threads):
        world = load(model)
        report: dict[str, Any] = {"about": _about(world, repeats, chunks)}
        _say("speed")
        report["speed"] = measure_speed(world, repeats, chunks)
        report["share"] = measure_share(world, repeats)
        _say("caches")
        report["caches"] = measure_caches(world, repeats, chunks)
        _say(f"length: walking to frame {far_frame:,}")
        report["length"] = measure_length(world, repeats, chunks, near_frame, far_frame)
        report["about"]["load_after"] = load_average()
    if json_path is not None:
        Path(json_path).write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return report


def load(model: str | WorldPipeline) -> WorldPipeline:
    """The world of that name, or a stand-in for a pocket world that is not packaged."""
    if model == "pocket-world" and model not in registry.packaged_names():
        return stand_in()
    world: WorldPipeline = as_world(model)
    return world


def stand_in() -> WorldPipeline:
    """A world of the pocket world's shape whose weights are random."""
    from streamgen.apps.pocket.autoencoder import LATENT_CHANNELS, build_vae
    from streamgen.apps.pocket.export import WORLD
    from streamgen.apps.pocket.train import PocketWorld
    from streamgen.models.vae import FrameCodec

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts, vae = PocketWorld(), build_vae()
    kind = pick_dtype()
    parts.eval().requires_grad_(False).to(kind)
    codec = FrameCodec(vae, [0.0] * LATENT_CHANNELS, [1.0] * LATENT_CHANNELS)
    codec.vae.to(kind)
    engine = Engine(parts.dit, parts.text, codec, WORLD, max_sessions=4, history_frames=640)
    return WorldPipeline(engine, "pocket-world with random weights")


# (a) Speed


def measure_speed(world: WorldPipeline, repeats: int, chunks: int) -> dict[str, Any]:
    """Frames a second and milliseconds by stage of one session with its history."""
    rows: list[dict[str, float]] = []
    rates = []
    with world.session(seed=1) as session:
        settle(session)
        for _ in range(repeats):
            made = [_timed_chunk(session) for _ in range(chunks)]
            seconds = sum(row["total"] for row in made) / 1000
            rates.append(chunks * world.config.chunk_frames / seconds)
            rows += made
    stages = {stage: _percentiles([row[stage] for row in rows]) for stage in (*STAGES, "total")}
    return {
        "frames_per_second": median(rates),
        "frames_per_second_of_repeats": rates,
        "meant_for": world.config.fps,
        "chunk_frames": world.config.chunk_frames,
        "ms": stages,
    }


def _timed_chunk(session: Session) -> dict[str, float]:
    press(session)
    start = perf_counter()
    chunk = session.step()
    made = perf_counter()
    _encode(chunk)
    end = perf_counter()
    timing, total, encode = chunk.timing, 1000 * (end - start), 1000 * (end - made)
    named = {"dit": timing.dit, "cache": timing.cache, "decode": timing.decode, "encode": encode}
    return {**named, "other": total - sum(named.values()), "total": total}


def _encode(chunk: Chunk) -> None:
    for frame in chunk.frames:
        encode_frame(frame, wire.Codec.JPEG, JPEG_QUALITY)


# (b) Caches


class Walker:
    """A walk over any cache: what a session does for a chunk, without keys or a history."""

    def __init__(self, engine: Engine, cache: Lane | Peer, prompt: str, seed: int = 0) -> None:
        self.engine, self.cache, self.frame = engine, cache, 0
        self._prompt = engine.prompt(prompt)
        self._generator = torch.Generator().manual_seed(seed)
        self.latents = torch.empty(0)

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.engine.device)

    @torch.inference_mode()
    def step(self) -> tuple[float, float]:
        """Make a chunk; milliseconds of all of it and of its cache."""
        engine, config, cache = self.engine, self.engine.config, self.cache
        history: Any = cache
        actions = config.action(frozenset())[None].expand(config.chunk_frames, -1)
        schedule = config.schedule if self.frame else config.first_schedule
        before, start = cache.seconds, perf_counter()
        cache.begin(config.chunk_frames)
        latents = engine.denoise(history, self._prompt, actions, self._draw, schedule)
        engine.store(latents, history, self._prompt, actions)
        cache.commit()
        engine.codec.decode(latents)[0].cpu()
        end = perf_counter()
        self.latents, self.frame = latents, self.frame + config.chunk_frames
        return 1000 * (end - start), 1000 * (cache.seconds - before)


def absolute(world: WorldPipeline) -> Engine:
    """An engine with the same weights and absolute positions, which is what the peers have."""
    old = world.engine
    config = replace(old.config, positions="absolute")
    return Engine(old.dit, old.text, old.codec, config, max_sessions=1)


def measure_caches(world: WorldPipeline, repeats: int, chunks: int) -> dict[str, Any]:
    """Milliseconds of a chunk and of its cache, for every cache, and their ratios to ours."""
    engine = absolute(world)
    prompt = world.config.suggestions[0] if world.config.suggestions else ""
    walkers = {name: Walker(engine, kind(engine), prompt) for name, kind in PEERS.items()}
    names = list(walkers)
    for _ in range(chunks_to_fill(engine.config)):
        for walker in walkers.values():
            walker.step()
    medians: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(repeats):
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for index in range(chunks):
            for name in turned(names, index):
                times[name].append(walkers[name].step())
        for name, pairs in times.items():
            chunk, cache = zip(*pairs, strict=True)
            medians[name].append((median(chunk), median(cache)))
    for walker in walkers.values():
        walker.cache.close()
    ours = medians[names[0]]
    return {
        name: {
            "chunk_ms": median(chunk for chunk, _ in pairs),
            "cache_ms": median(cache for _, cache in pairs),
            "chunk_ratio": median(a[0] / b[0] for a, b in zip(pairs, ours, strict=True)),
            "cache_ratio": median(a[1] / b[1] for a, b in zip(pairs, ours, strict=True)),
        }
        for name, pairs in medians.items()
    }


# (c) Length


def measure_length(
    world: WorldPipeline, repeats: int, chunks: int, near_frame: int, far_frame: int
) -> dict[str, Any]:
    """Milliseconds of a chunk near two frames, and the process's memory there.

    Both walks remember half of `near_frame`, so that their histories are full when memory is first
    read. The far one gets there by real chunks that are denoised in one step (see `advance`).
    """
    old, remembered = world.engine, near_frame // 2
    engine = Engine(old.dit, old.text, old.codec, old.config, 2, 3 * remembered)
    seconds = remembered / old.config.fps
    with (
        WorldPipeline(engine).session(seed=1, history_seconds=seconds) as near,
        WorldPipeline(engine).session(seed=2, history_seconds=seconds) as far,
    ):
        for session in (near, far):
            advance(session, near_frame)
            settle(session, SETTLE)
        memory = [resident_bytes()]
        advance(far, far_frame)
        settle(far, SETTLE)
        memory.append(resident_bytes())
        at = (near.frame, far.frame)
        pairs = [_medians_in_turns(near, far, chunks) for _ in range(repeats)]
    return {
        "near_frame": at[0],
        "far_frame": at[1],
        "near_ms": median(a for a, _ in pairs),
        "far_ms": median(b for _, b in pairs),
        "ratio": median(b / a for a, b in pairs),
        "near_memory_bytes": memory[0],
        "far_memory_bytes": memory[1],
        "memory_ratio": memory[1] / memory[0] if memory[0] and memory[1] else None,
    }


def _medians_in_turns(near: Session, far: Session, chunks: int) -> tuple[float, float]:
    times: dict[Session, list[float]] = {near: [], far: []}
    for index in range(chunks):
        for session in turned([near, far], index):
            press(session)
            times[session].append(session.step().timing.total)
    return median(times[near]), median(times[far])


def _about(world: WorldPipeline, repeats: int, chunks: int) -> dict[str, Any]:
    engine, config = world.engine, world.config
    return {
        "model": world.name,
        "parameters": sum(p.numel() for p in engine.dit.parameters()),
        "dtype": str(engine.dit.dtype).removeprefix("torch."),
        "width": config.width,
        "height": config.height,
        "tokens": engine.pool.spec.block_tokens,
        "sink": config.sink,
        "window": config.window,
        "steps": len(config.schedule.steps),
        "machine": capabilities().to_json(),
        "load_before": load_average(),
        "repeats": repeats,
        "chunks": chunks,
    }


# Helpers


def _percentiles(values: list[float]) -> dict[str, float]:
    found = np.percentile(values, (50, 95, 99))
    return {name: float(x) for name, x in zip(("p50", "p95", "p99"), found, strict=True)}


def _say(what: str) -> None:
    print(f"bench: {what} ...", file=sys.stderr, flush=True)
