"""Write docs/metrics.md from the instruments themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.adapters.journal.series import WorkerSeries

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "metrics.md"
HEAD = """# Metrics

<!-- Written by scripts/metrics_reference.py (`make docs`); change gateway/adapters/host/metrics.py instead. -->

`GET /metrics` on either listener, Prometheus text, no key. Labels are bounded: worker names, policies, routes, states
and reasons; never keys, users or rollouts. Each histogram also has `_bucket`, `_count` and `_sum`. Gauges of the stores
(holds, budgets, jobs, outcomes) are read every 15 s, and every gateway over one database shows the same ones: take
their `max`, not their `sum`. [Alerts](alerts.md) are rules for Prometheus over these series.

| metric | type | labels | meaning |
|---|---|---|---|
"""
TYPES: tuple[tuple[type[MetricWrapperBase], str], ...] = (
    (Counter, "counter"),
    (Gauge, "gauge"),
    (Histogram, "histogram"),
)


def instruments() -> Iterator[tuple[str, str, str, str]]:
    """Return (name, type, labels, meaning) of each metric that the adapter declares."""
    parts = [*vars(PrometheusMetrics()).values(), *vars(WorkerSeries(CollectorRegistry())).values()]
    lists = [part.values() if isinstance(part, dict) else [part] for part in parts]
    for instrument in (item for items in lists for item in items):
        if isinstance(instrument, MetricWrapperBase):
            kind = next(name for of, name in TYPES if isinstance(instrument, of))
            name = instrument._name + ("_total" if kind == "counter" else "")
            yield name, kind, ", ".join(f"`{label}`" for label in instrument._labelnames), instrument._documentation


def read_when_asked() -> Iterator[tuple[str, str, str, str]]:
    """Gauges that the composition root adds: `metrics.gauge("name", "meaning", …)`."""
    for node in ast.walk(ast.parse((ROOT / "gateway" / "wiring" / "build.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "metrics.gauge":
            name, meaning = (ast.literal_eval(argument) for argument in node.args[:2])
            yield f"baton_{name}", "gauge", "", meaning


def render() -> str:
    """Return the page."""
    rows = [*instruments(), *read_when_asked()]
    lines = [f"| `{name}` | {kind} | {labels} | {what} |\n" for name, kind, labels, what in rows]
    return "".join([HEAD, *lines])
