"""Large pools: the candidates of one request, so that a prompt and a price bound never grow with the pool.

Above `most` workers a request is planned over the likeliest ones: by the meaning of their description beside the
question, by what they did on judged requests of this kind, and by price. A few others are drawn at random, so that an
unknown worker can prove itself; the log has the probability of each draw, which estimates from other policies need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
from numpy.typing import NDArray

from gateway.core.loop.experience.bandit import Arm, utility
from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.money.amounts import cost_nano
from gateway.core.pool.workers import MODEL_KINDS, NANO_PER_USD, WorkerSpec
from gateway.errors import BatonError
from gateway.service.loop.experience.memory import ExperienceMemory
from gateway.service.loop.routers import LATENCY_GUESS_S, USAGE_GUESS, listed_worth
from gateway.service.loop.spending.charges import price_of
from gateway.service.ports.request import Clock, Embedder

RECORDS_FRESH_S = 60.0  # what workers did is read once in this time for each kind of task
KINDS_MAX = 256  # kinds of task, by organisation, whose records are at hand
LIKENESS_WEIGHT = 1.0  # a description of cosine 0.5 to the question is worth as much as half of all answers right
TOO_SMALL = 1000.0  # less worth than any worker whose context holds the prompt
EMBEDDED_AT_ONCE = 16  # descriptions; then the event loop turns

BUILTIN = "builtin:"  # how the url of a tool in the gateway begins
BOARDS_MAX = 64  # pools as keys may use them, in memory

Vector = NDArray[np.float32]
Identities = tuple[str, ...]
Kind = tuple[str, str | None]  # the organisation that asks, and the type of its task


@dataclass(frozen=True, slots=True)
class Candidates:
    """`workers`: who may be planned for, in the order of the pool. `drawn`: the probability of those drawn at random,
    by name; empty where the whole pool is shown."""

    workers: tuple[WorkerSpec, ...]
    drawn: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Records:
    """The utility of a board's workers by what they did on one kind of task, and when that was read."""

    worth: Vector
    read_s: float


class _Board:
    """The workers of one pool that a request chooses among."""

    def __init__(self, workers: Sequence[WorkerSpec]) -> None:
        self.always = [at for at, spec in enumerate(workers) if is_own(spec)]
        self.places = [at for at, spec in enumerate(workers) if not is_own(spec)]  # of `others` among the workers
        self.others = [workers[at] for at in self.places]
        self.texts = [description_of(spec) for spec in self.others]
        self.models = np.array([spec.kind in MODEL_KINDS for spec in self.others])
        self.contexts = np.array([spec.context_tokens for spec in self.others])
        self.table: Vector | None = None  # of the descriptions' vectors, one row a worker
        self.records: dict[Kind, _Records] = {}
        self.unread: Vector | None = None  # the utility of workers of whom nothing is known


