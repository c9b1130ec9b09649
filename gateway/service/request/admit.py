"""Admission: what is asked for, the record it starts, the money held for it, and the loop it becomes.

Everything here happens before the first call leaves; `complete.py` is the way of the request as a whole.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.log.events import Event
from gateway.core.log.ids import uuid7
from gateway.core.log.rollout import RolloutRecord
from gateway.core.loop.caps import Caps
from gateway.core.loop.meter import Meter
from gateway.core.money.amounts import nano_to_usd, worst_case_nano
from gateway.core.money.scopes import scopes_of
from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.parts import media_parts
from gateway.core.openai.structured import shape_of
from gateway.core.policies.versions import Pick
from gateway.core.pool.workers import MODEL_KINDS, Price, WorkerSpec, pool_hash
from gateway.errors import BadRequest, CapReached
from gateway.service.loop.bodies import OUTPUT_TOKENS_MIN, price_of
from gateway.service.loop.routers import CascadeRouter, FixedPlanner, RulePlanner, VoteRouter
from gateway.service.loop.state import HoldRecord, Loop, Tree, nobody
from gateway.service.ports.request import Budgets, Clock, Embedder, Hold, Journal
from gateway.service.request.catalog import Choice
from gateway.service.request.running import Running

LEASE_SLACK_S = 30.0
PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-", "embeddings": "embd-"}  # of ids
PROMPT_TOKENS_BOUND = 8_000  # instructions, examples and schema of the longest planning prompt
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


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with what came beside its body: caps and pool by header, and the depth of a gateway before us."""

    principal: Principal
    chat: ChatRequest
    caps: Mapping[str, Any] = field(default_factory=dict)
    pool: str | None = None
    rounds: int | None = None
    quality: int | None = None  # the dial, see core/loop/prompt.py
    depth: int = 0
    sticky: bool = True  # whether the turn may go back to the worker that asked (service/request/sticky.py)
    progress: bool = False  # its stream tells of plans and steps as they happen
    response: Mapping[str, Any] | None = None  # of the Responses API: what is logged beside the messages, if anything


def no_version(request_id: str) -> Pick | None:
    """The `pick` of a gateway whose conductor has one version."""
    return None


