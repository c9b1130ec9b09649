"""What a reply is: a short answer, code, JSON, prose, a tool call, a refusal or empty. Pure; total over any reply.

The kind comes from structure: the message's own fields (`tool_calls`, `refusal`), the format that the request asked
for, the grader that it names, the mark of a final answer, fences and parsers. Where none of these says anything, a
reply of a few words is a short answer and a longer one is prose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from gateway.core.loop.replies.answers import FinalAnswer, final_answer, is_refusal
from gateway.core.loop.replies.code import CodeBlock, fenced, programs

ReplyKind = Literal["short", "code", "json", "prose", "tool_call", "refusal", "empty"]
SHORT_WORDS_MAX = 8  # of an unmarked reply that is a short answer
ANSWER_WORDS_MAX = 40  # of an answer after a marker; a longer text there is prose
SENTENCE_ANSWER_WORDS_MAX = 6  # of the text after "answer is"
REFUSAL_WORDS_MAX = 80  # of a text that declines; what is longer does more than that
TAIL_WORDS_MAX = 25  # that may follow a marked answer
CODE_SHARE_MIN = 0.25  # of a reply's characters that its programs must have; with fewer it is prose that quotes code
KIND_OF_GRADER: Mapping[str, ReplyKind] = {
    **dict.fromkeys(("exact", "numeric", "choice"), "short"),
    "json_schema": "json",
    "python": "code",
}
READ_CHARS_MAX = 100_000
_LABELLED = re.compile(r"[^\W\d_][^:\n]{0,30}: [^:\n]{1,80}$")
_WORD = re.compile(r"[^\W\d_]{2,}")
_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply and what it is. `answer`: of a short answer, and of prose its last line. `marked`: the reply says which
    text its answer is. `value`: of JSON. `blocks`: of code. `calls`: of a tool call, as (name, canonical arguments)."""

    kind: ReplyKind
    text: str = ""
    answer: str = ""
    marked: bool = False
    value: Any = None
    blocks: tuple[CodeBlock, ...] = ()
    calls: tuple[tuple[str, str], ...] = ()


def wanted_kind(params: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> ReplyKind | None:
    """The kind of reply that a request asks for, by its `response_format` or by the grader that its metadata names;
    None where it says neither."""
    grader = str((metadata or {}).get("grader") or "").partition("@")[0]
    if grader in KIND_OF_GRADER:
        return KIND_OF_GRADER[grader]
    format_ = params.get("response_format")
    asks_json = isinstance(format_, Mapping) and format_.get("type") in ("json_object", "json_schema")
    return "json" if asks_json else None


def read_message(message: Mapping[str, Any], wanted: ReplyKind | None = None) -> Reply:
    """The reply that a completion's message is."""
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    if calls := message.get("tool_calls"):
        return Reply("tool_call", text, calls=_calls(calls))
    if message.get("refusal"):
        return Reply("refusal", str(message["refusal"]))
    return read_text(text, wanted)


@lru_cache(maxsize=256)
def read_text(text: str, wanted: ReplyKind | None = None) -> Reply:
    """The reply that a text is. `wanted`: the kind that the request asks for; it decides what structure leaves open. Of
    a very long text the head and the tail are read."""
    if len(text) <= READ_CHARS_MAX:
        return _read(text, wanted)
    half = READ_CHARS_MAX // 2
    return replace(_read(f"{text[:half]}\n{text[-half:]}", wanted), text=text)


def _read(text: str, wanted: ReplyKind | None) -> Reply:
    if not text.strip():
        return Reply("empty", text)
    final = final_answer(text)
    if wanted == "short":
        return _short(text, final, marked=final.mark != "last_line")
    marked = _is_marked(text, final)
    if marked and not final.text:
        return Reply("empty", text)
    return (
        _code(text, wanted)
        or _json(text, wanted)
        or (_short(text, final, marked=True) if marked else None)
        or _unmarked(text, final)
    )


def words_in(text: str) -> int:
    """The number of words of two letters or more: figures, grids and formulas have none."""
    return len(_WORD.findall(text))


def _calls(calls: Any) -> tuple[tuple[str, str], ...]:
    functions = [call.get("function") or call.get("custom") or {} for call in calls if isinstance(call, Mapping)]
    pairs = [(str(f.get("name")), str(f.get("arguments", f.get("input", "")))) for f in functions]
    return tuple((name, canonical(value) if (value := _loads(text)) is not _MISSING else text) for name, text in pairs)


def as_json(text: str) -> Reply | None:
    """The reply that a text is as JSON; None where it is no object and no array."""
    value = _loads(text)
    return Reply("json", text, value=value) if isinstance(value, dict | list) else None


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _MISSING


def canonical(value: Any) -> str:
    """A JSON value as text in which order of keys and white space do not count."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _is_marked(text: str, final: FinalAnswer) -> bool:
    """Whether the reply itself says which text is its final answer, near its end."""
    if final.mark == "last_line":
        return False
    if final.mark == "tags":
        return True
    if final.mark == "json":
        return words_in(final.tail) <= TAIL_WORDS_MAX
    words_max = SENTENCE_ANSWER_WORDS_MAX if final.mark == "sentence" else ANSWER_WORDS_MAX
    return words_in(final.text) <= words_max and words_in(final.tail) <= TAIL_WORDS_MAX


def _short(text: str, final: FinalAnswer, *, marked: bool) -> Reply:
    return Reply("short" if final.text else "empty", text, final.text, marked)


def _code(text: str, wanted: ReplyKind | None) -> Reply | None:
    """Code, unless a tag or a marker behind it gives the answer."""
    blocks = programs(text)
    share = sum(block.end - block.begin for block in blocks) / len(text)
    after = final_answer(text[blocks[-1].end :]) if blocks else None
    answered = after is not None and after.mark != "last_line" and wanted != "code"
    if not blocks or answered or (share < CODE_SHARE_MIN and wanted != "code"):
        return None
    return Reply("code", text, blocks=tuple(blocks))


def _json(text: str, wanted: ReplyKind | None) -> Reply | None:
    """A JSON object, or an array with words in it, alone or in the only fence. An object with an `answer` is the short
    answer that it holds."""
    blocks = fenced(text)
    value = _loads(blocks[0].text if len(blocks) == 1 else text)
    if isinstance(value, dict) and "answer" in value and not isinstance(value["answer"], dict):
        return None
    wordy = isinstance(value, dict) or (isinstance(value, list) and words_in(text) > 0)
    return Reply("json", text, value=value) if wordy or (wanted == "json" and value is not _MISSING) else None


def _unmarked(text: str, final: FinalAnswer) -> Reply:
    """A refusal, a short answer of a few words, or prose."""
    words = words_in(text)
    if words <= REFUSAL_WORDS_MAX and is_refusal(text):
        return Reply("refusal", text, final.text)
    short = words <= SHORT_WORDS_MAX or _is_labelled(final.text)
    return Reply("short" if short else "prose", text, _bare_block(text) or final.text)


def _is_labelled(line: str) -> bool:
    """Whether a last line is a name and its value, such as `Total: 12 km`, of a few words in all."""
    return _LABELLED.match(line) is not None and words_in(line) <= SHORT_WORDS_MAX


def _bare_block(text: str) -> str:
    """The text of the reply's only fence, where that names no language: an answer that is set apart."""
    blocks = fenced(text)
    return blocks[0].text.strip() if len(blocks) == 1 and words_in(blocks[0].text) <= SHORT_WORDS_MAX else ""
