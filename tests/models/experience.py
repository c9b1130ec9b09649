"""How past steps count by their questions: the model that the database's query of experience is held to."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.core.loop.experience import NEAR, NEAREST, SPREAD_MIN


def likeness(similarities: Sequence[float]) -> list[float]:
    """Where past tasks stand by their similarities to the question: 0 no nearer than their mean, 1 the nearest of all.
    Free of the embedding's scale and offset; all alike, all are nearest."""
    if not similarities:
        return []
    mean = math.fsum(similarities) / len(similarities)
    spread = max(similarities) - mean
    if spread <= SPREAD_MIN:
        return [1.0] * len(similarities)
    return [max(0.0, (each - mean) / spread) for each in similarities]


def nearness(alike: float) -> float:
    """What a step counts for by the likeness of its task: nothing up to NEAR, in full from NEAREST on."""
    return min(1.0, max(0.0, (alike - NEAR) / (NEAREST - NEAR)))


def freshness(newer: float, half_life: float) -> float:
    """What a step counts for, in (0, 1], after newer ones of the same worker whose likeness adds up to `newer`."""
    return float(0.5 ** (newer / half_life))
