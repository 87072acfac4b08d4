"""A Wan2.1 folder and the checkpoints that replace its transformer: where everything lies.

Two layouts are published. Diffusers': `model_index.json` and a folder for each part. The original:
the transformer's `diffusion_pytorch_model.safetensors` and `config.json` at the top, beside
`Wan2.1_VAE.pth`, `models_t5_umt5-xxl-enc-bf16.pth` and the tokenizer's folder. Self-Forcing,
CausVid and LongLive publish a transformer alone, under the official names inside wrappers.

The tensors are mapped from the files and renamed: nothing is read until a model uses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from streamgen.errors import WeightsError
from streamgen.weights.families import (
    ENTRIES,
    HEAD_DIM,
    Family,
    recognise,
    size_name,
    sizes_of,
    variant,
)
from streamgen.weights.keymaps import official_names
from streamgen.weights.load import STEMS, find_weights, read_tensors
from streamgen.weights.lora import merge_lora, read_lora
from streamgen.weights.registry import MANIFEST

ACCEPTED = "accepted is a Wan2.1 text-to-video transformer, under official or diffusers' names"
"""End of a message about weights of another family."""

PARTS = {
    "diffusers": {"vae": "vae", "text": "text_encoder", "tokenizer": "tokenizer"},
    "original": {
        "vae": "Wan2.1_VAE.pth",
        "text": "models_t5_umt5-xxl-enc-bf16.pth",
        "tokenizer": "google/umt5-xxl",
    },
}
"""Where each layout keeps what is not the transformer."""

_MODEL_INDEX = "model_index.json"
# Name of a size here -> its name in the original config.json and in diffusers'.
_CONFIG_KEYS = {
    "dim": ("dim",),
    "ffn_dim": ("ffn_dim",),
    "num_heads": ("num_heads", "num_attention_heads"),
    "num_layers": ("num_layers",),
    "in_channels": ("in_dim", "in_channels"),
    "out_channels": ("out_dim", "out_channels"),
    "patch_size": ("patch_size",),
    "text_dim": ("text_dim",),
    "text_len": ("text_len",),
    "freq_dim": ("freq_dim",),
    "eps": ("eps",),
}
# What a config.json that leaves a size out means (Wan2.1's own defaults).
_DEFAULTS: Mapping[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": (1, 2, 2),
    "text_dim": 4096,
    "text_len": 512,
    "freq_dim": 256,
    "eps": 1e-6,
    "spatial_tokens": 0,
    "num_kv_heads": 0,
}
_UNSEEN = ("text_len", "eps")  # sizes that tensors do not show


@dataclass(frozen=True)
class WanBase:
    """A Wan2.1 folder: which parts it has and how large its transformer is.

    Args:
        folder: the folder.
        layout: "diffusers" or "original".
        transformer: its safetensors file or index; None where there is none.
        sizes: the transformer's sizes, as keyword arguments of `streamgen.models.wan.WanConfig`;
            None where neither a config.json nor a transformer is there.
        assumed: which of the sizes are Wan2.1's defaults, because config.json leaves them out.
        vae: folder (diffusers) or file (original) of the video autoencoder, or None.
        text: folder or file of the text encoder, or None.
        tokenizer: folder of the tokenizer, or None.
    """

    folder: Path
    layout: str
    transformer: Path | None
    sizes: Mapping[str, Any] | None
    vae: Path | None
    text: Path | None
    tokenizer: Path | None
    assumed: frozenset[str] = frozenset()

    def part(self, name: str) -> Path:
        """The path of "transformer", "vae", "text" or "tokenizer".

        Raises:
            WeightsError: the folder lacks it; says what was looked for.
        """
        path: Path | None = getattr(self, name)
        if path is not None:
            return path
        if name == "transformer":  # its own message tells shards from nothing at all
            return find_weights(self.folder / "transformer" if self.is_diffusers else self.folder)
        wanted = PARTS[self.layout][name]
        raise WeightsError(
            f"{self.folder}: lacks its {name} part; looked for {wanted} ({self.layout} layout)"
        )

    @property
    def is_diffusers(self) -> bool:
        """Whether the folder has a sub-folder for each part."""
        return self.layout == "diffusers"


def open_base(folder: Path | str) -> WanBase:
    """Find the parts of a Wan2.1 folder in either layout. Reads its config.json, no tensors.

    Raises:
        WeightsError: no Wan folder, one of another family (named), or parts that do not fit.
    """
    folder = Path(folder).expanduser()
    layout = _layout(folder)
    home = folder / "transformer" if layout == "diffusers" else folder
    config = _read_json(home / "config.json")
    _check_family(folder, home, config)
    paths = {name: folder / place for name, place in PARTS[layout].items()}
    found = {name: path if path.exists() else None for name, path in paths.items()}
    try:
        weights = find_weights(home)
    except WeightsError:  # a checkpoint may replace it; `part` says what is wrong
        weights = None
    stated = _config_sizes(config, home / "config.json")
    sizes: dict[str, Any] | None = {**_DEFAULTS, **stated} if stated else None
    if sizes is None and weights is not None:
        sizes = _sizes(_transformer(weights, prefer_ema=False), weights, None)
    assumed = frozenset(_DEFAULTS.keys() - stated.keys()) if stated else frozenset()
    base = WanBase(folder, layout, weights, sizes, assumed=assumed, **found)
    _check_autoencoder(base)
    return base


def read_transformer(
    base: WanBase | Path | str | None,
    checkpoint: Path | str | None = None,
    lora: Path | str | None = None,
    prefer_ema: bool = True,
    lora_alpha: float | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The transformer's weights under official names, and its sizes.

    Args:
        base: a Wan folder, or what `open_base` made of one; None: the checkpoint alone.
        checkpoint: weights in place of the base's: a torch or safetensors file, an index of
            shards, or a folder with either; wrapped, nested, official or diffusers' names.
        lora: an adapter that is merged in (`streamgen.weights.lora.read_lora`).
        prefer_ema: take the averaged weights where a file has both.
        lora_alpha: see `read_lora`.

    Returns:
        Tensors on the CPU in the types of the file, mapped from it (those that a LoRA changes are
        new); and the keyword arguments of `streamgen.models.wan.WanConfig`.

    Raises:
        WeightsError: files missing or damaged, another family, or another size than the base's.
    """
    if base is not None and not isinstance(base, WanBase):
        base = open_base(base)
    if checkpoint is not None:
        path = _weights_path(checkpoint)
    elif base is not None:
        path = base.part("transformer")
    else:
        raise WeightsError("neither a base folder nor a checkpoint to read a transformer from")
    tensors = _transformer(path, prefer_ema)
    sizes = _sizes(tensors, path, base)
    if lora is not None:
        tensors = merge_lora(tensors, read_lora(lora, lora_alpha))
    return tensors, sizes


