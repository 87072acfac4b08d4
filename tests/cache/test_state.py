"""States of fixed size: one moment each, never a mix, and nothing leaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamgen.cache import Append, BlockPool, BlockTable, KVSpec
from streamgen.cache.state import (
    HybridCache,
    StatePool,
    StateSlot,
    StateSnapshot,
    StateSpec,
    resume_point,
)
from streamgen.errors import InvalidRequest, PoolFull

PARTS = {
    "rnn": ((2, 3), torch.float32),
    "odd": ((3,), torch.uint8),  # leaves what follows it unaligned in a payload
    "step": ((), torch.int64),
    "conv": ((2, 2), torch.bfloat16),
}
KiB, MiB, GiB = 2**10, 2**20, 2**30


@pytest.fixture
def pool() -> StatePool:
    """Room for four states."""
    return StatePool(StateSpec(PARTS), 4)


def fill(state: StateSlot, boundary: int, value: float) -> None:
    with state.update(boundary) as tensors:
        for tensor in tensors.values():
            tensor.fill_(value)


def values(state: StateSlot) -> set[float]:
    """Every number in the state; one if all tensors are of one moment."""
    return {x for tensor in state.tensors().values() for x in tensor.flatten().tolist()}


# What a state is


def test_spec() -> None:
    """Bytes are those of all tensors; a scalar has one element."""
    assert StateSpec(PARTS).nbytes == 24 + 3 + 8 + 8
    assert StatePool(StateSpec(PARTS), 3).stats().bytes == 3 * 43


@pytest.mark.parametrize("parts", [{}, {"x": ((2, 0), torch.float32)}])
def test_no_spec(parts: Any) -> None:
    """Nothing to hold is refused."""
    with pytest.raises(InvalidRequest, match="at least"):
        StateSpec(parts)
    with pytest.raises(InvalidRequest, match="at least 1 slot"):
        StatePool(StateSpec(PARTS), 0)


def test_opens_at_zero(pool: StatePool) -> None:
    """Zeros, also in a slot where another state has lain."""
    state = pool.open()
    fill(state, 1, 7)
    state.close(), state.close()
    again = pool.open()
    assert again.boundary == 0 and values(again) == {0.0}
    with pytest.raises(InvalidRequest, match="closed"):
        state.tensors()


def test_updates_in_place(pool: StatePool) -> None:
    """The owner's address stays through updates, snapshots and rewinds: one graph can serve all."""
    state = pool.open()
    address = {name: x.data_ptr() for name, x in state.tensors().items()}
    snapshot = state.snapshot()
    for boundary in range(1, 6):
        fill(state, boundary, boundary)
    state.rewind(snapshot)
    assert {name: x.data_ptr() for name, x in state.tensors().items()} == address
    assert (state.boundary, values(state)) == (0, {0.0})


def test_snapshot_is_a_copy(pool: StatePool) -> None:
    """What the owner writes later is not in it; it can be used more than once."""
    state = pool.open()
    fill(state, 1, 1)
    snapshot = state.snapshot()
    for _ in range(2):
        fill(state, 2, 2)
        assert values(state) == {2.0}
        state.rewind(snapshot)
        assert (state.boundary, values(state)) == (1, {1.0})
    snapshot.release(), snapshot.release()
    assert pool.stats().live == 1
    with pytest.raises(InvalidRequest, match="boundary 1 was released"):
        state.rewind(snapshot)
    with pytest.raises(InvalidRequest, match="another pool"):
        StatePool(StateSpec(PARTS), 1).open().rewind(state.snapshot())


def test_fork_copies_on_write(pool: StatePool) -> None:
    """Twins share one slot until one of them writes; neither sees the other's writes."""
    state = pool.open()
    fill(state, 1, 1)
    twin, third = state.fork(), state.fork()
    assert (pool.stats().live, pool.stats().shared) == (1, 1)
    fill(twin, 2, 2)
    assert pool.stats().live == 2
    fill(state, 2, 3)
    state.close()
    assert (values(twin), values(third), third.boundary) == ({2.0}, {1.0}, 1)
    before = third.tensors()["rnn"].data_ptr()
    fill(third, 2, 4)  # alone by now: in place
    assert third.tensors()["rnn"].data_ptr() == before and values(twin) == {2.0}
    twin.close(), third.close()
    assert pool.stats().free == 4


