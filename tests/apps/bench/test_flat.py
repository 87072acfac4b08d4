"""Memory over a long video is flat in every mode; and a leak would be seen."""

from __future__ import annotations

import gc

import pytest
import torch

from streamgen.apps.bench import flat
from streamgen.apps.bench.video import _memory_lines
from streamgen.session import Session


@pytest.mark.parametrize("name", flat.MODES)
def test_flat(name: str) -> None:
    """The same blocks and bytes of tensors soon after the window is full, and later."""
    mode = flat.MODES[name]
    found = flat.measure_memory(30, 130 if mode.wan else 60, {name: mode})[name]
    near, far = found["near"], found["far"]
    assert found["flat"], (near, far)
    assert far["frame"] >= near["frame"] + flat.EVERY * flat.make(mode).config.chunk_frames
    assert near["blocks"] > 0 and near["tensor_bytes"] > found["pool_bytes"] > 0


def test_modes_are_what_they_say() -> None:
    """All recaches, all codecs, both positions, chunks of one frame, a decoder with a past."""
    modes = flat.MODES.values()
    assert {mode.recache for mode in modes} == {
        None,
        "last_chunk",
        "window_causal",
        "window_bidirectional",
    }
    assert {mode.kv for mode in modes} == {"raw", "fp8", "int8", "nvfp4"}
    configs = [flat.make(mode).config for mode in modes]
    assert {config.positions for config in configs} == {"absolute", "sliding_sink"}
    assert {config.chunk_frames for config in configs} == {1, 3, 5}
    assert any(mode.wan for mode in modes) and any(mode.overlap for mode in modes)


def test_texts_change() -> None:
    """A mode that recaches does so, again and again."""
    pipe = flat.make(flat.MODES["recache: last chunk"])
    with pipe.session("snow", history_seconds=0) as session:
        flat._advance(session, flat.MODES["recache: last chunk"], 150)
        assert [event.value["text"] for event in session.track] == ["night", "snow", "night"]


def test_a_leak_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk's pixels kept as a tensor: not flat, by just their bytes."""
    kept, step = [], Session.step

    def leaky(self: Session):  # type: ignore[no-untyped-def]
        chunk = step(self)
        kept.append(torch.zeros(100))
        return chunk

    monkeypatch.setattr(Session, "step", leaky)
    found = flat.measure_memory(50, 100, {"leaky": flat.Mode()})["leaky"]
    assert not found["flat"]
    assert found["far"]["tensor_bytes"] - found["near"]["tensor_bytes"] == 400 * 10
    assert any("NOT FLAT" in line for line in _memory_lines({"leaky": found}))


def test_live_tensors() -> None:
    """A storage counts once, however many see it, and no more when it is gone."""
    gc.freeze()
    assert flat.live_tensor_bytes() == 0
    x = torch.zeros(1000)
    views = [x, x[:10], x.view(10, 100)]
    assert flat.live_tensor_bytes() == 4000
    del x, views
    assert flat.live_tensor_bytes() == 0
    gc.unfreeze()
