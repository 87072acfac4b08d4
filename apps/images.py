"""Pictures: those that people bring, checked and cut to a world's size, and those they get."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from streamgen.errors import InvalidRequest, StreamgenError
from streamgen.frames import fit_image

MAX_PIXELS = 40_000_000  # a small file can unpack to gigabytes
WRITTEN = (".png", ".jpg", ".jpeg", ".webp")
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
    return fit_image(decode_image(source), width=width, height=height)


def decode_image(source: bytes | str | Path) -> np.ndarray:
    """A picture in its own size, uint8 `[H, W, 3]`, RGB; see `read_image`."""
    if not isinstance(source, bytes):
        try:
            return decode_image(Path(source).read_bytes())
        except OSError as error:
            raise InvalidRequest(f"{source}: {error.strerror or error}") from None
        except InvalidRequest as error:
            raise InvalidRequest(f"{source}: {error}") from None
    import cv2

    _check_size(source)
    pixels = cv2.imdecode(np.frombuffer(source, np.uint8), cv2.IMREAD_COLOR_RGB)
    if pixels is None:
        raise InvalidRequest(_NO_IMAGE)
    return pixels


def check_picture(path: str | Path, endings: tuple[str, ...] = WRITTEN) -> Path:
    """The path of a picture to write. Raises InvalidRequest if nothing can be written there."""
    path = Path(path)
    if path.suffix.lower() not in endings:
        raise InvalidRequest(f"{path}: the name of this picture ends in {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise InvalidRequest(f"{path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise InvalidRequest(f"{path} is a folder; name a file")
    return path


def write_image(path: Path, pixels: np.ndarray) -> None:
    """Write uint8 `[H, W, 3]` RGB as the name's ending says; whole or not at all.

    Raises:
        StreamgenError: the disk refuses.
    """
    import cv2

    done, data = cv2.imencode(path.suffix.lower(), cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))
    assert done, "cv2 could not encode a picture"
    _put(path, data.tobytes())


def write_gif(path: Path, frames: Sequence[np.ndarray], ms: Sequence[int]) -> None:
    """Write uint8 `[H, W, 3]` RGB frames, each shown for so many milliseconds, for ever.

    Raises:
        StreamgenError: the disk refuses.
    """
    from PIL import Image

    first, *others = (Image.fromarray(frame).quantize(256) for frame in frames)
    data = io.BytesIO()
    first.save(data, "gif", save_all=True, append_images=others, duration=list(ms), loop=0)
    _put(path, data.getvalue())


def _put(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StreamgenError(f"{path}: can't be written ({error.strerror or error})") from None


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
