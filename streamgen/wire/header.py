"""The binary message of `streamgen.v1`: 32 bytes that say what a frame is, then the frame."""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

from streamgen.errors import InvalidRequest
from streamgen.wire.messages import PROTOCOL, VERSION


class Codec(IntEnum):
    """How the payload of a frame is coded. The gaps are kept for video codecs."""

    RGB24 = 0
    JPEG = 1
    PNG = 6


class Flag(IntFlag):
    """What a frame is to those around it."""

    KEY = 1  # decodes without any other frame
    CHUNK_START = 2
    CHUNK_END = 4
    DISCONTINUITY = 8  # first frame after a start, rewind or switch


class Header(NamedTuple):
    """The 32 bytes in front of every frame, little-endian.

    offset  0 u16 magic 0x4753   2 u8 version   3 u8 codec   4 u16 flags   6 u16 branch
            8 u32 frame          12 u32 action_seq           16 u64 pts_us
           24 f32 gen_ms         28 u16 width   30 u16 height          32 payload

    `action_seq` is the newest action that shaped the frame, so a client measures input-to-frame
    time with its own clock alone. `pts_us` is the time it is due on the stream's media clock;
    it never goes back, although `frame` does on a rewind. `gen_ms` is the chunk's time per frame.
    """

    codec: int
    flags: int
    branch: int
    frame: int
    action_seq: int
    pts_us: int
    gen_ms: float
    width: int
    height: int

    def pack(self) -> bytes:
        """The header as 32 bytes."""
        return _HEADER.pack(_MAGIC, VERSION, *self)


_MAGIC = 0x4753
_HEADER = struct.Struct("<HBBHHIIQfHH")
HEADER_BYTES = _HEADER.size


def read_frame(data: bytes) -> tuple[Header, bytes]:
    """Split a binary message into header and payload. Raises InvalidRequest if it is none."""
    if len(data) < HEADER_BYTES:
        raise InvalidRequest(f"a frame has at least {HEADER_BYTES} bytes, not {len(data)}")
    magic, version, *rest = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != VERSION:
        raise InvalidRequest(f"not a {PROTOCOL} frame: magic {magic:#x}, version {version}")
    return Header(*rest), data[HEADER_BYTES:]
