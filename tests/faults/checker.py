"""Proves the invariants after a run, from five witnesses that know nothing of each other: the replies of the clients,
the worker's own bill, Redis, the journals on disk, and PostgreSQL.

    I1 no overspend      the bill, and what is posted and held, stay within every limit
    I2 conservation      every hold ends once; nothing stays held; Redis and ledger agree; nobody is under-billed
    I3 no lost log       a whole reply has its rollout; a call upstream has its `dispatched` before it
    I4 no double         one rollout an id, one settlement a hold, calls upstream ≤ 1 + the retries in the log
    I5 caps              cost, depth, rounds, steps, steps at once, calls, tokens and time of every tree within its caps
    I6 no secret         canaries stand in no log, journal, table, metric, reply or error
    I7 liveness          ready again within 10 s (`Site.ready`)
    I8 history           the audit's chain is whole; every rollout names one policy, and one version of it if it has any
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from tests.faults.client import Client
from tests.faults.site import LEASE_S, Gateway, Site
from tests.faults.upstream import CANARY
from tests.faults.witness import Evidence, at_rest, look, tables_with
from tests.sizes import SLACK

__all__ = ["READY_S", "Evidence", "check"]
READY_S = 10.0 * SLACK
SETTLED_WITHIN_S = 12 * LEASE_S * SLACK
SHIPPED_WITHIN_S = 20.0 * SLACK
WALL_GRACE_S = 2.0 * SLACK  # from the end of its time to the end of its record, on a busy machine


async def check(
    site: Site, clients: Sequence[Client], *, limit_nano: int | None = None, truthful: bool = True, bounded: bool = True
) -> Evidence:
    """Wait until the site has healed, then compare. Raises AssertionError naming the invariant. `truthful`: the worker
    reports its usage, so that what is posted can be compared with its bill. `bounded`: and never more than it was
    allowed. At least one gateway must live."""
    await site.ready(READY_S)  # I7
    await _settled(site)
    evidence = await look(site)
    scope = f"key:{site.key_id}"
    _money(evidence, scope, limit_nano, truthful)
    _log(evidence, clients, site)
    for rollout in evidence.rollouts:
        _caps(rollout, bounded)
        _policy(rollout)
    await _secrets(site, clients)
    await _audit(site)
    return evidence


async def _settled(site: Site) -> None:
    """Wait until everything is shipped and nothing is held; give up after a bound."""
    until_s = time.monotonic() + SHIPPED_WITHIN_S + SETTLED_WITHIN_S
    while not await at_rest(site) and time.monotonic() < until_s:
        await asyncio.sleep(0.1)


def _money(evidence: Evidence, scope: str, limit_nano: int | None, truthful: bool) -> None:
    posted = evidence.posted(scope)
    if limit_nano is not None:
        assert evidence.bill_nano <= limit_nano, f"I1: the worker bills {evidence.bill_nano} of {limit_nano}"
        assert posted <= limit_nano, f"I1: {posted} posted of {limit_nano}"
        assert evidence.redis_posted.get(scope, 0) <= limit_nano, "I1"
    holds, ends = evidence.of_kind("hold"), evidence.of_kind("posted", "voided", "uncertain")
    held = Counter({row["hold_id"] for row in holds})  # a hold that grows has a row for each size
    ended = Counter(row["hold_id"] for row in ends)
    odd = {*(held - ended), *(ended - held)}
    assert not odd, f"I2: holds and their ends: {[row for row in evidence.ledger if row['hold_id'] in odd]}"
    assert evidence.redis_held == {}, f"I2: still held: {evidence.redis_held}"
    assert evidence.redis_posted.get(scope, 0) == posted, f"I2: Redis {evidence.redis_posted}, ledger {posted}"
    if truthful:
        assert posted >= evidence.bill_nano, f"I2: {posted} posted, {evidence.bill_nano} billed by the worker"


def _log(evidence: Evidence, clients: Sequence[Client], site: Site) -> None:
    known = {rollout["id"]: rollout for rollout in evidence.rollouts}
    for reply in (reply for client in clients for reply in client.history if reply.whole):
        assert reply.rollout_id in known, f"I3: a whole reply without its rollout: {reply}"
        assert known[reply.rollout_id]["status"] == "done", f"I3: {known[reply.rollout_id]}"
    ids = [reply.rollout_id for client in clients for reply in client.history if reply.whole]
    assert len(ids) == len(set(ids)), "I4: one rollout was given to two clients"
    calls, sent = len(site.upstream.bills), evidence.of_kind("dispatched")
    assert calls <= len(sent), f"I3: {calls} calls, {len(sent)} written down before they left"
    recorded = sum(rollout["calls"] + rollout["planning"] for rollout in evidence.rollouts)
    cut_off = sum(row["hold_id"] not in known for row in sent)  # a crash left only this record of them
    assert calls <= recorded + cut_off, f"I4: {calls} calls, {recorded} in the log, {cut_off} cut off"
    for rollout in evidence.rollouts:
        assert not rollout["twice"], f"I4: two calls with one number: {rollout}"


def _caps(rollout: Mapping[str, Any], bounded: bool) -> None:
    """I5. Only a worker that bills above its own bound may exceed the money and the tokens of a request."""
    caps = rollout["caps"]
    assert rollout["hold_nano"] <= caps["cost_nano"], f"I5: held: {rollout}"
    assert rollout["cost_nano"] <= rollout["hold_nano"] or not bounded, f"I5: cost: {rollout}"
    assert rollout["tokens"] <= caps["tokens"] or not bounded, f"I5: tokens: {rollout}"
    for name in ("depth", "rounds", "steps", "calls"):
        assert rollout[name] <= caps[name], f"I5: {name}: {rollout}"
    assert at_once(rollout["attempts"]) <= caps["parallel"], f"I5: parallel: {rollout}"
    assert rollout["took_s"] <= caps["wall_s"] + WALL_GRACE_S, f"I5: time: {rollout}"


def at_once(attempts: Sequence[Sequence[Mapping[str, Any]]] | None) -> int:
    """Return the most calls in flight at one time, by the records of the steps."""
    calls = list(chain.from_iterable(attempts or ()))
    ends = sorted([(one["started_us"], 1) for one in calls] + [(one["finished_us"], -1) for one in calls])
    most = now = 0
    for _, change in ends:
        now += change
        most = max(most, now)
    return most


def _policy(rollout: Mapping[str, Any]) -> None:
    assert rollout["policy_used"], f"I8: {rollout}"
    assert rollout["versions"] <= 1, f"I8: {rollout}"
    if rollout["policy_used"] == "conductor":
        assert rollout["conducted"], f"I8: it names the conductor, which planned nothing: {rollout}"
        assert rollout["version"] == rollout["policy_version"], f"I8: {rollout}"


async def _secrets(site: Site, clients: Sequence[Client]) -> None:
    secrets = [CANARY, *site.keys]
    living = [one for one in site.gateways if one.alive]
    pages = {f"metrics of {one.directory.name}": await _page(site, one, "/metrics") for one in living}
    paths = [path for one in site.gateways for path in (one.log, *one.directory.glob("spool/*")) if path.is_file()]
    files = {str(path): path.read_bytes().decode(errors="replace") for path in paths}
    for place, content in {**pages, **files}.items():
        assert not any(secret in content for secret in secrets), f"I6: a secret in {place}"
    for reply in (reply for client in clients for reply in client.history):
        shown = f"{reply.headers} {reply.text}"
        assert not any(secret in shown for secret in secrets), f"I6: a secret in a reply: {reply.status} {reply.code}"
    assert not (tables := await tables_with(site, secrets)), f"I6: a secret in {tables}"


async def _audit(site: Site) -> None:
    """I8: every living gateway walks the chain, with its own anchors, and finds no break."""
    for one in (one for one in site.gateways if one.alive):
        async with site.http.get(f"{one.facts['admin_url']}/admin/audit/verify", headers=_admin(one)) as reply:
            evidence = await reply.json()
        assert evidence["ok"], f"I8: {evidence}"
        assert evidence["entries"] > 0, f"I8: {evidence}"


async def _page(site: Site, one: Gateway, path: str) -> str:
    async with site.http.get(f"{one.facts['admin_url']}{path}") as reply:
        assert reply.status == 200, await reply.text()
        return await reply.text()


def _admin(one: Gateway) -> dict[str, str]:
    return {"authorization": f"Bearer {one.facts['admin_key']}"}
