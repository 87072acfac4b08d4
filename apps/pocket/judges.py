"""Small networks that say what frames show: which theme, and which action led from one to the next.

    python -m streamgen.apps.pocket.judges --data pocket-data

renders walks of its own (seeds apart from all others), trains both judges in a few minutes on one
core, prints their accuracy on held-out walks, and writes `judges/theme.safetensors` and
`judges/idm.safetensors`. They see frames at 48 x 64, degraded in training (blur, noise, flicker),
so that a soft or noisy frame is still judged by what it shows.

The inverse-dynamics model reads a pair of consecutive frames. Frames in which a wall took more than
a quarter of the move are left out: nobody can name an action that had no effect.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from streamgen.apps.pocket.maze import KEYS, THEMES, WALLS, Mazes, Walker
from streamgen.weights import registry
from streamgen.weights.load import load_into, read_tensors

ACTIONS = {
    "idle": "",
    "forward": "w",
    "back": "s",
    "turn left": "a",
    "turn right": "d",
    "strafe left": "q",
    "strafe right": "e",
}
"""The actions that are told apart, and the key that each holds."""

HEIGHT, WIDTH = 48, 64  # what a judge sees
FOLDER = Path(registry.__file__).parent / "pocket-world" / "judges"
"""Where the shipped judges lie."""

# Seen in a mirror, and played backwards: index of the action that an action becomes.
MIRRORED = torch.tensor([0, 1, 2, 4, 3, 6, 5])
REVERSED = torch.tensor([0, 2, 1, 4, 3, 6, 5])

TRAIN_SEED, TEST_SEED = 500_000, 600_000  # of mazes; the world and its evaluation use others
WALKS, WANDER, HOLD = 64, 5, 4  # walks drawn together, moves between two segments, moves of one
BATCH, RATE = 64, 3e-3


def one_hot_keys() -> NDArray[np.float32]:
    """The keys of every action, [action, key]."""
    return np.array([[key == held for key in KEYS] for held in ACTIONS.values()], np.float32)


class Judge(nn.Module):
    """A classifier of one frame or of a few consecutive ones.

    Args:
        frames: how many it reads. Several are freed of their common brightness and contrast, so
            that motion is read alike in every theme.
        classes: how many answers it can give.
    """

    def __init__(self, frames: int, classes: int) -> None:
        super().__init__()
        self.frames = frames
        widths = (3 * frames, 24, 48, 64, 64)
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(zip(widths, widths[1:], strict=False)):
            kernel, stride = (5, 2) if i == 0 else (3, 2 if i < 3 else 1)
            conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
            layers += [conv, nn.BatchNorm2d(after), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AvgPool2d(2))
        self.head = nn.Linear(widths[-1] * (HEIGHT // 16) * (WIDTH // 16), classes)

    def forward(self, x_BFCYX: Tensor) -> Tensor:
        """Scores [B, classes] of frames in 0 to 1, [B, F, rgb, HEIGHT, WIDTH]."""
        x = x_BFCYX.flatten(1, 2)
        if self.frames > 1:
            spread, mean = torch.std_mean(x, dim=(1, 2, 3), keepdim=True)
            x = (x - mean) / (spread + 0.02)
        return self.head(self.body(x).flatten(1))


@dataclass(frozen=True)
class Judges:
    """Both judges, and what they say of uint8 frames [frame, row, column, rgb] of any size."""

    theme: Judge
    idm: Judge

    @classmethod
    def new(cls) -> Judges:
        """Untrained ones."""
        return cls(Judge(1, len(THEMES)).eval(), Judge(2, len(ACTIONS)).eval())

    @classmethod
    def load(cls, folder: Path = FOLDER) -> Judges:
        """The trained ones of a folder.

        Raises:
            WeightsError: a file is missing or damaged.
        """
        judges = cls.new()
        for name, judge in (("theme", judges.theme), ("idm", judges.idm)):
            load_into(judge, read_tensors(folder / f"{name}.safetensors"))
        return judges

    def save(self, folder: Path) -> None:
        """Write both as float16 safetensors."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, judge in (("theme", self.theme), ("idm", self.idm)):
            tensors = {
                key: (value.half() if value.is_floating_point() else value).contiguous()
                for key, value in judge.state_dict().items()
            }
            save_file(tensors, folder / f"{name}.safetensors")

    @torch.inference_mode()
    def name_themes(self, frames: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The theme of every frame, an index into THEMES, [frame]."""
        return self.theme(to_input(shrink(frames))[:, None]).argmax(1).numpy()

    @torch.inference_mode()
    def weigh_actions(self, frames: NDArray[np.uint8]) -> NDArray[np.float32]:
        """How likely each of ACTIONS led from a frame to the next, [frame - 1, action]."""
        x = to_input(shrink(frames))
        return self.idm(torch.stack([x[:-1], x[1:]], dim=1)).softmax(1).numpy()


def name_held_action(weights: NDArray[np.float32]) -> int:
    """The action of a segment under one held key: the answer that most pairs of frames give.

    Args:
        weights: of `Judges.weigh_actions`, [pair, action]; their mean decides between equal counts.
    """
    votes = np.bincount(weights.argmax(1), minlength=weights.shape[1])
    return int((votes + 0.5 * weights.mean(0)).argmax())


def shrink(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Frames [frame, row, column, rgb] at the size that judges see."""
    return np.stack([cv2.resize(f, (WIDTH, HEIGHT), interpolation=cv2.INTER_AREA) for f in frames])


def to_input(frames: NDArray[np.uint8]) -> Tensor:
    """Frames [..., row, column, rgb] in 0 to 255, to [..., rgb, row, column] in 0 to 1."""
    return torch.from_numpy(frames).movedim(-1, -3).float().div_(255)


@dataclass(frozen=True)
class Segments:
    """Rendered walks, each under one held action and in one scene."""

    frames: NDArray[np.uint8]  # [segment, HOLD + 1, HEIGHT, WIDTH, rgb]
    action: NDArray[np.int64]  # [segment], index into ACTIONS
    free: NDArray[np.bool_]  # [segment, HOLD]: no wall in the way of that move
    theme: NDArray[np.int64]  # [segment], index into THEMES


def render_segments(seed: int, rounds: int) -> Segments:
    """Walk `rounds` times WALKS segments: some moves of a Walker, then one action held."""
    rng = np.random.default_rng(seed)
    mazes, walker, keys = Mazes(WALKS, seed), Walker(WALKS, seed), one_hot_keys()
    parts: list[tuple[NDArray, ...]] = []
    for _ in range(rounds):
        for _ in range(WANDER):
            mazes.step(walker.keys(mazes))
        action = rng.integers(len(ACTIONS), size=WALKS)
        theme, wall = rng.integers(len(THEMES), size=WALKS), rng.integers(len(WALLS), size=WALKS)
        frames, free = [shrink(mazes.render(theme, wall))], []
        for _ in range(HOLD):
            mazes.step(keys[action])
            frames.append(shrink(mazes.render(theme, wall)))
            free.append(~mazes.blocked)
        parts.append((np.stack(frames, 1), action, np.stack(free, 1), theme))
    return Segments(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def degrade(x_BFCYX: Tensor) -> Tensor:
    """Frames as an imperfect model might draw them: soft, noisy, with flickering light."""
    batch, frames = x_BFCYX.shape[:2]
    flat = x_BFCYX.flatten(0, 1)
    soft = F.avg_pool2d(F.pad(flat, (1, 1, 1, 1), mode="replicate"), 3, 1).view_as(x_BFCYX)
    x = torch.lerp(x_BFCYX, soft, torch.rand(batch, 1, 1, 1, 1))
    gain = 1 + 0.15 * torch.randn(batch, 1, 1, 1, 1) + 0.02 * torch.randn(batch, frames, 1, 1, 1)
    return x * gain + 0.04 * torch.rand(batch, 1, 1, 1, 1) * torch.randn_like(x)


def draw_pairs(data: Segments) -> Callable[[], tuple[Tensor, Tensor]]:
    """A source of batches of (pairs of frames, action), every action equally often."""
    found = [np.argwhere(data.free & (data.action == i)[:, None]) for i in range(len(ACTIONS))]

    def draw() -> tuple[Tensor, Tensor]:
        action = torch.randint(len(ACTIONS), (BATCH,))
        rows = [found[i][int(torch.randint(len(found[i]), ()))] for i in action.tolist()]
        x = to_input(np.stack([data.frames[segment, t : t + 2] for segment, t in rows]))
        mirror, back = torch.rand(2, BATCH) < 0.5
        x[mirror] = x[mirror].flip(-1)
        action[mirror] = MIRRORED[action[mirror]]
        x[back] = x[back].flip(1)
        action[back] = REVERSED[action[back]]
        return degrade(x), action

    return draw


def draw_frames(data: Segments) -> Callable[[], tuple[Tensor, Tensor]]:
    """A source of batches of (single frames, theme)."""

    def draw() -> tuple[Tensor, Tensor]:
        segment = torch.randint(len(data.theme), (BATCH,)).numpy()
        x = to_input(data.frames[segment, torch.randint(HOLD + 1, (BATCH,)).numpy()])[:, None]
        mirror = torch.rand(BATCH) < 0.5
        x[mirror] = x[mirror].flip(-1)
        return degrade(x), torch.from_numpy(data.theme[segment])

    return draw


def fit(judge: Judge, draw: Callable[[], tuple[Tensor, Tensor]], steps: int) -> None:
    """Train a judge in place."""
    optimiser = torch.optim.AdamW(judge.parameters(), RATE, weight_decay=0.02)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, steps, pct_start=0.1)
    judge.train().to(memory_format=torch.channels_last)
    for step in range(1, steps + 1):
        x, wanted = draw()
        with torch.autocast("cpu", torch.bfloat16):
            scores = judge(x)
        loss = F.cross_entropy(scores.float(), wanted)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        rates.step()
        if step % 200 == 0:
            print(f"  step {step} of {steps}  loss {loss.item():.4f}", flush=True)
    judge.eval()


def test(judges: Judges, data: Segments) -> dict[str, float]:
    """Accuracies on rendered segments: themes a frame, actions a pair and a held segment."""
    themes = np.stack([judges.name_themes(frames) for frames in data.frames])
    weights = np.stack([judges.weigh_actions(frames) for frames in data.frames])
    right = weights.argmax(2) == data.action[:, None]
    whole = data.free.all(1)
    named = np.array([name_held_action(w) for w in weights[whole]])
    return {
        "theme, of a frame": float((themes == data.theme[:, None]).mean()),
        "action, of a pair": float(right[data.free].mean()),
        "action, of a held segment": float((named == data.action[whole]).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("pocket-data"))
    parser.add_argument("--rounds", type=int, default=60, help=f"x {WALKS} segments to train on")
    parser.add_argument("--steps", type=int, default=1500, help="of the action judge")
    args = parser.parse_args()
    cv2.setNumThreads(1)
    torch.manual_seed(0)
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {text}", flush=True)

    data = render_segments(TRAIN_SEED, args.rounds)
    say(f"rendered {data.frames.shape[0] * data.frames.shape[1]} frames")
    judges = Judges.new()
    fit(judges.theme, draw_frames(data), args.steps // 5)
    say("theme judge trained")
    fit(judges.idm, draw_pairs(data), args.steps)
    say("action judge trained")
    judges.save(args.data / "judges")
    judges = Judges.load(args.data / "judges")  # what is measured is what ships
    for name, share in test(judges, render_segments(TEST_SEED, 12)).items():
        say(f"{name}: {100 * share:.2f} %")


if __name__ == "__main__":
    main()
