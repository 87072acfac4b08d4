"""Read tensors from a file and put them into a module: all of them or none.

Files are data: `.safetensors`, or torch files read with `weights_only=True`, which refuses every
pickle that would run code. What a key means is for `keymaps` and the model to say.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from streamgen.errors import WeightsError

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
"""File name endings that are read as torch files."""

# Where training code puts the weights inside a torch file; the first that is present is taken.
_PLAIN_FIRST = ("generator", "generator_ema", "model", "state_dict")
_EMA_FIRST = ("generator_ema", "generator", "model", "state_dict")
_SHOWN = 4  # keys named in a message before "and N more"


def read_tensors(path: Path | str, *, prefer_ema: bool = False) -> dict[str, Tensor]:
    """Read a weights file on the CPU: name -> tensor, names as the file has them.

    A torch file may nest them under "generator", "generator_ema", "model" or "state_dict".

    Args:
        path: a `.safetensors`, `.pt`, `.pth` or `.bin` file.
        prefer_ema: take "generator_ema" where a file has both it and "generator".

    Raises:
        WeightsError: no such file, another format, truncated, damaged, or more than tensors.
    """
    path = _existing(path)
    if path.suffix == ".safetensors":
        with _open_safetensors(path) as file:
            try:
                return {name: file.get_tensor(name) for name in file.keys()}
            except (SafetensorError, OSError, RuntimeError, ValueError) as error:
                raise _damaged(path, error) from error
    if path.suffix in TORCH_SUFFIXES:
        return _unwrap(_read_torch(path), path, _EMA_FIRST if prefer_ema else _PLAIN_FIRST)
    accepted = ", ".join((".safetensors", *TORCH_SUFFIXES))
    raise WeightsError(f"{path}: can't be read as weights; accepted are {accepted} files")


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
    kind = "is a folder; name a file in it" if path.is_dir() else "no such file"
    raise WeightsError(f"{path}: {kind}")


def _damaged(path: Path, error: Exception) -> WeightsError:
    # torch's refusals begin with advice to load unsafely; the reason is what follows this.
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    reason = (text.splitlines() or [type(error).__name__])[0]
    return WeightsError(
        f"{path}: truncated, damaged or no {path.suffix} file ({path.stat().st_size:,} bytes; "
        f"{reason}); copy or download it again"
    )


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _read_torch(path: Path) -> Any:
    try:
        # Mapped, so that a file with a critic beside its generator costs no memory for the critic.
        mapped = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):
            raise WeightsError(
                f"{path}: holds Python objects beside tensors, which could run code; only plain "
                "tensors are read: save its state dict again, best as .safetensors"
            ) from error
        raise _damaged(path, error) from error
    except Exception as error:  # a damaged file ends in whatever the unpickler meets first
        raise _damaged(path, error) from error


def _unwrap(loaded: Any, path: Path, order: tuple[str, ...]) -> dict[str, Tensor]:
    """The name -> tensor mapping inside what a torch file held."""
    while isinstance(loaded, dict):
        if loaded and all(isinstance(value, Tensor) for value in loaded.values()):
            return {str(name): value for name, value in loaded.items()}
        key = next((key for key in order if isinstance(loaded.get(key), dict)), None)
        if key is None:
            break
        loaded = loaded[key]
    found = [str(key) for key in loaded] if isinstance(loaded, dict) else [type(loaded).__name__]
    raise WeightsError(
        f"{path}: holds no name -> tensor mapping, alone or under {', '.join(order)}; "
        f"{_list('entries', found) or 'it is empty'}"
    )
