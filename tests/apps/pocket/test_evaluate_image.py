"""The report on images: its pieces are right, and all of it runs on a model of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from streamgen.apps.pocket import evaluate_image as module
from streamgen.apps.pocket.evaluate_image import QUICK, Evaluation, evaluate, run_eval
from streamgen.apps.pocket.image_data import CLASSES, render
from streamgen.apps.pocket.image_export import seal
from streamgen.apps.pocket.image_judge import ClassJudge
from streamgen.apps.pocket.maze import HEIGHT, WALLS, WIDTH
from streamgen.errors import InvalidRequest
from streamgen.models.var import VARConfig, VARModel
from streamgen.models.vq import VQVAE, VQConfig
from streamgen.pipelines.next_scale import ImageConfig, NextScalePipeline
from streamgen.sampling.tokens import Sampling

SIDES = (1, 2, 4)


def tiny_model(classes: tuple[str, ...] = CLASSES) -> NextScalePipeline:
    torch.manual_seed(0)
    vae = VQVAE(VQConfig(24, 4, 32, (1, 1), 1, using_sa=False, using_mid_sa=False))
    config = VARConfig(
        depth=1, width=64, heads=1, num_classes=len(classes), latent_channels=4, vocab=24,
        patch_nums=SIDES,
    )  # fmt: skip
    var = VARModel(config)
    var.init_weights(head=1.0)
    shown = ImageConfig(classes, HEIGHT, WIDTH, Sampling(cfg=1.0, top_k=5, top_p=0.9))
    for part in (var, vae):
        part.eval().requires_grad_(False)
    return NextScalePipeline(var, vae, shown, "tiny")


@pytest.fixture(scope="module")
def pipe() -> NextScalePipeline:
    torch.set_num_threads(1)
    return tiny_model()


@pytest.fixture(scope="module")
def run(pipe: NextScalePipeline) -> Evaluation:
    torch.manual_seed(0)
    return Evaluation(pipe, ClassJudge.new(), QUICK)


def test_measures_of_real_pictures(run: Evaluation) -> None:
    """Against themselves: as sharp, as varied, no colour off."""
    look = run.look(run.real)
    assert look.sharpness == pytest.approx(1) and look.variety == pytest.approx(1)
    assert look.colour == 0
    blurred = run.look(np.stack([cv2.blur(f, (5, 5)) for f in run.real]))
    assert blurred.sharpness < 0.5 and blurred.colour > 0
    darker = run.look(run.real // 2)
    assert darker.colour > 10 and darker.variety == pytest.approx(0.5, abs=0.05)


def test_judges_count_theme_and_wall(run: Evaluation) -> None:
    """With answers that are given: both right only where theme and wall are."""

    class Given:
        def __init__(self, answers: np.ndarray) -> None:
            self.answers = answers

        def name_classes(self, frames: np.ndarray) -> np.ndarray:
            return self.answers

    half = np.arange(len(run.labels)) % 2
    other_wall = run.labels // len(WALLS) * len(WALLS) + (run.labels + half) % len(WALLS)
    mine = Evaluation(run.pipe, Given(other_wall), QUICK)  # type: ignore[arg-type]
    look = mine.look(run.real)
    assert (look.both, look.theme, look.wall) == (0.5, 1.0, 0.5)
    assert np.mean(list(mine.by_class(run.real).values())) == 0.5


def test_codebook_use(run: Evaluation) -> None:
    tokens = np.array([[0, 0, 1, 1], [0, 0, 1, 1]])
    found = run.measure_reconstruction(run.real, tokens)
    assert found.entries == 2 and found.perplexity == pytest.approx(2)
    assert found.vocab == 24 and found.psnr == pytest.approx(10 * np.log10(255**2 * 12))
    coded, tokens = run.code()
    assert coded.shape == run.real.shape and tokens.shape == (len(run.real), 21)


def test_report_and_its_files(pipe: NextScalePipeline, tmp_path: Path) -> None:
    torch.manual_seed(0)
    report = evaluate(pipe, tmp_path, ClassJudge.new(), QUICK)
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(
        json.dumps(report.to_json())
    )
    lines = (tmp_path / "report.txt").read_text().splitlines()
    assert any("class recognised" in line for line in lines)
    assert max(map(len, lines)) <= 100
    assert set(report.by_class) == set(CLASSES) and report.seconds_an_image > 0
    sheet = cv2.imread(str(tmp_path / "classes.png"))
    assert sheet.shape[0] >= len(CLASSES) // 2 * HEIGHT


def test_other_classes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'tiny' is no model of pocket pictures"):
        Evaluation(tiny_model(("cat", "dog")), ClassJudge.new(), QUICK)


def test_written_and_read_again(
    pipe: NextScalePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """A sealed folder is a model; the command measures it and prints JSON."""
    pipe.save_pretrained(tmp_path / "m", dtype=torch.float32)
    (tmp_path / "m" / "README.md").write_text("a card\n")
    seal(tmp_path / "m")
    again = NextScalePipeline.from_pretrained(tmp_path / "m", device="cpu", dtype="float32")
    one, two = (p(["lava, brick"], seeds=3)[0] for p in (pipe, again))
    assert np.array_equal(one.pixels, two.pixels) and one.pixels.shape == (HEIGHT, WIDTH, 3)
    monkeypatch.setattr(ClassJudge, "load", classmethod(lambda cls: cls.new()))
    run_eval(str(tmp_path / "m"), tmp_path / "out", as_json=True, quick=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["effort"]["per_class"] == QUICK.per_class
    assert (tmp_path / "out" / "classes.png").is_file()


def test_seeds_of_their_own() -> None:
    """The evaluation's mazes are none of the training's."""
    from streamgen.apps.pocket import image_data, image_judge

    mine = module.SEED
    used = (image_data.TRAIN_SEED, image_data.TEST_SEED)
    used += (image_judge.TRAIN_SEED, image_judge.TEST_SEED)
    assert all(abs(mine - seed) >= 10_000 for seed in used)
    assert not np.array_equal(render(mine, 16, 1)[0], render(used[0], 16, 1)[0])
