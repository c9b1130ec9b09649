"""Replay workers: recorded answers of real models, served as OpenAI-compatible workers.

`python -m policy.simulators.replay serve FILE` answers (model, question) with what that model really said, with its
real tokens; a question or model without a recording is a 404 `no_recording`, never an invented answer. `… pool FILE`
prints the pool file for it. `policy.simulators.recordings` reads FILE and says what its lines hold.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import yaml
from aiohttp import web

from gateway.core.loop.compose import SEEN_HEAD
from gateway.core.money.amounts import Usage, nano_to_usd
from gateway.core.openai.vendors.usage import usage_body
from gateway.core.pool.workers import VOTE_URL, PoolFile
from policy.simulators import HANDLES
from policy.simulators.recordings import (
    BadRecording,
    RecordedAnswer,
    RecordedCheck,
    Recording,
    Recordings,
    conversation_key,
    dearest_check,
    load,
    models_in,
    question_key,
    read_prices,
)
from policy.simulators.server import (
    RequestRefusal,
    SimulatedReply,
    WorkerServer,
    choices_of,
    last_user_text,
    serve,
    tokens_max_of,
)

CHECK, CHECK_PATH = "check", "/check"
CHECK_SAYS = "says whether a recorded check found the last reply it sees valid"
CONTEXT_TOKENS = 32_768
OUTPUT_TOKENS_MAX = 8_192
_PIECE = re.compile(r"\s*\S+|\s+$")


class ReplaySpeaker:
    """Recorded models as workers. Without `draws_seed` a model says its recorded answer, however often it is asked.
    With it, repeated calls of a model on a question get the recorded draws in turn, the answer first, then its
    `samples`, and begin again after the last. Seed 0 serves samples in recorded order; another seed shuffles them."""

    def __init__(
        self,
        recordings: Recordings,
        first_s: float = 0.0,
        tokens_per_s: float = 0.0,
        draws_seed: int | None = None,
    ) -> None:
        self._recordings = recordings
        self._first_s = first_s
        self._draws_seed = draws_seed
        self._calls: Counter[tuple[str, bytes]] = Counter()
        self._token_s = 1 / tokens_per_s if tokens_per_s else 0.0

    @property
    def workers(self) -> Sequence[str]:
        """Models, in the order asked for."""
        return self._recordings.models

    def say(self, worker: str, body: Mapping[str, Any]) -> SimulatedReply:
        """The reply of that model to the last user message. Raises RequestRefusal(404) where nothing is recorded:
        for another question, another wording, or more than one choice's worth of answers; and the recorded error."""
        if choices_of(body) != 1:
            raise RequestRefusal(404, "no_recording", "a call gets one recorded answer: `n` must be 1; repeat the call")
        key, recording = self._recording(body)
        answer = recording.answers.get(worker) if recording else None
        if recording is None or answer is None:
            raise RequestRefusal(404, "no_recording", f"nothing recorded of `{worker}` on this question, word for word")
        answer = self._draw(answer, (worker, key))
        if answer.error is not None:
            raise RequestRefusal(answer.error.status, answer.error.code, answer.error.message)
        pieces = _pieces(answer, body)
        return SimulatedReply(
            [pieces],
            recording.input_tokens if answer.input_tokens is None else answer.input_tokens,
            answer.output_tokens,
            self._first_s,
            self._token_s * answer.output_tokens / len(pieces),
            answer.cost_nano,
            answer.finish_reason,
            answer.refusal,
        )

    def _recording(self, body: Mapping[str, Any]) -> tuple[bytes, Recording | None]:
        """(key, recording) of the conversation without what Baton shows of other steps; else of its last user text."""
        recordings = self._recordings.by_question
        last = question_key(last_user_text(body))
        messages = [one for one in body["messages"] if isinstance(one, Mapping)]
        bare = [one for one in messages if not str(one.get("content", "")).startswith(SEEN_HEAD)]
        key = next((key for key in (conversation_key(messages), conversation_key(bare)) if key in recordings), last)
        return key, recordings.get(key)

    def check(self, task: str, seen: Sequence[Mapping[str, Any]]) -> RecordedCheck:
        """What the recorded check said of the last reply that a step sees. Raises RequestRefusal(404) where nothing was
        recorded of it, 400 where it sees none."""
        if not seen:
            raise RequestRefusal(400, "invalid_request", "check sees no replies; let its step see the one to check")
        recording = self._recordings.by_question.get(question_key(task))
        reply = seen[-1].get("reply")
        names = [] if recording is None else [n for n in recording.checks if recording.answers[n].text == reply]
        if recording is None or not names:
            raise RequestRefusal(404, "no_recording", "no check of this reply was recorded, word for word")
        return recording.checks[names[0]]

    def _draw(self, answer: RecordedAnswer, asked: tuple[str, bytes]) -> RecordedAnswer:
        if self._draws_seed is None or not answer.samples:
            return answer
        samples = list(answer.samples)
        if self._draws_seed:
            Random(f"{self._draws_seed} {asked[0]} {asked[1].hex()}").shuffle(samples)
        turn = self._calls[asked] % (1 + len(samples))
        self._calls[asked] += 1
        return samples[turn - 1] if turn else answer


def _pieces(answer: RecordedAnswer, body: Mapping[str, Any]) -> list[str]:
    """The text of an answer in the pieces that it is streamed by or cut at; one piece where it is neither."""
    limit = tokens_max_of(body)
    if not (body.get("stream") or body.get("stop")) and (limit is None or limit >= answer.output_tokens):
        return [answer.text]
    return _PIECE.findall(answer.text) or [""]


