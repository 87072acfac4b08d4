"""Plans on machines that are made up, and offloading on this one, against running in place."""

from __future__ import annotations

import copy
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

from streamgen import placement
from streamgen.cache import Append, BlockPool, BlockTable, KVSpec
from streamgen.errors import InvalidRequest, MissingExtra
from streamgen.models.history import CachedHistory, CachedPrompt
from streamgen.models.text import WordEncoder
from streamgen.models.wan import WanConfig, WanModel
from streamgen.placement import (
    Placement,
    fp8_linear,
    place_text,
    place_transformer,
    place_vae,
    plan,
    quantize_fp8,
    stream_weights,
    unstream,
)

TINY = WanConfig(
    dim=32,
    ffn_dim=48,
    num_heads=2,
    num_layers=2,
    in_channels=4,
    out_channels=4,
    text_dim=8,
    text_len=3,
    freq_dim=16,
    action_dim=3,
    spatial_tokens=6,
)
LATENT_HW = (4, 6)
CPU, META = torch.device("cpu"), torch.device("meta")
GIB = 2**30


def make() -> WanModel:
    """Random weights without zeros; every kind of parameter that a world has."""
    torch.manual_seed(0)
    model = WanModel(TINY).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    return model


@torch.inference_mode()
def run(model: nn.Module) -> list[Tensor]:
    """The prompt's keys and values, and two chunks: a pass that is read, one that is stored."""
    assert isinstance(model, WanModel)
    draw = torch.Generator().manual_seed(1)
    layers = model.encode_prompt(torch.randn(1, 3, 8, generator=draw))
    out = [x for pair in layers for x in pair]
    grid = TINY.grid(LATENT_HW)
    spec = KVSpec(TINY.num_layers, TINY.num_heads, TINY.head_dim, grid[0] * grid[1])
    table = BlockTable(BlockPool(spec, 4), Append(4))
    actions = torch.randn(1, 2, 3, generator=draw)
    for _ in range(2):
        with table.chunk(2) as chunk:
            history, prompt = CachedHistory(chunk, grid), CachedPrompt(layers)
            x = torch.randn(1, 4, 2, *LATENT_HW, generator=draw)
            out.append(model(x, torch.full((1, 2), 500.0), history, prompt, actions))
            model(out[-1], torch.zeros(1, 2), history, prompt, actions, store_only=True)
            chunk.commit()
    return out


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


# Offload


def test_streamed_transformer_is_bit_equal() -> None:
    """To itself in place and to accelerate's own offload, whose hooks are the slow twin."""
    expected = run(make())
    assert equal(run(stream_weights(make(), CPU)), expected)
    assert equal(run(accelerate.cpu_offload(make(), CPU)), expected)


def test_parameters_stay_what_they_are() -> None:
    """The same objects before, while and after hooked; state dicts and dtype answer as ever."""
    model = make()
    before = dict(model.named_parameters())
    attributes = {name: set(part.__dict__) for name, part in model.named_modules()}
    stream_weights(model, META)
    assert {k: id(v) for k, v in model.named_parameters()} == {k: id(v) for k, v in before.items()}
    assert model.dtype == torch.float32 and model.patch_embedding.weight.device == CPU
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert unstream(model) is model
    assert {k: id(v) for k, v in model.named_parameters()} == {k: id(v) for k, v in before.items()}
    assert {name: set(part.__dict__) for name, part in model.named_modules()} == attributes
    assert equal(run(model), run(make()))


class Flow:
    """History and prompt of shapes only: attention gives what a query looks like."""

    def attend(self, layer: int, q_BNHD: Tensor, *kv: Tensor) -> Tensor:
        assert {x.device for x in (q_BNHD, *kv)} == {META}
        return torch.empty_like(q_BNHD)


