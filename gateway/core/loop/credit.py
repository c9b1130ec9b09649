"""Credit: what one judgement of a rollout says of each of its steps. Pure.

A step whose reply went into the answer shares its judgement. A step that tried the same question by itself, a voter or
an attempt that was passed over, is judged by whether it gave the answer that was judged: alike, it shares the
judgement; unlike, it was wrong where the answer was right, and nothing is known of it where the answer was wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.core.loop.digest import extract_answer, normalise

RIGHT_MIN = 0.5  # a judgement above it says that the answer was right


@dataclass(frozen=True, slots=True)
class Tried:
    """One finished step. `reply` is empty where the log keeps no text; `alone`: it was sent the conversation as is."""

    index: int
    kind: str
    see: Sequence[int]
    reply: str
    alone: bool


def credits(steps: Sequence[Tried], value: float) -> dict[int, float]:
    """Step index → credit in [0, 1] after a judgement `value` of the last step's reply. Steps of which it says nothing
    are left out. Without the texts every step shares the judgement."""
    if not steps or not steps[-1].reply:
        return {step.index: value for step in steps}
    by_index = {step.index: step for step in steps}
    answer = normalise(extract_answer(steps[-1].reply))
    used = _used(steps[-1], by_index)
    found = {}
    for step in steps:
        if step.index in used or (step.reply and normalise(extract_answer(step.reply)) == answer):
            found[step.index] = value
        elif step.alone and step.reply and value > RIGHT_MIN:
            found[step.index] = 0.0
    return found


def _used(last: Tried, by_index: Mapping[int, Tried]) -> set[int]:
    """What the answer was made from: the last step, and what it saw, and what that saw; but not what was voted on."""
    used: set[int] = set()
    waiting = [last.index]
    while waiting:
        index = waiting.pop()
        if index in used or index not in by_index:
            continue
        used.add(index)
        if not _is_vote(by_index[index], by_index):
            waiting += by_index[index].see
    return used


def _is_vote(step: Tried, by_index: Mapping[int, Tried]) -> bool:
    """Whether it is a tool that passed on one of the replies it saw, word for word."""
    return step.kind == "tool" and any(by_index[seen].reply == step.reply for seen in step.see if seen in by_index)
