"""Baselines: valid plans within any caps, and parameters that training prompts call for."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.core.loop.caps import Caps
from gateway.core.loop.plan import validate
from gateway.service.loop.state import Planner
from policy.environments.arena import ArenaEnvironment
from policy.environments.base import Spend
from policy.environments.executor import Executor
from policy.environments.replay import ReplayEnvironment
from policy.environments.sampling import sample
from policy.start.recorded.ranking import RankPlanner
from policy.statistics import tuning
from policy.statistics.baselines import (
    CascadePlanner,
    Categories,
    Ladder,
    cheapest_worker,
    fixed,
    moa,
    random_worker,
    table,
    vote,
)
from policy.statistics.tuning import Observation, WorkerResult
from tests.policy.environments import ABSENT, RECORDED, SUMS, WORDS, lines, recorded


@pytest.fixture
def replay(tmp_path: Path) -> ReplayEnvironment:
    return recorded(tmp_path / "r.jsonl", lines())


async def trained(env: ReplayEnvironment) -> list[Observation]:
    return await tuning.observe(env, env.prompts("train", env.count("train"), 0))


async def figures(env: ReplayEnvironment, planner: Planner) -> tuple[float, float, float]:
    """(accuracy, nano-dollars, calls) over the validation split."""
    prompts = env.prompts("validation", env.count("validation"), 0)
    episodes = (await sample(env, [(prompt, [planner]) for prompt in prompts])).episodes
    assert all(episode.parsed and episode.error is None for episode in episodes)
    n = len(episodes)
    cost, calls = sum(e.cost_nano for e in episodes), sum(e.calls for e in episodes)
    return sum(e.outcome for e in episodes) / n, cost / n, calls / n


def all_of(observed: list[Observation]) -> list[Planner]:
    return [
        fixed("mid"),
        random_worker(3),
        cheapest_worker(),
        tuning.table(observed),
        tuning.vote(observed),
        tuning.cascade(observed),
        tuning.moa(observed),
        tuning.fallback(observed),
        tuning.knn(observed),
        tuning.knn_words(observed),
        RankPlanner(observed),
        RankPlanner(observed, usd_weight=400.0),
    ]


async def test_every_round_of_every_baseline_is_a_valid_plan(replay: ReplayEnvironment) -> None:
    names = []
    for planner in all_of(await trained(replay)):
        for prompt in replay.prompts("validation", 8, 0):
            episode = await replay.episode(prompt, planner)
            assert (episode.parsed, episode.error) == (True, None)
            for planned in episode.record.rounds:
                assert planned.refusal is None
                assert planned.plan is not None
            posed = replay.situation(prompt, Random(0))
            validate(episode.plan, posed.situation.allowed)
        names.append(planner.name)
    assert names == [
        "fixed:mid",
        "random",
        "cheapest",
        "table",
        "vote",
        "cascade",
        "moa",
        "fallback",
        "knn",
        "knn-words",
        "ranks",
        "ranks",
    ]


@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_baselines_stay_within_the_callers_caps(tmp_path: Path, steps: int) -> None:
    env = recorded(tmp_path / "r.jsonl", lines(), executor=Executor(Caps(steps=steps, cost_nano=2_000_000_000)))
    for planner in all_of(await trained(env)):
        for prompt in env.prompts("validation", 4, 0):
            posed = env.situation(prompt, Random(1), k_of_n=2, redraw_handles=True)
            episode = await env.episode(posed.prompt, planner)
            assert (episode.parsed, episode.error) == (True, None) or planner.name == "fixed:mid"
            assert all(len(planned.plan["steps"]) <= steps for planned in episode.record.rounds if planned.plan)


async def test_parameters_follow_from_the_training_prompts(replay: ReplayEnvironment) -> None:
    observed = await trained(replay)
    assert len(observed) == replay.count("train")
    assert tuning.ranked(observed)[0] == "mid"  # half of the sums and every word
    table = await figures(replay, tuning.table(observed))
    best_single = await figures(replay, fixed("mid"))
    assert table[0] == 1.0 > best_single[0]  # dear for sums, mid for words
    cascade = await figures(replay, tuning.cascade(observed))
    assert cascade[0] == 1.0
    assert cascade[1] < table[1]  # where the cheap ones agree, the dear one is not asked
    thrifty = await figures(replay, tuning.cascade(observed, usd_weight=1e6))
    assert thrifty[1] < cascade[1]
    assert thrifty == await figures(replay, cheapest_worker())
    assert (await figures(replay, tuning.vote(observed)))[2] == 4.0
    assert (await figures(replay, tuning.moa(observed)))[2] == 3.0


async def test_values_computed_from_single_workers_equal_those_of_a_run(replay: ReplayEnvironment) -> None:
    observed = {each.question: each for each in await trained(replay)}
    categories = tuning.categories(list(observed.values()))
    for prompt in replay.prompts("train", 30, 0):
        each = observed[prompt.messages[0]["content"]]
        for ladder in tuning.ladders_of(["cheap", "mid", "dear"]):
            episode = await replay.episode(prompt, CascadePlanner(categories, {SUMS: ladder, WORDS: ladder}))
            expected = tuning.cascade_result(each, ladder)
            assert (episode.outcome, episode.cost_nano) == (expected.outcome, expected.cost_nano)
        voters = ("dear", "cheap", "mid")
        episode = await replay.episode(prompt, vote(voters))
        expected = tuning.vote_result(each, voters)
        assert (episode.outcome, episode.cost_nano) == (expected.outcome, expected.cost_nano)


def test_categories_are_read_from_the_text_unless_the_client_names_one(replay: ReplayEnvironment) -> None:
    prompts = replay.prompts("train", 40, 0)
    categories = Categories.fitted([(p.messages[0]["content"], p.category or "") for p in prompts])
    others = replay.prompts("validation", replay.count("validation"), 0)
    assert all(categories.of(replay.situation(p, Random(0)).situation) == p.category for p in others)
    told = replay.situation(others[0], Random(0)).situation
    for name, expected in ((SUMS, SUMS), (WORDS, WORDS), ("unheard of", others[0].category)):
        object.__setattr__(told, "task_type", name)
        assert categories.of(told) == expected
    with pytest.raises(ValueError, match="no questions"):
        Categories.fitted([])


def test_categories_forget_rather_than_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    categories = Categories.fitted([("one apple", "fruit"), ("let x be prime", "maths")])
    monkeypatch.setattr(Categories, "KNOWN_MAX", 2)
    assert [categories.of_text(text) for text in ("an apple", "x is prime", "apple pie", "an apple")] == [
        "fruit", "maths", "fruit", "fruit"
    ]  # fmt: skip
    assert len(categories._known) <= 2


async def test_workers_that_are_not_offered_are_passed_over(replay: ReplayEnvironment) -> None:
    categories = Categories({SUMS: [1.0] + [0.0] * 255})
    prompt = replay.prompts("train", 1, 0)[0]
    planners: list[tuple[Planner, tuple[str, ...]]] = [
        (table(categories, {SUMS: ["gone", "mid"]}), ("mid",)),
        (table(categories, {SUMS: ["gone"]}), ("cheap",)),
        (vote(["gone", "mid", "mid"]), ("mid",)),
        (moa(["gone"], "dear"), ("cheap", "dear")),
        (CascadePlanner(categories, {SUMS: Ladder(("gone", "dear"), "mid")}), ("mid",)),
    ]
    for planner, workers in planners:
        assert (await replay.episode(prompt, planner)).workers == workers


async def test_random_is_spread_and_the_same_every_time(replay: ReplayEnvironment) -> None:
    prompts = replay.prompts("train", 40, 0)
    found = await sample(
        replay, [(prompt, [random_worker(1), random_worker(1), random_worker(2)]) for prompt in prompts]
    )
    first, again, other = ([group[i].workers for group in found.groups] for i in range(3))
    assert first == again != other
    assert {workers[0] for workers in first} == {"cheap", "mid", "dear"}


async def test_observing_stops_at_the_cap_with_whole_prompts_only(tmp_path: Path) -> None:
    executor = Executor(Caps(cost_nano=400_000_000))
    spend = Spend(cap_nano=440_000_000, episode_nano_max=400_000_000)
    env = recorded(tmp_path / "r.jsonl", lines(), executor=executor, spend=spend)
    observed = await tuning.observe(env, env.prompts("train", 40, 0))
    assert 0 < len(observed) < 40
    assert all(set(each.results) == {"cheap", "mid", "dear"} for each in observed)


def test_choices_from_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no worker was observed on every training prompt"):
        tuning.workers_in([])
    result = WorkerResult(1.0, 1, "a")
    two = [Observation("q", "c", {"a": result, "b": result})]
    with pytest.raises(ValueError, match="2 workers are too few for a vote of 3"):
        tuning.vote(two)
    assert tuning.moa([Observation("q", "c", {"a": result})]).name == "moa"


async def test_neighbours_find_the_best_worker_of_each_kind(replay: ReplayEnvironment) -> None:
    observed = await trained(replay)
    table = await figures(replay, tuning.table(observed))
    assert await figures(replay, tuning.knn(observed)) == table
    assert await figures(replay, tuning.knn_words(observed)) == table
    thrifty = await figures(replay, tuning.knn(observed, usd_weight=1e6))
    assert thrifty == await figures(replay, cheapest_worker())


async def test_ranks_is_no_worse_than_the_best_worker(replay: ReplayEnvironment) -> None:
    observed = await trained(replay)
    assert (await figures(replay, RankPlanner(observed)))[0] >= (await figures(replay, fixed("mid")))[0]


async def test_the_fallback_asks_another_worker_where_the_first_gives_nothing(tmp_path: Path) -> None:
    def line(number: int) -> dict[str, Any]:
        silent = number % 2 == 0
        workers = {
            "cheap": {"output": "" if silent else "7", "correct": not silent, "output_tokens": 10},
            "mid": {"output": "7" if silent else "8", "correct": silent, "output_tokens": 10},
        }
        return {"id": f"q{number}", "domain": "d", "question": f"Question {number}?", "gold": "7", "input_tokens": 5,
                "workers": workers}  # fmt: skip

    env = recorded(tmp_path / "silent.jsonl", [line(number) for number in range(60)])
    accuracy, _, calls = await figures(env, tuning.fallback(await trained(env)))
    assert accuracy == 1.0
    assert 1.0 < calls < 2.0


async def test_the_arena_can_be_observed_too() -> None:
    env = ArenaEnvironment()
    observed = await tuning.observe(env, env.prompts("train", 60, 0))
    assert set(tuning.workers_in(observed)) == {"atlas", "quill", "ember", "cedar", "onyx", "fjord", "maple", "comet"}
    best = tuning.ranked(observed)[0]
    assert 0 < tuning.value((each.results[best] for each in observed), 0.0)[0] < 0.6


@pytest.mark.skipif(not RECORDED.exists(), reason=ABSENT)
async def test_on_real_recordings_choosing_beats_the_best_single_model() -> None:
    models = ["gpt-4o-mini-2024-07-18", "gemini-1.5-flash", "Qwen2-72B-Instruct", "Meta-Llama-3.1-70B-Instruct"]
    prices = json.loads((RECORDED / "prices.json").read_text())
    env = ReplayEnvironment.open(RECORDED / "zeroeval_dev.jsonl.gz", prices, models)
    observed = await tuning.observe(env, env.prompts("train", 400, 0))
    prompts = env.prompts("validation", 437, 0)  # every one: of fewer, two or three decide
    planners = [tuning.cascade(observed), *(fixed(model) for model in models)]
    groups = (await sample(env, [(prompt, planners) for prompt in prompts])).groups
    cascade, *singles = (sum(group[i].outcome for group in groups) / len(prompts) for i in range(5))
    assert cascade > max(singles)
