"""Grading: judge replies that have reached PostgreSQL, by the grader that a request named or by the sampled judge.

A reply that cannot be graded gets no outcome, and its rollout says why. A grader that could not do its work, because
the judge was away for instance, is tried again a few times.
"""

from __future__ import annotations

import asyncio

from gateway.adapters.postgres.policies.jobs import GradingStore, Waiting
from gateway.core.openai.reply import reply_text
from policy.graders import Grade, GraderError, GraderFailed, Tools, grade
from policy.jobs.judging import JudgeSpent, Judging

BATCH = 16
LEASE_S = 120.0  # longer than any grading takes
AT_ONCE = 4
ATTEMPTS_MAX = 5
PAUSE_FIRST_S = 2.0


class Grading:
    """Grades waiting replies. `judging`: the judge, and which requests it judges; None: there is none."""

    def __init__(self, store: GradingStore, judging: Judging | None = None) -> None:
        self._store = store
        self._judging = judging
        self._tools = Tools(ask=judging.settings.ask if judging else None)

    async def round(self) -> int:
        """Grade up to BATCH replies that are due. Returns how many were due. Raises Unavailable."""
        if self._judging is not None:
            await self._judging.draw(BATCH)
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
        text = None if one.reply is None or one.status != "done" else reply_text(one.reply)
        if not text:
            await self._store.ungraded(one, f"there is no text to grade: the request ended {one.status}")
            return
        try:
            result = await self._grade_of(one, text)
        except JudgeSpent as error:
            await self._spent(one, str(error))
        except GraderFailed as error:
            await self._again(one, str(error))
        except GraderError as error:
            await self._store.ungraded(one, str(error))
        except (OSError, MemoryError) as error:
            await self._again(one, f"{type(error).__name__}: {error}")
        else:
            await self._store.graded(one, result.value, f"{result.grader}@{result.version}", result.detail)

    async def _grade_of(self, one: Waiting, text: str) -> Grade:
        if not one.is_sampled:
            name = one.grader.partition("@")[0]  # at today's version: the one that was asked for may be gone meanwhile
            return await grade(name, one.reference, text, tools=self._tools)
        if self._judging is None or self._judging.settings.source != one.grader:
            raise GraderError(f"{one.grader} judges no more")
        reference = self._judging.settings.reference(one.request, one.reference)
        return await grade("judge", reference, text, tools=self._tools)

    async def _spent(self, one: Waiting, reason: str) -> None:
        """Draw no more for now; what was drawn is tried again, for calls that are under way may hold what is left."""
        if self._judging is not None:
            self._judging.rest()
        await self._again(one, reason)

    async def _again(self, one: Waiting, reason: str) -> None:
        if one.attempts >= ATTEMPTS_MAX:
            await self._store.ungraded(one, f"{reason} (tried {one.attempts} times)")
        else:
            await self._store.later(one, reason, PAUSE_FIRST_S * 2 ** (one.attempts - 1))
