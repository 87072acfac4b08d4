"""A walk without a browser: a script of keys and prompts in, an mp4 and its track out."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from streamgen.apps.record import Mp4Writer, Track, check_output, describe
from streamgen.apps.worlds import as_world
from streamgen.errors import InvalidRequest

DEFAULT_FRAMES = 64
_TOKEN = re.compile(r"(?P<keys>[^*]+?)(?:\*(?P<count>\d+))?")


@dataclass(frozen=True)
class Script:
    """Keys over time: `runs` are (keys, frames). After the last run its keys stay held."""

    runs: tuple[tuple[frozenset[str], int], ...]

    @property
    def frames(self) -> int:
        """Length in frames."""
        return sum(count for _, count in self.runs)

    def keys_at(self, frame: int) -> frozenset[str]:
        """The keys held at a frame."""
        if not self.runs:
            return frozenset()
        ends = list(accumulate(count for _, count in self.runs))
        return self.runs[min(bisect_right(ends, frame), len(self.runs) - 1)][0]


@dataclass(frozen=True)
class Walked:
    """What a walk left: the video, its track, how many frames and how long they took to make."""

    path: Path
    track: Path
    frames: int
    seconds: float


def parse_actions(text: str, keys: Sequence[str]) -> Script:
    """Read a script of keys.

    Words with a number of frames: `w*16` holds w for 16 frames, `w+a*40` holds both, `.*8` holds
    none, `w` alone is one frame. After the last word its keys stay held, as in a live session, so
    `w` alone as the whole script walks on for ever.

    Args:
        text: such as "w*16 a*8 w+a*40 .*8".
        keys: the ones the world has.

    Raises:
        InvalidRequest: a word that can't be read, or a key the world does not have.
    """
    runs = []
    for word in text.split():
        match = _TOKEN.fullmatch(word)
        count = int(match["count"] or 1) if match else 0
        if match is None or count < 1:
            raise InvalidRequest(
                f"action {word!r}: write keys and a number of frames, as in w*16, w+a*40 or .*8"
            )
        held = frozenset() if match["keys"] == "." else frozenset(match["keys"].lower().split("+"))
        unknown = sorted(held - set(keys))
        if unknown:
            accepted = " ".join(keys)
            raise InvalidRequest(
                f"unknown key {unknown[0]!r} in {word!r}; accepted: {accepted}, joined by +, "
                "and . for none"
            )
        runs.append((held, count))
    return Script(tuple(runs))


def parse_switches(texts: Sequence[str], end: int, start: int = 0) -> dict[int, str]:
    """Read prompt switches such as "32:heavy snow": at frame 32, the words after the colon.

    Args:
        texts: of the switches.
        end, start: of the frames that are made.

    Raises:
        InvalidRequest: another form, a frame that is not made, or one frame twice.
    """
    found: dict[int, str] = {}
    for text in texts:
        at, colon, prompt = text.partition(":")
        if not colon or not at.strip().isdecimal() or not prompt.strip():
            raise InvalidRequest(f"switch {text!r}: write FRAME:PROMPT, as in 32:heavy snow")
        frame = int(at)
        if not start <= frame < end:
            more = "; raise --frames" if frame >= end else ""
            raise InvalidRequest(f"switch {text!r}: frames {start} to {end - 1} are made{more}")
        if frame in found:
            raise InvalidRequest(f"switch {text!r}: frame {frame} has a prompt already")
        found[frame] = prompt.strip()
    return found


def walk(
    world: Any = "pocket-world",
    *,
    output: str | Path = "walk.mp4",
    frames: int | None = None,
    actions: str = "",
    switches: Sequence[str] = (),
    prompt: str | None = None,
    seed: int = 0,
    image: str | Path | None = None,
    scale: int = 4,
    progress: bool = True,
) -> Walked:
    """Walk through a world and write what is seen.

    Keys and prompts apply at the chunk that holds their frame; the track says which frame that
    was. Both files appear whole or not at all.

    Args:
        world: a name, folder or hub id to load, or a loaded world.
        output: the mp4 to write; the track lies beside it with the ending .jsonl.
        frames: length; by default the script's, or 64 without one.
        actions: see `parse_actions`.
        switches: see `parse_switches`.
        prompt: to start with; the world's first suggestion by default.
        seed: same seed, script and prompts: same frames.
        image: path to a first frame, or "generated" for one painted for the prompt.
        scale: enlarge so many times (the pocket world is small).
        progress: draw a bar on the error stream.

    Raises:
        InvalidRequest: any of these can't be used; nothing is written.
        UnknownModel, WeightsError: from loading.
    """
    path = check_output(output)
    if frames is not None and frames < 1:
        raise InvalidRequest(f"frames {frames}: at least 1 is needed")
    world = as_world(world)
    config = world.config
    script = parse_actions(actions, config.keys)
    length = frames or script.frames or DEFAULT_FRAMES
    if script.frames > length:
        print(f"the script has {script.frames} frames, {length} are made", file=sys.stderr)
    prompts = parse_switches(switches, length)
    text = prompt if prompt is not None else next(iter(config.suggestions), "")
    first = None
    if image is not None:
        from streamgen.apps.painter import first_frames

        first = first_frames(image, width=config.width, height=config.height)(text, seed)
    with (
        world.session(prompt=text, seed=seed, image=first) as session,
        Mp4Writer(
            path, width=config.width, height=config.height, fps=config.fps, scale=scale
        ) as video,
    ):
        part = path.with_name(path.stem + ".jsonl.part")
        track = Track(part, describe(world, prompt=text, seed=seed, frames=length, scale=scale))
        try:
            seconds = _make(
                session, config.chunk_frames, script, prompts, length, video, track, progress
            )
        except BaseException:
            track.close()
            part.unlink()
            raise
        track.close(frames=length, seconds=round(seconds, 3))
    lines = path.with_suffix(".jsonl")
    part.replace(lines)
    return Walked(path, lines, length, seconds)


def _make(
    session: Any,
    chunk_frames: int,
    script: Script,
    prompts: dict[int, str],
    frames: int,
    video: Mp4Writer,
    track: Track,
    progress: bool,
) -> float:
    """Make the chunks; returns the seconds that the model took."""
    from tqdm import tqdm

    held: frozenset[str] = frozenset()
    done, seconds = 0, 0.0
    with tqdm(total=frames, unit="frame", disable=not progress) as bar:
        while done < frames:
            keys = script.keys_at(done)
            if keys != held:
                session.act(keys=set(keys))
                held = keys
            for frame in sorted(f for f in prompts if f < done + chunk_frames):
                session.prompt(prompts.pop(frame))
            chunk = session.step()
            for event in chunk.applied:
                track.event(event)
            video.write(chunk.frames[: frames - done])
            done += len(chunk.frames)
            seconds += chunk.timing.total / 1000
            bar.update(min(len(chunk.frames), frames - bar.n))
            bar.set_postfix_str(f"{chunk.timing.total:.0f} ms a chunk", refresh=False)
    return seconds
