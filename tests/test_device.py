"""Devices and types by name, and the report of what a machine has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from streamgen.device import _cpu_info, capabilities, fast_bfloat16, pick_device, pick_dtype
from streamgen.errors import InvalidRequest


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which torch sees two CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which torch sees no CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_auto_takes_the_cpu(no_cuda: None) -> None:
    """Without CUDA, auto is the CPU, in bfloat16 only if it has the instructions."""
    assert pick_device("auto") == torch.device("cpu")
    fast = fast_bfloat16(capabilities().cpu_flags)
    expected = torch.bfloat16 if fast else torch.float32
    assert pick_dtype("auto", pick_device()) is expected


@pytest.mark.parametrize(
    ("flags", "fast"),
    [((), False), (("avx2", "avx512f"), False), (("avx512_bf16",), True), (("amx_bf16",), True)],
)
def test_what_makes_bfloat16_fast(flags: tuple[str, ...], fast: bool) -> None:
    """AMX or AVX-512's bfloat16 products."""
    assert fast_bfloat16(flags) is fast


def test_auto_takes_cuda(cuda: None) -> None:
    """With CUDA, auto is CUDA in bfloat16."""
    assert pick_device("auto").type == "cuda"
    assert pick_dtype("auto", pick_device()) is torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", torch.device("cuda:0")])
def test_a_named_device_is_taken(cuda: None, device: str | torch.device) -> None:
    """A device that exists is taken as named."""
    assert pick_device(device) == torch.device(device)


@pytest.mark.parametrize("device", ["tpu", "", "mps", "meta", "cuda:x", 3.5])
def test_another_device_names_the_accepted_ones(no_cuda: None, device: str) -> None:
    """Anything else is refused in one line with what is accepted here."""
    with pytest.raises(InvalidRequest, match=r"accepted are auto, cpu$"):
        pick_device(device)


def test_cuda_without_cuda(no_cuda: None) -> None:
    """Asking for CUDA where torch sees none says so."""
    with pytest.raises(InvalidRequest, match="'cuda': torch .* sees 0 CUDA devices"):
        pick_device("cuda")


def test_a_device_too_many(cuda: None) -> None:
    """An index beyond the last device is refused, not left for torch to fail on later."""
    with pytest.raises(InvalidRequest, match="accepted are auto, cpu, cuda, cuda:0, cuda:1"):
        pick_device("cuda:2")


def test_told_dtype_wins() -> None:
    """A named type is taken on any device, by name or as torch's own."""
    assert pick_dtype("bfloat16", "cpu") is torch.bfloat16
    assert pick_dtype(torch.float16, "cpu") is torch.float16


@pytest.mark.parametrize("dtype", ["bf16", "int8", torch.int32, None])
def test_another_dtype_names_the_accepted_ones(dtype: str) -> None:
    """Anything else is refused with the accepted names."""
    with pytest.raises(InvalidRequest, match="accepted are auto, float32, bfloat16, float16"):
        pick_dtype(dtype, "cpu")


def test_capabilities_are_json() -> None:
    """The report of this machine is made of plain values and names its torch."""
    report = json.loads(json.dumps(capabilities().to_json()))
    assert report["torch"] == torch.__version__
    assert report["threads"] == torch.get_num_threads()
    assert report["cores"] >= 1


def test_cpu_flags(tmp_path: Path) -> None:
    """Only whole flag names of the first processor count."""
    path = tmp_path / "cpuinfo"
    path.write_text(
        "model name\t: Chip A\nflags\t\t: avx2 amx_bf16 xavx512f\n\nmodel name\t: Chip B\n"
    )
    assert _cpu_info(path) == ("Chip A", ("avx2", "amx_bf16"))


def test_no_cpuinfo(tmp_path: Path) -> None:
    """A system without such a file is no error."""
    assert _cpu_info(tmp_path / "none") == ("", ())
