"""What a weights file holds, told from its keys and shapes alone.

The video pipeline accepts one family, Wan2.1 text-to-video. The others are those that people have
beside it on their disks, so that the wrong file is named for what it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from streamgen.errors import WeightsError
from streamgen.weights.keymaps import is_diffusers, official_names, strip_name
from streamgen.weights.load import find_weights, read_entries, read_tensors

HEAD_DIM = 128
"""Head width of every published Wan model; the number of heads is not seen in the tensors."""

LORA_MARKS = (".lora_A", ".lora_B", ".lora_down", ".lora_up", ".lora_magnitude_vector")
"""Pieces that the names of a LoRA's tensors hold."""

ENTRIES = (
    *("generator", "generator_ema", "model", "state_dict"),
    *("generator_lora", "trainer", "var_wo_ddp"),
)
"""Where torch files of these families keep their tensors; of two that are there the first."""

_NAMED_SIZES = {(1536, 30): "1.3B", (5120, 40): "14B"}
_QUANTISED = (".scale_weight", ".weight_scale", ".absmax", ".qweight", "scaled_fp8")

# Kind, what to call it, and a piece that only its names hold; of Wan's relatives first.
_WAN_VARIANTS = (
    ("matrix-game", "a Matrix-Game transformer (action modules)", "action_model."),
    ("wan-vace", "a Wan VACE transformer (vace_blocks)", "vace_blocks."),
    ("wan-animate", "a Wan Animate transformer (motion encoder)", "motion_encoder."),
    ("wan-animate", "a Wan Animate transformer (face adapter)", "face_adapter."),
    ("wan-s2v", "a Wan speech-to-video transformer (audio layers)", "audio_injector."),
    ("wan-control", "a Wan camera or control transformer (control adapter)", "control_adapter."),
    ("world", "a world model's transformer (it takes actions)", "action_embedding."),
)
_OTHERS = (
    ("var", "a VAR transformer (next-scale images)", "pos_1LC"),
    ("vqvae", "a VQVAE (the image tokenizer of VAR)", "quantize.embedding.weight"),
    ("wan-vae", "a Wan video autoencoder", "decoder.middle.0.residual.0.gamma"),
    ("wan-vae", "a Wan video autoencoder", "decoder.mid_block.resnets.0.norm1.gamma"),
    ("image-vae", "an image autoencoder", "decoder.mid_block.resnets.0.norm1.weight"),
    ("image-vae", "an image autoencoder", "decoder.mid.block_1.norm1.weight"),
    ("umt5", "a UMT5 text encoder", "blocks.0.attn.q.weight"),
    ("umt5", "a T5 text encoder", "encoder.block.0.layer.0.SelfAttention.q.weight"),
    ("clip", "a CLIP image encoder", "visual.cls_embedding"),
    ("clip", "a CLIP image encoder", "vision_model.embeddings.class_embedding"),
    ("clip", "a CLIP model", "text_model.embeddings.token_embedding.weight"),
    ("hunyuan", "a HunyuanVideo transformer", "double_blocks.0.img_attn_qkv.weight"),
    ("hunyuan", "a HunyuanVideo transformer", "context_embedder.token_refiner."),
    ("flux", "a Flux transformer", "double_blocks.0.img_attn.qkv.weight"),
)


@dataclass(frozen=True)
class Family:
    """What a set of tensors is.

    Args:
        kind: one word: "wan" (Wan2.1 text-to-video, the accepted one), "lora", "var", ...
        text: the same for a message, with its article: "a VAR transformer (next-scale images)".
    """

    kind: str
    text: str


def recognise(tensors: Mapping[str, Tensor]) -> Family:
    """Tell what tensors are from their names and shapes. Wrappers' prefixes do not matter."""
    shapes = {strip_name(name): tuple(value.shape) for name, value in tensors.items()}
    if any(mark in name for name in shapes for mark in LORA_MARKS):
        layers = sum(".lora_A" in name or ".lora_down" in name for name in shapes)
        return Family("lora", f"a LoRA ({layers} layers)")
    if any(name.endswith(_QUANTISED) for name in shapes):
        return Family("quantised", "a quantised model (weights with scales beside them)")
    if len(shapes.get("patch_embedding.weight", ())) == 5:
        return _wan_variant(shapes)
    for kind, text, mark in _OTHERS:
        if any(name == mark or (mark[-1] == "." and mark in name) for name in shapes):
            return Family(kind, text + _latents(shapes) if kind == "wan-vae" else text)
    first = ", ".join(sorted(shapes)[:3]) or "nothing"
    return Family("unknown", f"of no known family (it holds {first}, ...)")


