"""`streamgen image`: pictures of a class into a file, alone or in rows, and how they sharpen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import ceil, sqrt
from pathlib import Path
from time import perf_counter
from typing import Any

import cv2
import numpy as np

from streamgen.apps.images import check_picture, decode_image, write_gif, write_image
from streamgen.apps.record import watchable_scale
from streamgen.errors import InvalidRequest
from streamgen.frames import fit_image

DEFAULT_MODEL = "pocket-image"
GAP = 4  # pixels between two pictures of a sheet
STEP_MS, LAST_MS = 400, 2000  # how long a gif shows a scale, and the finished picture


@dataclass(frozen=True)
class Painted:
    """What a run left.

    Args:
        path: the file.
        gif: the one that sharpens; None if it was not asked for.
        pictures: names of the pictures, in the order of the rows.
        seconds: that the model took.
    """

    path: Path
    gif: Path | None
    pictures: tuple[str, ...]
    seconds: float


def paint(
    classes: Sequence[str] = (),
    *,
    model: Any = DEFAULT_MODEL,
    output: str | Path = "image.png",
    seed: int = 0,
    grid: str | None = None,
    gif: str | Path | None = None,
    vary: int | None = None,
    from_scale: int | None = None,
    edit: str | Path | None = None,
    mask: str | Path | None = None,
    scale: int | None = None,
    sampling: dict[str, Any] | None = None,
    loading: dict[str, Any] | None = None,
) -> Painted:
    """Draw pictures and write them as one file.

    Args:
        classes: names or numbers; in a grid they take turns.
        model: a packaged name or a folder, a file of published weights, or a loaded pipeline.
        output: the picture; .png, .jpg or .webp.
        seed: of the first picture; each further one has the next.
        grid: "ROWSxCOLUMNS" pictures; by default one for each class.
        gif: the same pictures, one frame for each scale.
        vary: so many other pictures with the same coarse scales, behind the first.
        from_scale: the first scale that `vary` draws anew; by default the middle one.
        edit: path of a picture of which a part is drawn anew.
        mask: path of a picture of the same size, white where `edit` is drawn anew.
        scale: enlarge so many times; by default small pictures to some 512 pixels.
        sampling: `cfg`, `top_k`, `top_p` and `more_smooth` of the pipeline.
        loading: options of `NextScalePipeline.from_pretrained` besides `model`.

    Raises:
        InvalidRequest: any of these can't be used; nothing is written.
        UnknownModel, WeightsError: from loading.
        StreamgenError: the disk refuses.
    """
    path = check_picture(output)
    moving = None if gif is None else check_picture(gif, (".gif",))
    shape = _read_grid(grid)
    _check_ways(classes, grid, gif, vary, from_scale, edit, mask)
    if scale is not None and scale < 1:
        raise InvalidRequest(f"scale {scale}: a whole number from 1 up is needed")
    given = _read_edit(edit, mask)
    pipe = load(model, **(loading or {}))
    if scale is None:
        width = pipe.config.width
        scale = watchable_scale(width) if width < 256 else 1
    options, begun = dict(sampling or {}), perf_counter()
    steps: list[np.ndarray] = []
    if given is not None:
        size = {"width": pipe.config.width, "height": pipe.config.height}
        pixels, where = (fit_image(part, **size) for part in given)
        options["cls"] = classes[0] if classes else None
        images = [pipe.edit(pixels, where[..., 1] >= 128, seed=seed, **options)]
    elif vary is not None:
        smooth = options.pop("more_smooth", False)
        first = pipe([classes[0]], seeds=[seed], **options, more_smooth=smooth)[0]
        seeds = [seed + 1 + n for n in range(vary)]
        images = [first, *pipe.vary(first, from_scale=from_scale, n=vary, seeds=seeds, **options)]
        shape = (1, len(images))
    else:
        wanted = _wanted(classes, shape, pipe)
        for step in pipe.stream(wanted, seeds=[seed + n for n in range(len(wanted))], **options):
            steps.append(step.pixels)
            images = list(step.images)
    took = perf_counter() - begun
    write_image(path, sheet([image.pixels for image in images], shape, scale))
    if moving is not None:
        durations = [STEP_MS] * (len(steps) - 1) + [LAST_MS]
        write_gif(moving, [sheet(list(pixels), shape, scale) for pixels in steps], durations)
    return Painted(path, moving, tuple(_title(image, pipe) for image in images), took)


def load(model: Any = DEFAULT_MODEL, **loading: Any) -> Any:
    """A pipeline by name, or the one given. Raises UnknownModel, WeightsError, InvalidRequest."""
    if not isinstance(model, str):
        return model
    from streamgen.pipelines.next_scale import NextScalePipeline

    return NextScalePipeline.from_pretrained(model, **loading)


def list_classes(model: Any = DEFAULT_MODEL, **loading: Any) -> list[str]:
    """A line for each class of a model: its number and its name.

    Raises:
        UnknownModel, WeightsError, InvalidRequest: from loading.
    """
    pipe = load(model, **loading)
    if pipe.classes:
        return [f"{index:4}  {name}" for index, name in enumerate(pipe.classes)]
    return [f"classes 0 to {pipe.var.config.num_classes - 1}; their names are not in the weights"]


def sheet(
    pictures: Sequence[np.ndarray], shape: tuple[int, int] | None = None, scale: int = 1
) -> np.ndarray:
    """Pictures uint8 `[H, W, 3]` in rows, on black, with a gap between them.

    Args:
        pictures: all of one size.
        shape: rows and columns; None = nearly a square.
        scale: enlarge each so many times.
    """
    count = len(pictures)
    columns = shape[1] if shape else ceil(sqrt(count))
    rows = shape[0] if shape else ceil(count / columns)
    height, width = (n * scale for n in pictures[0].shape[:2])
    page = np.zeros((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), np.uint8)
    for index, picture in enumerate(pictures):
        if scale > 1:
            picture = cv2.resize(picture, (width, height), interpolation=cv2.INTER_LANCZOS4)
        top, left = index // columns * (height + GAP), index % columns * (width + GAP)
        page[top : top + height, left : left + width] = picture
    return page


def _read_grid(grid: str | None) -> tuple[int, int] | None:
    if grid is None:
        return None
    match = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", grid.strip().lower())
    if match is None:
        raise InvalidRequest(f"grid {grid!r}: write ROWSxCOLUMNS, as in 4x4, up to 99 each")
    return int(match[1]), int(match[2])


def _check_ways(
    classes: Sequence[str],
    grid: str | None,
    gif: str | Path | None,
    vary: int | None,
    from_scale: int | None,
    edit: str | Path | None,
    mask: str | Path | None,
) -> None:
    """Refuse options that can't go together."""
    if (edit is None) != (mask is None):
        raise InvalidRequest("--edit and --mask go together: the picture, and where it changes")
    if from_scale is not None and vary is None:
        raise InvalidRequest("--from-scale says where --vary begins: add --vary N")
    options = {"--vary": vary, "--edit": edit, "--grid": grid, "--gif": gif}
    given = [name for name, value in options.items() if value is not None]
    if given and given[0] in ("--vary", "--edit"):
        if len(given) > 1:
            raise InvalidRequest(f"{given[0]} and {given[1]} do not go together")
        if len(classes) > 1:
            raise InvalidRequest(f"{given[0]} takes one --class, and {len(classes)} are given")
    if vary is not None and not classes:
        raise InvalidRequest("--vary: say which --class (--list shows them)")
    if vary is not None and vary < 1:
        raise InvalidRequest(f"--vary {vary}: at least 1 variation")


def _read_edit(
    edit: str | Path | None, mask: str | Path | None
) -> tuple[np.ndarray, np.ndarray] | None:
    if edit is None or mask is None:
        return None
    picture, where = decode_image(edit), decode_image(mask)
    if picture.shape != where.shape:
        sizes = [f"{part.shape[1]} x {part.shape[0]}" for part in (where, picture)]
        raise InvalidRequest(f"{mask} is {sizes[0]} and {edit} {sizes[1]}: one size is needed")
    return picture, where


def _wanted(classes: Sequence[str], shape: tuple[int, int] | None, pipe: Any) -> list[str]:
    """The class of each picture."""
    names = list(classes)
    if not names and shape is not None:
        names = list(pipe.classes) or [str(n) for n in range(pipe.var.config.num_classes)]
    if not names:
        such = f", such as {pipe.classes[0]!r}" if pipe.classes else ""
        raise InvalidRequest(f"no class: say --class{such}; --list shows them all")
    return list(islice(cycle(names), shape[0] * shape[1] if shape else len(names)))


def _title(image: Any, pipe: Any) -> str:
    if image.label is None:
        return "no class"
    return str(pipe.classes[image.label] if pipe.classes else image.label)
