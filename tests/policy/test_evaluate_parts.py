"""The pieces of `evaluate`: the conductor in this process, experience, curves, progress on a terminal, odd input."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.core.loop.plan import PlanLimits, plan_schema
from gateway.errors import ConductorError, VersionRefused
from gateway.service.ports.request import ConductorCall, ConductorChunk, ConductorEnd, Sampling
from policy.__main__ import main
from policy.engines.directory import read_conductors
from policy.engines.embedded import OnnxEngine, load_runtime, open_runtime
from policy.environments.sampling import SamplingProgress
from policy.evaluate.contest import PartialResults, ProgressPrinter
from policy.evaluate.plot import Point, scatter
from policy.serve.engine import Engine
from policy.statistics.tuning import Nearest, Observation, WorkerResult
from tests.policy.environments import PRICES, SUMS, line, lines
from tests.tiny_model import write_tiny_model

SCHEMA = plan_schema(PlanLimits(("atlas", "quill"), 3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    made = Engine(*load_runtime(read_conductors([model])[model]), 1)
    yield made
    made.close()


def call(text: str, schema: dict[str, object] | None = None) -> ConductorCall:
    return ConductorCall([{"role": "user", "content": text}], schema or SCHEMA, Sampling(tokens_max=64), 5.0)


async def test_the_conductor_in_this_process_says_what_a_server_would(engine: Engine) -> None:
    conductor = OnnxEngine(engine, "tiny@0")
    items = [item async for item in conductor.decode(call("Plan this."))]
    chunks = [item for item in items if isinstance(item, ConductorChunk)]
    end = items[-1]
    assert isinstance(end, ConductorEnd)
    assert "".join(chunk.text for chunk in chunks).startswith('{"steps":[')
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert len(ids) == sum(len(chunk.logprobs) for chunk in chunks) == end.usage.completion_tokens <= 64
    assert (end.model, end.usage.prompt_tokens) == ("tiny@0", len(end.prompt_token_ids))
    assert await conductor.ready()


async def test_a_prompt_without_room_and_a_bad_schema_are_refused(engine: Engine) -> None:
    conductor = OnnxEngine(engine, "tiny@0")
    for asked in (call("word " * 2000), call("Plan.", {"type": "no such type"})):
        with pytest.raises(ConductorError) as refused:
            [item async for item in conductor.decode(asked)]
        assert refused.value.reason == "refused"
    assert engine.in_flight == 0


def test_a_directory_that_cannot_be_loaded_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_conductors([model])[model]
    monkeypatch.setattr("policy.serve.runtime.GRAPH_FILE", "tokenizer.json")  # a file, and no graph
    with pytest.raises(VersionRefused, match=r"tiny/tokenizer.json: "):
        open_runtime(found, threads=1)


def test_experience_is_the_mean_over_the_nearest() -> None:
    def result(outcome: float, cost_nano: int) -> WorkerResult:
        return WorkerResult(outcome, cost_nano, "a", 0.5)

    observed = [
        Observation("Add the numbers 3 and 4", "", {"a": result(1.0, 10), "b": result(0.0, 30)}),
        Observation("Add the numbers 5 and 6", "", {"a": result(0.0, 20)}),
        Observation("Spell a colour of the rainbow", "", {"a": result(0.0, 999)}),
    ]
    near = Nearest(observed, 2).of("Add the numbers 8 and 9")
    a, b = near["a"], near["b"]
    assert (a.n, a.success_mean, a.cost_nano_mean, a.latency_ms_mean) == (2, 0.5, 15, 500)
    assert (b.n, b.success_mean, b.cost_nano_mean) == (1, 0.0, 30)
    assert Nearest(observed, 9).of("x")["a"].n == 3
    for bad in (([], 1), (observed, 0)):
        with pytest.raises(ValueError, match="needs questions to be near to"):
            Nearest(*bad)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter((100.0, 100.0, 100.01, 200.0, 200.0, 200.0))
    monkeypatch.setattr("time.monotonic", lambda: next(now_s))
    shown = Terminal()
    say = ProgressPrinter(shown)
    say.progress("long name", SamplingProgress(1, 4, 1.0, 2_000_000, 0.5))
    say.progress("long name", SamplingProgress(2, 4, 0.5, 3_000_000, 0.6))  # too soon
    say.done("short")
    assert shown.getvalue().count("\n") == 1
    first, last = shown.getvalue().strip("\r\n").split("\r")
    assert first == "long name: 1/4, right 1.000, $0.000 per 1,000, 0 s"
    assert last.rstrip() == "short"
    assert len(last) == len(first)  # nothing of the longer line is left behind


def test_elsewhere_progress_is_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter((0.0, 4.0, 6.0, 6.0))
    monkeypatch.setattr("time.monotonic", lambda: next(now_s))
    shown = io.StringIO()
    say = ProgressPrinter(shown)
    say.progress("x", SamplingProgress(1, None, 1.0, 0, 4.0))
    say.progress("x", SamplingProgress(2, None, 1.0, 1_000_000, 6.0))
    assert shown.getvalue() == "x: 2, right 1.000, $0.500 per 1,000, 6 s\n"


def test_somebody_elses_file_beside_the_rows_stays(tmp_path: Path) -> None:
    kept = PartialResults(tmp_path / "out.json")
    (kept.folder / "notes.txt").write_text("mine")
    kept.keep("abc", [])
    assert kept.rows("abc") == []
    kept.drop()
    assert [path.name for path in kept.folder.iterdir()] == ["notes.txt"]


def test_a_picture_of_equal_points_at_no_cost_can_be_drawn() -> None:
    points = [
        Point(f"<{kind}>", kind, 0.0, 1.0, 1.0, 1.0) for kind in ("fixed", "oracle", "tuned", "router", "conductor")
    ]
    drawn = scatter(points, {"dial": ["<fixed>", "<tuned>"]}, "a & b")
    assert "&lt;fixed&gt;" in drawn
    assert "a &amp; b" in drawn
    assert "nan" not in drawn


def test_a_dial_of_named_policies_and_ends_that_are_no_gap(tmp_path: Path) -> None:
    (tmp_path / "prices.json").write_text(json.dumps(PRICES))
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines()))
    files = ["--data", str(tmp_path / "r.jsonl"), "--prices", str(tmp_path / "prices.json")]
    more = ["--weak", "mid", "--strong", "cheap", "--curve", "mine=cheapest,fixed:dear", "--split", "all"]
    assert main(["evaluate", *files, *more, "--policy", "cheapest", "--out", str(tmp_path / "o")]) == 0
    found = json.loads((tmp_path / "o").read_text())
    assert [point["policy"] for point in found["curves"]["mine"]["points"]] == ["cheapest", "fixed:dear"]
    assert found["policies"]["cheapest"]["apgr"] is None  # cheap is no better than mid
    assert "| – |" in (tmp_path / "o.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "rule"], "no --out FILE.json"),
        (["--policy", "rule", "--out", "o.json"], "--env replay needs --data FILE and --prices FILE"),
        (["--policy", "rule", "--out", "o.json", "--env", "arena", "--split", "all"], "never runs out of questions"),
        (["--policy", "table:f", "--out", "o.json", "--env", "arena", "--n", "3"], "f: the arena tunes on its own"),
        (["--policy", "rule", "--out", "o.json", "--experience", "-1"], "--experience -1: must be between 0 and"),
        (["--policy", "rule", "--out", "o.json", "--quality", "10"], "--quality 10: the dial goes from 0 to 9"),
        (["--policy", "rule", "--out", "o.json", *("--quality", "3") * 2], "--quality: the same place is given twice"),
    ],
)
def test_arguments_that_go_nowhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_more_workers_than_there_are_handles_or_a_name_no_pool_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for names, message in (
        ([f"m{i}" for i in range(90)], "90 workers; a pool has at most"),
        (["a b"], "the pool of these"),
    ):
        (tmp_path / "prices.json").write_text(json.dumps({name: PRICES["mid"] for name in names}))
        (tmp_path / "r.jsonl").write_text(json.dumps(line(1, SUMS, dict.fromkeys(names, "2"), "2")) + "\n")
        files = ["--data", str(tmp_path / "r.jsonl"), "--prices", str(tmp_path / "prices.json")]
        assert main(["evaluate", *files, "--policy", "rule", "--out", str(tmp_path / "o.json")]) == 2
        assert message in capsys.readouterr().err
