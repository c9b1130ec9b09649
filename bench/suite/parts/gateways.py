"""The gateways side by side: the same mock worker, the same client, one core for whichever is under test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.suite.baton import USER, baton, shipped
from bench.suite.client import Target
from bench.suite.cores import REST, UNDER_TEST, on
from bench.suite.peers import gateways as peers
from bench.suite.rounds import Arm, Cell, interleave, ratios, say, summary
from bench.suite.sizes import Size
from policy.recipes.stack import program

DIRECT, BATON = "direct", "baton"
ONE, MANY, STREAM, CROWD = "one", "many", "stream", "crowd"


@dataclass(frozen=True, slots=True)
class Peer:
    """A gateway beside Baton; `shown` is its name for readers."""

    name: str
    shown: str
    version: Callable[[], str]
    start: Callable[[Path, str], AbstractContextManager[peers.Running]]


PEERS = (
    Peer("litellm", "LiteLLM", partial(peers.version_of, "litellm", "litellm"), peers.litellm),
    Peer("portkey", "Portkey", peers.portkey_version, peers.portkey),
    Peer(
        "vllm-router", "vllm-router (Rust)", partial(peers.version_of, "vllm-router", "vllm-router"), peers.vllm_router
    ),
    Peer(
        "tensorzero",
        "TensorZero, embedded (Rust)",
        partial(peers.version_of, "tensorzero", "tensorzero"),
        peers.tensorzero,
    ),
)


def measure(directory: Path, size: Size, only: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Start all, measure in turns, end all. `only`: names of the peers; absent: all of them."""
    chosen = [peer for peer in PEERS if only is None or peer.name in only]
    with ExitStack() as held:
        with on(REST):
            upstream = held.enter_context(program("upstream", directory, "bench.suite.upstream"))
        own = held.enter_context(baton(directory / BATON, upstream.url))
        arms = [
            Arm(DIRECT, Target(f"{upstream.url}/v1", "m")),
            Arm(BATON, own.target("mock"), own.pid, partial(shipped, own.served)),
        ]
        missing = {}
        for peer in chosen:
            try:
                arms += _started(peer, directory, upstream.url, held)
            except peers.NotInstalled as error:
                missing[peer.name] = str(error)
                say(f"  {error}")
        cells = [
            Cell(ONE, 1, USER),
            Cell(MANY, size.in_flight, USER),
            Cell(STREAM, size.in_flight, {"stream": True, **USER}),
            Cell(CROWD, size.crowd, USER),
        ]
        with on(REST):
            rows = asyncio.run(interleave(arms, cells, size.rounds, size.seconds))
    versions = {peer.name: peer.version() for peer in PEERS}
    in_flight = {cell.name: cell.in_flight for cell in cells}
    return {"rows": rows, "missing": missing, "versions": versions, "in_flight": in_flight}


def _started(peer: Peer, directory: Path, upstream: str, held: ExitStack) -> Iterator[Arm]:
    say(f"  starting {peer.name}")
    peers.install(peer.name)
    with on(UNDER_TEST):
        running = held.enter_context(peer.start(directory, upstream))
    yield Arm(running.name, running.target, running.pid)


def figures(raw: dict[str, Any]) -> dict[str, Any]:
    """The medians of all, and the ratios to Baton."""
    rows = raw["rows"]
    return {
        "missing": raw["missing"],
        "versions": raw["versions"],
        "in_flight": raw["in_flight"],
        "medians": summary(rows),
        "ratios": ratios(rows, BATON),
        "to_litellm": ratios(rows, "litellm").get(BATON, {}),
        "to_portkey": ratios(rows, "portkey").get(BATON, {}),
    }
