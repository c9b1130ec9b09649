"""Environments: prompts, pools, grading, determinism, money, and what is not recorded."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.core.loop.caps import Caps
from gateway.core.loop.prompt import render
from gateway.core.pool.workers import MODEL_KINDS
from gateway.errors import ConductorError
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.loop.routers import CheckedRouter
from policy.environments.arena import ArenaEnvironment, Staff, Truth
from policy.environments.base import Episode, PlanSource, Prompt, Spend, SpendCapped, split_of
from policy.environments.executor import Executor
from policy.environments.replay import ReplayEnvironment, caps_above
from policy.environments.sampling import SamplingProgress, sample
from policy.reward import RewardSettings
from policy.simulators.arena.server import salt_of
from policy.simulators.arena.world import run_plan
from policy.simulators.recordings import BadRecording, Recordings, load
from policy.statistics.baselines import fixed, random_worker
from policy.train.sources.sampled import reward_of
from tests.fakes.conductor import ScriptedConductor
from tests.kit import PRICE
from tests.policy.environments import ABSENT, PRICES, RECORDED, handle, line, lines, recorded, text


@pytest.fixture
def replay(tmp_path: Path) -> ReplayEnvironment:
    return recorded(tmp_path / "r.jsonl", lines())


def told(episode: Episode) -> dict[str, Any]:
    """All of an episode but its random ids."""
    body = asdict(replace(episode, record=None, children=()))  # type: ignore[arg-type]
    body["steps_told"] = [(step.worker, step.messages, step.reply, step.cost_nano) for step in episode.record.steps]
    body["times"] = [(step.started_us, step.finished_us) for step in episode.record.steps]
    return body


def question(env: ReplayEnvironment, prompt_id: str) -> Prompt:
    found = [prompt for split in ("train", "validation") for prompt in env.prompts(split, env.count(split), 0)]
    return next(prompt for prompt in found if prompt.id == prompt_id)


# ---------------------------------------------------------------- prompts and pools


def test_splits_are_a_hash_of_the_id_and_share_nothing(replay: ReplayEnvironment) -> None:
    train = {prompt.id for prompt in replay.prompts("train", replay.count("train"), 1)}
    validation = {prompt.id for prompt in replay.prompts("validation", replay.count("validation"), 2)}
    assert not train & validation
    assert len(train | validation) == 80
    assert all(split_of(prompt_id, 0.25) == "validation" for prompt_id in validation)
    with pytest.raises(ValueError, match=r"81 train questions asked for, \d+ are there: lower the number"):
        replay.prompts("train", 81, 0)


def test_prompts_are_chosen_by_the_seed_alone(replay: ReplayEnvironment) -> None:
    arena = ArenaEnvironment(staff="fresh")
    for env in (replay, arena):
        assert env.prompts("train", 20, 3) == env.prompts("train", 20, 3)
        assert env.prompts("train", 20, 3)[:5] != env.prompts("train", 20, 4)[:5]
        assert len({prompt.id for prompt in env.prompts("train", 20, 3)}) == 20


def test_arena_validation_uses_phrasings_no_training_task_has() -> None:
    env = ArenaEnvironment(staff="held_out")
    assert all(prompt.id.startswith("arena-held_out-") for prompt in env.prompts("validation", 5, 0))
    assert all(prompt.id.startswith("arena-train-") for prompt in env.prompts("train", 5, 0))
    names = {spec.name for prompt in env.prompts("train", 5, 0) for spec in prompt.pool}
    assert {"heron", "vote", "self"} <= names
    assert "atlas" not in names


def test_k_of_n_keeps_so_many_models_and_every_tool() -> None:
    env = ArenaEnvironment()
    prompt = env.prompts("train", 1, 0)[0]
    kept = set()
    for seed in range(30):
        posed = env.situation(prompt, Random(seed), k_of_n=3)
        names = [spec.name for spec in posed.prompt.pool]
        assert len([spec for spec in posed.prompt.pool if spec.kind in MODEL_KINDS]) == 3
        assert {"vote", "self"} <= set(names)
        kept.add(frozenset(names))
    assert len(kept) > 15
    assert len(env.situation(prompt, Random(0), k_of_n=99).prompt.pool) == len(prompt.pool)
    with pytest.raises(ValueError, match="k_of_n is 0"):
        env.situation(prompt, Random(0), k_of_n=0)


def test_redrawn_handles_are_those_the_policy_is_shown_and_may_name() -> None:
    env = ArenaEnvironment()
    prompt = env.prompts("train", 1, 0)[0]
    posed = env.situation(prompt, Random(1), redraw_handles=True)
    shown = [worker.handle for worker in posed.shown.workers]
    assert shown == list(posed.situation.allowed.handles) == [spec.handle for spec in posed.prompt.pool]
    assert len(set(shown)) == len(shown)
    assert {spec.name for spec in posed.prompt.pool} == {spec.name for spec in prompt.pool}
    assert sum(spec.handle == spec.name for spec in posed.prompt.pool) <= 4
    again = env.situation(prompt, Random(1), redraw_handles=True)
    assert (again.prompt, again.shown) == (posed.prompt, posed.shown)
    conversation = render("compact", posed.shown)[0]["content"]
    assert all(name in conversation for name in shown)


async def test_a_redrawn_worker_is_the_same_worker() -> None:
    env = ArenaEnvironment()
    prompt = env.prompts("train", 1, 0)[0]
    posed = env.situation(prompt, Random(1), redraw_handles=True).prompt
    [plain] = await env.run(prompt, [text(prompt, ("cedar", None, []))])
    [renamed] = await env.run(posed, [text(posed, ("cedar", None, []))])
    assert handle(posed, "cedar") != "cedar"
    assert (renamed.reply, renamed.cost_nano, renamed.workers) == (plain.reply, plain.cost_nano, plain.workers)


# ---------------------------------------------------------------- what a plan gives


async def test_a_single_pick_costs_and_is_worth_what_was_recorded(replay: ReplayEnvironment) -> None:
    prompt = question(replay, "sums-11")
    right, wrong = await replay.run(prompt, [text(prompt, (name, None, [])) for name in ("dear", "cheap")])
    assert (right.outcome, wrong.outcome) == (1.0, 0.0)
    assert right.cost_nano == 50 * 10_000 + 100 * 40_000
    assert wrong.cost_nano == 50 * 100 + 100 * 400
    assert right.latency_s == pytest.approx(0.5 + 100 / 80)
    assert (right.calls, right.steps, right.workers, right.parsed, right.error) == (1, 1, ("dear",), True, None)
    assert right.plan == text(prompt, ("dear", None, []))
    assert right.record.status == "done"


async def test_a_rewritten_task_has_no_recording(replay: ReplayEnvironment) -> None:
    prompt = question(replay, "sums-10")
    [episode] = await replay.run(prompt, [text(prompt, ("dear", "Add the numbers.", []))])
    assert (episode.outcome, episode.error, episode.parsed) == (0.0, "no_recording", True)
    assert episode.record.steps[0].attempts[0].upstream_status == 404
    assert episode.cost_nano == 0


async def test_a_vote_takes_the_majority_and_costs_its_voters(replay: ReplayEnvironment) -> None:
    even, odd = question(replay, "sums-12"), question(replay, "sums-11")
    plan: list[tuple[str, str | None, list[int] | str]] = [(name, None, []) for name in ("cheap", "mid", "dear")]
    plan.append(("vote", None, "all"))
    [agreed] = await replay.run(even, [text(even, *plan)])
    [split] = await replay.run(odd, [text(odd, *plan)])
    assert (agreed.outcome, agreed.calls, agreed.steps) == (1.0, 4, 4)
    assert split.outcome == 0.0  # three answers: the tie goes to the earliest
    assert agreed.latency_s == pytest.approx(0.5 + 100 / 80)  # side by side


async def test_steps_in_a_chain_take_their_time_one_after_another(replay: ReplayEnvironment) -> None:
    prompt = question(replay, "sums-12")
    [chain] = await replay.run(prompt, [text(prompt, ("cheap", None, []), ("mid", None, [0]))])
    assert chain.latency_s == pytest.approx(2 * (0.5 + 100 / 80))
    first, second = chain.record.steps
    assert second.started_us == first.finished_us > first.started_us


@pytest.mark.parametrize("plan", ["", "{}", '{"steps":[]}', '{"steps":[{"worker":"nobody","task":null,"see":[]}]}'])
async def test_a_plan_that_may_not_run_is_unparsed_and_free(replay: ReplayEnvironment, plan: str) -> None:
    [episode] = await replay.run(question(replay, "sums-10"), [plan])
    assert (episode.parsed, episode.outcome, episode.cost_nano, episode.calls) == (False, 0.0, 0, 0)
    assert (episode.error, episode.plan) == ("plan_refused", plan)


async def test_with_a_fallback_a_refused_plan_is_answered_and_still_unparsed(tmp_path: Path) -> None:
    env = recorded(tmp_path / "r.jsonl", lines(), executor=Executor(fallback=fixed("dear")))
    [episode] = await env.run(question(env, "sums-11"), ["nonsense"])
    assert (episode.parsed, episode.outcome, episode.record.fallback) == (False, 1.0, "sampled_not_json")


def test_grading_prefers_the_recordings_own_verdict(tmp_path: Path) -> None:
    row = line(10, "sums", {"cheap": "20", "mid": "19", "dear": "21"}, "20")
    row["workers"]["cheap"]["correct"] = False
    row["workers"]["mid"]["correct"] = None
    env = recorded(tmp_path / "r.jsonl", [row])
    prompt = question(env, "sums-10")
    assert env.grade(prompt, "Well.\nAnswer: 20") == 0.0  # recorded as wrong, whatever it looks like
    assert env.grade(prompt, "Answer: $20.00") == 1.0
    assert env.grade(prompt, "Well.\nAnswer: 19") == 0.0


def test_recordings_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    ungraded = line(10, "sums", {"cheap": "1", "mid": "1", "dear": "1"}, "1")
    del ungraded["gold"], ungraded["workers"]["mid"]["correct"]
    with pytest.raises(BadRecording, match="no question was answered by every model"):
        recorded(tmp_path / "r.jsonl", [ungraded])
    bad = line(10, "sums", {"cheap": "1", "mid": "1", "dear": "1"}, "1")
    bad["workers"]["mid"]["correct"] = "yes"
    with pytest.raises(BadRecording, match=r"r.jsonl:1: `workers.mid.correct` must be true or false"):
        recorded(tmp_path / "r.jsonl", [bad])
    env = recorded(tmp_path / "r.jsonl", lines())
    stranger = replace(question(env, "sums-10"), truth=None)
    with pytest.raises(ValueError, match="is not a recorded one"):
        env.grade(stranger, "x")


@pytest.mark.parametrize("staff", ["standard", "fresh"])
async def test_the_pure_core_of_the_arena_gives_what_the_executor_gives(staff: Staff) -> None:
    """Replies, dollars, calls and seconds of the oracle's plans, child loops included."""
    env = ArenaEnvironment(staff=staff, seed=5)
    prompts = env.prompts("validation", 150, 1)
    found = await sample(env, [(prompt, [env.children(prompt)]) for prompt in prompts])
    for prompt, [episode] in zip(prompts, found.groups, strict=True):
        truth = prompt.truth
        assert isinstance(truth, Truth)
        question, salt = prompt.messages[0]["content"], salt_of(5, None, 0)
        run = run_plan(json.loads(episode.plan), question, truth.pool(prompt.pool), salt)
        assert [step.reply for step in episode.record.steps] == run.replies
        assert (episode.reply, episode.cost_nano, episode.calls) == (run.reply, run.cost_nano, run.calls)
        assert episode.latency_s == pytest.approx(run.latency_s, abs=1e-5)
    assert any(episode.children for episode in found.episodes)
    assert any("vote" in episode.workers for episode in found.episodes)


