"""The wheel must carry every package in the tree: setuptools drops an unlisted one in silence."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1].resolve()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FOLDERS = {"streamgen": "streamgen", **SETUPTOOLS["package-dir"]}

# Import name -> distribution name, where they differ.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "huggingface_hub": "huggingface-hub",
    "prometheus_client": "prometheus-client",
}


def test_every_package_is_listed() -> None:
    """Each folder with Python files is a package that pyproject names, and no other is named."""
    found = set()
    for name, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            found.add(".".join([name, *path.parent.relative_to(ROOT / folder).parts]))
    assert found == set(SETUPTOOLS["packages"])


def test_links_match_the_mapping() -> None:
    """Each mapped folder has its link in streamgen/, which editors and type checkers follow."""
    for name, folder in SETUPTOOLS["package-dir"].items():
        assert (ROOT / name.replace(".", "/")).resolve() == ROOT / folder


def test_kernels_has_no_init() -> None:
    """`kernels` is also Hugging Face's library: a file here would shadow it or run in its place."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_import_is_declared() -> None:
    """A library that the code imports is a dependency or in an extra, never only there by luck."""
    project = PYPROJECT["project"]
    lines = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    declared = {re.split(r"[^\w-]", line, maxsplit=1)[0] for line in lines}
    undeclared = {
        (DISTRIBUTIONS.get(name, name), str(path.relative_to(ROOT)))
        for folder in FOLDERS.values()
        for path in (ROOT / folder).rglob("*.py")
        for name in _imports(path) - set(sys.stdlib_module_names) - {"streamgen"}
        if DISTRIBUTIONS.get(name, name) not in declared
    }
    assert not undeclared


def test_constraints_pin_what_is_declared() -> None:
    """constraints.txt pins every direct dependency exactly, and never one build of torch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    wanted = {
        re.split(r"[^\w-]", line, maxsplit=1)[0] for line in PYPROJECT["project"]["dependencies"]
    }
    assert wanted <= set(pins)
    assert not any("+" in version for version in pins.values())


def _imports(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names
