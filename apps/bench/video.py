"""How fast a causal video model's pass is: `streamgen bench video`.

The layers are those of Wan2.1 1.3B with random weights, a few of them; the frames, chunk, sink and
window those of LongLive, by default at half of 480p's height and width.

(a) passes   a chunk (four denoising passes, then the clean one) by our cache; by the same model
             and weights with the caches and rotary positions of other projects, and as these
             write it a GELU that is an operation of its own; and by diffusers' transformer, which
             has no cache and makes the whole window anew. The floor is the time of a pass's matrix
             products and attentions alone, at the same shapes and with the same weights.
(b) pieces   positions, modulation and norms of a pass, each timed by itself
(c) memory   at frame 10,000 against frame 100, in every mode (`flat`)

Whatever is compared is timed in turns, pass by pass. Passes two to four of a chunk are alike, so
one of them is timed and counts three times. The machine's other work makes times longer and hits
all rows; the ratios are the point, and `cpu` is the ratio of processor time, which it hits less.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamgen.apps.bench.clock import Spent, ratios, timed, use_threads
from streamgen.apps.bench.flat import measure_memory
from streamgen.apps.bench.peers import CloneCat, Concatenate, Lane, Peer, Roll
from streamgen.apps.bench.steps import load_average, turned
from streamgen.cache import BlockPool, BlockTable, KVSpec, SinkWindow
from streamgen.device import capabilities, pick_dtype
from streamgen.engine import Engine
from streamgen.errors import InvalidRequest
from streamgen.kernels.attention import attend
from streamgen.models.history import CachedHistory, CachedPrompt
from streamgen.models.rope import THETA, axis_pairs, rotate, rotation
from streamgen.models.wan import WanConfig, WanModel, norm

STEPS = 4
"""Denoising passes of a chunk, before the clean one."""

PASSES = {"first": 1, "next": STEPS - 1, "clean": 1}
"""Passes of a chunk that are timed, and how many each stands for."""

TABLE_ROWS = 1024  # of the peers' rotary tables
UNIT = 16  # pixels of a token's side

Times = dict[str, list[Spent]]
"""By name, what was spent in every repeat."""


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        model: the transformer's sizes.
        grid: rows and columns of tokens in a frame.
        chunk: frames made together.
        sink, window: frames kept for ever, and frames seen at all.
        dtype: of weights, keys and values.
    """

    model: WanConfig
    grid: tuple[int, int]
    chunk: int = 3
    sink: int = 3
    window: int = 12
    dtype: torch.dtype = torch.bfloat16

    @property
    def frame_tokens(self) -> int:
        """Tokens of a frame."""
        return self.grid[0] * self.grid[1]

    @property
    def latent_hw(self) -> tuple[int, int]:
        """Rows and columns of a latent frame."""
        high, wide = self.model.patch_size[1:]
        return self.grid[0] * high, self.grid[1] * wide

    def latents(self, frames: int) -> Tensor:
        """Noise `[1, C, frames, Y, X]`."""
        return torch.randn(1, self.model.in_channels, frames, *self.latent_hw)

    def as_engine(self) -> Engine:
        """What the caches of `peers` ask of an engine: shapes, and for ours a table."""
        spec = KVSpec(
            self.model.num_layers,
            self.model.kv_heads,
            self.model.head_dim,
            self.frame_tokens,
            self.dtype,
        )
        pool, policy = BlockPool(spec, self.window + self.sink), SinkWindow(self.sink, self.window)
        engine = SimpleNamespace(
            pool=pool,
            config=SimpleNamespace(sink=self.sink, window=self.window),
            grid=self.grid,
            device=torch.device("cpu"),
            table=lambda: BlockTable(pool, policy),
            history=lambda chunk: CachedHistory(chunk, self.grid),
        )
        return cast(Engine, engine)


