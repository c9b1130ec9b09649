"""GRPO's functions against values computed by hand, and the directions in which their gradients push."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the train extra is not installed")

from policy.train.step import forward, grpo, measures  # noqa: E402
from policy.train.step.grpo import LossSettings, grpo_loss  # noqa: E402
from policy.train.step.rows import (  # noqa: E402
    MissingLogprobs,
    require_logprobs,
)

pytestmark = pytest.mark.train
PLAIN = LossSettings()


def close(found: Any, wanted: Any, tolerance: float = 1e-6) -> bool:
    return bool(torch.allclose(torch.as_tensor(found).double(), torch.as_tensor(wanted).double(), atol=tolerance))


def rows(*values: list[float]) -> Any:
    return torch.tensor(values)


def full(like: Any) -> Any:
    return torch.ones_like(like, dtype=torch.bool)


# ---------------------------------------------------------------- rows that cannot be trained on


def test_rows_without_logprobs_are_refused_by_name() -> None:
    require_logprobs(["a", "b"], [[1, 2], [3]], [[-0.5, 0.0005], [-2.0]])
    require_logprobs([], [], [])
    bad: list[list[float] | None] = [None, [], [-1.0], [-1.0, math.nan], [-1.0, -math.inf], [-1.0, 0.5], [-1.0, -1.0]]
    names = [f"rollout-{n}" for n in range(len(bad))]
    with pytest.raises(MissingLogprobs, match=r"in 6 of 7 rows \(rollout-0, .*rollout-4 and 1 more\)"):
        require_logprobs(names, [[1, 2]] * len(bad), bad)
    with pytest.raises(MissingLogprobs, match=r"1 of 1 rows \(empty\)"):
        require_logprobs(["empty"], [[]], [[]])
    with pytest.raises(ValueError, match="zip"):
        require_logprobs(["a"], [], [])


def test_a_stored_logprob_that_is_no_number_never_reaches_the_loss() -> None:
    behaviour = rows([-1.0, math.nan])
    with pytest.raises(MissingLogprobs):
        grpo_loss(rows([-1.0, -1.0]), behaviour, torch.ones(1), full(behaviour), PLAIN)
    padded = torch.tensor([[True, False]])
    assert math.isfinite(grpo_loss(rows([-1.0, -1.0]), behaviour, torch.ones(1), padded, PLAIN).metrics["loss"])


# ---------------------------------------------------------------- advantages


def test_group_advantages_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 0.5, 1.0, 0.0, 0.7]), torch.tensor([7, 7, 2, 2, 7, 7, 9])
    assert close(grpo.group_advantages(rewards, groups), [0.5, -0.5, 0, 0, 0.5, -0.5, 0])
    assert close(grpo.group_advantages(rewards, groups, divide_by_std=True), [1, -1, 0, 0, 1, -1, 0])
    three = torch.tensor([0.0, 0.0, 0.9])
    zeros = torch.zeros(3, dtype=torch.long)
    root = math.sqrt(0.18)  # population variance of (0, 0, 0.9)
    assert close(grpo.group_advantages(three, zeros), [-0.3, -0.3, 0.6])
    assert close(grpo.group_advantages(three, zeros, divide_by_std=True), [-0.3 / root, -0.3 / root, 0.6 / root])
    assert close(grpo.batch_advantages(three), [-0.3, -0.3, 0.6])
    assert close(grpo.batch_advantages(three, divide_by_std=True).mean(), 0)
    assert grpo.batch_advantages(torch.zeros(0)).shape == (0,)


def test_dead_groups_are_counted_by_group_and_stay_dead_under_rounding() -> None:
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.0, 1.0, 0.5])
    groups = torch.tensor([0, 0, 0, 1, 1, 2])
    assert grpo.dead_rows(rewards, groups).tolist() == [True, True, True, False, False, True]
    assert grpo.dead_share(rewards, groups) == pytest.approx(2 / 3)
    assert grpo.dead_share(rewards, groups, std_min=0.5) == 1.0
    assert grpo.dead_share(torch.zeros(0), torch.zeros(0)) == 0.0
    assert grpo.group_advantages(rewards, groups, divide_by_std=True)[:3].tolist() == [0, 0, 0]


# ---------------------------------------------------------------- tokens


def test_logprobs_and_entropy_follow_temperature_and_grammar() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0), 5.0]]])
    only_two = torch.tensor([[[True, True, False]]])
    assert close(forward.token_logprobs(logits, torch.tensor([[1]]), allowed=only_two), [[math.log(0.75)]])
    halved = math.log(3**2 / (1 + 3**2))
    assert close(forward.token_logprobs(logits, torch.tensor([[1]]), temperature=0.5, allowed=only_two), [[halved]])
    assert float(forward.token_logprobs(logits, torch.tensor([[1]]))) < math.log(0.75)
    wanted = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert close(forward.token_entropy(logits, allowed=only_two), [[wanted]])
    assert close(forward.token_entropy(torch.zeros(1, 1, 8)), [[math.log(8)]])
    forced = torch.tensor([[[False, True, False]]])
    assert close(forward.token_logprobs(logits, torch.tensor([[1]]), allowed=forced), [[0.0]])
    assert close(forward.token_entropy(logits, allowed=forced), [[0.0]])
    with pytest.raises(ValueError, match="different schemas"):
        forward.token_logprobs(logits, torch.tensor([[2]]), allowed=only_two)


def test_masked_entropy_has_a_finite_gradient() -> None:
    logits = torch.zeros(1, 1, 3, requires_grad=True)
    forward.token_entropy(logits, allowed=torch.tensor([[[True, True, False]]])).sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_the_loss_mask_leaves_out_padding_task_text_and_dead_rows() -> None:
    present = torch.tensor([[True, True, False], [True, True, True]])
    decisions = torch.tensor([[True, False, True], [True, True, True]])
    live = torch.tensor([True, False])
    assert grpo.loss_mask(present, decisions, live).tolist() == [[True, True, False], [False] * 3]
    only = grpo.loss_mask(present, decisions, live, decisions_only=True)
    assert only.tolist() == [[True, False, False], [False] * 3]


def test_log_ratio_ignores_whatever_stands_in_the_padding() -> None:
    mask = torch.tensor([[True, False, False]])
    found = grpo.log_ratio(rows([-1.0, math.nan, -math.inf]), rows([-1.5, 0.0, -math.inf]), mask)
    assert found.tolist() == [[0.5, 0.0, 0.0]]


def test_truncated_weights_stop_at_the_cap_and_carry_no_gradient() -> None:
    ratio_log = torch.tensor([[0.0, math.log(1.5), 5.0, -3.0]], requires_grad=True)
    weights = grpo.truncated_weights(ratio_log, 2.0)
    assert close(weights, [[1.0, 1.5, 2.0, math.exp(-3.0)]])
    assert not weights.requires_grad


def test_stale_tokens_go_largest_first_until_the_second_moment_fits() -> None:
    ratio_log = rows([0.1, -0.4, 0.2, 9.0])  # squares .01 .16 .04; the last is padding
    mask = torch.tensor([[True, True, True, False]])

    def kept(tau: float) -> object:
        return grpo.fresh_mask(ratio_log, mask, tau).tolist()

    assert kept(0.0701) == [[True, True, True, False]]  # mean of all three is .07
    assert kept(0.0699) == [[True, False, True, False]]
    assert kept(0.0251) == [[True, False, True, False]]  # mean of two is .025
    assert kept(0.02) == [[True, False, False, False]]
    assert kept(0.009) == [[False] * 4]
    assert grpo.fresh_mask(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool), 1.0).sum() == 0


def test_the_staleness_bound_holds_whatever_the_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        ratio_log = torch.randn(5, 7, generator=generator) * 3
        mask = torch.rand(5, 7, generator=generator) < 0.7
        kept = grpo.fresh_mask(ratio_log, mask, 0.5)
        assert not (kept & ~mask).any()
        assert float((ratio_log[kept] ** 2).mean() if kept.any() else 0) <= 0.5 + 1e-6
        left = (ratio_log[mask & ~kept] ** 2).tolist()
        if left:
            grown = torch.cat([ratio_log[kept] ** 2, torch.tensor([min(left)])])
            assert float(grown.mean()) > 0.5, "one more token would have fitted"


def test_k3_is_zero_at_equality_positive_elsewhere_and_close_to_kl() -> None:
    logprobs = torch.tensor([0.7, 0.3]).log().repeat(1, 1)
    reference = torch.tensor([0.6, 0.4]).log().repeat(1, 1)
    assert close(grpo.k3_kl(logprobs, logprobs, full(logprobs)), [[0.0, 0.0]])
    found = grpo.k3_kl(logprobs, reference, full(logprobs))
    assert (found > 0).all()
    expected = (torch.tensor([0.7, 0.3]) * found[0]).sum()  # its mean over tokens drawn from π is KL(π‖reference)
    assert close(expected, 0.7 * math.log(0.7 / 0.6) + 0.3 * math.log(0.3 / 0.4))


@pytest.mark.parametrize("x", [-90.0, -20.5, -20.0, -19.0, -1.0, -0.1, 0.1, 3.0, 30.0])
def test_k3_pulls_back_at_every_distance(x: float) -> None:
    """The gradient is 1 − e^−x as far as e^20, and there it stays: never of the other sign."""
    logprobs = torch.tensor([[x - 0.5]], dtype=torch.float64, requires_grad=True)
    reference, mask = torch.tensor([[-0.5]], dtype=torch.float64), torch.tensor([[True]])
    grpo.k3_kl(logprobs, reference, mask).sum().backward()
    assert logprobs.grad is not None
    slope = float(logprobs.grad)
    assert slope == pytest.approx(1 - math.exp(-max(x, -20.0)))
    step = 1e-4
    ends = (grpo.k3_kl(logprobs.detach() + sign * step, reference, mask) for sign in (1, -1))
    up, down = (float(value) for value in ends)
    assert slope == pytest.approx((up - down) / (2 * step), rel=1e-4 if x != -20 else 1e-3)


def test_one_step_down_the_kl_term_goes_towards_the_reference() -> None:
    for now in (-25.0, -0.01):
        logprobs = torch.tensor([[now]], requires_grad=True)
        settings = LossSettings(kl_weight=1.0)
        loss = grpo_loss(
            logprobs, torch.tensor([[now]]), torch.tensor([0.0]), full(logprobs), settings, reference=rows([-1.0])
        )
        loss.value.backward()
        assert logprobs.grad is not None
        assert math.isfinite(float(logprobs.grad))
        assert (float(logprobs.grad) < 0) == (now < -1.0)


def test_token_mean_weighs_rows_by_length_and_splits_add_up() -> None:
    values, mask = rows([1.0, 1.0, 1.0], [4.0, 9.0, 9.0]), torch.tensor([[True] * 3, [True, False, False]])
    assert float(grpo.token_mean(values, mask)) == pytest.approx(7 / 4)
    parts = [grpo.token_mean(values[n : n + 1], mask[n : n + 1], token_count=4) for n in (0, 1)]
    assert float(sum(parts)) == pytest.approx(7 / 4)
    assert float(grpo.token_mean(values, torch.zeros_like(mask))) == 0.0


# ---------------------------------------------------------------- the loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "clipped"),
    [
        (1.0, 1.0, 1.0, False),
        (1.2, 1.0, 1.2, False),
        (1.5, 1.0, 1.28, True),
        (0.5, 1.0, 0.5, False),
        (1.5, -2.0, -3.0, False),
        (0.5, -2.0, -1.6, True),
        (30.0, -2.0, -20.0, True),
        (30.0, 0.0, 0.0, False),
    ],
)
def test_the_clip_by_hand(ratio: float, advantage: float, objective: float, clipped: bool) -> None:
    found, hit = grpo.clipped_objective(rows([math.log(ratio)]), torch.tensor([advantage]), PLAIN)
    assert close(found, [[objective]], 1e-5)
    assert hit.tolist() == [[clipped]]


def gradient(ratio: float, advantage: float, **more: Any) -> float:
    behaviour = rows([-1.0])
    logprobs = (behaviour + math.log(ratio)).requires_grad_()
    grpo_loss(logprobs, behaviour, torch.tensor([advantage]), full(behaviour), LossSettings(), **more).value.backward()
    return float(logprobs.grad)


def test_good_tokens_rise_bad_ones_fall_and_clipped_ones_rest() -> None:
    assert gradient(1.0, 1.0) == pytest.approx(-1.0)  # descent raises the log-prob
    assert gradient(1.0, -1.0) == pytest.approx(1.0)
    assert gradient(1.0, 0.0) == 0.0
    assert gradient(1.3, 1.0) == 0.0
    assert gradient(0.7, -1.0) == 0.0
    assert gradient(0.7, 1.0) == pytest.approx(-0.7)  # back into the trust region is never clipped
    assert gradient(1.3, -1.0) == pytest.approx(1.3, rel=1e-5)
    assert gradient(11.0, -1.0) == 0.0  # dual clip
    assert gradient(math.exp(80), 1.0) == 0.0
    assert gradient(math.exp(80), -1.0) == 0.0


def test_at_the_logged_policy_the_gradient_is_the_policy_gradient() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 5, 6, generator=generator, requires_grad=True)
    tokens = torch.randint(6, (4, 5), generator=generator)
    mask = torch.rand(4, 5, generator=generator) < 0.8
    advantages = torch.randn(4, generator=generator)
    stored = forward.token_logprobs(logits, tokens).detach()
    loss = grpo_loss(forward.token_logprobs(logits, tokens), stored, advantages, mask, PLAIN)
    (found,) = torch.autograd.grad(loss.value, logits)
    plain = -(forward.token_logprobs(logits, tokens) * advantages[:, None] * mask).sum() / mask.sum()
    (wanted,) = torch.autograd.grad(plain, logits)
    assert close(found, wanted)
    assert loss.metrics["ratio_mean"] == loss.metrics["weight_mean"] == pytest.approx(1)
    assert loss.metrics["ess_share"] == pytest.approx(1)
    assert loss.metrics["clip_share"] == loss.metrics["m2"] == loss.metrics["kl_behaviour"] == 0


def test_split_batches_accumulate_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(4)
    behaviour = -torch.rand(6, 4, generator=generator)
    logprobs = (behaviour + 0.1 * torch.randn(6, 4, generator=generator)).requires_grad_()
    mask = torch.rand(6, 4, generator=generator) < 0.6
    advantages = torch.randn(6, generator=generator)
    (whole,) = torch.autograd.grad(grpo_loss(logprobs, behaviour, advantages, mask, PLAIN).value, logprobs)
    for part in (slice(0, 2), slice(2, 6)):
        cut = grpo_loss(
            logprobs[part], behaviour[part], advantages[part], mask[part], PLAIN, token_count=int(mask.sum())
        )
        cut.value.backward()
    assert close(logprobs.grad, whole)


def test_with_a_proximal_policy_the_clip_is_around_it_and_the_log_only_weighs() -> None:
    proximal = rows([-1.0, -1.0])
    behaviour = rows([-1.0 - math.log(1.5), -6.0])  # weights 1.5, and 148 cut to 2
    logprobs = (proximal + math.log(1.1)).requires_grad_()
    loss = grpo_loss(logprobs, behaviour, torch.ones(1), full(proximal), PLAIN, proximal=proximal)
    assert float(loss.value.detach()) == pytest.approx(-(1.5 * 1.1 + 2.0 * 1.1) / 2, rel=1e-5)
    assert loss.metrics["weight_truncated_share"] == 0.5
    assert loss.metrics["clip_share"] == 0.0
    loss.value.backward()
    assert (logprobs.grad < 0).all()


def test_stale_tokens_neither_pull_nor_dilute() -> None:
    behaviour = rows([-1.0, -1.0, -4.0])
    logprobs = rows([-1.0, -1.0, -1.0]).requires_grad_()
    settings = LossSettings(staleness_max=0.04)
    loss = grpo_loss(logprobs, behaviour, torch.tensor([-1.0]), full(behaviour), settings)
    loss.value.backward()
    assert logprobs.grad.tolist() == [[0.5, 0.5, 0.0]]
    assert loss.metrics["stale_share"] == pytest.approx(1 / 3)


def test_kl_pulls_towards_the_reference_and_entropy_spreads() -> None:
    behaviour, advantages = rows([-1.0]), torch.zeros(1)
    for reference, sign in ((-2.0, 1), (-0.5, -1)):
        logprobs = behaviour.clone().requires_grad_()
        settings = LossSettings(kl_weight=0.1)
        loss = grpo_loss(logprobs, behaviour, advantages, full(behaviour), settings, reference=rows([reference]))
        loss.value.backward()
        assert math.copysign(1, float(logprobs.grad)) == sign
        x = -1.0 - reference
        assert loss.metrics["kl_reference"] == pytest.approx(math.exp(-x) + x - 1, rel=1e-4)
    logits = torch.tensor([[[2.0, 0.0]]], requires_grad=True)
    settings = LossSettings(entropy_weight=0.1)
    entropy = forward.token_entropy(logits)
    loss = grpo_loss(behaviour, behaviour, advantages, full(behaviour), settings, entropy=entropy)
    loss.value.backward()
    assert float(logits.grad[0, 0, 0]) > 0 > float(logits.grad[0, 0, 1])  # descent lowers the likelier token
    assert loss.metrics["entropy"] == pytest.approx(float(entropy.detach()))


def test_settings_that_need_a_tensor_say_so() -> None:
    behaviour = rows([-1.0])
    for settings, named in ((LossSettings(kl_weight=0.1), "reference"), (LossSettings(entropy_weight=0.1), "entropy")):
        with pytest.raises(ValueError, match=named):
            grpo_loss(behaviour, behaviour, torch.ones(1), full(behaviour), settings)


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip_low": 0.0},
        {"clip_low": 1.1},
        {"clip_high": 0.0},
        {"clip_high": 9.0},
        {"ratio_max": 1.2},
        {"weight_max": 0.5},
        {"staleness_max": 0.0},
        {"kl_weight": -1.0},
        {"entropy_weight": math.nan},
    ],
)
def test_settings_without_a_bound_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="needs"):
        LossSettings(**wrong)


def test_metrics_by_hand() -> None:
    ratio_log = rows([math.log(2.0), 0.0], [math.log(0.5), math.log(0.5)], [3.0, 3.0])
    mask = torch.tensor([[True, True], [True, True], [False, False]])
    found = measures.ratio_metrics(ratio_log, mask)
    two = math.log(2)
    assert found["ratio_mean"] == pytest.approx((2 + 1 + 0.5 + 0.5) / 4)
    assert found["ratio_max"] == pytest.approx(2)
    assert found["m2"] == pytest.approx(3 * two**2 / 4)
    assert found["kl_behaviour"] == pytest.approx((2 - 1 - two + 2 * (0.5 - 1 + two)) / 4)
    assert found["weight_mean"] == pytest.approx((2 + 0.25) / 2)
    assert found["ess_share"] == pytest.approx(2.25**2 / (4 + 0.0625) / 2)
    assert set(measures.ratio_metrics(ratio_log, torch.zeros_like(mask)).values()) == {0.0}


def test_metrics_stay_finite_far_from_the_log() -> None:
    for shift in (-500.0, 500.0):
        found = measures.ratio_metrics(torch.full((3, 40), shift), torch.ones(3, 40, dtype=torch.bool))
        assert all(math.isfinite(value) for value in found.values())
        assert found["ess_share"] == pytest.approx(1)  # alone it sees nothing: the mean weight does
        assert not 0.85 < found["weight_mean"] < 1.15


def test_a_bandit_learns_off_policy_from_one_log() -> None:
    """Three arms, one log of 2,000 pulls at fixed propensities, forty passes: the best arm wins."""
    generator = torch.Generator().manual_seed(5)
    propensity = torch.tensor([0.5, 0.3, 0.2])
    tokens = torch.multinomial(propensity, 2_000, replacement=True, generator=generator).unsqueeze(-1)
    paid = torch.tensor([0.2, 0.4, 0.8])[tokens[:, 0]]
    rewards = (torch.rand(2_000, generator=generator) < paid).float()
    behaviour, advantages = propensity.log()[tokens], grpo.batch_advantages(rewards)
    logits = propensity.log().clone().requires_grad_()
    for _ in range(40):
        logprobs = forward.token_logprobs(logits.expand(2_000, 1, 3), tokens)
        loss = grpo_loss(logprobs, behaviour, advantages, full(behaviour), LossSettings(clip_low=1.0, clip_high=8.9))
        (step,) = torch.autograd.grad(loss.value, logits)
        logits = (logits - 2.0 * step).detach().requires_grad_()
    assert int(logits.argmax()) == 2
    assert float(torch.softmax(logits.detach(), 0)[2]) > 0.8
