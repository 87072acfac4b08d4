"""The geometry of a block."""

from __future__ import annotations

import pytest
import torch

from streamgen.cache import KVSpec
from streamgen.errors import InvalidRequest


def test_bytes_of_a_known_model() -> None:
    """Wan 2.1 1.3B keeps 184,320 bytes a token and 287.5 MB a latent frame of 480p in bf16."""
    spec = KVSpec(num_layers=30, kv_heads=12, head_dim=128, block_tokens=1560, dtype=torch.bfloat16)
    assert spec.token_bytes == 184_320
    assert spec.block_bytes == 287_539_200


@pytest.mark.parametrize("name", ["num_layers", "kv_heads", "head_dim", "block_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_sizes_are_positive_integers(name: str, value: float) -> None:
    """A size that is none is refused by name."""
    sizes = {"num_layers": 2, "kv_heads": 2, "head_dim": 4, "block_tokens": 3, name: value}
    with pytest.raises(InvalidRequest, match=name):
        KVSpec(**sizes)  # type: ignore[arg-type]
