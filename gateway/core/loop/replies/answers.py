"""Final answers of replies: how one is extracted, and the form in which two are compared. Pure; total over any text.

Graders use the same extraction, so a majority counts the answers that a grader would compare.
"""

from __future__ import annotations

import json
import re
from typing import Literal, NamedTuple

TEXT_CHARS_MAX = 65_536  # only this many last characters of a reply are read: answers stand at the end
WRAPS_MAX = 16  # marks around an answer that are taken off
# Every pattern here takes time linear in the text: workers write the text, and a run of blanks is a common fault.
_ANSWER = re.compile(r"(?:^|[^a-z])(?:final\s+)?answer\s*+(?:\*\*\s*+)?[:=]\s*+(?:\*\*)?[ \t]*+(?=\S)", re.IGNORECASE)
_ANSWER_IS = re.compile(r"\banswer\s+is:?\s+(?=\S)", re.IGNORECASE)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_JSON_ANSWER = re.compile(r'"answer"\s*:\s*(?=\S)', re.IGNORECASE)
_FENCE = re.compile(r"^```[a-z]*\s*|(?<!\s)\s*+```$", re.IGNORECASE)
_THOUSANDS = re.compile(r"^[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?$")
_OPTION = re.compile(r"^\(?([a-j])(?:[).:]|\)\s.*|[.:]\s.*)?$|^\(([a-j])\)\s.*$", re.IGNORECASE | re.DOTALL)
_WRAP = ("**", "__", "`", '"', "'", "$")
_REFUSAL = re.compile(
    r"\b(?:i (?:can(?:no|')t|can not|am unable to|'m unable to|am not able to|'m not able to|won't) "
    r"(?:help|assist|answer|comply|provide|do that|fulfil)|as an ai\b|i'm sorry, but i (?:can|am|'m))",
    re.IGNORECASE,
)


Mark = Literal["tags", "json", "marker", "boxed", "sentence", "last_line"]


class FinalAnswer(NamedTuple):
    """A final answer and how the reply marks it. `tail`: the text behind it."""

    text: str
    mark: Mark
    tail: str = ""


def extract_answer(reply: str) -> str:
    r"""The final answer of a reply: the text in its last `<answer>…</answer>`; else the `answer` of its JSON object;
    else the text after the last `Answer:`, the content of the last `\boxed{…}`, or the text after the last "answer
    is"; else its last line. Empty for an empty reply and for empty tags."""
    return final_answer(reply).text


def final_answer(reply: str) -> FinalAnswer:
    """As `extract_answer`, with the mark by which the answer is known."""
    text = reply[-TEXT_CHARS_MAX:].strip()
    for find in (_from_tags, _from_json, _from_marker, _from_box, _from_sentence):
        answer = find(text)
        if answer is not None:
            return answer
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return FinalAnswer(lines[-1] if lines else "", "last_line")


def _from_tags(text: str) -> FinalAnswer | None:
    begin, answer = None, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            begin = tag.end()
        elif begin is not None:
            answer, begin = FinalAnswer(text[begin : tag.start()].strip(), "tags", text[tag.end() :]), None
    return answer


def _from_json(text: str) -> FinalAnswer | None:
    matches = list(_JSON_ANSWER.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() :]
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(rest)
    except (ValueError, RecursionError):  # cut off, or badly escaped
        return FinalAnswer(rest.strip().rstrip("}` \n").strip('"').strip(), "json")
    answer = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return FinalAnswer(answer, "json", rest[end:])


def _from_marker(text: str) -> FinalAnswer | None:
    matches = list(_ANSWER.finditer(text))
    if not matches:
        return None
    line, _, tail = text[matches[-1].end() :].partition("\n")
    return FinalAnswer(_boxed(line) or line.strip(), "marker", tail)


def _from_box(text: str) -> FinalAnswer | None:
    answer = _boxed(text)
    return None if answer is None else FinalAnswer(answer, "boxed", text[text.rfind("\\boxed{") :])


def _from_sentence(text: str) -> FinalAnswer | None:
    matches = list(_ANSWER_IS.finditer(text))
    if not matches:
        return None
    line, _, tail = text[matches[-1].end() :].partition("\n")
    return FinalAnswer(line.strip(), "sentence", tail)


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
    for _ in range(WRAPS_MAX):
        before = text
        text = text.strip().rstrip(".!").strip()
        for mark in _WRAP:
            if len(text) >= 2 * len(mark) + 1 and text.startswith(mark) and text.endswith(mark):
                text = text[len(mark) : -len(mark)]
        text = text.removeprefix("\\(").removesuffix("\\)")
        if text == before:
            break
    return text


def _number(text: str) -> str | None:
    bare = text.lstrip("$€£ ").removeprefix("\\$").strip()
    if text.startswith(("-$", "-€", "-£")):
        bare = "-" + text[2:]
    if _THOUSANDS.match(bare):
        bare = bare.replace(",", "")
    if not re.fullmatch(r"[+-]?(?:\d++(?:\.\d++)?|\.\d++)", bare, re.ASCII):
        return None
    plain = bare.lstrip("+")
    plain = plain.rstrip("0").rstrip(".") if "." in plain else plain
    sign, digits = ("-", plain[1:]) if plain.startswith("-") else ("", plain)
    digits = digits.lstrip("0") or "0"
    digits = "0" + digits if digits.startswith(".") else digits
    return "0" if digits == "0" else sign + digits


def is_refusal(reply: str) -> bool:
    """Whether the first 400 characters of a reply decline to answer."""
    return bool(_REFUSAL.search(reply[:400].replace("’", "'")))
