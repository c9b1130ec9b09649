"""What a vendor needs back (signatures, thinking, its ids) goes back to that vendor and to no other."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from gateway.core.money.amounts import Usage
from gateway.core.openai.vendors.usage import usage_body
from gateway.core.pool.workers import PoolFile
from gateway.service.ports.request import WorkerCall, WorkerReply
from tests.kit import Kit, ask, model_worker, plan

SIGNATURE = "c2lnbmF0dXJl" * 120
LONG = f"call_e5a71b4c__thought__{SIGNATURE}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TWO = PoolFile(
    workers=(model_worker("gemini", "atlas"), model_worker("claude", "birch", url="http://127.0.0.1:2/v1")),
    pools={"default": ("gemini", "claude")},
)


def a_call(**more: Any) -> dict[str, Any]:
    return {"id": LONG, "type": "function", "function": {"name": "f", "arguments": "{}"}, **more}


class Vendor:
    """Workers whose first reply is given; every later one says `ok`."""

    def __init__(self, message: Mapping[str, Any], deltas: tuple[Mapping[str, Any], ...] = ()) -> None:
        self.message, self.deltas, self.calls = message, deltas, list[WorkerCall]()

    async def complete(self, call: WorkerCall) -> WorkerReply:
        self.calls.append(call)
        message = self.message if len(self.calls) == 1 else {"role": "assistant", "content": "ok"}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        return WorkerReply({"choices": [{"index": 0, "message": message, "finish_reason": reason}]}, Usage(10, 5))

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        self.calls.append(call)
        for delta in self.deltas:
            yield {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
        yield {"choices": [], "usage": usage_body(Usage(10, 5))}

    def sent(self, at: int = -1) -> list[Mapping[str, Any]]:
        """The messages of a call, from the assistant's on."""
        messages = self.calls[at].body["messages"]
        first = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
        return list(messages[first:])


async def first_turn(kit: Kit, **more: Any) -> dict[str, Any]:
    running = await kit.serve(ask(tools=[TOOL], **more))
    message: dict[str, Any] = (await running.result())["choices"][0]["message"]
    return message


