"""Linear layers that do more than one thing while they have a result in their hands."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GeluLinear(nn.Linear):
    """A linear layer and a GELU (the tanh form) behind it, in one pass where that is possible.

    Going over a wide result a second time costs a CPU an eighth to a half of the product itself. So
    on a CPU, with plain weights and no gradient wanted, oneDNN applies the activation while it
    writes the product. Everywhere else it is two operations.
    """

    def forward(self, x: Tensor) -> Tensor:
        """`gelu(x @ weight.T + bias)`, `[..., out_features]`."""
        if self._one_pass(x):
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "gelu", [], "tanh"
            )
            return out
        return F.gelu(super().forward(x), approximate="tanh")

    def _one_pass(self, x: Tensor) -> bool:
        weight = self.weight
        if torch.is_grad_enabled() or weight.device.type != "cpu" or x.dtype != weight.dtype:
            return False
        if type(weight) is not nn.Parameter or type(x) is not Tensor:
            return False  # such as quantised weights, which do their products themselves
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        if weight.dtype == torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return weight.dtype == torch.float32
