"""Logins over the fake store: what a login needs of its browser, and what is left where the store goes away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gateway.adapters.host.clock import SystemClock
from gateway.core.access.login import RoleRules
from gateway.errors import Forbidden, Unavailable
from gateway.service.admin.logins import Logins
from tests.fakes.logins import FakeLogins

ROLES = RoleRules("groups", {"operator": ["ops"]})


class Provider:
    """An identity provider that knows one person."""

    def __init__(self, groups: list[str]) -> None:
        self.groups = groups
        self.states: list[str] = []

    async def begin(self, state: str, nonce: str, verifier: str) -> str:
        self.states.append(state)
        return f"https://idp.example/?state={state}"

    async def finish(self, code: str, nonce: str, verifier: str) -> Mapping[str, Any]:
        return {"sub": "ann", "email": "ann@example.org", "groups": self.groups}

    async def end_url(self) -> str | None:
        return None


def parts(groups: list[str]) -> tuple[Logins, FakeLogins, Provider]:
    store, provider = FakeLogins(), Provider(groups)
    return Logins(provider, store, SystemClock(), ROLES, session_s=600), store, provider


async def test_a_login_makes_one_session_that_ends_with_it() -> None:
    logins, store, provider = parts(["ops"])
    _, browser = await logins.begin()
    token = await logins.finish(provider.states[0], "code", browser)
    act = await logins.act(token)
    assert act is not None
    assert (act.actor, act.role) == ("oidc:ann", "operator")
    await logins.end(token)
    assert await logins.act(token) is None
    assert store.acts == [("oidc:ann", "console.login"), ("oidc:ann", "console.logout")]


@pytest.mark.parametrize("case", ["browser", "role"])
async def test_a_refused_login_is_over_and_leaves_no_session(case: str) -> None:
    logins, store, provider = parts([] if case == "role" else ["ops"])
    _, browser = await logins.begin()
    with pytest.raises(Forbidden):
        await logins.finish(provider.states[0], "code", "another" if case == "browser" else browser)
    assert (store.pending, store.sessions, store.acts) == ({}, {}, [])


async def test_a_store_that_goes_away_opens_no_session() -> None:
    logins, store, provider = parts(["ops"])
    _, browser = await logins.begin()
    store.away = True
    for call in (logins.begin(), logins.finish(provider.states[0], "code", browser), logins.act("token")):
        with pytest.raises(Unavailable):
            await call
    assert store.sessions == {}
