"""A phrasing is one sentence pattern with slots, used both ways: to write a task and to read one back.

A slot `{name}` takes the pattern of its name without trailing digits (`{n1}` is a whole number), so that every
phrasing of a family fills the same slots and a worker gets the values back as text whatever the words around them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

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
        seen: set[str] = set()
        end = 0
        for slot in _SLOT.finditer(self.pattern):
            name = slot[1] + slot[2]
            out.append(re.escape(self.pattern[end : slot.start()]))
            out.append(f"(?P={name})" if name in seen else f"(?P<{name}>{SLOTS[slot[1]]})")
            seen.add(name)
            end = slot.end()
        out.append(re.escape(self.pattern[end:]))
        return re.compile("".join(out))


def squeeze(text: str) -> str:
    """White space as single blanks, which is what phrasings match."""
    return " ".join(text.split())


def split_words(text: str) -> tuple[str, ...]:
    """`a b c` → ("a", "b", "c"), for word lists in code."""
    return tuple(text.split())
