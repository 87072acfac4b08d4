"""Words in, vectors out; words that are not known are named."""

from __future__ import annotations

import pytest
import torch

from streamgen.errors import InvalidRequest
from streamgen.models.text import WordEncoder

WORDS = ("a", "maze", "night", "snow")


@pytest.fixture
def text() -> WordEncoder:
    """Four words, vectors of 8, five rows."""
    torch.manual_seed(0)
    return WordEncoder(WORDS, 8, 5)


def test_known_and_unknown(text: WordEncoder) -> None:
    """In the order of the text, lower case, punctuation and digits left out."""
    assert text.split("A MAZE, at night-2!") == (["a", "maze", "night"], ["at"])


def test_rows(text: WordEncoder) -> None:
    """A word's vector in its place, zero rows after the last."""
    (rows,) = text(["snow maze"])
    weight = text.embedding.weight
    assert rows.shape == (5, 8)
    assert torch.equal(rows[0], weight[3]) and torch.equal(rows[1], weight[1])
    assert rows[2:].abs().max() == 0


def test_several_texts(text: WordEncoder) -> None:
    """Each row of a batch is what the text gives alone; the empty text is all zero."""
    batch = text(["a maze", "", "night"])
    assert batch.shape == (3, 5, 8) and batch[1].abs().max() == 0
    assert torch.equal(batch[0], text(["a maze"])[0])
    assert torch.equal(batch[2], text(["night"])[0])


def test_unknown_words_change_nothing(text: WordEncoder) -> None:
    """They are left out, not encoded as something else."""
    assert torch.equal(text(["a purple maze"]), text(["a maze"]))


def test_too_many_words(text: WordEncoder) -> None:
    """The limit counts words of the vocabulary; the message says both numbers."""
    assert text.split("a big a big a big a big a big")[0] == ["a"] * 5
    with pytest.raises(InvalidRequest, match=r"has 6 words of .* accepted are up to 5"):
        text.split("a maze a maze a maze")
    with pytest.raises(InvalidRequest, match="up to 5"):
        text(["snow", "a maze a maze a maze"])


def test_dtype_follows_the_weights(text: WordEncoder) -> None:
    """After `to(bfloat16)` the rows are bfloat16."""
    assert text.bfloat16()(["a"]).dtype == torch.bfloat16
