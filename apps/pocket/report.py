"""What an evaluation says: the figures, as JSON, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from streamgen.apps.pocket.judges import ACTIONS
from streamgen.apps.pocket.maze import WALLS

SWITCH_FRAMES = 16  # after a switch of the prompt
HELD_FRAMES = 8  # under one action
PICTURE_FRAMES, PICTURE_EVERY = 64, 8

Frames = NDArray[np.uint8]


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    scenes: int = 16  # of the theme x wall combinations
    chunks: int = 14  # predicted in each scene
    segments: int = 24  # held, of each action
    switches: int = 48  # of the prompt, tried with each way to recache
    long_walks: int = 4
    long_frames: int = 2000
    bin_frames: int = 200
    drawn: int = 8  # walks of the picture


QUICK = Effort(
    scenes=2,
    chunks=1,
    segments=1,
    switches=1,
    long_walks=1,
    long_frames=40,
    bin_frames=20,
    drawn=1,
)
"""Only shows that everything runs."""


@dataclass(frozen=True)
class Prediction:
    """One chunk of frames, generated after real ones, against the true ones; decibels."""

    chunks: int
    psnr: float
    by_frame: list[float]  # of the first frame of a chunk, the second, ...
    moving: float  # of the chunks in which the walker moved
    ceiling: float  # the true frames, encoded and decoded
    repeated: float  # the last frame seen, as a guess
    repeated_moving: float
    by_scene: dict[str, dict[str, float]]  # theme -> wall -> mean


@dataclass(frozen=True)
class Fidelity:
    """Of held actions, what share the judge names: by the votes of a segment, and a frame."""

    segments: int
    segment: float
    frame: float
    by_action: dict[str, float]  # segments


@dataclass(frozen=True)
class Switch:
    """After a switch of the prompt, how far the judge sees the new theme."""

    switches: int
    at_16: float  # share whose 16th frame shows it
    within_16: float  # share with a chunk, among the 16 frames, all of whose frames show it
    frames_until: float  # median over all switches of the first such chunk's last frame; 17 = none


@dataclass(frozen=True)
class Look:
    """A stretch of frames; ratios and distances are to real frames of the same scene."""

    sharpness: float  # variance of the Laplacian, ratio
    motion: float  # mean difference between frames, ratio
    colour: float  # RMS distance of the colours' means and spreads, levels of 255
    theme: float  # share of frames whose theme is recognised


@dataclass(frozen=True)
class Bin:
    """The frames from `first` on: dreamt ones, and real ones, encoded and decoded, to compare."""

    first: int
    dream: Look  # mean over walks
    real: Look
    walks: list[Look]  # of each dream


@dataclass(frozen=True)
class Report:
    """All that was measured."""

    model: str
    effort: Effort
    prediction: Prediction
    actions: dict[str, Fidelity]  # dream, real, coded (real frames encoded and decoded)
    switches: dict[str, Switch]  # by way to recache, and "real"
    stability: list[Bin]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All numbers, rounded to four digits behind the point."""
        return cast("dict[str, Any]", _rounded(asdict(self)))

    def to_table(self) -> str:
        """All numbers as text."""
        return "\n".join(_table(self))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):  # JSON knows no NaN
        return round(value, 4) if np.isfinite(value) else None
    return value


