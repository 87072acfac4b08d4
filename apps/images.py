"""Pictures that people bring: read, checked, and cut to a world's size."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from streamgen.errors import InvalidRequest
from streamgen.frames import fit_image

MAX_PIXELS = 40_000_000  # a small file can unpack to gigabytes
_NO_IMAGE = "not an image; PNG, JPEG and WebP are read"
# First bytes -> reader. Naming the reader keeps playlists out, which would open other files.
_MAGIC = {b"\x89PNG": "png_pipe", b"\xff\xd8\xff": "jpeg_pipe", b"WEBP": "webp_pipe"}


def read_image(source: bytes | str | Path, *, width: int, height: int) -> np.ndarray:
    """A first frame for a world.

    The middle of the picture with the right proportions, resized.

    Args:
        source: the bytes of a PNG, JPEG or WebP file, or a path to one.
        width, height: of the result, in pixels.

    Returns:
        uint8 `[H, W, 3]`, RGB.

    Raises:
        InvalidRequest: no such file, no image, or one of more than 40 million pixels.
    """
    if not isinstance(source, bytes):
        try:
            return read_image(Path(source).read_bytes(), width=width, height=height)
        except OSError as error:
            raise InvalidRequest(f"{source}: {error.strerror or error}") from None
        except InvalidRequest as error:
            raise InvalidRequest(f"{source}: {error}") from None
    import cv2

    _check_size(source)
    pixels = cv2.imdecode(np.frombuffer(source, np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        raise InvalidRequest(_NO_IMAGE)
    return fit_image(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), width=width, height=height)


def _check_size(data: bytes) -> None:
    """Look at the header only: the picture is not unpacked yet."""
    import av

    kind = next(
        (
            kind
            for magic, kind in _MAGIC.items()
            if data[8:].startswith(magic) or data.startswith(magic)
        ),
        None,
    )
    if kind is None:
        raise InvalidRequest(_NO_IMAGE)
    try:
        with av.open(io.BytesIO(data), format=kind) as file:
            stream = file.streams.video[0]
            pixels = stream.width * stream.height
    except (av.FFmpegError, IndexError):
        raise InvalidRequest(_NO_IMAGE) from None
    if pixels > MAX_PIXELS:
        raise InvalidRequest(
            f"an image of {pixels / 1e6:.0f} million pixels; at most {MAX_PIXELS // 10**6} million"
        )
