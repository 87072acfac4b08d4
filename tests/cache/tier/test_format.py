"""An entry is recognised whole, or not at all."""

from __future__ import annotations

import pytest
import torch

from streamgen.cache import KVSpec
from streamgen.cache.tier import Corrupt, Missing, fingerprint, format

KEY, FINGERPRINT = b"ckey", bytes(range(16))
PAYLOAD = bytes(range(40))

both = pytest.mark.parametrize("kind", ["crc32", "xxh3_128"])


def entry(monkeypatch: pytest.MonkeyPatch, kind: str) -> bytes:
    """Header and payload, with either checksum."""
    if kind == "crc32":
        monkeypatch.setattr(format, "xxhash", None)
    else:
        pytest.importorskip("xxhash")
    return format.pack(KEY, FINGERPRINT, memoryview(PAYLOAD)) + PAYLOAD


def read(data: bytes, key: bytes = KEY, fingerprint: bytes = FINGERPRINT, size: int = 40) -> bytes:
    """The payload as a tier reads it."""
    out = bytearray(size)
    format.unpack(memoryview(data), key, fingerprint, memoryview(out))
    return bytes(out)


@both
def test_round_trip(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What was packed comes back, and the header says what it is."""
    data = entry(monkeypatch, kind)
    assert read(data) == PAYLOAD
    header = format.parse(data)
    assert (header.key, header.fingerprint, header.length) == (KEY, FINGERPRINT, 40)
    assert header.kind == {"crc32": format.CRC32, "xxh3_128": format.XXH3_128}[kind]
    assert header.size + 40 == len(data) and header.size <= format.MAX_HEADER


@both
def test_every_bit_counts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Each single flipped bit, in header or payload, is found."""
    data = entry(monkeypatch, kind)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            read(bytes(flipped))


@both
def test_every_length_counts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Each truncation, down to nothing, and each added tail is found."""
    data = entry(monkeypatch, kind)
    others = [data[:size] for size in range(len(data))]
    others += [data + tail for tail in (b"\0", data, PAYLOAD)]
    for other in others:
        with pytest.raises(Corrupt):
            read(other)


def test_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An undamaged entry of another model, key or size is not the one asked for."""
    data = entry(monkeypatch, "crc32")
    for wrong, reason in (
        ({"fingerprint": bytes(16)}, "another model"),
        ({"key": b"cother"}, "wrong name"),
        ({"size": 39}, "40 bytes, 39 are needed"),
        ({"size": 41}, "40 bytes, 41 are needed"),
    ):
        with pytest.raises(Corrupt, match=reason):
            read(data, **wrong)


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of a future format is no header, even if its crc32 is right."""
    monkeypatch.setattr(format, "VERSION", 2)
    data = entry(monkeypatch, "crc32")
    monkeypatch.setattr(format, "VERSION", 1)
    with pytest.raises(Corrupt, match="version 1"):
        read(data)


def test_checksum_that_cannot_be_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without xxhash, an entry that needs it is missing and not corrupt: others can read it."""
    data = entry(monkeypatch, "xxh3_128")
    monkeypatch.setattr(format, "xxhash", None)
    with pytest.raises(Missing, match="xxhash") as caught:
        read(data)
    assert not isinstance(caught.value, Corrupt)


def test_unknown_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one whose checksum only a later version knows."""
    monkeypatch.setattr(format, "xxhash", None)
    monkeypatch.setattr(format, "CRC32", 7)
    data = format.pack(KEY, FINGERPRINT, memoryview(PAYLOAD)) + PAYLOAD
    monkeypatch.undo()
    with pytest.raises(Missing, match="kind 7") as caught:
        read(data)
    assert not isinstance(caught.value, Corrupt)


def test_fingerprint() -> None:
    """It differs with every part, is the same in whatever order, and parts don't run together."""
    spec = KVSpec(num_layers=2, kv_heads=2, head_dim=4, block_tokens=3)
    base = {"model": "pocket", "adapters": ("a", "b"), "spec": spec}
    others = [
        base | {"model": "pocket2"},
        base | {"adapters": ("ab",)},
        base | {"adapters": ("b", "a")},
        base | {"spec": KVSpec(2, 2, 4, 3, torch.bfloat16)},
        base | {"spec": KVSpec(2, 2, 4, 4)},
        base | {"rope": "raw"},
        {"model": "pocket", "spec": spec},
    ]
    prints = [fingerprint(**parts) for parts in (base, *others)]
    assert len(set(prints)) == len(prints) and {len(x) for x in prints} == {16}
    assert fingerprint(**dict(reversed(base.items()))) == prints[0]
