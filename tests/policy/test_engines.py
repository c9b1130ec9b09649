"""Which engine judges a directory, and a server that judges: what it is asked, and what is said when it cannot."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.engines.policies import write_adapter
from gateway.core.loop.plan import PlanLimits, decision_mask, plan_schema
from gateway.errors import BatonError, ConductorError, ConfigError, EngineDown, VersionRefused
from policy.__main__ import main
from policy.engines import endpoint, opening
from policy.engines.choice import EngineChoice
from policy.engines.directory import ConductorDirectory, read_conductors
from policy.engines.opening import engine_losses, open_engine
from policy.engines.port import EngineLost, LoggedPlan, reading
from policy.serve.sampling import behaviour_logprobs, top_tokens
from policy.start.pretrained.seal import seal
from tests.tiny_model import write_tiny_llama, write_tiny_model
from tests.upstreams.server import Reply, Request, Server, json_reply

SCHEMA = plan_schema(PlanLimits(("atlas", "quill"), 2))
TEXT = '{"steps":[{"worker":"quill","task":"Check it.","see":[]}]}'


class MaskingServer:
    """vLLM's routes as far as judging needs them. `logits` of a prompt are noise drawn from its tokens; `raw`: it
    ignores mask and temperature in its log-probs; `dead_after`: requests for a token that it still answers."""

    def __init__(self, root: Path, vocab: int) -> None:
        self.entries = [{"id": "conductor", "owned_by": "vllm", "root": str(root), "parent": None}]
        self.vocab = vocab
        self.raw = False
        self.named = True  # tokens by id
        self.dead_after = 1_000_000
        self.asked: list[dict[str, Any]] = []
        self.loads: list[str] = []

    async def __call__(self, request: Request) -> Reply:
        if request.path.endswith("/models"):
            return json_reply({"data": self.entries})
        if request.path == "/health":
            return json_reply({})
        if "lora" in request.path:
            self.loads.append(request.path)
            return json_reply({"error": {"message": "no such route"}}, 404)
        self.asked.append(request.body)
        if len(self.asked) > self.dead_after:
            return json_reply({"error": {"message": "EngineDead"}}, 500)
        return json_reply(self._token(request.body))

    def _token(self, body: dict[str, Any]) -> dict[str, Any]:
        mask = np.zeros(self.vocab, dtype=bool)
        mask[body["allowed_token_ids"]] = True
        heat = body["temperature"]
        logprobs = behaviour_logprobs(
            self.logits(body["prompt"]), None if self.raw else mask, 1 if self.raw else heat, 1
        )
        top = top_tokens(logprobs, body["logprobs"])
        named = {f"token_id:{token}" if self.named else f"t{token}": value for token, value in top}
        return {"choices": [{"text": "", "logprobs": {"top_logprobs": [named]}}]}

    def logits(self, ids: list[int]) -> Any:
        return np.random.default_rng(ids).normal(0, 4, self.vocab).astype(np.float32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("engines") / "tiny")


@pytest.fixture
def directory(base: Path) -> ConductorDirectory:
    return read_conductors([base])[base]


@pytest.fixture
def plan(directory: ConductorDirectory) -> LoggedPlan:
    tokens = directory.tokens()
    ids = [*tokens._tokenizer.encode(TEXT, add_special_tokens=False).ids, tokens.eos_ids[0]]
    return LoggedPlan([5, 6, 7], ids, decision_mask([tokens.token_text(one) for one in ids]), SCHEMA, 0.7)


@pytest.fixture
async def server(base: Path, directory: ConductorDirectory) -> AsyncIterator[tuple[MaskingServer, str]]:
    handler = MaskingServer(base, directory.shape().vocab)
    async with Server(handler) as running:
        yield handler, f"{running.url}/v1"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "WAITS_S", (0.01,))


async def scored(directory: ConductorDirectory, url: str, plan: LoggedPlan) -> list[float]:
    async with open_engine(directory, EngineChoice(url)) as engine:
        return (await engine.score([plan]))[0]


# ---------------------------------------------------------------- a server


async def test_a_plan_is_scored_exactly_by_masked_requests(
    server: tuple[MaskingServer, str], directory: ConductorDirectory, plan: LoggedPlan
) -> None:
    handler, url = server
    read = reading(directory.tokens(), plan)
    logits = [handler.logits([*plan.prompt_ids, *plan.plan_ids[: decision.index]]) for decision in read.decisions]
    assert await scored(directory, url, plan) == pytest.approx(read.of_logits(logits), abs=1e-9)
    proof, pairs = 2, [body for body in handler.asked[2:] if len(body["allowed_token_ids"]) == 2]
    assert len(read.decisions) + proof <= len(handler.asked) <= 2 * len(read.decisions) + proof
    assert pairs  # the token was not among the likeliest
    assert {body["max_tokens"] for body in handler.asked} == {1}
    assert {body["temperature"] for body in handler.asked[proof:]} == {0.7}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"raw": True}, "--logprobs-mode processed_logprobs"), ({"named": False}, "returns no token ids")],
)
async def test_a_server_that_cannot_score_is_refused_by_name(
    changes: dict[str, bool],
    complaint: str,
    server: tuple[MaskingServer, str],
    directory: ConductorDirectory,
    plan: LoggedPlan,
) -> None:
    for name, value in changes.items():
        setattr(server[0], name, value)
    with pytest.raises(VersionRefused, match=complaint) as refused:
        await scored(directory, server[1], plan)
    assert "\n" not in str(refused.value)


async def test_a_server_that_dies_is_lost_in_one_line(
    server: tuple[MaskingServer, str], directory: ConductorDirectory, plan: LoggedPlan
) -> None:
    server[0].dead_after = 6
    with pytest.raises(EngineLost, match="EngineDead"):
        await scored(directory, server[1], plan)

    async def judge() -> None:
        with engine_losses(lambda: "3 parts are kept"):
            async with asyncio.TaskGroup() as group:
                group.create_task(scored(directory, server[1], plan))

    with pytest.raises(ConductorError, match=r"EngineDead; 3 parts are kept: the same command goes on") as lost:
        await judge()
    assert "\n" not in str(lost.value)


async def test_other_weights_than_are_served_are_refused(
    server: tuple[MaskingServer, str], base: Path, tmp_path: Path, plan: LoggedPlan
) -> None:
    other = write_tiny_model(tmp_path / "other", seed=1)
    stranger = write_adapter(other, tmp_path / "stranger", 1)
    with pytest.raises(VersionRefused, match=f"serves {base}, not these weights; start it on them"):
        await scored(read_conductors([other])[other], server[1], plan)
    with pytest.raises(VersionRefused, match="not for the weights served here") as refused:
        await scored(read_conductors([stranger, other])[stranger], server[1], plan)
    assert refused.value.reason == "base"
    assert server[0].loads == []


async def test_an_adapter_that_is_served_already_is_asked_under_its_name(
    server: tuple[MaskingServer, str], base: Path, tmp_path: Path, plan: LoggedPlan
) -> None:
    adapter = write_adapter(base, tmp_path / "adapter", 1)
    server[0].entries.append({"id": "conductor@1", "owned_by": "vllm", "root": str(adapter), "parent": "conductor"})
    await scored(read_conductors([adapter, base])[adapter], server[1], plan)
    assert {body["model"] for body in server[0].asked} == {"conductor@1"}
    assert server[0].loads == []


async def test_a_server_that_is_away_is_named(directory: ConductorDirectory, plan: LoggedPlan) -> None:
    with pytest.raises(EngineDown, match="is it running"):
        await scored(directory, "http://127.0.0.1:9/v1", plan)


# ---------------------------------------------------------------- the choice


def test_a_name_that_is_no_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("--engine gpu: give embedded, torch or http(s)://HOST:PORT/v1")):
        EngineChoice("gpu")


async def test_what_no_engine_here_can_load_names_the_missing_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_tiny_llama(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"model_type": "gemma"}))
    seal(base)
    monkeypatch.setattr(opening, "_has_torch", lambda: False)
    for name, complaint in (("", "not a qwen2 or llama model"), ("torch", "--engine torch: torch is not installed")):
        with pytest.raises(BatonError, match=complaint) as refused:
            async with open_engine(read_conductors([base])[base], EngineChoice(name)):
                pass
        assert "pip install '.[train,embedded]'" in str(refused.value)


# ---------------------------------------------------------------- bad directories, at every door


def no_template(base: Path) -> None:
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))


def wrong_hash(base: Path) -> None:
    (base / "config.json").write_text((base / "config.json").read_text() + " ")


@pytest.mark.parametrize("door", ["evaluate", "gate", "serve"])
@pytest.mark.parametrize(
    ("spoil", "complaint"), [(no_template, "no usable chat template"), (wrong_hash, "does not match its sha256")]
)
def test_a_bad_base_is_one_line(
    door: str, spoil: Any, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_tiny_llama(tmp_path / "base")
    if spoil is no_template:
        sealed = seal(base)
        spoil(base)
        reseal_files(base, sealed.manifest.sha256)
    else:
        seal(base)
        spoil(base)
    assert_one_line(door, base, tmp_path, complaint, capsys)


@pytest.mark.parametrize("door", ["evaluate", "gate", "serve"])
def test_an_adapter_of_another_base_is_one_line(door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other weights lie under its base's name."""
    base = write_tiny_model(tmp_path / "tiny")
    adapter = write_adapter(base, tmp_path / "adapter", 1)
    write_tiny_model(base, seed=1)
    assert_one_line(door, adapter, tmp_path, "an adapter of tiny", capsys)


def reseal_files(directory: Path, names: Any) -> None:
    from gateway.adapters.engines.sealed import file_sha256

    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["sha256"] = {name: file_sha256(directory / name) for name in names}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def assert_one_line(
    door: str, directory: Path, place: Path, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends with status 2 and one line that says `complaint`; no report is left."""
    if door == "serve":
        from policy.serve.__main__ import main as serve

        status = serve(["--model", str(directory)])
    elif door == "gate":
        status = main(["gate", "--candidate", str(directory), "--out", str(place / "out.json"), "--n", "2"])
    else:
        given = ["--env", "arena", "--n", "2", "--experience", "0", "--policy", str(directory)]
        status = main(["evaluate", "--out", str(place / "out.json"), *given])
    said = capsys.readouterr().err.strip().splitlines()
    assert status == 2
    assert complaint in said[-1]
    assert not (place / "out.json").exists()
