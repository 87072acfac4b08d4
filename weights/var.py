"""VAR's files: which model a file holds, and whether a transformer and an autoencoder belong.

The published files are flat (`var_d16.pth`, `vae_ch160v4096z32.pth`). A checkpoint of VAR's
training holds both, the transformer under trainer / var_wo_ddp and the autoencoder under trainer /
vae_local; compiled or distributed training adds prefixes to the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from streamgen.errors import WeightsError
from streamgen.weights.families import recognise
from streamgen.weights.keymaps import strip_prefixes
from streamgen.weights.load import read_entries, read_tensors

VAE_NAME = "vae_ch160v4096z32.pth"
"""The published autoencoder, which all published transformers share."""

_LEVELS = "lvl_1L"
# Constants in the state dict of VAR's classes, and a statistic of training. The last one's size
# depends on the number of scales, so it may differ between files that belong together.
_NO_WEIGHTS = ("attn_bias_for_masking", "zero_k_bias", "ema_vocab_hit_SV")
_ARGUMENTS = {  # by kind of file: which argument takes it, and what that is
    "var": ("var=", "a VAR transformer (pos_1LC, word_embed.*, blocks.*.attn.mat_qkv.*)"),
    "vqvae": ("vae=", "VAR's VQ autoencoder (quantize.embedding.*, encoder.*, decoder.*)"),
}
_TRAINER = ("trainer", "model", "state_dict")


def read_var(path: Path | str) -> dict[str, Tensor]:
    """The transformer of a file under the published names, without what is no weight.

    `lvl_1L` (the scale of every token) stays if it is there: it tells the sides of the token maps.

    Raises:
        WeightsError: the file can't be read or holds something else; the message says what.
    """
    tensors = _read(path, "var_wo_ddp")
    _expect(path, tensors, "var")
    return tensors


def read_vqvae(path: Path | str) -> dict[str, Tensor]:
    """The autoencoder of a file under the published names, without what is no weight.

    Raises:
        WeightsError: the file can't be read or holds something else; the message says what.
    """
    tensors = _read(path, "vae_local")
    _expect(path, tensors, "vqvae")
    return tensors


def find_vqvae(var: Path | str) -> Path | None:
    """Where the autoencoder of a transformer's file is: in the same file or beside it."""
    var = Path(var)
    if "trainer" in read_entries(var) and recognise(_read(var, "vae_local")).kind == "vqvae":
        return var
    beside = var.with_name(VAE_NAME)
    return beside if beside.is_file() else None


def weights_only(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without the constants and statistics that published files hold, and `lvl_1L`."""
    return {k: v for k, v in _no_constants(tensors).items() if k != _LEVELS}


def check_pair(var: Mapping[str, Tensor], vae: Mapping[str, Tensor]) -> None:
    """Check that a transformer's tokens are those of an autoencoder.

    Raises:
        WeightsError: the width or the number of the codebook's entries differs, or a tensor that
            says so is missing.
    """
    asked = _size(var, "word_embed.weight", 1), _size(var, "head.weight", 0)
    given = (_size(vae, "quantize.embedding.weight", 1), _size(vae, "quantize.embedding.weight", 0))
    if asked != given:
        raise WeightsError(
            f"the autoencoder has {given[1]} codebook entries of width {given[0]} "
            f"(quantize.embedding.weight), the transformer takes {asked[1]} (head.weight) of width "
            f"{asked[0]} (word_embed.weight): the two were not trained together"
        )


def _read(path: Path | str, entry: str) -> dict[str, Tensor]:
    return _no_constants(strip_prefixes(read_tensors(path, entries=(*_TRAINER, entry))))


def _no_constants(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in tensors.items() if k.rpartition(".")[2] not in _NO_WEIGHTS}


def _expect(path: Path | str, tensors: Mapping[str, Tensor], kind: str) -> None:
    found = recognise(tensors)
    if found.kind == kind:
        return
    other = _ARGUMENTS.get(found.kind)
    cure = f"; give this file as {other[0]}" if other else ""
    argument, names = _ARGUMENTS[kind]
    raise WeightsError(f"{path}: is {found.text}; {argument} takes {names}{cure}")


def _size(tensors: Mapping[str, Tensor], key: str, axis: int) -> int:
    if key not in tensors or tensors[key].ndim <= axis:
        raise WeightsError(f"{key} is missing, or of another form than VAR's")
    return tensors[key].shape[axis]
