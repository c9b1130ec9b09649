"""`DriftStore` in memory; tests/contract/test_drift_store.py holds it to PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from gateway.core.access.audit import Act
from gateway.core.log.events import uuid7
from gateway.core.pool.drift import Drift
from gateway.core.pool.identity import IDENTITIES_MAX, Identity
from gateway.core.pool.release import ReleaseTest
from gateway.errors import Unavailable
from gateway.service.ports.drift import KnownQuestion, Quarantine


class FakeDrift:
    """`away` makes every call raise. `known`: the questions that probes may ask. `audit`: (actor, act, target)."""

    def __init__(self) -> None:
        self.away = False
        self.known: list[KnownQuestion] = []
        self.audit: list[tuple[str, str, str]] = []
        self._identities: dict[Identity, list[datetime]] = {}
        self._facts: list[dict[str, Any]] = []
        self._subjects: set[tuple[Any, ...]] = set()
        self._all: dict[str, Quarantine] = {}
        self._due: dict[str, datetime] = {}

    def _up(self) -> None:
        if self.away:
            raise Unavailable("the database is not available")

    async def meet(self, seen: Sequence[Identity], at: datetime) -> Sequence[Identity]:
        self._up()
        changes = []
        for one in seen:
            if one in self._identities:
                self._identities[one][1] = at
                continue
            others = [other for other in self._identities if other[:2] == one[:2]]
            if len(others) >= IDENTITIES_MAX:
                continue
            self._identities[one] = [at, at]
            if others:
                changes.append(one)
                data = {"model": one.model, "fingerprint": one.fingerprint}
                self._note(one.worker, one.version, "identity", at, data)
        return changes

    async def identities(self, workers: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        self._up()
        rows = [
            {**one._asdict(), "first_at": first.isoformat(), "last_at": last.isoformat()}
            for one, (first, last) in self._identities.items()
            if one.worker in workers
        ]
        return sorted(rows, key=lambda row: row["first_at"], reverse=True)

    async def flagged(self, flag: Drift, at: datetime) -> None:
        self._up()
        subject = (flag.worker, flag.version, flag.task_type, flag.signal, f"{at.astimezone(UTC):%Y-%m}")
        if subject in self._subjects:
            return
        self._subjects.add(subject)
        rates = {"usual": round(flag.usual, 4), "now": round(flag.now, 4), "results": flag.results}
        data = {"task_type": flag.task_type or None, "signal": flag.signal, **rates}
        self._note(flag.worker, flag.version, "flagged", at, data)

    async def facts(self, limit: int) -> Sequence[Mapping[str, Any]]:
        self._up()
        return sorted(reversed(self._facts), key=lambda fact: str(fact["at"]), reverse=True)[:limit]

    async def put(self, worker: str, version: str, test: ReleaseTest | None, at: datetime, act: Act) -> bool:
        self._up()
        tests = () if test is None else (copy_of(test),)
        of_version = [one for one in self._all.values() if (one.worker, one.version) == (worker, version)]
        standing = next((one for one in of_version if one.ended_at is None), None)
        if standing is not None:
            known = {(one.task_type, one.signal) for one in standing.tests}
            fresh = [one for one in tests if (one.task_type, one.signal) not in known]
            self._all[standing.id] = replace(standing, tests=(*standing.tests, *fresh))
            return False
        if tests and any(one.ended_at is not None and one.ended_at >= at for one in of_version):
            return False
        new = Quarantine(uuid7(int(at.timestamp() * 1000)), worker, version, at, act.actor, act.why, tests)
        self._all[new.id], self._due[new.id] = new, at
        self._note(worker, version, "quarantined", at, {"by": act.actor, "why": act.why})
        self.audit.append((act.actor, "worker.quarantined", f"worker:{worker}"))
        return True

    async def release(self, worker: str, version: str, at: datetime, act: Act, *, anew: bool) -> Quarantine | None:
        self._up()
        of_version = [one for one in self._all.values() if (one.worker, one.version) == (worker, version)]
        standing = next((one for one in of_version if one.ended_at is None), None)
        if standing is None:
            return None
        ended = replace(standing, ended_at=at, ended_by=act.actor, ended_why=act.why, anew=anew)
        self._all[standing.id] = ended
        spent = {"probes": standing.probes, "probes_nano": standing.nano}
        self._note(worker, version, "released", at, {"by": act.actor, "why": act.why, **spent})
        self.audit.append((act.actor, "worker.released", f"worker:{worker}"))
        return ended

    async def standing(self, since: datetime) -> Sequence[Quarantine]:
        self._up()
        lasting = [one for one in self._all.values() if one.ended_at is None or one.ended_at > since]
        return sorted(lasting, key=lambda one: (one.at, one.id))

    async def questions(
        self, worker: str, version: str, task_type: str, before: datetime, limit: int
    ) -> Sequence[KnownQuestion]:
        self._up()
        return self.known[:limit]

    async def lend(self, quarantine_id: str, lease_s: float) -> Quarantine | None:
        self._up()
        one, now = self._all.get(quarantine_id), datetime.now(UTC)
        if one is None or one.ended_at is not None or self._due[quarantine_id] > now:
            return None
        self._due[quarantine_id] = now + timedelta(seconds=lease_s)
        return replace(one, tests=tuple(map(copy_of, one.tests)))

    async def probed(self, quarantine_id: str, tests: Sequence[ReleaseTest], nano: int, pause_s: float) -> None:
        self._up()
        one = self._all[quarantine_id]
        if one.ended_at is not None:
            return
        asked = {(test.task_type, test.signal) for test in tests}
        both = (*map(copy_of, tests), *(test for test in one.tests if (test.task_type, test.signal) not in asked))
        self._all[quarantine_id] = replace(one, tests=both, probes=one.probes + 1, nano=one.nano + nano)
        await self.rest(quarantine_id, pause_s)

    async def rest(self, quarantine_id: str, pause_s: float) -> None:
        self._up()
        self._due[quarantine_id] = datetime.now(UTC) + timedelta(seconds=pause_s)

    async def sweep(self, limit: int) -> int:
        self._up()
        old = datetime.now(UTC) - timedelta(days=90)
        gone = [one.id for one in self._all.values() if one.ended_at is not None and one.ended_at < old][:limit]
        past = [fact for fact in self._facts if datetime.fromisoformat(str(fact["at"])) < old][:limit]
        for each in gone:
            del self._all[each]
        self._facts = [fact for fact in self._facts if fact not in past]
        return len(gone) + len(past)

    def _note(self, worker: str, version: str, what: str, at: datetime, data: Mapping[str, Any]) -> None:
        fact = {"at": at.isoformat(), "worker": worker, "version": version, "what": what, "data": dict(data)}
        self._facts.append(fact)


def copy_of(test: ReleaseTest) -> ReleaseTest:
    """Another test of the same state, as one that was stored and read again."""
    return ReleaseTest.read(test.as_json())
