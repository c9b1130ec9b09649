"""Replay workers: recorded answers of real models, served as OpenAI-compatible workers.

`python -m policy.simulators.replay serve FILE` answers (model, question) with what that model really said, with its
real tokens; a question or model without a recording is a 404 `no_recording`, never an invented answer. `… pool FILE`
prints the pool file for it. A line of FILE (JSONL, also .gz): `{"id", "question", "input_tokens", "workers": {model:
{"output", "output_tokens"}}}`; `domain`, `gold` and a worker's `correct` are for grading; anything else in it is
ignored.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import yaml

from gateway.core.pool.workers import VOTE_URL, PoolFile
from policy.simulators import HANDLES
from policy.simulators.server import RequestRefusal, SimulatedReply, WorkerServer, choices_of, last_user_text, serve

LINE_BYTES_MAX = 4 * 2**20
QUESTIONS_MAX = 200_000
RECORDED_BYTES_MAX = 2 * 2**30  # of compressed answers held in memory
CONTEXT_TOKENS = 32_768
OUTPUT_TOKENS_MAX = 8_192
_PIECE = re.compile(r"\s*\S+|\s+$")


class BadRecording(ValueError):
    """A file that cannot be used; the message names file:line and the fix."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One recorded completion, compressed."""

    packed: bytes
    output_tokens: int
    correct: bool | None = None  # the recording's own verdict, where it has one

    @property
    def text(self) -> str:
        """The completion as the model gave it."""
        return zlib.decompress(self.packed).decode()


@dataclass(frozen=True, slots=True)
class Recording:
    """One question with what each model answered."""

    id: str
    input_tokens: int
    answers: Mapping[str, RecordedAnswer]
    asked: bytes = b""  # the question, compressed
    domain: str | None = None
    gold: str | None = None

    @property
    def question(self) -> str:
        """The question, word for word."""
        return zlib.decompress(self.asked).decode()


@dataclass(slots=True)
class Recordings:
    """Everything recorded, found by exact question text (white space does not count)."""

    by_question: dict[bytes, Recording] = field(default_factory=dict)
    models: tuple[str, ...] = ()


def question_key(text: str) -> bytes:
    """Digest of a question with its white space squeezed."""
    return hashlib.blake2b(" ".join(text.split()).encode(errors="surrogatepass"), digest_size=16).digest()


def load(path: Path, models: Sequence[str] = ()) -> Recordings:
    """Read a recording line by line, keeping only `models` (empty: all). Raises BadRecording."""
    recordings = Recordings()
    seen: dict[str, None] = {}
    held_bytes = 0
    for number, line in _lines(path):
        question, recording = _parse(line, f"{path}:{number}", models)
        held_bytes += len(recording.asked) + sum(len(answer.packed) for answer in recording.answers.values())
        if len(recordings.by_question) >= QUESTIONS_MAX or held_bytes > RECORDED_BYTES_MAX:
            raise BadRecording(f"{path}:{number}: over {QUESTIONS_MAX} questions or 2 GiB; split the file")
        if question_key(question) in recordings.by_question:
            raise BadRecording(f"{path}:{number}: the question stands in an earlier line; delete one of the two")
        recordings.by_question[question_key(question)] = recording
        seen.update(dict.fromkeys(recording.answers))
    if not recordings.by_question:
        raise BadRecording(f"{path}: holds no recording; give a JSONL file with at least one line")
    missing = [model for model in models if model not in seen]
    if missing:
        raise BadRecording(f"{path}: has no answers of `{missing[0]}`; drop it from --workers")
    recordings.models = tuple(models) or tuple(sorted(seen))
    return recordings


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with _open(path) as file:
            number = 0
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise BadRecording(f"{path}:{number}: line over {LINE_BYTES_MAX} bytes; split or shorten it")
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise BadRecording(f"{path}: cannot be read ({error}); give a JSONL file, plain or .gz") from None


