"""Layer-aware eviction against formulas written out element by element, and on real tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from streamgen.cache.eviction import (
    LLAVA,
    PAPER,
    PRESETS,
    Decision,
    LayerBudget,
    Signals,
    apply,
    bands,
    carry,
    min_max,
    next_position,
    observe,
    recency,
    renumbered,
    smooth,
    split,
)
from streamgen.cache.pool import BlockPool
from streamgen.cache.spec import KVSpec
from streamgen.cache.tokens import TokenTable
from streamgen.errors import InvalidRequest, PoolFull, TierError

LAYERS = 10  # 1 shallow, 6 middle, 3 deep
PREFIX = 3

# Formulas


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [(24, (2, 14, 8)), (28, (2, 17, 9)), (36, (3, 22, 11)), (64, (6, 38, 20)), (10, (1, 6, 3))],
)
def test_bands_of_known_models(layers: int, sizes: tuple[int, int, int]) -> None:
    """LLaVA-OV-0.5B, Qwen2-7B, Qwen2.5-VL-3B, a 32B and the toy; together they are all layers."""
    parts = bands(layers)
    assert tuple(map(len, parts)) == sizes
    assert [layer for part in parts for layer in part] == list(range(layers))


def test_a_small_model_has_no_shallow_layers() -> None:
    """As in the paper's code: int(0.1 * 9) is 0."""
    assert tuple(map(len, bands(9))) == (0, 6, 3)


def test_min_max_and_recency() -> None:
    """Against the formulas, element by element."""
    x = torch.tensor([3.0, -1.0, 0.0])
    assert min_max(x).tolist() == pytest.approx([4 / (4 + 1e-6), 0, 1 / (4 + 1e-6)])
    wanted = [math.exp(-8 * (4 - i) / 4) for i in range(5)]
    assert recency(5, 8.0).tolist() == pytest.approx(wanted)
    assert recency(1, 8.0).tolist() == [1.0]


def test_blends_of_paper_and_llava() -> None:
    """Ten layers: the first is shallow, the last three deep, six between."""
    parts = bands(LAYERS)
    assert PAPER.at(0, parts) == (1, 20) and PAPER.at(7, parts) == PAPER.at(9, parts) == (0, 0)
    assert PAPER.at(1, parts) == (0.75, 20)
    assert PAPER.at(4, parts) == pytest.approx((0.75 - 0.6 * 3 / 6, 20 - 12 * 3 / 6))
    assert LLAVA.at(1, parts) == (1.0, 20)
    assert LLAVA.at(6, parts) == pytest.approx((1 - 0.9 * 5 / 6, 20 - 19.5 * 5 / 6))


def naive_smooth(
    scores: Sequence[Sequence[float]],
    strength: Sequence[float],
    ids: Sequence[Sequence[int]] | None,
) -> list[list[float]]:
    """Equation 5, one number after the other, for layers of equal length."""
    result = [list(row) for row in scores]
    for layer in reversed(range(len(scores) - 1)):
        for slot, own in enumerate(scores[layer]):
            above = result[layer + 1][slot]
            if ids is not None:
                token, others = ids[layer][slot], ids[layer + 1]
                found = token >= 0 and token in others
                above = result[layer + 1][others.index(token)] if found else own
            result[layer][slot] = (1 - strength[layer]) * own + strength[layer] * above
    return result


def test_slots_and_tokens_differ() -> None:
    """By hand: token 7 lies in slot 1 below and in slot 0 above; token 5 is nowhere above."""
    scores = [torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 0.5])]
    ids = [torch.tensor([5, 7, -1]), torch.tensor([7, 9, -1])]
    assert smooth(scores, [0.5, 0.5])[0].tolist() == [0.5, 0.0, 0.75]
    assert smooth(scores, [0.5, 0.5], ids)[0].tolist() == [0.0, 0.5, 1.0]


