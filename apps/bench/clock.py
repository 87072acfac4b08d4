"""Time of some work on a machine that has other work too: on the clock, and of the processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter, process_time
from typing import TypeVar

import torch

Done = TypeVar("Done")
Spent = tuple[float, float]
"""Milliseconds on the clock, and of this process's processors."""


def timed(work: Callable[[], Done]) -> tuple[Done, Spent]:
    """What some work gives, and what it takes."""
    clock, processor = perf_counter(), process_time()
    done = work()
    return done, (1000 * (perf_counter() - clock), 1000 * (process_time() - processor))


def total(spent: Sequence[Spent]) -> Spent:
    """The sum of both times."""
    return sum(a for a, _ in spent), sum(b for _, b in spent)


def ratios(one: Sequence[Spent], other: Sequence[Spent]) -> Spent:
    """How much longer the one takes, by both times: medians over pairs that were timed in turns."""
    pairs = list(zip(one, other, strict=True))
    by_clock, by_processor = (
        median(a[i] / b[i] if b[i] else 1.0 for a, b in pairs) for i in (0, 1)
    )
    return by_clock, by_processor


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """So many CPU threads inside, and behind it as many as before; None changes nothing."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
