"""Jobs and graders as a user meets them: `baton serve` with its worker, the command line, the public API."""

from __future__ import annotations

import asyncio
import io
import json
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from gateway import cli
from policy.graders import grade
from tests.acceptance.test_serve import Gateway, serving
from tests.jobs_kit import REFUSING, fake_python
from tests.sizes import SLACK
from tests.tiny_model import write_tiny_model
from tests.waiting import wait_until

pytestmark = pytest.mark.long

GRADED_S_MAX = 5.0  # from the reply to its outcome
QUESTION = "How many grams are there in 51 kilograms?"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-jobs-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def gateway(place: Path) -> Iterator[Gateway]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_TRAIN_PYTHON", fake_python(place))
        with serving(place / "data", write_tiny_model(place / "model")) as running:
            yield running


def baton(gateway: Gateway, *words: str, status: int = 0) -> str:
    """What the command prints; on standard error where it fails. In this process: starting one takes a second."""
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.setenv("BATON_DATA_DIR", str(gateway.directory))
        assert cli.main(words) == status, errors.getvalue() + out.getvalue()
    return (out.getvalue() if status == 0 else errors.getvalue() + out.getvalue()).strip()


def ask(gateway: Gateway, **metadata: str) -> httpx.Response:
    return gateway.ask(messages=[{"role": "user", "content": QUESTION}], metadata=metadata)


def graded(gateway: Gateway, rollout_id: str) -> dict[str, Any]:
    """The rollout once its grading has ended."""
    headers = {"authorization": f"Bearer {gateway.facts['data_key']}"}

    def ended() -> dict[str, Any] | None:
        found = httpx.get(f"{gateway.facts['base_url']}/rollouts/{rollout_id}", headers=headers).json()
        return dict(found) if found.get("gradings") and found["gradings"][0]["state"] != "waiting" else None

    return cast(dict[str, Any], wait_until(ended))


def test_a_request_that_names_its_grader_has_its_outcome_within_seconds(gateway: Gateway) -> None:
    graded(gateway, ask(gateway, grader="exact", reference="x").headers["x-baton-rollout-id"])  # the worker is up
    reply = ask(gateway, grader="numeric@2", reference="51,000")
    began_s = time.monotonic()
    found = graded(gateway, reply.headers["x-baton-rollout-id"])
    assert time.monotonic() - began_s < GRADED_S_MAX * SLACK
    (outcome,) = found["outcomes"]
    text = reply.json()["choices"][0]["message"]["content"]
    expected = asyncio.run(grade("numeric", "51,000", text))
    assert (outcome["kind"], outcome["value"]) == ("number", expected.value)
    assert (outcome["source"], outcome["grader_version"]) == ("grader", "numeric@2")
    (grading,) = found["gradings"]
    assert (grading["state"], grading["outcome_id"]) == ("graded", outcome["id"])
    assert grading["detail"] == expected.detail


def test_a_streamed_reply_is_graded_too(gateway: Gateway) -> None:
    headers = {"authorization": f"Bearer {gateway.facts['data_key']}"}
    body = {"model": "baton", "stream": True, "messages": [{"role": "user", "content": QUESTION}]}
    body["metadata"] = {"grader": "regex", "reference": "."}
    url = f"{gateway.facts['base_url']}/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as reply:
        reply.read()
    found = graded(gateway, reply.headers["x-baton-rollout-id"])
    assert [one["value"] for one in found["outcomes"]] == [1.0]


def test_a_wrong_reference_gives_no_outcome_and_says_why(gateway: Gateway) -> None:
    found = graded(gateway, ask(gateway, grader="numeric", reference="two").headers["x-baton-rollout-id"])
    assert found["outcomes"] == []
    (grading,) = found["gradings"]
    assert grading["state"] == "ungraded"
    assert grading["detail"].startswith("numeric needs a number")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"grader": "numerical", "reference": "1"}, "no grader `numerical`; use one of exact, numeric"),
        ({"grader": "numeric@7", "reference": "1"}, "at version 2, not 7"),
        ({"grader": "numeric"}, "needs `reference`"),
    ],
)
def test_an_unknown_grader_is_refused_before_anything_is_spent(
    gateway: Gateway, metadata: dict[str, str], said: str
) -> None:
    reply = ask(gateway, **metadata)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert said in error["message"]
    assert (error["param"], error["code"]) == ("metadata", "bad_grader")


def held(gateway: Gateway, name: str) -> tuple[Path, list[str]]:
    """A file that is not there, and arguments that make the trainer wait for it."""
    path = gateway.directory / name
    return path, ["--env", "arena", "--set", "steps=8", "--name", f"hold={path}"]


def step_of(gateway: Gateway, job: str, at_least: int) -> None:
    """Wait until its trainer has come so far."""
    headers = {"authorization": f"Bearer {gateway.facts['admin_key']}"}
    url = f"{gateway.facts['admin_url']}/admin/jobs/{job}"
    wait_until(
        lambda: httpx.get(url, headers=headers, timeout=120).json().get("progress", {}).get("step", 0) >= at_least
    )


