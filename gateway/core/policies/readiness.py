"""How far a log is from a retraining that the gate can judge: what there is and what is missing. Pure.

The numbers are those of a job: `needs_of` reads its spec, `readiness` counts the log by the bound that the job's
selection uses (`holdout`). Whatever is missing is said at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from gateway.core.policies.holdout import HELD_OUT_SHARE, Bound, bound_of
from gateway.core.policies.jobs import TRAFFIC, JobSpec
from gateway.errors import BadRequest

REQUESTS_MIN = 200  # to train on: so that half of the gate's least effective sample is there where half of them count
QUESTIONS_MIN = 100  # that training has not seen, for the gate
RATE_DAYS = 7.0
RATE_DAYS_MIN = 1 / 24  # a log of a minute does not say what a day brings
JUDGED_SURE = 20  # judged requests from which the log's own shares count
WEIGHTS = "weights to begin with"
NOT_READY = "this job could not be carried out; missing are"
FILTERS = ("since", "until", "pools", "keys", "tags", "policy_versions")  # that the count follows


@dataclass(frozen=True, slots=True)
class JudgedRequest:
    """A judged request that may train. `sampled`: it has a plan with log-probs that the conductor sampled; `drawn`: the
    rule drew its plan with a known propensity; `askable`: the gate can ask it again; `group`: of the same question."""

    at: datetime
    key: str
    sampled: bool
    drawn: bool
    askable: bool
    group: str

    @property
    def trains(self) -> bool:
        """Whether policy gradients can be computed of it."""
        return self.sampled or self.drawn


@dataclass(frozen=True, slots=True)
class Needs:
    """What a job needs of the log. `bound`: None for the latest `held_out_share`; `any_plan`: it learns from plans that
    won, whoever made them; `filters`: of the log, those of FILTERS; `weights`: it begins with the live version."""

    requests: int = REQUESTS_MIN
    questions: int = QUESTIONS_MIN
    held_out_share: float = HELD_OUT_SHARE
    bound: Bound | None = None
    any_plan: bool = False
    weights: bool = True
    filters: Mapping[str, Any] = field(default_factory=dict)


def needs_of(spec: JobSpec, *, simulated: bool) -> Needs:
    """What a job of this spec needs. `simulated`: the workers are the arena's, where the gate asks by itself. Raises
    BadRequest for a filter that is no time."""
    train, gate = spec.train, spec.gate
    if train.get("env") not in TRAFFIC:
        return Needs(0, 0, weights=False)
    filters = train.get("filters") or {}
    sft = train.get("method") == "sft"
    asks = gate.get("env") == "logged" or (gate.get("env") is None and not simulated)
    least = int((gate.get("thresholds") or {}).get("questions_min", QUESTIONS_MIN))
    share = float(filters.get("validation_share") or (asks and gate.get("held_out_share", HELD_OUT_SHARE)) or 0)
    at = _time(filters.get("split_at") or (asks and gate.get("held_out_from")) or None)
    return Needs(
        requests=1 if sft else _requests_min(train),
        questions=min(least, int(gate.get("n") or least)) if asks else 0,
        held_out_share=share,
        bound=Bound(at, tuple(filters.get("split_keys") or ())) if at or not share else None,
        any_plan=sft,
        weights=not train.get("init"),
        filters={name: filters[name] for name in FILTERS if filters.get(name)},
    )


def _requests_min(train: Mapping[str, Any]) -> int:
    of_profile = REQUESTS_MIN if train.get("profile") in (None, "logged") else 0
    least = (train.get("settings") or {}).get("requests_min", of_profile)
    return int(least) if train["env"] == "logged" else 0


def _time(text: Any) -> datetime | None:
    try:
        at = datetime.fromisoformat(text) if text else None
    except (TypeError, ValueError):
        raise BadRequest(f"`{str(text)[:40]}` is no time; write 2026-01-31T12:00:00Z", param="train.filters") from None
    return at if at is None or at.tzinfo else at.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Readiness:
    """What a log has for a retraining. `sampled` and `drawn` are of the requests to train on; `more`: judged requests
    that are still needed, None where this log says nothing of how many; `per_day`: of the last RATE_DAYS days; `at`:
    when they are there at that rate."""

    judged: int
    requests: int
    requests_needed: int
    sampled: int
    drawn: int
    questions: int
    questions_needed: int
    held_out_share: float
    more: int | None
    per_day: float
    at: datetime | None
    weights: bool = True  # there is a version to begin with

    @property
    def missing(self) -> tuple[str, ...]:
        """What keeps a job from training or from being judged, each with what to do about it."""
        lacks = []
        if not self.weights:
            lacks.append(f"{WEIGHTS}: no version is live and none is shipped; give --init DIR")
        if self.requests < self.requests_needed:
            lacks.append(
                f"requests to train on: {self.requests:,} of {self.requests_needed:,} ({self.sampled:,} sampled by the "
                f"conductor with log-probs, {self.drawn:,} drawn by the rule)" + self._none_trains()
            )
        if self.questions < self.questions_needed:
            lacks.append(
                f"questions for the gate: {self.questions:,} of {self.questions_needed:,} that training has not seen, "
                f"of the latest {self.held_out_share:.0%} of the judged requests"
            )
        return tuple(lacks)

    def _none_trains(self) -> str:
        if self.requests or self.judged < JUDGED_SURE:
            return ""
        return "; none of this log can be: see `baton traces export`, which names the reasons"

    @property
    def countdown(self) -> str:
        """How many more judged requests, and when; empty where none are missing."""
        if self.more == 0:
            return ""
        if self.more is None:
            return f"{self.judged:,} judged requests, and nothing of them says how many more are needed"
        when = f", at {self.per_day:,.0f} a day on {self.at:%Y-%m-%d}" if self.at else ""
        return f"about {self.more:,} more judged requests are needed ({self.judged:,} so far){when}"

    def as_json(self) -> dict[str, Any]:
        """As the admin API shows it."""
        return {
            "object": "baton.readiness",
            "ready": not self.missing,
            "judged": self.judged,
            "requests": {"have": self.requests, "need": self.requests_needed},
            "sampled": self.sampled,
            "drawn": self.drawn,
            "questions": {"have": self.questions, "need": self.questions_needed},
            "more": self.more,
            "per_day": round(self.per_day, 1),
            "at": None if self.at is None else self.at.isoformat(),
            "missing": list(self.missing),
            "countdown": self.countdown,
        }


def missing_text(missing: Sequence[str], countdown: str) -> str:
    """All that is missing, a line each, and what is left to wait for."""
    return "\n".join([NOT_READY, *(f"  - {one}" for one in missing), *([countdown] if countdown else [])])


def readiness(
    judged: Sequence[JudgedRequest], needs: Needs, now: datetime, *, share: float = 1.0, weights: bool = True
) -> Readiness:
    """Count the judged requests of a log. `share`: of a new log's requests, those that can be trained on."""
    bound = needs.bound or bound_of([(one.at, one.key) for one in judged], needs.held_out_share)
    sides: tuple[list[JudgedRequest], list[JudgedRequest]] = ([], [])
    for one in judged:
        sides[bound.holds_out(one.at, one.key)].append(one)
    training, apart = sides
    rows = [one for one in training if one.trains or needs.any_plan]
    seen = {one.group for one in training}
    questions = {one.group for one in apart if one.askable} - seen
    learnt = 1 - needs.held_out_share
    wanted = (
        _more(len(rows), needs.requests, len(judged), (1.0 if needs.any_plan else share) * learnt),
        _more(len(questions), needs.questions, len(judged), needs.held_out_share),
    )
    more = None if None in wanted else max(each or 0 for each in wanted)
    per_day = _per_day(judged, now)
    days = more / per_day if more and per_day else None
    return Readiness(
        judged=len(judged),
        requests=len(rows),
        requests_needed=needs.requests,
        sampled=sum(one.sampled for one in rows),
        drawn=sum(one.drawn for one in rows),
        questions=len(questions),
        questions_needed=needs.questions,
        held_out_share=needs.held_out_share,
        more=more,
        per_day=per_day,
        at=None if days is None or days > timedelta.max.days / 1000 else now + timedelta(days=days),
        weights=weights or not needs.weights,
    )


def _more(have: int, need: int, judged: int, usual: float) -> int | None:
    """Judged requests until `need` are there, at the share of this log; at the usual one where it has too few."""
    if have >= need:
        return 0
    share = have / judged if judged >= JUDGED_SURE else usual
    return math.ceil((need - have) / share) if share else None


def _per_day(judged: Sequence[JudgedRequest], now: datetime) -> float:
    recent = [one.at for one in judged if one.at >= now - timedelta(days=RATE_DAYS)]
    if not recent:
        return 0.0
    days = (now - min(recent)).total_seconds() / 86_400
    return len(recent) / max(RATE_DAYS_MIN, days)
