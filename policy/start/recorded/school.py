"""Supervised training of a small decoder on lessons, from nothing: loss on the plan's tokens alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from policy.start.recorded.lessons import PlanLesson
from policy.start.synthetic.config import ModelConfig
from policy.start.synthetic.feed import IGNORED, TokenRow
from policy.start.synthetic.model import Qwen2
from policy.start.synthetic.sft import GRADIENT_NORM_MAX, padded
from policy.start.synthetic.tokenizer import END_ID, prompt_text, train_tokenizer

SHAPE = ModelConfig(layers=3, hidden=96, inner=256, heads=3, heads_kv=3, context=4096)
VOCAB = 1_024
TOKENIZER_LESSONS = 4_000
SORTED_BATCHES = 16  # lessons of so many batches are sorted by length: little is padded
HELD_OUT_SHARE = 0.02
HELD_OUT_MAX = 256


@dataclass(frozen=True, slots=True)
class Schooling:
    """One run."""

    seed: int = 0
    epochs: float = 1.0
    batch: int = 32
    lr: float = 2e-3
    warmup_steps: int = 40
    decay_share: float = 0.6  # of the steps, at the end, over which the rate falls to `lr_floor`
    lr_floor: float = 0.05
    threads: int = 2

    def rate(self, step: int, steps: int) -> float:
        """Factor of the learning rate at `step` (from 0): linear up, flat, linear down."""
        up = min(1.0, (step + 1) / self.warmup_steps)
        return up * max(self.lr_floor, min(1.0, (steps - step) / max(1.0, self.decay_share * steps)))


@dataclass(frozen=True, slots=True)
class SchoolReport:
    """How far it is: mean loss in nats a plan token since the last report, plans exactly as taught among held-out
    lessons (only at the end)."""

    step: int
    steps: int
    loss: float
    elapsed_s: float
    exact: float | None = None


def tokenizer_of(lessons: Sequence[PlanLesson]) -> Tokenizer:
    """Trained on the lessons."""
    some = lessons[:TOKENIZER_LESSONS]
    return train_tokenizer((text for each in some for text in (prompt_text(each.prompt), each.text)), VOCAB)


def rows_of(tokenizer: Tokenizer, lessons: Sequence[PlanLesson]) -> list[TokenRow]:
    """Token ids as the server makes them; what is to be predicted is the plan and its end."""
    prompts = tokenizer.encode_batch([prompt_text(each.prompt) for each in lessons], add_special_tokens=False)
    plans = tokenizer.encode_batch([each.text for each in lessons], add_special_tokens=False)
    rows = []
    for prompt, plan in zip(prompts, plans, strict=True):
        targets = [*plan.ids, END_ID]
        rows.append(TokenRow([*prompt.ids, *targets], [IGNORED] * (len(prompt.ids) - 1) + targets + [IGNORED], []))
    return rows


def teach(
    lessons: Sequence[PlanLesson], settings: Schooling, say: Callable[[SchoolReport], None]
) -> tuple[Qwen2, Tokenizer]:
    """A model that plans as the lessons do. Deterministic for the same lessons, settings and torch build."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    shuffled = Random(f"school {settings.seed}").sample(list(lessons), len(lessons))
    tokenizer = tokenizer_of(shuffled)
    held_out = min(HELD_OUT_MAX, int(HELD_OUT_SHARE * len(shuffled)))
    rows = rows_of(tokenizer, shuffled)
    probe, rows = rows[:held_out], rows[held_out:]
    model = Qwen2(SHAPE, tokenizer.get_vocab_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.01, betas=(0.9, 0.98))
    steps = max(1, round(settings.epochs * len(rows) / settings.batch))
    began_s, losses = time.monotonic(), []
    for step, batch in enumerate(_batches(rows, settings, steps)):
        optimizer.param_groups[0]["lr"] = settings.lr * settings.rate(step, steps)
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
        losses.append(float(loss.detach()))
        if (step + 1) % 25 == 0 or step + 1 == steps:
            exact = _exact(model, probe) if step + 1 == steps else None
            say(SchoolReport(step + 1, steps, sum(losses) / len(losses), time.monotonic() - began_s, exact))
            losses = []
    return model, tokenizer


def _loss(model: Qwen2, rows: Sequence[TokenRow]) -> torch.Tensor:
    ids, wanted, targets = padded(rows)
    logits, _ = model(ids, wanted)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def _exact(model: Qwen2, rows: Sequence[TokenRow]) -> float:
    """Share of rows whose every plan token is the likeliest one."""
    right = 0
    with torch.no_grad():
        for at in range(0, len(rows), 32):
            ids, wanted, targets = padded(rows[at : at + 32])
            logits, _ = model(ids, wanted)
            right += int(((logits.argmax(-1) == targets) | (targets == IGNORED)).all(1).sum())
    return right / max(1, len(rows))


def _batches(rows: Sequence[TokenRow], settings: Schooling, steps: int) -> list[list[TokenRow]]:
    """The batches in order, rows of like length together."""
    rng = Random(f"batches {settings.seed}")
    order: list[TokenRow] = []
    while len(order) < steps * settings.batch:
        order += rng.sample(list(rows), len(rows))
    batches: list[list[TokenRow]] = []
    size = SORTED_BATCHES * settings.batch
    for at in range(0, steps * settings.batch, size):
        chunk = sorted(order[at : min(at + size, steps * settings.batch)], key=lambda row: len(row.ids))
        cut = [chunk[i : i + settings.batch] for i in range(0, len(chunk), settings.batch)]
        batches += rng.sample(cut, len(cut))
    return batches
