"""How well the likeness of questions finds questions of the same type, and what their outcomes foretell.

`python -m bench.recorded.likeness FOLDER [--model DIRECTORY] [--questions N]` prints a Markdown table for each
recording in FOLDER. Half of the questions, by a hash of their ids, are remembered with what every worker did on them;
the others are asked. For each embedding:

    type       share of the 10 nearest that have the question's type
    counted    the same of what the store counts (core/loop/experience/likeness.py), by weight
    loss       log-loss of each worker's success, foretold by the 10 nearest and two questions at the worker's mean
    counted    the same, foretold by what the store counts
    Brier      squared error, by the 10 nearest
    right, $   accuracy and dollars a thousand where the worker with the best of the 10 nearest answers

`base` foretells by each worker's mean, and asks the best worker. Brackets: 95 % of 1,000 resamples of the questions, of
the difference to hashing. `--model` adds the whole of all-MiniLM-L6-v2 (policy/recipes/embedder.py names its wheel).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.core.loop.experience.likeness import HASHED, NEAR, NEAREST, Embedding
from gateway.core.loop.experience.meaning import TABLE_FILE, by_meaning
from gateway.files import shipped

K, PRIOR = 10, 2.0
RESAMPLES, SEED = 1000, 12
CHANCE_MIN = 1e-3
TOKENS_MAX, BATCH = 256, 16
TABLE_NUMBERS = 128  # then the words
WORDS = slice(TABLE_NUMBERS, None)
POOLS = {
    "rgym": "claude-3.5-sonnet gemma-3-27b-it llama-3.3-70b-instruct llama-4-maverick llama-4-scout o3-mini qwq-32b",
    "zeroeval": "gpt-4o-2024-05-13 claude-3-opus-20240229 gpt-4o-mini-2024-07-18 gemini-1.5-flash "
    "claude-3-haiku-20240307 Meta-Llama-3.1-70B-Instruct Qwen2-72B-Instruct",
    "agents": "MiniMax-M2.7 Nemotron-3-Super Qwen3.5-Flash Qwen3.6-Plus GPT-5.4 MiniMax-M2.5 claude-opus-4-5 GPT-5.2",
}
Floats = NDArray[np.float64]
Embed = Callable[[Sequence[str]], Floats]


@dataclass(frozen=True, slots=True)
class Recording:
    """Questions that all workers of a pool answered. `right`, `usd`: [questions, workers]."""

    texts: list[str]
    types: NDArray[np.str_]
    right: Floats
    usd: Floats
    remembered: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Score:
    """One figure for each asked question."""

    type: Floats
    counted_type: Floats
    loss: Floats
    counted_loss: Floats
    brier: Floats
    right: Floats
    usd: Floats


def read(path: Path, workers: Sequence[str], questions: int | None = None) -> Recording:
    """The recording, or the `questions` of it that come first by a hash of their ids."""
    with gzip.open(path, "rt") as file:
        rows = [row for row in map(json.loads, file) if all(worker in row["workers"] for worker in workers)]
    rows.sort(key=lambda row: _hash(row["id"]))
    rows = rows[:questions]
    replies = [[row["workers"][worker] for worker in workers] for row in rows]
    return Recording(
        [row["question"] for row in rows],
        np.array([row["domain"] for row in rows]),
        np.array([[float(answer["correct"]) for answer in answers] for answers in replies]),
        np.array([[float(answer["cost_usd"]) for answer in answers] for answers in replies]),
        np.array([_hash(row["id"]) % 2 == 0 for row in rows]),
    )


def _hash(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


def scored(data: Recording, vectors: Floats) -> Score:
    """What the nearest of the remembered questions say of each asked one."""
    asked = ~data.remembered
    similar = vectors[asked] @ vectors[data.remembered].T
    order = np.argsort(-similar, axis=1, kind="stable")[:, :K]
    same = data.types[asked][:, None] == data.types[data.remembered][None, :]
    mean, most = similar.mean(1, keepdims=True), similar.max(1, keepdims=True)
    weights = np.clip(((similar - mean) / (most - mean) - NEAR) / (NEAREST - NEAR), 0, 1)
    known, truth = data.right[data.remembered], data.right[asked]
    near = known[order].mean(1)
    by_near = _shrunk(near * K, np.full((len(truth), 1), K), known.mean(0))
    by_count = _shrunk(weights @ known, weights.sum(1, keepdims=True), known.mean(0))
    picks = np.lexsort((data.usd[data.remembered][order].mean(1), -near))[:, 0]
    every = np.arange(len(truth))
    return Score(
        np.take_along_axis(same, order, 1).mean(1),
        (weights * same).sum(1) / weights.sum(1),
        _loss(by_near, truth),
        _loss(by_count, truth),
        ((by_near - truth) ** 2).mean(1),
        truth[every, picks],
        data.usd[asked][every, picks] * 1000,
    )


def baseline(data: Recording) -> Score:
    """What each worker's mean over all remembered questions says."""
    asked = ~data.remembered
    means, truth = data.right[data.remembered].mean(0), data.right[asked]
    best, nothing = int(means.argmax()), np.full(len(truth), np.nan)
    loss = _loss(np.broadcast_to(means, truth.shape), truth)
    brier = ((means - truth) ** 2).mean(1)
    return Score(nothing, nothing, loss, loss, brier, truth[:, best], data.usd[asked][:, best] * 1000)


