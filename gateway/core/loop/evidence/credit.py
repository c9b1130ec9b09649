"""Credit: what the judgements of a rollout say about each of its steps. Pure.

A step whose reply went into the answer shares the judgement of the answer. A step that tried the same question
independently (a voter, or an attempt that was not used) is compared with the answer. If it gave the same answer, it
shares the judgement. If it gave another one, it was wrong where the answer was right; where the answer was wrong,
nothing is known about it. Where nothing says whether two replies agree, the step gets no credit.

A judgement of a step itself counts for more than one of the rollout, and for whatever went into that step alone. Of
equally direct judgements the most trusted source's counts (evidence/sources.py), and then the latest. A step on `self`
passes its credit on to the child loop, as the judgement of that loop's answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.core.loop.evidence.sources import WEIGHT_MIN, SourceWeights, is_explicit, trust_of
from gateway.core.loop.replies.agreement import NO_VERDICTS, Verdicts, agreement_of
from gateway.core.loop.replies.judging import pair_verdict
from gateway.core.loop.replies.kinds import Reply

CREDIT_VERSION = 2  # of these rules; count it up with each change, and what was credited before is credited again
RIGHT_MIN = 0.5  # a judgement above this means that the answer was right


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """One step that has finished. `reply`: empty if the log keeps no text. `alone`: the step got the conversation
    unchanged. `child`: the rollout that a step on `self` ran as. `checks`: it is a verify step."""

    index: int
    kind: str
    see: Sequence[int]
    reply: Reply
    alone: bool
    child: str | None = None
    checks: bool = False


class Evidence(NamedTuple):
    """One judgement in [0, 1] of a rollout (`step` None) or of one of its steps. `at`: microseconds since the epoch.
    `distance`: the loops between the rollout that was judged and this one, 0 for its own. `weights`: what the
    verdicts of its source weigh."""

    value: float
    at: int
    source: str = "client"
    step: int | None = None
    distance: int = 0
    weights: SourceWeights = SourceWeights()

    @property
    def weight(self) -> float:
        """What it weighs, 0 to 1."""
        return self.weights.of(self.value)

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """The order of evidence, what counts most last: of a step, of this loop, by the most trusted source, the
        latest. A judge or a signal that weighs nothing yields to any that does."""
        is_heard = is_explicit(self.source) or max(self.weights) >= WEIGHT_MIN
        return (self.step is not None, -self.distance, trust_of(self.source) if is_heard else -1, self.at)


def credits(steps: Sequence[FinishedStep], value: float, verdicts: Verdicts = NO_VERDICTS) -> dict[int, float]:
    """Map step indices to credit in [0, 1], given a judgement `value` in [0, 1] of the last step's reply.

    Steps about which the judgement says nothing are left out. `verdicts`: what is known of pairs of replies beyond
    their texts, by the steps' indices.
    """
    if not steps:
        return {}
    by_index = {step.index: step for step in steps}
    last = steps[-1]
    used = _used(last, by_index)
    credit_of = {}
    for step in steps:
        if step.index in used:
            credit_of[step.index] = value
        elif step.reply.kind != "empty" and last.reply.kind != "empty":
            verdict = agreement_of(step.reply, last.reply, (step.index, last.index), verdicts)
            if verdict == "same":
                credit_of[step.index] = value
            elif verdict == "different" and step.alone and value > RIGHT_MIN:
                credit_of[step.index] = 0.0
    return credit_of


def credited(
    steps: Sequence[FinishedStep], evidence: Iterable[Evidence], verdicts: Verdicts = NO_VERDICTS
) -> dict[int, Evidence]:
    """Map step indices to the most direct evidence about each, its `value` the step's credit. Steps of which nothing is
    known are left out. Of several judgements of the rollout, or of one step, the weightiest counts alone."""
    weightiest = {each.step: each for each in sorted(evidence, key=lambda one: one.rank)}
    best: dict[int, Evidence] = {}
    for each in sorted(weightiest.values(), key=lambda one: one.rank):
        for index, value in credits(_up_to(steps, each.step), each.value, verdicts).items():
            if index == each.step or index not in weightiest:
                best[index] = each._replace(value=value)
    return best


@dataclass(frozen=True, slots=True)
class JudgedLoop:
    """One loop of a request: its finished steps in order, and the judgements of the loop itself."""

    steps: Sequence[FinishedStep]
    judged: Sequence[Evidence]

    @property
    def verdicts(self) -> Verdicts:
        """What steps of a judge said of pairs of replies."""
        tools = (step for step in self.steps if step.kind == "tool")
        return dict(verdict for step in tools if (verdict := pair_verdict(step.reply.text, step.see)) is not None)


def credited_tree(loops: Mapping[str, JudgedLoop], root: str) -> dict[str, dict[int, Evidence]]:
    """`credited` for each loop of a request, by rollout id. A loop that gets no credit from above has its own
    judgements alone."""
    evidence: dict[str, dict[int, Evidence]] = {}
    waiting: list[tuple[str, list[Evidence]]] = [*((each, []) for each in sorted(loops, reverse=True)), (root, [])]
    while waiting:
        here, inherited = waiting.pop()
        if here in evidence or here not in loops:
            continue
        loop = loops[here]
        evidence[here] = credited(loop.steps, [*loop.judged, *inherited], loop.verdicts)
        for step in loop.steps:
            if step.child and (passed := evidence[here].get(step.index)):
                waiting.append((step.child, [passed._replace(step=None, distance=passed.distance + 1)]))
    return evidence


def _up_to(steps: Sequence[FinishedStep], index: int | None) -> Sequence[FinishedStep]:
    """The steps that a judgement of step `index` speaks of: those that went into it. For a judgement of
    the rollout all that answer: what a checker says is no answer that another step's could differ from."""
    if index is None:
        return [step for step in steps if not step.checks]
    by_index = {step.index: step for step in steps}
    if index not in by_index:
        return ()
    used = _used(by_index[index], by_index)
    return [step for step in steps if step.index in used]


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
    return step.kind == "tool" and any(by_index[i].reply.text == step.reply.text for i in step.see if i in by_index)
