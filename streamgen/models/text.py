"""What a text encoder is, and a word-level one over a stated vocabulary: the pocket models'."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from streamgen.errors import InvalidRequest


class TextEncoder(Protocol):
    """Texts to the rows that a transformer's cross-attention reads."""

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Encode to `[B, L, text_dim]`; L is the same for every text."""
        ...

    def unknown(self, text: str) -> list[str]:
        """What it will leave out, and a user should hear of."""
        ...

    @property
    def identity(self) -> str:
        """Names what an encoded text depends on besides the text; the same in every process."""
        ...


class WordEncoder(nn.Module):
    """One learned vector a word; the words a text does not fill are zero rows.

    Args:
        vocabulary: the words it knows, lower case; a word's row is its place here.
        width: width of a vector (`text_dim` of the transformer).
        max_words: rows of an encoded text.
    """

    def __init__(self, vocabulary: Sequence[str], width: int, max_words: int) -> None:
        super().__init__()
        self.vocabulary, self.max_words = tuple(vocabulary), max_words
        self._row = {word: row for row, word in enumerate(self.vocabulary)}
        self.embedding = nn.Embedding(len(self.vocabulary), width)

    def split(self, text: str) -> tuple[list[str], list[str]]:
        """The text's words, lower case: those in the vocabulary, and those that are not.

        Raises:
            InvalidRequest: more known words than `max_words`.
        """
        words = re.findall(r"[^\W\d_]+", text.lower())
        known = [word for word in words if word in self._row]
        if len(known) > self.max_words:
            raise InvalidRequest(
                f"the prompt has {len(known)} words of the vocabulary; accepted are up to "
                f"{self.max_words}"
            )
        return known, [word for word in words if word not in self._row]

    def unknown(self, text: str) -> list[str]:
        """The text's words that are not in the vocabulary."""
        return self.split(text)[1]

    @property
    def identity(self) -> str:
        """A digest of the vocabulary and its vectors."""
        digest = hashlib.blake2b(" ".join(self.vocabulary).encode(), digest_size=16)
        digest.update(self.embedding.weight.detach().cpu().float().numpy().data)
        return digest.hexdigest()

    def forward(self, texts: Sequence[str]) -> Tensor:
        """Encode texts to `[B, max_words, width]`; words outside the vocabulary are left out."""
        known = [self.split(text)[0] for text in texts]
        rows = [[self._row[word] for word in words] for words in known]
        blank = [[0] * (self.max_words - len(row)) for row in rows]
        index = torch.tensor([r + b for r, b in zip(rows, blank, strict=True)])
        filled = torch.tensor(
            [[1.0] * len(r) + [0.0] * len(b) for r, b in zip(rows, blank, strict=True)]
        )
        weight = self.embedding.weight
        return self.embedding(index.to(weight.device)) * filled.to(weight)[..., None]
