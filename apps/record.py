"""Frames into an mp4 file, and what happened beside it as JSON lines; both off the display path.

A recording must never slow the picture: the display hands over frames that it has anyway, a thread
scales and encodes them, and when that thread falls behind, frames are left out and counted.
PyAV writes the file, so no ffmpeg program is needed; it is imported at first use.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import numpy as np

from streamgen import __version__
from streamgen.errors import InvalidRequest, StreamgenError
from streamgen.frames import Event

WATCHABLE = 512  # pixels: narrower pictures are enlarged, because players show them at their size


def watchable_scale(width: int) -> int:
    """How many times to enlarge a picture `width` pixels wide."""
    return max(1, round(WATCHABLE / width))


class RecordingFailed(StreamgenError):
    """A video file could not be written."""


class Mp4Writer:
    """An H.264 mp4 that plays everywhere: yuv420p, even sizes, index in front.

    Frames are encoded as they come; none are kept. The file appears at `path` only when it is
    whole; until then it is `path` + ".part", and what lay at `path` before is as it was.

    Args:
        path: where to write; ends in .mp4.
        width, height: of the frames that come, in pixels.
        fps: frames a second.
        scale: enlarge so many times.
        preset: libx264's speed; "veryfast" beside a live picture.
        append: go on with the file at `path`: its packets are copied as they are, and new frames
            follow with the next timestamps.

    Raises:
        InvalidRequest: another ending, a folder that does not exist, a scale below 1, or a file to
            append to that is no video of these settings.
        RecordingFailed: the disk refuses.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        width: int,
        height: int,
        fps: float,
        scale: int = 1,
        preset: str = "medium",
        append: bool = False,
    ) -> None:
        self.path = check_output(path)
        if scale < 1:
            raise InvalidRequest(f"scale {scale}: a whole number from 1 up is needed")
        import av

        self._part = self.path.with_name(self.path.name + ".part")
        # Sizes of yuv420p are even; a row or column is cut from a picture that is not.
        self._size = (width * scale // 2 * 2, height * scale // 2 * 2)
        self._scale = scale
        self._rate = Fraction(fps).limit_denominator(1001)
        self.frames = self.copied = self._muxed = 0
        with self._told():
            options = {"movflags": "+faststart"}
            self._file = av.open(str(self._part), "w", format="mp4", options=options)
        try:
            with self._told():
                self._stream = self._file.add_stream("libx264", rate=self._rate)
                self._stream.width, self._stream.height = self._size
                self._stream.pix_fmt = "yuv420p"
                self._stream.thread_count = 1  # two cores are shared with the model
                self._stream.options = {"crf": "18", "preset": preset}
                self._file.start_encoding()
                self._tick = int(1 / self._rate / (self._stream.time_base or 1))
            if append:
                self._copy()
        except BaseException:
            self.discard()
            raise

    def write(self, frames: np.ndarray) -> None:
        """Add frames, uint8 `[F, H, W, 3]`. Raises RecordingFailed if the disk refuses."""
        import av
        import cv2

        for frame in frames:
            if self._scale > 1:
                height, width = frame.shape[:2]
                size = (width * self._scale, height * self._scale)
                frame = cv2.resize(frame, size, interpolation=cv2.INTER_LANCZOS4)
            width, height = self._size
            picture = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(frame[:height, :width]), format="rgb24"
            )
            picture.pts = self.frames
            picture.time_base = 1 / self._rate
            with self._told():
                self._mux(self._stream.encode(picture))
            self.frames += 1

    def _mux(self, packets: Iterable[Any]) -> None:
        """Write packets, the n-th decoded at frame n - `_REORDER`: x264 takes a shorter lead in a
        very short video, and then what is appended would be decoded before what is there."""
        for packet in packets:
            packet.pts = round(packet.pts * packet.time_base * self._rate) * self._tick
            packet.dts = (self._muxed - _REORDER) * self._tick
            packet.time_base, packet.duration = self._stream.time_base, self._tick
            packet.stream = self._stream
            self._file.mux(packet)
            self._muxed += 1

    def _copy(self) -> None:
        """Copy the video at `path`, whose decoder must be set up as this encoder sets it up."""
        import av

        no = InvalidRequest(
            f"{self.path} can't be gone on with: it is no video of {self._size[0]} x "
            f"{self._size[1]} at {float(self._rate):g} frames/s that streamgen wrote with these "
            "settings; name another file"
        )
        try:
            with av.open(str(self.path)) as old:
                streams = old.streams
                if [stream.type for stream in streams] != ["video"]:
                    raise no
                context = streams.video[0].codec_context
                ours, theirs = self._stream.codec_context.extradata, context.extradata
                sets = [part for part in (ours or b"").split(_START) if part]
                # "avcC", byte 4: a length before each unit has 4 bytes
                if not theirs or theirs[4] & 3 != 3 or not all(part in theirs for part in sets):
                    raise no
                for packet in old.demux(streams.video[0]):
                    if packet.size:  # the last one is empty
                        self._mux([_start_codes(packet)])
        except (av.FFmpegError, OSError):
            raise no from None
        self.frames = self.copied = self._muxed

    @contextmanager
    def _told(self) -> Iterator[None]:
        """A disk that refuses is one line."""
        import av

        try:
            yield
        except (av.FFmpegError, OSError) as error:
            raise RecordingFailed(
                f"{self.path}: can't be written ({error.strerror or error})"
            ) from error

    def close(self) -> None:
        """Finish the file; without a new frame there is none, or the old one as it was.

        Raises:
            RecordingFailed: the disk refuses; the old file is as it was.
        """
        if self.frames == self.copied:
            self.discard()
            return
        try:
            with self._told():
                self._mux(self._stream.encode(None))
                self._file.close()
                self._part.replace(self.path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Leave nothing behind, and the old file as it was."""
        with suppress(Exception):  # the disk may be full
            self._file.close()
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


_START = b"\0\0\0\1"  # before each unit in the encoder's own form (H.264, Annex B)
_REORDER = 2  # frames by which libx264 decodes ahead, with the B-frames of its presets


def _start_codes(packet: Any) -> Any:
    """An mp4's packet in the encoder's own form, which the mp4 muxer turns back: each unit has a
    start code in place of its length. Without that the muxer writes nothing of it."""
    import av

    data, at = bytearray(packet), 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        data[at : at + 4] = _START
        at += 4 + length
    copy = av.Packet(bytes(data))
    copy.pts, copy.time_base, copy.is_keyframe = packet.pts, packet.time_base, packet.is_keyframe
    return copy


def check_output(path: str | Path) -> Path:
    """The path of an mp4 to write. Raises InvalidRequest if nothing can be written there."""
    path = Path(path)
    if path.suffix.lower() != ".mp4":
        raise InvalidRequest(f"{path}: the output is a video; its name ends in .mp4")
    if not path.parent.is_dir():
        raise InvalidRequest(f"{path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise InvalidRequest(f"{path} is a folder; name a file")
    return path


def describe(model: Any, *, prompt: str, seed: int, frames: int, scale: int) -> dict[str, Any]:
    """The first line of a track: what was asked of which model."""
    config = model.config
    name = getattr(model, "name", None) or getattr(config, "name", "")
    return {
        "model": str(name),
        "prompt": prompt,
        "seed": seed,
        "fps": config.fps,
        "frames": frames,
        "width": config.width,
        "height": config.height,
        "chunk_frames": config.chunk_frames,
        "scale": scale,
        "version": __version__,
    }


class Track:
    """What happened, one JSON object a line: a header, one line for every event, an end.

    Args:
        path: where to write.
        header: the first line.
        before: lines of an earlier track that this one goes on with, in place of a header.
    """

    def __init__(
        self, path: str | Path, header: Mapping[str, Any], before: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self._file = Path(path).open("w", encoding="utf-8")
        for line in list(before) or [{"type": "header", **header}]:
            self.write(line)

    def event(self, event: Event) -> None:
        """Add an event of a session: its kind, its value, the first frame it shaped."""
        self.write({"type": "event", **event.to_json()})

    def write(self, line: Mapping[str, Any]) -> None:
        """Add any line."""
        self._file.write(json.dumps(line, default=_plain, ensure_ascii=False) + "\n")

    def close(self, **end: Any) -> None:
        """Write the last line and finish the file."""
        self.write({"type": "end", **end})
        self._file.close()


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, np.integer | np.floating):
        return value.item()
    return str(value)


@dataclass(frozen=True)
class Recorded:
    """A finished recording: frames in the file, and those left out because the disk was slow."""

    path: Path
    track: Path
    frames: int
    skipped: int


class Recorder:
    """Writes an mp4 and its track in a thread of its own; `put` never waits.

    Args:
        path: the mp4; the track lies beside it with the ending .jsonl.
        header: first line of the track.
        backlog: frames that may wait; beyond that the newest are skipped.
    """

    def __init__(
        self,
        path: Path,
        *,
        width: int,
        height: int,
        fps: float,
        header: Mapping[str, Any],
        backlog: int = 256,
    ) -> None:
        self.path, self.fps, self.skipped = path, fps, 0
        self._track_path = path.with_suffix(".jsonl")
        self._track = Track(self._track_path, header)
        self._writer = Mp4Writer(
            path,
            width=width,
            height=height,
            fps=fps,
            scale=watchable_scale(width),
            preset="veryfast",
        )
        self._queue: queue.Queue[np.ndarray | None] = queue.Queue(maxsize=backlog)
        self._taken = 0
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """Length so far."""
        return self._taken / self.fps

    def put(self, frame: np.ndarray) -> None:
        """Add one frame, uint8 `[H, W, 3]`; it must not change afterwards."""
        try:
            self._queue.put_nowait(frame)
            self._taken += 1
        except queue.Full:
            self.skipped += 1

    def event(self, line: Mapping[str, Any]) -> None:
        """Add a line to the track, with the place in the recording where it belongs."""
        self._track.write({**line, "at": self._taken})

    def _run(self) -> None:
        while (frame := self._queue.get()) is not None:
            if self._failed is None:
                try:
                    self._writer.write(frame[None])
                except Exception as error:  # told by `close`; the picture goes on
                    self._failed = error

    def close(self) -> Recorded:
        """Write what waits and finish both files; waits for it.

        Raises:
            RecordingFailed: the file could not be written (a full disk, for example).
        """
        self._queue.put(None)
        self._thread.join()
        if self._failed is not None:
            self._writer.discard()
            raise RecordingFailed(f"the recording could not be written: {self._failed}")
        self._writer.close()
        self._track.close(frames=self._writer.frames, skipped=self.skipped)
        return Recorded(self.path, self._track_path, self._writer.frames, self.skipped)
