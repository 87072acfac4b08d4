"""Names of K/V content: the same in every process, and different whenever the bytes may differ.

Only *given* inputs make keys (`chunk_key`: a prompt, frames, actions, a seed). A generated chunk
gets a `nonce`, which nobody can ask for: to match it, its bytes would have to follow from its
inputs alone. What K/V depend on besides is the `Fingerprint`, which is part of every key.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator, Set
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamgen.cache.spec import KVSpec
from streamgen.errors import InvalidRequest

KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What keys and values depend on besides the inputs: with another one nothing ever matches.

    Attributes:
        model: id of the weights, such as their checksum.
        spec: geometry, dtype and codec of a block.
        adapters: ids of the adapters in force, in the order in which they apply.
        positions: position policy under which keys are stored (`streamgen.models.history`).
        context_noise: timestep told in the pass that stores K/V.
        salt: keeps users or tenants apart who must not see one another's hits.
    """

    model: str
    spec: KVSpec
    adapters: tuple[str, ...] = ()
    positions: str = "absolute"
    context_noise: float = 0.0
    salt: str = ""

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all fields, the same in every process."""
        return _digest(self)


def chunk_key(parent: bytes, fingerprint: Fingerprint, *inputs: Any) -> bytes:
    """The key of a chunk that follows from given inputs: 32 bytes, the same in every process.

    Args:
        parent: key of the chunk before it; b"" for the first.
        fingerprint: what the K/V depends on besides.
        inputs: prompt text, given frames, actions, seed, ...: None, bool, int, float, str, bytes,
            arrays, tensors, and tuples, lists and sets of these.

    Raises:
        InvalidRequest: an input of another type.
    """
    return _digest((parent, fingerprint.digest, inputs))


def nonce() -> bytes:
    """A key that nobody can ask for, for a generated chunk."""
    return secrets.token_bytes(KEY_BYTES)


def _digest(value: Any) -> bytes:
    state = blake2b(digest_size=KEY_BYTES)
    for part in _encode(value):
        state.update(part)
    return state.digest()


def _encode(value: Any) -> Iterator[bytes]:
    """A value as bytes from which it could be read back: kind, size, content."""
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)};".encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"array {value.dtype.str} {value.shape};".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif value is None or isinstance(value, (bool, torch.dtype)):
        yield f"{type(value).__name__} {value};".encode()
    elif isinstance(value, Integral):  # numpy's too
        yield f"int {int(value)};".encode()
    elif isinstance(value, Real):
        yield b"float;" + struct.pack("<d", value)
    elif isinstance(value, (str, bytes)):
        data = value.encode() if isinstance(value, str) else value
        yield f"{type(value).__name__} {len(data)};".encode() + data
    elif isinstance(value, (tuple, list)):
        yield f"sequence {len(value)};".encode()
        for item in value:
            yield from _encode(item)
    elif isinstance(value, Set):
        yield f"set {len(value)};".encode()
        yield from sorted(_digest(item) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _encode(
            [type(value).__name__, *((f.name, getattr(value, f.name)) for f in fields(value))]
        )
    else:
        raise InvalidRequest(
            f"a {type(value).__name__} can't be part of a key: accepted are None, numbers, text, "
            "bytes, arrays, tensors, and sequences and sets of these"
        )
