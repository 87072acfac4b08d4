"""The judges: what they answer, how they are stored, and that the shipped ones can be trusted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from streamgen.apps.pocket import judges as module
from streamgen.apps.pocket.judges import (
    ACTIONS,
    FOLDER,
    MIRRORED,
    REVERSED,
    Judges,
    Segments,
    draw_pairs,
    name_held_action,
    one_hot_keys,
    render_segments,
    test,
)
from streamgen.apps.pocket.maze import KEYS
from streamgen.errors import WeightsError

test.__test__ = False  # a function of the module, not one of these tests
NAMES = tuple(ACTIONS)


@pytest.fixture(scope="module")
def segments() -> Segments:
    """64 held actions of walks that no judge was trained on."""
    return render_segments(seed=700_000, rounds=1)


def test_every_action_has_its_key() -> None:
    """One key for each action but idle, no key for two."""
    assert one_hot_keys().shape == (len(ACTIONS), len(KEYS))
    assert one_hot_keys().sum(0).tolist() == [1] * len(KEYS)
    assert not one_hot_keys()[NAMES.index("idle")].any()


def test_mirrors_and_reversals() -> None:
    """A mirror swaps left and right; played backwards every motion becomes its opposite."""
    sides = {"left": "right", "right": "left"}
    swapped = [" ".join(sides.get(word, word) for word in name.split()) for name in NAMES]
    assert [NAMES[i] for i in MIRRORED.tolist()] == swapped
    back = {"forward": "back", "back": "forward"}
    assert [NAMES[i] for i in REVERSED.tolist()] == [back.get(name, name) for name in swapped]


def test_votes_decide_and_weights_break_ties() -> None:
    """Most votes win, however sure the others are; between equal counts the mean weight decides."""
    weights = np.array([[0.4, 0.3, 0.3], [0.4, 0.3, 0.3], [0.0, 0.0, 1.0]], np.float32)
    assert name_held_action(weights) == 0
    assert name_held_action(weights[1:]) == 2


def test_segments_hold_one_action(segments: Segments) -> None:
    """Idle segments don't move, others do unless a wall is in the way."""
    change = np.abs(np.diff(segments.frames.astype(np.int16), axis=1)).mean(axis=(2, 3, 4))
    idle = segments.action == NAMES.index("idle")
    assert (change[idle] == 0).all()
    assert (change[~idle][segments.free[~idle]] > 0).all()


def test_batches_know_their_actions(segments: Segments) -> None:
    """Drawn pairs are frames in a sane range with an action each, all actions among them."""
    torch.manual_seed(0)
    x, action = draw_pairs(segments)()
    assert x.shape == (module.BATCH, 2, 3, module.HEIGHT, module.WIDTH)
    assert x.abs().max() < 3 and action.unique().tolist() == list(range(len(ACTIONS)))


def test_saved_judges_come_back(tmp_path: Path) -> None:
    """Both files stay under 300 KB and, up to float16, give the same answers."""
    torch.manual_seed(0)
    judges, frames = Judges.new(), np.zeros((3, 96, 128, 3), np.uint8)
    judges.save(tmp_path)
    assert all(file.stat().st_size < 300_000 for file in tmp_path.iterdir())
    loaded = Judges.load(tmp_path).weigh_actions(frames)
    np.testing.assert_allclose(loaded, judges.weigh_actions(frames), atol=1e-2)


def test_missing_judges_are_an_error(tmp_path: Path) -> None:
    """A folder without weights is named in one line."""
    with pytest.raises(WeightsError, match="theme.safetensors"):
        Judges.load(tmp_path)


def test_shipped_judges_see_what_is_real(segments: Segments) -> None:
    """On real frames of unseen mazes the judges that ship are nearly always right."""
    accuracy = test(Judges.load(FOLDER), segments)
    assert accuracy["theme, of a frame"] > 0.95
    assert accuracy["action, of a pair"] > 0.95
    assert accuracy["action, of a held segment"] > 0.97
