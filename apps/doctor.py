"""`streamgen doctor`: what this machine has, and what to do about what it lacks, in one screen.

Nothing is imported before it is looked at, so that a broken library is a line of the report and not
the end of it. Large optional libraries are looked up but not imported.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from typing import Any

from streamgen import __version__
from streamgen.errors import StreamgenError
from streamgen.weights import registry

MARKS = {"ok": "ok", "absent": "-", "broken": "BROKEN"}
"""How each state is shown. Only "broken" makes the command fail."""

COMMANDS = {"world": "streamgen play", "video": "streamgen generate", "image": "streamgen image"}
"""Kind of a model -> the command that uses it."""

# Required libraries and what stands still without them. The first group is imported, not only
# looked up: these are the ones whose system libraries or builds go wrong.
_IMPORTED = {
    "torch": "everything",
    "av": "writing and reading video",
    "opencv-python-headless": "JPEG frames",
}
_MODULES = {"opencv-python-headless": "cv2"}
_LOOKED_UP = {
    "accelerate": "devices",
    "diffusers": "autoencoders",
    "fastapi": "the server",
    "gradio": "the page of the demo",
    "numpy": "everything",
    "packaging": "this report",
    "pydantic": "messages",
    "safetensors": "weights",
    "tqdm": "progress bars",
    "typer": "this command line",
    "uvicorn": "the server",
    "websockets": "live frames",
}
_EXTRAS = {
    "xformers": "xformers",
    "triton": "triton",
    "prometheus-client": "metrics",
    "transformers": "hub",
    "ftfy": "hub",
    "torchao": "fp8",
}
_ENCODERS = ("libx264", "h264_nvenc")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Args:
        group: what the line is about ("machine", "library", "video", "extra", "model", "browser").
        name: what was looked at.
        state: "ok", "absent" (fine without) or "broken" (required, and not usable).
        detail: what was found.
        cure: what to do about it; empty where there is nothing to do.
    """

    group: str
    name: str
    state: str
    detail: str
    cure: str = ""


def doctor(as_json: bool = False, write: Callable[[str], object] = print) -> int:
    """Look at everything, write the report, and return the exit code: 1 if something is broken."""
    checks = examine()
    broken = any(check.state == "broken" for check in checks)
    if as_json:
        write(json.dumps(_report(checks, not broken), indent=2))
    else:
        write(render(checks))
    return int(broken)


def examine() -> list[Check]:
    """Every check, in the order of the report."""
    return [*_machine(), *_libraries(), *_video(), *_models(), *_extras(), *_browser()]


def render(checks: list[Check]) -> str:
    """The report as a table, then one line for each thing there is to do.

    Libraries that are as they should be share one row, so that the report fits a screen.
    """
    good = [c for c in checks if c.group == "library" and c.state == "ok"]
    lines = [f"streamgen {__version__}, Python {platform.python_version()}, {platform.platform()}"]
    for check in checks:
        if check not in good:
            lines.append(_row(check.state, check.name, check.detail))
        elif check == good[0]:
            lines.append(_row("ok", "libraries", ", ".join(f"{c.name} {c.detail}" for c in good)))
    cures = [f"  {c.name}: {c.cure}" for c in checks if c.cure]
    return "\n".join([*lines, *(["what to do:", *cures] if cures else ["nothing to do."])])


