"""Write docs/metrics.md from the instruments themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from gateway.adapters.host.metrics import PrometheusMetrics
from scripts.markdown import items

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "metrics.md"
HEAD = """# Metrics

<!-- Written by scripts/metrics_reference.py (`make docs`); change gateway/adapters/host/metrics.py instead. -->

`GET /metrics` on either listener, Prometheus text, no key. Labels are bounded: worker names, policies, states and
reasons; never keys, users or rollouts. Each histogram also has `_bucket`, `_count` and `_sum`.

| metric | type | labels | meaning |
|---|---|---|---|
"""
TAIL = """
## Worth an alert

"""
ALERTS = {
    "`rate(baton_fallbacks_total[5m]) / rate(baton_requests_total[5m]) > 0.1`": "the conductor is away, slow or "
    "sends plans that cannot be used, or a worker fails; requests are still answered",
    "`baton_log_records_total - baton_log_records_stored_total` growing": "PostgreSQL does not keep up; see "
    "`baton_log_ship_retries_total`",
    "`min_over_time(baton_capture_rate[5m]) < 1` and no request now": "a request that was served has no row; see "
    "`baton_log_dead_letters_total` and `baton_log_damaged_total`",
    "`baton_spool_bytes` near `BATON_SPOOL_BYTES_MAX`": "soon every request is 503 `spool_full`",
    "`increase(baton_log_dead_letters_total[1h]) > 0`": "a record could not be stored; the table `dead_letters` has it",
    '`increase(baton_degraded_total{part="settle"}[5m]) > 0`': "Redis was away when a request ended; the ledger has "
    "what it cost",
    "`increase(baton_bugs_total[1h]) > 0`": "the gateway's log has the traceback",
}
TYPES: tuple[tuple[type[MetricWrapperBase], str], ...] = (
    (Counter, "counter"),
    (Gauge, "gauge"),
    (Histogram, "histogram"),
)


def instruments() -> Iterator[tuple[str, str, str, str]]:
    """Return (name, type, labels, meaning) of each metric that the adapter declares."""
    for found in vars(PrometheusMetrics()).values():
        if isinstance(found, MetricWrapperBase):
            kind = next(name for of, name in TYPES if isinstance(found, of))
            name = found._name + ("_total" if kind == "counter" else "")
            yield name, kind, ", ".join(f"`{label}`" for label in found._labelnames), found._documentation


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
    return "".join([HEAD, *lines, TAIL, items(ALERTS.items())])
