"""Logged rollouts as requests to judge a candidate by: complete, sampled, under the grammars that were logged.

A request is a root rollout with all its rounds and child loops, since they share one outcome; its weight is the product
over all its planning calls. Whatever cannot be used is counted by name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.core.loop.plan import Plan, PlanLimits, validate
from gateway.core.pool.workers import NANO_PER_USD
from gateway.errors import ConfigError, PlanRefused
from policy.dataset import parquet
from policy.dataset.curate import load
from policy.dataset.refusals import RowRefused, listed
from policy.dataset.row import RULE, Row
from policy.dataset.rules import Rules, grammar_of, token_fault, value_of
from policy.dataset.select import Selection
from policy.serve.sampling import GREEDY_BELOW

ROWS_MAX = 50_000


@dataclass(frozen=True, slots=True)
class RolloutSource:
    """Where logged rollouts come from: an export, or the log itself with a selection."""

    export: Path | None = None
    database_url: str = ""
    selection: Selection = field(default_factory=Selection)
    rules: Rules = field(default_factory=lambda: Rules(tokens_required=False, key_share_max=1.0))  # all are judged on

    @property
    def name(self) -> str:
        """For the report: no URL, which may hold a password."""
        return str(self.export) if self.export else f"the log ({self.selection})"


@dataclass(frozen=True, slots=True)
class PlanningCall:
    """One planning call with what it was allowed to plan."""

    row: Row
    allowed: PlanLimits
    schema: Mapping[str, Any]

    @property
    def temperature(self) -> float:
        """It was sampled at."""
        return float(self.row.sampling.get("temperature") or 0.0)

    @property
    def top_p(self) -> float:
        """It was sampled with."""
        return float(self.row.sampling.get("top_p") or 1.0)

    def read(self, text: str) -> Plan | None:
        """A plan within this call's caps, None for any other text."""
        try:
            return validate(text, self.allowed)
        except PlanRefused:
            return None

    def workers(self, plan: Plan) -> tuple[str, ...]:
        """Names of the workers that a plan calls, in order."""
        names = {str(one["handle"]): str(one["name"]) for one in self.row.pool}
        return tuple(names.get(step.worker, step.worker) for step in plan.steps)


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request: its planning calls, the first round of the outermost loop first. A refused plan counts as wrong."""

    calls: tuple[PlanningCall, ...]
    outcome: float  # in [0, 1]
    usd: float

    @property
    def first(self) -> PlanningCall:
        """Round 1 of the outermost loop."""
        return self.calls[0]

    @property
    def category(self) -> str:
        """As the client named it."""
        return self.first.row.task_type or ""

    @property
    def question(self) -> str:
        """Equal for requests that ask the same."""
        return self.first.row.group


@dataclass(frozen=True, slots=True)
class Log:
    """`requests` can be reweighted, `calls` replayed (greedy ones too). `left_out`: requests by reason."""

    requests: list[LoggedRequest]
    calls: list[PlanningCall]
    left_out: Mapping[str, int]
    versions: tuple[str, ...]

    def reasons(self) -> str:
        """The requests left out, most first: `12 greedy (what to do); 3 …`."""
        return listed(self.left_out)


class NothingSampled(ConfigError):
    """A log of plans that no planner sampled: there is nothing to reweight, and the held-out run judges alone."""


def rows_of(source: RolloutSource) -> list[Row]:
    """Every selected row; of an export with a validation side that side alone, for the other was trained on. Raises
    ConfigError on a file that is no export, on too many or no rows; as `curate.load`."""
    if source.export is None:
        split_rows = load(source.database_url, source.selection, source.rules, ROWS_MAX)
        return [*split_rows.train, *split_rows.validation]
    rows = []
    for row in parquet.read(source.export):
        rows.append(row)
        if len(rows) > ROWS_MAX:
            raise ConfigError(f"{source.export}: over {ROWS_MAX:,} rows; export fewer with --since")
    if not rows:
        raise ConfigError(f"{source.export}: no rows; widen the filters of the export")
    return [row for row in rows if row.split == "validation"] or rows


def read(rows: Sequence[Row], prompt_hash: str, source: str = "the log") -> Log:
    """Requests whose plans a candidate trained on the prompt `prompt_hash` can be asked about. Raises ConfigError where
    outcomes all say the same or none is there, so that nothing can be judged from them. What the rule drew alone is not
    for triage: it has no tokens to compare. Raises NothingSampled where that is all."""
    sampled = [row for row in rows if row.planner != RULE or row.fallback is not None]
    if rows and not sampled:
        raise NothingSampled(f"{source}: the rule drew every plan of it, and no log-probs can be compared")
    rows = sampled
    _check_outcomes(rows, source)
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        families[row.root_id].append(row)
    requests, calls, left_out = [], [], Counter[str]()
    for root_id, family in families.items():
        ordered = sorted(family, key=lambda row: (row.rollout_id != root_id, row.rollout_id, row.round))
        usable, refusal = _calls(ordered, prompt_hash)
        calls += usable
        reason = _why_not(root_id, ordered, prompt_hash) or refusal
        if reason is None and any(call.temperature < GREEDY_BELOW for call in usable):
            reason = "greedy"
        if reason is not None:
            left_out[reason] += 1
            continue
        requests.append(_request(usable))
    return Log(requests, calls, left_out, tuple(sorted({row.policy_version or "?" for row in rows})))


def _calls(family: Sequence[Row], prompt_hash: str) -> tuple[list[PlanningCall], str | None]:
    """The planning calls made under that prompt, and why the first of those that cannot be used is refused."""
    calls, refusal = [], None
    for row in family:
        try:
            call = call_of(row)
        except RowRefused as error:
            refusal = refusal or error.reason
        else:
            calls += [call] if row.prompt_hash == prompt_hash else []
    return calls, refusal


def call_of(row: Row) -> PlanningCall:
    """The planning call of a row with its schema. Raises RowRefused as `grammar_of`."""
    return PlanningCall(row, *grammar_of(row))


def _request(calls: Sequence[PlanningCall]) -> LoggedRequest:
    row = calls[0].row
    outcome = value_of(row, all(call.row.parsed for call in calls))
    return LoggedRequest(tuple(calls), outcome, row.cost_nano / NANO_PER_USD)


def _check_outcomes(rows: Sequence[Row], source: str) -> None:
    outcomes = {row.outcome for row in rows if row.outcome is not None}
    if not outcomes:
        raise ConfigError(f"{source}: none of {len(rows)} rows has an outcome: post outcomes (POST /v1/outcomes) first")
    if any(not 0 <= value <= 1 for value in outcomes):
        raise ConfigError(f"{source}: outcomes outside [0, 1]: nothing can be judged from them; correct them")
    if len(outcomes) == 1 and len(rows) > 1:
        raise ConfigError(
            f"{source}: every outcome is {outcomes.pop():g}: nothing can be judged from it; post ones that differ"
        )
    if not any(row.rollout_id == row.root_id for row in rows):
        raise ConfigError(f"{source}: outcomes of rollouts that are not among its rows; export their requests too")


def _why_not(root_id: str, family: Sequence[Row], prompt_hash: str) -> str | None:
    """The first reason that holds for a request, a key of dataset.refusals.REASONS."""
    rounds: dict[str, list[int]] = defaultdict(list)
    for row in family:
        rounds[row.rollout_id].append(row.round)
    if root_id not in rounds or any(seen != list(range(1, len(seen) + 1)) for seen in rounds.values()):
        return "incomplete"
    if any(row.outcome is None for row in family):
        return "no_outcome"
    if any(row.prompt_hash != prompt_hash for row in family):
        return "other_prompt"
    return next((fault for row in family if (fault := token_fault(row, row.log_mode))), None)