def test_every_weight_goes_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without values each operation proves that its weights came along."""
    model, loads = stream_weights(make(), META), []
    load = placement._Streamed._load
    monkeypatch.setattr(
        placement._Streamed,
        "_load",
        lambda hook, value: (loads.append(id(value)), load(hook, value))[1],
    )
    prompt = model.encode_prompt(torch.zeros(1, 3, 8))
    assert {x.device for pair in prompt for x in pair} == {META}
    x, t, actions = torch.zeros(1, 4, 2, *LATENT_HW), torch.zeros(1, 2), torch.zeros(1, 2, 3)
    with torch.inference_mode():
        out = model(x.to(META), t.to(META), Flow(), Flow(), actions.to(META))
    assert out.device == META and out.shape == x.shape
    assert sorted(loads) == sorted(map(id, model.parameters()))


def test_unhooked_weights_would_be_noticed() -> None:
    """The test above can fail: a layer that is left out raises."""
    model = stream_weights(make(), META)
    unstream(model.blocks[1].ffn[0])
    with pytest.raises(RuntimeError, match="meta"):
        model(
            torch.zeros(1, 4, 2, *LATENT_HW, device=META),
            torch.zeros(1, 2, device=META),
            Flow(),
            Flow(),
            torch.zeros(1, 2, 3, device=META),
        )


def test_after_an_error() -> None:
    """A pass that was cut short leaves nothing behind that the next one sees."""

    class Full(Flow):
        def attend(self, layer: int, q_BNHD: Tensor, *kv: Tensor) -> Tensor:
            raise RuntimeError("full")

    model = stream_weights(make(), CPU)
    with pytest.raises(RuntimeError, match="full"):
        x, t = torch.zeros(1, 4, 2, *LATENT_HW), torch.zeros(1, 2)
        model(x, t, Full(), Full(), torch.zeros(1, 2, 3))
    assert equal(run(model), run(make()))
    assert equal(run(unstream(model)), run(make()))
    assert all(torch.equal(v, make().state_dict()[k]) for k, v in model.state_dict().items())


def test_twice_is_once() -> None:
    """Streaming again replaces the first."""
    model = stream_weights(stream_weights(make(), META), CPU)
    assert equal(run(model), run(make()))
    assert not hasattr(unstream(model).patch_embedding, "_hf_hook")


def test_embeddings_are_looked_up_at_home() -> None:
    """Rows travel, the table does not; buffers travel with the layer."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("by", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.by

    model = nn.Sequential(nn.Embedding(10, 4), Shift(), nn.Linear(4, 2))
    ids = torch.tensor([[1, 2]])
    expected = model(ids)
    assert stream_weights(model, META)(ids).device == META
    assert torch.equal(stream_weights(model, CPU)(ids), expected)


# Placing


def placed(**changes: Any) -> Placement:
    """All on the CPU."""
    return Placement(**{**dict(transformer=CPU, text=CPU, vae=CPU, dtype=torch.float32), **changes})


class Text:
    """Notes how it is moved."""

    def to(self, device: torch.device, stream: bool = False) -> None:
        self.at = device, stream


@pytest.mark.parametrize(
    ("offload", "streamed"),
    [(None, (False, False)), ("text", (True, False)), ("all", (True, True))],
)
def test_placing(offload: str | None, streamed: tuple[bool, bool]) -> None:
    """What is streamed, and where the rest goes; a word table is moved as a module."""
    where = placed(text=META, vae=META, offload=offload)
    text = Text()
    assert place_text(text, where) is text and text.at == (META, streamed[0])
    model = make()
    assert place_transformer(model, where) is model
    assert hasattr(model.patch_embedding, "_hf_hook") == streamed[1]
    assert equal(run(model), run(make()))
    assert place_vae(nn.Linear(2, 2), where).weight.device == META
    words = WordEncoder(("a",), 4, 2)
    assert place_text(words, where) is words and words.embedding.weight.device == META


def test_describe() -> None:
    """One line: devices, type, what is streamed and quantized."""
    assert placed().describe() == "transformer on cpu in float32; text on cpu; vae on cpu"
    cuda = torch.device("cuda", 0)
    line = placed(transformer=cuda, text=cuda, dtype=torch.bfloat16, quantize="fp8", offload="text")
    assert line.describe() == (
        "transformer on cuda:0 in bfloat16, fp8 weights; text on cuda:0, weights streamed from the "
        "CPU; vae on cpu"
    )
    line = placed(transformer=cuda, text=cuda, dtype=torch.float16, offload="all")
    assert line.describe().count("streamed") == 2 and "\n" not in line.describe()


