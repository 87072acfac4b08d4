"""Teacher forcing for a causal video transformer: every chunk of a clip is a target, in one pass.

The sequence is a clip twice over: F clean frames, then the same F frames noised chunk by chunk. A
clean chunk sees the clean chunks up to itself; a noisy chunk sees the clean chunks before it and
itself. That is exactly what the cache holds at run time (a chunk is denoised against committed
chunks, then committed by a clean pass), so nothing is left to adapt to.

Attention is written out: on a CPU the fused kernel's masked backward is the slower one (and its
backward over many tiny texts slower still).

Axes: B clips, F frames, S tokens a frame, N = 2 * F * S tokens, L words, H heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamgen.models.rope import rotate

_HIDDEN = -1e4


class TwoStreams:
    """The `History` of a training pass over `[clean | noisy]`.

    Args:
        turn_NP: rotation of the clean frames' tokens, complex64 `[F * S, P]`.
        chunk_tokens: tokens of a chunk; divides F * S.
        dtype: dtype of the scores.
    """

    def __init__(self, turn_NP: Tensor, chunk_tokens: int, dtype: torch.dtype) -> None:
        self.turn = torch.cat([turn_NP, turn_NP])
        self.half, self.chunk = len(turn_NP), chunk_tokens
        chunk = torch.arange(self.half) // chunk_tokens
        later, own = chunk[:, None] < chunk, chunk[:, None] == chunk
        self.hide_later = torch.zeros(later.shape, dtype=dtype).masked_fill(later, _HIDDEN)
        self.hide_own = self.hide_later.masked_fill(own, _HIDDEN)

    def attend(self, layer: int, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """Attention output of both streams, `[B, N, H, D]`."""
        scale = q_BNHD.shape[-1] ** -0.5
        q = (rotate(q_BNHD, self.turn) * scale).transpose(1, 2)
        k = rotate(k_BNHD, self.turn).transpose(1, 2)
        (q, q_noisy), (k, k_noisy), (v, v_noisy) = (
            x.split(self.half, dim=2) for x in (q, k, v_BNHD.transpose(1, 2))
        )
        clean = torch.softmax(q @ k.mT + self.hide_later, dim=-1) @ v
        q_own, k_own, v_own = (
            x.unflatten(2, (-1, self.chunk)) for x in (q_noisy, k_noisy, v_noisy)
        )
        scores_own = (q_own @ k_own.mT).flatten(2, 3)
        scores = torch.cat([q_noisy @ k.mT + self.hide_own, scores_own], dim=-1)
        past, own = torch.softmax(scores, dim=-1).split([self.half, self.chunk], dim=-1)
        noisy = past @ v + (own.unflatten(2, (-1, self.chunk)) @ v_own).flatten(2, 3)
        return torch.cat([clean, noisy], dim=2).transpose(1, 2)


class PromptPerFrame:
    """The `Prompt` of a training pass: each frame reads one of its clip's two texts.

    Args:
        layers: every layer's keys and values of the texts, each `[B * 2, L, H, D]`, the two texts
            of a clip next to each other.
        which_BF: 0 or 1 for every frame of both streams, int64 `[B, 2 * F]`.
        frame_tokens: S.
    """

    def __init__(
        self, layers: list[tuple[Tensor, Tensor]], which_BF: Tensor, frame_tokens: int
    ) -> None:
        self.layers = layers
        words = layers[0][0].shape[1]
        other = which_BF[..., None] != torch.arange(2).repeat_interleave(words)
        hidden = torch.zeros(other.shape, dtype=layers[0][0].dtype).masked_fill(other, _HIDDEN)
        self.hide_other = hidden.repeat_interleave(frame_tokens, dim=1)[:, None]  # [B, 1, N, 2L]

    def attend(self, layer: int, q_BNHD: Tensor) -> Tensor:
        """Cross-attention output `[B, N, H, D]`."""
        k, v = (x.unflatten(0, (-1, 2)).flatten(1, 2).transpose(1, 2) for x in self.layers[layer])
        scores = (q_BNHD * q_BNHD.shape[-1] ** -0.5).transpose(1, 2) @ k.mT + self.hide_other
        return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2)
