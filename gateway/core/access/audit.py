"""The audit as a hash chain: what an entry is, how it follows from the one before, and what is wrong with one. Pure.

The hash of an entry is the SHA-256 of the hash before it and the entry's canonical bytes, its number included. So a
changed entry, a missing one and two that were swapped are each found at their place. Whoever can write all of the
table can make a new chain, or cut the end off: that is what anchors are for, hashes that were written elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Literal

FIRST = bytes(32)  # what the first entry follows
Wrong = Literal["changed", "missing", "unlinked", "cut", "forged"]


@dataclass(frozen=True, slots=True)
class Act:
    """Who changes something, and why, as the audit keeps it: `key:QduInZCfaZQ4`, `local:ann` at the command line."""

    actor: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that was done: who (`actor`) did what (`act`) to what (`target`), and the fields that it changed."""

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
    """An entry as the table keeps it."""

    entry: Entry
    prev: bytes
    hash: bytes


@dataclass(frozen=True, slots=True)
class Anchor:
    """The hash that entry `seq` had when it was the last one."""

    seq: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong at an entry: `changed` its content · `missing` the one before it · `unlinked` it follows another ·
    `cut` it was the end once, and the chain ends before it · `forged` it had another hash once."""

    seq: int
    wrong: Wrong


def plain(value: Any) -> Any:
    """JSON that comes back from any store as it went in: times as text, and fractions too."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    return str(value) if isinstance(value, float | date) else value


def canonical(entry: Entry) -> bytes:
    """The one byte form of an entry; equal entries have equal bytes."""
    record = {name: plain(getattr(entry, name)) for name in Entry.__slots__}
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def hash_of(prev: bytes, entry: Entry) -> bytes:
    """SHA-256, 32 bytes."""
    return hashlib.sha256(prev + canonical(entry)).digest()


def link(entry: Entry, prev: bytes) -> Link:
    """The entry, chained to the one before it."""
    return Link(entry, prev, hash_of(prev, entry))


class Verifier:
    """Walks a chain from its first entry on, page by page; `end` says what the anchors know better."""

    def __init__(self, anchors: Iterable[Anchor]) -> None:
        self._anchors: dict[int, set[bytes]] = {}
        for anchor in anchors:
            self._anchors.setdefault(anchor.seq, set()).add(anchor.hash)
        self.head = Anchor(0, FIRST)
        self.anchored = 0  # the last entry that an anchor vouches for

    def walk(self, links: Iterable[Link]) -> Iterator[Fault]:
        """What is wrong with the links that come next, in the order of their numbers."""
        for each in links:
            seq = each.entry.seq
            if seq != self.head.seq + 1:
                yield Fault(seq, "missing")
            elif each.prev != self.head.hash:
                yield Fault(seq, "unlinked")
            if hash_of(each.prev, each.entry) != each.hash:
                yield Fault(seq, "changed")
            for known in self._anchors.get(seq, ()):
                if known != each.hash:
                    yield Fault(seq, "forged")
                else:
                    self.anchored = seq
            self.head = Anchor(seq, each.hash)

    def end(self) -> Iterator[Fault]:
        """What is wrong with where the chain ends."""
        last = max(self._anchors, default=0)
        if last > self.head.seq:
            yield Fault(last, "cut")
