"""The benchmark of worlds: what it reports, and that its peers make our frames. No times."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from worlds import tiny_world

from streamgen.apps.bench import world as bench
from streamgen.apps.bench.peers import PEERS
from streamgen.apps.bench.share import is_heavy, measure_share
from streamgen.apps.bench.steps import advance, turned
from streamgen.apps.bench.table import table
from streamgen.apps.pocket.export import WORLD
from streamgen.errors import InvalidRequest
from streamgen.weights import registry


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One quick run of a tiny world, read back from its file."""
    path = tmp_path_factory.mktemp("bench") / "world.json"
    returned = bench.run(tiny_world(), json_path=path, threads=1, quick=True)
    read: dict[str, Any] = json.loads(path.read_text())
    assert read == json.loads(json.dumps(returned))
    return read


def test_what_was_measured(report: dict[str, Any]) -> None:
    """The model, the machine and how often."""
    about = report["about"]
    assert (about["model"], about["dtype"], about["tokens"]) == ("tiny", "float32", 12)
    assert (about["sink"], about["window"], about["steps"]) == (1, 6, 2)
    assert (about["repeats"], about["chunks"]) == (2, 2)
    assert about["machine"]["threads"] == 1 and about["machine"]["cores"] >= 1
    assert {"load_before", "load_after", "parameters", "width", "height"} <= set(about)


def test_speed(report: dict[str, Any]) -> None:
    """Frames a second of each repeat, and three percentiles of every stage."""
    speed = report["speed"]
    assert len(speed["frames_per_second_of_repeats"]) == 2
    assert speed["frames_per_second"] > 0
    assert (speed["meant_for"], speed["chunk_frames"]) == (20, 2)
    assert list(speed["ms"]) == ["dit", "cache", "decode", "encode", "other", "total"]
    for ms in speed["ms"].values():
        assert list(ms) == ["p50", "p95", "p99"]
        assert ms["p50"] <= ms["p95"] <= ms["p99"]


def test_shares(report: dict[str, Any]) -> None:
    """Every part of a chunk has one."""
    assert set(report["share"]) == {
        "matmul_attention_convolution",
        "elementwise",
        "python",
        "cache",
        "python_and_cache",
        "strict",
    }
    assert report["share"]["matmul_attention_convolution"] > 0


def test_caches(report: dict[str, Any]) -> None:
    """Ours and three others, with ratios to ours."""
    caches = report["caches"]
    assert list(caches) == ["ours", "concatenate", "roll", "clone and cat"]
    for row in caches.values():
        assert list(row) == ["chunk_ms", "cache_ms", "chunk_ratio", "cache_ratio"]
        assert all(value > 0 for value in row.values())
    assert caches["ours"]["chunk_ratio"] == caches["ours"]["cache_ratio"] == 1


def test_length(report: dict[str, Any]) -> None:
    """The two frames, their costs, and memory where the system tells it."""
    length = report["length"]
    assert 12 <= length["near_frame"] < 24 <= length["far_frame"]
    assert length["near_ms"] > 0 and length["far_ms"] > 0 and length["ratio"] > 0
    assert (length["memory_ratio"] is None) == (length["near_memory_bytes"] is None)


def test_table(report: dict[str, Any]) -> None:
    """All three parts, no wider than a terminal; without shares, as on an accelerator, too."""
    for one in (report, {**report, "share": None}):
        text = table(one)
        assert all(part in text for part in ("(a)", "(b)", "(c)", "clone and cat", "p99"))
        assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("setting", [{"repeats": 0}, {"chunks": 0}, {"far_frame": 100}])
def test_settings_are_checked(setting: dict[str, int]) -> None:
    """Refused before anything is loaded."""
    with pytest.raises(InvalidRequest, match="accepted are at least"):
        bench.run("no such world", **setting)


def test_threads_are_put_back() -> None:
    """After a run, and after one that failed, torch has as many threads as before."""
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="broken"), bench.use_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise ValueError("broken")
    assert torch.get_num_threads() == before


# Peers


