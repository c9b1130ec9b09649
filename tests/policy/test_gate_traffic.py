"""The gate on the user's own requests: replay workers behind a gateway's real HTTP API, under a dollar cap."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.core.money.amounts import usd_to_nano
from gateway.errors import ConfigError, Unavailable
from policy.dataset.read import StoredRequest
from policy.environments import cached
from policy.environments.replay import ReplayEnvironment
from policy.environments.simulated import tool_reply
from policy.gate import injection
from policy.gate.report import GateReport, write
from policy.gate.run import drop_partial, gate
from policy.gate.scene import GateScene
from policy.gate.traffic.asking import fault_of
from policy.graders import versions
from policy.record.questions import _of_request
from tests.integration.test_api import Served, served
from tests.policy.environments import SUMS, WORDS, lines, recorded
from tests.policy.test_environments_live import kit_for
from tests.policy.traffic import HALF, policies, questions, write_pool, write_requests

CAP = "6.00"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen attacks, and no pauses."""
    whole = injection.injections()
    short = tuple(one for one in whole.attacks if one.kind in ("control", "handle"))[::3]
    monkeypatch.setattr(injection, "injections", lambda: injection.InjectionSet("test", whole.questions, short))
    monkeypatch.setattr(cached, "WAITS_S", (0.01,))


@pytest.fixture
def replay(tmp_path: Path) -> ReplayEnvironment:
    return recorded(tmp_path / "r.jsonl", lines(HALF))


@pytest.fixture
async def gateway(replay: ReplayEnvironment, tmp_path: Path) -> AsyncIterator[Served]:
    async with served(kit_for(replay, tmp_path / "r.jsonl")) as running:
        yield running


@dataclass
class Bench:
    """One user's work, and candidates for it."""

    gateway: Served
    policies: dict[str, Path]
    place: Path

    def scene(self, name: str, **changes: Any) -> GateScene:
        given: dict[str, Any] = {
            "out": self.place / f"{name}.json",
            "requests": self.place / "requests.json",
            "url": f"{self.gateway.url}/v1",
            "key_file": self.place / "key",
            "pool_file": self.place / "pool.yaml",
            "usd_max": CAP,
            "episode_usd_max": "0.4",
            "replies": self.place / "replies.jsonl",
            "draws": 1,
            "thresholds": {"questions_min": 2 * HALF, "kind_rows_min": HALF},
        }
        return GateScene(**(given | changes))

    async def gate(self, name: str, **changes: Any) -> GateReport:
        return await gate(self.policies[name], self.policies["live"], self.scene(name, **changes))

    @property
    def charged_nano(self) -> int:
        return sum(record.cost_nano for record in self.gateway.kit.metrics.records)

    @property
    def calls(self) -> int:
        return len(self.gateway.kit.metrics.records)


