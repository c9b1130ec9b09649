"""The Lua script and the pure ledger are driven by the same random histories and must agree at every step."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from redis.asyncio import Redis

from gateway.adapters.redis.budgets import RedisBudgets
from gateway.core.money.amounts import NANO_MAX
from gateway.core.money.ledger import Hold, Scope, SettledState
from gateway.errors import BatonError, MoneyUnavailable
from gateway.service.ports.money import Settlement
from tests.models.ledger import Entry, Ledger
from tests.redis_server import RedisServer
from tests.sizes import report_row, sized

NAMES = ("org:o", "key:a", "key:b", "user:k:ü")
LONG_MS = 10**9
LONG_S = LONG_MS / 1000
EXAMPLES, STEPS = sized(small=30, ci=300, long=2000), 100
PARTS = 3  # that processes can share
agreed: list[int] = []  # runs of each part that held
ids = st.sampled_from([f"h{n}" for n in range(8)])
amounts = st.one_of(st.sampled_from([0, 1, NANO_MAX]), st.integers(0, 100), st.integers(0, NANO_MAX))
limits = st.one_of(st.none(), st.integers(0, 300), st.just(NANO_MAX))
names = st.lists(st.sampled_from(NAMES), min_size=1, unique=True)
scopes = st.lists(st.builds(Scope, st.sampled_from(NAMES), limits), min_size=1, max_size=4, unique_by=lambda s: s.name)


def result(call: Callable[[], Any]) -> Any:
    """What the call returns, or the type and message of its error."""
    try:
        return call()
    except BatonError as error:
        return type(error), error.message


class Agreement(RuleBasedStateMachine):
    """Three gateways on one Redis, and the faults that Redis can have among the rules. Time stands still in the model:
    a lease is either long (never over) or zero (over at once)."""

    url: ClassVar[str]
    runner: ClassVar[asyncio.Runner]

    @initialize(posted=st.dictionaries(st.sampled_from(NAMES), st.integers(-100, 100)))
    def start(self, posted: dict[str, int]) -> None:
        self.prefix = secrets.token_hex(4)
        self.redis: Redis = Redis.from_url(self.url)
        self.gateways = [RedisBudgets(self.url, prefix=self.prefix, deadline_s=5.0, lease_s=LONG_S) for _ in range(3)]
        self.ledger, self.calls = Ledger(posted), 0
        for gateway in self.gateways:
            self.run(gateway.load(posted))

    def run(self, call: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await call

        return self.runner.run(awaited())

    def both(self, expected: Callable[[], Any], call: Coroutine[Any, Any, Any]) -> None:
        """`expected` and `call` give equal results, or the same error with the same message; and then the same
        balances and open leases, looked at after every fourth call."""
        assert self.run(self.called(call)) == result(expected)
        self.calls += 1
        if self.calls % 4 == 0:
            self.same_balances()

    def same_balances(self) -> None:
        held, posted, over = self.run(self.observed())
        assert [held, posted] == [
            [self.ledger.balance(name).held_nano for name in NAMES],
            [self.ledger.balance(name).posted_nano for name in NAMES],
        ]
        assert over == set(self.ledger.expired(0, 100))

    async def called(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        except BatonError as error:
            return type(error), error.message

    async def observed(self) -> tuple[list[int], list[int], set[str]]:
        """In one round trip."""
        async with self.redis.pipeline(transaction=False) as pipe:
            for name in ("held", "posted"):
                pipe.hmget("{" + self.prefix + "}:" + name, *NAMES)
            pipe.zrangebyscore("{" + self.prefix + "}:open", "-inf", int(time.time() * 1000) + 1)
            held, posted, over = await pipe.execute()
        return [int(n or 0) for n in held], [int(n or 0) for n in posted], {i.decode() for i in over}

    @rule(g=st.integers(0, 2), hold_id=ids, a=amounts, b=amounts, where=scopes, over=st.booleans())
    def hold(self, g: int, hold_id: str, a: int, b: int, where: list[Scope], over: bool) -> None:
        most, least, lease_ms = max(a, b), min(a, b), 0 if over else LONG_MS

        async def granted() -> int:
            return (await self.gateways[g].hold(hold_id, most, least, where, lease_ms / 1000)).granted_nano

        self.both(lambda: self.ledger.hold(hold_id, most, least, where, lease_ms), granted())

    @rule(g=st.integers(0, 2), hold_id=ids, total=amounts, more=limits)
    def grow(self, g: int, hold_id: str, total: int, more: int | None) -> None:
        entry = self.ledger.holds.get(hold_id)
        where = [Scope(name, more) for name in (entry.scopes if entry is not None else NAMES[:1])] or [Scope("-", more)]

        async def grown() -> int:
            return (await self.gateways[g].grow(Hold(hold_id, 0, tuple(where)), total)).granted_nano

        self.both(lambda: self.ledger.grow(hold_id, total, where), grown())

    @rule(g=st.integers(0, 2), hold_id=ids, actual=amounts)
    def post(self, g: int, hold_id: str, actual: int) -> None:
        self.both(lambda: self.ledger.settle(hold_id, "posted", actual), self.gateways[g].post(hold_id, actual))

    @rule(g=st.integers(0, 2), hold_id=ids, state=st.sampled_from(["voided", "uncertain"]))
    def settle(self, g: int, hold_id: str, state: SettledState) -> None:
        gateway = self.gateways[g]
        call = gateway.void(hold_id) if state == "voided" else gateway.uncertain(hold_id)
        self.both(lambda: self.ledger.settle(hold_id, state), call)

    @rule(g=st.integers(0, 2), hold_id=ids)
    def renew(self, g: int, hold_id: str) -> None:
        async def renewed() -> bool:
            return bool(await self.gateways[g].renew([hold_id], LONG_S))

        self.both(lambda: self.ledger.renew(hold_id, LONG_MS), renewed())

    @rule(g=st.integers(0, 2), amount=amounts, names=st.lists(st.sampled_from(NAMES), unique=True))
    def credit(self, g: int, amount: int, names: list[str]) -> None:
        gateway = self.gateways[g]
        self.both(lambda: self.ledger.credit(amount, names), gateway.credit(amount, names, gateway.fence()))

    @rule(g=st.integers(0, 2), names=st.lists(st.sampled_from(NAMES), unique=True))
    def forget(self, g: int, names: list[str]) -> None:
        self.both(lambda: self.ledger.forget(names), self.gateways[g].forget(names.__contains__))

    @rule(g=st.integers(0, 2), hold_id=ids, charged=st.integers(0, 100), names=names)
    def count(self, g: int, hold_id: str, charged: int, names: list[str]) -> None:
        charge = Settlement(hold_id, charged, tuple(names))
        self.both(lambda: self.ledger.count(hold_id, charged, names), self.gateways[g].count([charge]))

    @rule(g=st.integers(0, 2), hold_id=ids, charged=amounts)
    def correct(self, g: int, hold_id: str, charged: int) -> None:
        self.both(lambda: int(self.ledger.correct(hold_id, charged)), self.gateways[g].correct({hold_id: charged}))

    @rule(g=st.integers(0, 2))
    def redis_comes_back_empty(self, g: int) -> None:
        """One gateway rebuilds from a ledger that knows everything; the others join."""
        self.run(self.redis.delete(*(self.run(self.redis.keys("{" + self.prefix + "}:*")))))
        entries = self.ledger.holds.items()
        opened = [Hold(i, e.granted_nano, tuple(Scope(n, None) for n in e.scopes)) for i, e in entries if is_open(e)]
        settled = [Settlement(i, e.charged_nano, e.scopes) for i, e in entries if not is_open(e)]
        for gateway in self.gateways:
            with suppress(MoneyUnavailable):
                self.run(gateway.void("a call that finds the epoch gone"))
            assert gateway.epoch_lost
        self.run(self.gateways[g].load(self.ledger.posted, opened, settled))
        for gateway in self.gateways:
            assert self.run(gateway.join())
        for _, entry in entries:
            entry.lease_until_ms = LONG_MS if is_open(entry) else 0
            entry.scopes = entry.scopes if is_open(entry) else ()  # they are in the totals, as the ledger has them
        self.same_balances()

    @rule()
    def the_script_is_flushed(self) -> None:
        self.run(self.redis.script_flush())

    def teardown(self) -> None:
        if hasattr(self, "gateways"):
            self.same_balances()
            self.run(self.redis.delete(*(self.run(self.redis.keys("{" + self.prefix + "}:*")) or ["none"])))
            self.run(self.redis.aclose())
        for gateway in getattr(self, "gateways", []):
            self.run(gateway.close())


def is_open(entry: Entry) -> bool:
    return entry.state == "open"


@pytest.mark.sized
@pytest.mark.parametrize("part", range(PARTS))
def test_lua_agrees_with_the_ledger(redis_server: RedisServer, part: int) -> None:
    Agreement.url = redis_server.url
    with asyncio.Runner() as runner:
        Agreement.runner = runner
        run_state_machine_as_test(
            Agreement,
            settings=settings(
                max_examples=-(-EXAMPLES // PARTS),
                stateful_step_count=STEPS,
                deadline=None,
                phases=(Phase.explicit, Phase.reuse, Phase.generate),
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )
    agreed.append(-(-EXAMPLES // PARTS))
    report_row("B3", runs=sum(agreed), steps_max=STEPS, differences=0)
