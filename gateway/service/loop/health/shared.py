"""What all worker calls of a gateway share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from gateway.core.pool.workers import WorkerSpec
from gateway.errors import UpstreamError
from gateway.service.loop.health.breakers import Breakers
from gateway.service.loop.health.retries import Backoff, RetryBudget
from gateway.service.money.charges import Paces
from gateway.service.ports.pools import NO_TOOLBOXES
from gateway.service.ports.request import Clock, TokenCount, TokenCounter, Toolboxes, Workers

ATTEMPTS_MAX = 3
ATTEMPT_S_MIN = 0.05


class NoTokenizer:
    """`TokenCounter` where bytes are good enough."""

    async def count(self, worker: WorkerSpec, texts: Sequence[str], at_most: int) -> int | None:
        """Return None: no worker has a tokenizer here."""
        return None

    async def measure(self, worker: WorkerSpec, texts: Sequence[str]) -> TokenCount | None:
        """Return None, as `count`."""
        return None


NO_TOKENIZER = NoTokenizer()


class Calls:
    """What all worker calls of a gateway share: the workers, the retry policy, the clock and the tokenizers."""

    def __init__(
        self,
        workers: Workers,
        budget: RetryBudget,
        clock: Clock,
        tokens: TokenCounter = NO_TOKENIZER,
        toolboxes: Toolboxes = NO_TOOLBOXES,
        *,
        rests: Breakers | None = None,
        attempts_max: int = ATTEMPTS_MAX,
        wait_initial_s: float = 0.1,
        wait_s_max: float = 5.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.workers = workers
        self.clock = clock
        self.tokens = tokens
        self.toolboxes = toolboxes
        self.paces = Paces()
        self.rests = rests or Breakers(clock)  # without one no worker rests
        self._budget = budget
        self.attempts_max = attempts_max
        self._backoff = Backoff(wait_initial_s, wait_s_max)
        self._sleep = sleep

    def begin(self) -> None:
        """Count a call, which earns a share of a retry."""
        self._budget.deposit()

    async def try_again(self, number: int, error: Exception, deadline_s: float) -> bool:
        """Wait before the next attempt after the `number`th, which failed so, and pay for it; False where there is
        none. `deadline_s` is on the clock's monotonic scale."""
        if not (isinstance(error, UpstreamError) and error.retryable) or number >= self.attempts_max:
            return False
        wait_s = max(self._backoff.wait_s(number), error.retry_after_s or 0.0)
        if deadline_s - self.clock.monotonic_s() < wait_s + ATTEMPT_S_MIN or not self._budget.withdraw():
            return False
        await self._sleep(wait_s)
        return True
