"""MCP servers: one connection each, kept by a task; the tools they offer; calls of them.

A server that is not there at the start, that dies or that hangs is tried again with growing pauses; until then its
tools are not offered, and calls of them never leave. What a call answers is text, bounded; pictures and sound are named
and left out. Only a tool that reads, or that may be repeated, raises an error that allows another try once the call
has left.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import mcp_types as types
from mcp import Client, MCPError

from gateway.adapters.upstream.http1.ways import Way
from gateway.adapters.upstream.mcp.transports import LINE_CHARS_MAX, Program, http_transport
from gateway.core.pool.tools import ListedTool, Offer, Tool, ToolSpec, offer_of
from gateway.core.pool.workers import WorkerSpec, is_reference
from gateway.errors import UpstreamError, UpstreamProtocol, UpstreamRefused, UpstreamTimeout

START_S = 30.0  # to connect and to list the tools
WAIT_S = 10.0  # that a start, or a reload of the pool, waits for a server; it goes on without
PAUSE_FIRST_S, PAUSE_S_MAX = 0.5, 60.0
CLOSE_S = 5.0  # that a connection has to end before it is cancelled
RELIST_S = 300.0  # between two readings of a server's list, beside those that it asks for
TIMEOUTS_MAX = 3  # calls in a row without an answer, before the connection is made anew
PAGES_MAX, LISTED_MAX = 20, 2_000
RESULT_CHARS_MAX = 16_384
ERROR_CHARS_MAX = 500
CLIENT_VERSION = "1"  # as servers are told; nothing follows from it
T = TypeVar("T")
log = logging.getLogger("gateway")


class Server:
    """The connection to the server of one worker. Start it in the thread of the event loop."""

    def __init__(self, spec: WorkerSpec, secrets: Mapping[str, str], way: Way | None = None) -> None:
        self.name = spec.name
        self.problem = "it has not answered yet"  # why nothing is offered; empty where it is connected
        self.offer = Offer()
        self.spawns = 0  # connections so far
        self._wanted: Mapping[str, ToolSpec] = spec.tools
        self._url, self._key, self._way = spec.url, secrets.get(spec.name), way
        env = {
            name: secrets.get(f"{spec.name} {name}", "") if is_reference(value) else value
            for name, value in spec.env.items()
        }
        self._program = Program(spec.command, env) if spec.command else None
        self._digests: dict[str, str] = {}
        self._client: Client | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # the first attempt has ended
        self._lost = asyncio.Event()
        self._changed = asyncio.Event()
        self._timeouts = 0
        self._since_s: float | None = None  # when it connected last, by the clock of the event loop
        self._closing = False
        if self._program is not None:
            self._program.on_end = self._lost.set

    async def start(self) -> None:
        """Connect; return when the tools are read, when that failed, or after WAIT_S. It goes on trying."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name=f"mcp {self.name}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), WAIT_S)

    async def close(self) -> None:
        """End the connection, and the program."""
        keeper, self._keeper = self._keeper, None
        self._closing = True
        self._lost.set()
        while keeper is not None and not keeper.done():
            if self._client is None:  # it connects, or waits
                keeper.cancel()
            await asyncio.wait({keeper}, timeout=CLOSE_S)
            self._client = None

    async def call(self, tool: Tool, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """What a tool answers, as text. Raises UpstreamRefused where the tool says that it failed, UpstreamError and
        its children where no answer came."""
        client = self._client
        if client is None:
            problem = f"worker {self.name}: its MCP server is not there: {self.problem}"
            raise UpstreamError(problem, dispatched=False, retryable=True, code="tool_unavailable")
        try:
            async with asyncio.timeout(timeout_s):
                result = await client.call_tool(tool.name, dict(arguments))
        except TimeoutError:
            self._timeouts += 1
            if self._timeouts >= TIMEOUTS_MAX:
                self._lost.set()
            problem = f"worker {self.name}: tool {tool.name} did not answer within {timeout_s:.2g} s"
            raise UpstreamTimeout(problem, retryable=tool.repeatable) from None
        except MCPError as error:
            raise self._failed(tool, error) from None
        except Exception as error:  # boundary: a library between us and somebody else's program
            self._lost.set()
            problem = f"worker {self.name}: tool {tool.name} gave no valid answer ({type(error).__name__})"
            raise UpstreamProtocol(problem, retryable=tool.repeatable) from None
        self._timeouts = 0
        text = result_text(result)
        if result.is_error:
            raise UpstreamRefused(f"tool {tool.name} failed: {text[:ERROR_CHARS_MAX]}", code="tool_failed")
        return text

    def _failed(self, tool: Tool, error: MCPError) -> UpstreamError:
        if error.code == types.CONNECTION_CLOSED:
            self._lost.set()
            why = self._program.fault if self._program else ""
            problem = f"worker {self.name}: its MCP server hung up during {tool.name}{f': {why}' if why else ''}"
            return UpstreamProtocol(problem, retryable=tool.repeatable)
        if error.code == types.METHOD_NOT_FOUND or error.code == types.INVALID_PARAMS:
            self._changed.set()  # perhaps its list is another by now
        return UpstreamRefused(f"tool {tool.name} failed: {error.message[:ERROR_CHARS_MAX]}", code="tool_failed")

    # ------------------------------------------------------------ the connection

    async def _keep(self) -> None:
        """Connect, and again after each loss. Pauses grow until a connection has lasted for longer than the longest: a
        server that answers and dies at once is started no more often than one that never answers."""
        pause_s, now_s = PAUSE_FIRST_S, asyncio.get_running_loop().time
        while not self._closing:
            self._since_s = None
            try:
                await self._connected()
            except Exception as error:  # boundary: whatever a server does, it is tried again
                self.problem = self._why(error)
            finally:
                self._client, self.offer = None, Offer()
                self._settled.set()
            if self._closing:  # a library may answer a cancellation by another error
                return
            if self._since_s is not None and now_s() - self._since_s > PAUSE_S_MAX:
                pause_s = PAUSE_FIRST_S
            log.warning("MCP server %s: %s; trying again in %g s", self.name, self.problem, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _connected(self) -> None:
        """Serve one connection until it is lost. Raises what connecting raises."""
        self._lost.clear()
        self._changed.clear()
        self._timeouts = 0
        self.spawns += 1
        info = types.Implementation(name="baton", version=CLIENT_VERSION)
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(START_S):
                client = await stack.enter_async_context(self._open(info))
            self.offer = await asyncio.wait_for(self._read_offer(client), START_S)
            self._client, self.problem = client, ""
            self._since_s = asyncio.get_running_loop().time()
            self._settled.set()
            for line in self.offer.problems:
                log.warning("MCP server %s: %s", self.name, line)
            while not self._lost.is_set():
                await _first_of(self._lost.wait(), self._changed.wait(), RELIST_S)
                if not self._lost.is_set():
                    self._changed.clear()
                    self.offer = await asyncio.wait_for(self._read_offer(client), START_S)
        self.problem = self._why(None)

    def _open(self, info: types.Implementation) -> Client:
        by_url = partial(http_transport, self._url or "", self._key, self._way)
        transport = self._program.transport() if self._program else by_url()
        return Client(transport, client_info=info, cache=None, message_handler=self._hear)

    async def _hear(self, message: Any) -> None:
        """Note that the list of tools is another one; and that the connection is gone."""
        if isinstance(message, types.ToolListChangedNotification):
            self._changed.set()
        elif isinstance(message, Exception):
            self._lost.set()

    async def _read_offer(self, client: Client) -> Offer:
        """What the server offers of the tools that the pool file lists."""
        tools = await _listed(client)
        for tool in tools:
            if tool.name in self._wanted:
                self._digests.setdefault(tool.name, tool.digest)
        return offer_of(self._wanted, tools, self._digests)

    def _why(self, error: BaseException | None) -> str:
        """Why there is no connection, in one line."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            what = f"no answer within {START_S:g} s"
        else:
            what = "the connection was lost" if error is None else f"{error}" or type(error).__name__
        if self._program is not None:
            words = self._program.fault or " | ".join(self._program.words)
            what += f" ({words})" if words else ""
        return " ".join(what.split())[: 2 * LINE_CHARS_MAX]


async def _first_of(one: Awaitable[Any], other: Awaitable[Any], seconds: float) -> None:
    """Wait for either, and no longer than this."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _listed(client: Client) -> list[ListedTool]:
    """All tools of a server, page by page, bounded."""
    listed: list[ListedTool] = []
    cursor: str | None = None
    for _ in range(PAGES_MAX):
        page = await client.list_tools(cursor=cursor)
        listed += map(_listed_tool, page.tools)
        cursor = page.next_cursor
        if not cursor or len(listed) >= LISTED_MAX:
            break
    return listed[:LISTED_MAX]


def _listed_tool(tool: types.Tool) -> ListedTool:
    hints = tool.annotations
    reads, repeats = (hints.read_only_hint, hints.idempotent_hint) if hints else (None, None)
    return ListedTool(tool.name, tool.description or "", tool.input_schema, reads, repeats)


# ---------------------------------------------------------------- what a tool answers


def result_text(result: types.CallToolResult) -> str:
    """A result as text, cut to RESULT_CHARS_MAX characters with a note. What is no text is named and left out."""
    texts = [_block_text(block) for block in result.content]
    if result.structured_content is not None and not any(isinstance(one, types.TextContent) for one in result.content):
        texts.append(json.dumps(result.structured_content, ensure_ascii=False, default=str))
    text = "\n".join(texts).encode("utf-8", "replace").decode()
    if len(text) <= RESULT_CHARS_MAX:
        return text
    return f"{text[:RESULT_CHARS_MAX]}\n(cut: {len(text) - RESULT_CHARS_MAX} more characters)"


def _block_text(block: Any) -> str:
    if isinstance(block, types.TextContent):
        return block.text
    if isinstance(block, types.ImageContent | types.AudioContent):
        return f"({block.mime_type}, {_size(block.data)} bytes, left out)"
    if isinstance(block, types.ResourceLink):
        return f"(resource {block.uri})"
    resource = block.resource
    if isinstance(resource, types.TextResourceContents):
        return resource.text
    return f"(resource {resource.uri}, {_size(resource.blob)} bytes, left out)"


def _size(data: str) -> int:
    with contextlib.suppress(binascii.Error, ValueError):
        return len(base64.b64decode(data))
    return len(data)


# ---------------------------------------------------------------- the servers of a pool


class Servers:
    """The servers of one pool file, by worker name. `ways`: how those with a URL are reached."""

    def __init__(
        self, specs: Sequence[WorkerSpec], secrets: Mapping[str, str], ways: Mapping[str, Way] = MappingProxyType({})
    ) -> None:
        self._servers = {spec.name: Server(spec, secrets, ways.get(spec.name)) for spec in specs}

    async def start(self) -> None:
        """Connect to all of them; return when each has answered or failed, after WAIT_S at most."""
        await self._each(Server.start)

    async def close(self) -> None:
        """End all of them."""
        await self._each(Server.close)

    def tools(self, worker: str) -> tuple[Tool, ...]:
        """The tools of a worker that may be called now."""
        server = self._servers.get(worker)
        return server.offer.tools if server is not None else ()

    def problems(self, worker: str) -> tuple[str, ...]:
        """Why a worker offers nothing, or less than the pool file lists."""
        server = self._servers[worker]
        return (server.problem,) if server.problem else server.offer.problems

    async def call(self, worker: str, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """What a tool answers, as text. Raises UpstreamError and its children."""
        server = self._servers[worker]
        tool = next((tool for tool in server.offer.tools if tool.name == name), None)
        if tool is None and server.problem:
            tool = Tool(name, "", {})  # `Server.call` says that it is not there
        if tool is None:
            raise UpstreamRefused(f"worker {worker} has no tool {name[:128]}", dispatched=False, code="tool_unknown")
        return await server.call(tool, arguments, timeout_s)

    async def _each(self, work: Callable[[Server], Awaitable[T]]) -> None:
        await asyncio.gather(*(work(server) for server in self._servers.values()))
