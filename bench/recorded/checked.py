"""What checking is worth: check-then-escalate beside one worker, agreement and repeated runs, at equal dollars.

    python -m bench.recorded.checked --data FILE [--workers a,b,…] [--splits 40] [--svg FILE] [--rows FILE]

Reads recorded runs with a recorded check of each (`checks`), such as agent tasks. Chains of two and three workers are
chosen on half of the tasks, and figures are means over the other half, over `--splits` such halves, with the difference
to the best single worker within the same dollars. Its standard error is over the halves, which overlap, and so not over
new tasks. Nothing is called and nothing is sampled: a checker that errs with a probability has its exact expectation.

- `recorded`: the reply is accepted where its recorded check was valid. Where none was recorded the chain escalates.
- `ideal`: accepted where the reply is right, at the recorded check's cost; `ideal, free`: at none.
- `agreement`: two workers, and a third where they differ. Replies without texts agree with nothing, so it always pays
  for three and answers with the third.
- `three runs`: one worker three times and a vote, which without agreement gives one run's answer.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from bench.recorded.programs import Cell
from gateway.core.pool.workers import NANO_PER_USD
from policy.evaluate.plot import Panel, panels
from policy.simulators.recordings import Recording, load
from policy.statistics.stats import bootstrap_mean

Floats = npt.NDArray[np.float64]
WORKERS = "MiniMax-M2.5,MiniMax-M2.7,Gemini-3-Flash,GPT-5.4,GPT-5.2,claude-opus-4-5,claude-opus-4-6"
BUDGETS_USD = (0.25, 0.5, 1.0, 2.0)  # a task
ERRORS = tuple(step / 20 for step in range(11))
ERRS = tuple(f"errs {percent} %" for percent in (10, 20, 30, 40, 50))  # both ways, at the recorded check's cost
CHECKERS = ("recorded", "ideal", "ideal, free", *ERRS)
CHAIN_MAX = 3


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks that every worker ran: arrays [tasks, workers]."""

    names: tuple[str, ...]
    right: Floats
    usd: Floats
    valid: Floats  # 1 where the recorded check accepts
    check_usd: Floats

    def accepts(self, checker: str) -> Floats:
        """How likely a checker accepts each reply."""
        if checker in ERRS:
            rate = int(checker.split()[1]) / 100
            return self.erring(rate, rate)
        return self.valid if checker == "recorded" else self.right

    def erring(self, false_accept: float, false_reject: float) -> Floats:
        """The same of a checker that errs with these probabilities."""
        return self.right * (1 - false_reject) + (1 - self.right) * false_accept

    def checks_usd(self, checker: str) -> Floats:
        return np.zeros_like(self.check_usd) if checker == "ideal, free" else self.check_usd


def read(path: Path, names: Sequence[str]) -> Tasks:
    """The tasks of a recording that have checks, and on which each worker has a verdict."""
    rows = [
        entry
        for entry in load(path, names).by_question.values()
        if entry.checks and all(name in entry.answers for name in names)
    ]

    def table(kind: str) -> Floats:
        return np.array([[_figure(entry, name, kind) for name in names] for entry in rows], dtype=np.float64)

    return Tasks(tuple(names), *(table(kind) for kind in ("right", "usd", "valid", "check_usd")))


def _figure(entry: Recording, name: str, kind: str) -> float:
    answer, check = entry.answers[name], entry.checks.get(name)
    if kind == "right":
        return float(answer.score or 0.0)
    if kind == "usd":
        return (answer.cost_nano or 0) / NANO_PER_USD
    if kind == "valid":
        return float(check is not None and check.valid)
    return 0.0 if check is None else check.cost_nano / NANO_PER_USD


