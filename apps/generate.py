"""`streamgen generate`: a text, a picture or a clip in, an mp4 and its track out.

Frames go from the model to the encoder chunk by chunk, so a video may be as long as the disk is
large. Ctrl-C ends it at the next chunk: the mp4 is finished, and with `save` it can be gone on
with.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import numpy as np

from streamgen.apps.clips import check_clip, read_clip
from streamgen.apps.images import read_image
from streamgen.apps.progress import Progress
from streamgen.apps.record import Mp4Writer, Track, check_output, describe, watchable_scale
from streamgen.apps.walk import parse_switches
from streamgen.errors import InvalidRequest
from streamgen.frames import Event
from streamgen.weights import registry

DEFAULT_MODEL = "pocket-video"
DEFAULT_SECONDS = 5.0


@dataclass(frozen=True)
class Film:
    """What a run left.

    Args:
        path, track: the mp4 and its JSON lines.
        frames: in the mp4.
        made: of these, by this run.
        seconds: that the model took.
        go_on: the command that goes on from here; empty without a session file.
        stopped: Ctrl-C ended it before its time.
    """

    path: Path
    track: Path
    frames: int
    made: int
    seconds: float
    go_on: str
    stopped: bool


def generate(
    prompt: str | None = None,
    *,
    model: Any = DEFAULT_MODEL,
    output: str | Path = "out.mp4",
    frames: int | None = None,
    seconds: float | None = None,
    seed: int | None = None,
    image: str | Path | None = None,
    video: str | Path | None = None,
    switches: Sequence[str] = (),
    recache: str | None = None,
    save: str | Path | None = None,
    resume: str | Path | None = None,
    scale: int | None = None,
    quiet: bool = False,
    loading: Mapping[str, Any] | None = None,
) -> Film:
    """Make a video and write it.

    The mp4 and its track appear whole or not at all; with `resume` they grow by the new frames, or
    stay as they were.

    Args:
        prompt: what to show; with `resume` what to show from now on, or None for no change.
        model: a packaged name, a folder of weights, or a loaded pipeline.
        output: the mp4; its track lies beside it with the ending .jsonl.
        frames: how many to make; those of `video` or before `resume` not counted.
        seconds: the same in seconds, up to the next whole chunk. Default: 5.
        seed: same seed and same requests: same frames. Default 0.
        image: path of a picture to begin with.
        video: path of a clip to go on from. As much of its end as the model can see is the
            beginning of the mp4.
        switches: new prompts, each as "40:heavy snow"; one applies at the first chunk that begins
            at its frame or after it.
        recache: how a switch recomputes the past; see `Session.prompt`. Default: the model's own.
        save: path of the session file to write at the end, or when Ctrl-C ends it.
        resume: path of the session file to go on from; `output` is appended to if it exists.
        scale: enlarge so many times; by default small pictures to some 512 pixels.
        quiet: no progress.
        loading: options of `CausalVideoPipeline.from_pretrained` besides `model`.

    Raises:
        InvalidRequest: any of these can't be used; no file has changed.
        UnknownModel, WeightsError: from loading.
        SessionFileError: the session file can't be read or written.
        RecordingFailed: the mp4 can't be written.
    """
    path = check_output(output)
    _check_lengths(frames, seconds, scale)
    _check_files(path, save, resume)
    if save is not None and (loading or {}).get("offload") == "all":
        raise InvalidRequest("--save: a session whose weights are offloaded can't be saved")
    if resume is None:
        _check_prompt(prompt, model)
        _check_beginning(image, video)
    else:
        for name, value in (("image", image), ("video", video), ("seed", seed)):
            if value is not None:
                raise InvalidRequest(f"--{name}: the video of {resume} has begun without it")
    pipe = _load(model, loading or {})
    with ExitStack() as stack:
        clip = None
        if resume is not None:
            session = pipe.load_session(resume)
        else:
            picture, clip = _read_beginning(pipe, image, video)
            session = pipe.session(prompt, seed or 0, image=picture, video=clip)
        stack.callback(session.close)
        start = session.frame
        enlarged = scale or watchable_scale(pipe.config.width)
        length = _length(pipe, start, frames, seconds)
        if resume is not None and prompt is not None and prompt.strip():
            session.prompt(prompt, recache)
        _ask(session, parse_switches(switches, start + length, start), recache, start + length)
        header = describe(
            pipe, prompt=session.text, seed=session.seed, frames=length, scale=enlarged
        )
        if clip is not None:
            header |= {"clip": Path(str(video)).name, "clip_frames": len(clip)}
        reel = stack.enter_context(
            Reel(path, pipe.config, header, enlarged, None if resume is None else start)
        )
        if clip is not None:
            reel.write(clip)
        interrupt = stack.enter_context(Interrupt())
        chunks = length // pipe.chunk_pixels
        if start == 0:
            chunks = pipe.chunks_for(length)
        with Progress(chunks, length, quiet=quiet) as progress:
            took = _make(session, chunks, reel, progress, interrupt)
        reel.finish(took)  # before the session: a crash in between loses no frame
        made, go_on = session.frame - start, ""
        if save is not None:
            session.save(save)
            go_on = _command(model, loading or {}, save, path, length - made, scale)
        return Film(path, reel.track, reel.frames, made, took, go_on, stopped=made < length)


def _make(session: Any, chunks: int, reel: Reel, progress: Progress, interrupt: Interrupt) -> float:
    """Make the chunks until all are there or Ctrl-C; returns the seconds that it took.

    A chunk that was made ahead when Ctrl-C came stays in the session.
    """
    begun = perf_counter()
    with closing(session.stream(chunks, overlap=True)) as made:
        for chunk in made:
            reel.write(chunk.frames, chunk.applied)
            progress.add(len(chunk.frames))
            if interrupt.asked:
                break
    return perf_counter() - begun


def _ask(session: Any, texts: Mapping[int, str], recache: str | None, end: int) -> None:
    """Ask a session for new texts at their frames.

    Raises:
        InvalidRequest: no chunk begins between a text's frame and the end, or two texts meet.
    """
    asked: dict[int, int] = {}
    for frame, text in sorted(texts.items()):
        at = session.prompt(text, recache, at=frame).applies_at_frame
        if at >= end:
            raise InvalidRequest(
                f"switch {f'{frame}:{text}'!r}: the next chunk begins at frame {at}, where the "
                "video ends; raise --frames or switch earlier"
            )
        if at in asked:
            raise InvalidRequest(
                f"switches at frames {asked[at]} and {frame} both apply at frame {at}, where a "
                "chunk begins: leave one of them out"
            )
        asked[at] = frame


class Reel:
    """The mp4 and its track: both appear whole, or stay as they were.

    Args:
        path: of the mp4.
        config: size and rate of the frames.
        header: first line of a new track.
        scale: enlarge so many times.
        resumed: the frame that comes first, if a session goes on; None for a new video.

    Raises:
        InvalidRequest: the mp4 that is there does not end where the session stands.
    """

    def __init__(
        self, path: Path, config: Any, header: Mapping[str, Any], scale: int, resumed: int | None
    ) -> None:
        self.track = path.with_suffix(".jsonl")
        self._part = path.with_name(self.track.name + ".part")
        append = resumed is not None and path.exists()
        before = _lines(self.track) if append else []
        self._video = Mp4Writer(
            path,
            width=config.width,
            height=config.height,
            fps=config.fps,
            scale=scale,
            append=append,
        )
        try:
            if append:
                stands = self._video.frames + next(iter(before), {}).get("first_frame", 0)
                if stands != resumed:
                    raise InvalidRequest(
                        f"{path} ends before frame {stands} and the session goes on at frame "
                        f"{resumed}: name another output"
                    )
                before.append({"type": "resume", "frame": resumed})
            elif resumed:
                header = {**header, "first_frame": resumed}
            self._lines = Track(self._part, header, before)
        except BaseException:
            self._video.discard()
            raise
        self._done = False

    @property
    def frames(self) -> int:
        """Frames in the mp4."""
        return self._video.frames

    def write(self, frames: np.ndarray, applied: Sequence[Event] = ()) -> None:
        """Add frames, uint8 `[F, H, W, 3]`, and the events that they are the first to show."""
        for event in applied:
            self._lines.event(event)
        self._video.write(frames)

    def finish(self, seconds: float) -> None:
        """Put both files in their places."""
        self._lines.close(frames=self.frames, seconds=round(seconds, 3))
        self._video.close()
        self._part.replace(self.track)
        self._done = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._done:
            self._video.discard()
            self._lines.close()
            self._part.unlink(missing_ok=True)


def _lines(track: Path) -> list[dict[str, Any]]:
    """The lines of an earlier track but its end; none if it can't be read."""
    try:
        lines = [json.loads(line) for line in track.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []
    return [line for line in lines if isinstance(line, dict) and line.get("type") != "end"]


class Interrupt:
    """Ctrl-C asks for an end at the next chunk; a second one ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _heard(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print(
            "\nstopping at the next chunk; Ctrl-C again stops at once and keeps nothing",
            file=sys.stderr,
            flush=True,
        )


# What is asked for, before anything is loaded


def _check_lengths(frames: int | None, seconds: float | None, scale: int | None) -> None:
    if frames is not None and seconds is not None:
        raise InvalidRequest("--frames and --seconds say the same: leave one of them out")
    if frames is not None and frames < 1:
        raise InvalidRequest(f"frames {frames}: at least 1 is needed")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise InvalidRequest(f"seconds {seconds:g}: a length above 0 is needed")
    if scale is not None and scale < 1:
        raise InvalidRequest(f"scale {scale}: a whole number from 1 up is needed")


def _check_files(output: Path, save: str | Path | None, resume: str | Path | None) -> None:
    if save is not None:
        target = Path(save)
        if not target.parent.is_dir():
            raise InvalidRequest(f"{save}: there is no folder {target.parent}; make it first")
        if target.is_dir() or target.absolute() == output.absolute():
            raise InvalidRequest(f"{save}: name a file of its own for the session")
    if resume is not None and not Path(resume).is_file():
        raise InvalidRequest(f"{resume}: there is no such session file (--save writes one)")


def _check_prompt(prompt: str | None, model: Any) -> None:
    if prompt is not None and prompt.strip():
        return
    texts = _suggestions(model)
    such = f", such as {' or '.join(repr(text) for text in texts[:3])}" if texts else ""
    raise InvalidRequest(f"the prompt is empty: say what the video shows{such}")


def _suggestions(model: Any) -> Sequence[str]:
    """What a model suggests to show, read without loading it."""
    if not isinstance(model, str):
        return tuple(model.config.suggestions)
    folder = registry.resolve(model) if model in registry.packaged_names() else Path(model)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return tuple(map(str, config["video"]["suggestions"]))
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def _check_beginning(image: str | Path | None, video: str | Path | None) -> None:
    """Loading may take minutes: what can't be read is told before."""
    if image is not None and video is not None:
        raise InvalidRequest("--image and --video are two beginnings: leave one of them out")
    if image is not None:
        read_image(image, width=8, height=8)
    if video is not None:
        check_clip(video)


def _load(model: Any, loading: Mapping[str, Any]) -> Any:
    if not isinstance(model, str):
        return model
    from streamgen.pipelines.causal_video import CausalVideoPipeline

    return CausalVideoPipeline.from_pretrained(model, **loading)


# What the model makes of it


def _read_beginning(
    pipe: Any, image: str | Path | None, video: str | Path | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The picture, or the end of the clip: as much of it as the model can see."""
    config = pipe.config
    size = {"width": config.width, "height": config.height}
    if image is not None:
        return read_image(image, **size), None
    if video is None:
        return None, None
    first, each = pipe.first_pixels, pipe.chunk_pixels
    most = first + each * max(0, config.window // config.chunk_frames - 1)
    clip = read_clip(video, fps=config.fps, **size, most=most)
    if len(clip) < first:
        raise InvalidRequest(
            f"{video} is too short: {len(clip)} frames at {config.fps:g} frames/s, and the model "
            f"goes on from {first} or more"
        )
    return None, clip[(len(clip) - first) % each :]


def _length(pipe: Any, start: int, frames: int | None, seconds: float | None) -> int:
    """The number of frames to make from frame `start` on."""
    each = int(pipe.chunk_pixels)
    if frames is None:
        wanted = DEFAULT_SECONDS if seconds is None else seconds
        if start == 0:
            return int(pipe.frames_for(wanted))
        return max(1, ceil(round(wanted * pipe.config.fps) / each)) * each
    if start == 0:
        pipe.check_frames(frames)
    elif frames % each:
        near = [n for n in (frames // each * each, frames // each * each + each) if n]
        raise InvalidRequest(
            f"frames {frames}: a video goes on by whole chunks of {each} frames; nearest: "
            + " and ".join(map(str, near))
        )
    return frames


def _command(
    model: Any,
    loading: Mapping[str, Any],
    session: str | Path,
    output: Path,
    frames: int,
    scale: int | None,
) -> str:
    """The command line that goes on with a saved session."""
    options: list[tuple[str, Any]] = []
    if isinstance(model, str) and model != DEFAULT_MODEL:
        options.append(("--model", model))
    for name, value in loading.items():
        text = ",".join(f"{x:g}" for x in value) if isinstance(value, tuple) else value
        options.append((f"--{name.replace('_', '-')}", text))
    options += [("--resume", session), ("--save", session), ("-o", output)]
    if frames:
        options.append(("--frames", frames))
    if scale is not None:
        options.append(("--scale", scale))
    return shlex.join(["streamgen", "generate", *(str(x) for pair in options for x in pair)])
