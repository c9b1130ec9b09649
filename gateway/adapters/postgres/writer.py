"""The log's writer: it turns journal records into rows, one transaction a batch.

A batch is copied (`copies.py`). Where a row is stored already, as after a crash, or PostgreSQL refuses one, it is
inserted instead: inserts are idempotent, and a batch whose data PostgreSQL refuses is halved until each poisonous
record stands alone; that record goes to `dead_letters` and the others are stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psycopg
from sqlalchemy import Engine, select
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

from gateway.adapters.postgres import copies, rows
from gateway.adapters.postgres.copies import LogRecord
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.tables import dead_letters, metadata
from gateway.core.log.events import parse
from gateway.core.loop.experience.likeness import HASHED, Embedding
from gateway.errors import BatonError, Unavailable

# The exceptions that a payload of the wrong shape raises while it is converted to rows.
MISSHAPEN = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, BatonError)
# SQLSTATE classes that blame the data: 22 data exception, 23 integrity, 54 program limit exceeded.
POISON_CLASSES = ("22", "23", "54")
REASON_CHARS_MAX = 300


@dataclass(frozen=True, slots=True)
class Delivery:
    """The result of a stored batch. `dead`: (kind, reason) of each record in `dead_letters`; the kind is None if the
    bytes are not an event. `rollouts_us`: times of the stored rollouts of clients' requests, without child loops.
    `newest_us`: time of the batch's newest event. Times are microseconds since the epoch."""

    dead: Sequence[tuple[str | None, str]]
    rollouts_us: Sequence[int]
    newest_us: int


class LogWriter:
    """Every call blocks. The engine's owner disposes of it. `embedding` computes the vectors of questions that were
    logged without one; None: an endpoint computes vectors, and a question that it gave none stays without."""

    def __init__(self, engine: Engine, embedding: Embedding | None = HASHED) -> None:
        self._engine = engine
        self._embedding = embedding

    def read(self, payloads: Sequence[bytes]) -> list[LogRecord]:
        """Convert records to rows. It needs no database, and may run while another batch is stored."""
        records = [_fast(payload) or _record(payload, self._embedding) for payload in payloads]
        try:
            copies.fill_vectors(records, self._embedding)
        except copies.ODD:
            return [_record(payload, self._embedding) for payload in payloads]
        return records

    def store(self, payloads: Sequence[bytes]) -> Delivery:
        """`read` and `put`."""
        return self.put(self.read(payloads))

    def put(self, records: Sequence[LogRecord]) -> Delivery:
        """Store every record, a poisonous one as a dead letter. Raises Unavailable, whose message quotes no client's
        text, while PostgreSQL is away or its schema does not fit."""
        try:
            is_stored = self._copy(records)
            if not is_stored:
                records = [_record(each.payload, self._embedding) if each.copied else each for each in records]
            dead = [record for record in records if record.error is not None]
            if not is_stored:
                dead += self._insert([record for record in records if record.error is None])
            if dead:
                self._bury(dead)
        except SQLAlchemyError as error:
            raise Unavailable(reason(error), code="store_unavailable") from error
        buried = {id(record.payload) for record in dead}
        return Delivery(
            dead=[(record.kind, str(record.error)) for record in dead],
            rollouts_us=[record.ts_us for record in records if record.is_request and id(record.payload) not in buried],
            newest_us=max((record.ts_us for record in records), default=0),
        )

    def _copy(self, records: Sequence[LogRecord]) -> bool:
        """Store the good records in one transaction, by COPY what can be. False: nothing is stored, because nothing can
        be copied, a row is there already, or PostgreSQL refuses one; `_insert` finds out which."""
        if not any(record.copied for record in records):
            return False
        try:
            with self._engine.begin() as connection:
                copies.copy(connection, records)
                insert_rows(connection, _rows_of(records))
        except MISSHAPEN:
            return False
        except StatementError as error:
            if not self._is_poison(error):
                raise
            return False
        except psycopg.Error as error:
            if not self._blames_data(error):
                raise Unavailable(reason(error), code="store_unavailable") from error
            return False
        return True

    def _insert(self, records: Sequence[LogRecord]) -> list[LogRecord]:
        """Insert all records in one transaction. If the data is at fault, halve them and try again. Return the
        poisonous ones."""
        if not records:
            return []
        try:
            with self._engine.begin() as connection:
                insert_rows(connection, _rows_of(records))
        except (StatementError, *MISSHAPEN) as error:
            if isinstance(error, StatementError) and not self._is_poison(error):
                raise
            if len(records) == 1:
                return [replace(records[0], error=reason(error))]
            half = len(records) // 2
            return self._insert(records[:half]) + self._insert(records[half:])
        return []

    def _is_poison(self, error: StatementError) -> bool:
        """Whether the record is at fault, and not the server, the network or a missing migration."""
        if not isinstance(error, DBAPIError):
            return True  # a value that could not be bound
        return self._blames_data(error.orig)

    def _blames_data(self, error: BaseException | None) -> bool:
        state = getattr(error, "sqlstate", None)
        if state is None:
            return isinstance(error, psycopg.DataError | psycopg.ProgrammingError)
        return state[:2] in POISON_CLASSES or (state[:2] == "42" and self._schema_fits())

    def _schema_fits(self) -> bool:
        """Whether every table has the columns that this version writes."""
        try:
            with self._engine.connect() as connection:
                for table in metadata.sorted_tables:
                    connection.execute(select(table).limit(0))
        except StatementError:
            return False
        return True

    def _bury(self, dead: Sequence[LogRecord]) -> None:
        values = [
            {
                "digest": hashlib.sha256(record.payload).hexdigest(),
                "kind": record.kind,
                "record": record.payload,
                "error": record.error,
            }
            for record in sorted(dead, key=lambda record: record.payload)
        ]
        with self._engine.begin() as connection:
            connection.execute(pg.insert(dead_letters).on_conflict_do_nothing(), values)


def _rows_of(records: Sequence[LogRecord]) -> rows.Rows:
    """What statements insert."""
    new = rows.Rows()
    for record in records:
        if record.new is not None:
            new.extend(record.new)
    return new


def _fast(payload: bytes) -> LogRecord | None:
    try:
        return copies.read(payload)
    except copies.ODD:
        return None


def _record(payload: bytes, embedding: Embedding | None) -> LogRecord:
    kind, ts_us = None, 0
    try:
        event = parse(payload)
        kind, ts_us = str(event.kind), int(event.ts_us)
        new = rows.event_rows(event, is_clean=not rows.needs_cleaning(payload), embedding=embedding)
    except MISSHAPEN as error:
        return LogRecord(payload, kind, ts_us, error=reason(error))
    is_request = kind == "rollout" and all(row["parent_id"] is None for row in new.rollouts)
    return LogRecord(payload, kind, ts_us, is_request, new=new)


def reason(error: BaseException) -> str:
    """One line about an error that quotes no client's text: PostgreSQL's DETAIL would."""
    cause = getattr(error, "orig", None) or error
    diagnosis = getattr(cause, "diag", None)
    text = (diagnosis.message_primary if diagnosis else None) or str(cause)
    return f"{type(cause).__name__}: {rows.clean(text)}".splitlines()[0][:REASON_CHARS_MAX]
