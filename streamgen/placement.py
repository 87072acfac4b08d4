"""Which component lives on which device, what waits on the CPU, and which weights have 8 bits.

A video pipeline has three components: the transformer, the text encoder and the autoencoder. `plan`
says where each goes and refuses what the machine can't do, before any weights are read; the
`place_*` functions then do it.

Offloaded weights stay on the CPU and each layer's go to the device for its own forward only
(accelerate's hooks), so a 5.7-billion-weight text encoder needs no more of the device than its
largest layer, also while the K/V pool fills the rest.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from accelerate.hooks import (  # type: ignore[import-untyped]
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from torch import Tensor, nn

from streamgen.device import pick_device, pick_dtype
from streamgen.errors import InvalidRequest, MissingExtra

COMPONENTS = ("transformer", "text", "vae")
"""What a device map may place."""

OFFLOADS = (None, "text", "all")
"""Whose weights wait on the CPU: nobody's, the text encoder's, or the transformer's as well."""

QUANTIZES = (None, "fp8")
"""How the transformer's weights are stored."""

_FP8_CAPABILITY = (8, 9)  # the first NVIDIA generation that multiplies float8 (Ada)
_FP8_MULTIPLE = 16  # scaled float8 products want both sizes of a weight divisible by it
_HEADROOM = 0.15  # of a device's free memory that "auto" leaves to activations

DeviceMap = str | Mapping[str, str | torch.device] | None


@dataclass(frozen=True)
class Placement:
    """Where the components of a pipeline run.

    Args:
        transformer, text, vae: the device each runs on, wherever its weights wait.
        dtype: compute type of the transformer.
        offload: None, "text" or "all" (`OFFLOADS`).
        quantize: None or "fp8" (`QUANTIZES`).
    """

    transformer: torch.device
    text: torch.device
    vae: torch.device
    dtype: torch.dtype
    offload: str | None = None
    quantize: str | None = None

    def describe(self) -> str:
        """One line for a log or a progress bar."""
        streamed = ", weights streamed from the CPU"
        dtype = str(self.dtype).removeprefix("torch.")
        weights = ", fp8 weights" if self.quantize else ""
        return (
            f"transformer on {self.transformer} in {dtype}{weights}"
            f"{streamed if self.offload == 'all' else ''}; "
            f"text on {self.text}{streamed if self.offload else ''}; vae on {self.vae}"
        )


def plan(
    device: str | torch.device = "auto",
    device_map: DeviceMap = None,
    offload: str | None = None,
    quantize: str | None = None,
    dtype: str | torch.dtype = "auto",
    sizes: Mapping[str, int] | None = None,
) -> Placement:
    """Decide where each component goes. Nothing is read, moved or imported.

    Args:
        device: where components go that `device_map` does not name (`pick_device`).
        device_map: None for all on `device`; a mapping from names of `COMPONENTS` to devices; or
            "auto": the transformer on `device`, the others on a second GPU where there is one, and
            what does not fit offloaded.
        offload: see `OFFLOADS`.
        quantize: see `QUANTIZES`.
        dtype: of the transformer (`pick_dtype`).
        sizes: bytes of each component, for "auto"; count the K/V pool to the transformer.

    Raises:
        InvalidRequest: a value that is not accepted, or fp8 on hardware that can't multiply it.
        MissingExtra: fp8 without torchao.
    """
    if offload not in OFFLOADS:
        raise InvalidRequest(f"offload {offload!r}: accepted are None, 'text', 'all'")
    if quantize not in QUANTIZES:
        raise InvalidRequest(f"quantize {quantize!r}: accepted are None, 'fp8'")
    home = pick_device(device)
    if device_map == "auto":
        where, offload = _fit(home, offload, quantize, sizes or {})
    else:
        where = _explicit(home, device_map)
    kind = pick_dtype(dtype, where["transformer"])
    placement = Placement(**where, dtype=kind, offload=offload, quantize=quantize)
    if quantize == "fp8":
        _check_fp8(placement)
    return placement


