"""The conductor in training: calls that come at the same time are decoded together, one forward pass a token.

Episodes run the served planner and executor, so rounds, child loops and records are those of serving. A call waits
until the event loop has nothing else to do; then all that wait are decoded as one batch. Every row draws its own
numbers, from a hash of what it is, so neither its company in the batch nor the order of calls matters.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from gateway.core.money.amounts import Usage
from gateway.errors import ConductorError
from gateway.service.ports.request import ConductorCall, ConductorChunk, ConductorEnd
from policy.environments.base import rng_for
from policy.serve.sampling import GREEDY_BELOW
from policy.serve.tokens import BadSchema, TextStream, Tokens
from policy.train.step.masks import Masks, Place, unpacked
from policy.train.step.parcels import parcels
from policy.train.weights.small import Decoding, Weights

QUIET_TURNS = 100  # of the event loop without a new call, after which no further call is expected
PROMPTS_KEPT = 4096
PLAN_TOKENS = 24  # reckoned for a plan that is not written yet


@dataclass(eq=False, slots=True)
class Decoded:
    """One row: its prompt, and the plan as it grows."""

    prompt_ids: tuple[int, ...]
    place: Place
    temperature: float
    tokens_max: int
    random: Random
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    unfed: int = 0  # of its tokens, those that the model has not seen
    finish: str | None = None


class Sampler:
    """Decodes rows under their grammars, many at once. `tokens_max` bounds what one forward pass may hold."""

    def __init__(self, weights: Weights, tokens: Tokens, masks: Masks, tokens_max: int) -> None:
        self._weights = weights
        self._tokens = tokens
        self._masks = masks
        self._tokens_max = tokens_max

    def decode(self, rows: list[Decoded]) -> None:
        """Bring every row to its end."""
        for row in rows:
            self._run_forced(row)
        open_rows = [row for row in rows if row.finish is None]
        beginnings = [(*row.prompt_ids, *row.ids) for row in open_rows]
        with torch.inference_mode():
            for parcel in parcels(
                beginnings, [PLAN_TOKENS] * len(open_rows), self._tokens_max, self._weights.shares_prompts
            ):
                chosen = [open_rows[index] for index in parcel.rows]
                for row in chosen:
                    row.unfed = 0  # its forced beginning is read with the prompt
                self._finish(chosen, self._weights.begin(parcel.prompts, parcel.owners))

    def _finish(self, rows: list[Decoded], decoding: Decoding) -> None:
        while True:
            self._draw(rows, decoding.scores)
            open_rows = [index for index, row in enumerate(rows) if row.finish is None]
            if not open_rows:
                return
            if len(open_rows) < len(rows):
                rows = [rows[index] for index in open_rows]
                decoding.keep(open_rows)
            decoding.feed([row.ids[-row.unfed :] for row in rows])
            for row in rows:
                row.unfed = 0

    def _draw(self, rows: list[Decoded], scores: torch.Tensor) -> None:
        """One token for every row, by inverting the cumulative distribution after mask and temperature; of a greedy row
        the likeliest."""
        allowed = torch.from_numpy(unpacked([row.place.bits for row in rows], self._weights.vocab)).to(scores.device)
        greedy = torch.tensor([row.temperature < GREEDY_BELOW for row in rows], device=scores.device)
        heat = torch.tensor([row.temperature for row in rows], device=scores.device).masked_fill(greedy, 1.0)
        spread = (scores.float() / heat[:, None]).masked_fill(~allowed, -torch.inf).log_softmax(-1)
        mass = spread.double().exp().cumsum(-1)
        aims = torch.tensor([[row.random.random()] for row in rows], dtype=torch.float64, device=scores.device)
        drawn = torch.searchsorted(mass, aims * mass[:, -1:], right=True).clamp_max(self._weights.vocab - 1)
        drawn = torch.where(greedy[:, None], spread.argmax(-1, keepdim=True), drawn)
        logprobs = spread.gather(1, drawn)
        for row, token, logprob in zip(rows, drawn[:, 0].tolist(), logprobs[:, 0].tolist(), strict=True):
            self._take(row, token, logprob)
            self._run_forced(row)

    def _run_forced(self, row: Decoded) -> None:
        """Tokens without an alternative need no forward pass of their own."""
        while row.finish is None and row.place.forced is not None:
            self._take(row, row.place.forced, 0.0)

    def _take(self, row: Decoded, token: int, logprob: float) -> None:
        row.ids.append(token)
        row.logprobs.append(logprob)
        row.unfed += 1
        if token in self._tokens.eos_ids:
            row.finish = "stop"
        elif len(row.ids) >= row.tokens_max:
            row.finish = "length"
        else:
            row.place = self._masks.after(row.place, token)


class BatchConductor:
    """Gathers calls and decodes them together. `name` is what rollouts call the version. `wait_s`: how long to wait for
    company where calls come over a network; `apart`: decode in a thread, so that the network is served meanwhile;
    `decoding_s`: seconds of decoding since the last `refresh`."""

    def __init__(self, sampler: Sampler, tokens: Tokens, masks: Masks, context: int, name: str) -> None:
        self.name = name
        self.wait_s: float = 0.0
        self.apart = False
        self.decoding_s = 0.0
        self._sampler = sampler
        self._tokens = tokens
        self._masks = masks
        self._context = context
        self._waiting: list[tuple[Decoded, asyncio.Future[None]]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._encoded: dict[str, tuple[int, ...]] = {}

    async def refresh(self) -> None:
        """The weights are the trainer's own."""
        self.decoding_s = 0.0

    def of(self, *key: object) -> EpisodeConductor:
        """The conductor of one episode; equal keys draw equal numbers."""
        return EpisodeConductor(self, key)

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """A prompt in tokens. Raises ConductorError(refused)."""
        key = json.dumps(messages)
        if key not in self._encoded:
            if len(self._encoded) >= PROMPTS_KEPT:
                self._encoded.clear()
            try:
                self._encoded[key] = tuple(self._tokens.encode_chat(messages))
            except ValueError as error:
                raise ConductorError("refused", str(error)) from None
        return self._encoded[key]

    async def decode(self, call: ConductorCall, prompt_ids: tuple[int, ...], random: Random) -> Decoded:
        """One plan. Raises ConductorError(refused) for a prompt that leaves no room for one."""
        room = self._context - len(prompt_ids)
        if room < 1:
            raise ConductorError("refused", f"a prompt of {len(prompt_ids)} tokens fills the conductor's context")
        try:
            place = self._masks.root(call.schema)
        except BadSchema as error:
            raise ConductorError("refused", str(error)) from None
        sampling = call.sampling
        row = Decoded(prompt_ids, place, sampling.temperature, min(sampling.tokens_max, room), random)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, done))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        await done
        return row

    def chunk(self, row: Decoded) -> ConductorChunk:
        """A complete plan as the planner reads it."""
        data = b"".join(self._tokens.token_bytes(token) for token in row.ids)
        texts = tuple(self._tokens.token_text(token) for token in row.ids)
        return ConductorChunk(TextStream().feed(data, final=True), tuple(row.ids), tuple(row.logprobs), texts)

    async def _flush(self) -> None:
        """Decode until no row waits."""
        try:
            while self._waiting:
                await self._quiet()
                batch, self._waiting = self._waiting, []
                error = await self._decoded([row for row, _ in batch])
                for _, done in batch:
                    if not done.done():
                        done.set_result(None) if error is None else done.set_exception(error)
                await self._quiet()
        finally:
            self._flushing = None

    async def _decoded(self, rows: list[Decoded]) -> Exception | None:
        began_s = time.perf_counter()
        try:
            if self.apart:
                await asyncio.to_thread(self._sampler.decode, rows)
            else:
                self._sampler.decode(rows)
        except Exception as error:  # boundary: the error goes to the callers that wait for rows
            return error
        finally:
            self.decoding_s += time.perf_counter() - began_s
        return None

    async def _quiet(self) -> None:
        """Return when `QUIET_TURNS` turns of the event loop have brought no further call."""
        if self.wait_s:
            await asyncio.sleep(self.wait_s)
        count, turns = -1, 0
        while turns < QUIET_TURNS:
            turns = turns + 1 if len(self._waiting) == count else 0
            count = len(self._waiting)
            await asyncio.sleep(0)


class EpisodeConductor:
    """`ports.Conductor` of one episode. Its calls are told apart by their prompts, for child loops run side by side."""

    def __init__(self, batch: BatchConductor, key: tuple[object, ...]) -> None:
        self._batch = batch
        self._key = key
        self._asked: Counter[tuple[int, ...]] = Counter()

    async def decode(self, call: ConductorCall) -> AsyncIterator[ConductorChunk | ConductorEnd]:
        """As the port says; the plan comes in one piece."""
        batch = self._batch
        prompt_ids = batch.prompt_ids(call.messages)
        self._asked[prompt_ids] += 1
        random = rng_for("plan", *self._key, *prompt_ids, self._asked[prompt_ids])
        row = await batch.decode(call, prompt_ids, random)
        yield batch.chunk(row)
        yield ConductorEnd(batch.name, Usage(len(prompt_ids), len(row.ids)), prompt_ids, row.finish or "stop")

    async def ready(self) -> bool:
        """It was loaded."""
        return True
