"""What reuse at another place costs and saves: `streamgen bench blend`.

A chunk of real frames is cached once and reused behind another past, further on (CacheBlend,
`streamgen.models.blend`). For every share of tokens that are computed anew:

    work     token-layers computed, and floating-point operations, against the full pass
    K/V      distance of what is stored from what the full pass stores
    next     the chunk that is dreamt from it, against the one that is dreamt after the full pass:
             distance of the latents, and PSNR of the frames; and PSNR against the true frames

It is cached in two ways: `alone`, without any past, as CacheBlend does, and `other walk`, behind
frames of another maze. Where it is reused, its true past fills the window. All dreams of a walk
have the same noise. Distances are relative, root mean square; figures are means over the walks,
milliseconds medians.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from streamgen.apps.bench.steps import load_average, turned
from streamgen.apps.bench.world import load
from streamgen.apps.pocket.evaluate import SEED, Walks, psnr
from streamgen.apps.pocket.maze import KEYS, THEMES, WALLS
from streamgen.cache import BlockTable, Chunk
from streamgen.engine import Engine
from streamgen.errors import InvalidRequest
from streamgen.models.blend import ChunkKV, Recorder, blend
from streamgen.models.history import CachedHistory
from streamgen.pipelines.world import WorldPipeline

SHARES = (0.0, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0)
AWAY_CHUNKS = 3  # chunks of the other walk behind which the chunk is cached

Shape = tuple[int, ...]


def _attention_flops(q: Shape, k: Shape, v: Shape, *other: Any, **more: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


# torch counts attention on a GPU only
FLOPS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops
}


class Scene:
    """One walk: its latents and actions, and the way to put chunks of it into a table.

    Args:
        engine: weights and pool.
        walks: where all walks went.
        index: which one this is.
        away: index of the other one.
    """

    def __init__(self, engine: Engine, walks: Walks, index: int, away: int) -> None:
        self.engine, self.n, self.seed = engine, engine.config.chunk_frames, index
        theme, wall = divmod((5 * index + 2) % (len(THEMES) * len(WALLS)), len(WALLS))
        self.prompt = engine.prompt(f"{THEMES[theme]} {WALLS[wall]}")
        config = engine.config
        frames = walks.pick([index, away]).draw([(theme, wall)] * 2, (config.height, config.width))
        columns = [KEYS.index(key) for key in config.keys]
        keys = walks.keys[[index, away]][:, :, columns].astype(np.float32)
        self.frames = frames[0]
        self.latents, self.other = (
            engine.codec.encode(torch.from_numpy(x).to(engine.device)) for x in frames
        )
        self.actions, self.other_actions = torch.from_numpy(keys)
        self.context = len(self.frames) - 2 * self.n

    def part(self, first: int) -> slice:
        """The chunk that begins at a frame."""
        return slice(first, first + self.n)

    def store(self, table: BlockTable, latents: Tensor, actions: Tensor) -> ChunkKV:
        """A clean pass over a chunk, committed."""
        with table.chunk(self.n) as chunk:
            history = Recorder(self.engine.history(chunk))
            self.engine.store(latents, history, self.prompt, actions)
            chunk.commit()
        return history.kv

    def past(self, latents: Tensor, actions: Tensor) -> BlockTable:
        """A table that holds these frames."""
        table = self.engine.table()
        for first in range(0, len(latents), self.n):
            self.store(table, latents[self.part(first)], actions[self.part(first)])
        return table

    def cached(self, frames: int) -> ChunkKV:
        """The chunk's K/V behind so many frames of the other walk."""
        table = self.past(self.other[:frames], self.other_actions[:frames])
        here = self.part(self.context)
        found = self.store(table, self.latents[here], self.actions[here])
        table.close()
        return found

    def dream(self, table: BlockTable) -> tuple[Tensor, np.ndarray]:
        """Latents and frames of the next chunk; always with the same noise."""
        engine = self.engine
        generator = torch.Generator().manual_seed(self.seed)

        def draw(shape: Shape) -> Tensor:
            return torch.randn(shape, generator=generator).to(engine.device)

        actions = self.actions[self.part(self.context + self.n)]
        with table.chunk(self.n) as chunk:
            history = engine.history(chunk)
            made = engine.denoise(history, self.prompt, actions, draw, engine.config.schedule)
        return made, engine.codec.decode(made)[0].cpu().numpy()


class Outcome:
    """The chunk in place, written by `write` behind the true past, and what is dreamt from it."""

    def __init__(
        self, scene: Scene, past: BlockTable, write: Callable[[CachedHistory], float]
    ) -> None:
        table = past.fork()
        with table.chunk(scene.n) as chunk:
            history = scene.engine.history(chunk)
            start = perf_counter()
            self.work = write(history)
            self.ms = 1000 * (perf_counter() - start)
            with FlopCounterMode(display=False, custom_mapping=FLOPS) as counter:
                write(history)  # again, because counting takes time
            self.flops = counter.get_total_flops()
            self.kv = _stored(chunk)
            chunk.commit()
        self.latents, self.frames = scene.dream(table)
        table.close()


