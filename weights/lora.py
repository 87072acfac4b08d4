"""LoRA adapters: read them and merge them into the weights they were trained on.

A LoRA gives a layer W `[O, I]` two factors, down A `[R, I]` and up B `[O, R]`, and stands for
W + (alpha / R) B A (Hu et al. 2021, section 4). LongLive's `lora.pt` is one in PEFT's names with
R = alpha = 256, under the key "generator_lora".

Axes: O outputs, I inputs, R rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from streamgen.errors import WeightsError
from streamgen.weights.families import recognise
from streamgen.weights.keymaps import is_diffusers, strip_name, to_official
from streamgen.weights.load import find_weights, read_metadata, read_tensors

ENTRIES = ("generator_lora", "lora", "state_dict", "model", "generator")
"""Where torch files keep an adapter's tensors, the preferred first."""

CONFIG = "adapter_config.json"
"""Name of the file beside an adapter that gives its rank and alpha (PEFT)."""

_KEY = re.compile(r"(?P<layer>.+)\.lora_(?P<side>A|B|down|up)(\.(?P<adapter>[^.]+))?\.weight")
_LEADING = ("base_model.", "model.", "diffusion_model.", "transformer.", "module.", "net.")
_SHOWN = 4


@dataclass(frozen=True)
class LoraLayer:
    """One layer's factors; the layer's weight grows by `scale * up @ down`."""

    down_RI: Tensor
    up_OR: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Width between the two factors."""
        return self.down_RI.shape[0]


@dataclass(frozen=True)
class Lora:
    """An adapter: official layer name ("blocks.0.self_attn.q") -> its factors."""

    path: Path
    layers: Mapping[str, LoraLayer]

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max(layer.rank for layer in self.layers.values())


def read_lora(path: Path | str, alpha: float | None = None) -> Lora:
    """Read an adapter in PEFT's names (`lora_A`, `lora_B`) or the older ones (`lora_down`, `_up`).

    Args:
        path: a `.safetensors` or torch file, or a folder with `adapter_model.safetensors`.
        alpha: numerator of the scale alpha / rank. None: what the file says for a layer
            (`<layer>.alpha`), else `adapter_config.json` beside it, else its metadata, else the
            rank, which makes the scale 1 (LongLive: 256 / 256).

    Raises:
        WeightsError: no LoRA, a layer without one of its factors, or an adapter of another form.
    """
    path = Path(path)
    path = find_weights(path) if path.is_dir() else path
    tensors = read_tensors(path, entries=ENTRIES)
    family = recognise(tensors)
    if family.kind != "lora":
        raise WeightsError(f"{path}: is {family.text} and no LoRA; give it as the checkpoint")
    config = _config_of(path)
    factors, alphas = _sort(tensors, path)
    layers = {}
    for name, sides in factors.items():
        absent = {"down", "up"} - sides.keys()
        if absent:
            raise WeightsError(f"{path}: layer {name} has no {absent.pop()} factor")
        rank = sides["down"].shape[0]
        if sides["up"].shape[1] != rank or not rank:
            raise WeightsError(
                f"{path}: layer {name}: the factors {list(sides['down'].shape)} and "
                f"{list(sides['up'].shape)} have no common rank"
            )
        said = alphas.get(name) if alpha is None else alpha
        layers[name] = LoraLayer(
            sides["down"], sides["up"], config.scale(name, rank) if said is None else said / rank
        )
    return Lora(path, layers)


def merge_lora(
    tensors: Mapping[str, Tensor], lora: Lora, strength: float = 1.0
) -> dict[str, Tensor]:
    """The weights with an adapter added: computed in float32, given back in their own type.

    Tensors that the adapter does not change are the same objects; the others are new, made one at
    a time, so a mapped file is not copied as a whole.

    Args:
        tensors: name -> tensor, official names.
        lora: the adapter.
        strength: 1 as trained, 0 leaves the values as they are.

    Raises:
        WeightsError: names the layers that the weights lack or that have another shape.
    """
    _check(tensors, lora)
    merged = dict(tensors)
    for name, layer in lora.layers.items():
        weight = tensors[f"{name}.weight"]
        delta = layer.up_OR.float().flatten(1) @ layer.down_RI.float().flatten(1)
        delta = delta.mul_(strength * layer.scale).view(weight.shape)
        merged[f"{name}.weight"] = delta.add_(weight.float()).to(weight.dtype)
    return merged


@dataclass(frozen=True)
class _Config:
    """What is said about an adapter outside its tensors."""

    source: str = ""
    alpha: float | None = None
    rank: int | None = None
    alpha_pattern: Mapping[re.Pattern[str], float] = field(default_factory=dict)
    own_ranks: bool = False
    rslora: bool = False

    def scale(self, layer: str, rank: int) -> float:
        """alpha / rank of a layer, or alpha / sqrt(rank) where rank-stabilised."""
        if self.rank not in (None, rank) and not self.own_ranks:
            raise WeightsError(
                f"{self.source} says rank {self.rank}, but layer {layer} has rank {rank}: they do "
                "not belong together"
            )
        alpha = rank if self.alpha is None else self.alpha
        for pattern, value in self.alpha_pattern.items():
            if pattern.fullmatch(layer):
                alpha = value
        return alpha / rank**0.5 if self.rslora else alpha / rank


def _config_of(path: Path) -> _Config:
    """From `adapter_config.json` beside a file, or else the file's own metadata."""
    beside = path.with_name(CONFIG)
    if beside.is_file():
        try:
            return _parse(str(beside), json.loads(beside.read_text(encoding="utf-8")))
        except (ValueError, TypeError, AttributeError, re.error) as error:
            raise WeightsError(f"{beside}: is no adapter config ({error})") from error
    if path.suffix != ".safetensors":
        return _Config()
    said: dict[str, Any] = dict(read_metadata(path))
    try:
        # Diffusers writes PEFT's config as JSON text, each field behind the component's name.
        inner = json.loads(said.get("lora_adapter_metadata", "{}"))
        said.update({key.rpartition(".")[2]: value for key, value in inner.items()})
        if "ss_network_alpha" in said:
            said.setdefault("lora_alpha", said["ss_network_alpha"])
        return _parse(f"{path} (metadata)", said)
    except (ValueError, TypeError, AttributeError, re.error) as error:
        raise WeightsError(f"{path}: its metadata can't be read ({error})") from error


