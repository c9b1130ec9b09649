"""What is asked: lines of a questions file, or a share of the logged requests.

A question is found again by its conversation (`conversation_key`): the same words are one question, wherever they come
from.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gateway.core.loop.experience.likeness import question_text
from gateway.errors import ConfigError
from policy import graders
from policy.dataset.read import StoredRequest, count_requests, requests_of, snapshot
from policy.dataset.select import Selection
from policy.environments.base import fraction
from policy.graders.base import GraderError
from policy.simulators.recordings import LINE_BYTES_MAX, QUESTIONS_MAX, conversation_key
from policy.spec import first_of

GRADER = "exact"  # of a question with a gold answer that names none
JUDGE = "judge"
TEXT_GRADERS = ("exact", "numeric", "choice")  # their reference is the right answer in words
IGNORED = ("input_tokens", "workers", "checks")  # so that a replay file is a questions file, too
REQUESTS_MAX = 200_000  # of the log, read at most: the latest
REQUESTS_AT_ONCE = 50  # in memory while they are read
REQUEST_BYTES_MAX = 1 << 20  # of a request; a larger one stays in the database
TEXT_BYTES_MAX = 256 << 20  # of all questions that are asked, with what their prompts showed of the workers
_IMAGE_SCHEMES = ("https://", "http://", "data:image/")


@dataclass(frozen=True, slots=True)
class RecordQuestion:
    """One question. `grader` (`name@version`) and `reference` say how replies are graded; None: nothing does. `pool`:
    of a logged one, its workers as they were shown, with experience."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    gold: str | None = None
    grader: str | None = None
    reference: Any = None
    domain: str | None = None
    pool: Sequence[Mapping[str, Any]] = field(default=(), compare=False)

    @property
    def key(self) -> str:
        """Hex of its `conversation_key`."""
        return conversation_key(self.messages).hex()

    @property
    def text(self) -> str:
        """The text of the last user message."""
        return question_text(self.messages)


