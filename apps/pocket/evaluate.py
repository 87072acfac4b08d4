"""Measure a pocket world against the renderer it learnt from: `streamgen eval pocket-world`.

All mazes, walks and prompts have seeds of their own, apart from training. Keys change at chunk
boundaries only, as they do for a user. A session that continues a real walk is first shown real
frames (`Session.watch`) until its window is full. PSNR is of uint8 pixels, a chunk at a time,
its error floored at the rounding of a pixel (1/12), so that two equal pictures count 58.9 dB.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from streamgen.apps.pocket.judges import ACTIONS, Judges, name_held_action, one_hot_keys
from streamgen.apps.pocket.maze import KEYS, THEMES, WALLS, Mazes, Walker
from streamgen.apps.pocket.prompts import random_prompt
from streamgen.apps.pocket.report import (
    HELD_FRAMES,
    PICTURE_EVERY,
    PICTURE_FRAMES,
    QUICK,
    SWITCH_FRAMES,
    Bin,
    Effort,
    Fidelity,
    Frames,
    Look,
    Prediction,
    Report,
    Switch,
    contact_sheet,
)
from streamgen.engine import Recache
from streamgen.errors import InvalidRequest
from streamgen.pipelines.world import WorldPipeline
from streamgen.session import Session

SEED = 900_000
WARM_UP = 30  # moves before a walk's first frame
SAMPLE_EVERY = 10  # frames between two that are looked at in a long walk
REFERENCE_WALKS = 3  # real walks that say what is normal in a long one

Scenes = Sequence[tuple[int, int]]  # (theme, wall) of every walk


class Walks:
    """Walks through held-out mazes, as poses: drawn when wanted, under any scene.

    Attributes:
        mazes: where every walk stands after its last frame.
        keys: what led to each frame, [walk, frame, key]; none for the first chunk.
        poses: [walk, frame, (x, y, heading)].
    """

    def __init__(self, num: int, seed: int, frames: int, chunk: int) -> None:
        self.mazes, walker = Mazes(num, seed), Walker(num, seed)
        for _ in range(WARM_UP):
            self.mazes.step(walker.keys(self.mazes))
        held = np.zeros((num, len(KEYS)), bool)
        keys, poses = [held], [self.mazes.pose.copy()]
        for frame in range(1, frames):
            wanted = walker.keys(self.mazes)
            if frame % chunk == 0:
                held = wanted
            self.mazes.step(held)
            keys.append(held)
            poses.append(self.mazes.pose.copy())
        self.keys, self.poses = np.stack(keys, 1), np.stack(poses, 1)

    def pick(self, walks: Sequence[int]) -> Walks:
        """Some of the walks, at their end; they can be moved on without moving these."""
        part = copy(self)
        part.mazes = copy(self.mazes)
        for name in ("grids", "pose", "blocked"):
            setattr(part.mazes, name, getattr(self.mazes, name)[list(walks)])
        part.keys, part.poses = self.keys[list(walks)], self.poses[list(walks)]
        return part

    def hold(self, keys: NDArray[np.float32], frames: int) -> NDArray[np.bool_]:
        """Walk on in place under held keys [walk, key]; which walks no wall was in the way of."""
        free, poses = np.ones(len(keys), bool), []
        for _ in range(frames):
            self.mazes.step(keys)
            free &= ~self.mazes.blocked
            poses.append(self.mazes.pose.copy())
        self.poses = np.concatenate([self.poses, np.stack(poses, 1)], axis=1)
        return free

    def draw(self, scenes: Scenes, size: tuple[int, int], first: int = 0) -> Frames:
        """The frames from `first` on, [walk, frame, row, column, rgb], at (height, width)."""
        theme, wall = (np.array(x) for x in zip(*scenes, strict=True))
        canvas, drawn = copy(self.mazes), []
        for pose in self.poses[:, first:].swapaxes(0, 1):
            canvas.pose = pose
            drawn.append(_resize(canvas.render(theme, wall), size))
        return np.stack(drawn, 1)


def dream(session: Session, keys: NDArray) -> Frames:
    """Generate a chunk for every chunk of `keys` [frame, key], of which the first row is held."""
    chunks = []
    for held in keys[:: session.config.chunk_frames]:
        session.act([key for key, down in zip(KEYS, held, strict=True) if down])
        chunks.append(session.step().frames)
    return np.concatenate(chunks)


def psnr(first: Frames, second: Frames) -> float:
    """Decibels between two pictures or stacks of pictures; see the module's text for the floor."""
    error = (first.astype(np.float32) - second.astype(np.float32)) ** 2
    return float(10 * np.log10(255**2 / max(float(error.mean()), 1 / 12)))


