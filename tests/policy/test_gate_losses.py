"""The gate on the user's own requests over a server, with what goes wrong in the middle: the server dies, it never had
the live version, the disk is full. One line each, nothing half-published, and the same command goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.core.money.amounts import usd_to_nano
from gateway.errors import ConductorError, ConfigError, EngineDown, Unavailable, VersionRefused
from policy.engines import endpoint
from policy.environments import cached
from policy.environments.replay import ReplayEnvironment
from policy.gate import injection
from policy.gate.report import write
from policy.serve.shape import load_shape
from tests.integration.test_api import Served, served
from tests.policy.environments import handle, lines, recorded
from tests.policy.test_engines import MaskingServer
from tests.policy.test_environments_live import kit_for
from tests.policy.test_gate_traffic import CAP, Bench, facts
from tests.policy.traffic import HALF, directories, policies, questions, write_pool, write_requests
from tests.small_disk import FULL, no_file_over
from tests.upstreams.server import Reply, Request, Server, event, event_stream, json_reply


class PlanningServer(MaskingServer):
    """It serves the given directories under names of their own, and answers each model with one plan. `plans_max`:
    after so many it is dead."""

    def __init__(self, roots: dict[str, Path], plans: dict[str, str]) -> None:
        super().__init__(next(iter(roots.values())), load_shape(next(iter(roots.values()))).vocab)
        self.entries = [{"id": name, "owned_by": "vllm", "root": str(root)} for name, root in roots.items()]
        self.plans, self.planned, self.plans_max = plans, 0, 1_000_000

    async def __call__(self, request: Request) -> Reply:
        if not request.path.endswith("/chat/completions"):
            return await super().__call__(request)
        if self.planned >= self.plans_max:
            return json_reply({"error": {"message": "EngineDead"}}, 500)
        self.planned += 1
        choice = {"index": 0, "delta": {"content": self.plans[request.body["model"]]}, "finish_reason": "stop"}
        return event_stream([event({"choices": [choice]}), event("[DONE]")])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four attacks, and short pauses."""
    whole = injection.injections()
    short = injection.InjectionSet("test", whole.questions, whole.attacks[:4])
    monkeypatch.setattr(injection, "injections", lambda: short)
    monkeypatch.setattr(cached, "WAITS_S", (0.01,))
    monkeypatch.setattr(endpoint, "WAITS_S", (0.01,))


@pytest.fixture
def replay(tmp_path: Path) -> ReplayEnvironment:
    return recorded(tmp_path / "r.jsonl", lines(HALF))


@pytest.fixture
async def gateway(replay: ReplayEnvironment, tmp_path: Path) -> AsyncIterator[Served]:
    async with served(kit_for(replay, tmp_path / "r.jsonl")) as running:
        yield running


@pytest.fixture
def bench(gateway: Served, replay: ReplayEnvironment, tmp_path: Path) -> Bench:
    write_requests(tmp_path / "requests.json", questions())
    write_pool(tmp_path / "pool.yaml", replay)
    (tmp_path / "key").write_text(gateway.data_key)
    return Bench(gateway, directories(tmp_path), tmp_path)


@pytest.fixture
async def server(bench: Bench, replay: ReplayEnvironment) -> AsyncIterator[tuple[PlanningServer, str]]:
    """It plans `dear` for the candidate and `mid` for the live version."""
    prompt = replay.prompts("train", 1, 0)[0]
    workers = {"better": "dear", "live": "mid"}
    plans = {
        name: json.dumps({"steps": [{"worker": handle(prompt, worker), "task": None, "see": []}]})
        for name, worker in workers.items()
    }
    handler = PlanningServer({name: bench.policies[name] for name in workers}, plans)
    async with Server(handler) as running:
        yield handler, f"{running.url}/v1"


def calls_of(bench: Bench) -> list[tuple[str, str]]:
    """What was paid for: worker and question."""
    records = bench.gateway.kit.metrics.records
    return [(record.policy_requested, str(record.request["messages"])) for record in records]


