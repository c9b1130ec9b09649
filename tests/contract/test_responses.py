"""`ResponseStore`: the fake and PostgreSQL give the same answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.adapters.postgres.database import async_engine
from gateway.adapters.postgres.store import PostgresResponses, PostgresStore
from gateway.errors import Unavailable
from gateway.service.ports.turns import ResponseStore
from tests.fakes.responses import FakeResponses
from tests.fakes.store import FakeStore
from tests.records import a_rollout, a_round, a_step, new_id, rollout_event
from tests.stores import World, store_world

world = store_world
REQUEST = {
    "model": "baton",
    "messages": [{"role": "user", "content": "a private question"}],
    "temperature": 0.5,
    "response": {"instructed": False},
}
REPLY = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "a private answer"}}]}


@dataclass
class Both:
    """The two sides of one database: the log, and the responses in it."""

    world: World
    responses: ResponseStore

    async def made(self, **changes: Any) -> str:
        """A response in the log; its id."""
        rollout_id = changes.pop("id", new_id())
        name = f"resp_{rollout_id.replace('-', '')}"
        given = {"completion_id": name, "request": REQUEST, "reply": REPLY, "depth": 0, "parent_id": None} | changes
        await self.world.ingest(rollout_event(a_rollout(id=rollout_id, **given)))
        return name


@pytest.fixture
def both(world: World) -> Both:
    store: Any = world.store
    responses = FakeResponses(store) if isinstance(store, FakeStore) else PostgresResponses(store.engine)
    return Both(world, responses)


async def test_responses_are_found_by_id_as_they_were_logged(both: Both) -> None:
    names = [await both.made(), await both.made(status="failed", error={"message": "x"}, reply=None)]
    found = await both.responses.find([*names, "resp_unknown"], "key1")
    assert set(found) == set(names)
    first, second = found[names[0]], found[names[1]]
    assert (first.request, first.reply, first.status) == (REQUEST, REPLY, "done")
    assert first.created_s <= first.finished_s
    assert first.stored
    assert (second.status, second.error, second.reply) == ("failed", {"message": "x"}, None)
    assert await both.responses.find([], "key1") == {}


async def test_another_keys_responses_are_not_there(both: Both) -> None:
    name = await both.made()
    assert await both.responses.find([name], "key2") == {}
    assert not await both.responses.erase(name, "key2")
    assert (await both.responses.find([name], "key1"))[name].reply == REPLY


async def test_a_child_loop_is_no_response(both: Both) -> None:
    name = await both.made()
    parent = (await both.world.store.rollout_get(name, "key1"))["id"]
    await both.made(parent_id=parent, depth=1, completion_id=name, reply={"choices": []})
    assert (await both.responses.find([name], "key1"))[name].reply == REPLY


async def test_a_request_that_is_not_to_be_stored_is_found_and_not_stored(both: Both) -> None:
    name = await both.made(request={"model": "baton", "messages": []})
    assert not (await both.responses.find([name], "key1"))[name].stored


async def test_erasing_takes_every_text_of_the_tree_and_leaves_the_numbers(both: Both) -> None:
    root = new_id()
    rounds = [a_round(messages=[{"role": "user", "content": "private prompt"}], plan_text="private plan")]
    steps = [a_step(0, reply="private draft", task="a private task"), a_step(1, reply="a private answer")]
    name = await both.made(id=root, rounds=rounds, steps=steps, tags={"note": "private"}, train=True)
    await both.made(parent_id=root, depth=1, rounds=rounds, steps=steps)
    await both.world.judge(root, 1.0)
    before = await both.world.store.rollout_get(name, "key1")
    assert "private" in json.dumps(before)
    assert await both.responses.erase(name, "key1")
    assert await both.responses.erase(name, "key1")  # again: nothing more to take
    after = await both.world.store.rollout_get(name, "key1")
    assert "private" not in json.dumps(after)
    assert len(after["children"]) == 1
    for node in (after, *after["children"]):
        assert (node["train"], node["log_mode"], node["reply"]) == (False, "metadata", None)
        assert (node["rounds"][0]["plan_token_ids"], node["rounds"][0]["prompt_token_ids"]) == ([], [])
    assert after["request"] == {"model": "baton", "temperature": 0.5}
    for kept in ("cost_nano", "prompt_tokens", "created_at", "policy_version", "status", "outcomes"):
        assert after[kept] == before[kept]
    assert [step["worker"] for step in after["steps"]] == [step["worker"] for step in before["steps"]]
    assert not (await both.responses.find([name], "key1"))[name].stored


async def test_erasing_ends_a_grading_that_waits(both: Both) -> None:
    tags = {"grader": "exact", "reference": "a private reference"}
    name = await both.made(tags=tags)
    assert (await both.world.store.rollout_get(name, "key1"))["gradings"][0]["state"] == "waiting"
    await both.responses.erase(name, "key1")
    (grading,) = (await both.world.store.rollout_get(name, "key1"))["gradings"]
    assert (grading["state"], grading["reference"]) == ("ungraded", "")


async def test_a_past_that_was_erased_is_near_to_nothing(both: Both) -> None:
    """Experience keeps what its workers were worth; the vector of the question goes."""
    name = await both.made()
    rollout = await both.world.store.rollout_get(name, "key1")
    await both.world.judge(rollout["id"], 1.0)
    await both.responses.erase(name, "key1")
    store: Any = both.world.store
    if isinstance(store, FakeStore):
        assert all(past["embedding"] is None for past in store.experience.values())
        return
    from sqlalchemy import select

    from gateway.adapters.postgres.tables import experience, rollouts

    async with store.begin() as connection:
        vectors = list(await connection.scalars(select(experience.c.embedding)))
        tasks = list(await connection.scalars(select(rollouts.c.task_embedding)))
    assert vectors
    assert set(vectors) == {None}
    assert set(tasks) == {None}


async def test_a_database_that_is_away_is_unavailable() -> None:
    fake = FakeStore()
    fake.away = True
    real = PostgresStore(async_engine("postgresql://nobody@127.0.0.1:1/none", connect_timeout_s=1))
    for responses in (FakeResponses(fake), PostgresResponses(real.engine)):
        with pytest.raises(Unavailable):
            await responses.find(["resp_1"], "key1")
        with pytest.raises(Unavailable):
            await responses.erase("resp_1", "key1")
    await real.engine.dispose()
