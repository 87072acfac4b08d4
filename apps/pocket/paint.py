"""What the mazes are painted with: wall and floor textures, skies, light and fog of every theme.

Textures are square and periodic, smooth enough to be learnt, and kept at several levels of blur so
that far surfaces don't flicker. Atlases pack a colour into one uint32 (rgba bytes), so that a
single lookup fetches it.
"""

from functools import cache

import cv2
import numpy as np
from numpy.typing import NDArray

THEMES = ("day", "night", "snow", "lava")
WALLS = ("brick", "stone", "wood", "hedge")
TILE = 64  # texels along a side of a texture
LEVELS = 5  # of blur; each is twice as blurred as the one before
SKY_ROWS, SKY_COLUMNS = 44, 1024  # rows down to the horizon; columns all round

Floats = NDArray[np.float32]

# How each of the four faces of a block is lit, [theme, face]: one side faces the light.
FACES = np.array(
    [
        [0.70, 1.00, 0.84, 0.60],
        [0.80, 1.00, 0.90, 0.72],
        [0.86, 1.00, 0.93, 0.80],
        [0.76, 1.00, 0.88, 0.66],
    ],
    np.float32,
)
# Per theme: fog colour; fog per cell; light far away; extra light near the walker and its reach.
FOG = np.array([[176, 208, 236], [10, 14, 40], [214, 222, 234], [88, 22, 8]], np.float32)
DENSITY = np.array([0.045, 0.10, 0.15, 0.11], np.float32)
AMBIENT = np.array([1.0, 0.34, 1.0, 0.80], np.float32)
TORCH = np.array([0.0, 0.86, 0.0, 0.30], np.float32)
REACH = np.array([1.0, 2.4, 1.0, 2.0], np.float32)


def air(theme: NDArray[np.int64], depth: Floats) -> tuple[Floats, Floats]:
    """Light and fog on a surface: its colour is `texture * light + haze`.

    Args:
        theme: index into THEMES, broadcastable against `depth`.
        depth: in cells.

    Returns:
        Light with the shape of `depth`, and haze [*depth, rgba] in 0 to 255.
    """
    clear = np.exp(-DENSITY[theme] * depth)
    light = (AMBIENT[theme] + TORCH[theme] * np.exp(-((depth / REACH[theme]) ** 2))) * clear
    haze = np.zeros((*light.shape, 4), np.float32)
    haze[..., :3] = (1 - clear)[..., None] * FOG[theme]
    return light, haze


def _noise(rng: np.random.Generator, rows: int, columns: int, height: int, width: int) -> Floats:
    """Smooth periodic noise in 0 to 1, [height, width], with rows x columns waves."""
    coarse = np.pad(rng.random((rows, columns), np.float32), 2, mode="wrap")
    fine = cv2.resize(
        coarse, None, fx=width / columns, fy=height / rows, interpolation=cv2.INTER_CUBIC
    )
    top, left = 2 * height // rows, 2 * width // columns
    return np.clip(fine[top : top + height, left : left + width], 0, 1)


def _cells(rng: np.random.Generator, count: int, size: int) -> tuple[Floats, NDArray[np.int64]]:
    """Periodic Voronoi cells: distance to the nearest border (0 to ~1), and cell, [size, size]."""
    side = int(np.sqrt(count))
    jitter = rng.uniform(0.15, 0.85, (side, side, 2))
    points = (np.stack(np.mgrid[:side, :side], -1) + jitter).reshape(-1, 2) / side
    where = (np.stack(np.mgrid[:size, :size], -1) + 0.5) / size
    gap = np.abs(where[:, :, None] - points)
    gap = np.linalg.norm(np.minimum(gap, 1 - gap), axis=-1)
    nearest = np.sort(gap, axis=-1)
    border = (nearest[..., 1] - nearest[..., 0]) * side
    return np.clip(border, 0, 1).astype(np.float32), gap.argmin(-1)


def _mix(first: Floats, second: Floats, share: Floats) -> Floats:
    """Blend colours [..., rgb] by `share` [...]."""
    return first + (np.asarray(second, np.float32) - first) * share[..., None]


def _rgb(*colour: float) -> Floats:
    return np.array(colour, np.float32)


