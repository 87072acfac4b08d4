"""Names of foreign checkpoints -> names of the official Wan classes, which ours keep.

Training code saves the model inside wrappers, and each wrapper adds a piece to every name: the
diffusion wrapper of CausVid and Self-Forcing `model.`, others `net.`, data parallel `module.`,
FSDP `_fsdp_wrapped_module.` at any depth. CausVid's wrapper may also hold the heads of its GAN
critic, which no generator uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from streamgen.errors import WeightsError

LEADING = ("model.", "net.", "module.")
"""Pieces that wrappers put before a name; taken off as long as one is there."""

ANYWHERE = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""Pieces that torch's own wrappers put at any depth."""

GAN_HEADS = ("_cls_pred_branch.", "_register_tokens.", "_gan_ca_blocks.")
"""Prefixes of a critic's heads that a generator's checkpoint may hold and that are left out."""


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
