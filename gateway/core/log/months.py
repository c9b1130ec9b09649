"""Months of the log. Ids begin with their time, so a month is a range of ids, by which the log is cut. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

_NAMED = re.compile(r"_(\d{4})_(\d\d)$")


@dataclass(frozen=True, slots=True, order=True)
class Month:
    """A calendar month in UTC."""

    year: int
    number: int

    @classmethod
    def of(cls, at: datetime) -> Month:
        """The one that a time is in."""
        there = at.astimezone(UTC)
        return cls(there.year, there.month)

    @classmethod
    def named(cls, table: str) -> Month | None:
        """The inverse of `table`; None for a table of no month."""
        match = _NAMED.search(table)
        return cls(int(match[1]), int(match[2])) if match and 1 <= int(match[2]) <= 12 else None

    def table(self, of: str) -> str:
        """The name of its part of a table: `steps_2026_11`."""
        return f"{of}_{self.year:04}_{self.number:02}"

    def __str__(self) -> str:
        return f"{self.year:04}-{self.number:02}"

    @property
    def next(self) -> Month:
        """The month after."""
        return Month(self.year + self.number // 12, self.number % 12 + 1)

    @property
    def start(self) -> datetime:
        """Its first moment."""
        return datetime(self.year, self.number, 1, tzinfo=UTC)

    @property
    def first_id(self) -> str:
        """Not above any id of the month."""
        unix_ms = round(self.start.timestamp()) * 1000  # the first 48 bits of an id
        return str(UUID(int=unix_ms << 80))

    @property
    def end_id(self) -> str:
        """Above every id of the month: the next one's first."""
        return self.next.first_id