def test_smoothing_is_recursive_from_the_top() -> None:
    """The lowest layer feels the highest one through the one between; the highest stays."""
    scores = [torch.zeros(1), torch.zeros(1), torch.ones(1)]
    assert [x.item() for x in smooth(scores, [0.5, 0.5, 0.5])] == [0.25, 0.5, 1.0]


def test_slots_of_layers_of_other_lengths() -> None:
    """The layer above is stretched linearly; a layer without tokens changes nothing."""
    scores = [torch.zeros(4), torch.tensor([0.0, 1.0])]
    assert smooth(scores, [1.0, 1.0])[0].tolist() == [0.0, 0.25, 0.75, 1.0]
    assert smooth([torch.ones(2), torch.zeros(0)], [0.5, 0.5])[0].tolist() == [1.0, 1.0]


def test_split_ascends_and_covers() -> None:
    """Best first is not the order that stays; of equals the older stays."""
    kept, dropped = split(torch.tensor([0.5, 0.9, 0.5, 0.1]), 2)
    assert (kept.tolist(), dropped.tolist()) == ([0, 1], [2, 3])


def test_renumbering() -> None:
    """Behind the prefix ranks count on; every axis by itself, and equal positions stay equal."""
    assert renumbered(np.array([0, 1, 9, 4, 30]), 2).tolist() == [0, 1, 3, 2, 4]
    assert renumbered(np.array([7, 9]), 0).tolist() == [0, 1]
    three = np.array([[0, 0, 2], [5, 9, 9], [5, 7, 9], [8, 7, 40]])
    wanted = [[0, 0, 2], [3, 4, 3], [3, 3, 3], [4, 3, 4]]
    assert renumbered(three, 1).tolist() == wanted


# Decisions


def some_signals(seed: int, count: int, layers: int = LAYERS) -> Signals:
    """Random signals; the layers hold different tokens, and some a summary at the end."""
    generator = Generator().manual_seed(seed)
    ids = []
    for layer in range(layers):
        chosen = torch.randperm(2 * count, generator=generator)[:count].sort().values + PREFIX
        ids.append(torch.cat([chosen[:-1], torch.tensor([-1])]) if layer % 2 else chosen)
    return Signals(
        ids,
        [torch.rand(count, generator=generator) for _ in range(layers)],
        [torch.rand(count, generator=generator) for _ in range(layers)],
        [torch.randn(count, 2, 3, generator=generator) for _ in range(layers)],
        generator,
    )


