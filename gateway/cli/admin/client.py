"""The admin API, for commands: that of the gateway on the data directory, or of any gateway by URL and key.

Where no gateway serves and DATABASE_URL is set, `bootstrap` answers for keys, organisations and the audit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from gateway.cli.admin.bootstrap import LocalApi
from gateway.config import settings as config
from gateway.errors import BadRequest, BatonError, ConfigError, Unavailable

KEY_BYTES_MAX = 4_096
TIMEOUT_S = 30.0
NEW_KEY = "the gateway's own admin key does not work any more: start it again, or give its URL and another key"


class AdminClient:
    """Raises ConfigError where a URL comes without a key file, or the key file cannot be read."""

    def __init__(self, url: str | None, key_file: Path | None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._local = None if url else LocalApi(config.load())
        self._url, self._key = _remote(url, key_file) if self._local is None else self._local.gateway()

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, more: Mapping[str, str] | None = None
    ) -> Any:
        """The reply's JSON; `more` headers go with the key's. Raises BadRequest for a malformed request, BatonError for
        one that is refused, Unavailable where the gateway does not answer, ConfigError where there is none."""
        try:
            reply = self._send(method, path, body, {**(more or {}), "authorization": f"Bearer {self._key}"})
            content = reply.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise Unavailable(f"the gateway at {self._url} does not answer: {error}") from None
        if reply.is_success:
            return content
        error_of = content.get("error") or {} if isinstance(content, dict) else {}
        message = str(error_of.get("message", f"the gateway answered {reply.status_code}"))
        if reply.status_code == 400:
            raise BadRequest(message, code=error_of.get("code"))
        if reply.status_code == 401 and self._local is not None:
            message = NEW_KEY
        raise BatonError(message, code=error_of.get("code"))

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> httpx.Response:
        local, url = self._local, f"{self._url}{path}"
        if self._url is None and local is not None:
            return local.ask(method, path, body)
        try:  # a proxy of the environment has no way to this machine's loopback
            return httpx.request(
                method, url, json=body, headers=headers, timeout=self._timeout_s, trust_env=local is None
            )
        except httpx.ConnectError:  # nothing was sent; the gateway was killed, and its facts are still there
            if local is None or not local.answers(path):
                raise
            return local.ask(method, path, body)


def _remote(url: str | None, key_file: Path | None) -> tuple[str | None, str]:
    if key_file is None:
        raise ConfigError("an admin URL needs a file with an admin key beside it")
    return str(url).rstrip("/"), _first_line(key_file)


def _first_line(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline(KEY_BYTES_MAX).strip()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"{path}: {what}") from None
