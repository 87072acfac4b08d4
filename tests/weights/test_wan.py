"""A Wan folder in either layout, and a transformer in every disguise it is published in."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from streamgen.errors import WeightsError
from streamgen.models.wan import WanConfig, WanModel
from streamgen.weights.keymaps import GAN_HEADS, to_diffusers
from streamgen.weights.load import load_into
from streamgen.weights.wan import open_base, read_transformer

CONFIG = WanConfig(
    dim=32, ffn_dim=48, num_heads=2, num_layers=2, text_dim=20, text_len=6, freq_dim=16
)
ORIGINAL_CONFIG = {
    "_class_name": "WanModel",
    "model_type": "t2v",
    "dim": 32,
    "ffn_dim": 48,
    "num_heads": 2,
    "num_layers": 2,
    "in_dim": 16,
    "out_dim": 16,
    "freq_dim": 16,
    "text_len": 6,
    "eps": 1e-6,
}
DIFFUSERS_CONFIG = {
    "_class_name": "WanTransformer3DModel",
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 20,
    "freq_dim": 16,
    "ffn_dim": 48,
    "num_layers": 2,
    "patch_size": [1, 2, 2],
    "image_dim": None,
    "eps": 1e-6,
}
STEM = "diffusion_pytorch_model"

Tensors = Mapping[str, Tensor]


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """A model's weights, multiples of 1/64, so that a LoRA can be taken out of them exactly."""
    torch.manual_seed(0)
    state = WanModel(CONFIG).state_dict()
    return {name: torch.randint(-64, 65, value.shape) / 64 for name, value in state.items()}


def same(found: Tensors, wanted: Tensors) -> bool:
    """Whether both are bitwise one state dict."""
    return found.keys() == wanted.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in wanted.items()
    )


def shifted(tensors: Tensors) -> dict[str, Tensor]:
    """Other weights of the same names, which must not be taken."""
    return {name: value + 1 for name, value in tensors.items()}


def renamed(tensors: Tensors, rename: Callable[[str], str]) -> dict[str, Tensor]:
    return {rename(name): value.clone() for name, value in tensors.items()}


def save_sharded(tensors: Tensors, folder: Path, shards: int = 3) -> None:
    """Shards and their index, as both layouts have them for 14B."""
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"{STEM}-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = folder / f"{STEM}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def original(folder: Path, tensors: Tensors | None = None, sharded: bool = False) -> Path:
    """A folder in the original layout; its transformer is given or left out."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(ORIGINAL_CONFIG))
    (folder / "Wan2.1_VAE.pth").write_bytes(b"")
    (folder / "models_t5_umt5-xxl-enc-bf16.pth").write_bytes(b"")
    (folder / "google" / "umt5-xxl").mkdir(parents=True)
    if tensors is not None and sharded:
        save_sharded(tensors, folder)
    elif tensors is not None:
        save_file(dict(tensors), folder / f"{STEM}.safetensors")
    return folder


def diffusers(folder: Path, tensors: Tensors | None = None, sharded: bool = False) -> Path:
    """A folder in diffusers' layout."""
    for part in ("transformer", "vae", "text_encoder", "tokenizer"):
        (folder / part).mkdir(parents=True)
    index = {"_class_name": "WanPipeline", "transformer_2": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "transformer" / "config.json").write_text(json.dumps(DIFFUSERS_CONFIG))
    (folder / "vae" / "config.json").write_text(json.dumps({"z_dim": 16}))
    if tensors is None:
        return folder
    theirs = renamed(tensors, to_diffusers)
    if sharded:
        save_sharded(theirs, folder / "transformer")
    else:
        save_file(theirs, folder / "transformer" / f"{STEM}.safetensors")
    return folder


