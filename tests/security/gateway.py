"""A whole gateway in this process: real PostgreSQL, Redis, journal and sockets.

One server behind it plays conductor and workers, by script. It runs in a thread of its own, so that one
gateway serves many tests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from gateway.cli.process.keyring import administration
from gateway.cli.process.listeners import Listener, bind, url
from gateway.config import settings as config
from gateway.config.settings import Services
from gateway.service.admin.keys import KeyAdmin
from gateway.wiring.build import Bundle, build
from tests.redis_server import RedisServer
from tests.upstreams.server import Reply, Request, Server, event, event_stream, json_reply
from tests.waiting import wait_until

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
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
T = TypeVar("T")
log = logging.getLogger("tests.security")


class Upstream:
    """Conductor and workers. `plan` and `reply` answer a request body; `calls` are (model, body)."""

    def __init__(self) -> None:
        self.server = Server(self._answer)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.reset()

    def reset(self) -> None:
        """Answer as at first, and forget the calls."""
        self.plan: Callable[[dict[str, Any]], str] = lambda body: PLAN
        self.reply: Callable[[dict[str, Any]], Reply | str] = lambda body: "42"
        self.calls.clear()

    def _answer(self, request: Request) -> Reply:
        if request.method == "GET":  # whether it is ready
            return json_reply({"object": "list", "data": [{"id": "conductor", "object": "model"}]})
        body = request.body
        self.calls.append((body["model"], body))
        reply = self.plan(body) if body["model"] == "conductor" else self.reply(body)
        if isinstance(reply, Reply):
            return reply
        return _streamed(reply) if body.get("stream") else json_reply(_whole(reply))


def _whole(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        **{"id": "c", "object": "chat.completion", "created": 1, "model": "m"},
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": USAGE,
    }


def _streamed(text: str) -> Reply:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    deltas = [({"role": "assistant", "content": text}, None), ({}, "stop")]
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]} for delta, reason in deltas
    ]
    return event_stream(map(event, [*chunks, {**head, "choices": [], "usage": USAGE}, "[DONE]"]))


class Gateway:
    """The running gateway, seen from outside. `run` carries a coroutine out in its loop."""

    def __init__(self, place: Path, database_url: str, redis: RedisServer, **settings: Any) -> None:
        self.place, self.database_url, self.redis = place, database_url, redis
        self.given = settings
        self.upstream = Upstream()
        self.loop = asyncio.new_event_loop()
        self.failure: BaseException | None = None  # what ended the loop before its time
        self.public = self.admin = ""
        self.bundle: Bundle | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry `work` out in the loop, within a minute. Raises RuntimeError where the loop has ended."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        wait_until(lambda: future.done() or not self.loop.is_running(), 60)
        if not future.done():
            raise RuntimeError(f"the gateway's loop has ended: {self.failure!r}")
        return future.result()

    def serve(self) -> None:
        """Run the loop until it is stopped."""
        try:
            self.loop.run_forever()
        except BaseException as error:  # boundary: whoever waits for the loop is told
            self.failure = error
            raise

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
        server = await self.upstream.server.__aenter__()
        base = f"{server.url}/v1"
        pool = self.place / "pool.yaml"
        pool.write_text(POOL.format(url=base))
        given: dict[str, Any] = {
            **{"data_dir": self.place / "data", "pool": pool, "conductor": f"{base}#conductor"},
            **{"conductor_input_usd_per_mtok": 0, "conductor_output_usd_per_mtok": 0},
            **{"conductor_structured": "json_object", "key_cache_s": 0, "caps_wall_s_max": 20, "drain_s": 1},
            **{"default_policy": "conductor", "conductor_rounds": 1},
            "redis_timeout_s": 5,
            "body_bytes_max": 10 << 20,  # what is promised of monsters is of bodies up to this size
            "ship_process": False,  # a child is started from the main thread
            **self.given,
        }
        settings = config.load(**given)
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        services = Services(
            *(self.database_url, self.redis.url, pool, PEPPER),
            conductor_url=base,
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
        await self.upstream.server.__aexit__(None)


@contextmanager
def running(gateway: Gateway) -> Iterator[Gateway]:
    """The gateway, up in its thread, and down afterwards."""
    thread = threading.Thread(target=gateway.serve, name="gateway", daemon=True)
    thread.start()
    wait_until(gateway.loop.is_running)
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
