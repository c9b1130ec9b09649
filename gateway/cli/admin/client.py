"""The admin API, for commands: that of the gateway on the data directory, or of any gateway by URL and key.

Where no gateway serves and DATABASE_URL is set, keys, organisations and the audit are answered inside this process: the
routes are those of a gateway, over PostgreSQL alone. Balances live in Redis, so these replies leave them out. The audit
names the user of this machine instead of an admin key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.cli.process.datadir import FACTS, DataDir
from gateway.errors import BadRequest, BatonError, ConfigError, Unavailable

KEY_BYTES_MAX = 4_096
TIMEOUT_S = 30.0
NEW_KEY = "the gateway's own admin key does not work any more: start it again, or give its URL and another key"
if TYPE_CHECKING:
    import httpx
    from fastapi import APIRouter, Request

    from gateway.cli.process.keyring import Office
    from gateway.config.settings import Settings
NOUNS = ("keys", "orgs", "audit")


class AdminClient:
    """Raises ConfigError where a URL comes without a key file, or the key file cannot be read."""

    def __init__(self, url: str | None, key_file: Path | None, *, timeout_s: float = TIMEOUT_S) -> None:
        from gateway.config import settings as config  # imports stand where they are needed: `--help` needs none

        self._timeout_s = timeout_s
        self._local = None if url else LocalApi(config.load())
        self._url, self._key = _remote(url, key_file) if self._local is None else self._local.gateway()

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, more: Mapping[str, str] | None = None
    ) -> Any:
        """The reply's JSON; `more` headers go with the key's. Raises BadRequest for a malformed request, BatonError for
        one that is refused, Unavailable where the gateway does not answer, ConfigError where there is none."""
        import httpx

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

    def health(self) -> dict[str, Any]:
        """The reply of `/readyz`: {"status", "parts"}. Raises Unavailable where no gateway answers."""
        import httpx

        if self._url is None:
            raise ConfigError("no gateway serves from here; start it, or give its admin URL")
        try:
            reply: dict[str, Any] = httpx.get(
                f"{self._url}/readyz", timeout=self._timeout_s, trust_env=self._local is None
            ).json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise Unavailable(f"the gateway at {self._url} does not answer: {error}") from None
        return reply

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> httpx.Response:
        import httpx

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


class LocalApi:
    """The admin API of this machine: of the gateway that serves from the data directory, else of DATABASE_URL."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._data = DataDir(settings.data_dir)

    def gateway(self) -> tuple[str | None, str]:
        """The admin URL and key of the gateway on the data directory. No URL where none serves, or where DATABASE_URL
        names another database than the gateway's."""
        facts = self._data.read(FACTS)
        if (
            facts is None
            or not facts["admin_key"]
            or self._settings.database_url not in (None, facts.get("database_url"))
        ):
            return None, ""
        return facts["admin_url"], facts["admin_key"]

    def answers(self, path: str) -> bool:
        """Whether `ask` works for that path."""
        return self._settings.database_url is not None and _noun(path) in NOUNS

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        """The reply of the admin API over DATABASE_URL. Raises ConfigError where it cannot answer, and for a pool file
        or a pepper that cannot be read."""
        if not self.answers(path):
            fix = "set DATABASE_URL, or give its admin URL" if _noun(path) in NOUNS else "or give its admin URL"
            if self._data.read(FACTS):
                raise ConfigError(f"the gateway on {self._data.path} has no admin key of its own: {fix} and --key-file")
            raise ConfigError(f"no gateway serves from {self._data.path}: start it (`baton serve`), {fix}")
        return asyncio.run(self._ask(method, path, body))

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        import httpx
        from fastapi import FastAPI  # here, so that commands beside a gateway need not load it

        from gateway.api.edge import stack
        from gateway.cli.process.keyring import administration

        async with administration(str(self._settings.database_url)) as office:
            app = FastAPI()
            stack.install(app)
            app.include_router(self._routes(_noun(path), office))
            transport = httpx.ASGITransport(stack.Edge(app))
            async with httpx.AsyncClient(transport=transport, base_url="http://baton") as http:
                return await http.request(method, path, json=body)

    def _routes(self, noun: str, office: Office) -> APIRouter:
        from gateway.api.edge.bodies import Operators
        from gateway.api.operator.keys import Balances, KeysApi
        from gateway.api.operator.orgs import AuditApi, OrgsApi
        from gateway.cli.process.keyring import local_user
        from gateway.cli.process.services import pepper_of, pool_file
        from gateway.core.access.audit import Act
        from gateway.service.admin.orgs import OrgAdmin

        async def actor(_: Request) -> Act:
            return Act(local_user())

        operators, balances = Operators(actor, self._settings.body_bytes_max), Balances(None, office.clock)
        if noun == "orgs":
            return OrgsApi(OrgAdmin(office.store, office.clock), balances, operators).router()
        if noun == "audit":
            return AuditApi(office.auditor(self._data.path), operators).router()
        keys = office.keys(pool_file(self._settings, self._data), pepper_of(self._settings, self._data))
        return KeysApi(keys, balances, operators).router()


def _noun(path: str) -> str:
    """`keys` of `/admin/keys/ID?why=`."""
    return path.partition("?")[0].split("/")[2]
