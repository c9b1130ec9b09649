"""Batches of token ids, drawn by a process of their own while the last ones are trained on. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from random import Random
from threading import Thread
from typing import Protocol

from tokenizers import Tokenizer

from policy.warmstart.config import TrainConfig
from policy.warmstart.drill import make_drill
from policy.warmstart.samples import make_sample
from policy.warmstart.tokenizer import END_ID, prompt_text

IGNORED = -100  # a target that counts for nothing
Row = tuple[list[int], list[int]]  # token ids; targets of the same length, IGNORED where nothing is to be learnt


class Lesson(Protocol):
    """A prompt, and what is to be answered: pieces of text, each with whether it is to be learnt or only given."""

    @property
    def prompt(self) -> str: ...

    @property
    def pieces(self) -> Sequence[tuple[str, bool]]: ...


def encode(tokenizer: Tokenizer, lessons: Sequence[Lesson]) -> list[Row]:
    """Token ids as the server makes them, and per position the token that is to be predicted there."""
    prompts = tokenizer.encode_batch([prompt_text(lesson.prompt) for lesson in lessons], add_special_tokens=False)
    return [_row(tokenizer, prompt.ids, lesson) for prompt, lesson in zip(prompts, lessons, strict=True)]


def _row(tokenizer: Tokenizer, prompt: list[int], lesson: Lesson) -> Row:
    ids, targets = list(prompt), [IGNORED] * (len(prompt) - 1)
    for text, counted in lesson.pieces:
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        targets += piece if counted else [IGNORED] * len(piece)
    return [*ids, END_ID], [*targets, END_ID, IGNORED]


def draw_chunk(serialised: str, config: TrainConfig, number: int) -> list[list[Row]]:
    """The batches of one chunk, in the order they are trained on: rows of like length together, batches shuffled."""
    size = config.chunk_steps * config.batch
    step = number * config.chunk_steps
    workers_max, drills = config.workers_max(step), round(config.drills(step) * size)
    lessons: list[Lesson] = [make_drill(config.seed, number * size + i, workers_max) for i in range(drills)]
    lessons += [make_sample(config.seed, number * size + i, workers_max) for i in range(drills, size)]
    rows = sorted(encode(Tokenizer.from_str(serialised), lessons), key=lambda row: len(row[0]))
    batches = [rows[at : at + config.batch] for at in range(0, size, config.batch)]
    Random(f"order {config.seed} {number}").shuffle(batches)
    return batches


def batches_from(tokenizer: Tokenizer, config: TrainConfig, first_step: int) -> Iterator[list[Row]]:
    """Batches of steps `first_step`, `first_step` + 1, … to the last; the next two chunks are drawn meanwhile."""
    serialised = tokenizer.to_str()
    chunk = first_step // config.chunk_steps
    last = -(-config.steps // config.chunk_steps)
    with ProcessPoolExecutor(1, get_context("spawn"), _leave_with_parent) as drawer:
        ahead = [drawer.submit(draw_chunk, serialised, config, n) for n in range(chunk, min(chunk + 2, last))]
        for number in range(chunk, last):
            if number + 2 < last:
                ahead.append(drawer.submit(draw_chunk, serialised, config, number + 2))
            skip = first_step - number * config.chunk_steps if number == chunk else 0
            yield from ahead.pop(0).result()[skip:]


def _leave_with_parent() -> None:
    """End the drawing process when the training one is gone, killed or not."""
    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=watch, daemon=True).start()
