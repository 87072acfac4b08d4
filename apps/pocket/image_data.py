"""Pictures of the pocket world by class: what the image model learns from.

    python -m streamgen.apps.pocket.image_data --data pocket-image --batches 16

renders `pictures.npy` [picture, row, column, rgb] and `labels.npy` [picture]. A class is a theme
and a wall ("lava, brick"); the views are those of random walks. The networks work on squares, so
the pictures are squeezed to SIDE x SIDE; whoever shows one stretches it back.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from streamgen.apps.pocket.maze import THEMES, WALLS, Mazes, Walker

CLASSES = tuple(f"{theme}, {wall}" for theme in THEMES for wall in WALLS)
"""Names of the classes; the index is theme * len(WALLS) + wall."""

SIDE = 96  # pixels along a side of what the networks see
TRAIN_SEED, TEST_SEED = (
    700_000,
    750_000,
)  # of mazes; every other part of the pocket world has its own
WALKS, SHOTS, GAP = 96, 16, 4  # walks drawn together, pictures of each, moves between two of them

Frames = NDArray[np.uint8]


def squeeze(frames: Frames) -> Frames:
    """Frames [frame, row, column, rgb] of any size, at SIDE x SIDE."""
    return np.stack([cv2.resize(f, (SIDE, SIDE), interpolation=cv2.INTER_AREA) for f in frames])


def render(seed: int, walks: int = WALKS, shots: int = SHOTS) -> tuple[Frames, NDArray[np.int64]]:
    """Views of random walks at full size, every class equally often, as far as that goes.

    Args:
        seed: of the mazes, walks and classes.
        walks: mazes walked through together.
        shots: views of each walk.

    Returns:
        Frames [picture, row, column, rgb] and their classes [picture]; a shot's walks are adjacent.
    """
    cv2.setNumThreads(1)
    rng = np.random.default_rng(seed)
    mazes, walker = Mazes(walks, seed), Walker(walks, seed)
    frames, labels = [], []
    for _ in range(shots):
        for _ in range(GAP):
            mazes.step(walker.keys(mazes))
        label = rng.permutation(np.arange(walks) % len(CLASSES))
        frames.append(mazes.render(*divmod(label, len(WALLS))))
        labels.append(label)
    return np.concatenate(frames), np.concatenate(labels)


def render_all(data: Path, batches: int) -> None:
    """Write `pictures.npy` and `labels.npy`, `batches` times WALKS * SHOTS pictures."""
    count, labels = WALKS * SHOTS, []
    partial = data / "pictures.tmp"
    pictures = np.lib.format.open_memmap(partial, "w+", np.uint8, (batches * count, SIDE, SIDE, 3))
    for i in range(batches):
        frames, label = render(TRAIN_SEED + i, WALKS, SHOTS)
        pictures[i * count : (i + 1) * count] = squeeze(frames)
        labels.append(label)
    pictures.flush()
    np.save(data / "labels.npy", np.concatenate(labels))
    os.replace(partial, data / "pictures.npy")  # last: its presence says that the stage is done


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("pocket-image"))
    parser.add_argument("--batches", type=int, default=16, help=f"x {WALKS * SHOTS} pictures")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    render_all(args.data, args.batches)
    print(f"{args.batches * WALKS * SHOTS} pictures: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
