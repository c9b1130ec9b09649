"""The demo's world: two kinds of question, and two workers behind HTTP of which the cheap one is wrong on a kind.

`python -m policy.recipes.routing.world --port 0 --port-file FILE` serves both workers until SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml

from gateway.core.money.amounts import Usage, cost_nano
from gateway.core.pool.workers import PoolFile, Price
from policy.simulators.server import RequestRefusal, SimulatedReply, WorkerServer, last_user_text, serve

Kind = Literal["sum", "product"]
KINDS: tuple[Kind, ...] = ("sum", "product")
CHEAP, DEAR = "cheap", "dear"
SUM_SHARE = 2 / 3  # of the questions; the cheap worker is right on these
PROMPT_TOKENS, REPLY_TOKENS = 20, 250  # reasoning, of which the reply shows the result
PRICES = {CHEAP: ("0.10", "0.40"), DEAR: ("3", "15")}  # dollars per million tokens, input and output
_QUESTION = re.compile(r"(\d+) (plus|times) (\d+)")


@dataclass(frozen=True, slots=True)
class Sum:
    """A question of the demo: two numbers, to be added or multiplied."""

    kind: Kind
    left: int
    right: int

    @property
    def text(self) -> str:
        """The question as a client asks it."""
        word = "plus" if self.kind == "sum" else "times"
        return f"How much is {self.left} {word} {self.right}? Give the number alone."

    @property
    def answer(self) -> str:
        """The right answer."""
        return str(self.left + self.right if self.kind == "sum" else self.left * self.right)


def questions(n: int, seed: int) -> list[Sum]:
    """`n` questions, the same for the same seed."""
    rng = Random(f"routing {seed}")
    return [
        Sum("sum" if rng.random() < SUM_SHARE else "product", rng.randint(12, 98), rng.randint(12, 98))
        for _ in range(n)
    ]


def usd(worker: str, calls: int = 1) -> Decimal:
    """Dollars of so many calls of a worker: every question and every reply has the same number of tokens."""
    prompt, reply = map(Decimal, PRICES[worker])
    price = Price(input_usd_per_mtok=prompt, output_usd_per_mtok=reply)
    return Decimal(calls * cost_nano(price, Usage(PROMPT_TOKENS, REPLY_TOKENS))) / 10**9


class PairOfWorkers:
    """Both workers. `dear` is always right. `cheap` is right on sums alone, or never. `delays_s`: by name."""

    workers: Sequence[str] = (CHEAP, DEAR)

    def __init__(self, delays_s: Mapping[str, float], *, cheap_never_right: bool = False) -> None:
        self._delays_s = delays_s
        self._wrong: Sequence[Kind] = KINDS if cheap_never_right else ("product",)

    def say(self, worker: str, body: Mapping[str, Any]) -> SimulatedReply:
        """A number. Raises RequestRefusal if there is no question in the conversation."""
        read = _QUESTION.search(last_user_text(body))
        if read is None:
            raise RequestRefusal(400, "no_question", "ask how much one number plus or times another is")
        left, word, right = read.groups()
        asked = Sum("sum" if word == "plus" else "product", int(left), int(right))
        wrong = worker == CHEAP and asked.kind in self._wrong
        text = str(int(asked.answer) + 10) if wrong else asked.answer
        return SimulatedReply([[text]], PROMPT_TOKENS, REPLY_TOKENS, first_s=self._delays_s[worker])


def pool_yaml(url: str) -> str:
    """The pool file: two workers of which nothing is said but the price."""
    workers = [
        {
            "name": name,
            "handle": name,
            "kind": "openai",
            "model": name,
            "url": f"{url}/w/{name}/v1",
            "description": "a language model",
            "price": {"input_usd_per_mtok": PRICES[name][0], "output_usd_per_mtok": PRICES[name][1]},
            "output_tokens_max": 512,
        }
        for name in (CHEAP, DEAR)
    ]
    document = {"workers": workers, "pools": {"default": [CHEAP, DEAR]}}
    PoolFile.model_validate(document)
    return yaml.safe_dump(document, sort_keys=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve both workers."""
    arguments = argparse.ArgumentParser(prog="python -m policy.recipes.routing.world", description=__doc__)
    arguments.add_argument("--port", type=int, default=0)
    arguments.add_argument("--port-file", type=Path, required=True)
    arguments.add_argument("--cheap-s", type=float, default=0.0)
    arguments.add_argument("--dear-s", type=float, default=0.0)
    arguments.add_argument("--cheap-never-right", action="store_true")
    options = arguments.parse_args(argv)
    delays_s = {CHEAP: options.cheap_s, DEAR: options.dear_s}
    speaker = PairOfWorkers(delays_s, cheap_never_right=options.cheap_never_right)
    asyncio.run(serve(WorkerServer(speaker).app(), "127.0.0.1", options.port, options.port_file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
