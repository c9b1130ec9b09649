"""Sizes and rates of a warm start. Everything that changes the weights is in here, and goes into the manifest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Qwen2 decoder. `head_dim` is one that vLLM's CPU kernels take; `context` is the longest prompt plus plan."""

    layers: int = 4
    hidden: int = 96
    inner: int = 288
    heads: int = 3
    heads_kv: int = 3
    head_dim: int = 32
    context: int = 8192  # tokens
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One run. A step is one batch; a chunk is drawn, sorted by length and cut into `chunk_steps` batches."""

    steps: int = 7_000
    seed: int = 7
    batch: int = 32  # samples: what fits the processor's cache runs at three times the speed of what does not
    chunk_steps: int = 20
    vocab: int = 2_048  # tokens
    tokenizer_samples: int = 6_000
    lr: float = 0.001
    warmup_steps: int = 100
    decay_share: float = 0.4  # of the steps, at the end, over which the rate falls to `lr_floor`
    lr_floor: float = 0.02
    pool_growth_share: float = 0.15  # of the steps, the first ones on plans, in which pools grow from 4 to 8 workers
    drill_shares: tuple[float, ...] = (0.09, 0.05, 0.08, 0.08)  # of the steps, on drills of each level, easiest first
    drills_later: float = 0.1  # of the samples after that are drills of the last level, so that reading is not lost
    hint_weight: float = 0.3  # of the loss half way up (feed.TokenRow)
    checkpoint_steps: int = 250
    report_steps: int = 500
    threads: int = 1

    def rate(self, step: int) -> float:
        """Factor of the learning rate at `step` (from 0): linear up, flat, linear down."""
        up = min(1.0, (step + 1) / self.warmup_steps)
        left = (self.steps - step) / max(1.0, self.decay_share * self.steps)
        return up * max(self.lr_floor, min(1.0, left))

    def drill_level(self, step: int) -> int | None:
        """Which drills are done at `step`; None when it is plans."""
        progress = 0.0
        for level, share in enumerate(self.drill_shares):
            progress += share * self.steps
            if step < progress:
                return level
        return None

    def workers_max(self, step: int) -> int:
        """Largest pool at `step`: reading is learnt on small pools first (research: curriculum on pool size)."""
        began = sum(self.drill_shares) * self.steps
        grown = min(1.0, max(0.0, step - began) / max(1.0, self.pool_growth_share * self.steps))
        return 4 + round(grown * (WORKERS_MAX - 4))


WORKERS_MIN, WORKERS_MAX = 2, 8
