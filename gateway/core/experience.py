"""Experience: what workers did on tasks like this one, and the text embedding that says what "like" means. Pure.

The default embedding is signed feature hashing (Weinberger et al. 2009) of words, word pairs and character
trigrams into 256 dimensions, L2-normalised; digits become 0, so that two sums with other numbers are alike.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

EMBEDDING_DIM = 256
EMBEDDED_CHARS_MAX = 4_000
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


def smoothed_success(weights: RuleWeights, success_mean: float, n: int) -> float:
    """Posterior mean of a Beta prior (prior_right, prior_wrong) after `n` outcomes with that mean."""
    right = weights.prior_right + success_mean * n
    return right / (weights.prior_right + weights.prior_wrong + n)


def rule_utility(weights: RuleWeights, success: float, latency_s: float, cost_usd: float) -> float:
    """w1·success + w2/latency − w3·cost; latency is floored at 0.1 s so that speed alone cannot win."""
    return weights.success * success + weights.latency / max(latency_s, 0.1) - weights.cost * cost_usd
