"""Pictures by class: sizes, balance, and that a seed says everything."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from streamgen.apps.pocket import image_data
from streamgen.apps.pocket.image_data import CLASSES, SIDE, render, squeeze
from streamgen.apps.pocket.judges import Judges
from streamgen.apps.pocket.maze import HEIGHT, THEMES, WALLS, WIDTH


def test_classes_are_themes_times_walls() -> None:
    assert len(CLASSES) == len(THEMES) * len(WALLS) == len(set(CLASSES))
    assert CLASSES[THEMES.index("lava") * len(WALLS) + WALLS.index("brick")] == "lava, brick"


def test_every_class_equally_often() -> None:
    frames, labels = render(3, walks=16, shots=2)
    assert frames.shape == (32, HEIGHT, WIDTH, 3) and frames.dtype == np.uint8
    assert np.bincount(labels, minlength=len(CLASSES)).tolist() == [2] * len(CLASSES)
    assert not np.array_equal(labels[:16], labels[16:])  # a walk is not always in one class
    again, same = render(3, walks=16, shots=2)
    assert np.array_equal(again, frames) and np.array_equal(same, labels)
    assert not np.array_equal(render(4, walks=16, shots=2)[0], frames)


def test_labels_say_what_is_drawn() -> None:
    """The shipped judge of themes sees the theme that the label says."""
    frames, labels = render(5, walks=16, shots=2)
    named = Judges.load().name_themes(frames)
    assert (named == labels // len(WALLS)).mean() > 0.9


def test_pictures_are_squeezed_and_stored(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(image_data, "WALKS", 16)
    monkeypatch.setattr(image_data, "SHOTS", 1)
    image_data.render_all(tmp_path, 2)
    pictures = np.load(tmp_path / "pictures.npy")
    labels = np.load(tmp_path / "labels.npy")
    assert pictures.shape == (32, SIDE, SIDE, 3) and labels.shape == (32,)
    frames, wanted = render(image_data.TRAIN_SEED + 1, image_data.WALKS, image_data.SHOTS)
    assert np.array_equal(labels[16:], wanted)
    assert np.array_equal(pictures[16:], squeeze(frames))
