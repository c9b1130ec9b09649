"""The table of settings in docs/training.md, between its markers; the prose around it is written by hand."""

from __future__ import annotations

import json
from pathlib import Path

from policy.train.settings import Settings

PAGE = PROSE = Path(__file__).resolve().parents[1] / "docs" / "training.md"
HEAD = "| setting | default | what, and where the default comes from |\n|---|---|---|\n"
END = "\n<!-- end of settings -->"


def table() -> str:
    """Every setting, as Markdown."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = "none" if field.default is None else json.dumps(field.default).strip('"')
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return HEAD + "\n".join(rows)


def render() -> str:
    """Return the page with a new table. Raises ValueError if a marker is missing."""
    page = PROSE.read_text(encoding="utf-8")
    return page[: page.index(HEAD)] + table() + page[page.index(END) :]
