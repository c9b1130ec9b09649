"""The places of requests: how many are open, send a body, are served, and run at the same time.

A request takes its place once its body is there, so that a client that sends slowly holds none. While it sends, it
counts among the bodies of its key.

As many requests run at the same time as this process can serve now; the others wait in order. Requests that wait for a
worker cost no processor time, so hundreds of them are no load; a few dozen that all need the processor are one. The
turn of the event loop tells the two apart: in one turn everything that is ready runs once, so a turn is the least that
anything here waits: a refusal, a probe, a call to Redis and its deadline. While turns are longer than `TURN_S`, fewer
requests run at the same time; once turns are shorter, more do. Other processes of this machine make turns long too,
which fewer requests would change little: so a turn is at most `OTHERS` times the processor time since the clock began.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.errors import RateLimited, Unavailable
from gateway.service.ports.counts import Count

FREE_POSTS = ("/outcomes", "/cancel", "/freeze", "/kill")  # ends of paths that spend nothing, and stop what does
RESERVED = 0.2  # share of the open requests that is kept for those that spend nothing
OPEN_TIMES = 4  # as many requests may be open as this multiple of those that may be served
LARGE_BODY_BYTES = 1 << 20  # smaller ones are not counted
BODIES_BYTES_MAX = 128 << 20  # of large bodies: as many as the journal has room for while its disk is busy
BODY_WAIT_S = 1.0  # nobody knows when a body ends
TURN_EVERY_S = 0.02  # interval of measurements, while any request runs
TURN_S = 0.006
OTHERS = 3  # a turn counts as at most this multiple of its processor time, whatever else this machine does
TURN_SMOOTHING = 0.3  # weight of the newest turn, so that one long turn changes nothing
RUNNING_MIN = 16  # requests that always may run
CUT, GROWTH = 0.8, 1.15  # of one measurement: from RUNNING_MIN to 512 in half a second
CAREFUL = 1.02  # growth beyond the limit of the last cut, as congestion avoidance has it (RFC 5681)
HEADROOM = 2  # the limit grows to this multiple of what runs, so that a burst is measured before all of it runs
WAIT_S_MAX = 3.0  # then a request runs anyway: the others may be streams, which take minutes and no processor
BEHIND_S = 1.0  # a queue whose first has waited longer takes no more
QUEUE_MIN = 128  # unless it is shorter than this: so many clients, each with one request, are never refused


class RequestPlaces:
    """The places of one application. `spending_max` bounds the requests that may spend money, including those whose
    clients have left while their work goes on (`abandoned` counts them). `WorkSlots` says how many of them run at the
    same time. The share RESERVED comes on top, for all other requests, so that outcomes and rollouts work under any
    load. The bodies that one key sends at the same time are bounded by the number of these places; all large ones that
    are here, by their bytes. `shared` counts the requests of all processes of a gateway that may spend money; None:
    there is one process."""

    def __init__(
        self,
        spending_max: int,
        abandoned: Callable[[], int],
        shared: Count | None = None,
        bodies_bytes_max: int = BODIES_BYTES_MAX,
    ) -> None:
        self.slots = WorkSlots(spending_max)
        self.served = self.spending = self.open = 0
        self.served_max = round(spending_max / (1 - RESERVED))
        self.open_max = OPEN_TIMES * self.served_max
        self._spending_max = spending_max
        self._abandoned = abandoned
        self._shared = shared
        self._promises = 0  # places that requests of this turn of the event loop are about to take
        self._sending: Counter[str] = Counter()  # bodies under way, by key
        self.bodies_bytes, self.bodies_bytes_max = 0, bodies_bytes_max  # of large bodies

    def full(self, *, spends: bool) -> bool:
        """Whether no further request of this kind can be served now."""
        if spends and (self._all_spending() + self._promises >= self._spending_max or self.slots.is_behind()):
            return True
        return self.served >= self.served_max or self.open >= self.open_max

    def promise(self) -> None:
        """Count a request that may spend money as if it had its place, until the requests that came in this turn of the
        event loop have taken theirs. Else all that come while one place is free pass, and all but one are refused only
        after they were parsed and their key was looked up."""
        if not self._promises:
            asyncio.get_running_loop().call_soon(self._forget_promises)
        self._promises += 1

    def _forget_promises(self) -> None:
        self._promises = 0

    def spend(self) -> bool:
        """Count one more request that may spend money; False, and not counted, where that is one too many. Only
        another process makes it one too many after `full`."""
        self.spending += 1
        if self._all_spending() <= self._spending_max:
            return True
        self.unspend()
        return False

    def unspend(self) -> None:
        """Count one request less that may spend money."""
        self.spending -= 1
        self._all_spending()

    def _all_spending(self) -> int:
        """The requests of all processes that may spend money. The count of this process is published."""
        own = self.spending + self._abandoned()
        if self._shared is None:
            return own
        self._shared.put(own)
        return self._shared.total

    @contextmanager
    def sending(self, key: str) -> Iterator[None]:
        """Count a body among those that this key sends. Raises RateLimited for one too many."""
        self.begin_sending(key)
        try:
            yield
        finally:
            self.end_sending(key)

    def begin_sending(self, key: str) -> None:
        """Count a body among those that this key sends, until `end_sending`. Raises RateLimited for one too many."""
        sending = self._sending.get(key, 0)
        if sending >= self.served_max:
            raise RateLimited(
                f"This key already sends {self.served_max} bodies; let them end first.", retry_after_s=BODY_WAIT_S
            )
        self._sending[key] = sending + 1

    def end_sending(self, key: str) -> None:
        """Count a body out."""
        self._sending[key] -= 1
        if not self._sending[key]:
            del self._sending[key]


class RequestPlace:
    """The place of one request: open from its creation, served from `take`, until `leave`."""

    def __init__(self, places: RequestPlaces, *, spends: bool) -> None:
        self.places = places
        self._spends = spends
        self._taken = self._runs = False
        self._body_bytes = 0  # of its body, if it is large
        places.open += 1

    def hold(self, body_bytes: int) -> None:
        """Count the body of this request, of which so much has come. Raises Unavailable where no memory is left for it;
        one alone always has some."""
        if body_bytes < LARGE_BODY_BYTES:
            return
        others = self.places.bodies_bytes - self._body_bytes
        if others and others + body_bytes > self.places.bodies_bytes_max:
            raise overloaded()
        self.places.bodies_bytes, self._body_bytes = others + body_bytes, body_bytes

    async def take(self) -> None:
        """Count this request as served, and wait until it may run. Raises Unavailable where no place is left."""
        if self._taken:
            return
        if self.places.full(spends=self._spends) or (self._spends and not self.places.spend()):
            raise overloaded()
        self._taken = True
        self.places.served += 1
        if self._spends:
            await self.places.slots.take()
            self._runs = True

    def leave(self) -> None:
        """Give everything back. Called once."""
        self.places.open -= 1
        self.places.bodies_bytes -= self._body_bytes
        if self._taken:
            self.places.served -= 1
            if self._spends:
                self.places.unspend()
        if self._runs:
            self.places.slots.give()


def spends(method: str, path: str) -> bool:
    """Whether a request may spend money."""
    return method == "POST" and not path.endswith(FREE_POSTS)


def overloaded() -> Unavailable:
    """The error of a request that cannot be served now."""
    return Unavailable("too many requests are being served", code="overloaded", headers={"retry-after": "1"})


class WorkSlots:
    """At most `most` requests run at the same time, and as few as RUNNING_MIN while turns are long. After a rest the
    limit is RUNNING_MIN, so that a burst is measured before all of it runs."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.limit = min(RUNNING_MIN, most)
        self.turn_s = 0.0  # smoothed
        self.running = 0
        self._last_cut = most  # the limit then; `most` if there was none since a rest
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()  # since when each waits, and what it awaits
        self._watching = False

    def is_behind(self) -> bool:
        """Whether so many requests wait for so long that another one would wait too long."""
        if len(self._waiting) < QUEUE_MIN:
            return False
        return time.monotonic() - self._waiting[0][0] > BEHIND_S

    async def take(self) -> None:
        """Wait for a free slot, first come first served, at most WAIT_S_MAX."""
        if self.running < self.limit and not self._waiting:
            self.running += 1
        else:
            await self._wait()
        self._watch()

    def give(self) -> None:
        """Release the slot that take() returned."""
        self.running -= 1
        self._admit()

    def measure(self, turn_s: float) -> None:
        """Adapt the limit to one measured turn."""
        self.turn_s += TURN_SMOOTHING * (turn_s - self.turn_s)
        if self.turn_s <= TURN_S:
            if self.limit < HEADROOM * max(self.running, RUNNING_MIN):
                growth = GROWTH if self.limit < self._last_cut else CAREFUL
                self.limit = min(self._most, max(self.limit + 1, int(self.limit * growth)))
        elif self.running <= self.limit:  # else the last cut has had no effect yet
            self.limit = self._last_cut = min(self._most, max(RUNNING_MIN, int(self.running * CUT)))
        self._admit()

    async def _wait(self) -> None:
        """Wait for a slot. Whoever frees one for us counts it as running."""
        slot = asyncio.get_running_loop().create_future()
        self._waiting.append((time.monotonic(), slot))
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # it was freed for us at this moment
                self.give()
            raise

    def _admit(self) -> None:
        """Let those run that have a slot, or have waited for WAIT_S_MAX."""
        late_s = time.monotonic() - WAIT_S_MAX
        while self._waiting and (self.running < self.limit or self._waiting[0][0] <= late_s):
            _, slot = self._waiting.popleft()
            if not slot.done():
                self.running += 1
                slot.set_result(None)

    def _watch(self) -> None:
        """Measure turns from now on, as long as any request runs."""
        if self._watching:
            return
        self._watching, self._last_cut = True, self._most
        self.limit, self.turn_s = max(self.running, min(RUNNING_MIN, self._most)), 0.0
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_later(TURN_EVERY_S, begin, time.monotonic() + TURN_EVERY_S, time.thread_time())

        def begin(due_s: float, worked_s: float) -> None:
            # how late a timer fires is what an event that comes at any moment waits for the turn under way
            loop.call_soon(end, time.monotonic() - due_s, time.monotonic(), worked_s)

        def end(late_s: float, began_s: float, worked_s: float) -> None:
            turn_s = max(late_s, time.monotonic() - began_s)
            self.measure(min(turn_s, OTHERS * (time.thread_time() - worked_s)))
            self._watching = self.running > 0
            if self._watching:
                again()

        again()
