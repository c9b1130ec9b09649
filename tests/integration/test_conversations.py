"""Conversations that outlive a request, over real sockets, driven by OpenAI's SDK."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from gateway.errors import UpstreamOverloaded
from gateway.service.ports.request import WorkerCall
from tests.fakes.workers import FakeWorkers, Says
from tests.integration.test_api import served
from tests.integration.test_background import ended, working
from tests.integration.test_responses import ASKS, SUM, THOUGHT, ask, sent, stranger
from tests.kit import Kit
from tests.service.test_vendor_state import TWO, Vendor

HELLO = {"type": "message", "role": "user", "content": "hello"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "2"}


def texts(items: Any) -> list[str]:
    return [part.text for item in items for part in item.content]


async def test_the_sdk_makes_reads_changes_and_deletes_a_conversation() -> None:
    async with served(Kit()) as gateway:
        conversations = gateway.sdk.conversations
        made = await conversations.create(items=[HELLO], metadata={"topic": "primes"})  # type: ignore[list-item]
        assert (made.object, made.metadata, made.id[:5]) == ("conversation", {"topic": "primes"}, "conv_")
        assert await conversations.retrieve(made.id) == made
        changed = await conversations.update(made.id, metadata={"topic": "sums"})
        assert (changed.id, changed.metadata, changed.created_at) == (made.id, {"topic": "sums"}, made.created_at)
        gone = await conversations.delete(made.id)
        assert (gone.id, gone.object, gone.deleted) == (made.id, "conversation.deleted", True)
        with pytest.raises(openai.NotFoundError) as refused:
            await conversations.retrieve(made.id)
        assert refused.value.code == "conversation_not_found"
        assert (await gateway.http.post("/v1/conversations")).json()["metadata"] == {}


async def test_the_sdk_pages_adds_and_deletes_items() -> None:
    async with served(Kit()) as gateway:
        made = await gateway.sdk.conversations.create()
        items = gateway.sdk.conversations.items
        given: Any = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "input_text", "text": "sum, please"}]},
            {"type": "function_call", "call_id": "call_1", "name": "sum", "arguments": '{"a":1}'},
            RESULT,
            {"type": "reasoning", "summary": [], "encrypted_content": "opaque"},
            {"role": "assistant", "content": "it is 2", "phase": "final_answer"},
        ]
        added = await items.create(made.id, items=given)
        kinds = ["message", "message", "function_call", "function_call_output", "reasoning", "message"]
        assert [item.type for item in added.data] == kinds
        assert (added.first_id, added.last_id) == (added.data[0].id, added.data[-1].id)
        listed: Any = [item async for item in items.list(made.id, limit=4, order="asc")]
        assert listed == added.data
        assert [item async for item in items.list(made.id, limit=4)] == listed[::-1]
        first = await items.list(made.id, limit=4, order="asc")
        assert (first.has_more, first.last_id) == (True, listed[3].id)
        state: Any = await items.retrieve(
            listed[4].id, conversation_id=made.id, include=["reasoning.encrypted_content"]
        )
        hidden: Any = listed[4]
        assert (state.encrypted_content, hidden.encrypted_content) == ("opaque", None)
        assert (await items.delete(listed[0].id, conversation_id=made.id)).id == made.id
        with pytest.raises(openai.NotFoundError) as refused:
            await items.retrieve(listed[0].id, conversation_id=made.id)
        assert refused.value.code == "item_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_continue_a_conversation_whole_and_streamed(stream: bool) -> None:
    kit = Kit(workers={"alpha": [Says("101"), Says("103")]})
    async with served(kit) as gateway:
        name = (await gateway.sdk.conversations.create(items=[HELLO])).id  # type: ignore[list-item]
        for question in ("a prime above 100?", "and the next one?"):
            fields = ask(question, conversation=name, instructions="be brief")
            if stream:
                async with gateway.sdk.responses.stream(**fields) as asked:
                    reply: Any = await asked.get_final_response()
            else:
                reply = await gateway.sdk.responses.create(**fields)
            assert reply.conversation.id == name
        listed = [item async for item in gateway.sdk.conversations.items.list(name, order="asc")]
        assert texts(listed) == ["hello", "a prime above 100?", "101", "and the next one?", "103"]
        again: Any = await gateway.sdk.responses.retrieve(reply.id)
        assert again.conversation.id == name
        assert listed[-1].id == reply.output[0].id
    assert sent(kit) == [
        ("system", "be brief"),
        ("user", "hello"),
        ("user", "a prime above 100?"),
        ("assistant", "101"),
        ("user", "and the next one?"),
    ]


async def test_a_tools_round_trip_stays_in_the_conversation() -> None:
    kit = Kit(workers={"alpha": [ASKS, Says("it is 2"), Says("bye")]})
    async with served(kit) as gateway:
        name = (await gateway.sdk.conversations.create()).id
        where = {"conversation": {"id": name}, "tools": [SUM]}
        await gateway.sdk.responses.create(**ask(**where))
        unanswered = await gateway.http.post("/v1/responses", json=ask("well?", **where))
        assert unanswered.json()["error"]["code"] == "tool_output_not_found"
        await gateway.sdk.responses.create(**ask([RESULT], **where))
        listed: Any = [item async for item in gateway.sdk.conversations.items.list(name, order="asc")]
        assert [item.type for item in listed] == ["message", "function_call", "function_call_output", "message"]
        await gateway.sdk.conversations.items.delete(listed[1].id, conversation_id=name)
        await gateway.sdk.responses.create(**ask("and now?", **where))
    roles = [message["role"] for message in kit.workers.calls[-1].body["messages"]]
    assert roles == ["user", "assistant", "user"]  # a result without its call goes to no worker


async def test_a_vendors_state_stays_in_the_conversation_and_is_shown_to_who_asks() -> None:
    signed = {"extra_content": {"google": {"thought_signature": "s" * 60}}}
    called = {"id": "call_1", "type": "function", "function": {"name": "sum", "arguments": "{}"}, **signed}
    vendor = Vendor({"role": "assistant", "content": None, "thinking_blocks": [THOUGHT], "tool_calls": [called]})
    async with served(kit := Kit(workers=vendor, pools=TWO)) as gateway:
        name = (await gateway.sdk.conversations.create()).id
        where = {"conversation": name, "tools": [SUM], "model": "gemini"}
        first: Any = await gateway.sdk.responses.create(**ask("Think.") | where)
        kit.states.known.clear()
        plain = await gateway.sdk.conversations.items.list(name)
        whole = await gateway.sdk.conversations.items.list(name, include=["reasoning.encrypted_content"])
        shown = [[getattr(item, "encrypted_content", None) for item in page.data] for page in (plain, whole)]
        assert [len([state for state in states if state]) for states in shown] == [0, 1]
        await gateway.sdk.responses.create(**ask([{**RESULT, "call_id": first.output[-1].call_id}]) | where)
        own = vendor.sent()[0]
        assert own["thinking_blocks"] == [THOUGHT]
        assert own["tool_calls"][0]["extra_content"] == signed["extra_content"]


class Held(FakeWorkers):
    """Workers that answer once `gate` is set; `reached` is set at the first call."""

    def __init__(self) -> None:
        super().__init__({"alpha": [Says("first"), Says("second")]})
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    async def _pause(self, call: WorkerCall, delay_s: float) -> None:
        self.reached.set()
        await self.gate.wait()


async def test_a_second_turn_is_refused_while_one_is_made_and_served_by_a_retry() -> None:
    async with served(Kit(workers=(workers := Held()))) as gateway:
        name = (await gateway.sdk.conversations.create()).id
        first = asyncio.create_task(gateway.http.post("/v1/responses", json=ask("one", conversation=name)))
        await workers.reached.wait()
        for refused in (
            await gateway.http.post("/v1/responses", json=ask("two", conversation=name)),
            await gateway.http.post(f"/v1/conversations/{name}/items", json={"items": [HELLO]}),
        ):
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (409, "conversation_locked", "conversation")
            assert (refused.headers["x-should-retry"], refused.headers["retry-after"]) == ("true", "1")
        workers.gate.set()
        assert (await first).status_code == 200
        assert (await gateway.http.post("/v1/responses", json=ask("two", conversation=name))).status_code == 200
        listed = [item async for item in gateway.sdk.conversations.items.list(name, order="asc")]
        assert texts(listed) == ["one", "first", "two", "second"]


async def test_a_turn_that_fails_or_is_refused_adds_nothing_and_lets_the_next_one_in() -> None:
    kit = Kit(workers={"alpha": [UpstreamOverloaded("busy")] * 9})
    async with served(kit) as gateway:
        name = (await gateway.sdk.conversations.create(items=[HELLO])).id  # type: ignore[list-item]
        for fields in ({}, {"model": "gpt-9"}, {"tool_choice": "required"}, {}):
            asked = ask("one", conversation=name, model="alpha") | fields
            assert (await gateway.http.post("/v1/responses", json=asked)).status_code in (400, 404, 503)
        assert texts((await gateway.sdk.conversations.items.list(name)).data) == ["hello"]


async def test_a_response_that_is_not_stored_is_in_its_conversation() -> None:
    kit = Kit(workers={"alpha": Says("101")})
    async with served(kit) as gateway:
        name = (await gateway.sdk.conversations.create()).id
        made = await gateway.sdk.responses.create(**ask("a prime?", conversation=name, store=False))
        with pytest.raises(openai.NotFoundError):
            await gateway.sdk.responses.retrieve(made.id)
        listed = [item async for item in gateway.sdk.conversations.items.list(name, order="asc")]
        assert texts(listed) == ["a prime?", "101"]


async def test_a_response_in_the_background_is_a_turn_too() -> None:
    async with working(kit := Kit(workers={"alpha": Says("101")})) as gateway:
        name = (await gateway.sdk.conversations.create(items=[HELLO])).id  # type: ignore[list-item]
        fields = ask("a prime?", conversation=name, background=True)
        made = (await gateway.http.post("/v1/responses", json=fields)).json()
        assert made["conversation"] == {"id": name}
        assert await ended(gateway, made["id"]) == "completed"
        listed = [item async for item in gateway.sdk.conversations.items.list(name, order="asc")]
        assert texts(listed) == ["hello", "a prime?", "101"]
        assert sent(kit) == [("user", "hello"), ("user", "a prime?")]


async def test_a_conversation_belongs_to_its_key_and_needs_one_that_keeps_text() -> None:
    async with served(Kit()) as gateway:
        name = (await gateway.sdk.conversations.create()).id
        other = await stranger(gateway)
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/items"),
            ("GET", "/items/msg_1"),
            ("DELETE", "/items/msg_1"),
        ):
            reply = await gateway.http.request(method, f"/v1/conversations/{name}{path}", headers=other)
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "conversation_not_found")
        reply = await gateway.http.post("/v1/responses", json=ask(conversation=name), headers=other)
        assert (reply.status_code, reply.json()["error"]["param"]) == (404, "conversation")
    async with served(Kit(), log_mode="redacted") as gateway:
        for path, body in (("/v1/conversations", {}), ("/v1/responses", ask(conversation=name))):
            reply = await gateway.http.post(path, json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "store_unavailable")


async def test_secrets_are_taken_out_of_what_a_client_stores() -> None:
    async with served(Kit(workers={"alpha": Says("ok")})) as gateway:
        said: Any = [{"role": "user", "content": "my key is provider-secret-value"}]
        name = (await gateway.sdk.conversations.create(items=said)).id
        assert texts((await gateway.sdk.conversations.items.list(name)).data) == ["my key is [secret]"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [HELLO] * 21}, "items"),
        ("", {"items": "hello"}, "items"),
        ("", {"items": [{"role": "nobody", "content": "x"}]}, "items[0].role"),
        ("", {"items": [{"type": "web_search_call", "id": "ws_1"}]}, "items[0].type"),
        ("", {"items": [HELLO, {"type": "item_reference", "id": "msg_1"}]}, "items[1].type"),
        ("", {"metadata": {"a": 1}}, "metadata"),
        ("", {"name": "x"}, "name"),
        ("/{}", {}, "metadata"),
        ("/{}/items", {}, "items"),
        ("/{}/items", {"items": []}, "items"),
        ("/{}/items?include=everything", {"items": [HELLO]}, "include"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str) -> None:
    async with served(Kit()) as gateway:
        name = (await gateway.sdk.conversations.create()).id
        reply = await gateway.http.post(f"/v1/conversations{path.format(name)}", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


async def test_what_does_not_go_with_a_conversation_is_refused() -> None:
    async with served(Kit(), body_bytes_max=4_000) as gateway:
        name = (await gateway.sdk.conversations.create()).id
        both = await gateway.http.post("/v1/responses", json=ask(conversation=name, previous_response_id="resp_1"))
        assert both.json()["error"]["code"] == "mutually_exclusive_parameters"
        for wrong in (7, {"id": 7}, {}, {"id": name, "more": 1}):
            reply = await gateway.http.post("/v1/responses", json=ask(conversation=wrong))
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "conversation")
        long = {"items": [{"role": "user", "content": "x" * 3_000}]}
        assert (await gateway.http.post(f"/v1/conversations/{name}/items", json=long)).status_code == 200
        assert (await gateway.http.post(f"/v1/conversations/{name}/items", json=long)).status_code == 413
        for query in ("limit=0", "limit=101", "order=up", "include=all"):
            reply = await gateway.http.get(f"/v1/conversations/{name}/items?{query}")
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, query.split("=")[0])
        reply = await gateway.http.get(f"/v1/conversations/{name}/items?after=msg_1")
        assert reply.status_code == 404


async def test_an_item_of_the_conversation_can_be_referred_to() -> None:
    kit = Kit(workers={"alpha": Says("ok")})
    async with served(kit) as gateway:
        name = (await gateway.sdk.conversations.create(items=[HELLO])).id  # type: ignore[list-item]
        item = (await gateway.sdk.conversations.items.list(name)).data[0]
        reference = {"type": "item_reference", "id": item.id}
        counted = await gateway.http.post("/v1/responses/input_tokens", json=ask([reference], conversation=name))
        assert counted.status_code == 200
        await gateway.sdk.responses.create(**ask([reference], conversation=name))
    assert sent(kit) == [("user", "hello"), ("user", "hello")]
