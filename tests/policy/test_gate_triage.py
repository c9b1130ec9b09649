"""Triage on logged rollouts: scoring what was sampled, unusable rows by name, estimates and checks."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.core.loop.plan import PlanLimits, plan_schema, schema_hash
from gateway.errors import ConfigError, VersionRefused
from gateway.service.ports.request import ConductorCall, ConductorChunk, ConductorEnd, Sampling
from policy.dataset import parquet
from policy.dataset.refusals import RowRefused
from policy.dataset.row import Row
from policy.engines.directory import read_conductors
from policy.engines.embedded import OnnxEngine, open_runtime
from policy.engines.port import LoggedPlan, sampled
from policy.evaluate.entrants import SHIPPED
from policy.gate import triage
from policy.gate.checks import Check, Thresholds
from policy.gate.logged import NothingSampled, RolloutSource, call_of, read, rows_of
from policy.gate.triage import CandidateReply, ReplayCount
from policy.serve.manifest import read_complete
from tests.policy.dataset_rows import a_row
from tests.policy.gate_rows import arena_rows, export

N = 60
FEW = Thresholds(ess_min=20, category_rows_min=1_000)
PROMPT = read_complete(SHIPPED).manifest.prompt_hash


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return arena_rows(SHIPPED, N)


@pytest.fixture
def scorer() -> Iterator[OnnxEngine]:
    found = open_runtime(read_conductors([SHIPPED])[SHIPPED], 2)
    yield found
    asyncio.run(found.close())


async def made(_key: Sequence[object], make: Callable[[], Awaitable[Any]]) -> Any:
    """Keeps nothing."""
    return await make()


def silent(_what: str, _done: int, _total: int) -> None:
    """Progress that nobody reads."""


# ---------------------------------------------------------------- scoring


def test_the_weights_that_sampled_a_plan_score_it_as_it_was_logged(rows: list[Row], scorer: OnnxEngine) -> None:
    log = read(rows, PROMPT)
    assert len(log.requests) == N
    assert {call.row.call for call in log.calls} == {row.call for row in rows}
    for call in log.calls:
        row = call.row
        plan = LoggedPlan(row.prompt_token_ids, row.plan_token_ids, row.decision_mask, call.schema, call.temperature)
        for new, old, decides in zip(scorer.propensities(plan), row.plan_logprobs, row.decision_mask, strict=True):
            assert new == pytest.approx(old if decides else 0.0, abs=1e-4)


def test_tokens_that_the_grammar_forbids_have_no_probability(rows: list[Row], scorer: OnnxEngine) -> None:
    call = read(rows, PROMPT).calls[0]
    row = call.row
    wrong = list(row.plan_token_ids)
    wrong[0] = wrong[-1]
    plan = LoggedPlan(row.prompt_token_ids, wrong, row.decision_mask, call.schema, 1.0)
    assert scorer.propensities(plan) == [-math.inf] * len(wrong)


def test_propensities_follow_temperature_and_nucleus(rows: list[Row], scorer: OnnxEngine) -> None:
    call = read(rows, PROMPT).calls[0]
    row = call.row

    def score(temperature: float, top_p: float = 1.0) -> float:
        tokens = row.prompt_token_ids, row.plan_token_ids, row.decision_mask
        return float(sum(scorer.propensities(LoggedPlan(*tokens, call.schema, temperature, top_p))))

    assert score(5.0) != pytest.approx(score(1.0), abs=1e-3)
    assert score(1.0, 1e-6) in (0.0, -math.inf)  # nothing but the likeliest token is left


async def test_a_sampled_plan_is_a_plan(rows: list[Row], scorer: OnnxEngine) -> None:
    call = read(rows, PROMPT).calls[0]

    async def text(seed: int, messages: Any = call.row.messages) -> str:
        sampling = Sampling(temperature=1.0, seed=seed)
        return (await sampled(scorer, ConductorCall(messages, call.schema, sampling, 60.0))).text

    assert all([call.read(await text(seed)) for seed in range(4)])
    assert await text(0) == await text(0)
    assert await text(0, [{"role": "user", "content": "word " * 9000}]) == ""  # no room for a plan


def test_an_adapter_and_a_broken_directory_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(VersionRefused, match=r"manifest\.json"):
        read_conductors([tmp_path])


# ---------------------------------------------------------------- rows


def test_an_export_gives_the_rows_back(tmp_path: Path, rows: list[Row]) -> None:
    found = rows_of(RolloutSource(export(tmp_path / "log.parquet", rows[:5])))
    assert [row.call for row in found] == [row.call for row in rows[:5]]
    assert found[0].plan_token_ids == rows[0].plan_token_ids
    assert found[0].plan_logprobs == pytest.approx(rows[0].plan_logprobs)
    assert found[0].steps == rows[0].steps
    assert read(rows_of(RolloutSource(export(tmp_path / "all.parquet", rows))), PROMPT).left_out == {}


def test_the_validation_side_alone_judges_where_there_is_one(tmp_path: Path, rows: list[Row]) -> None:
    half = [replace(row, split="validation") for row in rows[:4]]
    found = rows_of(RolloutSource(export(tmp_path / "log.parquet", [*half, *rows[4:9]])))
    assert [row.call for row in found] == [row.call for row in half]


def test_files_that_are_no_export(tmp_path: Path) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_text("not parquet")
    other = tmp_path / "other.parquet"
    with other.open("wb") as file:
        parquet.write(file, parquet.row_schema(), [], {"shape": "verl"})
    for path in (bad, other, tmp_path / "none.parquet"):
        with pytest.raises(ConfigError, match="traces export"):
            rows_of(RolloutSource(path))
    with pytest.raises(ConfigError, match="no rows"):
        rows_of(RolloutSource(export(tmp_path / "empty.parquet", [])))


def changed(rows: list[Row], **changes: Any) -> list[Row]:
    """The rows with their first request changed in all its planning calls."""
    return [replace(row, **changes) if row.root_id == rows[0].root_id else row for row in rows]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outcome": None}, "no_outcome"),
        ({"plan_logprobs": []}, "no_logprobs"),
        ({"plan_logprobs": [-math.inf]}, "no_logprobs"),
        ({"plan_token_ids": []}, "no_tokens"),
        ({"plan_token_ids": [], "log_mode": "redacted"}, "redacted"),
        ({"prompt_hash": "another"}, "other_prompt"),
        ({"schema_hash": "another"}, "other_schema"),
        ({"allowed": None}, "no_allowed"),
        ({"sampling": asdict(Sampling(temperature=0.0))}, "greedy"),
        ({"sampling": {"temperature": 1.0}}, "other_sampling"),
        ({"round": 2}, "incomplete"),
        ({"root_id": "gone"}, "incomplete"),
    ],
)
def test_a_request_that_cannot_be_used_is_counted_by_name(
    rows: list[Row], changes: dict[str, Any], reason: str
) -> None:
    log = read(changed(rows, **changes), PROMPT)
    assert log.left_out == {reason: 1}
    assert len(log.requests) == N - 1
    assert log.reasons().startswith(f"1 {reason} (")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"outcome": 1.0}, "every outcome is 1"),
        ({"outcome": None}, "none of"),
        ({"outcome": 3.0}, "outside"),
        ({"root_id": "elsewhere"}, "rollouts that are not among its rows"),
    ],
)
def test_a_log_that_nothing_can_be_judged_from_is_one_line(
    rows: list[Row], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        read([replace(row, **changes) for row in rows], PROMPT, "FILE")
    assert str(caught.value).startswith("FILE: ")
    assert "\n" not in str(caught.value)


def test_the_grammar_follows_from_what_was_allowed_and_is_proven_by_its_hash() -> None:
    allowed = PlanLimits(("quill", "self", "atlas"), 3, 4, frozenset({"deep"}))
    row = a_row(allowed=allowed.as_json(), schema_hash=schema_hash(plan_schema(allowed)), messages=[])
    call = call_of(row)
    assert (call.allowed, call.schema) == (allowed, plan_schema(allowed))
    for logged, reason in ((PlanLimits(("quill",), 3, 4).as_json(), "other_schema"), (None, "no_allowed")):
        with pytest.raises(RowRefused, match=reason):
            call_of(replace(row, allowed=logged))


# ---------------------------------------------------------------- asking, estimating, checking


async def test_the_policy_that_logged_passes_its_own_triage(rows: list[Row], scorer: OnnxEngine) -> None:
    log = read(rows, PROMPT)
    replayed = await triage.replay(scorer, log, FEW, made, silent)
    assert replayed.alike
    answered = await triage.ask(scorer, log.requests, made, silent)
    found = triage.estimates(log.requests, answered, FEW, 0)
    assert found.report.mean_weight.value == pytest.approx(1.0, abs=1e-3)
    assert found.report.ess == pytest.approx(N, rel=1e-3)
    checks = triage.checks(log, replayed, found, replace(FEW, logged_margin=0.2))
    verdicts = {check.name: check.verdict for check in checks}
    assert list(verdicts) == [
        *("plan_validity", "sampled_validity", "mean_weight", "effective_sample_size", "kl_to_behaviour"),
        "doubly_robust",
        *("doubly_robust[small categories]", "price"),
    ]
    assert verdicts.pop("doubly_robust[small categories]") == "cannot say"
    assert verdicts.pop("doubly_robust") == "not worse"
    few = {verdicts.pop("plan_validity"), verdicts.pop("sampled_validity")}  # so few plans
    assert few <= {"passed", "undecided"}
    assert set(verdicts.values()) == {"passed"}
    told = triage.facts(log, found, "FILE")
    assert told["requests"] == N
    assert told["report"]["estimates"]["dr"]["value"] == pytest.approx(
        np.mean([request.outcome for request in log.requests]) + found.gain.value
    )


async def test_replaying_ends_where_too_many_plans_are_invalid(
    rows: list[Row], scorer: OnnxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = read(rows, PROMPT)

    async def empty(_call: ConductorCall) -> AsyncIterator[ConductorChunk | ConductorEnd]:
        yield ConductorChunk('{"steps":[]}')

    monkeypatch.setattr(scorer, "decode", empty)
    replayed = await triage.replay(scorer, log, FEW, made, silent)
    assert replayed.valid < replayed.asked < len(log.calls)
    assert by_name(triage.checks(log, replayed, None, FEW))["plan_validity"].refuses


async def test_a_candidate_of_another_tokenizer_is_not_scored(rows: list[Row], scorer: OnnxEngine) -> None:
    log = read([replace(row, prompt_token_ids=[*row.prompt_token_ids, 1]) for row in rows], PROMPT)
    checks, facts = await triage.triage(scorer, log, FEW, 0, "FILE", made, silent)
    assert facts["left_out"]["other_tokens"] == len(log.requests)
    assert by_name(checks)["mean_weight"].verdict == "cannot say"


async def test_finished_parts_of_triage_are_not_asked_again(
    rows: list[Row], scorer: OnnxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, Any] = {}

    async def keep(key: Sequence[object], make: Callable[[], Awaitable[Any]]) -> Any:
        if str(key) not in kept:
            kept[str(key)] = json.loads(json.dumps(await make()))
        return kept[str(key)]

    log = read(rows, PROMPT)
    before = await triage.triage(scorer, log, FEW, 0, "FILE", keep, silent)
    assert len(kept) == math.ceil(len(log.calls) / triage.PART) + math.ceil(N / triage.PART)
    monkeypatch.setattr(scorer, "decode", None)
    monkeypatch.setattr(scorer, "score", None)
    assert await triage.triage(scorer, log, FEW, 0, "FILE", keep, silent) == before


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def answers(rows: list[Row], weights: list[float]) -> dict[str, Check]:
    """Checks where the candidate plans as was logged and its weights are these, one after the other."""
    log = read(rows, PROMPT)
    answered = [
        CandidateReply(math.log(weights[at % len(weights)]), request.first.read(request.first.row.plan_text or ""))
        for at, request in enumerate(log.requests)
    ]
    found = triage.estimates(log.requests, answered, FEW, 0)
    return by_name(triage.checks(log, ReplayCount(10, 10), found, FEW))


def test_weights_that_are_off_refuse_and_nothing_is_estimated(rows: list[Row]) -> None:
    low = answers(rows, [0.5])
    assert low["mean_weight"].verdict == "refused"
    assert low["effective_sample_size"].verdict == "passed"  # weights that shrink together fool it
    assert low["doubly_robust"].verdict == low["price"].verdict == "cannot say"
    uneven = answers(rows, [*[1e-6] * 14, 15.0])
    assert uneven["effective_sample_size"].verdict == "refused"
    assert uneven["kl_to_behaviour"].verdict == "refused"


def test_a_candidate_that_does_what_failed_is_refused(rows: list[Row]) -> None:
    """Weights above one where the outcome was 0 and below where it was 1, one on average."""
    log = read(rows, PROMPT)
    right = [request.outcome for request in log.requests]
    share = float(np.mean(right))
    weights = [0.5 if each else 1 + 0.5 * share / (1 - share) for each in right]
    assert answers(rows, weights)["doubly_robust"].verdict == "refused"
    weights = [1 + 0.5 * (1 - share) / share if each else 0.5 for each in right]
    assert answers(rows, weights)["doubly_robust"].verdict == "passed"


def test_a_candidate_that_does_what_was_dear_is_refused_unless_it_is_better(rows: list[Row]) -> None:
    def priced(dear: bool) -> list[Row]:
        roots = {root: at for at, root in enumerate(dict.fromkeys(row.root_id for row in rows))}
        return [
            replace(row, outcome=float(roots[row.root_id] % 4 < 2), cost_nano=10**6 * (9 if even == dear else 1))
            for row in rows
            for even in (roots[row.root_id] % 2 == 0,)
        ]

    towards_even = [1.9, 0.1]
    assert answers(priced(True), towards_even)["price"].verdict == "refused"
    assert answers(priced(False), towards_even)["price"].verdict == "passed"


def test_plans_that_break_off_once_they_are_sampled_refuse(rows: list[Row]) -> None:
    log = read(rows, PROMPT)
    answered = [CandidateReply(0.0, None) for _ in log.requests]
    found = triage.estimates(log.requests, answered, FEW, 0)
    checks = by_name(triage.checks(log, ReplayCount(10, 10), found, FEW))
    assert checks["sampled_validity"].verdict == "refused"
    assert checks["doubly_robust"].verdict == "cannot say"


def test_too_few_rows_cannot_say(rows: list[Row]) -> None:
    log = read(rows, PROMPT)
    answered = [CandidateReply(0.0, request.first.read(request.first.row.plan_text or "")) for request in log.requests]
    found = triage.estimates(log.requests, answered, Thresholds(), 0)
    checks = by_name(triage.checks(log, ReplayCount(0, 0), found, Thresholds()))
    assert (checks["effective_sample_size"].verdict, checks["effective_sample_size"].more) == ("undecided", 100 - N)
    for name in ("plan_validity", "doubly_robust", "price"):
        assert checks[name].verdict == "cannot say"
        assert checks[name].todo
    nothing = by_name(
        triage.checks(replace(log, requests=[], left_out={"greedy": 9}), ReplayCount(500, 500), None, FEW)
    )
    assert nothing["plan_validity"].verdict == "passed"
    assert "9 greedy (planned at temperature 0" in nothing["mean_weight"].figure
    assert not any(check.refuses for check in nothing.values())


def test_what_the_rule_drew_is_no_request_of_triage(rows: list[Row]) -> None:
    drawn = [replace(row, planner="rule", prompt_hash=None, plan_token_ids=[]) for row in rows]
    assert len(read([*rows, *drawn], PROMPT).requests) == len(read(rows, PROMPT).requests)
    with pytest.raises(NothingSampled, match="FILE: the rule drew every plan of it"):
        read(drawn, PROMPT, "FILE")
