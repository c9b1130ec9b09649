"""A world of two plans, one of them right, logged by a tiny model: what the engines are tried on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from policy.train.engines.rows import Bits, EngineRow

RIGHT, WRONG, END = 70, 80, 2


def load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    from policy.train.engines.trl_trainer import quiet

    with quiet():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def mask_of(vocab: int, tokens: Sequence[int]) -> Bits:
    """One bit a token, lowest first."""
    bits = np.zeros((vocab + 7) // 8, dtype=np.uint8)
    for token in tokens:
        bits[token >> 3] |= 1 << (token & 7)
    return bits


def right_share(model: Any, rows: Sequence[EngineRow]) -> float:
    """Mean probability of the right plan among the two."""
    with torch.no_grad():
        ends = [model(torch.tensor([list(row.prompt_ids)])).logits[0, -1] for row in rows]
    return float(torch.stack([end[[RIGHT, WRONG]].softmax(-1)[0] for end in ends]).mean())


def logged(model: Any, count: int, *, masked: bool, seed: int = 0, group: int = 4) -> list[EngineRow]:
    """Plans of a choice and an end. `masked`: drawn under a grammar that leaves the choice and then forces the end."""
    rng, vocab = random.Random(seed), int(model.config.vocab_size)
    masks = (mask_of(vocab, [RIGHT, WRONG]), mask_of(vocab, [END]))
    rows = []
    for index in range(count):
        prompt = [rng.randrange(100, 300) for _ in range(rng.randrange(3, 7))]
        with torch.no_grad():
            end = model(torch.tensor([prompt])).logits[0, -1]
            right = float(end[[RIGHT, WRONG]].softmax(-1)[0])
            choice = RIGHT if rng.random() < right else WRONG
            after = model(torch.tensor([[*prompt, choice]])).logits[0, -1].log_softmax(-1)
            free = end.log_softmax(-1)[choice]
            under = end[[RIGHT, WRONG]].log_softmax(-1)[0 if choice == RIGHT else 1]
        logprobs = [float(under), 0.0] if masked else [float(free), float(after[END])]
        rows.append(
            EngineRow(
                name=f"rollout-{index}/0",
                group=f"question-{index // group}",
                prompt_ids=prompt,
                plan_ids=[choice, END],
                logprobs=logprobs,
                reward=float(choice == RIGHT),
                decisions=[True, True],
                allowed=masks if masked else None,
            )
        )
    return rows


def write_export(rows: Sequence[EngineRow], path: Path) -> Path:
    """As `traces export --format verl` writes them; every fifth row is of the validation side."""
    told = [
        {
            "uid": row.group,
            "prompts": list(row.prompt_ids),
            "responses": list(row.plan_ids),
            "rollout_log_probs": None if row.logprobs is None else list(row.logprobs),
            "decision_mask": [int(x) for x in row.decisions],
            "reward": row.reward,
            "extra_info": {
                "rollout_id": row.name.partition("/")[0],
                "round": 0,
                "split": "validation" if index % 5 == 4 else "train",
            },
        }
        for index, row in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(told), path)
    return path
