"""A linear layer with its activation: the one pass is the two, and is taken where it can be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamgen.models.linear import GeluLinear


def layer(dtype: torch.dtype = torch.float32) -> GeluLinear:
    torch.manual_seed(0)
    return GeluLinear(24, 40).to(dtype)


def expected(layer: GeluLinear, x: Tensor) -> Tensor:
    """In double precision, with the formula written out."""
    y = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    return y / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 5e-2)], ids=str
)
@pytest.mark.parametrize("shape", [(3, 5, 24), (1, 24), (24,), (0, 24)], ids=str)
def test_one_pass_is_two(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    """Both ways give linear, then tanh-GELU, over the whole range where GELU bends."""
    one, x = layer(dtype), (4 * torch.randn(shape)).to(dtype)
    slow = one(x)
    with torch.no_grad():
        fast = one(x)
    assert slow.requires_grad and not fast.requires_grad
    for out in (slow, fast):
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected(one, x), atol=tolerance, rtol=0.01)


def test_strided_input() -> None:
    """A slice or a transpose gives what its copy gives."""
    one, x = layer(), torch.randn(6, 4, 24)
    with torch.no_grad():
        for view in (x.transpose(0, 1), x[:, ::2], x[..., :24][::3]):
            torch.testing.assert_close(one(view), one(view.contiguous()))


def test_gradients() -> None:
    """A training sees the slow way, and its gradients are those of the formula."""
    one, x = layer().double(), torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(one, (x,))
    one(x).sum().backward()
    assert one.weight.grad is not None and one.bias.grad is not None


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_where_it_is_one_pass() -> None:
    """Only without gradients, in float32 and bfloat16, for plain weights and one dtype."""
    one, x = layer(), torch.randn(2, 24)
    assert not one._one_pass(x)
    with torch.no_grad():
        assert one._one_pass(x)
        assert not one._one_pass(x.bfloat16())
        assert not layer(torch.float16)._one_pass(x.half())
        assert not one.to("meta")._one_pass(x.to("meta"))

        class Quantised(Tensor):
            """As quantising libraries have it: a tensor of a class of its own."""

        odd = layer()
        odd.weight = nn.Parameter(odd.weight.detach().as_subclass(Quantised))  # type: ignore
        assert not odd._one_pass(x)
