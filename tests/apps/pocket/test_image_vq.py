"""Training of the image autoencoder: it learns, resumes exactly, and keeps its codebook in use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from streamgen.apps.pocket.image_vq import (
    CONFIG,
    PATCH_NUMS,
    Recipe,
    Trainer,
    load_vae,
    psnr,
    reconstruct,
)
from streamgen.models.vq import VQConfig

SIDES = (1, 2, 4)
TINY = VQConfig(24, 4, 32, (1, 1, 1), 1, using_sa=False, using_mid_sa=False)
RECIPE = Recipe(warmup_steps=1, rate=3e-3, restart_every=1)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def pictures() -> NDArray[np.uint8]:
    """Two colours each, one above the other."""
    rng = np.random.default_rng(0)
    colours = rng.integers(256, size=(24, 2, 1, 3), dtype=np.uint8)
    return np.broadcast_to(np.repeat(colours, 8, axis=1), (24, 16, 16, 3)).copy()


def make(pictures: NDArray[np.uint8], **options) -> Trainer:
    return Trainer(RECIPE, pictures, SIDES, TINY, **options)


def test_shipped_form() -> None:
    """Eight pixels a latent position, 291 tokens."""
    assert CONFIG.factor == 8 and sum(side**2 for side in PATCH_NUMS) == 291


def test_it_learns(pictures: NDArray[np.uint8]) -> None:
    """Before there is a codebook and with it; from then on the encoder is fixed."""
    trainer = make(pictures)
    plain = [trainer.step(0.0)[0] for _ in range(8)]
    encoder = trainer.average.encoder.conv_in.weight.clone()
    assert not trainer.filled and np.mean(plain[-3:]) < 0.92 * np.mean(plain[:3])
    coded = np.array([trainer.step(0.7) for _ in range(10)])
    assert trainer.filled and torch.equal(trainer.vae.encoder.conv_in.weight, encoder)
    assert coded[-4:, 0].mean() < 0.9 * coded[:4, 0].mean() and (coded[:, 1] > 0).all()


def test_resumed_equals_uninterrupted(pictures: NDArray[np.uint8], tmp_path: Path) -> None:
    """Stopped after the codebook was filled, and before a restart of entries."""
    whole, first, second = (make(pictures) for _ in range(3))
    for progress in (0.0, 0.6, 0.61):
        whole.step(progress), first.step(progress)
    first.seconds = 7.0
    first.save(tmp_path / "vq.pt")
    second.load(tmp_path / "vq.pt")
    assert second.seconds == 7.0 and second.step_count == 3
    assert whole.step(0.65) == second.step(0.65)
    for a, b in zip(
        whole.average.state_dict().values(), second.average.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)
    loaded = load_vae(tmp_path / "vq.pt", TINY)
    assert torch.equal(loaded.decoder.conv_in.weight, first.average.decoder.conv_in.weight)


def test_entries_follow_their_vectors(pictures: NDArray[np.uint8]) -> None:
    """An entry becomes the decayed mean of what falls on it; an unused one begins anew."""
    trainer = make(pictures)
    table = trainer.vae.quantize.embedding.weight
    trainer.counts.fill_(1.0)
    trainer.counts[3] = 0.0
    trainer.sums.copy_(trainer.counts[:, None] * table)
    old, x = table.clone(), torch.randn(6, 4)
    rng = np.random.default_rng(0)
    trainer._follow([x], torch.tensor([0, 0, 1, 1, 1, 1]), rng, progress=0.5)
    keep = RECIPE.codebook_decay
    mean = (keep * old[0] + (1 - keep) * (x[0] + x[1])) / (keep + 2 * (1 - keep))
    assert torch.allclose(table[0], mean, atol=1e-6)
    assert torch.allclose(table[2], old[2], atol=1e-6)
    assert any(torch.equal(table[3], one) for one in x)


def test_filled_with_what_there_is_to_code(pictures: NDArray[np.uint8]) -> None:
    """Right after filling, tokens explain more of the latents than no tokens, scale by scale."""
    trainer = make(pictures)
    trainer._fill(np.random.default_rng(0))
    f = trainer.vae.encode(trainer._batch(np.random.default_rng(1), 8)).detach()
    maps = trainer.vae.quantize.tokens(f, SIDES)
    left = [f.square().mean()]
    left += [(f - trainer.vae.quantize.latents(maps[:n], SIDES)).square().mean() for n in (1, 2, 3)]
    assert left[3] < left[2] < left[1] < left[0]


def test_decoder_alone_keeps_tokens(pictures: NDArray[np.uint8]) -> None:
    first = make(pictures)
    for progress in (0.0, 0.7):
        first.step(progress)
    fixed = first.average
    trainer = make(pictures, fixed=fixed)
    before = [p.clone() for p in trainer.vae.decoder.parameters()]
    trainer.step(0.5)
    assert any(
        not torch.equal(a, b) for a, b in zip(before, trainer.vae.decoder.parameters(), strict=True)
    )
    for part in ("encoder", "quant_conv", "quantize"):
        for key, value in getattr(fixed, part).state_dict().items():
            assert torch.equal(getattr(trainer.vae, part).state_dict()[key], value)
    assert np.array_equal(
        reconstruct(trainer.vae, pictures[:4], SIDES)[1], reconstruct(fixed, pictures[:4], SIDES)[1]
    )


def test_reconstruction_and_its_measure(pictures: NDArray[np.uint8]) -> None:
    made, tokens = reconstruct(make(pictures).average, pictures[:3], SIDES)
    assert made.shape == (3, 16, 16, 3) and tokens.shape == (3, 21)
    black = np.zeros((1, 4, 4, 3), np.uint8)
    assert psnr(black + 10, black)[0] == pytest.approx(20 * np.log10(25.5))
