"""Reading weights files and filling modules: all or nothing, one line for each failure."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from streamgen.errors import WeightsError
from streamgen.weights.load import load_into, read_metadata, read_tensors


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """The weights of a 3 -> 2 linear layer."""
    return {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.tensor([7.0, 8.0])}


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_safetensors(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file gives back its tensors, and its metadata without them."""
    save_file(tensors, tmp_path / "w.safetensors", metadata={"meta": "{}"})
    assert _same(read_tensors(tmp_path / "w.safetensors"), tensors)
    assert read_metadata(tmp_path / "w.safetensors") == {"meta": "{}"}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_file(tmp_path: Path, tensors: dict[str, Tensor], suffix: str, zipped: bool) -> None:
    """A torch file of tensors is read, in today's and in the old format."""
    path = tmp_path / f"w{suffix}"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    assert _same(read_tensors(path), tensors)


@pytest.mark.parametrize("key", ["generator", "generator_ema", "model", "state_dict"])
def test_nested_weights(tmp_path: Path, tensors: dict[str, Tensor], key: str) -> None:
    """Training files keep the weights under a key, beside other things."""
    torch.save({key: tensors, "critic": {"x": torch.zeros(1)}, "step": 5}, tmp_path / "w.pt")
    assert _same(read_tensors(tmp_path / "w.pt"), tensors)


def test_ema_when_asked(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """The averaged weights are taken only when asked for."""
    ema = {name: value + 1 for name, value in tensors.items()}
    torch.save({"generator": tensors, "generator_ema": ema}, tmp_path / "w.pt")
    assert _same(read_tensors(tmp_path / "w.pt"), tensors)
    assert _same(read_tensors(tmp_path / "w.pt", prefer_ema=True), ema)


class _Opens:
    """A pickle that would call `open` when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("plain", [True, False])
def test_code_does_not_run(tmp_path: Path, tensors: dict[str, Tensor], plain: bool) -> None:
    """A pickle that would run code is refused, and its code has not run."""
    payload = {**tensors, "x": _Opens(tmp_path / "ran")}
    if plain:
        (tmp_path / "w.pt").write_bytes(pickle.dumps(payload, protocol=2))
    else:
        torch.save(payload, tmp_path / "w.pt")
    with pytest.raises(WeightsError, match="w.pt: .*") as caught:
        read_tensors(tmp_path / "w.pt")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_objects_are_refused_by_name(tmp_path: Path) -> None:
    """A whole saved module is told to be saved as a state dict."""
    torch.save(nn.Linear(1, 1), tmp_path / "w.pt")
    with pytest.raises(WeightsError, match="which could run code; only plain tensors are read"):
        read_tensors(tmp_path / "w.pt")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("keep", [0, 1, 7, 8, 60, 0.5, 0.9, -1])
def test_truncated(tmp_path: Path, suffix: str, keep: float) -> None:
    """A file cut anywhere is one line that names the file and what to do."""
    path = tmp_path / f"w{suffix}"
    weights = {"weight": torch.randn(100, 100)}
    save_file(weights, path) if suffix == ".safetensors" else torch.save(weights, path)
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(WeightsError, match=r"w\..*truncated, damaged or no .* file") as caught:
        read_tensors(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_not_weights(tmp_path: Path, suffix: str) -> None:
    """A text file with the right ending is refused in one line."""
    (tmp_path / f"w{suffix}").write_text("<html>not found</html>\n" * 40)
    with pytest.raises(WeightsError, match="truncated, damaged"):
        read_tensors(tmp_path / f"w{suffix}")


def test_huge_header(tmp_path: Path) -> None:
    """A safetensors header that claims to be larger than any is refused, not allocated."""
    (tmp_path / "w.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(WeightsError, match="truncated, damaged"):
        read_tensors(tmp_path / "w.safetensors")


def test_missing_and_folder_and_format(tmp_path: Path) -> None:
    """No file, a folder, and a file of another kind each say what they are."""
    with pytest.raises(WeightsError, match="no such file"):
        read_tensors(tmp_path / "none.safetensors")
    with pytest.raises(WeightsError, match="is a folder"):
        read_tensors(tmp_path)
    (tmp_path / "w.ckpt").write_bytes(b"")
    with pytest.raises(WeightsError, match="accepted are .safetensors, .pt, .pth, .bin"):
        read_tensors(tmp_path / "w.ckpt")


@pytest.mark.parametrize("content", [{}, {"step": 1}, [1, 2], torch.zeros(2)])
def test_torch_file_without_weights(tmp_path: Path, content: object) -> None:
    """A torch file that holds no weights says what it holds."""
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(WeightsError, match="holds no name -> tensor mapping"):
        read_tensors(tmp_path / "w.pt")


def test_load_into_copies_and_converts(tensors: dict[str, Tensor]) -> None:
    """The module keeps its own tensors and type, and takes the values."""
    module = nn.Linear(3, 2)
    address = module.weight.data_ptr()
    load_into(module, {name: value.half() for name, value in tensors.items()})
    assert module.weight.dtype is torch.float32
    assert module.weight.data_ptr() == address
    assert torch.equal(module.weight, tensors["weight"])


def test_load_into_meta(tensors: dict[str, Tensor]) -> None:
    """A module on the meta device gets the tensors themselves, not a silent nothing."""
    module = nn.Linear(3, 2, device="meta")
    load_into(module, tensors)
    assert torch.equal(module.weight, tensors["weight"])


def test_ignored_prefix(tensors: dict[str, Tensor]) -> None:
    """Names with an ignored prefix are left out; others that the module lacks are errors."""
    extra = {**tensors, "_cls_pred_branch.0.weight": torch.zeros(1)}
    load_into(nn.Linear(3, 2), extra, ignore=["_cls_pred_branch."])
    with pytest.raises(WeightsError, match="1 unexpected: _cls_pred_branch.0.weight"):
        load_into(nn.Linear(3, 2), extra)


def test_misfit_names_keys_and_shapes_and_loads_nothing(tensors: dict[str, Tensor]) -> None:
    """Missing, unexpected and mis-shaped keys are named together, and nothing is half-loaded."""
    module = nn.Linear(3, 2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    wrong = {"weight": torch.zeros(2, 4), "wait": torch.zeros(1)}
    with pytest.raises(WeightsError) as caught:
        load_into(module, wrong)
    assert str(caught.value) == (
        "weights do not fit Linear: 1 missing: bias; 1 unexpected: wait; "
        "1 of another shape: weight (model [2, 3], file [2, 4])"
    )
    assert _same(dict(module.state_dict()), before)


def test_long_lists_are_cut() -> None:
    """A wholly different file does not fill the screen."""
    module = nn.Sequential(*[nn.Linear(1, 1) for _ in range(10)])
    with pytest.raises(WeightsError, match="20 missing: .* and 16 more"):
        load_into(module, {})


def test_integers_are_not_floats(tensors: dict[str, Tensor]) -> None:
    """Integer (quantised) weights are not taken for floats of the same shape."""
    with pytest.raises(WeightsError, match=r"weight \(model torch.float32, file torch.int8\)"):
        load_into(nn.Linear(3, 2), {**tensors, "weight": torch.zeros(2, 3, dtype=torch.int8)})
