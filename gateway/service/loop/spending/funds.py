"""The money of requests under way: holds that wait for held money, and holds that grow.

A request holds one answer at first and grows as it goes on, so that a budget serves many at a time. Money that other
requests hold mostly comes back. So a hold that it would make room for waits a little, in the order in which requests
came; one that grows waits before those that begin.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gateway.core.log.events import Event
from gateway.core.log.rollout import RolloutRecord
from gateway.core.loop.caps import Meter
from gateway.core.money.ledger import Hold, Scope
from gateway.errors import BatonError, BudgetExceeded, BudgetHeld
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Clock, Journal

LOOK_S = 0.1  # how often the first of those who wait looks whether another process has freed money
GROW_WAIT_S = 2.0  # at most; a request that cannot grow goes on with what it has
WAITING_MAX = 2000  # requests of this process
EXHAUSTED_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Wish:
    """Nano-dollars of a hold: the `most` that is of use, what is `enough` to begin without waiting for more, and the
    `least` to begin at all."""

    most: int
    enough: int
    least: int


class HoldRecord:
    """The journal's record of a request's holds: of its money, and of its calls where its session counts them. It goes
    to disk with the first event under it, in one fsync: a hold under which no call has left costs nothing, even if this
    process dies."""

    def __init__(self, journal: Journal, *holds: Event) -> None:
        self._journal = journal
        self._holds = holds
        self._grown: tuple[Event, ...] = ()
        self._written: asyncio.Future[None] | None = None

    def grown(self, hold: Event) -> None:
        """The hold of the money has grown to this. It is on disk before the next call leaves, instead of what it was or
        behind it; the ledger goes by the largest."""
        if self._written is None:
            self._holds = (hold, *self._holds[1:])
        else:
            self._grown = (hold,)

    async def append(self, *events: Event) -> None:
        """Return once the holds and these events are on disk. Raises SpoolFull where one of them finds no room."""
        events, self._grown = (*self._grown, *events), ()
        if self._written is None:
            self._written = asyncio.ensure_future(self._journal.append(*self._holds, *events))
            await asyncio.shield(self._written)
        elif self._written.done():
            self._written.result()
            await self._journal.append(*events)
        else:
            await asyncio.gather(asyncio.shield(self._written), self._journal.append(*events))

    async def close(self, settles: Sequence[Event], *rest: Event) -> None:
        """Write the closing records. Skip `settles` if the holds were never written. Closing records find room even
        where the holds did not."""
        if self._written is None:
            await self.append(*settles, *rest)
            return
        if not self._written.done():
            await asyncio.wait({self._written})
        lost = self._written.cancelled() or self._written.exception() is not None
        if last := rest if lost else (*settles, *rest):
            await self._journal.append(*last)


class Funds:
    """Reserves money for the requests of this process. `wait_s`: how long a hold waits for money that others hold."""

    def __init__(self, budgets: Budgets, clock: Clock, wait_s: float) -> None:
        self._budgets, self._clock, self._wait_s = budgets, clock, wait_s
        self._lines: dict[str, deque[asyncio.Event]] = {}  # by the scope whose money is waited for
        self._waiting = 0

    async def hold(self, hold_id: str, wish: Wish, scopes: Sequence[Scope], lease_s: float) -> Hold:
        """Reserve money, and wait for it while others hold it. Raises BudgetExceeded, BudgetHeld or MoneyUnavailable;
        a hold that the store may have granted all the same is then as for `Budgets.hold`."""
        until_s, least = self._clock.monotonic_s() + self._wait_s, wish.enough
        line = next((scope.name for scope in scopes if scope.name in self._lines), None)
        with _Place(self, line) as place:
            while True:
                over = not await place.turn(until_s)
                least = wish.least if over else least
                try:
                    return await self._budgets.hold(hold_id, wish.most, least, scopes, lease_s)
                except BudgetHeld as refused:
                    if over or not place.join(refused.scope):
                        raise
                except BudgetExceeded as refused:
                    if least == wish.least:
                        self._note(refused.scope)
                        raise
                    least = wish.least

    async def grow(self, hold: Hold, total_nano: int) -> Hold:
        """Let a hold grow to this total, and wait for what others hold of it. Returns what came of it. Raises
        MoneyUnavailable, Conflict and NotFound."""
        until_s = self._clock.monotonic_s() + min(self._wait_s, GROW_WAIT_S)
        hold = await self._budgets.grow(hold, total_nano)
        if hold.granted_nano >= total_nano or (scope := await self._held_by_others(hold, total_nano)) is None:
            return hold
        with _Place(self, None) as place:
            place.join(scope, first=True)
            while hold.granted_nano < total_nano and await place.turn(until_s):
                hold = await self._budgets.grow(hold, total_nano)
        return hold

    def freed(self, scopes: Iterable[Scope]) -> None:
        """Money of these scopes was freed."""
        for scope in scopes:
            self.wake(scope.name)

    def wake(self, line: str) -> None:
        """Let the first in this line look."""
        if waiting := self._lines.get(line):
            waiting[0].set()

    async def _held_by_others(self, hold: Hold, total_nano: int) -> str | None:
        """The scope with too little left, if all that it lacks is held by other requests."""
        limits = {scope.name: scope.limit_nano for scope in hold.scopes if scope.limit_nano is not None}
        balances = await self._budgets.balances(list(limits))
        more, tightest = total_nano - hold.granted_nano, None
        for name, limit in limits.items():
            free = limit - balances[name].posted_nano - hold.granted_nano
            if free < more:
                return None
            if free - (balances[name].held_nano - hold.granted_nano) < more:
                tightest = name
        return tightest

    def _note(self, scope: str) -> None:
        if len(self._budgets.exhausted) < EXHAUSTED_MAX:
            self._budgets.exhausted.add(scope)

    # ------------------------------------------------------------ of `_Place`

    def enter(self, line: str, mine: asyncio.Event, *, first: bool) -> bool:
        """Join a line; False where too many wait."""
        if self._waiting >= WAITING_MAX or self._wait_s <= 0:
            return False
        waiting = self._lines.setdefault(line, deque())
        (waiting.appendleft if first else waiting.append)(mine)
        self._waiting += 1
        return True

    def leave(self, line: str, mine: asyncio.Event) -> None:
        """Leave a line, and let the next one look."""
        waiting = self._lines[line]
        waiting.remove(mine)
        self._waiting -= 1
        if not waiting:
            del self._lines[line]
        self.wake(line)

    async def turn(self, line: str, mine: asyncio.Event, until_s: float) -> bool:
        """Wait until it is time to look; False once `until_s` is over."""
        while (left_s := until_s - self._clock.monotonic_s()) > 0:
            leads = self._lines[line][0] is mine
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, LOOK_S) if leads else left_s):
                    await mine.wait()
            mine.clear()
            if self._lines[line][0] is mine:
                return True
        return False


class _Place:
    """A place in a line, for the time of a block. Without one it is always its turn."""

    def __init__(self, funds: Funds, line: str | None) -> None:
        self._funds, self._mine = funds, asyncio.Event()
        self._line: str | None = None
        if line is not None:
            self.join(line)

    def __enter__(self) -> _Place:
        return self

    def __exit__(self, *_: object) -> None:
        if self._line is not None:
            self._funds.leave(self._line, self._mine)

    def join(self, line: str, *, first: bool = False) -> bool:
        """Join a line, unless it stands in one; False where that line is full."""
        if self._line is None and self._funds.enter(line, self._mine, first=first):
            self._line = line
        return self._line is not None

    async def turn(self, until_s: float) -> bool:
        """Wait until it is time to look; False once `until_s` is over."""
        return self._line is None or await self._funds.turn(self._line, self._mine, until_s)


class Purse:
    """The hold of one request, which grows while it runs. `event` makes the journal's record of it."""

    def __init__(
        self,
        funds: Funds,
        hold: Hold,
        meter: Meter,
        record: RolloutRecord,
        held: HoldRecord,
        event: Callable[[Hold, str], Event],
    ) -> None:
        self._funds, self._hold, self._meter, self._record = funds, hold, meter, record
        self._held, self._event, self._lock = held, event, asyncio.Lock()
        meter.room_nano = hold.room_nano

    async def grow(self, nano: int) -> None:
        """Enlarge the hold until `nano` is left of it, as far as the cap on cost and the budgets allow."""
        async with self._lock:
            meter = self._meter
            total = min(meter.caps.cost_nano, meter.granted_nano + nano - meter.left_nano)
            if total <= meter.granted_nano:
                return
            try:
                grown = await self._funds.grow(self._hold, total)
            except BatonError:  # without the store the request goes on with what it has
                meter.short = True
                return
            meter.room_nano, meter.short = grown.room_nano, grown.granted_nano < total
            if grown.granted_nano > meter.granted_nano:
                self._held.grown(self._event(grown, self._record.id))
            self._hold, meter.granted_nano = grown, grown.granted_nano
            self._record.hold_nano = grown.granted_nano
