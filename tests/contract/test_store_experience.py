"""`Store`, what it learns from outcomes: the fake and PostgreSQL give the same answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from gateway.core.loop.experience.belief import Trials
from gateway.core.loop.experience.likeness import HASHED, Embedding
from gateway.core.loop.experience.meaning import TABLE_FILE, by_meaning
from gateway.core.loop.experience.past import Owner, TaskQuestion
from gateway.core.loop.experience.recall import trials_near
from gateway.files import shipped
from gateway.service.loop.experience.memory import ExperienceMemory
from tests.kit import TestClock
from tests.records import a_round, a_step, new_id
from tests.stores import NOW, World, store_world
from tests.waiting import BOUND_S

world = store_world
MEANING = by_meaning(shipped(TABLE_FILE))


ORG = "acme"


async def remembered(world: World, org: str = ORG, **bounds: Any) -> ExperienceMemory:
    """A memory that has read an organisation."""
    limits = {"bytes_max": 2**24, "stale_s": 10.0, "timeout_s": BOUND_S} | bounds
    memory = ExperienceMemory(world.past, TestClock(), **limits)
    assert (await memory.near(org, TaskQuestion(None, None, ""), {}, 8)).state == "fresh"
    return memory


def trials(
    memory: ExperienceMemory,
    text: str = "",
    task_type: str | None = None,
    k: int = 8,
    embedding: Embedding = HASHED,
    version: str = "1",
    org: str = ORG,
) -> Mapping[str, Trials]:
    """What the memory has of three workers on such a question, without waiting."""
    vector = np.array(embedding.embed(text), np.float32) if text else None
    workers = dict.fromkeys(("alpha", "beta", "gamma"), version)
    past = memory._held[Owner("org", org)].past
    return dict(trials_near(TaskQuestion(task_type, vector, embedding.name), workers, k, past))


async def near(world: World, *asked: Any, **more: Any) -> dict[str, tuple[float, float]]:
    """The weight of what is known of each worker, and its mean success."""
    found = trials(await remembered(world), *asked, **more)
    return {worker: figures(one) for worker, one in found.items() if one.weight.sum() > 0}


def figures(one: Trials) -> tuple[float, float]:
    total = float(one.weight.sum())
    return round(total, 2), round(float(one.weight @ one.success) / total, 3)


def _request(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def test_an_outcome_credits_each_finished_step_of_a_model_worker(world: World) -> None:
    steps = [
        a_step(0, "alpha", cost_nano=400),
        a_step(1, "beta", kind="litellm"),
        a_step(2, "gamma", status="failed"),
        a_step(3, "gamma", kind="tool"),
        a_step(4, "gamma", kind="self"),
    ]
    rollout_id = await world.rollout(steps=steps)
    assert await near(world) == {}
    await world.judge(rollout_id, 0.5)
    found = trials(await remembered(world))
    assert set(found) == {"alpha", "beta"}
    alpha = found["alpha"]
    columns = alpha.weight, alpha.success, alpha.cost_nano, alpha.latency_ms
    assert [column.tolist() for column in columns] == [[1.0], [0.5], [400.0], [100.0]]


async def test_steps_of_another_version_of_a_worker_do_not_count(world: World) -> None:
    await world.judge(await world.rollout(steps=[a_step(0, "alpha")]), 1.0)
    assert await near(world) == {"alpha": (1, 1.0)}
    assert await near(world, version="2") == {}


async def test_labels_and_comments_are_no_experience(world: World) -> None:
    rollout_id = await world.rollout()
    await world.judge(rollout_id, None, kind="label", label="good")
    assert await near(world) == {}


async def test_a_failure_is_evidence_until_somebody_judges_the_step(world: World) -> None:
    steps = [a_step(0, "alpha", status="failed", reply=None), a_step(1, "beta", reply="I'm sorry, but I can't help.")]
    failures = [(1, 0, 1.0), (1, 1, 0.5)]
    rollout_id = await world.rollout(steps=steps, failures=failures)
    assert await near(world) == {"alpha": (1, 0.0), "beta": (0.5, 0.0)}
    assert await near(world, "What is 2+2?") == {"alpha": (1, 0.0), "beta": (0.5, 0.0)}
    await world.judge(rollout_id, 1.0)
    assert await near(world) == {"alpha": (1, 0.0), "beta": (1, 1.0)}
    one = trials(await remembered(world))["alpha"]
    assert (one.cost_nano.tolist(), one.latency_ms.tolist()) == ([400.0], [100.0])


async def test_the_latest_judgement_stands(world: World) -> None:
    rollout_id = await world.rollout()
    await world.judge(rollout_id, 0.0, NOW)
    await world.judge(rollout_id, 1.0, NOW + timedelta(seconds=1))
    await world.judge(rollout_id, 0.5, NOW - timedelta(seconds=1))
    assert await near(world) == {"alpha": (1, 1.0), "beta": (1, 1.0)}


async def test_only_similar_tasks_count(world: World) -> None:
    sums, poems = "what is 17 plus 25?", "write a poem about the sea at night"
    for text, value in ((sums, 1.0), (poems, 0.0)):
        for n in range(3):
            rollout_id = await world.rollout(request=_request(f"{text} {n}"), steps=[a_step(0)], task_type=None)
            await world.judge(rollout_id, value)
    assert await near(world, "what is 4 plus 5?", k=3) == {"alpha": (3, 1.0)}
    assert await near(world, "a poem about the sea", k=6) == {"alpha": (3, 0.0)}


async def test_nearness_is_relative_to_the_steps_of_all_workers(world: World) -> None:
    for worker, text in (("alpha", "what is 17 plus 25?"), ("beta", "write a poem about the sea at night")):
        rollout_id = await world.rollout(request=_request(text), steps=[a_step(0, worker)], task_type=None)
        await world.judge(rollout_id, 1.0)
    assert await near(world, "what is 4 plus 5?") == {"alpha": (1, 1.0)}  # beta's poem says nothing of its sums


async def test_the_latest_steps_that_are_near_count_the_newest_first(world: World) -> None:
    sums, poem = "what is 17 plus 25?", "write a poem about the sea at night"
    for n, text in enumerate([sums] * 20 + [poem] * 20):
        rollout_id = await world.rollout(request=_request(text), steps=[a_step(0)], task_type=None)
        await world.judge(rollout_id, float(n >= 10), NOW + timedelta(seconds=n))
    memory = await remembered(world)
    assert trials(memory, sums, k=30)["alpha"].success.tolist() == [1.0] * 10 + [0.0] * 10
    assert trials(memory, sums, k=12)["alpha"].success.tolist() == [1.0] * 10 + [0.0] * 2
    one = trials(memory, poem, k=12)["alpha"]
    assert (one.wide_n, one.wide_right) == (40, 30)


async def test_a_person_counts_for_more_than_a_later_grader_and_a_verifier_for_less(world: World) -> None:
    rollout_id = await world.rollout()
    await world.judge(rollout_id, 1.0, NOW, source="verifier")
    assert await near(world) == {"alpha": (0.8, 1.0), "beta": (0.8, 1.0)}
    await world.judge(rollout_id, 0.25, NOW - timedelta(seconds=5), source="grader")
    assert await near(world) == {"alpha": (1, 0.25), "beta": (1, 0.25)}
    await world.judge(rollout_id, 0.75, NOW - timedelta(seconds=9), source="person")
    assert await near(world) == {"alpha": (1, 0.75), "beta": (1, 0.75)}


async def test_a_judgement_of_a_step_is_for_that_step(world: World) -> None:
    rollout_id = await world.rollout()
    await world.judge(rollout_id, 1.0, NOW)
    await world.judge(rollout_id, 0.0, NOW - timedelta(seconds=1), step=0)
    assert await near(world) == {"alpha": (1, 0.0), "beta": (1, 1.0)}
    only = await world.rollout(steps=[a_step(0, "gamma"), a_step(1, "beta", task=None, see=[], reply="5")])
    await world.judge(only, 1.0, NOW, step=0)
    assert (await near(world))["gamma"] == (1, 1.0)


async def test_essays_that_were_not_used_are_no_experience(world: World) -> None:
    said = [f"{word} trees make a street worth walking along, and everybody knows it.\n\nPlant more." for word in "abc"]
    names = zip(("alpha", "beta", "gamma"), said, strict=True)
    steps = [a_step(i, name, task=None, see=[], reply=text) for i, (name, text) in enumerate(names)]
    await world.judge(await world.rollout(steps=steps), 1.0)
    assert await near(world) == {"gamma": (1, 1.0)}


async def test_a_child_loop_of_self_gets_the_credit_of_its_step(world: World) -> None:
    child = new_id()
    answer = a_step(1, "boss", kind="self", child_rollout_id=child)
    parent = await world.rollout(id=new_id(), steps=[a_step(0, "alpha"), answer])
    inner = [a_step(0, "beta", task=None, see=[], reply="5"), a_step(1, "gamma", task=None, see=[], reply="4")]
    await world.rollout(id=child, parent_id=parent, depth=1, steps=inner)
    await world.judge(parent, 1.0)
    assert await near(world) == {"alpha": (1, 1.0), "beta": (1, 0.0), "gamma": (1, 1.0)}
    assert await near(world, "What is 2+2?") == {"alpha": (1, 1.0), "beta": (1, 0.0), "gamma": (1, 1.0)}
    await world.judge(child, 0.0)  # nearer to its steps than the judgement of the parent
    assert await near(world) == {"alpha": (1, 1.0), "gamma": (1, 0.0)}


async def test_a_voter_is_judged_by_its_own_answer(world: World) -> None:
    voters = {"alpha": "Answer: 4", "beta": "Answer: 5", "gamma": "So: 4"}
    steps = [a_step(i, name, task=None, see=[], reply=said) for i, (name, said) in enumerate(voters.items())]
    steps[2].reply = "It is clear. Answer: 4"
    vote = a_step(3, "vote", kind="tool", see=[0, 1, 2], reply="Answer: 4")
    rollout_id = await world.rollout(steps=[*steps, vote])
    await world.judge(rollout_id, 1.0)
    assert await near(world) == {"alpha": (1, 1.0), "beta": (1, 0.0), "gamma": (1, 1.0)}
    await world.judge(rollout_id, 0.0, NOW + timedelta(seconds=1))  # then beta may have been right: nobody knows
    assert await near(world) == {"alpha": (1, 0.0), "gamma": (1, 0.0)}
    await world.judge(rollout_id, 1.0, NOW)  # an older judgement, come late
    assert "beta" not in {name for name, found in (await near(world)).items() if found == (1, 1.0)}


async def test_of_a_task_type_seen_before_only_its_own_tasks_count(world: World) -> None:
    for task_type, value in (("sum", 1.0), ("poem", 0.0)):
        for n in range(2):
            rollout_id = await world.rollout(request=_request("same words"), steps=[a_step(0)], task_type=task_type)
            await world.judge(rollout_id, value, NOW + timedelta(seconds=n))
    assert await near(world, "same words", "poem", k=2) == {"alpha": (2, 0.0)}
    assert await near(world, "same words", "sum", k=2) == {"alpha": (2, 1.0)}
    assert await near(world, "", "sum", k=3) == {"alpha": (2, 1.0)}
    for unknown in ("never seen", None):
        assert await near(world, "same words", unknown, k=4) == {"alpha": (4, 0.5)}


async def test_without_an_embedding_the_latest_count(world: World) -> None:
    for n, value in enumerate((0.0, 0.0, 1.0, 1.0)):
        rollout_id = await world.rollout(steps=[a_step(0)])
        await world.judge(rollout_id, value, NOW + timedelta(seconds=n))
    assert await near(world, k=2) == {"alpha": (2, 1.0)}


async def test_a_task_logged_without_text_has_no_embedding_but_counts(world: World) -> None:
    hidden = await world.rollout(log_mode="metadata", request={}, steps=[a_step(0)])
    await world.judge(hidden, 1.0)
    assert await near(world, "what is 2+2?", k=1) == {"alpha": (1, 1.0)}
    seen = await world.rollout(steps=[a_step(0)])
    await world.judge(seen, 0.0, NOW - timedelta(days=1))
    assert await near(world, "what is 2+2?", k=1) == {"alpha": (1, 0.0)}


async def test_vectors_of_different_embedders_are_never_compared(world: World) -> None:
    """The same question, embedded by hashing: for a gateway that embeds otherwise it is as far as any other."""
    for value, text in ((1.0, "days between two dates"), (0.0, "a poem about the sea"), (0.0, "translate this letter")):
        await world.judge(await world.rollout(steps=[a_step(0, "alpha")], request=_request(text)), value)
    other = Embedding("other", HASHED.embed)
    assert await near(world, "days between two dates") == {"alpha": (1, 1.0)}
    assert await near(world, "days between two dates", embedding=other) == await near(world)


@pytest.mark.parametrize("embedding", [HASHED, MEANING], ids=lambda one: one.name)
async def test_every_embedder_in_the_process_finds_its_own(world: World, embedding: Embedding) -> None:
    for value, text in ((1.0, "days between two dates"), (0.0, "a poem about the sea"), (0.0, "translate this letter")):
        await world.judge(await logged(world, text, embedding), value)
    assert await near(world, "how many days lie between these dates?", embedding=embedding) == {"alpha": (1, 1.0)}


async def logged(world: World, text: str, embedding: Embedding) -> str:
    """A rollout whose record holds the vector, as that of a gateway with an embedder elsewhere does."""
    vector = {"task_embedding": embedding.embed(text), "task_embedder": embedding.name}
    return await world.rollout(steps=[a_step(0, "alpha")], request=_request(text), **vector)


async def test_plans_of_a_key_that_did_well_on_such_questions(world: World) -> None:
    sums, poem = "what is 17 plus 25?", "write a poem about the sea at night"
    one: dict[str, Any] = {"steps": [{"worker": "quill", "task": None, "see": []}]}

    async def add(text: str, value: float, plans: Sequence[Any] = (one,), **changes: Any) -> None:
        planned = [a_round(number, plan=plan) for number, plan in enumerate(plans, start=1)]
        record = {"request": _request(text), "task_type": None, "steps": [a_step(0)], "rounds": planned}
        rollout_id = await world.rollout(**(record | changes))
        await world.judge(rollout_id, value, key_id=changes.get("key_id", "key1"))

    await add(f"{sums} a", 1.0, cost_nano=9)
    await add(f"{sums} b", 0.2)
    await add(f"{sums} c", 1.0, key_id="key2")
    await add(f"{sums} d", 1.0, fallback="conductor_down")
    await add(f"{sums} e", 1.0, (one, one))  # a plan that another one followed
    await add(f"{sums} f", 1.0, (one, {"steps": []}))
    await add(poem, 1.0)
    await add("something else entirely", 1.0, task_type="sums")

    async def near(text: str, task_type: str | None = None, k: int = 8) -> list[str]:
        return [
            won.question for won in await world.store.plans_near("key1", task_type, HASHED.embed(text), HASHED.name, k)
        ]

    assert sorted(await near("what is 17 plus 26?")) == [f"{sums} a", f"{sums} f"]
    assert await near("zzz", "sums") == ["something else entirely"]
    assert len(await near("what is 17 plus 26?", k=1)) == 1
    (won,) = await world.store.plans_near("key2", None, HASHED.embed(sums), HASHED.name, 8)
    assert (won.plan, won.pool, won.cost_nano) == (one, {"quill": "alpha"}, 805)
    assert await world.store.plans_near("key2", None, HASHED.embed(sums), "other", 8) == []
