"""Noise levels: the published tables, presets, and lists that are no schedule."""

from __future__ import annotations

import pytest

from streamgen.errors import InvalidRequest
from streamgen.sampling.schedule import PRESETS, TRAIN_STEPS, FewStep, shifted


@pytest.mark.parametrize(
    ("steps", "shift", "timesteps"),
    [
        ((1000, 750, 500, 250), 5.0, (1000, 937.5, 833.333, 625)),
        ((1000, 750, 500, 250), 8.0, (1000, 960, 888.889, 727.273)),
        ((800, 600, 400, 200), 5.0, (952.381, 882.353, 769.231, 555.556)),
        ((800, 600, 400, 200), 8.0, (969.697, 923.077, 842.105, 666.667)),
        ((1000, 500), 1.0, (1000, 500)),
    ],
)
def test_warped_steps(steps: tuple[float, ...], shift: float, timesteps: tuple[float, ...]) -> None:
    """The table of the public codes: step u becomes 1000 * s*u / (1 + (s - 1)*u)."""
    assert FewStep(steps, shift).timesteps == pytest.approx(timesteps, abs=5e-4)


@pytest.mark.parametrize("shift", [1.0, 5.0, 8.0])
def test_table(shift: float) -> None:
    """1000 falling levels from 1 to one that is small but not 0."""
    table = FewStep((1000,), shift).table
    assert len(table) == TRAIN_STEPS and table[0] == 1.0
    assert all(a > b for a, b in zip(table, table[1:], strict=False))
    assert table[-1] == pytest.approx(shifted(0.001, shift)) and table[-1] > 0


def test_last_level_of_shift_5() -> None:
    """0.00498, as the public scheduler has it."""
    assert FewStep((1000,)).table[-1] == pytest.approx(0.00498, abs=5e-6)


@pytest.mark.parametrize("shift", [1.0, 5.0, 8.0])
def test_sigma_is_the_nearest_in_the_table(shift: float) -> None:
    """A warped step is in the table; any other takes its neighbour; 0 has none but the last."""
    schedule = FewStep((1000, 750, 500, 250), shift)
    for t in schedule.timesteps:
        assert schedule.sigma(t) == pytest.approx(t / 1000)
    assert schedule.sigma(1000 * schedule.table[500] + 1e-3) == schedule.table[500]
    assert schedule.sigma(0) == schedule.table[-1]


def test_causvid_list() -> None:
    """Its steps are warped already, and the 0 at its end is dropped."""
    preset = PRESETS["causvid"]
    assert preset.steps == preset.timesteps == (1000, 757, 522)
    assert FewStep((1000, 750, 500, 250, 0)).steps == (1000, 750, 500, 250)


def test_matrix_game_and_rolling_forcing() -> None:
    """Their lists, warped with shift 5."""
    assert PRESETS["matrix-game-2"].timesteps == pytest.approx((1000, 908.843, 713.979), abs=5e-4)
    assert PRESETS["rolling-forcing"].timesteps[1:] == FewStep((800, 600, 400, 200)).timesteps


@pytest.mark.parametrize(
    "steps", [(), (0,), (500, 1000), (500, 500), (1001,), (1000, -1), (1000, 0, 500), (500, 0, 0)]
)
def test_no_schedule(steps: tuple[float, ...]) -> None:
    """Empty, rising, level or out of range: refused, and the message says what is accepted."""
    with pytest.raises(InvalidRequest, match="falling numbers in"):
        FewStep(steps)


def test_lists_become_tuples() -> None:
    """As JSON gives them; a schedule can be a key."""
    schedule = FewStep([1000, 500])  # type: ignore[arg-type]
    assert schedule == FewStep((1000, 500)) and hash(schedule) == hash(FewStep((1000, 500)))


def test_noise_must_be_positive() -> None:
    """Without fresh noise a second step has nothing to do."""
    with pytest.raises(InvalidRequest, match="noise 0: accepted"):
        FewStep((1000,), noise=0)
