"""Rotary positions: the formula, far frames, and that only differences count."""

from __future__ import annotations

import cmath

import pytest
import torch
from torch import Tensor

from streamgen.models.rope import THETA, axis_pairs, rotate, rotate_real, rotation

GRID, HEAD = (3, 4), 24
TOKENS = GRID[0] * GRID[1]
FAR = 5_000_000


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scores(query_frame: int, key_frames: list[int]) -> Tensor:
    """Scores of one frame's queries with the keys of some frames; the data are always the same."""
    q = random(1, TOKENS, 2, HEAD, seed=1)
    k = random(1, TOKENS * len(key_frames), 2, HEAD, seed=2)
    q = rotate(q, rotation([query_frame], GRID, HEAD))
    k = rotate(k, rotation(key_frames, GRID, HEAD))
    return torch.einsum("bthd,buhd->bhtu", q, k)


@pytest.mark.parametrize(
    ("head", "split"), [(128, (22, 21, 21)), (64, (12, 10, 10)), (24, (4, 4, 4))]
)
def test_wan_split(head: int, split: tuple[int, int, int]) -> None:
    """Wan2.1: 22 of a 128-wide head's pairs turn with time, 21 with height, 21 with width."""
    assert axis_pairs(head) == split


@pytest.mark.parametrize("frame", [0, 7, 1023, 1024, FAR])
def test_formula(frame: int) -> None:
    """Pair i of an axis with P pairs turns by position / 10000^(i/P), tokens row by row."""
    turn = rotation([frame], GRID, HEAD)
    row, col = 2, 3
    places = [
        (p, i, n)
        for p, n in zip((frame, row, col), axis_pairs(HEAD), strict=True)
        for i in range(n)
    ]
    expected = [cmath.exp(1j * place / THETA ** (i / n)) for place, i, n in places]
    torch.testing.assert_close(
        turn[row * GRID[1] + col], torch.tensor(expected, dtype=torch.complex64), atol=1e-6, rtol=0
    )


def test_interleaved_pairs() -> None:
    """Channels 2i and 2i+1 are one complex number; by hand for a quarter turn."""
    x = torch.arange(4.0).view(1, 1, 1, 4)
    quarter = torch.tensor([[1j, 1j]], dtype=torch.complex64)
    assert rotate(x, quarter).flatten().tolist() == [-1, 0, -3, 2]


@pytest.mark.parametrize("frame", [3, FAR])
def test_real_twin(frame: int) -> None:
    """`rotate_real` is `rotate` without complex numbers."""
    x, turn = random(2, 2 * TOKENS, 3, HEAD), rotation([frame, frame + 1], GRID, HEAD)
    torch.testing.assert_close(rotate_real(x, turn), rotate(x, turn), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    """Both compute in float32 and give back what they got."""
    x, turn = random(1, TOKENS, 1, HEAD).to(dtype), rotation([5], GRID, HEAD)
    assert rotate(x, turn).dtype == rotate_real(x, turn).dtype == dtype


def test_far_frames_are_exact() -> None:
    """Frame 5,000,000: finite, and its scores with the frames before it are those of frame 3."""
    assert torch.view_as_real(rotation(range(FAR, FAR + 3), GRID, HEAD)).isfinite().all()
    near, far = scores(3, [0, 1, 3]), scores(FAR, [FAR - 3, FAR - 2, FAR])
    torch.testing.assert_close(far, near, atol=1e-4, rtol=0)


def test_angles_in_float32_would_not_do() -> None:
    """The same with single-precision angles is wrong by far more, so the test above sees it."""
    pairs = axis_pairs(128)[0]
    angles = FAR * THETA ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    assert (angles.float().double() - angles).abs().max() > 0.01


def test_lengths_are_kept() -> None:
    """A rotation changes no norm."""
    x = random(1, TOKENS, 2, HEAD)
    turned = rotate(x, rotation([123], GRID, HEAD))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("shift", [1, 1000, FAR])
def test_only_differences_count(shift: int) -> None:
    """A window that moves as a whole, its sink along with it, scores the same: `sliding_sink`."""
    window = [0, 1, 2, 3, 4, 5]
    here = scores(5, window)
    there = scores(5 + shift, [frame + shift for frame in window])
    torch.testing.assert_close(there, here, atol=1e-4, rtol=0)


def test_a_sink_left_behind_scores_otherwise() -> None:
    """Moving all but the sink is another model: `absolute`."""
    assert (scores(5, [0, 4, 5]) - scores(105, [0, 104, 105])).abs().max() > 0.1
