"""Names of foreign checkpoints -> names of the official Wan classes, which ours keep.

Training code saves the model inside wrappers, and each wrapper adds a piece to every name: the
diffusion wrapper of CausVid and Self-Forcing `model.`, others `net.`, data parallel `module.`,
FSDP `_fsdp_wrapped_module.` at any depth. CausVid's wrapper may also hold the heads of its GAN
critic, which no generator uses.

Diffusers has names of its own for the same tensors. Its `norm2` is the official `norm3` (the norm
before cross-attention, the only one with weights) and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from streamgen.errors import WeightsError

LEADING = ("model.", "net.", "module.", "diffusion_model.")
"""Pieces that wrappers put before a name; taken off as long as one is there."""

ANYWHERE = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""Pieces that torch's own wrappers put at any depth."""

GAN_HEADS = ("_cls_pred_branch.", "_register_tokens.", "_gan_ca_blocks.")
"""Prefixes of a critic's heads that a generator's checkpoint may hold and that are left out."""

# Official name -> diffusers' name, of a piece that is a whole name or ends at a dot.
_TOP = {
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
# The same inside a block.
_BLOCK = {
    "norm2": "norm3",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "modulation": "scale_shift_table",
    **{
        f"{official}.{ours}": f"{theirs}.{name}"
        for official, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for ours, name in (
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("o", "to_out.0"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    },
}
_TOP_BACK = {theirs: official for official, theirs in _TOP.items()}
_BLOCK_BACK = {theirs: official for official, theirs in _BLOCK.items()}


def strip_name(name: str) -> str:
    """One name without the pieces that wrappers add: "model.blocks.0.ffn.0.bias" -> "blocks..."."""
    for piece in ANYWHERE:
        name = name.replace(piece, "")
    while name.startswith(LEADING):
        name = name.split(".", 1)[1]
    return name


def strip_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every name without the pieces that wrappers add. The tensors are the same objects.

    Raises:
        WeightsError: two names become one (a file that holds two models).
    """
    stripped: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = strip_name(name)
        if short in stripped:
            raise WeightsError(
                f"{name!r} and another name both become {short!r}: the file holds two models; "
                "choose one of them before its prefixes are taken off"
            )
        stripped[short] = tensor
    return stripped


def drop(tensors: Mapping[str, Tensor], prefixes: Iterable[str] = GAN_HEADS) -> dict[str, Tensor]:
    """The tensors whose (stripped) name begins with none of `prefixes`."""
    unwanted = tuple(prefixes)
    return {name: value for name, value in tensors.items() if not name.startswith(unwanted)}


def to_diffusers(name: str) -> str:
    """An official Wan name as diffusers writes it; a name it does not know stays."""
    return _rename(name, _TOP, _BLOCK)


def to_official(name: str) -> str:
    """Diffusers' name of a Wan tensor as the official code writes it; other names stay.

    For names that are diffusers': an official `norm3` would become `norm2`.
    """
    return _rename(name, _TOP_BACK, _BLOCK_BACK)


def is_diffusers(names: Iterable[str]) -> bool:
    """Whether the names of a Wan transformer are diffusers' and not the official ones."""
    return any(name.startswith("condition_embedder.") or ".attn1." in name for name in names)


def official_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Wan transformer's tensors under official names, however they were saved.

    Wrappers' pieces come off, a critic's heads are left out, diffusers' names are translated. The
    tensors are the same objects.

    Raises:
        WeightsError: two names become one.
    """
    stripped = drop(strip_prefixes(tensors))
    if not is_diffusers(stripped):
        return stripped
    return {to_official(name): value for name, value in stripped.items()}


def _rename(name: str, top: Mapping[str, str], block: Mapping[str, str]) -> str:
    """Replace the piece at the start of a name, or behind "blocks.3.", that a table knows."""
    parts = name.split(".")
    table, start = (block, 2) if parts[0] == "blocks" else (top, 0)
    for end in range(len(parts), start, -1):
        new = table.get(".".join(parts[start:end]))
        if new is not None:
            return ".".join((*parts[:start], new, *parts[end:]))
    return name
