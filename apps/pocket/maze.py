"""Walks through procedural mazes, drawn from the first person: the pocket world's ground truth.

A theme (sky, floor, light) and a wall material are arguments of `Mazes.render` only, so one walk
can be drawn under any of them. Positions are in cells, headings in radians; a growing heading
turns right, because y grows to the right of someone who looks along x.
"""

from functools import cache

import cv2
import numpy as np
from numpy.typing import NDArray

from streamgen.apps.pocket import paint

KEYS = ("w", "s", "a", "d", "q", "e")  # forward, back, turn left, turn right, strafe left, right
THEMES = paint.THEMES
WALLS = paint.WALLS
HEIGHT, WIDTH = 96, 128  # pixels of a frame
STEP = 0.12  # cells a frame
TURN = 0.10  # radians a frame

SIZE = 13  # cells along a side of the maze, its border included; odd
RADIUS = 0.25  # cells kept between the camera and every wall
EYE, TOP = 0.45, 0.85  # heights of the camera and of the walls, in cells
HORIZON = paint.SKY_ROWS  # the row at eye height
FOCAL = 88.0  # pixels; a horizontal field of view of 72 degrees
FINE = 2  # samples a pixel along each axis: jagged edges are hard to learn
CHUNK = 4  # walks drawn together: small enough to stay in the cache

Floats = NDArray[np.float32]