async def test_the_oracles_know_more_than_anybody(replay: ReplayEnvironment) -> None:
    prompts = replay.prompts("train", 40, 0)
    episodes = (await sample(replay, [(prompt, [replay.oracle(prompt)]) for prompt in prompts])).episodes
    assert all(episode.outcome == 1.0 for episode in episodes)
    cheap = next(e for e in episodes if e.prompt_id.startswith("sums") and int(e.prompt_id[5:]) % 2 == 0)
    assert cheap.workers == ("cheap",)
    arena = ArenaEnvironment()
    tasks = arena.prompts("validation", 120, 0)
    best = (await sample(arena, [(task, [arena.oracle(task)]) for task in tasks])).episodes
    assert sum(episode.outcome for episode in best) / 120 > 0.9
    with pytest.raises(ValueError, match="is not one of the arena's"):
        arena.oracle(prompts[0])


async def test_child_loops_are_planned_timed_and_paid() -> None:
    env = ArenaEnvironment()
    prompt = next(p for p in env.prompts("train", 200, 0) if p.category == "both")
    plan = text(
        prompt,
        ("self", "Answer only the first question.", []),
        ("self", "Answer only the second question.", []),
        ("quill", None, [0, 1]),
    )
    [episode] = await env.run(prompt, [plan])
    assert len(episode.children) == 2
    assert episode.steps == 3 + sum(len(child.steps) for child in episode.children)
    assert episode.cost_nano == episode.record.cost_nano > sum(child.cost_nano for child in episode.children) > 0
    longest = max(child.finished_us - child.created_us for child in episode.children)
    join = episode.record.steps[2]
    assert join.started_us - episode.record.created_us == longest > 0
    assert episode.latency_s == pytest.approx((join.finished_us - episode.record.created_us) / 1e6)


