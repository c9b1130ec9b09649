"""What a request costs the gateway in processor time: several checkouts side by side in one run.

    git worktree add /tmp/before main~5
    python -m bench.cost --arm before=/tmp/before --arm after=. [--rounds 12] [--requests 300] [--concurrency 32]
    python -m bench.cost … --stream          # a stream of 23 chunks
    python -m bench.cost … --plan            # a scripted plan: three steps at a time, and one that merges
    python -m bench.cost … --gap-ms 15       # the worker streams, one chunk in so many milliseconds

One gateway for each arm, by the interpreter in its checkout's .venv, with its own PostgreSQL and Redis, and one mock
worker that answers at once. Rounds are interleaved, the order turning by one each round. After each round the bench
waits until the log is in PostgreSQL, so that storing it is in the figures. Processor time is user + system of all
threads (/proc/PID/stat): of the process that serves, and of it with its child processes without PostgreSQL and Redis,
which have a column of their own. Figures are microseconds a request, medians over rounds; the ratio to the first arm is
taken within each round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from gateway.files import write_atomic
from policy.recipes.stack import Gateway, gateway, program, temporary_directory
from tests.upstreams.server import Reply, Request, event, event_stream, serve

QUESTION = "How many grams are there in 51 kilograms? Give the amount as a plain number."
WORKER = "mock"
WARM_UP = 200
REQUEST_S, SHIPPED_S = 60.0, 120.0
DATA_SERVERS = ("postgres", "redis-server")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POOL = """\
workers:
  - {{name: mock, handle: atlas, kind: openai, model: gap-{gap_ms}, url: "{url}/v1", output_tokens_max: 512,
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}
pools: {{main: [mock]}}
default: main
"""
SETTINGS = {"BATON_JOBS_WORKER": "false", "BATON_EXPLORE_SHARE": "0", "BATON_REDIS_TIMEOUT_S": "0.2"}
PLAN = {
    "steps": [
        *({"worker": "atlas", "task": f"Work it out, way {n}.", "see": []} for n in (1, 2, 3)),
        {"worker": "atlas", "task": None, "see": [0, 1, 2]},
    ]
}
PLANNED = {  # a plan costs nothing, and the conductor serves one version
    "BATON_CONDUCTOR_INPUT_USD_PER_MTOK": "0",
    "BATON_CONDUCTOR_OUTPUT_USD_PER_MTOK": "0",
    "BATON_DEFAULT_POLICY": "conductor",
}
CHUNKS = 23
TEXT = "There are 51000 grams in 51 kilograms. "
USAGE = {"prompt_tokens": 20, "completion_tokens": CHUNKS, "total_tokens": 20 + CHUNKS}


# ---------------------------------------------------------------- the mock worker


def _completion() -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": TEXT * 3}, "finish_reason": "stop"}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}
    return json.dumps(body).encode()


def _chunks() -> list[bytes]:
    base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": {"content": TEXT[:5]}, "finish_reason": None} for _ in range(CHUNKS - 1)
    ]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    events = [event(base | {"choices": [choice]}) for choice in choices]
    return [*events, event(base | {"choices": [], "usage": USAGE}), event("[DONE]")]


GAP = re.compile(rb'"model":"gap-(\d+)"')
COMPLETION, EVENTS_OF_A_STREAM = Reply(_completion()), _chunks()


def answer(request: Request) -> Reply:
    """Answer any chat request: at once, or chunk by chunk with the pauses that its model names."""
    if b'"stream":true' not in request.content:
        return COMPLETION
    gap = GAP.search(request.content)
    if gap is None or gap[1] == b"0":
        return event_stream([b"".join(EVENTS_OF_A_STREAM)])
    return event_stream(EVENTS_OF_A_STREAM, int(gap[1]) / 1000)


# ---------------------------------------------------------------- processor time


@dataclass(frozen=True, slots=True)
class Used:
    """Processor seconds since the start: of the serving process, of it with its children, of PostgreSQL and Redis."""

    serving_s: float
    tree_s: float
    data_s: float

    def since(self, before: Used) -> Used:
        """The difference."""
        return Used(self.serving_s - before.serving_s, self.tree_s - before.tree_s, self.data_s - before.data_s)


def used(pid: int) -> Used:
    """Processor time of a gateway's processes, those that have ended and were waited for included."""
    tree_s, data_s = 0.0, 0.0
    for each, name in processes_of(pid).items():
        own_s = stat[2] if (stat := _stat(each)) is not None else 0.0
        if name.startswith(DATA_SERVERS):
            data_s += own_s
        else:
            tree_s += own_s
    serving = _stat(pid)
    return Used(serving[2] if serving is not None else 0.0, tree_s, data_s)


def processes_of(pid: int) -> dict[int, str]:
    """Process → name, of `pid` and all below it."""
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (stat := _stat(int(path.name))) is not None:
            parents[int(path.name)] = stat
    processes = {}
    for each, (name, _, _) in parents.items():
        lineage, above = [each], each
        while above in parents and above != pid:
            above = parents[above][1]
            lineage.append(above)
        if pid in lineage:
            processes[each] = name
    return processes


def _stat(pid: int) -> tuple[str, int, float] | None:
    """Name, parent and processor seconds of a process (proc(5)); None if it has ended."""
    try:
        head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields = tail.split()
    return head.partition("(")[2], int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S


# ---------------------------------------------------------------- load


@dataclass(slots=True)
class Samples:
    """Of one arm, one value a round: microseconds a request, latency, requests a second; and refusals in all."""

    serving_us: list[float] = field(default_factory=list)
    tree_us: list[float] = field(default_factory=list)
    data_us: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    per_s: list[float] = field(default_factory=list)
    refused: int = 0


async def load(client: aiohttp.ClientSession, served: Gateway, options: argparse.Namespace, n: int) -> list[float]:
    """Send `n` requests; the latencies in milliseconds of those that were answered."""
    model = "baton" if options.plan else WORKER
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "stream": options.stream}
    headers = {"authorization": f"Bearer {served.data_key}"}
    left, took = iter(range(n)), list[float]()

    async def caller() -> None:
        for _ in left:
            began_s = time.perf_counter()
            async with client.post(f"{served.base_url}/chat/completions", json=body, headers=headers) as reply:
                text = await reply.read()
            if reply.status == 200 and (not options.stream or text.rstrip().endswith(b"[DONE]")):
                took.append((time.perf_counter() - began_s) * 1000)
            elif not _said:
                _said.append(text.decode()[:200])
                print(f"  refused: {_said[0]}", file=sys.stderr, flush=True)

    await asyncio.gather(*(caller() for _ in range(options.concurrency)))
    return took


