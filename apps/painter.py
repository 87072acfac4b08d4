"""First frames for walks: a picture of one's own, or one painted for the words of the prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from streamgen.apps.image import DEFAULT_MODEL, load
from streamgen.apps.images import read_image
from streamgen.frames import fit_image

FirstFrame = Callable[[str, int], np.ndarray]
"""(prompt, seed) -> uint8 `[H, W, 3]` of a world's size."""

GENERATED = "generated"
"""In place of a path: each walk begins with a new picture of the pocket image model."""


def first_frames(source: str | Path, *, width: int, height: int) -> FirstFrame:
    """Where a world's walks begin.

    Args:
        source: "generated" (a str), or the path of a picture.
        width, height: of the world, in pixels.

    Raises:
        InvalidRequest: the picture can't be read.
        UnknownModel, WeightsError: this installation lacks the image model.
    """
    if source != GENERATED:
        picture = read_image(source, width=width, height=height)
        return lambda prompt, seed: picture
    pipe = load(DEFAULT_MODEL)

    def paint(prompt: str, seed: int) -> np.ndarray:
        [image] = pipe([choose_class(pipe.classes, prompt, seed)], seeds=[seed])
        return fit_image(image.pixels, width=width, height=height)

    return paint


def choose_class(classes: Sequence[str], prompt: str, seed: int) -> str:
    """The class that most words of a prompt speak of; the seed decides among equals.

    A class is a list such as "lava, brick"; the pocket world's words for each of its parts count.
    """
    from streamgen.apps.pocket.prompts import THEME_WORDS, WALL_WORDS

    words = set(re.findall(r"[^\W\d_]+", prompt.lower()))
    meant = {**THEME_WORDS, **WALL_WORDS}
    hits = [
        sum(bool(words & {part, *meant.get(part, ())}) for part in map(str.strip, name.split(",")))
        for name in map(str.lower, classes)
    ]
    best = [name for name, hit in zip(classes, hits, strict=True) if hit == max(hits)]
    return best[int(np.random.default_rng(seed).integers(len(best)))]