def lora_of(weights: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights with an adapter taken out of every block's linears, and the adapter (PEFT)."""
    base, lora = dict(weights), {}
    generator = torch.Generator().manual_seed(1)
    for name, value in weights.items():
        if name.startswith("blocks.") and name.endswith(".weight") and value.ndim == 2:
            a = torch.randint(-2, 3, (4, value.shape[1]), generator=generator) / 8
            b = torch.randint(-2, 3, (value.shape[0], 4), generator=generator) / 8
            base[name] = value - b @ a  # multiples of 1/64 below 4: exact in float32
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            lora |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
    return base, lora


def fsdp(name: str) -> str:
    """As an EMA dump names a tensor: a wrapper around the model and around each block."""
    inner = re.sub(r"^(blocks\.\d+\.)", r"\1_fsdp_wrapped_module.", name)
    return f"model._fsdp_wrapped_module.{inner}"


def heads(prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{head}0.weight": torch.ones(3) for head in GAN_HEADS}


def as_original(w: Tensors, at: Path) -> dict[str, Any]:
    return {"base": original(at / "b", w)}


def as_original_shards(w: Tensors, at: Path) -> dict[str, Any]:
    return {"base": original(at / "b", w, sharded=True)}


def as_diffusers(w: Tensors, at: Path) -> dict[str, Any]:
    return {"base": diffusers(at / "b", w)}


def as_diffusers_shards(w: Tensors, at: Path) -> dict[str, Any]:
    return {"base": diffusers(at / "b", w, sharded=True)}


def checkpoint(at: Path, saved: Any, name: str = "w.pt", **how: Any) -> dict[str, Any]:
    torch.save(saved, at / name, **how)
    return {"base": original(at / "b"), "checkpoint": at / name}


def as_flat_torch(w: Tensors, at: Path) -> dict[str, Any]:
    return checkpoint(at, dict(w), "w.pth")


def as_old_torch(w: Tensors, at: Path) -> dict[str, Any]:
    return checkpoint(at, dict(w), _use_new_zipfile_serialization=False)


def as_self_forcing(w: Tensors, at: Path) -> dict[str, Any]:
    saved = {"generator": renamed(w, "model.{}".format), "critic": shifted(w)}
    return checkpoint(at, saved)


def as_ema_in_fsdp(w: Tensors, at: Path) -> dict[str, Any]:
    plain = renamed(shifted(w), "model.{}".format)
    saved = {"critic": shifted(w), "generator": plain, "generator_ema": renamed(w, fsdp)}
    return checkpoint(at, {**saved, "step": 3})


def as_causvid_with_heads(w: Tensors, at: Path) -> dict[str, Any]:
    saved = {"generator": {**renamed(w, "model.{}".format), **heads("model.")}}
    return checkpoint(at, {**saved, "critic": shifted(w)})


def as_model_of_a_net(w: Tensors, at: Path) -> dict[str, Any]:
    return checkpoint(at, {"model": renamed(w, "net.{}".format)})


def as_wrapped_diffusers(w: Tensors, at: Path) -> dict[str, Any]:
    return checkpoint(at, {"generator": renamed(w, lambda n: f"model.{to_diffusers(n)}")})


def as_diffusion_model_safetensors(w: Tensors, at: Path) -> dict[str, Any]:
    save_file(renamed(w, "model.diffusion_model.{}".format), at / "w.safetensors")
    return {"base": diffusers(at / "b"), "checkpoint": at / "w.safetensors"}


def as_folder_over_other_weights(w: Tensors, at: Path) -> dict[str, Any]:
    return {"base": original(at / "b", shifted(w)), "checkpoint": diffusers(at / "c", w)}


def as_index_over_a_bare_base(w: Tensors, at: Path) -> dict[str, Any]:
    folder = original(at / "c", w, sharded=True)
    index = folder / f"{STEM}.safetensors.index.json"
    return {"base": diffusers(at / "b"), "checkpoint": index}


def as_longlive(w: Tensors, at: Path) -> dict[str, Any]:
    base, lora = lora_of(w)
    torch.save({"generator_lora": lora, "critic_lora": shifted(lora)}, at / "lora.pt")
    saved = {"generator": renamed(base, "model.{}".format)}
    return {**checkpoint(at, saved, "longlive_base.pt"), "lora": at / "lora.pt"}


def as_base_with_lora(w: Tensors, at: Path) -> dict[str, Any]:
    base, lora = lora_of(w)
    save_file(lora, at / "adapter_model.safetensors")
    (at / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4}))
    return {"base": diffusers(at / "b", base), "lora": at}