_said: list[str] = []


async def shipped(client: aiohttp.ClientSession, served: Gateway) -> None:
    """Wait until every journal record is in PostgreSQL."""
    until_s = time.monotonic() + SHIPPED_S
    while time.monotonic() < until_s:
        async with client.get(f"{served.admin_url}/metrics") as reply:
            text = await reply.text()
        if total(text, "baton_log_records_stored_total") >= total(text, "baton_log_records_total"):
            return
        await asyncio.sleep(0.2)
    raise SystemExit("the log does not reach PostgreSQL")


def total(exposition: str, name: str) -> float:
    """The sum of a counter over the processes of a gateway."""
    lines = (line.rsplit(" ", 1) for line in exposition.splitlines())
    return sum(float(line[1]) for line in lines if line[0].partition("{")[0] == name)


async def measure(arms: Mapping[str, Gateway], options: argparse.Namespace) -> dict[str, Samples]:
    """All rounds, after a warm-up of each arm."""
    samples = {name: Samples() for name in arms}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(REQUEST_S)) as client:
        for served in arms.values():
            await load(client, served, options, WARM_UP)
            await shipped(client, served)
        names = list(arms)
        for number in range(options.rounds):
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                await one_round(client, arms[name], options, samples[name])
            print(f"  round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return samples


async def one_round(
    client: aiohttp.ClientSession, served: Gateway, options: argparse.Namespace, samples: Samples
) -> None:
    """One round of one arm."""
    before, began_s = used(served.pid), time.perf_counter()
    took = await load(client, served, options, options.requests)
    seconds = time.perf_counter() - began_s
    await shipped(client, served)
    spent, n = used(served.pid).since(before), options.requests
    samples.serving_us.append(spent.serving_s * 1e6 / n)
    samples.tree_us.append(spent.tree_s * 1e6 / n)
    samples.data_us.append(spent.data_s * 1e6 / n)
    samples.per_s.append(len(took) / seconds)
    samples.p50_ms.append(statistics.median(took or [0.0]))
    samples.p99_ms.append(sorted(took or [0.0])[int(0.99 * len(took))])
    samples.refused += n - len(took)


# ---------------------------------------------------------------- one run


def run(options: argparse.Namespace) -> dict[str, Samples]:
    """Start the worker and a gateway for each arm, measure, end all."""
    with ExitStack() as held:
        directory = held.enter_context(temporary_directory())
        worker = held.enter_context(program("mock", directory, "bench.cost", "worker"))
        pool = directory / "pool.yaml"
        pool.write_text(POOL.format(url=worker.url, gap_ms=options.gap_ms))
        conductor = scripted(held, directory) if options.plan else "none"
        arms = {}
        for name, checkout in options.arm:
            place = directory / name
            place.mkdir()
            settings = SETTINGS | {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"}
            settings |= PLANNED if options.plan else {}
            python = own if (own := checkout.resolve() / ".venv/bin/python").exists() else sys.executable
            served = gateway(place, conductor=conductor, pool=pool, settings=settings, python=python)
            arms[name] = held.enter_context(served)
        return asyncio.run(measure(arms, options))


def scripted(held: ExitStack, directory: Path) -> str:
    """Start a conductor that always gives PLAN; the setting that names it."""
    conductor = held.enter_context(program("conductor", directory, "bench.scripted_conductor"))
    script = json.dumps({"plan": PLAN}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{conductor.url}/script", script, method="PUT")).close()  # noqa: S310
    return f"{conductor.url}/v1#scripted"


def markdown(samples: Mapping[str, Samples]) -> str:
    """The figures as a table; the ratio is of the whole tree's processor time, to the first arm's."""
    head = ("arm", "serving µs", "with children µs", "ratio", "PostgreSQL, Redis µs", "p50 / p99 ms", "requests/s")
    lines = [f"| {' | '.join(head)} | refused |", "|---|" + "---:|" * len(head)]
    first = next(iter(samples.values()))
    median = statistics.median
    for name, each in samples.items():
        ratio = median(mine / its for mine, its in zip(each.tree_us, first.tree_us, strict=True))
        lines.append(
            f"| {name} | {median(each.serving_us):.0f} | {median(each.tree_us):.0f} | {ratio:.3f} "
            f"| {median(each.data_us):.0f} | {median(each.p50_ms):.1f} / {median(each.p99_ms):.1f} "
            f"| {median(each.per_s):.0f} | {each.refused} |"
        )
    return "\n".join(lines)


def arm(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    return name, Path(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", type=arm, action="append", required=True, help="NAME=CHECKOUT; several")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=300, help="per arm and round")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--stream", action="store_true", help=f"a stream of {CHUNKS} chunks")
    parser.add_argument("--plan", action="store_true", help="plans of three steps at a time and one that merges")
    parser.add_argument("--gap-ms", type=int, default=0, help="the worker's pause before each chunk but the first")
    parser.add_argument("--out", type=Path, help="write the samples as JSON too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 130 after Ctrl-C. `worker`: serve as the mock worker."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["worker"]:
        asyncio.run(serve(answer, int(argv[2]), Path(argv[4])))
        return 0
    options = _parser().parse_args(argv)
    try:
        samples = run(options)
    except KeyboardInterrupt:
        return 130
    about: dict[str, Any] = {
        name: getattr(options, name) for name in ("rounds", "requests", "concurrency", "stream", "plan", "gap_ms")
    }
    about["load"] = round(os.getloadavg()[0], 1)
    print(f"\n{markdown(samples)}\n\n{about}, {os.cpu_count()} processors")
    if options.out:
        rows = {name: asdict(each) for name, each in samples.items()}
        write_atomic(options.out, json.dumps({"about": about, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
