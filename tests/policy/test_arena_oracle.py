"""The oracle plans from what a pool shows, and its plans are valid ones."""

from __future__ import annotations

from random import Random

import pytest

from bench.simulated.arena import chain, main, measure, mutate, systematic, table, vote
from gateway.core.loop.plan import PlanLimits, validate
from policy.simulators.arena.families.tasks import INSTRUCTIONS, Split, Task, make_task
from policy.simulators.arena.oracle import STEPS_MAX, majority_success, oracle_plan
from policy.simulators.arena.workers import (
    HELD_OUT,
    SELF_WORKER,
    STANDARD,
    VOTE_TOOL,
    ArenaWorker,
    Pool,
    random_pool,
    with_builtins,
)
from policy.simulators.arena.world import solve_rate
from tests.policy.family_tasks import make_family_task

STANDARD_POOL = with_builtins(STANDARD)


def handles(plan: dict[str, list[dict[str, object]]]) -> list[object]:
    return [step["worker"] for step in plan["steps"]]


def worker(handle: str, price: str, **skills: float) -> ArenaWorker:
    return ArenaWorker(handle, handle, skills, price)


def child_of(*kinds: str) -> Task:
    return next(
        t for t in map(make_task, range(5000)) if t.shape == "child" and tuple(p.shape for p in t.parts) == kinds
    )


def test_plans_are_valid_for_any_pool_and_task() -> None:
    for seed in range(300):
        pool = random_pool(Random(seed), 1 + seed % 8)
        task = make_task(seed, "held_out" if seed % 2 else "train")
        plan = oracle_plan(task.text, None, pool)
        checked = validate(plan, PlanLimits(tuple(w.handle for w in pool), STEPS_MAX))
        assert 1 <= len(checked.steps) <= STEPS_MAX


def test_price_decides_between_near_equals_and_quality_between_unequals() -> None:
    task = make_family_task("crates", 0)
    near = (worker("dear", "20", arithmetic=0.98), worker("cheap", "0.2", arithmetic=0.97))
    assert handles(oracle_plan(task.text, None, near)) == ["cheap"]
    far = (worker("dear", "6", arithmetic=0.98), worker("cheap", "0.2", arithmetic=0.7))
    assert handles(oracle_plan(task.text, None, far)) == ["dear"]
    assert handles(oracle_plan(task.text, None, far, price_weight=1000.0)) == ["cheap"]


def test_experience_outweighs_words() -> None:
    task = make_family_task("crates", 0)
    pool = (worker("praised", "2", arithmetic=0.99), worker("proven", "2", arithmetic=0.8))
    assert handles(oracle_plan(task.text, None, pool)) == ["praised"]
    lived = {"praised": (40, 0.4), "proven": (40, 0.95)}
    assert handles(oracle_plan(task.text, None, pool, experience=lived)) == ["proven"]


def test_a_chain_hands_on() -> None:
    plan = oracle_plan(make_family_task("pieces", 0).text, None, STANDARD_POOL)
    assert handles(plan)[0] == "atlas"
    assert [step["see"] for step in plan["steps"]] == [[], [0], [1]]
    assert all(step["task"] is None for step in plan["steps"])


def test_votes_need_a_tool_and_three_solvers() -> None:
    task = make_family_task("race", 0)
    assert handles(oracle_plan(task.text, None, STANDARD_POOL))[-1] == "vote"
    assert len(handles(oracle_plan(task.text, None, STANDARD))) == 1
    two = tuple(w for w in STANDARD if w.handle in ("atlas", "cedar"))
    assert len(handles(oracle_plan(task.text, None, (*two, VOTE_TOOL)))) == 1
    dear = tuple(worker(f"w{i}", "20", logic=0.7) for i in range(3))
    assert len(handles(oracle_plan(task.text, None, (*dear, VOTE_TOOL), price_weight=200.0))) == 1


def test_drafts_are_bought_by_price_and_reviews_by_quality() -> None:
    task = make_family_task("bill", 0)
    plan = oracle_plan(task.text, None, STANDARD_POOL)
    assert handles(plan) == ["quill", "onyx"]
    assert plan["steps"][1]["see"] == [0]
    assert handles(oracle_plan(task.text, None, (worker("one", "2", format=0.6),))) == ["one"]


