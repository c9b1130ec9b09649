"""`baton train`: train a conductor here (`baton train --env …`), or as a job (`submit`, `status`, `logs`, `cancel`,
`resume`).

The training itself is `python -m policy train`; `baton train --help` lists its arguments. A job takes the same
arguments, except those that say where the result goes, and goes to the admin API of a gateway.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gateway.cli.admin.client import AdminClient
from gateway.cli.admin.show import show, table
from gateway.cli.learn.programs import become
from gateway.cli.process.arguments import lazy
from gateway.errors import BadRequest, Conflict

if TYPE_CHECKING:
    from gateway.cli.process import services
    from gateway.config import settings as config
    from gateway.core.policies import jobs, readiness
else:  # at their first use: `--help` needs neither
    services, config = lazy("gateway.cli.process.services"), lazy("gateway.config.settings")
    jobs, readiness = lazy("gateway.core.policies.jobs"), lazy("gateway.core.policies.readiness")

SPEC_PROGRAM = ("-m", "policy", "jobs", "spec")
COLUMNS = ("job", "policy", "state", "stage", "step", "made")
FOLLOW_S = 1.0
PAGES_MAX = 100  # of a log, printed at once
EXITS = {"done": 0, "refused": 4, "cancelled": 130}  # of `logs -f` by state; 1 for any other
JOBS_TEXT = """
as a job of the running gateway:
  baton train submit [--policy NAME] [--auto] [--gate 'ARGUMENTS'] --env …   queue it; --check: say what is missing
  baton train status [JOB]          how far the log is from a retraining, and all jobs; or one job
  baton train logs [-f] [JOB]       its log, or that of the latest; -f: until it ends
  baton train cancel JOB            stop at the checkpoint
  baton train resume JOB            go on from it (--gate-usd-max USD: with another cap of its gate)
"""


def run(options: argparse.Namespace) -> int:
    """Do an action on jobs; with any other arguments, become the trainer."""
    action = options.rest[0] if options.rest else ""
    if action in ACTIONS:
        return ACTIONS[action](options.rest[1:])
    become("train", options.rest, python=_python(), more_help=JOBS_TEXT)


def _python() -> str:
    """The Python that training runs in."""
    return str(config.load().train_python or sys.executable)


# ---------------------------------------------------------------- jobs


def _parser(action: str, *, job: bool | None = True) -> argparse.ArgumentParser:
    """The arguments that the actions share. `job`: None where JOB is optional, False where there is none."""
    parser = argparse.ArgumentParser(prog=f"baton train {action}", allow_abbrev=False)
    if job is not False:
        parser.add_argument("job", metavar="JOB", nargs="?" if job is None else None)
    parser.add_argument("--admin-url", help="the admin API; default: of the gateway on the data directory")
    parser.add_argument("--admin-key-file", type=Path, metavar="FILE", help="an admin key; --admin-url needs it")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def _client(options: argparse.Namespace) -> AdminClient:
    return AdminClient(options.admin_url, options.admin_key_file)


def _submit(words: Sequence[str]) -> int:
    parser = _parser("submit", job=False)
    parser.add_argument("--policy", default="conductor", help="the policy that gets a new version")
    parser.add_argument("--auto", action="store_true", help="make the version a canary of 1 %% when the gate passes it")
    parser.add_argument("--gate", default="", metavar="'ARGUMENTS'", help="arguments of the gate, as one text")
    parser.add_argument("--check", action="store_true", help="say what is missing, and queue nothing")
    options, arguments = parser.parse_known_args(words)
    spec = _spec_of(arguments, options.gate)
    body, client = {"policy": options.policy, "auto": options.auto, **spec.body}, _client(options)
    if options.check or (spec.lacks and options.admin_url is None):
        ready = client.ask("POST", "/admin/jobs/check", body)
        if spec.lacks and options.admin_url is None:
            ready["missing"] = [_extra(spec.lacks), *ready["missing"]]
        if ready["missing"]:
            raise Conflict(readiness.missing_text(ready["missing"], ready["countdown"]), code="not_trainable")
        _print(ready, options, "nothing is missing; the same command without --check queues the job")
        return 0
    job = client.ask("POST", "/admin/jobs", body)
    _print(job, options, f"job {job['id']} of {job['policy']} is queued; `baton train logs -f {job['id']}` follows it")
    return 0


def _extra(lacks: Sequence[str]) -> str:
    """What the Python of the training lacks."""
    fix = "`scripts/install train` in a checkout, else `pip install 'baton[train]'`; or set BATON_TRAIN_PYTHON"
    return f"the train extra ({', '.join(lacks)}) in {_python()}: {fix}"


@dataclass(frozen=True, slots=True)
class ParsedSpec:
    """The `train` and `gate` of a job, and the packages that training lacks on this machine."""

    body: dict[str, Any]
    lacks: tuple[str, ...]


def _spec_of(arguments: Sequence[str], gate: str) -> ParsedSpec:
    """The spec of a job. The policy package parses the arguments. Raises BadRequest with its message."""
    services.require_policy("submit jobs")
    texts = json.dumps({"arguments": list(arguments), "gate": gate})
    command = [_python(), *SPEC_PROGRAM]
    process = subprocess.run(command, input=texts, capture_output=True, text=True, check=False)  # noqa: S603 - our program
    if process.returncode:
        raise BadRequest((process.stderr.strip().splitlines() or ["the arguments could not be read"])[-1])
    body = dict(json.loads(process.stdout))
    return ParsedSpec(body, tuple(body.pop("lacks")))


def _status(words: Sequence[str]) -> int:
    options = _parser("status", job=None).parse_args(words)
    client = _client(options)
    if options.job:
        job = client.ask("GET", f"/admin/jobs/{options.job}")
        _print(job, options, "\n".join(f"{name:<10} {value}" for name, value in described(job).items()))
        return 0
    jobs, ready = client.ask("GET", "/admin/jobs")["data"], client.ask("GET", "/admin/jobs/readiness")
    rows = [{**job, "job": job["id"], "step": _step(job["progress"]), "made": job["version"]} for job in jobs]
    shown = table(COLUMNS, rows) if jobs else "no jobs yet"
    _print({"data": jobs, "readiness": ready}, options, f"{countdown(ready)}\n\n{shown}")
    return 0


def countdown(ready: Mapping[str, Any]) -> str:
    """How far the log is from `baton train submit --env logged`, as `status` prints it."""
    requests, questions = ready["requests"], ready["questions"]
    lines = [
        f"judged requests    {ready['judged']:,}",
        f"to train on        {requests['have']:,} of {requests['need']:,}"
        f"   ({ready['sampled']:,} sampled by the conductor, {ready['drawn']:,} drawn by the rule)",
        f"gate questions     {questions['have']:,} of {questions['need']:,}",
    ]
    if ready["ready"]:
        return "\n".join([*lines, "trainable: `baton train submit --env logged` queues a job"])
    others = [one for one in ready["missing"] if one.startswith(readiness.WEIGHTS)]
    return "\n".join([*lines, *([ready["countdown"]] if ready["countdown"] else []), *others])


def described(job: Mapping[str, Any]) -> dict[str, Any]:
    """The known facts of a job, in the order in which they are printed."""
    progress = dict(job["progress"])
    facts = {
        "job": job["id"],
        "policy": job["policy"],
        "state": job["state"] + (", stopping" if job["cancel"] and job["state"] in jobs.ACTIVE else ""),
        "stage": job["stage"],
        "step": _step(progress),
        "reward": progress.get("reward"),
        "parsed": progress.get("parse_rate"),
        "spent": f"${progress['spent_usd']}" if progress.get("spent_usd") is not None else None,
        "left": _left(progress.get("eta_s")) if job["state"] == "running" and job["stage"] == "train" else None,
        "attempts": job["attempts"],
        "by": job["by"],
        "since": job["created_at"][:19],
        **_spec_lines(job["spec"]),
        "version": job["version"],
        "report": job["report"],
        "error": job["error"],
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _spec_lines(spec: Mapping[str, Any]) -> dict[str, str]:
    """Each part of a job's spec in one line; of a job that an older release stored, its arguments."""
    if "arguments" in spec:
        return {"arguments": shlex.join(spec["arguments"])}
    return {name: " ".join(_pairs(spec[name])) for name in ("train", "gate")}


