"""What part of a chunk is not matrix multiplication, attention or convolution."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from torch.profiler import ProfilerActivity, profile

from streamgen.apps.bench.steps import press, settle
from streamgen.pipelines.world import WorldPipeline
from streamgen.session import Session

_HEAVY = re.compile(
    r"::_?((add|b|badd)?mm|addmm_activation|matmul|linear(_pointwise)?|mkl(dnn)?_linear\w*"
    r"|\w*convolution\w*|slow_conv\w*|conv[123]d|\w*scaled_dot_product\w*"
    r"|\w*flash_attention\w*)$"
)


def measure_share(world: WorldPipeline, repeats: int, chunks: int = 4) -> dict[str, Any] | None:
    """What part of `Session.step` is not matrix multiplication, attention or convolution.

    The time inside each tensor operation comes from torch's profiler, the time of a chunk from
    another one without it, in turns. The profiler adds a little to every operation, which matters
    for the many small ones: `elementwise` is an upper bound, and `python`, which is what is left,
    a lower one. `python_and_cache` adds all time the session counts as the cache's, so the Python
    in there counts twice. `strict` is everything but matmul, attention and convolution.

    Returns:
        Shares of a chunk, 0..1, medians over `repeats` x `chunks` pairs. None on an accelerator,
        where operations run beside Python.
    """
    if world.engine.device.type != "cpu":
        return None
    found: dict[str, list[float]] = {}
    with world.session(seed=1) as session:
        settle(session)
        for _ in range(repeats * chunks):
            press(session)
            timing = session.step().timing
            heavy, light = _profiled(session)
            shares = {
                "matmul_attention_convolution": heavy / timing.total,
                "elementwise": light / timing.total,
                "python": max(0.0, 1 - (heavy + light) / timing.total),
                "cache": timing.cache / timing.total,
            }
            shares["python_and_cache"] = shares["python"] + shares["cache"]
            shares["strict"] = 1 - shares["matmul_attention_convolution"]
            for name, share in shares.items():
                found.setdefault(name, []).append(share)
    return {name: median(values) for name, values in found.items()}


def _profiled(session: Session) -> tuple[float, float]:
    """Milliseconds inside heavy operations, and inside all others, of the next chunk."""
    press(session)
    with _silent(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        session.step()
    heavy = light = 0.0
    for event in profiler.key_averages():
        if "::" in event.key:
            ms = event.self_cpu_time_total / 1000
            heavy, light = (heavy + ms, light) if is_heavy(event.key) else (heavy, light + ms)
    return heavy, light


def is_heavy(operation: str) -> bool:
    """Whether a tensor operation, such as "aten::addmm", is matmul, attention or convolution."""
    return _HEAVY.search(operation) is not None


@contextmanager
def _silent() -> Iterator[None]:
    """Drop what the profiler's own library writes to the error stream when it starts and stops."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
