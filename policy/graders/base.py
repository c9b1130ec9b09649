"""What graders share: the grade, the errors, and the tools some of them need.

GraderError            one line that says what to do
├── UnknownGrader      no grader of that name, or not at that version
├── BadReference       the reference cannot be graded against
└── GraderFailed       no grade could be made, through no fault of the reply: record no outcome, never a 0
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.service.ports.request import CodeLimits

REPLY_CHARS_MAX = 262_144  # read from the end of a reply, where answers stand
REFERENCE_CHARS_MAX = 262_144
DETAIL_CHARS_MAX = 300

Ask = Callable[[list[dict[str, str]]], Awaitable[str]]  # chat messages in, the judge's reply out


class GraderError(ValueError):
    """Base of the tree."""


class UnknownGrader(GraderError):
    """No such grader, or not at the version asked for."""


class BadReference(GraderError):
    """A reference that cannot be graded against; the message says what it should be."""


class GraderFailed(GraderError):
    """The grader could not do its work. The reply is neither right nor wrong."""


@dataclass(frozen=True, slots=True)
class Grade:
    """A judgement: value in [0, 1], who made it, and why, for a person."""

    value: float
    grader: str
    version: str
    detail: str


@dataclass(frozen=True, slots=True)
class Tools:
    """What a grader may use. `weak_ok` lets code run where the kernel cannot cut it off from the network."""

    ask: Ask | None = None
    limits: CodeLimits = field(default_factory=CodeLimits)
    weak_ok: bool = False


Judged = tuple[float, str]  # value, detail


def object_in(reference: object) -> Mapping[str, Any] | None:
    """A reference that is an object or the JSON text of one (metadata values are text), None where it is neither."""
    if isinstance(reference, str) and reference.lstrip().startswith("{"):
        try:
            reference = json.loads(reference)
        except (ValueError, RecursionError):
            return None
    return reference if isinstance(reference, Mapping) else None


def fields(reference: object, keys: Sequence[str], wanted: str) -> Mapping[str, Any]:
    """The fields of a reference; one that is no object stands for the first of `keys`. Raises BadReference naming what
    is `wanted` where it holds a key not in `keys`."""
    values = object_in(reference)
    if values is None:
        return {keys[0]: reference}
    unknown = sorted(str(key) for key in values if key not in keys)
    if unknown:
        raise BadReference(f"the reference has an unknown key `{unknown[0]}`; give {wanted}")
    return values


def shorten(text: str) -> str:
    """One line of at most DETAIL_CHARS_MAX characters."""
    line = " ".join(text.split())
    return line if len(line) <= DETAIL_CHARS_MAX else line[: DETAIL_CHARS_MAX - 1] + "…"
