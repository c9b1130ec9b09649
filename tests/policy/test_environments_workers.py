"""In-process workers: errors as the gateway's adapters name them, streams, `vote`, retries in simulated time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from gateway.core.money.amounts import Usage
from gateway.core.openai.reply import ReplyBuilder, reply_text
from gateway.core.openai.vendors.usage import read_usage
from gateway.core.pool.workers import Price, WorkerSpec
from gateway.errors import BatonError, PlanRefused, UpstreamError, UpstreamRateLimited, UpstreamRefused
from gateway.service.ports.request import WorkerCall
from policy.environments import arena
from policy.environments.arena import ArenaEnvironment
from policy.environments.executor import Executor, _NoWorkers
from policy.environments.simulated import SpeakerWorkers
from policy.simulators.arena.server import ArenaSpeaker
from policy.simulators.arena.workers import STANDARD, with_builtins
from policy.simulators.server import RequestRefusal, SimulatedReply
from policy.statistics.baselines import fixed, vote

FREE = Price(input_usd_per_mtok=Decimal(0), output_usd_per_mtok=Decimal(0))
MODEL = WorkerSpec(name="m", handle="maple", kind="openai", model="m", url="http://127.0.0.1:9/v1", price=FREE)
VOTE = WorkerSpec(name="vote", handle="vote", kind="tool", url="builtin:vote", price=FREE)


class Parrot:
    """Says three words, or refuses."""

    workers = ("m",)

    def __init__(self, refuses: RequestRefusal | None = None) -> None:
        self._refuses = refuses

    def say(self, worker: str, body: Mapping[str, Any]) -> SimulatedReply:
        if self._refuses is not None:
            raise self._refuses
        return SimulatedReply([["one", " two", " three"]], 7, None, 0.5, 0.25)


def call(worker: WorkerSpec = MODEL, **body: Any) -> WorkerCall:
    return WorkerCall(worker, {"messages": [{"role": "user", "content": "?"}], **body}, 1.0, "r", "1.0")


async def test_a_reply_has_its_usage_and_its_seconds() -> None:
    workers = SpeakerWorkers(Parrot())
    reply = await workers.complete(call())
    assert (reply_text(reply.body), reply.usage) == ("one two three", Usage(7, 3))
    cut = await workers.complete(call(max_tokens=2))
    assert (reply_text(cut.body), cut.body["choices"][0]["finish_reason"]) == ("one two", "length")
    assert workers.seconds == {("r", "1.0"): 0.5 + 3 * 0.25 + 0.5 + 2 * 0.25}


async def test_a_stream_is_the_same_reply() -> None:
    for workers, asked in ((SpeakerWorkers(Parrot()), call()), (SpeakerWorkers(Parrot()), call(VOTE))):
        seen = replace(asked, saw=[("maple", "", "one two three")])
        whole = await workers.complete(seen)
        collected, usage = ReplyBuilder(), None
        async for chunk in workers.stream(seen):
            collected.add(chunk["choices"])
            usage = read_usage(chunk) or usage
        assert collected.finished
        assert (reply_text(collected.body()), usage) == (reply_text(whole.body), whole.usage)


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [(400, UpstreamRefused, False), (404, UpstreamRefused, False), (422, UpstreamRefused, False),
     (429, UpstreamRateLimited, True), (500, UpstreamError, True), (503, UpstreamError, True)],
)  # fmt: skip
async def test_refusals_are_the_gateways_errors(status: int, kind: type[UpstreamError], retryable: bool) -> None:
    workers = SpeakerWorkers(Parrot(RequestRefusal(status, "a_code", "no")))
    with pytest.raises(UpstreamError) as raised:
        await workers.complete(call())
    assert type(raised.value) is kind
    assert (raised.value.upstream_status, raised.value.retryable) == (status, retryable)
    assert raised.value.code == "a_code" or kind is not UpstreamRefused
    assert workers.seconds == {}


async def test_a_worker_that_is_not_simulated_is_an_error() -> None:
    workers = SpeakerWorkers(ArenaSpeaker(STANDARD, 0))
    with pytest.raises(UpstreamError, match="worker m is not simulated here"):
        await workers.complete(call())
    with pytest.raises(UpstreamRefused, match="vote sees no replies"):
        await workers.complete(call(VOTE))
    other = VOTE.model_copy(update={"url": "http://127.0.0.1:9/tool"})
    with pytest.raises(UpstreamRefused, match="is not built in"):
        await workers.complete(replace(call(other), saw=[("a", "", "x")]))


async def test_failures_are_retried_in_simulated_time_and_are_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flaky = with_builtins(tuple(replace(worker, error_500_rate=0.5) for worker in STANDARD))
    monkeypatch.setattr(arena, "_staff", lambda _name: flaky)
    env = ArenaEnvironment(executor=Executor(attempts_max=3))
    seen = []
    for seed in range(4):
        env._seed = seed  # which calls fail is a function of the world's seed
        prompt = env.prompts("train", 1, seed)[0]
        first, again = await env.run(prompt, [fixed("cedar"), fixed("cedar")])
        tries = [[attempt.error for attempt in step.attempts] for step in first.record.steps]
        assert tries == [[attempt.error for attempt in step.attempts] for step in again.record.steps]
        assert (first.outcome, first.cost_nano, first.calls) == (again.outcome, again.cost_nano, again.calls)
        seen.append(first.calls)
    assert len(set(seen)) > 1


async def test_a_pool_that_cannot_carry_a_baseline_out_refuses_by_name() -> None:
    env = ArenaEnvironment()
    prompt = env.prompts("train", 1, 0)[0]
    tools = tuple(spec for spec in prompt.pool if spec.kind != "openai")
    models = tuple(spec for spec in prompt.pool if spec.kind == "openai")
    for pool, words in ((tools, "every model worker of this pool has failed"), (models, "this pool has no vote")):
        posed = env.executor.pose(replace(prompt, pool=pool))
        record, meter = None, None
        with pytest.raises(PlanRefused, match=words):
            await vote(["cedar", "comet"]).plan(posed.situation, record, meter, None)  # type: ignore[arg-type]


async def test_posing_a_prompt_calls_no_worker() -> None:
    nobody = _NoWorkers()
    for asked in (nobody.complete(call()), anext(nobody.stream(call()))):
        with pytest.raises(BatonError, match="no worker is called while a prompt is posed"):
            await asked