def _explicit(home: torch.device, device_map: DeviceMap) -> dict[str, torch.device]:
    """Every component's device, from a mapping or for no map."""
    if device_map is None:
        device_map = {}
    if not isinstance(device_map, Mapping):
        raise InvalidRequest(
            f"device_map {device_map!r}: accepted are None, 'auto', or devices by name, such as "
            "{'transformer': 'cuda:0', 'text': 'cpu', 'vae': 'cuda:0'}"
        )
    unknown = sorted(map(str, set(device_map) - set(COMPONENTS)))
    if unknown:
        raise InvalidRequest(
            f"device_map names {', '.join(unknown)}: accepted are {', '.join(COMPONENTS)}"
        )
    return {name: pick_device(device_map.get(name, home)) for name in COMPONENTS}


def _fit(
    home: torch.device, offload: str | None, quantize: str | None, sizes: Mapping[str, int]
) -> tuple[dict[str, torch.device], str | None]:
    """Devices by free memory, and what has to be offloaded for it."""
    if home.type != "cuda":
        return dict.fromkeys(COMPONENTS, home), offload
    home = torch.device("cuda", home.index or 0)
    others = [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != home.index]
    room = {d: (1 - _HEADROOM) * torch.cuda.mem_get_info(d)[0] for d in (home, *others)}

    def take(name: str, devices: Sequence[torch.device]) -> torch.device | None:
        size = sizes.get(name, 0) // (2 if name == "transformer" and quantize else 1)
        found = next((device for device in devices if size <= room[device]), None)
        if found is not None:
            room[found] -= size
        return found

    if offload != "all" and take("transformer", [home]) is None:
        offload = "all"
    where = {"transformer": home, "text": home}
    where["vae"] = take("vae", [*others, home]) or torch.device("cpu")
    if offload is None:
        text = take("text", [*others, home])
        where["text"], offload = (text, None) if text is not None else (home, "text")
    return where, offload


def _check_fp8(placement: Placement) -> None:
    device, need = placement.transformer, ".".join(map(str, _FP8_CAPABILITY))
    if device.type != "cuda":
        raise InvalidRequest(
            f"quantize 'fp8' needs a CUDA device of compute capability {need} or newer; the "
            f"transformer is on {device}"
        )
    have = torch.cuda.get_device_capability(device)
    if have < _FP8_CAPABILITY:
        raise InvalidRequest(
            f"quantize 'fp8' needs compute capability {need} or newer; {device} has "
            f"{'.'.join(map(str, have))}"
        )
    if placement.offload == "all":
        raise InvalidRequest("quantize 'fp8' goes with offload None or 'text', not with 'all'")
    if placement.dtype != torch.bfloat16:
        dtype = str(placement.dtype).removeprefix("torch.")
        raise InvalidRequest(f"quantize 'fp8' needs dtype bfloat16, not {dtype}")
    if importlib.util.find_spec("torchao") is None:
        raise MissingExtra("quantize 'fp8' needs torchao: pip install streamgen[fp8]")


def place_transformer(dit: nn.Module, placement: Placement) -> nn.Module:
    """Put the transformer where the plan says, in place.

    Args:
        dit: on the CPU, in `placement.dtype`.
        placement: the plan.

    Raises:
        InvalidRequest, MissingExtra: it can't be quantized (`quantize_fp8`).
    """
    if placement.quantize == "fp8":
        quantize_fp8(dit, placement.transformer)
    if placement.offload == "all":
        return stream_weights(dit, placement.transformer)
    return dit.to(placement.transformer)


class Movable(Protocol):
    """A text encoder that may not be loaded yet (`streamgen.models.umt5`)."""

    def to(self, device: torch.device, stream: bool = False) -> Any:
        """Run on a device; `stream` leaves the weights on the CPU between forwards."""
        ...


TextT = TypeVar("TextT", bound=Movable | nn.Module)


def place_text(text: TextT, placement: Placement) -> TextT:
    """Put the text encoder where the plan says, in place; a plain module is never offloaded."""
    if isinstance(text, nn.Module):
        text.to(placement.text)
    else:
        text.to(placement.text, stream=placement.offload is not None)
    return text


def place_vae(codec: nn.Module, placement: Placement) -> nn.Module:
    """Put the autoencoder where the plan says, in place."""
    return codec.to(placement.vae)