def naive_scores(policy: LayerBudget, signals: Signals) -> list[list[float]]:
    """Scores of one layer after the other and one token after the other."""

    def scaled(row: list[float]) -> list[float]:
        return [(x - min(row)) / (max(row) - min(row) + 1e-6) for x in row]

    assert signals.guidance and signals.mass and signals.values
    result = []
    short, long = int(0.1 * LAYERS), int(0.7 * LAYERS)
    for layer, ids in enumerate(signals.ids):
        n = len(ids)
        guidance = signals.guidance[layer]
        assert guidance is not None
        attention = scaled(guidance.tolist())
        way = (layer - short) / (long - short)
        omega, k = 0.75 - 0.6 * way, 20 - 12 * way
        if layer < short:
            omega, k = 1.0, 20.0
        elif layer >= long:
            omega, k = 0.0, 0.0
        fresh = scaled([math.exp(-k * (n - 1 - i) / max(n - 1, 1)) for i in range(n)])
        value = signals.values[layer]
        frames = [(int(token) - policy.prefix) // policy.unit for token in ids]
        result.append(
            {
                "hermes": [
                    (1 - omega) * a + omega * r for a, r in zip(attention, fresh, strict=True)
                ],
                "guidance": attention,
                "recency": [float(i) for i in range(n)],
                "h2o": [
                    x + 2 * (i >= n - policy.budget // 2)
                    for i, x in enumerate(scaled(signals.mass[layer].tolist()))
                ],
                "value_norm": scaled(
                    [sum(math.hypot(*head) for head in token) / 2 for token in value.tolist()]
                ),
                "uniform": scaled(
                    [
                        (40 if f == 0 else len(bin(f)) - len(bin(f).rstrip("0"))) + i / n
                        for i, f in enumerate(frames)
                    ]
                ),
            }[policy.score]
        )
    return result


def naive_keep(policy: LayerBudget, signals: Signals) -> list[list[int]]:
    """Kept indices of every layer, prefix included, from the definitions."""
    scores = naive_scores(policy, signals)
    if policy.align:
        strength = [0.1] + [0.3] * 6 + [0.4] * 3
        ids = [x.tolist() for x in signals.ids] if policy.align == "token" else None
        scores = naive_smooth(scores, strength, ids)
    if policy.shared:
        mean = [sum(column) / LAYERS for column in zip(*scores, strict=True)]
        scores = [mean] * LAYERS
    kept = []
    for layer, row in enumerate(scores):
        room = policy.budget - (policy.summary and layer >= int(0.7 * LAYERS))
        best = sorted(range(len(row)), key=lambda i: -row[i])[:room]
        kept.append([*range(policy.prefix), *(policy.prefix + i for i in sorted(best))])
    return kept


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"random"}))
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**20), count=st.integers(3, 12), budget=st.integers(2, 8))
def test_decisions_are_the_definition(name: str, seed: int, count: int, budget: int) -> None:
    """Every rule keeps what the formulas, written out, keep; what it merges is all the rest."""
    policy = LayerBudget.preset(name, budget, prefix=PREFIX)
    signals = some_signals(seed, count)
    decision = policy.decide(signals)
    if count <= budget:
        assert decision is None
        return
    assert decision
    assert [x.tolist() for x in decision.keep] == naive_keep(policy, signals)
    for layer, (keep, merge) in enumerate(zip(decision.keep, decision.merge, strict=True)):
        rest = sorted(set(range(PREFIX + count)) - set(keep.tolist()))
        summed = policy.summary and layer >= 7
        assert merge.tolist() == (rest if summed else [])
        assert len(keep) == PREFIX + budget - summed


def test_presets_differ_where_they_should() -> None:
    """The paper's rule aligns slots and has summaries; a shared keep-set is one tensor."""
    hermes = LayerBudget.preset("hermes", 4)
    assert (hermes.score, hermes.align, hermes.summary) == ("hermes", "slot", True)
    decision = LayerBudget.preset("shared", 4).decide(some_signals(0, 9))
    assert decision and all(keep is decision.keep[0] for keep in decision.keep)


def test_random_is_drawn_from_the_generator() -> None:
    """The same seed keeps the same tokens, another seed others, and layers differ."""
    policy = LayerBudget.preset("random", 5)

    def kept(seed: int) -> list[list[int]]:
        signals = Signals([torch.arange(20)] * 3, generator=Generator().manual_seed(seed))
        decision = policy.decide(signals)
        assert decision
        return [x.tolist() for x in decision.keep]

    assert kept(1) == kept(1) != kept(2)
    assert kept(1)[0] != kept(1)[1]


def test_uniform_thins_out_evenly() -> None:
    """Fed frame by frame with room for 4 of 2 tokens, multiples of 4 are left after 16 frames."""
    policy = LayerBudget.preset("uniform", 8, unit=2)
    held: list[int] = []
    for frame in range(16):
        held += [2 * frame, 2 * frame + 1]
        decision = policy.decide(Signals([torch.tensor(held)]))
        held = [held[i] for i in decision.keep[0].tolist()] if decision else held
    assert held == [0, 1, 8, 9, 16, 17, 24, 25]


def test_bands_can_have_budgets_of_their_own() -> None:
    """A layer within its budget keeps all, and has no summary."""
    policy = LayerBudget(4, summary=True, band_budgets=(0.5, 1.0, 3.0))
    assert policy.budgets(LAYERS) == [2] + [4] * 6 + [12] * 3
    decision = policy.decide(some_signals(0, 9))
    assert decision
    assert [len(x) for x in decision.keep] == [2] + [4] * 6 + [9] * 3
    assert not any(len(x) for x in decision.merge)


