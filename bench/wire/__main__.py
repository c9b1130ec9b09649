"""Send the recorded exchanges of a folder through a gateway whose workers answer with the recorded bytes.

    python -m bench.wire FOLDER [--source NAME] [--wire WIRE] [--name PART] [--details FILE]

FOLDER holds `*.jsonl.gz`, one exchange a line: source, name, wire (chat, compat, responses, messages), host, request,
status, type and body of the reply. Each request goes to a worker of its wire and model, one at a time. Prints for each
source and wire how many were served, how many had every field that the vendor sent, and the differences by kind; then
what of the requests reached no worker and was not named in a header. `--details` writes each difference as a line of
JSON. Ids, names of models, times, `logprobs: null` and an empty first `content` do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.wire.compare import differences, is_loss
from bench.wire.exchanges import PATHS, WIRES, Exchange, read_folder, reply_of
from policy.recipes.stack import gateway, temporary_directory
from tests.upstreams.server import Reply, Request, Server

HOSTED = (
    *("web_search", "web_search_preview", "web_search_2025_08_26", "file_search", "code_interpreter", "computer"),
    *("computer_use_preview", "image_generation", "mcp", "shell", "local_shell", "apply_patch", "tool_search"),
)
NAMED_IN = ("x-baton-dropped-fields", "x-baton-left-out")
NOT_SENT = ("stream", "stream_options")  # Baton chooses how it reads
SETTINGS = {
    "BATON_EXPLORE_SHARE": "0",
    "BATON_JOBS_WORKER": "false",
    "BATON_RETRY_BACKOFF_S": "0.01",
    "REPLAY_KEY": "sk-replay-0123456789",
}
REPLY_S = 120.0


@dataclass(slots=True)
class Outcome:
    """What became of one exchange. `kinds`: differences of the reply; `unsent`: paths of the request that were lost
    in silence."""

    exchange: Exchange
    status: int
    kinds: list[tuple[str, str]] = field(default_factory=list)
    unsent: list[tuple[str, str]] = field(default_factory=list)
    error: str = ""

    @property
    def is_served(self) -> bool:
        return self.status == 200

    @property
    def is_same(self) -> bool:
        return self.is_served and not any(is_loss(kind) for kind, _ in self.kinds)


def main(arguments: Sequence[str]) -> int:
    """Print the table. Exit status 1 where nothing was chosen."""
    parser = argparse.ArgumentParser(prog="python -m bench.wire", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", help="only this library's")
    parser.add_argument("--wire", choices=WIRES, help="only of this API")
    parser.add_argument("--name", default="", help="only those whose name holds this")
    parser.add_argument("--details", type=Path, help="write each difference here")
    options = parser.parse_args(arguments)
    chosen = [
        one
        for one in read_folder(options.folder)
        if options.source in (None, one.source) and options.wire in (None, one.wire) and options.name in one.name
    ]
    if not chosen:
        sys.stderr.write(f"{options.folder}: no exchange to send\n")
        return 1
    outcomes = asyncio.run(replayed(chosen))
    if options.details is not None:
        options.details.write_text("".join(json.dumps(line) + "\n" for one in outcomes for line in details_of(one)))
    sys.stdout.write(report(outcomes))
    return 0


async def replayed(exchanges: Sequence[Exchange]) -> list[Outcome]:
    """The outcomes of all, in order. Those that the vendor refused are sent last: a worker that fails may rest."""
    upstream = Vendor()
    async with Server(upstream.reply) as server:
        names = worker_names(exchanges)
        with temporary_directory() as directory:
            pool = directory / "pool.yaml"
            pool.write_text(json.dumps(pool_file(server.url, names)))
            outcomes: dict[str, Outcome] = {}
            started = await asyncio.to_thread(_Started, directory, pool)
            try:
                headers = {"authorization": f"Bearer {started.gateway.data_key}"}
                async with httpx.AsyncClient(base_url=started.gateway.base_url, headers=headers) as http:
                    for one in sorted(exchanges, key=lambda one: one.status != 200):
                        upstream.exchange = one
                        outcomes[one.place] = await sent(http, upstream, one, names[_worker_of(one)])
            finally:
                await asyncio.to_thread(started.end)
    return [outcomes[one.place] for one in exchanges]


class _Started:
    """A gateway that was started in a thread, so that the upstream can answer meanwhile."""

    def __init__(self, directory: Path, pool: Path) -> None:
        self._context = gateway(directory, conductor="worker:planner", pool=pool, settings=SETTINGS)
        self.gateway = self._context.__enter__()

    def end(self) -> None:
        """Stop it."""
        self._context.__exit__(None, None, None)


class Vendor:
    """Answers every call with the recorded reply of `exchange`. `bodies`: what the calls of it asked."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self._exchange: Exchange | None = None

    @property
    def exchange(self) -> Exchange | None:
        """The exchange that is being replayed."""
        return self._exchange

    @exchange.setter
    def exchange(self, exchange: Exchange) -> None:
        self._exchange, self.bodies = exchange, []

    def reply(self, request: Request) -> Reply:
        """The recorded bytes, with the recorded status."""
        one = self._exchange
        if one is None or not request.content:
            return Reply(b"{}", 404)
        self.bodies.append(request.body)
        return Reply(one.body.encode(), one.status, {"content-type": one.type})


def _worker_of(exchange: Exchange) -> tuple[str, str, str]:
    return exchange.wire, exchange.host, str(exchange.request.get("model"))


