"""Reuse of a chunk's keys and values behind another past, at another position (CacheBlend).

A chunk's K/V are right only behind the past they were computed with: below the first attention they
depend on nothing else than the chunk itself, above it on all that attention saw. CacheBlend (Yao et
al., arXiv 2405.16444, section 4) reuses them nevertheless and computes anew the few tokens whose
K/V deviate most from what they should be. Which these are is found layer by layer:

    first layer    all tokens: their K/V are still exact, what attention returns is not
    second layer   K/V of all tokens, compared with the cached ones: those that deviate most go on
    each further   K/V of the tokens that went on, compared again; a few fewer of them go on

The last line is the paper's gradual filtering: a token must deviate in several layers to stay, and
tokens that deviate in one layer mostly do in the next. Attention of the tokens that go on sees the
whole past, their own fresh K/V and the cached K/V of all others.

Positions: cached keys are kept un-rotated, so any position is an integer. Keys that were stored
rotated are turned back once (`ChunkKV.of_rotated`) or on (`move`). Never turn rounded keys often:
in bfloat16 that costs 0.2 % the first time and 5.7 % after a hundred.

Axes: N tokens of the chunk, n tokens that go on, H query heads, G key and value heads, D head
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamgen.errors import InvalidRequest
from streamgen.kernels.attention import attend
from streamgen.models.history import CachedHistory
from streamgen.models.rope import rotate, rotation
from streamgen.models.wan import History, Prompt, WanModel

SHARE = 0.15  # the paper's default
SPREAD = 0.5

LayerKV = tuple[Tensor, Tensor]  # keys and values of one layer, each [N, G, D]


@dataclass(frozen=True)
class ChunkKV:
    """K/V of one chunk, keys normalised and not rotated: they fit at any position.

    Attributes:
        layers: each layer's keys and values, `[N, G, D]`.
    """

    layers: tuple[LayerKV, ...]

    @classmethod
    def of_rotated(
        cls, layers: Sequence[LayerKV], frames: Sequence[int], grid: tuple[int, int]
    ) -> ChunkKV:
        """From keys that were stored rotated, as `CachedHistory` does: turned back, once.

        Args:
            layers: each layer's rotated keys, and values, `[N, G, D]`.
            frames: the positions at which they were rotated.
            grid: rows and columns of tokens in a frame.
        """
        k = layers[0][0]
        back = rotation(frames, grid, k.shape[-1], k.device).conj()
        return cls(tuple((rotate(k[None], back)[0], v) for k, v in layers))

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.nbytes for pair in self.layers for x in pair)


def move(k_NGD: Tensor, frames: int) -> Tensor:
    """Rotated keys as they are `frames` further on in time; rows and columns stay where they are.

    Turning by p and then by d is turning by p + d, so this is exact but for rounding.
    """
    return rotate(k_NGD[None], rotation([frames], (1, 1), k_NGD.shape[-1], k_NGD.device))[0]


class Recorder:
    """A `History` that keeps what passes through it, so that the chunk can be reused elsewhere.

    Args:
        history: who really attends.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self._layers: dict[int, LayerKV] = {}

    def attend(self, layer: int, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """Attention output `[1, N, H, D]` of the history behind it."""
        self._layers[layer] = k_BNHD[0], v_BNHD[0]
        return self.history.attend(layer, q_BNHD, k_BNHD, v_BNHD)

    @property
    def kv(self) -> ChunkKV:
        """K/V of the last pass."""
        return ChunkKV(tuple(self._layers[layer] for layer in sorted(self._layers)))


@dataclass(frozen=True)
class Blended:
    """What was computed anew.

    Attributes:
        passed: for each layer, the tokens that went through it, `[n]` ascending.
        tokens: tokens of the chunk.
    """

    passed: tuple[Tensor, ...]
    tokens: int

    @property
    def work(self) -> float:
        """Token-layers that were computed, as a share of all."""
        return sum(len(tokens) for tokens in self.passed) / (self.tokens * len(self.passed))


def budget(tokens: int, layers: int, share: float, spread: float = SPREAD) -> list[int]:
    """How many tokens go through each layer: all through the first, then a share on average.

    It falls linearly, from `share * (1 + spread * (1 - share))` in the second layer to as much less
    than `share` in the last. The paper asks for "slightly higher" and "slightly less" without
    numbers; the factor `1 - share` makes the ends exact: 0 is nothing, not even the first layer,
    and 1 is everything.

    Raises:
        InvalidRequest: share or spread out of 0 .. 1.
    """
    for name, value in (("share", share), ("spread", spread)):
        if not 0 <= value <= 1:
            raise InvalidRequest(f"{name}={value}: accepted are 0 .. 1")
    slope = spread * (1 - share) if layers > 2 else 0.0
    steps = torch.linspace(slope, -slope, layers - 1, dtype=torch.float64).tolist()
    return [tokens if share else 0, *(round(tokens * share * (1 + step)) for step in steps)]


@torch.no_grad()
def blend(
    model: WanModel,
    x_BCFYX: Tensor,
    t_BF: Tensor,
    history: CachedHistory,
    prompt: Prompt,
    cached: ChunkKV,
    share: float = SHARE,
    actions_BFA: Tensor | None = None,
    spread: float = SPREAD,
) -> Blended:
    """Write a chunk's keys and values: the cached ones, and a share of them computed anew.

    It stands where the clean pass of a chunk stood (`WanModel.forward` with `store_only`) and takes
    what that takes; the caller commits the chunk.

    Args:
        model: the transformer.
        x_BCFYX: clean latents of the chunk, B = 1.
        t_BF: timestep of each frame.
        history: of the pending chunk, at its new position behind its new past.
        prompt: the text.
        cached: K/V of the same latents, computed elsewhere.
        share: tokens that go through each layer but the first; 0 = only reuse, 1 = all anew.
        actions_BFA: action of each frame, where the model takes actions.
        spread: how much wider the first selection is than the last (see `budget`).

    Raises:
        InvalidRequest: share or spread out of 0 .. 1, or K/V of another shape than the chunk's.
    """
    blocks, tokens = model.blocks, history.turn.shape[0]
    _expect_fit(model, tokens, cached)
    counts = budget(tokens, len(blocks), share, spread)
    mixed = _Blend(history, cached)
    if not counts[0]:
        for layer in range(len(blocks)):
            mixed.store(layer)
        return Blended((mixed.tokens[:0],) * len(blocks), tokens)
    x, _, e_BF6E = model.embed(x_BCFYX, t_BF, actions_BFA)
    frame_tokens = x.shape[2]
    x = blocks[0](x, e_BF6E, mixed, prompt, len(blocks) == 1)
    passed = [mixed.tokens]
    if len(blocks) > 1:
        probe = _Probe()
        blocks[1](x, e_BF6E, probe, prompt, True)
        mixed.renew(1, *probe.kv)
    x = x.flatten(1, 2).unsqueeze(2)  # from here on, every token is a frame of its own
    for layer in range(1, len(blocks)):
        x = x[:, mixed.keep(counts[layer])]
        passed.append(mixed.tokens)
        if len(mixed.tokens):
            e_Bn6E = e_BF6E[:, mixed.tokens // frame_tokens]
            x = blocks[layer](x, e_Bn6E, mixed, prompt, layer == len(blocks) - 1)
        else:
            mixed.store(layer)
    return Blended(tuple(passed), tokens)


class _Probe:
    """A `History` that is only asked for keys and values."""

    kv: LayerKV

    def attend(self, layer: int, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        self.kv = k_BNHD[0], v_BNHD[0]
        return q_BNHD  # nobody reads it: the block only stores


class _Blend:
    """The `History` of those tokens of a chunk that are computed; the others' K/V are cached.

    Attributes:
        tokens: which tokens of the chunk are computed, `[n]` ascending.
        deviation: how far the K/V of these were from the cached ones in the last layer, `[n]`.
    """

    def __init__(self, history: CachedHistory, cached: ChunkKV) -> None:
        self.history, self.cached = history, cached.layers
        self.known = list(cached.layers)
        self.tokens = torch.arange(history.turn.shape[0], device=history.turn.device)
        self.deviation = torch.zeros(len(self.tokens), device=history.turn.device)

    def attend(self, layer: int, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """Attention output `[1, n, H, D]` of the tokens that are computed."""
        history = self.history
        self.renew(layer, k_BNHD[0], v_BNHD[0])
        self.store(layer)
        keys, values = history.chunk.kv(layer)
        mask = None if history.mask is None else history.mask[self.tokens]
        q = rotate(q_BNHD, history.turn[self.tokens])
        return attend(q, keys[None], values[None], mask)

    def renew(self, layer: int, k_nGD: Tensor, v_nGD: Tensor) -> None:
        """Put fresh K/V of the computed tokens in place of the cached ones, and compare."""
        old_k, old_v = self.cached[layer]
        self.deviation = deviation(k_nGD, old_k, self.tokens) + deviation(v_nGD, old_v, self.tokens)
        k, v = (
            old.to(new.dtype).index_copy(0, self.tokens, new)
            for old, new in zip(self.known[layer], (k_nGD, v_nGD), strict=True)
        )
        self.known[layer] = k, v

    def keep(self, n: int) -> Tensor:
        """Let the `n` tokens that deviated most go on; which of those so far, ascending."""
        kept = self.deviation.topk(n).indices.sort().values
        self.tokens = self.tokens[kept]
        return kept

    def store(self, layer: int) -> None:
        """Write the whole chunk's K/V at its position."""
        chunk, (k, v) = self.history.chunk, self.known[layer]
        chunk.write(layer, rotate(k[None], self.history.turn)[0], v)
        if chunk.sinks:
            sunk = chunk.sinks * (len(k) // len(chunk.frames))
            chunk.write_sink(layer, k[:sunk], v[:sunk])


def deviation(new_nGD: Tensor, old_NGD: Tensor, tokens: Tensor) -> Tensor:
    """How far the keys (or values) of some tokens are off: mean square, `[n]`.

    In units of the mean square of the whole chunk's cached ones, so that keys and values count
    alike and a token's figure does not depend on who is compared with it.
    """
    old = old_NGD.float()
    off = (new_nGD.float() - old[tokens]).square().mean((1, 2))
    return off / old.square().mean()


def _expect_fit(model: WanModel, tokens: int, cached: ChunkKV) -> None:
    config = model.config
    wanted = (tokens, config.kv_heads, config.head_dim)
    given = [tuple(x.shape) for pair in cached.layers for x in pair]
    if given != [wanted] * 2 * config.num_layers:
        raise InvalidRequest(
            f"the cached K/V are {len(cached.layers)} layers of {sorted(set(given))}: accepted are "
            f"{config.num_layers} of {wanted}"
        )
