"""Measure a pocket video against the renderer it learnt from: `streamgen eval pocket-video`.

Clips are made from nothing but a prompt. Judges name the theme and the wall of a frame; sharpness
and motion are compared with real flights of the same scene, encoded and decoded, so that 1 means
as good as the autoencoder allows. Mazes, prompts and seeds are apart from training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from streamgen.apps.pocket.flights import Flights
from streamgen.apps.pocket.maze import THEMES, WALLS
from streamgen.apps.pocket.prompts import random_prompt
from streamgen.apps.pocket.report import Frames
from streamgen.apps.pocket.video_judge import SceneJudges
from streamgen.engine import Recache
from streamgen.errors import InvalidRequest
from streamgen.pipelines.causal_video import CausalVideoPipeline
from streamgen.session import Session

SEED = 930_000
SAMPLE_EVERY = 9  # frames between two that are looked at; odd, so chunk borders come in turn
FLIGHT_FRAMES = 80  # of the real flights that say what is normal in a scene
SWITCH_AT = 32  # frames before the text changes
AFTER = (4, 8, 16)  # frames after it at which the judges look
STILL = 0.25  # of the real motion: less counts as standing still

Scene = tuple[int, int]  # indices into THEMES and WALLS


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    clips: int = 1  # in each of the 16 scenes
    frames: int = 80  # of each
    flights: int = 4  # real ones of each scene
    switches: int = 16
    long_clips: int = 2
    long_frames: int = 1000
    bin_frames: int = 200
    columns: int = 8  # of the picture


QUICK = Effort(
    clips=1,
    frames=20,
    flights=1,
    switches=1,
    long_clips=1,
    long_frames=40,
    bin_frames=20,
    columns=2,
)
"""Only shows that everything runs."""


@dataclass(frozen=True)
class Fidelity:
    """Share of frames in which the judges name what the prompt names."""

    frames: int
    theme: float
    wall: float
    both: float
    last: float  # both, in a clip's last sample
    by_scene: dict[str, dict[str, float]]  # theme -> wall -> both


@dataclass(frozen=True)
class Switch:
    """After a change of the text: share that shows what is new in the n-th frame."""

    theme: dict[int, float]  # n -> share of all switches
    wall: dict[int, float]  # n -> share of those that name another wall


@dataclass(frozen=True)
class Motion:
    """What moves between neighbouring frames."""

    difference: float  # mean absolute difference, levels of 255
    flow: float  # median length of the optical flow, pixels
    outward: float  # mean flow away from the middle, pixels: above 0 in a flight ahead
    still: float  # share of samples with less than STILL of the scene's real difference


@dataclass(frozen=True)
class Bin:
    """The frames from `first` on, mean over clips; sharpness and motion relative to real ones."""

    first: int
    sharpness: float
    motion: float
    theme: float
    wall: float
    dullest: float  # sharpness of the dullest clip


@dataclass(frozen=True)
class Report:
    """All that was measured; "real" is real flights, encoded and decoded."""

    model: str
    effort: Effort
    fidelity: dict[str, Fidelity]  # "video", "real"
    motion: dict[str, Motion]  # "video", "real"
    sharpness: float  # of the short clips, ratio to real
    switches: dict[str, Switch]  # by way to recache
    long: list[Bin]
    frames_per_second: float  # generated, first chunks included
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All numbers, rounded to four digits behind the point."""
        return cast("dict[str, Any]", _rounded(asdict(self)))

    def to_table(self) -> str:
        """All numbers as text."""
        return "\n".join(_table(self))


@dataclass(frozen=True)
class Samples:
    """Frames that were looked at, each with the one before it."""

    looks: NDArray[np.float64]  # [sample, (sharpness, difference, flow, outward)]
    named: NDArray[np.int64]  # [sample, (theme, wall)]


