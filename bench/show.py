"""The promises of the serving path, each shown by real processes: `python -m bench.show [CASE …]`.

    parallel          two steps at the same time and a third that sees both: the rollout's JSON, and the overlap
    child             a child loop stopped by the depth cap
    client-leaves     a client that leaves mid-plan: every upstream call is cancelled
    killed-conductor  the conductor's process killed under traffic: every request is answered
    tokens            a PostgreSQL query that lists the steps of one rollout with the sampled tokens and log-probs

Without a name all of them run. Each starts what it needs (gateway, PostgreSQL, Redis, the arena's simulated workers at
a fifth of their speed) in a temporary directory and ends it. In the first four the plans come from a scripted stand-in
for the conductor (`bench/scripted_conductor.py`): they show the executor, not planning. `tokens` uses the embedded
model. A case that does not show what it should ends with status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from bench.database import STEPS_WITH_TOKENS, TOGETHER, TOKENS, Database, page_queries
from bench.scene import (
    REQUEST_S,
    Facts,
    NotShown,
    Scene,
    authorized,
    body_of,
    must,
    scene,
    steps,
    table,
    task_of,
    title,
)
from gateway.files import write_atomic
from policy.recipes.stack import gateway, program, temporary_directory
from policy.simulators.arena.families.tasks import grade

REQUESTS, KILLED_AFTER, AT_ONCE = 50, 15, 8
CANCELLED_S = 1.0  # as promised in docs/guarantees/
PATIENCE_S = 30.0
TEXT_CHARS_MAX = 640
TOKENS_SHOWN = 40


# ---------------------------------------------------------------- two at once, and a third that sees both


def parallel(on: Scene) -> Facts:
    """Two drafts at the same time and a reviewer who sees both."""
    title("Two steps in parallel and a third that saw both (scripted plan)")
    task = task_of("check")
    on.script(steps(("quill", None, []), ("maple", None, []), ("onyx", None, [0, 1])), gap_s=0.001)
    reply = on.ask(task)
    reply.raise_for_status()
    rollout = on.rollout(reply.headers["x-baton-rollout-id"])
    print(json.dumps(trimmed(rollout), indent=2, ensure_ascii=False))
    together = on.database.on_page(TOGETHER, rollout["id"])
    print("\nPostgreSQL, `Steps of one rollout that ran at the same time` (docs/schema.md):")
    table(together)
    drafts, third = rollout["steps"][:2], rollout["steps"][2]
    overlap_ms = min(ms(step["finished_at"]) for step in drafts) - max(ms(step["started_at"]) for step in drafts)
    early_ms = ms(rollout["rounds"][0]["finished_at"]) - ms(drafts[0]["started_at"])
    sent = json.dumps(third["messages"], ensure_ascii=False)
    must(f"steps 0 and 1 ran at the same time for {overlap_ms:.0f} ms", overlap_ms > 0)
    must("step 2 began after both", ms(third["started_at"]) >= max(ms(step["finished_at"]) for step in drafts))
    must("step 2 was sent both replies", all(quoted(step["reply"]) in sent for step in drafts))
    must(f"step 0 started {early_ms:.0f} ms before the plan was whole", early_ms > 0)
    return {"overlap_ms": overlap_ms, "early_ms": early_ms, "right": grade(task, third["reply"]), "sql": together}


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def ms(iso: str) -> float:
    """Milliseconds since the epoch."""
    return datetime.fromisoformat(iso).timestamp() * 1000


def trimmed(rollout: Mapping[str, Any]) -> Facts:
    """The rollout's JSON without what fills pages: the pool, token ids, long texts; and its children alike."""
    top = ("id", "parent_id", "depth", "policy_requested", "policy_used", "policy_version", "fallback", "capped")
    money = ("status", "cost_nano", "overhead_ms", "created_at", "finished_at")
    planned = ("round", "planner", "plan", "refusal", "started_at", "finished_at")
    run = ("step", "round", "worker", "task", "see", "messages", "reply", "status", "prompt_tokens")
    times = ("completion_tokens", "cost_nano", "started_at", "finished_at", "child_rollout_id")
    kept: Facts = {name: rollout[name] for name in (*top, *money)}
    kept["rounds"] = [{name: each[name] for name in planned} for each in rollout["rounds"]]
    kept["steps"] = [{name: each[name] for name in (*run, *times)} for each in rollout["steps"]]
    kept["children"] = [trimmed(child) for child in rollout["children"]]
    return dict(short(kept))


