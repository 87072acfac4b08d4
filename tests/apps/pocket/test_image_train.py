"""Training of the image transformer: tokens that slip, learning, and exact resuming."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from streamgen.apps.pocket.image_train import (
    CONFIG,
    Recipe,
    Trainer,
    encode,
    new_model,
    slipping_tokens,
)
from streamgen.apps.pocket.image_vq import new_vae
from streamgen.models.var import VARConfig
from streamgen.models.vq import VQVAE, VQConfig

SIDES = (1, 2, 4)
VQ = VQConfig(24, 4, 32, (1, 1, 1), 1, using_sa=False, using_mid_sa=False)
TINY = VARConfig(
    depth=2, width=32, heads=2, num_classes=3, latent_channels=4, vocab=24, patch_nums=SIDES
)
RECIPE = Recipe(batch=6, warmup_steps=1, rate=5e-3, slip_to=4)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def vae() -> VQVAE:
    torch.manual_seed(0)
    return new_vae(VQ).eval().requires_grad_(False)


def make(vae: VQVAE, recipe: Recipe = RECIPE) -> Trainer:
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=40)
    latents = rng.normal(size=(3, 4, 4, 4))[labels] + 0.1 * rng.normal(size=(40, 4, 4, 4))
    return Trainer(recipe, vae.quantize, latents.astype(np.float16), labels, TINY)


def test_shipped_form() -> None:
    """VAR's own rule: width 64 a block, as many heads as blocks."""
    assert CONFIG.width == 64 * CONFIG.depth and CONFIG.heads == CONFIG.depth
    assert CONFIG.ends[-1] == 291 and CONFIG.num_classes == 16


def test_latents_of_pictures(vae: VQVAE) -> None:
    pictures = np.random.default_rng(0).integers(256, size=(3, 16, 16, 3), dtype=np.uint8)
    f = encode(vae, pictures)
    assert f.shape == (3, 4, 4, 4) and f.dtype == np.float16


def test_without_slips_tokens_are_the_quantisers(vae: VQVAE) -> None:
    f = torch.randn(5, 4, 4, 4)
    none = torch.zeros(5)
    shown, wanted = slipping_tokens(vae.quantize, f, SIDES, none, 4, torch.Generator())
    maps = vae.quantize.tokens(f, SIDES)
    assert torch.equal(wanted, torch.cat(maps, 1))
    assert torch.allclose(shown, vae.quantize.inputs(maps, SIDES), atol=1e-6)


def test_slips_are_shown_and_then_mended(vae: VQVAE) -> None:
    """What is shown holds the slips; what is wanted codes what they left, from the next scale on.

    With entries 2 to 4 of 4 taken everywhere, the first map shown is that of a wrong token, and
    the second map wanted is the nearest to the rest that this token leaves.
    """
    torch.manual_seed(1)
    f = torch.randn(4, 4, 4, 4)
    generator = torch.Generator().manual_seed(0)
    shown, wanted = slipping_tokens(vae.quantize, f, SIDES, torch.ones(4), 4, generator)
    nearest = vae.quantize.nearest(vae.quantize.shrink(f, 1))
    assert torch.equal(wanted[:, :1], nearest)  # the answer itself never slips
    right = vae.quantize.inputs([nearest, wanted[:, 1:5]], SIDES[:2])
    assert not torch.allclose(shown[:, :4], right)
    for token in range(VQ.vocab):  # the one that was taken explains the rest that is coded
        index = torch.full((1, 1), token)
        f_hat = vae.quantize.latents([index], SIDES)
        seen = vae.quantize.shrink(f_hat, 2).flatten(2).transpose(1, 2)
        if torch.allclose(seen[0], shown[0, :4], atol=1e-5):
            rest = vae.quantize.shrink(f[:1] - f_hat, 2)
            assert token != int(nearest[0]) and torch.equal(
                vae.quantize.nearest(rest), wanted[:1, 1:5]
            )
            break
    else:
        raise AssertionError("no entry explains what is shown")


def test_share_of_slips(vae: VQVAE) -> None:
    """Of the first scale, where nothing came before: half the pictures show another map."""
    f = torch.randn(200, 4, 4, 4)
    generator = torch.Generator().manual_seed(0)
    share = torch.full((200,), 0.5)
    shown, wanted = slipping_tokens(vae.quantize, f, SIDES, share, 4, generator)
    right = vae.quantize.shrink(vae.quantize.latents([wanted[:, :1]], SIDES), 2)
    same = (shown[:, :4] - right.flatten(2).transpose(1, 2)).abs().amax((1, 2)) < 1e-5
    assert 0.35 < same.float().mean() < 0.65


def test_gates_begin_open() -> None:
    torch.manual_seed(0)
    model = new_model(TINY)
    gates = model.condition(torch.tensor([0, 1])).blocks[0][:, :2]
    assert (gates - 1).abs().max() < 0.2


def test_it_learns(vae: VQVAE) -> None:
    trainer = make(vae)
    losses = [trainer.step(0.1)[0] for _ in range(25)]
    assert losses[0] == pytest.approx(np.log(VQ.vocab), rel=0.05)
    assert np.mean(losses[-4:]) < 0.85 * np.mean(losses[:4])
    measured = trainer.measure(trainer.latents[:8], trainer.labels[:8])
    assert len(measured) == len(SIDES) and np.isfinite(measured).all()


def test_class_is_used_unless_dropped(vae: VQVAE) -> None:
    """Where every class is dropped, the classes' own embeddings get no gradient but decay."""
    trainer = make(vae, Recipe(batch=6, no_class=1.0, slip_to=4))
    before = trainer.model.class_emb.weight.detach().clone()
    trainer.step(0.1)
    after = trainer.model.class_emb.weight
    assert torch.equal(after[:3], before[:3]) and not torch.equal(after[3], before[3])


def test_resumed_equals_uninterrupted(vae: VQVAE, tmp_path: Path) -> None:
    whole, first, second = (make(vae) for _ in range(3))
    for progress in (0.1, 0.3):
        whole.step(progress), first.step(progress)
    first.seconds = 5.0
    first.save(tmp_path / "var.pt")
    second.load(tmp_path / "var.pt")
    assert second.seconds == 5.0
    assert whole.step(0.6) == second.step(0.6)
    for key, value in whole.average.items():
        assert torch.equal(second.average[key], value)
