"""Which tokens leave, layer by layer: score them, keep the best, fold the others into a summary.

HERMES (arXiv 2601.14724) watches a stream in bounded memory: after a chunk every layer keeps its M
best tokens. The shallow layers keep the newest, the deep ones what a generic question attends to,
those between a blend; a layer's scores lean on those of the layer above (`smooth`). Simpler rules
are the same thing with other scores, and `shared` makes all layers keep the same tokens.

A `LayerBudget` is arithmetic on scores: `decide` looks at `Signals` and names indices. `apply`
moves the tokens of `TokenTable`s accordingly, one table per layer, or one for all layers if they
share a keep-set. Keys must be stored un-rotated: then a summary is a plain mean and a new position
costs an integer. The first `prefix` tokens, the system prompt, are never scored, evicted or
counted.

All positions are on one clock, that of the layer whose newest token is the latest: a chunk goes to
`next_position(tables)` in every layer, also in those that have no summary at the end.

What is left out: the guidance prompt and its attention (softmax over all keys, the prompt's own
included; mean over heads and prompt tokens) are the decoder's business.

Axes: T evictable tokens of a layer, oldest first; G K/V heads; D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from streamgen.cache.notes import SUMMARY, Ints
from streamgen.cache.tokens import TokenTable
from streamgen.errors import InvalidRequest

T = TypeVar("T")
Score = Literal["hermes", "guidance", "recency", "random", "h2o", "value_norm", "uniform"]
Prompt = Literal["mixed", "global"]
Bands = tuple[range, range, range]

SHALLOW, MIDDLE, DEEP = range(3)


# Formulas


def bands(layers: int) -> Bands:
    """Shallow, middle and deep layers: 10 %, 60 % and 30 % (HERMES §4.1, rounded as its code does).

    With fewer than 10 layers none is shallow.
    """
    shallow, deep = int(0.1 * layers + 1e-9), int(0.7 * layers + 1e-9)
    return range(shallow), range(shallow, deep), range(deep, layers)


def min_max(x: Tensor) -> Tensor:
    """Bring a layer's values to 0..1."""
    low = x.min()
    return (x - low) / (x.max() - low + 1e-6)


def recency(count: int, decay: float, device: torch.device | str | None = None) -> Tensor:
    """`exp(-decay * age)`, `[count]`, where the oldest token has age 1 and the newest 0.

    HERMES eq. 1; that age is a share of the layer's tokens is its code's choice.
    """
    age = torch.arange(count - 1, -1, -1, device=device) / max(count - 1, 1)
    return torch.exp(-decay * age)


@dataclass(frozen=True)
class Blend:
    """How much recency counts in each layer, and how fast it fades (HERMES eq. 3).

    Args:
        weight: of recency in the first middle layer; attention has the rest.
        weight_fall: by how much it falls on the way to the first deep layer.
        decay: of recency with age, in shallow layers and the first middle one.
        decay_fall: by how much that falls.
    """

    weight: float = 0.75
    weight_fall: float = 0.6
    decay: float = 20.0
    decay_fall: float = 12.0

    def at(self, layer: int, parts: Bands) -> tuple[float, float]:
        """Weight and decay of recency: (1, decay) in shallow layers, (0, 0) in deep ones."""
        if layer in parts[SHALLOW]:
            return 1.0, self.decay
        if layer in parts[DEEP]:
            return 0.0, 0.0
        way = parts[MIDDLE].index(layer) / len(parts[MIDDLE])
        return self.weight - self.weight_fall * way, self.decay - self.decay_fall * way


PAPER = Blend()
"""The constants of the paper and of its code for Qwen2.5-VL."""

LLAVA = Blend(weight=1.0, weight_fall=0.9, decay=20.0, decay_fall=19.5)
"""Those of its first code release, for LLaVA-OneVision."""