class QuestionLine(BaseModel):
    """A line of a questions file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field("", max_length=200)
    question: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    images: tuple[str, ...] = Field((), max_length=16)
    gold: str | int | float | None = None
    grader: str = ""
    reference: Any = None
    task_type: str | None = Field(None, max_length=200)
    domain: str | None = Field(None, max_length=200)
    category: str | None = Field(None, max_length=200)

    @field_validator("images")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            if not one.startswith(_IMAGE_SCHEMES):
                raise ValueError("an image is an http(s) URL, or data:image/…;base64,…")
        return value

    @field_validator("messages")
    @classmethod
    def _conversation(cls, value: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        if value and value[-1].get("role") not in ("user", "tool"):
            raise ValueError("the last message must be of the user: it is what is asked")
        return value

    @model_validator(mode="after")
    def _one_question(self) -> QuestionLine:
        if bool(self.question.strip()) == bool(self.messages) and not self.messages:
            raise ValueError("give `question` or `messages`")
        if self.messages and self.images:
            raise ValueError("images: put them into `messages`, as parts")
        if self.messages and not question_text(self.messages).strip():
            raise ValueError("messages: no text of a user")
        return self

    def asked(self) -> tuple[Mapping[str, Any], ...]:
        """The conversation."""
        if self.messages:
            return self.messages
        if not self.images:
            return ({"role": "user", "content": self.question},)
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return ({"role": "user", "content": [{"type": "text", "text": self.question}, *parts]},)


# ---------------------------------------------------------------- a file


def of_file(path: Path, grader: str, judge: str | None) -> tuple[list[RecordQuestion], int]:
    """(questions, number of lines that ask what an earlier one asked). `grader`: of lines that name none; `judge`: the
    rubric by which replies to lines without gold and grader are judged; None: they are not. Raises ConfigError naming
    line and field."""
    questions: dict[str, RecordQuestion] = {}
    repeated = 0
    for number, text in _lines(path):
        question = _of_line(text, f"{path}:{number}", grader, judge)
        repeated += question.key in questions
        questions.setdefault(question.key, question)
        if len(questions) > QUESTIONS_MAX:
            raise ConfigError(f"{path}: over {QUESTIONS_MAX} questions; split the file")
    if not questions:
        raise ConfigError(f"{path}: holds no question; give a JSONL file with at least one line")
    return list(questions.values()), repeated


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX + 1), b""), 1):
                if len(line) > LINE_BYTES_MAX:
                    raise ConfigError(f"{path}:{number}: line over {LINE_BYTES_MAX} bytes; shorten it")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def _of_line(text: bytes, place: str, grader: str, judge: str | None) -> RecordQuestion:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{place}: not JSON; write one object a line") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: not an object; write one object a line")
    try:
        line = QuestionLine.model_validate({name: one for name, one in value.items() if name not in IGNORED})
    except ValidationError as error:
        raise ConfigError(f"{place}: {first_of(error)}") from None
    gold = None if line.gold is None else str(line.gold)
    reference = line.reference if line.reference is not None else gold
    conversation = line.asked()
    named, reference = _grading(place, line.grader or grader, reference, question_text(conversation), judge)
    key = conversation_key(conversation).hex()
    domain = line.task_type or line.domain or line.category
    return RecordQuestion(line.id or key[:12], conversation, _gold(gold, named, reference), named, reference, domain)


def _grading(place: str, grader: str, reference: Any, question: str, judge: str | None) -> tuple[str | None, Any]:
    """(`name@version`, reference) that are known to fit each other; (None, None) where nothing grades."""
    if reference is None and judge is not None and grader in ("", JUDGE):
        grader, reference = JUDGE, {"question": question, "rubric": judge}
    if reference is None:
        if grader:
            raise ConfigError(f"{place}: reference: the grader `{grader}` needs `gold` or `reference`")
        return None, None
    name, _, version = (grader or GRADER).partition("@")
    if name == JUDGE and isinstance(reference, str) and not reference.lstrip().startswith("{"):
        reference = {"question": question, "answer": reference}
    try:
        graders.check_reference(name, reference, version=version or None)
    except GraderError as error:
        field = "grader" if isinstance(error, graders.UnknownGrader) else "reference"
        raise ConfigError(f"{place}: {field}: {error}") from None
    return f"{name}@{graders.versions()[name]}", reference


def _gold(gold: str | None, grader: str | None, reference: Any) -> str | None:
    """The right answer in words, where there is one."""
    if gold is not None:
        return gold
    return reference if isinstance(reference, str) and (grader or "").split("@")[0] in TEXT_GRADERS else None


# ---------------------------------------------------------------- the log


def of_log(
    database_url: str,
    selection: Selection,
    share: float,
    seed: int,
    judge: str | None,
    questions_max: int,
    *,
    graded: bool = False,
) -> tuple[list[RecordQuestion], Counter[str]]:
    """(questions, oldest first; what was left out by reason) of a share of the logged requests; which ones is a hash of
    (seed, request). The latest `questions_max` of the latest REQUESTS_MAX, as far as TEXT_BYTES_MAX hold them.
    `graded`: only those that something grades. Raises ConfigError where nothing is left, and as `read.snapshot`."""
    questions: dict[str, RecordQuestion] = {}
    left_out: Counter[str] = Counter()
    text_bytes, requests = 0, 0
    bounds = {"latest": REQUESTS_MAX, "bytes_max": REQUEST_BYTES_MAX}
    with snapshot(database_url) as connection:
        for request in requests_of(connection, selection, REQUESTS_AT_ONCE, **bounds):
            requests += 1
            reason = _refusal(request) or ("not drawn" if fraction("record", seed, request.id) >= share else None)
            question = None if reason else _of_request(request, judge)
            if question is not None and question.key in questions:
                reason = "asked again later"
            if graded and question is not None and question.grader is None:
                reason = "without a grader"
            if reason or question is None:
                left_out[reason or "its grader cannot use its reference"] += 1
            elif len(questions) >= questions_max:
                left_out["over --questions-max"] += 1
            elif text_bytes + (size := _bytes(question)) > TEXT_BYTES_MAX:
                left_out[f"over {TEXT_BYTES_MAX >> 20} MiB of text in all"] += 1
            else:
                questions[question.key], text_bytes = question, text_bytes + size
        if requests == REQUESTS_MAX:
            left_out[f"older than the latest {REQUESTS_MAX:,}"] = count_requests(connection, selection) - requests
    if not questions:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items())) or "none was selected"
        raise ConfigError(f"no logged request can be asked again: {reasons}")
    return list(reversed(questions.values())), left_out


def _bytes(question: RecordQuestion) -> int:
    """About what it takes in memory."""
    return len(json.dumps([question.messages, list(question.pool), str(question.reference)], default=str))


def _refusal(request: StoredRequest) -> str | None:
    """Why a request cannot be asked again, by name."""
    if request.log_mode == "full" and not request.body:
        return f"over {REQUEST_BYTES_MAX >> 20} MiB"
    if request.log_mode != "full":
        return "not logged in mode full"
    if request.body.get("tools") or request.body.get("functions"):
        return "with tools, whose results are not there"
    if not _text_of(request.messages).strip():
        return "without a question"
    return None


def _text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    try:
        return question_text(messages)
    except (AttributeError, TypeError):  # parts of a message that are no objects
        return ""


def _of_request(request: StoredRequest, judge: str | None) -> RecordQuestion | None:
    """None where its grader cannot use its reference."""
    messages = tuple(dict(one) for one in request.messages)
    grader, reference = request.tags.get("grader", "").partition("@")[0], request.tags.get("reference")
    try:
        grading, right = _grading(request.id, grader, reference if grader else None, question_text(messages), judge)
    except ConfigError:
        return None
    return RecordQuestion(
        request.id, messages, _gold(None, grading, right), grading, right, request.task_type, request.pool
    )