def _weights_path(path: Path | str) -> Path:
    path = Path(path).expanduser()
    if not path.is_dir():
        return path
    inner = path / "transformer"
    return find_weights(inner if inner.is_dir() else path)


def _transformer(path: Path, prefer_ema: bool) -> dict[str, Tensor]:
    """The official names and tensors of a file, which must be a Wan text-to-video transformer."""
    tensors = read_tensors(path, entries=("generator_ema", *ENTRIES) if prefer_ema else ENTRIES)
    family = recognise(tensors)
    if family.kind != "wan":
        raise WeightsError(f"{path}: is {family.text}; {_advice(family)}")
    return official_names(tensors)


def _advice(family: Family) -> str:
    if family.kind == "lora":
        return "give it as the LoRA, and the weights it was trained on as the checkpoint"
    return ACCEPTED


def _sizes(tensors: Mapping[str, Tensor], path: Path, base: WanBase | None) -> dict[str, Any]:
    """Sizes of a transformer's tensors; those that tensors do not show come from the base."""
    said = (base.sizes if base is not None else None) or {}
    unseen = {key: said[key] for key in _UNSEEN if key in said}
    head_dim = said["dim"] // said["num_heads"] if said else None
    dim = tensors["patch_embedding.weight"].shape[0]
    try:
        fits = head_dim is None or dim % head_dim == 0
        sizes = sizes_of(tensors, head_dim if fits else dim, **unseen)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error
    if base is None:
        return sizes
    told = said.keys() - base.assumed - set(_UNSEEN)
    other = [key for key in sizes if key in told and sizes[key] != said[key]]
    if other:
        texts = ", ".join(f"{key} {sizes[key]} and not {said[key]}" for key in other[:4])
        raise WeightsError(
            f"{path}: is a Wan transformer of {size_name(sizes)}, but {base.folder} is one of "
            f"{size_name(said)}; they must be of one size (here {texts})"
        )
    return sizes


