"""The trainer: a step without actions, and beginning from a world's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from streamgen.apps.pocket.data import Clips
from streamgen.apps.pocket.train import CONFIG, VIDEO_CONFIG, PocketWorld, Recipe, Trainer
from streamgen.errors import WeightsError

SMALL = replace(CONFIG, dim=16, ffn_dim=32, num_heads=2, num_layers=2, freq_dim=8)
RECIPE = Recipe(batch=2, chunk=4, own_after=0.1, dreams=1)


def write_latents(folder: Path, keys: bool) -> Path:
    """Encoded walks of noise, with keys or without."""
    rng = np.random.default_rng(0)
    (folder / "latents").mkdir()
    arrays = {
        "latents": rng.standard_normal((52, 2, 20, 8, 12, 16)).astype(np.float16),
        "theme": np.stack([rng.permutation(4)[:2] for _ in range(52)]).astype(np.uint8),
        "wall": rng.integers(4, size=52 if keys else (52, 2)).astype(np.uint8),
    }
    if keys:
        arrays["keys"] = rng.integers(2, size=(52, 20, 6)).astype(np.uint8)
    for name, array in arrays.items():
        np.save(folder / "latents" / f"{name}.npy", array)
    return folder


def write_world(folder: Path, model: PocketWorld) -> Path:
    """The weights of a packaged world."""
    for name, part in (("transformer", model.dit), ("text", model.text)):
        save_file(
            {k: v.contiguous() for k, v in part.state_dict().items()},
            folder / f"{name}.safetensors",
        )
    return folder


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny matrices are no work to share."""
    torch.set_num_threads(1)


def test_the_video_is_the_world_without_actions() -> None:
    """Nothing but the width of the action vector differs."""
    assert replace(VIDEO_CONFIG, action_dim=CONFIG.action_dim) == CONFIG


@pytest.mark.parametrize("keys", [True, False])
def test_steps_train_with_and_without_actions(tmp_path: Path, keys: bool) -> None:
    """Steps on clean, noised and own contexts have finite losses and move every parameter."""
    clips = Clips(write_latents(tmp_path, keys))
    trainer = Trainer(RECIPE, clips, config=SMALL if keys else replace(SMALL, action_dim=0))
    before = {k: v.clone() for k, v in trainer.master.named_parameters()}
    losses = [trainer.step(progress)[0] for progress in (0.0, 0.2, 0.2, 0.2, 0.2)]
    assert np.isfinite(losses).all()
    assert trainer.dreams  # some context was the model's own
    for name, value in trainer.master.named_parameters():
        assert not torch.equal(value, before[name]), name
    assert keys == any("action_embedding" in name for name in before)


def test_beginning_from_a_world_drops_the_action_embedding_only(tmp_path: Path) -> None:
    """All other weights are the world's, in the master, the bf16 copy and the average."""
    clips = Clips(write_latents(tmp_path, keys=False))
    torch.manual_seed(3)
    world = PocketWorld(SMALL)
    trainer = Trainer(RECIPE, clips, config=replace(SMALL, action_dim=0))
    trainer.begin_from(write_world(tmp_path, world))
    source = world.state_dict()
    dropped = {k for k in source if k not in trainer.average}
    assert dropped == {k for k in source if k.startswith("dit.action_embedding.")} != set()
    for name, value in trainer.master.state_dict().items():
        assert torch.equal(value, source[name]) and torch.equal(trainer.average[name], value)
    for low, high in zip(trainer.model.parameters(), trainer.master.parameters(), strict=True):
        assert torch.equal(low, high.bfloat16())


def test_a_world_can_not_begin_without_its_action_embedding(tmp_path: Path) -> None:
    """What is missing is an error where actions are taken."""
    clips = Clips(write_latents(tmp_path, keys=True))
    trainer = Trainer(RECIPE, clips, config=SMALL)
    folder = write_world(tmp_path, PocketWorld(replace(SMALL, action_dim=0)))
    with pytest.raises(WeightsError, match="missing"):
        trainer.begin_from(folder)


def test_a_run_resumes_where_it_was(tmp_path: Path) -> None:
    """Two steps, saved and loaded, then one more equal three steps."""
    clips = Clips(write_latents(tmp_path, keys=False))
    config, recipe = replace(SMALL, action_dim=0), replace(RECIPE, own_after=2.0)
    first, second = (Trainer(recipe, clips, config=config) for _ in range(2))
    for _ in range(2):
        first.step(0.1)
    first.save(tmp_path)
    first.step(0.1)
    second.load(tmp_path)
    assert second.step_count == 2
    second.step(0.1)
    for name, value in first.average.items():
        assert torch.equal(value, second.average[name]), name