def _pairs(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _pairs(value, f"{path}{name}.")
        else:
            yield f"{path}{name}={value if isinstance(value, str) else json.dumps(value)}"


def _step(progress: Mapping[str, Any]) -> str:
    return f"{progress['step']} of {progress['steps']}" if {"step", "steps"} <= set(progress) else ""


def _left(eta_s: int | None) -> str | None:
    if eta_s is None:
        return None
    minutes, seconds = divmod(eta_s, 60)
    return f"about {minutes} min {seconds} s" if minutes else f"about {seconds} s"


def _logs(words: Sequence[str]) -> int:
    parser = _parser("logs", job=None)
    parser.add_argument("-f", "--follow", action="store_true", help="until the job ends; then its exit status")
    options = parser.parse_args(words)
    client, after = _client(options), 0
    options.job = options.job or _latest(client)
    for _ in range(PAGES_MAX):
        page = _page(client, options, after)
        after = page["next"]
        if page["whole"]:
            break
    while options.follow:
        page = _page(client, options, after)
        after = page["next"]
        if page["whole"] and page["state"] not in jobs.ACTIVE:
            return EXITS.get(page["state"], 1)
        time.sleep(FOLLOW_S if page["whole"] else 0)
    return 0


def _latest(client: AdminClient) -> str:
    """The id of the job that was submitted last. Raises BadRequest where there is none."""
    jobs = client.ask("GET", "/admin/jobs?limit=1")["data"]
    if not jobs:
        raise BadRequest("no jobs yet; `baton train submit --env …` makes one")
    return str(jobs[0]["id"])


def _page(client: AdminClient, options: argparse.Namespace, after: int) -> Any:
    page = client.ask("GET", f"/admin/jobs/{options.job}/log?after={after}")
    for line in page["data"]:
        _print(line, options, f"{line['at'][11:19]} {line['line']}")
    return page


def _cancel(words: Sequence[str]) -> int:
    return _change("cancel", words)


def _resume(words: Sequence[str]) -> int:
    parser = _parser("resume")
    parser.add_argument("--gate-usd-max", default="", metavar="USD", help="another cap of the job's gate")
    options = parser.parse_args(words)
    cap = quote(options.gate_usd_max)
    return _changed(options, f"resume?gate_usd_max={cap}" if cap else "resume")


def _change(action: str, words: Sequence[str]) -> int:
    return _changed(_parser(action).parse_args(words), action)


def _changed(options: argparse.Namespace, action: str) -> int:
    job = _client(options).ask("POST", f"/admin/jobs/{options.job}/{action}")
    what = "stops after its checkpoint" if job["cancel"] else f"is {job['state']}"
    _print(job, options, f"job {job['id']} {what}")
    return 0


def _print(reply: Any, options: argparse.Namespace, text: str) -> None:
    show(options, reply, lambda _: text)


ACTIONS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "submit": _submit,
    "status": _status,
    "logs": _logs,
    "cancel": _cancel,
    "resume": _resume,
}
