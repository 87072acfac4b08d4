"""Names of wrapped checkpoints become the official names."""

from __future__ import annotations

import pytest
import torch

from streamgen.errors import WeightsError
from streamgen.weights.keymaps import GAN_HEADS, drop, strip_name, strip_prefixes


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.ffn.0.weight",
        "model.blocks.0.ffn.0.weight",
        "net.blocks.0.ffn.0.weight",
        "module.model.blocks.0.ffn.0.weight",
        "model._fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.ffn.0.weight",
        "_orig_mod.model.blocks.0._checkpoint_wrapped_module.ffn.0.weight",
    ],
)
def test_wrappers_come_off(name: str) -> None:
    """Every way training code wraps a model gives the same name."""
    assert strip_name(name) == "blocks.0.ffn.0.weight"


def test_only_whole_pieces_come_off() -> None:
    """A name that only looks like a wrapper's stays, and so does a piece inside a name."""
    assert strip_name("modelling.weight") == "modelling.weight"
    assert strip_name("head.model.weight") == "head.model.weight"


def test_tensors_are_not_copied() -> None:
    """Renaming moves no bytes."""
    tensor = torch.zeros(1)
    assert strip_prefixes({"model.x": tensor})["x"] is tensor


def test_two_models_in_one_file() -> None:
    """Two names that would become one are an error: neither is dropped in silence."""
    with pytest.raises(WeightsError, match="'net.x' .* become 'x'"):
        strip_prefixes({"model.x": torch.zeros(1), "net.x": torch.ones(1)})


def test_gan_heads_are_dropped() -> None:
    """A critic's heads in a generator's checkpoint are left out, with or without a wrapper."""
    names = ["model.head.head.bias", *(f"model.{prefix}0.weight" for prefix in GAN_HEADS)]
    stripped = strip_prefixes({name: torch.zeros(1) for name in names})
    assert list(drop(stripped)) == ["head.head.bias"]
