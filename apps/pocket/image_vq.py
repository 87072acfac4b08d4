"""Train the pocket image model's VQ autoencoder: 96 x 96 pixels to 291 tokens on seven scales.

    python -m streamgen.apps.pocket.image_vq --data pocket-image --minutes 25

The network is VAR's (`streamgen.models.vq`), small. First it is a plain autoencoder. Then its
encoder is fixed and the codebook filled with samples of what there is to code; from there on it
follows, as an exponential average of the vectors that fall on each entry (van den Oord et al. 2017,
appendix A.1), and entries that nothing falls on begin anew, while `Phi` and the decoder learn on.
(Trained together, as VAR's is, for so short a time, the latents either lost all that coarse scales
can't say to the commitment, or outgrew the codebook.) The loss: pixels, their differences, and the
tokens' error. Kernels learn with Muon, as matrices, the rest with AdamW.

With `--decoder-only` what follows the tokens (`post_quant_conv`, `decoder`) goes on learning from
the finished autoencoder, so that tokens stay what they are.
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

from streamgen.apps.pocket.image_data import TEST_SEED, render, squeeze
from streamgen.models.vq import VQVAE, Phi, VQConfig

CONFIG = VQConfig(
    vocab=1024,
    latent_channels=16,
    ch=32,
    ch_mult=(1, 1, 2, 3),
    num_res_blocks=1,
    using_sa=False,
    using_mid_sa=True,
    share_phi=4,
)
PATCH_NUMS = (1, 2, 3, 4, 6, 9, 12)
"""Sides of the token maps, 291 tokens in all."""

LOG_EVERY, SAVE_EVERY = 100, 200  # steps


@dataclass(frozen=True)
class Recipe:
    """What can be turned."""

    batch: int = 4
    rate: float = 2e-3
    warmup_steps: int = 50
    plain: float = 0.6  # share of the time before anything is quantised
    edges: float = 1.0  # weight of the differences between neighbouring pixels
    codebook_decay: float = 0.99
    dead_below: float = 0.02  # vectors a step; entries with fewer begin anew ...
    restart_every: int = 10  # ... every so many steps ...
    restart_until: float = 0.7  # ... until this share of the time
    ema: float = 0.998
    seed: int = 0


def to_pixels(pictures: NDArray[np.uint8]) -> Tensor:
    """Pictures [B, row, column, rgb] in 0 to 255, to [B, rgb, row, column] in -1 to 1."""
    x = torch.from_numpy(np.ascontiguousarray(pictures.transpose(0, 3, 1, 2)))
    return x.float().div_(127.5).sub_(1)


def picture_loss(made: Tensor, true: Tensor, edges: float) -> Tensor:
    """Absolute and squared error of pixels, and the absolute error of their differences."""
    error = made - true
    loss = error.abs().mean() + 4 * error.square().mean()
    return loss + edges * (error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean())


def new_vae(config: VQConfig = CONFIG) -> VQVAE:
    """Random weights; each `Phi` begins as the identity, so that scales add up from the start."""
    vae = VQVAE(config)
    for module in vae.quantize.modules():
        if isinstance(module, Phi):
            nn.init.dirac_(module.weight)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return vae


class Trainer:
    """An autoencoder, its optimiser and averages, and the clock of its schedule.

    Args:
        recipe: what can be turned.
        pictures: uint8 [picture, row, column, rgb]; may be a memory map.
        patch_nums: sides of the token maps.
        config: sizes of the network.
        fixed: a finished autoencoder of which only the decoder goes on learning.
    """

    def __init__(
        self,
        recipe: Recipe,
        pictures: NDArray[np.uint8],
        patch_nums: tuple[int, ...] = PATCH_NUMS,
        config: VQConfig = CONFIG,
        fixed: VQVAE | None = None,
    ) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.pictures, self.patch_nums = recipe, pictures, patch_nums
        self.decoder_only = fixed is not None
        self.vae, self.average = new_vae(config), new_vae(config).eval().requires_grad_(False)
        if fixed is not None:
            self.vae.load_state_dict(fixed.state_dict())
            self.vae.requires_grad_(False)
            for part in (self.vae.decoder, self.vae.post_quant_conv):
                part.requires_grad_(True)
        self.average.load_state_dict(self.vae.state_dict())
        self.vae.quantize.embedding.requires_grad_(False)  # follows its vectors instead
        self.weights = [p for p in self.vae.parameters() if p.requires_grad]
        self.kernels = [p for p in self.weights if p.ndim == 4]
        # Muon wants matrices: the same memory, [out, in * rows * columns].
        self.matrices = [nn.Parameter(p.data.flatten(1)) for p in self.kernels]
        self.optimisers = (
            torch.optim.Muon(
                self.matrices, recipe.rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                [p for p in self.weights if p.ndim != 4], recipe.rate, (0.9, 0.98), weight_decay=0.0
            ),
        )
        self.counts = torch.zeros(config.vocab)  # decayed number of vectors of each entry
        self.sums = torch.zeros(config.vocab, config.latent_channels)
        self.filled = self.decoder_only
        self.step_count, self.seconds = 0, 0.0

    def _batch(self, rng: np.random.Generator, size: int) -> Tensor:
        chosen = np.sort(rng.choice(len(self.pictures), size, replace=False))
        return to_pixels(self.pictures[chosen])

    def step(self, progress: float) -> tuple[float, float]:
        """One step of training; returns the pictures' loss and the quantiser's error."""
        recipe = self.recipe
        rng = np.random.default_rng((recipe.seed, self.step_count, self.decoder_only))
        if progress >= recipe.plain and not self.filled:
            self._fill(rng)
        x = self._batch(rng, recipe.batch)
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(not self.filled):
            f = self.vae.encode(x)
        f, error = f.float(), torch.zeros(())
        if self.filled:
            f, error = self._quantise(f, rng, progress)
        with torch.autocast("cpu", torch.bfloat16):
            made = self.vae.decode(f)
        loss = picture_loss(made.float(), x, recipe.edges)
        (loss + error).backward()
        self._update(progress)
        return loss.item(), error.item()

    def _quantise(
        self, f: Tensor, rng: np.random.Generator, progress: float
    ) -> tuple[Tensor, Tensor]:
        """The quantised latents, and their error as a share of the latents' variance.

        The error is the mean over scales, so that what coarse ones add up to is the latents too.
        """
        quantiser, sides = self.vae.quantize, self.patch_nums
        f_hat, error = torch.zeros_like(f), torch.zeros(())
        vectors: list[Tensor] = []
        chosen: list[Tensor] = []
        for scale, side in enumerate(sides):
            z = quantiser.shrink((f - f_hat).detach(), side)
            indices = quantiser.nearest(z)
            vectors.append(z.flatten(2).transpose(1, 2).flatten(0, 1))
            chosen.append(indices.flatten())
            f_hat = f_hat + quantiser.contribution(quantiser.lookup(indices, side), scale, sides)
            error = error + F.mse_loss(f_hat, f) / len(sides)
        if not self.decoder_only:
            self._follow(vectors, torch.cat(chosen), rng, progress)
        return f_hat, error / f.var()

    @torch.no_grad()
    def _follow(
        self, vectors: list[Tensor], chosen: Tensor, rng: np.random.Generator, progress: float
    ) -> None:
        """Move every entry towards the vectors that fell on it; let dead ones begin anew."""
        recipe, table = self.recipe, self.vae.quantize.embedding.weight
        keep, every = recipe.codebook_decay, torch.cat(vectors)
        self.counts.mul_(keep).index_add_(0, chosen, torch.full(chosen.shape, 1 - keep))
        self.sums.mul_(keep).index_add_(0, chosen, (1 - keep) * every)
        used = self.counts > 1e-4
        table[used] = self.sums[used] / self.counts[used, None]
        if self.step_count % recipe.restart_every or progress > recipe.restart_until:
            return
        # A fresh entry is a vector of this batch; all scales give equally many.
        for entry in (self.counts < recipe.dead_below).nonzero().flatten().tolist():
            source = vectors[int(rng.integers(len(vectors)))]
            table[entry] = source[int(rng.integers(len(source)))]
            self.counts[entry] = 2 * recipe.dead_below
            self.sums[entry] = self.counts[entry] * table[entry]

    @torch.no_grad()
    def _fill(self, rng: np.random.Generator) -> None:
        """Fix the encoder; fill the codebook scale by scale with samples of what is left there."""
        self.filled = True
        self.vae.load_state_dict(self.average.state_dict())  # the better of the two
        quantiser, sides = self.vae.quantize, self.patch_nums
        table = quantiser.embedding.weight
        x = self._batch(rng, min(64, len(self.pictures)))
        f = torch.cat([self.vae.encode(part).float() for part in x.split(8)])
        share = np.sqrt(np.minimum(sides, 4))
        bounds = np.rint(np.cumsum([0, *share]) / share.sum() * len(table)).astype(int)
        f_hat = torch.zeros_like(f)
        for scale, side in enumerate(sides):
            z = quantiser.shrink(f - f_hat, side).flatten(2).transpose(1, 2)
            pool = z.flatten(0, 1)
            part = slice(bounds[scale], bounds[scale + 1])
            size = part.stop - part.start
            table[part] = pool[torch.from_numpy(rng.choice(len(pool), size, size > len(pool)))]
            nearest = torch.cdist(z, table[part][None]).argmin(2)
            h = quantiser.lookup(nearest + part.start, side)
            f_hat = f_hat + quantiser.contribution(h, scale, sides)
        self.counts.fill_(2 * self.recipe.dead_below)
        self.sums.copy_(self.counts[:, None] * table)

    def _update(self, progress: float) -> None:
        recipe = self.recipe
        ramp = min(1.0, (self.step_count + 1) / recipe.warmup_steps)
        cosine = 0.5 * (1 + float(np.cos(np.pi * min(progress, 1.0))))
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        for kernel, matrix in zip(self.kernels, self.matrices, strict=True):
            matrix.grad = None if kernel.grad is None else kernel.grad.flatten(1)
            kernel.grad = None
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate * ramp * max(cosine, 0.02)
            optimiser.step()
            optimiser.zero_grad()
        self.step_count += 1
        keep = min(recipe.ema, self.step_count / (self.step_count + 10))
        with torch.no_grad():
            for old, new in zip(self.average.parameters(), self.vae.parameters(), strict=True):
                old.lerp_(new, 1 - keep)

    def save(self, path: Path) -> None:
        """Write everything a resumed run needs; an interrupted write leaves the old file."""
        state: dict[str, Any] = {
            "vae": self.vae.state_dict(),
            "average": self.average.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "counts": self.counts,
            "sums": self.sums,
            "filled": self.filled,
            "step": self.step_count,
            "seconds": self.seconds,
        }
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def begin_from(self, path: Path) -> None:
        """Begin from the weights of another run; the codebook is filled anew."""
        weights = torch.load(path, weights_only=True)["average"]
        self.vae.load_state_dict(weights)
        self.average.load_state_dict(weights)

    def load(self, path: Path) -> None:
        """Continue a saved run."""
        state = torch.load(path, weights_only=True)
        self.vae.load_state_dict(state["vae"])
        self.average.load_state_dict(state["average"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.counts, self.sums = state["counts"], state["sums"]
        self.filled, self.step_count = state["filled"], state["step"]
        self.seconds = state["seconds"]


def run(trainer: Trainer, minutes: float) -> Iterator[tuple[int, float, float, float]]:
    """Train until `minutes` are done, past runs included: (step, minutes, loss, error)."""
    while trainer.seconds < 60 * minutes:
        start = time.monotonic()
        loss, error = trainer.step(trainer.seconds / (60 * minutes))
        trainer.seconds += time.monotonic() - start
        yield trainer.step_count, trainer.seconds / 60, loss, error


@torch.inference_mode()
def reconstruct(
    vae: VQVAE, pictures: NDArray[np.uint8], patch_nums: tuple[int, ...] = PATCH_NUMS
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pictures as their tokens show them, [picture, row, column, rgb], and the tokens [picture, N].

    Float32 throughout, in parts of 16 pictures.
    """
    shown, tokens = [], []
    for first in range(0, len(pictures), 16):
        maps = vae.quantize.tokens(vae.encode(to_pixels(pictures[first : first + 16])), patch_nums)
        pixels = vae.decode(vae.quantize.latents(maps, patch_nums))
        pixels = pixels.add(1).mul(127.5).clamp(0, 255).round().to(torch.uint8)
        shown.append(pixels.permute(0, 2, 3, 1).numpy())
        tokens.append(torch.cat(maps, dim=1).numpy())
    return np.concatenate(shown), np.concatenate(tokens)


