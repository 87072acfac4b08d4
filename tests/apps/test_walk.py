"""Walks without a browser: the script of keys, the switches of prompts, the files they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from streamgen.apps.walk import parse_actions, parse_switches, walk
from streamgen.errors import InvalidRequest
from tests.fakes import FakeConfig, FakeWorld, read_stamp

KEYS = ("w", "s", "a", "d", "q", "e")


def read_track(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_video(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def test_script() -> None:
    """Words hold their keys for their frames; + joins keys, . is none, no count is one frame."""
    script = parse_actions("w*16 a*8 w+a*40 .*8 d", KEYS)
    assert script.frames == 73
    held = {at: "".join(sorted(script.keys_at(at))) for at in (0, 15, 16, 24, 63, 64, 72)}
    assert held == {0: "w", 15: "w", 16: "a", 24: "aw", 63: "aw", 64: "", 72: "d"}


def test_last_keys_stay_held() -> None:
    """After its last word a script goes on as a live session would: the keys stay held."""
    assert parse_actions("a*2 w", KEYS).keys_at(1000) == {"w"}
    assert parse_actions("", KEYS).keys_at(5) == frozenset()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("w*16 x*8", "unknown key 'x' in 'x*8'; accepted: w s a d q e"),
        ("w+z", "unknown key 'z'"),
        ("w*0", "write keys and a number of frames"),
        ("w*", "write keys and a number of frames"),
        ("w*a", "write keys and a number of frames"),
        ("*8", "write keys and a number of frames"),
        ("w+", "unknown key ''"),
    ],
)
def test_bad_script(text: str, complaint: str) -> None:
    """A word that can't be read names itself and what is accepted."""
    with pytest.raises(InvalidRequest) as caught:
        parse_actions(text, KEYS)
    assert complaint in str(caught.value)


def test_switches() -> None:
    """FRAME:PROMPT; a colon in the prompt is the prompt's."""
    assert parse_switches(["32:heavy snow", "4: a maze: at night"], 64) == {
        32: "heavy snow",
        4: "a maze: at night",
    }


@pytest.mark.parametrize("text", ["snow", "32:", ":snow", "x:snow", "-1:snow", "64:snow"])
def test_bad_switch(text: str) -> None:
    """Another form, or a frame outside the walk, is refused."""
    with pytest.raises(InvalidRequest):
        parse_switches([text], 64)


def test_walk_writes_video_and_track(tmp_path: Path) -> None:
    """Every frame asked for is in the video, in order; the track says what shaped which frame."""
    done = walk(
        FakeWorld(),
        output=tmp_path / "walk.mp4",
        actions="w*8 a*4 .*9",
        switches=["13:heavy snow"],
        prompt="a brick maze",
        seed=5,
        progress=False,
    )
    frames = read_video(done.path)
    small = [frame[2::4, 2::4] for frame in frames]
    assert [read_stamp(frame) for frame in small] == list(range(21))
    assert frames[0].shape == (384, 512, 3)
    header, *events, end = read_track(done.track)
    assert header["type"] == "header"
    wanted = {"model": "fake-world", "prompt": "a brick maze", "seed": 5, "fps": 20, "frames": 21}
    assert wanted.items() <= header.items()
    assert "version" in header
    assert [(e["kind"], e["value"], e["frame"]) for e in events] == [
        ("act", ["w"], 0),
        ("act", ["a"], 8),
        ("act", [], 12),
        ("prompt", {"text": "heavy snow", "recache": "last_chunk"}, 12),
    ]
    assert end["frames"] == 21


@pytest.mark.parametrize("chunk_frames", [1, 3, 4])
def test_any_chunk_size(tmp_path: Path, chunk_frames: int) -> None:
    """The length is what was asked for, whatever the chunks of the world are."""
    world = FakeWorld(FakeConfig(chunk_frames=chunk_frames))
    done = walk(world, output=tmp_path / "w.mp4", frames=10, actions="w", scale=1, progress=False)
    assert [read_stamp(frame) for frame in read_video(done.path)] == list(range(10))


def test_same_seed_same_film(tmp_path: Path) -> None:
    """The same seed and script give the same file, another seed another."""
    films = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        path = tmp_path / f"{name}.mp4"
        walk(FakeWorld(), output=path, frames=6, actions="w", seed=seed, scale=1, progress=False)
        films.append(path.read_bytes())
    assert films[0] == films[1] != films[2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"actions": "x*3"},
        {"switches": ["99:snow"]},
        {"prompt": "snow " * 99},
        {"image": "no-such.png"},
        {"output": "walk.gif"},
        {"frames": 0},
        {"scale": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_bad_request_leaves_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """A mistake is one InvalidRequest, no session stays open and no file is left."""
    world = FakeWorld()
    options: dict[str, Any] = {"output": "walk.mp4", "frames": 8, **wrong}
    options["output"] = tmp_path / options["output"]
    with pytest.raises(InvalidRequest):
        walk(world, progress=False, **options)
    assert world.live == []
    assert list(tmp_path.iterdir()) == []


def test_not_an_image(tmp_path: Path) -> None:
    """A first frame that is no image is refused by name."""
    path = tmp_path / "picture.png"
    path.write_text("hello")
    with pytest.raises(InvalidRequest, match="picture.png: not an image"):
        walk(FakeWorld(), output=tmp_path / "w.mp4", image=path, progress=False)


def test_painted_first_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generated` is painted for the prompt and the seed; so is it for the suggestion."""
    asked: list[tuple[str, int]] = []

    def paint(prompt: str, seed: int) -> np.ndarray:
        asked.append((prompt, seed))
        return np.full((96, 128, 3), 200, np.uint8)

    monkeypatch.setattr("streamgen.apps.painter.first_frames", lambda source, **size: paint)
    world = FakeWorld()
    options: dict[str, Any] = {"image": "generated", "frames": 2, "scale": 1, "progress": False}
    done = walk(world, output=tmp_path / "w.mp4", prompt="heavy snow", seed=3, **options)
    assert read_video(done.path)[0][60].mean() > 190
    walk(world, output=tmp_path / "w.mp4", **options)
    assert asked == [("heavy snow", 3), (world.config.suggestions[0], 0)]


def test_bar_counts_frames(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The progress bar ends at the number of frames, on the error stream."""
    walk(FakeWorld(), output=tmp_path / "w.mp4", frames=5, scale=1)
    out, err = capsys.readouterr()
    assert "5/5" in err
    assert out == ""
