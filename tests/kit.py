"""A whole gateway over the shipped fakes: for tests of the request path."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from gateway.adapters.upstream.embedder import LocalEmbedder
from gateway.core.access.keys import Principal
from gateway.core.log.redact import Redactor
from gateway.core.log.rollout import RolloutRecord
from gateway.core.loop.caps import Caps
from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.experience.likeness import HASHED
from gateway.core.loop.prompt import Profile
from gateway.core.loop.replies.errors import NO_ERRORS, CheckerErrors
from gateway.core.loop.turns.replanning import Replanning
from gateway.core.openai.chat import parse_request
from gateway.core.pool.workers import PoolFile, Price, WorkerSpec
from gateway.service.admin.sessions import Sessions
from gateway.service.loop.calls import NO_TOKENIZER, Calls, RetryBudget
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings, Patience
from gateway.service.loop.experience.candidates import Shortlist
from gateway.service.loop.experience.lookup import ExperienceLookup, LookupLimits
from gateway.service.loop.experience.memory import ExperienceMemory, Recalled
from gateway.service.loop.health.breakers import Breakers
from gateway.service.loop.rounds import Rounds
from gateway.service.loop.routers import RulePlanner
from gateway.service.loop.summaries import NO_SUMMARIES, SummaryRules
from gateway.service.ports.pools import NO_TOOLBOXES
from gateway.service.ports.request import Clock, Conductor, Embedder, MediaSource, TokenCounter, Toolboxes, Workers
from gateway.service.request.admit import Policies, RequestContext
from gateway.service.request.catalog import Catalog, Shares, no_standing
from gateway.service.request.complete import Completer, none_held
from gateway.service.request.fitting import Held
from gateway.service.request.running import Running, StreamItem
from gateway.service.request.states import VendorStates
from gateway.service.request.sticky import Sticky
from tests.fakes.background import FakeBackground
from tests.fakes.budgets import FakeBudgets, FakeBudgetStore
from tests.fakes.conductor import Script, ScriptedConductor
from tests.fakes.conversations import FakeStoredConversations
from tests.fakes.journal import FakeJournal
from tests.fakes.media import FakeMedia
from tests.fakes.ratelimits import FakeRateLimits
from tests.fakes.replies import FakeCallStates, FakeConversations, FakeReplies
from tests.fakes.sessions import FakeSessions
from tests.fakes.store import FakePast, FakeStore
from tests.fakes.workers import FakeWorkers, Scripted
from tests.waiting import BOUND_S

PRICE = Price(input_usd_per_mtok=Decimal(1), output_usd_per_mtok=Decimal(2))
HANDLES = {"alpha": "atlas", "beta": "birch", "gamma": "grove"}
KEY = Principal("keyAAAAAAAAA", "data", "tests", "default", ())


class TestClock(Clock):
    """Real time, since the loop really waits."""

    __test__ = False

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        return time.monotonic()


@dataclass
class SpyMetrics:
    """Counts what the request path reports."""

    records: list[RolloutRecord] = field(default_factory=list)
    degradations: list[str] = field(default_factory=list)
    bugs: list[Exception] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    dropped_fields: int = 0

    def finished(self, record: RolloutRecord, overhead_ms: float, children: Sequence[RolloutRecord] = ()) -> None:
        self.records.append(record)

    def admitted(self, waited_s: float) -> None:
        self.waits_s.append(waited_s)

    def dropped(self, fields: int) -> None:
        self.dropped_fields += fields

    def degraded(self, what: str) -> None:
        self.degradations.append(what)

    def bug(self, error: Exception) -> None:
        self.bugs.append(error)


def known(*past: WorkerExperience) -> Any:
    """A look-up that always finds this."""

    async def near(*_: Any) -> Recalled:
        return Recalled("fresh", 0.0, {one.worker: one for one in past})

    return near


def model_worker(name: str, handle: str, **more: Any) -> WorkerSpec:
    given = {"kind": "openai", "model": name, "url": "http://127.0.0.1:1/v1", "price": PRICE, "output_tokens_max": 64}
    return WorkerSpec(name=name, handle=handle, **{**given, **more})


def pool_file(*extra: WorkerSpec) -> PoolFile:
    workers = [model_worker(name, handle) for name, handle in HANDLES.items()]
    workers += [
        WorkerSpec(name="vote", handle="tally", kind="tool", url="builtin:vote", price=_free()),
        WorkerSpec(name="self", handle="echo", kind="self", price=_free()),
        *extra,
    ]
    return PoolFile(workers=tuple(workers), pools={"default": tuple(worker.name for worker in workers)})


def _free() -> Price:
    return Price(input_usd_per_mtok=Decimal(0), output_usd_per_mtok=Decimal(0))


async def items_of(running: Running) -> AsyncIterator[StreamItem]:
    """What a stream's reader gets, to its end."""
    while await running.ready(None):
        if (item := running.take()) is not None:
            yield item
        elif running.finished.is_set():
            return


def plan(*steps: tuple[str, str | None, list[int] | str]) -> str:
    """Plan text from (handle, task, see) triples."""
    return json.dumps({"steps": [{"worker": w, "task": t, "see": s} for w, t, s in steps]}, separators=(",", ":"))


ONE_STEP = (plan(("atlas", None, [])),)