def smooth(
    scores: Sequence[Tensor], strength: Sequence[float], ids: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Let every layer lean on the one above, from the top down (HERMES eq. 5, as its code does).

    `S[l] = (1 - strength[l]) * S[l] + strength[l] * S[l+1]`, where `S[l+1]` is smoothed already.

    Args:
        scores: per layer `[T]`.
        strength: per layer; that of the last layer does not matter.
        ids: per layer which token each one is, -1 = none of the stream. With them a token leans on
            itself in the layer above, and on nothing if it is not there. Without them a slot leans
            on the same slot above (linearly stretched if the layers' lengths differ), which is what
            the paper does; after the first eviction that is another token.
    """
    smoothed = list(scores)
    for layer in range(len(scores) - 2, -1, -1):
        mine, above = smoothed[layer], smoothed[layer + 1]
        if not len(mine) or not len(above):
            continue
        if ids is not None:
            above = _same_token(above, ids[layer + 1], mine, ids[layer])
        elif len(above) != len(mine):
            above = F.interpolate(above[None, None], len(mine), mode="linear")[0, 0]
        smoothed[layer] = torch.lerp(mine, above, strength[layer])
    return smoothed


def _same_token(above: Tensor, above_ids: Tensor, mine: Tensor, ids: Tensor) -> Tensor:
    """The scores above of my tokens, and my own where a token is not there."""
    order = above_ids.argsort()
    found = torch.searchsorted(above_ids[order], ids).clamp(max=len(above) - 1)
    at = order[found]
    return torch.where((above_ids[at] == ids) & (ids != SUMMARY), above[at], mine)


def split(score: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Indices of the `keep` best and of the others, both ascending; of equals the older is better.

    HERMES eq. 6.
    """
    order = score.sort(descending=True, stable=True).indices
    return order[:keep].sort().values, order[keep:].sort().values


def renumbered(positions: Ints, prefix: int) -> Ints:
    """Positions without gaps behind the prefix's: `offset + rank`, on every axis by itself.

    Tokens that share a position still do. `offset` is one more than the prefix's largest on any
    axis, 0 without a prefix. (HERMES §3.3.)

    Args:
        positions: `[n]` or `[n, axes]`.
        prefix: the first tokens, which keep theirs.
    """
    result = positions.copy()
    offset = int(positions[:prefix].max(initial=-1)) + 1
    columns = result[prefix:].reshape(len(positions) - prefix, -1)
    for axis in range(columns.shape[1]):
        columns[:, axis] = offset + np.unique(columns[:, axis], return_inverse=True)[1]
    result[prefix:] = columns.reshape(result[prefix:].shape)
    return result


# The policy


@dataclass(frozen=True)
class Signals:
    """What a decoder knows of the tokens that may be evicted; per layer one tensor each.

    Attributes:
        ids: which token of the stream it is, int64 `[T]`; -1 for a summary.
        guidance: how much the layer's guidance prompt attends to it, `[T]`; None where
            `LayerBudget.prompts` is.
        mass: attention that it has received so far, `[T]`; see `carry`.
        values: its values `[T, G, D]`.
        generator: of random scores, on the tokens' device.
    """

    ids: Sequence[Tensor]
    guidance: Sequence[Tensor | None] | None = None
    mass: Sequence[Tensor] | None = None
    values: Sequence[Tensor] | None = None
    generator: Generator | None = None


@dataclass(frozen=True)
class Decision:
    """What is to happen to the tokens of each layer; all tensors are int64 and ascend.

    Attributes:
        policy: whose decision it is.
        keep: indices of the tokens that stay, the prefix included. All layers of a shared keep-set
            name the same tensor.
        merge: indices of those that a summary is to stand for; empty = they just leave.
    """

    policy: LayerBudget
    keep: tuple[Tensor, ...]
    merge: tuple[Tensor, ...]


@dataclass(frozen=True)
class LayerBudget:
    """Keep the best `budget` tokens of every layer. `preset` names the usual rules.

    Args:
        budget: tokens that a layer keeps, its summary included and the prefix not.
        prefix: first tokens that always stay.
        score: what makes a token worth keeping:
            "hermes"      recency in shallow layers, guidance in deep ones, blended between
            "guidance"    the attention of a guidance prompt
            "recency"     how new it is: a sliding window
            "random"      a draw, anew every time
            "h2o"         the attention it has received, and half of the budget for the newest
                          (arXiv 2306.14048)
            "value_norm"  the length of its value, mean over heads (InfiniPot-V, arXiv 2506.15745)
            "uniform"     how many powers of two divide the number of its frame, so that frames
                          thin out evenly without knowing how long the stream is
        align: smooth the scores over layers, by "slot" as the paper does or by "token"; None = no.
        shared: all layers keep the same tokens, by the mean of their scores.
        summary: deep layers spend one token of their budget on a mean of what they drop.
        summary_weighting: "none" counts an earlier summary like one token, as the paper's code
            does; "count" by what it stands for.
        blend: of recency and guidance; for "hermes".
        smoothing: strength in shallow, middle and deep layers.
        band_budgets: factors of the budget in shallow, middle and deep layers.
        unit: tokens of a frame; for "uniform".
        eager: renumber positions after every eviction. Otherwise only once they come within
            `margin` of `max_position`, and never without one.
        max_position: positions that the model knows.
        margin: see `eager`.

    Raises:
        InvalidRequest: a value is out of range or has no effect beside the others.
    """

    budget: int
    prefix: int = 0
    score: Score = "hermes"
    align: Literal["slot", "token"] | None = None
    shared: bool = False
    summary: bool = False
    summary_weighting: Literal["none", "count"] = "none"
    blend: Blend = PAPER
    smoothing: tuple[float, float, float] = (0.1, 0.3, 0.4)
    band_budgets: tuple[float, float, float] = (1.0, 1.0, 1.0)
    unit: int = 1
    eager: bool = False
    max_position: int | None = None
    margin: int = 1024

    def __post_init__(self) -> None:
        smallest = min(self.band_budgets) * self.budget
        if self.prefix < 0 or self.unit < 1 or smallest < 1:
            raise InvalidRequest(
                f"budget={self.budget}, band_budgets={self.band_budgets}, prefix={self.prefix}, "
                f"unit={self.unit}: accepted are budgets of at least 1 token a layer, 0 and 1"
            )
        for name, accepted in _ACCEPTED.items():
            if getattr(self, name) not in accepted:
                raise InvalidRequest(f"{name}={getattr(self, name)!r}: accepted are {accepted}")
        if self.shared and (self.summary or len(set(self.band_budgets)) > 1):
            raise InvalidRequest(
                "shared=True: layers with the same tokens can't have summaries or budgets of their "
                "own (summary, band_budgets)"
            )
        for name, condition, holds in (
            ("blend", "score='hermes'", self.score == "hermes"),
            ("unit", "score='uniform'", self.score == "uniform"),
            ("smoothing", "align", self.align is not None),
            ("summary_weighting", "summary=True", self.summary),
            ("margin", "max_position", self.max_position is not None),
        ):
            if not holds and getattr(self, name) != self.__dataclass_fields__[name].default:
                raise InvalidRequest(
                    f"{name}={getattr(self, name)!r} has no effect without {condition}"
                )
        if self.max_position is not None:
            largest = self.prefix + max(self.band_budgets) * self.budget
            if self.eager or self.max_position - self.margin <= largest:
                raise InvalidRequest(
                    f"max_position={self.max_position}: accepted are None, or with eager=False "
                    f"more than margin={self.margin} + the {largest:.0f} tokens that stay"
                )

    @classmethod
    def preset(cls, name: str, budget: int, **changes: Any) -> LayerBudget:
        """A policy of `PRESETS`, changed here and there.

        Raises:
            InvalidRequest: there is none of that name, or as for the class.
        """
        if name not in PRESETS:
            raise InvalidRequest(f"no eviction policy {name!r}: accepted are {', '.join(PRESETS)}")
        return cls(budget, **{**PRESETS[name], **changes})

    @property
    def needs(self) -> str | None:
        """The field of `Signals` that the score is made of, besides `ids`."""
        return _NEEDS.get(self.score)

    def prompts(self, layers: int) -> tuple[Prompt | None, ...]:
        """Whose attention each layer wants in `Signals.guidance`; None = it is not looked at.

        HERMES asks a mixed prompt in the middle layers and a global one in the deep ones (app. A).
        """
        prompts: tuple[Prompt | None, ...] = (None, None, None)
        if self.score == "hermes":
            prompts = (None, "mixed", "global")
        elif self.score == "guidance":
            prompts = ("mixed", "mixed", "mixed")
        return tuple(_per_layer(prompts, layers))

    def budgets(self, layers: int) -> list[int]:
        """Tokens that each layer may keep, without the prefix."""
        return [int(self.budget * factor) for factor in _per_layer(self.band_budgets, layers)]

    def decide(self, signals: Signals) -> Decision | None:
        """Who stays and who leaves; None if every layer is within its budget.

        Makes no call that waits for a device.

        Raises:
            InvalidRequest: a signal that the score needs is missing or of another length, or layers
                with a shared keep-set have not as many tokens as each other.
        """
        lengths = [len(ids) for ids in signals.ids]
        budgets = self.budgets(len(lengths))
        if all(n <= m for n, m in zip(lengths, budgets, strict=True)):
            return None
        scores = self.scores(signals)
        if self.align:
            strength = _per_layer(self.smoothing, len(scores))
            ids = signals.ids if self.align == "token" else None
            scores = smooth(scores, strength, ids)
        if self.shared:
            if len(set(lengths)) > 1:
                raise InvalidRequest(f"layers have {lengths} tokens and should share a keep-set")
            kept, _ = split(torch.stack(scores).mean(0), budgets[0])
            nothing = kept[:0]
            return Decision(self, (self._whole(kept),) * len(scores), (nothing,) * len(scores))
        deep = bands(len(scores))[DEEP]
        keep, merge = [], []
        for layer, (score, budget) in enumerate(zip(scores, budgets, strict=True)):
            summary = self.summary and layer in deep and len(score) > budget
            kept, dropped = split(score, budget - summary)
            keep.append(self._whole(kept))
            merge.append(self.prefix + (dropped if summary else dropped[:0]))
        return Decision(self, tuple(keep), tuple(merge))

    def scores(self, signals: Signals) -> list[Tensor]:
        """How much each token is worth, per layer `[T]`, before smoothing; 0..1 for one layer.

        Raises:
            InvalidRequest: a signal is missing, or has not as many tokens as `ids`.
        """
        needed = getattr(signals, self.needs) if self.needs else ()
        if needed is None:
            raise InvalidRequest(f"score={self.score!r} needs the signal {self.needs!r}")
        if self.needs not in (None, "generator"):
            given = [None if x is None else len(x) for x in needed]
            wanted = [len(ids) for ids in signals.ids]
            if len(given) != len(wanted) or any(
                n not in (None, m) for n, m in zip(given, wanted, strict=True)
            ):
                raise InvalidRequest(f"{self.needs} is of {given} tokens, ids are of {wanted}")
        parts = bands(len(signals.ids))
        return [self._score(signals, layer, parts) for layer in range(len(signals.ids))]

    def _score(self, signals: Signals, layer: int, parts: Bands) -> Tensor:
        ids = signals.ids[layer]
        count, device = len(ids), ids.device
        if not count:
            return torch.zeros(0, device=device)
        match self.score:
            case "hermes":
                weight, decay = self.blend.at(layer, parts)
                fresh = min_max(recency(count, decay, device))
                if weight == 1:
                    return fresh
                return (1 - weight) * self._attention(signals, layer) + weight * fresh
            case "guidance":
                return self._attention(signals, layer)
            case "recency":
                return min_max(torch.arange(count, device=device))
            case "random":
                return torch.rand(count, generator=signals.generator, device=device)
            case "h2o":
                assert signals.mass
                recent = self.budgets(len(signals.ids))[layer] // 2
                newest = torch.arange(count, device=device) >= count - recent
                return min_max(signals.mass[layer]) + 2.0 * newest
            case "value_norm":
                assert signals.values
                return min_max(signals.values[layer].float().norm(dim=-1).mean(-1))
            case "uniform":
                return min_max(
                    _evenness(torch.div(ids - self.prefix, self.unit, rounding_mode="floor"))
                )

    def _attention(self, signals: Signals, layer: int) -> Tensor:
        attention = signals.guidance[layer] if signals.guidance else None
        if attention is None:
            raise InvalidRequest(f"score={self.score!r} needs the guidance of layer {layer}")
        return min_max(attention.float())

    def _whole(self, kept: Tensor) -> Tensor:
        """Indices behind the prefix -> indices of the table."""
        return torch.cat([torch.arange(self.prefix, device=kept.device), self.prefix + kept])


def _per_layer(per_band: Sequence[T], layers: int) -> list[T]:
    return [x for x, band in zip(per_band, bands(layers), strict=True) for _ in band]


def _evenness(frames: Tensor) -> Tensor:
    """Powers of two that divide the frame's number; among equals the newer is worth more."""
    lowest_bit = torch.where(frames == 0, 1 << 40, frames & -frames)  # of frame 0: all
    order = torch.arange(len(frames), device=frames.device) / len(frames)
    return torch.log2(lowest_bit.double()) + order


_ACCEPTED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "score": ("hermes", "guidance", "recency", "random", "h2o", "value_norm", "uniform"),
        "align": ("slot", "token", None),
        "summary_weighting": ("none", "count"),
    }
)
_NEEDS: Mapping[str, str] = MappingProxyType(
    {
        "hermes": "guidance",
        "guidance": "guidance",
        "random": "generator",
        "h2o": "mass",
        "value_norm": "values",
    }
)
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "sliding_window": {"score": "recency", "shared": True},
        "uniform": {"score": "uniform", "shared": True},
        "random": {"score": "random"},
        "h2o": {"score": "h2o"},
        "value_norm": {"score": "value_norm"},
        "guidance": {"score": "guidance"},
        "hermes": {"align": "slot", "summary": True},
        "hermes_token": {"align": "token", "summary": True},
        "shared": {"score": "guidance", "shared": True},
        "shared_hermes": {"shared": True},
    }
)
"""The usual rules as differences from `LayerBudget(budget)`. "hermes" is the paper's."""