def psnr(made: NDArray[np.uint8], true: NDArray[np.uint8]) -> NDArray[np.float64]:
    """PSNR of every picture, [picture], in decibels."""
    error = np.square(made.astype(np.float64) - true).mean(axis=(1, 2, 3))
    decibels: NDArray[np.float64] = 10 * np.log10(255**2 / np.maximum(error, 1e-9))
    return decibels


def load_vae(path: Path, config: VQConfig = CONFIG) -> VQVAE:
    """The averaged autoencoder of a checkpoint."""
    vae = new_vae(config)
    vae.load_state_dict(torch.load(path, weights_only=True)["average"])
    return vae.eval().requires_grad_(False)


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("pocket-image"))
    parser.add_argument("--minutes", type=float, default=25, help="of training")
    parser.add_argument("--plain", type=float, default=Recipe.plain, help="see Recipe")
    parser.add_argument("--begin-from", type=Path, help="the vq.pt of another run")
    parser.add_argument("--decoder-only", action="store_true", help="leave the tokens as they are")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pictures = np.load(args.data / "pictures.npy", mmap_mode="r")
    held_out = squeeze(render(TEST_SEED, 32, 2)[0])
    checkpoint = args.data / ("vq-decoder.pt" if args.decoder_only else "vq.pt")
    fixed = load_vae(args.data / "vq.pt") if args.decoder_only else None
    recipe = Recipe(rate=1e-3) if args.decoder_only else Recipe(plain=args.plain)
    trainer = Trainer(recipe, pictures, fixed=fixed)
    if checkpoint.exists():
        trainer.load(checkpoint)
    elif args.begin_from:
        trainer.begin_from(args.begin_from)
    print(recipe, trainer.vae.config, flush=True)
    losses = []
    for step, minute, loss, error in run(trainer, args.minutes):
        losses.append((loss, error))
        if step % LOG_EVERY == 0:
            mean = np.mean(losses, axis=0)
            losses.clear()
            made, tokens = reconstruct(trainer.average, held_out)
            print(
                f"step {step}  {minute:.1f} min  loss {mean[0]:.4f}  tokens' error {mean[1]:.4f}  "
                f"{psnr(made, held_out).mean():.2f} dB  {len(np.unique(tokens))} entries",
                flush=True,
            )
        if step % SAVE_EVERY == 0:
            trainer.save(checkpoint)
    trainer.save(checkpoint)


if __name__ == "__main__":
    main()
