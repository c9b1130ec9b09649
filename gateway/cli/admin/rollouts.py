"""`baton rollouts` and `baton explain`: requests that were served, one of them as a whole, and why it went so."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from gateway.cli.admin.client import AdminClient
from gateway.cli.admin.show import add_admin, show, table
from gateway.core.log.sentence import dollars, evidence
from gateway.core.money.amounts import nano_to_usd
from gateway.errors import ConfigError

ROUTE = "/admin/rollouts"
COLUMNS = ("id", "time", "key", "policy", "workers", "status", "usd", "ms")
FILTERS = {"key": "of this key's id", "policy": "of this policy", "status": "done, failed, aborted, fallback or capped"}
LIST_DEFAULT = 20
ARM_COLUMNS = ("step", "worker", "right", "success", "time", "dollars", "bonus", "utility", "probability")
TEXT_CHARS_MAX = 200  # of a text that a worker, a planner or a client wrote
ACTIONS = {
    "list": "the latest requests, without their texts",
    "show": "one request with all that is logged of it",
    "explain": "why one request went where it went",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments of `rollouts`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary)
        if name == "list":
            for filter_, what in FILTERS.items():
                action.add_argument(f"--{filter_}", metavar="X", help=what)
            action.add_argument("--limit", type=int, default=LIST_DEFAULT, metavar="N", help="how many, at most 200")
            action.add_argument("--before", metavar="CURSOR", help="the `next` of another page")
        elif name == "explain":
            add_explain(action)
            continue
        else:
            add_id(action)
        add_admin(action)


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Arguments of `explain`."""
    parser.set_defaults(action="explain")
    add_id(parser)
    parser.add_argument(
        "--weights", type=Path, metavar="DIR", help="the policy directory that planned: its alternatives are recomputed"
    )
    add_admin(parser)


def add_id(parser: argparse.ArgumentParser) -> None:
    """The request."""
    parser.add_argument("id", help="the rollout's id, or that of its completion")


def run(options: argparse.Namespace) -> int:
    """One action; print a table, a text, or JSON."""
    admin = AdminClient(options.url, options.key_file)
    if options.action == "list":
        query = {name: getattr(options, name) for name in (*FILTERS, "limit", "before")}
        page = admin.ask("GET", f"{ROUTE}?{urlencode({name: v for name, v in query.items() if v is not None})}")
        show(options, page, _page)
        return 0
    path = f"{ROUTE}/{quote(options.id, safe='')}"
    if options.action == "show":
        show(options, admin.ask("GET", path), partial(json.dumps, indent=2))
        return 0
    why = admin.ask("GET", f"{path}/explain")
    if options.weights is not None:
        put_recomputed(why, _recomputed(admin.ask("GET", path), options.weights))
    show(options, why, _explanation)
    return 0


