"""LoRA adapters: read in every form they are saved in, merged as their definition says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear

from streamgen.errors import WeightsError
from streamgen.weights.keymaps import to_diffusers
from streamgen.weights.lora import merge_lora, read_lora

RANK = 4
LAYERS = {
    "blocks.0.self_attn.q": (6, 5),
    "blocks.1.ffn.0": (8, 3),
    "blocks.10.cross_attn.o": (5, 5),
}


@pytest.fixture
def weights() -> dict[str, Tensor]:
    """Weights and biases of the layers, and one tensor that no adapter touches."""
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in LAYERS.items()}
    tensors |= {f"{name}.bias": torch.randn(shape[0]) for name, shape in LAYERS.items()}
    return {**tensors, "blocks.0.norm3.weight": torch.randn(6)}


@pytest.fixture
def factors() -> dict[str, tuple[Tensor, Tensor]]:
    """Layer -> (A `[R, I]`, B `[O, R]`)."""
    torch.manual_seed(1)
    return {
        name: (torch.randn(RANK, width_in), torch.randn(width, RANK))
        for name, (width, width_in) in LAYERS.items()
    }


def peft_names(
    factors: dict[str, tuple[Tensor, Tensor]], form: str = "base_model.model.{}.lora_{}.weight"
) -> dict[str, Tensor]:
    """The adapter's tensors, named by a form with places for the layer and for A or B."""
    return {
        form.format(name, side): value
        for name, pair in factors.items()
        for side, value in zip("AB", pair, strict=True)
    }