def _layout(folder: Path) -> str:
    """Which layout a folder has."""
    if not folder.is_dir():
        kind = "is a file; give it as the checkpoint" if folder.is_file() else "no such folder"
        raise WeightsError(f"{folder}: {kind}; a base is a Wan2.1 folder ({_LAYOUTS})")
    if (folder / _MODEL_INDEX).is_file() or (folder / "transformer").is_dir():
        return "diffusers"
    if (folder / "high_noise_model").is_dir():
        raise WeightsError(f"{folder}: is {_A14B}; {ACCEPTED}")
    if (folder / "Wan2.2_VAE.pth").is_file():
        raise WeightsError(f"{folder}: is {variant(48, 48).text}; {ACCEPTED}")
    places = PARTS["original"].values()
    if (folder / "config.json").is_file() or any((folder / place).exists() for place in places):
        return "original"
    if any(folder.glob(f"{STEMS[0]}*.safetensors*")):
        return "original"
    names = sorted(path.name for path in folder.iterdir())[:4]
    kind = f"a packaged model folder ({MANIFEST})" if MANIFEST in names else "no Wan2.1 folder"
    raise WeightsError(
        f"{folder}: is {kind}; it holds {', '.join(names) or 'nothing'}; accepted: {_LAYOUTS}"
    )


_LAYOUTS = (
    f"diffusers' layout with {_MODEL_INDEX}, transformer/, vae/, text_encoder/, tokenizer/, or "
    "the original with diffusion_pytorch_model.safetensors, config.json, Wan2.1_VAE.pth"
)
_A14B = "Wan2.2 A14B (two transformers, for high and low noise)"


def _check_family(folder: Path, home: Path, config: Mapping[str, Any]) -> None:
    """Raise if the config files name another family than Wan2.1 text-to-video."""
    index = _read_json(folder / _MODEL_INDEX)
    pipeline = str(index.get("_class_name", "WanPipeline"))
    if not pipeline.startswith(("Wan", "Causal")):
        raise WeightsError(f"{folder}: is a {pipeline} folder; {ACCEPTED}")
    second = index.get("transformer_2")
    if isinstance(second, list) and second and second[0] is not None:
        raise WeightsError(f"{folder}: is {_A14B}; {ACCEPTED}")
    name = str(config.get("_class_name", ""))
    family = None
    if config.get("model_type") == "vace" or "VACE" in name or "Vace" in name:
        family = Family("wan-vace", "a Wan VACE transformer")
    elif "action_config" in config:
        family = Family("matrix-game", "a Matrix-Game transformer (action modules)")
    elif name and "Wan" not in name:
        family = Family("unknown", f"a {name}")
    elif config:
        image = config.get("image_dim") is not None or config.get("model_type") in ("i2v", "flf2v")
        sizes = {**_DEFAULTS, **_config_sizes(config, home / "config.json")}
        family = variant(sizes["in_channels"], sizes["out_channels"], image)
    if family is not None and family.kind != "wan":
        raise WeightsError(f"{folder}: is {family.text}; {ACCEPTED}")


def _check_autoencoder(base: WanBase) -> None:
    """Raise if the autoencoder's config has other latent channels than the transformer."""
    if base.vae is None or base.sizes is None or not base.is_diffusers:
        return
    channels = _read_json(base.vae / "config.json").get("z_dim", base.sizes["out_channels"])
    if channels != base.sizes["out_channels"]:
        raise WeightsError(
            f"{base.vae}: an autoencoder of {channels} latent channels, but the transformer has "
            f"{base.sizes['out_channels']}; accepted is the Wan2.1 autoencoder (16)"
        )


def _config_sizes(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The sizes a config.json states, under our names; nothing if it is none of a transformer.

    Raises:
        WeightsError: one of them is no size.
    """
    stated = {ours: _first(config, keys) for ours, keys in _CONFIG_KEYS.items()}
    stated["head_dim"] = config.get("attention_head_dim")
    said: dict[str, Any] = {key: value for key, value in stated.items() if value is not None}
    wrong = [f"{key} {value!r}" for key, value in said.items() if not _is_size(key, value)]
    if wrong:
        raise WeightsError(f"{path}: no sizes of a transformer: {', '.join(wrong)}")
    head_dim = said.pop("head_dim", HEAD_DIM)
    if "num_heads" in said:
        said.setdefault("dim", said["num_heads"] * head_dim)
    if not {"dim", "ffn_dim", "num_layers"} <= said.keys():
        return {}
    said.setdefault("num_heads", max(said["dim"] // HEAD_DIM, 1))
    if said["dim"] % said["num_heads"]:
        raise WeightsError(
            f"{path}: dim {said['dim']} does not divide into {said['num_heads']} heads"
        )
    return said | ({"patch_size": tuple(said["patch_size"])} if "patch_size" in said else {})


def _first(config: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """The value of the first key that a config gives, or None."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _is_size(key: str, value: Any) -> bool:
    """Whether a value of config.json can be the size of that name."""
    if key == "patch_size":
        return isinstance(value, list) and len(value) == 3 and all(_is_size("", n) for n in value)
    kinds: Any = float if key == "eps" else int
    return isinstance(value, kinds) and not isinstance(value, bool) and value > 0


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(loaded, dict):
        raise WeightsError(f"{path}: holds no JSON object; download it again")
    return loaded
