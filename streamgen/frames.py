"""What crosses the border between a session and its user: pixels, and what shaped them.

Pixels are uint8 `[F, H, W, 3]` (frames, height, width, RGB) everywhere outside the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamgen.errors import InvalidRequest


@dataclass(frozen=True)
class Receipt:
    """The answer to `act` or `prompt`: `applies_at_frame` is the first frame to contain it."""

    id: int
    kind: str
    applies_at_frame: int


@dataclass(frozen=True)
class Event:
    """One line of a session's track: what was asked (`value`) and the first frame it shaped."""

    id: int
    kind: str
    value: Any
    frame: int

    def to_json(self) -> dict[str, Any]:
        """The event as plain JSON values."""
        return {"id": self.id, "kind": self.kind, "value": self.value, "frame": self.frame}


@dataclass(frozen=True)
class Timing:
    """Milliseconds spent on one chunk, by stage; `other` is what these leave of `total`."""

    dit: float = 0.0
    cache: float = 0.0
    decode: float = 0.0
    other: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class Chunk:
    """A few consecutive frames of a session, made together.

    Args:
        index: number of the chunk in its session, from 0.
        first_frame: number of `frames[0]` in its session, from 0; goes back on `rewind`.
        frames: uint8 `[F, H, W, 3]` on the CPU.
        tensor: the same pixels as a uint8 tensor on the session's device.
        timing: milliseconds by stage.
        applied: the events whose first frame lies in this chunk.
    """

    index: int
    first_frame: int
    frames: np.ndarray
    tensor: Any
    timing: Timing
    applied: tuple[Event, ...]


def fit_image(pixels: np.ndarray, *, width: int, height: int) -> np.ndarray:
    """Cut the middle of uint8 `[H, W, 3]` to the proportions of width x height, and resize."""
    import cv2

    have_height, have_width = pixels.shape[:2]
    cut_width = max(1, min(have_width, round(have_height * width / height)))
    cut_height = max(1, min(have_height, round(have_width * height / width)))
    top, left = (have_height - cut_height) // 2, (have_width - cut_width) // 2
    cut = pixels[top : top + cut_height, left : left + cut_width]
    shrinks = cut_width > width
    how = cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC
    return np.ascontiguousarray(cv2.resize(cut, (width, height), interpolation=how))


def read_image(path: str | Path) -> np.ndarray:
    """A picture file as uint8 RGB `[H, W, 3]`.

    Raises:
        InvalidRequest: there is no such file, or it is not a picture.
    """
    import cv2

    try:
        data = np.frombuffer(Path(path).read_bytes(), np.uint8)
    except OSError as error:
        raise InvalidRequest(f"image {str(path)!r} can't be read: {error.strerror}") from error
    image = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB) if data.size else None
    if image is None:
        raise InvalidRequest(f"{str(path)!r} is not a picture (accepted: PNG, JPEG, WebP, BMP)")
    return image