def test_which_prompt_a_layer_asks() -> None:
    """HERMES: none, mixed, global; guidance alone: mixed; the others none."""
    assert LayerBudget(4).prompts(LAYERS) == (None,) + ("mixed",) * 6 + ("global",) * 3
    assert set(LayerBudget.preset("guidance", 4).prompts(LAYERS)) == {"mixed"}
    assert set(LayerBudget.preset("h2o", 4).prompts(LAYERS)) == {None}


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget": 0},
        {"prefix": -1},
        {"unit": 0},
        {"band_budgets": (0.1, 1.0, 1.0)},
        {"score": "luck"},
        {"align": "frame"},
        {"summary_weighting": "mean", "summary": True},
        {"summary_weighting": "count"},
        {"shared": True, "summary": True},
        {"shared": True, "band_budgets": (1.0, 1.0, 2.0)},
        {"score": "h2o", "blend": LLAVA},
        {"eager": True, "max_position": 4096},
        {"max_position": 1028},
        {"margin": 100},
        {"unit": 4},
        {"smoothing": (0.5, 0.5, 0.5)},
    ],
    ids=str,
)
def test_refused_policies(wrong: dict[str, object]) -> None:
    """A value that is out of range or has no effect is named."""
    with pytest.raises(InvalidRequest, match=next(iter(wrong)).split("_")[0]):
        LayerBudget(**{"budget": 4, **wrong})  # type: ignore[arg-type]


def test_refused_signals_and_names() -> None:
    """What is missing is named, and so are the presets."""
    ids = [torch.arange(9)] * LAYERS
    with pytest.raises(InvalidRequest, match="needs the signal 'mass'"):
        LayerBudget.preset("h2o", 4).decide(Signals(ids))
    with pytest.raises(InvalidRequest, match=r"mass is of \[9, 8\] tokens, ids are of \[9, 9\]"):
        short = Signals(ids[:2], mass=[torch.rand(9), torch.rand(8)])
        LayerBudget.preset("h2o", 4).decide(short)
    with pytest.raises(InvalidRequest, match="guidance of layer 1"):
        LayerBudget(4).decide(Signals(ids, guidance=[None] * LAYERS))
    with pytest.raises(InvalidRequest, match=r"\[9, 8\] tokens"):
        ragged = Signals([torch.arange(9), torch.arange(8)])
        LayerBudget.preset("sliding_window", 4).decide(ragged)
    with pytest.raises(InvalidRequest, match="accepted are sliding_window, uniform"):
        LayerBudget.preset("lru", 4)


# On tables

SPEC = KVSpec(num_layers=1, kv_heads=2, head_dim=4, block_tokens=4)


def make_tables(pool: BlockPool, layers: int = LAYERS, axes: int = 1) -> list[TokenTable]:
    """One table a layer."""
    return [TokenTable(pool, axes=axes) for _ in range(layers)]


def feed(tables: Sequence[TokenTable], n: int, seed: int) -> None:
    """Append n random tokens at the stream's next position, others in every layer."""
    generator = Generator().manual_seed(seed)
    start = next_position(tables)
    for table in tables:
        k, v = torch.randn(2, table.pool.spec.num_layers, n, 2, 4, generator=generator)
        at = start + np.arange(n)
        axes = table.positions.shape[1:]
        table.append(k, v, at if not axes else np.repeat(at[:, None], axes[0], 1))


def evict(policy: LayerBudget, tables: Sequence[TokenTable], seed: int) -> Decision | None:
    """Decide on random guidance, and apply it."""
    generator = Generator().manual_seed(seed)
    guidance: list[Tensor | None] = []
    for table in tables:
        for _ in range(table.pool.spec.num_layers):
            guidance.append(torch.rand(table.length - policy.prefix, generator=generator))
    decision = policy.decide(
        observe(policy, tables, guidance=guidance, mass=None, generator=generator)
    )
    if decision:
        apply(tables, decision)
    return decision


