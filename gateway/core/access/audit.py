"""The audit as a hash chain: entries, their hashes, and the check of a chain. Pure.

The hash of an entry is the SHA-256 of the previous hash and the entry's canonical bytes, which include its number. So
the check finds a changed entry, a missing entry and two swapped entries, each at its position. A writer who controls
the whole table can make a new chain or cut off its end; anchors, hashes stored elsewhere, reveal that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Literal

from gateway.core.access.keys import Role

FIRST = bytes(32)  # the hash before the first entry
FaultKind = Literal["changed", "missing", "unlinked", "cut", "forged"]


@dataclass(frozen=True, slots=True)
class Act:
    """Who makes a change, and why, as the audit records it. An actor is `key:QduInZCfaZQ4`, or `local:ann` at the
    command line."""

    actor: str
    why: str = ""
    role: Role = "admin"  # what the actor may do; the command line and the gateway itself may do everything


@dataclass(frozen=True, slots=True)
class Entry:
    """One change: who (`actor`) did what (`act`) to what (`target`), with the changed fields before and after."""

    seq: int
    at: datetime
    actor: str
    act: str
    target: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    why: str


@dataclass(frozen=True, slots=True)
class Link:
    """An entry with its hashes, as the table stores it."""

    entry: Entry
    prev: bytes
    hash: bytes


@dataclass(frozen=True, slots=True)
class Anchor:
    """The hash that entry `seq` had when it was the last entry."""

    seq: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at an entry. `changed`: its content does not match its hash. `missing`: the entry before it is absent.
    `unlinked`: it follows another entry than the one before it. `cut`: an anchor knows it, but the chain ends before
    it. `forged`: an anchor knows another hash for it."""

    seq: int
    kind: FaultKind


def plain_json(value: Any) -> Any:
    """Convert a value to JSON data that every store returns unchanged: times and fractions become text."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    return str(value) if isinstance(value, float | date) else value


def canonical_bytes(entry: Entry) -> bytes:
    """The canonical bytes of an entry. Equal entries have equal bytes."""
    record = {name: plain_json(getattr(entry, name)) for name in Entry.__slots__}
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def hash_of(prev: bytes, entry: Entry) -> bytes:
    """The hash of an entry after the hash `prev`: SHA-256, 32 bytes."""
    return hashlib.sha256(prev + canonical_bytes(entry)).digest()


def link(entry: Entry, prev: bytes) -> Link:
    """Chain an entry to the hash before it."""
    return Link(entry, prev, hash_of(prev, entry))


class Verifier:
    """Checks a chain page by page, from its first entry. Call `walk` for each page, then `end` once."""

    def __init__(self, anchors: Iterable[Anchor]) -> None:
        self._anchors: dict[int, set[bytes]] = {}
        for anchor in anchors:
            self._anchors.setdefault(anchor.seq, set()).add(anchor.hash)
        self.head = Anchor(0, FIRST)
        self.anchored_seq = 0  # the last entry that an anchor confirms

    def walk(self, links: Iterable[Link]) -> Iterator[Fault]:
        """Yield the faults of the next links. `links` continue where the last call ended, in the order of their
        numbers."""
        for item in links:
            seq = item.entry.seq
            if seq != self.head.seq + 1:
                yield Fault(seq, "missing")
            elif item.prev != self.head.hash:
                yield Fault(seq, "unlinked")
            if hash_of(item.prev, item.entry) != item.hash:
                yield Fault(seq, "changed")
            for anchored_hash in self._anchors.get(seq, ()):
                if anchored_hash != item.hash:
                    yield Fault(seq, "forged")
                else:
                    self.anchored_seq = seq
            self.head = Anchor(seq, item.hash)

    def end(self) -> Iterator[Fault]:
        """Yield a fault if an anchor is newer than the end of the chain."""
        last = max(self._anchors, default=0)
        if last > self.head.seq:
            yield Fault(last, "cut")
