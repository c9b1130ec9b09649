"""Where a candidate is judged, and the evaluation that this comes to."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from gateway.errors import ConfigError
from policy.evaluate.asked import Asked
from policy.evaluate.asked import add as add_evaluation
from policy.evaluate.asked import read as read_evaluation
from policy.gate.injection import DRAWS
from policy.gate.logged import LoggedSource

QUESTIONS_ARENA = 600
STANDS_FOR = {"fresh": "standard"}  # a pool of its own for every question leaves no fixed worker to compare with
BASELINES = ("random", "cheapest", "rule", "table", "cascade", "vote")


class _Words(argparse.ArgumentParser):
    """A parser that does not end the program."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(message)


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
    staff: str = "standard"  # arena
    split: str | None = None
    train: Path | None = None
    n: int | None = None  # questions; None: all, in the arena QUESTIONS_ARENA
    train_n: int | None = None
    neighbours: int | None = None  # training questions behind the experience that is shown
    logged: LoggedSource | None = None
    seed: int = 0
    threads: int = 2
    rounds: int | None = None  # plans a question; None: as many as the candidate is served with
    draws: int = DRAWS  # orders of the pool in which each conversation of the injection set is put

    def evaluation(self, policies: tuple[str, ...]) -> Asked:
        """The held-out run in the words of `evaluate`. Raises ConfigError."""
        parser = _Words(add_help=False)
        add_evaluation(parser)
        n = QUESTIONS_ARENA if self.n is None and self.env == "arena" else self.n
        given = {
            "out": self.out,
            "env": self.env,
            "data": self.data,
            "prices": self.prices,
            "workers": ",".join(self.workers) or None,
            "staff": STANDS_FOR.get(self.staff, self.staff),
            "split": self.split,
            "train": self.train,
            "n": n,
            "train-n": self.train_n,
            "experience": self.neighbours,
            "seed": self.seed,
            "threads": self.threads,
            "rounds": self.rounds,
        }
        words = [f"--{name}={value}" for name, value in given.items() if value is not None]
        return read_evaluation(parser.parse_args([*words, *(f"--policy={name}" for name in policies)]))
