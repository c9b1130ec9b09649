"""The GRPO step in one file, from rewards to the gradient. Read `learn` first; what it calls follows in its order.

1. Advantages: each row's reward against a baseline (`advantages_of`).
2. Minibatches × epochs: log-probs of the plans under the weights (`forward.score`), the loss of their tokens
   (`grpo_loss`: ratio, clip, weights, KL, entropy), its gradient, one step of the optimizer.

Shapes: B rows (one sampled plan each), T plan tokens (padded behind), V vocabulary. Masks are bool, true where a token
counts. Beside it: `rows` (a row), `parcels`, `forward` (passes), `masks` (the grammar's), `measures` (metrics).

Log-probs come in three kinds. `logprobs`: the weights being trained, with gradient. `behaviour`: what the server stored
when it sampled, after temperature and grammar mask; never recomputed, since logs without them destroyed a policy in one
round. `proximal`: the weights at the start of the update, or None where one batch makes one pass. Of a plan that a
router drew with propensity μ, the weight is min(π_proximal(plan) / μ, cap), and the ratio is taken against `proximal`.

Sources: GRPO (Shao et al., arXiv:2402.03300); no division by std and its bias (Dr. GRPO, 2503.20783); token-level
normalisation and clip-higher (DAPO, 2503.14476); leave-one-out baseline (RLOO, 2402.14740); decoupled clipping (Hilton
et al., 2110.00641; AReaL, 2505.24298); truncated weights (Ionides 2008); dual clip (Ye et al., 1912.09729); second
moment of the log-ratio (M2PO, 2510.01161); k3 (Schulman 2020, joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from policy.environments.base import rng_for
from policy.train.settings import Settings
from policy.train.step.forward import ForwardPass, behaviour, padded, passes, score
from policy.train.step.masks import Masks
from policy.train.step.measures import LOG_RATIO_MAX, Means, ratio_metrics, share
from policy.train.step.rows import MissingLogprobs, TrainingRow, grouped
from policy.train.weights.small import Weights, trainable

DEAD_STD = 1e-6  # a group whose rewards spread less teaches nothing


# ---------------------------------------------------------------- the step


def learn(
    weights: Weights,
    masks: Masks,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[TrainingRow],
    settings: Settings,
    step: int,
    reference: Weights | None,
) -> dict[str, float]:
    """Train on the rows: `epochs` × `minibatches` optimizer steps. Returns metrics, means over tokens."""
    advantages, metrics = advantages_of(rows, settings), Means()
    live = advantages.live.nonzero()[:, 0].tolist()
    # these two hold the plans of dead groups, too: practice made SmolLM2 forget what it rarely does
    if trained := list(range(len(rows))) if settings.kl_weight or settings.entropy_weight else live:
        batch_loss = _BatchLoss(weights, masks, rows, advantages, settings, reference)
        batch_loss.store_proximal([at for at in trained if settings.decoupled or rows[at].propensity is not None])
        for epoch in range(settings.epochs):
            for numbers in minibatches(rows, trained, settings.minibatches, (settings.seed, "order", step, epoch)):
                optimizer.param_groups[0]["lr"] = settings.rate(step)
                optimizer.zero_grad(set_to_none=True)
                batch_loss.backward(numbers, metrics)
                parameters = list(trainable(weights.model).values())
                norm = torch.nn.utils.clip_grad_norm_(parameters, settings.gradient_norm_max)
                finite = bool(torch.isfinite(norm))
                metrics.add({"gradient_norm": float(norm) if finite else 0.0, "skipped_share": float(not finite)}, 1.0)
                if finite:  # one overflow must not end in weights that are no numbers
                    optimizer.step()
    return {"rows_live": len(live), "dead_share": advantages.dead_share, **metrics.read()}


def minibatches(
    rows: Sequence[TrainingRow], numbers: Sequence[int], count: int, key: tuple[object, ...]
) -> Iterator[list[int]]:
    """Yield the rows in `count` parts of whole questions, in an order that is a function of `key`."""
    questions = sorted({rows[number].question for number in numbers})
    rng_for(*key).shuffle(questions)
    part = {question: index * count // len(questions) for index, question in enumerate(questions)}
    for which in range(count):
        if batch := [number for number in numbers if part[rows[number].question] == which]:
            yield batch


# ---------------------------------------------------------------- advantages: how good a row is beside its group


@dataclass(frozen=True, slots=True)
class Advantages:
    """`values` [B] and `live` [B], false where a row teaches nothing. `dead_share` is of groups."""

    values: Tensor
    live: Tensor
    dead_share: float


def advantages_of(rows: Sequence[TrainingRow], settings: Settings) -> Advantages:
    """Rewards less a baseline (GRPO, eq. 3). A row whose prompt no other row answers (a later round that alone came to
    its state) is measured against its episode's group, if that has more than one row."""
    rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    groups, opening, means, spread = _baseline(rows, rewards, settings)
    centred = rewards - means
    if settings.advantage == "leave_one_out":  # RLOO: the mean of the others
        counts = torch.bincount(groups)[groups]
        centred = centred * counts / (counts - 1).clamp_min(1)
    std_min = max(settings.std_min, DEAD_STD)
    live = (spread > std_min) & (centred.abs() > DEAD_STD)
    if settings.divide_by_std:
        centred = centred / spread.clamp_min(max(settings.std_floor, DEAD_STD))
    dead = dead_share(rewards[opening], groups[opening], std_min)
    return Advantages(torch.where(live, centred, 0.0).float(), live, dead)


