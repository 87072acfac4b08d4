"""A small network that names the walls of a picture; with the theme judge it names the class.

    python -m streamgen.apps.pocket.image_judge --data pocket-image

renders walks of its own (seeds apart from all others), trains for a minute or two on one core,
prints the accuracy on held-out walks and writes `judges/wall.safetensors`. Its form, its size of
48 x 64 and the damage that its training pictures take are those of `judges.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from streamgen.apps.pocket import judges
from streamgen.apps.pocket.image_data import CLASSES, render
from streamgen.apps.pocket.judges import BATCH, Judge, degrade, fit, shrink, to_input
from streamgen.apps.pocket.maze import THEMES, WALLS
from streamgen.weights import registry
from streamgen.weights.load import load_into, read_tensors

FOLDER = Path(registry.__file__).parent / "pocket-image" / "judges"
"""Where the shipped judge of walls lies."""

TRAIN_SEED, TEST_SEED = 800_000, 850_000  # of mazes


@dataclass(frozen=True)
class ClassJudge:
    """Both judges, and what they say of uint8 frames [frame, row, column, rgb] of any size."""

    theme: Judge
    wall: Judge

    @classmethod
    def new(cls) -> ClassJudge:
        """Untrained ones."""
        return cls(Judge(1, len(THEMES)).eval(), Judge(1, len(WALLS)).eval())

    @classmethod
    def load(cls, folder: Path = FOLDER, themes: Path = judges.FOLDER) -> ClassJudge:
        """The trained ones: walls from `folder`, themes from the pocket world's judges.

        Raises:
            WeightsError: a file is missing or damaged.
        """
        found = cls.new()
        load_into(found.theme, read_tensors(themes / "theme.safetensors"))
        load_into(found.wall, read_tensors(folder / "wall.safetensors"))
        return found

    @torch.inference_mode()
    def name_classes(self, frames: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The class of every frame, an index into CLASSES, [frame]."""
        x = to_input(shrink(frames))[:, None]
        named: Tensor = self.theme(x).argmax(1) * len(WALLS) + self.wall(x).argmax(1)
        return np.asarray(named.numpy(), np.int64)


def save(judge: Judge, folder: Path) -> None:
    """Write a judge of walls as float16 safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        key: (value.half() if value.is_floating_point() else value).contiguous()
        for key, value in judge.state_dict().items()
    }
    save_file(tensors, folder / "wall.safetensors")


def draw_walls(
    frames: NDArray[np.uint8], labels: NDArray[np.int64]
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A source of batches of (damaged frames, wall) out of frames at the judges' size."""

    def draw() -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(frames), (BATCH,)).numpy()
        x = to_input(frames[chosen])[:, None]
        mirror = torch.rand(BATCH) < 0.5
        x[mirror] = x[mirror].flip(-1)
        return degrade(x), torch.from_numpy(labels[chosen] % len(WALLS))

    return draw


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("pocket-image"))
    parser.add_argument("--batches", type=int, default=4, help="x 1536 pictures to train on")
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = time.monotonic()
    parts = [render(TRAIN_SEED + i) for i in range(args.batches)]
    frames = np.concatenate([shrink(part) for part, _ in parts])
    labels = np.concatenate([label for _, label in parts])
    judge = Judge(1, len(WALLS))
    fit(judge, draw_walls(frames, labels), args.steps)
    save(judge, args.data / "judges")
    both = ClassJudge.load(args.data / "judges")  # what is measured is what ships
    frames, labels = render(TEST_SEED, 64, 8)
    named = both.name_classes(frames)
    print(
        f"{time.monotonic() - start:.0f} s  of {len(CLASSES)} classes, "
        f"{100 * (named == labels).mean():.2f} % of held-out pictures named right: "
        f"theme {100 * (named // len(WALLS) == labels // len(WALLS)).mean():.2f} %, "
        f"wall {100 * (named % len(WALLS) == labels % len(WALLS)).mean():.2f} %",
        flush=True,
    )


if __name__ == "__main__":
    main()
