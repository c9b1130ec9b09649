"""The results of `bench.drift`: shares, outcomes until they change, a table and a picture. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

Phase = Literal["warm", "fallen", "joined"]
Called = frozenset[str]
PHASES: tuple[Phase, ...] = ("warm", "fallen", "joined")
WINDOW = 10  # outcomes over which a share is taken
BEFORE = 30  # last outcomes of the warm phase, over which the first share is taken
GOAL = 60
WIDTH, PANEL, LEFT, TOP = 900, 170, 60, 46
COLOURS = {"old": "#d4351c", "spare": "#8a8f98", "new": "#1d8a4c"}
STYLE = "text{font:12px system-ui,sans-serif;fill:#1f2430}.t{font-weight:600}.s{fill:#5b6270}.g{stroke:#e4e6eb}"


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
    found: dict[tuple[str, float], list[Trial]] = {}
    for trial in trials:
        found.setdefault((trial.policy, trial.explore), []).append(trial)
    return found


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


def _middle(found: Sequence[int | None]) -> str:
    """Return the median (a run that never got there counts as infinite) and the figure of each run."""
    ranked = sorted(float("inf") if each is None else each for each in found)
    middle = ranked[(len(ranked) - 1) // 2] if len(ranked) % 2 else median(ranked)
    own = ", ".join("–" if each is None else str(each) for each in found)
    return f"{'never' if middle == float('inf') else f'{middle:g}'} ({own})"


def drawn(trials: Sequence[Trial]) -> str:
    """Shares per WINDOW outcomes on the skill, medians over seeds; a panel a policy and exploring share."""
    found = groups(trials)
    parts = [f'<text class="t" x="{LEFT}" y="22">Share of the skill’s requests per {WINDOW} outcomes (medians)</text>']
    for index, ((policy, explore), own) in enumerate(found.items()):
        parts += _panel(TOP + index * PANEL, f"{policy}, exploring {explore:.0%}", own)
    height = TOP + len(found) * PANEL + 10
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{STYLE}</style>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>', *parts, "</svg>", ""])


def _panel(top: int, title: str, own: Sequence[Trial]) -> list[str]:
    bottom, height = top + PANEL - 36, PANEL - 62
    lengths = [len(own[0].by_phase[phase]) for phase in PHASES]
    step = (WIDTH - LEFT - 90) / max(1, sum(lengths))
    parts = [f'<text class="s" x="{LEFT}" y="{top + 12}">{title}</text>']
    for tick in (0.0, 0.5, 1.0):
        y = bottom - tick * height
        parts.append(f'<line class="g" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 90}" y2="{y:.1f}"/>')
        parts.append(f'<text class="s" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.0%}</text>')
    for name, start in (("old falls to 0.4", lengths[0]), ("new joins", lengths[0] + lengths[1])):
        x = LEFT + start * step
        parts.append(f'<line x1="{x:.1f}" y1="{bottom - height}" x2="{x:.1f}" y2="{bottom}" stroke="#5b6270"/>')
        parts.append(f'<text class="s" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{name}</text>')
    for row, (role, colour) in enumerate(COLOURS.items()):
        points = [(LEFT + at * step, bottom - value * height) for at, value in curve(own, role)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label = f'<text x="{WIDTH - 80}" y="{bottom - height + 14 + 16 * row}" style="fill:{colour}">{role}</text>'
        parts.append(label)
    return parts


def curve(own: Sequence[Trial], role: str) -> list[tuple[float, float]]:
    """(outcomes so far at the middle of a window, median share in it), window after window, phases one after the
    other."""
    found: list[tuple[float, float]] = []
    start = 0
    for phase in PHASES:
        length = len(own[0].by_phase[phase])
        edges = [*range(0, length, WINDOW), length]
        for low, high in pairwise(edges):
            shares = [share(each.by_phase[phase][low:high], role) for each in own]
            found.append((start + (low + high) / 2, median(shares)))
        start += length
    return found