def _ramp(value: Floats, low: float, high: float) -> Floats:
    """0 below `low`, 1 above `high`, smooth between."""
    t = np.clip((value - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def _shrink(texture: Floats) -> Floats:
    return cv2.resize(texture, (TILE, TILE), interpolation=cv2.INTER_AREA)


def _brick(rng: np.random.Generator) -> Floats:
    size, rows, columns = 256, 5, 2
    y, x = np.mgrid[:size, :size].astype(np.float32) / size
    row = np.floor(y * rows)
    across = x * columns + 0.5 * (row % 2)
    tone = rng.random((rows, columns + 1)).astype(np.float32)
    tone[:, columns] = tone[:, 0]
    pick = tone[row.astype(int), np.floor(across).astype(int)]
    edge = np.minimum(
        np.minimum(across % 1, 1 - across % 1) / columns,
        np.minimum(y * rows % 1, 1 - y * rows % 1) / rows,
    )
    brick = _mix(_rgb(150, 54, 36), _rgb(206, 96, 62), pick)
    brick *= (1.06 - 0.16 * (y * rows % 1))[..., None]
    return _shrink(_mix(_rgb(214, 196, 172), brick, _ramp(edge, 0.010, 0.022)))


def _stone(rng: np.random.Generator) -> Floats:
    border, cell = _cells(rng, 9, 192)
    tone = rng.random(cell.max() + 1).astype(np.float32)[cell]
    stone = _mix(_rgb(122, 126, 138), _rgb(186, 184, 178), tone)
    stone = stone * (0.86 + 0.24 * _noise(rng, 6, 6, 192, 192))[..., None]
    return _shrink(_mix(_rgb(62, 64, 74), stone, _ramp(border, 0.05, 0.28)))


def _wood(rng: np.random.Generator) -> Floats:
    size, planks = 256, 4
    y, x = np.mgrid[:size, :size].astype(np.float32) / size
    plank = np.floor(x * planks).astype(int)
    tone = np.array([0.25, 0.8, 0.45, 1.0], np.float32)[plank]
    grain = _noise(rng, 2, 16, size, size)
    wood = _mix(_rgb(146, 94, 42), _rgb(208, 152, 82), 0.55 * tone + 0.45 * grain)
    edge = np.minimum(x * planks % 1, 1 - x * planks % 1) / planks
    wood = _mix(_rgb(70, 40, 18), wood, _ramp(edge, 0.004, 0.022))
    beam = np.minimum(np.abs(y - 0.2), np.abs(y - 0.8))
    return _shrink(_mix(_rgb(112, 66, 28), wood, _ramp(beam, 0.035, 0.055)))


def _hedge(rng: np.random.Generator) -> Floats:
    border, cell = _cells(rng, 49, 192)
    tone = rng.random(cell.max() + 1).astype(np.float32)[cell]
    tone = 0.6 * tone + 0.4 * _noise(rng, 5, 5, 192, 192)
    leaf = _mix(_rgb(38, 112, 34), _rgb(112, 178, 58), tone)
    return _shrink(_mix(_rgb(16, 58, 24), leaf, _ramp(border, 0.0, 0.5)))


def _dress(texture: Floats, theme: str, rng: np.random.Generator) -> Floats:
    """A wall texture as it looks in a theme, before distance and light."""
    down = np.linspace(0, 1, TILE, dtype=np.float32)[:, None]
    edge = 0.10 * _noise(rng, 1, 6, TILE, TILE)
    texture = texture * (0.72 + 0.28 * _ramp(1 - down, 0.0, 0.22))[..., None]  # a shade at the foot
    if theme == "night":
        return texture * _rgb(0.72, 0.78, 1.02)
    if theme == "snow":
        pale = _mix(texture, _rgb(206, 216, 232), np.full((TILE, TILE), 0.16, np.float32))
        snow = np.maximum(_ramp(-(down - edge), -0.16, -0.10), _ramp(down + edge, 0.93, 1.0))
        return _mix(pale, _rgb(244, 248, 255), snow)
    if theme == "lava":
        charred = texture * _rgb(0.80, 0.58, 0.52)
        glow = _ramp(down + 0.5 * edge, 0.62, 1.05)
        return charred + glow[..., None] * _rgb(190, 74, 8)
    return texture


def _floor(theme: str, rng: np.random.Generator) -> Floats:
    """A floor tile of two cells by two, [x, y, rgb]."""
    size = 256
    broad, fine = _noise(rng, 4, 4, size, size), _noise(rng, 12, 12, size, size)
    if theme == "day":
        x, y = np.mgrid[:size, :size] // (size // 2)
        checker = ((x + y) % 2).astype(np.float32)
        grass = _mix(_rgb(84, 146, 50), _rgb(138, 188, 76), 0.6 * fine + 0.4 * broad)
        earth = _mix(_rgb(186, 156, 104), _rgb(214, 188, 134), 0.6 * fine + 0.4 * broad)
        return _shrink(_mix(grass, earth, cv2.GaussianBlur(checker, (0, 0), 5)))
    if theme == "night":
        border, cell = _cells(rng, 16, size)
        tone = rng.random(cell.max() + 1).astype(np.float32)[cell]
        flag = _mix(_rgb(62, 68, 104), _rgb(104, 108, 142), 0.7 * tone + 0.3 * fine)
        return _shrink(_mix(_rgb(20, 22, 44), flag, _ramp(border, 0.03, 0.2)))
    if theme == "snow":
        drift = 0.7 * broad + 0.3 * fine
        return _shrink(_mix(_rgb(186, 204, 230), _rgb(250, 252, 255), _ramp(drift, 0.2, 0.7)))
    border, _ = _cells(rng, 16, size)
    rock = _mix(_rgb(46, 26, 26), _rgb(82, 48, 40), fine)
    vein = border + 0.25 * (broad - 0.5)
    glow = _mix(rock, _rgb(236, 84, 10), 1 - _ramp(vein, 0.06, 0.34))
    return _shrink(_mix(glow, _rgb(255, 214, 84), 1 - _ramp(vein, 0.0, 0.12)))


def _sky(theme: str, rng: np.random.Generator) -> Floats:
    """A sky all round, [row, bearing, rgb]; its last row lies at the horizon."""
    up = np.linspace(1, 0, SKY_ROWS, dtype=np.float32)[:, None]
    up = np.repeat(up, SKY_COLUMNS, axis=1)
    bearing = np.arange(SKY_COLUMNS, dtype=np.float32)[None]
    fog = FOG[THEMES.index(theme)]
    cloud = 0.65 * _noise(rng, 4, 16, SKY_ROWS, SKY_COLUMNS)
    cloud += 0.35 * _noise(rng, 11, 64, SKY_ROWS, SKY_COLUMNS)

    def disc(column: float, row: float, radius: float, soft: float) -> Floats:
        away = np.hypot(bearing - column, (np.arange(SKY_ROWS)[:, None] - row) * 2)
        return 1 - _ramp(away.astype(np.float32), radius, radius + soft)

    if theme == "day":
        sky = _mix(_rgb(206, 228, 244), _rgb(54, 124, 220), up)
        sky = _mix(sky, _rgb(255, 255, 255), 0.9 * _ramp(cloud, 0.5, 0.8))
        sky = _mix(sky, _rgb(255, 240, 170), 0.6 * disc(300, 14, 6, 60))
        return _mix(sky, _rgb(255, 250, 210), disc(300, 14, 12, 5))
    if theme == "night":
        sky = _mix(_rgb(38, 44, 98), _rgb(8, 10, 34), up)
        sky = _mix(sky, _rgb(62, 58, 118), 0.5 * _ramp(cloud, 0.5, 0.9))
        for _ in range(70):
            star = disc(rng.uniform(8, SKY_COLUMNS - 8), rng.uniform(1, SKY_ROWS - 6), 1, 4)
            sky = _mix(sky, _rgb(236, 240, 255), star * rng.uniform(0.5, 1))
        sky = _mix(sky, _rgb(120, 130, 190), 0.45 * disc(700, 14, 10, 50))
        return _mix(sky, _rgb(246, 242, 214), disc(700, 14, 14, 5))
    if theme == "snow":
        sky = _mix(fog, _rgb(160, 182, 212), up)
        sky = _mix(sky, _rgb(240, 244, 250), 0.7 * _ramp(cloud, 0.4, 0.8))
        ridge = 0.12 + 0.22 * _noise(rng, 1, 12, SKY_ROWS, SKY_COLUMNS)[:1]
        return _mix(sky, _rgb(196, 208, 228), _ramp(ridge - up, -0.03, 0.03))
    sky = _mix(_rgb(226, 88, 20), _rgb(48, 10, 12), up**0.6)
    sky = _mix(sky, _rgb(28, 12, 14), 0.8 * _ramp(cloud, 0.42, 0.75))
    ridge = 0.06 + 0.42 * _noise(rng, 1, 16, SKY_ROWS, SKY_COLUMNS)[:1] ** 2
    return _mix(sky, _rgb(42, 12, 10), _ramp(ridge - up, -0.03, 0.03))


def _pack(colours: Floats) -> NDArray[np.uint32]:
    """Flatten colours [..., rgb] into packed rgba."""
    rgba = np.zeros((*colours.shape[:-1], 4), np.uint8)
    rgba[..., :3] = np.clip(colours, 0, 255)
    return rgba.view(np.uint32).reshape(-1)


def _levels(texture: Floats) -> Floats:
    """The blurred versions of a periodic texture, [level, TILE, TILE, rgb]."""
    tiled = np.tile(texture, (3, 3, 1))
    blurred = [tiled] + [cv2.GaussianBlur(tiled, (0, 0), 0.6 * 2**i) for i in range(LEVELS - 1)]
    return np.stack(blurred)[:, TILE : 2 * TILE, TILE : 2 * TILE]


@cache
def wall_atlas() -> NDArray[np.uint32]:
    """Packed colours of [theme, wall, level, down, along]."""
    plain = [paint(np.random.default_rng(7)) for paint in (_brick, _stone, _wood, _hedge)]
    return _pack(
        np.stack(
            [
                _levels(_dress(texture, theme, np.random.default_rng(11)))
                for theme in THEMES
                for texture in plain
            ]
        )
    )


@cache
def floor_atlas() -> NDArray[np.uint32]:
    """Packed colours of [theme, level, x, y]."""
    return _pack(np.stack([_levels(_floor(theme, np.random.default_rng(3))) for theme in THEMES]))


@cache
def sky_atlas() -> NDArray[np.uint32]:
    """Packed colours of [theme, row, bearing]."""
    return _pack(np.stack([_sky(theme, np.random.default_rng(5)) for theme in THEMES]))
