"""A stream of small pictures in which a few events happen, and questions about them.

A frame is 2 x 2 patches of 8 x 8 RGB pixels over a background whose hue changes now and then. An
event shows a glyph, of a colour that comes only once in a stream, in one patch of one frame.

Axes: B streams, F frames, N = 4 F tokens (frame-major), P = 192 numbers of a patch, Q questions,
C the glyph colours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

CELLS = 4  # patches, and so tokens, of a frame
PATCH = 8  # pixels along a patch's side
HUES = torch.tensor([[0.5, 0, 0], [0, 0.5, 0], [0, 0, 0.5], [0.25, 0.25, 0.25]])
COLOURS = torch.tensor([[int(bit) for bit in f"{code:03b}"] for code in range(1, 8)]).float()
# One byte a row: disc, square, triangle, frame, plus, cross, bars, checks.
_ROWS = (
    "3c7effffffff7e3c 007e7e7e7e7e7e00 1818183c3c7e7eff ffffc3c3c3c3ffff "
    "181818ffff181818 c3e77e3c3c7ee7c3 ff00ff00ff00ff00 cccc3333cccc3333"
)
GLYPHS = torch.tensor(
    [[[byte >> 7 - x & 1 for x in range(8)] for byte in bytes.fromhex(g)] for g in _ROWS.split()]
).float()

MIN_EVENTS, MAX_EVENTS = 3, 6
HUE_CHANGES = 0.08  # chance a frame
STRENGTH, NOISE, GLYPH_NOISE = 0.6, 0.12, 0.05

# A question is two tokens: what is asked, and a colour or PAD.
SHAPE, NOW, SEEN, SUM = range(4)
FIRST_COLOUR = 4
PAD = FIRST_COLOUR + len(COLOURS)
NUM_WORDS = PAD + 1
NEVER = 1 << 30  # the frame of an event that does not happen


@dataclass(frozen=True)
class Streams:
    """Streams of one length and what is true in them.

    Attributes:
        patches: `[B, N, P]`, colours around 0..1.
        hue: background of each frame, `[B, F]`.
        when: the frame in which the glyph of a colour shows, `[B, C]`; NEVER = it does not.
        shape: its shape, `[B, C]`.
    """

    patches: Tensor
    hue: Tensor
    when: Tensor
    shape: Tensor

    @property
    def frames(self) -> int:
        """F."""
        return self.hue.shape[1]


def make_streams(count: int, frames: int, generator: Generator) -> Streams:
    """Draw streams of at least MAX_EVENTS frames."""

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    changes = draw(count, frames) < HUE_CHANGES
    changes[:, 0] = True
    drawn = (draw(count, frames) * len(HUES)).long()
    last_change = (changes * torch.arange(frames)).cummax(dim=1).values
    hue = drawn.gather(1, last_change)
    patches = STRENGTH * HUES[hue][:, :, None, None].expand(-1, -1, CELLS, PATCH**2, -1)
    patches = patches + NOISE * torch.randn(patches.shape, generator=generator)

    # A colour's rank in a random order is its event's number; those beyond `events` never happen.
    events = MIN_EVENTS + (draw(count) * (MAX_EVENTS - MIN_EVENTS + 1)).long()
    rank = draw(count, len(COLOURS)).argsort(dim=1)
    times = draw(count, frames).argsort(dim=1)
    happens = rank < events[:, None]
    when = times.gather(1, rank.clamp(max=frames - 1))
    shape = (draw(count, len(COLOURS)) * len(GLYPHS)).long()
    cell = (draw(count, len(COLOURS)) * CELLS).long()
    stream, colour = happens.nonzero(as_tuple=True)
    glyph = GLYPHS[shape[stream, colour]].flatten(1)[..., None] * COLOURS[colour][:, None]
    glyph = glyph + GLYPH_NOISE * torch.randn(glyph.shape, generator=generator)
    patches[stream, when[stream, colour], cell[stream, colour]] = glyph
    return Streams(
        patches.reshape(count, frames * CELLS, -1), hue, when.where(happens, NEVER), shape
    )


@dataclass(frozen=True)
class Questions:
    """Questions asked at the end of given frames, and their answers.

    Attributes:
        words: `[B, Q, 2]`.
        time: last frame that a question may look at, `[B, Q]`.
        answer: class of the answer, `[B, Q]`; -1 = this question has none and does not count.
        seen: which colours have shown so far, `[B, Q, C]`: the answer to SUM.
    """

    words: Tensor
    time: Tensor
    answer: Tensor
    seen: Tensor


def ask(streams: Streams, kind: Tensor, colour: Tensor, time: Tensor) -> Questions:
    """Answer the questions `kind` [B, Q] about `colour` [B, Q] at `time` [B, Q] from the truth."""
    seen = streams.when[:, None] <= time[..., None]
    about = seen.gather(2, colour[..., None])[..., 0]
    shape = streams.shape.gather(1, colour).where(about, -1)
    hue = streams.hue.gather(1, time)
    answer = torch.stack([shape, hue, about.long(), torch.full_like(hue, -1)])
    needs_colour = (kind == SHAPE) | (kind == SEEN)
    words = torch.stack([kind, (FIRST_COLOUR + colour).where(needs_colour, PAD)], dim=-1)
    return Questions(words, time, answer.gather(0, kind[None])[0], seen)


def training_questions(streams: Streams, generator: Generator) -> Questions:
    """9 about a shape, 2 about the hue now, 2 about a colour's existence and 3 summaries a stream.

    Times are uniform in the last two thirds. A question about a shape picks a glyph that has
    shown, if there is one; the one about existence picks shown and other colours alike.
    """
    count, frames = streams.hue.shape
    kind = torch.tensor([SHAPE] * 9 + [NOW] * 2 + [SEEN] * 2 + [SUM] * 3).expand(count, -1)
    chance = torch.rand((3, *kind.shape), generator=generator)
    time = frames // 3 + (chance[0] * (frames - frames // 3)).long()
    wanted = (kind == SHAPE) | (chance[1] < 0.5)
    seen = streams.when[:, None] <= time[..., None]
    dice = torch.rand((*kind.shape, len(COLOURS)), generator=generator)
    colour = (dice + (seen == wanted[..., None])).argmax(dim=-1)
    return ask(streams, kind, colour, time)
