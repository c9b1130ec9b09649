"""`baton serve` as a user meets it: a process, its printed block, its files, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tiny_model import write_tiny_model
from tests.waiting import PATIENT, wait_until

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
STOP_S = 60.0
CHAT = {"model": "baton", "messages": [{"role": "user", "content": "How many grams are there in 51 kilograms?"}]}


@dataclass
class Gateway:
    """A running `baton serve`, its data directory and what it has printed so far."""

    process: subprocess.Popen[bytes]
    directory: Path
    output: Path

    @property
    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "serve.json").read_text())
        return found

    @property
    def printed(self) -> str:
        return self.output.read_text()

    def serves(self) -> bool:
        """Whether it has written its facts and printed all of its block."""
        return (self.directory / "serve.json").exists() and "With Python" in self.printed

    def ask(self, **request: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {request.pop('key', self.facts['data_key'])}"}
        url = f"{self.facts['base_url']}/chat/completions"
        return httpx.post(url, json=CHAT | request, headers=headers, timeout=120)

    def children(self) -> list[int]:
        """Every process below it."""
        found, parents = [], [self.process.pid]
        for parent in parents:
            tasks = Path(f"/proc/{parent}/task").glob("*/children")
            below = [int(pid) for task in tasks for pid in task.read_text().split()]
            found += below
            parents += below
        return found

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


def command(directory: Path, *arguments: str) -> list[str]:
    where = ["--data-dir", str(directory), "--port", "0", "--admin-port", "0"]
    return [sys.executable, "-m", "gateway", "serve", *where, *arguments]


@contextmanager
def serving(directory: Path, model: Path, *words: str, **settings: str) -> Iterator[Gateway]:
    output = directory.with_suffix(".out")
    line, environ = command(directory, "--conductor", str(model), *words), {**os.environ, **PATIENT, **settings}
    with output.open("wb") as file:
        process = subprocess.Popen(line, cwd=ROOT, env=environ, stdout=file, stderr=file)
    gateway = Gateway(process, directory, output)
    try:
        wait_until(lambda: gateway.serves() or process.poll() is not None, START_S)
        assert process.poll() is None, gateway.printed
        yield gateway
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    """Wait until none of the processes lives."""
    return bool(wait_until(lambda: not any(alive(pid) for pid in pids)))


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Not pytest's own directory: its root is closed to PostgreSQL's user whenever another pytest starts."""
    with tempfile.TemporaryDirectory(prefix="baton-serve-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def model(place: Path) -> Path:
    return write_tiny_model(place / "model")


@pytest.fixture(scope="module")
def gateway(place: Path, model: Path) -> Iterator[Gateway]:
    with serving(place / "shared-by-tests", model) as running:
        yield running


def test_the_facts_are_private_and_true(gateway: Gateway) -> None:
    assert stat.S_IMODE((gateway.directory / "serve.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(gateway.directory.stat().st_mode) in (0o700, 0o701)  # root's PostgreSQL passes through
    assert gateway.facts["pid"] == gateway.process.pid
    assert httpx.get(f"{gateway.facts['admin_url']}/readyz").json()["status"] == "ready"
    keys = httpx.get(
        f"{gateway.facts['admin_url']}/admin/keys", headers={"authorization": f"Bearer {gateway.facts['admin_key']}"}
    )
    assert {key["name"] for key in keys.json()["data"]} >= {"first data key", "first admin key"}


def test_the_printed_curl_works_as_pasted(gateway: Gateway) -> None:
    pasted = re.search(r"^curl (?:.*\\\n)+.*\n", gateway.printed, re.M)
    assert pasted is not None
    done = subprocess.run(["bash", "-c", pasted[0]], capture_output=True, timeout=120, check=True)
    reply = json.loads(done.stdout)
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"]["content"]


def test_the_printed_python_works_as_pasted(gateway: Gateway) -> None:
    pasted = re.search(r"^from openai import OpenAI\n(?:.*\n)+?print\(.*\)\n", gateway.printed, re.M)
    assert pasted is not None
    done = subprocess.run([sys.executable, "-c", pasted[0]], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip()


def test_a_second_one_says_who_is_there_and_harms_nothing(gateway: Gateway) -> None:
    second = subprocess.run(
        command(gateway.directory), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert second.returncode == 3
    assert len(second.stderr.splitlines()) == 1
    assert f"process {gateway.process.pid} serves {gateway.facts['base_url']}" in second.stderr
    assert gateway.ask().status_code == 200


def test_keys_made_beside_it_work_until_revoked(gateway: Gateway) -> None:
    def run(*arguments: str, command: str = "keys") -> bytes:
        done = subprocess.run(
            [sys.executable, "-m", "gateway", command, *arguments],
            cwd=ROOT,
            env={**os.environ, "BATON_DATA_DIR": str(gateway.directory)},
            capture_output=True,
            timeout=120,
            check=True,
        )
        return done.stdout

    def keys(*arguments: str) -> Any:
        return json.loads(run(*arguments, "--json"))

    made = keys("create", "--name", "beside", "--budget-usd", "0.50", "--rpm", "100", "--pools", "arena")
    assert (made["budget_usd"], made["rpm"], made["pools"]) == ("0.5", 100, ["arena"])
    assert gateway.ask(key=made["key"]).status_code == 200
    assert keys("revoke", made["key"])["revoked_at"]
    wait_until(lambda: gateway.ask(key=made["key"]).status_code == 401)  # it is cached for BATON_KEY_CACHE_S
    assert [key["id"] for key in keys("list") if key["revoked_at"]] == [made["id"]]
    listed = run("list").decode().splitlines()
    assert listed[0].split() == [*("id", "class", "role", "name", "org", "pools"), *("budget_usd", "rpm", "revoked_at")]
    assert [line for line in listed if line.startswith(made["id"]) and "  arena  0.5         100  " in line]
    mine = gateway.facts["admin_key"].split("_")[2]
    acts = json.loads(run("list", "--target", f"key:{made['id']}", "--json", command="audit"))
    assert [(entry["act"], entry["actor"]) for entry in acts] == [
        ("key.revoked", f"key:{mine}"),
        ("key.created", f"key:{mine}"),
    ]
    assert run("verify", command="audit").endswith(b"the audit is whole\n")


def test_a_killed_conductor_is_replaced_while_requests_are_answered(gateway: Gateway) -> None:
    before = [pid for pid in gateway.children() if b"policy.serve" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(before) == 1
    os.kill(before[0], signal.SIGKILL)
    assert gateway.ask().status_code == 200
    ready = f"{gateway.facts['admin_url']}/readyz"
    wait_until(lambda: httpx.get(ready).json()["parts"]["conductor"] == "ok")
    assert gateway.ask().status_code == 200


@pytest.mark.long
def test_ctrl_c_leaves_nothing_and_the_next_start_knows_its_keys(place: Path, model: Path) -> None:
    directory = place / "twice"
    with serving(directory, model) as first:
        before, children, printed = first.facts, first.children(), first.printed
        assert len(children) >= 4
        assert first.end(signal.SIGINT) == 0
        assert gone(children)
        assert not (directory / "serve.json").exists()
        assert before["admin_key"] in printed

    with serving(directory, model) as second:
        assert second.facts["data_key"] == before["data_key"]
        assert before["admin_key"] not in second.printed
        assert second.ask().status_code == 200
        children = second.children()
        assert second.end(signal.SIGTERM) == 0
        assert gone(children)


def test_after_sigterm_it_is_not_ready_and_still_serves(place: Path, model: Path) -> None:
    with serving(place / "duck", model, BATON_LAME_DUCK_S="600") as gateway:
        ready = f"{gateway.facts['admin_url']}/readyz"
        assert httpx.get(ready).status_code == 200
        gateway.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: httpx.get(ready).status_code == 503)
        reply = gateway.ask()
        assert (reply.status_code, reply.headers["connection"]) == (200, "close")
        gateway.process.send_signal(signal.SIGTERM)  # at once
        assert gateway.process.wait(STOP_S) == 130


@pytest.mark.long
def test_a_killed_gateway_takes_everything_with_it(place: Path, model: Path) -> None:
    with serving(place / "killed", model) as running:
        children = running.children()
        running.process.kill()
        running.process.wait()
        assert gone(children)


def test_a_conductor_that_cannot_start_is_one_line_and_nothing_is_left(place: Path, model: Path) -> None:
    broken = write_tiny_model(place / "broken")
    (broken / "model.safetensors").write_bytes(b"not weights")
    directory = place / "failed"
    done = subprocess.run(
        command(directory, "--conductor", str(broken)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"{broken}/model.safetensors: does not match its sha256")
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(directory).encode() in _cmdline(pid)]


def test_recorded_models_can_be_workers(place: Path) -> None:
    recording, prices, pool = place / "recorded.jsonl", place / "prices.json", place / "replay-pool.yaml"
    answer = {"output": "4", "output_tokens": 1}
    line = {"id": "a", "question": "What is 2 + 2?", "input_tokens": 8, "workers": {"some-model": answer}}
    recording.write_text(json.dumps(line) + "\n")
    prices.write_text(json.dumps({"some-model": {"input_usd_per_mtok": 1, "output_usd_per_mtok": 2}}))
    arguments = ["replay-workers", str(recording), "--prices", str(prices), "--pool-file", str(pool)]
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", *arguments],
        cwd=ROOT,
        env={**os.environ, "BATON_DATA_DIR": str(place / "replay")},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        where = re.search(r"http://\S+", process.stdout.readline())
        assert where is not None
        assert "make serve POOL=" in process.stdout.readline()
        body = {"model": "some-model", "messages": [{"role": "user", "content": line["question"]}]}
        reply = httpx.post(f"{where[0].replace('MODEL', 'some-model')}/chat/completions", json=body, timeout=120)
        assert reply.json()["choices"][0]["message"]["content"] == "4"
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0
    assert "some-model" in pool.read_text()


def _cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.long
def test_a_port_that_must_be_free_and_is_not(place: Path, model: Path, gateway: Gateway) -> None:
    taken = gateway.facts["base_url"].removesuffix("/v1").rpartition(":")[2]
    done = subprocess.run(
        [*command(place / "taken", "--conductor", str(model)), "--port", taken],
        cwd=ROOT,
        env={**os.environ, "BATON_PORT_STRICT": "true"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert f"127.0.0.1:{taken} is taken; free it" in done.stderr


def test_status_is_one_screen_or_json(gateway: Gateway) -> None:
    assert gateway.ask().status_code == 200
    environ = {**os.environ, "BATON_DATA_DIR": str(gateway.directory)}

    def status(*words: str) -> str:
        command = [sys.executable, "-m", "gateway", "status", *words]
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    wait_until(lambda: re.search(r"^[1-9]\d* requests, \d+ failed", status(), re.MULTILINE))
    assert status().startswith("`baton`: ")  # who plans
    assert "\nready: money, disk" in status()
    assert json.loads(status("--json"))["ready"]["status"] == "ready"
