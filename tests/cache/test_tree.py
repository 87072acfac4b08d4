"""Token trees: order, masks, words, and verification equal to decoding step by step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_lm import VOCAB, TinyLM
from torch import Tensor

from streamgen.cache import BlockPool
from streamgen.cache.tokens import TokenTable
from streamgen.cache.tree import TokenTree, unpack_words
from streamgen.errors import InvalidRequest

EXACT = 1e-10
PARENTS = (-1, 0, 0, 1, 1, 2, -1, 3)  # two roots; node 7 is a child that comes after its cousins


@st.composite
def parents(draw: st.DrawFn, most: int = 12) -> list[int]:
    """A random forest whose nodes are numbered in any order."""
    n = draw(st.integers(1, most))
    above = [draw(st.integers(-1, node - 1)) for node in range(n)]
    name = draw(st.permutations(range(n)))
    shuffled = [-1] * n
    for node, parent in enumerate(above):
        shuffled[name[node]] = -1 if parent < 0 else name[parent]
    return shuffled


def closure(above: list[int] | tuple[int, ...]) -> Tensor:
    """Who is whose ancestor or itself, by walking up from every node."""
    mask = torch.zeros(len(above), len(above), dtype=torch.bool)
    for node in range(len(above)):
        up = node
        while up >= 0:
            mask[node, up] = True
            up = above[up]
    return mask


def chain(n: int) -> list[int]:
    """Each node below the one before."""
    return list(range(-1, n - 1))


def test_depth_first_by_hand() -> None:
    """A node's whole branch comes before its next sibling; depths count edges from the root."""
    tree = TokenTree(PARENTS)
    assert tree.order == (0, 1, 3, 7, 4, 2, 5, 6)
    assert tree.parents == (-1, 0, 1, 2, 1, 0, 5, -1)
    assert tree.depths == (0, 1, 2, 3, 2, 1, 2, 0)
    assert tree.path(3) == (0, 1, 2, 3)
    assert len(tree) == 8


@settings(max_examples=30)
@given(parents())
def test_order_is_depth_first(above: list[int]) -> None:
    """Same edges under the new numbers, parents first, and every branch is one run of nodes."""
    tree = TokenTree(above)
    assert sorted(tree.order) == list(range(len(above)))
    for node, parent in enumerate(tree.parents):
        assert parent < node
        assert above[tree.order[node]] == (-1 if parent < 0 else tree.order[parent])
        assert tree.depths[node] == len(tree.path(node)) - 1
        branch = [at for at in range(len(above)) if node in tree.path(at)]
        assert branch == list(range(node, node + len(branch)))


@settings(max_examples=30)
@given(parents(), st.integers(0, 5))
def test_mask_is_the_closure_of_parents(above: list[int], prefix: int) -> None:
    """A node sees the prefix, its ancestors and itself, and nothing else."""
    tree = TokenTree(above)
    mask = tree.mask(prefix)
    assert mask[:, :prefix].all()
    assert torch.equal(mask[:, prefix:], closure(tree.parents))


