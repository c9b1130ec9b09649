"""The recipe of the shipped conductor: which stages are left, and what it refuses. Stages themselves are programs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from policy.recipes import conductor
from policy.recipes.conductor import GateRefused, Places, job_of, main, parser, run_stages, start
from policy.recipes.learning import NO_TORCH
from policy.recipes.operator import Operator
from policy.recipes.stack import Gateway, RecipeFailed, replace_directory


class Commands:
    """Stands for an operator whose job is `state`; keeps what it was asked."""

    def __init__(self, state: str, data: Path) -> None:
        self.state = state
        self.data = data
        self.said: list[tuple[str, ...]] = []

    async def baton(self, *words: str) -> tuple[int, str]:
        self.said.append(words)
        return 0, json.dumps({"state": self.state})

    async def submit(self, words: Sequence[str]) -> str:
        self.said.append(("submit", *words))
        return "job-1"

    async def follow(self, job: str) -> tuple[int, dict[str, Any]]:
        self.said.append(("follow", job))
        (self.data / "jobs" / job).mkdir(parents=True, exist_ok=True)
        for report in ("gate.json", "gate.md"):
            (self.data / "jobs" / job / report).write_text("judged")
        return 0, {"id": job, "state": "done"}


def asked(operator: Commands, places: Places, *words: str) -> dict[str, Any]:
    return asyncio.run(job_of(cast(Operator, operator), places, "practice", words))


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What would have been run; each evaluation writes the file that its --out names."""
    ran: list[tuple[str, ...]] = []

    def run(_python: str, *words: str) -> None:
        ran.append(words)
        if words[:2] == ("policy", "evaluate"):
            Path(words[words.index("--out") + 1]).write_text("{}")

    monkeypatch.setattr(conductor, "run_program", run)
    return ran


def policy_directory(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")


# ---------------------------------------------------------------- the warm start


def test_the_start_goes_on_from_its_checkpoint_and_is_passed_over_when_it_is_there(
    places: Places, programs: list[tuple[str, ...]]
) -> None:
    start(places, "python", None)
    (places.out / "start.work").mkdir()
    (places.out / "start.work" / "checkpoint.pt").touch()
    start(places, "python", 12)
    policy_directory(places.start)
    start(places, "python", None)
    assert [("--resume" in words, "--steps" in words) for words in programs] == [(False, False), (True, True)]


# ---------------------------------------------------------------- the job


def test_a_job_is_submitted_once_and_followed_again(places: Places) -> None:
    operator = Commands("running", places.out)
    assert asked(operator, places, "--env", "arena")["state"] == "done"
    asked(operator, places, "--env", "arena")
    assert [words[0] for words in operator.said] == ["submit", "follow", "train", "follow"]
    assert (places.out / "practice-gate.md").read_text() == "judged"


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_job_that_broke_off_is_resumed(places: Places, state: str) -> None:
    places.job("practice").write_text(json.dumps({"id": "job-1", "words": ["--env", "arena"]}))
    operator = Commands(state, places.out)
    asked(operator, places, "--env", "arena")
    assert ("train", "resume", "job-1") in operator.said


def test_a_job_of_other_arguments_is_not_taken_for_this_one(places: Places) -> None:
    places.job("practice").write_text(json.dumps({"id": "job-1", "words": ["--env", "logged"]}))
    with pytest.raises(RecipeFailed, match="other arguments"):
        asked(Commands("done", places.out), places, "--env", "arena")


# ---------------------------------------------------------------- the whole


def test_a_finished_part_does_not_run_again(
    places: Places, programs: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for directory in (places.start, places.conductor):
        policy_directory(directory)
    (places.conductor / "manifest.json").write_text(json.dumps({"config": {"init": str(places.start)}}))
    monkeypatch.setattr(conductor, "SHIPPED", tmp_path / "shipped")
    options = parser().parse_args(["--out", str(places.out), "--ship", "arena-9"])
    run_stages(options, places)
    run_stages(options, places)
    assert all({str(places.start), str(places.conductor)} <= set(words) for words in programs)
    assert len(programs) == len(json.loads(places.figures.read_text())) == 6
    shipped = json.loads((tmp_path / "shipped" / "arena-9" / "manifest.json").read_text())
    assert shipped == {"config": {"init": "start"}}


def test_a_refusal_ends_with_the_gates_words_and_ships_nothing(
    places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy_directory(places.start)

    @contextmanager
    def find_live(_places: Places, _python: str) -> Iterator[tuple[Gateway, Path]]:
        yield cast(Gateway, None), places.out

    async def refused(*_: object) -> None:
        raise GateRefused("the gate refused it: costlier")

    monkeypatch.setattr(conductor, "has_torch", lambda _: True)
    monkeypatch.setattr(conductor, "stage", find_live)
    monkeypatch.setattr(conductor, "run_loop", refused)
    assert main(["--out", str(places.out)]) == 4
    assert capsys.readouterr().err == "the gate refused it: costlier\n"
    assert not places.conductor.exists()


def test_a_directory_is_copied_whole_and_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    for name, text in (("old", "1"), ("new", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(text)
    replace_directory(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["new"]
    assert not (tmp_path / ".old.tmp").exists()


def test_without_torch_it_says_how_to_install_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--python", "/bin/false"]) == 2
    assert capsys.readouterr().err.strip() == NO_TORCH
