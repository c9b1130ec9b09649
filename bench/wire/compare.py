"""What differs between what a vendor said and what the client got. Pure.

A difference is a line of its kind: `lost PATH`, `changed PATH`, `added PATH`, with lists' indices taken out, so that
equal faults of many exchanges count as one kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

APART = {  # each side has its own
    *("id", "model", "created", "created_at", "completed_at", "sequence_number", "obfuscation", "item_id"),
    *("previous_response_id", "response_id"),
}
CALL_IDS = ("tool_calls[]", "tool_use")  # their ids are the client's to give back
SEALED = ("encrypted_content", "signature")  # as text: Baton seals the state of vendors in its own form
SHOWN = 100


def differences(said: Any, came: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (kind, what it was and is) for everything that the vendor said and the client did not get, or that only
    the client got."""
    if isinstance(said, Mapping) and isinstance(came, Mapping):
        yield from _of_objects(said, came, path)
    elif isinstance(said, list) and isinstance(came, list):
        if len(said) != len(came):
            yield f"changed {path}[] length", _shown(_kinds(said), _kinds(came))
        for one, other in zip(said, came, strict=False):
            yield from differences(one, other, f"{path}[]")
    elif said != came and not (path.endswith("delta.content") and not (said or came)):
        yield f"changed {path or 'reply'}", _shown(said, came)


def _of_objects(said: Mapping[str, Any], came: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    for name, value in said.items():
        where = f"{path}.{name}" if path else name
        if _is_apart(name, path) or (name == "logprobs" and value is None):
            continue
        if name not in came:
            yield f"lost {where}{' (null)' if value is None else ''}", _shown(value, None)
        elif not (name in SEALED and isinstance(value, str) and isinstance(came[name], str)):
            yield from differences(value, came[name], where)
    for name, value in came.items():
        if name not in said and value is not None and not _is_apart(name, path):
            yield f"added {path}{'.' if path else ''}{name}", _shown(None, value)


def _is_apart(name: str, path: str) -> bool:
    return name in APART and not (name == "id" and path.endswith(CALL_IDS))


def _kinds(values: Iterable[Any]) -> Any:
    return [value.get("type", "…") if isinstance(value, Mapping) else value for value in values]


def _shown(said: Any, came: Any) -> str:
    return f"{said!r:.{SHOWN}} → {came!r:.{SHOWN}}"


def is_loss(kind: str) -> bool:
    """Whether a difference is in something that the vendor said; an addition of Baton's is none, nor a lost null."""
    return not kind.startswith("added ") and not kind.endswith(" (null)")
