"""What every test shares: one thread, hypothesis profiles, skips, a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from streamgen.apps.doctor import find_chromium

ROOT = Path(__file__).parents[1]

# Small tensors: more threads only wait for one another, and sums keep their order.
torch.set_num_threads(1)

settings.register_profile("default", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine can't run, with the reason."""
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "torch sees no CUDA device"
    if find_chromium() is None:
        missing["ui"] = "no Chromium found (Debian: apt install chromium)"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_python("-c", "...")`: a fresh interpreter in the repository, its output as text."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        env.pop("STREAMGEN_DEBUG", None)
        return subprocess.run(
            [sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
        )

    return run
