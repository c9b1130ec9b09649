"""Markdown for the generated pages, with no line over LINE_CHARS_MAX."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

LINE_CHARS_MAX = 120


def code(text: object) -> str:
    """Format as code."""
    return f"`{text}`"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table, one line a row: keep the cells short."""
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    return "\n".join(lines).replace("| --- |", "|---|").replace(" --- |", "---|") + "\n"


def paragraph(text: str, indent: str = "") -> str:
    """Wrap a text; indent all lines but the first."""
    return textwrap.fill(text, LINE_CHARS_MAX, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def items(rows: Iterable[tuple[str, str]]) -> str:
    """A list of names with their meanings."""
    return "".join(paragraph(f"- {name}: {meaning}", "  ") + "\n" for name, meaning in rows)
