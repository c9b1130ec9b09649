"""Supervised training on plans that won: which ones, in whose tokens, and that a student learns them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from gateway.core.loop.plan import Plan, PlanLimits, Step, validate
from gateway.core.loop.prompt import QUALITY_MAX, Profile, schema_of
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import ConfigError
from policy.dataset import parquet
from policy.dataset.refusals import RowRefused
from policy.dataset.row import Row, StepRow
from policy.environments.executor import Executor
from policy.serve.manifest import read_complete
from policy.start.pretrained.seal import seal
from tests.policy.dataset_rows import STEP, a_row
from tests.policy.environments import PRICES, SUMS, line, lines
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch")

from policy.train.run.initial import Initial, initial_weights  # noqa: E402
from policy.train.run.searched import searched  # noqa: E402
from policy.train.run.session import train  # noqa: E402
from policy.train.settings import Settings  # noqa: E402
from policy.train.sources.taught import (  # noqa: E402
    TaughtSource,
    Tutor,
    demonstrated,
    demonstrations,
    lessons_of,
    winners,
)
from policy.train.spec import TrainSpec  # noqa: E402
from policy.train.step.masks import Masks  # noqa: E402
from policy.train.step.supervised import branched, mean_loss  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "policy" / "shipped" / "arena-3"
FAST = Settings(steps=12, prompts=6, lr=2e-3, warmup_share=0.0, checkpoint_steps=4, held_out_share=0.25)
WORKER: dict[str, Any] = {"kind": "openai", "version": "1", "tags": ["sums"], "tier": 1, "experience": None}
WORKER |= {"description": "good", "context_tokens": 8192, "latency_hint_s": 0.5}
POOL = [{"name": "alpha", "handle": "quill", **WORKER}, {"name": "beta", "handle": "atlas", **WORKER}]


def call(number: int, worker: str, outcome: float | None = 1.0, plan: Any = None, **changes: Any) -> Row:
    """A planning call of a hosted planner: no token, an older prompt."""
    asked = f"What is {number} plus {number}?"
    steps: list[dict[str, Any]] = [{"worker": worker, "task": None, "see": []}]
    given: dict[str, Any] = {
        "rollout_id": f"r{number}{worker}", "root_id": f"r{number}{worker}", "group": f"g{number}",
        "request_messages": [{"role": "user", "content": asked}], "pool": POOL, "caps": {"depth": 0, "steps": 3},
        "allowed": {"handles": ["quill", "atlas"], "steps_max": 3, "first_index": 0, "depth_capped": []},
        "plan": {"steps": steps} if plan is None else plan, "outcome": outcome,
        "outcome_n": 0 if outcome is None else 1, "prompt_token_ids": [], "plan_token_ids": [], "plan_logprobs": [],
        "decision_mask": [], "refusal": None, "quality": None, "steps": (), "cost_nano": 1000, "latency_ms": 100.0,
    }  # fmt: skip
    return a_row(**(given | changes))


@pytest.fixture(scope="module")
def student() -> Initial:
    return initial_weights(TrainSpec(env="logged", method="sft", init=SHIPPED, settings=FAST))


@pytest.fixture
def tutor(student: Initial) -> Tutor:
    return Tutor(student.tokens, Masks(student.tokens), student.profile, student.weights.context)


def export(path: Path, rows: list[Row]) -> Path:
    with path.open("wb") as file:
        parquet.write(file, parquet.row_schema(), map(parquet.row_record, rows), {"shape": "parquet"})
    return path


def log(count: int = 24) -> list[Row]:
    """A log in which `atlas` is always right, and `quill` never."""
    return [one for n in range(count) for one in (call(n, "atlas"), call(n, "quill", 0.0))]


def test_plans_that_won_are_learnt_and_the_best_of_a_question_first(tutor: Tutor) -> None:
    both: dict[str, Any] = {"steps": [{"worker": h, "task": None, "see": []} for h in ("quill", "atlas")]}
    rows = [
        call(1, "atlas", cost_nano=50_000_000),
        call(1, "quill", cost_nano=1),
        call(1, "atlas", rollout_id="r3", root_id="r3", cost_nano=2),
        call(1, "both", plan=both, cost_nano=90_000_000),
        call(2, "quill", 0.5),
        call(3, "quill", None),
        call(4, "stranger"),
        call(5, "quill", refusal="no_steps", plan=None),
        call(6, "quill", log_mode="redacted"),
        call(7, "quill", pool=[{"handle": "quill"}, {"handle": "atlas"}]),
    ]
    lessons, refused = winners(rows, tutor, FAST)
    assert [one.episode for one in lessons] == ["r1quill", "r3"]  # the cheapest of two; the dear one is atlas again
    assert lessons[0].reward > lessons[1].reward
    assert dict(refused) == {
        "worse_plan": 2, "lost": 2, "no_outcome": 1, "no_plan": 1, "redacted": 1, "no_inputs": 1,
    }  # fmt: skip
    assert winners(rows, tutor, FAST.model_copy(update={"plans_max": 3}))[1]["worse_plan"] == 1


def test_prompt_and_plan_are_in_the_students_own_tokens(student: Initial, tutor: Tutor) -> None:
    (lesson,), _ = winners([call(1, "atlas")], tutor, FAST)
    text = b"".join(student.tokens.token_bytes(token) for token in lesson.plan_ids).decode()
    assert text == '{"steps":[{"worker":"atlas","task":null,"see":[]}]}'
    assert lesson.plan_ids[-1] in student.tokens.eos_ids
    shown = b"".join(student.tokens.token_bytes(token) for token in lesson.prompt_ids).decode()
    assert "What is 1 plus 1?" in shown
    short = Tutor(student.tokens, Masks(student.tokens), student.profile, 9)
    with pytest.raises(RowRefused, match="too_long"):
        short.row(
            [{"role": "user", "content": "Q?"}],
            Plan((Step("atlas", None),)),
            PlanLimits(("atlas",), 3),
            1.0,
            "a",
            "b",
            "",
        )


CHECKED = PlanLimits(("quill", "atlas", "shelf"), 3, checkers=("atlas",), runs_tests=True, toolboxes=("shelf",))
PLAIN: dict[str, Any] = {"worker": "quill", "task": None, "see": []}
STEPS: list[list[dict[str, Any]]] = [
    [PLAIN | {"expect": {"regex": "^[0-9]+$"}}],
    [PLAIN | {"expect": {"schema": {"type": "object", "required": ["a"]}}}],
    [PLAIN | {"expect": {"min_chars": 40}}],
    [PLAIN | {"expect": {"judge": "atlas"}}],
    [PLAIN | {"expect": {"tests": ["assert f(1) == 2", "assert f(2) == 3"]}}],
    [PLAIN | {"tools": ["shelf"]}],
    [PLAIN | {"context": "last"}],
    [PLAIN | {"task": "Sum them.", "context": [1, 3]}],
    [
        PLAIN,
        {"kind": "verify", "worker": "atlas", "task": None, "see": [0], "accept": "ship", "escalate": 2},
        PLAIN | {"worker": "atlas"},
    ],
    [{"worker": "shelf", "task": '{"tool":"look","arguments":{}}', "see": []}, PLAIN | {"see": [0]}],
]


@pytest.mark.parametrize("steps", STEPS)
def test_a_student_is_taught_the_steps_that_its_prompt_tells_of_and_no_other(
    student: Initial, steps: list[dict[str, Any]]
) -> None:
    plan = validate({"why": "Sums are cheap.", "steps": steps}, CHECKED)
    asked = [{"role": "user", "content": "Q?"}]
    for profile in get_args(Profile):
        tutor = Tutor(student.tokens, Masks(student.tokens), profile, student.weights.context)
        if profile != "checked":
            with pytest.raises(RowRefused, match=r"other_steps.*--prompt checked"):
                tutor.row(asked, plan, CHECKED, 1.0, "a", "b", "")
            continue
        lesson = tutor.row(asked, plan, CHECKED, 1.0, "a", "b", "")
        text = b"".join(student.tokens.token_bytes(token) for token in lesson.plan_ids[:-1]).decode()
        assert validate(text, CHECKED) == plan
        assert lesson.schema == schema_of("checked", CHECKED)


def test_plans_that_no_grammar_lets_through_are_refused_by_that_name(student: Initial) -> None:
    tutor = Tutor(student.tokens, Masks(student.tokens), "checked", student.weights.context)
    both = [PLAIN | {"expect": {"regex": "a", "min_chars": 3}}]
    for steps in (both, [PLAIN | {"expect": {"min_chars": 3}, "context": "last"}]):
        with pytest.raises(RowRefused, match="other_form"):
            tutor.row([{"role": "user", "content": "Q?"}], validate({"steps": steps}, CHECKED), CHECKED, 1.0, *"abc")


def test_a_plan_has_its_reason_where_the_students_prompt_asks_for_one(student: Initial) -> None:
    plan, allowed = Plan((Step("atlas", None),), "It is good at sums."), PlanLimits(("atlas",), 3)
    steps = '"steps":[{"worker":"atlas","task":null,"see":[]}]}'
    for profile in get_args(Profile):
        tutor = Tutor(student.tokens, Masks(student.tokens), profile, student.weights.context)
        asks = profile in ("checked", "guided")
        for given, why in ((plan, plan.why), (replace(plan, why=""), "")):
            ids = tutor.row([{"role": "user", "content": "Q?"}], given, allowed, 1.0, *"abc").plan_ids[:-1]
            text = b"".join(student.tokens.token_bytes(token) for token in ids).decode()
            assert text == ("{" + f'"why":"{why}",' + steps if asks else "{" + steps)


def test_plans_of_a_pool_with_checkers_and_tools_are_learnt_out_of_the_log(student: Initial) -> None:
    request = {"rounds": 1, "nano_left": 10**9, "seconds_left": 60.0, "tokens": 9, "needs": []}
    shown = {"request": request, "examples": [], "errors": {}, "tools": {"shelf": ["look(text: string)"]}}
    shelf = {"name": "files", "handle": "shelf", **WORKER, "kind": "mcp"}
    more: dict[str, Any] = {"pool": [*POOL, shelf], "allowed": CHECKED.as_json(), "shown": shown}
    rows = [call(n, "quill", plan={"why": "", "steps": steps}, **more) for n, steps in enumerate(STEPS)]
    rows.append(call(len(rows), "quill", plan={"why": "", "steps": [PLAIN]}, **more))
    checked = Tutor(student.tokens, Masks(student.tokens), "checked", student.weights.context)
    lessons, refused = winners(rows, checked, FAST)
    assert (len(lessons), refused) == (len(rows), {})
    compact = Tutor(student.tokens, Masks(student.tokens), "compact", student.weights.context)
    (lesson,), refused = winners(rows, compact, FAST)
    assert refused == {"other_steps": len(STEPS)}
    prompt = b"".join(student.tokens.token_bytes(token) for token in lesson.prompt_ids).decode()
    assert "shelf" not in prompt + json.dumps(lesson.schema)  # as it is served: without tools
    assert "quill" in prompt


def test_a_demonstration_is_a_plan_or_the_answer_of_a_worker() -> None:
    plan = '{"steps":[{"worker":"atlas","task":null,"see":[]}]}'
    assert demonstrated(call(1, "quill", 0.0, demonstration=plan)) == Plan((Step("atlas", None),))
    steps = tuple(StepRow(**{**STEP, "step": n, "handle": h}) for n, h in enumerate(("quill", "atlas")))
    replies = [{"index": 0, "handle": "quill", "answer": "3", "flags": []}]
    replies += [{"index": 1, "handle": "atlas", "answer": "2.0", "flags": []}]
    edited = call(1, "quill", None, steps=steps, replies=replies, demonstration="The answer is: 2")
    assert demonstrated(edited) == Plan((Step("atlas", None),))
    assert demonstrated(replace(edited, demonstration="Answer: 5")) is None
    assert demonstrated(replace(edited, round=2)) is None
    assert demonstrated(replace(edited, demonstration=None)) is None


def test_a_student_learns_what_won(student: Initial, tmp_path: Path) -> None:
    path = export(tmp_path / "log.parquet", log())
    spec = TrainSpec(env="logged", method="sft", init=SHIPPED, export=path, settings=FAST)
    said: list[str] = []
    result = train(spec, tmp_path / "out", tmp_path / "work", False, said.append)
    lines = [json.loads(text) for text in (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["held_out_loss"] < 0.5 * lines[0]["held_out_before"]
    assert lines[0]["refused"] == {"lost": 24}
    assert "24 lost" in said[0]
    manifest = read_complete(tmp_path / "out").manifest
    assert manifest.config["method"] == "sft"
    assert manifest.data == f"plans of {result.rollouts} requests: {path}"
    assert result.rollouts == int(lines[0]["lessons"])
    learnt = initial_weights(spec.model_copy(update={"init": tmp_path / "out"}))
    rows, _ = winners(log(), Tutor(learnt.tokens, Masks(learnt.tokens), learnt.profile, 4096), FAST)
    assert mean_loss(learnt.weights, rows, 4096) < 0.5 * mean_loss(student.weights, rows, 4096)


def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    path = export(tmp_path / "log.parquet", log(16))
    settings = {"steps": 8, "prompts": 4, "checkpoint_steps": 1, "lr": 1e-3}
    spec = TrainSpec(env="logged", method="sft", init=SHIPPED, export=path, settings=Settings(**settings))
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    train(spec, tmp_path / "whole", tmp_path / "whole.work", False, lambda _: None)
    command = [sys.executable, "-m", "policy", "train", "--spec", str(tmp_path / "spec.json")]
    command += ["--out", str(tmp_path / "cut"), "--resume"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    log_file = tmp_path / "cut.work" / "metrics.jsonl"
    while not log_file.exists() or len(log_file.read_text().splitlines()) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "cut").exists()
    assert subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL, check=False).returncode == 0
    name = "model.safetensors"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_demonstrations_make_an_adapter_over_a_base(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    base = write_tiny_llama(tmp_path / "tiny-llama")
    seal(base)
    pool = tmp_path / "pool.yaml"
    price = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}
    workers = [
        {"name": n, "handle": h, "kind": "openai", "url": "http://127.0.0.1:9/v1", "model": n, "price": price}
        for n, h in (("alpha", "quill"), ("beta", "atlas"))
    ]
    pool.write_text(json.dumps({"workers": workers, "pools": {"default": ["alpha", "beta"]}}))
    plans = tmp_path / "plans.jsonl"
    shown = [{"question": f"Q{n}?", "plan": {"steps": [{"worker": "beta"}]}} for n in range(6)]
    plans.write_text("".join(json.dumps(one) + "\n" for one in shown))
    settings = Settings(steps=4, prompts=3, lr=5e-3, lora_rank=4, checkpoint_steps=4, held_out_share=0.3)
    spec = TrainSpec(env="logged", method="sft", init=base, demonstrations=plans, pool_file=pool, settings=settings)
    train(spec, tmp_path / "out", tmp_path / "work", False, lambda _: None)
    manifest = read_complete(tmp_path / "out").manifest
    assert (manifest.kind, manifest.base, manifest.data) == ("adapter", "tiny-llama@0", f"plans of {manifest.rollouts} "
        f"requests: {plans}")  # fmt: skip
    figures = [json.loads(text) for text in (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()]
    assert figures[-1]["held_out_loss"] < figures[0]["held_out_before"]
    bad = [
        ("{", r"plans.jsonl:1: not JSON"),
        ('{"plan": {}}', r"plans.jsonl:1: needs `question` or `messages`"),
        ('{"question": "x"}', r"plans.jsonl:1: plan: "),
        ('{"question": "x", "plan": {"steps": [{"worker": "gamma"}]}}', r"plans.jsonl:1: plan: .*no worker"),
    ]
    for text, said in bad:
        plans.write_text(text + "\n")
        with pytest.raises(ConfigError, match=said):
            train(spec, tmp_path / "other", tmp_path / "work2", False, lambda _: None)


def test_a_demonstration_names_workers_wherever_a_plan_does(student: Initial, tmp_path: Path) -> None:
    price = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}
    place = {"kind": "openai", "url": "http://127.0.0.1:9/v1", "model": "m", "price": price}
    given: Any = (("alpha", "quill", []), ("beta", "atlas", ["check"]))
    pool = tuple(WorkerSpec.model_validate({"name": n, "handle": h, "tags": tags, **place}) for n, h, tags in given)
    path = tmp_path / "plans.jsonl"
    steps = [{"worker": "alpha", "expect": {"judge": "beta"}}, {"worker": "beta", "see": [0], "context": "last"}]
    path.write_text(json.dumps({"question": "Q?", "plan": {"steps": steps}}))
    tutor = Tutor(student.tokens, Masks(student.tokens), "checked", student.weights.context)
    (lesson,), refused = demonstrations(path, pool, Executor(), tutor, 0)
    text = b"".join(student.tokens.token_bytes(token) for token in lesson.plan_ids).decode()
    assert not refused
    assert '"expect":{"judge":"atlas"}},{"worker":"atlas","task":null,"see":[0],"context":"last"}' in text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"env": "arena"}, "learns from the log"),
        ({"env": "replay", "method": "grpo", "prompt": "brief"}, "by --method sft alone"),
        ({"env": "logged", "demonstrations": "x"}, "need --pool-file"),
        ({"env": "logged", "method": "grpo", "demonstrations": "x", "pool_file": "y"}, "by --method sft alone"),
    ],
)
def test_what_does_not_fit_together_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainSpec.model_validate({"method": "sft", **values})


async def test_a_pass_has_every_lesson_once_and_held_out_questions_never_train(tutor: Tutor) -> None:
    found, refused = winners(log(10), tutor, FAST)
    lessons = lessons_of(found, refused, FAST)
    assert not {one.question for one in lessons.train} & {one.question for one in lessons.held_out}
    source = TaughtSource(lessons, FAST.model_copy(update={"prompts": 1}))
    rows = [(await source.batch(step)).rows[0].question for step in range(2 * len(lessons.train))]
    half = len(lessons.train)
    assert sorted(rows[:half]) == sorted(rows[half:]) == sorted(one.question for one in lessons.train)
    assert rows[:half] != rows[half:]
    with pytest.raises(ConfigError, match="no plan is left to learn from: 1 lost"):
        lessons_of(*winners([call(1, "atlas", 0.0)], tutor, FAST), FAST)


def test_prompts_of_a_question_are_computed_from_where_they_differ(student: Initial, tutor: Tutor) -> None:
    """The loss and the gradient are those of whole prompts."""
    rows = [tutor.row(
        [{"role": "user", "content": f"What is {n} plus {n}? {'again ' * 20}round {place}"}],
        Plan((Step("atlas" if place else "quill", None),)), PlanLimits(("atlas", "quill"), 3), 1.0, "e", f"q{n}", "",
    ) for n in range(3) for place in range(4)]  # fmt: skip
    cut, rests = branched(rows)
    assert [(*a.prompt_ids, *a.plan_ids) for a in cut] == [(*a.prompt_ids, *a.plan_ids) for a in rows]
    assert all(0 < rest < 10 for rest in rests)
    assert len({row.prompt_ids for row in cut}) == 3
    assert student.weights.shares_prompts
    together = mean_loss(student.weights, rows, 4096)
    apart = [replace(row, question=f"{at}") for at, row in enumerate(rows)]
    assert together == pytest.approx(mean_loss(student.weights, apart, 4096), rel=1e-5)


def test_lessons_of_a_question_stay_together_in_every_pass(tutor: Tutor) -> None:
    rows, refused = winners(log(), tutor, FAST)
    twice = [replace(row, episode=f"{row.episode} {n}") for row in rows for n in range(2)]
    source = TaughtSource(lessons_of(twice, refused, FAST), FAST)
    train = source.lessons.train
    drawn = [row for step in range(3) for row in asyncio.run(source.batch(step)).rows][: len(train)]
    assert {row.episode for row in drawn} <= {row.episode for row in train}
    pairs = [(a.question, b.question) for a, b in zip(drawn[::2], drawn[1::2], strict=False)]
    assert all(one == other for one, other in pairs)


def test_a_search_on_recorded_answers_teaches_a_base(tmp_path: Path) -> None:
    """--env replay --method sft: another prompt than the base's, a dial, an adapter that begins to plan as taught."""
    data, prices = tmp_path / "r.jsonl", tmp_path / "prices.json"
    data.write_text("\n".join(map(json.dumps, lines(60))))
    prices.write_text(json.dumps(PRICES))
    base = write_tiny_llama(tmp_path / "base")
    seal(base)
    settings = Settings(steps=3, prompts=8, lessons=40, lora_rank=4, lr=1e-2, threads=1, checkpoint_steps=2)
    spec = TrainSpec(env="replay", method="sft", prompt="brief", init=base, data=data, prices=prices, settings=settings)
    said: list[str] = []
    result = train(spec, tmp_path / "out", tmp_path / "work", resume=False, say=said.append)
    manifest = read_complete(tmp_path / "out").manifest
    assert manifest.prompt_version.startswith("brief-")
    assert manifest.quality is not None
    assert len(manifest.config["settings"]["dial"]) == QUALITY_MAX + 1
    assert result.steps == 3
    assert any("searched" in line for line in said)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


