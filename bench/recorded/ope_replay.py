"""The error of off-policy estimates: each estimator against the truth, on recorded answers.

`python -m bench.recorded.ope_replay FILE --workers a,b,c` prints a Markdown table. A recording tells what *every*
worker does on every question, so the value of any policy is known exactly, while the estimators are shown only one
logged worker a question. Half of the questions make the policies; the other half is logged from and judged on.

A line of FILE (JSONL, also .gz): `{"id", "domain", "workers": {model: {"correct": bool, "cost_usd": number}}}`;
anything else in it is ignored.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.core.pool.workers import NANO_PER_USD
from policy.reward import RewardSettings, reward
from policy.simulators.recordings import LINE_BYTES_MAX, QUESTIONS_MAX, BadRecording
from policy.statistics.ope import LoggedSample, OffPolicyReport, OpeSettings, RewardTable, estimate, fold_of
from policy.statistics.stats import Floats

RESAMPLES = 300


@dataclass(frozen=True, slots=True)
class World:
    """Full information: the reward and price of every worker on every question."""

    ids: list[str]
    domains: list[str]
    rewards: Floats  # [questions, workers]
    costs_usd: Floats  # [questions, workers]


def read_world(path: Path, workers: Sequence[str], settings: RewardSettings) -> World:
    """Questions that every worker of `workers` answered. Raises BadRecording naming file:line and the fix."""
    world = World([], [], np.zeros((0, 0)), np.zeros((0, 0)))
    rewards, costs = [], []
    for place, record in _records(path):
        try:
            answers = [record["workers"][worker] for worker in workers if worker in record["workers"]]
            paid = [float(answer["cost_usd"]) for answer in answers]
            right = [float(bool(answer["correct"])) for answer in answers]
            name, domain = str(record["id"]), str(record["domain"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadRecording(f"{place}: needs id, domain and workers with correct and cost_usd ({error!r})") from None
        if len(answers) == len(workers):
            world.ids.append(name)
            world.domains.append(domain)
            costs.append(paid)
            rewards.append(
                [reward(True, o, round(c * NANO_PER_USD), 0.0, settings) for o, c in zip(right, paid, strict=True)]
            )
    if len(set(halves(world.ids).tolist())) < 2:
        raise BadRecording(f"{path}: too few questions are answered by all of {', '.join(workers)}; name fewer workers")
    return World(world.ids, world.domains, np.array(rewards), np.array(costs))


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number in range(1, QUESTIONS_MAX + 2):
                line = file.readline(LINE_BYTES_MAX + 1)
                if not line:
                    return
                place = f"{path}:{number}"
                if number > QUESTIONS_MAX:
                    raise BadRecording(f"{place}: over {QUESTIONS_MAX} questions; split the file")
                if len(line) > LINE_BYTES_MAX:
                    raise BadRecording(f"{place}: line over {LINE_BYTES_MAX} bytes; split or shorten it")
                yield place, _object(line, place)
    except (OSError, EOFError) as error:
        raise BadRecording(f"{path}: cannot be read ({error}); give a JSONL file, plain or .gz") from None


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise BadRecording(f"{place}: not JSON; write one object a line") from None
    if not isinstance(record, dict):
        raise BadRecording(f"{place}: not an object; write one object a line")
    return record


def halves(ids: Sequence[str]) -> NDArray[np.bool_]:
    """True for the questions that make the policies [questions], by a hash of the id."""
    return np.array([hashlib.sha256(name.encode()).digest()[0] % 2 == 0 for name in ids])


def best_by_domain(world: World, made_on: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The worker [questions] with the best mean reward on its domain, from the questions `made_on` alone."""
    domains, best = np.array(world.domains), np.zeros(len(world.ids), dtype=np.int64)
    for domain in sorted(set(world.domains)):
        seen = made_on & (domains == domain)
        best[domains == domain] = world.rewards[seen if seen.any() else made_on].mean(axis=0).argmax()
    return best


def mixed(chosen: NDArray[np.int64], workers: int, explore: float) -> Floats:
    """Propensities [questions, workers]: the chosen worker, but with probability `explore` any worker."""
    return explore / workers + (1 - explore) * np.eye(workers)[chosen]


@dataclass(frozen=True, slots=True)
class Case:
    """A new policy and the one whose logs it is judged from, both as propensities [questions, workers]."""

    name: str
    logged: Floats
    new: Floats


def cases(world: World, made_on: NDArray[np.bool_]) -> list[Case]:
    """New policies near to and far from the one that logged. Unless the name says otherwise that one plays the best
    single worker half of the time, and any otherwise; the last new policy does what its log never shows."""
    workers, table = world.rewards.shape[1], best_by_domain(world, made_on)
    overall = np.full(len(table), world.rewards[made_on].mean(axis=0).argmax())
    cheapest = np.full(len(table), world.costs_usd[made_on].mean(axis=0).argmin())
    logged = mixed(overall, workers, 0.5)
    own, uniform = mixed(table, workers, 0.3), np.full_like(logged, 1 / workers)
    blind = logged.copy()
    blind[np.arange(len(table)), table] = 0.0
    return [
        Case("a little bolder", logged, mixed(overall, workers, 0.3)),
        Case("table, exploring", logged, own),
        Case("table", logged, mixed(table, workers, 0.02)),
        Case("cheapest", logged, mixed(cheapest, workers, 0.02)),
        Case("uniform", logged, uniform),
        Case("table, from its own log", own, mixed(table, workers, 0.02)),
        Case("table, from uniform logs", uniform, mixed(table, workers, 0.02)),
        Case("table, never logged", blind / blind.sum(axis=1, keepdims=True), mixed(table, workers, 0.02)),
    ]