@pytest.mark.parametrize("n", [1, 63, 64, 65, 128, 200])
def test_words_hold_the_mask(n: int) -> None:
    """Any number of nodes, in as many words as they need; bit b of word w is node 64 w + b."""
    g = torch.Generator().manual_seed(n)
    wide = [int(torch.randint(-1, node, (), generator=g)) if node else -1 for node in range(n)]
    for above in (wide, chain(n), [-1] * n):
        tree = TokenTree(above)
        words = tree.bit_words()
        assert (words.dtype, words.shape) == (torch.int64, (n, -(-n // 64)))
        assert torch.equal(unpack_words(words, n), tree.mask(0))
        assert all(bool(words[i, i // 64] >> i % 64 & 1) for i in range(n))


def test_any_depth() -> None:
    """A chain longer than python's stack is deep."""
    assert TokenTree(chain(3000)).depths[-1] == 2999


@pytest.mark.parametrize(
    ("above", "text"),
    [
        ([], "at least 1 node"),
        ([-1, 5], "node 1 has parent 5; accepted: -1 .a root. or 0..1"),
        ([-2], "parent -2"),
        ([-1, 2, 1], r"nodes \[1, 2\] hang below a circle"),
        ([0], r"nodes \[0\] hang below a circle"),
    ],
)
def test_bad_trees(above: list[int], text: str) -> None:
    """Refused with the node that is wrong."""
    with pytest.raises(InvalidRequest, match=text):
        TokenTree(above)


def test_bad_paths() -> None:
    """A path begins at a root and goes down edge by edge."""
    tree = TokenTree(PARENTS)
    assert tree.expect_path(iter((0, 5, 6))) == (0, 5, 6)
    assert tree.expect_path(()) == ()
    for path in ((1,), (0, 2), (0, 1, 5), (8,), (-1,), (0, 0)):
        with pytest.raises(InvalidRequest, match="no path from a root"):
            tree.expect_path(path)
    with pytest.raises(InvalidRequest, match="nodes 0..7"):
        tree.path(8)


# With a model


def prefilled(
    model: TinyLM, prompt: list[int], block_tokens: int, rotated: bool = False
) -> TokenTable:
    """A table that holds a prompt."""
    table = TokenTable(BlockPool(model.spec(block_tokens), 40))
    with table.extend(len(prompt)) as tail:
        model.step(tail, prompt, rotated)
        tail.commit()
    return table


def decode(model: TinyLM, table: TokenTable, tokens: list[int], rotated: bool) -> Tensor:
    """Logits of tokens that come one after the other."""
    logits = []
    for token in tokens:
        with table.extend(1) as tail:
            logits.append(model.step(tail, [token], rotated)[0])
            tail.commit()
    return torch.stack(logits)


tree_cases = given(
    above=parents(10),
    seed=st.integers(0, 99),
    block_tokens=st.integers(1, 5),
    rotated=st.booleans(),
    pick=st.integers(0, 9),
    keep=st.integers(0, 10),
)


@settings(max_examples=20)
@tree_cases
def test_verification_and_accept(
    above: list[int], seed: int, block_tokens: int, rotated: bool, pick: int, keep: int
) -> None:
    """All nodes at once give the logits of decoding every root path step by step.

    And after one path, or the first part of it, is accepted, the run goes on as if there had been
    no tree, with nothing but its blocks, whether the stored keys are raw or rotated.
    """
    model, g = TinyLM(seed), torch.Generator().manual_seed(seed)
    prompt = torch.randint(VOCAB, (1 + seed % 7,), generator=g).tolist()
    tokens = torch.randint(VOCAB, (len(above),), generator=g)
    tree = TokenTree(above)
    words = tokens[list(tree.order)].tolist()
    table = prefilled(model, prompt, block_tokens, rotated)
    untreed = table.fork()
    tail = table.scratch(tree)
    logits = model.step(tail, words, rotated)
    for node in range(len(tree)):
        path = tree.path(node)
        twin = untreed.fork()
        steps = decode(model, twin, [words[at] for at in path], rotated)
        twin.close()
        assert (logits[list(path)] - steps).abs().max() < EXACT
        alone = model.full(prompt + [words[at] for at in path])[-1]
        assert (logits[node] - alone).abs().max() < EXACT

    path = tree.path(pick % len(tree))[:keep]
    tail.accept(path)
    if path:
        decode(model, untreed, [words[at] for at in path], rotated)
    assert table.length == len(prompt) + len(path) == untreed.length
    assert table.positions.tolist() == list(range(table.length))
    assert len(table.block_table) == -(-table.length // block_tokens)
    for layer in range(2):
        for one, other in zip(table.gather(layer), untreed.gather(layer), strict=True):
            assert (one - other).abs().max() < EXACT
    after = decode(model, table, [3, 5], rotated) - decode(model, untreed, [3, 5], rotated)
    assert after.abs().max() < EXACT
    table.close()
    untreed.close()
    table.pool.check()
    assert table.pool.stats().free == 40


def test_width_5_depth_9() -> None:
    """Wider than the released SpecInfer code takes (3) and deeper (8): mask rows by hand."""
    above = [-1] + [0] * 5 + [node for node in range(5, 12)]
    tree = TokenTree(above)
    assert max(tree.depths) == 8
    assert TokenTree([*above, len(above) - 1]).depths[-1] == 9
    model = TinyLM(1)
    table = prefilled(model, [1, 2], 4)
    with table.scratch(tree) as tail:
        logits = model.step(tail, [at % VOCAB for at in range(len(tree))])
        last = model.full([1, 2] + [at % VOCAB for at in tree.path(len(tree) - 1)])[-1]
        assert (logits[-1] - last).abs().max() < EXACT


def writes(pool: BlockPool) -> list[int]:
    """Counters that go up whenever a tensor of the pool is written."""
    return [x._version for x in (*pool.k, *pool.v)]


def test_a_depth_first_prefix_moves_nothing() -> None:
    """The leftmost path lies where it belongs; another one is carried there."""
    model = TinyLM()
    for path, moves in (((0, 1, 2), False), ((0, 4, 5), True)):
        table = prefilled(model, [1, 2], 4)
        tail = table.scratch(TokenTree([-1, 0, 1, 2, 0, 4]))
        model.step(tail, [1, 2, 3, 4, 5, 6])
        before = writes(table.pool)
        tail.accept(path)
        assert (writes(table.pool) != before) == moves


def test_positions_of_a_compacted_prefix() -> None:
    """Depths count from the next position, not from the number of tokens left."""
    table = prefilled(TinyLM(), [1, 2, 3, 4, 5], 2)
    table.compact([0, 4])
    tail = table.scratch(TokenTree([-1, 0, 0, 2]))
    assert tail.positions.tolist() == [5, 6, 6, 7]
    assert tail.mask().shape == (4, 6)
    tail.abort()
    assert table.positions.tolist() == [0, 4]


def test_how_a_tree_may_end() -> None:
    """Not by commit, not unwritten, not twice; a plain tail is no tree."""
    model = TinyLM()
    table = prefilled(model, [1, 2], 4)
    tail = table.scratch(TokenTree([-1, 0, 0]))
    with pytest.raises(InvalidRequest, match="layers .0, 1. of the pending tokens"):
        tail.accept((0,))
    model.step(tail, [1, 2, 3])
    with pytest.raises(InvalidRequest, match="choose a path"):
        tail.commit()
    with pytest.raises(InvalidRequest, match="no path from a root"):
        tail.accept((1,))
    tail.accept((0, 2))
    with pytest.raises(InvalidRequest, match="is over"):
        tail.accept((0,))
    with table.extend(1) as plain:
        model.step(plain, [1])
        with pytest.raises(InvalidRequest, match="no token tree"):
            plain.accept((0,))
    assert table.length == 4
