"""The arena's workers over HTTP: the same replies as `world.run_step`, with tokens, latency and, if asked, failures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from policy.simulators.arena.workers import ArenaWorker, Pool
from policy.simulators.arena.world import chance, prompt_tokens, read_prompt, run_step
from policy.simulators.server import RequestRefusal, SimulatedReply, choices_of, content_text

_PIECE = re.compile(r"\s*\w{1,6}|\s*[^\w\s]|\s+$")


def salt_of(arena_seed: int, request_seed: object, choice: int) -> str:
    """The salt of one choice: the same request to the same arena always gets the same reply."""
    return f"{arena_seed}:{'' if request_seed is None else request_seed}:{choice}"


def pieces(text: str) -> list[str]:
    """A text in the tokens it is billed and streamed by; joined they give it back."""
    return _PIECE.findall(text)


class ArenaSpeaker:
    """The workers of a pool that are programs here (`vote` and `self` live in the gateway)."""

    def __init__(self, pool: Pool, seed: int) -> None:
        self._pool: dict[str, ArenaWorker] = {worker.name: worker for worker in pool if worker.kind == "openai"}
        self._seed = seed
        self._calls = dict.fromkeys(self._pool, 0)

    @property
    def workers(self) -> Sequence[str]:
        """Names in pool order."""
        return tuple(self._pool)

    def say(self, worker: str, body: Mapping[str, Any]) -> SimulatedReply:
        """What the worker replies. Raises RequestRefusal on a bad prompt, or when a failure was asked for."""
        who = self._pool[worker]
        self._fail(who)
        texts = [_text(message) for message in body["messages"]]
        try:
            prompt = read_prompt(body["messages"], texts)
        except ValueError as error:
            raise RequestRefusal(400, "invalid_messages", str(error)) from None
        salts = [salt_of(self._seed, body.get("seed"), choice) for choice in range(choices_of(body))]
        replies = [run_step(who, prompt.question, prompt.task, prompt.seen, salt) for salt in salts]
        return SimulatedReply(
            [pieces(reply) for reply in replies], prompt_tokens(texts), None, who.base_s, who.per_token_s
        )

    def _fail(self, worker: ArenaWorker) -> None:
        """Failures are drawn by the worker's call count, so that a retry may succeed and a run can be repeated."""
        call = self._calls[worker.name]
        self._calls[worker.name] = call + 1
        if chance("500", worker.name, self._seed, call) < worker.error_500_rate:
            raise RequestRefusal(500, "simulated_failure", "this worker was told to fail now and then", "server_error")
        if chance("429", worker.name, self._seed, call) < worker.error_429_rate:
            raise RequestRefusal(
                429, "rate_limit_exceeded", "this worker was told to be busy now and then", "rate_limit_error"
            )


def _text(message: object) -> str:
    if not isinstance(message, Mapping):
        raise RequestRefusal(400, "invalid_messages", "each message must be an object")
    return content_text(message["content"]) if message.get("content") is not None else ""
