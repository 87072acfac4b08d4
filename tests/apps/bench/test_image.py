"""The benchmark of next-scale images: both ways draw one picture, bytes and sums are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from streamgen.apps.bench import image
from streamgen.apps.bench.concatenating import Concatenating, peak_bytes, stored_bytes
from streamgen.cache.scales import VAR_256
from streamgen.errors import InvalidRequest
from streamgen.pipelines.next_scale import ImageConfig, NextScalePipeline
from streamgen.sampling.tokens import Sampling

LENGTHS = tuple(side * side for side in VAR_256)
LABELS, SEEDS = [3, 1, 7], [5, 6, 9]


@pytest.mark.parametrize(
    "sampling", [image.SAMPLING, Sampling(2.0, 0, 0.0), Sampling(1.5, 20, 0.9)], ids=str
)
def test_one_picture(sampling: Sampling) -> None:
    """The peer, ours and the pipeline: the same tokens at every scale, and the same pixels."""
    torch.manual_seed(1)
    var, vae = image.make(2, quick=True)
    ours, peer = image.Stored(var, vae, sampling), Concatenating(var, vae, sampling)
    pipe = NextScalePipeline(var, vae, ImageConfig(sampling=sampling))
    pictures = pipe(LABELS, SEEDS)
    steps = zip(ours.draw(LABELS, SEEDS), peer.draw(LABELS, SEEDS), strict=True)
    for scale, ((tokens, f_hat), (other, other_hat)) in enumerate(steps):
        assert torch.equal(tokens, other)
        torch.testing.assert_close(f_hat, other_hat, atol=1e-5, rtol=0)
        for picture, mine in zip(pictures, tokens, strict=True):
            assert torch.equal(picture.tokens[scale], mine)
    pixels = image.decode(ours, f_hat).numpy()
    others = image.decode(peer, f_hat).numpy()
    assert abs(pixels.astype(int) - others).max() <= 1
    assert all((one.pixels == mine).all() for one, mine in zip(pictures, pixels, strict=True))
    assert len({one.pixels.tobytes() for one in pictures}) == 3


def test_classes_matter() -> None:
    """Another class gives other tokens: the agreement above is not vacuous."""
    torch.manual_seed(1)
    ours = image.Stored(*image.make(2, quick=True), image.SAMPLING)
    one, other = ([t for t, _ in ours.draw([label], [5])] for label in (3, 4))
    assert not all(map(torch.equal, one, other))


@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_are_counted(batch: int) -> None:
    """What both ways count is what their rules come to."""
    var, vae = image.make(2, quick=True)
    lengths, rows = (1, 4, 9, 16), 2 * batch
    token = rows * 32 * 4
    inputs = list(range(batch)), list(range(batch))
    ours, peer = image.Stored(var, vae, image.SAMPLING), Concatenating(var, vae, image.SAMPLING)
    for way in (ours, peer):
        for _ in way.draw(*inputs):
            pass
    assert ours.kv_peak == stored_bytes(2, lengths, token, rows)
    assert ours.kv_peak == 2 * 2 * 14 * token + 2 * 30 * token // 2
    assert peer.kv_peak == peak_bytes(2, lengths, token) == (2 * 2 * 30 + 14) * token
    assert (peer.kv, peer.kv_live) == ([], 0)


def test_peak_of_d16() -> None:
    """VAR d16 in fp16: 59 MB for an image instead of 91, under 0.65 of it at any batch."""
    for batch, most in ((1, 0.643), (4, 0.643), (16, 0.643)):
        rows = 2 * batch
        token = rows * 1024 * 2
        ours, other = stored_bytes(16, LENGTHS, token, rows), peak_bytes(16, LENGTHS, token)
        assert ours / other <= most
        if batch == 1:
            assert (ours, other) == (58_359_808, 90_865_664)


def test_summary() -> None:
    """Sums over scales, with and without the decoder; ratios pair by pair; by hand."""
    ours = [[(1.0, 1.0), (3.0, 1.0), (4.0, 2.0)], [(1.0, 1.0), (1.0, 1.0), (6.0, 2.0)]]
    other = [[(2.0, 2.0), (6.0, 2.0), (4.0, 4.0)], [(2.0, 1.0), (2.0, 3.0), (4.0, 4.0)]]
    found = image.summary({"ours": ours, "other": other}, (1, 2))
    assert [row["side"] for row in found["scales"]] == [1, 2]
    assert found["scales"][1] == {
        "side": 2, "ours_ms": 2, "other_ms": 4, "ratio": 0.5, "cpu": (1 / 2 + 1 / 3) / 2,
    }  # fmt: skip
    assert found["tokens"] == {"ours_ms": 3, "other_ms": 6, "ratio": 0.5, "cpu": 0.5}
    assert found["decode"]["ratio"] == (4 / 4 + 6 / 4) / 2
    assert found["image"]["ours_ms"] == (8 + 8) / 2
    assert found["image"]["ratio"] == (8 / 12 + 8 / 8) / 2


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every part is there, in JSON too, no wider than a terminal."""
    path = tmp_path / "image.json"
    report = image.run(1, 2, 1, path, quick=True, threads=1)
    assert json.loads(path.read_text()) == json.loads(json.dumps(report))
    assert [row["side"] for row in report["time"]["scales"]] == [1, 2, 3, 4]
    assert report["time"]["same_tokens"] == 1
    assert all(report["time"][part]["ours_ms"] > 0 for part in ("tokens", "decode", "image"))
    assert 0 < report["memory"]["kv_ratio"] < 1
    text = capsys.readouterr().out
    assert all(part in text for part in ("(a)", "(b)", "scale 4 x 4", "keys and values"))
    assert max(map(len, text.splitlines())) <= 110


def test_real_shape() -> None:
    """d16: width 1024, 16 heads, 680 tokens, 310 million parameters."""
    with torch.device("meta"):
        config = image.VARConfig(16, 1024, 16, 1000)
        count = sum(p.numel() for p in image.VARModel(config).parameters())
    assert (config.ends[-1], config.head_dim, round(count / 1e6, 1)) == (680, 64, 310.3)


@pytest.mark.parametrize("setting", [{"depth": 0}, {"batch": 0}, {"repeats": 0}])
def test_bad_settings(setting: dict[str, int]) -> None:
    """Refused before anything is made."""
    with pytest.raises(InvalidRequest, match="=0: accepted are at least 1"):
        image.run(**setting, quick=True)
