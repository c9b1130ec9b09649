"""Graders: is a reply right? One entry, `grade`; every grader is versioned, and its version goes with each outcome.

A changed grader gets a new version; outcomes keep theirs. `numeric@2` reads a fraction at the end of a
sentence (`75/4.`), which `numeric@1` took for no number.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from policy.graders import judge, programs, texts
from policy.graders.base import (
    REFERENCE_CHARS_MAX,
    REPLY_CHARS_MAX,
    BadReference,
    Grade,
    GraderError,
    GraderFailed,
    Judged,
    Tools,
    UnknownGrader,
)

__all__ = [
    "BadReference",
    "Grade",
    "GraderError",
    "GraderFailed",
    "Tools",
    "UnknownGrader",
    "check_reference",
    "grade",
    "versions",
]


@dataclass(frozen=True, slots=True)
class Grader:
    """`read` makes a reference usable or raises BadReference; `judge` compares a reply with it."""

    version: str
    read: Callable[[object], Any]
    judge: Callable[[Any, str, Tools], Awaitable[Judged]]


def _pure(compare: Callable[[Any, str], Judged]) -> Callable[[Any, str, Tools], Awaitable[Judged]]:
    async def compared(right: Any, reply: str, _tools: Tools) -> Judged:
        return compare(right, reply)

    return compared


GRADERS: Mapping[str, Grader] = {
    "exact": Grader("1", texts.exact_reference, _pure(texts.exact)),
    "numeric": Grader("2", texts.numeric_reference, _pure(texts.numeric)),
    "choice": Grader("1", texts.choice_reference, _pure(texts.choice)),
    "regex": Grader("1", programs.regex_reference, programs.regex),
    "json_schema": Grader("1", programs.schema_reference, programs.json_schema),
    "python": Grader("1", programs.python_reference, programs.python),
    "judge": Grader("1", judge.judge_reference, judge.judge),
}


def versions() -> dict[str, str]:
    """The version of every grader, by name."""
    return {name: grader.version for name, grader in GRADERS.items()}


def check_reference(name: str, reference: object, *, version: str | None = None) -> None:
    """Whether `grade` could use this reference, without a reply. Raises UnknownGrader or BadReference."""
    _read(name, reference, version)


async def grade(
    name: str, reference: object, reply: str, *, version: str | None = None, tools: Tools | None = None
) -> Grade:
    """Judge a reply against a reference (text, or a JSON value or its text; each grader's module says which).

    Raises UnknownGrader, BadReference, or GraderFailed where no judgement could be made: then there is no outcome.
    """
    grader, right = _read(name, reference, version)
    value, detail = await grader.judge(right, reply[-REPLY_CHARS_MAX:], tools or Tools())
    return Grade(value, name, grader.version, detail)


def _read(name: str, reference: object, version: str | None) -> tuple[Grader, Any]:
    grader = GRADERS.get(name)
    if grader is None:
        raise UnknownGrader(f"no grader `{name}`; use one of {', '.join(GRADERS)}")
    if version is not None and version != grader.version:
        raise UnknownGrader(f"grader `{name}` is at version {grader.version}, not {version}; name that or none")
    if len(str(reference)) > REFERENCE_CHARS_MAX:
        raise BadReference(f"the reference is over {REFERENCE_CHARS_MAX} characters; shorten it")
    return grader, grader.read(reference)
