"""The renderer that is the pocket world's ground truth: poses, walls, keys, themes."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from streamgen.apps.pocket.maze import (
    HEIGHT,
    KEYS,
    RADIUS,
    SIZE,
    STEP,
    THEMES,
    TURN,
    WALLS,
    WIDTH,
    Mazes,
    Walker,
    build_grid,
)


def held(keys: str, num: int = 1) -> NDArray[np.float32]:
    """The rows of `Mazes.step` with these keys down."""
    return np.tile(np.array([key in keys for key in KEYS], np.float32), (num, 1))


@pytest.fixture
def room() -> Mazes:
    """One walker in the middle of an empty hall, looking along x."""
    mazes = Mazes(1, seed=0)
    mazes.grids[:, 1:-1, 1:-1] = False
    mazes.pose[0] = (SIZE / 2, SIZE / 2, 0)
    return mazes


def test_same_seed_same_frames() -> None:
    """Two walks of one seed give bitwise the same poses and frames, another seed does not."""
    seen = []
    for seed in (3, 3, 4):
        mazes, walker = Mazes(2, seed), Walker(2, seed)
        for _ in range(12):
            mazes.step(walker.keys(mazes))
        seen.append((mazes.pose, mazes.render(np.array([0, 1]), np.array([2, 3]))))
    assert all(np.array_equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
    assert not np.array_equal(seen[0][1], seen[2][1])


def test_frames_are_pixels() -> None:
    """A frame is uint8 RGB of the stated size, at least 96 x 128."""
    frames = Mazes(3, 0).render(np.zeros(3, int), np.zeros(3, int))
    assert frames.shape == (3, HEIGHT, WIDTH, 3) and frames.dtype == np.uint8
    assert HEIGHT >= 96 and WIDTH >= 128


def test_every_scene_looks_different() -> None:
    """At least 4 themes x 4 walls, each of which changes the picture of one and the same pose."""
    assert len(THEMES) >= 4 and len(WALLS) >= 4
    theme, wall = np.divmod(np.arange(len(THEMES) * len(WALLS)), len(WALLS))
    mazes = Mazes(1, 5)
    mazes.pose = np.repeat(mazes.pose, len(theme), axis=0)
    mazes.grids = np.repeat(mazes.grids, len(theme), axis=0)
    frames = mazes.render(theme, wall).astype(np.int16)
    apart = np.abs(frames[:, None] - frames[None]).mean(axis=(2, 3, 4))
    assert apart[~np.eye(len(theme), dtype=bool)].min() > 2


def test_a_theme_moves_nobody() -> None:
    """Drawing changes no pose, so one walk can be drawn under any theme."""
    mazes = Mazes(2, 1)
    before = mazes.pose.copy()
    day = mazes.render(np.array([0, 0]), np.array([0, 0]))
    mazes.render(np.array([3, 2]), np.array([1, 3]))
    assert np.array_equal(mazes.pose, before)
    assert np.array_equal(mazes.render(np.array([0, 0]), np.array([0, 0])), day)


@pytest.mark.parametrize(
    ("keys", "moved"),
    [
        ("", (0, 0, 0)),
        ("w", (STEP, 0, 0)),
        ("s", (-STEP, 0, 0)),
        ("a", (0, 0, -TURN)),
        ("d", (0, 0, TURN)),
        ("q", (0, -STEP, 0)),
        ("e", (0, STEP, 0)),
        ("ws", (0, 0, 0)),
        ("we", (STEP / 2**0.5, STEP / 2**0.5, 0)),
    ],
)
def test_keys_do_what_they_say(room: Mazes, keys: str, moved: tuple[float, float, float]) -> None:
    """Looking along x: w and s along x, q and e across it (y is to the right), a and d turn."""
    before = room.pose[0].copy()
    room.step(held(keys))
    change = room.pose[0] - before
    change[2] = (change[2] + np.pi) % (2 * np.pi) - np.pi
    np.testing.assert_allclose(change, moved, atol=1e-5)
    assert not room.blocked[0]


def test_keys_follow_the_heading(room: Mazes) -> None:
    """After a quarter turn to the right, forward is what was right before."""
    room.pose[0, 2] = np.pi / 2
    before = room.pose[0, :2].copy()
    room.step(held("w"))
    np.testing.assert_allclose(room.pose[0, :2] - before, (0, STEP), atol=1e-5)


def test_walls_stop(room: Mazes) -> None:
    """Running into a wall sets `blocked` and leaves the stated distance to it."""
    for _ in range(int(SIZE / STEP)):
        room.step(held("w"))
    assert room.blocked[0]
    assert SIZE - 1 - room.pose[0, 0] == pytest.approx(RADIUS, abs=0.01)
    room.step(held("s"))
    assert not room.blocked[0]


def test_walls_let_slide(room: Mazes) -> None:
    """Along a wall that is met at an angle, the walker moves on without passing it."""
    room.pose[0, 2] = np.pi / 4
    for _ in range(80):
        room.step(held("w"))
    room.pose[0, 1] = SIZE / 2
    room.step(held("w"))
    assert room.pose[0, 1] > SIZE / 2 + 0.5 * STEP
    assert room.pose[0, 0] < SIZE - 1 - RADIUS + 0.01


def test_nobody_walks_through_walls() -> None:
    """Over long walks no camera comes nearer to a solid cell than its radius."""
    mazes, walker = Mazes(8, 2), Walker(8, 2)
    for _ in range(150):
        mazes.step(walker.keys(mazes))
        for dx, dy in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            at = np.floor(mazes.pose[:, :2] + (RADIUS - 0.01) * np.array([dx, dy])).astype(int)
            assert not mazes.grids[np.arange(8), at[:, 0], at[:, 1]].any()


def test_a_maze_is_closed() -> None:
    """The border is solid, and there is somewhere to be."""
    grid = build_grid(np.random.default_rng(0))
    assert grid.shape == (SIZE, SIZE)
    assert grid[0].all() and grid[-1].all() and grid[:, 0].all() and grid[:, -1].all()
    assert (~grid).sum() > 30


def test_depth_is_the_distance_to_the_wall(room: Mazes) -> None:
    """A ray straight ahead ends at the wall, which lies at x = SIZE - 1."""
    depth, face, along, cosine = room.cast(np.zeros(1, np.float32))
    assert depth[0, 0] == pytest.approx(SIZE / 2 - 1)
    assert face[0, 0] == 1 and along[0, 0] == pytest.approx(0.5, abs=1e-4) and cosine[0, 0] == 1


def test_a_walker_explores() -> None:
    """The random walker presses every key, gets around, and is seldom stuck."""
    mazes, walker = Mazes(16, 7), Walker(16, 7)
    pressed, cells, blocked = np.zeros(len(KEYS), bool), [set() for _ in range(16)], 0
    for _ in range(200):
        keys = walker.keys(mazes)
        pressed |= keys.any(0)
        mazes.step(keys)
        blocked += mazes.blocked.sum()
        for seen, (x, y, _) in zip(cells, mazes.pose, strict=True):
            seen.add((int(x), int(y)))
    assert pressed.all()
    assert np.mean([len(seen) for seen in cells]) > 5
    assert blocked / (200 * 16) < 0.25
