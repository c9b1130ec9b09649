"""The OpenAI-shaped HTTP server under the arena's and the replay's workers: one app, one worker a path.

`/w/<worker>/v1/chat/completions` (whole or streamed), `/w/<worker>/v1/models`, `/healthz`. What a worker says comes
from a `Speaker`; shapes, `n`, `max_tokens`, `stop`, usage, latency and error bodies are the same for all.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from gateway.core.money.amounts import Usage
from gateway.core.openai.reply import DONE, sse
from gateway.core.openai.vendors.usage import usage_body
from gateway.files import write_atomic

BODY_BYTES_MAX = 4 * 2**20
CHOICES_MAX = 16
DRAIN_S = 5.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RequestRefusal(Exception):
    """A request the server answers with an OpenAI error object."""

    def __init__(self, status: int, code: str, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.kind = status, code, message, kind

    def response(self) -> web.Response:
        """The error as OpenAI words it."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return web.json_response({"error": error}, status=self.status)


@dataclass(frozen=True, slots=True)
class SimulatedReply:
    """What a worker says to one request: a text per choice, in the tokens it is streamed by, and how long it takes.

    `completion_tokens` None: the pieces are the tokens. `first_s` passes before the first piece, `piece_s` between two.
    `cost_nano`: what the whole reply cost, where that is known; None: its tokens × the worker's price.
    """

    choices: Sequence[Sequence[str]]
    prompt_tokens: int
    completion_tokens: int | None = None
    first_s: float = 0.0
    piece_s: float = 0.0
    cost_nano: int | None = None
    finish_reason: str = "stop"  # where neither `max_tokens` nor `stop` cuts the reply
    refusal: bool = False  # the text is the message's `refusal`


class Speaker(Protocol):
    """A set of workers behind one server."""

    @property
    def workers(self) -> Sequence[str]:
        """Names, as they stand in paths and as model ids."""
        ...

    def say(self, worker: str, body: Mapping[str, Any]) -> SimulatedReply:
        """What the worker says. Raises RequestRefusal."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """A choice after `max_tokens` and `stop`."""

    pieces: Sequence[str]
    finish_reason: str
    tokens: int


def cut(pieces: Sequence[str], tokens: int | None, tokens_max: int | None, stops: Sequence[str]) -> Cut:
    """Stop sequences cut the text before them; `tokens_max` cuts pieces, pro rata where a piece is not a token."""
    total = len(pieces) if tokens is None else tokens
    texts, reason = list(pieces), "stop"
    text = "".join(texts)
    ends = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    if ends:
        texts = _until(texts, min(ends))
    used = -(-total * len(texts) // len(pieces)) if pieces else 0
    if tokens_max is not None and used > tokens_max:
        texts = texts[: max(1, len(pieces) * tokens_max // total)]
        used, reason = tokens_max, "length"
    return Cut(texts, reason, used)


def _until(pieces: Sequence[str], chars: int) -> list[str]:
    texts: list[str] = []
    for piece in pieces:
        if chars <= 0:
            break
        texts.append(piece[:chars])
        chars -= len(piece)
    return texts


def content_text(content: object) -> str:
    """The text of a message's content: a string, or its text parts joined. Raises RequestRefusal on anything else."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    raise RequestRefusal(400, "invalid_messages", "a message's `content` must be a text or a list of parts")


def last_user_text(body: Mapping[str, Any]) -> str:
    """The text of the last user message. Raises RequestRefusal where there is none."""
    for message in reversed(body["messages"]):
        if isinstance(message, Mapping) and message.get("role") == "user":
            return content_text(message.get("content"))
    raise RequestRefusal(400, "invalid_messages", "`messages` holds no user message")


