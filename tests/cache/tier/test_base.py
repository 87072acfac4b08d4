"""What holds for a tier of any kind: memory, disk, a shared folder, an object store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamgen.cache.tier import Corrupt, HostTier, Missing, format
from streamgen.cache.tier.base import CONTENT, MAX_KEY, PRIVATE, BaseTier
from streamgen.errors import InvalidRequest, TierError

Make = Callable[..., BaseTier]
Damage = Callable[[BaseTier, bytes, Callable[[bytes], bytes]], None]

KINDS = ["host", "disk", "folder", "memory"]
KEYS = [CONTENT + bytes([x]) * 8 for x in range(4)]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, makers: dict[str, Make]) -> Make:
    """Opens a tier of one kind."""
    return makers[request.param]


def payload(x: int, size: int = 100) -> memoryview:
    """Bytes that tell entries apart."""
    return memoryview(bytes((x + 7 * i) % 256 for i in range(size)))


def read(tier: BaseTier, key: bytes, size: int = 100) -> memoryview:
    """The payload under a key."""
    out = bytearray(size)
    tier.get(key, memoryview(out))
    return memoryview(out)


def missing(tier: BaseTier, key: bytes) -> bool:
    """Whether a tier says that an entry is not there."""
    with pytest.raises(Missing) as caught:
        read(tier, key)
    return not isinstance(caught.value, Corrupt)


def test_round_trip(make: Make) -> None:
    """Bitwise, for several entries, in any order, more than once, of any size."""
    tier = make()
    for x, key in enumerate(KEYS):
        tier.put(key, payload(x, size=1 + 50 * x))
    for x, key in [*enumerate(KEYS)][::-1] * 2:
        assert read(tier, key, 1 + 50 * x) == payload(x, 1 + 50 * x)
    assert list(tier.keys()) == KEYS or set(tier.keys()) == set(KEYS)
    assert all(key in tier for key in KEYS) and CONTENT + b"none" not in tier
    stats = tier.stats()
    assert (stats.entries, stats.bytes, stats.hits, stats.misses) == (4, 304, 8, 0)


def test_replace(make: Make) -> None:
    """The last one put under a key is the one that counts, also in the accounts."""
    tier = make()
    tier.put(KEYS[0], payload(1, 100))
    tier.put(KEYS[0], payload(2, 60))
    assert read(tier, KEYS[0], 60) == payload(2, 60)
    assert (tier.stats().entries, tier.stats().bytes) == (1, 60)


def test_missing_and_delete(make: Make) -> None:
    """What was never put or was deleted is missing; deleting it again is nothing."""
    tier = make()
    assert missing(tier, KEYS[0])
    tier.put(KEYS[0], payload(1))
    tier.delete(KEYS[0])
    tier.delete(KEYS[0])
    assert missing(tier, KEYS[0]) and KEYS[0] not in tier
    stats = tier.stats()
    assert (stats.entries, stats.bytes, stats.misses, stats.corrupt) == (0, 0, 2, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes([data[0] ^ 128]) + data[1:],
        lambda data: data[:-1],
        lambda data: data[:10],
        lambda data: data + b"\0",
        lambda data: b"",
    ],
    ids=["payload", "header", "short", "no header", "long", "empty"],
)
def test_damage_is_a_miss(make: Make, damage: Damage, change: Callable[[bytes], bytes]) -> None:
    """It is named once, counted, and gone; a new entry takes its place."""
    tier = make()
    tier.put(KEYS[0], payload(1))
    damage(tier, KEYS[0], change)
    with pytest.raises(Corrupt, match=f"^{tier.name}, entry {KEYS[0].hex()}: [^\n]+$"):
        read(tier, KEYS[0])
    assert missing(tier, KEYS[0]) and KEYS[0] not in tier
    stats = tier.stats()
    assert (stats.entries, stats.bytes, stats.hits, stats.misses, stats.corrupt) == (0, 0, 0, 2, 1)
    tier.put(KEYS[0], payload(2))
    assert read(tier, KEYS[0]) == payload(2)


def test_exchanged_entries_are_a_miss(make: Make, damage: Damage) -> None:
    """An undamaged entry under another's name is not returned."""
    tier = make()
    tier.put(KEYS[0], payload(0))
    head = format.pack(KEYS[1], tier._fingerprint, payload(1))
    damage(tier, KEYS[0], lambda data: head + bytes(payload(1)))
    with pytest.raises(Corrupt, match="wrong name"):
        read(tier, KEYS[0])


