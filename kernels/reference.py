"""The slow, obvious twin of every kernel: what the fast ones are tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q_BTHD: Tensor, k_BUGD: Tensor, v_BUGD: Tensor, mask_TU: Tensor | None = None) -> Tensor:
    """Softmax attention written out in float64; the signature of `kernels.attention.attend`."""
    group = q_BTHD.shape[2] // k_BUGD.shape[2]
    q, k, v = (x.double() for x in (q_BTHD, k_BUGD, v_BUGD))
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores_BHTU = torch.einsum("bthd,buhd->bhtu", q, k) * q.shape[-1] ** -0.5
    if mask_TU is not None:
        scores_BHTU = scores_BHTU.masked_fill(~mask_TU, float("-inf"))
    return torch.einsum("bhtu,buhd->bthd", scores_BHTU.softmax(-1), v).to(q_BTHD.dtype)
