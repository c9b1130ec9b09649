"""The drift drill over PostgreSQL: a worker gets worse, is flagged and kept out, recovers, and its probes release it.

Requests go the whole way; the log is that of the real tables, and outcomes, facts, quarantine and questions are read
from there. In the end the ledger and the balances agree to the nano-dollar.
"""

from __future__ import annotations

import random
import re
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.adapters.journal.series import WorkerSeries
from gateway.adapters.postgres import rows
from gateway.adapters.postgres.credit import PostgresJudgements
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.operators.alerts import PostgresAlerts
from gateway.adapters.postgres.operators.drift import PostgresDrift
from gateway.adapters.postgres.store import PostgresStore
from gateway.core.log.events import Event
from gateway.core.pool.drift import DriftRules
from gateway.service.policies.drift import WorkerWatch
from gateway.service.policies.probes import SCOPE, ProbeLimits, Probes
from gateway.service.policies.quarantine import QuarantineRules, Quarantines
from gateway.service.ports.request import WorkerCall
from tests.fakes.workers import Says
from tests.kit import KEY, Kit, TestClock, ask, plan
from tests.records import an_outcome

RULES = DriftRules(reference=100, run_length=5_000)
KEY_SCOPE, PROBES_SCOPE = f"key:{KEY.public_id}", SCOPE


class Drill:
    """A gateway whose planner always names alpha, and whose log is in PostgreSQL."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.rng, self.right = random.Random(3), 0.95
        self.kit = Kit(
            (plan(("atlas", None, [])),), {"alpha": self.reply}, held=lambda workers: self.quarantines.of(workers)
        )
        self.engine, self.store = engine, PostgresStore(engine)
        self.clock, self.metrics = TestClock(), PrometheusMetrics()
        catalog, series = self.kit.catalog, WorkerSeries(self.metrics.registry)
        self.watch = WorkerWatch(PostgresJudgements(engine), catalog.worker_names, self.clock, series, RULES)
        acts = QuarantineRules(frozenset({"outcome"}))
        self.drift = PostgresDrift(engine)
        self.quarantines = Quarantines(self.drift, self.watch, catalog.workers, self.clock, series, acts)
        ports = (self.kit.workers, self.kit.budgets, self.kit.journal, self.clock, series)
        self.probes = Probes(self.quarantines, *ports, ProbeLimits(10**8, pace_s=0.0))
        self.shipped = 0

    def reply(self, call: WorkerCall) -> Says:
        """What alpha says: the product that it is asked for, or another number."""
        factors = re.findall(r"\d+", call.body["messages"][-1]["content"])
        wrong = 0 if self.rng.random() < self.right else 1
        return Says(f"Answer: {int(factors[0]) * int(factors[1]) + wrong}")

    async def ship(self) -> None:
        for event in self.kit.journal.events[self.shipped :]:
            await self._store(event)
        self.shipped = len(self.kit.journal.events)

    async def _store(self, event: Event) -> None:
        async with self.engine.begin() as connection:
            await connection.run_sync(insert_rows, rows.event_rows(event))

    async def serve(self, n: int) -> list[str]:
        """Serve `n` requests, judge each, and let the watch read what came. Return who answered."""
        answered = []
        for number in range(n):
            a, b = self.rng.randrange(2, 90), self.rng.randrange(2, 90)
            running = await self.kit.serve(ask(f"What is {a} times {b}?", metadata={"task_type": "sums"}))
            body = await running.result()
            answered.append(running.record.steps[-1].worker)
            await self.ship()
            right = body["choices"][0]["message"]["content"] in (f"Answer: {a * b}", "ok")
            await self.store.outcome_insert(an_outcome(running.record.id, float(right), key_id=KEY.public_id))
            if number % 5 == 4:
                await self.look()
        return answered

    async def look(self) -> None:
        for step in (self.quarantines.read, self.watch.read, self.quarantines.act, self.quarantines.meet):
            await step()


async def test_flagged_kept_out_recovered_released_and_the_money_is_exact(pg_engine: AsyncEngine) -> None:
    drill = Drill(pg_engine)
    began = datetime.now().astimezone()
    assert set(await drill.serve(160)) == {"alpha"}
    assert drill.quarantines.standing() == []

    drill.right = 0.4  # the vendor has changed the model behind the name
    until = 0
    while not drill.quarantines.standing():
        until += len(await drill.serve(5))
    assert until <= 100
    kept_out = await drill.serve(15)
    assert set(kept_out) == {"gamma"}

    for _ in range(25):  # it is still bad: probes do not let it out
        assert await drill.probes.probe(drill.quarantines.standing()[0])
    await drill.look()
    (standing,) = drill.quarantines.standing()
    assert (standing.probes, standing.nano > 0) == (25, True)

    drill.right = 0.95
    asked = 25
    while drill.quarantines.standing():
        assert await drill.probes.probe(drill.quarantines.standing()[0])
        asked += 1
    assert asked <= 25 + 200
    assert set(await drill.serve(40)) == {"alpha"}  # and it is not flagged again
    assert drill.watch.flagged() == set()

    facts = await drill.drift.facts(10)
    assert [fact["what"] for fact in facts] == ["released", "quarantined", "flagged"]
    await told_of(pg_engine, began)
    await the_money_is_exact(drill, facts[0]["data"]["probes_nano"], asked)


async def told_of(engine: AsyncEngine, began: datetime) -> None:
    outbox = PostgresAlerts(engine)
    assert await outbox.collect(["quarantine"], datetime.now().astimezone()) == 2
    assert await outbox.collect(["quarantine"], datetime.now().astimezone()) == 0
    (first, second) = [await outbox.lend(60.0), await outbox.lend(60.0)]
    assert first is not None
    assert (first.kind, first.data["worker"], first.data["state"]) == ("quarantine", "alpha", "began")
    assert first.at >= began
    assert second is None  # one at a time, in order


async def the_money_is_exact(drill: Drill, probes_nano: int, asked: int) -> None:
    """Ledger, balances, records and the quarantine say the same; nothing is held."""
    await drill.ship()
    books = await drill.store.books(1)
    assert books.open_holds == []
    costs = [event.payload["cost_nano"] for event in drill.kit.journal.of_kind("rollout")]
    assert books.posted[KEY_SCOPE] == sum(costs) == (await drill.kit.budgets.balance(KEY_SCOPE)).posted_nano
    assert books.posted[PROBES_SCOPE] == probes_nano == (await drill.kit.budgets.balance(PROBES_SCOPE)).posted_nano
    assert await drill.kit.open_nano() == await drill.kit.open_nano(PROBES_SCOPE) == 0
    assert len(drill.kit.workers.calls) == len(costs) + asked
