"""The admin API without a gateway: keys, organisations and the audit of DATABASE_URL, answered inside this process.

The routes are those of a gateway, over PostgreSQL alone: balances live in Redis, so replies say nothing of them. The
audit names the user of this machine instead of an admin key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx

from gateway.cli.process.datadir import FACTS, DataDir
from gateway.cli.process.keyring import Office, administration, local_user
from gateway.cli.process.services import pepper_of, pool_file
from gateway.config.settings import Settings
from gateway.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import APIRouter, Request

NOUNS = ("keys", "orgs", "audit")


class LocalApi:
    """The admin API of this machine: of the gateway that serves from the data directory, else of DATABASE_URL."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._data = DataDir(settings.data_dir)

    def gateway(self) -> tuple[str | None, str]:
        """The admin URL and key of the gateway on the data directory. No URL where none serves, or where DATABASE_URL
        names another database than the gateway's."""
        facts = self._data.read(FACTS)
        if facts is None or self._settings.database_url not in (None, facts.get("database_url")):
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
            raise ConfigError(f"no gateway serves from {self._data.path}: start it (`make serve`), {fix}")
        return asyncio.run(self._ask(method, path, body))

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        from fastapi import FastAPI  # here, so that commands beside a gateway need not load it

        from gateway.api.edge import stack

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
        from gateway.service.admin.orgs import OrgAdmin

        async def actor(_: Request) -> str:
            return local_user()

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
