"""What may be asked of a job, when one is due, and what is read off a running one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gateway.adapters.host.supervisor import PROGRAMS_ROOT
from gateway.api.operator.jobs import read_spec
from gateway.cli.learn.train import described
from gateway.core.policies.jobs import JobSpec, read_policy, stored_spec, with_gate_cap
from gateway.errors import BadRequest, ConfigError
from policy.jobs import child
from policy.jobs.child import ProgressFile, Tail, last_words
from policy.jobs.known import known
from policy.jobs.pipeline import gate_spec
from policy.jobs.schedule import Schedule, due
from policy.jobs.select import changed, inputs
from policy.jobs.spec import job_spec
from policy.jobs.worker import read_settings
from policy.spec import checked
from policy.train.spec import TrainSpec
from scripts import job_schema

NOW = datetime(2026, 1, 31, tzinfo=UTC)


# ---------------------------------------------------------------- what may be asked


def test_a_spec_comes_back_as_it_was_given() -> None:
    given = {
        "train": {"env": "logged", "settings": {"steps": 3, "quality": [0, 9]}, "filters": {"pools": ["a"]}},
        "gate": {"n": 10, "thresholds": {"margin": 0.1}},
        "auto": True,
    }
    assert read_spec(given).as_json() == given
    assert stored_spec(given) == read_spec(given)
    assert read_spec({"train": {"env": "live", "usd_max": "0.01"}}).as_json()["auto"] is False


def test_the_schema_is_that_of_the_specs() -> None:
    assert job_schema.PAGE.read_text(encoding="utf-8") == job_schema.render(), "run `make docs`"
    Draft202012Validator.check_schema(job_schema.schema())


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "train: give an object"),
        ({"train": ["--env", "arena"]}, "train: give an object"),
        ({"arguments": ["--env", "arena"]}, "jobs store specs and no longer arguments"),
        ({"train": {}}, "train: 'env' is a required property"),
        ({"train": {"env": "mars"}}, "train.env: 'mars' is not one of"),
        ({"train": {"env": "arena"}, "auto": 1}, "auto: 1 is not of type 'boolean'"),
        ({"train": {"env": "arena"}, "more": 1}, "('more' was unexpected)"),
        ({"train": {"env": "arena", "settings": {"lr": 7}}}, "train.settings.lr: 7 is"),
        ({"train": {"env": "arena", "settings": {"speed": 7}}}, "train.settings: Additional properties"),
        ({"train": {"env": "arena", "name": "x" * 70_000}}, "over 65536 bytes"),
        ({"train": {"env": "arena"}, "gate": ["--n", "10"]}, "gate: ['--n', '10'] is not of type 'object'"),
        ({"train": {"env": "arena"}, "gate": {"n": 0}}, "gate.n: 0 is"),
        ({"train": {"env": "arena"}, "gate": {"thresholds": {"mood": 1}}}, "gate.thresholds: 'mood' is not one of"),
        ({"train": {"env": "logged", "database": "x"}}, "train.database: a job sets it itself"),
        ({"train": {"env": "logged", "export": "x"}}, "train.export: a job sets it itself"),
        ({"train": {"env": "live"}}, "train.usd_max: real workers cost real money"),
    ],
)
def test_a_bad_spec_is_refused_by_name(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_spec(spec)
    assert said in refused.value.message
    assert len(refused.value.message) < 500


def test_arguments_become_a_spec_of_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--env", "replay", "--data", "a.jsonl", "--init=arena", "--set", "steps=7", "--set", "decoupled=True"]
    spec = job_spec(words, "--n 50 --experience 0 --set margin=0.1 --data b.jsonl", auto=True)
    assert spec.train == {
        "env": "replay",
        "init": f"{tmp_path}/arena",
        "data": f"{tmp_path}/a.jsonl",
        "settings": {"steps": 7, "decoupled": True},
    }
    assert spec.gate == {"n": 50, "neighbours": 0, "thresholds": {"margin": 0.1}, "data": f"{tmp_path}/b.jsonl"}
    assert read_spec(spec.as_json()) == spec  # the published schema takes what the trainer's own program writes


def test_a_spec_file_is_the_spec_of_a_job(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text('{"env": "logged", "filters": {"pools": ["a"]}, "settings": {"advantage": "group"}}')
    spec = checked(TrainSpec, job_spec(["--spec", str(path)]).train)
    assert spec == checked(TrainSpec, json.loads(path.read_text()))
    path.write_text('{"env": "logged", "database": "postgresql://x"}')
    with pytest.raises(BadRequest, match=r"train\.database: a job sets it itself"):
        job_spec(["--spec", str(path)])


@pytest.mark.parametrize(
    ("words", "gate", "said"),
    [
        ([], "", "no --env"),
        (["--env=mars"], "", "argument --env: invalid choice: 'mars'"),
        (["--env", "arena", "--out=/tmp"], "", "a job sets --out itself"),
        (["--env", "logged", "--database", "x"], "", "a job sets --database itself"),
        (["--env", "arena", "--speed", "9"], "", "unrecognized arguments: --speed 9"),
        (["--env", "arena", "--engine", "trl"], "", "settings.engine"),
        (["--env", "arena", "--set", "lr=7"], "", "settings.lr"),
        (["--env", "logged", "--since", "soon"], "", "--since `soon` is not a time"),
        (["--env", "live"], "", "train.usd_max: real workers cost real money"),
        (["--env", "live", "--usd-max", "0.00"], "", "usd_max: 0.00 dollars allow nothing"),
        (["--env", "live", "--usd-max", "much"], "", "usd_max: much dollars allow nothing"),
        (["--env", "arena"], "--n 'x", "--gate: No closing quotation"),
        (["--env", "arena"], "--n x", "--gate: argument --n: invalid int value"),
        (["--env", "arena"], "--set mood=1", "--gate: --set mood=1: no such threshold"),
        (["--env", "arena"], "--set margin=-1", "--gate: threshold margin is -1.0"),
        (["--env", "arena"], "--data x", "--gate: --data is for --env replay"),
        (["--env", "arena"], "--candidate x", "--gate: unrecognized arguments: --candidate x"),
    ],
)
def test_arguments_that_no_job_could_have_are_one_line(words: list[str], gate: str, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        job_spec(words, gate)
    assert said in refused.value.message
    assert "\n" not in refused.value.message


def test_a_gate_gets_another_cap() -> None:
    spec = {"train": {"env": "live"}, "gate": {"usd_max": "1", "n": 5}, "auto": False}
    assert with_gate_cap(spec, "2.50") == {**spec, "gate": {"usd_max": "2.50", "n": 5}}
    for wrong in ("0", "-1", "much", "nan"):
        with pytest.raises(BadRequest, match="give dollars above 0"):
            with_gate_cap(spec, wrong)
    with pytest.raises(BadRequest, match="has no cap to raise"):
        with_gate_cap({"train": {"env": "arena"}, "gate": {}, "auto": False}, "2")


def test_a_job_of_an_older_release_says_how_to_submit_it_again() -> None:
    old = {"arguments": ["--env", "logged", "--tag", "team=a b"], "gate": ["--n", "10"], "auto": True}
    with pytest.raises(BadRequest) as refused:
        stored_spec(old)
    assert refused.value.message.endswith("`baton train submit --auto --gate '--n 10' --env logged --tag 'team=a b'`")


@pytest.mark.parametrize("name", ["", "No", "a b", "1st", None, 7, "x" * 64])
def test_a_policy_has_a_plain_name(name: object) -> None:
    with pytest.raises(BadRequest, match="policy: give a name"):
        read_policy(name)


def test_the_gate_judges_where_the_candidate_is_at_home() -> None:
    replay = JobSpec({"env": "replay", "data": "d", "prices": "p", "workers": ["a", "b"], "settings": {"steps": 1}})
    assert gate_spec(replay, None) == {"env": "replay", "data": "d", "prices": "p", "workers": ["a", "b"]}
    logged = JobSpec({"env": "logged"}, {"n": 50})
    assert gate_spec(logged, "rows.parquet") == {"n": 50, "env": "arena", "rows": "rows.parquet"}
    real = JobSpec({"env": "live", "url": "u", "key_file": "k", "pool_file": "p"}, {"usd_max": "2"})
    assert gate_spec(real, None, "requests.json") == {
        "env": "logged",
        "requests": "requests.json",
        "url": "u",
        "key_file": "k",
        "pool_file": "p",
        "usd_max": "2",
    }
    named = JobSpec({"env": "arena", "staff": "fresh"}, {"staff": "standard"})
    assert gate_spec(named, None) == {"env": "arena", "staff": "standard"}


# ---------------------------------------------------------------- when one is due


def schedule(outcomes_min: int = 0, every_s: float = 0.0) -> Schedule:
    return Schedule("conductor", outcomes_min, every_s)


@pytest.mark.parametrize(
    ("outcomes_min", "every_s", "ago_s", "outcomes", "expected"),
    [
        (500, 0, None, 499, False),
        (500, 0, None, 500, True),
        (500, 0, 60, 500, True),
        (0, 3600, None, 1, True),
        (0, 3600, 3599, 1, False),
        (0, 3600, 3600, 1, True),
        (0, 3600, 9999, 0, False),  # nothing new to learn from
        (500, 3600, 10, 500, True),
        (500, 3600, 3600, 3, True),
        (500, 3600, 10, 499, False),
        (0, 0, None, 10**6, False),
    ],
)
def test_a_policy_is_trained_again_when_enough_came_or_long_ago(
    outcomes_min: int, every_s: float, ago_s: float | None, outcomes: int, expected: bool
) -> None:
    last = None if ago_s is None else NOW - timedelta(seconds=ago_s)
    assert due(schedule(outcomes_min, every_s), last, outcomes, NOW) is expected


def test_neither_set_is_off() -> None:
    assert not schedule().on
    assert schedule(1).on
    assert schedule(0, 1).on


def test_a_schedule_that_no_job_could_have_names_the_setting() -> None:
    assert schedule().spec() == JobSpec({"env": "logged"})
    with pytest.raises(ConfigError, match="BATON_RETRAIN_ARGUMENTS: unrecognized arguments: --speed 9"):
        replace(schedule(), arguments=("--env", "logged", "--speed", "9")).spec()


# ---------------------------------------------------------------- what is read off a running one


def test_progress_is_the_last_whole_line_with_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "progress.jsonl", [100.0]
    monkeypatch.setattr("policy.jobs.child.time.monotonic", lambda: clock[0])
    progress = ProgressFile(path)
    assert progress.read() is None
    path.write_text('{"step": 2, "steps": 10}\n{"step": 3')
    assert progress.read() == {"step": 2, "steps": 10, "eta_s": None}
    assert progress.read() is None
    clock[0] = 130.0
    path.write_text('{"step": 2, "steps": 10}\nnot json\n{"step": 5, "steps": 10, "reward": 0.5}\n')
    assert progress.read() == {"step": 5, "steps": 10, "reward": 0.5, "eta_s": 50}  # ten seconds a step, five steps


def test_a_log_is_followed_by_whole_lines_and_not_lost_when_it_cannot_be_stored(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    tail = Tail(path)
    assert tail.take() == []
    with path.open("a") as file:
        file.write("one\n 10 %\r 90 %\rtwo\nthr")
    assert tail.take() == ["one", "two"]
    assert tail.take() == ["one", "two"]  # nobody took them
    tail.taken()
    with path.open("a") as file:
        file.write("ee\n\n")
    assert tail.take() == ["three"]


def test_a_log_without_end_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "JOB_LINES_MAX", 3)
    path = tmp_path / "log"
    path.touch()
    tail = Tail(path)
    seen = []
    for chunk in ("a\nb\n", "c\n", "d\n", "e\n"):
        with path.open("a") as file:
            file.write(chunk)
        seen.append(tail.take())
        tail.taken()
    assert seen == [["a", "b"], ["c"], [f"more in {path}"], []]


def test_last_words_are_those_of_this_run(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    assert last_words(path, 4) == ""
    with path.open("a") as file:
        file.write("half\rwhole\n\n")
    assert last_words(path, 4) == "whole"
    assert last_words(tmp_path / "none") == ""


@pytest.mark.parametrize(("worker", "program"), [(0, child.NICE), (child.NICE + 5, child.NICE + 5)])
def test_a_program_is_never_less_nice_than_its_worker(worker: int, program: int, tmp_path: Path) -> None:
    code = f"""
