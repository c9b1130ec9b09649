"""Budgets in Redis: each call is one run of `budgets.lua`, so all scopes change together or not at all.

Redis is a fenced cache of the ledger. Every call carries the epoch of the rebuild that it relies on. A Redis that was
flushed, restarted, replaced by a replica, or that lost a balance does not know that epoch; then all money is refused
until `load`. A Redis that may remove keys when its memory is full is refused.

After such a loss the ledger may lag behind this process: it has granted holds, and the records of some settlements are
still on their way to PostgreSQL. This process remembers both and puts them back after every rebuild, its own or another
gateway's. Holds are known by their ids, so nothing is counted twice. While gateways put holds back (`put_back_s`), no
new hold is granted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from gateway.adapters.redis.script import RedisAway, RedisScript
from gateway.core.money.ledger import (
    Balance,
    Hold,
    Scope,
    SettledState,
    budget_exceeded,
    check_hold,
    check_nano,
    check_total,
    hold_closed,
    hold_unknown,
)
from gateway.errors import ConfigError, MoneyUnavailable
from gateway.service.ports.money import LEASE_S, Settlement

log = logging.getLogger("gateway.budgets")
_AT_ONCE = 500  # scopes or holds a call, so that no call blocks Redis for long
_ON_A_HOLD = frozenset({"hold", "grow", "settle"})
_OPEN_MAX = 100_000  # holds and settlements remembered for a rebuild; far more than one process has in flight
_IS_OPEN, _UNKNOWN = -1, -2
FORMAT_S = 4.0  # every gateway looks at its balances twice a second
_REBUILDING = "the budget store was restarted or emptied and is rebuilding from the ledger"
Sleep = Callable[[float], Awaitable[None]]
T = TypeVar("T")


class RedisBudgets:
    """The Budgets port. `prefix` separates deployments on one Redis; it is the hash tag of every key. A hold without
    `keep` for `lease_s` counts as abandoned; `lease_s` must be the same for every gateway on one Redis."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "baton",
        deadline_s: float = 0.2,
        connections_max: int = 64,
        lease_s: float = LEASE_S,
    ) -> None:
        self._script = RedisScript(url, "budgets.lua", deadline_s=deadline_s, connections_max=connections_max)
        self._lease_s = lease_s
        tag = "{" + prefix + "}"
        self._keys = [f"{tag}:{name}" for name in ("epoch", "posted", "held", "open")]
        self._hold_prefix = f"{tag}:hold:"
        self._epoch = b""
        self._refused: str | None = None
        self.exhausted: set[str] = set()
        self._loading = asyncio.Lock()
        self._open: dict[str, tuple[Hold, float]] = {}  # and when it expires (monotonic s)
        self._settled: dict[str, Settlement] = {}  # not yet known to be in the ledger
        self._late: dict[str, Settlement] = {}  # that the store did not take in time

    async def check(self, sleep: Sleep = asyncio.sleep) -> None:
        """Raises ConfigError if the store may remove balances when its memory is full, and while gateways of a version
        use it whose script keeps them in another form. A store that is away is checked before its balances are used."""
        for pause_s in (FORMAT_S, 0.0):
            try:
                status, *rest = await self._script([*self._keys, self._hold_prefix], ["starts", ""])
            except RedisAway:
                return
            if status == b"evicts":
                raise ConfigError(f"REDIS_URL: {evicts(rest[0].decode())}")
            if status != b"format" or rest[1] >= FORMAT_S - 1:
                return
            await sleep(pause_s)  # meanwhile the others look, if they live
        raise ConfigError(f"REDIS_URL: {other_format(rest[0].decode())}")

    async def server(self) -> str:
        _, run_id = await self._run("server")
        return bytes(run_id).decode()

    async def doubt(self) -> None:
        with suppress(MoneyUnavailable):  # the reply is that of a lost epoch
            await self._run("doubt")

    def refuse(self, why: str | None) -> None:
        self._refused = why

    @property
    def epoch_lost(self) -> bool:
        return not self._epoch

    async def hold(
        self, hold_id: str, amount_nano: int, amount_min_nano: int, scopes: Sequence[Scope], lease_s: float
    ) -> Hold:
        check_hold(amount_nano, amount_min_nano, scopes)
        if self._refused is not None:
            raise MoneyUnavailable(self._refused)
        if self.epoch_lost:  # Redis knows nothing more, and may hang
            raise _unavailable(_REBUILDING)
        lease_ms = _ms(min(lease_s, self._lease_s))
        status, *rest = await self._run("hold", hold_id, amount_nano, amount_min_nano, lease_ms, *_limits(scopes))
        if status == b"wait":
            raise _unavailable("the budget store was rebuilt a moment ago, and other gateways still put theirs back")
        if status == b"refused":
            at, left, held = rest
            raise budget_exceeded(scopes[at], left, amount_min_nano, held)
        if status == b"closed":
            raise hold_closed(hold_id)
        hold = Hold(hold_id, rest[0], tuple(scopes), rest[1])
        _keep(self._open, hold_id, (hold, time.monotonic() + lease_s))
        return hold

    async def grow(self, hold: Hold, total_nano: int) -> Hold:
        status, *rest = await self._run("grow", hold.id, check_nano(total_nano), *_limits(hold.scopes))
        if status != b"ok":
            raise hold_closed(hold.id) if status == b"closed" else hold_unknown(hold.id)
        grown = replace(hold, granted_nano=rest[0], room_nano=rest[1])
        if (known := self._open.get(hold.id)) is not None:
            self._open[hold.id] = grown, known[1]
        return grown

    def forsake(self, hold_id: str) -> None:
        _keep(self._late, hold_id, Settlement(hold_id, 0, ()))

    async def post(self, hold_id: str, actual_nano: int) -> int:
        return await self._settle(hold_id, "posted", check_nano(actual_nano))

    async def void(self, hold_id: str) -> int:
        return await self._settle(hold_id, "voided")

    async def uncertain(self, hold_id: str) -> int:
        return await self._settle(hold_id, "uncertain")

    async def renew(self, hold_ids: Sequence[str], lease_s: float) -> Sequence[str]:
        _, renewed = await self._run("renew", _ms(lease_s), *hold_ids)
        return [hold_id.decode() for hold_id in renewed]

    async def keep(self) -> None:
        now_s = time.monotonic()
        for ids in _chunks(hold_id for hold_id, (_, until_s) in list(self._open.items()) if until_s > now_s):
            await self.renew(ids, self._lease_s)

    async def expired(self, limit: int) -> Sequence[str]:
        _, ids = await self._run("expired", limit)
        return [hold_id.decode() for hold_id in ids]

    async def balance(self, scope: str) -> Balance:
        return (await self.balances([scope]))[scope]

    async def balances(self, scopes: Sequence[str]) -> Mapping[str, Balance]:
        balance_of: dict[str, Balance] = {}
        for some in _chunks(scopes):
            _, sums = await self._run("balances", *some)
            balance_of |= {name: Balance(*sums[2 * n : 2 * n + 2]) for n, name in enumerate(some)}
        return balance_of

    def fence(self) -> str:
        return self._epoch.decode()

    async def credit(self, amount_nano: int, scopes: Sequence[str], fence: str) -> None:
        await self._run("credit", check_nano(amount_nano), *scopes, epoch=fence.encode())

    async def forget(self, past: Callable[[str], bool]) -> int:
        cursor, gone = b"0", 0
        while True:
            _, cursor, names = await self._run("names", cursor.decode())
            over = [name.decode() for name in names if past(name.decode())]
            if over:
                gone += (await self._run("forget", *over))[1]
            if cursor == b"0":
                return gone

    async def settled(self, hold_ids: Sequence[str]) -> Mapping[str, int | None]:
        charge_of: dict[str, int | None] = {}
        for ids in _chunks(hold_ids):
            _, charges = await self._run("settled", *ids)
            settlements = {hold_id: charge for hold_id, charge in zip(ids, charges, strict=True) if charge != _UNKNOWN}
            charge_of |= {hold_id: None if charge == _IS_OPEN else charge for hold_id, charge in settlements.items()}
        return charge_of

    async def count(self, settlements: Sequence[Settlement]) -> None:
        await self._count(settlements, None)

    async def correct(self, charges: Mapping[str, int]) -> int:
        changed = 0
        for some in _chunks(charges.items()):
            parts = [part for hold_id, charged in some for part in (hold_id, check_nano(charged))]
            changed += (await self._run("correct", *parts))[1]
        return changed

    async def join(self) -> bool:
        async with self._loading:
            status, *joined = await self._run("join")
            if status == b"none":
                return False
            await self._put_back(bytes(joined[0]))
            return True

    async def load(
        self,
        posted: Mapping[str, int],
        open_holds: Sequence[Hold] = (),
        settled: Sequence[Settlement] = (),
        ours: Sequence[str] = (),
        put_back_s: float = 0,
    ) -> None:
        for amount in posted.values():
            check_total(amount)
        async with self._loading:
            token = secrets.token_hex(8)
            status, *joined = await self._run("begin", token)
            if status == b"ok":  # nothing was lost, or another gateway has rebuilt
                await self._put_back(bytes(joined[0]))
                return
            epoch = await self._rebuild(token, posted, open_holds, settled, _ms(put_back_s))
            self.confirm(ours)
            await self._put_back(epoch)

    def unconfirmed(self) -> Mapping[str, int]:
        return {hold_id: settled.charged_nano for hold_id, settled in self._settled.items()}

    def confirm(self, hold_ids: Sequence[str]) -> None:
        for hold_id in hold_ids:
            self._settled.pop(hold_id, None)

    async def ready(self) -> bool:
        try:
            await self._run("ping")
            await self._count_late(None)
        except MoneyUnavailable:
            return False
        return True

    async def close(self) -> None:
        await self._script.close()

    async def _settle(self, hold_id: str, state: SettledState, actual_nano: int = 0) -> int:
        hold, _ = self._open.pop(hold_id, (None, 0))
        if hold is not None:
            charge = {"posted": actual_nano, "voided": 0, "uncertain": hold.granted_nano}[state]
            settlement = Settlement(hold_id, charge, tuple(scope.name for scope in hold.scopes))
            _keep(self._settled, hold_id, settlement)
        try:
            status, *rest = await self._run("settle", hold_id, state, actual_nano)
        except MoneyUnavailable:
            if hold is not None:
                _keep(self._late, hold_id, settlement)
            raise
        if status == b"unknown":
            raise hold_unknown(hold_id)
        return int(rest[0])

    async def _rebuild(
        self,
        token: str,
        posted: Mapping[str, int],
        open_holds: Sequence[Hold],
        settled: Sequence[Settlement],
        wait_ms: int,
    ) -> bytes:
        """Rebuild the balances and return the new epoch."""
        for scopes in _chunks(posted.items()):
            await self._run("fill", token, *(part for pair in scopes for part in pair))
        for chunk in _chunks(settled):
            await self._run("known", token, *_settlements(chunk))
        for holds in _chunks(open_holds):
            await self._run("reserve", token, _ms(self._lease_s), *_holds(holds))
        _, epoch = await self._run("commit", token, wait_ms)
        return bytes(epoch)

    async def _put_back(self, epoch: bytes) -> None:
        """Put back the holds and settlements that a rebuild may lack; from then on they are in that epoch."""
        await self._count_late(epoch)
        await self._count(list(self._settled.values()), epoch)
        for holds in _chunks(hold for hold, _ in list(self._open.values())):
            await self._run("restore", _ms(self._lease_s), *_holds(holds), epoch=epoch)
        self._epoch = epoch

    async def _count_late(self, epoch: bytes | None) -> None:
        for some in _chunks(list(self._late.values())):
            await self._count(some, epoch)
            for each in some:
                self._late.pop(each.hold_id, None)

    async def _count(self, settlements: Sequence[Settlement], epoch: bytes | None) -> None:
        for some in _chunks(settlements):
            await self._run("count", *_settlements(some), epoch=epoch)

    async def _run(self, op: str, *args: str | int, epoch: bytes | None = None) -> list[Any]:
        """Run the script: [status, …]. Raises MoneyUnavailable when Redis is away or fences this process out."""
        used_epoch = self._epoch if epoch is None else epoch
        hold = f"{self._hold_prefix}{args[0]}" if op in _ON_A_HOLD else self._hold_prefix
        try:
            reply = await self._script([*self._keys, hold], [op, used_epoch, *args])
        except RedisAway as error:
            log.warning("the budget store is away: %s", error)
            raise _unavailable("the budget store is away") from error
        if reply[0] == b"evicts":
            raise _unavailable(evicts(reply[1].decode()))
        if reply[0] == b"stale":
            if used_epoch == self._epoch:
                self._epoch = b""
            raise _unavailable(_REBUILDING)
        return reply


