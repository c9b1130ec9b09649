"""Real workers as an environment: every worker call goes through a running gateway's public API, under a dollar cap.

A plan is carried out here, by the same executor as elsewhere; each of its worker calls is a request to that gateway for
the worker by name, which the gateway holds, pays, limits and logs like any other. `vote` runs here, and other tools are
called from here, with the replies that their step sees, which a request to the gateway could not say. A judge is a
worker of the gateway, too. What the gateway says it charged counts as spent where that is more than the pool's prices
say.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import httpx

from gateway.core.money.amounts import (
    Usage,
    cost_nano,
    input_tokens_bound,
    nano_to_usd,
    usd_to_nano,
    worst_case_nano,
)
from gateway.core.openai.reply import chunks_of, reply_text
from gateway.core.openai.vendors.usage import billed_usage, read_usage, usage_body
from gateway.core.pool.workers import VOTE_URL, Price
from gateway.errors import UpstreamError, UpstreamProtocol, UpstreamRateLimited, UpstreamRefused, UpstreamTimeout
from gateway.service.ports.request import REFUSED_STATUSES, WorkerCall, WorkerReply, Workers
from policy.environments.base import (
    Bill,
    Episode,
    PlanSource,
    Prompt,
    Spend,
    Split,
    Ungraded,
    fraction,
    split_of,
)
from policy.environments.cached import FailedCall, PaidReply, Send
from policy.environments.executor import ExecutedEnvironment, Executor, LoopResult, TimedWorkers
from policy.environments.replay import VALIDATION_SHARE
from policy.environments.sampling import CONCURRENCY
from policy.environments.simulated import vote
from policy.graders.base import GraderFailed, Tools

REPLY_BYTES_MAX = 16 << 20
TAGS = {"train": "false"}  # these requests are the trainer's own: no export may learn from them as traffic
JUDGE_S = 60.0
JUDGE_TOKENS_MAX = 512
JUDGE_TRIES = 3
Grade = Callable[[Prompt, str, Tools], Awaitable[float]]  # raises GraderFailed


class ToolClient(Workers, Protocol):
    """Calls tools: programs behind a URL, and those that are built in."""

    def asking(self, ask: Callable[[str, WorkerCall], Awaitable[WorkerReply]]) -> Workers:
        """The same client, whose judges ask the model worker of a name through `ask`."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


