"""Find a model by name and check its files. Bytes only: no tensor is read here.

A model is a folder with a `model.json` beside its files:

    {"name": "pocket-world", "kind": "world", "version": "1",
     "files": {"transformer.safetensors": "<sha256>", "config.json": "<sha256>"},
     "licence": "Apache-2.0", "card": "README.md"}

A folder beside this module is a packaged model; any other folder of this form is a local one. A
checksum says which file is damaged; it is no signature and says nothing about who made the file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from streamgen.errors import UnknownModel, WeightsError

MANIFEST = "model.json"
"""Name of the file that makes a folder a model."""

_HERE = Path(__file__).parent
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What is fetched from a hub: configuration, text, tokenizers and safetensors, no code or pickles.
_HUB_FILES = ["*.json", "*.safetensors", "*.md", "*.txt", "*.model"]


@dataclass(frozen=True)
class PackagedModel:
    """What a `model.json` says about the folder it lies in.

    Args:
        name: name a caller loads it by.
        kind: which pipeline it is for, such as "world".
        version: version of these weights.
        files: path inside the folder -> sha256 in hexadecimal.
        licence: SPDX name of the licence of the weights.
        card: path of the model card inside the folder.
        path: the folder.
    """

    name: str
    kind: str
    version: str
    files: Mapping[str, str]
    licence: str
    card: str
    path: Path = field(compare=False)

    @property
    def num_bytes(self) -> int:
        """Size of the listed files on disk; a missing one counts as 0."""
        paths = (self.path / name for name in self.files)
        return sum(path.stat().st_size for path in paths if path.is_file())


def packaged_names(home: Path = _HERE) -> tuple[str, ...]:
    """Names of the models that ship with this installation, sorted. Opens no file."""
    return tuple(sorted(manifest.parent.name for manifest in home.glob(f"*/{MANIFEST}")))


def packaged(home: Path = _HERE) -> dict[str, PackagedModel]:
    """The models that ship with this installation, by name.

    Raises:
        WeightsError: a `model.json` is damaged.
    """
    return {name: read_manifest(home / name) for name in packaged_names(home)}


def resolve(
    name: str | Path, home: Path = _HERE, accept: Callable[[Path], bool] | None = None
) -> Path:
    """The folder of a model: a packaged name, a local folder, or a hub id "org/name".

    A packaged name wins over a local folder of the same name; write "./name" for the folder. Files
    are not checked here: see `verify`.

    Args:
        name: of the model.
        home: where the packaged models are.
        accept: says of a folder without a `model.json` whether it will do all the same.

    Raises:
        UnknownModel: none of the three; the message lists the packaged names.
        WeightsError: a folder without a `model.json`.
    """
    text = str(name)
    if text in packaged_names(home):
        return home / text
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / MANIFEST).is_file() and not (accept and accept(folder)):
            raise WeightsError(
                f"folder {text!r} holds no {MANIFEST}: a model folder needs {MANIFEST} (name, "
                "kind, version, licence, card, and files with their sha256) beside those files"
            )
        return folder
    known = ", ".join(packaged_names(home)) or "none in this installation"
    problem = f"no model {text!r}: packaged models are {known}"
    if folder.exists():
        raise UnknownModel(f"{problem}; {text!r} is a file, not a model folder")
    if not _HUB_ID.fullmatch(text):
        raise UnknownModel(
            f"{problem}; or name a folder that holds {MANIFEST}, or a hub id org/name"
        )
    return _from_hub(text, problem, accept)


def read_manifest(folder: Path) -> PackagedModel:
    """Read and check the `model.json` of a folder. The listed files are not opened.

    Raises:
        WeightsError: it is missing, no JSON, or lacks a field.
    """
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path}: can't be read ({error.strerror or error})") from error
    except ValueError as error:
        raise WeightsError(f"{path}: not valid JSON ({error}); {_CURE}") from error
    texts = ("name", "kind", "version", "licence", "card")
    wrong = _wrong_fields(raw, texts)
    if wrong:
        raise WeightsError(f"{path}: missing or wrong: {', '.join(wrong)}; {_CURE}")
    return PackagedModel(**{key: raw[key] for key in texts}, files=dict(raw["files"]), path=folder)


def write_manifest(
    folder: Path, *, name: str, kind: str, version: str, licence: str, card: str = "README.md"
) -> PackagedModel:
    """Write the `model.json` of a finished model: every other file of the folder and its sha256."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): sha256(path) for path in found}
    files.pop(MANIFEST, None)
    raw = {"name": name, "kind": kind, "version": version, "files": files}
    text = json.dumps({**raw, "licence": licence, "card": card}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return read_manifest(folder)


def verify(folder: Path) -> PackagedModel:
    """Compare every listed file of a model folder with its checksum.

    Raises:
        WeightsError: the first file that is missing or differs, and what to do.
    """
    model = read_manifest(folder)
    for name, expected in model.files.items():
        path = folder / name
        if not path.is_file():
            raise WeightsError(f"model {model.name!r}: {path} is missing; {_CURE}")
        if sha256(path) != expected.lower():
            raise WeightsError(
                f"model {model.name!r}: {path} is damaged (its sha256 is not the one in "
                f"{MANIFEST}; {path.stat().st_size:,} bytes); {_CURE}"
            )
    return model


def sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_CURE = "install streamgen again, or copy the model folder again from where it came"


def _wrong_fields(raw: Any, texts: tuple[str, ...]) -> list[str]:
    """Names of the fields of a manifest that are missing or of the wrong type."""
    if not isinstance(raw, dict):
        return ["everything (it is no JSON object)"]
    wrong = [key for key in texts if not isinstance(raw.get(key), str)]
    files = raw.get("files")
    if not isinstance(files, dict) or not files:
        return [*wrong, "files"]
    # A listed path stays in the folder, whoever wrote the manifest.
    return wrong + [
        f"files[{name!r}]"
        for name, digest in files.items()
        if not isinstance(digest, str)
        or PurePosixPath(name).is_absolute()
        or ".." in name.split("/")
    ]


def _from_hub(repo: str, problem: str, accept: Callable[[Path], bool] | None) -> Path:
    """Fetch a hub repository into the hub's own cache, or find it there."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UnknownModel(
            f"{problem}; there is no such folder, and a hub id needs huggingface-hub: "
            "pip install 'streamgen[hub]'"
        ) from error
    try:
        folder = Path(snapshot_download(repo, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub's client raises its own tree and its HTTP library's
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnknownModel(
            f"{problem}; there is no such folder, and the hub gave nothing: {reason}"
        ) from error
    if not (folder / MANIFEST).is_file() and not (accept and accept(folder)):
        raise WeightsError(f"hub repository {repo!r} holds no {MANIFEST}: it is no streamgen model")
    return folder
