"""The way of a request, top to bottom: resolve → limits → hold → rounds → journal → settle → reply.

The work runs in its own tasks, not in the client's connection. A client that leaves cancels the worker calls; the money
that was spent is still settled, and the rollout is still logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.log.events import Event
from gateway.core.log.redact import Redactor, apply_mode
from gateway.core.log.rollout import as_payload
from gateway.core.loop.experience import question_text
from gateway.core.loop.shown import ShownPlan
from gateway.core.money.amounts import Usage, input_tokens_bound
from gateway.core.money.details import sum_details
from gateway.core.money.ledger import Scope
from gateway.core.openai.parts import remote_parts, with_media
from gateway.core.openai.texts import reply_of, to_log
from gateway.core.policies import grading
from gateway.core.policies.versions import Pick
from gateway.core.pool.workers import MODEL_KINDS
from gateway.errors import BatonError, CapReached, MoneyUnavailable, NotFound, Unavailable
from gateway.service.loop.rounds import Rounds, close_record
from gateway.service.loop.shown import pool_entry, shown_plans
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
    Store,
    WonPlan,
    WorkerExperience,
)
from gateway.service.request.admit import Admission, Policies, Rates, RequestContext, no_version
from gateway.service.request.catalog import Catalog
from gateway.service.request.fitting import prompt_sizes, with_able_workers, with_roomy_workers
from gateway.service.request.running import RateEntry, Running, overhead_ms
from gateway.service.request.states import VendorStates
from gateway.service.request.sticky import Sticky

EXAMPLES_SPARE = 3  # plans that are read for each one that is shown: some are equal, some name workers that are gone


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
        store: Store,
        embedder: Embedder,
        clock: Clock,
        metrics: RequestMetrics,
        policies: Policies,
        redactor: Redactor,
        media: MediaSource,
        sticky: Sticky,
        states: VendorStates,
        pick: Callable[[str], Pick | None] = no_version,
    ) -> None:
        self._catalog = catalog
        self._rounds = rounds
        self._budgets = budgets
        self._rates = Rates(limits)
        self._store = store
        self._embedder = embedder
        self._clock = clock
        self._metrics = metrics
        self._policies = policies
        self._redactor = redactor
        self._sticky = sticky
        self._states = states
        self._media = media
        self._admission = Admission(budgets, journal, embedder, clock, policies, pick)
        self._owned: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        """The number of requests that are admitted and not yet settled and logged."""
        return len(self._owned)

    @asynccontextmanager
    async def entered(self, who: Principal) -> AsyncIterator[RateEntry]:
        """Count a request against the limits of its key, before its body is read. Unless `start` takes it over in the
        block, it is counted out at the end. Raises RateLimited, Unavailable."""
        entry = await self._rates.enter(who)
        try:
            yield entry
        finally:
            if not entry.started:
                entry.left = True
                await self._rates.leave(entry)

    async def start(self, context: RequestContext) -> Running:
        """Admit a request and start its work. Raises BadRequest, NotFound, RateLimited, BudgetExceeded, CapReached or
        Unavailable."""
        policies, principal, chat = self._policies, context.principal, context.chat
        choice = with_able_workers(self._catalog.resolve(principal, chat.model, context.pool, chat.endpoint), chat)
        caps = policies.caps.narrow(principal.caps).narrow(context.caps)
        if context.depth > caps.depth:
            raise CapReached("depth", f"this request comes from {context.depth} gateways deep; the cap is {caps.depth}")
        grading.check(chat.metadata, principal.log_mode)
        self._media.check(remote_parts(chat.messages))
        if chat.dropped:
            self._metrics.dropped(len(chat.dropped))
        input_bound = input_tokens_bound(chat.messages, str(chat.params))
        sizes = await prompt_sizes(self._rounds.tokens, choice, chat, input_bound, caps)
        choice = with_roomy_workers(choice, chat, sizes, caps)
        record = self._admission.record(context, choice, caps)
        async with self._counted(context) as entry:
            await self._rates.weigh(entry, input_bound // 4)
            entry.counts = True
            hold, held = await self._admission.hold(record, choice, caps, sizes, chat, principal)
            entry.started = True
        record.hold_nano = hold.granted_nano
        running = Running(record, chat, entry, hold.scopes)
        loop = self._admission.loop(context, choice, caps, running, held)
        owner = asyncio.create_task(self._own(running, loop))
        self._owned.add(owner)
        owner.add_done_callback(self._owned.discard)
        return running

    @asynccontextmanager
    async def _counted(self, context: RequestContext) -> AsyncIterator[RateEntry]:
        """How the key's limits count a request: as they did before its body was read, or now."""
        entry = context.entry
        if entry is not None and not entry.left:
            yield entry
            return
        async with self.entered(context.principal) as entry:
            entry.counts = False
            yield entry

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
        running.work = asyncio.create_task(self._work(loop))
        body: Mapping[str, Any] | None = None
        try:
            body = await running.work
        except BatonError as error:
            running.error = error
        except asyncio.CancelledError:
            running.work.cancel()
            await asyncio.wait({running.work})  # until the tree has unwound and every upstream connection is closed
            running.error = Unavailable("the request was cancelled", code="cancelled")
            loop.record.status = "aborted"
        except Exception as bug:  # boundary: a bug must still settle its money and leave its log
            self._metrics.bug(bug)
            running.error = BatonError("internal error; the request id finds it in the log")
        await self._finish(running, loop, body)

    async def _work(self, loop: Loop) -> Mapping[str, Any]:
        if parts := remote_parts(loop.conversation):
            media = await all_or_first_error([self._media.fetch(part) for part in parts])
            by_url = {(part.kind, part.url): one for part, one in zip(parts, media, strict=True)}
            loop.conversation = with_media(loop.conversation, by_url)
        await self._states.restore(loop)
        if (back := await self._sticky.planner(loop)) is not None:
            loop.record.pool = [pool_entry(spec, None) for spec in loop.workers]
            if (body := await self._rounds.stick(loop, back)) is not None:
                return body
        if loop.fallback is not None:
            loop.experience, loop.examples = await self._look_up(loop)
        loop.record.pool = [pool_entry(spec, loop.experience.get(spec.name)) for spec in loop.workers]
        return await self._rounds.run(loop)

    async def _look_up(self, loop: Loop) -> tuple[Mapping[str, WorkerExperience], tuple[ShownPlan, ...]]:
        """What the workers did on tasks like this one, and for a prompt that shows them the key's plans that did well.
        Empty when the embedder or the store is slow or away."""
        versions = {spec.name: spec.version for spec in loop.workers if spec.kind in MODEL_KINDS}
        record, policies = loop.record, self._policies
        near: Sequence[WorkerExperience] = ()
        won: Sequence[WonPlan] = ()
        try:
            async with asyncio.timeout(policies.experience_timeout_s):
                like = (record.task_type, await self._embedding(loop), self._embedder.name)
                near = await self._store.experience_near(*like, versions, policies.experience_k)
                if policies.examples_max and loop.planner.name == "conductor":
                    k = EXAMPLES_SPARE * policies.examples_max
                    won = await self._store.plans_near(record.key_id, *like, k)
        except (TimeoutError, BatonError):
            self._metrics.degraded("experience")
        examples = shown_plans(won, loop.workers)[: policies.examples_max]
        return {past.worker: past for past in near if past.n}, tuple(examples)

    async def _embedding(self, loop: Loop) -> list[float]:
        """The vector of the question. Text that goes to an embedder outside the process is scrubbed first; its vector
        is logged where the key logs text."""
        question, record = question_text(loop.conversation), loop.record
        if not self._embedder.logged:
            return await self._embedder.embed(question)
        personal = record.log_mode == "redacted"
        vector = await self._embedder.embed(self._redactor.scrub_text(question, personal=personal))
        if record.log_mode in ("full", "redacted") and any(vector):
            record.task_embedding, record.task_embedder = vector, self._embedder.name
        return vector

    async def _finish(self, running: Running, loop: Loop, body: Mapping[str, Any] | None) -> None:
        record = running.record
        close_record(record, self._clock.now_us())
        record.cost_nano = loop.tree.meter.spent_nano
        if running.error is not None:
            record.error = running.error.body()["error"]
            record.status = record.status if record.status == "aborted" else "failed"
        else:
            record.status = "done"
        record.overhead_ms = overhead_ms(record, self._clock.now_us())
        details = sum_details(step.usage_details for step in record.steps)
        running.usage = Usage(record.prompt_tokens, record.completion_tokens, details=details)
        answered = self._sticky.mark(loop, body) if body is not None else None
        if body is not None:
            running.body = reply_of(
                running.chat,
                body,
                completion_id=record.completion_id,
                created_s=record.created_us // 1_000_000,
                usage=running.usage,
            )
            record.reply = to_log(running.body)
        try:
            kept = self._sticky.remember(answered), self._states.keep(loop, body)
            await asyncio.gather(self._log(loop, running.scopes), *kept)
        except BatonError as error:  # a reply whose rollout is not on disk is not sent
            running.error, running.body = error, None
        await self._settle(running)
        self._metrics.finished(record, overhead_ms(record, self._clock.now_us()))
        running.finished.set()

    async def _log(self, loop: Loop, scopes: Sequence[Scope]) -> None:
        """Put the rollout and the settlement on disk. The last byte of the reply waits for it."""
        record = loop.record
        settle = {
            "hold_id": record.id,
            "rollout_id": record.id,
            "state": "posted" if record.cost_nano else "voided",
            "charged_nano": record.cost_nano,
            "scopes": [[scope.name, None] for scope in scopes],
        }
        records = [record, *loop.tree.children]
        events = [
            self._event("rollout", apply_mode(as_payload(each), each.log_mode, self._redactor)) for each in records
        ]
        await loop.tree.held.close(self._event("settle", settle), *events)

    async def _settle(self, running: Running) -> None:
        """Close the hold and release the rate limits. With Redis away the journal still says what was spent."""
        record = running.record
        try:
            if record.cost_nano:
                await self._budgets.post(record.id, record.cost_nano)
            else:
                await self._budgets.void(record.id)
        except (MoneyUnavailable, NotFound):  # Redis is away or was rebuilt; the ledger has the settlement
            self._metrics.degraded("settle")
        used = record.prompt_tokens + record.completion_tokens
        await self._rates.release(running.principal, running.entry.id, used)

    def _event(self, kind: Any, payload: Mapping[str, Any]) -> Event:
        return Event.new(kind, self._clock.now_us(), payload)
