"""Anthropic's own workers behind Anthropic's API: what a client says reaches them, and what they say reaches it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.adapters.upstream.http import HttpWorkers
from gateway.core.pool.workers import PoolFile
from tests.integration.test_api import Served, served
from tests.integration.test_messages import events
from tests.kit import Kit, model_worker, plan
from tests.unit.anthropic.test_inbound import CONTENTS, joined
from tests.unit.anthropic.test_inbound import events as events_of
from tests.unit.anthropic.test_inbound import message as message_of
from tests.upstreams.anthropic import Anthropic
from tests.upstreams.server import Request, event
from tests.upstreams.vendor import Script

KEY = "sk-ant-test"
CACHE = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
HI = [{"role": "user", "content": "hi"}]
USE = {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"q": 1}}
FIND = {"name": "find", "input_schema": {"type": "object"}}


class Claude(Anthropic):
    """Answers with the blocks of `content`."""

    content: list[dict[str, Any]] = CONTENTS["text"]
    ending: tuple[str, str | None] = ("end_turn", None)
    input_tokens = 5

    def whole(self, request: Request) -> Mapping[str, Any]:
        return message_of(self.content, *self.ending)

    def events(self, request: Request) -> Iterator[bytes]:
        for one in events_of(self.content, *self.ending):
            if one["type"] == "message_start":
                one["message"]["usage"]["input_tokens"] = self.input_tokens
            yield event(one, one["type"])


class Site:
    """A gateway before one worker of Anthropic's."""

    def __init__(self, gateway: Served, claude: Claude, asked: list[Request]) -> None:
        self.gateway, self.claude, self._asked = gateway, claude, asked

    async def ask(self, messages: Any = None, headers: Any = None, **fields: Any) -> httpx.Response:
        body = {"model": "claude", "max_tokens": 4000, "messages": messages or HI, **fields}
        return await self.gateway.http.post("/v1/messages", json=body, headers=headers)

    @property
    def sent(self) -> Any:
        """The body of the last request to the worker."""
        return self._asked[-1].body

    @property
    def headers(self) -> Mapping[str, str]:
        return self._asked[-1].headers


@asynccontextmanager
async def site(*plans: str, **worker: Any) -> AsyncIterator[Site]:
    async with Claude(KEY) as claude:
        asked: list[Request] = []
        complain = claude.complaint

        def complaint(request: Request) -> str | None:
            asked.append(request)
            return complain(request)

        claude.complaint = complaint  # type: ignore[method-assign]
        facts = {"kind": "litellm", "model": "anthropic/claude-sonnet-4-5", "output_tokens_max": 4096} | worker
        spec = model_worker("claude", "claude", url=claude.base, context_tokens=200_000, **facts)
        workers = HttpWorkers({"claude": KEY}, b"depth")
        kit = Kit(plans, workers=workers, pools=PoolFile(workers=(spec,), pools={"default": ("claude",)}))
        async with served(kit) as gateway:
            yield Site(gateway, claude, asked)
        await workers.close()


def content_of(reply: httpx.Response, stream: bool) -> Any:
    assert reply.status_code == 200, reply.text
    return joined(iter(events(reply))) if stream else reply.json()["content"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["searched", "mixed", "empty", "cited at once"])
