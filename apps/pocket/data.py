"""Render walks, encode them once, and cut training clips out of the latents.

    python -m streamgen.apps.pocket.data --data pocket-data --walks 720 --frames 80

Every walk is drawn under two themes, so a clip can switch from one to the other at any frame.
"""

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypedDict

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamgen.apps.pocket.autoencoder import load_vae, to_pixels
from streamgen.apps.pocket.maze import KEYS, THEMES, WALLS, Mazes, Walker
from streamgen.apps.pocket.prompts import random_prompt

HELD_OUT = 48  # the last walks, which are never sampled for training
GROUP = 8  # walks rendered and encoded together
WARM_UP = 30  # moves before the first frame
SINK_REACH = 60  # frames that a clip's first frame may lie further back


class Clip(TypedDict):
    """A batch of clips; `switch` is the first frame of the second theme, or the clip's length."""

    latents: Tensor  # [clip, frame, channel, row, column], float32, unit variance
    keys: Tensor  # [clip, frame, key], float32: what led to each frame; zeros for the first. Key
    # is an empty axis where nothing was pressed
    prompts: tuple[list[str], list[str]]  # before and after the switch, [clip] each
    switch: Tensor  # [clip], int64
    sunk: Tensor  # [clip], bool: the first frame comes from earlier in the walk


class Group(TypedDict):
    """One group of encoded walks; the arrays are those of `latents/`."""

    latents: NDArray[np.float16]  # [walk, 2, frame, channel, row, column]
    keys: NDArray[np.uint8]  # [walk, frame, key]
    blocked: NDArray[np.uint8]  # [walk, frame]: whether a wall stopped the move to that frame
    theme: NDArray[np.uint8]  # [walk, 2]
    wall: NDArray[np.uint8]  # [walk]


@torch.inference_mode()
def encode_group(seed: int, data: Path, frames: int) -> Group:
    """Walk, render under two themes and encode GROUP walks of `frames` frames."""
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    vae, mean, std = load_vae(data)
    rng = np.random.default_rng(seed)
    # Seeds apart from those of the autoencoder's frames.
    mazes, walker = Mazes(GROUP, 10_000 + seed), Walker(GROUP, 10_000 + seed)
    theme = np.stack([rng.permutation(len(THEMES))[:2] for _ in range(GROUP)])
    wall = rng.integers(len(WALLS), size=GROUP)
    for _ in range(WARM_UP):
        mazes.step(walker.keys(mazes))
    keys = np.zeros((GROUP, frames, len(KEYS)), np.uint8)
    blocked = np.zeros((GROUP, frames), np.uint8)
    encoded = []
    for frame in range(frames):
        if frame > 0:
            keys[:, frame] = walker.keys(mazes)
            mazes.step(keys[:, frame])
            blocked[:, frame] = mazes.blocked
        pair = np.concatenate([mazes.render(theme[:, i], wall) for i in (0, 1)])
        with torch.autocast("cpu", torch.bfloat16):
            latents = vae.encode(to_pixels(pair)).latent
        encoded.append(((latents.float() - mean) / std).half())
    latents = torch.stack(encoded, dim=1).unflatten(0, (2, GROUP)).transpose(0, 1)
    return {
        "latents": latents.numpy(),
        "keys": keys,
        "blocked": blocked,
        "theme": theme.astype(np.uint8),
        "wall": wall.astype(np.uint8),
    }


def encode_walks(data: Path, walks: int, frames: int, workers: int) -> None:
    """Write `latents/*.npy` under `data`, one file for each array of `Group`, over all walks."""
    folder = data / "latents"
    folder.mkdir(exist_ok=True)
    files: dict[str, np.memmap] = {}
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        job = partial(encode_group, data=data, frames=frames)
        for i, group in enumerate(pool.map(job, range(walks // GROUP))):
            for name, part in group.items():
                if name not in files:
                    files[name] = np.lib.format.open_memmap(
                        folder / f"{name}.tmp", "w+", part.dtype, (walks, *part.shape[1:])
                    )
                files[name][i * GROUP : (i + 1) * GROUP] = part
    for name, array in files.items():
        array.flush()
        os.replace(folder / f"{name}.tmp", folder / f"{name}.npy")


class Clips:
    """Random clips of the encoded walks in `data`; `held_out` draws from the reserved walks.

    Without `keys.npy` (flights) the clips have no keys; with two walls a walk they may switch too.
    """

    def __init__(self, data: Path, held_out: bool = False) -> None:
        self.latents, self.theme, self.wall = (
            np.load(data / "latents" / f"{name}.npy", mmap_mode="r")
            for name in ("latents", "theme", "wall")
        )
        keys = data / "latents" / "keys.npy"
        shape = (len(self.latents), self.latents.shape[2], 0)
        self.keys = np.load(keys, mmap_mode="r") if keys.exists() else np.zeros(shape, np.uint8)
        split = len(self.wall) - HELD_OUT
        self.walks = np.arange(split, len(self.wall)) if held_out else np.arange(split)

    def sample(
        self,
        rng: np.random.Generator,
        batch: int,
        frames: int,
        chunk: int,
        switching: float = 0.35,
        sinking: float = 0.5,
    ) -> Clip:
        """Cut `batch` random clips of `frames` frames.

        Args:
            rng: source of the choices.
            batch: number of clips.
            frames: frames of a clip.
            chunk: frames of a chunk; a switch falls between two chunks.
            switching: chance that the theme changes within the clip.
            sinking: chance that the first frame is taken from earlier in the same walk, as the
                first frame of a long stream is that stays in the model's window.
        """
        shape = (batch, frames, *self.latents.shape[3:])
        latents = np.empty(shape, np.float32)
        keys = np.zeros((batch, frames, self.keys.shape[2]), np.float32)
        switch = np.full(batch, frames)
        sunk = rng.random(batch) < sinking
        before, after = [], []
        for i, walk in enumerate(rng.choice(self.walks, batch)):
            start = int(rng.integers(self.keys.shape[1] - frames + 1))
            order = rng.permutation(2)
            themes = self.theme[walk, order]
            walls = np.broadcast_to(self.wall[walk], 2)[order]
            before.append(random_prompt(rng, int(themes[0]), int(walls[0])))
            after.append(before[-1])
            if rng.random() < switching:
                switch[i] = chunk * rng.integers(1, frames // chunk)
                # A new prompt always names what is new: otherwise nothing tells what to turn into.
                no_wall = 0.2 if walls[0] == walls[1] else 0.0
                after[-1] = random_prompt(rng, int(themes[1]), int(walls[1]), no_wall, no_theme=0)
            cut = start + switch[i]
            latents[i, : switch[i]] = self.latents[walk, order[0], start:cut]
            latents[i, switch[i] :] = self.latents[walk, order[1], cut : start + frames]
            keys[i, 1:] = self.keys[walk, start + 1 : start + frames]
            if sunk[i]:
                sink = rng.integers(max(0, start - SINK_REACH), start + 1)
                latents[i, 0] = self.latents[walk, order[0], sink]
        return {
            "latents": torch.from_numpy(latents),
            "keys": torch.from_numpy(keys),
            "prompts": (before, after),
            "switch": torch.from_numpy(switch),
            "sunk": torch.from_numpy(sunk),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("pocket-data"))
    parser.add_argument("--walks", type=int, default=720, help=f"a multiple of {GROUP}")
    parser.add_argument("--frames", type=int, default=80, help="of each walk and theme")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    start = time.monotonic()
    encode_walks(args.data, args.walks, args.frames, args.workers)
    print(f"{args.walks} walks x 2 themes x {args.frames} frames: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