def test_questions_that_other_workers_answered_are_searched_on_their_own(tmp_path: Path, tutor: Tutor) -> None:
    """A pool of two recordings in one file: the plans of each question name only the workers that answered it."""
    rows = lines(100)
    for row in rows[100:]:
        del row["workers"]["cheap"]
    data, prices = tmp_path / "r.jsonl", tmp_path / "prices.json"
    data.write_text("\n".join(map(json.dumps, [*rows, line(9, SUMS, {"dear": "18"}, "18")])))
    prices.write_text(json.dumps(PRICES))
    settings = Settings(lessons=60, experience_share=0, redraw_handles=False)
    workers = ("cheap", "mid", "dear")
    spec = TrainSpec(env="replay", method="sft", data=data, prices=prices, workers=workers, settings=settings)
    said: list[str] = []
    searched_rows = searched(spec, tutor, said.append)
    assert sum("programs on" in line for line in said) == 2
    staffs = {row.question.split(" posed")[0] for row in searched_rows.rows}
    assert staffs == {"staff 0", "staff 1"}
    assert searched_rows.refused == {}
    assert len(searched_rows.dial) == QUALITY_MAX + 1
    spec = spec.model_copy(update={"workers": ("cheap", "mid")})
    data.write_text("\n".join(map(json.dumps, lines(8))))
    with pytest.raises(ConfigError, match="20 training questions"):
        searched(spec, tutor, said.append)