def variant(in_channels: int, out_channels: int, image: bool = False) -> Family:
    """Which Wan transformer takes and gives so many channels.

    Args:
        in_channels: latent channels that go in: noise, and what is laid beside it.
        out_channels: latent channels that come out.
        image: it has layers for an image's CLIP features.
    """
    if image or (in_channels, out_channels) == (36, 16):
        return Family(
            "wan-i2v", f"a Wan image-to-video transformer ({in_channels} input channels, img_emb)"
        )
    if (in_channels, out_channels) == (48, 48):
        return Family("wan2.2-5b", "a Wan2.2 5B transformer (48 channels, the Wan2.2 autoencoder)")
    if in_channels != out_channels:
        return Family(
            "wan-other",
            f"a Wan transformer that takes more than noise ({in_channels} channels in, "
            f"{out_channels} out)",
        )
    return Family("wan", "a Wan2.1 text-to-video transformer")


def sizes_of(
    tensors: Mapping[str, Tensor],
    head_dim: int | None = None,
    *,
    text_len: int = 512,
    eps: float = 1e-6,
) -> dict[str, Any]:
    """A Wan transformer's sizes: the keyword arguments of `streamgen.models.wan.WanConfig`.

    Args:
        tensors: name -> tensor (or anything with a `shape`), official names.
        head_dim: width of one head, which the tensors do not show; None: 128, as published.
        text_len: rows of text the model was trained with; not in the tensors either.
        eps: of the norms; the same.

    Raises:
        WeightsError: names the tensors that are missing, or a width that heads do not divide.
    """
    missing = [name for name in _SIZED if name not in tensors]
    if missing:
        raise WeightsError(f"no whole Wan transformer: {', '.join(missing)} missing")
    shape = {name: tuple(tensors[name].shape) for name in _SIZED}
    odd = [name for name, axes in shape.items() if len(axes) != _SIZED[name] or 0 in axes]
    if odd:
        text = ", ".join(f"{name} {list(shape[name])}" for name in odd)
        raise WeightsError(f"no whole Wan transformer: {text} of another shape")
    dim, in_channels, *patch = shape["patch_embedding.weight"]
    width = head_dim or HEAD_DIM
    if dim % width:
        raise WeightsError(
            f"dim {dim} does not divide into heads of {width}; a config.json beside the weights "
            "that gives num_heads is needed"
        )
    kv_heads, heads = shape["blocks.0.self_attn.k.weight"][0] // width, dim // width
    layers = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    places = tensors.get("spatial_embedding")
    return {
        "dim": dim,
        "ffn_dim": shape["blocks.0.ffn.0.weight"][0],
        "num_heads": heads,
        "num_layers": 1 + max(int(layer) for layer in layers if layer.isdigit()),
        "in_channels": in_channels,
        "out_channels": shape["head.head.weight"][0] // math.prod(patch),
        "patch_size": tuple(patch),
        "text_dim": shape["text_embedding.0.weight"][1],
        "text_len": text_len,
        "freq_dim": shape["time_embedding.0.weight"][1],
        "eps": eps,
        "spatial_tokens": 0 if places is None else places.shape[0],
        "num_kv_heads": 0 if kv_heads == heads else kv_heads,
    }


def size_name(sizes: Mapping[str, Any]) -> str:
    """The published size these are, as in "1.3B (dim 1536, 30 layers)"."""
    known = _NAMED_SIZES.get((sizes["dim"], sizes["num_layers"]))
    text = f"dim {sizes['dim']}, {sizes['num_layers']} layers"
    return f"{known} ({text})" if known else text