def short(value: Any) -> Any:
    """Cut texts longer than TEXT_CHARS_MAX, and name their length."""
    if isinstance(value, Mapping):
        return {name: short(item) for name, item in value.items()}
    if isinstance(value, list):
        return [short(item) for item in value]
    if isinstance(value, str) and len(value) > TEXT_CHARS_MAX:
        return f"{value[:TEXT_CHARS_MAX]}… ({len(value)} characters)"
    return value


# ---------------------------------------------------------------- the depth cap


def child(on: Scene) -> Facts:
    """Every plan asks for a child loop; the cap ends it and a router answers."""
    title("A child loop stopped by the depth cap (scripted: every plan is a child loop)")
    on.script(steps(("self", None, [])))
    shown = {}
    for wanted in ("2", "1"):
        reply = on.ask(task_of("single"), x_baton_max_depth=wanted)
        story = {name: value for name, value in reply.headers.items() if name.startswith("x-baton")}
        rollout = on.rollout(story["x-baton-rollout-id"])
        print(f"x-baton-max-depth: {wanted} → {reply.status_code}")
        for name, value in story.items():
            print(f"  {name}: {value}")
        lines = list(loops(rollout))
        table(lines)
        must(f"loops went {wanted} deep and no deeper", max(line["depth"] for line in lines) == int(wanted))
        must("the deepest plan was refused by name", lines[-1]["refusal"] == "depth_cap")
        must("the reply says so", reply.status_code == 200 and story.get("x-baton-capped") == "depth")
        shown[wanted] = {"headers": story, "loops": lines, "status": reply.status_code}
    return shown


def loops(rollout: Mapping[str, Any]) -> Iterator[Facts]:
    """A line for each loop of a tree, outermost first."""
    refusal = next((planned["refusal"] for planned in rollout["rounds"] if planned["refusal"]), None)
    names = [step["worker"] for step in rollout["steps"]]
    yield {name: rollout[name] for name in ("depth", "id", "status", "capped", "fallback", "cost_nano")} | {
        "refusal": refusal,
        "workers": ",".join(names),
    }
    for below in rollout["children"]:
        yield from loops(below)


# ---------------------------------------------------------------- a client that leaves


def client_leaves(on: Scene) -> Facts:
    """Three workers answer and the fourth step is still being planned when the client closes its connection."""
    title("A client that leaves mid-plan (scripted plan)")
    shown = {}
    for stream in (False, True):
        shown["streamed" if stream else "whole"] = asyncio.run(_leave(on, stream=stream))
    return shown


