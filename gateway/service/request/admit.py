"""Admission: the record of a request, the money held for it, and the loop that will serve it.

Everything here happens before the first worker call leaves. `complete.py` has the way of the request as a whole.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.log.events import Event, uuid7
from gateway.core.log.rollout import RolloutRecord
from gateway.core.log.spans import HEADER, traceparent_of
from gateway.core.loop.caps import Caps, Meter
from gateway.core.money.ledger import Hold, Scope, budget_exceeded, scopes_of
from gateway.core.money.sessions import Session, SessionRequest, session_spent
from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.structured import shape_of
from gateway.core.openai.tasks.replies import logged_params
from gateway.core.policies.versions import Pick
from gateway.core.pool.workers import Price, pool_hash
from gateway.errors import (
    BatonError,
    BudgetExceeded,
    BudgetHeld,
    CapReached,
    DeadlineExceeded,
    MoneyUnavailable,
)
from gateway.service.loop.conducting import looks_worth
from gateway.service.loop.routers import (
    CascadeRouter,
    CheckedRouter,
    FixedPlanner,
    RulePlanner,
    VoteRouter,
)
from gateway.service.loop.state import HoldRecord, Loop, Stakes, Tree, no_listener
from gateway.service.money.funds import Funds, Purse, Wish
from gateway.service.ports.money import LEASE_SLACK_S, Budgets
from gateway.service.ports.request import Clock, Embedder, Journal
from gateway.service.request.catalog import Choice, Shares
from gateway.service.request.fitting import Sizes, Sizing
from gateway.service.request.running import Kept, Progress, RateEntry, Reservation, Running

PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-", "embeddings": "embd-"}  # of ids; others begin with their name
CALLS = ":calls"  # ends the id of a hold on a session's calls
CALLS_PER_ATTEMPT = 2  # of a named worker: a reply without all its choices is asked for the rest
ROUNDS_OF = {
    FixedPlanner: 1,
    RulePlanner: 1,
    VoteRouter: 1,
    CascadeRouter: 2,
    CheckedRouter: 1,
}  # of routers: no more, and no fewer


@dataclass(frozen=True, slots=True)
class Policies:
    """Settings of the request path that are neither caps nor ports."""

    caps: Caps
    planning_price: Price
    planning_tokens_max: int
    rounds: int
    attempts_max: int
    shares: Shares
    rounds_most: int = 1  # plans of a request, as far as they are worth their price
    traced: bool = False  # whether requests have a `traceparent`
    held_wait_s: float = 0.0  # how long a request waits for money that others hold
    worth: Mapping[str, Any] = field(default_factory=dict)  # of a right answer, where no key says: usd, seconds

    def stakes(self, principal: Principal, choice: Choice, share: float) -> Stakes:
        """What the bandit decides a request by, of which this share explores."""
        return Stakes(share, (("key", principal.worth), ("pool", choice.worth), ("settings", self.worth)))


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request with what came beside its body: the key, headers, and the depth of a gateway in front of this one."""

    principal: Principal
    chat: ChatRequest
    caps: Mapping[str, Any] = field(default_factory=dict)
    pool: str | None = None
    rounds: int | None = None
    quality: int | None = None  # the dial, see core/loop/prompt.py
    depth: int = 0
    sticky: bool = True  # whether the turn may go back to the worker that asked (service/request/sticky.py)
    progress: Progress = "off"
    response: Mapping[str, Any] | None = None  # what the Responses API logs beside the messages
    prefix: str | None = None  # of the reply's id; None: the prefix of its endpoint
    request_id: str | None = None  # of the reply's `x-request-id`
    traceparent: str | None = None  # as the client sent it
    arrived_s: float | None = None  # when its head was read, on the monotonic clock
    session: SessionRequest | None = None  # the session that it runs in
    entry: RateEntry | None = None  # how its key's limits counted it before its body was read; None: they have not yet
    scopes: tuple[Scope, ...] = ()  # budgets beside those of key, organisation and end user
    kept: Kept | None = None  # of a request that another gateway may go on with
    body_bytes: int = 0  # of its body, as it came; 0: not known


def no_version(request_id: str) -> Pick | None:
    """Pick no version: the conductor has only one."""
    return None


