"""The Lua script and the pure ledger are driven by the same random histories and must agree at every step."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from gateway.adapters.budgets import RedisBudgets
from gateway.core.ledger import Balance, Ledger, Scope, Settled
from gateway.core.money import NANO_MAX
from gateway.errors import BatonError
from tests.servers import RedisServer

NAMES = ("org:o", "key:a", "key:b", "user:k:ü")
LONG_MS = 10**9
ids = st.sampled_from([f"h{n}" for n in range(8)])
amounts = st.one_of(st.sampled_from([0, 1, NANO_MAX]), st.integers(0, 100), st.integers(0, NANO_MAX))
limits = st.one_of(st.none(), st.integers(0, 300), st.just(NANO_MAX))
scopes = st.lists(st.builds(Scope, st.sampled_from(NAMES), limits), min_size=1, max_size=4, unique_by=lambda s: s.name)


def result(call: Callable[[], Any]) -> Any:
    """What the call returns, or the type and message of its error."""
    try:
        return call()
    except BatonError as error:
        return type(error), error.message


class Agreement(RuleBasedStateMachine):
    """Time stands still in the model: a lease is either long (never over) or zero (over at once)."""

    url: ClassVar[str]
    runner: ClassVar[asyncio.Runner]

    @initialize(posted=st.dictionaries(st.sampled_from(NAMES), st.integers(-100, 100)))
    def start(self, posted: dict[str, int]) -> None:
        prefix = secrets.token_hex(4)
        self.gateways = [RedisBudgets(self.url, prefix=prefix, deadline_s=5.0) for _ in range(2)]
        self.ledger = Ledger(posted)
        for gateway in self.gateways:
            self.run(gateway.load(posted))

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(call)

    def both(self, expected: Callable[[], Any], call: Coroutine[Any, Any, Any]) -> None:
        """`expected` and `call` give equal results, or the same error with the same message."""
        assert result(lambda: self.run(call)) == result(expected)

    @rule(g=st.integers(0, 1), hold_id=ids, a=amounts, b=amounts, where=scopes, over=st.booleans())
    def hold(self, g: int, hold_id: str, a: int, b: int, where: list[Scope], over: bool) -> None:
        most, least, lease_ms = max(a, b), min(a, b), 0 if over else LONG_MS

        async def granted() -> int:
            return (await self.gateways[g].hold(hold_id, most, least, where, lease_ms / 1000)).granted_nano

        self.both(lambda: self.ledger.hold(hold_id, most, least, where, lease_ms), granted())

    @rule(g=st.integers(0, 1), hold_id=ids, actual=amounts)
    def post(self, g: int, hold_id: str, actual: int) -> None:
        self.both(lambda: self.ledger.settle(hold_id, "posted", actual), self.gateways[g].post(hold_id, actual))

    @rule(g=st.integers(0, 1), hold_id=ids, state=st.sampled_from(["voided", "uncertain"]))
    def settle(self, g: int, hold_id: str, state: Settled) -> None:
        gateway = self.gateways[g]
        call = gateway.void(hold_id) if state == "voided" else gateway.uncertain(hold_id)
        self.both(lambda: self.ledger.settle(hold_id, state), call)

    @rule(g=st.integers(0, 1), hold_id=ids, over=st.booleans())
    def renew(self, g: int, hold_id: str, over: bool) -> None:
        lease_ms = 0 if over else LONG_MS
        self.both(lambda: self.ledger.renew(hold_id, lease_ms), self.gateways[g].renew(hold_id, lease_ms / 1000))

    @rule(g=st.integers(0, 1), amount=amounts, names=st.lists(st.sampled_from(NAMES), unique=True))
    def credit(self, g: int, amount: int, names: list[str]) -> None:
        gateway = self.gateways[g]
        self.both(lambda: self.ledger.credit(amount, names), gateway.credit(amount, names, gateway.fence()))

    @rule(g=st.integers(0, 1), names=st.lists(st.sampled_from(NAMES), unique=True))
    def forget(self, g: int, names: list[str]) -> None:
        self.both(lambda: self.ledger.forget(names), self.gateways[g].forget(names.__contains__))

    @invariant()
    def they_agree(self) -> None:
        found = self.run(self.everything())
        assert found[0] == {name: self.ledger.balance(name) for name in NAMES}
        assert found[1] == set(self.ledger.expired(0, 100))

    async def everything(self) -> tuple[dict[str, Balance], set[str]]:
        gateway = self.gateways[0]
        balances = {name: await gateway.balance(name) for name in NAMES}
        return balances, set(await gateway.expired(100))

    def teardown(self) -> None:
        for gateway in getattr(self, "gateways", []):
            self.run(gateway.close())


def test_lua_agrees_with_the_ledger(redis_server: RedisServer) -> None:
    Agreement.url = redis_server.url
    with asyncio.Runner() as runner:
        Agreement.runner = runner
        run_state_machine_as_test(
            Agreement,
            settings=settings(
                max_examples=100,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )
