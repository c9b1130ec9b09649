"""Hot swap under load: `python -m bench.engines.swap --engine vllm|embedded [--kind adapter|full] [--out FILE]`.

Starts the engine (a real vLLM from `.venv-vllm`, or the embedded server) with the shipped conductor, or takes one that
runs (`--url`, and `--base` where it serves other weights). Rollouts of two plans each stream all the while, pinned to
the version that the pointer named when they began. Then: swaps (load, prove, flip the pointer; unload what left the
window), rollbacks (flip back), every kind of bad version, and a kill -9 with everything loaded again. Prints a table;
status 1 where a rollout failed, ran on two versions, or a bad version was not refused by name.

`--kind full` on vLLM replaces the weights in place; there a rollout is one plan, as only one version is held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.engines.policies import SPOILS, manifest_of, spoil, write_adapter, write_full
from bench.serving import percentile
from gateway.adapters.engines.embedded import EmbeddedEngine
from gateway.adapters.engines.http import EngineApi
from gateway.adapters.engines.reload import ReloadConductor, VllmReload
from gateway.adapters.engines.vllm import VllmLora
from gateway.adapters.upstream.client import Breaker
from gateway.adapters.upstream.conductor.client import HttpConductor
from gateway.errors import BatonError, VersionRefused
from gateway.files import write_atomic
from gateway.service.ports.policies import PolicyEngine
from gateway.service.ports.request import Conductor, ConductorCall, ConductorEnd, Sampling
from policy.recipes.engines import EngineProcess
from policy.recipes.stack import ROOT

SHIPPED = ROOT / "policy" / "shipped" / "arena-3"
SEEDS = 6  # different directories; a version is a directory under a unique name
KEPT = 3  # versions loaded at once: now, the one before, and one that its last requests leave
PLANS = 2  # per rollout
PATIENCE_S = 300.0
PLAN_S = 300.0  # a busy machine must not fail a swap
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 100, "maxLength": 200}},
    "required": ["text"],
    "additionalProperties": False,
}


@dataclass(slots=True)
class Pointer:
    """Which version new rollouts get. Flipping it is one assignment."""

    version: str | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One that ended: the version it was given, those that its plans say decoded them, and when."""

    given: str | None
    echoed: tuple[str, ...]
    began_s: float
    ended_s: float
    error: str | None = None

    @property
    def whole(self) -> bool:
        """Whether it went well, on exactly one version: the one it was given."""
        return self.error is None and len(set(self.echoed)) == 1 and self.given in (None, self.echoed[0])


@dataclass(slots=True)
class Figures:
    """What was measured. Times in seconds."""

    load_s: list[float] = field(default_factory=list)
    flip_s: list[float] = field(default_factory=list)
    answered_s: list[float] = field(default_factory=list)  # from the swap's beginning to the new version's first plan
    rollback_s: list[float] = field(default_factory=list)  # from the command to the old version's first plan
    refused: dict[str, str] = field(default_factory=dict)  # how it was spoiled → reason, or what went wrong
    restart_s: float | None = None
    restored_s: float | None = None
    rollouts: list[Rollout] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)

    @property
    def failed(self) -> list[Rollout]:
        """Rollouts that broke the promise."""
        return [rollout for rollout in self.rollouts if not rollout.whole]

    @property
    def good(self) -> bool:
        """Return whether every promise holds."""
        refused = all(self.refused.get(how) == reason for how, (_, reason) in SPOILS.items())
        slow = max([*self.rollback_s, 0.0]) > 10 or max([*self.flip_s, 0.0]) > 1
        return bool(self.rollouts) and not self.failed and refused and not slow


