"""Sessions over HTTP: limits at first use, what is left, the last dollar, freezing and killing."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest

from gateway.core.loop.caps import Caps
from gateway.core.money.sessions import Session
from tests.fakes.workers import Says
from tests.integration.test_api import Served, served
from tests.kit import Kit, ask, plan
from tests.waiting import until

CHAT = "/v1/chat/completions"
RUN = {"x-baton-session": "run-1"}
TWO_STEPS = (plan(("atlas", None, []), ("birch", "check it", [0])),)


async def chat(gateway: Served, body: Any = None, **headers: str) -> Any:
    named = {f"x-baton-session{name and '-'}{name}": value for name, value in headers.items()}
    return await gateway.http.post(CHAT, json=body or ask(), headers={**RUN, **named})


def error_of(reply: Any) -> tuple[int, str, str, str]:
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["param"], error["message"]


async def only(kit: Kit) -> Session:
    [session] = kit.session_store.rows.values()
    return session


async def test_limits_are_set_at_first_use_and_replies_say_what_is_left() -> None:
    async with served(Kit()) as gateway:
        first = await chat(gateway, usd="0.5", calls="9", minutes="30")
        assert first.status_code == 200, first.text
        again = await chat(gateway)
        shown = (await gateway.http.get("/v1/sessions/run-1")).json()
        assert (shown["state"], shown["usd"]["limit"], shown["calls"]["limit"]) == ("open", "0.5", 9)
        assert (shown["calls"]["spent"], shown["calls"]["held"], shown["calls"]["left"]) == (2, 0, 7)
        assert again.headers["x-baton-session-left-calls"] == "7"
        assert again.headers["x-baton-session-left-minutes"] == "30"
        assert again.headers["x-baton-session-left-usd"] == shown["usd"]["left"]
        assert shown["usd"]["held"] == "0"
        tree = (await gateway.http.get(f"/v1/rollouts/{again.headers['x-baton-rollout-id']}")).json()
        assert tree["caps"]["session"] == "run-1"
        assert [row["kind"] for row in tree["ledger"]] == ["hold", "dispatched", "dispatched", "posted"]


async def test_the_body_sets_a_session_and_a_stream_ends_with_what_is_left() -> None:
    async with served(Kit()) as gateway:
        body = ask(stream=True) | {"baton": {"session": "s.2", "session_usd": 0.25, "session_calls": 4}}
        reply = await gateway.http.post(CHAT, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-baton-session-left-calls"] == "0"  # held by the request itself
        story = json.loads(next(line for line in reply.text.splitlines() if line.startswith(": baton {"))[8:])
        assert story["x-baton-session-left-calls"] == "3"
        listed = (await gateway.http.get("/v1/sessions")).json()["data"]
        assert [(one["id"], one["minutes"]["limit"]) for one in listed] == [("s.2", None)]


async def test_a_session_without_limits_is_counted() -> None:
    async with served(Kit()) as gateway:
        reply = await chat(gateway)
        assert "x-baton-session-left-usd" not in reply.headers
        shown = (await gateway.http.get("/v1/sessions/run-1")).json()
        assert (shown["calls"], shown["usd"]["limit"]) == ({"limit": None, "spent": 1, "held": 0, "left": None}, None)
        assert float(shown["usd"]["spent"]) > 0


@pytest.mark.parametrize(
    ("headers", "status", "param"),
    [
        ({"x-baton-session": "no spaces"}, 400, "x-baton-session"),
        ({"x-baton-session-usd": "1"}, 400, "x-baton-session-usd"),
        ({**RUN, "x-baton-session-usd": "-1"}, 400, "x-baton-session-usd"),
        ({**RUN, "x-baton-session-calls": "1.5"}, 400, "x-baton-session-calls"),
        ({**RUN, "x-baton-session-minutes": "99999"}, 400, "x-baton-session-minutes"),
        ({**RUN, "x-baton-session-dollars": "1"}, 400, "x-baton-session-dollars"),
    ],
)
async def test_a_wrong_header_is_refused_by_name(headers: dict[str, str], status: int, param: str) -> None:
    async with served(Kit()) as gateway:
        refused = await gateway.http.post(CHAT, json=ask(), headers=headers)
        assert error_of(refused)[0::2][0] == status
        assert error_of(refused)[2] == param


async def test_later_requests_repeat_the_limits_or_leave_them_out() -> None:
    async with served(Kit()) as gateway:
        assert (await chat(gateway, usd="1")).status_code == 200
        assert (await chat(gateway, usd="1.00")).status_code == 200
        status, code, param, message = error_of(await chat(gateway, usd="2"))
        assert (status, code, param) == (409, "session_limits_differ", "x-baton-session-usd")
        assert "a limit of 1 on usd" in message


async def test_another_keys_session_is_invisible_and_its_id_free() -> None:
    async with served(Kit()) as gateway:
        await chat(gateway, calls="5")
        _, other = await gateway.keys.create_key("other")
        theirs = {"authorization": f"Bearer {other}"}
        for path in ("/v1/sessions/run-1", "/v1/sessions/nowhere"):
            missing = await gateway.http.get(path, headers=theirs)
            assert error_of(missing)[:2] == (404, "session_not_found")
        assert (await gateway.http.get("/v1/sessions", headers=theirs)).json()["data"] == []
        assert (await gateway.http.post("/v1/sessions/run-1/kill", headers=theirs)).status_code == 404
        assert (await gateway.http.post(CHAT, json=ask(), headers={**theirs, **RUN})).status_code == 200
        assert (await gateway.http.get("/v1/sessions/run-1")).json()["calls"]["spent"] == 1


async def test_two_at_a_sessions_last_dollar_never_pass_it() -> None:
    async with served(Kit(gap_s=0.01)) as gateway:
        await chat(gateway, usd="0.004")
        replies = await asyncio.gather(*(chat(gateway) for _ in range(12)))
        shown = (await gateway.http.get("/v1/sessions/run-1")).json()
        assert float(shown["usd"]["spent"]) <= 0.004
        assert shown["usd"]["held"] == "0"
        assert {reply.status_code for reply in replies} <= {200, 429}
        refused = [error_of(reply) for reply in replies if reply.status_code == 429]
        assert refused
        codes = {one[1] for one in refused}  # spent, or held by the others
        assert codes <= {"insufficient_quota", "budget_held"}
        assert all("Session `run-1` has $" in one[3] for one in refused)


async def test_calls_end_a_request_with_its_best_answer_and_then_refuse() -> None:
    workers = {"alpha": Says("first"), "beta": Says("second")}
    async with served(Kit(TWO_STEPS, workers)) as gateway:
        best = await chat(gateway, calls="1")
        assert best.status_code == 200, best.text
        assert best.json()["choices"][0]["message"]["content"] == "first"
        assert (best.headers["x-baton-capped"], best.headers["x-baton-session-left-calls"]) == ("calls", "0")
        status, code, param, message = error_of(await chat(gateway))
        assert (status, code, param) == (429, "insufficient_quota", "x-baton-session")
        assert "0 of 1 calls left" in message
        assert "baton sessions raise" in message


async def test_a_request_that_a_session_leaves_without_an_answer_names_it() -> None:
    sub_tasks = (plan(("atlas", "look it up", []), ("birch", None, [0])),)
    async with served(Kit(sub_tasks)) as gateway:
        status, code, param, message = error_of(await chat(gateway, calls="1"))
        assert (status, code, param) == (429, "insufficient_quota", "x-baton-session")
        assert "0 of 1 calls left, and the request's next call needs more" in message


async def test_minutes_end_a_session() -> None:
    async with served(Kit(caps=Caps(wall_s=60.0))) as gateway:
        await chat(gateway, minutes="1")
        place, session = next(iter(gateway.kit.session_store.rows.items()))
        fields = {name: getattr(session, name) for name in ("key_id", "id", "limits", "first", "state")}
        late = Session(**fields, started_at=session.started_at - timedelta(seconds=30))
        gateway.kit.session_store.rows[place] = late
        reply = await chat(gateway)
        tree = (await gateway.http.get(f"/v1/rollouts/{reply.headers['x-baton-rollout-id']}")).json()
        assert 20 < tree["caps"]["wall_s"] <= 30
        gone = Session(**fields, started_at=session.started_at - timedelta(seconds=61))
        gateway.kit.session_store.rows[place] = gone
        status, code, _, message = error_of(await chat(gateway))
        assert (status, code) == (429, "insufficient_quota")
        assert "has 0 minutes left" in message
        assert (await gateway.http.get("/v1/sessions/run-1")).json()["state"] == "ended"


async def test_an_operator_raises_freezes_and_thaws() -> None:
    async with served(Kit()) as gateway:
        await chat(gateway, calls="1")
        key_id = (await only(gateway.kit)).key_id
        path, admin = f"/admin/sessions/{key_id}/run-1", {"authorization": f"Bearer {gateway.admin_key}"}
        assert (await chat(gateway)).status_code == 429
        raised = await gateway.http.patch(path, json={"calls": 3, "usd": "2"}, headers=admin)
        assert (raised.json()["calls"]["left"], raised.json()["usd"]["limit"]) == (2, "2")
        assert (await chat(gateway, calls="1")).status_code == 200  # the limits of its first use may be repeated
        await gateway.http.patch(path, json={"state": "frozen"}, headers=admin)
        assert error_of(await chat(gateway))[:2] == (403, "session_frozen")
        await gateway.http.patch(path, json={"state": "open"}, headers=admin)
        assert (await chat(gateway)).status_code == 200
        listed = await gateway.http.get("/admin/sessions", params={"key": key_id}, headers=admin)
        assert [one["id"] for one in listed.json()["data"]] == ["run-1"]
        for wrong, field in (({"state": "gone"}, "state"), ({"calls": 0}, "calls"), ({"cals": 1}, "cals")):
            refused = await gateway.http.patch(path, json=wrong, headers=admin)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert (await gateway.http.patch(path, json={"calls": 9})).status_code == 401  # a data key raises nothing


async def test_a_kill_in_the_middle_of_a_stream_ends_it_and_the_money_is_settled() -> None:
    kit = Kit(workers={"alpha": Says("a long answer " * 50, piece_delay_s=0.05)})
    async with served(kit) as gateway:
        lines: list[str] = []
        async with gateway.http.stream("POST", CHAT, json=ask(stream=True), headers=RUN) as reply:
            async for line in reply.aiter_lines():
                lines.append(line)
                if len(lines) == 6:
                    killed = await gateway.http.post("/v1/sessions/run-1/kill")
                    assert killed.json()["state"] == "killed"
        last = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])
        assert last["error"]["code"] == "session_killed"
        assert len(lines) < 100
        session = await only(kit)
        await until(lambda: kit.completer.in_flight == 0)
        balance = await kit.budgets.balance(session.money_scope)
        assert balance.held_nano == 0
        assert balance.posted_nano > 0
        assert error_of(await chat(gateway))[:2] == (403, "session_killed")
        assert (await gateway.http.post("/v1/sessions/run-1/kill")).status_code == 200  # again


async def test_a_kill_gives_the_best_answer_of_a_request_that_has_one() -> None:
    workers = {"alpha": Says("first"), "beta": Says("late", delay_s=30)}
    async with served(Kit(TWO_STEPS, workers)) as gateway:
        asked = asyncio.create_task(chat(gateway))
        await until(lambda: any(call.worker.name == "beta" for call in gateway.kit.workers.calls))
        await gateway.http.post("/v1/sessions/run-1/kill")
        reply = await asked
        assert (reply.status_code, reply.json()["choices"][0]["message"]["content"]) == (200, "first")
        assert reply.headers["x-baton-capped"] == "session"


async def test_a_key_makes_a_session_and_sees_its_budgets() -> None:
    async with served(Kit(), budget_usd="3", budget_day_usd="1") as gateway:
        made = await gateway.http.post("/v1/sessions", json={"id": "run-1", "usd": "0.5", "calls": 2})
        assert (made.status_code, made.json()["usd"]["left"]) == (201, "0.5")
        same = await gateway.http.post("/v1/sessions", json={"id": "run-1", "usd": 0.5, "calls": 2})
        assert same.status_code == 200
        other = await gateway.http.post("/v1/sessions", json={"id": "run-1", "usd": 9})
        assert error_of(other)[1] == "session_limits_differ"
        await chat(gateway)
        lines = (await gateway.http.get("/v1/budget")).json()["data"]
        assert [(line["scope"], line["window"], line["limit_usd"]) for line in lines] == [
            ("key", "life", "3"),
            ("key", "month", None),
            ("key", "day", "1"),
        ]
        assert lines[0]["spent_usd"] == lines[2]["spent_usd"] != "0"
        assert lines[0]["resets_at"] is None
        assert lines[1]["left_usd"] is None
        for wrong, field in (({}, "id"), ({"id": "x", "dollars": 1}, "dollars"), ({"id": "x", "usd": 0}, "usd")):
            refused = await gateway.http.post("/v1/sessions", json=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def test_without_the_database_a_session_is_refused_and_nothing_is_held() -> None:
    async with served(Kit()) as gateway:
        gateway.kit.session_store.away = True
        assert (await chat(gateway)).status_code == 503
        assert (await gateway.http.post(CHAT, json=ask())).status_code == 200