# On tables


def next_position(tables: Sequence[TokenTable]) -> int:
    """Where the next token of the stream goes, in every layer."""
    return max(table.next_position for table in tables)


def observe(
    policy: LayerBudget,
    tables: Sequence[TokenTable],
    *,
    guidance: Sequence[Tensor | None] | None = None,
    mass: Sequence[Tensor] | None = None,
    generator: Generator | None = None,
) -> Signals:
    """The signals that the policy needs: those given, and ids and values from the tables.

    Args:
        policy: whose.
        tables: of all layers in order, of one layer each or of several.
        guidance, mass: per layer, of the evictable tokens, see `Signals`.
        generator: of random scores.
    """
    first = policy.prefix
    ids, values = [], []
    for table in tables:
        device = table.pool.k[0].device
        numbers = torch.as_tensor(table.ids[first:], device=device)
        for layer in range(table.pool.spec.num_layers):
            ids.append(numbers)
            if policy.needs == "values":
                values.append(table.gather(layer)[1][first:])
    return Signals(ids, guidance, mass, values or None, generator)


def apply(tables: Sequence[TokenTable], decision: Decision) -> int:
    """Let tokens go, put summaries in, renumber if the policy says so.

    A summary's position is one more than the largest that any layer kept, for all layers alike.

    Args:
        tables: of all layers in order; of several layers each only for a shared keep-set. All in
            one pool.
        decision: what `policy.decide` made of them as they are now.

    Returns:
        The next position of the stream.

    Raises:
        InvalidRequest: the decision is for other tables than these, the tables lie in several
            pools, layers of one table are to keep different tokens, or one has a pending tail; no
            table has changed.
        PoolFull: blocks are shared with forks and there is no room to replace them; no table has
            changed.
        TierError: a block went to another tier, which has lost it; no table has changed.
    """
    policy, pool = decision.policy, tables[0].pool
    step = pool.spec.num_layers
    if any(table.pool is not pool for table in tables):
        raise InvalidRequest("the tables of a stream's layers must lie in one pool")
    if step * len(tables) != len(decision.keep) or (step > 1 and not policy.shared):
        raise InvalidRequest(
            f"a decision for {len(decision.keep)} layers and {len(tables)} tables of {step}; "
            "accepted: one table per layer, or with shared=True tables of several layers"
        )
    keeps, merges = _to_host(decision.keep[::step]), _to_host(decision.merge[::step])
    moves = list(zip(tables, keeps, merges, strict=True))
    with pool.lock:
        for table, kept, merged in moves:
            _expect_fitting(table, kept, merged)
            table.swap_in()
        pool.require(run=0, loose=sum(_shared(table, kept) for table, kept, _ in moves))
        # Nothing below can fail.
        end = 1 + max(int(table.positions[kept].max(initial=-1)) for table, kept, _ in moves)
        by_weight = policy.summary_weighting == "count"
        for table, kept, merged in moves:
            at = end if table.positions.ndim == 1 else [end] * table.positions.shape[1]
            table.compact(kept, table.summarize(merged, at, by_weight) if len(merged) else None)
        limit = policy.max_position
        if policy.eager or (limit and next_position(tables) > limit - policy.margin):
            for table in tables:
                table.renumber(renumbered(table.positions, policy.prefix))
        return next_position(tables)


