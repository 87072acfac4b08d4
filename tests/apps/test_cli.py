"""The command line: what it passes on, and how it says no."""

from __future__ import annotations

import json
import re
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
    """Stands in for the modules behind commands: keeps what it was called with, or raises."""

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

    def generate(self, *args: Any, **options: Any) -> SimpleNamespace:
        self.calls.append(("generate", args, options))
        if self.error:
            raise self.error
        done = {"path": "x.mp4", "track": "x.jsonl", "frames": 89, "made": 64, "seconds": 2.0}
        return SimpleNamespace(**done, go_on="streamgen generate ...", stopped=self.stopped)

    def paint(self, *args: Any, **options: Any) -> SimpleNamespace:
        self.calls.append(("paint", args, options))
        pictures = ("lava, brick", "ocean", "lava, brick")
        return SimpleNamespace(path="x.png", gif=None, pictures=pictures, seconds=0.5)

    def list_classes(self, *args: Any, **options: Any) -> list[str]:
        self.calls.append(("list_classes", args, options))
        return ["   0  lava, brick", "   1  ocean"]

    stopped = False
    DEFAULT_MODEL = "pocket-image"


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Commands without a model."""
    spy = Spy()
    names = ("play", "walk", "generate", "paint", "list_classes", "DEFAULT_MODEL")
    module = SimpleNamespace(**{name: getattr(spy, name) for name in names})
    for name in ("play", "walk", "generate", "image"):
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


@pytest.mark.parametrize("source", ["generated", "me.png"])
def test_a_first_frame(spy: Spy, source: str) -> None:
    """`--start-image` is for the browser and for a film, and alone it asks for the browser."""
    assert run(["play", "--start-image", source]) == 0
    assert run(["play", "--start-image", source, "--frames", "8"]) == 0
    [(first, _, live), (second, _, film)] = spy.calls
    assert (first, second) == ("play", "walk")
    assert live["start_image"] == film["image"] == source


def test_an_image_is_for_a_film(spy: Spy, capsys: pytest.CaptureFixture[str]) -> None:
    """`--image` still means a film; beside `--start-image` it is refused."""
    assert run(["play", "--image", "me.png"]) == 0
    assert spy.calls[-1][0] == "walk" and spy.calls[-1][2]["image"] == Path("me.png")
    assert run(["play", "--image", "me.png", "--start-image", "generated"]) == 2
    assert "--image and --start-image say the same" in capsys.readouterr().err


def test_generate(spy: Spy, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything that was asked for gets there, and nothing that was not."""
    assert run(["generate", "a maze"]) == 0
    [(_, args, options)] = spy.calls
    assert args == ("a maze",)
    assert (options["model"], options["output"]) == ("pocket-video", Path("out.mp4"))
    assert options["loading"] == {} and options["frames"] is None
    line = ["generate", "--model", "wan", "--checkpoint", "sf.pt", "--preset", "self-forcing"]
    line += ["--lora", "l.pt", "-o", "x.mp4", "--frames", "81", "--seed", "3", "--image", "p.png"]
    line += ["--switch", "40:heavy snow", "--switch", "60:lava", "--recache", "off", "--sink", "3"]
    line += ["--height", "480", "--width", "832", "--steps", "1000,750,500", "--shift", "8"]
    line += ["--window", "12", "--positions", "absolute", "--kv", "fp8", "--dtype", "bfloat16"]
    line += ["--device", "cuda:1", "--offload", "text", "--quantize", "fp8", "--scale", "2"]
    line += ["--save", "a", "--resume", "b", "--quiet", "--chunk-frames", "1", "--video", "v.mp4"]
    assert run(line) == 0
    _, args, options = spy.calls[-1]
    assert args == (None,)
    assert options["switches"] == ["40:heavy snow", "60:lava"]
    assert options.pop("loading") == {
        "checkpoint": Path("sf.pt"),
        "preset": "self-forcing",
        "lora": Path("l.pt"),
        "height": 480,
        "width": 832,
        "steps": (1000.0, 750.0, 500.0),
        "shift": 8.0,
        "sink": 3,
        "window": 12,
        "chunk_frames": 1,
        "positions": "absolute",
        "kv": "fp8",
        "dtype": "bfloat16",
        "device": "cuda:1",
        "offload": "text",
        "quantize": "fp8",
    }
    wanted = {"model": "wan", "frames": 81, "seed": 3, "recache": "off", "quiet": True, "scale": 2}
    files = {"image": "p.png", "video": "v.mp4", "save": "a", "resume": "b", "output": "x.mp4"}
    wanted |= {name: Path(path) for name, path in files.items()}
    assert wanted.items() <= options.items()
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "x.mp4: 89 frames, made at 32.0 frames/s; track in x.jsonl",
        "go on with: streamgen generate ...",
    ]


def test_options_of_generate_are_the_pipelines() -> None:
    """Each loading option is a parameter of `from_pretrained`."""
    from inspect import signature

    from streamgen.pipelines.causal_video import CausalVideoPipeline

    known = set(signature(CausalVideoPipeline.from_pretrained).parameters)
    text = Path(streamgen.apps.__file__ or "").with_name("cli.py").read_text()
    start = text.index("    loading = {\n", text.index("def generate("))
    names = set(re.findall(r'^        "(\w+)":', text[start : text.index("\n    }", start)], re.M))
    assert len(names) > 10 and names <= known