def _baseline(
    rows: Sequence[TrainingRow], rewards: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Groups [B], which rows open an episode [B], and the mean and std that each row is measured by [B]."""
    opening = torch.tensor([row.first for row in rows])
    if settings.advantage == "batch":
        groups = torch.zeros(len(rows), dtype=torch.long)
    elif settings.advantage == "category":
        number: dict[str, int] = {}
        groups = torch.tensor([number.setdefault(row.category, len(number)) for row in rows])
    else:
        return _by_prompt(rows, rewards, opening)
    return groups, opening, _means(rewards, groups), group_std(rewards, groups)


def _by_prompt(rows: Sequence[TrainingRow], rewards: Tensor, opening: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own, episodes = (torch.tensor(numbers) for numbers in grouped(rows))
    alone = torch.bincount(own)[own] < 2
    means, spread = _means(rewards, own), group_std(rewards, own)
    base_of = {group: index for index, group in enumerate(own.tolist()) if bool(opening[index])}
    for index in torch.nonzero(alone & ~opening)[:, 0].tolist():
        base = base_of.get(int(episodes[index]))
        if base is not None:
            means[index], spread[index] = means[base], spread[base]
    return own, opening, means, spread


def _means(values: Tensor, groups: Tensor) -> Tensor:
    return values - group_advantages(values, groups) if len(values) else values


def _group_means(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of each row's group [B], rows in it [B], and each row's group as 0..n−1 [B]."""
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    sums = torch.zeros_like(counts, dtype=values.dtype).index_add_(0, index, values)
    return (sums / counts)[index], counts[index], index


def group_std(rewards: Tensor, groups: Tensor) -> Tensor:
    """Population standard deviation of each row's group [B]; rewards [B], groups [B] any integers."""
    means, _, _ = _group_means(rewards, groups)
    return _group_means((rewards - means) ** 2, groups)[0].sqrt()


def group_advantages(rewards: Tensor, groups: Tensor, *, divide_by_std: bool = False) -> Tensor:
    """Reward less its group's mean [B], divided by the group's std if asked (GRPO; Dr. GRPO leaves it out).
    A group of one, like any dead group, gets 0."""
    means, _, _ = _group_means(rewards, groups)
    centred = torch.where(dead_rows(rewards, groups), 0.0, rewards - means)
    return centred / group_std(rewards, groups).clamp_min(DEAD_STD) if divide_by_std else centred


def batch_advantages(rewards: Tensor, *, divide_by_std: bool = False) -> Tensor:
    """Reward less the batch's mean [B]: for logged traffic, where every prompt has one rollout."""
    return group_advantages(rewards, torch.zeros_like(rewards, dtype=torch.long), divide_by_std=divide_by_std)


def dead_rows(rewards: Tensor, groups: Tensor, std_min: float = DEAD_STD) -> Tensor:
    """Rows of groups whose rewards do not spread by `std_min` [B] bool (ToolOrchestra drops std ≤ 0.1)."""
    return group_std(rewards, groups) <= std_min


def dead_share(rewards: Tensor, groups: Tensor, std_min: float = DEAD_STD) -> float:
    """Share of *groups* that are dead, in [0, 1]; 0 for an empty batch."""
    if not len(rewards):
        return 0.0
    _, counts, _ = _group_means(rewards, groups)
    dead = dead_rows(rewards, groups, std_min)
    return float((dead / counts).sum() / (1 / counts).sum())


# ---------------------------------------------------------------- the loss of a minibatch


class _BatchLoss:
    """The loss of a batch's rows, summed over the forward passes that it is computed in."""

    def __init__(
        self,
        weights: Weights,
        masks: Masks,
        rows: Sequence[TrainingRow],
        advantages: Advantages,
        settings: Settings,
        reference: Weights | None,
    ) -> None:
        self._weights, self._masks, self._rows = weights, masks, rows
        self._advantages, self._settings, self._reference = advantages, settings, reference
        self._proximal: dict[int, Tensor] = {}
        self._knobs = LossSettings(**{knob.name: getattr(settings, knob.name) for knob in fields(LossSettings)})

    def store_proximal(self, numbers: Sequence[int]) -> None:
        """Store the log-probs of the weights as they are now: the proximal policy of this step."""
        with torch.no_grad():
            for each in self._passes(numbers):
                found = score(self._weights, self._masks, each, entropy=False).logprobs
                for number, logprobs in zip(each.numbers, found, strict=True):
                    self._proximal[number] = logprobs

    def backward(self, numbers: Sequence[int], metrics: Means) -> None:
        """Gradients of one minibatch. Rows without advantage do not dilute what the others teach."""
        count = sum(self._token_count(self._rows[number]) for number in numbers)
        live = sum(self._token_count(self._rows[at]) for at in numbers if self._advantages.live[at])
        for each in self._passes(numbers):
            scores = score(self._weights, self._masks, each, entropy=self._settings.entropy_weight > 0)
            mask = self._mask_of(each, scores.present)
            loss = grpo_loss(
                scores.logprobs,
                self._behaviour_of(each, scores.present),
                self._advantages.values[each.numbers].to(mask.device) * (count / max(1, live)),
                mask,
                self._knobs,
                proximal=self._proximal_of(each, scores.present) if self._proximal else None,
                reference=self._reference_of(each),
                entropy=scores.entropy,
                token_count=count,
            )
            loss.value.backward()
            here, apart = max(1.0, float(mask.sum())), ("loss", "tokens", "entropy")
            shown = {name: value for name, value in loss.metrics.items() if name not in apart}
            entropy = float((scores.entropy.detach() * mask).sum()) / here
            metrics.add({**shown, "entropy": entropy}, here)
            metrics.sum({"loss": loss.metrics["loss"]})

    def _passes(self, numbers: Sequence[int]) -> list[ForwardPass]:
        return passes(self._rows, numbers, self._settings.tokens_max, self._weights.shares_prompts)

    def _token_count(self, row: TrainingRow) -> int:
        return sum(row.decisions) if self._settings.decisions_only else len(row.plan_ids)

    def _mask_of(self, each: ForwardPass, present: Tensor) -> Tensor:
        decisions = padded([list(map(float, row.decisions)) for row in each.rows], present) > 0
        return loss_mask(present, decisions, present.any(-1), decisions_only=self._settings.decisions_only)

    def _behaviour_of(self, each: ForwardPass, present: Tensor) -> Tensor:
        return padded([behaviour(self._rows[at], self._proximal.get(at)) for at in each.numbers], present)

    def _proximal_of(self, each: ForwardPass, present: Tensor) -> Tensor:
        known = [self._proximal.get(number, self._rows[number].logprobs) for number in each.numbers]
        return padded([one[: present.shape[1]] for one in known], present)

    def _reference_of(self, each: ForwardPass) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return score(self._reference, self._masks, each, entropy=False).logprobs


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Knobs of `grpo_loss`. Raises ValueError on values that turn a bound off by accident."""

    clip_low: float = 0.2  # no reward for a ratio below 1 − this; 1 turns the lower clip off
    clip_high: float = 0.28  # nor for one above 1 + this (DAPO's clip-higher)
    ratio_max: float = 10.0  # dual clip: bounds the loss of a bad plan the new weights now prefer
    weight_max: float = 2.0  # truncation of proximal/behaviour weights
    staleness_max: float | None = None  # M2PO's τ, mean squared log-ratio; the paper uses 0.04
    kl_weight: float = 0.0  # β, against a reference policy
    entropy_weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1 or not 0 < self.clip_high < self.ratio_max - 1:
            raise ValueError("needs 0 < clip_low ≤ 1 and 0 < clip_high < ratio_max − 1")
        if not self.weight_max >= 1 or (self.staleness_max is not None and not self.staleness_max > 0):
            raise ValueError("needs weight_max ≥ 1 and staleness_max > 0 (or None)")
        if not (self.kl_weight >= 0 and self.entropy_weight >= 0):
            raise ValueError("needs kl_weight ≥ 0 and entropy_weight ≥ 0")


@dataclass(frozen=True, slots=True)
class Loss:
    """`value`: scalar with gradient, to minimise. `metrics`: plain numbers by name, for the log."""

    value: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


def grpo_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: LossSettings,
    *,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    token_count: int | None = None,
) -> Loss:
    """The loss of B rows: −mean over tokens of weight·clipped − entropy_weight·H, + kl_weight·k3.

    logprobs, behaviour, proximal, reference, entropy, mask: [B, T]; advantages: [B]. Without `proximal` the ratio is
    taken against the stored behaviour itself; with it, against the proximal policy, and min(proximal/behaviour, cap)
    weighs each token. The clip bounds the step, the weight corrects for the log. Raises ValueError where a
    setting asks for a tensor that is not given, and MissingLogprobs on a stored log-prob that is not a number.
    """
    _require(settings, reference, entropy)
    if not bool(torch.isfinite(behaviour[mask]).all()):
        raise MissingLogprobs("a stored behaviour log-prob is not a finite number: check rows with `require_logprobs`")
    base = behaviour if proximal is None else proximal.detach()
    ratio_log = log_ratio(logprobs, base, mask)
    off_policy = log_ratio(logprobs, behaviour, mask).detach()
    kept = mask if settings.staleness_max is None else fresh_mask(off_policy, mask, settings.staleness_max)
    weights = truncated_weights(log_ratio(base, behaviour, mask), settings.weight_max)
    objective, clipped = clipped_objective(ratio_log, advantages, settings)
    value = -token_mean(weights * objective, kept, token_count)
    metrics = ratio_metrics(off_policy, mask)
    metrics["clip_share"] = share(clipped, kept)
    metrics["stale_share"] = 1.0 - share(kept, mask)
    metrics["weight_truncated_share"] = share(log_ratio(base, behaviour, mask) > math.log(settings.weight_max), mask)
    if reference is not None:
        kl = token_mean(k3_kl(logprobs, reference, mask), mask, token_count)
        value = value + settings.kl_weight * kl
        metrics["kl_reference"] = float(kl.detach())
    if entropy is not None:
        spread = token_mean(entropy, mask, token_count)
        value = value - settings.entropy_weight * spread
        metrics["entropy"] = float(spread.detach())
    return Loss(value, metrics | {"loss": float(value.detach()), "tokens": float(mask.sum())})


def _require(settings: LossSettings, reference: Tensor | None, entropy: Tensor | None) -> None:
    if settings.kl_weight and reference is None:
        raise ValueError("kl_weight needs `reference` log-probs; set it to 0 or give them")
    if settings.entropy_weight and entropy is None:
        raise ValueError("entropy_weight needs `entropy` from `token_entropy`; set it to 0 or give it")


# ---------------------------------------------------------------- its parts, a token each


def loss_mask(present: Tensor, decisions: Tensor, live: Tensor, *, decisions_only: bool = False) -> Tensor:
    """Tokens that train [B, T] bool: `present` [B, T] is not padding, `decisions` [B, T] is not task text (used where
    `decisions_only`), `live` [B] is false for rows without advantage, so they do not dilute the mean."""
    return (present & decisions if decisions_only else present) & live.unsqueeze(-1)


def log_ratio(logprobs: Tensor, base: Tensor, mask: Tensor) -> Tensor:
    """log π/π_base a token [B, T], exactly 0 where masked out: padding may hold anything, NaN included."""
    return torch.where(mask, logprobs, 0.0) - torch.where(mask, base, 0.0)


def truncated_weights(ratio_log: Tensor, weight_max: float) -> Tensor:
    """min(exp(log-ratio), cap) [B, T], without gradient: biased a little, of bounded variance."""
    return ratio_log.detach().clamp_max(math.log(weight_max)).exp()


def fresh_mask(ratio_log: Tensor, mask: Tensor, staleness_max: float) -> Tensor:
    """Tokens kept [B, T] bool after dropping those of largest squared log-ratio until the mean square over the kept
    ones is ≤ `staleness_max` (M2PO). Keeps as many as that allows: none, where even the smallest is over."""
    squares = torch.where(mask, ratio_log.detach() ** 2, math.inf).flatten()
    order = squares.argsort(stable=True)
    counted = torch.arange(1, len(squares) + 1, device=squares.device)
    within = squares[order].double().cumsum(0) / counted <= staleness_max
    kept = torch.zeros_like(within)
    kept[order] = within
    return kept.view_as(mask)


def k3_kl(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Schulman's k3 estimate a token [B, T] of KL(π‖reference) for tokens sampled from π: e^−x + x − 1 ≥ 0 with
    x = log π/reference; 0 where masked out. Below −LOG_RATIO_MAX it follows its tangent: a constant would push away."""
    ratio_log = log_ratio(logprobs, reference, mask)
    beyond = torch.where(ratio_log < -LOG_RATIO_MAX, -ratio_log - LOG_RATIO_MAX, 0.0) * math.exp(LOG_RATIO_MAX)
    return torch.expm1(-ratio_log.clamp_min(-LOG_RATIO_MAX)) + ratio_log + beyond


def token_mean(values: Tensor, mask: Tensor, token_count: int | None = None) -> Tensor:
    """Sum over the tokens that count ÷ their number in the whole batch (DAPO: a long plan weighs by its length).
    Pass `token_count` when the batch is split, so that the parts add up; 0 for an empty mask."""
    count = int(mask.sum()) if token_count is None else token_count
    return torch.where(mask, values, 0.0).sum() / max(count, 1)


def clipped_objective(ratio_log: Tensor, advantages: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic objective a token [B, T], to maximise, and where a clip is active [B, T] bool.

    min(ρA, clip(ρ, 1−low, 1+high)·A), and for A < 0 at least ratio_max·A: beyond it the gradient is cut, since a plan
    that was bad and is now far likelier than when logged would outweigh the batch. advantages [B].
    """
    ratio, gain = ratio_log.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp(), advantages.unsqueeze(-1)
    plain = ratio * gain
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * gain
    pessimistic = torch.minimum(plain, clipped)
    chosen = torch.where(gain < 0, torch.maximum(pessimistic, settings.ratio_max * gain), pessimistic)
    return chosen, (chosen != plain).detach()
