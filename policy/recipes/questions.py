"""Where the questions of a recipe's traffic come from: the arena, or recorded answers of real models."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Protocol

from gateway.core.openai.shapes import string_pairs
from policy.environments.arena import ArenaEnvironment, Truth
from policy.environments.base import Prompt, Split
from policy.environments.replay import ReplayEnvironment
from policy.recipes.traffic import GradedQuestion, Question
from policy.simulators.arena.families.tasks import grade

SEEDS_APART = 1_000_000  # between the questions of two kinds of traffic


class QuestionSource(Protocol):
    """Draws questions with the answers that their clients give the grader."""

    def graded(self, split: Split, n: int, kind: int) -> list[GradedQuestion]:
        """`n` questions of the split for one kind of traffic. Raises ValueError where the split has fewer."""
        ...


class Questions:
    """The arena's, drawn so that no two kinds of traffic share one."""

    def __init__(self, environment: ArenaEnvironment, seed: int) -> None:
        self.environment = environment
        self._seed = seed

    def prompts(self, split: Split, n: int, kind: int) -> list[Prompt]:
        """`n` of them; another `kind`, other ones."""
        return self.environment.prompts(split, n, SEEDS_APART * (self._seed + 1) + kind)

    def graded(self, split: Split, n: int, kind: int) -> list[GradedQuestion]:
        """The same, with the answer for the grader."""
        return [_graded_question(prompt) for prompt in self.prompts(split, n, kind)]


def _graded_question(prompt: Prompt) -> GradedQuestion:
    if not isinstance(prompt.truth, Truth):
        raise TypeError(f"{prompt.id} is none of the arena's")
    text = str(prompt.messages[0]["content"])
    return GradedQuestion(Question(prompt.id, text, partial(grade, prompt.truth.task)), prompt.reference)


class RecordedQuestions:
    """Questions of a recording. Two kinds of traffic may share a training question; held-out ones are never trained."""

    def __init__(self, environment: ReplayEnvironment, seed: int) -> None:
        self.environment = environment
        self._seed = seed

    def graded(self, split: Split, n: int, kind: int) -> list[GradedQuestion]:
        """As the protocol says, but fewer where the split has fewer. The recording's own verdict grades what clients
        see; the gateway's grader compares the final answer with the gold one, so questions whose gold answer is too
        long for a request's `metadata` are left out."""
        drawn = self.environment.prompts(split, self.environment.count(split), SEEDS_APART * (self._seed + 1) + kind)
        fitting = (prompt for prompt in drawn if string_pairs({"reference": prompt.reference}) is None)
        return [self._graded(prompt) for prompt in islice(fitting, n)]

    def _graded(self, prompt: Prompt) -> GradedQuestion:
        text = str(prompt.messages[0]["content"])
        return GradedQuestion(Question(prompt.id, text, partial(self.environment.grade, prompt)), prompt.reference)
