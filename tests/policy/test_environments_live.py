"""`live` against a gateway's real HTTP API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.adapters.upstream.tools import ToolWorkers
from gateway.core.loop.caps import Caps
from gateway.core.openai.reply import reply_text
from gateway.core.pool.workers import PoolFile, Price, WorkerSpec
from gateway.errors import (
    ConfigError,
    UpstreamError,
    UpstreamProtocol,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamTimeout,
)
from gateway.service.ports.request import WorkerCall
from policy.environments.base import Episode, Prompt, Spend, SpendCapped
from policy.environments.executor import Executor
from policy.environments.live import GatewayWorkers, LiveEnvironment
from policy.environments.replay import FIRST_S, TOKENS_PER_S, ReplayEnvironment
from policy.environments.sampling import sample
from policy.environments.simulated import SpeakerWorkers
from policy.graders.base import Tools
from policy.simulators.recordings import load
from policy.simulators.replay import ReplaySpeaker
from policy.statistics.baselines import fixed
from policy.train.sources.live import read_pool
from tests.fakes.workers import Says
from tests.integration.test_api import Served, served
from tests.kit import PRICE, Kit, pool_file
from tests.policy.environments import lines, recorded, text

EXECUTOR = Executor(Caps(cost_nano=400_000_000))


def spend(cap_nano: int = 4_000_000_000) -> Spend:
    return Spend(cap_nano, episode_nano_max=400_000_000)


def kit_for(env: ReplayEnvironment, path: Path, plans: list[str] | None = None) -> Kit:
    specs = env.prompts("train", 1, 0)[0].pool
    pool = PoolFile(workers=specs, pools={"default": tuple(spec.name for spec in specs)})
    workers = SpeakerWorkers(ReplaySpeaker(load(path), FIRST_S, TOKENS_PER_S))
    return Kit(plans or ["{}"], workers, pools=pool, caps=Caps(cost_nano=2_000_000_000))


@pytest.fixture
def replay(tmp_path: Path) -> ReplayEnvironment:
    return recorded(tmp_path / "r.jsonl", lines(), executor=EXECUTOR)


@pytest.fixture
async def gateway(replay: ReplayEnvironment, tmp_path: Path) -> AsyncIterator[Served]:
    async with served(kit_for(replay, tmp_path / "r.jsonl")) as running:
        yield running


def live(gateway: Served, replay: ReplayEnvironment, meter: Spend, **more: Any) -> LiveEnvironment:
    prompts = replay.prompts("train", 20, 0)

    async def graded(prompt: Prompt, reply: str, _: Tools) -> float:
        return replay.grade(prompt, reply)

    return LiveEnvironment(f"{gateway.url}/v1", gateway.data_key, prompts, graded, meter, executor=EXECUTOR, **more)


async def test_live_gives_what_the_same_workers_give_in_process(gateway: Served, replay: ReplayEnvironment) -> None:
    env = live(gateway, replay, spend())
    prompts = env.prompts("train", 6, 0)
    for prompt in prompts:
        plans = [
            text(prompt, ("dear", None, [])),
            text(prompt, ("cheap", None, []), ("mid", None, []), ("vote", None, "all")),
            text(prompt, ("cheap", "Say it in other words.", [])),
        ]
        told, expected = await env.run(prompt, plans), await replay.run(prompt, plans)
        assert [figures(episode) for episode in told] == [figures(episode) for episode in expected]
        assert all(episode.latency_s > 0 for episode in told)
    await env.close()
    charged = sum(record.cost_nano for record in gateway.kit.metrics.records)
    assert env.spend.spent_nano == charged > 0
    assert {record.tags["train"] for record in gateway.kit.metrics.records} == {"false"}
    assert not any(record.train for record in gateway.kit.metrics.records)


async def test_a_judge_gives_its_verdict_here_as_it_does_when_served() -> None:
    """Its model is asked through the gateway, which charges for it."""
    kit = Kit(workers={"alpha": Says("Paris"), "beta": Says("Rome"), "gamma": judged})
    judge = WorkerSpec.model_validate(
        {"name": "judge", "handle": "sage", "kind": "tool", "url": "builtin:judge", "params": {"model": "gamma"}}
    ).model_copy(update={"price": PRICE})
    file = pool_file()
    pool = (*(file.worker(name) for name in ("alpha", "beta")), judge)
    messages = ({"role": "user", "content": "The capital of Italy?"},)
    questions = [Prompt(f"q{index}", messages, pool, "Rome") for index in range(4)]

    async def grade(prompt: Prompt, reply: str, _: Tools) -> float:
        return float(reply == prompt.reference)

    def plan(worker: str) -> str:
        return json.dumps({"steps": [{"worker": worker, "task": None, "see": [], "expect": {"judge": "sage"}}]})

    async with served(kit) as gateway:
        env = LiveEnvironment(
            f"{gateway.url}/v1", gateway.data_key, questions, grade, spend(), executor=EXECUTOR,
            tools=ToolWorkers({}, b""), validation_share=0.0,
        )  # fmt: skip
        kept, mended = await env.run(questions[0], [plan("birch"), plan("atlas")])
        await env.close()
    assert [[(one.word, one.checker) for one in each.verdicts] for each in (kept, mended)] == [
        [("kept", "judge")],
        [("repaired", "judge")],
    ]
    assert (kept.outcome, mended.outcome) == (1.0, 1.0)
    asked = [record.steps[0].worker for record in kit.metrics.records]
    assert sorted(asked) == ["alpha"] * 2 + ["beta"] * 2 + ["gamma"] * 4
    assert env.spend.spent_nano == sum(record.cost_nano for record in kit.metrics.records) > 0
    assert all(each.latency_s > 0 for each in (kept, mended))


def test_a_judge_of_a_pool_file_costs_what_its_model_does(tmp_path: Path) -> None:
    workers: list[dict[str, Any]] = [
        {"name": "sage", "handle": "sage", "kind": "tool", "url": "builtin:judge", "params": {"model": "gamma"}},
        {"name": "gamma", "handle": "grove", "kind": "openai", "model": "gamma", "url": "http://127.0.0.1:1/v1",
         "price": {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}, "context_tokens": 9_000},
    ]  # fmt: skip
    path = tmp_path / "pool.yaml"
    path.write_text(json.dumps({"workers": workers, "pools": {"default": ["sage", "gamma"]}}))
    judge, model = read_pool(path, "")
    assert (judge.price, judge.context_tokens) == (model.price, 9_000)
    workers[0]["params"] = {"model": "sage"}
    path.write_text(json.dumps({"workers": workers, "pools": {"default": ["sage", "gamma"]}}))
    with pytest.raises(ConfigError, match=r"worker sage needs `params: \{model: NAME\}`"):
        read_pool(path, "")


def judged(call: WorkerCall) -> Says:
    """What the judge's model says: right is a reply with Rome in it."""
    reply = json.dumps(call.body["messages"]).partition("<reply")[2]
    return Says(json.dumps({"reason": "a look", "verdict": "right" if "Rome" in reply else "wrong"}))


