"""Sizes and rates of a warm start. Everything that changes the weights is in here, and goes into the manifest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Qwen2 decoder. `head_dim` is one that vLLM's CPU kernels take; `context` is the longest prompt plus plan."""

    layers: int = 4
    hidden: int = 128
    inner: int = 384
    heads: int = 4
    heads_kv: int = 4
    head_dim: int = 32
    context: int = 8192  # tokens
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One run. A step is one batch; a chunk is drawn, sorted by length and cut into `chunk_steps` batches."""

    steps: int = 3_000
    seed: int = 7
    batch: int = 32  # samples
    micro_batch: int = 16  # of them at a time
    chunk_steps: int = 32
    vocab: int = 1_536  # tokens
    tokenizer_samples: int = 6_000
    lr_matrix: float = 0.02  # Muon, for matrices inside the blocks
    lr_other: float = 0.003  # AdamW, for embeddings, norms and biases
    warmup_steps: int = 100
    decay_share: float = 0.4  # of the steps, at the end, over which the rates fall to `lr_floor`
    lr_floor: float = 0.02
    pool_growth_share: float = 0.25  # of the steps, in which pools grow from 2 to 8 workers
    checkpoint_steps: int = 200
    report_steps: int = 200
    threads: int = 1

    def rate(self, step: int) -> float:
        """Factor of the learning rates at `step` (from 0): linear up, flat, linear down."""
        up = min(1.0, (step + 1) / self.warmup_steps)
        left = (self.steps - step) / max(1.0, self.decay_share * self.steps)
        return up * max(self.lr_floor, min(1.0, left))

    def workers_max(self, step: int) -> int:
        """Largest pool at `step`: reading is learnt on small pools first (research: curriculum on pool size)."""
        grown = min(1.0, step / max(1.0, self.pool_growth_share * self.steps))
        return 3 + round(grown * (WORKERS_MAX - 3))


WORKERS_MIN, WORKERS_MAX = 2, 8