@pytest.mark.parametrize(
    ("sink", "window", "prediction"),
    [(0, 6, "flow"), (1, 6, "flow"), (1, 7, "sample"), (3, 7, "flow"), (4, 6, "flow")],
)
def test_peers_make_our_frames(sink: int, window: int, prediction: str) -> None:
    """Growing and sliding, every cache leads to the same latents."""
    world = tiny_world(sink=sink, window=window, prediction=prediction)
    engine = bench.absolute(world)
    walkers = {name: bench.Walker(engine, kind(engine), "snow") for name, kind in PEERS.items()}
    for _ in range(6):
        for walker in walkers.values():
            walker.step()
        ours = walkers["ours"].latents
        for name, walker in walkers.items():
            torch.testing.assert_close(
                walker.latents, ours, atol=1e-5, rtol=0, msg=lambda text, name=name: name + text
            )


def test_peers_tell_the_window() -> None:
    """With another window or sink they make other latents: the agreement is not vacuous."""
    made = []
    for sink, window in ((0, 6), (1, 6), (1, 7)):
        engine = bench.absolute(tiny_world(sink=sink, window=window))
        walker = bench.Walker(engine, PEERS["roll"](engine), "snow")
        for _ in range(6):
            walker.step()
        made.append(walker.latents)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (made[i] - made[j]).abs().max() > 1e-4


def test_a_walker_is_a_session() -> None:
    """Over our cache it makes what a session without keys makes."""
    world = tiny_world(positions="absolute")
    engine = bench.absolute(world)
    walker = bench.Walker(engine, PEERS["ours"](engine), "snow", seed=4)
    with world.session("snow", seed=4, history_seconds=0) as session:
        for _ in range(6):
            walker.step()
            session.step()
            assert torch.equal(walker.latents, torch.stack(session._state.latents[-2:]))


# Parts


@pytest.mark.parametrize(
    ("operation", "heavy"),
    [
        ("aten::mm", True),
        ("aten::addmm", True),
        ("aten::bmm", True),
        ("aten::linear", True),
        ("aten::matmul", True),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", True),
        ("aten::scaled_dot_product_attention", True),
        ("aten::mkldnn_convolution", True),
        ("aten::convolution", True),
        ("aten::_convolution", True),
        ("aten::conv3d", True),
        ("aten::slow_conv3d_forward", True),
        ("mkldnn::_linear_pointwise", True),
        ("aten::addcmul", False),
        ("aten::copy_", False),
        ("aten::gelu", False),
        ("aten::native_layer_norm", False),
        ("aten::_fused_rms_norm", False),
        ("aten::cat", False),
        ("aten::_conj", False),
        ("aten::to", False),
    ],
)
def test_what_is_heavy(operation: str, heavy: bool) -> None:
    """Matmul, attention and convolution under all their names, and nothing else."""
    assert is_heavy(operation) == heavy


def test_no_shares_on_an_accelerator() -> None:
    """Where operations run beside Python, a share of time would say nothing."""
    world = tiny_world()
    world.engine.device = torch.device("cuda")
    assert measure_share(world, 1) is None


def test_advance() -> None:
    """Real chunks to the frame asked for; then the session denoises as it did."""
    session = tiny_world().session("snow", seed=1)
    config = session.config
    advance(session, 24)
    assert session.frame == 24 and session.config is config
    assert len(session.track) == 3  # a key every four chunks


def test_turned() -> None:
    """Everyone comes everywhere, and after everyone else; the same number, the same order."""
    orders = [turned("abc", i) for i in range(40)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert {order[0] for order in orders} == {"a", "b", "c"}
    assert len({tuple(order[i : i + 2]) for order in orders for i in (0, 1)}) == 6
    assert turned("abc", 7) == orders[7]


def test_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a packaged pocket world, one of its shape with random weights, which it says."""
    monkeypatch.setattr(registry, "packaged_names", lambda: ())
    state = torch.get_rng_state()
    world = bench.load("pocket-world")
    assert torch.equal(torch.get_rng_state(), state)
    assert world.config == WORLD and "random" in world.name
    assert world.session().step().frames.shape == (WORLD.chunk_frames, 96, 128, 3)


def test_a_world_is_taken_as_it_is() -> None:
    """`run` may be given one that is loaded."""
    world = tiny_world()
    assert bench.load(world) is world