def run(
    layers: int = 2,
    height: int = 240,
    width: int = 416,
    repeats: int = 7,
    output: str | Path | None = None,
    quick: bool = False,
    *,
    window: int = 12,
    sink: int = 3,
    threads: int | None = None,
    memory: bool = True,
) -> dict[str, Any]:
    """Measure, print a table, and return (and write) the report.

    Args:
        layers: of the transformer; the real one has 30.
        height, width: pixels; 480 and 832 are the real thing, and take some eight times as long.
        repeats: how often everything is measured; medians count.
        output: where to write the report.
        quick: tiny shapes and few frames, to see that it runs; its figures mean nothing.
        window, sink: latent frames seen at all, and kept for ever.
        threads: CPU threads; None = torch's own choice.
        memory: watch the memory over 10,000 frames, too.

    Raises:
        InvalidRequest: pixels that make no whole tokens, no layers or repeats, or a window that
            does not hold sink and chunk.
    """
    setting = _setting(layers, height, width, window, sink, quick)
    if repeats < 1:
        raise InvalidRequest(f"repeats={repeats}: accepted are at least 1")
    SinkWindow(sink, window).validate(setting.chunk)
    with use_threads(threads), torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        report: dict[str, Any] = {"about": _about(setting, height, width, repeats)}
        _say("passes")
        model = WanModel(setting.model).eval().requires_grad_(False).to(setting.dtype)
        report["passes"] = measure_passes(setting, model, repeats)
        _say("pieces")
        middle = report["passes"]["rows"]["ours"]["next_ms"]
        report["pieces"] = measure_pieces(setting, model, repeats, middle)
        report["about"]["load_after"] = load_average()
    if memory:
        near, far = (45, 90) if quick else (100, 10_000)
        _say(f"memory: every mode to frame {far:,}")
        with use_threads(1):  # tensors too small to share
            report["memory"] = measure_memory(near, far)
    if output is not None:
        Path(output).write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return report


