"""What may be asked of a job, when one is due, and what is read off a running one."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.learn.train import absolute, described
from gateway.core.policies.jobs import JobSpec, option, read_policy, read_spec
from gateway.errors import BadRequest, ConfigError
from policy.jobs import watch
from policy.jobs.child import last_words
from policy.jobs.pipeline import gate_arguments
from policy.jobs.schedule import Schedule, due
from policy.jobs.select import changed, inputs
from policy.jobs.watch import Progress, Tail
from policy.jobs.worker import read_settings

NOW = datetime(2026, 1, 31, tzinfo=UTC)


# ---------------------------------------------------------------- what may be asked


def test_a_spec_comes_back_as_it_was_given() -> None:
    given = {"arguments": ["--env", "arena", "--set", "steps=3"], "gate": ["--n", "10"], "auto": True}
    assert read_spec(given).as_json() == given


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (None, "give an object"),
        ([], "give an object"),
        ({"arguments": "--env arena"}, "spec.arguments: give a list"),
        ({"arguments": ["--env", 1]}, "spec.arguments: give a list"),
        ({"arguments": ["--env", "arena", *["x"] * 300]}, "at most 256 texts"),
        ({"arguments": ["--env", "arena"], "gate": {}}, "spec.gate: give a list"),
        ({"arguments": ["--env", "arena"], "auto": 1}, "spec.auto: give true or false"),
        ({"arguments": ["--env", "arena"], "more": 1}, "unknown field `more`"),
        ({}, "--env is missing"),
        ({"arguments": ["--env"]}, "--env is missing"),
        ({"arguments": ["--env=mars"]}, "--env is `mars`"),
        ({"arguments": ["--env", "arena", "--out=/tmp"]}, "a job sets --out itself"),
        ({"arguments": ["--env", "logged", "--database", "x"]}, "a job sets --database itself"),
        ({"arguments": ["--env", "live"]}, "give --usd-max"),
        ({"arguments": ["--env", "live", "--usd-max", "0"]}, "buys nothing"),
        ({"arguments": ["--env", "live", "--usd-max", "0.00"]}, "buys nothing"),
        ({"arguments": ["--env", "live", "--usd-max", "-1"]}, "buys nothing"),
        ({"arguments": ["--env", "live", "--usd-max", "much"]}, "buys nothing"),
    ],
)
def test_what_could_not_be_carried_out_is_refused_by_name(spec: object, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_spec(spec)
    assert said in refused.value.message


def test_dollars_above_nothing_are_enough() -> None:
    assert read_spec({"arguments": ["--env", "live", "--usd-max", "0.01"]}).auto is False


@pytest.mark.parametrize("name", ["", "No", "a b", "1st", None, 7, "x" * 64])
def test_a_policy_has_a_plain_name(name: object) -> None:
    with pytest.raises(BadRequest, match="policy: give a name"):
        read_policy(name)


def test_the_last_of_an_option_counts() -> None:
    assert option(["--env", "arena", "--env=replay"], "--env") == "replay"
    assert option(["--environment", "arena"], "--env") is None


def test_files_are_named_by_their_whole_path_and_words_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "arena").mkdir()
    monkeypatch.chdir(tmp_path)
    given = ["--env", "arena", "--data", "a.jsonl", "--init=arena", "--prices"]
    whole = ["--env", "arena", "--data", f"{tmp_path}/a.jsonl", f"--init={tmp_path}/arena", "--prices"]
    assert absolute(given) == whole


def test_the_gate_judges_where_the_candidate_is_at_home() -> None:
    replay = JobSpec(("--env", "replay", "--data", "d", "--prices", "p", "--workers", "a,b", "--set", "steps=1"))
    assert gate_arguments(replay, None) == ["--env", "replay", "--data", "d", "--prices", "p", "--workers", "a,b"]
    logged = JobSpec(("--env", "logged"), gate=("--n", "50"))
    assert gate_arguments(logged, "rows.parquet") == ["--n", "50", "--env", "arena", "--logged", "rows.parquet"]
    named = JobSpec(("--env", "arena", "--staff", "fresh"), gate=("--staff", "standard"))
    assert gate_arguments(named, None) == ["--staff", "standard", "--env", "arena"]


# ---------------------------------------------------------------- when one is due


def schedule(outcomes_min: int = 0, every_s: float = 0.0) -> Schedule:
    return Schedule("conductor", outcomes_min, every_s, JobSpec(("--env", "logged")))


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


# ---------------------------------------------------------------- what is read off a running one


def test_progress_is_the_last_whole_line_with_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "progress.jsonl", [100.0]
    monkeypatch.setattr("policy.jobs.watch.time.monotonic", lambda: clock[0])
    progress = Progress(path)
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
    monkeypatch.setattr(watch, "JOB_LINES_MAX", 3)
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


def test_files_that_changed_are_named(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    known = inputs(["--env", "replay", "--data", str(data)])
    assert list(known) == [str(data)]
    assert changed(known) is None
    data.write_text("{}{}\n")
    assert changed(known) == str(data)
    with pytest.raises(ConfigError, match="name a file that the worker can read"):
        inputs(["--data", str(tmp_path / "missing")])


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
        "spec": {"arguments": ["--env", "arena", "--set", "a b=1"]},
        "version": None,
        "report": None,
        "error": None,
    }
    shown = described(json.loads(json.dumps(job)))
    assert (shown["state"], shown["step"]) == ("running, stopping", "3 of 9")
    assert (shown["spent"], shown["left"]) == ("$0.25", "about 2 min 5 s")
    assert shown["arguments"] == "--env arena --set 'a b=1'"
    assert not {"version", "report", "error", "parsed"} & set(shown)
