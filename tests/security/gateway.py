"""A whole gateway in this process: real PostgreSQL, Redis, journal and sockets.

Behind it one server plays conductor and workers and does what it is told. It runs in a thread of its own, so that one
gateway serves many tests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from aiohttp import web

from gateway.cli.process.keyring import administration
from gateway.cli.process.listeners import Listener, bind, url
from gateway.config import settings as config
from gateway.config.settings import Services
from gateway.service.admin.keys import KeyAdmin
from gateway.wiring.build import Bundle, build
from tests.servers import RedisServer

PEPPER = b"pepper-for-tests-0123456789"
PROVIDER_KEY = "provider-key-5e1f0c2b9a"
PLAN = json.dumps({"steps": [{"worker": "atlas", "task": None, "see": []}]})
POOL = """
workers:
  - {{name: alpha, handle: atlas, kind: openai, model: alpha, url: "{url}", api_key: "env:PROVIDER_KEY",
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}, output_tokens_max: 256}}
  - {{name: beta, handle: birch, kind: openai, model: beta, url: "{url}", api_key: "env:PROVIDER_KEY",
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}, output_tokens_max: 256}}
  - {{name: dear, handle: drum, kind: openai, model: dear, url: "{url}", api_key: "env:PROVIDER_KEY",
     price: {{input_usd_per_mtok: 1000, output_usd_per_mtok: 2000}}, output_tokens_max: 256}}
  - {{name: self, handle: echo, kind: self, price: {{input_usd_per_mtok: 0, output_usd_per_mtok: 0}}}}
pools: {{main: [alpha, beta, self], all: [alpha, beta, dear, self]}}
default: main
"""
T = TypeVar("T")
log = logging.getLogger("tests.security")


@dataclass
class Behind:
    """Conductor and workers. `plan` and `reply` say what is answered to a request body; `seen` is (model, body)."""

    plan: Callable[[dict[str, Any]], str] = lambda body: PLAN
    reply: Callable[[dict[str, Any]], web.Response | str] = lambda body: "42"
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    url: str = ""

    def reset(self) -> None:
        """As it was at first."""
        fresh = Behind()
        self.plan, self.reply = fresh.plan, fresh.reply
        self.seen.clear()

    async def serve(self) -> web.AppRunner:
        """Listen on a free loopback port."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.seen.append((body["model"], body))
        said = self.plan(body) if body["model"] == "conductor" else self.reply(body)
        if isinstance(said, web.Response):
            return said
        return await _streamed(request, said) if body.get("stream") else web.json_response(_whole(said))


def _whole(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        **{"id": "c", "object": "chat.completion", "created": 1, "model": "m"},
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }


async def _streamed(request: web.Request, text: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    deltas = [({"role": "assistant", "content": text}, None), ({}, "stop")]
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": ended}]} for delta, ended in deltas
    ]
    for chunk in [*chunks, {**head, "choices": [], "usage": usage}]:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


class Gateway:
    """The running gateway, seen from outside. `run` carries a coroutine out in its loop."""

    def __init__(self, place: Path, database_url: str, redis: RedisServer, **settings: Any) -> None:
        self.place, self.database_url, self.redis = place, database_url, redis
        self.given = settings
        self.behind = Behind()
        self.loop = asyncio.new_event_loop()
        self.public = self.admin = ""
        self.bundle: Bundle | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def key(self, key_class: str = "data", **fields: Any) -> tuple[str, str]:
        """(public id, secret) of a new key."""
        return self.run(self._key(key_class, fields))

    async def _key(self, key_class: str, fields: dict[str, Any]) -> tuple[str, str]:
        pools = {"main": ["alpha", "beta", "self"], "all": ["alpha", "beta", "dear", "self"]}
        async with administration(self.database_url) as office:
            admin = KeyAdmin(office.store, {1: PEPPER}, office.clock, pools)
            row, secret = await admin.create_key(fields.pop("name", "app"), key_class, **fields)
        return row.public_id, secret

    def client(self, secret: str | None = None, *, admin: bool = False, **more: Any) -> httpx.Client:
        """An HTTP client of one of the listeners."""
        headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
        return httpx.Client(base_url=self.admin if admin else self.public, headers=headers, timeout=120, **more)

    def openapi(self, *, admin: bool) -> dict[str, Any]:
        """What a listener says of its routes."""
        with self.client(admin=admin) as http:
            found: dict[str, Any] = http.get("/openapi.json").json()
        return found

    async def up(self) -> None:
        self._behind = await self.behind.serve()
        pool = self.place / "pool.yaml"
        pool.write_text(POOL.format(url=self.behind.url))
        given: dict[str, Any] = {
            **{"data_dir": self.place / "data", "pool": pool, "conductor": f"{self.behind.url}#conductor"},
            **{"conductor_input_usd_per_mtok": 0, "conductor_output_usd_per_mtok": 0},
            **{"conductor_structured": "json_object", "key_cache_s": 0, "caps_wall_s_max": 20, "drain_s": 1},
            "redis_timeout_s": 5,
            **self.given,
        }
        settings = config.load(**given)
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        services = Services(
            *(self.database_url, self.redis.url, pool, PEPPER),
            conductor_url=self.behind.url,
            conductor_model="conductor",
        )
        self.bundle = await build(settings, services)
        await self.bundle.start()
        self._listeners = []
        for app in (self.bundle.public, self.bundle.admin):
            sock = bind("127.0.0.1", 0, strict=False)
            listener = Listener(app, sock, drain_s=1.0, head_bytes_max=settings.header_bytes_max)
            await listener.open()
            self._listeners.append(listener)
        self.public, self.admin = (url(listener.sock) for listener in self._listeners)

    async def down(self) -> None:
        for listener in self._listeners:
            await listener.close()
        assert self.bundle is not None
        await self.bundle.stop()
        await self._behind.cleanup()


@contextmanager
def running(gateway: Gateway) -> Iterator[Gateway]:
    """The gateway, up in its thread, and down afterwards."""
    thread = threading.Thread(target=gateway.loop.run_forever, name="gateway", daemon=True)
    thread.start()
    gateway.run(gateway.up())
    try:
        yield gateway
    finally:
        gateway.run(gateway.down())
        gateway.loop.call_soon_threadsafe(gateway.loop.stop)
        thread.join(10)
        gateway.loop.close()


def ask(text: str = "What is 6 times 7?", **fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "baton/conductor", "messages": [{"role": "user", "content": text}], **fields}
