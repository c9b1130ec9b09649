"""How far a judge agrees with people: its verdicts beside people's judgements of the same replies. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Calibration:
    """Replies that both a judge and a person judged, by what each said. `judge`: a worker, or a grader's version."""

    judge: str
    right_accepted: int = 0  # right by the person, accepted by the judge
    right_rejected: int = 0
    wrong_accepted: int = 0
    wrong_rejected: int = 0

    @property
    def n(self) -> int:
        """The replies that both judged."""
        return self.right_accepted + self.right_rejected + self.wrong_accepted + self.wrong_rejected

    @property
    def agreement(self) -> float:
        """The share of replies of which both say the same. Undefined without any."""
        return (self.right_accepted + self.wrong_rejected) / self.n

    @property
    def kappa(self) -> float:
        """Agreement beyond that of two who say `right` as often and at random (Cohen 1960): 1 at best, 0 for none. 0
        where both always say the same word, for then nothing tells them from chance."""
        right, accepted = self.right_accepted + self.right_rejected, self.right_accepted + self.wrong_accepted
        by_chance = (right * accepted + (self.n - right) * (self.n - accepted)) / self.n**2
        return 0.0 if by_chance == 1 else (self.agreement - by_chance) / (1 - by_chance)

    def as_json(self) -> dict[str, Any]:
        """The figures, for programs and for people. A share without a case is null."""
        right, wrong = self.right_accepted + self.right_rejected, self.wrong_accepted + self.wrong_rejected
        return {
            "judge": self.judge,
            "n": self.n,
            "agreement": round(self.agreement, 3),
            "kappa": round(self.kappa, 3),
            "false_accepts": round(self.wrong_accepted / wrong, 3) if wrong else None,
            "false_rejects": round(self.right_rejected / right, 3) if right else None,
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
