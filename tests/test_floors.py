"""Imports go down the floors, never up: a module can be read without what is above it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS: tuple[set[str], ...] = (
    {"errors", "frames", "device", "placement", "wire", "kernels", "weights"},
    {"cache"},
    {"models", "sampling"},
    {"session", "session_file", "engine", "folder"},
    {"pipelines"},
    {"apps"},
)
RANK = {name: rank for rank, floor in enumerate(FLOORS) for name in floor}
# Parts that stand alone but for these.
ALONE = {
    "kernels": {"kernels"},
    "weights": {"weights", "errors"},
    "errors": set(),
    "frames": {"errors"},
}

MODULES = sorted(
    path.relative_to(ROOT)
    for folder in ("streamgen", "kernels", "pipelines", "apps", "weights")
    for path in (ROOT / folder).rglob("*.py")
)


def part(path: Path) -> str:
    """The part of the house that a file belongs to: streamgen/cache/pool.py -> cache."""
    piece = path.parts[1] if path.parts[0] == "streamgen" else path.parts[0]
    return piece.removesuffix(".py")


def imports(path: Path) -> set[str]:
    """What of ours a file imports, anywhere in it: {"cache.pool", "errors", ...}."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("streamgen.") for name in names if name.startswith("streamgen.")}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_go_down(path: Path) -> None:
    """A module imports its own floor and those below, through modules and not the front door."""
    if path == Path("streamgen/__init__.py"):
        return  # the front door may name anything
    mine, used = part(path), {name.partition(".")[0] for name in imports(path)} - {"__version__"}
    assert mine in RANK, f"{path}: give {mine} a floor"
    unknown = sorted(used - set(RANK))
    assert not unknown, f"{path}: {unknown} come through the front door; import from their modules"
    above = sorted(name for name in used if RANK[name] > RANK[mine])
    assert not above, f"{mine} is below {above}"
    assert used <= ALONE.get(mine, used), f"{mine} may import only {sorted(ALONE[mine])} of ours"


@pytest.mark.parametrize("path", [p for p in MODULES if p.parts[0] == "pipelines"], ids=str)
def test_pipelines_do_not_meet(path: Path) -> None:
    """One pipeline never imports another."""
    others = {name.split(".")[1] for name in imports(path) if name.startswith("pipelines.")}
    assert others <= {path.stem}
