"""`baton doctor`: look at everything that a gateway stands on, and say what is wrong and what to do.

Nothing is started and nothing is changed. Servers that the settings name are asked; of a gateway on the data directory
the embedded ones are, too. Exit status: 0 all well or only warnings, 1 something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import httpx

from gateway import __version__
from gateway.adapters.host import poolfile
from gateway.adapters.journal import segments
from gateway.adapters.postgres import migrate
from gateway.adapters.redis import server as redis_server
from gateway.cli.process import check
from gateway.cli.process.datadir import FACTS
from gateway.cli.process.services import starts_conductor
from gateway.config import settings as config
from gateway.config.settings import Settings
from gateway.core.pool.ways import DIRECT
from gateway.core.pool.workers import PoolFile
from gateway.errors import BatonError
from gateway.service.ports.pools import Sight
from gateway.wiring import reach

State = Literal["ok", "warn", "bad"]
MARKS: Mapping[State, str] = {"ok": "ok  ", "warn": "--  ", "bad": "BAD "}
TIMEOUT_S = 3.0
SKEW_S_MAX = 2.0
REDIS_OLDEST = (6, 2)
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `fix`: what to do; empty where nothing is to be done."""

    name: str
    state: State
    what: str
    fix: str = ""


Findings = Iterator[Finding]


def run(options: argparse.Namespace) -> int:
    """Print a line for each finding; 1 where one of them is bad."""
    findings = list(examine(options.pool, options.conductor))
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        width = max(len(finding.name) for finding in findings)
        for one in findings:
            print(f"{MARKS[one.state]}{one.name:<{width}}  {one.what}{f'; {one.fix}' if one.fix else ''}")
    return int(any(finding.state == "bad" for finding in findings))


def examine(pool: Path | None, conductor: str | None) -> Findings:
    """Look at everything. The arguments are those of `baton serve`."""
    yield Finding("baton", "ok", f"{__version__} on Python {platform.python_version()}")
    directory = config.data_dir()
    facts = _facts(directory)
    if facts and (environ := _environment_of(facts.get("pid"))):
        config.adopt(environ)
    try:
        settings = config.load(pool=pool, conductor=conductor)
    except BatonError as error:
        yield Finding("settings", "bad", error.message)
        return
    if facts and pool is None and conductor is None:
        settings = settings.model_copy(update={**_served(facts), "data_dir": directory})
        yield Finding("settings", "ok", f"those of the gateway that serves {facts['base_url']}")
    else:
        yield Finding("settings", "ok", f"ports {settings.port} and {settings.admin_port}")
    looks: dict[str, Callable[[], Findings]] = {
        "data": partial(_data, settings),
        "journal": partial(_journal, settings),
        "gateway": partial(_gateway, settings, facts),
        "requests": partial(_requests, facts),
        "postgres": partial(_postgres, settings.database_url or facts.get("database_url")),
        "redis": partial(_redis, settings.redis_url or facts.get("redis_url")),
        "pool": partial(_pool, settings),
        "worker": partial(_workers, settings, facts),
        "conductor": partial(_conductor, settings),
        "jobs": partial(_jobs, settings),
    }
    for name, look in looks.items():
        try:
            yield from look()
        except BatonError as error:
            yield Finding(name, "bad", error.message)


