"""Login at an identity provider on loopback: discovery, PKCE, signed ID tokens, and every way to be refused."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from aiohttp import web
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.login.oidc import OidcProvider
from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.operators.logins import PostgresLogins
from gateway.api.edge import stack as edge
from gateway.api.edge.bodies import Operators, by_admin_key
from gateway.api.operator.login import CONSOLE_HEADER, SESSION, LoginApi, by_session
from gateway.api.operator.pages import PagesApi
from gateway.api.operator.workers import WorkersApi
from gateway.core.access.login import RoleRules
from gateway.service.admin.logins import Logins
from gateway.service.policies.standing import Charge
from gateway.service.policies.standings import Standings
from gateway.service.request.auth import Authenticator
from tests.fakes.reports import FakeReports
from tests.fakes.store import FakeStore
from tests.kit import TestClock, pool_file
from tests.service.test_quarantine import Ward
from tests.waiting import BOUND_S

jwt = pytest.importorskip("joserfc.jwt", reason="needs the oidc extra")
jwk = pytest.importorskip("joserfc.jwk", reason="needs the oidc extra")
pytest.importorskip("authlib", reason="needs the oidc extra")
CLIENT, SECRET, BASE = "baton-console", "s3cret", "http://127.0.0.1:8081"
CALLBACK = f"{BASE}/login/callback"
ROLES = RoleRules("realm_access.roles", {"admin": ("chiefs",), "operator": ("ops", "sre"), "auditor": ("audit",)})


@dataclass
class Provider:
    """A small OpenID provider. `claims` and `head` replace parts of the next ID tokens; `tokens` counts redemptions."""

    key: Any = field(default_factory=lambda: jwk.RSAKey.generate_key(2048, {"kid": "k1"}))
    signer: Any = None
    claims: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "RS256"
    roles: list[str] = field(default_factory=lambda: ["ops"])
    issuer: str = ""
    description: dict[str, Any] = field(default_factory=dict)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    down: bool = False
    asked: int = 0
    callback: str = CALLBACK

    async def describe(self, _: web.Request) -> web.Response:
        if self.down:
            return web.Response(status=503)
        about = {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
            "end_session_endpoint": f"{self.issuer}/out",
            "id_token_signing_alg_values_supported": ["RS256", "HS256", "none"],
        }
        return web.json_response(about | self.description)

    async def keys(self, _: web.Request) -> web.Response:
        return web.json_response({"keys": [self.key.as_dict(private=False)]})

    async def authorize(self, request: web.Request) -> web.Response:
        """As if the person had logged in at once."""
        asked = dict(request.query)
        assert asked["response_type"] == "code"
        assert (asked["client_id"], asked["redirect_uri"]) == (CLIENT, self.callback)
        assert asked["code_challenge_method"] == "S256"
        self.asked += 1
        code = f"code-{self.asked}"
        self.codes[code] = asked
        raise web.HTTPFound(f"{self.callback}?code={code}&state={asked['state']}")

    async def token(self, request: web.Request) -> web.Response:
        if self.down:
            return web.Response(status=503, text="away")
        form = await request.post()
        asked = self.codes.pop(str(form["code"]), None)
        basic = "Basic " + base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        challenge = hashlib.sha256(str(form.get("code_verifier")).encode()).digest()
        proof = base64.urlsafe_b64encode(challenge).rstrip(b"=").decode()
        if asked is None or request.headers.get("authorization") != basic or proof != asked["code_challenge"]:
            return web.json_response({"error": "invalid_grant"}, status=400)
        token = {"access_token": "at", "token_type": "Bearer", "id_token": self.id_token(asked["nonce"])}
        return web.json_response(token)

    def id_token(self, nonce: str) -> str:
        now = int(time.time())
        claims = {"iss": self.issuer, "sub": "u-17", "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": nonce}
        claims |= {"email": "ann@example.com", "realm_access": {"roles": self.roles}} | self.claims
        claims = {name: value for name, value in claims.items() if value is not None}
        head = {"alg": self.algorithm, "kid": "k1"}
        return str(jwt.encode(head, claims, self.signer or self.key, algorithms=[self.algorithm]))


@asynccontextmanager
async def running(provider: Provider) -> AsyncIterator[Provider]:
    app = web.Application()
    app.router.add_get("/.well-known/openid-configuration", provider.describe)
    app.router.add_get("/keys", provider.keys)
    app.router.add_get("/authorize", provider.authorize)
    app.router.add_post("/token", provider.token)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    provider.issuer = f"http://{host}:{port}"
    try:
        yield provider
    finally:
        await runner.cleanup()


@dataclass
class Site:
    """A gateway's admin routes, a provider, and a browser of one person."""

    provider: Provider
    browser: httpx.AsyncClient
    new_browser: Callable[[], httpx.AsyncClient]
    audit: PostgresAudit

    async def to_provider(self) -> str:
        """Begin a login; the URL that the provider sends the browser back to."""
        began = await self.browser.get("/login")
        assert began.status_code == 303, began.text
        async with httpx.AsyncClient(timeout=BOUND_S) as person:
            return (await person.get(began.headers["location"])).headers["location"]

    async def login(self) -> httpx.Response:
        return await self.browser.get((await self.to_provider()).removeprefix(BASE))

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        own = {CONSOLE_HEADER: "1"} | headers
        return await self.browser.request(method, path, json=body, headers=own)

    async def acts(self) -> list[tuple[str, str]]:
        return [(link.entry.actor, link.entry.act) for link in await self.audit.walk(0, 100)]


