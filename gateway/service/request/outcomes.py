"""Stores outcomes: judgements of a rollout by the key that owns it. Idempotent; computes no outcome and no reward."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.log.events import random_hex, uuid7
from gateway.core.log.outcome import (
    LABELS,
    TEXT_CHARS_MAX,
    Judgement,
    Outcome,
    check_idempotency_key,
    counting,
    requested,
)
from gateway.core.log.redact import Redactor
from gateway.errors import BadRequest, BatonError, Forbidden, NotFound, RateLimited
from gateway.service.loop.experience.memory import ExperienceMemory
from gateway.service.ports.request import Clock, Journal, RateLimits, Store

NOT_KEPT = "[not kept]"


class Outcomes:
    """Stores outcomes and reads rollouts, for the key that owns them. `labels`: what labels count as."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        clock: Clock,
        redactor: Redactor | None = None,
        labels: Mapping[str, float] = LABELS,
        *,
        memory: ExperienceMemory | None = None,
        limits: RateLimits | None = None,
        per_minute: int | None = None,
    ) -> None:
        """`memory`: of the process, which knows an outcome before its reply leaves. `per_minute`: the outcomes that a
        key may post."""
        self._labels = labels
        self._redactor = redactor or Redactor()
        self._store = store
        self._journal = journal
        self._clock = clock
        self._memory, self._limits, self._per_minute = memory, limits, per_minute

    async def add(self, principal: Principal, body: object, idempotency_key: str | None) -> dict[str, Any]:
        """Attach one outcome to a rollout. Raises BadRequest, which names the field, NotFound for a rollout that this
        key does not own, Forbidden for a key that may not judge, and RateLimited. A judgement of a step names a step
        that ended. The reply says whether it counts."""
        await self._admit(principal)
        target, judgement = requested(body, self._labels)
        key = check_idempotency_key(idempotency_key)
        rollout = await self._rollout(target, principal)
        _check_step(rollout, judgement.step)
        now = self._clock.now()
        outcome = Outcome(
            id=uuid7(int(now.timestamp() * 1000)),
            rollout_id=str(rollout["id"]),
            key_id=principal.public_id,
            created_at=now,
            judgement=self._scrub_judgement(judgement, principal.log_mode),
            idempotency_key=key,
        )
        outcome_id, new = await self._store.outcome_insert(outcome)
        if new and self._memory is not None and judgement.value is not None:
            with suppress(BatonError):  # it is stored, and the memory reads it within a second
                await self._memory.refresh()
        made = {"id": outcome_id, "object": "baton.outcome", "rollout_id": outcome.rollout_id, "created": new}
        return made | counting(judgement, self._labels)

    async def _admit(self, principal: Principal) -> None:
        """Count an outcome against what its key may post. Raises Forbidden, RateLimited."""
        if not principal.judges:
            fix = f"this key may not judge; `baton keys update {principal.public_id} --judges` lets it"
            raise Forbidden(fix, code="key_may_not_judge")
        if self._limits is None:
            return
        name, request_id = f"{principal.public_id}:outcomes", random_hex()
        try:
            await self._limits.admit(name, request_id, 0, self._per_minute, None, None)
        except RateLimited as full:
            rule = f"This key may post {self._per_minute} outcomes a minute; retry in {full.retry_after_s:.1f} s."
            raise RateLimited(rule, retry_after_s=full.retry_after_s) from None
        await self._limits.release(name, request_id, None)

    def _scrub_judgement(self, judgement: Judgement, mode: str) -> Judgement:
        """The judgement with its texts reduced to what the key's log mode lets Baton store."""
        texts = {name: self._scrub(text, mode) for name in TEXT_CHARS_MAX if (text := getattr(judgement, name))}
        pairs = {self._scrub(name, mode): self._scrub(text, mode) for name, text in (judgement.metadata or {}).items()}
        if mode not in ("full", "redacted"):
            texts |= {name: NOT_KEPT for name in ("comment", "demonstration") if name in texts}
            pairs = {}
        changes: dict[str, Any] = {**texts, "metadata": pairs or None}
        return replace(judgement, **changes)

    def _scrub(self, text: str, mode: str) -> str:
        return self._redactor.scrub_text(text, personal=mode != "full")

    async def rollout(self, principal: Principal, rollout_id: str) -> Mapping[str, Any]:
        """One rollout with all of its child loops. Raises NotFound."""
        return await self._rollout(rollout_id, principal)

    async def _rollout(self, target: str, principal: Principal) -> Mapping[str, Any]:
        rollout = await self._store.rollout_get(target, principal.public_id)
        if rollout is None:  # it may be on disk but not yet in PostgreSQL
            await self._wait_until_shipped()
            rollout = await self._store.rollout_get(target, principal.public_id)
        if rollout is None:
            problem = f"this key has no rollout `{target[:64]}`"
            raise NotFound(problem, param="rollout_id", code="rollout_not_found")
        return rollout

    async def _wait_until_shipped(self) -> None:
        """Wait until the database has all of the journal. Raises NotFound, with a time to retry."""
        try:
            await self._journal.shipped()
        except TimeoutError:
            headers = {"retry-after": "2"}
            problem = "the log has not reached the database yet; try again"
            raise NotFound(problem, code="rollout_not_found", headers=headers) from None


def _check_step(rollout: Mapping[str, Any], step: int | None) -> None:
    """Raises BadRequest where the rollout has no such step that ended well."""
    if step is None or any(one["step"] == step and one["status"] == "done" for one in rollout["steps"]):
        return
    problem = f"this rollout has no finished step {step}; a step of a child loop is judged by the child's `rollout_id`"
    raise BadRequest(problem, param="step", code="step_not_found")
