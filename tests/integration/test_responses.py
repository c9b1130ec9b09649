"""The Responses API over real sockets, driven by OpenAI's SDK."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from gateway.errors import UpstreamRateLimited
from tests.fakes.workers import Says
from tests.integration.test_api import Served, served
from tests.kit import Kit, plan
from tests.service.test_vendor_state import TWO, Vendor
from tests.waiting import until

SUM = {"type": "function", "name": "sum", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "sum", "arguments": '{"a":1}'}}
ASKS = Says(None, tool_calls=[CALL], finish_reason="tool_calls")


def ask(text: Any = "What is 6 times 7?", **fields: Any) -> dict[str, Any]:
    return {"model": "baton", "input": text, **fields}


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each is announced under its own name."""
    found = []
    for frame in reply.text.strip().split("\n\n"):
        if not frame.startswith(":"):
            name, data = frame.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
    return found


def sent(kit: Kit) -> list[tuple[str, Any]]:
    """What the last worker was sent, as (role, content)."""
    messages: Sequence[Mapping[str, Any]] = kit.workers.calls[-1].body["messages"]
    return [(message["role"], message["content"]) for message in messages]


async def stranger(gateway: Served) -> dict[str, str]:
    _, key = await gateway.keys.create_key("stranger")
    return {"authorization": f"Bearer {key}"}


async def _kinds(stream: Any, seen: list[str]) -> None:
    async for event in stream:
        seen.append(event.type)


async def test_a_response_is_planned_and_told_as_a_chat_is() -> None:
    kit = Kit((plan(("atlas", None, []), ("birch", None, [0])),), {"alpha": Says("draft"), "beta": Says("42")})
    async with served(kit) as gateway:
        raw = await gateway.sdk.responses.with_raw_response.create(**ask(instructions="be brief"))
        made = raw.parse()
        assert made.output_text == "42"
        assert made.status == "completed"
        assert made.instructions == "be brief"
        assert made.usage is not None
        assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (20, 10, 30)
        assert raw.headers["x-baton-workers"] == "alpha,beta"
        assert made.id == f"resp_{raw.headers['x-baton-rollout-id'].replace('-', '')}"
        assert await gateway.sdk.responses.retrieve(made.id) == made
    assert await kit.open_nano() == 0
    assert kit.metrics.records[0].cost_nano > 0


async def test_the_sdks_stream_helper_sees_every_event_and_the_same_response() -> None:
    kit = Kit(workers={"alpha": Says("one two three")})
    async with served(kit) as gateway:
        async with gateway.sdk.responses.stream(**ask()) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            *["response.output_text.delta"] * 3,
            "response.output_text.done", "response.content_part.done", "response.output_item.done",
            "response.completed",
        ]  # fmt: skip
        assert final.output_text == "one two three"
        stored = await gateway.sdk.responses.retrieve(final.id)
        assert stored.output_text == final.output_text
        assert stored.usage == final.usage
        plain = await gateway.http.post("/v1/responses", json=ask(stream=True))
        assert "[DONE]" not in plain.text
        assert plain.text.rindex(": baton {") < plain.text.rindex("event: response.completed")
        assert [event["sequence_number"] for event in events(plain)] == list(range(11))


class Answer(BaseModel):
    """A structured answer."""

    value: int


