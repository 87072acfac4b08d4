"""A small decoder that reads patches and answers questions: 10 pre-norm layers, 294 K parameters.

Keys are returned un-rotated and turned where they are read, so a cache may hold them raw and
renumber its tokens. Positions are flat token indices; a question continues behind what it sees.

Axes: B streams, N tokens, C channels, H heads, D head width, P patch, Q questions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamgen.apps.bench.needle.world import CELLS, COLOURS, GLYPHS, HUES, NUM_WORDS, PATCH

ROPE_BASE = 1000.0
ANSWERS = (len(GLYPHS), len(HUES), 2, len(COLOURS))  # logits of SHAPE, NOW, SEEN, SUM


@dataclass(frozen=True)
class Shape:
    """Sizes of the decoder."""

    layers: int = 10
    width: int = 48
    heads: int = 4

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.width // self.heads


class Layer(nn.Module):
    """Attention and an MLP, both behind a norm; attention itself is the caller's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def project(self, x_BNC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[B, N, H, D]`, none of them rotated."""
        qkv_BNHD3 = self.qkv(self.norm1(x_BNC)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv_BNHD3.unbind(-3)
        return q, k, v

    def join(self, x_BNC: Tensor, attended_BNHD: Tensor) -> Tensor:
        """Add what was attended to, then the MLP."""
        x_BNC = x_BNC + self.out(attended_BNHD.flatten(-2))
        joined: Tensor = x_BNC + self.down(F.gelu(self.up(self.norm2(x_BNC))))
        return joined


class Decoder(nn.Module):
    """Embeddings, layers and one head for all kinds of answers."""

    def __init__(self, shape: Shape = Shape()) -> None:
        super().__init__()
        self.shape = shape
        self.patch = nn.Linear(3 * PATCH**2, shape.width)
        self.cell = nn.Embedding(CELLS, shape.width)
        self.word = nn.Embedding(NUM_WORDS, shape.width)
        self.layers = nn.ModuleList(Layer(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, sum(ANSWERS))

    @property
    def stack(self) -> tuple[Layer, ...]:
        """The layers, first to last."""
        return tuple(cast(Layer, layer) for layer in self.layers)

    def see(self, patches_BNP: Tensor) -> Tensor:
        """Embed patches of whole frames, `[B, N, C]`."""
        cells = torch.arange(patches_BNP.shape[1], device=patches_BNP.device) % CELLS
        seen: Tensor = self.patch(patches_BNP) + self.cell(cells)
        return seen

    def answer(self, x_BQC: Tensor) -> tuple[Tensor, ...]:
        """Logits for SHAPE, NOW, SEEN and SUM at the last word of each question, `[B, Q, ...]`."""
        logits: Tensor = self.head(self.norm(x_BQC))
        return torch.split_with_sizes(logits, ANSWERS, dim=-1)

    def forward(
        self, patches_BNP: Tensor, words_BQ2: Tensor, limit_BQ: Tensor
    ) -> tuple[Tensor, ...]:
        """Answer questions about whole streams, all in one pass.

        A question sees the first `limit` tokens of its stream and its own first word, and stands
        at positions `limit` and `limit + 1`.
        """
        n, questions = patches_BNP.shape[1], words_BQ2.shape[1]
        x = torch.cat([self.see(patches_BNP), self.word(words_BQ2.flatten(1))], dim=1)
        video = torch.arange(n, device=x.device)
        asked = torch.stack([limit_BQ, limit_BQ + 1], dim=-1).flatten(1)
        turn = rotation(torch.cat([video.expand(len(x), -1), asked], dim=1), self.shape.head_dim)
        mask = _mask(n, questions, limit_BQ.repeat_interleave(2, dim=1))
        for layer in self.stack:
            q, k, v = layer.project(x)
            x = layer.join(x, attend(rotate(q, turn), rotate(k, turn), v, mask))
        return self.answer(x[:, n + 1 :: 2])


def _mask(n: int, questions: int, limit_BW: Tensor) -> Tensor:
    """Who sees whom, bool `[B, 1, n + W, n + W]`, W = 2 `questions` words."""
    device = limit_BW.device
    order = torch.arange(n + 2 * questions, device=device)
    within = order[:, None] >= order  # causal
    words = order[n:] - n
    same = words[:, None] // 2 == words // 2
    mask = within.repeat(len(limit_BW), 1, 1)
    mask[:, n:, :n] = order[:n] < limit_BW[..., None]
    mask[:, n:, n:] &= same
    return mask[:, None]


def attend(q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, mask_B1NN: Tensor) -> Tensor:
    """Attention with a mask of its own for every stream."""
    q, k, v = (x.transpose(1, 2) for x in (q_BNHD, k_BNHD, v_BNHD))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1NN).transpose(1, 2)


def rotation(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `positions` `[..., N]` for each pair of channels, `[..., N, 1, D/2]`."""
    pairs = head_dim // 2
    rates = ROPE_BASE ** (-torch.arange(pairs, device=positions.device) / pairs)
    angles = (positions[..., None] * rates)[..., None, :]
    return angles.cos(), angles.sin()


def rotate(x_BNHD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + D/2) of every head."""
    cos, sin = turn
    a, b = x_BNHD.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