@pytest.mark.parametrize("name", ["hermes", "hermes_token", "shared", "random", "value_norm"])
def test_invariants_along_a_stream(name: str) -> None:
    """After every chunk: M + prefix tokens a layer, the prefix untouched, survivors in order.

    A survivor's bytes and position are those it came with.
    """
    policy = LayerBudget.preset(name, 6, prefix=PREFIX)
    tables = make_tables(BlockPool(SPEC, 50))
    feed(tables, PREFIX, seed=100)
    first = [[x.clone() for x in table.gather(0)] for table in tables]
    came: list[dict[int, tuple[Tensor, Tensor, int]]] = [{} for _ in tables]
    for chunk in range(4):
        feed(tables, 5, seed=chunk)
        for table, book in zip(tables, came, strict=True):
            rows = zip(table.ids, *table.gather(0), table.positions, strict=True)
            book |= {int(i): (k.clone(), v.clone(), int(p)) for i, k, v, p in rows if i >= 0}
        decision = evict(policy, tables, seed=chunk)
        assert (decision is None) == (5 * (chunk + 1) <= 6)
        for layer, table in enumerate(tables):
            assert table.length == PREFIX + min(6, 5 * (chunk + 1))
            k, v = table.gather(0)
            assert torch.equal(k[:PREFIX], first[layer][0])
            assert torch.equal(v[:PREFIX], first[layer][1])
            own = table.ids[table.ids >= 0]
            assert (np.diff(own) > 0).all() and (np.diff(table.positions) > 0).all()
            for row, (token, position) in enumerate(zip(table.ids, table.positions, strict=True)):
                if token >= 0:
                    k0, v0, p0 = came[layer][int(token)]
                    assert torch.equal(k[row], k0) and torch.equal(v[row], v0) and position == p0
            summed = policy.summary and layer >= 7 and decision is not None
            assert (table.ids[-1] == -1) == summed
            if summed:  # whatever came is still counted somewhere
                assert table.weights.sum() == PREFIX + 5 * (chunk + 1)


def test_a_summary_is_the_mean_of_what_it_replaces() -> None:
    """K and V, its weight, and its place: one behind the largest kept position of any layer."""
    policy = LayerBudget.preset("hermes", 4)
    tables = make_tables(BlockPool(SPEC, 40))
    feed(tables, 9, seed=0)
    before = [[x.clone() for x in table.gather(0)] for table in tables]
    decision = evict(policy, tables, seed=1)
    assert decision
    largest = max(int(keep[-1]) for keep in decision.keep)
    for layer in (7, 8, 9):
        dropped = decision.merge[layer]
        k, v = tables[layer].gather(0)
        torch.testing.assert_close(k[-1], before[layer][0][dropped].mean(0))
        torch.testing.assert_close(v[-1], before[layer][1][dropped].mean(0))
        assert tables[layer].weights[-1] == len(dropped) == 6
        assert tables[layer].positions[-1] == largest + 1
    assert next_position(tables) == largest + 2


@pytest.mark.parametrize("weighting", ["none", "count"])
def test_summaries_of_summaries(weighting: str) -> None:
    """With room for nothing else, counting makes a summary the mean of all; else of means."""
    policy = LayerBudget(1, summary=True, summary_weighting=weighting)  # type: ignore[arg-type]
    table = TokenTable(BlockPool(SPEC, 8))
    tables = [table]  # int(0.7 * 1) = 0: a single layer is deep
    mean = torch.zeros(0)
    everything = []
    for chunk in range(3):
        feed(tables, 3, seed=chunk)
        everything.append(table.gather(0)[1][-3:].clone())
        mean = torch.cat([*([mean[None]] if chunk else []), everything[-1]]).mean(0)
        evict(policy, tables, seed=chunk)
        assert table.length == 1 and table.weights.tolist() == [3 * (chunk + 1)]
    wanted = torch.cat(everything).mean(0) if weighting == "count" else mean
    torch.testing.assert_close(table.gather(0)[1][0], wanted)


