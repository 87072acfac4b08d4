"""Videos into files: streamed, stopped, gone on with; whole or as before; mistakes in one line."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
import torch
from videos import tiny_video

from streamgen.apps import generate as module
from streamgen.apps.cli import run
from streamgen.apps.generate import Film, generate
from streamgen.apps.progress import Progress
from streamgen.apps.record import Mp4Writer
from streamgen.errors import InvalidRequest, StreamgenError
from streamgen.pipelines.causal_video import CausalVideoPipeline
from streamgen.session import Session

MAZE, SNOW = "a brick maze at night", "snow"


@pytest.fixture(scope="module")
def pipe() -> CausalVideoPipeline:
    """16 x 24 pixels, one frame a latent, chunks of 2: quick."""
    return tiny_video(temporal=False, max_sessions=1, history_frames=0)


@pytest.fixture(scope="module")
def joined() -> CausalVideoPipeline:
    """32 x 48 pixels, four frames a latent: 5 frames and any multiple of 8 more."""
    return tiny_video(max_sessions=1, history_frames=0)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a run does, its session is closed."""
    yield
    for name in {"pipe", "joined"} & set(request.fixturenames):
        assert request.getfixturevalue(name).engine.pool.stats().live == 0


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What the mp4's writer is given, frame by frame."""
    frames: list[np.ndarray] = []
    write = Mp4Writer.write

    def spy(self: Mp4Writer, some: np.ndarray) -> None:
        frames.extend(some.copy())
        write(self, some)

    monkeypatch.setattr(Mp4Writer, "write", spy)
    return frames


