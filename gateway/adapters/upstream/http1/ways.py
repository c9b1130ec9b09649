"""The way to each server: straight over connections of our own, or through aiohttp where a proxy or a certificate of
one's own is asked for. The certificates that are trusted are those that `SSL_CERT_FILE` names, else certifi's.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import aiohttp
import certifi
import yarl

from gateway.adapters.upstream.http1.pool import Http1Reply
from gateway.core.pool.ways import DIRECT, Detour, Proxies, proxy_problem, shown, with_scheme
from gateway.core.pool.workers import ANTHROPIC_URL, WorkerSpec
from gateway.errors import ConfigError

CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Way:
    """How a URL is reached. `why`: in a few words, for people; it holds no password."""

    tls: ssl.SSLContext
    proxy: yarl.URL | None = None
    auth: str | None = None  # of the proxy: the value of its header
    is_plain: bool = True  # over connections of our own
    tunnels: bool = True  # the proxy passes on a connection, of which it sees nothing
    why: str = DIRECT

    def headers(self, *, tunnels: bool) -> dict[str, str]:
        """What the proxy is sent, before it `tunnels` a connection or with the request that it passes on."""
        return {"proxy-authorization": self.auth} if self.auth and tunnels == self.tunnels else {}


class Ways:
    """The ways that an environment gives, and those of workers whose entries say more. Raises ConfigError for
    certificates that cannot be read, here as in `of`."""

    def __init__(self, environ: Mapping[str, str] = NOTHING) -> None:
        self._proxies = Proxies.of(environ)
        variable = next((name for name in CA_VARIABLES if environ.get(name)), None)
        self._why_trusted = f", trusting {variable}" if variable else ""
        self._contexts: dict[tuple[object, ...], ssl.SSLContext] = {}
        self.tls = self._context(Detour(ca_file=environ[variable] if variable else None), variable or "ca_file")
        self._known: dict[tuple[str, Detour], Way] = {}

    def of(self, url: str, detour: Detour = Detour()) -> Way:  # noqa: B008 - immutable
        """The way to a URL. Raises ConfigError."""
        way = self._known.get((url, detour))
        if way is None:
            way = self._known[url, detour] = self._made(url, detour)
        return way

    def of_worker(self, worker: WorkerSpec, secrets: Mapping[str, str]) -> Way:
        """The way to a worker. `secrets`: those of the pool file. Raises ConfigError."""
        proxy = secrets.get(f"{worker.name} proxy", worker.proxy)
        url = worker.url or (ANTHROPIC_URL if worker.speaks_messages else "")
        return self.of(url, worker.detour._replace(proxy=proxy))

    def _made(self, url: str, detour: Detour) -> Way:
        own = bool(detour.ca_file or detour.client_cert)
        tls = self._context(detour, "ca_file") if own else self.tls
        proxy, source = detour.proxy, "proxy"
        if proxy is None and (named := self._proxies.of_url(url)) is not None:
            proxy, source = named
        notes = [f"its own {name}" for name in ("ca_file", "client_cert") if getattr(detour, name)]
        trust = f", with {' and '.join(notes)}" if notes else self._why_trusted if url.startswith("https") else ""
        if proxy is None or proxy == DIRECT:
            return Way(tls, is_plain=not own, why=DIRECT + trust)
        proxy = with_scheme(proxy)
        if problem := proxy_problem(proxy):
            raise ConfigError(f"{source}: {problem}, or list the host in NO_PROXY")
        parsed = yarl.URL(proxy)
        user = f"{parsed.user or ''}:{parsed.password or ''}".encode()
        auth = f"Basic {base64.b64encode(user).decode()}" if len(user) > 1 else None
        why = f"by {shown(proxy)} ({source}){trust}"
        return Way(tls, parsed.with_user(None), auth, is_plain=False, tunnels=url.startswith("https"), why=why)

    def _context(self, detour: Detour, name: str) -> ssl.SSLContext:
        """The TLS context; one for equal files. Raises ConfigError."""
        files = [each for each in detour[1:] if each]
        try:
            key = (detour[1:], *(Path(each).stat().st_mtime_ns for each in files))
            if (context := self._contexts.get(key)) is None:
                context = self._contexts[key] = tls_context(detour)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            where = ", ".join(files)
            raise ConfigError(f"{name}: {where} cannot be used: {_reason(error)}; it must be in PEM") from None
        return context


def tls_context(detour: Detour) -> ssl.SSLContext:
    """A context with the files of a detour. Raises OSError, ValueError."""
    ca = detour.ca_file or certifi.where()
    is_directory = Path(ca).is_dir()
    context = ssl.create_default_context(cafile=None if is_directory else ca, capath=ca if is_directory else None)
    context.set_alpn_protocols(["http/1.1"])
    if detour.client_cert:
        context.load_cert_chain(detour.client_cert, detour.client_key)
    return context


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)[:200]


class HandedOver(Http1Reply):
    """A reply of aiohttp."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:  # in place of a connection of our own
        self._response = response
        self.status_code = response.status
        headers: dict[str, str] = {}
        for name, value in response.headers.items():
            headers.setdefault(name.lower(), value)
        self.headers: Mapping[str, str] = headers

    async def next_raw(self, until_s: float) -> bytes:
        """See `Http1Reply.next_raw`."""
        content = self._response.content
        if content.at_eof():
            return b""
        async with asyncio.timeout_at(until_s):
            return await content.readany()

    def gather(self) -> None:
        """Do nothing: aiohttp wakes its reader with each piece."""

    def take_raw(self) -> bytes:
        """See `Http1Reply.take_raw`."""
        content = self._response.content
        return content.read_nowait() if content.exception() is None else b""

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        """Yield the body in the pieces that come."""
        async for piece in self._response.content.iter_any():
            yield piece

    async def aclose(self) -> None:
        """`release`, for `aclosing`."""
        self.release()

    def release(self) -> None:
        """Release the connection; one whose reply was not read to its end is closed. Idempotent."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()
