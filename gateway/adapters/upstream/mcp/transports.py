"""How an MCP server is reached: a program over stdio on a leash, or streamable HTTP; both bounded in bytes.

A program gets a session of its own and the death signal of the kernel, so that it ends with the gateway, even with a
killed one. Its lines are bounded, bytes that are no UTF-8 are replaced, and what is no message is skipped; a program
that writes without end is ended. Replies over HTTP are bounded, redirects leave the server's origin never.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from gateway.adapters.upstream.http1.ways import Way

LEASH = Path(__file__).resolve().parents[2] / "host" / "leash.py"
LINE_BYTES_MAX = 4 << 20  # of one message of a program
REPLY_BYTES_MAX = 4 << 20  # of one reply over HTTP
EVENT_BYTES_MAX = 1 << 20  # of one event of a stream over HTTP
MESSAGES_MAX = 10_000  # of a program between two of ours
WORDS_LINES_MAX = 5  # of stderr, for the line that says why a program ended
LINE_CHARS_MAX = 300
END_S = 1.0  # that a program has to end once its input is closed
CONNECT_S = 10.0


@dataclass(slots=True)
class Program:
    """A server over stdio. `words`: the end of what it wrote to stderr; `fault`: why the gateway ended it."""

    command: Sequence[str]
    env: Mapping[str, str]
    words: deque[str] = field(default_factory=lambda: deque(maxlen=WORDS_LINES_MAX))
    fault: str = ""
    on_end: Callable[[], None] = lambda: None  # called when its output ends
    unanswered: int = 0  # messages since our last one

    @asynccontextmanager
    async def transport(self) -> AsyncIterator[tuple[Any, Any]]:
        """The streams of a new process, which is gone when this ends. Raises OSError where it does not start."""
        process = await self._start()
        read_writer, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write_stream, write_reader = anyio.create_memory_object_stream[SessionMessage](0)
        tasks = [
            asyncio.create_task(self._read(process, read_writer)),
            asyncio.create_task(self._write(process, write_reader, read_writer)),
            asyncio.create_task(self._listen(process)),
        ]
        try:
            yield read_stream, write_stream
        finally:
            for stream in (read_stream, write_stream, read_writer, write_reader):
                stream.close()
            try:
                await _end(process)
            finally:
                _kill(process)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await _drain(process)

    async def _start(self) -> asyncio.subprocess.Process:
        self.words.clear()
        self.fault, self.unanswered = "", 0
        env = get_default_environment() | {"LC_ALL": "C.UTF-8"} | dict(self.env)
        program = shutil.which(self.command[0], path=env.get("PATH"))
        if program is None:
            raise FileNotFoundError(f"there is no program {self.command[0]}")
        leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), str(int(signal.SIGKILL)), "-"]
        return await asyncio.create_subprocess_exec(
            *leash,
            program,
            *self.command[1:],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,
            limit=LINE_BYTES_MAX,
        )

    async def _read(self, process: asyncio.subprocess.Process, to: Any) -> None:
        """Pass on each message. Ends where the program does, or writes too much."""
        assert process.stdout is not None  # noqa: S101 - asked for above
        with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async with to:
                try:
                    while line := await process.stdout.readline():
                        self.unanswered += 1
                        if self.unanswered > MESSAGES_MAX:
                            self.fault = f"it wrote over {MESSAGES_MAX} lines that nobody asked for"
                            break
                        message = _message(line)
                        if message is not None:
                            await to.send(message)
                except ValueError:  # of asyncio: a line over the limit
                    self.fault = f"it wrote a line over {LINE_BYTES_MAX} bytes"
        if self.fault:
            _kill(process)
        self.on_end()

    async def _write(self, process: asyncio.subprocess.Process, messages: Any, to: Any) -> None:
        assert process.stdin is not None  # noqa: S101 - asked for above
        try:
            async with messages:
                async for message in messages:
                    self.unanswered = 0
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    process.stdin.write(text.encode("utf-8", "replace") + b"\n")
                    await process.stdin.drain()
        except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
            to.close()  # the session sees that the connection ended

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Remember the end of what it writes to stderr."""
        assert process.stderr is not None  # noqa: S101 - asked for above
        while part := await process.stderr.read(LINE_BYTES_MAX):
            lines = part[-WORDS_LINES_MAX * LINE_CHARS_MAX :].decode("utf-8", "replace").splitlines()
            self.words.extend(line.strip()[:LINE_CHARS_MAX] for line in lines if line.strip())


def _message(line: bytes) -> SessionMessage | None:
    """The message of a line; None for what is none, such as a banner on stdout."""
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line.decode("utf-8", "replace"), by_name=False))
    except (ValueError, RecursionError):
        return None


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close its input, and wait a moment for it to end by itself."""
    assert process.stdin is not None  # noqa: S101 - asked for above
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Read what a killed program left in its pipes, so that they close. One that a child of it holds open is left."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            for pipe in (process.stdout, process.stderr):
                while pipe is not None and await pipe.read(LINE_BYTES_MAX):
                    pass
            await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill it and what it started; nothing where it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


# ---------------------------------------------------------------- streamable HTTP


@asynccontextmanager
async def http_transport(url: str, key: str | None, way: Way | None = None) -> AsyncIterator[tuple[Any, Any]]:
    """The streams of a server over streamable HTTP. `key`: sent as a bearer token."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    proxy = httpx2.Proxy(str(way.proxy), headers=way.headers(tunnels=True)) if way and way.proxy else None
    bounded = BoundedTransport(httpx2.AsyncHTTPTransport(verify=way.tls if way else True, proxy=proxy))
    timeout = httpx2.Timeout(CONNECT_S, read=None)  # a call is bounded by its own time
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout, transport=bounded, trust_env=False) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=EVENT_BYTES_MAX) as streams,
    ):
        yield streams[0], streams[1]


class BoundedTransport(httpx2.AsyncBaseTransport):
    """Ends a reply that has more bytes than a tool's reply may have; a stream of events is bounded event by event."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The reply, its body bounded. Raises what the transport raises."""
        response = await self._inner.handle_async_request(request)
        if "text/event-stream" not in response.headers.get("content-type", ""):
            assert isinstance(response.stream, httpx2.AsyncByteStream)  # noqa: S101 - of an asynchronous transport
            response.stream = _Bounded(response.stream)
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._inner:
            size += len(part)
            if size > REPLY_BYTES_MAX:
                raise httpx2.ReadError(f"the reply is over {REPLY_BYTES_MAX} bytes")
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()
