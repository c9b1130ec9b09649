"""The registry of policy versions in PostgreSQL, with its audit, over the directories of `policy_files`.

Every change is one transaction under a lock of that policy's name: the row, the version that serves next, and the event
that says who changed what and why. A row exists only for a complete directory.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.engines.sealed import read_document
from gateway.adapters.host.urls import below, fetch_policy, send_policy
from gateway.adapters.postgres import audit as store_audit
from gateway.adapters.postgres.admin_tables import policy_events, policy_versions
from gateway.adapters.postgres.credit import version_figures
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.policies import policy_files
from gateway.adapters.postgres.policies.policy_files import STORED_BYTES_MAX, Incoming, PolicyShelf
from gateway.adapters.postgres.tables import policy_shadows
from gateway.core.access.audit import Act
from gateway.core.policies.manifest import manifest_of
from gateway.core.policies.versions import (
    CODE,
    SERVED,
    WHY_CHARS_MAX,
    Standing,
    State,
    Version,
    base_under,
    check_gate,
    check_move,
    check_percent,
    check_report,
    check_words,
    files_needed,
    is_same,
    number_for,
    parent_of,
    parse,
    picked,
    standing,
)
from gateway.core.policies.watch import Figures
from gateway.errors import BadRequest, Conflict, NotFound, VersionRefused

log = logging.getLogger("gateway.registry")
LOCK_CLASS = 0x706F6C  # "pol": a class of advisory locks of our own
VERSIONS_MAX = 10_000
EVENTS_MAX = 1_000
DEFAULT_NAME = "conductor"


class Registry:
    """`policies`: the directory of all versions on this host, NAME@N each. `url`: where they lie for other hosts too;
    empty: in PostgreSQL, at most `stored_bytes_max` of one version. Every call raises Unavailable when PostgreSQL is
    away."""

    def __init__(
        self, engine: AsyncEngine, policies: Path, url: str = "", stored_bytes_max: int = STORED_BYTES_MAX
    ) -> None:
        self._engine = engine
        self.policies = policies.resolve()
        self._url = url
        self._shelf = PolicyShelf(engine, stored_bytes_max)
        self._fetching = asyncio.Lock()

    def directory(self, version: Version) -> Path:
        """The directory of a version on this host, whether it is there or not."""
        return self.policies / version.directory

    async def place(self, version: Version) -> Path:
        """`PolicyRegistry.place`."""
        directory = self.directory(version)
        if directory.exists():  # it got its name when it was whole; no other fetch need end first
            return directory
        async with self._fetching:
            if not directory.exists():
                await self._fetch(version, directory)
        return directory

    async def _fetch(self, version: Version, directory: Path) -> None:
        if self._url:
            await asyncio.to_thread(fetch_policy, below(self._url, directory.name), directory)
            return
        if not await self._shelf.fetch({**version.manifest, "version": str(version.number)}, directory):
            problem = f"{version.id}: its weights are neither on this host nor in PostgreSQL; set BATON_POLICIES_URL"
            raise VersionRefused("missing", problem)
        base = base_under(version, await self.list())
        if base is not None and not self.directory(base).exists():
            await self._fetch(base, self.directory(base))

    async def share(self, version: Version) -> bool:
        """`PolicyRegistry.share`."""
        if self._url:
            return True
        manifest = manifest_of(version.manifest)
        return await self._shelf.store(Path(manifest.source or self.directory(version)), manifest.sha256)

    async def sweep(self, limit: int) -> int:
        """Delete old files of retired versions from the shelf, but for those that a rollback brings back, and files of
        uploads that were broken off; return their number."""
        return await self._shelf.sweep(files_needed(await self.list()), limit)

    # ---------------------------------------------------------------- reading

    async def list(self, name: str | None = None) -> Sequence[Version]:
        """Versions of one policy or of all, newest first."""
        query = select(policy_versions).order_by(policy_versions.c.name, policy_versions.c.number.desc())
        if name is not None:
            query = query.where(policy_versions.c.name == name)
        async with self._begin() as connection:
            return [_version(row) for row in (await connection.execute(query.limit(VERSIONS_MAX))).mappings()]

    async def get(self, version: str) -> Version:
        """One version. Raises NotFound, and BadRequest for a name that is not NAME@N."""
        name, number = parse(version)
        async with self._begin() as connection:
            return _one(await _of(connection, name), name, number)

    async def standing(self, name: str = DEFAULT_NAME) -> Standing:
        """The versions of one policy that serve: a few rows, however many versions there were."""
        c, live = policy_versions.c, policy_versions.alias()
        replaced = select(live.c.previous).where(live.c.name == name, live.c.state == "live").scalar_subquery()
        query = select(policy_versions).where(c.name == name, c.state.in_(SERVED) | (c.number == replaced))
        async with self._begin() as connection:
            return standing([_version(row) for row in (await connection.execute(query)).mappings()])

    async def live(self, name: str = DEFAULT_NAME) -> Version | None:
        """The version that plans by default."""
        return (await self.standing(name)).live

    async def events(self, name: str, limit: int = 100) -> Sequence[Mapping[str, Any]]:
        """Events of a policy (`conductor`) or of one version (`conductor@7`), newest first."""
        table = policy_events.c
        plain, number = parse(name) if "@" in name else (name, None)
        query = select(policy_events).where(table.name == plain).order_by(table.id.desc())
        if number is not None:
            query = query.where(table.number == number)
        query = query.limit(min(limit, EVENTS_MAX))
        async with self._begin() as connection:
            return [_event(row) for row in (await connection.execute(query)).mappings()]

    async def figures(self, version: str, *, since: datetime, until: datetime | None, latest: int) -> Figures:
        """Figures of a version's `latest` top-level requests in that time, without those that named the version, and
        without those whose conductor gave no plan (SERVER_FAULTS)."""
        async with self._begin() as connection:
            row = (await connection.execute(version_figures(version, since, until, latest))).mappings().one()
        values = {**row, "cost_nano_sum": int(row["cost_nano_sum"])}
        return Figures(version, **{**values, "outcomes_by_org": row["outcomes_by_org"] or {}})

    async def shadowed(self, version: str) -> Mapping[str, Any]:
        """{n, refused, agreed, latency_ms_mean, cost_nano} of a version's shadow plans."""
        c = policy_shadows.c
        query = select(
            func.count().label("n"),
            func.count().filter(c.refusal.is_not(None)).label("refused"),
            func.count().filter(c.agrees).label("agreed"),
            func.avg(c.latency_ms).label("latency_ms_mean"),
            func.coalesce(func.sum(c.cost_nano), 0).label("cost_nano"),
        ).where(c.version == version)
        async with self._begin() as connection:
            row = (await connection.execute(query)).mappings().one()
        return {**row, "cost_nano": int(row["cost_nano"])}

    # ---------------------------------------------------------------- changing

    async def publish(
        self,
        directory: Path,
        *,
        by: str,
        why: str = "",
        gate: Mapping[str, Any] | None = None,
        forced: bool = False,
        name: str = DEFAULT_NAME,
    ) -> Version:
        """Copy a policy directory in and register it as a candidate; the same directory again is the same version.
        `gate`: the report of the gate; without one, or with one that refused, `forced` is needed. The number is the
        manifest's `version` if that is a free whole number, else the next one. Raises VersionRefused, Conflict,
        Unavailable; then nothing is published. Where only the upload failed, the version is a candidate on this host
        alone, and the same call again uploads it."""
        check_words(name, why)
        check_gate(gate, forced, why)
        incoming = await asyncio.to_thread(policy_files.take_in, directory, self.policies)
        try:
            check_report(gate, incoming.manifest, forced)
            version = await self._register(incoming, by, why, gate, forced, name)
        finally:
            await asyncio.to_thread(
                policy_files.discard, incoming.place
            )  # nothing is left to discard after a registration
        if self._url:
            directory = self.directory(version)
            await asyncio.to_thread(send_policy, directory, below(self._url, directory.name))
        elif not await self.share(version):
            log.warning("%s is larger than PostgreSQL stores; other hosts need BATON_POLICIES_URL", version.id)
        return version

    async def move(self, version: str, state: State, *, by: str, why: str = "") -> Version:
        """Shadow, promote (`live`) or retire a version. Raises Conflict(illegal_move) with the reason."""
        return await self._move(version, state, None, by, why)

    async def canary(self, version: str, percent: int, *, by: str, why: str = "") -> Version:
        """Give a version that share of the requests. Raises BadRequest for a share other than 1, 5, 25 and 100."""
        check_percent(percent)
        return await self._move(version, "canary", percent, by, why)

    async def rollback(self, name: str, *, by: str, why: str, cause: str = "person") -> Version:
        """Roll back a canary (`conductor@7`, or `conductor` while it has one), else the live version: then the version
        it replaced is live again. Return the retired version. Raises Conflict if there is none to go back to."""
        plain, number = parse(name) if "@" in name else (name, None)
        check_words(plain, why)
        async with self._changing(plain) as (connection, versions):
            now = standing(versions)
            wanted = _one(versions, plain, number) if number is not None else now.canary or now.live
            if wanted is None or wanted.state not in ("canary", "live"):
                what = f"{name} is {wanted.state}" if wanted else f"{name} has no canary and no live version"
                raise Conflict(f"{what}; there is nothing to roll back", code=CODE)
            if wanted.state == "live" and now.previous is None:
                raise Conflict(f"{wanted.id} replaced no other version; there is none to go back to", code=CODE)
            detail = {"cause": cause}
            retired = await _set(connection, wanted, "retired", by, why, what="rolled back", detail=detail)
            if wanted.state == "live" and now.previous is not None:
                await _set(connection, now.previous, "live", by, why, what="restored", detail=detail)
            return retired

    async def note(self, version: Version, what: str, *, by: str, why: str) -> None:
        """Record an event of a version that changed no state (`refused`)."""
        async with self._begin() as connection:
            await _log(connection, version, version.state, by, why[:WHY_CHARS_MAX], what=what)

    async def seed(self, directory: Path, *, insist: bool = False, name: str = DEFAULT_NAME) -> Version:
        """Make sure that a live version exists. Publish `directory` and make it live if no other can be (there is none,
        or this code does not render its prompt), or, with `insist`, if it was never registered."""
        live = await self.live(name)
        usable = live is not None and picked(live) is not None
        if usable and not (insist and await self._is_new(directory, name)):
            return cast(Version, live)
        by, why = "baton serve", f"what this gateway was started with ({directory.name})"
        version = await self.publish(directory, by=by, why=why, forced=True, name=name)
        async with self._changing(name) as (connection, versions):
            live = standing(versions).live
            if live is not None and live.number == version.number:  # another gateway was as quick
                return live
            if live is not None:
                await _set(connection, live, "retired", by, f"replaced by {version.id}", what="replaced")
            first = replace(version, previous=live.number if live is not None and picked(live) is not None else None)
            return await _set(connection, first, "live", by, why, what="seeded")

    async def _is_new(self, directory: Path, name: str) -> bool:
        offered = await asyncio.to_thread(read_document, directory)
        return not any(is_same(known.manifest, offered) for known in await self.list(name))

    async def _register(
        self, incoming: Incoming, by: str, why: str, gate: Mapping[str, Any] | None, forced: bool, name: str
    ) -> Version:
        manifest = incoming.manifest
        async with self._changing(name) as (connection, versions):
            same = next((one for one in versions if one.state != "retired" and is_same(one.manifest, manifest)), None)
            if same is not None:
                return same
            number = number_for(manifest, versions)
            target = f"{name}@{number}"
            served = {**manifest, "version": str(number)}
            if served != manifest:
                await asyncio.to_thread(policy_files.write_manifest, incoming.place, served)
            await asyncio.to_thread(policy_files.settle, incoming.place, self.policies / target)
            now = datetime.now(UTC)
            version = Version(
                name, number, "candidate", parent_of(manifest), None, None, target, dict(manifest), gate, now, now
            )
            await connection.execute(insert(policy_versions).values(**_row(version)))
            refusals = {"refusals": (gate or {}).get("refusals", []), "gated": gate is not None}
            await _log(connection, version, None, by, why, what="published", forced=forced, detail=refusals)
            return version

    async def _move(self, version: str, state: State, percent: int | None, by: str, why: str) -> Version:
        name, number = parse(version)
        check_words(name, why)
        if state == "canary" and percent is None:
            raise BadRequest("a canary needs its percent; use canary()", param="percent")
        async with self._changing(name) as (connection, versions):
            moving = _one(versions, name, number)
            check_move(moving, state, versions)
            live = standing(versions).live
            if state == "live":
                if live is not None:
                    await _set(connection, live, "retired", by, f"replaced by {moving.id}", what="replaced")
                moving = replace(moving, previous=live.number if live else None)
            what = {"canary": "canary", "live": "promoted", "shadow": "shadowed"}.get(state, state)
            return await _set(connection, moving, state, by, why, what=what, percent=percent)

    @asynccontextmanager
    async def _changing(self, name: str) -> AsyncIterator[tuple[AsyncConnection, builtins.list[Version]]]:
        """A transaction that excludes other changes of this policy, and its versions."""
        async with self._begin() as connection:
            lock = func.pg_advisory_xact_lock(LOCK_CLASS, func.hashtext(name))
            await connection.execute(select(lock))
            yield connection, await _of(connection, name)

    def _begin(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return transaction(self._engine)


# ---------------------------------------------------------------- rows


async def _of(connection: AsyncConnection, name: str) -> list[Version]:
    query = select(policy_versions).where(policy_versions.c.name == name).order_by(policy_versions.c.number.desc())
    return [_version(row) for row in (await connection.execute(query.limit(VERSIONS_MAX))).mappings()]


def _one(versions: Sequence[Version], name: str, number: int) -> Version:
    found = next((version for version in versions if version.number == number), None)
    if found is None:
        raise NotFound(f"no policy version {name}@{number}; `baton policy list` names them all", param="version")
    return found


def _version(row: Mapping[Any, Any]) -> Version:
    return Version(**row)


def _row(version: Version) -> dict[str, Any]:
    return {name: getattr(version, name) for name in Version.__slots__}


async def _set(
    connection: AsyncConnection,
    version: Version,
    state: State,
    by: str,
    why: str,
    *,
    what: str,
    percent: int | None = None,
    detail: Mapping[str, Any] | None = None,
) -> Version:
    """Store the version's new state, and the event; `version.previous` is stored as given."""
    became = replace(version, state=state, percent=percent, changed_at=datetime.now(UTC))
    table = policy_versions
    change = update(table).where(table.c.name == version.name, table.c.number == version.number)
    changed = {name: getattr(became, name) for name in ("state", "percent", "previous", "changed_at")}
    await connection.execute(change.values(**changed))
    await _log(connection, became, version.state, by, why, what=what, detail=detail)
    return became


async def _log(
    connection: AsyncConnection,
    version: Version,
    was: str | None,
    by: str,
    why: str,
    *,
    what: str,
    forced: bool = False,
    detail: Mapping[str, Any] | None = None,
) -> None:
    row = {"name": version.name, "number": version.number, "what": what, "was": was, "state": version.state}
    row |= {"percent": version.percent, "who": by, "why": why, "forced": forced, "detail": dict(detail or {})}
    await connection.execute(insert(policy_events).values(**row, at=datetime.now(UTC)))
    before = None if was is None else {"state": was}
    after = {name: row[name] for name in ("state", "percent", "forced", "detail")}
    await store_audit.write(connection, Act(by, why), f"policy.{what.replace(' ', '_')}", version.id, before, after)


def _event(row: Mapping[Any, Any]) -> dict[str, Any]:
    event = {name: row[name] for name in ("id", "what", "was", "state", "percent", "who", "why", "forced", "detail")}
    return {"version": f"{row['name']}@{row['number']}", **event, "at": row["at"].isoformat()}
