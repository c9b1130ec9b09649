"""A step that stays near the log: `grpo.learn`, shortened until the gate's triage would still believe the log.

The gate refuses weights that do what the log hardly has (`kl_to_behaviour`). A step over logged rows may go far beyond
that bound. So after each step the distance to the log is measured, and where it is too far the step is halved, as in a
trust region's backtracking line search (Schulman et al., arXiv:1502.05477, appendix C).

Few requests allow a short way only: what they say of a plan is mostly chance, and a step fits that, too. Of 254
explored requests four steps within 0.3 nats made a good conductor 1 to 3 points worse (docs/results.md).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from policy.train.settings import Settings
from policy.train.step.forward import passes, score
from policy.train.step.grpo import learn
from policy.train.step.masks import Masks
from policy.train.step.rows import TrainingRow, plan_weight
from policy.train.weights.small import Weights, trainable

MEASURED_MAX = 400  # planning calls, of the first requests
HALVINGS_MAX = 6  # then the weights before the step stay


def learn_near(
    weights: Weights,
    masks: Masks,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[TrainingRow],
    settings: Settings,
    step: int,
    reference: Weights | None,
) -> dict[str, float]:
    """`grpo.learn`, with the step shortened until KL(logged ‖ new) is at most `settings.log_kl_bound` nats a request.
    The metrics get `log_kl` and `step_share`, the share of the step that was taken: 0 where no share of it is near."""
    bound = settings.log_kl_bound(len({row.episode for row in rows}))
    if bound is None:
        return learn(weights, masks, optimizer, rows, settings, step, reference)
    before = {name: each.detach().clone() for name, each in trainable(weights.model).items()}
    figures = learn(weights, masks, optimizer, rows, settings, step, reference)
    after = {name: each.detach().clone() for name, each in trainable(weights.model).items()}
    share, kl = 1.0, log_kl(weights, masks, rows, settings)
    for _ in range(HALVINGS_MAX):
        if kl <= bound:
            break
        share /= 2
        _put(weights, before, after, share)
        kl = log_kl(weights, masks, rows, settings)
    if kl > bound:
        share = 0.0
        _put(weights, before, after, share)
        kl = log_kl(weights, masks, rows, settings)
    return {**figures, "log_kl": kl, "step_share": share}


def scored(weights: Weights, masks: Masks, rows: Sequence[TrainingRow], tokens_max: int) -> list[TrainingRow]:
    """The rows, those that a router drew with their log-probs under these weights."""
    numbers, out = [at for at, row in enumerate(rows) if row.propensity is not None], list(rows)
    with torch.no_grad():
        for each in passes(rows, numbers, tokens_max, weights.shares_prompts):
            logprobs = score(weights, masks, each, entropy=False).logprobs.tolist()
            for number, row, ours in zip(each.numbers, each.rows, logprobs, strict=True):
                out[number] = replace(row, logprobs=tuple(ours[: len(row.plan_ids)]))
    return out


def log_kl(weights: Weights, masks: Masks, rows: Sequence[TrainingRow], settings: Settings) -> float:
    """KL(logged ‖ weights) in nats a request, over decision tokens, as the gate's triage measures it; infinity where a
    logged plan has become impossible. Of plans that a router drew it is KL(first weights ‖ weights), each with its
    truncated importance weight: how far the router is from the first weights is not the step's doing."""
    lost: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = {}
    with torch.no_grad():
        for each in passes(rows, range(min(len(rows), MEASURED_MAX)), settings.tokens_max, weights.shares_prompts):
            logprobs = score(weights, masks, each, entropy=False).logprobs
            for row, ours in zip(each.rows, logprobs.tolist(), strict=True):
                decided = zip(row.logprobs, ours, row.decisions, strict=False)  # `ours` is padded behind
                share = plan_weight(row, settings.weight_max)
                lost[row.episode] += share * sum(was - now for was, now, decides in decided if decides)
                counts[row.episode] = share
    kl = sum(lost.values()) / max(1.0, sum(counts.values()))
    return kl if math.isfinite(kl) else math.inf


def _put(weights: Weights, before: Mapping[str, Tensor], after: Mapping[str, Tensor], share: float) -> None:
    """Set the weights to `share` of the way from `before` to `after`."""
    with torch.no_grad():
        for name, each in trainable(weights.model).items():
            each.copy_(before[name] if share == 0 else torch.lerp(before[name], after[name], share))
