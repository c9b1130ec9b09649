"""The training loop: supervised plans, loss on the plan's tokens alone. The way of a gradient is read top to bottom.

1. samples are drawn by index in a process of their own, `chunk_steps` batches ahead, and sorted by length;
2. rows are padded behind, and only positions that predict a plan token reach the last block and the output layer;
3. half way up, line ends are to know their line and choices their skill: a scaffold that the served model never uses;
4. a checkpoint holds weights, optimizer and step: samples need no state, so a killed run resumes exactly.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from gateway.core.loop.plan import validate
from gateway.errors import PlanRefused
from gateway.files import replacing
from policy.simulators.arena.world import solve_rate
from policy.start.synthetic.config import WORKERS_MAX, ModelConfig, TrainConfig
from policy.start.synthetic.feed import IGNORED, TokenRow, batches_from
from policy.start.synthetic.label import believed_pool, needed_skills
from policy.start.synthetic.model import Qwen2
from policy.start.synthetic.samples import Sample, make_sample
from policy.start.synthetic.tokenizer import END_ID, PAD_ID, prompt_text

CHECKPOINT = "checkpoint.pt"
PROBE_SAMPLES = 48
PROBE_SEED = 1  # of the samples that reports are measured on
PROBE_TOKENS_MAX = 80
SALTS = 4
GRADIENT_NORM_MAX = 1.0


def padded(rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [rows, tokens] padded behind; the positions with something to learn [rows, n], and the tokens that belong
    there [rows, n], IGNORED where a row has fewer than n."""
    counted = [[at for at, target in enumerate(row.targets) if target != IGNORED] for row in rows]
    most = max(map(len, counted))
    ids = torch.full((len(rows), max(len(row.ids) for row in rows)), PAD_ID)
    tokens = torch.zeros((len(rows), most), dtype=torch.long)
    targets = torch.full((len(rows), most), IGNORED)
    for index, (row, places) in enumerate(zip(rows, counted, strict=True)):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        tokens[index, : len(places)] = torch.tensor(places)
        targets[index, : len(places)] = torch.tensor([row.targets[at] for at in places])
    return ids, tokens, targets


