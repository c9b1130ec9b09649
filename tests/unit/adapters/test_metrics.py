"""The series of a request: whose dollars and seconds they are, and that their labels are bounded."""

from __future__ import annotations

from typing import Any

from gateway.adapters.host.metrics import CODES_MAX, PrometheusMetrics
from gateway.core.log.rollout import AttemptRecord
from tests.records import T0_US, a_rollout, a_round, a_step, new_id


def value(metrics: PrometheusMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"baton_{name}", labels)


def test_a_step_that_never_began_takes_no_time() -> None:
    metrics = PrometheusMetrics()
    never = a_step(0, started_us=0, finished_us=T0_US, status="cancelled", attempts=[])
    metrics.finished(a_rollout(steps=[never]), 1.0)
    assert value(metrics, "steps_total", worker="alpha", status="cancelled") == 1
    assert not value(metrics, "step_seconds_sum", worker="alpha")


def test_what_a_child_loop_spends_is_its_workers_and_counts_once() -> None:
    metrics = PrometheusMetrics()
    child = a_rollout(depth=1, rounds=[], steps=[a_step(0, "beta", cost_nano=7_000_000_000)])
    on_self = a_step(1, "self", kind="self", child_rollout_id=child.id, cost_nano=7_000_000_000)
    own = a_step(0, "alpha", cost_nano=1_000_000_000)
    metrics.finished(a_rollout(rounds=[], steps=[own, on_self], cost_nano=8_000_000_000), 1.0, [child])
    assert value(metrics, "cost_usd_total", worker="beta") == 7
    assert value(metrics, "cost_usd_total", worker="alpha") == 1
    assert value(metrics, "cost_usd_total", worker="self") is None
    assert value(metrics, "steps_total", worker="self", status="done") == 1
    assert value(metrics, "child_loops_total", depth="1") == 1


def test_attempts_have_outcomes_of_ours_and_retries_are_counted() -> None:
    metrics = PrometheusMetrics()
    errors: list[str | None] = ["upstream_timeout", "some code of a vendor", None]
    tries = [AttemptRecord(T0_US, T0_US + 1, error=error) for error in errors]
    metrics.finished(a_rollout(steps=[a_step(0, attempts=tries)]), 1.0)
    for outcome in ("upstream_timeout", "upstream_error", "ok"):
        assert value(metrics, "worker_attempts_total", worker="alpha", outcome=outcome) == 1
    assert value(metrics, "worker_retries_total", worker="alpha") == 2


def test_a_call_beside_a_step_counts_for_its_own_worker_and_is_no_retry() -> None:
    metrics = PrometheusMetrics()
    tries = [AttemptRecord(T0_US, T0_US + 1, worker="sum"), AttemptRecord(T0_US, T0_US + 1)]
    metrics.finished(a_rollout(steps=[a_step(0, attempts=tries)]), 1.0)
    for worker in ("sum", "alpha"):
        assert value(metrics, "worker_attempts_total", worker=worker, outcome="ok") == 1
    assert value(metrics, "worker_retries_total", worker="alpha") == 0


def test_codes_of_refusals_are_bounded() -> None:
    metrics = PrometheusMetrics()
    for number in range(CODES_MAX + 5):
        metrics.replied("/v1/models", 400, f"code_{number}", 0.001)
    assert value(metrics, "refusals_total", status="400", code="code_0") == 1
    assert value(metrics, "refusals_total", status="400", code="other") == 5


def test_a_hung_server_is_not_a_refused_plan_of_its_version() -> None:
    metrics = PrometheusMetrics()
    fates: list[tuple[str | None, str]] = [
        (None, "used"),
        ("conductor_slow", "away"),
        ("conductor_unparseable", "refused"),
    ]
    for fallback, fate in fates:
        metrics.finished(a_rollout(policy_assigned="conductor@7", fallback=fallback), 1.0)
        assert value(metrics, "policy_requests_total", version="conductor@7", plan=fate) == 1


def test_phases_rounds_and_first_tokens() -> None:
    metrics = PrometheusMetrics()
    record: dict[str, Any] = {"id": new_id(), "created_us": T0_US, "finished_us": T0_US + 3_000_000, "stream": True}
    step = a_step(0, first_byte_us=T0_US + 2_000_000)
    metrics.finished(a_rollout(policy_requested="baton", rounds=[a_round(1), a_round(2)], steps=[step], **record), 5.0)
    metrics.admitted(0.25)
    assert value(metrics, "first_token_seconds_sum", policy="baton") == 2.0
    assert value(metrics, "request_seconds_sum", policy="baton") == 3.0
    assert value(metrics, "rounds_sum", policy="baton") == 2
    assert value(metrics, "plan_steps_sum", planner="conductor") == 2
    assert value(metrics, "queue_seconds_sum") == 0.25


def test_what_alerts_watch_is_there_before_its_first_event() -> None:
    metrics = PrometheusMetrics()
    assert value(metrics, "fallbacks_total", reason="conductor_down") == 0
    assert value(metrics, "degraded_total", part="settle") == 0
    assert value(metrics, "log_dead_letters_total", kind="rollout") == 0
