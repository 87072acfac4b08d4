"""Train the pocket image model's transformer on the tokens of pictures.

    python -m streamgen.apps.pocket.image_train --data pocket-image --minutes 55

The model is VAR's (`streamgen.models.var`), four blocks deep: all scales of a picture at once, each
predicted from the true coarser ones. Latents are encoded once (`latents.npy`); their tokens are
looked up anew at every visit, in part of the pictures with slips: some tokens are not the nearest
entry but one of the next ones, and what follows codes what that left. The model so learns to mend
what it will get wrong itself, as Infinity's bitwise self-correction does (Han et al. 2024).

Matrices of the blocks learn with Muon, the rest with AdamW; an exponential average is what ships.
The schedule counts minutes of training, and a stopped run resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from streamgen.apps.pocket.image_data import CLASSES, TEST_SEED, render, squeeze
from streamgen.apps.pocket.image_vq import CONFIG as VQ
from streamgen.apps.pocket.image_vq import PATCH_NUMS, load_vae, to_pixels
from streamgen.models.var import VARConfig, VARModel
from streamgen.models.vq import VQVAE, Quantizer

DEPTH = 4
CONFIG = VARConfig(
    depth=DEPTH,
    width=64 * DEPTH,
    heads=DEPTH,
    num_classes=len(CLASSES),
    latent_channels=VQ.latent_channels,
    vocab=VQ.vocab,
    patch_nums=PATCH_NUMS,
)
LOG_EVERY, SAVE_EVERY = 50, 100  # steps


@dataclass(frozen=True)
class Recipe:
    """What can be turned."""

    batch: int = 8
    rate: float = 2e-3
    warmup_steps: int = 60
    decay: float = 0.6  # last share of the time, in which the rate falls to nothing
    no_class: float = 0.1  # chance that a picture's class is dropped, for guidance
    slipping: float = 0.5  # chance that a picture has slips ...
    slips: float = 0.3  # ... and the highest share of its tokens that slip ...
    slip_to: int = 12  # ... to one of so many nearest entries
    coarse: float = 0.5  # a token weighs 1 / side ** coarse: fine ones are many
    ema: float = 0.998
    seed: int = 0


@torch.inference_mode()
def encode(vae: VQVAE, pictures: NDArray[np.uint8]) -> NDArray[np.float16]:
    """Latents [picture, channel, row, column] of pictures, not quantised."""
    parts = []
    for first in range(0, len(pictures), 32):
        with torch.autocast("cpu", torch.bfloat16):
            f = vae.encode(to_pixels(pictures[first : first + 32]))
        parts.append(f.half().numpy())
    return np.concatenate(parts)


def encode_all(data: Path, vae: VQVAE, count: int) -> None:
    """Write `latents.npy` of the first `count` pictures in `data`."""
    pictures = np.load(data / "pictures.npy", mmap_mode="r")[:count]
    parts = [encode(vae, pictures[i : i + 1024]) for i in range(0, len(pictures), 1024)]
    with (data / "latents.tmp").open("wb") as file:
        np.save(file, np.concatenate(parts))
    os.replace(data / "latents.tmp", data / "latents.npy")


@torch.no_grad()
def slipping_tokens(
    quantiser: Quantizer,
    f_BCYX: Tensor,
    patch_nums: tuple[int, ...],
    share_B: Tensor,
    slip_to: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """What a model is shown and what it shall answer, where some tokens slip.

    Args:
        quantiser: of the autoencoder that the latents come from.
        f_BCYX: latents.
        patch_nums: sides of the token maps.
        share_B: share of each picture's tokens that are not the nearest entry.
        slip_to: they are one of so many nearest entries instead.
        generator: source of the choices.

    Returns:
        The latents so far at every scale but the first `[B, L - 1, C]`, slips included, and the
        nearest entries `[B, L]`, which code what all earlier slips left.
    """
    f_hat = torch.zeros_like(f_BCYX)
    table = quantiser.embedding.weight
    shown, wanted = [], []
    for scale, side in enumerate(patch_nums):
        z = quantiser.shrink(f_BCYX - f_hat, side).flatten(2).transpose(1, 2)
        distance_BNV = table.square().sum(1) - 2 * (z @ table.T)
        near = distance_BNV.topk(slip_to, largest=False).indices
        wanted.append(near[..., 0])
        slip = torch.rand(near.shape[:2], generator=generator) < share_B[:, None]
        rank = torch.randint(1, slip_to, near.shape[:2], generator=generator) * slip
        taken = near.gather(2, rank[..., None])[..., 0]
        f_hat, seen = quantiser.add(f_hat, quantiser.lookup(taken, side), scale, patch_nums)
        if seen is not None:
            shown.append(seen.flatten(2).transpose(1, 2))
    return torch.cat(shown, dim=1), torch.cat(wanted, dim=1)


def new_model(config: VARConfig = CONFIG) -> VARModel:
    """Random weights. The gates begin at 1: a short training can't wait for them to open."""
    model = VARModel(config)
    model.init_weights(gate=0.1)
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.startswith("blocks.") and name.endswith("ada_lin.1.bias"):
                bias[: 2 * config.width] = 1.0
    return model


