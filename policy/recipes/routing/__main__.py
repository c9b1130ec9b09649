"""`make demo-routing`: `model: baton` learns from outcomes which of two workers answers what. About a minute, no torch.

Starts two workers over HTTP, a cheap one that is wrong on one of two kinds of question and a dear one that is always
right, and a gateway on them as `make serve POOL=…` does, with its PostgreSQL and Redis. Then a client asks one question
after another and says after each reply whether it was right; it never says which kind of question it is. The table says
who answered what. With `--cheap-never-right` the cheap worker is wrong on both kinds; with `--cheap-s` and `--dear-s`
the workers take so many seconds.

Status 0 if the last 60 requests show that it learnt, 1 if they do not or a request failed, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TextIO

import httpx

from policy.recipes.report import write_block
from policy.recipes.routing.tally import RoutedAnswer, RoutingTally
from policy.recipes.routing.world import Sum, pool_yaml, questions
from policy.recipes.stack import Gateway, RecipeFailed, gateway, program, temporary_directory

REQUEST_S = 60.0
REDRAWN_S, LOGGED_EVERY = 0.1, 30
OK = 200


class Screen:
    """The table: redrawn in place on a terminal; elsewhere a line every LOGGED_EVERY requests."""

    def __init__(self, stream: TextIO, tally: RoutingTally) -> None:
        self._stream, self._tally = stream, tally
        self._live = stream.isatty()
        self._began_s = self._drawn_s = time.monotonic()
        self._lines = 0

    def answered(self) -> None:
        """Show one more answer."""
        if self._live and time.monotonic() - self._drawn_s >= REDRAWN_S:
            self._draw()
        elif not self._live and len(self._tally.answers) % LOGGED_EVERY == 0:
            print(self._tally.line(), file=self._stream, flush=True)

    def end(self) -> None:
        """Show the whole table once more."""
        self._draw()

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        table = self._tally.table(self._drawn_s - self._began_s, colour=self._live)
        back = f"\x1b[{self._lines}A\x1b[J" if self._live and self._lines else ""
        self._lines = table.count("\n") + 1
        print(f"{back}{table}", file=self._stream, flush=True)


async def ask_all(
    served: Gateway, asked: Sequence[Sum], tally: RoutingTally, screen: Screen, options: argparse.Namespace
) -> None:
    """Ask the questions evenly over the given seconds, at most `clients` at a time and no more than can be asked then.
    Send an outcome for each reply."""
    began_s, slots = time.monotonic(), asyncio.Semaphore(options.clients)
    headers = {"authorization": f"Bearer {served.data_key}"}
    async with httpx.AsyncClient(base_url=served.base_url, headers=headers, timeout=REQUEST_S) as client:

        async def one(question: Sum) -> None:
            async with slots:
                answer = await ask(client, question)
            tally.failed += answer is None
            tally.answers += [answer] if answer else []
            screen.answered()

        async with asyncio.TaskGroup() as group:
            for index, question in enumerate(asked):
                due_s = began_s + options.seconds * index / len(asked)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                async with slots:  # no more wait than are asked
                    group.create_task(one(question))
                if time.monotonic() > began_s + options.seconds:
                    break


async def ask(client: httpx.AsyncClient, question: Sum) -> RoutedAnswer | None:
    """One request and its outcome. None if either failed."""
    body = {"model": "baton", "messages": [{"role": "user", "content": question.text}]}
    reply = await client.post("/chat/completions", json=body)
    if reply.status_code != OK:
        print(f"a request failed: {reply.status_code} {reply.text[:300]}", file=sys.stderr, flush=True)
        return None
    right = reply.json()["choices"][0]["message"]["content"] == question.answer
    judged = await client.post("/outcomes", json={"rollout_id": reply.headers["x-baton-rollout-id"], "value": right})
    if not judged.is_success:
        print(f"an outcome failed: {judged.status_code} {judged.text[:300]}", file=sys.stderr, flush=True)
        return None
    worker = reply.headers["x-baton-workers"].rpartition(",")[2]
    return RoutedAnswer(question.kind, worker, right, Decimal(reply.headers["x-baton-cost-usd"]))


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    arguments = argparse.ArgumentParser(
        prog="python -m policy.recipes.routing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("--requests", type=int, default=300, help="at most; default 300")
    arguments.add_argument("--seconds", type=float, default=45.0, help="over which they are spread; default 45")
    arguments.add_argument("--clients", type=int, default=8, help="requests in flight at most; default 8")
    arguments.add_argument("--cheap-s", type=float, default=0.0, help="seconds that the cheap worker takes")
    arguments.add_argument("--dear-s", type=float, default=0.0, help="seconds that the dear worker takes")
    arguments.add_argument("--cheap-never-right", action="store_true", help="the cheap worker is wrong on both kinds")
    arguments.add_argument("--seed", type=int, default=0, help="another seed, other questions")
    arguments.add_argument("--write", type=Path, metavar="PAGE", help="put the last table into that page's block")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the status is in the module's docstring."""
    options = parser().parse_args(argv)
    if options.requests < 1 or options.clients < 1:
        parser().error("--requests and --clients are at least 1")
    tally, began_s = RoutingTally(options.requests), time.monotonic()
    print("Two workers, a gateway, PostgreSQL and Redis start; then questions are asked.", flush=True)
    delays = ["--cheap-s", str(options.cheap_s), "--dear-s", str(options.dear_s)]
    delays += ["--cheap-never-right"] if options.cheap_never_right else []
    try:
        with (
            temporary_directory() as directory,
            program("workers", directory, "policy.recipes.routing.world", *delays) as workers,
        ):
            pool = directory / "pool.yaml"
            pool.write_text(pool_yaml(workers.url), encoding="utf-8")
            with gateway(directory, conductor="", pool=pool, defaults={}) as served:
                screen = Screen(sys.stdout, tally)
                asyncio.run(ask_all(served, questions(options.requests, options.seed), tally, screen, options))
                screen.end()
    except KeyboardInterrupt:
        return 130
    except RecipeFailed as broken:
        print(broken, file=sys.stderr)
        return 1
    learnt, said = tally.verdict(cheap_never_right=options.cheap_never_right)
    print(f"\n{said} The whole took {time.monotonic() - began_s:.0f} s.", flush=True)
    if options.write:
        write_block(options.write, "make demo-routing", f"```\n{tally.table(options.seconds)}\n\n{said}\n```")
    return 0 if learnt else 1


if __name__ == "__main__":
    sys.exit(main())
