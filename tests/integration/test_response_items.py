"""Items of the Responses API on their way from a worker to a client and back: order, identity, phases, citations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.openai.responses.events import Events
from gateway.core.openai.responses.outbound import Chunks
from gateway.core.openai.responses.reply import Head, output_items
from tests.integration.test_api import served
from tests.integration.test_responses import SUM, ask
from tests.integration.test_responses_workers import WEB, body_of, responded, thinking
from tests.kit import Kit
from tests.service.test_answers import Raw
from tests.upstreams.vendor import Script

CITED = {"type": "file_citation", "file_id": "file_7", "filename": "tides.txt", "index": 9}
LINKED = {"type": "url_citation", "url": "https://tides.test/a", "title": "Tides", "start_index": 0, "end_index": 4}
BOXED = {
    **{"type": "container_file_citation", "container_id": "cntr_1", "file_id": "cfile_2", "filename": "plot.png"},
    **{"start_index": 1, "end_index": 3},
}
SHAPE = {"type": "object", "properties": {"metres": {"type": "number"}}, "required": ["metres"]}
FORMAT = {"type": "json_schema", "name": "tide", "schema": SHAPE | {"additionalProperties": False}, "strict": True}
SEARCHED = {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "tide tables"}}


def wrote(text: str, *annotations: dict[str, Any], phase: str | None = None, number: int = 0) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": list(annotations), "logprobs": []}
    message = {"id": f"msg_w{number}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return message | ({} if phase is None else {"phase": phase})


def thought(number: int, *summary: str, sealed: str | None = None) -> dict[str, Any]:
    parts = [{"type": "summary_text", "text": text} for text in summary]
    state = {} if sealed is None else {"encrypted_content": sealed}
    return {"id": f"rs_w{number}", "type": "reasoning", "summary": parts, **state}


LONG_WAY = (
    thought(1, "**Looking**", "**Comparing**", sealed="gAAAAone"),
    wrote("I look it up.", phase="commentary", number=1),
    {"id": "ws_a", **SEARCHED},
    thought(2),
    {"id": "ws_b", **SEARCHED},
    wrote("Four metres at noon.", CITED, LINKED, BOXED, phase="final_answer", number=2),
)


def shown(items: list[dict[str, Any]]) -> list[Any]:
    """What of the items a person sees: the kind of each, with its phase and its texts."""
    texts = ([part["text"] for part in (*item.get("content", ()), *item.get("summary", ()))] for item in items)
    return [(item["type"], item.get("phase"), text) for item, text in zip(items, texts, strict=True)]


@pytest.mark.parametrize("stream", [False, True])
async def test_items_come_in_the_workers_order_each_by_itself(stream: bool) -> None:
    async with thinking() as (gateway, upstream):
        upstream.before, upstream.script = list(LONG_WAY), Script()
        response = await responded(gateway, ask("When?", model="thinker", tools=[WEB]), stream=stream)
    assert shown(response["output"]) == [
        ("reasoning", None, ["**Looking**", "**Comparing**"]),
        ("message", "commentary", ["I look it up."]),
        ("web_search_call", None, []),
        ("reasoning", None, []),
        ("web_search_call", None, []),
        ("message", "final_answer", ["Four metres at noon."]),
    ]
    assert response["output"][-1]["content"][0]["annotations"] == [CITED, LINKED, BOXED]
    assert len({item["id"] for item in response["output"]}) == len(LONG_WAY)


async def test_a_stream_has_the_events_of_the_workers_items() -> None:
    async with thinking() as (gateway, upstream):
        upstream.before, upstream.script = list(LONG_WAY), Script()
        asked = ask("When?", model="thinker", tools=[WEB], stream=True)
        reply = await gateway.http.post("/v1/responses", json=asked)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    of_item: dict[int, list[str]] = {}
    for event in events:
        kinds = of_item.setdefault(event.get("output_index", -1), [])
        if not kinds or kinds[-1] != event["type"]:
            kinds.append(event["type"].removeprefix("response."))
    summary = [f"reasoning_summary_{end}" for end in ("part.added", "text.delta", "text.done", "part.done")]
    assert of_item[0] == ["output_item.added", *summary, *summary, "output_item.done"]
    searching = [f"web_search_call.{state}" for state in ("in_progress", "searching", "completed")]
    assert of_item[2] == of_item[4] == ["output_item.added", *searching, "output_item.done"]
    assert of_item[3] == ["output_item.added", "output_item.done"]
    assert of_item[5].count("output_text.annotation.added") == 3
    begun = {one["output_index"]: one["item"] for one in events if one["type"] == "response.output_item.added"}
    assert [begun[at].get("phase") for at in (1, 5)] == ["commentary", "final_answer"]
    ended = [one["output_index"] for one in events if one["type"] == "response.output_item.done"]
    assert ended == sorted(ended)
    ids = {at: item["id"] for at, item in begun.items()}
    assert all(one["item_id"] == ids[one["output_index"]] for one in events if "item_id" in one)


@pytest.mark.parametrize("by_id", [False, True])
async def test_items_go_back_to_the_worker_as_they_came(by_id: bool) -> None:
    async with thinking() as (gateway, upstream):
        upstream.before, upstream.script = list(LONG_WAY), Script()
        asked = ask("When?", model="thinker", tools=[WEB], include=["reasoning.encrypted_content"])
        first = await responded(gateway, asked, stream=True)
        upstream.before, upstream.script = [], Script(text="At six.")
        turn: list[Any] = [{"role": "user", "content": "And then?"}]
        given = {"previous_response_id": first["id"]} if by_id else {}
        items = turn if by_id else [{"role": "user", "content": "When?"}, *first["output"], *turn]
        await responded(gateway, ask(items, model="thinker", tools=[WEB], **given), stream=False)
        sent = body_of(upstream)["input"]
    kinds = [(item["type"], item.get("phase")) for item in sent]
    assert kinds == [
        ("message", None),
        ("reasoning", None),
        ("message", "commentary"),
        ("web_search_call", None),
        ("web_search_call", None),
        ("message", "final_answer"),
        ("message", None),
    ]
    assert [item["id"] for item in sent if item["type"] == "web_search_call"] == ["ws_a", "ws_b"]
    again = sent[1]
    assert (again["id"], again["encrypted_content"]) == ("rs_w1", "gAAAAone")
    assert [part["text"] for part in again["summary"]] == ["**Looking**", "**Comparing**"]


async def test_a_chat_client_gets_one_text_and_no_marks() -> None:
    async with thinking() as (gateway, upstream):
        upstream.before, upstream.script = list(LONG_WAY), Script()
        chat = {"model": "thinker", "messages": [{"role": "user", "content": "When?"}]}
        whole = (await gateway.http.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]
        streamed = await gateway.http.post("/v1/chat/completions", json=chat | {"stream": True})
    assert whole["content"] == "I look it up.Four metres at noon."
    assert whole["reasoning_content"] == "**Looking**\n\n**Comparing**"
    assert whole["annotations"][0] == {
        "type": "file_citation",
        "file_citation": {name: value for name, value in CITED.items() if name != "type"},
    }
    assert "output_items" not in whole
    assert "output_items" not in streamed.text
    assert "output_events" not in streamed.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_is_checked_on_the_message_that_answers(stream: bool) -> None:
    async with thinking() as (gateway, upstream):
        upstream.before = [wrote('{"metres": 4}', number=1), wrote('{"metres": 5}', number=2)]
        upstream.script = Script()
        asked = {**ask("How high?", model="thinker"), "text": {"format": FORMAT}}
        response = await responded(gateway, asked, stream=stream)
        assert [item["content"][0]["text"] for item in response["output"]] == ['{"metres": 4}', '{"metres": 5}']
        assert len(upstream.requests) == 1
        named = {name: value for name, value in FORMAT.items() if name != "type"}
        chat = {
            "model": "thinker",
            "messages": [{"role": "user", "content": "How high?"}],
            "response_format": {"type": "json_schema", "json_schema": named},
        }
        reply = await gateway.http.post("/v1/chat/completions", json=chat)
        assert json.loads(reply.json()["choices"][0]["message"]["content"]) == {"metres": 5}
        upstream.before = [wrote('{"metres": 4}', number=1), wrote("Well.", number=2)]
        refused = await gateway.http.post("/v1/responses", json=asked)
        assert refused.json()["error"]["code"] == "invalid_structured_output"


async def test_a_reply_of_a_hosted_tool_alone_has_no_message() -> None:
    async with thinking() as (gateway, upstream):
        upstream.before, upstream.script = [{"id": "ws_a", **SEARCHED}], Script()
        for stream in (False, True):
            response = await responded(gateway, ask("Look.", model="thinker", tools=[WEB]), stream=stream)
            assert [item["type"] for item in response["output"]] == ["web_search_call"]


@pytest.mark.parametrize("choice", ["required", "none", "auto"])
async def test_a_choice_among_hosted_tools_alone_goes_on(choice: str) -> None:
    async with thinking() as (gateway, upstream):
        upstream.script = Script(text="ok")
        secret = {"type": "mcp", "server_label": "docs", "server_url": "https://mcp.test", "authorization": "s3cret"}
        asked = ask(model="thinker", tools=[WEB, secret], tool_choice=choice)
        reply = await gateway.http.post("/v1/responses", json=asked)
        assert reply.status_code == 200, reply.text
        assert (body_of(upstream)["tool_choice"], body_of(upstream)["tools"]) == (choice, [WEB])
        refused = await gateway.http.post("/v1/responses", json=ask(model="thinker", tool_choice="required"))
        assert refused.status_code == 400
    assert "s3cret" not in reply.text


NATIVE: dict[str, Any] = {
    "reasoning": {"effort": "low", "summary": "auto", "mode": "pro"},
    "truncation": "auto",
    "context_management": [{"type": "compaction", "compact_threshold": 50_000}],
    "include": ["web_search_call.action.sources"],
    "max_tool_calls": 3,
}


async def test_what_only_this_api_has_goes_to_workers_of_it_and_is_named_for_others() -> None:
    items = [
        {"type": "compaction", "encrypted_content": "gAAAAshort"},
        {"role": "user", "content": "Go on."},
        {"type": "message", "role": "assistant", "content": "On it.", "phase": "commentary"},
        {"id": "ws_x", **SEARCHED},
        {"role": "user", "content": "And?"},
    ]
    async with thinking() as (gateway, upstream):
        upstream.script = Script(text="ok")
        reply = await gateway.http.post("/v1/responses", json=ask(items, model="thinker", **NATIVE))
        assert reply.status_code == 200, reply.text
        assert "x-baton-left-out" not in reply.headers
        body = body_of(upstream)
    assert {name: body[name] for name in NATIVE if name != "include"} == {
        name: value for name, value in NATIVE.items() if name != "include"
    }
    assert set(body["include"]) >= {"web_search_call.action.sources"}
    assert [item["type"] for item in body["input"]] == [
        *("compaction", "message", "message", "web_search_call", "message"),
    ]
    assert body["input"][0] == items[0]
    assert body["input"][2]["phase"] == "commentary"
    assert body["input"][3]["id"] == "ws_x"


async def test_a_chat_worker_gets_messages_and_the_rest_is_named() -> None:
    items = [
        {"type": "compaction", "encrypted_content": "gAAAAshort"},
        {"role": "user", "content": "Go on."},
        {"type": "message", "role": "assistant", "content": "On it.", "phase": "commentary"},
        {"id": "ws_x", **SEARCHED},
        {"role": "user", "content": "And?"},
    ]
    kit = Kit()
    async with served(kit) as gateway:
        reply = await gateway.http.post("/v1/responses", json=ask(items, **NATIVE))
    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-baton-left-out"].split(", ")) == {
        *("truncation", "context_management", "reasoning.summary", "reasoning.mode", "phase"),
        *("compaction", "web_search_call"),
    }
    messages = kit.workers.calls[-1].body["messages"]
    assert [message.keys() for message in messages] == [{"role", "content"}] * 3


async def test_what_the_worker_says_of_the_request_is_told() -> None:
    facts = {
        "reasoning": {"effort": "none", "summary": None},
        "prompt_cache_retention": "24h",
        "billing": {"payer": "developer"},
        "temperature": 0.5,
        "top_p": 0.98,
        "tools": [{**WEB, "user_location": None}],
    }
    async with thinking() as (gateway, upstream):
        upstream.script, upstream.facts = Script(text="ok"), facts
        for stream in (False, True):
            response = await responded(gateway, ask(model="thinker", tools=[WEB]), stream=stream)
            assert {name: response[name] for name in facts} == facts
            assert response["id"] != "resp_1"


async def test_a_file_by_url_goes_to_workers_that_fetch_and_is_refused_elsewhere() -> None:
    part = {"type": "input_file", "file_url": "https://tides.test/table.pdf"}
    content = [{"type": "input_text", "text": "Read."}, part]
    async with thinking(fetches=True) as (gateway, upstream):
        upstream.script = Script(text="ok")
        asked = ask([{"role": "user", "content": content}], model="thinker")
        reply = await gateway.http.post("/v1/responses", json=asked)
        assert reply.status_code == 200, reply.text
        assert body_of(upstream)["input"][0]["content"][1] == part
    async with thinking() as (gateway, upstream):
        refused = await gateway.http.post("/v1/responses", json=asked)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "input[0].content[1].file_data"
        assert not upstream.requests


async def test_calls_between_messages_keep_their_place() -> None:
    calls = [
        {"id": f"fc_{n}", "type": "function_call", "call_id": f"call_{n}", "name": "sum", "arguments": "{}",
         "status": "completed"} for n in (1, 2)
    ]  # fmt: skip
    for stream in (False, True):
        async with thinking() as (gateway, upstream):
            upstream.before, upstream.script = [calls[0], wrote("Meanwhile.", number=1), calls[1]], Script()
            response = await responded(gateway, ask(model="thinker", tools=[SUM]), stream=stream)
            kinds = [item["type"] for item in response["output"]]
            assert kinds == ["function_call", "message", "function_call"]
            assert [item["call_id"] for item in response["output"] if "call_id" in item] == ["call_1", "call_2"]


async def test_sources_of_a_search_vendor_are_citations_of_its_text() -> None:
    found = [{"title": "Tides", "url": "https://tides.test/a", "snippet": "Four metres."}]
    for extra in ({"search_results": found, "citations": ["https://tides.test/a"]}, {"citations": [found[0]["url"]]}):
        completion = {"choices": [{"message": {"content": "Four metres [1]."}, "finish_reason": "stop"}], **extra}
        head = Head(f"resp_{'0' * 32}", 1, "m", None, {}, stored=False)
        whole = output_items(head, completion)
        events = Events(head)
        events.chunk([{"index": 0, "delta": {"content": "Four metres [1]."}}])
        streamed = events.completed(completion, 2)
        assert streamed[-1]["response"]["output"] == whole
        assert [one["url"] for one in whole[0]["content"][0]["annotations"]] == ["https://tides.test/a"]
        assert "response.output_text.annotation.added" in [event["type"] for event in streamed]


async def test_reasoning_that_another_vendor_sealed_is_named() -> None:
    kit = Kit()
    thoughts = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAforeign"}
    async with served(kit) as gateway:
        items = [{"role": "user", "content": "Go on."}, thoughts, {"role": "user", "content": "And?"}]
        reply = await gateway.http.post("/v1/responses", json=ask(items))
    assert reply.headers["x-baton-dropped-fields"] == "input[1].encrypted_content"


@pytest.mark.parametrize("by_id", [False, True])
async def test_an_answer_to_a_hosted_tool_goes_back_without_a_message(by_id: bool) -> None:
    wanted = {"id": "mcpr_1", "type": "mcp_approval_request", "name": "read", "arguments": "{}", "server_label": "docs"}
    tool = {"type": "mcp", "server_label": "docs", "server_url": "https://mcp.test"}
    async with thinking(hosted=("mcp",)) as (gateway, upstream):
        upstream.before, upstream.script = [wanted], Script()
        first = await responded(gateway, ask("Read.", model="thinker", tools=[tool]), stream=False)
        assert first["output"][0]["id"] == "mcpr_1"
        upstream.before, upstream.script = [], Script(text="ok")
        given = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
        earlier: list[Any] = [{"role": "user", "content": "Read."}, *first["output"]]
        more = {"previous_response_id": first["id"]} if by_id else {}
        asked = ask([given] if by_id else [*earlier, given], model="thinker", tools=[tool], **more)
        assert (await responded(gateway, asked, stream=False))["status"] == "completed"
        sent = body_of(upstream)["input"]
    assert [item["type"] for item in sent] == ["message", "mcp_approval_request", "mcp_approval_response"]
    assert (sent[1], sent[-1]) == (wanted, given)


@pytest.mark.parametrize("stream", [False, True])
async def test_sources_of_a_chat_worker_reach_a_client_of_responses(stream: bool) -> None:
    choice = {"index": 0, "finish_reason": "stop"}
    found = {"search_results": [{"title": "Tides", "url": "https://tides.test/a"}]}
    text = {"content": "Four metres [1]."}
    whole = {"choices": [{**choice, "message": {"role": "assistant", **text}}], **found}
    kit = Kit(workers=Raw(whole, [{"choices": [{**choice, "delta": text}], **found}]))
    async with served(kit) as gateway:
        response = await responded(gateway, ask("When?", model="alpha"), stream=stream)
    part = response["output"][0]["content"][0]
    assert (part["text"], [one["title"] for one in part["annotations"]]) == ("Four metres [1].", ["Tides"])


async def test_openais_sdk_builds_the_same_items_from_the_stream() -> None:
    async with thinking() as (gateway, upstream):
        upstream.before, upstream.script = list(LONG_WAY), Script()
        async with gateway.sdk.responses.stream(model="thinker", input="When?", tools=[WEB]) as stream:  # type: ignore[list-item]
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    assert kinds.count("response.reasoning_summary_part.done") == 2
    assert [item.type for item in final.output] == [item["type"] for item in LONG_WAY]
    assert final.output_text == "I look it up.Four metres at noon."


async def test_nothing_has_come_while_no_item_says_anything() -> None:
    chunks = Chunks()
    begun = [{"type": "reasoning", "id": "rs_1", "summary": []}, {"type": "message", "id": "msg_1", "content": []}]
    for at, item in enumerate(begun):
        event = {"type": "response.output_item.added", "output_index": at, "item": item}
        assert chunks.chunk(event)["choices"] == []
    said = chunks.chunk({"type": "response.output_text.delta", "output_index": 1, "delta": "Four."})["choices"]
    assert [[*choice["delta"]] for choice in said] == [["output_items"], ["output_items"], ["content"]]
