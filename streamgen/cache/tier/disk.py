"""A folder on a local disk as a tier: one file per entry, safe against crashes and neighbours.

    FOLDER/v1-<fingerprint>/<key>.kv              entries that any process of this model may use
    FOLDER/v1-<fingerprint>/run-<random>/         what belongs to one process, gone with it:
        .lock                                  held as long as the process lives
        <n>.tmp                                files in the making
        <key>.kv                               its private entries
    FOLDER/v1-<fingerprint>/.lock                 held while a process comes or goes

An entry is written to a temporary file, fsynced, renamed to its name, and its folder is fsynced:
only then `put` returns. So a crash, at any point, leaves an entry whole, old, or absent. There is
no index to lose: the files are the index, and every one is verified when it is read.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from secrets import token_hex

from filelock import FileLock, Timeout

from streamgen.cache.tier import format
from streamgen.cache.tier.base import PRIVATE, BaseTier, Corrupt, Missing
from streamgen.errors import TierError

SUFFIX = ".kv"


class DiskTier(BaseTier):
    """Entries as files below `folder`, which several processes may use at a time.

    What other processes put under content keys is seen; their private entries are not, and they
    don't count. If the folder or the disk fails, the error says so and the tier goes on as before.

    Args:
        folder: made if it is not there.
        fingerprint: 16 bytes, see `format.fingerprint`; entries of other models lie apart.
        capacity: payload bytes it may hold; None leaves the limit to the disk.

    Raises:
        TierError: the folder can't be made or written to.
        InvalidRequest: the fingerprint has another length, or the capacity is not positive.
    """

    def __init__(
        self, folder: str | os.PathLike[str], fingerprint: bytes, capacity: int | None = None
    ) -> None:
        super().__init__(f"disk tier {os.fspath(folder)}", fingerprint, capacity)
        self._shared = Path(folder) / format.family(fingerprint)
        self._run = self._shared / f"run-{token_hex(8)}"
        self._serial = itertools.count()
        with self._plain("can't be opened"):
            self._shared.mkdir(parents=True, exist_ok=True)
            with self._door():
                self._sweep()
                os.mkdir(self._run)
                self._alive = _lock(self._run)
                self._alive.acquire()
            for made in (self._shared, self._shared.parent, self._shared.parent.parent):
                sync_folder(made)
            self._examine()

    def close(self) -> None:
        """Remove what is private to this process. Idempotent; the tier can't be used any more."""
        if self._alive.is_locked:
            with suppress(OSError), self._door():
                shutil.rmtree(self._run, ignore_errors=True)
                self._alive.release()
            self._look()

    def __contains__(self, key: object) -> bool:
        """See `Tier`."""
        return isinstance(key, bytes) and self._path(key).exists()

    def _write(self, key: bytes, payload: memoryview) -> None:
        head = format.pack(key, self._fingerprint, payload)
        with self._plain(f"can't store {len(payload):,} bytes"):
            write_whole(self._path(key), self._run / f"{next(self._serial)}.tmp", (head, payload))

    def _read(self, key: bytes, out: memoryview) -> None:
        with self._plain("can't be read"):
            try:
                file = open(self._path(key), "rb", buffering=0)
            except FileNotFoundError:
                raise Missing("it is not there") from None
            with file:
                total = os.fstat(file.fileno()).st_size
                header = format.admit(file.read(format.MAX_HEADER), total, key, self._fingerprint)
                if header.length == len(out):
                    file.seek(header.size)
                    _fill(file, out)
                format.check(header, out)

    def _remove(self, key: bytes) -> None:
        with self._plain("can't be written to"), suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def _path(self, key: bytes) -> Path:
        folder = self._run if key.startswith(PRIVATE) else self._shared
        return folder / (key.hex() + SUFFIX)

    def _listing(self) -> list[tuple[bytes, int]]:
        """See `BaseTier`; files of other names are not ours."""
        ages = []
        for folder in (self._shared, self._run):
            with suppress(FileNotFoundError), os.scandir(folder) as files:
                for file in files:
                    key = key_of(file.name)
                    with suppress(FileNotFoundError):  # another process removed it just now
                        if key is not None and self._path(key).parent == folder:
                            stat = file.stat()
                            size = max(0, stat.st_size - format.header_bytes(key))
                            ages.append((stat.st_mtime_ns, key, size))
        return [(key, size) for _, key, size in sorted(ages)]

    def _examine(self) -> None:
        """Note every entry that an earlier process left, and delete what isn't one."""
        for key, size in self._listing():
            path = self._path(key)
            try:
                with open(path, "rb", buffering=0) as file:
                    total = os.fstat(file.fileno()).st_size
                    format.admit(file.read(format.MAX_HEADER), total, key, self._fingerprint)
            except Corrupt:
                self._corrupt += 1
                path.unlink(missing_ok=True)
            except (Missing, FileNotFoundError):
                continue
            else:
                self._account(key, size)

    def _sweep(self) -> None:
        """Remove what processes left that are no more: half-written files, private entries."""
        for run in self._shared.glob("run-*"):
            lock = _lock(run)
            with suppress(Timeout):
                lock.acquire(timeout=0)
                lock.release()
                shutil.rmtree(run)

    @contextmanager
    def _door(self) -> Iterator[None]:
        """One process at a time: between making a `run-` folder and locking it, and at its end."""
        with _lock(self._shared).acquire(timeout=60):
            yield

    @contextmanager
    def _plain(self, what: str) -> Iterator[None]:
        """An error of the system as one line of ours."""
        try:
            yield
        except (FileExistsError, NotADirectoryError) as error:
            raise TierError(f"{self.name} {what}: a file lies where a folder must be") from error
        except OSError as error:
            raise TierError(f"{self.name} {what}: {error.strerror or error}") from error


def write_whole(path: Path, tmp: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file so that it is durable and whole under its name, or not there.

    Args:
        path: its name; another file of that name is replaced.
        tmp: where it is made, on the same file system.
        parts: its bytes.

    Raises:
        OSError: it can't be written; neither `tmp` nor anything new under `path` is left.
    """
    try:
        file = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            for part in parts:
                _drain(file, memoryview(part))
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(tmp, path)
    except OSError:
        with suppress(OSError):
            os.unlink(tmp)
        raise
    try:
        sync_folder(path.parent)
    except OSError:  # it is there, but might not survive: better none than one that vanishes
        with suppress(OSError):
            os.unlink(path)
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _drain(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _fill(file: FileIO, out: memoryview) -> None:
    while out:
        count = file.readinto(out)
        if not count:
            raise Corrupt("it was cut short while it was read")
        out = out[count:]


def key_of(name: str) -> bytes | None:
    """The key that a file name spells, None if it is no name of an entry."""
    try:
        return bytes.fromhex(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
    except ValueError:
        return None


def _lock(folder: Path) -> FileLock:
    return FileLock(folder / ".lock", thread_local=False)
