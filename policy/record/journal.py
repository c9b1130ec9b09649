"""The append-only file of a recording: one JSON object a line, written before and after each call.

A call's worst case is on file as a `hold` before the call leaves, its real cost as a `settle` when it has ended. A
hold that a kill left open counts in full for ever: the call may have been paid for. So what is counted is never less
than what was spent, whatever ended the program. A torn last line is cut off when the file is opened again.

Lines by `kind`: `worker` (name, digest of how it is asked) · `question` · `hold` (id, nano) · `settle` (hold, nano,
and of a call that ended: key, worker, sample, answer) · `grade` (key, worker, sample, score, detail).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from gateway.core.money.amounts import nano_to_usd
from gateway.errors import ConfigError, Unavailable
from policy.record.questions import RecordQuestion

JOURNAL_LINE_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class RecordedDraw:
    """Names one answer: question, worker, and the number of the sample."""

    key: str
    worker: str
    sample: int


@dataclass(frozen=True, slots=True)
class RecordedVerdict:
    """What a grader said of an answer."""

    score: float
    detail: str


@dataclass(slots=True)
class RecordJournal:
    """What a recording holds. Open it with `opened`."""

    path: Path
    file: BinaryIO
    questions: dict[str, RecordQuestion] = field(default_factory=dict)  # by key, in the order asked
    digests: dict[str, str] = field(default_factory=dict)  # by worker
    answers: dict[RecordedDraw, Mapping[str, Any]] = field(default_factory=dict)
    verdicts: dict[RecordedDraw, RecordedVerdict] = field(default_factory=dict)
    settled_nano: int = 0
    open_nano: dict[int, int] = field(default_factory=dict)  # by hold
    abandoned: int = 0  # holds that an earlier run left open
    holds: int = 0
    _broken: str = ""  # why nothing more is written: the last line may be torn

    @property
    def spent_nano(self) -> int:
        """Nano-dollars that were, or may have been, spent; calls in flight count with their worst case."""
        return self.settled_nano + sum(self.open_nano.values())

    def add_worker(self, name: str, digest: str) -> None:
        """Note how a worker is asked. Raises ConfigError where it was asked otherwise before."""
        old_digest = self.digests.get(name)
        if old_digest is None:
            self._write({"kind": "worker", "name": name, "digest": digest})
        elif old_digest != digest:
            raise ConfigError(
                f"{self.path}: `{name}` was recorded as another model, or with other settings; name another --out"
            )

    def add_question(self, question: RecordQuestion) -> None:
        """Note a question, once."""
        if question.key not in self.questions:
            fields = ("id", "messages", "gold", "grader", "reference", "domain")
            self._write({"kind": "question", **{name: getattr(question, name) for name in fields}})

    def hold(self, nano: int) -> int:
        """Put the worst case of a call on file; its number."""
        number = self.holds
        self._write({"kind": "hold", "id": number, "nano": nano})
        return number

    def settle(
        self, hold: int, nano: int, draw: RecordedDraw | None = None, answer: Mapping[str, Any] | None = None
    ) -> None:
        """End a hold at its real cost, with the answer where there is one."""
        fields = {} if draw is None or answer is None else {**asdict(draw), "answer": dict(answer)}
        self._write({"kind": "settle", "hold": hold, "nano": nano, **fields})

    def grade(self, draw: RecordedDraw, verdict: RecordedVerdict) -> None:
        """Note what a grader said."""
        self._write({"kind": "grade", **asdict(draw), **asdict(verdict)})

    def close(self) -> None:
        """Put all of it on disk and let go of the file."""
        with suppress(OSError):  # what could not be written was said when it was written
            self.file.flush()
            os.fsync(self.file.fileno())
        with suppress(OSError):
            self.file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if not self._broken:
            try:
                self.file.write(json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n")
                self.file.flush()
            except OSError as error:
                self._broken = error.strerror or str(error)
        if self._broken:
            raise Unavailable(f"{self.path} could not be written: {self._broken}; free some space and run this again")
        self._take(line)

    def _take(self, line: Mapping[str, Any]) -> None:
        """Add one line to what is held. Raises KeyError, TypeError or ValueError on a line that no recording wrote."""
        match line["kind"]:
            case "worker":
                self.digests[str(line["name"])] = str(line["digest"])
            case "question":
                fields = {name: line[name] for name in ("id", "gold", "grader", "reference", "domain")}
                question = RecordQuestion(messages=tuple(line["messages"]), **fields)
                self.questions[question.key] = question
            case "hold":
                self.open_nano[int(line["id"])] = int(line["nano"])
                self.holds = int(line["id"]) + 1
            case "settle":
                del self.open_nano[int(line["hold"])]
                self.settled_nano += int(line["nano"])
                if "answer" in line:
                    self.answers[_draw(line)] = line["answer"]
            case "grade":
                self.verdicts[_draw(line)] = RecordedVerdict(float(line["score"]), str(line["detail"]))
            case other:
                raise ValueError(f"kind {other}")


def _draw(line: Mapping[str, Any]) -> RecordedDraw:
    return RecordedDraw(str(line["key"]), str(line["worker"]), int(line["sample"]))


def opened(path: Path) -> RecordJournal:
    """The journal at `path`, made where there is none, for this program alone. Raises ConfigError where another one
    writes it, or where it is no journal."""
    try:
        file = path.open("a+b")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file in a directory you can write") from None
    journal = RecordJournal(path, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _read(journal)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"{path}: another recording writes it; wait for it, or name another --out") from None
    except ConfigError:
        file.close()
        raise
    journal.abandoned = len(journal.open_nano)
    journal.settled_nano, journal.open_nano = journal.spent_nano, {}
    return journal


def _read(journal: RecordJournal) -> None:
    """Read what is there, and cut off a torn last line."""
    whole_bytes = 0
    with journal.path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(JOURNAL_LINE_BYTES_MAX), b""), 1):
            if not line.endswith(b"\n"):
                break
            try:
                journal._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{journal.path}:{number}: no line of a recording; name another --out") from None
            whole_bytes += len(line)
    journal.file.truncate(whole_bytes)


def dollars(nano: int) -> str:
    """As a person reads it."""
    return f"${nano_to_usd(nano)}"
