"""Teach the decoder to read streams: about ten minutes on one CPU core, from a seed.

16 questions share one reading of their stream through a block mask, which is what makes it
trainable on a CPU. Streams get longer as it learns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from streamgen.apps.bench.needle.model import Decoder
from streamgen.apps.bench.needle.world import (
    CELLS,
    NOW,
    SEEN,
    SHAPE,
    SUM,
    Questions,
    make_streams,
    training_questions,
)


@dataclass(frozen=True)
class Recipe:
    """How the decoder is trained.

    Args:
        steps: optimiser steps.
        streams: streams of a step.
        rate: peak learning rate, after `warm_up` steps, then a cosine to 0.
        curriculum: `(until, shortest, longest)`: frames of a stream until that share of the steps.
    """

    steps: int = 2000
    streams: int = 16
    rate: float = 3e-3
    warm_up: int = 60
    weight_decay: float = 0.01
    clip: float = 1.0
    curriculum: tuple[tuple[float, int, int], ...] = ((0.2, 8, 8), (0.4, 16, 16), (1.0, 16, 32))

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine."""
        warm = min(1.0, (step + 1) / self.warm_up)
        return self.rate * warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def frames(self, step: int) -> tuple[int, int]:
        """Shortest and longest stream of a step."""
        for until, shortest, longest in self.curriculum:
            if step < until * self.steps:
                return shortest, longest
        return self.curriculum[-1][1:]


class Training:
    """A decoder on its way, from a seed; can be put away with `state` and taken up again.

    Attributes:
        decoder: learns in place.
        step: optimiser steps taken so far.
    """

    def __init__(self, seed: int, recipe: Recipe = Recipe()) -> None:
        self.recipe, self.step = recipe, 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.decoder = Decoder()
        self._generator = Generator().manual_seed(seed)
        self._optimizer = torch.optim.AdamW(
            self.decoder.parameters(), recipe.rate, weight_decay=recipe.weight_decay
        )

    def advance(self) -> tuple[float, float]:
        """Take a step; its loss, and the share of its shapes that were right."""
        recipe, generator = self.recipe, self._generator
        shortest, longest = recipe.frames(self.step)
        frames = int(torch.randint(shortest, longest + 1, (), generator=generator))
        streams = make_streams(recipe.streams, frames, generator)
        questions = training_questions(streams, generator)
        limit = CELLS * (questions.time + 1)
        logits = self.decoder(streams.patches, questions.words, limit)
        loss = answer_loss(logits, questions)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), recipe.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate(self.step)
        self._optimizer.step()
        self.step += 1
        return loss.item(), accuracy(logits, questions, SHAPE)

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, for `torch.save`."""
        return {
            "step": self.step,
            "decoder": self.decoder.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.step = state["step"]
        self.decoder.load_state_dict(state["decoder"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])


def answer_loss(logits: tuple[Tensor, ...], questions: Questions) -> Tensor:
    """Cross-entropy of shapes, hues and existence, and binary cross-entropy of the summaries."""
    kind = questions.words[..., 0]
    loss = logits[SUM].new_zeros(())
    for which in (SHAPE, NOW, SEEN):
        asked = (kind == which) & (questions.answer >= 0)
        if asked.any():
            loss = loss + F.cross_entropy(logits[which][asked], questions.answer[asked])
    asked = kind == SUM
    return loss + F.binary_cross_entropy_with_logits(
        logits[SUM][asked], questions.seen[asked].float()
    )


def accuracy(logits: tuple[Tensor, ...], questions: Questions, which: int) -> float:
    """Share of right answers among the questions of a kind that have one; nan without any."""
    asked = (questions.words[..., 0] == which) & (questions.answer >= 0)
    right = logits[which][asked].argmax(-1) == questions.answer[asked]
    return right.float().mean().item()
