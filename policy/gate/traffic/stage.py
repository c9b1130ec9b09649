"""The held-out requests opened for a gate: today's pool, the gateway that reaches it, the cap, and what was stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from gateway.core.money.amounts import nano_to_usd, usd_to_nano
from gateway.core.pool.workers import WorkerSpec, pool_hash
from gateway.errors import ConfigError, Unavailable
from gateway.service.loop.state import Planner
from policy.dataset.cli import pool_file_of
from policy.engines.opening import first_of
from policy.environments.base import Prompt
from policy.environments.cached import (
    CALLS_MAX,
    BudgetSpent,
    CallBudget,
    CallCounts,
    CallsEnded,
    PaidCalls,
    StoredReplies,
    StoreFull,
    append_line,
    read_lines,
)
from policy.environments.executor import CAPS, UNHURRIED_S, ExecutedEnvironment, Executor
from policy.environments.live import most_nano, sender
from policy.evaluate.stages import Lessons
from policy.gate.traffic import requests as heldout
from policy.gate.traffic.asking import Judge, TrafficEnvironment, fault_of, prompt_of
from policy.gate.traffic.requests import HeldOut

QUESTIONS_MAX = 400  # where --n says nothing
KEY_BYTES_MAX = 4096
RUBRIC = "The reply does what the last message asks for, correctly and completely."
Progress = tuple[str, int, int]
CONNECTIONS_MAX = 256


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """Which requests are asked, of whom, for how much. Dollars as a person writes them."""

    requests: Path
    url: str  # …/v1
    key_file: Path
    pool_file: Path
    usd_max: str
    pool: str = ""  # empty: the file's default
    episode_usd_max: str = "0.5"
    judge: str = ""
    rubric: str = RUBRIC
    replies: Path | None = None  # None: beside the other finished work
    calls_max: int = CALLS_MAX
    n: int | None = None  # None: QUESTIONS_MAX


class TrafficStage:
    """`evaluate.stages.Stage` over held-out requests. Nothing is learnt here: what is known of the workers stands in
    the log."""

    split = "held out"

    def __init__(
        self, environment: TrafficEnvironment, prompts: list[Prompt], held: HeldOut, facts: Mapping[str, Any]
    ) -> None:
        self.environment: ExecutedEnvironment = environment
        self.prompts = prompts
        self.held = held
        self.facts = dict(facts)

    def oracle(self, prompt: Prompt) -> Planner | str:
        """Made of the workers' results (`rivals.oracle_rows`), not asked."""
        raise ConfigError("--policy oracle: of real workers it is read off their own results")

    def oracle_plan(self, prompt: Prompt) -> Planner | str:
        """Nowhere but in the arena."""
        raise ConfigError("--policy oracle-plan is for --env arena; give oracle")

    def lessons(self, file: Path | None) -> tuple[ExecutedEnvironment, list[Prompt], Lessons]:
        """None: to learn from other requests, every worker would have to be paid for them."""
        return self.environment, [], Lessons("the held-out requests", (), len(self.prompts), ())


class OpenTraffic:
    """A stage with the calls behind it. `latest`: which contestant is asked, and how many of how many questions."""

    def __init__(self, stage: TrafficStage, calls: PaidCalls, ledger: Path, latest: Callable[[], Progress]) -> None:
        self.stage = stage
        self.calls = calls
        self._ledger = ledger
        self._latest = latest

    def leave_out(self, reason: str, count: int) -> None:
        """Count further questions that are left out, for the report."""
        if count:
            self.stage.facts["left_out"] = {**self.stage.facts["left_out"], reason: count}

    def money(self) -> dict[str, Any]:
        """Dollars of the gate, all its attempts included, and what stored replies saved, for the report."""
        allowance, counts = self.calls.allowance, self.counts()
        return {
            "cap_usd": nano_to_usd(allowance.cap_nano),
            "spent_usd": nano_to_usd(allowance.spent_nano),
            "calls_made": counts.made,
            "calls_stored": counts.stored,
            "saved_usd": nano_to_usd(counts.saved_nano),
        }

    def counts(self) -> CallCounts:
        """Return the counts of this run and of those that it goes on from."""
        counter = Counter(
            made=self.calls.counts.made, stored=self.calls.counts.stored, nano=self.calls.counts.saved_nano
        )
        for line in read_lines(self._ledger):
            counter.update(line)
        return CallCounts(counter["made"], counter["stored"], counter["nano"])

    def close(self) -> None:
        """Write this run's counts down, for a run that goes on from here. Raises StoreFull."""
        counts = self.calls.counts
        append_line(self._ledger, {"made": counts.made, "stored": counts.stored, "nano": counts.saved_nano})

    def stopped(self, reason: Exception) -> Unavailable:
        """The end of a gate that cannot go on now, in one line."""
        what, done, total = self._latest()
        where = f"{done} of {total} questions of {what}" if what else "before the first question"
        more = " with a larger --usd-max" if isinstance(reason, BudgetSpent) else ""
        return Unavailable(
            f"the gate stopped at {where}: {reason}; nothing is judged yet, and finished work is kept: resume with the "
            f"same command{more}"
        )


