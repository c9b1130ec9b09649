"""The operator's page and its routes over HTTP: who may read, what is asked, what the browser is told."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gateway.api.edge import stack as edge
from gateway.api.edge.bodies import Operators, by_admin_key
from gateway.api.operator import rollouts as operator_rollouts
from gateway.api.operator.pages import PagesApi, page_files
from gateway.api.operator.rollouts import RolloutsApi
from gateway.service.admin.explain import Explain
from gateway.service.admin.keys import KeyAdmin
from gateway.service.policies.standing import Charge
from gateway.service.policies.standings import Standings
from gateway.service.ports.admin import RolloutsQuery
from gateway.service.request.auth import Authenticator
from tests.fakes.admin import FakeAdmin
from tests.fakes.pools import FakePools
from tests.fakes.reports import FakeReports
from tests.fakes.store import FakeStore
from tests.kit import TestClock, pool_file
from tests.records import T0_US, a_rollout, rollout_event

ROUTES = ("/admin/overview", "/admin/rollouts", "/admin/rollouts/x", "/admin/rollouts/x/explain")


@dataclass
class Operator:
    """The admin listener's application, with a key of each class."""

    http: httpx.AsyncClient
    reports: FakeReports
    store: FakeStore
    admin_key: str
    admin_id: str
    data_key: str

    async def get(self, path: str, bearer: str | None = None, **query: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {bearer or self.admin_key}"}
        return await self.http.get(path, headers=headers, params=query)


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    store, clock, peppers = FakeStore(), TestClock(), {1: b"pepper-for-tests-0123456789"}
    keys = KeyAdmin(FakeAdmin(store), peppers, clock, {"default": ["atlas"]})
    reports = FakeReports(store)
    app = FastAPI()
    edge.install(app)
    operators = Operators(by_admin_key(Authenticator(store, peppers, clock)), 10_000)
    explaining = Explain(reports, FakePools(FakeAdmin(store)), FakeAdmin(store))
    app.include_router(
        PagesApi(reports, operators, clock, Standings(reports.planner_rewards, Charge("rule"), pool_file())).router()
    )
    app.include_router(RolloutsApi(reports, explaining, operators).router())
    row, admin_key = await keys.create_key("ops", "admin")
    _, data_key = await keys.create_key("app")
    transport = httpx.ASGITransport(app=edge.Edge(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield Operator(http, reports, store, admin_key, row.public_id, data_key)


async def test_the_page_needs_no_key_and_holds_no_data(operator: Operator) -> None:
    operator.store.ingest(rollout_event(a_rollout(end_user="ann-1234")))
    home = await operator.http.get("/", follow_redirects=True)
    assert str(home.url) == "http://gateway/ui/"
    assert home.headers["content-type"] == "text/html; charset=utf-8"
    for name in page_files():
        reply = await operator.http.get(f"/ui/{'' if name == 'index.html' else name}")
        assert reply.status_code == 200
        assert "ann-1234" not in reply.text
    assert operator.reports.asked == []


@pytest.mark.parametrize("path", ["/", "/ui", "/ui/", "/ui/app.js", "/ui/style.css"])
async def test_the_browser_is_told_to_run_nothing_but_our_files(operator: Operator, path: str) -> None:
    headers = (await operator.http.get(path)).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


@pytest.mark.parametrize("path", ["/ui/index.py", "/ui/../pages.py", "/ui/%2e%2e/pages.py", "/ui/nothing.js"])
async def test_only_the_pages_own_files_are_served(operator: Operator, path: str) -> None:
    assert (await operator.http.get(path)).status_code == 404


def test_the_page_loads_nothing_from_elsewhere_and_never_writes_markup() -> None:
    shipped = {name: content.decode() for name, content in page_files().items()}
    assert {"index.html", "app.js", "style.css"} <= set(shipped)
    markup = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|DOMParser"
    )
    for name, text in shipped.items():
        assert text.count("\n") <= 400, name
        assert not markup.search(text), name
        assert set(re.findall(r"https?://[^\s\"'`]+", text)) <= {"http://www.w3.org/2000/svg"}, name
    assert not re.search(r"<script>|style=| on\w+=", shipped["index.html"])


@pytest.mark.parametrize("path", ROUTES)
async def test_admin_keys_only(operator: Operator, path: str) -> None:
    assert (await operator.http.get(path)).status_code == 401
    assert (await operator.get(path, operator.data_key)).status_code == 401
    assert operator.reports.asked == []


async def test_an_operator_reads_why_any_rollout_went_as_it_did(operator: Operator) -> None:
    record = a_rollout(key_id="somebody")
    operator.store.ingest(rollout_event(record))
    reply = (await operator.get(f"/admin/rollouts/{record.completion_id}/explain")).json()
    assert (reply["object"], reply["rollout_id"]) == ("baton.explanation", record.id)
    assert operator.reports.asked == [(record.id, None)], "requests like it are those of every key"
    assert (await operator.get("/admin/rollouts/nothing/explain")).status_code == 404


async def test_the_overview_is_of_the_window_asked_for(operator: Operator) -> None:
    reply = await operator.get("/admin/overview", window_s=900)
    assert reply.json()["totals"] == {"requests": 0}
    assert reply.headers["cache-control"] == "no-store"
    (planner,) = reply.json()["planners"]
    assert (planner["pool"], planner["rung"], planner["outcomes"]) == ("default", "learning", 0)
    assert planner["line"] == (
        "`baton`: the rule plans (0 outcomes). Next: about 24 outcomes until the rule routes 3 models by kind."
    )
    await operator.get("/admin/overview")
    assert [window_s for _, window_s in operator.reports.asked] == [900, 3_600]


async def test_the_list_is_asked_for_as_the_query_says(operator: Operator) -> None:
    await operator.get("/admin/rollouts")
    await operator.get("/admin/rollouts", limit=7, before="1.x", key="k", policy="baton/rule", status="fallback")
    await operator.get("/admin/rollouts", key="", status="")
    assert operator.reports.asked == [
        RolloutsQuery(50),
        RolloutsQuery(7, before="1.x", key="k", policy="baton/rule", status="fallback"),
        RolloutsQuery(50),
    ]


async def test_every_filter_of_the_search_is_read(operator: Operator) -> None:
    await operator.get(
        "/admin/rollouts",
        **{"worker": "alpha", "fault": "steps", "user": "ann", "text": "tax", "tag": "team:blue:2", "outcome": "none"},
        **{"outcome_min": "0.5", "outcome_max": "1", "cost_min_usd": "0.01", "cost_max_usd": "2"},
        **{"since": "2026-01-02", "until": "2026-01-03T04:05:06+02:00"},
    )
    await operator.get("/admin/rollouts", tag="team", outcome="any")
    first, second = operator.reports.asked
    assert first == RolloutsQuery(
        limit=50,
        worker="alpha",
        fault="steps",
        user="ann",
        text="tax",
        tag=("team", "blue:2"),
        judged=False,
        outcome_min=0.5,
        outcome_max=1.0,
        cost_min_nano=10_000_000,
        cost_max_nano=2_000_000_000,
        since=datetime(2026, 1, 2, tzinfo=UTC),
        until=datetime(2026, 1, 3, 2, 5, 6, tzinfo=UTC),
    )
    assert (second.tag, second.judged) == (("team", None), True)


async def test_an_export_has_a_line_for_each_request_and_says_where_it_ends(
    operator: Operator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [a_rollout(created_us=T0_US + n) for n in range(5)]
    for record in records:
        operator.store.ingest(rollout_event(record))
    with caplog.at_level(logging.INFO, logger="baton"):
        reply = await operator.get("/admin/rollouts/export", status="done")
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert [line["id"] for line in lines] == [record.id for record in reversed(records)]
    assert reply.headers["content-disposition"] == 'attachment; filename="rollouts.jsonl"'
    assert f"admin key {operator.admin_id} exported 5 rollouts" in caplog.messages
    monkeypatch.setattr(operator_rollouts, "PAGE_MAX", 2)
    monkeypatch.setattr(operator_rollouts, "EXPORT_LINES_MAX", 4)
    lines = [json.loads(line) for line in (await operator.get("/admin/rollouts/export", limit=1)).text.splitlines()]
    assert [line.get("id") for line in lines] == [*(record.id for record in records[:0:-1]), None]
    assert lines[-1] == {"next": "4"}


async def test_a_page_can_ask_who_it_is(operator: Operator) -> None:
    assert (await operator.get("/admin/me")).json() == {"actor": f"key:{operator.admin_id}", "role": "admin"}


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/admin/overview", {"window_s": "59"}, "window_s"),
        ("/admin/overview", {"window_s": "604801"}, "window_s"),
        ("/admin/overview", {"window_s": "1e3"}, "window_s"),
        ("/admin/overview", {"window_s": "٣٦٠٠"}, "window_s"),
        ("/admin/overview", {"window": "900"}, "window"),
        ("/admin/rollouts", {"limit": "0"}, "limit"),
        ("/admin/rollouts", {"limit": "201"}, "limit"),
        ("/admin/rollouts", {"limit": "9" * 5_000}, "limit"),
        ("/admin/rollouts", {"status": "ok"}, "status"),
        ("/admin/rollouts", {"key": "k" * 201}, "key"),
        ("/admin/rollouts", {"polcy": "rule"}, "polcy"),
        ("/admin/rollouts", {"outcome": "good"}, "outcome"),
        ("/admin/rollouts", {"outcome_min": "nan"}, "outcome_min"),
        ("/admin/rollouts", {"outcome_max": "1.1"}, "outcome_max"),
        ("/admin/rollouts", {"cost_min_usd": "a lot"}, "cost_min_usd"),
        ("/admin/rollouts", {"since": "yesterday"}, "since"),
        ("/admin/rollouts", {"text": "ab"}, "text"),
        ("/admin/rollouts/export", {"until": "soon"}, "until"),
    ],
)
async def test_a_wrong_query_is_named(operator: Operator, path: str, query: dict[str, str], param: str) -> None:
    reply = await operator.get(path, **query)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert operator.reports.asked == []


async def test_any_keys_rollout_is_shown_and_who_read_it_is_logged(
    operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    record = a_rollout(key_id="somebody")
    operator.store.ingest(rollout_event(record))
    with caplog.at_level(logging.INFO, logger="baton"):
        reply = await operator.get(f"/admin/rollouts/{record.completion_id}")
    assert (reply.json()["id"], len(reply.json()["steps"])) == (record.id, 2)
    assert caplog.messages == [f"admin key {operator.admin_id} read rollout {record.id} of key somebody"]


async def test_an_unknown_rollout_is_404_and_no_one_is_logged_for_it(
    operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="baton"):
        reply = await operator.get("/admin/rollouts/nothing")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
    assert not [line for line in caplog.messages if " read rollout " in line]  # the refusal has its own line


async def test_a_log_that_is_away_is_one_line(operator: Operator) -> None:
    record = a_rollout()
    operator.store.ingest(rollout_event(record))
    await operator.get("/admin/overview")  # the key is known from here on
    operator.store.away = True
    reply = await operator.get(f"/admin/rollouts/{record.id}")
    assert (reply.status_code, "\n" in reply.json()["error"]["message"]) == (503, False)
