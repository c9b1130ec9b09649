"""`evaluate --policy http://…#MODEL` and `worker:NAME`: a planner behind a URL is judged like a directory of its plans,
and a server that fails ends the run in one line and leaves what was finished."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml

from gateway.core.loop.prompt import prompt_hash
from gateway.errors import ConfigError
from policy.__main__ import main
from policy.engines import endpoint as engine_module
from policy.evaluate import contest as contest_module
from policy.evaluate import endpoint as endpoint_module
from policy.evaluate.entrants import SHIPPED
from policy.serve.engine import Slots
from policy.serve.server import create_app
from policy.serve.versions import Versions
from tests.policy.environments import PRICES, handle, lines, recorded
from tests.upstreams.server import Handler, Reply, Request, Server, event, event_stream, json_reply

KEY = "sk-very-secret"
Reports = Callable[..., tuple[int, dict[str, Any]]]


class Planner:
    """A scripted server that answers every call with the text `plan`. `fails` gives another reply to a call by its
    number; after `hangs_after` calls it stays silent."""

    def __init__(self, plan: str, owned_by: str = "vllm", baton: dict[str, Any] | None = None) -> None:
        self.plan, self.entry = plan, {"id": "m", "owned_by": owned_by} | ({"baton": baton} if baton else {})
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.fails: Callable[[int], Reply | None] = lambda _number: None
        self.hangs_after: int | None = None
        self.open = self.open_max = 0

    async def __call__(self, request: Request) -> Reply:
        self.keys.add(request.headers.get("authorization", ""))
        if request.path.endswith("/models"):
            return json_reply({"data": [self.entry]})
        self.bodies.append(request.body)
        number = len(self.bodies)
        if self.hangs_after is not None and number > self.hangs_after:
            await asyncio.sleep(60)
        self.open += 1
        self.open_max = max(self.open_max, self.open)
        await asyncio.sleep(0.005)
        self.open -= 1
        return self.fails(number) or self.says(self.plan)

    def says(self, text: str) -> Reply:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
        return event_stream(
            [event({"model": "m", "choices": [choice]}), event({"choices": [], "usage": usage}), event("[DONE]")]
        )


@contextmanager
def on_thread(handler: Handler) -> Iterator[str]:
    """The scripted server on a thread of its own; gives its base URL."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    stop, urls = asyncio.Event(), []

    async def serve() -> None:
        async with Server(handler) as server:
            urls.append(server.url)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    started.wait(60)
    try:
        yield f"{urls[0]}/v1"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WAITS_S", (0.01, 0.01))


@pytest.fixture
def evaluate(tmp_path: Path) -> Reports:
    """Runs the command on the recording; gives its status and its report."""
    data, prices = tmp_path / "answers.jsonl", tmp_path / "prices.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in lines()))
    prices.write_text(json.dumps(PRICES))

    def run(*more: str, out: str = "out.json") -> tuple[int, dict[str, Any]]:
        given = ["--data", str(data), "--prices", str(prices), "--workers", "cheap,mid,dear"]
        path = tmp_path / out
        path.unlink(missing_ok=True)
        status = main(["evaluate", *given, "--out", str(path), *more])
        return status, json.loads(path.read_text()) if path.exists() else {}

    return run


@pytest.fixture
def calls_mid(tmp_path: Path) -> str:
    environment = recorded(tmp_path / "handles.jsonl", lines())
    mid = handle(environment.prompts("validation", 1, 0)[0], "mid")
    return json.dumps({"steps": [{"worker": mid, "task": None, "see": []}]})


def test_plans_of_an_endpoint_score_as_the_same_plans_do_elsewhere(evaluate: Reports, calls_mid: str) -> None:
    planner = Planner(calls_mid)
    with on_thread(planner) as url:
        status, report = evaluate("--rounds", "1", "--policy", f"{url}#m", "--planner-calls", "3")
    assert status == 0
    mine, mid = report["policies"][f"{url}#m"], report["policies"]["fixed:mid"]
    for figure in ("accuracy", "accuracy_ci", "usd_per_1k", "calls_per_task", "worker_share", "by_category"):
        assert mine[figure] == mid[figure]
    assert mine["planning_tokens_per_task"] == 1100
    assert len(planner.bodies) == mine["n"]
    assert 1 < planner.open_max <= 3
    assert {body["temperature"] for body in planner.bodies} == {0.0}
    facts = report["planners"][f"{url}#m"]
    assert (facts["model"], facts["prompt"], facts["price"]) == ("m", "guided", endpoint_module.UNPRICED)


