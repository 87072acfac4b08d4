"""Next-scale images against the concatenating way: `streamgen bench image`.

The shapes are those of VAR d16 at 256 pixels with random weights, and its sampling is that of VAR's
demo. Ours draws through the cache core as `NextScalePipeline` does; the peer (`concatenating`) as
the published code does, from the same weights and with the same random numbers.

(a) time     milliseconds of each scale, of an image's tokens, and with the autoencoder's decoding
(b) memory   the most bytes that keys and values take, counted; and by how much the process grows

Both are timed in turns, scale by scale. The machine's other work makes times longer and hits both
ways; the ratios are the point, and `cpu` is the ratio of processor time, which it hits less.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from streamgen.apps.bench.clock import Spent, ratios, timed, total, use_threads
from streamgen.apps.bench.concatenating import Concatenating
from streamgen.apps.bench.steps import load_average, turned
from streamgen.cache import BlockPool, KVSpec, NextScale
from streamgen.cache.scales import block_tokens
from streamgen.device import capabilities, pick_dtype
from streamgen.errors import InvalidRequest
from streamgen.models.var import CachedScales, VARConfig, VARModel
from streamgen.models.vq import VQVAE, VQConfig
from streamgen.sampling.tokens import Sampling, draw, guide, keep_likely, ramp

SAMPLING = Sampling()
MIB = 2**20


class Stored:
    """A drawing through the cache core, scale by scale, as `NextScalePipeline` makes it.

    Args:
        var, vae: weights.
        sampling: how tokens are drawn; with guidance.

    Attributes:
        kv_peak: the most bytes that keys and values had at any time of the last drawing.
    """

    def __init__(self, var: VARModel, vae: VQVAE, sampling: Sampling) -> None:
        self.var, self.vae, self.sampling = var, vae, sampling
        self.kv_peak = 0

    @torch.no_grad()
    def draw(self, labels: Sequence[int], seeds: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """After each scale its tokens `[B, N]` and the latents so far `[B, C, Y, X]`."""
        var, quantize, config = self.var, self.vae.quantize, self.var.config
        sides, device = config.patch_nums, var.pos_start.device
        generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        rows = [*labels, *[config.no_class] * len(labels)]
        tokens_kept = block_tokens(sides, store_last=False)
        spec = KVSpec(config.depth, config.heads, config.head_dim, tokens_kept, var.dtype)
        pool, self.kv_peak = BlockPool(spec, len(rows), device), 0
        condition = var.condition(torch.tensor(rows, device=device))
        x = var.start(condition)
        f_hat = torch.zeros(len(labels), config.latent_channels, *sides[-1:] * 2, device=device)
        with NextScale(pool, len(rows), sides, store_last=False) as cache:
            for scale, side in enumerate(sides):
                cache.begin(scale)
                logits = var.predict(x, condition, CachedScales(cache)).float()
                self.kv_peak = max(self.kv_peak, cache.nbytes)
                cache.commit()
                logits = guide(logits, self.sampling.cfg * ramp(scale, len(sides)))
                logits = keep_likely(logits, self.sampling.top_k, self.sampling.top_p)
                tokens = draw(logits, generators)
                f_hat, seen = quantize.add(f_hat, quantize.lookup(tokens, side), scale, sides)
                if seen is not None:
                    x = var.embed(seen.flatten(2).transpose(1, 2), scale + 1).repeat(2, 1, 1)
                yield tokens, f_hat

    @torch.no_grad()
    def decode(self, f_hat_BCYX: Tensor) -> Tensor:
        """Pixels `[B, 3, H, W]` of latents: about -1 to 1, not clamped."""
        return self.vae.decode(f_hat_BCYX)


Way = Stored | Concatenating
WAYS: dict[str, type[Stored] | type[Concatenating]] = {
    "ours": Stored,
    "concatenating": Concatenating,
}
"""Both ways by their name in the report; ours first."""


def run(
    depth: int = 16,
    batch: int = 1,
    repeats: int = 3,
    output: str | Path | None = None,
    quick: bool = False,
    *,
    threads: int | None = None,
) -> dict[str, Any]:
    """Measure, print a table, and return (and write) the report.

    Args:
        depth: blocks of the transformer; d16 has 16.
        batch: images at once.
        repeats: how often everything is timed; medians count.
        output: where to write the report.
        quick: tiny shapes, to see that it runs; its figures mean nothing.
        threads: CPU threads; None = torch's own choice.

    Raises:
        InvalidRequest: a number is not positive.
    """
    for name, value in (("depth", depth), ("batch", batch), ("repeats", repeats)):
        if value < 1:
            raise InvalidRequest(f"{name}={value}: accepted are at least 1")
    with use_threads(threads), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        _say("weights")
        var, vae = make(depth, quick)
        report: dict[str, Any] = {"about": _about(var, batch, repeats)}
        ways = {name: kind(var, vae, SAMPLING) for name, kind in WAYS.items()}
        _say("memory")
        report["memory"] = measure_memory(ways, batch)
        _say("time")
        report["time"] = measure_time(ways, batch, repeats)
        report["about"]["load_after"] = load_average()
    if output is not None:
        Path(output).write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return report


def make(depth: int, quick: bool = False) -> tuple[VARModel, VQVAE]:
    """Transformer and decoder of VAR d16's shapes, or tiny ones, with random weights."""
    if quick:
        var = VARModel(
            VARConfig(depth, 32, 2, 10, latent_channels=8, vocab=64, patch_nums=(1, 2, 3, 4))
        )
        shape = VQConfig(64, 8, 32, (1, 2), 1, encoder=False)
        kind = torch.float32
    else:
        var, shape = VARModel(VARConfig(depth, 1024, 16, 1000)), VQConfig(encoder=False)
        kind = pick_dtype()
    var.init_weights(gate=0.3, head=1.0)  # gates and logits of some size, as trained ones have
    vae = VQVAE(shape).to(kind)
    vae.quantize.float()
    for part in (var.cast(kind), vae):
        part.eval().requires_grad_(False)
    return var, vae


