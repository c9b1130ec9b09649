"""Digests of replies, made by code: answers, kinds, agreement, refusals, truncation. Pure; it never raises on any text.

No model writes a digest. A planner needs it to decide whether to ship, redo or escalate (DESIGN §4). A short answer is
shown as it is; a reply of another kind in brief, with its kind, and with `agreement:unknown` where nothing says whether
it agrees with the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.loop.replies.agreement import NO_VERDICTS, Agreement, Pair, Verdicts, agreement_of, groups
from gateway.core.loop.replies.answers import extract_answer, is_refusal
from gateway.core.loop.replies.brief import brief
from gateway.core.loop.replies.judging import read_judgement
from gateway.core.loop.replies.kinds import Reply, read_text
from gateway.core.loop.shown import UNKNOWN_AGREEMENT, ShownReply

ANSWER_TOKENS_MAX = 40  # of one reply's line in a digest


def digest(replies: Sequence[str], finish_reasons: Sequence[str | None] = ()) -> dict[str, Any]:
    """Facts about replies as JSON data: `answers`, `agree` (groups of two or more indices, largest first), `refused`
    and `truncated` (indices)."""
    return _facts([read_text(reply) for reply in replies], finish_reasons, NO_VERDICTS)


def _facts(typed: Sequence[Reply], finish_reasons: Sequence[str | None], verdicts: Verdicts) -> dict[str, Any]:
    return {
        "answers": [_answer(reply) for reply in typed],
        "agree": [group for group in groups(typed, verdicts) if len(group) > 1],
        "refused": [index for index, reply in enumerate(typed) if _refuses(reply)],
        "truncated": [index for index, reason in enumerate(finish_reasons[: len(typed)]) if reason == "length"],
    }


def _answer(reply: Reply) -> str:
    """What a digest shows of a reply: of a refusal its last line."""
    return extract_answer(reply.text) if reply.kind == "refusal" else brief(reply, ANSWER_TOKENS_MAX)


def _refuses(reply: Reply) -> bool:
    return reply.kind == "refusal" or (reply.kind == "short" and is_refusal(reply.text))


def shown_replies(
    handles: Sequence[str],
    replies: Sequence[str | Reply | None],
    finish_reasons: Sequence[str | None],
    verdicts: Verdicts = NO_VERDICTS,
) -> tuple[ShownReply, ...]:
    """The digest of every step so far, as later rounds show it. A reply is None where the step failed. `verdicts`: what
    is known of pairs of replies beyond their texts."""
    typed = [reply if isinstance(reply, Reply) else read_text(reply or "") for reply in replies]
    facts = _facts(typed, finish_reasons, verdicts)
    answers = [index for index, reply in enumerate(typed) if read_judgement(reply.text) is None]
    pairs = {(a, b): agreement_of(typed[a], typed[b], (a, b), verdicts) for b in answers for a in answers if a < b}
    flags: list[list[str]] = [["failed"] if reply is None else [] for reply in replies]
    for index, reply in enumerate(typed):
        flags[index] += [reply.kind] if reply.kind in ("code", "json", "prose", "tool_call") else []
    for group in facts["agree"]:
        for index in group[1:]:
            flags[index].append(f"agrees:{group[0]}")
    for index in _undecided(pairs, facts["agree"]):
        flags[index].append(UNKNOWN_AGREEMENT)
    for name in ("refused", "truncated"):
        for index in facts[name]:
            flags[index].append(name)
    return tuple(
        ShownReply(
            index, handle, facts["answers"][index] or None, tuple(flags[index]), differs=_differs(typed, pairs, index)
        )
        for index, handle in enumerate(handles)
    )


def _differs(typed: Sequence[Reply], pairs: Mapping[Pair, Agreement], index: int) -> tuple[int, ...]:
    """The earlier replies from which a reply is known to differ, or that mark a short answer where it has none."""
    earlier = [(a, verdict) for (a, b), verdict in pairs.items() if b == index]
    lacks = typed[index].kind in ("prose", "code", "json")
    return tuple(
        a for a, verdict in earlier if verdict == "different" or (lacks and typed[a].marked and verdict != "same")
    )


def _undecided(pairs: Mapping[Pair, Agreement], agree: Sequence[Sequence[int]]) -> list[int]:
    """The replies that agree with none as far as is known, and of whose agreement with another nothing is known."""
    doubtful = {index for pair, verdict in pairs.items() if verdict == "unknown" for index in pair}
    return sorted(doubtful - {index for group in agree for index in group})
