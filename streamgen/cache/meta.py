"""What attention needs to know of a chunk: plain integers, built once for all layers and steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


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
    """

    ordinals: tuple[int, ...]
    pending: range
    runs: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    q_len: int
    kv_len: int

    def materialize(self) -> Tensor:
        """The dense mask, bool `[q_len, kv_len]`: True where a query may look. For tests."""
        return torch.ones(self.q_len, self.kv_len, dtype=torch.bool)


def merge_runs(slots: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Slots, in order, as runs `(first slot, slots)` of ascending neighbours."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and slot == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return tuple(runs)
