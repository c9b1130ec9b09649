"""Credit: what one judgement of a rollout says about each of its steps. Pure.

A step whose reply went into the answer shares the judgement of the answer. A step that tried the same question
independently (a voter, or an attempt that was not used) is compared with the answer. If it gave the same answer, it
shares the judgement. If it gave another one, it was wrong where the answer was right; where the answer was wrong,
nothing is known about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.core.loop.digest import extract_answer, normalise

RIGHT_MIN = 0.5  # a judgement above this means that the answer was right


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """One step that has finished. `reply` is empty if the log keeps no text. `alone`: the step got the conversation
    unchanged."""

    index: int
    kind: str
    see: Sequence[int]
    reply: str
    alone: bool


def credits(steps: Sequence[FinishedStep], value: float) -> dict[int, float]:
    """Map step indices to credit in [0, 1], given a judgement `value` in [0, 1] of the last step's reply.

    Steps about which the judgement says nothing are left out. Without texts, every step shares the judgement.
    """
    if not steps or not steps[-1].reply:
        return {step.index: value for step in steps}
    by_index = {step.index: step for step in steps}
    answer = normalise(extract_answer(steps[-1].reply))
    used = _used(steps[-1], by_index)
    credit_of = {}
    for step in steps:
        if step.index in used or (step.reply and normalise(extract_answer(step.reply)) == answer):
            credit_of[step.index] = value
        elif step.alone and step.reply and value > RIGHT_MIN:
            credit_of[step.index] = 0.0
    return credit_of


def _used(last: FinishedStep, by_index: Mapping[int, FinishedStep]) -> set[int]:
    """The indices of the steps that the answer was made from: the last step, the steps that it saw, and so on. The
    replies that a vote chose from are not among them."""
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


def _is_vote(step: FinishedStep, by_index: Mapping[int, FinishedStep]) -> bool:
    """Whether the step is a tool that returned one of the replies it saw, word for word."""
    return step.kind == "tool" and any(by_index[seen].reply == step.reply for seen in step.see if seen in by_index)
