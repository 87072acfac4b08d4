"""The disk tier: crashes, full disks, denied folders, neighbours, restarts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from streamgen.cache.tier import DiskTier, Missing, disk
from streamgen.cache.tier.base import CONTENT, PRIVATE
from streamgen.errors import TierError

Run = Callable[..., subprocess.CompletedProcess[str]]

CRASH = str(Path(__file__).with_name("crash.py"))
KEY = CONTENT + b"key"


def payload(x: int, size: int = 100) -> memoryview:
    """Bytes that tell entries apart."""
    return memoryview(bytes([x]) * size)


def read(tier: DiskTier, key: bytes = KEY) -> memoryview:
    """The payload under a key."""
    out = memoryview(bytearray(100))
    tier.get(key, out)
    return out


@pytest.mark.parametrize("how", ["kill", "cut"])
def test_crash(run_python: Run, memory_path: Path, how: str) -> None:
    """Killed at any of at least 50 operations, or cut off from power there: each entry is whole,
    the old or the new one, or absent; what `put` returned from is there; nothing else is left.
    """
    done = run_python(CRASH, how, str(memory_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= 50


@pytest.mark.parametrize(
    ("how", "fault"),
    [("kill", "no rename"), ("cut", "file not synced"), ("cut", "folder not synced")],
)
def test_crash_notices_faults(run_python: Run, memory_path: Path, how: str, fault: str) -> None:
    """A tier that leaves out a step of the order of operations fails that test."""
    done = run_python(CRASH, how, str(memory_path), fault)
    assert done.returncode == 1 and "AssertionError" in done.stderr


def test_two_processes(run_python: Run, memory_path: Path) -> None:
    """Each sees whole entries or none, no error, and keeps its private ones to itself."""
    done = run_python(CRASH, "two", str(memory_path))
    assert done.returncode == 0, done.stderr


def test_denied_folder(run_python: Run, memory_path: Path) -> None:
    """Folders that the user may not write to, new or there: one line."""
    memory_path.chmod(0o755)
    for parent in memory_path.parents:
        if not os.access(parent, os.X_OK) or parent.stat().st_mode & 0o001 == 0:
            pytest.skip(f"another user can't reach {parent}")
    done = run_python(CRASH, "denied", str(memory_path))
    memory_path.chmod(0o755)
    assert done.returncode == 0, done.stderr


def test_a_file_in_its_place(tmp_path: Path, fingerprint: bytes) -> None:
    """The folder is a file, or lies in one."""
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "folder"):
        with pytest.raises(TierError, match=f"^disk tier {place} can't be opened: a file lies"):
            DiskTier(place, fingerprint)


class FailingOS:
    """The module `os`, in which one operation of one put fails."""

    def __init__(self, at: int, error: int) -> None:
        self.left = at
        self.error = error

    def __getattr__(self, name: str) -> object:
        real = getattr(os, name)
        if name not in ("open", "write", "fsync", "replace"):
            return real

        def call(*args: object) -> object:
            self.left -= 1
            if self.left == 0:
                raise OSError(self.error, os.strerror(self.error))
            if name == "write":  # a disk may take less than it was given
                return real(args[0], args[1][:30])  # type: ignore[index]
            return real(*args)

        return call


@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EDQUOT", "EROFS"])
def test_failing_disk(
    tmp_path: Path, fingerprint: bytes, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """Whatever operation fails: one line, nothing half done, nothing left, and later it works."""
    import errno

    code = getattr(errno, error)
    line = rf"^disk tier {tmp_path} can't store 100 bytes: {os.strerror(code)}$"
    tier = DiskTier(tmp_path, fingerprint)
    for at in range(1, 100):
        tier.put(KEY, payload(1))
        before = set(tmp_path.rglob("*"))
        monkeypatch.setattr(disk, "os", FailingOS(at, code))
        try:
            tier.put(KEY, payload(2))
            break
        except TierError as caught:
            with pytest.raises(TierError, match=line):
                raise caught
        monkeypatch.undo()
        assert set(tmp_path.rglob("*")) <= before
        try:
            assert read(tier) == payload(1)
        except Missing:
            assert at > 8  # only when the folder can't be synced, after the rename
    monkeypatch.undo()
    assert at > 8 and read(tier) == payload(2) and tier.stats().bytes == 100


def test_restart(tmp_path: Path, fingerprint: bytes) -> None:
    """A new process knows what is there, the oldest first, and removes what is damaged."""
    tier = DiskTier(tmp_path, fingerprint)
    keys = [CONTENT + bytes([x]) for x in (3, 1, 2)]
    for x, key in enumerate(keys):
        tier.put(key, payload(x))
        os.utime(tier._path(key), ns=(x, x))
    broken = tier._path(CONTENT + b"broken")
    broken.write_bytes(tier._path(keys[0]).read_bytes())  # whole, but under another's name
    tier._path(keys[2]).with_suffix(".txt").write_text("not ours")
    (broken.parent / "zz.kv").write_text("not ours either")
    tier.close()
    again = DiskTier(tmp_path, fingerprint)
    assert list(again.keys()) == keys and again.stats().bytes == 300
    assert again.stats().corrupt == 1 and not broken.exists()
    assert [read(again, key) for key in keys] == [payload(x) for x in range(3)]
    assert (broken.parent / "zz.kv").exists()


def test_sweep(tmp_path: Path, fingerprint: bytes) -> None:
    """Files in the making and private entries go if their process is gone, and only then."""
    alive, gone = DiskTier(tmp_path, fingerprint), DiskTier(tmp_path, fingerprint)
    for tier in (alive, gone):
        tier.put(PRIVATE + b"key", payload(1))
        (tier._run / "7.tmp").write_text("half")
    gone._alive.release()  # what the system does for a process that ends
    late = DiskTier(tmp_path, fingerprint)
    assert not gone._run.exists()
    assert (alive._run / "7.tmp").exists() and read(alive, PRIVATE + b"key") == payload(1)
    assert list(late.keys()) == []
    (gone._shared / "run-0").mkdir()  # of a process that died before it could lock it
    DiskTier(tmp_path, fingerprint)
    assert not (gone._shared / "run-0").exists()
