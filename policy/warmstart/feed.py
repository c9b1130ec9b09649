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
from policy.warmstart.drill import LEVELS, make_drill
from policy.warmstart.samples import make_sample

IGNORED = -100  # a target that counts for nothing
Row = tuple[list[int], list[int]]  # token ids; targets of the same length, IGNORED where nothing is to be learnt


class Lesson(Protocol):
    """A text, and what is to follow it: pieces, each with whether it is to be learnt or only given."""

    @property
    def text(self) -> str: ...

    @property
    def pieces(self) -> Sequence[tuple[str, bool]]: ...


def encode(tokenizer: Tokenizer, lessons: Sequence[Lesson]) -> list[Row]:
    """Token ids as the server makes them, and per position the token that is to be predicted there."""
    texts = tokenizer.encode_batch([lesson.text for lesson in lessons], add_special_tokens=False)
    return [_row(tokenizer, text.ids, lesson) for text, lesson in zip(texts, lessons, strict=True)]


def _row(tokenizer: Tokenizer, text: list[int], lesson: Lesson) -> Row:
    ids, targets = list(text), [IGNORED] * (len(text) - 1)
    for piece, learnt in lesson.pieces:
        tokens = tokenizer.encode(piece, add_special_tokens=False).ids
        ids += tokens
        targets += tokens if learnt else [IGNORED] * len(tokens)
    return ids, [*targets, IGNORED]


def draw_chunk(serialised: str, config: TrainConfig, number: int) -> list[list[Row]]:
    """The batches of one chunk, in the order they are trained on: rows of like length together, batches shuffled."""
    size, step = config.chunk_steps * config.batch, number * config.chunk_steps
    level, first = config.drill_level(step), number * size
    lessons: list[Lesson]
    if level is None:
        lessons = [make_sample(config.seed, first + i, config.workers_max(step)) for i in range(size)]
    else:
        lessons = [make_drill(config.seed, first + i, LEVELS[level]) for i in range(size)]
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
