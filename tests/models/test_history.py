"""What attention sees of a cache chunk: rotation, the moving sink, the causal mask, a text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamgen.cache import BlockPool, BlockTable, KVSpec, SinkWindow
from streamgen.kernels import reference
from streamgen.models.history import CachedHistory, CachedPrompt
from streamgen.models.rope import rotate, rotation

GRID, HEADS, HEAD, LAYERS = (2, 3), 2, 12, 2
TOKENS = GRID[0] * GRID[1]
SINK, WINDOW, CHUNK = 1, 6, 2


def data(frames: range, layer: int, kind: int) -> Tensor:
    """Queries, keys or values (kind 0, 1, 2) of some frames, the same whenever asked for."""
    generator = torch.Generator()
    rows = []
    for frame in frames:
        generator.manual_seed(1000 * kind + 100 * layer + frame)
        rows.append(torch.randn(1, TOKENS, HEADS, HEAD, generator=generator))
    return torch.cat(rows, dim=1)


class Stream:
    """A table that is filled with `data`, and the attention of its newest chunk."""

    def __init__(
        self, sink: int = SINK, window: int = WINDOW, moving: bool = False, slots: int = 24
    ) -> None:
        self.window, self.moving = window, moving
        spec = KVSpec(LAYERS, HEADS, HEAD, TOKENS)
        policy = SinkWindow(sink, window, shadow_sink=moving)
        self.table = BlockTable(BlockPool(spec, slots), policy)

    def history(self, chunk, blocks: tuple[int, int] | None = None) -> CachedHistory:
        return CachedHistory(chunk, GRID, self.window if self.moving else None, blocks)

    def attend(self, chunk, blocks: tuple[int, int] | None = None) -> list[Tensor]:
        history, frames = self.history(chunk, blocks), chunk.frames
        return [
            history.attend(layer, *(data(frames, layer, kind) for kind in range(3)))
            for layer in range(LAYERS)
        ]

    def step(self, n: int = CHUNK) -> tuple[range, list[Tensor]]:
        """One chunk: its frames and every layer's attention output."""
        with self.table.chunk(n) as chunk:
            out = self.attend(chunk)
            chunk.commit()
        return chunk.frames, out


def expected(
    frames: range, past: list[int], layer: int, places: dict[int, int] | None = None
) -> Tensor:
    """Attention written out: all frames side by side, each rotated to its place."""
    places = places or {}
    turn = rotation([places.get(f, f) for f in past], GRID, HEAD)
    k = torch.cat([data(range(f, f + 1), layer, 1) for f in past], dim=1)
    v = torch.cat([data(range(f, f + 1), layer, 2) for f in past], dim=1)
    q = rotate(data(frames, layer, 0), rotation(frames, GRID, HEAD))
    return reference.attend(q, rotate(k, turn), v)


def visible(end: int, sink: int = SINK, window: int = WINDOW) -> list[int]:
    return [f for f in range(end) if f < sink or f >= end - (window - sink)]


def test_absolute() -> None:
    """Every chunk attends to the sink and the window, each key at its own frame number."""
    stream = Stream()
    for _ in range(6):
        frames, outputs = stream.step()
        for layer, out in enumerate(outputs):
            want = expected(frames, visible(frames.stop), layer)
            torch.testing.assert_close(out, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("sink", "n"), [(1, 2), (2, 2), (3, 2), (3, 1)])
