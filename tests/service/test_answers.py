"""The answering step: what its worker gets of the request, how many choices come of it, and the shape they have."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from gateway.core.loop.caps import Caps
from gateway.core.money.amounts import Usage, cost_nano
from gateway.core.openai.chat import FIELDS
from gateway.core.openai.vendors.usage import usage_body
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.errors import BadRequest, UpstreamError
from gateway.service.ports.request import WorkerCall, WorkerReply
from gateway.service.request.running import ProgressNote, Running, reply_headers
from tests.fakes.media import FakeMedia
from tests.fakes.workers import Says
from tests.kit import PRICE, Kit, ask, items_of, model_worker, plan, pool_file
from tests.unit.openai.test_chat import BESIDE, PNG, TOOL, VALUES, image, said

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
STRICT = {"type": "json_schema", "json_schema": {"name": "point", "strict": True, "schema": POINT}}
GOOD, BAD = '{"x": 1}', '{"x": "one"}'
LAST = [name for name, (fate, _, _) in FIELDS.items() if fate == "last"]


def pool(*specs: WorkerSpec) -> PoolFile:
    return PoolFile(workers=specs, pools={"default": tuple(spec.name for spec in specs)})


def one(**more: Any) -> PoolFile:
    """A pool of one worker."""
    return pool(model_worker("alpha", "atlas", **more))


class Raw:
    """Workers whose whole bodies and chunks a test writes itself."""

    def __init__(self, body: Mapping[str, Any], chunks: Sequence[Mapping[str, Any]] = ()) -> None:
        self.body, self.chunks, self.calls = body, chunks, list[WorkerCall]()

    async def complete(self, call: WorkerCall) -> WorkerReply:
        self.calls.append(call)
        return WorkerReply(self.body, Usage(10, 5))

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        self.calls.append(call)
        for chunk in self.chunks:
            yield chunk


async def streamed(kit: Kit, body: dict[str, Any]) -> tuple[Running, list[Any]]:
    running = await kit.start(body | {"stream": True})
    pieces = [piece async for piece in items_of(running)]
    await running.finished.wait()
    return running, pieces


def payloads(kit: Kit, kind: str) -> list[Mapping[str, Any]]:
    return [event.payload for event in kit.journal.of_kind(kind)]


def contents(pieces: Sequence[Any]) -> dict[int, str]:
    """Text by choice, of what was streamed."""
    texts: dict[int, str] = {}
    for piece in pieces:
        for choice in piece:
            index = choice.get("index", 0)
            texts[index] = texts.get(index, "") + (choice["delta"].get("content") or "" if "delta" in choice else "")
    return texts


# ---------------------------------------------------------------- what the worker gets


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", LAST)
async def test_every_property_for_workers_reaches_the_one_that_answers(name: str, stream: bool) -> None:
    value = VALUES[name][0][-1]
    kit = Kit(workers={"alpha": Says("{}")}, pools=one(output_tokens_max=512))
    body = ask(model="alpha", stream=stream, **BESIDE.get(name, {})) | {name: value}
    await kit.serve(body)
    expected = min(value, 512) if name in ("max_tokens", "max_completion_tokens") else value
    assert kit.workers.calls[0].body[name] == expected


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - set(LAST) - {"model", "messages", "moderation"}))
async def test_properties_that_baton_acts_on_do_not_reach_the_worker(name: str) -> None:
    kit = Kit(workers={"alpha": Says()})
    await kit.serve(ask(model="alpha", **BESIDE.get(name, {})) | {name: VALUES[name][0][-1]})
    assert name not in kit.workers.calls[0].body


@pytest.mark.parametrize(
    ("asked", "spec", "name"),
    [
        ({"max_tokens": 9}, {}, "max_tokens"),
        ({"max_completion_tokens": 9}, {}, "max_completion_tokens"),
        ({"max_tokens": 9}, {"params": {"max_completion_tokens": 64}}, "max_completion_tokens"),
        ({"max_tokens": 9}, {"cannot": ("max_tokens",)}, "max_completion_tokens"),
        ({"max_completion_tokens": 9}, {"cannot": ("max_completion_tokens",)}, "max_tokens"),
        ({}, {"cannot": ("max_tokens",)}, "max_completion_tokens"),
        ({}, {}, "max_tokens"),
    ],
)
async def test_the_bound_on_tokens_goes_under_the_name_that_the_worker_knows(
    asked: dict[str, Any], spec: dict[str, Any], name: str
) -> None:
    kit = Kit(pools=one(**spec))
    await kit.serve(ask(model="alpha", **asked))
    sent = kit.workers.calls[0].body
    assert {key: sent[key] for key in sent if key.startswith("max_")} == {name: 9 if asked else 64}


async def test_a_hint_is_left_out_where_a_worker_has_no_place_for_it() -> None:
    kit = Kit(pools=one(cannot=("prompt_cache_key",)))
    await kit.serve(ask(model="alpha", prompt_cache_key="k", prompt_cache_retention="24h"))
    assert "prompt_cache_key" not in kit.workers.calls[0].body
    assert kit.workers.calls[0].body["prompt_cache_retention"] == "24h"


async def test_a_worker_that_cannot_take_a_request_is_not_offered_it() -> None:
    pools = pool(model_worker("alpha", "atlas", cannot=("image", "logprobs")), model_worker("beta", "birch"))
    script = (plan(("atlas", None, [])),)
    kit = Kit(script, pools=pools)
    for body in (ask() | {"messages": [said(image(PNG))]}, ask(logprobs=True)):
        running = await kit.serve(body)
        assert [entry["name"] for entry in running.record.pool] == ["beta"]
        assert kit.workers.calls[-1].worker.name == "beta"
    await kit.serve(ask())
    assert kit.workers.calls[-1].worker.name == "alpha"


@pytest.mark.parametrize("model", ["baton", "alpha"])
async def test_a_request_that_no_worker_takes_is_refused_with_the_place_of_the_reason(model: str) -> None:
    kit = Kit(pools=one(cannot=("image", "seed")))
    for body, param in (
        (ask(model=model) | {"messages": [said(image(PNG))]}, "messages[0].content[0].image_url.url"),
        (ask(model=model, seed=1), "seed"),
    ):
        with pytest.raises(BadRequest) as refused:
            await kit.serve(body)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", param)
    assert kit.workers.calls == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reasoning_model_answers_a_request_with_sampling_settings(stream: bool) -> None:
    """Frameworks send `temperature: 0` with every request; it may not keep the model out of every plan."""
    kit = Kit(pools=pool(model_worker("alpha", "atlas", model="o3"), model_worker("beta", "birch", model="gpt-4o")))
    running = await kit.serve(ask(temperature=0, max_tokens=20, stop=["x"], stream=stream))
    [call] = kit.workers.calls
    assert call.worker.name == "alpha"
    assert {name: value for name, value in call.body.items() if name != "messages"} == {
        "max_completion_tokens": 20, "stop": ["x"],
    }  # fmt: skip
    assert reply_headers(running.record)["x-baton-left-out"] == "temperature"


async def test_a_preference_that_a_worker_cannot_take_is_left_out_and_named() -> None:
    kit = Kit(pools=one(cannot=("temperature", "parallel_tool_calls")))
    running = await kit.serve(ask(model="alpha", temperature=0, tools=[TOOL], parallel_tool_calls=False))
    assert {"temperature", "parallel_tool_calls"}.isdisjoint(kit.workers.calls[0].body)
    assert reply_headers(running.record)["x-baton-left-out"] == "temperature, parallel_tool_calls"


async def test_a_worker_that_gets_everything_has_no_such_header() -> None:
    kit = Kit(pools=one())
    assert "x-baton-left-out" not in reply_headers((await kit.serve(ask(temperature=0))).record)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("model", "native"), [("gpt-5.2", True), ("qwen3-32b", False)])
async def test_a_custom_tool_is_a_function_for_workers_that_know_only_those(
    model: str, native: bool, stream: bool
) -> None:
    tool = {"type": "custom", "custom": {"name": "patch", "description": "edits", "format": {"type": "text"}}}
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** é"}}
    arguments = json.dumps({"input": "*** é"}, ensure_ascii=False)
    function = {"id": "c", "type": "function", "function": {"name": "patch", "arguments": arguments}}
    said_call = Says(None, [custom if native else function], "tool_calls")
    kit = Kit(workers={"alpha": [said_call, Says("done")]}, pools=one(model=model))
    body = ask(tools=[tool], tool_choice={"type": "custom", "custom": {"name": "patch"}}, model="alpha", stream=stream)
    message = (await (await kit.serve(body)).result())["choices"][0]["message"]
    assert message["tool_calls"] == [custom]
    turn = [{"role": "assistant", "tool_calls": [custom]}, {"role": "tool", "tool_call_id": "c", "content": "ok"}]
    await kit.serve({**body, "messages": [*body["messages"], *turn]})
    first, second = [call.body for call in kit.workers.calls]
    assert first["tools"][0]["type"] == first["tool_choice"]["type"] == ("custom" if native else "function")
    assert second["messages"][1]["tool_calls"] == [custom if native else function]
    if not native:
        assert first["tools"][0]["function"]["parameters"]["required"] == ["input"]


VENDORS: dict[str, Any] = {"top_k": 20, "min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_vendors_parameters_go_to_workers_that_take_them_and_to_no_others(stream: bool) -> None:
    strict = model_worker("beta", "birch", url="https://api.openai.com/v1", takes=("top_k",))
    kit = Kit(pools=pool(model_worker("alpha", "atlas"), strict))
    await kit.serve(ask(model="alpha", stream=stream, **VENDORS))
    running = await kit.serve(ask(model="beta", stream=stream, **VENDORS))
    alpha, beta = [call.body for call in kit.workers.calls]
    assert {name: alpha.get(name) for name in VENDORS} == VENDORS
    assert {name: beta[name] for name in VENDORS if name in beta} == {"top_k": 20}
    assert reply_headers(running.record)["x-baton-left-out"] == "chat_template_kwargs, min_p"
    assert running.chat.dropped == ()


async def test_a_plans_earlier_steps_get_no_vendors_parameters() -> None:
    kit = Kit((plan(("birch", "try", []), ("atlas", None, [0])),))
    await kit.serve(ask(**VENDORS))
    assert ["top_k" in call.body for call in kit.workers.calls] == [False, True]


async def test_the_pool_file_adds_parameters_of_its_own() -> None:
    kit = Kit(pools=one(takes=("safe_prompt",)))
    running = await kit.serve(ask(model="alpha", safe_prompt={"deep": [1]}, another=1))
    assert kit.workers.calls[0].body["safe_prompt"] == {"deep": [1]}
    assert running.chat.dropped == ("another",)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"top_k": "many"}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs.chat_template"),
        ({"thinking": {"type": "x" * 20_000}}, "thinking"),
        ({"thinking": [{"api_base": "http://127.0.0.1:1"}]}, "thinking"),
        ({"thinking": {"a": [{"api_base": "http://127.0.0.1:1"}]}}, "thinking.a[0].api_base"),
    ],
)
async def test_a_vendors_parameter_that_is_no_good_is_refused_by_its_path(params: dict[str, Any], param: str) -> None:
    kit = Kit(pools=one())
    with pytest.raises(BadRequest) as refused:
        await kit.serve(ask(model="alpha", **params))
    assert refused.value.param == param
    assert kit.workers.calls == []


def results(*contents: Any) -> dict[str, Any]:
    """A turn with the results of tool calls, and a question after it."""
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": f"c{at}", "type": "function", "function": function} for at in range(2)]
    tools = [{"role": "tool", "tool_call_id": f"c{at}", "content": content} for at, content in enumerate(contents)]
    question = [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": calls}]
    return {"messages": [*question, *tools, {"role": "user", "content": "well?"}]}


async def test_an_image_in_a_tools_result_goes_behind_the_results_where_workers_take_only_text() -> None:
    kit = Kit(pools=one())
    picture = image(PNG)
    await kit.serve(ask(model="alpha") | results([{"type": "text", "text": "seen"}, picture], "plain"))
    messages = kit.workers.calls[0].body["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user", "user"]
    assert [part["type"] for part in messages[2]["content"]] == ["text", "text"]
    assert messages[3]["content"] == "plain"
    label, attached = messages[4]["content"]
    assert "c0" in label["text"]
    assert attached == picture


async def test_it_stays_where_the_vendor_takes_it() -> None:
    kit = Kit(pools=one(kind="litellm", model="anthropic/claude-haiku-4-5"))
    body = ask(model="alpha") | results([image(PNG)], "plain")
    await kit.serve(body)
    messages = kit.workers.calls[0].body["messages"]
    assert messages[2]["content"] == [image(PNG)]
    assert len(messages) == len(body["messages"])


async def test_a_worker_without_eyes_is_not_offered_an_image_in_a_tools_result() -> None:
    kit = Kit(pools=one(cannot=("image",)))
    with pytest.raises(BadRequest) as refused:
        await kit.serve(ask(model="alpha") | results([image(PNG)], "plain"))
    assert refused.value.param == "messages[2].content[0].image_url.url"


# ---------------------------------------------------------------- n


async def test_n_goes_to_a_worker_that_takes_it() -> None:
    body = {"choices": [{"index": i, "message": {"content": str(i)}, "finish_reason": "stop"} for i in range(3)]}
    workers = Raw(body)
    kit = Kit(workers=workers)
    running = await kit.serve(ask(model="alpha", n=3))
    assert [call.body["n"] for call in workers.calls] == [3]
    assert [choice["index"] for choice in (await running.result())["choices"]] == [0, 1, 2]


class Few:
    """Workers that answer any `n` with two choices, and a call for one choice with one."""

    def __init__(self) -> None:
        self.calls: list[WorkerCall] = []

    async def complete(self, call: WorkerCall) -> WorkerReply:
        self.calls.append(call)
        few = range(2 if "n" in call.body else 1)
        choices = [{"index": at, "message": {"content": f"{len(self.calls)}{at}"}} for at in few]
        return WorkerReply({"choices": choices}, Usage(10, 5))

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        reply = await self.complete(call)
        for choice in reply.body["choices"]:
            yield {"choices": [{"index": choice["index"], "delta": choice["message"], "finish_reason": "stop"}]}
        yield {"choices": [], "usage": usage_body(reply.usage)}


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_that_a_worker_left_out_of_n_are_asked_for(stream: bool) -> None:
    workers = Few()
    kit = Kit(workers=workers, pools=one())
    running = await kit.serve(ask(n=4, seed=7, model="alpha", stream=stream))
    choices = (await running.result())["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["message"]["content"] for choice in choices][:2] == ["10", "11"]
    assert {choice["message"]["content"] for choice in choices[2:]} == {"20", "30"}
    assert [(call.body.get("n"), call.body["seed"]) for call in workers.calls] == [(4, 7), (None, 9), (None, 10)]
    assert running.record.prompt_tokens == 30
    assert await kit.open_nano() == 0


@pytest.mark.parametrize("n", [2, 128])
async def test_n_is_made_of_calls_where_a_worker_gives_one_choice(n: int) -> None:
    kit = Kit(workers={"alpha": [Says(str(i)) for i in range(n)]}, pools=one(cannot=("n",)), caps=Caps(calls=1))
    running = await kit.serve(ask(model="alpha", n=n, seed=40))
    choices = (await running.result())["choices"]
    assert [choice["index"] for choice in choices] == list(range(n))
    assert sorted(choice["message"]["content"] for choice in choices) == sorted(map(str, range(n)))
    assert all("n" not in call.body for call in kit.workers.calls)
    assert sorted(call.body["seed"] for call in kit.workers.calls) == list(range(40, 40 + n))
    assert kit.workers.in_flight_peak <= 4  # caps.parallel
    assert running.usage == Usage(10 * n, 5 * n)
    assert await kit.posted_nano() == n * cost_nano(PRICE, Usage(10, 5))
    assert await kit.open_nano() == 0
    assert len(payloads(kit, "dispatch")) == n
    assert len({payload["attempt"] for payload in payloads(kit, "dispatch")}) == n


async def test_the_hold_covers_every_call_of_a_fan_out() -> None:
    alone = await Kit(pools=one(cannot=("n",))).serve(ask(model="alpha"))
    many = await Kit(pools=one(cannot=("n",))).serve(ask(model="alpha", n=5))
    assert many.record.hold_nano >= 5 * alone.record.hold_nano


async def test_choices_of_a_fan_out_stream_under_their_own_index() -> None:
    kit = Kit(workers={"alpha": [Says("a b"), Says("c d"), Says("e f")]}, pools=one(cannot=("n",)))
    running, pieces = await streamed(kit, ask(model="alpha", n=3))
    assert contents(pieces) == {0: "a b", 1: "c d", 2: "e f"}
    assert running.body is not None
    assert [choice["finish_reason"] for choice in running.body["choices"]] == ["stop"] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_of_a_fan_out_that_fails_ends_the_others(stream: bool) -> None:
    broken = UpstreamError("no", upstream_status=500, retryable=False)
    kit = Kit(workers={"alpha": [Says(delay_s=30), broken, Says(delay_s=30)]}, pools=one(cannot=("n",)))
    running = await kit.serve(ask(model="alpha", n=3, stream=stream))
    assert running.error is broken
    assert kit.workers.in_flight == 0
    assert await kit.open_nano() == 0


# ---------------------------------------------------------------- the promised shape


async def test_a_reply_of_the_promised_shape_is_given_as_it_is() -> None:
    kit = Kit(workers={"alpha": Says(GOOD)})
    assert await kit.text(await kit.serve(ask(model="alpha", response_format=STRICT))) == GOOD
    assert len(kit.workers.calls) == 1


async def test_one_that_is_not_is_asked_for_once_more_and_paid_for_and_logged() -> None:
    kit = Kit(workers={"alpha": [Says(BAD), Says(GOOD)]})
    running = await kit.serve(ask(model="alpha", response_format=STRICT))
    assert await kit.text(running) == GOOD
    again = kit.workers.calls[1].body
    assert again["messages"][-2] == {"role": "assistant", "content": BAD}
    assert "'one' is not of type 'integer'" in again["messages"][-1]["content"]
    assert again["response_format"] == STRICT
    step = running.record.steps[0]
    assert len(step.attempts) == 2
    assert step.reply == GOOD
    assert await kit.posted_nano() == 2 * cost_nano(PRICE, Usage(10, 5))
    assert await kit.open_nano() == 0


@pytest.mark.parametrize("format_", [STRICT, {"type": "json_object"}])
async def test_one_that_is_wrong_twice_is_refused(format_: dict[str, Any]) -> None:
    kit = Kit(workers={"alpha": Says("sure! here it is")})
    running = await kit.serve(ask(model="alpha", response_format=format_))
    assert running.error is not None
    assert (running.error.status, running.error.code) == (502, "invalid_structured_output")
    assert running.error.reply_headers()["x-should-retry"] == "false"
    assert len(kit.workers.calls) == 2
    assert running.record.steps[0].reply == "sure! here it is"


async def test_in_a_plan_another_worker_answers_instead() -> None:
    kit = Kit(workers={"alpha": Says(BAD), "beta": Says(GOOD), "gamma": Says(GOOD)})
    running = await kit.serve(ask(response_format=STRICT))
    assert await kit.text(running) == GOOD
    assert running.record.fallback == "worker_invalid"


async def test_an_earlier_answer_of_another_shape_is_never_shipped_for_it() -> None:
    script = (plan(("atlas", None, []), ("birch", None, [0])),)
    kit = Kit(script, {"alpha": Says("a draft"), "beta": Says(BAD), "gamma": Says(BAD)})
    running = await kit.serve(ask(response_format=STRICT))
    assert running.body is None
    assert running.error is not None


async def test_only_the_choices_that_are_wrong_are_asked_for_again() -> None:
    kit = Kit(workers={"alpha": [Says(GOOD), Says(BAD), Says('{"x": 2}')]}, pools=one(cannot=("n",)))
    running = await kit.serve(ask(model="alpha", n=2, response_format=STRICT))
    texts = [choice["message"]["content"] for choice in (await running.result())["choices"]]
    assert texts == [GOOD, '{"x": 2}']
    assert len(kit.workers.calls) == 3


@pytest.mark.parametrize(
    "reply",
    [Says(BAD, finish_reason="length"), Says(None, tool_calls=[{"id": "1", "type": "function", "function": {}}])],
)
async def test_a_truncated_reply_or_a_tool_call_is_passed_on(reply: Says) -> None:
    kit = Kit(workers={"alpha": reply})
    assert (await kit.serve(ask(model="alpha", response_format=STRICT, tools=[TOOL]))).error is None


async def test_a_promise_that_is_not_strict_is_the_workers_alone() -> None:
    loose = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    kit = Kit(workers={"alpha": Says(BAD)})
    assert await kit.text(await kit.serve(ask(model="alpha", response_format=loose))) == BAD


async def test_a_second_try_that_the_cap_does_not_cover_is_not_made() -> None:
    kit = Kit(workers={"alpha": Says(BAD)}, caps=Caps(calls=1))
    running = await kit.serve(ask(model="alpha", response_format=STRICT))
    assert running.error is not None
    assert running.error.code == "invalid_structured_output"
    assert len(kit.workers.calls) == 1


async def test_a_stream_ends_only_once_it_was_checked() -> None:
    kit = Kit(workers={"alpha": Says('{"x": 1 }')})
    running, pieces = await streamed(kit, ask(model="alpha", response_format=STRICT))
    assert running.error is None
    assert contents(pieces) == {0: '{"x": 1 }'}
    ends = [at for at, piece in enumerate(pieces) if any(choice.get("finish_reason") for choice in piece)]
    assert ends == [len(pieces) - 1]


async def test_a_stream_of_the_wrong_shape_never_ends_well() -> None:
    kit = Kit(workers={"alpha": Says('{"x": "one" }')})
    running, pieces = await streamed(kit, ask(model="alpha", response_format=STRICT))
    assert running.error is not None
    assert running.error.code == "invalid_structured_output"
    assert not any(choice.get("finish_reason") for piece in pieces for choice in piece)
    assert len(kit.workers.calls) == 1


# ---------------------------------------------------------------- tools, tiers, prints


def calls(count: int) -> list[dict[str, Any]]:
    return [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in range(count)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("parallel", "left"), [(False, 1), (True, 3), (None, 3)])
async def test_no_parallel_tool_calls_means_one_whatever_the_worker_makes_of_it(
    parallel: bool | None, left: int, stream: bool
) -> None:
    kit = Kit(workers={"alpha": Says(None, tool_calls=calls(3), finish_reason="tool_calls")})
    body = ask(model="alpha", tools=[TOOL], parallel_tool_calls=parallel)
    running, pieces = await streamed(kit, body) if stream else (await kit.serve(body), [])
    assert running.body is not None
    assert len(running.body["choices"][0]["message"]["tool_calls"]) == left
    deltas = [call for piece in pieces for choice in piece for call in choice.get("delta", {}).get("tool_calls") or ()]
    assert [call["index"] for call in deltas] == (list(range(left)) if stream else [])


@pytest.mark.parametrize(
    ("told", "tier"), [("flex", "flex"), ("priority", "priority"), ("on_demand", None), (None, "default")]
)
async def test_the_tier_is_the_one_that_was_used(told: str | None, tier: str | None) -> None:
    choice = {"index": 0, "finish_reason": "stop"}
    whole = {"service_tier": told, "system_fingerprint": "fp_1", "choices": [{**choice, "message": {"content": "x"}}]}
    chunk = {"service_tier": told, "system_fingerprint": "fp_1", "choices": [{**choice, "delta": {"content": "x"}}]}
    kit = Kit(workers=Raw(whole, [chunk]))
    for running in (await kit.serve(ask(model="alpha")), (await streamed(kit, ask(model="alpha")))[0]):
        assert running.body is not None
        assert (running.body["service_tier"], running.body["system_fingerprint"]) == (tier, "fp_1")
        assert running.reply_facts.get("service_tier", "default") in (tier, "default")
        assert running.body.get("native_service_tier") == (told if told and tier is None else None)


@pytest.mark.parametrize(("store", "train"), [(False, False), (True, True), (None, True)])
async def test_a_request_with_store_false_is_not_for_training(store: bool | None, train: bool) -> None:
    assert (await Kit().serve(ask(store=store))).record.train is train


async def test_a_child_loop_that_answers_gets_the_clients_parameters() -> None:
    kit = Kit((plan(("echo", "look", [])), plan(("atlas", None, []))))
    await kit.serve(ask(seed=7))
    assert kit.workers.calls[-1].body["seed"] == 7


# ---------------------------------------------------------------- media, progress


@pytest.mark.parametrize("stream", [False, True])
async def test_a_listed_image_reaches_the_worker_as_data_and_the_log_as_its_url(stream: bool) -> None:
    url, data = "https://files.example/a.png", b"\x89PNG\r\n\x1a\n" + b"\x00" * 900
    media = FakeMedia({url: ("image/png", data)})
    kit = Kit(workers={"alpha": Says("a cat")}, media=media)
    body = ask(model="alpha", stream=stream) | {"messages": [said({"type": "text", "text": "what?"}, image(url))]}
    running = await kit.serve(body)
    sent = kit.workers.calls[0].body["messages"][0]["content"][1]["image_url"]["url"]
    assert sent.startswith("data:image/png;base64,iVBORw0KGgo")
    assert media.fetched == [url]
    logged = json.dumps(payloads(kit, "rollout"))
    assert url in logged
    assert sent not in logged
    assert "sha256" in logged
    assert running.error is None


async def test_a_worker_that_fetches_images_itself_gets_the_url() -> None:
    url, media = "https://anywhere.example/a.png", FakeMedia({})
    pools = pool_file(model_worker("seer", "ember", fetches=True))
    kit = Kit(workers={"seer": Says("a cat"), "alpha": Says("?")}, media=media, pools=pools)
    body = ask(model="seer") | {"messages": [said({"type": "text", "text": "what?"}, image(url))]}
    assert (await kit.serve(body)).error is None
    assert kit.workers.calls[0].body["messages"][0]["content"][1]["image_url"]["url"] == url
    with pytest.raises(BadRequest):  # another worker of the plan could not read it
        await kit.serve(body | {"model": "baton"})
    assert media.fetched == []


async def test_an_image_that_cannot_be_fetched_is_a_400_and_costs_nothing() -> None:
    kit = Kit(media=FakeMedia({"https://files.example/other.png": ("image/png", b"")}))
    running = await kit.serve(ask() | {"messages": [said(image("https://files.example/a.png"))]})
    assert running.error is not None
    assert (running.error.status, running.error.code) == (400, "invalid_image_url")
    assert kit.workers.calls == []
    assert await kit.posted_nano() == 0
    assert await kit.open_nano() == 0


async def test_progress_tells_of_plans_and_steps_without_their_texts() -> None:
    kit = Kit((plan(("atlas", "secret task", []), ("birch", None, [0])),))
    body = ask(stream=True)
    running = await kit.start(body, progress=True)
    news = [piece.event async for piece in items_of(running) if isinstance(piece, ProgressNote)]
    await running.finished.wait()
    assert [event["event"] for event in news if event["event"] == "planned"] == ["planned"]
    ended = {event["worker"]: event["status"] for event in news if event["event"] == "step_ended"}
    assert ended == {"alpha": "done", "beta": "done"}
    assert "secret" not in json.dumps(news)


async def test_progress_goes_only_to_clients_that_ask() -> None:
    _, pieces = await streamed(Kit(), ask())
    assert not any(isinstance(piece, ProgressNote) for piece in pieces)
