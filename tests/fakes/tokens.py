"""A `ports.TokenCounter` that counts words: one token each. `asked` keeps what was counted, by worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.core.pool.workers import WorkerSpec
from gateway.service.ports.request import TokenCount


class WordCounter:
    """`without`: workers that have no tokenizer. `delay_s`: how long each count takes."""

    def __init__(self, without: Sequence[str] = (), delay_s: float = 0.0) -> None:
        self._without = frozenset(without)
        self._delay_s = delay_s
        self.asked: list[tuple[str, list[str]]] = []

    async def count(self, worker: WorkerSpec, texts: Sequence[str], at_most: int) -> int | None:
        self.asked.append((worker.name, list(texts)))
        await asyncio.sleep(self._delay_s)
        if worker.name in self._without:
            return None
        return min(at_most, sum(len(text.split()) for text in texts))

    async def measure(self, worker: WorkerSpec, texts: Sequence[str]) -> TokenCount | None:
        tokens = await self.count(worker, texts, 10**9)
        return None if tokens is None else TokenCount(tokens, 2 * tokens)
