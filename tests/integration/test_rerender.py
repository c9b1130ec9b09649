"""What a planner was shown is rendered anew from the log, and gives the very prompt that was served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin_tables import pool_revisions
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.inserts import insert_outcome, insert_rows
from gateway.core.log.redact import apply_mode
from gateway.core.log.rollout import RolloutRecord, as_payload
from gateway.core.loop.prompt import Profile, prompt_hash, render
from gateway.core.pool.workers import PoolFile, WorkerSpec, canonical_text, revision_of
from policy.dataset import parquet
from policy.dataset.refusals import RowRefused
from policy.dataset.rendered import input_of, prompt_of
from policy.dataset.row import Row
from policy.dataset.select import Selection, parse_labels
from tests.fakes.workers import FakeWorkers, Says
from tests.kit import Kit, ask
from tests.policy.dataset_rows import T0, read
from tests.records import an_outcome, event

PLANS = [
    '{"steps":[{"worker":"quill","task":null,"see":[]},{"worker":"atlas","task":null,"see":[]}]}',
    '{"steps":[{"worker":"atlas","task":"Check it.","see":[0]}]}',
]


def a_pool() -> PoolFile:
    more: dict[str, Any] = {"kind": "openai", "url": "http://127.0.0.1:9/v1", "model": "m", "context_tokens": 32_000}
    price = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}
    alpha = WorkerSpec(name="alpha", handle="quill", description="good at sums", price=price, tags=("sums",), **more)
    beta = WorkerSpec(name="beta", handle="atlas", price=price, latency_hint_s=0.5, **more)
    return PoolFile(workers=(alpha, beta), pools={"default": ("alpha", "beta")})


async def served(database_url: str, *, with_pool: bool = True, **changes: Any) -> RolloutRecord:
    """A request of two rounds, in PostgreSQL as the shipper stores it."""
    pool = a_pool()
    workers = FakeWorkers({"alpha": Says("Answer: 4"), "beta": Says("Answer: 4")})
    kit = Kit(PLANS, workers, pools=pool, rounds=2)
    record = (await kit.serve(ask("What is 2+2?", model="baton/conductor"))).record
    record.pool_revision = revision_of(pool)
    for name, value in changes.items():
        setattr(record, name, value)
    engine = sync_engine(database_url)
    with engine.begin() as connection:
        insert_rows(connection, rows.event_rows(event("rollout", apply_mode(as_payload(record), record.log_mode))))
        if with_pool:
            file = canonical_text(pool)
            connection.execute(
                insert(pool_revisions).values(hash=revision_of(pool), file=file, at=T0, actor="ann", why="a test")
            )
    engine.dispose()
    return record


def logged(database_url: str, **more: Any) -> list[Row]:
    return list(read(database_url, Selection(min_outcomes=0, **more)))


async def test_a_prompt_is_rendered_anew_as_it_was_served(database_url: str, tmp_path: Path) -> None:
    await served(database_url)
    first, second = logged(database_url)
    for row in (first, second):
        assert render("full", input_of(row, "full")) == row.messages
        older = replace(row, prompt_hash="of an older wording")
        assert prompt_of(older, "full") == row.messages
        assert "quality" in prompt_of(older, "dial")[0]["content"]
    assert [reply["answer"] for reply in second.replies] == ["4", "4", "4"]
    assert input_of(second, "full").replies[1].flags == ("agrees:0",)
    assert len(input_of(second, "full").replies) == 2
    path = tmp_path / "rows.parquet"
    with path.open("wb") as file:
        parquet.write(file, parquet.row_schema(), map(parquet.row_record, (first, second)), {"shape": "parquet"})
    assert [input_of(row, "full") for row in parquet.read(path)] == [input_of(row, "full") for row in (first, second)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request_messages": []}, "no_inputs"),
        ({"replies": ()}, "no_inputs"),
        ({"allowed": None}, "no_allowed"),
        ({"log_mode": "redacted"}, "redacted"),
        ({"log_mode": "metadata"}, "metadata_only"),
        ({"pool": [{"handle": "quill"}]}, "no_inputs"),
    ],
)
async def test_what_the_log_lacks_is_refused_by_name(database_url: str, changes: dict[str, Any], reason: str) -> None:
    await served(database_url)
    row = replace(logged(database_url)[1], prompt_hash="other", **changes)
    with pytest.raises(RowRefused) as refused:
        prompt_of(row, "full")
    assert refused.value.reason == reason


async def test_without_its_pool_file_a_log_lacks_what_the_full_prompt_shows(database_url: str) -> None:
    await served(database_url, with_pool=False)
    (row, _) = logged(database_url)
    assert prompt_of(row, "full") == row.messages  # today's wording: as it was logged
    profiles: tuple[Profile, ...] = ("full", "dial")
    for profile in profiles:
        with pytest.raises(RowRefused):
            prompt_of(replace(row, prompt_hash="other"), profile)
    seen = {"n": 5, "success": 0.5, "cost_nano": 10, "ms": 300}
    known = replace(row, prompt_hash="other", pool=[{**one, "experience": seen} for one in row.pool])
    assert "right5" in prompt_of(known, "compact")[0]["content"]
    assert prompt_hash("compact") != known.prompt_hash


async def test_labels_have_the_value_that_the_reader_gives_them(database_url: str) -> None:
    record = await served(database_url)
    engine = sync_engine(database_url)
    with engine.begin() as connection:
        for index, label in enumerate(("edited", "rejected", "strange")):
            given = an_outcome(record.id, None, key_id=record.key_id, created_at=T0, kind="label", label=label)
            assert insert_outcome(connection, given), index
        plan = json.dumps({"steps": []})
        shown = an_outcome(record.id, None, key_id=record.key_id, created_at=T0, kind="demonstration",
                           demonstration=plan)  # fmt: skip
        insert_outcome(connection, shown)
    engine.dispose()
    raw = logged(database_url)[0]
    assert (raw.outcome, raw.outcome_n, raw.demonstration) == (None, 0, plan)
    valued = logged(database_url, labels=parse_labels(["standard", "edited=0.8"]))[0]
    assert (valued.outcome, valued.outcome_n) == (0.4, 2)
