"""The folder of a packaged streaming model: one form for worlds and videos.

config.json               kind, stream (`world` or `video`), transformer
transformer.safetensors   `WanModel`
text.safetensors          `WordEncoder`
vae/                      a diffusers autoencoder with latent_stats.json (`FrameCodec`)
model.json                every file's checksum (`streamgen.weights.registry`)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from streamgen.engine import Engine, StreamConfig
from streamgen.errors import InvalidRequest, WeightsError
from streamgen.models.text import WordEncoder
from streamgen.models.vae import FrameCodec
from streamgen.models.wan import WanConfig, WanModel
from streamgen.sampling.schedule import FewStep
from streamgen.weights import registry
from streamgen.weights.load import load_into, read_tensors

Config = TypeVar("Config", bound=StreamConfig)
USES = {
    "world": "`streamgen play` and WorldPipeline",
    "video": "`streamgen generate` and CausalVideoPipeline",
    "image": "`streamgen image` and NextScalePipeline",
}
"""What each kind of model is for."""


def load(
    folder: Path,
    kind: str,
    config_class: type[Config],
    changes: Mapping[str, Any],
) -> tuple[WanModel, WordEncoder, FrameCodec, Config]:
    """The parts of a packaged model, on the CPU in float32, and its config.

    Args:
        folder: of the model; its checksums are compared if it has any.
        kind: "world" or "video".
        config_class: of that kind.
        changes: settings to be other than the config's; None = as there.

    Raises:
        WeightsError: files missing, damaged or of other shapes.
        InvalidRequest: a model of another kind, or a value that is not accepted.
    """
    if (folder / registry.MANIFEST).exists():
        registry.verify(folder)
    raw = read_config(folder, kind)
    try:
        given = {name: value for name, value in changes.items() if value is not None}
        config = replace(_stream_config(config_class, raw[kind]), **given)
        shape = WanConfig(**raw["transformer"])
        with torch.device("meta"):  # no random start for weights that are read anyway
            dit = WanModel(shape).to_empty(device="cpu")
            text = WordEncoder(config.vocabulary, shape.text_dim, config.max_words)
            text.to_empty(device="cpu")
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"config.json of {folder.name!r} does not fit: {error}") from error
    keys = config.action(frozenset()).numel()
    if keys != shape.action_dim:
        raise WeightsError(
            f"config.json of {folder.name!r} names {keys} keys for a transformer that takes "
            f"actions of width {shape.action_dim}"
        )
    load_into(dit, read_tensors(folder / "transformer.safetensors"))
    load_into(text, read_tensors(folder / "text.safetensors"))
    codec = FrameCodec.from_folder(folder / "vae")
    for part in (dit, text, codec):
        part.eval().requires_grad_(False)
    return dit, text, codec, config


def read_config(folder: Path, kind: str) -> dict[str, Any]:
    """The `config.json` of a model of a kind.

    Raises:
        WeightsError: it can't be read.
        InvalidRequest: the model is of another kind; the message says what that one is for.
    """
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"config.json of {folder.name!r} can't be read: {error}") from error
    found = raw.get("kind") if isinstance(raw, dict) else None
    if found != kind:
        its_use = f", for {USES[found]}" if found in USES else ""
        article = "an" if kind[0] in "aeiou" else "a"
        raise InvalidRequest(
            f"{folder.name!r} is not {article} {kind} "
            f"(its config.json says kind {found!r}{its_use})"
        )
    return dict(raw)


def save(engine: Engine, folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the folder that `load` reads, without its checksums; weights in `dtype`."""
    text, codec = engine.text, engine.codec
    if not isinstance(text, WordEncoder) or not isinstance(codec, FrameCodec):
        raise InvalidRequest(
            f"a model with {type(text).__name__} and {type(codec).__name__} has a folder already: "
            "only models with a WordEncoder and a FrameCodec are written"
        )
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "kind": kind,
        kind: asdict(engine.config),
        "transformer": asdict(engine.dit.config),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name, part in (("transformer", engine.dit), ("text", text)):
        tensors = {k: v.to(dtype).contiguous() for k, v in part.state_dict().items()}
        save_file(tensors, folder / f"{name}.safetensors")
    vae: Any = codec.vae
    vae.save_config(folder / "vae")
    described = json.loads((folder / "vae" / "config.json").read_text())
    described.pop("_name_or_path", None)  # where it lay on the machine that made it
    (folder / "vae" / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    tensors = {
        k: (v.to(dtype) if v.is_floating_point() else v).contiguous()
        for k, v in vae.state_dict().items()
    }
    save_file(tensors, folder / "vae" / "diffusion_pytorch_model.safetensors")
    stats = {k: getattr(codec, k).flatten().tolist() for k in ("mean", "std")}
    (folder / "vae" / "latent_stats.json").write_text(json.dumps(stats) + "\n")


def _stream_config(config_class: type[Config], raw: Mapping[str, Any]) -> Config:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    for name in ("schedule", "first_schedule"):
        values[name] = FewStep(**values[name])
    if "opposites" in values:
        values["opposites"] = tuple(tuple(pair) for pair in values["opposites"])
    return config_class(**values)
