"""Learning from plans that the rule drew: the weight is that of the whole plan, its expectation the policy's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from policy.dataset.row import Row
from policy.dataset.rules import Rules, why_left_out

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch")

from policy.train.run.initial import initial_weights  # noqa: E402
from policy.train.run.session import train  # noqa: E402
from policy.train.settings import Settings, settings_of  # noqa: E402
from policy.train.sources.logged import LoggedSource, TrainableRows, likely, of_dataset  # noqa: E402
from policy.train.sources.taught import Tutor, drawn  # noqa: E402
from policy.train.spec import TrainSpec  # noqa: E402
from policy.train.step.forward import behaviour  # noqa: E402
from policy.train.step.grpo import LossSettings, grpo_loss  # noqa: E402
from policy.train.step.masks import Masks  # noqa: E402
from policy.train.step.region import log_kl, scored  # noqa: E402
from policy.train.step.rows import TrainingRow, plan_weight  # noqa: E402
from tests.policy.test_train_sft import SHIPPED, call, export  # noqa: E402

CAP_OFF = LossSettings(weight_max=1e9)
WEIGHT_MAX = Settings().weight_max
RULE: dict[str, Any] = {"planner": "rule", "prompt_hash": None, "prompt_version": None, "policy_version": None}


def ruled(number: int, handle: str, propensity: float | None, outcome: float, **changes: Any) -> Row:
    """A request that the rule planned."""
    decision = {"planner": "rule", "chosen": handle} | ({} if propensity is None else {"propensity": propensity})
    return call(number, handle, outcome, **(RULE | {"decision": decision} | changes))


def a_plan(tokens: int, propensity: float) -> TrainingRow:
    ids, zeros = tuple(range(tokens)), (0.0,) * tokens
    return TrainingRow((1,), ids, zeros, (True,) * tokens, {}, 1.0, 0.0, "r", "q", propensity=propensity)


def test_the_expected_gradient_over_the_rules_draws_is_the_policys_own() -> None:
    """Plans of two tokens over three workers: Σ μ(a) · weight · ∇ log π(a) · A(a) is ∇ Σ π(a) · A(a)."""
    chances, gains = torch.tensor([0.9, 0.08, 0.02]), torch.tensor([-0.4, 0.1, 0.6])
    first, second = torch.tensor([0.2, -0.3, 0.5]), torch.tensor([0.1, 0.4, -0.2])

    def logprobs(parameters: Any) -> Any:  # [3, 2]: each plan's two tokens
        return torch.stack([torch.log_softmax(parameters[0], 0), torch.log_softmax(parameters[1], 0)], dim=1)

    parameters = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    ours = logprobs(parameters)
    rows = [a_plan(2, float(chance)) for chance in chances]
    weighed = torch.stack([torch.as_tensor(behaviour(row, ours[at].detach())) for at, row in enumerate(rows)])
    mask = torch.ones(3, 2, dtype=torch.bool)
    loss = sum(
        chances[at]
        * 2  # a mean over the two tokens of a plan
        * grpo_loss(
            ours[at : at + 1],
            weighed[at : at + 1],
            gains[at : at + 1],
            mask[at : at + 1],
            CAP_OFF,
            proximal=ours[at : at + 1],
        ).value
        for at in range(3)
    )
    loss.backward()
    free = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    objective = (logprobs(free).sum(1).exp() * gains).sum()
    objective.backward()
    for one, other in zip(parameters, free, strict=True):
        assert torch.allclose(one.grad, -other.grad, atol=1e-6)


def test_the_weight_of_a_rare_draw_is_truncated() -> None:
    row = a_plan(2, 0.01)
    ours = torch.tensor([-0.5, -0.5])
    weight = (ours - torch.as_tensor(behaviour(row, ours))).exp()
    assert torch.allclose(weight, torch.full((2,), float(torch.tensor(-1.0).exp()) / 0.01))
    loss = grpo_loss(
        ours[None], torch.as_tensor(behaviour(row, ours))[None], torch.ones(1), torch.ones(1, 2, dtype=torch.bool),
        LossSettings(), proximal=ours[None],
    )  # fmt: skip
    assert loss.metrics["weight_truncated_share"] == 1.0
    assert float(loss.value) == pytest.approx(-WEIGHT_MAX)


@pytest.fixture(scope="module")
def student() -> Any:
    return initial_weights(TrainSpec(env="logged", init=SHIPPED))


def found(student: Any, rows: list[Row]) -> TrainableRows:
    tutor = Tutor(student.tokens, Masks(student.tokens), student.profile, student.weights.context)
    return of_dataset(rows, student.manifest.prompt_hash, Settings().reward, partial(drawn, tutor=tutor))


def test_what_the_rule_drew_is_a_row_and_what_it_only_chose_is_none(student: Any) -> None:
    rows = [
        ruled(1, "atlas", 0.7, 1.0),
        ruled(2, "atlas", None, 1.0),
        ruled(3, "atlas", 0.7, 1.0, fallback="slow"),
        call(4, "atlas", 1.0, planner="vote", decision={"planner": "vote"}),
        ruled(5, "stranger", 0.7, 1.0),
    ]
    log_rows = found(student, rows)
    assert [(row.episode, row.propensity) for row in log_rows.rows] == [("r1atlas", 0.7)]
    assert log_rows.refused == ["no_propensity", "no_propensity", "no_propensity", "no_plan"]
    assert of_dataset(rows[:1], "x", Settings().reward).refused == ["drawn"], "of an engine that knows no propensity"
    assert [why_left_out(row, Rules(), 1) for row in rows[:2]] == [None, "no_propensity"]
    assert why_left_out(ruled(1, "atlas", 0.7, 1.0, log_mode="redacted"), Rules(), 1) == "redacted"


def test_a_drawn_row_has_the_log_probs_of_the_first_weights_and_its_weight(student: Any) -> None:
    log_rows, masks = found(student, [ruled(1, "atlas", 0.7, 1.0)]), Masks(student.tokens)
    (row,) = scored(student.weights, masks, log_rows.rows, 16_384)
    assert len(row.logprobs) == len(row.plan_ids)
    assert max(row.logprobs) <= 0.0
    likelihood = torch.tensor(sum(row.logprobs)).exp()
    assert plan_weight(row, WEIGHT_MAX) == pytest.approx(min(WEIGHT_MAX, float(likelihood) / 0.7))
    assert log_kl(student.weights, masks, [row], settings_of("logged", ())) == pytest.approx(0.0, abs=1e-6)


def test_a_plan_that_the_weights_would_hardly_make_is_left_out() -> None:
    rare = a_plan(2, 0.9)
    rows = [
        TrainingRow(**{name: getattr(rare, name) for name in TrainingRow.__slots__} | {"logprobs": (-x, 0.0)})
        for x in (0.1, 9.0)
    ]
    log_rows = likely(TrainableRows(rows, 1, ["lost"]), WEIGHT_MAX)
    assert (log_rows.rows, log_rows.refused) == (rows[:1], ["lost", "unlikely"])


def test_the_source_counts_what_was_drawn(student: Any) -> None:
    log_rows = found(student, [ruled(1, "atlas", 0.7, 1.0), ruled(2, "quill", 0.3, 0.0)])
    assert LoggedSource(log_rows, "arena@3")._metrics["drawn_share"] == 1.0


def test_the_worker_that_was_right_is_planned_more_often_than_the_rule_tried_it(tmp_path: Path) -> None:
    """The rule drew `quill` nine times in ten; the log's outcomes say `atlas`."""
    draws = [("atlas", 0.1, 1.0) if n % 10 == 0 else ("quill", 0.9, 0.0) for n in range(60)]
    path = export(tmp_path / "log.parquet", [ruled(n, *each) for n, each in enumerate(draws)])
    changes = ("requests_min=40", "log_kl_requests=0", "steps=6", "minibatches=2", "lr=0.001")
    spec = TrainSpec(env="logged", init=SHIPPED, export=path, settings=settings_of("logged", changes))
    said: list[str] = []
    train(spec, tmp_path / "out", tmp_path / "work", False, said.append)
    assert said[0].startswith("60 plans of 60 requests")
    before, after = chance_of_atlas(SHIPPED), chance_of_atlas(tmp_path / "out")
    assert after > before + 0.1, (before, after)


def chance_of_atlas(directory: Path) -> float:
    """On a question that the log does not have."""
    student = initial_weights(TrainSpec(env="logged", init=directory))
    rows = found(student, [ruled(77, "atlas", 0.5, 1.0)]).rows
    (row,) = scored(student.weights, Masks(student.tokens), rows, 16_384)
    return float(torch.tensor(sum(row.logprobs)).exp())
