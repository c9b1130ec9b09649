"""The ways in which a worker is bad."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncGenerator

from tests.faults.upstream import Behaviour, Bill, Upstream, chunk, completion, usage
from tests.upstreams.server import EVENTS, JSON, Reply, event, event_stream, json_reply

MIB = 2**20


async def hang(upstream: Upstream, bill: Bill) -> Reply:
    await asyncio.sleep(60)
    return Reply()


def status(code: int, **headers: str) -> Behaviour:
    async def behave(upstream: Upstream, bill: Bill) -> Reply:
        bill.prompt_tokens = 0  # an error is not billed
        error = {"message": "no", "type": "x", "param": None, "code": None}
        return json_reply({"error": error}, code, {name.replace("_", "-"): value for name, value in headers.items()})

    return behave


async def reset_midway(upstream: Upstream, bill: Bill) -> Reply:
    async def pieces() -> AsyncGenerator[bytes, None]:
        for word in ("one ", "two "):
            bill.completion_tokens += 1
            yield event(chunk({"content": word}))
        await asyncio.sleep(0.05)

    return Reply(headers=EVENTS, pieces=pieces(), cut=True)


async def dribble(upstream: Upstream, bill: Bill) -> Reply:
    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(60):
            yield b" "
            await asyncio.sleep(1)

    return Reply(headers={**JSON, "content-length": "100000"}, pieces=pieces())


async def bad_events(upstream: Upstream, bill: Bill) -> Reply:
    return event_stream([b"data: {not json\n\n"], cut=True)


async def no_usage(upstream: Upstream, bill: Bill) -> Reply:
    bill.completion_tokens = 2
    body = completion("one two")
    del body["usage"]
    return json_reply(body)


async def over_the_bound(upstream: Upstream, bill: Bill) -> Reply:
    """It bills as far over `max_tokens` as the gateway believes: all of it is charged and reported."""
    bill.completion_tokens = 4 * int(bill.body["max_tokens"])
    return json_reply(completion("one two", usage(bill)))


async def huge(upstream: Upstream, bill: Bill) -> Reply:
    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(100):
            yield b"x" * MIB

    return Reply(pieces=pieces())


async def gzip_bomb(upstream: Upstream, bill: Bill) -> Reply:
    return Reply(gzip.compress(b" " * (200 * MIB), 1), headers={**JSON, "content-encoding": "gzip"})


async def bad_utf8(upstream: Upstream, bill: Bill) -> Reply:
    return Reply(b'{"choices": [{"message": {"content": "\xff\xfe"}}]}')


async def early_end(upstream: Upstream, bill: Bill) -> Reply:
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b'{"choices": ['

    return Reply(headers={**JSON, "content-length": "500"}, pieces=pieces(), cut=True)


WAYS: dict[str, tuple[Behaviour | None, bool]] = {  # how it behaves (None: it refuses connections), streamed
    "refuses connections": (None, False),
    "hangs": (hang, False),
    "429": (status(429, retry_after="0"), False),
    "500": (status(500), False),
    "reset in the stream": (reset_midway, True),
    "a byte a second": (dribble, False),
    "bad events": (bad_events, True),
    "no usage": (no_usage, False),
    "bills over the bound": (over_the_bound, False),
    "100 MiB": (huge, False),
    "gzip bomb": (gzip_bomb, False),
    "redirect to link-local": (status(302, location="http://169.254.169.254/latest"), False),
    "bad UTF-8": (bad_utf8, False),
    "early end": (early_end, False),
}
