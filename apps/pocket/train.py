"""Train the transformer of the pocket world, or of the pocket video, on encoded walks.

    python -m streamgen.apps.pocket.train --data pocket-data --minutes 120
    python -m streamgen.apps.pocket.train --data pocket-video-data --kind video --minutes 85 \
        --begin-from weights/pocket-world --workers 1

Teacher forcing (`forcing.py`) on clips as long as the window, in three disguises of the context so
that the model survives its own errors: clean; noised a little, with the noise level told; or the
model's own guesses in place of some chunks, made from its own guesses in turn. The first frame of
half the clips comes from far back in the walk, as a sink does. Weights train in bfloat16 under a
float32 master copy; matrices of the blocks with Muon, the rest with AdamW; an exponential average
is what ships.

The schedule counts minutes of training, not steps, so that a slow machine ends in time; a stopped
run resumes from its last checkpoint. Workers are processes of one thread each that average their
gradients, which leaves no thread waiting for another within an operation.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from streamgen.apps.pocket.data import Clip, Clips
from streamgen.apps.pocket.forcing import PromptPerFrame, TwoStreams
from streamgen.apps.pocket.prompts import MAX_WORDS, VOCABULARY
from streamgen.models.rope import rotation
from streamgen.models.text import WordEncoder
from streamgen.models.wan import WanConfig, WanModel
from streamgen.weights.load import load_into, read_tensors

CONFIG = WanConfig(
    dim=256,
    ffn_dim=1024,
    num_heads=4,
    num_layers=6,
    in_channels=8,
    out_channels=8,
    patch_size=(1, 3, 2),
    text_dim=64,
    text_len=MAX_WORDS,
    freq_dim=128,
    action_dim=6,
    spatial_tokens=32,
    prediction="sample",
)
VIDEO_CONFIG = replace(CONFIG, action_dim=0)
LATENT_HW = (12, 16)


@dataclass(frozen=True)
class Recipe:
    """What can be turned. Rates are for the bf16 weights' float32 master copy."""

    batch: int = 3  # clips a worker
    frames: int = 16
    chunk: int = 2
    rate: float = 2e-3
    warmup_steps: int = 100
    ema: float = 0.998
    noisy_context: float = 0.5  # chance that a clip's context is noised
    context_noise: float = 0.3  # highest noise level of a context
    own_context: float = 0.5  # chance that a step's context holds the model's own guesses, ...
    own_after: float = 0.5  # ... once this share of the time has passed
    dreams: int = 48  # batches whose guesses are kept as the context of a later step, ...
    dream_depth: int = 8  # ... so many times, each time guessed anew from the last guess
    own_level: float = 0.05  # noise level that a context of own guesses is told to have
    dream_level: float = 0.4  # from this noise level on a guess is the model's own
    no_prompt: float = 0.05
    recached: float = 0.5  # chance that the chunk before a switch is stored under the new prompt
    seed: int = 0
    save_steps: int = 100  # between two checkpoints


# The video begins from the world's weights, so it soon knows enough to dream.
VIDEO_RECIPE = Recipe(batch=4, chunk=4, rate=1.5e-3, own_after=0.15, save_steps=50)


class PocketWorld(nn.Module):
    """The transformer and its word encoder, trained together; of a world or a video."""

    def __init__(self, config: WanConfig = CONFIG) -> None:
        super().__init__()
        self.dit = WanModel(config)
        self.text = WordEncoder(VOCABULARY, config.text_dim, MAX_WORDS)


def noise_levels(rng: np.random.Generator, shape: tuple[int, int]) -> Tensor:
    """Noise level of each chunk: a third pure noise, the rest spread over (0.05, 1)."""
    level = rng.uniform(0.05, 1.0, shape)
    return torch.from_numpy(np.where(rng.random(shape) < 1 / 3, 1.0, level)).float()