def chain(tasks: Tasks, members: Sequence[int], accepts: Floats, check_usd: Floats) -> tuple[Floats, Floats]:
    """Expected outcome and dollars of a chain on each task: [tasks], [tasks]."""
    reached = np.ones(len(tasks.right))
    outcome, usd = np.zeros_like(reached), np.zeros_like(reached)
    for one in members[:-1]:
        usd += reached * (tasks.usd[:, one] + check_usd[:, one])
        outcome += reached * accepts[:, one] * tasks.right[:, one]
        reached = reached * (1 - accepts[:, one])
    last = members[-1]
    return outcome + reached * tasks.right[:, last], usd + reached * tasks.usd[:, last]


def policies(tasks: Tasks) -> Iterator[tuple[str, str, Floats, Floats]]:
    """(family, name, outcome [tasks], dollars [tasks]) of every policy."""
    every = range(len(tasks.names))
    for one in every:
        yield "one worker", tasks.names[one], tasks.right[:, one], tasks.usd[:, one]
        yield "three runs", tasks.names[one], tasks.right[:, one], 3 * tasks.usd[:, one]
    for size in range(2, CHAIN_MAX + 1):
        for members in permutations(every, size):
            name = ">".join(tasks.names[one] for one in members)
            for checker in CHECKERS:
                figures = chain(tasks, members, tasks.accepts(checker), tasks.checks_usd(checker))
                yield f"check: {checker}", name, *figures
            if size == CHAIN_MAX:
                yield "agreement", name, tasks.right[:, members[-1]], tasks.usd[:, list(members)].sum(1)


def by_checker(tasks: Tasks, name: str) -> str:
    """One chain by the recorded checker and by an ideal one, and its gain over its last worker."""
    members = [tasks.names.index(one) for one in name.split(">")]
    lines, last = [], members[-1]
    for checker in ("recorded", "ideal"):
        outcome, usd = chain(tasks, members, tasks.accepts(checker), tasks.checks_usd(checker))
        gain, share = bootstrap_mean(outcome - tasks.right[:, last]), usd.mean() / tasks.usd[:, last].mean()
        figures = f"{outcome.mean():.3f} ${usd.mean():.2f}, {gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"
        lines.append(f"{name}, {checker}: {figures} over {tasks.names[last]} at {share:.0%} of its dollars")
    return "\n".join(lines)


def write_rows(data: Path, names: Sequence[str], out: Path) -> None:
    """Write the tasks that are read here as a recording of their own, for `baton evaluate`."""
    lines = (gzip.open if data.suffix == ".gz" else open)(data, "rt", encoding="utf-8")
    with lines as file, out.open("w", encoding="utf-8") as rows:
        for line in file:
            row = json.loads(line)
            if row.get("checks") and all(name in row["workers"] for name in names):
                rows.write(line)


