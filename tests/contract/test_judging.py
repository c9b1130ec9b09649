"""One gate, three engines: on the embedded runtime, on torch (marker `train`) and over HTTP the same policy meets the
same verdict, check by check, and logged plans have the same log-probs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.service.loop.conducting import ConductorSettings
from policy.__main__ import main
from policy.dataset.row import Row
from policy.engines import directory
from policy.engines.choice import EngineChoice
from policy.engines.directory import read_conductors
from policy.engines.opening import open_engine
from policy.gate import injection, triage
from policy.gate.logged import PlanningCall, RolloutSource, read, rows_of
from tests.contract.conductors import embedded_server
from tests.contract.conftest import SHIPPED
from tests.policy.broken_policies import fond_of, reworded_manifest, spoiled
from tests.policy.gate_rows import arena_rows, export

REQUESTS, QUESTIONS = 12, 6
EXACT = 1e-3  # nats a token, float32 on both sides, as in test_plan_engine
A_REQUEST = 0.02  # nats: a request has about a dozen tokens that decide something
PLAN_TOKENS_MAX = 64
LOOSE = (  # a dozen sampled plans decide nothing by their number
    *("questions_min=1", "ess_min=1", "ess_share_min=0.01", "margin=1", "logged_margin=1", "usd_ratio_max=100"),
    *("valid_min=0.5", "parse_min=0.5", "parse_drop_max=1"),
)
TORCH = pytest.param("torch", marks=pytest.mark.train)


@dataclass(frozen=True)
class Judged:
    """What the gate says of a policy on one engine."""

    status: int
    verdicts: Mapping[str, str]
    facts: Mapping[str, Any]  # of the triage
    row: Mapping[str, Any]  # of the held-out run; empty where triage refused


@dataclass(frozen=True)
class Place:
    """The policies, the servers that have them, and the log."""

    policies: Mapping[str, Path]
    urls: Mapping[str, str]
    log: Path
    reports: Path
    judged: dict[tuple[str, str], Judged]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The shipped conductor, whose log it is, and its weights turned so that they call one worker, whatever it is."""
    folder = tmp_path_factory.mktemp("judging")
    rows = arena_rows(SHIPPED, REQUESTS)
    roots = sorted({row.root_id for row in rows})
    rows = [replace(row, outcome=float(roots.index(row.root_id) % 2)) for row in rows]  # they differ, whatever is drawn
    log = export(folder / "log.parquet", rows)
    prompt = str(rows[0].messages[0]["content"])
    fond = spoiled(SHIPPED, folder / "fond", fond_of(SHIPPED, "cedar", prompt, 300.0), "4")
    reworded_manifest(fond, probe={})  # the probe is of other weights: no server would start on them
    with embedded_server(SHIPPED) as (shipped, _), embedded_server(fond) as (other, _):
        yield Place(
            {"shipped": SHIPPED, "fond": fond}, {"shipped": f"{shipped}/v1", "fond": f"{other}/v1"}, log, folder, {}
        )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few attacks; plans that run on end soon."""
    monkeypatch.setattr(directory, "ConductorSettings", partial(ConductorSettings, tokens_max=PLAN_TOKENS_MAX))
    monkeypatch.setattr(triage, "PLAN_TOKENS_MAX", PLAN_TOKENS_MAX)
    whole = injection.injections()
    short = tuple(one for one in whole.attacks if one.kind in ("control", "handle"))[::6]
    monkeypatch.setattr(injection, "injections", lambda: injection.InjectionSet("test", whole.questions, short))


def judge(place: Place, policy: str, engine: str) -> Judged:
    """The gate's report, made once."""
    known = place.judged.get((policy, engine))
    if known is not None:
        return known
    out = place.reports / f"{policy}-{engine}.json"
    name = place.urls[policy] if engine == "endpoint" else engine
    words = ["gate", "--candidate", str(place.policies[policy]), "--out", str(out), "--env", "arena", "--engine", name]
    words += ["--logged", str(place.log), "--n", str(QUESTIONS), "--train-n", "4", "--draws", "1"]
    status = main([*words, *(word for bound in LOOSE for word in ("--set", bound))])
    report = json.loads(out.read_text())
    verdicts = {check["name"]: check["verdict"] for part in report["parts"] for check in part["checks"]}
    facts = {part["name"]: part["facts"] for part in report["parts"]}["off-policy triage"]
    found = Judged(status, verdicts, facts, report.get("evaluation", {}).get("policies", {}).get("candidate", {}))
    place.judged[policy, engine] = found
    return found


@pytest.mark.parametrize("engine", ["endpoint", TORCH])
@pytest.mark.parametrize(("policy", "status"), [("shipped", 0), ("fond", 4)])
def test_the_same_policy_meets_the_same_verdict_on_every_engine(
    place: Place, policy: str, status: int, engine: str
) -> None:
    ours, theirs = judge(place, policy, engine), judge(place, policy, "embedded")
    assert (ours.status, ours.verdicts) == (status, theirs.verdicts)
    assert ours.row == theirs.row
    assert ("refused" in ours.verdicts.values()) == (status == 4)


@pytest.mark.parametrize("engine", ["endpoint", TORCH])
def test_what_triage_measures_is_the_same_within_the_bound(place: Place, engine: str) -> None:
    ours, theirs = judge(place, "shipped", engine).facts, judge(place, "shipped", "embedded").facts
    numbers = {name: value for name, value in theirs.items() if isinstance(value, float)}
    assert numbers
    assert {name: ours[name] for name in numbers} == pytest.approx(numbers, abs=A_REQUEST)


def calls_of(log: Path, prompt_hash: str) -> list[PlanningCall]:
    source = RolloutSource(export=log)
    return list(read(rows_of(source), prompt_hash, source.name).calls)


@pytest.mark.parametrize("engine", ["embedded", "endpoint", TORCH])
async def test_logged_plans_have_the_log_probs_that_were_logged(place: Place, engine: str) -> None:
    conductor = read_conductors([SHIPPED])[SHIPPED]
    calls = calls_of(place.log, conductor.manifest.prompt_hash)
    name = place.urls["shipped"] if engine == "endpoint" else engine
    async with open_engine(conductor, EngineChoice(name)) as opened:
        scores = await opened.score([triage._logged(call) for call in calls])
    rows: list[Row] = [call.row for call in calls]
    off = [
        abs(score - logprob)
        for row, own in zip(rows, scores, strict=True)
        for score, logprob, decides in zip(own, row.plan_logprobs or (), row.decision_mask or (), strict=True)
        if decides
    ]
    assert len(off) > REQUESTS
    assert max(off) < EXACT
