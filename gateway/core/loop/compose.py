"""Builds the messages of one step from exactly what that step may see. Pure.

The replies that a step sees go into one user message before the question, each in a `<step>` block. A worker's reply
cannot close its block early, because Baton's tag names are broken up inside it. A step with its own task text sees the
client's conversation in a `<request>` block; a step without one gets the conversation itself, word for word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.loop.experience import content_text

SEEN_HEAD = "Work done so far on the request that follows:\n"  # of the message that shows other steps
_OUR_TAGS = re.compile(r"<(/?)(step|task|reply|request)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SeenStep:
    """One earlier step, as a later step sees it."""

    index: int
    handle: str
    task: str | None
    reply: str


def step_messages(
    conversation: Sequence[Mapping[str, Any]], task: str | None, seen: Sequence[SeenStep]
) -> list[dict[str, Any]]:
    """The messages of one worker call. They contain nothing of any step outside `seen`."""
    blocks = [_block(step) for step in seen]
    if task is not None:
        request = f"<request>\n{_split_tags(_conversation_text(conversation))}\n</request>"
        return [{"role": "user", "content": "\n".join([request, *blocks])}, {"role": "user", "content": task}]
    messages = [dict(message) for message in conversation]
    if blocks:
        context = {"role": "user", "content": SEEN_HEAD + "\n".join(blocks)}
        messages.insert(_last_user(messages), context)
    return messages


def _last_user(messages: Sequence[Mapping[str, Any]]) -> int:
    """The index of the last user message. Context goes before it, so that tool results stay next to their calls."""
    indices = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    return indices[-1] if indices else len(messages)


def _block(step: SeenStep) -> str:
    task = _split_tags(step.task) if step.task is not None else "(the request)"
    head = f'<step n="{step.index}" worker="{step.handle}">\n<task>{task}</task>'
    return f"{head}\n<reply>{_split_tags(step.reply)}</reply>\n</step>"


def _conversation_text(conversation: Sequence[Mapping[str, Any]]) -> str:
    """The text of a single message; several messages are joined, each with its role."""
    if len(conversation) == 1:
        return content_text(conversation[0].get("content"))
    return "\n".join(f"{m.get('role', 'user')}: {content_text(m.get('content'))}" for m in conversation)


def _split_tags(text: str) -> str:
    """Split Baton's tag names by a zero-width joiner, so that the text cannot open or close a block."""
    return _OUR_TAGS.sub(lambda m: f"<{m.group(1)}\u200d{m.group(2)}", text)
