"""Dense attention over cached keys and values: one signature, the fastest backend there is.

Axes: B batch, T query tokens, U key tokens, H query heads, G key heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACK_FROM = 256
"""Queries from which on a CPU's half-precision kernel is worth having keys head by head."""


def attend(q_BTHD: Tensor, k_BUGD: Tensor, v_BUGD: Tensor, mask_TU: Tensor | None = None) -> Tensor:
    """Softmax attention with scale 1/sqrt(D); returns `[B, T, H, D]`.

    Args:
        q_BTHD: queries `[B, T, H, D]`.
        k_BUGD: keys `[B, U, G, D]`; G divides H (grouped-query attention) or equals it.
        v_BUGD: values `[B, U, G, D]`.
        mask_TU: boolean `[T, U]`, True where a query may see a key; None = everything.

    The slow twin is `streamgen.kernels.reference.attend`.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BUGD, v_BUGD))
    if q.device.type == "cpu" and q.dtype != torch.float32 and q.shape[2] >= PACK_FROM:
        # It reads heads that lie apart a sixth slower; bringing them together costs a thirtieth.
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out_BHTD = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask_TU,
        enable_gqa=q_BTHD.shape[2] != k_BUGD.shape[2],
    )
    return out_BHTD.transpose(1, 2)
