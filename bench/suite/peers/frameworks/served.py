"""A workflow of three parallel steps and a merge behind a chat completion, as a small application would serve it.

It imports nothing of Baton's product, for it runs in the environment of a framework.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from tests.upstreams.server import Reply, Request, json_reply, serve

INSTRUCTIONS = ("Work it out, way 1.", "Work it out, way 2.", "Work it out, way 3.")
MERGE = "Merge the answers above."
NO_KEY = "none"
Workflow = Callable[[str], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Models:
    """The upstream and the models of the steps and the merge."""

    url: str
    steps: tuple[str, str, str]
    merge: str


def merging(replies: list[str]) -> str:
    """The task of the merge."""
    return "\n\n".join([*replies, MERGE])


def main(build: Callable[[Models], Workflow]) -> None:
    """Serve the workflow until SIGTERM: `python -m … URL STEP STEP STEP MERGE --port 0 --port-file FILE`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("models", nargs=4)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", type=Path, required=True)
    options = parser.parse_args()
    first, second, third, merge = options.models
    uvloop.run(_serve(build, Models(options.url, (first, second, third), merge), options.port, options.port_file))


async def _serve(build: Callable[[Models], Workflow], models: Models, port: int, port_file: Path) -> None:
    workflow = build(models)

    async def reply(question: str) -> Reply:
        message = {"role": "assistant", "content": await workflow(question)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return json_reply({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})

    def answer(request: Request) -> Reply | Awaitable[Reply]:
        if request.method != "POST":
            return json_reply({})
        return reply(str(request.body["messages"][-1]["content"]))

    await serve(answer, port, port_file)
