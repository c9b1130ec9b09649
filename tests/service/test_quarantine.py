"""Quarantine in the path of a request: who is planned with, who never is kept out, and what probes release."""

from __future__ import annotations

import random
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.adapters.journal.series import WorkerSeries
from gateway.core.access.audit import Act
from gateway.core.loop.caps import Caps
from gateway.core.money.amounts import Usage, cost_nano
from gateway.core.money.ledger import windows
from gateway.core.pool.drift import Drift, DriftRules
from gateway.core.pool.workers import PoolFile, Price
from gateway.errors import BadRequest, CapReached, Conflict, NotFound, UpstreamError
from gateway.service.policies.drift import WorkerWatch
from gateway.service.policies.probes import SCOPE, ProbeLimits, Probes
from gateway.service.policies.quarantine import QuarantineRules, Quarantines
from gateway.service.ports.drift import KnownQuestion
from tests.fakes.drift import FakeDrift
from tests.fakes.tokens import WordCounter
from tests.fakes.workers import Says
from tests.kit import KEY, PRICE, Kit, TestClock, ask, model_worker, plan
from tests.records import a_rollout, a_step
from tests.service.test_drift import Outcomes

FLAG = Drift("alpha", "1", "", "outcome", 0.1, 0.5, 80)
TO_ALPHA = plan(("atlas", None, []))
ANN = Act("local:ann", "it invents sources")
RULES = QuarantineRules(frozenset({"outcome", "failed", "refused"}))


class Ward:
    """A gateway over fakes whose quarantines are real."""

    def __init__(self, workers: Any = None, *, rules: QuarantineRules = RULES, day_nano: int = 0, **more: Any) -> None:
        self.kit = Kit((TO_ALPHA,), workers, held=lambda workers: self.quarantines.of(workers), **more)
        self.store, self.metrics, clock = FakeDrift(), PrometheusMetrics(), TestClock()
        series, catalog = WorkerSeries(self.metrics.registry), self.kit.catalog
        self.watch = WorkerWatch(Outcomes(), catalog.worker_names, clock, series, DriftRules(100, 5_000))
        self.quarantines = Quarantines(self.store, self.watch, catalog.workers, clock, series, rules)
        limits = ProbeLimits(day_nano, pace_s=0.0, rest_s=0.0)
        self.probes = Probes(
            self.quarantines, self.kit.workers, self.kit.budgets, self.kit.journal, clock, series, limits
        )

    async def flag(self, flag: Drift = FLAG) -> None:
        self.watch.fresh.append((flag, TestClock().now()))
        await self.quarantines.act()

    def shown(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    async def served(self, body: dict[str, Any] | None = None, **asked: Any) -> list[str]:
        running = await self.kit.serve(body, **asked)
        await running.result()
        return [step.worker for step in running.record.steps]


async def test_a_flagged_worker_is_planned_with_no_more() -> None:
    ward = Ward()
    assert await ward.served() == ["alpha"]
    await ward.flag()
    running = await ward.kit.serve()
    assert [step.worker for step in running.record.steps] == ["gamma"]  # the rule's, after the plan was refused
    assert running.record.caps["quarantined"] == ["alpha"]
    assert [one["name"] for one in running.record.pool if one["name"] == "alpha"] == []
    assert "alpha" not in await ward.served(ask(model="baton/rule"))
    assert ward.shown("baton_worker_quarantined", worker="alpha") == 1.0
    assert ward.shown("baton_worker_quarantined", worker="beta") == 0.0
    assert ward.store.audit == [("rule:drift", "worker.quarantined", "worker:alpha")]
    (why,) = [one.why for one in ward.quarantines.standing()]
    assert why.startswith("worker alpha (version 1) has drifted on requests without a type: outcome was at most 0.10")


async def test_a_worker_that_the_client_names_is_asked() -> None:
    ward = Ward()
    await ward.flag()
    assert await ward.served(ask(model="baton/fixed:alpha")) == ["alpha"]
    assert await ward.served(ask(model="alpha")) == ["alpha"]
    assert "alpha" in await ward.served(ask(model="baton/checked:alpha>beta@gamma"))


async def test_the_last_worker_is_never_kept_out() -> None:
    ward = Ward()
    for name in ("alpha", "beta", "gamma"):
        await ward.flag(replace(FLAG, worker=name))
    assert await ward.served() == ["alpha"]
    only_alpha = replace(KEY, workers=("alpha", "vote"))
    await ward.quarantines.release("beta", ANN)
    assert await ward.served() == ["beta"]
    assert await ward.served(who=only_alpha) == ["alpha"]


def pool_of_two(**beta: Any) -> PoolFile:
    workers = (model_worker("alpha", "atlas"), model_worker("beta", "birch", **beta))
    return PoolFile(workers=workers, pools={"default": ("alpha", "beta")})


@pytest.mark.parametrize(
    ("beta", "body", "caps"),
    [
        ({"cannot": ("image",)}, {}, None),
        ({"context_tokens": 200}, {}, None),
        ({"price": Price(input_usd_per_mtok=Decimal(900), output_usd_per_mtok=Decimal(900))}, {}, 20_000_000),
    ],
)
async def test_one_that_alone_can_serve_is_not_kept_out(beta: dict[str, Any], body: Any, caps: int | None) -> None:
    """An image that the other does not take, a prompt that its context does not hold, a cap that its price breaks."""
    limits = Caps(wall_s=60.0) if caps is None else Caps(wall_s=60.0, cost_nano=caps)
    ward = Ward(pools=pool_of_two(**beta), caps=limits, tokens=WordCounter())
    content: Any = "What is 6 times 7? " * 40
    if "cannot" in beta:
        content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]
    asked = {"model": "baton/rule", "messages": [{"role": "user", "content": content}]}
    await ward.flag()
    assert await ward.served(asked) == ["alpha"]
    assert await ward.served(ask(model="baton/rule", text="short")) == (["alpha"] if caps else ["beta"])


