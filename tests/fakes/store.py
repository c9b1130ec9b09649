"""`Store` in memory: the same answers as PostgreSQL's, by tests/contract/test_store.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from typing import Any

import numpy as np

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.tables import MODEL_KINDS, SETTLED
from gateway.core.log.events import Event
from gateway.core.log.outcome import Outcome
from gateway.core.loop.evidence.credit import Evidence, FinishedStep, JudgedLoop, credited_tree
from gateway.core.loop.evidence.sources import prior_weights
from gateway.core.loop.experience.likeness import SIMILAR, TASK_TYPE_SIMILARITY, WON
from gateway.core.loop.experience.past import FAILURE, Change, JudgedStep, Owner
from gateway.core.loop.replies.errors import VERIFY
from gateway.core.loop.replies.kinds import read_message
from gateway.errors import NotFound, Unavailable
from gateway.service.ports.admin import KeyRow, OrgRow
from gateway.service.ports.money import Books, Settlement
from gateway.service.ports.request import WonPlan

Row = dict[str, Any]


class FakeStore:
    """Set `away` to make every call raise Unavailable."""

    def __init__(self) -> None:
        self.keys: dict[str, KeyRow] = {}
        self.orgs: dict[str, OrgRow] = {}
        self.rows = rows.Rows()
        self.outcomes: list[Row] = []
        self.experience: dict[tuple[str, int, int], Row] = {}
        self.away = False
        self._ticks = count(1)

    def ingest(self, event: Event) -> None:
        """Store the rows of an event once, as the shipper does."""
        new = rows.event_rows(event)
        for name, key in (("rollouts", "id"), ("ledger", "event_id")):
            have = {row[key] for row in getattr(self.rows, name)}
            if any(row[key] in have for row in getattr(new, name)):
                return
        if any(self._settled(row["hold_id"]) for row in new.ledger if row["kind"] in SETTLED):
            return
        self.rows.extend(new)
        for row in new.experience:
            facts = {name: row[name] for name in row if name not in ("rollout_id", "round", "step", "pool_name")}
            about = {"pool": row["pool_name"], "changed_us": next(self._ticks)}
            self.experience[row["rollout_id"], row["round"], row["step"]] = facts | about

    def _settled(self, hold_id: str) -> bool:
        return any(row["hold_id"] == hold_id and row["kind"] in SETTLED for row in self.rows.ledger)

    def _up(self) -> None:
        if self.away:
            raise Unavailable("the database is not available", code="store_unavailable")

    async def ready(self) -> bool:
        return not self.away

    async def key_get(self, public_id: str) -> KeyRow | None:
        self._up()
        key = self.keys.get(public_id)
        return None if key is None else replace(key, organisation=self.orgs.get(key.org))

    def _owned(self, name: str, key_id: str) -> str | None:
        found = [r for r in self.rows.rollouts if name in (r["id"], r["completion_id"]) and r["key_id"] == key_id]
        return min(found, key=lambda r: int(r["depth"]))["id"] if found else None

    async def rollout_get(self, rollout_id: str, key_id: str) -> Mapping[str, Any] | None:
        self._up()
        root = self._owned(rollout_id, key_id)
        if root is None:
            return None
        ids, level = [root], [root]
        for _ in range(4):
            level = [r["id"] for r in self.rows.rollouts if r["parent_id"] in level and r["key_id"] == key_id]
            ids += level
        orders = {
            "rounds": ("round",),
            "steps": ("round", "step"),
            "outcomes": ("created_at", "id"),
            "ledger": ("at", "event_id"),
            "gradings": ("rollout_id",),
        }
        parts = {
            name: sorted(
                (r for r in self._table(name) if r["rollout_id"] in ids),
                key=lambda r, order=order: tuple(r[c] for c in order),  # type: ignore[misc]
            )
            for name, order in orders.items()
        }
        found = [r for r in self.rows.rollouts if r["id"] in ids]
        return rows.tree(root, sorted(found, key=lambda r: (r["created_at"], r["id"])), parts)

    def _table(self, name: str) -> list[Row]:
        return self.outcomes if name == "outcomes" else getattr(self.rows, name)

    async def outcome_insert(self, outcome: Outcome) -> tuple[str, bool]:
        self._up()
        rollout = self._owned(outcome.rollout_id, outcome.key_id)
        if rollout is None:
            raise NotFound(f"no rollout `{outcome.rollout_id}` of this key", param="rollout_id")
        return self._judge(rows.outcome_row(outcome) | {"rollout_id": rollout})

    def _judge(self, new: Row) -> tuple[str, bool]:
        for old in self.outcomes:
            same_key = new["idempotency_key"] is not None and old["idempotency_key"] == new["idempotency_key"]
            if old["id"] == new["id"] or (same_key and old["key_id"] == new["key_id"]):
                return str(old["id"]), False
        self.outcomes.append(new)
        if new["value"] is not None:
            self._credit(str(new["rollout_id"]))
        return str(new["id"]), True

    def _credit(self, rollout_id: str) -> None:
        by_id = {r["id"]: r for r in self.rows.rollouts}
        while by_id[rollout_id].get("parent_id") in by_id:
            rollout_id = by_id[rollout_id]["parent_id"]
        ids = [rollout_id]
        for each in ids:
            ids += [r["id"] for r in self.rows.rollouts if r.get("parent_id") == each]
        found = credited_tree({each: self._judged_loop(each) for each in ids}, rollout_id)
        for each in ids:
            for step in (s for s in self.rows.steps if s["rollout_id"] == each):
                self._experience_of(by_id[each], step, found[each].get(step["step"]))

    def _judged_loop(self, rollout_id: str) -> JudgedLoop:
        done = [s for s in self.rows.steps if s["rollout_id"] == rollout_id and s["status"] == "done"]
        done.sort(key=lambda step: int(step["step"]))
        return JudgedLoop(
            [
                FinishedStep(
                    s["step"],
                    s["kind"],
                    s["see"],
                    read_message({"content": s["reply"] or "", "tool_calls": s["tool_calls"]}),
                    s["task"] is None,
                    s["child_rollout_id"],
                    any((one.get("verdict") or {}).get("by") == VERIFY for one in s["attempts"] or ()),
                )
                for s in done
            ],
            [
                Evidence(
                    o["value"],
                    int(o["created_at"].timestamp() * 1e6),
                    o["source"],
                    o["step"],
                    weights=prior_weights(o["source"]),
                )
                for o in self.outcomes
                if o["rollout_id"] == rollout_id and o["value"] is not None
            ],
        )

    def _experience_of(self, rollout: Row, step: Row, credit: Evidence | None) -> None:
        key = (step["rollout_id"], step["round"], step["step"])
        if self.experience.get(key, {}).get("source") != FAILURE:
            self.experience.pop(key, None)
        if credit is None or step["kind"] not in MODEL_KINDS or step["status"] != "done":
            return
        took = step["finished_at"] - step["started_at"]
        self.experience[key] = {
            "worker": step["worker"],
            "worker_version": step["worker_version"],
            "pool": rollout["pool_name"],
            "task_type": rollout["task_type"],
            "embedding": rollout["task_embedding"],
            "embedder": rollout["task_embedder"],
            "success": credit.value,
            "cost_nano": step["cost_nano"],
            "latency_ms": round(took.total_seconds() * 1000),
            "at": rows.at(credit.at),
            "org": rollout["org"],
            "key_id": rollout["key_id"],
            "source": credit.source,
            "weight": credit.weight,
            "changed_us": next(self._ticks),
        }

    async def plans_near(
        self, key_id: str, task_type: str | None, embedding: Sequence[float], embedder: str, k: int
    ) -> Sequence[WonPlan]:
        self._up()
        near: list[tuple[float, int, WonPlan]] = []
        own = [r for r in self.rows.rollouts if r["key_id"] == key_id and r["depth"] == 0 and r["status"] == "done"]
        for rollout in own:
            judged = [o for o in self.outcomes if o["rollout_id"] == rollout["id"] and o["value"] is not None]
            planned = {r["round"]: r["plan"] for r in self.rows.rounds if r["rollout_id"] == rollout["id"]}
            credited = [row for (rollout_id, *_), row in self.experience.items() if rollout_id == rollout["id"]]
            lost = rollout["fallback"] or rollout["log_mode"] == "metadata" or not judged or not credited
            if lost or not planned.get(1) or (planned.get(2) or {"steps": []})["steps"]:
                continue
            vector = credited[0]["embedding"] if credited[0]["embedder"] == embedder else None
            pairs = zip(vector or [], embedding, strict=False)
            same_type = TASK_TYPE_SIMILARITY * (task_type is not None and rollout["task_type"] == task_type)
            similarity = same_type + sum(a * b for a, b in pairs)
            if similarity >= SIMILAR and max(judged, key=lambda o: o["created_at"])["value"] >= WON:
                won = rows.won_plan(rollout["request"], planned[1], rollout["pool"], rollout["cost_nano"])
                near.append((-similarity, rollout["cost_nano"], won))
        return [won for *_, won in sorted(near, key=lambda one: one[:2])[:k]]

    async def books(self, settled_max: int) -> Books:
        long_ago = datetime.min.replace(tzinfo=UTC)
        latest = await self.settled_latest(settled_max, long_ago)
        return Books(self._posted_totals(), await self.open_holds(), latest)

    async def settled_latest(self, limit: int, since: datetime) -> Sequence[Settlement]:
        self._up()
        settled = [r for r in self.rows.ledger if r["kind"] in SETTLED and r["at"] >= since]
        settled.sort(key=lambda r: str(r["event_id"]))
        return [
            Settlement(row["hold_id"], row["amount_nano"], tuple(name for name, _ in row["scopes"]))
            for row in settled[::-1][:limit]
        ]

    def _posted_totals(self) -> Mapping[str, int]:
        self._up()
        totals: dict[str, int] = {}
        for row in self.rows.ledger:
            sign = {"posted": 1, "uncertain": 1, "credit": -1}.get(row["kind"], 0)
            for name, _ in row["scopes"] if sign else ():
                totals[name] = totals.get(name, 0) + sign * row["amount_nano"]
        return totals

    async def open_holds(self) -> Sequence[Mapping[str, Any]]:
        self._up()
        names = ("hold_id", "rollout_id", "amount_nano", "scopes", "at")
        opened = [r for r in self.rows.ledger if r["kind"] == "hold" and not self._settled(r["hold_id"])]
        opened.sort(key=lambda r: (r["amount_nano"], r["event_id"]))
        holds = list({r["hold_id"]: r for r in opened}.values())  # the largest of each
        sent: dict[str, int] = {}
        for row in self.rows.ledger:
            if row["kind"] == "dispatched":
                sent[row["hold_id"]] = sent.get(row["hold_id"], 0) + row["amount_nano"]
        holds.sort(key=lambda r: r["at"])
        return [{name: row[name] for name in names} | {"dispatched_nano": sent.get(row["hold_id"])} for row in holds]

    async def settled_nano(self, hold_id: str) -> int | None:
        self._up()
        settled = [r for r in self.rows.ledger if r["hold_id"] == hold_id and r["kind"] in SETTLED]
        return int(settled[0]["amount_nano"]) if settled else None


class FakePast:
    """What a memory reads of a FakeStore."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store

    def _steps(self) -> list[JudgedStep]:
        self.store._up()
        return [_judged(key, row) for key, row in self.store.experience.items()]

    async def recent(self, most: int) -> Sequence[Owner]:
        latest = sorted(self._steps(), key=lambda one: one.changed_us, reverse=True)
        return list(dict.fromkeys(Owner("org", one.org) for one in latest))[:most]

    async def begin(self, owner: Owner, most: int) -> tuple[int, Sequence[str]]:
        own = sorted({one.worker for one in self._steps() if _has(owner, one)})
        return next(self.store._ticks), own[:most]

    async def latest(self, owner: Owner, worker: str, most: int) -> Sequence[JudgedStep]:
        own = [one for one in self._steps() if one.worker == worker and _has(owner, one)]
        return sorted(own, key=lambda one: one.at_us, reverse=True)[:most]

    async def changes(self, owners: Collection[Owner], since_us: int, most: int) -> Sequence[Change]:
        late = [one for one in self._steps() if one.changed_us > since_us and any(_has(each, one) for each in owners)]
        late.sort(key=lambda one: one.changed_us)
        return [Change(one.rollout_id, (one.round, one.step), one.changed_us, one.org, one.pool) for one in late][:most]

    async def of_rollouts(self, ids: Collection[str]) -> Sequence[JudgedStep]:
        return [one for one in self._steps() if one.rollout_id in ids]


def _has(owner: Owner, step: JudgedStep) -> bool:
    return (step.org if owner.kind == "org" else step.pool) == owner.name


def _judged(key: tuple[str, int, int], row: Row) -> JudgedStep:
    vector = None if row["embedding"] is None else np.array(row["embedding"], np.float32)
    return JudgedStep(
        *key,
        org=row["org"],
        key_id=row["key_id"],
        pool=row["pool"],
        worker=row["worker"],
        version=row["worker_version"],
        task_type=row["task_type"],
        embedder=row["embedder"],
        vector=vector,
        success=row["success"],
        cost_nano=row["cost_nano"],
        latency_ms=row["latency_ms"],
        weight=row["weight"],
        source=row["source"],
        at_us=round(row["at"].timestamp() * 1e6),
        changed_us=row["changed_us"],
    )
