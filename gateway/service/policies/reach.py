"""Which workers are there: a look at each at the start, at another pool, and again while one fails; and one question to
each where an operator asks for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gateway.core.pool.models import adapt, model_of
from gateway.core.pool.revision import revision_of
from gateway.core.pool.workers import MODEL_KINDS, WorkerSpec
from gateway.errors import UpstreamError, UpstreamRefused
from gateway.service.ports.pools import LoadedPool, Sight, WorkerLooks
from gateway.service.ports.request import WorkerCall, Workers

log = logging.getLogger("baton.workers")
TURN_S = 5.0  # between two looks at which pool is in use
AGAIN_S = 300.0  # after which one that failed is looked at again
TOGETHER = 8
ASK_S = 60.0
TOKENS = 16  # some models refuse to write fewer
TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Writes a note.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
QUESTION = [{"role": "user", "content": "Say: ready."}]


class Reach:
    """What the latest looks showed. `pool`: that in use. Call `run` in a task; nothing waits for it."""

    def __init__(self, looks: WorkerLooks, pool: Callable[[], LoadedPool]) -> None:
        self._looks, self._pool = looks, pool
        self.sights: Mapping[str, Sight] = {}  # by worker

    async def run(self) -> None:
        """Look for ever. No error ends it."""
        revision, now_s = "", asyncio.get_running_loop().time
        again_s = 0.0
        while True:
            loaded = self._pool()
            if revision != (now := revision_of(loaded.pools)):
                revision, again_s = now, now_s() + AGAIN_S
                await self._look_at(loaded, loaded.pools.workers, {})
            elif now_s() >= again_s:
                again_s = now_s() + AGAIN_S
                failed = [one for one in loaded.pools.workers if self._failed(one.name)]
                await self._look_at(loaded, failed, self.sights)
            await asyncio.sleep(TURN_S)

    def _failed(self, name: str) -> bool:
        sight = self.sights.get(name)
        return sight is not None and sight.state != "ok"

    async def _look_at(self, loaded: LoadedPool, workers: Iterable[WorkerSpec], before: Mapping[str, Sight]) -> None:
        try:
            sights = await look_at(self._looks, loaded, workers)
        except Exception:  # boundary: a look is not worth a gateway
            log.exception("the workers cannot be looked at")
            return
        for sight in sights.values():
            if before.get(sight.worker) == sight:
                continue
            if sight.state != "ok":
                log.warning("worker %s", sight.line)
            elif sight.worker in before:
                log.info("worker %s", sight.line)
        self.sights = {**before, **sights}


async def look_at(looks: WorkerLooks, loaded: LoadedPool, workers: Iterable[WorkerSpec]) -> dict[str, Sight]:
    """What a look at each worker shows, a few at a time; nothing of one that cannot be looked at for nothing."""
    places = asyncio.Semaphore(TOGETHER)

    async def look(worker: WorkerSpec) -> Sight | None:
        async with places:
            return await looks.look(worker, loaded.secrets)

    sights = await asyncio.gather(*map(look, workers))
    return {sight.worker: sight for sight in sights if sight is not None}


async def ask(workers: Workers, spec: WorkerSpec) -> Sight | None:
    """Whether a model of chat answers one short question, with a tool where it takes any; it is paid for. None for
    another worker."""
    if spec.kind not in MODEL_KINDS or spec.task != "chat":
        return None
    tools = {} if "tools" in spec.cannot else {"tools": [TOOL]}
    try:
        return await _ask_once(workers, spec, tools)
    except UpstreamRefused as refusal:
        if not tools or "tool" not in refusal.message.lower():
            return _failure(spec, refusal)
        words = refusal.message
    except UpstreamError as error:
        return _failure(spec, error)
    try:
        await _ask_once(workers, spec, {})
    except UpstreamError as error:
        return _failure(spec, error)
    fix = "add `cannot: [tools, tool_choice, parallel_tool_calls]` to its entry"
    return Sight(spec.name, "warn", f"answers, and takes no tools ({words})", fix)


async def _ask_once(workers: Workers, spec: WorkerSpec, more: Mapping[str, Any]) -> Sight:
    """Raises UpstreamError."""
    newer = model_of(spec).completion_tokens and "max_completion_tokens" not in spec.cannot
    bound = {"max_completion_tokens" if newer or "max_tokens" in spec.cannot else "max_tokens": TOKENS}
    body, _ = adapt(spec, {"messages": QUESTION, **bound, **more})
    reply = await workers.complete(WorkerCall(spec, body, min(spec.timeout_s, ASK_S), "check", "check"))
    model = reply.body.get("model") or spec.model
    told = f"answers as {model}, with tools" if more else f"answers as {model}"
    return Sight(spec.name, "ok", f"{told}: {reply.usage.prompt_tokens} + {reply.usage.completion_tokens} tokens")


def _failure(spec: WorkerSpec, error: UpstreamError) -> Sight:
    """Why it does not answer, and what to do."""
    status = error.upstream_status
    fix = ""
    if status in (401, 403):
        fix = f"put a key that works into `{spec.api_key}`" if spec.api_key else "name its key: `api_key: env:NAME`"
    elif status == 404:
        fix = f"check `model: {spec.model}` and `url`"
    elif status in (402, 429):
        fix = "its bill or its limits say more"
    elif not error.dispatched:
        fix = "check its `url`, and the way to it (proxy, certificates: docs/ways.md)"
    return Sight(spec.name, "bad", error.in_full, fix)
