"""Drawing tokens from logits: guidance that grows with the scale, top-k, top-p, one draw each.

The order of operations and of random numbers is that of VAR's `autoregressive_infer_cfg` and its
`helpers.py`, so that one generator on the same device gives the same tokens. With a generator an
image, an image's tokens do not depend on the others in its batch.

Axes: B images, R rows (conditions, then unconditions), N tokens of a scale, V codebook entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamgen.errors import InvalidRequest

Generators = torch.Generator | Sequence[torch.Generator]
"""One generator for a batch, or one an image."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The defaults are those of VAR's demo.

    Args:
        cfg: strength of guidance at the last scale; 0 = none.
        top_k: the likeliest entries that may be drawn; 0 = all.
        top_p: their share of probability, up to 1; 0 = all.
        more_smooth: mix codebook entries instead of drawing one (VAR's option for smoother, less
            faithful pictures).

    Raises:
        InvalidRequest: a value is out of range.
    """

    cfg: float = 4.0
    top_k: int = 900
    top_p: float = 0.95
    more_smooth: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cfg) and self.cfg >= 0):
            raise InvalidRequest(f"cfg={self.cfg}: accepted is a number from 0 (no guidance)")
        if isinstance(self.top_k, bool) or int(self.top_k) != self.top_k or self.top_k < 0:
            raise InvalidRequest(f"top_k={self.top_k}: accepted is a whole number, 0 for all")
        if not 0 <= self.top_p <= 1:
            raise InvalidRequest(f"top_p={self.top_p}: accepted is 0 (all) to 1")


def ramp(scale: int, scales: int) -> float:
    """How far along a scale is: 0 at the first, 1 at the last."""
    return scale / (scales - 1) if scales > 1 else 0.0


def guide(logits_RNV: Tensor, strength: float) -> Tensor:
    """Classifier-free guidance, `[B, N, V]`: (1 + t) * condition - t * uncondition.

    Args:
        logits_RNV: the conditions' rows, then as many of the unconditions.
        strength: t; VAR takes `cfg * ramp(scale, scales)`, so the first scale is not guided.
    """
    cond, uncond = logits_RNV.chunk(2)
    return (1 + strength) * cond - strength * uncond


def keep_likely(logits_BNV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits with -inf for what may not be drawn: top-k first, then top-p of what is left.

    Entries as likely as the k-th stay. Top-p drops the unlikeliest whose probabilities add up to at
    most 1 - p; the likeliest always stays.
    """
    some = 0 < top_k < logits_BNV.shape[-1]
    if top_p <= 0:
        if not some:
            return logits_BNV
        least = logits_BNV.topk(top_k, dim=-1).values.amin(-1, keepdim=True)
        return logits_BNV.masked_fill(logits_BNV < least, -torch.inf)
    ascending, order = logits_BNV.sort(dim=-1)  # which tells the k-th, too
    if some:
        unlikely = ascending < ascending[..., -top_k, None]
        ascending = ascending.masked_fill(unlikely, -torch.inf)
    drop = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[..., -1] = False
    if some:
        drop |= unlikely
    return logits_BNV.masked_fill(drop.scatter(-1, order, drop), -torch.inf)


def draw(logits_BNV: Tensor, generators: Generators) -> Tensor:
    """One index a token, `[B, N]`."""

    def some(logits_XNV: Tensor, generator: torch.Generator) -> Tensor:
        p = logits_XNV.softmax(-1).flatten(0, 1)
        drawn = torch.multinomial(p, 1, replacement=True, generator=generator)
        return drawn.view(logits_XNV.shape[:2])

    return _by_image(some, logits_BNV, generators)


def mix(logits_BNV: Tensor, way: float, generators: Generators) -> Tensor:
    """Shares `[B, N, V]` of the codebook's entries in each token (`more_smooth`; Gumbel-softmax).

    Args:
        logits_BNV: after guidance and `keep_likely`.
        way: `ramp(scale, scales)`; with it the mixture gets closer to a single entry.
        generators: already used by `draw`, which comes first.
    """
    temperature = max(0.27 * (1 - 0.95 * way), 0.005)

    def some(logits_XNV: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.empty_like(logits_XNV).exponential_(generator=generator).log()
        return ((logits_XNV - noise) / temperature).softmax(-1)

    return _by_image(some, logits_BNV * (1 + way), generators)


def _by_image(
    call: Callable[[Tensor, torch.Generator], Tensor], logits_BNV: Tensor, generators: Generators
) -> Tensor:
    if isinstance(generators, torch.Generator):
        return call(logits_BNV, generators)
    images = logits_BNV.split(1)
    return torch.cat([call(*pair) for pair in zip(images, generators, strict=True)])