@torch.inference_mode()
def measure_blend(world: WorldPipeline, walks: int) -> dict[str, list[dict[str, float]]]:
    """One row for each share, by how the chunk was cached."""
    engine, n = world.engine, world.config.chunk_frames
    context = -(-world.config.window // n) * n
    paths = Walks(walks + 1, SEED + 5, context + 2 * n, n)
    found: dict[str, dict[float, list[dict[str, float]]]] = {}
    for index in range(walks):
        scene = Scene(engine, paths, index, away=index + 1)
        past = scene.past(scene.latents[:context], scene.actions[:context])
        for name, frames in (("alone", 0), ("other walk", AWAY_CHUNKS * n)):
            outcomes = _outcomes(scene, past, scene.cached(frames), index)
            for share in SHARES:
                row = _compare(scene, outcomes[share], outcomes[None])
                found.setdefault(name, {}).setdefault(share, []).append(row)
        past.close()
    return {
        name: [{"share": share, **_summary(rows)} for share, rows in by_share.items()]
        for name, by_share in found.items()
    }


def _outcomes(
    scene: Scene, past: BlockTable, cached: ChunkKV, turn: int
) -> dict[float | None, Outcome]:
    """By share; None = the full pass."""
    engine, here = scene.engine, scene.part(scene.context)
    latents, actions = scene.latents[here], scene.actions[here]
    x = latents.transpose(0, 1)[None]
    t = torch.full((1, scene.n), engine.config.context_noise, device=engine.device)

    def full(history: CachedHistory) -> float:
        engine.store(latents, history, scene.prompt, actions)
        return 1.0

    def mixed(share: float) -> Callable[[CachedHistory], float]:
        def write(history: CachedHistory) -> float:
            led_to = actions[None].to(engine.device)
            return blend(engine.dit, x, t, history, scene.prompt, cached, share, led_to).work

        return write

    ways: dict[float | None, Callable[[CachedHistory], float]] = {None: full}
    ways.update({share: mixed(share) for share in SHARES})
    return {way: Outcome(scene, past, ways[way]) for way in turned(list(ways), turn)}


def _stored(chunk: Chunk) -> Tensor:
    """Keys and values of the chunk's own frames, all layers, in one row."""
    places = [chunk.meta.ordinals.index(frame) for frame in chunk.frames]
    rows: list[Tensor] = []
    for layer in range(chunk.num_layers):
        for side in chunk.kv(layer):
            rows.append(side.unflatten(0, (len(chunk.meta.ordinals), -1))[places].float().flatten())
    return torch.cat(rows)


def _compare(scene: Scene, mine: Outcome, full: Outcome) -> dict[str, float]:
    truth = scene.frames[scene.part(scene.context + scene.n)]
    return {
        "work": mine.work,
        "flops": mine.flops / full.flops,
        "kv_error": _distance(mine.kv, full.kv),
        "next_error": _distance(mine.latents, full.latents),
        "next_psnr": psnr(mine.frames, full.frames),
        "true_psnr": psnr(mine.frames, truth),
        "full_true_psnr": psnr(full.frames, truth),
        "ms": mine.ms,
        "full_ms": full.ms,
    }


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def _summary(rows: list[dict[str, float]]) -> dict[str, float]:
    of = {name: [row[name] for row in rows] for name in rows[0]}
    return {name: median(x) if name.endswith("ms") else mean(x) for name, x in of.items()}


def run_blend(
    model: str | WorldPipeline = "pocket-world",
    output: str | Path | None = None,
    json_output: bool = False,
    walks: int = 12,
) -> dict[str, Any]:
    """The command: measure, print a table or JSON, and return (and write) the report.

    Args:
        model: a world of mazes: a name, folder, hub id, or a loaded one. Where "pocket-world" is
            not packaged, one with random weights stands in for it, whose figures mean nothing.
        output: where to write the report.
        json_output: print JSON.
        walks: walks to average over.

    Raises:
        InvalidRequest: another kind of world, or no walks.
        UnknownModel, WeightsError: from loading.
    """
    if walks < 1:
        raise InvalidRequest(f"walks={walks}: at least 1 is needed")
    world = load(model)
    if set(world.config.keys) != set(KEYS):
        raise InvalidRequest(
            f"{world.name!r} is no world of mazes: its keys are {world.config.keys}"
        )
    report: dict[str, Any] = {
        "about": {
            "model": world.name,
            "layers": world.engine.pool.spec.num_layers,
            "tokens": world.config.chunk_frames * world.engine.pool.spec.block_tokens,
            "window": world.config.window,
            "walks": walks,
            "threads": torch.get_num_threads(),
            "load_before": load_average(),
        }
    }
    report["blend"] = measure_blend(world, walks)
    if output is not None:
        Path(output).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if json_output else "\n".join(_lines(report)))
    return report


def _lines(report: dict[str, Any]) -> Iterator[str]:
    about = report["about"]
    yield (
        f"{about['model']}: a chunk of {about['tokens']} tokens, {about['layers']} layers, reused "
        f"behind {about['window']} frames; {about['walks']} walks, {about['threads']} threads"
    )
    for name, rows in report["blend"].items():
        yield ""
        yield (
            f"cached {name}; full pass: {rows[0]['full_ms']:.1f} ms, next chunk "
            f"{rows[0]['full_true_psnr']:.2f} dB from the true frames"
        )
        yield (
            f"    {'anew':>6}{'work':>8}{'FLOPs':>8}{'time':>8}{'K/V':>9}{'next':>9}"
            f"{'dB to full':>12}{'dB to true':>12}"
        )
        for row in rows:
            yield (
                f"    {row['share']:6.0%}{row['work']:8.1%}{row['flops']:8.1%}"
                f"{row['ms'] / row['full_ms']:8.2f}{row['kv_error']:9.4f}{row['next_error']:9.4f}"
                f"{row['next_psnr']:12.2f}{row['true_psnr']:12.2f}"
            )