def figures(episode: Episode) -> tuple[Any, ...]:
    steps = [(step.worker, step.messages, step.reply, step.status) for step in episode.record.steps]
    return steps, episode.outcome, episode.cost_nano, episode.calls, episode.parsed, episode.error


async def test_the_dollar_cap_stops_a_live_job_cleanly(gateway: Served, replay: ReplayEnvironment) -> None:
    env = live(gateway, replay, spend(408_000_000))
    found = await sample(env, [(prompt, [fixed("dear")]) for prompt in env.prompts("train", 12, 0)], concurrency=4)
    assert found.capped
    assert [episode.error for episode in found.episodes] == [None, None]
    assert env.spend.spent_nano == sum(r.cost_nano for r in gateway.kit.metrics.records) <= 408_000_000
    with pytest.raises(SpendCapped):
        await env.episode(env.prompts("train", 1, 0)[0], fixed("dear"))
    await env.close()


async def test_charges_above_our_prices_count_as_spent(gateway: Served, replay: ReplayEnvironment) -> None:
    env = live(gateway, replay, spend())
    prompt = env.prompts("train", 1, 0)[0]
    dear = next(spec for spec in prompt.pool if spec.name == "dear")
    half = Price(input_usd_per_mtok=Decimal(5), output_usd_per_mtok=Decimal(20))
    pool = tuple(spec if spec is not dear else spec.model_copy(update={"price": half}) for spec in prompt.pool)
    episode = await env.episode(replace(prompt, pool=pool), fixed("dear"))
    await env.close()
    assert env.spend.spent_nano == gateway.kit.metrics.records[0].cost_nano == 2 * episode.cost_nano


