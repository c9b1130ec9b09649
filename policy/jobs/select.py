"""The first stage of a job, as a program: what it trains on, and what judges it, is written down once for all attempts.

For `logged` the selected rows become a file; for the others the files that are named get their hashes. What is trained
on traffic is judged on requests that training does not see: they become a file, too.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gateway.adapters.engines.sealed import file_sha256
from gateway.adapters.host.urls import as_url
from gateway.core.policies.holdout import Bound
from gateway.core.policies.jobs import TRAFFIC
from gateway.core.pool.workers import MODEL_KINDS
from gateway.errors import ConfigError
from gateway.files import write_atomic
from policy.dataset.export import export, summary
from policy.dataset.read import group_of
from policy.dataset.rules import Rules
from policy.dataset.select import Selection
from policy.gate.checks import Thresholds
from policy.gate.scene import GateSpec
from policy.gate.traffic import requests as heldout
from policy.gate.traffic.requests import HeldOut
from policy.inputs import local
from policy.record.questions import of_file
from policy.simulators.arena.workers import HELD_OUT, STANDARD
from policy.spec import checked
from policy.train.spec import TrainSpec, chosen

GATE_FILES = ("data", "prices", "key_file", "pool_file", "train", "rows", "requests")
ROWS, REQUESTS = "rows.parquet", "requests.json"
ASKING = ("url", "key_file", "pool_file", "usd_max")  # what a gate on them needs
SIMULATED = frozenset(worker.name for staff in (STANDARD, HELD_OUT) for worker in staff)


def select(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return {train (with the rows), inputs: {path: sha256}, origins: {path: URL}, report, requests, bound} for a
    `request` of {train, gate, known, database_url, work}. `known`: of the gate's arguments, what the gateway here
    gives. `requests`: the file of the held-out requests; None where the gate asks elsewhere. Raises as
    `policy.inputs.local`, `dataset.export` and `held_out`, and ConfigError for a file that cannot be read."""
    work, url = Path(request["work"]), str(request["database_url"])
    inputs_local, origins = local(request["train"], work / "inputs")
    spec = checked(TrainSpec, inputs_local)
    check_files(request["gate"])
    files = inputs(spec)
    selected: dict[str, Any] = {"train": inputs_local, "inputs": files, "origins": origins, "report": None}
    selected |= {"requests": None, "bound": None}
    if spec.env not in TRAFFIC:
        return selected
    selection, rules = chosen(spec.filters)
    if (held := _held_out(url, selection, rules, spec, request["gate"], request["known"])) is not None:
        heldout.write(work / REQUESTS, held)
        files[str(work / REQUESTS)] = sha256(work / REQUESTS)
        selected |= {"requests": str(work / REQUESTS), "bound": held.bound.as_json()}
        sys.stderr.write(f"{len(held.requests)} requests are held out for the gate: {json.dumps(selected['bound'])}\n")
        rules = replace(rules, validation_share=0.0, split_at=held.bound.at, split_keys=held.bound.keys)
    return selected if spec.env == "live" else selected | _rows(url, selection, rules, inputs_local, files, work)


def _rows(
    url: str, selection: Selection, rules: Rules, given: Mapping[str, Any], files: Mapping[str, str], work: Path
) -> dict[str, Any]:
    """The selected rows as a file, both sides of the bound, and the spec that trains on it."""
    rows = work / ROWS
    report = export(url, selection, rules, rows, split=None)
    sys.stderr.write(f"{summary(report, rows)}\n")
    train = {**given, "export": str(rows), "filters": {}}
    return {"train": train, "inputs": {**files, str(rows): sha256(rows)}, "report": asdict(report)}


def _held_out(
    url: str,
    selection: Selection,
    rules: Rules,
    spec: TrainSpec,
    gate: Mapping[str, Any],
    known: Mapping[str, str],
) -> HeldOut | None:
    """What the gate asks; None where it asks elsewhere: its spec says so, or the traffic is the arena's. Raises
    ConfigError with all that the gate lacks to ask real workers."""
    if gate.get("env") not in (None, "logged"):
        return None
    gate_spec = checked(GateSpec, gate)
    at = rules.split_at or gate_spec.held_out_from
    held = heldout.held_out(
        url,
        selection,
        Bound(at, rules.split_keys) if at else None,
        share=rules.validation_share or gate_spec.held_out_share,
        seen=_questions(spec),
    )
    if gate_spec.env is None and _simulated(held):
        return None
    lacks, asked = [], {**{name: getattr(spec, name) for name in ASKING[:-1]}, **known, **gate}
    if missing := [name for name in ASKING if not asked.get(name)]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        lacks.append(
            f"what is trained on traffic is judged on the user's own requests, of real workers: give the gate {flags} "
            '(--gate "…"), or --env arena where the traffic was the arena\'s'
        )
    least = int(gate_spec.thresholds.get("questions_min", Thresholds().questions_min))
    if len(held.requests) < min(least, gate_spec.n or least):
        lacks.append(_too_few(held, least, rules.validation_share or gate_spec.held_out_share))
    if lacks:
        raise ConfigError("; and ".join(lacks))
    return held


def _too_few(held: HeldOut, least: int, share: float) -> str:
    """How many more requests the gate needs, said before training begins."""
    more = math.ceil((least - len(held.requests)) / share)
    return (
        f"about {more:,} more judged requests are needed: the gate asks {least} that training has not seen, and "
        f'{len(held.requests)} are held out, the latest {share:.0%} (--gate "--held-out-share 0.3" holds out more)'
        + (f". Left out: {', '.join(f'{n} {reason}' for reason, n in held.left_out.items())}" if held.left_out else "")
    )


def _simulated(held: HeldOut) -> bool:
    """Whether all workers of the traffic are the arena's."""
    pools = {(entry.get("kind"), entry.get("name")) for request in held.requests for entry in request.pool}
    names = {name for kind, name in pools if kind in MODEL_KINDS}
    return bool(names) and names <= SIMULATED


def _questions(spec: TrainSpec) -> set[str]:
    """Groups of the questions that live training reads from its file."""
    if spec.env != "live" or spec.prompts_file is None:
        return set()
    questions, _ = of_file(spec.prompts_file, spec.grader, None)
    return {group_of({"messages": list(question.messages)}, question.id) for question in questions}


def inputs(spec: TrainSpec) -> dict[str, str]:
    """The files that a spec names, with their hashes. Raises ConfigError naming one that cannot be read."""
    paths = [path for path in (spec.data, spec.prices, spec.prompts_file) if path is not None]
    return {str(path.resolve()): sha256(path) for path in paths}


def check_files(gate: Mapping[str, Any]) -> None:
    """Check that the files which the gate will read are there, before anything is trained. Raises ConfigError."""
    for name in GATE_FILES:
        path = gate.get(name)
        if path and as_url(path) is None and not Path(path).is_file():
            flag = name.replace("_", "-")
            raise ConfigError(f"--gate: --{flag} {path}: there is no such file; name a file that the worker can read")


def sha256(path: Path) -> str:
    """Raises ConfigError."""
    try:
        return file_sha256(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that the worker can read") from None


def changed(inputs: Mapping[str, str]) -> str | None:
    """The first file that is not what it was."""
    return next((path for path, was in inputs.items() if sha256(Path(path)) != was), None)


def write_json(path: Path, content: Any) -> None:
    """Replace a file with `content` as JSON."""
    write_atomic(path, json.dumps(content))
