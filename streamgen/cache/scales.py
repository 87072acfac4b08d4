"""Next-scale images (VAR, arXiv 2404.02905): one open block per image, filled scale by scale.

An image is a series of square token maps, 1x1, 2x2, ... Each is made in one step and sees all
coarser ones and the whole of itself, so attention needs no mask, and since the lengths are known
beforehand, no concatenation: keys and values are written where they stay.

    lengths of VAR's ten scales     1  5  14  30  55  91  155  255  424  680

The rows of a batch are the images times the branches of classifier-free guidance: conditions first,
then unconditions, as VAR orders them. Their blocks are neighbours, so a whole batch is one strided
view. The branches share tokens but no keys or values: they differ from the first layer on (class
token, adaptive norm).

Axes: R rows, N tokens of a scale, U tokens up to and with it, H K/V heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import TracebackType

import torch
from torch import Tensor

from streamgen.cache.pool import Block, BlockPool
from streamgen.errors import InvalidRequest

VAR_256 = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)


def block_tokens(patch_nums: Sequence[int], store_last: bool = True) -> int:
    """Tokens of the block of one image: those of all scales, or of all but the last.

    For VAR at 256 pixels (`VAR_256`) 680, or 424 without the last scale.

    Raises:
        InvalidRequest: there is no scale, or one has no tokens.
    """
    if not patch_nums or min(patch_nums) < 1:
        raise InvalidRequest(f"patch_nums={tuple(patch_nums)}: at least one positive side length")
    stored = patch_nums if store_last else patch_nums[:-1]
    return sum(side * side for side in stored)


class NextScale:
    """The K/V of one batch of images in the making.

        with NextScale(pool, rows=2 * B, patch_nums=VAR_256) as cache:
            for scale in range(len(VAR_256)):
                cache.begin(scale)
                ...  # per layer: cache.write(layer, k, v); attend(q, *cache.kv(layer))
                cache.commit()

    Nobody reads the last scale's keys and values once its own step is over. With `store_last=False`
    they are not stored and the blocks are shorter by it (424 tokens of 680). During that one step
    attention reads from a staging buffer, one layer long and used by all layers in turn, into which
    what is stored is copied; the other scales stay free of copies. `parts`, in place of `write` and
    `kv`, needs a buffer for half of the rows only.

    Args:
        pool: raw; its spec has the `block_tokens` that the function of that name gives.
        rows: images times branches.
        patch_nums: side length of each scale, in tokens.
        store_last: keep the last scale, too.

    Attributes:
        lengths: tokens up to and with each scale.
        scale: the next scale to begin; their number when the images are done.

    Raises:
        InvalidRequest: a number doesn't fit; the message says what would.
        PoolFull: there are no `rows` neighbouring blocks.
    """

    def __init__(
        self, pool: BlockPool, rows: int, patch_nums: Sequence[int], store_last: bool = True
    ) -> None:
        tokens = block_tokens(patch_nums, store_last)
        if pool.spec.block_tokens != tokens:
            raise InvalidRequest(
                f"the pool's blocks have {pool.spec.block_tokens} tokens; patch_nums="
                f"{tuple(patch_nums)} with store_last={store_last} needs {tokens}"
            )
        if rows < 1:
            raise InvalidRequest(f"rows={rows}: at least 1 image is needed")
        if pool.spec.codec != "raw":
            raise InvalidRequest(
                f"codec={pool.spec.codec!r} encodes whole blocks, while those of an image are read "
                "as they fill: take a raw pool"
            )
        self.pool = pool
        self.patch_nums = tuple(patch_nums)
        self.store_last = store_last
        self.lengths = tuple(accumulate(side * side for side in patch_nums))
        self.scale = 0
        self._pending = False
        self._unwritten: set[int] = set()
        self._staging: tuple[Tensor, Tensor] | None = None
        self._staged = -1  # the layer that lies in it
        with pool.lock:
            self._blocks = self._neighbours(rows)

    @property
    def rows(self) -> int:
        """Images times branches; 0 once closed."""
        return len(self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks and, while a last scale that is not stored is pending, of staging."""
        views = [x for layer in range(self.pool.spec.num_layers) for x in self._view(layer)]
        return sum(x.nbytes for x in (*views, *(self._staging or ())))

    @property
    def filled(self) -> int:
        """Tokens of the committed scales."""
        return self.lengths[self.scale - 1] if self.scale else 0

    # One scale

    def begin(self, scale: int) -> None:
        """Make `scale` pending; beginning it again starts it anew.

        After a `fork_after` the first of the relatives to begin a scale copies what is filled into
        blocks of its own, once (copy-on-write); the last one keeps the old blocks.

        Raises:
            InvalidRequest: it isn't the next scale, or the cache was closed.
            PoolFull: there is no room for the copy; nothing has changed.
        """
        self._expect_open()
        if scale != self.scale or scale >= len(self.lengths):
            raise InvalidRequest(
                f"scale {scale} can't begin: {self.scale} of {len(self.lengths)} scales are done"
            )
        self._own()
        self._pending = True
        self._unwritten = set(range(self.pool.spec.num_layers))
        self._staging, self._staged = None, -1

    def write(self, layer: int, k_RNHD: Tensor, v_RNHD: Tensor) -> None:
        """Store the pending scale's K and V of one layer where they stay, as often as needed.

        Raises:
            InvalidRequest: another shape or dtype than `[rows, side*side, kv_heads, head_dim]` in
                the pool's dtype, or no scale is pending.
        """
        self._expect_rows(k_RNHD, v_RNHD)
        if self._unstored:
            self._stage(layer, slice(0, self.rows), k_RNHD, v_RNHD)
            self._staged = layer
        else:
            a, b = self.filled, self.lengths[self.scale]
            with torch.no_grad():  # else writing what needs a gradient ties the pool to its graph
                for x, new in zip(self._view(layer), (k_RNHD, v_RNHD), strict=True):
                    x[:, a:b].copy_(new)
        self._unwritten.discard(layer)

    def parts(
        self, layer: int, k_RNHD: Tensor, v_RNHD: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """`write` and `kv` in one: what the pending scale sees of one layer, some rows at a time.

        That is all rows, where they lie; of a last scale that is not stored, first one half of the
        rows and then the other, each in the staging buffer until the next is asked for.

        Yields:
            Which rows, and their K and V `[rows, U, kv_heads, head_dim]`.

        Raises:
            InvalidRequest: as `write`.
        """
        if not self._unstored:
            self.write(layer, k_RNHD, v_RNHD)
            yield slice(0, self.rows), *self.kv(layer)
            return
        self._expect_rows(k_RNHD, v_RNHD)
        half = -(-self.rows // 2)
        for first in range(0, self.rows, half):
            rows = slice(first, min(first + half, self.rows))
            yield rows, *self._stage(layer, rows, k_RNHD, v_RNHD)
        self._unwritten.discard(layer)

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """What the pending scale sees of one layer: K and V `[rows, U, kv_heads, head_dim]`.

        A view of the pool, or of the staging buffer for a last scale that is not stored: then only
        the layer written last can be read.

        Raises:
            InvalidRequest: no scale is pending, or the staging buffer holds another layer.
        """
        self._expect_pending()
        if self._unstored and self._staged != layer:
            raise InvalidRequest(
                f"layer {layer} isn't staged: the last scale is not stored (store_last=False), so "
                "each layer must be read right after it was written"
            )
        k, v = self._staging if self._unstored and self._staging else self._view(layer)
        seen = self.lengths[self.scale]
        return k[:, :seen], v[:, :seen]

    def commit(self) -> None:
        """End the pending scale; from now on its keys and values never change.

        Raises:
            InvalidRequest: a layer was never written, or no scale is pending.
        """
        self._expect_pending()
        if self._unwritten:
            raise InvalidRequest(
                f"layers {sorted(self._unwritten)} of scale {self.scale} were not written"
            )
        self.scale += 1
        self._pending, self._staging = False, None

    # The whole

    def fork_after(self, scale: int) -> NextScale:
        """A variation: a second cache with the scales up to and with `scale`, to go on from there.

        Costs no bytes; the first of both to begin a scale copies (see `begin`).

        Raises:
            InvalidRequest: the scale isn't committed, another is pending, or the cache was closed.
        """
        self._expect_open()
        if self._pending:
            raise InvalidRequest(f"can't fork while scale {self.scale} is pending")
        stored = min(self.scale, len(self.lengths) - (not self.store_last))
        if not 0 <= scale < stored:
            raise InvalidRequest(f"can't fork after scale {scale}: {stored} scales are stored")
        twin = object.__new__(NextScale)
        twin.__dict__.update(self.__dict__)
        twin.scale, twin._unwritten = scale + 1, set()
        with self.pool.lock:
            for block in self._blocks:
                block.sealed = True
                self.pool.retain(block)
        twin._blocks = list(self._blocks)
        return twin

    def close(self) -> None:
        """Give all blocks back. Idempotent."""
        with self.pool.lock:
            for block in self._blocks:
                self.pool.release(block)
            self._blocks, self._staging, self._pending = [], None, False

    def __enter__(self) -> NextScale:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Helpers

    def _view(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of the blocks, `[rows, block_tokens, kv_heads, head_dim]`."""
        k, v = self.pool.rows(layer, self._blocks[0].slot, self.rows)
        shape = (self.rows, self.pool.spec.block_tokens, *k.shape[1:])
        return k.view(shape), v.view(shape)

    def _neighbours(self, rows: int) -> list[Block]:
        """New blocks in a run of slots; they hold it together, so no lane has to be kept."""
        lane = self.pool.reserve(rows)
        blocks = [self.pool.put(lane.base + row) for row in range(rows)]
        self.pool.dissolve(lane)
        return blocks

    def _own(self) -> None:
        """Make all blocks ours alone, by a copy of what is filled if a relative holds them too."""
        with self.pool.lock:
            if any(block.ref > 1 for block in self._blocks):
                shared = [self._view(layer) for layer in range(self.pool.spec.num_layers)]
                old, self._blocks = self._blocks, self._neighbours(self.rows)
                for layer, pair in enumerate(shared):
                    for target, source in zip(self._view(layer), pair, strict=True):
                        target[:, : self.filled].copy_(source[:, : self.filled])
                for block in old:
                    self.pool.release(block)
            for block in self._blocks:
                block.sealed = False

    @property
    def _unstored(self) -> bool:
        """Whether the scale is the last one and has no place in the blocks."""
        return not self.store_last and self.scale == len(self.lengths) - 1

    def _stage(
        self, layer: int, rows: slice, k_RNHD: Tensor, v_RNHD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Some rows' K and V of all scales side by side in the staging buffer."""
        n, a, self._staged = rows.stop - rows.start, self.filled, -1
        if self._staging is None or len(self._staging[0]) < n:
            self._staging = None  # the old one goes before the new one comes
            # Head by head, which is the order that attention reads it in.
            size = (n, k_RNHD.shape[2], self.lengths[-1], k_RNHD.shape[3])
            k, v = (x.new_empty(size).transpose(1, 2) for x in (k_RNHD, v_RNHD))
            self._staging = k, v
        with torch.no_grad():
            for x, stored, new in zip(
                self._staging, self._view(layer), (k_RNHD, v_RNHD), strict=True
            ):
                x[:n, :a].copy_(stored[rows])
                x[:n, a:].copy_(new[rows])
        return self._staging[0][:n], self._staging[1][:n]

    def _expect_rows(self, k_RNHD: Tensor, v_RNHD: Tensor) -> None:
        self._expect_pending()
        spec = self.pool.spec
        tokens = self.lengths[self.scale] - self.filled
        shape = (self.rows, tokens, spec.kv_heads, spec.head_dim)
        for name, x in (("k", k_RNHD), ("v", v_RNHD)):
            if x.shape != shape or x.dtype != spec.dtype:
                raise InvalidRequest(
                    f"{name} is {tuple(x.shape)} {x.dtype}; scale {self.scale} takes {shape} "
                    f"{spec.dtype}"
                )

    def _expect_open(self) -> None:
        if not self._blocks:
            raise InvalidRequest("the cache of these images was closed")

    def _expect_pending(self) -> None:
        self._expect_open()
        if not self._pending:
            raise InvalidRequest(f"no scale is pending: begin({self.scale}) comes first")
