"""A writer that dies: run by test_disk.py in a process of its own, without torch.

    python crash.py kill FOLDER [FAULT]     die before, or within, each operation in turn
    python crash.py cut FOLDER [FAULT]      the same as a power cut: what was not synced is lost
    python crash.py two FOLDER              two processes on one folder
    python crash.py denied FOLDER           a folder that the user may not write to

`kill` and `cut` run a script of puts and deletes once for every operation of the system in it, in a
forked child that ends itself by SIGKILL there, in the middle of it if it is a write. A reader then
opens the folder. FAULT is a mistake in the tier that this test has to notice.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))
for name in ("streamgen.cache", "streamgen.cache.tier"):  # past the fronts, which need torch
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT / name.replace(".", "/"))]
    sys.modules[name] = package

from streamgen.cache.tier import disk  # noqa: E402
from streamgen.cache.tier.base import CONTENT, PRIVATE, Missing  # noqa: E402
from streamgen.errors import TierError  # noqa: E402

FINGERPRINT = bytes(16)
SIZE = 5000
# (key, version): a put, or a delete if the version is None.
SCRIPT = (
    (CONTENT + b"a", 1),
    (CONTENT + b"b", 1),
    (CONTENT + b"a", 2),
    (PRIVATE + b"p", 1),
    (CONTENT + b"c", 1),
    (CONTENT + b"b", None),
    (CONTENT + b"a", 3),
    (CONTENT + b"b", 2),
)
KEYS = sorted({key for key, _ in SCRIPT})


def payload(key: bytes, version: int) -> memoryview:
    return memoryview(random.Random(repr((key, version))).randbytes(SIZE))


def read(tier: disk.DiskTier, key: bytes) -> memoryview | None:
    out = memoryview(bytearray(SIZE))
    try:
        tier.get(key, out)
    except Missing:
        return None
    return out


class DyingOS:
    """The module `os` with a number of operations to live, remembering what was not synced."""

    def __init__(self, life: int, power_cut: bool, fault: str) -> None:
        self.life = life
        self.count = 0
        self.power_cut = power_cut
        self.fault = fault
        self.names: dict[int, str] = {}
        self.unsynced: set[str] = set()  # files whose bytes might not be on the disk
        self.renamed: dict[str, str | None] = {}  # new name -> where its old file was set aside

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def _step(self, halfway: Callable[[], object] | None = None) -> None:
        self.count += 1
        if self.count == self.life:
            if halfway:
                halfway()
            if self.power_cut:
                self._lose()
            os.kill(os.getpid(), signal.SIGKILL)

    def _lose(self) -> None:
        for name in self.unsynced:
            if os.path.exists(name):
                os.truncate(name, os.path.getsize(name) // 2)
        for name, old in self.renamed.items():
            if old:
                os.replace(old, name)
            elif os.path.exists(name):
                os.unlink(name)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        self._step()
        file = os.open(path, flags, mode)
        self.names[file] = str(path)
        return file

    def write(self, file: int, data: memoryview) -> int:
        self.unsynced.add(self.names[file])
        self._step(lambda: os.write(file, data[: len(data) // 2]))
        return os.write(file, data)

    def fsync(self, file: int) -> None:
        self._step()
        folder = os.path.isdir(self.names[file])
        if self.fault == ("folder" if folder else "file") + " not synced":
            return
        os.fsync(file)
        self.unsynced.discard(self.names[file])
        for name, old in list(self.renamed.items()):
            if os.path.dirname(name) == self.names[file]:
                del self.renamed[name]
                if old:
                    os.unlink(old)

    def replace(self, source: Path, target: Path) -> None:
        self._step()
        old = None
        if self.power_cut and target.exists():
            old = str(target) + ".aside"
            os.link(target, old)
        os.replace(source, target)
        if str(source) in self.unsynced:
            self.unsynced.remove(str(source))
            self.unsynced.add(str(target))
        if str(target) not in self.renamed:
            self.renamed[str(target)] = old

    def unlink(self, path: Path) -> None:
        self._step()
        os.unlink(path)
        self.unsynced.discard(str(path))

    def mkdir(self, path: Path) -> None:
        self._step()
        os.mkdir(path)


def write_in_place(path: Path, tmp: Path, parts: tuple[memoryview, ...]) -> None:
    """The fault "no rename": what disk.write_whole would be if it were naive."""
    file = disk.os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for part in parts:
        disk.os.write(file, memoryview(part))
    disk.os.fsync(file)
    os.close(file)


def play(folder: Path, report: int, dying: DyingOS) -> None:
    """The script, with a byte to `report` after each step that was done."""
    disk.os = dying  # type: ignore[attr-defined]
    if dying.fault == "no rename":
        disk.write_whole = write_in_place  # type: ignore[assignment]
    tier = disk.DiskTier(folder, FINGERPRINT)
    for key, version in SCRIPT:
        if version is None:
            tier.delete(key)
        else:
            tier.put(key, payload(key, version))
        os.write(report, b".")
    os.write(report, dying.count.to_bytes(4, "big"))


def die_at(folder: Path, life: int, power_cut: bool, fault: str) -> bytes:
    """Run the script in a child with that many operations to live; what it reported."""
    receive, report = os.pipe()
    child = os.fork()
    if child == 0:
        play(folder, report, DyingOS(life, power_cut, fault))
        os._exit(0)
    os.close(report)
    done = b""
    while part := os.read(receive, 64):
        done += part
    os.close(receive)
    _, status = os.waitpid(child, 0)
    if life:
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    else:
        assert status == 0
    return done


def inspect(folder: Path, done: int) -> None:
    """After a crash `done` steps in: every entry is what it was, or what it was to become."""
    for _ in range(2):  # reading changes nothing
        tier = disk.DiskTier(folder, FINGERPRINT)
        assert tier.stats().corrupt == 0
        for key in KEYS:
            states: list[memoryview | None] = [None]
            for at, (name, version) in enumerate(SCRIPT[: done + 1]):
                if name == key:
                    state = None if version is None else payload(key, version)
                    states = [state] if at < done else [*states, state]
            found = read(tier, key)
            if key.startswith(PRIVATE):
                states = [None]
            assert found in states, f"{key!r} is none of {len(states)} states"
            assert (key in tier.keys()) == (found is not None)
        assert tier.stats().corrupt == 0
        tier.close()
    left = [path.name for path in folder.rglob("*") if path.is_file()]
    assert all(name.endswith((".kv", ".lock")) for name in left), left
    assert not list(folder.rglob("run-*"))


def crash(folder: Path, power_cut: bool, fault: str = "") -> None:
    """Die at every operation in turn."""
    whole = folder / "whole"
    done = die_at(whole, 0, power_cut, fault)
    count = int.from_bytes(done[len(SCRIPT) :], "big")
    inspect(whole, len(SCRIPT))
    for life in range(1, count + 1):
        place = folder / str(life)
        inspect(place, len(die_at(place, life, power_cut, fault)))
        shutil.rmtree(place)
    print(f"{count} points")


def neighbour(folder: Path, seed: int) -> None:
    """Put, get and delete what another process does too; open the folder anew now and then."""
    rng = random.Random(seed)
    tier = disk.DiskTier(folder, FINGERPRINT, capacity=100 * SIZE)
    mine = {}
    for step in range(300):
        key = rng.choice(KEYS)
        choice = rng.random()
        if choice < 0.4:
            version = 0 if key.startswith(CONTENT) else step
            tier.put(key, payload(key, version))
            if key.startswith(PRIVATE):
                mine[key] = version
        elif choice < 0.8:
            found = read(tier, key)
            if key.startswith(PRIVATE):
                assert found == (payload(key, mine[key]) if key in mine else None)
            else:
                assert found in (None, payload(key, 0))
        elif choice < 0.95 and key.startswith(CONTENT):
            tier.delete(key)
        else:
            tier.keys()
            disk.DiskTier(folder, FINGERPRINT).close()
    assert tier.stats().corrupt == 0
    tier.close()


def two(folder: Path) -> None:
    """Two processes in one folder hinder each other as little as two files do."""
    children = []
    for seed in (1, 2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                neighbour(folder, seed)
                code = 0
            finally:
                sys.stderr.flush()
                if code:
                    import traceback

                    traceback.print_exc()
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert not list(folder.rglob("*.tmp")) and not list(folder.rglob("run-*"))


def denied(folder: Path) -> None:
    """One line of error where the user may not write, and nothing left behind."""
    (folder / "there").mkdir()
    disk.DiskTier(folder / "there", FINGERPRINT).close()
    for path in (folder, folder / "there", folder / "there" / disk.format.family(FINGERPRINT)):
        path.chmod(0o555)
    if os.getuid() == 0:
        os.setuid(65534)
    for place in (folder / "new", folder / "there"):
        try:
            disk.DiskTier(place, FINGERPRINT)
        except TierError as error:
            assert str(error) == f"disk tier {place} can't be opened: Permission denied", error
        else:
            raise AssertionError("it was opened")
    assert not (folder / "new").exists()


if __name__ == "__main__":
    what, place, *fault = sys.argv[1:]
    if what in ("kill", "cut"):
        crash(Path(place), what == "cut", *fault)
    else:
        {"two": two, "denied": denied}[what](Path(place))
    assert "torch" not in sys.modules
