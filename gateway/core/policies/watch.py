"""When a version is worse than another, from what both did on live traffic. Pure; a person decides nothing here.

Four figures, in this order: plan validity, failed requests, outcomes, dollars. A version is worse when the interval
for the difference lies wholly beyond a margin: Newcombe's hybrid score interval for shares (Newcombe 1998, method 10),
Welch's for means. The width is `z` = 3.3 standard errors on each side (one look: 1 in 2,000), because the look is
repeated; the margins do the rest. `tests/unit/policies/test_watch.py` measures how often two equal versions are told
apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.core.loop.replies.errors import wilson

OTHERS_MIN = 10  # outcomes of other organisations that can speak against those of one
Cause = Literal["validity", "errors", "outcome", "cost"]
# fallbacks of requests whose conductor gave no plan: its server hung or was away, whatever the version's weights
SERVER_FAULTS = ("conductor_down", "conductor_slow", "conductor_refused")


@dataclass(frozen=True, slots=True)
class Figures:
    """What one version did on its latest requests, without those of SERVER_FAULTS: only what its weights did counts.
    `valid`: its own plans were used. `judged`: with an outcome."""

    version: str
    requests: int = 0
    valid: int = 0
    failed: int = 0
    judged: int = 0
    outcome_sum: float = 0.0
    outcome_square_sum: float = 0.0
    cost_nano_sum: int = 0
    cost_nano_square_sum: float = 0.0
    outcomes_by_org: Mapping[str, Sequence[float]] = field(default_factory=dict)  # (number, sum) of each organisation's

    def outcomes_but(self, org: str) -> tuple[float, float]:
        """Number and sum of the outcomes of all organisations but one."""
        n, total = self.outcomes_by_org.get(org, (0, 0.0))
        return self.judged - n, self.outcome_sum - total

    @property
    def validity(self) -> float | None:
        """Share of requests whose plans were its own; None before the first."""
        return self.valid / self.requests if self.requests else None

    @property
    def outcome_mean(self) -> float | None:
        """Over judged requests."""
        return self.outcome_sum / self.judged if self.judged else None

    @property
    def cost_nano_mean(self) -> float | None:
        """Nano-dollars a request, planning included."""
        return self.cost_nano_sum / self.requests if self.requests else None


@dataclass(frozen=True, slots=True)
class Margins:
    """How much worse is too much. Shares are absolute, `cost_share` is of the other's mean."""

    requests_min: int = 30  # of each, before validity, errors and cost are compared
    outcomes_min: int = 30  # of each, before outcomes are
    validity: float = 0.02
    errors: float = 0.02
    outcome: float = 0.03
    cost_share: float = 0.5
    z: float = 3.3


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a version is to be taken back."""

    cause: Cause
    said: str


def judge(version: Figures, other: Figures, margins: Margins) -> Verdict | None:
    """The first figure in which `version` is surely worse than `other`; None: none, or too little is known."""
    seen = min(version.requests, other.requests) >= margins.requests_min
    if seen and (worse := _less_valid(version, other, margins) or _more_failed(version, other, margins)):
        return worse
    if min(version.judged, other.judged) >= margins.outcomes_min:
        by = _outcome_drop(version, other, margins.z)
        if by > margins.outcome and not _others_disagree(version, other):
            return _verdict("outcome", "outcomes average", version.outcome_mean, other.outcome_mean, by)
    return _dearer(version, other, margins) if seen else None


def _others_disagree(version: Figures, other: Figures) -> bool:
    """Whether outcomes speak against the version because of one organisation alone: without its outcomes those of the
    others, if there are a few, say that the version is no worse."""
    for org in {*version.outcomes_by_org, *other.outcomes_by_org}:
        (mine, my_sum), (theirs, their_sum) = version.outcomes_but(org), other.outcomes_but(org)
        if min(mine, theirs) >= OTHERS_MIN and my_sum / mine >= their_sum / theirs:
            return True
    return False


def _less_valid(version: Figures, other: Figures, margins: Margins) -> Verdict | None:
    by = _share_drop(version.valid, version.requests, other.valid, other.requests, margins.z)
    return _verdict("validity", "plans used", version.validity, other.validity, by) if by > margins.validity else None


def _more_failed(version: Figures, other: Figures, margins: Margins) -> Verdict | None:
    by = _share_drop(other.failed, other.requests, version.failed, version.requests, margins.z)
    shares = version.failed / version.requests, other.failed / other.requests
    return _verdict("errors", "requests failed", *shares, by) if by > margins.errors else None


def _verdict(cause: Cause, what: str, mine: float | None, theirs: float | None, by: float) -> Verdict:
    return Verdict(cause, f"{what}: {mine or 0:.3f} against {theirs or 0:.3f}, at least {by:.3f} worse")


def _share_drop(mine: int, n: int, theirs: int, m: int, z: float) -> float:
    """Lower end of Newcombe's interval for (their share − my share)."""
    share, my_share = theirs / m, mine / n
    low, my_high = wilson(theirs, m, z)[0], wilson(mine, n, z)[1]
    return share - my_share - math.sqrt((share - low) ** 2 + (my_high - my_share) ** 2)


def _outcome_drop(version: Figures, other: Figures, z: float) -> float:
    """Lower end of Welch's interval for (their mean outcome − mine), the variances no less than one dissent gives."""
    difference = other.outcome_sum / other.judged - version.outcome_sum / version.judged
    variance = sum(_mean_variance(one.outcome_sum, one.outcome_square_sum, one.judged) for one in (version, other))
    return difference - z * math.sqrt(variance)


def _mean_variance(total: float, squares: float, n: int) -> float:
    """Variance of a mean in [0, 1]: with one observation at each end added, so that unanimity is not certainty."""
    n, total, squares = n + 2, total + 1, squares + 1
    return max(0.0, squares / n - (total / n) ** 2) / n


def _dearer(version: Figures, other: Figures, margins: Margins) -> Verdict | None:
    """Costs compared as means over requests, by Welch's interval."""
    mine, theirs = version.cost_nano_sum / version.requests, other.cost_nano_sum / other.requests
    spread = math.sqrt(_cost_variance(version) + _cost_variance(other) * (1 + margins.cost_share) ** 2)
    if theirs <= 0 or mine - theirs * (1 + margins.cost_share) <= margins.z * spread:
        return None
    message = f"a request costs ${mine / 1e9:.6f} against ${theirs / 1e9:.6f}, over {1 + margins.cost_share:g} times"
    return Verdict("cost", message)


def _cost_variance(figures: Figures) -> float:
    n = figures.requests
    mean = figures.cost_nano_sum / n
    return max(0.0, figures.cost_nano_square_sum / n - mean * mean) / max(1, n - 1)