class Admission:
    """Turns what is asked into a record, a hold and a loop. One for the whole process."""

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

    def record(self, asked: Asked, choice: Choice, caps: Caps) -> RolloutRecord:
        now_us = self._clock.now_us()
        rollout_id = uuid7(now_us // 1000)
        principal, chat = asked.principal, asked.chat
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
            caps=caps.as_json() | ({} if asked.quality is None else {"quality": asked.quality}),
            request={"model": chat.model, **_said(chat), **chat.params}
            | ({"response": dict(asked.response)} if asked.response else {}),
            completion_id=_prefix(asked) + rollout_id.replace("-", ""),
            depth=asked.depth,
            end_user=chat.end_user,
            task_type=chat.metadata.get("task_type"),
            task_embedding=[] if self._embedder.logged else None,
            stream=chat.stream,
            log_mode=principal.log_mode,
            train=principal.train and chat.metadata.get("train") != "false" and chat.store is not False,
            tags=dict(chat.metadata),
        )

    async def hold(
        self, record: RolloutRecord, choice: Choice, caps: Caps, input_bound: int, chat: ChatRequest, who: Principal
    ) -> tuple[Hold, HoldRecord]:
        """Reserve the worst case of the whole tree, in every scope or none; the hold, and its record."""
        most, least = self._bounds(choice, caps, input_bound, chat)
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

    def _bounds(self, choice: Choice, caps: Caps, input_bound: int, chat: ChatRequest) -> tuple[int, int]:
        """(worst case of the tree under the cap on cost, least with which one answer can be had), in nano-dollars."""
        policies = self._policies
        planned = choice.fallback is not None
        named = choice.planner.name.removeprefix("fixed:")
        workers = [spec for spec in choice.workers if (spec.kind in MODEL_KINDS if planned else spec.name == named)]
        if not workers:
            raise BadRequest(f"pool `{choice.pool}` has no model worker for this key", param="model", code="empty_pool")
        planning = 0
        if choice.planner.name in ("conductor", "auto"):
            prompt_bound = 3 * input_bound + PROMPT_TOKENS_BOUND + WORKER_LINE_TOKENS_BOUND * len(choice.workers)
            planning = worst_case_nano(policies.planning_price, prompt_bound, policies.planning_tokens_max)
        loops = 1 + caps.steps * min(1, caps.depth) if planned else 1
        calls = caps.calls if planned else policies.attempts_max + (shape_of(chat.params) is not None)
        says = chat.endpoint != "embeddings"  # which have no output
        dearest = max(_call_nano(spec, input_bound, says * spec.output_tokens_max, chat.choices) for spec in workers)
        cheapest = min(_call_nano(spec, input_bound, says * OUTPUT_TOKENS_MIN, chat.choices) for spec in workers)
        # A version's own rounds and a request's may be more than the setting's: only the cap bounds them all.
        most = planning * loops * caps.rounds + calls * dearest
        return max(1, min(caps.cost_nano, most)), max(1, planning + cheapest)

    def loop(self, asked: Asked, choice: Choice, caps: Caps, running: Running, held: HoldRecord) -> Loop:
        record, chat = running.record, asked.chat
        draw = random.Random(record.id)  # noqa: S311 - a shuffle that can be repeated from the log, no secret
        workers = list(choice.workers)
        draw.shuffle(workers)
        meter = Meter(record.hold_nano, caps)
        deadline_s, slots = self._clock.monotonic_s() + caps.wall_s, asyncio.Semaphore(caps.parallel)
        tree = Tree(meter, record.id, deadline_s, slots, held, running.tell if asked.progress else nobody)
        version = choice.version or self._pick(record.id)
        trained = version.rounds if version is not None else 1
        rounds = ROUNDS_OF.get(type(choice.planner)) or asked.rounds or max(self._policies.rounds, trained)
        return Loop(
            record=record,
            tree=tree,
            conversation=chat.messages,
            params=chat.params,
            workers=tuple(workers),
            experience={},
            planner=choice.planner,
            fallback=choice.fallback,
            caps=caps,
            rounds=min(caps.rounds, rounds),
            explore=record.train and draw.random() < self._policies.explore_share,
            quality=asked.quality,
            version=version,
            sticky=asked.sticky,
            endpoint=chat.endpoint,
            sink=running if chat.stream else None,
            shape=shape_of(chat.params),
        )


def _call_nano(spec: WorkerSpec, input_bound: int, output_bound: int, choices: int) -> int:
    """The worst case of one call for so many choices, of `output_bound` tokens each; of as many calls where the worker
    gives one choice at a time."""
    if "n" in spec.cannot:
        return choices * worst_case_nano(price_of(spec), input_bound, output_bound)
    return worst_case_nano(price_of(spec), input_bound, output_bound * choices)


def _prefix(asked: Asked) -> str:
    return PREFIXES[asked.chat.endpoint] if asked.response is None else "resp_"


def _said(chat: ChatRequest) -> dict[str, Any]:
    """The conversation, where there is one."""
    return {"messages": [dict(message) for message in chat.messages]} if chat.endpoint == "chat" else {}


def able(choice: Choice, chat: ChatRequest) -> Choice:
    """The choice with the workers alone that take what the request holds. Raises BadRequest where no model is left."""
    needs = chat.needs
    unable = [spec for spec in choice.workers if not needs.isdisjoint(spec.cannot)]
    if not unable:
        return choice
    left = tuple(spec for spec in choice.workers if spec not in unable)
    named = choice.planner.name.removeprefix("fixed:") if choice.fallback is None else None
    if any(spec.kind in MODEL_KINDS and named in (None, spec.name) for spec in left):
        return replace(choice, workers=left)
    what = sorted(need for need in needs if any(need in spec.cannot for spec in unable))[0]
    where = next((part.where for part in media_parts(chat.messages) if part.kind == what), what)
    whom = "no worker that this key may use here takes" if named is None else f"worker {named} does not take"
    raise BadRequest(f"{whom} `{what}`", param=where, code="unsupported_parameter")
