"""A conductor that plays a script of texts, errors and pauses. It passes the contract suite."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence

from gateway.core.money.amounts import Usage
from gateway.errors import ConductorError
from gateway.service.ports.request import Conductor, ConductorCall, ConductorChunk, ConductorEnd

PIECE_CHARS = 4
LOGPROB = -0.125
END_TEXT = "<|im_end|>"

Line = str | ConductorError
Script = Callable[[ConductorCall], Line] | Sequence[Line]


class ScriptedConductor(Conductor):
    """Plays `script`: a function of the call, or one line a call with the last repeated; an error is raised.

    `gap_s` passes before each piece of four characters. `calls` are those seen, `cancelled` those left early.
    """

    def __init__(self, script: Script, *, gap_s: float = 0.0, model: str = "conductor") -> None:
        self._script = script
        self._gap_s = gap_s
        self._model = model
        self._pieces: OrderedDict[str, int] = OrderedDict({END_TEXT: 0})
        self.calls: list[ConductorCall] = []
        self.cancelled = 0
        self.down = False

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode token ids that this fake gave out."""
        texts = list(self._pieces)
        return "".join(texts[token] for token in token_ids if token)

    async def ready(self) -> bool:
        return not self.down

    async def decode(self, call: ConductorCall) -> AsyncGenerator[ConductorChunk | ConductorEnd, None]:
        text = self._next(call)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + call.timeout_s
        pieces = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
        cut = len(pieces) >= call.sampling.tokens_max
        pieces = pieces[: call.sampling.tokens_max]
        done = False
        try:
            for piece in pieces:
                await self._pause(deadline)
                yield ConductorChunk(piece, (self._token(piece),), (LOGPROB,), (piece,))
            if not cut:
                yield ConductorChunk("", (0,), (0.0,), (END_TEXT,))
            done = True
            yield self._end(call, len(pieces) + (not cut), "length" if cut else "stop")
        finally:
            self.cancelled += not done

    def _next(self, call: ConductorCall) -> str:
        if self.down:
            raise ConductorError("down", "the scripted conductor is down", billable=False)
        self.calls.append(call)
        if callable(self._script):
            line = self._script(call)
        else:
            line = self._script[min(len(self.calls), len(self._script)) - 1]
        if isinstance(line, ConductorError):
            raise line
        return line

    async def _pause(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.sleep(self._gap_s)
        except TimeoutError:
            raise ConductorError("slow", "the scripted conductor is slow") from None

    def _token(self, piece: str) -> int:
        return self._pieces.setdefault(piece, len(self._pieces))

    def _end(self, call: ConductorCall, count: int, finish: str) -> ConductorEnd:
        prompt = "".join(message["content"] for message in call.messages)
        prompt_ids = tuple(self._token(word) for word in prompt.split())
        return ConductorEnd(call.model or self._model, Usage(len(prompt_ids), count), prompt_ids, finish)
