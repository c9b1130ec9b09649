"""The judge: a worker of the gateway that is asked through its API, under a key of its own whose day has a budget.

It stands behind the grader `judge`, and judges a share of the requests by the rubric of their kind. The gateway holds
the worst case of each call against the key's day before it is made, so the judge never spends more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gateway.adapters.postgres.evidence.sampling import JudgeSample
from gateway.core.loop.evidence.sources import JUDGE
from gateway.core.loop.experience.likeness import content_text
from gateway.core.openai.reply import reply_text
from policy.graders import GraderFailed
from policy.graders.judge import RUBRIC

JUDGE_S = 60.0
JUDGE_TOKENS_MAX = 512
JUDGE_REPLY_BYTES_MAX = 1 << 20
DEFAULT_KIND = "default"  # the rubric of a kind that has none of its own
REST_S = 60.0  # without new requests, once the day's dollars are spent
DRAW_S = 2.0  # between two looks for requests to judge
SPENT = "insufficient_quota"


class JudgeSpent(GraderFailed):
    """The judge's key may spend no more for now."""


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """The worker that judges, and its share of the requests. `facts`: the file that says where the gateway is;
    `key_file`: the one with the judge's key and the pools that have the worker. `rubrics`: by kind of task."""

    worker: str
    facts: Path
    key_file: Path
    share: float = 0.0
    rubrics: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The source of its outcomes of the share."""
        return JUDGE + self.worker

    def pools(self) -> tuple[str, ...]:
        """The pools that have the worker. Raises GraderFailed while no gateway has started with this judge."""
        return tuple(map(str, _fact(self.key_file, "pools")))

    async def ask(self, messages: list[dict[str, str]]) -> str:
        """Ask as any client does. The request is never trained on. Raises GraderFailed, JudgeSpent."""
        base_url, key = _fact(self.facts, "base_url"), _fact(self.key_file, "judge_key")
        body = {"model": self.worker, "messages": messages, "metadata": {"train": "false"}, "temperature": 0}
        body["max_completion_tokens"] = JUDGE_TOKENS_MAX
        headers = {"authorization": f"Bearer {key}"}
        try:
            async with httpx.AsyncClient(timeout=JUDGE_S) as client:
                reply = await client.post(f"{base_url}/chat/completions", json=body, headers=headers)
        except httpx.HTTPError as error:
            raise GraderFailed(f"the judge did not answer ({type(error).__name__})") from None
        return _verdict_text(reply)

    def reference(self, request: Mapping[str, Any], kind: str) -> dict[str, str]:
        """What a reply to a request is judged by: the conversation, and the rubric of its kind."""
        rubric = self.rubrics.get(kind) or self.rubrics.get(DEFAULT_KIND, RUBRIC)
        return {"question": conversation_text(request.get("messages") or []), "rubric": rubric}


def conversation_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as one text: its only message, or each one behind its role."""
    texts = [(str(message.get("role")), content_text(message.get("content"))) for message in messages]
    if len(texts) == 1:
        return texts[0][1]
    return "\n\n".join(f"{role}: {text}" for role, text in texts)


def _fact(path: Path, name: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError, TypeError):
        raise GraderFailed("no gateway serves here to ask the judge through") from None


def _verdict_text(reply: httpx.Response) -> str:
    try:
        value = json.loads(reply.content[:JUDGE_REPLY_BYTES_MAX])
        if reply.status_code == 200:
            return reply_text(value)
        refusal, code = str(value["error"]["message"]), value["error"].get("code")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise GraderFailed(f"the judge answered {reply.status_code} and nothing that can be read") from None
    kind = JudgeSpent if code == SPENT else GraderFailed
    raise kind(f"the judge was refused ({reply.status_code}): {refusal}")


class Judging:
    """Draws requests for the judge while it may spend."""

    def __init__(self, settings: JudgeSettings, sample: JudgeSample) -> None:
        self.settings = settings
        self._sample = sample
        self._due_s = 0.0  # when it looks again, by the monotonic clock

    async def draw(self, limit: int) -> int:
        """Let up to `limit` requests wait for the judge, if it is time for it. Returns their number. Raises
        Unavailable."""
        if not self.settings.share or time.monotonic() < self._due_s:
            return 0
        self._due_s = time.monotonic() + DRAW_S
        try:
            pools = self.settings.pools()
        except GraderFailed:
            return 0  # the gateway has not started yet
        return await self._sample.draw(limit, pools)

    def rest(self) -> None:
        """Draw none for a while: the day's dollars are spent."""
        self._due_s = time.monotonic() + REST_S
