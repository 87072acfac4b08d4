"""A file's family is told from its keys and shapes, and described without reading it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from streamgen.errors import WeightsError
from streamgen.models.wan import WanConfig, WanModel
from streamgen.weights.families import describe, recognise, size_name, sizes_of, variant
from streamgen.weights.keymaps import GAN_HEADS, to_diffusers

KEYS = (
    Path(os.environ.get("STREAMGEN_GOLDEN", Path(__file__).parents[2].parent / "shared" / "parity"))
    / "keys"
)

# Key -> shape that a file of each family holds.
FAMILIES: dict[str, dict[str, tuple[int, ...]]] = {
    "var": {"pos_1LC": (1, 680, 64), "word_embed.weight": (64, 32), "head.weight": (4096, 64)},
    "vqvae": {"encoder.conv_in.weight": (32, 3, 3, 3), "quantize.embedding.weight": (4096, 32)},
    "wan-vae": {"decoder.middle.0.residual.0.gamma": (8, 1, 1, 1), "conv2.weight": (16, 16, 1)},
    "image-vae": {"decoder.mid_block.resnets.0.norm1.weight": (8,)},
    "umt5": {"token_embedding.weight": (9, 4), "blocks.0.attn.q.weight": (4, 4)},
    "clip": {"visual.cls_embedding": (1, 1, 8), "visual.patch_embedding.weight": (8, 3, 2, 2)},
    "hunyuan": {"double_blocks.0.img_attn_qkv.weight": (24, 8)},
    "flux": {"double_blocks.0.img_attn.qkv.weight": (24, 8)},
    "lora": {"blocks.0.self_attn.q.lora_A.weight": (4, 8)},
    "quantised": {"blocks.0.self_attn.q.weight": (8, 8), "blocks.0.self_attn.q.scale_weight": ()},
    "unknown": {"conv1.weight": (8, 8)},
}
# What other kinds of Wan have beside, or instead of, the tensors of text-to-video.
RELATIVES: dict[str, dict[str, tuple[int, ...]]] = {
    "wan-i2v": {"patch_embedding.weight": (32, 36, 1, 2, 2), "img_emb.proj.0.weight": (8,)},
    "matrix-game": {"blocks.0.action_model.keyboard_embed.0.weight": (8, 4)},
    "wan-vace": {"vace_blocks.0.after_proj.bias": (32,)},
    "wan-animate": {"motion_encoder.dec.direction.weight": (8, 8)},
    "wan2.2-5b": {"patch_embedding.weight": (32, 48, 1, 2, 2), "head.head.weight": (192, 32)},
    "wan-other": {"patch_embedding.weight": (32, 32, 1, 2, 2)},
    "world": {"action_embedding.0.weight": (32, 5)},
}


def on_meta(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def official_shapes(dim: int, ffn_dim: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Wan2.1's state dict, written out from its description (algorithms: 15 + 27 a block)."""

    def linear(name: str, width_in: int, width: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (width, width_in), f"{name}.bias": (width,)}

    shapes: dict[str, tuple[int, ...]] = {
        "patch_embedding.weight": (dim, 16, 1, 2, 2),
        "patch_embedding.bias": (dim,),
        **linear("text_embedding.0", 4096, dim),
        **linear("text_embedding.2", dim, dim),
        **linear("time_embedding.0", 256, dim),
        **linear("time_embedding.2", dim, dim),
        **linear("time_projection.1", dim, 6 * dim),
        **linear("head.head", dim, 64),
        "head.modulation": (1, 2, dim),
    }
    for i in range(layers):
        block = f"blocks.{i}"
        shapes |= {f"{block}.modulation": (1, 6, dim)}
        shapes |= {f"{block}.norm3.weight": (dim,), f"{block}.norm3.bias": (dim,)}
        shapes |= linear(f"{block}.ffn.0", dim, ffn_dim) | linear(f"{block}.ffn.2", ffn_dim, dim)
        for attention in ("self_attn", "cross_attn"):
            for name in "qkvo":
                shapes |= linear(f"{block}.{attention}.{name}", dim, dim)
            for name in ("norm_q", "norm_k"):
                shapes[f"{block}.{attention}.{name}.weight"] = (dim,)
    return shapes