def _facts(directory: Path) -> Mapping[str, Any]:
    """The facts of the gateway that serves from there; read without making the directory."""
    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _environment_of(pid: object) -> Mapping[str, str]:
    """The environment that a gateway of this user began with; empty where the system does not tell it."""
    try:
        process = Path(f"/proc/{int(str(pid))}")
        words, raw = (process / "cmdline").read_bytes().split(b"\0"), (process / "environ").read_bytes()
    except (OSError, ValueError):
        return {}
    if b"serve" not in words:  # another process has its number now
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in raw.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def _served(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the gateway that serves: its pool and its conductor, whatever this shell's environment says."""
    served = {"pool": None if facts.get("simulated") else Path(facts["pool_file"])} if "pool_file" in facts else {}
    return served | {name: facts[name] for name in ("conductor",) if name in facts}


def _data(settings: Settings) -> Findings:
    directory = settings.data_dir.resolve()
    place = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        yield Finding("data", "bad", f"{place} cannot be written", "name a directory of yours (BATON_DATA_DIR)")
        return
    # Others may pass through: an embedded PostgreSQL that root starts runs as another user.
    if directory.exists() and directory.stat().st_mode & 0o066:
        yield Finding("data", "warn", f"{directory} is open to other users", f"chmod go-rw {directory}")
    free = shutil.disk_usage(place).free
    what = f"{directory}, {free / GIB:.1f} GiB free"
    if free < settings.disk_free_bytes_min:
        fix = "make room: below BATON_DISK_FREE_BYTES_MIN the gateway is not ready"
        yield Finding("disk", "bad", what, fix)
    elif free < settings.spool_bytes_max:
        yield Finding("disk", "warn", what, "the journal may grow to BATON_SPOOL_BYTES_MAX; make room or lower it")
    else:
        yield Finding("disk", "ok", what)


def _journal(settings: Settings) -> Findings:
    """Segments with damage, of this start and of earlier ones."""
    if damaged := segments.damaged(settings.spool_path):
        what = f"{len(damaged)} damaged segments are kept, such as {damaged[0]}"
        fix = "`baton journal recover` stores what is whole in them, and says what is lost"
        yield Finding("journal", "bad", what, fix)
    else:
        yield Finding("journal", "ok", "no segment is damaged")


def _gateway(settings: Settings, facts: Mapping[str, Any]) -> Findings:
    if not facts:
        yield Finding("gateway", "ok", f"none serves from {settings.data_dir}")
        return
    try:
        reply = httpx.get(f"{facts['admin_url']}/readyz", timeout=TIMEOUT_S, trust_env=False)
        state: Mapping[str, Any] = reply.json()
    except (httpx.HTTPError, ValueError) as error:
        fix = f"it was killed, or hangs: look for process {facts.get('pid')}"
        yield Finding("gateway", "bad", f"{facts['admin_url']} does not answer ({type(error).__name__})", fix)
        return
    away = [name for name, part in state["parts"].items() if part != "ok"]
    what = f"{facts['base_url']} is {state['status']}" + (f", without {', '.join(away)}" if away else "")
    yield Finding("gateway", "ok" if reply.is_success and not away else "warn" if reply.is_success else "bad", what)


def _requests(facts: Mapping[str, Any]) -> Findings:
    """How the last hour's requests went, and each worker whose calls fail."""
    if not facts.get("admin_key"):
        return
    try:
        overview, workers = (_asked(facts, path) for path in ("/admin/overview", "/admin/workers"))
    except (httpx.HTTPError, ValueError) as error:
        yield Finding("requests", "warn", f"the gateway does not say how they went ({type(error).__name__})")
        return
    totals = overview["totals"]
    state: State = "ok" if not totals["errors"] else "warn" if totals["errors"] < totals["requests"] else "bad"
    yield Finding("requests", state, f"{totals['requests']} in the last hour, {totals['errors']} failed")
    for row in overview["by_worker"]:
        if row["errors"]:
            codes = sorted({each["error"] for each in workers["errors"] if each["worker"] == row["worker"]})
            what = f"{row['worker']}: {row['errors']} of {row['calls']} calls failed ({', '.join(codes)})"
            fix = f"ask it alone: a request with `model: {row['worker']}` says what it answers"
            yield Finding("worker", "bad" if row["errors"] == row["calls"] else "warn", what, fix)


def _asked(facts: Mapping[str, Any], path: str) -> Any:
    """A report of the admin API. Raises httpx.HTTPError, ValueError."""
    headers = {"authorization": f"Bearer {facts['admin_key']}"}
    reply = httpx.get(f"{facts['admin_url']}{path}", headers=headers, timeout=TIMEOUT_S, trust_env=False)
    return reply.raise_for_status().json()


def _postgres(url: str | None) -> Findings:
    if url is None:
        yield Finding("postgres", "ok", "embedded; `baton serve` starts it")
        return
    facts = migrate.examine(url, TIMEOUT_S)
    yield _clock("postgres", facts.skew_s)
    what = f"PostgreSQL {facts.version} as role {facts.role}"
    if facts.revision != facts.head and not facts.may_create:
        yield Finding("postgres", "bad", f"{what} may not make the tables of this version", migrate.GRANTS)
        return
    if facts.revision is not None and facts.revision > facts.head:
        fix = "install that version, or restore the backup from before its migration"
        yield Finding("postgres", "bad", f"{what} has schema {facts.revision} of a newer version than this", fix)
        return
    behind = "" if facts.revision == facts.head else f", schema {facts.revision or 'empty'}; the next start migrates it"
    yield Finding("postgres", "ok", f"{what}{behind or f', schema {facts.head}'}")
    if not facts.has_vector:
        yield Finding("postgres", "warn", "no pgvector: experience follows the task type only", "install pgvector")


def _redis(url: str | None) -> Findings:
    if url is None:
        yield Finding("redis", "ok", "embedded; `baton serve` starts it")
        return
    facts = asyncio.run(redis_server.examine(url, TIMEOUT_S))
    yield _clock("redis", facts.skew_s)
    version = tuple(int(part) for part in facts.version.split(".")[:2] if part.isdigit())
    if version < REDIS_OLDEST:
        yield Finding("redis", "bad", f"Redis {facts.version} is too old", "6.2 or newer is needed")
    elif facts.eviction not in (None, "noeviction"):
        what = f"Redis {facts.version} may drop balances (maxmemory-policy {facts.eviction})"
        yield Finding("redis", "bad", what, "CONFIG SET maxmemory-policy noeviction, and in its configuration")
    elif facts.bytes_max and facts.used_bytes > 0.8 * facts.bytes_max:
        what = f"Redis {facts.version} uses {facts.used_bytes} of {facts.bytes_max} bytes"
        yield Finding("redis", "warn", what, "raise maxmemory: when it is full, no money can be held")
    else:
        yield Finding("redis", "ok", f"Redis {facts.version}, {facts.eviction or 'unknown eviction'}")


def _clock(server: str, skew_s: float) -> Finding:
    if abs(skew_s) <= SKEW_S_MAX:
        return Finding("clock", "ok", f"as {server}'s, within {max(0.001, abs(skew_s)):.3f} s")
    fix = "set both by NTP: windows of budgets and the ids of records follow the clock"
    return Finding("clock", "warn", f"{server}'s is {skew_s:+.1f} s off", fix)


def _loaded(settings: Settings) -> PoolFile | None:
    return poolfile.load(settings.pool, config.environment()) if settings.pool else None


def _pool(settings: Settings) -> Findings:
    pool = _loaded(settings)
    yield Finding("pool", "ok", check.pool_line(settings, pool))
    unpriced = [worker.name for worker in pool.workers if worker.price is None] if pool else []
    if unpriced:
        fix = "`baton pools prices FILE --fill` prints those of vendors"
        yield Finding("prices", "warn", f"no price: {', '.join(unpriced)}, so no request is planned on them", fix)
    elif pool:
        yield Finding("prices", "ok", "each worker has its price")
    for offer in check.tool_offers(pool, config.environment()):
        fix = "see docs/mcp.md; it is tried again while the gateway runs" if offer.problems else ""
        yield Finding("mcp", "warn" if offer.problems else "ok", offer.line, fix)


def _workers(settings: Settings, facts: Mapping[str, Any]) -> Findings:
    """Whether each worker is there, and by which way it is reached: as the gateway sees it, if one serves."""
    if (pool := _loaded(settings)) is None:
        return
    if facts.get("admin_key"):
        rows = _asked(facts, "/admin/workers").get("data", ())
        sights = [Sight(row["name"], **row["reach"]) for row in rows if row.get("reach")]
    else:
        sights = [*reach.seen(pool, config.environment())]
    by_name = dict(reach.ways(pool, config.environment()))
    for sight in sights:
        way = by_name.get(sight.worker, "")
        what = f"{sight.worker}: {sight.what}" + (f" ({way})" if way not in ("", DIRECT) else "")
        yield Finding("worker", sight.state, what, sight.fix)


def _conductor(settings: Settings) -> Findings:
    pool = _loaded(settings)
    plans = starts_conductor(settings, pool)
    if plans:
        yield Finding("conductor", "ok", check.conductor_line(settings, config.environment()))
    yield Finding("planner", "ok", check.planner_line(settings, pool, plans))


def _jobs(settings: Settings) -> Findings:
    if not settings.jobs_worker:
        yield Finding("jobs", "ok", "no worker here (BATON_JOBS_WORKER)")
    elif find_spec("torch") is None:
        fix = "`scripts/install train`, or `baton worker` where torch is"
        yield Finding("jobs", "warn", "no torch: replies are graded here, and no job trains", fix)
    else:
        yield Finding("jobs", "ok", "torch is installed; the worker trains")