@asynccontextmanager
async def opened(
    options: TrafficOptions, folder: Path, rounds: int, latest: Callable[[], Progress]
) -> AsyncIterator[OpenTraffic]:
    """The stage of a spec. `folder`: where finished work is kept. On the way out calls in flight end and are stored.
    Raises ConfigError for what is missing, and Unavailable in one line where the gate had to stop."""
    pool, judge = _pool(options)
    requests = heldout.read(options.requests)
    prompts, left_out = _gradable(options, requests, pool, judge)
    allowance = CallBudget(folder / "spent.jsonl", usd_to_nano(options.usd_max))
    store = StoredReplies(options.replies or folder / "replies.jsonl")
    caps = replace(CAPS, cost_nano=usd_to_nano(options.episode_usd_max), wall_s=UNHURRIED_S)
    async with _client(options) as client:
        calls = PaidCalls(sender(client), most_nano, store, allowance, options.calls_max)
        environment = TrafficEnvironment(prompts, calls, Executor(caps, rounds), judge)
        facts = _facts(options, requests, left_out, pool, judge)
        traffic = OpenTraffic(
            TrafficStage(environment, prompts, requests, facts), calls, folder / "calls.jsonl", latest
        )
        stop: Exception | None = None
        try:
            yield traffic
        except* (CallsEnded, ConfigError) as group:  # out of lanes that ran side by side
            stop = first_of(group)
        finally:
            await calls.drain()
            try:
                traffic.close()
            except StoreFull as full:
                stop = stop or full
        if stop is not None:
            raise traffic.stopped(stop) if isinstance(stop, CallsEnded) else stop


def _pool(options: TrafficOptions) -> tuple[tuple[WorkerSpec, ...], Judge | None]:
    document = pool_file_of(options.pool_file)
    try:
        pool = document.pool(options.pool or document.default)
        judge = Judge(document.worker(options.judge), options.rubric) if options.judge else None
    except KeyError as error:
        raise ConfigError(f"{options.pool_file}: has no {error}; name a pool and a judge that are in it") from None
    for spec in (*pool, *([judge.worker] if judge else [])):
        if spec.price is None:
            raise ConfigError(f"worker {spec.name} has no price, so nothing would bound it: give one in the pool file")
    return pool, judge


def _gradable(
    options: TrafficOptions, requests: HeldOut, pool: tuple[WorkerSpec, ...], judge: Judge | None
) -> tuple[list[Prompt], dict[str, int]]:
    """The latest requests that can be asked and graded again, and how many are left out by reason."""
    left_out, gradable = Counter(requests.left_out), []
    name = options.pool or pool_file_of(options.pool_file).default
    for request in requests.requests:
        reason = "other_pool" if request.pool_name != name else fault_of(request, judge)
        if reason is not None:
            left_out[reason] += 1
        else:
            gradable.append(request)
    most = options.n or QUESTIONS_MAX
    left_out["over_limit"] += max(0, len(gradable) - most)
    counts = {reason: count for reason, count in left_out.items() if count}
    if not gradable:
        raise ConfigError(f"no held-out request can be asked again: {heldout.listed(counts) or 'the slice is empty'}")
    return [prompt_of(request, pool) for request in gradable[-most:]], counts


def _client(options: TrafficOptions) -> httpx.AsyncClient:
    path = options.key_file
    try:
        with path.open("rb") as file:
            key = file.read(KEY_BYTES_MAX).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {path}: cannot be read ({error})") from None
    limits = httpx.Limits(max_connections=CONNECTIONS_MAX)
    return httpx.AsyncClient(
        base_url=options.url.rstrip("/") + "/", headers={"authorization": f"Bearer {key}"}, limits=limits
    )


def _facts(
    options: TrafficOptions,
    requests: HeldOut,
    left_out: Mapping[str, int],
    pool: tuple[WorkerSpec, ...],
    judge: Judge | None,
) -> dict[str, Any]:
    """What was asked, of whom, how it was graded: for the report, and part of what names finished work."""
    return {
        "bound": requests.bound.as_json(),
        "left_out": dict(left_out),
        "pool": options.pool or "default",
        "pool_hash": pool_hash(pool),
        "episode_usd_max": options.episode_usd_max,
        "judge": None if judge is None else judge.worker.name,
        "rubric": None if judge is None else judge.rubric,
    }