async def test_it_is_asked_when_every_other_one_failed() -> None:
    down = UpstreamError("down", dispatched=False)
    ward = Ward({"beta": down, "gamma": down})
    await ward.flag()
    running = await ward.kit.serve()
    assert (await running.result())["choices"][0]["message"]["content"] == "ok"
    assert [step.worker for step in running.record.steps][-1] == "alpha"
    assert await ward.kit.open_nano() == 0


async def test_a_conversation_does_not_go_back_to_it() -> None:
    ward = Ward()
    first = await ward.kit.serve()
    await ward.flag()
    message = (await first.result())["choices"][0]["message"]
    more = [*first.chat.messages, message, {"role": "user", "content": "And 7 times 8?"}]
    assert await ward.served({"model": "baton", "messages": more}) == ["gamma"]


async def test_other_signals_and_off_keep_nobody_out() -> None:
    ward = Ward()
    await ward.flag(replace(FLAG, signal="slow"))
    assert [fact["what"] for fact in await ward.store.facts(10)] == ["flagged"]
    assert await ward.served() == ["alpha"]
    off = Ward(rules=QuarantineRules())
    await off.flag()
    assert await off.served() == ["alpha"]
    await off.quarantines.put("alpha", ANN)  # by hand it works all the same
    assert await off.served() == ["gamma"]


async def test_a_new_version_of_the_worker_is_not_in_quarantine() -> None:
    ward = Ward()
    await ward.flag()
    newer = [spec.model_copy(update={"version": "2"}) for spec in ward.kit.catalog.workers()]
    ward.kit.catalog.adopt(PoolFile(workers=tuple(newer), pools={"default": tuple(spec.name for spec in newer)}))
    assert await ward.served() == ["alpha"]
    assert ward.quarantines.standing() == []


