"""Three-axis rotary positions (Wan2.1): time, height and width each turn their own share of a head.

Angles are computed on the fly in float64, so there is no table and no last row: frame 5,000,000 is
as good as frame 5. Pairs are interleaved: channels (2i, 2i+1) form one rotating pair.

Axes: F frames, N tokens (frame-major, then rows, then columns), P = head_dim / 2 rotating pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

THETA = 10_000.0


def axis_pairs(head_dim: int) -> tuple[int, int, int]:
    """How many of the `head_dim // 2` pairs turn with time, height and width (Wan2.1's split)."""
    pairs = head_dim // 2
    third = pairs // 3
    return pairs - 2 * third, third, third


def _rates(pairs: int) -> Tensor:
    """Angular speed of each pair of one axis, float64 `[pairs]`."""
    return THETA ** (-torch.arange(pairs, dtype=torch.float64) / pairs)


def temporal_angles(frames: Sequence[int], head_dim: int) -> Tensor:
    """Angles of the temporal pairs, float64 `[F, P_time]`."""
    time_pairs = axis_pairs(head_dim)[0]
    return torch.tensor(list(frames), dtype=torch.float64)[:, None] * _rates(time_pairs)


def rotation(
    frames: Sequence[int], grid: tuple[int, int], head_dim: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The unit complex numbers that turn each token to its position, complex64 `[N, P]`.

    Args:
        frames: absolute index of each latent frame; any integers.
        grid: rows and columns of tokens in a frame; N = len(frames) * rows * columns.
        head_dim: width of a head.
        device: where the result lives; the angles are always computed in float64 on the CPU.
    """
    rows, cols = grid
    time_FP = temporal_angles(frames, head_dim)
    _, high, wide = axis_pairs(head_dim)
    high_RP = torch.arange(rows, dtype=torch.float64)[:, None] * _rates(high)
    wide_CP = torch.arange(cols, dtype=torch.float64)[:, None] * _rates(wide)
    shape = (len(time_FP), rows, cols)
    angles = torch.cat(
        [
            time_FP[:, None, None, :].expand(*shape, -1),
            high_RP[None, :, None, :].expand(*shape, -1),
            wide_CP[None, None, :, :].expand(*shape, -1),
        ],
        dim=-1,
    ).flatten(0, 2)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)


def rotate(x_BNHD: Tensor, turn_NP: Tensor) -> Tensor:
    """Turn every pair of every head by its token's angle; the dtype of `x` is kept.

    Args:
        x_BNHD: queries or keys `[B, N, H, D]`.
        turn_NP: complex64 `[N, P]` from `rotation`.
    """
    pairs = torch.view_as_complex(x_BNHD.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn_NP[:, None, :]).flatten(-2).to(x_BNHD.dtype)


def rotate_real(x_BNHD: Tensor, turn_NP: Tensor) -> Tensor:
    """The twin of `rotate` without complex arithmetic, which some compilers can't take."""
    cos_N1P, sin_N1P = turn_NP.real[:, None, :], turn_NP.imag[:, None, :]
    even, odd = x_BNHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos_N1P - odd * sin_N1P, even * sin_N1P + odd * cos_N1P), dim=-1)
    return turned.flatten(-2).to(x_BNHD.dtype)
