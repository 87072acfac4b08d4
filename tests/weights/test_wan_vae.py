"""The original Wan2.1 autoencoder's names become diffusers', and its sizes are read off."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from original_wan_vae import Shapes, shapes
from torch import Tensor

from streamgen.errors import WeightsError
from streamgen.weights.wan_vae import convert, infer_sizes, rename

FOLDER = Path(
    os.environ.get("STREAMGEN_GOLDEN", Path(__file__).parents[2].parent / "shared" / "parity")
)
OFFICIAL = FOLDER / "keys" / "wan2.1_vae.json"


def on_meta(found: Shapes) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in found.items()}


def test_names_are_diffusers_own() -> None:
    """Every name of the real size becomes what diffusers' own converter makes of it."""
    names = {name: torch.tensor(number) for number, name in enumerate(shapes())}
    assert len(names) == 194
    expected = convert_wan_vae_to_diffusers(names)
    renamed = rename(names)
    assert list(renamed) == list(expected)
    assert all(renamed[name] is value for name, value in expected.items())


@pytest.mark.parametrize("prefix", ["", "model.", "module._fsdp_wrapped_module."])
def test_wrappers_come_off(prefix: str) -> None:
    """Saved inside a wrapper, it is the same autoencoder."""
    found = on_meta(shapes(dim=8, z=4))
    tensors, sizes = convert({f"{prefix}{name}": value for name, value in found.items()})
    assert tensors.keys() == rename(found).keys() and sizes["z_dim"] == 4


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, {}),
        ({"dim": 8, "z": 4}, {"base_dim": 8, "decoder_base_dim": 8, "z_dim": 4}),
        ({"blocks": 1}, {"num_res_blocks": 1}),
        ({"blocks": 3, "mults": (1, 2, 4)}, {"num_res_blocks": 3, "dim_mult": [1, 2, 4]}),
        ({"mults": (2, 4, 4, 8)}, {"dim_mult": [2, 4, 4, 8]}),
        ({"temporal": (True, False, True)}, {"temperal_downsample": [True, False, True]}),
        ({"temporal": (False, False, True)}, {"scale_factor_temporal": 2}),
    ],
    ids=str,
)
def test_sizes_build_the_network(sizes: dict[str, object], expected: dict[str, object]) -> None:
    """The sizes that are read off make a network with those names and shapes, and no others."""
    sizes = {"temporal": (False, True), **sizes} if len(sizes.get("mults", "....")) == 3 else sizes
    tensors, found = convert(on_meta(shapes(**sizes)))
    assert expected.items() <= found.items()
    with torch.device("meta"):
        state = AutoencoderKLWan(**found).state_dict()
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in tensors.items()}


def test_real_sizes_are_the_class_defaults() -> None:
    """Read off the real shapes, the sizes are those that diffusers has as defaults."""
    found = infer_sizes(on_meta(shapes()))
    with torch.device("meta"):
        defaults = dict(AutoencoderKLWan().config)
    assert found.pop("decoder_base_dim") == defaults["base_dim"]  # None there: the same
    assert {name: defaults[name] for name in found} == found


@pytest.mark.skipif(not OFFICIAL.is_file(), reason="no list of the official class's keys")
def test_official_keys() -> None:
    """The official class's own list of keys and shapes is the one written out here, and fits."""
    official = {name: tuple(shape) for name, shape in json.loads(OFFICIAL.read_text()).items()}
    assert official == shapes()
    tensors, sizes = convert(on_meta(official))
    with torch.device("meta"):
        state = AutoencoderKLWan(**sizes).state_dict()
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in tensors.items()}


def test_diffusers_names() -> None:
    """Names that are diffusers' already say where such weights are read."""
    tensors = rename(on_meta(shapes(dim=8, z=4)))
    with pytest.raises(WeightsError, match="its folder, which has config.json"):
        convert(tensors)


def test_wan22() -> None:
    """The original Wan2.2 autoencoder, which numbers its parts another way, is named."""
    tensors = on_meta({"encoder.downsamples.0.downsamples.0.residual.2.weight": (8, 8, 3, 3, 3)})
    with pytest.raises(WeightsError, match=r"the original Wan2\.2 autoencoder"):
        convert(tensors)


@pytest.mark.parametrize(
    "missing",
    [
        "encoder.conv1.weight",
        "encoder.downsamples.1.residual.2.weight",
        "encoder.downsamples.2.resample.1.weight",
        "conv2.weight",
        "decoder.head.2.weight",
    ],
)
def test_something_else(missing: str) -> None:
    """What is no such autoencoder lacks a part, which is named."""
    tensors = on_meta(shapes(dim=8, z=4))
    del tensors[missing]
    with pytest.raises(WeightsError, match=r"no Wan2\.1 autoencoder: it lacks ") as caught:
        convert(tensors)
    assert missing.rpartition(".")[0].split(".residual")[0].split(".resample")[0] in str(
        caught.value
    )


@pytest.mark.parametrize("width", [8, 12])
def test_uneven_levels(width: int) -> None:
    """Levels that no `AutoencoderKLWan` can have are refused."""
    tensors = on_meta(shapes(dim=8, z=4))
    if width == 8:  # another block in the first level: everything behind it moves up
        moved = [name for name in tensors if name.startswith("encoder.downsamples.")]
        rest = {name: tensors.pop(name) for name in moved}
        for name, value in rest.items():
            number, part = name.split(".", 3)[2:]
            tensors[f"encoder.downsamples.{int(number) + (int(number) > 0)}.{part}"] = value
        tensors["encoder.downsamples.1.residual.2.weight"] = torch.empty(8, device="meta")
    else:
        name = "encoder.downsamples.3.residual.2.weight"
        tensors[name] = torch.empty(width, 8, 3, 3, 3, device="meta")
    with pytest.raises(WeightsError, match=r"no Wan2\.1 autoencoder: level"):
        convert(tensors)