@pytest.mark.parametrize("name", ["crates", "change", "race", "bill"])
def test_a_task_that_no_worker_can_do_goes_to_the_cheapest(name: str) -> None:
    pool = (worker("dear", "20", dates=0.9), worker("cheap", "0.2", dates=0.9), VOTE_TOOL)
    assert handles(oracle_plan(make_family_task(name, 0).text, None, pool)) == ["cheap"]


def test_a_stranger_goes_to_the_cheapest() -> None:
    assert handles(oracle_plan("Write a poem", None, STANDARD_POOL)) == ["ember"]
    with pytest.raises(ValueError, match=r"."):
        oracle_plan("Write a poem", None, (VOTE_TOOL, SELF_WORKER))


def test_two_questions_become_two_child_loops_and_a_join() -> None:
    task = child_of("chain", "vote")
    plan = oracle_plan(task.text, None, STANDARD_POOL)
    assert handles(plan) == ["self", "self", "quill"]
    assert [step["task"] for step in plan["steps"]] == [*INSTRUCTIONS, None]
    inner = oracle_plan(task.text, INSTRUCTIONS[1], STANDARD_POOL)
    assert handles(inner)[-1] == "vote"


def test_without_self_two_short_chains_still_fit_and_a_vote_does_not() -> None:
    pool = (*STANDARD, VOTE_TOOL)
    long = child_of("chain", "chain")
    plan = oracle_plan(long.text, None, pool)
    assert len(plan["steps"]) == STEPS_MAX
    assert [step["see"] for step in plan["steps"]] == [[], [0], [], [2], [1, 3]]
    assert solve_rate(plan, long, pool, 20) > 0.8
    assert handles(oracle_plan(child_of("chain", "vote").text, None, pool)) == ["ember"]


def test_majority_success_by_hand() -> None:
    assert majority_success([0.7]) == pytest.approx(0.7)
    assert majority_success([0.7, 0.7, 0.7]) == pytest.approx(0.343 + 3 * 0.147 + 0.063)
    assert majority_success([1.0, 0.5, 0.5]) == pytest.approx(1.0)
    assert majority_success([0.5, 0.5]) == pytest.approx(0.5)


# ---------------------------------------------------------------- the arena's promises


@pytest.mark.parametrize(("pool", "split"), [(STANDARD, "train"), (HELD_OUT, "held_out")])
def test_the_promises_hold(pool: Pool, split: Split) -> None:
    result = measure(with_builtins(pool), 400, split, 0, climbs=8, screen_tasks=12)
    assert result.broken == []
    assert result.singles[0].right > 0.1, "a world where nobody can do anything would keep the promises too"
    assert result.workflows[0].right > result.singles[0].right
    assert result.oracles[0].usd_per_task >= result.oracles[1].usd_per_task > 0
    assert "all promises hold" in table(result)


def test_a_pool_that_breaks_the_promises_is_called_out() -> None:
    know_all = ArenaWorker(
        "all", "all", dict.fromkeys(["arithmetic", "units", "dates", "tables", "strings", "lists"], 1.0)
    )
    result = measure((know_all, VOTE_TOOL), 60, "train", 0, climbs=0, screen_tasks=10)
    assert any("oracle" in words for words in result.broken)
    assert "BROKEN" in table(result)


def test_the_search_covers_what_it_says() -> None:
    plans = list(systematic(STANDARD_POOL))
    assert len(plans) == 8 + 56 + 336 + 8 + 56 * 3 + 70 * 4
    pool = PlanLimits(tuple(w.handle for w in STANDARD_POOL), STEPS_MAX)
    rng = Random(0)
    plan = chain(STANDARD[:2])
    for _ in range(300):
        plan = mutate(plan, STANDARD_POOL, rng)
        assert validate(dict(plan), pool)
    assert validate(dict(vote(STANDARD[:3], VOTE_TOOL)), pool)


def test_measure_exits_nonzero_on_a_broken_promise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.simulated.arena.STANDARD", STANDARD[:3])
    assert main(["--tasks", "24", "--climbs", "0"]) == 1
    assert "BROKEN" in capsys.readouterr().out
    monkeypatch.setattr("bench.simulated.arena.HELD_OUT", HELD_OUT[:2])
    assert main(["--tasks", "24", "--climbs", "0", "--pool", "heldout"]) == 1
    assert "heron" in capsys.readouterr().out