def _setting(layers: int, height: int, width: int, window: int, sink: int, quick: bool) -> Setting:
    if layers < 1:
        raise InvalidRequest(f"layers={layers}: accepted are at least 1")
    for name, pixels in (("height", height), ("width", width)):
        if pixels < UNIT or pixels % UNIT:
            raise InvalidRequest(f"{name}={pixels}: accepted are multiples of {UNIT} pixels")
    if quick:
        tiny = WanConfig(48, 96, 2, layers, 4, 4, text_dim=16, text_len=6, freq_dim=32)
        return Setting(tiny, (2, 3), sink=sink, window=window, dtype=torch.float32)
    wan = WanConfig(dim=1536, ffn_dim=8960, num_heads=12, num_layers=layers)
    grid = (height // UNIT, width // UNIT)
    return Setting(wan, grid, sink=sink, window=window, dtype=pick_dtype())


# (a) Passes


class Way(Protocol):
    """A way to make a chunk: its passes by name, see `PASSES`."""

    def run(self, name: str) -> object:
        """Make one pass."""
        ...


class Cached:
    """Our transformer over a cache: ours or a peer's.

    Attributes:
        out: what the last pass predicted.
    """

    def __init__(self, setting: Setting, model: WanModel, cache: Lane | AsPeers) -> None:
        self.model, self.cache, self.chunk = model, cache, setting.chunk
        self.x = setting.latents(setting.chunk)
        self.t = torch.full((1, setting.chunk), 500.0)
        text = torch.randn(1, setting.model.text_len, setting.model.text_dim)
        self.prompt = CachedPrompt(model.encode_prompt(text))
        self.out = self.x

    def fill(self, chunks: list[list[tuple[Tensor, Tensor]]]) -> None:
        """Put ready-made chunks into the cache: for every layer K and V `[1, N, H, D]`."""
        for chunk in chunks:
            self.cache.begin(self.chunk)
            for layer, (k, v) in enumerate(chunk):
                self.cache.update(layer, k, v)
            self.cache.commit()

    def run(self, name: str) -> Tensor:
        if name == "first":
            self.cache.begin(self.chunk)
        self.out = self.model(self.x, self.t, self.cache, self.prompt, store_only=name == "clean")
        if name == "clean":
            self.cache.commit()
        return self.out


class AsPeers:
    """A cache of `peers` with rotary positions as these projects compute them.

    That is in complex128: a table of `TABLE_ROWS` rows for each axis, from which every call for
    every layer puts the chunk's together, and products in float64.
    """

    def __init__(self, cache: Peer) -> None:
        self.cache = cache
        head_dim = cache.spec.head_dim
        rows = torch.arange(TABLE_ROWS, dtype=torch.float64)[:, None]
        self.table = []
        for pairs in axis_pairs(head_dim):
            angles = rows * THETA ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
            self.table.append(torch.polar(torch.ones_like(angles), angles))

    def begin(self, frames: int) -> None:
        """Open the next `frames` frames."""
        self.cache.begin(frames)

    def update(self, layer: int, k_BNHD: Tensor, v_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        """Take the chunk's keys and values; return all that it sees."""
        return self.cache.update(layer, k_BNHD, v_BNHD)

    def commit(self) -> None:
        """Keep what was written last."""
        self.cache.commit()

    def attend(self, layer: int, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """See `streamgen.models.wan.History`."""
        q, k = self._rotate(q_BNHD), self._rotate(k_BNHD)
        return attend(q, *self.cache.update(layer, k, v_BNHD))

    def _rotate(self, x_BNHD: Tensor) -> Tensor:
        frames, (rows, cols) = self.cache.frames, self.cache.grid
        time, high, wide = self.table
        size = (len(frames), rows, cols, -1)
        turn = torch.cat(
            [
                time[frames.start : frames.stop].view(-1, 1, 1, time.shape[1]).expand(size),
                high[:rows].view(1, -1, 1, high.shape[1]).expand(size),
                wide[:cols].view(1, 1, -1, wide.shape[1]).expand(size),
            ],
            dim=-1,
        ).flatten(0, 2)[:, None]
        turned = []
        for x_NHD in x_BNHD:
            mine = x_NHD[: len(turn)].double().unflatten(-1, (-1, 2))
            one = torch.view_as_real(torch.view_as_complex(mine) * turn).flatten(2)
            turned.append(torch.cat([one, x_NHD[len(turn) :]]))  # what lies behind the chunk
        return torch.stack(turned).type_as(x_BNHD)


class Diffusers:
    """diffusers' transformer over the whole window, at one timestep a token, without a cache.

    What it would need a mask for, that a chunk does not see later ones, is left out: it is faster
    so. A clean pass has nothing to store.
    """

    def __init__(self, setting: Setting, model: WanModel) -> None:
        from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

        config = setting.model
        self.model = WanTransformer3DModel(
            patch_size=config.patch_size,
            num_attention_heads=config.num_heads,
            attention_head_dim=config.head_dim,
            in_channels=config.in_channels,
            out_channels=config.out_channels,
            text_dim=config.text_dim,
            freq_dim=config.freq_dim,
            ffn_dim=config.ffn_dim,
            num_layers=config.num_layers,
        )
        self.model.eval().requires_grad_(False)
        nn.Module.to(self.model, dtype=setting.dtype)  # its own `to` warns without a reason here
        self.x = setting.latents(setting.window).to(setting.dtype)
        self.t = torch.full((1, setting.window * setting.frame_tokens), 500.0)
        self.text = torch.randn(1, config.text_len, config.text_dim, dtype=setting.dtype)

    def run(self, name: str) -> Tensor | None:
        if name == "clean":
            return None
        out: Tensor = self.model(self.x, self.t, self.text, return_dict=False)[0]
        return out


class Floor:
    """The matrix products and attentions of a pass and nothing else, with the model's weights.

    Inputs and results lie as the products and the attention kernel like them best: packed, and for
    attention head by head.
    """

    def __init__(self, setting: Setting, model: WanModel) -> None:
        config, new = setting.model, setting.chunk * setting.frame_tokens
        self.model: Any = model

        def tokens(count: int, width: int) -> Tensor:
            return torch.randn(1, count, width).to(setting.dtype)

        def heads(count: int) -> Tensor:
            return torch.randn(1, config.num_heads, count, config.head_dim).to(setting.dtype)

        self.x, self.wide = tokens(new, config.dim), tokens(new, config.ffn_dim)
        self.latents = setting.latents(setting.chunk).to(setting.dtype)
        self.time = tokens(setting.chunk, config.freq_dim), tokens(setting.chunk, config.dim)
        self.q, seen = heads(new), setting.window * setting.frame_tokens
        self.past, self.text = (heads(seen), heads(seen)), (heads(config.text_len),) * 2

    def run(self, name: str) -> None:
        model, x = self.model, self.x
        model.patch_embedding(self.latents)
        for y, part in (
            (self.time[0], model.time_embedding[0]),
            (self.time[1], model.time_embedding[2]),
            (self.time[1], model.time_projection[1]),
        ):
            F.linear(y, part.weight, part.bias)
        for block in model.blocks:
            mine, other = block.self_attn, block.cross_attn
            for part in (mine.q, mine.k, mine.v, mine.o, other.q, other.o, block.ffn[0]):
                F.linear(x, part.weight, part.bias)
            F.linear(self.wide, block.ffn[2].weight, block.ffn[2].bias)
            for seen in (self.past, self.text):
                F.scaled_dot_product_attention(self.q, *seen)
        F.linear(x, model.head.head.weight, model.head.head.bias)


PEERS: dict[str, type[Peer]] = {
    "concatenate": Concatenate,
    "roll": Roll,
    "clone and cat": CloneCat,
}
"""The caches of other projects, all with positions in complex128 (`AsPeers`)."""


def in_steps(model: WanModel) -> WanModel:
    """The same model on the same weights, with a plain Linear and a GELU in its feed-forwards."""
    other: Any = deepcopy(model, {id(weight): weight for weight in model.parameters()})
    for block in other.blocks:
        fused, _, last = block.ffn
        plain = nn.Linear(1, 1)
        plain.weight, plain.bias = fused.weight, fused.bias
        block.ffn = nn.Sequential(plain, nn.GELU(approximate="tanh"), last)
    return cast(WanModel, other)


def make_ways(setting: Setting, model: WanModel) -> dict[str, Cached]:
    """Ours and the peers', all with the same full window, the same next chunk and the same text."""
    size = (1, setting.chunk * setting.frame_tokens, setting.model.kv_heads, setting.model.head_dim)
    past = [
        [
            (torch.randn(size).to(setting.dtype), torch.randn(size).to(setting.dtype))
            for _ in range(setting.model.num_layers)
        ]
        for _ in range(-(-setting.window // setting.chunk) + 1)
    ]
    caches: dict[str, Lane | AsPeers] = {"ours": Lane(setting.as_engine())}
    caches |= {name: AsPeers(kind(setting.as_engine())) for name, kind in PEERS.items()}
    theirs, ways = in_steps(model), {}
    for name, cache in caches.items():
        with torch.random.fork_rng(devices=[]):
            ways[name] = Cached(setting, model if name == "ours" else theirs, cache)
        ways[name].fill(past)
    return ways


def measure_passes(setting: Setting, model: WanModel, repeats: int) -> dict[str, Any]:
    """Milliseconds of each way's passes and chunk, the ratios to ours, and ours to the floor."""
    ways: dict[str, Way] = {**make_ways(setting, model)}
    ways |= {"diffusers, no cache": Diffusers(setting, model), "floor": Floor(setting, model)}
    times: dict[str, Times] = {way: {name: [] for name in PASSES} for way in ways}
    for repeat in range(-1, repeats):  # the first one warms up
        for number, name in enumerate(PASSES):
            for way in turned(list(ways), len(PASSES) * repeat + number):
                if way == "floor" and name != "next":
                    continue
                _, spent = timed(partial(ways[way].run, name))
                if repeat >= 0:
                    times[way][name].append(spent)
    floor = times.pop("floor")["next"]
    return summary(times, floor)


def summary(times: dict[str, Times], floor: list[Spent]) -> dict[str, Any]:
    """The report of (a).

    Args:
        times: of every way, ours first, the passes of `PASSES`, one pair a repeat.
        floor: of one pass.

    Returns:
        `rows`: for every way the medians of each pass and of a chunk, and how often ours goes into
        its chunk (`ratio`, and `cpu` by processor time); and the floor: its median, and how much of
        our pass it is. Ratios are medians over the repeats.
    """
    chunks = {way: [_chunk(passes, i) for i in range(len(floor))] for way, passes in times.items()}
    ours = next(iter(times))
    rows = {}
    for way, passes in times.items():
        rows[way] = {f"{name}_ms": median(clock for clock, _ in passes[name]) for name in PASSES}
        rows[way]["chunk_ms"] = median(clock for clock, _ in chunks[way])
        rows[way]["ratio"], rows[way]["cpu"] = ratios(chunks[way], chunks[ours])
    share, cpu = ratios(floor, times[ours]["next"])
    found = {"ms": median(clock for clock, _ in floor), "share": share, "cpu": cpu}
    return {"rows": rows, "floor": found}


def _chunk(passes: Times, repeat: int) -> Spent:
    """All passes of a chunk."""
    parts = [(count, *passes[name][repeat]) for name, count in PASSES.items()]
    return sum(n * clock for n, clock, _ in parts), sum(n * cpu for n, _, cpu in parts)


# (b) Pieces


def measure_pieces(
    setting: Setting, model: WanModel, repeats: int, pass_ms: float
) -> dict[str, Any]:
    """Milliseconds of what is neither product nor attention in a pass, and its share of one."""
    config, layers = setting.model, setting.model.num_layers
    new = setting.chunk * setting.frame_tokens
    block = cast(Any, model.blocks[0])
    x = torch.randn(1, setting.chunk, setting.frame_tokens, config.dim).to(setting.dtype)
    flat = x.flatten(1, 2)
    heads = flat.view(1, new, config.num_heads, config.head_dim)
    e = torch.randn(1, setting.chunk, 6, config.dim).to(setting.dtype)
    frames = range(setting.window, setting.window + setting.chunk)
    turn = rotation(frames, setting.grid, config.head_dim)
    gate, shift, scale = (e[:, :, i, None] for i in range(3))

    def positions() -> None:
        rotate(heads, turn)
        rotate(heads, turn)

    def modulation() -> None:
        (block.modulation + e).unsqueeze(3).unbind(2)
        for _ in range(2):  # attention and feed-forward: into them, and out with a gate
            torch.addcmul(shift, x, 1 + scale)
            torch.addcmul(x, gate, x)

    def norms() -> None:
        norm(x, config.eps)
        norm(x, config.eps)
        block.norm3(x)
        for part in (block.self_attn.norm_q, block.self_attn.norm_k, block.cross_attn.norm_q):
            part(flat)

    work = {"rotary positions": positions, "modulation": modulation, "norms": norms}
    spent: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(-1, 3 * repeats):
        for name in turned(list(work), repeat):
            _, (clock, _) = timed(work[name])
            if repeat >= 0:
                spent[name].append(layers * clock)
    _, (angles, _) = timed(lambda: rotation(frames, setting.grid, config.head_dim))
    ms = {name: median(values) for name, values in spent.items()}
    ms["rotary angles, once a chunk"] = angles / (STEPS + 1)
    return {"ms": ms, "share": sum(ms.values()) / pass_ms}


# The report


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [*_about_lines(report["about"]), *_pass_lines(report["passes"])]
    lines += _piece_lines(report["pieces"])
    if "memory" in report:
        lines += _memory_lines(report["memory"])
    return "\n".join(lines)


def _about_lines(about: dict[str, Any]) -> Iterator[str]:
    machine = about["machine"]
    yield (
        f"{about['layers']} layers of width {about['dim']}, {about['dtype']}, {about['width']}x"
        f"{about['height']}: {about['frame_tokens']} tokens a frame, chunk {about['chunk']}, sink "
        f"{about['sink']}, window {about['window']}"
    )
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"torch {machine['torch']}; {about['repeats']} repeats"
    )
    if (about["load_before"] or 0) > 0.5:
        yield (
            f"the machine was busy (load {about['load_before']:.1f}): times are too long, and "
            "ratios are rough"
        )


def _pass_lines(passes: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"(a) milliseconds of a chunk of {STEPS} passes and a clean one; ratios to ours"
    heads = ("first", "next", "clean", "chunk", "ratio", "cpu")
    yield f"    {'':22}" + "".join(f"{head:>10}" for head in heads)
    for name, row in passes["rows"].items():
        times = "".join(f"{row[f'{head}_ms']:10.1f}" for head in heads[:4])
        yield f"    {name:22}{times}{row['ratio']:10.2f}{row['cpu']:10.2f}"
    floor = passes["floor"]
    yield (
        f"    {'matmul and attention':22}{'':10}{floor['ms']:10.1f}; our pass runs at "
        f"{floor['share']:.3f} of that speed (cpu {floor['cpu']:.3f}; target: at least 0.9)"
    )


def _piece_lines(pieces: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "(b) milliseconds of a pass that are neither products nor attention"
    for name, ms in pieces["ms"].items():
        yield f"    {name:32}{ms:10.2f}"
    yield f"    {'share of a pass':32}{100 * pieces['share']:10.1f} % (target: at most 10 %)"


def _memory_lines(memory: dict[str, Any]) -> Iterator[str]:
    first = next(iter(memory.values()))
    frames = f"{first['near']['frame']:,} and {first['far']['frame']:,}"
    yield ""
    yield f"(c) memory at about frames {frames}: blocks in use, kB of tensors, MB of the process"
    yield f"    {'':32}{'blocks':>14}{'tensors':>18}{'process':>16}{'ratio':>8}"
    for name, row in memory.items():
        pair = row["near"], row["far"]
        blocks = " ".join(f"{at['blocks']:6}" for at in pair)
        tensors = " ".join(f"{at['tensor_bytes'] / 1e3:8.1f}" for at in pair)
        resident = " ".join(f"{(at['resident_bytes'] or 0) / 1e6:7.1f}" for at in pair)
        ratio = "" if row["resident_ratio"] is None else f"{row['resident_ratio']:8.3f}"
        flat = "" if row["flat"] else "  NOT FLAT"
        yield f"    {name:32} {blocks} {tensors} {resident}{ratio}{flat}"


def _about(setting: Setting, height: int, width: int, repeats: int) -> dict[str, Any]:
    return {
        "layers": setting.model.num_layers,
        "dim": setting.model.dim,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "height": height,
        "width": width,
        "frame_tokens": setting.frame_tokens,
        "chunk": setting.chunk,
        "sink": setting.sink,
        "window": setting.window,
        "machine": capabilities().to_json(),
        "load_before": load_average(),
        "repeats": repeats,
    }


# Helpers


def _say(what: str) -> None:
    print(f"bench: {what} ...", file=sys.stderr, flush=True)
