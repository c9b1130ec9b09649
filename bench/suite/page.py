"""docs/benchmarks.md and its pictures, written from the figures beside them (docs/benchmarks/PART.json). Pure but for
reading these files; tests/bench/test_benchmarks_page.py compares."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from bench.suite import pictures
from bench.suite.parts.dispatch import DECODED, WHOLE
from bench.suite.parts.gateways import BATON, CROWD, DIRECT, MANY, ONE, PEERS, STREAM
from bench.suite.parts.plans import FRAMEWORKS, PLANS
from bench.suite.parts.training import SHARES

ROOT = Path(__file__).resolve().parents[2]
PAGE, FIGURES = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "benchmarks"
NAMES = {
    DIRECT: "the mock worker itself",
    BATON: "**Baton**: budgets, journal, metrics",
    **{peer.name: peer.shown for peer in PEERS},
    **{name: shown for name, (shown, _) in FRAMEWORKS.items()},
}
HEAD = """\
# Benchmarks

This page is written by `make bench` from [the figures beside it](benchmarks/); nobody edits it. Every ratio compares
programs that ran side by side in one run: rounds are interleaved, the order turns by one each round, and a ratio is
taken within a round. Shown is the median over rounds, with the least and the most of them in brackets. Read ratios;
times and rates are of one machine on one day.

- **One core.** The program under test has the first core. Client and mock worker share the other cores, and so do
  PostgreSQL and Redis, which Baton starts and the others do not need.
- **Baton** has budgets of organisation, key and end user (over all time, a month, a day), each request's hold and
  settlement, its journal with the shipper, and metrics. Its processor time is that of the process that serves and of
  its shipper, until the log is in PostgreSQL.
- **The others** have no money, no keys, no log and no store.
- **Processor time** is user and system time of the program and its child processes.

```sh
make bench                                              # all parts, a few minutes each
make bench ARGS="gateways plans --again"                # two of them anew
make bench ARGS="--size full"                           # the sizes of a release: hours
make bench ARGS="rollouts --again --rollouts 10000000"  # another size of one part
```

The other programs are installed from PyPI and npm, pinned by hash, into environments of their own (`.venv-bench-*`);
what does not install on a machine is a row that says so. Every round is in `bench/out/suite/`. A run that was
interrupted goes on where it was.
"""
ENGINES = {"small": "`small`: `arena-3`, 0.9M weights", "large": "`large`: SmolLM2-135M, LoRA of rank 16"}
Lines = list[str]
WIDTH = 118
CONSOLE_GOAL_MS = 200


def load() -> dict[str, dict[str, Any]]:
    """Part → its file, of the parts that were measured."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FIGURES.glob("*.json"))}


def files() -> Iterator[tuple[Path, str]]:
    """The page and each picture, with what it should hold."""
    parts = load()
    yield PAGE, render(parts)
    for name, text in pictures.of({name: part["figures"] for name, part in parts.items()}).items():
        yield FIGURES / f"{name}.svg", text


