"""Replay workers say what was recorded, word for word, or that nothing was."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Sequence
from decimal import Decimal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from aiohttp.test_utils import TestServer
from openai import AsyncOpenAI

from gateway.adapters.upstream.pooled import pooled_workers
from gateway.core.loop.compose import SeenStep, step_messages
from gateway.core.loop.replies.answers import extract_answer, normalise
from gateway.core.pool.workers import PoolFile
from policy.simulators.recordings import BadRecording, load, models_in, read_prices
from policy.simulators.replay import CHECK_PATH, ReplaySpeaker, answer_check, main, pool_file, pool_yaml
from policy.simulators.server import RequestRefusal, WorkerServer, bill_nano, cuts_of
from tests.kit import Kit
from tests.kit import ask as ask_gateway

RECORDED = Path(__file__).resolve().parents[3] / "shared" / "replay"
PRICES = {
    "lab/model-a": {"input_usd_per_mtok": 0.15, "output_usd_per_mtok": 0.6},
    "model-b": {"input_usd_per_mtok": 5, "output_usd_per_mtok": 15},
}


def record(index: int, **more: Any) -> dict[str, Any]:
    said = '{"reasoning": "two and two\\nmake four", "answer": "4"}'
    return {
        "id": f"q{index}",
        "domain": "sums",
        "question": f"What is\n  2+2 (no. {index})?",
        "gold": "4",
        "input_tokens": 40 + index,
        "workers": {
            "model-b": {"output": said, "correct": True, "output_tokens": 17, "cost_usd": 0.1},
            "lab/a": {"output": "five ", "correct": False, "output_tokens": 2},
        },
        **more,
    }


def write(path: Path, *records: Any) -> Path:
    text = "".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    speaker = ReplaySpeaker(load(write(tmp_path / "r.jsonl.gz", record(0), record(1))), 0.01, 1000.0)
    server = TestServer(WorkerServer(speaker, unknown_code="no_recording").app())
    await server.start_server()
    async with httpx.AsyncClient(base_url=str(server.make_url("/")), timeout=120) as client:
        yield client
    await server.close()


def ask(model: str, text: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


async def test_the_recorded_answer_with_its_tokens(http: httpx.AsyncClient) -> None:
    async with AsyncOpenAI(base_url=f"{http.base_url}w/model-b/v1", api_key="none", max_retries=0) as client:
        body = ask("model-b", "What is 2+2 (no. 1)?")
        whole = await client.chat.completions.create(**body)
        stream = await client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    expected = record(1)["workers"]["model-b"]["output"]
    assert whole.choices[0].message.content == expected
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (41, 17)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert chunks[-1].usage == whole.usage


async def test_seen_replies_before_the_question_do_not_hide_it(http: httpx.AsyncClient) -> None:
    question = [{"role": "user", "content": record(0)["question"]}]
    messages = step_messages(question, None, [SeenStep(0, "x", None, "Answer: 9")])
    got = await http.post("/w/lab/a/v1/chat/completions", json={"model": "lab/a", "messages": messages})
    assert got.json()["choices"][0]["message"]["content"] == "five "


@pytest.mark.parametrize(
    ("model", "body"),
    [
        ("model-b", ask("model-b", "What is 2+3?")),
        ("model-b", {**ask("model-b", "What is 2+2 (no. 1)?"), "n": 2}),
        ("model-c", ask("model-c", "What is 2+2 (no. 1)?")),
    ],
)
async def test_nothing_recorded_is_an_honest_404(http: httpx.AsyncClient, model: str, body: dict[str, Any]) -> None:
    got = await http.post(f"/w/{model}/v1/chat/completions", json=body)
    assert (got.status_code, got.json()["error"]["code"]) == (404, "no_recording")


def test_a_model_that_skipped_a_question_has_no_recording(tmp_path: Path) -> None:
    gap = record(1, workers={"model-b": {"output": "", "output_tokens": 0}})
    speaker = ReplaySpeaker(load(write(tmp_path / "r.jsonl", record(0), "", gap)))
    assert speaker.workers == ("lab/a", "model-b")
    assert [list(choice) for choice in speaker.say("model-b", ask("", gap["question"])).choices] == [[""]]
    with pytest.raises(RequestRefusal, match="nothing recorded of `lab/a`"):
        speaker.say("lab/a", ask("", gap["question"]))
    with pytest.raises(RequestRefusal, match="no user message"):
        speaker.say("lab/a", {"messages": ["x", {"role": "system", "content": "x"}]})


def test_load_reads_only_the_named_models(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", record(0))
    assert load(path, ["model-b"]).models == ("model-b",)
    late = write(tmp_path / "late.jsonl", *(record(index) for index in range(120)), record(120, workers={"last": None}))
    assert models_in(late) == ("lab/a", "last", "model-b")
    with pytest.raises(BadRecording, match="no answers of `none`; drop it"):
        load(path, ["model-b", "none"])


BAD: list[tuple[Any, str]] = [
    ("{", "r.jsonl:2: not JSON"),
    ("[" * 100_000, "r.jsonl:2: not JSON"),
    ("[]", "r.jsonl:2: not an object"),
    (record(1, question=" "), "r.jsonl:2: `question` must be a text"),
    (record(1, workers=[]), "r.jsonl:2: `workers` must map"),
    (record(1, input_tokens="12"), "r.jsonl:2: `input_tokens` must be a whole number"),
    (record(1, input_tokens=True), "r.jsonl:2: `input_tokens` must be a whole number"),
    (
        record(1, workers={"m": {"output": 3, "output_tokens": 1}}),
        "r.jsonl:2: `workers.m.output` must be a text, or null",
    ),
    (record(1, workers={"m": "x"}), "r.jsonl:2: `workers.m` must be an object; give `output`"),
    (record(1, workers={"m": {"output": "x", "output_tokens": -1}}), r"r.jsonl:2: `workers.m.output_tokens` must"),
    *(
        (
            record(1, workers={"m": {"output": "x", "output_tokens": 1, "cost_usd": cost}}),
            r"r.jsonl:2: `workers.m.cost_usd` must be a number of dollars, at least 0; drop it",
        )
        for cost in ("0.1", -1, True, float("nan"), 1e300)
    ),
    *(
        (
            record(1, workers={"m": {"output": "x", "output_tokens": 1, "samples": samples}}),
            r"r.jsonl:2: `workers.m.samples" + complaint,
        )
        for samples, complaint in (
            ({}, "` must be a list of answers; drop it"),
            ([{"answer": "4", "output_tokens": 1}, 3], r"\[1\]` must be an object"),
            ([{"answer": 4, "output_tokens": 1}], r"\[0\].answer` must be a text"),
            ([{"answer": "4"}], r"\[0\].output_tokens` must be a whole number"),
        )
    ),
    (record(1, checks=[]), "r.jsonl:2: `checks` must map a model to its `valid`"),
    (record(1, checks={"m": {"valid": 1}}), "r.jsonl:2: `checks.m.valid` must be true or false"),
    (record(1, checks={"m": {"valid": True, "cost_usd": "1"}}), "r.jsonl:2: `checks.m.cost_usd` must be a number"),
    (record(0), "r.jsonl:2: the question stands in an earlier line"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_named_with_the_fix(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(BadRecording, match=message):
        load(write(tmp_path / "r.jsonl", record(0), line))


def test_files_that_are_no_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRecording, match="cannot be read"):
        load(tmp_path / "absent.jsonl")
    with pytest.raises(BadRecording, match="holds no recording"):
        load(write(tmp_path / "empty.jsonl"))
    fake = tmp_path / "fake.jsonl.gz"
    fake.write_text("{}")
    with pytest.raises(BadRecording, match="cannot be read"):
        load(fake)
    cut = write(tmp_path / "cut.jsonl.gz", record(0))
    cut.write_bytes(cut.read_bytes()[:-12])
    with pytest.raises(BadRecording, match="cannot be read"):
        load(cut)
    path = write(tmp_path / "r.jsonl", record(0), record(1))
    monkeypatch.setattr("policy.simulators.recordings.LINE_BYTES_MAX", 100)
    with pytest.raises(BadRecording, match=r"r.jsonl:1: line over 100 bytes"):
        load(path)
    monkeypatch.undo()
    monkeypatch.setattr("policy.simulators.recordings.QUESTIONS_MAX", 1)
    with pytest.raises(BadRecording, match=r"r.jsonl:2: over 1 questions"):
        load(path)


def test_recorded_dollars_are_rounded_once(tmp_path: Path) -> None:
    said = {"output": "one two three four", "output_tokens": 4, "cost_usd": 0.1234567891}
    speaker = ReplaySpeaker(
        load(write(tmp_path / "r.jsonl", record(0, workers={"m": said, "n": {**said, "cost_usd": None}})))
    )
    for model, whole, half in (("m", 123_456_790, 61_728_395), ("n", None, None)):
        body = ask(model, record(0)["question"])
        answer = speaker.say(model, body)
        assert bill_nano(answer, cuts_of(answer, body)) == whole
        assert bill_nano(answer, cuts_of(answer, {**body, "max_tokens": 2})) == half


def test_an_answer_without_text_has_a_stand_in_of_its_own(tmp_path: Path) -> None:
    bare = {"output_tokens": 3, "correct": True}
    rows = [record(index, workers={"m": bare, "n": {**bare, "output": None}, "o": None}) for index in (0, 1)]
    recordings = load(write(tmp_path / "r.jsonl", *rows))
    texts = [answer.text for each in recordings.by_question.values() for answer in each.answers.values()]
    assert len(set(texts)) == 4
    assert all(text.startswith("(no text recorded: ") for text in texts)
    assert recordings.models == ("m", "n")


def sampled() -> dict[str, Any]:
    draws = [{"answer": text, "output_tokens": 5, "correct": text == "4", "cost_usd": 0.5} for text in ("3", "5", "")]
    return {"output": "It is 4.", "output_tokens": 9, "correct": True, "cost_usd": 1, "samples": draws}


@pytest.mark.parametrize("more", [{"stream": True}, {"stop": "is"}, {"max_tokens": 3}, {"max_completion_tokens": 3}])
def test_an_answer_is_taken_apart_only_where_it_is_streamed_or_cut(tmp_path: Path, more: dict[str, Any]) -> None:
    speaker = ReplaySpeaker(load(write(tmp_path / "r.jsonl", record(0, workers={"m": sampled()}))))
    asked = ask("m", record(0)["question"])
    assert speaker.say("m", asked).choices == [["It is 4."]]
    assert speaker.say("m", asked | {"max_tokens": 9}).choices == [["It is 4."]]
    assert speaker.say("m", asked | more).choices == [["It", " is", " 4."]]


def test_samples_answer_repeated_calls_in_turn(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl", *(record(i, workers={"m": sampled(), "n": {**sampled(), "samples": []}}) for i in (0, 1))
    )
    recordings = load(path)

    def turns(seed: int | None, model: str = "m", calls: int = 5) -> list[str]:
        speaker = ReplaySpeaker(recordings, draws_seed=seed)
        speaker.say("m", ask("m", record(1)["question"]))  # another question does not count
        return ["".join(speaker.say(model, ask(model, record(0)["question"])).choices[0]) for _ in range(calls)]

    told = ["It is 4.", "<answer>3</answer>", "<answer>5</answer>", "<answer></answer>", "It is 4."]
    assert turns(0) == told
    assert turns(None) == turns(0, "n") == ["It is 4."] * 5
    assert {tuple(turns(seed)) for seed in range(1, 30)} > {tuple(told)}
    assert all(turns(seed) == turns(seed) and sorted(turns(seed)) == sorted(told) for seed in range(1, 30))
    speaker = ReplaySpeaker(recordings, draws_seed=0)
    said = [speaker.say("m", ask("m", record(0)["question"])) for _ in range(2)]
    assert [(each.completion_tokens, each.cost_nano) for each in said] == [(9, 10**9), (5, 5 * 10**8)]


def test_the_pool_file_tells_prices_and_no_brands(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", record(0))
    pool = PoolFile.model_validate(yaml.safe_load(pool_yaml(path, list(PRICES), PRICES, "http://127.0.0.1:9/")))
    assert pool.pools == {"replay": ("lab/model-a", "model-b", "vote")}
    worker = pool.worker("model-b")
    assert worker.price is not None
    assert worker.price.output_usd_per_mtok == Decimal(15)
    assert worker.url == "http://127.0.0.1:9/w/model-b/v1"
    assert worker.tags == ()
    for spec in pool.pool("replay"):
        assert "model" not in spec.handle
        assert "lab" not in spec.description
    with pytest.raises(BadRecording, match="no price of `model-c`"):
        pool_yaml(path, ["model-c"], PRICES, "http://127.0.0.1:9")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "r.jsonl", record(0))
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"model-b": PRICES["model-b"]}))
    pool = ["pool", str(path), "--base-url", "http://127.0.0.1:9", "--prices", str(prices)]
    assert main([*pool, "--workers", "model-b"]) == 0
    assert PoolFile.model_validate(yaml.safe_load(capsys.readouterr().out)).pools["replay"] == ("model-b", "vote")
    assert main(pool) == 2
    assert "no price of `lab/a`" in capsys.readouterr().err
    for text, complaint in (("{", "cannot be read as JSON"), ("[]", "must map a model")):
        prices.write_text(text)
        assert main(pool) == 2
        assert complaint in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "absent")]) == 2
    assert "cannot be read" in capsys.readouterr().err


async def _served(_app: object, host: str, port: int, port_file: Path | None) -> None:
    assert (host, port, port_file) == ("127.0.0.1", 0, Path("p"))


def test_serve_takes_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policy.simulators.replay.serve", _served)
    assert main(["serve", str(write(tmp_path / "r.jsonl", record(0))), "--port-file", "p"]) == 0


@pytest.mark.skipif(not RECORDED.exists(), reason="no folder of recorded answers beside the repository")
def test_the_real_recordings_are_served_whole_and_graded_alike() -> None:
    path = RECORDED / "zeroeval_dev.jsonl.gz"
    speaker = ReplaySpeaker(load(path))
    assert len(speaker.workers) == 15
    assert models_in(path) == speaker.workers
    agree = total = 0
    with gzip.open(path, "rt") as lines:
        for line in islice(lines, 0, None, 8):
            truth = json.loads(line)
            for model, recorded in truth["workers"].items():
                said = speaker.say(model, ask(model, truth["question"]))
                assert "".join(said.choices[0]) == recorded["output"]
                assert said.completion_tokens == recorded["output_tokens"]
                if truth["domain"] == "gsm8k":
                    total += 1
                    right = normalise(extract_answer(recorded["output"])) == normalise(str(truth["gold"]))
                    agree += right == recorded["correct"]
    assert agree / total > 0.95


def test_a_model_keeps_its_handle_in_any_company() -> None:
    prices = {name: {"input_usd_per_mtok": 1, "output_usd_per_mtok": 1} for name in "abcdefgh"}

    def handles(models: Sequence[str]) -> dict[str, str]:
        entries = pool_file(models, prices, "http://127.0.0.1:9")["workers"]
        return {entry["name"]: entry["handle"] for entry in entries}

    whole = handles("abcdefgh")
    assert handles("hgfedcba") == whole
    assert len(set(whole.values())) == len(whole)
    assert sum(handles("abc")[name] == whole[name] for name in "abc") >= 2


@pytest.mark.skipif(not RECORDED.exists(), reason="no folder of recorded answers beside the repository")
def test_tagged_answers_are_extracted_as_recorded() -> None:
    same = total = 0
    with gzip.open(RECORDED / "rgym_dev.jsonl.gz", "rt") as lines:
        for line in islice(lines, 0, None, 20):
            for recorded in json.loads(line)["workers"].values():
                if recorded["answer"]:
                    total += 1
                    same += extract_answer(recorded["output"]) == recorded["answer"].strip()
    assert same / total > 0.999


@pytest.mark.skipif(not RECORDED.exists(), reason="no folder of recorded answers beside the repository")
def test_every_real_sample_is_read() -> None:
    recordings = load(RECORDED / "rgym_dev.jsonl.gz")
    every = [answer for each in recordings.by_question.values() for answer in each.answers.values()]
    assert sum(len(answer.samples) for answer in every) == 26_292
    assert {len(answer.samples) for answer in every} == {0, 2}
    assert all(draw.cost_nano and draw.score is not None for answer in every for draw in answer.samples)


@pytest.mark.skipif(not RECORDED.exists(), reason="no folder of recorded answers beside the repository")
def test_every_real_check_is_read_or_counted() -> None:
    recordings = load(RECORDED / "agents_dev.jsonl.gz")
    every = [check for each in recordings.by_question.values() for check in each.checks.values()]
    assert (len(every), recordings.checks_unused) == (4709, 59)
    assert all(check.cost_nano for check in every)


FILES = [  # file, prices, models, questions, answers, answers that are missing
    ("zeroeval_dev", "prices", 15, 1732, 25_980, 0),
    ("rgym_dev", "rgym_prices", 9, 3622, 28_976, 3622),
    ("agents_dev", "agents_prices", 26, 485, 12_069, 541),
]


@pytest.mark.skipif(not RECORDED.exists(), reason="no folder of recorded answers beside the repository")
@pytest.mark.parametrize(("name", "prices", "models", "questions", "answers", "gaps"), FILES)
def test_every_row_of_the_real_recordings_is_read_or_counted(
    name: str, prices: str, models: int, questions: int, answers: int, gaps: int
) -> None:
    recordings = load(RECORDED / f"{name}.jsonl.gz")
    every = [answer for each in recordings.by_question.values() for answer in each.answers.values()]
    assert (len(recordings.models), len(recordings.by_question), len(every)) == (models, questions, answers)
    assert sum(recordings.gaps().values()) == gaps == models * questions - answers
    assert all(answer.cost_nano and answer.score is not None for answer in every)
    assert set(read_prices(RECORDED / f"{prices}.json")) >= set(recordings.models)


async def test_over_http_a_call_costs_what_was_recorded_and_a_check_is_a_tool(tmp_path: Path) -> None:
    checks = {"model-b": {"valid": True, "cost_usd": 0.02}, "lab/a": {"valid": False, "cost_usd": 0.01}}
    row = record(0, checks=checks)
    row["workers"]["model-b"]["cost_usd"] = 0.000123456
    path = write(tmp_path / "r.jsonl", row)
    speaker = ReplaySpeaker(load(path))
    app = WorkerServer(speaker).app()
    app.router.add_post(CHECK_PATH, partial(answer_check, speaker))
    server = TestServer(app)
    await server.start_server()
    prices = {"lab/a": PRICES["lab/model-a"], "model-b": PRICES["model-b"]}
    text = pool_yaml(path, ["lab/a", "model-b"], prices, str(server.make_url("/")))
    pool = PoolFile.model_validate(yaml.safe_load(text))
    handles = {spec.name: spec.handle for spec in pool.workers}
    plans = [
        [{"worker": handles["model-b"], "task": None, "see": []}, {"worker": "check", "task": None, "see": [0]}],
        [{"worker": handles["lab/a"], "task": None, "see": []}, {"worker": "check", "task": None, "see": [0]}],
    ]
    workers = pooled_workers(pool, {}, b"secret")
    kit = Kit([json.dumps({"steps": steps}) for steps in plans], workers, pools=pool)
    for stream in (False, True):
        first = await kit.serve(ask_gateway(row["question"], model="baton/conductor", stream=stream))
        steps = first.record.steps
        assert [step.status for step in steps] == ["done", "done"]
        kit.conductor._script = [json.dumps({"steps": plans[0]})]
        assert [step.reply for step in steps][1] == "valid"
        assert [step.cost_nano for step in steps] == [123_456, 20_000_000]
    kit.conductor._script = [json.dumps({"steps": plans[1]})]
    second = await kit.serve(ask_gateway(row["question"], model="baton/conductor"))
    assert [step.reply for step in second.record.steps][1] == "not valid"
    assert [step.cost_nano for step in second.record.steps][1] == 10_000_000  # its own, not the dearest
    async with httpx.AsyncClient(base_url=str(server.make_url("/"))) as client:
        for body, status in (
            ({"task": "?", "seen": []}, 400),
            ({"task": "?", "seen": [{"reply": "x"}]}, 404),
            ([], 400),
        ):
            assert (await client.post(CHECK_PATH, json=body)).status_code == status
    await workers.close()
    await server.close()
