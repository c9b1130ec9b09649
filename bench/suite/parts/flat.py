"""What a request costs with few and with many keys, workers and rollouts: two gateways side by side in one run."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.suite.baton import USER, Baton, baton, shipped
from bench.suite.cores import REST, on
from bench.suite.fill import fill_keys, fill_rollouts, questions
from bench.suite.rounds import Arm, Cell, interleave, ratios, say, summary
from bench.suite.sizes import Size
from policy.recipes.stack import program

FEW, MANY, EACH = "few", "many", "many, each in turn"
WORKERS_FEW, ROLLOUTS_FEW = 5, 1000
NAMED, RULE = "named", "rule"
POOL = {f"worker{number}": "m" for number in range(4)}
WORKER = {"mock": "m"}
QUESTIONS = 100


def keys(directory: Path, size: Size) -> dict[str, Any]:
    """One key; one of many; and each of many in turn, which no cache of keys holds."""
    with ExitStack() as held:
        few, many = _pair(held, directory)
        texts = fill_keys(many, directory / MANY / "data", size.keys)
        say(f"  {len(texts)} keys")
        turns = [many.with_key(key).target("mock").request(**USER) for key in texts]
        arms = [_arm(FEW, few, "mock"), _arm(MANY, many, "mock")]
        arms.append(Arm(EACH, many.target("mock"), many.pid, partial(shipped, many.served), turns))
        with on(REST):
            rows = asyncio.run(interleave(arms, [Cell(NAMED, size.in_flight, USER)], size.rounds, size.seconds))
    return {"rows": rows, "counts": {FEW: 1, MANY: len(texts), EACH: len(texts)}}


def workers(directory: Path, size: Size) -> dict[str, Any]:
    """Requests to a worker by name, and requests that the rule plans over all of them."""
    with ExitStack() as held:
        pools = [{f"worker{number}": "m" for number in range(count)} for count in (WORKERS_FEW, size.workers)]
        few, many = _pair(held, directory, pools)
        arms = [_arm(FEW, few, "worker0"), _arm(MANY, many, "worker0")]
        cells = [Cell(NAMED, size.in_flight, USER), Cell(RULE, size.in_flight, {"model": "baton/rule", **USER})]
        with on(REST):
            rows = asyncio.run(interleave(arms, cells, size.rounds, size.seconds))
    return {"rows": rows, "counts": {FEW: WORKERS_FEW, MANY: size.workers}}


def rollouts(directory: Path, size: Size) -> dict[str, Any]:
    """Requests that the rule plans by the experience of the rollouts before."""
    with ExitStack() as held:
        few, many = _pair(held, directory, [POOL, POOL])
        counts = {FEW: fill_rollouts(few, "baton/rule", ROLLOUTS_FEW)}
        say(f"  {counts[FEW]} rollouts")
        counts[MANY] = fill_rollouts(many, "baton/rule", size.rollouts)
        say(f"  {counts[MANY]} rollouts")
        asked = questions(QUESTIONS)
        arms = [
            Arm(
                name, own.target("baton/rule"), own.pid, partial(shipped, own.served),
                [own.target("baton/rule").request(question, **USER) for question in asked],
            )
            for name, own in ((FEW, few), (MANY, many))
        ]  # fmt: skip
        with on(REST):
            rows = asyncio.run(interleave(arms, [Cell(RULE, size.in_flight, USER)], size.rounds, size.seconds))
    return {"rows": rows, "counts": counts}


def _pair(held: ExitStack, directory: Path, pools: list[dict[str, str]] | None = None) -> tuple[Baton, Baton]:
    with on(REST):
        upstream = held.enter_context(program("upstream", directory, "bench.suite.upstream"))
    few, many = (
        held.enter_context(baton(directory / name, upstream.url, workers=workers))
        for name, workers in zip((FEW, MANY), pools or [WORKER, WORKER], strict=True)
    )
    return few, many


def _arm(name: str, own: Baton, model: str) -> Arm:
    return Arm(name, own.target(model), own.pid, partial(shipped, own.served))


def figures(raw: dict[str, Any]) -> dict[str, Any]:
    """Medians, and the ratios to the gateway with few."""
    return {"counts": raw["counts"], "medians": summary(raw["rows"]), "ratios": ratios(raw["rows"], FEW)}