async def test_a_conductor_plans_here_as_it_does_when_served(replay: ReplayEnvironment) -> None:
    prompt = question(replay, "sums-11")
    words = text(prompt, ("cheap", None, []), ("dear", None, []))
    conductor = ScriptedConductor([words, ConductorError("down", "away")])
    planner = ConductorPlanner(conductor, ConductorSettings("compact", PRICE, timeout_s=5.0, temperature=1.0))
    replay.executor = replace(replay.executor, rounds=1)
    episode = await replay.episode(prompt, planner)
    [planned] = episode.record.rounds
    assert planned.messages == render("compact", replay.executor.pose(prompt).shown)
    assert len(planned.plan_logprobs) == len(planned.plan_token_ids) == len(planned.decision_mask) > 0
    assert planned.sampling["temperature"] == 1.0
    assert (episode.outcome, episode.workers, planned.policy_version) == (1.0, ("cheap", "dear"), "conductor")
    steps_nano = sum(step.cost_nano for step in episode.record.steps)
    assert episode.cost_nano == steps_nano + planned.cost_nano > steps_nano
    away = await replay.episode(prompt, planner)
    assert (away.parsed, away.error, away.outcome) == (True, "conductor_unavailable", 0.0)  # not the policy's doing


# ---------------------------------------------------------------- determinism and money


