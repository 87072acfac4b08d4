"""Importing streamgen and asking for help are light: heavy libraries load where they are used."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

HEAVY = ["accelerate", "av", "cv2", "diffusers", "fastapi", "gradio", "transformers"]


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import streamgen", [*HEAVY, "torch"]),
        ("import streamgen.weights.registry", [*HEAVY, "torch"]),
        ("import streamgen.weights.load, streamgen.device", HEAVY),
        ("from streamgen.apps.cli import run; run(['--help'])", [*HEAVY, "torch"]),
        ("from streamgen.apps.cli import run; run(['--version'])", [*HEAVY, "torch"]),
    ],
)
def test_light(run_python: Run, code: str, heavy: list[str]) -> None:
    """None of the heavy libraries is loaded by an import or a question that needs none."""
    check = f"import sys; print('loaded:', sorted(set({heavy!r}) & set(sys.modules)))"
    done = run_python("-c", f"{code}\n{check}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_unknown_name() -> None:
    """A name the package does not have is an AttributeError, as for any module."""
    import streamgen

    with pytest.raises(AttributeError, match="no attribute 'Wurld'"):
        streamgen.Wurld  # noqa: B018
