"""How far a long run is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Self, TextIO

EVERY = 5.0  # seconds between two lines


class Progress:
    """Chunks, frames a second and the time that is left, on the error stream.

    Args:
        chunks, frames: how many there will be.
        quiet: say nothing.
        to: where to; the error stream by default.
    """

    def __init__(
        self, chunks: int, frames: int, *, quiet: bool = False, to: TextIO | None = None
    ) -> None:
        self._to = to or sys.stderr
        self._chunks, self._frames, self._quiet = chunks, frames, quiet
        self._made = self._done = 0
        self._start = self._said = time.monotonic()
        self._bar: Any = None
        if not quiet and self._to.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=chunks, unit="chunk", file=self._to)

    def add(self, frames: int) -> None:
        """One more chunk of so many frames is made."""
        self._done += 1
        self._made += frames
        now = time.monotonic()
        rate = self._made / max(now - self._start, 1e-9)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{rate:.1f} frames/s", refresh=False)
            self._bar.update()
        elif not self._quiet and now - self._said >= EVERY:
            self._said = now
            left = (self._frames - self._made) / rate
            print(
                f"chunk {self._done} of {self._chunks}, frame {self._made} of {self._frames}, "
                f"{rate:.1f} frames/s, {left:.0f} s left",
                file=self._to,
                flush=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
