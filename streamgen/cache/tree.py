"""A speculative token tree: candidate continuations that share one cache and are checked at once.

SpecInfer (arXiv 2305.09781 §4.2): a depth-first traversal writes every node's K and V into the
cache behind the verified prefix, and a topology-aware causal mask lets a node see the prefix, its
ancestors and itself. Here are the integers and the masks; `TokenTable.scratch(tree)` is the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

import torch
from torch import Tensor

from streamgen.errors import InvalidRequest

WORD = 64  # bits of a mask word


class TokenTree:
    """Nodes in depth-first order, of any width and depth; more than one root is accepted.

    Everything below counts nodes in depth-first order (children in the caller's order), which is
    the order of their rows in the cache. `order` leads back to the caller's numbers.

    Args:
        parents: the parent of each node, by the caller's numbers, which may come in any order; -1
            for a root, whose parent is the last token of the verified prefix.

    Attributes:
        order: the caller's number of each node: feed the model `tokens[order]`.
        parents: the parent of each node, or -1; smaller than the node.
        depths: edges from the root: 0 for a root.

    Raises:
        InvalidRequest: no nodes, a parent that is no node, or a circle.
    """

    def __init__(self, parents: Sequence[int]) -> None:
        children = _children([index(parent) for parent in parents])
        order: list[int] = []
        stack = children[-1][::-1]
        while stack:
            order.append(stack.pop())
            stack += children[order[-1]][::-1]
        if len(order) < len(parents):
            circle = sorted(set(range(len(parents))) - set(order))
            raise InvalidRequest(f"nodes {circle} hang below a circle and have no root")
        place = {node: at for at, node in enumerate(order)} | {-1: -1}
        self.order = tuple(order)
        self.parents = tuple(place[parents[node]] for node in order)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        self.depths = tuple(depths)

    def __len__(self) -> int:
        return len(self.parents)

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root down to `node`.

        Raises:
            InvalidRequest: no such node.
        """
        if not 0 <= node < len(self):
            raise InvalidRequest(f"node {node}: the tree has nodes 0..{len(self) - 1}")
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return tuple(path[::-1])

    def expect_path(self, path: Iterable[int]) -> tuple[int, ...]:
        """The path as a tuple, if it begins at a root and each node is the parent of the next.

        Raises:
            InvalidRequest: it does not; the empty path is accepted.
        """
        nodes = tuple(index(node) for node in path)
        above = -1
        for node in nodes:
            if not 0 <= node < len(self) or self.parents[node] != above:
                raise InvalidRequest(f"{nodes} is no path from a root: {node} not below {above}")
            above = node
        return nodes

    def mask(self, prefix: int) -> Tensor:
        """What each node sees, bool `[nodes, prefix + nodes]`: the prefix, its ancestors, itself.

        Args:
            prefix: tokens of the verified prefix.
        """
        mask = torch.zeros(len(self), prefix + len(self), dtype=torch.bool)
        mask[:, :prefix] = True
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] = mask[parent]
            mask[node, prefix + node] = True
        return mask

    def bit_words(self) -> Tensor:
        """The part of `mask` behind the prefix in int64 words `[nodes, ceil(nodes / 64)]`.

        Bit `b` of word `w` in row `i` says that node `i` sees node `64 * w + b`. For kernels, which
        take one word per 64 keys instead of 64 bytes. The slow way back is `unpack_words`.
        """
        rows: list[int] = []  # of any width, python's integers have no end
        for node, parent in enumerate(self.parents):
            rows.append((rows[parent] if parent >= 0 else 0) | 1 << node)
        words = -(-len(self) // WORD)
        packed = bytearray().join(row.to_bytes(words * WORD // 8, "little") for row in rows)
        return torch.frombuffer(packed, dtype=torch.int64).view(len(self), words)


def unpack_words(words: Tensor, nodes: int) -> Tensor:
    """Words of `TokenTree.bit_words` as a bool mask `[nodes, nodes]`."""
    bits = words[:, :, None] >> torch.arange(WORD, device=words.device) & 1
    return bits.flatten(1)[:, :nodes].bool()


def _children(parents: list[int]) -> dict[int, list[int]]:
    """The children of each node in ascending order, of the roots under -1."""
    if not parents:
        raise InvalidRequest("a token tree needs at least 1 node")
    children: dict[int, list[int]] = {node: [] for node in range(-1, len(parents))}
    for node, parent in enumerate(parents):
        if parent not in children:
            raise InvalidRequest(
                f"node {node} has parent {parent}; accepted: -1 (a root) or 0..{len(parents) - 1}"
            )
        children[parent].append(node)
    return children
