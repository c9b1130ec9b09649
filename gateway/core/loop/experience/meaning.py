"""Likeness by meaning: the embedding of a text from a table of tokens that was distilled from a language model. Pure.

A vector has two halves of equal weight. *Meaning* is the weighted sum of the rows of the text's WordPiece tokens, so
that a paraphrase is near; a word that is repeated counts by the root of its count. *Words* is signed feature hashing of
words, word pairs and trigrams as in `experience.embed`, which tells texts of one subject apart and covers what the
table does not know: other alphabets, names, code. There each digit counts as 0; a word with a digit has no meaning.

`policy/recipes/embedder.py` makes the table. docs/adr/0023 says why both halves are needed.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
import zlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.core.loop.experience.likeness import EMBEDDED_CHARS_MAX, EMBEDDING_DIM, HASHED, Embedding, words_of
from gateway.errors import ConfigError

MINILM = "minilm-1"  # names the table, the features and their weights: a change of any needs another name
TABLE_FILE = "minilm-l6.safetensors"
TABLE_SHA256 = "a013e3c231caf014c0b2ab606ffd6bd6d73eec42f2ad5a2c4c8907a6932aa23d"
MEANING_SHARE = 0.5  # of a vector's square, where a text has both halves
ROWS, SCALES, VOCABULARY = "rows", "scales", "vocabulary"  # the tensors of a table's file
DTYPES = {"I8": np.int8, "F32": np.float32, "U8": np.uint8}
WORD_CHARS_MAX = 100  # a longer word has no tokens
CACHED_WORDS_MAX = 16_384
_FIRST, _MIXED = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)  # odd multipliers (Knuth; MurmurHash3)
_HALF, _SIGN = np.uint32(16), np.uint32(31)
_LENGTH_BYTES = 8
_IDEOGRAPH = re.compile("([\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")  # BERT takes each one for a word
Floats = NDArray[np.float64]
Codes = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class _Word:
    """A word's features. `codes`: uint32 of the word and its trigrams; `tokens`: uint32 rows of the table."""

    code: int
    codes: bytes
    tokens: bytes
    sizes: tuple[int, int]  # numbers of codes and tokens


