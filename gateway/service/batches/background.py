"""The runner of responses in the background: one in each gateway process. Any gateway goes on with any of them.

After a kill, the claims of the dead process run out with their lease, and this runner or another takes the requests and
goes on from what was saved of them. A gateway that stops gives its requests back, in the middle of their work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from gateway.core.access.keys import Principal
from gateway.errors import BatonError, BudgetHeld
from gateway.service.batches.rests import Rests
from gateway.service.batches.run import DELAY_S, RENEWALS, KeyOf, unlimited
from gateway.service.ports.background import BackgroundRequest, BackgroundStore, Status
from gateway.service.ports.request import Clock

log = logging.getLogger("gateway.background")
STORE_PAUSE_S = 1.0
CANCELLED = "cancelled"  # error code of a request that its client has cancelled


class Claim(Protocol):
    """The claim of this gateway on one request, and what is saved under it."""

    suspending: bool  # whether a cancellation means that another gateway goes on

    @property
    def abandoned(self) -> bool:
        """Whether this gateway has left the request to another one."""
        ...

    def refuse(self) -> None:
        """Let no further call leave: the client has cancelled the request."""
        ...


class Work(Protocol):
    """A request that is being served. `finished` is set at its end."""

    finished: asyncio.Event

    def cancel(self) -> None:
        """Stop every upstream call."""
        ...


Settle = Callable[[BackgroundRequest], Awaitable[None]]
ClaimOf = Callable[[BackgroundStore, str, BackgroundRequest], Claim]  # of the runner with that id


class RequestServer(Protocol):
    """Serves a request in the background as a live one: the same checks, planning, money and log."""

    async def begin(self, who: Principal, request: BackgroundRequest, claim: Any) -> Work:
        """Start the request, or go on with it. Raises BatonError where there will be no rollout."""
        ...


@dataclass(slots=True)
class _Job:
    """One request that this runner has claimed. `work`: once it is being served."""

    request: BackgroundRequest
    claim: Claim
    task: asyncio.Task[None] | None = None
    work: Work | None = None


class BackgroundRunner:
    """Serves requests in the background until it is stopped. `most`: at the same time; 0: none. `settle` closes the
    hold of a request that cannot go on."""

    def __init__(
        self,
        store: BackgroundStore,
        server: RequestServer,
        claim_of: ClaimOf,
        key_of: KeyOf,
        clock: Clock,
        settle: Settle,
        *,
        most: int,
        lease_s: float,
        poll_s: float,
    ) -> None:
        self._store = store
        self._server = server
        self._claim_of = claim_of
        self._key_of = key_of
        self._clock = clock
        self._settle = settle
        self._most = most
        self._lease_s = lease_s
        self._poll_s = poll_s
        self._id = str(uuid4())
        self._jobs: dict[str, _Job] = {}
        self._rests = Rests(poll_s)
        self._stopping = False

    @property
    def serving(self) -> int:
        """The number of requests that are being served."""
        return len(self._jobs)

    def wake(self) -> None:
        """Look for work at once: a request was made or cancelled here."""
        self._rests.wake()

    async def run(self) -> None:
        """Work for ever. While the store is away, requests that are being served wait with their next call."""
        renew_at_s = 0.0
        while not self._stopping:
            try:
                if self._clock.monotonic_s() >= renew_at_s or self._rests.is_woken:
                    self._rests.begin()
                    await self._renew()
                    renew_at_s = self._clock.monotonic_s() + min(self._lease_s / RENEWALS, self._poll_s)
                await self._take()
            except BatonError as error:
                log.warning("responses in the background wait: %s", error.message)
            except Exception:  # boundary: one broken request must not stop the others
                log.exception("responses in the background could not be carried on")
            await self._rests.rest(worked=bool(self._jobs))

    async def drain(self, timeout_s: float) -> None:
        """Begin nothing further; give back what has not ended within `timeout_s`, for another gateway to go on with."""
        self._stopping = True
        self._rests.wake()
        jobs = list(self._jobs.values())
        for job in jobs:
            job.claim.suspending = True
        tasks = {job.task for job in jobs if job.task is not None}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for job in jobs:
                if job.task in late and job.work is not None:
                    job.work.cancel()
            if late:
                await asyncio.wait(late, timeout=timeout_s)
        try:
            await self._store.release(self._id)
        except BatonError as error:
            log.warning("responses in the background are given back once their lease is over: %s", error.message)

    # ------------------------------------------------------------ the loop

    async def _take(self) -> None:
        room = self._most - self.serving
        if room <= 0:
            return
        for request in await self._store.take(self._id, room, self._lease_s):
            job = _Job(request, self._claim_of(self._store, self._id, request))
            self._jobs[request.id] = job
            job.task = asyncio.create_task(self._serve(job), name=request.id)

    async def _renew(self) -> None:
        """Renew the claims, and stop what its clients have cancelled."""
        if not self._jobs:
            return
        for response_id in await self._store.renew(self._id, tuple(self._jobs), self._lease_s):
            if (job := self._jobs.get(response_id)) is not None:
                job.claim.refuse()
                if job.work is not None:
                    job.work.cancel()

    # ------------------------------------------------------------ a request

    async def _serve(self, job: _Job) -> None:
        """Serve a request and end it, or put it off while a store is away or others hold its money. One that cannot be
        ended comes again once its lease is over: then nothing is left to do but that."""
        request = job.request
        try:
            error = await self._served(job)
            if job.claim.abandoned:
                return
            if error is not None and (isinstance(error, BudgetHeld) or error.status == 503) and error.code != CANCELLED:
                await self._store.postpone(request.id, self._id, DELAY_S)
                return
            settled = error is None or error.code == "hold_closed"  # then the log has it, or will
            if not settled:
                await self._settle(request)
            await self._insist(request.id, None if settled else error)
        except Exception:  # boundary: it comes again once its lease is over
            log.exception("%s was not served", request.id)
        finally:
            del self._jobs[request.id]
            self.wake()

    async def _served(self, job: _Job) -> BatonError | None:
        """Serve a request to its end. Returns why it has no rollout; None where it has one."""
        request = job.request
        try:
            if request.status == "cancelling":
                if request.state is None:
                    return None
                job.claim.refuse()
            who = unlimited(await self._key_of(request.key_id))
            job.work = await self._server.begin(who, request, job.claim)
        except BatonError as error:
            return error
        await job.work.finished.wait()
        return None

    async def _insist(self, response_id: str, error: BatonError | None) -> None:
        """End a request, and try again while the store is away, until another runner may take it."""
        status: Status = "done" if error is None else "failed"
        failure = None if error is None else error.body()["error"]
        for left in reversed(range(max(1, int(self._lease_s / STORE_PAUSE_S)))):
            try:
                await self._store.end(response_id, self._id, status, failure)
                return
            except BatonError:
                if not left:
                    raise
                await asyncio.sleep(STORE_PAUSE_S)
