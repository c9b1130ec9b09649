"""Digests of replies, made by code: final answers, agreement, refusals, truncation. Pure; it never raises on any text.

No model writes a digest. A planner needs it to decide whether to ship, redo or escalate (DESIGN §4). The `vote` tool
and the graders use the same extraction, so a majority counts the answers that a grader would compare.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from gateway.core.loop.shown import ShownReply

TEXT_CHARS_MAX = 65_536  # only this many last characters of a reply are read: answers stand at the end
_ANSWER = re.compile(r"(?:^|[^a-z])(?:final\s+)?answer\s*(?:\*\*)?\s*[:=]\s*(?:\*\*)?[ \t]*(?=\S)", re.IGNORECASE)
_ANSWER_IS = re.compile(r"\banswer\s+is:?\s+(?=\S)", re.IGNORECASE)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_JSON_ANSWER = re.compile(r'"answer"\s*:\s*(?=\S)', re.IGNORECASE)
_FENCE = re.compile(r"^```[a-z]*\s*|\s*```$", re.IGNORECASE)
_THOUSANDS = re.compile(r"^[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?$")
_OPTION = re.compile(r"^\(?([a-j])(?:[).:]|\)\s.*|[.:]\s.*)?$|^\(([a-j])\)\s.*$", re.IGNORECASE | re.DOTALL)
_WRAP = ("**", "__", "`", '"', "'", "$")
_REFUSAL = re.compile(
    r"\b(?:i (?:can(?:no|')t|can not|am unable to|'m unable to|am not able to|'m not able to|won't) "
    r"(?:help|assist|answer|comply|provide|do that|fulfil)|as an ai\b|i'm sorry, but i (?:can|am|'m))",
    re.IGNORECASE,
)


def extract_answer(reply: str) -> str:
    r"""The final answer of a reply: the text in its last `<answer>…</answer>`; else the `answer` of its JSON object;
    else the text after the last `Answer:`, the content of the last `\boxed{…}`, or the text after the last "answer
    is"; else its last line. Empty for an empty reply and for empty tags."""
    text = reply[-TEXT_CHARS_MAX:].strip()
    for find in (_from_tags, _from_json, _from_marker, _boxed, _from_sentence):
        answer = find(text)
        if answer is not None:
            return answer
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _from_tags(text: str) -> str | None:
    begin, answer = None, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            begin = tag.end()
        elif begin is not None:
            answer, begin = text[begin : tag.start()].strip(), None
    return answer


def _from_json(text: str) -> str | None:
    matches = list(_JSON_ANSWER.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() :]
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(rest)
    except ValueError:
        return rest.strip().rstrip("}` \n").strip('"').strip()  # cut off, or badly escaped
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _from_marker(text: str) -> str | None:
    matches = list(_ANSWER.finditer(text))
    if not matches:
        return None
    line = text[matches[-1].end() :].split("\n", 1)[0].strip()
    return _boxed(line) or line


def _from_sentence(text: str) -> str | None:
    matches = list(_ANSWER_IS.finditer(text))
    return text[matches[-1].end() :].split("\n", 1)[0].strip() if matches else None


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for at in range(begin, len(text)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}" and depth:
            depth -= 1
        elif text[at] == "}":
            return text[begin:at].strip()
    return None


def normalise(answer: str) -> str:
    """An answer in the form in which answers are compared. Case, quotes, final full stops, currency signs, thousands
    separators and trailing zeros do not count; `(B)`, `B.` and `B) Paris` are the option `b`."""
    text = _unwrap(_FENCE.sub("", answer.strip()))
    option = _OPTION.match(text)
    if option:
        return str(option[1] or option[2]).casefold()
    number = _number(text)
    if number is not None:
        return number
    text = re.sub(r"\s*([,;|])\s*", r"\1 ", " ".join(text.split()).casefold())
    return text.strip()


def _unwrap(text: str) -> str:
    before = None
    while before != text:
        before = text
        text = text.strip().rstrip(".!").strip()
        for mark in _WRAP:
            if len(text) >= 2 * len(mark) + 1 and text.startswith(mark) and text.endswith(mark):
                text = text[len(mark) : -len(mark)]
        text = text.removeprefix("\\(").removesuffix("\\)")
    return text


def _number(text: str) -> str | None:
    bare = text.lstrip("$€£ ").removeprefix("\\$").strip()
    if text.startswith(("-$", "-€", "-£")):
        bare = "-" + text[2:]
    if _THOUSANDS.match(bare):
        bare = bare.replace(",", "")
    if not re.fullmatch(r"[+-]?\d*\.?\d+", bare, re.ASCII):
        return None
    plain = bare.lstrip("+")
    plain = plain.rstrip("0").rstrip(".") if "." in plain else plain
    sign, digits = ("-", plain[1:]) if plain.startswith("-") else ("", plain)
    digits = digits.lstrip("0") or "0"
    digits = "0" + digits if digits.startswith(".") else digits
    return "0" if digits == "0" else sign + digits


def agreement(replies: Sequence[str]) -> list[list[int]]:
    """Group the indices of the replies by equal answer. The largest group comes first; of equal groups, the one with
    the earliest reply. Each reply without an answer is a group of its own."""
    groups: dict[str, list[int]] = {}
    for index, reply in enumerate(replies):
        answer = normalise(extract_answer(reply))
        groups.setdefault(answer or f"\0{index}", []).append(index)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0]))


def majority(replies: Sequence[str]) -> int:
    """The index of the first reply with the most common answer; of equally common answers, the one given first. A reply
    without an answer has no vote; where none has an answer, the first that is not blank. Raises ValueError without
    replies."""
    if not replies:
        raise ValueError("no replies to vote on")
    groups = agreement(replies)
    answered = (group[0] for group in groups if extract_answer(replies[group[0]]))
    spoken = (group[0] for group in groups if replies[group[0]].strip())
    return next(answered, next(spoken, 0))


def is_refusal(reply: str) -> bool:
    """Whether the first 400 characters of a reply decline to answer."""
    return bool(_REFUSAL.search(reply[:400].replace("’", "'")))


def digest(replies: Sequence[str], finish_reasons: Sequence[str | None] = ()) -> dict[str, Any]:
    """Facts about replies as JSON data: `answers`, `agree` (groups of two or more indices, largest first), `refused`
    and `truncated` (indices)."""
    return {
        "answers": [extract_answer(reply) for reply in replies],
        "agree": [group for group in agreement(replies) if len(group) > 1],
        "refused": [index for index, reply in enumerate(replies) if is_refusal(reply)],
        "truncated": [index for index, reason in enumerate(finish_reasons[: len(replies)]) if reason == "length"],
    }


def shown_replies(
    handles: Sequence[str], replies: Sequence[str | None], finish_reasons: Sequence[str | None]
) -> tuple[ShownReply, ...]:
    """The digest of every step so far, as later rounds show it. A reply is None where the step failed."""
    facts = digest([reply or "" for reply in replies], finish_reasons)
    flags: list[list[str]] = [["failed"] if reply is None else [] for reply in replies]
    for group in facts["agree"]:
        for index in group[1:]:
            flags[index].append(f"agrees:{group[0]}")
    for name in ("refused", "truncated"):
        for index in facts[name]:
            flags[index].append(name)
    return tuple(
        ShownReply(index, handle, facts["answers"][index] or None, tuple(flags[index]))
        for index, handle in enumerate(handles)
    )