@pytest.mark.parametrize("concurrency", [1, 7, 64])
async def test_the_order_of_episodes_changes_nothing(replay: ReplayEnvironment, concurrency: int) -> None:
    for env in (replay, ArenaEnvironment(staff="fresh")):
        prompts = env.prompts("train", 12, 0)
        work: list[tuple[Prompt, list[PlanSource]]] = []
        for p in prompts:
            texts = [text(p, (spec.name, None, [])) for spec in p.pool[:2]]
            work.append((p, [random_worker(1), random_worker(2), *texts]))
        found = await sample(env, work, concurrency=concurrency)
        alone = [[await env.episode(prompt, source, i) for i, source in enumerate(sources)] for prompt, sources in work]
        assert [[told(e) for e in group] for group in found.groups] == [[told(e) for e in group] for group in alone]
        assert not found.capped


async def test_sampling_leaves_garbage_collection_as_it_was(replay: ReplayEnvironment) -> None:
    threshold, seen = gc.get_threshold(), list[bool]()
    work = [(prompt, [fixed("dear")]) for prompt in replay.prompts("train", 2, 0)]
    await sample(replay, work, on_progress=lambda _: seen.append(gc.get_freeze_count() > 0))
    assert (seen, gc.get_freeze_count(), gc.get_threshold()) == ([True, True], 0, threshold)
    gc.freeze()  # as a process does that keeps what it has loaded
    try:
        await sample(replay, work)
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == threshold
    finally:
        gc.unfreeze()


