"""Admission: rate limits, the record of a request, the money held for it, and the loop that will serve it.

Everything here happens before the first worker call leaves. `complete.py` has the way of the request as a whole.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.log.events import Event, random_hex, uuid7
from gateway.core.log.rollout import RolloutRecord
from gateway.core.loop.caps import Caps, Meter
from gateway.core.loop.shown import CONVERSATION_CHARS_MAX
from gateway.core.money.amounts import Usage, cost_nano, nano_to_usd, worst_case_nano
from gateway.core.money.ledger import Hold, org_scope, scopes_of
from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.structured import shape_of
from gateway.core.policies.versions import Pick
from gateway.core.pool.workers import MODEL_KINDS, Price, WorkerSpec, pool_hash
from gateway.errors import BadRequest, CapReached
from gateway.service.loop.auto import AutoPlanner
from gateway.service.loop.bodies import OUTPUT_TOKENS_MIN, price_of
from gateway.service.loop.routers import USAGE_GUESS, CascadeRouter, FixedPlanner, RulePlanner, VoteRouter
from gateway.service.loop.state import HoldRecord, Loop, Tree, no_listener
from gateway.service.ports.money import LEASE_SLACK_S, Budgets
from gateway.service.ports.request import Clock, Embedder, Journal, RateLimits, RateState
from gateway.service.request.catalog import Choice
from gateway.service.request.fitting import Sizes, asked_workers
from gateway.service.request.running import RateEntry, Running

PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-", "embeddings": "embd-"}  # of ids
PROMPT_TOKENS_BOUND = 8_000  # instructions, examples and schema of the longest planning prompt
QUOTED_TOKENS_BOUND = 4 * CONVERSATION_CHARS_MAX  # of the conversation in it
PLAN_GUESS = Usage(2_000, 150)  # a typical planning call
CHEAP_SHARE = 0.25
WORKER_LINE_TOKENS_BOUND = 800  # one worker in it
ROUNDS_OF = {FixedPlanner: 1, RulePlanner: 1, VoteRouter: 1, CascadeRouter: 2}  # of routers: no more, and no fewer


@dataclass(frozen=True, slots=True)
class Policies:
    """Settings of the request path that are neither caps nor ports."""

    caps: Caps
    planning_price: Price
    planning_tokens_max: int
    rounds: int
    attempts_max: int
    explore_share: float
    experience_k: int
    experience_timeout_s: float
    rounds_if_cheap: int = 1  # plans of a request that does not stream, where a plan costs little beside the workers
    examples_max: int = 0  # plans of the same key that the prompt shows
    trial_share: float = 0.0  # of requests under `auto`, for the planner that is not in charge


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
    progress: bool = False  # whether the stream carries a comment for each plan and step
    response: Mapping[str, Any] | None = None  # what the Responses API logs beside the messages
    prefix: str | None = None  # of the reply's id; None: the prefix of its endpoint
    entry: RateEntry | None = None  # how its key's limits counted it before its body was read; None: they have not yet


def no_version(request_id: str) -> Pick | None:
    """Pick no version: the conductor has only one."""
    return None


class Rates:
    """The rate limits of a request: its key's, and its organisation's where that has any."""

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits

    async def enter(self, who: Principal) -> RateEntry:
        """Count a request of which nothing but its key is known. Raises RateLimited."""
        request_id = random_hex()
        return RateEntry(who, request_id, await self.admit(who, request_id, 0))

    async def weigh(self, entry: RateEntry, tokens: int) -> None:
        """Count the tokens that the request may use. Raises RateLimited, and TooLarge for more than fit in a minute."""
        if entry.who.tpm is not None or entry.who.organisation.tpm is not None:
            entry.state = await self.admit(entry.who, entry.id, tokens)

    async def leave(self, entry: RateEntry) -> None:
        """Count out a request that was not started."""
        if entry.counts:
            await self.release(entry.who, entry.id, 0)
            return
        if entry.who.has_rate_limits:
            await self._limits.withdraw(entry.who.public_id, entry.id)
        if entry.who.organisation.has_rate_limits:
            await self._limits.withdraw(org_scope(entry.who.org), entry.id)

    async def admit(self, who: Principal, request_id: str, tokens: int) -> RateState:
        """Count the request in and return what is left to the key. A request that was counted before is counted once,
        with these tokens. Raises RateLimited; then neither counts it."""
        state = await self._limits.admit(who.public_id, request_id, tokens, who.rpm, who.tpm, who.concurrency)
        org = who.organisation
        if org.has_rate_limits:
            try:
                await self._limits.admit(org_scope(who.org), request_id, tokens, org.rpm, org.tpm, org.concurrency)
            except BaseException:  # boundary: whatever stopped it, the key's place in flight is given back
                await self._limits.release(who.public_id, request_id, 0)
                raise
        return state

    async def release(self, who: Principal, request_id: str, tokens_used: int | None) -> None:
        """Count the request out. A key without limits was never counted in."""
        if who.has_rate_limits:
            await self._limits.release(who.public_id, request_id, tokens_used)
        if who.organisation.has_rate_limits:
            await self._limits.release(org_scope(who.org), request_id, tokens_used)


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
        self._journal = journal
        self._embedder = embedder
        self._clock = clock
        self._policies = policies
        self._pick = pick  # the policy version that plans a request, by its id

    def record(self, context: RequestContext, choice: Choice, caps: Caps) -> RolloutRecord:
        now_us = self._clock.now_us()
        rollout_id = uuid7(now_us // 1000)
        principal, chat = context.principal, context.chat
        return RolloutRecord(
            id=rollout_id,
            key_id=principal.public_id,
            org=principal.org,
            created_us=now_us,
            policy_requested=choice.name,
            pool_name=choice.pool,
            pool_hash=pool_hash(choice.workers),
            pool_revision=choice.revision or None,
            pool=[],
            caps=caps.as_json() | ({} if context.quality is None else {"quality": context.quality}),
            request={"model": chat.model, **_messages(chat), **chat.params}
            | ({"response": dict(context.response)} if context.response else {}),
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
        self, record: RolloutRecord, choice: Choice, caps: Caps, sizes: Sizes, chat: ChatRequest, who: Principal
    ) -> tuple[Hold, HoldRecord]:
        """Reserve the worst case of the whole tree in every scope, or in none. Returns the hold and its record. Raises
        CapReached, BudgetExceeded or MoneyUnavailable."""
        most, least = self._bounds(choice, caps, sizes, chat)
        if least > caps.cost_nano:
            raise CapReached(
                "cost",
                f"any answer could cost ${nano_to_usd(least)}; the cap is ${nano_to_usd(caps.cost_nano)}",
            )
        scopes = scopes_of(who, record.end_user, self._clock.now())
        hold = await self._budgets.hold(record.id, most, least, scopes, caps.wall_s + LEASE_SLACK_S)
        payload = {
            "hold_id": hold.id,
            "rollout_id": record.id,
            "amount_nano": hold.granted_nano,
            "scopes": [[scope.name, scope.limit_nano] for scope in hold.scopes],
        }
        return hold, HoldRecord(self._journal, Event.new("hold", self._clock.now_us(), payload))

    def _bounds(self, choice: Choice, caps: Caps, sizes: Sizes, chat: ChatRequest) -> tuple[int, int]:
        """Nano-dollars: (worst case of the tree under the cap on cost, the least that buys one answer)."""
        policies = self._policies
        planned = choice.fallback is not None
        workers = asked_workers(choice)
        if not workers:
            raise BadRequest(f"pool `{choice.pool}` has no model worker for this key", param="model", code="empty_pool")
        planning = 0
        if choice.planner.name in ("conductor", "auto"):
            shown = min(max(size.tokens_max for size in sizes.values()), QUOTED_TOKENS_BOUND)
            prompt_bound = 3 * shown + PROMPT_TOKENS_BOUND + WORKER_LINE_TOKENS_BOUND * len(choice.workers)
            planning = worst_case_nano(policies.planning_price, prompt_bound, policies.planning_tokens_max)
        loops = 1 + caps.steps * min(1, caps.depth) if planned else 1
        calls = caps.calls if planned else policies.attempts_max + (shape_of(chat.params) is not None)
        says = chat.endpoint != "embeddings"  # which have no output
        dearest = max(_call_nano(spec, sizes, says * spec.output_tokens_max, chat) for spec in workers)
        cheapest = min(_call_nano(spec, sizes, says * OUTPUT_TOKENS_MIN, chat) for spec in workers)
        # A version or a request may ask for more rounds than the setting; only the cap bounds them all.
        most = planning * loops * caps.rounds + calls * dearest
        return max(1, min(caps.cost_nano, most)), max(1, planning + cheapest)

    def _rounds(self, choice: Choice, chat: ChatRequest) -> int:
        """The plans of a request that asks for no number. A stream has the first reply as it is written."""
        policies = self._policies
        if policies.rounds_if_cheap == 1 or chat.stream or not plans_cheaply(policies.planning_price, choice.workers):
            return policies.rounds
        return max(policies.rounds, policies.rounds_if_cheap)

    def loop(self, context: RequestContext, choice: Choice, caps: Caps, running: Running, held: HoldRecord) -> Loop:
        record, chat = running.record, context.chat
        draw = random.Random(record.id)  # noqa: S311 - a shuffle that can be repeated from the log, no secret
        workers = list(choice.workers)
        draw.shuffle(workers)
        meter = Meter(record.hold_nano, caps)
        deadline_s, slots = self._clock.monotonic_s() + caps.wall_s, asyncio.Semaphore(caps.parallel)
        tree = Tree(meter, record.id, deadline_s, slots, held, running.tell if context.progress else no_listener)
        version = choice.version or self._pick(record.id)
        trained = version.rounds if version is not None else 1
        explore = record.train and draw.random() < self._policies.explore_share
        trial = record.train and draw.random() < self._policies.trial_share
        planner = choice.planner
        if isinstance(planner, AutoPlanner):
            planner = planner.choose(record.pool_name, record.task_type, trial=trial)
        rounds = ROUNDS_OF.get(type(planner)) or context.rounds or max(self._rounds(choice, chat), trained)
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
            quality=context.quality,
            version=version,
            sticky=context.sticky,
            needs=chat.needs,
            endpoint=chat.endpoint,
            sink=running if chat.stream else None,
            shape=shape_of(chat.params),
        )


def plans_cheaply(price: Price, workers: Sequence[WorkerSpec]) -> bool:
    """Whether a plan costs at most a quarter of the mean call of these workers, both of a typical size."""
    calls = [cost_nano(price_of(spec), USAGE_GUESS) for spec in workers if spec.kind in MODEL_KINDS]
    return sum(calls) > 0 and cost_nano(price, PLAN_GUESS) * len(calls) <= CHEAP_SHARE * sum(calls)


def _call_nano(spec: WorkerSpec, sizes: Sizes, output_bound: int, chat: ChatRequest) -> int:
    """The worst case of one call for the request's choices of `output_bound` tokens each. A worker that takes no `n` is
    called once for each choice."""
    price, input_bound, choices = price_of(spec), sizes[spec.name].tokens_max, chat.choices
    if "n" in spec.cannot:
        return choices * worst_case_nano(price, input_bound, output_bound, media=chat.has_media)
    return worst_case_nano(price, input_bound, output_bound * choices, media=chat.has_media)


def _prefix(context: RequestContext) -> str:
    if context.prefix is not None:
        return context.prefix
    return PREFIXES[context.chat.endpoint] if context.response is None else "resp_"


def _messages(chat: ChatRequest) -> dict[str, Any]:
    """The conversation, for the log; only chat requests have one."""
    return {"messages": [dict(message) for message in chat.messages]} if chat.endpoint == "chat" else {}