class Trainer:
    """A transformer, its optimisers and average, and the clock of its schedule.

    Args:
        recipe: what can be turned.
        quantiser: turns latents into tokens.
        latents: [picture, channel, row, column].
        labels: class of every picture.
        config: sizes of the network.
    """

    def __init__(
        self,
        recipe: Recipe,
        quantiser: Quantizer,
        latents: NDArray[np.float16],
        labels: NDArray[np.int64],
        config: VARConfig = CONFIG,
    ) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.config, self.quantiser = recipe, config, quantiser
        self.latents, self.labels = latents, labels
        self.model = new_model(config)
        self.average = {k: v.clone() for k, v in self.model.state_dict().items()}
        side = torch.tensor(config.patch_nums, dtype=torch.float32)
        weight = side.pow(-recipe.coarse).repeat_interleave(torch.tensor(config.lengths))
        self.weight_L = weight / weight.mean()
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, p in self.model.named_parameters():
            (matrices if p.ndim == 2 and name.startswith("blocks.") else rest).append(p)
        self.optimisers = (
            torch.optim.Muon(
                matrices, lr=recipe.rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(rest, lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self.step_count, self.seconds = 0, 0.0

    def step(self, progress: float) -> tuple[float, float]:
        """One step of training; returns the loss and the share of tokens that are right."""
        recipe = self.recipe
        rng = np.random.default_rng((recipe.seed, self.step_count))
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        chosen = rng.integers(len(self.latents), size=recipe.batch)
        f = torch.from_numpy(self.latents[chosen]).float()
        labels = torch.from_numpy(self.labels[chosen])
        share = torch.rand(recipe.batch, generator=generator) * recipe.slips
        share *= torch.rand(recipe.batch, generator=generator) < recipe.slipping
        maps, wanted = slipping_tokens(
            self.quantiser, f, self.config.patch_nums, share, recipe.slip_to, generator
        )
        dropped = torch.rand(recipe.batch, generator=generator) < recipe.no_class
        labels = labels.masked_fill(dropped, self.config.no_class)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(labels, maps)
        entropy = F.cross_entropy(logits.float().transpose(1, 2), wanted, reduction="none")
        (entropy * self.weight_L).mean().backward()
        self._update(progress)
        right = (logits.detach().argmax(2) == wanted).float().mean()
        return entropy.detach().mean().item(), right.item()

    def _update(self, progress: float) -> None:
        recipe = self.recipe
        ramp = min(1.0, (self.step_count + 1) / recipe.warmup_steps)
        decay = min(1.0, max(0.0, (1.0 - progress) / recipe.decay))
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate * ramp * max(decay, 0.01)
            optimiser.step()
            optimiser.zero_grad()
        self.step_count += 1
        rate = min(recipe.ema, 1 - 1 / (self.step_count + 1))
        for name, value in self.model.state_dict().items():
            self.average[name].lerp_(value, 1 - rate)

    @torch.inference_mode()
    def measure(self, latents: NDArray[np.float16], labels: NDArray[np.int64]) -> list[float]:
        """Mean cross entropy of the averaged model at every scale, in nats a token."""
        model = VARModel(self.config)
        model.load_state_dict(self.average)
        sums = torch.zeros(len(self.config.lengths))
        for first in range(0, len(latents), 16):
            f = torch.from_numpy(latents[first : first + 16]).float()
            tokens = self.quantiser.tokens(f, self.config.patch_nums)
            maps = self.quantiser.inputs(tokens, self.config.patch_nums)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(torch.from_numpy(labels[first : first + 16]), maps)
            entropy = F.cross_entropy(
                logits.float().transpose(1, 2), torch.cat(tokens, 1), reduction="none"
            )
            sums += torch.stack([e.mean(1).sum() for e in entropy.split(self.config.lengths, 1)])
        return (sums / len(latents)).tolist()

    def save(self, path: Path) -> None:
        """Write everything a resumed run needs; an interrupted write leaves the old file."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "average": self.average,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": self.step_count,
            "seconds": self.seconds,
        }
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def load(self, path: Path) -> None:
        """Continue a saved run."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step_count, self.seconds = state["step"], state["seconds"]


def run(trainer: Trainer, minutes: float) -> Iterator[tuple[int, float, float, float]]:
    """Train until `minutes` are done, past runs included: (step, minutes, loss, right)."""
    while trainer.seconds < 60 * minutes:
        start = time.monotonic()
        loss, right = trainer.step(trainer.seconds / (60 * minutes))
        trainer.seconds += time.monotonic() - start
        yield trainer.step_count, trainer.seconds / 60, loss, right


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("pocket-image"))
    parser.add_argument("--minutes", type=float, default=55, help="of training")
    parser.add_argument("--pictures", type=int, default=24576, help="how many are encoded")
    args = parser.parse_args()
    torch.set_num_threads(1)
    vae = load_vae(args.data / "vq.pt")
    if not (args.data / "latents.npy").exists():
        start = time.monotonic()
        encode_all(args.data, vae, args.pictures)
        print(f"encoded in {time.monotonic() - start:.0f} s", flush=True)
    latents = np.load(args.data / "latents.npy")
    labels = np.load(args.data / "labels.npy")[: len(latents)]
    frames, test_labels = render(TEST_SEED, 32, 4)
    test_latents = encode(vae, squeeze(frames))
    trainer = Trainer(Recipe(), vae.quantize, latents, labels)
    checkpoint = args.data / "var.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    print(trainer.recipe, trainer.config, flush=True)
    seen = []
    for step, minute, loss, right in run(trainer, args.minutes):
        seen.append((loss, right))
        if step % LOG_EVERY == 0:
            mean = np.mean(seen, axis=0)
            seen.clear()
            print(
                f"step {step}  {minute:.1f} min  loss {mean[0]:.3f}  right {100 * mean[1]:.1f} %",
                flush=True,
            )
        if step % (4 * LOG_EVERY) == 0:
            scales = trainer.measure(test_latents, test_labels)
            print("  held out, by scale:", *(f"{loss:.2f}" for loss in scales), flush=True)
        if step % SAVE_EVERY == 0:
            trainer.save(checkpoint)
    trainer.save(checkpoint)


if __name__ == "__main__":
    main()