async def test_the_cap_ends_a_sampling_cleanly_and_holds(tmp_path: Path) -> None:
    episode_nano = 50 * 10_000 + 100 * 40_000  # one call of `dear`
    executor = Executor(Caps(cost_nano=400_000_000))
    spend = Spend(cap_nano=420_000_000, episode_nano_max=400_000_000)
    env = recorded(tmp_path / "r.jsonl", lines(), executor=executor, spend=spend)
    seen: list[SamplingProgress] = []
    work = [(prompt, [fixed("dear")]) for prompt in env.prompts("train", 40, 0)]
    found = await sample(env, iter(work), concurrency=8, on_progress=seen.append)
    assert found.capped
    assert 0 < len(found.episodes) < 40
    assert spend.spent_nano == len(found.episodes) * episode_nano <= 420_000_000
    assert not spend.fits()
    assert [progress.done for progress in seen] == list(range(1, len(found.episodes) + 1))
    assert seen[-1].spent_nano == spend.spent_nano
    assert seen[-1].total is None
    with pytest.raises(SpendCapped, match=r"spent \$0.0\d+ of the cap of \$0.42.*raise the cap"):
        await env.run(work[0][0], [fixed("dear")])
    with pytest.raises(SpendCapped):
        await env.episode(work[0][0], fixed("dear"))


async def test_a_group_that_the_cap_cuts_is_handed_over_with_the_error(tmp_path: Path) -> None:
    executor = Executor(Caps(cost_nano=400_000_000))
    spend = Spend(cap_nano=410_000_000, episode_nano_max=400_000_000)
    env = recorded(tmp_path / "r.jsonl", lines(), executor=executor, spend=spend)
    with pytest.raises(SpendCapped) as capped:
        await env.run(question(env, "sums-11"), [fixed("dear")] * 8)
    assert [episode.sample for episode in capped.value.episodes] == [0, 1, 2]


def test_a_cap_that_allows_nothing_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"a spending cap of \$0 allows no episode, which may cost \$2: raise the cap"):
        Spend(cap_nano=0)
    with pytest.raises(ValueError, match=r"below the executor's `caps\.cost_nano`"):
        ArenaEnvironment(spend=Spend(episode_nano_max=1))


async def test_an_episode_that_fails_in_the_code_gives_its_money_back(replay: ReplayEnvironment) -> None:
    class Broken:
        name = "broken"

        async def plan(self, *_: Any) -> Any:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await replay.episode(question(replay, "sums-10"), Broken())
    assert (replay.spend.spent_nano, replay.spend.fits()) == (0, True)
    capped = Spend(cap_nano=2_000_000_000)
    capped.start()
    assert not capped.fits()
    capped.end(0)
    assert capped.fits()


# ---------------------------------------------------------------- the real recordings


@pytest.mark.skipif(not RECORDED.exists(), reason=ABSENT)
async def test_single_picks_measure_what_real_models_were_recorded_with() -> None:
    models = ["gpt-4o-mini-2024-07-18", "gemini-1.5-flash", "Qwen2-72B-Instruct"]
    prices = json.loads((RECORDED / "prices.json").read_text())
    env = ReplayEnvironment.open(RECORDED / "zeroeval_dev.jsonl.gz", prices, models)
    prompts = env.prompts("validation", 150, 0)
    found = await sample(env, [(prompt, [fixed(model) for model in models]) for prompt in prompts])
    for prompt, group in zip(prompts, found.groups, strict=True):
        for model, episode in zip(models, group, strict=True):
            answer = prompt.truth.answers[model]  # type: ignore[attr-defined]
            assert episode.outcome == answer.score
            assert episode.record.completion_tokens == answer.output_tokens


def test_prices_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines(2)))
    with pytest.raises(BadRecording, match="no price of `dear`"):
        ReplayEnvironment.open(path, {name: PRICES[name] for name in ("cheap", "mid")})


