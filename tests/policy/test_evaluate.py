"""`evaluate` from its arguments to its files: right figures, nothing tuned on what is asked, one line for bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gateway.core.loop.prompt import prompt_hash
from policy.__main__ import main
from policy.environments.base import split_of
from policy.evaluate import contest as contest_module
from policy.serve.manifest import read_complete, write_manifest
from tests.policy.environments import ABSENT, PRICES, RECORDED, SUMS, WORDS, line, lines
from tests.tiny_model import write_tiny_model

WORKERS = "cheap,mid,dear"
ROUTERS = ("random", "cheapest", "rule", "baton/vote", "baton/cascade")
TUNED = ("table", "cascade", "vote", "moa")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "answers.jsonl", lines())


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(PRICES))
    return path


@pytest.fixture
def evaluate(tmp_path: Path, data: Path, prices: Path) -> Callable[..., int]:
    """Runs the command on the recording; `*more` replaces or adds arguments."""

    def run(*more: str, data: Path = data, workers: str = WORKERS, out: Path = tmp_path / "out.json") -> int:
        given = ["--data", str(data), "--prices", str(prices), "--workers", workers, "--out", str(out)]
        return main(["evaluate", *given, *more])

    return run


def policies(*names: str) -> list[str]:
    return [part for name in names for part in ("--policy", name)]


def report(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


# ---------------------------------------------------------------- figures


def test_every_policy_is_judged_on_the_same_held_out_questions(
    evaluate: Callable[..., int], tmp_path: Path, model: Path
) -> None:
    assert evaluate(*policies("fixed:cheap", *ROUTERS, *TUNED, "oracle", str(model))) == 0
    found = report(tmp_path)
    held_out = [row for row in lines() if split_of(row["id"], 0.25) == "validation"]
    every = found["policies"]
    assert set(every) == {"fixed:cheap", "fixed:mid", "fixed:dear", *ROUTERS, *TUNED, "oracle", str(model)}
    assert {one["n"] for one in every.values()} == {len(held_out)} == {found["evaluated"]["questions"]}
    for worker in ("cheap", "mid", "dear"):
        right = sum(row["workers"][worker]["correct"] for row in held_out) / len(held_out)
        usd = (
            50 * float(PRICES[worker]["input_usd_per_mtok"]) + 100 * float(PRICES[worker]["output_usd_per_mtok"])
        ) / 1e3
        one = every[f"fixed:{worker}"]
        assert one["accuracy"] == pytest.approx(right)
        assert one["usd_per_1k"] == pytest.approx(usd)
        assert one["accuracy_ci"][0] <= right <= one["accuracy_ci"][1]
        assert (one["worker_share"], one["calls_per_task"], one["parse_rate"]) == ({worker: 1.0}, 1.0, 1.0)
    assert found["best_single"] == "fixed:mid"  # half of the sums and all of the words
    assert found["oracle"]["accuracy"] == every["oracle"]["accuracy"] == every["table"]["accuracy"] == 1.0
    assert every["cascade"]["usd_per_1k"] < every["table"]["usd_per_1k"]
    assert every["cascade"]["vs_best_single"]["only_this"] > 0 == every["cascade"]["vs_best_single"]["only_best_single"]
    assert every["vote"]["worker_share"]["vote"] == 0.25
    assert 0 <= every[str(model)]["parse_rate"] <= 1
    assert every[str(model)]["planning_tokens_per_task"] > 100
    assert sum(one["n"] for one in every["cascade"]["by_category"].values()) == len(held_out)
    assert found["tuned_on"][0]["questions"] == 80 - len(held_out)


def test_the_files_are_a_page_and_two_pictures(evaluate: Callable[..., int], tmp_path: Path) -> None:
    assert evaluate(*policies("cascade", "rule"), "--usd-weight", "0", "--usd-weight", "1e6") == 0
    page = (tmp_path / "out.md").read_text()
    for wanted in ("`cascade~0`", "`cascade~1e+06`", "arXiv:2403.12031", "| `rule` |", "out.svg", "other questions"):
        assert wanted in page
    for name in ("out.svg", "out-workers.svg"):
        ElementTree.fromstring((tmp_path / name).read_text())  # noqa: S314 - our own file
    assert not (tmp_path / "out.json.partial").exists()
    curve = report(tmp_path)["curves"]["cascade"]
    assert [point["policy"] for point in curve["points"]] == ["cascade~1e+06", "cascade~0"]
    single = report(tmp_path)["policies"]
    assert curve["aiq"] >= max(single[name]["aiq"] for name in ("cascade~0", "cascade~1e+06"))
    assert curve["usd_per_1k_at_best_single"] <= single["cascade~0"]["usd_per_1k"]


def test_a_table_of_another_file_leaves_every_question_to_be_asked(
    evaluate: Callable[..., int], tmp_path: Path
) -> None:
    other = write(tmp_path / "other.jsonl", [*lines(60)[20:60], *lines()[:3]])  # three of them are evaluated
    assert evaluate(*policies(f"table:{other}", "cascade", "fixed:*")) == 0
    found = report(tmp_path)
    assert found["evaluated"]["split"] == "all"
    assert found["evaluated"]["questions"] == 80
    [source] = found["tuned_on"]  # the cascade takes the same one
    overlap = {row["question"] for row in lines()} & {row["question"] for row in lines(60)[20:60]}
    assert source["left_out_because_evaluated"] == len(overlap) + 3
    assert source["questions"] == 43 - source["left_out_because_evaluated"]


def test_a_file_that_knows_only_some_workers_tunes_on_those(evaluate: Callable[..., int], tmp_path: Path) -> None:
    rows = [line(i, kind, {"mid": f"{i}", "stranger": "x"}, f"{i}") for i in range(100, 130) for kind in (SUMS, WORDS)]
    other = write(tmp_path / "other.jsonl", rows)
    assert evaluate(*policies(f"table:{other}")) == 0
    found = report(tmp_path)
    assert found["policies"][f"table:{other}"]["worker_share"] == {"mid": 1.0}
    assert found["tuned_on"][0]["workers_absent"] == ["cheap", "dear"]


def test_models_and_questions_never_seen_before(evaluate: Callable[..., int], tmp_path: Path, prices: Path) -> None:
    prices.write_text(json.dumps({name: PRICES["mid"] for name in ("lab/new one".replace(" ", "-"), "other")}))
    rows = [line(i, SUMS, {"lab/new-one": f"{2 * i}", "other": "0"}, f"{2 * i}") for i in range(40)]
    new = write(tmp_path / "new.jsonl", rows)
    assert evaluate(*policies("table", "rule"), data=new, workers="", out=tmp_path / "out.json") == 0
    assert report(tmp_path)["policies"]["table"]["accuracy"] == 1.0
    assert report(tmp_path)["best_single"] == "fixed:lab/new-one"


def test_the_arena_needs_no_file(tmp_path: Path) -> None:
    given = ["evaluate", "--env", "arena", "--staff", "held_out", "--n", "20", "--train-n", "60"]
    assert main([*given, *policies("table", "cheapest"), "--out", str(tmp_path / "out.json")]) == 0
    found = report(tmp_path)
    assert found["oracle"]["accuracy"] > found["policies"][found["best_single"]]["accuracy"]
    assert "cross-fitted" in found["oracle"]["kind"]
    assert found["evaluated"]["staff"] == "held_out"


def test_the_true_success_of_a_worker_is_shown_in_place_of_what_was_learnt(tmp_path: Path) -> None:
    scenery = ["--env", "arena", "--n", "40", "--out", str(tmp_path / "out.json")]
    assert main(["evaluate", *scenery, *policies("rule"), "--true-experience"]) == 0
    true = report(tmp_path)
    assert true["tuned_on"] == []
    assert main(["evaluate", *scenery, *policies("rule"), "--experience", "0"]) == 0
    assert true["policies"]["rule"]["accuracy"] > report(tmp_path)["policies"]["rule"]["accuracy"]


def test_without_questions_to_learn_from_nothing_is_shown_of_the_workers(
    evaluate: Callable[..., int], tmp_path: Path
) -> None:
    assert evaluate(*policies("rule"), "--split", "all") == 0
    assert report(tmp_path)["tuned_on"] == []
    assert "Nothing was learnt" in (tmp_path / "out.md").read_text()


def test_the_same_seed_gives_the_same_report(evaluate: Callable[..., int], tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        assert evaluate(*policies("random", "vote"), "--seed", "3", "--n", "9") == 0
        found.append((tmp_path / "out.json").read_text())
    assert found[0] == found[1]


# ---------------------------------------------------------------- interrupted, and bad input


def test_an_interrupted_run_goes_on_where_it_was(
    evaluate: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played = contest_module._run_policy
    names: list[str] = []

    async def stopping(*args: Any) -> Any:
        names.append(args[2].name)
        if args[2].name == "rule" and names.count("rule") == 1:
            raise KeyboardInterrupt
        return await played(*args)

    monkeypatch.setattr(contest_module, "_run_policy", stopping)
    assert evaluate(*policies("cheapest", "rule")) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.json.partial"]
    assert evaluate(*policies("cheapest", "rule")) == 0
    assert names[-1] == "rule"
    assert names.count("cheapest") == 1
    assert not (tmp_path / "out.json.partial").exists()
    whole = report(tmp_path)
    assert evaluate(*policies("cheapest", "rule")) == 0
    assert whole == report(tmp_path)


def test_rows_of_other_arguments_are_not_taken_for_these(
    evaluate: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest_module.PartialResults, "drop", lambda _self: None)
    assert evaluate(*policies("random"), "--seed", "1") == 0
    first = report(tmp_path)
    kept = sorted((tmp_path / "out.json.partial").iterdir())
    assert len(kept) == 5
    kept[0].write_text("{half")
    assert evaluate(*policies("random"), "--seed", "1") == 0
    assert report(tmp_path) == first
    assert evaluate(*policies("random"), "--seed", "2") == 0
    assert len(list((tmp_path / "out.json.partial").iterdir())) == 10


BAD: list[tuple[list[str], str]] = [
    ([], "no policy to evaluate"),
    (policies("fixed:nobody"), "fixed:nobody: no such worker; there are cheap, dear, mid"),
    (policies("no/such/dir"), "neither a policy directory nor one of baton/checked:A>B@CHECKER, fixed:WORKER"),
    (policies("cheapest", "cheapest"), "cheapest: named twice; drop one"),
    (policies("rule", "baton/rule"), "baton/rule: named twice, as `rule`"),
    ([*policies("rule"), "--workers", "cheap,none"], "has no answers of `none`"),
    ([*policies("rule"), "--workers", "cheap,none"], "(it has cheap, dear, mid)"),
    ([*policies("rule"), "--workers", "cheap,cheap"], "`cheap` is named twice"),
    ([*policies("rule"), "--workers", ","], "--workers names nothing"),
    ([*policies("rule"), "--n", "500"], "500 questions asked for: split validation has"),
    ([*policies("rule"), "--n", "0"], "--n 0: must be between"),
    ([*policies("table"), "--split", "all"], "no question is left to learn from"),
    ([*policies("table:/no/such.jsonl")], "/no/such.jsonl: cannot be read"),
    ([*policies("rule"), "--data", "/no/such.jsonl"], "/no/such.jsonl: cannot be read"),
    ([*policies("rule"), "--prices", "/no/such.json"], "/no/such.json: cannot be read"),
    ([*policies("rule"), "--weak", "nobody"], "--weak nobody: no such worker"),
    ([*policies("rule"), "--curve", "dial=rule,x"], "--curve dial: `x` is not among the policies"),
    ([*policies("rule"), "--curve", "dial"], "write NAME=POLICY"),
    ([*policies("rule"), "--cost-range", "3"], "write two numbers"),
    ([*policies("rule"), "--cost-range", "3,2"], "needs 0 ≤ LO < HI"),
    ([*policies("table"), "--usd-weight", "-1"], "must be 0 or more"),
    ([*policies("table"), "--usd-weight", "1", "--usd-weight", "1"], "the same weight is given twice"),
    ([*policies("vote"), "--workers", "cheap,mid"], "--policy vote: 2 workers are too few for a vote of 3"),
    ([*policies("rule"), "--env", "arena"], "--data is for --env replay"),
    ([*policies("rule"), "--out", "/no/such/out.json"], "--out /no/such/out.json: cannot be written"),
    ([*policies("rule"), "--out", "/"], "--out /: "),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_and_leaves_nothing(
    evaluate: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    before = sorted(tmp_path.iterdir())
    assert evaluate(*arguments) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1]
    assert not any("Traceback" in one for one in said)
    assert [path for path in sorted(tmp_path.iterdir()) if path not in before] == []


def test_bad_files_are_named_with_their_line(
    evaluate: Callable[..., int], tmp_path: Path, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(lines()[0]) + "\n{\n")
    assert evaluate(*policies("rule"), data=broken) == 2
    assert f"{broken}:2: not JSON" in capsys.readouterr().err
    rows = [
        {**row, "gold": None, "workers": {name: {**each, "correct": None} for name, each in row["workers"].items()}}
        for row in lines()
    ]
    ungraded = write(tmp_path / "ungraded.jsonl", rows)
    assert evaluate(*policies("rule"), data=ungraded) == 2
    assert "has a `gold` answer" in capsys.readouterr().err
    for found, complaint in (
        ({"cheap": PRICES["cheap"]}, "no price of `"),
        (PRICES | {"dear": {"input_usd_per_mtok": 1}}, "the price of `dear` cannot be used: 'output_usd_per_mtok'"),
        (PRICES | {"dear": {"input_usd_per_mtok": -1, "output_usd_per_mtok": 1}}, "the price of `dear` cannot be used"),
    ):
        prices.write_text(json.dumps(found))
        assert evaluate(*policies("rule")) == 2
        assert complaint in capsys.readouterr().err


def test_a_recording_without_these_workers_is_refused(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = write(tmp_path / "strange.jsonl", [line(1, SUMS, {"stranger": "2"}, "2")])
    assert evaluate(*policies("table"), "--train", str(strange)) == 2
    assert "says nothing of any of cheap, mid, dear" in capsys.readouterr().err


def test_weights_of_another_prompt_are_refused_by_name(
    evaluate: Callable[..., int], tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    manifest = read_complete(other).manifest
    object.__setattr__(manifest, "prompt_hash", prompt_hash("full"))
    write_manifest(other, manifest)
    assert evaluate(*policies(str(other))) == 2
    assert f"{other}: its weights were trained on prompt" in capsys.readouterr().err
    (other / "model.safetensors").write_bytes(b"cut")
    assert evaluate(*policies(str(other))) == 2
    assert "does not match its sha256" in capsys.readouterr().err


def test_a_full_disk_leaves_no_half_report(
    evaluate: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if Path(target).suffix == ".json" and Path(target).parent == tmp_path:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    assert evaluate(*policies("rule")) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.skipif(not RECORDED.exists(), reason=ABSENT)
def test_on_real_recordings_a_cascade_beats_the_best_single_model(tmp_path: Path) -> None:
    models = "gpt-4o-mini-2024-07-18,gemini-1.5-flash,Qwen2-72B-Instruct,Meta-Llama-3.1-70B-Instruct"
    files = ["--data", str(RECORDED / "zeroeval_dev.jsonl.gz"), "--prices", str(RECORDED / "prices.json")]
    given = [*files, "--workers", models, "--n", "437", "--train-n", "400", "--out", str(tmp_path / "out.json")]
    assert main(["evaluate", *given, *policies("cascade")]) == 0
    found = report(tmp_path)
    assert found["policies"]["cascade"]["accuracy"] > found["policies"][found["best_single"]]["accuracy"]
    assert found["oracle"]["accuracy"] > found["policies"]["cascade"]["accuracy"]
