"""The command line: what it passes on, and how it says no."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import streamgen.apps
from streamgen.apps.cli import run
from streamgen.errors import StreamgenError, UnknownModel
from streamgen.weights import registry

Run = Callable[..., subprocess.CompletedProcess[str]]


class Spy:
    """Stands in for the modules behind `play`: keeps what it was called with, or raises."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.error: Exception | None = None
        self.warning = ""

    def play(self, *args: Any, **options: Any) -> None:
        self.calls.append(("play", args, options))
        if self.warning:
            warnings.warn(self.warning, stacklevel=1)
        if self.error:
            raise self.error

    def walk(self, *args: Any, **options: Any) -> SimpleNamespace:
        self.calls.append(("walk", args, options))
        return SimpleNamespace(path="x.mp4", track="x.jsonl", frames=64, seconds=2.0)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """`play` and `walk` without a model."""
    spy = Spy()
    for name in ("play", "walk"):
        module = SimpleNamespace(**{name: getattr(spy, name)})
        monkeypatch.setitem(sys.modules, f"streamgen.apps.{name}", module)
        monkeypatch.setattr(streamgen.apps, name, module, raising=False)
    return spy


def test_play_serves_the_packaged_world(spy: Spy) -> None:
    """`play` alone serves the pocket world on this machine only, and opens a page."""
    assert run(["play"]) == 0
    [(name, args, options)] = spy.calls
    assert (name, args) == ("play", ("pocket-world",))
    assert (options["host"], options["port"], options["open_browser"]) == ("127.0.0.1", 7860, True)


def test_frames_walk_without_a_browser(spy: Spy) -> None:
    """`play --frames` walks into a file with everything that was asked for."""
    line = ["play", "folder", "--frames", "64", "--actions", "w*16 a*8", "--prompt", "a maze"]
    line += ["--switch", "32:heavy snow", "--switch", "48:lava", "-o", "x.mp4", "--seed", "7"]
    assert run(line) == 0
    [(name, args, options)] = spy.calls
    assert (name, args) == ("walk", ("folder",))
    assert options["frames"] == 64
    assert options["actions"] == "w*16 a*8"
    assert list(options["switches"]) == ["32:heavy snow", "48:lava"]
    assert (options["prompt"], options["seed"]) == ("a maze", 7)
    assert options["output"] == Path("x.mp4")


@pytest.mark.parametrize(
    "options",
    [["--actions", "w*8"], ["-o", "x.mp4"], ["--switch", "3:snow"], ["--scale", "4"]],
)
def test_any_file_option_walks(spy: Spy, options: list[str]) -> None:
    """An option that only a film has asks for a film; its length may come from the actions."""
    assert run(["play", *options]) == 0
    [(name, _, given)] = spy.calls
    assert name == "walk"
    assert (given["frames"], given["seed"]) == (None, 0)


@pytest.mark.parametrize("option", [["--port", "7860"], ["--no-browser"], ["--plain"]])
def test_options_without_effect_are_refused(
    spy: Spy, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    """An option of the browser beside one of the film is an error, not ignored."""
    assert run(["play", "--frames", "4", *option]) == 2
    assert f"{option[0]} is for the browser and --frames for a walk" in capsys.readouterr().err
    assert not spy.calls


def test_a_walk_says_what_it_wrote(spy: Spy, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line names both files and the speed."""
    run(["play", "--frames", "64"])
    shown = capsys.readouterr().out
    assert shown == "x.mp4: 64 frames, made at 32.0 frames/s; track in x.jsonl\n"


def test_a_warning_is_one_line(spy: Spy, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning names no place in the code."""
    spy.warning = "unknown words:\n  purple"
    assert run(["play"]) == 0
    assert capsys.readouterr().err == "warning: unknown words: purple\n"


def test_an_error_is_one_line(spy: Spy, capsys: pytest.CaptureFixture[str]) -> None:
    """A caller's mistake is one line on the error stream and exit code 2, whatever its text."""
    spy.error = UnknownModel("no model 'x':\n   packaged models are y")
    assert run(["play", "x"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "error: no model 'x': packaged models are y\n")


@pytest.mark.parametrize("by", ["option", "environment"])
def test_debug_shows_the_traceback(spy: Spy, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """`--debug` anywhere, or STREAMGEN_DEBUG=1, lets the error through."""
    spy.error = UnknownModel("x")
    if by == "environment":
        monkeypatch.setenv("STREAMGEN_DEBUG", "1")
    with pytest.raises(StreamgenError):
        run(["play", "x", *(["--debug"] if by == "option" else [])])


def test_a_bug_is_not_hidden(spy: Spy) -> None:
    """What is no caller's mistake stays a traceback."""
    spy.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        run(["play"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["plya"], "No such command 'plya'"),
        (["play", "--frames", "many"], "--frames"),
        (["play", "--frames", "0"], "--frames"),
        (["play", "--port", "99999"], "--port"),
        (["play", "--sed", "1"], "No such option: --sed"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], line: list[str], message: str) -> None:
    """A command or option that is not there is named, with exit code 2 and no traceback."""
    assert run(line) == 2
    assert message in capsys.readouterr().err


def test_threads_are_set(spy: Spy) -> None:
    """`--threads` reaches torch before the model does."""
    import torch

    before = torch.get_num_threads()
    try:
        assert run(["play", "--threads", "2"]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def _refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """The program ended with exit code 2 and one line that holds all of `words`."""
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line
    assert "Traceback" not in done.stderr + done.stdout


def test_unknown_model(run_python: Run, tmp_path: Path) -> None:
    """The real program, asked for a model that is not there, lists those that are."""
    target = tmp_path / "walk.mp4"
    line = ["play", "no-such-world", "--frames", "2", "-o", str(target)]
    done = run_python("-m", "streamgen.apps.cli", *line)
    _refused(done, "no-such-world", *registry.packaged_names())
    assert not target.exists()


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_damaged_weights(run_python: Run, tmp_path: Path, harm: str) -> None:
    """The real program, given damaged weights, names the file and writes nothing."""
    if "pocket-world" not in registry.packaged_names():
        pytest.skip("this checkout holds no pocket-world")
    folder = tmp_path / "world"
    shutil.copytree(registry.resolve("pocket-world"), folder)
    victim = max(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[-1000] ^= 1
    if harm == "remove":
        victim.unlink()
    else:
        victim.write_bytes(data if harm == "flip" else data[:-1000])
    target = tmp_path / "walk.mp4"
    line = ["play", str(folder), "--frames", "2", "-o", str(target)]
    done = run_python("-m", "streamgen.apps.cli", *line)
    _refused(done, victim.name)
    assert not target.exists()
