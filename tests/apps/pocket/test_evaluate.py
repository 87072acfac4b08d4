"""The quality report: its pieces are right, and all of it runs on a world of random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import cv2
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from worlds import tiny_world

from streamgen.apps.pocket.evaluate import (
    QUICK,
    SWITCH_FRAMES,
    Evaluation,
    Report,
    Walks,
    _switch,
    dream,
    evaluate,
    psnr,
)
from streamgen.apps.pocket.judges import Judges
from streamgen.apps.pocket.maze import KEYS
from streamgen.engine import Recache
from streamgen.errors import InvalidRequest
from streamgen.models.vae import FrameCodec
from streamgen.pipelines.world import WorldPipeline

pytestmark = pytest.mark.filterwarnings("ignore:the model does not know")


@pytest.fixture(scope="module")
def world() -> WorldPipeline:
    """The tiny world, with an autoencoder of the pocket world's class."""
    made = tiny_world()
    torch.manual_seed(1)
    vae = AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        encoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(0, 1),
        encoder_qkv_multiscales=((),) * 2,
        decoder_block_out_channels=(8, 8),
        decoder_layers_per_block=(0, 1),
        decoder_qkv_multiscales=((),) * 2,
        decoder_norm_types="batch_norm",
    )
    made.engine.codec = FrameCodec(vae, [0.0] * 4, [1.0] * 4)
    return made


@pytest.fixture(scope="module")
def judges() -> Judges:
    """Untrained: what they say does not matter here."""
    torch.manual_seed(0)
    return Judges.new()


@pytest.fixture
def walk(world: WorldPipeline) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Frames and keys of a real walk of 12 frames at the tiny world's size."""
    walks = Walks(1, 1, 12, world.config.chunk_frames)
    yield walks.draw([(0, 0)], (16, 24))[0], walks.keys[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the report of the tiny world goes."""
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(scope="module")
def report(world: WorldPipeline, judges: Judges, folder: Path) -> Report:
    """The quick report of the tiny world."""
    return evaluate(world, folder, judges, QUICK)


def test_the_report_has_everything(report: Report, folder: Path) -> None:
    """Each section has as many samples as were asked for, and the files say the same."""
    assert report.prediction.chunks == QUICK.scenes * QUICK.chunks
    assert set(report.actions) == {"dream", "real", "coded"}
    assert set(report.switches) == {*get_args(Recache), "real"}
    assert [part.first for part in report.stability] == [0, QUICK.bin_frames]
    stored = json.loads((folder / "report.json").read_text())
    assert stored["prediction"]["psnr"] == pytest.approx(report.prediction.psnr, abs=1e-4)
    assert (folder / "report.txt").read_text() == report.to_table() + "\n"


def test_the_picture_can_be_opened(report: Report, folder: Path) -> None:
    """Truth above dream: two rows of nine pictures a walk, at least 96 pixels high."""
    picture = cv2.imread(str(folder / "walks.png"))
    assert picture.shape[0] > 2 * 96 * QUICK.drawn and picture.shape[1] > 9 * 96
    assert report.seconds > 0


def test_all_sessions_are_closed(world: WorldPipeline, report: Report) -> None:
    """An evaluation gives every block of the pool back."""
    assert report.model == "tiny"
    stats = world.engine.pool.stats()
    assert stats.live == stats.lanes == 0


def test_measuring_again_gives_the_same(
    world: WorldPipeline, judges: Judges, report: Report
) -> None:
    """The numbers are those of the world and its seeds, not of the run."""
    assert Evaluation(world, judges, QUICK).measure_prediction() == report.prediction


def test_other_worlds_are_refused(judges: Judges) -> None:
    """A world without these keys is no world of mazes."""
    other = tiny_world()
    object.__setattr__(other.engine.config, "keys", ("jump",))
    with pytest.raises(InvalidRequest, match="keys are"):
        Evaluation(other, judges, QUICK)


def test_watched_frames_are_the_past(
    world: WorldPipeline, walk: tuple[np.ndarray, np.ndarray]
) -> None:
    """What a session watched decides what it dreams, in one piece or chunk by chunk."""
    frames, keys = walk
    dreams = []
    for shown in ([frames], list(np.split(frames, 6)), [frames[::-1].copy()]):
        with world.session("maze", seed=1, history_seconds=0) as session:
            for part, led in zip(shown, np.split(keys, len(shown)), strict=True):
                session.watch(part, led)
            assert session.frame == len(frames)
            dreams.append(dream(session, keys[:2]))
    assert np.array_equal(dreams[0], dreams[1])
    assert not np.array_equal(dreams[0], dreams[2])


def test_watching_equals_dreaming(world: WorldPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is shown the latents of another one goes on as that one does."""
    keys = np.zeros((6, len(KEYS)), np.float32)
    futures = []
    with world.session("maze", history_seconds=0) as first:
        dream(first, keys)
        made = torch.stack(first._state.latents)
        monkeypatch.setattr(world.engine.codec, "encode", lambda pixels: made)
        with world.session("maze", history_seconds=0) as second:
            second.watch(np.zeros((6, 16, 24, 3), np.uint8), keys)
            for session in (first, second):
                session._generator.manual_seed(5)
                futures.append(dream(session, keys[:2]))
    assert np.array_equal(*futures)


def test_walks_hold_keys_for_a_chunk() -> None:
    """Keys change between chunks only, and nothing leads to the first chunk."""
    walks = Walks(4, 0, 21, 3)
    keys = walks.keys.reshape(4, 7, 3, len(KEYS))
    assert not keys[:, 0].any() and keys.any()
    assert (keys == keys[:, :, :1]).all()
    assert np.array_equal(walks.poses[:, -1], walks.mazes.pose)


def test_picked_walks_leave_the_others_alone() -> None:
    """Walking on from a copy moves the copy, tells which way was free, and can be drawn."""
    walks = Walks(6, 0, 4, 2)
    before = walks.mazes.pose.copy()
    part = walks.pick([1, 4])
    free = part.hold(np.eye(len(KEYS), dtype=np.float32)[[2, 2]], 3)
    assert free.all() and part.poses.shape == (2, 7, 3)
    assert np.array_equal(walks.mazes.pose, before) and walks.poses.shape == (6, 4, 3)
    assert part.draw([(0, 0), (1, 1)], (96, 128), first=5).shape == (2, 2, 96, 128, 3)


def test_psnr() -> None:
    """An error of 1 everywhere is 48.13 dB; equal pictures count as a rounding error."""
    zeros = np.zeros((2, 4, 4, 3), np.uint8)
    assert psnr(zeros, zeros + 1) == pytest.approx(48.13, abs=0.01)
    assert psnr(zeros, zeros) == pytest.approx(58.92, abs=0.01)


def test_a_switch_counts_whole_chunks() -> None:
    """One frame of a chunk is not enough; the last frame alone decides on `at_16`."""
    hits = np.zeros((3, SWITCH_FRAMES), bool)
    hits[0, 2:] = True  # from the second chunk on
    hits[1, 3] = hits[1, -1] = True  # never a whole chunk
    found = _switch(hits, 2)
    assert found.at_16 == pytest.approx(2 / 3)
    assert found.within_16 == pytest.approx(1 / 3)
    assert found.frames_until == SWITCH_FRAMES + 1
