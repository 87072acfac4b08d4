"""Count the bytes that torch operations write and the storages they make; no clock, no machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided"}


class Traffic(TorchDispatchMode):
    """What happens inside `with Traffic() as traffic:`.

    Attributes:
        written: bytes written, into new storages or old ones.
        allocated: bytes of new storages.
        storages: number of new storages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written = self.allocated = self.storages = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and book what it wrote."""
        kwargs = kwargs or {}
        known = {_storage(x) for x in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        arguments = func._schema.arguments
        given = {argument.name: x for argument, x in zip(arguments, args, strict=False)} | kwargs
        writes = [x for x in arguments if x.alias_info is not None and x.alias_info.is_write]
        mutated = [given.get(argument.name) for argument in writes]
        self.written += sum(x.nbytes for x in _tensors(mutated))
        for x in _tensors(out):
            if _storage(x) not in known:
                self.storages += 1
                self.allocated += x.nbytes
                if func.overloadpacket.__name__ not in _UNWRITTEN:
                    self.written += x.nbytes
        return out


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _tensors(tree: Any) -> Iterator[Tensor]:
    found: list[Any] = torch.utils._pytree.tree_leaves(tree)
    return (x for x in found if isinstance(x, Tensor) and x.nbytes)
