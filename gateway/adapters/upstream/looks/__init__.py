"""Looks at workers from outside: whether each is there, takes its key, and lists its model. It costs no tokens.

A server of models is asked for its list, a tool for the head of its page. Vendors that LiteLLM calls are asked where
their lists are known.
"""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx

from gateway.adapters.upstream.client import http_client
from gateway.adapters.upstream.http1.ways import Ways
from gateway.adapters.upstream.replies import TRANSPORT, bounded_body, reading_error
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import ConfigError, UpstreamError
from gateway.service.ports.pools import Sight, WorkerLooks

LOOK_S = 10.0
LIST_BYTES_MAX = 8 << 20
NAME_CHARS_MAX = 80


class Vendor(NamedTuple):
    """Where a vendor lists its models, and how it takes the key."""

    url: str
    header: str = "authorization"
    prefix: str = "Bearer "
    own: Mapping[str, str] = MappingProxyType({})


VENDORS: Mapping[str, Vendor] = {  # by LiteLLM's name
    "anthropic": Vendor("https://api.anthropic.com/v1/models", "x-api-key", "", {"anthropic-version": "2023-06-01"}),
    "gemini": Vendor("https://generativelanguage.googleapis.com/v1beta/models?pageSize=1000", "x-goog-api-key", ""),
    "openai": Vendor("https://api.openai.com/v1/models"),
    "mistral": Vendor("https://api.mistral.ai/v1/models"),
    "groq": Vendor("https://api.groq.com/openai/v1/models"),
    "deepseek": Vendor("https://api.deepseek.com/models"),
    "openrouter": Vendor("https://openrouter.ai/api/v1/models"),
    "together_ai": Vendor("https://api.together.xyz/v1/models"),
    "xai": Vendor("https://api.x.ai/v1/models"),
    "cohere": Vendor("https://api.cohere.com/v1/models"),
    "fireworks_ai": Vendor("https://api.fireworks.ai/inference/v1/models"),
    "cerebras": Vendor("https://api.cerebras.ai/v1/models"),
}


class HttpLooks(WorkerLooks):
    """`places` maps `local:` URLs to where this gateway serves them."""

    def __init__(self, ways: Ways, places: Mapping[str, str] = MappingProxyType({})) -> None:
        self._ways, self._places = ways, places
        self._client = http_client(16, ways)

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def look(self, worker: WorkerSpec, secrets: Mapping[str, str]) -> Sight | None:
        """See `WorkerLooks.look`."""
        try:
            asked = self._request(worker, secrets)
            return None if asked is None else await self._ask(worker, asked)
        except (ConfigError, httpx.InvalidURL) as error:
            return Sight(worker.name, "bad", str(error), _FIX)

    async def _ask(self, worker: WorkerSpec, request: httpx.Request) -> Sight:
        host = request.url.netloc.decode()
        try:
            async with asyncio.timeout(LOOK_S):
                response = await self._client.send(request, stream=True)
                try:
                    body = await bounded_body(response, LIST_BYTES_MAX)
                finally:
                    await response.aclose()
        except TimeoutError:
            return Sight(worker.name, "bad", f"{host} did not answer within {LOOK_S:g} s", _FIX)
        except (*TRANSPORT, UpstreamError) as error:
            told = error if isinstance(error, UpstreamError) else reading_error(error)
            what = told.message.removeprefix("the worker ").replace("cannot be reached", f"{host} cannot be reached")
            return Sight(worker.name, "bad", what + _cause(error), _FIX)
        return _sight(worker, host, response.status_code, body)

    def _request(self, worker: WorkerSpec, secrets: Mapping[str, str]) -> httpx.Request | None:
        """The request that costs nothing; None where none is known. Raises ConfigError."""
        url, provider = self._places.get(worker.url or "", worker.url or ""), (worker.model or "").partition("/")[0]
        vendor = VENDORS.get(provider) if worker.kind == "litellm" else Vendor(f"{url}/models")
        if worker.kind == "tool" and url.startswith("http"):
            vendor = Vendor(url)
        elif worker.kind not in ("openai", "litellm") or vendor is None or url.startswith("local:"):
            return None
        elif worker.kind == "litellm" and url:
            own = url.removesuffix("/messages").removesuffix("/v1") + "/v1" if provider == "anthropic" else url
            vendor = vendor._replace(url=f"{own}/models")
        headers = {"accept-encoding": "identity", **vendor.own}
        if key := secrets.get(worker.name):
            headers[vendor.header] = vendor.prefix + key
        method = "HEAD" if worker.kind == "tool" else "GET"
        way = self._ways.of_worker(worker, secrets) if any(worker.detour) else None
        return self._client.build_request(method, vendor.url, headers=headers, extensions={"way": way})


_FIX = "check its `url`, and the way to it (proxy, certificates: docs/ways.md)"


def _cause(error: BaseException) -> str:
    """What the system says of a failed connection."""
    cause = error.__cause__ or error
    words = " ".join(str(getattr(cause, "os_error", None) or cause).split())[:120]
    return f" ({words})" if words and "://" not in words else ""


def _sight(worker: WorkerSpec, host: str, status: int, body: bytes) -> Sight:
    name, ref = worker.name, worker.api_key
    if status in (401, 403):
        fix = f"put a key of {host} into `{ref}`" if ref else "name its key: `api_key: env:NAME`"
        who = f"the key of `{ref}`" if ref else "calls without a key"
        return Sight(name, "bad", f"{host} refuses {who} ({status})", fix)
    if status == 407:
        return Sight(name, "bad", "its proxy asks for a user and a password (407)", "`proxy: env:NAME` holds both")
    if worker.kind == "tool":
        return Sight(name, "ok", f"{host} is there")
    if status >= 500 or status in (402, 429):
        return Sight(name, "warn", f"{host} answers {status}", "its status page, or its bill, says more")
    names = _names(body) if status == 200 else []
    if not names:
        return Sight(name, "ok", f"{host} is there; it lists no models, so key and model are unknown")
    model = (worker.model or "").partition("/")[2] if worker.kind == "litellm" else worker.model or ""
    if model in names:
        return Sight(name, "ok", f"{host} has {model}")
    near = difflib.get_close_matches(model, names, n=1) or names[:1]
    fix = f"{len(names)} are listed, such as `{near[0][:NAME_CHARS_MAX]}`"
    return Sight(name, "warn", f"{host} does not list {model}", fix)


def _names(body: bytes) -> list[str]:
    """The names in a list of models, of OpenAI's, Gemini's or Cohere's shape."""
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError):
        return []
    entries = value if isinstance(value, list) else None
    if isinstance(value, dict):
        entries = next((value[key] for key in ("data", "models") if isinstance(value.get(key), list)), None)
    names = [entry.get("id") or entry.get("name") for entry in entries or () if isinstance(entry, dict)]
    return [name.removeprefix("models/") for name in names if isinstance(name, str)]