DISGUISES = [value for name, value in list(globals().items()) if name.startswith("as_")]


@pytest.mark.parametrize("disguise", DISGUISES, ids=lambda disguise: disguise.__name__)
def test_every_disguise(tmp_path: Path, weights: Tensors, disguise: Any) -> None:
    """However the weights were saved, the model that is built holds bitwise the same."""
    how = disguise(weights, tmp_path)
    tensors, sizes = read_transformer(**how)
    assert same(tensors, weights)
    # only the original config.json has a text_len
    text_len = 6 if (how["base"] / "config.json").is_file() else 512
    assert WanConfig(**sizes) == WanConfig(**{**vars(CONFIG), "text_len": text_len})
    with torch.device("meta"):
        model = WanModel(WanConfig(**sizes))
    load_into(model, tensors)
    assert same(model.state_dict(), weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_are_kept(tmp_path: Path, weights: Tensors, dtype: torch.dtype) -> None:
    """The file's own type comes out; nothing is widened on the way."""
    low = {name: value.to(dtype) for name, value in weights.items()}
    assert same(read_transformer(original(tmp_path / "b", low))[0], low)


def test_plain_weights_when_asked(tmp_path: Path, weights: Tensors) -> None:
    """Without prefer_ema the weights of the last step are taken."""
    how = as_ema_in_fsdp(weights, tmp_path)
    assert same(read_transformer(**how, prefer_ema=False)[0], shifted(weights))


def test_lora_alpha(tmp_path: Path, weights: Tensors) -> None:
    """A given alpha scales the adapter: with half of it, half of what it adds."""
    how = as_longlive(weights, tmp_path)
    base, _ = lora_of(weights)
    halved, _ = read_transformer(**how, lora_alpha=2)
    expected = {name: (base[name] + weights[name]) / 2 for name in weights}
    assert same(halved, expected)


def test_checkpoint_without_a_base(tmp_path: Path) -> None:
    """A published width needs no base: heads are 128 wide. Another width says what is needed."""
    for dim in (256, 32):
        config = WanConfig(dim, 48, dim // 16, 1, text_dim=20, freq_dim=16)
        save_file(WanModel(config).state_dict(), tmp_path / f"{dim}.safetensors")
    _, sizes = read_transformer(None, tmp_path / "256.safetensors")
    assert (sizes["num_heads"], sizes["dim"]) == (2, 256)
    with pytest.raises(WeightsError, match="32.safetensors: dim 32 does not divide into heads of"):
        read_transformer(None, tmp_path / "32.safetensors")
    with pytest.raises(WeightsError, match="neither a base folder nor a checkpoint"):
        read_transformer(None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_nothing_is_copied(tmp_path: Path, weights: Tensors) -> None:
    """What comes out is the file's own pages, also nested, wrapped and renamed."""
    tensors, _ = read_transformer(**as_wrapped_diffusers(weights, tmp_path))
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [[int(end, 16) for end in m[0].split("-")] for m in maps if m[-1].endswith("w.pt")]
    for tensor in tensors.values():
        assert any(first <= tensor.data_ptr() < end for first, end in spans)


def test_parts_of_the_original_layout(tmp_path: Path) -> None:
    """Everything that is there is found; the sizes are known without any tensor."""
    base = open_base(original(tmp_path / "b"))
    assert base.layout == "original"
    assert base.vae == tmp_path / "b" / "Wan2.1_VAE.pth"
    assert base.text == tmp_path / "b" / "models_t5_umt5-xxl-enc-bf16.pth"
    assert base.tokenizer == tmp_path / "b" / "google" / "umt5-xxl"
    assert base.transformer is None
    # config.json of this layout leaves the text's width out, which is 4096 for Wan
    assert WanConfig(**base.sizes or {}) == WanConfig(**{**vars(CONFIG), "text_dim": 4096})
    assert base.assumed >= {"text_dim", "patch_size"} and "dim" not in base.assumed


def test_parts_of_diffusers_layout(tmp_path: Path, weights: Tensors) -> None:
    """Each part is its folder."""
    base = open_base(diffusers(tmp_path / "b", weights))
    assert base.layout == "diffusers"
    assert base.part("vae") == tmp_path / "b" / "vae"
    assert base.part("text") == tmp_path / "b" / "text_encoder"
    assert base.part("tokenizer") == tmp_path / "b" / "tokenizer"
    assert base.part("transformer") == tmp_path / "b" / "transformer" / f"{STEM}.safetensors"
    assert WanConfig(**base.sizes or {}) == WanConfig(**{**vars(CONFIG), "text_len": 512})


def test_sizes_without_a_config(tmp_path: Path) -> None:
    """Without config.json the tensors' shapes tell, with heads of 128."""
    config = WanConfig(128, 48, 1, 1, text_dim=20, freq_dim=16)
    folder = original(tmp_path / "b", WanModel(config).state_dict())
    (folder / "config.json").unlink()
    base = open_base(folder)
    assert base.sizes is not None and not base.assumed
    assert WanConfig(**base.sizes) == config


def test_missing_parts_are_named(tmp_path: Path) -> None:
    """A part that is not there is an error when it is asked for, with what was looked for."""
    for make, name in ((original, "Wan2.1_VAE.pth"), (diffusers, "vae")):
        base = open_base(make(tmp_path / make.__name__))
        with pytest.raises(WeightsError, match=f"holds no weights; looked for {STEM}"):
            base.part("transformer")
        with pytest.raises(WeightsError, match="holds no weights"):
            read_transformer(base)
        path = base.part("vae")
        (path / "config.json").unlink() if path.is_dir() else None
        path.rmdir() if path.is_dir() else path.unlink()
        base = open_base(tmp_path / make.__name__)
        assert base.vae is None
        with pytest.raises(WeightsError, match=f"lacks its vae part; looked for {name}"):
            base.part("vae")


def test_missing_shard(tmp_path: Path, weights: Tensors) -> None:
    """One shard of a base is not there: it is named."""
    folder = diffusers(tmp_path / "b", weights, sharded=True)
    (folder / "transformer" / f"{STEM}-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"shards are missing \(1 of 3\): .*00002-of-00003"):
        read_transformer(folder)
    (folder / "transformer" / f"{STEM}.safetensors.index.json").unlink()
    with pytest.raises(WeightsError, match="but not their index"):
        read_transformer(folder)


def line(**how: Any) -> str:
    """The one line that a call is refused with."""
    with pytest.raises(WeightsError) as caught:
        read_transformer(**how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"pos_1LC": (1, 680, 8)}, "is a VAR transformer"),
        ({"quantize.embedding.weight": (8, 8)}, "is a VQVAE"),
        ({"decoder.middle.0.residual.0.gamma": (8, 1, 1, 1)}, "is a Wan video autoencoder"),
        ({"blocks.0.attn.q.weight": (8, 8)}, "is a UMT5 text encoder"),
        ({"visual.cls_embedding": (1, 1, 8)}, "is a CLIP image encoder"),
        ({"double_blocks.0.img_attn_qkv.weight": (8, 8)}, "is a HunyuanVideo transformer"),
        (
            {"patch_embedding.weight": (8, 36, 1, 2, 2), "head.head.weight": (64, 8)},
            r"is a Wan image-to-video transformer \(36 input channels",
        ),
        ({"conv.weight": (8, 8)}, r"is of no known family \(it holds conv.weight"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_wrong_families(tmp_path: Path, tensors: Any, text: str, wrapped: bool) -> None:
    """A checkpoint of another family: what it is and what is accepted, in one line."""
    saved: Any = {name: torch.zeros(shape) for name, shape in tensors.items()}
    torch.save({"trainer": {"var_wo_ddp": saved}} if wrapped else saved, tmp_path / "w.pt")
    found = line(base=original(tmp_path / "b"), checkpoint=tmp_path / "w.pt")
    assert re.search(text, found)
    assert found.endswith("accepted is a Wan2.1 text-to-video transformer, under official or "
                          "diffusers' names")  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ("blocks.0.action_model.keyboard_embed.0.weight", "a Matrix-Game transformer"),
        ("vace_blocks.0.after_proj.bias", "a Wan VACE transformer"),
        ("img_emb.proj.0.weight", "a Wan image-to-video transformer"),
    ],
)
def test_relatives(tmp_path: Path, weights: Tensors, extra: str, text: str) -> None:
    """A model made from Wan with layers of its own is named before any key is reported."""
    saved = {f"model.{name}": value for name, value in {**weights, extra: torch.ones(2)}.items()}
    torch.save({"generator": saved}, tmp_path / "w.pt")
    assert text in line(base=original(tmp_path / "b"), checkpoint=tmp_path / "w.pt")


def test_lora_as_checkpoint_and_back(tmp_path: Path, weights: Tensors) -> None:
    """The two files of LongLive swapped: each says where it belongs."""
    how = as_longlive(weights, tmp_path)
    swapped = {**how, "checkpoint": how["lora"], "lora": how["checkpoint"]}
    assert "is a LoRA (20 layers); give it as the LoRA" in line(**swapped)
    assert "and no LoRA; give it as the checkpoint" in line(**{**how, "lora": how["checkpoint"]})


def test_other_size_than_the_base(tmp_path: Path, weights: Tensors) -> None:
    """A checkpoint of another width or depth names both, with the sizes that differ."""
    for other in ({"dim": 64, "num_heads": 4}, {"num_layers": 3}, {"ffn_dim": 64}):
        config = WanConfig(**{**vars(CONFIG), **other})  # type: ignore[arg-type]
        path = tmp_path / f"{next(iter(other))}.safetensors"
        save_file(WanModel(config).state_dict(), path)
        base = original(tmp_path / path.stem)
        found = line(base=base, checkpoint=path)
        assert f"dim {config.dim}, {config.num_layers} layers, but {base} is one of" in found
        assert f"{path.stem} {other[path.stem]} and not {ORIGINAL_CONFIG[path.stem]}" in found


def test_published_sizes_are_named(tmp_path: Path) -> None:
    """A 14B checkpoint over a 1.3B base is told in these words."""
    folder = original(tmp_path / "b")
    published = {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30, "freq_dim": 256}
    (folder / "config.json").write_text(json.dumps({**ORIGINAL_CONFIG, **published}))
    with torch.device("meta"):
        state = WanModel(WanConfig(5120, 13824, 40, 1)).state_dict()
    tensors = {name: torch.zeros(()).expand(value.shape) for name, value in state.items()}
    tensors["blocks.39.norm3.bias"] = tensors["blocks.0.norm3.bias"]
    torch.save(tensors, tmp_path / "w.pt")
    found = line(base=folder, checkpoint=tmp_path / "w.pt")
    assert "14B (dim 5120, 40 layers)" in found and "1.3B (dim 1536, 30 layers)" in found


def test_missing_and_misshaped_keys_are_named(tmp_path: Path, weights: Tensors) -> None:
    """Right family, wrong keys: the model's own loading names them."""
    broken: dict[str, Tensor] = dict(weights)
    del broken["blocks.1.cross_attn.norm_k.weight"]
    broken["blocks.0.extra.weight"] = torch.ones(1)
    broken["blocks.0.ffn.2.bias"] = torch.ones(31)
    torch.save(broken, tmp_path / "w.pt")
    tensors, sizes = read_transformer(original(tmp_path / "b"), tmp_path / "w.pt")
    with torch.device("meta"):
        model = WanModel(WanConfig(**sizes))
    with pytest.raises(WeightsError) as caught:
        load_into(model, tensors)
    for text in (
        "1 missing: blocks.1.cross_attn.norm_k.weight",
        "1 unexpected: blocks.0.extra.weight",
        "blocks.0.ffn.2.bias (model [32], file [31])",
    ):
        assert text in str(caught.value)


def test_sized_tensor_missing(tmp_path: Path, weights: Tensors) -> None:
    """A tensor that sizes are read from is missing: named with its file."""
    torch.save({k: v for k, v in weights.items() if k != "head.head.weight"}, tmp_path / "w.pt")
    found = line(base=original(tmp_path / "b"), checkpoint=tmp_path / "w.pt")
    assert "w.pt: no whole Wan transformer: head.head.weight missing" in found


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"in_dim": 36, "model_type": "i2v"}, "a Wan image-to-video transformer"),
        ({"in_dim": 48, "out_dim": 48, "model_type": "ti2v"}, "a Wan2.2 5B transformer"),
        ({"model_type": "vace"}, "a Wan VACE transformer"),
        ({"action_config": {"blocks": [0]}}, "a Matrix-Game transformer"),
        ({"_class_name": "HunyuanVideoTransformer3DModel"}, "a HunyuanVideoTransformer3DModel"),
    ],
)
def test_base_of_another_family(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    """A folder's config.json tells the wrong family before any tensor is looked at."""
    for make, home in ((original, "."), (diffusers, "transformer")):
        folder = make(tmp_path / make.__name__)
        path = folder / home / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        assert text in line(base=folder)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ({"_class_name": "FluxPipeline"}, "is a FluxPipeline folder; accepted is"),
        (
            {"_class_name": "WanPipeline", "transformer_2": ["diffusers", "Wan"]},
            "Wan2.2 A14B .two transformers",
        ),
    ],
)
def test_pipelines_of_another_family(tmp_path: Path, index: Any, text: str) -> None:
    """model_index.json tells other pipelines."""
    folder = diffusers(tmp_path / "b")
    (folder / "model_index.json").write_text(json.dumps(index))
    assert re.search(text, line(base=folder))


