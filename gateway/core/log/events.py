"""Event records of the journal: what happened, in the order it happened. Pure.

An event is a kind, an id that sorts by time, and a JSON-able payload. `canonical` gives its one byte form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gateway.core.log.ids import uuid7

Kind = Literal["hold", "dispatch", "settle", "rollout", "shadow"]


@dataclass(frozen=True, slots=True)
class Event:
    """One journal record. `id` is a UUIDv7 string (unique, time-ordered); `ts_us` microseconds since the epoch.

    Payloads by kind:
      hold     {hold_id, rollout_id, amount_nano, scopes: [[name, limit_nano|null], …]}
      dispatch {hold_id, rollout_id, step_id, attempt, worker, bound_nano}    before the call leaves
      settle   {hold_id, rollout_id, state: posted|voided|uncertain, charged_nano, scopes}
      rollout  the whole tree of DESIGN §6 (see `core/log/rollout.py`)
      shadow   {rollout_id, version, live_version, refusal, agrees, latency_ms, …}   a shadow's plan, without its text
    """

    id: str
    kind: Kind
    ts_us: int
    payload: Mapping[str, Any]

    @classmethod
    def new(cls, kind: Kind, now_us: int, payload: Mapping[str, Any]) -> Event:
        """An event that happens now, under an id of its own."""
        return cls(uuid7(now_us // 1000), kind, now_us, payload)


def canonical(event: Event) -> bytes:
    """The one byte form: sorted keys, no spaces, UTF-8 (lone surrogates kept). Equal events have equal bytes."""
    record = {"id": event.id, "kind": event.kind, "ts_us": event.ts_us, "payload": event.payload}
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


def parse(data: bytes) -> Event:
    """Inverse of `canonical`. Raises ValueError on anything else."""
    record = json.loads(data)
    if not isinstance(record, dict) or set(record) != {"id", "kind", "ts_us", "payload"}:
        raise ValueError("not an event record")
    return Event(record["id"], record["kind"], record["ts_us"], record["payload"])
