"""A frame as bytes, in the codecs of the stream."""

from __future__ import annotations

import numpy as np

from streamgen import wire

CODECS = {"jpeg": wire.Codec.JPEG, "png": wire.Codec.PNG, "rgb24": wire.Codec.RGB24}


def encode_frame(pixels: np.ndarray, codec: wire.Codec, quality: int | None = None) -> bytes:
    """One frame, uint8 `[H, W, 3]` RGB, as bytes.

    JPEG's default quality is 80, and 92 without colour subsampling below 40,000 pixels: a picture
    that small is shown enlarged, blocks and all, and costs 6 KB at most either way.
    """
    if codec is wire.Codec.RGB24:
        return pixels.tobytes()
    import cv2

    bgr = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    if codec is wire.Codec.PNG:
        done, data = cv2.imencode(".png", bgr, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    else:
        small = pixels.shape[0] * pixels.shape[1] < 40_000
        options = [cv2.IMWRITE_JPEG_QUALITY, quality or (92 if small else 80)]
        if small:
            full = cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444
            options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, full]
        done, data = cv2.imencode(".jpg", bgr, options)
    assert done, "cv2 could not encode a frame"
    return data.tobytes()
