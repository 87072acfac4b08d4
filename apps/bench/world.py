"""How fast a world is, where its time goes, and what its cache is worth: `streamgen bench world`.

(a) speed    frames a second of a session, and milliseconds a chunk by stage
(b) caches   the same model and frames with three caches as other projects write them (`peers`)
(c) length   a chunk's cost and the process's memory far into a walk against near its start

All figures of a ratio come from one run, taken in turns chunk by chunk, so that whatever else the
machine does hits both alike. Frames a second and ratios are medians over the repeats; percentiles
are over all chunks of all repeats.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from streamgen import wire
from streamgen.apps.bench.peers import PEERS, Lane, Peer
from streamgen.apps.encode import encode_frame
from streamgen.apps.worlds import as_world
from streamgen.device import capabilities
from streamgen.engine import Engine
from streamgen.errors import InvalidRequest
from streamgen.frames import Chunk
from streamgen.pipelines.world import WorldPipeline
from streamgen.sampling.schedule import FewStep
from streamgen.session import Session
from streamgen.weights import registry

STAGES = ("dit", "cache", "decode", "encode", "other")
JPEG_QUALITY = 80
NEAR_FRAME = 100
HOLD = 4  # chunks for which a key is held
SETTLE = 5  # chunks that are not counted, after a window is full or a thing is new
_HEAVY = re.compile(
    r"::_?((add|b|badd)?mm|addmm_activation|linear|mkl_linear|matmul|mkldnn_linear\w*"
    r"|\w*convolution\w*|conv[123]d|\w*scaled_dot_product\w*|\w*flash_attention\w*)$"
)


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
    if quick:
        repeats, chunks, far_frame = 2, 2, NEAR_FRAME + 20
    if min(repeats, chunks) < 1 or far_frame <= NEAR_FRAME:
        raise InvalidRequest(
            f"repeats={repeats}, chunks={chunks}, far_frame={far_frame}: accepted are at least 1, "
            f"1 and {NEAR_FRAME + 1}"
        )
    with _threads(threads):
        world = load(model)
        report: dict[str, Any] = {"about": _about(world, repeats, chunks)}
        _say("speed")
        report["speed"] = measure_speed(world, repeats, chunks)
        report["share"] = measure_share(world, repeats)
        _say("caches")
        report["caches"] = measure_caches(world, repeats, chunks)
        _say(f"length: walking to frame {far_frame:,}")
        report["length"] = measure_length(world, repeats, chunks, far_frame)
        report["about"]["load_after"] = _load()
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
    parts.eval().requires_grad_(False)
    codec = FrameCodec(vae, [0.0] * LATENT_CHANNELS, [1.0] * LATENT_CHANNELS)
    engine = Engine(parts.dit, parts.text, codec, WORLD, max_sessions=4, history_frames=640)
    return WorldPipeline(engine, "pocket-world with random weights")


# (a) Speed


def measure_speed(world: WorldPipeline, repeats: int, chunks: int) -> dict[str, Any]:
    """Frames a second and milliseconds by stage of one session with its history."""
    rows: list[dict[str, float]] = []
    rates = []
    with world.session(seed=1) as session:
        _settle(session)
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
    _press(session)
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


def measure_share(world: WorldPipeline, repeats: int, chunks: int = 4) -> dict[str, Any] | None:
    """What part of `Session.step` is not matrix multiplication, attention or convolution.

    The time inside each tensor operation comes from torch's profiler, the time of a chunk from
    chunks without it, in turns. The profiler adds a little to every operation, which matters for
    the many small ones: `elementwise` is an upper bound, and `python`, which is what is left, a
    lower one. `python_and_cache` adds all time the session counts as the cache's, so the Python in
    there counts twice. `strict` is everything but matmul, attention and convolution.

    Returns:
        Shares of a chunk, 0..1, medians over the repeats. None on an accelerator, where operations
        run beside Python.
    """
    if world.engine.device.type != "cpu":
        return None
    found: dict[str, list[float]] = {}
    with world.session(seed=1) as session:
        _settle(session)
        for _ in range(repeats):
            wall, cache = _wall(session, chunks)
            heavy, light = _profiled(session, chunks)
            shares = {
                "matmul_attention_convolution": heavy / wall,
                "elementwise": light / wall,
                "python": max(0.0, 1 - (heavy + light) / wall),
                "cache": cache / wall,
            }
            shares["python_and_cache"] = shares["python"] + shares["cache"]
            shares["strict"] = 1 - shares["matmul_attention_convolution"]
            for name, share in shares.items():
                found.setdefault(name, []).append(share)
    return {name: median(values) for name, values in found.items()}


def _wall(session: Session, chunks: int) -> tuple[float, float]:
    """Milliseconds of so many chunks, and those of the cache in them."""
    timings = []
    for _ in range(chunks):
        _press(session)
        timings.append(session.step().timing)
    return sum(t.total for t in timings), sum(t.cache for t in timings)


def _profiled(session: Session, chunks: int) -> tuple[float, float]:
    """Milliseconds inside heavy operations, and inside all others, of so many chunks."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(chunks):
            _press(session)
            session.step()
    heavy = light = 0.0
    for event in profiler.key_averages():
        if "::" in event.key:
            ms = event.self_cpu_time_total / 1000
            heavy, light = (heavy + ms, light) if is_heavy(event.key) else (heavy, light + ms)
    return heavy, light


