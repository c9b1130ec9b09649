"""An HTTP proxy on loopback: tunnels by CONNECT, and forwards requests whose target is a whole URL. Names ending in
`.test` are this machine. `asked`: what it was asked for, in order."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urlsplit

HEAD_BYTES_MAX = 65_536


class Proxy:
    """Serves while its block lasts. `user`: `name:password` that it asks for."""

    def __init__(self, user: str | None = None) -> None:
        self._wanted = None if user is None else "Basic " + base64.b64encode(user.encode()).decode()
        self.asked: list[str] = []
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._one(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self.asked.append(f"{method} {target}")
        if self._wanted is not None and headers.get("proxy-authorization") != self._wanted:
            writer.write(b"HTTP/1.1 407 Who are you\r\nproxy-authenticate: Basic\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            return
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host = "127.0.0.1" if (parts.hostname or "").endswith(".test") else parts.hostname
        there, away = await asyncio.open_connection(host, parts.port or 80)
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
            else:
                path = parts.path + (f"?{parts.query}" if parts.query else "")
                own = [line for line in lines[1:] if not line.lower().startswith("proxy-")]
                away.write("\r\n".join([f"{method} {path} HTTP/1.1", *own]).encode("latin-1"))
            await _first_of(_copy(reader, away), _copy(there, writer))
        finally:
            away.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(HEAD_BYTES_MAX):
        writer.write(data)
        await writer.drain()


async def _first_of(*works: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
