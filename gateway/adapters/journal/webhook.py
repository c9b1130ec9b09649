"""Sends alerts to a webhook, signed (Standard Webhooks). The URL may hold a secret, so only its host is ever shown."""

from __future__ import annotations

import asyncio
from datetime import datetime
from urllib.parse import urlsplit

import aiohttp
import httpx

from gateway.core.log.alerts import DueAlert, Receipt, body_of, signed

TIMEOUT_S = 10.0
REPLY_BYTES_MAX = 500


class Webhook:
    """One attempt a call, without redirects. `key`: the secret of the signature."""

    def __init__(
        self, url: str, key: bytes, timeout_s: float = TIMEOUT_S, client: httpx.AsyncClient | None = None
    ) -> None:
        self._url = url
        self._key = key
        self._timeout_s = timeout_s
        self._client = client or httpx.AsyncClient(timeout=timeout_s, trust_env=False)

    @property
    def host(self) -> str:
        """The receiver, without path, query and user."""
        parts = urlsplit(self._url)
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")

    async def send(self, delivery: DueAlert, now: datetime) -> Receipt:
        """Send it once. Return what came back."""
        body = body_of(delivery)
        headers = {"content-type": "application/json", **signed(self._key, delivery.id, now, body)}
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream("POST", self._url, content=body, headers=headers) as reply,
            ):
                start = b""
                async for part in reply.aiter_bytes(REPLY_BYTES_MAX):
                    start += part
                    if len(start) >= REPLY_BYTES_MAX:
                        break
                return Receipt(reply.status_code, start[:REPLY_BYTES_MAX].decode(errors="replace"))
        except (httpx.HTTPError, httpx.InvalidURL, aiohttp.ClientError, OSError) as error:
            return Receipt(None, type(error.__cause__ or error).__name__)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
