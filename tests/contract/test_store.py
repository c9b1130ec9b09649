"""`Store`: the fake and PostgreSQL give the same answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.adapters.postgres.database import async_engine
from gateway.adapters.postgres.store import PostgresStore
from gateway.errors import NotFound, Unavailable
from gateway.service.ports.money import Settlement
from gateway.service.ports.request import Store
from tests.fakes.store import FakeStore
from tests.records import (
    T0_US,
    a_rollout,
    a_round,
    a_step,
    dispatch_event,
    hold_event,
    new_id,
    rollout_event,
    settle_event,
)
from tests.stores import World, store_world

world = store_world


async def test_it_is_a_store(world: World) -> None:
    store: Store = world.store
    assert await store.ready()


# ---------------------------------------------------------------- rollouts


async def test_a_rollout_comes_back_whole(world: World) -> None:
    record = a_rollout()
    await world.ingest(rollout_event(record))
    await world.ingest(hold_event("h1", record.id, 9_000, ("key:key1", 10)))
    await world.judge(record.id, 1.0)
    tree = await world.store.rollout_get(record.id, "key1")
    assert json.loads(json.dumps(tree)) == tree
    assert tree["created_at"] == "2025-10-09T08:53:20.123456Z"
    assert tree["request"] == record.request
    assert tree["rounds"][0]["plan_logprobs"] == [-0.1, -2.5, -0.000001]
    assert tree["rounds"][0]["plan_token_ids"] == [10, 11, 12]
    assert tree["rounds"][0]["decision_mask"] == [True, False, True]
    limits = {"handles": ["quill"], "steps_max": 3, "first_index": 0, "depth_capped": []}
    assert (tree["rounds"][0]["allowed"], tree["rounds"][0]["quality"]) == (limits, 7)
    assert [(s["step"], s["worker"], s["see"]) for s in tree["steps"]] == [(0, "alpha", []), (1, "beta", [0])]
    assert tree["steps"][0]["messages"] == [{"role": "user", "content": "2+2?"}]
    assert tree["steps"][0]["attempts"][0]["started_us"] == T0_US + 30_000
    assert tree["outcomes"][0]["value"] == 1.0
    assert (tree["ledger"][0]["kind"], tree["ledger"][0]["scopes"]) == ("hold", [["key:key1", 10]])
    assert tree["error"] is None
    assert "task_embedding" not in tree


async def test_only_the_owner_reads_a_rollout(world: World) -> None:
    rollout_id = await world.rollout()
    assert await world.store.rollout_get(rollout_id, "key1") is not None
    assert await world.store.rollout_get(rollout_id, "key2") is None


@pytest.mark.parametrize("name", ["", "nobody", "chatcmpl-x\x00y", "00000000-0000-7000-8000-000000000000", "\ud800"])
async def test_an_unknown_rollout_is_none(world: World, name: str) -> None:
    await world.rollout()
    assert await world.store.rollout_get(name, "key1") is None


async def test_a_completion_id_finds_the_top_of_the_tree(world: World) -> None:
    parent = await world.rollout(completion_id="chatcmpl-1")
    await world.rollout(completion_id="chatcmpl-1", parent_id=parent, depth=1)
    tree = await world.store.rollout_get("chatcmpl-1", "key1")
    assert tree["id"] == parent
    assert [child["depth"] for child in tree["children"]] == [1]


async def test_children_nest_to_four_levels(world: World) -> None:
    parent = top = await world.rollout()
    for depth in range(1, 7):
        parent = await world.rollout(parent_id=parent, depth=depth)
    node, depths = await world.store.rollout_get(top, "key1"), []
    while node["children"]:
        (node,) = node["children"]
        depths.append(node["depth"])
        assert len(node["steps"]) == 2
    assert depths == [1, 2, 3, 4]


async def test_text_that_a_database_refuses_is_stored_with_a_mark(world: World) -> None:
    nan = float("nan")
    rollout_id = await world.rollout(
        request={"messages": [{"role": "user", "content": "a\x00b\ud800c"}], "n": nan},
        steps=[a_step(0, reply="\x00")],
        rounds=[a_round(plan_logprobs=[float("-inf"), -1.0, 0.0])],
    )
    tree = await world.store.rollout_get(rollout_id, "key1")
    assert tree["request"] == {"messages": [{"role": "user", "content": "a\ufffdb\ufffdc"}], "n": None}
    assert tree["steps"][0]["reply"] == "\ufffd"
    assert tree["rounds"][0]["plan_logprobs"][0] == float("-inf")


async def test_an_event_stored_twice_is_stored_once(world: World) -> None:
    record = a_rollout()
    for one in (rollout_event(record), hold_event("h", record.id, 5, ("org:a", None))):
        await world.ingest(one)
        await world.ingest(one)
    tree = await world.store.rollout_get(record.id, "key1")
    assert (len(tree["rounds"]), len(tree["steps"]), len(tree["ledger"])) == (1, 2, 1)


# ---------------------------------------------------------------- outcomes


@pytest.mark.parametrize(
    ("judgement", "value"),
    [
        ({"kind": "number", "value": 0.25}, 0.25),
        ({"kind": "boolean", "value": 1.0}, 1.0),
        ({"kind": "label", "value": None, "label": "polite"}, None),
        ({"kind": "comment", "value": None, "comment": "too \x00 long"}, None),
        ({"kind": "demonstration", "value": None, "demonstration": "Five."}, None),
    ],
)
async def test_every_kind_of_outcome(world: World, judgement: dict[str, Any], value: float | None) -> None:
    rollout_id = await world.rollout(completion_id="chatcmpl-9")
    more = {"grader_version": "g2", "metadata": {"page": "7"}, "idempotency_key": "k" * 255}
    _, new = await world.judge("chatcmpl-9", **(judgement | more))
    assert new
    (found,) = (await world.store.rollout_get(rollout_id, "key1"))["outcomes"]
    assert (found["value"], found["source"], found["grader_version"]) == (value, "client", "g2")
    assert found["metadata"] == {"page": "7"}
    texts = {name: text.replace("\x00", "\ufffd") for name, text in judgement.items() if isinstance(text, str)}
    assert {name: found[name] for name in texts} == texts


async def test_an_outcome_needs_a_rollout_of_its_own_key(world: World) -> None:
    rollout_id = await world.rollout()
    for rollout, key in ((rollout_id, "key2"), (new_id(), "key1"), ("chatcmpl-none", "key1")):
        with pytest.raises(NotFound):
            await world.judge(rollout, 1.0, key_id=key)


async def test_an_idempotency_key_counts_once_per_key(world: World) -> None:
    rollout_id = await world.rollout()
    other = await world.rollout(key_id="key2")
    first, new = await world.judge(rollout_id, 1.0, idempotency_key="i1")
    assert new
    assert await world.judge(rollout_id, 0.0, idempotency_key="i1") == (first, False)
    assert (await world.judge(other, 0.0, key_id="key2", idempotency_key="i1"))[1]
    assert (await world.judge(rollout_id, 0.0))[1]
    assert (await world.judge(rollout_id, 0.0))[1]
    assert len((await world.store.rollout_get(rollout_id, "key1"))["outcomes"]) == 3


async def test_an_outcome_is_stored_once_by_its_id(world: World) -> None:
    rollout_id = await world.rollout()
    first, new = await world.judge(rollout_id, 0.5, id=(one := new_id()), source="grader")
    assert (first, new) == (one, True)
    assert await world.judge(rollout_id, 1.0, id=one) == (one, False)
    (found,) = (await world.store.rollout_get(rollout_id, "key1"))["outcomes"]
    assert (found["id"], found["source"], found["value"]) == (one, "grader", 0.5)


# ---------------------------------------------------------------- money


async def test_totals_are_what_was_posted_or_is_uncertain(world: World) -> None:
    rollout_id = new_id()
    assert (await world.store.books(0)).posted == {}
    for hold, state, nano in (("h1", "posted", 70), ("h2", "voided", 0), ("h3", "uncertain", 500)):
        await world.ingest(hold_event(hold, rollout_id, 500, ("org:a", 10), ("key:k", None)))
        await world.ingest(settle_event(hold, rollout_id, state, nano, "org:a", "key:k"))
    await world.ingest(hold_event("h4", rollout_id, 9, ("org:a", 10)))
    assert (await world.store.books(0)).posted == {"org:a": 570, "key:k": 570}


async def test_a_hold_is_settled_once_in_the_ledger_too(world: World) -> None:
    rollout_id = new_id()
    await world.ingest(settle_event("h1", rollout_id, "posted", 70, "org:a"))
    await world.ingest(settle_event("h1", rollout_id, "uncertain", 500, "org:a"))
    assert (await world.store.books(0)).posted == {"org:a": 70}


async def test_the_books_are_the_ledger_of_one_moment(world: World) -> None:
    for number, (state, nano) in enumerate((("posted", 70), ("voided", 0), ("uncertain", 500))):
        await world.ingest(hold_event(f"h{number}", new_id(), 500, ("org:a", None), ("key:k", 900)))
        await world.ingest(settle_event(f"h{number}", new_id(), state, nano, "org:a", "key:k"))
    await world.ingest(hold_event("open", new_id(), 500, ("org:a", None), ("key:k", 900)))
    books = await world.store.books(10)
    assert books.posted == {"org:a": 570, "key:k": 570}
    assert [hold["hold_id"] for hold in books.open_holds] == ["open"]
    ended = {Settlement(f"h{n}", nano, ("org:a", "key:k")) for n, nano in enumerate((70, 0, 500))}
    assert set(books.settled) == ended
    assert len((await world.store.books(2)).settled) == 2
    assert set(await world.store.settled_latest(10, datetime(2000, 1, 1, tzinfo=UTC))) == ended
    assert list(await world.store.settled_latest(10, datetime(2100, 1, 1, tzinfo=UTC))) == []


async def test_open_holds_and_what_the_calls_could_cost_that_left(world: World) -> None:
    rollout_id = new_id()
    for hold in ("h1", "h2", "h3"):
        await world.ingest(hold_event(hold, rollout_id, 500, ("org:a", 10)))
    await world.ingest(dispatch_event("h2", rollout_id, 100))
    await world.ingest(dispatch_event("h2", rollout_id, 30))
    await world.ingest(dispatch_event("h3", rollout_id))
    await world.ingest(settle_event("h3", rollout_id, "posted", 7, "org:a"))
    holds: Sequence[Any] = await world.store.open_holds()
    assert [(h["hold_id"], h["dispatched_nano"]) for h in holds] == [("h1", None), ("h2", 130)]
    assert {h["amount_nano"] for h in holds} == {500}
    assert holds[0]["scopes"] == [["org:a", 10]]
    assert holds[0]["rollout_id"] == rollout_id
    assert [await world.store.settled_nano(h) for h in ("h1", "h9")] == [None, None]


# ---------------------------------------------------------------- away


async def test_a_database_that_is_away_is_unavailable(world: World) -> None:
    if isinstance(world.store, FakeStore):
        world.store.away = True
    else:
        await world.store.engine.dispose()
        world.store = PostgresStore(async_engine("postgresql://127.0.0.1:1/none"))
    assert not await world.store.ready()
    with pytest.raises(Unavailable):
        await world.store.key_get("abc123")
    with pytest.raises(Unavailable):
        await world.judge(new_id(), 1.0)
