"""Recorded answers of real models, read from a file: one JSON object a line (JSONL, also .gz).

A line: `{"id", "question", "input_tokens", "workers": {model: {"output", "output_tokens"}}}`; `domain`, `gold` and a
worker's `correct` or `score` are for grading; a worker's `cost_usd` is what its answer cost; `samples` are further
draws of the worker on the question; `checks` are what a check said of a worker's answer. `messages` are the
conversation of a question that is more than one text. A worker's `error` stands for an answer that it did not give.
Anything else in a line is ignored.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gateway.core.money.amounts import usd_to_nano

LINE_BYTES_MAX = 4 * 2**20
QUESTIONS_MAX = 200_000
RECORDED_BYTES_MAX = 2 * 2**30  # of compressed answers held in memory


class BadRecording(ValueError):
    """A file that cannot be used; the message names file:line and the fix."""


@dataclass(frozen=True, slots=True)
class RecordedError:
    """What a worker answered instead of a completion."""

    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One recorded completion, compressed."""

    packed: bytes
    output_tokens: int
    score: float | None = None  # the recording's own verdict in [0, 1], where it has one
    cost_nano: int | None = None  # what it cost, in nano-dollars; None: its tokens × the price
    samples: tuple[RecordedAnswer, ...] = ()  # further draws, in recorded order
    input_tokens: int | None = None  # None: the question's
    finish_reason: str = "stop"
    refusal: bool = False  # the text stood in the message's `refusal`
    error: RecordedError | None = None  # then the text is empty

    @property
    def text(self) -> str:
        """The completion as the model gave it."""
        return zlib.decompress(self.packed).decode()

    @property
    def draws(self) -> tuple[RecordedAnswer, ...]:
        """This answer, then its samples."""
        return (self, *self.samples)


@dataclass(frozen=True, slots=True)
class RecordedCheck:
    """What a check said of one model's answer, and what it cost in nano-dollars."""

    valid: bool
    cost_nano: int

    @property
    def says(self) -> str:
        """What the tool `check` replies."""
        return "valid" if self.valid else "not valid"


@dataclass(frozen=True, slots=True)
class Recording:
    """One question with what each model answered."""

    id: str
    input_tokens: int
    answers: Mapping[str, RecordedAnswer]
    asked: bytes = b""  # the question, compressed
    domain: str | None = None
    gold: str | None = None
    checks: Mapping[str, RecordedCheck] = field(default_factory=dict)  # by model
    said: bytes | None = None  # the conversation as JSON, compressed; None: the question is all of it

    @property
    def question(self) -> str:
        """The question, word for word; of a conversation the text of its last user message."""
        return zlib.decompress(self.asked).decode()

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The conversation that was put to the workers."""
        if self.said is None:
            return ({"role": "user", "content": self.question},)
        return tuple(json.loads(zlib.decompress(self.said)))

    @property
    def graded(self) -> bool:
        """Whether every answer to it can be judged: by `gold`, or by a verdict on each."""
        draws = [draw for answer in self.answers.values() for draw in answer.draws]
        return self.gold is not None or (bool(draws) and all(draw.score is not None for draw in draws))


@dataclass(slots=True)
class Recordings:
    """Everything recorded, found by `conversation_key`."""

    by_question: dict[bytes, Recording] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    chosen: bool = False  # the caller named the models
    checks_unused: int = 0  # checks of answers that are not there

    def gaps(self) -> dict[str, int]:
        """The number of questions that each model did not answer, for models that lack any."""
        answered = Counter(model for each in self.by_question.values() for model in each.answers)
        lacking = {model: len(self.by_question) - answered[model] for model in self.models}
        return {model: questions for model, questions in lacking.items() if questions}


def question_key(text: str) -> bytes:
    """Digest of a question with its white space squeezed."""
    return hashlib.blake2b(" ".join(text.split()).encode(errors="surrogatepass"), digest_size=16).digest()


def conversation_key(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Digest of a conversation: the `question_key` of a single text of a user, else of all messages as they are."""
    if len(messages) == 1 and messages[0].get("role") == "user" and isinstance(messages[0].get("content"), str):
        return question_key(messages[0]["content"])
    text = json.dumps([dict(message) for message in messages], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16, person=b"conversation").digest()


