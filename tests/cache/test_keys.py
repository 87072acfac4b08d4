"""Keys of content: equal inputs, equal keys; anything else, others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from streamgen.cache import KVSpec
from streamgen.cache.keys import Fingerprint, chunk_key, nonce
from streamgen.errors import InvalidRequest

SPEC = KVSpec(num_layers=1, kv_heads=1, head_dim=2, block_tokens=2)
PRINT = Fingerprint(model="weights", spec=SPEC)
CHANGES: dict[str, Any] = {
    "model": "other weights",
    "spec": replace(SPEC, dtype=torch.bfloat16),
    "adapters": ("one",),
    "positions": "sliding_sink",
    "context_noise": 50.0,
    "salt": "me",
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_field_is_part_of_every_key(name: str) -> None:
    """Another value of any field is another key, whatever the inputs."""
    other = replace(PRINT, **{name: CHANGES[name]})
    assert other.digest != PRINT.digest
    assert chunk_key(b"", other, "a maze") != chunk_key(b"", PRINT, "a maze")


def test_codec_is_part_of_the_fingerprint() -> None:
    """Blocks stored in another way are other blocks."""
    assert replace(PRINT, spec=replace(SPEC, codec="fp8_e4m3")).digest != PRINT.digest


def test_adapters_have_an_order() -> None:
    """They apply one after the other."""
    both = [replace(PRINT, adapters=names).digest for names in (("a", "b"), ("b", "a"), ("ab",))]
    assert len(set(both)) == 3


def test_chunk_keys_follow_from_their_inputs() -> None:
    """Equal inputs give equal keys, even as other objects; a nonce never comes twice."""
    inputs = ("a maze", 7, 0.5, True, None, b"x", {"w", "d"}, (1, [2]), np.ones(3), torch.ones(2))
    same = ("a maze", 7, 0.5, True, None, b"x", {"d", "w"}, [1, (2,)], np.ones(3), torch.ones(2))
    assert chunk_key(b"p", PRINT, *inputs) == chunk_key(b"p", PRINT, *same)
    assert len({nonce() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c"), ("a", "bc")),
        (("a",), ("a", None)),
        (((1, 2), 3), ((1,), 2, 3)),
        ((1,), (True,)),
        ((1,), (1.0,)),
        (("1",), (1,)),
        (("a",), (b"a",)),
        ((np.zeros(4),), (np.zeros((2, 2)),)),
        ((np.zeros(4, np.int32),), (np.zeros(4, np.float32),)),
        ((torch.zeros(4),), (np.zeros(4, np.float32),)),
        ((torch.zeros(2, dtype=torch.bfloat16),), (torch.zeros(2, dtype=torch.float16),)),
    ],
    ids=str,
)
def test_different_inputs_have_different_keys(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Also where their bytes, put one after the other, would be the same."""
    assert chunk_key(b"", PRINT, *one) != chunk_key(b"", PRINT, *other)
    assert chunk_key(b"p", PRINT, *one) != chunk_key(b"q", PRINT, *one)


def test_inputs_without_content_are_refused() -> None:
    """What has no bytes of its own can't be part of a key."""
    with pytest.raises(InvalidRequest, match="a builtin_function_or_method can't be part of a key"):
        chunk_key(b"", PRINT, print)
    with pytest.raises(InvalidRequest, match="ndarray"):
        chunk_key(b"", PRINT, np.array([object()]))