# Plans


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`machine(24, 8)`: two CUDA devices with as many GiB free; `machine()`: none."""

    def make(*free: float, capability: tuple[int, int] = (9, 0), torchao: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(free))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda d: (int(free[d.index] * GIB), 99 * GIB)
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capability)
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: torchao if name == "torchao" else find(name)
        )
        if not torchao:
            monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    return make


def names(where: Placement) -> tuple[str, str, str, str | None]:
    """Devices of transformer, text and vae, and what is offloaded."""
    return str(where.transformer), str(where.text), str(where.vae), where.offload


def test_one_device(machine: Callable[..., None]) -> None:
    """All on it, in its type."""
    machine()
    where = plan()
    assert names(where) == ("cpu", "cpu", "cpu", None) and where.dtype != torch.float16
    machine(24)
    where = plan()
    assert names(where) == ("cuda", "cuda", "cuda", None) and where.dtype == torch.bfloat16
    assert names(plan("cpu", offload="all")) == ("cpu", "cpu", "cpu", "all")
    assert plan("cpu", dtype="float16").dtype == torch.float16


def test_explicit_map(machine: Callable[..., None]) -> None:
    """Named devices; the others on `device`; the type follows the transformer's."""
    machine(24, 24)
    where = plan("cuda:1", {"text": "cpu", "vae": torch.device("cuda:0")})
    assert names(where) == ("cuda:1", "cpu", "cuda:0", None)
    assert names(plan("cuda:1", {})) == ("cuda:1", "cuda:1", "cuda:1", None)
    assert plan("cuda:0", {"transformer": "cpu"}).dtype == plan("cpu").dtype


WAN = {"transformer": 10 * GIB, "text": 12 * GIB, "vae": GIB}


@pytest.mark.parametrize(
    ("free", "options", "expected"),
    [
        ((), {}, ("cpu", "cpu", "cpu", None)),
        ((80,), {}, ("cuda:0", "cuda:0", "cuda:0", None)),
        ((24,), {}, ("cuda:0", "cuda:0", "cuda:0", "text")),
        ((11,), {}, ("cuda:0", "cuda:0", "cuda:0", "all")),
        ((0.5,), {}, ("cuda:0", "cuda:0", "cpu", "all")),
        ((24, 24), {}, ("cuda:0", "cuda:1", "cuda:1", None)),
        ((24, 4), {}, ("cuda:0", "cuda:0", "cuda:1", "text")),
        ((40, 4), {}, ("cuda:0", "cuda:0", "cuda:1", None)),
        ((24, 24), {"device": "cuda:1"}, ("cuda:1", "cuda:0", "cuda:0", None)),
        ((80,), {"offload": "text"}, ("cuda:0", "cuda:0", "cuda:0", "text")),
        ((80,), {"offload": "all"}, ("cuda:0", "cuda:0", "cuda:0", "all")),
        ((11,), {"quantize": "fp8"}, ("cuda:0", "cuda:0", "cuda:0", "text")),
        ((80,), {"device": "cpu"}, ("cpu", "cpu", "cpu", None)),
    ],
)
def test_auto_map(
    machine: Callable[..., None],
    free: tuple[float, ...],
    options: dict[str, Any],
    expected: tuple[str, str, str, str | None],
) -> None:
    """By free memory: a second GPU for text and autoencoder, and offload for what does not fit."""
    machine(*free)
    assert names(plan(device_map="auto", sizes=WAN, **options)) == expected


@pytest.mark.parametrize(
    ("free", "options", "message"),
    [
        ((), {"offload": "vae"}, "offload 'vae': accepted are None, 'text', 'all'"),
        ((), {"quantize": "int8"}, "quantize 'int8': accepted are None, 'fp8'"),
        ((), {"device_map": "balanced"}, "device_map 'balanced': accepted are None, 'auto', or"),
        ((), {"device_map": {"dit": "cpu"}}, "names dit: accepted are transformer, text, vae"),
        ((), {"device_map": {"text": "cuda:3"}}, "device 'cuda:3'"),
        ((), {"device": "mps"}, "device 'mps'"),
        ((), {"dtype": "int8"}, "dtype 'int8'"),
        ((), {"quantize": "fp8"}, "capability 8.9 or newer; the transformer is on cpu"),
        ((80,), {"quantize": "fp8", "dtype": "float16"}, "needs dtype bfloat16, not float16"),
        ((80,), {"quantize": "fp8", "offload": "all"}, "None or 'text', not with 'all'"),
    ],
)
def test_refused(
    machine: Callable[..., None], free: tuple[float, ...], options: dict[str, Any], message: str
) -> None:
    """One line: what is wrong and what is accepted."""
    machine(*free)
    with pytest.raises(InvalidRequest, match=message) as caught:
        plan(**options)
    assert "\n" not in str(caught.value)


