"""The supervised step: negative log-likelihood of the plans' tokens, their ends included, prompts as context alone.

No grammar mask and temperature 1: what is learnt is to write such a plan, its form as well as its decisions. Beside
the batch it measures the loss on plans that are held out. What the prompts of a question begin with is computed once:
the rest of each prompt goes before its plan, and has no loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from policy.train.settings import Settings
from policy.train.step.forward import LOGITS_MAX, ForwardPass, passes
from policy.train.step.masks import Masks
from policy.train.step.rows import TrainingRow
from policy.train.weights.prefixes import common
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
        for each in _passes(weights, rows, settings.tokens_max):
            loss = _nll(weights, *each) / tokens
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
        total = sum(float(_nll(weights, *each)) for each in _passes(weights, rows, tokens_max))
    return total / sum(len(row.plan_ids) for row in rows)


def branched(rows: Sequence[TrainingRow]) -> tuple[list[TrainingRow], list[int]]:
    """The rows with each prompt cut to what all prompts of its question begin with, and its rest before the plan; and
    how many tokens each rest has."""
    prompts: dict[str, list[Sequence[int]]] = {}
    for row in rows:
        prompts.setdefault(row.question, []).append(row.prompt_ids)
    shared = {name: min(common(own), *(len(each) for each in own)) for name, own in prompts.items()}
    cut: list[TrainingRow] = []
    for row in rows:
        at = max(1, shared[row.question])
        cut.append(replace(row, prompt_ids=row.prompt_ids[:at], plan_ids=(*row.prompt_ids[at:], *row.plan_ids)))
    return cut, [len(new.plan_ids) - len(row.plan_ids) for new, row in zip(cut, rows, strict=True)]


def _passes(weights: Weights, rows: Sequence[TrainingRow], tokens_max: int) -> Iterator[tuple[ForwardPass, list[int]]]:
    """Forward passes, and how many tokens before each row's plan have no loss."""
    cut, rests = branched(rows) if weights.shares_prompts else (rows, [0] * len(rows))
    for each in passes(cut, range(len(rows)), tokens_max, weights.shares_prompts):
        yield each, [rests[number] for number in each.numbers]


def _nll(weights: Weights, each: ForwardPass, rests: Sequence[int]) -> Tensor:
    """The sum over the plan tokens of one pass."""
    plans = [row.plan_ids for row in each.rows]
    states = weights.states(each.prompts, each.owners, plans)
    counted = [at >= rest for plan, rest in zip(plans, rests, strict=True) for at in range(len(plan))]
    states = states[torch.tensor(counted, device=states.device)]
    wanted = [token for plan, rest in zip(plans, rests, strict=True) for token in plan[rest:]]
    tokens = torch.tensor(wanted, device=states.device)
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
