"""Outcomes: judgements of a rollout, from its owner. Idempotent; never computed, never turned into a reward here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.core.ids import uuid7
from gateway.core.keys import Principal
from gateway.core.redact import Redactor
from gateway.errors import BadRequest, NotFound
from gateway.service.ports import Clock, Journal, Store

KINDS = ("number", "boolean", "label", "comment", "demonstration")
FIELDS = frozenset(
    {
        "rollout_id",
        "completion_id",
        "value",
        "label",
        "comment",
        "demonstration",
        "source",
        "grader_version",
        "metadata",
    }
)
NOT_KEPT = "[not kept]"
TEXT_CHARS_MAX = 20_000
LABEL_CHARS_MAX = 128


class Outcomes:
    """Takes in outcomes and reads rollouts back, for the key that owns them and nobody else."""

    def __init__(self, store: Store, journal: Journal, clock: Clock, redactor: Redactor | None = None) -> None:
        self._redactor = redactor or Redactor()
        self._store = store
        self._journal = journal
        self._clock = clock

    async def add(self, principal: Principal, body: object, idempotency_key: str | None) -> dict[str, Any]:
        """Attach one outcome. Raises BadRequest naming the field, NotFound for a rollout that is not this key's."""
        row = _row(body)
        rollout = await self._rollout(row.pop("target"), principal)
        now = self._clock.now()
        row |= self._texts(row, principal.log_mode)
        row |= {
            "id": uuid7(int(now.timestamp() * 1000)),
            "rollout_id": str(rollout["id"]),
            "key_id": principal.public_id,
            "idempotency_key": _idempotency(idempotency_key),
            "created_at": now,
        }
        outcome_id, new = await self._store.outcome_insert(row)
        return {"id": outcome_id, "object": "baton.outcome", "rollout_id": row["rollout_id"], "created": new}

    def _texts(self, row: Mapping[str, Any], mode: str) -> dict[str, Any]:
        """What the client wrote, as its key's log mode lets it be kept."""
        names = ("label", "comment", "demonstration", "source", "grader_version")
        given = {name: row[name] for name in names if row[name] is not None}
        kept = {name: self._redactor.scrub_text(text, personal=mode != "full") for name, text in given.items()}
        if mode not in ("full", "redacted"):
            kept |= {name: NOT_KEPT for name in ("comment", "demonstration") if name in given}
        return kept

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


def _row(body: object) -> dict[str, Any]:
    """A request body → the columns of an outcome, with `target`. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    unknown = sorted(set(body) - FIELDS)
    if unknown:
        raise BadRequest(f"Unknown parameter: '{unknown[0]}'.", param=unknown[0], code="unknown_parameter")
    target = body.get("rollout_id") or body.get("completion_id")
    if not isinstance(target, str) or not target or len(target) > 128:
        raise BadRequest("give `rollout_id` or `completion_id`, as the reply carried it", param="rollout_id")
    kind, judgement = _judgement(body)
    return {
        "target": target,
        "kind": kind,
        "value": judgement if kind in ("number", "boolean") else None,
        "label": judgement if kind == "label" else None,
        "comment": judgement if kind == "comment" else None,
        "demonstration": judgement if kind == "demonstration" else None,
        "source": _text(body, "source", LABEL_CHARS_MAX) or "client",
        "grader_version": _text(body, "grader_version", LABEL_CHARS_MAX),
    }


def _judgement(body: Mapping[str, Any]) -> tuple[str, Any]:
    given = [name for name in ("value", "label", "comment", "demonstration") if body.get(name) is not None]
    if len(given) != 1:
        raise BadRequest(
            "give exactly one of `value`, `label`, `comment`, `demonstration`", param=(given or ["value"])[-1]
        )
    if given[0] != "value":
        return given[0], _text(body, given[0], LABEL_CHARS_MAX if given[0] == "label" else TEXT_CHARS_MAX)
    value = body["value"]
    if isinstance(value, bool):
        return "boolean", float(value)
    if isinstance(value, int | float) and 0 <= value <= 1:
        return "number", float(value)
    raise BadRequest("`value` must be true, false or a number from 0 to 1", param="value", code="invalid_type")


def _text(body: Mapping[str, Any], name: str, chars_max: int) -> str | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value or len(value) > chars_max:
        raise BadRequest(f"`{name}` must be a string of 1 to {chars_max} characters", param=name, code="invalid_type")
    return value


def _idempotency(key: str | None) -> str | None:
    if key is not None and not 0 < len(key) <= 255:
        raise BadRequest("`Idempotency-Key` must have 1 to 255 characters", param="Idempotency-Key")
    return key