def losses(model: Qwen2, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
    """Mean negative log-likelihoods, in nats per token: of what is to be learnt, and of the hints half way up."""
    ids, wanted, targets = padded(rows)
    logits, middle = model(ids, wanted)
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    hints = [(index, at, tokens) for index, row in enumerate(rows) for at, tokens in row.hints]
    states = middle[torch.tensor([h[0] for h in hints]), torch.tensor([h[1] for h in hints])]
    scores = model.read_off(states).log_softmax(-1)
    which = torch.tensor([index for index, (_, _, tokens) in enumerate(hints) for _ in tokens])
    hint_tokens = torch.tensor([token for _, _, tokens in hints for token in tokens])
    return loss, -scores[which, hint_tokens].mean()


def train(tokenizer: Tokenizer, shape: ModelConfig, config: TrainConfig, directory: Path, resume: bool) -> Qwen2:
    """Run `config.steps` steps and return the model. With `resume`, go on from the checkpoint in `directory`."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    model = Qwen2(shape, tokenizer.get_vocab_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.01, betas=(0.9, 0.98))
    first = _load(directory, model, optimizer, config) if resume else 0
    report = TrainingLog(tokenizer, config)
    for step, rows in enumerate(batches_from(tokenizer, config, first), start=first):
        if step >= config.steps:
            break
        optimizer.param_groups[0]["lr"] = config.lr * config.rate(step)
        optimizer.zero_grad()
        loss, hinted = losses(model, rows)
        (loss + config.hint_weight * hinted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
        report.count(float(loss.detach()), rows)
        if (step + 1) % config.report_steps == 0:
            report.line(step + 1, model)
        if (step + 1) % config.checkpoint_steps == 0:
            _save(directory, model, optimizer, config, step + 1)
    return model


def _save(directory: Path, model: Qwen2, optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> None:
    """Replace the checkpoint in one step: a kill leaves the one before it."""
    state = {
        "step": step,
        "config": asdict(config),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    with replacing(directory / CHECKPOINT, durable=False) as file:
        torch.save(state, file)


def _load(directory: Path, model: Qwen2, optimizer: torch.optim.Optimizer, config: TrainConfig) -> int:
    """Restore a run; the step to go on with. Raises FileNotFoundError, or ValueError for another run's checkpoint."""
    state: dict[str, Any] = torch.load(directory / CHECKPOINT, weights_only=True)
    if state["config"] != asdict(config):
        raise ValueError(f"{CHECKPOINT} is of a run with other settings: {state['config']}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


class TrainingLog:
    """Lines of progress: loss, tokens a second, and what free decoding gives on samples that are never trained on."""

    def __init__(self, tokenizer: Tokenizer, config: TrainConfig) -> None:
        self._tokenizer = tokenizer
        self._probe = [make_sample(config.seed + PROBE_SEED, i, WORKERS_MAX) for i in range(PROBE_SAMPLES)]
        self._prompts = [tokenizer.encode(prompt_text(s.prompt), add_special_tokens=False).ids for s in self._probe]
        self._steps = config.steps
        self._began_s = self._since_s = time.monotonic()
        self._losses: list[float] = []
        self._tokens = 0

    def count(self, loss: float, rows: Sequence[TokenRow]) -> None:
        """Remember one step."""
        self._losses.append(loss)
        self._tokens += sum(len(row.ids) for row in rows)

    def line(self, step: int, model: Qwen2) -> None:
        """Print and start anew."""
        now_s = time.monotonic()
        rate = self._tokens / (now_s - self._since_s)
        loss = sum(self._losses) / len(self._losses)
        probed = " ".join(f"{name} {value:.3f}" for name, value in self.probe(model).items())
        sys.stdout.write(
            f"step {step}/{self._steps} {now_s - self._began_s:.0f} s loss {loss:.4f} {rate:.0f} tok/s {probed}\n"
        )
        sys.stdout.flush()
        self._losses, self._tokens, self._since_s = [], 0, time.monotonic()

    def probe(self, model: Qwen2) -> dict[str, float]:
        """`exact`: greedy plans equal to the label; `valid`: plans sampled at temperature 1 without a grammar that
        validate; `regret`: success lost against the label by greedy plans, were the workers as good as shown."""
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            greedy = self._plans(model.sample(self._prompts, PROBE_TOKENS_MAX, END_ID, 0.0, random))
            plans = self._plans(model.sample(self._prompts, PROBE_TOKENS_MAX, END_ID, 1.0, random))
        return {
            "exact": sum(p == s.label for p, s in zip(greedy, self._probe, strict=True)) / len(greedy),
            "valid": sum(_valid(p, s) is not None for p, s in zip(plans, self._probe, strict=True)) / len(plans),
            "regret": self._regret(greedy),
        }

    def _plans(self, rows: list[list[int]]) -> list[str]:
        return [self._tokenizer.decode(row, skip_special_tokens=False) for row in rows]

    def _regret(self, plans: Sequence[str]) -> float:
        lost = [
            _believed_rate(sample, sample.plan) - _believed_rate(sample, _valid(text, sample))
            for text, sample in zip(plans, self._probe, strict=True)
            if sample.task is not None and sample.shown.round == 1
        ]
        return sum(lost) / max(1, len(lost))


def _valid(text: str, sample: Sample) -> dict[str, Any] | None:
    try:
        return validate(text, sample.allowed).as_json()
    except PlanRefused:
        return None


def _believed_rate(sample: Sample, plan: dict[str, Any] | None) -> float:
    """Success of a plan in a world where every worker is as good as the prompt makes it seem."""
    if plan is None or sample.task is None:
        return 0.0
    pool = believed_pool(sample.shown.workers, needed_skills(sample.task.text, None))
    return solve_rate(plan, sample.task, pool, SALTS)
