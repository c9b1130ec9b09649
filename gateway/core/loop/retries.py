"""How many calls may be tried again, as a share of all calls. Pure."""

from __future__ import annotations


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
