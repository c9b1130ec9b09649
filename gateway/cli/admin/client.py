"""The admin API of a gateway, for commands: found through the data directory, or given with a key in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from gateway.cli.process.datadir import FACTS, DataDir
from gateway.config import settings as config
from gateway.errors import BadRequest, BatonError, ConfigError, Unavailable

KEY_BYTES_MAX = 4_096


class AdminClient:
    """Raises ConfigError where no gateway serves, or a URL comes without a key."""

    def __init__(self, url: str | None, key_file: Path | None, *, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        if url:
            if key_file is None:
                raise ConfigError("an admin URL needs a file with an admin key beside it")
            self._url, self._key = url.rstrip("/"), _first_line(key_file)
            return
        data = DataDir(config.load().data_dir)
        facts = data.read(FACTS)
        if facts is None:
            raise ConfigError(f"no gateway serves from {data.path}: start it (`make serve`), or give its admin URL")
        self._url, self._key = facts["admin_url"], facts["admin_key"]

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, more: Mapping[str, str] | None = None
    ) -> Any:
        """The reply's JSON; `more` headers go with the key's. Raises BadRequest for what is malformed, BatonError for
        what is refused otherwise, Unavailable when nobody answers."""
        headers = {**(more or {}), "authorization": f"Bearer {self._key}"}
        try:
            reply = httpx.request(method, f"{self._url}{path}", json=body, headers=headers, timeout=self._timeout_s)
            found = reply.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise Unavailable(f"the gateway at {self._url} does not answer: {error}") from None
        if reply.is_success:
            return found
        said = found.get("error") or {} if isinstance(found, dict) else {}
        message = str(said.get("message", f"the gateway answered {reply.status_code}"))
        if reply.status_code == 400:
            raise BadRequest(message, code=said.get("code"))
        raise BatonError(message, code=said.get("code"))


def _first_line(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline(KEY_BYTES_MAX).strip()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"{path}: {what}") from None
