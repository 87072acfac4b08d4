"""Measure a model of pocket pictures against the renderer it learnt from.

    streamgen eval pocket-image

Four questions: how well do tokens show a held-out picture (PSNR, use of the codebook); do judges
see the class that was asked for in what is drawn; is it as sharp as real pictures; and do pictures
of one class differ as real ones do. Real pictures go through the same judges, which says what can
be reached at all. Mazes and walks have seeds of their own, apart from training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from streamgen.apps.pocket.image_data import CLASSES, Frames, render
from streamgen.apps.pocket.image_judge import ClassJudge
from streamgen.apps.pocket.maze import THEMES, WALLS
from streamgen.errors import InvalidRequest
from streamgen.pipelines.next_scale import NextScalePipeline

SEED = 950_000
SHOTS = 2  # views of a walk; walks are a multiple of the classes
BATCH = 16  # pictures drawn or coded together
SHOWN = 6  # columns of the contact sheet: a real picture, it coded, and drawn ones


@dataclass(frozen=True)
class Effort:
    """How much is measured: pictures a class, real ones and drawn ones."""

    per_class: int = 20


QUICK = Effort(per_class=2)


@dataclass(frozen=True)
class Reconstruction:
    """Held-out pictures through their tokens."""

    pictures: int
    psnr: float  # dB, mean over pictures, at full size
    resized: float  # the same of pictures that are only squeezed to the network's size and back
    entries: int  # of the codebook that are used
    vocab: int
    perplexity: float  # exp of the entropy of what is used


@dataclass(frozen=True)
class Look:
    """Pictures of all classes equally often; ratios are to real pictures of the same class."""

    both: float  # share whose class is recognised: theme and wall
    theme: float
    wall: float
    sharpness: float  # variance of the Laplacian, ratio
    variety: float  # RMS difference of two pictures of a class, ratio
    colour: float  # RMS distance of the class's mean and spread of colours, levels of 255


@dataclass(frozen=True)
class ImageReport:
    """All that was measured."""

    model: str
    effort: Effort
    sampling: dict[str, Any]
    reconstruction: Reconstruction
    drawn: Look
    coded: Look  # real pictures, encoded and decoded
    real: Look
    by_class: dict[str, float]  # share of drawn pictures recognised
    seconds_an_image: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def to_table(self) -> str:
        """Lines for people."""
        return "\n".join(_table(self))


def _table(report: ImageReport) -> Iterator[str]:
    code, looks = report.reconstruction, (report.drawn, report.coded, report.real)
    yield f"{report.model}: quality against the true renderer, held-out mazes and walks"
    yield ""
    yield f"Pictures as their tokens show them, {code.pictures} pictures"
    yield f"  {'PSNR, dB':54s}{code.psnr:12.2f}"
    yield f"  {'  only resized to the network and back (ceiling)':54s}{code.resized:12.2f}"
    yield f"  {f'entries of the codebook in use, of {code.vocab}':54s}{code.entries:12d}"
    yield f"  {'  perplexity':54s}{code.perplexity:12.0f}"
    yield ""
    title = f"Pictures of a class, {report.effort.per_class} each"
    yield f"{title:36s}" + "".join(f"{name:>10s}" for name in ("drawn", "coded", "real"))
    rows = (
        ("class recognised, %", [100 * look.both for look in looks]),
        ("  its theme", [100 * look.theme for look in looks]),
        ("  its wall", [100 * look.wall for look in looks]),
        ("sharpness, ratio to real", [look.sharpness for look in looks]),
        ("variety, ratio to real", [look.variety for look in looks]),
        ("colours off, levels", [look.colour for look in looks]),
    )
    for name, values in rows:
        yield f"  {name:34s}" + "".join(f"{value:10.2f}" for value in values)
    yield ""
    yield "Drawn and recognised, %" + "".join(f"{wall:>10s}" for wall in WALLS)
    for theme in THEMES:
        shares = [100 * report.by_class[f"{theme}, {wall}"] for wall in WALLS]
        yield f"  {theme:21s}" + "".join(f"{share:10.1f}" for share in shares)
    yield ""
    settings = ", ".join(f"{key} {value}" for key, value in report.sampling.items())
    yield f"{settings}; {report.seconds_an_image:.3f} s an image in batches of {BATCH}"
    yield f"Measured in {report.seconds:.0f} s"


class Evaluation:
    """The measurements of one model; each is a method that can be called by itself."""

    def __init__(self, pipe: NextScalePipeline, judge: ClassJudge, effort: Effort) -> None:
        if set(pipe.classes) != set(CLASSES):
            raise InvalidRequest(
                f"{pipe.name!r} is no model of pocket pictures: its classes are "
                f"{', '.join(pipe.classes[:3]) or 'without names'}"
            )
        self.pipe, self.judge, self.effort = pipe, judge, effort
        count = effort.per_class * len(CLASSES)
        frames, self.labels = render(SEED, count // SHOTS, SHOTS)
        self.real = _resize(frames, (pipe.config.height, pipe.config.width))

    @torch.inference_mode()
    def code(self) -> tuple[Frames, NDArray[np.int64]]:
        """The real pictures as their tokens show them, and the tokens [picture, N]."""
        vae, sides = self.pipe.vae, self.pipe.patch_nums
        weight = vae.post_quant_conv.weight
        side = sides[-1] * vae.config.factor
        shown, tokens = [], []
        for first in _bar("reconstruction", range(0, len(self.real), BATCH)):
            x = _pixels(_resize(self.real[first : first + BATCH], (side, side)))
            maps = vae.quantize.tokens(vae.encode(x.to(weight)).float(), sides)
            made = vae.decode(vae.quantize.latents(maps, sides).to(weight)).float().cpu()
            made = made.clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8)
            shown.append(_resize(made.permute(0, 2, 3, 1).numpy(), self.real.shape[1:3]))
            tokens.append(torch.cat(maps, 1).cpu().numpy())
        return np.concatenate(shown), np.concatenate(tokens)

    def measure_reconstruction(self, coded: Frames, tokens: NDArray[np.int64]) -> Reconstruction:
        """See `Reconstruction`."""
        vae = self.pipe.vae
        side = self.pipe.patch_nums[-1] * vae.config.factor
        resized = _resize(_resize(self.real, (side, side)), self.real.shape[1:3])
        share = np.bincount(tokens.ravel(), minlength=vae.config.vocab) / tokens.size
        used = share[share > 0]
        return Reconstruction(
            pictures=len(self.real),
            psnr=_psnr(coded, self.real),
            resized=_psnr(resized, self.real),
            entries=len(used),
            vocab=vae.config.vocab,
            perplexity=float(np.exp(-(used * np.log(used)).sum())),
        )

    def draw(self) -> tuple[Frames, float]:
        """A picture for the class of each real one, and the seconds that one took."""
        parts, start = [], time.monotonic()
        for first in _bar("drawing", range(0, len(self.labels), BATCH)):
            wanted = [CLASSES[i] for i in self.labels[first : first + BATCH]]
            images = self.pipe(wanted, seeds=SEED + first)
            parts.append(np.stack([image.pixels for image in images]))
        seconds = (time.monotonic() - start) / len(self.labels)
        return np.concatenate(parts), seconds

    def look(self, frames: Frames) -> Look:
        """See `Look`; the frames' classes are those of the real pictures."""
        named = self.judge.name_classes(frames)
        theme, wall = (
            float((part(named) == part(self.labels)).mean())
            for part in (lambda x: x // len(WALLS), lambda x: x % len(WALLS))
        )
        compared = []
        for label in range(len(CLASSES)):
            mine, real = frames[self.labels == label], self.real[self.labels == label]
            sharp = [np.mean([_sharpness(f) for f in part]) for part in (mine, real)]
            varied = [_variety(part) for part in (mine, real)]
            ratio = float(sharp[0] / sharp[1])
            compared.append((ratio, varied[0] / varied[1], _colours(mine, real)))
        sharpness, variety, colour = np.mean(compared, axis=0).tolist()
        both = float((named == self.labels).mean())
        return Look(both, theme, wall, sharpness, variety, colour)

    def by_class(self, drawn: Frames) -> dict[str, float]:
        """Share of each class's drawn pictures that is recognised."""
        hit = self.judge.name_classes(drawn) == self.labels
        return {name: float(hit[self.labels == i].mean()) for i, name in enumerate(CLASSES)}

    def sheet(self, drawn: Frames, coded: Frames) -> Frames:
        """For each class a real picture, the same coded, and drawn ones; two classes a row."""
        rows = []
        for i, name in enumerate(CLASSES):
            own = np.flatnonzero(self.labels == i)
            cells = [self.real[own[0]], coded[own[0]], *drawn[own[: SHOWN - 2]]]
            cells += [np.zeros_like(cells[0])] * (SHOWN - len(cells))
            rows.append(_label(np.concatenate(cells, axis=1), name))
        pairs = [np.concatenate(rows[i : i + 2], axis=1) for i in range(0, len(rows), 2)]
        head = np.full((16, pairs[0].shape[1], 3), 24, np.uint8)
        wide = self.real.shape[2]
        for half in (0, SHOWN * wide):
            for column, text in enumerate(("real", "real, coded", "drawn")):
                _write(head, text, half + column * wide + 4, 12)
        return np.concatenate([head, *pairs])


def evaluate(
    pipe: NextScalePipeline,
    out: Path | None = None,
    judge: ClassJudge | None = None,
    effort: Effort | None = None,
) -> ImageReport:
    """Measure a model of pocket pictures; the same model gives the same on the same machine.

    Args:
        pipe: what is measured.
        out: folder for `report.json`, `report.txt` and `classes.png`; None = nothing is written.
        judge: who names classes; None = those that ship.
        effort: how much is measured.

    Raises:
        InvalidRequest: a model of other classes.
        WeightsError: the judges are missing or damaged.
    """
    start = time.monotonic()
    run = Evaluation(pipe, judge or ClassJudge.load(), effort or Effort())
    coded, tokens = run.code()
    drawn, seconds = run.draw()
    report = ImageReport(
        model=pipe.name,
        effort=run.effort,
        sampling=asdict(pipe.config.sampling),
        reconstruction=run.measure_reconstruction(coded, tokens),
        drawn=run.look(drawn),
        coded=run.look(coded),
        real=run.look(run.real),
        by_class=run.by_class(drawn),
        seconds_an_image=seconds,
        seconds=time.monotonic() - start,
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
        (out / "report.txt").write_text(report.to_table() + "\n")
        picture = cv2.cvtColor(run.sheet(drawn, coded), cv2.COLOR_RGB2BGR)
        cv2.imwrite(str(out / "classes.png"), picture)
    return report


def run_eval(model: str, output: Path, as_json: bool, quick: bool) -> None:
    """The command: load a model, measure it, print a table or JSON, write the files to `output`."""
    pipe = NextScalePipeline.from_pretrained(model)
    report = evaluate(pipe, output, effort=QUICK if quick else None)
    print(json.dumps(report.to_json()) if as_json else report.to_table())


# Steps of the measurements


def _bar(name: str, items: Any) -> Iterator[Any]:
    return iter(tqdm(items, desc=name, leave=False, disable=None))


def _pixels(frames: Frames) -> Tensor:
    """Frames [B, row, column, rgb] in 0 to 255, to [B, rgb, row, column] in -1 to 1."""
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float().div(127.5).sub(1)


def _resize(frames: Frames, size: tuple[int, ...]) -> Frames:
    """Frames [frame, row, column, rgb] at (height, width)."""
    high, wide = size
    if frames.shape[1:3] == (high, wide):
        return frames
    kind = cv2.INTER_AREA if wide <= frames.shape[2] else cv2.INTER_CUBIC
    return np.stack([cv2.resize(f, (wide, high), interpolation=kind) for f in frames])


def _psnr(made: Frames, true: Frames) -> float:
    error = np.square(made.astype(np.float64) - true).mean(axis=(1, 2, 3))
    return float((10 * np.log10(255**2 / np.maximum(error, 1 / 12))).mean())


def _sharpness(frame: Frames) -> float:
    return float(cv2.Laplacian(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY), cv2.CV_32F).var())


def _variety(frames: Frames) -> float:
    """RMS difference of neighbours in a list of pictures, the last and the first among them."""
    x = frames.astype(np.float32)
    return float(np.sqrt(np.square(x - np.roll(x, 1, axis=0)).mean()))


def _colours(mine: Frames, real: Frames) -> float:
    """RMS distance of the means and spreads of the colours of two sets of pictures."""
    stats = [np.stack([x.mean((0, 1, 2)), x.std((0, 1, 2))]) for x in (mine, real)]
    return float(np.sqrt(np.square(stats[0] - stats[1]).mean()))


def _write(sheet: Frames, text: str, x: int, y: int) -> None:
    cv2.putText(sheet, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.36, (230,) * 3, 1, cv2.LINE_AA)


def _label(row: Frames, name: str) -> Frames:
    """A row of pictures with its name below."""
    foot = np.full((16, row.shape[1], 3), 24, np.uint8)
    _write(foot, name, 4, 11)
    return np.concatenate([row, foot])
