"""Graders named by requests: judge the reply when its rollout has reached PostgreSQL, and attach the outcome.

A reply that cannot be graded gets no outcome, and its rollout says why. A grader that could not do its work, because
the judge was away for instance, is tried again a few times.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gateway.adapters.postgres.jobs import GradingStore, Waiting
from gateway.core.openai.reply import reply_text
from policy.graders import GraderError, GraderFailed, Tools, grade
from policy.graders.base import Ask

BATCH = 16
LEASE_S = 120.0  # longer than any grading takes
AT_ONCE = 4
ATTEMPTS_MAX = 5
PAUSE_FIRST_S = 2.0
JUDGE_S = 60.0
JUDGE_TOKENS_MAX = 512
JUDGE_REPLY_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """The model that judges, a worker of the gateway, and the file that says where the gateway is and with which key
    it is asked. The key's budget is what bounds the cost."""

    model: str
    facts: Path
    key_file: Path


def judge(settings: JudgeSettings) -> Ask:
    """Ask through the gateway, as any client does. Its requests are never trained on. Raises GraderFailed."""

    async def ask(messages: list[dict[str, str]]) -> str:
        try:
            base_url = str(json.loads(settings.facts.read_text(encoding="utf-8"))["base_url"])
            key = str(json.loads(settings.key_file.read_text(encoding="utf-8"))["judge_key"])
        except (OSError, ValueError, KeyError, TypeError):
            raise GraderFailed("no gateway serves here to ask the judge through") from None
        body = {"model": settings.model, "messages": messages, "metadata": {"train": "false"}, "temperature": 0}
        body["max_completion_tokens"] = JUDGE_TOKENS_MAX
        headers = {"authorization": f"Bearer {key}"}
        try:
            async with httpx.AsyncClient(timeout=JUDGE_S) as client:
                reply = await client.post(f"{base_url}/chat/completions", json=body, headers=headers)
        except httpx.HTTPError as error:
            raise GraderFailed(f"the judge did not answer ({type(error).__name__})") from None
        return _verdict_text(reply)

    return ask


def _verdict_text(reply: httpx.Response) -> str:
    try:
        value = json.loads(reply.content[:JUDGE_REPLY_BYTES_MAX])
        if reply.status_code == 200:
            return reply_text(value)
        refusal = str(value["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise GraderFailed(f"the judge answered {reply.status_code} and nothing that can be read") from None
    raise GraderFailed(f"the judge was refused ({reply.status_code}): {refusal}")


class Grading:
    """Grades waiting replies. `tools` is called when needed, so that a grader without a judge costs nothing."""

    def __init__(self, store: GradingStore, tools: Callable[[], Tools] = Tools) -> None:
        self._store = store
        self._tools = tools

    async def round(self) -> int:
        """Grade up to BATCH replies that are due. Returns how many were due. Raises Unavailable."""
        lent = await self._store.lend(BATCH, LEASE_S)
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(waiting: Waiting) -> None:
            async with gate:
                await self._grade(waiting)

        async with asyncio.TaskGroup() as group:
            for waiting in lent:
                group.create_task(one(waiting))
        return len(lent)

    async def _grade(self, one: Waiting) -> None:
        name = one.grader.partition("@")[0]  # at today's version: the one that was asked for may be gone meanwhile
        text = None if one.reply is None or one.status != "done" else reply_text(one.reply)
        if not text:
            await self._store.ungraded(one, f"there is no text to grade: the request ended {one.status}")
            return
        try:
            result = await grade(name, one.reference, text, tools=self._tools())
        except GraderFailed as error:
            await self._again(one, str(error))
        except GraderError as error:
            await self._store.ungraded(one, str(error))
        except (OSError, MemoryError) as error:
            await self._again(one, f"{type(error).__name__}: {error}")
        else:
            await self._store.graded(one, result.value, f"{result.grader}@{result.version}", result.detail)

    async def _again(self, one: Waiting, reason: str) -> None:
        if one.attempts >= ATTEMPTS_MAX:
            await self._store.ungraded(one, f"{reason} (tried {one.attempts} times)")
        else:
            await self._store.later(one, reason, PAUSE_FIRST_S * 2 ** (one.attempts - 1))


def judge_tools(settings: JudgeSettings | None) -> Callable[[], Tools]:
    """Tools with a judge where one is set."""
    ask: Any = judge(settings) if settings else None
    return lambda: Tools(ask=ask)
