"""Flights: smooth, in free space, moving on, the same again; and what is encoded of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC

from streamgen.apps.pocket.data import HELD_OUT, Clips
from streamgen.apps.pocket.flights import (
    GROUP,
    SPEED,
    Flights,
    clearance,
    encode_group,
    join_groups,
    open_dead_ends,
    plan_route,
    smooth,
)
from streamgen.apps.pocket.maze import HEIGHT, RADIUS, WALLS, WIDTH, build_grid
from streamgen.apps.pocket.prompts import THEME_WORDS, WALL_WORDS

FRAMES = 80


@pytest.fixture(scope="module")
def flights() -> Flights:
    """Enough of them to meet every kind of corner."""
    return Flights(48, 5, FRAMES)


def turning(flights: Flights) -> np.ndarray:
    """Radians a frame, [flight, frame - 1]."""
    return np.diff(np.unwrap(flights.poses[..., 2], axis=1), axis=1)


def naive_clearance(grid: np.ndarray, x: float, y: float) -> float:
    """Distance to the nearest point of any solid cell, cell by cell."""
    best = np.inf
    for i, j in np.argwhere(grid):
        across = np.array([x - np.clip(x, i, i + 1), y - np.clip(y, j, j + 1)])
        best = min(best, float(np.hypot(*across)))
    return best


def test_flights_keep_clear_of_walls(flights: Flights) -> None:
    """No frame is nearer to a wall than a walker could come."""
    for grid, poses in zip(flights.mazes.grids, flights.poses, strict=True):
        assert clearance(grid, poses[:, :2]).min() >= RADIUS - 1e-5


def test_clearance_is_the_distance_to_the_nearest_wall() -> None:
    """The distance equals that to the nearest solid cell, as far as a cell goes."""
    rng = np.random.default_rng(0)
    grid = build_grid(rng)
    points = rng.uniform(1.01, 11.99, (60, 2))
    expected = [min(1.0, naive_clearance(grid, *point)) for point in points]
    assert np.allclose(clearance(grid, points), expected)


def test_flights_are_smooth(flights: Flights) -> None:
    """Speed and turning change little from frame to frame, and nothing jumps."""
    step = np.diff(flights.poses[..., :2].astype(np.float64), axis=1)
    speed = np.linalg.norm(step, axis=2)
    assert np.abs(np.diff(speed, axis=1)).max() < 0.04
    turn = turning(flights)
    assert np.abs(turn).max() < 0.2 and np.abs(np.diff(turn, axis=1)).max() < 0.03


def test_flights_move_on_and_turn(flights: Flights) -> None:
    """Never stuck, mostly ahead, at a speed near the one meant; both left and right turns."""
    step = np.diff(flights.poses[..., :2].astype(np.float64), axis=1)
    speed = np.linalg.norm(step, axis=2)
    assert speed.min() > 0.03 and 0.7 * SPEED[0] < speed.mean() < SPEED[1]
    heading = flights.poses[:, :-1, 2]
    ahead = step[..., 0] * np.cos(heading) + step[..., 1] * np.sin(heading)
    assert (ahead / speed).mean() > 0.9
    turn = turning(flights)
    assert (turn > 0.05).any() and (turn < -0.05).any()
    assert (np.abs(turn) < 0.03).mean() > 0.25


def test_same_seed_same_flights(flights: Flights) -> None:
    """Bitwise the same poses and frames again; another seed flies elsewhere."""
    again, other = (Flights(2, seed, 12) for seed in (5, 6))
    first = Flights(2, 5, 12)
    assert np.array_equal(first.poses, again.poses)
    assert not np.array_equal(first.poses, other.poses)
    scene = np.array([0, 1]), np.array([2, 3])
    assert np.array_equal(first.draw(7, *scene), again.draw(7, *scene))
    assert first.draw(7, *scene).shape == (2, HEIGHT, WIDTH, 3)
    assert not np.array_equal(first.draw(7, *scene), first.draw(11, *scene))


def test_routes_never_turn_back() -> None:
    """With no dead ends a route goes on for ever through neighbouring free cells."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        grid = build_grid(rng)
        open_dead_ends(grid, rng)
        assert grid[0].all() and grid[-1].all() and grid[:, 0].all() and grid[:, -1].all()
        route = plan_route(grid, rng, 200)
        assert not grid[route[:, 0], route[:, 1]].any()
        assert (np.abs(np.diff(route, axis=0)).sum(1) == 1).all()
        assert (np.abs(route[3:] - route[1:-2]).sum(1) > 0).all()


