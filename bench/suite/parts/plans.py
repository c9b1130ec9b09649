"""Three parallel steps and a merge: Baton beside frameworks in which an application writes the same workflow.

Each framework is served over HTTP by a few lines, as an application would serve it, on the core of the gateway under
test. Baton also asks a conductor for the plan, which answers at once: one call more than the others make.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.cost import PLANNED
from bench.suite.baton import USER, baton, counter, shipped
from bench.suite.client import Target
from bench.suite.cores import REST, UNDER_TEST, on
from bench.suite.parts import dispatch
from bench.suite.parts.gateways import BATON
from bench.suite.peers.frameworks.served import INSTRUCTIONS, MERGE
from bench.suite.peers.gateways import NotInstalled, install, python_of, version_of
from bench.suite.rounds import Arm, Cell, Row, interleave, ratios, say, summary
from bench.suite.sizes import Size
from policy.recipes.stack import process, program, wait_until

FRAMEWORKS = {  # module → what the page calls it, and the package whose version it names
    "langgraph": ("LangGraph", "langgraph"),
    "autogen": ("AutoGen", "autogen-agentchat"),
    "agents": ("OpenAI Agents SDK", "openai-agents"),
    "pydantic": ("pydantic-ai graphs", "pydantic-graph"),
}
PLANS = "plans"
SETTINGS = PLANNED | {"BATON_CONDUCTOR_PATIENCE_S_MIN": "30"}  # the conductor is slow at the end, after quick plans
PLAN = {
    "steps": [
        *({"worker": f"worker{n}", "task": instruction, "see": []} for n, instruction in enumerate(INSTRUCTIONS)),
        {"worker": "worker3", "task": MERGE, "see": [0, 1, 2]},
    ]
}
SHARES = (0.75, 0.875, 1.0)  # of the slowest step: the time of each


def waits_ms(size: Size) -> tuple[int, int, int, int]:
    """How long the three steps and the merge take."""
    first, second, third = (round(size.slowest_ms * share) for share in SHARES)
    return first, second, third, round(size.slowest_ms / 2)


def measure(directory: Path, size: Size, only: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Start all, measure in turns, end all. `only`: names of the frameworks; absent: all of them."""
    models = [f"wait-{wait_ms}" for wait_ms in waits_ms(size)]
    with ExitStack() as held:
        with on(REST):
            upstream = held.enter_context(program("upstream", directory, "bench.suite.upstream"))
            conductor = held.enter_context(program("conductor", directory, "bench.scripted_conductor")).url
        workers = {f"worker{number}": model for number, model in enumerate(models)}
        place = directory / BATON
        dispatch.put(conductor, {"plan": PLAN})
        named = f"{conductor}/v1#scripted"
        own = held.enter_context(baton(place, upstream.url, workers=workers, conductor=named, settings=SETTINGS))
        arms = [Arm(BATON, own.target("baton"), own.pid, partial(shipped, own.served))]
        missing = {}
        try:
            arms += _frameworks(held, directory, [upstream.url, *models], only)
        except NotInstalled as error:
            missing = dict.fromkeys(FRAMEWORKS, str(error))
            say(f"  {error}")
        cells = [Cell(PLANS, size.plans_in_flight, USER, spread_s=size.slowest_ms / 1000)]
        with on(REST):
            rows = asyncio.run(interleave(arms, cells, size.rounds, size.plans_s))
            first = dispatch.measure(own, conductor, PLAN, size)
            fallbacks = asyncio.run(counter(own.served, "baton_fallbacks_total"))
    versions = {name: version_of("frameworks", package) for name, (_, package) in FRAMEWORKS.items()}
    about: dict[str, Any] = {"waits_ms": waits_ms(size), "in_flight": size.plans_in_flight, "fallbacks": fallbacks}
    about["dispatch"] = first
    return {"rows": rows, "missing": missing, "versions": versions, **about}


def _frameworks(held: ExitStack, directory: Path, words: list[str], only: tuple[str, ...] | None) -> list[Arm]:
    chosen = [name for name in FRAMEWORKS if only is None or name in only]
    if chosen:
        install("frameworks")
    arms = []
    for name in chosen:
        say(f"  starting {name}")
        with on(UNDER_TEST):
            arms.append(held.enter_context(_framework(name, directory, words)))
    return arms


@contextmanager
def _framework(name: str, directory: Path, words: list[str]) -> Iterator[Arm]:
    """Raises NotInstalled if it does not start."""
    port_file, log = directory / f"{name}.port", directory / f"{name}.log"
    module = f"bench.suite.peers.frameworks.{name}_app"
    command = [python_of("frameworks"), "-m", module, *words, "--port-file", str(port_file)]
    with process(command, log, {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}) as running:
        try:
            wait_until(port_file.is_file, running, log)
        except SystemExit as error:
            raise NotInstalled(f"{name} does not start on this machine: {str(error).splitlines()[-1]}") from None
        url = f"http://127.0.0.1:{port_file.read_text().strip()}/v1"
        yield Arm(name, Target(url, "workflow"), running.pid)


def over_slowest(rows: list[Row], waits: list[int]) -> list[Row]:
    """The rows with latencies over what the slowest step and the merge take."""
    least_ms = max(waits[:3]) + waits[3]
    return [row | {"p50_ms": row["p50_ms"] - least_ms, "p99_ms": row["p99_ms"] - least_ms} for row in rows]


def figures(raw: dict[str, Any]) -> dict[str, Any]:
    """Medians, with latencies over the slowest step and the merge, and the ratios to Baton."""
    rows = over_slowest(raw["rows"], raw["waits_ms"])
    shown = ("missing", "versions", "waits_ms", "in_flight", "fallbacks", "dispatch")
    return {name: raw[name] for name in shown if name in raw} | {
        "medians": summary(rows),
        "ratios": ratios(rows, BATON),
    }