def test_another_size_is_a_miss(make: Make) -> None:
    """A payload that doesn't fill what is asked for, or more, is not cut or padded."""
    for size in (99, 101):
        tier = make()
        tier.put(KEYS[0], payload(0))
        with pytest.raises(Corrupt, match=f"100 bytes, {size} are needed"):
            read(tier, KEYS[0], size)


def test_capacity(make: Make) -> None:
    """An entry that would be too much is refused with the numbers, and nothing of it is there."""
    tier = make(250)
    tier.put(KEYS[0], payload(0))
    tier.put(KEYS[1], payload(1))
    with pytest.raises(TierError, match=r"is full: 200 of 250 bytes are taken, 100 more are"):
        tier.put(KEYS[2], payload(2))
    assert KEYS[2] not in tier and tier.stats().bytes == 200
    tier.put(KEYS[1], payload(3, 150))  # what it replaces doesn't count
    tier.delete(KEYS[0])
    tier.put(KEYS[2], payload(2))
    assert read(tier, KEYS[1], 150) == payload(3, 150) and read(tier, KEYS[2]) == payload(2)


def test_refused_at_the_door(make: Make, makers: dict[str, Make]) -> None:
    """Keys that are empty or too long, capacities and fingerprints that can't be."""
    tier = make()
    for key in (b"", bytes(MAX_KEY + 1)):
        with pytest.raises(InvalidRequest, match="takes 1 to 64"):
            tier.put(key, payload(0))
    longest = CONTENT * MAX_KEY
    tier.put(longest, payload(0))
    assert read(tier, longest) == payload(0)
    with pytest.raises(InvalidRequest, match="capacity=-1"):
        make(-1)
    for kind in ("disk", "folder", "memory"):
        with pytest.raises(InvalidRequest, match="15 bytes: it takes 16"):
            makers[kind](fingerprint=bytes(15))


@pytest.mark.parametrize("kind", ["disk", "folder", "memory"])
def test_what_stays_and_what_goes(makers: dict[str, Make], kind: str) -> None:
    """Content is there for the next one that opens the place, private entries are not."""
    first = makers[kind]()
    first.put(KEYS[0], payload(0))
    first.put(PRIVATE + b"mine", payload(1))
    second = makers[kind](1000)
    assert list(second.keys()) == [KEYS[0]] and second.stats().bytes == 100
    assert read(second, KEYS[0]) == payload(0) and missing(second, PRIVATE + b"mine")
    second.put(PRIVATE + b"mine", payload(2))
    assert read(first, PRIVATE + b"mine") == payload(1)
    first.close()
    first.close()
    third = makers[kind]()
    assert read(third, KEYS[0]) == payload(0) and read(second, PRIVATE + b"mine") == payload(2)
    assert not first._path(PRIVATE + b"mine") == second._path(PRIVATE + b"mine")
    assert missing(first, PRIVATE + b"mine")


@pytest.mark.parametrize("kind", ["disk", "folder", "memory"])
def test_other_models_lie_apart(makers: dict[str, Make], kind: str) -> None:
    """An entry of another model, codec or geometry is not seen, counted or deleted."""
    ours, theirs = makers[kind](), makers[kind](fingerprint=bytes(16))
    ours.put(KEYS[0], payload(0))
    theirs.put(KEYS[0], payload(1))
    assert read(ours, KEYS[0]) == payload(0) and read(theirs, KEYS[0]) == payload(1)
    ours.delete(KEYS[0])
    assert missing(ours, KEYS[0]) and not ours.keys() and list(theirs.keys()) == [KEYS[0]]


@pytest.mark.parametrize("kind", ["disk", "folder", "memory"])
def test_others_change_the_medium(makers: dict[str, Make], kind: str) -> None:
    """What another process puts or deletes is seen, and the accounts follow when they matter."""
    ours, theirs = makers[kind](250), makers[kind]()
    ours.put(KEYS[0], payload(0))
    ours.put(KEYS[1], payload(1))
    theirs.delete(KEYS[0])
    assert missing(ours, KEYS[0]) and ours.stats().bytes == 100
    theirs.delete(KEYS[1])
    theirs.put(KEYS[2], payload(2))
    assert read(ours, KEYS[2]) == payload(2)
    ours.put(KEYS[3], payload(3))  # fits, since KEYS[1] is gone
    assert set(ours.keys()) == {KEYS[2], KEYS[3]}


def test_host_needs_a_capacity() -> None:
    """The memory of a process is not without end."""
    with pytest.raises(InvalidRequest, match="capacity=0"):
        HostTier(0)
