"""The video's quality report: its pieces are right, and all runs on a model of random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

from streamgen.apps.pocket.evaluate_video import (
    AFTER,
    QUICK,
    SAMPLE_EVERY,
    Evaluation,
    Report,
    Samples,
    _fidelity,
    _look,
    evaluate,
    sheet,
)
from streamgen.apps.pocket.flights import Flights
from streamgen.apps.pocket.prompts import VOCABULARY
from streamgen.apps.pocket.video_export import VIDEO
from streamgen.apps.pocket.video_judge import SceneJudges
from streamgen.engine import Engine, VideoConfig
from streamgen.errors import InvalidRequest
from streamgen.models.text import WordEncoder
from streamgen.models.vae import FrameCodec
from streamgen.models.wan import WanConfig, WanModel
from streamgen.pipelines.causal_video import CausalVideoPipeline
from streamgen.sampling.schedule import FewStep


@pytest.fixture(scope="module")
def pipe() -> CausalVideoPipeline:
    """A pocket video of random weights: 16 x 24 pixels, chunks of 4."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = WanConfig(
        dim=32,
        ffn_dim=32,
        num_heads=2,
        num_layers=2,
        in_channels=4,
        out_channels=4,
        patch_size=(1, 4, 4),
        text_dim=8,
        text_len=10,
        freq_dim=16,
        spatial_tokens=6,
        prediction="sample",
    )
    vae = AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
        latent_channels=4,
    )
    steps = FewStep((1000, 500), shift=1.0)
    config = replace(
        VIDEO,
        height=16,
        width=24,
        latent_hw=(8, 12),
        window=8,
        schedule=steps,
        first_schedule=steps,
    )
    assert isinstance(config, VideoConfig)
    dit, text = WanModel(shape), WordEncoder(VOCABULARY, 8, 10)
    for part in (dit, text):
        part.eval().requires_grad_(False)
    codec = FrameCodec(vae, [0.0] * 4, [1.0] * 4)
    return CausalVideoPipeline(Engine(dit, text, codec, config, max_sessions=2), "tiny")


@pytest.fixture(scope="module")
def judges() -> SceneJudges:
    """Untrained: what they say does not matter here."""
    torch.manual_seed(0)
    return SceneJudges.new()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the report goes."""
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(scope="module")
def report(pipe: CausalVideoPipeline, judges: SceneJudges, folder: Path) -> Report:
    """The quick report of the tiny model."""
    return evaluate(pipe, folder, judges, QUICK)


def test_the_report_has_everything(report: Report, folder: Path) -> None:
    """Each section has what was asked for, and the files say the same."""
    assert report.fidelity["video"].frames == 16 * (QUICK.frames // SAMPLE_EVERY)
    assert sum(len(row) for row in report.fidelity["video"].by_scene.values()) == 16
    assert set(report.switches) == {"last_chunk", "window_causal", "window_bidirectional", "off"}
    assert all(tuple(switch.theme) == AFTER for switch in report.switches.values())
    assert [part.first for part in report.long] == [0, QUICK.bin_frames]
    stored = json.loads((folder / "report.json").read_text())
    assert stored["sharpness"] == pytest.approx(report.sharpness, abs=1e-4)
    assert (folder / "report.txt").read_text() == report.to_table() + "\n"
    picture = cv2.imread(str(folder / "clips.png"))
    assert picture.shape[0] >= 18 * 96 and picture.shape[1] >= 2 * 96


def test_all_sessions_are_closed(pipe: CausalVideoPipeline, report: Report) -> None:
    """An evaluation gives every block of the pool back."""
    assert report.model == "tiny"
    stats = pipe.engine.pool.stats()
    assert stats.live == stats.lanes == 0


def test_other_videos_are_refused(pipe: CausalVideoPipeline, judges: SceneJudges) -> None:
    """A model without a vocabulary is not one of mazes."""
    engine = Engine(
        pipe.engine.dit,
        pipe.engine.text,
        pipe.engine.codec,
        replace(pipe.config, vocabulary=(), max_words=0),
    )
    with pytest.raises(InvalidRequest, match="vocabulary"):
        Evaluation(CausalVideoPipeline(engine, "other"), judges, QUICK)


def test_samples_are_neighbours(
    pipe: CausalVideoPipeline, judges: SceneJudges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every ninth frame of a clip is looked at beside the one before it; some are shown."""
    run = Evaluation(pipe, judges, QUICK)
    seen = []
    monkeypatch.setattr(run, "look", seen.append)
    run.watch("a maze", 3, 18)
    with run.begin("a maze", 3) as session:
        frames = run.clip(session, 18)
    assert len(frames) == 20 and run.made == 40
    assert np.array_equal(seen[0], np.stack([frames[[7, 8]], frames[[16, 17]]]))
    assert np.array_equal(run.rows[0][1], frames[[0, 9]])


def test_a_real_flight_looks_like_one() -> None:
    """Flying ahead, the picture flows away from its middle; a still picture does not flow."""
    flights = Flights(6, 1, 3)
    scene = np.zeros(6, int), np.zeros(6, int)
    before, now = flights.draw(1, *scene), flights.draw(2, *scene)
    looks = np.array([_look(a, b) for a, b in zip(before, now, strict=True)])
    assert (looks[:, 0] > 100).all() and (looks[:, 1] > 1).all()
    assert looks[:, 3].mean() > 0.1
    back = np.array([_look(b, a) for a, b in zip(before, now, strict=True)])
    assert back[:, 3].mean() < 0
    assert np.allclose(_look(now[0], now[0])[1:], 0, atol=0.01)


def test_fidelity_counts_frames() -> None:
    """Shares are of frames; `last` is of clips; a scene's cell is the mean of its clips."""
    zeros = np.zeros((2, 4))
    samples = [
        ((0, 1), Samples(zeros, np.array([[0, 1], [0, 2]]))),
        ((3, 3), Samples(zeros, np.array([[1, 3], [3, 3]]))),
    ]
    found = _fidelity(samples)
    assert (found.theme, found.wall, found.both, found.last) == (0.75, 0.75, 0.5, 0.5)
    assert found.by_scene == {"day": {"stone": 0.5}, "lava": {"hedge": 0.5}}


def test_rows_of_a_sheet_keep_their_pictures() -> None:
    """Each picture is found at its place, enlarged where it is small."""
    pictures = np.arange(2, dtype=np.uint8)[:, None, None, None] + np.full((2, 48, 64, 3), 100)
    page = sheet([("one", pictures.astype(np.uint8)), ("two", pictures.astype(np.uint8))])
    assert page.shape == (2 * (96 + 16), 2 * (128 + 2), 3)
    assert (page[16:112, :128] == 100).all() and (page[-96:, 130:258] == 101).all()
