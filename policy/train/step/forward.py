"""The plans of rows under the weights: forward passes that memory can hold, and the log-probs of the sampled tokens.

Shapes as in `grpo`: B rows, T plan tokens padded behind, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from policy.train.step.masks import Bits, Masks, unpacked
from policy.train.step.parcels import parcels
from policy.train.step.rows import TrainingRow
from policy.train.weights.forked import present
from policy.train.weights.small import Weights

LOGITS_MAX = 1 << 24  # held at once: 64 MiB in float32


@dataclass(frozen=True, slots=True)
class PlanScores:
    """Rows under the weights, each [B, T]. `entropy` in nats; `present` is false on padding."""

    logprobs: Tensor
    entropy: Tensor
    present: Tensor


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The rows of one pass. `numbers`: each row's number in the batch; `owners`: the index of its prompt."""

    rows: list[TrainingRow]
    numbers: list[int]
    prompts: list[Sequence[int]]
    owners: list[int]


def passes(rows: Sequence[TrainingRow], numbers: Sequence[int], tokens_max: int, shared: bool) -> list[ForwardPass]:
    """The rows of these numbers as passes of at most `tokens_max` tokens (`parcels`)."""
    own = [rows[number] for number in numbers]
    cut = parcels([row.prompt_ids for row in own], [len(row.plan_ids) for row in own], tokens_max, shared)
    return [
        ForwardPass([own[at] for at in one.rows], [numbers[at] for at in one.rows], one.prompts, one.owners)
        for one in cut
    ]


def score(weights: Weights, masks: Masks, each: ForwardPass, *, entropy: bool) -> PlanScores:
    """Score the plans of one pass after temperature and grammar mask, as they were sampled. Gradients are recorded
    where torch records them; `entropy`: those of the entropy too. A token that the grammar forced has log-prob and
    entropy 0 whatever the weights are, so the head is spared it."""
    plans = [row.plan_ids for row in each.rows]
    bits = np.stack([one for row in each.rows for one in masks.of(row.schema, row.plan_ids)])
    free = np.flatnonzero(np.bitwise_count(bits).sum(1) > 1)
    free = free if len(free) else np.arange(1)  # a loss without any gradient is an error to torch
    states = weights.states(each.prompts, each.owners, plans)
    which = torch.from_numpy(free).to(states.device)
    tokens = torch.tensor([token for plan in plans for token in plan], device=states.device)
    heat = torch.tensor([row.temperature for row in each.rows for _ in row.plan_ids], device=states.device)
    pieces = [
        _piece(weights, states[at], tokens[at], heat[at], bits[at.cpu().numpy()], entropy, again=len(which) > len(at))
        for at in which.split(max(1, LOGITS_MAX // weights.vocab))
    ]
    shown = present([len(plan) for plan in plans], states.device)
    logprobs, spread = (
        torch.zeros(shown.shape, device=states.device).masked_scatter(
            shown, torch.zeros(len(tokens), device=states.device).index_copy(0, which, torch.cat(values))
        )
        for values in zip(*pieces, strict=True)
    )
    return PlanScores(logprobs, spread, shown)


def _piece(
    weights: Weights, states: Tensor, tokens: Tensor, heat: Tensor, bits: Bits, entropy: bool, *, again: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of some tokens [n]. `again`: their logits are computed again in the backward pass."""

    def head(states: Tensor) -> tuple[Tensor, Tensor]:
        allowed = torch.from_numpy(unpacked(list(bits), weights.vocab)).to(states.device)
        scaled = _masked(weights.logits(states), heat[:, None], allowed)
        spread = torch.log_softmax(scaled, dim=-1)
        return _chosen(spread, tokens, allowed), _entropy(spread if entropy else spread.detach())

    if again and torch.is_grad_enabled():
        found: tuple[Tensor, Tensor] = checkpoint(head, states, use_reentrant=False, preserve_rng_state=False)
        return found
    return head(states)


def behaviour(row: TrainingRow, proximal: Tensor | None) -> Sequence[float] | Tensor:
    """The stored log-probs [T] of a plan; of one that a router drew with one propensity, those by which the weight of
    each token against `proximal` is that of the whole plan, π_proximal(plan) / propensity."""
    if row.propensity is None or proximal is None:
        return row.logprobs
    ours = proximal[: len(row.plan_ids)]
    return ours - (ours.sum() - math.log(row.propensity))


def padded(rows: Sequence[Sequence[float] | Tensor], like: Tensor) -> Tensor:
    """The rows as one tensor [B, T] of the shape and device of `like`, 0 behind the end of each."""
    out = torch.zeros(like.shape, device=like.device)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.as_tensor(row, device=like.device)
    return out


def token_logprobs(
    logits: Tensor, tokens: Tensor, *, temperature: float = 1.0, allowed: Tensor | None = None
) -> Tensor:
    """Log-probs of the sampled tokens [B, T] under logits [B, T, V], after temperature and grammar mask.

    `allowed` [B, T, V] bool is the mask the server decoded with; with it the numbers equal the stored behaviour's for
    the same weights. Raises ValueError where a sampled token was not allowed: then mask and log do not belong together.
    """
    return _chosen(torch.log_softmax(_masked(logits, temperature, allowed), dim=-1), tokens, allowed)


def token_entropy(logits: Tensor, *, temperature: float = 1.0, allowed: Tensor | None = None) -> Tensor:
    """Entropy in nats of each next-token distribution [B, T] from logits [B, T, V], over allowed tokens only."""
    return _entropy(torch.log_softmax(_masked(logits, temperature, allowed), dim=-1))


def _chosen(spread: Tensor, tokens: Tensor, allowed: Tensor | None) -> Tensor:
    chosen = spread.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if allowed is not None and bool((chosen == -math.inf).any()):
        raise ValueError("a sampled token is outside the grammar mask: rows and masks are of different schemas")
    return chosen


def _entropy(spread: Tensor) -> Tensor:
    return -(spread.exp() * spread.masked_fill(spread == -math.inf, 0.0)).sum(-1)


def _masked(logits: Tensor, temperature: float | Tensor, allowed: Tensor | None) -> Tensor:
    scaled = logits.float() / temperature
    return scaled if allowed is None else scaled.masked_fill(~allowed, -math.inf)
