"""The same verbs in vLLM's `BlockPool` and SGLang's `RadixCache`, where those packages are found.

Never a dependency: only the files named in `FILES` are loaded, by themselves, and everything else
of their package is a stand-in. So a wheel that was installed without what it needs will do
(`pip install --no-deps vllm sglang`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from statistics import median
from time import perf_counter
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

FILES = {
    "vllm": ("vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_utils"),
    "sglang": tuple(
        f"sglang.srt.mem_cache.{name}"
        for name in (
            "radix_cache",
            "base_prefix_cache",
            "cache_init_params",
            "evict_policy",
            "utils",
        )
    ),
}


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _StandIns(MetaPathFinder, Loader):
    """Finds a stand-in for every module of a package but the `real` ones and their folders."""

    def __init__(self, package: str, real: tuple[str, ...]) -> None:
        self.package, self.real = package, real
        self.folders = list(importlib.util.find_spec(package).submodule_search_locations)  # type: ignore[union-attr, arg-type]

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self.package or fullname in self.real:
            return None
        spec = ModuleSpec(fullname, self, is_package=True)
        inner = fullname.split(".")[1:]
        spec.submodule_search_locations = ["/".join([x, *inner]) for x in self.folders]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in is complete."""


@contextmanager
def alone(package: str) -> Iterator[Callable[[str], ModuleType] | None]:
    """Yields an importer of the package's `FILES`, or None where the package is not installed."""
    loaded = package in sys.modules
    if loaded or importlib.util.find_spec(package) is None:
        yield importlib.import_module if loaded else None
        return
    finder = _StandIns(package, FILES[package])
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            del sys.modules[name]


def measure_others(repeats: int, blocks: int = 300, calls: int = 200) -> dict[str, float | None]:
    """Microseconds of what `measure_handles` measures of ours; None: the package is not there."""
    found: dict[str, float | None] = {}
    for package, verbs in (("vllm", _vllm), ("sglang", _sglang)):
        with alone(package) as load:
            if load is None:
                found[f"{package}: not installed"] = None
                continue
            try:
                table = verbs(load, blocks)
            except (ImportError, AttributeError, TypeError) as error:  # a version of another shape
                found[f"{package}: this version can't be loaded alone ({error})"] = None
                continue
            for name, (verb, parts) in table.items():
                found[f"{package}: {name}"] = _median(verb, parts, repeats, calls)
    return found


def _median(verb: Callable[[], Any], parts: int, repeats: int, calls: int) -> float:
    times = []
    for _ in range(repeats):
        start = perf_counter()
        for _ in range(calls):
            verb()
        times.append(1e6 * (perf_counter() - start) / calls / parts)
    return median(times)


Verbs = dict[str, tuple[Callable[[], Any], int]]


def _vllm(load: Callable[[str], ModuleType], blocks: int) -> Verbs:
    pool = load("vllm.v1.core.block_pool").BlockPool(blocks, True, 16)
    held = pool.get_new_blocks(100)

    def free(number: int) -> None:
        pool.free_blocks(pool.get_new_blocks(number))

    def fork() -> None:
        pool.touch(held)
        pool.free_blocks(held)

    return {
        "alloc + free, one block": (lambda: free(1), 1),
        "alloc + free, a block in bulk": (lambda: free(100), 100),
        "fork + close, 100 blocks (touch + free)": (fork, 1),
    }


def _sglang(load: Callable[[str], ModuleType], blocks: int) -> Verbs:
    from array import array

    import torch

    radix = load("sglang.srt.mem_cache.radix_cache")
    base = load("sglang.srt.mem_cache.base_prefix_cache")
    cache = radix.RadixCache.create_simulated(page_size=16)

    def key(length: int) -> Any:
        return radix.RadixKey(array("q", range(length)), None)

    long, short, slots = key(2560), key(2048), torch.arange(2560)
    cache.insert(base.InsertParams(key=long, value=slots))
    insert = base.InsertParams(key=short, value=slots[:2048])
    return {
        "prefix match, 2,560 tokens": (
            lambda: cache.match_prefix(base.MatchPrefixParams(key=long)),
            1,
        ),
        "prefix insert, 2,048 shared": (lambda: cache.insert(insert), 1),
    }
