"""Policies on recorded answers of real models, through a running gateway: accuracy and dollars.

    python -m bench.recorded.replay_serving --data FILE.jsonl.gz --prices prices.json --n 300 --workers MODEL,MODEL,…

Starts `python -m policy.simulators.replay serve` on a free port and, unless `--gateway` names one that already uses
its pool, a gateway on it; both end with the run. Questions are drawn by a hash of their id. `--learn` others go to
`baton/rule` first and are judged, so that rule and conductor have experience; no question is in both sets.

A reply that is word for word a recorded answer (every single-step plan, and a vote) gets the recording's own verdict.
Any other is graded by its extracted final answer against the gold one. A plan that rewrites the question finds no
recording and falls back. The embedded conductor is trained in the arena and **untrained for these workers**: they have
no tags, and their handles say nothing; all it can go by is price, speed and experience.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serving import Outcome, Row, Run, report, run
from bench.simulated.arena_serving import add_common, check_common, names, served_at
from gateway.core.loop.replies.answers import extract_answer, normalise
from policy.recipes.stack import Gateway, output_of, program, temporary_directory
from policy.recipes.traffic import Question

SEVEN = (
    "gpt-4o-2024-05-13,claude-3-opus-20240229,gpt-4o-mini-2024-07-18,gemini-1.5-flash,claude-3-haiku-20240307,"
    "Meta-Llama-3.1-70B-Instruct,Qwen2-72B-Instruct"
)
UNTRAINED = "The conductor is untrained for these workers; it was trained on simulated ones (docs/arena.md)."
RECORDED = (
    "Workers are recordings of real models (greedy decoding, list prices): latency and overhead say nothing of them."
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A question, its gold answer and, by model, the reply and whether it was right."""

    id: str
    domain: str
    question: str
    gold: str
    workers: Mapping[str, Mapping[str, Any]]

    def grade(self, reply: str) -> float:
        """1.0 when right: by the recording's verdict where the reply is one, else by its final answer."""
        for answer in self.workers.values():
            if answer["output"] == reply:
                return float(bool(answer["correct"]))
        return float(normalise(extract_answer(reply)) == normalise(self.gold))


def load(path: Path, workers: Sequence[str]) -> list[Recorded]:
    """The questions that every one of `workers` has answered. Raises SystemExit naming what is wrong."""
    questions = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for line in file:
                body = json.loads(line)
                if all(worker in body["workers"] for worker in workers):
                    answers = {worker: body["workers"][worker] for worker in workers}
                    questions.append(Recorded(body["id"], body["domain"], body["question"], str(body["gold"]), answers))
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{path}: cannot be used ({type(error).__name__}: {error})") from None
    if not questions:
        raise SystemExit(f"{path}: no question was answered by all of {', '.join(workers)}")
    return questions


def drawn(recorded: Sequence[Recorded], n: int, learn: int, seed: int) -> tuple[list[Recorded], list[Recorded]]:
    """(to be asked, to learn from): disjoint, in the order of a hash of (seed, id). Raises SystemExit on too few."""
    if n + learn > len(recorded):
        raise SystemExit(f"{n} + {learn} questions asked for, {len(recorded)} are there; lower --n or --learn")
    ranked = sorted(recorded, key=lambda each: hashlib.sha256(f"{seed} {each.id}".encode()).digest())
    return ranked[:n], ranked[n : n + learn]


def asked(recorded: Sequence[Recorded]) -> list[Question]:
    """Turn recorded questions into those of a serving run, which do not name their domain."""
    return [Question(each.id, each.question, each.grade) for each in recorded]


@contextmanager
def replaying(options: argparse.Namespace, workers: Sequence[str]) -> Iterator[Gateway]:
    """Run the replay workers, and a gateway with them as its pool."""
    if options.gateway is not None:
        yield Gateway.read(options.gateway)
        return
    serve = ("policy.simulators.replay", "serve", str(options.data.resolve()), "--workers", ",".join(workers))
    with temporary_directory() as directory, program("replay", directory, *serve) as replay:
        prices = ("--prices", str(options.prices.resolve()), "--workers", ",".join(workers))
        base_url = ("--base-url", replay.url, "--seed", str(options.seed))
        pool = directory / "pool.yaml"
        pool.write_text(output_of("policy.simulators.replay", "pool", str(options.data.resolve()), *prices, *base_url))
        with served_at(None, options.conductor, pool) as served:
            yield served


def recorded_row(worker: str, questions: Sequence[Recorded]) -> float:
    """Share right of one model, from the file alone: what `baton/fixed:` of it must measure."""
    return sum(bool(each.workers[worker]["correct"]) for each in questions) / len(questions)


def checks(outcome: Outcome, workers: Sequence[str], questions: Sequence[Recorded]) -> list[str]:
    """Return sentences that compare the measurement with its recording."""
    rows: dict[str, Row] = {row.policy: row for row in outcome.rows}
    lines = [
        f"`baton/fixed:{worker}` measured {row.accuracy:.1%}, its recording says {truth:.1%}."
        for worker in workers
        if (row := rows.get(f"baton/fixed:{worker}"))
        and abs(row.accuracy - (truth := recorded_row(worker, questions))) > 1e-9
    ]
    any_right = sum(any(answers["correct"] for answers in each.workers.values()) for each in questions) / len(questions)
    same = "Every fixed row equals what its recording says." if not lines else "Fixed rows that differ from the file:"
    return [same, *lines, f"Any of the workers right: {any_right:.1%} (no policy here can know which)."]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 when a rollout is missing in PostgreSQL, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.recorded.replay_serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="JSONL of recorded answers, may be .gz (docs/arena.md)"
    )
    parser.add_argument("--prices", type=Path, required=True, help="JSON: model → dollars per million tokens")
    parser.add_argument("--workers", default=SEVEN, help="comma-separated models")
    parser.add_argument("--learn", type=int, default=300, help="judged questions of baton/rule beforehand")
    add_common(parser)
    options = parser.parse_args(argv)
    check_common(parser, options)
    workers = names(options.workers)
    asked_now, learned_from = drawn(load(options.data, workers), options.n, options.learn, options.seed)
    questions, learning = asked(asked_now), asked(learned_from)
    wanted = Run("bench replay", learning, questions, names(options.policies), options.concurrency)
    try:
        with replaying(options, workers) as served:
            outcome = asyncio.run(run(served, wanted))
    except KeyboardInterrupt:
        return 130
    notes = [RECORDED, UNTRAINED, *checks(outcome, workers, asked_now), *outcome.notes()]
    about = {"bench": "replay", "n": options.n, "learn": options.learn, "seed": options.seed, "workers": workers}
    report(outcome.rows, notes, options.out, about | {"concurrency": options.concurrency})
    return 0 if outcome.stored == outcome.sent else 1


if __name__ == "__main__":
    sys.exit(main())