class Evaluation:
    """The measurements of one world; each is a method that can be called by itself."""

    def __init__(self, world: WorldPipeline, judges: Judges, effort: Effort) -> None:
        config = world.config
        if set(config.keys) != set(KEYS) or not config.max_words:
            raise InvalidRequest(f"{world.name!r} is no world of mazes: its keys are {config.keys}")
        self.world, self.judges, self.effort = world, judges, effort
        self.size, self.chunk = (config.height, config.width), config.chunk_frames
        self.context = -(-config.window // self.chunk) * self.chunk  # whole chunks fill the window
        order = np.random.default_rng(SEED).permutation(len(THEMES) * len(WALLS))
        self.scenes = [divmod(int(i), len(WALLS)) for i in order]

    def prompt(self, rng: np.random.Generator, scene: tuple[int, int], wall: bool = True) -> str:
        """A prompt that names a scene's theme, and its wall too or only perhaps."""
        return random_prompt(rng, *scene, no_wall=0 if wall else 0.2, no_theme=0)

    def begin(self, text: str, seed: int) -> Session:
        """A session without a past."""
        return self.world.session(text, seed=seed, history_seconds=0)

    def code(self, frames: Frames) -> Frames:
        """Frames, encoded and decoded."""
        engine, pixels = self.world.engine, torch.from_numpy(frames)
        parts = [
            engine.codec.decode(engine.codec.encode(part.to(engine.device)), None)[0].cpu()
            for part in pixels.split(16)
        ]
        return torch.cat(parts).numpy()

    def measure_prediction(self) -> Prediction:
        """See `Prediction`: after every chunk of real walks, the next is dreamt and forgotten."""
        rng, n = np.random.default_rng(SEED), self.chunk
        scenes = self.scenes[: self.effort.scenes]
        walks = Walks(len(scenes), SEED, self.context + self.effort.chunks * n, n)
        rows: list[tuple[float, ...]] = []
        frame_rows, moved, owner = [], [], []
        for i, frames in enumerate(_bar("prediction", walks.draw(scenes, self.size))):
            keys, coded = walks.keys[i], self.code(frames[self.context :])
            with self.begin(self.prompt(rng, scenes[i]), seed=i) as session:
                session.watch(frames[: self.context], keys[: self.context])
                for first in range(self.context, len(frames), n):
                    part = slice(first, first + n)
                    true = frames[part]
                    with session.fork() as twin:
                        made = dream(twin, keys[part])
                    session.watch(true, keys[part])
                    still = np.broadcast_to(frames[first - 1], true.shape)
                    ceiling = coded[first - self.context :][:n]
                    rows.append((psnr(made, true), psnr(ceiling, true), psnr(still, true)))
                    frame_rows.append([psnr(a, b) for a, b in zip(made, true, strict=True)])
                    moved.append(np.ptp(walks.poses[i, first - 1 : first + n], axis=0).any())
                    owner.append(scenes[i])
        made, ceiling, still = np.array(rows).T
        places = np.array(owner)
        return Prediction(
            chunks=len(rows),
            psnr=float(made.mean()),
            by_frame=np.mean(frame_rows, axis=0).tolist(),
            moving=float(made[moved].mean()),
            ceiling=float(ceiling.mean()),
            repeated=float(still.mean()),
            repeated_moving=float(still[moved].mean()),
            by_scene={
                THEMES[theme]: {
                    WALLS[wall]: float(made[(places == (theme, wall)).all(1)].mean())
                    for wall in range(len(WALLS))
                    if (theme, wall) in scenes
                }
                for theme in sorted({theme for theme, _ in scenes})
            },
        )

    def measure_actions(self) -> dict[str, Fidelity]:
        """See `Fidelity`: real frames until the window is full, then one action held.

        Only starts from which the true walker would not be stopped by a wall are used; the first
        pair that is judged holds the last real frame, encoded and decoded.
        """
        rng, keys = np.random.default_rng(SEED + 1), one_hot_keys()
        pool = Walks(14 * self.effort.segments, SEED + 1, self.context, self.chunk)
        num = len(pool.keys)
        free = [pool.pick(range(num)).hold(np.tile(k, (num, 1)), HELD_FRAMES) for k in keys]
        free_WA = np.stack(free, axis=1)
        used_WA = free_WA & (free_WA.cumsum(0) <= self.effort.segments)
        shown: dict[str, list[NDArray]] = {"dream": [], "real": [], "coded": []}
        truth: list[int] = []
        for walk in _bar("actions", np.flatnonzero(used_WA.any(1))):
            start, scene = pool.pick([walk]), self.scenes[walk % len(self.scenes)]
            with self.begin(self.prompt(rng, scene), seed=int(walk)) as session:
                session.watch(start.draw([scene], self.size)[0], start.keys[0])
                for action in np.flatnonzero(used_WA[walk]):
                    moved = start.pick([0])
                    moved.hold(keys[action][None], HELD_FRAMES)
                    real = moved.draw([scene], self.size, self.context - 1)[0]
                    coded = self.code(real)
                    with session.fork() as twin:
                        made = dream(twin, np.tile(keys[action], (HELD_FRAMES, 1)))[:HELD_FRAMES]
                    made = np.concatenate([coded[:1], made])
                    for name, frames in (("dream", made), ("real", real), ("coded", coded)):
                        shown[name].append(self.judges.weigh_actions(frames))
                    truth.append(int(action))
        return {name: _fidelity(weights, np.array(truth)) for name, weights in shown.items()}

    def measure_switches(self) -> dict[str, Switch]:
        """See `Switch`: real frames of one theme, then the prompt names another one."""
        rng, n, num = np.random.default_rng(SEED + 2), self.chunk, self.effort.switches
        pairs = [
            (before, after, wall)
            for wall in range(len(WALLS))
            for before in range(len(THEMES))
            for after in range(len(THEMES))
            if before != after
        ]
        pairs = [pairs[i % len(pairs)] for i in rng.permutation(max(num, len(pairs)))[:num]]
        walks = Walks(num, SEED + 2, self.context + SWITCH_FRAMES, n)
        old = walks.draw([(before, wall) for before, _, wall in pairs], self.size)
        new = walks.draw([(after, wall) for _, after, wall in pairs], self.size, self.context)
        shown: dict[str, list[NDArray]] = {name: [] for name in (*get_args(Recache), "real")}
        for i, (before, after, wall) in enumerate(_bar("switches", pairs)):
            text = self.prompt(rng, (after, wall), wall=False)
            with self.begin(self.prompt(rng, (before, wall)), seed=i) as session:
                session.watch(old[i, : self.context], walks.keys[i, : self.context])
                for how in get_args(Recache):
                    with session.fork() as twin:
                        twin.prompt(text, recache=how)
                        made = dream(twin, walks.keys[i, self.context :])[:SWITCH_FRAMES]
                    shown[how].append(self.judges.name_themes(made) == after)
            shown["real"].append(self.judges.name_themes(new[i]) == after)
        return {name: _switch(np.stack(hits), n) for name, hits in shown.items()}

    def measure_stability(self) -> list[Bin]:
        """See `Bin`: long walks from nothing but a prompt, under the keys of a true walker.

        The keys were pressed in another maze, so they run into walls; the real walks beside them
        are moved by the same keys through other mazes, as blind.
        """
        rng, total = np.random.default_rng(SEED + 3), self.effort.long_frames
        dreamt, real = [], []
        for i in range(self.effort.long_walks):
            scene = (i % len(THEMES), (i + i // len(THEMES)) % len(WALLS))
            script = Walks(1, SEED + 10 + i, total, self.chunk)
            blind = Walks(REFERENCE_WALKS + 1, SEED + 50 + i, 1, self.chunk)
            pairs = np.stack(list(_walk_blind(blind, script, scene, self.size)))
            normal = np.mean(
                [self._look(p, scene) for p in pairs[:, 1:].reshape(-1, *pairs.shape[2:])], axis=0
            )
            theirs = np.stack([self._look(self.code(pair), scene) for pair in pairs[:, 0]])
            with self.begin(self.prompt(rng, scene), seed=i) as session:
                mine = [
                    self._look(pair, scene)
                    for pair in _pairs(session, _bar(f"long walk {i + 1}", script.keys[0]))
                ]
            dreamt.append((np.stack(mine), normal))
            real.append((theirs, normal))
        width = self.effort.bin_frames // SAMPLE_EVERY
        bins = []
        for first in range(0, total // SAMPLE_EVERY, width):
            part = slice(first, first + width)
            mine = [_compare(looks[part], normal) for looks, normal in dreamt]
            theirs = [_compare(looks[part], normal) for looks, normal in real]
            bins.append(Bin(first * SAMPLE_EVERY, _mean(mine), _mean(theirs), mine))
        return bins

    def _look(self, pair: Frames, scene: tuple[int, int]) -> NDArray[np.float64]:
        """Sharpness, motion, theme (0 or 1) and 6 colour statistics of the newer of two frames."""
        before, now = pair
        sharpness = cv2.Laplacian(cv2.cvtColor(now, cv2.COLOR_RGB2GRAY), cv2.CV_32F).var()
        motion = np.abs(now.astype(np.float32) - before).mean()
        hit = self.judges.name_themes(now[None])[0] == scene[0]
        return np.array([sharpness, motion, hit, *now.mean((0, 1)), *now.std((0, 1))])

    def draw_picture(self) -> Frames:
        """Truth above dream for some walks; the first column is the last frame that was seen."""
        rng, num = np.random.default_rng(SEED + 4), self.effort.drawn
        scenes = [(i % len(THEMES), (i + i // len(THEMES)) % len(WALLS)) for i in range(num)]
        walks = Walks(num, SEED + 4, self.context + PICTURE_FRAMES, self.chunk)
        rows = []
        for i, frames in enumerate(_bar("picture", walks.draw(scenes, self.size))):
            with self.begin(self.prompt(rng, scenes[i]), seed=i) as session:
                session.watch(frames[: self.context], walks.keys[i, : self.context])
                made = dream(session, walks.keys[i, self.context :])
            truth = frames[self.context - 1 :: PICTURE_EVERY]
            shown = np.concatenate([self.code(truth[:1]), made[PICTURE_EVERY - 1 :: PICTURE_EVERY]])
            name = f"{THEMES[scenes[i][0]]}, {WALLS[scenes[i][1]]}"
            rows += [(f"{name}: truth", truth), (f"{name}: dream", shown)]
        return contact_sheet(rows)


def evaluate(
    world: WorldPipeline,
    out: Path | None = None,
    judges: Judges | None = None,
    effort: Effort | None = None,
) -> Report:
    """Measure a world of mazes; the same world gives the same numbers on the same machine.

    Args:
        world: what is measured.
        out: folder for `report.json`, `report.txt` and `walks.png`; None = nothing is written.
        judges: who names themes and actions; None = those that ship.
        effort: how much is measured.

    Raises:
        InvalidRequest: another kind of world.
        WeightsError: the judges are missing or damaged.
    """
    start = time.monotonic()
    run = Evaluation(world, judges or Judges.load(), effort or Effort())
    report = Report(
        model=world.name,
        effort=run.effort,
        prediction=run.measure_prediction(),
        actions=run.measure_actions(),
        switches=run.measure_switches(),
        stability=run.measure_stability(),
        seconds=time.monotonic() - start,
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
        (out / "report.txt").write_text(report.to_table() + "\n")
        sheet = cv2.cvtColor(run.draw_picture(), cv2.COLOR_RGB2BGR)
        cv2.imwrite(str(out / "walks.png"), sheet)
    return report


def run_eval(model: str, out: Path, json_output: bool, quick: bool) -> None:
    """The command: load a world, measure it, print a table or JSON, write the files to `out`."""
    world = WorldPipeline.from_pretrained(model, history_seconds=0)
    report = evaluate(world, out, effort=QUICK if quick else None)
    print(json.dumps(report.to_json()) if json_output else report.to_table())


# Steps of the measurements


def _bar(name: str, items: Any) -> Iterator[Any]:
    """The items, with a progress bar where someone watches."""
    return iter(tqdm(items, desc=name, leave=False, disable=None))


def _resize(frames: Frames, size: tuple[int, int]) -> Frames:
    """Frames [frame, row, column, rgb] at (height, width): another size than ours is rare."""
    if frames.shape[1:3] == size:
        return frames
    return np.stack([cv2.resize(f, size[::-1], interpolation=cv2.INTER_AREA) for f in frames])


def _fidelity(weights: list[NDArray], truth: NDArray[np.int64]) -> Fidelity:
    named = np.array([name_held_action(w) for w in weights])
    single = np.stack(weights).argmax(2)
    by_action = {
        name: float((named[truth == i] == i).mean())
        for i, name in enumerate(ACTIONS)
        if (truth == i).any()
    }
    return Fidelity(
        segments=len(truth),
        segment=float((named == truth).mean()),
        frame=float((single == truth[:, None]).mean()),
        by_action=by_action,
    )


def _switch(hits: NDArray[np.bool_], chunk: int) -> Switch:
    """From whether each frame after a switch shows the new theme, [switch, frame]."""
    whole = len(hits[0]) // chunk * chunk
    full = hits[:, :whole].reshape(len(hits), -1, chunk).all(2)
    until = np.where(full.any(1), (full.argmax(1) + 1) * chunk, SWITCH_FRAMES + 1)
    return Switch(
        len(hits), float(hits[:, -1].mean()), float(full.any(1).mean()), float(np.median(until))
    )


def _pairs(session: Session, keys: Iterable[NDArray]) -> Iterator[Frames]:
    """Dream on under `keys`; the last frame of every SAMPLE_EVERY, with the one before it."""
    made = np.empty((0, session.config.height, session.config.width, 3), np.uint8)
    for frame, held in enumerate(keys):
        if frame == session.frame:
            made = np.concatenate([made[-1:], dream(session, held[None])])
        here = len(made) - session.frame + frame
        if frame % SAMPLE_EVERY == SAMPLE_EVERY - 1:
            yield made[here - 1 : here + 1]


def _walk_blind(
    walks: Walks, script: Walks, scene: tuple[int, int], size: tuple[int, int]
) -> Iterator[Frames]:
    """Move every walk by another's keys; pairs as of `_pairs`, [walk, 2, row, column, rgb]."""
    mazes, scenes = walks.mazes, [scene] * len(walks.keys)
    for frame, held in enumerate(script.keys[0]):
        mazes.step(np.tile(held, (len(scenes), 1)))
        if frame % SAMPLE_EVERY == SAMPLE_EVERY - 2:
            walks.poses = mazes.pose[:, None].copy()
        elif frame % SAMPLE_EVERY == SAMPLE_EVERY - 1:
            walks.poses = np.stack([walks.poses[:, 0], mazes.pose], axis=1)
            yield walks.draw(scenes, size)


def _compare(looks: NDArray[np.float64], normal: NDArray[np.float64]) -> Look:
    """The statistics of a stretch, [sample, statistic], against what is normal, [statistic]."""
    mean = looks.mean(0)
    distance = np.sqrt(np.square(mean[3:] - normal[3:]).mean())
    return Look(*(float(x) for x in (*mean[:2] / normal[:2], distance, mean[2])))


def _mean(looks: Sequence[Look]) -> Look:
    rows = [tuple(asdict(look).values()) for look in looks]
    return Look(*np.mean(rows, axis=0).tolist())
