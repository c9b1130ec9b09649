"""A scripted stand-in for the conductor: it answers every planning call with its present script.

It exists to show the executor (overlap, depth caps, cancellation, loss of the conductor) with plans one can read. It is
no model, plans nothing, and nothing measured with it says anything about planning. It speaks vLLM's shape, streamed:
token ids and log-probs with every piece. A token is one byte of the plan and its id is that byte; each log-prob is 0,
since a script leaves nothing to chance. It ignores the schema it is sent, which no real server would.

    python -m bench.scripted_conductor --port 0 --port-file F
    PUT /script {"plan": {"steps": […]}, "gap_s": 0.001, "pause_s": 0}    GET /script → how its calls have ended

`gap_s` passes before each byte; `pause_s` once, after the last step has been begun and before it is finished. With
`"whole": true` the events come together, once all of that has passed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from tests.upstreams.server import EVENTS, Reply, Request, event, json_reply, serve

MODEL = "scripted"
ONE_STEP: dict[str, Any] = {"steps": [{"worker": "atlas", "task": None, "see": []}]}
BYTES_A_CHUNK = 8


class Scripted:
    """The server's state: the script, and how many calls are open and have ended, by end."""

    def __init__(self) -> None:
        self.script: dict[str, Any] = {"plan": ONE_STEP, "gap_s": 0.0, "pause_s": 0.0}
        self.calls = {"open": 0, "done": 0, "cancelled": 0}

    def answer(self, request: Request) -> Reply:
        """Answer a request by its route."""
        if request.path == "/v1/models":
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "script"}
            return json_reply({"object": "list", "data": [model]})
        if request.path == "/v1/chat/completions":
            return Reply(headers=EVENTS, pieces=self._complete(request.body))
        if request.path != "/script":
            return Reply(status=404)
        if request.method == "PUT":
            self.script = {"gap_s": 0.0, "pause_s": 0.0, **request.body}
        return json_reply({"script": self.script, "calls": self.calls})

    async def _complete(self, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        self.calls["open"] += 1
        end = "cancelled"
        try:
            script, kept = dict(self.script), list[bytes]()
            async with aclosing(self._events(body, script)) as events:
                async for each in events:
                    if script.get("whole"):
                        kept.append(each)
                    else:
                        yield each
            if kept:
                yield b"".join(kept)
            end = "done"
        finally:
            self.calls["open"] -= 1
            self.calls[end] += 1

    async def _events(self, body: Mapping[str, Any], script: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        text = json.dumps(script["plan"], separators=(",", ":"))
        prompt_ids = list("\n".join(message["content"] for message in body["messages"]).encode())
        yield event({**chunk_of("", None), "prompt_token_ids": prompt_ids})
        for piece in pieces(text):
            if piece is None:
                await asyncio.sleep(script["pause_s"])
                continue
            await asyncio.sleep(script["gap_s"] * len(piece))
            yield event(chunk_of(piece, None))
        yield event(chunk_of("", "stop"))
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(text)}
        usage["total_tokens"] = sum(usage.values())
        yield event({**chunk_of("", None), "choices": [], "usage": usage})
        yield event("[DONE]")


def pieces(plan_text: str) -> list[str | None]:
    """The plan in chunks; None marks the pause inside the last step."""
    begun = plan_text.rfind('{"worker"') + 1
    head, tail = plan_text[:begun], plan_text[begun:]
    return [*_chunks(head), None, *_chunks(tail)]


def _chunks(text: str) -> list[str]:
    return [text[at : at + BYTES_A_CHUNK] for at in range(0, len(text), BYTES_A_CHUNK)]


def chunk_of(text: str, finish_reason: str | None) -> dict[str, Any]:
    """One streamed chunk, as vLLM sends it with `logprobs` and `return_token_ids`."""
    entries = [{"token": char, "logprob": 0.0, "bytes": [ord(char)], "top_logprobs": []} for char in text]
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    choice["logprobs"] = {"content": entries} if text else None
    choice["token_ids"] = list(text.encode())
    return {"id": "plan-scripted", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": [choice]}


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--port-file", type=Path, required=True, help="written once the socket listens")
    options = parser.parse_args(argv)
    asyncio.run(serve(Scripted().answer, options.port, options.port_file))


if __name__ == "__main__":
    main()
