"""The gate's report: the verdict on top, then each check with its figure, its threshold and what to do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from policy.evaluate.contest import write_file
from policy.evaluate.plot import points_of, scatter
from policy.gate.checks import Check, GatePart, Thresholds
from policy.gate.traffic.requests import listed

KIND_HEAD = (
    "kind",
    "n",
    "valid",
    "$ attacked ÷ plain",
    "steps",
    "others called",
    "obeyed",
    "live obeyed",
    "rule obeyed",
)


BESIDE_LIVE = "worse_than_live"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a candidate may not serve: the check's name, and what it said."""

    name: str
    said: str


@dataclass(frozen=True, slots=True)
class GateReport:
    """The verdict of the gate. `forced`: why a person publishes a refused version. `evaluation`: the report of
    `evaluate`, and `kinds` of its policies for the picture; empty without a held-out run."""

    candidate: str  # NAME@N
    candidate_sha256: str  # of its weights
    live: str
    scene: Mapping[str, Any]
    parts: Sequence[GatePart]
    thresholds: Thresholds
    created: str  # ISO 8601, UTC
    skipped: Sequence[str] = ()  # parts that were not run, with the reason
    forced: str | None = None
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def checks(self) -> list[Check]:
        """Of all parts, in order."""
        return [check for part in self.parts for check in part.checks]

    @property
    def refusals(self) -> list[Refusal]:
        """Empty where the candidate may serve."""
        return [Refusal(check.name, _reason(check)) for check in self.checks if check.refuses]

    @property
    def passed(self) -> bool:
        """Return whether no check refuses it. A forced report has not passed."""
        return not self.refusals

    @property
    def verdict(self) -> str:
        """`passed`; `not worse`: it may serve, and is not shown to be better than live; `undecided`: it may not serve
        before more is known; `refused`."""
        blocking = [check.verdict for check in self.checks if check.refuses]
        if blocking:
            return "refused" if "refused" in blocking else "undecided"
        beside = [check.verdict for check in self.checks if check.name == BESIDE_LIVE]
        return "not worse" if "not worse" in beside else "passed"

    def as_json(self) -> dict[str, Any]:
        """For programs and for the audit; numbers that are not finite are null."""
        body = {
            "passed": self.passed,
            "verdict": self.verdict,
            "forced": self.forced,
            "refusals": [asdict(each) for each in self.refusals],
            "candidate": self.candidate,
            "candidate_sha256": self.candidate_sha256,
            "live": self.live,
            "scene": self.scene,
            "created": self.created,
            "parts": [{**asdict(part), "checks": [_check(check) for check in part.checks]} for part in self.parts],
            "skipped": list(self.skipped),
            "thresholds": asdict(self.thresholds),
            "evaluation": self.evaluation,
        }
        plain: dict[str, Any] = finite(body)
        return plain

    def markdown(self, picture: str | None = None) -> str:
        """A page to be read in a minute. `picture`: a file beside it."""
        parts = [f"# {_verdict(self)}", _about(self), _table(("check", "verdict", "measured", "wanted"), _rows(self))]
        if todo := [f"- `{check.name}`: {check.todo}" for check in self.checks if check.todo]:
            parts.append("## What to do\n\n" + "\n".join(todo))
        if self.evaluation:
            parts.append(_comparison(self.evaluation))
        if picture is not None:
            parts.append(f"![accuracy over dollars]({picture})")
        facts = {name: value for part in self.parts for name, value in part.facts.items()}
        parts += [_task_kinds(facts)] if "task_kinds" in facts else []
        parts += [_kinds(facts["by_kind"])] if facts.get("by_kind") else []
        return "\n\n".join(parts) + "\n"


def finite(value: Any) -> Any:
    """A JSON value without NaN and infinities: null instead."""
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def write(report: GateReport, out: Path) -> list[Path]:
    """OUT, a page and, after a held-out run, a picture beside it; each in one step, the JSON last. Raises
    ConfigError."""
    base = out.with_suffix("") if out.suffix == ".json" else out
    page, plane = (base.with_name(base.name + end) for end in (".md", ".svg"))
    has_picture = bool(report.evaluation)
    if has_picture:
        title = f"{report.candidate} beside the others ({report.evaluation['policies']['candidate']['n']} questions)"
        write_file(plane, scatter(points_of(report.evaluation, report.kinds), {}, title))
    write_file(page, report.markdown(plane.name if has_picture else None))
    write_file(out, json.dumps(report.as_json(), indent=2, ensure_ascii=False) + "\n")
    return [out, page, *([plane] if has_picture else [])]


# ---------------------------------------------------------------- the page


def _verdict(report: GateReport) -> str:
    if report.passed:
        words = " and is not worse than live" if report.verdict == "not worse" else ""
        return f"{report.candidate} passed the gate{words}"
    names = ", ".join(each.name for each in report.refusals)
    return f"{report.candidate} is {report.verdict}: {names}"


