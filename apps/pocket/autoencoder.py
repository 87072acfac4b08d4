"""Train the pocket world's autoencoder: frames of 96 x 128 pixels to latents of 8 x 12 x 16.

    python -m streamgen.apps.pocket.autoencoder --data pocket-data --minutes 18

writes `vae/`, a diffusers `AutoencoderDC`, and `vae/latent_stats.json`, the mean and standard
deviation of every latent channel. A run that was interrupted continues from its checkpoint.
With `--decoder-only` it goes on from `vae/` and leaves the encoder as it is, so that latents that
were encoded already stay valid.
"""

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import cv2
import numpy as np
import torch
from diffusers import AutoencoderDC
from numpy.typing import NDArray
from torch import Tensor, nn

from streamgen.apps.pocket.maze import HEIGHT, THEMES, WALLS, WIDTH, Mazes, Walker

LATENT_CHANNELS = 8
BATCH = 16
LEARNING_RATE = 2e-3
LATENT_NOISE = 0.05  # of the latents' spread: nearby latents must mean nearby pictures
EMA = 0.998
LOG_EVERY = 150  # steps
SAVE_EVERY = 120  # seconds
WALKS, SHOTS, GAP = 96, 16, 4  # walks drawn together, frames of each, moves between two of them


def build_vae() -> AutoencoderDC:
    """A new autoencoder, 8x down; nothing of it works at full resolution, which costs the most."""
    return AutoencoderDC(
        in_channels=3,
        latent_channels=LATENT_CHANNELS,
        encoder_block_out_channels=(16, 32, 64, 128),
        encoder_layers_per_block=(0, 1, 1, 2),
        encoder_qkv_multiscales=((),) * 4,
        decoder_block_out_channels=(16, 32, 64, 128),
        decoder_layers_per_block=(0, 1, 1, 1),
        decoder_qkv_multiscales=((),) * 4,
        decoder_norm_types="batch_norm",
    )


