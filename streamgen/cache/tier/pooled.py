"""A store that several machines share, through fsspec: a folder, S3, and whatever else it speaks.

    URL/v1-<fingerprint>-<key>.kv                  entries that any process of this model may use
    URL/v1-<fingerprint>-<random>-<key>.kv         entries private to one process

Names are flat, because object stores have no folders. An entry is put as a whole object, which
object stores show only once they have all of it; in a local or mounted folder (file://) it is
renamed to its name like those of a disk tier. What comes back is verified like any other entry.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

from streamgen.cache.tier import format
from streamgen.cache.tier.base import PRIVATE, BaseTier, Missing
from streamgen.cache.tier.disk import SUFFIX, key_of, write_whole
from streamgen.errors import InvalidRequest, MissingExtra, StreamgenError, TierError

STALE_SECONDS = 86_400  # a temporary file of that age was left by a crash, on whichever machine


class PooledTier(BaseTier):
    """Entries as objects below `url`.

    Private entries of a process that was killed stay in an object store until its own expiry
    rules remove them: nothing tells the machines that share it who is alive.

    Args:
        url: "file:///mnt/shared", "s3://bucket/prefix", "memory://name" or another that fsspec
            knows. A bucket must be there, a folder is made.
        fingerprint: 16 bytes, see `format.fingerprint`; entries of other models are not seen.
        capacity: payload bytes it may hold; None, the default, asks the store for no listing.
        options: for the file system, such as `endpoint_url=` or `key=` and `secret=` of s3fs.

    Raises:
        InvalidRequest: fsspec knows no such protocol, the fingerprint has another length, or the
            capacity is not positive.
        MissingExtra: the protocol needs a package that is not installed.
        TierError: the store can't be opened.
    """

    def __init__(
        self, url: str, fingerprint: bytes, capacity: int | None = None, **options: Any
    ) -> None:
        super().__init__(f"pooled tier {_public(url)}", fingerprint, capacity)
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

        try:
            self._store, root = url_to_fs(url, **options)
        except ImportError as error:
            raise MissingExtra(f"{self.name}: {error} (pip install streamgen[s3])") from error
        except ValueError as error:
            raise InvalidRequest(f"{self.name}: {error}") from error
        self._folder = Path(root) if isinstance(self._store, LocalFileSystem) else None
        root = root.rstrip("/")
        self._shared = f"{root}/{format.family(fingerprint)}-"
        self._run = f"{self._shared}{token_hex(8)}-"
        self._serial = itertools.count()
        with self._plain("can't be opened"):
            if self._folder:
                self._folder.mkdir(parents=True, exist_ok=True)
                _sweep(self._folder)
            if capacity is not None:
                self._look()

    def __contains__(self, key: object) -> bool:
        """See `Tier`."""
        with self._plain("can't be reached"):
            self._store.invalidate_cache()
            return isinstance(key, bytes) and bool(self._store.exists(self._path(key)))

    def _write(self, key: bytes, payload: memoryview) -> None:
        head = format.pack(key, self._fingerprint, payload)
        with self._plain(f"can't store {len(payload):,} bytes"):
            if self._folder:
                tmp = Path(f"{self._run}{next(self._serial)}.tmp")
                write_whole(Path(self._path(key)), tmp, (head, payload))
            else:
                self._store.pipe_file(self._path(key), b"".join((head, payload)))

    def _read(self, key: bytes, out: memoryview) -> None:
        with self._plain("can't be read"):
            try:
                data = self._store.cat_file(self._path(key))
            except FileNotFoundError:
                raise Missing("it is not there") from None
            format.unpack(memoryview(data), key, self._fingerprint, out)

    def _remove(self, key: bytes) -> None:
        with self._plain("can't be written to"), suppress(FileNotFoundError):
            self._store.rm_file(self._path(key))

    def _path(self, key: bytes) -> str:
        return f"{self._run if key.startswith(PRIVATE) else self._shared}{key.hex()}{SUFFIX}"

    def _listing(self) -> list[tuple[bytes, int]]:
        """See `BaseTier`; private entries of other processes are not in sight."""
        found = []
        with self._plain("can't be listed"):
            for file in self._objects():
                name, size = file["name"], file["size"]
                for prefix in (self._run, self._shared):
                    key = key_of(name.removeprefix(prefix)) if name.startswith(prefix) else None
                    if key is not None:
                        found.append((key, max(0, size - format.header_bytes(key))))
                        break
        return found

    def _objects(self) -> list[dict[str, Any]]:
        self._store.invalidate_cache()
        try:
            return list(self._store.ls(self._shared.rpartition("/")[0], detail=True))
        except FileNotFoundError:  # an object store has no empty folders
            return []

    @contextmanager
    def _plain(self, what: str) -> Iterator[None]:
        """Whatever the store's own library raises, as one line of ours."""
        try:
            yield
        except StreamgenError:
            raise
        except Exception as error:  # each library has its own tree of errors
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TierError(f"{self.name} {what}: {reason}") from error


def _public(url: str) -> str:
    """A URL as it may be printed: without the user's name and password."""
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    return url.replace(user + at, "", 1) if at else url


def _sweep(folder: Path) -> None:
    """Remove temporary files that a crash left long ago."""
    for tmp in folder.glob("*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - tmp.stat().st_mtime > STALE_SECONDS:
                tmp.unlink()