def _parse(source: str, said: Mapping[str, Any]) -> _Config:
    for key in ("use_dora", "fan_in_fan_out"):
        if said.get(key) in (True, "true", "True"):
            raise WeightsError(f"{source}: {key} is not supported; accepted is plain LoRA")
    alpha, rank = said.get("lora_alpha", said.get("alpha")), said.get("r", said.get("rank"))
    return _Config(
        source=source,
        alpha=None if alpha is None else float(alpha),
        rank=None if rank is None else int(rank),
        alpha_pattern={
            re.compile(rf"(.*\.)?({pattern})"): float(value)
            for pattern, value in (said.get("alpha_pattern") or {}).items()
        },
        own_ranks=bool(said.get("rank_pattern")),
        rslora=said.get("use_rslora") in (True, "true", "True"),
    )


def _sort(
    tensors: Mapping[str, Tensor], path: Path
) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
    """Official layer name -> {"down": ..., "up": ...}, and the alphas that layers bring along."""
    factors: dict[str, dict[str, Tensor]] = {}
    alphas: dict[str, float] = {}
    adapters, unknown = set(), []
    diffusers = is_diffusers(map(_strip, tensors))
    for key, value in tensors.items():
        match = _KEY.fullmatch(_strip(key))
        if value.ndim < 2 if match else not key.endswith(".alpha") or value.numel() != 1:
            unknown.append(key)
            continue
        layer = match["layer"] if match else _strip(key).removesuffix(".alpha")
        layer = to_official(layer) if diffusers else layer
        if match is None:
            alphas[layer] = float(value)
            continue
        adapters.add(match["adapter"] or "default")
        side = "down" if match["side"] in ("A", "down") else "up"
        if side in factors.setdefault(layer, {}):
            raise WeightsError(f"{path}: {key!r}: layer {layer} has that factor twice")
        factors[layer][side] = value
    if unknown:
        raise WeightsError(f"{path}: no plain LoRA; {_some('not understood', unknown)}")
    if len(adapters) > 1:
        raise WeightsError(f"{path}: holds several adapters ({', '.join(sorted(adapters))})")
    return factors, alphas


def _strip(key: str) -> str:
    """A key without what PEFT, diffusers and training wrappers put before the model's own name."""
    key = strip_name(key)
    while key.startswith(_LEADING):
        key = strip_name(key.split(".", 1)[1])
    return key


def _check(tensors: Mapping[str, Tensor], lora: Lora) -> None:
    absent = [name for name in lora.layers if f"{name}.weight" not in tensors]
    misfits = []
    for name, layer in lora.layers.items():
        weight = tensors.get(f"{name}.weight")
        want = (layer.up_OR.shape[0], *layer.down_RI.shape[1:])
        if weight is not None and tuple(weight.shape) != want:
            misfits.append(f"{name} (weights {list(weight.shape)}, LoRA {list(want)})")
    problems = [
        _some("layers that the weights lack", absent),
        _some("of another shape", misfits),
    ]
    if any(problems):
        text = "; ".join(filter(None, problems))
        raise WeightsError(f"{lora.path}: the LoRA does not fit these weights: {text}")


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"
