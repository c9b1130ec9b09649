"""The series of what is known about workers that changed: flags, quarantines, identities, probes."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.core.pool.drift import Signal
from gateway.core.pool.workers import NANO_PER_USD


class WorkerSeries:
    """The ports FlagMetrics, QuarantineMetrics, RestMetrics and ProbeMetrics. Labels: workers, signals and reasons."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._shown: dict[str, str] = {}
        self._drift = Gauge(
            "baton_worker_drift",
            "Kinds of task on which a worker has become worse, by what",
            ("worker", "signal"),
            registry=registry,
        )
        self._quarantined = Gauge(
            "baton_worker_quarantined", "1: this worker is kept out of plans", ("worker",), registry=registry
        )
        self._identities = Counter(
            "baton_worker_identity_changes",
            "Times a worker named a model or fingerprint that it had not named before",
            ("worker",),
            registry=registry,
        )
        self._probes = Counter(
            "baton_worker_probes",
            "Questions to workers in quarantine: good, bad, unknown, failed or unpaid",
            ("worker", "result"),
            registry=registry,
        )
        self._resting = Gauge(
            "baton_worker_resting", "1: this worker rests, and why", ("worker", "reason"), registry=registry
        )
        self._rests = Counter(
            "baton_worker_rests",
            "Rests that began in this process, by what the worker's calls met",
            ("worker", "reason"),
            registry=registry,
        )
        self._probe_usd = Counter("baton_worker_probe_usd", "Dollars of those", ("worker",), registry=registry)

    def worker_drift(self, flagged: Mapping[tuple[str, Signal], int]) -> None:
        """`FlagMetrics.worker_drift`."""
        self._drift.clear()
        for (worker, signal), kinds in flagged.items():
            self._drift.labels(worker, signal).set(kinds)

    def quarantined(self, workers: Mapping[str, bool]) -> None:
        """`QuarantineMetrics.quarantined`."""
        self._quarantined.clear()
        for worker, out in workers.items():
            self._quarantined.labels(worker).set(out)

    def resting(self, reasons: Mapping[str, str]) -> None:
        """`RestMetrics.resting`."""
        if reasons != self._shown:
            self._shown = dict(reasons)
            self._resting.clear()
            for worker, reason in reasons.items():
                self._resting.labels(worker, reason or "none").set(bool(reason))

    def rested(self, worker: str, reason: str) -> None:
        """`RestMetrics.rested`."""
        self._rests.labels(worker, reason).inc()

    def identity_changed(self, worker: str) -> None:
        """`QuarantineMetrics.identity_changed`."""
        self._identities.labels(worker).inc()

    def probed(self, worker: str, result: str, nano: int) -> None:
        """`ProbeMetrics.probed`."""
        self._probes.labels(worker, result).inc()
        self._probe_usd.labels(worker).inc(nano / NANO_PER_USD)
