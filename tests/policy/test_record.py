"""`baton record`: what workers answer becomes a replay file, under a cap, through kills, as it was."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.core.money.amounts import usd_to_nano
from gateway.errors import ConfigError
from policy.environments.replay import ReplayEnvironment
from policy.record.journal import RecordedDraw, RecordedVerdict, RecordJournal, opened
from policy.record.questions import of_file
from policy.record.replayfile import rows_of
from policy.simulators.recordings import load, read_prices
from policy.simulators.replay import ReplaySpeaker
from policy.simulators.server import RequestRefusal

ROOT = Path(__file__).resolve().parents[2]
RIGHT_NANO = 20 * 1_000 + 7 * 2_000  # 20 input and 7 output tokens at $1 and $2 per million


class FakeWorkers:
    """Workers over HTTP. `plain` is right; `wrong` is wrong; what others do is their name. `served`: calls by model."""

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()
        self.bodies: list[Mapping[str, Any]] = []
        self.pause_s = 0.0
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.complete)
        return app

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        model = body["model"]
        self.served[model] += 1
        self.bodies.append(body)
        await asyncio.sleep(self.pause_s)
        if model == "filtered":
            error = {"message": "against our policy", "code": "content_filter", "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=400)
        if model == "down":
            return web.json_response({"error": {"message": "no", "code": "x"}}, status=401)
        if model == "shaky" and self.served[model] % 2:
            return web.json_response({"error": {"message": "busy"}}, status=503, headers={"retry-after": "0"})
        message: dict[str, Any] = {"role": "assistant", "content": self.text(model, body)}
        if model == "shy":
            message = {"role": "assistant", "content": None, "refusal": "I cannot help with that."}
        usage = {"prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27}
        choice = {"index": 0, "message": message, "finish_reason": "length" if model == "cut" else "stop"}
        return web.json_response({"choices": [choice], "usage": usage})

    def text(self, model: str, body: Mapping[str, Any]) -> str:
        asked = body["messages"][-1]["content"]
        if model == "judge":
            return '{"reason": "so", "verdict": "partly"}'
        number = asked.split("+")[0].split()[-1] if isinstance(asked, str) else "0"
        right = f"Answer: {int(number) * 2}"
        return {"wrong": "Answer: -1", "draws": f"Answer: {self.served[model]}"}.get(model, right)


@pytest.fixture
async def fake() -> AsyncIterator[FakeWorkers]:
    workers = FakeWorkers()
    server = TestServer(workers.app())
    await server.start_server()
    workers.url = str(server.make_url("/v1"))
    yield workers
    await server.close()


def pool(folder: Path, url: str, *names: str, output: int = 100) -> Path:
    price = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}
    workers = [
        {"name": name, "handle": f"w{index}", "kind": "openai", "model": name, "url": url, "price": price,
         "output_tokens_max": output}
        for index, name in enumerate(names)
    ]  # fmt: skip
    path = folder / "pool.yaml"
    path.write_text(json.dumps({"workers": workers, "pools": {"default": list(names)}}))
    return path


def questions(folder: Path, *rows: Any) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def sums(count: int) -> list[dict[str, Any]]:
    return [{"id": f"q{n}", "question": f"What is {n}+{n}?", "gold": 2 * n, "task_type": "sums"} for n in range(count)]


async def started(folder: Path, *more: str) -> asyncio.subprocess.Process:
    arguments = ["--questions", str(folder / "questions.jsonl"), "--pool-file", str(folder / "pool.yaml")]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "policy", "record", "--out", str(folder / "r.jsonl"), "--json"),
        *(*arguments, *more),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def record(folder: Path, *more: str) -> dict[str, Any]:
    process = await started(folder, *more)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return dict(json.loads(out)) | {"said": err.decode()}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "r.jsonl").read_text().splitlines()]


def held(folder: Path) -> RecordJournal:
    journal = opened(folder / "r.jsonl.calls")
    journal.close()
    return journal


async def test_a_recording_is_served_and_trained_on(fake: FakeWorkers, tmp_path: Path) -> None:
    pool(tmp_path, fake.url, "plain", "wrong")
    questions(tmp_path, *sums(3), sums(1)[0])
    report = await record(tmp_path, "--usd-max", "1")
    assert (report["questions"], report["answers"], report["wanted"], report["failed"]) == (3, 6, 6, 0)
    assert "1 asked in an earlier line" in report["said"]
    assert report["spent_usd"] == f"{Decimal(6 * RIGHT_NANO) / 10**9:f}".rstrip("0")
    row = rows(tmp_path)[1]
    assert (row["id"], row["gold"], row["domain"], row["grader"]) == ("q1", "2", "sums", "exact@1")
    assert (row["workers"]["plain"]["correct"], row["workers"]["wrong"]["correct"]) == (True, False)
    prices = read_prices(tmp_path / "r.prices.json")
    assert prices["plain"] == {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0}
    recordings = load(tmp_path / "r.jsonl")
    answer = recordings.by_question[next(iter(recordings.by_question))].answers["plain"]
    assert (answer.cost_nano, answer.input_tokens, answer.output_tokens) == (RIGHT_NANO, 20, 7)
    env = ReplayEnvironment(recordings, prices)
    assert env.left_out == {}
    prompt = (env.prompts("train", env.count("train"), 0) + env.prompts("validation", env.count("validation"), 0))[0]
    best = env.oracle(prompt)
    (episode,) = await env.run(prompt, [best])
    assert (episode.outcome, episode.cost_nano, episode.workers) == (1.0, RIGHT_NANO, ("plain",))


async def test_a_killed_recording_goes_on_and_asks_nothing_twice(fake: FakeWorkers, tmp_path: Path) -> None:
    fake.pause_s = 0.05
    pool(tmp_path, fake.url, "plain", "wrong")
    questions(tmp_path, *sums(20))
    process = await started(tmp_path, "--usd-max", "1", "--concurrency", "4")
    while fake.served.total() < 17:
        await asyncio.sleep(0.01)
    process.kill()
    await process.wait()
    assert not (tmp_path / "r.jsonl").exists()
    journal_path = tmp_path / "r.jsonl.calls"
    lost = len(held(tmp_path).open_nano) or held(tmp_path).abandoned
    assert 1 <= lost <= 4
    known = len(held(tmp_path).answers)
    with journal_path.open("ab") as file:
        file.write(b'{"kind": "settle", "hold": 1')  # the line that a kill tore
    before = fake.served.total()
    report = await record(tmp_path, "--usd-max", "1")
    assert fake.served.total() - before == 40 - known
    assert (report["answers"], report["calls_lost"], len(rows(tmp_path))) == (40, lost, 20)
    worst_nano = usd_to_nano(report["spent_usd"]) - 40 * RIGHT_NANO
    assert worst_nano > lost * RIGHT_NANO  # what was cut off counts in full
    again = await record(tmp_path, "--usd-max", "1")
    assert (again["spent_now_usd"], fake.served.total()) == ("0", before + 40 - known)


async def test_the_cap_holds_before_each_call(fake: FakeWorkers, tmp_path: Path) -> None:
    pool(tmp_path, fake.url, "plain")
    questions(tmp_path, *sums(40))
    cap_nano = 10 * RIGHT_NANO + 300_000  # a call may cost more than it does: up to 200 000 of output alone
    cap = f"{Decimal(cap_nano) / 10**9:f}"
    report = await record(tmp_path, "--usd-max", cap, "--concurrency", "8")
    assert report["capped"]
    assert 5 <= report["answers"] < 40
    assert usd_to_nano(report["spent_usd"]) == fake.served.total() * RIGHT_NANO <= cap_nano
    assert "raise --usd-max" in report["said"]
    whole = await record(tmp_path, "--usd-max", "1")
    assert (whole["answers"], whole["capped"], fake.served.total()) == (40, False, 40)


async def test_errors_and_refusals_are_recorded_as_they_were(fake: FakeWorkers, tmp_path: Path) -> None:
    pool(tmp_path, fake.url, "plain", "filtered", "shy", "cut", "shaky", "down")
    questions(tmp_path, *sums(2))
    report = await record(tmp_path, "--usd-max", "1")
    assert (report["answers"], report["failed"]) == (10, 2)
    assert list(report["away"]) == ["down"]
    first = rows(tmp_path)[0]["workers"]
    assert first["filtered"] == {
        "output": "", "input_tokens": 0, "output_tokens": 0, "cost_usd": 0.0, "correct": False,
        "error": {"status": 400, "code": "content_filter", "message": "against our policy"},
    }  # fmt: skip
    assert (first["shy"]["refusal"], first["shy"]["output"]) == (True, "I cannot help with that.")
    assert (first["cut"]["finish_reason"], first["shaky"]["correct"], "down" in first) == ("length", True, False)
    speaker = ReplaySpeaker(load(tmp_path / "r.jsonl"))
    body = {"messages": [{"role": "user", "content": "What is 0+0?"}]}
    assert (speaker.say("shy", body).refusal, speaker.say("cut", body).finish_reason) == (True, "length")
    with pytest.raises(RequestRefusal, match="against our policy") as refused:
        speaker.say("filtered", body)
    assert (refused.value.status, refused.value.code) == (400, "content_filter")


async def test_samples_workers_and_questions_are_added_later(fake: FakeWorkers, tmp_path: Path) -> None:
    pool(tmp_path, fake.url, "draws", "plain")
    questions(tmp_path, *sums(1))
    await record(tmp_path, "--usd-max", "1", "--workers", "draws", "--samples", "2", "--concurrency", "1")
    questions(tmp_path, *sums(2))
    await record(tmp_path, "--usd-max", "1", "--samples", "3", "--concurrency", "1")
    found = rows(tmp_path)
    assert [row["id"] for row in found] == ["q0", "q1"]
    draws = found[0]["workers"]["draws"]
    assert [draws["output"], *(one["output"] for one in draws["samples"])] == ["Answer: 1", "Answer: 2", "Answer: 3"]
    assert len(found[1]["workers"]["plain"]["samples"]) == 2
    process = await started(tmp_path, "--usd-max", "1", "--temperature", "0.5")
    _, err = await process.communicate()
    assert (process.returncode, b"with other settings" in err) == (2, True)


async def test_a_judge_grades_what_has_no_gold(fake: FakeWorkers, tmp_path: Path) -> None:
    pool(tmp_path, fake.url, "plain", "judge")
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    last = {"role": "user", "content": "Say 1+1."}
    rows_in = [
        {"id": "a", "question": "Tell me of 3+3."},
        {"id": "b", "messages": [*history, last]},
        {"id": "c", "question": "Say 1+1.", "gold": "2", "grader": "numeric"},
        {"id": "d", "question": "Look at 4+4.", "images": ["data:image/png;base64,AAAA"]},
    ]
    questions(tmp_path, *rows_in)
    await record(tmp_path, "--usd-max", "1", "--judge", "judge")
    a, b, c, d = rows(tmp_path)
    assert (a["workers"]["plain"]["score"], b["workers"]["plain"]["score"]) == (0.5, 0.5)
    assert (c["workers"]["plain"]["correct"], c["grader"], d["workers"]["plain"]["score"]) == (True, "numeric@2", 0.5)
    assert (fake.served["judge"], fake.served["plain"]) == (3, 4)
    assert (b["question"], len(b["messages"]), "messages" in a) == ("Say 1+1.", 3, False)
    recordings = load(tmp_path / "r.jsonl")
    speaker = ReplaySpeaker(recordings)
    recorded_ids = {one.id for one in recordings.by_question.values()}
    assert recorded_ids == {"a", "b", "c", "d"}
    assert len(speaker.say("plain", {"messages": [*history, last]}).choices) == 1
    env = ReplayEnvironment(recordings, read_prices(tmp_path / "r.prices.json"))
    assert env.count("train") + env.count("validation") == 4  # a verdict on each answer is as good as gold


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "questions.jsonl:2: not JSON"),
        ("[]", "questions.jsonl:2: not an object"),
        ({"id": "x"}, "questions.jsonl:2: spec: give `question` or `messages`"),
        ({"question": "Hm?", "golden": 1}, "questions.jsonl:2: golden: "),
        ({"question": "Hm?", "images": ["x.png"]}, "questions.jsonl:2: images: an image is an http"),
        ({"question": "Hm?", "grader": "numeric"}, "questions.jsonl:2: reference: the grader `numeric` needs"),
        ({"question": "Hm?", "gold": "two", "grader": "numeric"}, "questions.jsonl:2: reference: numeric needs"),
        ({"question": "Hm?", "gold": "2", "grader": "nope"}, "questions.jsonl:2: grader: no grader `nope`"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "questions.jsonl:2: messages: the last message"),
    ],
)
def test_a_bad_row_names_its_line_and_field(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        of_file(questions(tmp_path, sums(1)[0], row), "", None)
    assert said in refused.value.message


def test_a_replay_file_is_a_questions_file(tmp_path: Path) -> None:
    row = {"id": "a", "question": "1+1?", "gold": "2", "input_tokens": 3, "workers": {"m": {"output": "2"}}}
    found, repeated = of_file(questions(tmp_path, row, {**row, "id": "b"}), "", None)
    assert ([one.id for one in found], repeated, found[0].grader) == (["a"], 1, "exact@1")


def test_costs_are_exact_to_the_nano(tmp_path: Path) -> None:
    journal = opened(tmp_path / "j")
    (question,), _ = of_file(questions(tmp_path, sums(1)[0]), "", None)
    journal.add_question(question)
    amounts = [0, 1, 7, 999_999_999, 123_456_789_012_345]
    for index, nano in enumerate(amounts):
        draw = RecordedDraw(question.key, f"w{index}", 0)
        answer = {"output": "0", "input_tokens": 1, "output_tokens": 1, "nano": nano}
        journal.settle(journal.hold(nano), nano, draw, answer)
        journal.grade(draw, RecordedVerdict(1.0, ""))
    (row,) = rows_of(journal)
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    (read,) = load(tmp_path / "r.jsonl").by_question.values()
    assert [read.answers[f"w{index}"].cost_nano for index in range(len(amounts))] == amounts
    with pytest.raises(ConfigError, match="another recording writes it"):
        opened(tmp_path / "j")
    journal.close()
    (tmp_path / "j").write_text('{"kind": "else"}\n')
    with pytest.raises(ConfigError, match="j:1: no line of a recording"):
        opened(tmp_path / "j")