@pytest.fixture
async def site(pg_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr("gateway.adapters.login.oidc.TIMEOUT_S", BOUND_S)
    clock, store = TestClock(), FakeStore()
    reports = FakeReports(store)
    async with running(Provider()) as provider:
        oidc = OidcProvider(provider.issuer, CLIENT, SECRET, CALLBACK, "openid email")
        logins = Logins(oidc, PostgresLogins(pg_engine), clock, ROLES, session_s=600)
        actor = by_session(logins, by_admin_key(Authenticator(store, {1: b"pepper-for-tests-0123456789"}, clock)))
        operators, ward = Operators(actor, 10_000), Ward()
        app = FastAPI()
        edge.install(app)
        for api in (
            LoginApi(logins, secure=False),
            PagesApi(reports, operators, clock, Standings(reports.planner_rewards, Charge("rule"), pool_file())),
            WorkersApi(ward.quarantines, operators),
        ):
            app.include_router(api.router())
        transport = httpx.ASGITransport(app=edge.Edge(app))

        def new_browser() -> httpx.AsyncClient:
            return httpx.AsyncClient(transport=transport, base_url=BASE)

        async with new_browser() as browser:
            yield Site(provider, browser, new_browser, PostgresAudit(pg_engine))


async def test_a_person_logs_in_acts_and_logs_out(site: Site) -> None:
    assert (await site.browser.get("/login/ways")).json() == {"oidc": True}
    entered = await site.login()
    assert (entered.status_code, entered.headers["location"]) == (303, "../ui/")
    cookie = next(line for line in entered.headers.get_list("set-cookie") if line.startswith(SESSION))
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert (await site.ask("GET", "/admin/me")).json() == {"actor": "oidc:u-17", "role": "operator"}
    put = await site.ask("POST", "/admin/workers/alpha/quarantine", {"why": "drill"})
    assert (put.status_code, put.json()["by"]) == (200, "oidc:u-17")
    out = (await site.ask("POST", "/login/out")).json()
    assert out["url"] == f"{site.provider.issuer}/out?client_id={CLIENT}"
    site.browser.cookies.set(SESSION, cookie.partition("=")[2].partition(";")[0])  # as a copy of it would
    ended = await site.ask("GET", "/admin/me")
    assert (ended.status_code, ended.json()["error"]["code"]) == (401, "session_ended")
    assert await site.acts() == [("oidc:u-17", "console.login"), ("oidc:u-17", "console.logout")]


async def test_a_session_counts_for_the_consoles_own_page_only(site: Site) -> None:
    """Another site's page may send a form with the cookie, but not the header."""
    await site.login()
    for method in ("GET", "POST"):
        reply = await site.browser.request(method, "/admin/me" if method == "GET" else "/admin/workers/alpha/release")
        assert reply.status_code == 401
    wrong_key = await site.ask("GET", "/admin/me", authorization="Bearer bt_admin_wrong")
    assert wrong_key.status_code == 401


@pytest.mark.parametrize(
    ("roles", "role"), [(["chiefs", "audit"], "admin"), (["sre"], "operator"), (["audit", "other"], "auditor")]
)
async def test_the_claim_gives_the_role(site: Site, roles: list[str], role: str) -> None:
    site.provider.roles = roles
    await site.login()
    assert (await site.ask("GET", "/admin/me")).json()["role"] == role
    changed = await site.ask("POST", "/admin/workers/alpha/quarantine", {})
    assert changed.status_code == (403 if role == "auditor" else 200)


NOW = int(time.time())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"claims": {"nonce": "another"}}, "nonce"),
        ({"claims": {"nonce": None}}, "nonce"),
        ({"claims": {"aud": "another-client"}}, "aud"),
        ({"claims": {"aud": ["another-client", CLIENT], "azp": "another-client"}}, "azp"),
        ({"claims": {"iss": "http://127.0.0.1:9"}}, "iss"),
        ({"claims": {"exp": NOW - 3_600}}, "expired"),
        ({"claims": {"sub": None}}, "sub"),
        ({"signer": "another"}, "signature"),
        ({"algorithm": "HS256", "signer": "secret"}, "ID token is not right"),
        ({"roles": ["visitors"]}, "no role here"),
        ({"roles": []}, "no role here"),
        ({"claims": {"realm_access": "ops"}}, "no role here"),
    ],
)
async def test_a_login_that_is_not_right_is_refused_and_says_why(
    site: Site, changes: dict[str, Any], says: str
) -> None:
    signers = {
        "another": lambda: jwk.RSAKey.generate_key(2048, {"kid": "k1"}),
        "secret": lambda: jwk.OctKey.import_key(SECRET * 6, {"kid": "k1"}),
    }
    for name, value in changes.items():
        setattr(site.provider, name, signers[value]() if name == "signer" else value)
    refused = await site.login()
    assert refused.status_code == 403, refused.text
    assert says in refused.text
    assert SESSION not in site.browser.cookies
    assert (await site.ask("GET", "/admin/me")).status_code == 401
    assert await site.acts() == []