def render(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """The page."""
    lines = [HEAD]
    for name, (title, section) in SECTIONS.items():
        lines += [f"## {title}", ""]
        if name in parts:
            lines += [_measured_at(name, parts[name]["about"]), "", *section(parts[name]["figures"]), ""]
        else:
            lines += [f"Not measured yet: `python -m bench {name}`.", ""]
    return "\n".join([*lines, *machines(parts)])


def _measured_at(name: str, about: Mapping[str, Any]) -> str:
    low, high = sorted(about["load"])
    rounds = f"{about['size']['rounds']} rounds. " if about["size"] else ""
    return (
        f"`python -m bench {name}`, {about['date']}, commit {about['commit']}. {rounds}Load average {low:g} to "
        f"{high:g} on {about['machine']['cores']} cores."
    )


def machines(parts: Mapping[str, Mapping[str, Any]]) -> Lines:
    """The machines that were measured on, each once."""
    lines, seen = ["## The machine", ""], list[str]()
    for part in parts.values():
        one = part["about"]["machine"]
        packages = ", ".join(f"{name} {version}" for name, version in one["packages"].items())
        head = (
            f"- {one['processor']}, {one['cores']} cores, {one['memory_gib']} GiB; {one['kernel']}; Python "
            f"{one['python']}; Baton {one['baton']}"
        )
        text = "\n  ".join([head, *wrap(f"with {packages}.", WIDTH)])
        if text not in seen:
            seen.append(text)
    return [*lines, *(seen or ["Nothing was measured yet."]), ""]


# ---------------------------------------------------------------- parts


def spread(values: Sequence[float] | None) -> str:
    """A ratio with its least and most; a dash where there is none."""
    return f"{plain(values[0])} ({plain(values[1])}–{plain(values[2])})" if values else "–"


def plain(value: float) -> str:
    """A number with three significant digits, and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    """A table whose first column is text."""
    return [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1), *(f"| {' | '.join(row)} |" for row in rows)]


def of_gateways(figures: Mapping[str, Any]) -> Lines:
    """Two tables: ratios to Baton, and medians."""
    many, crowd = figures["in_flight"][MANY], figures["in_flight"][CROWD]
    medians, ratios = figures["medians"], figures["ratios"]
    relative, absolute = [], []
    for name in (BATON, *(name for name in NAMES if name in medians and name not in (BATON, DIRECT)), DIRECT):
        cells = medians[name]
        if name != BATON:
            own = ratios[name]
            cpu = [spread(own[cell].get("cpu_us")) for cell in (MANY, STREAM)]
            rates = [spread(own[cell].get("per_s")) for cell in (MANY, STREAM)]
            relative.append([NAMES[name], spread(own[ONE].get("p50_ms")), rates[0], cpu[0], rates[1], cpu[1]])
        absolute.append([
            NAMES[name], plain(cells[ONE]["p50_ms"]),
            *(text for cell in (MANY, STREAM) for text in (plain(cells[cell]["per_s"]), _ms(cells[cell]["cpu_us"]))),
            f"{cells[CROWD]['refused']:,} of {cells[CROWD]['asked']:,}",
        ])  # fmt: skip
    head = ["", "1 in flight: p50", f"{many}: requests/s", "processor", f"{many} streams: requests/s", "processor"]
    last = f"{crowd}: refused"
    lines = ["Each as a multiple of Baton's figure in the same round:", "", *table(head, relative), "", *_goal(figures)]
    units = ["", "1 in flight: p50, ms", f"{many}: requests/s", "processor, ms"]
    units += [f"{many} streams: requests/s", "processor, ms", last]
    lines += ["", "The medians of the same rounds; a stream has 23 chunks:", "", *table(units, absolute), ""]
    data = medians[BATON][MANY]["data_us"]
    lines.append(f"PostgreSQL and Redis used {_ms(data)} ms of other cores for a request of Baton's, {many} in flight.")
    lines += ["", *_missing(figures), "![processor time beside Baton](benchmarks/gateways.svg)"]
    return lines


def _ms(microseconds: float) -> str:
    return plain(microseconds / 1000) if microseconds else "–"


def _goal(figures: Mapping[str, Any]) -> Lines:
    """Baton's multiple of the two gateways that the goal names."""
    said = []
    for peer, goal in (("litellm", "10"), ("portkey", "1")):
        own = figures[f"to_{peer}"]
        if own:
            rate, cpu = own[MANY]["per_s"][0], own[MANY]["cpu_us"][0]
            stream = own[STREAM]["per_s"][0]
            said.append(
                f"- Baton serves **{plain(rate)} ×** {NAMES[peer]}'s requests/s and {plain(stream)} × its streams, at "
                f"{plain(cpu)} × its processor time (goal: {goal} × the requests)."
            )
    return said


def _missing(figures: Mapping[str, Any]) -> Lines:
    names = ", ".join(f"{NAMES[name].split(',')[0]} {version}" for name, version in figures["versions"].items())
    lines = [f"Versions: {names}."]
    lines += [f"\nNot measured: {NAMES[name]}: {why}." for name, why in figures["missing"].items()]
    return [*lines, ""]


def of_plans(figures: Mapping[str, Any]) -> Lines:
    """Ratios to Baton, and medians."""
    medians, ratios = figures["medians"], figures["ratios"]
    *steps, merge = figures["waits_ms"]
    rows = []
    for name in (BATON, *FRAMEWORKS):
        if name not in medians:
            rows.append([NAMES[name], *["not measured"] * 5])
            continue
        own = medians[name][PLANS]
        ratio = "1" if name == BATON else spread(ratios[name][PLANS]["cpu_us"])
        over = f"{plain(own['p50_ms'])} / {plain(own['p99_ms'])}"
        failed = f"{own['refused']} of {own['asked']}"
        rows.append([NAMES[name], ratio, _ms(own["cpu_us"]), over, plain(own["per_s"]), failed])
    head = [
        "",
        "processor: × Baton",
        "processor a plan, ms",
        "over the slowest step, p50 / p99, ms",
        "plans/s",
        "failed",
    ]
    return [
        f"Three steps at a time ({', '.join(map(str, steps))} ms) and one that merges ({merge} ms), "
        f"{figures['in_flight']} in flight. In a framework the application",
        "writes this workflow, served over HTTP by the same few lines; Baton also asks a conductor for the plan, which",
        "answers at once: one call more. *Over the slowest step*: latency less the slowest step and the merge.",
        "", *table(head, rows), "",
        f"Of Baton's requests, {figures['fallbacks']} were planned by a router instead.",
        "", *of_dispatch(figures.get("dispatch")), *_missing(figures),
        "![processor time of a plan](benchmarks/plans.svg)",
    ]  # fmt: skip


def of_dispatch(found: Mapping[str, Any] | None) -> Lines:
    """What reading a plan while it is decoded saves; nothing where that was not measured."""
    if found is None:
        return []
    shown = {DECODED: "read while it is decoded", WHOLE: "comes whole"}
    rows = [
        [label, *(plain(found[way][name]) for name in ("first_ms", "plan_ms", "reply_ms"))]
        for way, label in shown.items()
    ]
    return [
        f"A conductor that takes {found['token_ms']:g} ms a token, a plan of {found['tokens']} tokens, one request at "
        f"a time ({found['requests']} each way, in turns):",
        "", *table(["the plan", "first step after, ms", "end of the plan, ms", "reply, ms"], rows), "",
    ]  # fmt: skip


def of_overload(figures: Mapping[str, Any]) -> Lines:
    """One table."""
    probes, calm = figures["probes"], figures["probes_calm"]
    rows = [
        ["capacity, requests/s", spread(figures["capacity_per_s"])],
        ["goodput, of the capacity (goal: 0.9)", spread(figures["goodput"])],
        ["refused", f"{figures['refused']:,} of {figures['asked']:,}"],
        ["refusals: p50, ms", spread(figures["refused_p50_ms"])],
        ["refusals: p99, ms (goal: 50)", spread(figures["refused_p99_ms"])],
        ["refusals without `retry-after`", f"{figures['no_retry_after']:,}"],
        ["other errors", f"{figures['other']:,}"],
        ["served: p50, ms; at capacity", f"{spread(figures['served_p50_ms'])}; {spread(figures['capacity_p50_ms'])}"],
        [
            "health, admin, models, outcomes: failed; at capacity",
            f"{probes['failed']} of {probes['asked']}; {calm['failed']} of {calm['asked']}",
        ],
        ["the same: p99, ms; at capacity", f"{spread(probes['p99_ms'])}; {spread(calm['p99_ms'])}"],
    ]
    return [
        f"Capacity with {figures['in_flight']} in flight, then {figures['times']} times as many requests a second as "
        "that, whatever comes back; in turns.",
        "[Row L6](guarantees/faults.md#l6-overload) of the fault matrix asserts the same for two gateways.",
        "", *table(["", ""], rows),
    ]  # fmt: skip


def of_flat(
    what: str, few: str = "few", cells: Mapping[str, str] | None = None
) -> Callable[[Mapping[str, Any]], Lines]:
    """One table: a row for each arm with many, and each cell."""

    def lines(figures: Mapping[str, Any]) -> Lines:
        counts, medians = figures["counts"], figures["medians"]
        rows = []
        for arm, by_cell in figures["ratios"].items():
            for cell, own in by_cell.items():
                label = f"{counts[arm]:,} {what}{arm.removeprefix('many')}" + (f", {cells[cell]}" if cells else "")
                values = [spread(own.get(metric)) for metric in ("cpu_us", "per_s", "p50_ms", "data_us")]
                rows.append([label, *values, f"{medians[arm][cell]['refused']} of {medians[arm][cell]['asked']}"])
        head = ["", "processor", "requests/s", "p50", "PostgreSQL, Redis", "failed"]
        return [f"As a multiple of the same with {counts[few]:,}:", "", *table(head, rows)]

    return lines


def of_console(figures: Mapping[str, Any]) -> Lines:
    """One table."""
    counts, ms = figures["counts"], figures["ms"]
    rows = [[label, plain(ms["few"][label][1]), *(plain(value) for value in ms["many"][label])] for label in ms["many"]]
    over = [label for label, (_, p50, _) in ms["many"].items() if p50 > CONSOLE_GOAL_MS]
    goal = f"All but {len(over)} are" if over else "All are"
    return [
        "Milliseconds until the admin API has answered, one query at a time, nothing else under way.",
        "", *table(["", f"{counts['few']:,} rollouts: p50", f"{counts['many']:,}: first", "p50", "longest"], rows),
        "", f"{goal} within {CONSOLE_GOAL_MS} ms (p50).",
    ]  # fmt: skip


def of_memory(figures: Mapping[str, Any]) -> Lines:
    """One sentence."""
    warm, last, grown = (plain(figures[name]) for name in ("warm_mib", "last_mib", "mib_per_100k"))
    return [
        f"{figures['requests']:,.0f} requests, {figures['in_flight']} in flight: {warm} MiB after a fifth of them, "
        f"{last} MiB at the end, **{figures['ratio']:.3f} ×**; {grown} MiB",
        "for 100,000 requests. Resident memory of the process that serves and its shipper.",
    ]


def of_streams(figures: Mapping[str, Any]) -> Lines:
    """One sentence."""
    before, most, each = (plain(figures[name]) for name in ("before_mib", "with_mib", "kib_each"))
    return [
        f"{figures['open']:,} of {figures['streams']:,} streams open at a time, two chunks a second each: {before} MiB "
        f"without, **{most} MiB** with them (goal: 350), {each} KiB",
        "a stream.",
    ]


def of_processes(figures: Mapping[str, Any]) -> Lines:
    """One table."""
    shared = " that client, worker, PostgreSQL and Redis share" if figures["shared"] else ""
    ways = {"freely": figures}
    if shares := figures.get("shares"):
        ways[f"each with {shares['share']:g} of a core"] = shares
    rows, failed = [], 0
    for way, each in ways.items():
        failed += sum(cells["many"]["refused"] for cells in each["medians"].values())
        for name in each["ratios"]:
            own, per_s = each["ratios"][name]["many"], each["medians"][name]["many"]["per_s"]
            first = each["medians"]["one"]["many"]["per_s"]
            rates = f"{plain(first)} and {plain(per_s)}"
            rows.append([f"{name}, {way}", spread(own["per_s"]), rates, spread(own["cpu_us"]), spread(own["p50_ms"])])
    missing = [f"No shares of a core: {figures['no_shares']}."] if "no_shares" in figures else []
    return [
        f"{figures['in_flight']} in flight on {figures['cores']} cores{shared}.",
        "", *table(["processes beside one", "requests/s", "one's and theirs", "processor a request", "p50"], rows),
        "", f"The goal of two is 1.7. {failed} failed. Freely, two processes have no second core to themselves, and of",
        "one that is busy they get a larger share than one process. With a share of a core for each process that",
        "serves and its shipper (the quota of a control group), all else has the cores that it needs.", *missing,
    ]  # fmt: skip


def of_training(figures: Mapping[str, Any]) -> Lines:
    """Two tables."""
    engines = figures["engines"]
    rows = [
        [
            ENGINES[name],
            " × ".join(map(str, figures["batches"][name])),
            plain(each["per_s"]),
            *(f"{100 * each[share]:.0f} %" for share in SHARES),
        ]
        for name, each in engines.items()
    ]
    missing = [f"{ENGINES[name]}: not measured, {why}." for name, why in figures["missing"].items()]
    return [
        "Episodes of an environment, their plans given as text, one process on one core (goal of `replay`: 20,000):",
        "", *table(
            ["environment", "steps of a plan", "episodes a second of processor time"],
            [[each["environment"], str(each["steps"]), spread(each["per_cpu_s"])] for each in figures["environments"]],
        ),
        "", "Steps of the trainers that sample, one thread. TRL learns from an export: it samples nothing.",
        "", *table(["engine", "questions × episodes a step", "episodes/s", *SHARES], rows), *missing,
    ]  # fmt: skip


SECTIONS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Lines]]] = {
    "gateways": ("Beside other gateways", of_gateways),
    "plans": ("Plans beside frameworks", of_plans),
    "overload": ("Overload", of_overload),
    "keys": ("One key or many", of_flat("keys")),
    "workers": ("Five workers or many", of_flat("workers", cells={"named": "one by name", "rule": "`baton/rule`"})),
    "rollouts": ("A thousand rollouts or many", of_flat("rollouts")),
    "console": ("The console's queries", of_console),
    "memory": ("Memory over many requests", of_memory),
    "streams": ("Open streams", of_streams),
    "processes": ("Several processes", of_processes),
    "training": ("Training", of_training),
}
