"""The log in a real PostgreSQL as training data: what is read, what stays out, and the files that come of it."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, insert, text

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin_tables import keys
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.inserts import insert_outcome, insert_rows
from gateway.core.log.redact import apply_mode
from gateway.core.log.rollout import AttemptRecord, RolloutRecord, as_payload
from gateway.core.loop.replies.verdicts import StepVerdict
from gateway.errors import ConfigError, NotFound, Unavailable
from policy.__main__ import main
from policy.dataset import cli, parquet, shapes
from policy.dataset import read as reading
from policy.dataset.curate import curated, load
from policy.dataset.export import Format, export
from policy.dataset.read import rows_of, snapshot
from policy.dataset.refusals import REASONS
from policy.dataset.row import Row, StepRow
from policy.dataset.rules import Rules
from policy.dataset.select import Selection
from policy.record import questions
from policy.record.questions import of_log
from policy.reward import RewardSettings
from tests.policy.dataset_rows import read
from tests.postgres_server import PostgresServer
from tests.records import T0_US, a_rollout, a_round, a_step, an_outcome, event, new_id

T0 = rows.EPOCH + timedelta(microseconds=T0_US)
FEW_KEYS = Rules(key_share_max=1.0)
_asked = itertools.count()
Add = Callable[..., RolloutRecord]


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    engine = sync_engine(database_url)
    with engine.connect() as opened:
        yield opened
    engine.dispose()


@pytest.fixture
def add(connection: Connection) -> Add:
    """Stores a rollout as the shipper would, with an outcome unless `value` is None."""

    def store(value: float | None = 1.0, at_s: int = 0, source: str = "client", **changes: Any) -> RolloutRecord:
        question = {"role": "user", "content": f"RecordQuestion {next(_asked)}?"}
        given: dict[str, Any] = {
            "request": {"model": "baton", "messages": [question]},
            "created_us": T0_US + at_s * 10**6,
        }
        record = a_rollout(**({"finished_us": given["created_us"] + 140_000} | given | changes))
        payload = apply_mode(as_payload(record), record.log_mode)
        insert_rows(connection, rows.event_rows(event("rollout", payload)))
        if value is not None:
            judge(connection, record, value, source=source)
        connection.commit()
        return record

    return store


def judge(connection: Connection, record: RolloutRecord, value: float, **more: Any) -> None:
    given = {"key_id": record.key_id, "created_at": T0} | more
    insert_outcome(connection, an_outcome(record.id, value, **given))
    connection.commit()


def test_a_row_has_all_of_a_planning_call(database_url: str, connection: Connection, add: Add) -> None:
    record = add(0.5, steps=[a_step(0), a_step(1, "beta", worker_version="4")])
    judge(connection, record, 1.0, source="exact", grader_version="exact@1")
    (row,) = read(database_url, Selection())
    planned = record.rounds[0]
    assert row.call == (record.id, 1)
    assert (row.root_id, row.parent_id, row.depth) == (record.id, None, 0)
    assert (row.created_at, row.latency_ms, row.cost_nano) == (T0, 140.0, 805)
    assert (row.prompt_token_ids, row.plan_token_ids) == (planned.prompt_token_ids, planned.plan_token_ids)
    assert (row.plan_logprobs, row.decision_mask) == (planned.plan_logprobs, planned.decision_mask)
    assert (row.messages, row.plan, row.sampling) == (planned.messages, planned.plan, planned.sampling)
    assert (row.pool, row.tags, row.request_messages) == (record.pool, record.tags, record.request["messages"])
    assert (row.outcome, row.outcome_n, row.outcome_sources, row.grader_versions) == (0.5, 1, ("client",), ())
    assert (row.caps, row.allowed, row.quality) == (record.caps, planned.allowed, planned.quality)
    assert row.workers_used == (("alpha", "1"), ("beta", "4"))
    assert [(one.worker, one.task, one.see, one.latency_ms) for one in row.steps] == [
        ("alpha", None, (), 100.0),
        ("beta", "check step 0", (0,), 100.0),
    ]
    (graded,) = read(database_url, Selection(outcome_sources=("exact",)))
    assert (graded.outcome, graded.grader_versions) == (1.0, ("exact@1",))


def test_a_child_loop_shares_what_its_request_came_to(database_url: str, add: Add) -> None:
    rounds = [a_round(1), a_round(2)]
    inner: dict[str, Any] = {
        "request": {"messages": [{"role": "user", "content": "a part of it"}]},
        "steps": [a_step(0, "gamma")],
    }
    root = add(0.25, rounds=rounds, steps=[a_step(0)])
    child = add(None, at_s=1, parent_id=root.id, depth=1, cost_nano=3, **inner)
    grandchild = add(None, at_s=2, parent_id=child.id, depth=2, cost_nano=1, **inner)
    orphan = add(None, at_s=3, parent_id=new_id(), depth=1)
    found = {row.call: row for row in read(database_url, Selection(min_outcomes=0))}
    assert list(found) == [(root.id, 1), (root.id, 2), (child.id, 1), (grandchild.id, 1), (orphan.id, 1)]
    family = [found[call] for call in list(found)[:4]]
    assert {(row.root_id, row.outcome, row.cost_nano, row.latency_ms) for row in family} == {
        (root.id, 0.25, 805, 140.0)
    }
    assert len({row.group for row in family}) == 1
    assert {row.workers_used for row in family} == {(("alpha", "1"), ("gamma", "1"))}
    assert [[one.worker for one in row.steps] for row in family] == [["alpha"], [], ["gamma"], ["gamma"]]
    assert family[2].request_messages == inner["request"]["messages"]
    assert (found[orphan.id, 1].root_id, found[orphan.id, 1].outcome) == (orphan.id, None)


@pytest.mark.parametrize(
    ("selection", "kept"),
    [
        (Selection(), "abc"),
        (Selection(since=T0 + timedelta(seconds=10)), "bc"),
        (Selection(until=T0 + timedelta(seconds=20)), "ab"),
        (Selection(policy_versions=("conductor@8", "conductor@9")), "b"),
        (Selection(pools=("cheap",)), "b"),
        (Selection(keys=("key2",)), "c"),
        (Selection(tags=(("team", "red"),)), "c"),
        (Selection(tags=(("team", "red"), ("app", "x"))), ""),
        (Selection(outcome_sources=("person",)), "c"),
        (Selection(min_outcomes=2), ""),
        (Selection(planners=("rule",), min_outcomes=0), "d"),
        (Selection(planners=("rule", "conductor")), "abcd"),
    ],
)
def test_every_filter_filters(selection: Selection, kept: str, database_url: str, add: Add) -> None:
    b = {"rounds": [a_round(policy_version="conductor@8")], "pool_name": "cheap"}
    router = a_round(planner="rule", prompt_token_ids=[], plan_token_ids=[], plan_logprobs=[], decision_mask=[])
    named = {
        add().id: "a",
        add(at_s=10, **b).id: "b",
        add(at_s=20, key_id="key2", tags={"team": "red"}, source="person").id: "c",
        add(at_s=30, rounds=[router], created_us=T0_US + 5 * 10**6).id: "d",
    }
    assert sorted(named[row.rollout_id] for row in read(database_url, selection)) == list(kept)


def test_train_false_is_never_read_and_always_counted(database_url: str, connection: Connection, add: Add) -> None:
    kept = add()
    add(train=False)
    add(key_id="withdrew")
    key: dict[str, Any] = {"key_class": "data", "name": "n", "digest": b"d", "pepper_version": 1, "org": "acme"}
    key |= {"pools": [], "workers": [], "caps": {}, "log_mode": "full", "created_at": T0}
    connection.execute(insert(keys), [key | {"public_id": "withdrew", "train": False}])
    connection.execute(insert(keys), [key | {"public_id": "key1", "train": True}])
    connection.commit()
    assert [row.rollout_id for row in read(database_url, Selection())] == [kept.id]
    report = load(database_url, Selection(), FEW_KEYS).report
    assert (report.found, report.train, report.left_out) == (3, 1, {"train_false": 2})


def test_redaction_is_kept_and_named(database_url: str, add: Add) -> None:
    mail = {"model": "baton", "messages": [{"role": "user", "content": "Write to ann@example.com"}]}
    add(log_mode="redacted", request=mail)
    add(log_mode="redacted")
    add(log_mode="metadata")
    add(request={"model": "baton", "messages": [{"role": "user", "content": "Use sk-abcdefgh1234567890abcdef"}]})
    found = load(database_url, Selection(), FEW_KEYS)
    assert found.report.left_out == {"redacted": 1, "metadata_only": 1, "no_tokens": 1}
    assert len(found.train) == 1
    everything = load(database_url, Selection(), Rules(key_share_max=1.0, tokens_required=False)).train
    assert len(everything) == 4
    assert "ann@example.com" not in repr(everything)


def test_the_rules_hold_on_the_log(database_url: str, add: Add) -> None:
    for index in range(40):
        add(float(index % 2), at_s=index, key_id="loud")
        add(float(index % 3 == 0), at_s=index, key_id=f"key{index}")
    add(at_s=5, steps=[a_step(0, "alpha", worker_version="0")])
    add(None, at_s=6)
    rules = Rules(versions={"alpha": "1", "beta": "1"}, validation_share=0.5)
    found = load(database_url, Selection(), rules)
    report = found.report
    assert {reason: count for reason, count in report.left_out.items() if reason != "over_key_share"} == {
        "stale_worker": 1,
        "too_few_outcomes": 1,
    }
    assert (len(found.train), len(found.validation)) == (report.train, report.validation)
    assert report.found == 82 == report.kept + sum(report.left_out.values())
    for side in (found.train, found.validation):
        assert sum(row.key_id == "loud" for row in side) <= 0.05 * len(side)
    assert max(row.created_at for row in found.train) < min(row.created_at for row in found.validation)
    assert {row.split for row in found.validation} == {"validation"}


def test_batches_are_bounded_and_lose_nothing(database_url: str, add: Add) -> None:
    written = [add(at_s=index, rounds=[a_round(1), a_round(2)]).id for index in range(7)]
    with snapshot(database_url) as opened:
        statements = opened.execute(text("SHOW transaction_isolation")).scalar_one()
        calls = [row.call for row in rows_of(opened, Selection(), batch_rows=3)]
    assert calls == [(one, number) for one in written for number in (1, 2)]
    assert statements == "repeatable read"


def test_rollouts_that_arrive_during_an_export_are_not_in_it(database_url: str, add: Add) -> None:
    first = add()
    with curated(database_url, Selection(), FEW_KEYS) as found:
        add()
        assert [row.rollout_id for row in found.rows()] == [first.id]
        assert [row.rollout_id for row in found.rows()] == [first.id]  # as often as wanted


def test_too_large_a_selection_is_refused(database_url: str, add: Add) -> None:
    for _ in range(3):
        add()
    with pytest.raises(ConfigError, match="over 2 planning calls are selected"):
        load(database_url, Selection(), FEW_KEYS, rows_max=2)


# ---------------------------------------------------------------- files


def test_the_metadata_of_an_outcome_is_exported(
    database_url: str, connection: Connection, add: Add, tmp_path: Path
) -> None:
    record = add(0.0)
    judge(connection, record, 1.0, metadata={"page": "7", "lang": "de"}, created_at=T0 + timedelta(seconds=1))
    judge(connection, record, 1.0, metadata={"page": "8"}, created_at=T0 + timedelta(seconds=2))
    out = tmp_path / "traces.parquet"
    export(database_url, Selection(), Rules(key_share_max=1.0, validation_share=0.0), out)
    (row,) = parquet.read(out)
    assert row.outcome_metadata == {"page": "8", "lang": "de"}


def test_parquet_holds_every_row_for_arrow_and_duckdb(database_url: str, add: Add, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="the train extra is not installed")
    for index in range(5):
        add(float(index % 2), at_s=index)
    out = tmp_path / "traces.parquet"
    report = export(database_url, Selection(), Rules(key_share_max=1.0, validation_share=0.4), out)
    table = pq.read_table(out)
    rows_read = list(read(database_url, Selection()))
    assert table.column_names == list(Row.__slots__)
    assert table["plan_logprobs"].to_pylist()[0] == pytest.approx(rows_read[0].plan_logprobs)
    assert [str(table.schema.field(name).type) for name in ("plan_token_ids", "plan_logprobs")] == [
        "list<element: int32>",
        "list<element: float>",
    ]
    assert table["rollout_id"].to_pylist() == [row.rollout_id for row in rows_read]
    assert table["created_at"].to_pylist() == [row.created_at for row in rows_read]
    assert table["steps"].to_pylist()[0][1]["task"] == "check step 0"
    assert json.loads(table["plan"].to_pylist()[0]) == rows_read[0].plan
    assert table["split"].to_pylist() == ["train"] * 3 + ["validation"] * 2
    about = {key.decode(): value.decode() for key, value in pq.read_schema(out).metadata.items()}
    assert (about["baton.traces.version"], about["baton.traces.shape"]) == ("5", "parquet")
    assert json.loads(about["baton.traces.report"])["train"] == report.train == 3
    assert pq.ParquetFile(out).metadata.row_group(0).column(0).compression == "ZSTD"
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    query = (
        "SELECT split, count(*), avg(outcome), sum(len(plan_token_ids)), any_value(json_extract_string(tags, '$.team'))"
        ", any_value(steps[1].worker) FROM read_parquet(?) GROUP BY split ORDER BY split"
    )
    assert duckdb.execute(query, [str(out)]).fetchall() == [
        ("train", 3, pytest.approx(1 / 3), 9, "blue", "alpha"),
        ("validation", 2, 0.5, 6, "blue", "alpha"),
    ]


def verdict(by: str, accept: bool | None, worker: str | None = None) -> AttemptRecord:
    return AttemptRecord(T0_US, T0_US, worker=worker, verdict={"by": by, "accept": accept, "why": "because"})


def test_a_row_has_the_verdicts_of_its_request(database_url: str, add: Add, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the train extra is not installed")
    mended = [verdict("contract", False), verdict("contract", True), verdict("contract", True, "judge")]
    steps = [
        a_step(0, attempts=mended),
        a_step(1, "check", attempts=[verdict("verify", False)]),
        replace(a_step(2, attempts=[verdict("contract", False)]), round=2),
    ]
    root = add(1.0, rounds=[a_round(1), a_round(2)], steps=steps)
    child = add(None, at_s=1, parent_id=root.id, depth=1, steps=[a_step(0, attempts=[verdict("contract", None)])])
    plain = add(0.0, at_s=2, log_mode="redacted")
    found = {row.call: row.verdicts for row in read(database_url, Selection())}
    wanted = (
        StepVerdict(root.id, 1, 0, "contract", True, repaired=True, checker="judge"),
        StepVerdict(root.id, 1, 1, "verify", False, checker="check"),
        StepVerdict(root.id, 2, 2, "contract", False),
        StepVerdict(child.id, 1, 0, "contract", None),
    )
    assert found == {(root.id, 1): wanted, (root.id, 2): wanted, (child.id, 1): wanted, (plain.id, 1): ()}
    rules = Rules(key_share_max=1.0, tokens_required=False)
    export(database_url, Selection(), rules, tmp_path / "rows.parquet")
    assert {row.call: row.verdicts for row in parquet.read(tmp_path / "rows.parquet")} == found
    weights = RewardSettings(missed_penalty=0.03, repaired_penalty=0.01, rejected_penalty=0.01)
    export(database_url, Selection(), Rules(key_share_max=1.0), tmp_path / "rows.jsonl", "jsonl", reward=weights)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [len(one["verdicts"]) for one in lines] == [4, 4, 4, 0]
    assert lines[0]["verdicts"][0]["checker"] == "judge"
    assert [one["reward"] for one in lines] == [*[pytest.approx(0.95, abs=1e-4)] * 3, pytest.approx(0.1)]


def test_verl_rows_are_parquet_and_art_rows_are_lines(database_url: str, add: Add, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="the train extra is not installed")
    for index in range(4):
        add(float(index % 2), at_s=index)
    rules = Rules(key_share_max=1.0, validation_share=0.5)
    export(database_url, Selection(), rules, tmp_path / "verl.parquet", "verl", split="train")
    table = pq.read_table(tmp_path / "verl.parquet").to_pylist()
    assert [one["extra_info"]["split"] for one in table] == ["train", "train"]
    assert table[0]["responses"] == [10, 11, 12]
    assert {"data_source", "prompt", "ability", "reward_model", "extra_info"} <= set(table[0])
    export(database_url, Selection(), rules, tmp_path / "art.jsonl", "art")
    lines = [json.loads(line) for line in (tmp_path / "art.jsonl").read_text().splitlines()]
    assert [one["metrics"]["outcome"] for one in lines] == [0.0, 1.0, 0.0, 1.0]
    right = 1 - 400 / 2**7 * 805e-9  # at dial 7, as the prompt showed it, where time is free
    assert [one["reward"] for one in lines[:2]] == [pytest.approx(0.1), pytest.approx(right)]


def test_a_request_of_which_a_plan_was_refused_has_no_reward(database_url: str, add: Add, tmp_path: Path) -> None:
    add(1.0, rounds=[a_round(1), a_round(2, refusal="unknown_worker")])
    add(0.0, at_s=1)
    export(database_url, Selection(), Rules(key_share_max=1.0), tmp_path / "art.jsonl", "art")
    lines = [json.loads(line) for line in (tmp_path / "art.jsonl").read_text().splitlines()]
    assert [one["reward"] for one in lines] == [0.0, 0.0, pytest.approx(0.1)]


def test_an_export_is_the_same_twice_and_leaves_no_parts(database_url: str, add: Add, tmp_path: Path) -> None:
    for index in range(3):
        add(float(index % 2), at_s=index)
    out = tmp_path / "art.jsonl"
    killed = tmp_path / f".art.jsonl.{2**22 + 1}.partial"  # no process has such an id
    killed.write_bytes(b"half")
    running = tmp_path / f".art.jsonl.{os.getppid()}.partial"
    running.write_bytes(b"another's")
    export(database_url, Selection(), FEW_KEYS, out, "art")
    first = out.read_bytes()
    export(database_url, Selection(), FEW_KEYS, out, "art")
    assert out.read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([running.name, out.name])


def test_a_full_disk_or_a_lost_server_leaves_the_old_file(
    database_url: str, pg_server: PostgresServer, add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add()
    out = tmp_path / "art.jsonl"
    out.write_text("as it was")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(Unavailable, match="No space left on device; free some space"):
            export(database_url, Selection(), FEW_KEYS, out, "art")
    real = shapes.art

    def cut(*given: Any) -> Any:
        pg_server.shut(database_url)
        return real(*given)

    monkeypatch.setattr(shapes, "art", cut)
    with pytest.raises(Unavailable, match=r"PostgreSQL is away: .*run this again"):
        export(database_url, Selection(), FEW_KEYS, out, "art")
    assert out.read_text() == "as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["art.jsonl"]


def test_formats_of_conversations(database_url: str, add: Add, tmp_path: Path) -> None:
    add()
    pq = pytest.importorskip("pyarrow.parquet", reason="the train extra is not installed")
    forms: tuple[Format, ...] = ("hf", "jsonl", "sft")
    files = {form: tmp_path / form for form in forms}
    for form, path in files.items():
        export(database_url, Selection(), FEW_KEYS, path, form)
    (line,) = map(json.loads, files["jsonl"].read_text().splitlines())
    assert line["messages"][-1]["role"] == "assistant"
    assert pq.read_table(files["hf"]).to_pylist() == [line]
    assert json.loads(files["sft"].read_text()) == {"messages": line["messages"]}
    with pytest.raises(ConfigError, match="no two plans for the very same prompt have different rewards"):
        export(database_url, Selection(), FEW_KEYS, tmp_path / "dpo", "dpo")
    assert not (tmp_path / "dpo").exists()


def test_plans_of_a_hosted_planner_are_exported_as_text(database_url: str, add: Add, tmp_path: Path) -> None:
    """They were refused as `no_tokens`, which supervised training needs none of."""
    none: dict[str, Any] = {"prompt_token_ids": [], "plan_token_ids": [], "plan_logprobs": [], "decision_mask": []}
    plan = a_round().plan
    add(rounds=[a_round(**none, plan_text=f"Here is my plan:\n{json.dumps(plan)}")])
    add(rounds=[a_round(**none, plan_text=None, plan=None)])
    out = tmp_path / "sft.jsonl"
    report = export(database_url, Selection(), FEW_KEYS, out, "sft")
    (line,) = map(json.loads, out.read_text().splitlines())
    assert json.loads(line["messages"][-1]["content"]) == plan, "the plan, without the words before it"
    assert report.left_out == {"no_plan": 1}
    with pytest.raises(NotFound, match=r"2 no_tokens .*--method sft trains, and --format sft, dpo"):
        export(database_url, Selection(), FEW_KEYS, out, "art")


@pytest.mark.parametrize(("mode", "reason"), [("metadata", "metadata_only"), ("redacted", "redacted")])
def test_what_has_no_words_is_not_exported_as_text(
    database_url: str, add: Add, tmp_path: Path, mode: str, reason: str
) -> None:
    add(log_mode=mode, rounds=[a_round(prompt_token_ids=[], plan_token_ids=[], plan_logprobs=[], decision_mask=[])])
    with pytest.raises(NotFound, match=f"1 {reason} "):
        export(database_url, Selection(), FEW_KEYS, tmp_path / "sft.jsonl", "sft")


# ---------------------------------------------------------------- the command


def run(*arguments: str) -> int:
    return main(["traces", "export", *arguments])


def test_the_command_says_what_it_did(
    database_url: str, add: Add, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add()
    add(None)
    out = tmp_path / "art.jsonl"
    common = ("--database-url", database_url, "--format", "art", "--key-share", "1.0", "--out", str(out))
    assert run(*common) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"wrote {out}: 1 rows to train on, 0 to validate, mean outcome 1.000\n1 keys, ")
    assert "left out: 1 too_few_outcomes (post outcomes" in told.out
    assert told.err.startswith("warning: every outcome is 1")
    assert run(*common, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["train"], report["left_out"], report["out"]) == (1, {"too_few_outcomes": 1}, str(out))


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--pool", "absent"], 1, "no planning call matches pools=absent, planners=conductor, min_outcomes=1; the log"),
        (["--min-outcomes", "5"], 1, "nothing is left of 1 planning calls"),
        (["--since", "tomorrow"], 2, "--since `tomorrow` is not a time"),
        (["--since", "2026-02-01", "--until", "2026-01-01"], 2, "is not before until"),
        (["--tag", "team"], 2, "--tag `team` is not key=value"),
        (["--key-share", "0.05"], 2, "1 keys cannot each hold at most 0.05 of the rows, that takes 20"),
        (["--key-share", "7"], 2, "key share 7.0 is outside (0, 1]"),
        (["--out", "/nowhere/x.jsonl"], 2, "/nowhere/x.jsonl: No such file or directory; name a file"),
        (["--out", "/"], 2, "/ is a directory; name a file in it"),
        (["--split", "validation"], 2, "the validation side is empty: set --validation-share or --split-at"),
        (["--min-outcomes", "0"], 2, "--format art needs tokens and outcomes in every row"),
        (["--pool-file", "/absent.yaml"], 2, "--pool-file /absent.yaml: No such file or directory"),
        (["--pool-file", __file__], 2, "no pool file"),
        (["--database-url", "mysql://h/d"], 2, "Baton speaks postgresql:// only"),
        (["--database-url", "postgresql://u:hidden@127.0.0.1:1/d"], 1, "PostgreSQL is away: "),
    ],
)
def test_a_bad_export_is_one_line_and_writes_nothing(
    arguments: list[str],
    status: int,
    said: str,
    database_url: str,
    add: Add,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add()
    common = ("--database-url", database_url, "--key-share", "1.0", "--format", "art", "--out", str(tmp_path / "x"))
    assert run(*common, *arguments) == status
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert "hidden" not in told
    assert list(tmp_path.iterdir()) == []


def test_an_empty_log_and_a_foreign_database_say_so(database_url: str, empty_database_url: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="the log is empty"):
        export(database_url, Selection(), FEW_KEYS, tmp_path / "x", "art")
    with pytest.raises(ConfigError, match="this database has no Baton log"):
        export(empty_database_url, Selection(), FEW_KEYS, tmp_path / "x", "art")


def test_todays_pool_file_expires_other_versions(
    database_url: str, add: Add, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add()
    add(steps=[a_step(0, worker_version="0")])
    worker = '{name: alpha, handle: atlas, kind: openai, model: m, url: "http://127.0.0.1:1/v1", api_key: "env:ABSENT"}'
    beta = worker.replace("alpha", "beta").replace("atlas", "quill")
    pool = tmp_path / "pool.yaml"
    pool.write_text(f"workers: [{worker}, {beta}]\npools: {{default: [alpha, beta]}}\n")
    out = ("--format", "art", "--out", str(tmp_path / "x"), "--json", "--key-share", "1.0")
    assert run("--database-url", database_url, *out, "--pool-file", str(pool)) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == {"stale_worker": 1}
    assert run("--database-url", database_url, *out, "--pool-file", str(pool), "--keep-stale") == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == {}


def test_the_dispatcher_knows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["dance"]) == 2
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m policy COMMAND …; COMMAND is one of: traces")


def test_an_interrupted_command_says_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "export", interrupted)
    assert run("--database-url", "postgresql://h/d", "--out", str(tmp_path / "x")) == 130
    assert capsys.readouterr() == ("", "")


def test_without_pyarrow_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "pa", None)
    for form in ("parquet", "verl"):
        with pytest.raises(ConfigError, match="Parquet needs pyarrow: pip install"):
            export("postgresql://h/d", Selection(), FEW_KEYS, tmp_path / "x", form)


def test_a_terminal_sees_the_rows_go_by(
    database_url: str, add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    add()
    add()
    seen, piped = Terminal(), io.StringIO()
    export(database_url, Selection(), FEW_KEYS, tmp_path / "x", "art", progress=seen)
    assert seen.getvalue() == "\r1 of 2 rows\r2 of 2 rows\n"
    export(database_url, Selection(), FEW_KEYS, tmp_path / "x", "art", progress=piped)
    assert piped.getvalue() == ""


def test_a_batch_that_takes_too_long_says_how_to_ask_for_less(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "STATEMENT_TIMEOUT_S", 0.05)
    with pytest.raises(Unavailable, match="narrow --since and --until"), snapshot(database_url) as opened:
        opened.execute(text("SELECT pg_sleep(5)"))


def test_a_request_of_the_wrong_shape_is_a_group_of_its_own(database_url: str, add: Add) -> None:
    shapes_sent = [{"messages": "hello"}, {"messages": [{"role": "user", "content": ["text"]}]}, {"messages": [3]}, {}]
    for request in shapes_sent:
        add(request=request)
    assert len({row.group for row in read(database_url, Selection())}) == len(shapes_sent)


def test_the_same_words_are_the_same_question(database_url: str, add: Add) -> None:
    for question in ("What is  2+2?", "what is 2+2?\n", "What is 2+3?"):
        add(
            request={"messages": [{"role": "system", "content": question[::-1]}, {"role": "user", "content": question}]}
        )
    groups = [row.group for row in read(database_url, Selection())]
    assert len(set(groups)) == 2


def test_a_clock_that_was_set_back_makes_no_negative_latency(database_url: str, add: Add) -> None:
    add(created_us=T0_US, finished_us=T0_US - 5, steps=[a_step(0, finished_us=T0_US)])
    add(finished_us=0, steps=[a_step(0, finished_us=0)])
    found = [(row.latency_ms, row.steps[0].latency_ms) for row in read(database_url, Selection())]
    assert found == [(0.0, 0.0), (None, None)]


def test_the_gateways_command_finds_the_log(database_url: str, add: Add, tmp_path: Path) -> None:
    add()
    environment = {**os.environ, "DATABASE_URL": database_url, "BATON_DATA_DIR": str(tmp_path / "data")}
    arguments = ["traces", "export", "--format", "art", "--key-share", "1.0", "--json", "--out", "art.jsonl"]
    command = [sys.executable, "-m", "gateway", *arguments]
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["train"]) == (0, 1), done.stderr
    assert len((tmp_path / "art.jsonl").read_text().splitlines()) == 1


def test_the_page_names_every_column_and_reason() -> None:
    page = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
    names = [*Row.__slots__, *StepRow.__slots__, *(f"`{reason}`" for reason in REASONS)]
    assert [name for name in names if name not in page] == []


def test_a_share_of_the_traffic_can_be_asked_again(database_url: str, add: Add) -> None:
    def body(text: str, **more: Any) -> dict[str, Any]:
        return {"model": "baton", "messages": [{"role": "user", "content": text}], **more}

    graded = {"grader": "numeric", "reference": "4"}
    add(None, request=body("2+2?"))
    first = add(None, at_s=1, request=body("2+2?"), tags=graded, task_type="sums")
    plain = add(None, at_s=2, request=body("Write a poem."))
    add(None, at_s=3, request=body("Look it up.", tools=[{"type": "function"}]))
    add(None, at_s=4, request=body("4+4?"), log_mode="redacted")
    add(None, at_s=5, request=body("5+5?"), train=False)
    add(None, at_s=6, request=body("6+6?"), status="failed")
    add(None, at_s=7, request=body("the child's task"), parent_id=first.id, depth=1)
    add(None, at_s=8, request=body("7+7?"), tags={"grader": "numeric", "reference": "seven"})
    found, left_out = of_log(database_url, Selection(), 1.0, 0, "a rubric", 100)
    assert [(one.id, one.grader, one.gold) for one in found] == [
        (first.id, "numeric@2", "4"),
        (plain.id, "judge@1", None),
    ]
    assert found[0].domain == "sums"
    assert dict(left_out) == {
        "asked again later": 1,
        "with tools, whose results are not there": 1,
        "not logged in mode full": 1,
        "its grader cannot use its reference": 1,
    }
    capped, reasons = of_log(database_url, Selection(), 1.0, 0, None, 1)
    assert ([one.id for one in capped], reasons["over --questions-max"]) == ([plain.id], 2)
    capped, reasons = of_log(database_url, Selection(), 1.0, 0, None, 1, graded=True)
    assert ([one.id for one in capped], reasons["without a grader"]) == ([first.id], 2)
    with pytest.raises(ConfigError, match=r"no logged request can be asked again: .* not drawn"):
        of_log(database_url, Selection(), 1e-9, 0, None, 100)


def test_what_is_read_of_a_log_is_bounded(database_url: str, add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest ones, none too large, and all of them within a bound."""

    def ask(number: int, text: str) -> str:
        body = {"model": "baton", "messages": [{"role": "user", "content": text}]}
        return add(None, at_s=number, request=body, tags={"grader": "numeric", "reference": "4"}).id

    ids = [ask(number, f"{number}+{number}?") for number in range(6)]
    large = ask(6, "x" * 3000)
    monkeypatch.setattr(questions, "REQUESTS_MAX", 5)
    monkeypatch.setattr(questions, "REQUEST_BYTES_MAX", 2000)
    found, left_out = of_log(database_url, Selection(), 1.0, 0, None, 100)
    assert [one.id for one in found] == ids[2:]
    assert dict(left_out) == {"over 0 MiB": 1, "older than the latest 5": 2}
    assert large not in {one.id for one in found}
    monkeypatch.setattr(questions, "TEXT_BYTES_MAX", 2 * questions._bytes(found[0]))
    found, left_out = of_log(database_url, Selection(), 1.0, 0, None, 100)
    assert [one.id for one in found] == ids[4:]
    assert left_out["over 0 MiB of text in all"] == 2
