"""How often a worker that checks replies errs: its verdicts beside outcomes of the same replies. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_SHARES = ("false_accepts", "false_rejects", "accepted_wrong")
SHARE_MIN = 10  # cases without which nothing is said of a share
CONFIDENCE_Z = 1.96  # 95 %, both ends
CONTRACT, VERIFY = "contract", "verify"  # `by` of a logged verdict


def wilson(successes: int, n: int, z: float) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927). `n` > 0."""
    share, square = successes / n, z * z
    middle = share + square / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    return (middle - half) / (1 + square / n), (middle + half) / (1 + square / n)


@dataclass(frozen=True, slots=True)
class Share:
    """`k` of `n` cases."""

    k: int = 0
    n: int = 0

    @property
    def is_known(self) -> bool:
        """Whether there are enough cases to say anything."""
        return self.n >= SHARE_MIN

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval at 95 %. `n` > 0."""
        return wilson(self.k, self.n, CONFIDENCE_Z)

    def as_json(self) -> dict[str, Any]:
        """The counts; the share with its ends, null where it is unknown."""
        low, high = self.interval if self.is_known else (None, None)
        ends = {"share": self.k / self.n if self.is_known else None, "low": low, "high": high}
        return {"k": self.k, "n": self.n, **{name: value and round(value, 3) for name, value in ends.items()}}


@dataclass(frozen=True, slots=True)
class CheckerErrors:
    """How often a checker errs. `false_accepts`: wrong replies that it accepted, of the wrong ones; `false_rejects`:
    right ones that it rejected, of the right ones; `accepted_wrong`: wrong ones of those that it accepted.

    The first two are of verify steps alone: a reply that misses a contract is replaced and never judged, so contracts
    tell only of accepted ones."""

    checker: str
    false_accepts: Share = Share()
    false_rejects: Share = Share()
    accepted_wrong: Share = Share()

    def as_json(self) -> dict[str, Any]:
        """The figures, for programs."""
        shares = {name: getattr(self, name).as_json() for name in _SHARES}
        return {"checker": self.checker, **shares}

    def counts(self) -> dict[str, list[int]]:
        """The counts alone, as the log has them; `errors_from_counts` is the inverse."""
        return {name: [getattr(self, name).k, getattr(self, name).n] for name in _SHARES}

    def clause(self) -> str:
        """What is known, in words, as the prompt of a planner has it. Empty where nothing is."""
        words = [
            f"{verb} {share.k} of {share.n} {what} ({_percent(share)})"
            for verb, share, what in (
                ("accepted", self.false_accepts, "wrong replies"),
                ("rejected", self.false_rejects, "right ones" if self.false_accepts.is_known else "right replies"),
            )
            if share.is_known
        ]
        if not words and self.accepted_wrong.is_known:
            share = self.accepted_wrong
            words = [f"{share.k} of {share.n} replies that it accepted were wrong ({_percent(share)})"]
        return ", ".join(words)


NO_ERRORS: Mapping[str, CheckerErrors] = MappingProxyType({})


def errors_from_counts(checker: str, counts: Mapping[str, Sequence[int]]) -> CheckerErrors:
    """What `CheckerErrors.counts` wrote. Raises KeyError and TypeError on anything else."""
    return CheckerErrors(checker, *(Share(*counts[name]) for name in _SHARES))


def _percent(share: Share) -> str:
    low, high = share.interval
    return f"{low * 100:.0f} to {high * 100:.0f} %"


def checker_errors(verdicts: Iterable[tuple[str, str, bool, bool]]) -> list[CheckerErrors]:
    """The errors of each checker, by name. `verdicts`: (checker, `verify` or `contract`, accepted by it, right by an
    outcome)."""
    counts = Counter(verdicts)
    errors = []
    for name in sorted({checker for checker, *_ in counts}):
        n = {(by, accept, right): k for (checker, by, accept, right), k in counts.items() if checker == name}
        wrong, right = (sum(n.get((VERIFY, accept, each), 0) for accept in (True, False)) for each in (False, True))
        accepted = [right for (_, accept, right), k in n.items() if accept for _ in range(k)]
        errors.append(
            CheckerErrors(
                name,
                Share(n.get((VERIFY, True, False), 0), wrong),
                Share(n.get((VERIFY, False, True), 0), right),
                Share(accepted.count(False), len(accepted)),
            )
        )
    return errors