async def _leave(on: Scene, *, stream: bool) -> Facts:
    solvers: list[tuple[str, str | None, list[int]]] = [("cedar", None, []), ("comet", None, []), ("onyx", None, [])]
    on.script(steps(*solvers, ("vote", None, [0, 1, 2])), pause_s=20.0)
    workers, planning = on.worker_calls(), on.planning_calls()
    before = on.database.newest()
    await _ask_and_leave(on, stream=stream)
    left_s = time.monotonic()
    await _until(lambda: on.worker_calls()["open"] == 0 and on.planning_calls()["open"] == 0, "calls stay open")
    took_ms = (time.monotonic() - left_s) * 1000
    ended = {name: on.worker_calls()[name] - workers[name] for name in ("done", "cancelled")}
    plans = {name: on.planning_calls()[name] - planning[name] for name in ("done", "cancelled")}
    await _until(lambda: bool(on.database.steps_after(before)), "the rollout is not logged")
    logged = on.database.steps_after(before)
    print(f"a {'streaming' if stream else 'plain'} request; the client left with 3 worker calls and the plan under way")
    print(f"  worker calls: {ended}   planning calls: {plans}   all ended after {took_ms:.0f} ms")
    table(logged)
    must("every worker call was cancelled", ended == {"done": 0, "cancelled": 3})
    must("the planning call was cancelled", plans == {"done": 0, "cancelled": 1})
    must(f"within {CANCELLED_S:g} s", took_ms < CANCELLED_S * 1000)
    must("the log has it as aborted", {row["status"] for row in logged} == {"aborted"})
    held = await _held(on)
    must(f"no money is held any more ({held})", set(held) <= {"0"})
    return {"workers": ended, "planning": plans, "took_ms": took_ms, "steps": [row["step_status"] for row in logged]}


async def _ask_and_leave(on: Scene, *, stream: bool) -> None:
    """Send a request, wait until three workers are busy, and close the connection."""
    before = on.worker_calls()["done"]
    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        body = body_of(task_of("vote"), stream=stream)
        url = f"{on.gateway.base_url}/chat/completions"
        asking = asyncio.create_task(client.post(url, json=body, headers=authorized(on.gateway)))
        await _until(lambda: on.worker_calls()["open"] == 3, "three workers are not busy at the same time")
        if on.worker_calls()["done"] != before:
            raise NotShown("a worker had finished before the client left; the machine is too slow for this")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _until(ready: Callable[[], bool], otherwise: str) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(ready):
        if time.monotonic() > until_s:
            raise NotShown(otherwise)
        await asyncio.sleep(0.01)


async def _held(on: Scene) -> list[str]:
    """Return the dollars held by each key, once no request is in flight."""
    headers = {"authorization": f"Bearer {on.gateway.admin_key}"}
    keys = on.client.get(f"{on.gateway.admin_url}/admin/keys", headers=headers).json()["data"]
    return [key["held_usd"] for key in keys]


# ---------------------------------------------------------------- a killed conductor


def killed_conductor(on: Scene) -> Facts:
    """SIGKILL to the conductor's process while requests are being served; then it comes back."""
    title(f"The conductor killed under traffic: {REQUESTS} requests, {AT_ONCE} at a time (scripted plan)")
    on.script(steps(("cedar", None, [])), gap_s=0.001)
    answers = asyncio.run(_traffic(on))
    told = Counter(fallback or "(planned by the conductor)" for _status, fallback in answers)
    statuses = Counter(status for status, _fallback in answers)
    print(f"  status codes {dict(statuses)}\n  x-baton-fallback {dict(told)}")
    must("every request was answered with 200", statuses == {200: REQUESTS})
    must("the conductor planned until it was killed", told["(planned by the conductor)"] > 0)
    must("the fallback planned afterwards, and every reply said so", told["conductor_down"] > 0)
    back_s = _comes_back(on)
    must(f"a new conductor on the same address plans again after {back_s:.1f} s", back_s < PATIENCE_S)
    return {"statuses": dict(statuses), "fallbacks": dict(told), "back_s": back_s}


async def _traffic(on: Scene) -> list[tuple[int, str | None]]:
    """Return (status, fallback) of each request, in the order of the replies."""
    answers: list[tuple[int, str | None]] = []
    slots, task = asyncio.Semaphore(AT_ONCE), task_of("single")

    async def one(client: httpx.AsyncClient) -> None:
        async with slots:
            url, headers = f"{on.gateway.base_url}/chat/completions", authorized(on.gateway)
            reply = await client.post(url, json=body_of(task), headers=headers)
        answers.append((reply.status_code, reply.headers.get("x-baton-fallback")))
        if len(answers) == KILLED_AFTER:
            os.kill(on.conductor.pid, signal.SIGKILL)
            print(f"  killed process {on.conductor.pid} after {KILLED_AFTER} answers", flush=True)

    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        await asyncio.gather(*(one(client) for _ in range(REQUESTS)))
    return answers


