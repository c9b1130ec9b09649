"""The held-out slice on a real PostgreSQL: one bound for the trainer's rows and the gate's requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.inserts import insert_outcome, insert_rows
from gateway.core.log.rollout import RolloutRecord
from gateway.core.policies.holdout import KEYS_APART_MIN, Bound, bound_of
from gateway.errors import ConfigError, NotFound
from policy.dataset import parquet
from policy.dataset.select import Selection
from policy.gate.traffic import requests as heldout
from policy.gate.traffic.requests import held_out
from policy.jobs.select import select
from policy.simulators.arena.workers import STANDARD
from tests.policy.dataset_rows import T0
from tests.records import T0_US, a_rollout, an_outcome, rollout_event

Ask = Callable[..., RolloutRecord]
BEGAN = rows.EPOCH + timedelta(microseconds=T0_US)
ENOUGH = {"questions_min": 1.0}


def gate_of(place: Path, **thresholds: float) -> dict[str, Any]:
    """The gate of a job, with the files that it names."""
    files = {"key_file": place / "key", "pool_file": place / "pool.yaml"}
    for path in files.values():
        path.touch()
    named = {name: str(path) for name, path in files.items()}
    return {"url": "http://127.0.0.1:1/v1", "usd_max": "1", **named, "thresholds": thresholds or ENOUGH}


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    engine = sync_engine(database_url)
    with engine.connect() as open_connection:
        yield open_connection
    engine.dispose()


@pytest.fixture
def ask(connection: Connection) -> Ask:
    """Logs a request of so many minutes after the first; judged, where a value is given."""

    def stored(minute: int, value: float | None = None, text: str = "", **changes: Any) -> RolloutRecord:
        question = text or f"What is {minute} + {minute}?"
        body = {"model": "baton", "messages": [{"role": "user", "content": question}], "temperature": 0}
        filled = {"created_us": T0_US + 60_000_000 * minute, "request": body, "task_type": "sums", **changes}
        record = a_rollout(**filled)
        insert_rows(connection, rows.event_rows(rollout_event(record)))
        if value is not None:
            insert_outcome(connection, an_outcome(record.id, value, key_id=record.key_id))
        connection.commit()
        return record

    return stored


def tagged(reference: str) -> Mapping[str, str]:
    return {"grader": "numeric@1", "reference": reference}


def test_the_latest_requests_that_can_be_judged_are_held_out(database_url: str, ask: Ask, tmp_path: Path) -> None:
    early = [ask(minute, float(minute % 2)) for minute in range(8)]
    late = ask(8, tags=tagged("16"))
    ask(9, 1.0, text="What is 3 + 3?")  # training has it
    ask(10)  # nobody judged it, and it names no grader
    found = held_out(database_url, Selection(), share=0.2)
    assert found.bound == Bound(BEGAN + timedelta(minutes=8))
    assert [one.id for one in found.requests] == [late.id]
    [request] = found.requests
    assert (request.grader, request.reference, request.kind) == ("numeric@1", "16", "sums")
    assert request.params == {"temperature": 0}
    assert [message["content"] for message in request.messages] == ["What is 8 + 8?"]
    assert found.left_out == {"asked_in_training": 1, "no_outcome": 1}
    assert "the training side has the same question" in heldout.listed(found.left_out)
    assert not any(found.bound.holds_out(BEGAN + timedelta(minutes=at), one.key_id) for at, one in enumerate(early))
    heldout.write(tmp_path / "requests.json", found)
    assert heldout.read(tmp_path / "requests.json") == found
    assert (tmp_path / "requests.json").stat().st_mode & 0o077 == 0
    (tmp_path / "requests.json").write_text("{}")
    with pytest.raises(ConfigError, match="no held-out requests"):
        heldout.read(tmp_path / "requests.json")


def test_what_cannot_be_asked_again_is_counted_by_name(database_url: str, ask: Ask) -> None:
    image = [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
    ask_of = {"role": "user", "content": "Look it up."}
    faults: tuple[dict[str, Any], ...] = (
        {"request": {"messages": [{"role": "user", "content": image}]}},
        {"request": {"messages": [ask_of], "tools": [{"type": "function"}]}},
        {"log_mode": "redacted"},
        {"text": "Twice?"},
        {"text": "twice? "},
    )
    for minute, changes in enumerate(faults):
        ask(minute, 1.0, **changes)
    ask(9, 1.0, train=False)
    ask(10, 1.0, status="failed")
    found = held_out(database_url, Selection(), Bound(BEGAN))
    assert found.left_out == {"no_text": 1, "tools": 1, "redacted": 1, "asked_later": 1}
    assert [one.messages[0]["content"] for one in found.requests] == ["twice? "]
    assert held_out(database_url, Selection(keys=("nobody", "key1")), Bound(BEGAN)) == found
    with pytest.raises(NotFound, match="has an outcome or names a grader"):
        held_out(database_url, Selection(keys=("nobody",)))


def test_keys_are_held_out_whole_where_there_are_many() -> None:
    few = [(T0, f"key{index}") for index in range(KEYS_APART_MIN - 1)]
    assert bound_of(few, 0.5, 0.5).keys == ()
    many = [(T0 + timedelta(minutes=index), f"key{index}") for index in range(200)]
    bound = bound_of(many, 0.25, 0.1)
    assert bound.at == T0 + timedelta(minutes=150)
    assert 8 <= len(bound.keys) <= 35
    assert bound_of(many[:100], 0.25, 0.1).keys == tuple(key for key in bound.keys if int(key[3:]) < 100)
    assert bound.holds_out(T0, bound.keys[0])
    assert not bound.holds_out(T0, "another")


def test_a_job_trains_on_one_side_of_the_bound_and_is_judged_on_the_other(
    database_url: str, ask: Ask, tmp_path: Path
) -> None:
    every = [ask(minute, float(minute % 2)) for minute in range(20)]
    request = {"train": {"env": "logged"}, "gate": gate_of(tmp_path), "database_url": database_url}
    request |= {"work": str(tmp_path), "known": {}}
    selected = select(request)
    found = heldout.read(Path(selected["requests"]))
    assert selected["bound"] == found.bound.as_json()
    sides = {row.root_id: row.split for row in parquet.read(Path(selected["train"]["export"]))}
    assert {one.id for one in found.requests} == {one.id for one in every[16:]}
    assert sides == {one.id: "validation" if one in every[16:] else "train" for one in every}
    assert set(selected["inputs"]) == {selected["requests"], selected["train"]["export"]}
    with pytest.raises(ConfigError, match="give the gate --url, --key-file, --pool-file, --usd-max"):
        select({**request, "gate": {}})
    with pytest.raises(ConfigError, match=r"about 30 more judged requests are needed: the gate asks 10 .* 4 are held"):
        select({**request, "gate": gate_of(tmp_path, questions_min=10)})
    with pytest.raises(ConfigError, match=r"give the gate --key-file \(.*; and about 30 more judged requests"):
        select({**request, "gate": {**gate_of(tmp_path, questions_min=10), "key_file": ""}})
    known = {**gate_of(tmp_path), "usd_max": "5.00"}
    thresholds = known.pop("thresholds")
    assert select({**request, "gate": {"thresholds": thresholds}, "known": known})["requests"], "the gateway's own"
    (tmp_path / "key").unlink()
    with pytest.raises(ConfigError, match=r"--gate: --key-file .*/key: there is no such file"):
        select(request)
    elsewhere = select({**request, "gate": {"env": "arena"}})
    assert (elsewhere["requests"], elsewhere["bound"]) == (None, None)


def test_traffic_of_the_arena_is_judged_in_the_arena(database_url: str, ask: Ask, tmp_path: Path) -> None:
    pool = [{"name": worker.name, "handle": worker.name, "kind": "openai", "version": "1"} for worker in STANDARD]
    for minute in range(10):
        ask(minute, float(minute % 2), pool=pool)
    request = {"train": {"env": "logged"}, "gate": {}, "database_url": database_url, "work": str(tmp_path)}
    assert select({**request, "known": {}})["requests"] is None


def test_live_training_is_judged_on_requests_that_its_file_does_not_ask(
    database_url: str, ask: Ask, tmp_path: Path
) -> None:
    for minute in range(10):
        ask(minute, float(minute % 2))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "p1", "question": "what is 9 + 9?", "reference": "18"}))
    train = {"env": "live", "prompts_file": str(prompts), "usd_max": "1", "url": "u", "key_file": "k", "pool_file": "p"}
    request = {
        "train": train,
        "gate": {"usd_max": "1", "thresholds": ENOUGH},
        "database_url": database_url,
        "work": str(tmp_path),
        "known": {},
    }
    found = heldout.read(Path(select(request)["requests"]))
    assert [one.messages[0]["content"] for one in found.requests] == ["What is 8 + 8?"]
    assert found.left_out == {"asked_in_training": 1}
