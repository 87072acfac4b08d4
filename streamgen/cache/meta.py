"""What attention needs to know of a chunk: plain integers, built once for all layers and steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Mask = Literal["none", "causal"]


@dataclass(frozen=True)
class AttnMeta:
    """Where a chunk reads and writes, and which frame lies where.

    Attributes:
        ordinals: frame ordinal of each lane index of the view, in the order attention reads them.
        pending: ordinals of the chunk's own frames.
        runs: `(first slot, slots)` of the K/V to read; a lane is always one run.
        writes: `(first slot, slots)` of the pending frames in order; two if the ring wraps.
        q_len: tokens of the chunk.
        kv_len: tokens of the view, the chunk's own included.
        mask: "none" if every query sees the whole view (attention then takes no mask); "causal" if
            the queries of frame q see the keys of frame f iff `0 <= q - f < span`. Tokens are
            causal among each other where a frame is one token.
        span: frames that a query sees at most, its own included; None with mask "none".
    """

    ordinals: tuple[int, ...]
    pending: range
    runs: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    q_len: int
    kv_len: int
    mask: Mask = "none"
    span: int | None = None

    def materialize(self) -> Tensor:
        """The dense mask, bool `[q_len, kv_len]`: True where a query may look.

        For tests, and for attention that takes its "causal" mask dense.
        """
        if self.span is None:
            return torch.ones(self.q_len, self.kv_len, dtype=torch.bool)
        tokens = self.kv_len // len(self.ordinals)
        age = torch.tensor(self.pending)[:, None] - torch.tensor(self.ordinals)
        seen = (age >= 0) & (age < self.span)
        return seen.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)


def merge_runs(slots: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Slots, in order, as runs `(first slot, slots)` of ascending neighbours."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and slot == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return tuple(runs)
