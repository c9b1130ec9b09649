"""The memory of experience: what it follows, what it says of its age, and whose evidence moves whom."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from gateway.core.loop.experience.past import STEP_BYTES, Owner, TaskQuestion
from gateway.core.loop.experience.recall import KEY_WEIGHT, STRANGERS_FIRST, trials_near
from gateway.errors import NotFound, RateLimited, Unavailable, UpstreamError
from gateway.service.loop.experience.memory import ExperienceMemory, Recalled
from gateway.service.request.outcomes import Outcomes
from tests.fakes.ratelimits import FakeRateLimits
from tests.fakes.store import FakePast, FakeStore
from tests.kit import KEY, Kit, TestClock, ask
from tests.records import a_rollout, a_step, an_outcome, rollout_event
from tests.stores import NOW
from tests.waiting import BOUND_S, until

ANY = TaskQuestion(None, None, "")
WORKERS = {"alpha": "1", "beta": "1"}


class HandClock(TestClock):
    """Time that a test moves."""

    __test__ = False
    s = 1_000.0

    def monotonic_s(self) -> float:
        return self.s


class World:
    """A store with steps, one each, of worker `alpha`, and memories of it."""

    def __init__(self, **bounds: Any) -> None:
        self.store, self.clock = FakeStore(), HandClock()
        self.source = FakePast(self.store)
        limits = {"bytes_max": 2**24, "stale_s": 10.0, "timeout_s": BOUND_S} | bounds
        self.memory = ExperienceMemory(self.source, self.clock, **limits)
        self.judged = 0

    async def judge(self, value: float, n: int = 1, worker: str = "alpha", **facts: Any) -> str:
        for _ in range(n):
            record = a_rollout(steps=[a_step(0, worker)], **facts)
            self.store.ingest(rollout_event(record))
            self.judged += 1
            at = NOW + timedelta(seconds=self.judged)
            await self.store.outcome_insert(an_outcome(record.id, value, key_id=record.key_id, created_at=at))
        return record.id

    async def near(self, org: str = "acme", **more: Any) -> Recalled:
        return await self.memory.near(org, ANY, WORKERS, 200, **more)

    async def weights(self, org: str = "acme", shared: str | None = None) -> tuple[float, float]:
        """The weight of what is known of alpha, and of what of it was right."""
        await self.near(org, shared=shared)
        held = self.memory._held
        pool = None if shared is None else held[Owner("pool", shared)].past
        found = dict(trials_near(ANY, WORKERS, 200, held[Owner("org", org)].past, pool, org))
        one = found.get("alpha")
        return (0.0, 0.0) if one is None else (float(one.weight.sum()), float(one.weight @ one.success))


async def test_an_outcome_is_known_once_it_is_read() -> None:
    world = World()
    first = await world.judge(1.0)
    assert await world.weights() == (1, 1)
    await world.judge(0.0)
    assert await world.weights() == (1, 1)
    await world.memory.refresh()
    assert await world.weights() == (2, 1)
    await world.store.outcome_insert(an_outcome(first, 0.0, created_at=NOW + timedelta(days=1)))
    await world.memory.refresh()
    assert await world.weights() == (2, 0)


async def test_those_who_ask_together_share_one_reading_that_begins_after_they_asked() -> None:
    world = World()
    await world.judge(1.0)
    await world.near()
    reads, changes = 0, world.source.changes

    async def slow(*asked: Any) -> Any:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0.01)
        return await changes(*asked)

    world.source.changes = slow  # type: ignore[method-assign, assignment]
    running = asyncio.create_task(world.memory.refresh())
    await asyncio.sleep(0.005)
    await world.judge(1.0)
    await asyncio.gather(*(world.memory.refresh() for _ in range(20)))
    assert await world.weights() == (2, 2)
    assert reads == 2
    await running


async def test_the_state_says_how_old_the_memory_is() -> None:
    world = World()
    await world.judge(1.0)
    assert (await world.near()).as_json() == {"state": "fresh", "age_s": 0.0}
    world.clock.s += 10
    assert (await world.near()).state == "fresh"
    world.store.away = True
    world.clock.s += 32
    with pytest.raises(Unavailable):
        await world.memory.refresh()
    stale = await world.near()
    assert stale.as_json() == {"state": "stale", "age_s": 42.0}
    assert stale.experience["alpha"].n == 1  # the last that is known
    world.store.away = False
    await world.memory.refresh()
    assert (await world.near()).state == "fresh"


async def test_an_organisation_that_is_not_read_in_time_is_missing_and_read_all_the_same() -> None:
    world = World(timeout_s=0.01)
    await world.judge(1.0)
    latest, gate = world.source.latest, asyncio.Event()

    async def slow(*asked: Any) -> Any:
        await gate.wait()
        return await latest(*asked)

    world.source.latest = slow  # type: ignore[method-assign, assignment]
    assert await world.near() == Recalled("missing")
    gate.set()
    await until(lambda: world.memory.steps == 1)
    assert (await world.near()).state == "fresh"


async def test_while_the_store_is_away_nobody_waits_for_it_again_and_again() -> None:
    world = World()
    await world.judge(1.0)
    world.store.away = True
    assert (await world.near()).state == "missing"
    world.store.away = False
    assert (await world.near()).state == "missing"  # it was away less than a second ago
    world.clock.s += 1
    assert (await world.near()).state == "fresh"


async def test_deleted_steps_are_forgotten_when_all_is_read_anew() -> None:
    world = World(reload_s=0.0)
    await world.judge(1.0, 3)
    assert await world.weights() == (3, 3)
    world.store.experience.clear()
    await world.memory.refresh()
    assert await world.weights() == (3, 3)
    world.clock.s += 1
    running = asyncio.create_task(world.memory.run())
    await until(lambda: world.memory.steps == 0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.memory.close()


async def test_at_start_the_organisations_that_were_active_are_read() -> None:
    world = World()
    await world.judge(1.0, org="acme")
    await world.judge(1.0, org="other")
    running = asyncio.create_task(world.memory.run())
    await until(lambda: world.memory.steps == 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_memory_is_bounded_and_who_was_asked_for_longest_ago_goes() -> None:
    world = World(bytes_max=8 * STEP_BYTES)
    for org in ("a", "b", "c"):
        await world.judge(1.0, 4, org=org)
    assert (await world.weights("a"))[0] == 4
    assert (await world.weights("b"))[0] == 4
    await world.near("a")
    await world.near("c")
    assert set(world.memory._held) == {Owner("org", "a"), Owner("org", "c")}
    await world.judge(1.0, 20, org="huge")
    await world.judge(1.0, 20, worker="beta", org="huge")
    assert (await world.weights("huge"))[0] == 4  # half of the memory for each of two workers
    assert world.memory.steps == 8


async def test_the_latest_steps_stay_and_older_ones_make_room() -> None:
    world = World(bytes_max=3 * STEP_BYTES)
    await world.judge(0.0, 3)
    await world.near()
    await world.judge(1.0, 2)
    await world.memory.refresh()
    assert await world.weights() == (3, 2)
    late = a_rollout(steps=[a_step(0, "alpha")])
    world.store.ingest(rollout_event(late))
    await world.store.outcome_insert(an_outcome(late.id, 0.0, created_at=NOW - timedelta(days=1)))
    await world.memory.refresh()
    assert await world.weights() == (3, 2)  # it is older than all that are there


# ---------------------------------------------------------------- whose evidence counts


async def test_what_another_organisation_reports_moves_nothing() -> None:
    world = World()
    await world.judge(1.0, 5)
    await world.judge(0.0, 500, org="other", key_id="key2")
    assert await world.weights() == (5, 5)
    assert (await world.near("third")).experience == {}


async def test_in_a_pool_that_shares_others_weigh_at_most_half_of_ones_own() -> None:
    world = World()
    await world.judge(0.0, 100, org="other", key_id="key2")
    weight, right = await world.weights(shared="default")
    assert [weight, right] == pytest.approx([STRANGERS_FIRST, 0])
    await world.judge(1.0, 10)
    await world.memory.refresh()
    weight, right = await world.weights(shared="default")
    assert [weight, right] == pytest.approx([15, 10])
    assert await world.weights() == (10, 10)  # a pool that does not share
    past = world.memory._held[Owner("org", "acme")].past
    pool = world.memory._held[Owner("pool", "default")].past
    ((_, one),) = trials_near(ANY, WORKERS, 200, past, pool, "acme")
    assert [one.wide_n, one.wide_right] == pytest.approx([15, 10])


@pytest.mark.parametrize(
    ("honest", "false", "weight", "right"),
    [
        ([100], 0, 100, 100),  # one key alone decides
        ([100], 20, KEY_WEIGHT + 20, KEY_WEIGHT),
        ([30], 150, 30 + KEY_WEIGHT, 30),
        ([60, 60], 80, 200, 120),  # nobody has more than half
    ],
)
async def test_no_key_decides_alone_what_several_report(
    honest: Sequence[int], false: int, weight: float, right: float
) -> None:
    world = World()
    for number, n in enumerate(honest):
        await world.judge(1.0, n, key_id=f"honest-{number}")
    await world.judge(0.0, false, key_id="false") if false else None
    assert list(await world.weights()) == pytest.approx([weight, right])


async def test_a_vector_of_numbers_is_compared_as_the_model_says() -> None:
    world = World()
    near, far = np.zeros(256, np.float32), np.zeros(256, np.float32)
    near[0], far[1] = 1.0, 1.0
    for vector, value in ((near, 1.0), (far, 0.0)):
        await world.judge(value, 3, task_embedding=vector.tolist(), task_embedder="e", task_type=None)
    found = await world.memory.near("acme", TaskQuestion(None, near, "e"), WORKERS, 200)
    assert (found.experience["alpha"].n, found.experience["alpha"].success_mean) == (3, 1.0)
    other = await world.memory.near("acme", TaskQuestion(None, near, "f"), WORKERS, 200)
    assert other.experience["alpha"].success_mean < 0.7  # all steps are as near


async def test_a_key_posts_so_many_outcomes_a_minute() -> None:
    kit = Kit()
    running = await kit.serve()
    outcomes = Outcomes(kit.store, kit.journal, TestClock(), limits=FakeRateLimits(), per_minute=3)
    body = {"rollout_id": running.record.id, "value": 1.0}
    for _ in range(3):
        assert (await outcomes.add(KEY, body, None))["created"]
    with pytest.raises(RateLimited, match="3 outcomes a minute") as full:
        await outcomes.add(KEY, body, None)
    assert 0 < full.value.retry_after_s <= 60
    with pytest.raises(NotFound):  # another key's outcomes are counted apart
        await outcomes.add(replace(KEY, public_id="keyBBBBBBBBB"), body, None)


async def test_an_outcome_counts_with_the_very_next_request() -> None:
    kit = Kit()
    running = await kit.serve(ask(model="baton/rule"))
    outcomes = Outcomes(kit.store, kit.journal, TestClock(), memory=kit.memory)
    (worker,) = (step.worker for step in running.record.steps)
    for number in range(3):
        await outcomes.add(KEY, {"rollout_id": running.record.id, "value": 1.0}, None)
        after = await kit.serve(ask(model="baton/rule"))
        assert after.record.memory == {"state": "fresh", "age_s": 0.0}
        (arm,) = (one for one in after.record.rounds[0].decision["arms"] if one["worker"] == worker)  # type: ignore[index]
        assert arm["n"] == 1, number


async def test_a_request_planned_by_old_experience_or_none_says_so() -> None:
    kit = Kit()
    first = await kit.serve(ask(model="baton/rule"))
    assert "x-baton-experience" not in first.headers()
    (held,) = kit.memory._held.values()
    held.read_s -= 42
    old = await kit.serve(ask(model="baton/rule"))
    assert old.headers()["x-baton-experience"] == "stale; age=42"
    kit.memory._held.clear()
    kit.store.away = True
    blind = await kit.serve(ask(model="baton/rule"))
    assert blind.headers()["x-baton-experience"] == "missing"
    assert (blind.record.status, blind.record.memory) == ("done", {"state": "missing", "age_s": 0.0})
    assert kit.metrics.degradations == ["experience"]
    named = await kit.serve(ask(model="alpha"))
    assert named.record.memory is None  # nothing was planned


async def test_a_worker_that_fails_is_known_to_fail_with_the_next_request() -> None:
    kit = Kit(workers={"alpha": UpstreamError("down", upstream_status=500, retryable=False)})
    failed = await kit.serve(ask(model="baton/conductor"))
    assert (failed.record.steps[0].worker, failed.record.steps[0].status) == ("alpha", "failed")
    assert failed.record.failures == [(1, 0, 1.0)]
    (held,) = kit.memory._held.values()
    found = dict(trials_near(ANY, WORKERS, 200, held.past))
    assert (float(found["alpha"].weight.sum()), float(found["alpha"].success.sum())) == (1, 0)
    await kit.memory.refresh()
    assert len(held.past) == 1  # what the log says of it came in its place


async def test_calls_that_failed_make_no_worker_look_cheap_or_fast() -> None:
    world = World()
    await world.judge(1.0, 3)
    failed = a_step(0, "alpha", status="failed", cost_nano=0)
    failed.finished_us = failed.started_us + 1
    world.store.ingest(rollout_event(a_rollout(steps=[failed], failures=[(1, 0, 1.0)])))
    await world.near()
    found = dict(trials_near(ANY, WORKERS, 200, world.memory._held[Owner("org", "acme")].past))["alpha"]
    assert (set(found.cost_nano.tolist()), set(found.latency_ms.tolist())) == ({400.0}, {100.0})
    assert (float(found.weight.sum()), float(found.success.sum())) == (4, 3)