async def test_operators_put_and_release_with_their_reasons() -> None:
    ward = Ward()
    shown = await ward.quarantines.put("beta", ANN)
    assert (shown["worker"], shown["by"], shown["why"], shown["flags"]) == ("beta", "local:ann", ANN.why, [])
    assert (await ward.quarantines.report(10))["quarantines"] == [shown]
    assert (await ward.quarantines.release("beta", ANN))["ended_by"] == "local:ann"
    with pytest.raises(Conflict, match="not in quarantine"):
        await ward.quarantines.release("beta", ANN)
    with pytest.raises(NotFound, match="No worker `nobody`"):
        await ward.quarantines.put("nobody", ANN)
    with pytest.raises(BadRequest, match="no model"):
        await ward.quarantines.put("vote", ANN)


async def test_while_the_store_is_away_the_last_state_stands_and_no_flag_is_lost() -> None:
    ward = Ward()
    await ward.flag()
    ward.store.away = True
    ward.watch.fresh.append((replace(FLAG, worker="beta"), TestClock().now()))
    for step in (ward.quarantines.read, ward.quarantines.act):
        with pytest.raises(Exception, match="not available"):
            await step()
    assert await ward.served() == ["gamma"]
    ward.store.away = False
    await ward.quarantines.act()
    assert {one.worker for one in ward.quarantines.standing()} == {"alpha", "beta"}


async def test_who_a_worker_says_it_is_becomes_a_fact_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    ward = Ward()

    async def reply_naming(**reply: str) -> None:
        step = a_step(0, "alpha")
        step.attempts[0].named = reply or None
        ward.watch.finished(a_rollout(steps=[step]), [])
        await ward.quarantines.meet()

    await reply_naming()
    assert (await ward.quarantines.report(10))["facts"] == []
    await reply_naming(model="alpha-2026-11", system_fingerprint="fp_44")
    await reply_naming(model="alpha-2026-11", system_fingerprint="fp_44")
    (fact,) = (await ward.quarantines.report(10))["facts"]
    assert (fact["what"], fact["data"]) == ("identity", {"model": "alpha-2026-11", "fingerprint": "fp_44"})
    assert ward.shown("baton_worker_identity_changes_total", worker="alpha") == 1.0
    assert "worker alpha now names alpha-2026-11, fingerprint fp_44" in caplog.text


# ---------------------------------------------------------------- probes

DAY_NANO = 10_000_000
QUESTION = KnownQuestion([{"role": "user", "content": "6 times 7?"}], {"temperature": 0, "user": "u"}, {}, "Answer: 42")
COST_NANO = cost_nano(PRICE, Usage(10, 5))


def ward_of(reply: Any, day_nano: int = DAY_NANO, **more: Any) -> Ward:
    ward = Ward({"alpha": reply}, day_nano=day_nano, **more)
    ward.store.known.append(QUESTION)
    return ward


async def probe(ward: Ward, times: int) -> int:
    """Probe until it is released or asked so often; return how often it was asked."""
    await ward.kit.budgets.load({}) if ward.kit.budgets.epoch_lost else None
    for asked in range(times):
        standing = ward.quarantines.standing()
        if not standing or not await ward.probes.probe(standing[0]):
            return asked
    return times


async def spent(ward: Ward) -> list[tuple[int, int]]:
    balances = [await ward.kit.budgets.balance(name) for name in windows(SCOPE, TestClock().now())]
    return [(balance.posted_nano, balance.held_nano) for balance in balances]


async def test_a_worker_that_recovered_is_released_by_its_probes() -> None:
    rng = random.Random(7)
    ward = ward_of(lambda _: Says(f"It is easy.\nAnswer: {42 if rng.random() < 0.95 else 41}"))
    await ward.flag()
    asked = await probe(ward, 400)
    assert 10 < asked < 100
    assert ward.quarantines.standing() == []
    assert await ward.served() == ["alpha"]
    assert await spent(ward) == [(asked * COST_NANO, 0)] * 3
    (actor, act, _) = ward.store.audit[-1]
    assert (actor, act) == ("rule:probes", "worker.released")
    good = ward.shown("baton_worker_probes_total", worker="alpha", result="good") or 0
    assert good >= 0.8 * asked
    assert ward.shown("baton_worker_probe_usd_total", worker="alpha") == pytest.approx(asked * COST_NANO / 1e9)
    sent = ward.kit.workers.calls[0].body
    assert sent == {"messages": QUESTION.messages, "temperature": 0, "max_tokens": 64}


