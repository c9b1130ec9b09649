"""The size of a prompt: an upper bound for the money that is held, and a count for the caps and the context.

A prompt of up to UNCOUNTED_BYTES_MAX bytes counts as its bytes, because no byte-level tokenizer makes more tokens than
that. A longer one, and one whose bytes leave too little for the reply, is counted by a tokenizer. Where the worker has
none, bytes stay the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.core.money.amounts import TOKENS_PER_MESSAGE, input_tokens_bound
from gateway.core.openai.usage import TOKENS_PER_TURN, declared_text, request_text
from gateway.core.pool.workers import WorkerSpec
from gateway.service.ports.request import TokenCounter

UNCOUNTED_BYTES_MAX = 4096  # counting a longer prompt costs less than the money that its bytes would hold
TOKENS_PER_DECLARATION = 512  # what a vendor tells its model about tools, once: more than any vendor publishes


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Tokens of one prompt. `tokens_max`: an upper bound, for money. `tokens`: the count, for caps. `context_tokens`:
    the least that it takes of a worker's context; None where nothing was counted."""

    tokens_max: int
    tokens: int
    context_tokens: int | None = None


def size_in_bytes(spec: WorkerSpec, body: Mapping[str, Any]) -> PromptSize:
    """The size of a body's prompt where a token counts as a byte."""
    rest = {name: value for name, value in body.items() if name != "messages"}
    bound = input_tokens_bound(body.get("messages", ()), str(rest) + str(spec.params))
    return PromptSize(bound, bound)


async def counted_size(tokens: TokenCounter, spec: WorkerSpec, body: Mapping[str, Any]) -> PromptSize:
    """The size of a body's prompt by the worker's tokenizer, never above its size in bytes."""
    in_bytes = size_in_bytes(spec, body)
    sent = {**spec.params, **body}
    text, declared = request_text(sent), declared_text(sent)
    count = await tokens.measure(spec, text.texts)
    again = await tokens.measure(spec, declared.texts)
    if count is None or again is None:
        return in_bytes
    template = len(sent.get("messages") or ()) * (TOKENS_PER_MESSAGE - TOKENS_PER_TURN)
    template += TOKENS_PER_DECLARATION if declared.texts else 0
    most = min(in_bytes.tokens_max, count.tokens_max + again.tokens_max + text.tokens + template)
    return PromptSize(most, min(most, count.tokens + text.tokens), count.tokens + text.tokens - text.media_tokens)
