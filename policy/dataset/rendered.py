"""The prompt of a logged planning call, rendered anew from what its planner was shown.

A prompt's wording changes with a release, and a student may read another profile than the planner that was logged.
What was shown does not change: the conversation, the pool in its order with experience, the limits, the dial and the
replies so far. Log-probs stay with the prompt that they were sampled under, so rows rendered anew are for supervised
training and for asking again, never for GRPO.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gateway.core.loop.plan import PlanLimits, limits_from_json
from gateway.core.loop.prompt import Profile, prompt_hash, render, shows_quality
from gateway.core.loop.shown import PromptInput, ShownExperience, ShownReply, ShownWorker
from policy.dataset.refusals import RowRefused
from policy.dataset.row import Row

SHOWN_MIN = 2  # outcomes before a prompt shows them (gateway/service/loop/rounds.py)
_ROUND = re.compile(r"^(?:steps \d+ depth \d+ )?round (\d+)\b", re.IGNORECASE | re.MULTILINE)  # never in a quotation
IN_WORDS = ("brief", "full")  # profiles that show a worker's description and window


def prompt_of(row: Row, profile: Profile) -> list[dict[str, str]]:
    """The conductor's messages for this call under `profile`, in today's wording: those that were logged where they
    are that already. Raises RowRefused (`metadata_only`, `redacted`, `no_inputs`)."""
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
    allowed = limits_of(row)
    by_handle = {str(one.get("handle")): one for one in row.pool}
    depth_max = row.caps.get("depth")
    shown = [one for one in row.replies if int(one["index"]) < allowed.first_index]
    missing = [handle for handle in allowed.handles if handle not in by_handle]
    if missing or not row.request_messages or depth_max is None or len(shown) != allowed.first_index:
        raise RowRefused("no_inputs")
    return PromptInput(
        messages=row.request_messages,
        workers=tuple(_worker(by_handle[handle], profile) for handle in allowed.handles),
        steps_max=allowed.steps_max,
        depth_left=max(0, int(depth_max) - row.depth),
        round=_round(row),
        replies=tuple(ShownReply(one["index"], one["handle"], one["answer"], tuple(one["flags"])) for one in shown),
        quality=_quality(row) if shows_quality(profile) else None,
    )


def _worker(entry: Mapping[str, Any], profile: Profile) -> ShownWorker:
    past = entry.get("experience")
    seen = None
    if past is not None and past["n"] >= SHOWN_MIN:
        seen = ShownExperience(past["n"], past["success"], past["cost_nano"], past["ms"])
    if "description" not in entry and (profile in IN_WORDS or seen is None):
        raise RowRefused("no_inputs")  # its pool file is not in the log: neither text, window nor speed is known
    return ShownWorker(
        handle=entry["handle"],
        description=entry.get("description") or "",
        tags=tuple(entry.get("tags") or ()),
        price_tier=int(entry["tier"]),
        context_tokens=int(entry.get("context_tokens") or 0),
        latency_s=seen.latency_ms_mean / 1000 if seen else entry.get("latency_hint_s"),
        experience=seen,
    )


def _round(row: Row) -> int:
    """The loop's own count, which the prompt shows; a refused plan and the router's after it are two records of one
    round."""
    said = row.messages[-1].get("content", "") if row.messages else ""
    found = _ROUND.search(str(said))
    return int(found[1]) if found else row.round


def _quality(row: Row) -> int | None:
    return row.quality if row.quality is not None else row.caps.get("quality")
