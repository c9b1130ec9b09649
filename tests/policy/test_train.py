"""Training itself: what is sampled is what is scored, learning happens, a killed run ends with the same weights."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.core.loop.plan import PlanLimits, plan_schema
from gateway.errors import ConfigError, Unavailable, VersionRefused
from policy.dataset import row as dataset
from policy.environments.base import Episode, Prompt, Spend, rng_for
from policy.reward import RewardSettings
from policy.serve.manifest import read_complete
from tests.policy.dataset_rows import a_verdict
from tests.policy.environments import PRICES, lines
from tests.policy.gate_rows import rows_of as logged_rows

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch")

from policy.train.run import checkpoint  # noqa: E402
from policy.train.run.initial import Initial, initial_weights  # noqa: E402
from policy.train.run.loop import Stopped, Trainer, unless_stopped  # noqa: E402
from policy.train.run.session import train  # noqa: E402
from policy.train.settings import Settings  # noqa: E402
from policy.train.sources.conductor import BatchConductor, Decoded, Sampler  # noqa: E402
from policy.train.sources.logged import LoggedSource, TrainableRows, of_dataset  # noqa: E402
from policy.train.sources.sampled import SampledSource  # noqa: E402
from policy.train.sources.scene import scene_of  # noqa: E402
from policy.train.spec import TrainSpec  # noqa: E402
from policy.train.step import forward  # noqa: E402
from policy.train.step.forward import passes, score  # noqa: E402
from policy.train.step.grpo import advantages_of, learn  # noqa: E402
from policy.train.step.masks import Masks  # noqa: E402
from policy.train.step.region import learn_near, log_kl  # noqa: E402
from policy.train.step.rows import TrainingRow, rows_of  # noqa: E402
from policy.train.weights import forked, lora  # noqa: E402
from policy.train.weights.small import SmallWeights, trainable  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "policy" / "shipped" / "arena-3"
TINY = Settings(steps=3, prompts=3, samples=4, observed=0, candidates=20, lr=1e-3, warmup_share=0.0, rounds=2)


def arena(**changes: Any) -> TrainSpec:
    return TrainSpec(env="arena", init=SHIPPED, settings=TINY.model_copy(update=changes))


def quiet(_: str) -> None:
    """Progress of tests is not shown."""


class Bench:
    """What a run is made of, without running it."""

    def __init__(self, spec: TrainSpec) -> None:
        self.spec = spec
        self.initial: Initial = initial_weights(spec)
        self.masks = Masks(self.initial.tokens)
        sampler = Sampler(self.initial.weights, self.initial.tokens, self.masks, spec.settings.tokens_max)
        self.conductor = BatchConductor(sampler, self.initial.tokens, self.masks, self.initial.weights.context, "toy@2")

    async def source(self) -> SampledSource:
        scene = await scene_of(self.spec)
        return SampledSource(scene, self.conductor, self.spec.settings, self.initial.profile)

    def rows(self) -> list[TrainingRow]:
        async def first() -> list[TrainingRow]:
            return (await (await self.source()).batch(0)).rows

        return asyncio.run(first())


# ---------------------------------------------------------------- sampling and scoring


def test_prompts_computed_once_give_what_the_whole_model_gives() -> None:
    weights = initial_weights(arena()).weights
    assert isinstance(weights, SmallWeights)
    draw = rng_for("ids")
    prompts = [[draw.randrange(3, 2000) for _ in range(size)] for size in (9, 30, 17)]
    plans = [[draw.randrange(3, 2000) for _ in range(size)] for size in (4, 7, 1, 3, 6)]
    owners = [0, 0, 1, 2, 2]
    with torch.no_grad():
        found = weights.logits(weights.states(prompts, owners, plans)).split([len(plan) for plan in plans])
        for one, owner, plan in zip(found, owners, plans, strict=True):
            ids = torch.tensor([[*prompts[owner], *plan[:-1]]])
            wanted = torch.arange(len(prompts[owner]) - 1, ids.shape[1])[None]
            whole, _ = weights.model(ids, wanted)
            assert torch.allclose(one, whole[0], atol=1e-4)


def test_sampled_log_probs_are_the_trainer_s_and_the_same_in_any_company() -> None:
    bench = Bench(arena())
    rows = bench.rows()
    assert {len(row.prompt_ids) for row in rows}
    for tokens_max, shared in ((400, True), (16_384, True), (16_384, False)):
        for piece in passes(rows, range(len(rows)), tokens_max, shared):
            with torch.no_grad():
                found = score(bench.initial.weights, bench.masks, piece, entropy=False)
            for index, row in enumerate(piece.rows):
                stored = torch.tensor(row.logprobs)
                assert torch.allclose(found.logprobs[index, : len(row.plan_ids)], stored, atol=1e-4)
    again = Bench(arena(tokens_max=500)).rows()
    assert [row.plan_ids for row in rows] == [row.plan_ids for row in again]


def test_later_rounds_train_too_and_are_grouped_by_state() -> None:
    rows = Bench(arena(prompts=4, samples=6)).rows()
    later = [row for row in rows if not row.first]
    assert later
    assert len({row.episode for row in rows}) == 24
    assert all(row.prompt_ids not in {one.prompt_ids for one in rows if one.first} for row in later)


def test_a_plan_cut_off_at_its_length_ends_there() -> None:
    bench = Bench(arena())
    schema = plan_schema(PlanLimits(("atlas", "quill"), 5))
    prompt = tuple(bench.initial.tokens.encode_chat([{"role": "user", "content": "?"}]))
    rows = [Decoded(prompt, bench.masks.root(schema), 2.0, most, rng_for(most)) for most in (1, 2, 3, 200)]
    Sampler(bench.initial.weights, bench.initial.tokens, bench.masks, 4096).decode(rows)
    assert [len(row.ids) for row in rows[:3]] == [1, 2, 3]
    assert [row.finish for row in rows] == ["length", "length", "length", "stop"]


def test_a_failing_decoder_is_heard_of_by_all_who_wait() -> None:
    bench = Bench(arena())

    def broken(rows: list[Decoded]) -> None:
        raise RuntimeError("out of memory")

    bench.conductor._sampler.decode = broken  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup, match="unhandled") as raised:
        bench.rows()
    assert raised.group_contains(RuntimeError, match="out of memory")


# ---------------------------------------------------------------- advantages


def row(prompt: int, episode: str, reward: float, *, first: bool = True, category: str = "") -> TrainingRow:
    question = episode.split("/")[0]
    return TrainingRow((prompt,), (1,), (0.0,), (True,), {}, 1.0, reward, episode, question, category, first=first)


def test_a_lone_later_round_is_measured_against_its_episode_s_group() -> None:
    rows = [row(1, "q/0", 1.0), row(1, "q/1", 0.0), row(2, "q/0", 1.0, first=False), row(3, "q/1", 0.0, first=False)]
    found = advantages_of(rows, Settings(divide_by_std=False))
    assert found.values.tolist() == pytest.approx([0.5, -0.5, 0.5, -0.5])
    dead = advantages_of([replace(one, reward=0.4) for one in rows], Settings())
    assert not dead.live.any()
    assert dead.dead_share == 1.0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("group", [0.5, -0.5, 0.0, 0.0]), ("leave_one_out", [1.0, -1.0, 0.0, 0.0]), ("batch", [0.25, -0.75, 0.25, 0.25])],
)
def test_baselines(mode: Any, expected: list[float]) -> None:
    rows = [row(1, "a/0", 1.0), row(1, "a/1", 0.0), row(2, "b/0", 1.0), row(2, "b/1", 1.0)]
    assert advantages_of(rows, Settings(advantage=mode, divide_by_std=False)).values.tolist() == pytest.approx(expected)


def test_small_spreads_are_not_blown_up() -> None:
    rows = [row(1, "a/0", 0.99), row(1, "a/1", 0.98), row(2, "b/0", 1.0), row(2, "b/1", 0.0)]
    found = advantages_of(rows, Settings(std_floor=0.1)).values
    assert found.tolist() == pytest.approx([0.05, -0.05, 1.0, -1.0], abs=1e-4)


# ---------------------------------------------------------------- learning


def toy(tmp_path: Path) -> dict[str, Any]:
    """Two workers; one is always right."""
    data, prices = tmp_path / "data.jsonl", tmp_path / "prices.json"
    data.write_text("".join(json.dumps(one) + "\n" for one in lines(30) if one["domain"] == "words"))
    prices.write_text(json.dumps(PRICES))
    return {"env": "replay", "data": data, "prices": prices, "workers": ("cheap", "mid"), "init": SHIPPED}


def test_learning_happens(tmp_path: Path) -> None:
    settings = Settings(
        steps=12,
        prompts=6,
        samples=8,
        lr=1e-3,
        rounds=1,
        temperature=2.0,  # the conductor in the box has made up its mind
        experience_share=0.0,
        redraw_handles=False,
        agreeing_weight=1.0,
    )
    train(TrainSpec(**toy(tmp_path), settings=settings), tmp_path / "out", tmp_path / "work", False, quiet)
    told = [json.loads(text) for text in (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()]
    assert told[-1]["accuracy"] >= 0.9 > told[0]["accuracy"]
    assert told[-1]["worker_share"].get("mid", 0) > told[0]["worker_share"].get("mid", 0)
    for name in ("ratio_mean", "dead_share", "entropy", "parse_rate", "usd_per_1k", "worker_hhi", "spent_usd"):
        assert any(name in one for one in told)
    assert max(one.get("ratio_max", 0.0) for one in told) == pytest.approx(1.0, abs=1e-3)
    manifest = read_complete(tmp_path / "out").manifest
    parent = read_complete(SHIPPED).manifest
    expected = (f"{parent.name}@{parent.version}", str(int(parent.version) + 1), 576)
    assert (manifest.parent, manifest.version, manifest.rollouts) == expected
    assert manifest.config["settings"]["lr"] == 1e-3


def test_a_probe_is_what_the_weights_say(tmp_path: Path) -> None:
    train(arena(steps=1), tmp_path / "out", tmp_path / "work", False, quiet)
    probe = read_complete(tmp_path / "out").manifest.probe
    weights = initial_weights(TrainSpec(env="arena", init=tmp_path / "out")).weights
    with torch.no_grad():
        logits = weights.logits(weights.states([probe["prompt_ids"]], [0], [probe["token_ids"]]))
        said = forward.token_logprobs(logits, torch.tensor(probe["token_ids"]))
    assert said.tolist() == pytest.approx(probe["logprobs"], abs=1e-5)


def episodes_of(bench: Bench) -> list[tuple[Prompt, Episode]]:
    """The episodes of one step, each with its question."""
    kept: list[tuple[Prompt, Episode]] = []

    async def go() -> None:
        source = await bench.source()
        judged = source._judged

        def keep(posed: Any, found: Any) -> Any:
            kept.extend(
                (prompt, episode) for prompt, group in zip(posed, found.groups, strict=True) for episode in group
            )
            return judged(posed, found)

        source._judged = keep  # type: ignore[method-assign]
        await source.batch(0)

    asyncio.run(go())
    return kept


def logged_from(bench: Bench, **changes: Any) -> list[dataset.Row]:
    """Rows of the log, had a gateway served the episodes of one step."""
    found = [row for prompt, episode in episodes_of(bench) for row in logged_rows(prompt, episode)]
    return [replace(row, **changes) for row in found]


def test_logged_and_sampled_rows_are_the_same() -> None:
    bench = Bench(arena(prompts=4))
    found = of_dataset(logged_from(bench), bench.initial.manifest.prompt_hash, bench.spec.settings.reward)
    sampled = bench.rows()
    assert found.refused == []
    assert sorted((row.plan_ids, row.logprobs, row.reward) for row in found.rows) == sorted(
        (row.plan_ids, row.logprobs, row.reward) for row in sampled
    )
    source = LoggedSource(found, "toy@5")
    assert asyncio.run(source.batch(0)).metrics["staleness"] == 3.0


def test_logs_without_log_probs_or_of_another_prompt_are_refused_by_name() -> None:
    bench = Bench(arena())
    rows = logged_from(bench)
    known, weights = bench.initial.manifest.prompt_hash, bench.spec.settings.reward
    bare = [replace(row, plan_logprobs=[]) for row in rows]
    older = [replace(row, allowed=None, quality=None) for row in rows]
    for log, prompt_hash, reason in (
        (bare, known, "no_logprobs"), (older, known, "no_allowed"), (rows, "0" * 64, "other_prompt")
    ):  # fmt: skip
        found = of_dataset(log, prompt_hash, weights)
        assert set(found.refused) == {reason}
        with pytest.raises(ConfigError, match=rf"no rollout can be trained on: {len(rows)} {reason} \("):
            LoggedSource(found, "toy@2")
    greedy = [replace(row, sampling={**row.sampling, "temperature": 0.0}) for row in rows]
    few = of_dataset([*rows, *greedy], known, weights)
    lack = rf"about {2 * (100 - few.rollouts)} more judged requests are needed: {few.rollouts} .* 50% of its plans"
    with pytest.raises(ConfigError, match=rf"{lack}.*BATON_EXPLORE_SHARE.*Left out: {len(rows)} greedy"):
        LoggedSource(few, "toy@2", 100)
    even = [replace(row, outcome=0.0) for row in rows]
    with pytest.raises(ConfigError, match="same reward"):
        LoggedSource(of_dataset(even, known, weights), "toy@2")


def test_training_from_the_log_alone_makes_good_plans_likelier(tmp_path: Path) -> None:
    bench = Bench(arena(prompts=6, samples=8))
    found = of_dataset(logged_from(bench), bench.initial.manifest.prompt_hash, bench.spec.settings.reward)
    settings = Settings(steps=2, minibatches=2, advantage="batch", lr=3e-4, warmup_share=0.0, staleness_max=0.04)
    before = gain(bench, found.rows, settings)
    trainer = Trainer(
        bench.initial.weights, bench.masks, LoggedSource(found, "toy@2"), settings, Spend(), tmp_path, "digest"
    )
    asyncio.run(trainer.run(False, asyncio.Event(), quiet))
    assert gain(bench, found.rows, settings) > before + 1e-3
    told = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert told[1]["m2"] > told[0]["m2"]


def test_a_missed_contract_makes_its_plan_less_likely(tmp_path: Path) -> None:
    """Requests that came to the same in all else: without the penalty there is nothing to learn."""
    bench = Bench(arena(prompts=6, samples=8))
    same = logged_from(bench, outcome=1.0, cost_nano=0, latency_ms=0.0, refusal=None)
    roots = {row.root_id: row for row in same if row.round == 1}
    missed = {root for root, row in roots.items() if sum(row.plan_token_ids) % 2}  # by the plan, so there is a lesson
    assert 0 < len(missed) < len(roots)
    log = [replace(row, verdicts=(a_verdict(),) if row.root_id in missed else ()) for row in same]
    known, plain = bench.initial.manifest.prompt_hash, RewardSettings()
    with pytest.raises(ConfigError, match="same reward"):
        LoggedSource(of_dataset(log, known, plain), "toy@2")
    found = of_dataset(log, known, replace(plain, missed_penalty=0.05)).rows
    settings = Settings(steps=2, minibatches=2, advantage="batch", lr=3e-4, warmup_share=0.0)
    advantages = advantages_of(found, settings).values.tolist()
    assert {(value < 0, row.episode in missed) for value, row in zip(advantages, found, strict=True)} == {
        (True, True),
        (False, False),
    }
    before = gain(bench, found, settings)
    source = LoggedSource(TrainableRows(found, len(roots), []), "toy@2")
    trainer = Trainer(bench.initial.weights, bench.masks, source, settings, Spend(), tmp_path, "digest")
    asyncio.run(trainer.run(False, asyncio.Event(), quiet))
    assert gain(bench, found, settings) > before + 1e-3


def test_a_step_too_far_from_the_log_is_shortened() -> None:
    bench = Bench(arena(prompts=6, samples=8))
    found = of_dataset(logged_from(bench), bench.initial.manifest.prompt_hash, bench.spec.settings.reward)
    settings = Settings(minibatches=2, advantage="batch", lr=3e-3, warmup_share=0.0, log_kl_max=0.05)
    weights = bench.initial.weights
    start = {name: each.detach().clone() for name, each in trainable(weights.model).items()}
    optimizer = torch.optim.AdamW(trainable(weights.model).values(), lr=3e-3)
    assert log_kl(weights, bench.masks, found.rows, settings) == pytest.approx(0.0, abs=1e-3)
    told = learn_near(weights, bench.masks, optimizer, found.rows, settings, 0, None)
    assert 0 < told["step_share"] < 1
    assert 0 < told["log_kl"] <= 0.05
    assert told["log_kl"] == pytest.approx(log_kl(weights, bench.masks, found.rows, settings), abs=1e-6)
    with torch.no_grad():
        for name, each in trainable(weights.model).items():
            each.copy_(start[name])
    never = learn_near(
        weights, bench.masks, optimizer, found.rows, settings.model_copy(update={"log_kl_max": 1e-9}), 0, None
    )
    assert never["step_share"] == 0.0
    assert all(torch.equal(each, start[name]) for name, each in trainable(weights.model).items())


def test_few_requests_allow_a_short_way_only() -> None:
    settings = Settings(log_kl_max=0.8, log_kl_requests=4000)
    assert [settings.log_kl_bound(n) for n in (1, 500, 4000, 9000)] == pytest.approx([0.0002, 0.1, 0.8, 0.8])
    assert Settings(log_kl_max=0.8).log_kl_bound(1) == 0.8
    assert Settings(log_kl_requests=10).log_kl_bound(5) is None

    bench = Bench(arena(prompts=6, samples=8))
    found = of_dataset(logged_from(bench), bench.initial.manifest.prompt_hash, bench.spec.settings.reward)
    requests = len({row.episode for row in found.rows})
    settings = Settings(advantage="batch", lr=3e-3, warmup_share=0.0, log_kl_max=0.5, log_kl_requests=20 * requests)
    optimizer = torch.optim.AdamW(trainable(bench.initial.weights.model).values(), lr=3e-3)
    figures = learn_near(bench.initial.weights, bench.masks, optimizer, found.rows, settings, 0, None)
    assert figures["log_kl"] <= 0.5 / 20


def gain(bench: Bench, rows: list[TrainingRow], settings: Settings) -> float:
    """Mean of advantage × log-prob: what training is to raise."""
    advantages, total = advantages_of(rows, settings).values, 0.0
    for piece in passes(rows, range(len(rows)), 16_384, True):
        with torch.no_grad():
            found = score(bench.initial.weights, bench.masks, piece, entropy=False)
        total += float((found.logprobs.sum(1) * advantages[piece.numbers]).sum())
    return total / len(rows)


@pytest.mark.parametrize(
    "change",
    [
        {"decoupled": True, "epochs": 2, "minibatches": 2},
        {"kl_weight": 0.01},
        {"entropy_weight": 0.01},
        {"decisions_only": True},
    ],
    ids=str,
)
def test_other_losses_run_and_move_the_weights(change: dict[str, Any], tmp_path: Path) -> None:
    train(arena(steps=1, prompts=4, **change), tmp_path / "out", tmp_path / "work", False, quiet)
    told = json.loads((tmp_path / "work" / "metrics.jsonl").read_text())
    assert told["rows_live"] > 0
    before, after = (initial_weights(TrainSpec(env="arena", init=one)).weights for one in (SHIPPED, tmp_path / "out"))
    assert any(
        not torch.equal(one, two) for one, two in zip(before.model.parameters(), after.model.parameters(), strict=True)
    )
    if "kl_weight" in change:
        assert told["kl_reference"] == pytest.approx(0.0, abs=1e-6)


def test_plans_of_dead_groups_are_held_near_the_first_weights() -> None:
    """Nothing in a dead group says which plan is better; without this practice may forget what it rarely meets."""
    bench = Bench(arena(kl_weight=1.0, lr=3e-5))
    weights, settings = bench.initial.weights, bench.spec.settings
    rows = [replace(row, reward=0.5) for row in bench.rows()]
    first = copy.deepcopy(weights)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in weights.model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    optimizer = torch.optim.AdamW(weights.model.parameters(), lr=1e-4)
    told = [learn(weights, bench.masks, optimizer, rows, settings, step, first) for step in range(6)]
    assert {each["rows_live"] for each in told} == {0}
    assert told[-1]["kl_reference"] < told[0]["kl_reference"] / 2


def test_held_rows_do_not_dilute_what_live_ones_teach() -> None:
    norms = []
    for kl_weight in (0.0, 1e-9):
        bench = Bench(arena(prompts=4, kl_weight=kl_weight, gradient_norm_max=1e9))
        rows = bench.rows()
        dead = {row.question for row in rows[: len(rows) // 2]}
        rewards = [0.5 if row.question in dead else number // 2 % 2 for number, row in enumerate(rows)]
        rows = [replace(row, reward=reward) for row, reward in zip(rows, rewards, strict=True)]
        weights = bench.initial.weights
        optimizer = torch.optim.AdamW(weights.model.parameters(), lr=1e-4)
        told = learn(weights, bench.masks, optimizer, rows, bench.spec.settings, 0, copy.deepcopy(weights))
        assert 0 < told["rows_live"] < len(rows)
        norms.append(told["gradient_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


# ---------------------------------------------------------------- adapters, large models


def test_an_adapter_is_written_as_peft_does_and_merges_to_the_same(tmp_path: Path) -> None:
    spec = arena(steps=2, lora_rank=2, lr=1e-2)
    train(spec, tmp_path / "adapter", tmp_path / "w1", False, quiet)
    merged = spec.model_copy(update={"settings": spec.settings.model_copy(update={"lora_merge": True})})
    train(merged, tmp_path / "full", tmp_path / "w2", False, quiet)
    manifest = read_complete(tmp_path / "adapter").manifest
    assert (manifest.kind, manifest.rounds) == ("adapter", spec.settings.rounds)
    assert manifest.base == "arena@3"
    assert manifest.base_sha256 == read_complete(SHIPPED).manifest.sha256["model.safetensors"]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", 2)
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    base, full = (load_file(one / "model.safetensors") for one in (SHIPPED, tmp_path / "full"))
    name = "model.layers.1.self_attn.q_proj"
    down, up = (tensors[f"base_model.model.{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
    assert torch.allclose(full[f"{name}.weight"], base[f"{name}.weight"] + 16 / 2 * up @ down, atol=1e-5)
    assert not torch.equal(full[f"{name}.weight"], base[f"{name}.weight"])
    assert torch.equal(full["lm_head.weight"], base["lm_head.weight"])
    written = read_complete(tmp_path / "full").manifest
    assert written.probe["logprobs"] == pytest.approx(manifest.probe["logprobs"], abs=1e-5)


def test_lora_without_a_layer_of_that_name_is_one_line() -> None:
    with pytest.raises(ConfigError, match="no linear layer is named wq"):
        initial_weights(arena(lora_rank=2, lora_targets=("wq",)))


def test_transformers_gives_the_same_rows_and_scores() -> None:
    pytest.importorskip("transformers")
    small, large = Bench(arena()), Bench(arena(engine="large"))
    assert large.initial.weights.shares_prompts
    left, right = small.rows(), large.rows()
    assert [row.plan_ids for row in left] == [row.plan_ids for row in right]
    for one, other in zip(left, right, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    for piece in passes(right, range(len(right)), 4096, True):
        with torch.no_grad():
            found = score(large.initial.weights, large.masks, piece, entropy=False)
        for index, row in enumerate(piece.rows):
            assert found.logprobs[index, : len(row.plan_ids)].tolist() == pytest.approx(row.logprobs, abs=1e-3)


# ---------------------------------------------------------------- runs that end otherwise


def command(out: Path, *more: str) -> list[str]:
    settings = [f"--set={name}={value}" for name, value in
                {"steps": 4, "prompts": 2, "samples": 4, "observed": 0, "candidates": 20, "checkpoint_steps": 1,
                 "lr": 1e-3}.items()]  # fmt: skip
    return [sys.executable, "-m", "policy", "train", "--env", "arena", "--init", str(SHIPPED), "--out", str(out),
            *settings, *more]  # fmt: skip


def started(out: Path) -> subprocess.Popen[bytes]:
    """A run that has made its first checkpoint."""
    running = subprocess.Popen(command(out, "--set=steps=400"), cwd=ROOT, stderr=subprocess.PIPE)
    saved = out.with_name(f"{out.name}.work") / "checkpoint"
    while not saved.is_file():
        assert running.poll() is None
        time.sleep(0.01)
    return running


def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    subprocess.run(command(whole), cwd=ROOT, check=True, capture_output=True)
    running = subprocess.Popen(command(killed), cwd=ROOT, stderr=subprocess.DEVNULL)
    saved = tmp_path / "killed.work" / "checkpoint"
    while not saved.is_file():
        assert running.poll() is None
        time.sleep(0.01)
    running.kill()
    assert running.wait() == -signal.SIGKILL
    assert not killed.exists()
    subprocess.run(command(killed, "--resume"), cwd=ROOT, check=True, capture_output=True)
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    steps = [json.loads(text)["step"] for text in (tmp_path / "killed.work" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_asked_to_stop_it_writes_a_checkpoint_and_no_directory(tmp_path: Path) -> None:
    out = tmp_path / "out"
    running = started(out)
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=120)
    assert running.returncode == 143
    assert b"--resume goes on" in said.splitlines()[-1]
    assert not out.exists()


async def test_asked_to_stop_it_does_not_choose_a_place_of_the_dial() -> None:
    stop, cancelled = asyncio.Event(), asyncio.Event()

    async def choosing() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 1

    async def chosen() -> int:
        return 7

    assert await unless_stopped(chosen(), stop) == 7
    asyncio.get_running_loop().call_soon(stop.set)
    with pytest.raises(Stopped, match="--resume goes on"):
        await unless_stopped(choosing(), stop)
    assert cancelled.is_set()


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = checkpoint.Progress(step=3)
    checkpoint.save(tmp_path, "d", progress, {"w": torch.ones(2)}, {})

    def full(state: object, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(Unavailable, match=r"No space left on device.*--resume"):
        checkpoint.save(tmp_path, "d", checkpoint.Progress(step=4), {"w": torch.zeros(2)}, {})
    found = checkpoint.load(tmp_path, "d")
    assert found is not None
    assert found[0].step == 3
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_another_run_s_checkpoint_and_a_torn_one_are_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, "d", checkpoint.Progress(), {}, {})
    with pytest.raises(ConfigError, match="other settings"):
        checkpoint.load(tmp_path, "e")
    (tmp_path / "checkpoint").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="cannot be read"):
        checkpoint.load(tmp_path, "d")


def test_the_spending_cap_ends_a_run_cleanly_with_what_was_learnt(tmp_path: Path) -> None:
    bench = Bench(arena(prompts=2, steps=50))

    async def go() -> tuple[int, int]:
        scene = await scene_of(bench.spec)
        scene.environment.spend = Spend(cap_nano=8_000_000, episode_nano_max=2_000_000)
        source = SampledSource(scene, bench.conductor, bench.spec.settings, bench.initial.profile)
        trainer = Trainer(
            bench.initial.weights, bench.masks, source, bench.spec.settings, scene.environment.spend, tmp_path, "d"
        )
        found = await trainer.run(False, asyncio.Event(), quiet)
        return found.step, found.rollouts

    steps, rollouts = asyncio.run(go())
    assert 0 < steps < 50
    assert rollouts > 0
    assert (tmp_path / "checkpoint").is_file()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"init": None}, "--init DIR"),
        ({"init": ROOT / "policy"}, "config.json"),
        ({"env": "replay"}, "--data FILE and --prices FILE"),
        ({"env": "replay", "data": ROOT / "README.md", "prices": ROOT / "README.md"}, "README.md"),
        ({"env": "logged"}, "--database URL, or --export FILE"),
        ({"env": "live"}, "--env live needs --url"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    spec = TrainSpec.model_validate({"env": "arena", "init": SHIPPED, "settings": TINY, **more})
    with pytest.raises((ConfigError, VersionRefused), match=said) as error:
        train(spec, tmp_path / "out", tmp_path / "work", False, quiet)
    assert "\n" not in error.value.message
    assert not (tmp_path / "out").exists()


def test_weights_of_another_prompt_are_refused(tmp_path: Path) -> None:
    init = tmp_path / "init"
    init.mkdir()
    for path in SHIPPED.iterdir():
        (init / path.name).write_bytes(path.read_bytes())
    told = json.loads((init / "manifest.json").read_text())
    (init / "manifest.json").write_text(json.dumps(told | {"prompt_hash": "0" * 64}))
    with pytest.raises(VersionRefused, match=r"trained on prompt compact-1 \(0{12}"):
        train(arena().model_copy(update={"init": init}), tmp_path / "out", tmp_path / "work", False, quiet)


def test_a_directory_that_is_there_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is there already"):
        train(arena(), tmp_path, tmp_path / "work", False, quiet)


def test_episodes_of_routers_have_no_rows() -> None:
    bench = Bench(arena())
    [(_, episode), *_] = episodes_of(bench)
    bare = replace(episode.record, rounds=[replace(r, planner="rule") for r in episode.record.rounds])
    episode = Episode("q", 0, "", True, 1.0, 0, 0.0, 1, 1, ("a",), bare)
    assert rows_of(episode, 1.0, "q", "") == []


def test_state_names_survive_an_adapter() -> None:
    plain = initial_weights(arena())
    adapted = initial_weights(arena(lora_rank=4))
    assert set(lora.plain_state(adapted.weights.model)) == set(plain.weights.model.state_dict())
    assert all(name.endswith((".lora_A", ".lora_B")) for name in trainable(adapted.weights.model))
    ids, present = forked.padded([[1, 2, 3], [4]], plain.weights.device)
    assert present.tolist() == [[True, True, True], [True, False, False]]
    assert ids[1].tolist() == [4, forked.PAD, forked.PAD]
