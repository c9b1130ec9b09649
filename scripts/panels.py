"""The panels of the dashboards: titles, queries and units. `scripts/dashboards.py` makes Grafana's files of them.

A test runs every query on a Prometheus that scraped a gateway under load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: its title, what it says, its unit (Grafana's name of it) and its queries with their legends."""

    title: str
    says: str
    unit: str
    queries: Sequence[tuple[str, str]]
    kind: str = "lines"  # lines | stacked | number
    width: int = 8


def rate(metric: str, by: str = "", where: str = "") -> str:
    """The rate of a counter, summed by labels."""
    return f"sum {f'by ({by}) ' if by else ''}(rate({metric}{{{where}}}{RATE}))"


def quantile(share: float, metric: str, by: str = "", where: str = "") -> str:
    """A quantile of a histogram, by labels."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', ', '.join(filter(None, (by, 'le'))), where)})"


def number(title: str, says: str, unit: str, query: str, width: int = 4) -> Panel:
    """A panel that shows the newest value as a number."""
    return Panel(title, says, unit, [(query, "")], "number", width)


def lines(title: str, says: str, unit: str, *queries: tuple[str, str], kind: str = "lines", width: int = 8) -> Panel:
    """A panel of lines over time."""
    return Panel(title, says, unit, queries, kind, width)


REQUESTS, FAILED = rate("baton_requests_total"), rate("baton_requests_total", where='status="failed"')
FELL_BACK = rate("baton_fallbacks_total")
OVERVIEW = [
    number("Requests", "Admitted requests a second", "reqps", REQUESTS),
    number("Failed", "Share of them that failed", "percentunit", f"({FAILED} or vector(0)) / {REQUESTS}"),
    number("Fallbacks", "Share that a router planned instead", "percentunit", f"{FELL_BACK} / {REQUESTS}"),
    number("Spent a day", "Dollars at the rate of now", "currencyUSD", f"86400 * {rate('baton_cost_usd_total')}"),
    number("Latency p95", "From admission to the log", "s", quantile(0.95, "baton_request_seconds")),
    number("Gateways", "Processes that are scraped", "short", "count(baton_build_info)"),
    lines(
        "Requests by status",
        "How they ended",
        "reqps",
        (rate("baton_requests_total", "status"), "{{status}}"),
        kind="stacked",
    ),
    lines(
        "Requests by policy",
        "What was asked for",
        "reqps",
        (rate("baton_requests_total", "policy"), "{{policy}}"),
        kind="stacked",
    ),
    lines(
        "Refusals by code",
        "Replies with an error",
        "reqps",
        (rate("baton_refusals_total", "status, code"), "{{status}} {{code}}"),
    ),
    lines(
        "Phases of a request, p50",
        "Where the time goes: waiting for admission, planning, one worker call, the gateway itself, the whole",
        "s",
        (quantile(0.5, "baton_queue_seconds"), "admission"),
        (quantile(0.5, "baton_plan_seconds"), "planning"),
        (quantile(0.5, "baton_step_seconds"), "worker call"),
        (quantile(0.5, "baton_overhead_seconds"), "overhead"),
        (quantile(0.5, "baton_request_seconds"), "total"),
    ),
    lines(
        "First token, by policy",
        "Of streamed replies, from admission",
        "s",
        (quantile(0.95, "baton_first_token_seconds", "policy"), "{{policy}} p95"),
    ),
    lines(
        "Replies by route",
        "Both listeners",
        "reqps",
        (rate("baton_http_replies_total", "route"), "{{route}}"),
        kind="stacked",
    ),
    lines("In flight", "Requests admitted and not yet settled", "short", ("baton_in_flight", "{{instance}}")),
    lines("Tokens", "By kind", "short", (rate("baton_tokens_total", "kind"), "{{kind}}")),
    lines(
        "Versions",
        "What runs where",
        "short",
        ("count by (version, python) (baton_build_info)", "{{version}}, Python {{python}}"),
    ),
]
LEARNING = [
    number("Plans", "Planning calls of the conductor a second", "reqps", rate("baton_plan_seconds_count")),
    number("Planning p95", "One planning call", "s", quantile(0.95, "baton_plan_seconds")),
    number("Paused", "1: calls to the conductor are paused", "short", "max(baton_conductor_paused)"),
    number(
        "Judged", "Outcomes of the last day", "short", "sum(max by (version) (baton_version_outcomes)) or vector(0)"
    ),
    number("Jobs running", "Training jobs", "short", 'max(baton_jobs{state="running"})'),
    number(
        "Rollbacks", "Versions taken back in the last day", "short", "sum(increase(baton_policy_rollbacks_total[1d]))"
    ),
    lines(
        "Fallbacks by cause",
        "conductor_…: its server or its plans; worker_…: a worker",
        "reqps",
        (rate("baton_fallbacks_total", "reason"), "{{reason}}"),
    ),
    lines("Plans not used", "By reason", "reqps", (rate("baton_plans_refused_total", "reason"), "{{reason}}")),
    lines(
        "Planning time",
        "One call",
        "s",
        *[(quantile(share, "baton_plan_seconds"), f"p{share * 100:.0f}") for share in (0.5, 0.95, 0.99)],
    ),
    lines(
        "Rounds a request",
        "Mean planning calls",
        "short",
        (f"{rate('baton_rounds_sum', 'policy')} / {rate('baton_rounds_count', 'policy')}", "{{policy}}"),
    ),
    lines(
        "Steps a plan",
        "Mean",
        "short",
        (f"{rate('baton_plan_steps_sum', 'planner')} / {rate('baton_plan_steps_count', 'planner')}", "{{planner}}"),
    ),
    lines(
        "Split of traffic",
        "Percent of requests that a version plans",
        "percent",
        ("max by (version) (baton_policy_percent)", "{{version}}"),
        kind="stacked",
    ),
    lines(
        "Fate of plans",
        "By version: used, refused, or away where the server gave none",
        "reqps",
        (rate("baton_policy_requests_total", "version, plan"), "{{version}} {{plan}}"),
    ),
    lines(
        "Mean outcome",
        "Of judged requests of the last day, by version",
        "percentunit",
        ("max by (version) (baton_version_reward_mean)", "{{version}}"),
    ),
    lines(
        "Judged requests",
        "Of the last day, by version",
        "short",
        ("max by (version) (baton_version_outcomes)", "{{version}}"),
    ),
    lines(
        "Held by the engines",
        "1: every engine holds the version",
        "short",
        ("min by (version, state) (baton_policy_held)", "{{version}} {{state}}"),
    ),
    lines("Jobs", "By state; ended ones of the last day", "short", ("max by (state) (baton_jobs)", "{{state}}")),
    lines(
        "Gradings", "By state; ended ones of the last day", "short", ("max by (state) (baton_gradings)", "{{state}}")
    ),
]
CALLED, NOT_OK = rate("baton_worker_attempts_total", "worker"), 'outcome!~"ok|cancelled|deadline_exceeded"'
WORKERS = [
    number("Calls", "Steps a second", "reqps", rate("baton_steps_total")),
    number(
        "Not ok",
        "Share of attempts that failed",
        "percentunit",
        f"({rate('baton_worker_attempts_total', where=NOT_OK)} or vector(0)) / {rate('baton_worker_attempts_total')}",
    ),
    number("Retries", "A second", "reqps", rate("baton_worker_retries_total")),
    number(
        "Concentration",
        "1: one worker does everything; 1/n: n workers share evenly",
        "percentunit",
        "max(baton:worker_concentration)",
    ),
    number("Workers", "That were called", "short", "count(count by (worker) (baton_steps_total))"),
    number("Pool since", "When the pool in use was loaded", "dateTimeFromNow", "1000 * max(baton_pool_loaded_seconds)"),
    lines("Shares", "Share of all calls", "percentunit", ("baton:worker_share", "{{worker}}"), kind="stacked"),
    lines("Calls by worker", "Steps of plans", "reqps", (rate("baton_steps_total", "worker"), "{{worker}}")),
    lines("How calls ended", "By status", "reqps", (rate("baton_steps_total", "status"), "{{status}}"), kind="stacked"),
    lines(
        "Attempts by outcome",
        "ok, or the error's code",
        "reqps",
        (rate("baton_worker_attempts_total", "outcome"), "{{outcome}}"),
    ),
    lines(
        "Not ok by worker",
        "Share of attempts",
        "percentunit",
        (f"({rate('baton_worker_attempts_total', 'worker', NOT_OK)} or 0 * {CALLED}) / {CALLED}", "{{worker}}"),
    ),
    lines(
        "Retries by worker",
        "Attempts after the first",
        "reqps",
        (rate("baton_worker_retries_total", "worker"), "{{worker}}"),
    ),
    lines("Latency p50", "One worker call", "s", (quantile(0.5, "baton_step_seconds", "worker"), "{{worker}}")),
    lines("Latency p95", "One worker call", "s", (quantile(0.95, "baton_step_seconds", "worker"), "{{worker}}")),
    lines(
        "Tokens by worker",
        "Prompt and completion",
        "short",
        (rate("baton_tokens_total", "worker", 'kind=~"prompt|completion"'), "{{worker}}"),
    ),
    lines(
        "Quarantine",
        "1: the worker is kept out of plans",
        "short",
        ("max by (worker) (baton_worker_quarantined)", "{{worker}}"),
    ),
    lines(
        "Rests",
        "1: the worker keeps failing and is left alone, by why",
        "short",
        ("max by (worker, reason) (baton_worker_resting)", "{{worker}}: {{reason}}"),
    ),
]
NOT_PLANNING = 'worker!="conductor"'
MONEY = [
    number("Spent, an hour", "Dollars in the last hour", "currencyUSD", "sum(increase(baton_cost_usd_total[1h]))"),
    number("Spent, a day", "Dollars in the last day", "currencyUSD", "sum(increase(baton_cost_usd_total[1d]))"),
    number("Held", "Dollars under holds that are not settled", "currencyUSD", "max(baton_held_usd)"),
    number(
        "Uncertain", "Charges of a day that no reply confirmed, not credited", "short", "max(baton_uncertain_charges)"
    ),
    number("Near the end", "Budgets more than 80 % gone", "short", 'max(baton_budgets{state="near"})'),
    number("Spent budgets", "Budgets with nothing left", "short", 'max(baton_budgets{state="spent"})'),
    lines(
        "Dollars by worker",
        "A minute; `conductor` is planning",
        "currencyUSD",
        (f"60 * {rate('baton_cost_usd_total', 'worker')}", "{{worker}}"),
        kind="stacked",
    ),
    lines("Dollars a request", "Mean", "currencyUSD", (f"{rate('baton_cost_usd_total')} / {REQUESTS}", "a request")),
    lines(
        "Dollars a thousand tokens",
        "By worker",
        "currencyUSD",
        (
            f"1000 * {rate('baton_cost_usd_total', 'worker', NOT_PLANNING)} / {rate('baton_tokens_total', 'worker')}",
            "{{worker}}",
        ),
    ),
    lines("Holds open", "Of the last hour", "short", ("max(baton_holds_open)", "holds")),
    lines(
        "Uncertain dollars", "Of the last day, not credited", "currencyUSD", ("max(baton_uncertain_usd)", "uncertain")
    ),
    lines("Budgets", "Set, near their end, spent", "short", ("max by (state) (baton_budgets)", "{{state}}")),
    lines("Ended by a cap", "Requests that a cap ended early", "reqps", (rate("baton_capped_total", "cap"), "{{cap}}")),
    lines(
        "Drift of balances",
        "Dollars by which balances in Redis differed from the ledger at the last look",
        "currencyUSD",
        ("max(baton_budget_drift_usd)", "drift"),
    ),
    lines(
        "Refused with 429",
        "Rates and budgets",
        "reqps",
        (rate("baton_refusals_total", "code", 'status="429"'), "{{code}}"),
    ),
    lines(
        "Settled late",
        "Redis was away at the end of a request",
        "reqps",
        (rate("baton_degraded_total", "part", 'part="settle"'), "{{part}}"),
    ),
]
RELIABILITY = [
    number("Log lag", "Age of the oldest record that is not in PostgreSQL", "s", "max(baton_log_lag_seconds)"),
    number("Capture rate", "Stored rollouts a served request", "percentunit", "min(baton_capture_rate)"),
    number(
        "Journal", "Share of its room that is used", "percentunit", "max(baton_spool_bytes / baton_spool_bytes_max)"
    ),
    number("Disk free", "Of the journal's disk", "bytes", "min(baton_disk_free_bytes)"),
    number("Dead letters", "In the last day", "short", "sum(increase(baton_log_dead_letters_total[1d]))"),
    number("Bugs", "Unexpected errors in the last day", "short", "sum(increase(baton_bugs_total[1d]))"),
    lines("Parts", "1: the part answers its health check", "short", ("min by (part) (baton_up)", "{{part}}")),
    lines("Log lag", "By gateway", "s", ("baton_log_lag_seconds", "{{instance}}")),
    lines(
        "Records",
        "To disk, and to PostgreSQL",
        "short",
        (rate("baton_log_records_total"), "on disk"),
        (rate("baton_log_records_stored_total"), "stored"),
    ),
    lines(
        "Journal's commit",
        "One fsync for all who wait",
        "s",
        *[(quantile(share, "baton_log_fsync_seconds"), f"p{share * 100:.0f}") for share in (0.5, 0.99)],
    ),
    lines(
        "Event loop",
        "How late timers run",
        "s",
        *[(quantile(share, "baton_event_loop_lag_seconds"), f"p{share * 100:.0f}") for share in (0.5, 0.99)],
    ),
    lines(
        "Overhead",
        "Time in which no worker or conductor was waited for",
        "s",
        *[(quantile(share, "baton_overhead_seconds"), f"p{share * 100:.0f}") for share in (0.5, 0.95)],
    ),
    lines(
        "Optional parts away",
        "Requests that went on without them",
        "reqps",
        (rate("baton_degraded_total", "part"), "{{part}}"),
    ),
    lines(
        "Batches refused",
        "Times PostgreSQL could not take one",
        "reqps",
        (rate("baton_log_ship_retries_total"), "retries"),
    ),
    lines(
        "Journal damaged",
        "torn: cut by a crash; corrupt: set aside",
        "short",
        ("sum by (what) (baton_log_damaged_total)", "{{what}}"),
    ),
    lines(
        "Refusals that are ours",
        "5xx",
        "reqps",
        (rate("baton_refusals_total", "code", 'status=~"5.."') + " or vector(0)", "{{code}}"),
    ),
    lines("Pool reloads", "By result", "short", ("sum by (hash) (baton_pool_info)", "{{hash}}")),
    lines(
        "Age of the gauges of the stores",
        "Read every 15 s",
        "s",
        ("time() - baton_figures_read_seconds", "{{instance}}"),
    ),
]
PANELS = {
    "Overview": OVERVIEW,
    "Conductor and learning": LEARNING,
    "Workers": WORKERS,
    "Money": MONEY,
    "Reliability": RELIABILITY,
}


def queries() -> Iterator[tuple[str, str, str]]:
    """Each query as (dashboard, panel, query)."""
    for title, panels in PANELS.items():
        for panel in panels:
            for query, _ in panel.queries:
                yield title, panel.title, query
