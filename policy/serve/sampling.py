"""From logits to a token and its behaviour log-probs. Pure.

The order is vLLM's with `--logprobs-mode processed_logprobs`: grammar mask, temperature, top-p, log-softmax. Greedy
(temperature 0) reports the masked distribution at temperature 1, as vLLM does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from policy.serve.shape import Array

LogProbs = npt.NDArray[np.float64]
GREEDY_BELOW = 1e-5  # vLLM's bound


def allowed_tokens(bitmask: bytes, vocab: int) -> npt.NDArray[np.bool_]:
    """One bit per token (little-endian within each byte) as a boolean vector [vocab]."""
    return np.unpackbits(np.frombuffer(bitmask, dtype=np.uint8), count=vocab, bitorder="little").astype(bool)


def behaviour_logprobs(
    logits: Array, allowed: npt.NDArray[np.bool_] | None, temperature: float, top_p: float
) -> LogProbs:
    """Log-probs [vocab] of what will really be drawn; -inf for what cannot be."""
    scores = logits.astype(np.float64)
    if allowed is not None:
        scores[~allowed] = -np.inf
    if temperature >= GREEDY_BELOW:
        scores /= temperature
        if top_p < 1.0:
            scores[~_nucleus(scores, top_p)] = -np.inf
    return log_softmax(scores)


def log_softmax(scores: LogProbs) -> LogProbs:
    """Normalised log-probs; at least one score must be finite."""
    shifted = scores - scores.max()
    normalised: LogProbs = shifted - np.log(np.exp(shifted).sum())
    return normalised


def _nucleus(scores: LogProbs, top_p: float) -> npt.NDArray[np.bool_]:
    """The smallest set of likeliest tokens whose mass reaches `top_p` (arXiv:1904.09751)."""
    order = np.argsort(-scores, kind="stable")
    mass = np.exp(log_softmax(scores))[order]
    keep = np.zeros(scores.shape, dtype=bool)
    keep[order[np.cumsum(mass) - mass < top_p]] = True
    return keep


def draw(logprobs: LogProbs, temperature: float, random: np.random.Generator) -> int:
    """The likeliest token when greedy, else one drawn by inverting the cumulative distribution."""
    if temperature < GREEDY_BELOW:
        return int(logprobs.argmax())
    cumulative = np.cumsum(np.exp(logprobs))
    return int(np.searchsorted(cumulative, random.random() * cumulative[-1], side="right"))


def top_tokens(logprobs: LogProbs, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens that can be drawn, likeliest first."""
    order = np.argsort(-logprobs, kind="stable")[:count]
    return [(int(token), float(logprobs[token])) for token in order if np.isfinite(logprobs[token])]