def test_planning_is_paid_and_the_key_stays_out_of_the_report(
    evaluate: Reports,
    calls_mid: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PLANNER_KEY", KEY)
    planner = Planner(calls_mid)
    with on_thread(planner) as url:
        given = ["--rounds", "1", "--policy", f"{url}#m", "--planner-key", "env:PLANNER_KEY", "--planner-price", "2,10"]
        status, report = evaluate(*given)
    assert status == 0
    assert planner.keys == {f"Bearer {KEY}"}
    mine, mid = report["policies"][f"{url}#m"], report["policies"]["fixed:mid"]
    assert mine["usd_per_1k"] - mid["usd_per_1k"] == pytest.approx(1000 * 2e-3 + 100 * 10e-3)
    page = (tmp_path / "out.md").read_text()
    assert f"Planner `{url}#m`: model `m` at {url}, prompt guided, temperature 0, $2 and $10" in page
    printed = "".join(capsys.readouterr())
    assert not [text for text in (json.dumps(report), page, printed) if KEY in text]


def test_a_worker_of_the_pool_file_plans_at_its_price(
    evaluate: Reports, calls_mid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_KEY", KEY)
    planner = Planner(calls_mid)
    with on_thread(planner) as url:
        price = {"input_usd_per_mtok": 1, "output_usd_per_mtok": 1}
        worker = {"name": "big", "handle": "big", "kind": "openai", "url": url, "model": "m", "price": price}
        hosted = {"name": "hosted", "handle": "host", "kind": "litellm", "model": "anthropic/x", "price": price}
        workers = [worker | {"api_key": "env:WORKER_KEY"}, hosted | {"api_key": "env:NOT_SET"}]
        pool = tmp_path / "pool.yaml"
        pool.write_text(yaml.safe_dump({"workers": workers, "pools": {"default": ["big", "hosted"]}}))
        status, report = evaluate("--rounds", "1", "--policy", "worker:big", "--pool-file", str(pool))
    assert status == 0
    assert planner.keys == {f"Bearer {KEY}"}
    mine, mid = report["policies"]["worker:big"], report["policies"]["fixed:mid"]
    assert mine["accuracy"] == mid["accuracy"]
    assert mine["usd_per_1k"] - mid["usd_per_1k"] == pytest.approx(1.1)
    assert report["planners"]["worker:big"]["url"] == url


def test_prose_is_a_plan_that_failed(evaluate: Reports) -> None:
    planner = Planner("I would ask the second worker, as it is good at sums.")
    with on_thread(planner) as url:
        status, report = evaluate("--policy", f"{url}#m")
    assert status == 0
    mine = report["policies"][f"{url}#m"]
    assert (mine["parse_rate"], mine["accuracy"]) == (0.0, 0.0)
    assert sum(mine["refusals"].values()) == mine["n"]


def test_a_refused_prompt_is_a_plan_that_failed(evaluate: Reports, calls_mid: str) -> None:
    planner = Planner(calls_mid)
    too_long = json_reply({"error": {"message": "the prompt is longer than the context"}}, 400)
    planner.fails = lambda number: too_long if number == 3 else None
    with on_thread(planner) as url:
        status, report = evaluate("--policy", f"{url}#m")
    assert status == 0
    assert report["policies"][f"{url}#m"]["refusals"] == {"refused": 1}


def test_a_call_that_breaks_off_is_asked_again_and_changes_no_figure(evaluate: Reports, calls_mid: str) -> None:
    planner = Planner(calls_mid)
    with on_thread(planner) as url:
        name = f"{url}#m"
        _, steady = evaluate("--policy", name)
        broken = [Reply(status=500), Reply(status=429), event_stream([event({"choices": []})], cut=True)]
        base = len(planner.bodies)
        planner.fails = lambda number: broken[(number - base) // 3 % 3] if (number - base) % 3 == 1 else None
        status, report = evaluate("--policy", name, "--planner-calls", "1")
    assert status == 0
    assert len(planner.bodies) - base > base
    assert report["policies"][name] == steady["policies"][name]


@pytest.mark.parametrize("failure", ["dies", "hangs"])
def test_a_server_that_is_lost_half_way_leaves_what_was_finished(
    evaluate: Reports, calls_mid: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], failure: str
) -> None:
    planner = Planner(calls_mid)
    with on_thread(planner) as url:
        policy = ["--rounds", "1", "--policy", f"{url}#m", "--planner-calls", "2"]
        _, whole = evaluate(*policy, out="whole.json")
        asked = len(planner.bodies)
        planner.fails = lambda number: Reply(status=503) if failure == "dies" and number > asked + 10 else None
        planner.hangs_after = asked + 10 if failure == "hangs" else None
        capsys.readouterr()
        assert evaluate(*policy, "--planner-timeout", "0.5") == (1, {})
        [line] = [line for line in capsys.readouterr().err.splitlines() if "the same command goes on" in line]
        assert line.startswith(f"{url}#m: the conductor")
        assert f"of {asked} questions are kept in {tmp_path / 'out.json.partial'}" in line
        kept = int(line.split(" of ")[0].rsplit(" ", 1)[-1])
        assert 8 <= kept <= 10
        planner.fails, planner.hangs_after = lambda _number: None, None
        [stored] = (tmp_path / "out.json.partial").glob("*.jsonl")
        stored.write_text(stored.read_text() + '\n{"prompt_id": "cut of')
        before = len(planner.bodies)
        status, report = evaluate(*policy)
    assert status == 0
    assert len(planner.bodies) - before == asked - kept
    assert report == whole
    assert not (tmp_path / "out.json.partial").exists()


def test_a_directory_that_the_engine_lacks_is_refused_before_a_planner_is_paid(
    evaluate: Reports, calls_mid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planner = Planner(calls_mid)
    with on_thread(planner) as url:
        assert evaluate("--policy", f"{url}#m", "--policy", str(SHIPPED), "--engine", url) == (2, {})
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert f"the policy {SHIPPED} arena@3 cannot be judged: " in said[0]
    assert "not these weights; start it on them" in said[0]
    assert planner.bodies == []


def test_a_full_disk_ends_the_run_in_one_line(
    evaluate: Reports, calls_mid: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_args: object) -> None:
        raise ConfigError("out.json.partial: cannot be written (No space left on device)")

    monkeypatch.setattr(contest_module.PartialResults, "keep_question", full)
    with on_thread(Planner(calls_mid)) as url:
        assert evaluate("--policy", f"{url}#m") == (2, {})
    assert "No space left on device" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_conductor_of_a_known_prompt_is_asked_in_it(evaluate: Reports, calls_mid: str) -> None:
    compact = {"name": "c", "version": "3", "prompt_version": "compact-1", "prompt_hash": prompt_hash("compact")}
    planner = Planner(calls_mid, owned_by="baton", baton=compact)
    with on_thread(planner) as url:
        status, report = evaluate("--rounds", "1", "--policy", f"{url}#m")
        assert status == 0
        facts = report["planners"][f"{url}#m"]
        assert (facts["prompt"], facts["version"], facts["owned_by"]) == ("compact", "c@3", "baton")
        assert "structured_outputs" in planner.bodies[0]


def test_a_conductor_with_a_dial_is_asked_at_each_place(evaluate: Reports, calls_mid: str) -> None:
    facts = {"name": "c", "version": "3", "prompt_version": "dial-1", "prompt_hash": prompt_hash("dial"), "quality": 5}
    planner = Planner(calls_mid, baton=facts)
    with on_thread(planner) as url:
        status, report = evaluate("--rounds", "1", "--policy", f"{url}#m", "--quality", "2", "--quality", "8")
    assert status == 0
    assert [point["policy"] for point in report["curves"][f"{url}#m"]["points"]] == [f"{url}#m~q2", f"{url}#m~q8"]
    n = report["evaluated"]["questions"]
    prompts = [json.dumps(body["messages"]) for body in planner.bodies]
    assert len(set(prompts)) == len(prompts) == 2 * n


BAD: list[tuple[list[str], int, str]] = [
    (["--policy", "http://127.0.0.1:9/v1"], 2, "names no host or no model; write http(s)://HOST:PORT/v1#MODEL"),
    (["--policy", f"http://user:{KEY}@127.0.0.1:9/v1#m"], 2, "a URL holds no key; give --planner-key env:NAME"),
    (["--policy", f"http://127.0.0.1:9/v1?api_key={KEY}#m"], 2, "a URL holds no key; give --planner-key env:NAME"),
    (["--policy", "http://127.0.0.1:9/v1#m"], 1, "--policy http://127.0.0.1:9/v1#m: the conductor cannot be reached"),
    (["--policy", "URL#m", "--planner-key", KEY], 2, "--planner-key: give a reference, env:NAME or file:PATH"),
    (["--policy", "URL#m", "--planner-key", "env:NOT_SET"], 2, "`env:NOT_SET` is not set in the environment"),
    (["--policy", "URL#m", "--planner-price", "1"], 2, "--planner-price 1: write INPUT,OUTPUT"),
    (["--policy", "URL#m", "--planner-price=-1,2"], 2, "--planner-price -1,2: write INPUT,OUTPUT"),
    (["--policy", "URL#m", "--planner-calls", "0"], 2, "--planner-calls 0: must be between 1 and 256"),
    (["--policy", "URL#m", "--planner-timeout", "nan"], 2, "--planner-timeout nan: must be above 0"),
    (["--policy", "URL#m", "--policy", "URL#m"], 2, "named twice; drop one"),
    (["--policy", "worker:big"], 2, "--policy worker:big: needs --pool-file FILE"),
    (["--policy", "worker:big", "--pool-file", "/no/such.yaml"], 2, "--pool-file /no/such.yaml: cannot be read"),
    (["--policy", "worker:big", "--pool-file", "POOL"], 2, "--policy worker:big: no such worker in"),
    (["--policy", "worker:hosted", "--pool-file", "POOL"], 2, "--policy worker:hosted: cannot plan"),
]


@pytest.mark.parametrize(("arguments", "status", "message"), BAD)
def test_bad_input_is_one_line_and_leaves_nothing(
    evaluate: Reports,
    calls_mid: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    pool = tmp_path / "pool.yaml"
    hosted = {"name": "hosted", "handle": "host", "kind": "litellm", "model": "anthropic/x"}
    pool.write_text(yaml.safe_dump({"workers": [hosted], "pools": {"default": ["hosted"]}}))
    with on_thread(Planner(calls_mid)) as url:
        given = [each.replace("URL", url).replace("POOL", str(pool)) for each in arguments]
        assert evaluate(*given) == (status, {})
    printed = capsys.readouterr().err
    assert message in printed.strip().splitlines()[-1]
    assert KEY not in printed
    assert "Traceback" not in printed
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("code", "message"),
    [(401, "answered 401"), (404, "answered 404"), (400, "answered 400")],
)
def test_a_server_that_refuses_every_call_ends_the_run(
    evaluate: Reports, capsys: pytest.CaptureFixture[str], code: int, message: str
) -> None:
    """With 401 the look at its models is refused; a wrong model or a schema it cannot take shows with the plans."""
    refusal = json_reply({"error": {"message": "no"}}, code)
    with on_thread(lambda request: refusal) as url:
        status, report = evaluate("--policy", f"{url}#m")
    assert (status, report) == (2 if code == 401 else 1, {})
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_conductor_of_another_prompt_is_refused_by_name(
    evaluate: Reports, calls_mid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"name": "c", "version": "3", "prompt_version": "compact-0", "prompt_hash": "f" * 64}
    with on_thread(Planner(calls_mid, baton=other)) as url:
        assert evaluate("--policy", f"{url}#m") == (2, {})
        assert f"--policy {url}#m: its weights were trained on prompt compact-0" in capsys.readouterr().err


def test_the_embedded_server_plans_as_its_directory_does(tmp_path: Path) -> None:
    versions = Versions(Slots(threads=2, queue_max=16))
    versions.start_with("conductor", SHIPPED)
    server = uvicorn.Server(uvicorn.Config(create_app(versions), log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1#conductor"
        try:
            policies = ["--policy", url, "--policy", "conductor@shipped", "--planner-calls", "2"]
            given = ["--env", "arena", "--n", "40", "--rounds", "1", "--experience", "0"]
            assert main(["evaluate", *given, *policies, "--out", str(tmp_path / "out.json")]) == 0
        finally:
            server.should_exit = True
            thread.join(timeout=120)
            versions.close()
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["policies"][url] == report["policies"]["conductor@shipped"]
    assert report["policies"][url]["parse_rate"] > 0.9
    assert report["planners"][url]["version"]
