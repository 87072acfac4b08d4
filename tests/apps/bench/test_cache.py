"""The benchmark of the cache core: what it counts is exact, and every part of it runs. No times."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamgen.apps.bench import cache, others
from streamgen.apps.bench.traffic import Traffic
from streamgen.cache import KVSpec

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_traffic_by_hand() -> None:
    """Views cost nothing, copies what they write; an empty storage is new and unwritten."""
    x, y = torch.zeros(4), torch.zeros(4)
    with Traffic() as traffic:
        x[1:3].view(2, 1)
    assert (traffic.written, traffic.allocated, traffic.storages) == (0, 0, 0)
    with Traffic() as traffic:
        x.copy_(y)
        x.add_(1)
    assert (traffic.written, traffic.allocated, traffic.storages) == (32, 0, 0)
    with Traffic() as traffic:
        torch.cat([x, y])
        x.clone()
    assert (traffic.written, traffic.allocated, traffic.storages) == (48, 48, 2)
    with Traffic() as traffic:
        torch.empty(4)
    assert (traffic.written, traffic.allocated, traffic.storages) == (0, 16, 1)
    with Traffic() as traffic:
        torch.add(x, y, out=x)
    assert (traffic.written, traffic.allocated) == (16, 0)


def test_updates_move_what_the_rules_say() -> None:
    """Ours writes what must be written and nothing else; the others what their rules cost."""
    shape = cache.Shape(layers=2, heads=1, head_dim=8, frame_tokens=64)
    found = cache.measure_updates(shape, repeats=1)
    rows, passes, window = found["caches"], cache.STEPS + 1, shape.window
    assert found["mandatory_bytes"] == passes * 2 * 2 * 64 * 8 * 2
    assert rows["ours"]["written_ratio"] == 1.0
    assert rows["ours"]["storages"] == rows["ours"]["allocated_bytes"] == 0
    # Every pass joins the whole window; once a chunk the past is cut as well.
    cut = (window - 1) / passes
    assert rows["concatenate"]["written_ratio"] == pytest.approx(window + cut, abs=0.01)
    # Once a chunk what stays behind the sink is cloned and written back.
    moved = 2 * (window - shape.sink - 1) / passes
    assert rows["roll"]["written_ratio"] == pytest.approx(1 + moved, abs=0.05)
    assert rows["clone and cat"]["written_ratio"] > 2 * window


def test_handles_and_tiers_run() -> None:
    """Every verb has a time, every tier a rate in both directions."""
    assert all(us >= 0 for us in cache.measure_handles(repeats=1).values())
    found = cache.measure_tiers(KVSpec(1, 1, 8, 16), repeats=1)
    assert set(found["mb_per_second"]) == {"host memory", "disk, fsync"}
    assert all(rate > 0 for row in found["mb_per_second"].values() for rate in row.values())


def test_others_are_optional(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where they are not installed that is said; where a file does not fit, that is said too."""
    monkeypatch.setattr(others, "FILES", {"vllm_not_there": (), "sglang_not_there": ()})
    with others.alone("vllm_not_there") as load:
        assert load is None
    folder = tmp_path / "vllm" / "v1" / "core"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('must not run')")
    (folder / "block_pool.py").write_text(
        "from vllm.logger import init_logger\nlogger = init_logger(__name__)\nreal = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(others, "FILES", {"vllm": ("vllm.v1.core.block_pool",), "sglang": ()})
    with others.alone("vllm") as load:
        assert load is not None and load("vllm.v1.core.block_pool").real == 1
    found = others.measure_others(repeats=1)
    assert any("can't be loaded alone" in name for name in found if name.startswith("vllm"))
    assert "sglang: not installed" in found


def test_command(run_python: Run, tmp_path: Path) -> None:
    """`streamgen bench cache --quick` prints its four parts and writes JSON."""
    path = tmp_path / "cache.json"
    line = ("-m", "streamgen.apps.cli", "bench", "cache", "--quick", "-o", str(path))
    done = run_python(*line)
    assert done.returncode == 0, done.stderr
    for part in ("(a) K/V updates", "(b) handles", "(c) memory", "(d) tiers"):
        assert part in done.stdout
    assert json.loads(path.read_text())["update"]["caches"]["ours"]["written_ratio"] == 1.0