async def test_every_block_reaches_the_client_and_comes_back(name: str, stream: bool) -> None:
    async with site() as here:
        here.claude.content = CONTENTS[name]
        reply = await here.ask(stream=stream)
        content = content_of(reply, stream)
        assert content == CONTENTS[name]
        calls = [block["id"] for block in content if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call, "content": "1"} for call in calls]
        await here.ask([*HI, {"role": "assistant", "content": content}, {"role": "user", "content": results or "go"}])
        turns = here.sent["messages"]
        if name == "empty":  # Anthropic refuses an empty text in a request
            assert [turn["role"] for turn in turns] == ["user"]
        else:
            assert [turn["content"] for turn in turns[1:]] == [content, results or "go"]


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 3000}},
        {"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "max"}},
        {"output_config": {"effort": "high"}},
        {"thinking": {"type": "disabled"}},
        {"cache_control": {"type": "ephemeral"}},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"top_k": 5, "temperature": 0.5},
        {"stop_sequences": ["a", "b", "c", "d", "e"]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}, {**FIND, "input_examples": [{"q": 1}], **CACHE}]},
        {"tools": [FIND], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    ],
)
async def test_a_named_worker_gets_the_clients_own_words(fields: dict[str, Any]) -> None:
    async with site() as here:
        reply = await here.ask(**fields)
        assert reply.status_code == 200, reply.text
        tools = sorted(fields.pop("tools", []), key=str)
        assert sorted(here.sent.get("tools", []), key=str) == tools
        assert {name: here.sent[name] for name in fields} == fields
        assert not {"x-baton-left-out", "x-baton-dropped-fields", "x-baton-lowered"} & reply.headers.keys()


async def test_the_end_of_a_cached_prefix_is_where_the_client_put_it() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "hi", **CACHE}]},
        {"role": "assistant", "content": [{**USE, **CACHE}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "", **CACHE}]},
    ]
    system = [{"type": "text", "text": "be brief", **CACHE}]
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}, "title": "T"}
    async with site() as here:
        await here.ask(turns, system=system, tools=[{**FIND, **CACHE}])
        assert here.sent["messages"] == turns
        assert here.sent["system"] == system
        marked = {**document, "citations": {"enabled": True}, **CACHE}
        await here.ask([{"role": "user", "content": [marked, {"type": "text", "text": "sum up"}]}])
        assert here.sent["messages"][0]["content"][0] == marked


async def test_pages_are_asked_for_by_their_address_and_results_keep_their_pictures() -> None:
    page = {"type": "document", "source": {"type": "url", "url": "https://host/a.pdf"}}
    picture = {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [picture], "is_error": True}
    async with site() as here:
        reply = await here.ask(
            [{"role": "user", "content": [page]}, {"role": "assistant", "content": [USE]},
             {"role": "user", "content": [result]}]
        )  # fmt: skip
        assert reply.status_code == 200, reply.text
        assert here.sent["messages"][0]["content"][0]["source"] == page["source"]
        assert here.sent["messages"][2]["content"] == [result]


async def test_a_budget_is_lowered_with_the_reply_and_named() -> None:
    async with site(output_tokens_max=2000) as here:
        reply = await here.ask(max_tokens=9000, thinking={"type": "enabled", "budget_tokens": 8000})
        assert (here.sent["max_tokens"], here.sent["thinking"]["budget_tokens"]) == (2000, 1500)
        assert reply.headers["x-baton-lowered"] == "max_tokens=2000, asked=9000, by=worker, budget_tokens=1500"


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_whose_blocks_are_gone_is_left_off_by_name(stream: bool) -> None:
    """Those that Baton handed out come back; of others nobody knows which vendor signed them."""
    thinking = {"type": "enabled", "budget_tokens": 2000}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "1"}]}
    async with site() as here:
        foreign = [{"type": "thinking", "thinking": "hm", "signature": "theirs"}, USE]
        reply = await here.ask([*HI, {"role": "assistant", "content": foreign}, result], thinking=thinking)
        assert "thinking" not in here.sent
        assert here.sent["messages"][1]["content"] == [USE]
        assert reply.headers["x-baton-left-out"] == "thinking"
        here.claude.content = CONTENTS["thought"][:1] + CONTENTS["thought"][2:]
        own = content_of(await here.ask(thinking=thinking, stream=stream), stream)
        answer = {"type": "tool_result", "tool_use_id": own[-1]["id"], "content": "1"}
        turns = [*HI, {"role": "assistant", "content": own}, {"role": "user", "content": [answer]}]
        await here.ask(turns, thinking=thinking)
        assert here.sent["thinking"] == thinking
        assert here.sent["messages"][1]["content"][0] == here.claude.content[0]


