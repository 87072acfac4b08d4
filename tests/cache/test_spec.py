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


def test_bytes_of_a_known_model_coded() -> None:
    """Its fp8 frame is half a bf16 one and 8 bytes a head and layer for two scales."""
    spec = KVSpec(30, 12, 128, 1560, torch.bfloat16, "fp8_e4m3")
    assert (spec.token_bytes, spec.scale_bytes) == (92_160, 30 * 12 * 8)
    assert spec.block_bytes == 287_539_200 // 2 + 30 * 12 * 8


@pytest.mark.parametrize(
    ("codec", "changes", "message"),
    [
        ("fp8", {}, "'fp8': accepted are raw, fp8_e4m3, fp8_e5m2, int8, nvfp4"),
        ("nvfp4", {"head_dim": 24}, "head_dim=24"),
        ("int8", {"dtype": torch.int32}, "torch.int32: the int8 codec takes floats"),
    ],
)
def test_codecs_are_checked(codec: str, changes: dict, message: str) -> None:
    """Unknown names, heads that a codec can't cut, and dtypes that it can't encode."""
    values = {"num_layers": 2, "kv_heads": 2, "head_dim": 32, "block_tokens": 3, **changes}
    with pytest.raises(InvalidRequest, match=message):
        KVSpec(**values, codec=codec)
