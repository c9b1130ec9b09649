"""Weights of past steps by their questions: the model that `core.loop.experience.recall` must match."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.core.loop.experience.likeness import NEAR, NEAREST, SPREAD_MIN


def likeness(similarities: Sequence[float]) -> list[float]:
    """Scale similarities to the question: 0 is their mean or less, 1 the nearest task.
    The embedding's scale and offset cancel out. If all are equal, all are nearest."""
    if not similarities:
        return []
    mean = math.fsum(similarities) / len(similarities)
    spread = max(similarities) - mean
    if spread <= SPREAD_MIN:
        return [1.0] * len(similarities)
    return [max(0.0, (each - mean) / spread) for each in similarities]


def nearness(alike: float) -> float:
    """Weight of a step by the likeness of its task: 0 up to NEAR, 1 from NEAREST on."""
    return min(1.0, max(0.0, (alike - NEAR) / (NEAREST - NEAR)))
