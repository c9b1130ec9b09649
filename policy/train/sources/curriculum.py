"""Which questions a step asks: those whose outcome is most in doubt, and some at random. Pure.

A question's weight is p(1−p)+ε: G answers to a question that always succeeds, or never, have one reward and teach
nothing (dead groups, DESIGN §7). p is a running mean over what the policy did, backed by its category's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

PRIOR_EPISODES = 8.0  # weight of the category's mean in a question's
MEMORY = 0.7  # of a mean at its next sight: the policy changes
CATEGORY_MEMORY = 0.95


@dataclass(slots=True)
class Mean:
    """A forgetting mean: `weight` is how many episodes it stands for."""

    weight: float = 0.0
    mean: float = 0.5

    def add(self, values: Sequence[float], memory: float) -> None:
        """Episodes that were just seen."""
        remaining = self.weight * memory
        self.mean = (remaining * self.mean + sum(values)) / (remaining + len(values))
        self.weight = remaining + len(values)


@dataclass(slots=True)
class Curriculum:
    """`categories`: of every question, by id. `agreeing`: questions where it makes no difference who is asked."""

    categories: Mapping[str, str]
    explore_share: float
    floor: float
    agreeing: frozenset[str] = frozenset()
    agreeing_weight: float = 1.0
    seen: dict[str, Mean] = field(default_factory=dict)
    by_category: dict[str, Mean] = field(default_factory=dict)

    def chosen(self, count: int, rng: Random) -> list[str]:
        """`count` different questions: a share at random, the rest by weight (Efraimidis and Spirakis 2006)."""
        ids = list(self.categories)
        count = min(count, len(ids))
        random = rng.sample(ids, round(count * self.explore_share))
        taken = set(random)
        keys = {one: self._key(one, rng) for one in ids}
        best = heapq.nlargest(count - len(random), (one for one in ids if one not in taken), key=keys.__getitem__)
        return [*random, *best]

    def _key(self, question: str, rng: Random) -> float:
        weight = self.weight(question)
        return math.log(1.0 - rng.random()) / weight if weight > 0 else -math.inf

    def weight(self, question: str) -> float:
        """How much asking it is expected to teach, in (0, 1/4 + ε]."""
        p = self.success(question)
        agreed = self.agreeing_weight if question in self.agreeing else 1.0
        return agreed * (p * (1.0 - p) + self.floor)

    def success(self, question: str) -> float:
        """How often the policy is right on it, as far as is known."""
        category = self.by_category.get(self.categories[question], Mean())
        own = self.seen.get(question, Mean())
        return (own.weight * own.mean + PRIOR_EPISODES * category.mean) / (own.weight + PRIOR_EPISODES)

    def learn(self, question: str, outcomes: Sequence[float]) -> None:
        """What came of asking it."""
        if outcomes:
            self.seen.setdefault(question, Mean()).add(outcomes, MEMORY)
            self.by_category.setdefault(self.categories[question], Mean()).add(outcomes, CATEGORY_MEMORY)

    def state(self) -> dict[str, Any]:
        """All that was learnt, as plain data."""
        return {
            "seen": {one: [mean.weight, mean.mean] for one, mean in self.seen.items()},
            "by_category": {one: [mean.weight, mean.mean] for one, mean in self.by_category.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.seen = {one: Mean(*pair) for one, pair in state["seen"].items()}
        self.by_category = {one: Mean(*pair) for one, pair in state["by_category"].items()}
