"""The verdict that stands on a step: what its contract, or its checker, came to in the end. Pure.

A step's attempts hold every verdict in order (`AttemptRecord.verdict`): a contract may be missed, repaired and judged
several times. The last one stands. The digest, the training reward and the exports read it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.loop.replies.errors import CONTRACT, VERIFY

_CONTRACT_WORDS = {True: "kept", False: "missed", None: "unchecked"}
_VERIFY_WORDS = {True: "accepted", False: "rejected", None: "unchecked"}


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The verdict that stands on a step of a rollout. Of a contract it is on the step's own reply; of a verify step, on
    its candidate."""

    rollout_id: str
    round: int
    step: int
    by: str  # contract | verify
    accept: bool | None  # None: nobody could tell
    repaired: bool = False  # of a contract that is not missed: an earlier reply to the step missed it
    checker: str | None = None  # the worker that gave it; None: code alone, or nobody was asked

    @property
    def word(self) -> str:
        """`kept`, `repaired`, `missed` or `unchecked` of a contract; `accepted`, `rejected` or `unchecked` of a verify
        step. A rejection without a checker is `unchecked`: there was no candidate to ask about."""
        if self.by == VERIFY:
            return _VERIFY_WORDS[self.accept if self.checker or self.accept is not False else None]
        return "repaired" if self.accept and self.repaired else _CONTRACT_WORDS[self.accept]


def checked_flags(
    flags: Sequence[str], status: str, verdict: StepVerdict | None, following: StepVerdict | None
) -> tuple[str, ...]:
    """The flags of a digest with what was checked of its reply: the verdict on the step, and on the one after it, whose
    candidate it may be."""
    if status == "skipped":
        return ("skipped",)
    words = [verdict.word] if verdict is not None and verdict.by == CONTRACT else []
    if following is not None and following.by == VERIFY:
        words.append(_VERIFY_WORDS[following.accept])
    return (*flags, *words)


def step_verdict(
    rollout_id: str, round_number: int, step: int, worker: str, attempts: Sequence[Mapping[str, Any]]
) -> StepVerdict | None:
    """The verdict that stands on a step by its attempts as JSON data; None where nothing was checked, or two replies
    were only compared. `worker`: the one that the step is of at its end."""
    places = [place for place, each in enumerate(attempts) if each.get("verdict")]
    if not places:
        return None
    verdicts = [attempts[place]["verdict"] for place in places]
    last, at = verdicts[-1], attempts[places[-1]]
    accept = last.get("accept")
    if last.get("pairwise"):
        return None
    if last.get("by") == VERIFY:
        asked = at.get("dispatched", True)
        return StepVerdict(rollout_id, round_number, step, VERIFY, accept, checker=worker if asked else None)
    own = max((place for place, each in enumerate(attempts) if not each.get("worker")), default=len(attempts))
    repaired = accept is not False and any(each.get("accept") is False for each in verdicts[:-1])
    checker = at.get("worker") if places[-1] > own else None  # attempts of the step itself name no worker
    return StepVerdict(rollout_id, round_number, step, str(last.get("by")), accept, repaired, checker)
