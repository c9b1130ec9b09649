"""The stages of a job, top to bottom: select → train → gate → publish → shadow.

Each stage leaves a file in the job's directory that says it is done, written in one step, and is skipped when that
file is there; so a resumed job goes on where it was. Nothing is published before the gate has passed it, and publishing
is one transaction of the registry.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential

from gateway.adapters.host.urls import below
from gateway.adapters.postgres.policies.jobs import JobStore
from gateway.core.policies.jobs import Job, JobSpec, Stage, stored_spec
from gateway.core.policies.versions import State, Version
from gateway.errors import BatonError, Conflict, Unavailable
from policy import inputs
from policy.jobs import child, mirror
from policy.jobs.child import ProgressFile, Tail
from policy.jobs.mirror import Mirror
from policy.jobs.select import changed, write_json

EXIT_DONE, EXIT_REFUSED, EXIT_STOPPED = 0, 4, 143
OUTAGE_S_MAX = 600.0  # PostgreSQL may be away for so long between two stages
PAUSE_FIRST_S, PAUSE_MAX_S = 0.25, 15.0
CANARY_PERCENT = 1
INHERITED: Mapping[str, tuple[str, ...]] = {  # by the gate's environment: what its spec takes from the trainer's
    "replay": ("data", "prices", "workers"),
    "arena": ("staff",),
    "logged": ("url", "key_file", "pool_file", "pool"),
}
T = TypeVar("T")


class JobStopped(Exception):
    """The job has stopped on request."""


class Failed(Exception):
    """A stage could not be done; the message is for the person who looks at the job."""


class Refused(Exception):
    """The gate did not let the candidate through; the message names the reasons."""


class Releases(Protocol):
    """What a job needs of the registry of versions."""

    async def place(self, version: Version) -> Path: ...
    async def get(self, version: str) -> Version: ...
    async def live(self, name: str = ...) -> Version | None: ...
    async def publish(
        self, directory: Path, *, by: str, why: str = ..., gate: dict[str, Any] | None = ..., name: str = ...
    ) -> Version: ...
    async def move(self, version: str, state: State, *, by: str, why: str = ...) -> Version: ...
    async def canary(self, version: str, percent: int, *, by: str, why: str = ...) -> Version: ...


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where jobs are carried out. `python` runs the stages; it needs what training needs. `shipped` is the policy
    directory to start from, and to be better than, while nothing is live. `url`: where the directories of jobs are kept
    too, for workers without a common disk; empty: nowhere. `known`: arguments of a gate that asks real workers, as the
    gateway here has them, for those that a job does not give."""

    database_url: str
    directory: Path
    python: str
    shipped: Path | None = None
    tick_s: float = child.TICK_S
    stop_s: float = child.STOP_S
    url: str = ""
    known: Callable[[], Mapping[str, str]] = dict