async def test_structured_output_is_parsed_by_the_sdk() -> None:
    kit = Kit(workers={"alpha": Says('{"value": 42}')})
    async with served(kit) as gateway:
        parsed = await gateway.sdk.responses.parse(**ask(), text_format=Answer)
        assert parsed.output_parsed == Answer(value=42)
    wanted = kit.workers.calls[0].body["response_format"]
    assert wanted["type"] == "json_schema"
    assert wanted["json_schema"]["name"] == "Answer"
    assert wanted["json_schema"]["schema"]["properties"]["value"]["type"] == "integer"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tools_round_trip_over_previous_response_id(stream: bool) -> None:
    kit = Kit(workers={"alpha": [ASKS, Says("it is 2")]})
    async with served(kit) as gateway:
        if stream:
            async with gateway.sdk.responses.stream(**ask(tools=[SUM])) as asked:
                first: Any = await asked.get_final_response()
        else:
            first = await gateway.sdk.responses.create(**ask(tools=[SUM]))
        (call,) = first.output
        assert (call.type, call.call_id, call.name, call.arguments) == ("function_call", "call_1", "sum", '{"a":1}')
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        second = await gateway.sdk.responses.create(**ask([result], tools=[SUM], previous_response_id=first.id))
        assert second.output_text == "it is 2"
        assert second.previous_response_id == first.id
    messages = kit.workers.calls[-1].body["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == "call_1"
    assert kit.workers.calls[0].body["tools"][0]["function"]["name"] == "sum"


async def test_a_turn_that_goes_on_goes_back_to_the_worker_that_asked() -> None:
    kit = Kit((plan(("birch", None, [])), plan(("atlas", None, []))), {"beta": [ASKS, Says("2"), Says("3")]})
    async with served(kit) as gateway:
        be = {"instructions": "be brief", "tools": [SUM]}
        first = await gateway.sdk.responses.create(**ask(**be))
        result = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
        second = await gateway.sdk.responses.create(**ask([result], previous_response_id=first.id, **be))
        third = await gateway.sdk.responses.create(**ask("one more", previous_response_id=second.id, **be))
        assert [second.output_text, third.output_text] == ["2", "3"]
    assert [call.worker.name for call in kit.workers.calls] == ["beta"] * 3
    assert len(kit.conductor.calls) == 1


async def test_a_conversation_can_be_sent_whole_and_kept_nowhere() -> None:
    kit = Kit(workers={"alpha": [ASKS, Says("it is 2")]})
    async with served(kit) as gateway:
        first = await gateway.sdk.responses.create(**ask(tools=[SUM], store=False))
        assert first.model_dump()["store"] is False
        items: list[Any] = [{"role": "user", "content": "What is 1 + 1?"}]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append({"type": "function_call_output", "call_id": "call_1", "output": "2"})
        second = await gateway.sdk.responses.create(**ask(items, tools=[SUM], store=False))
        assert second.output_text == "it is 2"
        with pytest.raises(openai.NotFoundError):
            await gateway.sdk.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as refused:
            await gateway.sdk.responses.create(**ask(previous_response_id=first.id))
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
        assert "not stored" in refused.value.message


async def test_instructions_hold_for_one_response_only() -> None:
    kit = Kit(workers={"alpha": [Says("ahoy"), Says("well"), Says("fine")]})
    async with served(kit) as gateway:
        first = await gateway.sdk.responses.create(**ask("one", instructions="talk like a pirate"))
        second = await gateway.sdk.responses.create(**ask("two", previous_response_id=first.id))
        assert second.instructions is None
        assert sent(kit) == [("user", "one"), ("assistant", "ahoy"), ("user", "two")]
        await gateway.sdk.responses.create(**ask("three", previous_response_id=second.id, instructions="be brief"))
        assert sent(kit)[0] == ("system", "be brief")
        assert [role for role, _ in sent(kit)] == ["system", "user", "assistant", "user", "assistant", "user"]


async def test_input_items_are_paged_and_can_be_referred_to() -> None:
    kit = Kit(workers={"alpha": [Says("a1"), Says("a2"), Says("a3")]})
    async with served(kit) as gateway:
        first = await gateway.sdk.responses.create(**ask("q1"))
        second = await gateway.sdk.responses.create(**ask("q2", previous_response_id=first.id))
        pages = gateway.sdk.responses.input_items.list(second.id, limit=1, order="asc")
        found: list[Any] = [item async for item in pages]
        texts = [item.content[0].text for item in found]
        assert texts == ["q1", "a1", "q2"]
        newest = (await gateway.http.get(f"/v1/responses/{second.id}/input_items")).json()
        assert [item["content"][0]["text"] for item in newest["data"]] == ["q2", "a1", "q1"]
        assert newest["has_more"] is False
        said = second.output[0].id
        references = [{"type": "item_reference", "id": found[2].id}, {"id": said}, {"role": "user", "content": "q3"}]
        await gateway.sdk.responses.create(**ask(references))
        assert sent(kit) == [("user", "q2"), ("assistant", "a2"), ("user", "q3")]
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")):
            bad = await gateway.http.get(f"/v1/responses/{second.id}/input_items?{query}")
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, param)


