"""The benchmark of causal video: all ways make one chunk, and its sums are right. No times."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from streamgen.apps.bench import video
from streamgen.apps.bench.clock import ratios, timed, total, use_threads
from streamgen.errors import InvalidRequest
from streamgen.models.rope import rotate, rotation
from streamgen.models.wan import WanConfig, WanModel

SHAPE = WanConfig(48, 80, 2, 2, 4, 4, text_dim=12, text_len=5, freq_dim=32)


def setting(sink: int = 3, window: int = 12) -> video.Setting:
    return video.Setting(SHAPE, (2, 3), sink=sink, window=window, dtype=torch.float32)


@pytest.fixture(scope="module")
def model() -> WanModel:
    torch.manual_seed(0)
    return WanModel(SHAPE).eval().requires_grad_(False)


# What is compared


@pytest.mark.parametrize(("sink", "window"), [(3, 12), (0, 6), (1, 7), (4, 9)])
@torch.no_grad()
def test_all_make_our_chunks(model: WanModel, sink: int, window: int) -> None:
    """Pass by pass, over a window that slides, every cache and both rotations predict the same."""
    ways = video.make_ways(setting(sink, window), model)
    assert list(ways) == ["ours", "concatenate", "roll", "clone and cat"]
    seen: list[Tensor] = []
    for _ in range(3):
        for name in video.PASSES:
            outs = {way: one.run(name) for way, one in ways.items()}
            for way, out in outs.items():
                torch.testing.assert_close(out, outs["ours"], atol=1e-5, rtol=0, msg=way)
        seen.append(ways["ours"].out)
        for one in ways.values():
            one.x = one.x + 1
    assert not torch.allclose(seen[0], seen[1])


def test_positions_in_complex128() -> None:
    """They turn as ours do, row by row of a batch; behind the chunk's tokens nothing turns."""
    engine = setting().as_engine()
    peer = video.AsPeers(video.PEERS["roll"](engine))
    peer.cache.frames = range(7, 10)
    x = torch.randn(2, 3 * 6 + 2, 2, SHAPE.head_dim)
    out, turn = peer._rotate(x), rotation(range(7, 10), (2, 3), SHAPE.head_dim)
    torch.testing.assert_close(out[:, :18], rotate(x[:, :18], turn), atol=1e-6, rtol=0)
    assert torch.equal(out[:, 18:], x[:, 18:])


def test_peers_have_our_weights(model: WanModel) -> None:
    """Not copies of them; only the activation is an operation of its own."""
    theirs = video.in_steps(model)
    mine = dict(model.named_parameters())
    assert all(mine[name] is weight for name, weight in theirs.named_parameters())
    assert len(mine) == len(list(theirs.parameters()))
    assert type(theirs.blocks[1].ffn[0]) is torch.nn.Linear
    assert type(model.blocks[1].ffn[0]) is not torch.nn.Linear


def counted(work: Callable[[], object]) -> int:
    """Floating-point operations of products and attention."""
    mapping = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
        ),
        torch.ops.mkldnn._linear_pointwise: lambda x, w, *_, **__: 2 * math.prod(x) * w[0],
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        work()
    return counter.get_total_flops()


@torch.no_grad()
def test_the_floor_is_the_pass(model: WanModel) -> None:
    """It has every product and attention of one of our passes, and no other."""
    one = setting()
    ours, floor = video.make_ways(one, model)["ours"], video.Floor(one, model)
    ours.run("first")
    operations = counted(lambda: ours.run("next"))
    assert counted(lambda: floor.run("next")) == operations
    # By hand: the products of a block and its two attentions.
    tokens, dim, ffn = 18, 48, 80
    block = 2 * tokens * (6 * dim * dim + 2 * dim * ffn) + 4 * tokens * dim * (12 * 6 + 5)
    assert 2 * block < operations < 2.3 * block