def find_chromium() -> str | None:
    """Path of a Chromium-like browser on this machine, or None. The ui test drives it."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def opens_encoder(name: str) -> str:
    """Open a small H.264 encoder of this name with PyAV: "" if it opens, else the reason."""
    import av

    try:
        context: Any = av.CodecContext.create(name, "w")
        context.width, context.height, context.pix_fmt = 256, 256, "yuv420p"
        context.framerate = 20
        context.open()
    except (
        Exception
    ) as error:  # PyAV has a class per FFmpeg error, and ValueError for no such codec
        return _line(error)
    return ""


def _machine() -> Iterator[Check]:
    python_ok = sys.version_info >= (3, 11)
    cure = "" if python_ok else "install Python 3.11 or newer"
    version = platform.python_version()
    yield Check("machine", "python", "ok" if python_ok else "broken", version, cure)
    try:
        from streamgen.device import capabilities, pick_device

        has = capabilities()
        device = pick_device("auto")
    except Exception as error:  # torch is missing or does not start; its own line says what to do
        yield Check("machine", "device", "broken", _line(error), "see torch")
        return
    yield Check("machine", "device", "ok", f"{device} is what 'auto' takes")
    yield Check(
        "machine", "cpu", "ok", f"{has.cpu}, {has.cores} cores, {has.threads} torch threads"
    )
    fast = [name for name, there in (("AMX", has.amx), ("AVX-512", has.avx512_bf16)) if there]
    detail = f"{' and '.join(fast)} in hardware" if fast else "no hardware for it; float32 is used"
    yield Check("machine", "bfloat16 on cpu", "ok" if fast else "absent", detail)
    for index, gpu in enumerate(has.cuda):
        major, minor = gpu.capability
        detail = f"{gpu.name}, {gpu.memory_gib} GiB, compute capability {major}.{minor}"
        yield Check("machine", f"cuda:{index}", "ok", detail)
    if not has.cuda:
        yield _no_cuda(has.torch)


def _row(state: str, name: str, detail: str) -> str:
    indent = "\n" + " " * 29
    return f"  {MARKS[state]:<7} {name:<18} " + indent.join(textwrap.wrap(detail, 72))


def _no_cuda(torch_version: str) -> Check:
    if shutil.which("nvidia-smi"):
        return Check(
            "machine",
            "cuda",
            "absent",
            f"torch {torch_version} sees no device",
            "an NVIDIA driver is installed: if this torch is a CPU build, install a CUDA build",
        )
    return Check("machine", "cuda", "absent", "no device; the pocket models need none")


def _libraries() -> Iterator[Check]:
    ranges = _declared_ranges()
    for name, use in {**_IMPORTED, **_LOOKED_UP}.items():
        wanted = ranges.get(name, name)
        cure = f"pip install '{wanted}' ({use} needs it)"
        try:
            version = metadata.version(name)
            if name in _IMPORTED:
                import_module(_MODULES.get(name, name))
        except metadata.PackageNotFoundError:
            yield Check("library", name, "broken", "not installed", cure)
        except Exception as error:  # whatever a library's start raises is what the report is for
            yield Check(
                "library", name, "broken", f"{version} does not start: {_line(error)}", cure
            )
        else:
            good = _in_range(wanted, version)
            detail = version if good else f"{version} is not {wanted}"
            yield Check("library", name, *(("ok", detail) if good else ("broken", detail, cure)))


def _video() -> Iterator[Check]:
    opened = []
    for name in _ENCODERS:
        try:
            problem = opens_encoder(name)
        except Exception as error:  # PyAV does not import; its own line says what to do
            problem = _line(error)
        if not problem:
            opened.append(name)
    if opened:
        yield Check("video", "H.264 encoders", "ok", ", ".join(opened))
    else:
        cure = "pip install 'av>=17,<20' from a wheel (its FFmpeg holds libx264)"
        yield Check("video", "H.264 encoders", "broken", f"neither of {', '.join(_ENCODERS)}", cure)


def _models() -> Iterator[Check]:
    names = registry.packaged_names()
    if not names:
        cure = "install streamgen again: its wheel holds the pocket models"
        yield Check("model", "packaged models", "broken", "none", cure)
    for name in names:
        try:
            model = registry.verify(registry.resolve(name))
        except (StreamgenError, OSError) as error:
            yield Check("model", name, "broken", "damaged", _line(error))
        else:
            size = f"{model.num_bytes / 1e6:.1f} MB"
            use = COMMANDS.get(model.kind, "nothing here")
            detail = f"{model.kind}, {size}, {len(model.files)} checksums OK; for {use}"
            yield Check("model", name, "ok", detail)


def _extras() -> Iterator[Check]:
    for name, extra in _EXTRAS.items():
        try:
            yield Check("extra", name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            cure = f"optional: pip install 'streamgen[{extra}]'"
            yield Check("extra", name, "absent", f"not installed (extra [{extra}])", cure)


def _browser() -> Iterator[Check]:
    found = find_chromium()
    if found:
        yield Check("browser", "chromium", "ok", found)
    else:
        cure = "optional, only the ui test drives it: apt install chromium"
        yield Check("browser", "chromium", "absent", "not found", cure)


def _declared_ranges() -> dict[str, str]:
    """Distribution -> requirement, as the installed streamgen declares it; {} in a bare folder."""
    try:
        lines = metadata.requires("streamgen") or []
    except metadata.PackageNotFoundError:
        return {}
    plain = (line for line in lines if ";" not in line)
    return {_name(line): line.replace(" ", "") for line in plain}


def _name(requirement: str) -> str:
    """ "av<20,>=17" -> "av"."""
    end = next((i for i, c in enumerate(requirement) if c in "<>=!~ ([;"), len(requirement))
    return requirement[:end]


def _in_range(requirement: str, version: str) -> bool:
    """Whether a version satisfies a requirement; True where `packaging` is not there to tell."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def _line(error: BaseException) -> str:
    """The first line of an error, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _report(checks: list[Check], good: bool) -> dict[str, Any]:
    return {
        "streamgen": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "ok": good,
        "checks": [asdict(check) for check in checks],
    }