def test_fp8_hardware_and_package(machine: Callable[..., None]) -> None:
    """Ada and newer; torchao."""
    machine(80, capability=(8, 6))
    with pytest.raises(InvalidRequest, match="capability 8.9 or newer; cuda has 8.6"):
        plan(quantize="fp8")
    machine(80, capability=(8, 9))
    assert plan(quantize="fp8").quantize == "fp8"
    machine(80, torchao=False)
    with pytest.raises(MissingExtra, match=r"needs torchao: pip install streamgen\[fp8\]$"):
        plan(quantize="fp8")


# float8


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """All Linear layers by name."""
    return {k: v for k, v in model.named_modules() if isinstance(v, nn.Linear)}


def test_fp8_takes_the_blocks_of_wan() -> None:
    """All ten Linears of each block of the 1.3B model, and nothing else."""
    with torch.device("meta"):
        model = WanModel(WanConfig(dim=1536, ffn_dim=8960, num_heads=12, num_layers=30))
    taken = {name for name, module in model.named_modules() if fp8_linear(module, name)}
    kinds = [f"{a}.{p}" for a in ("self_attn", "cross_attn") for p in "qkvo"] + ["ffn.0", "ffn.2"]
    assert taken == {f"blocks.{i}.{kind}" for i in range(30) for kind in kinds}
    assert len(linears(model)) - len(taken) == 6


def test_fp8_needs_multiples_of_16() -> None:
    """On both sides of a weight."""
    assert fp8_linear(nn.Linear(32, 48), "blocks.0.ffn.0")
    assert not fp8_linear(nn.Linear(40, 48), "blocks.0.ffn.0")
    assert not fp8_linear(nn.Linear(32, 40), "blocks.0.ffn.0")
    assert not fp8_linear(nn.Linear(32, 48), "time_projection.1")
    assert not fp8_linear(nn.LayerNorm(32), "blocks.0.norm3")


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A stand-in that rounds the weights it is given to float8, a scale a row."""
    fake = types.ModuleType("torchao.quantization")
    fake.calls = []  # type: ignore[attr-defined]

    def quantize_(model: nn.Module, config: object, filter_fn: Any, device: Any) -> None:
        fake.calls.append((config, torch.device(device)))  # type: ignore[attr-defined]
        for name, module in model.named_modules():
            if filter_fn(module, name):
                w = module.weight.data
                scale = w.abs().amax(1, keepdim=True) / 448
                module.weight.data = (w / scale).to(torch.float8_e4m3fn).to(w) * scale

    fake.quantize_ = quantize_  # type: ignore[attr-defined]
    fake.PerRow = lambda: "a scale a row"  # type: ignore[attr-defined]
    fake.Float8DynamicActivationFloat8WeightConfig = lambda **kw: kw  # type: ignore[attr-defined]
    package = types.ModuleType("torchao")
    package.__spec__ = importlib.machinery.ModuleSpec("torchao", None)
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)
    yield fake


def test_quantize(torchao: Any) -> None:
    """Row-wise dynamic on the blocks, no compiler settings changed; all else as it was."""
    model = make()
    before = copy.deepcopy(model.state_dict())
    place_transformer(model, placed(quantize="fp8", dtype=torch.bfloat16))
    assert torchao.calls == [({"granularity": "a scale a row", "set_inductor_config": False}, CPU)]
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {f"{k}.weight" for k in linears(model) if k.startswith("blocks.")}
    assert quantize_fp8(make(), CPU) == 20


def test_nothing_to_quantize(torchao: Any) -> None:
    """A transformer of odd sizes says so."""
    odd = WanConfig(dim=24, ffn_dim=40, num_heads=2, num_layers=1, text_dim=8, freq_dim=16)
    with pytest.raises(InvalidRequest, match="no block Linear whose sizes divide by 16"):
        quantize_fp8(WanModel(odd), CPU)
    assert torchao.calls == []


@pytest.mark.parametrize("lost", ["PerRow", "Float8DynamicActivationFloat8WeightConfig"])
def test_old_torchao(torchao: Any, lost: str) -> None:
    """One that lacks what is needed is as good as none."""
    delattr(torchao, lost)
    with pytest.raises(MissingExtra, match=f"{lost}.*pip install -U streamgen"):
        quantize_fp8(make(), CPU)
