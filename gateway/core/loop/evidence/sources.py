"""Sources of outcomes: who says that a reply was right, in which order they count, and how far each is believed. Pure.

Of several judgements of one reply the most trusted source's counts alone: a person's, a client's, a label, one of a
verifier or of a judge, and last a signal. What it weighs as evidence is learnt. On replies that a more trusted source
judged too, the source has a sensitivity (it accepts what is right) and a specificity (it rejects what is wrong), each
the mean of a Beta posterior whose prior is the source's own. A verdict weighs by its predictive value where right and
wrong replies are equally likely (Altman & Bland 1994), from 0 for one half to 1 for certainty:

    weight = max(0, 2 * P(the verdict is true) - 1) = max(0, (LR - 1) / (LR + 1))

with the likelihood ratio LR = sensitivity / (1 - specificity) of `right`, and specificity / (1 - sensitivity) of
`wrong`. Where both errors are equally likely this is 2 * balanced accuracy - 1. It is 1 for a source that never errs
and 0 for a coin, and for a source that says `right` of everything, however often that agrees. What a source says
nearly always says little, and what it says rarely, and of wrong replies alone, says much: so silence that counts as
`right` does not drown what a signal noticed. A reference that errs itself counts by its own weight; what is left of its
errors makes a source look worse, never better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gateway.core.loop.evidence.calibration import Calibration

PERSON, CLIENT, GRADER, LABEL, VERIFIER = "person", "client", "grader", "label", "verifier"
JUDGE, SIGNAL = "judge:", "signal:"  # beginnings of the sources that are the gateway's own
REPEAT, EDIT, TEST = "signal:repeat", "signal:edit", "signal:test"
WEIGHT_MIN = 0.05  # of a judge or a signal, below which it is not heard
_LEAST_FIRST = (REPEAT, EDIT, TEST, JUDGE, VERIFIER, LABEL, CLIENT, PERSON)


class Prior(NamedTuple):
    """What a source is believed before anything is measured: its sensitivity and specificity, and the replies of each
    kind that this belief is worth."""

    sensitivity: float
    specificity: float
    replies: float


PRIORS: Mapping[str, Prior] = {
    PERSON: Prior(1.0, 1.0, 1.0),  # nobody is above, so nothing moves it
    CLIENT: Prior(1.0, 1.0, 20.0),  # and any other name: believed until somebody contradicts it
    LABEL: Prior(0.95, 0.95, 10.0),
    VERIFIER: Prior(0.9, 0.9, 10.0),
    JUDGE: Prior(0.85, 0.8, 8.0),
    TEST: Prior(0.8, 0.6, 8.0),
    EDIT: Prior(0.95, 0.2, 8.0),
    REPEAT: Prior(0.9, 0.3, 8.0),
}


class SourceWeights(NamedTuple):
    """What a source's verdicts weigh as evidence, each from 0 to 1: `right`, and `wrong`."""

    right: float = 1.0
    wrong: float = 1.0

    def of(self, value: float) -> float:
        """The weight of a judgement in [0, 1]: one between the verdicts weighs in between."""
        return value * self.right + (1 - value) * self.wrong


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
        prior = self._prior
        return (prior.sensitivity * prior.replies + self.seen.right_accepted) / (prior.replies + self.seen.right)

    @property
    def specificity(self) -> float:
        """The posterior mean of the chance that it rejects a wrong reply."""
        prior = self._prior
        return (prior.specificity * prior.replies + self.seen.wrong_rejected) / (prior.replies + self.seen.wrong)

    @property
    def weights(self) -> SourceWeights:
        """What its verdicts weigh."""
        truly, falsely = self.sensitivity, 1 - self.specificity
        return SourceWeights(_weight(truly, falsely), _weight(1 - falsely, 1 - truly))

    @property
    def _prior(self) -> Prior:
        return PRIORS[kind_of(self.source)]

    def as_json(self) -> dict[str, Any]:
        """The figures, for programs and for people. `agreement`: null where nobody else judged the same replies."""
        agreement = round(self.seen.agreement, 3) if self.seen.n else None
        figures = {"sensitivity": self.sensitivity, "specificity": self.specificity}
        figures |= {"weight_right": self.weights.right, "weight_wrong": self.weights.wrong}
        rounded = {name: round(figure, 3) for name, figure in figures.items()}
        return {"source": self.source, "n": round(self.seen.n), "agreement": agreement, **rounded}


def _weight(truly: float, falsely: float) -> float:
    """The weight of a verdict that is given with these chances where it is true, and where it is false."""
    return max(0.0, (truly - falsely) / (truly + falsely)) if truly > 0 else 0.0


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
            right, accepted = values[reference], values[source]
            weight = n * known[reference].weights.of(right)
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


def prior_weights(source: str) -> SourceWeights:
    """What the verdicts of a source weigh before anything is measured."""
    return Reliability(Calibration(source)).weights
