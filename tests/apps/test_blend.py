"""The benchmark of reuse at another place: what it reports, on a world that means nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from worlds import tiny_world

from streamgen.apps.bench.blend import SHARES, run_blend
from streamgen.errors import InvalidRequest


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows by share: none and all of the work, an error that goes to zero; a table and a file."""
    world = tiny_world()
    report = run_blend(world, tmp_path / "blend.json", walks=1)
    assert json.loads((tmp_path / "blend.json").read_text()) == json.loads(json.dumps(report))
    assert list(report["blend"]) == ["alone", "other walk"]
    for rows in report["blend"].values():
        assert [row["share"] for row in rows] == list(SHARES)
        first, last = rows[0], rows[-1]
        assert (first["work"], first["flops"], last["work"]) == (0, 0, 1)
        assert last["flops"] == pytest.approx(1, abs=0.15)
        assert first["kv_error"] > 1e-3 and last["kv_error"] < 1e-5
        assert last["next_error"] < 1e-4 and last["next_psnr"] > 50
        assert [row["flops"] for row in rows] == sorted(row["flops"] for row in rows)
    assert world.engine.pool.stats().live == world.engine.pool.stats().lanes == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tiny: a chunk of 24 tokens, 3 layers" in lines[0]
    assert len(lines) == 1 + 2 * (3 + len(SHARES))


def test_what_it_refuses() -> None:
    """Other worlds, and nothing to measure."""
    world = tiny_world()
    with pytest.raises(InvalidRequest, match="walks=0"):
        run_blend(world, walks=0)
    world.engine.config = replace(world.config, keys=("w",) * 6, opposites=())
    with pytest.raises(InvalidRequest, match="'tiny' is no world of mazes"):
        run_blend(world)
