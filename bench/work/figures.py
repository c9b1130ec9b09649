"""The tables of the bench. Intervals are 95 % bootstraps over tasks, seeded; differences are of the same tasks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.work.measure import LEARNING, Credit, Measured
from policy.statistics.stats import bootstrap_mean

COLUMNS = ("kind", "policy", "arm", "right", "95 %", "$ per 1,000", "calls", "credits", "wrong credits")


@dataclass(frozen=True, slots=True)
class WorkRow:
    """One policy of one arm on one kind of work. `credits`: steps with credit, a request; `wrong`: of all of them."""

    kind: str
    policy: str
    arm: str
    n: int
    right: float
    low: float
    high: float
    usd_per_1000: float
    calls: float
    credits: float
    wrong_credits: int
    given_credits: int
    wrong_outcomes: int  # of the grader
    errors: int


def row_of(one: Measured) -> WorkRow:
    """The figures of one policy. Raises ValueError without requests."""
    right = bootstrap_mean([float(each.right) for each in one.requests])
    given = [each for each in one.credits if each.credit is not None]
    n = len(one.requests)
    return WorkRow(
        *(one.kind, one.policy, one.arm, n, right.value, right.low, right.high),
        usd_per_1000=1000 * sum(each.usd for each in one.requests) / n,
        calls=statistics.fmean(each.calls for each in one.requests),
        credits=len(given) / n,
        wrong_credits=sum(each.is_wrong for each in given),
        given_credits=len(given),
        wrong_outcomes=sum((each.value > 0.5) != each.right for each in one.requests),
        errors=sum(each.status != 200 for each in one.requests),
    )


def table(rows: Sequence[WorkRow]) -> str:
    """The rows as a table, kind by kind, the arms of a policy below each other."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|---|" + "---:|" * (len(COLUMNS) - 3)]
    order = list(dict.fromkeys((row.kind, row.policy) for row in rows))
    for row in sorted(rows, key=lambda one: order.index((one.kind, one.policy))):
        wrong = f"{row.wrong_credits} of {row.given_credits}" + (
            f" ({row.wrong_credits / row.given_credits:.0%})" if row.given_credits else ""
        )
        lines.append(
            f"| {row.kind} | `{row.policy}` | {row.arm} | {row.right:.1%} | {row.low:.1%} to {row.high:.1%} "
            f"| {row.usd_per_1000:.3f} | {row.calls:.2f} | {row.credits:.2f} | {wrong} |"
        )
    return "\n".join(lines)


def differences(measured: Sequence[Measured], first: str, second: str) -> str:
    """Right, dollars and calls of the second arm less those of the first, on the same tasks."""
    of = {(one.arm, one.kind, one.policy): one for one in measured}
    lines = ["| kind | policy | right, points | 95 % | dollars | calls |", "|---|---|---:|---:|---:|---:|"]
    for (arm, kind, policy), before in of.items():
        after = of.get((second, kind, policy))
        if arm != first or after is None or policy == LEARNING:
            continue
        gain = bootstrap_mean([b.right - a.right for a, b in zip(before.requests, after.requests, strict=True)])
        usd, calls = (_total(after, name) / (_total(before, name) or 1) for name in ("usd", "calls"))
        lines.append(
            f"| {kind} | `{policy}` | {100 * gain.value:+.1f} | {100 * gain.low:+.1f} to {100 * gain.high:+.1f} "
            f"| × {usd:.2f} | × {calls:.2f} |"
        )
    return "\n".join(lines)


def _total(one: Measured, name: str) -> float:
    return sum(float(getattr(each, name)) for each in one.requests)


def records(measured: Sequence[Measured]) -> str:
    """What each worker is said to have been right on, after learning, beside the truth of the same steps."""
    lines = [
        "| kind | worker | arm | credited steps | credited right | truly right, of all steps |",
        "|---|---|---|---:|---:|---:|",
    ]
    for one in measured:
        if one.policy == LEARNING:
            for worker in sorted({each.worker for each in one.credits}):
                own = [each for each in one.credits if each.worker == worker]
                lines.append(f"| {one.kind} | {worker} | {one.arm} | {_record(own)} |")
    return "\n".join(lines)


def _record(own: Sequence[Credit]) -> str:
    given = [each.credit for each in own if each.credit is not None]
    shown = f"{statistics.fmean(given):.0%}" if given else "–"
    return f"{len(given)} of {len(own)} | {shown} | {statistics.fmean(each.right for each in own):.0%}"


def grader_notes(rows: Sequence[WorkRow]) -> list[str]:
    """How often a grader's outcome is not the truth, by kind."""
    notes = []
    for kind in dict.fromkeys(row.kind for row in rows):
        of = [row for row in rows if row.kind == kind]
        wrong, n = sum(row.wrong_outcomes for row in of), sum(row.n for row in of)
        notes.append(f"Outcomes of the grader of {kind} that are wrong: {wrong} of {n}.")
    return notes
