"""Coded pools: what a chunk reads and writes, when it is encoded, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from streamgen.cache import Append, BlockPool, BlockTable, Chunk, KVSpec, SinkWindow
from streamgen.cache.chunk import CodedChunk
from streamgen.cache.codec import CODECS, KVCodec, make_codecs
from streamgen.cache.staging import Staging
from streamgen.errors import InvalidRequest

LOSSY = CODECS[1:]
LAYERS, HEADS, DIM, TOKENS = 2, 2, 16, 3
Frames = list[tuple[Tensor, Tensor]]  # K and V by layer, [frames * TOKENS, HEADS, DIM]


def spec_of(codec: str, dtype: torch.dtype = torch.float32) -> KVSpec:
    return KVSpec(LAYERS, HEADS, DIM, TOKENS, dtype, codec)


def pool_of(codec: str, dtype: torch.dtype = torch.float32, blocks: int = 24) -> BlockPool:
    return BlockPool(spec_of(codec, dtype), blocks)


def draw(frames: int, seed: int, dtype: torch.dtype = torch.float32) -> Frames:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(LAYERS, 2, frames * TOKENS, HEADS, DIM, generator=generator).to(dtype)
    return [(k, v) for k, v in x]


def write(chunk: Chunk, frames: Frames, raw: Frames | None = None) -> None:
    for layer, (k, v) in enumerate(frames):
        chunk.write(layer, k, v)
    for layer, (k, v) in enumerate(raw or ()):
        chunk.write_sink(layer, k, v)


def roll(table: BlockTable, chunks: int, n: int = 3, seed: int = 0) -> None:
    """Commit chunks; a shadowed sink's raw keys are the other ones plus 1."""
    for index in range(chunks):
        with table.chunk(n) as chunk:
            frames = draw(n, seed + index, table.pool.spec.dtype)
            rows = chunk.sinks * TOKENS
            write(chunk, frames, [(k[:rows] + 1, v[:rows]) for k, v in frames] if rows else None)
            chunk.commit()


def rounded(spec: KVSpec, x: Tensor, side: int) -> Tensor:
    """decode(encode(x)) for rows of whole blocks, one block at a time, in fresh tensors."""
    codec, blocks = make_codecs(spec.codec, spec.dtype)[side], x.float().split(TOKENS)
    shape = (1, TOKENS, HEADS, DIM)
    out = []
    for block in blocks:
        parts = [torch.zeros((1, *part.shape), dtype=part.dtype) for part in spec.layout[side]]
        codec.encode(block.reshape(shape).clone(), parts, torch.zeros(shape, dtype=torch.int32))
        out.append(torch.zeros(shape))
        codec.decode(parts, out[-1], torch.zeros(shape, dtype=torch.int32))
    return torch.cat([block[0] for block in out]).to(spec.dtype)


# Bytes


