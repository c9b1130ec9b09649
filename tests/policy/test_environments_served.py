"""The same plan text through an environment and through a served gateway: the same prompts, replies, tokens, cost."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from gateway.adapters.upstream.pooled import PooledWorkers, pooled_workers
from gateway.core.log.rollout import RolloutRecord
from gateway.core.loop.caps import Caps
from gateway.core.pool.workers import PoolFile, WorkerSpec
from policy.environments.arena import ArenaEnvironment
from policy.environments.base import Prompt
from policy.environments.executor import Executor
from policy.environments.replay import FIRST_S, TOKENS_PER_S, ReplayEnvironment
from policy.simulators.arena.server import ArenaSpeaker
from policy.simulators.arena.workers import STANDARD
from policy.simulators.recordings import load
from policy.simulators.replay import ReplaySpeaker
from policy.simulators.server import Speaker, WorkerServer
from policy.statistics.baselines import CascadePlanner, Categories, Ladder
from tests.kit import Kit, ask
from tests.policy.environments import lines, recorded, text

CAPS = Caps(cost_nano=2_000_000_000, wall_s=20.0)
FAST = 1_000.0


class Served:
    """A speaker behind HTTP on loopback, and gateways whose pool it is."""

    def __init__(self, speaker: Speaker) -> None:
        self._server = TestServer(WorkerServer(speaker, FAST, unknown_code="no_recording").app())
        self._workers: list[PooledWorkers] = []

    async def start(self) -> Served:
        await self._server.start_server()
        return self

    async def close(self) -> None:
        for workers in self._workers:
            await workers.close()
        await self._server.close()

    async def plan(self, prompt: Prompt, plans: Sequence[str], rounds: int = 1) -> RolloutRecord:
        """The record of a request whose conductor says `plans`, one a round; without a fallback's help."""
        base = str(self._server.make_url("/")).rstrip("/")
        specs = tuple(_at(spec, base) for spec in prompt.pool)
        pool = PoolFile(workers=specs, pools={"default": tuple(spec.name for spec in specs)})
        workers = pooled_workers(pool, {}, b"secret")
        self._workers.append(workers)
        kit = Kit(plans, workers, caps=CAPS, rounds=rounds, pools=pool)
        running = await kit.serve(ask(prompt.messages[0]["content"], model="baton/conductor"))
        assert not kit.metrics.bugs
        return running.record


def _at(spec: WorkerSpec, base: str) -> WorkerSpec:
    return spec if spec.kind in ("tool", "self") else spec.model_copy(update={"url": f"{base}/w/{spec.name}/v1"})


def story(record: RolloutRecord) -> list[dict[str, Any]]:
    """What each step was: its place, prompt, reply and price."""
    kept = ("round", "step", "worker", "handle", "task", "see", "messages", "reply", "status", "error", "finish_reason")
    figures = ("prompt_tokens", "completion_tokens", "cost_nano", "usage_estimated")
    return [{name: getattr(step, name) for name in (*kept, *figures)} for step in record.steps]


def worker_nano(record: RolloutRecord) -> int:
    return sum(step.cost_nano for step in record.steps)


@pytest.fixture
async def arena() -> AsyncIterator[Served]:
    served = await Served(ArenaSpeaker(STANDARD, seed=3)).start()
    yield served
    await served.close()


@pytest.fixture
async def replayed(tmp_path: Path) -> AsyncIterator[tuple[Served, ReplayEnvironment]]:
    env = recorded(tmp_path / "r.jsonl", lines(), executor=Executor(CAPS))
    served = await Served(ReplaySpeaker(load(tmp_path / "r.jsonl"), FIRST_S, TOKENS_PER_S * FAST)).start()
    yield served, env
    await served.close()


ARENA_PLANS: list[list[tuple[str, str | None, list[int] | str]]] = [
    [("cedar", None, [])],
    [("atlas", None, []), ("cedar", None, [0])],
    [("ember", None, []), ("cedar", None, []), ("comet", None, []), ("vote", None, "all")],
    [("quill", None, []), ("atlas", "Read the table & say what it holds.", []), ("onyx", None, [1])],  # 0 is not seen
    [("maple", None, []), ("onyx", "Check the draft, </reply> and all.", [0])],
]


@pytest.mark.parametrize("plan", ARENA_PLANS)
async def test_arena_plans_give_what_they_give_when_served(
    arena: Served, plan: list[tuple[str, str | None, list[int] | str]]
) -> None:
    env = ArenaEnvironment(seed=3, executor=Executor(CAPS))
    for prompt in env.prompts("validation", 3, 8):
        words = text(prompt, *plan)
        [episode] = await env.run(prompt, [words])
        record = await arena.plan(prompt, [words])
        steps = story(record)[: len(plan)]  # where the last step fails, the gateway's router goes on
        assert story(episode.record) == steps
        assert episode.cost_nano == sum(step["cost_nano"] for step in steps)
        assert len(steps) == len(plan)


async def test_a_canary_stays_where_see_does_not_lead(arena: Served) -> None:
    env = ArenaEnvironment(seed=3, executor=Executor(CAPS))
    prompt = env.prompts("validation", 1, 8)[0]
    words = text(prompt, ("quill", "canary-7f3a", []), ("atlas", None, []), ("onyx", None, [1]))
    [episode] = await env.run(prompt, [words])
    for record in (episode.record, await arena.plan(prompt, [words])):
        prompts = [json.dumps(step.messages) for step in record.steps]
        assert ["canary-7f3a" in each for each in prompts] == [True, False, False]
        assert (record.steps[1].reply or "?") in record.steps[2].messages[0]["content"]


async def test_replay_votes_and_rewritten_tasks_are_as_served(replayed: tuple[Served, ReplayEnvironment]) -> None:
    served, env = replayed
    voted: list[tuple[str, str | None, list[int] | str]] = [
        ("cheap", None, []), ("mid", None, []), ("dear", None, [0]), ("vote", None, "all")
    ]  # fmt: skip
    for prompt in env.prompts("train", 6, 0):
        words = text(prompt, *voted)
        [episode] = await env.run(prompt, [words])
        record = await served.plan(prompt, [words])
        assert story(episode.record) == story(record)
        assert episode.cost_nano == worker_nano(record)
        assert env.grade(prompt, record.reply["choices"][0]["message"]["content"]) == episode.outcome  # type: ignore[index]
    rewritten = text(prompt, ("dear", "In other words, please.", []))
    [episode] = await env.run(prompt, [rewritten])
    assert story(episode.record) == story(await served.plan(prompt, [rewritten]))[:1]
    assert episode.error == "no_recording"


async def test_rounds_show_a_policy_the_same_digest(replayed: tuple[Served, ReplayEnvironment]) -> None:
    served, env = replayed
    categories = Categories.fitted(
        [("What is 3 + 3?", "sums"), ("Spell the 3. colour of the rainbow, please.", "words")]
    )
    ladder = Ladder(("cheap", "mid"), "dear")
    cascade = CascadePlanner(categories, {"sums": ladder, "words": ladder})
    prompts = [prompt for prompt in env.prompts("train", 12, 0) if prompt.category == "sums"]
    lengths = set()
    for prompt in prompts:
        [episode] = await env.run(prompt, [cascade])
        said = [json.dumps(planned.plan) for planned in episode.record.rounds]
        record = await served.plan(prompt, said, rounds=3)
        assert story(episode.record) == story(record)
        assert [planned.plan for planned in record.rounds] == [planned.plan for planned in episode.record.rounds]
        lengths.add(len(story(record)))
    assert lengths == {2, 3}  # shipped on agreement, escalated without
