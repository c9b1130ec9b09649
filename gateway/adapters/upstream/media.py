"""Fetches what parts of messages point at, for hosts that the operator lists and nobody else (threat: SSRF).

A client chooses the URL, so nothing about it is believed. The host must be on the list, letter for letter; its name is
resolved once, every address must be a public one, and the connection goes to that very address under the name's own
certificate. No redirect is followed, no proxy or cookie used; bytes and seconds are bounded, and the bytes must be of
the type they are said to be.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from gateway.core.openai.parts import Kind, Media, MediaPart, as_media, audio_type
from gateway.errors import BadRequest

HTTPS_PORT = 443
CHUNK_BYTES = 65_536
FETCH_CODES: Mapping[Kind, str] = {  # the first is OpenAI's own
    "image": "invalid_image_url",
    "audio": "invalid_media_url",
    "file": "invalid_media_url",
}
_URL = re.compile(r"(?P<scheme>[a-z]+)://(?P<host>[a-z0-9.-]+)(?::(?P<port>[0-9]{1,5}))?(?P<path>[/?][!-~]*)?")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class WebMedia:
    """`ports.MediaSource`. `hosts`: `host` or `host:port`. `resolve`, `admits` and `scheme` are for tests: how a name
    becomes addresses, which addresses are good, and `http` where a test's server has no certificate."""

    def __init__(
        self,
        hosts: Sequence[str] = (),
        *,
        bytes_max: int = 8 << 20,
        timeout_s: float = 10.0,
        fetches_max: int = 16,
        parallel_max: int = 64,
        resolve: Resolve | None = None,
        admits: Callable[[str], bool] | None = None,
        scheme: str = "https",
        tls: Any = True,
    ) -> None:
        self._hosts = frozenset(hosts)
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s
        self._fetches_max = fetches_max
        self._places = asyncio.Semaphore(parallel_max)
        self._resolve = resolve or resolve_by_system
        self._admits = admits or is_public
        self._scheme = scheme
        self._tls = tls

    def check(self, parts: Sequence[MediaPart]) -> None:
        """As `ports.MediaSource.check`."""
        if len(parts) > self._fetches_max:
            raise BadRequest(
                f"at most {self._fetches_max} parts may be URLs", param=parts[0].where, code="too_many_urls"
            )
        for part in parts:
            self._target(part)

    async def fetch(self, part: MediaPart) -> Media:
        """As `ports.MediaSource.fetch`."""
        host, port, url = self._target(part)
        try:
            async with self._places, asyncio.timeout(self._timeout_s):
                addresses = await self._resolve(host, port)
                if not addresses or not all(map(self._admits, addresses)):
                    raise _refused(part, f"`{host}` has no public address")
                return await self._get(part, url, addresses[0])
        except TimeoutError:
            raise _failed(part, f"`{host}` did not answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failed(part, f"`{host}` could not be read ({type(error).__name__})") from None

    def _target(self, part: MediaPart) -> tuple[str, int, str]:
        """(host, port, URL) of a part that may be fetched. Raises BadRequest naming the setting otherwise."""
        parsed = _URL.fullmatch(part.url) if len(part.url) <= 8192 else None
        if parsed is None or parsed["scheme"] != self._scheme:
            raise _refused(part, "the URL is not a plain `https://host/path`")
        host, port = parsed["host"], int(parsed["port"] or HTTPS_PORT)
        listed = host if port == HTTPS_PORT else f"{host}:{port}"
        if listed not in self._hosts:
            raise _refused(
                part, f"`{listed[:128]}` is not among the hosts this gateway fetches from (BATON_MEDIA_HOSTS)"
            )
        return host, port, part.url

    async def _get(self, part: MediaPart, url: str, address: str) -> Media:
        connector = aiohttp.TCPConnector(
            resolver=_Pinned(address), use_dns_cache=False, ssl=self._tls, limit=1, force_close=True
        )
        async with aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, auto_decompress=False
        ) as session:
            headers = {"user-agent": "baton", "accept-encoding": "identity"}
            async with session.get(url, allow_redirects=False, headers=headers) as response:
                if response.status != 200:
                    raise _failed(part, f"it answered {response.status}" + _REDIRECT * (300 <= response.status < 400))
                if response.headers.get("content-encoding", "identity").lower() != "identity":
                    raise _failed(part, "it is compressed, which nobody asked for")
                data = await self._read(part, response)
                return _typed(part, response.headers.get("content-type", ""), data)

    async def _read(self, part: MediaPart, response: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        async for piece in response.content.iter_chunked(CHUNK_BYTES):
            data += piece
            if len(data) > self._bytes_max:
                raise BadRequest(
                    f"`{part.where}` is over {self._bytes_max} bytes", param=part.where, code="media_too_large"
                )
        return bytes(data)


_REDIRECT = "; redirects are never followed"


class _Pinned(AbstractResolver):
    """Answers every question with the one address that was looked at."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The address, for whatever name."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        flags = socket.AI_NUMERICHOST
        return [ResolveResult(hostname=host, host=self._address, port=port, family=family, proto=0, flags=flags)]

    async def close(self) -> None:
        """Nothing to close."""


async def resolve_by_system(host: str, port: int) -> Sequence[str]:
    """The addresses of a name, as the system knows them. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Whether an address is one of the public Internet, also when it wears another one: IPv4 inside IPv6."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None or ip in _NAT64:
            return _is_global(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if ip.sixtofour is not None or ip.teredo is not None or int(ip) >> 32 == 0:
            return False
    return _is_global(ip)


def _is_global(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_loopback)


def _typed(part: MediaPart, declared: str, data: bytes) -> Media:
    media = as_media(part.kind, declared, data, part.where)
    if part.format is not None and media.media_type != audio_type(part.format):
        raise BadRequest(f"`{part.where}` is no {part.format}", param=part.where, code="media_type")
    return media


def _refused(part: MediaPart, why: str) -> BadRequest:
    return BadRequest(f"`{part.where}` is not fetched: {why}", param=part.where, code="media_host_not_allowed")


def _failed(part: MediaPart, why: str) -> BadRequest:
    return BadRequest(f"`{part.where}` could not be fetched: {why}", param=part.where, code=FETCH_CODES[part.kind])