def table(tasks: Tasks, splits: int) -> str:
    """The best policy of each family within each budget, chosen on one half and judged on the other."""
    entries = [*policies(tasks)]
    families = ["one worker", *dict.fromkeys(family for family, *_ in entries if family != "one worker")]
    right, usd = (np.array([each[at] for each in entries], dtype=np.float64) for at in (2, 3))
    rows = {family: [Cell() for _ in BUDGETS_USD] for family in families}
    for split in range(splits):
        order = Random(f"checked {split}").sample(range(right.shape[1]), right.shape[1])
        train, judged = order[: len(order) // 2], order[len(order) // 2 :]
        gained, spent = right[:, train].mean(1), usd[:, train].mean(1)
        for at, budget in enumerate(BUDGETS_USD):
            base = None
            for family in families:
                fits = [i for i, each in enumerate(entries) if each[0] == family and spent[i] <= budget]
                if not fits:
                    continue
                best = max(fits, key=lambda i: (gained[i], -spent[i]))
                score = float(right[best][judged].mean())
                base = score if family == "one worker" else base
                rows[family][at].add(score, float(usd[best][judged].mean()), score if base is None else base)
    lines = ["| within, a task | " + " | ".join(f"${usd:.2f}" for usd in BUDGETS_USD) + " |"]
    lines.append("|---|" + "---|" * len(BUDGETS_USD))
    lines += [f"| {family} | " + " | ".join(map(str, cells)) + " |" for family, cells in rows.items()]
    return "\n".join(lines)


# ---------------------------------------------------------------- how often a checker may err


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracy of one chain, and of its best member alone, by a checker's error rate."""

    name: str
    alone: str
    points: tuple[tuple[float, float, float, float, float], ...]  # error, gain, low, high, dollars
    kind: str

    @property
    def stops(self) -> float | None:
        """The error rate at which the gain over the best member is gone; None: not up to a half."""
        for (error, gain, *_), (later, lost, *_) in zip(self.points, self.points[1:], strict=False):
            if gain > 0 >= lost:
                return error + (later - error) * gain / (gain - lost)
        return None


def curve(tasks: Tasks, name: str, kind: str) -> Curve:
    """`kind`: which error the rate is of: `accept`, `reject` or `both`."""
    members = [tasks.names.index(one) for one in name.split(">")]
    alone = max(members, key=lambda one: float(tasks.right[:, one].mean()))
    points = []
    for error in ERRORS:
        accepts = tasks.erring(error if kind != "reject" else 0.0, error if kind != "accept" else 0.0)
        outcome, usd = chain(tasks, members, accepts, tasks.check_usd)
        gain = bootstrap_mean(outcome - tasks.right[:, alone])
        points.append((error, gain.value, gain.low, gain.high, float(usd.mean())))
    return Curve(name, tasks.names[alone], tuple(points), kind)


def drawn(tasks: Tasks, names: Sequence[str]) -> str:
    """Accuracy by error rate, a panel a chain; the lines are stretched from 0.6 … 1.0 to the panel's 0 … 100 %."""
    every = []
    for name in names:
        lines = {}
        for kind in ("both", "accept", "reject"):
            line = curve(tasks, name, kind)
            base = float(tasks.right[:, tasks.names.index(line.alone)].mean())
            lines[kind] = [(error, _stretched(base + gain)) for error, gain, *_ in line.points]
        marks = {f"{error:g}": error for error in ERRORS[::2]}
        every.append(Panel(f"{name}: right, 60 % to 100 %, by the checker's error rate", ERRORS[-1], lines, marks))
    return panels("Check, then escalate: what a checker's errors cost", every)


def _stretched(share: float) -> float:
    return min(1.0, max(0.0, (share - 0.6) / 0.4))


def main() -> None:
    """Print the table and the curves; draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", default=WORKERS)
    parser.add_argument("--splits", type=int, default=40)
    parser.add_argument("--chains", default="MiniMax-M2.7>claude-opus-4-5,MiniMax-M2.5>GPT-5.4>claude-opus-4-5")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--rows", type=Path, help="write the tasks as a recording, for `baton evaluate`")
    options = parser.parse_args()
    tasks = read(options.data, options.workers.split(","))
    if options.rows:
        write_rows(options.data, tasks.names, options.rows)
    print(f"{len(tasks.right)} tasks, {len(tasks.names)} workers\n")
    for at, name in enumerate(tasks.names):
        accept = tasks.valid[:, at]
        wrong, right = 1 - tasks.right[:, at], tasks.right[:, at]
        lets, stops = (accept * wrong).sum() / wrong.sum(), ((1 - accept) * right).sum() / right.sum()
        usd = tasks.usd[:, at].mean()
        print(f"{name}: {right.mean():.3f} ${usd:.2f}, false accepts {lets:.2f}, false rejects {stops:.2f}")
    print(f"\n{table(tasks, options.splits)}\n")
    chains = options.chains.split(",")
    for name in chains:
        print(by_checker(tasks, name))
        for kind in ("both", "accept", "reject"):
            one = curve(tasks, name, kind)
            print(f"{name}, errors of {kind}, over {one.alone}; gone at {one.stops}")
            print("  " + "; ".join(f"{e:g}: {g:+.3f} ({a:+.3f} to {b:+.3f}) ${u:.2f}" for e, g, a, b, u in one.points))
    if options.svg:
        options.svg.write_text(drawn(tasks, chains), encoding="utf-8")


if __name__ == "__main__":
    main()
