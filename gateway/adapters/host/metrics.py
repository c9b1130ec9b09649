"""Every Prometheus instrument, declared once. Labels are bounded: worker names, policies and states, never keys."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gateway.core.log.rollout import RolloutRecord
from gateway.core.policies.versions import Standing
from gateway.core.pool.workers import NANO_PER_USD

log = logging.getLogger("baton")
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
OVERHEAD_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1)


class PrometheusMetrics:
    """The Metrics port, and the text of GET /metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests, by policy and how they ended", "policy", "status")
        self._seconds = self._histogram("request_seconds", "From admission to the durable log", SECONDS, "policy")
        self._overhead = self._histogram(
            "overhead_seconds", "Time in which no worker or conductor was waited for", OVERHEAD_SECONDS
        )
        self._cost = self._counter("cost_usd", "Dollars spent, by worker (`conductor` for planning)", "worker")
        self._steps = self._counter("steps", "Worker calls of plans, by worker and how they ended", "worker", "status")
        self._step_seconds = self._histogram("step_seconds", "One worker call", SECONDS, "worker")
        self._tokens = self._counter("tokens", "Tokens of worker calls", "worker", "kind")
        self._plan_seconds = self._histogram("plan_seconds", "One planning call of the conductor", SECONDS)
        self._refusals = self._counter("plans_refused", "Conductor plans not used, by reason", "reason")
        self._fallbacks = self._counter("fallbacks", "Times a router planned instead, by reason", "reason")
        self._capped = self._counter("capped", "Requests ended early by a cap", "cap")
        self._degraded = self._counter("degraded", "Optional parts that were away", "part")
        self._dropped_fields = self._counter("dropped_fields", "Unknown request properties left out")
        self._dropped_requests = self._counter("dropped_fields_requests", "Requests with unknown properties")
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
        self._lag = Gauge("baton_log_lag_seconds", "Age of the newest record shipped", registry=self.registry)
        self._ship_retries = self._counter("log_ship_retries", "Times PostgreSQL could not take a batch")
        self._dead_letters = self._counter("log_dead_letters", "Records PostgreSQL will never take", "kind")
        self._damaged = self._counter("log_damaged", "Damage found in the journal", "what")
        self._bugs = self._counter("bugs", "Unexpected errors")
        self._policy_requests = self._counter(
            "policy_requests", "Requests given to a policy version, by what became of its plans", "version", "plan"
        )
        self._policy_percent = self._gauge("policy_percent", "Share of requests a version plans, 0 to 100", "version")
        self._policy_held = self._gauge(
            "policy_held",
            "1: every engine holds this version of that state; 0: not yet, or refused",
            "version",
            "state",
        )
        self._policy_rollbacks = self._counter(
            "policy_rollbacks", "Versions taken back without a person, by the figure that was worse", "cause"
        )
        self._policy_refused = self._counter("policy_refused", "Versions an engine would not take", "version")
        self._policy_shadows = self._counter("policy_shadow_plans", "Plans of shadow versions", "version", "result")
        self._pool_info = self._gauge("pool_info", "1 for the pool file in use, by its hash", "hash")
        self._pool_loaded = self._gauge("pool_loaded_seconds", "When the pool in use was loaded, in Unix seconds")
        self._pool_reloads = self._counter("pool_reloads", "Times the pool file was read anew, by result", "result")

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> Gauge:
        """Register a gauge whose value is read at each scrape."""
        gauge = Gauge(f"baton_{name}", help_text, registry=self.registry)
        gauge.set_function(read)
        return gauge

    def finished(self, record: RolloutRecord, overhead_ms: float) -> None:
        """Count one request with its rounds and steps."""
        self._served += 1
        policy = record.policy_requested if record.policy_requested.startswith("baton") else "worker"
        policy = "baton/fixed" if policy.startswith("baton/fixed:") else policy.partition("@")[0]
        if record.policy_assigned:
            refused = (record.fallback or "worker").partition("_")[0] != "worker"
            self._policy_requests.labels(record.policy_assigned, "refused" if refused else "used").inc()
        self._requests.labels(policy, record.status).inc()
        self._seconds.labels(policy).observe((record.finished_us - record.created_us) / 1e6)
        self._overhead.observe(max(0.0, overhead_ms / 1000))
        for planned in record.rounds:
            if planned.planner == "conductor":
                self._plan_seconds.observe((planned.finished_us - planned.started_us) / 1e6)
                self._cost.labels("conductor").inc(planned.cost_nano / NANO_PER_USD)
            if planned.refusal:
                self._refusals.labels(planned.refusal).inc()
        for step in record.steps:
            self._steps.labels(step.worker, step.status).inc()
            self._step_seconds.labels(step.worker).observe(max(0, step.finished_us - step.started_us) / 1e6)
            self._cost.labels(step.worker).inc(step.cost_nano / NANO_PER_USD)
            self._tokens.labels(step.worker, "prompt").inc(step.prompt_tokens)
            self._tokens.labels(step.worker, "completion").inc(step.completion_tokens)
        if record.fallback:
            self._fallbacks.labels(record.fallback).inc()
        if record.capped:
            self._capped.labels(record.capped).inc()

    def dropped(self, fields: int) -> None:
        """Count a request with properties that were dropped, and the properties."""
        self._dropped_fields.inc(fields)
        self._dropped_requests.inc()

    def degraded(self, what: str) -> None:
        """Count a request that was served without an optional part."""
        self._degraded.labels(what).inc()

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
        self._lag.set(lag_s)

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
