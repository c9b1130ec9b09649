"""The deadline of a Redis call tells a silent Redis from a process that was itself held up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.adapters.redis.pipe import LinkLost, Pipe, packed
from gateway.adapters.redis.script import RedisAway, RedisScript
from tests.redis_server import RedisServer, start_redis
from tests.waiting import BOUND_S, at_some_pace

DEADLINE_S = 0.2
STALL_S = 0.4  # longer than the deadline, while Redis answers at once
BALANCE = (["{t}:epoch", "{t}:posted", "{t}:held", "{t}:open", "{t}:hold:x"], ["ping", "none"])
IN_FLIGHT = 128
Loop = Callable[[], asyncio.AbstractEventLoop]
LOOPS = [pytest.param(uvloop.new_event_loop, id="uvloop"), pytest.param(asyncio.new_event_loop, id="asyncio")]


@asynccontextmanager
async def opened(server: RedisServer, deadline_s: float = DEADLINE_S) -> Any:
    script = RedisScript(server.url, "budgets.lua", deadline_s=deadline_s, connections_max=2)
    await script(*BALANCE)
    yield script
    await script.close()


@contextmanager
def silent(server: RedisServer) -> Iterator[None]:
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


def carried_out(loop: Loop, story: Callable[[int], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(at_some_pace(story))


async def ask(url: str, *parts: str | bytes) -> Any:
    pipe = Pipe(url, deadline_s=BOUND_S, connections_max=1)
    try:
        return await pipe.send(packed(parts))
    finally:
        pipe.close()


async def calls_of(server: RedisServer) -> int:
    lines = (await ask(server.url, "INFO", "commandstats")).decode()
    return int(lines.partition("cmdstat_evalsha:calls=")[2].partition(",")[0])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_late_event_loop_gets_every_reply_that_redis_sent_in_time(redis_server: RedisServer, loop: Loop) -> None:
    """However many wait, none is refused and none is sent twice."""

    async def story(pace: int) -> None:
        async with opened(redis_server, DEADLINE_S * pace) as script:
            before = await calls_of(redis_server)
            calls = [asyncio.ensure_future(script(*BALANCE)) for _ in range(IN_FLIGHT)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # the commands are written
            time.sleep(STALL_S * pace)  # noqa: ASYNC251 - this is what is tested
            assert len([reply for reply in await asyncio.gather(*calls) if reply]) == IN_FLIGHT
            assert await calls_of(redis_server) == before + IN_FLIGHT

    carried_out(loop, story)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_event_loop_that_is_late_again_and_again_refuses_nothing(redis_server: RedisServer, loop: Loop) -> None:
    """Each turn of the loop is longer than the deadline."""

    async def story(pace: int) -> None:
        async def busy() -> None:
            while True:
                time.sleep(DEADLINE_S * pace * 1.2)  # noqa: ASYNC251 - this is what is tested
                await asyncio.sleep(0)

        async with opened(redis_server, DEADLINE_S * pace) as script:
            at_work = asyncio.ensure_future(busy())
            assert all(await asyncio.gather(*(script(*BALANCE) for _ in range(IN_FLIGHT))))
            at_work.cancel()

    carried_out(loop, story)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_silent_redis_is_away_at_the_deadline(redis_server: RedisServer, loop: Loop) -> None:
    async def story(pace: int) -> None:
        deadline_s = DEADLINE_S * pace
        async with opened(redis_server, deadline_s) as script:
            with silent(redis_server):
                for _ in range(3):
                    began_s = time.monotonic()
                    with pytest.raises(RedisAway, match="no answer within"):
                        await asyncio.wait_for(script(*BALANCE), BOUND_S)  # it never answers
                    assert deadline_s <= time.monotonic() - began_s < 1.5 * deadline_s
            assert await script(*BALANCE)

    carried_out(loop, story)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stall_earns_a_second_deadline_only_while_redis_answers(redis_server: RedisServer, loop: Loop) -> None:
    """On a busy machine every refusal would take twice its time."""

    async def story(pace: int) -> None:
        deadline_s = DEADLINE_S * pace
        async with opened(redis_server, deadline_s) as script:
            with silent(redis_server):
                for deadlines in (2, 1, 1):
                    began_s = time.monotonic()
                    asyncio.get_running_loop().call_later(0.5 * deadline_s, time.sleep, deadline_s)
                    with pytest.raises(RedisAway):
                        await script(*BALANCE)
                    took = (time.monotonic() - began_s) / deadline_s  # the stall ends after 1.5 deadlines
                    assert 2.4 < took < 3.2 if deadlines == 2 else 1.4 < took < 2.2
            assert await script(*BALANCE)  # it has answered again, and is trusted again

    carried_out(loop, story)


async def test_a_late_reply_never_goes_to_a_later_command(redis_server: RedisServer) -> None:
    pipe = Pipe(redis_server.url, deadline_s=DEADLINE_S, connections_max=2)
    assert await pipe.send(packed(("ECHO", "first"))) == b"first"
    with silent(redis_server):
        early = pipe.send(packed(("ECHO", "early")))
        await asyncio.sleep(0.7 * DEADLINE_S)
        late = pipe.send(packed(("ECHO", "late")))  # on the same connection, and due later
        with pytest.raises(RedisAway):
            await early
    assert await asyncio.wait_for(asyncio.shield(late), BOUND_S) == b"late"
    assert await pipe.send(packed(("ECHO", "next"))) == b"next"
    pipe.close()


async def test_a_cancelled_call_leaves_the_others_their_replies(redis_server: RedisServer) -> None:
    pipe = Pipe(redis_server.url, deadline_s=BOUND_S, connections_max=1)
    replies = [pipe.send(packed(("ECHO", n))) for n in range(9)]
    replies[3].cancel()
    assert await asyncio.gather(*replies[:3], *replies[4:]) == [b"%d" % n for n in range(9) if n != 3]
    pipe.close()


async def test_connections_are_bounded(redis_server: RedisServer) -> None:
    pipe = Pipe(redis_server.url, deadline_s=DEADLINE_S, connections_max=2)
    with silent(redis_server):
        for _ in range(5):
            with pytest.raises(RedisAway):
                await pipe.send(packed(("ECHO", "a")))
    assert await pipe.send(packed(("ECHO", "b"))) == b"b"
    open_now = (await ask(redis_server.url, "CLIENT", "LIST")).splitlines()
    assert len(open_now) <= 4  # the pipe's, this one, and what Redis is about to close
    pipe.close()
    with pytest.raises(RedisAway, match="closed"):
        await pipe.send(packed(("ECHO", "c")))


async def test_a_script_that_redis_forgot_is_sent_again(redis_server: RedisServer) -> None:
    async with opened(redis_server, BOUND_S) as script:
        await ask(redis_server.url, "SCRIPT", "FLUSH")
        assert await script(*BALANCE)


async def test_a_connection_that_redis_closed_is_opened_again(redis_server: RedisServer) -> None:
    async with opened(redis_server, BOUND_S) as script:
        await ask(redis_server.url, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert await script(*BALANCE)


async def test_a_connection_that_is_lost_twice_is_away(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(redis_server, BOUND_S) as script:
        sent = 0

        def lost(_: bytes) -> asyncio.Future[Any]:
            nonlocal sent
            sent += 1
            reply = asyncio.get_running_loop().create_future()
            reply.set_exception(LinkLost("Redis closed the connection"))
            return reply

        monkeypatch.setattr(script._pipe, "send", lost)
        with pytest.raises(RedisAway, match="Redis closed the connection"):
            await script(*BALANCE)
        assert sent == 2


async def test_a_password_a_database_and_any_text_are_sent(tmp_path: Path) -> None:
    server = start_redis(tmp_path)
    place = f"127.0.0.1:{server.port}"
    try:
        await ask(server.url, "ACL", "SETUSER", "baton", "on", ">pass", "~*", "&*", "+@all")
        assert await ask(f"redis://baton:pass@{place}/3", "SET", "a\ud800", "é") == b"OK"
        assert await ask(f"redis://{place}/3", "GET", b"a\xed\xa0\x80") == "é".encode()
        with pytest.raises(RedisAway, match="WRONGPASS"):
            await ask(f"redis://baton:wrong@{place}/3", "GET", "a")
        with pytest.raises(RedisAway, match="DB index is out of range"):
            await ask(f"redis://{place}/99", "GET", "a")
    finally:
        server.stop()


async def test_a_server_that_is_no_redis_is_away() -> None:
    async def web(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(web, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RedisAway, match="not a reply of Redis"):
            await ask(f"redis://127.0.0.1:{port}", "PING")