async def test_recorded_dollars_are_what_an_episode_costs(tmp_path: Path) -> None:
    rows = lines(2)
    rows[0]["workers"]["dear"]["cost_usd"] = 3.5  # above what its tokens may draw
    recordings = load_rows(tmp_path, rows)
    env = ReplayEnvironment(recordings, PRICES, executor=Executor(caps_above(recordings)))
    prompt = question(env, rows[0]["id"])
    priced, counted = await env.run(prompt, [text(prompt, (name, None, [])) for name in ("dear", "cheap")])
    assert (priced.cost_nano, counted.cost_nano) == (3_500_000_000, 50 * 100 + 100 * 400)
    assert env.executor.caps.cost_nano == 16 * 3_500_000_000
    assert env.oracle(prompt) == text(prompt, ("cheap", None, []))


def test_an_oracle_takes_an_answer_for_right_from_half_its_grade_on(tmp_path: Path) -> None:
    rows = lines(2)
    for name, score in (("cheap", 0.1), ("mid", 0.5), ("dear", 1.0)):
        answer = rows[1]["workers"][name]
        del answer["correct"]
        answer["score"] = score
    env = ReplayEnvironment(load_rows(tmp_path, rows), PRICES)
    prompt = question(env, rows[1]["id"])
    assert env.oracle(prompt) == text(prompt, ("mid", None, []))


async def test_self_consistency_votes_over_the_recorded_samples(tmp_path: Path) -> None:
    rows = lines(2)
    right = rows[0]["gold"]
    rows[0]["workers"]["cheap"] = {
        "output": "Answer: 1",
        "correct": False,
        "output_tokens": 10,
        "cost_usd": 0.001,
        "samples": [{"answer": right, "correct": True, "output_tokens": 10, "cost_usd": 0.002} for _ in range(2)],
    }
    env = ReplayEnvironment(load_rows(tmp_path, rows), PRICES)
    prompt = question(env, rows[0]["id"])
    thrice = text(prompt, *[("cheap", None, [])] * 3, ("vote", None, "all"))
    once = text(prompt, ("cheap", None, []))
    found = await env.run(prompt, [thrice, once, thrice])
    assert [episode.outcome for episode in found] == [1.0, 0.0, 1.0]
    assert [episode.cost_nano for episode in found] == [5_000_000, 1_000_000, 5_000_000]
    assert found[0].reply == f"<answer>{right}</answer>"


async def test_a_recorded_check_is_a_tool_with_its_verdict_and_cost(tmp_path: Path) -> None:
    rows = lines(2)
    rows[1]["checks"] = {
        "cheap": {"valid": False, "cost_usd": 0.25},
        "dear": {"valid": True, "cost_usd": 0.5},
        "gone": {"valid": True, "cost_usd": 9},
    }
    env = ReplayEnvironment(load_rows(tmp_path, rows), PRICES)
    assert env.left_out == {"checks of answers that are not there": 1}
    assert ReplayEnvironment.open(write_rows(tmp_path, rows), PRICES, ["cheap", "mid"]).left_out == {}
    assert "check" not in {spec.name for spec in question(env, rows[0]["id"]).pool}
    prompt = question(env, rows[1]["id"])
    assert next(spec for spec in prompt.pool if spec.name == "check").price.call_nano == 500_000_000  # type: ignore[union-attr]
    plans = [text(prompt, (name, None, []), ("check", None, [0])) for name in ("cheap", "dear", "mid")]
    alone = text(prompt, ("check", None, []))
    cheap, dear, unchecked, blind = await env.run(prompt, [*plans, alone])
    assert (cheap.reply, dear.reply) == ("not valid", "valid")
    assert (cheap.outcome, dear.outcome) == (0.0, 0.0)
    assert [step.cost_nano for step in cheap.record.steps] == [50 * 100 + 100 * 400, 250_000_000]
    assert dear.record.steps[1].cost_nano == 500_000_000
    assert unchecked.record.steps[1].attempts[0].upstream_status == 404
    assert unchecked.record.steps[1].cost_nano == 0
    assert blind.error is not None


