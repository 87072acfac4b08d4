"""Video files and tracks: playable, whole or absent, off the display path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from streamgen.apps.record import Mp4Writer, Recorder, Track, watchable_scale
from streamgen.errors import InvalidRequest
from streamgen.frames import Event


def make_frames(count: int, height: int = 24, width: int = 32) -> np.ndarray:
    """Grey frames, each brighter than the one before."""
    levels = np.arange(count, dtype=np.uint8) * 8 + 20
    return np.broadcast_to(levels[:, None, None, None], (count, height, width, 3))


def read_video(path: Path) -> tuple[av.VideoStream, list[np.ndarray]]:
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        return stream, [frame.to_ndarray(format="rgb24") for frame in file.decode(stream)]


def test_mp4_plays(tmp_path: Path) -> None:
    """The file is H.264, yuv420p, of the stated rate, and holds every frame in order."""
    path = tmp_path / "walk.mp4"
    with Mp4Writer(path, width=32, height=24, fps=20, scale=2) as video:
        video.write(make_frames(10))
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        context = stream.codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
        assert (context.width, context.height) == (64, 48)
        assert float(stream.average_rate or 0) == 20
        assert float(stream.duration * stream.time_base) == pytest.approx(0.5)
    levels = [frame.mean() for frame in read_video(path)[1]]
    assert levels == pytest.approx([20 + 8 * index for index in range(10)], abs=3)


def test_colours_keep_their_order(tmp_path: Path) -> None:
    """Red stays red: frames are RGB on every border."""
    red = np.zeros((4, 24, 32, 3), np.uint8)
    red[..., 0] = 200
    with Mp4Writer(tmp_path / "red.mp4", width=32, height=24, fps=20) as video:
        video.write(red)
    pixel = read_video(tmp_path / "red.mp4")[1][0][12, 16]
    assert pixel[0] > 180 and pixel[2] < 20


def test_index_lies_in_front(tmp_path: Path) -> None:
    """+faststart: a browser can play the file before it has all of it."""
    with Mp4Writer(tmp_path / "walk.mp4", width=32, height=24, fps=20) as video:
        video.write(make_frames(4))
    data = (tmp_path / "walk.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")


def test_odd_sizes(tmp_path: Path) -> None:
    """A picture of odd size loses a row and a column, because yuv420p has none."""
    with Mp4Writer(tmp_path / "odd.mp4", width=33, height=25, fps=20) as video:
        video.write(make_frames(2, 25, 33))
    assert read_video(tmp_path / "odd.mp4")[1][0].shape == (24, 32, 3)


def test_whole_or_absent(tmp_path: Path) -> None:
    """When making frames fails, no file is left."""
    with pytest.raises(ZeroDivisionError):
        with Mp4Writer(tmp_path / "walk.mp4", width=32, height=24, fps=20) as video:
            video.write(make_frames(2))
            raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def packets(path: Path) -> list[bytes]:
    with av.open(str(path)) as file:
        return [bytes(packet) for packet in file.demux(video=0) if packet.size]


def noise(count: int, seed: int = 0) -> np.ndarray:
    """Frames that B-frames and reordering have something to do with."""
    return np.random.default_rng(seed).integers(0, 255, (count, 24, 32, 3), np.uint8)


@pytest.mark.parametrize("first", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("second", [1, 4])
def test_append(tmp_path: Path, first: int, second: int) -> None:
    """Old packets byte for byte, then the new frames; every frame decodes, one tick apart, as in a
    file written at once. Very short parts count: x264 orders them otherwise."""
    path, frames = tmp_path / "walk.mp4", noise(first + second + 3)
    done = 0
    for count in (first, second, 3):
        before = packets(path) if done else []
        with Mp4Writer(path, width=32, height=24, fps=20, append=done > 0) as video:
            assert video.frames == video.copied == done
            video.write(frames[done : done + count])
        done += count
        assert packets(path)[: len(before)] == before
        assert len(packets(path)) == done
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        decoded = list(file.decode(stream))
        assert [frame.time for frame in decoded] == pytest.approx([n / 20 for n in range(done)])
        assert float(stream.duration * stream.time_base) == pytest.approx(done / 20)
        assert float(stream.average_rate or 0) == 20
    with Mp4Writer(tmp_path / "once.mp4", width=32, height=24, fps=20) as video:
        video.write(frames)
    for one, other in zip(decoded, read_video(tmp_path / "once.mp4")[1], strict=True):
        assert np.abs(one.to_ndarray(format="rgb24").astype(int) - other).mean() < 8
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize("fps", [16, 23.976, 30000 / 1001, 12.5])
def test_append_at_any_rate(tmp_path: Path, fps: float) -> None:
    """Ticks are whole numbers at every rate."""
    path = tmp_path / "walk.mp4"
    for append in (False, True):
        with Mp4Writer(path, width=32, height=24, fps=fps, append=append) as video:
            video.write(noise(4))
    with av.open(str(path)) as file:
        times = [frame.time for frame in file.decode(video=0)]
    assert times == pytest.approx([n / fps for n in range(8)], abs=1e-4)


def test_append_nothing(tmp_path: Path) -> None:
    """Without a new frame, or after an error, the old file stays as it was."""
    path = tmp_path / "walk.mp4"
    with Mp4Writer(path, width=32, height=24, fps=20) as video:
        video.write(noise(3))
    before = path.read_bytes()
    Mp4Writer(path, width=32, height=24, fps=20, append=True).close()
    assert path.read_bytes() == before
    with pytest.raises(ZeroDivisionError):
        with Mp4Writer(path, width=32, height=24, fps=20, append=True) as video:
            video.write(noise(3))
            raise ZeroDivisionError
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "settings",
    [{"fps": 16}, {"scale": 2}, {"width": 48}, {"preset": "veryfast"}],
    ids=lambda settings: next(iter(settings)),
)
def test_append_to_another_kind(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A decoder is set up once for a file: other settings are refused, and nothing changes."""
    path = tmp_path / "walk.mp4"
    with Mp4Writer(path, **{"width": 32, "height": 24, "fps": 20, **settings}) as video:
        video.write(make_frames(2, 24, settings.get("width", 32)))
    before = path.read_bytes()
    with pytest.raises(InvalidRequest, match="can't be gone on with: it is no video of 32 x 24 at"):
        Mp4Writer(path, width=32, height=24, fps=20, append=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("harm", ["text", "cut", "absent"])
def test_append_to_no_video(tmp_path: Path, harm: str) -> None:
    """So is what is no video, or the first half of one."""
    path = tmp_path / "walk.mp4"
    if harm == "text":
        path.write_text("hello")
    elif harm == "cut":
        with Mp4Writer(path, width=32, height=24, fps=20) as video:
            video.write(noise(2))
        path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(InvalidRequest, match="walk.mp4 can't be gone on with"):
        Mp4Writer(path, width=32, height=24, fps=20, append=True)
    assert list(tmp_path.iterdir()) == ([] if harm == "absent" else [path])


def test_disk_that_refuses(tmp_path: Path, run_python: Any) -> None:
    """A real write error is one line, and nothing is left."""
    script = """
import resource, signal, sys
import numpy as np
from streamgen.apps.record import Mp4Writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
frames = np.random.default_rng(0).integers(0, 255, (200, 96, 128, 3), np.uint8)
with Mp4Writer(sys.argv[1], width=128, height=96, fps=20) as video:
    video.write(frames)
"""
    done = run_python("-c", script, str(tmp_path / "walk.mp4"))
    assert "RecordingFailed" in done.stderr.splitlines()[-1], done.stderr
    assert "walk.mp4: can't be written (File too large)" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["walk.avi", "no/such/folder/walk.mp4"])
