"""What may be trained on, as pure functions. Nothing is dropped silently: every row left out has a reason by name.

`train: false` is not among the reasons of a row, for such rows are never read (`read.rows_of`); they are counted.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from fractions import Fraction
from typing import Any

from gateway.core.log.rollout import RoundRecord
from gateway.core.loop import prompt
from gateway.core.loop.plan import PlanLimits, limits_from_json
from gateway.core.policies.holdout import Bound, latest
from gateway.errors import ConfigError
from policy.dataset.refusals import RowRefused, listed
from policy.dataset.row import Call, Row, Side
from policy.reward import RewardSettings, at_quality, faults_of, reward

KEY_SHARE = 0.05  # of the rows, for one key among many
HALF = 0.5
ROUTERS = ("rule", "vote", "cascade")
LOGPROB_SLACK = 1e-3  # a server's rounding may put a certain token a little over log 1

# What a call that can be learnt from sends for the parameters that its log-probs cannot be recomputed under.
SAMPLING_OFF: Mapping[str, tuple[float, ...]] = {"top_k": (-1, 0), "min_p": (0,), "repetition_penalty": (1,)}


@dataclass(frozen=True, slots=True)
class Rules:
    """Raises ConfigError on shares outside their range, or on two ways to split at once."""

    tokens_required: bool = True  # false: for reading, never for training on the log
    texts_required: bool = False  # the words of prompt and plan must be there
    versions: Mapping[str, str] | None = None  # worker → its version today; None: nothing is stale
    key_share_max: float | None = None  # of the rows of each side that one key may hold; None: see `share_max`
    validation_share: float = 0.0  # the latest such share of the rows validates
    split_at: datetime | None = None  # or: what began at this time or later validates
    split_keys: tuple[str, ...] = ()  # and whatever these API keys asked, at any time

    def __post_init__(self) -> None:
        if self.key_share_max is not None and not 0 < self.key_share_max <= 1:
            raise ConfigError(f"key share {self.key_share_max} is outside (0, 1]; 0.05 is 5 %", param="key_share_max")
        if not 0 <= self.validation_share < 1:
            raise ConfigError(f"validation share {self.validation_share} is outside [0, 1)", param="validation_share")
        if self.validation_share and self.split_at:
            raise ConfigError("give a validation share or a time to split at, not both", param="split_at")


@dataclass(frozen=True, slots=True)
class Mark:
    """As much of a row as the rules over many rows need."""

    call: Call
    root_id: str
    key_id: str
    created_at: datetime
    group: str
    outcome: float | None
    parsed: bool


@dataclass(slots=True)
class Report:
    """What became of the rows that the selection found. `left_out` counts them by reason, `key_share` is the largest
    one in [0, 1] of either side, `outcome_mean` is of all kept rows that have one."""

    found: int = 0
    train: int = 0
    validation: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    keys: int = 0
    key_share: float = 0.0
    outcome_mean: float | None = None
    outcome_values: int = 0  # different ones
    warnings: list[str] = field(default_factory=list)

    @property
    def kept(self) -> int:
        """Rows of both sides."""
        return self.train + self.validation

    def reasons(self) -> str:
        """`12 redacted (why), 3 …`: the rows left out, most first."""
        return listed(self.left_out)


# ---------------------------------------------------------------- one row


def why_left_out(row: Row, rules: Rules, min_outcomes: int) -> str | None:
    """The first reason that holds, None for a row to keep."""
    fault = _fault(row) if rules.tokens_required else None
    if fault is None and rules.texts_required:
        fault = _text_fault(row)
    if fault:
        return fault
    if rules.versions is not None and is_stale(row.workers_used, rules.versions):
        return "stale_worker"
    return "too_few_outcomes" if row.outcome_n < min_outcomes else None


def token_fault(planned: Row | RoundRecord, log_mode: str = "full") -> str | None:
    """Why the log-probs of a plan cannot be used: there are no tokens, or not one log-prob and one mark for each."""
    if not planned.plan_token_ids or not planned.prompt_token_ids:
        return {"metadata": "metadata_only", "redacted": "redacted"}.get(log_mode, "no_tokens")
    sampled = len(planned.plan_token_ids)
    fits = len(planned.plan_logprobs) == len(planned.decision_mask) == sampled
    finite = all(-math.inf < logprob <= LOGPROB_SLACK for logprob in planned.plan_logprobs)
    if not (fits and finite):
        return "no_logprobs"
    return None if _says_all_is_off(planned.sampling) else "other_sampling"


def _fault(row: Row) -> str | None:
    """Why policy gradients cannot be computed of a plan: a router's needs its propensity and the words of the request,
    any other one its tokens."""
    if row.planner not in ROUTERS:
        return token_fault(row, row.log_mode)
    if row.propensity is None:
        return "no_propensity"
    return None if row.log_mode == "full" else "metadata_only" if row.log_mode == "metadata" else "redacted"


def _text_fault(row: Row) -> str | None:
    """Why a plan cannot be read. Token ids remain only where nothing was redacted."""
    if row.log_mode != "full" and not row.plan_token_ids:
        return "metadata_only" if row.log_mode == "metadata" else "redacted"
    return "no_inputs" if not row.messages else None if row.plan_text or row.plan is not None else "no_plan"


def _says_all_is_off(sampling: Mapping[str, Any]) -> bool:
    """Whether a call named each parameter that changes the distribution behind the log-probs, and turned it off."""
    return all(sampling.get(name) in off for name, off in SAMPLING_OFF.items())


def grammar_of(planned: Row | RoundRecord) -> tuple[PlanLimits, Mapping[str, Any]]:
    """What a plan was allowed, and the schema it was decoded under. Raises RowRefused where the log does not say, or
    where the schema has another hash than was logged."""
    if planned.allowed is None:
        raise RowRefused("no_allowed")
    allowed, profile = limits_from_json(planned.allowed), prompt.profile_of(planned.prompt_version or "")
    for merges in (allowed.merges, frozenset[str]()):  # none: the grammar of old logs, where a vote might see nothing
        grammar = prompt.grammar_of(profile, replace(allowed, merges=merges))
        if grammar.hash == planned.schema_hash:
            return allowed, grammar.schema
    raise RowRefused("other_schema")


def is_stale(used: Iterable[tuple[str, str]], versions: Mapping[str, str]) -> bool:
    """Whether a worker that answered has another version today, or is gone."""
    return any(versions.get(worker) != version for worker, version in used)


# ---------------------------------------------------------------- the worth of a request


def unparsed(rows: Iterable[Row | Mark]) -> frozenset[str]:
    """Root ids of the requests of which a plan was refused."""
    return frozenset(row.root_id for row in rows if not row.parsed)


def value_of(row: Row, parsed: bool) -> float:
    """The outcome of the row's request in [0, 1]; 0 where a plan of it was refused (`parsed` is false), for a router
    planned the rest. Raises RowRefused where nobody judged it."""
    if row.outcome is None:
        raise RowRefused("no_outcome")
    return row.outcome if parsed else 0.0


def reward_of(row: Row, parsed: bool, weights: RewardSettings) -> float:
    """The training reward of the row's request, at the dial that the prompt showed. A request that never ended counts
    as instant. Raises RowRefused as `value_of`, and where the weights count verdicts and the row has none to count."""
    settings = at_quality(weights, row.quality)
    if row.verdicts is None and weights.counts_verdicts:
        raise RowRefused("no_verdicts")
    latency_s, faults = (row.latency_ms or 0.0) / 1000, faults_of(row.verdicts or ())
    return reward(parsed, value_of(row, parsed), row.cost_nano, latency_s, settings, faults)


# ---------------------------------------------------------------- many rows


def mark(row: Row) -> Mark:
    """What stays in memory of a row."""
    return Mark(row.call, row.root_id, row.key_id, row.created_at, row.group, row.outcome, row.parsed)


def boundary(marks: Sequence[Mark], validation_share: float) -> datetime | None:
    """The time from which the latest `validation_share` of the rows began; None where that is none of them."""
    return latest([one.created_at for one in marks], validation_share)


def split(marks: Sequence[Mark], bound: Bound) -> tuple[list[Mark], list[Mark], list[Mark]]:
    """(train, validation, left out): what the bound does not hold out, what it holds out, and of the latter those whose
    question, or request, is in train as well, for it would be judged by what was learnt."""
    train = [one for one in marks if not bound.holds_out(one.created_at, one.key_id)]
    apart = [one for one in marks if bound.holds_out(one.created_at, one.key_id)]
    ids = {one.group for one in train} | {one.root_id for one in train}
    overlap = [one for one in apart if one.group in ids or one.root_id in ids]
    left_out = {one.call for one in overlap}
    return train, [one for one in apart if one.call not in left_out], overlap


def key_allowance(counts: Mapping[str, int], share_max: float) -> int:
    """The most rows m a key may keep so that none holds more than `share_max` of Σ min(count, m).

    Raises ConfigError where no m ≥ 1 can: with fewer than 1/share keys even one row each is too much, and a smaller
    set would not help. 0 for no rows.
    """
    share, most = Fraction(str(share_max)), max(counts.values(), default=0)

    def fits(allowed: int) -> bool:
        return allowed <= share * sum(min(count, allowed) for count in counts.values())

    if most and not fits(1):
        raise ConfigError(
            f"{len(counts)} keys cannot each hold at most {share_max:.4g} of the rows, that takes "
            f"{math.ceil(1 / share)}: select more traffic, or accept fewer keys with --key-share 1.0",
            param="--key-share",
        )
    low, high = 0, most  # `fits` is concave in m: true up to a point, false behind it
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def share_max(keys: int, limit: float | None = None) -> float:
    """The share of the rows that one of `keys` keys may hold: `limit`, else KEY_SHARE where the keys are many enough
    for it, else all: a team with a few keys of its own trusts them, and `summed_up` warns of the largest."""
    if limit is not None:
        return limit
    return KEY_SHARE if keys >= 1 / KEY_SHARE else 1.0


def capped(marks: Sequence[Mark], limit: float | None) -> tuple[list[Mark], list[Mark]]:
    """(kept, left out): of each key at most `key_allowance` rows, the same ones in every run, whole requests first.
    `limit`: as in `share_max`."""
    by_key: dict[str, list[Mark]] = defaultdict(list)
    for one in marks:
        by_key[one.key_id].append(one)
    counts = {key: len(own) for key, own in by_key.items()}
    allowed = key_allowance(counts, share_max(len(counts), limit))
    over = {one.call for own in by_key.values() for one in sorted(own, key=_lot)[allowed:]}
    return [one for one in marks if one.call not in over], [one for one in marks if one.call in over]


def _lot(one: Mark) -> tuple[str, str, Call]:
    """An order without meaning that never changes."""
    return hashlib.sha256(one.root_id.encode()).hexdigest(), one.root_id, one.call


def divided(marks: Sequence[Mark], rules: Rules) -> tuple[dict[Call, Side], dict[str, int]]:
    """The side of each row that stays, and how many were left out by reason. Raises ConfigError as `key_allowance`."""
    at = rules.split_at or boundary(marks, rules.validation_share)
    train, validation, overlap = split(marks, Bound(at, rules.split_keys))
    kept_train, over_train = capped(train, rules.key_share_max)
    kept_validation, over_validation = capped(validation, rules.key_share_max)
    sides: dict[Call, Side] = {one.call: "train" for one in kept_train}
    sides |= {one.call: "validation" for one in kept_validation}
    left_out = {"prompt_on_both_sides": len(overlap), "over_key_share": len(over_train) + len(over_validation)}
    return sides, {reason: count for reason, count in left_out.items() if count}


def summed_up(marks: Sequence[Mark], sides: Mapping[Call, Side], left_out: Mapping[str, int]) -> Report:
    """The report of rows `marks` that passed alone, `sides` of those that stayed, and all that was left out."""
    marks_used = [one for one in marks if one.call in sides]
    values = [one.outcome for one in marks_used if one.outcome is not None]
    counts = Counter(sides.values())
    report = Report(
        found=len(marks_used) + sum(left_out.values()),
        train=counts["train"],
        validation=counts["validation"],
        left_out=dict(left_out),
        keys=len({one.key_id for one in marks_used}),
        key_share=max((_largest_share(marks_used, sides, side) for side in counts), default=0.0),
        outcome_mean=sum(values) / len(values) if values else None,
        outcome_values=len(set(values)),
    )
    if report.outcome_values == 1:
        report.warnings.append(
            f"every outcome is {values[0]:g}: nothing can be learnt from it; post outcomes that differ"
        )
    if 1 < report.keys < 1 / KEY_SHARE and report.key_share > HALF:
        share = f"{100 * report.key_share:.0f} %"
        report.warnings.append(
            f"one of {report.keys} keys holds {share} of the rows; if its user is not trusted, give --key-share"
        )
    if left_out.get("prompt_on_both_sides") and not counts["validation"]:
        report.warnings.append("no row is left to validate on: all of them ask what the training side asks")
    return report


def _largest_share(marks: Sequence[Mark], sides: Mapping[Call, Side], side: Side) -> float:
    counts = Counter(one.key_id for one in marks if sides[one.call] == side)
    return max(counts.values()) / sum(counts.values())
