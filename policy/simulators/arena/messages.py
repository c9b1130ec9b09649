"""Reading a worker's prompt back: the client's question, what this step was told, and the replies it may see.

The gateway renders seen steps as `<step …><task>…</task><reply>…</reply></step>` blocks in a user message, and, for a
step with a task of its own, the client's conversation as a `<request>` block. Anything else is a plain question.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_STEP = re.compile(
    r"<step\b[^>]*>\s*(?:<task>(?P<task>.*?)</task>)?\s*<reply>(?P<reply>.*?)</reply>\s*</step>", re.DOTALL
)
_REQUEST = re.compile(r"<request>(.*?)</request>", re.DOTALL)
_JOINER = "\u200d"  # the gateway splits our tag names with it inside quoted text
_NO_TASK = "(the request)"


@dataclass(frozen=True, slots=True)
class WorkerPrompt:
    """What one call holds. `task` None: only the question. `seen`: (task, reply), oldest first."""

    question: str
    task: str | None
    seen: tuple[tuple[str | None, str], ...]


def read_prompt(messages: Sequence[Mapping[str, object]], text_of: Sequence[str]) -> WorkerPrompt:
    """The prompt in `messages`, whose texts are `text_of`. Raises ValueError where there is no user message."""
    users = [text for message, text in zip(messages, text_of, strict=True) if message.get("role") == "user"]
    if not users:
        raise ValueError("no user message")
    earlier, last = users[:-1], users[-1]
    seen = tuple(
        (None if hit["task"] in (None, _NO_TASK) else _plain(hit["task"]), _plain(hit["reply"]))
        for text in earlier
        for hit in _STEP.finditer(text)
    )
    requests = [hit[1] for text in earlier for hit in _REQUEST.finditer(text)]
    if requests:
        return WorkerPrompt(_plain("\n".join(requests)), last, seen)
    return WorkerPrompt(last, None, seen)


def _plain(text: str) -> str:
    return text.replace(_JOINER, "").strip()
