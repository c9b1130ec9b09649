"""Experience: how workers did on similar tasks, and the text embedding that defines "similar". Pure.

`embed` is signed feature hashing (Weinberger et al. 2009) of words, word pairs and character trigrams into 256
dimensions, L2-normalised. Digits become 0, so that sums with different numbers are similar. The default embedding adds
meaning to it (`meaning.py`).

A worker's past step counts by the likeness of its question (recall.py).
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

EMBEDDING_DIM = 256
EMBEDDED_CHARS_MAX = 4_000
NEAR, NEAREST = 0.4, 0.7  # likeness from which a past task counts at all, and from which it counts in full
SIMILAR = 0.5  # cosine from which a past request is an example of the same work
WON = 0.75  # outcome from which its plan is one to follow
SPREAD_MIN = 1e-6  # similarities that differ by at most this are equal
TASK_TYPE_SIMILARITY = 1.0  # added to the cosine if the task types are equal
_WORD = re.compile(r"[^\W_]+|[^\w\s]")


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, each digit as 0; a sign is a word."""
    return _WORD.findall(re.sub(r"\d", "0", text.lower()))


def embed(text: str) -> list[float]:
    """Embed a text as 256 floats of L2 norm 1, or all zeros for empty text. Deterministic across machines."""
    words = words_of(text[:EMBEDDED_CHARS_MAX])
    features = words + [f"{a} {b}" for a, b in pairwise(words)]
    for word in words:
        padded = f"^{word}$"
        features += [f"#{padded[i : i + 3]}" for i in range(len(padded) - 2)]
    vector = [0.0] * EMBEDDING_DIM
    for feature in features:
        code = zlib.crc32(feature.encode("utf-8", "surrogatepass"))
        vector[code % EMBEDDING_DIM] += 1.0 if code & 0x8000_0000 else -1.0
    norm = math.sqrt(sum(x * x for x in vector))
    return [x / norm for x in vector] if norm else vector


@dataclass(frozen=True, slots=True)
class Embedding:
    """A function from texts to vectors, computed in this process. Vectors of different names are never compared.

    `name` is stored with each vector and changes with anything that changes a vector. `replaces`: names of embeddings
    whose stored vectors a gateway computes again by this one.
    """

    name: str
    embed: Callable[[str], list[float]]
    replaces: tuple[str, ...] = ()
    together: Callable[[Sequence[str]], NDArray[np.float64]] | None = None

    def embed_all(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """The vectors of several texts, one a row; `together` computes them at once."""
        if self.together is not None:
            return self.together(texts)
        return np.array([self.embed(text) for text in texts]).reshape(len(texts), EMBEDDING_DIM)


HASHED = Embedding("hashing", embed)


def project(vector: Sequence[float], salt: str) -> list[float]:
    """Project an embedding of any size to EMBEDDING_DIM floats of L2 norm 1, preserving cosines.

    Cosines are exact for vectors of up to EMBEDDING_DIM numbers, and within about 1/16 beyond that: the projection is a
    count sketch with random positions and signs (Charikar et al. 2002). The draw depends on `salt`, so vectors of two
    models are unrelated. Raises ValueError unless the vector is finite and non-zero.
    """
    norm = math.sqrt(sum(x * x for x in vector))
    if not norm or not math.isfinite(norm):
        raise ValueError("an embedding must be finite and not all zeros")
    draw = Random(f"{salt} {len(vector)}")  # noqa: S311 - the same projection everywhere, no secret
    projected = [0.0] * EMBEDDING_DIM
    for position, index in enumerate(draw.sample(range(len(vector)), len(vector))):
        projected[position % EMBEDDING_DIM] += vector[index] / norm * draw.choice((1.0, -1.0))
    norm = math.sqrt(sum(x * x for x in projected))
    return [x / norm for x in projected]


def question_text(messages: Any) -> str:
    """The text of the last user message, by which tasks are compared."""
    for message in reversed(messages or []):
        if isinstance(message, Mapping) and message.get("role") == "user":
            return content_text(message.get("content"))
    return ""


def content_text(content: Any) -> str:
    """The text of a message's content. Parts are joined by newlines; a media part becomes its type in parentheses."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [str(p.get("text", "")) if p.get("type") == "text" else f"({p.get('type', 'part')})" for p in content]
    return "\n".join(parts)


PRIOR_RIGHT, PRIOR_WRONG = 2.0, 1.0  # an unknown worker counts as right two times in three, so it is tried


def smoothed_success(success_mean: float, n: float) -> float:
    """The posterior mean of a Beta(PRIOR_RIGHT, PRIOR_WRONG) prior after `n` outcomes of mean `success_mean`."""
    return (PRIOR_RIGHT + success_mean * n) / (PRIOR_RIGHT + PRIOR_WRONG + n)
