"""Tokens in the making: the pending end of a `TokenTable`, the only rows of it that are written."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from streamgen.cache.notes import Ints
from streamgen.cache.spec import KVSpec
from streamgen.cache.tree import TokenTree
from streamgen.errors import InvalidRequest

if TYPE_CHECKING:
    from streamgen.cache.tokens import TokenTable


class Tail:
    """The pending tokens of a table, from `table.extend(n)` or `table.scratch(tree)`.

    A transformer makes its K and V layer by layer, and each layer attends to its own at once:

        with table.extend(n) as tail:
            for index, layer in enumerate(layers):
                ...  # tail.write(index, k, v); attend(q, *tail.kv(index), tail.mask())
            tail.commit()

    As a context manager it aborts on leaving unless it was committed.

    Attributes:
        start: tokens before the tail.
        positions: of the pending tokens, int64 `[n]` (`[n, axes]` if the table has several axes).
        tree: their tree; None for a plain run, each token after the one before.
    """

    def __init__(self, table: TokenTable, positions: Ints, tree: TokenTree | None) -> None:
        self.start = table.length
        self.positions = positions
        self.tree = tree
        self._table = table
        self._open = True
        self._unwritten = set(range(table.pool.spec.num_layers))

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def kv_positions(self) -> Ints:
        """Positions of everything that `kv` returns: to rotate keys that are stored un-rotated."""
        return np.concatenate((self._table.positions, self.positions))

    def mask(self) -> Tensor:
        """What each pending token sees, bool `[n, start + n]`: all before, and causally the tail.

        In a tree that is its ancestors and itself.
        """
        if self.tree is not None:
            return self.tree.mask(self.start)
        n = len(self)
        return torch.ones(n, self.start + n, dtype=torch.bool).tril(self.start)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the pending K and V of one layer, as often as needed.

        Args:
            layer: index of the layer.
            k, v: `[n, kv_heads, head_dim]` in the pool's dtype; a tree in depth-first order.

        Raises:
            InvalidRequest: another shape or dtype, or the tail is over.
        """
        self._expect_open()
        spec = self._table.pool.spec
        shape = (len(self), spec.kv_heads, spec.head_dim)
        expect_tensor("k", k, shape, spec.dtype)
        expect_tensor("v", v, shape, spec.dtype)
        self._table._store(layer, self.start, k, v)
        self._unwritten.discard(layer)

    def kv(self, layer: int, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """K and V of the whole sequence, pending tokens last: `[start + n, kv_heads, head_dim]`.

        As `TokenTable.gather`: a view if the blocks are neighbours, else a copy, in `out` if given.
        """
        self._expect_open()
        return self._table._read(layer, self.start + len(self), out)

    # The end

    def commit(self, count: int | None = None) -> None:
        """Make the pending tokens part of the sequence, or only the first `count` of them.

        So a prompt that is only there to ask for attention (HERMES' guidance) can ride behind a
        chunk in one pass and be left out.

        Raises:
            InvalidRequest: a layer was never written, the tail is a tree or over, or it has fewer
                tokens.
        """
        self._expect_whole()
        if self.tree is not None:
            raise InvalidRequest("the tail is a token tree: choose a path with accept(path)")
        count = len(self) if count is None else count
        if not 0 <= count <= len(self):
            raise InvalidRequest(f"commit({count}): {len(self)} tokens are pending")
        self._end(self.positions[:count])

    def accept(self, path: Iterable[int]) -> None:
        """Keep this path of the tree, and nothing else of it.

        Its rows move up to the front of the tail; none moves if the path comes first in depth-first
        order. Positions are prefix + depth, so they are right as they are, and so are rotated keys.

        Args:
            path: nodes from a root down, by their depth-first numbers; may be empty.

        Raises:
            InvalidRequest: no such path, no tree, a layer was never written, or the tail is over.
        """
        self._expect_whole()
        if self.tree is None:
            raise InvalidRequest("the tail is no token tree: use commit(count)")
        nodes = np.array(self.tree.expect_path(path), dtype=np.int64)
        self._table._carry(self.start + nodes, self.start + np.arange(len(nodes)))
        self._end(self.positions[nodes])

    def abort(self) -> None:
        """Leave nothing of the tail. Idempotent.

        If the sequence's last block was shared and had to be copied, the copy stays in its place.
        """
        if self._open:
            self._end(self.positions[:0])

    def __enter__(self) -> Tail:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    # Helpers

    def _end(self, positions: Ints) -> None:
        self._open = False
        self._table._finish(positions)

    def _expect_open(self) -> None:
        if not self._open:
            raise InvalidRequest(f"the tail behind token {self.start} is over")

    def _expect_whole(self) -> None:
        self._expect_open()
        if self._unwritten:
            layers = sorted(self._unwritten)
            raise InvalidRequest(f"layers {layers} of the pending tokens were not written")


def expect_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise InvalidRequest unless the tensor has this shape and dtype."""
    if tensor.shape != shape or tensor.dtype != dtype:
        raise InvalidRequest(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype}; accepted: {shape} {dtype}"
        )


def expect_raw(spec: KVSpec) -> None:
    """Raise InvalidRequest unless K/V are stored as they are: tokens are written one by one, and
    a codec takes whole blocks once."""
    if spec.codec != "raw":
        raise InvalidRequest(f"codec={spec.codec}: a table of tokens needs a raw pool")