def load(path: Path, models: Sequence[str] = ()) -> Recordings:
    """Read a recording line by line, keeping only `models` (empty: all). Raises BadRecording."""
    recordings = Recordings(chosen=bool(models))
    questions: dict[str, None] = {}
    held_bytes = 0
    for number, line in _lines(path):
        key, recording, unused = _parse(line, f"{path}:{number}", models)
        draws = (draw for answer in recording.answers.values() for draw in answer.draws)
        held_bytes += len(recording.asked) + len(recording.said or b"") + sum(len(draw.packed) for draw in draws)
        if len(recordings.by_question) >= QUESTIONS_MAX or held_bytes > RECORDED_BYTES_MAX:
            raise BadRecording(f"{path}:{number}: over {QUESTIONS_MAX} questions or 2 GiB; split the file")
        if key in recordings.by_question:
            raise BadRecording(f"{path}:{number}: the question stands in an earlier line; delete one of the two")
        recordings.by_question[key] = recording
        recordings.checks_unused += unused
        questions.update(dict.fromkeys(recording.answers))
    if not recordings.by_question:
        raise BadRecording(f"{path}: holds no recording; give a JSONL file with at least one line")
    missing = [model for model in models if model not in questions]
    if missing:
        raise BadRecording(f"{path}: has no answers of `{missing[0]}`; drop it from --workers")
    recordings.models = tuple(models) or tuple(sorted(questions))
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


def _row(line: bytes, place: str) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """(the row, its question, its workers)."""
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
    return record, question, workers


def _parse(line: bytes, place: str, models: Sequence[str]) -> tuple[bytes, Recording, int]:
    """(the key of the question, its recording, the number of checks of answers that are not in it)."""
    record, question, workers = _row(line, place)
    tokens = _count(record.get("input_tokens"), place, "input_tokens")
    own_answers = {
        model: answer for model, answer in workers.items() if answer is not None and model in (models or workers)
    }
    name = str(record.get("id", ""))
    answers = {
        model: _answers(answer, place, f"workers.{model}", f"{name} {model}") for model, answer in own_answers.items()
    }
    every = _checks(record.get("checks"), place)
    all_checks = {model: check for model, check in every.items() if not models or model in models}
    checks = {model: check for model, check in all_checks.items() if model in answers}
    domain, gold = (None if record.get(key) is None else str(record[key]) for key in ("domain", "gold"))
    messages = _messages(record.get("messages"), place)
    key, conversation = question_key(question), None
    if messages is not None:
        key, conversation = conversation_key(messages), _packed(json.dumps(messages))
    recording = Recording(name, tokens, answers, _packed(question), domain, gold, checks, conversation)
    return key, recording, len(all_checks) - len(checks)


def _messages(value: object, place: str) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise BadRecording(f"{place}: `messages` must be a list of messages; drop it where the question says all")
    return value


def _checks(value: object, place: str) -> dict[str, RecordedCheck]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRecording(f"{place}: `checks` must map a model to its `valid` and `cost_usd`")
    return {model: _check(check, place, f"checks.{model}") for model, check in value.items()}


def _check(value: object, place: str, field_name: str) -> RecordedCheck:
    if not isinstance(value, dict) or not isinstance(value.get("valid"), bool):
        raise BadRecording(f"{place}: `{field_name}.valid` must be true or false")
    return RecordedCheck(value["valid"], _nano(value.get("cost_usd", 0), place, f"{field_name}.cost_usd"))


def _answers(value: object, place: str, field_name: str, name: str) -> RecordedAnswer:
    """An answer with its samples."""
    first = _answer(value, place, field_name, name)
    samples = value.get("samples") if isinstance(value, dict) else None
    if samples is None:
        return first
    if not isinstance(samples, list):
        raise BadRecording(f"{place}: `{field_name}.samples` must be a list of answers; drop it where there are none")
    read = (_answer(each, place, f"{field_name}.samples[{i}]", f"{name} {i}") for i, each in enumerate(samples))
    return replace(first, samples=tuple(read))


