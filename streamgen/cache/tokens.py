"""One paged sequence of tokens: blocks on demand, forks by handle, and eviction token by token.

PagedAttention (arXiv 2309.06180 §4): a sequence is a list of blocks that lie anywhere in the pool;
only the last one may be partly filled. Blocks are shared by forks, and a writer that finds its last
block shared copies it first (§4.4). `compact` is the one verb that moves survivors: token-granular
eviction with a summary (HERMES, arXiv 2601.14724 §3.2). A pool of single layers and one table per
layer gives every layer a budget of its own.

What belongs to a token besides its bytes is three integers: its position, its weight (how many
tokens it stands for) and its id (which token of the stream it is, -1 for a summary). If the caller
stores keys un-rotated and rotates them by `positions` when it reads, `renumber` moves no byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamgen.cache.meta import merge_runs
from streamgen.cache.notes import Ints, TokenNotes
from streamgen.cache.pool import Away, Block, BlockPool
from streamgen.cache.tail import Tail, expect_raw, expect_tensor
from streamgen.cache.tree import TokenTree
from streamgen.errors import InvalidRequest


@dataclass(frozen=True)
class Summary:
    """A token that stands for others, to be appended by `TokenTable.compact`.

    Attributes:
        k, v: `[num_layers, kv_heads, head_dim]` in the pool's dtype; the key un-rotated if the
            table's keys are.
        position: one integer, or one per axis.
        weight: how many tokens it stands for.
    """

    k: Tensor
    v: Tensor
    position: int | Sequence[int]
    weight: int = 1


class TokenTable:
    """The K/V of one sequence of tokens, in every layer of its pool.

    All block-moving calls are whole: with PoolFull, InvalidRequest or TierError the sequence is
    what it was. Blocks that went to another tier come back with whatever needs their bytes.

    Args:
        pool: where the bytes lie, raw; `pool.spec.block_tokens` is the size of a page.
        axes: integers of a position: 1 for text, 3 for time, height and width.
        reserve: tokens whose blocks are taken at once, as neighbours if possible, and kept through
            truncation and compaction; the sequence is then one view as long as it fits. A block
            that a fork shares, or a swap, ends that.

    Raises:
        InvalidRequest: `axes` or `reserve` is out of range, or the pool is a coded one.
        PoolFull: there is no room for what is to be reserved.
    """

    def __init__(self, pool: BlockPool, axes: int = 1, reserve: int = 0) -> None:
        expect_raw(pool.spec)
        if reserve < 0:
            raise InvalidRequest(f"reserve={reserve}: a number of tokens is needed")
        self.pool = pool
        self.closed = False
        self._notes = TokenNotes(axes)
        self._tail: Tail | None = None
        with pool.lock:
            self._blocks = pool.alloc(self._blocks_for(reserve))
        self._floor = len(self._blocks)

    # What is where

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self._notes)

    @property
    def positions(self) -> Ints:
        """Position of every token: a copy, int64 `[length]` or `[length, axes]`."""
        return self._notes.positions

    @property
    def weights(self) -> Ints:
        """How many tokens each one stands for: a copy, int64 `[length]`."""
        return self._notes.weights

    @property
    def ids(self) -> Ints:
        """Which token of the stream each one is: a copy, int64 `[length]`; -1 for a summary.

        A running number that is never used twice, so tables that were extended alike (one per
        layer) call the same token the same, whatever each has evicted.
        """
        return self._notes.ids

    @property
    def next_position(self) -> int:
        """One more than the largest position on any axis; 0 for an empty table."""
        return self._notes.next_position

    @property
    def pending(self) -> Tail | None:
        """The tail that was begun and neither committed nor aborted."""
        return self._tail

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks with committed tokens in them, in order; all full but the last."""
        return tuple(self._blocks[: self._blocks_for(self.length)])

    @property
    def entries(self) -> tuple[tuple[int, Block], ...]:
        """`blocks`, each with its place: what a tier manager parks and resumes."""
        return tuple(enumerate(self.blocks))

    @property
    def block_table(self) -> tuple[int, ...]:
        """Slots of all blocks, pending and reserved ones too, for a paged kernel; -1 = away."""
        return tuple(block.slot for block in self._blocks)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """`block_table` as runs `(first slot, slots)` of neighbours."""
        return merge_runs(self.block_table)

    @property
    def used_bytes(self) -> int:
        """Bytes of the committed tokens."""
        return self.length * self.pool.spec.token_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all blocks it holds; a shared block counts fully, see `beams.sharing`."""
        return len(self._blocks) * self.pool.spec.block_bytes

    def gather(self, layer: int, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """K and V of the committed tokens in order: `[length, kv_heads, head_dim]` each.

        A view of the pool if the blocks are one run of neighbours, else a copy. The view is good
        until the table changes or its blocks leave the pool.

        Args:
            layer: index of the layer.
            out: K and V staging to copy to if a copy is needed, of `length` rows or more, to be
                used again for every layer.

        Raises:
            InvalidRequest: `out` has another shape or dtype, or the table was closed.
            PoolFull, TierError: blocks are in another tier and can't come back.
        """
        self._expect_held()
        return self._read(layer, self.length, out)

    # Growing

    def extend(self, n: int, positions: npt.ArrayLike | None = None) -> Tail:
        """Begin the next `n` tokens: blocks for them are taken now, `commit` makes them count.

        Args:
            n: tokens.
            positions: `[n]` or `[n, axes]` integers; by default they count on from
                `next_position`, alike on all axes.

        Raises:
            InvalidRequest: `n` or the positions are not accepted, a tail is pending, or the table
                was closed.
            PoolFull: there is no room; nothing has changed.
            TierError: a block went to another tier, which has lost it.
        """
        with self.pool.lock:
            self._expect_idle()
            if n < 1:
                raise InvalidRequest(f"extend({n}): at least 1 token is needed")
            if positions is None:
                return self._begin(self._notes.ahead(range(n)), None)
            return self._begin(self._notes.accept_positions(positions, n), None)

    def scratch(self, tree: TokenTree) -> Tail:
        """Begin a token tree, to keep one path of it (`Tail.accept`) or nothing (`Tail.abort`).

        Its positions are `next_position` + depth.

        Raises:
            InvalidRequest, PoolFull, TierError: as for `extend`.
        """
        with self.pool.lock:
            self._expect_idle()
            return self._begin(self._notes.ahead(tree.depths), tree)

    def append(self, k: Tensor, v: Tensor, positions: npt.ArrayLike | None = None) -> None:
        """Extend by tokens whose K and V are there for all layers: `extend`, `write`, `commit`.

        Args:
            k, v: `[num_layers, n, kv_heads, head_dim]`.
            positions: as for `extend`.

        Raises:
            InvalidRequest, PoolFull, TierError: as for `extend` and `Tail.write`.
        """
        layers = self.pool.spec.num_layers
        if k.ndim != 4 or v.ndim != 4 or len(k) != layers or len(v) != layers:
            raise InvalidRequest(
                f"k is {tuple(k.shape)}, v is {tuple(v.shape)}; accepted: "
                f"({layers}, n, kv_heads, head_dim)"
            )
        with self.extend(k.shape[1], positions) as tail:
            for layer in range(layers):
                tail.write(layer, k[layer], v[layer])
            tail.commit()

    def _begin(self, positions: Ints, tree: TokenTree | None) -> Tail:
        size = self.pool.spec.block_tokens
        missing = max(0, self._blocks_for(self.length + len(positions)) - len(self._blocks))
        last = self.length // size  # the block that the first pending token goes to
        partly = self.length % size > 0
        shared = partly and self._blocks[last].ref > 1
        self._fetch(further=missing + shared)
        if partly:
            self._blocks[last] = self.pool.own(self._blocks[last])
        self._blocks += self.pool.alloc(missing)
        self._tail = Tail(self, positions, tree)
        return self._tail

    def _finish(self, positions: Ints) -> None:
        """The tail is over: its first tokens, as many as there are positions, stay."""
        with self.pool.lock:
            first = self.length // self.pool.spec.block_tokens
            self._notes.append(positions)
            self._tail = None
            self._seal(first)

    # Shrinking

    def truncate(self, n: int) -> None:
        """Drop all tokens but the first `n`; moves no byte.

        Raises:
            InvalidRequest: there are fewer tokens, a tail is pending, or the table was closed.
        """
        with self.pool.lock:
            self._expect_idle()
            if not 0 <= n <= self.length:
                raise InvalidRequest(f"truncate({n}): the table has {self.length} tokens")
            self._notes.truncate(n)
            self._trim()

    def compact(self, keep: npt.ArrayLike, summary: Summary | None = None) -> None:
        """Keep these tokens, packed together, and append a summary of the others if one is given.

        Tokens that stay where they are don't move; the others are packed into blocks that are this
        table's alone. A shared block is never written to: its other holders keep it. Positions,
        weights and ids go along unchanged (see `renumber`).

        Args:
            keep: indices of tokens, ascending, none twice.
            summary: of the others; see `summarize`.

        Raises:
            InvalidRequest: the indices are not ascending or out of range, the summary has another
                shape or dtype, a tail is pending, or the table was closed.
            PoolFull: shared blocks have to be replaced and there is no room; nothing has changed.
            TierError: a block went to another tier, which has lost it.
        """
        with self.pool.lock:
            self._expect_idle()
            kept = self._notes.accept_indices(keep)
            if summary is not None:
                self._check_summary(summary)
            total = len(kept) + (summary is not None)
            moved = np.flatnonzero(kept != np.arange(len(kept)))
            stable = int(moved[0]) if len(moved) else len(kept)
            if stable < total:
                self._pack(kept, stable // self.pool.spec.block_tokens, total)
            self._notes.keep(kept)
            if summary is not None:
                self._append_summary(summary)
            self._seal(stable // self.pool.spec.block_tokens)

    def _pack(self, kept: Ints, first: int, total: int) -> None:
        """Carry the kept tokens into blocks of our own, from the `first` block on."""
        size = self.pool.spec.block_tokens
        mine = [block for block in self._blocks[first:] if block.ref == 1]
        missing = max(0, self._blocks_for(total) - first - len(mine))
        self._fetch(further=missing)
        others = [block for block in self._blocks[first:] if block.ref > 1]
        source = self._rows(kept[first * size :])
        self._blocks[first:] = mine + self.pool.alloc(missing)
        self._carry_rows(source, self._rows(np.arange(first * size, len(kept))))
        for block in others:  # only now: until it was read it had to stay
            self.pool.release(block)

    def _append_summary(self, summary: Summary) -> None:
        """Put the summary behind the kept tokens; its block is ours and there."""
        for layer in self._layers:
            self._store(layer, self.length, summary.k[layer, None], summary.v[layer, None])
        self._notes.append_summary(summary.position, summary.weight)

    def summarize(
        self, drop: npt.ArrayLike, position: int | Sequence[int], by_weight: bool = False
    ) -> Summary:
        """The mean of these tokens' keys and values (HERMES alg. 1), for `compact`.

        Right only if keys are stored un-rotated: then the mean of keys rotated to `position` is the
        rotated mean. Its weight is the sum of theirs.

        Args:
            drop: indices of tokens, ascending, none twice, at least one.
            position: of the summary; HERMES' code takes the largest kept one + 1.
            by_weight: weigh each token by what it stands for, which makes repeated summaries a true
                running mean; the paper's code does not.

        Raises:
            InvalidRequest: the indices are not accepted or there are none, or the table was closed.
        """
        with self.pool.lock:
            self._expect_held()
            dropped = self._notes.accept_indices(drop)
            if not len(dropped):
                raise InvalidRequest("a summary needs at least 1 token")
            self._fetch(further=0)
            weights = self._notes.weights[dropped]
            say = weights if by_weight else np.ones_like(weights)
            rows = self._on_device(self._rows(dropped))
            k, v = (
                torch.stack([_mean(x[rows], say) for x in parts])
                for parts in zip(*(self._all_rows(i) for i in self._layers), strict=True)
            )
            return Summary(k, v, position, int(weights.sum()))

    def renumber(self, positions: npt.ArrayLike) -> None:
        """Give the tokens other positions. An edit of integers: for keys stored un-rotated.

        Args:
            positions: `[length]` or `[length, axes]` integers, none negative.

        Raises:
            InvalidRequest: another shape or type, a negative one, a tail is pending, or the table
                was closed.
        """
        with self.pool.lock:
            self._expect_idle()
            self._notes.renumber(self._notes.accept_positions(positions, self.length))

    # Sharing

    def fork(self) -> TokenTable:
        """A second sequence with the same past: handles and integers, no bytes.

        Whoever extends first copies the last block if it is partly filled, at most one.

        Raises:
            InvalidRequest: a tail is pending or the table was closed.
        """
        with self.pool.lock:
            self._expect_idle()
            twin = copy(self)
            twin._blocks, twin._notes, twin._floor = list(self.blocks), self._notes.copy(), 0
            self.pool.retain_all(twin._blocks)
            return twin

    def adopt(self, blocks: Sequence[Block], length: int) -> None:
        """Begin an empty table with blocks that others hold, as from a prefix index; no bytes.

        The tokens get positions `0..length-1`, alike on all axes.

        Args:
            blocks: sealed blocks of this pool, in order, all full but the last.
            length: tokens in them.

        Raises:
            InvalidRequest: the table is not empty, a tail is pending, it was closed, a block is
                pending, or the length does not fit the blocks.
        """
        with self.pool.lock:
            self._expect_idle()
            if self.length or self._blocks_for(length) != len(blocks):
                raise InvalidRequest(
                    f"adopt({len(blocks)} blocks, length={length}) with {self.length} tokens "
                    f"already there; blocks have {self.pool.spec.block_tokens} tokens"
                )
            if not all(block.sealed for block in blocks):
                raise InvalidRequest("a block is still pending in another table")
            self.pool.retain_all(blocks)
            self.pool.release_all(self._blocks)
            self._blocks, self._floor = list(blocks), 0
            self._finish(self._notes.ahead(range(length)))

    # Other tiers

    def park(self) -> None:
        """Give the rest of what was reserved back; the sequence stays and can go to other tiers.

        Raises:
            InvalidRequest: a tail is pending or the table was closed.
        """
        with self.pool.lock:
            self._expect_idle()
            self._floor = 0
            self._trim()

    def swap_out(self, store: Callable[[Block], Away]) -> int:
        """Free the pool of this sequence: every block that is there goes elsewhere.

        A block that forks share goes once and is away for all of them. The blocks come back by
        `swap_in`, or with the first call that needs their bytes. Don't swap out what a fork is
        extending at the moment: it would have to fetch its past back in the middle of a step.

        Args:
            store: keeps a block's bytes (`pool.read`) elsewhere and says where; it must not have
                changed anything if it raises.

        Returns:
            How many blocks left.

        Raises:
            InvalidRequest: a tail is pending or the table was closed.
            StreamgenError: `store` raised it; every block is where it was.
        """
        with self.pool.lock:
            self._expect_idle()
            here = [block for block in self.blocks if not block.away]
            kept: list[Away] = []
            try:
                for block in here:
                    kept.append(store(block))
            except BaseException:
                for away in kept:
                    away.forget()
                raise
            for block, away in zip(here, kept, strict=True):
                self.pool.unload(block, away)
            self.park()
            return len(here)

    def swap_in(self) -> int:
        """Bring all blocks back into the pool; returns how many came.

        Raises:
            PoolFull: there is no room; none came.
            TierError: a block can't be had; those before it came.
            InvalidRequest: the table was closed.
        """
        with self.pool.lock:
            self._expect_held()
            return self._fetch(further=0)

    # The end

    def close(self) -> None:
        """Give everything back; a pending tail is aborted. Idempotent."""
        with self.pool.lock:
            if self.closed:
                return
            if self._tail is not None:
                self._tail.abort()
            self._notes.truncate(0)
            self._floor, self.closed = 0, True
            self._trim()

    # Bytes

    @property
    def _layers(self) -> range:
        return range(self.pool.spec.num_layers)

    def _views(self, layer: int, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """K and V of tokens `start..stop-1`, as views, one per run of neighbouring blocks."""
        size = self.pool.spec.block_tokens
        first = start // size
        at = first * size
        slots = (block.slot for block in self._blocks[first : self._blocks_for(stop)])
        for slot, count in merge_runs(slots):
            k, v = self.pool.rows(layer, slot, count)
            a, b = max(start - at, 0), stop - at
            yield k[a:b], v[a:b]
            at += count * size

    def _read(self, layer: int, n: int, out: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        if any(block.away for block in self._blocks):
            with self.pool.lock:
                self._fetch(further=0)
        parts = list(self._views(layer, 0, n))
        if not parts:
            return self.pool.rows(layer, 0, 0)
        if len(parts) == 1:
            return parts[0]
        ks, vs = [k for k, _ in parts], [v for _, v in parts]
        if out is None:
            return torch.cat(ks), torch.cat(vs)
        k, v = out[0][:n], out[1][:n]
        shape = (n, *parts[0][0].shape[1:])
        expect_tensor("staging for k", k, shape, self.pool.spec.dtype)
        expect_tensor("staging for v", v, shape, self.pool.spec.dtype)
        return torch.cat(ks, out=k), torch.cat(vs, out=v)

    def _store(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Write K and V `[n, kv_heads, head_dim]` to the tokens from `start` on."""
        at = 0
        with torch.no_grad():  # else writing what needs a gradient would tie the pool to its graph
            for to_k, to_v in self._views(layer, start, start + len(k)):
                to_k.copy_(k[at : at + len(to_k)])
                to_v.copy_(v[at : at + len(to_v)])
                at += len(to_k)

    def _rows(self, tokens: Ints) -> Ints:
        """Rows of these tokens in the flat storage of a layer."""
        size = self.pool.spec.block_tokens
        slots = np.array([block.slot for block in self._blocks], dtype=np.int64)
        return slots[tokens // size] * size + tokens % size

    def _all_rows(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.pool.rows(layer, 0, len(self.pool.k[0]))

    def _carry(self, source: Ints, target: Ints) -> None:
        """Copy tokens onto others of this table."""
        self._carry_rows(self._rows(source), self._rows(target))

    def _carry_rows(self, source: Ints, target: Ints) -> None:
        moving = source != target
        if moving.any():
            rows_from, rows_to = self._on_device(source[moving]), self._on_device(target[moving])
            for layer in self._layers:
                for x in self._all_rows(layer):
                    x[rows_to] = x[rows_from]  # all are read before the first is written

    def _on_device(self, rows: Ints) -> Tensor:
        return torch.as_tensor(rows, device=self.pool.k[0].device)

    # Blocks

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.spec.block_tokens)

    def _fetch(self, further: int) -> int:
        """Bring our blocks back from other tiers, if there is room for `further` slots as well."""
        away = [block for block in self._blocks if block.away]
        self.pool.require(run=0, loose=len(away) + further)
        for block, slot in zip(away, self.pool.spare(len(away)), strict=True):
            self.pool.load(block, slot)
        return len(away)

    def _seal(self, first: int) -> None:
        """The blocks in use, from the `first` on, are final; the others go."""
        for block in self._blocks[first : self._blocks_for(self.length)]:
            block.sealed = True
        self._trim()

    def _trim(self) -> None:
        """Release what is behind the last token, but for what was reserved."""
        used = self._blocks_for(self.length)
        behind, self._blocks = self._blocks[used:], self._blocks[:used]
        for block in behind:
            if len(self._blocks) < self._floor and block.ref == 1 and not block.away:
                block.sealed = False
                self._blocks.append(block)
            else:
                self.pool.release(block)

    # Checks

    def _check_summary(self, summary: Summary) -> None:
        spec = self.pool.spec
        shape = (spec.num_layers, spec.kv_heads, spec.head_dim)
        expect_tensor("the summary's k", summary.k, shape, spec.dtype)
        expect_tensor("the summary's v", summary.v, shape, spec.dtype)
        if summary.weight < 1:
            raise InvalidRequest(f"weight={summary.weight}: a summary stands for at least 1 token")
        self._notes.accept_positions([summary.position], 1)

    def _expect_held(self) -> None:
        if self.closed:
            raise InvalidRequest("the token table was closed")

    def _expect_idle(self) -> None:
        self._expect_held()
        if self._tail is not None:
            raise InvalidRequest(f"{len(self._tail)} tokens are still pending")


def _mean(x: Tensor, say: Ints) -> Tensor:
    """Weighted mean over the first axis, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    share = torch.as_tensor(say / say.sum(), dtype=wide, device=x.device)
    return torch.einsum("n,nhd->hd", share, x.to(wide)).to(x.dtype)
