"""Wan's text encoder: against a naive twin in the original names, its layouts, its bad files."""

from __future__ import annotations

import html
import importlib
import importlib.util
import json
import math
import shutil
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from streamgen.errors import MissingExtra, WeightsError
from streamgen.models.prompts import CachedText
from streamgen.models.umt5 import (
    MAX_TOKENS,
    Umt5Text,
    _fingerprint,
    clean_prompt,
    read_tokenizer,
    transformers_name,
)

pytest.importorskip("transformers")

DIM, HEADS, HEAD, FFN, LAYERS, VOCAB, BUCKETS = 16, 2, 12, 24, 2, 40, 32
WORDS = "a red brick maze in heavy snow at night over the lake with birds it's".split()


def original_tensors(seed: int = 0) -> dict[str, Tensor]:
    """A tiny encoder under the original names, weights of a size that every part matters."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    tensors = {"token_embedding.weight": normal(VOCAB, DIM)}
    for i in range(LAYERS):
        block = {
            "norm1.weight": 1 + 0.3 * normal(DIM),
            "attn.q.weight": 0.3 * normal(HEADS * HEAD, DIM),
            "attn.k.weight": 0.3 * normal(HEADS * HEAD, DIM),
            "attn.v.weight": 0.5 * normal(HEADS * HEAD, DIM),
            "attn.o.weight": 0.3 * normal(DIM, HEADS * HEAD),
            "norm2.weight": 1 + 0.3 * normal(DIM),
            "ffn.gate.0.weight": 0.3 * normal(FFN, DIM),
            "ffn.fc1.weight": 0.3 * normal(FFN, DIM),
            "ffn.fc2.weight": 0.3 * normal(DIM, FFN),
            "pos_embedding.embedding.weight": normal(BUCKETS, HEADS),
        }
        tensors |= {f"blocks.{i}.{name}": value for name, value in block.items()}
    return tensors | {"norm.weight": 1 + 0.3 * normal(DIM)}


def bucket(distance: int) -> int:
    """T5's bucket of key minus query: half for each sign, exact to 7, then logarithmic to 128."""
    half, exact = BUCKETS // 2, BUCKETS // 4
    away = abs(distance)
    if away >= exact:
        step = math.log(away / exact) / math.log(128 / exact) * (half - exact)
        away = min(exact + int(step), half - 1)
    return away + (half if distance > 0 else 0)


