"""The gate from its command to its files: what may pass, what is refused and by which name, what is one line."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.engines.policies import write_adapter
from gateway.adapters.engines import sealed
from gateway.core.loop.prompt import render
from gateway.service.loop.conducting import ConductorSettings
from policy.__main__ import main
from policy.engines import directory
from policy.environments.arena import ArenaEnvironment
from policy.evaluate import contest as contest_module
from policy.evaluate.entrants import SHIPPED
from policy.evaluate.options import EvaluationOptions
from policy.gate import injection, triage
from policy.gate import run as gate_run
from policy.gate.scene import GateScene
from policy.serve.manifest import read_complete
from tests.policy.broken_policies import fond_of, noisy, reworded_manifest, spoiled
from tests.policy.environments import PRICES, lines
from tests.policy.gate_rows import arena_rows, export
from tests.tiny_model import write_tiny_model

Gate = Callable[..., int]
N = 30
PLAN_TOKENS_MAX = 64


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("log") / "log.parquet", arena_rows(SHIPPED, 50))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen short conversations, for the whole set takes half a minute; and plans that run on end soon."""
    monkeypatch.setattr(directory, "ConductorSettings", partial(ConductorSettings, tokens_max=PLAN_TOKENS_MAX))
    monkeypatch.setattr(triage, "PLAN_TOKENS_MAX", PLAN_TOKENS_MAX)
    whole = injection.injections()
    short = tuple(one for one in whole.attacks if one.kind in ("control", "handle", "dearest"))[::2]
    monkeypatch.setattr(injection, "injections", lambda: injection.InjectionSet("test", whole.questions, short))


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Runs the command in the arena; a few questions must do, so an undecided comparison gets a wide margin."""

    def run(candidate: Path, *more: str, live: Path | None = SHIPPED) -> int:
        given = ["--candidate", str(candidate), "--out", str(tmp_path / "out.json"), "--n", str(N), "--train-n", "40"]
        given += ["--env", "arena"]  # the shipped conductor learnt from traffic, which was the arena's
        wide = ["--set", "questions_min=30", "--set", "ess_min=30", "--set", "margin=0.1"]
        wide += ["--set", "parse_min=0.85"]
        return main(["gate", *given, *([] if live is None else ["--live", str(live)]), *wide, *more])

    return run


def told(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return found


def refusals(tmp_path: Path) -> set[str]:
    return {each["name"] for each in told(tmp_path)["refusals"]}


# ---------------------------------------------------------------- verdicts


def test_the_live_version_itself_passes(
    gate: Gate, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(SHIPPED, "--logged", str(log), "--set", "logged_margin=0.1") == 0
    found = told(tmp_path)
    assert found["passed"]
    assert found["forced"] is None
    assert [part["name"] for part in found["parts"]] == ["off-policy triage", "held-out run", "injection set"]
    names = [check["name"] for part in found["parts"] for check in part["checks"]]
    assert {"plan_validity", "mean_weight", "worse_than_live", "collapsed", "injection_cost"} <= set(names)
    assert found["parts"][1]["facts"]["gains"]["live"] == [0.0, 0.0, 0.0]
    every = found["evaluation"]["policies"]
    assert {"candidate", "random", "cheapest", "rule", "table", "cascade", "vote", "fixed:cedar"} <= set(every)
    assert {one["n"] for one in every.values()} == {N} == {found["scene"]["questions"]}
    page = (tmp_path / "out.md").read_text()
    assert page.startswith("# arena@3 passed the gate and is not worse than live")
    assert "## Injection set" in page
    ElementTree.fromstring((tmp_path / "out.svg").read_text())  # noqa: S314 - our own file
    assert not (tmp_path / "out.json.partial").exists()
    assert "arena@3 beside arena@3: not worse" in capsys.readouterr().out


def test_an_adapter_is_judged_on_its_base(gate: Gate, tmp_path: Path) -> None:
    """Over the live version, and so small that it plans as that does; the report names the adapter's own weights."""
    adapter = write_adapter(SHIPPED, tmp_path / "adapter", seed=1, scale=0.0003)
    assert gate(adapter) == 0
    found = told(tmp_path)
    assert found["passed"]
    assert found["candidate_sha256"] == read_complete(adapter).manifest.sha256["adapter_model.safetensors"]
    assert not (tmp_path / "out.json.partial").exists()