class TokenTable:
    """Embeds texts. Threads may share one: its cache of words is only ever read, added to or emptied."""

    def __init__(self, vocabulary: Mapping[str, int], rows: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
        """`rows`: [tokens, n] with n < EMBEDDING_DIM; a token's vector is its row times its scale. Raises ValueError
        if the shapes do not fit."""
        if rows.ndim != 2 or not rows.size or scales.shape != rows.shape[:1] or rows.shape[1] >= EMBEDDING_DIM:
            raise ValueError(f"rows of shape {rows.shape} with scales of shape {scales.shape}")
        if any(not 0 <= row < len(rows) for row in vocabulary.values()):
            raise ValueError(f"a token outside the {len(rows)} rows")
        self._vocabulary = vocabulary
        self._rows, self._scales = rows, scales
        self._hashed = EMBEDDING_DIM - rows.shape[1]
        self._token_chars_max = max(map(len, vocabulary), default=0)
        self._words: dict[str, _Word] = {}

    def embed(self, text: str) -> list[float]:
        """Embed a text as EMBEDDING_DIM floats of L2 norm 1, or all zeros for a text without words."""
        unit: list[float] = self.embed_all([text])[0].tolist()
        return unit

    def embed_all(self, texts: Sequence[str]) -> Floats:
        """The same for several texts, one a row, in the time of few array operations."""
        sequences = [words_of(text[:EMBEDDED_CHARS_MAX]) for text in texts]
        counted = [Counter(sequence) for sequence in sequences]
        words = [self._word(word) for counts in counted for word in counts]
        if not words:
            return np.zeros((len(texts), EMBEDDING_DIM))
        counts = np.fromiter((n for counts in counted for n in counts.values()), np.float64, len(words))
        texts_of = np.repeat(np.arange(len(texts)), [len(counts) for counts in counted])
        sizes = np.array([word.sizes for word in words])
        codes = np.frombuffer(b"".join([word.codes for word in words]), np.uint32)
        tokens = np.frombuffer(b"".join([word.tokens for word in words]), np.uint32)
        pairs, pairs_of = self._pairs(sequences)
        hashed = _hashed(
            np.concatenate((codes, pairs)),
            np.concatenate((np.repeat(counts, sizes[:, 0]), np.ones(len(pairs)))),
            np.concatenate((np.repeat(texts_of, sizes[:, 0]), pairs_of)),
            (len(texts), self._hashed),
        )
        weights: Floats = np.repeat(np.sqrt(counts), sizes[:, 1]) * self._scales[tokens]
        ends = np.searchsorted(np.repeat(texts_of, sizes[:, 1]), np.arange(len(texts) + 1))
        slices = [slice(*ends_of) for ends_of in pairwise(ends.tolist())]
        meaning = np.array([weights[one] @ self._rows[tokens[one]] for one in slices])
        parts = (_unit(meaning) * MEANING_SHARE**0.5, _unit(hashed) * (1 - MEANING_SHARE) ** 0.5)
        return _unit(np.concatenate(parts, axis=1))

    def _pairs(self, sequences: Sequence[Sequence[str]]) -> tuple[Codes, NDArray[np.int64]]:
        """Features of all pairs of neighbours, and the number of the text that each is of."""
        order = np.fromiter((self._word(word).code for words in sequences for word in words), np.uint32)
        texts_of = np.repeat(np.arange(len(sequences)), [len(words) for words in sequences])
        within = texts_of[:-1] == texts_of[1:]
        return _mixed(order[:-1] * _FIRST + order[1:])[within], texts_of[:-1][within]

    def _word(self, word: str) -> _Word:
        features = self._words.get(word)
        if features is None:
            if len(self._words) >= CACHED_WORDS_MAX:
                self._words.clear()
            features = self._words[word] = self._features(word)
        return features

    def _features(self, word: str) -> _Word:
        padded = f"^{word}$"
        features = [word, *(f"#{padded[i : i + 3]}" for i in range(len(padded) - 2))]
        codes = [zlib.crc32(feature.encode("utf-8", "surrogatepass")) for feature in features]
        tokens = self.tokens(word)
        sizes = len(codes), len(tokens)
        return _Word(codes[0], array("I", codes).tobytes(), array("I", tokens).tobytes(), sizes)

    def tokens(self, word: str) -> list[int]:
        """The rows of a word of `words_of`: WordPiece, the longest token first. Empty for a word with a digit or with a
        part that has no token."""
        if len(word) > WORD_CHARS_MAX or "0" in word:
            return []
        if not word.isascii():
            word = "".join(c for c in unicodedata.normalize("NFD", word) if unicodedata.category(c) != "Mn")
        return [token for part in _IDEOGRAPH.split(word) for token in self._pieces(part)]

    def _pieces(self, word: str) -> list[int]:
        tokens: list[int] = []
        start = 0
        while start < len(word):
            mark = "##" if start else ""
            for end in range(min(len(word), start + self._token_chars_max), start, -1):
                token = self._vocabulary.get(mark + word[start:end])
                if token is not None:
                    break
            else:
                return []
            tokens.append(token)
            start = end
        return tokens


def _hashed(codes: Codes, amounts: Floats, texts_of: NDArray[np.int64], shape: tuple[int, int]) -> Floats:
    """Sum features by signed hashing, for each text: a code's remainder is its place, its top bit its sign."""
    signs, (n, size) = np.where(codes >> _SIGN, 1.0, -1.0), shape
    places = texts_of * size + codes % size
    return np.bincount(places, weights=signs * amounts, minlength=n * size).astype(np.float64).reshape(shape)


def _mixed(codes: Codes) -> Codes:
    """Let every bit depend on every other: places are taken from the low bits."""
    mixed = (codes ^ (codes >> _HALF)) * _MIXED
    return np.asarray(mixed ^ (mixed >> _HALF), np.uint32)


def _unit(vectors: Floats) -> Floats:
    """Each row divided by its norm; rows of zeros stay."""
    norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))[:, None]
    return vectors / np.where(norms, norms, 1.0)


def by_meaning(file: bytes) -> Embedding:
    """The embedding of the shipped table, from the bytes of TABLE_FILE. Raises ConfigError, which names the way out,
    for other bytes."""
    if hashlib.sha256(file).hexdigest() != TABLE_SHA256:
        raise ConfigError(f"{TABLE_FILE} is damaged: install Baton again, or set BATON_EMBEDDER={HASHED.name}")
    table = read_table(file)
    return Embedding(MINILM, table.embed, replaces=(HASHED.name,), together=table.embed_all)


def read_table(file: bytes) -> TokenTable:
    """Read a table from the bytes of its safetensors file. Raises ValueError unless they are one."""
    try:
        tensors = _tensors(file)
        tokens = bytes(tensors[VOCABULARY]).decode().split("\n")
        return TokenTable({token: row for row, token in enumerate(tokens)}, tensors[ROWS], tensors[SCALES])
    except (KeyError, TypeError, UnicodeDecodeError, AttributeError) as error:
        raise ValueError(f"not a table of tokens ({type(error).__name__}: {error})") from None


def _tensors(file: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file, read without that package, which the gateway does not need."""
    begin = _LENGTH_BYTES + int.from_bytes(file[:_LENGTH_BYTES], "little")
    header, body = json.loads(file[_LENGTH_BYTES:begin]), memoryview(file)[begin:]
    return {
        name: np.frombuffer(body[slice(*tensor["data_offsets"])], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in header.items()
        if name != "__metadata__"
    }
