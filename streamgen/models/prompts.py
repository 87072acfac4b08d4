"""Encoded texts on disk, so that a text's second run needs no text encoder.

An entry is a safetensors file named by what the rows depend on: the encoder's identity, the cleaned
text and the type. Only the rows of real tokens are stored; the zeros after them are put back. An
entry carries a digest of itself, and one that is damaged, or is not what its name says, counts as
missing. Processes may share a folder: an entry appears whole under its name or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad

from streamgen.cache.tier.disk import write_whole

_FORMAT = "1"  # part of every key; raise it where rows or entries get another meaning
_ENTRY = re.compile(r"[0-9a-f]{64}\.safetensors")
_PART = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]+\.part")
_STALE = 3600.0  # seconds after which an unfinished file has no writer any more


class RowEncoder(Protocol):
    """What `CachedText` asks of an encoder (`streamgen.models.umt5.Umt5Text`)."""

    rows: int
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where encoded texts are given."""
        ...

    @property
    def identity(self) -> str:
        """Names what the rows depend on besides text and type; the same in every process."""
        ...

    def clean(self, text: str) -> str:
        """The text as it is encoded."""
        ...

    def encode(self, cleaned: str) -> tuple[Tensor, int]:
        """Rows `[n, text_dim]` of the real tokens, and how many tokens the text has."""
        ...

    def unknown(self, text: str) -> list[str]:
        """What is left out of a text."""
        ...

    def to(self, device: torch.device, stream: bool = False) -> Any:
        """Run on a device."""
        ...

    def unload(self) -> None:
        """Drop the weights."""
        ...


def default_prompt_cache() -> Path | None:
    """`$XDG_CACHE_HOME/streamgen/prompts`, else `~/.cache/streamgen/prompts`; None without a home.

    As the XDG base directory specification says, a relative path in the variable is ignored.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "streamgen" / "prompts"


def pad_rows(rows_ND: Tensor, length: int) -> Tensor:
    """Rows of real tokens, followed by zero rows up to `length`."""
    return pad(rows_ND, (0, 0, 0, length - len(rows_ND)))


def warn_if_cut(tokens: int, limit: int) -> None:
    """Say so where a text has more tokens than are read."""
    if tokens > limit:
        warnings.warn(
            f"the prompt has {tokens} tokens; {limit} are read and the rest is left out",
            stacklevel=3,
        )


class CachedText:
    """A text encoder with its results kept in a folder.

    A folder that can't be written (read-only, full) costs one warning, and texts are encoded anew.

    Args:
        encoder: asked only for texts that the folder lacks.
        folder: made when the first entry is written.
        max_bytes: of all entries; those unused for longest go first.
    """

    def __init__(self, encoder: RowEncoder, folder: Path | str, max_bytes: int = 2 * 2**30) -> None:
        self.encoder, self.folder, self.max_bytes = encoder, Path(folder), max_bytes
        self._warned = False

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Encode to `[B, rows, text_dim]` on the encoder's device; zeros after the real tokens."""
        cleaned = [self.encoder.clean(text) for text in texts]
        found = {text: self._find(text) for text in dict.fromkeys(cleaned)}
        for _, tokens in found.values():
            warn_if_cut(tokens, self.encoder.rows)
        rows = [pad_rows(found[text][0], self.encoder.rows) for text in cleaned]
        return torch.stack(rows).to(self.encoder.device)

    def clean(self, text: str) -> str:
        """The text as it is encoded."""
        return self.encoder.clean(text)

    def unknown(self, text: str) -> list[str]:
        """What the encoder leaves out of a text."""
        return self.encoder.unknown(text)

    @property
    def identity(self) -> str:
        """The encoder's."""
        return self.encoder.identity

    @property
    def rows(self) -> int:
        """Rows of an encoded text."""
        return self.encoder.rows

    @property
    def dtype(self) -> torch.dtype:
        """Type of encoded texts."""
        return self.encoder.dtype

    @property
    def device(self) -> torch.device:
        """Where encoded texts are given."""
        return self.encoder.device

    def to(self, device: torch.device, stream: bool = False) -> Self:
        """Move the encoder (`RowEncoder.to`)."""
        self.encoder.to(device, stream=stream)
        return self

    def unload(self) -> None:
        """Drop the encoder's weights; a text that the folder lacks reads them again."""
        self.encoder.unload()

    def key(self, cleaned: str) -> str:
        """Name of the entry of a cleaned text."""
        parts = [_FORMAT, self.encoder.identity, str(self.encoder.dtype), self.rows, cleaned]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _find(self, cleaned: str) -> tuple[Tensor, int]:
        key = self.key(cleaned)
        found = self._read(key)
        if found is None:
            rows_ND, tokens = self.encoder.encode(cleaned)
            found = rows_ND.cpu().contiguous(), tokens
            self._write(key, *found)
        return found

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _read(self, key: str) -> tuple[Tensor, int] | None:
        """A whole entry's rows and token count; None for any other."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                note = file.metadata() or {}
                rows_ND = file.get_tensor("rows")
            tokens = int(note["tokens"])
            if note["digest"] != _digest(key, rows_ND, tokens):
                return None
        except (SafetensorError, OSError, ValueError, KeyError, RuntimeError):
            return None
        with suppress(OSError):  # another process may have evicted it by now
            os.utime(path)
        return rows_ND, tokens

    def _write(self, key: str, rows_ND: Tensor, tokens: int) -> None:
        note = {"tokens": str(tokens), "digest": _digest(key, rows_ND, tokens)}
        data = safetensors.torch.save({"rows": rows_ND}, note)
        if len(data) > self.max_bytes:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = self.folder / f".{key}.{secrets.token_hex(4)}.part"
            write_whole(self._path(key), part, [data])
            self._trim(keep=self._path(key).name)
        except OSError as error:
            if not self._warned:
                self._warned = True
                why = error.strerror or error
                warnings.warn(f"{self.folder}: prompts are not kept ({why})", stacklevel=5)

    def _trim(self, keep: str) -> None:
        """Remove what killed writers left, then the entries unused for longest."""
        now, entries = time.time(), []
        with os.scandir(self.folder) as found:
            for item in found:
                with suppress(FileNotFoundError):  # another process trims as well
                    stat = item.stat(follow_symlinks=False)
                    if _ENTRY.fullmatch(item.name):
                        entries.append((stat.st_mtime_ns, item.name, stat.st_size))
                    elif _PART.fullmatch(item.name) and now - stat.st_mtime > _STALE:
                        os.unlink(item.path)
        total = sum(size for _, _, size in entries)
        for _, name, size in sorted(entries):
            if total <= self.max_bytes:
                break
            if name != keep:
                with suppress(FileNotFoundError):
                    os.unlink(self.folder / name)
                total -= size


def _digest(key: str, rows_ND: Tensor, tokens: int) -> str:
    """Seals an entry: its name, its numbers, and what kind they are."""
    what = json.dumps([key, str(rows_ND.dtype), list(rows_ND.shape), tokens])
    digest = hashlib.sha256(what.encode())
    digest.update(rows_ND.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
