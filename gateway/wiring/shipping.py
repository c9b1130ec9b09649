"""The journal and its shipper, wired, and the embedding that requests and the shipper share."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path

from gateway.adapters.host.siblings import Siblings
from gateway.adapters.journal.carriers import BatchSize, Carrier, ProcessCarrier, ThreadCarrier
from gateway.adapters.journal.shipper import Shipper
from gateway.adapters.journal.spool import Spool, SpoolLimits
from gateway.adapters.postgres.writer import LogWriter
from gateway.config.planning import HASHING, MINILM, PlanningSettings
from gateway.core.log.events import Event
from gateway.core.loop.experience.likeness import HASHED, Embedding
from gateway.core.loop.experience.meaning import TABLE_FILE, by_meaning
from gateway.errors import ConfigError
from gateway.files import shipped
from gateway.service.ports.request import Journal
from gateway.wiring.base import Base

log = logging.getLogger("gateway")
EXIT_JOURNAL_BROKEN = 70
FLUSH = "/flush"  # asked of a sibling: return once its journal is in PostgreSQL


async def journal_of(base: Base, embedding: Embedding | None) -> tuple[Spool, Shipper]:
    """The journal on disk, and its shipper. Raises ConfigError."""
    settings = base.settings
    limits = SpoolLimits(
        segment_bytes=settings.spool_segment_bytes,
        total_bytes=settings.spool_bytes_max,
        shipped_timeout_s=settings.ship_wait_s,
    )
    spool = base.closing(await Spool.open(settings.spool_path, limits, base.metrics, on_fatal=_die))
    shipper = Shipper(spool, _carrier(base, spool, embedding), watch=base.metrics)
    base.opened.push_async_callback(shipper.stop)
    return spool, shipper


async def ship_left(base: Base, embedding: Embedding | None) -> None:
    """Ship what is left in the journals of processes that no longer serve, because fewer do than at an earlier start.
    Empty directories remain."""
    siblings = base.siblings
    count = 0 if siblings is None else siblings.count
    for place in sorted(base.settings.spool_path.glob("process-*")):
        index = place.name.removeprefix("process-")
        if index.isdigit() and int(index) > count:
            await _ship_all(base, embedding, place)


async def _ship_all(base: Base, embedding: Embedding | None, place: Path) -> None:
    spool = await Spool.open(place, on_fatal=_die)
    writer = LogWriter(base.connections.shipping, embedding)
    shipper = Shipper(spool, ThreadCarrier(spool, writer, BatchSize(base.settings.ship_batch_max)))
    shipper.start()
    try:
        while spool.acknowledged < spool.durable:
            with suppress(TimeoutError):
                await spool.shipped()
    finally:
        await shipper.stop()
        await spool.close()
    log.info("the journal in %s is shipped", place)


class FlushedTogether:
    """A journal whose `shipped` waits for those of all processes of this gateway, so that what one process has answered
    can be read from any other."""

    def __init__(self, journal: Journal, siblings: Siblings, limit_s: float) -> None:
        self._journal = journal
        self._siblings = siblings
        self._limit_s = limit_s

    async def append(self, *events: Event) -> None:
        """See `Journal.append`."""
        await self._journal.append(*events)

    async def shipped(self) -> None:
        """See `Journal.shipped`. A process that does not answer is not waited for: its successor ships its journal."""
        await asyncio.gather(self._journal.shipped(), self._siblings.ask(FLUSH, self._limit_s))


def flushed_together(base: Base, journal: Journal) -> Journal:
    """The journal for reads of what any process of this gateway has written."""
    siblings = base.siblings
    return journal if siblings is None else FlushedTogether(journal, siblings, base.settings.ship_wait_s)


def _carrier(base: Base, spool: Spool, embedding: Embedding | None) -> Carrier:
    settings, size = base.settings, BatchSize(base.settings.ship_batch_max)
    if not settings.ship_process:
        return ThreadCarrier(spool, LogWriter(base.connections.shipping, embedding), size)
    content = {
        "database_url": base.services.database_url,
        "connect_s": settings.db_connect_s,
        "directory": str(spool.directory.resolve()),
        "embedder": embedding.name if embedding else None,
        "records": size.records,
    }
    return ProcessCarrier(settings.data_dir, content)


def _die(error: BaseException) -> None:
    """End this process: the disk under the journal failed, so it can log nothing more."""
    log.critical("the journal is broken: %s; ending, so that nothing goes on unlogged", error)
    os._exit(EXIT_JOURNAL_BROKEN)


def embedding_of(settings: PlanningSettings) -> Embedding | None:
    """The embedding in this process, which requests, the shipper and the sweep of old vectors share; None where an
    endpoint embeds. Raises ConfigError, which names the way out, if the table's file is missing or damaged."""
    if settings.embedder == HASHING:
        return HASHED
    if settings.embedder != MINILM:
        return None
    try:
        return by_meaning(shipped(TABLE_FILE))
    except OSError as error:
        fix = f"install Baton again, or set BATON_EMBEDDER={HASHING}"
        raise ConfigError(f"{TABLE_FILE}: {error.strerror}; {fix}") from None