async def test_a_chain_with_the_recorded_checker_ships_what_was_valid(tmp_path: Path) -> None:
    rows = lines(2)
    rows[0]["checks"] = {"cheap": {"valid": True, "cost_usd": 0.25}, "mid": {"valid": True, "cost_usd": 0.25}}
    rows[1]["checks"] = {"cheap": {"valid": False, "cost_usd": 0.25}, "mid": {"valid": False, "cost_usd": 0.5}}
    env = ReplayEnvironment(load_rows(tmp_path, rows), PRICES)
    chain = CheckedRouter(["cheap", "mid", "dear"], "check")
    accepted, escalated = [(await env.run(question(env, rows[at]["id"]), [chain]))[0] for at in (0, 1)]
    assert accepted.workers[:2] == ("cheap", "check")
    assert [step.status for step in accepted.record.steps] == ["done", "done", "skipped", "skipped", "skipped"]
    assert [step.status for step in escalated.record.steps] == ["done"] * 5
    assert (accepted.outcome, escalated.outcome) == (1.0, 1.0)
    assert escalated.cost_nano == sum(step.cost_nano for step in escalated.record.steps)
    assert escalated.record.steps[3].cost_nano == 500_000_000


async def test_an_episode_has_the_verdicts_of_its_contracts_and_checkers(tmp_path: Path) -> None:
    rows = lines(2)
    valid = {"cheap": False, "mid": False, "dear": True}
    rows[1]["checks"] = {name: {"valid": each, "cost_usd": 0.25} for name, each in valid.items()}
    env = ReplayEnvironment(load_rows(tmp_path, rows), PRICES)
    prompt = question(env, rows[1]["id"])

    def step(name: str, **more: Any) -> dict[str, Any]:
        return {"worker": handle(prompt, name), "task": None, "see": [], **more}

    judged, checker = {"judge": handle(prompt, "check")}, {"kind": "verify", "see": [0], "accept": "ship"}
    plans = [
        [step("dear")],
        [step("dear", expect=judged)],
        [step("cheap", expect=judged)],  # no repair is recorded, so the dearest one answers
        [step("cheap", expect={"min_chars": 9_999})],
        [step("cheap"), step("check", **checker, escalate=2), step("dear")],
    ]
    bare, kept, mended, missed, escalated = await env.run(prompt, [json.dumps({"steps": plan}) for plan in plans])
    assert [[one.word for one in each.verdicts] for each in (bare, kept, mended, missed, escalated)] == [
        *([], ["kept"], ["repaired"], ["missed"]),
        ["rejected"],
    ]
    assert [one.checker for each in (kept, mended, missed, escalated) for one in each.verdicts] == [
        *("check", "check", None, "check")
    ]
    assert mended.verdicts[0].rollout_id == mended.record.id
    assert (mended.outcome, missed.error, escalated.outcome) == (1.0, None, 1.0)
    free = RewardSettings(cost_per_usd=0, latency_per_s=0)
    counting = replace(free, missed_penalty=0.04, repaired_penalty=0.01, rejected_penalty=0.02)
    lost = [reward_of(each, free) - reward_of(each, counting) for each in (bare, kept, mended, missed, escalated)]
    assert lost == [pytest.approx(each) for each in (0, 0, 0.01, 0.04, 0.02)]


def test_a_question_offers_only_those_that_answered_it(tmp_path: Path) -> None:
    rows = lines(4)
    del rows[0]["workers"]["mid"]
    rows[1]["workers"] = {"other": rows[1]["workers"]["dear"]}
    del rows[2]["gold"], rows[2]["workers"]["mid"]["correct"]
    del rows[3]["gold"]  # every answer has a verdict
    env = ReplayEnvironment.open(write_rows(tmp_path, rows), PRICES, ["cheap", "mid"])
    assert {spec.name for spec in question(env, rows[0]["id"]).pool} == {"cheap", "vote"}
    assert {spec.name for spec in question(env, rows[3]["id"]).pool} == {"cheap", "mid", "vote"}
    assert env.count("train") + env.count("validation") == len(rows) - 2
    assert env.left_out == {
        "questions that no worker answered": 1,
        "questions without `gold` or a verdict on each answer": 1,
        "answers of cheap": 1,
        "answers of mid": 2,
    }
    whole = load_rows(tmp_path, [row for row in rows if "other" not in row["workers"]])
    assert ReplayEnvironment(whole, PRICES).left_out["questions that not every worker answered"] == 1


def write_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> Recordings:
    return load(write_rows(tmp_path, rows))
