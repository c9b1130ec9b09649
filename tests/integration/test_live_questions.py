"""Live questions out of a file and out of the log: with their own graders, a judge, HTTP tools and experience."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.inserts import insert_rows
from gateway.core.log.rollout import RolloutRecord, as_payload
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.errors import ConfigError, Unavailable
from policy.environments.base import Ungraded
from policy.environments.executor import Executor
from policy.environments.live import JUDGE_TRIES, LiveEnvironment
from policy.environments.sampling import UNGRADED_MAX, sample
from policy.train.settings import Settings
from policy.train.sources.live import open_live
from policy.train.sources.scene import scene_of
from policy.train.spec import TrainSpec
from tests.fakes.workers import FakeWorkers, Says
from tests.integration.test_api import Served, served
from tests.kit import Kit
from tests.records import a_rollout, event

PRICE = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}
EPISODE_NANO, CAP_NANO = 5_000_000, 20_000_000
VERDICT = '{"reason": "so", "verdict": "partly"}'


def worker(name: str, handle: str, **more: Any) -> dict[str, Any]:
    plain = {"kind": "openai", "model": name, "url": "http://127.0.0.1:9/v1", "price": PRICE, "output_tokens_max": 64}
    return {"name": name, "handle": handle, **plain, **more}


class Tool:
    """A tool program: says how many replies it saw."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.keys: list[str | None] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append(body["seen"])
        self.keys.append(request.headers.get("authorization"))
        return web.json_response({"content": f"Answer: {len(body['seen'])} seen"})


@pytest.fixture
async def tool() -> AsyncIterator[tuple[Tool, str]]:
    program = Tool()
    app = web.Application()
    app.router.add_post("/check", program.answer)
    server = TestServer(app)
    await server.start_server()
    yield program, str(server.make_url("/check"))
    await server.close()


@pytest.fixture
async def gateway(tool: tuple[Tool, str], tmp_path: Path) -> AsyncIterator[Served]:
    (tmp_path / "tool.key").write_text("s3cret-of-the-tool\n")
    checker = worker("checker", "lint", kind="tool", url=tool[1], api_key=f"file:{tmp_path / 'tool.key'}")
    checker |= {"price": {"call_usd": "0.001"}, "model": None}
    workers = [worker("alpha", "quill"), worker("judge", "gavel"), checker]
    document = {"workers": workers, "pools": {"default": ["alpha", "checker"]}}
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(document))))
    specs = tuple(WorkerSpec.model_validate(one) for one in workers)
    pools = PoolFile(workers=specs, pools={"default": ("alpha", "judge")})
    kit = Kit(["{}"], FakeWorkers({"alpha": Says("Answer: 4"), "judge": Says(VERDICT)}), pools=pools)
    async with served(kit) as running:
        yield running


def spec(gateway: Served, folder: Path, **more: Any) -> TrainSpec:
    (folder / "key").write_text(gateway.data_key + "\n")
    given = {"env": "live", "url": f"{gateway.url}/v1", "key_file": folder / "key", "usd_max": "1",
             "pool_file": folder / "pool.yaml"}  # fmt: skip
    return TrainSpec.model_validate(given | more)


