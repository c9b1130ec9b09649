"""Signals: what a client's next request says of an earlier reply, without a word about it. Pure.

Each signal says `right` or `wrong` of every reply of which it could have noticed something, so that how often it errs
can be measured; what its verdicts weigh is learnt from those of more trusted sources (sources.py).

- `signal:repeat`: the same end user, or the same conversation, asks next. The same question again, by the cosine of the
  two, is 0; another question is 1.
- `signal:edit`: the conversation goes on. The reply sent back as it was is 1, an edited one less by how much of it was
  changed, and a turn that is asked again instead of going on is 0.
- `signal:test`: the conversation goes on with results of the tools that the reply called. The share of those that are
  declared to have succeeded; nothing where none says.

Nothing of it reads words. A conversation goes on where the messages before its last reply are those that were asked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from gateway.core.loop.evidence.sources import EDIT, REPEAT, TEST
from gateway.core.loop.experience.likeness import content_text, question_text
from gateway.core.loop.turns.marks import normal_form
from gateway.core.loop.turns.replanning import ERROR_FLAGS, RESULT_CHARS_MAX

SAME_QUESTION = 0.72  # cosine of two questions from which they ask for the same; docs/outcomes.md has the measurement
COMPARED_WORDS_MAX = 400  # of a reply and of its edited form
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
EXIT_CODES = ("exit_code", "exitCode", "returncode", "return_code")
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as logged. Times in microseconds since the epoch. `replies`: the messages of its choices; `question`:
    the vector of its last user message by `embedder`, empty where there is none."""

    rollout_id: str
    end_user: str | None
    began_us: int
    ended_us: int
    messages: Sequence[Message]
    replies: Sequence[Message]
    question: Sequence[float] = ()
    embedder: str | None = None


class Signal(NamedTuple):
    """What one request says of the reply to another: `value` in [0, 1] by `source`. `why`: in a word."""

    rollout_id: str
    source: str
    value: float
    why: str


def signals_of(later: Asked, earlier: Sequence[Asked]) -> Iterator[Signal]:
    """What a request says of the replies to earlier ones of its key and end user, the latest first. Those that had not
    ended when it began are no replies that its client had seen."""
    seen = [one for one in earlier if one.ended_us <= later.began_us]
    if not later.messages or not seen:
        return
    digests = {one.rollout_id: _digest(one.messages) for one in seen}
    place, whole = _last_reply(later.messages), _digest(later.messages)
    before = None if place is None else _digest(later.messages[:place])
    again = next((one for one in seen if digests[one.rollout_id] == whole), None)
    if again is not None and place is not None:
        yield Signal(again.rollout_id, EDIT, 0.0, "asked again")
        return
    previous = seen[0] if later.end_user is not None else None
    if place is not None:
        turns = [one for one in seen if digests[one.rollout_id] == before]
        continued = max(turns, key=lambda one: _kept(one, later.messages[place]), default=None)
        if continued is not None:
            yield from _continued(continued, later.messages[place], later.messages[place + 1 :])
            previous = continued
    if previous is not None and later.messages[-1].get("role") == "user":
        yield from _repeated(previous, later)


def _continued(asked: Asked, sent_back: Message, more: Sequence[Message]) -> Iterator[Signal]:
    if asked.replies:
        kept = _kept(asked, sent_back)
        yield Signal(asked.rollout_id, EDIT, kept, "kept" if kept == 1 else "edited")
    results = [result for message in more if (result := succeeded(message)) is not None]
    if results:
        yield Signal(asked.rollout_id, TEST, sum(results) / len(results), f"{sum(results)} of {len(results)} succeeded")


def _repeated(previous: Asked, later: Asked) -> Iterator[Signal]:
    likeness = _likeness(previous, later)
    if likeness is not None:
        is_same = likeness >= SAME_QUESTION and not _names_other_numbers(previous, later)
        yield Signal(previous.rollout_id, REPEAT, float(not is_same), "same" if is_same else "another")


def succeeded(message: Message) -> bool | None:
    """Whether the result of a tool is declared a success: by MCP's `isError` or Anthropic's `is_error`, an exit code or
    an `error` in a result that is a JSON object. None where it says nothing, and for any other message."""
    if message.get("role") not in ("tool", "function"):
        return None
    declared = [message[flag] for flag in ERROR_FLAGS if isinstance(message.get(flag), bool)]
    result = _object(content_text(message.get("content")).strip())
    declared += [result[flag] for flag in ERROR_FLAGS if isinstance(result.get(flag), bool)]
    declared += [result[name] != 0 for name in EXIT_CODES if type(result.get(name)) is int]
    error = result.get("error")
    if isinstance(error, str | dict) and error:
        declared.append(True)
    return not any(declared) if declared else None


def _object(text: str) -> Mapping[str, Any]:
    if not text.startswith("{") or len(text) > RESULT_CHARS_MAX:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _kept(asked: Asked, sent_back: Message) -> float:
    """How much of a reply was sent back, 0 to 1, by its words and tool calls in their order. Of several choices the one
    that is most like it was sent back."""
    theirs = _words(sent_back)
    return max((_share_kept(_words(reply), theirs) for reply in asked.replies), default=0.0)


def _share_kept(ours: Sequence[str], theirs: Sequence[str]) -> float:
    return 1.0 if ours == theirs else min(0.99, SequenceMatcher(None, ours, theirs, autojunk=False).ratio())


def _words(message: Message) -> Sequence[str]:
    _, content, refusal, calls, _ = normal_form(message)
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    called = [json.dumps(call[1:], sort_keys=True) for call in calls]
    return [*f"{text} {refusal}".split()[:COMPARED_WORDS_MAX], *called]


def _likeness(one: Asked, other: Asked) -> float | None:
    """The cosine of two questions, whose vectors have norm 1; None where they cannot be compared."""
    if not one.question or one.embedder != other.embedder or len(one.question) != len(other.question):
        return None
    return sum(a * b for a, b in zip(one.question, other.question, strict=True))


def _names_other_numbers(one: Asked, other: Asked) -> bool:
    """Whether both questions have numbers, and not the same: for vectors all digits are equal."""
    numbers, others = (sorted(_NUMBER.findall(question_text(each.messages))) for each in (one, other))
    return bool(numbers and others) and numbers != others


def _last_reply(messages: Sequence[Message]) -> int | None:
    """The place of the last reply in a conversation that goes on after it."""
    place = next((i for i in range(len(messages) - 1, -1, -1) if messages[i].get("role") == "assistant"), None)
    return None if place is None or place == len(messages) - 1 else place


def _digest(messages: Sequence[Message]) -> bytes:
    form = json.dumps([normal_form(message) for message in messages], sort_keys=True)
    return hashlib.sha256(form.encode("utf-8", "surrogatepass")).digest()
