"""The few-step loop over one chunk (CausVid, Self-Forcing: `pipeline/causal_inference.py`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from streamgen.sampling.schedule import FewStep


def to_x0(x: Tensor, prediction: Tensor, sigma: float, kind: str) -> Tensor:
    """The clean latent that a prediction implies, computed in float64.

    Args:
        x: noisy latent at level `sigma`.
        prediction: the model's output, `flow` (noise - x0) or `sample` (x0) as `kind` says.
        sigma: noise level of `x`, 0..1.
        kind: `WanConfig.prediction`.
    """
    if kind == "sample":
        return prediction.to(x.dtype)
    return (x.double() - sigma * prediction.double()).to(x.dtype)


def add_noise(x0: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """`(1 - sigma) * x0 + sigma * noise`."""
    return (1 - sigma) * x0 + sigma * noise


def few_step(
    predict: Callable[[Tensor, float], Tensor],
    noise: Tensor,
    schedule: FewStep,
    draw: Callable[[Tensor], Tensor],
    kind: str = "flow",
) -> Tensor:
    """Denoise one chunk: predict x0, add fresh noise of the next level, and again.

    Args:
        predict: `(latent, timestep) -> prediction`, both shaped as `noise`.
        noise: pure noise, such as `[B, F, C, Y, X]`.
        schedule: the timesteps.
        draw: fresh Gaussian noise in the shape of its argument; called once between two steps.
        kind: what `predict` returns, see `to_x0`.
    """
    x, levels = noise, schedule.levels
    steps = zip(schedule.timesteps, levels, (*levels[1:], None), strict=True)
    for t, level, following in steps:
        x0 = to_x0(x, predict(x, t), level, kind)
        if following is None:
            break
        x = add_noise(x0, schedule.noise * draw(x0), following)
    return x0