def test_all_layers_share_a_clock() -> None:
    """The next chunk lies at the same positions in layers with and without a summary."""
    policy = LayerBudget.preset("hermes", 4)
    tables = make_tables(BlockPool(SPEC, 40))
    for chunk in range(3):
        feed(tables, 4, seed=chunk)
        last = [table.positions[-4:].tolist() for table in tables]
        assert all(positions == last[0] for positions in last)
        evict(policy, tables, seed=chunk)


@pytest.mark.parametrize("axes", [1, 3])
def test_eager_renumbering(axes: int) -> None:
    """Behind the prefix positions have no gaps after any eviction; keys stay what they were."""
    policy = LayerBudget.preset("hermes", 4, prefix=2, eager=True)
    tables = make_tables(BlockPool(SPEC, 40), axes=axes)
    feed(tables, 2, seed=9)
    for table in tables:
        table.renumber(table.positions * 2 + 3)
    for chunk in range(3):
        feed(tables, 4, seed=chunk)
        first = tables[0]
        raw = {int(i): k.clone() for i, k in zip(first.ids, first.gather(0)[0], strict=True)}
        evict(policy, tables, seed=chunk)
        for table in tables:
            for column in table.positions.reshape(6, axes).T:
                assert column.tolist() == [3, 5, 6, 7, 8, 9]
        assert next_position(tables) == 10
        for token, key in zip(tables[0].ids, tables[0].gather(0)[0], strict=True):
            assert torch.equal(key, raw[int(token)])


def test_lazy_renumbering() -> None:
    """Only when the next position has come within the margin, and in all layers at once."""
    policy = LayerBudget.preset("sliding_window", 4, shared=False, max_position=17, margin=5)
    tables = make_tables(BlockPool(SPEC, 40))
    ends = []
    for chunk in range(6):
        feed(tables, 4, seed=chunk)
        evict(policy, tables, seed=chunk)
        ends.append(next_position(tables))
        assert len({tuple(table.positions) for table in tables}) == 1
    assert ends == [4, 8, 12, 4, 8, 12]


def test_a_shared_keep_set_needs_one_table() -> None:
    """One table of all layers and a table per layer end up with the same bytes and positions."""
    policy = LayerBudget.preset("shared", 5, prefix=1)
    together = TokenTable(BlockPool(KVSpec(LAYERS, 2, 4, 4), 8))
    apart = make_tables(BlockPool(SPEC, 40))
    for chunk in range(3):
        k, v = torch.randn(2, LAYERS, 4, 2, 4, generator=Generator().manual_seed(chunk))
        together.append(k, v)
        for layer, table in enumerate(apart):
            table.append(k[layer, None], v[layer, None])
        evict(policy, [together], seed=chunk)
        evict(policy, apart, seed=chunk)
    for layer, table in enumerate(apart):
        for ours, theirs in zip(together.gather(layer), table.gather(0), strict=True):
            assert torch.equal(ours, theirs)
        assert together.positions.tolist() == table.positions.tolist()


def test_values_and_ids_are_observed() -> None:
    """Signals leave the prefix out; values only for who needs them."""
    tables = make_tables(BlockPool(SPEC, 8), layers=2)
    feed(tables, 5, seed=0)
    signals = observe(LayerBudget.preset("value_norm", 2, prefix=2), tables)
    assert [ids.tolist() for ids in signals.ids] == [[2, 3, 4]] * 2
    assert signals.values and torch.equal(signals.values[1], tables[1].gather(0)[1][2:])
    assert observe(LayerBudget(2), tables).values is None


