"""How soon experience shows: a worker that silently worsens, and one that is new. `python -m bench.simulated.drift`

Each run has a pool of its own on one gateway (real PostgreSQL, workers over HTTP): `old` and `spare` have the same
skill, right 0.9 and 0.75 of the time; two others have another skill. Requests come one after the other, two of three on
that skill, each judged before the next. In turn:

1. `--warm` outcomes on the skill.
2. `old` falls to 0.4. Its name, version, tags and price stay, and nothing is told to anybody. `--fallen` outcomes.
3. `new`, right 0.97 of the time, joins the pool with no history. `--joined` outcomes.

Counted are the outcomes *on the skill*: others say nothing about these workers, nor change what is shown of them. This
is a simulator (docs/arena.md). A dollar counts, a second does not (BATON_RIGHT_SECONDS): the time that a busy
machine takes would be noise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml
from aiohttp import web

from bench.database import Database
from bench.simulated.drift_figures import Phase, Trial, drawn, markdown
from gateway.core.pool.workers import PoolFile
from gateway.files import write_atomic
from policy.recipes.stack import Gateway, gateway, temporary_directory
from policy.recipes.traffic import REQUEST_S
from policy.simulators import HANDLES
from policy.simulators.arena.families.tasks import Task, grade, make_family_task
from policy.simulators.arena.server import ArenaSpeaker
from policy.simulators.arena.workers import SELF_WORKER, VOTE_TOOL, ArenaWorker, worker_entry
from policy.simulators.server import WorkerServer

POLICIES = ("baton/rule", "baton/conductor")
EXPLORING = 0.1  # the setting's default
SKILL, OTHER = ("convert", "mixed"), ("deadline", "gap")  # families: units, and dates
BEFORE, FALLEN, SPARE, NEW = 0.90, 0.40, 0.75, 0.97
ROLES: Mapping[str, Mapping[str, float]] = {
    "old": {"units": BEFORE},
    "spare": {"units": SPARE},
    "new": {"units": NEW},
    "first other": {"dates": 0.95},
    "second other": {"dates": 0.85},
}
SETTINGS = {"BATON_RIGHT_SECONDS": "1000000000", "BATON_EXPERIENCE_TIMEOUT_S": "5", "BATON_REDIS_TIMEOUT_S": "5"}
TRIES, PAUSE_S = 20, 0.5  # for a request that gets 503 from a busy machine
SPEED = 20.0  # workers answer in milliseconds


@dataclass(frozen=True, slots=True)
class Plan:
    """One run: a policy on a pool of its own, with a unique `name`."""

    name: str
    policy: str
    seed: int
    staff: Mapping[str, ArenaWorker]  # by role


class Changing(ArenaSpeaker):
    """Workers that can change their skills while they serve."""

    def become(self, worker: ArenaWorker) -> None:
        """Replace the worker of this name from its next call on. Raises KeyError on an unknown name."""
        self._pool[self._pool[worker.name].name] = worker


def planned(seeds: int) -> list[Plan]:
    """Return a plan for every policy and seed. A pool file needs unique handles, so no two share one."""
    runs = [(policy, seed) for seed in range(seeds) for policy in POLICIES]
    handles = Random("drift handles").sample(HANDLES, len(runs) * len(ROLES))
    trials = []
    for number, (policy, seed) in enumerate(runs):
        own = handles[number * len(ROLES) : (number + 1) * len(ROLES)]
        staff = {role: _worker(handle, role) for handle, role in zip(own, ROLES, strict=True)}
        trials.append(Plan(f"run{number}", policy, seed, staff))
    return trials


def _worker(handle: str, role: str) -> ArenaWorker:
    return ArenaWorker(handle, handle, ROLES[role], "2", 0.02, 0.0003)


def pool_file(plans: Sequence[Plan], base_url: str) -> str:
    """Return a pool file with two pools a run: `NAME` without the new worker, and `NAME-joined` with it."""
    builtins = (VOTE_TOOL, SELF_WORKER)
    staff = [worker for plan in plans for worker in plan.staff.values()]
    pools = {}
    for plan in plans:
        everybody = [worker.name for worker in (*plan.staff.values(), *builtins)]
        pools[f"{plan.name}-joined"] = everybody
        pools[plan.name] = [name for name in everybody if name != plan.staff["new"].name]
    entries = [worker_entry(worker, base_url) for worker in (*staff, *builtins)]
    document = {"workers": entries, "pools": pools, "default": plans[0].name}
    PoolFile.model_validate(document)
    return yaml.safe_dump(document, sort_keys=False)


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """Serve an application in this event loop on a free port of loopback; yield its address."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Asking:
    """The requests of one run, one after the other."""

    def __init__(self, url: str, http: httpx.AsyncClient, key: str, plan: Plan) -> None:
        self._url, self._http, self._plan = url, http, plan
        self._headers = {"authorization": f"Bearer {key}"}
        self._asked = 0

    @classmethod
    async def open(cls, served: Gateway, http: httpx.AsyncClient, plan: Plan) -> Asking:
        """Make a key for the two pools of the run."""
        headers = {"authorization": f"Bearer {served.admin_key}"}
        body = {"name": plan.name, "pools": [plan.name, f"{plan.name}-joined"]}
        made = await http.post(f"{served.admin_url}/admin/keys", json=body, headers=headers)
        made.raise_for_status()
        return cls(served.base_url, http, made.json()["key"], plan)

    async def until(self, outcomes: int, pool: str) -> list[str]:
        """Send requests until `outcomes` of them were on the skill (two of three are); return their rollouts."""
        rollouts: list[str] = []
        while len(rollouts) < outcomes:
            on_skill = self._asked % 3 != 2
            rollout = await self._one(self._task(SKILL if on_skill else OTHER), pool)
            rollouts += [rollout] if on_skill else []
        return rollouts

    def _task(self, families: Sequence[str]) -> Task:
        self._asked += 1
        return make_family_task(families[self._asked % 2], self._plan.seed * 100_000 + self._asked)

    async def _one(self, task: Task, pool: str) -> str:
        body = {"model": self._plan.policy, "messages": [{"role": "user", "content": task.text}]}
        headers = self._headers | {"x-baton-pool": pool}
        reply = await self._posted("chat/completions", body, headers)
        rollout = reply.headers["x-baton-rollout-id"]
        right = grade(task, reply.json()["choices"][0]["message"]["content"] or "")
        judged = {"rollout_id": rollout, "value": right, "source": "bench"}
        await self._posted("outcomes", judged, self._headers)
        return rollout

    async def _posted(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        for _ in range(TRIES):
            reply = await self._http.post(f"{self._url}/{path}", json=body, headers=headers)
            if reply.status_code != 503:
                break
            await asyncio.sleep(PAUSE_S)
        reply.raise_for_status()
        return reply


async def run_one(
    served: Gateway, http: httpx.AsyncClient, plan: Plan, speaker: Changing, lengths: Sequence[int]
) -> dict[Phase, list[str]]:
    """All three phases of one run: rollouts on the skill, in order."""
    asking, (warm, fallen, joined) = await Asking.open(served, http, plan), lengths
    rollouts: dict[Phase, list[str]] = {"warm": await asking.until(warm, plan.name)}
    speaker.become(replace(plan.staff["old"], skills={"units": FALLEN}))
    rollouts["fallen"] = await asking.until(fallen, plan.name)
    rollouts["joined"] = await asking.until(joined, f"{plan.name}-joined")
    print(f"  {plan.policy} seed {plan.seed}: done", file=sys.stderr, flush=True)
    return rollouts


async def run_all(directory: Path, plans: Sequence[Plan], explore: float, options: argparse.Namespace) -> list[Trial]:
    """Carry out all runs in parallel on one gateway."""
    speaker = Changing(tuple(worker for plan in plans for worker in plan.staff.values()), seed=0)
    async with serving(WorkerServer(speaker, SPEED).app()) as address:
        pool = directory / "pool.yaml"
        pool.write_text(pool_file(plans, address), encoding="utf-8")
        settings = SETTINGS | {"BATON_EXPLORE_SHARE": str(explore)} | dict(options.set)
        started = gateway(directory, conductor=options.conductor, pool=pool, settings=settings)
        served = await asyncio.to_thread(started.__enter__)
        try:
            lengths = (options.warm, options.fallen, options.joined)
            async with httpx.AsyncClient(timeout=REQUEST_S) as http:
                ran = await asyncio.gather(*(run_one(served, http, plan, speaker, lengths) for plan in plans))
            return await asyncio.to_thread(_trials, served, plans, ran, explore)
        finally:
            await asyncio.to_thread(started.__exit__, None, None, None)


def _trials(
    served: Gateway, plans: Sequence[Plan], ran: Sequence[Mapping[Phase, Sequence[str]]], explore: float
) -> list[Trial]:
    """Return the roles that worked on each rollout."""
    database = Database(served.database_url)
    called = database.workers([rollout for phases in ran for rollouts in phases.values() for rollout in rollouts])
    trials = []
    for plan, phases in zip(plans, ran, strict=True):
        roles = {worker.name: role for role, worker in plan.staff.items()}
        by_phase = {
            phase: [frozenset(roles[name] for name in called.get(rollout, ())) for rollout in rollouts]
            for phase, rollouts in phases.items()
        }
        trials.append(Trial(plan.policy, explore, plan.seed, by_phase))
    return trials


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; end the program if a value is out of range."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated.drift",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs a policy, 1 to 7")
    parser.add_argument("--warm", type=int, default=80, help="outcomes on the skill before the fall")
    parser.add_argument("--fallen", type=int, default=70, help="after it")
    parser.add_argument("--joined", type=int, default=60, help="after the newcomer")
    parser.add_argument("--explore", type=float, nargs="+", default=[0.0, EXPLORING], help="exploring shares to try")
    parser.add_argument("--conductor", default="embedded", help="as `baton serve --conductor`")
    parser.add_argument("--set", action="append", default=[], type=_setting, metavar="BATON_X=V", help="a setting")
    parser.add_argument("--out", type=Path, help="write FILE.json and FILE.svg too")
    options = parser.parse_args(argv)
    lengths = (options.warm, options.fallen, options.joined)
    if not 1 <= options.seeds <= 7 or not all(20 <= each <= 10_000 for each in lengths):
        parser.error("--seeds is 1 to 7; --warm, --fallen and --joined are 20 to 10000")
    return options


def _setting(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given or not name.startswith("BATON_"):
        raise argparse.ArgumentTypeError(f"{text}: write BATON_NAME=VALUE")
    return name, value


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 130 after Ctrl-C."""
    options, trials, began_s = arguments(argv), [], time.monotonic()
    try:
        for explore in options.explore:
            with temporary_directory() as directory:
                trials += asyncio.run(run_all(directory, planned(options.seeds), explore, options))
            if options.out is not None:
                _write(options.out, trials, dict(options.set))
    except KeyboardInterrupt:
        return 130
    print(markdown(trials), flush=True)
    print(f"\n{time.monotonic() - began_s:.0f} s. Simulated workers (docs/arena.md): no figure speaks of a real model.")
    return 0


def _write(out: Path, trials: Sequence[Trial], settings: Mapping[str, str]) -> None:
    report = {"settings": settings, "trials": [_plain(trial) for trial in trials]}
    write_atomic(out.with_suffix(".json"), json.dumps(report, indent=1) + "\n")
    write_atomic(out.with_suffix(".svg"), drawn(trials))


def _plain(trial: Trial) -> dict[str, Any]:
    return asdict(trial) | {"by_phase": {p: [sorted(who) for who in called] for p, called in trial.by_phase.items()}}


if __name__ == "__main__":
    sys.exit(main())