def questions(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def plan(*steps: tuple[str, list[int]]) -> str:
    return json.dumps({"steps": [{"worker": worker, "task": None, "see": see} for worker, see in steps]})


async def test_replies_are_graded_by_their_own_grader_or_the_judge(gateway: Served, tmp_path: Path) -> None:
    file = questions(
        tmp_path,
        {"id": "own", "question": "2+2?", "gold": 4, "grader": "numeric"},
        {"id": "judged", "question": "Say four."},
    )
    environment, found = open_live(spec(gateway, tmp_path, prompts_file=file, judge="judge"), Executor())
    own, judged = found.prompts
    alpha = plan(("quill", []))
    (right,), (half,) = [await environment.run(one, [alpha]) for one in (own, judged)]
    await environment.close()
    assert (right.outcome, half.outcome) == (1.0, 0.5)
    records = gateway.kit.metrics.records
    assert [record.policy_requested for record in records] == ["alpha", "alpha", "judge"]
    assert environment.spend.spent_nano == sum(record.cost_nano for record in records)
    assert not any(record.train for record in records)
    unjudged = spec(
        gateway, tmp_path, prompts_file=questions(tmp_path, {"question": "x", "gold": "y", "grader": "judge"})
    )
    with pytest.raises(ConfigError, match="with --judge"):
        open_live(unjudged, Executor())


async def test_a_judge_that_fails_leaves_episodes_out_and_ends_a_run_that_nothing_judges(
    gateway: Served, tmp_path: Path
) -> None:
    gateway.kit.workers._scripts["judge"] = [Says("I would rather not.")]
    file = questions(tmp_path, {"id": "judged", "question": "Say four."})
    environment, found = open_live(spec(gateway, tmp_path, prompts_file=file, judge="judge"), Executor())
    (prompt,) = found.prompts
    alpha = plan(("quill", []))
    groups = await sample(environment, [(prompt, [alpha] * 3)])
    assert (groups.episodes, groups.ungraded) == ([], 3)
    assert environment.spend.spent_nano == sum(record.cost_nano for record in gateway.kit.metrics.records)
    with pytest.raises(ExceptionGroup) as ended:
        await sample(environment, [(prompt, [alpha] * (UNGRADED_MAX + 8))], concurrency=2)
    assert ended.group_contains(Ungraded, match="could not be judged")
    await environment.close()


async def test_an_http_tool_gets_what_its_step_sees(gateway: Served, tool: tuple[Tool, str], tmp_path: Path) -> None:
    file = questions(tmp_path, {"id": "q", "question": "2+2?", "gold": "2 seen"})
    environment, found = open_live(spec(gateway, tmp_path, prompts_file=file), Executor())
    steps = plan(("quill", []), ("quill", []), ("lint", [0, 1]))
    (episode,) = await environment.run(found.prompts[0], [steps])
    await environment.close()
    assert (episode.outcome, episode.reply) == (1.0, "Answer: 2 seen")
    assert [one["reply"] for one in tool[0].seen[0]] == ["Answer: 4", "Answer: 4"]
    assert tool[0].keys == ["Bearer s3cret-of-the-tool"]
    assert episode.record.steps[2].cost_nano == 1_000_000


async def test_logged_questions_are_posed_with_the_experience_they_were_served_with(
    gateway: Served, database_url: str, tmp_path: Path
) -> None:
    seen = {"n": 7, "success": 0.9, "cost_nano": 5, "ms": 300}
    entries = [{"name": "alpha", "handle": "x", "version": "1", "experience": seen}]
    entries += [{"name": "checker", "handle": "y", "version": "0", "experience": seen}]
    body = {"model": "baton", "messages": [{"role": "user", "content": "2+2?"}]}
    logged = a_rollout(request=body, tags={"grader": "numeric", "reference": "4"}, pool=entries, task_type="sums")
    ungraded = a_rollout(request={**body, "messages": [{"role": "user", "content": "A poem."}]})
    store(database_url, logged, ungraded)
    settings = Settings(experience_share=1.0, redraw_handles=False)
    scene = await scene_of(spec(gateway, tmp_path, database=database_url, settings=settings.model_dump()))
    (prompt,) = scene.prompts
    assert (prompt.id, prompt.task_type, dict(prompt.experience)) == (logged.id, "sums", {})
    shown = {one.handle: one.experience for one in scene.posed(prompt, settings, 0).shown.workers}
    assert shown["quill"] is not None
    assert (shown["quill"].n, shown["quill"].success_mean, shown["lint"]) == (7, 0.9, None)
    hidden = scene.posed(prompt, settings.model_copy(update={"experience_share": 0.0}), 0)
    assert all(one.experience is None for one in hidden.shown.workers)
    (episode,) = await scene.environment.run(prompt, [plan(("quill", []))])
    assert episode.outcome == 1.0
    assert isinstance(scene.environment, LiveEnvironment)
    await scene.environment.close()


def store(database_url: str, *records: RolloutRecord) -> None:
    engine = sync_engine(database_url)
    with engine.begin() as connection:
        for record in records:
            insert_rows(connection, rows.event_rows(event("rollout", as_payload(record))))
    engine.dispose()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "needs --prompts FILE, or --database"),
        ({"prompts_file": "questions.jsonl", "url": ""}, "needs --url"),
        ({"prompts_file": "questions.jsonl", "judge": "nobody"}, "no such worker"),
        ({"prompts_file": "questions.jsonl", "pool": "other"}, "--pool other: not in"),
        ({"prompts_file": "ungraded.jsonl"}, "no question can be graded"),
        ({"prompts_file": "same.jsonl"}, "two questions have the same `id`"),
        ({"prompts_file": "questions.jsonl", "usd_max": "0.000001"}, "--usd-max 0.000001: a spending cap"),
    ],
)
async def test_what_is_missing_is_named(gateway: Served, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    questions(tmp_path, {"question": "2+2?", "gold": "4"})
    (tmp_path / "ungraded.jsonl").write_text('{"question": "x"}\n')
    (tmp_path / "same.jsonl").write_text("".join(f'{{"id": "a", "question": "{n}", "gold": "4"}}\n' for n in range(2)))
    given = {name: tmp_path / value if name == "prompts_file" else value for name, value in changes.items()}
    with pytest.raises(ConfigError, match=said):
        open_live(spec(gateway, tmp_path, **given), Executor())


# ---------------------------------------------------------------- money


def logged_questions(database_url: str, n: int) -> None:
    tags = {"grader": "numeric", "reference": "4"}
    for number in range(n):
        body = {"model": "baton", "messages": [{"role": "user", "content": f"{number}+{4 - number}?"}]}
        store(database_url, a_rollout(request=body, tags=tags))


async def test_each_episode_of_logged_questions_is_reserved_on_disk_before_a_call_leaves(
    gateway: Served, database_url: str, tmp_path: Path
) -> None:
    """Whatever runs at once: at each call what is noted covers all episodes under way, and never passes the cap."""
    logged_questions(database_url, 4)
    given = spec(gateway, tmp_path, database=database_url, usd_max="0.02", episode_usd_max="0.005")
    environment, found = open_live(given, Executor())
    assert found.about == "4 questions"
    noted, at_calls = [0], list[tuple[int, int]]()
    environment.spend.on_change = noted.append

    def says(_: Any) -> Says:
        at_calls.append((noted[-1], environment.spend.spent_nano + gateway.kit.workers.in_flight * EPISODE_NANO))
        return Says("Answer: 4", delay_s=0.01)

    gateway.kit.workers._scripts["alpha"] = [says]
    work = [(prompt, [plan(("quill", []))] * 40) for prompt in found.prompts]
    groups = await sample(environment, work, concurrency=16)
    await environment.close()
    charged_nano = sum(record.cost_nano for record in gateway.kit.metrics.records)
    assert at_calls
    assert all(running_nano <= reserved_nano <= CAP_NANO for reserved_nano, running_nano in at_calls)
    assert noted[-1] == environment.spend.spent_nano == charged_nano
    assert len(groups.episodes) == len(at_calls)


async def test_a_reservation_that_cannot_be_written_starts_nothing(
    gateway: Served, database_url: str, tmp_path: Path
) -> None:
    logged_questions(database_url, 1)
    environment, found = open_live(spec(gateway, tmp_path, database=database_url), Executor())

    def full(_: int) -> None:
        raise Unavailable("spent_nano: cannot be written (No space left on device)")

    environment.spend.on_change = full
    with pytest.raises(Unavailable):
        await environment.episode(found.prompts[0], plan(("quill", [])))
    await environment.close()
    assert (gateway.kit.workers.calls, environment.spend.spent_nano) == ([], 0)
    assert environment.spend.fits()


async def test_an_episode_that_is_cut_off_counts_what_its_calls_may_have_cost(
    gateway: Served, database_url: str, tmp_path: Path
) -> None:
    """One call has ended and is charged, the other is under way: it counts in full."""
    logged_questions(database_url, 1)
    environment, found = open_live(spec(gateway, tmp_path, database=database_url), Executor())
    hung = asyncio.Event()

    def second(_: Any) -> Says:
        hung.set()
        return Says("late", delay_s=600)

    gateway.kit.workers._scripts["alpha"] = [Says("Answer: 4"), second]
    steps = plan(("quill", []), ("quill", [0]))
    running = asyncio.create_task(environment.episode(found.prompts[0], steps))
    await hung.wait()
    (first,) = gateway.kit.metrics.records
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert first.cost_nano < environment.spend.spent_nano <= environment.spend.episode_nano_max
    await environment.close()


async def test_a_verdict_that_is_lost_counts_in_full(gateway: Served, tmp_path: Path) -> None:
    """Three times, for it is asked again; then the episode is left out."""
    file = questions(tmp_path, {"id": "judged", "question": "Say four."})
    environment, found = open_live(spec(gateway, tmp_path, prompts_file=file, judge="judge"), Executor())

    async def lost(*_: Any, **__: Any) -> Any:
        raise httpx.ReadTimeout("no reply")

    environment._client.post = lost  # type: ignore[method-assign]
    with pytest.raises(Ungraded, match="ReadTimeout"):
        await environment.episode(found.prompts[0], plan(("quill", [])))
    await environment.close()
    (answered,) = gateway.kit.metrics.records
    assert environment.spend.spent_nano == answered.cost_nano + JUDGE_TRIES * environment._judge_nano_max
    assert environment.spend.spent_nano <= environment.spend.episode_nano_max