def _comes_back(on: Scene) -> float:
    """Start the conductor again on its port; return the seconds until it plans a request."""
    port = int(on.conductor.url.rpartition(":")[2])
    with program("conductor-again", on.directory, "bench.scripted_conductor", port=port):
        began_s = time.monotonic()
        while on.ask(task_of("single")).headers.get("x-baton-fallback"):
            if time.monotonic() - began_s > PATIENCE_S:
                break
            time.sleep(0.2)
        return time.monotonic() - began_s


# ---------------------------------------------------------------- sampled tokens


def tokens(conductor: str) -> Facts:
    """The steps of one rollout with the tokens that a real model sampled for its plan."""
    title(f"The conductor's sampled tokens and log-probs, from PostgreSQL (conductor: {Path(conductor).name})")
    settings = {"BATON_EXPLORE_SHARE": "1"}  # sampled at temperature 1, as the exploring share of traffic is
    with temporary_directory() as directory, gateway(directory, conductor=conductor, settings=settings) as served:
        url = f"{served.base_url}/chat/completions"
        reply = httpx.post(url, json=body_of(task_of("chain")), headers=authorized(served), timeout=REQUEST_S)
        reply.raise_for_status()
        rollout_id = reply.headers["x-baton-rollout-id"]
        headers = authorized(served)
        rollout = httpx.get(f"{served.base_url}/rollouts/{rollout_id}", headers=headers, timeout=REQUEST_S).json()
        with closing(Database(served.database_url)) as database:
            listed, sampled = (database.on_page(place, rollout_id) for place in (STEPS_WITH_TOKENS, TOKENS))
    first = rollout["rounds"][0]
    print(
        f"rollout {rollout_id}, x-baton-fallback: {reply.headers.get('x-baton-fallback')}\nplan: {first['plan_text']}\n"
    )
    print(f"{page_queries()[STEPS_WITH_TOKENS]};\n")
    table(listed)
    print(f"\n{page_queries()[TOKENS]};\n")
    table(sampled[:TOKENS_SHOWN])
    print(f"  … {len(sampled)} tokens in all")
    must("every step of the rollout is listed", len(listed) == len(rollout["steps"]) > 0)
    must("the conductor's tokens are there, each with its log-prob", len(sampled) == first["completion_tokens"] > 0)
    must("no log-prob is above 0", all(row["logprob"] <= 0 for row in sampled))
    return {"steps": len(listed), "tokens": len(sampled), "fallback": reply.headers.get("x-baton-fallback")}


SCRIPTED: dict[str, Callable[[Scene], Facts]] = {
    "parallel": parallel,
    "child": child,
    "client-leaves": client_leaves,
    "killed-conductor": killed_conductor,  # last, since the scene has no conductor afterwards
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; return 1 if one does not show its promise."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.show", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*SCRIPTED, "tokens"]
    parser.add_argument("case", nargs="*", metavar="CASE", help=f"of {', '.join(names)}; all where none is named")
    parser.add_argument("--conductor", default="embedded", help="of `tokens`: embedded, or a policy directory")
    parser.add_argument("--out", type=Path, help="write what was shown as JSON too")
    options = parser.parse_args(argv)
    if unknown := [case for case in options.case if case not in names]:
        parser.error(f"no case `{unknown[0]}`; there are {', '.join(names)}")
    wanted = options.case or names
    shown: Facts = {}
    try:
        if scripted := [case for name, case in SCRIPTED.items() if name in wanted]:
            with scene() as on:
                for case in scripted:
                    shown[case.__name__.replace("_", "-")] = case(on)
        if "tokens" in wanted:
            shown["tokens"] = tokens(options.conductor)
    except NotShown as failed:
        print(f"not shown: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.out:
        write_atomic(options.out, json.dumps(shown, indent=2, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