def pool_file(models: Sequence[str], prices: Mapping[str, Any], base_url: str, seed: int = 0) -> dict[str, Any]:
    """The pool `replay` as a pool file's document: neutral handles in random order, no tags, real prices, `vote`. Its
    workers bill what was recorded. Raises BadRecording on a model without a price."""
    handles = _handles(models, seed)
    entries = []
    for model in models:
        handle = handles[model]
        price = prices.get(model)
        if not isinstance(price, dict) or not {"input_usd_per_mtok", "output_usd_per_mtok"} <= set(price):
            raise BadRecording(f"no price of `{model}`: add input_usd_per_mtok and output_usd_per_mtok to the prices")
        cost = {key: f"{price[key]}" for key in ("input_usd_per_mtok", "output_usd_per_mtok")}
        entries.append(
            {
                "name": model,
                "handle": handle,
                "kind": "openai",
                "model": model,
                "url": f"{base_url.rstrip('/')}/w/{model}/v1",
                "description": "general language model (replayed answers)",
                "price": cost,
                "context_tokens": CONTEXT_TOKENS,
                "output_tokens_max": OUTPUT_TOKENS_MAX,
                "bills": True,
            }
        )
    free = {"input_usd_per_mtok": "0", "output_usd_per_mtok": "0"}
    majority = {"description": "gives the majority answer of the replies it sees", "tags": ["majority"], "price": free}
    entries.append({"name": "vote", "handle": "vote", "kind": "tool", "url": VOTE_URL, **majority})
    return {"workers": entries, "pools": {"replay": [entry["name"] for entry in entries]}, "default": "replay"}


def check_entry(url: str, dearest_nano: int) -> dict[str, Any]:
    """The recorded check as a tool of a pool file. Its price is what the dearest check cost: a call draws that, and is
    charged what the very check cost."""
    facts = {"name": CHECK, "handle": CHECK, "kind": "tool", "url": url, "description": CHECK_SAYS, "tags": [CHECK]}
    return facts | {"price": {"call_usd": nano_to_usd(dearest_nano)}, "bills": True}


def _handles(models: Sequence[str], seed: int) -> dict[str, str]:
    """A handle for each model, drawn by its name: it keeps the handle whatever order the models come in, and, but where
    two draw the same one, whatever other models there are."""
    handles: dict[str, str] = {}
    for model in sorted(models):
        free = [handle for handle in HANDLES if handle not in handles.values()]
        names = Random(f"{seed} {model}").sample(HANDLES, len(HANDLES))
        handles[model] = next(handle for handle in names if handle in free)
    return handles


def pool_yaml(path: Path, models: Sequence[str], prices: Mapping[str, Any], base_url: str, seed: int = 0) -> str:
    """`pool_file` as pool.yaml. Raises BadRecording on a model without a price."""
    document = pool_file(models, prices, base_url, seed)
    dearest_nano = dearest_check(path)
    if dearest_nano is not None:
        document["workers"].append(check_entry(f"{base_url.rstrip('/')}{CHECK_PATH}", dearest_nano))
        document["pools"]["replay"].append(CHECK)
    PoolFile.model_validate(document)
    head = f"# Recorded answers of {path.name}, served by `python -m policy.simulators.replay serve`.\n"
    return head + yaml.safe_dump(document, sort_keys=False, width=120)


async def answer_check(speaker: ReplaySpeaker, request: web.Request) -> web.Response:
    """The tool `check` over HTTP: `{"task", "seen"}` → `{"content": "valid" | "not valid", "usage": {"cost"}}`."""
    try:
        body = await request.json()
        check = speaker.check(str(body["task"]), [dict(one) for one in body["seen"]])
    except RequestRefusal as refusal:
        return refusal.response()
    except (ValueError, KeyError, TypeError):
        return RequestRefusal(400, "invalid_request", "send {task, seen: [{handle, task, reply}]}").response()
    usage = usage_body(Usage(bill_nano=check.cost_nano))
    return web.json_response({"content": check.says, "usage": usage})


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(prog="python -m policy.simulators.replay", description="Recorded answers as workers.")
    commands = top.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="serve every recorded model on one port until SIGTERM")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=0, help="0: a free one")
    server.add_argument("--port-file", type=Path, help="written once the socket listens")
    server.add_argument("--first-s", type=float, default=0.0, help="seconds before the first token")
    server.add_argument("--tokens-per-s", type=float, default=0.0, help="simulated speed; 0: at once")
    server.add_argument(
        "--draws-seed", type=int, metavar="SEED", help="repeated calls get the recorded samples in turn (default: no)"
    )
    pool = commands.add_parser("pool", help="print a pool.yaml")
    pool.add_argument("--base-url", required=True, help="where `serve` listens")
    pool.add_argument("--prices", type=Path, required=True, help="JSON: model → dollars per million tokens")
    pool.add_argument("--seed", type=int, default=0, help="draws the handles")
    for command in (server, pool):
        command.add_argument("file", type=Path)
        command.add_argument("--workers", default="", help="comma-separated models; all by default")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2: bad arguments or a bad file)."""
    args = parser().parse_args(argv)
    models = [model.strip() for model in args.workers.split(",") if model.strip()]
    try:
        if args.command == "pool":
            names = models or models_in(args.file)
            sys.stdout.write(pool_yaml(args.file, names, read_prices(args.prices), args.base_url, args.seed))
            return 0
        speaker = ReplaySpeaker(load(args.file, models), args.first_s, args.tokens_per_s, args.draws_seed)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    app = WorkerServer(speaker, unknown_code="no_recording").app()
    app.router.add_post(CHECK_PATH, partial(answer_check, speaker))
    asyncio.run(serve(app, args.host, args.port, args.port_file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