class Admission:
    """Turns a request into a record, a hold and a loop. One object serves the whole process."""

    def __init__(
        self,
        budgets: Budgets,
        journal: Journal,
        embedder: Embedder,
        clock: Clock,
        policies: Policies,
        pick: Callable[[str], Pick | None],
    ) -> None:
        self._budgets = budgets
        self.funds = Funds(budgets, clock, policies.held_wait_s)
        self._journal = journal
        self._embedder = embedder
        self._clock = clock
        self._policies = policies
        self.sizing = Sizing(policies.planning_price, policies.planning_tokens_max)
        self._pick = pick  # the policy version that plans a request, by its id

    def record(
        self, context: RequestContext, choice: Choice, caps: Caps, session: Session | None = None
    ) -> RolloutRecord:
        kept, now_us = context.kept, self._clock.now_us()
        rollout_id = uuid7(now_us // 1000) if kept is None else kept.rollout_id
        principal, chat = context.principal, context.chat
        held = [spec.name for spec in choice.reserve if spec.name not in choice.resting]
        return RolloutRecord(
            id=rollout_id,
            key_id=principal.public_id,
            org=principal.org,
            created_us=now_us if kept is None else kept.created_us,
            policy_requested=choice.name,
            pool_name=choice.pool,
            pool_hash=choice.pool_hash or pool_hash(choice.workers),
            pool_revision=choice.revision or None,
            request_id=context.request_id,
            pool=[],
            caps=caps.as_json()
            | ({} if context.quality is None else {"quality": context.quality})
            | ({} if session is None else {"session": session.id})
            | ({"quarantined": held} if held else {})
            | ({"resting": dict(choice.resting)} if choice.resting else {})
            | ({HEADER: traceparent_of(rollout_id, context.traceparent)} if self._policies.traced else {}),
            request={"model": chat.model, **_messages(chat), **logged_params(chat.params)}
            | dict(context.response or {}),
            completion_id=_prefix(context) + rollout_id.replace("-", ""),
            depth=context.depth,
            end_user=chat.end_user,
            task_type=chat.metadata.get("task_type"),
            task_embedding=[] if self._embedder.logged else None,
            stream=chat.stream,
            log_mode=principal.log_mode,
            train=principal.train and chat.metadata.get("train") != "false" and chat.store is not False,
            tags=dict(chat.metadata),
        )

    async def hold(
        self,
        record: RolloutRecord,
        choice: Choice,
        caps: Caps,
        sizes: Sizes,
        context: RequestContext,
        session: Session | None = None,
    ) -> Reservation:
        """Reserve the worst case of one answer in every scope, or in none; in a session its calls too. Raises
        CapReached, BudgetExceeded, BudgetHeld or MoneyUnavailable."""
        wish = self.sizing.wish(choice, caps, sizes, context.chat)
        scopes: Sequence[Scope] = (
            *scopes_of(context.principal, record.end_user, self._clock.now()),
            *context.scopes,
        )
        if context.kept is not None:
            most, least, scopes = context.kept.terms(wish.most, wish.least, scopes)
            wish = Wish(most, min(max(wish.enough, least), most), least)
        lease_s = caps.wall_s + LEASE_SLACK_S
        try:
            if session is not None:
                return await self._hold_in(session, record, caps, self._calls(choice, caps), wish, scopes, lease_s)
            money = await self.funds.hold(record.id, wish, scopes, lease_s)
            return Reservation(money, HoldRecord(self._journal, self._held(money, record.id)), caps, wish.least)
        except (MoneyUnavailable, asyncio.CancelledError):  # it may be granted yet
            if context.kept is None:  # else it is asked for again under its id
                self._budgets.forsake(record.id)
                self._budgets.forsake(record.id + CALLS)
            raise

    async def _hold_in(
        self,
        session: Session,
        record: RolloutRecord,
        caps: Caps,
        calls_wanted: int,
        wish: Wish,
        scopes: Sequence[Scope],
        lease_s: float,
    ) -> Reservation:
        """`hold` for a request of a session: its calls first, then its money."""
        own, counted = Scope(session.money_scope, session.limits.nano), Scope(session.calls_scope, session.limits.calls)
        try:
            calls = await self.funds.hold(record.id + CALLS, Wish(calls_wanted, 1, 1), [counted], lease_s)
            try:
                money = await self.funds.hold(record.id, wish, [own, *scopes], lease_s)
            except BudgetExceeded:
                await self._budgets.void(calls.id)
                raise
        except BudgetExceeded as refused:
            if refused.scope not in (own.name, counted.name):
                raise
            held, left, needed = isinstance(refused, BudgetHeld), refused.left_nano, refused.needed_nano
            raise session_spent(session, refused.scope, left, needed, held=held) from None
        caps = replace(caps, calls=min(caps.calls, calls.granted_nano))
        written = HoldRecord(self._journal, self._held(money, record.id), self._held(calls, None))
        return Reservation(money, written, caps, wish.least, calls, calls_wanted, session)

    def _held(self, hold: Hold, rollout_id: str | None) -> Event:
        """The journal's event of a hold, as large as it is now. `rollout_id` None: it is of no rollout's money."""
        payload = {
            "hold_id": hold.id,
            "rollout_id": rollout_id,
            "amount_nano": hold.granted_nano,
            "scopes": [[scope.name, scope.limit_nano] for scope in hold.scopes],
        }
        return Event.new("hold", self._clock.now_us(), payload)

    def _calls(self, choice: Choice, caps: Caps) -> int:
        """The worker calls that a request may make."""
        if choice.fallback is not None:
            return caps.calls
        return min(caps.calls, CALLS_PER_ATTEMPT * (self._policies.attempts_max + 1))

    async def at_the_end(self, error: BatonError, reserved: Reservation, meter: Meter) -> BatonError:
        """The error of a request that ended at a cap which a budget had lowered: it names that budget, what was left of
        it, and the fix. Any other error as it is."""
        session, now = reserved.session, self._clock.now()
        if isinstance(error, DeadlineExceeded) and session is not None and session.left_s(now) <= 0:
            return session.ended()
        if not isinstance(error, CapReached):
            return error
        hold, own = reserved.money, meter.granted_nano - meter.spent_nano  # held, and not spent
        if error.cap == "calls" and reserved.calls is not None and reserved.calls.granted_nano < reserved.wanted_calls:
            hold, own = reserved.calls, 0
        elif error.cap != "cost" or not meter.short:
            return error
        limits = {scope.name: scope for scope in hold.scopes if scope.limit_nano is not None}
        try:
            balances = await self._budgets.balances(list(limits))
        except MoneyUnavailable as away:
            return away
        mine = hold.granted_nano if hold is reserved.calls else meter.granted_nano
        left = {
            name: (limits[name].limit_nano or 0) - b.posted_nano - b.held_nano + own for name, b in balances.items()
        }
        tightest = min(left, key=lambda name: left[name])
        others = balances[tightest].held_nano - mine
        if session is not None and tightest in (session.money_scope, session.calls_scope):
            return session_spent(session, tightest, left[tightest], held=others > 0)
        return budget_exceeded(limits[tightest], left[tightest], None, others)

    async def note_cap(self, record: RolloutRecord, reserved: Reservation, meter: Meter) -> None:
        """Note in the record which budget made a cap that ended the request before its plan, if one did."""
        if record.capped in ("cost", "calls"):
            why = await self.at_the_end(CapReached(record.capped, ""), reserved, meter)
            record.caps |= {"capped_by": why.message} if why.message else {}

    def _rounds(self, choice: Choice, context: RequestContext) -> int:
        """The plans of a request that asks for no number: as many as are worth their price. A stream has the reply as
        it is written, and so one plan, unless its client follows what goes on before it."""
        policies, chat = self._policies, context.chat
        if policies.rounds_most == 1 or (chat.stream and context.progress == "off"):
            return policies.rounds
        looks = looks_worth(policies.planning_price, choice.workers, chat.messages, policies.rounds_most)
        return max(policies.rounds, looks)

    def loop(self, context: RequestContext, choice: Choice, running: Running) -> Loop:
        record, chat, reserved = running.record, context.chat, running.reserved
        caps, running.standing = reserved.caps, choice.standing
        workers, draw = list(choice.workers), None
        if not isinstance(choice.planner, FixedPlanner):  # else nothing is drawn, and no prompt shows the workers
            draw = random.Random(record.id)  # noqa: S311 - a shuffle that can be repeated from the log, no secret
            draw.shuffle(workers)
        planner, explore = self._policies.shares.planner_of(choice, record, draw)
        meter = Meter(record.hold_nano, caps, answer_nano=reserved.answer_nano)
        meter.grow = Purse(self.funds, reserved.money, meter, record, reserved.record, self._held).grow
        deadline_s, slots = self._clock.monotonic_s() + caps.wall_s, asyncio.Semaphore(caps.parallel)
        listener = running.tell if context.progress != "off" else no_listener
        calls_id = None if reserved.calls is None else reserved.calls.id
        tree = Tree(meter, record.id, deadline_s, slots, reserved.record, calls_id, listener)
        tree.summaries.workers, tree.templates = choice.summarizers, self.sizing.templates
        version = choice.version or self._pick(record.id)
        trained = version.rounds if version is not None else 1
        rounds = ROUNDS_OF.get(type(planner)) or context.rounds or max(self._rounds(choice, context), trained)
        # Where the rule only stands in, who explores was drawn for another planner: then its choice is certain.
        share = self._policies.shares.explore * record.train if isinstance(planner, RulePlanner) else float(explore)
        return Loop(
            record=record,
            tree=tree,
            conversation=chat.messages,
            params=chat.params,
            workers=tuple(workers),
            experience={},
            planner=planner,
            fallback=choice.fallback,
            caps=caps,
            rounds=min(caps.rounds, rounds),
            explore=explore,
            stakes=self._policies.stakes(context.principal, choice, share),
            quality=context.quality,
            version=version,
            sticky=context.sticky,
            needs=chat.needs,
            endpoint=chat.endpoint,
            sink=running if chat.stream else None,
            shape=shape_of(chat.params),
            hosted=chat.hosted,
            pool_workers=choice.pool_workers,
            drawn=choice.drawn,
            reserve=choice.reserve,
        )


def _prefix(context: RequestContext) -> str:
    if context.prefix is not None:
        return context.prefix
    endpoint = context.chat.endpoint
    return PREFIXES.get(endpoint, f"{endpoint}-") if context.response is None else "resp_"


def _messages(chat: ChatRequest) -> dict[str, Any]:
    """The conversation, for the log; only chat requests have one."""
    return {"messages": [dict(message) for message in chat.messages]} if chat.endpoint == "chat" else {}