@torch.no_grad()
def test_diffusers_takes_the_window(model: WanModel) -> None:
    """All of its frames at once; it has no clean pass."""
    way = video.Diffusers(setting(), model)
    out = way.run("next")
    assert out is not None and out.shape == (1, 4, 12, 4, 6)
    assert way.run("clean") is None


# Arithmetic


def test_summary() -> None:
    """A chunk is its first pass, three like the next, and the clean one; by hand, two repeats."""
    ours = {"first": [(4.0, 2.0)] * 2, "next": [(2.0, 1.0), (4.0, 1.0)], "clean": [(1.0, 1.0)] * 2}
    other = {"first": [(8.0, 8.0)] * 2, "next": [(8.0, 4.0)] * 2, "clean": [(2.0, 2.0)] * 2}
    found = video.summary({"ours": ours, "other": other}, [(1.0, 0.5), (3.0, 0.5)])
    mine, theirs = found["rows"].values()
    assert (mine["first_ms"], mine["next_ms"], mine["clean_ms"]) == (4, 3, 1)
    assert mine["chunk_ms"] == (4 + 3 * 2 + 1 + 4 + 3 * 4 + 1) / 2
    assert (mine["ratio"], mine["cpu"]) == (1, 1)
    assert theirs["chunk_ms"] == 8 + 3 * 8 + 2
    assert theirs["ratio"] == (34 / 11 + 34 / 17) / 2
    assert theirs["cpu"] == (8 + 3 * 4 + 2) / (2 + 3 + 1)
    assert found["floor"] == {"ms": 2, "share": (1 / 2 + 3 / 4) / 2, "cpu": 0.5}


def test_clock() -> None:
    """A result beside its time, sums, ratios of pairs, and threads that are put back."""
    done, (clock, processor) = timed(lambda: sum(range(1000)))
    assert done == 499500 and clock > 0 and processor >= 0
    assert total([(1.0, 2.0), (3.0, 4.0)]) == (4, 6)
    assert ratios([(1.0, 2.0), (9.0, 2.0), (2.0, 2.0)], [(1.0, 1.0)] * 3) == (2, 2)
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="broken"), use_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise ValueError("broken")
    assert torch.get_num_threads() == before


# The command's function


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every part is there, in JSON too, no wider than a terminal."""
    path = tmp_path / "video.json"
    report = video.run(1, 240, 416, 1, path, quick=True, threads=1, memory=False)
    assert json.loads(path.read_text()) == json.loads(json.dumps(report))
    rows = report["passes"]["rows"]
    assert list(rows) == ["ours", "concatenate", "roll", "clone and cat", "diffusers, no cache"]
    assert rows["ours"]["ratio"] == rows["ours"]["cpu"] == 1
    assert all(row["chunk_ms"] > 0 and row["ratio"] > 0 for row in rows.values())
    assert report["passes"]["floor"]["share"] > 0
    pieces = report["pieces"]
    expected = sum(pieces["ms"].values()) / rows["ours"]["next_ms"]
    assert pieces["share"] == pytest.approx(expected)
    text = capsys.readouterr().out
    assert all(part in text for part in ("(a)", "(b)", "matmul and attention", "norms"))
    assert "(c)" not in text


def test_real_shape() -> None:
    """Wan2.1 1.3B's layers: at 480p 1,560 tokens a frame."""
    found = video._setting(2, 480, 832, 12, 3, quick=False)
    assert (found.model.dim, found.model.head_dim, found.model.ffn_dim) == (1536, 128, 8960)
    assert (found.frame_tokens, found.latent_hw) == (1560, (60, 104))
    assert found.chunk * found.frame_tokens == 4680


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 250}, "height=250: accepted are multiples of 16"),
        ({"width": 0}, "width=0: accepted are multiples of 16"),
        ({"layers": 0}, "layers=0: accepted are at least 1"),
        ({"repeats": 0}, "repeats=0: accepted are at least 1"),
        ({"window": 4}, "window"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    """Refused before anything is made."""
    with pytest.raises(InvalidRequest, match=message):
        video.run(**changes, quick=True)