def naive(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale B A, one number at a time, in float64."""
    merged = weight.double().clone()
    for o in range(b.shape[0]):
        for i in range(a.shape[1]):
            total = sum(float(b[o, r]) * float(a[r, i]) for r in range(a.shape[0]))
            merged[o, i] += scale * total
    return merged


def check(path: Path, weights: dict[str, Tensor], factors: Any, scale: float, **how: Any) -> None:
    """The adapter in a file, merged, is the naive sum for each layer; the rest is untouched."""
    merged = merge_lora(weights, read_lora(path, **how))
    assert merged.keys() == weights.keys()
    for name, (a, b) in factors.items():
        expected = naive(weights[f"{name}.weight"], a, b, scale)
        torch.testing.assert_close(merged[f"{name}.weight"].double(), expected, atol=1e-5, rtol=0)
    for name in weights.keys() - {f"{name}.weight" for name in factors}:
        assert merged[name] is weights[name]


FORMS = [
    "base_model.model.{}.lora_{}.weight",
    "base_model.model.{}.lora_{}.default.weight",
    "model.base_model.model.{}.lora_{}.default.weight",
    "base_model.model._fsdp_wrapped_module.{}.lora_{}.weight",
    "diffusion_model.{}.lora_{}.weight",
    "{}.lora_{}.weight",
]


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_names(tmp_path: Path, weights: Any, factors: Any, form: str) -> None:
    """Every way PEFT and training code name an adapter's tensors finds its layers."""
    torch.save(peft_names(factors, form), tmp_path / "lora.pt")
    check(tmp_path / "lora.pt", weights, factors, scale=1.0)


def test_longlive_file(tmp_path: Path, weights: Any, factors: Any) -> None:
    """LongLive's lora.pt: the generator's adapter beside the critic's, scale 256 / 256 = 1."""
    critic = {name: (a + 1, b + 1) for name, (a, b) in factors.items()}
    saved = {"generator_lora": peft_names(factors), "critic_lora": peft_names(critic), "step": 1}
    torch.save(saved, tmp_path / "lora.pt")
    check(tmp_path / "lora.pt", weights, factors, scale=1.0)


def test_diffusers_names(tmp_path: Path, weights: Any, factors: Any) -> None:
    """An adapter trained on diffusers' class finds the official layers."""
    theirs = {to_diffusers(f"{name}.x").removesuffix(".x"): pair for name, pair in factors.items()}
    assert "blocks.1.ffn.net.0.proj" in theirs
    saved = peft_names(theirs, "transformer.{}.lora_{}.weight")
    save_file(saved, tmp_path / "w.safetensors")
    check(tmp_path / "w.safetensors", weights, factors, scale=1.0)


def test_down_and_up_with_alpha(tmp_path: Path, weights: Any, factors: Any) -> None:
    """The older names bring an alpha for each layer: scale alpha / rank."""
    saved: dict[str, Tensor] = {}
    for name, (a, b) in factors.items():
        saved[f"diffusion_model.{name}.lora_down.weight"] = a
        saved[f"diffusion_model.{name}.lora_up.weight"] = b
        saved[f"diffusion_model.{name}.alpha"] = torch.tensor(2.0)
    save_file(saved, tmp_path / "w.safetensors")
    check(tmp_path / "w.safetensors", weights, factors, scale=2 / RANK)
    check(tmp_path / "w.safetensors", weights, factors, scale=3 / RANK, alpha=3)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"r": RANK, "lora_alpha": 8}, 2.0),
        ({"r": RANK, "lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"r": RANK, "lora_alpha": 1, "use_dora": False, "alpha_pattern": {}}, 0.25),
        ({"peft_type": "LORA"}, 1.0),
    ],
)
def test_adapter_folder(
    tmp_path: Path, weights: Any, factors: Any, config: Any, scale: float
) -> None:
    """PEFT's folder: adapter_config.json gives alpha; alone or as a folder, the same."""
    save_file(peft_names(factors), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    check(tmp_path, weights, factors, scale)
    check(tmp_path / "adapter_model.safetensors", weights, factors, scale)
    check(tmp_path, weights, factors, scale=6 / RANK, alpha=6)


def test_alpha_pattern(tmp_path: Path, weights: Any, factors: Any) -> None:
    """A pattern gives one layer another alpha; it matches whole pieces of a name only."""
    save_file(peft_names(factors), tmp_path / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": 4, "alpha_pattern": {"ffn.0": 8, "attn.q": 100}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    merged = merge_lora(weights, read_lora(tmp_path))
    for name, (a, b) in factors.items():
        expected = naive(weights[f"{name}.weight"], a, b, 2.0 if name.endswith("ffn.0") else 1.0)
        torch.testing.assert_close(merged[f"{name}.weight"].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "metadata",
    [
        {"lora_alpha": "8", "r": "4"},
        {"ss_network_alpha": "8"},
        {"lora_adapter_metadata": '{"transformer.lora_alpha": 8, "transformer.r": 4}'},
    ],
)
def test_metadata(tmp_path: Path, weights: Any, factors: Any, metadata: dict[str, str]) -> None:
    """Without a config file, a safetensors file's own metadata gives alpha."""
    save_file(peft_names(factors), tmp_path / "w.safetensors", metadata=metadata)
    check(tmp_path / "w.safetensors", weights, factors, scale=2.0)


def test_merged_layer_is_layer_plus_branch(tmp_path: Path, weights: Any, factors: Any) -> None:
    """What the adapter means when it is not merged: y = W x + (alpha / rank) B (A x)."""
    torch.save(peft_names(factors), tmp_path / "lora.pt")
    merged = merge_lora(weights, read_lora(tmp_path / "lora.pt", alpha=7))
    for name, (a, b) in factors.items():
        x, weight = torch.randn(3, a.shape[1]), weights[f"{name}.weight"]
        expected = linear(x, weight) + 7 / RANK * linear(linear(x, a), b)
        torch.testing.assert_close(linear(x, merged[f"{name}.weight"]), expected)


def test_convolution(tmp_path: Path) -> None:
    """A patch embedding's adapter: A is a convolution of its shape, B one of size 1."""
    weight, a, b = (
        torch.randn(6, 2, 1, 2, 2),
        torch.randn(3, 2, 1, 2, 2),
        torch.randn(6, 3, 1, 1, 1),
    )
    save_file(peft_names({"patch_embedding": (a, b)}), tmp_path / "w.safetensors")
    merged = merge_lora({"patch_embedding.weight": weight}, read_lora(tmp_path / "w.safetensors"))
    x = torch.randn(1, 2, 3, 4, 4)

    def conv(x: Tensor, weight: Tensor) -> Tensor:
        return torch.conv3d(x, weight, stride=weight.shape[2:])

    expected = conv(x, weight) + torch.conv3d(conv(x, a), b)
    torch.testing.assert_close(conv(x, merged["patch_embedding.weight"]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(tmp_path: Path, factors: Any, weights: Any, dtype: torch.dtype) -> None:
    """The sum is made in float32 and rounded once: the nearest number of the weight's type."""
    low = {name: value.to(dtype) for name, value in weights.items()}
    half = {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in factors.items()}
    torch.save(peft_names(half), tmp_path / "lora.pt")
    before = {name: value.clone() for name, value in low.items()}
    merged = merge_lora(low, read_lora(tmp_path / "lora.pt", alpha=2))
    for name, (a, b) in half.items():
        expected = naive(low[f"{name}.weight"], a, b, 2 / RANK).float().to(dtype)
        assert merged[f"{name}.weight"].dtype is dtype
        torch.testing.assert_close(merged[f"{name}.weight"], expected, atol=0, rtol=0)
    assert all(torch.equal(low[name], before[name]) for name in low)


def test_strength(tmp_path: Path, weights: Any, factors: Any) -> None:
    """Strength 0 changes no value, strength 2 doubles what strength 1 adds."""
    torch.save(peft_names(factors), tmp_path / "lora.pt")
    lora = read_lora(tmp_path / "lora.pt")
    none, once, twice = (merge_lora(weights, lora, strength=s) for s in (0.0, 1.0, 2.0))
    for name in weights:
        assert torch.equal(none[name], weights[name])
        torch.testing.assert_close(twice[name] - once[name], once[name] - weights[name])
    assert lora.rank == RANK


def refused(path: Path, weights: dict[str, Tensor]) -> str:
    with pytest.raises(WeightsError) as caught:
        merge_lora(weights, read_lora(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_layers_without_a_place_are_named(tmp_path: Path, weights: Any, factors: Any) -> None:
    """No part of an adapter is left out in silence: missing layers and other widths are named."""
    factors["blocks.30.ffn.0"] = factors["blocks.1.ffn.0"]
    factors["blocks.0.self_attn.q"] = (torch.randn(RANK, 7), torch.randn(6, RANK))
    torch.save(peft_names(factors), tmp_path / "lora.pt")
    text = refused(tmp_path / "lora.pt", weights)
    assert "1 layers that the weights lack: blocks.30.ffn.0" in text
    assert "1 of another shape: blocks.0.self_attn.q (weights [6, 5], LoRA [6, 7])" in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"blocks.0.self_attn.q.lora_magnitude_vector": torch.ones(6)}, "1 not understood: blocks"),
        ({"base_model.model.blocks.0.ffn.0.bias": torch.ones(6)}, "1 not understood: base_model"),
        ({"blocks.1.self_attn.q.lora_A.weight": torch.ones(4, 5)}, "q has no up factor"),
        ({"blocks.1.self_attn.q.lora_B.weight": torch.ones(4, 5)}, "q has no down factor"),
        ({"blocks.0.self_attn.q.lora_A.weight": torch.ones(4, 5)}, "has that factor twice"),
        ({"blocks.0.self_attn.k.alpha": torch.ones(2)}, "1 not understood"),
        ({"blocks.0.self_attn.k.lora_A.weight": torch.ones(4)}, "1 not understood"),
        ({"blocks.0.self_attn.k.lora_A.b.weight": torch.ones(4, 5)}, r"adapters \(b, default\)"),
    ],
)
def test_adapters_of_another_form(
    tmp_path: Path, weights: Any, factors: Any, change: dict[str, Tensor], reason: str
) -> None:
    """DoRA, biases, half a pair, a layer twice, two adapters: refused by name."""
    torch.save({**peft_names(factors), **change}, tmp_path / "lora.pt")
    with pytest.raises(WeightsError, match=reason):
        read_lora(tmp_path / "lora.pt")


def test_factors_of_two_ranks(tmp_path: Path) -> None:
    """Factors that do not multiply are named with both shapes."""
    pair = {"blocks.0.ffn.0": (torch.ones(4, 5), torch.ones(6, 3))}
    torch.save(peft_names(pair), tmp_path / "lora.pt")
    with pytest.raises(WeightsError, match=r"\[4, 5\] and \[6, 3\] have no common rank"):
        read_lora(tmp_path / "lora.pt")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is not supported"),
        ({"r": 64, "lora_alpha": 64}, "says rank 64, but layer blocks.0.self_attn.q has rank 4"),
        ({"lora_alpha": "much"}, "is no adapter config"),
        ([], "is no adapter config"),
        ({"alpha_pattern": ["q"]}, "is no adapter config"),
        ({"alpha_pattern": {"(": 1}}, "is no adapter config"),
    ],
)
def test_config_of_another_form(tmp_path: Path, factors: Any, config: Any, reason: str) -> None:
    """A config that asks for what is not done, or belongs to another adapter, is refused."""
    save_file(peft_names(factors), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=reason):
        read_lora(tmp_path)


def test_a_checkpoint_is_no_lora(tmp_path: Path, weights: Any) -> None:
    """Whole weights given as a LoRA say what they are and where they belong."""
    torch.save({"generator": {**weights, "pos_1LC": torch.ones(1)}}, tmp_path / "w.pt")
    assert "is a VAR transformer" in refused(tmp_path / "w.pt", weights)
    assert "no LoRA; give it as the checkpoint" in refused(tmp_path / "w.pt", weights)
