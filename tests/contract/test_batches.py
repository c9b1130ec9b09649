"""`FileStore` and `BatchStore` on PostgreSQL, and the runner over them with a scripted server of lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.batches import PostgresBatches
from gateway.adapters.postgres.files import PIECE_BYTES, PostgresFiles
from gateway.core.access.keys import Principal
from gateway.core.money.ledger import Scope
from gateway.core.openai.batches.objects import BatchLine, BatchOrder, LineResult, LineTokens, OpenBatch, UploadedFile
from gateway.errors import NotFound, RateLimited, TooLarge, Unauthorized
from gateway.service.batches.run import ATTEMPTS_MAX, BatchRunner, RunnerLimits
from gateway.service.ports.batches import LineReply
from tests.kit import KEY, TestClock
from tests.waiting import until

HOUR_S = 3600.0
ORDER = BatchOrder("/v1/chat/completions", "file-in", "24h", {"a": "b"}, {"x-baton-pool": "main"}, 10**9)
OTHER_KEY = "keyBBBBBBBBB"
NOW_S = 2_000_000_000  # far ahead: nothing here expires by itself


def a_line(custom_id: str, **body: Any) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": ORDER.endpoint, "body": {"model": "alpha", **body}}
    return json.dumps(line).encode()


def a_file(file_id: str = "file-in", **changes: Any) -> UploadedFile:
    return replace(UploadedFile(file_id, KEY.public_id, "in.jsonl", "batch", 0, NOW_S, NOW_S + 3600), **changes)


def a_batch(batch_id: str = "batch_1", **changes: Any) -> OpenBatch:
    return replace(OpenBatch(batch_id, KEY.public_id, ORDER, "validating", NOW_S, NOW_S + 86_400), **changes)


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def content(files: PostgresFiles, file_id: str) -> bytes:
    return b"".join([piece async for piece in files.content(file_id)])


@pytest.fixture
def files(pg_engine: AsyncEngine) -> PostgresFiles:
    return PostgresFiles(pg_engine)


@pytest.fixture
def batches(pg_engine: AsyncEngine) -> PostgresBatches:
    return PostgresBatches(pg_engine, output_keep_s=3600)


# ---------------------------------------------------------------- files


async def test_a_file_comes_back_to_the_byte_and_to_its_own_key_only(files: PostgresFiles) -> None:
    data = bytes(range(256)) * 4096 * 3  # three pieces
    made = await files.add(a_file(name="a\x00b"), pieces(data[:10], data[10:], b"end"), 2**30)
    assert made.size_bytes == len(data) + 3
    assert await content(files, "file-in") == data + b"end"
    assert await files.get(KEY.public_id, "file-in") == replace(made, name="a\ufffdb")
    assert await files.get(OTHER_KEY, "file-in") is None
    assert not await files.delete(OTHER_KEY, "file-in")
    assert await files.delete(KEY.public_id, "file-in")
    assert await files.get(KEY.public_id, "file-in") is None
    assert await content(files, "file-in") == b""


async def test_the_files_of_a_key_are_bounded_together(files: PostgresFiles) -> None:
    await files.add(a_file("file-1"), pieces(b"12345"), 10)
    with pytest.raises(TooLarge) as refused:
        await files.add(a_file("file-2"), pieces(b"123456"), 10)
    assert refused.value.code == "files_too_large"
    assert await files.get(KEY.public_id, "file-2") is None
    await files.add(a_file("file-3", key_id=OTHER_KEY), pieces(b"123456"), 10)


async def test_files_are_listed_by_page_and_purpose(files: PostgresFiles) -> None:
    for n in range(3):
        await files.add(
            a_file(f"file-{n}", created_s=NOW_S + n, purpose=("batch", "batch_output")[n == 1]), pieces(), 1
        )

    async def ids(**query: Any) -> list[str]:
        asked = {"purpose": None, "after": None, "limit": 10, "newest_first": True} | query
        return [file.id for file in await files.page(KEY.public_id, **asked)]

    assert await ids() == ["file-2", "file-1", "file-0"]
    assert await ids(newest_first=False) == ["file-0", "file-1", "file-2"]
    assert await ids(after="file-2", limit=1) == ["file-1"]
    assert await ids(after="file-0", newest_first=False) == ["file-1", "file-2"]
    assert await ids(purpose="batch") == ["file-2", "file-0"]
    with pytest.raises(NotFound):
        await ids(after="file-9")


async def test_an_expired_file_is_gone_and_swept(files: PostgresFiles, pg_engine: AsyncEngine) -> None:
    await files.add(a_file("file-old", expires_s=1_000), pieces(b"x" * (PIECE_BYTES + 1)), 2**30)
    await files.add(a_file("file-new"), pieces(b"x"), 2**30)
    assert await files.get(KEY.public_id, "file-old") is None
    assert await files.sweep(10) == 1
    async with pg_engine.begin() as connection:
        assert await connection.scalar(text("SELECT count(*) FROM file_pieces")) == 1


# ---------------------------------------------------------------- batches and lines


async def open_batch(batches: PostgresBatches, batch_id: str = "batch_1", lines: int = 3) -> None:
    """A running batch of so many lines."""
    await batches.create(a_batch(batch_id), 9)
    assert await batches.claim(RUNNERS[0], HOUR_S) is not None
    await batches.add_lines([BatchLine(batch_id, n, f"c{n}", a_line(f"c{n}")) for n in range(lines)])
    assert await batches.begin(batch_id, RUNNERS[0], lines, NOW_S)


RUNNERS = [f"00000000-0000-4000-8000-00000000000{n}" for n in range(3)]


async def test_a_batch_comes_back_as_it_was_made(batches: PostgresBatches) -> None:
    made = a_batch()
    await batches.create(made, 9)
    assert await batches.get(KEY.public_id, made.id) == made
    assert await batches.get(OTHER_KEY, made.id) is None
    await batches.create(a_batch("batch_2", created_s=NOW_S + 1), 9)
    assert [one.id for one in await batches.page(KEY.public_id, after=None, limit=5)] == ["batch_2", "batch_1"]
    assert [one.id for one in await batches.page(KEY.public_id, after="batch_2", limit=5)] == ["batch_1"]
    with pytest.raises(NotFound):
        await batches.page(OTHER_KEY, after="batch_2", limit=5)


async def test_the_open_batches_of_a_key_are_bounded(batches: PostgresBatches) -> None:
    await batches.create(a_batch(), 1)
    with pytest.raises(RateLimited) as refused:
        await batches.create(a_batch("batch_2"), 1)
    assert "1 batches" in refused.value.message
    await batches.cancel(KEY.public_id, "batch_1", NOW_S)
    claimed = await batches.claim(RUNNERS[0], HOUR_S)
    assert claimed is not None
    await batches.end(replace(claimed, status="cancelled"), RUNNERS[0], ("file-1", "file-2"), None, NOW_S)
    await batches.create(a_batch("batch_2"), 1)
    await batches.create(a_batch("batch_3", key_id=OTHER_KEY), 1)


async def test_no_more_are_open_when_many_come_at_once(batches: PostgresBatches) -> None:
    creating = (batches.create(a_batch(f"batch_{n}"), 2) for n in range(8))
    tries = await asyncio.gather(*creating, return_exceptions=True)
    assert [type(one) for one in tries if one is not None] == [RateLimited] * 6


async def test_a_line_has_one_runner_and_one_result(batches: PostgresBatches) -> None:
    await open_batch(batches)
    mine = await batches.take(RUNNERS[0], 2, HOUR_S)
    theirs = await batches.take(RUNNERS[1], 9, HOUR_S)
    assert ([line.n for line in mine], [line.n for line in theirs]) == ([0, 1], [2])
    assert (mine[0].custom_id, mine[0].request) == ("c0", a_line("c0"))
    result = LineResult(b"done\n", failed=False, tokens=LineTokens(3, 4, 2, 1))
    assert not await batches.keep(mine[0], RUNNERS[1], result)
    assert await batches.keep(mine[0], RUNNERS[0], result)
    assert not await batches.keep(mine[0], RUNNERS[0], result)
    await batches.keep(theirs[0], RUNNERS[1], LineResult(b"bad\n", failed=True))
    batch = await batches.owner("batch_1")
    assert batch is not None
    assert (batch.counts, batch.tokens) == ((3, 1, 1), LineTokens(3, 4, 2, 1))


async def test_a_dead_runners_line_goes_to_the_next_and_its_late_result_changes_nothing(
    batches: PostgresBatches,
) -> None:
    await open_batch(batches, lines=1)
    (dead,) = await batches.take(RUNNERS[0], 1, 0.0)
    (heir,) = await batches.take(RUNNERS[1], 1, HOUR_S)
    assert heir == dead
    assert not await batches.keep(dead, RUNNERS[0], LineResult(b"late\n", failed=False))
    await batches.renew(RUNNERS[0], [dead], None, HOUR_S)
    assert await batches.keep(heir, RUNNERS[1], LineResult(b"first\n", failed=False))


async def test_a_renewed_claim_stays_and_a_released_one_goes(batches: PostgresBatches) -> None:
    await open_batch(batches, lines=2)
    lines = await batches.take(RUNNERS[0], 2, 0.0)
    await batches.renew(RUNNERS[0], lines[:1], None, HOUR_S)
    assert [line.n for line in await batches.take(RUNNERS[1], 9, HOUR_S)] == [1]
    await batches.release(RUNNERS[0])
    assert [line.n for line in await batches.take(RUNNERS[1], 9, HOUR_S)] == [0]


async def test_a_line_that_was_put_off_comes_when_it_is_due(batches: PostgresBatches) -> None:
    await open_batch(batches, lines=2)
    first, second = await batches.take(RUNNERS[0], 2, HOUR_S)
    await batches.postpone(first, RUNNERS[0], HOUR_S, counts=True)
    await batches.postpone(second, RUNNERS[0], 0.0, counts=False)
    assert [(line.n, line.attempts) for line in await batches.take(RUNNERS[0], 9, HOUR_S)] == [(1, 0)]


async def test_a_short_batch_does_not_wait_for_a_long_one(batches: PostgresBatches) -> None:
    await open_batch(batches, "batch_1", lines=9)
    assert len(await batches.take(RUNNERS[0], 4, HOUR_S)) == 4
    await open_batch(batches, "batch_2", lines=2)
    taken = await batches.take(RUNNERS[0], 3, HOUR_S)
    assert [(line.batch_id, line.n) for line in taken] == [("batch_2", 0), ("batch_2", 1), ("batch_1", 4)]


async def test_a_cancelled_batch_ends_once_its_lines_have(batches: PostgresBatches, files: PostgresFiles) -> None:
    await open_batch(batches, lines=3)
    first, second = await batches.take(RUNNERS[0], 2, HOUR_S)
    await batches.keep(first, RUNNERS[0], LineResult(b'{"one":1}\n', failed=False))
    cancelling = await batches.cancel(KEY.public_id, "batch_1", NOW_S + 5)
    assert cancelling is not None
    assert (cancelling.status, cancelling.times["cancelling"]) == ("cancelling", NOW_S + 5)
    assert await batches.take(RUNNERS[1], 9, HOUR_S) == []
    assert await batches.claim(RUNNERS[1], HOUR_S) is None  # a line is being served
    await batches.keep(second, RUNNERS[0], LineResult(b'{"two":2}\n', failed=False))
    claimed = await batches.claim(RUNNERS[1], HOUR_S)
    assert claimed is not None
    assert await batches.claim(RUNNERS[2], HOUR_S) is None
    ended = replace(claimed, status="cancelled")
    reason = ("batch_cancelled", "it was")
    assert not await batches.end(ended, RUNNERS[2], ("file-o", "file-e"), reason, NOW_S)
    assert await batches.end(ended, RUNNERS[1], ("file-o", "file-e"), reason, NOW_S)
    assert await content(files, "file-o") == b'{"one":1}\n{"two":2}\n'
    error = json.loads(await content(files, "file-e"))
    assert (error["custom_id"], error["error"]["code"]) == ("c2", "batch_cancelled")
    batch = await batches.owner("batch_1")
    assert batch is not None
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("cancelled", "file-o", "file-e")
    assert batch.counts == (3, 2, 1)
    output = await files.get(KEY.public_id, "file-o")
    assert output is not None
    assert (output.purpose, output.expires_s) == ("batch_output", NOW_S + 3600)


# ---------------------------------------------------------------- the runner


@dataclass
class ScriptedLines:
    """Serves lines by their `model`. `replies`: what to say, one after another; the last one stays."""

    replies: list[LineReply] = field(default_factory=lambda: [LineReply(200, "req_1", {"usage": {}})])
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[str, Any, Mapping[str, str], Sequence[Scope]]] = field(default_factory=list)
    open: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def serve(
        self, who: Principal, endpoint: str, body: Any, options: Mapping[str, str], scopes: Sequence[Scope]
    ) -> LineReply:
        assert (who.rpm, who.organisation.rpm) == (None, None)
        self.asked.append((endpoint, body, options, scopes))
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await self.gate.wait()
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        finally:
            self.open -= 1


async def the_key(key_id: str) -> Principal:
    if key_id != KEY.public_id:
        raise Unauthorized("revoked")
    return replace(KEY, rpm=1)


@asynccontextmanager
async def running(
    batches: PostgresBatches, files: PostgresFiles, server: ScriptedLines, live: list[int] | None = None, **limits: Any
) -> AsyncIterator[BatchRunner]:
    given = {"lines_max": 4, "places": 100, "lease_s": 30.0, "poll_s": 0.05, "line_bytes_max": 10_000} | limits
    counts = live or [0]

    def in_flight() -> int:
        return counts[0] + runner.serving

    runner = BatchRunner(batches, files, server, the_key, in_flight, TestClock(), RunnerLimits(**given))
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ended(batches: PostgresBatches, batch_id: str = "batch_1") -> OpenBatch:
    """The batch, once it has ended."""
    seen: list[OpenBatch] = []

    async def is_there() -> bool:
        batch = await batches.owner(batch_id)
        assert batch is not None
        seen.append(batch)
        return batch.status in ("completed", "failed", "expired", "cancelled")

    await until(is_there)
    return seen[-1]


async def test_a_batch_runs_from_its_file_to_its_output(batches: PostgresBatches, files: PostgresFiles) -> None:
    texts = b"\n".join([a_line("a", n=1), b"", a_line("b", n=2), a_line("c", n=3)])
    await files.add(a_file(), pieces(texts[:50], texts[50:]), 2**30)
    await batches.create(a_batch(), 9)
    usage = {"usage": {"prompt_tokens": 10, "completion_tokens": 2}}
    server = ScriptedLines([LineReply(200, "req_1", usage), LineReply(400, "req_2", {"error": {"code": "bad"}})])
    async with running(batches, files, server, lines_max=1):
        batch = await ended(batches)
    assert (batch.status, batch.counts, batch.tokens) == ("completed", (3, 1, 2), LineTokens(10, 2))
    assert batch.times.keys() == {"in_progress", "finalizing", "completed"}
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    (line,) = [json.loads(text) for text in (await content(files, batch.output_file_id)).splitlines()]
    assert line == {
        "id": "batch_req_100000",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req_1", "body": usage},
        "error": None,
    }
    failed = [json.loads(text) for text in (await content(files, batch.error_file_id)).splitlines()]
    assert [(one["custom_id"], one["response"]["status_code"]) for one in failed] == [("b", 400), ("c", 400)]
    assert server.asked[0] == (
        ORDER.endpoint, {"model": "alpha", "n": 1}, ORDER.options, (Scope("batch:batch_1", ORDER.budget_nano),)
    )  # fmt: skip


async def test_a_bad_file_fails_its_batch_and_names_the_lines(batches: PostgresBatches, files: PostgresFiles) -> None:
    await files.add(a_file(), pieces(a_line("a") + b"\n{\n" + a_line("a")), 2**30)
    await batches.create(a_batch(), 9)
    async with running(batches, files, server := ScriptedLines()):
        batch = await ended(batches)
    assert batch.status == "failed"
    assert [(error["code"], error["line"]) for error in batch.errors] == [
        ("invalid_json_line", 2),
        ("duplicate_custom_id", 3),
    ]
    assert server.asked == []


async def test_lines_yield_to_live_requests(batches: PostgresBatches, files: PostgresFiles) -> None:
    await open_batch(batches, lines=20)
    live, server = [3], ScriptedLines()
    server.gate.clear()
    async with running(batches, files, server, live, lines_max=4, places=100) as runner:
        await until(lambda: server.open == 1)
        live[0] = 1
        await until(lambda: server.open == 3)
        live[0] = 49
        assert runner.room() <= 0
        server.gate.set()
        assert (await ended(batches)).counts == (20, 20, 0)  # at least one at a time
        assert server.most == 3


async def test_a_full_gateway_serves_no_line(batches: PostgresBatches, files: PostgresFiles) -> None:
    await open_batch(batches, lines=2)
    live, server = [50], ScriptedLines()
    async with running(batches, files, server, live, places=100) as runner:
        await asyncio.sleep(0.3)
        assert (runner.room(), server.asked) == (0, [])
        live[0] = 0
        await ended(batches)


async def test_a_gateway_whose_limit_is_zero_serves_no_line(batches: PostgresBatches, files: PostgresFiles) -> None:
    async with running(batches, files, ScriptedLines(), lines_max=0) as runner:
        assert runner.room() == 0


async def test_too_many_requests_never_fail_a_line_and_a_broken_worker_does(
    batches: PostgresBatches, files: PostgresFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.service.batches.run.DELAY_S_MAX", 0.01)
    await open_batch(batches, lines=1)
    busy = [LineReply(429, "req_1", {"error": {}}, 0.01)] * 8
    broken = [LineReply(502, "req_2", {"error": {"code": "upstream_error"}}, 0.01)]
    server = ScriptedLines([*busy, *broken])
    async with running(batches, files, server):
        batch = await ended(batches)
    assert batch.counts == (1, 0, 1)
    assert len(server.asked) == len(busy) + ATTEMPTS_MAX


@pytest.mark.parametrize(("code", "attempts"), [("conversation_locked", 9), ("conflict", ATTEMPTS_MAX)])
async def test_a_line_waits_for_its_conversation_and_for_no_other_conflict(
    batches: PostgresBatches, files: PostgresFiles, monkeypatch: pytest.MonkeyPatch, code: str, attempts: int
) -> None:
    monkeypatch.setattr("gateway.service.batches.run.DELAY_S_MAX", 0.01)
    await open_batch(batches, lines=1)
    conflicts = [LineReply(409, "req_1", {"error": {"code": code}}, 0.01)] * 8
    server = ScriptedLines([*conflicts, LineReply(200, "req_2", {"usage": {}})])
    async with running(batches, files, server):
        batch = await ended(batches)
    assert batch.counts == ((1, 1, 0) if code == "conversation_locked" else (1, 0, 1))
    assert len(server.asked) == attempts


class BrokenLines(ScriptedLines):
    """Raises what no server should."""

    async def serve(self, *asked: Any) -> LineReply:
        self.asked.append(asked)
        raise OverflowError("a bug")


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_line_that_meets_a_bug_ends_after_a_finite_number_of_tries(
    batches: PostgresBatches, files: PostgresFiles, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    monkeypatch.setattr("gateway.service.batches.run.DELAY_S_MAX", 0.01)
    await open_batch(batches, lines=2)
    server = BrokenLines()
    async with running(batches, files, server):
        if cancelled:
            await until(lambda: server.asked)
            await batches.cancel(KEY.public_id, "batch_1", NOW_S)
        batch = await ended(batches)
    assert (batch.status, batch.counts[1]) == ("cancelled" if cancelled else "completed", 0)
    assert len(server.asked) <= 2 * ATTEMPTS_MAX
    if not cancelled:
        assert (batch.counts, len(server.asked)) == ((2, 0, 2), 2 * ATTEMPTS_MAX)
        assert batch.error_file_id is not None
        lines = [json.loads(line) for line in (await content(files, batch.error_file_id)).splitlines()]
        assert [line["error"]["code"] for line in lines] == ["internal_error"] * 2


async def test_lines_of_a_revoked_key_fail(batches: PostgresBatches, files: PostgresFiles) -> None:
    await batches.create(a_batch(key_id=OTHER_KEY), 9)
    await batches.claim(RUNNERS[0], HOUR_S)
    await batches.add_lines([BatchLine("batch_1", 0, "a", a_line("a"))])
    await batches.begin("batch_1", RUNNERS[0], 1, NOW_S)
    async with running(batches, files, server := ScriptedLines()):
        batch = await ended(batches)
    assert (batch.counts, server.asked) == ((1, 0, 1), [])


async def test_a_batch_out_of_time_has_what_was_done(
    batches: PostgresBatches, files: PostgresFiles, pg_engine: AsyncEngine
) -> None:
    await open_batch(batches, lines=2)
    (line,) = await batches.take(RUNNERS[0], 1, HOUR_S)
    await batches.keep(line, RUNNERS[0], LineResult(b"{}\n", failed=False))
    async with pg_engine.begin() as connection:
        await connection.execute(text("UPDATE batches SET expires_at = now()"))
    async with running(batches, files, server := ScriptedLines()):
        batch = await ended(batches)
    assert (batch.status, batch.counts, server.asked) == ("expired", (2, 1, 1), [])
    assert batch.error_file_id is not None
    assert json.loads(await content(files, batch.error_file_id))["error"]["code"] == "batch_expired"


async def test_a_drained_runner_gives_its_lines_up_at_once(batches: PostgresBatches, files: PostgresFiles) -> None:
    await open_batch(batches, lines=2)
    server = ScriptedLines()
    server.gate.clear()
    async with running(batches, files, server) as runner:
        await until(lambda: server.open == 2)
        await runner.drain(0.05)
        assert len(await batches.take(RUNNERS[1], 9, HOUR_S)) == 2