class GatewayWorkers:
    """`ports.Workers` of one episode over a gateway's chat completions. `surplus_nano`: what it charged beyond what the
    executor's meter counts, because its prices are others or a call that failed cost something all the same.
    `risked_nano`: what all calls so far may have cost: those that have ended what was charged, the others their worst
    case. `tools` calls tools, but for `vote`; the model of a judge is asked through the gateway. None: tools are
    refused."""

    def __init__(self, client: httpx.AsyncClient, tools: ToolClient | None = None) -> None:
        self._client = client
        self._tools = None if tools is None else tools.asking(self._ask)
        self.seconds: dict[tuple[str, str], float] = {}
        self.surplus_nano = 0
        self.risked_nano = 0

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """Return the complete reply. Raises UpstreamError and its children."""
        if call.worker.kind == "tool":
            return await self._tool(call)
        began_s, most = time.perf_counter(), most_nano(call)
        self.risked_nano += most
        try:
            response, raw = await self._post(call)
        except httpx.TimeoutException:
            raise UpstreamTimeout(f"the gateway gave no reply of {call.worker.name} in time") from None
        except httpx.ConnectError:
            self.risked_nano -= most
            raise UpstreamError("the gateway cannot be reached", retryable=True, dispatched=False) from None
        except httpx.HTTPError:
            raise UpstreamProtocol("the gateway hung up before its reply was whole") from None
        finally:
            key = (call.rollout_id, call.step_id)
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - began_s
        charged_nano = _charged_nano(response)
        self.risked_nano += charged_nano - most
        if response.status_code != 200:
            self.surplus_nano += charged_nano
            raise _status_error(response.status_code, raw)
        body = _object(raw)
        usage = read_usage(body) or billed_usage(None, call.body, len(str(call.body)), len(raw))  # the gateway is right
        self.surplus_nano += max(0, charged_nano - cost_nano(call.worker.price or Price(), usage))
        return WorkerReply(body, usage)

    async def _tool(self, call: WorkerCall) -> WorkerReply:
        if self._tools is None or call.worker.url == VOTE_URL:
            return vote(call)
        key = (call.rollout_id, call.step_id)
        before_s, began_s = self.seconds.get(key, 0.0), time.perf_counter()  # a checker is called beside another call
        self.risked_nano += cost_nano(call.worker.price or Price(), Usage())  # it is priced by the call
        try:
            return await self._tools.complete(call)
        finally:
            self.seconds[key] = before_s + time.perf_counter() - began_s

    async def _ask(self, name: str, call: WorkerCall) -> WorkerReply:
        """What the model of a judge says; `call.worker` has the model's price. Raises UpstreamError."""
        model = call.worker.model_copy(update={"name": name, "kind": "openai", "url": None, "params": {}})
        return await self.complete(replace(call, worker=model))

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the same reply as chunks, then its usage."""
        reply = await self.complete(call)
        for choices in chunks_of(reply.body):
            yield {"choices": choices}
        yield {"choices": [], "usage": usage_body(reply.usage)}

    async def _post(self, call: WorkerCall) -> tuple[httpx.Response, bytes]:
        body = {**call.body, "model": call.worker.name, "metadata": TAGS}
        headers = {"x-baton-max-cost-usd": nano_to_usd(most_nano(call)), "x-baton-timeout-s": f"{call.timeout_s:.3f}"}
        async with self._client.stream(
            "POST", "chat/completions", json=body, headers=headers, timeout=call.timeout_s + 1.0
        ) as response:
            raw = b""
            async for piece in response.aiter_bytes():
                raw += piece
                if len(raw) > REPLY_BYTES_MAX:
                    raise UpstreamProtocol(f"the reply is larger than {REPLY_BYTES_MAX} bytes", retryable=False)
        return response, raw


class LiveEnvironment(ExecutedEnvironment):
    """Prompts of one's own, each with the pool it is to be answered by, on the gateway at `base_url` (…/v1). `spend`
    must cap. `judge`: the worker that graders ask; a call of it may cost `judge_nano_max`, and the meter's
    `episode_nano_max` has room for JUDGE_TRIES of them beside the executor's cap. Close it when done."""

    name = "live"

    def __init__(
        self,
        base_url: str,
        key: str,
        prompts: Sequence[Prompt],
        grade: Grade,
        spend: Spend,
        *,
        validation_share: float = VALIDATION_SHARE,
        executor: Executor | None = None,
        concurrency: int = CONCURRENCY,
        tools: ToolClient | None = None,
        judge: str = "",
        judge_nano_max: int = 0,
    ) -> None:
        super().__init__(executor, spend, concurrency)
        self._tools, self._judge, self._judge_nano_max = tools, judge, judge_nano_max
        if spend.cap_nano is None:
            raise ValueError("real workers cost real money: give the meter a `cap_nano`")
        self._prompts = list(prompts)
        self._grade = grade
        self._validation_share = validation_share
        limits = httpx.Limits(max_connections=4 * concurrency)
        headers = {"authorization": f"Bearer {key}"}
        self._client = httpx.AsyncClient(base_url=base_url.rstrip("/") + "/", headers=headers, limits=limits)

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()
        if self._tools is not None:
            await self._tools.close()

    def prompts(self, split: Split, n: int, seed: int) -> list[Prompt]:
        """As in the port; splits are a hash of the id."""
        mine = [prompt for prompt in self._prompts if split_of(prompt.id, self._validation_share) == split]
        if n > len(mine):
            raise ValueError(f"{n} {split} prompts asked for, {len(mine)} are there: lower the number")
        return sorted(mine, key=lambda prompt: (fraction("prompts", seed, prompt.id), prompt.id))[:n]

    def workers(self, prompt: Prompt, sample: int) -> TimedWorkers:
        """The gateway's workers."""
        return GatewayWorkers(self._client, self._tools)

    def spent_nano(self, result: LoopResult, workers: TimedWorkers) -> int:
        """Return what the meter counts, lost calls at their full price, and what the gateway charged beyond that."""
        surplus_nano = workers.surplus_nano if isinstance(workers, GatewayWorkers) else 0
        return result.loop.tree.meter.spent_nano + surplus_nano

    def risked_nano(self, workers: TimedWorkers) -> int:
        """Return what the gateway charged, and the worst case of calls that were under way."""
        return workers.risked_nano if isinstance(workers, GatewayWorkers) else 0

    async def graded(self, prompt: Prompt, reply: str, bill: Bill) -> float:
        """The caller's grader, asked again where the judge failed. Raises Ungraded."""
        tools = Tools(ask=partial(self._ask, bill) if self._judge else None)
        for attempt in range(1, JUDGE_TRIES + 1):
            try:
                return await self._grade(prompt, reply, tools)
            except GraderFailed as error:
                if attempt == JUDGE_TRIES:
                    raise Ungraded(f"the reply to {prompt.id} could not be judged: {error}") from None
        raise AssertionError("the last try returns or raises")

    async def _ask(self, bill: Bill, messages: list[dict[str, str]]) -> str:
        """What the judge says, paid for and logged by the gateway; a call that was lost counts in full. Raises
        GraderFailed."""
        most_nano = min(self._judge_nano_max, JUDGE_TRIES * self._judge_nano_max - bill.nano)
        body = {"model": self._judge, "messages": messages, "metadata": TAGS, "temperature": 0}
        headers = {"x-baton-max-cost-usd": nano_to_usd(max(1, most_nano))}
        bill.nano += most_nano
        try:
            response = await self._client.post(
                "chat/completions", json=body | {"max_tokens": JUDGE_TOKENS_MAX}, headers=headers, timeout=JUDGE_S
            )
        except httpx.ConnectError:
            bill.nano -= most_nano
            raise GraderFailed("the judge did not answer (the gateway cannot be reached)") from None
        except httpx.HTTPError as error:
            raise GraderFailed(f"the judge did not answer ({type(error).__name__})") from None
        bill.nano += _charged_nano(response) - most_nano
        if response.status_code != 200:
            raise GraderFailed(
                f"the judge was refused: {_status_error(response.status_code, response.content).message}"
            )
        try:
            return reply_text(_object(response.content))
        except UpstreamProtocol as error:
            raise GraderFailed(f"the judge's reply cannot be read: {error.message}") from None

    async def episode(self, prompt: Prompt, source: PlanSource, sample: int = 0) -> Episode:
        """As in the port. Raises ValueError for a worker without a price, whose calls nothing would bound."""
        unpriced = next((spec.name for spec in prompt.pool if spec.price is None), None)
        if unpriced is not None:
            raise ValueError(f"worker {unpriced} has no price: give it one in the pool file")
        return await super().episode(prompt, source, sample)