def model_shapes(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every key and shape of our class, built without bytes."""
    with torch.device("meta"):
        model = WanModel(WanConfig(**sizes))
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


PUBLISHED = {"1.3B": (1536, 8960, 30, 12), "14B": (5120, 13824, 40, 40)}


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes(size: str) -> None:
    """From the published shapes come the published sizes, and from those exactly our class."""
    dim, ffn_dim, layers, heads = PUBLISHED[size]
    shapes = official_shapes(dim, ffn_dim, layers)
    sizes = sizes_of(on_meta(shapes))
    assert len(shapes) == 15 + 27 * layers
    assert WanConfig(**sizes) == WanConfig(dim, ffn_dim, heads, layers)
    assert sizes["num_heads"] == heads
    assert size_name(sizes) == f"{size} (dim {dim}, {layers} layers)"
    assert model_shapes(sizes) == shapes


@pytest.mark.parametrize("size", PUBLISHED)
def test_official_key_lists(size: str) -> None:
    """The lists taken from the official classes, where they are at hand: the same."""
    path = KEYS / f"wan2.1_t2v_{size}.json"
    if not path.is_file():
        pytest.skip(f"no {path.name} in STREAMGEN_GOLDEN")
    shapes = {name: tuple(shape) for name, shape in json.loads(path.read_text()).items()}
    assert recognise(on_meta(shapes)).kind == "wan"
    assert model_shapes(sizes_of(on_meta(shapes))) == shapes
    dim, ffn_dim, layers, _ = PUBLISHED[size]
    assert official_shapes(dim, ffn_dim, layers) == shapes


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vae_ch160v4096z32", "vqvae"),
        ("var_d16", "var"),
        ("var_d30", "var"),
        ("var_d36", "var"),
        ("wan2.1_vae", "wan-vae"),
    ],
)
def test_official_lists_of_other_families(name: str, kind: str) -> None:
    """The official lists of what is not accepted are told apart."""
    path = KEYS / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no {path.name} in STREAMGEN_GOLDEN")
    shapes = {key: tuple(shape) for key, shape in json.loads(path.read_text()).items()}
    assert recognise(on_meta(shapes)).kind == kind


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"spatial_tokens": 12},
        {"num_kv_heads": 1},
        {"in_channels": 8, "out_channels": 8, "patch_size": (1, 1, 1)},
        {"text_dim": 7, "freq_dim": 10, "text_len": 3, "eps": 1e-5},
    ],
)
def test_sizes_agree_with_the_config(other: dict[str, Any]) -> None:
    """Whatever the config, its sizes are read off the tensors of the model it makes."""
    config = WanConfig(dim=32, ffn_dim=40, num_heads=2, num_layers=11, **other)
    unseen = {key: other[key] for key in ("text_len", "eps") if key in other}
    sizes = sizes_of(on_meta(model_shapes(vars(config))), 16, **unseen)
    assert WanConfig(**sizes) == config


def test_sizes_name_what_is_missing() -> None:
    """Tensors that sizes are read from are named when missing; heads must divide the width."""
    shapes = official_shapes(1536, 8960, 2)
    del shapes["head.head.weight"], shapes["blocks.0.ffn.0.weight"]
    with pytest.raises(WeightsError, match=r"blocks.0.ffn.0.weight, head.head.weight missing"):
        sizes_of(on_meta(shapes))
    shapes |= {"head.head.weight": (64,), "blocks.0.ffn.0.weight": (0, 1536)}
    with pytest.raises(WeightsError, match=r"ffn.0.weight \[0, 1536\], head.head.weight \[64\] of"):
        sizes_of(on_meta(shapes))
    with pytest.raises(WeightsError, match="dim 96 does not divide into heads of 128; a config"):
        sizes_of(on_meta(official_shapes(96, 192, 2)))


@pytest.mark.parametrize("prefix", ["", "model.", "model._fsdp_wrapped_module."])
@pytest.mark.parametrize("kind", FAMILIES)
def test_families(kind: str, prefix: str) -> None:
    """Each family is known by its keys, wrapped or not."""
    family = recognise(on_meta({prefix + name: s for name, s in FAMILIES[kind].items()}))
    assert family.kind == kind
    assert "\n" not in family.text


@pytest.mark.parametrize("translate", [str, to_diffusers])
@pytest.mark.parametrize("kind", ["wan", *RELATIVES])
def test_relatives_of_wan(kind: str, translate: Any) -> None:
    """Models made from Wan are told from it, in both conventions; a critic's heads do not count."""
    shapes = official_shapes(32, 48, 2) | RELATIVES.get(kind, {})
    shapes |= {f"{GAN_HEADS[2]}0.cross_attn.k.weight": (32, 32)}
    assert recognise(on_meta({translate(name): s for name, s in shapes.items()})).kind == kind


def test_image_to_video_in_diffusers_names() -> None:
    """Diffusers calls the image layers otherwise; without the 36 channels they tell it too."""
    shapes = {to_diffusers(name): s for name, s in official_shapes(32, 48, 2).items()}
    shapes["condition_embedder.image_embedder.norm1.weight"] = (8,)
    assert recognise(on_meta(shapes)).kind == "wan-i2v"
    assert variant(36, 16).kind == "wan-i2v"
    assert variant(16, 16).kind == "wan"


def test_autoencoders_say_their_channels() -> None:
    """The Wan2.2 autoencoder is told from Wan2.1's by its latent channels."""
    for channels in (16, 48):
        shapes = {"decoder.middle.0.residual.0.gamma": (8, 1, 1, 1)}
        shapes["conv2.weight"] = (channels, channels, 1, 1, 1)  # type: ignore[assignment]
        assert f"({channels} latent channels)" in recognise(on_meta(shapes)).text


def test_nothing_at_all() -> None:
    """No tensors are of no family."""
    assert recognise({}).kind == "unknown"


def test_describe_a_checkpoint(tmp_path: Path) -> None:
    """A nested checkpoint in diffusers' names: what it is, its sizes, its bytes, its entries."""
    shapes = official_shapes(128, 192, 3)
    tensors = {
        f"model.{to_diffusers(name)}": torch.zeros(shape, dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }
    torch.save({"generator": tensors, "step": 5}, tmp_path / "w.pt")
    found = describe(tmp_path / "w.pt")
    values = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert (found.family.kind, found.names) == ("wan", "diffusers")
    assert (found.tensors, found.values, found.num_bytes) == (96, values, 2 * values)
    assert found.dtypes == {"bfloat16": 96}
    assert found.entries == ("generator", "step")
    assert found.sizes == sizes_of(on_meta(shapes))
    text = str(found)
    for piece in ("w.pt: a Wan2.1 text-to-video", "96 tensors", "dim 128, 3 layers", "generator"):
        assert piece in text


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "quantised"])
def test_describe_other_families(tmp_path: Path, kind: str) -> None:
    """Any readable file is described, the accepted family or not."""
    save_file({k: torch.zeros(s) for k, s in FAMILIES[kind].items()}, tmp_path / "w.safetensors")
    found = describe(tmp_path / "w.safetensors")
    assert found.family.kind == kind
    assert not found.sizes and not found.names
    assert found.family.text in str(found)


def test_describe_half_a_transformer(tmp_path: Path) -> None:
    """A shard alone lacks what sizes are read from; it is described without them."""
    save_file({"patch_embedding.weight": torch.zeros(32, 16, 1, 2, 2)}, tmp_path / "a.safetensors")
    found = describe(tmp_path / "a.safetensors")
    assert (found.family.kind, found.sizes) == ("wan", {})


def sparse(shapes: Mapping[str, tuple[int, ...]], path: Path) -> int:
    """A safetensors file of bf16 zeros that takes no room on the disk; its size in bytes."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path.stat().st_size


def resident() -> int:
    """Bytes of memory this process holds."""
    pages = int(re.split(r"\s+", Path("/proc/self/statm").read_text())[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_describing_reads_no_tensors(tmp_path: Path) -> None:
    """A 1.3B file of 2.8 GB is described in the memory of its header."""
    path = tmp_path / "w.safetensors"
    size = sparse(official_shapes(*PUBLISHED["1.3B"][:3]), path)
    before = resident()
    found = describe(path)
    assert size > found.num_bytes > 2.8e9
    assert size_name(found.sizes).startswith("1.3B")
    assert resident() - before < 50e6
