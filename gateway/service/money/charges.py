"""What an attempt is charged: by the worker's report, by a count, or by an estimate of what a silent worker did.

A report is believed as far as `core/openai/vendors/usage.py` bounds it, and within SENSIBLE_TIMES the context and
what was asked for. An attempt of which no byte came back is charged its prompt and what the worker usually says, or
says in the time that it had, if that is more; never more than its draw.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.core.money.amounts import Usage, cost_nano
from gateway.core.openai.chat import choices_in
from gateway.core.openai.vendors.usage import SENSIBLE_TIMES, billed_usage, reply_text, request_text, text_bytes
from gateway.core.pool.workers import WorkerSpec
from gateway.service.loop.bodies import WorstCase, output_bound, price_of
from gateway.service.ports.request import TokenCounter

log = logging.getLogger("gateway")
BOUND, CLIPPED, PACE = "bound", "clipped", "pace"  # in an attempt's `counted_by`
USUAL_TOKENS, USUAL_S = 300.0, 2.0  # of the reply of a worker that has not replied yet
NEWEST = 0.1  # the weight of the newest reply
WORKERS_MAX = 4096


@dataclass(slots=True)
class _Usual:
    tokens: float = USUAL_TOKENS
    seconds: float = USUAL_S


class Paces:
    """How long the replies of each worker are and how long they take, of the calls of this process."""

    def __init__(self) -> None:
        self._usual: dict[str, _Usual] = {}

    def learn(self, worker: str, tokens: float, seconds: float) -> None:
        """Note a reply that came whole."""
        usual = self._usual.get(worker)
        if usual is None:
            if len(self._usual) >= WORKERS_MAX:
                self._usual.clear()
            self._usual[worker] = _Usual(tokens, seconds)
            return
        usual.tokens += NEWEST * (tokens - usual.tokens)
        usual.seconds += NEWEST * (seconds - usual.seconds)

    def tokens(self, worker: str, seconds: float) -> int:
        """The tokens that a worker has probably made in so many seconds without a word: a usual reply, which it makes
        to its end even if nobody waits for it, or what its pace makes of the time."""
        usual = self._usual.get(worker) or _Usual()
        return max(1, round(max(usual.tokens, usual.tokens / max(usual.seconds, 0.001) * seconds)))


def ended_usage(tokens: tuple[int, int], worst: WorstCase) -> Usage:
    """The usage of a call that its worker ended without a reply, at these tokens of prompt and reply."""
    prompt = min(tokens[0], worst.prompt_tokens_max)
    return Usage(prompt, min(tokens[1], max(0, worst.draw.tokens - prompt)), estimated=True)


def silent_usage(spec: WorkerSpec, body: Mapping[str, Any], worst: WorstCase, paces: Paces, seconds: float) -> Usage:
    """The usage of an attempt of which nothing came back in so many seconds; its prompt by bytes."""
    reply = min(output_bound(body), paces.tokens(spec.name, seconds) * choices_in(body))
    rough = rough_usage(body, {})
    return Usage(min(rough.prompt_tokens, worst.prompt_tokens_max), reply, estimated=True, unreported=True)


def rough_usage(body: Mapping[str, Any], reply: Mapping[str, Any]) -> Usage:
    """Usage by bytes, of a reply without a report of any."""
    request_bytes = len(str(body).encode("utf-8", "replace"))
    reply_bytes = text_bytes(choice.get("message") or {} for choice in reply.get("choices") or ())
    return billed_usage(None, body, request_bytes, reply_bytes)


async def counted_usage(
    tokens: TokenCounter, spec: WorkerSpec, body: Mapping[str, Any], reply: Mapping[str, Any], worst: WorstCase
) -> Usage | None:
    """Usage by the worker's tokenizer, neither count above what the draw holds. None: it has no tokenizer."""
    prompt = request_text({**spec.params, **body})
    answer = reply_text(choice.get("message") or {} for choice in reply.get("choices") or ())
    answer_max, prompt_max = output_bound(body), worst.prompt_tokens_max
    prompt_tokens = await tokens.count(spec, prompt.texts, prompt_max)
    answer_tokens = None if prompt_tokens is None else await tokens.count(spec, answer.texts, answer_max)
    if prompt_tokens is None or answer_tokens is None:
        return None
    return Usage(min(prompt_tokens + prompt.tokens, prompt_max), min(answer_tokens + answer.tokens, answer_max), True)


def charge(
    spec: WorkerSpec, body: Mapping[str, Any], worst: WorstCase, usage: Usage | None, bill_nano: int | None
) -> tuple[int, Usage, str | None]:
    """(nano-dollars, usage, what replaced the worker's own count): what a call is charged. Its bill, which is Baton's
    own; or the worker's where the pool file says that it bills, up to the draw; or the price of its usage, as far as it
    is believed; its draw where there is no usage."""
    drawn = worst.draw.nano
    if usage is None:
        return drawn, Usage(worst.draw.tokens, 0, estimated=True), BOUND
    if bill_nano is not None:
        return bill_nano, usage, None
    if spec.bills and usage.bill_nano is not None:
        return min(usage.bill_nano, drawn), usage, None
    if (nano := cost_nano(price_of(spec), usage)) <= drawn:
        return nano, usage, CLIPPED if usage.clipped else None
    believed = _believed(spec, body, worst, usage)
    if believed.clipped:
        told = (
            spec.name,
            usage.prompt_tokens,
            usage.completion_tokens,
            believed.prompt_tokens,
            believed.completion_tokens,
        )
        log.warning("worker %s reported %d + %d tokens, far more than it can have used; %d + %d are charged", *told)
    return cost_nano(price_of(spec), believed), believed, CLIPPED if believed.clipped else None


def _believed(spec: WorkerSpec, body: Mapping[str, Any], worst: WorstCase, usage: Usage) -> Usage:
    """A report of more than was drawn, within the worker's context and a few times what was asked for; of a reply that
    a budget made shorter, within the draw."""
    prompt, reply = worst.prompt_tokens_max, output_bound(body)
    if worst.lowered_by != "cost":
        prompt = SENSIBLE_TIMES * max(prompt, spec.context_tokens)
        reply = max(SENSIBLE_TIMES * reply, spec.output_tokens_max * choices_in(body))
    if usage.prompt_tokens <= prompt and usage.completion_tokens <= reply:
        return usage
    sent = usage.prompt_tokens if usage.prompt_tokens <= prompt else rough_usage(body, {}).prompt_tokens
    said = min(usage.completion_tokens, reply)
    return replace(usage, prompt_tokens=sent, completion_tokens=said, estimated=True, clipped=True)
