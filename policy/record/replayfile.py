"""A journal as a replay file: a line a question, with what each worker answered; and the workers' prices beside it.

Both are written whole. `policy/simulators/recordings.py` says what the lines hold.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.core.money.amounts import nano_to_usd
from gateway.core.pool.workers import Price, WorkerSpec
from gateway.errors import Unavailable
from gateway.files import replacing, write_atomic
from policy.record.journal import RecordedDraw, RecordJournal
from policy.record.questions import RecordQuestion
from policy.simulators.recordings import LINE_BYTES_MAX


def write(journal: RecordJournal, path: Path) -> tuple[int, int]:
    """Write the replay file. Returns (questions written, questions left out because a line would be too long for its
    reader). Raises Unavailable."""
    written, too_long = 0, 0
    try:
        with replacing(path) as file, _packed(file, path) as lines:
            for row in rows_of(journal):
                line = json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n"
                if len(line) > LINE_BYTES_MAX:
                    too_long += 1
                    continue
                lines.write(line)
                written += 1
    except OSError as error:
        why = error.strerror or str(error)
        raise Unavailable(f"{path} could not be written: {why}; free some space and run this again") from None
    return written, too_long


def _packed(file: Any, path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0)
    return _Plain(file)


class _Plain:
    """A file that the block does not close."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> Any:
        return self._file

    def __exit__(self, *_: object) -> None:
        return None


def rows_of(journal: RecordJournal) -> Iterator[dict[str, Any]]:
    """Questions that any worker answered, in the order asked."""
    draws: dict[str, dict[str, list[RecordedDraw]]] = {}
    for draw in sorted(journal.answers, key=lambda one: one.sample):
        draws.setdefault(draw.key, {}).setdefault(draw.worker, []).append(draw)
    for key, question in journal.questions.items():
        if key in draws:
            by_worker = {name: draws[key][name] for name in sorted(draws[key])}
            workers = {name: _worker(journal, own) for name, own in by_worker.items()}
            yield _head(question) | {"input_tokens": _most(workers), "workers": workers}


def _head(question: RecordQuestion) -> dict[str, Any]:
    plain = len(question.messages) == 1 and question.messages[0] == {"role": "user", "content": question.text}
    facts = {
        "id": question.id,
        "question": question.text,
        "messages": None if plain else list(question.messages),
        "domain": question.domain,
        "gold": question.gold,
        "grader": question.grader,
        "reference": None if question.reference == question.gold else question.reference,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _most(workers: Mapping[str, Mapping[str, Any]]) -> int:
    return max(int(one.get("input_tokens", 0)) for one in workers.values())


def _worker(journal: RecordJournal, draws: Sequence[RecordedDraw]) -> dict[str, Any]:
    """The first answer with the others as its samples."""
    first, *more = (_answer(journal, draw) for draw in draws)
    return first | ({"samples": more} if more else {})


def _answer(journal: RecordJournal, draw: RecordedDraw) -> dict[str, Any]:
    answer = dict(journal.answers[draw])
    nano, finish = int(answer.pop("nano")), answer.pop("finish_reason", "stop")
    verdict = journal.verdicts.get(draw)
    answer |= {"cost_usd": float(nano_to_usd(nano))} | ({} if finish == "stop" else {"finish_reason": finish})
    if "error" in answer:
        return answer | {"correct": False}
    if verdict is None:
        return answer
    return answer | ({"correct": verdict.score == 1.0} if verdict.score in (0.0, 1.0) else {"score": verdict.score})


def write_prices(specs: Sequence[WorkerSpec], path: Path) -> None:
    """Write worker → dollars per million tokens, keeping what the file has of others. Raises Unavailable."""
    try:
        old_prices = json.loads(path.read_text()) if path.exists() else {}
        prices = {spec.name: _dollars(spec.price or Price()) for spec in specs}
        write_atomic(path, json.dumps(old_prices | prices, indent=1) + "\n")
    except (OSError, ValueError) as error:
        raise Unavailable(f"{path} could not be written: {error}") from None


def _dollars(price: Price) -> dict[str, float]:
    names = ("input_usd_per_mtok", "output_usd_per_mtok")
    return {name: float(getattr(price, name)) for name in names}