def _shrunk(right: Floats, counts: Floats, means: Floats) -> Floats:
    shrunk: Floats = (right + PRIOR * means) / (counts + PRIOR)
    return shrunk


def _loss(chances: Floats, truth: Floats) -> Floats:
    safe = np.clip(chances, CHANCE_MIN, 1 - CHANCE_MIN)
    loss: Floats = -(truth * np.log(safe) + (1 - truth) * np.log(1 - safe)).mean(1)
    return loss


def one_by_one(embed: Callable[[str], list[float]]) -> Embed:
    return lambda texts: np.array([embed(text) for text in texts])


def part(embedding: Embedding, numbers: slice) -> Embed:
    """Some of an embedding's numbers, at length 1."""

    def embed(texts: Sequence[str]) -> Floats:
        vectors = np.array([embedding.embed(text)[numbers] for text in texts])
        unit: Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), CHANCE_MIN)
        return unit

    return embed


def whole_model(directory: Path) -> Embed:
    """all-MiniLM-L6-v2 itself: the mean over up to 256 tokens."""
    import torch
    from tokenizers import Tokenizer
    from transformers import BertModel

    model: Any = BertModel.from_pretrained(directory, add_pooling_layer=False).eval()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS_MAX)
    tokenizer.enable_padding()

    def embed(texts: Sequence[str]) -> Floats:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors: Floats = np.zeros((len(texts), model.config.hidden_size))
        for begin in range(0, len(order), BATCH):
            batch = order[begin : begin + BATCH]
            encoded = tokenizer.encode_batch([texts[index] for index in batch])
            ids, mask = (torch.tensor([getattr(one, part) for one in encoded]) for part in ("ids", "attention_mask"))
            with torch.inference_mode():
                states = model(input_ids=ids, attention_mask=mask).last_hidden_state
            means = ((states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)).double().numpy()
            vectors[batch] = means / np.linalg.norm(means, axis=1, keepdims=True)
        return vectors

    return embed


def line(name: str, score: Score, hashing: Score, us: float | None) -> str:
    """A row of the table."""

    def figure(of: str, form: str) -> str:
        mine, theirs = getattr(score, of), getattr(hashing, of)
        if np.isnan(mine).any():
            return ""
        low, high = _interval(mine - theirs)
        return f"{mine.mean():{form}}" + ("" if score is hashing else f" ({low:+{form}} to {high:+{form}})")

    cells = [figure(of, ".1%") for of in ("type", "counted_type")]
    cells += [figure(of, ".3f") for of in ("loss", "counted_loss", "brier")]
    cells += [figure("right", ".1%"), f"{score.usd.mean():,.2f}", "" if us is None else f"{us:,.0f}"]
    return f"| {name} | {' | '.join(cells)} |"


def _interval(differences: Floats) -> tuple[float, float]:
    draw = np.random.default_rng(SEED)
    means = differences[draw.integers(0, len(differences), (RESAMPLES, len(differences)))].mean(1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def table(data: Recording, embeddings: Mapping[str, Embed]) -> str:
    """Every embedding on one recording; hashing must be among them."""
    lines = ["| | type | counted | loss | counted | Brier | right | $ | µs |", f"|---{'|---:' * 8}|"]
    scores, us = {}, {}
    for name, embed in embeddings.items():
        embed(data.texts[:BATCH])
        began_s = time.process_time()
        vectors = embed(data.texts)
        us[name] = (time.process_time() - began_s) / len(data.texts) * 1e6
        scores[name] = scored(data, vectors)
    hashing = scores[HASHED.name]
    return "\n".join(
        [*lines, line("base", baseline(data), hashing, None)]
        + [line(name, score, hashing, us[name]) for name, score in scores.items()]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.recorded.likeness", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where rgym_dev.jsonl.gz and the others are")
    parser.add_argument("--model", type=Path, help="directory of all-MiniLM-L6-v2")
    parser.add_argument("--questions", type=int, help="so many of each recording; default: all")
    options = parser.parse_args(arguments)
    meaning = by_meaning(shipped(TABLE_FILE))
    embeddings = {one.name: one_by_one(one.embed) for one in (HASHED, meaning)}
    embeddings |= {"its table alone": part(meaning, slice(TABLE_NUMBERS)), "its words alone": part(meaning, WORDS)}
    if options.model is not None:
        embeddings["all-MiniLM-L6-v2"] = whole_model(options.model)
    for name, workers in POOLS.items():
        path = options.folder / f"{name}_dev.jsonl.gz"
        if path.is_file():
            data = read(path, workers.split(), options.questions)
            print(f"\n{name}: {len(data.texts):,} questions, {len(set(data.types))} types\n\n{table(data, embeddings)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