def _inputs(way: Way, batch: int) -> tuple[list[int], list[int]]:
    """Labels and seeds of a batch."""
    return [i % way.var.config.num_classes for i in range(batch)], list(range(batch))


def decode(way: Way, f_hat_BCYX: Tensor) -> Tensor:
    """Latents to uint8 pixels `[B, H, W, 3]`."""
    x = way.decode(f_hat_BCYX.to(way.vae.post_quant_conv.weight.dtype)).float()
    return ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)


# (a) Time


def measure_time(ways: dict[str, Way], batch: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of every scale and of the decoder, of all ways in turns, after a warm-up."""
    first = next(iter(ways.values()))
    sides = first.var.config.patch_nums
    spent: dict[str, list[list[Spent]]] = {name: [] for name in ways}
    same = []
    for repeat in range(-1, repeats):
        times: dict[str, list[Spent]] = {name: [] for name in ways}
        drawings = {name: way.draw(*_inputs(way, batch)) for name, way in ways.items()}
        for scale in range(len(sides)):
            made: dict[str, tuple[Tensor, Tensor]] = {}
            for name in turned(list(ways), len(sides) * repeat + scale):
                made[name], took = timed(partial(next, drawings[name]))
                times[name].append(took)
            ours, other = (made[name][0] for name in ways)
            same.append(float((ours == other).float().mean()))
        for name in turned(list(ways), repeat):
            _, took = timed(partial(decode, ways[name], made[name][1]))
            times[name].append(took)
        drawings.clear()  # ends them
        if repeat >= 0:
            for name in ways:
                spent[name].append(times[name])
    return summary(spent, sides) | {"same_tokens": sum(same) / len(same)}


def summary(spent: dict[str, list[list[Spent]]], sides: Sequence[int]) -> dict[str, Any]:
    """The report of (a).

    Args:
        spent: of every way, ours first, and every repeat: milliseconds on the clock and of the
            processor of each scale, and last of the decoder.
        sides: of the token maps.

    Returns:
        `scales`, for each the medians of all ways, and `tokens`, `decode` and `image` (both
        together). `ratio` is ours to the other's, the median over the repeats, and `cpu` the same
        by processor time.
    """
    ours, other = spent.values()

    def row(pick: slice) -> dict[str, float]:
        sums = [[total(one[pick]) for one in way] for way in (ours, other)]
        ratio, cpu = ratios(*sums)
        ours_ms, other_ms = (median(clock for clock, _ in way) for way in sums)
        return {"ours_ms": ours_ms, "other_ms": other_ms, "ratio": ratio, "cpu": cpu}

    count = len(sides)
    return {
        "scales": [{"side": side, **row(slice(i, i + 1))} for i, side in enumerate(sides)],
        "tokens": row(slice(0, count)),
        "decode": row(slice(count, count + 1)),
        "image": row(slice(0, count + 1)),
    }


# (b) Memory


def measure_memory(ways: dict[str, Way], batch: int) -> dict[str, Any]:
    """Peak bytes of keys and values, and of the process above what it has before, of a drawing."""
    report: dict[str, Any] = {}
    for way in ways.values():
        for _ in way.draw(*_inputs(way, batch)):  # so that the allocator's habits hit none alone
            pass
    for name, way in ways.items():
        gc.collect()
        before = _reset_peak()
        for _ in way.draw(*_inputs(way, batch)):
            pass
        after = _memory_field("VmHWM")
        grown = after - before if before is not None and after is not None else None
        report[name] = {"kv_bytes": way.kv_peak, "process_bytes": grown}
    ours, other = report.values()
    report["kv_ratio"] = ours["kv_bytes"] / other["kv_bytes"]
    known = ours["process_bytes"] and other["process_bytes"]
    report["process_ratio"] = ours["process_bytes"] / other["process_bytes"] if known else None
    return report


def _reset_peak() -> int | None:
    """Let the system's peak of this process begin anew; the memory it has now. Linux only."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return _memory_field("VmRSS")
    return None


def _memory_field(name: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(x.split()[1]) for x in lines if x.startswith(f"{name}:"))
    return None


# The report


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    return "\n".join(
        [
            *_about_lines(report["about"]),
            *_time_lines(report["time"], report["about"]),
            *_memory_lines(report["memory"]),
        ]
    )


def _about_lines(about: dict[str, Any]) -> Iterator[str]:
    machine = about["machine"]
    yield (
        f"{about['depth']} blocks of width {about['width']}, {about['parameters'] / 1e6:.0f} M "
        f"parameters, {about['dtype']}, {about['tokens']} tokens; {about['batch']} at once, "
        f"guidance {SAMPLING.cfg:g}"
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


def _time_lines(time: dict[str, Any], about: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"(a) milliseconds for {about['batch']}; ratio, and cpu by processor time: ours / other"
    yield f"    {'':24}{'ours':>10}{'concatenating':>16}{'ratio':>8}{'cpu':>8}"
    rows = [(f"scale {row['side']} x {row['side']}", row) for row in time["scales"]]
    rows += [
        ("all tokens", time["tokens"]),
        ("autoencoder", time["decode"]),
        ("image", time["image"]),
    ]
    for name, row in rows:
        yield (
            f"    {name:24}{row['ours_ms']:10.1f}{row['other_ms']:16.1f}{row['ratio']:8.3f}"
            f"{row['cpu']:8.3f}"
        )
    yield (
        f"    target: at most 0.9; {100 * time['same_tokens']:.1f} % of the tokens are the same "
        "(rounding can turn one, and those after it)"
    )


def _memory_lines(memory: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "(b) most memory during an image, MiB; ours / other (target of keys and values: 0.65)"
    for name, key in (("keys and values", "kv"), ("process, above weights", "process")):
        sizes = [memory[way][f"{key}_bytes"] for way in WAYS]
        if memory[f"{key}_ratio"] is not None:
            ours, other = (size / MIB for size in sizes)
            yield f"    {name:24}{ours:10.1f}{other:16.1f}{memory[f'{key}_ratio']:8.3f}"


def _about(var: VARModel, batch: int, repeats: int) -> dict[str, Any]:
    return {
        "depth": var.config.depth,
        "width": var.config.width,
        "tokens": var.config.ends[-1],
        "parameters": sum(p.numel() for p in var.parameters()),
        "dtype": str(var.dtype).removeprefix("torch."),
        "batch": batch,
        "machine": capabilities().to_json(),
        "load_before": load_average(),
        "repeats": repeats,
    }


def _say(what: str) -> None:
    print(f"bench: {what} ...", file=sys.stderr, flush=True)
