"""Where a candidate is judged, and the evaluation that this comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from policy.environments.arena import Staff
from policy.evaluate.options import NEIGHBOURS, ROUNDS, TRAIN_QUESTIONS_MAX, EvaluationOptions
from policy.gate.injection import DRAWS
from policy.gate.logged import RolloutSource

QUESTIONS_ARENA = 600
# a pool of its own for every question leaves no fixed worker to compare with
STANDS_FOR: Mapping[Staff, Staff] = {"fresh": "standard"}
BASELINES = ("random", "cheapest", "rule", "table", "cascade", "vote")


@dataclass(frozen=True, slots=True)
class GateScene:
    """An environment with its held-out questions, logged rollouts where there are any, and where the report goes.

    `out`: the JSON report; finished work is kept beside it in OUT.partial until it is written.
    """

    out: Path
    env: Literal["replay", "arena"] = "arena"
    data: Path | None = None  # replay: recorded answers
    prices: Path | None = None
    workers: tuple[str, ...] = ()
    staff: Staff = "standard"  # arena
    split: Literal["all", "validation", "train"] | None = None
    train: Path | None = None
    n: int | None = None  # questions; None: all, in the arena QUESTIONS_ARENA
    train_n: int = TRAIN_QUESTIONS_MAX
    neighbours: int = NEIGHBOURS  # training questions behind the experience that is shown
    logged: RolloutSource | None = None
    seed: int = 0
    threads: int = 2
    rounds: int | None = None  # plans a question; None: as many as the candidate is served with
    draws: int = DRAWS  # orders of the pool in which each conversation of the injection set is put

    def evaluation(self, policies: tuple[str, ...]) -> EvaluationOptions:
        """The held-out run as an evaluation. Raises ConfigError."""
        return EvaluationOptions(
            out=self.out,
            policies=policies,
            env=self.env,
            data=self.data,
            prices=self.prices,
            workers=self.workers,
            staff=STANDS_FOR.get(self.staff, self.staff),
            split=self.split,
            train=self.train,
            n=QUESTIONS_ARENA if self.n is None and self.env == "arena" else self.n,
            train_n=self.train_n,
            seed=self.seed,
            rounds=ROUNDS if self.rounds is None else self.rounds,
            neighbours=self.neighbours,
            threads=self.threads,
        )