def worker_names(exchanges: Iterable[Exchange]) -> dict[tuple[str, str, str], str]:
    """A worker's name for each wire, host and model."""
    keys = dict.fromkeys(_worker_of(one) for one in exchanges)
    return {key: f"replay{number}" for number, key in enumerate(keys)}


def pool_file(url: str, names: Mapping[tuple[str, str, str], str]) -> dict[str, Any]:
    """A worker for each wire, host and model, and a planner that is never asked."""
    workers = [_worker(url, name, wire, model) for (wire, _, model), name in names.items()]
    planner = _worker(url, "planner", "chat", "planner")
    return {"workers": [*workers, planner], "pools": {"default": list(names.values())}}


def _worker(url: str, name: str, wire: str, model: str) -> dict[str, Any]:
    worker = {
        "name": name,
        "handle": name,
        "kind": "openai",
        "model": model,
        "url": f"{url}/v1",
        "api_key": "env:REPLAY_KEY",
        "price": {"input_usd_per_mtok": 0.0001, "output_usd_per_mtok": 0.0001},
        "context_tokens": 2_000_000,
        "output_tokens_max": 200_000,
    }
    if wire == "messages":
        return worker | {"kind": "litellm", "model": f"anthropic/{model}", "url": url}
    if wire == "responses":
        return worker | {"api": "responses", "hosted": list(HOSTED), "fetches": True}
    return worker | {"fetches": True}


async def sent(http: httpx.AsyncClient, upstream: Vendor, exchange: Exchange, worker: str) -> Outcome:
    """Send one request; what became of it."""
    body = {**exchange.request, "model": worker}
    reply = await http.post(PATHS[exchange.wire], json=body, timeout=REPLY_S)
    outcome = Outcome(exchange, reply.status_code)
    streamed = "event-stream" in reply.headers.get("content-type", "")
    came = reply_of(exchange.wire, reply.text, streamed=streamed)
    if reply.status_code != 200:
        error = came.get("error") if isinstance(came, dict) else None
        outcome.error = str((error or {}).get("message") if isinstance(error, dict) else reply.text)[:200]
        return outcome
    said = reply_of(exchange.wire, exchange.body, streamed=exchange.streamed)
    outcome.kinds = [("changed form", "whole ↔ stream")] if streamed != exchange.streamed else []
    outcome.kinds += differences(said, came)
    if upstream.bodies:
        named = ",".join(reply.headers.get(name, "") for name in NAMED_IN)
        ours = {name: value for name, value in exchange.request.items() if name not in NOT_SENT}
        lost = differences(ours, upstream.bodies[-1])
        outcome.unsent = [(kind, text) for kind, text in lost if is_loss(kind) and not _is_named(kind, named)]
    return outcome


def _is_named(kind: str, named: str) -> bool:
    top = kind.split()[1].partition(".")[0].partition("[")[0]
    return top in named


def details_of(outcome: Outcome) -> list[dict[str, Any]]:
    """One line for each difference, and for a failure."""
    one = outcome.exchange
    head = {"place": one.place, "source": one.source, "name": one.name, "wire": one.wire, "status": outcome.status}
    lines = [{"kind": kind, "values": text} for kind, text in outcome.kinds]
    lines += [{"kind": f"unsent: {kind}", "values": text} for kind, text in outcome.unsent]
    if not outcome.is_served:
        lines.append({"kind": f"answered {outcome.status} to {one.status}", "values": outcome.error})
    return [head | line for line in lines]


def report(outcomes: Sequence[Outcome]) -> str:
    """The table of sources and wires, then the differences by kind."""
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for one in outcomes:
        groups[one.exchange.source, one.exchange.wire].append(one)
        groups["all", one.exchange.wire].append(one)
    lines = ["| source | API | exchanges | vendor's errors | served | the same |", "|---|---|---|---|---|---|"]
    for (source, wire), group in sorted(groups.items(), key=lambda item: (item[0][0] == "all", item[0])):
        good = [one for one in group if one.exchange.status == 200]
        served, same = sum(one.is_served for one in good), sum(one.is_same for one in good)
        lines.append(f"| {source} | {wire} | {len(good)} | {len(group) - len(good)} | {served} | {same} |")
    for wire in WIRES:
        group = groups.get(("all", wire), [])
        lines += _kinds(f"{wire}: replies", group, lambda one: [kind for kind, _ in one.kinds])
        lines += _kinds(f"{wire}: requests, lost in silence", group, lambda one: [kind for kind, _ in one.unsent])
        lines += _kinds(f"{wire}: not served", group, _failure)
    return "\n".join(lines) + "\n"


def _failure(outcome: Outcome) -> list[str]:
    return [] if outcome.is_served else [f"{outcome.exchange.status} → {outcome.status} {outcome.error[:110]}"]


def _kinds(title: str, group: Sequence[Outcome], kinds_of: Any) -> list[str]:
    counted = Counter(kind for one in group for kind in set(kinds_of(one)))
    example = {kind: one.exchange.place for one in reversed(group) for kind in kinds_of(one)}
    rows = [f"{count:6} {kind}   ({example[kind]})" for kind, count in counted.most_common()]
    return ["", title, *rows] if rows else []


if __name__ == "__main__":
    started_s = time.monotonic()
    status = main(sys.argv[1:])
    sys.stderr.write(f"{time.monotonic() - started_s:.0f} s\n")
    sys.exit(status)
