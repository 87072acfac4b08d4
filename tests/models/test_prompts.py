"""The prompt cache on disk: hits, limits, damage, killed and concurrent writers."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamgen.models import prompts
from streamgen.models.prompts import CachedText, default_prompt_cache, pad_rows

ROWS, WIDTH = 8, 6


class Counting:
    """A row encoder whose rows follow from the text, and that counts its work."""

    def __init__(self, identity: str = "one", dtype: torch.dtype = torch.bfloat16) -> None:
        self.rows, self.dtype, self.identity = ROWS, dtype, identity
        self.device, self.stream = torch.device("cpu"), False
        self.encoded: list[str] = []
        self.unloaded = 0

    def clean(self, text: str) -> str:
        return " ".join(text.split())

    def encode(self, cleaned: str) -> tuple[Tensor, int]:
        self.encoded.append(cleaned)
        tokens = len(cleaned.split()) + 1
        draw = torch.Generator().manual_seed(sum(cleaned.encode()))
        rows_ND = torch.randn(min(tokens, ROWS), WIDTH, generator=draw)
        return rows_ND.to(self.dtype), tokens

    def unknown(self, text: str) -> list[str]:
        return ["?"]

    def to(self, device: torch.device, stream: bool = False) -> Counting:
        self.device, self.stream = torch.device(device), stream
        return self

    def unload(self) -> None:
        self.unloaded += 1


def direct(text: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What no cache would give."""
    return pad_rows(Counting(dtype=dtype).encode(Counting().clean(text))[0], ROWS)


def entries(folder: Path) -> list[Path]:
    """Entries, oldest first."""
    return sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def test_second_run_encodes_nothing(tmp_path: Path) -> None:
    """Bit-equal from another process's cache, in any company, the zeros exact; texts once."""
    texts = ["a red maze", "snow", "a  red maze"]
    first = Counting()
    out = CachedText(first, tmp_path / "p")(texts)
    assert first.encoded == ["a red maze", "snow"]
    assert torch.equal(out, torch.stack([direct(text) for text in texts]))
    assert out.shape == (3, ROWS, WIDTH) and out.dtype == torch.bfloat16
    assert out[1, 2:].abs().max() == 0
    second = Counting()
    assert torch.equal(CachedText(second, tmp_path / "p")(["snow", "a red maze"]), out[[1, 0]])
    assert second.encoded == []


def test_only_real_rows_are_stored(tmp_path: Path) -> None:
    """Zeros cost no bytes, and the text itself is not written down."""
    CachedText(Counting(), tmp_path)(["secret maze"])
    (entry,) = entries(tmp_path)
    assert load_file(entry)["rows"].shape == (3, WIDTH)
    assert b"secret" not in entry.read_bytes()
    assert [path for path in tmp_path.iterdir() if path != entry] == []


def test_key_follows_everything_the_rows_depend_on(tmp_path: Path) -> None:
    """Identity, type, length and text; cleaned texts that are equal share one."""
    shorter = Counting()
    shorter.rows = 4
    keys = {
        CachedText(Counting(), tmp_path).key("maze"),
        CachedText(Counting("two"), tmp_path).key("maze"),
        CachedText(Counting(dtype=torch.float32), tmp_path).key("maze"),
        CachedText(shorter, tmp_path).key("maze"),
        CachedText(Counting(), tmp_path).key("mazes"),
    }
    assert len(keys) == 5
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for _ in range(2):
            assert torch.equal(
                CachedText(Counting(dtype=dtype), tmp_path)(["maze"])[0], direct("maze", dtype)
            )


def test_cut_texts_warn_every_time(tmp_path: Path) -> None:
    """From the cache as well, where no tokenizer is read."""
    text = "a red brick maze in heavy snow at night"
    for encoded in ([text], []):
        encoder = Counting()
        with pytest.warns(UserWarning, match="has 10 tokens; 8 are read"):
            CachedText(encoder, tmp_path)([text])
        assert encoder.encoded == encoded


def flip(path: Path) -> None:
    """One bit of the last row, which the format does not guard."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_key(path: Path) -> None:
    """A whole entry under another's name."""
    folder = path.parent
    CachedText(Counting(), folder)(["another text"])
    (other,) = [entry for entry in entries(folder) if entry != path]
    os.replace(other, path)


def plain(path: Path) -> None:
    """A safetensors file that no cache wrote."""
    save_file({"rows": torch.zeros(3, WIDTH, dtype=torch.bfloat16)}, path)


def no_count(path: Path) -> None:
    """The note says another number of tokens."""
    with safe_open(path, framework="pt") as file:
        note = file.metadata()
    save_file(load_file(path), path, note | {"tokens": "2"})


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "empty": lambda path: path.write_bytes(b""),
    "html": lambda path: path.write_text("<html>"),
    "another entry": other_key,
    "foreign": plain,
    "other count": no_count,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_encoded_anew(damage: str, tmp_path: Path) -> None:
    """Never trusted, and whole again afterwards."""
    CachedText(Counting(), tmp_path)(["a red maze"])
    (entry,) = entries(tmp_path)
    DAMAGE[damage](entry)
    encoder = Counting()
    assert torch.equal(CachedText(encoder, tmp_path)(["a red maze"])[0], direct("a red maze"))
    assert encoder.encoded == ["a red maze"]
    again = Counting()
    assert torch.equal(CachedText(again, tmp_path)(["a red maze"])[0], direct("a red maze"))
    assert again.encoded == []


def test_folder_in_an_entrys_place(tmp_path: Path) -> None:
    """What can't be read or replaced is worked around."""
    text = CachedText(Counting(), tmp_path)
    (tmp_path / f"{text.key('maze')}.safetensors").mkdir()
    with pytest.warns(UserWarning, match="not kept"):
        assert torch.equal(text(["maze"])[0], direct("maze"))