async def test_live_needs_a_cap_prices_and_prompts(gateway: Served, replay: ReplayEnvironment) -> None:
    with pytest.raises(ValueError, match="real workers cost real money"):
        live(gateway, replay, Spend(episode_nano_max=400_000_000))
    env = live(gateway, replay, spend())
    prompt = env.prompts("train", 1, 0)[0]
    with pytest.raises(ValueError, match="train prompts asked for, "):
        env.prompts("train", 21, 0)
    pool = tuple(spec.model_copy(update={"price": None}) for spec in prompt.pool)
    with pytest.raises(ValueError, match=r"worker \w+ has no price"):
        await env.episode(replace(prompt, pool=pool), fixed("dear"))
    await env.close()


FAILURES: list[tuple[Callable[[], httpx.Response] | Exception, type[UpstreamError], str]] = [
    (httpx.ReadTimeout("slow"), UpstreamTimeout, "in time"),
    (httpx.ConnectError("away"), UpstreamError, "cannot be reached"),
    (httpx.ReadError("cut"), UpstreamProtocol, "hung up"),
    (lambda: httpx.Response(200, text="{"), UpstreamProtocol, "not JSON"),
    (lambda: httpx.Response(200, json={"choices": []}), UpstreamProtocol, "no choices"),
    (lambda: httpx.Response(502, text="oops"), UpstreamError, "answered 502"),
    (lambda: httpx.Response(401, json={"error": {"message": "bad key", "code": "k"}}), UpstreamRefused, "bad key"),
    (lambda: httpx.Response(429, json={"error": {"message": "slow", "code": "r"}}), UpstreamRateLimited, "slow"),
    (
        lambda: httpx.Response(429, json={"error": {"message": "no money", "code": "insufficient_quota"}}),
        UpstreamRefused,
        "no money",
    ),
]


@pytest.mark.parametrize(("answer", "error", "words"), FAILURES)
async def test_a_gateway_in_trouble_is_a_named_error(
    replay: ReplayEnvironment, answer: Any, error: type[UpstreamError], words: str
) -> None:
    def handle(_request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        response: httpx.Response = answer()
        response.headers["x-baton-cost-usd"] = "0.000000007"
        return response

    spec = next(spec for spec in replay.prompts("train", 1, 0)[0].pool if spec.name == "dear")
    async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://127.0.0.1:9/v1/") as client:
        workers = GatewayWorkers(client)
        with pytest.raises(error, match=words):
            await workers.complete(WorkerCall(spec, {"messages": [], "max_tokens": 8}, 1.0, "r", "1.0"))
        failed = not isinstance(answer, Exception) and answer().status_code != 200
        assert workers.surplus_nano == (7 if failed else 0)
        assert workers.seconds[("r", "1.0")] > 0


async def test_a_live_stream_is_the_same_reply(gateway: Served, replay: ReplayEnvironment) -> None:
    prompt = replay.prompts("train", 1, 0)[0]
    spec = next(spec for spec in prompt.pool if spec.name == "dear")
    headers = {"authorization": f"Bearer {gateway.data_key}"}
    async with httpx.AsyncClient(base_url=f"{gateway.url}/v1/", headers=headers) as client:
        workers = GatewayWorkers(client)
        call = WorkerCall(spec, {"messages": list(prompt.messages), "max_tokens": 200}, 5.0, "r", "1.0")
        whole = await workers.complete(call)
        pieces = [chunk async for chunk in workers.stream(call)]
    said = "".join(choice["delta"].get("content") or "" for chunk in pieces for choice in chunk["choices"])
    assert said == reply_text(whole.body) != ""
    assert pieces[-1]["usage"]["completion_tokens"] == whole.usage.completion_tokens == 100


async def test_a_reply_without_end_and_a_price_without_sense(
    replay: ReplayEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * 3000}, "finish_reason": "stop"}]}
    answer = httpx.Response(200, json=body, headers={"x-baton-cost-usd": "much"})
    spec = next(spec for spec in replay.prompts("train", 1, 0)[0].pool if spec.name == "dear")
    transport = httpx.MockTransport(lambda _request: answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9/v1/") as client:
        workers = GatewayWorkers(client)
        call = WorkerCall(spec, {"messages": [], "max_tokens": 8}, 1.0, "r", "1.0")
        assert (await workers.complete(call)).usage.estimated
        assert workers.surplus_nano == 0
        monkeypatch.setattr("policy.environments.live.REPLY_BYTES_MAX", 1000)
        with pytest.raises(UpstreamProtocol, match="larger than 1000 bytes"):
            await workers.complete(call)
