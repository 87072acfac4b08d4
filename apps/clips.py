"""Video clips that people bring: read frame by frame, resampled and cut to a model's size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from streamgen.errors import InvalidRequest
from streamgen.frames import fit_image


def check_clip(path: str | Path) -> None:
    """Open a clip and look at its first picture.

    Raises:
        InvalidRequest: no such file, no video, or one whose first picture can't be decoded.
    """
    for _ in _decode(path):
        return
    raise InvalidRequest(f"{path}: its video holds no pictures")


def read_clip(
    path: str | Path, *, fps: float, width: int, height: int, most: int | None = None
) -> np.ndarray:
    """The end of a clip at a model's rate and size.

    Pictures are decoded one by one and only those that are wanted are kept. At each instant of the
    new rate the picture that a player would show then is taken; of each, the middle with the right
    proportions.

    Args:
        path: any video that FFmpeg reads.
        fps: frames a second of the result.
        width, height: of the result, in pixels.
        most: so many frames from the end are kept; None = all.

    Returns:
        uint8 `[F, H, W, 3]`, RGB.

    Raises:
        InvalidRequest: no such file, no video, or one that can't be decoded.
    """
    kept: deque[np.ndarray] = deque(maxlen=most)
    shown, pixels = None, np.empty(0)
    for picture in resample(_decode(path), Fraction(fps).limit_denominator(1001)):
        if picture is not shown:  # a slow clip shows one picture for several frames
            shown = picture
            pixels = fit_image(_upright(picture), width=width, height=height)
        kept.append(pixels)
    if not kept:
        raise InvalidRequest(f"{path}: its video holds no pictures")
    return np.stack(kept)


def resample(pictures: Iterable[tuple[Fraction, Any]], fps: Fraction) -> Iterator[Any]:
    """The picture shown at 0, 1/fps, 2/fps, ... of `(seconds, picture)` in order of time.

    The last picture stays for as long as the one before it did, or for one frame if it is alone.
    """
    count, start, held = 0, Fraction(0), None
    last = step = Fraction(0)
    for seconds, picture in pictures:
        if held is None:
            start = seconds
        now = seconds - start
        while held is not None and count / fps < now:
            yield held
            count += 1
        step, last, held = now - last, now, picture
    while held is not None and (count / fps < last + step or count == 0):
        yield held
        count += 1


def _decode(path: str | Path) -> Iterator[tuple[Fraction, Any]]:
    """`(seconds, picture)` of the first video of a file."""
    import av

    try:
        with av.open(str(path)) as file:
            if not file.streams.video:
                raise InvalidRequest(f"{path} holds no video")
            stream = file.streams.video[0]
            stream.thread_type = "AUTO"
            rate = stream.average_rate or stream.guessed_rate or 25
            for index, picture in enumerate(file.decode(stream)):
                seconds = index / Fraction(rate)
                if picture.pts is not None and picture.time_base is not None:
                    seconds = picture.pts * picture.time_base
                yield seconds, picture
    except (av.FFmpegError, OSError) as error:
        why = error.strerror or str(error)
        raise InvalidRequest(f"{path} can't be read as a video ({why})") from None


def _upright(picture: Any) -> np.ndarray:
    """Pixels as a player shows them: phones store a turn beside the picture."""
    turns = round(picture.rotation / 90) % 4
    return np.rot90(picture.to_ndarray(format="rgb24"), turns)