@dataclass(frozen=True, slots=True)
class Line:
    """The errors of one estimator for one new policy over all repeats."""

    policy: str
    truth: float
    refused_share: float
    mean_weight: float
    ess: float
    estimator: str
    bias: float
    rmse: float
    coverage: float  # share of 95 % intervals that hold the truth


def draw(world: World, rows: NDArray[np.int64], case: Case, rng: np.random.Generator) -> LoggedSample:
    """One log: a worker drawn for each question of `rows`, with a reward model cross-fitted by question."""
    edges = case.logged[rows].cumsum(axis=1)
    acted = (rng.random((len(rows), 1)) * edges[:, -1:] < edges).argmax(axis=1)
    paid = world.rewards[rows, acted]
    with np.errstate(divide="ignore"):
        weights_log = np.log(case.new[rows, acted]) - np.log(case.logged[rows, acted])
    q = np.zeros((len(rows), world.rewards.shape[1]))
    fold = fold_of(rows, 2, seed=int(rng.integers(2**31)))
    for held_out in (0, 1):
        fit = np.flatnonzero(fold != held_out)
        table = RewardTable([((world.domains[rows[n]], acted[n]), acted[n]) for n in fit], paid[fit])
        for n in np.flatnonzero(fold == held_out):
            q[n] = [table.value(((world.domains[rows[n]], worker), worker)) for worker in range(q.shape[1])]
    q_logged = q[np.arange(len(rows)), acted]
    return LoggedSample(paid, weights_log, q_logged, (q * case.new[rows]).sum(axis=1), rows)


def compare(world: World, logs: int, repeats: int, seed: int = 0) -> list[Line]:
    """Every estimator for every new policy: `repeats` logs of `logs` questions each, drawn with replacement."""
    made_on = halves(world.ids)
    rest, rng, settings = np.flatnonzero(~made_on), np.random.default_rng(seed), OpeSettings(resamples=RESAMPLES)
    lines = []
    for case in cases(world, made_on):
        truth = float((case.new[rest] * world.rewards[rest]).sum(axis=1).mean())
        drawn = (draw(world, rng.choice(rest, logs), case, rng) for _ in range(repeats))
        reports = [estimate(logged, settings, seed=n) for n, logged in enumerate(drawn)]
        lines += [_line(case.name, truth, estimator, reports) for estimator in reports[0].estimates]
    return lines


def _line(policy: str, truth: float, estimator: str, reports: Sequence[OffPolicyReport]) -> Line:
    estimates = [report.estimates[estimator] for report in reports]
    errors = np.array([interval.value - truth for interval in estimates])
    return Line(
        policy=policy,
        truth=truth,
        refused_share=float(np.mean([bool(report.refused) for report in reports])),
        mean_weight=float(np.mean([report.mean_weight.value for report in reports])),
        ess=float(np.mean([report.ess for report in reports])),
        estimator=estimator,
        bias=float(errors.mean()),
        rmse=float(np.sqrt((errors**2).mean())),
        coverage=float(np.mean([i.low <= truth <= i.high for i in estimates])),
    )


def markdown(lines: Sequence[Line]) -> str:
    """The table, one row a policy and estimator."""
    head = "| new policy | truth | refused | mean w | ESS | estimator | bias | RMSE | 95 % covers |\n"
    rows = [
        f"| {x.policy} | {x.truth:.3f} | {x.refused_share:.0%} | {x.mean_weight:.2f} | {x.ess:.0f} | {x.estimator} "
        f"| {x.bias:+.3f} | {x.rmse:.3f} | {x.coverage:.0%} |"
        for x in lines
    ]
    return head + "|---|---|---|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status (2: a bad file or argument)."""
    top = argparse.ArgumentParser(
        prog="python -m bench.recorded.ope_replay", description="Off-policy estimates against truth."
    )
    top.add_argument("file", type=Path)
    top.add_argument("--workers", required=True, help="comma-separated models, at least two")
    top.add_argument("--logs", type=int, default=1_500, help="questions logged each time")
    top.add_argument("--repeats", type=int, default=100)
    top.add_argument("--seed", type=int, default=0)
    args = top.parse_args(argv)
    workers = [worker.strip() for worker in args.workers.split(",") if worker.strip()]
    if len(set(workers)) < 2 or min(args.logs, args.repeats) < 1:
        sys.stderr.write("give at least two different --workers, and --logs and --repeats of at least 1\n")
        return 2
    try:
        world = read_world(args.file, workers, RewardSettings())
    except BadRecording as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(markdown(compare(world, args.logs, args.repeats, args.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
