"""The trainer's parts that need no torch: rows out of records, the curriculum, settings, metrics, pieces."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.core.log.rollout import RolloutRecord, RoundRecord
from gateway.core.loop.plan import PlanLimits, plan_schema, schema_hash
from gateway.core.policies.manifest import Manifest
from gateway.errors import ConfigError
from gateway.service.ports.request import Sampling
from policy.dataset.refusals import RowRefused, listed
from policy.environments.base import Episode
from policy.serve.shape import load_shape
from policy.serve.tokens import Tokens
from policy.spec import checked
from policy.train import metrics
from policy.train.run.command import add, run, spec_of
from policy.train.settings import Settings, settings_of
from policy.train.sources.curriculum import Curriculum
from policy.train.spec import SETTINGS_SINCE, TrainSpec, chosen, plain_filters
from policy.train.step.masks import Masks, OutsideGrammar
from policy.train.step.parcels import parcels
from policy.train.step.rows import TrainingRow, grouped, require_outcomes, row_of
from tests.policy.dataset_rows import a_verdict

SHIPPED = Path(__file__).resolve().parents[2] / "policy" / "shipped" / "arena-3"


def planned(allowed: PlanLimits, number: int = 1) -> RoundRecord:
    return RoundRecord(
        number,
        "conductor",
        policy_version="toy@1",
        prompt_token_ids=[5, 6, 7],
        plan_token_ids=[8, 9],
        plan_logprobs=[-0.1, 0.0],
        decision_mask=[True, True],
        sampling=asdict(Sampling(temperature=1.0)),
        schema_hash=schema_hash(plan_schema(allowed)),
        allowed=allowed.as_json(),
    )


def record(rounds: list[RoundRecord]) -> RolloutRecord:
    return RolloutRecord("r", "k", "o", 0, "conductor", "p", "h", [], {}, {}, "c", rounds=rounds)


def row(prompt: tuple[int, ...], episode: str, reward: float = 0.0, *, first: bool = True) -> TrainingRow:
    question = episode.split("/")[0]
    return TrainingRow(prompt, (8, 9), (0.0, 0.0), (True, True), {}, 1.0, reward, episode, question, first=first)


# ---------------------------------------------------------------- rows


def test_a_reward_says_nothing_of_where_a_task_s_text_ends() -> None:
    """The token after free text ends it; those before the text and after that one are decisions."""
    made = planned(PlanLimits(("atlas",), 5))
    made = replace(made, plan_token_ids=[8] * 6, plan_logprobs=[-0.1] * 6)
    made = replace(made, decision_mask=[True, True, False, False, True, True])
    assert row_of(record([made]), made, 0.5, "e", "q", "c").decisions == (True, True, False, False, False, True)
    cut_off = replace(made, decision_mask=[True] * 4 + [False] * 2)
    assert row_of(record([cut_off]), cut_off, 0.5, "e", "q", "c").decisions == (*[True] * 4, False, False)


def test_a_row_s_schema_follows_from_what_its_round_was_allowed() -> None:
    later = planned(PlanLimits(("atlas", "quill"), 5, first_index=2, depth_capped=frozenset({"me"})), number=2)
    made = row_of(record([later]), later, 0.5, "e", "q", "c")
    assert schema_hash(made.schema) == later.schema_hash
    assert (made.prompt_ids, made.plan_ids, made.logprobs) == ((5, 6, 7), (8, 9), (-0.1, 0.0))
    assert not made.first


def test_a_row_of_an_old_log_has_the_grammar_it_was_decoded_under() -> None:
    """Before a vote had to see a reply, what merges did not change the schema."""
    allowed = PlanLimits(("atlas", "tally"), 5, merges=frozenset({"tally"}))
    former = plan_schema(replace(allowed, merges=frozenset()))
    assert schema_hash(former) != schema_hash(plan_schema(allowed))
    old = replace(planned(allowed), schema_hash=schema_hash(former))
    assert row_of(record([old]), old, 0.5, "e", "q", "c").schema == former


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"plan_logprobs": []}, "no_logprobs"),
        ({"plan_logprobs": [0.5, 0.0]}, "no_logprobs"),
        ({"plan_token_ids": []}, "no_tokens"),
        ({"prompt_token_ids": []}, "no_tokens"),
        ({"decision_mask": [True]}, "no_logprobs"),
        ({"sampling": asdict(Sampling(temperature=0.0))}, "greedy"),
        ({"sampling": asdict(Sampling(temperature=1.0, top_p=0.9))}, "nucleus"),
        ({"sampling": asdict(Sampling(temperature=1.0, top_k=50))}, "other_sampling"),
        ({"sampling": asdict(Sampling(temperature=1.0, min_p=0.1))}, "other_sampling"),
        ({"sampling": asdict(Sampling(temperature=1.0, repetition_penalty=1.1))}, "other_sampling"),
        ({"sampling": {"temperature": 1.0, "top_p": 1.0}}, "other_sampling"),
        ({"schema_hash": "0" * 64}, "other_schema"),
        ({"allowed": None}, "no_allowed"),
    ],
)
def test_a_call_that_cannot_be_trained_on_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    one = replace(planned(PlanLimits(("atlas", "quill", "me"), 5)), **change)
    with pytest.raises(RowRefused, match=reason) as refused:
        row_of(record([one]), one, 0.5, "e", "q", "")
    assert refused.value.reason == reason
    assert listed({reason: 1}).startswith(f"1 {reason} (")


def test_rows_that_answered_the_same_prompt_form_a_group() -> None:
    rows = [
        row((1,), "q/0"),
        row((1,), "q/1"),
        row((1, 2), "q/0", first=False),
        row((1, 2), "q/1", first=False),
        row((1, 3), "q/1", first=False),
    ]
    same, episodes = grouped(rows)
    assert same == [0, 0, 1, 1, 2]
    assert episodes == [0, 0, 0, 0, 0]


def test_rewards_that_teach_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="no rollout is left"):
        require_outcomes([])
    with pytest.raises(ConfigError, match="same reward"):
        require_outcomes([0.7, 0.7])
    require_outcomes([0.7, 0.1])


# ---------------------------------------------------------------- curriculum


def curriculum(explore: float = 0.0) -> Curriculum:
    return Curriculum({f"q{index}": "even" if index % 2 == 0 else "odd" for index in range(40)}, explore, 0.01)


def test_questions_in_doubt_come_first() -> None:
    one = curriculum()
    for index in range(40):
        one.learn(f"q{index}", [1.0, 0.0] * 8 if index < 8 else [1.0] * 16)
    counts: Counter[str] = Counter()
    for draw in range(200):
        counts.update(one.chosen(8, Random(draw)))
    doubtful = sum(counts[f"q{index}"] for index in range(8))
    assert doubtful > 0.5 * counts.total()  # a fifth, were they chosen evenly
    assert len(counts) == 40  # and the floor leaves none out


def test_a_question_never_asked_is_judged_by_its_category() -> None:
    one = curriculum()
    for index in range(0, 20, 2):
        one.learn(f"q{index}", [1.0] * 16)
    assert one.success("q30") > 0.9
    assert one.success("q31") == pytest.approx(0.5)
    assert one.weight("q31") > one.weight("q30")


def test_questions_that_all_workers_agree_on_weigh_less_or_nothing() -> None:
    one = curriculum()
    one.agreeing, one.agreeing_weight = frozenset({"q1"}), 0.25
    assert one.weight("q1") == pytest.approx(0.25 * one.weight("q3"))
    one.agreeing_weight = 0.0
    assert all("q1" not in one.chosen(30, Random(draw)) for draw in range(20))


@settings(deadline=None)
@given(st.integers(1, 60), st.floats(0, 1), st.integers(0, 99))
def test_a_choice_is_of_different_questions_and_a_function_of_the_seed(n: int, explore: float, seed: int) -> None:
    first, again = (curriculum(explore).chosen(n, Random(seed)) for _ in range(2))
    assert first == again
    assert len(set(first)) == len(first) == min(n, 40)


def test_the_state_of_a_curriculum_survives_a_checkpoint() -> None:
    one, other = curriculum(), curriculum()
    one.learn("q1", [1.0, 0.0, 1.0])
    one.learn("q1", [1.0])
    other.restore(json.loads(json.dumps(one.state())))
    assert other.success("q1") == one.success("q1")
    assert other.success("q3") == one.success("q3")


# ---------------------------------------------------------------- pieces and masks


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=40),
    st.integers(8, 200),
    st.booleans(),
)
def test_every_row_is_in_one_piece_and_pieces_fit(rows: list[tuple[int, int]], most: int, shared: bool) -> None:
    prompts = [tuple(range(3 + 2 * which)) for which, _ in rows]
    plans = [plan for _, plan in rows]
    cut = parcels(prompts, plans, most, shared)
    assert sorted(number for one in cut for number in one.rows) == list(range(len(rows)))
    for one in cut:
        assert one.owners == sorted(one.owners)
        assert [one.prompts[owner] for owner in one.owners] == [prompts[number] for number in one.rows]
        longest, plan = max(map(len, one.prompts)), max(plans[number] for number in one.rows)
        if shared:
            size = len(one.prompts) * (longest + max(Counter(one.owners).values()) * plan)
        else:
            size = len(one.rows) * (longest + plan)
        assert size <= most or len(one.rows) == 1


def test_masks_are_those_that_the_server_decodes_under() -> None:
    tokens = Tokens(SHIPPED, load_shape(SHIPPED))
    masks, schema = Masks(tokens), plan_schema(PlanLimits(("atlas", "quill"), 2))
    text = '{"steps":[{"worker":"quill","task":"add","see":[]},{"worker":"atlas","task":null,"see":[0]}]}'
    ids = [*Tokenizer.from_file(str(SHIPPED / "tokenizer.json")).encode(text, add_special_tokens=False).ids]
    ids.append(tokens.eos_ids[0])
    matcher = tokens.matcher(schema)
    for bits, token in zip(masks.of(schema, ids), ids, strict=True):
        assert bits.tobytes() == matcher.compute_bitmask()
        matcher.consume_token(token)
    with pytest.raises(OutsideGrammar):
        masks.of(schema, [ids[1], *ids])
    masks.forget(bytes_max=0)
    assert len(masks.of(schema, ids)) == len(ids)


# ---------------------------------------------------------------- settings, spec, metrics


def test_profiles_and_changes_make_settings() -> None:
    assert (settings_of("paper", []).samples, settings_of("paper", []).prompts) == (64, 4)
    changed = settings_of(
        "small", ["lr=0.001", "quality=0-9", "k_of_n=[2, 4]", "staleness_max=none", "advantage=batch"]
    )
    assert (changed.lr, changed.quality, changed.k_of_n, changed.staleness_max) == (0.001, (0, 9), (2, 4), None)
    assert changed.advantage == "batch"


@pytest.mark.parametrize("change", ["lr", "speed=3", "lr=-1", "lr=fast", "quality=9-2", "quality=0-10", "k_of_n=0-3"])
def test_a_bad_setting_is_one_line(change: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings_of("small", [change])
    assert "\n" not in error.value.message
    assert change.partition("=")[0] in error.value.message


def test_the_rate_rises_and_falls() -> None:
    flat = Settings(steps=100, warmup_share=0.1, lr=1e-3)
    assert [flat.rate(0), flat.rate(9), flat.rate(99)] == pytest.approx([1e-4, 1e-3, 1e-3])
    cosine = Settings(steps=100, warmup_share=0.0, lr=1e-3, schedule="cosine", lr_floor=0.1)
    assert cosine.rate(0) == pytest.approx(1e-3)
    assert 1e-4 <= cosine.rate(99) < 2e-4


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args(arguments)


def test_a_checkpoint_of_a_run_without_the_penalties_goes_on() -> None:
    """Its digest is of the settings that it knew."""
    plain, counting = (spec_of(options("--env", "arena", *more)) for more in ((), ("--set", "missed_penalty=0.01")))
    known = plain.model_dump(mode="json", exclude={"name", "version", "profile", "rollouts"})
    known["settings"] = {
        name: value for name, value in known["settings"].items() if name not in ("checkpoint_steps", *SETTINGS_SINCE)
    }
    assert plain.digest() == hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    assert counting.digest() != plain.digest()


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    spec = spec_of(
        options("--env", "logged", "--database", "postgresql://x", "--since", "2026-01-01", "--tag", "team=blue",
                "--pool", "a", "--key-share", "1", "--set", "lr=0.01")
    )  # fmt: skip
    assert spec.settings.steps == settings_of("logged", []).steps
    path = tmp_path / "spec.json"
    path.write_text(spec.model_dump_json())
    again = spec_of(options("--spec", str(path)))
    assert (again, again.digest()) == (spec, spec.digest())
    selection, rules = chosen(again.filters)
    assert (selection.tags, selection.pools, rules.key_share_max) == ((("team", "blue"),), ("a",), 1.0)
    assert selection.since is not None
    assert chosen(plain_filters(selection, rules)) == (selection, rules)


def test_a_spec_file_is_trained_as_its_arguments_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from policy.train.run.session import TrainResult

    seen: list[TrainSpec] = []

    def train(spec: TrainSpec, *_: object) -> TrainResult:
        seen.append(spec)
        manifest = Manifest("toy", "2", "compact-1", "h", 0, "", "", "", 0)
        return TrainResult(tmp_path / "out", manifest, 1, 1, 0, False)

    monkeypatch.setattr("policy.train.run.session.train", train)
    path = tmp_path / "spec.json"
    path.write_text('{"env": "arena", "staff": "fresh", "settings": {"steps": 7}}')
    assert run(options("--spec", str(path), "--out", str(tmp_path / "out"))) == 0
    words = ("--env", "arena", "--staff", "fresh", "--set", "steps=7")
    assert run(options(*words, "--out", str(tmp_path / "out"))) == 0
    assert seen[0] == seen[1] == TrainSpec(env="arena", staff="fresh", settings=Settings(steps=7))
    manifest = tmp_path / "manifest.json"  # of a version, which a spec can be read from too
    manifest.write_text(json.dumps({"sha256": {}, "config": seen[0].model_dump(mode="json", exclude={"database"})}))
    assert spec_of(options("--spec", str(manifest))) == seen[0]


@pytest.mark.parametrize(
    ("values", "profile"),
    [
        ({"env": "arena"}, "small"),
        ({"env": "logged"}, "logged"),
        ({"env": "replay"}, "recorded"),
        ({"env": "replay", "init": "x"}, "small"),
        ({"env": "arena", "profile": "paper"}, "paper"),
    ],
)
def test_settings_that_are_not_given_are_the_profiles(values: dict[str, Any], profile: str) -> None:
    assert checked(TrainSpec, values).settings == settings_of(profile, [])
    changed = checked(TrainSpec, {**values, "settings": {"lr": 0.5}})
    assert changed.settings == settings_of(profile, ["lr=0.5"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no --env"),
        (("--env", "live", "--usd-max", "0"), "0 dollars allow nothing"),
        (("--env", "arena", "--set", "x=1"), "--set x=1"),
        (("--env", "logged", "--since", "soon"), "--since"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        spec_of(options(*arguments))
    assert "\n" not in error.value.message


def test_a_spec_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    for content, said in (
        (None, "cannot be read"),
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ('{"env": "moon"}', "env: Input should be"),
        ('{"env": "logged", "filters": {"mood": 1}}', "filters: no filter `mood`"),
    ):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=f"--spec {path}: {said}") as error:
            spec_of(options("--spec", str(path)))
        assert "\n" not in error.value.message


def test_concentration_and_shares() -> None:
    assert metrics.of_workers(["a", "a", "b", "c"]) == {
        "worker_share": {"a": 0.5, "b": 0.25, "c": 0.25},
        "worker_hhi": pytest.approx(0.375),
    }


def test_verdicts_are_counted_an_episode_where_there_are_any() -> None:
    blank = Episode("p", 0, "", True, 1.0, 0, 0.0, 1, 1, (), record([]))
    assert "verdicts" not in metrics.of_episodes([blank], [1.0])
    checked_once = replace(blank, verdicts=(a_verdict(accept=True), a_verdict("verify", step=1, checker="check")))
    told = metrics.of_episodes([blank, checked_once], [1.0, 1.0])
    assert told["verdicts"] == {"kept": 0.5, "rejected": 0.5}


def test_metrics_of_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    metrics.MetricsFile(path, 2).add({"step": 3, "reward": 0.5})
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [1, 2, 3]


def test_the_command_needs_no_torch_until_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, policy.train.run.command; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setattr("policy.train.run.command.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[train,embedded\]'") as error:
        run(options("--env", "arena", "--out", str(tmp_path / "out")))
    assert "\n" not in error.value.message
    with pytest.raises(ConfigError, match="no --out DIR"):
        run(options("--env", "arena"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--env", "arena"), "--env logged, --export FILE and --init DIR"),
        (("--env", "logged", "--init", "x"), "--env logged, --export FILE and --init DIR"),
        (("--env", "logged", "--export", "x", "--init", "y", "--profile", "paper"), "takes no --profile"),
        (("--env", "logged", "--export", "x", "--init", "y"), "scripts/install trl"),
    ],
)
def test_the_engine_for_many_devices_says_what_it_lacks(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("policy.train.run.command.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=said) as error:
        run(options(*arguments, "--engine", "trl", "--out", str(tmp_path / "out")))
    assert "\n" not in error.value.message


def test_an_engine_is_a_setting() -> None:
    assert spec_of(options("--env", "arena", "--engine", "large")).settings.engine == "large"
    assert spec_of(options("--env", "arena")).settings.engine == "auto"