async def test_a_response_is_there_for_its_own_key_only() -> None:
    async with served(Kit(workers={"alpha": Says("mine")})) as gateway:
        made = await gateway.sdk.responses.create(**ask())
        other, path = await stranger(gateway), f"/v1/responses/{made.id}"
        for method, url in (
            ("GET", path), ("DELETE", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel"),
        ):  # fmt: skip
            foreign = await gateway.http.request(method, url, headers=other)
            unknown = await gateway.http.request(method, url.replace(made.id, f"resp_{'0' * 32}"))
            assert foreign.status_code == unknown.status_code == 404
            assert foreign.json()["error"]["code"] == "response_not_found"
            assert foreign.json()["error"]["message"].replace(made.id, "") == unknown.json()["error"][
                "message"
            ].replace(f"resp_{'0' * 32}", "")
            assert (await gateway.http.request(method, url, headers={"authorization": ""})).status_code == 401
        calls = len(gateway.kit.workers.calls)
        carried = await gateway.http.post("/v1/responses", json=ask(previous_response_id=made.id), headers=other)
        assert (carried.status_code, carried.json()["error"]["code"]) == (400, "previous_response_not_found")
        assert "not stored" not in carried.text
        reference = ask([{"type": "item_reference", "id": made.output[0].id}])
        referred = await gateway.http.post("/v1/responses", json=reference, headers=other)
        assert (referred.status_code, referred.json()["error"]["param"]) == (404, "input[0].id")
        assert len(gateway.kit.workers.calls) == calls
        assert (await gateway.sdk.responses.retrieve(made.id)).output_text == "mine"


async def test_deleting_takes_the_text_out_of_the_log_and_leaves_the_cost() -> None:
    async with served(Kit(workers={"alpha": Says("forget me")})) as gateway:
        made = await gateway.sdk.responses.create(**ask("remember nothing", metadata={"task_type": "sums"}))
        before = (await gateway.http.get(f"/v1/rollouts/{made.id}")).json()
        assert "forget me" in json.dumps(before)
        gone = await gateway.http.delete(f"/v1/responses/{made.id}")
        assert gone.json() == {"id": made.id, "object": "response", "deleted": True}
        for reply in (
            await gateway.http.get(f"/v1/responses/{made.id}"),
            await gateway.http.delete(f"/v1/responses/{made.id}"),
            await gateway.http.get(f"/v1/responses/{made.id}/input_items"),
        ):
            assert reply.status_code == 404
        with pytest.raises(openai.BadRequestError):
            await gateway.sdk.responses.create(**ask(previous_response_id=made.id))
        after = (await gateway.http.get(f"/v1/rollouts/{made.id}")).json()
        assert "forget me" not in json.dumps(after)
        assert "remember nothing" not in json.dumps(after)
        assert (after["cost_nano"], after["train"]) == (before["cost_nano"], False)
        assert after["steps"][0]["worker"] == "alpha"


@pytest.mark.parametrize("mode", ["metadata", "redacted"])
async def test_a_key_that_logs_no_text_as_sent_stores_nothing_and_says_so(mode: str) -> None:
    async with served(Kit(), log_mode=mode) as gateway:
        with pytest.raises(openai.BadRequestError) as refused:
            await gateway.sdk.responses.create(**ask(store=True))
        assert (refused.value.code, refused.value.param) == ("store_unavailable", "store")
        assert gateway.kit.workers.calls == []
        made = await gateway.sdk.responses.create(**ask())
        assert made.model_dump()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await gateway.sdk.responses.retrieve(made.id)


async def test_secrets_in_a_stored_response_are_gone_when_it_is_read_back() -> None:
    async with served(Kit()) as gateway:
        made = await gateway.sdk.responses.create(**ask("my key is sk-0123456789abcdef0123456789"))
        items = (await gateway.http.get(f"/v1/responses/{made.id}/input_items")).json()
        assert items["data"][0]["content"][0]["text"] == "my key is [secret]"


async def test_an_upstream_that_dies_midway_fails_the_response_and_the_sdk_raises() -> None:
    kit = Kit(workers={"alpha": Says("one two three", dies_after=2)})
    async with served(kit) as gateway:
        reply = await gateway.http.post("/v1/responses", json=ask(model="alpha", stream=True))
        broken, error = events(reply)[-2:]
        assert broken["type"] == "response.failed"
        assert broken["response"]["status"] == "failed"
        assert broken["response"]["error"]["code"] == "server_error"
        assert (error["type"], error["error"]["code"]) == ("error", "upstream_protocol")
        stream = await gateway.sdk.responses.create(**ask(model="alpha", stream=True))
        seen: list[str] = []
        with pytest.raises(openai.APIError):
            await _kinds(stream, seen)
        assert seen[-1] == "response.failed"
        stored = await gateway.sdk.responses.retrieve(broken["response"]["id"])
        assert (stored.status, stored.error and stored.error.code) == ("failed", "server_error")
        with pytest.raises(openai.BadRequestError) as refused:
            await gateway.sdk.responses.create(**ask(previous_response_id=stored.id))
        assert refused.value.code == "previous_response_failed"
    assert await kit.open_nano() == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_byte_has_its_own_status(stream: bool) -> None:
    kit = Kit(workers={"alpha": UpstreamRateLimited("slow down", retryable=False, upstream_status=429)})
    async with served(kit) as gateway:
        reply = await gateway.http.post("/v1/responses", json=ask(model="alpha", stream=stream))
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "upstream_rate_limited")
        assert "x-baton-rollout-id" in reply.headers


