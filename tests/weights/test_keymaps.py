"""Names of wrapped checkpoints become the official names."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

from streamgen.errors import WeightsError
from streamgen.models.wan import WanConfig, WanModel
from streamgen.weights.keymaps import (
    GAN_HEADS,
    drop,
    official_names,
    strip_name,
    strip_prefixes,
    to_diffusers,
    to_official,
)

SIZES = {"ffn_dim": 24, "num_layers": 12, "text_dim": 10, "freq_dim": 6}


@pytest.fixture(scope="module")
def official() -> dict[str, torch.Tensor]:
    """The state dict of our class, whose names are the official ones; no bytes."""
    with torch.device("meta"):
        return WanModel(WanConfig(dim=16, num_heads=2, **SIZES)).state_dict()


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.ffn.0.weight",
        "model.blocks.0.ffn.0.weight",
        "net.blocks.0.ffn.0.weight",
        "module.model.blocks.0.ffn.0.weight",
        "model._fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.ffn.0.weight",
        "_orig_mod.model.blocks.0._checkpoint_wrapped_module.ffn.0.weight",
        "model.diffusion_model.blocks.0.ffn.0.weight",
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


def test_diffusers_names_are_those_of_its_converter(official: dict[str, torch.Tensor]) -> None:
    """Name by name, the translation is the one that diffusers' own converter makes."""
    for name, value in official.items():
        assert list(convert_wan_transformer_to_diffusers({name: value})) == [to_diffusers(name)]


def test_diffusers_model_has_these_names_and_shapes(official: dict[str, torch.Tensor]) -> None:
    """Translated, our state dict is exactly that of diffusers' class, and back again."""
    with torch.device("meta"):
        theirs = WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=8, rope_max_seq_len=8, **SIZES
        ).state_dict()
    ours = {to_diffusers(name): value.shape for name, value in official.items()}
    assert ours == {name: value.shape for name, value in theirs.items()}
    back = {to_official(name): value.shape for name, value in theirs.items()}
    assert back == {name: value.shape for name, value in official.items()}


def test_norms_trade_places() -> None:
    """The official norm3 is diffusers' norm2 and the other way round."""
    assert to_diffusers("blocks.7.norm3.weight") == "blocks.7.norm2.weight"
    assert to_diffusers("blocks.7.norm2.weight") == "blocks.7.norm3.weight"
    assert to_official("blocks.7.norm2.bias") == "blocks.7.norm3.bias"


def test_unknown_names_stay() -> None:
    """A name that no table knows goes through unchanged, for the loader to report."""
    for name in ("img_emb.proj.0.weight", "blocks.0.ffn.02.weight", "blocks.x", "blocks", "head"):
        assert to_diffusers(name) == name
        assert to_official(name) == name


@pytest.mark.parametrize("prefix", ["", "model.", "net._fsdp_wrapped_module."])
@pytest.mark.parametrize("translate", [str, to_diffusers])
def test_official_names(official: dict[str, torch.Tensor], prefix: str, translate: object) -> None:
    """Wrapped or not, in either convention, with a critic's heads: the same tensors come out."""
    assert callable(translate)
    saved = {prefix + translate(name): value for name, value in official.items()}
    found = official_names({**saved, f"{prefix}{GAN_HEADS[0]}0.weight": torch.zeros(1)})
    assert found.keys() == official.keys()
    assert all(found[name] is official[name] for name in official)
