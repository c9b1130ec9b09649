"""Outcomes: judgements of a rollout, from its owner. Idempotent; never computed, never turned into a reward here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.log.ids import uuid7
from gateway.core.log.outcome import TEXT_CHARS_MAX, Judgement, Outcome, check_idempotency_key, requested
from gateway.core.log.redact import Redactor
from gateway.errors import NotFound
from gateway.service.ports.request import Clock, Journal, Store

NOT_KEPT = "[not kept]"


class Outcomes:
    """Takes in outcomes and reads rollouts back, for the key that owns them and nobody else."""

    def __init__(self, store: Store, journal: Journal, clock: Clock, redactor: Redactor | None = None) -> None:
        self._redactor = redactor or Redactor()
        self._store = store
        self._journal = journal
        self._clock = clock

    async def add(self, principal: Principal, body: object, idempotency_key: str | None) -> dict[str, Any]:
        """Attach one outcome. Raises BadRequest naming the field, NotFound for a rollout that is not this key's."""
        target, judgement = requested(body)
        key = check_idempotency_key(idempotency_key)
        rollout = await self._rollout(target, principal)
        now = self._clock.now()
        outcome = Outcome(
            id=uuid7(int(now.timestamp() * 1000)),
            rollout_id=str(rollout["id"]),
            key_id=principal.public_id,
            created_at=now,
            judgement=self._scrubbed(judgement, principal.log_mode),
            idempotency_key=key,
        )
        outcome_id, new = await self._store.outcome_insert(outcome)
        return {"id": outcome_id, "object": "baton.outcome", "rollout_id": outcome.rollout_id, "created": new}

    def _scrubbed(self, judgement: Judgement, mode: str) -> Judgement:
        """The judgement with the client's texts as its key's log mode lets them be stored."""
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
        """The whole tree of one rollout. Raises NotFound."""
        return await self._rollout(rollout_id, principal)

    async def _rollout(self, target: str, principal: Principal) -> Mapping[str, Any]:
        found = await self._store.rollout_get(target, principal.public_id)
        if found is None:  # perhaps it is on disk and not yet in Postgres
            await self._shipped()
            found = await self._store.rollout_get(target, principal.public_id)
        if found is None:
            raise NotFound(f"no rollout `{target[:64]}` of this key", param="rollout_id", code="rollout_not_found")
        return found

    async def _shipped(self) -> None:
        try:
            await self._journal.shipped()
        except TimeoutError:
            headers = {"retry-after": "2"}
            raise NotFound(
                "the log is still on its way to the database; ask again", code="rollout_not_found", headers=headers
            ) from None