def test_rewind_of_a_twin_leaves_the_other(pool: StatePool) -> None:
    """A shared state is not written by a rewind either."""
    state = pool.open()
    snapshot = state.snapshot()
    fill(state, 1, 1)
    twin = state.fork()
    twin.rewind(snapshot)
    assert (values(twin), values(state)) == ({0.0}, {1.0})


# All or nothing


def test_a_failed_update_is_no_moment(pool: StatePool) -> None:
    """Half written, it can be neither kept nor shared nor continued, only rewound."""
    state = pool.open()
    snapshot = state.snapshot()
    with pytest.raises(KeyError), state.update(1) as tensors:
        tensors["rnn"].fill_(1)
        assert state.boundary is None
        raise KeyError
    assert state.boundary is None
    for verb in (state.snapshot, state.fork, lambda: fill(state, 1, 1)):
        with pytest.raises(InvalidRequest, match="rewind"):
            verb()
    state.rewind(snapshot)
    assert (state.boundary, values(state)) == (0, {0.0})
    fill(state, 1, 1)
    assert state.boundary == 1


def test_pool_full(pool: StatePool) -> None:
    """Every verb that needs a slot says who holds them and changes nothing."""
    state, other = pool.open(), pool.open()
    fill(state, 1, 1), fill(other, 1, 5)
    twin, snapshots = state.fork(), [other.snapshot(), other.snapshot()]
    before = pool.stats()
    needs = (
        pool.open,
        state.snapshot,
        lambda: fill(twin, 2, 2),
        lambda: twin.rewind(snapshots[0]),
    )
    for verb in needs:
        with pytest.raises(PoolFull, match=r"0 of 4 slots .*43 bytes.*: 4; .*forks: 1\)"):
            verb()
        assert pool.stats() == before
        assert (state.boundary, twin.boundary, values(state), values(twin)) == (1, 1, {1.0}, {1.0})
    snapshots[0].release()
    fill(twin, 2, 2)
    assert (values(twin), values(state)) == ({2.0}, {1.0})
    pool.check()


