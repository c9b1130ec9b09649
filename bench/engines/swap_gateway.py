"""Hot swap through the whole gateway: `python -m bench.engines.swap_gateway --engine vllm|embedded [--out FILE]`.

Starts `baton serve` (PostgreSQL, Redis, the arena's simulated workers) on the embedded server or on a real vLLM that
holds LoRA adapters. Chat requests run all the while. Each swap goes through the registry: published, shadowed (loaded
and proven by every engine), the canary of all requests, promoted; each rollback brings the version before back. Then
the log is asked which versions each rollout's rounds were planned by. Status 1 where a request failed, fell back
because of a swap, or a rollout was planned by two versions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.engines.policies import write_adapter
from bench.engines.swap import SHIPPED
from bench.serving import percentile
from gateway.files import write_atomic
from policy.recipes.engines import EngineProcess
from policy.recipes.stack import Gateway, gateway, temporary_directory
from policy.simulators.arena.families.tasks import make_task

REQUEST_S = 120.0
PATIENCE_S = 120.0
DIRECTORIES = 6
VERSIONS_MAX = 32  # what a gateway retires it lets go of minutes later; here all of them come within minutes
SCALE = 0.003  # adapters this small plan as their base does: what fails then is the swap
SWAP_FAILURES = {"conductor_refused", "conductor_down", "conductor_slow"}
SETTINGS = {
    "BATON_WATCH_REQUESTS_MIN": "1000000",  # rollbacks come from us alone
    "BATON_CONDUCTOR_OUTCOMES_MIN": "0",
    "BATON_POLICY_POLL_S": "0.2",
    "BATON_JOBS_WORKER": "false",
    "BATON_CONDUCTOR_TIMEOUT_S": "60",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: status, the version in its header, why a router planned instead (None: it did not)."""

    status: int
    version: str
    fallback: str | None
    rollout: str
    began_s: float
    ended_s: float


@dataclass(slots=True)
class Figures:
    """Seconds of each action, and every request."""

    actions_s: dict[str, list[float]] = field(default_factory=dict)
    served_s: list[float] = field(default_factory=list)  # from `promote` to the end of the first request on it
    rolled_back_s: list[float] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)  # rollouts planned by more than one version

    @property
    def failed(self) -> list[Seen]:
        """Requests without an answer, or not planned by any version because of a swap."""
        return [one for one in self.seen if one.status != 200 or one.fallback in SWAP_FAILURES]


class Trial:
    """A running gateway under traffic."""

    def __init__(self, running: Gateway, client: httpx.AsyncClient) -> None:
        self.figures = Figures()
        self._running = running
        self._client = client
        self._stop = False

    async def traffic(self, number: int) -> None:
        """Requests one after the other until `stop`."""
        headers = {"authorization": f"Bearer {self._running.data_key}"}
        index = 0
        while not self._stop:
            text = make_task(1_000_000 * number + index).text
            body = {"model": "baton/conductor", "messages": [{"role": "user", "content": text}]}
            began_s = time.monotonic()
            reply = await self._client.post(f"{self._running.base_url}/chat/completions", json=body, headers=headers)
            fields, index = reply.headers, index + 1
            version = fields.get("x-baton-policy", "").partition("(")[2].rstrip(")")
            fallback, rollout = fields.get("x-baton-fallback"), fields.get("x-baton-rollout-id", "")
            self.figures.seen.append(Seen(reply.status_code, version, fallback, rollout, began_s, time.monotonic()))

    def stop(self) -> None:
        """Let every stream end after its request."""
        self._stop = True

    async def admin(self, method: str, path: str, body: Any = None) -> Any:
        """The admin API. Raises SystemExit with what it said."""
        headers = {"authorization": f"Bearer {self._running.admin_key}"}
        reply = await self._client.request(method, f"{self._running.admin_url}{path}", json=body, headers=headers)
        if not reply.is_success:
            raise SystemExit(f"{method} {path}: {reply.status_code} {reply.text[:500]}")
        return reply.json()

    async def act(self, action: str, path: str, body: Any = None) -> Any:
        """One timed move of a version."""
        began_s = time.monotonic()
        reply = await self.admin("POST", f"/admin/policies{path}", body or {})
        self.figures.actions_s.setdefault(action, []).append(time.monotonic() - began_s)
        return reply

    async def swap(self, directory: Path) -> str:
        """A new version, from its directory to its first answer."""
        reply = await self.act("publish", "", {"directory": str(directory), "force": True, "why": "bench"})
        version = str(reply["version"])
        await self.act("shadow: load and prove", f"/{version}/shadow")
        await self.act("canary of 100 %", f"/{version}/canary", {"percent": 100})
        began_s = time.monotonic()
        await self.act("promote", f"/{version}/promote")
        self.figures.served_s.append(await self._served(version, began_s) - began_s)
        return version

    async def rollback(self, version: str) -> None:
        """Back to `version`; ends once a request that began after the command was answered by it."""
        began_s = time.monotonic()
        await self.act("rollback", "/conductor/rollback", {"why": "bench"})
        self.figures.rolled_back_s.append(await self._served(version, began_s) - began_s)

    async def _served(self, version: str, since_s: float) -> float:
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            for one in self.figures.seen[-50:]:
                if one.version == version and one.began_s >= since_s:
                    return one.ended_s
            await asyncio.sleep(0.01)
        raise SystemExit(f"no request was planned by {version} within {PATIENCE_S:g} s")

    async def ask_the_log(self) -> None:
        """Which versions planned each rollout."""
        for one in self.figures.seen:
            tree = await self.admin("GET", f"/admin/rollouts/{one.rollout}")
            versions = {planned["policy_version"] for planned in tree["rounds"] if planned["policy_version"]}
            if len(versions) > 1:
                self.figures.mixed.append(one.rollout)

    async def run(self, directories: Sequence[Path], swaps: int, rollbacks: int, streams: int) -> None:
        """Everything, under traffic."""
        running = [asyncio.create_task(self.traffic(number)) for number in range(streams)]
        each = max(1, swaps // max(1, rollbacks))
        try:
            live = await self.swap(directories[0])
            for index in range(1, swaps + 1):
                before, live = live, await self.swap(directories[index % len(directories)])
                if index % each == 0 and len(self.figures.rolled_back_s) < rollbacks:
                    await self.rollback(before)
                    live = before
        finally:
            self.stop()
            await asyncio.gather(*running)
        await asyncio.sleep(2.0)  # what is in the journal reaches the log
        await self.ask_the_log()


def table(figures: Figures) -> str:
    """Markdown."""
    rows = {
        **figures.actions_s,
        "promote, to the end of the first request on it": figures.served_s,
        "rollback, to the end of the first request on the old one": figures.rolled_back_s,
        "a request meanwhile": [one.ended_s - one.began_s for one in figures.seen],
    }
    lines = ["| ms | n | p50 | p99 | max |", "|---|---:|---:|---:|---:|"]
    for name, values in rows.items():
        shown = [percentile(values, 0.5), percentile(values, 0.99), max(values)] if values else []
        lines.append(f"| {name} | {len(values)} | " + " | ".join(f"{1000 * value:.0f}" for value in shown) + " |")
    versions, fell = {one.version for one in figures.seen}, sum(one.fallback is not None for one in figures.seen)
    lines += [
        "",
        f"{len(figures.seen)} requests on {len(versions)} versions: {len(figures.failed)} failed, "
        f"{len(figures.mixed)} planned by two versions, {fell} planned by the rule for other reasons.",
    ]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engines.swap_gateway", description="Hot swap through the gateway."
    )
    parser.add_argument("--engine", choices=("vllm", "embedded"), default="embedded")
    parser.add_argument("--url", help="a vLLM of the shipped weights, as policy.recipes.engines starts it")
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--rollbacks", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--out", type=Path, help="the figures as JSON")
    return parser.parse_args(arguments)