def build_grid(rng: np.random.Generator, openness: float = 0.35) -> NDArray[np.bool_]:
    """Carve a maze and open some of its walls, so that there are rooms and long views.

    Returns:
        Walls [x=SIZE, y=SIZE], true where a cell is solid.
    """
    grid = np.ones((SIZE, SIZE), bool)
    start = (1, 1)
    grid[start] = False
    path = [start]
    while path:
        x, y = path[-1]
        ways = [
            (x + dx, y + dy, x + dx // 2, y + dy // 2)
            for dx, dy in ((2, 0), (-2, 0), (0, 2), (0, -2))
            if 0 < x + dx < SIZE and 0 < y + dy < SIZE and grid[x + dx, y + dy]
        ]
        if not ways:
            path.pop()
            continue
        next_x, next_y, door_x, door_y = ways[rng.integers(len(ways))]
        grid[next_x, next_y] = grid[door_x, door_y] = False
        path.append((next_x, next_y))
    opened = rng.random(grid.shape) < openness
    grid[1:-1, 1:-1] &= ~opened[1:-1, 1:-1]
    return grid


class Mazes:
    """Many independent walks, each in a maze of its own, moved and drawn together.

    Attributes:
        grids: walls [walk, x, y].
        pose: [walk, (x, y, heading)], float32, in cells and radians.
        blocked: [walk], whether a wall took more than a quarter of the last move.
    """

    def __init__(self, num: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.grids = np.stack([build_grid(rng) for _ in range(num)])
        cells = np.stack([rng.permutation(np.argwhere(~grid))[0] for grid in self.grids])
        heading = rng.uniform(0, 2 * np.pi, (num, 1))
        self.pose: Floats = np.concatenate([cells + 0.5, heading], axis=1).astype(np.float32)
        self.blocked = np.zeros(num, bool)

    def step(self, keys: NDArray) -> None:
        """Move every walk by one frame; walks slide along walls.

        Args:
            keys: which of KEYS are held, [walk, key], bool or 0/1.
        """
        forward, back, left, right, strafe_left, strafe_right = np.asarray(keys, np.float32).T
        self.pose[:, 2] = (self.pose[:, 2] + TURN * (right - left)) % (2 * np.pi)
        cos, sin = np.cos(self.pose[:, 2]), np.sin(self.pose[:, 2])
        ahead, aside = forward - back, strafe_right - strafe_left
        scale = STEP / np.maximum(np.hypot(ahead, aside), 1)  # diagonals are no faster
        wanted = np.stack([ahead * cos - aside * sin, ahead * sin + aside * cos], axis=1)
        wanted *= scale[:, None]
        before = self.pose[:, :2].copy()
        for axis in (0, 1):
            self._slide(axis, wanted[:, axis])
        moved = np.linalg.norm(self.pose[:, :2] - before, axis=1)
        self.blocked = moved < 0.75 * np.linalg.norm(wanted, axis=1)

    def _slide(self, axis: int, delta: Floats) -> None:
        """Move along one axis by `delta` [walk], up to the nearest wall."""
        target = self.pose[:, :2].copy()
        target[:, axis] += delta
        edge = target[:, axis] + RADIUS * np.sign(delta)
        walks = np.arange(len(target))
        hit = np.zeros(len(target), bool)
        for side in (-RADIUS, RADIUS):
            probe = np.empty((2, len(target)), np.int64)
            probe[axis] = np.floor(edge)
            probe[1 - axis] = np.floor(target[:, 1 - axis] + side)
            hit |= self.grids[walks, probe[0], probe[1]]
        contact = np.where(delta > 0, np.floor(edge) - RADIUS, np.ceil(edge) + RADIUS)
        contact -= 1e-3 * np.sign(delta)
        self.pose[:, axis] = np.where(hit & (delta != 0), contact, target[:, axis])

    def cast(self, slopes: Floats) -> tuple[Floats, NDArray[np.int64], Floats, Floats]:
        """Follow rays to the first wall.

        Args:
            slopes: [ray], sideways over forward component of each ray; right is positive.

        Returns:
            Per [walk, ray]: depth along the heading in cells; the face that was hit (0, 1 across
            x, 2, 3 across y); where along that face in cells, 0 to 1; the cosine of incidence.
        """
        walks = np.arange(len(self.pose))[:, None]
        x, y, heading = (self.pose[:, i, None] for i in range(3))
        cos, sin = np.cos(heading), np.sin(heading)
        ray_x, ray_y = cos - sin * slopes, sin + cos * slopes
        ray_x = np.where(np.abs(ray_x) < 1e-6, np.float32(1e-6), ray_x)
        ray_y = np.where(np.abs(ray_y) < 1e-6, np.float32(1e-6), ray_y)
        pace_x, pace_y = 1 / np.abs(ray_x), 1 / np.abs(ray_y)
        sign_x, sign_y = np.sign(ray_x).astype(np.int64), np.sign(ray_y).astype(np.int64)
        cell_x = np.broadcast_to(np.floor(x), ray_x.shape).astype(np.int64)
        cell_y = np.broadcast_to(np.floor(y), ray_x.shape).astype(np.int64)
        next_x = np.where(sign_x > 0, cell_x + 1 - x, x - cell_x) * pace_x
        next_y = np.where(sign_y > 0, cell_y + 1 - y, y - cell_y) * pace_y
        across_x = np.zeros(ray_x.shape, bool)
        going = np.ones(ray_x.shape, bool)
        while going.any():
            turn = next_x < next_y
            across_x = np.where(going, turn, across_x)
            move_x, move_y = going & turn, going & ~turn
            cell_x += move_x * sign_x
            cell_y += move_y * sign_y
            next_x += move_x * pace_x
            next_y += move_y * pace_y
            going &= ~self.grids[walks, cell_x, cell_y]
        depth = np.where(across_x, next_x - pace_x, next_y - pace_y).astype(np.float32)
        along = np.where(across_x, y + depth * ray_y, x + depth * ray_x) % 1
        face = np.where(across_x, (sign_x > 0), 2 + (sign_y > 0))
        cosine = np.where(across_x, np.abs(ray_x), np.abs(ray_y)) / np.hypot(1, slopes)
        return np.maximum(depth, 0.05), face, along.astype(np.float32), cosine.astype(np.float32)

    def render(self, theme: NDArray[np.integer], wall: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Draw what every walk sees.

        Args:
            theme: index into THEMES, [walk].
            wall: index into WALLS, [walk].

        Returns:
            Frames [walk, row=HEIGHT, column=WIDTH, rgb].
        """
        frames = np.empty((len(self.pose), HEIGHT, WIDTH, 3), np.uint8)
        columns = (np.arange(WIDTH * FINE, dtype=np.float32) + 0.5) / FINE - WIDTH / 2
        columns /= FOCAL
        depth, face, along, cosine = self.cast(columns)
        for first in range(0, len(frames), CHUNK):
            part = slice(first, first + CHUNK)
            where = np.asarray(theme[part], np.int64)
            ground = self._draw_background(self.pose[part], where, columns)
            frames[part] = self._draw_walls(
                ground,
                depth[part],
                face[part],
                along[part],
                cosine[part],
                where,
                np.asarray(wall[part], np.int64),
            )
        return frames

    @staticmethod
    def _draw_background(pose: Floats, theme: NDArray[np.int64], columns: Floats) -> Floats:
        """Sky and floor, [walk, row, column * rgba], in samples: each row is one long vector."""
        num, horizon = len(pose), HORIZON * FINE
        x, y, heading = (pose[:, i, None, None] for i in range(3))
        picture = np.empty((num, HEIGHT * FINE, WIDTH * FINE * 4), np.float32)
        bearing = (heading + np.arctan(columns)) * (paint.SKY_COLUMNS / (2 * np.pi))
        sky = theme[:, None, None] * HORIZON + np.arange(horizon)[:, None] // FINE
        sky = sky * paint.SKY_COLUMNS + bearing.astype(np.int64) % paint.SKY_COLUMNS
        picture[:, :horizon] = paint.sky_atlas().take(sky).view(np.uint8)

        depth, level = _floor_rows()
        cos, sin = np.cos(heading), np.sin(heading)
        scale = depth[:, None] * np.float32(paint.TILE / 2)  # a floor tile spans two cells
        floor_x = (x * (paint.TILE / 2) + scale * (cos - sin * columns)).astype(np.int32)
        floor_y = (y * (paint.TILE / 2) + scale * (sin + cos * columns)).astype(np.int32)
        texel = (floor_x & (paint.TILE - 1)) * paint.TILE + (floor_y & (paint.TILE - 1))
        tile = (theme[:, None] * paint.LEVELS + level) * paint.TILE**2
        texel += tile[..., None].astype(np.int32)
        light, haze = paint.air(theme[:, None], depth[None])
        floor = picture[:, horizon:]
        np.multiply(paint.floor_atlas().take(texel).view(np.uint8), light[..., None], out=floor)
        floor += np.tile(haze, (1, 1, WIDTH * FINE))
        return picture

    @staticmethod
    def _draw_walls(
        ground: Floats,
        depth: Floats,
        face: NDArray[np.int64],
        along: Floats,
        cosine: Floats,
        theme: NDArray[np.int64],
        wall: NDArray[np.int64],
    ) -> NDArray[np.uint8]:
        """Blend the walls over `ground`, with edges softened over one pixel."""
        rows = (np.arange(HEIGHT * FINE, dtype=np.float32)[:, None] + 0.5) / FINE - HORIZON
        size = (FOCAL / depth)[:, None]  # pixels a cell
        down = (rows / size + (TOP - EYE)) * np.float32(paint.TILE / TOP)
        row = np.clip(down, 0, paint.TILE - 1, out=down).astype(np.int32)
        footprint = depth * (paint.TILE / FOCAL) / np.maximum(cosine, 0.25)  # texels a pixel
        level = np.clip(np.log2(footprint) + 1, 0, paint.LEVELS - 1).astype(np.int64)
        base = ((theme * len(WALLS) + wall)[:, None] * paint.LEVELS + level) * paint.TILE**2
        base += (along * paint.TILE).astype(np.int64)
        texel = row * paint.TILE + base[:, None].astype(np.int32)
        light, haze = paint.air(theme[:, None], depth)
        light = light * paint.FACES[theme[:, None], face]
        picture = paint.wall_atlas().take(texel).view(np.uint8).astype(np.float32)
        picture *= np.repeat(light, 4, axis=1)[:, None]
        picture += haze.reshape(len(depth), 1, -1)

        wide = np.repeat(size, 4, axis=2)
        cover = np.minimum(rows + wide * (TOP - EYE), wide * EYE - rows) + 0.5
        np.clip(cover, 0, 1, out=cover)
        picture -= ground
        picture *= cover
        picture += ground
        np.clip(picture, 0, 255, out=picture)
        samples = picture.astype(np.uint8).reshape(-1, WIDTH * FINE, 4)
        frames = cv2.resize(
            cv2.cvtColor(samples, cv2.COLOR_RGBA2RGB),
            (WIDTH, len(samples) // FINE),
            interpolation=cv2.INTER_AREA,
        )
        return frames.reshape(-1, HEIGHT, WIDTH, 3)


@cache
def _floor_rows() -> tuple[Floats, NDArray[np.int64]]:
    """Depth in cells and texture level of each row of samples below the horizon, [row]."""
    rows = (np.arange((HEIGHT - HORIZON) * FINE, dtype=np.float32) + 0.5) / FINE
    depth = EYE * FOCAL / rows
    footprint = depth**2 / (EYE * FOCAL) * paint.TILE / 2
    level = np.clip(np.log2(footprint) + 1, 0, paint.LEVELS - 1).astype(np.int64)
    return depth.astype(np.float32), level


class Walker:
    """Random key presses that explore: held for some frames, and turning away from walls."""

    CHOICES = (
        ("w", 0.36),
        ("wa", 0.11),
        ("wd", 0.11),
        ("a", 0.09),
        ("d", 0.09),
        ("s", 0.06),
        ("", 0.05),
        ("q", 0.04),
        ("e", 0.04),
        ("wq", 0.025),
        ("we", 0.025),
    )

    def __init__(self, num: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.table = np.array([[key in held for key in KEYS] for held, _ in self.CHOICES])
        self.chances = np.array([chance for _, chance in self.CHOICES])
        self.held = np.zeros((num, len(KEYS)), bool)
        self.left = np.zeros(num, np.int64)

    def keys(self, mazes: Mazes) -> NDArray[np.bool_]:
        """Choose the keys of the next frame, [walk, key]."""
        num = len(self.held)
        room = mazes.cast(np.array([-0.7, 0.0, 0.7], np.float32))[0]
        # Nobody learns from a wall that fills the view: mostly turn to where there is more room.
        near = room[:, 1] < 0.75
        expired = (self.left <= 0) | (near & self.held[:, 0])
        choice = self.rng.choice(len(self.table), num, p=self.chances)
        self.held[expired] = self.table[choice[expired]]
        self.left[expired] = self.rng.integers(3, 11, num)[expired]
        stuck = expired & near & (self.rng.random(num) < 0.85)
        letters = np.where(room[:, 0] > room[:, 2], KEYS.index("a"), KEYS.index("d"))
        self.held[stuck] = np.eye(len(KEYS), dtype=bool)[letters[stuck]]
        self.left[stuck] = self.rng.integers(6, 13, num)[stuck]
        self.left -= 1
        return self.held.copy()
