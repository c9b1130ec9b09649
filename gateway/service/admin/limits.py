"""The limits that keys and organisations share: parsed from what people write, as columns, and shown again."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from gateway.core.money.amounts import nano_to_usd, usd_to_nano
from gateway.errors import BadRequest
from gateway.service.ports.admin import KeyRow, OrgRow

LIMIT_MAX = 1_000_000_000
DAYS_MAX = 36_500
USD_CHARS_MAX = 32
NAME_CHARS_MAX = 128
WHY_CHARS_MAX = 1_000
MONEY = {
    **{"budget_usd": "budget_nano", "budget_month_usd": "budget_month_nano", "budget_day_usd": "budget_day_nano"},
    "user_budget_usd": "user_budget_nano",
    "user_budget_month_usd": "user_budget_month_nano",
    "user_budget_day_usd": "user_budget_day_nano",
}
COUNTS = {"rpm": LIMIT_MAX, "tpm": LIMIT_MAX, "concurrency": LIMIT_MAX, "retention_days": DAYS_MAX}
FIELDS = (*MONEY, *COUNTS)


def columns(limits: Mapping[str, Any]) -> dict[str, int | None]:
    """Columns from the given fields of FIELDS; None: no limit. Raises BadRequest, which names the field."""
    values: dict[str, int | None] = {MONEY[name]: nano(name, limits[name]) for name in MONEY if name in limits}
    return values | {name: count_of(name, limits[name], most) for name, most in COUNTS.items() if name in limits}


def shown(row: KeyRow | OrgRow) -> dict[str, Any]:
    """The limits of a row: dollars as exact text, None for no limit."""
    money = {name: getattr(row, column) for name, column in MONEY.items()}
    usd = {name: None if value is None else nano_to_usd(value) for name, value in money.items()}
    return usd | {name: getattr(row, name) for name in COUNTS}


def nano(field: str, usd: Any) -> int | None:
    """Parse dollars as nano-dollars. Raises BadRequest."""
    if usd is None:
        return None
    if isinstance(usd, bool) or not isinstance(usd, str | int | float | Decimal) or len(str(usd)) > USD_CHARS_MAX:
        raise bad(field, "write dollars such as 25 or 0.50")
    try:
        return usd_to_nano(str(usd))
    except ValueError as error:
        raise bad(field, f"{error}; write dollars such as 25 or 0.50") from None


def count_of(field: str, value: Any, most: int) -> int | None:
    """A positive int, or None. Raises BadRequest."""
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise bad(field, f"`{str(value)[:40]}` is not a whole number from 1 to {most:,}; leave it out for no limit")
    return value


def label(field: str, text: Any) -> str:
    """A text of 1 to 128 printable characters. Raises BadRequest."""
    if not isinstance(text, str) or not 1 <= len(text) <= NAME_CHARS_MAX or not text.isprintable():
        raise bad(field, f"give 1 to {NAME_CHARS_MAX} printable characters")
    return text


def why(text: Any) -> str:
    """A reason for the audit, which may be empty. Raises BadRequest."""
    if not isinstance(text, str) or len(text) > WHY_CHARS_MAX:
        raise bad("why", f"give up to {WHY_CHARS_MAX} characters")
    return text


def bad(field: str, message: str) -> BadRequest:
    """The error for a field."""
    return BadRequest(f"{field}: {message}", param=field, code="bad_field")
