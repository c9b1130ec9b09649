"""What a worker is shown: the messages of one step, built from exactly what that step may see. Pure.

Seen replies stand in one user message before the question, each in a `<step>` block; a worker's reply cannot close its
block early, because our own tag names are broken up inside it. A step with its own task text sees the client's
conversation in a `<request>` block; a step without one gets the conversation itself, word for word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.loop.experience import content_text

_OUR_TAGS = re.compile(r"<(/?)(step|task|reply|request)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SeenStep:
    """One earlier step as another may see it."""

    index: int
    handle: str
    task: str | None
    reply: str


def step_messages(
    conversation: Sequence[Mapping[str, Any]], task: str | None, seen: Sequence[SeenStep]
) -> list[dict[str, Any]]:
    """Messages for one worker call. Nothing of any step outside `seen` is in them."""
    blocks = [_block(step) for step in seen]
    if task is not None:
        request = f"<request>\n{_defused(_conversation_text(conversation))}\n</request>"
        return [{"role": "user", "content": "\n".join([request, *blocks])}, {"role": "user", "content": task}]
    messages = [dict(message) for message in conversation]
    if blocks:
        context = {"role": "user", "content": "Work done so far on the request that follows:\n" + "\n".join(blocks)}
        messages.insert(_last_user(messages), context)
    return messages


def _last_user(messages: Sequence[Mapping[str, Any]]) -> int:
    """Index of the last user message: context goes before it, so that tool results stay beside their calls."""
    indices = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    return indices[-1] if indices else len(messages)


def _block(step: SeenStep) -> str:
    task = _defused(step.task) if step.task is not None else "(the request)"
    head = f'<step n="{step.index}" worker="{step.handle}">\n<task>{task}</task>'
    return f"{head}\n<reply>{_defused(step.reply)}</reply>\n</step>"


def _conversation_text(conversation: Sequence[Mapping[str, Any]]) -> str:
    """A lone user message as it is; more of them with their roles."""
    if len(conversation) == 1:
        return content_text(conversation[0].get("content"))
    return "\n".join(f"{m.get('role', 'user')}: {content_text(m.get('content'))}" for m in conversation)


def _defused(text: str) -> str:
    """Text that cannot open or close one of our blocks: a zero-width joiner splits the tag name."""
    return _OUR_TAGS.sub(lambda m: f"<{m.group(1)}\u200d{m.group(2)}", text)
