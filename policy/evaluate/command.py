"""Compare policies on questions they were not tuned on: accuracy, dollars, calls, with intervals and baselines.

Nothing needs to be started by hand. Finished policies, and finished questions of a planner behind a URL, are kept in
OUT.partial, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policy.engines.opening import check_engine
from policy.environments.sampling import SamplingProgress
from policy.evaluate.contest import PartialResults, ProgressPrinter, contest, facts_of, write_file
from policy.evaluate.endpoint import planner_lines, read_endpoints
from policy.evaluate.entrants import Entrant, entrants, train_files
from policy.evaluate.figures import check_ends, curves, report
from policy.evaluate.options import EvaluationOptions, read
from policy.evaluate.options import add as add
from policy.evaluate.plot import points_of, scatter, shares
from policy.evaluate.stages import EvaluationScene

SIMULATED = {
    "replay": "Latency is assumed (one speed for every model): the recording has none. A plan that rewrites the "
    "question finds no recording and counts as wrong.",
    "arena": "Simulator figures: they say nothing about real models.",
}
SCORES = ("aiq", "apgr", "cpt_50", "cpt_80", "routerarena", "usd_per_1k_at_best_single")
SCORE_HEAD = ("AIQ", "APGR", "CPT 50 %", "CPT 80 %", "RouterArena", "$ per 1,000 at the best single's accuracy")


def run(arguments: argparse.Namespace) -> int:
    """Write the report; 0, or 130 when interrupted. Raises ConfigError, one line with the fix, and writes nothing."""
    options, say = read(arguments), ProgressPrinter()
    partial = PartialResults(options.out)
    try:
        summary = asyncio.run(_evaluate(options, partial, say))
    except KeyboardInterrupt:
        say.done(f"interrupted; finished policies are kept in {partial.folder}: the same command goes on from there")
        return 130
    finally:
        partial.drop_if_empty()
    partial.drop()
    sys.stdout.write(summary)
    return 0


async def _evaluate(options: EvaluationOptions, partial: PartialResults, say: ProgressPrinter) -> str:
    def progress(what: str, now: SamplingProgress) -> None:
        say.progress(what, now)

    scene = EvaluationScene(options, progress, train_files(options.policies))
    endpoints = await read_endpoints(options)
    policies = entrants(options.policies, scene.workers, options.usd_weights, options.qualities, endpoints=endpoints)
    check_ends(options, policies)
    curves(options, policies)  # a curve of unknown policies is refused before minutes are spent
    directories = {each.directory.policy.directory: each for each in policies if each.directory is not None}
    await check_engine(
        {f"policy {each.name}": each.directory for each in directories.values() if each.directory is not None},
        options.engine_choice,
    )
    results = await contest(options, scene, policies, partial, say)
    body = {
        "evaluated": facts_of(scene, options, len(scene.stage.prompts)),
        "tuned_on": [lessons.facts() for lessons in scene.sources],
        "planners": {name: endpoint.facts() for name, endpoint in endpoints.items()},
        "settings": _settings(options),
        **report(options, policies, results),
    }
    kinds = {"oracle": "oracle", **{entrant.name: entrant.kind for entrant in policies}}
    files = write_report(options.out, body, kinds, curves(options, policies))
    return _summary(body, policies) + "".join(f"{path}\n" for path in files)


def _settings(options: EvaluationOptions) -> dict[str, Any]:
    return {
        "policies": list(options.policies),
        "usd_weights": list(options.usd_weights),
        "qualities": list(options.qualities),
        "cost_range": list(options.cost_range),
        "rounds": options.rounds,
        "experience_neighbours": options.neighbours,
        "train_questions_max": options.train_n,
    }


def _summary(body: dict[str, Any], policies: list[Entrant]) -> str:
    best, oracle = body["best_single"], body["oracle"]
    lines = [SIMULATED[body["evaluated"]["environment"]]]
    lines += [f"{'policy':<40} {'right':>6} {'95 %':>13} {'$ per 1,000':>12} {'calls':>6} {'valid':>6}"]
    ranked = sorted(body["policies"].items(), key=lambda item: (-item[1]["accuracy"], item[1]["usd_per_1k"]))
    for name, one in ranked:
        low, high = one["accuracy_ci"]
        lines.append(
            f"{name:<40} {one['accuracy']:>6.3f} {low:>6.3f}-{high:.3f} {one['usd_per_1k']:>12.3f} "
            f"{one['calls_per_task']:>6.2f} {one['parse_rate']:>6.3f}"
        )
    single = "" if best is None else f"best single {best}; "
    lines.append(f"{single}oracle {oracle['accuracy']:.3f} at ${oracle['usd_per_1k']:.3f}")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the files of a report


def write_report(
    out: Path, report: Mapping[str, Any], kinds: Mapping[str, str], curves: Mapping[str, Sequence[str]]
) -> list[Path]:
    """Write the pictures, the page and at last the JSON, which exists only when the others do. Raises ConfigError."""
    base = out.with_suffix("") if out.suffix == ".json" else out
    plane, workers, page = (base.with_name(base.name + end) for end in (".svg", "-workers.svg", ".md"))
    evaluated = report["evaluated"]
    where = f"{evaluated['environment']}, {evaluated['split']} split, {evaluated['questions']} questions"
    called = {name: figures["worker_share"] for name, figures in report["policies"].items() if kinds[name] != "fixed"}
    dials = {name: members for name, members in curves.items() if name != "fixed workers"}
    write_file(plane, scatter(points_of(report, kinds), dials, f"Accuracy over dollars ({where})"))
    if called:
        write_file(workers, shares(called, f"Who was called, as a share of steps ({where})"))
    write_file(page, markdown(report, kinds, plane.name, workers.name if called else None))
    write_file(out, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return [out, page, plane, *([workers] if called else [])]


def markdown(report: Mapping[str, Any], kinds: Mapping[str, str], plane: str, workers: str | None) -> str:
    """Return the report as a Markdown page."""
    best = report["best_single"]
    rows = sorted(report["policies"].items(), key=lambda item: (-item[1]["accuracy"], item[1]["usd_per_1k"]))
    parts = ["# Evaluation", _about(report), f"![accuracy over dollars]({plane})"]
    parts += [_policies(report, rows), _scores(report, rows), _curves(report), _categories(rows)]
    if workers is not None:
        parts.append(f"## Who was called\n\n![share of steps by worker]({workers})")
    parts.append(_shapes([(name, figures) for name, figures in rows if kinds[name] not in ("fixed", "oracle")]))
    notes = [] if best is None else [f"- best single worker: `{best}`, by accuracy"]
    notes += [f"- `{name}`: {text}" for name, text in report["formulas"].items()]
    parts.append("## How the figures are made\n\n" + "\n".join(notes))
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(report: Mapping[str, Any]) -> str:
    evaluated, oracle = report["evaluated"], report["oracle"]
    where = evaluated.get("file", f"arena, {evaluated.get('staff')} workers")
    lines = [
        f"Evaluated on {evaluated['questions']} questions: {where}, split {evaluated['split']}, "
        f"seed {evaluated['seed']}. {SIMULATED[evaluated['environment']]}",
        *_left_out_line(evaluated.get("left_out", {})),
        *(_source_line(each) for each in report["tuned_on"]),
        *planner_lines(report.get("planners", {})),
        f"Oracle ({oracle['kind']}): {oracle['accuracy']:.3f} at ${oracle['usd_per_1k']:.3g} per 1,000.",
    ]
    if not report["tuned_on"]:
        lines.insert(1, "Nothing was learnt for this report: no table, no cascade, no experience.")
    return "\n\n".join(lines)


def _left_out_line(left_out: Mapping[str, int]) -> list[str]:
    return [f"Not offered: {', '.join(f'{name}: {n}' for name, n in left_out.items())}."] if left_out else []


def _source_line(each: Mapping[str, Any]) -> str:
    absent = f"; it says nothing of {', '.join(each['workers_absent'])}" if each["workers_absent"] else ""
    left_out = each["left_out_because_evaluated"]
    return (
        f"Tuned, and experience taken, on {each['questions']} other questions: {each['source']} "
        f"({left_out} of it are evaluated and were left out{absent})."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _policies(report: Mapping[str, Any], rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    head = (
        "policy",
        "accuracy",
        "95 %",
        "$ per 1,000",
        "calls",
        "plans valid",
        "gain on best single",
        "p",
        "of oracle",
    )
    top = report["oracle"]["accuracy"]
    body = []
    for name, figures in rows:
        paired = figures["vs_best_single"]
        low, high = figures["accuracy_ci"]
        against = paired is not None and name != report["best_single"]
        gain = f"{paired['accuracy_gain']:+.3f}" if against else ""
        p = _p(paired["p"]) if against else ""
        share = f"{figures['accuracy'] / top:.2f}" if top else "–"
        cells = (f"`{name}`", _number(figures["accuracy"]), f"{low:.3f}…{high:.3f}", f"{figures['usd_per_1k']:.3g}")
        body.append((*cells, _number(figures["calls_per_task"], 2), _number(figures["parse_rate"]), gain, p, share))
    return "## Policies\n\n" + _table(head, body)


def _scores(report: Mapping[str, Any], rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    low, high = report["settings"]["cost_range"]
    ends = f"AIQ over ${low:g} to ${high:g}."
    if report["weak"] is not None:
        ends = f"Weak worker `{report['weak']}`, strong worker `{report['strong']}`; {ends}"
    body = [(f"`{name}`", *(_number(figures[key]) for key in SCORES)) for name, figures in rows]
    return f"## Quality for cost\n\n{ends}\n\n" + _table(("policy", *SCORE_HEAD), body)


def _curves(report: Mapping[str, Any]) -> str:
    body = [
        (f"`{name}`", str(len(figures["points"])), *(_number(figures[key]) for key in SCORES))
        for name, figures in report["curves"].items()
    ]
    return "## Curves\n\n" + _table(("dial", "points", *SCORE_HEAD), body)


def _categories(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    names = sorted({category for _, figures in rows for category in figures["by_category"]})
    body = [
        (f"`{name}`", *(_number(figures["by_category"].get(each, {}).get("accuracy")) for each in names))
        for name, figures in rows
    ]
    counts = {each: rows[0][1]["by_category"][each]["n"] for each in names}
    return "## By category\n\n" + _table(("policy", *(f"{each or 'none'} ({counts[each]})" for each in names)), body)


def _shapes(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    if not rows:
        return ""
    shapes = ("one call", "several calls", "several rounds")
    body = []
    for name, figures in rows:
        cells = [figures["by_shape"].get(shape) for shape in shapes]
        body.append((f"`{name}`", *("–" if cell is None else f"{cell['n']}: {cell['accuracy']:.3f}" for cell in cells)))
    return "## What was done\n\nQuestions, and accuracy on them, by what their plans came to.\n\n" + _table(
        ("policy", *shapes), body
    )
