"""Who a worker says it is: the model and the `system_fingerprint` that its replies name. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

NAMES = ("model", "system_fingerprint")
CHARS_MAX = 200
IDENTITIES_MAX = 50  # of one version of a worker: vendors have several fingerprints at once, and some one a call
_DATED = re.compile(r"[-@](\d{4,}|latest$)")
_NOT_PRINTABLE = re.compile(r"[^ -~]")


class Identity(NamedTuple):
    """What replies of one version of a worker named. Empty: the model that was asked for, or no fingerprint."""

    worker: str
    version: str
    model: str = ""
    fingerprint: str = ""


def identity_in(reply: Mapping[str, Any], asked: str | None) -> dict[str, str]:
    """What a completion or chunk names, without the model where it is the one that was asked for."""
    names = {name: reply[name] for name in NAMES if isinstance(reply.get(name), str) and reply[name]}
    if names.get("model") == asked:
        names.pop("model", None)
    return {name: _NOT_PRINTABLE.sub("?", text)[:CHARS_MAX] for name, text in names.items()}


def is_other_model(named: str, asked: str) -> bool:
    """Whether a reply that names the model `named` is of another one than `asked`: names may differ in the provider
    before them and in a date or `latest` behind. A reply that names no model is of the one asked for."""
    own, wanted = (name.lower().rpartition("/")[2].partition(":")[0] for name in (named, asked))
    return bool(own) and own != wanted and not (own.startswith(wanted) and _DATED.match(own, len(wanted)))