def sender(client: httpx.AsyncClient) -> Send:
    """One attempt at a call through the gateway, for `cached.PaidCalls`. `client`: on …/v1, with the key."""

    async def send(call: WorkerCall) -> PaidReply:
        workers = GatewayWorkers(client)
        try:
            reply = await workers.complete(call)
        except UpstreamError as error:
            unknown = error.dispatched and error.upstream_status is None
            raise FailedCall(error, None if unknown else workers.surplus_nano) from None
        nano = cost_nano(call.worker.price or Price(), reply.usage) + workers.surplus_nano
        return PaidReply(reply.body, reply.usage, nano, sum(workers.seconds.values()))

    return send


def most_nano(call: WorkerCall) -> int:
    """Return the worst case of a call by the pool's prices; the gateway may spend no more on it."""
    rest = {name: value for name, value in call.body.items() if name != "messages"}
    bound = input_tokens_bound(call.body["messages"], str(rest) + str(call.worker.params))
    output = call.body.get("max_completion_tokens") or call.body.get("max_tokens") or call.worker.output_tokens_max
    return max(1, worst_case_nano(call.worker.price or Price(), bound, int(output)))


def _charged_nano(response: httpx.Response) -> int:
    try:
        return usd_to_nano(response.headers.get("x-baton-cost-usd", "0"))
    except ValueError:
        return 0


def _status_error(status: int, raw: bytes) -> UpstreamError:
    try:
        error = json.loads(raw)["error"]
        message, code = str(error["message"])[:500], str(error["code"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message, code = f"the gateway answered {status}", "upstream_error"
    if status == 429 and code != "insufficient_quota":
        return UpstreamRateLimited(message, upstream_status=status)
    if status in (*REFUSED_STATUSES, 401, 403, 429):
        return UpstreamRefused(message, upstream_status=status, code=code)
    return UpstreamError(message, upstream_status=status, retryable=status >= 500, code=code)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise UpstreamProtocol("the gateway's reply is not JSON") from None
    if not isinstance(body, dict) or not body.get("choices"):
        raise UpstreamProtocol("the gateway's reply has no choices")
    return body