def test_sliding_sink(sink: int, n: int) -> None:
    """Once the window slides, sink frame i stands at frame `end - window + i`."""
    stream = Stream(sink, 7, moving=True)
    for _ in range(12 // n):
        frames, outputs = stream.step(n)
        shift = max(0, frames.stop - 7)
        places = {f: f + shift for f in range(sink) if f not in frames}
        for layer, out in enumerate(outputs):
            want = expected(frames, visible(frames.stop, sink, 7), layer, places)
            torch.testing.assert_close(out, want, atol=1e-5, rtol=0)


def test_sink_stays_raw() -> None:
    """It is rotated from raw keys every time: after 500 chunks there is no drift."""
    stream = Stream(moving=True)
    for _ in range(500):
        frames, outputs = stream.step()
    places = {0: frames.stop - WINDOW}
    want = expected(frames, visible(frames.stop), 0, places)
    torch.testing.assert_close(outputs[0], want, atol=1e-5, rtol=0)


def test_without_a_sink_the_policies_are_one() -> None:
    """No sink, nothing to move: bitwise the same attention."""
    fixed, moving = Stream(sink=0), Stream(sink=0, moving=True)
    for _ in range(6):
        for one, other in zip(fixed.step()[1], moving.step()[1], strict=True):
            assert torch.equal(one, other)


def test_policies_part_when_the_window_slides() -> None:
    """With a sink they are the same until then and differ from then on."""
    fixed, moving = Stream(), Stream(moving=True)
    differ = []
    for _ in range(5):
        (frames, one), (_, other) = fixed.step(), moving.step()
        worst = max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))
        differ.append((frames.stop > WINDOW, worst > 1e-3))
        assert worst > 1e-3 or worst < 1e-6
    assert all(slid == apart for slid, apart in differ) and differ[-1] == (True, True)


@pytest.mark.parametrize("moving", [False, True])
def test_steps_overwrite(moving: bool) -> None:
    """A noisy pass leaves nothing behind: what is attended to last is what counts."""
    stream, other = Stream(moving=moving), Stream(moving=moving)
    for _ in range(5):
        with stream.table.chunk(CHUNK) as chunk:
            history = stream.history(chunk)
            for layer in range(LAYERS):
                noise = torch.randn(1, CHUNK * TOKENS, HEADS, HEAD)
                history.attend(layer, noise, noise, noise)
            out = [
                history.attend(layer, *(data(chunk.frames, layer, kind) for kind in range(3)))
                for layer in range(LAYERS)
            ]
            chunk.commit()
        assert all(map(torch.equal, out, other.step()[1]))


def test_seconds_grow() -> None:
    """The time spent moving keys is counted."""
    stream = Stream()
    with stream.table.chunk(CHUNK) as chunk:
        history = stream.history(chunk)
        before = history.seconds
        history.attend(0, *(data(chunk.frames, 0, kind) for kind in range(3)))
        assert history.seconds > before >= 0


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("sink", [0, 2])
def test_causal_equals_chunk_by_chunk(sink: int, moving: bool) -> None:
    """Chunks reopened together, each seeing those before it, attend as they did one by one."""
    stream = Stream(sink, 8, moving)
    outputs = [stream.step()[1] for _ in range(4)]
    n = 8 - sink
    with stream.table.reopen(n) as chunk:
        together = stream.attend(chunk, (0, CHUNK))
    for layer, out in enumerate(together):
        apart = torch.cat([output[layer] for output in outputs], dim=1)[:, -n * TOKENS :]
        torch.testing.assert_close(out, apart, atol=1e-5, rtol=0)


def test_causal_blocks_count_from_frame_0() -> None:
    """A reopened span that begins inside a chunk keeps the grid of chunks."""
    stream = Stream(sink=0, window=8)
    outputs = [stream.step()[1] for _ in range(4)]
    with stream.table.reopen(3) as chunk:  # the second half of one chunk, and the next
        together = stream.attend(chunk, (0, CHUNK))
    apart = torch.cat([output[0] for output in outputs], dim=1)[:, -3 * TOKENS :]
    torch.testing.assert_close(together[0], apart, atol=1e-5, rtol=0)


def test_prompt() -> None:
    """Attention to a layer's own keys and values, not rotated; `nbytes` counts them all."""
    layers = [(data(range(2), i, 1), data(range(2), i, 2)) for i in range(LAYERS)]
    prompt, q = CachedPrompt(layers), data(range(1), 0, 0)
    for layer, (k, v) in enumerate(layers):
        torch.testing.assert_close(prompt.attend(layer, q), reference.attend(q, k, v))
    assert prompt.nbytes == LAYERS * 2 * (2 * TOKENS) * HEADS * HEAD * 4
