"""The decoder as a stream watcher: chunk by chunk, over token tables, under an eviction policy.

Keys lie un-rotated in the tables and are turned by their tokens' positions where they are read.
Streams that are read side by side share the arithmetic and nothing else: each has tables of its
own, one per layer, or one for all layers where the policy shares its keep-set.

Axes: B streams, N new tokens, U cached tokens and the new ones, H heads, D head width, W words.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor

from streamgen.apps.bench.needle.model import Decoder, rotate, rotation
from streamgen.apps.bench.needle.world import NOW, PAD, SUM
from streamgen.cache.eviction import LayerBudget, apply, carry, next_position, observe
from streamgen.cache.pool import BlockPool
from streamgen.cache.spec import KVSpec
from streamgen.cache.tokens import TokenTable

Part = TypeVar("Part")
BLOCK_TOKENS = 16
# The guidance prompts, one after the other: "mixed" asks what is now and for a summary, "global"
# only for the summary. Words see those before them in their own prompt.
_PROMPTS = ((NOW, PAD, SUM, PAD), (SUM, PAD))
_WHICH = {"mixed": slice(0, 4), "global": slice(4, 6)}


class Reader:
    """Reads B streams of one length side by side and answers questions about what it has seen.

    Args:
        decoder: in evaluation mode.
        policy: which tokens stay; None = all.
        streams: B.
        capacity: tokens that a table holds at most: the budget and a chunk, or the whole stream.
        seed: of policies that draw; each stream has its own.
    """

    def __init__(
        self, decoder: Decoder, policy: LayerBudget | None, streams: int, capacity: int, seed: int
    ) -> None:
        self.decoder, self.policy = decoder, policy
        shape = decoder.shape
        # Tables of several layers are for streams that keep the same tokens in all of them.
        together = shape.layers if policy is None or policy.shared else 1
        count = shape.layers // together
        spec = KVSpec(together, shape.heads, shape.head_dim, BLOCK_TOKENS)
        blocks = -(-capacity // BLOCK_TOKENS)
        self._pool = BlockPool(spec, streams * count * blocks)
        self.tables = [
            [TokenTable(self._pool, reserve=capacity) for _ in range(count)] for _ in range(streams)
        ]
        self._generators = [Generator().manual_seed(seed + stream) for stream in range(streams)]
        self._mass = [[torch.zeros(0)] * shape.layers for _ in range(streams)]

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for tables in self.tables:
            for table in tables:
                table.close()

    @torch.inference_mode()
    def read(self, patches_BNP: Tensor) -> None:
        """Take in the next frames of every stream; then every layer is within its budget."""
        n = patches_BNP.shape[1]
        start = self._next()
        tails = [
            [table.extend(n, start[b] + np.arange(n)) for table in tables]
            for b, tables in enumerate(self.tables)
        ]
        x = self.decoder.see(patches_BNP)
        turn = rotation(torch.as_tensor(start)[:, None] + torch.arange(n), self._head_dim)
        for index, layer in enumerate(self.decoder.stack):
            q, k, v = layer.project(x)
            mine = [self._part(each, index) for each in tails]
            for b, (tail, at) in enumerate(mine):
                tail.write(at, k[b], v[b])
            cached = [(*tail.kv(at), tail.kv_positions) for tail, at in mine]
            keys, values = self._stack(cached)
            mask = mine[0][0].mask()
            out, weights_BHNU = attend(rotate(q, turn), keys, values, mask)
            x = layer.join(x, out)
            if self.policy and self.policy.needs == "mass":
                self._count(index, weights_BHNU)
        for tail in (tail for each in tails for tail in each):
            tail.commit()
        self._evict()

    @torch.inference_mode()
    def ask(self, words_WQ: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
        """Logits of `Decoder.answer` for the questions, each as if it were the only one.

        Nothing of a question stays.
        """
        x, _ = self._probe(words_WQ)
        return self.decoder.answer(x[:, 1::2])

    # Eviction

    def _evict(self) -> None:
        policy, layers = self.policy, self.decoder.shape.layers
        length = self.tables[0][0].length
        if policy is None or length <= min(policy.budgets(layers)):
            return
        guidance = self._guidance() if policy.needs == "guidance" else None
        for b, tables in enumerate(self.tables):
            signals = observe(
                policy,
                tables,
                guidance=guidance[b] if guidance else None,
                mass=self._mass[b],
                generator=self._generators[b],
            )
            decision = policy.decide(signals)
            if decision:
                apply(tables, decision)
                if policy.needs == "mass":
                    self._mass[b] = carry(self._mass[b], decision)

    def _guidance(self) -> list[list[Tensor | None]]:
        """Per stream and layer the attention of the prompt that the policy wants there."""
        assert self.policy
        _, weights = self._probe(_PROMPTS)
        wanted = self.policy.prompts(len(weights))
        return [
            [
                layer[b, _WHICH[prompt]].mean(0) if prompt else None
                for layer, prompt in zip(weights, wanted, strict=True)
            ]
            for b in range(len(self.tables))
        ]

    def _count(self, layer: int, weights_BHNU: Tensor) -> None:
        """Add what the new tokens attended to."""
        received = weights_BHNU.mean(1).sum(1)
        for b, mass in enumerate(self._mass):
            new = received[b].clone()
            new[: len(mass[layer])] += mass[layer]
            mass[layer] = new

    # Reading

    def _probe(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
        """Read prompts behind the stream, none seeing another, and leave nothing of them.

        Returns:
            Their last hidden states `[B, W, C]`, and per layer how each word attends to the cached
            tokens, mean over heads, `[B, W, U]`.
        """
        words = torch.tensor([word for prompt in prompts for word in prompt])
        prompt = torch.tensor([i for i, each in enumerate(prompts) for _ in each])
        offset = torch.tensor([at for each in prompts for at in range(len(each))])
        own = (prompt[:, None] == prompt) & (offset[:, None] >= offset)
        turn = rotation(torch.as_tensor(self._next())[:, None] + offset, self._head_dim)
        x = self.decoder.word(words).expand(len(self.tables), -1, -1)
        attended = []
        for index, layer in enumerate(self.decoder.stack):
            q, k, v = layer.project(x)
            mine = [self._part(tables, index) for tables in self.tables]
            keys, values = self._stack([(*t.gather(at), t.positions) for t, at in mine])
            cached = keys.shape[1]
            mask = torch.cat([own.new_ones(len(words), cached), own], dim=1)
            keys, values = torch.cat([keys, rotate(k, turn)], 1), torch.cat([values, v], 1)
            out, weights_BHWU = attend(rotate(q, turn), keys, values, mask)
            x = layer.join(x, out)
            attended.append(weights_BHWU[..., :cached].mean(1))
        return x, attended

    def _next(self) -> npt.NDArray[np.int64]:
        """Position of the next token in each stream."""
        return np.array([next_position(tables) for tables in self.tables])

    def _part(self, per_table: Sequence[Part], layer: int) -> tuple[Part, int]:
        """The table (or tail) of a layer, and the layer's number in it."""
        step = self._pool.spec.num_layers
        return per_table[layer // step], layer % step

    def _stack(
        self, cached: Sequence[tuple[Tensor, Tensor, npt.NDArray[np.int64]]]
    ) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of all streams `[B, U, H, D]`."""
        k, v, positions = zip(*cached, strict=True)
        turn = rotation(torch.as_tensor(np.stack(positions)), self._head_dim)
        return rotate(torch.stack(k), turn), torch.stack(v)

    @property
    def _head_dim(self) -> int:
        return self.decoder.shape.head_dim


def attend(
    q_BNHD: Tensor, k_BUHD: Tensor, v_BUHD: Tensor, mask_NU: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention that also says who was attended to: `[B, N, H, D]` and `[B, H, N, U]`."""
    scores = torch.einsum("bnhd,buhd->bhnu", q_BNHD, k_BUHD) * q_BNHD.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask_NU, float("-inf")).softmax(-1)
    return torch.einsum("bhnu,buhd->bnhd", weights, v_BUHD), weights
