"""Worth: what a right answer is worth in dollars and in seconds, and so what a call's price takes off it. Pure.

It is a preference of the request, its key, its pool or the settings. Where none of them says, a right answer is worth
what `CALLS_WORTH` calls of the pool's dearest model cost on tasks like this one: then dollars decide between workers
that are about equally right, and never between one that is right and one that is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

CALLS_WORTH = 10.0
SECONDS_WORTH = 60.0
PENALTY_MAX, SECONDS_PENALTY_MAX = 1.0, 0.1  # off a right answer at most: of dollars, and of seconds by default
NEUTRAL = 5  # the place of the dial that changes nothing
DIAL_END = 9  # the place from which only right answers count
FREE_USD = 1e-9  # of a pool whose models cost nothing


@dataclass(frozen=True, slots=True)
class Worth:
    """What a right answer is worth. `by`: who says so: request, key, pool, settings or prices."""

    usd: float
    seconds: float = SECONDS_WORTH
    by: str = "prices"
    seconds_max: float = SECONDS_PENALTY_MAX  # what seconds take off at most

    def penalty(self, usd: float, latency_s: float) -> float:
        """What a call's dollars and seconds take off a right answer, in right answers."""
        slow = min(self.seconds_max, max(0.0, latency_s) / self.seconds)
        return min(PENALTY_MAX, usd / self.usd) + slow

    def at(self, quality: int | None) -> Worth:
        """The same at a place of the dial, 0 to 9: each place doubles it, and at 9 only right answers count."""
        if quality is None:
            return self
        factor = math.inf if quality >= DIAL_END else 2.0 ** (quality - NEUTRAL)
        return Worth(self.usd * factor, self.seconds * factor, "request", self.seconds_max)

    def as_json(self) -> dict[str, Any]:
        """The worth as JSON data; null: no dollar and no second counts."""
        usd, seconds = (None if math.isinf(each) else each for each in (self.usd, self.seconds))
        return {"usd": usd, "seconds": seconds, "by": self.by}


def by_prices(calls_usd: Iterable[float]) -> Worth:
    """The worth in a pool whose models' calls cost this much, where nobody says what an answer is worth."""
    return Worth(max(FREE_USD, CALLS_WORTH * max(calls_usd, default=0.0)))


def preferred(default: Worth, preferences: Iterable[tuple[str, Mapping[str, Any] | None]]) -> Worth:
    """The worth by (who, {usd, seconds}), the most special first; what none of them says is the default's."""
    given = [(who, preference) for who, preference in preferences if preference]
    if not given:
        return default
    merged = {name: float(value) for _, preference in reversed(given) for name, value in preference.items()}
    # Whoever says what seconds are worth lets them decide.
    most = PENALTY_MAX if "seconds" in merged else default.seconds_max
    return Worth(merged.get("usd", default.usd), merged.get("seconds", default.seconds), given[0][0], most)