def load_vae(data: Path) -> tuple[AutoencoderDC, Tensor, Tensor]:
    """Load a trained autoencoder, with the mean and spread of its latents [1, channel, 1, 1]."""
    vae = AutoencoderDC.from_pretrained(data / "vae").eval().to(memory_format=torch.channels_last)
    stats = json.loads((data / "vae" / "latent_stats.json").read_text())
    mean, std = (torch.tensor(stats[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    return vae, mean, std


def to_pixels(frames: NDArray[np.uint8]) -> Tensor:
    """Frames [batch, row, column, rgb] in 0 to 255, to [batch, rgb, row, column] in -1 to 1."""
    # The permuted view of a contiguous array is channels_last already.
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def render_batch(seed: int) -> NDArray[np.uint8]:
    """Frames of random walks in random themes, [WALKS * SHOTS, row, column, rgb]."""
    cv2.setNumThreads(1)
    rng = np.random.default_rng(seed)
    mazes, walker = Mazes(WALKS, seed), Walker(WALKS, seed)
    shots = []
    for _ in range(SHOTS):
        for _ in range(GAP):
            mazes.step(walker.keys(mazes))
        theme, wall = rng.integers(len(THEMES), size=WALKS), rng.integers(len(WALLS), size=WALKS)
        shots.append(mazes.render(theme, wall))
    return np.concatenate(shots)


def render_frames(path: Path, batches: int, workers: int) -> None:
    """Fill the memory map at `path` with `batches` batches of frames [frame, row, column, rgb]."""
    partial_path = path.with_suffix(".tmp")
    count = WALKS * SHOTS
    frames = np.lib.format.open_memmap(
        partial_path, "w+", np.uint8, (batches * count, HEIGHT, WIDTH, 3)
    )
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for i, batch in enumerate(pool.map(render_batch, range(1, batches + 1))):
            frames[i * count : (i + 1) * count] = batch
    frames.flush()
    os.replace(partial_path, path)


@torch.inference_mode()
def measure_psnr(vae: nn.Module, frames: NDArray[np.uint8]) -> float:
    """Mean PSNR of the reconstructions of `frames` [frame, row, column, rgb], in decibels."""
    errors = []
    for first in range(0, len(frames), 32):
        pixels = to_pixels(frames[first : first + 32])
        with torch.autocast("cpu", torch.bfloat16):
            decoded = vae.decode(vae.encode(pixels).latent).sample
        error = (decoded.float().clamp(-1, 1) - pixels).div(2).square()
        errors.append(error.mean(dim=(1, 2, 3)))
    return float(-10 * torch.cat(errors).log10().mean())


@torch.inference_mode()
def measure_latents(vae: nn.Module, frames: NDArray[np.uint8]) -> dict[str, list[float]]:
    """Mean and standard deviation of each latent channel over `frames`."""
    latents = []
    for first in range(0, len(frames), 64):
        with torch.autocast("cpu", torch.bfloat16):
            latents.append(vae.encode(to_pixels(frames[first : first + 64])).latent.float())
    values = torch.cat(latents).transpose(0, 1).flatten(1)
    return {"mean": values.mean(1).tolist(), "std": values.std(1).tolist()}


def reconstruct(vae: nn.Module, pixels: Tensor) -> Tensor:
    """Encode and decode `pixels` [batch, rgb, row, column], with noise on the latents."""
    latents = vae.encode(pixels).latent
    spread = latents.detach().float().std(dim=(0, 2, 3), keepdim=True)
    return vae.decode(latents + LATENT_NOISE * spread * torch.randn_like(latents)).sample


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, step: int) -> None:
    """Move `average` towards `model`, quickly at first."""
    share = 1 - min(EMA, (step + 1) / (step + 10))
    for old, new in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        if old.is_floating_point():
            old.lerp_(new, share)
        else:
            old.copy_(new)


def save_atomically(state: dict, path: Path) -> None:
    """Write a checkpoint so that an interruption leaves the old one whole."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def train(data: Path, minutes: float, decoder_only: bool) -> AutoencoderDC:
    """Train for `minutes` of wall time, past runs included; return the averaged autoencoder."""
    torch.manual_seed(0)
    frames = np.load(data / "frames.npy", mmap_mode="r")
    held_out = render_batch(0)[::6].copy()
    if decoder_only:
        vae, average = (load_vae(data)[0] for _ in range(2))
        vae.train().encoder.requires_grad_(False)
    else:
        vae, average = (build_vae().to(memory_format=torch.channels_last) for _ in range(2))
        average.load_state_dict(vae.state_dict())
    average.eval()
    weights = [weight for weight in vae.parameters() if weight.requires_grad]
    peak = LEARNING_RATE / 2 if decoder_only else LEARNING_RATE
    optimizer = torch.optim.AdamW(weights, peak, (0.9, 0.97), weight_decay=1e-3)
    parts = {"vae": vae, "average": average, "optimizer": optimizer}
    step, spent = 0, 0.0
    checkpoint = data / ("decoder.pt" if decoder_only else "autoencoder.pt")
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        step, spent = state["step"], state["spent"]

    def save() -> None:
        state = {name: part.state_dict() for name, part in parts.items()}
        save_atomically({**state, "step": step, "spent": spent}, checkpoint)

    rng = np.random.default_rng(step)
    saved = time.monotonic()
    start = saved - spent
    while (spent := time.monotonic() - start) < 60 * minutes:
        warm_up = min(1.0, (step + 1) / 100)
        cosine = 0.5 * (1 + np.cos(np.pi * spent / (60 * minutes)))
        for group in optimizer.param_groups:
            group["lr"] = peak * warm_up * max(cosine, 0.02)
        pixels = to_pixels(frames[np.sort(rng.choice(len(frames), BATCH, replace=False))])
        with torch.autocast("cpu", torch.bfloat16):
            decoded = reconstruct(vae, pixels)
        error = decoded.float() - pixels
        loss = error.abs().mean() + 4 * error.square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_average(average, vae, step)
        step += 1
        if step % LOG_EVERY == 0:
            psnr = measure_psnr(average, held_out)
            line = f"step {step}  {spent / 60:.1f} min  loss {loss.item():.4f}  {psnr:.2f} dB"
            print(line, flush=True)
        if time.monotonic() - saved > SAVE_EVERY:
            saved = time.monotonic()
            save()
    save()
    print(f"step {step}  held out: {measure_psnr(average, held_out):.2f} dB", flush=True)
    return average


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("pocket-data"))
    parser.add_argument("--minutes", type=float, default=18, help="wall time of the training")
    parser.add_argument("--batches", type=int, default=16, help=f"x {WALKS * SHOTS} frames")
    parser.add_argument("--workers", type=int, default=2, help="processes that render")
    parser.add_argument("--decoder-only", action="store_true", help="keep the encoder as it is")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    path = args.data / "frames.npy"
    if not path.exists():
        render_frames(path, args.batches, args.workers)
    vae = train(args.data, args.minutes, args.decoder_only)
    vae.save_pretrained(args.data / "vae")
    if not args.decoder_only:
        stats = measure_latents(vae, np.load(path, mmap_mode="r")[::6].copy())
        (args.data / "vae" / "latent_stats.json").write_text(json.dumps(stats, indent=1) + "\n")


if __name__ == "__main__":
    main()
