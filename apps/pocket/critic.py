"""An adversary for the pocket world: it scores how real a chunk looks after the frames before it.

A squared error alone teaches the mean of what may come, which is a blur, and a blurred context
teaches the next chunk to be worse. The critic sees what came before, the chunk, and the keys; real
and dreamt chunks come in pairs with the same past, so only their difference counts (the paired
relativistic loss of R3GAN, arXiv 2501.05441, with the noise-difference form of its gradient penalty
from APT, arXiv 2501.08316, section 3.3).

Axes: N chunks, F frames of a chunk, C latent channels, Y and X latent rows and columns, K keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(F.silu(x))))


class Critic(nn.Module):
    """Scores of every 2 x 2 patch of latents: higher looks more real."""

    def __init__(self, channels: int, frames: int, keys: int, width: int = 80) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2 * frames * channels, width, 3, padding=1)
        self.keys = nn.Linear(frames * keys, width)
        self.fine = _Residual(width)
        self.shrink = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.coarse = nn.Sequential(_Residual(2 * width), nn.SiLU(), nn.Conv2d(2 * width, 1, 1))

    def forward(self, before_NFCYX: Tensor, chunk_NFCYX: Tensor, keys_NFK: Tensor) -> Tensor:
        """Scores `[N, 1, Y / 2, X / 2]` of chunks that follow `before` under `keys`."""
        x = self.enter(torch.cat([before_NFCYX, chunk_NFCYX], dim=1).flatten(1, 2))
        x = x + self.keys(keys_NFK.flatten(1))[:, :, None, None]
        return self.coarse(self.shrink(self.fine(x)))


def critic_loss(critic: Critic, before: Tensor, real: Tensor, fake: Tensor, keys: Tensor) -> Tensor:
    """What the critic minimises: real chunks above dreamt ones, and nothing steep."""
    nearby = [x + 0.1 * torch.randn_like(x) for x in (real, fake)]
    scores = critic(before.repeat(4, 1, 1, 1, 1), torch.cat([real, fake, *nearby]), keys.repeat(4, 1, 1))
    on_real, on_fake, near_real, near_fake = scores.float().chunk(4)
    steep = (on_real - near_real).square().mean() + (on_fake - near_fake).square().mean()
    return F.softplus(on_fake - on_real).mean() + 10.0 * steep


def realness_gradient(
    critic: Critic, before: Tensor, real: Tensor, fake: Tensor, keys: Tensor
) -> Tensor:
    """The gradient by `fake` of the loss that a dreamt chunk is seen through; shaped as `fake`."""
    fake = fake.detach().requires_grad_()
    with torch.no_grad():
        on_real = critic(before, real, keys).float()
    loss = F.softplus(on_real - critic(before, fake, keys).float()).mean()
    return torch.autograd.grad(loss, fake)[0]