class Evaluation:
    """The measurements of one model; each is a method that can be called by itself."""

    def __init__(self, pipe: CausalVideoPipeline, judges: SceneJudges, effort: Effort) -> None:
        if not pipe.config.max_words:
            raise InvalidRequest(f"{pipe.name!r} is no video of mazes: it has no vocabulary")
        self.pipe, self.judges, self.effort = pipe, judges, effort
        self.size = (pipe.config.height, pipe.config.width)
        self.scenes = [(theme, wall) for theme in range(len(THEMES)) for wall in range(len(WALLS))]
        self.made, self.seconds = 0, 0.0  # frames generated, and the time that took
        self.rows: list[tuple[str, Frames]] = []  # of the picture
        self._normal: dict[Scene, Samples] = {}

    def begin(self, text: str, seed: int) -> Session:
        """A session of its own past."""
        return self.pipe.session(text, seed=seed, history_seconds=0)

    @staticmethod
    def prompt(rng: np.random.Generator, scene: Scene) -> str:
        """A prompt that names both the theme and the wall of a scene."""
        theme, wall = scene
        return random_prompt(rng, theme, wall, no_wall=0, no_theme=0)

    def code(self, frames: Frames) -> Frames:
        """Frames, encoded and decoded one after the other."""
        engine, pixels = self.pipe.engine, torch.from_numpy(frames)
        parts = [
            engine.codec.decode(engine.codec.encode(part.to(engine.device)), None)[0].cpu()
            for part in pixels.split(16)
        ]
        return torch.cat(parts).numpy()

    def normal(self, scene: Scene) -> Samples:
        """Samples of real flights through a scene, encoded and decoded."""
        if scene not in self._normal:
            number, num = scene[0] * len(WALLS) + scene[1], self.effort.flights
            flights = Flights(num, SEED + number, FLIGHT_FRAMES)
            theme, wall = (np.full(num, x) for x in scene)
            pairs = []
            for frame in range(SAMPLE_EVERY - 1, FLIGHT_FRAMES, SAMPLE_EVERY):
                shown = [flights.draw(i, theme, wall) for i in (frame - 1, frame)]
                pairs += list(np.stack(shown, axis=1))
            flat = _resize(np.concatenate(pairs), self.size)
            self._normal[scene] = self.look(self.code(flat).reshape(-1, 2, *flat.shape[1:]))
        return self._normal[scene]

    def look(self, pairs: Frames) -> Samples:
        """What is seen in frames [sample, (before, now), row, column, rgb]."""
        looks = np.array([_look(before, now) for before, now in pairs])
        return Samples(looks, self.judges.name(pairs[:, 1]))

    def chunks(self, session: Session) -> Iterator[Frames]:
        """Chunk after chunk, timed."""
        while True:
            start = time.monotonic()
            frames = session.step().frames
            self.seconds += time.monotonic() - start
            self.made += len(frames)
            yield frames

    def clip(self, session: Session, frames: int) -> Frames:
        """The next `frames` frames and what else their last chunk holds."""
        parts: list[Frames] = []
        for chunk in self.chunks(session):
            parts.append(chunk)
            if sum(len(part) for part in parts) >= frames:
                return np.concatenate(parts)
        raise AssertionError("a session has no end")

    def watch(self, text: str, seed: int, frames: int) -> Samples:
        """Make a clip of `frames` frames and look at every SAMPLE_EVERY-th; a row of the picture
        shows some of it."""
        pairs: list[Frames] = []
        shown: list[Frames] = []
        last, count, step = None, 0, max(1, frames // self.effort.columns)
        with self.begin(text, seed) as session:
            for chunk in self.chunks(session):
                for frame in chunk[: frames - count]:
                    if count % step == 0:
                        shown.append(frame)
                    count += 1
                    if count % SAMPLE_EVERY == 0:
                        pairs.append(np.stack([frame if last is None else last, frame]))
                    last = frame
                if count >= frames:
                    break
        row = f"{text} (every {step}th frame)", np.stack(shown[: self.effort.columns])
        self.rows.append(row)
        return self.look(np.stack(pairs))

    def measure_clips(self) -> tuple[dict[str, Fidelity], dict[str, Motion], float]:
        """Fidelity and motion of clips in all scenes, and their sharpness; of real ones too."""
        rng = np.random.default_rng(SEED)
        samples: list[tuple[Scene, Samples]] = []
        for number, scene in enumerate(_bar("clips", self.scenes * self.effort.clips)):
            found = self.watch(self.prompt(rng, scene), number, self.effort.frames)
            samples.append((scene, found))
        real = [(scene, self.normal(scene)) for scene in self.scenes]
        ratios = [
            found.looks[:, 0].mean() / self.normal(scene).looks[:, 0].mean()
            for scene, found in samples
        ]
        fidelity = {"video": _fidelity(samples), "real": _fidelity(real)}
        motion = {"video": self._motion(samples), "real": self._motion(real)}
        return fidelity, motion, float(np.mean(ratios))

    def _motion(self, samples: Sequence[tuple[Scene, Samples]]) -> Motion:
        looks = np.concatenate([found.looks for _, found in samples])
        still = [
            found.looks[:, 1] < STILL * self.normal(scene).looks[:, 1].mean()
            for scene, found in samples
        ]
        difference, flow, outward = looks[:, 1:].mean(0).tolist()
        return Motion(difference, flow, outward, float(np.concatenate(still).mean()))

    def measure_switches(self) -> dict[str, Switch]:
        """Clips whose text changes to another theme, half of them to another wall too."""
        rng = np.random.default_rng(SEED + 1)
        hits: dict[str, list[NDArray[np.bool_]]] = {way: [] for way in get_args(Recache)}
        other: list[bool] = []
        for number in _bar("switches", range(self.effort.switches)):
            themes = rng.permutation(len(THEMES))[:2]
            walls = (
                rng.permutation(len(WALLS))[:2] if number % 2 else [rng.integers(len(WALLS))] * 2
            )
            first, second = (
                self.prompt(rng, (int(theme), int(wall)))
                for theme, wall in zip(themes, walls, strict=True)
            )
            other.append(walls[0] != walls[1])
            with self.begin(first, seed=number) as session:
                self.clip(session, SWITCH_AT)
                for way in get_args(Recache):
                    with session.fork() as twin:
                        twin.prompt(second, recache=way)
                        frames = self.clip(twin, AFTER[-1])[[n - 1 for n in AFTER]]
                    hits[way].append(self.judges.name(frames) == (themes[1], walls[1]))
        found = {}
        for way, rows in hits.items():
            hit = np.stack(rows)  # [switch, n, (theme, wall)]
            walls_hit = (
                hit[np.array(other), :, 1] if any(other) else np.full((1, len(AFTER)), np.nan)
            )
            found[way] = Switch(
                dict(zip(AFTER, hit[..., 0].mean(0).tolist(), strict=True)),
                dict(zip(AFTER, walls_hit.mean(0).tolist(), strict=True)),
            )
        return found

    def measure_long(self) -> list[Bin]:
        """Long clips under one text."""
        rng, effort = np.random.default_rng(SEED + 2), self.effort
        rows = []
        for i in _bar("long clips", range(effort.long_clips)):
            scene = _diagonal(i)
            found = self.watch(self.prompt(rng, scene), 1000 + i, effort.long_frames)
            ratio = found.looks[:, :2] / self.normal(scene).looks[:, :2].mean(0)
            rows.append(np.concatenate([ratio, found.named == scene], axis=1))
        table = np.stack(rows)  # [clip, sample, (sharpness, motion, theme, wall)]
        at = np.arange(table.shape[1]) * SAMPLE_EVERY + SAMPLE_EVERY - 1
        bins = []
        for first in range(0, effort.long_frames, effort.bin_frames):
            part = table[:, (at >= first) & (at < first + effort.bin_frames)]
            sharpness, motion, theme, wall = part.mean((0, 1)).tolist()
            dullest = float(part[..., 0].mean(1).min())
            bins.append(Bin(first, sharpness, motion, theme, wall, dullest))
        return bins

    def show_schedule(self) -> None:
        """Add a clip whose text changes twice to the picture."""
        texts = ("a red brick maze", "now heavy snow", "a wooden labyrinth in molten lava")
        parts: list[Frames] = []
        with self.begin(texts[0], seed=0) as session:
            for text in texts:
                session.prompt(text)
                parts.append(self.clip(session, self.effort.frames // len(texts)))
        frames = np.concatenate(parts)
        step = max(1, len(frames) // self.effort.columns)
        row = " / ".join(texts), frames[::step][: self.effort.columns]
        self.rows.append(row)


def evaluate(
    pipe: CausalVideoPipeline,
    out: Path | None = None,
    judges: SceneJudges | None = None,
    effort: Effort | None = None,
) -> Report:
    """Measure a video of mazes; the same model gives the same numbers on the same machine.

    Args:
        pipe: what is measured.
        out: folder for `report.json`, `report.txt` and `clips.png`; None = nothing is written.
        judges: who names themes and walls; None = those that ship.
        effort: how much is measured.

    Raises:
        InvalidRequest: another kind of video.
        WeightsError: the judges are missing or damaged.
    """
    start = time.monotonic()
    run = Evaluation(pipe, judges or SceneJudges.load(), effort or Effort())
    fidelity, motion, sharpness = run.measure_clips()
    report = Report(
        model=pipe.name,
        effort=run.effort,
        fidelity=fidelity,
        motion=motion,
        sharpness=sharpness,
        switches=run.measure_switches(),
        long=run.measure_long(),
        frames_per_second=run.made / run.seconds,
        seconds=time.monotonic() - start,
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
        (out / "report.txt").write_text(report.to_table() + "\n")
        run.show_schedule()
        picture = cv2.cvtColor(sheet(run.rows), cv2.COLOR_RGB2BGR)
        cv2.imwrite(str(out / "clips.png"), picture)
    return report


def run_eval(model: str, output: Path, as_json: bool, quick: bool) -> None:
    """The command: load a video, measure it, print a table or JSON, write the files to `output`."""
    pipe = CausalVideoPipeline.from_pretrained(model, max_sessions=2)
    report = evaluate(pipe, output, effort=QUICK if quick else None)
    print(json.dumps(report.to_json()) if as_json else report.to_table())


# Steps of the measurements


def _bar(name: str, items: Any) -> Iterator[Any]:
    """The items, with a progress bar where someone watches."""
    return iter(tqdm(items, desc=name, leave=False, disable=None))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):  # JSON knows no NaN
        return round(value, 4) if np.isfinite(value) else None
    return value


def _diagonal(number: int) -> Scene:
    """Scenes in an order in which every four have all themes and all walls."""
    return number % len(THEMES), (number + number // len(THEMES)) % len(WALLS)


def _resize(frames: Frames, size: tuple[int, int]) -> Frames:
    if frames.shape[1:3] == size:
        return frames
    return np.stack([cv2.resize(f, size[::-1], interpolation=cv2.INTER_AREA) for f in frames])


def _look(before: Frames, now: Frames) -> NDArray[np.float64]:
    """Sharpness (variance of the Laplacian), mean difference, median flow, outward flow."""
    gray, old = (cv2.cvtColor(x, cv2.COLOR_RGB2GRAY) for x in (now, before))
    sharpness = cv2.Laplacian(gray, cv2.CV_32F).var()
    difference = np.abs(now.astype(np.float32) - before).mean()
    start = np.zeros((*gray.shape, 2), np.float32)
    flow = cv2.calcOpticalFlowFarneback(old, gray, start, 0.5, 3, 15, 3, 5, 1.2, 0)
    rows, columns = np.mgrid[: gray.shape[0], : gray.shape[1]].astype(np.float32)
    away = np.stack([columns - columns.mean(), rows - rows.mean()], axis=-1)
    away /= np.linalg.norm(away, axis=-1, keepdims=True) + 1e-6
    length = np.median(np.linalg.norm(flow, axis=-1))
    return np.array([sharpness, difference, length, (flow * away).sum(-1).mean()])


def _fidelity(samples: Sequence[tuple[Scene, Samples]]) -> Fidelity:
    right = [found.named == scene for scene, found in samples]
    flat = np.concatenate(right)
    cells: dict[str, dict[str, list[float]]] = {}
    for (scene, _), hit in zip(samples, right, strict=True):
        row = cells.setdefault(THEMES[scene[0]], {})
        row.setdefault(WALLS[scene[1]], []).extend(hit.all(1).tolist())
    return Fidelity(
        frames=len(flat),
        theme=float(flat[:, 0].mean()),
        wall=float(flat[:, 1].mean()),
        both=float(flat.all(1).mean()),
        last=float(np.mean([hit[-1].all() for hit in right])),
        by_scene={
            theme: {wall: float(np.mean(hits)) for wall, hits in row.items()}
            for theme, row in cells.items()
        },
    )


def _table(report: Report) -> Iterator[str]:
    effort, video, real = report.effort, report.fidelity["video"], report.fidelity["real"]
    clips = effort.clips * len(THEMES) * len(WALLS)
    yield f"{report.model}: clips from a prompt, beside real flights (encoded and decoded)"
    yield f"\nNamed by the judges, {clips} clips of {effort.frames} frames, % of frames"
    yield "  " + "".ljust(36) + f"{'video':>14}{'real':>14}"
    for name in ("theme", "wall", "both", "last"):
        label = {"both": "both", "last": "both, in a clip's last sample"}.get(name, name)
        yield _line(label, [100 * getattr(x, name) for x in (video, real)], 1)
    yield "  both, by scene".ljust(38) + "".join(f"{wall:>10}" for wall in WALLS)
    for theme, row in video.by_scene.items():
        shown = "".join(f"{100 * row[wall]:10.1f}" for wall in WALLS)
        yield f"    {theme}".ljust(38) + shown

    yield "\nPicture and motion of these clips"
    yield "  " + "".ljust(36) + f"{'video':>14}{'real':>14}"
    yield _line("sharpness, ratio", [report.sharpness, 1.0], 2)
    labels = {
        "difference": "difference of frames, levels of 255",
        "flow": "optical flow, median pixels a frame",
        "outward": "flow away from the middle, pixels",
    }
    moved = [report.motion[name] for name in ("video", "real")]
    for name, label in labels.items():
        yield _line(label, [getattr(x, name) for x in moved], 2)
    yield _line("standing still, % of frames", [100 * x.still for x in moved], 1)

    yield f"\nShown after a change of the text, {effort.switches} changes at frame {SWITCH_AT}, %"
    yield "  " + "".ljust(16) + "".join(f"{way:>22}" for way in report.switches)
    for kind in ("theme", "wall"):
        for n in AFTER:
            shares = [getattr(switch, kind)[n] for switch in report.switches.values()]
            cells = "".join(f"{100 * share:22.1f}" for share in shares)
            yield f"  {kind}, frame {n}".ljust(18) + cells

    yield f"\nLong clips, {effort.long_clips} of {effort.long_frames} frames (ratios to real)"
    names = ("sharpness", "motion", "theme %", "wall %", "dullest clip")
    yield "  frames".ljust(16) + "".join(f"{name:>14}" for name in names)
    for part in report.long:
        label = f"  {part.first}-{part.first + effort.bin_frames - 1}".ljust(16)
        values = (part.sharpness, part.motion, 100 * part.theme, 100 * part.wall, part.dullest)
        yield label + "".join(f"{x:14.2f}" for x in values)
    yield f"\n{report.frames_per_second:.1f} frames a second; measured in {report.seconds:.0f} s"


def _line(name: str, values: Sequence[float], digits: int) -> str:
    return "  " + name.ljust(36) + "".join(f"{value:14.{digits}f}" for value in values)


def sheet(rows: Sequence[tuple[str, Frames]]) -> Frames:
    """Rows of (text, pictures [column, row, column, rgb]), each under its text."""
    scale = -(-96 // rows[0][1].shape[1])
    high, wide = (scale * x for x in rows[0][1].shape[1:3])
    columns, head = max(len(pictures) for _, pictures in rows), 16
    page = np.full((len(rows) * (high + head), columns * (wide + 2), 3), 24, np.uint8)
    for row, (text, pictures) in enumerate(rows):
        y = row * (high + head)
        where, font = (4, y + 12), cv2.FONT_HERSHEY_SIMPLEX
        cv2.putText(page, text, where, font, 0.38, (230, 230, 230), 1, cv2.LINE_AA)
        for column, picture in enumerate(pictures):
            x = column * (wide + 2)
            big = cv2.resize(picture, (wide, high), interpolation=cv2.INTER_NEAREST)
            page[y + head : y + head + high, x : x + wide] = big
    return page
