"""The fast attention against its slow twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamgen.kernels import attention, reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def inputs(
    t: int, u: int, heads: int = 4, kv_heads: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t + u)
    q, k, v = (
        torch.randn(2, n, h, 16, generator=generator)
        for n, h in ((t, heads), (u, kv_heads), (u, kv_heads))
    )
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("t", "u"), [(6, 6), (1, 33), (24, 7), (64, 512), (300, 330)])
def test_equals_the_twin(t: int, u: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Any lengths; as many key heads as query heads, fewer, or one."""
    q, k, v = inputs(t, u, kv_heads=kv_heads, dtype=dtype)
    fast, slow = attention.attend(q, k, v), reference.attend(q, k, v)
    assert fast.shape == slow.shape == q.shape and fast.dtype == slow.dtype == dtype
    torch.testing.assert_close(fast, slow, atol=TOLERANCE[dtype], rtol=0)


def test_mask() -> None:
    """True lets a query see a key, for both alike; what is hidden has no influence."""
    q, k, v = inputs(6, 12)
    mask = torch.rand(6, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, 0], mask[:, 5] = True, False
    fast = attention.attend(q, k, v, mask)
    torch.testing.assert_close(fast, reference.attend(q, k, v, mask), atol=1e-5, rtol=0)
    k[:, 5], v[:, 5] = 1e3, 1e3
    torch.testing.assert_close(attention.attend(q, k, v, mask), fast, atol=1e-6, rtol=0)


def test_one_key() -> None:
    """With one key, every query gets its value; with equal keys, their mean."""
    q, k, v = inputs(3, 1)
    torch.testing.assert_close(attention.attend(q, k, v), v.expand(-1, 3, -1, -1))
    q, k, v = inputs(3, 5)
    mean = v.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    torch.testing.assert_close(attention.attend(q, k[:, :1].expand(-1, 5, -1, -1), v), mean)


def test_order_of_keys_does_not_matter() -> None:
    """What lets a ring buffer stay where it is: only the order of rounding changes."""
    q, k, v = inputs(8, 40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    turned = attention.attend(q, k[:, order], v[:, order])
    torch.testing.assert_close(turned, attention.attend(q, k, v), atol=1e-6, rtol=0)


def test_views_into_a_cache() -> None:
    """Keys and values may be views of a longer store; nothing has to be contiguous."""
    q, k, v = inputs(6, 30)
    part = attention.attend(q, k[:, 6:18], v[:, 6:18])
    torch.testing.assert_close(part, reference.attend(q, k[:, 6:18], v[:, 6:18]), atol=1e-5, rtol=0)
