"""Event records of the journal: what happened, in the order it happened; and the ids that sort by time. Pure.

An event is a kind, an id, and a JSON-able payload. `canonical` gives its one byte form. Ids are UUIDv7 (RFC 9562 §5.7),
so that inserts stay at the end of an index.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gateway.core.openai.body import parse_json

_encode = msgspec.json.Encoder(order="sorted").encode
_pack = msgspec.msgpack.Encoder().encode
_NONFINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")  # the beginning of ±inf and NaN as doubles of MessagePack
_PIECE_BYTES = 16
_PIECES = 256
_pieces: list[bytes] = []  # of the system's randomness, fetched many at once; each is used by one identifier
os.register_at_fork(after_in_child=_pieces.clear)  # or parent and child would give the same identifiers


def uuid7(unix_ms: int) -> str:
    """A UUIDv7 for that millisecond, as 36 characters."""
    bits = int.from_bytes(_random())
    value = (unix_ms & (2**48 - 1)) << 80 | 0x7 << 76 | (bits >> 62 & 0xFFF) << 64 | 0b10 << 62 | bits & (2**62 - 1)
    return _dashed(value)


def lowest(unix_ms: int) -> str:
    """Not above any UUIDv7 of that millisecond or a later one, and above all of those before."""
    return _dashed((unix_ms & (2**48 - 1)) << 80)


def random_hex() -> str:
    """128 random bits as 32 characters, for what is not sorted."""
    return _random().hex()


def _random() -> bytes:
    """Sixteen bytes of `os.urandom`. Asking it gives the interpreter's lock away, which under load is not had back
    before another thread has worked for a while: so it is asked once for many."""
    try:
        return _pieces.pop()
    except IndexError:
        fresh = os.urandom(_PIECE_BYTES * _PIECES)
        _pieces.extend(fresh[at : at + _PIECE_BYTES] for at in range(_PIECE_BYTES, len(fresh), _PIECE_BYTES))
        return fresh[:_PIECE_BYTES]


def _dashed(value: int) -> str:
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


Kind = Literal["hold", "dispatch", "settle", "rollout", "shadow"]


@dataclass(frozen=True, slots=True)
class Event:
    """One journal record. `id` is a UUIDv7 string (unique, time-ordered); `ts_us` microseconds since the epoch.

    Payloads by kind:
      hold     {hold_id, rollout_id, amount_nano, scopes: [[name, limit_nano|null], …]}
      dispatch {hold_id, rollout_id, step_id, attempt, worker, bound_nano}    before the call leaves
      settle   {hold_id, rollout_id, state: posted|voided|uncertain, charged_nano, scopes}
      rollout  the whole tree of DESIGN §6 (see `core/log/rollout.py`)
      shadow   {rollout_id, version, live_version, refusal, agrees, latency_ms, …}   a shadow's plan, without its text
    """

    id: str
    kind: Kind
    ts_us: int
    payload: Mapping[str, Any]

    @classmethod
    def new(cls, kind: Kind, now_us: int, payload: Mapping[str, Any]) -> Event:
        """An event that happens now, under an id of its own."""
        return cls(uuid7(now_us // 1000), kind, now_us, payload)


def canonical(event: Event) -> bytes:
    """The one byte form: sorted keys, no spaces, UTF-8 (lone surrogates kept). Equal events have equal bytes."""
    record = {"id": event.id, "kind": event.kind, "ts_us": event.ts_us, "payload": event.payload}
    with suppress(TypeError, ValueError, OverflowError, RecursionError):
        if not _may_hold_nonfinite(record):
            return _encode(record)
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


def _may_hold_nonfinite(record: Any) -> bool:
    """Whether NaN or an infinity may be in it: msgspec would write them as null. MessagePack has a double as its eight
    bytes behind a mark; other bytes may look the same. Raises TypeError or ValueError for what it cannot encode."""
    return _NONFINITE.search(_pack(record)) is not None


def parse(data: bytes) -> Event:
    """Inverse of `canonical`. Raises ValueError on anything else."""
    record = parse_json(data)
    if not isinstance(record, dict) or set(record) != {"id", "kind", "ts_us", "payload"}:
        raise ValueError("not an event record")
    return Event(record["id"], record["kind"], record["ts_us"], record["payload"])