async def test_an_engine_that_dies_in_the_middle_is_one_line_and_no_call_is_paid_twice(
    bench: Bench, server: tuple[PlanningServer, str]
) -> None:
    handler, url = server
    handler.plans_max = HALF
    with pytest.raises(ConductorError, match=r"EngineDead.*; 12 of 24 questions are kept in") as lost:
        await bench.gate("better", engine=url)
    assert "\n" not in lost.value.message
    assert not (bench.place / "better.json").exists()
    paid = calls_of(bench)
    assert paid
    handler.plans_max = 1_000_000
    report = await bench.gate("better", engine=url)
    again = calls_of(bench)
    assert again[: len(paid)] == paid
    more = Counter(again[len(paid) :])  # self-consistency asks the best single worker further times
    assert ({worker for worker, _ in more}, set(more.values())) == ({"mid"}, {9})
    money = facts(report)["money"]
    assert (money["calls_made"], usd_to_nano(money["spent_usd"])) == (len(again), bench.charged_nano)
    assert {part.name for part in report.parts} == {"held-out run", "injection set"}


async def test_a_live_version_that_the_server_lacks_is_refused_before_a_dollar_is_spent(
    bench: Bench, server: tuple[PlanningServer, str]
) -> None:
    handler, url = server
    handler.entries = handler.entries[:1]
    with pytest.raises(VersionRefused) as refused:
        await bench.gate("better", engine=url)
    said = refused.value.message
    assert said.startswith(f"the live version live@0 cannot be judged: {bench.policies['live']}: ")
    assert f"serves {bench.policies['better']}, not these weights; start it on them" in said
    assert said.endswith("or judge with --engine embedded or torch")
    assert "\n" not in said
    handler.entries = []
    with pytest.raises(VersionRefused, match=r"the candidate better@0 cannot be judged: .* serves nothing"):
        await bench.gate("better", engine=url)
    with pytest.raises(EngineDown, match="is it running"):
        await bench.gate("better", engine="http://127.0.0.1:9/v1")
    assert (bench.calls, handler.planned) == (0, 0)
    assert not (bench.place / "better.json").exists()


async def test_a_disk_that_is_full_in_the_middle_is_one_line_and_no_answer_counts_as_wrong(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an episode whose call could not be held, nor one whose reply could not be stored, is a wrong answer."""
    bench.policies = policies(bench.place / "scripted", monkeypatch)
    whole = await bench.gate("better", replies=None)
    for size in (2_000, 20_000):
        place = bench.scene(f"full-{size}", replies=None)
        with no_file_over(size), pytest.raises(Unavailable) as stop:
            await bench.gate("better", out=place.out, replies=None)
        said = stop.value.message
        assert said.startswith("the gate stopped at ")
        assert f"cannot be written ({FULL}); make room first; nothing is judged yet" in said
        assert "\n" not in said
        assert not place.out.exists()
        report = await bench.gate("better", out=place.out, replies=None)
        assert report.passed
        assert facts(report)["gains"] == facts(whole)["gains"]
        spent_nano, made = usd_to_nano(facts(report)["money"]["spent_usd"]), facts(report)["money"]["calls_made"]
        assert usd_to_nano(facts(whole)["money"]["spent_usd"]) <= spent_nano <= usd_to_nano(CAP)
        assert made >= facts(whole)["money"]["calls_made"]


async def test_a_report_that_cannot_be_written_leaves_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.policies = policies(bench.place / "scripted", monkeypatch)
    report = await bench.gate("better")
    with no_file_over(100), pytest.raises(ConfigError, match=FULL):
        write(report, bench.place / "better.json")
    assert not list(bench.place.glob("better.*.tmp"))
    assert not (bench.place / "better.json").exists()
    write(report, bench.place / "better.json")
    assert json.loads((bench.place / "better.json").read_text())["passed"]


def test_the_limit_is_the_system_s_own(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with no_file_over(10), pytest.raises(OSError, match=FULL):
        path.write_text("x" * 11)
    path.write_text("x" * 11)
