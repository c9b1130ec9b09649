"""Families: what a kind of task needs, how it is worded, and what is right. Plus the words they share.

A phrasing is one sentence pattern with slots, used both ways: to write a task and to read one back. A slot `{name}`
takes the pattern of its name without trailing digits (`{n1}` is a whole number), so that every phrasing of a family
fills the same slots and a worker gets the values back as text whatever the words around them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import cached_property
from random import Random
from typing import Literal

Values = Mapping[str, str]

SLOTS: Mapping[str, str] = {
    "n": r"\d+",
    "who": r"[A-Z][a-z]+",
    "thing": r"[a-z]+",
    "unit": r"[a-z]+",
    "word": r"[a-z]+",
    "letter": r"[a-z]",
    "date": r"\d{1,2} [A-Z][a-z]+ \d{4}",
    "nums": r"\d+(?:, \d+)+",
    "words": r"[a-z]+(?:, [a-z]+)+",
    "names": r"[A-Z][a-z]+(?:, [A-Z][a-z]+)+",
    "facts": r"[A-Z][a-z]+ (?:beat|lost to) [A-Z][a-z]+(?:, [A-Z][a-z]+ (?:beat|lost to) [A-Z][a-z]+)+",
    "rows": r"[a-z]+: [^;.:]+(?:; [a-z]+: [^;.:]+)+",
}
_SLOT = re.compile(r"\{([a-z]+)(\d*)\}")


@dataclass(frozen=True)
class Phrasing:
    """One pattern, e.g. `Convert {n} {unit1} into {unit2}.`"""

    pattern: str

    def write(self, values: Values) -> str:
        """The sentence with its slots filled. Raises KeyError when a slot has no value."""
        return self.pattern.format_map(values)

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Matches the sentence anywhere in a text whose white space is single blanks; a repeated slot must repeat."""
        out: list[str] = []
        phrases: set[str] = set()
        end = 0
        for slot in _SLOT.finditer(self.pattern):
            name = slot[1] + slot[2]
            out.append(re.escape(self.pattern[end : slot.start()]))
            out.append(f"(?P={name})" if name in phrases else f"(?P<{name}>{SLOTS[slot[1]]})")
            phrases.add(name)
            end = slot.end()
        out.append(re.escape(self.pattern[end:]))
        return re.compile("".join(out))


def squeeze(text: str) -> str:
    """White space as single blanks, which is what phrasings match."""
    return " ".join(text.split())


def split_words(text: str) -> tuple[str, ...]:
    """`a b c` → ("a", "b", "c"), for word lists in code."""
    return tuple(text.split())


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
