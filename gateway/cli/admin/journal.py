"""`baton journal recover`: store what is whole in damaged segments of the journal, and say what is not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from gateway.adapters.journal import segments
from gateway.adapters.journal.segments import Damage
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.writer import LogWriter
from gateway.cli.process.datadir import FACTS, DataDir
from gateway.config import settings as config
from gateway.config.settings import Settings
from gateway.errors import ConfigError

RECORDS = 500  # of one transaction
CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class SegmentRecovery:
    """One segment: its whole records, all of which are in PostgreSQL now, and what could not be read."""

    segment: str
    records: int
    bytes_lost: int
    lost: tuple[str, ...]


def run(options: argparse.Namespace) -> int:
    """Store them, beside a gateway that serves or without one; 1 where something is lost. Records that are stored count
    once. Raises ConfigError without a database, Unavailable."""
    settings = config.load(data_dir=options.data_dir)
    damaged = segments.damaged(settings.spool_path)
    recoveries = [*_recovered(settings, damaged)] if damaged else []
    if options.json:
        print(json.dumps([asdict(one) for one in recoveries]))
    for one in () if options.json else recoveries:
        lost = f"; {one.bytes_lost} bytes are no record: {', '.join(one.lost)}" if one.bytes_lost else ""
        print(f"{one.segment}: {one.records} records are stored{lost}")
    if not recoveries and not options.json:
        print(f"no damaged segment in {settings.spool_path}")
    return int(any(one.bytes_lost for one in recoveries))


def _recovered(settings: Settings, damaged: list[Path]) -> Iterator[SegmentRecovery]:
    url = settings.database_url or (DataDir(settings.data_dir).read(FACTS) or {}).get("database_url")
    if url is None:
        raise ConfigError("no database: start the gateway of this data directory first, or set DATABASE_URL")
    engine = sync_engine(str(url), connect_timeout_s=CONNECT_S)
    try:
        for path in damaged:
            yield _recover(LogWriter(engine), path)
    finally:
        engine.dispose()


def _recover(writer: LogWriter, path: Path) -> SegmentRecovery:
    """Store one segment; it is renamed once all of it is stored."""
    every, count, lost = segments.every_record(path), 0, list[Damage]()
    while batch := [*islice(every, RECORDS)]:
        payloads = [each for each in batch if isinstance(each, bytes)]
        damage = [each for each in batch if isinstance(each, Damage)]
        writer.store([*payloads, *(each.start for each in damage)])
        count += len(payloads)
        lost += damage
    path.rename(path.with_suffix(".recovered"))
    return SegmentRecovery(
        str(path), count, sum(each.size for each in lost), tuple(each.about or "unreadable" for each in lost)
    )
