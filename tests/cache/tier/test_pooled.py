"""The pooled tier: folders and stores that fsspec opens, and a real S3 server."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamgen.cache import Block, BlockPool, KVSpec
from streamgen.cache.tier import Corrupt, HostTier, Missing, PooledTier, Tiers
from streamgen.cache.tier.base import CONTENT, PRIVATE
from streamgen.errors import InvalidRequest, MissingExtra, TierError

KEY = CONTENT + b"key"
SECRET = {"key": "name", "secret": "word"}


def payload(x: int, size: int = 100) -> memoryview:
    """Bytes that tell entries apart."""
    return memoryview(bytes([x]) * size)


def read(tier: PooledTier, key: bytes = KEY, size: int = 100) -> memoryview:
    """The payload under a key."""
    out = memoryview(bytearray(size))
    tier.get(key, out)
    return out


# Any store


def test_refused_at_the_door(fingerprint: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A protocol that fsspec doesn't know, and one whose package is not installed."""
    with pytest.raises(InvalidRequest, match="^pooled tier nonsense://x: .*nonsense"):
        PooledTier("nonsense://x", fingerprint)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtra, match=r"^pooled tier s3://x: .*s3fs.*streamgen\[s3\]"):
        PooledTier("s3://x", fingerprint)


def test_no_password_in_a_message(fingerprint: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL with a user's name and password is printed without them."""
    with pytest.raises(InvalidRequest) as caught:
        PooledTier("nonsense://name:word@host/x", fingerprint)
    assert "nonsense://host/x" in str(caught.value) and "word" not in str(caught.value)


def test_a_file_in_its_place(tmp_path: Path, fingerprint: bytes) -> None:
    """One line, with the place in it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match=f"^pooled tier file://{tmp_path}/file can't be opened: "):
        PooledTier(f"file://{tmp_path}/file", fingerprint)


def test_folder_is_written_whole(
    tmp_path: Path, fingerprint: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shared folder an entry is renamed to its name, never written there."""
    tier = PooledTier(f"file://{tmp_path}", fingerprint)
    tier.put(KEY, payload(1))
    replace = os.replace

    def check(source: Path, target: Path) -> None:
        assert read(tier) == payload(1) and Path(source).stat().st_size > 100
        replace(source, target)

    monkeypatch.setattr(os, "replace", check)
    tier.put(KEY, payload(2))
    assert read(tier) == payload(2) and len(list(tmp_path.iterdir())) == 1


def test_stale_files_go(tmp_path: Path, fingerprint: bytes) -> None:
    """A temporary file of yesterday was left by a crash; a fresh one may be another machine's."""
    old, fresh = tmp_path / "old.tmp", tmp_path / "fresh.tmp"
    for path in (old, fresh):
        path.write_text("half")
    os.utime(old, (0, 0))
    tier = PooledTier(f"file://{tmp_path}", fingerprint, 1000)
    assert not old.exists() and fresh.exists() and not tier.keys()


def test_capacity_of_a_store_that_is_not_empty(fingerprint: bytes) -> None:
    """What lies there counts from the start."""
    PooledTier("memory://count", fingerprint).put(KEY, payload(1))
    assert PooledTier("memory://count", fingerprint, 1000).stats().bytes == 100
    assert PooledTier("memory://count", fingerprint).stats().bytes == 0  # it did not look


def test_errors_of_the_store(fingerprint: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a store's library raises is one line of ours, and not a miss."""
    tier = PooledTier("memory://faults", fingerprint)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the line\n  is down")

    for name in ("pipe_file", "cat_file", "rm_file", "ls", "exists"):
        monkeypatch.setattr(tier._store, name, fail)
    calls = {
        "can't store 100 bytes": lambda: tier.put(KEY, payload(1)),
        "can't be read": lambda: read(tier),
        "can't be written to": lambda: tier.delete(KEY),
        "can't be listed": tier.keys,
        "can't be reached": lambda: KEY in tier,
    }
    for what, call in calls.items():
        with pytest.raises(TierError) as caught:
            call()
        assert str(caught.value) == f"pooled tier memory://faults {what}: the line is down"
        assert not isinstance(caught.value, Missing)


# A server


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """An S3 server (moto) in a process of its own, and its URL."""
    for name in ("moto", "flask", "flask_cors", "s3fs"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (the dev extra has it)")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            assert process.poll() is None, "the S3 server ended"
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def options(server: tuple[subprocess.Popen[bytes], str], request: pytest.FixtureRequest) -> Any:
    """What opens the server's store, in which there is a bucket for this test."""
    import s3fs

    options = {**SECRET, "endpoint_url": server[1]}
    bucket = re.sub(r"[^a-z0-9]+", "-", request.node.name).strip("-")
    s3fs.S3FileSystem(**options).mkdir(bucket)
    return {"url": f"s3://{bucket}/tier", **options}


def test_s3(options: Any, fingerprint: bytes) -> None:
    """Put, get, replace, delete and list, by two clients that see each other's content."""
    one = PooledTier(fingerprint=fingerprint, capacity=10_000, **options)
    two = PooledTier(fingerprint=fingerprint, use_listings_cache=False, **options)
    other_model = PooledTier(fingerprint=bytes(16), **options)
    assert list(two.keys()) == [] and KEY not in two
    one.put(KEY, payload(1))
    one.put(PRIVATE + b"mine", payload(2))
    assert KEY in two and read(two) == read(one) == payload(1)
    assert PRIVATE + b"mine" not in two and read(one, PRIVATE + b"mine") == payload(2)
    assert list(two.keys()) == [KEY] and not other_model.keys()
    with pytest.raises(Missing):
        read(other_model)
    two.put(KEY, payload(3, 70))
    assert read(one, size=70) == payload(3, 70)
    one.close()
    assert PRIVATE + b"mine" not in one and KEY in one
    two.delete(KEY)
    two.delete(KEY)
    with pytest.raises(Missing):
        read(one)
    assert KEY not in one and not one.keys() and one.stats().bytes == 0


@pytest.mark.parametrize("how", ["flip", "cut", "exchange"])
def test_s3_damage(options: Any, fingerprint: bytes, how: str) -> None:
    """An object that was changed, cut or exchanged is deleted and never returned."""
    tier = PooledTier(fingerprint=fingerprint, **options)
    tier.put(KEY, payload(1))
    tier.put(CONTENT + b"other", payload(1))
    store, path = tier._store, tier._path(KEY)
    data = store.cat_file(path)
    changed = {
        "flip": data[:-9] + b"\0" + data[-8:],
        "cut": data[:-1],
        "exchange": store.cat_file(tier._path(CONTENT + b"other")),
    }
    store.pipe_file(path, changed[how])
    with pytest.raises(Corrupt):
        read(tier)
    assert not store.exists(path) and tier.stats().corrupt == 1


def test_s3_behind_a_pool(options: Any, fingerprint: bytes) -> None:
    """Blocks of a pool go to the server and come back; another pool finds content there."""
    spec = KVSpec(num_layers=2, kv_heads=2, head_dim=4, block_tokens=3)

    def open_tiers() -> tuple[BlockPool, Tiers]:
        pool = BlockPool(spec, 4)
        pooled = PooledTier(fingerprint=fingerprint, **options)
        return pool, Tiers(pool, [HostTier(spec.block_bytes), pooled])

    pool, tiers = open_tiers()
    blocks: list[Block] = pool.alloc(4)
    for x, block in enumerate(blocks):
        for tensor in pool._storage:
            tensor[block.slot] = x + 1
        block.sealed = True
        tiers.store(bytes([x]), block)
        tiers.demote(block)
    assert [stats.entries for stats in tiers.stats()] == [1, 7]
    for x, block in enumerate(blocks):
        tiers.promote(block)
        assert all(bool((tensor[block.slot] == x + 1).all()) for tensor in pool._storage)
    tiers.close()

    pool, tiers = open_tiers()
    for x in range(4):
        block = tiers.fetch(bytes([x]))
        assert block and float(pool.k[0][block.slot].unique()) == x + 1


def test_s3_without_a_bucket(options: Any, fingerprint: bytes) -> None:
    """None is made: one line says so. Nothing is found there."""
    tier = PooledTier(fingerprint=fingerprint, **options | {"url": "s3://no-such-bucket/tier"})
    with pytest.raises(TierError, match="^pooled tier s3://no-such-bucket/tier can't store 100 b"):
        tier.put(KEY, payload(1))
    assert KEY not in tier and not tier.keys()
    with pytest.raises(Missing):
        read(tier)


def test_s3_server_gone(fingerprint: bytes, server: object) -> None:
    """A server that doesn't answer is an error in one line; behind it, blocks are misses."""
    quick = {"connect_timeout": 1, "retries": {"max_attempts": 0}}
    tier = PooledTier(
        "s3://bucket",
        fingerprint,
        endpoint_url=f"http://127.0.0.1:{free_port()}",
        config_kwargs=quick,
        **SECRET,
    )
    tier._store.retries = 1
    for call in (lambda: tier.put(KEY, payload(1)), lambda: read(tier)):
        with pytest.raises(TierError, match="^pooled tier s3://bucket can't [^\n]+$") as caught:
            call()
        assert not isinstance(caught.value, Missing)
    pool = BlockPool(KVSpec(num_layers=1, kv_heads=1, head_dim=2, block_tokens=1), 2)
    assert Tiers(pool, [tier]).fetch(b"key") is None
