"""What may become a policy version, and under which number. Pure; `adapters/postgres/registry.py` does it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.policies.versions import PLAIN_NAME, Version
from gateway.errors import BadRequest, Conflict

WHY_CHARS_MAX = 2_000


def check_words(name: str, why: str) -> None:
    """Raises BadRequest for a policy name that is none, or a reason too long to keep."""
    if PLAIN_NAME.fullmatch(name) is None:
        raise BadRequest(f"`{name[:64]}` is no policy name; a-z, 0-9, _ . - and a letter first", param="name")
    if len(why) > WHY_CHARS_MAX:
        raise BadRequest(f"`why` is over {WHY_CHARS_MAX} characters", param="why")


def check_gate(gate: Mapping[str, Any] | None, forced: bool, why: str) -> None:
    """Raises Conflict(gate_refused) for what the gate did not let through and nobody vouches for."""
    if forced and not why.strip():
        raise BadRequest("say why it is forced; it is kept in the audit", param="why")
    if forced or (gate is not None and gate.get("passed") is True):
        return
    refusals = gate.get("refusals", []) if gate is not None else []
    named = ", ".join(str(one.get("name", one)) if isinstance(one, dict) else str(one) for one in refusals)
    said = f"the gate refused it ({named or 'no reason given'})" if gate is not None else "it has no gate report"
    raise Conflict(f"{said}; mend it, or force it and say why", code="gate_refused")


def check_report(gate: Mapping[str, Any] | None, manifest: Mapping[str, Any], forced: bool) -> None:
    """Raises Conflict(gate_refused) where the report says that it judged other weights."""
    judged = (gate or {}).get("candidate_sha256")
    if judged is not None and not forced and judged not in manifest["sha256"].values():
        said = f"the gate report is of other weights ({str(judged)[:12]}…); gate this directory"
        raise Conflict(f"{said}, or force it and say why", code="gate_refused")


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two manifests are of the same directory: the same files under the same number."""
    return one.get("sha256") == other.get("sha256") and str(one.get("version")) == str(other.get("version"))


def number_for(manifest: Mapping[str, Any], versions: Sequence[Version]) -> int:
    """The manifest's own number where it is free, else one more than any."""
    taken = {version.number for version in versions}
    number = str(manifest.get("version", ""))
    if re.fullmatch("[0-9]{1,8}", number) and int(number) not in taken:
        return int(number)
    return max(taken, default=0) + 1


def parent_of(manifest: Mapping[str, Any]) -> str | None:
    """The version it was trained from."""
    return str(manifest.get("parent") or "") or None
