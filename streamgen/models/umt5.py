"""UMT5, the text encoder of Wan2.1: texts to 512 rows, zero after the last real token.

The network is transformers' `UMT5EncoderModel` (extra `hub`); weights come in its own layout or
under the original names of Wan's release, and sizes are read off the tensors. Wan neither masks the
zero rows in the transformer nor drops them (`wan/modules/t5.py`, Wan-Video/Wan2.1).

Files are opened at the first text: a run whose texts are all cached (`streamgen.models.prompts`)
never reads the weights.

Axes: B texts, N real tokens, D width (`text_dim` of the transformer).
"""

from __future__ import annotations

import hashlib
import html
import importlib
import importlib.util
import json
import re
import threading
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from streamgen.errors import MissingExtra, WeightsError
from streamgen.models.prompts import pad_rows, warn_if_cut
from streamgen.placement import stream_weights, unstream
from streamgen.weights.load import load_into, read_tensors

MAX_TOKENS = 512
"""Rows that Wan's transformer is trained with."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TABLE = "shared.weight"
_TIED = "encoder.embed_tokens.weight"

# Original name of a block's tensor -> transformers' name.
_BLOCK_NAMES = {
    "norm1.weight": "layer.0.layer_norm.weight",
    "attn.q.weight": "layer.0.SelfAttention.q.weight",
    "attn.k.weight": "layer.0.SelfAttention.k.weight",
    "attn.v.weight": "layer.0.SelfAttention.v.weight",
    "attn.o.weight": "layer.0.SelfAttention.o.weight",
    "pos_embedding.embedding.weight": "layer.0.SelfAttention.relative_attention_bias.weight",
    "norm2.weight": "layer.1.layer_norm.weight",
    "ffn.gate.0.weight": "layer.1.DenseReluDense.wi_0.weight",
    "ffn.fc1.weight": "layer.1.DenseReluDense.wi_1.weight",
    "ffn.fc2.weight": "layer.1.DenseReluDense.wo.weight",
}
_NAMES = {"token_embedding.weight": _TABLE, "norm.weight": "encoder.final_layer_norm.weight"}
_FLOAT32_IN_HALF = ".wo.weight"  # overflows float16

# A file is hashed whole up to this size; of a larger one, this many pieces of this many bytes.
_WHOLE, _PIECES, _PIECE = 64 * 2**20, 64, 4096


def transformers_name(name: str) -> str:
    """transformers' name of an original one: "blocks.0.norm1.weight" -> "encoder.block.0....".

    A name that is in neither scheme comes back as it is.
    """
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if block and block[2] in _BLOCK_NAMES:
        return f"encoder.block.{block[1]}.{_BLOCK_NAMES[block[2]]}"
    return _NAMES.get(name, name)


def clean_prompt(text: str) -> str:
    """The text as Wan encodes it: repaired, HTML entities resolved twice, single spaces.

    Repairing is ftfy's. Where it is not installed, two of its steps that prompts meet are done here
    (straight quotes, NFC); broken encodings are then left as they are.
    """
    if importlib.util.find_spec("ftfy") is not None:
        text = importlib.import_module("ftfy").fix_text(text)
    else:
        text = re.sub("[\u02bc\u2018-\u201b]", "'", re.sub("[\u201c-\u201f]", '"', text))
        text = unicodedata.normalize("NFC", text)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(text))).strip()


class Umt5Text:
    """Wan's text encoder (`streamgen.models.text.TextEncoder`); see the module's text.

    Build one with `from_folder` or `from_original`.

    Args:
        read: reads the encoder on the CPU.
        weights: the files that `read` reads.
        tokenizer: folder of the tokenizer (`tokenizer.json`, or what transformers can load).
        dtype: type of the weights and of encoded texts; in float16 the weights that overflow it
            stay in float32, as in transformers.
        max_tokens: rows of an encoded text; longer texts are cut, with a warning.
        width: `text_dim` of the transformer, where an encoder of another is to be refused.

    Raises:
        WeightsError: a file or folder is not there.
        MissingExtra: transformers is not installed.
    """

    def __init__(
        self,
        read: Callable[[], nn.Module],
        weights: Sequence[Path],
        tokenizer: Path | str,
        dtype: torch.dtype = torch.bfloat16,
        max_tokens: int = MAX_TOKENS,
        width: int | None = None,
    ) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise MissingExtra("UMT5 needs transformers: pip install streamgen[hub]")
        self.tokenizer_folder = Path(tokenizer)
        _require(self.tokenizer_folder, self.tokenizer_folder.is_dir(), "tokenizer folder")
        for path in weights:
            _require(path, path.is_file(), "file")
        self.weights, self.dtype, self.rows = tuple(weights), dtype, max_tokens
        self.width = width
        self.device = torch.device("cpu")
        self._read, self._stream = read, False
        self._parts: tuple[nn.Module, Any] | None = None
        self._identity: str | None = None
        self._lock = threading.RLock()

    @classmethod
    def from_folder(
        cls,
        text_encoder: Path | str,
        tokenizer: Path | str,
        dtype: torch.dtype = torch.bfloat16,
        max_tokens: int = MAX_TOKENS,
        width: int | None = None,
    ) -> Self:
        """An encoder in transformers' layout: config.json and (sharded) model.safetensors.

        Raises:
            WeightsError: a file is not there, or the folder holds another model.
            MissingExtra: transformers is not installed.
        """
        folder = Path(text_encoder)
        config, files = _read_config(folder), _weight_files(folder)

        def read() -> nn.Module:
            return build(_read_all(files, dtype), config, str(folder))

        return cls(read, files, tokenizer, dtype, max_tokens, width)

    @classmethod
    def from_original(
        cls,
        weights: Path | str,
        tokenizer: Path | str,
        dtype: torch.dtype = torch.bfloat16,
        max_tokens: int = MAX_TOKENS,
        width: int | None = None,
    ) -> Self:
        """An encoder in one file with original names, such as models_t5_umt5-xxl-enc-bf16.pth.

        Raises:
            WeightsError: a file is not there.
            MissingExtra: transformers is not installed.
        """
        file = Path(weights)

        def read() -> nn.Module:
            return build(_read_all([file], dtype), {}, str(file))

        return cls(read, [file], tokenizer, dtype, max_tokens, width)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Encode to `[B, max_tokens, D]`; the rows after a text's last token are zero.

        Raises:
            WeightsError: at the first text: weights or tokenizer are damaged or something else.
        """
        found = [self.encode(self.clean(text)) for text in texts]
        for _, tokens in found:
            warn_if_cut(tokens, self.rows)
        return torch.stack([pad_rows(rows_ND, self.rows) for rows_ND, _ in found])

    @torch.no_grad()
    def encode(self, cleaned: str) -> tuple[Tensor, int]:
        """Rows `[N, D]` of a cleaned text's tokens, and how many tokens it has uncut.

        Texts are encoded one by one and without padding, so a text's rows don't depend on its
        neighbours.

        Raises:
            WeightsError: see `__call__`.
        """
        with self._lock:
            encoder, tokenizer = self._loaded()
            tokens = len(tokenizer(cleaned)["input_ids"])
            ids = tokenizer(cleaned, truncation=True, max_length=self.rows)["input_ids"]
            ids_1N = torch.tensor([ids], device=self.device)
            mask_1N = torch.ones_like(ids_1N)
            out = encoder(input_ids=ids_1N, attention_mask=mask_1N).last_hidden_state
            return out[0].to(self.dtype), tokens

    def clean(self, text: str) -> str:
        """The text as it is encoded (`clean_prompt`)."""
        return clean_prompt(text)

    def unknown(self, text: str) -> list[str]:
        """Nothing: a sub-word tokenizer takes every word."""
        return []

    @property
    def identity(self) -> str:
        """A digest of the tokenizer's files, samples of the weights' files, and the row count.

        Where files lie and how old they are doesn't count. The weights are sampled: hashing all of
        their gigabytes takes longer than encoding a text.
        """
        if self._identity is None:
            files = sorted(self.tokenizer_folder.glob("*"))
            files = [*self.weights, *(p for p in files if p.suffix in (".json", ".model"))]
            parts = [f"umt5 1 {self.rows}", *(f"{p.name} {_fingerprint(p)}" for p in files)]
            self._identity = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return self._identity

    @property
    def loaded(self) -> bool:
        """Whether the weights have been read."""
        return self._parts is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights' files."""
        return sum(path.stat().st_size for path in self.weights)

    def to(self, device: str | torch.device, stream: bool = False) -> Self:
        """Run on a device, now or once loaded.

        Args:
            device: where texts are encoded and given.
            stream: leave the weights on the CPU between and during forwards, and take each layer's
                to the device for its turn (`streamgen.placement.stream_weights`).
        """
        with self._lock:
            self.device, self._stream = torch.device(device), stream
            if self._parts is not None:
                self._place(self._parts[0])
        return self

    def unload(self) -> None:
        """Drop the weights; the next text reads them again."""
        with self._lock:
            self._parts = None

    def _place(self, encoder: nn.Module) -> None:
        if self._stream:
            stream_weights(encoder, self.device)
        else:
            unstream(encoder).to(self.device)

    def _loaded(self) -> tuple[nn.Module, Any]:
        if self._parts is None:
            tokenizer = read_tokenizer(self.tokenizer_folder)
            encoder = self._read()
            vocabulary = encoder.get_input_embeddings().num_embeddings  # type: ignore[operator]
            if len(tokenizer) > vocabulary:
                raise WeightsError(
                    f"{self.tokenizer_folder}: a tokenizer of {len(tokenizer)} tokens, for an "
                    f"encoder of {vocabulary}; they don't belong together"
                )
            have = encoder.get_input_embeddings().embedding_dim  # type: ignore[operator]
            if self.width not in (None, have):
                raise WeightsError(
                    f"{self.weights[0]}: a text encoder of width {have}; the transformer takes "
                    f"{self.width}"
                )
            self._place(encoder)
            self._parts = encoder, tokenizer
        return self._parts


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder.

    `tokenizer.json` is taken as it is: loaded through a class by name, newer transformers build
    another pipeline of normalisation and splitting than the file states.

    Raises:
        WeightsError: no tokenizer, or an unreadable one.
    """
    transformers = importlib.import_module("transformers")
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            return transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare exceptions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"{folder}: can't be read as a tokenizer ({reason})") from error


def build(tensors: Mapping[str, Tensor], config: Mapping[str, Any], where: str) -> nn.Module:
    """A `UMT5EncoderModel` of tensors, which it takes without a copy.

    Args:
        tensors: by original or transformers' names. A decoder beside the encoder is left out.
        config: config.json, for what no tensor tells; empty for UMT5's own values.
        where: what to call the tensors in a message.

    Raises:
        WeightsError: they are no UMT5 encoder's.
    """
    named = {transformers_name(name): tensor for name, tensor in tensors.items()}
    named = {k: v for k, v in named.items() if not k.startswith(("decoder.", "lm_head."))}
    if _TIED in named:
        named.setdefault(_TABLE, named[_TIED])
    first = "encoder.block.0.layer."
    sizes = (
        named.get(_TABLE),
        named.get(f"{first}0.SelfAttention.relative_attention_bias.weight"),
        named.get(f"{first}0.SelfAttention.q.weight"),
        named.get(f"{first}1.DenseReluDense.wi_0.weight"),
    )
    if any(tensor is None or tensor.ndim != 2 for tensor in sizes):
        seen = ", ".join(list(tensors)[:4]) or "none"
        raise WeightsError(f"{where}: no UMT5 encoder; its first tensors are {seen}")
    table, bias, query, gate = (tensor for tensor in sizes if tensor is not None)
    transformers = importlib.import_module("transformers")
    layers = {name.split(".")[2] for name in named if name.startswith("encoder.block.")}
    made = transformers.UMT5Config(
        vocab_size=table.shape[0],
        d_model=table.shape[1],
        d_kv=query.shape[0] // bias.shape[1],
        d_ff=gate.shape[0],
        num_layers=len(layers),
        num_heads=bias.shape[1],
        relative_attention_num_buckets=bias.shape[0],
        relative_attention_max_distance=config.get("relative_attention_max_distance", 128),
        layer_norm_epsilon=config.get("layer_norm_epsilon", 1e-6),
        attn_implementation="eager",  # as Wan: scores and bias in the weights' type
    )
    with torch.device("meta"):
        encoder: nn.Module = transformers.UMT5EncoderModel(made)
    # Releases of transformers differ in whether they tie the two names of the table; we do.
    try:
        load_into(encoder, {**named, _TIED: named[_TABLE]})
    except WeightsError as error:
        raise WeightsError(f"{where}: {error}") from error
    encoder.set_input_embeddings(encoder.get_input_embeddings())  # type: ignore[operator]
    return encoder.eval().requires_grad_(False)


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json of a UMT5 encoder."""
    path = folder / "config.json"
    _require(path, path.is_file(), "file")
    try:
        config = json.loads(path.read_text())
        kind, gate = config["model_type"], config.get("feed_forward_proj", "gated-gelu")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: no config of a text encoder ({error})") from error
    if kind != "umt5" or gate != "gated-gelu":
        raise WeightsError(
            f"{path}: a {kind} encoder with {gate}; accepted is umt5 with gated-gelu"
        )
    return dict(config)


def _weight_files(folder: Path) -> list[Path]:
    """The files of a folder in transformers' layout."""
    index = folder / _INDEX
    if not index.is_file():
        return [folder / _SINGLE]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index}: no index of weights ({error})") from error
    return [folder / Path(str(name)).name for name in sorted(names)]


def _read_all(files: Iterable[Path], dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors in one type; file by file, so that a float32 original is never whole in memory.

    A weight that overflows float16 is kept in float32.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_tensors(file).items():
            wide = dtype == torch.float16 and transformers_name(name).endswith(_FLOAT32_IN_HALF)
            tensors[name] = tensor.to(torch.float32 if wide else dtype)
    return tensors


def _require(path: Path, there: bool, what: str) -> None:
    if not there:
        raise WeightsError(f"{path}: no such {what}")


def _fingerprint(path: Path) -> str:
    """Size and digest of a file, sampled where it is large."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if size <= _WHOLE:
            digest.update(file.read())
        else:
            for piece in range(_PIECES):
                file.seek(piece * (size - _PIECE) // (_PIECES - 1))
                digest.update(file.read(_PIECE))
    return digest.hexdigest()
