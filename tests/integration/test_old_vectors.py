"""Vectors of an earlier embedder become vectors of the present one, once, and wherever the work was cut off."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import select, text, update

from gateway.adapters.postgres import credit as stored_experience
from gateway.adapters.postgres.credit import OldVectors
from gateway.adapters.postgres.database import async_engine
from gateway.adapters.postgres.evidence.remembered import PostgresPast
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.rows import event_rows
from gateway.adapters.postgres.store import PostgresStore
from gateway.adapters.postgres.tables import experience
from gateway.core.loop.experience.likeness import HASHED
from gateway.core.loop.experience.meaning import TABLE_FILE, by_meaning
from gateway.core.loop.experience.past import Owner
from gateway.files import shipped
from tests.records import a_rollout, a_step, an_outcome, rollout_event

MEANING = by_meaning(shipped(TABLE_FILE))
TEXTS = [f"question {word}" for word in ["one", "two", "three", "four", "five", "six", "seven"]]


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[PostgresStore]:
    """A log with one judged step for each text, embedded by hashing."""
    made = PostgresStore(async_engine(database_url, statement_timeout_s=20.0))
    for question in TEXTS:
        await judged(made, question)
    yield made
    await made.engine.dispose()


async def judged(store: PostgresStore, question: str, **changes: Any) -> str:
    request = {"messages": [{"role": "user", "content": question}]}
    record = a_rollout(steps=[a_step(0, "alpha")], request=request, **changes)
    async with store.engine.begin() as connection:
        await connection.run_sync(insert_rows, event_rows(rollout_event(record)))
    await store.outcome_insert(an_outcome(record.id, 1.0))
    return record.id


async def stored(store: PostgresStore) -> dict[str | None, int]:
    """How many rows there are of each embedder, and that each row's vector has its name."""
    counts: dict[str | None, int] = {}
    async with store.engine.begin() as connection:
        for name, vector in await connection.execute(select(experience.c.embedder, experience.c.embedding)):
            counts[name] = counts.get(name, 0) + 1
            known = [(HASHED if name == HASHED.name else MEANING).embed(one) for one in TEXTS]
            assert any(list(vector) == pytest.approx(one, abs=1e-6) for one in known)
    return counts


async def test_vectors_of_the_embedder_before_are_computed_again(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_experience, "BATCH", 3)
    assert await stored(store) == {"hashing": 7}
    work = OldVectors(store.engine, MEANING)
    assert await work.sweep(4) == 4
    assert await stored(store) == {"hashing": 3, "minilm-1": 4}
    after_a_crash = OldVectors(store.engine, MEANING)
    assert await after_a_crash.sweep(1000) == 3
    assert await stored(store) == {"minilm-1": 7}
    await judged(store, TEXTS[0])
    assert await after_a_crash.sweep(1000) == 0  # it rests until the next start
    assert await OldVectors(store.engine, MEANING).sweep(1000) == 1
    steps = await PostgresPast(store.engine).latest(Owner("org", "acme"), "alpha", 100)
    assert {one.embedder for one in steps} == {"minilm-1"}
    assert all(one.changed_us > one.at_us for one in steps)  # so the memories of the gateways read them again


async def test_vectors_of_before_they_had_names_are_computed_again(store: PostgresStore) -> None:
    async with store.engine.begin() as connection:
        await connection.execute(update(experience).values(embedder=None))
    assert await OldVectors(store.engine, MEANING).sweep(1000) == 7
    assert await stored(store) == {"minilm-1": 7}


async def test_a_row_without_a_logged_question_loses_its_vector(store: PostgresStore) -> None:
    async with store.engine.begin() as connection:
        await connection.execute(text("UPDATE rollouts SET request = '{}'"))
    assert await OldVectors(store.engine, MEANING).sweep(1000) == 7
    async with store.engine.begin() as connection:
        assert set(await connection.scalars(select(experience.c.embedding))) == {None}
    assert await OldVectors(store.engine, MEANING).sweep(1000) == 0


@pytest.mark.parametrize("embedding", [HASHED, None], ids=["hashing", "an endpoint"])
async def test_hashing_and_endpoints_replace_nothing(store: PostgresStore, embedding: Any) -> None:
    assert await OldVectors(store.engine, embedding).sweep(1000) == 0
    assert await stored(store) == {"hashing": 7}


async def test_a_vector_of_an_endpoint_is_left_alone(store: PostgresStore) -> None:
    logged = {"task_embedding": HASHED.embed(TEXTS[0]), "task_embedder": "url:0123456789abcdef"}
    await judged(store, TEXTS[0], **logged)
    assert await OldVectors(store.engine, MEANING).sweep(1000) == 7
    async with store.engine.begin() as connection:
        names = list(await connection.scalars(select(experience.c.embedder)))
    assert sorted(names) == ["minilm-1"] * 7 + ["url:0123456789abcdef"]