async def test_a_slow_plan_opens_the_response_and_keeps_the_connection_alive() -> None:
    late = Says("late", delay_s=0.3)
    kit = Kit(workers={"alpha": [late, UpstreamRateLimited("slow", retryable=False)]})
    async with served(kit, keepalive_s=0.05) as gateway:
        alive = await gateway.http.post("/v1/responses", json=ask(stream=True))
        assert alive.text.startswith("event: response.created\n")
        assert alive.text.index(": baton is working") < alive.text.index("event: response.output_item.added")
        assert events(alive)[-1]["type"] == "response.completed"


async def test_an_answer_cut_at_its_bound_is_incomplete() -> None:
    kit = Kit(workers={"alpha": Says("one two", finish_reason="length")})
    async with served(kit) as gateway:
        made = await gateway.sdk.responses.create(**ask(max_output_tokens=16))
        assert made.status == "incomplete"
        assert made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        streamed = await gateway.http.post("/v1/responses", json=ask(max_output_tokens=16, stream=True))
        assert events(streamed)[-1]["type"] == "response.incomplete"
    assert kit.workers.calls[0].body["max_completion_tokens"] == 16


async def test_a_client_that_leaves_stops_the_work_and_finds_a_cancelled_response() -> None:
    kit = Kit(workers={"alpha": Says(delay_s=60)})
    async with served(kit, keepalive_s=0.05) as gateway:
        async with gateway.http.stream("POST", "/v1/responses", json=ask(stream=True)) as reply:
            line = await anext(reply.aiter_lines())
            assert line == "event: response.created"
        await until(lambda: not kit.completer.in_flight)
        name = kit.metrics.records[-1].completion_id
        assert (await gateway.sdk.responses.retrieve(name)).status == "cancelled"
    assert await kit.open_nano() == 0


async def test_a_response_is_judged_by_its_id_and_graded_by_task() -> None:
    async with served(Kit()) as gateway:
        made = await gateway.sdk.responses.create(**ask(metadata={"task_type": "sums"}))
        assert made.metadata == {"task_type": "sums"}
        judged = await gateway.http.post("/v1/outcomes", json={"completion_id": made.id, "value": True})
        assert judged.status_code == 201
        rollout = (await gateway.http.get(f"/v1/rollouts/{made.id}")).json()
        assert (rollout["task_type"], rollout["completion_id"]) == ("sums", made.id)
        assert rollout["request"]["messages"] == [{"role": "user", "content": "What is 6 times 7?"}]


async def test_hosted_tools_are_left_out_and_named() -> None:
    kit = Kit()
    async with served(kit) as gateway:
        reply = await gateway.http.post("/v1/responses", json=ask(tools=[{"type": "web_search"}, {"type": "mcp"}]))
    assert (reply.status_code, reply.headers["x-baton-left-out"]) == (200, "web_search, mcp")
    assert "tools" not in kit.workers.calls[0].body


