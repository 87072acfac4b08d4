"""Where tensors live and in which type, and what this machine can do.

Nothing is decided at import: every answer is asked for, so that a test can ask for another one.
Apple's `mps` is not accepted: it has no float64, and rotary angles are computed in float64.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from streamgen.errors import InvalidRequest

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The compute types by the name a caller may use."""

_CPU_INFO = Path("/proc/cpuinfo")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """The device to run on. "auto" is the first CUDA device, or the CPU where there is none.

    Args:
        device: "auto", "cpu", "cuda", "cuda:<index>", or a torch device of these kinds.

    Raises:
        InvalidRequest: another kind of device, or a CUDA device that torch does not see.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        picked = None
    if picked is None or picked.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device {str(device)!r}: accepted are {_accepted_devices()}")
    count = torch.cuda.device_count() if picked.type == "cuda" else 1
    if picked.type == "cuda" and (picked.index or 0) >= count:
        raise InvalidRequest(
            f"device {str(device)!r}: torch {torch.__version__} sees {count} CUDA devices here; "
            f"accepted are {_accepted_devices()}"
        )
    return picked


def pick_dtype(
    dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu"
) -> torch.dtype:
    """The compute type. "auto" is bfloat16 where the hardware multiplies it, else float32.

    That is CUDA, and CPUs with AMX or AVX-512's bfloat16 products; without them bfloat16 is
    emulated and slower than float32.

    Args:
        dtype: "auto", "float32", "bfloat16", "float16", or one of these torch types.
        device: where the model will run; only "auto" looks at it.

    Raises:
        InvalidRequest: another type.
    """
    if dtype == "auto":
        fast = torch.device(device).type == "cuda" or fast_bfloat16(_cpu_info(_CPU_INFO)[1])
        return torch.bfloat16 if fast else torch.float32
    if isinstance(dtype, torch.dtype):
        if dtype in DTYPES.values():
            return dtype
    elif dtype in DTYPES:
        return DTYPES[dtype]
    raise InvalidRequest(f"dtype {str(dtype)!r}: accepted are auto, {', '.join(DTYPES)}")


def fast_bfloat16(cpu_flags: Collection[str]) -> bool:
    """Whether a CPU with these instruction sets multiplies bfloat16 in hardware."""
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(cpu_flags)


@dataclass(frozen=True)
class CudaDevice:
    """One CUDA device: its name, memory in GiB and compute capability (major, minor)."""

    name: str
    memory_gib: float
    capability: tuple[int, int]


@dataclass(frozen=True)
class Capabilities:
    """What torch can use on this machine.

    Args:
        torch: version of torch, with its build (such as "2.13.0+cpu").
        cpu: the processor's name, or its architecture where the system does not tell the name.
        cores: processors this process may run on.
        threads: threads torch uses inside one operation.
        cpu_flags: the instruction sets that matter here and that this processor has.
        cuda: the CUDA devices torch sees.
    """

    torch: str
    cpu: str
    cores: int
    threads: int
    cpu_flags: tuple[str, ...]
    cuda: tuple[CudaDevice, ...]

    @property
    def amx(self) -> bool:
        """The CPU multiplies bfloat16 tiles in hardware (AMX)."""
        return "amx_bf16" in self.cpu_flags

    @property
    def avx512_bf16(self) -> bool:
        """The CPU has bfloat16 dot products (AVX-512)."""
        return "avx512_bf16" in self.cpu_flags

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**asdict(self), "amx": self.amx, "avx512_bf16": self.avx512_bf16}


def capabilities() -> Capabilities:
    """Ask torch and the system what this machine has. Nothing is cached, nothing is changed."""
    name, flags = _cpu_info(_CPU_INFO)
    affinity = getattr(os, "sched_getaffinity", None)
    return Capabilities(
        torch=torch.__version__,
        cpu=name or platform.machine(),
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        cpu_flags=flags,
        cuda=tuple(_cuda_device(index) for index in range(torch.cuda.device_count())),
    )


def _accepted_devices() -> str:
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ", ".join(["auto", "cpu", *(["cuda", *cuda] if cuda else [])])


def _cuda_device(index: int) -> CudaDevice:
    properties = torch.cuda.get_device_properties(index)
    memory = round(properties.total_memory / 2**30, 1)
    return CudaDevice(properties.name, memory, (properties.major, properties.minor))


def _cpu_info(path: Path) -> tuple[str, tuple[str, ...]]:
    """Name and instruction sets of the first processor in Linux's cpuinfo; blanks elsewhere."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return "", ()
    # The first of each name is the first processor's.
    fields = {
        key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines[::-1])
    }
    present = set(fields.get("flags", "").split())
    return fields.get("model name", ""), tuple(flag for flag in _CPU_FLAGS if flag in present)
