"""What belongs to a token besides its bytes: three integers that follow every edit."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from streamgen.errors import InvalidRequest

Ints = npt.NDArray[np.int64]

SUMMARY = -1  # the id of a summary token

ID, WEIGHT, POSITION = 0, 1, 2  # columns; a position takes as many as it has axes


class TokenNotes:
    """Position, weight and id of the tokens of one sequence.

    Args:
        axes: integers of a position: 1 for text, 3 for time, height and width.

    Raises:
        InvalidRequest: fewer than one axis.
    """

    def __init__(self, axes: int = 1) -> None:
        if axes < 1:
            raise InvalidRequest(f"axes={axes}: at least 1 is needed")
        self.axes = axes
        self._position: int | slice = POSITION if axes == 1 else slice(POSITION, None)
        self._rows = np.empty((0, POSITION + axes), np.int64)  # more than...
        self._count = 0  # ... are in use, so that appending is cheap
        self._next_id = 0

    def __len__(self) -> int:
        return self._count

    @property
    def positions(self) -> Ints:
        """A copy, int64 `[n]` or `[n, axes]`."""
        return np.array(self._rows[: self._count, self._position])

    @property
    def weights(self) -> Ints:
        """How many tokens each one stands for: a copy, int64 `[n]`."""
        return np.array(self._rows[: self._count, WEIGHT])

    @property
    def ids(self) -> Ints:
        """Which token of the stream each one is, never used twice; -1 for a summary: a copy."""
        return np.array(self._rows[: self._count, ID])

    @property
    def next_position(self) -> int:
        """One more than the largest position on any axis; 0 if there is none."""
        return int(self._rows[: self._count, self._position].max(initial=-1)) + 1

    def ahead(self, steps: npt.ArrayLike) -> Ints:
        """Positions `steps` behind `next_position`, alike on all axes."""
        at = self.next_position + np.asarray(steps, dtype=np.int64)
        return at if self.axes == 1 else np.repeat(at[:, None], self.axes, axis=1)

    def accept_positions(self, positions: npt.ArrayLike, n: int) -> Ints:
        """Positions of `n` tokens as an array.

        Raises:
            InvalidRequest: another shape or type, or a negative one.
        """
        given = np.asarray(positions)
        shape = (n,) if self.axes == 1 else (n, self.axes)
        if given.shape != shape or (given.size and given.dtype.kind not in "iu"):
            raise InvalidRequest(
                f"positions are {given.shape} {given.dtype}; accepted: {shape} integers"
            )
        if given.size and given.min() < 0:
            raise InvalidRequest(f"position {given.min()}: none may be negative")
        return given.astype(np.int64)

    def accept_indices(self, tokens: npt.ArrayLike) -> Ints:
        """Indices of tokens as an array.

        Raises:
            InvalidRequest: they don't ascend, or there is no such token.
        """
        given = np.asarray(tokens)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise InvalidRequest(f"token indices are {given.shape} {given.dtype}: a list is needed")
        found = given.astype(np.int64)
        if found.size and (found[0] < 0 or found[-1] >= len(self) or (np.diff(found) < 1).any()):
            shown = ", ".join(str(at) for at in found[:8]) + (", ..." if len(found) > 8 else "")
            raise InvalidRequest(
                f"token indices must ascend within 0..{len(self) - 1}, none twice; got [{shown}]"
            )
        return found

    # Edits

    def append(self, positions: Ints) -> None:
        """New tokens of weight 1, with the next ids."""
        n = len(positions)
        ids = np.arange(self._next_id, self._next_id + n)
        self._next_id += n
        self._append(ids, 1, positions)

    def append_summary(self, position: int | Sequence[int], weight: int) -> None:
        """One token that stands for `weight` others."""
        self._append(np.array([SUMMARY]), weight, np.array([position]))

    def _append(self, ids: Ints, weight: int, positions: Ints) -> None:
        end = self._count + len(ids)
        if end > len(self._rows):
            more = np.empty((max(len(ids), self._count), self._rows.shape[1]), np.int64)
            self._rows = np.concatenate((self._rows[: self._count], more))
        rows = self._rows[self._count : end]
        rows[:, ID], rows[:, WEIGHT], rows[:, self._position] = ids, weight, positions
        self._count = end

    def keep(self, kept: Ints) -> None:
        """Drop all others."""
        self._rows[: len(kept)] = self._rows[kept]
        self._count = len(kept)

    def truncate(self, n: int) -> None:
        """Drop all but the first `n`."""
        self._count = n

    def renumber(self, positions: Ints) -> None:
        """Replace all positions."""
        self._rows[: self._count, self._position] = positions

    def copy(self) -> TokenNotes:
        """The same notes to be edited apart."""
        twin = copy(self)
        twin._rows = self._rows[: self._count].copy()
        return twin
