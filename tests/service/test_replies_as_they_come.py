"""What becomes of replies that say nothing or lack their end, and of requests that each worker takes otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.money.amounts import Usage, cost_nano
from gateway.core.openai.vendors.usage import usage_body
from gateway.errors import BadRequest, UpstreamError
from gateway.service.request.running import reply_headers
from tests.fakes.workers import Says
from tests.kit import PRICE, Kit, ask, model_worker
from tests.service.test_answers import Raw, contents, one, pool, streamed

SILENT = Says("", usage=Usage(10, 0))
HI = {"role": "user", "content": "hi"}
LONG = "mcp__" + "server_" * 12 + "search"


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(name: str, **more: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": "{}"}, **more}


# ---------------------------------------------------------------- empty replies


@pytest.mark.parametrize("stream", [False, True])
async def test_an_empty_reply_is_tried_again_and_what_was_reported_is_charged(stream: bool) -> None:
    kit = Kit(workers={"alpha": [SILENT, Says("here")]})
    body = ask(model="alpha")
    running, pieces = await streamed(kit, body) if stream else (await kit.serve(body), [])
    assert running.body is not None
    assert running.body["choices"][0]["message"]["content"] == "here"
    assert not stream or contents(pieces) == {0: "here"}
    (step,) = running.record.steps
    assert [attempt.error for attempt in step.attempts] == ["empty_reply", None]
    assert step.cost_nano == cost_nano(PRICE, Usage(10, 0)) + cost_nano(PRICE, Usage(10, 5))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_stays_silent_falls_back_to_another(stream: bool) -> None:
    kit = Kit(workers={"alpha": SILENT, "beta": Says("here")})
    running, _ = (
        await streamed(kit, ask(model="baton/rule")) if stream else (await kit.serve(ask(model="baton/rule")), [])
    )
    assert running.error is None
    assert running.body is not None
    assert running.body["choices"][0]["message"]["content"]


async def test_a_worker_that_stays_silent_is_an_error_by_name() -> None:
    kit = Kit(workers={"alpha": SILENT})
    running = await kit.serve(ask(model="alpha"))
    assert isinstance(running.error, UpstreamError)
    assert (running.error.status, running.error.code) == (502, "empty_reply")
    assert len(kit.workers.calls) > 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([HI, {"role": "assistant", "content": None, "tool_calls": [called("f")]},
          {"role": "tool", "tool_call_id": "call_1", "content": "42"}], SILENT),
        ([HI], Says("", usage=Usage(10, 30))),  # it thought
        ([HI], Says("", usage=Usage(10, 0), finish_reason="length")),
        ([HI], Says("", usage=Usage(10, 0), finish_reason="content_filter")),
    ],
)  # fmt: skip
async def test_an_empty_reply_that_has_a_cause_is_the_reply(
    messages: list[dict[str, Any]], says: Says, stream: bool
) -> None:
    kit = Kit(workers={"alpha": says})
    body = ask(model="alpha") | {"messages": messages}
    running, _ = await streamed(kit, body) if stream else (await kit.serve(body), [])
    assert running.error is None
    assert running.body is not None
    assert running.body["choices"][0]["finish_reason"] == says.finish_reason
    assert len(kit.workers.calls) == 1


# ---------------------------------------------------------------- streams without an end


def chunks(*deltas: dict[str, Any], reason: str | None = None) -> list[dict[str, Any]]:
    made = [{"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]} for delta in deltas]
    return [*made, {"choices": [], "usage": usage_body(Usage(10, 5)), "done": True}]


@pytest.mark.parametrize("reason", [None, ""])
@pytest.mark.parametrize(
    ("delta", "end"),
    [({"content": "x"}, "stop"), ({"tool_calls": [{"index": 0, **called("f")}]}, "tool_calls")],
)
async def test_a_stream_that_is_over_gets_the_end_that_it_lacks(
    delta: dict[str, Any], end: str, reason: str | None
) -> None:
    kit = Kit(workers=Raw({}, chunks(delta, reason=reason)))
    running, pieces = await streamed(kit, ask(model="alpha", tools=[named("f")]))
    assert running.error is None
    assert running.body is not None
    assert running.body["choices"][0]["finish_reason"] == end
    assert [choice["finish_reason"] for piece in pieces for choice in piece if choice.get("finish_reason")] == [end]


async def test_a_stream_that_is_not_said_to_be_over_is_cut() -> None:
    cut = chunks({"content": "x"})
    del cut[-1]["done"]
    running, _ = await streamed(Kit(workers=Raw({}, cut)), ask(model="alpha"))
    assert running.error is not None
    assert running.error.code == "upstream_protocol"


# ---------------------------------------------------------------- what vendors say beside the reply


AZURE = {"prompt_filter_results": [{"prompt_index": 0}], "provider": "one", "usage": None, "baton": {"x": 1}, "_x": 1}


async def test_what_a_vendor_says_of_its_reply_goes_to_the_client() -> None:
    choice = {"index": 0, "message": {"content": "x"}, "finish_reason": "stop", "content_filter_results": {"hate": 1}}
    running = await Kit(workers=Raw({"choices": [choice], **AZURE})).serve(ask(model="alpha"))
    assert running.body is not None
    assert running.body["prompt_filter_results"] == AZURE["prompt_filter_results"]
    assert running.body["provider"] == "one"
    assert running.body["choices"][0]["content_filter_results"] == {"hate": 1}
    assert not {"baton", "_x"} & running.body.keys()


async def test_what_a_vendor_says_in_a_stream_is_in_the_reply_that_it_makes() -> None:
    first = {"choices": [], **AZURE}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "native_finish_reason": "END"}]}
    kit = Kit(workers=Raw({}, [first, *chunks({"content": "x"})[:1], end]))
    running, _ = await streamed(kit, ask(model="alpha"))
    assert running.reply_facts == {"prompt_filter_results": [{"prompt_index": 0}], "provider": "one"}
    assert running.body is not None
    assert running.body["choices"][0]["native_finish_reason"] == "END"


# ---------------------------------------------------------------- each worker's own form


async def test_each_worker_gets_the_roles_that_it_takes() -> None:
    specs = (
        model_worker("alpha", "atlas", url="https://api.openai.com/v1", model="gpt-5.2"),
        model_worker("beta", "birch", url="http://10.0.0.7:8000/v1", model="qwen3-32b"),
    )
    kit = Kit(workers={}, pools=pool(*specs))
    messages = [{"role": "developer", "content": "be brief"}, HI, {"role": "assistant", "content": "yes"}]
    messages += [{"role": "system", "content": "in French"}, HI]
    for name in ("alpha", "beta"):
        await kit.serve(ask(model=name) | {"messages": messages})
    sent = [[(one["role"], one["content"]) for one in call.body["messages"]] for call in kit.workers.calls]
    assert sent[0] == [(one["role"], one["content"]) for one in messages]
    assert sent[1] == [
        *(("system", "be brief"), ("user", "hi"), ("assistant", "yes")),
        ("user", "<system>\nin French\n</system>\n\nhi"),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_name_is_told_in_a_short_form_and_comes_back(stream: bool) -> None:
    def says(call: Any) -> Says:
        return Says(None, [called(call.body["tools"][0]["function"]["name"])], "tool_calls")

    kit = Kit(workers={"alpha": says}, pools=one())
    history = [HI, {"role": "assistant", "content": None, "tool_calls": [called(LONG)]}]
    history.append({"role": "tool", "tool_call_id": "call_1", "content": "42"})
    body = ask(model="alpha", tools=[named(LONG)], tool_choice=named(LONG)) | {"messages": history}
    running, _ = await streamed(kit, body) if stream else (await kit.serve(body), [])
    sent = kit.workers.calls[0].body
    told = sent["tools"][0]["function"]["name"]
    assert len(told) <= 64
    assert sent["tool_choice"]["function"]["name"] == told
    assert sent["messages"][1]["tool_calls"][0]["function"]["name"] == told
    assert running.body is not None
    assert running.body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == LONG


MANY = [named(f"f{number}") for number in range(200)]
OPENAI = {"url": "https://api.openai.com/v1", "model": "gpt-5.2"}


async def test_a_request_with_more_tools_than_one_worker_takes_goes_to_another() -> None:
    specs = (model_worker("alpha", "atlas", **OPENAI), model_worker("beta", "birch", url="http://10.0.0.7:8000/v1"))
    kit = Kit(workers={}, pools=pool(*specs))
    running = await kit.serve(ask(model="baton/rule", tools=MANY))
    assert running.error is None
    assert [call.worker.name for call in kit.workers.calls] == ["beta"]


@pytest.mark.parametrize(
    ("more", "param", "limit"),
    [({"tools": MANY}, "tools", "128"), ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "4")],
)
@pytest.mark.parametrize("model", ["alpha", "baton/rule"])
async def test_a_request_that_no_worker_takes_is_told_the_limit(
    model: str, more: dict[str, Any], param: str, limit: str
) -> None:
    with pytest.raises(BadRequest, match=f"the limit is {limit}") as caught:
        await Kit(workers={}, pools=one(**OPENAI)).start(ask(model=model, **more))
    assert (caught.value.param, caught.value.code) == (param, "array_above_max_length")


async def test_a_tier_is_bought_by_the_entry_of_a_worker_alone() -> None:
    for takes, sent in (((), None), (("service_tier",), "priority")):
        kit = Kit(workers={}, pools=one(takes=takes))
        running = await kit.serve(ask(model="alpha", service_tier="priority"))
        assert kit.workers.calls[0].body.get("service_tier") == sent
        assert reply_headers(running.record).get("x-baton-left-out") == (None if sent else "service_tier")