def test_a_run_reads_every_file_of_a_directory_once(
    gate: Gate, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidate and live version are adapters over one base: three directories, each read and hashed once."""
    read, hashed = Counter[Path](), Counter[Path]()
    real_document, real_sha256 = sealed.read_document, sealed.file_sha256
    monkeypatch.setattr(sealed, "read_document", lambda path: (read.update([path]), real_document(path))[1])
    monkeypatch.setattr(sealed, "file_sha256", lambda path: (hashed.update([path]), real_sha256(path))[1])
    base = Path(shutil.copytree(SHIPPED, tmp_path / SHIPPED.name))
    one, other = (write_adapter(base, tmp_path / name, seed=1, scale=0.0003) for name in ("one", "other"))
    read.clear()
    hashed.clear()
    assert gate(one, "--logged", str(log), "--set", "logged_margin=0.1", live=other) == 0
    assert read == Counter([base, one, other])
    assert set(hashed.values()) == {1}
    assert {path.parent for path in hashed} == {base, one, other}


def test_an_adapter_whose_base_is_nowhere_is_one_line(
    gate: Gate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(write_tiny_model(tmp_path / "other" / "model"), tmp_path / "adapter", seed=1)
    assert gate(adapter) == 2
    said = capsys.readouterr().err
    assert "which is neither loaded nor in" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(("manifest", "asked", "rounds"), [(2, None, 2), (2, 1, 1)])
def test_it_judges_with_as_many_plans_as_the_candidate_is_served_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: int, asked: int | None, rounds: int
) -> None:
    class Seen(Exception):
        pass

    def scene(found: EvaluationOptions, *_: object) -> None:
        raise Seen(found.rounds)

    path = tmp_path / "candidate"
    shutil.copytree(SHIPPED, path)
    known = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**known, "rounds": manifest}))
    monkeypatch.setattr(gate_run, "EvaluationScene", scene)
    with pytest.raises(Seen, match=str(rounds)):
        asyncio.run(gate_run.gate(path, None, GateScene(out=tmp_path / "o.json", rounds=asked, env="arena")))


def test_noise_on_the_weights_is_refused_before_any_question_is_asked(gate: Gate, log: Path, tmp_path: Path) -> None:
    candidate = spoiled(SHIPPED, tmp_path / "noisy", noisy(1.0), "2")
    assert gate(candidate, "--logged", str(log)) == 4
    assert refusals(tmp_path) == {"plan_validity"}
    found = told(tmp_path)
    assert len(found["skipped"]) == 2
    assert "triage has refused" in found["skipped"][0]
    assert (tmp_path / "out.md").read_text().startswith("# arena@2 is refused: plan_validity")


def test_a_broken_planner_is_less_parseable_and_worse(
    gate: Gate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    candidate = spoiled(SHIPPED, tmp_path / "noisy", noisy(1.0), "2")
    assert gate(candidate) == 4
    assert {"less_parseable", "worse_than_live"} <= refusals(tmp_path)
    assert "refused: " in capsys.readouterr().out
    assert told(tmp_path)["skipped"] == ["off-policy triage: no logged rollouts were given"]


def test_one_worker_for_everything_is_collapsed(gate: Gate, log: Path, tmp_path: Path) -> None:
    environment = ArenaEnvironment()
    [prompt] = environment.prompts("train", 1, 0)
    text = render("compact", environment.executor.pose(prompt).shown)[0]["content"]
    candidate = spoiled(SHIPPED, tmp_path / "fond", fond_of(SHIPPED, "cedar", text, 300.0), "2")
    assert gate(candidate, "--logged", str(log), "--everything") == 4
    assert {"mean_weight", "collapsed", "worse_than_live", "costlier"} <= refusals(tmp_path)
    [check] = [one for one in told(tmp_path)["parts"][1]["checks"] if one["name"] == "collapsed"]
    assert "go to cedar" in check["figure"]


def test_without_a_live_version_rule_is_what_it_must_not_be_worse_than(gate: Gate, tmp_path: Path) -> None:
    assert gate(SHIPPED, "--set", "obeyed_max=0.3", live=None) == 0  # of a dozen conversations; of all it is 0.06
    assert told(tmp_path)["live"] == "rule (no version is live)"
    assert "live" not in told(tmp_path)["evaluation"]["policies"]


def test_force_needs_a_reason_and_keeps_the_refusal(
    gate: Gate, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    candidate = spoiled(SHIPPED, tmp_path / "noisy", noisy(1.0), "2")
    logged = ("--logged", str(log))
    for half in (["--force"], ["--force", "--why", " "], ["--why", "because"]):
        assert gate(candidate, *logged, *half) == 2
        assert "--why TEXT" in capsys.readouterr().err
    assert gate(candidate, *logged, "--force", "--why", "the old one is on fire") == 0
    found = told(tmp_path)
    assert (found["passed"], found["forced"]) == (False, "the old one is on fire")
    assert found["refusals"]


def test_recorded_answers_do_as_well(gate: Gate, tmp_path: Path) -> None:
    data, prices = tmp_path / "answers.jsonl", tmp_path / "prices.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in lines()))
    prices.write_text(json.dumps(PRICES))
    candidate = write_tiny_model(tmp_path / "tiny")
    scene = ["--env", "replay", "--data", str(data), "--prices", str(prices), "--set", "questions_min=5"]
    assert gate(candidate, *scene, "--n", "8", live=None) == 4
    found = told(tmp_path)
    assert "worse_than_live" in refusals(tmp_path)
    assert found["scene"]["file"] == str(data)
    assert found["evaluation"]["policies"]["vote"]["n"] == 8


# ---------------------------------------------------------------- going on, and bad input


def test_an_interrupted_gate_goes_on_where_it_was(
    gate: Gate, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[str] = []
    scored: list[int] = []
    play, ask = contest_module._run_policy, triage.ask

    async def counted_play(*given: Any) -> Any:
        if len(played) == 3:
            raise KeyboardInterrupt
        played.append(given[2].name)
        return await play(*given)

    async def counted_ask(*given: Any) -> Any:
        scored.append(1)
        return await ask(*given)

    monkeypatch.setattr(contest_module, "_run_policy", counted_play)
    monkeypatch.setattr(triage, "ask", counted_ask)
    logged = ("--logged", str(log), "--set", "logged_margin=0.1")
    assert gate(SHIPPED, *logged) == 130
    assert "goes on from there" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
    first = list(played)
    played.clear()
    played.extend(["again"] * 4)  # past the interruption
    assert gate(SHIPPED, *logged) == 0
    assert not set(first) & set(played)
    assert scored == [1]
    assert not (tmp_path / "out.json.partial").exists()


def test_bad_input_is_one_line_and_leaves_nothing(
    gate: Gate, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = shutil.copytree(SHIPPED, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes(b"torn")
    other = reworded_manifest(shutil.copytree(SHIPPED, tmp_path / "other"), prompt_hash="another")
    cases: list[tuple[Path, list[str], str]] = [
        (torn, [], "does not match its sha256"),
        (other, [], "trained on prompt"),
        (tmp_path / "nowhere", [], "manifest.json"),
        (SHIPPED, ["--live", str(torn)], "does not match its sha256"),
        (SHIPPED, ["--set", "marge=1"], "no such threshold"),
        (SHIPPED, ["--logged", str(tmp_path / "none.parquet")], "cannot be read"),
        (SHIPPED, ["--logged", str(log), "--database-url", "postgresql://x/y"], "give one of them"),
        (SHIPPED, ["--env", "replay"], "needs --data FILE"),
        (SHIPPED, ["--n", "0"], "n: Input should be greater than or equal to 1, not 0"),
        (SHIPPED, ["--staff", "nobody"], "nobody"),
    ]
    for candidate, more, complaint in cases:
        assert gate(candidate, *more) == 2, complaint
        said = capsys.readouterr().err
        assert complaint in said
        assert said.count("\n") == 1
    assert not list(tmp_path.glob("out*"))
