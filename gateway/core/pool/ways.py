"""Ways out: through which proxy a URL is reached, as the environment and the pool file say. Pure.

The variables are those of curl and of Go: `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY`, of which the lower
case counts first. This machine itself is never reached through a proxy that the environment names.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from gateway.core.pool.prices import FrozenModel

DIRECT = "direct"
PORTS = {"http": 80, "https": 443}
HERE = ("localhost", "localhost.localdomain")
KINDS = ("openai", "tool", "mcp")  # of workers whose connections are Baton's
PROXY_SCHEMES = ("http", "https")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Detour(NamedTuple):
    """What a worker's entry says about the way to it. `proxy`: its URL, `direct`, or None for that of the
    environment. Paths of files in PEM; None: the usual authorities, no certificate of one's own."""

    proxy: str | None = None
    ca_file: str | None = None
    client_cert: str | None = None
    client_key: str | None = None


class WayFields(FrozenModel):
    """The fields of a worker about the way to it."""

    proxy: str | None = Field(
        default=None,
        max_length=2048,
        description="HTTP proxy on the way to it, http://host:port, env:NAME or file:/path where it holds a password; "
        "`direct`: none, whatever the environment says",
    )
    ca_file: str | None = Field(
        default=None, max_length=4096, description="certificates (PEM) of the authorities that its server may have"
    )
    client_cert: str | None = Field(
        default=None, max_length=4096, description="certificate (PEM) that Baton shows to its server"
    )
    client_key: str | None = Field(
        default=None, max_length=4096, description="key (PEM) of that certificate; absent: it is in the same file"
    )

    @model_validator(mode="after")
    def _key_has_its_certificate(self) -> WayFields:
        if self.client_key and not self.client_cert:
            raise ValueError("`client_key` needs `client_cert`")
        return self

    @model_validator(mode="after")
    def _way_is_baton_own(self) -> WayFields:
        kind, url = str(getattr(self, "kind", "")), str(getattr(self, "url", None) or "")
        given = [name for name in Detour._fields if getattr(self, name)]
        ours = getattr(self, "speaks_messages", False) or (kind in KINDS and url.startswith("http"))
        if given and not ours:
            follow = "kind litellm follows HTTPS_PROXY and SSL_CERT_FILE" if kind == "litellm" else "it has no URL"
            raise ValueError(f"{follow}; leave {' and '.join(given)} out")
        return self

    @property
    def detour(self) -> Detour:
        """These fields."""
        return Detour(self.proxy, self.ca_file, self.client_cert, self.client_key)


@dataclass(frozen=True, slots=True)
class Proxies:
    """The proxies that an environment names, each by scheme with its variable, and what is reached without them."""

    by_scheme: Mapping[str, tuple[str, str]]
    without: tuple[str, ...]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Proxies:
        """Those of the environment."""
        by_scheme: dict[str, tuple[str, str]] = {}
        for scheme in ("https", "http"):
            for name in (f"{scheme}_proxy", "all_proxy"):
                variable = next((each for each in (name, name.upper()) if environ.get(each, "").strip()), None)
                if variable is not None:
                    by_scheme[scheme] = with_scheme(environ[variable].strip()), variable
                    break
        listed = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
        return cls(by_scheme, tuple(filter(None, (each.strip().lower() for each in listed.replace(",", " ").split()))))

    def of_url(self, url: str) -> tuple[str, str] | None:
        """(proxy, variable) for a URL; None where it is reached directly."""
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        port = parts.port or PORTS.get(parts.scheme, 0)
        if not host or parts.scheme not in self.by_scheme or is_here(host) or bypasses(host, port, self.without):
            return None
        return self.by_scheme[parts.scheme]


def with_scheme(proxy: str) -> str:
    """The URL of a proxy that may be written as `host:port`."""
    return proxy if "://" in proxy else f"http://{proxy}"


def proxy_problem(proxy: str) -> str | None:
    """Why a proxy cannot be used; None where it can. The text holds no password."""
    try:
        parts = urlsplit(proxy)
        port, host = parts.port, parts.hostname
    except ValueError:
        return "it is no URL; write http://host:port"
    if parts.scheme not in PROXY_SCHEMES:
        return f"Baton takes HTTP proxies, and this one is {parts.scheme}://; name an http:// one"
    return None if host and port != 0 else "it names no host; write http://host:port"


def shown(proxy: str) -> str:
    """The URL of a proxy without its user and password."""
    parts = urlsplit(proxy)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def is_here(host: str) -> bool:
    """Whether a host is this machine, by its name or its address."""
    address = _address(host)
    return host in HERE or host.endswith(".localhost") or (address is not None and address.is_loopback)


def bypasses(host: str, port: int, without: tuple[str, ...]) -> bool:
    """Whether `NO_PROXY` lists a host: as `*`, by name (with the names under it), with a port, by address or by
    network (`10.0.0.0/8`)."""
    address = _address(host)
    return any(_lists(entry, host, port, address) for entry in without)


def _lists(entry: str, host: str, port: int, address: Address | None) -> bool:
    if entry == "*":
        return True
    name, digits = _split(entry)
    if digits and digits != str(port):
        return False
    if address is not None:
        with suppress(ValueError):
            return address in ipaddress.ip_network(name, strict=False)
    suffix = name.removeprefix("*").removeprefix(".")
    return bool(suffix) and (host == suffix or host.endswith(f".{suffix}"))


def _split(entry: str) -> tuple[str, str]:
    """(host, port or nothing) of an entry: `host`, `host:port`, `[::1]:port`, an address or a network."""
    if entry.startswith("["):
        host, _, port = entry[1:].partition("]")
        return host, port.lstrip(":")
    host, _, port = entry.partition(":") if entry.count(":") == 1 else (entry, "", "")
    return host, port


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