async def test_unsupported_properties_are_refused_by_name_before_any_spending() -> None:
    kit = Kit()
    async with served(kit) as gateway:
        for body, status, param in (
            (ask(background=True, store=False), 400, "background"),
            (ask(tools=[{"type": "custom"}]), 400, "tools[0].name"),
            (ask(conversation="conv_1"), 404, "conversation"),
            (ask(messages=[]), 400, "messages"),
            (ask(api_base="http://evil"), 400, "api_base"),
            (ask(model="gpt-9"), 404, "model"),
            (ask([{"type": "item_reference", "id": "msg_1"}]), 404, "input[0].id"),
            ({"model": "baton"}, 400, "input"),
        ):
            reply = await gateway.http.post("/v1/responses", json=body)
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (status, param)
            assert set(error) == {"message", "type", "param", "code"}
        dropped = await gateway.http.post("/v1/responses", json=ask(seed=1))
        assert dropped.headers["x-baton-dropped-fields"] == "seed"
        made = dropped.json()["id"]
        cancelled = await gateway.http.post(f"/v1/responses/{made}/cancel")
        assert (cancelled.status_code, cancelled.json()["error"]["code"]) == (400, "not_cancellable")
        for query in ("stream=true", "starting_after=3", "include=everything"):
            assert (await gateway.http.get(f"/v1/responses/{made}?{query}")).status_code == 400
        assert (await gateway.http.get(f"/v1/responses/{made}?include=message.output_text.logprobs")).status_code == 200
        assert len(kit.workers.calls) == 1


async def test_obfuscation_pads_deltas_where_it_is_asked_for() -> None:
    async with served(Kit(workers={"alpha": Says("one two")})) as gateway:
        padded = ask(stream=True, stream_options={"include_obfuscation": True})
        told = events(await gateway.http.post("/v1/responses", json=padded))
        with_padding = [event["type"] for event in told if event.get("obfuscation")]
        assert with_padding == ["response.output_text.delta"] * 2
        plain = events(await gateway.http.post("/v1/responses", json=ask(stream=True)))
        assert not any("obfuscation" in event for event in plain)


async def test_an_error_about_the_chat_request_is_said_in_this_apis_words() -> None:
    async with served(Kit()) as gateway:
        image = {"type": "input_image", "image_url": "https://pictures.example/a.png"}
        body = ask([{"role": "user", "content": "see"}, {"role": "user", "content": [image]}])
        reply = await gateway.http.post("/v1/responses", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input[1].content[0].image_url")
        assert "messages[" not in reply.text


async def test_a_conversation_may_not_outgrow_what_one_request_may_send() -> None:
    kit = Kit()
    async with served(kit, body_bytes_max=3_000) as gateway:
        first = await gateway.sdk.responses.create(**ask("x" * 2_000))
        item = await anext(aiter(gateway.sdk.responses.input_items.list(first.id)))
        reference = {"type": "item_reference", "id": item.id}
        for body in (
            ask("y" * 2_000, previous_response_id=first.id),
            ask([reference, {"role": "user", "content": "y" * 2_000}]),
        ):
            grown = await gateway.http.post("/v1/responses", json=body)
            assert (grown.status_code, grown.json()["error"]["code"]) == (413, "request_too_large")
        assert (await gateway.sdk.responses.create(**ask("y", previous_response_id=first.id))).status == "completed"
    assert len(kit.workers.calls) == 2


async def test_references_reach_so_far_and_no_further() -> None:
    async with served(Kit()) as gateway:
        names = [f"msg_{number:032x}000000" for number in range(33)]
        reply = await gateway.http.post("/v1/responses", json=ask([{"id": name} for name in names]))
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "too_many_references")


