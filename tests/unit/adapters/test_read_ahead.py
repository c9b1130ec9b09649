"""The shipper's process reads one batch ahead: of the same records, once, and from where the order says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.adapters.journal import segments
from gateway.adapters.journal.carriers import BatchSize
from gateway.adapters.journal.process import Batches
from gateway.adapters.journal.segments import Position
from gateway.adapters.postgres.writer import Delivery, LogWriter
from gateway.errors import Unavailable

RECORDS = [b'{"id":%d}' % n for n in range(10)]
SIZE = len(segments.encode(RECORDS[0]))
END = Position(1, SIZE * len(RECORDS))


class Writer:
    """Rows of a record are its bytes."""

    def __init__(self) -> None:
        self.converted: list[bytes] = []
        self.stored: list[bytes] = []
        self.is_away = False

    def read(self, payloads: Sequence[bytes]) -> Sequence[bytes]:
        self.converted += payloads
        return payloads

    def put(self, records: Sequence[bytes]) -> Delivery:
        if self.is_away:
            raise Unavailable("away")
        self.stored += records
        return Delivery([], [], len(records))


def batches(directory: Path, writer: Writer) -> Batches:
    segments.segment_path(directory, 1).write_bytes(b"".join(map(segments.encode, RECORDS)))
    return Batches(directory, cast(LogWriter, writer), BatchSize(records=3))


def carried(shipper: Batches, start: Position, until: Position = END) -> list[Any]:
    """Reports up to the end of the journal."""
    reports = [shipper.carry(start, until)]
    while reports[-1].records and not reports[-1].damaged:
        reports.append(shipper.carry(reports[-1].position, until))
    return reports


def test_every_record_is_converted_and_stored_once_in_order(tmp_path: Path) -> None:
    writer = Writer()
    reports = carried(batches(tmp_path, writer), Position(0, 0))
    assert [report.records for report in reports] == [3, 3, 3, 1, 0]
    assert writer.stored == writer.converted == RECORDS
    assert reports[-1].position == END


def test_an_order_that_is_given_again_is_read_again(tmp_path: Path) -> None:
    writer = Writer()
    shipper = batches(tmp_path, writer)
    writer.is_away = True
    with pytest.raises(Unavailable):
        shipper.carry(Position(0, 0), END)
    writer.is_away = False
    carried(shipper, Position(0, 0))
    assert writer.stored == RECORDS


def test_nothing_is_read_beyond_the_order(tmp_path: Path) -> None:
    writer = Writer()
    shipper = batches(tmp_path, writer)
    carried(shipper, Position(1, 0), Position(1, 4 * SIZE))
    assert writer.converted == RECORDS[:4]


def test_damage_that_is_found_ahead_is_reported_in_its_turn(tmp_path: Path) -> None:
    writer = Writer()
    shipper = batches(tmp_path, writer)
    path = segments.segment_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[: 4 * SIZE] + bytes(SIZE) + path.read_bytes()[5 * SIZE :])
    reports = carried(shipper, Position(1, 0))
    assert [(report.records, report.damaged) for report in reports] == [(3, False), (2, True)]
    assert reports[-1].position == Position(1, 4 * SIZE)
    assert writer.stored == [*RECORDS[:4], bytes(SIZE)]  # what is damaged goes with the records before it


def test_a_segment_that_is_gone_when_it_is_read_ahead_is_looked_for_again(tmp_path: Path) -> None:
    writer = Writer()
    shipper = batches(tmp_path, writer)
    assert shipper.carry(Position(1, 0), Position(2, 1)).records == 3
    segments.segment_path(tmp_path, 1).unlink()
    assert carried(shipper, Position(9, 0))[0].records == 0
