"""The audit for its readers: the latest entries, a check of the whole chain, and anchors of its head outside the
database."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from typing import Any

from gateway.core.access.audit import Anchor, Fault, Link, Verifier
from gateway.service.ports.admin import Anchors, AuditLog
from gateway.service.ports.request import Clock

log = logging.getLogger("gateway.audit")
PAGE = 500
FAULTS_MAX = 100


class Auditor:
    """`anchors`: outside the database, so that whoever can write the one cannot write the other."""

    def __init__(self, entries: AuditLog, anchors: Anchors, clock: Clock) -> None:
        self._entries = entries
        self._anchors = anchors
        self._clock = clock
        self._anchored = Anchor(0, b"")

    async def latest(
        self, limit: int, before: int | None, target: str | None, actor: str | None = None, act: str | None = None
    ) -> Sequence[Link]:
        """Entries, newest first."""
        return await self._entries.latest(limit, before, target, actor, act)

    async def anchor(self) -> None:
        """Store the head, if it moved since. Raises Unavailable, OSError."""
        head = await self._entries.head()
        if head.seq > 0 and head != self._anchored:
            await self._anchors.add(head, self._clock.now())
            self._anchored = head
            log.info("audit: entry %d has hash %s", head.seq, head.hash.hex())

    async def verify(self) -> dict[str, Any]:
        """Walk the chain from its first entry to its last: {ok, entries, head, anchors, anchored, faults}. `anchored`
        is the last entry that an anchor confirms: later entries could have been cut off without a trace."""
        anchors = await self._anchors.all()
        verifier = Verifier(anchors)
        faults: list[Fault] = []
        while links := await self._entries.walk(verifier.head.seq, PAGE):
            faults += islice(verifier.walk(links), FAULTS_MAX - len(faults))
            if len(faults) >= FAULTS_MAX:
                break
        else:
            faults += verifier.end()
        return {
            "ok": not faults,
            "entries": verifier.head.seq,
            "head": verifier.head.hash.hex(),
            "anchors": len(anchors),
            "anchored": verifier.anchored_seq,
            "faults": [{"seq": fault.seq, "wrong": fault.kind} for fault in faults],
        }


def describe_entry(link: Link) -> dict[str, Any]:
    """An entry as JSON for people and scripts."""
    entry = link.entry
    return {
        "seq": entry.seq,
        "at": entry.at.isoformat(),
        "actor": entry.actor,
        "act": entry.act,
        "target": entry.target,
        "before": entry.before,
        "after": entry.after,
        "why": entry.why,
        "hash": link.hash.hex(),
    }
