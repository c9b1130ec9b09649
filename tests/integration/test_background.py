"""Responses in the background over real sockets, with the runner beside: what is refused, shown and put off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from gateway.errors import UpstreamOverloaded
from gateway.service.batches.background import BackgroundRunner
from gateway.service.loop.resume.checkpoints import Checkpoints
from gateway.service.money.unfinished import UnfinishedHolds
from gateway.service.ports.background import BackgroundRequest
from tests.fakes.workers import Says
from tests.integration.test_api import Served, served
from tests.integration.test_responses import ask
from tests.kit import Kit, TestClock
from tests.waiting import until


@asynccontextmanager
async def working(kit: Kit, **key: object) -> AsyncIterator[Served]:
    async with served(kit, **key) as gateway:  # type: ignore[arg-type]
        owner = gateway.responses.chats.authenticator.owner
        clock = TestClock()
        claim_of = partial(Checkpoints, clock=clock)
        runner = BackgroundRunner(
            *(kit.background, gateway.responses, claim_of, owner, clock),
            UnfinishedHolds(kit.budgets, kit.journal, clock).settle,
            most=4,
            lease_s=5.0,
            poll_s=0.02,
        )
        task = asyncio.create_task(runner.run())
        try:
            yield gateway
        finally:
            await runner.drain(0.1)
            task.cancel()


async def status(gateway: Served, response_id: str) -> str:
    return str((await gateway.http.get(f"/v1/responses/{response_id}")).json()["status"])


async def ended(gateway: Served, response_id: str) -> str:
    async def has_ended() -> str | None:
        shown = await status(gateway, response_id)
        return None if shown in ("queued", "in_progress") else shown

    return str(await until(has_ended))


async def test_it_is_queued_made_and_read_back() -> None:
    async with working(kit := Kit(workers={"alpha": Says("42")}), rpm=2) as gateway:
        made = await gateway.http.post("/v1/responses", json=ask(background=True, metadata={"a": "b"}))
        shown = made.json()
        assert (made.status_code, shown["status"], shown["background"], shown["metadata"]) == (
            *(200, "queued", True),
            {"a": "b"},
        )
        assert await ended(gateway, shown["id"]) == "completed"
        whole = (await gateway.http.get(f"/v1/responses/{shown['id']}")).json()
        assert (whole["output"][0]["content"][0]["text"], whole["created_at"]) == ("42", shown["created_at"])
        assert len(kit.workers.calls) == 1
        assert (await gateway.http.post("/v1/responses", json=ask(background=True))).status_code == 200
        refused = await gateway.http.post("/v1/responses", json=ask(background=True))
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"  # it counts as any request


async def test_what_cannot_be_made_in_the_background_is_refused_by_name() -> None:
    async with working(kit := Kit()) as gateway:
        for body, code, param in (
            (ask(background=True, store=False), 400, "background"),
            (ask(background=True, model="gpt-9"), 404, "model"),
            (ask(background="yes"), 400, "background"),
        ):
            reply = await gateway.http.post("/v1/responses", json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (code, param)
        live = (await gateway.http.post("/v1/responses", json=ask())).json()["id"]
        for query, param in (("stream=true", "stream"), ("starting_after=1", "starting_after")):
            reply = await gateway.http.get(f"/v1/responses/{live}?{query}")
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        header = {"x-baton-max-cost-usd": "much"}
        reply = await gateway.http.post("/v1/responses", json=ask(background=True), headers=header)
        assert reply.json()["error"]["param"] == "x-baton-max-cost-usd"
        assert kit.background.rows == {}


async def test_what_only_serving_shows_is_the_error_of_a_failed_response() -> None:
    async with working(Kit(), budget_usd="0.000001") as gateway:
        made = (await gateway.http.post("/v1/responses", json=ask(background=True))).json()["id"]
        assert await ended(gateway, made) == "failed"
        response = (await gateway.http.get(f"/v1/responses/{made}")).json()
        assert response["error"]["code"] == "rate_limit_exceeded"
        assert "budget" in response["error"]["message"].lower()
        stream = await gateway.http.get(f"/v1/responses/{made}?stream=true")
        assert [line for line in stream.text.splitlines() if line.startswith("event:")][-1] == "event: error"
        assert (await gateway.http.delete(f"/v1/responses/{made}")).json()["deleted"]
        assert (await gateway.http.get(f"/v1/responses/{made}")).status_code == 404


async def test_money_that_is_away_puts_it_off() -> None:
    kit = Kit()
    async with working(kit) as gateway:
        kit.budget_store.away = True
        made = (await gateway.http.post("/v1/responses", json=ask(background=True))).json()["id"]
        await until(lambda: kit.background.rows[made].claim is None and kit.background.rows[made].lease_until_s > 0)
        kit.budget_store.away = False
        kit.background.rows[made].lease_until_s = 0.0
        assert await ended(gateway, made) == "completed"


async def test_a_cancelled_one_stops_and_cannot_be_deleted_before() -> None:
    kit = Kit(workers={"alpha": Says("late", delay_s=30.0)})
    async with working(kit) as gateway:
        made = (await gateway.http.post("/v1/responses", json=ask(background=True))).json()["id"]
        await until(lambda: kit.workers.calls)
        assert (await gateway.http.delete(f"/v1/responses/{made}")).json()["error"]["code"] == "response_in_progress"
        assert (await gateway.http.post(f"/v1/responses/{made}/cancel")).json()["status"] == "cancelled"
        await until(lambda: kit.workers.cancelled)
        await until(lambda: kit.background.rows[made].request.status == "cancelled")
        assert await kit.open_nano() == 0
        assert (await gateway.http.delete(f"/v1/responses/{made}")).json()["deleted"]


async def test_a_failed_worker_is_the_failure_of_the_response() -> None:
    down = UpstreamOverloaded("no")
    kit = Kit(workers={"alpha": down, "beta": down, "gamma": down})
    async with working(kit) as gateway:
        made = (await gateway.http.post("/v1/responses", json=ask(background=True))).json()["id"]
        assert await ended(gateway, made) == "failed"
        assert kit.background.rows[made].request.status == "done"  # the log has it


async def test_a_store_that_is_away_for_a_while_ends_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.api.public.responses.LOOK_S", 0.01)
    kit = Kit()
    looks, get = [0], kit.background.get

    async def counted(*about: str) -> BackgroundRequest | None:
        looks[0] += kit.background.away
        return await get(*about)

    monkeypatch.setattr(kit.background, "get", counted)
    async with served(kit) as gateway:
        body = ask(background=True, stream=True)
        async with gateway.http.stream("POST", "/v1/responses", json=body) as reply:
            lines = reply.aiter_lines()
            assert await anext(lines) == "event: response.created"
            kit.background.away = True
            await until(lambda: looks[0] > 1)
            kit.background.away = False
            [taken] = await kit.background.take("runner", 1, 60.0)
            assert await kit.background.end(taken.id, "runner", "failed", {"code": "pool_changed", "message": "gone"})
            kinds = [line async for line in lines if line.startswith("event:")]
    assert kinds[-1] in ("event: error", "event: response.failed")
