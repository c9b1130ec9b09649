"""Fetches media from the URLs in messages, but only from hosts that the operator lists (threat: SSRF).

A client chooses the URL, so nothing about it is trusted. The host must be on the list, letter for letter. Its name is
resolved once, every address must be public, and the connection goes to that address, with the certificate of the name.
Baton follows no redirect and uses no proxy or cookie. Bytes and seconds are bounded, and the bytes must have the
declared type.
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
FETCH_CODES: Mapping[Kind, str] = {  # OpenAI defines the first
    "image": "invalid_image_url",
    "audio": "invalid_media_url",
    "file": "invalid_media_url",
}
_URL = re.compile(r"(?P<scheme>[a-z]+)://(?P<host>[a-z0-9.-]+)(?::(?P<port>[0-9]{1,5}))?(?P<path>[/?][!-~]*)?")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class WebMedia:
    """`ports.MediaSource`. A host is `host` or `host:port`. Tests set `resolve` (from a name to addresses), `admits`
    (which addresses are allowed) and `scheme` (`http` for a server without a certificate)."""

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
        self._slots = asyncio.Semaphore(parallel_max)
        self._resolve = resolve or resolve_by_system
        self._admits = admits or is_public
        self._scheme = scheme
        self._tls = tls

    def check(self, parts: Sequence[MediaPart]) -> None:
        """See `ports.MediaSource.check`."""
        if len(parts) > self._fetches_max:
            raise BadRequest(
                f"at most {self._fetches_max} parts may be URLs", param=parts[0].where, code="too_many_urls"
            )
        for part in parts:
            self._target(part)

    async def fetch(self, part: MediaPart) -> Media:
        """See `ports.MediaSource.fetch`."""
        host, port, url = self._target(part)
        try:
            async with self._slots, asyncio.timeout(self._timeout_s):
                addresses = await self._resolve(host, port)
                if not addresses or not all(map(self._admits, addresses)):
                    raise _refusal(part, f"`{host}` has no public address")
                return await self._get(part, url, addresses[0])
        except TimeoutError:
            raise _failure(part, f"`{host}` did not answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failure(part, f"`{host}` could not be read ({type(error).__name__})") from None

    def _target(self, part: MediaPart) -> tuple[str, int, str]:
        """(host, port, URL) of a part. Raises BadRequest, which names the setting, if the part may not be fetched."""
        parsed = _URL.fullmatch(part.url) if len(part.url) <= 8192 else None
        if parsed is None or parsed["scheme"] != self._scheme:
            raise _refusal(part, "the URL is not a plain `https://host/path`")
        host, port = parsed["host"], int(parsed["port"] or HTTPS_PORT)
        name = host if port == HTTPS_PORT else f"{host}:{port}"
        if name not in self._hosts:
            raise _refusal(
                part, f"`{name[:128]}` is not among the hosts that this gateway fetches from (BATON_MEDIA_HOSTS)"
            )
        return host, port, part.url

    async def _get(self, part: MediaPart, url: str, address: str) -> Media:
        connector = aiohttp.TCPConnector(
            resolver=_PinnedResolver(address), use_dns_cache=False, ssl=self._tls, limit=1, force_close=True
        )
        async with aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, auto_decompress=False
        ) as session:
            headers = {"user-agent": "baton", "accept-encoding": "identity"}
            async with session.get(url, allow_redirects=False, headers=headers) as response:
                if response.status != 200:
                    raise _failure(
                        part, f"the host answered {response.status}" + _REDIRECT * (300 <= response.status < 400)
                    )
                if response.headers.get("content-encoding", "identity").lower() != "identity":
                    raise _failure(part, "the reply is compressed, but Baton asked for no encoding")
                data = await self._read(part, response)
                return _checked_media(part, response.headers.get("content-type", ""), data)

    async def _read(self, part: MediaPart, response: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        async for piece in response.content.iter_chunked(CHUNK_BYTES):
            data += piece
            if len(data) > self._bytes_max:
                raise BadRequest(
                    f"`{part.where}` is over {self._bytes_max} bytes", param=part.where, code="media_too_large"
                )
        return bytes(data)


_REDIRECT = "; Baton never follows a redirect"


class _PinnedResolver(AbstractResolver):
    """Resolves every name to the address that has been checked."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The pinned address, for any name."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        flags = socket.AI_NUMERICHOST
        return [ResolveResult(hostname=host, host=self._address, port=port, family=family, proto=0, flags=flags)]

    async def close(self) -> None:
        """Do nothing: nothing is open."""


async def resolve_by_system(host: str, port: int) -> Sequence[str]:
    """The addresses of a name, by the system's resolver. Raises OSError."""
    results = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in results]


def is_public(address: str) -> bool:
    """Whether an address belongs to the public Internet. Looks inside IPv6 addresses that embed an IPv4 address."""
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


def _checked_media(part: MediaPart, declared: str, data: bytes) -> Media:
    media = as_media(part.kind, declared, data, part.where)
    if part.format is not None and media.media_type != audio_type(part.format):
        raise BadRequest(f"`{part.where}` is not {part.format}", param=part.where, code="media_type")
    return media


def _refusal(part: MediaPart, reason: str) -> BadRequest:
    return BadRequest(f"`{part.where}` is not fetched: {reason}", param=part.where, code="media_host_not_allowed")


def _failure(part: MediaPart, reason: str) -> BadRequest:
    return BadRequest(f"`{part.where}` could not be fetched: {reason}", param=part.where, code=FETCH_CODES[part.kind])
