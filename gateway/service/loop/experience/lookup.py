"""What a request is planned by: the experience of its workers, and plans of its key that did well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gateway.core.log.redact import Redactor
from gateway.core.log.rollout import StepRecord
from gateway.core.loop.experience.likeness import question_text
from gateway.core.loop.experience.past import FAILURE, JudgedStep, TaskQuestion
from gateway.core.pool.workers import MODEL_KINDS
from gateway.errors import BatonError
from gateway.service.loop.experience.memory import ExperienceMemory, Recalled
from gateway.service.loop.shown import shown_plans
from gateway.service.loop.state import Loop
from gateway.service.ports.request import Embedder, RequestMetrics, Store

EXAMPLES_SPARE = 3  # plans that are read for each one that is shown: some are equal, some name workers that are gone


def never(pool: str) -> bool:
    """No pool shares."""
    return False


@dataclass(frozen=True, slots=True)
class LookupLimits:
    """`k`: steps of a worker that count. `timeout_s`: of a vector or plans that come from outside the process.
    `examples_max`: plans that a prompt shows."""

    k: int
    timeout_s: float
    examples_max: int = 0


class ExperienceLookup:
    """Looks experience up. Nothing here can fail a request, or make it wait long."""

    def __init__(
        self,
        memory: ExperienceMemory,
        store: Store,
        embedder: Embedder,
        redactor: Redactor,
        metrics: RequestMetrics,
        limits: LookupLimits,
        is_shared: Callable[[str], bool] = never,
    ) -> None:
        """`is_shared`: whether a pool shares the experience of all organisations."""
        self._memory, self._store, self._embedder, self._redactor = memory, store, embedder, redactor
        self._metrics, self._limits, self._is_shared = metrics, limits, is_shared

    async def read(self, loop: Loop) -> None:
        """Find, once, what the workers did on tasks like this one, and for a prompt that shows them the key's plans
        that did well. The record says whether experience was there, and how old it was."""
        if loop.looked_up:
            return
        loop.looked_up = True
        vector = loop.vector = await self._embedding(loop)
        recalled = await self._recalled(loop, vector)
        loop.record.memory = recalled.as_json()
        loop.experience = recalled.experience
        if recalled.state == "missing":
            self._metrics.degraded("experience")
        if self._limits.examples_max and loop.planner.name == "conductor":
            await self._read_examples(loop, vector or [])

    def learn_failures(self, loop: Loop) -> None:
        """Let the memory know at once of the steps of a request that failed by their worker's own fault. The log has
        them too."""
        record = loop.record
        weights = {(round_, step): weight for round_, step, weight in record.failures}
        if weights:
            failed = [step for step in record.steps if (step.round, step.step) in weights]
            self._memory.learn(record.id, [self._failed(loop, one, weights[one.round, one.step]) for one in failed])

    def _failed(self, loop: Loop, step: StepRecord, weight: float) -> JudgedStep:
        record, vector = loop.record, loop.vector
        asked = None if vector is None or record.log_mode == "metadata" else np.asarray(vector, np.float32)
        return JudgedStep(
            *(record.id, step.round, step.step, record.org, record.key_id, record.pool_name),
            *(step.worker, step.worker_version, record.task_type, self._embedder.name, asked),
            success=0.0,
            cost_nano=step.cost_nano,
            latency_ms=max(0, step.finished_us - step.started_us) // 1000,
            weight=weight,
            source=FAILURE,
            at_us=step.finished_us,
            changed_us=0,  # until the log has it
        )

    async def _recalled(self, loop: Loop, vector: Sequence[float] | None) -> Recalled:
        record, limits = loop.record, self._limits
        if vector is None and record.task_type is None:
            return Recalled("missing")  # with neither, no task is like this one
        versions = {spec.name: spec.version for spec in loop.workers if spec.kind in MODEL_KINDS}
        asked = None if vector is None else np.asarray(vector, np.float32)
        question = TaskQuestion(record.task_type, asked, self._embedder.name)
        shared = record.pool_name if self._is_shared(record.pool_name) else None
        return await self._memory.near(record.org, question, versions, limits.k, shared)

    async def _read_examples(self, loop: Loop, vector: Sequence[float]) -> None:
        record, most = loop.record, self._limits.examples_max
        like = record.task_type, vector, self._embedder.name
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                won = await self._store.plans_near(record.key_id, *like, EXAMPLES_SPARE * most)
        except (TimeoutError, BatonError):
            self._metrics.degraded("examples")
            return
        loop.examples = tuple(shown_plans(won, loop.workers)[:most])

    async def _embedding(self, loop: Loop) -> Sequence[float] | None:
        """The vector of the question; None where the embedder is slow or away. One that comes from outside the process
        is logged where the key logs text."""
        record = loop.record
        try:
            async with asyncio.timeout(self._limits.timeout_s if self._embedder.logged else None):
                vector = await self.vector(loop, question_text(loop.conversation))
        except (TimeoutError, BatonError):
            return None
        if self._embedder.logged and record.log_mode in ("full", "redacted") and any(vector):
            record.task_embedding, record.task_embedder = vector, self._embedder.name
        return vector

    async def vector(self, loop: Loop, text: str) -> list[float]:
        """The vector of a text of this request. Raises Unavailable."""
        return await self._embedder.embed(self.sendable(text, loop.record.log_mode))

    def sendable(self, text: str, log_mode: str) -> str:
        """A text of a request as the embedder may see it: scrubbed, where that is outside the process."""
        return self._redactor.scrub_text(text, personal=log_mode == "redacted") if self._embedder.logged else text
