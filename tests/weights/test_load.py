"""Reading weights files and filling modules: all or nothing, one line for each failure."""

from __future__ import annotations

import json
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from streamgen.errors import WeightsError
from streamgen.weights.load import (
    find_weights,
    load_into,
    read_entries,
    read_metadata,
    read_tensors,
)


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


def test_empty_entry_is_passed_over(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """A run that had not begun to average leaves an empty entry: the plain weights are taken."""
    torch.save({"generator": tensors, "generator_ema": {}}, tmp_path / "w.pt")
    assert _same(read_tensors(tmp_path / "w.pt", prefer_ema=True), tensors)


def test_named_entries(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """A caller may say under which names to look, and ask what names there are."""
    torch.save({"trainer": {"var_wo_ddp": tensors}, "epoch": 3}, tmp_path / "w.pt")
    assert _same(read_tensors(tmp_path / "w.pt", entries=("trainer", "var_wo_ddp")), tensors)
    assert read_entries(tmp_path / "w.pt") == ("trainer", "epoch")
    torch.save(tensors, tmp_path / "flat.pt")
    assert read_entries(tmp_path / "flat.pt") == ()


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
    reasons = r"truncated, damaged or no .* file|half-downloaded|is empty|is a text file"
    with pytest.raises(WeightsError, match=rf"w\..*({reasons})") as caught:
        read_tensors(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", [1, 500, 39_999])
def test_half_downloaded_safetensors(tmp_path: Path, missing: int) -> None:
    """A file cut in its tensors says how many bytes of how many are there."""
    path = tmp_path / "w.safetensors"
    save_file({"weight": torch.randn(100, 100)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:-missing])
    there, whole = f"{len(data) - missing:,}", f"{len(data):,}"
    with pytest.raises(WeightsError, match=f"half-downloaded: {there} of {whole} bytes"):
        read_tensors(path)


def test_half_downloaded_torch(tmp_path: Path) -> None:
    """A torch archive lists its parts at its end; cut, it says that the end is missing."""
    path = tmp_path / "w.pt"
    torch.save({"weight": torch.randn(100, 100)}, path)
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(WeightsError, match=r"half-downloaded: the end is missing \(20,000 bytes\)"):
        read_tensors(path)


@pytest.mark.parametrize("suffix", [".incomplete", ".part", ".crdownload", ".aria2"])
def test_download_in_progress(tmp_path: Path, suffix: str) -> None:
    """A file that is still arriving under another name is not just "no such file"."""
    (tmp_path / f"w.pt{suffix}").write_bytes(b"")
    with pytest.raises(WeightsError, match=f"half-downloaded; only w.pt{suffix} is there"):
        read_tensors(tmp_path / "w.pt")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5676070424\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty (0 bytes)"),
        (POINTER, "is a Git LFS pointer and not the file it stands for; run `git lfs pull`"),
        ("<!DOCTYPE html>\n<html>", "is a web page saved as weights"),
        ("\n<HTML><head>", "is a web page saved as weights"),
        ("Access to model is restricted.\nLog in", "begins 'Access to model is restricted.'"),
        ('{"error":"Repository not found"}', "is a text file and no weights; it begins '{"),
        ("GGUF\x03\x00\x00\x00", "is a GGUF file; accepted are"),
        ("\x00\x01\x02\x03" * 99, "truncated, damaged or no"),
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_files_that_are_no_weights(tmp_path: Path, suffix: str, content: str, reason: str) -> None:
    """What a broken download left behind is named for what it is, in one line."""
    (tmp_path / f"w{suffix}").write_text(content)
    with pytest.raises(WeightsError, match=re.escape(reason)) as caught:
        read_tensors(tmp_path / f"w{suffix}")
    assert "\n" not in str(caught.value)


def test_wrong_ending(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """A good file under the other format's name says how to rename it."""
    torch.save(tensors, tmp_path / "w.safetensors")
    save_file(tensors, tmp_path / "w.pt")
    with pytest.raises(WeightsError, match="a torch file under the wrong name; rename it to .pt"):
        read_tensors(tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match=r"rename it to \.safetensors"):
        read_tensors(tmp_path / "w.pt")


def save_shards(tensors: dict[str, Tensor], folder: Path, stem: str = "model") -> Path:
    """One shard for each tensor, and their index."""
    weight_map = {}
    for i, (name, value) in enumerate(tensors.items()):
        weight_map[name] = f"{stem}-{i + 1:05}-of-{len(tensors):05}.safetensors"
        save_file({name: value}, folder / weight_map[name])
    index = folder / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_shards(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """The index of a sharded model gives the tensors of all its shards."""
    assert _same(read_tensors(save_shards(tensors, tmp_path)), tensors)


def test_missing_shards_are_named(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """Every shard that is not there is named; one that is still arriving too."""
    index = save_shards(tensors, tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.rename(tmp_path / "gone")
    with pytest.raises(WeightsError, match=r"shards are missing \(1 of 2\): model-00002-of-00002"):
        read_tensors(index)
    (tmp_path / "gone").rename(tmp_path / (shard.name + ".incomplete"))
    with pytest.raises(WeightsError, match="model-00002.*half-downloaded"):
        read_tensors(index)


def test_shard_of_another_model(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """A shard that lacks what the index says is in it is named with the key."""
    index = save_shards(tensors, tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(WeightsError, match="model-00002-of-00002.*lacks .* 1 missing: bias"):
        read_tensors(index)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        (POINTER, "Git LFS pointer"),
        ("<html>", "web page"),
        ("{", "is no index of safetensors shards"),
        ("[]", "is no index of safetensors shards"),
        ("{}", "is no index of safetensors shards"),
        ('{"weight_map": {"a": 1}}', "is no index of safetensors shards"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "is no file beside the index"),
        ('{"weight_map": {"a": "/etc/a.safetensors"}}', "is no file beside the index"),
        ('{"weight_map": {}}', "names no tensors"),
    ],
)
def test_index_that_is_no_index(tmp_path: Path, text: str, reason: str) -> None:
    """A damaged index is one line; an index can't point out of its folder."""
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(WeightsError, match=reason) as caught:
        read_tensors(path)
    assert "\n" not in str(caught.value)


def test_find_weights(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """A folder's index comes before its single file; shards alone, or nothing, are errors."""
    with pytest.raises(WeightsError, match="holds no weights; looked for diffusion_pytorch_model"):
        find_weights(tmp_path)
    index = save_shards(tensors, tmp_path)
    assert find_weights(tmp_path) == index
    index.unlink()
    with pytest.raises(WeightsError, match="holds shards .model-00001.* not their index"):
        find_weights(tmp_path)
    save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors")
    assert find_weights(tmp_path).name == "diffusion_pytorch_model.safetensors"


def mapped_from(tensor: Tensor) -> str:
    """The file that a tensor's memory is a mapping of; "" for memory of its own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, last = line.split(maxsplit=5)
        first, end = (int(part, 16) for part in span.split("-"))
        if first <= tensor.data_ptr() < end:
            return last if last.startswith("/") else ""
    return ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_files_are_mapped(tmp_path: Path) -> None:
    """No tensor is copied off the disk: its memory is the file's own pages."""
    tensors = {"a": torch.randn(64, 64), "b": torch.randn(64, 64)}
    save_file(tensors, tmp_path / "w.safetensors")
    torch.save({"generator": tensors, "critic": tensors}, tmp_path / "w.pt")
    (tmp_path / "shards").mkdir()
    index = save_shards(tensors, tmp_path / "shards")
    assert mapped_from(tensors["a"]) == ""
    for path in (tmp_path / "w.safetensors", tmp_path / "w.pt", index):
        for tensor in read_tensors(path).values():
            assert Path(mapped_from(tensor)).is_relative_to(path.parent)
    module = nn.Linear(64, 64, bias=False, device="meta")
    load_into(module, {"weight": read_tensors(tmp_path / "w.pt")["a"]})
    assert mapped_from(module.weight) == str(tmp_path / "w.pt")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_not_weights(tmp_path: Path, suffix: str) -> None:
    """A text file with the right ending is refused in one line."""
    (tmp_path / f"w{suffix}").write_text("<html>not found</html>\n" * 40)
    with pytest.raises(WeightsError, match="web page"):
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