def vllm_settings(process: EngineProcess) -> dict[str, str]:
    """A gateway before that vLLM, with versions as adapters on it."""
    return {
        "BATON_POLICY_ENGINE": "vllm-lora",
        "BATON_POLICY_ENGINE_BASE": str(process.base),
        "BATON_POLICY_VERSIONS_MAX": str(process.versions_max),
        "BATON_POLICY_RANK_MAX": "8",
        "BATON_CONDUCTOR_STRUCTURED": "vllm",
        "BATON_PLAN_PROMPT": "compact",
        "BATON_CONDUCTOR_INPUT_USD_PER_MTOK": "0",
        "BATON_CONDUCTOR_OUTPUT_USD_PER_MTOK": "0",
    }


async def measure(options: argparse.Namespace, running: Gateway, directories: Sequence[Path]) -> Figures:
    """The trial on a running gateway."""
    async with httpx.AsyncClient(timeout=REQUEST_S, trust_env=False) as client:
        one = Trial(running, client)
        await one.run(directories, options.swaps, options.rollbacks, options.streams)
    return one.figures


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every promise was kept."""
    options = parse(arguments)
    with temporary_directory() as work, ExitStack() as stack:
        directories = [write_adapter(SHIPPED, work / f"v{seed}", seed, scale=SCALE) for seed in range(DIRECTORIES)]
        conductor, settings = "embedded", dict(SETTINGS)
        if options.engine == "vllm":
            process = EngineProcess("vllm", SHIPPED, work)
            process.versions_max = VERSIONS_MAX
            if options.url:
                process.url = options.url.rstrip("/")
            else:
                stack.callback(process.stop)
                print(f"vllm started in {process.start():.1f} s", flush=True)
            conductor, settings = f"{process.url}/v1#{process.name}", settings | vllm_settings(process)
        running = stack.enter_context(gateway(work, conductor=conductor, settings=settings))
        figures = asyncio.run(measure(options, running, directories))
    print(table(figures))
    for one in figures.failed[:5]:
        print(f"FAILED: {one}", file=sys.stderr)
    if options.out:
        times = {"actions_s": figures.actions_s, "served_s": figures.served_s, "rolled_back_s": figures.rolled_back_s}
        counts = {"requests": len(figures.seen), "failed": len(figures.failed), "mixed": len(figures.mixed)}
        write_atomic(options.out, json.dumps(times | counts, indent=2) + "\n")
    slow = max(figures.rolled_back_s, default=0.0) > 10
    return 0 if figures.seen and not (figures.failed or figures.mixed or slow) else 1


if __name__ == "__main__":
    sys.exit(main())