def test_a_stopped_video_says_so(spy: Spy, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 130, what there is, and how to go on."""
    spy.stopped = True
    assert run(["generate", "a maze", "-o", "x.mp4"]) == 130
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("stopped after 64 new frames; x.mp4: 89 frames")
    assert second == "go on with: streamgen generate ..."


def test_steps_that_are_no_numbers(spy: Spy, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with an example."""
    assert run(["generate", "a maze", "--steps", "4,x"]) == 2
    assert capsys.readouterr().err == (
        "error: --steps '4,x': write numbers with commas, as in 1000,750,500,250\n"
    )


def test_image(spy: Spy, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything that was asked for gets there; the last line says what was drawn."""
    line = ["image", "--class", "lava, brick", "--class", "ocean", "--seed", "3", "-o", "x.png"]
    line += ["--grid", "1x3", "--cfg", "4", "--top-k", "900", "--top-p", "0.9", "--smooth"]
    assert run([*line, "--gif", "x.gif", "--scale", "2", "--dtype", "float32"]) == 0
    [(_, args, options)] = spy.calls
    assert args == (["lava, brick", "ocean"],)
    assert options["sampling"] == {"cfg": 4.0, "top_k": 900, "top_p": 0.9, "more_smooth": True}
    assert options["model"] == "pocket-image" and options["loading"]["dtype"] == "float32"
    wanted = {"grid": "1x3", "gif": Path("x.gif"), "scale": 2, "seed": 3, "output": Path("x.png")}
    assert wanted.items() <= options.items()
    shown = capsys.readouterr().out
    assert shown == "x.png: 3 pictures in 0.5 s (lava, brick; ocean)\n"
    assert run(["image", "--class", "207", "--var", "var_d16.pth", "--vae", "vae.pth"]) == 0
    options = spy.calls[-1][2]
    assert (options["model"], options["loading"]["vae"]) == ("var_d16.pth", Path("vae.pth"))
    assert options["sampling"] == {}


def test_the_list_of_classes(spy: Spy, capsys: pytest.CaptureFixture[str]) -> None:
    """One a line, and nothing is drawn."""
    assert run(["image", "--list", "--model", "folder"]) == 0
    assert capsys.readouterr().out == "   0  lava, brick\n   1  ocean\n"
    [(name, args, _)] = spy.calls
    assert (name, args) == ("list_classes", ("folder",))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--model", "a", "--var", "b"], "--model and --var are two models"),
        (["--vae", "b"], "--vae is for --var"),
    ],
)
def test_two_models(spy: Spy, capsys: Any, line: list[str], message: str) -> None:
    """One line, and nothing is drawn."""
    assert run(["image", *line]) == 2
    assert message in capsys.readouterr().err
    assert not spy.calls


@pytest.mark.parametrize(
    ("kind", "module"),
    [("world", "evaluate"), ("video", "evaluate_video"), ("image", "evaluate_image")],
)
def test_eval_by_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str
) -> None:
    """A model's manifest says what measures it."""
    folder = a_model(tmp_path, kind)
    calls: list[Any] = []
    name = f"streamgen.apps.pocket.{module}"
    monkeypatch.setitem(
        sys.modules, name, SimpleNamespace(run_eval=lambda *args: calls.append(args))
    )
    assert run(["eval", str(folder), "-o", "out", "--quick"]) == 0
    assert calls == [(str(folder), Path("out"), False, True)]


def a_model(home: Path, kind: str) -> Path:
    """A folder with a manifest and a config, without weights."""
    folder = home / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"kind": kind}))
    registry.write_manifest(folder, name="model", kind=kind, version="1", licence="Apache-2.0")
    return folder


def test_eval_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What can't be measured is named."""
    assert run(["eval", str(a_model(tmp_path, "sound"))]) == 2
    assert "is of kind 'sound'; measured are: world, video, image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "kind", "command"),
    [
        (["play"], "video", "streamgen generate"),
        (["play", "--frames", "2", "-o", "{}/x.mp4"], "image", "streamgen image"),
        (["generate", "a maze", "-o", "{}/x.mp4", "--model"], "world", "streamgen play"),
        (["image", "--class", "0", "-o", "{}/x.png", "--model"], "video", "streamgen generate"),
    ],
)
def test_a_model_for_another_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: list[str], kind: str, command: str
) -> None:
    """One line names the command that it is for."""
    folder = a_model(tmp_path, kind)
    args = [word.format(tmp_path) for word in line]
    options = ["--port", "0"] if line == ["play"] else []
    assert run([*args[:1], *options, *args[1:], str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and command in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["video", "image"])
def test_new_benches(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every option gets to the bench's parameter of that name."""
    from inspect import signature

    module = pytest.importorskip(f"streamgen.apps.bench.{name}")
    wanted = signature(module.run)
    calls: list[Any] = []

    def spy(*args: Any, **options: Any) -> None:
        calls.append(wanted.bind(*args, **options).arguments)

    monkeypatch.setattr(module, "run", spy)
    line = ["--repeats", "5", "--threads", "2", "-o", "x.json", "--quick"]
    mine = {
        "video": ["--layers", "4", "--height", "480", "--width", "832", "--window", "9"]
        + ["--sink", "1", "--no-memory"],
        "image": ["--depth", "8", "--batch", "2"],
    }[name]
    assert run(["bench", name, *line, *mine]) == 0
    given = {"repeats": 5, "threads": 2, "output": Path("x.json"), "quick": True}
    given |= {
        "video": {
            "layers": 4,
            "height": 480,
            "width": 832,
            "window": 9,
            "sink": 1,
            "memory": False,
        },
        "image": {"depth": 8, "batch": 2},
    }[name]
    assert calls == [given]
    defaults = {n: p.default for n, p in wanted.parameters.items()}
    assert run(["bench", name]) == 0
    assert dict(calls[1]) == defaults


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
