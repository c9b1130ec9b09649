"""The training loop, top to bottom: a batch, its advantages, one update, metrics, a checkpoint.

1. A batch is questions by learning value, posed anew, G episodes each (sampled.py), or rows of the log (logged.py).
2. Rewards are measured against the rows that answered the same prompt; groups without a spread are dropped.
3. Minibatches × epochs of `policy.train.step.grpo` against the log-probs that the rows were sampled with; with
   `--method sft` one step of `policy.train.step.supervised` on lessons (taught.py) instead of 2 and 3.
4. No random state: every draw is a hash of (seed, step, …), so a checkpoint and the step number are the whole run.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from gateway.errors import BatonError, EngineDown, VersionRefused
from policy.environments.base import Spend
from policy.train import metrics
from policy.train.metrics import MetricsFile, Value
from policy.train.run import checkpoint
from policy.train.run.checkpoint import Progress
from policy.train.settings import Settings
from policy.train.sources.sampled import Batch, Source
from policy.train.step.grpo import learn
from policy.train.step.masks import Masks
from policy.train.step.optimizer import MasterAdamW
from policy.train.step.rows import TrainingRow
from policy.train.weights.small import Weights, trainable

METRICS_FILE = "metrics.jsonl"
GIB = 1 << 30
T = TypeVar("T")
Say = Callable[[str], None]
Figures = Mapping[str, float]
Learn = Callable[[Weights, Masks, torch.optim.Optimizer, Sequence[TrainingRow], Settings, int, Weights | None], Figures]


class Stopped(BatonError):
    """The run has stopped on request; its checkpoint is written."""


async def unless_stopped(work: Awaitable[T], stop: asyncio.Event) -> T:
    """What `work` returns. Raises Stopped where `stop` comes first; `work` is then cancelled."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Stopped("stopped after the last step; the same command with --resume goes on")
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _device_memory(device: torch.device) -> dict[str, Value]:
    """The most that this process has held on its GPU, in GiB; empty on a processor."""
    return {"device_gib": torch.cuda.max_memory_allocated(device) / GIB} if device.type == "cuda" else {}


@dataclass(slots=True)
class Trainer:
    """One run: the weights, the source of batches, and the places of its files. `digest` identifies its settings."""

    weights: Weights
    masks: Masks
    source: Source
    settings: Settings
    spend: Spend
    work: Path
    digest: str
    progress_file: Path | None = None
    method: Learn = learn

    async def run(self, resume: bool, stop: asyncio.Event, say: Say) -> Progress:
        """Train to the end, or to the spending cap. Raises Stopped, Unavailable (a full disk; a
        vLLM that is lost), VersionRefused, ConfigError."""
        settings = self.settings
        torch.set_num_threads(settings.threads)
        reference = self._reference() if settings.kl_weight else None
        optimizer = MasterAdamW(
            trainable(self.weights.model).values(),
            lr=settings.lr,
            betas=(0.9, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        progress = self._restore(optimizer) if resume else Progress()
        self.spend.spent_nano = max(progress.spent_nano, checkpoint.spent_nano(self.work) if resume else 0)
        log = MetricsFile(self.work / METRICS_FILE, progress.step)
        for step in range(progress.step, settings.steps):
            try:
                batch = await self._batch(step, stop)
            except (EngineDown, VersionRefused):  # what samples is gone: the steps before are not
                self._save(progress, optimizer)
                raise
            if batch is None or (batch.capped and not batch.rows):
                break
            figures = self._learn(batch, optimizer, step, reference)
            progress.step, progress.rollouts = step + 1, progress.rollouts + batch.rollouts
            progress.spent_nano = self.spend.spent_nano
            log.add(figures)
            metrics.progress(self.progress_file, figures)
            say(metrics.line(figures))
            if batch.capped or stop.is_set():
                break
            if progress.step % settings.checkpoint_steps == 0:
                self._save(progress, optimizer)
        self._save(progress, optimizer)
        if stop.is_set() and progress.step < settings.steps:
            raise Stopped(
                f"stopped after step {progress.step} of {settings.steps}; the same command with --resume goes on"
            )
        return progress

    async def _batch(self, step: int, stop: asyncio.Event) -> Batch | None:
        """The step's batch; None where a stop came first. Sampling that is being paid for is not cut off."""
        if stop.is_set():
            return None
        if self.spend.cap_nano is not None:
            return await self.source.batch(step)
        try:
            return await unless_stopped(self.source.batch(step), stop)
        except Stopped:
            return None

    def _learn(
        self, batch: Batch, optimizer: torch.optim.Optimizer, step: int, reference: Weights | None
    ) -> dict[str, Value]:
        began_s = time.perf_counter()
        step_metrics = self.method(self.weights, self.masks, optimizer, batch.rows, self.settings, step, reference)
        self.masks.forget()
        return {
            "step": step + 1,
            "steps": self.settings.steps,
            **batch.metrics,
            "rows": len(batch.rows),
            **step_metrics,
            "lr": self.settings.rate(step),
            "spent_usd": metrics.usd(self.spend.spent_nano),
            "update_s": time.perf_counter() - began_s,
            **_device_memory(self.weights.device),
        }

    def _reference(self) -> Weights:
        """The weights as training began, for the KL term."""
        reference = copy.deepcopy(self.weights)
        reference.model.requires_grad_(False)
        return reference

    def _save(self, progress: Progress, optimizer: torch.optim.Optimizer) -> None:
        progress.curriculum = self.source.state()
        weights = {name: parameter.detach() for name, parameter in trainable(self.weights.model).items()}
        checkpoint.save(self.work, self.digest, progress, weights, optimizer.state_dict())

    def _restore(self, optimizer: torch.optim.Optimizer) -> Progress:
        found = checkpoint.load(self.work, self.digest)
        if found is None:
            return Progress()
        progress, weights, state = found
        with torch.no_grad():
            for name, parameter in trainable(self.weights.model).items():
                parameter.copy_(weights[name])
        optimizer.load_state_dict(state)
        self.source.restore(progress.curriculum)
        return progress
