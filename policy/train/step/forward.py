"""The plans of rows under the weights: forward passes that memory can hold, and the log-probs of the sampled tokens.

Shapes as in `grpo`: B rows, T plan tokens padded behind, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policy.train.step.masks import Masks, unpacked
from policy.train.step.parcels import parcels
from policy.train.step.rows import TrainingRow
from policy.train.weights.small import Weights


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
    where torch records them; `entropy`: those of the entropy too."""
    plans = [row.plan_ids for row in each.rows]
    logits = weights.scores(each.prompts, each.owners, plans).float()
    most = logits.shape[1]
    heat = torch.tensor([row.temperature for row in each.rows], device=logits.device)
    allowed = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    for index, row in enumerate(each.rows):
        masked = unpacked(masks.of(row.schema, row.plan_ids), weights.vocab)
        allowed[index, : len(row.plan_ids)] = torch.from_numpy(masked).to(logits.device)
    tokens = torch.zeros((len(plans), most), dtype=torch.long, device=logits.device)
    present = torch.zeros_like(tokens, dtype=torch.bool)
    for index, plan in enumerate(plans):
        tokens[index, : len(plan)] = torch.tensor(plan, device=logits.device)
        present[index, : len(plan)] = True
    heated = logits / heat[:, None, None]
    logprobs = token_logprobs(heated, tokens, allowed=allowed)
    with torch.set_grad_enabled(entropy and torch.is_grad_enabled()):
        spread = token_entropy(heated, allowed=allowed)
    return PlanScores(logprobs, spread, present)


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
