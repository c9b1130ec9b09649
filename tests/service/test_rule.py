"""The rule as it is served: what it expects of workers, what it logs, and what moves it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from gateway.core.access.keys import Principal
from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.pool.workers import PoolFile, Price, RightAnswer
from gateway.errors import ConductorError
from gateway.service.loop.routers import LATENCY_GUESS_S, RulePlanner, arms_of
from gateway.service.loop.state import Warm
from gateway.service.request.catalog import Shares
from gateway.service.request.running import Running
from tests.kit import KEY, Kit, ask, model_worker, pool_file

CHEAP = model_worker("cheap", "cedar", price=Price(input_usd_per_mtok=Decimal(1), output_usd_per_mtok=Decimal(1)))
DEAR = model_worker("dear", "dune", price=Price(input_usd_per_mtok=Decimal(10), output_usd_per_mtok=Decimal(10)))


def kit(*past: WorkerExperience, **more: Any) -> Kit:
    made = Kit(**more)
    made.catalog._planners["baton/rule"] = (RulePlanner(), RulePlanner())
    made.knows(*past)
    return made


async def answered(made: Kit, times: int = 60, who: Principal = KEY, **more: Any) -> Counter[str]:
    asked = [await made.serve(ask(f"question {n}", model="baton/rule"), who, **more) for n in range(times)]
    return Counter(running.record.steps[0].worker for running in asked)


def decided(running: Running) -> dict[str, Any]:
    decision = running.record.rounds[0].decision
    assert decision is not None
    return decision


def past(worker: str, n: int, success: float, nano: int = 100_000, ms: int = 500) -> WorkerExperience:
    return WorkerExperience(worker, n, success, nano, ms)


def test_an_unknown_worker_is_as_fast_as_its_fastest_fellow_at_its_own_price() -> None:
    nothing = arms_of([CHEAP, DEAR], {}, None)
    assert [(arm.usd, arm.latency_s) for arm in nothing] == [(0.0007, LATENCY_GUESS_S), (0.007, LATENCY_GUESS_S)]
    known = arms_of([CHEAP, DEAR], {"cheap": past("cheap", 5, 1.0, nano=70_000, ms=40)}, None)
    assert [known[1].usd, known[1].latency_s] == pytest.approx([0.0007, 0.04])  # such tasks take a tenth of a guess
    hinted = arms_of([CHEAP, DEAR.model_copy(update={"latency_hint_s": 9.0})], {"cheap": past("cheap", 5, 1.0)}, None)
    assert hinted[1].latency_s == 9.0


def test_a_warm_prompt_cache_saves_dollars() -> None:
    cold, warm = (arms_of([CHEAP], {}, one)[0].usd for one in (None, Warm("cheap", "cedar", 200_000, "cap")))
    assert cold - warm == pytest.approx(0.0002)


async def test_an_instant_worker_that_is_always_wrong_is_left_and_the_log_says_why() -> None:
    made = kit(past("alpha", 10, 0.0, nano=1_000, ms=0), past("beta", 10, 1.0, nano=5_000_000, ms=3_000))
    counts = await answered(made)
    assert counts["alpha"] == 0
    assert counts["beta"] > 30
    decision = decided(await made.serve(ask(model="baton/rule")))
    chances = {arm["worker"]: arm["propensity"] for arm in decision["arms"]}
    assert sum(chances.values()) == pytest.approx(1)
    assert decision["propensity"] == chances[decision["chosen"]] > 0


@pytest.mark.parametrize(("quality", "likely"), [("9", "beta"), ("0", "alpha")])
async def test_the_dial_moves_the_rule(quality: str, likely: str) -> None:
    made = kit(past("alpha", 60, 0.8, nano=100_000), past("beta", 60, 1.0, nano=4_000_000), past("gamma", 60, 0.0))
    counts = await answered(made, 20, quality=int(quality))
    assert counts[likely] >= 18


async def test_what_a_right_answer_is_worth_to_a_key_moves_the_rule() -> None:
    seen = past("alpha", 60, 0.7, nano=100_000), past("beta", 60, 1.0, nano=4_000_000), past("gamma", 60, 0.0)
    rich, poor = (replace(KEY, worth={"usd": usd}) for usd in (10.0, 0.005))
    assert (await answered(kit(*seen), 20, who=rich))["beta"] >= 18
    assert (await answered(kit(*seen), 20, who=poor))["alpha"] >= 18


async def test_a_pool_says_what_a_right_answer_is_worth_unless_the_key_does() -> None:
    seen = past("alpha", 60, 0.7, nano=100_000), past("beta", 60, 1.0, nano=4_000_000), past("gamma", 60, 0.0)
    pools = pool_file().model_copy(update={"worth": {"default": RightAnswer(usd=0.005)}})
    assert (await answered(kit(*seen, pools=pools), 20))["alpha"] >= 18
    assert (await answered(kit(*seen, pools=pools), 20, who=replace(KEY, worth={"usd": 10.0})))["beta"] >= 18


def test_a_worth_of_an_unknown_pool_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="`worth` names `nix`, which is not under pools"):
        PoolFile.model_validate(pool_file().model_dump() | {"worth": {"nix": {"usd": 1}}})


async def test_requests_not_for_training_are_drawn_and_never_explore() -> None:
    made = kit(past("alpha", 60, 1.0), past("beta", 60, 0.5), past("gamma", 2, 0.5))
    made.completer._admission._policies = replace(made.completer._admission._policies, shares=Shares(1.0))
    explored = await made.serve(ask(model="baton/rule"))
    kept = await made.serve(ask(model="baton/rule", metadata={"train": "false"}))
    assert decided(explored)["explored"] is True
    assert decided(kept)["explored"] is False


async def test_a_rule_that_stands_in_for_an_exploring_planner_is_certain_of_its_choice() -> None:
    """Whether the request explores was drawn for the conductor, so the marginal over its own share would be false."""
    made = Kit((ConductorError("down", "x"),))
    rule = RulePlanner()
    made.catalog._planners["baton/conductor"] = (made.catalog._planners["baton/conductor"][0], rule)
    made.knows(past("alpha", 60, 1.0), past("beta", 60, 0.5))
    made.completer._admission._policies = replace(made.completer._admission._policies, shares=Shares(1.0))
    running = await made.serve(ask(model="baton/conductor"))
    decision = next(each.decision for each in running.record.rounds if each.decision)
    assert (decision["explored"], decision["propensity"]) == (True, 1.0)
