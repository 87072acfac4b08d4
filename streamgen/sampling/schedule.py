"""Noise levels of few-step flow matching: step lists, shift and warp.

A flow-matching latent at level sigma is `(1 - sigma) * x0 + sigma * noise`; its timestep is
`1000 * sigma`. The table is the one that the public causal models were trained with (Self-Forcing,
`utils/scheduler.py`): `u = 1 - i/1000`, `sigma = s*u / (1 + (s - 1)*u)` for i = 0..999, so its
last level is small but not 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from streamgen.errors import InvalidRequest

TRAIN_STEPS = 1000


def shifted(u: float, shift: float) -> float:
    """Move a noise level in [0, 1] towards noise: `s*u / (1 + (s - 1)*u)`."""
    return shift * u / (1 + (shift - 1) * u)


@dataclass(frozen=True)
class FewStep:
    """A list of timesteps to denoise at, highest first.

    Args:
        steps: the list as the model's config writes it, in (0, 1000]. The trailing 0 of CausVid's
            list is dropped, as CausVid does.
        shift: the table's shift.
        warp: whether `steps` counts unshifted steps (True), or is shifted already (False).
        noise: standard deviation of the fresh noise between two steps. Above 1 it gives back the
            detail that a few steps lose (S_noise of EDM, arXiv 2206.00364, appendix D.2).

    Raises:
        InvalidRequest: an empty, rising or out-of-range list, or noise that is not positive.
    """

    steps: tuple[float, ...]
    shift: float = 5.0
    warp: bool = True
    noise: float = 1.0

    def __post_init__(self) -> None:
        steps = tuple(self.steps)
        steps = steps[:-1] if steps and steps[-1] == 0 else steps
        falling = all(a > b for a, b in zip(steps, steps[1:], strict=False))
        if not steps or not falling or steps[0] > TRAIN_STEPS or steps[-1] <= 0:
            raise InvalidRequest(f"steps {steps}: accepted are falling numbers in (0, 1000]")
        if self.noise <= 0:
            raise InvalidRequest(f"noise {self.noise}: accepted are positive numbers")
        object.__setattr__(self, "steps", steps)

    @cached_property
    def table(self) -> tuple[float, ...]:
        """All 1000 noise levels, falling."""
        return tuple(shifted(1 - i / TRAIN_STEPS, self.shift) for i in range(TRAIN_STEPS))

    @property
    def timesteps(self) -> tuple[float, ...]:
        """The timesteps that the model is called with."""
        if not self.warp:
            return tuple(float(t) for t in self.steps)
        return tuple(TRAIN_STEPS * shifted(t / TRAIN_STEPS, self.shift) for t in self.steps)

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """The noise level of each of `timesteps`."""
        return tuple(self.sigma(t) for t in self.timesteps)

    def sigma(self, t: float) -> float:
        """The noise level of the table's timestep nearest to `t`."""
        return min(self.table, key=lambda level: abs(TRAIN_STEPS * level - t))


PRESETS = {
    # The released checkpoint's own demo uses shift 8; its training config, and this, 5.
    "self-forcing": FewStep((1000, 750, 500, 250)),
    "longlive": FewStep((1000, 750, 500, 250)),
    "causvid": FewStep((1000, 757, 522, 0), shift=8.0, warp=False),
    "matrix-game-2": FewStep((1000, 666, 333)),
    "rolling-forcing": FewStep((1000, 800, 600, 400, 200)),
}
