"""The text of a plan: JSON out of what a model writes, whole or while it is still being written. Pure.

Nothing is guessed: a think block, a fence and prose around the object are removed, and what is left is strict JSON
without a key twice. `plan.py` says whether it is a plan.
"""

from __future__ import annotations

import json
import re
from typing import Any

from gateway.errors import PlanRefused

PLAN_BYTES_MAX = 65_536
OBJECTS_TRIED_MAX = 64  # opening braces at which a plan is looked for in prose
_THINK = re.compile(r"^\s*<think>.*?</think>", re.DOTALL)
_THINK_ANYWHERE = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)  # one that never ends is all thought
_BEGINS = re.compile(r"\s*(?:```(?:json)?[^\S\n]*\n\s*)?\{")
_IN_STRING = re.compile(r'"|\\.', re.DOTALL)  # the end of a string, or what a backslash escapes in it
_OUTSIDE = re.compile(r'["{}\[\]]')
_FENCE = re.compile(r"^\s*```(?:json)?[^\S\n]*\n(.*?)\n?```\s*$", re.DOTALL)


def loads(raw: str | bytes) -> object:
    """Parse plan text. Removes one leading think block and one fence around everything, and nothing else. Raises
    PlanRefused(too_large | not_json | duplicate_key)."""
    if len(raw) > PLAN_BYTES_MAX:
        raise PlanRefused("too_large", f"the plan is over {PLAN_BYTES_MAX} bytes")
    try:
        text = raw.decode() if isinstance(raw, bytes) else raw
        text = _THINK.sub("", text, count=1)
        fence = _FENCE.match(text)
        return json.loads(
            fence.group(1) if fence else text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except PlanRefused:
        raise
    except (ValueError, RecursionError):
        raise PlanRefused("not_json", "the plan is not JSON") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise PlanRefused("duplicate_key", "the plan has the same key twice")
    return value


def _no_constant(name: str) -> object:
    raise PlanRefused("not_json", f"{name} is not JSON")


def object_within(text: str) -> object:
    """The last JSON object with `steps` in a text, thoughts apart; the first where the text begins with it, since steps
    of that one may have started. Raises PlanRefused(not_json | duplicate_key)."""
    text = _THINK_ANYWHERE.sub("", text)
    plan = None
    begins = _BEGINS.match(text) is not None
    decoder = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    at = text.find("{")
    for _ in range(OBJECTS_TRIED_MAX):
        if at < 0:
            break
        try:
            value, end = decoder.raw_decode(text, at)
        except PlanRefused as refusal:
            if refusal.reason == "duplicate_key":
                raise
            value, end = None, at + 1
        except (ValueError, RecursionError):
            value, end = None, at + 1
        if isinstance(value, dict) and "steps" in value:
            plan = value
            if begins:
                break
        at = text.find("{", end)
    if plan is None:
        raise PlanRefused("not_json", "the text holds no plan")
    return plan


class PlanReader:
    """Finds complete step objects in plan text as it grows. Feed it deltas; it returns raw steps in order.

    It only detects where an object ends. `validate_step` decides whether a step may run, and the finished text still
    goes through `validate`.
    """

    # What `validate` removes, then the head of the object. Possessive: a match never looks past the first `</think>`.
    _OPEN = re.compile(
        r"(?>(?:\s*<think>.*?</think>)?)\s*+(?:```(?:json)?[^\S\n]*+\n\s*+)?+\{\s*+"
        r'(?:"why"\s*+:\s*+"(?:[^"\\]|\\.){0,2000}+"\s*+,\s*+)?+"steps"\s*+:\s*+\[',
        re.DOTALL,
    )

    def __init__(self) -> None:
        self.text = ""
        self._at = -1  # scan position inside the array; -1: the array has not begun
        self._start = -1  # start of the current object
        self._depth = 0
        self._in_string = False
        self._closed = False
        self.opened = 0  # number of step objects that have begun; a step that another one follows is not the last

    def feed(self, delta: str) -> list[object]:
        """Return the step objects that `delta` completes. Raises PlanRefused(too_large | not_json | duplicate_key)."""
        self.text += delta
        if len(self.text) > PLAN_BYTES_MAX:
            raise PlanRefused("too_large", f"the plan is over {PLAN_BYTES_MAX} bytes")
        if self._at < 0:
            opening = self._OPEN.match(self.text) if "[" in delta else None
            if opening is None:
                return []
            self._at = opening.end()
        steps: list[object] = []
        while not self._closed:
            mark = (_IN_STRING if self._in_string else _OUTSIDE).search(self.text, self._at)
            if mark is None:  # a backslash at the end waits for what it escapes
                self._at = len(self.text) - (self._in_string and self.text.endswith("\\", self._at))
                break
            self._at = mark.end()
            self._scan(mark[0], steps)
        return steps

    def _scan(self, mark: str, steps: list[object]) -> None:
        if self._in_string:
            self._in_string = mark != '"'
        elif mark == '"':
            self._in_string = True
        elif mark in "{[":
            if self._depth == 0:
                self._start = self._at - 1
                self.opened += 1
            self._depth += 1
        elif self._depth == 0:
            self._closed = True
        else:
            self._depth -= 1
            if self._depth == 0:
                steps.append(loads(self.text[self._start : self._at]))
