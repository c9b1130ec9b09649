"""Contracts and checkers in their bad ways, through a gateway over HTTP to workers and a checker over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.adapters.upstream.pooled import pooled_workers
from gateway.core.pool.workers import PoolFile, WorkerSpec
from tests.integration.test_api import Served, served
from tests.kit import Kit, ask, model_worker, pool_file
from tests.upstreams.server import Reply, Request, Server, json_reply

CHAIN = "baton/checked:cheap>best@check"
CONTRACT = json.dumps({"steps": [{"worker": "ember", "task": None, "see": [], "expect": {"regex": "^[0-9]+$"}}]})
RIGHT, WRONG = "42", "about forty"


def _completion(text: str) -> Reply:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json_reply({"id": "c", "object": "chat.completion", "created": 1, "choices": [choice], "usage": usage})


@asynccontextmanager
async def behind(
    replies: Mapping[str, list[str]], check: Mapping[str, Any], plan: str = CONTRACT
) -> AsyncIterator[tuple[Served, Kit, list[str]]]:
    """A gateway whose workers say these texts in turn, the last again and again, and whose checker answers so."""
    asked: list[str] = []

    def handler(request: Request) -> Reply:
        if request.path.endswith("/check"):
            asked.append("check")
            return json_reply((check.get("content") and check) or {"error": "down"}, int(check.get("status", 200)))
        model = str(request.body["model"])
        texts = replies[model]
        asked.append(model)
        return _completion(texts[min(asked.count(model), len(texts)) - 1])

    async with Server(handler) as server:
        models = [
            model_worker(name, handle, url=f"{server.url}/v1", cannot=["stream"])
            for name, handle in (("cheap", "ember"), ("best", "fjord"))
        ]
        facts = {"name": "check", "handle": "probe", "kind": "tool", "tags": ["check"], "price": {"call_usd": "0.0001"}}
        checker = WorkerSpec.model_validate({**facts, "url": f"{server.url}/check"})
        pool: PoolFile = pool_file(*models, checker)
        pool = pool.model_copy(update={"pools": {"default": ("cheap", "best", "check")}})
        workers = pooled_workers(pool, {}, b"secret")
        kit = Kit((plan,), workers, pools=pool, attempts_max=1)
        try:
            async with served(kit) as gateway:
                yield gateway, kit, asked
        finally:
            await workers.close()


# row → (model, texts of cheap, texts of best, the checker, the reply, who was asked, what the header says)
ROWS: dict[str, tuple[str, list[str], list[str], dict[str, Any], str, list[str], str | None]] = {
    "contract missed": ("baton", [WRONG], [WRONG], {}, WRONG, ["cheap", "cheap", "best"], "contract"),
    "contract repaired": ("baton", [WRONG, RIGHT], [WRONG], {}, RIGHT, ["cheap", "cheap"], None),
    "another worker": ("baton", [WRONG], [RIGHT], {}, RIGHT, ["cheap", "cheap", "best"], None),
    "escalated": (CHAIN, [WRONG], [RIGHT], {"content": "not valid"}, RIGHT, ["cheap", "check", "best"], None),
    "accepted": (CHAIN, [RIGHT], [WRONG], {"content": "valid"}, RIGHT, ["cheap", "check"], None),
    "checker down": (CHAIN, [WRONG], [RIGHT], {"status": 500}, RIGHT, ["cheap", "check", "best"], None),
    "checker says nothing": (CHAIN, [WRONG], [RIGHT], {"content": "hm"}, RIGHT, ["cheap", "check", "best"], None),
    "checker lies": (CHAIN, [WRONG], [RIGHT], {"content": "valid"}, WRONG, ["cheap", "check"], None),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("row", ROWS)
async def test_in_every_row_money_log_and_reply_are_right(row: str, stream: bool) -> None:
    model, cheap, best, check, wanted, who, capped = ROWS[row]
    async with behind({"cheap": cheap, "best": best}, check) as (gateway, kit, asked):
        reply = await gateway.http.post("/v1/chat/completions", json=ask(model=model, stream=stream))
        assert reply.status_code == 200, reply.text
        record = kit.metrics.records[0]
        if stream:
            events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
            deltas = [json.loads(event)["choices"] for event in events]
            assert "".join(choice["delta"].get("content") or "" for one in deltas for choice in one) == wanted
        else:
            assert reply.json()["choices"][0]["message"]["content"] == wanted
            assert reply.headers.get("x-baton-capped") == capped
        assert asked == who
        assert record.capped == capped
        settled = [event.payload for event in kit.journal.events if event.kind == "settle"]
        assert [one["charged_nano"] for one in settled] == [record.cost_nano]
        spent = sum(step.cost_nano for step in record.steps) + sum(planned.cost_nano for planned in record.rounds)
        assert record.cost_nano == spent <= record.hold_nano
        assert await kit.open_nano(f"key:{record.key_id}") == 0
        dispatched = [event for event in kit.journal.events if event.kind == "dispatch"]
        assert len([one for one in dispatched if one.payload["worker"] != "conductor"]) == len(asked)
        assert len([one for step in record.steps for one in step.attempts if one.dispatched]) == len(asked)
