"""Vendor state for clients that do not return it: kept with the reply, put back into the next turn.

Everything that a client returns itself is used as it comes, without a look-up (core/openai/vendor.py). Nothing here can
fail a request: without its state a vendor thinks again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.core.openai.reply import json_bytes
from gateway.core.openai.vendor import ids_with_state, restore, states_of
from gateway.errors import BatonError
from gateway.service.loop.state import Loop
from gateway.service.ports.request import RequestMetrics
from gateway.service.ports.turns import CallStates

NAME = "vendor_state"
STATE_BYTES_MAX = 262_144  # of one call and its message
STATES_PER_REPLY_MAX = 128
LOOK_UP_MAX = 512  # calls of one conversation, the newest


@dataclass(frozen=True, slots=True)
class VendorStates:
    """Keeps and restores the state of tool calls. `keep_s`: seconds for which it is kept; 0: never."""

    store: CallStates
    metrics: RequestMetrics
    keep_s: float
    timeout_s: float

    async def restore(self, loop: Loop) -> None:
        """Put the state that the client did not return into the loop's conversation."""
        ids = ids_with_state(loop.conversation)[-LOOK_UP_MAX:] if loop.endpoint == "chat" and self.keep_s else []
        if not ids:
            return
        try:
            async with asyncio.timeout(self.timeout_s):
                kept = await self.store.load(loop.record.key_id, ids, self.keep_s)
        except (TimeoutError, BatonError):
            self.metrics.degraded(NAME)
            return
        loop.conversation = restore(loop.conversation, {name: json.loads(state) for name, state in kept.items()})

    def of(self, body: Mapping[str, Any] | None) -> dict[str, bytes]:
        """The state that leaves with a reply, as JSON by its name."""
        choices = (body or {}).get("choices") or ()
        states = states_of([choice.get("message") or {} for choice in choices]) if self.keep_s else {}
        texts = {name: json_bytes(state) for name, state in list(states.items())[:STATES_PER_REPLY_MAX]}
        return {name: text for name, text in texts.items() if len(text) <= STATE_BYTES_MAX}

    async def keep(self, loop: Loop, states: Mapping[str, bytes]) -> None:
        """Keep the state that leaves with a reply, in bounded time."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.store.keep(loop.record.key_id, states, self.keep_s)
        except (TimeoutError, BatonError):
            self.metrics.degraded(NAME)
