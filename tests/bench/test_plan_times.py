"""How long a plan takes is counted to where a step may start: when the next one opens, or at the plan's end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.engines import plan_times
from bench.engines.plan_times import PlanTime, TimedConductor
from gateway.core.money.amounts import Usage
from gateway.service.ports.request import Conductor, ConductorCall, ConductorChunk, ConductorEnd, Sampling
from tests.policy.environments import PRICES, lines

SHIPPED = Path(__file__).parents[2] / "policy" / "shipped" / "arena-3"

CALL = ConductorCall([{"role": "user", "content": "?"}], {}, Sampling(temperature=0.0, tokens_max=9), 1.0)
USAGE = Usage(7, 3)


class Pieces(Conductor):
    """Decodes these pieces, one after another `gap_s` apart."""

    def __init__(self, *pieces: str, gap_s: float) -> None:
        self._pieces, self._gap_s = pieces, gap_s

    async def decode(self, call: ConductorCall) -> AsyncIterator[ConductorChunk | ConductorEnd]:
        for piece in self._pieces:
            await asyncio.sleep(self._gap_s)
            yield ConductorChunk(piece)
        yield ConductorEnd("conductor", USAGE)

    async def ready(self) -> bool:
        return True

    async def close(self) -> None:
        pass


async def timed(*pieces: str) -> PlanTime:
    conductor = TimedConductor(Pieces(*pieces, gap_s=0.02))
    async for _ in conductor.decode(CALL):
        pass
    [time] = conductor.times
    return time


async def test_a_step_may_start_once_the_next_one_opens() -> None:
    one = await timed('{"steps":[{"worker":"a"},', '{"worker":"b"}', "]}")
    assert 0 < one.first_ms < one.plan_ms
    assert one.usage == USAGE


async def test_the_only_step_of_a_plan_waits_for_its_end() -> None:
    one = await timed('{"steps":[', '{"worker":"a"}', "]}")
    assert one.first_ms == one.plan_ms


def test_every_run_counts_the_plans_of_its_own_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_times, "client_of", lambda *_: Pieces('{"steps":[]}', gap_s=0.001))
    data, prices, out = tmp_path / "r.jsonl", tmp_path / "prices.json", tmp_path / "out.json"
    data.write_text("".join(json.dumps(each) + "\n" for each in lines()))
    prices.write_text(json.dumps(PRICES))
    words = ["--policy", str(SHIPPED), "--url", "http://127.0.0.1:1/v1", "--data", str(data), "--prices", str(prices)]
    assert plan_times.main([*words, "--n", "5", "--warm", "2", "--at-once", "1,3", "--out", str(out)]) == 0
    runs = json.loads(out.read_text())
    assert list(runs) == ["1", "3"]
    for run in runs.values():
        assert (run["questions"], run["plans"], run["prompt_tokens"], run["plan_tokens"]) == (5, 5, 7, 3)
        assert run["first_ms"] == run["plan_ms"]
        assert run["tokens_per_s"] == pytest.approx(3 * run["plans_per_s"], rel=0.01)