def ask(text: str = "What is 6 times 7?", model: str = "baton", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


class Kit:
    """A Completer and the fakes under it. `serve` runs one request to its end."""

    def __init__(
        self,
        script: Script = ONE_STEP,
        workers: Mapping[str, Scripted | Sequence[Scripted]] | Workers | None = None,
        *,
        caps: Caps | None = None,
        rounds: int = 1,
        gap_s: float = 0.0,
        timeout_s: float = 60.0,
        pools: PoolFile | None = None,
        attempts_max: int = 2,
        sticky_s: float = 600.0,
        replanning: Replanning | None = None,
        embedder: Embedder | None = None,
        media: MediaSource | None = None,
        tokens: TokenCounter = NO_TOKENIZER,
        profile: Profile = "full",
        conductor: Conductor | None = None,
        toolboxes: Toolboxes = NO_TOOLBOXES,
        patience: Patience | None = None,
        held: Held = none_held,
        errors: Mapping[str, CheckerErrors] = NO_ERRORS,
        summaries: SummaryRules = NO_SUMMARIES,
        standing: Callable[[str, str], str] = no_standing,
        rests: Breakers | None = None,
        **policies: Any,
    ) -> None:
        self.conductor = ScriptedConductor(script, gap_s=gap_s, model="conductor@1")
        given: Any = workers
        self.workers: Any = given if hasattr(given, "complete") else FakeWorkers(given)
        self.store = FakeStore()
        self.journal = FakeJournal(self.store.ingest)
        self.budget_store = FakeBudgetStore()
        self.budgets = FakeBudgets(self.budget_store)
        self.limits = FakeRateLimits()
        self.replies = FakeReplies()
        self.conversations = FakeConversations()
        self.states = FakeCallStates()
        self.background = FakeBackground()
        self.stored_conversations = FakeStoredConversations(self.store)
        self.metrics = SpyMetrics()
        self.embedder = embedder or LocalEmbedder(HASHED)
        clock = TestClock()
        self.session_store = FakeSessions()
        self.sessions = Sessions(self.session_store, self.budgets, clock)
        budget = RetryBudget(start_retries=100)
        self.tokens = tokens
        tried: dict[str, Any] = {"attempts_max": attempts_max, "wait_initial_s": 0.001, "rests": rests}
        calls = Calls(self.workers, budget, clock, tokens, toolboxes, **tried)
        rule = RulePlanner(draws=False)
        planning = ConductorSettings(profile, PRICE, timeout_s, patience=patience)
        learned = ConductorPlanner(conductor or self.conductor, planning)
        planners = {"baton": (learned, rule), "baton/conductor": (learned, rule), "baton/rule": (rule, rule)}
        self.catalog = Catalog(pools or pool_file(), planners, standing=standing)  # type: ignore[arg-type]
        self.memory = ExperienceMemory(FakePast(self.store), clock, bytes_max=2**24, stale_s=10.0, timeout_s=BOUND_S)
        self.shortlist = Shortlist(self.embedder, self.memory, clock, 20, most=12, explored=2)
        redactor = Redactor(["provider-secret-value"])
        limits = LookupLimits(20, BOUND_S, policies.pop("examples_max", 0))
        looks = (self.memory, self.store, self.embedder, redactor, self.metrics, limits)
        self.completer = Completer(
            catalog=self.catalog,
            rounds=Rounds(calls, errors, summaries),
            budgets=self.budgets,
            limits=self.limits,
            journal=self.journal,
            embedder=self.embedder,
            clock=clock,
            metrics=self.metrics,
            policies=Policies(
                caps=caps or Caps(wall_s=60.0),
                planning_price=PRICE,
                planning_tokens_max=256,
                rounds=rounds,
                attempts_max=attempts_max,
                shares=Shares(0.0),
                **policies,
            ),
            redactor=redactor,
            sticky=Sticky(
                *(self.conversations, self.metrics, b"secret of the marks", sticky_s, 3600.0, BOUND_S),
                replanning or Replanning(),
            ),
            held=held if rests is None else rests.of,
            media=media or FakeMedia(),
            sessions=self.sessions,
            states=VendorStates(self.states, self.metrics, 3600.0, BOUND_S),
            shortlist=self.shortlist,
            looks=ExperienceLookup(*looks, self.catalog.shares_experience),
        )

    def knows(self, *past: WorkerExperience) -> None:
        """Let every look-up find this."""
        self.memory.near = known(*past)  # type: ignore[method-assign]

    async def start(self, body: dict[str, Any] | None = None, who: Principal = KEY, **asked: Any) -> Running:
        await self.budgets.load({}) if self.budgets.epoch_lost else None
        chat = parse_request(body or ask(), messages_max=100, vendor=self.catalog.vendor_params)
        return await self.completer.start(RequestContext(who, chat, **asked))

    async def serve(self, body: dict[str, Any] | None = None, who: Principal = KEY, **asked: Any) -> Running:
        """Start a request, read its stream if it has one, and wait for its end."""
        running = await self.start(body, who, **asked)
        async for _ in items_of(running):
            pass
        await running.finished.wait()
        return running

    async def text(self, running: Running) -> str:
        body = await running.result()
        return str(body["choices"][0]["message"]["content"])

    async def open_nano(self, scope: str = f"key:{KEY.public_id}") -> int:
        """Nano-dollars still held: 0 after every request, however it ended."""
        return (await self.budgets.balance(scope)).held_nano

    async def posted_nano(self, scope: str = f"key:{KEY.public_id}") -> int:
        return (await self.budgets.balance(scope)).posted_nano
