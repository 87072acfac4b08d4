"""What the cache core costs by itself, without a model: `streamgen bench cache`.

(a) update   bytes written, storages made and time of a chunk's K/V updates, against the ways of
             other projects (`peers`), at the shape of a real model
(b) handles  microseconds of the pool's, the table's and the index's verbs
(c) memory   what paging and sharing save for lengths as of ShareGPT and Alpaca (`allocation`)
(d) tiers    round trips of a block through host memory and disk, verified

Bytes and storages are counted, not timed, and are the same on every machine. Times are medians of
interleaved repeats; the ratios are the point.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from streamgen.apps.bench.allocation import run_allocation
from streamgen.apps.bench.others import measure_others
from streamgen.apps.bench.peers import PEERS, Lane, Peer
from streamgen.apps.bench.steps import turned
from streamgen.apps.bench.traffic import Traffic
from streamgen.cache import Append, BlockPool, BlockTable, KVSpec, SinkWindow
from streamgen.cache.keys import Fingerprint
from streamgen.cache.prefix import PrefixIndex
from streamgen.cache.tier import DiskTier, HostTier, Tier, Tiers, fingerprint
from streamgen.device import capabilities
from streamgen.engine import Engine

STEPS = 4  # denoising passes over a chunk, before the clean one


@dataclass(frozen=True)
class Shape:
    """A cache to update: by default four layers of Wan2.1 1.3B at 480p."""

    layers: int = 4
    heads: int = 12
    head_dim: int = 128
    frame_tokens: int = 1560
    chunk: int = 1
    sink: int = 1
    window: int = 7
    dtype: torch.dtype = torch.bfloat16

    @property
    def spec(self) -> KVSpec:
        """As the pool takes it."""
        return KVSpec(self.layers, self.heads, self.head_dim, self.frame_tokens, self.dtype)

    def as_engine(self) -> Engine:
        """What the peers ask of an engine: shapes, and for ours a table."""
        pool = BlockPool(self.spec, self.window + self.sink)
        policy = SinkWindow(self.sink, self.window)
        engine = SimpleNamespace(
            pool=pool,
            config=SimpleNamespace(sink=self.sink, window=self.window),
            grid=(1, self.frame_tokens),
            device=torch.device("cpu"),
            table=lambda: BlockTable(pool, policy),
            history=lambda chunk: SimpleNamespace(seconds=0.0),
        )
        return cast(Engine, engine)


class Updates:
    """One cache that gets chunk after chunk of ready-made keys and values."""

    def __init__(self, kind: type[Lane] | type[Peer], shape: Shape) -> None:
        self.shape, self.cache = shape, kind(shape.as_engine())
        size = (1, shape.chunk * shape.frame_tokens, shape.heads, shape.head_dim)
        self.k = torch.ones(size, dtype=shape.dtype)
        self.v = torch.ones(size, dtype=shape.dtype)

    def chunk(self) -> None:
        """All passes of the next chunk, the clean one last."""
        self.cache.begin(self.shape.chunk)
        for _ in range(STEPS + 1):
            for layer in range(self.shape.layers):
                self.cache.update(layer, self.k, self.v)
        self.cache.commit()

    def close(self) -> None:
        """Give the memory back."""
        self.cache.close()


@torch.inference_mode()
def measure_updates(shape: Shape, repeats: int) -> dict[str, Any]:
    """Counts and milliseconds of a chunk of every cache, once its window rolls."""
    mandatory = (STEPS + 1) * shape.chunk * shape.spec.block_bytes
    caches = {name: Updates(kind, shape) for name, kind in PEERS.items()}
    counts: dict[str, Traffic] = {}
    for name, cache in caches.items():
        for _ in range(shape.window // shape.chunk + 2):
            cache.chunk()
        with Traffic() as counts[name]:
            cache.chunk()
    source = caches["ours"].k
    targets = [torch.empty_like(source) for _ in range(2 * shape.layers)]
    names = ["memcpy", *caches]
    times: dict[str, list[float]] = {name: [] for name in names}
    work: dict[str, Callable[[], None]] = {name: cache.chunk for name, cache in caches.items()}
    work["memcpy"] = partial(_copy, source, targets * (STEPS + 1))
    for index in range(repeats):
        for name in turned(names, index):
            times[name].append(_milliseconds(work[name]))
    for cache in caches.values():
        cache.close()
    ours = times["ours"]
    return {
        "mandatory_bytes": mandatory,
        "memcpy_ms": median(times["memcpy"]),
        "caches": {
            name: {
                "storages": counts[name].storages,
                "allocated_bytes": counts[name].allocated,
                "written_bytes": counts[name].written,
                "written_ratio": counts[name].written / mandatory,
                "ms": median(times[name]),
                "ratio": median(a / b for a, b in zip(times[name], ours, strict=True)),
                "memcpy_ratio": median(
                    a / b for a, b in zip(times[name], times["memcpy"], strict=True)
                ),
            }
            for name in caches
        },
    }


def _copy(source: Tensor, targets: list[Tensor]) -> None:
    for target in targets:
        target.copy_(source)


def _milliseconds(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    return 1000 * (perf_counter() - start)


# (b) Handles


def measure_handles(repeats: int, blocks: int = 300) -> dict[str, float]:
    """Microseconds of each verb on a pool of `blocks` text blocks; medians over the repeats."""
    spec = KVSpec(1, 1, 8, 16)
    pool = BlockPool(spec, blocks)
    table = BlockTable(pool, Append(blocks // 2))
    with table.chunk(100) as chunk:
        chunk.write(0, *torch.zeros(2, 1600, 1, 8))
        chunk.commit()
    rolling, row = BlockTable(pool, SinkWindow(1, 7)), torch.zeros(2, 16, 1, 8)
    index_pool = BlockPool(spec, 160)
    # Token ids packed as bytes compare as fast as memory is read; a list of ints is slower.
    index = PrefixIndex(index_pool, Fingerprint(model="bench", spec=spec), block_symbols=8 * 16)
    symbols = array("q", range(2560)).tobytes()
    shared = index_pool.alloc(160)
    for block in shared:
        block.sealed = True
    index.insert(symbols, shared)

    def free(number: int) -> None:
        pool.release_all(pool.alloc(number))

    def roll(writes: int) -> None:
        with rolling.chunk(1) as chunk:
            for _ in range(writes):
                chunk.write(0, *row)
            chunk.commit()

    def match() -> None:
        index_pool.release_all(index.match(symbols)[0])

    verbs: dict[str, tuple[Callable[[], Any], int]] = {
        "alloc + free, one block": (partial(free, 1), 1),
        "alloc + free, a block in bulk": (partial(free, 100), 100),
        "fork + close, 100 blocks": (lambda: table.fork().close(), 1),
        "reserve + dissolve a run of 8": (lambda: pool.dissolve(pool.reserve(8)), 1),
        "sink + window: begin + commit": (partial(roll, 1), 1),
        "prefix match + release, 2,560 tokens": (match, 1),
        "prefix insert, 2,048 shared": (
            partial(index.insert, symbols[: 8 * 2048], shared[:128]),
            1,
        ),
    }
    two_writes = {"two": (partial(roll, 2), 1)}
    found = _microseconds({**verbs, **two_writes}, repeats)
    # A chunk can't be committed unwritten: what one write takes goes off.
    begin = "sink + window: begin + commit"
    found[begin] = max(0.0, 2 * found[begin] - found.pop("two"))
    for held in (table, rolling):
        held.close()
    return found


def _microseconds(
    verbs: dict[str, tuple[Callable[[], Any], int]], repeats: int, calls: int = 200
) -> dict[str, float]:
    """Median microseconds of a call divided by what it does; the verbs take turns."""
    times: dict[str, list[float]] = {name: [] for name in verbs}
    for index in range(repeats):
        for name in turned(list(verbs), index):
            verb, parts = verbs[name]
            start = perf_counter()
            for _ in range(calls):
                verb()
            times[name].append(1e6 * (perf_counter() - start) / calls / parts)
    return {name: median(values) for name, values in times.items()}


# (d) Tiers


def measure_tiers(spec: KVSpec, repeats: int, blocks: int = 4) -> dict[str, Any]:
    """MB/s out of the pool and back, verified, for host memory and a local disk."""
    pool = BlockPool(spec, blocks)
    held = pool.alloc(blocks)
    for block in held:
        block.sealed = True
    rates: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        name = fingerprint(spec=repr(spec))
        kinds: dict[str, Tier] = {
            "host memory": HostTier(capacity=2 * blocks * pool.payload_bytes),
            "disk, fsync": DiskTier(folder, name),
        }
        tiers = {kind: Tiers(pool, [tier]) for kind, tier in kinds.items()}
        for index in range(repeats):
            for kind in turned(list(tiers), index):
                row = rates.setdefault(kind, {"out": [], "back": []})
                for way, verb in (("out", tiers[kind].demote), ("back", tiers[kind].promote)):
                    ms = sum(_milliseconds(partial(verb, block)) for block in held)
                    row[way].append(blocks * pool.payload_bytes / 1e3 / ms)
        for opened in tiers.values():
            opened.close()
    return {
        "block_bytes": pool.payload_bytes,
        "mb_per_second": {
            kind: {way: median(values) for way, values in row.items()}
            for kind, row in rates.items()
        },
    }


# The report


def run(repeats: int = 7, json_path: Path | None = None, quick: bool = False) -> dict[str, Any]:
    """Measure, print a table, and return (and write) the report.

    Args:
        repeats: interleaved repeats of every figure; medians count.
        json_path: where to write the report.
        quick: as little as there can be, to see that it runs; its figures mean nothing.
    """
    shape = Shape(layers=1, frame_tokens=16) if quick else Shape()
    repeats = 1 if quick else repeats
    report: dict[str, Any] = {
        "machine": capabilities().to_json(),
        "repeats": repeats,
        "update": measure_updates(shape, repeats),
        "handles": measure_handles(repeats),
        "others": measure_others(repeats),
        "allocation": run_allocation(quick=quick).as_dict(),
        "tiers": measure_tiers(shape.spec, repeats),
    }
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(_lines(report)))
    return report


def _lines(report: dict[str, Any]) -> Iterator[str]:
    machine, update = report["machine"], report["update"]
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"torch {machine['torch']}; {report['repeats']} repeats"
    )
    mandatory = update["mandatory_bytes"]
    yield ""
    yield (
        f"(a) K/V updates of a chunk: {mandatory / 1e6:.1f} MB must be written, which plain copies "
        f"do in {update['memcpy_ms']:.1f} ms"
    )
    yield f"    {'':16}{'storages':>10}{'allocated':>11}{'written':>9}{'ms':>10}{'to ours':>9}"
    for name, row in update["caches"].items():
        yield (
            f"    {name:16}{row['storages']:10}{row['allocated_bytes'] / mandatory:10.2f}x"
            f"{row['written_ratio']:8.2f}x{row['ms']:10.1f}{row['ratio']:8.2f}x"
        )
    yield f"    ours to plain copies: {update['caches']['ours']['memcpy_ratio']:.2f}x"
    yield ""
    yield "(b) handles, microseconds"
    for name, us in (report["handles"] | report["others"]).items():
        yield f"    {name:48}{us:8.2f}" if us is not None else f"    {name}"
    yield ""
    yield "(c) memory"
    yield from (f"    {line}" for line in report["allocation"]["lines"])
    tiers = report["tiers"]
    yield ""
    yield f"(d) tiers, blocks of {tiers['block_bytes'] / 1e6:.1f} MB, verified; MB/s"
    for name, row in tiers["mb_per_second"].items():
        yield f"    {name:16}out {row['out']:8.0f}    back {row['back']:8.0f}"
