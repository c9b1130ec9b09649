"""Counts the tokens of a request without serving it. It spends no money and calls no worker."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.access.keys import Principal
from gateway.core.money.amounts import input_tokens_bound
from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.vendors.usage import BYTES_PER_TOKEN, Text, request_text
from gateway.core.pool.workers import MODEL_KINDS, WorkerSpec
from gateway.service.ports.request import TokenCounter
from gateway.service.request.catalog import Catalog
from gateway.service.request.fitting import with_able_workers

TOKENIZERS_MAX = 4  # that one request is counted by


class InputTokens:
    """Counts prompts with the tokenizers of the workers that may get them."""

    def __init__(self, catalog: Catalog, tokens: TokenCounter) -> None:
        self._catalog = catalog
        self._tokens = tokens

    async def count(self, principal: Principal, chat: ChatRequest, pool: str | None) -> int:
        """The prompt tokens of a chat request: by the named worker's tokenizer, or the most that any model worker
        counts where the request is planned. Raises NotFound, Forbidden, BadRequest."""
        choice = with_able_workers(self._catalog.resolve(principal, chat.model, pool), chat)
        named = choice.planner.name.removeprefix("fixed:") if choice.fallback is None else None
        workers = [spec for spec in choice.workers if spec.kind in MODEL_KINDS and named in (None, spec.name)]
        text = request_text({**chat.params, "messages": chat.messages})
        bound = input_tokens_bound(chat.messages, str(chat.params))
        counts = [await self._count(spec, text, bound) for spec in _by_tokenizer(workers)]
        return text.tokens + max(counts, default=_estimate(text))

    async def _count(self, worker: WorkerSpec, text: Text, bound: int) -> int:
        counted = await self._tokens.count(worker, text.texts, bound)
        return _estimate(text) if counted is None else counted


def _by_tokenizer(workers: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
    """One worker for each tokenizer, TOKENIZERS_MAX at most."""
    distinct = {spec.tokenizer or spec.model: spec for spec in workers}
    return list(distinct.values())[:TOKENIZERS_MAX]


def _estimate(text: Text) -> int:
    return -(-sum(len(piece.encode("utf-8", "replace")) for piece in text.texts) // BYTES_PER_TOKEN)
