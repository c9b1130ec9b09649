"""The stage of `bench.show`: a gateway on simulated workers whose conductor is a script, and ways to observe it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.database import Database
from policy.recipes.stack import Gateway, HelperServer, gateway, output_of, program, temporary_directory
from policy.simulators.arena.families.tasks import Task, make_task

ARENA_SPEED = "0.2"
SETTINGS = {
    "BATON_CONDUCTOR_STRUCTURED": "vllm",
    "BATON_CONDUCTOR_INPUT_USD_PER_MTOK": "0",
    "BATON_CONDUCTOR_OUTPUT_USD_PER_MTOK": "0",
    "BATON_EXPLORE_SHARE": "0",
}
REQUEST_S = 60.0
CELL_CHARS = 48
Facts = dict[str, Any]


class NotShown(Exception):
    """A case did not show what it promises."""


@dataclass
class Scene:
    """A gateway on simulated workers, planned for by a script."""

    directory: Path
    gateway: Gateway
    arena: HelperServer
    conductor: HelperServer
    database: Database
    client: httpx.Client

    def script(self, plan: Mapping[str, Any], gap_s: float = 0.0, pause_s: float = 0.0) -> None:
        """Set the script of the conductor for later calls."""
        body = {"plan": plan, "gap_s": gap_s, "pause_s": pause_s}
        self.client.put(f"{self.conductor.url}/script", json=body).raise_for_status()

    def ask(self, task: Task, **headers: str) -> httpx.Response:
        """Send a request that the conductor plans."""
        sent = authorized(self.gateway) | {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(f"{self.gateway.base_url}/chat/completions", json=body_of(task), headers=sent)

    def rollout(self, rollout_id: str) -> Facts:
        """Return the whole rollout, as its owner may read it."""
        reply = self.client.get(f"{self.gateway.base_url}/rollouts/{rollout_id}", headers=authorized(self.gateway))
        reply.raise_for_status()
        return dict(reply.json())

    def worker_calls(self) -> dict[str, int]:
        """Return the arena's own count of its calls: open, done, cancelled."""
        return dict(self.client.get(f"{self.arena.url}/healthz").json()["calls"])

    def planning_calls(self) -> dict[str, int]:
        """Return the conductor's own count of its calls: open, done, cancelled."""
        return dict(self.client.get(f"{self.conductor.url}/script").json()["calls"])


def authorized(served: Gateway) -> dict[str, str]:
    """The header of the gateway's first data key."""
    return {"authorization": f"Bearer {served.data_key}"}


def body_of(task: Task, model: str = "baton/conductor", *, stream: bool = False) -> Facts:
    """A request body."""
    return {"model": model, "messages": [{"role": "user", "content": task.text}], "stream": stream}


@contextmanager
def scene() -> Iterator[Scene]:
    """Everything the scripted cases need, started once."""
    with (
        temporary_directory() as directory,
        program("arena", directory, "policy.simulators.arena", "serve", "--speed", ARENA_SPEED) as arena,
        program("conductor", directory, "bench.scripted_conductor") as conductor,
    ):
        pool = directory / "pool.yaml"
        pool.write_text(output_of("policy.simulators.arena", "pool", "--base-url", arena.url))
        url = f"{conductor.url}/v1#scripted"
        with (
            gateway(directory, conductor=url, pool=pool, settings=SETTINGS) as served,
            closing(Database(served.database_url)) as database,
            httpx.Client(timeout=REQUEST_S) as client,
        ):
            yield Scene(directory, served, arena, conductor, database, client)


def steps(*each: tuple[str, str | None, list[int]]) -> Facts:
    """A plan."""
    return {"steps": [{"worker": worker, "task": task, "see": see} for worker, task, see in each]}


def task_of(shape: str) -> Task:
    """The first held-out task of that shape."""
    return next(task for task in (make_task(seed, "held_out") for seed in range(1000)) if task.shape == shape)


def must(what: str, shown: bool) -> None:
    """Print the claim if the condition holds. Raises NotShown otherwise."""
    print(f"  {'ok' if shown else 'NOT SHOWN'}: {what}", flush=True)
    if not shown:
        raise NotShown(what)


def title(text: str) -> None:
    """A headline."""
    print(f"\n== {text}\n", flush=True)


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows in columns."""
    if not rows:
        print("  (no rows)")
        return
    cells = [[str(name) for name in rows[0]], *([cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def cell(value: Any) -> str:
    """A value in at most CELL_CHARS characters."""
    text = f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
    return text if len(text) <= CELL_CHARS else f"{text[: CELL_CHARS - 3]}…"
