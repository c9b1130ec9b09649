"""Workers that keep failing rest: who is asked meanwhile, who tries them, and what processes share of it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request
from prometheus_client import CollectorRegistry

from gateway.adapters.journal.series import WorkerSeries
from gateway.api.operator.figures import FiguresApi
from gateway.cli.pool import workers as command
from gateway.core.pool.breaker import RestRules
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.errors import (
    BatonError,
    UpstreamError,
    UpstreamProtocol,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamResting,
    UpstreamTimeout,
)
from gateway.service.admin.checkers import CheckerFigures
from gateway.service.loop.health.breakers import UNANSWERED_MAX, UNPROVEN_MAX, Breakers
from tests.fakes.reports import FakeReports
from tests.fakes.rests import FakeRestMetrics, FakeRestStore, MovedClock
from tests.fakes.store import FakeStore
from tests.fakes.workers import Says
from tests.kit import Kit, ask, model_worker, plan, pool_file

RULES = RestRules()
ATLAS, BRAVO = model_worker("a", "atlas"), model_worker("b", "bravo")
DEAD = UpstreamError("boom", retryable=True, upstream_status=500)
REFUSED = UpstreamError("it cannot be reached", retryable=True, dispatched=False)
UNPAID = UpstreamError("pay first", upstream_status=402)
MISSING = UpstreamRefused("no such model", upstream_status=404)


def limited(retry_after_s: float | None = None) -> UpstreamRateLimited:
    return UpstreamRateLimited("slow down", upstream_status=429, retry_after_s=retry_after_s)


def nobody_else() -> bool:
    return False


def somebody_else() -> bool:
    return True


class Ward:
    """Breakers with a clock that the test moves."""

    def __init__(self, clock: MovedClock | None = None, store: FakeRestStore | None = None) -> None:
        self.clock, self.metrics = clock or MovedClock(), FakeRestMetrics()
        self.rests = Breakers(self.clock, RULES, store or FakeRestStore(), self.metrics, lambda: (ATLAS, BRAVO))

    def call(self, spec: WorkerSpec, error: Exception | None = None, *, takes_s: float = 0.0, **more: Any) -> None:
        """One call from its beginning to its end."""
        flight = self.rests.leave(spec, more.get("others", nobody_else))
        self.clock.s += takes_s
        self.rests.ended(flight, error)

    def names(self, *workers: WorkerSpec) -> list[str]:
        return [spec.name for spec in self.rests.of(workers)]


def test_a_worker_rests_after_three_failures_and_is_tried_once_after_it(caplog: pytest.LogCaptureFixture) -> None:
    ward = Ward()
    for number in range(3):
        assert ward.names(ATLAS, BRAVO) == []
        ward.call(ATLAS, DEAD)
        assert ward.rests.holds(ATLAS) == (number == 2)
    assert ward.names(ATLAS, BRAVO) == ["a"]
    assert "worker a rests for 10 s: its calls fail (boom)" in caplog.text
    assert ward.metrics.began == [("a", "failed")]
    with pytest.raises(UpstreamResting) as resting:
        ward.call(ATLAS, others=somebody_else)
    assert (resting.value.headers["retry-after"], resting.value.dispatched) == ("10", False)
    ward.clock.s += 10.0
    assert ward.names(ATLAS, BRAVO) == []
    trying = ward.rests.leave(ATLAS, somebody_else)
    assert ward.names(ATLAS, BRAVO) == ["a"]  # nobody else tries meanwhile
    with pytest.raises(UpstreamResting):
        ward.rests.leave(ATLAS, somebody_else)
    ward.rests.ended(trying)
    assert ward.rests.report(ATLAS) is None


def test_a_try_that_says_nothing_lets_the_next_one_try() -> None:
    ward = Ward()
    ward.call(ATLAS, limited())
    ward.clock.s += 10.0
    trying = ward.rests.leave(ATLAS, somebody_else)
    ward.rests.ended(trying, asyncio.CancelledError())
    assert ward.names(ATLAS, BRAVO) == []
    trying = ward.rests.leave(ATLAS, somebody_else)
    ward.rests.ended(trying, UpstreamRefused("bad body", upstream_status=400))  # so it answers
    assert ward.rests.report(ATLAS) is None


def test_an_unpaid_bill_or_a_refused_key_is_the_accounts() -> None:
    same = {"api_key": "env:KEY", "url": "http://vendor/v1"}
    one, two = model_worker("one", "atlas", **same), model_worker("two", "bravo", **same)
    other_key = model_worker("three", "quill", url="http://vendor/v1", api_key="env:OTHER")
    elsewhere = model_worker("four", "comet", url="http://elsewhere/v1", api_key="env:KEY")
    ward = Ward()
    ward.call(one, UNPAID)
    assert ward.names(one, two, other_key, elsewhere) == ["one", "two"]
    ward.clock.s += 60.0
    ward.call(two)
    assert ward.names(one, two, other_key, elsewhere) == []


def test_of_models_somebody_always_stays_the_likeliest() -> None:
    ward = Ward()
    ward.call(ATLAS, limited(retry_after_s=300.0))
    ward.call(BRAVO, limited(retry_after_s=30.0))
    assert ward.names(ATLAS, BRAVO) == ["a"]
    assert ward.names(ATLAS) == []
    tool = WorkerSpec(name="t", handle="tools", kind="tool", url="http://tool/run", price=ATLAS.price)
    for _ in range(3):
        ward.call(tool, DEAD)
    assert ward.names(BRAVO, tool) == ["t"]


def test_a_worker_that_a_client_names_is_asked_unless_its_vendor_said_when() -> None:
    ward = Ward()
    for _ in range(3):
        ward.call(ATLAS, DEAD)
    ward.call(ATLAS, DEAD)
    report = ward.rests.report(ATLAS)
    assert report is not None
    assert report["failures"] == 3  # what is asked during the rest does not prolong it
    ward.call(BRAVO, limited(retry_after_s=20.0))
    ward.clock.s += 5.0
    with pytest.raises(UpstreamRateLimited) as told:
        ward.rests.leave(BRAVO, nobody_else)
    assert (told.value.headers["retry-after"], told.value.retryable, told.value.should_retry) == ("15", False, True)


def test_calls_without_an_answer_keep_others_from_joining_them() -> None:
    ward = Ward()
    for _ in range(UNPROVEN_MAX):
        assert ward.names(ATLAS, BRAVO) == []
        ward.rests.leave(ATLAS, somebody_else)
    assert ward.names(ATLAS, BRAVO) == ["a"]  # it never answered


def test_a_worker_that_answers_is_suspected_only_after_an_odd_silence() -> None:
    ward = Ward()
    ward.call(ATLAS, takes_s=2.0)
    flights = [ward.rests.leave(ATLAS, somebody_else) for _ in range(UNANSWERED_MAX)]
    ward.clock.s += 7.9
    assert ward.names(ATLAS, BRAVO) == []  # four times the usual two seconds are not over
    ward.clock.s += 0.1
    assert ward.names(ATLAS, BRAVO) == ["a"]
    ward.rests.heard(flights[-1])
    assert ward.names(ATLAS, BRAVO) == []


def test_silence_to_one_call_while_others_are_answered_is_no_rest() -> None:
    ward = Ward()
    waits = ward.rests.leave(ATLAS, nobody_else)
    ward.clock.s += 30.0
    ward.call(ATLAS)
    ward.clock.s += 30.0
    ward.rests.ended(waits, UpstreamTimeout("too late"))
    assert not ward.rests.holds(ATLAS)


def test_another_place_under_the_same_name_does_not_rest() -> None:
    ward = Ward()
    ward.call(ATLAS, limited())
    moved = model_worker("a", "atlas", url="http://127.0.0.1:2/v1")
    assert (ward.rests.holds(ATLAS), ward.rests.holds(moved)) == (True, False)


async def test_two_processes_share_rests_and_their_ends() -> None:
    clock, store = MovedClock(), FakeRestStore()
    one, two = Ward(clock, store), Ward(clock, store)
    one.call(ATLAS, limited(retry_after_s=30.0))
    await one.rests.exchange()
    await two.rests.exchange()
    assert two.names(ATLAS, BRAVO) == ["a"]
    assert two.metrics.shown == {"a": "rate_limited", "b": ""}
    assert two.metrics.began == []  # it began in the other one
    clock.s += 30.0
    trying = two.rests.leave(ATLAS, somebody_else)
    await two.rests.exchange()
    await one.rests.exchange()
    assert one.names(ATLAS, BRAVO) == ["a"]  # the other process tries
    two.rests.ended(trying)
    await two.rests.exchange()
    await one.rests.exchange()
    assert one.rests.report(ATLAS) is None


async def test_what_could_not_be_stored_is_stored_later() -> None:
    store = FakeRestStore(away=True)
    ward = Ward(store=store)
    ward.call(ATLAS, limited())
    with pytest.raises(BatonError):
        await ward.rests.exchange()
    assert ward.names(ATLAS, BRAVO) == ["a"]
    store.away = False
    await ward.rests.exchange()
    assert [health.fault for health in store.stored.values()] == ["rate_limited"]


# ---------------------------------------------------------------- requests


def kit_of(workers: Any, pools: PoolFile | None = None, *, clock: MovedClock | None = None, **more: Any) -> Kit:
    rests = Breakers(clock or MovedClock(), RULES)
    return Kit(workers=workers, rests=rests, pools=pools, sticky_s=0.0, **more)


def asked(kit: Kit) -> Counter[str]:
    return Counter(call.worker.name for call in kit.workers.calls)


def pool_of(*workers: WorkerSpec) -> PoolFile:
    return PoolFile(workers=workers, pools={"default": tuple(spec.name for spec in workers)})


CHEAP = model_worker("cheap", "atlas", price={"input_usd_per_mtok": "0.1", "output_usd_per_mtok": "0.2"})
TWO = pool_of(CHEAP, model_worker("dear", "bravo"))


@pytest.mark.parametrize("error", [DEAD, REFUSED, UNPAID, MISSING, UpstreamProtocol("cut"), UpstreamTimeout("late")])
async def test_a_dead_worker_is_asked_a_handful_of_times_in_many_requests(error: Exception) -> None:
    clock = MovedClock()
    kit = kit_of({"cheap": error, "dear": Says("fine")}, TWO, clock=clock)
    for _ in range(100):
        running = await kit.serve(ask(model="baton/rule"))
        assert await kit.text(running) == "fine"
        clock.s += 0.6
    assert 1 <= asked(kit)["cheap"] <= 6
    assert await kit.open_nano() == 0


async def test_it_is_served_again_after_its_rest() -> None:
    clock = MovedClock()
    kit = kit_of({"cheap": [DEAD, DEAD, DEAD, Says("back")], "dear": Says("fine")}, TWO, clock=clock, attempts_max=1)
    kit.completer._looks.learn_failures = lambda loop: None  # type: ignore[method-assign]
    replies = []
    for _ in range(6):
        replies.append(await kit.text(await kit.serve(ask(model="baton/rule"))))
        clock.s += 3.0
    assert replies == ["fine"] * 5 + ["fine"]
    clock.s += 10.0
    assert await kit.text(await kit.serve(ask(model="baton/rule"))) == "back"


async def test_the_log_says_who_rested_and_the_conductor_is_not_offered_it() -> None:
    kit = kit_of({"alpha": UNPAID}, script=(plan(("atlas", None, [])), plan(("birch", None, []))))
    first = await kit.serve()
    assert first.record.fallback == "worker_failed"
    second = await kit.serve()
    assert second.record.caps["resting"] == {"alpha": "unpaid"}
    assert "quarantined" not in second.record.caps
    assert "atlas" not in (second.record.rounds[0].allowed or {})["handles"]
    assert asked(kit)["alpha"] == 1


async def test_a_plan_that_was_made_before_its_worker_rested_goes_on_with_another() -> None:
    kit = kit_of({"alpha": Says("never")})
    rests = kit.completer._rounds.rests

    async def decode(call: Any) -> Any:
        for _ in range(3):
            flight = rests.leave(pool_file().worker("alpha"), nobody_else)
            rests.ended(flight, DEAD)
        async for item in decoded(call):
            yield item

    decoded, kit.conductor.decode = kit.conductor.decode, decode  # type: ignore[method-assign]
    running = await kit.serve()
    assert running.record.fallback == "worker_rests"
    assert running.error is None
    assert asked(kit)["alpha"] == 0
    assert await kit.open_nano() == 0


async def test_the_client_of_a_named_worker_is_told_when_to_come_back() -> None:
    kit = kit_of({"cheap": limited(retry_after_s=3_000.0)}, TWO)
    for _ in range(3):
        running = await kit.serve(ask(model="cheap"))
        assert isinstance(running.error, UpstreamRateLimited)
        assert running.error.headers["retry-after"] == "3000"
    assert asked(kit) == {"cheap": 1}


async def test_where_all_are_over_their_limits_the_client_is_told_the_shortest_wait() -> None:
    kit = kit_of({"cheap": limited(retry_after_s=500.0), "dear": limited(retry_after_s=200.0)}, TWO)
    errors = [(await kit.serve(ask(model="baton/rule"))).error for _ in range(5)]
    assert [type(error) for error in errors] == [UpstreamRateLimited] * 5
    assert {error.headers["retry-after"] for error in errors[1:] if error is not None} == {"200"}
    assert asked(kit) == {"cheap": 1, "dear": 1}


async def test_where_all_rest_for_other_reasons_somebody_is_asked_all_the_same() -> None:
    kit = kit_of({"cheap": [UNPAID, Says("paid")], "dear": UNPAID}, TWO)
    assert isinstance((await kit.serve(ask(model="baton/rule"))).error, UpstreamError)
    assert (await kit.serve(ask(model="baton/rule"))).error is None


async def test_a_request_whose_own_time_was_short_benches_nobody() -> None:
    def late(call: Any) -> Exception:
        error = UpstreamTimeout("too late")
        error.hasty = True
        return error

    kit = kit_of({"cheap": late, "dear": Says("fine")}, TWO)
    for _ in range(5):
        record = (await kit.serve(ask(model="baton/rule"))).record
        assert {one.error for one in record.steps[0].attempts} == {"deadline_exceeded"}
        assert record.failures == []
    assert kit.completer._rounds.rests.report(CHEAP) is None


async def test_a_worker_that_answers_as_another_model_fails_over_where_the_pool_file_says_so() -> None:
    def reply_as(name: str) -> Any:
        return lambda call: Says("hm", model=name)

    strict = pool_of(CHEAP.model_copy(update={"exact_model": True}), model_worker("dear", "bravo"))
    for stream in (False, True):
        kit = kit_of({"cheap": reply_as("smaller"), "dear": Says("fine")}, strict)
        running = await kit.serve(ask(model="baton/rule", stream=stream))
        assert running.record.steps[0].error == "upstream_protocol"
        assert [step.worker for step in running.record.steps] == ["cheap", "dear"]
        assert running.record.steps[0].cost_nano > 0  # it was a reply
        kit = kit_of({"cheap": reply_as("cheap-2026-01-01")}, strict)
        assert (await kit.serve(ask(model="baton/rule", stream=stream))).error is None
        kit = kit_of({"cheap": reply_as("smaller")}, TWO)
        assert (await kit.serve(ask(model="baton/rule", stream=stream))).error is None


# ---------------------------------------------------------------- what operators see


async def test_the_page_of_workers_the_command_and_the_metrics_say_who_rests() -> None:
    file, clock = pool_file(), MovedClock()
    alpha, registry = file.worker("alpha"), CollectorRegistry()
    rests = Breakers(clock, RULES, FakeRestStore(), WorkerSeries(registry), lambda: file.workers)
    rests.ended(rests.leave(alpha, nobody_else), limited(retry_after_s=60.0))
    pools = SimpleNamespace(now=SimpleNamespace(loaded=SimpleNamespace(pools=file)))
    parts: Any = (FakeReports(FakeStore()), pools, Anybody(), clock, NoChecks(), rests)
    request = Request({"type": "http", "method": "GET", "path": "/admin/workers", "query_string": b"", "headers": []})
    shown = json.loads(bytes((await FiguresApi(*parts).workers(request)).body))
    assert {row["name"]: row["rest"] and row["rest"]["reason"] for row in shown["data"]} == {
        **dict.fromkeys(("beta", "gamma", "vote", "self")),
        "alpha": "rate_limited",
    }
    (line,) = [row for row in map(command._row, shown["data"]) if row["rest"]]
    assert (line["name"], line["why"]) == ("alpha", "it is over its rate limit (429)")
    assert line["rest"] == f"until {shown['data'][0]['rest']['until']}"
    await rests.exchange()
    assert registry.get_sample_value("baton_worker_resting", {"worker": "alpha", "reason": "rate_limited"}) == 1
    assert registry.get_sample_value("baton_worker_resting", {"worker": "beta", "reason": "none"}) == 0
    assert registry.get_sample_value("baton_worker_rests_total", {"worker": "alpha", "reason": "rate_limited"}) == 1
    clock.s += 60.0
    await rests.exchange()
    assert registry.get_sample_value("baton_worker_resting", {"worker": "alpha", "reason": "none"}) == 0
    assert command._row(json.loads(json.dumps({**shown["data"][0], "rest": rests.report(alpha)})))["rest"] == (
        "to be tried"
    )


class Anybody:
    """`Operators` that lets everybody in."""

    async def act(self, request: Request) -> None:
        """Every request is an operator's."""


class NoChecks:
    """A `CheckerWatch` that knows nothing."""

    async def recent(self) -> CheckerFigures:
        """No figures."""
        return CheckerFigures((), None)