import asyncio, os, pathlib, sys
from policy.jobs import child
os.setpriority(os.PRIO_PROCESS, 0, {worker})
async def tick():
    pathlib.Path("{tmp_path}/started").touch()
program = "import os, time\\nwhile not os.path.exists('{tmp_path}/started'): time.sleep(0.01)\\nprint(os.nice(0))"
lock = os.open("lock", os.O_CREAT)
asyncio.run(child.run([sys.executable, "-c", program], pathlib.Path("log"), lock=lock, tick=tick, tick_s=0.1))
"""
    if os.getpriority(os.PRIO_PROCESS, 0) > worker and os.geteuid():
        pytest.skip("this process may not take back its own niceness")
    path = {"PYTHONPATH": str(PROGRAMS_ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=path, check=True, timeout=60)
    assert (tmp_path / "log").read_text().split() == [str(program)]


def test_files_that_changed_are_named(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    known = inputs(TrainSpec(env="replay", data=data))
    assert list(known) == [str(data)]
    assert changed(known) is None
    data.write_text("{}{}\n")
    assert changed(known) == str(data)
    with pytest.raises(ConfigError, match="name a file that the worker can read"):
        inputs(TrainSpec(env="replay", data=tmp_path / "missing"))


@pytest.mark.parametrize(
    ("content", "said"),
    [("[", "no JSON"), ("{}", "database_url: Field required"), ('{"colour": 1}', "Field required|Extra")],
)
def test_a_worker_told_nonsense_says_so_in_a_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "worker.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_settings(path)
    with pytest.raises(ConfigError, match="`baton worker` writes it"):
        read_settings(tmp_path / "none.json")


def test_a_job_is_described_for_a_person() -> None:
    job: dict[str, Any] = {
        "id": "01a1",
        "policy": "conductor",
        "state": "running",
        "stage": "train",
        "cancel": True,
        "progress": {"step": 3, "steps": 9, "reward": 0.5, "spent_usd": "0.25", "eta_s": 125},
        "attempts": 1,
        "by": "key:x",
        "created_at": "2026-01-31T00:00:00+00:00",
        "spec": {"train": {"env": "arena", "settings": {"steps": 9}}, "gate": {"n": 50}, "auto": False},
        "version": None,
        "report": None,
        "error": None,
    }
    shown = described(json.loads(json.dumps(job)))
    assert (shown["state"], shown["step"]) == ("running, stopping", "3 of 9")
    assert (shown["spent"], shown["left"]) == ("$0.25", "about 2 min 5 s")
    assert (shown["train"], shown["gate"]) == ("env=arena settings.steps=9", "n=50")
    old = described(job | {"spec": {"arguments": ["--env", "arena", "--set", "a b=1"]}})
    assert old["arguments"] == "--env arena --set 'a b=1'"
    assert not {"version", "report", "error", "parsed"} & set(shown)


def test_the_gateway_gives_its_gate_what_it_knows(tmp_path: Path) -> None:
    facts = tmp_path / "serve.json"
    assert known(facts, "5.00") == {"usd_max": "5.00"}, "no gateway serves here"
    facts.write_text(json.dumps({"base_url": "http://h/v1", "pool_file": "/pool.yaml", "data_key": "bt_data_x"}))
    key = tmp_path / "gate.key"
    assert known(facts, "") == {"url": "http://h/v1", "pool_file": "/pool.yaml", "key_file": str(key)}
    assert key.read_text() == "bt_data_x"
    assert key.stat().st_mode & 0o777 == 0o600
    facts.write_text(json.dumps({"base_url": "http://h/v1", "data_key": None}))
    assert known(facts, "") == {"url": "http://h/v1"}, "a database of one's own: the first keys are not the gateway's"