def _table(report: Report) -> Iterator[str]:
    one, bins = report.prediction, report.stability
    yield f"{report.model}: quality against the true renderer, held-out mazes and walks"
    yield f"\nOne chunk predicted after real frames, {one.chunks} chunks               PSNR, dB"
    frames = ", ".join(f"{x:.2f}" for x in one.by_frame)
    yield f"  the world (frame by frame {frames})".ljust(62) + f"{one.psnr:8.2f}"
    yield "  its autoencoder alone, on the true frames (ceiling)".ljust(62) + f"{one.ceiling:8.2f}"
    yield "  the last frame repeated".ljust(62) + f"{one.repeated:8.2f}"
    yield "  chunks in which the walker moves: the world".ljust(62) + f"{one.moving:8.2f}"
    yield "  ... and the last frame repeated".ljust(62) + f"{one.repeated_moving:8.2f}"
    yield "  " + "".ljust(10) + "".join(f"{wall:>10}" for wall in WALLS)
    for theme, cells in one.by_scene.items():
        shown = (f"{cells[wall]:10.2f}" if wall in cells else " " * 10 for wall in WALLS)
        yield f"  {theme:<10}" + "".join(shown)

    count = report.actions["dream"].segments
    yield f"\nAction named by the judge, {count} segments of {HELD_FRAMES} frames, %"
    columns = {"dream": "world", "coded": "real, coded", "real": "real"}
    yield "  " + "".ljust(36) + "".join(f"{name:>14}" for name in columns.values())
    seen = [report.actions[name] for name in columns]
    yield _line("by the votes of a segment", [f.segment for f in seen])
    yield _line("by each pair of frames", [f.frame for f in seen])
    for action in ACTIONS:
        yield _line(f"  segments: {action}", [f.by_action.get(action, np.nan) for f in seen])

    count = report.switches["real"].switches
    yield f"\nNew theme seen after a switch of the prompt, {count} switches, %"
    names = (name.replace("bidirectional", "bidir.") for name in report.switches)
    yield "  " + "".ljust(36) + "".join(f"{name:>14}" for name in names)
    ways = report.switches.values()
    yield _line("in the 16th frame", [x.at_16 for x in ways])
    yield _line("in a whole chunk of the first 16", [x.within_16 for x in ways])
    shown = "".join(f"{x.frames_until:14.0f}" for x in ways)
    yield "  " + "frames until then, median".ljust(36) + shown

    yield f"\nStability of {report.effort.long_walks} walks (in brackets: real, coded)"
    yield "  frames".ljust(16) + f"{'sharpness':>16}{'motion':>16}{'colour off':>16}{'theme %':>18}"
    for i, part in enumerate(bins):
        yield f"  {part.first}-{part.first + report.effort.bin_frames - 1}".ljust(16) + _looks(
            part.dream, part.real
        )
        if i == len(bins) - 1 and i:
            first = bins[0]
            yield "  last / first".ljust(16) + _looks(
                _ratio(part.dream, first.dream), _ratio(part.real, first.real), share=1
            )
    worst = min((look.sharpness, part.first) for part in bins for look in part.walks)
    yield f"  lowest sharpness of one walk in one bin: {worst[0]:.2f}, from frame {worst[1]} on"
    yield "  sharpness, motion: ratio to real frames of the scene; colour: levels of 255"
    yield f"\nMeasured in {report.seconds:.0f} s"


def _line(name: str, shares: Iterable[float]) -> str:
    return "  " + name.ljust(36) + "".join(f"{100 * share:14.1f}" for share in shares)


def _looks(dream: Look, real: Look, share: float = 100) -> str:
    cells = ""
    for name in ("sharpness", "motion", "colour", "theme"):
        scale, width = (share, 18) if name == "theme" else (1, 16)
        a, b = scale * getattr(dream, name), scale * getattr(real, name)
        cells += f"{a:.2f} ({b:.2f})".rjust(width)
    return cells


def _ratio(last: Look, first: Look) -> Look:
    pairs = zip(asdict(last).values(), asdict(first).values(), strict=True)
    return Look(*(a / b if b else float("nan") for a, b in pairs))


def contact_sheet(rows: Sequence[tuple[str, Frames]]) -> Frames:
    """Rows of (label, pictures [column, row, column, rgb]) in pairs, under frame numbers.

    Small pictures are enlarged so that labels fit.
    """
    scale = -(-96 // rows[0][1].shape[1])
    high, wide = (scale * x for x in rows[0][1].shape[1:3])
    label, head, gap = 110, 18, 8
    width = label + len(rows[0][1]) * (wide + 2)
    sheet = np.full((head + len(rows) * (high + 2) + len(rows) // 2 * gap, width, 3), 24, np.uint8)

    def write(text: str, x: int, y: int) -> None:
        cv2.putText(sheet, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.36, (230,) * 3, 1, cv2.LINE_AA)

    for column in range(len(rows[0][1])):
        name = f"frame {column * PICTURE_EVERY}" if column else "last one seen"
        write(name, label + column * (wide + 2) + 4, 13)
    for row, (name, pictures) in enumerate(rows):
        y = head + row * (high + 2) + row // 2 * gap
        scene, _, kind = name.partition(": ")
        write(kind, 6, y + 32)
        if row % 2 == 0:
            write(scene, 6, y + 14)
        for column, picture in enumerate(pictures):
            x = label + column * (wide + 2)
            big = cv2.resize(picture, (wide, high), interpolation=cv2.INTER_NEAREST)
            sheet[y : y + high, x : x + wide] = big
    return sheet
