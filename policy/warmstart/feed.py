"""Batches of token ids, drawn by a process of their own while the last ones are trained on. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from random import Random

from tokenizers import Tokenizer

from policy.warmstart.config import TrainConfig
from policy.warmstart.samples import Sample, make_sample
from policy.warmstart.tokenizer import END_ID, prompt_text

Row = tuple[list[int], list[int]]  # prompt ids, plan ids with the end token


def encode(tokenizer: Tokenizer, samples: Sequence[Sample]) -> list[Row]:
    """Token ids of prompts and plans, apart, as the server makes them."""
    prompts = tokenizer.encode_batch([prompt_text(s.prompt) for s in samples], add_special_tokens=False)
    plans = tokenizer.encode_batch([s.label for s in samples], add_special_tokens=False)
    return [(prompt.ids, [*plan.ids, END_ID]) for prompt, plan in zip(prompts, plans, strict=True)]


def draw_chunk(serialised: str, config: TrainConfig, number: int) -> list[list[Row]]:
    """The batches of one chunk, in the order they are trained on: rows of like length together, batches shuffled."""
    size = config.chunk_steps * config.batch
    workers_max = config.workers_max(number * config.chunk_steps)
    samples = [make_sample(config.seed, number * size + i, workers_max) for i in range(size)]
    rows = sorted(encode(Tokenizer.from_str(serialised), samples), key=lambda row: len(row[0]) + len(row[1]))
    batches = [rows[at : at + config.batch] for at in range(0, size, config.batch)]
    Random(f"order {config.seed} {number}").shuffle(batches)
    return batches


def batches_from(tokenizer: Tokenizer, config: TrainConfig, first_step: int) -> Iterator[list[Row]]:
    """Batches of steps `first_step`, `first_step` + 1, … to the last; the next two chunks are drawn meanwhile."""
    serialised = tokenizer.to_str()
    chunk = first_step // config.chunk_steps
    last = -(-config.steps // config.chunk_steps)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as drawer:
        ahead = [drawer.submit(draw_chunk, serialised, config, n) for n in range(chunk, min(chunk + 2, last))]
        for number in range(chunk, last):
            if number + 2 < last:
                ahead.append(drawer.submit(draw_chunk, serialised, config, number + 2))
            skip = first_step - number * config.chunk_steps if number == chunk else 0
            yield from ahead.pop(0).result()[skip:]
