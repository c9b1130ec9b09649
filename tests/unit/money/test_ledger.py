"""The ledger's promises: all scopes or none, never over a limit, settled once, nothing under-counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.core.money.amounts import NANO_MAX
from gateway.core.money.ledger import SCOPE_CHARS_MAX, SCOPES_MAX, SETTLED_KEPT_S, Balance, Scope, SettledState
from gateway.errors import BudgetExceeded, Conflict, NotFound
from tests.models.ledger import Ledger

ORG, KEY = Scope("org:o", 100), Scope("key:k", 50)


def held(ledger: Ledger) -> list[int]:
    return [ledger.balance(name).held_nano for name in ("org:o", "key:k")]


def test_a_hold_reserves_in_every_scope() -> None:
    ledger = Ledger()
    assert ledger.hold("a", 30, 30, [ORG, KEY], 0) == 30
    assert held(ledger) == [30, 30]


def test_a_hold_shrinks_to_the_smallest_headroom_but_not_below_its_least() -> None:
    ledger = Ledger({"key:k": 20})
    assert ledger.hold("a", 40, 10, [ORG, KEY], 0) == 30
    with pytest.raises(BudgetExceeded) as caught:
        ledger.hold("b", 40, 1, [ORG, KEY], 0)
    assert caught.value.scope == "key:k"
    assert held(ledger) == [30, 30]


def test_the_refusal_names_the_first_scope_what_is_left_and_the_way_on() -> None:
    ledger = Ledger({"org:o": 100, "key:k": 50})
    with pytest.raises(BudgetExceeded, match=r"`org:o` has \$0 left of \$0.0000001 .* \$0.000000001: .*organisation"):
        ledger.hold("a", 1, 1, [ORG, KEY], 0)
    with pytest.raises(BudgetExceeded, match="an operator can raise it"):
        ledger.hold("a", 1, 1, [Scope("team:t", 0)], 0)


def test_the_same_id_again_returns_the_first_grant_and_holds_nothing_more() -> None:
    ledger = Ledger()
    assert ledger.hold("a", 30, 30, [ORG, KEY], 0) == ledger.hold("a", 45, 45, [ORG], 9) == 30
    assert held(ledger) == [30, 30]
    ledger.settle("a", "voided")
    with pytest.raises(Conflict):
        ledger.hold("a", 30, 30, [ORG, KEY], 0)


@pytest.mark.parametrize(("state", "charged"), [("posted", 7), ("voided", 0), ("uncertain", 30)])
def test_settling_frees_the_hold_and_happens_once(state: SettledState, charged: int) -> None:
    ledger = Ledger()
    ledger.hold("a", 30, 30, [ORG, KEY], 0)
    assert ledger.holds["a"].over_nano == 0
    assert ledger.settle("a", state, 7) == charged
    again: list[SettledState] = ["posted", "voided", "uncertain"]
    assert [ledger.settle("a", other, 9) for other in again] == [charged] * 3
    assert ledger.balance("org:o") == ledger.balance("key:k") == Balance(charged, 0)
    assert ledger.holds["a"].over_nano == 0  # none of them is above the grant


def test_a_bill_above_the_grant_is_counted_and_marked() -> None:
    ledger = Ledger()
    ledger.hold("a", 50, 50, [KEY], 0)
    assert ledger.settle("a", "posted", 60) == 60
    assert (ledger.balance("key:k"), ledger.holds["a"].over_nano) == (Balance(60, 0), 10)
    with pytest.raises(BudgetExceeded, match=r"has \$0 left"):
        ledger.hold("b", 0, 0, [KEY], 0)


def test_a_scope_without_limit_is_counted_up_to_what_lua_can_count() -> None:
    free = Scope("user:u", None)
    ledger = Ledger({"user:u": NANO_MAX - 5})
    assert ledger.hold("a", 100, 1, [free], 0) == 5
    ledger.settle("a", "posted", 100)
    assert ledger.balance("user:u").posted_nano == NANO_MAX
    with pytest.raises(BudgetExceeded):
        ledger.hold("b", 1, 1, [free], 0)


def test_leases_expire_in_order_and_can_be_renewed() -> None:
    ledger = Ledger()
    for hold_id, until in (("b", 20), ("a", 10), ("c", 40)):
        ledger.hold(hold_id, 1, 1, [ORG], until)
    assert ledger.expired(30, 10) == ["a", "b"]
    assert ledger.expired(30, 1) == ["a"]
    assert ledger.renew("a", 50)
    assert ledger.expired(30, 10) == ["b"]
    ledger.settle("b", "voided")
    assert ledger.expired(30, 10) == []
    assert not ledger.renew("b", 99)
    assert not ledger.renew("never", 99)


def test_an_unknown_hold_cannot_be_settled() -> None:
    with pytest.raises(NotFound):
        Ledger().settle("never", "posted", 1)


def test_a_restored_hold_ignores_headroom_never_shrinks_and_settles() -> None:
    ledger = Ledger({"key:k": 45})
    for granted in (20, 30, 10):
        ledger.restore("a", granted, ["key:k"], 0)
    assert ledger.balance("key:k") == Balance(45, 30)
    assert ledger.settle("a", "posted", 30) == 30


@pytest.mark.parametrize("amount", [-1, NANO_MAX + 1, 1.5, True, "1", None])
def test_amounts_are_bounded_integers(amount: int) -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="not an amount"):
        ledger.hold("a", amount, 0, [ORG], 0)
    with pytest.raises(ValueError, match="not an amount"):
        ledger.settle("a", "posted", amount)
    if amount != -1:  # a total may be below zero, by credits
        with pytest.raises(ValueError, match="not an amount"):
            Ledger({"key:k": amount})
    if amount is not None:
        with pytest.raises(ValueError, match="not an amount"):
            ledger.hold("a", 1, 0, [Scope("key:k", amount)], 0)


@pytest.mark.parametrize(
    "scopes",
    [[], [ORG, ORG], [Scope("", 1)], [Scope("x" * (SCOPE_CHARS_MAX + 1), 1)], [Scope(str(n), 1) for n in range(17)]],
)
def test_scopes_are_few_named_and_different(scopes: list[Scope]) -> None:
    with pytest.raises(ValueError, match="scope"):
        Ledger().hold("a", 1, 1, scopes, 0)


def test_at_least_is_never_more_than_at_most() -> None:
    with pytest.raises(ValueError, match="larger than its most"):
        Ledger().hold("a", 1, 2, [ORG], 0)


@given(st.lists(st.integers(0, 40), max_size=30))
def test_no_more_is_granted_than_the_limit_affords(amounts: list[int]) -> None:
    ledger, granted = Ledger(), 0
    for n, amount in enumerate(amounts):
        try:
            granted += ledger.hold(str(n), amount, amount, [ORG], 0)
        except BudgetExceeded:
            assert granted + amount > 100
    assert granted <= 100


class Conservation(RuleBasedStateMachine):
    """After any history: held is the sum of open grants, posted the sum of charges, and no limit is passed."""

    LIMITS = (Scope("org:o", 500), Scope("key:a", 200), Scope("key:b", 300))

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    @rule(n=st.integers(0, 20), key=st.sampled_from([1, 2]), most=st.integers(0, 120), least=st.integers(0, 120))
    def hold(self, n: int, key: int, most: int, least: int) -> None:
        try:
            self.ledger.hold(str(n), max(most, least), least, [self.LIMITS[0], self.LIMITS[key]], 0)
        except (BudgetExceeded, Conflict):
            return

    @rule(n=st.integers(0, 20), state=st.sampled_from(["posted", "voided", "uncertain"]), share=st.integers(0, 100))
    def settle(self, n: int, state: SettledState, share: int) -> None:
        entry = self.ledger.holds.get(str(n))
        if entry is not None:
            self.ledger.settle(str(n), state, entry.granted_nano * share // 100)

    @invariant()
    def books_balance(self) -> None:
        for scope in self.LIMITS:
            mine = [entry for entry in self.ledger.holds.values() if scope.name in entry.scopes]
            balance = self.ledger.balance(scope.name)
            assert balance.held_nano == sum(e.granted_nano for e in mine if e.state == "open")
            assert balance.posted_nano == sum(e.charged_nano for e in mine)
            assert balance.posted_nano + balance.held_nano <= (scope.limit_nano or 0)


TestConservation = Conservation.TestCase


def test_a_lease_is_over_at_its_very_end_and_a_scope_may_have_a_name_of_one_letter() -> None:
    ledger = Ledger()
    ledger.hold("a", 1, 1, [Scope("o", 1)], 10)
    assert (ledger.expired(9, 5), ledger.expired(10, 5)) == ([], ["a"])


def test_the_bounds_themselves_are_taken() -> None:
    ledger = Ledger()
    scopes = [Scope(f"{n:x<{SCOPE_CHARS_MAX}}", None) for n in range(SCOPES_MAX)]
    assert ledger.hold("a", 5, 5, scopes, 0) == 5
    assert set(ledger.held.values()) == {5}
    assert (SCOPES_MAX, SCOPE_CHARS_MAX, SETTLED_KEPT_S) == (16, 1024, 24 * 60 * 60)


def test_a_hold_that_is_put_back_is_held_in_full_where_nothing_was() -> None:
    ledger = Ledger()
    ledger.restore("a", 30, ["key:k"], 0)
    assert ledger.balance("key:k") == Balance(0, 30)


def test_a_charge_that_was_never_held_here_has_no_grant() -> None:
    ledger = Ledger()
    ledger.count("a", 7, ["key:k"])
    assert (ledger.holds["a"].granted_nano, ledger.holds["a"].over_nano) == (0, 7)
    assert ledger.balance("key:k") == Balance(7, 0)