@pytest.fixture
def bench(gateway: Served, replay: ReplayEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    write_requests(tmp_path / "requests.json", questions())
    write_pool(tmp_path / "pool.yaml", replay)
    (tmp_path / "key").write_text(gateway.data_key)
    return Bench(gateway, policies(tmp_path, monkeypatch), tmp_path)


def refusals(report: GateReport) -> set[str]:
    return {each.name for each in report.refusals}


def facts(report: GateReport) -> dict[str, Any]:
    return next(part.facts for part in report.parts if part.name == "held-out run")


async def test_a_better_one_passes_and_worse_dearer_and_collapsed_ones_do_not(bench: Bench) -> None:
    better = await bench.gate("better")
    assert better.passed, better.refusals
    told = facts(better)
    assert told["questions"] == 2 * HALF
    assert {kind: one["n"] for kind, one in told["task_kinds"].items()} == {SUMS: HALF, WORDS: HALF}
    gains = told["task_kinds"][SUMS]["gains"]
    assert {"live", "best single", "rule", "price-cascade", "self-consistency"} <= set(gains)
    assert gains["live"][0] == 0.5
    assert told["task_kinds"][WORDS]["gains"]["live"] == [0.0, 0.0, 0.0]
    assert better.scene["environment"] == "logged"
    assert better.scene["bound"]["from"].startswith("2026-01-01")
    assert better.scene["left_out"] == {"tools": 2}
    money = told["money"]
    assert usd_to_nano(money["spent_usd"]) == bench.charged_nano <= usd_to_nano(CAP)
    assert money["calls_made"] == bench.calls
    assert money["calls_stored"] > 0

    before = bench.calls
    worse = await bench.gate("worse")
    assert {"worse_than_live", f"worse_than_live[{WORDS}]"} <= refusals(worse)
    assert f"worse_than_live[{SUMS}]" not in refusals(worse)
    assert facts(worse)["money"]["calls_made"] == bench.calls - before  # cheap and mid alone and in pairs are known
    dearer = await bench.gate("dearer")
    assert refusals(dearer) == {"costlier"}
    collapsed = await bench.gate("collapsed")
    assert "collapsed" in refusals(collapsed)
    assert not {"worse_than_live", "less_parseable"} & refusals(collapsed)


async def test_the_same_gate_again_costs_nothing(bench: Bench) -> None:
    await bench.gate("better")
    calls = bench.calls
    drop_partial(bench.place / "better.json")
    again = await bench.gate("better")
    assert bench.calls == calls
    money = facts(again)["money"]
    assert (money["calls_made"], money["spent_usd"]) == (0, "0")
    assert usd_to_nano(money["saved_usd"]) >= bench.charged_nano


async def test_a_cap_in_the_middle_stops_cleanly_and_a_larger_one_goes_on(bench: Bench) -> None:
    """The cap is never passed; stored replies are not bought again; nothing is published meanwhile."""
    with pytest.raises(Unavailable) as stop:
        await bench.gate("better", usd_max="0.41", replies=None)
    assert "the gate stopped at" in stop.value.message
    assert f"of {2 * HALF} questions of [" in stop.value.message
    assert "resume with the same command with a larger --usd-max" in stop.value.message
    assert 0 < bench.charged_nano <= usd_to_nano("0.41")
    assert not (bench.place / "better.json").exists()
    stopped = bench.calls
    with pytest.raises(Unavailable, match="with a larger --usd-max"):
        await bench.gate("better", usd_max="0.41", replies=None)
    report = await bench.gate("better", replies=None)
    assert report.passed
    money = facts(report)["money"]
    assert money["calls_made"] == bench.calls > stopped
    assert usd_to_nano(money["spent_usd"]) == bench.charged_nano
    write(report, bench.place / "better.json")
    drop_partial(bench.place / "better.json")
    assert not list(bench.place.glob("*.partial"))
    page = (bench.place / "better.md").read_text()
    assert "## By kind of task" in page
    assert "stored replies answered" in page


async def test_a_worker_that_dies_in_the_middle_is_one_line_and_the_gate_goes_on_later(bench: Bench) -> None:
    speaker = bench.gateway.kit.workers
    real, left = speaker.complete, [15]

    async def dying(call: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            from gateway.errors import UpstreamOverloaded

            raise UpstreamOverloaded("out of memory", upstream_status=503)
        return await real(call)

    speaker.complete = dying
    with pytest.raises(Unavailable, match=r"the gate stopped at \d+ of 24 questions of .* does not answer"):
        await bench.gate("better")
    speaker.complete = real
    assert (await bench.gate("better")).passed


@pytest.mark.parametrize("grader", ["numeric@1", "numeric", "exact@1"])
def test_a_request_logged_under_an_earlier_version_of_its_grader_is_graded_by_todays(grader: str) -> None:
    request = questions()[0].model_copy(update={"grader": grader, "reference": "3"})
    assert fault_of(request, None) is None
    tags, body = {"grader": grader, "reference": "3"}, {"messages": [{"role": "user", "content": "1 + 2?"}]}
    stored = StoredRequest("r", "full", body, tags, None, request.created_at, "key1", "default", (), {}, False)
    question = _of_request(stored, None)
    assert question is not None
    name = grader.partition("@")[0]
    assert question.grader == f"{name}@{versions()[name]}"


async def test_a_judge_grades_what_names_no_grader_and_is_paid_from_the_cap(bench: Bench) -> None:
    """First the judge gives no verdict, as a worker without a recording of such a prompt; then it finds all right."""
    ungraded = [one.model_copy(update={"grader": "", "reference": ""}) for one in questions()[:4]]
    write_requests(bench.place / "requests.json", [*questions()[4:], *ungraded])
    few = {"questions_min": 2 * HALF - 4, "kind_rows_min": HALF - 2}
    report = await bench.gate("better", thresholds=few)
    assert report.scene["left_out"] == {"tools": 2, "no_grader": 4}
    silent = await bench.gate("better", judge="mid", thresholds=few)
    assert silent.scene["left_out"] == {"tools": 2, "ungraded": 4}
    assert silent.scene["questions"] == 2 * HALF - 4
    speaker = bench.gateway.kit.workers
    real, asked = speaker.complete, []

    async def judging(call: Any) -> Any:
        if "You grade one reply" not in str(call.body["messages"][0]["content"]):
            return await real(call)
        asked.append(call)
        return tool_reply('{"reason": "so it is", "verdict": "right"}')

    speaker.complete = judging
    (bench.place / "replies.jsonl").unlink()
    before = bench.charged_nano
    judged = await bench.gate("better", judge="mid", out=bench.place / "judged.json")
    assert (judged.scene["questions"], judged.scene["judge"]) == (2 * HALF, "mid")
    assert judged.scene["left_out"] == {"tools": 2}
    assert asked
    assert len({str(call.body) for call in asked}) == len(asked)  # of equal replies one is judged
    assert usd_to_nano(facts(judged)["money"]["spent_usd"]) == bench.charged_nano - before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"requests": None, "usd_max": ""}, "give --database-url, --usd-max; or --env arena"),
        ({"judge": "nobody"}, "nobody"),
        ({"pool": "elsewhere"}, "elsewhere"),
    ],
)
async def test_what_is_missing_is_one_line(bench: Bench, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        await bench.gate("better", **changes)
    assert "\n" not in refused.value.message
