"""The prompt of a logged planning call, rendered anew from what its planner was shown.

A prompt's wording changes with a release, and a student may read another profile than the planner that was logged.
What was shown does not change: the conversation, the pool in its order with experience, the limits, the dial, the
replies so far, and who is warm. What only prompts of untrained models show (`guided`, `checked`) is in the log of a
round that was planned by one, and of no other. Log-probs stay with the prompt that they were sampled under, so rows
rendered anew are for supervised training and for asking again, never for GRPO.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.core.loop.contract import VERIFY_TASK
from gateway.core.loop.digest import shown_replies
from gateway.core.loop.plan import PlanLimits, limits_from_json
from gateway.core.loop.prompt import PROMPTED, Profile, prompt_hash, render, shows_quality
from gateway.core.loop.replies.errors import VERIFY, errors_from_counts
from gateway.core.loop.replies.judging import pair_verdict
from gateway.core.loop.replies.kinds import Reply, ReplyKind, read_message
from gateway.core.loop.replies.verdicts import StepVerdict, checked_flags, step_verdict
from gateway.core.loop.shown import (
    SHOWN_MIN,
    PromptInput,
    ShownExperience,
    ShownPlan,
    ShownReply,
    ShownRequest,
    ShownWarm,
    ShownWorker,
)
from gateway.core.pool.workers import MODEL_KINDS
from policy.dataset.refusals import RowRefused
from policy.dataset.row import Row

_ROUND = re.compile(r"^(?:steps \d+ depth \d+ )?round (\d+)\b", re.IGNORECASE | re.MULTILINE)  # never in a quotation
IN_WORDS = ("brief", "full", "ranked", *PROMPTED)  # profiles that show a worker's description and window
Record = Mapping[Any, Any]


def prompt_of(row: Row, profile: Profile) -> list[dict[str, str]]:
    """The conductor's messages for this call under `profile`, in today's wording: those that were logged where they
    are that already. Raises RowRefused (`metadata_only`, `redacted`, `no_inputs`, `no_warm`, `no_checker_errors`)."""
    if row.log_mode != "full":
        raise RowRefused("metadata_only" if row.log_mode == "metadata" else "redacted")
    if row.prompt_hash == prompt_hash(profile) and row.messages:
        return [dict(message) for message in row.messages]
    return render(profile, input_of(row, profile))


def limits_of(row: Row) -> PlanLimits:
    """What the plan was allowed. Raises RowRefused."""
    if row.allowed is None:
        raise RowRefused("no_allowed")
    try:
        return limits_from_json(row.allowed)
    except ValueError:
        raise RowRefused("no_allowed") from None


def input_of(row: Row, profile: Profile) -> PromptInput:
    """What the planner was shown. Raises RowRefused where the log lacks a part of it."""
    allowed = limits_of(row) if profile == "checked" else limits_of(row).without_toolboxes()
    by_handle = {str(one.get("handle")): one for one in row.pool}
    depth_max = row.caps.get("depth")
    replies = [one for one in row.replies if int(one["index"]) < allowed.first_index]
    missing = [handle for handle in allowed.handles if handle not in by_handle]
    if missing or not row.request_messages or depth_max is None or len(replies) != allowed.first_index:
        raise RowRefused("no_inputs")
    guidance = _guidance(row, allowed) if profile in PROMPTED else {}
    return PromptInput(
        messages=row.request_messages,
        workers=tuple(_worker(by_handle[handle], profile, guidance) for handle in allowed.handles),
        steps_max=allowed.steps_max,
        depth_left=max(0, int(depth_max) - row.depth),
        round=_round(row),
        replies=_replies(replies, row.shown or {}),
        quality=_quality(row) if shows_quality(profile) else None,
        checkers=allowed.checkers,
        runs_tests=allowed.runs_tests,
        request=_request(guidance),
        examples=tuple(ShownPlan(**one) for one in guidance.get("examples") or ()),
        toolboxes=allowed.toolboxes,
        warm=_warm(row, profile, guidance),
    )


def _guidance(row: Row, allowed: PlanLimits) -> Mapping[str, Any]:
    """What only prompts of untrained models show. Raises RowRefused where none was asked, or an older gateway did not
    log all of it."""
    if row.shown is None or row.shown.get("request") is None:
        raise RowRefused("no_inputs")
    if allowed.checkers and "errors" not in row.shown:
        raise RowRefused("no_checker_errors")
    if allowed.toolboxes and "tools" not in row.shown:
        raise RowRefused("no_inputs")
    return row.shown


def _request(guidance: Mapping[str, Any]) -> ShownRequest | None:
    request = guidance.get("request")
    return None if request is None else ShownRequest(**{**request, "needs": tuple(request["needs"])})


def _replies(digests: Sequence[Mapping[str, Any]], shown: Mapping[str, Any]) -> tuple[ShownReply, ...]:
    """The digests as they were shown where the log has them, else as they follow from the log's replies. Raises
    RowRefused where the two are not of the same steps."""
    logged = shown.get("replies") or digests
    if len(logged) != len(digests):
        raise RowRefused("no_inputs")
    return tuple(
        ShownReply(
            index, shown_facts["handle"], shown_facts["answer"], tuple(shown_facts["flags"]), one.get("text") or ""
        )
        for index, (one, shown_facts) in enumerate(zip(digests, logged, strict=True))
    )


def _warm(row: Row, profile: Profile, guidance: Mapping[str, Any]) -> ShownWarm | None:
    """Who answered the last turn, and what leaving it costs. Raises RowRefused where the log has a part of it alone."""
    if profile not in (*PROMPTED, "ranked") or row.depth:  # a child loop is no turn
        return None
    if "warm" in guidance:
        return ShownWarm(**guidance["warm"])
    if row.turn is None:
        if any(one.get("role") == "assistant" for one in row.request_messages):
            raise RowRefused("no_warm")
        return None
    if row.turn.get("kept") is not False or row.turn.get("why") == "worker_gone":
        return None
    handle = next((one.get("handle") for one in row.pool if one.get("name") == row.turn.get("worker")), None)
    if profile in PROMPTED or handle is None or "worth_nano" not in row.turn:
        raise RowRefused("no_warm")
    return ShownWarm(str(handle), int(row.turn["worth_nano"]), str(row.turn["why"]))


def _worker(entry: Mapping[str, Any], profile: Profile, guidance: Mapping[str, Any]) -> ShownWorker:
    past = entry.get("experience")
    experience = None
    if past is not None and past["n"] >= SHOWN_MIN:
        experience = ShownExperience(past["n"], past["success"], past["cost_nano"], past["ms"])
    if "description" not in entry and (profile in IN_WORDS or experience is None):
        raise RowRefused("no_inputs")  # its pool file is not in the log: neither text, window nor speed is known
    errors = (guidance.get("errors") or {}).get(entry["handle"])
    return ShownWorker(
        handle=entry["handle"],
        description=entry.get("description") or "",
        tags=tuple(entry.get("tags") or ()),
        price_tier=int(entry["tier"]),
        context_tokens=int(entry.get("context_tokens") or 0),
        latency_s=experience.latency_ms_mean / 1000 if experience else entry.get("latency_hint_s"),
        experience=experience,
        is_tool=entry.get("kind", "model") not in MODEL_KINDS,
        output_tokens_max=int(entry.get("output_tokens_max") or 0) if entry.get("kind") in MODEL_KINDS else 0,
        cannot=tuple(entry.get("cannot") or ()),
        tools=tuple((guidance.get("tools") or {}).get(entry["handle"], ())),
        errors=None if errors is None else errors_from_counts(str(entry.get("name")), errors),
    )


def _round(row: Row) -> int:
    """The loop's own count, which the prompt shows; a refused plan and the router's after it are two records of one
    round."""
    text = row.messages[-1].get("content", "") if row.messages else ""
    match = _ROUND.search(str(text))
    return int(match[1]) if match else row.round


def _quality(row: Row) -> int | None:
    return row.quality if row.quality is not None else row.caps.get("quality")


# ---------------------------------------------------------------- the digests of logged replies


def logged_replies(
    steps: Sequence[Record], count: int, kind: ReplyKind | None, handles: Mapping[str, str]
) -> tuple[ShownReply, ...]:
    """The digest of each step of a rollout, from their records: of the first `count` steps as a plan's prompt showed
    it, of the others, which are that plan's own, as the next one would. Empty where a step is missing. `kind`: the
    kind of reply that the request asks for; `handles`: by worker name."""
    if [step["step"] for step in steps] != list(range(len(steps))):
        return ()
    every = _digests(steps, kind, handles)
    return (*_digests(steps[:count], kind, handles), *every[count:])


def _digests(steps: Sequence[Record], kind: ReplyKind | None, handles: Mapping[str, str]) -> tuple[ShownReply, ...]:
    """As `gateway.service.loop.shown.replies_of` has them of the steps that ran."""
    verdicts = [_verdict(step) for step in steps]
    replies = [_typed(step, verdict, kind) for step, verdict in zip(steps, verdicts, strict=True)]
    judges = [step for step in steps if step["kind"] == "tool" and step["reply"] is not None]
    judgements = dict(filter(None, (pair_verdict(step["reply"], step["see"]) for step in judges)))
    names = [handles.get(_first_worker(step), step["handle"]) for step in steps]
    digests = shown_replies(names, replies, [step["finish_reason"] for step in steps], judgements)
    return tuple(
        replace(digest, flags=checked_flags(digest.flags, step["status"], verdict, following))
        for digest, step, verdict, following in zip(digests, steps, verdicts, (*verdicts, None)[1:], strict=True)
    )


def _verdict(step: Record) -> StepVerdict | None:
    return step_verdict(step["rollout_id"], step["round"], step["step"], step["worker"], step["checked"] or ())


def _first_worker(step: Record) -> str:
    """The worker that the plan named; another one may have answered where it missed its contract."""
    attempts: Sequence[Record] = step["checked"] or ()
    return str((attempts[0].get("worker") if attempts else None) or step["worker"])


def _typed(step: Record, verdict: StepVerdict | None, kind: ReplyKind | None) -> Reply | None:
    """The reply of a step by its kind; None where it has none."""
    if step["reply"] is None:
        return None
    whole = step["task"] is None or (verdict is not None and verdict.by == VERIFY and step["task"] == VERIFY_TASK)
    return read_message({"content": step["reply"], "tool_calls": step["tool_calls"]}, kind if whole else None)