def carry(values: Sequence[Tensor], decision: Decision) -> list[Tensor]:
    """What a decoder counts per token, such as `Signals.mass`, after the decision.

    Args:
        values: per layer `[prefix + T]`.
        decision: to follow; a summary gets the sum of what it stands for.
    """
    carried = []
    for value, keep, merge in zip(values, decision.keep, decision.merge, strict=True):
        summary = [value[merge].sum()[None]] if len(merge) else []
        carried.append(torch.cat([value[keep], *summary]))
    return carried


def _to_host(indices: Sequence[Tensor]) -> list[Ints]:
    """All layers in one transfer."""
    lengths = np.cumsum([len(x) for x in indices])[:-1]
    return np.split(torch.cat(list(indices)).cpu().numpy(), lengths)


def _expect_fitting(table: TokenTable, kept: Ints, merged: Ints) -> None:
    if table.pending is not None:
        raise InvalidRequest(f"{len(table.pending)} tokens of a table are still pending")
    if max(kept.max(initial=-1), merged.max(initial=-1)) >= table.length:
        raise InvalidRequest(
            f"the decision names token {max(kept.max(initial=-1), merged.max(initial=-1))} of a "
            f"table of {table.length}: it was made for other tables"
        )


def _shared(table: TokenTable, kept: Ints) -> int:
    """Blocks that others hold too: at most so many must be replaced, as none may be written."""
    return 0 if len(kept) == table.length else sum(block.ref > 1 for block in table.blocks)
