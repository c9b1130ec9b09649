"""The metrics of a step: how far the weights have moved from the log, and means over the passes of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_MAX = 20.0  # beyond it exp() would overflow and 0 · inf poison the gradient; every clip is long active


def ratio_metrics(ratio_log: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the weights have moved from the log [B, T]: per-token ratio mean and max, mean squared log-ratio (M2), k3
    towards the log, and over whole rows the mean weight (far below 1: the weights have left what was logged) and ESS ÷
    rows, which alone reads well even then. Zeros for an empty mask."""
    tokens = torch.where(mask, ratio_log.detach().double(), 0.0).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    ratio = tokens[mask].exp()
    weights_log = tokens.sum(-1)[mask.any(-1)]
    if not len(weights_log):
        return dict.fromkeys(("ratio_mean", "ratio_max", "m2", "kl_behaviour", "weight_mean", "ess_share"), 0.0)
    ess_log = 2 * weights_log.logsumexp(0) - (2 * weights_log).logsumexp(0)
    return {
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "m2": float((tokens[mask] ** 2).mean()),
        "kl_behaviour": float((ratio - 1 - tokens[mask]).mean()),
        "weight_mean": float(weights_log.clamp_max(LOG_RATIO_MAX).exp().mean()),
        "ess_share": float(ess_log.exp()) / len(weights_log),
    }


def share(hits: Tensor, mask: Tensor) -> float:
    """Share of the tokens that count that are hit."""
    return float((hits & mask).sum() / mask.sum().clamp_min(1))


class Means:
    """Weighted means and sums of metrics."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._largest: dict[str, float] = {}

    def add(self, values: dict[str, float], weight: float) -> None:
        """Values of a part of this weight; of a `…_max` the largest counts."""
        for name, value in values.items():
            if name.endswith("_max"):
                self._largest[name] = max(value, self._largest.get(name, value))
                continue
            self._totals[name] = self._totals.get(name, 0.0) + weight * value
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def sum(self, values: dict[str, float]) -> None:
        """Values that add up."""
        for name, value in values.items():
            self._totals[name] = self._totals.get(name, 0.0) + value
            self._weights[name] = 1.0

    def read(self) -> dict[str, float]:
        """All means, sums and maxima by name."""
        return {name: total / self._weights[name] for name, total in self._totals.items()} | self._largest