def stream_weights(module: nn.Module, device: str | torch.device) -> nn.Module:
    """Keep a module's weights on the CPU and take each layer's to `device` for its forward.

    The hooks sit on the layers that own weights, so a method that calls layers without the
    module's own forward (`WanModel.encode_prompt`) works as well. Between forwards every parameter
    is the one on the CPU, so `state_dict` and `dtype` answer as ever. For inference: gradients do
    not reach the weights.

    Args:
        module: changed in place; arguments that are no tensors and have no `to` pass untouched.
        device: where it computes. An embedding looks up its rows on the CPU, where its table is.
    """
    device = torch.device(device)
    unstream(module).to("cpu")
    if device.type == "cuda":
        _pin(module)
    for part in module.modules():
        if part._parameters or part._buffers:
            add_hook_to_module(part, _Streamed(device))
    return module


def unstream(module: nn.Module) -> nn.Module:
    """Take the hooks of `stream_weights` off; the weights are on the CPU."""
    for part in module.modules():
        if isinstance(getattr(part, "_hf_hook", None), _Streamed):
            remove_hook_from_module(part)
            part.__dict__.pop("forward", None)  # the class's own again
    return module


class _Streamed(ModelHook):  # type: ignore[misc]
    """A layer's own weights are on a device during its forward, and on the CPU else.

    accelerate's own offload hook empties the device's allocator after every tensor, and leaves
    meta tensors behind; with it one pass is hundreds of synchronisations.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.parameters, self.buffers = dict(module._parameters), dict(module._buffers)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if isinstance(module, nn.Embedding):  # a few rows travel instead of the table
            return send_to_device(args, "cpu"), send_to_device(kwargs, "cpu")
        for name, value in self.parameters.items():
            if value is not None:
                module._parameters[name] = nn.Parameter(self._load(value), requires_grad=False)
        for name, buffer in self.buffers.items():
            if buffer is not None:
                module._buffers[name] = self._load(buffer)
        return send_to_device(args, self.device), send_to_device(kwargs, self.device)

    def _load(self, value: Tensor) -> Tensor:
        return value.detach().to(self.device, non_blocking=True)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.detach_hook(module)
        return send_to_device(output, self.device)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        module._parameters.update(self.parameters)
        module._buffers.update(self.buffers)
        return module


def _pin(module: nn.Module) -> None:
    """Page-lock a module's weights one by one: copies from there to a GPU are several times faster.

    Memory that can't be locked stays as it is, and works.
    """
    try:
        for value in (*module.parameters(), *module.buffers()):
            value.data = value.data.pin_memory()
    except RuntimeError as error:
        reason = (str(error).splitlines() or ["refused"])[0]
        warnings.warn(f"offloaded weights are not page-locked: {reason}", stacklevel=3)


def fp8_linear(module: nn.Module, name: str) -> bool:
    """Whether a layer of a Wan transformer is stored in float8.

    All Linears of the blocks are (as LongLive 2 does); the embeddings of text and time, the time
    projection and the head are not, nor is a weight whose sizes don't divide by 16.
    """
    return (
        isinstance(module, nn.Linear)
        and name.startswith("blocks.")
        and module.in_features % _FP8_MULTIPLE == 0
        and module.out_features % _FP8_MULTIPLE == 0
    )


def quantize_fp8(dit: nn.Module, device: str | torch.device) -> int:
    """Store the blocks' Linears in float8 e4m3, a scale a row, activations scaled as they come.

    Layer by layer, so the device never holds the bfloat16 weights of all.

    Args:
        dit: a bfloat16 transformer, changed in place; its quantized layers are on `device` then.
        device: a CUDA device of compute capability 8.9 or newer.

    Returns:
        how many layers were quantized.

    Raises:
        InvalidRequest: it has no layer that can be.
        MissingExtra: torchao is not installed, or not one that can do this.
    """
    count = sum(fp8_linear(module, name) for name, module in dit.named_modules())
    if not count:
        raise InvalidRequest(
            "quantize 'fp8': the transformer has no block Linear whose sizes divide by "
            f"{_FP8_MULTIPLE}"
        )
    try:
        ao = importlib.import_module("torchao.quantization")
        # It would else change settings of the compiler for the whole process.
        config = ao.Float8DynamicActivationFloat8WeightConfig(
            granularity=ao.PerRow(), set_inductor_config=False
        )
    except (ImportError, AttributeError, TypeError) as error:
        raise MissingExtra(
            f"quantize 'fp8' needs torchao ({error}): pip install -U streamgen[fp8]"
        ) from error
    ao.quantize_(dit, config, filter_fn=fp8_linear, device=device)
    return count
