"""The few-step loop, with a lambda in place of a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamgen.sampling.denoise import add_noise, few_step, to_x0
from streamgen.sampling.schedule import FewStep

SHAPE = (1, 2, 3, 4, 4)


def random(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def test_perfect_flow_model() -> None:
    """A model that knows x0 predicts (x - x0) / sigma, and the loop gives x0 back."""
    x0, schedule = random(0), FewStep((1000, 750, 500, 250))
    draws = iter(range(1, 10))
    result = few_step(
        lambda x, t: (x - x0) / schedule.sigma(t),
        random(9),
        schedule,
        lambda x: random(next(draws)),
    )
    torch.testing.assert_close(result, x0, atol=1e-6, rtol=0)


def test_calls_in_order() -> None:
    """The model is called once for each timestep; noise is drawn between two and nowhere else."""
    log: list[float | str] = []

    def predict(x: Tensor, t: float) -> Tensor:
        log.append(t)
        return torch.zeros_like(x)

    def draw(x: Tensor) -> Tensor:
        log.append("draw")
        return torch.zeros_like(x)

    few_step(predict, random(0), FewStep((1000, 500, 200), shift=1.0), draw)
    assert log == [1000, "draw", 500, "draw", 200]


def test_by_hand() -> None:
    """Two steps of flow prediction, written out with the formulas of the docstrings."""
    schedule, noise, fresh = FewStep((1000, 500), shift=3.0), random(0), random(1)
    assert schedule.timesteps == (1000, 750)
    first = noise - 1.0 * (0.5 * noise)
    second = 0.25 * first + 0.75 * fresh
    expected = second - 0.75 * (0.5 * second)
    result = few_step(lambda x, t: 0.5 * x, noise, schedule, lambda x: fresh)
    torch.testing.assert_close(result, expected)


def test_one_step_draws_nothing() -> None:
    """One timestep: the prediction at pure noise is the result."""

    def never(x: Tensor) -> Tensor:
        raise AssertionError("no noise is needed")

    result = few_step(lambda x, t: 2 * x, random(0), FewStep((1000,)), never, "sample")
    assert torch.equal(result, 2 * random(0))


def test_sample_prediction_is_x0() -> None:
    """A model that predicts x0 is taken at its word, in the latent's dtype."""
    x0 = to_x0(random(0), random(1).bfloat16(), 0.7, "sample")
    assert x0.dtype == torch.float32 and torch.equal(x0, random(1).bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_x0_in_float64(dtype: torch.dtype) -> None:
    """The product and difference are rounded once, at the end."""
    x, flow, sigma = random(0).to(dtype), random(1).to(dtype), 0.937
    exact = (x.double() - sigma * flow.double()).to(dtype)
    assert torch.equal(to_x0(x, flow, sigma, "flow"), exact)
    assert not torch.equal(x - sigma * flow, exact)  # so the test can tell


def test_noise_levels_meet_in_the_line() -> None:
    """Level 0 is the latent, level 1 the noise, and 0.25 a quarter of the way."""
    x0, noise = random(0), random(1)
    assert torch.equal(add_noise(x0, noise, 0.0), x0)
    assert torch.equal(add_noise(x0, noise, 1.0), noise)
    torch.testing.assert_close(add_noise(x0, noise, 0.25), torch.lerp(x0, noise, 0.25))


def test_noise_between_steps() -> None:
    """`noise` scales what is drawn between two steps and nothing else."""
    noise, fresh = random(0), random(1)

    def run(scale: float) -> list[Tensor]:
        seen = []

        def predict(x: Tensor, t: float) -> Tensor:
            seen.append(x)
            return torch.zeros_like(x)

        schedule = FewStep((1000, 500), shift=1.0, noise=scale)
        few_step(predict, noise, schedule, lambda x: fresh, "sample")
        return seen

    for scale in (1.0, 1.3):
        first, second = run(scale)
        torch.testing.assert_close(first, noise)
        torch.testing.assert_close(second, 0.5 * scale * fresh)
