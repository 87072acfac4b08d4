"""How an entry of a tier lies in a file or object, so that anything else is recognised as such.

    magic · version · checksum kind · key length · fingerprint · payload length · payload checksum
    · key · crc32 of all that · payload

The crc32 covers every byte of the header, the payload checksum every byte of the payload, and the
total length must be what the header says: a flipped bit, a missing or an added byte, an entry of
another model, codec or geometry, or of another key never passes for the one that was asked for.
The payload checksum is xxh3_128 where the optional package xxhash is installed, else crc32; the
header names which.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from streamgen.cache.tier.base import FINGERPRINT_BYTES, MAX_KEY, Corrupt, Missing

try:
    import xxhash
except ImportError:  # slower to check, as safe against accidents
    xxhash = None  # type: ignore[assignment]

MAGIC: Final = b"SGTIER\r\n"  # \r\n, so that a transfer as text is noticed
VERSION: Final = 1
CRC32, XXH3_128 = 1, 2

_FIXED: Final = struct.Struct("<8s H B B 16s Q 16s")
_CRC: Final = struct.Struct("<I")
MAX_HEADER: Final = _FIXED.size + MAX_KEY + _CRC.size


@dataclass(frozen=True)
class Header:
    """What an entry says about itself.

    Attributes:
        key: under which it was put.
        fingerprint: of the model, codec and geometry that its bytes belong to.
        length: bytes of the payload.
        kind: of the checksum: CRC32 or XXH3_128.
        checksum: of the payload, 16 bytes.
    """

    key: bytes
    fingerprint: bytes
    length: int
    kind: int
    checksum: bytes

    @property
    def size(self) -> int:
        """Bytes of the header; the payload begins there."""
        return header_bytes(self.key)


def fingerprint(**parts: object) -> bytes:
    """16 bytes that tell apart whose keys and values are not interchangeable.

    Args:
        parts: everything that shapes the bytes: `model=`, `adapters=`, `spec=` (a KVSpec, which
            names dtype and codec), how positions are stored, ... Each must have a `repr` that is
            the same in every process, as have strings, numbers, tuples and frozen dataclasses.
    """
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    for name, part in sorted(parts.items()):
        for text in (name, repr(part)):
            data = text.encode()
            digest.update(struct.pack("<Q", len(data)) + data)
    return digest.digest()


def family(fingerprint: bytes) -> str:
    """What names begin with whose entries can be told apart by their keys alone."""
    return f"v{VERSION}-{fingerprint.hex()}"


def header_bytes(key: bytes) -> int:
    """Bytes of the header of an entry of this key."""
    return _FIXED.size + len(key) + _CRC.size


def pack(key: bytes, fingerprint: bytes, payload: memoryview) -> bytes:
    """The header to put before `payload`."""
    kind = CRC32 if xxhash is None else XXH3_128
    head = _FIXED.pack(
        MAGIC, VERSION, kind, len(key), fingerprint, len(payload), _checksum(kind, payload)
    )
    head += key
    return head + _CRC.pack(zlib.crc32(head))


def parse(data: bytes | memoryview) -> Header:
    """The header at the beginning of `data`, of which `MAX_HEADER` bytes are enough.

    Raises:
        Corrupt: there is no whole and undamaged header.
    """
    if len(data) < _FIXED.size:
        raise Corrupt("it ends within the header")
    magic, version, kind, key_length, fingerprint, length, checksum = _FIXED.unpack_from(data)
    end = _FIXED.size + key_length
    if len(data) < end + _CRC.size:
        raise Corrupt("it ends within the header")
    if zlib.crc32(data[:end]) != _CRC.unpack_from(data, end)[0]:
        raise Corrupt("the header is damaged")
    if (magic, version) != (MAGIC, VERSION):
        raise Corrupt(f"it is not of format version {VERSION}")
    return Header(bytes(data[_FIXED.size : end]), fingerprint, length, kind, checksum)


def admit(data: bytes | memoryview, total: int, key: bytes, fingerprint: bytes) -> Header:
    """The header of an entry of `total` bytes, if it is the one that was asked for.

    Args:
        data: the beginning of the entry, see `parse`.
        total: bytes of the whole entry.
        key, fingerprint: what the header must say.

    Raises:
        Corrupt: the header is damaged, or the entry is another one, too short or too long.
        Missing: the checksum is of a kind that can't be computed here.
    """
    header = parse(data)
    if header.fingerprint != fingerprint:
        raise Corrupt("it belongs to another model, codec or geometry")
    if header.key != key:
        raise Corrupt("it lies under the wrong name")
    if total != header.size + header.length:
        raise Corrupt(f"it has {total:,} bytes instead of {header.size + header.length:,}")
    if header.kind not in (CRC32, XXH3_128):
        raise Missing(f"its checksum is of the unknown kind {header.kind}")
    if header.kind == XXH3_128 and xxhash is None:
        raise Missing("its checksum needs the package xxhash, which is not installed")
    return header


def check(header: Header, payload: memoryview) -> None:
    """Compare what was read with the checksum that was written.

    Raises:
        Corrupt: the payload has other bytes.
    """
    if len(payload) != header.length:
        raise Corrupt(f"its payload has {header.length:,} bytes, {len(payload):,} are needed")
    if _checksum(header.kind, payload) != header.checksum:
        raise Corrupt("the payload is damaged")


def unpack(data: memoryview, key: bytes, fingerprint: bytes, out: memoryview) -> None:
    """Copy the payload of a whole entry to `out`, verified there.

    Raises:
        Corrupt, Missing: as `admit` and `check`; `out` may have been written to.
    """
    header = admit(data, len(data), key, fingerprint)
    if len(out) == header.length:
        out[:] = data[header.size :]
    check(header, out)


def _checksum(kind: int, payload: memoryview) -> bytes:
    """Of either kind, in 16 bytes."""
    if kind == XXH3_128:
        return xxhash.xxh3_128_digest(payload)
    return zlib.crc32(payload).to_bytes(16, "little")
