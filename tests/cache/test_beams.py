"""Beam search and parallel sampling: exact reference counts, exact results, what sharing saves."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tiny_lm import VOCAB, TinyLM

from streamgen.cache import BlockPool
from streamgen.cache.beams import Sharing, select, sharing
from streamgen.cache.tokens import TokenTable
from streamgen.errors import InvalidRequest

PROMPT = [3, 1, 4, 1, 5, 9, 2]


def prefilled(model: TinyLM, pool: BlockPool) -> TokenTable:
    """A table that holds the prompt but for its last token."""
    table = TokenTable(pool)
    with table.extend(len(PROMPT) - 1) as tail:
        model.step(tail, PROMPT[:-1])
        tail.commit()
    return table


def expect_exact_counts(pool: BlockPool, tables: list[TokenTable]) -> None:
    """Every block has as many references as tables hold it, and nothing else lives."""
    holders = Counter(block for table in tables for block in table.blocks)
    assert all(block.ref == count for block, count in holders.items())
    assert pool.stats().live == len(holders)
    pool.check()


@pytest.mark.parametrize("width", [2, 4])
def test_beam_search(width: int) -> None:
    """With forks and closes at every step it finds what recomputing every beam finds.

    At every step blocks are counted exactly, there is one copy or fresh block per beam at most, and
    what no beam holds is free at once.
    """
    model, steps = TinyLM(5), 9
    pool = BlockPool(model.spec(3), 40)
    beams, words, scores = [prefilled(model, pool)], [PROMPT], torch.zeros(1, dtype=torch.float64)
    naive, naive_scores = [PROMPT], scores
    for _ in range(steps):
        before = pool.stats().live
        tails = [beam.extend(1) for beam in beams]  # all at once, as a batch would
        logits = []
        for tail, line in zip(tails, words, strict=True):
            logits.append(model.step(tail, line[-1:])[0])
            tail.commit()
        assert pool.stats().live <= before + len(beams)
        scores, parents, tokens = best(scores, torch.stack(logits), width)
        beams = select(beams, parents)
        words = [words[p] + [t] for p, t in zip(parents, tokens, strict=True)]
        expect_exact_counts(pool, beams)

        logits = [model.full(line)[-1] for line in naive]
        naive_scores, parents, tokens = best(naive_scores, torch.stack(logits), width)
        naive = [naive[p] + [t] for p, t in zip(parents, tokens, strict=True)]
        assert words == naive
    assert (scores - naive_scores).abs().max() < 1e-10
    assert len(set(map(tuple, words))) == width
    assert sharing(beams).saved > 0
    for beam in beams:
        beam.close()
    assert pool.stats().free == 40


def best(
    scores: torch.Tensor, logits: torch.Tensor, width: int
) -> tuple[torch.Tensor, list[int], list[int]]:
    """The best continuations: their scores, the beams they continue, their tokens."""
    found = (scores[:, None] + logits.log_softmax(-1)).flatten().topk(width)
    return found.values, (found.indices // VOCAB).tolist(), (found.indices % VOCAB).tolist()


def test_parallel_samples_share_the_prompt() -> None:
    """Samples that diverge at once keep the full blocks of the prompt in common, and nothing else.

    Saved: (n - 1) x full prompt blocks of n x blocks of a sample (PagedAttention §6.3).
    """
    model, n = TinyLM(6), 4
    pool = BlockPool(model.spec(4), 40)
    samples = select([prefilled(model, pool)], [0] * n)
    assert pool.stats().live == 2
    assert sharing(samples) == Sharing(logical=2 * n, physical=2)
    for index, table in enumerate(samples):  # 6 + 7 tokens
        line = PROMPT[-1:]
        for step in range(7):
            with table.extend(1) as tail:
                logits = model.step(tail, line[-1:])[0]
                tail.commit()
            line.append((int(logits.argmax()) + index * (step == 0)) % VOCAB)
        alone = model.full(PROMPT[:-1] + line[:-1])[-1]
        assert (logits - alone).abs().max() < 1e-10
    expect_exact_counts(pool, samples)
    shared = sharing(samples)
    assert shared == Sharing(logical=4 * n, physical=1 + 3 * n)
    assert shared.saved == (n - 1) * 1 / (n * 4)


def test_a_dropped_beam_leaves_its_parent_alone() -> None:
    """Twice one beam, never the other: the other's own blocks are free, no byte moved."""
    model = TinyLM(7)
    pool = BlockPool(model.spec(3), 12)
    first, second = select([prefilled(model, pool)], [0, 0])
    for table in (first, second):
        table.append(*torch.zeros(2, 2, 4, 2, 4, dtype=torch.float64))
    assert pool.stats().live == 2 + 2 * 2
    writes = [x._version for x in (*pool.k, *pool.v)]
    children = select([first, second], [1, 1])
    assert pool.stats().live == 4 and second.closed and first.closed
    assert [x._version for x in (*pool.k, *pool.v)] == writes
    expect_exact_counts(pool, children)
    assert select(children, []) == []
    assert pool.stats().free == 12


def test_select_refuses_whole() -> None:
    """No such parent, or a busy one: all tables live on and nobody is counted twice."""
    pool = BlockPool(TinyLM.spec(3), 12)
    table, busy = prefilled(TinyLM(), pool), TokenTable(pool)
    for parents in ([2], [0, -1]):
        with pytest.raises(InvalidRequest, match="there are tables 0..1"):
            select([table, busy], parents)
    tail = busy.extend(1)
    with pytest.raises(InvalidRequest, match="still pending"):
        select([table, busy], [0, 0, 1])
    tail.abort()
    expect_exact_counts(pool, [table, busy])


def test_nothing_shared() -> None:
    """Without tables nothing is saved."""
    assert sharing([]).saved == 0.0