def _parse(line: bytes, place: str, models: Sequence[str]) -> tuple[str, Recording]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise BadRecording(f"{place}: not JSON; write one object a line") from None
    if not isinstance(record, dict):
        raise BadRecording(f"{place}: not an object; write one object a line")
    question, workers = record.get("question"), record.get("workers")
    if not isinstance(question, str) or not question.strip():
        raise BadRecording(f"{place}: `question` must be a text")
    if not isinstance(workers, dict):
        raise BadRecording(f"{place}: `workers` must map a model to its `output` and `output_tokens`")
    tokens = _count(record.get("input_tokens"), place, "input_tokens")
    wanted = {model: answer for model, answer in workers.items() if not models or model in models}
    answers = {model: _answer(answer, place, model) for model, answer in wanted.items()}
    domain, gold = (None if record.get(key) is None else str(record[key]) for key in ("domain", "gold"))
    return question, Recording(str(record.get("id", "")), tokens, answers, _packed(question), domain, gold)


def _answer(value: object, place: str, model: str) -> RecordedAnswer:
    if not isinstance(value, dict) or not isinstance(value.get("output"), str):
        raise BadRecording(f"{place}: `workers.{model}.output` must be a text")
    correct = value.get("correct")
    if not (correct is None or isinstance(correct, bool)):
        raise BadRecording(f"{place}: `workers.{model}.correct` must be true or false")
    tokens = _count(value.get("output_tokens"), place, f"workers.{model}.output_tokens")
    return RecordedAnswer(_packed(value["output"]), tokens, correct)


def _packed(text: str) -> bytes:
    return zlib.compress(text.encode(errors="replace"), 1)


