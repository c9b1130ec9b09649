"""What a planner was shown is rendered anew from the log, and gives the very prompt that was served."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from gateway.core.loop.replies.errors import CheckerErrors, Share
from gateway.core.money.amounts import Usage
from gateway.core.pool.revision import canonical_text, revision_of
from gateway.core.pool.workers import PoolFile, WorkerSpec
from policy.dataset import parquet
from policy.dataset.refusals import RowRefused
from policy.dataset.rendered import input_of, prompt_of
from policy.dataset.row import Row
from policy.dataset.select import Selection, parse_labels
from tests.fakes.workers import FakeWorkers, Says
from tests.kit import Kit, ask, pool_file
from tests.policy.dataset_rows import T0, read
from tests.records import an_outcome, event
from tests.service.test_contracts import CHECK
from tests.service.test_conversations import MEANING, OTHER, cached_pool
from tests.service.test_sticky import TO_ALPHA, TO_BETA, next_turn
from tests.service.test_tools import BOX, Boxes

WROTE = Usage(9_000, 5, details={"cached_tokens": 3_000, "cache_write_tokens": 1_000})

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
    for name, value in changes.items():
        setattr(record, name, value)
    stored(database_url, pool, [record], with_pool=with_pool)
    return record


def stored(database_url: str, pool: PoolFile, records: Sequence[RolloutRecord], *, with_pool: bool = True) -> None:
    """Store rollouts as the shipper would, and the pool file that served them."""
    engine = sync_engine(database_url)
    with engine.begin() as connection:
        for record in records:
            record.pool_revision = revision_of(pool)
            insert_rows(connection, rows.event_rows(event("rollout", apply_mode(as_payload(record), record.log_mode))))
        if with_pool:
            file = canonical_text(pool)
            connection.execute(
                insert(pool_revisions).values(hash=revision_of(pool), file=file, at=T0, actor="ann", why="a test")
            )
    engine.dispose()


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


def same_bytes(row: Row, profile: Profile) -> bool:
    """Whether the prompt rendered anew is the one that was served. Its hash is another, so that it is rendered."""
    return prompt_of(replace(row, prompt_hash="of an older wording"), profile) == row.messages


async def test_the_checked_prompt_is_rendered_anew_with_its_checkers(database_url: str, tmp_path: Path) -> None:
    """A contract that is missed and goes to another worker, a judge's word, a verify step, prose, tools."""
    pools = pool_file(CHECK, BOX)
    never: dict[str, Any] = {"worker": "atlas", "task": None, "see": [], "expect": {"regex": "^[0-9]+$"}}
    verify = {"kind": "verify", "worker": "probe", "task": None, "see": [1], "accept": "ship", "escalate": "plan"}
    plain = {"worker": "birch", "task": "Write it up.", "see": []}
    plans = [{"why": "a start", "steps": [never, plain, verify]}, {"steps": [plain]}, {"steps": []}]
    prose = "It rained all day, and so nobody came. " * 40
    says = {"alpha": Says("no idea"), "gamma": Says("42"), "beta": Says(prose), "check": Says('{"accept": false}')}
    errors = {"check": CheckerErrors("check", Share(3, 20), Share(0, 4), Share(3, 40))}
    kit = Kit(
        [json.dumps(plan) for plan in plans], says, pools=pools, rounds=3, profile="guided", errors=errors,
        toolboxes=Boxes(),
    )  # fmt: skip
    record = (await kit.serve(ask("What is 6 times 7?", model="baton/conductor"))).record
    stored(database_url, pools, [record])
    found = logged(database_url)
    assert [row.prompt_version for row in found] == ["checked-1"] * 3
    shown = "\n".join(row.messages[-1]["content"] for row in found)
    parts = ("- probe, so far: accepted 3 of 20", "repaired)", "rejected)", "tools: look(", "> It rained", "Left: $")
    assert [part for part in parts if part not in shown] == []
    assert [same_bytes(row, "checked") for row in found] == [True] * 3
    path = tmp_path / "rows.parquet"
    with path.open("wb") as file:
        parquet.write(file, parquet.row_schema(), map(parquet.row_record, found), {"shape": "parquet"})
    assert [same_bytes(row, "checked") for row in parquet.read(path)] == [True] * 3
    profiles: tuple[Profile, ...] = ("full", "compact")
    for profile in profiles:  # a student of another profile reads the digests as they were shown
        text = prompt_of(found[1], profile)[-1]["content"]
        assert "\n0 atlas (" in text
        assert "repaired) = 42\n" in text
        assert prompt_of(replace(found[1], shown=None), profile)[-1]["content"] == text


async def turns_of(database_url: str, profile: Profile, **more: Any) -> tuple[Row, Row]:
    """The rows of two turns of a conversation, of which the second wants something else and is planned anew."""
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": Says(usage=WROTE)}, pools=cached_pool(), profile=profile, embedder=MEANING)
    first = await kit.serve(ask("Explain TCP congestion control. " * 600))
    second = await next_turn(kit, first, OTHER)
    for name, value in more.items():
        setattr(second.record, name, value)
    stored(database_url, cached_pool(), [first.record, second.record])
    one, two = logged(database_url)
    assert (one.turn, two.turn) == ({}, second.record.turn or {})
    return one, two


async def test_a_turn_that_is_planned_anew_shows_who_is_warm(database_url: str) -> None:
    first, second = await turns_of(database_url, "guided")
    assert "leaving it costs its cached prompt, about $0.011" in second.messages[-1]["content"]
    assert same_bytes(first, "guided")
    assert same_bytes(second, "guided")
    for unknown in ({"turn": None}, {"turn": second.turn}):
        bare = {name: each for name, each in (second.shown or {}).items() if name != "warm"}
        with pytest.raises(RowRefused, match="no_warm"):
            prompt_of(replace(second, prompt_hash="other", shown=bare, **unknown), "guided")


async def test_a_trained_prompt_has_its_warm_worker_from_the_turn(database_url: str) -> None:
    first, second = await turns_of(database_url, "ranked")
    assert "answered last, leaving costs $11/1k" in second.messages[-1]["content"]
    assert same_bytes(first, "ranked")
    assert same_bytes(second, "ranked")
    assert same_bytes(replace(first, turn=None), "ranked")  # its conversation had no turn before
    older = {name: each for name, each in (second.turn or {}).items() if name != "worth_nano"}
    for turn in (None, older):
        with pytest.raises(RowRefused, match="no_warm"):
            prompt_of(replace(second, prompt_hash="other", turn=turn), "ranked")
    kept = replace(second, turn={**older, "kept": True})
    assert "answered last" not in prompt_of(replace(kept, prompt_hash="other"), "ranked")[-1]["content"]


async def test_what_no_untrained_model_was_shown_is_not_invented(database_url: str) -> None:
    pools = pool_file(CHECK)
    kit = Kit([json.dumps({"steps": [{"worker": "atlas", "task": None, "see": []}]})], pools=pools, profile="guided")
    record = (await kit.serve(ask("What is 6 times 7?", model="baton/conductor"))).record
    stored(database_url, pools, [record])
    (row,) = logged(database_url)
    assert row.shown is not None
    assert same_bytes(row, "checked")
    older = {name: each for name, each in row.shown.items() if name != "errors"}
    for shown, reason in ((older, "no_checker_errors"), (None, "no_inputs")):
        with pytest.raises(RowRefused) as refused:
            prompt_of(replace(row, prompt_hash="other", shown=shown), "checked")
        assert refused.value.reason == reason


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
