"""Every Prometheus instrument, declared once. Labels are bounded: worker names, policies and states, never keys."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gateway.core.log.alerts import KINDS
from gateway.core.log.rollout import RolloutRecord, StepRecord, own_codes
from gateway.core.money.details import BILLED
from gateway.core.policies.versions import Standing
from gateway.core.policies.watch import SERVER_FAULTS
from gateway.core.pool.workers import NANO_PER_USD

log = logging.getLogger("baton")
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
CODES_MAX = 100  # of error codes as values of a label; any further one is counted as `other`
COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
FALLBACKS = (*SERVER_FAULTS, "conductor_unparseable", "conductor_cost", "worker_failed")
REFUSALS = ("down", "slow", "refused", "unparseable", "cost")
CAPS = ("cost", "calls", "tokens", "depth", "wall_s", "worker")
DEGRADED = ("experience", "examples", "settle", "sticky", "vendor_state")
OVERHEAD_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1)

M = TypeVar("M", Counter, Histogram)
Finished = Callable[[RolloutRecord, Sequence[RolloutRecord]], None]  # a request that ended, and the loops inside it


class PrometheusMetrics:
    """The Metrics port, and the text of GET /metrics."""

    def __init__(self, version: str = "unknown") -> None:
        self.registry = CollectorRegistry()
        self._listeners: list[Finished] = []
        self._series: dict[tuple[object, ...], Any] = {}
        self._requests = self._counter("requests", "Requests, by policy and how they ended", "policy", "status")
        self._seconds = self._histogram("request_seconds", "From admission to the durable log", SECONDS, "policy")
        self._replies = self._counter("http_replies", "Replies of both listeners, refusals too", "route", "status")
        self._refused = self._counter("refusals", "Replies with an error, by its code", "status", "code")
        self._http_seconds = self._histogram(
            "http_seconds", "From the head of a request to the end of its reply", SECONDS, "route"
        )
        self._codes: set[str] = set()
        self._queued = self._histogram("queue_seconds", "From the head of a request to its admission", OVERHEAD_SECONDS)
        self._first_token = self._histogram(
            "first_token_seconds", "From admission to the first token of a streamed reply", SECONDS, "policy"
        )
        self._overhead = self._histogram(
            "overhead_seconds", "Time in which no worker or conductor was waited for", OVERHEAD_SECONDS
        )
        self._rounds = self._histogram("rounds", "Planning calls of a request", COUNTS, "policy")
        self._plan_steps = self._histogram("plan_steps", "Steps of a plan", COUNTS, "planner")
        self._child_loops = self._counter("child_loops", "Loops that plans began, by how deep they were", "depth")
        self._cost = self._counter("cost_usd", "Dollars spent, by worker (`conductor` for planning)", "worker")
        self._steps = self._counter("steps", "Worker calls of plans, by worker and how they ended", "worker", "status")
        self._step_seconds = self._histogram("step_seconds", "One worker call", SECONDS, "worker")
        attempts = "Attempts at workers, by outcome: ok, or the error's code"
        self._attempts = self._counter("worker_attempts", attempts, "worker", "outcome")
        self._retries = self._counter("worker_retries", "Attempts after the first of a call", "worker")
        self._estimates = self._counter("usage_estimates", "Attempts not charged by the worker's own count", "by")
        self._tokens = self._counter("tokens", "Tokens of worker calls", "worker", "kind")
        self._plan_seconds = self._histogram("plan_seconds", "One planning call of the conductor", SECONDS)
        self._refusals = self._counter("plans_refused", "Conductor plans not used, by reason", "reason")
        self._fallbacks = self._counter("fallbacks", "Times a router planned instead, by reason", "reason")
        self._capped = self._counter("capped", "Requests ended early by a cap", "cap")
        self._degraded = self._counter("degraded", "Optional parts that were away", "part")
        self._experience = self._counter(
            "experience", "Planned requests, by what was known of the workers: fresh, stale, missing", "state"
        )
        self._dropped_fields = self._counter("dropped_fields", "Unknown request properties left out")
        self._dropped_requests = self._counter("dropped_fields_requests", "Requests with unknown properties")
        self._bugs = self._counter("bugs", "Unexpected errors")
        self._declare_log()
        self._declare_versions()
        self._declare_stores(version)
        self._begin_at_zero()

    def _declare_log(self) -> None:
        self._stored = self._counter("log_records_stored", "Journal records now in PostgreSQL")
        self._appended = self._counter("log_records", "Journal records on disk")
        self._started_us = int(time.time() * 1e6)
        self._served = self._kept = 0  # requests of this process, and those whose rollouts are in PostgreSQL
        self._capture_rate = self.gauge(
            "capture_rate",
            "Requests of this process whose rollout is in PostgreSQL ÷ requests settled: 1 but for the last second's",
            lambda: self._kept / self._served if self._served else 1.0,
        )
        self._append_seconds = self._histogram("log_fsync_seconds", "One group commit of the journal", OVERHEAD_SECONDS)
        self._spool_bytes = Gauge("baton_spool_bytes", "Bytes of journal on disk", registry=self.registry)
        self._ship_retries = self._counter("log_ship_retries", "Times PostgreSQL could not take a batch")
        self._dead_letters = self._counter("log_dead_letters", "Records PostgreSQL will never take", "kind")
        self._damaged = self._counter("log_damaged", "Damage found in the journal", "what")

    def _declare_versions(self) -> None:
        self._policy_requests = self._counter(
            "policy_requests", "Requests given to a policy version, by what became of its plans", "version", "plan"
        )
        self._policy_percent = self._gauge("policy_percent", "Share of requests a version plans, 0 to 100", "version")
        held = "1: every engine holds this version of that state; 0: not yet, or refused"
        self._policy_held = self._gauge("policy_held", held, "version", "state")
        self._policy_rollbacks = self._counter(
            "policy_rollbacks", "Versions taken back without a person, by the figure that was worse", "cause"
        )
        self._policy_refused = self._counter("policy_refused", "Versions an engine would not take", "version")
        self._policy_shadows = self._counter("policy_shadow_plans", "Plans of shadow versions", "version", "result")
        self._pool_info = self._gauge("pool_info", "1 for the pool file in use, by its hash", "hash")
        self._pool_loaded = self._gauge("pool_loaded_seconds", "When the pool in use was loaded, in Unix seconds")
        self._pool_reloads = self._counter("pool_reloads", "Times the pool file was read anew, by result", "result")

    def _declare_stores(self, version: str) -> None:
        self._figures = {
            "budgets": self._gauge(
                "budgets", "Budgets of keys and organisations, 2,000 keys a reading: set, near (80 %) or spent", "state"
            ),
            "holds": self._gauge("holds_open", "Holds in the ledger that are not settled yet"),
            "held_usd": self._gauge("held_usd", "Dollars under those holds"),
            "uncertain": self._gauge("uncertain_charges", "Unconfirmed charges of the last day, not credited"),
            "uncertain_usd": self._gauge("uncertain_usd", "Dollars of those charges"),
            "drift_usd": self._gauge(
                "budget_drift_usd", "Dollars by which balances differed from the ledger at the last look"
            ),
            "jobs": self._gauge("jobs", "Jobs by state; ended ones of the last day", "state"),
            "gradings": self._gauge("gradings", "Gradings by state; ended ones of the last day", "state"),
            "source_agreement": self._gauge("source_agreement", "How often more trusted sources agree", "source"),
            "source_weight": self._gauge("source_weight", "Mean weight of a source's verdicts, 0 to 1", "source"),
            "outcomes": self._gauge("version_outcomes", "Judged requests of the last day, by version", "version"),
            "reward": self._gauge("version_reward_mean", "Mean outcome of those, 0 to 1", "version"),
            "version_requests": self._gauge("version_requests", "Requests of the last day, by version", "version"),
            "alerts_waiting": self._gauge("alerts_out_waiting", "Alerts in the outbox that are not sent yet"),
            "up": self._gauge("up", "1: this part answers its health check", "part"),
        }
        alerts = "Attempts to send an alert by result, and alerts that were given up"
        self._alerts = self._counter("alerts_out", alerts, "kind", "result")
        self._figures_read = self._gauge("figures_read_seconds", "When the ledger was read last, in Unix seconds")
        lag = "How late the event loop ran a timer"
        self._loop_lag = self._histogram("event_loop_lag_seconds", lag, OVERHEAD_SECONDS)
        self._build_info = self._gauge("build_info", "1 for the version that runs", "version", "python")
        self._build_info.labels(version, platform.python_version()).set(1)

    def _begin_at_zero(self) -> None:
        """Show the series that alerts watch before their first event: `increase` needs a value to increase from."""
        for counter, values in (
            (self._fallbacks, FALLBACKS),
            (self._refusals, REFUSALS),
            (self._capped, CAPS),
            (self._degraded, DEGRADED),
            (self._experience, ("fresh", "stale", "missing")),
            (self._policy_rollbacks, ("validity", "errors", "outcome", "cost", "refused")),
            (self._dead_letters, ("rollout", "settle", "unknown")),
            (self._damaged, ("torn", "corrupt")),
            (self._estimates, ("clipped", "pace")),
        ):
            for value in values:
                counter.labels(value)
        for kind in KINDS:
            self._alerts.labels(kind, "failed")
            self._alerts.labels(kind, "given_up")

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> Gauge:
        """Register a gauge whose value is read at each scrape."""
        gauge = Gauge(f"baton_{name}", help_text, registry=self.registry)
        gauge.set_function(read)
        return gauge

    def tell(self, listener: Finished) -> None:
        """Call `listener` with each request that ends, too."""
        self._listeners.append(listener)

    def finished(self, record: RolloutRecord, overhead_ms: float, children: Sequence[RolloutRecord] = ()) -> None:
        """Count one request with its rounds and steps, and those of the loops inside it."""
        self._served += 1
        policy = record.policy_requested if record.policy_requested.startswith("baton") else "worker"
        policy = "baton/fixed" if policy.startswith("baton/fixed:") else policy.partition("@")[0]
        if record.policy_assigned:
            self._of(self._policy_requests, record.policy_assigned, _fate(record.fallback)).inc()
        self._of(self._requests, policy, record.status).inc()
        self._of(self._seconds, policy).observe((record.finished_us - record.created_us) / 1e6)
        if record.memory:
            self._of(self._experience, record.memory["state"]).inc()
        self._overhead.observe(max(0.0, overhead_ms / 1000))
        self._of(self._rounds, policy).observe(len(record.rounds))
        if record.stream and (first_us := max((step.first_byte_us or 0 for step in record.steps), default=0)):
            self._of(self._first_token, policy).observe(max(0, first_us - record.created_us) / 1e6)
        for loop in (record, *children):
            self._looped(loop)
        for listener in self._listeners:
            listener(record, children)
        if record.fallback:
            self._of(self._fallbacks, record.fallback).inc()
        if record.capped:
            self._of(self._capped, record.capped).inc()

    def _looped(self, record: RolloutRecord) -> None:
        """Count the rounds and steps of one loop."""
        if record.depth:
            self._of(self._child_loops, str(record.depth)).inc()
        for planned in record.rounds:
            if planned.planner == "conductor":
                self._plan_seconds.observe((planned.finished_us - planned.started_us) / 1e6)
                self._of(self._cost, "conductor").inc(planned.cost_nano / NANO_PER_USD)
            if planned.refusal:
                self._of(self._refusals, planned.refusal).inc()
            if planned.plan is not None:
                planner = planned.planner.partition(":")[0]
                self._of(self._plan_steps, planner).observe(len(planned.plan.get("steps") or ()))
        for step in record.steps:
            self._stepped(step)

    def _stepped(self, step: StepRecord) -> None:
        """Count one step. What a step on `self` cost is counted with the steps of its own loop."""
        self._of(self._steps, step.worker, step.status).inc()
        if step.started_us:  # else it never began
            self._of(self._step_seconds, step.worker).observe(max(0, step.finished_us - step.started_us) / 1e6)
        for attempt in step.attempts:
            self._of(self._attempts, attempt.worker or step.worker, _outcome(attempt.error)).inc()
            if attempt.counted_by:
                self._of(self._estimates, attempt.counted_by).inc()
        if own := sum(attempt.worker is None for attempt in step.attempts):
            self._of(self._retries, step.worker).inc(own - 1)
        if step.child_rollout_id is not None:
            return
        self._of(self._cost, step.worker).inc(step.cost_nano / NANO_PER_USD)
        for kind, tokens in {
            "prompt": step.prompt_tokens,
            "completion": step.completion_tokens,
            **{kind.removesuffix("_tokens"): tokens for kind, tokens in (step.usage_details or {}).items()},
        }.items():
            if kind != BILLED:
                self._of(self._tokens, step.worker, kind).inc(tokens)

    def _of(self, metric: M, *values: str) -> M:
        """`metric.labels`, which takes a lock and makes texts. Not for metrics that forget series."""
        series: M | None = self._series.get((metric, *values))
        if series is None:
            series = self._series[metric, *values] = metric.labels(*values)
        return series

    def _code(self, code: str) -> str:
        """The code as the value of a label: one of at most CODES_MAX."""
        if code in self._codes or len(self._codes) < CODES_MAX:
            self._codes.add(code)
            return code
        return "other"

    # ------------------------------------------------------------ the edge (EdgeMetrics)

    def replied(self, route: str, status: int, code: str | None, seconds: float, times: int = 1) -> None:
        """Count a reply, or several alike, and refusals by their code."""
        self._of(self._replies, route, str(status)).inc(times)
        for _ in range(times):
            self._of(self._http_seconds, route).observe(seconds)
        if status >= 400:
            self._of(self._refused, str(status), self._code(code or "none")).inc(times)

    def admitted(self, waited_s: float) -> None:
        """Observe how long a request waited for its admission."""
        self._queued.observe(max(0.0, waited_s))

    # ------------------------------------------------------------ this process and its stores

    def loop_late(self, seconds: float) -> None:
        """Observe how late the event loop ran a timer."""
        self._loop_lag.observe(seconds)

    def figure(self, name: str, values: float | Mapping[str, float]) -> None:
        """Set a gauge of the stores; a mapping is by the value of its label, and forgets the values before it."""
        gauge = self._figures[name]
        if not isinstance(values, Mapping):
            gauge.set(values)
            return
        gauge.clear()
        for label, value in values.items():
            gauge.labels(label).set(value)

    def figures_read(self, at_s: float) -> None:
        """Note when the stores were read."""
        self._figures_read.set(at_s)

    def alert_sent(self, kind: str, result: str) -> None:
        """`AlertMetrics.alert_sent`."""
        self._alerts.labels(kind, result).inc()

    def dropped(self, fields: int) -> None:
        """Count a request with properties that were dropped, and the properties."""
        self._dropped_fields.inc(fields)
        self._dropped_requests.inc()

    def degraded(self, what: str) -> None:
        """Count a request that was served without an optional part."""
        self._of(self._degraded, what).inc()

    def bug(self, error: Exception) -> None:
        """Count and log an unexpected error."""
        self._bugs.inc()
        log.error("a request met an unexpected error", exc_info=error)

    # ------------------------------------------------------------ policy versions (PolicyMetrics)

    def policy_standing(self, now: Standing, usable: Collection[str]) -> None:
        """Set the versions that serve and those that the engines hold; forget versions that no longer serve."""
        self._policy_percent.clear()
        self._policy_held.clear()
        share = now.canary.percent or 0 if now.canary is not None and now.canary.id in usable else 0
        for version, percent in ((now.live, 100 - share), (now.canary, share)):
            if version is not None:
                self._policy_percent.labels(version.id).set(percent)
        for version in now.held:
            self._policy_held.labels(version.id, version.state).set(version.id in usable)

    def policy_rolled_back(self, cause: str) -> None:
        """Count a version that was rolled back automatically."""
        self._policy_rollbacks.labels(cause).inc()

    def policy_refused(self, version: str) -> None:
        """Count a version that an engine refused."""
        self._policy_refused.labels(version).inc()

    def policy_shadowed(self, version: str, result: str) -> None:
        """Count a shadow plan: agrees, differs, alone (the other planned nothing), refused, dropped or unpaid."""
        self._policy_shadows.labels(version, result).inc()

    # ------------------------------------------------------------ the pool file (PoolMetrics)

    def pool_in_use(self, revision: str, loaded_s: float) -> None:
        """Set the pool that serves now; forget the one before."""
        self._pool_info.clear()
        self._pool_info.labels(revision).set(1)
        self._pool_loaded.set(loaded_s)

    def pool_reloaded(self, result: str) -> None:
        """Count a reload: changed, unchanged or refused."""
        self._pool_reloads.labels(result).inc()

    # ------------------------------------------------------------ the log (LogWatch)

    def appended(self, records: int, bytes_: int, seconds: float) -> None:
        """Count one group commit."""
        self._appended.inc(records)
        self._append_seconds.observe(seconds)

    def spool_bytes(self, bytes_: int) -> None:
        """Set the bytes of journal on disk."""
        self._spool_bytes.set(bytes_)

    def shipped(self, records: int, lag_s: float) -> None:
        """Count records that reached PostgreSQL."""
        self._stored.inc(records)

    def rollouts_stored(self, logged_us: Sequence[int]) -> None:
        """Count stored rollouts for the capture rate: only those that this process served."""
        self._kept += sum(us >= self._started_us for us in logged_us)

    def retrying(self, error: str, wait_s: float) -> None:
        """Count a batch that PostgreSQL did not take."""
        self._ship_retries.inc()

    def dead_letter(self, kind: str | None, error: str) -> None:
        """Count a record that went to `dead_letters`."""
        self._dead_letters.labels(kind or "unknown").inc()

    def damaged(self, what: str, path: str, bytes_: int) -> None:
        """Count a torn or corrupt record of the journal."""
        self._damaged.labels(what).inc()

    def exposition(self) -> tuple[bytes, str]:
        """Body and content type of GET /metrics."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"baton_{name}", help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"baton_{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"baton_{name}", help_text, labels, buckets=buckets, registry=self.registry)


def _outcome(error: str | None) -> str:
    """The error of an attempt as the value of a label: a worker's own code is one of many."""
    return "ok" if error is None else error if error in own_codes() else "upstream_error"


def _fate(fallback: str | None) -> str:
    """What became of the plans of a version: used, refused, or away where its server gave none."""
    if fallback is None or fallback.startswith("worker"):
        return "used"
    return "away" if fallback in SERVER_FAULTS else "refused"
