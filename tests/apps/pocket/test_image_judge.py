"""The judge of walls: what it answers with the theme judge, and how it is stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from streamgen.apps.pocket.image_data import CLASSES, render
from streamgen.apps.pocket.image_judge import FOLDER, TEST_SEED, ClassJudge, draw_walls, save
from streamgen.apps.pocket.judges import BATCH, HEIGHT, WIDTH, shrink
from streamgen.apps.pocket.maze import THEMES, WALLS


def test_class_is_theme_and_wall() -> None:
    """Biases that decide alone: the answer is the class of that theme and that wall."""
    judge = ClassJudge.new()
    for part, answer in ((judge.theme, 2), (judge.wall, 3)):
        part.head.weight.data.zero_()
        part.head.bias.data.copy_(torch.eye(4)[answer])
    frames = np.zeros((2, 96, 128, 3), np.uint8)
    named = judge.name_classes(frames)
    assert [CLASSES[i] for i in named] == [f"{THEMES[2]}, {WALLS[3]}"] * 2


def test_batches_name_the_wall() -> None:
    """White pictures of wall 1 and black ones of wall 2, of any theme, keep their answers."""
    labels = np.array([1, 5, 2, 14])  # day and night of wall 1, day and lava of wall 2
    frames = np.zeros((4, HEIGHT, WIDTH, 3), np.uint8)
    frames[:2] = 255
    torch.manual_seed(0)
    x, wall = draw_walls(frames, labels)()
    assert x.shape == (BATCH, 1, 3, HEIGHT, WIDTH)
    assert torch.equal(wall == 1, x.mean((1, 2, 3, 4)) > 0.4)
    assert set(wall.tolist()) == {1, 2}


def test_stored_and_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    judge = ClassJudge.new().wall
    save(judge, tmp_path)
    again = ClassJudge.load(tmp_path).wall
    for key, value in judge.state_dict().items():
        assert torch.allclose(again.state_dict()[key].float(), value.float(), atol=1e-3)


@pytest.mark.skipif(not (FOLDER / "wall.safetensors").exists(), reason="no shipped judge")
def test_shipped_judge_can_be_trusted() -> None:
    frames, labels = render(TEST_SEED + 7, 32, 4)
    named = ClassJudge.load().name_classes(frames)
    assert shrink(frames[:1]).shape == (1, HEIGHT, WIDTH, 3)
    assert (named == labels).mean() > 0.9