class Shortlist:
    """Chooses candidates. `most`: workers of a plan; `explored`: how many of these are drawn at random."""

    def __init__(
        self, embedder: Embedder, memory: ExperienceMemory, clock: Clock, k: int, *, most: int, explored: int
    ) -> None:
        """`k`: judged steps of a worker that its record is a mean of."""
        self._embedder, self._memory, self._clock, self._k = embedder, memory, clock, k
        self._most, self._explored = most, min(explored, most - 1)
        self._boards: dict[Identities, _Board] = {}
        self._latest: dict[int, tuple[Sequence[WorkerSpec], _Board]] = {}  # by the id of the workers as one object
        self._vectors: dict[str, Vector] = {}  # by description
        self._tasks: dict[object, asyncio.Task[None]] = {}

    async def of(
        self,
        workers: Sequence[WorkerSpec],
        question: Callable[[], str],
        kind: Kind,
        tokens: int,
        draw: Random,
    ) -> Candidates:
        """The candidates of a request of about `tokens` tokens. `question` gives what the embedder may see of it.

        What is not known yet (the meaning of a description, a worker's record) is read beside the request and counts
        for the next one. An embedder that fails costs the request nothing."""
        if len(workers) <= self._most:
            return Candidates(tuple(workers))
        board = self._board(workers)
        if len(board.others) <= self._most:
            return Candidates(tuple(workers))
        worth = self._worth(board, kind) + LIKENESS_WEIGHT * await self._likeness(board, question)
        roomy = board.contexts > tokens
        best = self._best(board, np.where(roomy, worth, worth - TOO_SMALL))
        others = roomy.copy()
        others[best] = False
        rest = np.flatnonzero(others).tolist()
        drawn = sorted(draw.sample(rest, min(self._explored, len(rest))))
        chosen = sorted([*board.always, *(board.places[index] for index in (*best, *drawn))])
        share = len(drawn) / len(rest) if rest else 0.0
        return Candidates(
            tuple(workers[at] for at in chosen),
            {board.others[index].name: share for index in drawn},
        )

    async def settled(self) -> None:
        """Wait until nothing is being read: before a measurement, and in tests."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    def _board(self, workers: Sequence[WorkerSpec]) -> _Board:
        """What is known of these workers. The same object is found by itself, another with the same ones by them."""
        latest = self._latest.get(id(workers))
        if latest is not None and latest[0] is workers:
            return latest[1]
        identities = tuple(spec.identity for spec in workers)
        if identities not in self._boards:
            while len(self._boards) >= BOARDS_MAX:
                self._boards.pop(next(iter(self._boards)))
            self._boards[identities] = _Board(workers)
        while len(self._latest) >= BOARDS_MAX:
            self._latest.pop(next(iter(self._latest)))
        self._latest[id(workers)] = workers, self._boards[identities]
        return self._boards[identities]

    def _best(self, board: _Board, worth: Vector) -> list[int]:
        """The likeliest. Models and tools have places by their numbers, one at least: what they do differs."""
        places = self._most - self._explored
        order = np.argsort(-worth, kind="stable")
        models, tools = order[board.models[order]], order[~board.models[order]]
        for_tools = min(len(tools), max(1, round(places * len(tools) / len(worth))), places - 1) if len(tools) else 0
        return [*models[: places - for_tools].tolist(), *tools[:for_tools].tolist()]

    # ------------------------------------------------------------ meaning

    async def _likeness(self, board: _Board, question: Callable[[], str]) -> Vector:
        """The cosine of each description and the question; 0 for all until every description has its vector."""
        if board.table is None:
            missing = [text for text in board.texts if text not in self._vectors]
            if missing:
                self._begin("descriptions", lambda: self._describe(missing))
                return np.zeros(len(board.texts), np.float32)
            board.table = np.stack([self._vectors[text] for text in board.texts])
        try:
            vector = np.asarray(await self._embedder.embed(question()), np.float32)
        except BatonError:
            return np.zeros(len(board.texts), np.float32)
        return board.table @ vector

    async def _describe(self, texts: Sequence[str]) -> None:
        for number, text in enumerate(dict.fromkeys(texts)):
            self._vectors[text] = np.asarray(await self._embedder.embed(text), np.float32)
            if number % EMBEDDED_AT_ONCE == 0:
                await asyncio.sleep(0)

    # ------------------------------------------------------------ records

    def _worth(self, board: _Board, kind: Kind) -> Vector:
        """The utility of each worker by what was last read of it; a new read begins where that is old."""
        records = board.records.get(kind)
        if records is None or self._clock.monotonic_s() - records.read_s > RECORDS_FRESH_S:
            self._begin((id(board), kind), lambda: self._read(board, kind))
        if records is not None:
            return records.worth
        if board.unread is None:
            board.unread = self._utilities(board, {})
        return board.unread

    def _utilities(self, board: _Board, past: Mapping[str, WorkerExperience]) -> Vector:
        """The utility of each worker as the rule reckons it, by the prices of the whole board."""
        worth = listed_worth(board.others)
        return np.array([utility(_arm(spec, past.get(spec.name)), worth) for spec in board.others], np.float32)

    async def _read(self, board: _Board, kind: Kind) -> None:
        versions = {spec.name: spec.version for spec in board.others if spec.kind in MODEL_KINDS}
        org, task_type = kind
        past = await self._memory.records(org, task_type, versions, self._k)
        if past is None:
            return  # the next request begins it again
        while len(board.records) >= KINDS_MAX and kind not in board.records:
            board.records.pop(next(iter(board.records)))
        worth = self._utilities(board, past)
        board.records[kind] = _Records(worth, self._clock.monotonic_s())

    def _begin(self, name: object, work: Callable[[], Awaitable[None]]) -> None:
        """Start a read, unless the same one is under way."""
        if name in self._tasks:
            return
        task = asyncio.ensure_future(self._quietly(work))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _quietly(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except BatonError:
            return  # the next request begins it again


def _arm(spec: WorkerSpec, past: WorkerExperience | None) -> Arm:
    if past is None:
        usd = cost_nano(price_of(spec), USAGE_GUESS) / NANO_PER_USD
        return Arm(spec.name, spec.handle, usd, spec.latency_hint_s or LATENCY_GUESS_S)
    return Arm(spec.name, spec.handle, past.cost_nano_mean / NANO_PER_USD, past.latency_ms_mean / 1000, past)


def is_own(spec: WorkerSpec) -> bool:
    """Whether the gateway itself is this worker: a child loop or a built-in tool. Those are always offered."""
    return spec.kind == "self" or (spec.kind == "tool" and (spec.url or "").startswith(BUILTIN))


def description_of(spec: WorkerSpec) -> str:
    """The text by which a worker is looked up."""
    return " ".join((spec.name, spec.description, *spec.tags))