def second_turn(message: Mapping[str, Any], model: str = "baton") -> dict[str, Any]:
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in message.get("tool_calls", ())]
    return ask(tools=[TOOL], model=model) | {"messages": [*ask()["messages"], dict(message), *results]}


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as a client returns it that knows only what OpenAI defines."""
    names = ("id", "type", "function")
    calls = [{name: call[name] for name in names} for call in message["tool_calls"]]
    return {"role": "assistant", "content": message["content"], "tool_calls": calls}


@pytest.mark.parametrize("returned", ["everything", "what OpenAI defines"])
async def test_a_long_id_leaves_as_a_short_one_and_comes_back_to_its_vendor(returned: str) -> None:
    workers = Vendor({"role": "assistant", "content": None, "tool_calls": [a_call()]})
    kit = Kit(workers=workers, pools=TWO)
    message = await first_turn(kit)
    [call] = message["tool_calls"]
    assert len(call["id"]) <= 40
    await (await kit.serve(second_turn(message if returned == "everything" else plain(message)))).result()
    asked, result = workers.sent()
    assert asked["tool_calls"] == [a_call()]
    assert result["tool_call_id"] == LONG
    assert kit.states.loads == (0 if returned == "everything" else 1)


@pytest.mark.parametrize("returned", ["everything", "what OpenAI defines"])
@pytest.mark.parametrize(
    "state",
    [
        {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
        {"thinking_blocks": [{"type": "redacted_thinking", "data": "d"}]},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "d", "id": "r", "format": "x", "index": 0}]},
        {"provider_specific_fields": {"thought_signatures": ["s"]}},
        {"extra_content": {"google": {"thought_signature": "s"}}},
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
    ],
)
async def test_state_of_a_message_goes_back_to_its_vendor_alone(state: dict[str, Any], returned: str) -> None:
    reply = {"role": "assistant", "content": None, "tool_calls": [a_call(id="call_1")], **state}
    workers = Vendor(reply)
    kit = Kit(workers=workers, pools=TWO)
    message = await first_turn(kit)
    assert {name: message[name] for name in state if name != "extra_content"}.items() <= state.items()
    back = message if returned == "everything" else plain(message)
    await (await kit.serve(second_turn(back))).result()
    assert workers.calls[-1].worker.name == "gemini"
    assert workers.sent()[0] == reply
    await (await kit.serve(second_turn(back, model="claude"))).result()
    assert workers.calls[-1].worker.name == "claude"
    asked, result = workers.sent()
    assert set(asked) <= {"role", "content", "tool_calls"}
    assert set(asked["tool_calls"][0]) == {"id", "type", "function"}
    assert len(asked["tool_calls"][0]["id"]) <= 40
    assert result["tool_call_id"] == asked["tool_calls"][0]["id"]


@pytest.mark.parametrize("returned", ["everything", "what OpenAI defines"])
async def test_state_of_a_call_goes_back_and_streams_too(returned: str) -> None:
    signed = {"extra_content": {"google": {"thought_signature": "s"}}}
    first = {"index": 0, **a_call(id="function-call-1"), **signed}
    rest = {"index": 0, "function": {"arguments": " "}}
    workers = Vendor({}, ({"role": "assistant", "content": ""}, {"tool_calls": [first]}, {"tool_calls": [rest]}))
    kit = Kit(workers=workers, pools=TWO)
    message = await first_turn(kit, stream=True)
    workers.message = {"role": "assistant", "content": "ok"}
    await (await kit.serve(second_turn(message if returned == "everything" else plain(message)))).result()
    [call] = workers.sent()[0]["tool_calls"]
    assert call == a_call(id="function-call-1", function={"name": "f", "arguments": "{} "}, **signed)


async def test_streamed_thinking_is_joined_before_it_is_kept() -> None:
    pieces: list[dict[str, Any]] = [
        {"thinking_blocks": [{"type": "thinking", "thinking": "let ", "signature": None}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "me", "signature": None}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "", "signature": "one"}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "again", "signature": "two"}]},
        {"tool_calls": [{"index": 0, **a_call(id="toolu_1")}]},
    ]
    workers = Vendor({}, tuple(pieces))
    kit = Kit(workers=workers, pools=TWO)
    message = await first_turn(kit, stream=True)
    workers.message = {"role": "assistant", "content": "ok"}
    await (await kit.serve(second_turn(plain(message)))).result()
    assert workers.sent()[0]["thinking_blocks"] == [
        {"type": "thinking", "thinking": "let me", "signature": "one"},
        {"type": "thinking", "thinking": "again", "signature": "two"},
    ]


async def test_in_a_plan_each_step_gets_its_own_vendors_state() -> None:
    reply = {"role": "assistant", "content": None, "tool_calls": [a_call(extra_content={"google": {"a": "b"}})]}
    workers = Vendor(reply)
    both = plan(("birch", None, []), ("atlas", None, [0]))
    kit = Kit((plan(("atlas", None, [])), both), workers=workers, pools=TWO, sticky_s=0.0)
    message = await first_turn(kit)
    body = second_turn(message)
    body["messages"].append({"role": "user", "content": "go on"})
    await (await kit.serve(body, sticky=False)).result()
    sent = {call.worker.name: json.dumps(call.body["messages"]) for call in workers.calls[1:]}
    assert SIGNATURE in sent["gemini"]
    assert SIGNATURE not in sent["claude"]
    assert "google" not in sent["claude"]
    assert "extra_content" not in sent["claude"]
    assert "baton" not in sent["gemini"]


async def test_without_the_store_the_turn_goes_on_without_state() -> None:
    workers = Vendor({"role": "assistant", "content": None, "tool_calls": [a_call()]})
    kit = Kit(workers=workers, pools=TWO)
    message = await first_turn(kit)
    kit.states.away = True
    await (await kit.serve(second_turn(plain(message)))).result()
    asked, result = workers.sent()
    assert asked["tool_calls"][0]["id"] == result["tool_call_id"] == message["tool_calls"][0]["id"]
    assert kit.metrics.degradations == ["vendor_state"]


async def test_a_reply_without_state_is_neither_changed_nor_kept() -> None:
    call = a_call(id="call_abc")
    workers = Vendor({"role": "assistant", "content": None, "tool_calls": [call]})
    kit = Kit(workers=workers, pools=TWO)
    message = await first_turn(kit)
    assert message["tool_calls"] == [call]
    assert "extra_content" not in message
    await (await kit.serve(second_turn(message))).result()
    assert (kit.states.known, kit.states.loads) == ({}, 0)
    assert workers.sent()[0]["tool_calls"] == [call]


async def test_another_keys_state_is_not_found() -> None:
    workers = Vendor({"role": "assistant", "content": None, "tool_calls": [a_call()]})
    kit = Kit(workers=workers, pools=TWO)
    message = plain(await first_turn(kit))
    kit.states.known = {("another", name): state for (_, name), state in kit.states.known.items()}
    await (await kit.serve(second_turn(message))).result()
    assert SIGNATURE not in json.dumps(workers.calls[-1].body)


async def test_the_log_holds_state_once() -> None:
    workers = Vendor({"role": "assistant", "content": None, "tool_calls": [a_call()]})
    kit = Kit(workers=workers, pools=TWO)
    message = await first_turn(kit)
    await (await kit.serve(second_turn(plain(message)))).result()
    first, second = [event.payload for event in kit.journal.of_kind("rollout")]
    assert SIGNATURE in json.dumps(first["reply"]), "a response that continues this one reads it there"
    assert SIGNATURE not in json.dumps([first["steps"], second])