def test_smoothing_keeps_lines_and_rounds_corners() -> None:
    """A straight line at even speed stays where it is; a corner is cut by 0.4 deviations."""
    line = np.stack([np.arange(400.0), 2 * np.arange(400.0)], axis=1)
    assert np.allclose(smooth(line, 10.0), line[40:-40])
    corner = np.minimum(np.arange(-200.0, 201.0), 0)[:, None]
    assert smooth(corner, 20.0)[120, 0] == pytest.approx(-20 / np.sqrt(2 * np.pi), rel=0.01)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny autoencoder of random weights."""
    folder = tmp_path_factory.mktemp("video")
    torch.manual_seed(0)
    vae = AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        encoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(0, 1),
        encoder_qkv_multiscales=((),) * 2,
        decoder_block_out_channels=(8, 8),
        decoder_layers_per_block=(0, 1),
        decoder_qkv_multiscales=((),) * 2,
        decoder_norm_types="batch_norm",
    )
    vae.save_pretrained(folder / "vae")
    stats = {"mean": [0.0] * 4, "std": [1.0] * 4}
    (folder / "vae" / "latent_stats.json").write_text(json.dumps(stats))
    (folder / "groups").mkdir()
    return folder


def test_groups_are_encoded_once(data: Path) -> None:
    """A group holds each flight in two scenes of different themes; done work is not done again."""
    path = encode_group(3, data, frames=2)
    group = dict(np.load(path))
    assert group["latents"].shape == (GROUP, 2, 2, 4, HEIGHT // 2, WIDTH // 2)
    assert (group["theme"][:, 0] != group["theme"][:, 1]).all()
    same = group["wall"][:, 0] == group["wall"][:, 1]
    assert same.any() and not same.all()
    stamp = path.stat().st_mtime_ns
    assert encode_group(3, data, frames=2) == path and path.stat().st_mtime_ns == stamp


def test_clips_of_flights_have_no_keys(tmp_path: Path) -> None:
    """Joined groups give clips without keys, whose new text names a wall that is new."""
    (tmp_path / "groups").mkdir()
    rng = np.random.default_rng(0)
    paths = []
    for i in range(HELD_OUT // GROUP + 2):
        paths.append(tmp_path / "groups" / f"{i:04d}.npz")
        theme = np.stack([rng.permutation(4)[:2] for _ in range(GROUP)]).astype(np.uint8)
        wall = rng.integers(len(WALLS), size=(GROUP, 2)).astype(np.uint8)
        latents = np.zeros((GROUP, 2, FRAMES, 2, 1, 1), np.float16)
        latents[..., 0, 0, 0], latents[..., 1, 0, 0] = theme[..., None], wall[..., None]
        np.savez(paths[-1], latents=latents, theme=theme, wall=wall)
    join_groups(tmp_path, paths)
    clip = Clips(tmp_path).sample(rng, 200, 16, 4, switching=1.0)
    assert clip["keys"].shape == (200, 16, 0)
    walls = [set(words) for words in WALL_WORDS.values()]
    changed = 0
    for i, text in enumerate(clip["prompts"][1]):
        theme, wall = clip["latents"][i, -1, :, 0, 0].int().tolist()
        assert set(text.split()) & set(list(THEME_WORDS.values())[theme])
        named = [k for k, words in enumerate(walls) if set(text.split()) & words]
        assert named in ([], [wall])
        if wall != int(clip["latents"][i, 1, 1, 0, 0]):
            assert named == [wall]
            changed += 1
    assert changed > 50
