"""`ConversationStore`: the fake and PostgreSQL give the same answers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from gateway.adapters.postgres.background import PostgresBackground
from gateway.adapters.postgres.conversations import PostgresStoredConversations
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.rows import event_rows
from gateway.core.log.events import random_hex
from gateway.errors import BadRequest, ConversationLocked, NotFound, TooLarge
from gateway.service.ports.turns import ConversationStore, StoredConversation
from tests.contract.test_background import HERE, a_request
from tests.fakes.conversations import FakeStoredConversations
from tests.fakes.store import FakeStore
from tests.kit import KEY
from tests.records import a_rollout, new_id, rollout_event
from tests.stores import World, store_world

world = store_world
MUCH = 2**20
ASKED = {"role": "user", "content": "and the next one?"}
REPLY = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "103"}, "finish_reason": "stop"}]}


def message(n: int, said: str = "hello \x00") -> dict[str, Any]:
    content = [{"type": "input_text", "text": said}]
    return {"id": f"msg_{n:032x}800000", "type": "message", "role": "user", "status": "completed", "content": content}


@dataclass
class Both:
    """The two sides of one database: the log, and the conversations in it."""

    world: World
    store: ConversationStore

    async def made(self, *items: dict[str, Any], key_id: str = "key1") -> str:
        name = f"conv_{random_hex()}"
        await self.store.create(StoredConversation(name, key_id, 1_700_000_000, {"a": "b"}), items, 9)
        return name

    def turn(self, name: str, turn: str, **changes: Any) -> Any:
        """The event of a rollout that is a turn."""
        rollout_id = new_id()
        facts = {"id": name, "turn": turn, "first": 0, "instructed": True}
        messages = [{"role": "system", "content": "be brief"}, ASKED]
        request = {"model": "baton", "messages": messages, "conversation": facts}
        given = {
            "completion_id": f"resp_{rollout_id.replace('-', '')}",
            "key_id": "key1",
            "request": request,
            "reply": REPLY,
            "status": "done",
            "depth": 0,
            "parent_id": None,
        }
        return rollout_event(a_rollout(id=rollout_id, **given | changes))

    async def texts(self, name: str) -> list[str]:
        page = await self.store.page("key1", name, after=None, limit=100, newest_first=False)
        return [part["text"] for item in page for part in item["content"]]


@pytest.fixture
def both(world: World) -> Both:
    store: Any = world.store
    fake = isinstance(store, FakeStore)
    return Both(world, FakeStoredConversations(store) if fake else PostgresStoredConversations(store.engine))


async def test_a_conversation_is_made_changed_and_deleted(both: Both) -> None:
    name = await both.made(message(1))
    shown = await both.store.get("key1", name)
    assert shown is not None
    assert (shown.created_s, shown.metadata, shown.items, shown.turn) == (1_700_000_000, {"a": "b"}, 1, None)
    assert shown.size_bytes > 100
    changed = await both.store.update("key1", name, {})
    assert changed is not None
    assert changed.metadata == {}
    assert await both.store.delete("key1", name)
    assert await both.store.get("key1", name) is None
    assert not await both.store.delete("key1", name)


async def test_another_keys_conversations_are_not_there(both: Both) -> None:
    name = await both.made(message(1))
    assert await both.store.get("key2", name) is None
    assert await both.store.update("key2", name, {}) is None
    assert await both.store.add("key2", name, [message(2)], MUCH) is None
    assert await both.store.remove("key2", name, message(1)["id"]) is None
    assert await both.store.item("key2", name, message(1)["id"]) is None
    assert await both.store.page("key2", name, after=None, limit=9, newest_first=True) == []
    assert await both.store.begin("key2", name, "t1", 60.0, take_over=True) is None
    assert not await both.store.delete("key2", name)
    assert await both.store.get("key1", name) is not None


async def test_a_key_may_have_so_many(both: Both) -> None:
    await both.made()
    with pytest.raises(BadRequest):
        await both.store.create(StoredConversation(f"conv_{random_hex()}", "key1", 1, {}), (), 1)
    await both.store.create(StoredConversation(f"conv_{random_hex()}", "key2", 1, {}), (), 1)


async def test_items_are_paged_added_and_deleted(both: Both) -> None:
    name = await both.made(*(message(n) for n in range(3)))
    ids = [message(n)["id"] for n in range(5)]
    added = await both.store.add("key1", name, [message(3), message(4)], MUCH)
    assert added is not None
    assert added.items == 5

    async def page(after: str | None, *, newest_first: bool, limit: int = 2) -> list[str]:
        items = await both.store.page("key1", name, after=after, limit=limit, newest_first=newest_first)
        return [item["id"] for item in items]

    assert await page(None, newest_first=False) == ids[:2]
    assert await page(ids[1], newest_first=False) == ids[2:4]
    assert await page(None, newest_first=True) == [ids[4], ids[3]]
    assert await page(ids[1], newest_first=True) == [ids[0]]
    with pytest.raises(NotFound):
        await page("msg_unknown", newest_first=True)
    removed = await both.store.remove("key1", name, ids[1])
    assert removed is not None
    assert (removed.items, removed.size_bytes < added.size_bytes) == (4, True)
    assert await both.store.remove("key1", name, ids[1]) is None
    assert await both.store.item("key1", name, ids[1]) is None
    assert (await both.store.item("key1", name, ids[2]) or {})["id"] == ids[2]
    assert await page(None, newest_first=False, limit=9) == [ids[0], *ids[2:]]
    with pytest.raises(TooLarge):
        await both.store.add("key1", name, [message(9, "x" * 2_000)], 2_000)


async def test_one_turn_at_a_time_has_a_conversation(both: Both) -> None:
    name = await both.made(message(1))
    assert await both.store.begin("key1", name, "t1", 60.0, take_over=False) is not None
    again = await both.store.begin("key1", name, "t1", 60.0, take_over=False)
    assert again is not None
    assert again.turn == "t1"
    for refused in (
        both.store.begin("key1", name, "t2", 60.0, take_over=True),
        both.store.add("key1", name, [message(2)], MUCH),
        both.store.remove("key1", name, message(1)["id"]),
    ):
        with pytest.raises(ConversationLocked):
            await refused
    await both.store.leave("t1")
    assert await both.store.begin("key1", name, "t2", 60.0, take_over=False) is not None


async def test_a_turn_whose_lease_is_over_is_taken_over_by_those_who_say_so(both: Both) -> None:
    name = await both.made()
    await both.store.begin("key1", name, "t1", 0.0, take_over=False)
    with pytest.raises(ConversationLocked):
        await both.store.begin("key1", name, "t2", 60.0, take_over=False)
    assert await both.store.begin("key1", name, "t2", 60.0, take_over=True) is not None


async def test_what_a_turn_adds_comes_with_its_rollout_once(both: Both) -> None:
    name = await both.made(message(1, "a prime above 100?"))
    await both.store.begin("key1", name, "t1", 60.0, take_over=False)
    event = both.turn(name, "t1")
    await both.world.ingest(event)
    after = await both.store.get("key1", name)
    assert after is not None
    assert (after.turn, after.items) == (None, 3)
    assert await both.texts(name) == ["a prime above 100?", "and the next one?", "103"]
    items = await both.store.page("key1", name, after=None, limit=1, newest_first=True)
    await both.store.remove("key1", name, items[0]["id"])
    await both.world.ingest(event)  # the journal after a crash
    assert await both.texts(name) == ["a prime above 100?", "and the next one?"]


@pytest.mark.parametrize("changes", [{"status": "failed", "reply": None}, {"status": "aborted", "reply": None}])
async def test_a_turn_without_a_reply_adds_nothing_and_ends(both: Both, changes: dict[str, Any]) -> None:
    name = await both.made(message(1, "hi"))
    await both.store.begin("key1", name, "t1", 60.0, take_over=False)
    await both.world.ingest(both.turn(name, "t1", **changes))
    after = await both.store.get("key1", name)
    assert after is not None
    assert (after.turn, await both.texts(name)) == (None, ["hi"])


async def test_a_late_turn_is_added_and_leaves_the_claim_of_the_next_one(both: Both) -> None:
    name = await both.made()
    await both.store.begin("key1", name, "t1", 0.0, take_over=False)
    await both.store.begin("key1", name, "t2", 60.0, take_over=True)
    await both.world.ingest(both.turn(name, "t1"))
    after = await both.store.get("key1", name)
    assert after is not None
    assert (after.turn, await both.texts(name)) == ("t2", ["and the next one?", "103"])


async def test_a_turn_of_a_deleted_conversation_or_of_another_key_adds_nothing(both: Both) -> None:
    name, other = await both.made(), await both.made(key_id="key2")
    await both.store.delete("key1", name)
    await both.world.ingest(both.turn(name, "t1"))
    await both.world.ingest(both.turn(other, "t1"))
    assert await both.store.get("key1", name) is None
    assert await both.store.page("key2", other, after=None, limit=9, newest_first=True) == []


async def test_a_request_in_the_background_that_fails_gives_its_conversation_back(pg_engine: Any) -> None:
    store, background = PostgresStoredConversations(pg_engine), PostgresBackground(pg_engine)
    name, request = f"conv_{random_hex()}", a_request()
    await store.create(StoredConversation(name, KEY.public_id, 1, {}), (), 9)
    await background.create(request, 9)
    await store.begin(KEY.public_id, name, request.id, 60.0, take_over=False)
    await background.take(HERE, 1, 60.0)
    assert await background.end(request.id, HERE, "failed", {"code": "x"})
    after = await store.get(KEY.public_id, name)
    assert after is not None
    assert after.turn is None


async def test_items_over_the_retention_are_swept_and_empty_conversations_with_them(pg_engine: Any) -> None:
    forever, store = PostgresStoredConversations(pg_engine), PostgresStoredConversations(pg_engine, 30)
    old, mixed = (f"conv_{random_hex()}" for _ in range(2))
    for name in (old, mixed):
        await store.create(StoredConversation(name, "keyS", 1, {}), [message(1), message(2)], 9)
    days = timedelta(days=31)
    aged = "UPDATE conversation_items SET at = at - :d WHERE conversation_id = :o OR (n = 0 AND conversation_id = :m)"
    unused = "UPDATE conversations SET used_at = used_at - :d WHERE id = :o"
    async with pg_engine.begin() as connection:
        await connection.execute(text(aged), {"d": days, "o": old, "m": mixed})
        await connection.execute(text(unused), {"d": days, "o": old})
    assert await forever.sweep(100) == 0
    assert await store.sweep(100) == 4  # three items and a conversation
    assert await store.get("keyS", old) is None
    left = await store.get("keyS", mixed)
    assert left is not None
    assert left.items == 1


async def test_two_records_of_one_conversation_in_one_batch_are_added_in_order(pg_engine: Any) -> None:
    store = PostgresStoredConversations(pg_engine)
    name = f"conv_{random_hex()}"
    await store.create(StoredConversation(name, "key1", 1, {}), (), 9)
    here = Both(World(None, None, None), store)  # type: ignore[arg-type]
    both_rows = event_rows(here.turn(name, "t1"))
    both_rows.extend(event_rows(here.turn(name, "t2")))
    async with pg_engine.begin() as connection:
        await connection.run_sync(insert_rows, both_rows)
    assert len(await here.texts(name)) == 4
