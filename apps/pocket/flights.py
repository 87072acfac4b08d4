"""Flights through procedural mazes: the pocket video's ground truth, with nobody at the keys.

    python -m streamgen.apps.pocket.flights --data pocket-video-data --flights 600 --frames 80

An autopilot follows a route from cell to cell that leads where there is room and never into a dead
end. The route, smoothed with a Gaussian, is the path: it cuts corners and so slows down in turns.
The camera looks along a heading that is smoothed once more, so a turn begins before its corner.
Each flight is drawn in two scenes of different themes and, for half of them, different walls, so a
clip can switch from one to the other at any frame.

Encoding resumes: groups of flights are files of their own, joined when all are there.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from streamgen.apps.pocket.autoencoder import load_vae, to_pixels
from streamgen.apps.pocket.maze import RADIUS, SIZE, THEMES, WALLS, Mazes

FPS = 16
GROUP = 8  # flights rendered and encoded together
SEED = 30_000  # of the first group's mazes: apart from walks, judges and evaluations

SPEED = (0.11, 0.14)  # cells a frame on a straight, drawn for each flight
PACE = 0.15  # how far a flight's speed swings, as a share
CORNER = 0.6  # cells over which a corner is smoothed, standard deviation
LOOK = 8.0  # frames over which the heading is smoothed, standard deviation
SWAY = 0.06  # radians that the heading wanders from the path, standard deviation
DRIFT = 0.06  # cells that the path wanders from the middle of a corridor, standard deviation
FINE = 0.02  # cells between two points of a route

_WAYS = ((1, 0), (0, 1), (-1, 0), (0, -1))
Floats = NDArray[np.float32]


def open_dead_ends(grid: NDArray[np.bool_], rng: np.random.Generator) -> None:
    """Open walls [x, y] in place until every free cell has two free neighbours."""
    while True:
        ends = [cell for cell in np.argwhere(~grid) if _free(grid, cell) < 2]
        if not ends:
            return
        x, y = ends[0]
        walls = [
            (x + dx, y + dy)
            for dx, dy in _WAYS
            if grid[x + dx, y + dy] and 0 < x + dx < SIZE - 1 and 0 < y + dy < SIZE - 1
        ]
        grid[walls[rng.integers(len(walls))]] = False


def _free(grid: NDArray[np.bool_], cell: NDArray[np.int64]) -> int:
    x, y = cell
    return sum(not grid[x + dx, y + dy] for dx, dy in _WAYS)


def plan_route(grid: NDArray[np.bool_], rng: np.random.Generator, cells: int) -> NDArray[np.int64]:
    """A random route of neighbouring free cells that never turns back, [cell, (x, y)].

    Straight on is likelier than a turn, a turn likelier the more room there is behind it, and two
    turns rarely follow one another.
    """
    free = np.argwhere(~grid)
    route = [tuple(free[rng.integers(len(free))])]
    way, turned = int(rng.integers(4)), False
    while len(route) < cells:
        x, y = route[-1]
        room = [_room(grid, x, y, (way + turn) % 4) for turn in (0, 1, 3)]
        weight = np.array([4.0, 0.3 if turned else 1.0, 0.3 if turned else 1.0]) * room
        # Only at the start of a route can there be no way but back.
        turn = int(rng.choice((0, 1, 3), p=weight / weight.sum())) if weight.any() else 2
        way, turned = (way + turn) % 4, turn != 0
        route.append((x + _WAYS[way][0], y + _WAYS[way][1]))
    return np.array(route)


def _room(grid: NDArray[np.bool_], x: int, y: int, way: int, most: int = 4) -> int:
    """Free cells in a row from the neighbour on, at most `most`."""
    dx, dy = _WAYS[way]
    for step in range(1, most + 1):
        if grid[x + step * dx, y + step * dy]:
            return step - 1
    return most


def smooth(x: NDArray[np.float64], spread: float) -> NDArray[np.float64]:
    """Convolve along the first axis with a Gaussian of standard deviation `spread` samples; the
    ends, where it would reach over, are cut off: 4 * spread samples at each."""
    reach = int(np.ceil(4 * spread))
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / spread) ** 2)
    return np.stack([np.convolve(c, kernel / kernel.sum(), "valid") for c in x.T], axis=1)


def _wander(rng: np.random.Generator, samples: int, spread: float) -> NDArray[np.float64]:
    """Smooth noise of unit variance [sample], correlated over about `spread` samples."""
    reach = int(np.ceil(4 * spread))
    noise = smooth(rng.standard_normal((samples + 2 * reach, 1)), spread)[:, 0]
    return np.asarray(noise * np.sqrt(2 * np.sqrt(np.pi) * spread))


def clearance(grid: NDArray[np.bool_], points: NDArray[np.floating]) -> NDArray[np.float64]:
    """Distance in cells from each point [point, (x, y)] to the nearest wall, at most 1."""
    cell = np.floor(points).astype(np.int64)
    best = np.ones(len(points))
    for dx in (-1, 0, 1):
        for dy in (-1, 0, 1):
            near = cell + (dx, dy)
            gap = np.maximum(np.maximum(near - points, points - near - 1), 0)
            solid = grid[near[:, 0], near[:, 1]]
            best = np.where(solid, np.minimum(best, np.hypot(gap[:, 0], gap[:, 1])), best)
    return best


def fly(grid: NDArray[np.bool_], rng: np.random.Generator, frames: int) -> Floats:
    """One flight through a maze without dead ends: (x, y, heading) of each frame, [frame, 3].

    Every frame keeps RADIUS from all walls: where a smoothed corner comes nearer, the flight is
    smoothed less.
    """
    margin = int(np.ceil(4 * LOOK)) + 1  # frames that smoothing the heading takes off each end
    count = frames + 2 * margin
    pace = rng.uniform(*SPEED) * (1 + PACE * np.clip(_wander(rng, count, 20), -2, 2))
    travelled = np.cumsum(pace)
    cells = int(travelled[-1]) + 8
    route = plan_route(grid, rng, cells) + 0.5
    along = np.arange(0, cells - 1, FINE)
    line = np.stack([np.interp(along, np.arange(cells), axis) for axis in route.T], axis=1)
    aside = np.stack([_wander(rng, len(line), 1.0 / FINE) for _ in range(2)], axis=1)
    for share in (1.0, 0.75, 0.5, 0.25):
        spread = share * CORNER / FINE
        path = smooth(line, spread)
        trim = (len(line) - len(path)) // 2
        path = path + DRIFT * share * np.clip(aside[trim : trim + len(path)], -1.5, 1.5)
        at = travelled / FINE
        track = np.stack([np.interp(at, np.arange(len(path)), axis) for axis in path.T], axis=1)
        if clearance(grid, track).min() >= RADIUS:
            break
    step = np.gradient(track, axis=0)
    bearing = np.unwrap(np.arctan2(step[:, 1], step[:, 0]))
    heading = smooth(bearing[:, None], LOOK)[:, 0]
    heading = heading + SWAY * _wander(rng, len(heading), 12)
    cut = (count - len(heading)) // 2
    pose = np.concatenate([track[cut : cut + len(heading)], heading[:, None] % (2 * np.pi)], 1)
    return pose[1 : frames + 1].astype(np.float32)


class Flights:
    """Many independent flights, each in a maze of its own, drawn together.

    Attributes:
        poses: [flight, frame, (x, y, heading)], in cells and radians as those of `Mazes`.
    """

    def __init__(self, num: int, seed: int, frames: int) -> None:
        self.mazes = Mazes(num, seed)
        poses = []
        for i, grid in enumerate(self.mazes.grids):
            rng = np.random.default_rng((seed, i))
            open_dead_ends(grid, rng)
            poses.append(fly(grid, rng, frames))
        self.poses: Floats = np.stack(poses)

    def draw(
        self, frame: int, theme: NDArray[np.integer], wall: NDArray[np.integer]
    ) -> NDArray[np.uint8]:
        """What every flight sees in one frame, as `Mazes.render`: [flight, row, column, rgb]."""
        self.mazes.pose = self.poses[:, frame]
        return self.mazes.render(theme, wall)


@torch.inference_mode()
def encode_group(seed: int, data: Path, frames: int) -> Path:
    """Fly, render in two scenes and encode GROUP flights, unless that is done already.

    Returns:
        The file of the group: latents float16 [flight, 2, frame, channel, row, column], theme and
        wall uint8 [flight, 2].
    """
    path = data / "groups" / f"{seed:04d}.npz"
    if path.exists():
        return path
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    vae, mean, std = load_vae(data)
    rng = np.random.default_rng(SEED + seed)
    flights = Flights(GROUP, SEED + seed, frames)
    theme = np.stack([rng.permutation(len(THEMES))[:2] for _ in range(GROUP)])
    wall = rng.integers(len(WALLS), size=GROUP)
    other = (wall + rng.integers(1, len(WALLS), GROUP) * (rng.random(GROUP) < 0.5)) % len(WALLS)
    walls = np.stack([wall, other], axis=1)
    encoded = []
    for frame in range(frames):
        pair = np.concatenate([flights.draw(frame, theme[:, i], walls[:, i]) for i in (0, 1)])
        with torch.autocast("cpu", torch.bfloat16):
            latents = vae.encode(to_pixels(pair)).latent
        encoded.append(((latents.float() - mean) / std).half())
    latents = torch.stack(encoded, dim=1).unflatten(0, (2, GROUP)).transpose(0, 1)
    with open(path.with_suffix(".tmp"), "wb") as file:
        np.savez(
            file,
            latents=latents.numpy(),
            theme=theme.astype(np.uint8),
            wall=walls.astype(np.uint8),
        )
    os.replace(path.with_suffix(".tmp"), path)
    return path


def join_groups(data: Path, paths: list[Path]) -> None:
    """Write `latents/{latents,theme,wall}.npy` under `data` for `data.Clips`: all groups' rows."""
    folder = data / "latents"
    folder.mkdir(exist_ok=True)
    for name in ("theme", "wall", "latents"):  # the largest last: it tells that all is there
        first = np.load(paths[0])[name]
        shape = (len(paths) * GROUP, *first.shape[1:])
        rows = np.lib.format.open_memmap(folder / f"{name}.tmp", "w+", first.dtype, shape)
        for i, path in enumerate(paths):
            rows[i * GROUP : (i + 1) * GROUP] = np.load(path)[name]
        rows.flush()
        os.replace(folder / f"{name}.tmp", folder / f"{name}.npy")


def encode_flights(data: Path, flights: int, frames: int, workers: int) -> None:
    """Fill `data / "latents"` with `flights` flights of `frames` frames; see the module's text."""
    (data / "groups").mkdir(exist_ok=True)
    job = partial(encode_group, data=data, frames=frames)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        join_groups(data, list(pool.map(job, range(flights // GROUP))))


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("pocket-video-data"))
    parser.add_argument("--flights", type=int, default=600, help=f"a multiple of {GROUP}")
    parser.add_argument("--frames", type=int, default=80, help="of each flight and theme")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    start = time.monotonic()
    encode_flights(args.data, args.flights, args.frames, args.workers)
    seconds = time.monotonic() - start
    print(f"{args.flights} flights x 2 themes x {args.frames} frames: {seconds:.0f} s")


if __name__ == "__main__":
    main()
