"""The drift drill: a worker gets silently worse, and is flagged; the others, and an unchanged one, are not."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.adapters.journal.series import WorkerSeries
from gateway.core.pool.drift import DriftRules, Judged
from gateway.service.policies.drift import WorkerWatch
from tests.kit import TestClock
from tests.records import T0_US, a_rollout, a_step

RULES = DriftRules(reference=100, run_length=5_000)
NOW = datetime(2026, 11, 1, tzinfo=UTC)


class Outcomes:
    """A log of outcomes in memory."""

    def __init__(self) -> None:
        self.rows: list[Judged] = []

    def add(self, worker: str, success: float, task_type: str | None = "code", org: str = "acme") -> None:
        at = datetime.now(UTC) + timedelta(microseconds=len(self.rows))
        self.rows.append(Judged(worker, "1", task_type, success, at, org))

    async def judged(self, after: Mapping[str, datetime], limit: int) -> Sequence[Judged]:
        found = []
        for worker, at in after.items():
            found += [one for one in self.rows if one.worker == worker and one.at > at][:limit]
        return sorted(found, key=lambda one: one.at)


def shown(metrics: PrometheusMetrics, worker: str, signal: str) -> float | None:
    return metrics.registry.get_sample_value("baton_worker_drift", {"worker": worker, "signal": signal})


async def test_a_worker_that_gets_worse_in_silence_is_flagged_within_a_hundred_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng, log, metrics = random.Random(11), Outcomes(), PrometheusMetrics()
    watch = WorkerWatch(log, lambda: ["atlas", "ember"], TestClock(), WorkerSeries(metrics.registry), RULES)
    for _ in range(400):
        for worker in ("atlas", "ember"):
            log.add(worker, float(rng.random() < 0.9))
    await watch.read()
    assert watch.flagged() == set()
    took = 0
    while "atlas" not in watch.flagged():
        took += 1
        log.add("atlas", float(rng.random() < 0.55))  # it answers as fast, as long, and without an error
        log.add("ember", float(rng.random() < 0.9))
        await watch.read()
    assert took <= 100
    assert watch.flagged() == {"atlas"}
    assert (shown(metrics, "atlas", "outcome"), shown(metrics, "ember", "outcome")) == (1.0, None)
    assert "worker atlas (version 1) has drifted on code: outcome was at most 0." in caplog.text


@pytest.mark.parametrize(("others", "flagged"), [(0, True), (5, True), (300, False)])
async def test_one_organisation_alone_flags_no_worker_that_does_well_for_others(
    others: int, flagged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rng, log = random.Random(3), Outcomes()
    watch = WorkerWatch(log, lambda: ["atlas"], TestClock(), WorkerSeries(PrometheusMetrics().registry), RULES)
    for n in range(400):
        log.add("atlas", float(rng.random() < 0.9), org="eve" if n % 2 else "acme")
    for n in range(300):
        log.add("atlas", 0.0, org="eve")
        if n < others:
            log.add("atlas", float(rng.random() < 0.9), org="bob")
    log.rows = [one._replace(org="eve" if not others and one.org == "acme" else one.org) for one in log.rows]
    if others == 5:
        log.rows = [one for one in log.rows if one.org != "acme"]
    await watch.read()
    assert bool(watch.fresh) is flagged
    assert ("say that it has not" in caplog.text) is not flagged


async def test_what_every_organisation_says_is_flagged() -> None:
    rng, log = random.Random(3), Outcomes()
    watch = WorkerWatch(log, lambda: ["atlas"], TestClock(), WorkerSeries(PrometheusMetrics().registry), RULES)
    for right in (0.9, 0.3):
        for n in range(400):
            log.add("atlas", float(rng.random() < right), org=f"org-{n % 3}")
    await watch.read()
    assert watch.flagged() == {"atlas"}


def test_failures_refusals_and_slowness_are_seen_in_what_was_served() -> None:
    metrics = PrometheusMetrics()
    watch = WorkerWatch(Outcomes(), list, TestClock(), WorkerSeries(metrics.registry), RULES)
    metrics.tell(watch.finished)
    rng = random.Random(5)

    def served(n: int, seconds: float, **changes: object) -> None:
        for _ in range(n):
            end_us = T0_US + round(rng.expovariate(1 / seconds) * 1e6)
            step = replace(a_step(0), started_us=T0_US, finished_us=end_us, **changes)  # type: ignore[arg-type]
            metrics.finished(a_rollout(steps=[step]), 1.0)

    served(300, 1.0)
    assert watch.flagged() == set()
    served(60, 8.0)
    served(60, 1.0, reply="I am sorry, but I cannot help with that.")
    served(60, 1.0, status="failed")
    signals = {name for name in ("slow", "refused", "failed", "long", "short") if shown(metrics, "alpha", name)}
    assert signals == {"slow", "refused", "failed"}


async def test_a_release_counts_after_a_restart_too() -> None:
    """Outcomes from before a release are read again at a start, and raise no flag; worse ones after it do."""
    rng, log, metrics = random.Random(4), Outcomes(), PrometheusMetrics()
    for right in (0.9, 0.4):
        for _ in range(200):
            log.add("atlas", float(rng.random() < right))
    log.rows = [one._replace(at=one.at - timedelta(minutes=1)) for one in log.rows]
    released_at = log.rows[-1].at + timedelta(microseconds=1)
    watch = WorkerWatch(log, lambda: ["atlas"], TestClock(), WorkerSeries(metrics.registry), RULES)
    watch.released("atlas", "1", released_at, anew=False)
    await watch.read()
    assert (list(watch.fresh), watch.flagged()) == ([], set())
    for _ in range(300):
        log.add("atlas", float(rng.random() < 0.9))
    await watch.read()
    assert watch.flagged() == set()
    for _ in range(100):
        log.add("atlas", float(rng.random() < 0.4))
    await watch.read()
    assert watch.flagged() == {"atlas"}
    assert [flag.signal for flag, _ in watch.fresh] == ["outcome"]


async def test_a_release_anew_makes_what_comes_usual() -> None:
    rng, log, metrics = random.Random(4), Outcomes(), PrometheusMetrics()
    watch = WorkerWatch(log, lambda: ["atlas"], TestClock(), WorkerSeries(metrics.registry), RULES)
    for right in (0.9, 0.4):
        for _ in range(200):
            log.add("atlas", float(rng.random() < right))
    await watch.read()
    assert watch.flagged() == {"atlas"}
    watch.released("atlas", "1", datetime.now(UTC), anew=True)
    await watch.read()
    assert watch.flagged() == set()
    for _ in range(300):
        log.add("atlas", float(rng.random() < 0.4))
    await watch.read()
    assert watch.flagged() == set()