def test_counts_follow_their_tokens() -> None:
    """What is counted per token stays with it; a summary gets the sum."""
    keep, merge = (
        (torch.tensor([0, 2]), torch.tensor([1])),
        (torch.tensor([1, 3]), torch.tensor([]).long()),
    )
    decision = Decision(LayerBudget(2), keep, merge)
    carried = carry([torch.tensor([1.0, 2, 3, 4]), torch.tensor([5.0, 6])], decision)
    assert [x.tolist() for x in carried] == [[1, 3, 6], [6]]


def test_a_full_pool_changes_no_table() -> None:
    """With forks that hold every block there is no room for what would have to be replaced."""
    pool = BlockPool(SPEC, 2 * LAYERS + 3)
    tables = make_tables(pool)
    feed(tables, 8, seed=0)
    forks = [table.fork() for table in tables]
    before = [[x.clone() for x in table.gather(0)] for table in tables]
    policy = LayerBudget.preset("hermes", 4)
    with pytest.raises(PoolFull):
        evict(policy, tables, seed=1)
    for table, (k, v) in zip(tables, before, strict=True):
        assert table.length == 8
        assert torch.equal(table.gather(0)[0], k) and torch.equal(table.gather(0)[1], v)
    for fork in forks:
        fork.close()
    evict(policy, tables, seed=1)
    assert {table.length for table in tables} == {4}


class Lost:
    """The bytes of a block in a tier that has lost them."""

    def read(self, out: memoryview) -> None:
        """They can't be had."""
        raise TierError("lost")

    def forget(self) -> None:
        """Nothing is left to forget."""


def test_lost_bytes_change_no_table() -> None:
    """If the last layer can't come back from another tier, the first keeps all its tokens."""
    tables = make_tables(BlockPool(SPEC, 30))
    feed(tables, 8, seed=0)
    policy = LayerBudget.preset("hermes", 4)
    guidance = [torch.rand(8, generator=Generator().manual_seed(1)) for _ in tables]
    decision = policy.decide(observe(policy, tables, guidance=guidance))
    assert decision
    tables[-1].swap_out(lambda block: Lost())
    with pytest.raises(TierError):
        apply(tables, decision)
    assert {table.length for table in tables} == {8}


def test_a_fork_keeps_what_its_twin_evicts() -> None:
    """Eviction never writes to a block that somebody else holds."""
    tables = make_tables(BlockPool(SPEC, 60))
    feed(tables, 8, seed=0)
    forks = [table.fork() for table in tables]
    before = [[x.clone() for x in fork.gather(0)] for fork in forks]
    evict(LayerBudget.preset("hermes", 4), tables, seed=1)
    for fork, (k, v) in zip(forks, before, strict=True):
        assert torch.equal(fork.gather(0)[0], k) and torch.equal(fork.gather(0)[1], v)


def test_refused_tables() -> None:
    """Other tables than the decision's, a pending tail, layers in one table: nothing changes."""
    pool = BlockPool(SPEC, 60)
    tables = make_tables(pool)
    feed(tables, 8, seed=0)
    policy = LayerBudget.preset("sliding_window", 4, shared=False)
    decision = policy.decide(observe(policy, tables))
    assert decision
    with pytest.raises(InvalidRequest, match="10 layers and 9 tables"):
        apply(tables[1:], decision)
    with pytest.raises(InvalidRequest, match="one pool"):
        apply([*tables[1:], TokenTable(BlockPool(SPEC, 1))], decision)
    with tables[-1].extend(1), pytest.raises(InvalidRequest, match="still pending"):
        apply(tables, decision)
    assert {table.length for table in tables} == {8}
    tables[-1].truncate(5)
    with pytest.raises(InvalidRequest, match="token 7 of a table of 5"):
        apply(tables, decision)
    assert tables[0].length == 8
    together = TokenTable(BlockPool(KVSpec(LAYERS, 2, 4, 4), 8))
    with pytest.raises(InvalidRequest, match="shared=True"):
        apply([together], decision)
