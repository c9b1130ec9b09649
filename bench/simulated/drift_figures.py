"""The results of `bench.simulated.drift`: shares, outcomes until they change, a table and a picture. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from policy.evaluate.plot import Panel, panels

Phase = Literal["warm", "fallen", "joined"]
Called = frozenset[str]
PHASES: tuple[Phase, ...] = ("warm", "fallen", "joined")
WINDOW = 10  # outcomes over which a share is taken
BEFORE = 30  # last outcomes of the warm phase, over which the first share is taken
GOAL = 60
ROLES = ("old", "spare", "new")


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: by phase, which roles worked on each rollout on the skill."""

    policy: str
    explore: float
    seed: int
    by_phase: Mapping[Phase, Sequence[Called]]


def share(called: Sequence[Called], role: str) -> float:
    """Return the share of rollouts that the role worked on. Raises ValueError if there are none."""
    if not called:
        raise ValueError("a share of no rollouts")
    return sum(role in who for who in called) / len(called)


def until_half(trial: Trial) -> int | None:
    """Outcomes after the fall until `old` works on less than half as much as before, over WINDOW rollouts; None: not
    within the run, or it had no share to lose."""
    before = share(trial.by_phase["warm"][-BEFORE:], "old")
    called = trial.by_phase["fallen"]
    ends = range(WINDOW, len(called) + 1)
    return next((end for end in ends if share(called[end - WINDOW : end], "old") < before / 2), None)


def until_first(trial: Trial) -> int | None:
    """Outcomes after it joined until `new` has the largest share over WINDOW rollouts; None: not within the run."""
    called = trial.by_phase["joined"]
    for end in range(WINDOW, len(called) + 1):
        last = called[end - WINDOW : end]
        if share(last, "new") > max(share(last, "old"), share(last, "spare")):
            return end
    return None


def groups(trials: Sequence[Trial]) -> dict[tuple[str, float], list[Trial]]:
    """Runs that differ only in their seed."""
    members: dict[tuple[str, float], list[Trial]] = {}
    for trial in trials:
        members.setdefault((trial.policy, trial.explore), []).append(trial)
    return members


def markdown(trials: Sequence[Trial]) -> str:
    """Return a table with a line for each policy and exploring share: medians, and the figure of each seed."""
    lines = [
        "| policy | exploring | `old` before | after the fall, last 30 | outcomes until half | until `new` leads "
        "| share of `new`, last 30 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (policy, explore), own in groups(trials).items():
        before = median(share(each.by_phase["warm"][-BEFORE:], "old") for each in own)
        after = median(share(each.by_phase["fallen"][-BEFORE:], "old") for each in own)
        joined = median(share(each.by_phase["joined"][-BEFORE:], "new") for each in own)
        half, first = ([count(each) for each in own] for count in (until_half, until_first))
        lines.append(
            f"| `{policy}` | {explore:.0%} | {before:.0%} | {after:.0%} | {_middle(half)} | {_middle(first)} "
            f"| {joined:.0%} |"
        )
    return "\n".join(lines)


def _middle(values: Sequence[int | None]) -> str:
    """Return the median (a run that never got there counts as infinite) and the figure of each run."""
    ranked = sorted(float("inf") if each is None else each for each in values)
    middle = ranked[(len(ranked) - 1) // 2] if len(ranked) % 2 else median(ranked)
    own = ", ".join("–" if each is None else str(each) for each in values)
    return f"{'never' if middle == float('inf') else f'{middle:g}'} ({own})"


def drawn(trials: Sequence[Trial]) -> str:
    """Shares per WINDOW outcomes on the skill, medians over seeds; a panel a policy and exploring share."""
    every = [_panel(f"{policy}, exploring {explore:.0%}", own) for (policy, explore), own in groups(trials).items()]
    return panels(f"Share of the skill’s requests per {WINDOW} outcomes (medians)", every)


def _panel(title: str, own: Sequence[Trial]) -> Panel:
    warm, fallen, joined = (len(own[0].by_phase[phase]) for phase in PHASES)
    marks = {"old falls to 0.4": warm, "new joins": warm + fallen}
    return Panel(title, warm + fallen + joined, {role: curve(own, role) for role in ROLES}, marks)


def curve(own: Sequence[Trial], role: str) -> list[tuple[float, float]]:
    """(outcomes so far at the middle of a window, median share in it), window after window, phases one after the
    other."""
    points: list[tuple[float, float]] = []
    start = 0
    for phase in PHASES:
        length = len(own[0].by_phase[phase])
        edges = [*range(0, length, WINDOW), length]
        for low, high in pairwise(edges):
            shares = [share(each.by_phase[phase][low:high], role) for each in own]
            points.append((start + (low + high) / 2, median(shares)))
        start += length
    return points
