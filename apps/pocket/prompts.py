"""The words that the pocket world understands, and random prompts made of them."""

import numpy as np

from streamgen.apps.pocket.maze import THEMES, WALLS

THEME_WORDS: dict[str, tuple[str, ...]] = {
    "day": ("day", "sunny", "noon", "bright", "summer", "morning", "sunlight"),
    "night": ("night", "dark", "midnight", "stars", "starry", "moonlit", "moon"),
    "snow": ("snow", "snowy", "winter", "ice", "frozen", "blizzard", "white"),
    "lava": ("lava", "volcano", "fire", "burning", "molten", "magma", "hell"),
}
WALL_WORDS: dict[str, tuple[str, ...]] = {
    "brick": ("brick", "bricks", "red"),
    "stone": ("stone", "stones", "rock"),
    "wood": ("wood", "wooden", "planks"),
    "hedge": ("hedge", "hedges", "green"),
}
NEUTRAL_WORDS = (
    "a",
    "an",
    "the",
    "maze",
    "labyrinth",
    "world",
    "corridor",
    "walls",
    "sky",
    "at",
    "in",
    "of",
    "with",
    "and",
    "through",
    "under",
    "between",
    "made",
    "now",
    "heavy",
    "walk",
    "it",
    "is",
)
VOCABULARY = tuple(
    dict.fromkeys(
        [word for group in (*THEME_WORDS.values(), *WALL_WORDS.values()) for word in group]
        + list(NEUTRAL_WORDS)
    )
)
MAX_WORDS = 10

# {t} and {w} stand for a theme word and a wall word.
BOTH = (
    "{t} {w}",
    "{w} {t}",
    "a {w} maze {t}",
    "{t} maze with {w} walls",
    "a {t} maze of {w}",
    "the {w} labyrinth under a {t} sky",
    "walk through a {t} world made of {w}",
    "{w} walls and {t}",
    "a {t} corridor between {w} walls",
    "heavy {t} in a {w} labyrinth",
    "now it is {t} in the {w} maze",
    "{t} {t2} and {w} walls",
    "a labyrinth of {w} at {t}",
)
THEME_ONLY = (
    "{t}",
    "{t} {t2}",
    "a {t} maze",
    "now {t}",
    "it is {t}",
    "walk under a {t} sky",
    "heavy {t}",
    "a {t} world",
    "the maze in {t}",
    "now it is {t} and {t2}",
    "a labyrinth at {t}",
)
WALL_ONLY = (
    "{w}",
    "{w} walls",
    "a maze of {w}",
    "a {w} maze",
    "walk between {w} walls",
    "the labyrinth is made of {w}",
    "a corridor with {w} walls",
)


def random_prompt(
    rng: np.random.Generator, theme: int, wall: int, no_wall: float = 0.2, no_theme: float = 0.1
) -> str:
    """Describe a scene in at most MAX_WORDS words of VOCABULARY.

    Args:
        rng: source of the choices.
        theme: index into THEMES.
        wall: index into WALLS.
        no_wall: chance that the wall is not named.
        no_theme: chance that the theme is not named; what is seen then stays as it is.
    """
    draw = rng.random()
    templates = THEME_ONLY if draw < no_wall else WALL_ONLY if draw > 1 - no_theme else BOTH
    first, second = rng.permutation(THEME_WORDS[THEMES[theme]])[:2]
    return str(rng.choice(templates)).format(
        t=first, t2=second, w=rng.choice(WALL_WORDS[WALLS[wall]])
    )