async def test_budgets_and_caps_hold_here_too() -> None:
    async with served(Kit(), budget_usd="0.000001") as gateway:
        reply = await gateway.http.post("/v1/responses", json=ask(model="alpha"))
        assert (reply.status_code, reply.headers["x-should-retry"]) == (429, "false")
    async with served(Kit((plan(("atlas", None, []), ("birch", None, [0])),))) as gateway:
        capped = await gateway.http.post("/v1/responses", json=ask(), headers={"x-baton-max-calls": "1"})
        assert capped.headers["x-baton-capped"] == "calls"
        assert capped.json()["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_idempotency_key_makes_one_response(stream: bool) -> None:
    kit = Kit()
    async with served(kit) as gateway:
        key = {"idempotency-key": "one"}
        first = await gateway.http.post("/v1/responses", json=ask(stream=stream), headers=key)
        again = await gateway.http.post("/v1/responses", json=ask(stream=stream), headers=key)
        assert again.content == first.content
        other = await gateway.http.post("/v1/responses", json=ask("else"), headers=key)
        assert other.status_code == 422
    assert len(kit.workers.calls) == 1


async def test_a_response_that_is_not_in_the_database_yet_is_waited_for() -> None:
    kit = Kit(workers={"alpha": [Says("one"), Says("two")]})
    late: list[Any] = []
    async with served(kit) as gateway:
        kit.journal._sink = late.append  # the shipper is behind
        made = await gateway.sdk.responses.create(**ask())

        async def ship() -> None:
            for event in late:
                kit.store.ingest(event)
            late.clear()

        kit.journal.shipped = ship  # type: ignore[method-assign]
        second = await gateway.sdk.responses.create(**ask("more", previous_response_id=made.id))
        assert second.output_text == "two"

        async def never() -> None:
            raise TimeoutError

        kit.journal.shipped = never  # type: ignore[method-assign]
        behind = await gateway.http.get(f"/v1/responses/{second.id}")
        assert (behind.status_code, behind.json()["error"]["code"]) == (503, "store_behind")
        assert behind.headers["retry-after"] == "2"
        unnamed = await gateway.http.get("/v1/responses/resp_1")
        assert unnamed.status_code == 404  # what no response can be called is not waited for


async def test_a_vendors_parameters_reach_a_worker_that_takes_them() -> None:
    async with served(kit := Kit()) as gateway:
        raw = await gateway.sdk.responses.with_raw_response.create(**ask(extra_body={"top_k": 5, "odd": 1}))
        assert raw.headers["x-baton-dropped-fields"] == "odd"
        assert kit.workers.calls[-1].body["top_k"] == 5
        with pytest.raises(openai.BadRequestError) as refused:
            await gateway.sdk.responses.create(**ask(extra_body={"top_k": "many"}))
        assert refused.value.param == "top_k"


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "c2lnbmVk"}
SEALED = ["reasoning.encrypted_content"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("calls", [False, True])
async def test_encrypted_reasoning_goes_back_to_its_vendor_alone(streams: bool, calls: bool) -> None:
    signed = {"extra_content": {"google": {"thought_signature": "s" * 60}}}
    called = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **signed}
    text = {"tool_calls": [called]} if calls else {"content": "well"}
    message = {"role": "assistant", "reasoning_content": "hm", "thinking_blocks": [THOUGHT], **text}
    deltas = {"reasoning_content": "hm", "thinking_blocks": [THOUGHT]}, text
    vendor = Vendor(message, tuple({**delta, **_indexed(delta)} for delta in deltas))
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    kit = Kit(workers=vendor, pools=TWO)
    async with served(kit) as gateway:
        body = {"include": SEALED, "store": False, "model": "gemini", "tools": [tool]}
        items = await _items(gateway, {**ask("Think."), **body}, streams=streams)
        reasoning = [item for item in items if item["type"] == "reasoning"]
        assert len(reasoning) == 1
        assert reasoning[0]["encrypted_content"].startswith("btn1.")
        kit.states.known.clear()
        results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "1"}
                   for item in items if item["type"] == "function_call"]  # fmt: skip
        history = [{"role": "user", "content": "Think."}, *items, *results, {"role": "user", "content": "So?"}]
        for model, own in (("gemini", True), ("claude", False)):
            asked = {**ask(history), **body, "model": model}
            assert (await gateway.http.post("/v1/responses", json=asked)).status_code == 200
            sent = vendor.sent()[0]
            assert (sent.get("thinking_blocks") == [THOUGHT]) is own
            assert "hm" not in str(sent) or own
            if calls:
                assert (sent["tool_calls"][0].get("extra_content") == signed["extra_content"]) is own
        foreign = [{**item, "encrypted_content": "gAAAA"} if item["type"] == "reasoning" else item for item in items]
        asked = {**ask([*history[:1], *foreign, *results, *history[-1:]]), **body}
        assert (await gateway.http.post("/v1/responses", json=asked)).status_code == 200
        plain = await _items(gateway, ask("Think."), streams=streams)
    assert all("encrypted_content" not in item for item in plain)


def _indexed(delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, **call} for call in delta["tool_calls"]]} if "tool_calls" in delta else {}


async def _items(gateway: Served, body: Mapping[str, Any], *, streams: bool) -> list[dict[str, Any]]:
    """The items of a reply, in a stream those that its events end."""
    reply = await gateway.http.post("/v1/responses", json={**body, "stream": streams})
    assert reply.status_code == 200, reply.text
    if not streams:
        return list(reply.json()["output"])
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    done = {one["output_index"]: one["item"] for one in events if one["type"] == "response.output_item.done"}
    assert [done[at] for at in sorted(done)] == events[-1]["response"]["output"]
    return [done[at] for at in sorted(done)]
