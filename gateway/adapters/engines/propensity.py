"""Whether the log-probs of a conductor's plans are those of what it samples, for a server that holds no versions.

An engine of versions is tested at each load. A plain server is tested when it first answers, when the model under its
name is another one, and after it was away. Until then its plans are logged without log-probs, and so are those of a
server that fails the test: they are served, and never trained on (`no_logprobs`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from gateway.adapters.engines.http import EngineApi
from gateway.adapters.engines.vllm import DRIFT_MAX
from gateway.errors import BatonError, ConductorError, EngineDown
from gateway.service.ports.request import Conductor, ConductorCall, ConductorChunk, ConductorEnd

LEARNABLE_OWNERS = ("vllm", "baton")  # the servers that give token ids
PASSING = ("created", "permission")  # vLLM writes them anew into each list of models
LOOK_S = 60.0
FIX = "start it as deploy/vllm.sh does"
Items = AsyncGenerator[ConductorChunk | ConductorEnd, None]
log = logging.getLogger("gateway.conductor")


@dataclass(frozen=True, slots=True)
class Trust:
    """Whether plans of the model that a server shows as `identity` may be trained on, and why (not), in one line."""

    identity: Mapping[str, Any]
    trainable: bool
    reason: str


async def trust_in(api: EngineApi, model: str, known: Trust | None = None) -> Trust:
    """What the server's model deserves; `known` where that is still the same model. Asks for four short texts and their
    scores. Raises EngineDown."""
    entry = (await api.models()).get(model, {})
    identity = {name: value for name, value in entry.items() if name not in PASSING}
    if known is not None and known.identity == identity:
        return known
    if identity.get("owned_by") not in LEARNABLE_OWNERS:
        return Trust(identity, False, "its server gives no token ids, which only vLLM and the embedded server do")
    try:
        drift = await api.sampled_drift(model, {})
    except EngineDown:
        raise
    except BatonError as error:
        return Trust(identity, False, error.message)
    if drift > DRIFT_MAX:
        why = f"it samples with log-probs that are {drift:.4g} nats off those that it scores, on average (at most "
        return Trust(identity, False, f"{why}{DRIFT_MAX:g}): top_k, a temperature or a penalty is on; {FIX}")
    return Trust(identity, True, f"its log-probs are proven, {drift:.2g} nats off")


class ProvenConductor(Conductor):
    """`ports.Conductor` before a plain server. `api` and `model` are the same server and model."""

    def __init__(
        self, conductor: Conductor, api: EngineApi, model: str, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._conductor = conductor
        self._api = api
        self._model = model
        self._now_s = now_s
        self._trust: Trust | None = None
        self._looked_s = -LOOK_S
        self._looking: asyncio.Task[None] | None = None

    async def decode(self, call: ConductorCall) -> Items:
        """As the port says; without log-probs where they are not proven."""
        trusted = self._trust is not None and self._trust.trainable
        try:
            async with aclosing(cast(Items, self._conductor.decode(call))) as items:
                async for item in items:
                    if isinstance(item, ConductorChunk) and not trusted:
                        yield ConductorChunk(item.text, item.token_ids, (), item.tokens)
                    else:
                        yield item
        except ConductorError as error:
            if error.reason == "down":  # it may come back as another one
                self._trust, self._looked_s = None, -LOOK_S
            raise
        self._look()

    def _look(self) -> None:
        """Look at the server in the background, at most once in LOOK_S."""
        running = self._looking is not None and not self._looking.done()
        if not running and self._now_s() - self._looked_s >= LOOK_S:
            self._looked_s = self._now_s()
            self._looking = asyncio.create_task(self.look(), name="conductor's log-probs")

    async def look(self) -> None:
        """Test the server, unless it still shows the model that was tested."""
        try:
            trust = await trust_in(self._api, self._model, self._trust)
        except EngineDown as error:
            log.info("the conductor's log-probs are not tested yet: %s", error.message)
            self._trust, self._looked_s = None, -LOOK_S
            return
        if trust is not self._trust:
            tell = log.info if trust.trainable else log.warning
            trained = "trained on" if trust.trainable else "not trained on"
            tell("plans of the conductor %s are %s: %s", self._model, trained, trust.reason)
        self._trust = trust

    async def ready(self) -> bool:
        """As the port says."""
        return await self._conductor.ready()

    async def close(self) -> None:
        """End the test that runs, and close its connections."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._api.close()
