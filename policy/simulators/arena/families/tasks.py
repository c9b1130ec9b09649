"""Tasks: drawn from families, written in a phrasing, and read back by the same phrasings.

`understand` is how every simulated worker reads: it gets text, finds what is asked, and knows nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Literal

from gateway.core.loop.replies.answers import extract_answer, normalise
from policy.simulators.arena.families import chains, hard, singles
from policy.simulators.arena.families.family import Family, Shape, Values, squeeze

Split = Literal["train", "held_out"]
Grader = Literal["exact", "number"]

FAMILIES: tuple[Family, ...] = (*singles.FAMILIES, *chains.FAMILIES, *hard.FAMILIES)
SHAPE_SHARES: tuple[tuple[Shape, float], ...] = (
    ("single", 0.42),
    ("chain", 0.28),
    ("vote", 0.13),
    ("check", 0.10),
    ("child", 0.07),
)
JOIN_SKILL = "strings"
ORDINALS = ("first", "second")
INSTRUCTIONS = ("Answer only the first question.", "Answer only the second question.")
CHILD_WORDS_MAX = 70
_CHILD_PHRASINGS = {
    "train": (
        "Answer both questions. First: {a} Second: {b} Reply in the form A; B.",
        "I have two questions. First: {a} Second: {b} Give both answers as A; B.",
    ),
    "held_out": ("Two things are left to do. First: {a} Second: {b} Send me the answers in the form A; B.",),
}
_SELECTOR = re.compile(r"\b(?:(first|1st|one|1)|(second|2nd|two|2))\b", re.IGNORECASE)


@dataclass(frozen=True)
class Problem:
    """What a text asks: one question, or (`parts` not empty) several to be answered as `A; B`."""

    family: Family | None
    values: tuple[tuple[str, str], ...] = ()
    parts: tuple[Problem, ...] = ()

    @property
    def key(self) -> str:
        """The same question in any words has the same key: a worker errs on questions, not on phrasings."""
        if self.family is None:
            return " + ".join(part.key for part in self.parts)
        return f"{self.family.name} {dict(self.values)}"

    @property
    def slots(self) -> Values:
        """Slot values by name."""
        return dict(self.values)

    def answer(self) -> str:
        """The right answer. Raises ValueError or KeyError when the text asks something impossible."""
        if self.family is None:
            return "; ".join(part.answer() for part in self.parts)
        return self.family.answer(self.slots)


@dataclass(frozen=True)
class Task:
    """One generated task with its checkable answer. `skills` are in the order needed; `parts` only for `child`."""

    id: str
    family: str
    text: str
    answer: str
    skills: tuple[str, ...]
    shape: Shape
    grader: Grader
    parts: tuple[Task, ...] = ()


def make_task(seed: int, split: Split = "train") -> Task:
    """The task of that seed: pure, the same on every machine. Held-out tasks use phrasings never seen in training."""
    rng = Random(f"arena {split} {seed}")
    shape = rng.choices([s for s, _ in SHAPE_SHARES], [w for _, w in SHAPE_SHARES])[0]
    task_id = f"arena-{split}-{seed}"
    if shape == "child":
        return _make_child(rng, split, task_id)
    return _make_plain(rng, rng.choice([f for f in FAMILIES if f.shape == shape]), split, task_id)


def _make_plain(rng: Random, family: Family, split: Split, task_id: str) -> Task:
    values = family.draw(rng)
    phrasing = rng.choice(family.train if split == "train" else family.held_out)
    answer = family.answer(values)
    grader: Grader = "number" if family.parts[-1].kind == "number" else "exact"
    return Task(task_id, family.name, phrasing.write(values), answer, family.skills, family.shape, grader)


def _make_child(rng: Random, split: Split, task_id: str) -> Task:
    """Two questions of different kinds, each of two or more steps; half of them need more steps than one plan has."""
    two_step = [f for f in FAMILIES if f.shape == "chain" and len(f.parts) == 2]
    votes = [f for f in FAMILIES if f.shape == "vote"]
    while True:
        first = rng.choice(two_step)
        second = rng.choice(votes if rng.random() < 0.5 else [f for f in two_step if f is not first])
        parts = tuple(
            _make_plain(rng, f, split, f"{task_id}-{i}") for i, f in enumerate(rng.sample([first, second], 2))
        )
        text = rng.choice(_CHILD_PHRASINGS[split]).format(a=parts[0].text, b=parts[1].text)
        if len(text.split()) <= CHILD_WORDS_MAX:
            break
    skills = (*parts[0].skills, *parts[1].skills, JOIN_SKILL)
    answer = "; ".join(part.answer for part in parts)
    return Task(task_id, "both", text, answer, skills, "child", "exact", parts)


@lru_cache(maxsize=8192)
def understand(text: str) -> Problem | None:
    """What the text asks, or None when it is none of the known kinds of question."""
    flat = squeeze(text)
    hits: list[tuple[int, int, Problem]] = []
    for family in FAMILIES:
        for phrasing in (*family.train, *family.held_out):
            for hit in phrasing.regex.finditer(flat):
                hits.append((hit.start(), hit.end(), Problem(family, tuple(sorted(hit.groupdict().items())))))
    hits.sort(key=lambda hit: (hit[0], -hit[1]))
    problems: list[Problem] = []
    end = -1
    for start, stop, problem in hits:
        if start >= end:
            problems.append(problem)
            end = stop
    if len(problems) > 1:
        return Problem(None, parts=tuple(problems[: len(ORDINALS)]))
    return problems[0] if problems else None


def focus(question: str, task: str | None) -> Problem | None:
    """What a step is to work on: the task text if it asks something by itself; else the question, narrowed to the part
    that the task text names (`Answer only the first question.`)."""
    own = understand(task) if task else None
    if own is not None:
        return own
    problem = understand(question)
    match = _SELECTOR.search(task) if task else None
    if problem is None or not problem.parts or match is None:
        return problem
    return problem.parts[0 if match[1] else 1]


def ordinal(task: str | None) -> int | None:
    """Which question (0 or 1) a task text names, if any."""
    match = _SELECTOR.search(task) if task else None
    return None if match is None else (0 if match[1] else 1)


def grade(task: Task, reply: str) -> float:
    """1.0 when the reply's final answer is right, else 0.0. Letter case and spacing do not matter."""
    return float(normalise(extract_answer(reply)) == normalise(task.answer))