async def test_one_that_is_still_worse_stays_until_the_day_is_spent() -> None:
    ward = ward_of(Says("Answer: 41"), day_nano=100 * COST_NANO)
    await ward.flag()
    asked = await probe(ward, 400)
    assert 5 <= asked <= 100
    (life, _, day) = await spent(ward)
    assert day == life == (asked * COST_NANO, 0)
    assert day[0] <= 100 * COST_NANO
    assert ward.shown("baton_worker_probes_total", worker="alpha", result="unpaid") == 1.0
    assert ward.quarantines.standing() != []
    assert [event.kind for event in ward.kit.journal.events[:3]] == ["hold", "dispatch", "settle"]


async def test_without_a_budget_nothing_is_asked() -> None:
    ward = ward_of(Says("Answer: 42"), day_nano=0)
    await ward.flag()
    await ward.probes.run()  # returns: there is nothing to do
    assert ward.kit.workers.calls == []


@pytest.mark.parametrize(
    ("reply", "result", "nano"),
    [
        (UpstreamError("gone", dispatched=False), "failed", 0),
        (UpstreamError("500", upstream_status=500), "failed", 0),
        (UpstreamError("bad request", upstream_status=400), "unknown", 0),
        (UpstreamError("it hung up"), "failed", None),
        (
            Says("A long essay about numbers, and what people think of them, without saying which one it is."),
            "unknown",
            15,
        ),
    ],
)
async def test_a_probe_that_says_nothing_counts_for_nothing(reply: Any, result: str, nano: int | None) -> None:
    ward = ward_of(reply)
    await ward.flag()
    assert await probe(ward, 1) == 1
    (standing,) = await ward.store.standing(TestClock().now())
    assert [test.probes for test in standing.tests] == [0]
    assert ward.shown("baton_worker_probes_total", worker="alpha", result=result) == 1.0
    worst = next(event.payload["bound_nano"] for event in ward.kit.journal.of_kind("dispatch"))
    charged = {0: 0, None: worst}.get(nano, COST_NANO)
    assert (await spent(ward))[0] == (charged, 0)
    assert standing.nano == charged


async def test_failures_have_tests_of_their_own_and_all_must_pass() -> None:
    ward = ward_of(Says("Answer: 42"))
    await ward.flag()
    await ward.flag(replace(FLAG, signal="failed", usual=0.02, now=0.4))
    asked = await probe(ward, 400)
    assert ward.quarantines.standing() == []
    (ended,) = await ward.store.standing(TestClock().now() - (TestClock().now() - ward.quarantines._watch._since))
    assert {test.signal: test.probes for test in ended.tests} == {"outcome": asked, "failed": asked}


async def test_a_worker_that_an_operator_put_there_is_not_probed() -> None:
    ward = ward_of(Says("Answer: 42"))
    await ward.quarantines.put("alpha", ANN)
    assert await probe(ward, 5) == 0
    assert ward.kit.workers.calls == []


async def test_without_a_question_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    ward = ward_of(Says("Answer: 42"))
    ward.store.known.clear()
    await ward.flag()
    with caplog.at_level("INFO"):
        assert await probe(ward, 5) == 0
    assert "no question with a known answer" in caplog.text


async def test_a_cap_that_nobody_is_cheap_enough_for_is_said_as_before() -> None:
    ward = Ward(caps=Caps(wall_s=60.0, cost_nano=1))
    await ward.flag()
    with pytest.raises(CapReached, match="any answer could cost"):
        await ward.kit.serve()
