"""What the gateway adds to a call, as a ratio measured in one run.

    python -m bench.overhead [--rounds 15] [--requests 20] [--concurrency 1]

Three ways to the same simulated worker, which answers at once: straight to it, through the gateway as a plain
pass-through (model `WORKER`), and through the loop (`baton/fixed:WORKER`). Rounds are interleaved, the order turning by
one each round, so that whatever else the machine does falls on all three alike. Figures are medians over rounds of each
round's median; the ratio is taken within each round first. CPU is what the gateway's process used per request
(/proc/PID/stat); its PostgreSQL, Redis and workers are not in it. Absolute figures are of this machine at this moment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from gateway.files import write_atomic
from policy.recipes.stack import Gateway, gateway, output_of, program, temporary_directory

WORKER = "cedar"
AT_ONCE_SPEED = "1000000"
QUESTION = "How many grams are there in 51 kilograms? Give the amount as a plain number."
WARM_UP = 20
REQUEST_S = 30.0
DIRECT, PASS_THROUGH, FIXED = "direct", WORKER, f"baton/fixed:{WORKER}"
NO_CONDUCTOR = {  # both ways through the gateway work without one
    "BATON_CONDUCTOR_INPUT_USD_PER_MTOK": "0",
    "BATON_CONDUCTOR_OUTPUT_USD_PER_MTOK": "0",
}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to the worker."""

    name: str
    url: str
    model: str
    key: str | None


@dataclass(slots=True)
class Samples:
    """The samples of one way: per round, the median latency and the gateway's CPU per request; and refusals."""

    latency_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    errors: int = 0


@dataclass(frozen=True, slots=True)
class Figure:
    """The figures of one way. `ratio` and `added_ms` against the direct way, round by round."""

    way: str
    latency_ms: float
    added_ms: float
    ratio: float
    gateway_cpu_ms: float
    errors: int


def figures(samples: Mapping[str, Samples], direct: str = DIRECT) -> list[Figure]:
    """Medians over rounds; ratios and differences are taken within a round. Raises ValueError on uneven rounds."""
    base = samples[direct].latency_ms
    found = []
    for name, each in samples.items():
        pairs = list(zip(each.latency_ms, base, strict=True))
        found.append(
            Figure(
                name,
                statistics.median(each.latency_ms),
                statistics.median(mine - its for mine, its in pairs),
                statistics.median(mine / its for mine, its in pairs),
                statistics.median(each.cpu_ms),
                each.errors,
            )
        )
    return found


def cpu_ms(pid: int) -> float:
    """Return the user and system seconds of a process and its threads (proc(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


async def one_round(client: httpx.AsyncClient, way: Way, requests: int, concurrency: int) -> list[float]:
    """Send `n` requests; return the latencies in milliseconds of those not refused."""
    headers = {"authorization": f"Bearer {way.key}"} if way.key else {}
    body = {"model": way.model, "messages": [{"role": "user", "content": QUESTION}]}
    slots = asyncio.Semaphore(concurrency)
    took: list[float] = []

    async def one() -> None:
        async with slots:
            began_s = time.perf_counter()
            reply = await client.post(f"{way.url}/chat/completions", json=body, headers=headers)
            if reply.status_code == 200:
                took.append((time.perf_counter() - began_s) * 1000)

    await asyncio.gather(*(one() for _ in range(requests)))
    if not took:
        raise SystemExit(f"{way.name}: none of {requests} requests was answered with 200")
    return took


async def measure(ways: Sequence[Way], pid: int, options: argparse.Namespace) -> dict[str, Samples]:
    """Measure all rounds, after a warm-up of each way."""
    samples = {way.name: Samples() for way in ways}
    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        for way in ways:
            await one_round(client, way, WARM_UP, options.concurrency)
        for number in range(options.rounds):
            turn = number % len(ways)
            for way in (*ways[turn:], *ways[:turn]):
                before_ms = cpu_ms(pid)
                took = await one_round(client, way, options.requests, options.concurrency)
                samples[way.name].latency_ms.append(statistics.median(took))
                samples[way.name].cpu_ms.append((cpu_ms(pid) - before_ms) / options.requests)
                samples[way.name].errors += options.requests - len(took)
            print(f"  round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return samples


def run(options: argparse.Namespace) -> list[Figure]:
    """Start worker and gateway, measure, end both."""
    with temporary_directory() as directory:
        serve = ("policy.simulators.arena", "serve", "--speed", AT_ONCE_SPEED)
        with program("arena", directory, *serve) as arena:
            pool = directory / "pool.yaml"
            pool.write_text(output_of("policy.simulators.arena", "pool", "--base-url", arena.url))
            conductor = f"{arena.url}/w/{WORKER}/v1#{WORKER}"  # an address that answers and gets no calls
            with gateway(directory, conductor=conductor, pool=pool, settings=NO_CONDUCTOR) as served:
                samples = asyncio.run(measure(ways(served, arena.url), served.pid, options))
    return figures(samples)


def ways(served: Gateway, arena_url: str) -> list[Way]:
    """The three ways."""
    return [
        Way(DIRECT, f"{arena_url}/w/{WORKER}/v1", WORKER, None),
        Way(PASS_THROUGH, served.base_url, PASS_THROUGH, served.data_key),
        Way(FIXED, served.base_url, FIXED, served.data_key),
    ]


def markdown(found: Sequence[Figure]) -> str:
    """The figures as a table."""
    lines = ["| way | latency ms | added ms | × direct | gateway CPU ms | errors |", "|---|---:|---:|---:|---:|---:|"]
    for each in found:
        cpu = "" if each.way == DIRECT else f"{each.gateway_cpu_ms:.1f}"
        lines.append(
            f"| `{each.way}` | {each.latency_ms:.2f} | {each.added_ms:.2f} | {each.ratio:.1f} | {cpu} | {each.errors} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=20, help="per way and round")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures as JSON too")
    options = parser.parse_args(argv)
    if not (1 <= options.rounds <= 1000 and 1 <= options.requests <= 10_000 and 1 <= options.concurrency <= 256):
        parser.error("--rounds is 1 to 1000, --requests 1 to 10000, --concurrency 1 to 256")
    try:
        found = run(options)
    except KeyboardInterrupt:
        return 130
    load = os.getloadavg()[0]
    print(f"\n{markdown(found)}\n\n{options.rounds} rounds of {options.requests}, {options.concurrency} at a time; "
          f"load average {load:.1f} on {os.cpu_count()} processors.")  # fmt: skip
    if options.out:
        about = {name: getattr(options, name) for name in ("rounds", "requests", "concurrency")} | {"load": load}
        write_atomic(
            options.out, json.dumps({"about": about, "rows": [asdict(each) for each in found]}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
