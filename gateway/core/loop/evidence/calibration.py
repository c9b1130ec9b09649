"""How far a judge agrees with whoever is believed more: its verdicts beside theirs on the same replies. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Calibration:
    """Replies that both a judge and a reference judged, by what each said: numbers of replies, or their weights.
    `judge`: a worker, a grader's version, or the source of an outcome."""

    judge: str
    right_accepted: float = 0  # right by the reference, accepted by the judge
    right_rejected: float = 0
    wrong_accepted: float = 0
    wrong_rejected: float = 0

    @property
    def right(self) -> float:
        """The replies that were right."""
        return self.right_accepted + self.right_rejected

    @property
    def wrong(self) -> float:
        """The replies that were wrong."""
        return self.wrong_accepted + self.wrong_rejected

    @property
    def n(self) -> float:
        """The replies that both judged."""
        return self.right + self.wrong

    @property
    def agreement(self) -> float:
        """The share of replies of which both say the same. Undefined without any."""
        return (self.right_accepted + self.wrong_rejected) / self.n

    @property
    def kappa(self) -> float:
        """Agreement beyond that of two who say `right` as often and at random (Cohen 1960): 1 at best, 0 for none. 0
        where both always say the same word, for then nothing tells them from chance."""
        accepted = self.right_accepted + self.wrong_accepted
        by_chance = (self.right * accepted + self.wrong * (self.n - accepted)) / self.n**2
        return 0.0 if by_chance == 1 else (self.agreement - by_chance) / (1 - by_chance)

    def as_json(self) -> dict[str, Any]:
        """The figures, for programs and for people. A share without a case is null."""
        return {
            "judge": self.judge,
            "n": round(self.n),
            "agreement": round(self.agreement, 3),
            "kappa": round(self.kappa, 3),
            "false_accepts": round(self.wrong_accepted / self.wrong, 3) if self.wrong else None,
            "false_rejects": round(self.right_rejected / self.right, 3) if self.right else None,
        }


def calibrated(pairs: Iterable[tuple[str, bool, bool]]) -> list[Calibration]:
    """The calibration of each judge, by name. `pairs`: of each reply (judge, accepted by it, right by a person)."""
    counts = Counter(pairs)
    names = sorted({judge for judge, _, _ in counts})
    return [
        Calibration(
            name,
            right_accepted=counts[name, True, True],
            right_rejected=counts[name, False, True],
            wrong_accepted=counts[name, True, False],
            wrong_rejected=counts[name, False, False],
        )
        for name in names
    ]
