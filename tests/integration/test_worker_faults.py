"""A worker's fault is a 502 for the client, however little money is left to try again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from itertools import product
from typing import Any

import pytest

from gateway.adapters.upstream.http import HttpWorkers
from gateway.core.pool.workers import Price
from tests.integration.test_api import Served, served
from tests.integration.test_worker_failures import EVENTS, replies, sends
from tests.kit import Kit, ask, model_worker
from tests.kit import pool_file as kit_pool
from tests.upstreams.server import Handler, Server, event

DEAR = Price(input_usd_per_mtok=Decimal(10), output_usd_per_mtok=Decimal(1000))
ONE_CALL = {"x-baton-max-cost-usd": "0.1"}  # it affords one worst case of these workers, and not two
HTML = replies(b"<html><body>Sign in</body></html>")
EMPTY = replies(b"")
ERROR_FIRST = sends(EVENTS + b"event: error\n" + event({"error": {"message": "overheated"}}))
FAULTS = {"html": HTML, "empty": EMPTY, "list": replies(b"[]"), "error first": ERROR_FIRST}


@asynccontextmanager
async def behind(handler: Handler) -> AsyncIterator[Served]:
    """A gateway whose only two workers answer with this handler."""
    async with Server(handler) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        workers = [
            model_worker(name, handle, url=url, price=DEAR, output_tokens_max=64)
            for name, handle in (("one", "ember"), ("two", "fjord"))
        ]
        pool = kit_pool(*workers).model_copy(update={"pools": {"default": ("one", "two")}})
        http = HttpWorkers({}, b"secret")
        try:
            async with served(Kit(workers=http, pools=pool)) as gateway:
                yield gateway
        finally:
            await http.close()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_workers_fault_is_a_502_that_may_be_tried_again(fault: str) -> None:
    async with behind(FAULTS[fault]) as gateway:
        for model, stream, caps in product(("one", "baton", "baton/rule"), (False, True), ({}, ONE_CALL)):
            body: dict[str, Any] = ask(model=model, stream=stream)
            reply = await gateway.http.post("/v1/chat/completions", json=body, headers=caps)
            error = json.loads(reply.text)["error"]
            assert (reply.status_code, error["type"]) == (502, "upstream_error"), (model, stream, caps, error)
            assert reply.headers["x-should-retry"] == "true"
            assert "x-baton-rollout-id" in reply.headers


@pytest.mark.parametrize("fault", ["html", "empty", "list"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_with_status_200_costs_its_prompt_and_what_came_and_not_the_worst_case(
    fault: str, stream: bool
) -> None:
    async with behind(FAULTS[fault]) as gateway:
        reply = await gateway.http.post("/v1/chat/completions", json=ask(model="one", stream=stream))
        assert reply.status_code == 502
        record = gateway.kit.metrics.records[-1]
        (step,) = record.steps
        counted = {attempt.counted_by for attempt in step.attempts}
        worst_nano = 64 * 1_000_000  # of the reply alone, of one attempt
        assert 0 < step.cost_nano < worst_nano / 2
        assert counted == {"bytes"}
        assert await gateway.kit.open_nano() == 0