def _count(value: object, place: str, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 10_000_000:
        raise BadRecording(f"{place}: `{name}` must be a whole number of tokens")
    return value


class ReplaySpeaker:
    """Recorded models as workers."""

    def __init__(self, recordings: Recordings, first_s: float = 0.0, tokens_per_s: float = 0.0) -> None:
        self._recordings = recordings
        self._first_s = first_s
        self._token_s = 1 / tokens_per_s if tokens_per_s else 0.0

    @property
    def workers(self) -> Sequence[str]:
        """Models, in the order asked for."""
        return self._recordings.models

    def say(self, worker: str, body: Mapping[str, Any]) -> SimulatedReply:
        """The reply of that model to the last user message. Raises RequestRefusal(404) where nothing is recorded:
        for another question, another wording, or more than one choice's worth of answers."""
        if choices_of(body) != 1:
            raise RequestRefusal(404, "no_recording", "one answer was recorded for each question: `n` must be 1")
        recording = self._recordings.by_question.get(question_key(last_user_text(body)))
        answer = recording.answers.get(worker) if recording else None
        if recording is None or answer is None:
            raise RequestRefusal(404, "no_recording", f"nothing recorded of `{worker}` on this question, word for word")
        pieces = _PIECE.findall(answer.text) or [""]
        piece_s = self._token_s * answer.output_tokens / len(pieces)
        return SimulatedReply([pieces], recording.input_tokens, answer.output_tokens, self._first_s, piece_s)


def pool_file(models: Sequence[str], prices: Mapping[str, Any], base_url: str, seed: int = 0) -> dict[str, Any]:
    """The pool `replay` as a pool file's document: neutral handles in random order, no tags, real prices, `vote`.
    Raises BadRecording on a model without a price."""
    handles = _handles(models, seed)
    entries = []
    for model in models:
        handle = handles[model]
        price = prices.get(model)
        if not isinstance(price, dict) or not {"input_usd_per_mtok", "output_usd_per_mtok"} <= set(price):
            raise BadRecording(f"no price of `{model}`: add input_usd_per_mtok and output_usd_per_mtok to the prices")
        cost = {key: f"{price[key]}" for key in ("input_usd_per_mtok", "output_usd_per_mtok")}
        entries.append(
            {
                "name": model,
                "handle": handle,
                "kind": "openai",
                "model": model,
                "url": f"{base_url.rstrip('/')}/w/{model}/v1",
                "description": "general language model (replayed answers)",
                "price": cost,
                "context_tokens": CONTEXT_TOKENS,
                "output_tokens_max": OUTPUT_TOKENS_MAX,
            }
        )
    free = {"input_usd_per_mtok": "0", "output_usd_per_mtok": "0"}
    majority = {"description": "gives the majority answer of the replies it sees", "tags": ["majority"], "price": free}
    entries.append({"name": "vote", "handle": "vote", "kind": "tool", "url": VOTE_URL, **majority})
    return {"workers": entries, "pools": {"replay": [entry["name"] for entry in entries]}, "default": "replay"}


def _handles(models: Sequence[str], seed: int) -> dict[str, str]:
    """A handle for each model, drawn by its name: it keeps the handle whatever order the models come in, and, but where
    two draw the same one, whatever other models there are."""
    handles: dict[str, str] = {}
    for model in sorted(models):
        free = [handle for handle in HANDLES if handle not in handles.values()]
        drawn = Random(f"{seed} {model}").sample(HANDLES, len(HANDLES))
        handles[model] = next(handle for handle in drawn if handle in free)
    return handles


def pool_yaml(path: Path, models: Sequence[str], prices: Mapping[str, Any], base_url: str, seed: int = 0) -> str:
    """`pool_file` as pool.yaml. Raises BadRecording on a model without a price."""
    document = pool_file(models, prices, base_url, seed)
    PoolFile.model_validate(document)
    head = f"# Recorded answers of {path.name}, served by `python -m policy.simulators.replay serve`.\n"
    return head + yaml.safe_dump(document, sort_keys=False, width=120)


def models_in(path: Path) -> tuple[str, ...]:
    """Models answered in the first hundred lines, sorted. Raises BadRecording."""
    first = islice(_lines(path), 100)
    return tuple(sorted({model for n, line in first for model in _parse(line, f"{path}:{n}", ())[1].answers}))


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(prog="python -m policy.simulators.replay", description="Recorded answers as workers.")
    commands = top.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="serve every recorded model on one port until SIGTERM")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=0, help="0: a free one")
    server.add_argument("--port-file", type=Path, help="written once the socket listens")
    server.add_argument("--first-s", type=float, default=0.0, help="seconds before the first token")
    server.add_argument("--tokens-per-s", type=float, default=0.0, help="simulated speed; 0: at once")
    pool = commands.add_parser("pool", help="print a pool.yaml")
    pool.add_argument("--base-url", required=True, help="where `serve` listens")
    pool.add_argument("--prices", type=Path, required=True, help="JSON: model → dollars per million tokens")
    pool.add_argument("--seed", type=int, default=0, help="draws the handles")
    for command in (server, pool):
        command.add_argument("file", type=Path)
        command.add_argument("--workers", default="", help="comma-separated models; all by default")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2: bad arguments or a bad file)."""
    args = parser().parse_args(argv)
    models = [model.strip() for model in args.workers.split(",") if model.strip()]
    try:
        if args.command == "pool":
            names = models or models_in(args.file)
            sys.stdout.write(pool_yaml(args.file, names, read_prices(args.prices), args.base_url, args.seed))
            return 0
        speaker = ReplaySpeaker(load(args.file, models), args.first_s, args.tokens_per_s)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    asyncio.run(serve(WorkerServer(speaker, unknown_code="no_recording").app(), args.host, args.port, args.port_file))
    return 0


def read_prices(path: Path) -> dict[str, Any]:
    """Model → dollars per million tokens, from a JSON file. Raises BadRecording."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadRecording(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadRecording(f"{path}: must map a model to its prices")
    return value


if __name__ == "__main__":
    sys.exit(main())
