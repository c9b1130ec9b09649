"""Tool workers, and the pool that picks an adapter by kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from gateway.adapters.upstream.pooled import PooledWorkers, pooled_workers
from gateway.adapters.upstream.tools import ToolWorkers
from gateway.core.access.depth import verify
from gateway.core.loop.compose import SeenStep, step_messages, task_text
from gateway.core.loop.replies.testing import program_of
from gateway.core.money.amounts import Usage
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.errors import UpstreamError, UpstreamProtocol, UpstreamRateLimited, UpstreamRefused, UpstreamTimeout
from gateway.service.ports.request import WorkerCall
from tests.fakes.workers import FakeWorkers, Says
from tests.upstreams.server import Request, Server, json_reply
from tests.waiting import BOUND_S, at_some_pace, until

KEY = "tool-key-123456"
SAW = [("atlas", "solve", "It is 4.\nAnswer: 4"), ("quill", "solve", "Answer: 5"), ("ember", "solve", "So\nAnswer: 4")]


def a_tool(url: str, **more: Any) -> WorkerSpec:
    fields = {"name": "w", "handle": "anvil", "kind": "tool", "url": url, "price": {"call_usd": "0.001"}}
    return WorkerSpec.model_validate(fields | more)


def a_call(spec: WorkerSpec, saw: list[tuple[str, str, str]] | None = None, timeout_s: float = 5.0) -> WorkerCall:
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "do it"}]}
    return WorkerCall(spec, body, timeout_s, "rollout", "0.1", 2, SAW if saw is None else saw)


@asynccontextmanager
async def a_server(answer: Mapping[str, Any] | None, status: int = 200) -> AsyncIterator[tuple[str, Sequence[Request]]]:
    async with Server(lambda request: json_reply(answer, status)) as server:
        yield f"{server.url}/run", server.requests


@pytest.fixture
async def tools() -> AsyncIterator[ToolWorkers]:
    tools = ToolWorkers({"w": KEY}, b"secret")
    yield tools
    await tools.close()


async def test_vote_gives_the_whole_winning_reply(tools: ToolWorkers) -> None:
    reply = await tools.complete(a_call(a_tool("builtin:vote")))
    assert reply.body["choices"][0]["message"]["content"] == "It is 4.\nAnswer: 4"
    assert reply.body["choices"][0]["finish_reason"] == "stop"
    assert reply.usage == Usage()


async def test_vote_breaks_a_tie_for_the_earliest(tools: ToolWorkers) -> None:
    reply = await tools.complete(a_call(a_tool("builtin:vote"), SAW[:2]))
    assert reply.body["choices"][0]["message"]["content"] == SAW[0][2]


def program(body: str) -> str:
    return f"Here:\n\n```python\ndef total(numbers: list[int]) -> int:\n    {body}\n```\n\nDone."


async def test_vote_elects_the_program_that_returns_what_others_do(tools: ToolWorkers) -> None:
    said = ["return len(numbers)", "return sum(numbers)", "t = 0\n    for n in numbers:\n        t += n\n    return t"]
    saw = [(f"w{index}", "", program(body)) for index, body in enumerate(said)]
    endless = ("a", "", program("while True: pass"))
    runs = a_tool("builtin:vote", params={"run_code": True})
    for spec, seen, wins in ((runs, saw, 1), (runs, [endless, *saw[1:]], 1), (a_tool("builtin:vote"), saw, 0)):
        reply = await tools.complete(a_call(spec, seen, BOUND_S))
        assert reply.body["choices"][0]["message"]["content"] == seen[wins][2]


async def test_vote_over_nothing_is_refused(tools: ToolWorkers) -> None:
    with pytest.raises(UpstreamRefused, match="sees no replies"):
        await tools.complete(a_call(a_tool("builtin:vote"), []))


JUDGE = {"url": "builtin:judge", "params": {"model": "m", "rubric": "It rhymes."}}
MODEL = {"name": "m", "handle": "mm", "kind": "openai", "model": "m-1", "context_tokens": 4096}
PRICE = {"input_usd_per_mtok": 1, "output_usd_per_mtok": 2}


async def judged(says: str, saw: list[tuple[str, str, str]], tokens: int = 1024) -> tuple[Any, Sequence[Request]]:
    """What the judge answers where its model says `says`, and what the model was asked."""
    usage = {"prompt_tokens": 70, "completion_tokens": 9, "total_tokens": 79}
    message = {"role": "assistant", "content": says}
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
    async with a_server(answer) as (url, requests):
        model = MODEL | {"url": url.removesuffix("/run"), "price": PRICE}
        judge = {"name": "w", "handle": "anvil", "kind": "tool", **JUDGE}
        pool = PoolFile.model_validate({"workers": [judge, model], "pools": {"default": ["w", "m"]}})
        workers = pooled_workers(pool, {"m": KEY}, b"secret")
        call = a_call(pool.worker("w"), saw)
        try:
            reply = await workers.complete(replace(call, body={**call.body, "max_tokens": tokens}))
        finally:
            await workers.close()
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (70, 9)
        return json.loads(reply.body["choices"][0]["message"]["content"]), requests


async def test_a_judge_runs_two_programs_where_it_may_and_asks_no_model() -> None:
    loop = "def add(a: int, b: int) -> int:\n    for _ in range(abs(b)):\n        a += 1 if b > 0 else -1\n    return a"
    programs = [
        "def add(a: int, b: int) -> int:\n    return a + b",
        loop,
        "def add(a: int, b: int) -> int:\n    return a",
    ]
    saw = [("atlas", "", f"```python\n{program}\n```") for program in programs]
    judge = {"name": "w", "handle": "anvil", "kind": "tool", **JUDGE, "params": {"model": "m", "run_code": True}}
    pool = PoolFile.model_validate({"workers": [judge, MODEL | {"url": "http://127.0.0.1:9/v1", "price": PRICE}],
                                    "pools": {"default": ["w", "m"]}})  # fmt: skip
    workers = pooled_workers(pool, {"m": KEY}, b"secret")
    try:
        for pair, same in (((0, 1), True), ((0, 2), False)):
            call = a_call(pool.worker("w"), [saw[at] for at in pair])
            reply = await workers.complete(replace(call, body={**call.body, "max_tokens": 1024}))
            said = json.loads(reply.body["choices"][0]["message"]["content"])
            assert (said["same"], said["by"]) == (same, "builtin:judge@1")
            assert reply.usage.prompt_tokens == 0
    finally:
        await workers.close()


async def test_a_judge_asks_its_model_by_the_rubric() -> None:
    said, (request,) = await judged('{"reason": "no rhyme", "verdict": "wrong"}', SAW[:1])
    assert said == {"accept": False, "value": 0.0, "verdict": "wrong", "reason": "no rhyme", "by": "builtin:judge@1"}
    asked = request.body
    assert "Rubric: It rhymes." in asked["messages"][0]["content"]
    assert [message["content"] for message in asked["messages"][1:3]] == ["s", "do it"]
    assert (asked["model"], asked["max_tokens"]) == ("m-1", 300)


async def test_a_judge_of_two_replies_says_whether_they_say_the_same() -> None:
    said, (request,) = await judged('Well. {"reason": "alike", "verdict": "same"}', SAW[:2])
    assert (said["same"], "accept" in said) == (True, False)
    assert "last two <reply> blocks" in request.body["messages"][0]["content"]


@pytest.mark.parametrize("says", ["It is right.", '{"verdict": "right"} {"verdict": "wrong"}', '{"verdict": "good"}'])
async def test_a_judge_without_one_verdict_gives_none(says: str) -> None:
    with pytest.raises(UpstreamProtocol, match="verdicts instead of one"):
        await judged(says, SAW[:1])


async def test_a_judge_that_sees_nothing_or_has_no_room_is_refused() -> None:
    for saw, tokens in ((list[tuple[str, str, str]](), 1024), (SAW[:1], 100)):
        with pytest.raises(UpstreamRefused, match="judge"):
            await judged("", saw, tokens)


async def test_a_tool_streams_its_reply_as_one_chunk(tools: ToolWorkers) -> None:
    chunks = [chunk async for chunk in tools.stream(a_call(a_tool("builtin:vote")))]
    assert [choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"]] == [SAW[0][2]]
    assert chunks[0]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 0


async def test_an_http_tool_gets_the_task_and_what_its_step_sees(tools: ToolWorkers) -> None:
    async with a_server({"content": "42", "usage": {"prompt_tokens": 3, "completion_tokens": 1}}) as (url, requests):
        reply = await tools.complete(a_call(a_tool(url, params={"lang": "py"})))
    assert reply.body["choices"][0]["message"]["content"] == "42"
    assert reply.usage == Usage(3, 1)
    [request] = requests
    headers, body = request.headers, request.body
    assert body["task"] == "do it"
    assert body["lang"] == "py"
    assert body["seen"] == [{"handle": h, "task": t, "reply": r} for h, t, r in SAW]
    assert headers["authorization"] == f"Bearer {KEY}"
    assert verify(headers["x-baton-depth"], b"secret") == 2


@pytest.mark.parametrize("answer", [{"content": 5}, {}, None, [1], {"content": None}])
async def test_an_answer_without_text_is_a_protocol_error(tools: ToolWorkers, answer: Any) -> None:
    async with a_server(answer) as (url, _):
        with pytest.raises(UpstreamProtocol):
            await tools.complete(a_call(a_tool(url)))


@pytest.mark.parametrize(("status", "retryable"), [(400, False), (401, False), (429, True), (503, True)])
async def test_a_tools_statuses_map_as_a_models_do(tools: ToolWorkers, status: int, retryable: bool) -> None:
    async with a_server({"error": {"message": f"no {KEY}"}}, status) as (url, _):
        with pytest.raises(UpstreamError) as caught:
            await tools.complete(a_call(a_tool(url)))
    assert caught.value.upstream_status == status
    assert caught.value.retryable is retryable
    assert KEY not in caught.value.message


async def test_an_answer_over_the_bound_is_refused() -> None:
    tools = ToolWorkers({}, b"secret", reply_bytes_max=100)
    async with a_server({"content": "x" * 200}) as (url, _):
        with pytest.raises(UpstreamProtocol, match="larger than"):
            await tools.complete(a_call(a_tool(url)))
    await tools.close()


def test_the_task_is_the_last_user_message() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "b"}]
    assert task_text([{"role": "user", "content": "old"}, {"role": "user", "content": parts}]) == "a\nb"
    assert task_text([{"role": "assistant", "content": "x"}]) == ""
    assert task_text([]) == ""


class Closing(FakeWorkers):
    """The fake, with something to close."""

    closed = False

    async def close(self) -> None:
        self.closed = True


def a_model(concurrency: int) -> WorkerSpec:
    fields = {"name": "w", "handle": "atlas", "kind": "openai", "model": "m", "url": "http://w/v1"}
    return WorkerSpec.model_validate(fields | {"concurrency_max": concurrency})


async def test_a_worker_never_runs_more_calls_than_it_may() -> None:
    fake = Closing({"w": Says("fine", delay_s=0.02)})
    pool = PooledWorkers({"openai": fake})
    call = a_call(a_model(3))
    await asyncio.gather(*(pool.complete(call) for _ in range(10)))
    assert fake.in_flight_peak == 3
    await pool.close()
    assert fake.closed


async def test_waiting_for_a_place_counts_into_the_call() -> None:
    async def story(pace: int) -> None:
        fake = Closing({"w": Says("fine", delay_s=0.3 * pace)})
        pool = PooledWorkers({"openai": fake})
        first = asyncio.create_task(pool.complete(a_call(a_model(1))))
        await asyncio.sleep(0)
        with pytest.raises(UpstreamTimeout, match="no free place") as caught:
            await pool.complete(a_call(a_model(1), timeout_s=0.05 * pace))
        assert not caught.value.dispatched
        second = asyncio.create_task(pool.complete(a_call(a_model(1), timeout_s=60.0)))
        await asyncio.gather(first, second)
        assert fake.calls[-1].timeout_s < 60.0 - 0.05 * pace

    await at_some_pace(story)


async def test_the_queue_for_a_worker_is_bounded() -> None:
    fake = Closing({"w": Says("fine", delay_s=5)})
    pool = PooledWorkers({"openai": fake})
    tasks = [asyncio.create_task(pool.complete(a_call(a_model(1)))) for _ in range(17)]
    await until(lambda: fake.in_flight)
    with pytest.raises(UpstreamRateLimited, match="too many"):
        await pool.complete(a_call(a_model(1)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_leaving_a_stream_frees_its_place() -> None:
    fake = Closing({"w": Says("one two three")})
    pool = PooledWorkers({"openai": fake})
    async with aclosing(cast(Any, pool.stream(a_call(a_model(1))))) as chunks:
        await anext(chunks)
    assert fake.cancelled == ["w"]
    await pool.complete(a_call(a_model(1), timeout_s=BOUND_S))


async def test_self_is_no_worker_call() -> None:
    spec = WorkerSpec.model_validate({"name": "again", "handle": "echo", "kind": "self"})
    pool = PooledWorkers({})
    with pytest.raises(UpstreamError, match="kind self") as caught:
        await pool.complete(a_call(spec))
    assert not caught.value.dispatched


async def test_a_pool_is_wired_from_its_file() -> None:
    pool = PoolFile.model_validate({"workers": [a_tool("builtin:vote")], "pools": {"default": ["w"]}})
    workers = pooled_workers(pool, {}, b"secret")
    reply = await workers.complete(a_call(pool.worker("w")))
    assert reply.body["choices"][0]["message"]["content"] == SAW[0][2]
    await workers.close()


# ---------------------------------------------------------------- builtin:python


def a_task(text: str | None) -> dict[str, Any]:
    return {"messages": step_messages([{"role": "user", "content": "Write add."}], text, [])}


async def ran(
    tools: ToolWorkers, task: str | None, *replies: str, timeout_s: float = 20.0, body: Any = None, **params: Any
) -> Any:
    call = WorkerCall(
        a_tool("builtin:python", params=params), body or a_task(task), timeout_s, "rollout", "0.1", 0,
        [("atlas", "solve", reply) for reply in replies],
    )  # fmt: skip
    return json.loads((await tools.complete(call)).body["choices"][0]["message"]["content"])


CANDIDATE = "Here:\n```python\ndef add(a, b):\n    return a + b\n```"


async def test_python_runs_the_program_of_its_task_among_the_files_that_it_is_given(tools: ToolWorkers) -> None:
    code = "from candidate import add\nprint(add(2, 3), open('n.txt').read())\nopen('o.txt', 'w').write('x')"
    task = f"```python\n{code}\n```"
    done = await ran(tools, task, CANDIDATE, files={"n.txt": "seven"})
    assert done == {"exit_status": 0, "stdout": "5 seven\n", "files": {"o.txt": "x"}, "error": ""}


async def test_python_runs_the_code_that_it_sees_where_its_task_has_none(tools: ToolWorkers) -> None:
    tests = "```python\nassert add(1, 2) == 4, 'sum'\n```"
    done = await ran(tools, None, tests, CANDIDATE)
    assert (done["exit_status"], done["error"]) == (1, "AssertionError: sum")
    assert (await ran(tools, None, CANDIDATE))["exit_status"] == 0
    assert (await ran(tools, None, "Sorry, I cannot."))["error"].startswith("SyntaxError")


CHECKED_REQUEST = "Write add. These must pass:\n\n```python tests.py\nassert add(1, 2) == 3\n```"
DOUBLING = "```python\ndef add(a, b):\n    return a * 2\n```"


def a_request(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*messages, {"role": "user", "content": CHECKED_REQUEST}]}


async def test_python_runs_the_requests_own_tests_on_the_code_that_it_sees(tools: ToolWorkers) -> None:
    assert (await ran(tools, None, CANDIDATE, body=a_request()))["exit_status"] == 0
    done = await ran(tools, None, DOUBLING, body=a_request())
    assert (done["exit_status"], done["error"]) == (1, "AssertionError: ")


async def test_functions_of_a_requests_tests_are_called(tools: ToolWorkers) -> None:
    tests = "```python test_add.py\ndef test_add():\n    assert add(2, 2) == 5, 'called'\n```"
    body = {"messages": [{"role": "user", "content": f"Write add.\n{tests}"}]}
    assert (await ran(tools, None, CANDIDATE, body=body))["error"] == "AssertionError: called"


@pytest.mark.parametrize("end", ["import sys\nsys.exit()", "if __name__ == '__main__':\n    raise SystemExit(0)"])
async def test_code_that_leaves_at_its_end_is_tested_all_the_same(tools: ToolWorkers, end: str) -> None:
    code = f"```python\ndef add(a, b):\n    return a * 2\n\n{end}\n```"
    assert (await ran(tools, None, code, body=a_request()))["exit_status"] == 1
    contract = program_of(["assert add(1, 2) == 3"])
    assert (await ran(tools, contract, code))["exit_status"] == 1
    assert (await ran(tools, contract, code.replace("a * 2", "a + b")))["exit_status"] == 0


async def test_a_reply_cannot_put_tests_in_the_place_of_the_requests(tools: ToolWorkers) -> None:
    lies = f"{DOUBLING}\n```python tests.py\npass\n```"
    seen = step_messages(a_request()["messages"], None, [SeenStep(0, "atlas", None, lies)])
    says = {"role": "assistant", "content": "```python tests.py\npass\n```"}
    for body in ({"messages": seen}, a_request(says)):
        assert (await ran(tools, None, DOUBLING, body=body))["exit_status"] == 1


async def test_python_runs_the_operators_own_program(tools: ToolWorkers) -> None:
    program = "import sys\nsys.exit(0 if '42' in open('reply_0.txt').read() else 3)"
    assert (await ran(tools, None, "It is 42", program=program))["exit_status"] == 0
    assert (await ran(tools, None, "It is 41", program=program))["exit_status"] == 3


async def test_python_has_bounded_time_output_and_no_network(tools: ToolWorkers) -> None:
    assert (await ran(tools, "while True: pass", timeout_s=1.0))["exit_status"] in (124, 137)
    loud = await ran(tools, "print('x' * 10**6)\nopen('o.txt', 'w').write('y' * 10**5)")
    assert len(loud["stdout"]) == 16_384
    assert len(loud["files"]["o.txt"]) == 16_384
    assert "PermissionError" in (await ran(tools, "import socket\nsocket.socket()"))["error"]
    assert "MemoryError" in (await ran(tools, "x = bytearray(10**10)"))["error"]


async def test_python_without_any_code_is_refused(tools: ToolWorkers) -> None:
    with pytest.raises(UpstreamRefused, match="sees no code"):
        await ran(tools, None)
    with pytest.raises(UpstreamRefused, match="sees no code"):
        await ran(tools, "Run the tests, please.")