def test_bounded_and_least_recently_used(tmp_path: Path) -> None:
    """Reading counts as use; foreign files are not counted and stay."""
    (tmp_path / "notes.txt").write_text("mine" * 10_000)
    CachedText(Counting(), tmp_path)(["one"])
    size = entries(tmp_path)[0].stat().st_size
    text = CachedText(Counting(), tmp_path, max_bytes=3 * size + 1)
    text(["two", "ten"])
    for age, name in enumerate(["ten", "two", "one"], start=1):
        path = tmp_path / f"{text.key(name)}.safetensors"
        os.utime(path, (time.time() - 100 * age,) * 2)
    text(["one"])  # used: no longer the oldest
    text(["six"])
    left = {path.stem for path in entries(tmp_path)}
    assert left == {text.key(name) for name in ("one", "ten", "six")}
    assert (tmp_path / "notes.txt").exists()


def test_entry_over_the_limit(tmp_path: Path) -> None:
    """Is not kept, and does not push out others."""
    text = CachedText(Counting(), tmp_path, max_bytes=10)
    assert torch.equal(text(["maze"])[0], direct("maze"))
    assert entries(tmp_path) == []


def test_made_at_first_write(tmp_path: Path) -> None:
    """Not before; private to the user."""
    text = CachedText(Counting(), tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    text(["maze"])
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0


def works_with_one_warning(text: CachedText, why: str) -> None:
    """Texts are encoded every time; one warning tells why nothing is kept."""
    with pytest.warns(UserWarning, match=f"prompts are not kept .*{why}"):
        assert torch.equal(text(["maze"])[0], direct("maze"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(text(["maze", "snow"])[0], direct("maze"))
    assert isinstance(text.encoder, Counting)
    assert text.encoder.encoded == ["maze", "maze", "snow"]


def test_no_folder_can_be_made(tmp_path: Path) -> None:
    """A file is where the folder should be."""
    (tmp_path / "file").write_text("")
    works_with_one_warning(CachedText(Counting(), tmp_path / "file" / "p"), "Not a directory")


def test_read_only_folder_still_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is read, though neither writing nor marking its use is allowed."""
    CachedText(Counting(), tmp_path)(["snow"])

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(prompts, "write_whole", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    encoder = Counting()
    text = CachedText(encoder, tmp_path)
    with pytest.warns(UserWarning, match="Permission denied"):
        out = text(["snow", "maze"])
    assert torch.equal(out[0], direct("snow")) and encoder.encoded == ["maze"]


def test_full_disk(tmp_path: Path) -> None:
    """The system refuses in the middle of a file: nothing of it is left."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        works_with_one_warning(CachedText(Counting(), tmp_path), "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def _killed(folder: Path) -> None:
    """Dies between writing and naming."""
    os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    CachedText(Counting(), folder)(["maze"])


def _writer(folder: Path, seed: int, limit: int) -> None:
    """Uses twelve texts in an order of its own; every answer must be right."""
    text = CachedText(Counting(), folder, max_bytes=limit)
    names = [f"text {i}" for i in range(12)]
    for _ in range(8):
        for i in torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist():
            assert torch.equal(text([names[i]])[0], direct(names[i]))
        seed += 100


def fork(target: Callable[..., None], *args: object) -> multiprocessing.process.BaseProcess:
    """A started child process with this one's modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking beside torch's threads: the child uses none
        child = multiprocessing.get_context("fork").Process(target=target, args=args)
        child.start()
    return child


def test_killed_between_write_and_rename(tmp_path: Path) -> None:
    """No entry appears; the remains are left alone while young, and removed when stale."""
    child = fork(_killed, tmp_path)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    (part,) = tmp_path.iterdir()
    assert part.name.endswith(".part") and entries(tmp_path) == []
    encoder = Counting()
    text = CachedText(encoder, tmp_path)
    assert torch.equal(text(["maze"])[0], direct("maze")) and encoder.encoded == ["maze"]
    assert part.exists()
    os.utime(part, (time.time() - 7200,) * 2)
    text(["snow"])
    assert not part.exists() and len(entries(tmp_path)) == 2


def test_concurrent_writers(tmp_path: Path) -> None:
    """Processes that write, use and evict at once: right answers, bounded, no remains."""
    CachedText(Counting(), tmp_path)(["text 0"])
    limit = 5 * entries(tmp_path)[0].stat().st_size
    children = [fork(_writer, tmp_path, seed, limit) for seed in range(3)]
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0]
    CachedText(Counting(), tmp_path, max_bytes=limit)(["text last"])
    left = list(tmp_path.iterdir())
    assert all(path.suffix == ".safetensors" for path in left)
    assert sum(path.stat().st_size for path in left) <= limit + 64


def test_passes_on(tmp_path: Path) -> None:
    """What is no text goes to the encoder; rows come on its device."""
    encoder = Counting()
    text = CachedText(encoder, tmp_path)
    assert text.to(torch.device("meta"), stream=True) is text
    assert (encoder.device.type, encoder.stream) == ("meta", True)
    assert text(["maze"]).device.type == "meta"
    assert (text.rows, text.dtype, text.identity) == (ROWS, torch.bfloat16, "one")
    assert (text.unknown("x"), text.clean(" a  b ")) == (["?"], "a b")
    text.unload()
    assert encoder.unloaded == 1


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG's variable, where it is absolute; else under the home; without a home, none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    assert default_prompt_cache() == Path("/x/cache/streamgen/prompts")
    for value in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_prompt_cache() == tmp_path / ".cache/streamgen/prompts"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_prompt_cache() == tmp_path / ".cache/streamgen/prompts"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert default_prompt_cache() is None