class Trial:
    """An engine, its conductor, versions to load, and traffic."""

    def __init__(self, engine: PolicyEngine, conductor: Conductor, make: Callable[[int], Path], pinned: bool) -> None:
        self.engine = engine
        self.pointer = Pointer()
        self.figures = Figures()
        self.directories: dict[str, Path] = {}
        self._conductor = conductor
        self._make = make
        self._pinned = pinned  # rollouts name their version
        self._made: list[Path] = []
        self._running: Counter[str | None] = Counter()  # rollouts by their version
        self._name = f"trial-{secrets.token_hex(3)}"  # unique, since an engine may outlive a trial
        self._first: dict[str, float] = {}  # when the first plan of a version began to arrive
        self._flipped_s = 0.0
        self._asked: list[asyncio.Task[Rollout]] = []
        self._stop = False

    # ------------------------------------------------------------ traffic

    @asynccontextmanager
    async def traffic(self, streams: int) -> AsyncIterator[None]:
        """Keep this number of rollouts in flight."""
        self._stop = False
        running = [asyncio.create_task(self._stream(number)) for number in range(streams)]
        try:
            yield
        finally:
            self._stop = True
            await asyncio.gather(*running)
            self.figures.rollouts += await asyncio.gather(*self._asked)
            self._asked.clear()

    async def _stream(self, number: int) -> None:
        index = 0
        while not self._stop:
            self.figures.rollouts.append(await self.rollout(1000 * number + index))
            index += 1

    async def rollout(self, seed: int) -> Rollout:
        """Plan one round after the other, all on the version that the pointer names now."""
        given, began_s = (self.pointer.version if self._pinned else None), time.monotonic()
        echoed: list[str] = []
        self._running[given] += 1
        try:
            for _ in range(PLANS if self._pinned else 1):
                echoed.append(await self._plan(given, seed, began_s >= self._flipped_s))
        except BatonError as error:
            return Rollout(given, tuple(echoed), began_s, time.monotonic(), str(error))
        finally:
            self._running[given] -= 1
        return Rollout(given, tuple(echoed), began_s, time.monotonic())

    async def _plan(self, given: str | None, seed: int, counts: bool) -> str:
        """The version that decoded a plan. `counts`: its rollout began after the last flip."""
        messages = [{"role": "user", "content": f"What is {seed} times {seed % 7}? Explain every step."}]
        call = ConductorCall(messages, SCHEMA, Sampling(temperature=1.0, tokens_max=256, seed=seed), PLAN_S, given)
        async for item in self._conductor.decode(call):
            if isinstance(item, ConductorEnd):
                self.figures.versions.add(item.model)
                if counts:
                    self._first.setdefault(item.model, time.monotonic())
                return item.model
            if given and counts:
                self._first.setdefault(given, time.monotonic())
        raise AssertionError("a stream without an end")

    # ------------------------------------------------------------ what is measured

    def directory(self, index: int) -> Path:
        """Return one of a few directories; make it on its first use."""
        while len(self._made) <= min(index, SEEDS - 1):
            self._made.append(self._make(len(self._made) + 1))
        return self._made[index % len(self._made)]

    async def swap(self, version: str, directory: Path, keep: int = KEPT) -> None:
        """Load and prove, flip the pointer, wait for the first plan; then unload what left the window."""
        began_s = time.monotonic()
        await self.engine.load(version, directory)
        self.figures.load_s.append(time.monotonic() - began_s)
        self.directories[version] = directory
        await self._flip(version)
        self.figures.answered_s.append(self._first[version] - began_s)
        for old in [one for one in list(self.directories)[:-keep] if self._pinned and not self._running[one]]:
            await self.engine.unload(old)  # a stream would end well; a rollout between two plans would not
            del self.directories[old]

    async def rollback(self, version: str) -> None:
        """Back to a version that is loaded; or, where one is held, loaded again."""
        began_s = time.monotonic()
        if not self._pinned:
            await self.engine.load(version, self.directories[version])
        await self._flip(version)
        self.figures.rollback_s.append(self._first[version] - began_s)

    async def _flip(self, version: str) -> None:
        self._first.pop(version, None)
        began_s = self._flipped_s = time.monotonic()
        self.pointer.version = version
        self.figures.flip_s.append(time.monotonic() - began_s)
        self._asked.append(
            asyncio.create_task(self.rollout(len(self.figures.flip_s)))
        )  # a request right after the flip
        while version not in self._first:
            if time.monotonic() - began_s > PATIENCE_S:
                raise SystemExit(f"{version} answered nothing within {PATIENCE_S:g} s")
            await asyncio.sleep(0.001)

    async def refuse(self, how: str) -> None:
        """Offer a spoiled version; record the reason of its refusal, or that there was none."""
        directory = self._make(99)
        spoil(directory, how)
        before = await self.engine.loaded()
        try:
            await self.engine.load(f"{self._name}@bad", directory)
            self.figures.refused[how] = "LOADED"
        except VersionRefused as error:
            self.figures.refused[how] = error.reason if await self.engine.loaded() == before else "CHANGED THE ENGINE"
        except BatonError as error:
            self.figures.refused[how] = f"{type(error).__name__}: {error}"

    async def run(self, swaps: int, rollbacks: int, streams: int, bad: Sequence[str]) -> None:
        """Carry out all parts but the kill, under traffic all the time."""
        first = self.pointer.version = f"{self._name}@1"
        await self.engine.load(first, self.directory(0))
        self.directories[first] = self.directory(0)
        await self.rollout(0)  # the first of a process compiles
        async with self.traffic(streams):
            each = max(1, swaps // max(1, rollbacks))
            for index in range(swaps):
                before = self.pointer.version
                await self.swap(f"{self._name}@{index + 2}", self.directory(index + 1))
                if before and (index + 1) % each == 0 and len(self.figures.rollback_s) < rollbacks:
                    await self.rollback(before)
            for how in bad:
                await self.refuse(how)

    async def restart(self, process: EngineProcess) -> None:
        """Kill the engine with SIGKILL, start it, and load all versions again."""
        process.kill()
        began_s = time.monotonic()
        self.figures.restart_s = process.start()
        wanted = dict(list(self.directories.items())[-1:]) if not self._pinned else self.directories
        lost = await self.engine.loaded() & set(wanted)
        for version, directory in wanted.items():
            await self.engine.load(version, directory)
        self.figures.restored_s = time.monotonic() - began_s - self.figures.restart_s
        for version in wanted:
            drift = await self.engine.probe(version, manifest_of(wanted[version])["probe"])
            if lost or drift > 0.001:
                raise SystemExit(f"after the restart: {lost or drift} for {version}")
        self.pointer.version = next(reversed(wanted))
        self.figures.rollouts.append(await self.rollout(1))


# ---------------------------------------------------------------- engines


@asynccontextmanager
async def trial(process: EngineProcess, kind: str, work: Path) -> AsyncIterator[Trial]:
    """A trial on a running engine; `work` gets the versions."""
    api = EngineApi(process.url, key=process.key if process.kind == "embedded" else None, timeout_s=PLAN_S)
    conductor = HttpConductor(
        f"{process.url}/v1", process.name, timeout_s=PLAN_S, breaker=Breaker(failures_max=1_000_000)
    )
    engine: PolicyEngine
    asked: Conductor = conductor
    if process.kind == "embedded":
        engine = EmbeddedEngine(api)
    elif kind == "adapter":
        engine = VllmLora(api, base=process.base, versions_max=process.versions_max)
    else:
        engine = reload = VllmReload(api, process.name, process.base)
        asked = ReloadConductor(conductor, reload)
    write = write_adapter if kind == "adapter" else write_full
    made = 0

    def make(seed: int) -> Path:
        nonlocal made
        made += 1
        return write(process.base, work / f"{kind}-{seed}-{made}", seed)

    pinned = process.kind == "embedded" or kind == "adapter"
    one = Trial(engine, asked, make, pinned)
    try:
        yield one
    finally:
        for version in one.directories if pinned else ():
            with suppress(BatonError):
                await engine.unload(version)
        if not pinned:  # leave the engine with its first weights
            with suppress(BatonError):
                await engine.load(f"base-{secrets.token_hex(3)}", process.base)
        await conductor.close()
        await api.close()


def table(figures: Figures) -> str:
    """Markdown."""

    def line(name: str, values: Sequence[float]) -> str:
        shown = [percentile(values, 0.5), percentile(values, 0.99), max(values)] if values else []
        return f"| {name} | {len(values)} | " + " | ".join(f"{1000 * value:.1f}" for value in shown) + " |"

    lines = ["| ms | n | p50 | p99 | max |", "|---|---:|---:|---:|---:|"]
    lines += [line("load and prove", figures.load_s), line("flip the pointer", figures.flip_s)]
    lines += [line("swap, to the new version's first token", figures.answered_s)]
    lines += [line("rollback, to the old version's first token", figures.rollback_s)]
    took = [rollout.ended_s - rollout.began_s for rollout in figures.rollouts]
    lines += [line("a rollout meanwhile", took), ""]
    versions = f"{len(figures.versions)} versions"
    lines.append(f"{len(figures.rollouts)} rollouts on {versions}: {len(figures.failed)} failed or on two versions.")
    lines += [f"- refused, `{how}`: {reason}" for how, reason in figures.refused.items()]
    if figures.restart_s is not None and figures.restored_s is not None:
        lines.append(f"- kill -9: up after {figures.restart_s:.1f} s, versions back {figures.restored_s:.2f} s later")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.engines.swap", description="Hot swap under load.")
    parser.add_argument("--engine", choices=("vllm", "embedded"), default="embedded")
    parser.add_argument("--kind", choices=("adapter", "full"), default="adapter")
    parser.add_argument("--url", help="an engine that runs, without /v1; it is not killed")
    parser.add_argument("--admin-key-file", type=Path, help="of a running embedded server")
    parser.add_argument("--base", type=Path, default=SHIPPED, help="the weights the engine serves")
    parser.add_argument("--name", default="conductor", help="the name it serves them under")
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--rollbacks", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4, help="rollouts at the same time")
    parser.add_argument("--out", type=Path, help="the figures as JSON")
    return parser.parse_args(arguments)


async def measure(options: argparse.Namespace, process: EngineProcess, work: Path) -> Figures:
    """Carry out the whole trial; kill only an engine that it started itself."""
    async with trial(process, options.kind, work) as one:
        await one.run(options.swaps, options.rollbacks, options.streams, tuple(SPOILS))
        if options.url is None:
            await one.restart(process)
    return one.figures


def as_json(figures: Figures) -> dict[str, Any]:
    """Return the figures as JSON."""
    plain = ("load_s", "flip_s", "answered_s", "rollback_s", "refused", "restart_s", "restored_s")
    counts = {"rollouts": len(figures.rollouts), "failed": len(figures.failed), "versions": len(figures.versions)}
    return {name: getattr(figures, name) for name in plain} | counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trial; return 0 if every promise holds."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="baton-swap-") as directory:
        process = EngineProcess(options.engine, options.base.resolve(), Path(directory), options.name)
        if options.url:
            process.url = options.url.rstrip("/")
            process.key = options.admin_key_file.read_text().strip() if options.admin_key_file else process.key
        else:
            print(f"{options.engine} started in {process.start():.1f} s", flush=True)
        try:
            figures = asyncio.run(measure(options, process, Path(directory)))
        finally:
            process.stop()
    print(table(figures))
    for rollout in figures.failed[:5]:
        print(f"FAILED: {rollout}", file=sys.stderr)
    if options.out:
        write_atomic(options.out, json.dumps(as_json(figures), indent=2) + "\n")
    return 0 if figures.good else 1


if __name__ == "__main__":
    sys.exit(main())
