"""Experience: what workers did on tasks like this one, and the text embedding that says what "like" means. Pure.

The default embedding is signed feature hashing (Weinberger et al. 2009) of words, word pairs and character
trigrams into 256 dimensions, L2-normalised; digits become 0, so that two sums with other numbers are alike.

A worker's past steps count by how near their question was, and half as much for every `half_life` newer ones like it:
what was true once is forgotten, but not because the worker did other things since. tests/models/experience.py states
both as formulas.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

EMBEDDING_DIM = 256
EMBEDDED_CHARS_MAX = 4_000
NEAR, NEAREST = 0.4, 0.7  # likeness of a past task to count at all, and to count in full
HALF_LIFE = 5.0  # newer steps, by likeness, after which one counts half
WEIGHT_MIN = 0.5  # of all that counts for a worker; with less nothing is known of it
SPREAD_MIN = 1e-6  # similarities that differ by no more are equal
TASK_TYPE_SIMILARITY = 1.0  # what the same task type adds to the cosine
_WORD = re.compile(r"[^\W_]+|[^\w\s]")


def embed(text: str) -> list[float]:
    """Text → 256 floats of length 1 (all zeros for empty text). Deterministic across processes and machines."""
    words = _WORD.findall(re.sub(r"\d", "0", text[:EMBEDDED_CHARS_MAX].lower()))
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


def fitted(vector: Sequence[float], salt: str) -> list[float]:
    """Any embedding → EMBEDDING_DIM floats of length 1, cosines kept: exactly up to EMBEDDING_DIM numbers, beyond that
    within about 1/16 (places and signs drawn at random: a count sketch, Charikar et al. 2002).

    The draw follows from `salt`, so vectors of two models are strangers to each other. Raises ValueError on no finite,
    non-zero vector.
    """
    norm = math.sqrt(sum(x * x for x in vector))
    if not norm or not math.isfinite(norm):
        raise ValueError("an embedding must be finite and not all zeros")
    draw = Random(f"{salt} {len(vector)}")  # noqa: S311 - the same projection everywhere, no secret
    found = [0.0] * EMBEDDING_DIM
    for place, index in enumerate(draw.sample(range(len(vector)), len(vector))):
        found[place % EMBEDDING_DIM] += vector[index] / norm * draw.choice((1.0, -1.0))
    norm = math.sqrt(sum(x * x for x in found))
    return [x / norm for x in found]


def question_text(messages: Any) -> str:
    """The last user message as text: what a task is compared by."""
    for message in reversed(messages or []):
        if isinstance(message, Mapping) and message.get("role") == "user":
            return content_text(message.get("content"))
    return ""


def content_text(content: Any) -> str:
    """The text of a message's content, parts joined by newlines; media parts are named, not quoted."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [str(p.get("text", "")) if p.get("type") == "text" else f"({p.get('type', 'part')})" for p in content]
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class RuleWeights:
    """Weights of the rule: success counts for, seconds and dollars against."""

    success: float = 1.0
    latency: float = 0.05
    cost: float = 20.0
    prior_right: float = 2.0  # an unseen worker counts as 2 right of 3: tried until it disappoints
    prior_wrong: float = 1.0
    hope: float = 20.0  # right answers that every worker is credited with where the rule explores


def smoothed_success(weights: RuleWeights, success_mean: float, n: int, hope: float = 0.0) -> float:
    """Posterior mean of a Beta prior (prior_right + hope, prior_wrong) after `n` outcomes with that mean."""
    right = weights.prior_right + hope + success_mean * n
    return right / (weights.prior_right + weights.prior_wrong + hope + n)


def rule_utility(weights: RuleWeights, success: float, latency_s: float, cost_usd: float) -> float:
    """w1·success + w2/latency − w3·cost; latency is floored at 0.1 s so that speed alone cannot win."""
    return weights.success * success + weights.latency / max(latency_s, 0.1) - weights.cost * cost_usd
