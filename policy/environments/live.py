"""Real workers as an environment: every worker call goes through a running gateway's public API, under a dollar cap.

A plan is carried out here, by the same executor as elsewhere; each of its worker calls is a request to that gateway for
the worker by name, which the gateway holds, pays, limits and logs like any other. `vote` runs here. What the gateway
says it charged counts as spent where that is more than the pool's prices say.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import httpx

from gateway.core.money.amounts import (
    cost_nano,
    input_tokens_bound,
    nano_to_usd,
    usd_to_nano,
    worst_case_nano,
)
from gateway.core.openai.reply import chunks_of
from gateway.core.openai.usage import billed_usage, read_usage, usage_body
from gateway.core.pool.workers import Price
from gateway.errors import UpstreamError, UpstreamProtocol, UpstreamRateLimited, UpstreamRefused, UpstreamTimeout
from gateway.service.ports.request import REFUSED_STATUSES, WorkerCall, WorkerReply
from policy.environments.base import Episode, PlanSource, Prompt, Spend, Split, fraction, split_of
from policy.environments.executor import ExecutedEnvironment, Executor, LoopResult, TimedWorkers
from policy.environments.replay import VALIDATION_SHARE
from policy.environments.sampling import CONCURRENCY
from policy.environments.simulated import vote

REPLY_BYTES_MAX = 16 << 20
TAGS = {"train": "false"}  # these requests are the trainer's own: no export may learn from them as traffic
Grade = Callable[[Prompt, str], float]


class GatewayWorkers:
    """`ports.Workers` of one episode over a gateway's chat completions. `surplus_nano`: what it charged beyond what the
    executor's meter counts, because its prices are others or a call that failed cost something all the same."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.seconds: dict[tuple[str, str], float] = {}
        self.surplus_nano = 0

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """Return the complete reply. Raises UpstreamError and its children."""
        if call.worker.kind == "tool":
            return vote(call)
        began_s = time.perf_counter()
        try:
            response, raw = await self._post(call)
        except httpx.TimeoutException:
            raise UpstreamTimeout(f"the gateway gave no reply of {call.worker.name} in time") from None
        except httpx.ConnectError:
            raise UpstreamError("the gateway cannot be reached", retryable=True, dispatched=False) from None
        except httpx.HTTPError:
            raise UpstreamProtocol("the gateway hung up before its reply was whole") from None
        finally:
            key = (call.rollout_id, call.step_id)
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - began_s
        charged_nano = _charged_nano(response)
        if response.status_code != 200:
            self.surplus_nano += charged_nano
            raise _status_error(response.status_code, raw)
        body = _object(raw)
        usage = billed_usage(read_usage(body), call.body, len(str(call.body)), len(raw), call.worker.context_tokens)
        self.surplus_nano += max(0, charged_nano - cost_nano(call.worker.price or Price(), usage))
        return WorkerReply(body, usage)

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the same reply as chunks, then its usage."""
        reply = await self.complete(call)
        for choices in chunks_of(reply.body):
            yield {"choices": choices}
        yield {"choices": [], "usage": usage_body(reply.usage)}

    async def _post(self, call: WorkerCall) -> tuple[httpx.Response, bytes]:
        body = {**call.body, "model": call.worker.name, "metadata": TAGS}
        headers = {"x-baton-max-cost-usd": nano_to_usd(_most_nano(call)), "x-baton-timeout-s": f"{call.timeout_s:.3f}"}
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
    must cap. Close it when done."""

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
    ) -> None:
        super().__init__(executor, spend, concurrency)
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

    def prompts(self, split: Split, n: int, seed: int) -> list[Prompt]:
        """As in the port; splits are a hash of the id."""
        mine = [prompt for prompt in self._prompts if split_of(prompt.id, self._validation_share) == split]
        if n > len(mine):
            raise ValueError(f"{n} {split} prompts asked for, {len(mine)} are there: lower the number")
        return sorted(mine, key=lambda prompt: (fraction("prompts", seed, prompt.id), prompt.id))[:n]

    def workers(self, prompt: Prompt, sample: int) -> TimedWorkers:
        """The gateway's workers."""
        return GatewayWorkers(self._client)

    def spent_nano(self, result: LoopResult, workers: TimedWorkers) -> int:
        """Return what the meter counts, lost calls at their full price, and what the gateway charged beyond that."""
        surplus_nano = workers.surplus_nano if isinstance(workers, GatewayWorkers) else 0
        return result.loop.tree.meter.spent_nano + surplus_nano

    def grade(self, prompt: Prompt, reply: str) -> float:
        """The caller's grader."""
        return self._grade(prompt, reply)

    async def episode(self, prompt: Prompt, source: PlanSource, sample: int = 0) -> Episode:
        """As in the port. Raises ValueError for a worker without a price, whose calls nothing would bound."""
        unpriced = next((spec.name for spec in prompt.pool if spec.price is None), None)
        if unpriced is not None:
            raise ValueError(f"worker {unpriced} has no price: give it one in the pool file")
        return await super().episode(prompt, source, sample)


def _most_nano(call: WorkerCall) -> int:
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
