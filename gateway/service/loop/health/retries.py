"""How many retries a gateway allows itself, and how long it waits before each."""

from __future__ import annotations

from tenacity import AsyncRetrying, RetryCallState, wait_exponential, wait_random

_NO_RETRIES = AsyncRetrying()


class Backoff:
    """Pauses that double from `initial_s` to `s_max`, and a random part of up to `initial_s` more."""

    def __init__(self, initial_s: float, s_max: float) -> None:
        self._wait = wait_exponential(multiplier=initial_s, max=s_max) + wait_random(0, initial_s)

    def wait_s(self, number: int) -> float:
        """The pause after the `number`th attempt. tenacity's own loop would cost more than most calls need, which are
        not retried."""
        state = RetryCallState(retry_object=_NO_RETRIES, fn=None, args=(), kwargs={})
        state.attempt_number = number
        return self._wait(state)


class RetryBudget:
    """A token bucket counted in calls: each first attempt adds one, each retry takes `calls_per_retry`.

    Over any run of `n` calls at most `start_retries + n / calls_per_retry` retries are allowed.
    """

    def __init__(self, *, calls_per_retry: int = 5, start_retries: int = 2, saved_retries_max: int = 10) -> None:
        self._calls_per_retry = calls_per_retry
        self._calls_max = saved_retries_max * calls_per_retry
        self._calls = start_retries * calls_per_retry

    def deposit(self) -> None:
        """Count a first attempt."""
        self._calls = min(self._calls + 1, self._calls_max)

    def withdraw(self) -> bool:
        """Pay for one retry. Returns False where the budget does not allow one."""
        if self._calls < self._calls_per_retry:
            return False
        self._calls -= self._calls_per_retry
        return True
