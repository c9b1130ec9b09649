"""Batches of token ids, drawn by a process of their own while the last ones are trained on. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from random import Random
from threading import Thread
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer

from policy.start.synthetic.config import TrainConfig
from policy.start.synthetic.label import Piece
from policy.start.synthetic.samples import LEVELS, make_drill, make_sample

IGNORED = -100  # a target that counts for nothing
LINE_TOKENS_MAX = 16  # longer lines are questions, not records


class TokenRow(NamedTuple):
    """`targets` is as long as `ids`. `hints`: position → tokens that are to be readable there half way up the model."""

    ids: list[int]
    targets: list[int]
    hints: list[tuple[int, list[int]]]


class Exercise(Protocol):
    """A text, and what is to follow it."""

    @property
    def text(self) -> str: ...

    @property
    def pieces(self) -> Sequence[Piece]: ...


def encode(tokenizer: Tokenizer, lessons: Sequence[Exercise]) -> list[TokenRow]:
    """Token ids as the server makes them, and per position the token that is to be predicted there."""
    texts = tokenizer.encode_batch([lesson.text for lesson in lessons], add_special_tokens=False)
    newline = tokenizer.encode("\n").ids[0]
    return [_row(tokenizer, text.ids, lesson, newline) for text, lesson in zip(texts, lessons, strict=True)]


def _row(tokenizer: Tokenizer, text: list[int], lesson: Exercise, newline: int) -> TokenRow:
    ids, targets = list(text), [IGNORED] * (len(text) - 1)
    hints = line_hints(text, newline)
    for piece in lesson.pieces:
        if piece.hint:
            hints.append((len(ids) - 1, tokenizer.encode(piece.hint, add_special_tokens=False).ids))
        tokens = tokenizer.encode(piece.text, add_special_tokens=False).ids
        ids += tokens
        targets += tokens if piece.learnt else [IGNORED] * len(tokens)
    return TokenRow(ids, [*targets, IGNORED], hints)


def line_hints(ids: Sequence[int], newline: int) -> list[tuple[int, list[int]]]:
    """A pool line is a record: at its end stands all that the line says."""
    hints: list[tuple[int, list[int]]] = []
    start = 0
    for at, token in enumerate(ids):
        if token == newline:
            if 2 <= at - start <= LINE_TOKENS_MAX:
                hints.append((at, list(ids[start:at])))
            start = at + 1
    return hints


def draw_chunk(serialised: str, config: TrainConfig, number: int) -> list[list[TokenRow]]:
    """The batches of one chunk, in the order they are trained on: rows of like length together, batches shuffled."""
    size, step = config.chunk_steps * config.batch, number * config.chunk_steps
    level, first = config.drill_level(step), number * size
    drills = round(config.drills_later * size) if level is None else size
    lessons: list[Exercise] = [
        make_drill(config.seed, first + i, LEVELS[-1 if level is None else level]) for i in range(drills)
    ]
    lessons += [make_sample(config.seed, first + i, config.workers_max(step)) for i in range(drills, size)]
    rows = sorted(encode(Tokenizer.from_str(serialised), lessons), key=lambda row: len(row.ids))
    batches = [rows[at : at + config.batch] for at in range(0, size, config.batch)]
    Random(f"order {config.seed} {number}").shuffle(batches)
    return batches


def batches_from(tokenizer: Tokenizer, config: TrainConfig, first_step: int) -> Iterator[list[TokenRow]]:
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
