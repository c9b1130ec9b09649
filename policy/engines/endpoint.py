"""A policy on a server that speaks vLLM's OpenAI protocol, whatever the model's size: it plans and scores over HTTP.

A plan's prompt log-probs do not score it: they are of the bare model, without grammar mask and temperature, and those
of all allowed tokens cannot be asked for. So each place where the plan decides is one request for one token after the
tokens before it, limited to what the grammar allows there (`allowed_token_ids`), under the plan's temperature: the
log-probs in its reply are those of the masked distribution. If the plan's token is not among them, a second request
between it and the likeliest token gives the difference of the two. Nothing is approximated; what is left is the
server's rounding (docs/results.md). The server must run with `--logprobs-mode processed_logprobs`; that is tried first.

A server's failure is no plan's fault: a call that broke off is asked again, and a server that keeps failing is lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.adapters.engines.files import BaseWeights
from gateway.adapters.engines.http import EngineApi, EngineReply
from gateway.adapters.engines.sealed import read_document
from gateway.adapters.engines.vllm import VllmLora
from gateway.adapters.upstream.client import Breaker
from gateway.adapters.upstream.conductor.client import HttpConductor, Structured
from gateway.core.policies.manifest import MANIFEST_FILE, manifest_of
from gateway.errors import BatonError, ConductorError, EngineDown, VersionRefused
from gateway.service.ports.request import ConductorCall, ConductorChunk, ConductorEnd
from policy.engines.directory import ConductorDirectory
from policy.engines.port import Decision, EngineLost, LoggedPlan, Pace, PlanEngine, reading
from policy.serve.tokens import Tokens

WAITS_S = (1.0, 4.0, 15.0)  # before a failed call is asked again
QUESTION_STATUSES = (400, 413, 422)  # a refusal of this prompt; any other status refuses every call
REFUSALS_MAX = 8  # in a row, before the first plan: the server takes no request of this form
CALLS_MAX = 16
DECISIONS_MAX = 64  # requests for a token in flight
TIMEOUT_S = 600.0
TOP = 5  # log-probs asked of each token
MASKED = -9000.0  # vLLM writes −inf as −9999
SUM_SLACK = 0.02  # how far the log-probs of all allowed tokens may be off adding up to 1, in bfloat16
RANK_MAX = 512  # the server knows its own --max-lora-rank, and says so
log = logging.getLogger("baton.engines")


class PatientConductor:
    """`ports.Conductor` that asks again when a call fails, with a bound on the calls in flight. Chunks of a call come
    when it has ended, so that a call that broke off leaves nothing behind. `name`: the server and its model, for
    messages."""

    def __init__(self, client: HttpConductor, name: str, calls_max: int, slow: str = "") -> None:
        self._client = client
        self._name = name
        self._slow = slow  # what to do where it is too slow
        self._slots = asyncio.Semaphore(calls_max)
        self._answered = False
        self._refusals = 0

    async def decode(self, call: ConductorCall) -> AsyncIterator[ConductorChunk | ConductorEnd]:
        """As the port says. Raises ConductorError(refused | unparseable) for this prompt, EngineLost for the server."""
        async with self._slots:
            items = await self._items(call)
        self._answered = True
        for item in items:
            yield item

    async def _items(self, call: ConductorCall) -> list[ConductorChunk | ConductorEnd]:
        for wait_s in (*WAITS_S, None):
            try:
                async with aclosing(self._client.decode(call)) as stream:
                    return [item async for item in stream]
            except ConductorError as error:
                self._check(error)
                if wait_s is None:
                    raise self._lost_error(error) from None
            await asyncio.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _check(self, error: ConductorError) -> None:
        """Return if the call may be asked again. Raises `error` if the prompt is at fault, EngineLost for a refusal of
        every call."""
        if error.reason == "unparseable":
            raise error
        if error.reason != "refused":
            return
        self._refusals += 1
        of_prompt = error.upstream_status in QUESTION_STATUSES
        if not of_prompt or (not self._answered and self._refusals >= REFUSALS_MAX):
            raise self._lost_error(error) from None
        raise error

    def _lost_error(self, error: ConductorError) -> EngineLost:
        return EngineLost(f"{self._name}: {error.message}" + (self._slow if error.reason == "slow" else ""))

    async def ready(self) -> bool:
        """Return whether the server serves the model."""
        return await self._client.ready()

    async def close(self) -> None:
        """Close every connection."""
        await self._client.close()


def client_of(
    url: str,
    model: str,
    key: str | None,
    *,
    structured: Structured = "vllm",
    timeout_s: float = TIMEOUT_S,
    logprobs: bool = True,
    params: Mapping[str, Any] | None = None,
    cannot: Collection[str] = (),
) -> HttpConductor:
    """The client of a server, …/v1, that never pauses: a paused call would look like a lost server."""
    never_opens = Breaker(failures_max=1 << 62)
    own: dict[str, Any] = {"params": params, "cannot": cannot}
    return HttpConductor(
        *(url, model, key), logprobs=logprobs, structured=structured, timeout_s=timeout_s, breaker=never_opens, **own
    )


# ---------------------------------------------------------------- a policy there


@asynccontextmanager
async def open_endpoint(
    directory: ConductorDirectory, url: str, key: str | None = None
) -> AsyncIterator[EndpointEngine]:
    """The engine of a directory on the server at `url` (…/v1): by the name under which it is served there, or, as an
    adapter, loaded under a name of its own and unloaded in the end. Raises VersionRefused where the server has other
    weights or cannot score, EngineDown where it does not answer."""
    api = EngineApi(url.removesuffix("/v1"), key=key, timeout_s=TIMEOUT_S)
    engine: EndpointEngine | None = None
    try:
        async with _served(api, directory) as model:
            patient = PatientConductor(client_of(url, model, key), f"{url}#{model}", CALLS_MAX)
            engine = EndpointEngine(patient, api, model, directory.tokens())
            yield engine
    finally:
        if engine is not None:
            await engine.close()
        await api.close()


@asynccontextmanager
async def _served(api: EngineApi, directory: ConductorDirectory) -> AsyncGenerator[str, None]:
    """The name under which the server serves the directory, while it is needed."""
    models = await api.models()
    name = await asyncio.to_thread(_known_name, models, directory)
    if name is not None:
        yield name
        return
    place = directory.policy.directory.resolve()
    roots = [str(entry.get("root")) for entry in models.values() if not entry.get("parent")]
    if directory.manifest.kind != "adapter":
        raise VersionRefused(
            "base", f"{place}: {api.url} serves {', '.join(roots) or 'nothing'}, not these weights; start it on them"
        )
    lora = VllmLora(api, base=_first_directory(roots), rank_max=RANK_MAX)
    name = f"judged-{(directory.manifest.weights_sha256 or 'adapter')[:8]}-{secrets.token_hex(4)}"
    try:
        await lora.load(name, place)
    except VersionRefused as error:
        if error.reason != "engine":
            raise
        raise VersionRefused(
            "engine",
            f"{error.message}; start it on {directory.manifest.base or 'its base'} as deploy/vllm.sh does, with LoRA "
            f"on, where it can read {place}",
        ) from None
    try:
        yield name
    finally:
        await asyncio.shield(_unload(lora, name))


def _first_directory(roots: Sequence[str]) -> Path | None:
    return next((Path(root) for root in roots if Path(root).is_dir()), None)


async def _unload(lora: VllmLora, name: str) -> None:
    try:
        await lora.unload(name)
    except BatonError as error:  # a server that died has forgotten it
        log.warning("%s was not unloaded: %s", name, error.message)


def _known_name(models: Mapping[str, Mapping[str, Any]], directory: ConductorDirectory) -> str | None:
    """The model that is this directory: loaded from it, or, with all its weights in place, of the same digest."""
    place = directory.policy.directory.resolve()
    for name, entry in models.items():
        if Path(str(entry.get("root"))).resolve() == place:
            return name
    if directory.manifest.kind == "adapter":
        return None
    same = (name for name, entry in models.items() if not entry.get("parent") and _is_of(directory, entry))
    return next(same, None)


def _is_of(directory: ConductorDirectory, entry: Mapping[str, Any]) -> bool:
    root = Path(str(entry.get("root")))
    if not root.is_dir():
        return False
    digest = BaseWeights(root).sha256
    if not digest and (root / MANIFEST_FILE).is_file():  # a base that is referenced
        digest = manifest_of(read_document(root)).weights_sha256
    return digest == directory.manifest.weights_sha256


class EndpointEngine(PlanEngine):
    """`PlanEngine` over the model of that name on a server. `tokens`: of the same model, for its grammars."""

    def __init__(self, conductor: PatientConductor, api: EngineApi, model: str, tokens: Tokens) -> None:
        self.calls_max = CALLS_MAX
        self._conductor = conductor
        self._api = api
        self._model = model
        self._tokens = tokens
        self._slots = asyncio.Semaphore(DECISIONS_MAX)
        self._proven = asyncio.Lock()
        self._masks = False
        self._pace = Pace()

    @property
    def plan_ms(self) -> float | None:
        return self._pace.mean_ms

    async def decode(self, call: ConductorCall) -> AsyncIterator[ConductorChunk | ConductorEnd]:
        """As the port says; the plan comes when it has ended. Raises EngineLost."""
        began_s = time.perf_counter()
        async for item in self._conductor.decode(replace(call, model=self._model)):
            if isinstance(item, ConductorEnd):
                self._pace.add(time.perf_counter() - began_s)
            yield item

    async def score(self, plans: Sequence[LoggedPlan]) -> list[list[float]]:
        """As the port says. Raises VersionRefused(engine) for a nucleus, and for a server that does not give the
        log-probs of what it samples."""
        return list(await asyncio.gather(*(self._score(plan) for plan in plans)))

    async def _score(self, plan: LoggedPlan) -> list[float]:
        if plan.top_p < 1:
            raise VersionRefused("engine", f"{self._name}: plans sampled with top_p < 1 are not scored over HTTP")
        read = await asyncio.to_thread(reading, self._tokens, plan)
        if read.decisions:
            await self._prove(plan, read.decisions[0])
        return read.logprobs(await asyncio.gather(*(self._logprob(plan, decision) for decision in read.decisions)))

    async def _logprob(self, plan: LoggedPlan, decision: Decision) -> float:
        """The log-prob of the plan's token where it decides, under the mask."""
        token = plan.plan_ids[decision.index]
        before = [*plan.prompt_ids, *plan.plan_ids[: decision.index]]
        near = await self._next(before, decision.allowed.nonzero()[0].tolist(), plan.heat)
        if token in near:
            return near[token]
        likeliest = max(near, key=lambda one: near[one])
        pair = await self._next(before, [likeliest, token], plan.heat)
        return near[likeliest] + pair.get(token, -math.inf) - pair.get(likeliest, 0.0)

    async def _prove(self, plan: LoggedPlan, decision: Decision) -> None:
        """Raises VersionRefused unless two tokens' log-probs add up to 1 and follow the temperature. Asks once."""
        async with self._proven:
            if self._masks:
                return
            before = [*plan.prompt_ids, *plan.plan_ids[: decision.index]]
            pair = decision.allowed.nonzero()[0][:2].tolist()
            one, two = [await self._next(before, pair, heat) for heat in (1.0, 2.0)]
            apart = [logprobs.get(pair[0], math.nan) - logprobs.get(pair[1], math.nan) for logprobs in (one, two)]
            sums = [sum(math.exp(value) for value in logprobs.values()) for logprobs in (one, two)]
            slack = SUM_SLACK * (1 + abs(apart[0]))
            if not (all(abs(total - 1) < SUM_SLACK for total in sums) and abs(apart[0] - 2 * apart[1]) < slack):
                raise VersionRefused(
                    "engine",
                    f"{self._name}: its log-probs are not those of what it samples; start vLLM with --logprobs-mode "
                    "processed_logprobs, as deploy/vllm.sh does",
                )
            self._masks = True

    async def _next(self, before: Sequence[int], allowed: Sequence[int], heat: float) -> dict[int, float]:
        """The likeliest next tokens among `allowed` with their log-probs."""
        body = {
            **{"model": self._model, "prompt": list(before), "max_tokens": 1, "allowed_token_ids": list(allowed)},
            **{"temperature": heat, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0},
            **{"logprobs": TOP, "return_tokens_as_token_ids": True},
        }
        async with self._slots:
            reply = await self._reply(body)
        if reply.status != 200:
            raise VersionRefused(
                "engine", f"{self._name} scores no plan ({reply.status}: {reply.message()}); serve the policy on vLLM"
            )
        return self._top(reply)

    async def _reply(self, body: Mapping[str, Any]) -> EngineReply:
        """Raises EngineLost for a server that is gone, or has dropped the model."""
        problem = ""
        for wait_s in (*WAITS_S, None):
            try:
                reply = await self._api.send("POST", "/v1/completions", body)
                if reply.status < 500 and reply.status not in (404, 408, 429):
                    return reply
                problem = f"{reply.status}: {reply.message()}"
                if reply.status == 404:
                    break
            except EngineDown as error:
                problem = error.message
            if wait_s is not None:
                await asyncio.sleep(wait_s)
        raise EngineLost(f"{self._name}: {problem}")

    def _top(self, reply: EngineReply) -> dict[int, float]:
        try:
            [entries] = reply.body["choices"][0]["logprobs"]["top_logprobs"]
            logprobs = {int(name.removeprefix("token_id:")): float(value) for name, value in entries.items()}
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise VersionRefused(
                "engine", f"{self._name} returns no token ids with log-probs; serve the policy on vLLM"
            ) from None
        return {token: value for token, value in logprobs.items() if value > MASKED}

    @property
    def _name(self) -> str:
        return f"{self._api.url}#{self._model}"

    async def ready(self) -> bool:
        """Return whether the server serves the model."""
        return await self._conductor.ready()

    async def close(self) -> None:
        """Close the connections of planning; those of scoring are the caller's."""
        await self._conductor.close()