async def test_state_binds_a_login_to_its_browser_and_counts_once(site: Site) -> None:
    back = (await site.to_provider()).removeprefix(BASE)
    wrong = await site.browser.get(back.replace("state=", "state=x"))
    assert (wrong.status_code, "not begun in this browser" in wrong.text) == (403, True)
    async with site.new_browser() as stranger:
        assert (await stranger.get(back)).status_code == 403
        await stranger.get("/login")  # which gives it a cookie of its own
        assert "not begun in this browser" in (await stranger.get(back)).text
    assert (await site.browser.get(back)).status_code == 403, "the stranger used it up"
    assert (await site.browser.get("/login/callback?error=access_denied")).status_code == 403


async def test_a_code_counts_once(site: Site) -> None:
    first = await site.to_provider()
    code = parse_qs(urlsplit(first).query)["code"][0]
    assert (await site.browser.get(first.removeprefix(BASE))).status_code == 303
    assert (await site.browser.get(first.removeprefix(BASE))).status_code == 403
    second = urlsplit(await site.to_provider())
    state = parse_qs(second.query)["state"][0]
    replayed = await site.browser.get(f"/login/callback?code={code}&state={state}")
    assert (replayed.status_code, "invalid_grant" in replayed.text) == (403, True)


async def test_a_provider_that_is_down_or_another_one_is_said(site: Site) -> None:
    site.provider.down = True
    began = await site.browser.get("/login")
    assert (began.status_code, "cannot be used now" in began.text) == (503, True)
    site.provider.down = False
    site.provider.description = {"issuer": "http://127.0.0.1:9"}
    assert "calls itself http://127.0.0.1:9" in (await site.browser.get("/login")).text
    site.provider.description = {"token_endpoint": None}
    assert "has no token_endpoint" in (await site.browser.get("/login")).text
    site.provider.description = {}
    back = await site.to_provider()
    site.provider.down = True
    late = await site.browser.get(back.removeprefix(BASE))
    assert (late.status_code, "/token" in late.text) == (503, True)


async def test_many_begun_logins_fill_no_table(site: Site, pg_engine: AsyncEngine) -> None:
    began = await asyncio.gather(*(site.browser.get("/login") for _ in range(5)))
    assert {reply.status_code for reply in began} == {303}
    assert await PostgresLogins(pg_engine).sweep(100) == 0
    text = json.dumps([dict(reply.headers) for reply in began])
    assert "verifier" not in text
