"""Experience from observed questions, as the gateway shows it: each worker's means over the nearest ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gateway.core.loop.experience import embed
from gateway.service.ports.request import WorkerExperience
from policy.statistics.tuning import Observation


class Nearest:
    """What every worker did on the `k` most similar of the observed questions (cosine of the gateway's embedding).

    Every worker was observed on every question, at no time of its own: so nothing is forgotten, and nearness is rank.

    A client's task type, which the store looks at first, is not used: replayed questions come without one.
    """

    def __init__(self, observed: Sequence[Observation], k: int) -> None:
        """Raises ValueError on no questions, or a `k` below 1."""
        if not observed or k < 1:
            raise ValueError(f"needs questions to be near to and k ≥ 1, not {len(observed)} and {k}")
        self._observed = observed
        self._k = k
        self._vectors = np.array([embed(each.question) for each in observed])

    def of(self, question: str, without: str | None = None) -> Mapping[str, WorkerExperience]:
        """By worker name. Of equally near questions the first observed count; those that read `without` do not."""
        order = np.argsort(-(self._vectors @ np.array(embed(question))), kind="stable")[: 2 * self._k].tolist()
        near = [index for index in order if self._observed[index].question != without][: self._k]
        results: dict[str, list[tuple[float, int, float]]] = {}
        for index in near:
            for name, result in self._observed[index].results.items():
                results.setdefault(name, []).append((result.outcome, result.cost_nano, result.latency_s * 1000))
        return {name: _mean(name, found) for name, found in results.items()}


def _mean(name: str, found: Sequence[tuple[float, int, float]]) -> WorkerExperience:
    success, cost, latency_ms = (sum(column) / len(found) for column in zip(*found, strict=True))
    return WorkerExperience(name, len(found), success, round(cost), round(latency_ms))
