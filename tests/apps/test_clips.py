"""Clips: which picture is shown when, how much of the end is kept, which way is up."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamgen.apps import clips
from streamgen.apps.clips import read_clip, resample
from streamgen.apps.record import Mp4Writer

STEPS = st.lists(st.fractions(Fraction(1, 120), Fraction(1, 2), max_denominator=120), max_size=12)


@given(STEPS, st.sampled_from([Fraction(16), Fraction(20), Fraction(30000, 1001)]))
@settings(max_examples=25)
def test_resampling(steps: list[Fraction], fps: Fraction) -> None:
    """At k/fps it is the last picture that came by then; the last stays as the one before did."""
    times = [Fraction(7)]  # clips need not begin at 0
    for step in steps:
        times.append(times[-1] + step)
    found = list(resample(((time, index) for index, time in enumerate(times)), fps))
    length = times[-1] + (steps[-1] if steps else 0) - times[0]
    count = max(1, -int(-length * fps // 1))
    wanted = [max(i for i, t in enumerate(times) if t - times[0] <= k / fps) for k in range(count)]
    assert found == wanted


def test_no_pictures() -> None:
    """Nothing comes to nothing."""
    assert list(resample([], Fraction(20))) == []


@pytest.mark.parametrize(("fps", "most", "wanted"), [
    (30, None, range(30)),
    (15, None, range(0, 30, 2)),
    (60, None, [n // 2 for n in range(60)]),
    (30, 7, range(23, 30)),
])  # fmt: skip
def test_rates(tmp_path: Path, fps: int, most: int | None, wanted: Any) -> None:
    """Slower drops pictures, faster repeats them; `most` keeps the end."""
    grey = (np.arange(30, dtype=np.uint8) * 8)[:, None, None, None]
    with Mp4Writer(tmp_path / "c.mp4", width=64, height=32, fps=30) as video:
        video.write(np.broadcast_to(grey, (30, 32, 64, 3)))
    found = read_clip(tmp_path / "c.mp4", fps=fps, width=24, height=16, most=most)
    assert found.shape == (len(wanted), 16, 24, 3) and found.dtype == np.uint8
    assert found.mean((1, 2, 3)) == pytest.approx([8 * n for n in wanted], abs=3)


@pytest.mark.parametrize(("rotation", "top"), [(0, 1), (90, 2), (180, 4), (-180, 4), (-90, 3)])
def test_phones_turn_pictures(monkeypatch: pytest.MonkeyPatch, rotation: int, top: int) -> None:
    """A turn stored beside the picture, counter-clockwise in degrees, is applied."""
    # corners: 1 at the top left, 2 at the top right, 3 at the bottom left, 4 at the bottom right
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:4, :4], pixels[:4, 4:], pixels[4:, :4], pixels[4:, 4:] = 1, 2, 3, 4
    picture = SimpleNamespace(rotation=rotation, to_ndarray=lambda format: pixels)
    monkeypatch.setattr(clips, "_decode", lambda path: [(Fraction(0), picture)])
    [found] = read_clip("phone.mp4", fps=16, width=8, height=8)
    assert found[0, 0, 0] == top
