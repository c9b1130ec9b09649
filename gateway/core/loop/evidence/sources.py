"""Sources of outcomes: who says that a reply was right, in which order they count, and how far each is believed. Pure.

Of several judgements of one reply the most trusted source's counts alone: a person's, a client's, a label, one of a
verifier or of a judge, and last a signal. What it weighs as evidence is learnt. On replies that a more trusted source
judged too, the source has a sensitivity (it accepts what is right) and a specificity (it rejects what is wrong), each
the mean of a Beta posterior whose prior is the source's own. Its weight is Youden's index (1950), the informedness of
Powers (2011):

    weight = max(0, sensitivity + specificity - 1) = max(0, 2 * balanced accuracy - 1)

It is 1 for a source that never errs and 0 for a coin, and for a source that says `right` of everything, however often
that agrees. Where both errors are equally likely it equals (LR - 1) / (LR + 1) of the likelihood ratio of a verdict. A
reference that errs itself counts by its own weight; what is left of its errors makes a source look worse, never better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gateway.core.loop.evidence.calibration import Calibration

PERSON, CLIENT, GRADER, LABEL, VERIFIER = "person", "client", "grader", "label", "verifier"
JUDGE, SIGNAL = "judge:", "signal:"  # beginnings of the sources that are the gateway's own
REPEAT, EDIT, REJECT, TEST = "signal:repeat", "signal:edit", "signal:reject", "signal:test"
WEIGHT_MIN = 0.05  # of a judge or a signal, below which it is not heard
_LEAST_FIRST = (REPEAT, EDIT, REJECT, TEST, JUDGE, VERIFIER, LABEL, CLIENT, PERSON)


class Prior(NamedTuple):
    """What a source is believed before anything is measured: the means of sensitivity and specificity, which are equal,
    and the replies of each kind that this belief is worth."""

    accuracy: float
    replies: float


PRIORS: Mapping[str, Prior] = {
    PERSON: Prior(1.0, 1.0),  # nobody is above, so nothing moves it
    CLIENT: Prior(1.0, 20.0),  # and any other name: believed until somebody contradicts it
    LABEL: Prior(0.95, 10.0),
    VERIFIER: Prior(0.9, 10.0),
    JUDGE: Prior(0.8, 6.0),
    TEST: Prior(0.7, 6.0),
    REJECT: Prior(0.75, 6.0),
    EDIT: Prior(0.65, 6.0),
    REPEAT: Prior(0.6, 6.0),
}


def kind_of(source: str) -> str:
    """The family of a source: itself if it has a place of its own, `judge:` for every judge, the least for a signal of
    another release, else `client`, for a name that a client chose is a client's judgement."""
    if source.startswith(JUDGE):
        return JUDGE
    if source in _LEAST_FIRST:
        return source
    return REPEAT if source.startswith(SIGNAL) else CLIENT


def trust_of(source: str) -> int:
    """The place of a source in the order in which sources count, the most trusted one's the highest."""
    return _LEAST_FIRST.index(kind_of(source))


def is_explicit(source: str) -> bool:
    """Whether somebody posted the outcome. Judges and signals are the gateway's own."""
    return not source.startswith((JUDGE, SIGNAL))


class Said(NamedTuple):
    """What sources said of one reply, in [0, 1] by source; `n` replies of which the same was said."""

    values: Mapping[str, float]
    n: int = 1


@dataclass(frozen=True, slots=True)
class Reliability:
    """How far a source is believed. `seen`: its judgements beside those of more trusted sources; `judge` names it."""

    seen: Calibration

    @property
    def source(self) -> str:
        """Its name."""
        return self.seen.judge

    @property
    def sensitivity(self) -> float:
        """The posterior mean of the chance that it accepts a right reply."""
        accuracy, replies = self._prior
        return (accuracy * replies + self.seen.right_accepted) / (replies + self.seen.right)

    @property
    def specificity(self) -> float:
        """The posterior mean of the chance that it rejects a wrong reply."""
        accuracy, replies = self._prior
        return (accuracy * replies + self.seen.wrong_rejected) / (replies + self.seen.wrong)

    @property
    def weight(self) -> float:
        """What one of its judgements weighs as evidence, 0 to 1."""
        return max(0.0, self.sensitivity + self.specificity - 1)

    @property
    def _prior(self) -> Prior:
        return PRIORS[kind_of(self.source)]

    def as_json(self) -> dict[str, Any]:
        """The figures, for programs and for people. `agreement`: null where nobody else judged the same replies."""
        agreement = round(self.seen.agreement, 3) if self.seen.n else None
        measured = {name: round(getattr(self, name), 3) for name in ("sensitivity", "specificity", "weight")}
        return {"source": self.source, "n": round(self.seen.n), "agreement": agreement, **measured}


def reliabilities(replies: Iterable[Said]) -> dict[str, Reliability]:
    """The reliability of each source by name, from replies that several sources judged. Each source is compared with
    the most trusted one above it, a reply for as much as that one weighs; a judgement between 0 and 1 counts on both
    sides by its share."""
    judged = list(replies)
    known: dict[str, Reliability] = {}
    for source in sorted({name for said in judged for name in said.values}, key=lambda one: (-trust_of(one), one)):
        cells = dict.fromkeys(("right_accepted", "right_rejected", "wrong_accepted", "wrong_rejected"), 0.0)
        for values, n in (said for said in judged if source in said.values):
            reference = _reference(values, source)
            if reference is None:
                continue
            weight, right, accepted = n * known[reference].weight, values[reference], values[source]
            cells["right_accepted"] += weight * right * accepted
            cells["right_rejected"] += weight * right * (1 - accepted)
            cells["wrong_accepted"] += weight * (1 - right) * accepted
            cells["wrong_rejected"] += weight * (1 - right) * (1 - accepted)
        known[source] = Reliability(Calibration(source, **cells))
    return known


def _reference(values: Mapping[str, float], source: str) -> str | None:
    """The most trusted source that said something of the reply and is above this one."""
    above = [other for other in values if trust_of(other) > trust_of(source)]
    return max(above, key=lambda one: (trust_of(one), one), default=None)


def prior_weight(source: str) -> float:
    """What a judgement of a source weighs before anything is measured."""
    return Reliability(Calibration(source)).weight