def is_heavy(operation: str) -> bool:
    """Whether a tensor operation, such as "aten::addmm", is matmul, attention or convolution."""
    return _HEAVY.search(operation) is not None


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
    for _ in range(_chunks_to_fill(world) + SETTLE):
        for walker in walkers.values():
            walker.step()
    medians: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(repeats):
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for index in range(chunks):
            for name in _turned(names, index):
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
    world: WorldPipeline, repeats: int, chunks: int, far_frame: int
) -> dict[str, Any]:
    """Milliseconds of a chunk near frame 100 and near `far_frame`, and the process's memory.

    Both walks remember less than 100 frames, so that their histories are full when memory is first
    read. The far one gets there by real chunks that are denoised in one step (see `advance`).
    """
    remembered = 0.8 * NEAR_FRAME / world.config.fps
    with (
        world.session(seed=1, history_seconds=remembered) as near,
        world.session(seed=2, history_seconds=remembered) as far,
    ):
        for session in (near, far):
            advance(session, NEAR_FRAME)
            _settle(session, SETTLE)
        memory = [resident_bytes()]
        advance(far, far_frame)
        _settle(far, SETTLE)
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


def advance(session: Session, frame: int) -> None:
    """Walk on to `frame` by real chunks, keys, history and all, but with one denoising step each."""
    config = session.config
    once = FewStep(config.schedule.steps[:1], config.schedule.shift, config.schedule.warp)
    session.config = replace(config, schedule=once, first_schedule=once)
    try:
        while session.frame < frame:
            _press(session)
            session.step()
    finally:
        session.config = config