@pytest.mark.parametrize("codec", CODECS)
def test_storage_is_the_spec(codec: str) -> None:
    """Bytes of the tensors, of a block that leaves the pool, of a token and of shared scales."""
    pool = pool_of(codec)
    spec = pool.spec
    tensors = [tensor for layer in pool.parts for side in layer for tensor in side]
    assert sum(x.nbytes for x in tensors) == 24 * spec.block_bytes == pool.stats().bytes
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
    assert pool.payload_bytes == spec.block_bytes
    assert spec.block_bytes == TOKENS * spec.token_bytes + spec.scale_bytes
    by_hand = {
        "raw": (2 * DIM * 4, 0),
        "fp8_e4m3": (2 * DIM, 2 * 4),
        "fp8_e5m2": (2 * DIM, 2 * 4),
        "int8": (DIM + DIM + 4, DIM * 4),
        "nvfp4": (2 * (DIM // 2 + DIM // 16), 2 * 4),
    }
    heads = LAYERS * HEADS
    assert (spec.token_bytes, spec.scale_bytes) == tuple(heads * x for x in by_hand[codec])


def test_rows_of_a_coded_pool_are_refused() -> None:
    """Codes without their scales are no keys."""
    with pytest.raises(IndexError):
        pool_of("int8").rows(0, 0, 1)


# What a chunk sees


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", LOSSY)
def test_a_chunk_sees_itself_exactly_and_the_past_rounded(codec: str, dtype: torch.dtype) -> None:
    """Its own frames as last written, at every step; the past as decode(encode(x)), bitwise."""
    table = BlockTable(pool_of(codec, dtype), SinkWindow(1, 6))
    roll(table, 3)
    with table.chunk(3) as chunk:
        assert type(chunk) is CodedChunk and chunk.meta.ordinals == (0, 11, 7, 8, 9, 10)
        for step in range(3):
            mine = draw(3, 100 + step, dtype)
            write(chunk, mine)
            for layer in (1, 0, 0):
                for side, seen in enumerate(chunk.kv(layer)):
                    past = rounded(table.pool.spec, draw(3, 2, dtype)[layer][side], side)
                    first = rounded(table.pool.spec, draw(3, 0, dtype)[layer][side], side)
                    own = mine[layer][side].split(TOKENS)
                    oldest, *kept = past.split(TOKENS)
                    expected = [first[:TOKENS], own[2], *kept, own[0], own[1]]
                    assert torch.equal(seen, torch.cat(expected)) and seen.dtype == dtype


def test_raw_pools_lend_nothing() -> None:
    """A raw pool's chunk is a plain `Chunk` that reads the pool itself."""
    table = BlockTable(pool_of("raw"), SinkWindow(1, 6))
    chunk = table.chunk(3)
    assert type(chunk) is Chunk and table.pool.stats().staging == 0
    assert chunk.kv(0)[0].data_ptr() == table.pool.k[0].data_ptr()


@pytest.mark.parametrize("codec", LOSSY)
def test_shadowed_sink(codec: str) -> None:
    """Raw keys are coded in the sink's own block; the lane shows what `shadow` was filled with."""
    table = BlockTable(pool_of(codec), SinkWindow(2, 6, shadow_sink=True))
    spec = table.pool.spec
    roll(table, 1)
    frames = draw(3, 0)
    for _ in range(2):
        with table.chunk(2) as chunk:
            write(chunk, draw(2, 7))
            for layer in range(LAYERS):
                k, v = frames[layer]
                raw, values = chunk.sink(layer)
                sunk = 2 * TOKENS
                assert torch.equal(raw, rounded(spec, k[:sunk] + 1, 0))
                assert torch.equal(values, rounded(spec, v[:sunk], 1))
                chunk.kv(layer)
                chunk.shadow(layer).copy_(raw * 2)
                seen_k, seen_v = chunk.kv(layer)
                assert torch.equal(seen_k[:sunk], raw * 2) and torch.equal(seen_v[:sunk], values)
                assert torch.equal(chunk.sink(layer)[0], raw)
            chunk.commit()


def test_sink_in_two_chunks() -> None:
    """A chunk may hold a part of the sink, committed and pending frames side by side."""
    table = BlockTable(pool_of("int8"), SinkWindow(2, 6, shadow_sink=True))
    roll(table, 1, n=1)
    with table.chunk(2) as chunk:
        assert (chunk.sinks, len(chunk.shadow(0)), len(chunk.sink(0)[0])) == (1, TOKENS, TOKENS)
        frames = draw(2, 5)
        write(chunk, frames, [(k[:TOKENS] - 1, v[:TOKENS]) for k, v in frames])
        assert torch.equal(chunk.kv(0)[0][TOKENS:], frames[0][0])
        chunk.commit()
    expected = torch.cat([draw(1, 0)[0][0] + 1, frames[0][0][:TOKENS] - 1])
    assert torch.equal(table.chunk(1).sink(0)[0], rounded(table.pool.spec, expected, 0))


# Encoded once


class Counting:
    """A codec that counts the blocks that it encodes."""

    def __init__(self, codec: KVCodec, counts: Counter[str], side: str) -> None:
        self.codec, self.counts, self.side = codec, counts, side

    def encode(self, x_NTHD: Tensor, out: Sequence[Tensor], work: Tensor) -> None:
        self.counts[self.side] += len(x_NTHD)
        self.codec.encode(x_NTHD, out, work)

    def decode(self, coded: Sequence[Tensor], out_NTHD: Tensor, work: Tensor) -> None:
        self.counts["decoded " + self.side] += len(out_NTHD)
        self.codec.decode(coded, out_NTHD, work)


@pytest.fixture
def counted() -> tuple[BlockTable, Counter[str]]:
    """A table of an fp8 pool, and counts of blocks x layers."""
    pool, counts = pool_of("fp8_e4m3"), Counter[str]()
    k, v = pool.codecs
    pool.codecs = (Counting(k, counts, "k"), Counting(v, counts, "v"))  # type: ignore[assignment]
    return BlockTable(pool, SinkWindow(1, 6, shadow_sink=True)), counts


def test_encoded_once_at_commit(counted: tuple[BlockTable, Counter[str]]) -> None:
    """Not by steps, nor by a refused commit or an abort, nor when blocks move or are shared."""
    table, counts = counted
    with table.chunk(3) as chunk:
        for step in range(4):
            write(chunk, draw(3, step))
        with pytest.raises(InvalidRequest, match="not written"):
            chunk.commit()
        assert not counts
        write(chunk, draw(3, 9), draw(1, 9))
        chunk.commit()
    assert (counts["k"], counts["v"]) == (3 * LAYERS, 3 * LAYERS)
    mark, twin = table.snapshot(), table.fork()
    roll(twin, 2)
    with table.chunk(2) as chunk:
        write(chunk, draw(2, 3))
    roll(table, 1)
    table.rewind(mark)
    table.park()
    table.chunk(1, undo=True).abort()
    assert (counts["k"], counts["v"]) == (12 * LAYERS, 12 * LAYERS)


def test_decoded_once_for_a_layer_in_a_row(counted: tuple[BlockTable, Counter[str]]) -> None:
    """Asking for the same layer again, with new K and V of its own, decodes nothing."""
    table, counts = counted
    roll(table, 3)
    chunk = table.chunk(2)
    write(chunk, draw(2, 1))
    for layer in (0, 0, 1, 1, 0):
        chunk.kv(layer)
    assert counts["decoded k"] == counts["decoded v"] == 3 * 4  # a window of 6 less the own 2


# What it costs


class Ledger(TorchDispatchMode):
    """Notes every operator and every result that lies neither in the pool nor in its buffers."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__()
        tensors = [*pool._storage]
        for staging in pool._stagings:
            tensors += staging._buffers.values()
        self.known = {x.untyped_storage().data_ptr() for x in tensors}
        self.ops: list[str] = []
        self.strangers: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.ops.append(str(func))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if x.numel() and x.untyped_storage().data_ptr() not in self.known:
                self.strangers.append(str(func))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("codec", LOSSY)
def test_steady_state_allocates_nothing(codec: str, shadow: bool, dtype: torch.dtype) -> None:
    """Whole chunks, begin to commit, work in the pool and its buffers; these stay as they are."""
    pool = pool_of(codec, dtype)
    table = BlockTable(pool, SinkWindow(1, 6, shadow_sink=shadow))
    roll(table, 4)
    mine, buffers, views = draw(3, 9, dtype), pool.stats().staging, set()
    for _ in range(3):
        with Ledger(pool) as ledger:
            chunk = table.chunk(3)
        began = [op for op in ledger.ops if "copy" in op or "mul" in op]
        assert not ledger.strangers and not began, "beginning a chunk moved something"
        with Ledger(pool) as ledger, chunk:
            for _ in range(2):
                for layer in range(LAYERS):
                    if shadow:
                        chunk.shadow(layer).copy_(chunk.sink(layer)[0])
                    chunk.write(layer, *mine[layer])
                    views.add(tuple((x.data_ptr(), x.shape) for x in chunk.kv(layer)))
            chunk.commit()
        assert not ledger.strangers
    assert len(views) == 1 and pool.stats().staging == buffers


def test_sessions_in_turn_share_buffers() -> None:
    """Two pending chunks have buffers of their own; those that take turns have the same."""
    pool = pool_of("fp8_e4m3", blocks=40)
    tables = [BlockTable(pool, SinkWindow(1, 6)) for _ in range(3)]
    for table in tables:
        roll(table, 3)
    assert len(pool._stagings) == 1
    chunks = [table.chunk(2) for table in tables[:2]]
    for index, chunk in enumerate(chunks):
        write(chunk, draw(2, index))
    views = [chunk.kv(1) for chunk in chunks]
    for index, (k, v) in enumerate(views):
        assert chunks[index].meta.ordinals[4:] == (9, 10)
        own = draw(2, index)[1]
        assert torch.equal(k[4 * TOKENS :], own[0]) and torch.equal(v[4 * TOKENS :], own[1])
    chunks[0].commit()
    chunks[1].abort()
    chunks[1].abort()
    roll(tables[2], 2)
    assert len(pool._stagings) == len(pool._idle) == 2


def test_closing_gives_the_buffers_back() -> None:
    """A table that is closed with a chunk pending."""
    pool = pool_of("int8")
    table = BlockTable(pool, SinkWindow(1, 6))
    table.chunk(2)
    assert not pool._idle
    table.close()
    assert len(pool._idle) == 1


def test_no_memory_for_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that can't have them changes nothing, and the next one can."""
    pool = pool_of("int8")
    table = BlockTable(pool, SinkWindow(1, 6))
    roll(table, 3)
    before = (table.entries, table.end, table.lane, pool.stats())

    def refuse(self: Staging, *sizes: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "fit", refuse)
        with pytest.raises(MemoryError):
            table.chunk(3)
    assert (table.entries, table.end, table.lane, pool.stats()) == before
    assert table.pending is None
    pool.check()
    roll(table, 1)
    assert table.end == 12


# Elsewhere and back


class Shelf:
    """Another tier: bytes in a dictionary."""

    def __init__(self, data: bytes) -> None:
        self.data: bytes | None = data

    def read(self, out: memoryview) -> None:
        assert self.data is not None
        out[:] = self.data

    def forget(self) -> None:
        self.data = None


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_parked_and_fetched(codec: str, tokens: int) -> None:
    """Codes and scales of every block go to another tier and come back, bitwise.

    With one token a block, parts have odd sizes, so nothing is aligned in the bytes.
    """
    pool = BlockPool(KVSpec(LAYERS, 1, DIM, tokens, torch.float32, codec), 12)
    table = BlockTable(pool, Append(4))
    with table.chunk(4) as chunk:
        for layer in range(LAYERS):
            x = torch.randn(4 * tokens, 1, DIM, generator=torch.Generator().manual_seed(layer))
            chunk.write(layer, x, x + 1)
        chunk.commit()
    table.park()
    before = {}
    for ordinal, block in table.entries:
        before[ordinal] = bytearray(pool.payload_bytes)
        pool.read(block, memoryview(before[ordinal]))
        pool.unload(block, Shelf(bytes(before[ordinal])))
    for tensor in pool._storage:
        tensor.view(torch.uint8).fill_(255)
    assert pool.stats().free == 12
    for ordinal, block in table.entries:
        pool.load(block, ordinal + 2)
        got = bytearray(pool.payload_bytes)
        pool.read(block, memoryview(got))
        assert got == before[ordinal]


def test_copy_on_write_of_codes() -> None:
    """`own` copies a shared block with its scales."""
    table = BlockTable(pool_of("int8"), SinkWindow(1, 6))
    roll(table, 1)
    (_, block), *_ = table.fork().entries
    twin = table.pool.own(block)
    assert twin is not block
    for tensor in table.pool._storage:
        assert torch.equal(tensor[twin.slot], tensor[block.slot])


# At the door


def test_wrong_tensors_are_refused() -> None:
    """As by a raw pool, with both shapes, for the sink too."""
    table = BlockTable(pool_of("nvfp4"), SinkWindow(2, 6, shadow_sink=True))
    chunk = table.chunk(3)
    x = draw(3, 0)[0][0]
    with pytest.raises(InvalidRequest, match=r"\(9, 2, 16\) torch.float64; .* take \(9, 2, 16\) t"):
        chunk.write(0, x, x.double())
    with pytest.raises(InvalidRequest, match=r"\(9, 2, 16\) .* take \(6, 2, 16\)"):
        chunk.write_sink(0, x, x)
    chunk.abort()
    for call in (lambda: chunk.kv(0), lambda: chunk.sink(0), lambda: chunk.shadow(0), chunk.commit):
        with pytest.raises(InvalidRequest, match="is over"):
            call()


def test_gradients_and_inference_mode() -> None:
    """A tensor that needs a gradient leaves no graph; buffers made in inference mode are normal."""
    table = BlockTable(pool_of("fp8_e4m3"), SinkWindow(1, 6))
    with torch.inference_mode():
        roll(table, 1)
    with table.chunk(3) as chunk:
        write(chunk, [(k.requires_grad_(), v) for k, v in draw(3, 1)])
        assert not chunk.kv(1)[0].requires_grad
        chunk.commit()
    assert table.end == 6
