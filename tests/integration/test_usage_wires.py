"""Usage where vendors put it: a real socket and the real adapter, whole and streamed, down to the ledger."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from gateway.adapters.upstream.http import HttpWorkers
from gateway.core.pool.workers import PoolFile, Price
from gateway.service.ports.request import WorkerCall
from tests.integration.test_worker_failures import EVENTS, replies, sends
from tests.kit import Kit, ask, model_worker
from tests.upstreams.server import Server, event
from tests.waiting import BOUND_S

PRICE = Price.model_validate(
    {
        "input_usd_per_mtok": "1",
        "output_usd_per_mtok": "4",
        "cache_read_usd_per_mtok": "0.1",
        "cache_write_usd_per_mtok": "1.25",
    }
)
HEAD = {"id": "c", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 900, "completion_tokens": 30, "total_tokens": 930}
INSIDE = {**USAGE, "cached_tokens": 800}
BESIDE = {"prompt_tokens": 100, "completion_tokens": 30, "total_tokens": 930, "cache_read_input_tokens": 800}
FULL_NANO = 900 * 1000 + 30 * 4000
CACHED_NANO = 100 * 1000 + 800 * 100 + 30 * 4000


def choice(**more: Any) -> dict[str, Any]:
    """The last piece of a choice."""
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", **more}]}


# What follows the text in a stream, and what stands beside the choices of a whole reply.
WIRES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], int]] = {
    "a name of its own": ([choice(), {"choices": [], "usage": INSIDE}], {"usage": INSIDE}, CACHED_NANO),
    "beside the prompt": ([choice(), {"choices": [], "usage": BESIDE}], {"usage": BESIDE}, CACHED_NANO),
    "in the choice": ([choice(usage=INSIDE)], {"usage": INSIDE}, CACHED_NANO),
    "under a vendor's key": ([{**choice(), "x_groq": {"usage": USAGE}}], {"x_groq": {"usage": USAGE}}, FULL_NANO),
    "in two chunks": (
        [{"choices": [], "usage": {**INSIDE, "completion_tokens": 1}}, choice(), {"usage": {"completion_tokens": 30}}],
        {"usage": {**INSIDE, "total_tokens": None}},
        CACHED_NANO,
    ),
    "as text": (
        [{**choice(), "usage": {name: str(count) for name, count in INSIDE.items()}}],
        {"usage": {name: float(count) for name, count in INSIDE.items()}},
        CACHED_NANO,
    ),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
async def test_a_report_is_read_wherever_it_stands(wire: str, stream: bool) -> None:
    chunks, beside, nano = WIRES[wire]
    text = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "fine"}, "finish_reason": None}]}
    pieces = [event({**HEAD, "object": "chat.completion.chunk", **one}) for one in (text, *chunks)]
    message = {"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}
    body = {**HEAD, "object": "chat.completion", "choices": [message], **beside}
    handler = sends(EVENTS, *pieces, b"data: [DONE]\n\n") if stream else replies(json.dumps(body).encode())
    workers = HttpWorkers({}, b"secret")
    async with Server(handler) as server:
        worker = model_worker("real", "atlas", url=f"{server.url}/v1", price=PRICE, context_tokens=100_000)
        kit = Kit(workers=workers, pools=PoolFile(workers=(worker,), pools={"default": ("real",)}))
        running = await kit.serve(ask("which?", model="real", stream=stream))
    await workers.close()
    assert running.error is None
    (step,) = running.record.steps
    assert (step.prompt_tokens, step.completion_tokens, step.usage_estimated) == (900, 30, False)
    assert step.cost_nano == await kit.posted_nano() == nano


@pytest.mark.parametrize("bills", [False, True])
async def test_what_a_worker_says_a_call_cost_is_in_the_log_and_charged_if_it_bills(bills: bool) -> None:
    body = {
        **HEAD,
        "choices": [{"index": 0, "message": {"content": "fine"}, "finish_reason": "stop"}],
        "usage": {**USAGE, "cost_in_usd_ticks": 3_000_000},  # of ten billion to the dollar
    }
    workers = HttpWorkers({}, b"secret")
    async with Server(replies(json.dumps(body).encode())) as server:
        more: dict[str, Any] = {"price": PRICE, "context_tokens": 100_000, "bills": bills}
        worker = model_worker("real", "atlas", url=f"{server.url}/v1", **more)
        kit = Kit(workers=workers, pools=PoolFile(workers=(worker,), pools={"default": ("real",)}))
        running = await kit.serve(ask("which?", model="real"))
    await workers.close()
    (step,) = running.record.steps
    assert step.usage_details == {"billed_nano": int(Decimal("0.0003") * 10**9)}
    assert step.cost_nano == (300_000 if bills else FULL_NANO)
    assert "billed" not in json.dumps((await running.result())["usage"])


@pytest.mark.parametrize(
    ("counts", "tokens"),
    [
        ({"input_tokens": 50, "output_tokens": 4000}, (50, 4000)),
        ({"input_tokens": 50, "output_tokens": 10**12}, (50, 16_000)),
        ({"input_tokens": 10**12, "output_tokens": 4000}, (0, 4000)),
        (None, (0, 0)),
    ],
)
async def test_images_cost_no_multiple_of_what_they_may_have(counts: Any, tokens: tuple[int, int]) -> None:
    body = {"created": 1, "data": [{"b64_json": "AA=="}, {"b64_json": "AA=="}], "usage": counts}
    workers = HttpWorkers({}, b"secret")
    async with Server(replies(json.dumps(body).encode())) as server:
        more: dict[str, Any] = {"task": "images", "price": PRICE, "output_tokens_max": 2000, "context_tokens": 32_000}
        worker = model_worker("real", "atlas", url=f"{server.url}/v1", **more)
        call = WorkerCall(worker, {"prompt": "a cat", "n": 2}, BOUND_S, "r", "s", endpoint="images")
        reply = await workers.complete(call)
    await workers.close()
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == tokens
    assert reply.usage.details == {"images": 2}
