"""Read tensors from a file and put them into a module: all of them or none.

Files are data: `.safetensors` (also in shards, through their index), or torch files read with
`weights_only=True`, which refuses every pickle that would run code. Both are mapped, not read: a
tensor's bytes come off the disk when something uses them, and cost no memory of their own. What a
key means is for `keymaps` and the model to say.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from streamgen.errors import WeightsError

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
"""File name endings that are read as torch files."""

INDEX_SUFFIX = ".safetensors.index.json"
"""File name ending of the index of a model in several safetensors files (shards)."""

STEMS = ("diffusion_pytorch_model", "model", "adapter_model")
"""File names without ending under which a folder holds the weights of one model."""

# Where training code puts the weights inside a torch file; the first that is present is taken.
_PLAIN_FIRST = ("generator", "generator_ema", "model", "state_dict")
_EMA_FIRST = ("generator_ema", "generator", "model", "state_dict")
_PARTIAL = (".incomplete", ".part", ".crdownload", ".aria2", ".download", ".tmp")
_SHOWN = 4  # keys named in a message before "and N more"


def read_tensors(
    path: Path | str, *, prefer_ema: bool = False, entries: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Map a weights file on the CPU: name -> tensor, names as the file has them.

    A torch file may nest them under "generator", "generator_ema", "model" or "state_dict".

    Args:
        path: a `.safetensors`, `.pt`, `.pth` or `.bin` file, or the index of safetensors shards.
        prefer_ema: take "generator_ema" where a file has both it and "generator".
        entries: names to look under in a torch file instead, the preferred first.

    Raises:
        WeightsError: no such file, another format, truncated, damaged, more than tensors, or a
            shard that is missing or lacks a tensor.
    """
    path = _existing(path)
    if path.name.endswith(INDEX_SUFFIX):
        return _read_shards(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in TORCH_SUFFIXES:
        order = entries or (_EMA_FIRST if prefer_ema else _PLAIN_FIRST)
        return _unwrap(_read_torch(path), path, tuple(order))
    accepted = ", ".join((".safetensors", *TORCH_SUFFIXES))
    raise WeightsError(
        f"{path}: can't be read as weights; accepted are {accepted} files, and {INDEX_SUFFIX}"
    )


def read_entries(path: Path | str) -> tuple[str, ...]:
    """What stands at the top of a torch file beside or around its tensors: "generator", "step".

    Nothing for a flat file and for safetensors.

    Raises:
        WeightsError: as `read_tensors`.
    """
    path = _existing(path)
    if path.suffix not in TORCH_SUFFIXES:
        return ()
    loaded = _read_torch(path)
    if not isinstance(loaded, dict) or all(isinstance(v, Tensor) for v in loaded.values()):
        return ()
    return tuple(str(key) for key in loaded)


def find_weights(folder: Path | str) -> Path:
    """The weights in a folder that holds those of one model: a safetensors file or its index.

    Raises:
        WeightsError: there is none, or shards without their index.
    """
    folder = Path(folder)
    for stem in STEMS:
        for suffix in (INDEX_SUFFIX, ".safetensors"):
            if (folder / (stem + suffix)).is_file():
                return folder / (stem + suffix)
        shards = sorted(folder.glob(f"{stem}-*-of-*.safetensors"))
        if shards:
            raise WeightsError(
                f"{folder}: holds shards ({shards[0].name}) but not their index "
                f"{stem}{INDEX_SUFFIX}; download it into the same folder"
            )
        _still_arriving(folder / (stem + ".safetensors"))
    names = ", ".join(f"{stem}.safetensors" for stem in STEMS)
    raise WeightsError(f"{folder}: holds no weights; looked for {names}, or one's .index.json")


def read_metadata(path: Path | str) -> dict[str, str]:
    """The text metadata of a `.safetensors` file; its tensors are not read.

    Raises:
        WeightsError: no such file, or no safetensors.
    """
    with _open_safetensors(_existing(path)) as file:
        return dict(file.metadata() or {})


def load_into(module: nn.Module, tensors: Mapping[str, Tensor], ignore: Iterable[str] = ()) -> None:
    """Copy tensors into a module's parameters and buffers, converting to their type and device.

    Everything is checked first, so a module that raises is as it was. A module on the meta device
    takes the tensors themselves.

    Args:
        module: the module to fill; every entry of its state dict must be given.
        tensors: name -> tensor, names as in the module's state dict.
        ignore: prefixes of names that may be given without being in the module.

    Raises:
        WeightsError: names the first keys that are missing, unexpected or of another shape.
    """
    state = module.state_dict()
    skipped = tuple(ignore)
    given = {k: v for k, v in tensors.items() if k in state or not k.startswith(skipped)}
    problems = [
        _list("missing", [key for key in state if key not in given]),
        _list("unexpected", [key for key in given if key not in state]),
        _list("of another shape", _misfits(state, given)),
    ]
    if any(problems):
        text = "; ".join(filter(None, problems))
        raise WeightsError(f"weights do not fit {type(module).__name__}: {text}")
    meta = any(value.is_meta for value in state.values())
    module.load_state_dict(given, assign=meta)


def _misfits(state: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """Keys on both sides that can't be copied, with both shapes or both types."""
    found = []
    for key in state.keys() & given.keys():
        want, have = state[key], given[key]
        if want.shape != have.shape:
            found.append(f"{key} (model {list(want.shape)}, file {list(have.shape)})")
        elif want.is_floating_point() != have.is_floating_point():
            found.append(f"{key} (model {want.dtype}, file {have.dtype})")
    return sorted(found)


def _list(what: str, keys: list[str]) -> str:
    """ "3 missing: a, b, c", or nothing for no keys."""
    if not keys:
        return ""
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{len(keys)} {what}: {', '.join(keys[:_SHOWN])}{more}"


def _existing(path: Path | str) -> Path:
    path = Path(path)
    if path.is_file():
        return path
    _still_arriving(path)
    kind = "is a folder; name a file in it" if path.is_dir() else "no such file"
    raise WeightsError(f"{path}: {kind}")


def _still_arriving(path: Path) -> None:
    """Raise if a download of that file has begun and not ended."""
    part = next((p for s in _PARTIAL if (p := path.with_name(path.name + s)).is_file()), None)
    if part is not None:
        raise WeightsError(
            f"{path}: half-downloaded; only {part.name} is there: finish the download"
        )


def _unreadable(path: Path, error: Exception) -> WeightsError:
    """Why a file can't be read: what its first bytes say, or else the reader's reason."""
    what = _not_weights(path) or _cut_short(path)
    if what:
        return WeightsError(f"{path}: {what}")
    if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
        return WeightsError(
            f"{path}: holds Python objects beside tensors, which could run code; only plain "
            "tensors are read: save its state dict again, best as .safetensors"
        )
    # torch's refusals begin with advice to load unsafely; the reason is what follows this.
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    reason = (text.splitlines() or [type(error).__name__])[0]
    return WeightsError(
        f"{path}: truncated, damaged or no {path.suffix} file ({path.stat().st_size:,} bytes; "
        f"{reason}); copy or download it again"
    )


def _not_weights(path: Path) -> str:
    """What a file that is no weights file (or not of its ending) is; nothing if it may be one."""
    with path.open("rb") as file:
        head = file.read(256)
    start = head.lstrip().lower()
    if not head:
        return "is empty (0 bytes); copy or download it again"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer and not the file it stands for; run `git lfs pull` there"
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "is a web page saved as weights; download the file itself (a log-in may be needed)"
    if head.startswith(b"GGUF"):
        return "is a GGUF file; accepted are .safetensors and torch files"
    if path.suffix == ".safetensors" and zipfile.is_zipfile(path):
        return "is a torch file under the wrong name; rename it to .pt"
    if path.suffix in TORCH_SUFFIXES and head[8:10] == b'{"':
        return "is a safetensors file under the wrong name; rename it to .safetensors"
    if path.suffix != ".json" and _is_text(head):
        line = head.decode().strip().splitlines()[0][:60]
        return f"is a text file and no weights; it begins {line!r}"
    return ""


def _is_text(head: bytes) -> bool:
    return head.isascii() and bool(head.strip()) and all(b >= 32 or b in b"\t\r\n" for b in head)


def _cut_short(path: Path) -> str:
    """How much of a half-downloaded file is there; nothing for a file that is not cut."""
    size = path.stat().st_size
    again = "finish the download or fetch it again"
    with path.open("rb") as file:
        head = file.read(8)
        if path.suffix != ".safetensors":
            cut = head.startswith(b"PK\x03\x04") and not zipfile.is_zipfile(path)
            return f"half-downloaded: the end is missing ({size:,} bytes); {again}" if cut else ""
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > size - 8:
            return ""
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key[:2] != "__"]
            whole = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return ""
    return f"half-downloaded: {size:,} of {whole:,} bytes; {again}" if size < whole else ""


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _read_safetensors(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """All tensors of a file, or those of some names (a shard's)."""
    with _open_safetensors(path) as file:
        there = set(file.keys())
        wanted = list(file.keys()) if names is None else list(names)
        absent = [name for name in wanted if name not in there]
        if absent:
            raise WeightsError(
                f"{path}: lacks what its index says is in it; {_list('missing', absent)}"
            )
        try:
            return {name: file.get_tensor(name) for name in wanted}
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise _unreadable(path, error) from error


def _read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors of every shard that an index names."""
    shards = _shards(index)
    absent = [name for name in shards if not (index.parent / name).is_file()]
    if absent:
        _still_arriving(index.parent / absent[0])
        raise WeightsError(
            f"{index.parent}: shards are missing ({len(absent)} of {len(shards)}): "
            f"{', '.join(absent[:_SHOWN])}; download them into the same folder"
        )
    tensors: dict[str, Tensor] = {}
    for name, keys in shards.items():
        tensors.update(_read_safetensors(index.parent / name, keys))
    return tensors


def _shards(index: Path) -> dict[str, list[str]]:
    """File name -> keys in it, as an index says."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        shards: dict[str, list[str]] = {}
        for key, name in weight_map.items():
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no file beside the index")
            shards.setdefault(name, []).append(key)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (
            _not_weights(index)
            or f"is no index of safetensors shards ({type(error).__name__}: {error})"
        )
        raise WeightsError(f"{index}: {reason}") from error
    if not shards:
        raise WeightsError(f"{index}: names no tensors")
    return shards


def _read_torch(path: Path) -> Any:
    try:
        # Mapped, so that a file with a critic beside its generator costs no memory for the critic.
        mapped = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged file ends in whatever the unpickler meets first
        raise _unreadable(path, error) from error


def _unwrap(loaded: Any, path: Path, order: tuple[str, ...]) -> dict[str, Tensor]:
    """The name -> tensor mapping inside what a torch file held."""
    while isinstance(loaded, dict):
        if loaded and all(isinstance(value, Tensor) for value in loaded.values()):
            return {str(name): value for name, value in loaded.items()}
        key = next((k for k in order if isinstance(loaded.get(k), dict) and loaded[k]), None)
        if key is None:
            break
        loaded = loaded[key]
    found = [str(key) for key in loaded] if isinstance(loaded, dict) else [type(loaded).__name__]
    raise WeightsError(
        f"{path}: holds no name -> tensor mapping, alone or under {', '.join(order)}; "
        f"{_list('entries', found) or 'it is empty'}"
    )
