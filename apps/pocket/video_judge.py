"""A small network that says which wall a frame shows, beside the world's theme judge.

    python -m streamgen.apps.pocket.video_judge --data pocket-video-data

renders flights of its own, trains for two minutes on one core, prints the accuracy on held-out
flights (and that of the theme judge, which ships with the pocket world), and writes
`judges/wall.safetensors`. Frames are degraded in training as those of the other judges.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from streamgen.apps.pocket.flights import Flights
from streamgen.apps.pocket.judges import BATCH, Judge, Judges, degrade, fit, shrink, to_input
from streamgen.apps.pocket.maze import THEMES, WALLS
from streamgen.weights import registry
from streamgen.weights.load import load_into, read_tensors

FOLDER = Path(registry.__file__).parent / "pocket-video" / "judges"
"""Where the shipped judge lies."""

TRAIN_SEED, TEST_SEED = 700_000, 710_000  # of mazes; nothing else uses them
FLIGHTS, FRAMES, GAP = 64, 12, 6  # flights drawn together, frames of each, frames between two


@dataclass(frozen=True)
class SceneJudges:
    """Both judges of a scene, and what they say of uint8 frames [frame, row, column, rgb]."""

    theme: Judge
    wall: Judge

    @classmethod
    def new(cls) -> SceneJudges:
        """Untrained ones."""
        return cls(Judge(1, len(THEMES)).eval(), Judge(1, len(WALLS)).eval())

    @classmethod
    def load(cls, folder: Path = FOLDER) -> SceneJudges:
        """The world's theme judge, and the wall judge of a folder.

        Raises:
            WeightsError: a file is missing or damaged.
        """
        judges = cls(Judges.load().theme, Judge(1, len(WALLS)).eval())
        load_into(judges.wall, read_tensors(folder / "wall.safetensors"))
        return judges

    @torch.inference_mode()
    def name(self, frames: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Theme and wall of every frame, indices into THEMES and WALLS, [frame, 2]."""
        x = to_input(shrink(frames))[:, None]
        return torch.stack([self.theme(x).argmax(1), self.wall(x).argmax(1)], dim=1).numpy()


def render(seed: int, rounds: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Frames of flights at the size judges see, and their (theme, wall), [frame, 2]."""
    rng = np.random.default_rng(seed)
    frames, scenes = [], []
    for part in range(rounds):
        flights = Flights(FLIGHTS, seed + part, FRAMES * GAP)
        for frame in range(0, FRAMES * GAP, GAP):
            scene = rng.integers((len(THEMES), len(WALLS)), size=(FLIGHTS, 2))
            frames.append(shrink(flights.draw(frame, scene[:, 0], scene[:, 1])))
            scenes.append(scene)
    return np.concatenate(frames), np.concatenate(scenes)


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("pocket-video-data"))
    parser.add_argument("--rounds", type=int, default=5, help=f"x {FLIGHTS * FRAMES} frames")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    cv2.setNumThreads(1)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    frames, scenes = render(TRAIN_SEED, args.rounds)
    judge = Judge(1, len(WALLS))

    def draw() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(frames), (BATCH,)).numpy()
        x = to_input(frames[rows])[:, None]
        mirror = torch.rand(BATCH) < 0.5
        x[mirror] = x[mirror].flip(-1)
        return degrade(x), torch.from_numpy(scenes[rows, 1])

    fit(judge, draw, args.steps)
    folder = args.data / "judges"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        key: (value.half() if value.is_floating_point() else value).contiguous()
        for key, value in judge.state_dict().items()
    }
    save_file(tensors, folder / "wall.safetensors")
    frames, scenes = render(TEST_SEED, 1)
    right = (SceneJudges.load(folder).name(frames) == scenes).mean(0)
    print(f"held-out frames: theme {100 * right[0]:.2f} %, wall {100 * right[1]:.2f} %")


if __name__ == "__main__":
    main()
