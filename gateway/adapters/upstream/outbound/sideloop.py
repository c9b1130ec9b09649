"""An event loop in a thread of its own, for a library whose coroutines compute for long between two waits.

LiteLLM translates a request inside its coroutine: five megabytes of tools take it two seconds. On a loop of its own it
shares the processor with the gateway's loop, which waits some milliseconds for its turn and not until the end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SideLoop:
    """The loop. It runs until the process ends."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs there, as a task. Cancelling cancels the task."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