def _answer(value: object, place: str, field_name: str, name: str) -> RecordedAnswer:
    if not isinstance(value, dict):
        raise BadRecording(f"{place}: `{field_name}` must be an object; give `output` and `output_tokens`")
    score, error = _score(value, place, field_name), _error(value.get("error"), place, field_name)
    if error is not None:
        value, score = {**value, "output": "", "output_tokens": value.get("output_tokens", 0)}, 0.0
    tokens = _count(value.get("output_tokens"), place, f"{field_name}.output_tokens")
    count = value.get("input_tokens")
    return RecordedAnswer(
        _packed(_text(value, place, field_name, name)),
        tokens,
        score,
        None if value.get("cost_usd") is None else _nano(value["cost_usd"], place, f"{field_name}.cost_usd"),
        input_tokens=None if count is None else _count(count, place, f"{field_name}.input_tokens"),
        finish_reason=str(value.get("finish_reason") or "stop"),
        refusal=value.get("refusal") is True,
        error=error,
    )


def _score(value: Mapping[str, Any], place: str, field_name: str) -> float | None:
    """The verdict on an answer: `score`, else `correct` as 1 or 0."""
    correct, score = value.get("correct"), value.get("score")
    if not (correct is None or isinstance(correct, bool)):
        raise BadRecording(f"{place}: `{field_name}.correct` must be true or false")
    if score is None:
        return None if correct is None else float(correct)
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        raise BadRecording(f"{place}: `{field_name}.score` must be a number from 0 to 1")
    return float(score)


def _error(value: object, place: str, field_name: str) -> RecordedError | None:
    if value is None:
        return None
    status = value.get("status") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(status, int) or not 400 <= status <= 599:
        raise BadRecording(f"{place}: `{field_name}.error` must have a `status` from 400 to 599, `code` and `message`")
    return RecordedError(status, str(value.get("code", "upstream_error")), str(value.get("message", "")))


def _text(value: Mapping[str, Any], place: str, field_name: str, name: str) -> str:
    """The text of an answer; where only its final `answer` was recorded, that in tags. An answer without both has a
    stand-in, another for each, so that none agrees with any."""
    output, answer = value.get("output"), value.get("answer")
    if output is None and isinstance(answer, str):
        return f"<answer>{answer}</answer>"
    if output is None and answer is not None:
        raise BadRecording(f"{place}: `{field_name}.answer` must be a text, or null where none was recorded")
    if output is None:
        return f"(no text recorded: {hashlib.blake2b(name.encode(), digest_size=5).hexdigest()})"
    if not isinstance(output, str):
        raise BadRecording(f"{place}: `{field_name}.output` must be a text, or null where none was recorded")
    return output


def _nano(value: object, place: str, name: str) -> int:
    """Dollars as integer nano-dollars, rounded up once."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        return usd_to_nano(str(value))
    except ValueError:
        raise BadRecording(f"{place}: `{name}` must be a number of dollars, at least 0; drop it if unknown") from None


def _packed(text: str) -> bytes:
    return zlib.compress(text.encode(errors="replace"), 1)


def _count(value: object, place: str, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 10_000_000:
        raise BadRecording(f"{place}: `{name}` must be a whole number of tokens")
    return value


def models_in(path: Path) -> tuple[str, ...]:
    """Models that answered any line, sorted. Raises BadRecording."""
    return tuple(sorted({model for number, line in _lines(path) for model in _row(line, f"{path}:{number}")[2]}))


def dearest_check(path: Path) -> int | None:
    """Nano-dollars of the dearest recorded check; None where nothing was checked. Raises BadRecording."""
    rows = ((_row(line, f"{path}:{number}")[0], f"{path}:{number}") for number, line in _lines(path))
    costs = [check.cost_nano for row, place in rows for check in _checks(row.get("checks"), place).values()]
    return max(costs, default=None)


def read_prices(path: Path) -> dict[str, Any]:
    """Model → dollars per million tokens, from a JSON file. Raises BadRecording."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadRecording(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadRecording(f"{path}: must map a model to its prices")
    return value
