"""`baton journal recover`: whole records behind a damaged one reach PostgreSQL, once; the rest is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway import cli
from gateway.adapters.journal import segments
from gateway.adapters.postgres.database import sync_engine
from gateway.core.log.events import canonical
from tests.integration.test_shipper import holds


def bad_segment(directory: Path, count: int, damaged: int) -> Path:
    """A segment of which the record of that number has a flipped bit, as an earlier version left it."""
    directory.mkdir(parents=True)
    records = [bytearray(segments.encode(canonical(event))) for event in holds(count)]
    records[damaged][len(records[damaged]) // 2] ^= 1
    path = segments.segment_path(directory, 7, "bad")
    path.write_bytes(b"".join(records))
    return path


def ledger_rows(url: str) -> int:
    engine = sync_engine(url)
    with engine.connect() as connection:
        rows: int = connection.execute(text("SELECT count(*) FROM ledger")).scalar_one()
    engine.dispose()
    return rows


@pytest.mark.parametrize("journal", ["spool", "spool/process-2"])
def test_whole_records_are_stored_once_and_the_rest_is_named(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], journal: str
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("BATON_DATA_DIR", str(tmp_path))
    path = bad_segment(tmp_path / journal, 9, 3)
    assert cli.main(["doctor", "--json"]) in (0, 1)
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert (found["journal"]["state"], str(path) in found["journal"]["what"]) == ("bad", True)
    assert cli.main(["journal", "recover", "--json"]) == 1
    (recovery,) = json.loads(capsys.readouterr().out)
    assert (recovery["records"], len(recovery["lost"])) == (8, 1)
    assert "hold" in recovery["lost"][0]
    assert ledger_rows(database_url) == 8
    assert (path.exists(), path.with_suffix(".recovered").exists()) == (False, True)
    assert cli.main(["journal", "recover"]) == 0
    assert "no damaged segment" in capsys.readouterr().out
    path.with_suffix(".recovered").rename(path)
    assert cli.main(["journal", "recover"]) == 1  # again: nothing counts twice
    assert ledger_rows(database_url) == 8


def test_without_a_database_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setenv("BATON_DATA_DIR", str(tmp_path))
    path = bad_segment(tmp_path / "spool", 2, 0)
    assert cli.main(["journal", "recover"]) == 2
    assert "start the gateway of this data directory first" in capsys.readouterr().err
    assert path.exists()
