"""The report on this machine: true, whole when a library is broken, and honest in its exit code."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

from streamgen.apps import doctor
from streamgen.apps.doctor import Check, examine, find_chromium, opens_encoder, render
from streamgen.weights import registry


def _find(checks: list[Check], name: str) -> Check:
    [found] = [check for check in checks if check.name == name]
    return found


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    """The report on this machine."""
    return examine()


def test_this_machine_runs_streamgen(checks: list[Check]) -> None:
    """Where the tests run, nothing but a model can be broken."""
    assert not [c for c in checks if c.state == "broken" and c.group != "model"]


def test_states_and_cures(checks: list[Check]) -> None:
    """Every line has a known state, and whatever is broken says what to do."""
    assert {check.state for check in checks} <= set(doctor.MARKS)
    assert all(check.cure for check in checks if check.state == "broken")


def test_packaged_models_are_checked(checks: list[Check]) -> None:
    """Every packaged model has its line."""
    names = set(registry.packaged_names()) or {"packaged models"}
    assert {check.name for check in checks if check.group == "model"} == names


def test_one_screen(checks: list[Check]) -> None:
    """The report fits a screen, and long rows are folded."""
    lines = render(checks).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines[1:])) <= 110


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--json` is the same report, and the exit code is 0 when nothing is broken."""
    monkeypatch.setattr(doctor, "examine", lambda: [Check("extra", "x", "absent", "no", "get it")])
    written: list[str] = []
    assert doctor.doctor(as_json=True, write=written.append) == 0
    report = json.loads(written[0])
    assert report["ok"] is True
    assert report["checks"] == [
        {"group": "extra", "name": "x", "state": "absent", "detail": "no", "cure": "get it"}
    ]


def test_something_broken_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is required and unusable makes the command fail."""
    monkeypatch.setattr(doctor, "examine", lambda: [Check("library", "av", "broken", "?", "do")])
    written: list[str] = []
    assert doctor.doctor(write=written.append) == 1
    assert written[0].splitlines()[1:] == [
        "  BROKEN  av                 ?",
        "what to do:",
        "  av: do",
    ]


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library is broken and comes with the command that installs it."""
    real = metadata.version

    def version(name: str) -> str:
        if name == "websockets":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    check = _find(list(doctor._libraries()), "websockets")
    assert check.state == "broken"
    assert check.cure.startswith("pip install 'websockets'")


def test_a_library_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose import fails is a line of the report, not a traceback."""
    monkeypatch.setitem(sys.modules, "cv2", None)
    check = _find(list(doctor._libraries()), "opencv-python-headless")
    assert check.state == "broken"
    assert "does not start" in check.detail


def test_a_version_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that pyproject does not allow is broken, and the range is the cure."""
    monkeypatch.setattr(doctor, "_declared_ranges", lambda: {"diffusers": "diffusers<0.42"})
    check = _find(list(doctor._libraries()), "diffusers")
    assert check.state == "broken"
    assert "pip install 'diffusers<0.42'" in check.cure


def test_declared_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges come from the installed metadata; extras are left out."""
    lines = ["av<20,>=17", "tqdm", "triton; extra == 'triton'"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert doctor._declared_ranges() == {"av": "av<20,>=17", "tqdm": "tqdm"}


def test_a_damaged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged packaged model is broken, and the line says which file."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "w.txt").write_text("1")
    registry.write_manifest(folder, name="tiny", kind="world", version="1", licence="Apache-2.0")
    (folder / "w.txt").write_text("2")
    monkeypatch.setattr(registry, "packaged_names", lambda: ("tiny",))
    monkeypatch.setattr(registry, "resolve", lambda name: tmp_path / name)
    [check] = list(doctor._models())
    assert check.state == "broken"
    assert "w.txt is damaged" in check.cure


def test_h264_opens() -> None:
    """PyAV's own wheel opens libx264, and an encoder that is none gives its reason."""
    assert opens_encoder("libx264") == ""
    assert opens_encoder("no_such_codec")


def test_no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a browser is fine: only the ui test wants one."""
    monkeypatch.setenv("PATH", "")
    assert find_chromium() is None
    assert [check.state for check in doctor._browser()] == ["absent"]
