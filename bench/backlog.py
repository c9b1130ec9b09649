"""How fast a backlog of the journal reaches PostgreSQL, and what that costs: several checkouts in one run.

    git worktree add /tmp/before main~5
    python -m bench.backlog --arm before=/tmp/before --arm after=. [--rollouts 20000] [--rounds 2]

For each arm and round a gateway of its own, with its own PostgreSQL and Redis, answers a few requests and is stopped.
Copies of what it wrote to its journal, under identifiers and questions of their own, become the backlog, and the
gateway is started again. The bench counts what is stored, from the first batch to the last. Processor time is user +
system (/proc/PID/stat): of the shipper's process, of the gateway's other processes, and of PostgreSQL and Redis.
Figures are microseconds a rollout, medians over rounds.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path

import aiohttp
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import OperationalError

from bench.cost import POOL, SETTINGS, arm, load, processes_of, shipped, used
from gateway.adapters.journal import segments
from gateway.adapters.postgres.database import driver_url
from gateway.core.log.events import random_hex, uuid7
from gateway.files import write_atomic
from policy.recipes.stack import START_S, Gateway, gateway, process, program, temporary_directory

TEMPLATES = 40
SEGMENT_BYTES = 16 * 2**20
SHIPPED_S = 900.0
PROGRAM = b"gateway.adapters.journal.process"
_NAME = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32,64}")
_STORED = text("SELECT count(*) FROM rollouts")
_AMOUNT = b"51 kilograms"  # of bench.cost's question; each copy asks for another


@dataclass(slots=True)
class Samples:
    """Of one arm, one value a round: seconds, rollouts a second, and microseconds a rollout."""

    seconds: list[float] = field(default_factory=list)
    per_s: list[float] = field(default_factory=list)
    shipper_us: list[float] = field(default_factory=list)
    gateway_us: list[float] = field(default_factory=list)
    data_us: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Moment:
    """What was stored and used at one moment. Times in seconds."""

    at_s: float
    stored: int
    shipper_s: float
    others_s: float
    data_s: float


# ---------------------------------------------------------------- the backlog


def templates(journal: Path) -> list[list[bytes]]:
    """The records of each request in a journal, oldest first."""
    payloads: list[bytes] = []
    for number in segments.numbers(journal):
        path = segments.segment_path(journal, number)
        payloads += segments.read(path, 0, path.stat().st_size, records_max=10**6, bytes_max=2**40).payloads
    requests: dict[str, list[bytes]] = {}
    for payload in payloads:
        content = json.loads(payload)["payload"]
        requests.setdefault(content.get("rollout_id") or content["id"], []).append(payload)
    return list(requests.values())


def copies(requests: Sequence[Sequence[bytes]], n: int) -> Iterator[bytes]:
    """Records of `n` requests. What names one request (and not several of `requests`) gets another name."""
    named = [set(_NAME.findall(b"".join(records))) for records in requests]
    own = [names.difference(*(others for others in named if others is not names)) for names in named]
    for number, (records, names) in zip(range(n), cycle(zip(requests, own, strict=True)), strict=False):
        new = {name: _new(name) for name in names}
        for record in records:
            renamed = _NAME.sub(lambda match, new=new: new.get(match[0], match[0]), record)  # type: ignore[misc]
            yield renamed.replace(_AMOUNT, b"%d kilograms" % number)


def _new(name: bytes) -> bytes:
    if b"-" in name:
        return uuid7(time.time_ns() // 1_000_000).encode()
    return (random_hex() * 2)[: len(name)].encode()


def write(journal: Path, records: Iterator[bytes]) -> None:
    """Append segments to a journal that nobody uses."""
    number, blob, size = max(segments.numbers(journal), default=0), list[bytes](), 0
    for record in records:
        blob.append(segments.encode(record))
        size += len(blob[-1])
        if size >= SEGMENT_BYTES:
            number += 1
            segments.segment_path(journal, number).write_bytes(b"".join(blob))
            blob, size = [], 0
    if blob:
        segments.segment_path(journal, number + 1).write_bytes(b"".join(blob))


# ---------------------------------------------------------------- measuring


async def _answer(served: Gateway) -> None:
    options = argparse.Namespace(plan=False, stream=False, concurrency=1)
    async with aiohttp.ClientSession() as client:
        await load(client, served, options, TEMPLATES)
        await shipped(client, served)


def _moment(pid: int, database: Connection) -> _Moment:
    stored = database.scalar(_STORED) or 0
    spent = used(pid)
    shipper_s = sum(used(each).serving_s for each in processes_of(pid) if _runs(each))
    return _Moment(time.monotonic(), stored, shipper_s, spent.tree_s - shipper_s, spent.data_s)


def _runs(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[1:3] == [b"-m", PROGRAM]


def _drain(pid: int, database: Connection, rollouts: int, samples: Samples) -> None:
    first = last = _moment(pid, database)
    while last.stored < rollouts:
        if last.at_s - first.at_s > SHIPPED_S:
            raise SystemExit("the backlog does not reach PostgreSQL")
        time.sleep(0.1)
        last = _moment(pid, database)
        if first.stored <= TEMPLATES:
            first = last
    n, seconds = last.stored - first.stored, last.at_s - first.at_s
    samples.seconds.append(seconds)
    samples.per_s.append(n / seconds)
    samples.shipper_us.append((last.shipper_s - first.shipper_s) * 1e6 / n)
    samples.gateway_us.append((last.others_s - first.others_s) * 1e6 / n)
    samples.data_us.append((last.data_s - first.data_s) * 1e6 / n)


@contextmanager
def _connected(database_url: str) -> Iterator[Connection]:
    """A connection to a server that may be starting."""
    engine = create_engine(driver_url(database_url), isolation_level="AUTOCOMMIT")
    until_s = time.monotonic() + START_S
    while True:
        try:
            with engine.connect() as connection:
                connection.execute(_STORED)
            break
        except OperationalError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def one_round(checkout: Path, pool: Path, place: Path, rollouts: int, samples: Samples) -> None:
    """Make a backlog, and let it be shipped."""
    place.mkdir()
    settings = SETTINGS | {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"}
    with gateway(place, conductor="none", pool=pool, settings=settings) as served:
        asyncio.run(_answer(served))
        database_url = served.database_url
    journal = place / "data" / "spool"
    requests = templates(journal)
    write(journal, copies(requests, rollouts))
    command = [sys.executable, "-m", "gateway", "serve", "--data-dir", str(place / "data"), "--port", "0"]
    command += ["--admin-port", "0", "--conductor", "none", "--pool", str(pool)]
    with process(command, place / "second.log", settings) as running, _connected(database_url) as database:
        _drain(running.pid, database, rollouts + len(requests), samples)
    a_rollout = sum(map(len, requests)) / len(requests)
    size = sum(len(record) for records in requests for record in records) / len(requests)
    print(f"  {place.name}: {samples.per_s[-1]:.0f}/s, {a_rollout:.1f} records of {size:.0f} bytes", file=sys.stderr)


def run(options: argparse.Namespace) -> dict[str, Samples]:
    """All rounds, the arms in turn."""
    samples = {name: Samples() for name, _ in options.arm}
    with ExitStack() as held:
        directory = held.enter_context(temporary_directory())
        worker = held.enter_context(program("mock", directory, "bench.cost", "worker"))
        pool = directory / "pool.yaml"
        pool.write_text(POOL.format(url=worker.url, gap_ms=0))
        for number in range(options.rounds):
            for name, checkout in options.arm[:: -1 if number % 2 else 1]:
                one_round(checkout, pool, directory / f"{name}{number}", options.rollouts, samples[name])
    return samples


def markdown(samples: Mapping[str, Samples]) -> str:
    """The figures as a table."""
    lines = ["| arm | rollouts/s | shipper µs | gateway µs | PostgreSQL, Redis µs |", "|---|" + "---:|" * 4]
    for name, each in samples.items():
        figures = (each.per_s, each.shipper_us, each.gateway_us, each.data_us)
        lines.append(f"| {name} | {' | '.join(f'{statistics.median(values):.0f}' for values in figures)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.backlog", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", type=arm, action="append", required=True, help="NAME=CHECKOUT; several")
    parser.add_argument("--rollouts", type=int, default=20_000, help="of a backlog")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the samples as JSON too")
    options = parser.parse_args(argv)
    try:
        samples = run(options)
    except KeyboardInterrupt:
        return 130
    about = {"rollouts": options.rollouts, "rounds": options.rounds, "load": round(os.getloadavg()[0], 1)}
    print(f"\n{markdown(samples)}\n\n{about}, {os.cpu_count()} processors")
    if options.out:
        rows = {name: asdict(each) for name, each in samples.items()}
        write_atomic(options.out, json.dumps({"about": about, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
