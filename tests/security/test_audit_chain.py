"""S7: what is done to the audit by somebody who can write the database is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.host.anchors import AnchorFile
from gateway.adapters.host.clock import SystemClock
from gateway.adapters.postgres.admin import PostgresAdmin
from gateway.adapters.postgres.audit import PostgresAudit
from gateway.core.access.audit import FIRST, Act, hash_of
from gateway.service.admin.audit import Auditor
from gateway.service.admin.orgs import OrgAdmin

ENTRIES = 6
EVE = "SET session_replication_role = replica"  # a superuser goes round the triggers


@pytest.fixture
async def chain(pg_engine: AsyncEngine, tmp_path: Path) -> Auditor:
    """Six entries, anchored at the fourth and at the last."""
    auditor = Auditor(PostgresAudit(pg_engine), AnchorFile(tmp_path / "audit.anchors"), SystemClock())
    orgs = OrgAdmin(PostgresAdmin(pg_engine), SystemClock())
    await orgs.create("acme", {"rpm": 1}, Act("key:op", "because"))
    for n in range(ENTRIES - 1):
        if n == 3:
            await auditor.anchor()
        await orgs.update("acme", {"rpm": n + 2}, Act("key:op", "because"))
    await auditor.anchor()
    return auditor


async def tamper(engine: AsyncEngine, *statements: str) -> None:
    async with engine.begin() as connection:
        for statement in (EVE, *statements):
            await connection.execute(text(statement))


async def faults(auditor: Auditor) -> list[tuple[int, str]]:
    found = await auditor.verify()
    assert found["ok"] is (found["faults"] == [])
    return [(fault["seq"], fault["wrong"]) for fault in found["faults"]]


async def test_an_untouched_chain_is_whole_and_anchored_to_its_end(chain: Auditor) -> None:
    found = await chain.verify()
    assert (found["ok"], found["entries"], found["anchored"], found["anchors"]) == (True, ENTRIES, ENTRIES, 2)


@pytest.mark.parametrize(
    "change",
    [
        "actor = 'key:eve'",
        "act = 'org.closed'",
        "target = 'org:other'",
        "why = ''",
        "at = at + interval '1 microsecond'",
        """before = before || '{"rpm": 7}'""",
        """after = '{"rpm": 5.0}'""",
        "after = NULL",
        "hash = set_byte(hash, 31, get_byte(hash, 31) # 1)",
        "prev = set_byte(prev, 0, get_byte(prev, 0) # 128)",
    ],
)
async def test_a_flipped_bit_is_found_where_it_is(chain: Auditor, pg_engine: AsyncEngine, change: str) -> None:
    await tamper(pg_engine, f"UPDATE audit SET {change} WHERE seq = 3")  # noqa: S608 - the attacks above
    found = await faults(chain)
    assert any(seq in (3, 4) for seq, _ in found)
    assert (await faults(chain))[0][0] == 3


@pytest.mark.parametrize("seq", [1, 3, ENTRIES])
async def test_a_deleted_entry_is_found(chain: Auditor, pg_engine: AsyncEngine, seq: int) -> None:
    await tamper(pg_engine, f"DELETE FROM audit WHERE seq = {seq}")  # noqa: S608 - the attack
    assert await faults(chain) == ([(seq, "cut")] if seq == ENTRIES else [(seq + 1, "missing")])


async def test_entries_that_were_swapped_are_found(chain: Auditor, pg_engine: AsyncEngine) -> None:
    moves = ((2, 100), (4, 2), (100, 4))
    await tamper(pg_engine, *(f"UPDATE audit SET seq = {b} WHERE seq = {a}" for a, b in moves))  # noqa: S608
    assert {seq for seq, _ in await faults(chain)} >= {2, 4}


@pytest.mark.parametrize("left", [0, 1, ENTRIES - 1])
async def test_an_end_that_was_cut_off_is_found_by_the_anchors(
    chain: Auditor, pg_engine: AsyncEngine, left: int
) -> None:
    await tamper(pg_engine, f"DELETE FROM audit WHERE seq > {left}")  # noqa: S608 - the attack
    assert await faults(chain) == [(ENTRIES, "cut")]


async def test_a_chain_made_anew_is_found_by_the_anchors(chain: Auditor, pg_engine: AsyncEngine) -> None:
    entries = PostgresAudit(pg_engine)
    links = await entries.walk(0, 100)
    prev, statements = FIRST, ["UPDATE audit SET why = 'nothing' WHERE seq = 2"]
    for each in links:
        entry = replace(each.entry, why="nothing") if each.entry.seq == 2 else each.entry
        new = hash_of(prev, entry)
        place = f"WHERE seq = {entry.seq}"
        statements.append(f"UPDATE audit SET prev = '\\x{prev.hex()}', hash = '\\x{new.hex()}' {place}")  # noqa: S608
        prev = new
    await tamper(pg_engine, *statements)
    assert await faults(chain) == [(4, "forged"), (ENTRIES, "forged")]


async def test_without_anchors_a_cut_end_is_not_seen_and_the_report_says_so(
    chain: Auditor, pg_engine: AsyncEngine, tmp_path: Path
) -> None:
    bare = Auditor(PostgresAudit(pg_engine), AnchorFile(tmp_path / "none"), SystemClock())
    await tamper(pg_engine, f"DELETE FROM audit WHERE seq = {ENTRIES}")  # noqa: S608 - the attack
    found = await bare.verify()
    assert (found["ok"], found["anchored"], found["anchors"]) == (True, 0, 0)


@pytest.mark.parametrize(
    "statement", ["UPDATE audit SET why = 'x'", "DELETE FROM audit WHERE seq = 1", "TRUNCATE audit"]
)
async def test_the_database_itself_refuses(chain: Auditor, pg_engine: AsyncEngine, statement: str) -> None:
    with pytest.raises(DBAPIError, match="append-only"):
        async with pg_engine.begin() as connection:
            await connection.execute(text(statement))
    assert await faults(chain) == []


async def test_a_torn_line_of_the_anchors_hides_no_other(chain: Auditor, tmp_path: Path) -> None:
    file = tmp_path / "audit.anchors"
    file.write_bytes(file.read_bytes() + b"7 abc")
    assert (await chain.verify())["anchors"] == 2
