"""Reliability of sources on a real PostgreSQL: measured by organisation, and what it does to experience."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway import cli
from gateway.adapters.postgres.inserts import insert_outcome, insert_rows
from gateway.adapters.postgres.rows import event_rows
from gateway.adapters.postgres.sources import PostgresSources, known_sources
from gateway.adapters.postgres.tables import experience
from tests.records import a_rollout, a_step, an_outcome, rollout_event


async def judged(engine: AsyncEngine, said: Mapping[str, float], n: int = 1, **more: str) -> list[str]:
    """`n` rollouts of which each source says the same; their ids."""
    ids = []
    for _ in range(n):
        record = a_rollout(steps=[a_step(0)], **more)
        async with engine.begin() as connection:
            await connection.run_sync(insert_rows, event_rows(rollout_event(record)))
            for source, value in said.items():
                await connection.run_sync(insert_outcome, an_outcome(record.id, value, source=source))
        ids.append(record.id)
    return ids


async def weights(engine: AsyncEngine) -> dict[tuple[str, str], tuple[float, float]]:
    """What the verdicts of each source weigh, by organisation and name."""
    async with engine.begin() as connection:
        return {
            (one["org"], one["source"]): (one["weight_right"], one["weight_wrong"])
            for one in await known_sources(connection)
        }


async def evidence(engine: AsyncEngine, rollout_id: str) -> tuple[str, str, float, float]:
    """(organisation, source, credit, weight) of the experience of a rollout's only step."""
    e = experience.c
    async with engine.begin() as connection:
        row = (
            await connection.execute(select(e.org, e.source, e.success, e.weight).where(e.rollout_id == rollout_id))
        ).one()
    return row.org, row.source, row.success, round(row.weight, 2)


async def test_a_judge_that_always_says_right_loses_its_weight_in_one_organisation_alone(
    pg_engine: AsyncEngine,
) -> None:
    (before,) = await judged(pg_engine, {"judge:wise": 1.0})
    assert await evidence(pg_engine, before) == ("acme", "judge:wise", 1.0, 0.62)
    await judged(pg_engine, {"person": 1.0, "judge:wise": 1.0}, 10)
    await judged(pg_engine, {"person": 0.0, "judge:wise": 1.0}, 30)
    for value in (1.0, 0.0):
        await judged(pg_engine, {"person": value, "judge:wise": value}, 10, org="umbrella")
    await PostgresSources(pg_engine).sweep(1)
    found = await weights(pg_engine)
    assert found["acme", "judge:wise"][0] < 0.1
    assert found["umbrella", "judge:wise"] > (0.8, 0.8)
    assert found["acme", "person"] == found["umbrella", "person"] == (1, 1)
    org, source, credit, weight = await evidence(pg_engine, before)  # what was credited is weighed anew
    assert (org, source, credit) == ("acme", "judge:wise", 1.0)
    assert weight == pytest.approx(found["acme", "judge:wise"][0], abs=0.01)
    (after,) = await judged(pg_engine, {"judge:wise": 1.0})
    assert (await evidence(pg_engine, after))[3] == weight
    (other,) = await judged(pg_engine, {"judge:wise": 1.0}, org="umbrella")
    assert (await evidence(pg_engine, other))[3] == pytest.approx(found["umbrella", "judge:wise"][0], abs=0.01)


async def test_what_people_say_stands_whatever_a_judge_or_a_signal_says_later(pg_engine: AsyncEngine) -> None:
    (rollout,) = await judged(pg_engine, {"person": 1.0, "client": 0.0, "judge:wise": 0.0, "signal:edit": 0.0})
    assert await evidence(pg_engine, rollout) == ("acme", "person", 1.0, 1.0)
    (rollout,) = await judged(pg_engine, {"signal:test": 0.0, "judge:wise": 1.0})
    assert (await evidence(pg_engine, rollout))[1:3] == ("judge:wise", 1.0)


async def test_a_source_says_its_last_word_and_steps_are_not_compared(pg_engine: AsyncEngine) -> None:
    (rollout,) = await judged(pg_engine, {"person": 1.0, "client": 0.0})
    async with pg_engine.begin() as connection:
        await connection.run_sync(insert_outcome, an_outcome(rollout, 1.0))
        await connection.run_sync(insert_outcome, an_outcome(rollout, 0.0, step=0))
    await PostgresSources(pg_engine).sweep(1)
    async with pg_engine.begin() as connection:
        (client,) = [one for one in await known_sources(connection) if one["source"] == "client"]
    assert (client["n"], client["agreement"], client["weight_right"]) == (1, 1.0, 1.0)


async def test_two_gateways_measure_one_at_a_time_and_say_the_same(pg_engine: AsyncEngine) -> None:
    await judged(pg_engine, {"person": 1.0, "client": 0.0}, 5)
    await asyncio.gather(*(PostgresSources(pg_engine).sweep(1) for _ in range(4)))
    assert set(await weights(pg_engine)) == {("acme", "person"), ("acme", "client")}


async def test_the_command_measures_and_shows(
    pg_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await judged(pg_engine, {"person": 0.0, "label": 1.0}, 10)
    monkeypatch.setenv("DATABASE_URL", pg_engine.url.render_as_string(hide_password=False))
    assert await asyncio.to_thread(cli.main, ["experience", "sources", "--json"]) == 0
    label, person = json.loads(capsys.readouterr().out)
    assert (label["source"], label["n"], label["agreement"]) == ("label", 10, 0.0)
    assert label["weight_right"] == pytest.approx((0.95 - 0.525) / (0.95 + 0.525), abs=0.001)
    assert (person["source"], person["agreement"], person["weight_wrong"]) == ("person", None, 1.0)