def test_bad_output(tmp_path: Path, name: str) -> None:
    """Another ending or a missing folder is refused before anything is made."""
    with pytest.raises(InvalidRequest):
        Mp4Writer(tmp_path / name, width=32, height=24, fps=20)


def test_track_is_json_lines(tmp_path: Path) -> None:
    """A header, an object for every event, an end; sets of keys are sorted lists."""
    track = Track(tmp_path / "t.jsonl", {"model": "m", "seed": 3})
    track.event(Event(0, "act", frozenset({"w", "a"}), 16))
    track.close(frames=20)
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert lines == [
        {"type": "header", "model": "m", "seed": 3},
        {"type": "event", "id": 0, "kind": "act", "value": ["a", "w"], "frame": 16},
        {"type": "end", "frames": 20},
    ]


def test_track_goes_on(tmp_path: Path) -> None:
    """Lines of an earlier track take the header's place."""
    before = [{"type": "header", "seed": 1}, {"type": "resume", "frame": 8}]
    track = Track(tmp_path / "t.jsonl", {"seed": 2}, before)
    track.close(frames=16)
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert lines == [*before, {"type": "end", "frames": 16}]


def test_recorder_writes_beside_the_display(tmp_path: Path) -> None:
    """A thread writes what `put` is given; the size is one that people can watch."""
    recorder = Recorder(tmp_path / "r.mp4", width=32, height=24, fps=20, header={"model": "m"})
    for frame in make_frames(12):
        recorder.put(frame)
    recorder.event({"type": "event", "kind": "prompt", "value": "snow"})
    done = recorder.close()
    assert (done.frames, done.skipped) == (12, 0)
    frames = read_video(done.path)[1]
    scale = watchable_scale(32)
    assert (len(frames), frames[0].shape) == (12, (24 * scale, 32 * scale, 3))
    assert '"kind": "prompt"' in done.track.read_text()


def test_recorder_never_waits(tmp_path: Path) -> None:
    """When the backlog is full, frames are skipped and counted; `put` comes back at once."""
    recorder = Recorder(tmp_path / "r.mp4", width=32, height=24, fps=20, header={}, backlog=2)
    for frame in np.repeat(make_frames(1), 400, axis=0):
        recorder.put(frame)
    done = recorder.close()
    assert done.frames + done.skipped == 400


def test_empty_recording(tmp_path: Path) -> None:
    """A recording without a frame leaves no video."""
    recorder = Recorder(tmp_path / "r.mp4", width=32, height=24, fps=20, header={})
    assert recorder.close().frames == 0
    assert not (tmp_path / "r.mp4").exists()