def other_format(found: str) -> str:
    """What is wrong with a store that gateways of another version use."""
    return (
        f"gateways of another version keep their balances in it, in form {found}: stop all of them, then start this "
        "version; the balances are rebuilt from the ledger"
    )


def evicts(policy: str) -> str:
    """What is wrong with a store of that `maxmemory-policy`."""
    return f"it removes balances when its memory is full (maxmemory-policy {policy}); set maxmemory-policy noeviction"


def _keep(known: dict[str, T], hold_id: str, value: T) -> None:
    """Remember an entry, and forget the oldest beyond the bound."""
    known.setdefault(hold_id, value)
    if len(known) > _OPEN_MAX:
        del known[next(iter(known))]


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while chunk := list(islice(rest, _AT_ONCE)):
        yield chunk


def _holds(holds: Iterable[Hold]) -> Iterator[str | int]:
    for hold in holds:
        yield from (hold.id, hold.granted_nano, len(hold.scopes))
        yield from (scope.name for scope in hold.scopes)


def _settlements(settlements: Iterable[Settlement]) -> Iterator[str | int]:
    for each in settlements:
        yield from (each.hold_id, check_nano(each.charged_nano), len(each.scopes))
        yield from each.scopes


def _limits(scopes: Iterable[Scope]) -> list[str | int]:
    return [part for scope in scopes for part in (scope.name, "" if scope.limit_nano is None else scope.limit_nano)]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _unavailable(why: str) -> MoneyUnavailable:
    return MoneyUnavailable(f"No money can be reserved now: {why}. Retry shortly.", headers={"retry-after": "1"})
