"""What a client asks of a file and of a batch. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from gateway.core.money.amounts import usd_to_nano
from gateway.core.openai.batches.objects import INPUT, BatchOrder
from gateway.core.openai.shapes import (
    Check,
    bad_value,
    check_names,
    mapping,
    missing_parameter,
    parse_digits,
    string_pairs,
    text,
)
from gateway.errors import BadRequest

KEEP_S_MIN, KEEP_S_MAX = 3600, 30 * 86_400
WINDOW_H_MAX = 168
NAME_CHARS_MAX = 255
MAX_COST = "x-baton-max-cost-usd"  # of the whole batch; the others hold for each line
_WINDOW = text(4, r"[1-9]\d{0,2}h")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
FIELDS: Mapping[str, tuple[Check, str]] = {
    "input_file_id": (text(64), "the id of an uploaded file"),
    "endpoint": (text(64), "a path such as /v1/chat/completions"),
    "completion_window": (_WINDOW, f"24h, or another number of hours up to {WINDOW_H_MAX}h"),
    "metadata": (string_pairs, "up to 16 pairs of strings (64 / 512 characters)"),
    "output_expires_after": (mapping, "an object with `anchor` and `seconds`"),
}
REQUIRED = ("input_file_id", "endpoint", "completion_window")


def parse_batch(
    body: object, headers: Mapping[str, str], endpoints: Collection[str], budget_nano_max: int
) -> BatchOrder:
    """Read the body of `POST /v1/batches`. `headers`: those of Baton's that came with it. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    fields = {name: value for name, value in check_names(body, FIELDS).items() if value is not None}
    for name in REQUIRED:
        if name not in fields:
            raise missing_parameter(name)
    for name, value in fields.items():
        check, description = FIELDS[name]
        if code := check(value):
            raise bad_value(name, description, code)
    if fields["endpoint"] not in endpoints:
        raise bad_value("endpoint", f"one of {', '.join(sorted(endpoints))}", "invalid_value")
    if int(fields["completion_window"][:-1]) > WINDOW_H_MAX:
        raise bad_value("completion_window", FIELDS["completion_window"][1], "invalid_value")
    return BatchOrder(
        endpoint=fields["endpoint"],
        input_file_id=fields["input_file_id"],
        completion_window=fields["completion_window"],
        metadata=fields.get("metadata", {}),
        options={name: value for name, value in headers.items() if name != MAX_COST},
        budget_nano=_budget(headers.get(MAX_COST), budget_nano_max),
        output_keep_s=keep_s(fields["output_expires_after"], "output_expires_after")
        if "output_expires_after" in fields
        else None,
    )


def _budget(usd: str | None, most_nano: int) -> int:
    if usd is None:
        return most_nano
    try:
        return max(1, min(most_nano, usd_to_nano(usd)))
    except ValueError:
        raise BadRequest(f"{MAX_COST}: `{usd[:40]}` is not a usable value", param=MAX_COST) from None


def keep_s(expiry: Mapping[str, Any], where: str) -> int:
    """The seconds for which a file is kept, of `{"anchor": "created_at", "seconds": 86400}`. Raises BadRequest."""
    check_names(expiry, ("anchor", "seconds"))
    if expiry.get("anchor") != "created_at":
        raise bad_value(f"{where}.anchor", "created_at", "invalid_value")
    value = expiry.get("seconds")
    seconds = parse_digits(value) if isinstance(value, str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not KEEP_S_MIN <= seconds <= KEEP_S_MAX:
        raise bad_value(f"{where}.seconds", f"a whole number from {KEEP_S_MIN} to {KEEP_S_MAX}", "invalid_value")
    return seconds


def check_upload(purpose: object, name: str | None) -> str:
    """The file name of an upload. Raises BadRequest for a purpose that nothing here serves."""
    if purpose is None:
        raise missing_parameter("purpose")
    if purpose != INPUT:
        raise BadRequest(
            f"'purpose' must be '{INPUT}': Baton keeps files for batches only.", param="purpose", code="invalid_value"
        )
    return _CONTROL.sub("", name or "")[:NAME_CHARS_MAX] or "file"
