"""Families: what a kind of task needs, how it is worded, and what is right. Plus the words they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from random import Random
from typing import Literal

from policy.simulators.arena.families.phrasing import Phrasing, Values, split_words

Shape = Literal["single", "chain", "vote", "check", "child"]
Kind = Literal["number", "word", "good", "weekday", "list", "words", "date", "record", "order"]

SKILLS = ("arithmetic", "units", "dates", "tables", "strings", "lists", "logic", "format", "review")

NAMES = split_words("Ann Ben Cara Dan Eva Finn Gina Hugo Ida Jon Kim Leo Mia Nora Omar Pia")
SURNAMES = split_words("Stone Reed Marsh Wood Field Lake Hill Brook")
THINGS = split_words("apples jars books pens cups nails stamps seeds")
GOODS = split_words("pear plum fig corn rice salt tea milk oats beans soap wool")
WORDS = split_words(
    "garden silver market planet winter basket copper engine forest hammer island jacket kettle ladder magnet needle "
    "orange pencil rocket saddle ticket velvet window yellow"
)
UNITS = (
    ("metres", "centimetres", 100),
    ("kilometres", "metres", 1000),
    ("kilograms", "grams", 1000),
    ("litres", "millilitres", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("weeks", "days", 7),
    ("feet", "inches", 12),
)


@dataclass(frozen=True)
class Part:
    """One piece of work: the skill it takes and the program that does it from the slots and the result before."""

    skill: str
    kind: Kind
    solve: Callable[[Values, str], str]


@dataclass(frozen=True)
class Family:
    """One kind of task. `draw` gives slot values; `parts` run in order, each fed the result of the one before."""

    name: str
    shape: Shape
    draw: Callable[[Random], dict[str, str]]
    parts: tuple[Part, ...]
    train: tuple[Phrasing, ...]
    held_out: tuple[Phrasing, ...]

    @property
    def skills(self) -> tuple[str, ...]:
        """Skills needed, in order. A `check` family also takes a reviewer of the draft."""
        own = tuple(part.skill for part in self.parts)
        return (*own, "review") if self.shape == "check" else own

    def answer(self, values: Values) -> str:
        """The right answer. Raises ValueError or KeyError on values that make no sense."""
        result = ""
        for part in self.parts:
            result = part.solve(values, result)
        return result


def phrasings(*patterns: str) -> tuple[Phrasing, ...]:
    """Patterns as phrasings."""
    return tuple(Phrasing(pattern) for pattern in patterns)


def as_date(text: str) -> date:
    """`3 May 2024` → a date. Raises ValueError."""
    return datetime.strptime(text, "%d %B %Y").date()


def spoken(day: date) -> str:
    """A date → `3 May 2024`."""
    return f"{day.day} {day:%B %Y}"


def draw_date(rng: Random) -> date:
    """A day of 2021 to 2026."""
    return date(2021, 1, 1) + timedelta(days=rng.randrange(6 * 365))


def draw_rows(rng: Random, low: int, high: int, columns: int = 1, n: int = 5) -> str:
    """A table of `n` goods, all figures different: `pear: 7; plum: 12` or `pear: 7, 40; plum: 12, 33`."""
    figures = rng.sample(range(low, high), n * columns)
    goods = rng.sample(GOODS, n)
    return "; ".join(f"{good}: {', '.join(map(str, figures[i::n]))}" for i, good in enumerate(goods))


def rows(text: str) -> dict[str, list[str]]:
    """The table of `draw_rows`, read back: good → its figures."""
    pairs = (row.split(": ", 1) for row in text.split("; "))
    return {name: cells.split(", ") for name, cells in pairs}


def numbers(text: str) -> list[int]:
    """`9, 7, 5` → [9, 7, 5]. Raises ValueError."""
    return [int(item) for item in text.split(", ")]


def factor(big: str, small: str) -> int:
    """How many `small` make one `big`. Raises ValueError on a pair that is not in the list."""
    for name, part, count in UNITS:
        if (name, part) == (big, small):
            return count
    raise ValueError(f"no conversion from {big} to {small}")