class WorkerServer:
    """The aiohttp application over one Speaker."""

    def __init__(self, speaker: Speaker, speed: float = 1.0, unknown_code: str = "model_not_found") -> None:
        if speed <= 0:
            raise ValueError("speed must be above 0")
        self._speaker = speaker
        self._speed = speed
        self._unknown_code = unknown_code
        self._calls = {"open": 0, "done": 0, "cancelled": 0}

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/w/{worker:.+}/v1/models", self._models)
        app.router.add_post("/w/{worker:.+}/v1/chat/completions", self._counted)
        return app

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "workers": list(self._speaker.workers), "calls": self._calls})

    async def _models(self, request: web.Request) -> web.Response:
        try:
            name = self._worker(request)
        except RequestRefusal as refusal:
            return refusal.response()
        model = {"id": name, "object": "model", "created": 0, "owned_by": "simulator"}
        return web.json_response({"object": "list", "data": [model]})

    async def _counted(self, request: web.Request) -> web.StreamResponse:
        """Counts calls by how they end; a client that leaves cancels its call."""
        self._calls["open"] += 1
        end = "cancelled"
        try:
            try:
                response = await self._complete(request)
            except RequestRefusal as refusal:
                response = refusal.response()
            end = "done"
            return response
        finally:
            self._calls["open"] -= 1
            self._calls[end] += 1

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        name = self._worker(request)
        body = await _body(request)
        if body.get("model") != name:
            raise RequestRefusal(
                404, "model_not_found", f"model `{body.get('model')}` is not served here; it is `{name}`"
            )
        answer = self._speaker.say(name, body)
        cuts = cuts_of(answer, body)
        base = {"id": _completion_id(name, body), "created": int(time.time()), "model": name}
        if body.get("stream"):
            usage = _usage(answer, cuts)
            return await self._stream(request, answer, cuts, base, usage, body)
        await asyncio.sleep(seconds(answer, cuts) / self._speed)
        return web.json_response({**base, **completion(answer, cuts)})

    def _worker(self, request: web.Request) -> str:
        name = request.match_info["worker"]
        if name not in self._speaker.workers:
            raise RequestRefusal(404, self._unknown_code, f"no worker `{name}` here; GET /healthz lists them")
        return name

    async def _stream(
        self,
        request: web.Request,
        answer: SimulatedReply,
        cuts: Sequence[Cut],
        base: Mapping[str, Any],
        usage: Mapping[str, Any],
        body: Mapping[str, Any],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        await asyncio.sleep(answer.first_s / self._speed)
        await response.prepare(request)
        options = body.get("stream_options")
        with_usage = bool(isinstance(options, Mapping) and options.get("include_usage"))
        chunk = {**base, "object": "chat.completion.chunk", **({"usage": None} if with_usage else {})}
        for index, choice in enumerate(cuts):
            for at, piece in enumerate(choice.pieces):
                delta = _choice(index, "delta", piece, None, role=at == 0, refusal=answer.refusal)
                await response.write(sse({**chunk, "choices": [delta]}))
                await asyncio.sleep(answer.piece_s / self._speed)
            end = {"index": index, "delta": {}, "logprobs": None, "finish_reason": choice.finish_reason}
            await response.write(sse({**chunk, "choices": [end]}))
        if with_usage:
            await response.write(sse({**chunk, "choices": [], "usage": usage}))
        await response.write(DONE)
        await response.write_eof()
        return response


def cuts_of(answer: SimulatedReply, body: Mapping[str, Any]) -> list[Cut]:
    """The choices of what was said, as far as the request lets them go. Raises RequestRefusal on bad bounds."""
    cuts = [cut(c, answer.completion_tokens, tokens_max_of(body), _stops(body)) for c in answer.choices]
    return [
        replace(c, finish_reason=answer.finish_reason) if c.finish_reason == "stop" and _is_complete(c, pieces) else c
        for c, pieces in zip(cuts, answer.choices, strict=True)
    ]


def _is_complete(one: Cut, pieces: Sequence[str]) -> bool:
    return list(one.pieces) == list(pieces)


def seconds(answer: SimulatedReply, cuts: Sequence[Cut]) -> float:
    """Simulated seconds until the whole reply is there."""
    return answer.first_s + answer.piece_s * max((len(c.pieces) for c in cuts), default=0)


def bill_nano(answer: SimulatedReply, cuts: Sequence[Cut]) -> int | None:
    """What the reply cost as far as it was let go: a reply that was cut costs its share by tokens, rounded up. None
    where the cost is not known."""
    if answer.cost_nano is None or not answer.completion_tokens:
        return answer.cost_nano
    total, used = answer.completion_tokens * len(answer.choices), sum(c.tokens for c in cuts)
    return -(-answer.cost_nano * used // total)


def completion(answer: SimulatedReply, cuts: Sequence[Cut]) -> dict[str, Any]:
    """The whole reply as OpenAI words it, without id, time and model."""
    choices = [
        _choice(i, "message", "".join(c.pieces), c.finish_reason, refusal=answer.refusal) for i, c in enumerate(cuts)
    ]
    return {"object": "chat.completion", "choices": choices, "usage": _usage(answer, cuts)}


def _choice(
    index: int, key: str, text: str, finish_reason: str | None, *, role: bool = True, refusal: bool = False
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"} if role else {}
    message["refusal" if refusal else "content"] = text
    if key == "message":
        message.setdefault("refusal", None)
        message.setdefault("content", None)
    return {"index": index, key: message, "logprobs": None, "finish_reason": finish_reason}


def _usage(answer: SimulatedReply, cuts: Sequence[Cut]) -> dict[str, Any]:
    """Tokens, and where it is known what the reply cost, in dollars."""
    return usage_body(Usage(answer.prompt_tokens, sum(c.tokens for c in cuts), bill_nano=bill_nano(answer, cuts)))


def _completion_id(name: str, body: Mapping[str, Any]) -> str:
    """The same request gets the same id: the server is reproducible."""
    data = json.dumps([name, body], sort_keys=True, ensure_ascii=False)
    return "chatcmpl-" + hashlib.blake2b(data.encode(errors="surrogatepass"), digest_size=12).hexdigest()


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        raise RequestRefusal(400, "invalid_json", "the body is not JSON") from None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise RequestRefusal(400, "invalid_messages", "`messages` must be a list with at least one message")
    return body


def choices_of(body: Mapping[str, Any]) -> int:
    """`n` of a body. Raises RequestRefusal outside 1 to CHOICES_MAX."""
    n = body.get("n")
    n = 1 if n is None else n
    if not isinstance(n, int) or not 1 <= n <= CHOICES_MAX:
        raise RequestRefusal(400, "invalid_n", f"`n` must be between 1 and {CHOICES_MAX}")
    return n


def tokens_max_of(body: Mapping[str, Any]) -> int | None:
    """The most tokens that a request lets its reply have; None: no bound."""
    for key in ("max_completion_tokens", "max_tokens"):
        value = body.get(key)
        if value is not None:
            if not isinstance(value, int) or value < 1:
                raise RequestRefusal(400, "invalid_max_tokens", f"`{key}` must be a whole number of at least 1")
            return value
    return None


def _stops(body: Mapping[str, Any]) -> list[str]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise RequestRefusal(400, "invalid_stop", "`stop` must be a text or a list of texts")
    return stops


async def serve(app: web.Application, host: str, port: int, port_file: Path | None) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is in flight (DRAIN_S at most). Port 0 takes a free one; the port
    file appears in one step, once the socket listens."""
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=DRAIN_S, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = int(runner.addresses[0][1])
        if port_file is not None:
            await asyncio.to_thread(write_atomic, port_file, f"{bound}\n")
        stop = asyncio.Event()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
        await runner.cleanup()