def mix(x0: Tensor, noise: Tensor, level_BF: Tensor) -> Tensor:
    """Flow matching's straight line from a clean latent (level 0) to noise (level 1)."""
    return torch.lerp(x0, noise, level_BF[:, :, None, None, None])


@dataclass(frozen=True)
class Dream:
    """A batch of clips and what the model made of them after `depth` guesses upon guesses."""

    clip: Clip
    latents: Tensor
    depth: int = 0


class Trainer:
    """One model, its optimisers and averages, and the clock of its schedule."""

    def __init__(
        self,
        recipe: Recipe,
        clips: Clips,
        worker: int = 0,
        workers: int = 1,
        config: WanConfig = CONFIG,
    ) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.clips, self.worker = recipe, clips, worker
        self.rng = np.random.default_rng(recipe.seed)
        self.master = PocketWorld(config)
        self.model = PocketWorld(config).bfloat16()
        self.average = {k: v.clone() for k, v in self.master.state_dict().items()}
        grid = config.grid(LATENT_HW)
        self.frame_tokens = grid[0] * grid[1]
        turn = rotation(range(recipe.frames), grid, config.head_dim)
        self.history = TwoStreams(turn, recipe.chunk * self.frame_tokens, torch.bfloat16)
        matrices, rest = [], []
        for name, p in self.master.named_parameters():
            (matrices if p.ndim == 2 and ".blocks." in name else rest).append(p)
        # Muon's arithmetic is a sixth of a step: each worker does it for its share of the matrices.
        self.shares = [matrices[i::workers] for i in range(workers)]
        self.optimisers = (
            torch.optim.Muon(
                self.shares[worker],
                lr=recipe.rate,
                weight_decay=0.02,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(rest, lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self.dreams: list[Dream] = []
        self.step_count, self.seconds = 0, 0.0
        self._push()

    def _push(self) -> None:
        for low, high in zip(self.model.parameters(), self.master.parameters(), strict=True):
            low.data.copy_(high.data)

    def predict(self, x: Tensor, level_BF: Tensor, clip: Clip, which_BF: Tensor) -> Tensor:
        """The x0 that the noisy half of `x [B, 2F, C, Y, X]` is predicted to have."""
        texts = [text for pair in zip(*clip["prompts"], strict=True) for text in pair]
        prompt = PromptPerFrame(
            self.model.dit.encode_prompt(self.model.text(texts)), which_BF, self.frame_tokens
        )
        keys = torch.cat([clip["keys"], clip["keys"]], dim=1) if clip["keys"].shape[2] else None
        out = self.model.dit(x.transpose(1, 2), 1000 * level_BF, self.history, prompt, keys)
        return out[:, :, self.recipe.frames :].float().transpose(1, 2)

    def context(self, x0: Tensor) -> tuple[Tensor, Tensor]:
        """The clean stream and the noise level it is told to have, for every frame."""
        batch, frames = x0.shape[:2]
        noised = torch.from_numpy(self.rng.random((batch, 1)) < self.recipe.noisy_context)
        level = torch.rand(batch, frames) * self.recipe.context_noise * noised
        return mix(x0, torch.randn_like(x0), level), level

    def _fresh(self) -> Dream:
        recipe, rng = self.recipe, self.rng
        clip = self.clips.sample(rng, recipe.batch, recipe.frames, recipe.chunk)
        for texts in clip["prompts"]:
            texts[:] = [t if rng.random() > recipe.no_prompt else "" for t in texts]
        return Dream(clip, clip["latents"])

    def _recall(self) -> Dream:
        """Take one of the kept batches out, or a fresh one while there are few."""
        if len(self.dreams) < self.recipe.dreams:
            return self._fresh()
        return self.dreams.pop(int(self.rng.integers(len(self.dreams))))

    def step(self, progress: float) -> tuple[float, float]:
        """One step of training; returns the loss and the x0 error where the noise is above 0.5."""
        recipe = self.recipe
        seed = (recipe.seed, self.step_count, self.worker)
        self.rng = rng = np.random.default_rng(seed)
        torch.manual_seed(int(rng.integers(2**62)))
        dreaming = progress > recipe.own_after and rng.random() < recipe.own_context
        dream = self._recall() if dreaming else self._fresh()
        clip = dream.clip
        x0 = clip["latents"]
        chunks = recipe.frames // recipe.chunk
        level = noise_levels(rng, (recipe.batch, chunks)).repeat_interleave(recipe.chunk, dim=1)
        noisy = mix(x0, torch.randn_like(x0), level)
        past, past_level = self.context(x0)
        frame = torch.arange(recipe.frames)
        recached = torch.from_numpy(rng.random(recipe.batch) < recipe.recached) * recipe.chunk
        which = torch.cat(
            [frame >= (clip["switch"] - recached)[:, None], frame >= clip["switch"][:, None]], dim=1
        ).long()
        levels = torch.cat([past_level, level], dim=1)
        if dream.depth:
            share = rng.random((recipe.batch, 1)) * 2  # of a clip's chunks; often all of them
            own = torch.from_numpy(rng.random((recipe.batch, chunks)) < share)
            own = own.repeat_interleave(recipe.chunk, dim=1)
            own[:, 0] &= ~clip["sunk"]
            past = torch.where(own[:, :, None, None, None], dream.latents, past)
            levels = torch.cat([past_level.masked_fill(own, recipe.own_level), level], dim=1)
        out = self.predict(torch.cat([past, noisy], dim=1), levels, clip, which)
        error_BF = (out - x0).square().mean(dim=(2, 3, 4))
        # In a clip with a far sink the first chunk joins two moments: nothing to learn there.
        use = torch.ones_like(level)
        use[clip["sunk"], : recipe.chunk] = 0.0
        loss = (error_BF * use / level.clamp_min(0.35).square()).mean()
        loss.backward()
        self._update(progress)
        if dreaming and dream.depth < recipe.dream_depth:
            own = (level > recipe.dream_level)[:, :, None, None, None]
            guess = torch.where(own, out.detach(), dream.latents)
            self.dreams.append(Dream(clip, guess, dream.depth + 1))
        high = (level > 0.5) & (use > 0)
        return loss.item(), error_BF.detach()[high].mean().item()

    def _update(self, progress: float) -> None:
        recipe = self.recipe
        ramp = min(1.0, (self.step_count + 1) / recipe.warmup_steps)
        decay = min(1.0, max(0.0, (1.0 - progress) / 0.6))  # constant, then linear to zero
        flat = torch.cat([low.grad.float().flatten() for low in self.model.parameters()])
        if dist.is_initialized():
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
        high = list(self.master.parameters())
        for p, grad in zip(high, flat.split([p.numel() for p in high]), strict=True):
            p.grad = grad.view_as(p)
        for low in self.model.parameters():
            low.grad = None
        nn.utils.clip_grad_norm_(self.master.parameters(), 1.0)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate * ramp * max(decay, 0.01)
            optimiser.step()
        for owner, share in enumerate(self.shares if dist.is_initialized() else ()):
            flat = torch.cat([p.detach().flatten() for p in share])
            dist.broadcast(flat, src=owner)
            for p, new in zip(share, flat.split([p.numel() for p in share]), strict=True):
                p.data.copy_(new.view_as(p))
        self._push()
        self.step_count += 1
        rate = min(recipe.ema, 1 - 1 / (self.step_count + 1))
        for name, value in self.master.state_dict().items():
            self.average[name].lerp_(value, 1 - rate)

    def save(self, folder: Path) -> None:
        """Write everything a resumed run needs; an interrupted write leaves the old files."""
        muon, adamw = (optimiser.state_dict() for optimiser in self.optimisers)
        _write({"step": self.step_count, "muon": muon}, folder / f"muon-{self.worker}.pt")
        if self.worker == 0:
            state = {
                "master": self.master.state_dict(),
                "average": self.average,
                "adamw": adamw,
                "step": self.step_count,
                "seconds": self.seconds,
            }
            _write(state, folder / "train.pt")

    def load(self, folder: Path) -> None:
        """Continue a saved run; Muon's momentum starts anew if it was saved at another step."""
        state = torch.load(folder / "train.pt", weights_only=True)
        self.master.load_state_dict(state["master"])
        self.average = state["average"]
        self.optimisers[1].load_state_dict(state["adamw"])
        self.step_count, self.seconds = state["step"], state["seconds"]
        momentum = folder / f"muon-{self.worker}.pt"
        if momentum.exists():
            saved = torch.load(momentum, weights_only=True)
            if saved["step"] == self.step_count:
                self.optimisers[0].load_state_dict(saved["muon"])
        self._push()

    def begin_from(self, folder: Path) -> None:
        """Begin from the weights of a packaged world instead of random ones.

        A model without actions leaves the world's action embedding out.
        """
        dit = self.master.dit
        drop = () if dit.config.action_dim else ("action_embedding.",)
        for part, module, ignored in (("transformer", dit, drop), ("text", self.master.text, ())):
            load_into(module, read_tensors(folder / f"{part}.safetensors"), ignored)
        self.average = {k: v.clone() for k, v in self.master.state_dict().items()}
        self._push()


def _write(state: dict[str, Any], path: Path) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def run(trainer: Trainer, minutes: float) -> Iterator[tuple[int, float, float, float]]:
    """Train until `minutes` of training are done, yielding (step, minutes, loss, error)."""
    while trainer.seconds < 60 * minutes:
        start = time.monotonic()
        loss, error = trainer.step(trainer.seconds / (60 * minutes))
        trainer.seconds += time.monotonic() - start
        if dist.is_initialized():  # all workers must agree on when to stop
            clock = torch.tensor(trainer.seconds, dtype=torch.float64)
            dist.broadcast(clock, src=0)
            trainer.seconds = clock.item()
        yield trainer.step_count, trainer.seconds / 60, loss, error


def work(worker: int, workers: int, args: argparse.Namespace) -> None:
    """One worker's whole run; the first of them logs and saves."""
    torch.set_num_threads(1 if workers > 1 else torch.get_num_threads())
    if workers > 1:
        meeting = (args.data / "workers").resolve().as_uri()
        dist.init_process_group("gloo", meeting, rank=worker, world_size=workers)
    config, recipe = (VIDEO_CONFIG, VIDEO_RECIPE) if args.kind == "video" else (CONFIG, Recipe())
    recipe = replace(recipe, rate=args.rate or recipe.rate)
    trainer = Trainer(recipe, Clips(args.data), worker, workers, config)
    if (args.data / "train.pt").exists():
        trainer.load(args.data)
    elif args.begin_from:
        trainer.begin_from(args.begin_from)
    if worker == 0:
        print(json.dumps({"recipe": asdict(trainer.recipe), "config": asdict(config)}), flush=True)
    losses: list[tuple[float, float]] = []
    for step, minute, loss, error in run(trainer, args.minutes):
        losses.append((loss, error))
        if worker == 0 and step % 50 == 0:
            mean = np.nanmean(losses, axis=0)
            print(
                f"step {step}  {minute:.1f} min  loss {mean[0]:.4f}  x0 {mean[1]:.4f}", flush=True
            )
            losses.clear()
        if step % recipe.save_steps == 0:
            trainer.save(args.data)
    trainer.save(args.data)


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("pocket-data"))
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--kind", choices=("world", "video"), default="world")
    parser.add_argument(
        "--rate", type=float, help="of learning, where the kind's own is not wanted"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--begin-from", type=Path, help="a packaged world to improve further")
    args = parser.parse_args()
    (args.data / "workers").unlink(missing_ok=True)
    mp.spawn(work, (args.workers, args), nprocs=args.workers)


if __name__ == "__main__":
    main()