async def test_a_planned_request_gets_the_form_that_its_model_has() -> None:
    async with site(plan(("claude", None, []))) as here:
        reply = await here.ask(model="baton", thinking={"type": "adaptive"}, output_config={"effort": "low"})
        assert here.sent["thinking"] == {"type": "enabled", "budget_tokens": 1024}
        assert "output_config" not in here.sent
        assert reply.headers["x-baton-left-out"] == "thinking=enabled, output_config.effort"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "kind"), [(529, "overloaded_error"), (429, "rate_limit_error")])
async def test_a_vendors_overload_is_the_clients(status: int, kind: str, stream: bool) -> None:
    async with site() as here:
        here.claude.script = Script(status=status, message="busy")
        reply = await here.ask(stream=stream)
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "ending", [("stop_sequence", "END"), ("pause_turn", None), ("refusal", None), ("max_tokens", None)]
)
async def test_why_a_reply_ended_reaches_the_client(ending: tuple[str, str | None], stream: bool) -> None:
    async with site() as here:
        here.claude.ending = ending
        reply = await here.ask(stream=stream, stop_sequences=["END"])
        end = events(reply)[-2]["delta"] if stream else reply.json()
        assert (end["stop_reason"], end["stop_sequence"]) == ending


async def test_the_first_event_estimates_the_tokens_and_the_last_knows_them() -> None:
    async with site() as here:
        long, here.claude.input_tokens = [{"role": "user", "content": "word " * 4000}], 4005
        reply = events(await here.ask(long, stream=True))
        assert 2000 < reply[0]["message"]["usage"]["input_tokens"] < 20_000
        reply = events(await here.ask(stream=True))
        assert 0 < reply[0]["message"]["usage"]["input_tokens"] < 100
        assert reply[-2]["usage"]["input_tokens"] == 4005


async def test_the_betas_of_a_client_reach_the_vendor() -> None:
    async with site() as here:
        await here.ask(headers={"anthropic-beta": "context-1m-2025-08-07, bad value, files-api-2025-04-14"})
        assert here.headers["anthropic-beta"] == "context-1m-2025-08-07,files-api-2025-04-14"
        assert (here.headers["x-api-key"], here.headers["anthropic-version"]) == (KEY, "2023-06-01")
        assert "betas" not in json.dumps(here.sent)


@pytest.mark.parametrize("field", ["output_format", "output_config"])
async def test_a_schema_is_sent_and_the_reply_is_checked_by_it(field: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
    format_ = {"type": "json_schema", "schema": schema}
    async with site() as here:
        here.claude.content = [{"type": "text", "text": '{"n": 1}'}]
        asked = {field: format_ if field == "output_format" else {"format": format_}}
        assert content_of(await here.ask(**asked), False) == here.claude.content
        assert here.sent["output_config"]["format"] == format_


async def test_hosted_tools_go_to_a_worker_whose_entry_names_them() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
    for hosted, sent, left_out in (((), None, "web_search_20250305"), (("web_search",), [search], None)):
        async with site(hosted=hosted) as here:
            reply = await here.ask(tools=[search])
            assert here.sent.get("tools") == sent
            assert reply.headers.get("x-baton-left-out") == left_out


async def test_a_chat_client_gets_chat_of_the_same_worker() -> None:
    async with site() as here:
        here.claude.content = CONTENTS["searched"]
        body = {"model": "claude", "messages": HI, "max_tokens": 100, "reasoning_effort": "low"}
        reply = await here.gateway.http.post("/v1/chat/completions", json=body)
        choice = reply.json()["choices"][0]
        assert choice["message"]["content"] == "I look.It is 42."
        assert [one["url_citation"]["url"] for one in choice["message"]["annotations"]] == ["https://a", "https://b"]
        assert "thinking" not in here.sent  # its budget would not fit below the reply's bound
        text = {"model": "claude", "prompt": "Once", "max_tokens": 100}
        reply = await here.gateway.http.post("/v1/completions", json=text)
        assert reply.json()["choices"][0]["text"] == "I look.It is 42."
