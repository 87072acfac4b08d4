"""How benchmarks walk: keys as a player presses them, and where a walk is before time counts."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TypeVar

from streamgen.engine import WorldConfig
from streamgen.sampling.schedule import FewStep
from streamgen.session import Session

HOLD = 4  # chunks for which a key is held
SETTLE = 5  # chunks that are not counted, after a window is full or something is new

T = TypeVar("T")


def press(session: Session) -> None:
    """Another key every few chunks, as a player does."""
    chunk, keys = session.frame // session.config.chunk_frames, session.config.keys
    if keys and chunk % HOLD == 0:
        session.act(keys={keys[chunk // HOLD % len(keys)]})


def chunks_to_fill(config: WorldConfig) -> int:
    """Chunks after which the window is full and its caches are warm."""
    return -(-config.window // config.chunk_frames) + SETTLE


def settle(session: Session, chunks: int | None = None) -> None:
    """Step, uncounted, so many chunks, or until the window is full."""
    for _ in range(chunks_to_fill(session.config) if chunks is None else chunks):
        press(session)
        session.step()


def advance(session: Session, frame: int) -> None:
    """Walk on to `frame` by real chunks, keys and history and all, but with one denoising step."""
    config = session.config
    once = FewStep(config.schedule.steps[:1], config.schedule.shift, config.schedule.warp)
    session.config = replace(config, schedule=once, first_schedule=once)
    try:
        while session.frame < frame:
            press(session)
            session.step()
    finally:
        session.config = config


def turned(items: Sequence[T], by: int) -> list[T]:
    """The items in an order of their own for every number, so that none always comes first, or
    always after the same other one and into the processor caches that it left behind."""
    return Random(by).sample(list(items), len(items))


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM; None where the system does not tell (not Linux)."""
    gc.collect()
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def load_average() -> float | None:
    """Processes that wanted to run in the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