@settings(max_examples=settings.default.max_examples // 2)
@given(st.dictionaries(st.sampled_from("abc"), st.frozensets(st.integers(1, 12)), min_size=1))
def test_resume_point(available: dict[str, frozenset[int]]) -> None:
    """The largest number that is in every set, or the start: the same as trying all."""
    expected = 0
    for boundary in range(13):
        if all(boundary in part for part in available.values()):
            expected = boundary
    assert resume_point(available) == expected
    assert resume_point({name: sorted(part) for name, part in available.items()}) == expected


def test_resume_point_of_nothing() -> None:
    """No part: refused. A part that is nowhere: the start."""
    assert resume_point({"kv": range(100), "state": ()}) == 0
    with pytest.raises(InvalidRequest, match="part"):
        resume_point({})


class Hybrid:
    """The smallest model with both: an attention layer over all tokens and a recurrent layer.

    A token's output depends on every token before it through either layer, and on a generator
    whose state is a part too. K/V lie in a table, two tokens a block; states in a pool.
    """

    PAGE = 2

    def __init__(self, snapshots: int) -> None:
        self.noise = torch.Generator().manual_seed(3)
        spec = KVSpec(num_layers=1, kv_heads=1, head_dim=4, block_tokens=self.PAGE)
        self.table = BlockTable(BlockPool(spec, 64), Append(32))
        parts = {
            "rnn": ((4, 4), torch.float32),
            "rng": (tuple(self.noise.get_state().shape), torch.uint8),
        }
        self.pool = StatePool(StateSpec(parts), 1 + snapshots)
        self.state = self.pool.open()
        with self.state.update(0) as tensors:
            tensors["rng"].copy_(self.noise.get_state())

    def page(self, tokens: Tensor) -> Tensor:
        """Output `[PAGE, 4]` of the next page of tokens `[PAGE, 4]`."""
        end = (self.table.end + 1) * self.PAGE
        with self.table.chunk(1) as chunk, self.state.update(end) as state:
            chunk.write(0, tokens[:, None], tokens[:, None].flip(-1))
            k, v = (x[:, 0] for x in chunk.kv(0))
            out = torch.softmax(tokens @ k.T, -1) @ v
            for row, token in enumerate(tokens):
                state["rnn"].mul_(0.9).add_(torch.outer(token, out[row]))
                out[row] += token @ state["rnn"]
            self.noise.set_state(state["rng"].clone())
            out += torch.randn(out.shape, generator=self.noise)
            state["rng"].copy_(self.noise.get_state())
            chunk.commit()
        return out


@pytest.mark.parametrize(("every", "stop"), [(2, 13), (4, 13), (6, 12), (10, 9)])
def test_resume_equals_a_straight_run(every: int, stop: int) -> None:
    """Snapshots every so many tokens, a second request that shares `stop` of them: from the resume
    point on it makes bitwise what a straight run makes."""
    tokens = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    straight = Hybrid(0)
    expected = torch.cat([straight.page(page) for page in tokens.split(2)])
    model, states, tables = Hybrid(9), {}, {0: None}
    start = model.state.snapshot()
    for page in tokens[:16].split(2):
        model.page(page)
        tables[model.table.end * 2] = model.table.snapshot()
        assert model.state.boundary is not None
        if model.state.boundary % every == 0:
            states[model.state.boundary] = model.state.snapshot()
    shared = {"kv": [b for b in tables if b <= stop], "state": [b for b in states if b <= stop]}
    point = resume_point(shared)
    assert point == stop // every * every  # a page is a divisor of every distance here
    table, state = tables[point], states.get(point, start)
    model.table = BlockTable(model.table.pool, Append(32))
    if table:
        model.table.rewind(table)
    model.state.rewind(state)
    assert model.table.end * 2 == model.state.boundary == point
    again = torch.cat([model.page(page) for page in tokens[point:].split(2)])
    assert torch.equal(again, expected[point:])


# Against the naive model


@dataclass
class Twin:
    """A state, and what is in it."""

    state: StateSlot
    boundary: int
    value: float


verbs = st.sampled_from(["open", "update", "update", "fail", "snapshot", "fork", "rewind", "close"])
steps = st.tuples(verbs, st.integers(0, 5), st.integers(0, 5))


@settings(max_examples=settings.default.max_examples // 2)
@given(script=st.lists(steps, max_size=30))
def test_lives(script: list[tuple[str, int, int]]) -> None:
    """Any order of verbs in a small pool: every state and snapshot holds what was written to it,
    a full pool changes nothing, and at the end nothing is left."""
    pool, twins = StatePool(StateSpec(PARTS), 4), list[Twin]()
    snapshots: list[tuple[StateSnapshot, float]] = []
    for number, (verb, one, other) in enumerate(script):
        twin = twins[one % len(twins)] if twins else None
        try:
            if verb == "open":
                twins.append(Twin(pool.open(), 0, 0.0))
            elif verb == "snapshot" and twin:
                snapshots.append((twin.state.snapshot(), twin.value))
            elif verb == "fork" and twin:
                twins.append(Twin(twin.state.fork(), twin.boundary, twin.value))
            elif verb == "update" and twin:
                fill(twin.state, number, number)
                twin.boundary, twin.value = number, number
            elif verb == "fail" and twin and snapshots:
                with pytest.raises(KeyError), twin.state.update(number) as tensors:
                    tensors["odd"].fill_(99)
                    raise KeyError
                verb = "rewind"
            if verb == "rewind" and twin and snapshots:
                snapshot, value = snapshots[other % len(snapshots)]
                twin.state.rewind(snapshot)
                twin.boundary, twin.value = snapshot.boundary, value
            elif verb == "close" and twin:
                twin.state.close()
                twins.remove(twin)
                if snapshots:
                    snapshots.pop(other % len(snapshots))[0].release()
        except PoolFull:
            assert pool.stats().free == 0
        pool.check()
        for twin in twins:
            assert (twin.state.boundary, values(twin.state)) == (twin.boundary, {twin.value})
        assert pool.stats().live <= len(twins) + len(snapshots)
    for twin in twins:
        twin.state.close()
    for snapshot, _ in snapshots:
        snapshot.release()
    assert pool.stats().free == 4


# Other tiers


class Shelf:
    """A tier: bytes on a shelf."""

    def __init__(self, pool: StatePool, state: StateSlot | StateSnapshot) -> None:
        assert state._blob is not None
        self.bytes = bytearray(pool.payload_bytes)
        pool.read(state._blob, memoryview(self.bytes))
        pool.unload(state._blob, self)
        self.wanted = True

    def read(self, out: memoryview) -> None:
        out[:] = self.bytes

    def forget(self) -> None:
        self.wanted = False


def test_away_and_back(pool: StatePool) -> None:
    """A parked state and a snapshot free their slots and come back bitwise when they are used."""
    state = pool.open()
    generator = torch.Generator().manual_seed(0)
    with state.update(3) as tensors:
        for tensor in tensors.values():
            tensor.copy_(torch.randint(0, 200, tensor.shape, generator=generator))
    expected = {name: tensor.clone() for name, tensor in state.tensors().items()}
    twin, snapshot = state.fork(), state.snapshot()
    shelves = [Shelf(pool, state), Shelf(pool, snapshot)]
    assert pool.stats().free == 4 and state.boundary == 3
    for found in (state.tensors(), twin.tensors()):
        assert all(torch.equal(found[name], expected[name]) for name in PARTS)
    fill(state, 4, 4)
    state.rewind(snapshot)
    assert all(torch.equal(x, expected[name]) for name, x in state.tensors().items())
    assert not any(shelf.wanted for shelf in shelves)
    lost = Shelf(pool, snapshot)
    snapshot.release()
    assert not lost.wanted and pool.stats().live == 2


# Published arithmetic


def test_reuse_of_a_hybrid_model() -> None:
    """A request that splits off at token 3,700: pages of 16, a snapshot every 768 tokens."""
    assert HybridCache(page=16, token_bytes=27 * KiB).reuse(3700) == (3696, 4)
    assert HybridCache(page=16, token_bytes=27 * KiB, every=768).reuse(3700) == (3072, 628)


def test_bytes_of_a_hybrid_model() -> None:
    """Kimi K3: a snapshot of 414 MiB weighs 15,701 tokens of 27 KiB; a prompt of 6,144 tokens has
    162 MiB of attention K/V and eight snapshots of 3.23 GiB in all."""
    kimi = HybridCache(page=16, token_bytes=27 * KiB, every=768, state_bytes=414 * MiB)
    assert int(kimi.snapshot_tokens) == 15_701
    assert kimi.kv_bytes(6144) == 162 * MiB
    assert kimi.snapshots(6144) == 8
    assert round(kimi.snapshot_bytes(6144) / GiB, 2) == 3.23


def test_where_these_bytes_come_from() -> None:
    """24 MLA layers with 512 + 64 latent channels in 16 bits; 69 recurrent layers in fp32, whose
    96 heads of 128 x 128 are what the published total leaves a layer (not a published shape)."""
    assert 24 * (512 + 64) * 2 == 27 * KiB
    assert StateSpec({"kda": ((69, 96, 128, 128), torch.float32)}).nbytes == 414 * MiB


def test_pages_that_do_not_divide() -> None:
    """The resume point is a boundary of both: a multiple of both distances."""
    assert HybridCache(page=16, token_bytes=1, every=100).reuse(850) == (800, 50)
    assert HybridCache(page=16, token_bytes=1, every=100).reuse(399) == (0, 399)
    assert HybridCache(page=16, token_bytes=2).kv_bytes(17) == 2 * 32
    assert HybridCache(page=16, token_bytes=2).snapshots(6144) == 0
    for wrong in ({"page": 0}, {"page": 16, "every": 0}):
        with pytest.raises(InvalidRequest, match="at least 1 token"):
            HybridCache(token_bytes=1, **wrong)