def test_autoencoder_of_another_size(tmp_path: Path) -> None:
    """The Wan2.2 autoencoder beside a Wan2.1 transformer is named with both channel counts."""
    folder = diffusers(tmp_path / "b")
    (folder / "vae" / "config.json").write_text(json.dumps({"z_dim": 48}))
    assert "an autoencoder of 48 latent channels, but the transformer has 16" in line(base=folder)


def test_folders_that_are_no_base(tmp_path: Path) -> None:
    """No folder, a file, an empty folder, another model's folder, Wan2.2's folders."""
    assert "no such folder; a base is a Wan2.1 folder" in line(base=tmp_path / "none")
    (tmp_path / "w.pt").write_bytes(b"")
    assert "is a file; give it as the checkpoint" in line(base=tmp_path / "w.pt")
    folder = tmp_path / "b"
    folder.mkdir()
    assert "is no Wan2.1 folder; it holds nothing; accepted: diffusers' layout" in line(base=folder)
    (folder / "model.json").write_text("{}")
    assert "is a packaged model folder (model.json)" in line(base=folder)
    (folder / "Wan2.2_VAE.pth").write_bytes(b"")
    assert "a Wan2.2 5B transformer" in line(base=folder)
    (folder / "high_noise_model").mkdir()
    assert "Wan2.2 A14B" in line(base=folder)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"dim": "many", "ffn_dim": 1, "num_layers": 1}',
        '{"dim": 32, "num_heads": 0}',
        '{"dim": 32, "num_heads": 5, "ffn_dim": 1, "num_layers": 1}',
        '{"in_dim": [16]}',
        '{"patch_size": 2}',
        '{"eps": true}',
        '{"num_attention_heads": 2, "attention_head_dim": "wide"}',
    ],
)
def test_config_that_is_no_config(tmp_path: Path, text: str) -> None:
    """A damaged config.json is one line that names it."""
    folder = original(tmp_path / "b")
    (folder / "config.json").write_text(text)
    assert "config.json: " in line(base=folder)


def test_broken_downloads(tmp_path: Path, weights: Tensors) -> None:
    """What a download left in place of a base's or a checkpoint's weights is named."""
    folder = original(tmp_path / "b", weights)
    path = folder / f"{STEM}.safetensors"
    whole = path.read_bytes()
    for content, text in (
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"<!doctype html>", "web page"),
        (whole[:-7], "half-downloaded"),
    ):
        path.write_bytes(content)
        assert text in line(base=folder)
    path.unlink()
    path.with_name(path.name + ".incomplete").write_bytes(whole[:9])
    assert f"{STEM}.safetensors: half-downloaded; only" in line(base=folder)