def test_a_job_from_the_command_line_to_a_shadow_version(gateway: Gateway) -> None:
    hold, words = held(gateway, "hold-1")
    said = baton(gateway, "train", "submit", *words, "--json")
    job = json.loads(said)
    assert (job["state"], job["policy"]) == ("queued", "conductor")
    busy = baton(gateway, "train", "submit", "--env", "arena", status=1)
    assert f"job {job['id']} of conductor is" in busy
    hold.touch()
    followed = baton(gateway, "train", "logs", "-f", job["id"])
    assert "from step 0" in followed
    shown = baton(gateway, "train", "status", job["id"])
    assert "state      done" in shown
    assert "step       8 of 8" in shown
    version = json.loads(baton(gateway, "train", "status", job["id"], "--json"))["version"]
    assert followed.splitlines()[-1].endswith(f"{version} is shadow")
    countdown, _, jobs_shown = baton(gateway, "train", "status").partition("\n\n")
    # The other tests of this gateway may have had requests judged.
    assert re.match(r"about 6\d\d more judged requests are needed \(", countdown.splitlines()[-1]), countdown
    listed = jobs_shown.splitlines()
    assert listed[0].split() == ["job", "policy", "state", "stage", "step", "made"]
    assert listed[1].split() == [job["id"], "conductor", "done", "shadow", "8", "of", "8", version]
    versions = {row["version"]: row["state"] for row in json.loads(baton(gateway, "policy", "list", "--json"))["data"]}
    assert versions[version] == "shadow"
    assert gateway.ask().status_code == 200


def test_a_refused_job_says_so_and_by_its_status(gateway: Gateway) -> None:
    before = baton(gateway, "policy", "list", "--json")
    job = json.loads(baton(gateway, "train", "submit", "--gate", f"--seed {REFUSING}", "--env", "arena", "--json"))
    assert "the gate refused it: worse" in baton(gateway, "train", "logs", "-f", job["id"], status=4)
    assert f"report     {gateway.directory}/jobs/{job['id']}/gate.json" in baton(gateway, "train", "status", job["id"])
    after = baton(gateway, "policy", "list", "--json")
    assert [row["version"] for row in json.loads(after)["data"]] == [r["version"] for r in json.loads(before)["data"]]


def test_cancel_and_resume_from_the_command_line(gateway: Gateway) -> None:
    hold, words = held(gateway, "hold-2")
    job = json.loads(baton(gateway, "train", "submit", *words, "--gate", f"--seed {REFUSING}", "--json"))["id"]
    step_of(gateway, job, 3)
    assert baton(gateway, "train", "cancel", job) == f"job {job} stops after its checkpoint"
    assert "goes on" in baton(gateway, "train", "logs", "-f", job, status=130)
    hold.touch()
    assert baton(gateway, "train", "resume", job) == f"job {job} is queued"
    baton(gateway, "train", "logs", "-f", job, status=4)
    assert "attempts   2" in baton(gateway, "train", "status", job)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--env", "live", "--usd-max", "0"], "usd_max: 0 dollars allow nothing: give a number above 0"),
        (["--env", "live"], "real workers cost real money; give a limit"),
        (["--env", "nowhere"], "--env: invalid choice: 'nowhere' (choose from 'arena', 'replay', 'logged', 'live')"),
        ([], "no --env: where do rollouts come from?"),
        (["--env", "arena", "--gate", "--set mood=1"], "--gate: --set mood=1: no such threshold"),
        (["--env", "arena", "--out", "x"], "a job sets --out itself; leave it out"),
        (["--policy", "No Name", "--env", "arena"], "policy: give a name"),
    ],
)
def test_a_job_that_could_not_be_carried_out_is_one_line(gateway: Gateway, words: list[str], said: str) -> None:
    answer = baton(gateway, "train", "submit", *words, status=2)
    assert said in answer
    assert len(answer.splitlines()) == 1


def test_a_job_nobody_has_is_one_line(gateway: Gateway) -> None:
    assert "no job `00000000-0000`" in baton(gateway, "train", "status", "00000000-0000", status=1)
    assert "is not a job id" in baton(gateway, "train", "logs", "x", status=2)


def test_an_outcome_for_an_unknown_rollout_is_a_404(gateway: Gateway) -> None:
    headers = {"authorization": f"Bearer {gateway.facts['data_key']}"}
    body = {"rollout_id": "0190b6a8-0000-7000-8000-000000000000", "value": 1}
    reply = httpx.post(f"{gateway.facts['base_url']}/outcomes", json=body, headers=headers, timeout=120)
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "rollout_not_found"


def test_jobs_are_for_admin_keys(gateway: Gateway) -> None:
    headers = {"authorization": f"Bearer {gateway.facts['data_key']}"}
    assert httpx.get(f"{gateway.facts['admin_url']}/admin/jobs", headers=headers).status_code == 401
