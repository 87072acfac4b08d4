"""Finding a model by name and checking its files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamgen.errors import UnknownModel, WeightsError
from streamgen.weights import registry


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of packaged models with one, "tiny", in it."""
    folder = tmp_path / "home" / "tiny"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(b"some bytes")
    (folder / "sub" / "words.txt").write_text("snow lava\n")
    (folder / "README.md").write_text("card\n")
    registry.write_manifest(folder, name="tiny", kind="world", version="1", licence="Apache-2.0")
    return folder.parent


def test_packaged_models_are_listed(home: Path) -> None:
    """Every folder with a manifest is a packaged model; the manifest lists files by path."""
    model = registry.packaged(home)["tiny"]
    assert (model.kind, model.version, model.card) == ("world", "1", "README.md")
    assert set(model.files) == {"README.md", "sub/words.txt", "weights.safetensors"}
    assert model.num_bytes == 25


def test_the_installed_models_are_whole() -> None:
    """Whatever ships in this installation has a manifest that its files agree with."""
    for name, model in registry.packaged().items():
        assert registry.verify(model.path).name == name


def test_resolve_packaged_name(home: Path) -> None:
    """A packaged name gives its folder."""
    assert registry.resolve("tiny", home) == home / "tiny"


def test_resolve_local_folder(home: Path, tmp_path: Path) -> None:
    """A folder that holds a manifest gives itself."""
    assert registry.resolve(home / "tiny", tmp_path) == home / "tiny"


def test_unknown_name_lists_the_packaged(home: Path) -> None:
    """A name that is nothing is answered with what there is."""
    with pytest.raises(UnknownModel, match="no model 'tinny': packaged models are tiny"):
        registry.resolve("tinny", home)


def test_folder_without_manifest(home: Path, tmp_path: Path) -> None:
    """A folder that is no model is told what a model folder holds."""
    with pytest.raises(WeightsError, match="holds no model.json: a model folder needs"):
        registry.resolve(tmp_path, home)


def test_a_file_is_no_folder(home: Path) -> None:
    """A path to a file is told that a folder is wanted."""
    with pytest.raises(UnknownModel, match="is a file, not a model folder"):
        registry.resolve(home / "tiny" / "README.md", home)


def _hub(monkeypatch: pytest.MonkeyPatch, snapshot: Any) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot))


def test_hub_id_is_fetched(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id goes to huggingface_hub, which is asked for data files only."""
    asked = []

    def snapshot(repo: str, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(home / "tiny")

    _hub(monkeypatch, snapshot)
    assert registry.resolve("org/tiny", home) == home / "tiny"
    [(repo, patterns)] = asked
    assert repo == "org/tiny"
    assert not {"*.pt", "*.pth", "*.bin", "*.py", "*"} & set(patterns)


def test_unreachable_hub_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that can't be reached is an unknown model, in one line with the packaged names."""

    def snapshot(repo: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("offline\nand a long story")

    _hub(monkeypatch, snapshot)
    with pytest.raises(UnknownModel, match="packaged models are tiny; .* nothing: offline$"):
        registry.resolve("org/none", home)


def test_no_hub_client(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without huggingface_hub a hub id says which extra brings it."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnknownModel, match=r"pip install 'streamgen\[hub\]'"):
        registry.resolve("org/none", home)


def test_verify_accepts_a_whole_model(home: Path) -> None:
    """Files that agree with their sums pass, and the manifest comes back."""
    assert registry.verify(home / "tiny").name == "tiny"


def test_verify_names_a_damaged_file(home: Path) -> None:
    """One changed byte is named with the file and what to do."""
    (home / "tiny" / "weights.safetensors").write_bytes(b"some bytez")
    with pytest.raises(WeightsError, match=r"weights.safetensors is damaged .*install streamgen"):
        registry.verify(home / "tiny")


def test_verify_names_a_missing_file(home: Path) -> None:
    """A missing file is named."""
    (home / "tiny" / "sub" / "words.txt").unlink()
    with pytest.raises(WeightsError, match=r"words.txt is missing; install"):
        registry.verify(home / "tiny")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": None}, "missing or wrong: kind"),
        ({"files": []}, "missing or wrong: files"),
        ({"files": {"../../secret": "00"}}, "files"),
        ({"files": {"/etc/passwd": "00"}}, "files"),
        ({"files": {"a": 1}}, "files"),
        ({"name": 1, "card": 2}, "name, card"),
    ],
)
def test_wrong_manifest(home: Path, change: dict[str, Any], message: str) -> None:
    """A manifest with a missing field, or a path out of its folder, is refused by name."""
    path = home / "tiny" / registry.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(WeightsError, match=message):
        registry.read_manifest(home / "tiny")


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"', "\x00"])
def test_manifest_that_is_no_manifest(home: Path, text: str) -> None:
    """A manifest that is no JSON object is refused in one line."""
    (home / "tiny" / registry.MANIFEST).write_text(text)
    with pytest.raises(WeightsError) as caught:
        registry.read_manifest(home / "tiny")
    assert "\n" not in str(caught.value)
