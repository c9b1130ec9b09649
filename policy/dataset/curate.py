"""A selection made ready to train on: rows judged by the rules, split, capped, and a report of what was left out.

The log is read twice in one snapshot: once for the few fields the rules need, then for the rows that stay, so that
memory holds a mark a row and never the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from gateway.errors import ConfigError, NotFound
from policy.dataset.read import count_withheld, extent, rows_of, snapshot
from policy.dataset.row import Call, Row, Side
from policy.dataset.rules import Mark, Report, Rules, divided, mark, summed_up, unparsed, why_left_out
from policy.dataset.select import Selection

ROWS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Dataset:
    """A whole selection in memory, for a job. Oldest first on both sides."""

    train: list[Row]
    validation: list[Row]
    report: Report


@dataclass(frozen=True, slots=True)
class Curated:
    """The rows that stay, to be streamed as often as wanted while the snapshot is open."""

    connection: Connection
    selection: Selection
    sides: dict[Call, Side]
    report: Report
    unparsed: frozenset[str]  # root ids of requests of which a plan was refused

    def rows(self) -> Iterator[Row]:
        """Oldest first, each with its side."""
        for row in rows_of(self.connection, self.selection):
            if row.call in self.sides:
                yield replace(row, split=self.sides[row.call])


@contextmanager
def curated(database_url: str, selection: Selection, rules: Rules, rows_max: int = ROWS_MAX) -> Iterator[Curated]:
    """Raises NotFound where nothing is selected or nothing is left, with the reasons; ConfigError where the key share
    cannot be had or over `rows_max` rows pass; and as `read.snapshot`."""
    with snapshot(database_url) as connection:
        marks: list[Mark] = []
        left_out: Counter[str] = Counter()
        for row in rows_of(connection, selection):
            reason = why_left_out(row, rules, selection.min_outcomes)
            if reason:
                left_out[reason] += 1
                continue
            marks.append(mark(row))
            if len(marks) > rows_max:
                raise ConfigError(f"over {rows_max} planning calls are selected: narrow --since and --until")
        withheld = count_withheld(connection, selection)
        if withheld:
            left_out["train_false"] = withheld
        sides, more = divided(marks, rules)
        report = summed_up(marks, sides, left_out | more)
        if not report.found:
            raise NotFound(_nothing_matches(connection, selection))
        if not report.kept:
            raise NotFound(f"nothing is left of {report.found} planning calls ({selection}): {report.reasons()}")
        yield Curated(connection, selection, sides, report, unparsed(marks))


def _nothing_matches(connection: Connection, selection: Selection) -> str:
    total, first, last = extent(connection)
    if not total or not first or not last:
        return "the log is empty: send requests through the gateway first"
    contents = f"the log holds {total} from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC"
    return f"no planning call matches {selection}; {contents}: widen the filters"


def load(database_url: str, selection: Selection, rules: Rules, rows_max: int = ROWS_MAX) -> Dataset:
    """The selection as the direct input of a job. Raises as `curated`."""
    with curated(database_url, selection, rules, rows_max) as curation:
        rows = list(curation.rows())
    train = [row for row in rows if row.split == "train"]
    return Dataset(train, [row for row in rows if row.split == "validation"], curation.report)