def naive(w: dict[str, Tensor], ids: list[int], padded: int) -> Tensor:
    """The published encoder, head by head, on ids padded with 0 and masked; all `padded` rows."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    x = w["token_embedding.weight"][ids + [0] * (padded - len(ids))]
    places = torch.tensor([[bucket(k - q) for k in range(padded)] for q in range(padded)])
    for i in range(LAYERS):
        b = {k.removeprefix(f"blocks.{i}."): v for k, v in w.items()}
        y, heads = norm(x, b["norm1.weight"]), []
        for h in range(HEADS):
            mine = slice(h * HEAD, (h + 1) * HEAD)
            q, k, v = (y @ b[f"attn.{n}.weight"][mine].T for n in "qkv")
            scores = q @ k.T + b["pos_embedding.embedding.weight"][places, h]
            scores[:, len(ids) :] = -math.inf
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ b["attn.o.weight"].T
        y = norm(x, b["norm2.weight"])
        g = y @ b["ffn.gate.0.weight"].T
        g = 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
        x = x + (g * (y @ b["ffn.fc1.weight"].T)) @ b["ffn.fc2.weight"].T
    return norm(x, w["norm.weight"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words split at spaces, 0 padding, 1 the end mark that is added, 2 the unknown."""
    tokenizers = importlib.import_module("tokenizers")
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def pth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny encoder as the release has it: one torch file, original names."""
    path = tmp_path_factory.mktemp("original") / "models_t5_umt5-tiny-enc.pth"
    torch.save(original_tensors(), path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same weights in transformers' layout, in two shards, the table under one name."""
    home = tmp_path / "text_encoder"
    home.mkdir()
    config = {"model_type": "umt5", "feed_forward_proj": "gated-gelu", "d_model": DIM}
    (home / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = {transformers_name(k): v for k, v in original_tensors().items()}
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, mine in shards.items():
        save_file({name: tensors[name] for name in mine}, home / file)
    where = {name: file for file, mine in shards.items() for name in mine}
    (home / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return home


@pytest.fixture
def no_ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    """ftfy is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "ftfy" else find(name, *a)
    )


def ids_of(text: str) -> list[int]:
    """What the test's tokenizer gives."""
    return [3 + WORDS.index(word) if word in WORDS else 2 for word in text.split()] + [1]


def test_original_equals_the_naive_twin(pth: Path, tokenizer: Path) -> None:
    """Key map, buckets, gate, norms: real rows of a padded and masked run; then exact zeros."""
    text = Umt5Text.from_original(pth, tokenizer, torch.float32)
    prompts = ["a red brick maze in heavy snow", "night", "", " ".join(WORDS * 11)]
    out = text(prompts)
    assert out.shape == (4, MAX_TOKENS, DIM) and out.dtype == torch.float32
    for rows, prompt in zip(out, prompts, strict=True):
        ids = ids_of(prompt)
        expected = naive(original_tensors(), ids, len(ids) + 5)[: len(ids)]
        assert (rows[: len(ids)] - expected).abs().max() < 2e-5
        assert rows[: len(ids)].abs().amax(-1).min() > 0
        assert torch.equal(rows[len(ids) :], torch.zeros(MAX_TOKENS - len(ids), DIM))


def test_neighbours_do_not_matter(pth: Path, tokenizer: Path) -> None:
    """Bit-equal alone and in company: rows are cached by their text only."""
    text = Umt5Text.from_original(pth, tokenizer)
    together = text(["a maze", "a red brick maze in heavy snow at night"])
    assert torch.equal(together[0], text(["a maze"])[0])
    assert together.dtype == torch.bfloat16


def test_folder_equals_original(folder: Path, pth: Path, tokenizer: Path) -> None:
    """Both layouts give the same bits."""
    a = Umt5Text.from_folder(folder, tokenizer, torch.float32)(["heavy snow"])
    b = Umt5Text.from_original(pth, tokenizer, torch.float32)(["heavy snow"])
    assert torch.equal(a, b)


@pytest.mark.parametrize("both", [False, True])
def test_folder_as_transformers_saves_it(both: bool, tmp_path: Path, tokenizer: Path) -> None:
    """transformers is the oracle: its own file, the table under either name or both."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.UMT5Config(
        vocab_size=VOCAB, d_model=DIM, d_kv=HEAD, d_ff=FFN, num_layers=LAYERS, num_heads=HEADS
    )
    model = transformers.UMT5EncoderModel(config).eval()
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    if not both:
        del tensors["shared.weight"]
    tensors |= {k: torch.zeros(2, 2) for k in ("lm_head.weight", "decoder.block.0.x.weight")}
    config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    ids = torch.tensor([ids_of("a red maze")])
    with torch.no_grad():
        expected = model(input_ids=ids).last_hidden_state[0]
    rows, tokens = Umt5Text.from_folder(tmp_path, tokenizer, torch.float32).encode("a red maze")
    assert tokens == 4
    assert (rows - expected).abs().max() < 1e-5


def test_float16_keeps_wide_weights(pth: Path, tokenizer: Path) -> None:
    """As transformers does; the result is float16, near the float32 one."""
    text = Umt5Text.from_original(pth, tokenizer, torch.float16)
    out = text(["a red maze"])
    encoder = text._loaded()[0]
    kinds = {k: v.dtype for k, v in encoder.state_dict().items()}
    assert {v for k, v in kinds.items() if ".wo." in k} == {torch.float32}
    assert {v for k, v in kinds.items() if ".wo." not in k} == {torch.float16}
    exact = Umt5Text.from_original(pth, tokenizer, torch.float32)(["a red maze"])
    assert out.dtype == torch.float16 and (out.float() - exact).norm() < 0.01 * exact.norm()


def test_too_long_is_cut_with_a_warning(pth: Path, tokenizer: Path) -> None:
    """The first tokens and the end mark are kept; the message has both counts."""
    text = Umt5Text.from_original(pth, tokenizer, torch.float32, max_tokens=8)
    with pytest.warns(UserWarning, match="has 12 tokens; 8 are read"):
        out = text(["a red brick maze in heavy snow at night over the"])
    assert torch.equal(out, text(["a red brick maze in heavy snow"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text(["a red brick maze in heavy snow"])  # 8 with its end mark


def test_nothing_is_read_before_the_first_text(pth: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Damaged files are found then, not before, and the same files are read again after unload."""
    copy = tmp_path / "t5.pth"
    copy.write_bytes(b"not weights")
    text = Umt5Text.from_original(copy, tokenizer, torch.float32)
    text.to("cpu", stream=True)
    assert not text.loaded and text.weight_bytes == 11
    with pytest.raises(WeightsError, match="t5.pth"):
        text(["a maze"])
    shutil.copy(pth, copy)
    first = text(["a maze"])
    assert text.loaded
    text.unload()
    assert not text.loaded and torch.equal(text(["a maze"]), first)


def test_streamed_is_bit_equal(pth: Path, tokenizer: Path) -> None:
    """Weights taken layer by layer give the same bits, before and after loading."""
    text = Umt5Text.from_original(pth, tokenizer).to("cpu", stream=True)
    streamed = text(["a red maze"])
    assert hasattr(text._loaded()[0].encoder.block[0].layer[0].SelfAttention.q, "_hf_hook")
    assert torch.equal(text.to("cpu")(["a red maze"]), streamed)
    assert not hasattr(text._loaded()[0].encoder.block[0].layer[0].SelfAttention.q, "_hf_hook")
    assert torch.equal(text.to("cpu", stream=True)(["a red maze"]), streamed)


def test_cached_needs_no_weights(pth: Path, tokenizer: Path, tmp_path: Path) -> None:
    """The rows come back bit-equal; the second run opens neither weights nor tokenizer."""
    texts = ["heavy  snow", "a red maze", ""]
    first = Umt5Text.from_original(pth, tokenizer)
    plain = first(texts)
    assert torch.equal(CachedText(first, tmp_path)(texts), plain)
    second = CachedText(Umt5Text.from_original(pth, tokenizer), tmp_path)
    assert torch.equal(second(texts), plain)
    assert isinstance(second.encoder, Umt5Text) and not second.encoder.loaded


def test_identity(pth: Path, folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Follows the contents of weights and tokenizer and the length, not places or dates."""
    text = Umt5Text.from_original(pth, tokenizer)
    assert not text.loaded and text.identity == text.identity
    moved = shutil.copy(pth, tmp_path / pth.name)
    words = Path(shutil.copytree(tokenizer, tmp_path / "words"))
    (words / "README.md").write_text("about")
    assert Umt5Text.from_original(moved, words, torch.float32).identity == text.identity
    torch.save(original_tensors(seed=1), moved)
    others = {
        Umt5Text.from_original(moved, words).identity,
        Umt5Text.from_original(pth, tokenizer, max_tokens=256).identity,
        Umt5Text.from_folder(folder, tokenizer).identity,
        text.identity,
    }
    (words / "tokenizer.json").write_text("{}")
    others.add(Umt5Text.from_original(pth, words).identity)
    assert len(others) == 5
    assert not text.loaded


def test_fingerprint_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples reach from the first byte to the last."""
    monkeypatch.setattr("streamgen.models.umt5._WHOLE", 1000)
    path = tmp_path / "large"
    data = bytearray(1_000_000)
    seen = set()
    for place in (None, 0, 500_000, len(data) - 1):
        changed = bytearray(data)
        if place is not None:
            changed[place] = 1
        path.write_bytes(changed)
        seen.add(_fingerprint(path))
    # 64 pieces of 4096 leave gaps of 11,776 bytes: one changed byte may hide, a retrained file not.
    assert len(seen) >= 3
    path.write_bytes(bytes(999_999))
    assert _fingerprint(path) not in seen


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("  a\n\tred \u3000 maze ", "a red maze"),
        ("&amp;lt;maze&amp;gt; &amp; snow", "<maze> & snow"),
        ("it\u2019s \u201csnow\u201d", 'it\'s "snow"'),
        ("e\u0301", "\u00e9"),
        ("&nbsp;maze&nbsp;", "maze"),
        ("", ""),
    ],
)
def test_cleaning(raw: str, cleaned: str, no_ftfy: None) -> None:
    """Entities twice, all white space one space, straight quotes, composed letters."""
    assert clean_prompt(raw) == cleaned


def test_cleaning_uses_ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is installed, before the rest."""
    fake = types.ModuleType("ftfy")
    fake.__spec__ = importlib.machinery.ModuleSpec("ftfy", None)
    fake.fix_text = lambda text: text.replace("broken", "&lt;fixed&gt;")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ftfy", fake)
    assert clean_prompt(" broken  text") == "<fixed> text"


def test_cleaning_agrees_with_ftfy(no_ftfy: None) -> None:
    """On well-formed prompts our two steps are all that ftfy does."""
    ftfy = pytest.importorskip("ftfy")
    for raw in ("it\u2019s \u201csnow\u201d", "cafe\u0301 at night", "a &amp; b", "\u2018a\u201b"):
        fixed = " ".join(html.unescape(html.unescape(ftfy.fix_text(raw))).split())
        assert clean_prompt(raw) == fixed


def test_tokenizer_json_is_taken_as_it_is(tokenizer: Path, tmp_path: Path) -> None:
    """A class named beside it does not replace its pipeline."""
    words = Path(shutil.copytree(tokenizer, tmp_path / "words"))
    (words / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    ids = read_tokenizer(words)("a red unheard maze")["input_ids"]
    assert ids == ids_of("a red unheard maze")


def _config(**values: object) -> Callable[[Path, Path], object]:
    """Another config.json."""
    return lambda enc, _: (enc / "config.json").write_text(json.dumps(values))


def _without(name: str) -> Callable[[Path, Path], None]:
    """One tensor left out."""

    def edit(enc: Path, _: Path) -> None:
        tensors = {transformers_name(k): v for k, v in original_tensors().items()}
        del tensors[name]
        (enc / "model.safetensors.index.json").unlink()
        save_file(tensors, enc / "model.safetensors")

    return edit


def _small_vocabulary(enc: Path, _: Path) -> None:
    tensors = {transformers_name(k): v for k, v in original_tensors().items()}
    tensors["shared.weight"] = tensors["shared.weight"][:9].clone()
    (enc / "model.safetensors.index.json").unlink()
    save_file(tensors, enc / "model.safetensors")


BAD: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no folder": (lambda enc, _: shutil.rmtree(enc), "config.json: no such file"),
    "no shard": (lambda enc, _: (enc / "model-2.safetensors").unlink(), "model-2.*no such file"),
    "no weights": (
        lambda enc, _: (enc / "model.safetensors.index.json").unlink(),
        "model.safetensors: no such file",
    ),
    "bad index": (
        lambda enc, _: (enc / "model.safetensors.index.json").write_text("[]"),
        "no index of weights",
    ),
    "t5": (_config(model_type="t5"), "a t5 encoder .* accepted is umt5"),
    "relu": (_config(model_type="umt5", feed_forward_proj="relu"), "with relu"),
    "not json": (lambda enc, _: (enc / "config.json").write_text("<html>"), "no config"),
    "list": (lambda enc, _: (enc / "config.json").write_text("[1]"), "no config"),
    "cut shard": (
        lambda enc, _: (enc / "model-1.safetensors").write_bytes(b"123456789"),
        "model-1.safetensors",
    ),
    "missing tensor": (
        _without("encoder.block.1.layer.0.SelfAttention.k.weight"),
        "missing: encoder.block.1.layer.0.SelfAttention.k.weight",
    ),
    "no table": (_without("shared.weight"), "no UMT5 encoder; its first tensors are"),
    "no tokenizer": (lambda _, tok: shutil.rmtree(tok), "no such tokenizer folder"),
    "bad tokenizer": (
        lambda _, tok: (tok / "tokenizer.json").write_text("{}"),
        "can't be read as a tokenizer",
    ),
    "empty tokenizer": (
        lambda _, tok: (tok / "tokenizer.json").unlink(),
        "can't be read as a tokenizer",
    ),
    "strange tokenizer": (_small_vocabulary, "of 18 tokens, for an encoder of 9"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Each is one line that names the file or the tensor."""
    words = Path(shutil.copytree(tokenizer, tmp_path / "words"))
    edit, message = BAD[case]
    edit(folder, words)
    with pytest.raises(WeightsError, match=message) as caught:
        Umt5Text.from_folder(folder, words, torch.float32)(["a maze"])
    assert "\n" not in str(caught.value)


def test_another_model_in_the_original_layout(tokenizer: Path, tmp_path: Path) -> None:
    """A transformer's or an autoencoder's file is named as none."""
    path = tmp_path / "Wan2.1_VAE.pth"
    torch.save({"encoder.conv1.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(WeightsError, match="VAE.pth: no UMT5 encoder.*encoder.conv1.weight"):
        Umt5Text.from_original(path, tokenizer)(["a maze"])


def test_width_of_the_transformer(pth: Path, folder: Path, tokenizer: Path) -> None:
    """An encoder for another transformer is refused, with both widths."""
    assert Umt5Text.from_original(pth, tokenizer, width=DIM)(["a"]).shape[-1] == DIM
    with pytest.raises(WeightsError, match="enc.pth: a text encoder of width 16; .* takes 4096"):
        Umt5Text.from_original(pth, tokenizer, width=4096)(["a"])
    with pytest.raises(WeightsError, match="of width 16"):
        Umt5Text.from_folder(folder, tokenizer, width=32)(["a"])


def test_without_transformers(pth: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said when it is asked for, with what installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    with pytest.raises(MissingExtra, match=r"^UMT5 needs transformers: pip install .*\[hub\]$"):
        Umt5Text.from_original(pth, tokenizer)