@dataclass(frozen=True)
class Description:
    """What `describe` found; `str` gives the lines that a person reads.

    Args:
        path: the file, or the index of its shards.
        family: what it is.
        names: "official" or "diffusers" for a Wan transformer, otherwise "".
        sizes: a Wan transformer's sizes (`sizes_of`), otherwise empty.
        dtypes: number of tensors of each type, such as {"bfloat16": 825}.
        tensors: number of tensors.
        values: number of numbers in them.
        num_bytes: bytes that they take.
        entries: what stands at the top of a torch file that nests its tensors.
    """

    path: Path
    family: Family
    names: str
    sizes: Mapping[str, Any]
    dtypes: Mapping[str, int]
    tensors: int
    values: int
    num_bytes: int
    entries: tuple[str, ...]

    def __str__(self) -> str:
        dtypes = ", ".join(self.dtypes)
        lines = [
            f"{self.path}: {self.family.text}",
            f"  {self.tensors} tensors, {self.values / 1e6:,.1f} M values, "
            f"{self.num_bytes / 1e6:,.1f} MB, {dtypes}",
        ]
        if self.names:
            lines.append(f"  names: {self.names}")
        if self.sizes:
            shown = ("num_heads", "ffn_dim", "in_channels", "text_dim", "patch_size")
            rest = ", ".join(f"{key} {self.sizes[key]}" for key in shown)
            lines.append(f"  {size_name(self.sizes)}, {rest}")
        if self.entries:
            lines.append(f"  entries: {', '.join(self.entries)}")
        return "\n".join(lines)


def describe(path: Path | str) -> Description:
    """Tell what a weights file, an index of shards or a folder with either holds.

    Only headers are read; the tensors stay on the disk.

    Raises:
        WeightsError: it can't be read as weights.
    """
    path = Path(path)
    path = find_weights(path) if path.is_dir() else path
    entries = read_entries(path)
    tensors = read_tensors(path, entries=("generator_ema", *ENTRIES))
    family, names, sizes = recognise(tensors), "", {}
    if family.kind == "wan":
        names = "diffusers" if is_diffusers(map(strip_name, tensors)) else "official"
        sizes = _sizes_if_whole(official_names(tensors))
    return Description(
        path=path,
        family=family,
        names=names,
        sizes=sizes,
        dtypes=_dtypes(tensors.values()),
        tensors=len(tensors),
        values=sum(value.numel() for value in tensors.values()),
        num_bytes=sum(value.numel() * value.element_size() for value in tensors.values()),
        entries=entries,
    )


# Tensors that sizes are read from, and how many axes each has.
_SIZED = {
    "patch_embedding.weight": 5,
    "text_embedding.0.weight": 2,
    "time_embedding.0.weight": 2,
    "blocks.0.self_attn.k.weight": 2,
    "blocks.0.ffn.0.weight": 2,
    "head.head.weight": 2,
}


def _sizes_if_whole(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A Wan transformer's sizes, or nothing where a tensor that shows one is missing."""
    dim = tensors["patch_embedding.weight"].shape[0] or 1
    try:
        return sizes_of(tensors, HEAD_DIM if dim % HEAD_DIM == 0 else dim)
    except WeightsError:
        return {}


def _wan_variant(shapes: Mapping[str, tuple[int, ...]]) -> Family:
    """Which of Wan's relatives has this patch embedding."""
    for kind, text, mark in _WAN_VARIANTS:
        if any(mark in name for name in shapes):
            return Family(kind, text)
    image = any(
        piece in name for name in shapes for piece in ("img_emb.", "image_embedder.", ".k_img.")
    )
    patch = shapes["patch_embedding.weight"]
    head = shapes.get("head.head.weight", shapes.get("proj_out.weight"))
    out = head[0] // math.prod(patch[2:]) if head and math.prod(patch[2:]) else patch[1]
    return variant(patch[1], out, image)


def _latents(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The latent channels of a Wan autoencoder, which tell 2.1 (16) from 2.2 (48)."""
    shape = shapes.get("conv2.weight") or shapes.get("post_quant_conv.weight")
    return f" ({shape[0]} latent channels)" if shape else ""


def _dtypes(tensors: Iterable[Tensor]) -> dict[str, int]:
    counts = Counter(str(value.dtype).removeprefix("torch.") for value in tensors)
    return dict(counts.most_common())
