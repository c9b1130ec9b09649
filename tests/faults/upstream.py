"""A worker that keeps its own bill: what it charges is decided here, and never read from anything of Baton's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tests.upstreams.server import EVENTS, Reply, Request, Server, event, json_reply

PROMPT_TOKENS, REPLY_WORDS = 12, ("one", "two", "three", "four", "five", "six")
CANARY = "sk-canary-4f1d0c2b9a8e7d6c5b4a3f2e1d0c9b8a"  # the provider's key, which must show up nowhere


@dataclass(slots=True)
class Bill:
    """One call as its provider bills it. `tokens` are those it has produced when the call ended, however it ended."""

    prompt_tokens: int
    body: dict[str, Any]
    completion_tokens: int = 0
    ended: str = "open"  # done | gone (the caller hung up) | broken (by us)

    def nano(self, input_nano: int, output_nano: int) -> int:
        """By prices in nano-dollars a token."""
        return self.prompt_tokens * input_nano + self.completion_tokens * output_nano


Behaviour: TypeAlias = Callable[["Upstream", Bill], Awaitable[Reply]]


class Upstream(Server):
    """Serves OpenAI chat completions, whatever the path. `behave` answers; the default is a good worker."""

    def __init__(self) -> None:
        super().__init__(self._charge)
        self.delay_s = self.word_s = 0.0
        self.behave: Behaviour | None = None
        self.bills: list[Bill] = []

    @property
    def base(self) -> str:
        """The `url` of a pool file."""
        return f"{self.url}/v1"

    def total_nano(self, input_nano: int, output_nano: int) -> int:
        """The whole bill."""
        return sum(bill.nano(input_nano, output_nano) for bill in self.bills)

    async def _charge(self, request: Request) -> Reply:
        if not request.content:  # a look at whether it is there
            return json_reply({"object": "list", "data": []})
        bill = Bill(max(PROMPT_TOKENS, len(request.content) // 16), request.body)  # fewer are not believed
        self.bills.append(bill)
        try:
            reply = await (self.behave or good)(self, bill)
        except asyncio.CancelledError:
            bill.ended = "gone"
            raise
        if reply.pieces is not None:
            return replace(reply, pieces=_billed(bill, reply.pieces, cut=reply.cut))
        bill.ended = "done"
        return reply


async def _billed(bill: Bill, pieces: AsyncGenerator[bytes, None], *, cut: bool) -> AsyncGenerator[bytes, None]:
    bill.ended = "gone"  # unless the last piece leaves
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece
    bill.ended = "broken" if cut else "done"


async def good(upstream: Upstream, bill: Bill) -> Reply:
    """Answers as a good worker does, whole or streamed, with its usage."""
    await asyncio.sleep(upstream.delay_s)
    words = REPLY_WORDS[: bill.body.get("max_tokens", bill.body.get("max_completion_tokens", len(REPLY_WORDS)))]
    if bill.body.get("stream"):
        return Reply(headers=EVENTS, pieces=_words(bill, words, upstream))
    bill.completion_tokens = len(words)
    return json_reply(completion(" ".join(words), usage(bill)))


async def _words(bill: Bill, words: tuple[str, ...], upstream: Upstream) -> AsyncGenerator[bytes, None]:
    for word in words:
        bill.completion_tokens += 1
        yield event(chunk({"content": f"{word} "}))
        await asyncio.sleep(upstream.word_s)
    yield event(chunk({}, "stop")) + event({**chunk({}), "choices": [], "usage": usage(bill)}) + event("[DONE]")


def usage(bill: Bill) -> dict[str, int]:
    return {"prompt_tokens": bill.prompt_tokens, "completion_tokens": bill.completion_tokens}


def completion(text: str, used: dict[str, int] | None = None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": []}
    return {**body, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": used}


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
