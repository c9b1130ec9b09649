"""Workers do what their profile says: one part a call, slips of their own, confident nonsense without the skill."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from policy.simulators import HANDLES
from policy.simulators.arena.families.family import SKILLS
from policy.simulators.arena.families.tasks import INSTRUCTIONS, Task, grade, make_task
from policy.simulators.arena.workers import (
    HELD_OUT,
    PRICE_TIERS_USD_PER_MTOK,
    SELF_WORKER,
    STANDARD,
    VOTE_TOOL,
    ArenaWorker,
    random_pool,
    with_builtins,
)
from policy.simulators.arena.world import chance, count_tokens, run_plan, run_step, solve_rate, wrong
from tests.policy.family_tasks import make_family_task

Plan = dict[str, Any]


def able(*skills: str, accuracy: float = 1.0, name: str = "able") -> ArenaWorker:
    return ArenaWorker(name, name, dict.fromkeys(skills, accuracy), "2", 0.1, 0.01)


def never(*skills: str, name: str = "never") -> ArenaWorker:
    return able(*skills, accuracy=0.0, name=name)


def child_task() -> Task:
    return next(task for task in map(make_task, range(500)) if task.shape == "child")


def test_a_skilled_worker_solves_its_singles() -> None:
    task = make_family_task("crates", 1)
    assert grade(task, run_step(able("arithmetic"), task.text, None, [])) == 1.0


def test_without_the_skill_it_is_always_wrong() -> None:
    for seed in range(60):
        task = make_task(seed)
        assert grade(task, run_step(able(), task.text, None, [])) == 0.0


def test_accuracy_is_the_share_right() -> None:
    worker = able("arithmetic", accuracy=0.7)
    tasks = [make_family_task("crates", seed) for seed in range(600)]
    right = sum(grade(task, run_step(worker, task.text, None, [])) for task in tasks) / len(tasks)
    assert 0.64 < right < 0.76


def test_a_slip_depends_on_worker_question_and_salt_only() -> None:
    text_a = "Please convert 9 kilograms to grams. Only the number in grams is needed, no other words."
    text_b = "How many grams are there in 9 kilograms? Give the amount as a plain number."
    worker = never("units")
    assert run_step(worker, text_a, None, []) == run_step(worker, text_b, None, [])
    assert run_step(worker, text_a, None, []) != run_step(worker, text_a, None, [], salt="other")
    assert run_step(worker, text_a, None, []) != run_step(never("units", name="else"), text_a, None, [])


def test_unskilled_workers_share_tempting_errors_and_skilled_ones_do_not() -> None:
    def agree(workers: list[ArenaWorker]) -> int:
        tasks = [make_family_task("riddle", seed) for seed in range(100)]
        return sum(len({run_step(w, t.text, None, []) for w in workers}) == 1 for t in tasks)

    names = ("a", "b")
    assert agree([able(name=name) for name in names]) > 20
    assert agree([never("logic", name=name) for name in names]) < 5


@pytest.mark.parametrize("name", ["change", "pieces", "day name", "mirror sort", "launch", "voyage"])
def test_a_chain_takes_one_call_for_each_part(name: str) -> None:
    task = make_family_task(name, 5)
    worker = able(*SKILLS)
    seen: list[tuple[str | None, str]] = []
    for index in range(len(task.skills)):
        reply = run_step(worker, task.text, None, seen)
        last = index == len(task.skills) - 1
        assert grade(task, reply) == float(last)
        assert (f"Partial {index + 1} of {len(task.skills)}:" in reply) is not last
        seen.append((None, reply))


def test_the_second_skill_alone_does_not_solve_a_chain() -> None:
    task = make_family_task("change", 5)
    assert grade(task, run_step(able("arithmetic"), task.text, None, [])) == 0.0


def test_a_partial_of_another_question_is_not_progress() -> None:
    task = make_family_task("change", 5)
    reply = run_step(able("tables"), task.text, None, [(None, "Partial 7 of 9: 3")])
    assert "Partial 1 of 2" in reply


def test_an_error_before_carries_on() -> None:
    task = make_family_task("change", 5)
    bad = run_step(never("tables"), task.text, None, [])
    assert "Partial 1 of 2" in bad
    assert grade(task, run_step(able("arithmetic"), task.text, None, [(None, bad)])) == 0.0


def test_a_reviewer_needs_a_draft_and_repairs_slips() -> None:
    task = make_family_task("bill", 2)
    reviewer, drafter = able("review"), never("format")
    draft = run_step(drafter, task.text, None, [])
    assert grade(task, draft) == 0.0
    assert grade(task, run_step(reviewer, task.text, None, [])) == 0.0
    assert grade(task, run_step(reviewer, task.text, None, [(None, draft)])) == 1.0
    assert grade(task, run_step(reviewer, task.text, None, [(None, f"Answer: {task.answer}")])) == 1.0
    assert grade(task, run_step(never("review"), task.text, None, [(None, draft)])) == 0.0


@pytest.mark.parametrize("draft", ["Answer: nonsense", "Answer: A, B. | 1999-01-01 | 7.77", ""])
def test_a_reviewer_cannot_save_a_draft_that_is_all_wrong(draft: str) -> None:
    task = make_family_task("bill", 2)
    assert grade(task, run_step(able("review"), task.text, None, [(None, draft)])) == 0.0


def test_two_questions_are_joined_from_seen_answers() -> None:
    task = child_task()
    seen = [(INSTRUCTIONS[i], f"Answer: {part.answer}") for i, part in enumerate(task.parts)]
    joiner = able("strings")
    assert grade(task, run_step(joiner, task.text, None, seen)) == 1.0
    assert grade(task, run_step(joiner, task.text, None, seen[::-1])) == 1.0, "the task text says which is which"
    assert grade(task, run_step(joiner, task.text, None, [(None, reply) for _task, reply in seen])) == 1.0
    assert grade(task, run_step(joiner, task.text, None, seen[:1])) == 0.0
    assert grade(task, run_step(joiner, task.text, None, [(None, "Partial 1 of 2: 4"), *seen[:1]])) == 0.0
    assert grade(task, run_step(able("dates"), task.text, None, seen)) == 0.0


def test_strangers_get_an_honest_reply() -> None:
    reply = run_step(able(*SKILLS), "Write a poem", None, [])
    assert reply.startswith("This is a simulated worker, which knows nothing but exercises in arithmetic")
    assert reply.count(".") == 1
    impossible = "How many kilometres are there in 3 grams? Give the amount as a plain number."
    assert run_step(able(*SKILLS), impossible, None, []).endswith("Answer: unknown")
    task = make_family_task("change", 1)
    assert run_step(able("arithmetic"), task.text, None, [(None, "Partial 1 of 2: much")]).endswith("Answer: unknown")


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        ("number", "5"), ("number", "0"), ("date", "2024-02-29"), ("good", "fig"), ("weekday", "Monday"),
        ("word", "aa"), ("word", "silver"), ("list", "3, 2, 1"), ("list", "7, 7"), ("order", "Ann, Ben"),
        ("record", "A, B. | 7"), ("record", "AA | 7"),
    ],
)  # fmt: skip
def test_wrong_is_never_right(kind: str, right: str) -> None:
    for seed in range(50):
        assert wrong(kind, right, Random(seed)) != right  # type: ignore[arg-type]
        assert not wrong("number", "5", Random(seed)).startswith("-")


def test_chance_is_even_and_pure() -> None:
    draws = [chance("x", i) for i in range(2000)]
    assert chance("x", 1) == draws[1]
    assert all(0 <= draw < 1 for draw in draws)
    assert 0.47 < sum(draws) / len(draws) < 0.53


def test_tokens_are_pieces_of_words_and_signs() -> None:
    assert count_tokens("Answer: 42") == 3
    assert count_tokens("centimetres") == 2


def two_voters_and_vote(*handles: str) -> dict[str, object]:
    steps: list[dict[str, object]] = [{"worker": handle, "task": None, "see": []} for handle in handles]
    return {"steps": [*steps, {"worker": "vote", "task": None, "see": "all"}]}


def test_a_vote_outweighs_one_that_errs() -> None:
    task = make_family_task("race", 3)
    pool = (never("logic", name="bad"), able("logic", name="one"), able("logic", name="two"), VOTE_TOOL)
    run = run_plan(two_voters_and_vote("bad", "one", "two"), task.text, pool)
    assert grade(task, run.reply) == 1.0
    assert run.calls == 4
    assert run.reply == run.replies[1]


def test_parallel_steps_take_the_slowest_and_chains_the_sum() -> None:
    task = make_family_task("race", 3)
    slow, fast = ArenaWorker("slow", "slow", {}, "2", 1.0), ArenaWorker("fast", "fast", {}, "2", 0.25)
    wide = run_plan(two_voters_and_vote("slow", "fast"), task.text, (slow, fast, VOTE_TOOL))
    assert wide.latency_s == pytest.approx(1.0)
    deep = {"steps": [{"worker": "slow", "task": None, "see": []}, {"worker": "fast", "task": None, "see": [0]}]}
    assert run_plan(deep, task.text, (slow, fast)).latency_s == pytest.approx(1.25)
    assert wide.cost_nano > 0


def test_a_vote_on_nothing_says_so() -> None:
    plan: Plan = {"steps": [{"worker": "vote", "task": None, "see": []}]}
    assert "nothing" in run_plan(plan, "x", (VOTE_TOOL,)).reply
    assert run_plan({"steps": []}, "x", (VOTE_TOOL,)).reply == ""


def test_self_is_a_child_loop_and_the_deepest_pool_has_none() -> None:
    task = child_task()
    again: Plan = {"steps": [{"worker": "self", "task": None, "see": []}]}
    asked: list[tuple[str, str | None, int]] = []

    def planner(question: str, told: str | None, pool: tuple[ArenaWorker, ...]) -> dict[str, object]:
        asked.append((question, told, len(pool)))
        handle = "self" if any(worker.kind == "self" for worker in pool) else "able"
        return {"steps": [{"worker": handle, "task": None, "see": []}]}

    plan: Plan = {"steps": [{"worker": "self", "task": INSTRUCTIONS[0], "see": []}]}
    run = run_plan(plan, task.text, (able(*SKILLS), SELF_WORKER), planner=planner)
    assert asked == [(task.text, INSTRUCTIONS[0], 2), (task.text, INSTRUCTIONS[0], 1)]
    assert (run.calls, len(run.children), len(run.children[0].children)) == (1, 1, 1)
    assert run.cost_nano == run.children[0].cost_nano > 0
    with pytest.raises(KeyError):
        run_plan(again, task.text, (able(*SKILLS), SELF_WORKER), planner=lambda *_: again)


def test_an_unknown_handle_is_an_error() -> None:
    with pytest.raises(KeyError):
        run_plan({"steps": [{"worker": "nobody", "task": None, "see": []}]}, "x", STANDARD)


def test_solve_rate_is_a_mean_over_salts() -> None:
    task = make_family_task("riddle", 4)
    plan: Plan = {"steps": [{"worker": "half", "task": None, "see": []}]}
    assert 0.3 < solve_rate(plan, task, (able("logic", accuracy=0.5, name="half"),), 200) < 0.7
    with pytest.raises(ValueError, match="at least 1"):
        solve_rate(plan, task, STANDARD, 0)


# ---------------------------------------------------------------- profiles


def test_standard_and_held_out_pools_keep_their_promises() -> None:
    assert len(STANDARD) == 8
    assert len(HELD_OUT) >= 3
    every = (*STANDARD, *HELD_OUT)
    assert len({w.handle for w in every}) == len(every)
    assert all(2 <= len(worker.skills) <= 3 for worker in every)
    assert not {frozenset(w.skills) for w in STANDARD} & {frozenset(w.skills) for w in HELD_OUT}
    for pool in (STANDARD, HELD_OUT):
        prices = [worker.price.output_usd_per_mtok for worker in pool]
        assert max(prices) >= 20 * min(prices)
        assert {skill for worker in pool for skill in worker.skills} == set(SKILLS)


def test_words_about_a_worker_are_true() -> None:
    worker = ArenaWorker("w", "w", {"dates": 0.99, "tables": 0.9, "lists": 0.7, "logic": 0.75})
    assert worker.description == "expert dates logic; good tables; fair lists"
    assert worker.tags == ("dates", "tables", "lists", "logic")
    assert worker.shown_success("units") == 0.0
    assert VOTE_TOOL.tags == ("majority",)
    assert "majority" in VOTE_TOOL.description
    assert SELF_WORKER.tags == ("planner",)
    assert "plans" in SELF_WORKER.description


def test_random_pools_are_fresh_and_reproducible() -> None:
    pool = random_pool(Random(5), 6)
    again = random_pool(Random(5), 6)
    assert pool == again
    assert [w.skills for w in pool] == [w.skills for w in again]
    assert len(pool) == 8
    assert {w.kind for w in pool} == {"openai", "tool", "self"}
    models = [worker for worker in pool if worker.kind == "openai"]
    assert len({w.handle for w in models}) == 6
    assert all(2 <= len(worker.skills) <= 3 for worker in models)
    assert {w.output_usd_per_mtok for w in models} <= set(PRICE_TIERS_USD_PER_MTOK)
    other = random_pool(Random(6), 6)
    assert {w.name for w in other if w.kind == "openai"}.isdisjoint(w.name for w in models)


def test_random_pools_of_eight_cover_every_skill_nearly_always() -> None:
    covered = [len({skill for w in random_pool(Random(seed), 8) for skill in w.skills}) for seed in range(50)]
    assert sum(n == len(SKILLS) for n in covered) >= 48


@pytest.mark.parametrize("n", [0, len(HANDLES) + 1])
def test_random_pool_sizes_are_bounded(n: int) -> None:
    with pytest.raises(ValueError, match="a pool has 1 to"):
        random_pool(Random(0), n)


def test_a_random_pool_can_come_without_builtins() -> None:
    assert {w.kind for w in random_pool(Random(0), 64, builtins=False)} == {"openai"}
    assert len(with_builtins(STANDARD)) == 10


def test_handles_are_many_and_neutral() -> None:
    assert len(set(HANDLES)) == len(HANDLES) >= 64