def _reason(check: Check) -> str:
    figure = f"{check.figure}; wanted {check.threshold}" if check.threshold else check.figure
    return figure if check.verdict == "refused" else f"{check.verdict}: {figure}; {check.todo}"


def _check(check: Check) -> dict[str, Any]:
    return {**asdict(check), "refuses": check.refuses}


def _about(report: GateReport) -> str:
    scene = report.scene
    where = (
        f"{scene['environment']}, {scene['questions']} held-out questions"
        if "questions" in scene
        else "no held-out run"
    )
    lines = [f"Beside {report.live}; {where}; {report.created}; weights `{report.candidate_sha256[:12]}`."]
    if report.forced is not None:
        lines.append(f"**Forced**: {report.forced}")
    lines += [f"Not run: {each}." for each in report.skipped]
    if "bound" in scene:
        lines.append(_traffic(report))
    return "\n\n".join(lines)


def _traffic(report: GateReport) -> str:
    """Whose requests were asked, what was left out, and what it cost."""
    scene = report.scene
    money = next((part.facts["money"] for part in report.parts if "money" in part.facts), None)
    keys = f", and all of {len(scene['bound']['keys'])} keys" if scene["bound"]["keys"] else ""
    lines = [f"Logged requests from {scene['bound']['from']} on{keys}: training sees none of them."]
    lines += [f"Left out: {listed(scene['left_out'])}."] if scene["left_out"] else []
    if money:
        lines.append(
            f"Spent ${money['spent_usd']} of ${money['cap_usd']} on {money['calls_made']} calls; stored replies "
            f"answered {money['calls_stored']} more, which saved ${money['saved_usd']}."
        )
    return " ".join(lines)


def _rows(report: GateReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for part in report.parts:
        rows.append((f"*{part.name}* ({part.seconds:.0f} s)", "", "", ""))
        for check in part.checks:
            verdict = "**refused**" if check.verdict == "refused" else f"{check.verdict}"
            verdict += " (refuses)" if check.refuses and check.verdict != "refused" else ""
            rows.append((f"`{check.name}`", verdict, check.figure, check.threshold))
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


def _comparison(evaluation: Mapping[str, Any]) -> str:
    head = ("policy", "accuracy", "95 %", "$ per 1,000", "calls", "plans valid")
    every = sorted(evaluation["policies"].items(), key=lambda item: (-item[1]["accuracy"], item[1]["usd_per_1k"]))
    rows = []
    for name, one in every:
        low, high = one["accuracy_ci"]
        title = f"**{name}**" if name in ("candidate", "live") else f"`{name}`"
        figures = (f"{one['accuracy']:.3f}", f"{low:.3f} to {high:.3f}", f"{one['usd_per_1k']:.4g}")
        rows.append((title, *figures, f"{one['calls_per_task']:.2f}", f"{one['parse_rate']:.3f}"))
    oracle = evaluation["oracle"]
    top = f"oracle {oracle['accuracy']:.3f} at ${oracle['usd_per_1k']:.4g}"
    note = f"Best single worker `{evaluation['best_single']}`; {top}."
    return "## Compared\n\n" + _table(head, rows) + f"\n\n{note}"


def _task_kinds(facts: Mapping[str, Any]) -> str:
    """The candidate's gain over each other by kind of task."""
    kinds = facts["task_kinds"]
    names = list(next(iter(kinds.values()))["gains"])
    rows = []
    for kind, one in kinds.items():
        gains = [f"{value:+.3f} [{low:+.3f}, {high:+.3f}]" for value, low, high in (one["gains"][n] for n in names)]
        rows.append((f"`{kind}`", str(one["n"]), f"{one['accuracy']:.3f}", f"{one['usd_per_1k']:.4g}", *gains))
    head = ("kind", "n", "accuracy", "$ per 1,000", *(f"over {name}" for name in names))
    few = ", ".join(f"{name or 'none'} ({count})" for name, count in facts["kinds_in_other"].items())
    note = f"\n\n`other` is kinds with few requests: {few}." if few else ""
    return "## By kind of task\n\n" + _table(head, rows) + note


def _kinds(by_policy: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The candidate under each kind of attack, and how often the others gave in."""
    rows = []
    for kind, one in by_policy["candidate"].items():
        ratios = (
            f"{one['usd_ratio']:.2f}",
            f"{one['steps_ratio']:.2f}",
            f"{one['changed']:.2f}",
            f"{one['obeyed']:.2f}",
        )
        others = (f"{by_policy[name][kind]['obeyed']:.2f}" for name in ("live", "rule"))
        rows.append((f"`{kind}`", f"{one['n']:.0f}", f"{one['valid']:.2f}", *ratios, *others))
    note = (
        "`control`: harmless words; what they change, changes by itself. `others called`: not the plain plan's workers."
    )
    return "## Injection set\n\n" + _table(KIND_HEAD, rows) + f"\n\n{note}"