class Pipeline:
    """One attempt at one job. `run` returns when it is done; JobStopped, Failed and Refused are its other ends."""

    def __init__(self, job: Job, store: JobStore, releases: Releases, shop: Workshop) -> None:
        self._job = job
        self._spec: JobSpec
        self._store = store
        self._releases = releases
        self._shop = shop
        self._place = shop.directory / job.id
        self._lock = -1
        self._mirror = Mirror(below(shop.url, job.id), self._place, job.attempts) if shop.url else None
        self._upload: asyncio.Task[bool] | None = None
        self.cancelled = False

    async def run(self) -> Version:
        """All stages, or those that are left. Raises Conflict when another worker has taken the job over; BadRequest on
        a job of an older release, whose row has arguments and no spec."""
        self._spec = stored_spec(self._job.spec)
        await asyncio.to_thread(self._place.mkdir, parents=True, exist_ok=True)
        async with child.held(self._place) as self._lock:
            if self._mirror is not None and (count := await self._beating(self._mirror.restore)):
                await self._say(f"{count} files of an attempt on another machine, from {self._shop.url}")
            try:
                selected = await self._select()
                await self._train(selected)
                report = await self._gate(selected)
            except BaseException:  # boundary: what was done is kept for the next attempt, the error goes on
                with suppress(BatonError, OSError):
                    await self._keep()
                raise
            await self._keep()
            version = await self._publish(report)
            return await self._shadow(version)

    # ---------------------------------------------------------------- stages

    async def _select(self) -> dict[str, Any]:
        await self._enter("select")
        marker = self._place / "selected.json"
        if not marker.exists():
            live = await self._steadily(lambda: self._releases.live(self._job.policy))
            parent = await self._releases.place(live) if live else self._shop.shipped
            train = {"init": str(parent), **self._spec.train} if parent else self._spec.train
            request = {"train": dict(train), "gate": dict(self._spec.gate), "work": str(self._place)}
            request |= {"database_url": self._shop.database_url, "known": self._known(train)}
            await self._program(self._policy("jobs", "select"), json.dumps(request).encode())
            facts = {"parent": str(parent) if parent else None, "live": live.id if live else None}
            selection = {**_object(self._place / "rows.json"), **facts, "place": str(self._place)}
            await asyncio.to_thread(write_json, marker, selection)
        selected = await self._here(_object(marker))
        other = await asyncio.to_thread(changed, selected["inputs"])
        if other is not None:
            raise Failed(f"{other} has changed since this job began; submit a new job to train on what it is now")
        return selected

    async def _here(self, selected: dict[str, Any]) -> dict[str, Any]:
        """What was selected, with the paths of this machine: where another one selected it, its inputs are fetched."""
        was = selected.get("place", str(self._place))
        if was == str(self._place):
            return selected
        parent = selected["parent"]
        moved = json.loads(json.dumps(selected).replace(json.dumps(was)[1:-1], json.dumps(str(self._place))[1:-1]))
        for path, url in moved.get("origins", {}).items():
            await self._beating(partial(inputs.bring, url, Path(path)))
        if parent:
            live = selected["live"] and await self._steadily(lambda: self._releases.get(selected["live"]))
            moved["parent"] = str(await self._releases.place(live) if live else self._shop.shipped)
            moved["train"] |= {"init": moved["parent"]} if moved["train"].get("init") == parent else {}
        return dict(moved)

    async def _train(self, selected: dict[str, Any]) -> None:
        await self._enter("train")
        if (self._place / "candidate" / "manifest.json").exists():
            return
        spec = await self._spec_file("train", selected["train"])
        places = {"--out": "candidate", "--work": "train", "--progress-file": "progress.jsonl"}
        where = [text for flag, name in places.items() for text in (flag, str(self._place / name))]
        await self._program(self._policy("train", "--spec", str(spec), *where, "--resume"))
        if not (self._place / "candidate" / "manifest.json").exists():
            raise Failed("the trainer ended well and left no policy directory; see the log")

    async def _gate(self, selected: dict[str, Any]) -> dict[str, Any]:
        await self._enter("gate")
        marker = self._place / "gate.json"
        if not marker.exists():
            rows = selected["train"].get("export")
            asks = selected.get("requests") is not None
            gate = {**(self._known(selected["train"]) if asks else {}), **self._spec.gate}
            inputs_local, _ = await asyncio.to_thread(inputs.local, gate, self._place / "inputs")
            spec = await self._spec_file(
                "gate",
                gate_spec(
                    replace(self._spec, train=selected["train"], gate=inputs_local), rows, selected.get("requests")
                ),
            )
            words = ["--spec", str(spec), "--candidate", str(self._place / "candidate"), "--out", str(marker)]
            live = ["--live", selected["parent"]] if selected["parent"] else []
            await self._program(self._policy("gate", *words, *live), good=(EXIT_DONE, EXIT_REFUSED))
        report = _object(marker)
        await self._steadily(lambda: self._store.beat(self._job, report=str(marker)))
        if report.get("passed") is not True:
            said = "is undecided" if report.get("verdict") == "undecided" else "refused it"
            raise Refused(f"the gate {said}: {_refusals(report)}")
        return report

    async def _publish(self, report: dict[str, Any]) -> Version:
        await self._enter("publish")
        by, why = f"job {self._job.id}", f"trained and passed the gate, asked for by {self._job.by}"
        version = await self._steadily(
            lambda: self._releases.publish(
                self._place / "candidate", by=by, why=why, gate=report, name=self._job.policy
            )
        )
        await self._steadily(lambda: self._store.beat(self._job, version=version.id))
        await self._say(f"published as {version.id}")
        return version

    async def _shadow(self, version: Version) -> Version:
        await self._enter("shadow")
        by = f"job {self._job.id}"
        try:
            if version.state == "candidate":
                version = await self._steadily(lambda: self._releases.move(version.id, "shadow", by=by))
            if self._spec.auto and version.state == "shadow":
                version = await self._steadily(lambda: self._releases.canary(version.id, CANARY_PERCENT, by=by))
        except Conflict as error:
            await self._say(f"{version.id} stays a {version.state}: {error.message}")
        await self._say(f"{version.id} is {version.state}")
        return version

    # ---------------------------------------------------------------- parts

    def _known(self, train: Mapping[str, Any]) -> dict[str, str]:
        """What is known here of what neither the job nor its trainer's spec gives."""
        return {name: value for name, value in self._shop.known().items() if name == "usd_max" or not train.get(name)}

    async def _spec_file(self, name: str, spec: dict[str, Any]) -> Path:
        path = self._place / f"{name}.spec.json"
        await asyncio.to_thread(write_json, path, spec)
        return path

    def _policy(self, *words: str) -> list[str]:
        return [self._shop.python, "-m", "policy", *words]

    async def _enter(self, stage: Stage) -> None:
        if await self._steadily(lambda: self._store.beat(self._job, stage=stage)):
            self.cancelled = True
            raise JobStopped

    async def _program(
        self, command: Sequence[str], stdin_data: bytes | None = None, good: Sequence[int] = (EXIT_DONE,)
    ) -> None:
        """Run a program and store its progress and log. Raises JobStopped, and Failed with its last words."""
        log = self._place / "log"
        tail, progress = Tail(log), ProgressFile(self._place / "progress.jsonl")

        async def tick() -> bool:
            try:
                await self._keep_beside()
                self.cancelled |= await self._store.beat(self._job, progress=progress.read())
                await self._store.write(self._job, tail.take())
                tail.taken()
            except Unavailable:
                pass  # the program needs no database; the next heartbeat carries what this one lost
            return self.cancelled

        status = await child.run(
            command,
            log,
            lock=self._lock,
            tick=tick,
            stdin_data=stdin_data,
            tick_s=self._shop.tick_s,
            stop_s=self._shop.stop_s,
        )
        if status in good:
            return
        if self.cancelled and status in (EXIT_STOPPED, -signal.SIGTERM, -signal.SIGKILL):
            raise JobStopped
        words = child.last_words(log, tail.start)
        raise Failed(f"{_program_of(command)} {_end_of(status)}{f': {words}' if words else ''} (log: {log})")

    async def _keep_beside(self) -> None:
        """Upload a new checkpoint while the program goes on; a failure is a line in the log, and tried again."""
        if self._mirror is None or (self._upload is not None and not self._upload.done()):
            return
        if self._upload is not None and isinstance(error := self._upload.exception(), BatonError | OSError):
            await self._store.write(self._job, [f"the checkpoint is kept here alone for now: {mirror.why(error)}"])
        self._upload = asyncio.create_task(asyncio.to_thread(self._mirror.keep))

    async def _keep(self) -> None:
        """Upload all that is not there yet. Raises Unavailable."""
        if self._upload is not None:
            await asyncio.wait({self._upload})
        if self._mirror is not None:
            await self._beating(self._mirror.keep)

    async def _beating(self, call: Callable[[], T]) -> T:
        """Run what blocks for long in a thread, with a heartbeat meanwhile: without one the job would be taken over."""
        doing = asyncio.create_task(asyncio.to_thread(call))
        while not (await asyncio.wait({doing}, timeout=self._shop.tick_s))[0]:
            with suppress(Unavailable):
                await self._store.beat(self._job)
        return doing.result()

    async def _say(self, line: str) -> None:
        await self._steadily(lambda: self._store.write(self._job, [line]))

    async def _steadily(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call through an outage of PostgreSQL. Raises Unavailable if the outage lasts OUTAGE_S_MAX."""
        retrying = AsyncRetrying(
            retry=retry_if_exception(_is_outage),
            wait=wait_exponential(multiplier=PAUSE_FIRST_S, max=PAUSE_MAX_S),
            stop=stop_after_delay(OUTAGE_S_MAX),
            reraise=True,
        )

        async def attempt() -> T:  # tenacity awaits only what it knows to be a coroutine function
            return await call()

        return await retrying(attempt)


def _is_outage(error: BaseException) -> bool:
    return isinstance(error, Unavailable) and error.code == "store_unavailable"


def gate_spec(job: JobSpec, rows: str | None, requests: str | None = None) -> dict[str, Any]:
    """The gate's spec of a job. What the job leaves open follows the trainer's spec: a candidate that was trained on
    recorded questions is judged on them, one that was trained on traffic on the held-out `requests`, any other in the
    arena. `rows`: the file of logged rows, for triage."""
    env = "replay" if job.train["env"] == "replay" else "logged" if requests else "arena"
    home: dict[str, Any] = {"env": env} | ({"rows": rows} if rows else {})
    home |= {"requests": requests} if requests else {}
    for name in INHERITED[env]:
        home |= {name: job.train[name]} if job.train.get(name) else {}
    return {**home, **job.gate}


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Failed(f"{path} cannot be read ({error}); submit the job again") from None
    if not isinstance(value, dict):
        raise Failed(f"{path} is no JSON object; submit the job again")
    return value


def _refusals(report: dict[str, Any]) -> str:
    refusals = report.get("refusals") or []
    names = [f"{one.get('name')}: {one.get('said')}" if isinstance(one, dict) else str(one) for one in refusals]
    return "; ".join(names) or "the gate gave no reason"


def _program_of(command: Sequence[str]) -> str:
    return " ".join(command[command.index("policy") :][:2]) if "policy" in command else command[0]


def _end_of(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
    return f"was ended by {name}{' (out of memory?)' if status == -signal.SIGKILL else ''}"


async def carry_out(job: Job, store: JobStore, releases: Releases, shop: Workshop) -> None:
    """One attempt, and its end in the store. Cancelling gives the job back: the next worker goes on from the
    checkpoint. Raises Unavailable while PostgreSQL is away; the missed heartbeat frees the job later."""
    pipeline = Pipeline(job, store, releases, shop)
    try:
        await _attempt(pipeline, job, store)
    except asyncio.CancelledError:
        with suppress(Unavailable, Conflict):  # the missed heartbeat frees the job, or another worker has it
            await store.give_back(job)
        raise
    except Conflict as error:
        if error.code != "job_overtaken":
            await store.end(job, "failed", error.message)


async def _attempt(pipeline: Pipeline, job: Job, store: JobStore) -> None:
    try:
        await pipeline.run()
    except JobStopped:
        await store.write(job, ["stopped as asked, at its checkpoint; `baton train resume` goes on"])
        await store.end(job, "cancelled")
    except Refused as refusal:
        await store.write(job, [str(refusal)])
        await store.end(job, "refused", str(refusal))
    except Failed as failure:
        await store.end(job, "failed", str(failure))
    except Unavailable as error:
        if error.code == "store_unavailable":
            raise
        await store.end(job, "failed", error.message)
    except Conflict:
        raise
    except BatonError as error:
        await store.end(job, "failed", error.message)
    except OSError as error:
        await store.end(
            job, "failed", f"{error.filename or 'the disk'}: {error.strerror or error}; fix it, then resume"
        )
    else:
        await store.end(job, "done")