def _medians_in_turns(near: Session, far: Session, chunks: int) -> tuple[float, float]:
    times: dict[Session, list[float]] = {near: [], far: []}
    for index in range(chunks):
        for session in _turned([near, far], index):
            _press(session)
            times[session].append(session.step().timing.total)
    return median(times[near]), median(times[far])


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM; None where the system does not tell (not Linux)."""
    gc.collect()
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


# The report


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    return "\n".join(
        [
            *_about_lines(report["about"]),
            *_speed_lines(report["speed"], report["share"]),
            *_cache_lines(report["caches"]),
            *_length_lines(report["length"]),
        ]
    )


def _about_lines(about: dict[str, Any]) -> Iterator[str]:
    machine = about["machine"]
    yield (
        f"{about['model']}: {about['parameters'] / 1e6:.1f} M parameters, {about['dtype']}, "
        f"{about['width']}x{about['height']}, {about['tokens']} tokens a frame"
    )
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"torch {machine['torch']}; {about['repeats']} x {about['chunks']} chunks"
    )
    if (about["load_before"] or 0) > 0.5:
        yield (
            f"the machine was busy (load {about['load_before']:.1f}): times are upper bounds, "
            "ratios hold"
        )


def _speed_lines(speed: dict[str, Any], share: dict[str, Any] | None) -> Iterator[str]:
    yield ""
    yield (
        f"(a) {speed['frames_per_second']:.1f} frames/s (meant for {speed['meant_for']}); "
        f"milliseconds for a chunk of {speed['chunk_frames']} frames"
    )
    yield f"    {'':24}{'p50':>8}{'p95':>8}{'p99':>8}"
    for stage, ms in speed["ms"].items():
        yield f"    {stage:24}{ms['p50']:8.2f}{ms['p95']:8.2f}{ms['p99']:8.2f}"
    if share:
        yield "    shares of a chunk without encoding"
        for name, text in (
            ("matmul_attention_convolution", "matmul, attention, convolution"),
            ("elementwise", "other tensor operations (at most)"),
            ("python", "Python and dispatch (at least)"),
            ("cache", "cache, by the session's clock"),
            ("python_and_cache", "Python and cache (target: at most 15 %)"),
            ("strict", "all but matmul, attention, convolution"),
        ):
            yield f"    {text:42}{100 * share[name]:6.1f} %"


def _cache_lines(caches: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "(b) the same frames with other caches; ratios to ours"
    yield f"    {'':24}{'chunk ms':>10}{'ratio':>8}{'cache ms':>10}{'ratio':>8}"
    for name, row in caches.items():
        yield (
            f"    {name:24}{row['chunk_ms']:10.2f}{row['chunk_ratio']:8.3f}"
            f"{row['cache_ms']:10.3f}{row['cache_ratio']:8.2f}"
        )


def _length_lines(length: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield (
        f"(c) a chunk at frame {length['near_frame']:,}: {length['near_ms']:.2f} ms, at frame "
        f"{length['far_frame']:,}: {length['far_ms']:.2f} ms, ratio {length['ratio']:.3f} "
        "(target: within 5 %)"
    )
    if length["memory_ratio"] is not None:
        near, far = (length[f"{at}_memory_bytes"] / 2**20 for at in ("near", "far"))
        yield (
            f"    resident memory {near:.1f} and {far:.1f} MiB, ratio "
            f"{length['memory_ratio']:.4f} (target: within 2 %)"
        )


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
        "load_before": _load(),
        "repeats": repeats,
        "chunks": chunks,
    }


# Helpers


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _press(session: Session) -> None:
    """Another key every few chunks, as a player does."""
    chunk, keys = session.frame // session.config.chunk_frames, session.config.keys
    if keys and chunk % HOLD == 0:
        session.act(keys={keys[chunk // HOLD % len(keys)]})


def _settle(session: Session, chunks: int | None = None) -> None:
    """Step, uncounted, until the window is full, or so many chunks."""
    config = session.config
    full = -(-config.window // config.chunk_frames) + SETTLE
    for _ in range(full if chunks is None else chunks):
        _press(session)
        session.step()


def _chunks_to_fill(world: WorldPipeline) -> int:
    return -(-world.config.window // world.config.chunk_frames)


def _turned(names: list[Any], by: int) -> list[Any]:
    by %= len(names)
    return names[by:] + names[:by]


def _percentiles(values: list[float]) -> dict[str, float]:
    found = np.percentile(values, (50, 95, 99))
    return {name: float(x) for name, x in zip(("p50", "p95", "p99"), found, strict=True)}


def _load() -> float | None:
    """Processes that wanted to run in the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _say(what: str) -> None:
    print(f"bench: {what} ...", file=sys.stderr, flush=True)
