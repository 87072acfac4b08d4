"""Several continuations of one sequence: parallel samples, beams, and what their sharing saves.

PagedAttention §4.4: samples of one prompt share its blocks; beams also share what came after it,
and which ones do changes with every step. Both are forks and closes; reference counts do the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamgen.cache.tokens import TokenTable
from streamgen.errors import InvalidRequest


def select(tables: Sequence[TokenTable], parents: Sequence[int]) -> list[TokenTable]:
    """The next generation: one fork per parent, then all the old tables are closed. No bytes.

    `select(beams, parents)` is a step of beam search. `select([prompt], [0] * n)` starts `n`
    parallel samples.

    Args:
        tables: the sequences; none is usable afterwards.
        parents: index of a table for each new sequence, in any order and as often as needed.

    Raises:
        InvalidRequest: an index is out of range, or a chosen table is closed or has a pending tail;
            nothing has changed.
    """
    wrong = sorted(set(parents) - set(range(len(tables))))
    if wrong:
        raise InvalidRequest(f"parents {wrong}: there are tables 0..{len(tables) - 1}")
    children: list[TokenTable] = []
    try:
        for parent in parents:
            children.append(tables[parent].fork())
    except InvalidRequest:
        for child in children:
            child.close()
        raise
    for table in tables:
        table.close()
    return children


@dataclass(frozen=True)
class Sharing:
    """Blocks of several sequences.

    Attributes:
        logical: blocks counted once per sequence that uses them.
        physical: blocks that exist.
    """

    logical: int
    physical: int

    @property
    def saved(self) -> float:
        """Share of the blocks that sharing saves (PagedAttention §6.3, fig. 15)."""
        return 1 - self.physical / self.logical if self.logical else 0.0


def sharing(tables: Sequence[TokenTable]) -> Sharing:
    """How many blocks these sequences use, with and without sharing, wherever they are."""
    used = [block for table in tables for block in table.blocks]
    return Sharing(logical=len(used), physical=len(set(used)))
