"""Group-relative policy optimisation as pure functions over tensors: advantages, ratios, masks, the loss.

Shapes: B rows (one sampled plan each), T plan tokens (padded behind), V vocabulary. Masks are bool, true where a token
counts. Nothing here samples, steps an optimizer or reads a model; the trainer is algorithm-blind beyond these names.

Log-probs come in three kinds, kept apart on purpose. `logprobs`: the weights being trained, with gradient.
`behaviour`: what the server stored when it sampled, after temperature and grammar mask; never recomputed, since logs
without them destroyed a policy in one round. `proximal`: the weights at the start of the update, or None where one
batch makes one pass.

Sources: GRPO (Shao et al., arXiv:2402.03300); no division by std and its bias (Dr. GRPO, 2503.20783); token-level
normalisation and clip-higher (DAPO, 2503.14476); decoupled clipping (Hilton et al., 2110.00641; AReaL, 2505.24298);
truncated weights (Ionides 2008); dual clip (Ye et al., 1912.09729); second moment of the log-ratio (M2PO, 2510.01161);
k3 (Schulman 2020, joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

DEAD_STD = 1e-6  # a group whose rewards spread less teaches nothing
LOGPROB_SLACK = 1e-3  # a server's rounding may put a certain token a little over log 1
LOG_RATIO_MAX = 20.0  # beyond it exp() would overflow and 0 · inf poison the gradient; every clip is long active


class MissingLogprobs(ValueError):
    """Rows without usable behaviour log-probs; the message names them and the fix."""


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


def require_logprobs(
    names: Sequence[str], tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float] | None]
) -> None:
    """Check one stored log-prob for each sampled token of each row. Raises MissingLogprobs naming the rows."""
    bad = [name for name, ids, row in zip(names, tokens, logprobs, strict=True) if not _usable(ids, row)]
    if bad:
        shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise MissingLogprobs(
            f"no usable behaviour log-probs in {len(bad)} of {len(names)} rows ({shown}): leave them out, or serve the "
            "conductor with --logprobs-mode processed_logprobs and return_token_ids and collect anew"
        )


def _usable(ids: Sequence[int], row: Sequence[float] | None) -> bool:
    return bool(ids) and row is not None and len(row) == len(ids) and all(-math.inf < x <= LOGPROB_SLACK for x in row)


# ---------------------------------------------------------------- advantages


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


# ---------------------------------------------------------------- tokens


def token_logprobs(
    logits: Tensor, tokens: Tensor, *, temperature: float = 1.0, allowed: Tensor | None = None
) -> Tensor:
    """Log-probs of the sampled tokens [B, T] under logits [B, T, V], after temperature and grammar mask.

    `allowed` [B, T, V] bool is the mask the server decoded with; with it the numbers equal the stored behaviour's for
    the same weights. Raises ValueError where a sampled token was not allowed: then mask and log do not belong together.
    """
    spread = torch.log_softmax(_masked(logits, temperature, allowed), dim=-1)
    chosen = spread.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if allowed is not None and bool((chosen == -math.inf).any()):
        raise ValueError("a sampled token is outside the grammar mask: rows and masks are of different schemas")
    return chosen


def token_entropy(logits: Tensor, *, temperature: float = 1.0, allowed: Tensor | None = None) -> Tensor:
    """Entropy in nats of each next-token distribution [B, T] from logits [B, T, V], over allowed tokens only."""
    scaled = _masked(logits, temperature, allowed)
    spread = torch.log_softmax(scaled, dim=-1)
    return -(spread.exp() * spread.masked_fill(scaled == -math.inf, 0.0)).sum(-1)


def _masked(logits: Tensor, temperature: float, allowed: Tensor | None) -> Tensor:
    scaled = logits.float() / temperature
    return scaled if allowed is None else scaled.masked_fill(~allowed, -math.inf)


def loss_mask(present: Tensor, decisions: Tensor, live: Tensor, *, decisions_only: bool = False) -> Tensor:
    """Tokens that train [B, T] bool: `present` [B, T] is not padding, `decisions` [B, T] is not task text (used where
    `decisions_only`), `live` [B] is false for rows without advantage, so they do not dilute the mean."""
    chosen = present & decisions if decisions_only else present
    return chosen & live.unsqueeze(-1)


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
    x = log π/reference; 0 where masked out."""
    ratio_log = log_ratio(logprobs, reference, mask)
    return torch.expm1(-ratio_log.clamp_min(-LOG_RATIO_MAX)) + ratio_log


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


# ---------------------------------------------------------------- the loss


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
    metrics["clip_share"] = _share(clipped, kept)
    metrics["stale_share"] = 1.0 - _share(kept, mask)
    metrics["weight_truncated_share"] = _share(log_ratio(base, behaviour, mask) > math.log(settings.weight_max), mask)
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


def _share(hits: Tensor, mask: Tensor) -> float:
    return float((hits & mask).sum() / mask.sum().clamp_min(1))


def ratio_metrics(ratio_log: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the weights have moved from the log [B, T]: per-token ratio mean and max, mean squared log-ratio (M2), k3
    towards the log, and over whole rows the mean weight (far below 1: the weights have left what was logged) and ESS ÷
    rows, which alone reads well even then. Zeros for an empty mask."""
    tokens = torch.where(mask, ratio_log.detach().double(), 0.0).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    ratio = tokens[mask].exp()
    weights_log = tokens.sum(-1)[mask.any(-1)]
    if not len(weights_log):
        return dict.fromkeys(("ratio_mean", "ratio_max", "m2", "kl_behaviour", "weight_mean", "ess_share"), 0.0)
    ess_log = 2 * weights_log.logsumexp(0) - (2 * weights_log).logsumexp(0)
    return {
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "m2": float((tokens[mask] ** 2).mean()),
        "kl_behaviour": float((ratio - 1 - tokens[mask]).mean()),
        "weight_mean": float(weights_log.clamp_max(LOG_RATIO_MAX).exp().mean()),
        "ess_share": float(ess_log.exp()) / len(weights_log),
    }
