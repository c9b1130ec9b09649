"""One batch of rows into the weights: minibatches × epochs of the loss, in pieces that memory can hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policy.environments.base import rng_for
from policy.train.settings import Settings
from policy.train.step import grpo
from policy.train.step.advantages import Weighed
from policy.train.step.masks import Masks, unpacked
from policy.train.step.parcels import parcels
from policy.train.step.rows import Row
from policy.train.weights.small import Weights, trainable


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows under the weights [rows, longest plan]. `entropy` in nats; all padded behind where `present` is false."""

    logprobs: Tensor
    entropy: Tensor
    present: Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one forward pass, each with its number in the batch."""

    rows: list[Row]
    numbers: list[int]
    prompts: list[Sequence[int]]
    owners: list[int]


def pieces(rows: Sequence[Row], numbers: Sequence[int], tokens_max: int, shared: bool) -> list[Piece]:
    """The rows of these numbers as forward passes."""
    own = [rows[number] for number in numbers]
    cut = parcels([row.prompt_ids for row in own], [len(row.plan_ids) for row in own], tokens_max, shared)
    return [
        Piece([own[at] for at in one.rows], [numbers[at] for at in one.rows], one.prompts, one.owners) for one in cut
    ]


def scored(weights: Weights, masks: Masks, piece: Piece, *, entropy: bool) -> Scored:
    """Log-probs of a piece's plans after temperature and grammar mask, as they were sampled; gradient where it is on.
    `entropy`: with gradient too."""
    plans = [row.plan_ids for row in piece.rows]
    logits = weights.scores(piece.prompts, piece.owners, plans).float()
    most = logits.shape[1]
    heat = torch.tensor([row.temperature for row in piece.rows], device=logits.device)
    allowed = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    for index, row in enumerate(piece.rows):
        masked = unpacked(masks.of(row.schema, row.plan_ids), weights.vocab)
        allowed[index, : len(row.plan_ids)] = torch.from_numpy(masked).to(logits.device)
    tokens = torch.zeros((len(plans), most), dtype=torch.long, device=logits.device)
    present = torch.zeros_like(tokens, dtype=torch.bool)
    for index, plan in enumerate(plans):
        tokens[index, : len(plan)] = torch.tensor(plan, device=logits.device)
        present[index, : len(plan)] = True
    heated = logits / heat[:, None, None]
    logprobs = grpo.token_logprobs(heated, tokens, allowed=allowed)
    with torch.set_grad_enabled(entropy and torch.is_grad_enabled()):
        spread = grpo.token_entropy(heated, allowed=allowed)
    return Scored(logprobs, spread, present)


def learn(
    weights: Weights,
    masks: Masks,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[Row],
    weighed: Weighed,
    settings: Settings,
    step: int,
    reference: Weights | None,
) -> dict[str, float]:
    """`epochs` × `minibatches` optimizer steps on what is live of the rows; metrics, means over tokens."""
    live = [number for number, alive in enumerate(weighed.live.tolist()) if alive]
    metrics = _Means()
    if not live:
        return metrics.read()
    loss = _Loss(weights, masks, rows, weighed, settings, reference)
    if settings.decoupled:
        loss.remember(live)
    for epoch in range(settings.epochs):
        for batch in minibatches(rows, live, settings.minibatches, (settings.seed, "order", step, epoch)):
            optimizer.param_groups[0]["lr"] = settings.rate(step)
            optimizer.zero_grad(set_to_none=True)
            loss.backward(batch, metrics)
            parameters = list(trainable(weights.model).values())
            norm = torch.nn.utils.clip_grad_norm_(parameters, settings.gradient_norm_max)
            finite = bool(torch.isfinite(norm))
            metrics.add({"gradient_norm": float(norm) if finite else 0.0, "skipped_share": float(not finite)}, 1.0)
            if finite:  # one overflow must not end in weights that are no numbers
                optimizer.step()
    return metrics.read()


def minibatches(rows: Sequence[Row], live: Sequence[int], count: int, key: tuple[object, ...]) -> Iterator[list[int]]:
    """The live rows in `count` parts of whole questions, in an order that is a function of `key`."""
    questions = sorted({rows[number].question for number in live})
    rng_for(*key).shuffle(questions)
    part = {question: index * count // len(questions) for index, question in enumerate(questions)}
    for which in range(count):
        if batch := [number for number in live if part[rows[number].question] == which]:
            yield batch


class _Loss:
    """The loss of a batch's rows, summed over the pieces that it is computed in."""

    def __init__(
        self,
        weights: Weights,
        masks: Masks,
        rows: Sequence[Row],
        weighed: Weighed,
        settings: Settings,
        reference: Weights | None,
    ) -> None:
        self._weights, self._masks, self._rows = weights, masks, rows
        self._weighed, self._settings, self._reference = weighed, settings, reference
        self._proximal: dict[int, Tensor] = {}
        self._knobs = grpo.LossSettings(
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            ratio_max=settings.ratio_max,
            weight_max=settings.weight_max,
            staleness_max=settings.staleness_max,
            kl_weight=settings.kl_weight,
            entropy_weight=settings.entropy_weight,
        )

    def remember(self, numbers: Sequence[int]) -> None:
        """Keep what the weights say now: the proximal policy of this step."""
        with torch.no_grad():
            for piece in self._pieces(numbers):
                found = scored(self._weights, self._masks, piece, entropy=False)
                for number, logprobs in zip(piece.numbers, found.logprobs, strict=True):
                    self._proximal[number] = logprobs

    def backward(self, numbers: Sequence[int], metrics: _Means) -> None:
        """Gradients of one minibatch."""
        count = sum(self._counted(self._rows[number]) for number in numbers)
        for piece in self._pieces(numbers):
            found = scored(self._weights, self._masks, piece, entropy=self._settings.entropy_weight > 0)
            mask = self._mask(piece, found.present)
            loss = grpo.grpo_loss(
                found.logprobs,
                self._stored(piece, found.present),
                self._weighed.advantages[piece.numbers].to(mask.device),
                mask,
                self._knobs,
                proximal=self._before(piece, found.present) if self._settings.decoupled else None,
                reference=self._of_reference(piece),
                entropy=found.entropy,
                token_count=count,
            )
            loss.value.backward()
            here = max(1.0, float(mask.sum()))
            told = {name: value for name, value in loss.metrics.items() if name not in ("loss", "tokens", "entropy")}
            entropy = float((found.entropy.detach() * mask).sum()) / here
            metrics.add({**told, "entropy": entropy}, here)
            metrics.sum({"loss": loss.metrics["loss"]})

    def _pieces(self, numbers: Sequence[int]) -> list[Piece]:
        return pieces(self._rows, numbers, self._settings.tokens_max, self._weights.shares_prompts)

    def _counted(self, row: Row) -> int:
        return sum(row.decisions) if self._settings.decisions_only else len(row.plan_ids)

    def _mask(self, piece: Piece, present: Tensor) -> Tensor:
        decisions = self._filled(present, [list(map(float, row.decisions)) for row in piece.rows]) > 0
        alive = torch.ones(len(piece.rows), dtype=torch.bool, device=present.device)
        return grpo.loss_mask(present, decisions, alive, decisions_only=self._settings.decisions_only)

    def _stored(self, piece: Piece, present: Tensor) -> Tensor:
        return self._filled(present, [row.logprobs for row in piece.rows])

    def _before(self, piece: Piece, present: Tensor) -> Tensor:
        out = torch.zeros(present.shape, device=present.device)
        for index, number in enumerate(piece.numbers):
            kept = self._proximal[number][: present.shape[1]]
            out[index, : len(kept)] = kept
        return out

    def _of_reference(self, piece: Piece) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return scored(self._reference, self._masks, piece, entropy=False).logprobs

    def _filled(self, present: Tensor, values: Sequence[Sequence[float]]) -> Tensor:
        out = torch.zeros(present.shape, device=present.device)
        for index, row in enumerate(values):
            out[index, : len(row)] = torch.tensor(row, device=present.device)
        return out


class _Means:
    """Weighted means and sums of metrics."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._largest: dict[str, float] = {}

    def add(self, values: dict[str, float], weight: float) -> None:
        """Values of a part of this weight; of a `…_max` the largest counts."""
        for name, value in values.items():
            if name.endswith("_max"):
                self._largest[name] = max(value, self._largest.get(name, value))
                continue
            self._totals[name] = self._totals.get(name, 0.0) + weight * value
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def sum(self, values: dict[str, float]) -> None:
        """Values that add up."""
        for name, value in values.items():
            self._totals[name] = self._totals.get(name, 0.0) + value
            self._weights[name] = 1.0

    def read(self) -> dict[str, float]:
        """All of them."""
        return {name: total / self._weights[name] for name, total in self._totals.items()} | self._largest