def _recomputed(tree: Mapping[str, Any], weights: Path) -> list[dict[str, Any]]:
    """The probabilities of the alternatives of a rollout, by the weights that planned. Raises ConfigError."""
    command = [sys.executable, "-m", "policy", "alternatives", "--weights", str(weights)]
    process = subprocess.run(  # noqa: S603 - our own program
        command, input=json.dumps(tree), capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise ConfigError(process.stderr.strip().rpartition("\n")[2] or "the alternatives could not be recomputed")
    return list(json.loads(process.stdout))


def put_recomputed(why: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Put recomputed probabilities in the place of the log's bounds; `not_recomputed` of a decision says why not."""
    by_round = {(row["rollout_id"], row["round"]): row for row in rows}
    for decision in why["decisions"]:
        row = by_round.get((decision["rollout_id"], decision["round"]), {})
        if "unknown" in row:
            decision["not_recomputed"] = row["unknown"]
        for step, chances in zip(decision["steps"], row.get("steps", []), strict=False):
            for one in step["alternatives"]:
                if one["handle"] in chances:
                    one |= {"probability": round(chances[one["handle"]], 6), "source": "recomputed"}


def _page(page: Mapping[str, Any]) -> str:
    lines = [
        {
            "id": row["id"],
            "time": row["created_at"],
            "key": row["key_name"] or row["key_id"],
            "policy": row["policy_used"],
            "workers": row["workers"],
            "status": row["status"],
            "usd": nano_to_usd(row["cost_nano"]),
            "ms": None if row["latency_ms"] is None else round(row["latency_ms"]),
        }
        for row in page["data"]
    ]
    more = f"\nmore: --before {page['next']}" if page["next"] else ""
    return table(COLUMNS, lines) + more


# ---------------------------------------------------------------- an explanation as text


def _explanation(why: Mapping[str, Any]) -> str:
    policy = why["policy"]
    deciding = [one for one in why["decisions"] if is_deciding(one, why)]
    steps = [step for one in deciding for step in one["steps"]]
    lines = [why["sentence"], "", *_decided(why["decided"], steps)]
    lines += [f"  outcome: {_outcome(one)}" for one in why["outcomes"]]
    asked = f"asked for {policy['requested']}, planned by {policy['used']}"
    lines += ["", f"rollout {why['rollout_id']} ({why['status']}): {asked}"]
    lines += [f"{name}: {why[name]}" for name in ("fallback", "capped") if why[name]]
    lines += [_turn(turn)] if (turn := why.get("turn")) else []
    for decision in why["decisions"]:
        lines += _decision(decision, instead=decision not in deciding)
    lines += [_hidden(step) for step in why["hidden"] if step["hidden"] or step.get("cut")]
    lines += (
        ["Ruled out:", *(f"  by {one['by']}: {one['what']}" for one in why["forbidden"])] if why["forbidden"] else []
    )
    lines += [*_not_shown(why["not_shown"]), *_counterfactual(why["counterfactual"])]
    return "\n".join(printable(line) for line in lines)


def is_deciding(decision: Mapping[str, Any], why: Mapping[str, Any]) -> bool:
    """Whether a decision is the one that the explanation begins with."""
    return bool(decision["rollout_id"] == why["rollout_id"] and decision["round"] == why["decided"]["round"])


def _decided(decided: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table of what decided, with the verdicts, and how fresh the experience was. `steps`: of that decision."""
    rows = [_arm(arm) for arm in decided["arms"]] or [
        {"step": step["step"], "worker": _marked(one), "probability": _chance(one).strip("()")}
        for step in steps
        for one in step["alternatives"]
        if one["probability"] is not None
    ]
    if rows:
        columns = [name for name in ARM_COLUMNS if any(row.get(name, "") != "" for row in rows)]
        yield from (f"  {line}" for line in table(columns, rows).splitlines())
    if worth := decided["worth"]:
        yield f"  {_worth(worth)}"
    for one in decided["verdicts"]:
        word = {True: "accepted", False: "rejected"}.get(one["accept"], "could not judge")
        by = one["by"] or one["worker"]
        yield f"  verdict at step {one['step']}: {by} {word}{': ' + _cut(one['why']) if one['why'] else ''}"
    if memory := decided["memory"]:
        age = f", {memory['age_s']:.0f} s old" if memory.get("state") == "stale" and memory.get("age_s") else ""
        yield f"  experience: {memory.get('state')}{age}"


def _arm(arm: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table; what the log lacks stays empty."""

    def figure(name: str, text: str) -> str:
        return "" if arm.get(name) is None else text.format(arm[name])

    interval = f" ({arm['low']:.2f} to {arm['high']:.2f})" if arm.get("low") is not None else ""
    return {
        "worker": _marked(arm),
        "right": f"{evidence(arm['right'])} of {evidence(arm['n'])}" if arm.get("n") is not None else "",
        "success": f"{arm['success']:.2f}{interval}" if arm.get("success") is not None else "",
        "time": figure("latency_s", "{:.2g} s"),
        "dollars": "" if arm.get("usd") is None else dollars(arm["usd"]),
        "bonus": figure("bonus", "{:.2f}") if arm.get("bonus") else "",
        "utility": figure("utility", "{:.2f}"),
        "probability": figure("propensity", "{:.2g}"),
    }


def _marked(one: Mapping[str, Any]) -> str:
    return f"{one['worker']} (chosen)" if one["chosen"] else str(one["worker"])


def _worth(worth: Mapping[str, Any]) -> str:
    """What a right answer was worth, and who says so."""
    by = worth.get("by") or "default"
    if worth.get("usd") is None and worth.get("seconds") is None:
        return f"only right answers count (by {by})"
    parts = [dollars(worth["usd"])] if worth.get("usd") is not None else []
    parts += [f"{worth['seconds']:.3g} s"] if worth.get("seconds") is not None else []
    return f"a right answer is worth {' or '.join(parts)} (by {by})"


def _outcome(one: Mapping[str, Any]) -> str:
    said = one["value"] if one["value"] is not None else one["label"]
    of = "" if one["step"] is None else f" of step {one['step']}"
    return f"{one['kind']} {said}{of}, by {one['source']}"


def _turn(turn: Mapping[str, Any]) -> str:
    """Why a turn of a conversation went back to its worker, or did not."""
    way = f"went back to {turn['worker']}" if turn["kept"] else f"planned anew, {turn['worker']} is warm"
    grounds = [f"{name} {turn[name]}" for name in ("distance", "fault", "cap", "better") if name in turn]
    cache = [f"its cached prompt is worth {dollars(turn['worth_nano'] / 1e9)}"] if turn.get("worth_nano") else []
    return f"turn of a conversation: {way} ({'; '.join([turn['why'], *grounds, *cache])})"


def printable(text: str) -> str:
    """A line without control characters, which could make a terminal do things."""
    return "".join(char if char.isprintable() else " " for char in text)


def _decision(decision: Mapping[str, Any], *, instead: bool) -> Iterator[str]:
    version = f" {decision['policy_version']}" if decision["policy_version"] else ""
    used = "" if decision["used"] else f", not used: {decision['refusal']}"
    yield f"Round {decision['round']}, depth {decision['depth']}: planned by {decision['planner']}{version}{used}"
    if decision["why"]:
        yield f"  why: {_cut(decision['why'])}"
    plan = decision["plan"]
    if plan["probability"] is None:
        yield f"  probability of the plan: unknown ({plan['unknown']})"
    else:
        over = f" over {plan['choices']} choices" if "choices" in plan else ""
        yield f"  probability of the plan: {plan['probability']:.3g}{over} (logged)"
    if reason := decision.get("not_recomputed"):
        yield f"  not recomputed: {reason}"
    for step in decision["steps"]:
        others = ", ".join(f"{one['worker']} {_chance(one)}" for one in step["alternatives"] if not one["chosen"])
        choice = next((one for one in step["alternatives"] if one["chosen"]), {"probability": None})
        task = "the conversation" if step["task"] is None else _cut(step["task"])
        yield f"  step {step['step']}: {step['worker']} {_chance(choice)}: {task}; sees {step['see'] or 'no step'}"
        if instead:
            yield f"    instead: {others or 'no other worker was allowed'}"
    yield from _shown(decision["shown"])


def _shown(step: Mapping[str, Any]) -> Iterator[str]:
    for one in step["experience"]:
        yield f"  shown: {one['worker']} did {one['n']} alike, {one['success']:.2f} right, {one['ms']} ms"
    for example in step["examples"]:
        yield f"  shown as an example: {_cut(str(example.get('question')))}"


def _chance(alternative: Mapping[str, Any]) -> str:
    chance = alternative["probability"]
    if chance is None:
        return "(probability unknown)"
    if isinstance(chance, Mapping):
        return f"({chance['at_least']:.3g} to {chance['at_most']:.3g})"
    return f"({chance:.3g})"


def _hidden(step: Mapping[str, Any]) -> str:
    hidden = ", ".join(f"step {index}" for index in step["hidden"])
    cut = ", ".join(f"{name}={part}" for name, part in (step.get("cut") or {}).items() if part)
    parts = [f"did not see {hidden}"] if hidden else []
    parts += [f"saw a conversation that was cut to fit: {cut}"] if cut else []
    return f"Step {step['step']} ({step['worker']}) {'; '.join(parts)}"


def _not_shown(left_out: Mapping[str, Any]) -> Iterator[str]:
    if left_out["workers"] is None:
        yield f"Not shown to the planner: unknown ({left_out['unknown']})"
        return
    if left_out["workers"]:
        yield f"Not shown to the planner: {', '.join(left_out['workers'])} ({left_out['reason']})"
    for name, share in left_out["drawn"].items():
        yield f"Drawn at random as a candidate: {name} (probability {share:.3g})"


def _counterfactual(counterfactual: Mapping[str, Any]) -> Iterator[str]:
    yield f"Had it gone to one worker alone, by {counterfactual['likeness'] or 'no requests'}:"
    for one in counterfactual["workers"]:
        if "unknown" in one:
            yield f"  {one['worker']}: unknown ({one['unknown']})"
        else:
            tried = f"{one['tried']} of {one['alike']}"
            yield f"  {one['worker']}: {one['estimate']:.2f} ({one['low']:.2f} to {one['high']:.2f}), {tried}"


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_CHARS_MAX else f"{line[:TEXT_CHARS_MAX]}…"
