"""Random prompts: what they say and what they are made of."""

from __future__ import annotations

import numpy as np

from streamgen.apps.pocket.maze import THEMES, WALLS
from streamgen.apps.pocket.prompts import (
    MAX_WORDS,
    THEME_WORDS,
    VOCABULARY,
    WALL_WORDS,
    random_prompt,
)
from streamgen.models.text import WordEncoder

SCENES = [(theme, wall) for theme in range(len(THEMES)) for wall in range(len(WALLS))]


def names(text: str, words: dict[str, tuple[str, ...]]) -> set[str]:
    """Which groups of `words` a text names."""
    return {name for name, group in words.items() if set(text.split()) & set(group)}


def test_vocabulary_has_no_doubles() -> None:
    """Every word is there once, in lower case, and the renderer's own names are among them."""
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    assert all(word == word.lower() and word.isalpha() for word in VOCABULARY)
    assert {*THEMES, *WALLS} <= set(VOCABULARY)


def test_words_are_not_ambiguous() -> None:
    """No word stands for two themes, two walls, or a theme and a wall."""
    groups = [*THEME_WORDS.values(), *WALL_WORDS.values()]
    assert len({word for group in groups for word in group}) == sum(map(len, groups))


def test_prompts_fit_the_encoder() -> None:
    """Every prompt is made of known words and not longer than the encoder takes."""
    rng, encoder = np.random.default_rng(0), WordEncoder(VOCABULARY, 8, MAX_WORDS)
    for _ in range(40):
        for scene in SCENES:
            known, unknown = encoder.split(random_prompt(rng, *scene))
            assert known and not unknown


def test_prompts_name_their_scene() -> None:
    """A prompt names its own theme or wall and never another one."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        for theme, wall in SCENES:
            text = random_prompt(rng, theme, wall)
            themes, walls = names(text, THEME_WORDS), names(text, WALL_WORDS)
            assert themes | walls
            assert themes <= {THEMES[theme]} and walls <= {WALLS[wall]}


def test_both_can_be_asked_for() -> None:
    """With no chance of leaving one out, theme and wall are both named; the seed decides how."""
    texts = [random_prompt(np.random.default_rng(2), *s, no_wall=0, no_theme=0) for s in SCENES]
    for text, (theme, wall) in zip(texts, SCENES, strict=True):
        assert names(text, THEME_WORDS) == {THEMES[theme]}
        assert names(text, WALL_WORDS) == {WALLS[wall]}
    again = [random_prompt(np.random.default_rng(2), *s, no_wall=0, no_theme=0) for s in SCENES]
    assert texts == again
