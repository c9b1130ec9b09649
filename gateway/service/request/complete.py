"""The way of a request, top to bottom: resolve → limits → hold → rounds → journal → settle → reply.

The work runs in its own tasks, not in the client's connection. A client that leaves cancels the worker calls; the money
that was spent is still settled, and the rollout is still logged.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.log.events import Event
from gateway.core.log.redact import Redactor, apply_mode
from gateway.core.log.rollout import RolloutRecord, as_payload, close_record
from gateway.core.loop.experience.likeness import question_text
from gateway.core.money.amounts import Usage, input_tokens_bound
from gateway.core.money.details import sum_details
from gateway.core.money.ledger import Hold
from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.parts import with_media
from gateway.core.openai.tasks.replies import reply_of, to_log
from gateway.core.policies import grading
from gateway.core.policies.versions import Pick
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import BatonError, CapReached, MoneyUnavailable, NotFound, Unavailable
from gateway.service.admin.sessions import Sessions
from gateway.service.loop.bodies import hosted_for, texts_beside
from gateway.service.loop.experience.candidates import Shortlist
from gateway.service.loop.experience.failures import note_failures
from gateway.service.loop.experience.lookup import ExperienceLookup
from gateway.service.loop.rounds import Rounds
from gateway.service.loop.routers import CheckedRouter
from gateway.service.loop.shown import pool_entry, shown_pool
from gateway.service.loop.state import Loop
from gateway.service.loop.steps import all_or_first_error
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import (
    Clock,
    Embedder,
    Journal,
    MediaSource,
    RateLimits,
    RequestMetrics,
)
from gateway.service.request.admit import Admission, Policies, RequestContext, no_version
from gateway.service.request.catalog import Catalog, Choice
from gateway.service.request.fitting import (
    Fitter,
    Held,
    likely_tokens,
    parts_to_fetch,
    summarizers_of,
    with_able_workers,
)
from gateway.service.request.running import Entering, Rates, Running, overhead_ms
from gateway.service.request.states import VendorStates
from gateway.service.request.sticky import Sticky
from gateway.threads import beside


def none_held(workers: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
    """No worker is in quarantine."""
    return ()


class Completer:
    """Serves requests over the ports. One object serves the whole process."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        rounds: Rounds,
        budgets: Budgets,
        limits: RateLimits,
        journal: Journal,
        embedder: Embedder,
        clock: Clock,
        metrics: RequestMetrics,
        policies: Policies,
        redactor: Redactor,
        media: MediaSource,
        sticky: Sticky,
        states: VendorStates,
        sessions: Sessions,
        shortlist: Shortlist,
        looks: ExperienceLookup,
        pick: Callable[[str], Pick | None] = no_version,
        held: Held = none_held,
    ) -> None:
        """`pick`: the policy version of a request. `held`: which workers are in quarantine."""
        self._catalog = catalog
        self._rounds = rounds
        self._budgets = budgets
        self._rates = Rates(limits)
        self._clock = clock
        self._metrics = metrics
        self._policies = policies
        self._sticky = sticky
        self._states = states
        self._sessions = sessions
        self._redactor = redactor
        self._media = media
        self._shortlist = shortlist
        self._looks = looks
        self._admission = Admission(budgets, journal, embedder, clock, policies, pick)
        self._fitter = Fitter(self._shortlisted, rounds.tokens, self._admission.sizing.wish, held)
        self._owned: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        """The number of requests that are admitted and not yet settled and logged."""
        return len(self._owned)

    def entered(self, who: Principal) -> Entering:
        """Count a request against the limits of its key, before its body is read. Unless `start` takes it over in the
        block, it is counted out at the end. To enter raises RateLimited, Unavailable."""
        return Entering(self._rates, who)

    async def start(self, context: RequestContext) -> Running:
        """Admit a request and start its work. Raises BadRequest, NotFound, RateLimited, BudgetExceeded, CapReached or
        Unavailable."""
        policies, principal, chat = self._policies, context.principal, context.chat
        asked = self._catalog.resolve(principal, chat.model, context.pool, chat.endpoint)
        choice = with_able_workers(asked, chat)
        if chat.left_out:
            lacking = [hosted_for(spec, chat.hosted)[1] for spec in choice.workers]
            left_out = (name for name in chat.left_out if all(name in names for names in lacking))
            chat = replace(chat, left_out=tuple(left_out))
        session = None if context.session is None else await self._sessions.enter(principal.public_id, context.session)
        caps = self._sessions.narrow(policies.caps.narrow(principal.caps).narrow(context.caps), session)
        if context.depth > caps.depth:
            raise CapReached("depth", f"this request comes from {context.depth} gateways deep; the cap is {caps.depth}")
        grading.check(chat.metadata, principal.log_mode)
        if chat.media:
            self._media.check(parts_to_fetch(chat.messages, choice))
        if chat.dropped:
            self._metrics.dropped(len(chat.dropped))
        input_bound = input_tokens_bound(chat.messages, texts_beside(chat.params))
        choice, sizes = await self._fitter.fit(choice, chat, input_bound, caps, principal)
        if choice.reserve:
            choice = replace(choice, resting=self._rounds.rests.reasons(choice.reserve))
        if summarizers := summarizers_of(self._rounds.summaries, asked, choice, chat):
            choice = replace(choice, summarizers=summarizers)
        record = self._admission.record(context, choice, caps, session)
        async with self._counted(context) as entry:
            await self._rates.weigh(entry, input_bound // 4)
            entry.counts = True
            reserved = await self._admission.hold(record, choice, caps, sizes, context, session)
            entry.started = True
        record.hold_nano = reserved.money.granted_nano
        if context.arrived_s is not None:
            self._metrics.admitted(self._clock.monotonic_s() - context.arrived_s)
        running = Running(record, chat, entry, reserved)
        running.progress, running.body_bytes = context.progress, context.body_bytes
        running.input_tokens = likely_tokens(sizes, input_bound)
        loop = self._admission.loop(context, choice, running)
        if context.kept is not None:
            running.kept = context.kept
            await context.kept.begin(loop, reserved.money, reserved.calls)
        if session is not None:
            self._sessions.add(session, running.stop)
        owner = asyncio.create_task(self._own(running, loop))
        self._owned.add(owner)
        owner.add_done_callback(self._owned.discard)
        return running

    async def _shortlisted(self, choice: Choice, chat: ChatRequest, tokens: int, who: Principal) -> Choice:
        """The choice with the candidates of a large pool, where the request is planned and names no workers."""
        if choice.fallback is None or isinstance(choice.planner, CheckedRouter):
            return choice
        kind, draw = chat.metadata.get("task_type"), random.Random()  # noqa: S311 - the log has the probability
        chosen = await self._shortlist.of(
            choice.workers,
            lambda: self._looks.sendable(question_text(chat.messages), who.log_mode),
            (who.org, kind),
            tokens,
            draw,
        )
        if len(chosen.workers) == len(choice.workers):
            return choice
        return replace(
            choice, workers=chosen.workers, pool_workers=choice.pool_workers or choice.workers, drawn=chosen.drawn
        )

    def _counted(self, context: RequestContext) -> Entering:
        """How the key's limits count a request: as they did before its body was read, or now."""
        entry = context.entry if context.entry is not None and not context.entry.left else None
        return Entering(self._rates, context.principal, entry, counts=False)

    async def drain(self, timeout_s: float) -> int:
        """Wait for open requests and cancel those left after `timeout_s`. Returns the number of cancelled requests."""
        _, late = await asyncio.wait(self._owned, timeout=timeout_s) if self._owned else (None, set())
        for task in late:
            task.cancel()  # `_own` cancels the work and still settles
        if late:
            await asyncio.wait(late, timeout=timeout_s)
        return len(late)

    # ------------------------------------------------------------ the work

    async def _own(self, running: Running, loop: Loop) -> None:
        """Own one request to its end: run, log, settle, release. Runs in its own task."""
        running.work = owner = asyncio.current_task()
        body: Mapping[str, Any] | None = None
        try:
            body = await self._begin(running, loop)
        except BatonError as error:
            running.error = error
        except asyncio.CancelledError:  # the tree has unwound, and every upstream connection is closed
            running.work = None
            if owner is not None:
                owner.uncancel()
            if running.kept is not None and running.kept.suspending:
                running.kept.abandon()
            body = await self._best_of_stopped(running, loop)
            if body is None:
                running.error = running.stopped or Unavailable("the request was cancelled", code="cancelled")
                loop.record.status = "aborted"
        except Exception as bug:  # boundary: a bug must still settle its money and leave its log
            self._metrics.bug(bug)
            running.error = BatonError("internal error; the request id finds it in the log")
        running.work = None  # from here on nothing cancels it but the end of the process
        if running.kept is not None and running.kept.abandoned:
            return await self._leave(running)
        await self._end(running, loop, body)

    async def _end(self, running: Running, loop: Loop, body: Mapping[str, Any] | None) -> None:
        """Log, settle and release, and let nobody wait for ever."""
        try:
            await self._finish(running, loop, body)
            await self._settle(running, loop.tree.meter.calls)
        except BaseException as bug:  # boundary: recovery settles what is left, but nobody may wait for ever
            if not running.finished.is_set():
                running.error, running.body = BatonError("internal error; its money is settled by recovery"), None
            if not isinstance(bug, Exception):
                raise
            self._metrics.bug(bug)
        finally:
            running.finish()

    async def _leave(self, running: Running) -> None:
        """Leave a request to another gateway, with its hold: it is neither settled nor logged here."""
        if running.reserved.session is not None:
            self._sessions.remove(running.reserved.session, running.stop)
        await self._rates.release(running.principal, running.entry.id, 0)
        running.error = running.error or Unavailable("another gateway goes on with the request", code="taken_over")
        running.finish()

    async def _best_of_stopped(self, running: Running, loop: Loop) -> Mapping[str, Any] | None:
        """The best answer so far of a request that its session has ended; None where there is none."""
        if running.stopped is None:
            return None
        running.work = work = asyncio.create_task(self._rounds.best_so_far(loop, running.stopped, "session"))
        try:
            return await work
        except (BatonError, asyncio.CancelledError):
            return None

    async def _begin(self, running: Running, loop: Loop) -> Mapping[str, Any]:
        session = running.reserved.session
        if session is not None and loop.sink is not None:  # the headers of a stream go first
            running.left = await self._sessions.left(session)
        return await self._work(loop)

    async def _work(self, loop: Loop) -> Mapping[str, Any]:
        if loop.needs and (parts := parts_to_fetch(loop.conversation, loop)):
            media = await all_or_first_error([self._media.fetch(part) for part in parts])
            by_url = {(part.kind, part.url): one for part, one in zip(parts, media, strict=True)}
            loop.conversation = with_media(loop.conversation, by_url)
        await self._states.restore(loop)
        looks = self._looks
        back = await self._sticky.planner(loop, partial(looks.vector, loop), partial(looks.read, loop))
        if back is not None:
            loop.record.pool = [pool_entry(spec, None) for spec in loop.workers]
            if (body := await self._rounds.stick(loop, back)) is not None:
                return body
            loop.record.turn = {**(loop.record.turn or {}), "kept": False, "why": "worker_failed"}
        if loop.fallback is not None:
            await looks.read(loop)
        loop.record.pool = shown_pool(loop)
        return await self._rounds.run(loop)

    async def _finish(self, running: Running, loop: Loop, body: Mapping[str, Any] | None) -> None:
        record = running.record
        close_record(record, self._clock.now_us())
        record.cost_nano = loop.tree.meter.spent_nano
        self._admission.sizing.planned(record.pool_name, loop.tree.meter.plan_tokens)
        if running.error is not None:
            running.error = await self._admission.at_the_end(running.error, running.reserved, loop.tree.meter)
            record.error = {**running.error.body()["error"], "message": running.error.in_full}
            if running.principal.is_operators:
                running.error.message = running.error.in_full
            record.status = record.status if record.status == "aborted" else "failed"
        else:
            record.status = "done"
            await self._admission.note_cap(record, running.reserved, loop.tree.meter)
        if running.kept is None:  # one in the background waits, and survives gateways
            record.overhead_ms = overhead_ms(record, self._clock.now_us())
        details = sum_details(step.usage_details for step in record.steps)
        running.usage = Usage(record.prompt_tokens, record.completion_tokens, details=details)
        sticky = self._sticky
        answered = sticky.mark_failure(loop, running.error) if body is None else sticky.mark(loop, body)
        if body is not None:
            running.body = reply_of(
                running.chat,
                body,
                completion_id=record.completion_id,
                created_s=record.created_us // 1_000_000,
                usage=running.usage,
            )
            record.reply = to_log(running.chat.endpoint, running.body)
        try:
            kept = [] if answered is None else [self._sticky.remember(answered)]
            if states := self._states.of(body):
                kept.append(self._states.keep(loop, states))
            logged = self._log(loop, running)
            await (asyncio.gather(logged, *kept) if kept else logged)
        except BatonError as error:  # a reply whose rollout is not on disk is not sent
            running.error, running.body = error, None
        took_ms = overhead_ms(record, self._clock.now_us()) if running.kept is None else 0.0
        self._metrics.finished(record, took_ms, loop.tree.children)

    async def _log(self, loop: Loop, running: Running) -> None:
        """Put the rollout and its settlements on disk. The last byte of the reply waits for it."""
        record, reserved = loop.record, running.reserved
        settles = [self._settlement(reserved.money, record.id, record.cost_nano)]
        if reserved.calls is not None:
            settles.append(self._settlement(reserved.calls, None, loop.tree.meter.calls))
        records = [record, *loop.tree.children]
        for each in records:
            note_failures(each)
        self._looks.learn_failures(loop)
        payloads = await beside(running.body_bytes, self._payloads, records)
        await loop.tree.held.close(settles, *[self._event("rollout", payload) for payload in payloads])

    def _payloads(self, records: Sequence[RolloutRecord]) -> list[dict[str, Any]]:
        """The records as they may be logged."""
        return [apply_mode(as_payload(each), each.log_mode, self._redactor) for each in records]

    def _settlement(self, hold: Hold, rollout_id: str | None, charged: int) -> Event:
        payload = {
            "hold_id": hold.id,
            "rollout_id": rollout_id,
            "state": "posted" if charged else "voided",
            "charged_nano": charged,
            "scopes": [[scope.name, None] for scope in hold.scopes],
        }
        return self._event("settle", payload)

    async def _settle(self, running: Running, calls: int) -> None:
        """Close the holds and release the rate limits. With Redis away the journal still says what was spent. The reply
        waits for it only where the client's next request may depend on more than the order of commands to Redis."""
        record, reserved = running.record, running.reserved
        if reserved.session is None and reserved.calls is None and not self._rates.counts(running.principal):
            closing = asyncio.create_task(self._close(reserved.money, record.cost_nano))
            await asyncio.sleep(0)  # its command leaves before the reply
            running.finish()
            return await closing
        await self._close(reserved.money, record.cost_nano)
        if reserved.calls is not None:
            await self._close(reserved.calls, calls)
        if reserved.session is not None:
            self._sessions.remove(reserved.session, running.stop)
            running.left = await self._sessions.left(reserved.session)
        used = record.prompt_tokens + record.completion_tokens
        await self._rates.release(running.principal, running.entry.id, used)

    async def _close(self, hold: Hold, charged: int) -> None:
        try:
            await (self._budgets.post(hold.id, charged) if charged else self._budgets.void(hold.id))
        except (MoneyUnavailable, NotFound):  # Redis is away or was rebuilt; the ledger has the settlement
            self._metrics.degraded("settle")
        self._admission.funds.freed(hold.scopes)

    def _event(self, kind: Any, payload: Mapping[str, Any]) -> Event:
        return Event.new(kind, self._clock.now_us(), payload)