def make(pipe: Any, path: Path, prompt: str | None = MAZE, **options: Any) -> Film:
    return generate(prompt, **{"model": pipe, "output": path, "quiet": True, "scale": 1, **options})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def decode(path: Path) -> np.ndarray:
    with av.open(str(path)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


def a_clip(path: Path, frames: int = 20, fps: int = 16) -> Path:
    """A film of another size, whose grey tells the frame."""
    pixels = np.broadcast_to(np.arange(frames, dtype=np.uint8)[:, None, None, None] * 8 + 40,
                             (frames, 40, 96, 3))  # fmt: skip
    with Mp4Writer(path, width=96, height=40, fps=fps) as video:
        video.write(pixels)
    return path


# What is written


def test_it_writes_what_the_pipeline_makes(
    pipe: CausalVideoPipeline, tmp_path: Path, written: list[np.ndarray]
) -> None:
    """Every frame, in order; the track says what was asked and where each text applies."""
    film = make(pipe, tmp_path / "x.mp4", frames=10, switches=["3:snow"], seed=4)
    made = pipe({0: MAZE, 3: SNOW}, frames=10, seed=4)
    assert np.array_equal(np.stack(written), made)
    assert decode(film.path).shape == (10, 16, 24, 3)
    assert (film.frames, film.made, film.stopped, film.go_on) == (10, 10, False, "")
    header, event, end = lines(film.track)
    wanted = {"model": "tiny-video", "prompt": MAZE, "seed": 4, "fps": 16, "frames": 10}
    assert wanted.items() <= header.items()
    assert (event["value"]["text"], event["frame"]) == (SNOW, 4)  # a chunk begins at 4, not at 3
    assert (end["type"], end["frames"]) == ("end", 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.jsonl", "x.mp4"]


def test_frames_are_never_all_in_memory(
    pipe: CausalVideoPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer gets each chunk when it is made, and when the next one comes it is gone."""
    seen: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    def spy(self: Mp4Writer, some: np.ndarray) -> None:
        alive.append(sum(ref() is not None for ref in seen))
        assert len(some) == 2
        seen.append(weakref.ref(some))
        self.frames += len(some)

    monkeypatch.setattr(Mp4Writer, "write", spy)
    monkeypatch.setattr(Mp4Writer, "close", Mp4Writer.discard)
    make(pipe, tmp_path / "x.mp4", frames=24)
    assert len(seen) == 12
    assert max(alive) <= 2


@pytest.mark.parametrize(
    ("asked", "frames"),
    [
        ({"frames": 13}, 13),
        ({"seconds": 0.5}, 13),  # 8 frames, up to the end of a chunk
        ({"seconds": 0.1}, 5),
        ({}, 85),  # 5 seconds
    ],
)
def test_lengths(
    joined: CausalVideoPipeline, tmp_path: Path, asked: Any, frames: int, monkeypatch: Any
) -> None:
    """Frames as they are, seconds up to whole chunks, about five seconds without either."""
    told: list[int] = []

    def stop(session: Session, chunks: int, *_: Any) -> float:
        told.append(chunks)
        raise StreamgenError("enough")

    monkeypatch.setattr(module, "_make", stop)
    with pytest.raises(StreamgenError, match="enough"):
        make(joined, tmp_path / "x.mp4", **asked)
    assert told == [joined.chunks_for(frames)]


def test_small_pictures_are_enlarged(pipe: CausalVideoPipeline, tmp_path: Path) -> None:
    """Players show a picture at its size; 24 pixels would be a dot."""
    film = make(pipe, tmp_path / "x.mp4", frames=2, scale=None)
    assert decode(film.path).shape[1:] == (336, 504, 3)


def test_from_a_picture(
    joined: CausalVideoPipeline, tmp_path: Path, written: list[np.ndarray]
) -> None:
    """Its middle is what the session begins with."""
    picture = np.random.default_rng(0).integers(0, 255, (64, 120, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "p.png"), picture[..., ::-1])
    make(joined, tmp_path / "x.mp4", frames=5, image=tmp_path / "p.png")
    with joined.session(MAZE, image=picture) as session:
        assert np.array_equal(np.stack(written), session.step().frames)


def test_from_a_clip(
    joined: CausalVideoPipeline, tmp_path: Path, written: list[np.ndarray]
) -> None:
    """As much of its end as fills chunks and is seen begins the mp4; the session goes on there."""
    source = a_clip(tmp_path / "clip.mp4", frames=27)
    written.clear()
    film = make(joined, tmp_path / "x.mp4", SNOW, frames=8, video=source)
    clip, made = np.stack(written[:21]), np.stack(written[21:])
    assert clip.shape == (21, 32, 48, 3)  # the window of 6 latents; 5 + 8 + 8 frames
    assert clip.mean((1, 2, 3)) == pytest.approx([8 * n + 40 for n in range(6, 27)], abs=3)
    with joined.session(SNOW, video=clip) as session:
        assert np.array_equal(made, session.step().frames)
    header, end = lines(film.track)
    assert (header["clip"], header["clip_frames"], end["frames"]) == ("clip.mp4", 21, 29)


# Stopping and going on


def test_going_on_is_as_if_never_stopped(
    joined: CausalVideoPipeline, tmp_path: Path, written: list[np.ndarray]
) -> None:
    """Bitwise; the mp4 keeps its packets and grows, the track goes on."""
    path, state = tmp_path / "x.mp4", tmp_path / "x.session"
    switches = ["11:snow"]
    make(joined, path, frames=21, seed=3, switches=switches)
    whole = np.stack(written)
    written.clear()
    make(joined, path, frames=13, seed=3, save=state)
    old = packets(path)
    film = make(joined, path, None, frames=8, resume=state, switches=["13:snow"])
    assert np.array_equal(np.stack(written), whole)
    assert (film.frames, film.made) == (21, 8)
    assert packets(path)[: len(old)] == old
    assert len(decode(path)) == 21
    header, resumed, event, end = lines(film.track)
    assert (header["seed"], resumed) == (3, {"type": "resume", "frame": 13})
    assert (event["frame"], end["frames"]) == (13, 21)


def packets(path: Path) -> list[bytes]:
    with av.open(str(path)) as file:
        return [bytes(packet) for packet in file.demux(video=0) if packet.size]


def test_a_new_prompt_on_going_on(
    pipe: CausalVideoPipeline, tmp_path: Path, written: list[np.ndarray]
) -> None:
    """It applies to the first new chunk; into another file, whose track says where it begins."""
    state = tmp_path / "x.session"
    make(pipe, tmp_path / "x.mp4", frames=6, save=state)
    written.clear()
    film = make(pipe, tmp_path / "y.mp4", SNOW, frames=4, resume=state, save=state)
    assert np.array_equal(np.stack(written), pipe({0: MAZE, 6: SNOW}, frames=10)[6:])
    assert (film.frames, lines(film.track)[0]["first_frame"]) == (4, 6)
    film = make(pipe, tmp_path / "y.mp4", None, frames=2, resume=state)
    assert film.frames == 6


def test_a_failure_leaves_the_old_film(
    pipe: CausalVideoPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment before the end the old files are as they were; so they are after an error."""
    path, state = tmp_path / "x.mp4", tmp_path / "x.session"
    make(pipe, path, frames=4, save=state)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    write, calls = Mp4Writer.write, []

    def spy(self: Mp4Writer, some: np.ndarray) -> None:
        assert {name: (tmp_path / name).read_bytes() for name in before} == before
        calls.append(len(some))
        if len(calls) == 3:
            raise RuntimeError("the model fell over")
        write(self, some)

    monkeypatch.setattr(Mp4Writer, "write", spy)
    with pytest.raises(RuntimeError):
        make(pipe, path, None, frames=10, resume=state, save=state)
    assert len(calls) == 3
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


STOPPED = """
import os, shlex, signal, sys
sys.path.insert(0, "tests")
import torch
torch.set_num_threads(1)
from videos import tiny_video
from streamgen.apps import generate, progress
from streamgen.apps.cli import run
generate._load = lambda model, loading: tiny_video(temporal=False)
chunks, add = [], progress.Progress.add
def ctrl_c(self, frames):
    add(self, frames)
    chunks.append(frames)
    if len(chunks) == 3:
        os.kill(os.getpid(), signal.SIGINT)
progress.Progress.add = ctrl_c
sys.exit(run(sys.argv[1:]))
"""


def test_ctrl_c_and_going_on(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
    pipe: CausalVideoPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The real program, stopped by a signal in its third chunk, leaves a film that plays and a line
    that goes on with it; then the frames are those of a run that was never stopped."""
    path, state = tmp_path / "x.mp4", tmp_path / "x.session"
    line = ["generate", MAZE, "-o", str(path), "--frames", "12", "--scale", "4"]
    line += ["--switch", "7:snow"]
    done = run_python("-c", STOPPED, *line, "--save", str(state))
    assert done.returncode == 130, done.stderr
    assert "stopping at the next chunk" in done.stderr and "Traceback" not in done.stderr
    assert len(decode(path)) == 6
    told, go_on = done.stdout.splitlines()
    assert told.startswith(f"stopped after 6 new frames; {path}: 6 frames")
    assert go_on.startswith("go on with: streamgen generate ") and "--frames 6" in go_on

    monkeypatch.setattr(module, "_load", lambda model, loading: pipe)
    old = packets(path)
    assert run(shlex.split(go_on.partition("streamgen ")[2])) == 0
    assert packets(path)[: len(old)] == old
    whole = tmp_path / "whole.mp4"
    assert run([*line[:3], str(whole), *line[4:]]) == 0
    one, other = decode(path).astype(int), decode(whole).astype(int)
    assert one.shape == other.shape == (12, 64, 96, 3)
    steps = [np.abs(a - b).mean() for a, b in pairwise(other)]
    assert np.abs(one - other).mean((1, 2, 3)).max() < 0.5 * min(steps)  # the encoder's, no more


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_twice_keeps_nothing(
    pipe: CausalVideoPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, presses: int
) -> None:
    """Once finishes the film even without a session file; twice ends at once."""
    add = Progress.add

    def press(self: Progress, frames: int) -> None:
        add(self, frames)
        for _ in range(presses):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "add", press)
    before = signal.getsignal(signal.SIGINT)
    if presses == 1:
        film = make(pipe, tmp_path / "x.mp4", frames=8)
        assert (film.stopped, film.made, len(decode(film.path))) == (True, 2, 2)
    else:
        with pytest.raises(KeyboardInterrupt):
            make(pipe, tmp_path / "x.mp4", frames=8)
        assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is before


def test_a_chunk_made_ahead_is_not_lost(
    pipe: CausalVideoPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[Any]
) -> None:
    """When Ctrl-C comes the next chunk is half made; the session file holds it."""
    state = tmp_path / "x.session"
    whole = pipe(MAZE, frames=12, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "add", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        make(pipe, tmp_path / "x.mp4", frames=12, seed=1, save=state)
    assert len(written) == 2
    torch.manual_seed(99)  # nothing outside the session counts
    make(pipe, tmp_path / "x.mp4", None, frames=10, resume=state)
    assert np.array_equal(np.stack(written), whole)


# Mistakes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": ""}, "the prompt is empty.*'a brick maze at night' or 'snow'"),
        ({"prompt": None}, "the prompt is empty"),
        ({"prompt": "snow " * 9}, "9 words of the vocabulary; accepted are up to 6"),
        ({"frames": 12}, "12 frames: .*nearest: 5 and 13"),
        ({"frames": 0}, "frames 0: at least 1"),
        ({"seconds": 0.0, "frames": None}, "seconds 0: a length above 0"),
        ({"seconds": 1.0}, "--frames and --seconds"),
        ({"scale": 0}, "scale 0"),
        ({"output": "x.gif"}, r"x.gif: .*ends in .mp4"),
        ({"output": "no/x.mp4"}, "there is no folder .*no; make it first"),
        ({"save": "no/x.session"}, "there is no folder .*no; make it first"),
        ({"save": "x.mp4"}, "x.mp4: name a file of its own"),
        ({"resume": "x.session"}, "x.session: there is no such session file"),
        ({"image": "none.png"}, "none.png: No such file"),
        ({"image": "text.txt"}, "text.txt: not an image"),
        ({"video": "none.mp4"}, r"none.mp4 can't be read as a video \(No such file"),
        ({"video": "text.txt"}, "text.txt can't be read as a video"),
        ({"video": "sound.wav"}, "sound.wav holds no video"),
        ({"video": "short.mp4"}, "short.mp4 is too short: 3 frames at 16 .*5 or more"),
        ({"video": "short.mp4", "image": "p.png"}, "two beginnings"),
        ({"switches": ["snow"]}, "write FRAME:PROMPT"),
        ({"switches": ["13:snow"]}, "frames 0 to 12 are made; raise --frames"),
        ({"switches": ["6:snow"]}, "switch '6:snow': the next chunk begins at frame 13, where"),
        ({"switches": ["1:snow", "5:day"]}, "frames 1 and 5 both apply at frame 5"),
        ({"switches": ["2:snow"], "recache": "all"}, "recache 'all': accepted are"),
        ({"save": "x.session", "loading": {"offload": "all"}}, "offloaded can't be saved"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    joined: CausalVideoPipeline, tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    """The message names what is wrong and what is accepted; no file appears."""
    (tmp_path / "text.txt").write_text("hello")
    cv2.imwrite(str(tmp_path / "p.png"), np.zeros((8, 8, 3), np.uint8))
    a_clip(tmp_path / "short.mp4", frames=3)
    sound(tmp_path / "sound.wav")
    there = set(tmp_path.iterdir())
    options = {"prompt": MAZE, "path": "x.mp4", "frames": 13, **wrong}
    options["path"] = tmp_path / options.pop("output", options["path"])
    for name in ("save", "resume", "image", "video"):
        if name in options:
            options[name] = tmp_path / options[name]
    with pytest.raises(InvalidRequest, match=message) as caught:
        make(joined, **options)
    assert "\n" not in str(caught.value)
    assert set(tmp_path.iterdir()) == there


def sound(path: Path) -> None:
    """A second of silence."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("pcm_s16le", rate=8000, layout="mono")
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), layout="mono")
        samples.sample_rate = 8000
        file.mux(stream.encode(samples))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"frames": 7}, "frames 7: a video goes on by whole chunks of 2 frames; nearest: 6 and 8"),
        ({"frames": 1}, "nearest: 2$"),
        ({"seed": 3}, "--seed: the video of .* has begun without it"),
        ({"switches": ["2:snow"]}, "frames 4 to 7 are made$"),
        ({"scale": 2}, "can't be gone on with: it is no video of 48 x 32"),
        ({"output": "other.mp4"}, "ends before frame 2 and the session goes on at frame 4"),
        ({"output": "text.mp4"}, "text.mp4 can't be gone on with"),
        ({"resume": "text.mp4"}, "text.mp4: no session file"),
    ],
)
def test_a_mistake_on_going_on(
    pipe: CausalVideoPipeline, tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    """The old files stay as they were."""
    make(pipe, tmp_path / "x.mp4", frames=4, save=tmp_path / "x.session")
    make(pipe, tmp_path / "other.mp4", frames=2)
    (tmp_path / "text.mp4").write_text("hello")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    options = {"output": "x.mp4", "resume": "x.session", "frames": 4, **wrong}
    path, state = tmp_path / options.pop("output"), tmp_path / options.pop("resume")
    with pytest.raises(StreamgenError, match=message):
        make(pipe, path, None, resume=state, **options)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_full_disk_is_one_line(
    pipe: CausalVideoPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the muxer says becomes one line, and nothing is left."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Mp4Writer, "_mux", full)
    with pytest.raises(StreamgenError, match=r"x.mp4: can't be written \(No space left"):
        make(pipe, tmp_path / "x.mp4", frames=4)
    assert list(tmp_path.iterdir()) == []


# Progress


def test_lines_where_no_terminal_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line every few seconds: chunks, frames, rate and the time that is left."""
    clock = iter([0.0, 2.0, 6.0, 7.0])
    monkeypatch.setattr("streamgen.apps.progress.time.monotonic", lambda: next(clock))
    with Progress(10, 77) as progress:
        for frames in (5, 8, 8):
            progress.add(frames)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "chunk 2 of 10, frame 13 of 77, 2.2 frames/s, 30 s left\n")


def test_quiet(pipe: CausalVideoPipeline, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Nothing at all."""
    monkeypatch.setattr("streamgen.apps.progress.EVERY", 0.0)
    make(pipe, tmp_path / "x.mp4", frames=4)
    assert capsys.readouterr() == ("", "")
    make(pipe, tmp_path / "x.mp4", frames=4, quiet=False)
    assert capsys.readouterr().err.count("frames/s") == 2
