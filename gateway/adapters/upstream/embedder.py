"""The port `Embedder`, by which Baton finds similar tasks: a function in this process, or an embeddings endpoint.

The endpoint speaks OpenAI's `POST /embeddings`. Its vectors are projected to the length that the database stores, by a
random draw that depends on the endpoint and the model. After a change of either, old vectors are unrelated to new ones,
and the name that is stored with them differs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import zlib
from collections.abc import Mapping
from functools import lru_cache

import aiohttp
import httpx

from gateway.adapters.upstream.client import Breaker, http_client, parse_object
from gateway.adapters.upstream.replies import bounded_body
from gateway.core.loop.experience.likeness import EMBEDDED_CHARS_MAX, EMBEDDING_DIM, Embedding, project
from gateway.errors import Unavailable, UpstreamProtocol
from gateway.service.ports.request import Embedder

REPLY_BYTES_MAX = 1 << 20
NAME_DIGITS = 16  # of the hash of endpoint and model: the database need not know either
NUMBERS_MAX = 16_384
TRANSPORT_ERRORS = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, aiohttp.ClientError, OSError, zlib.error)
TEXTS_CACHED = 64


class LocalEmbedder(Embedder):
    """A function in this process: no network, equal results on every machine. The log does not hold the vector, because
    the shipper can compute it again."""

    logged = False

    def __init__(self, embedding: Embedding) -> None:
        self._embedding = embedding
        # One request asks for its question twice: for the candidates of a large pool, and for experience.
        self._embed = lru_cache(TEXTS_CACHED)(embedding.embed)

    @property
    def name(self) -> str:
        """See the port."""
        return self._embedding.name

    async def embed(self, text: str) -> list[float]:
        """See the port. Raises nothing."""
        return list(self._embed(text))

    async def close(self) -> None:
        """Do nothing: nothing is open."""


class HttpEmbedder(Embedder):
    """An OpenAI-compatible endpoint. `base_url` ends like OpenAI's (`…/v1`). Calls to a server that keeps failing are
    paused."""

    logged = True

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        timeout_s: float = 0.1,
        breaker: Breaker | None = None,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/embeddings"
        self._model = model
        self._salt = f"{self._url}#{model}"
        self._name = f"url:{hashlib.sha256(self._salt.encode()).hexdigest()[:NAME_DIGITS]}"
        self._headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._timeout_s = timeout_s
        self._breaker = breaker or Breaker()
        self._client = client or http_client()
        self._numbers: int | None = None

    @property
    def name(self) -> str:
        """See the port. It says which endpoint and model, and neither can be read from it."""
        return self._name

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def embed(self, text: str) -> list[float]:
        """See the port. An empty text becomes all zeros, without a request. Raises Unavailable."""
        if not text.strip():
            return [0.0] * EMBEDDING_DIM
        if not self._breaker.admit():
            raise Unavailable("the embedder keeps failing; calls to it are paused")
        report = self._breaker.abandon
        try:
            async with asyncio.timeout(self._timeout_s):
                vector = project(self._vector(await self._request(text[:EMBEDDED_CHARS_MAX])), self._salt)
            report = self._breaker.succeed
            return vector
        except (TimeoutError, ValueError, OverflowError, UpstreamProtocol, *TRANSPORT_ERRORS) as error:
            report = self._breaker.fail
            problem = str(error)[:200] or type(error).__name__
            raise Unavailable(f"the embedder gave no vector ({problem})") from None
        finally:
            report()

    async def _request(self, text: str) -> Mapping[str, object]:
        """The body of the endpoint's reply. Raises ValueError for a status other than 200, UpstreamProtocol, and the
        exceptions of the transport."""
        body = json.dumps({"model": self._model, "input": text, "encoding_format": "float"}).encode()
        headers = {**self._headers, "content-type": "application/json"}
        async with self._client.stream("POST", self._url, content=body, headers=headers) as response:
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}")
            return parse_object(await bounded_body(response, REPLY_BYTES_MAX))

    def _vector(self, body: Mapping[str, object]) -> list[float]:
        """The vector of a reply. Raises ValueError if there is none, or if its length differs from earlier vectors."""
        data = body.get("data")
        first = data[0] if isinstance(data, list) and data else None
        vector = first.get("embedding") if isinstance(first, dict) else None
        if not isinstance(vector, list) or not 0 < len(vector) <= NUMBERS_MAX:
            raise ValueError("no `data[0].embedding` in the reply")
        if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in vector):
            raise ValueError("the embedding is not a list of numbers")
        if self._numbers not in (None, len(vector)):
            raise ValueError(f"an embedding of {len(vector)} numbers after one of {self._numbers}")
        self._numbers = len(vector)
        return [float(x) for x in vector]
