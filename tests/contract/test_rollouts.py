"""Plans that a vLLM samples for the trainer, proven on the fake and (marker `vllm`) on a real vLLM: it samples from the
weights of the step, its log-probs are the trainer's, and nothing that was learnt is lost with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters.engines.http import EngineApi
from gateway.adapters.upstream.conductor.client import HttpConductor
from gateway.errors import ConfigError, EngineDown, VersionRefused
from policy.engines import endpoint
from policy.serve.lora import read_pairs
from policy.serve.tokens import TextStream
from tests.contract.conftest import SHIPPED
from tests.fakes.vllm import FakePlan, FakeVllm

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch")

from policy.environments.base import rng_for  # noqa: E402
from policy.train.run import rollouts  # noqa: E402
from policy.train.run.checkpoint import load  # noqa: E402
from policy.train.run.initial import initial_weights  # noqa: E402
from policy.train.run.session import train  # noqa: E402
from policy.train.settings import Settings  # noqa: E402
from policy.train.sources.conductor import Decoded, Sampler  # noqa: E402
from policy.train.spec import TrainSpec  # noqa: E402
from policy.train.step.masks import Masks  # noqa: E402
from policy.train.weights.lora import load_adapter  # noqa: E402

REAL_VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(900)])
SETTINGS = Settings(
    steps=3,
    prompts=4,
    samples=6,
    observed=0,
    candidates=40,
    rounds=1,
    temperature=1.5,
    lr=1e-2,
    warmup_share=0.0,
    lora_rank=4,
)


def spec_of(url: str, **changes: object) -> TrainSpec:
    return TrainSpec(env="arena", init=SHIPPED, rollouts=url, settings=SETTINGS.model_copy(update=changes))


def quiet(_: str) -> None:
    """Progress of tests is not shown."""


class Planner:
    """Decodes what the fake is asked for, with the adapter that was loaded under the name asked for."""

    def __init__(self, fake: FakeVllm) -> None:
        self._fake = fake
        self._initial = initial_weights(spec_of(""))
        self._masks = Masks(self._initial.tokens)
        self._loaded = ""
        self.calls_left: float = float("inf")  # then it dies

    def __call__(self, body: Mapping[str, Any]) -> FakePlan:
        self.calls_left -= 1
        if self.calls_left < 0:
            self._fake.dead = True
        weights, tokens = self._initial.weights, self._initial.tokens
        if self._loaded != body["model"]:
            load_adapter(weights.model, read_pairs(Path(self._fake.loras[body["model"]])))
            self._loaded = body["model"]
        prompt = tuple(tokens.encode_chat(body["messages"]))
        place = self._masks.root(body["structured_outputs"]["json"])
        row = Decoded(prompt, place, body["temperature"], body["max_tokens"], rng_for("fake", body["seed"]))
        Sampler(weights, tokens, self._masks, 4096).decode([row])
        stream = TextStream()
        texts = [stream.feed(tokens.token_bytes(token)) for token in row.ids]
        return FakePlan(prompt, row.ids, row.logprobs, texts)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    """A fake that each run of this process samples from."""
    fake = FakeVllm(SHIPPED)

    monkeypatch.setattr(rollouts, "EngineApi", lambda url, timeout_s: EngineApi(url, client=fake.client()))
    monkeypatch.setattr(rollouts, "client_of", lambda url, model, _: HttpConductor(url, model, client=fake.client()))
    monkeypatch.setattr(endpoint, "WAITS_S", (0.0,))
    fake.plan = Planner(fake)
    return fake


@pytest.fixture(params=["fake", REAL_VLLM])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "fake":
        request.getfixturevalue("fake")
        return "http://vllm/v1"
    return f"{request.getfixturevalue('vllm_url')}/v1"


def figures(work: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]


def test_each_step_samples_from_its_own_weights(url: str, tmp_path: Path) -> None:
    train(spec_of(url), tmp_path / "out", tmp_path / "work", False, quiet)
    told = figures(tmp_path / "work")
    assert [each["step"] for each in told] == [1, 2, 3]
    taught = [each for each in told if each["rows_live"]]
    assert len(taught) >= 2  # so one of them samples from weights that have learnt
    assert max(abs(each["ratio_max"] - 1) for each in taught) < 1e-2
    pairs = read_pairs(tmp_path / "out")
    assert any(pair["B"].any() for pair in pairs.values())
    assert not list((tmp_path / "work" / "rollouts").iterdir())


def test_one_adapter_is_loaded_at_a_time_and_none_is_left(fake: FakeVllm, tmp_path: Path) -> None:
    train(spec_of("http://vllm/v1"), tmp_path / "out", tmp_path / "work", False, quiet)
    swaps = [path.rsplit("/", 1)[1] for path in fake.calls if path.endswith("_lora_adapter")]
    more = sum(bool(each["rows_live"]) for each in figures(tmp_path / "work")[:-1])
    assert more
    one, other = "load_lora_adapter", "unload_lora_adapter"
    assert swaps == [one, *[one, other] * more, other]
    assert not fake.loras
    plans = [body for body in fake.bodies if body and body.get("stream")]
    assert len({body["seed"] for body in plans}) == len(plans)
    assert all((body["temperature"], body["top_k"], body["top_p"]) == (1.5, -1, 1.0) for body in plans)


def test_a_vllm_that_dies_in_a_step_costs_that_step_alone(fake: FakeVllm, tmp_path: Path) -> None:
    spec = spec_of("http://vllm/v1")
    train(spec, tmp_path / "whole", tmp_path / "whole.work", False, quiet)
    planner = Planner(fake)
    planner.calls_left = figures(tmp_path / "whole.work")[0]["rows"] + 2
    fake.plan = planner
    with pytest.raises(EngineDown, match=r"--rollouts http://vllm/v1: .*--resume goes on"):
        train(spec, tmp_path / "out", tmp_path / "work", False, quiet)
    assert not (tmp_path / "out").exists()
    found = load(tmp_path / "work", spec.digest())
    assert found is not None
    assert found[0].step == 1
    fake.restart()
    fake.plan = Planner(fake)
    moved = spec.model_copy(update={"rollouts": "http://elsewhere/v1"})
    train(moved, tmp_path / "out", tmp_path / "work", True, quiet)
    name = "adapter_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def propensity(fake: FakeVllm) -> None:
    fake.sampled_off = 0.2


def tokenizer(fake: FakeVllm) -> None:
    fake.prompt_ids = [1, 2, 3]


def engine(fake: FakeVllm) -> None:
    fake.fails = {"/v1/load_lora_adapter": 400}


@pytest.mark.parametrize("spoil", [propensity, tokenizer, engine])
def test_a_vllm_that_samples_otherwise_is_refused_by_name(
    fake: FakeVllm, tmp_path: Path, spoil: Callable[[FakeVllm], None]
) -> None:
    spoil(fake)
    with pytest.raises(VersionRefused) as refused:
        train(spec_of("http://vllm/v1"), tmp_path / "out", tmp_path / "work", False, quiet)
    assert refused.value.reason == spoil.__name__
    assert not fake.loras


def test_adapters_of_a_run_that_was_killed_are_taken_away(fake: FakeVllm, tmp_path: Path) -> None:
    left = tmp_path / "work" / "rollouts" / "rollouts-dead-7"
    left.mkdir(parents=True)
    fake.loras[left.name] = str(left)
    train(spec_of("http://vllm/v1", steps=1), tmp_path / "out", tmp_path / "work", False, quiet)
    assert not fake.loras
    assert not left.exists()


def test_without_an_adapter_there_is_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lora_rank=16"):
        train(spec_of("http://vllm/v1", lora_rank=0), tmp_path / "out", tmp_path / "work", False, quiet)
