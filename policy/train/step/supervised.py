"""The supervised step: negative log-likelihood of the plans' tokens, their ends included, prompts as context alone.

No grammar mask and temperature 1: what is learnt is to write such a plan, its form as well as its decisions. Beside
the batch it measures the loss on plans that are held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from policy.train.settings import Settings
from policy.train.step.forward import LOGITS_MAX, ForwardPass, passes
from policy.train.step.masks import Masks
from policy.train.step.rows import TrainingRow
from policy.train.weights.small import Weights, trainable


@dataclass(slots=True)
class SupervisedStep:
    """Trains on the rows of a batch. `held_out` is measured before the first step, with each checkpoint, and last."""

    held_out: Sequence[TrainingRow]

    def learn(
        self,
        weights: Weights,
        masks: Masks,
        optimizer: torch.optim.Optimizer,
        rows: Sequence[TrainingRow],
        settings: Settings,
        step: int,
        reference: Weights | None,
    ) -> dict[str, float]:
        """One optimizer step. Returns metrics; losses are means in nats a token."""
        before = self._measured(weights, settings) if step == 0 else None
        optimizer.param_groups[0]["lr"] = settings.rate(step)
        optimizer.zero_grad(set_to_none=True)
        tokens, total = sum(len(row.plan_ids) for row in rows), 0.0
        for each in passes(rows, range(len(rows)), settings.tokens_max, weights.shares_prompts):
            loss = _nll(weights, each) / tokens
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(list(trainable(weights.model).values()), settings.gradient_norm_max)
        finite = bool(torch.isfinite(norm))
        if finite:  # one overflow must not end in weights that are no numbers
            optimizer.step()
        figures = {"loss": total, "tokens": float(tokens), "gradient_norm": float(norm) if finite else 0.0}
        figures |= {} if before is None else {"held_out_before": before}
        if (step + 1) % settings.checkpoint_steps == 0 or step + 1 == settings.steps:
            after = self._measured(weights, settings)
            figures |= {} if after is None else {"held_out_loss": after}
        return figures

    def _measured(self, weights: Weights, settings: Settings) -> float | None:
        return mean_loss(weights, self.held_out, settings.tokens_max) if self.held_out else None


def mean_loss(weights: Weights, rows: Sequence[TrainingRow], tokens_max: int) -> float:
    """Mean negative log-likelihood in nats a plan token."""
    with torch.no_grad():
        total = sum(float(_nll(weights, each)) for each in _passes(weights, rows, tokens_max))
    return total / sum(len(row.plan_ids) for row in rows)


def _passes(weights: Weights, rows: Sequence[TrainingRow], tokens_max: int) -> Iterator[ForwardPass]:
    yield from passes(rows, range(len(rows)), tokens_max, weights.shares_prompts)


def _nll(weights: Weights, each: ForwardPass) -> Tensor:
    """The sum over the plan tokens of one pass."""
    plans = [row.plan_ids for row in each.rows]
    states = weights.states(each.prompts, each.owners, plans)
    tokens = torch.tensor([token for plan in plans for token in plan], device=states.device)
    size = max(1, LOGITS_MAX // weights.vocab)
    again = len(tokens) > size and torch.is_grad_enabled()  # logits of a piece are computed again in the backward pass

    def head(part: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(weights.logits(part).float(), wanted, reduction="sum")

    pieces = zip(states.split(size), tokens.split(size), strict=True)
    losses = [
        checkpoint(head, *piece, use_reentrant=False, preserve_rng_state=False) if again else head(*piece)
        for piece in pieces
    ]
    return torch.stack(losses).sum()
