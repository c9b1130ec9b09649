"""The judged steps of one owner as arrays: an organisation's, or those that a pool shares. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.core.loop.experience.belief import Vector
from gateway.core.loop.experience.likeness import EMBEDDING_DIM, TASK_TYPE_SIMILARITY

STEPS_MAX = 1_000  # latest judged steps of a worker that are remembered
STEP_BYTES = 4 * EMBEDDING_DIM + 600  # of one remembered step: its vector, its facts, and the places it is found by
FAILURE = "failure"  # the source of a step that failed by its worker's own fault
NO_TYPE, UNKNOWN = -1, -2
Part = tuple[int, int]  # round and step
Place = tuple[str, Part]  # of a step: its rollout, and where in it
Reals = NDArray[np.float32]
Numbers = NDArray[np.int32]


class Owner(NamedTuple):
    """Whose steps: those of an organisation, or those of every organisation in a pool that shares them."""

    kind: Literal["org", "pool"]
    name: str


class JudgedStep(NamedTuple):
    """A step with its credit. `vector`: of its question, by `embedder`; None: its text was not logged. `changed_us`:
    when the database stored it so, in microseconds since the epoch."""

    rollout_id: str
    round: int
    step: int
    org: str
    key_id: str
    pool: str
    worker: str
    version: str
    task_type: str | None
    embedder: str | None
    vector: Reals | None
    success: float
    cost_nano: int
    latency_ms: int
    weight: float
    source: str
    at_us: int
    changed_us: int


class Change(NamedTuple):
    """A step whose experience changed, when, and whose it is."""

    rollout_id: str
    part: Part
    changed_us: int
    org: str
    pool: str

    @property
    def owners(self) -> tuple[Owner, Owner]:
        """Where it is remembered."""
        return Owner("org", self.org), Owner("pool", self.pool)


class TaskQuestion(NamedTuple):
    """What steps are compared with. `vector`: None or all zeros counts task types alone."""

    task_type: str | None
    vector: Reals | None
    embedder: str


_FACTS = np.dtype(
    [
        *((name, "i8") for name in ("at", "changed")),
        ("id", "u8"),  # the first half of the rollout's
        *((name, "i2") for name in ("round", "step")),
        *((name, "i4") for name in ("type", "embedder", "key", "org")),  # numbers of names
        ("failed", "?"),
        *((name, "f8") for name in ("weight", "success", "cost", "ms")),
    ]
)


class Newest(NamedTuple):
    """Columns of one worker's steps, newest first; of one moment, the later step of the later request first. `row`: in
    the table. `type`, `embedder`, `key`, `org`: numbers of names."""

    row: NDArray[np.int64]
    at: NDArray[np.int64]
    type: Numbers
    embedder: Numbers
    key: Numbers
    org: Numbers
    failed: NDArray[np.bool_]
    weight: Vector
    success: Vector
    cost: Vector
    ms: Vector

    def of(self, chosen: NDArray[np.int64]) -> Newest:
        """Some of them."""
        return Newest._make(column[chosen] for column in self)


class Placed(NamedTuple):
    """Steps of one worker, newest first, and how similar the question of each is to the one asked."""

    steps: Newest
    similar: Vector

    def of(self, chosen: NDArray[np.int64]) -> Placed:
        """Some of them."""
        return Placed(self.steps.of(chosen), self.similar[chosen])


class _Steps:
    """The latest `most` steps of one worker version, one row each, in no order."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._facts = np.zeros(min(16, most), _FACTS)
        self._vectors = np.zeros((len(self._facts), EMBEDDING_DIM), np.float32)
        self._places: list[Place] = []  # by row
        self._rows: dict[Place, int] = {}
        self._newest: Newest | None = None

    def __len__(self) -> int:
        return len(self._places)

    @property
    def newest(self) -> Newest:
        """What is known of the steps but their vectors, newest first."""
        if self._newest is None:
            facts = self._facts[: len(self)]
            rows = np.lexsort((facts["step"], facts["round"], facts["id"], facts["at"]))[::-1]
            self._newest = Newest(rows, *(facts[name][rows] for name in Newest._fields[1:]))
        return self._newest

    def placed(self, vector: Reals | None, embedder: int, task_type: int) -> Placed:
        """The steps, newest first, and how similar their questions are to this one."""
        newest = self.newest
        similar = np.where(newest.type == task_type, TASK_TYPE_SIMILARITY, 0.0)
        if vector is not None:
            cosines = (self._vectors[: len(self)] @ vector)[newest.row]
            similar += np.where(newest.embedder == embedder, cosines, 0.0)
        return Placed(newest, similar)

    def put(self, place: Place, facts: tuple[object, ...], vector: Reals | None) -> Place | None:
        """Add a step that is not there. Where there is no room, the oldest one goes, which may be this one: returns the
        place of that."""
        row, gone = len(self), None
        if row == self._most:
            row = int(self.newest.row[-1])
            if self._facts["at"][row] > facts[0]:
                return place
            gone = self._places[row]
            del self._rows[gone]
            self._places[row] = place
        else:
            self._make_room(row + 1)
            self._places.append(place)
        self._rows[place] = row
        self._facts[row] = facts
        self._vectors[row] = 0.0 if vector is None else vector
        self._newest = None
        return gone

    def drop(self, place: Place) -> None:
        """Remove a step, if it is there; the last row takes its room."""
        row, last = self._rows.pop(place, None), len(self) - 1
        if row is None:
            return
        self._places[row] = moved = self._places[last]
        self._facts[row], self._vectors[row] = self._facts[last], self._vectors[last]
        self._places.pop()
        if row != last:
            self._rows[moved] = row
        self._newest = None

    def changed_us(self, place: Place) -> int | None:
        """When a step was stored as it is here; None where it is not."""
        row = self._rows.get(place)
        return None if row is None else int(self._facts["changed"][row])

    def _make_room(self, rows: int) -> None:
        more = min(self._most, max(rows, 2 * len(self._facts))) - len(self._facts)
        if rows > len(self._facts):
            self._facts = np.concatenate([self._facts, np.zeros(more, _FACTS)])
            self._vectors = np.concatenate([self._vectors, np.zeros((more, EMBEDDING_DIM), np.float32)])


class Past:
    """The judged steps of one owner, at most `most` of each worker version."""

    def __init__(self, most: int = STEPS_MAX) -> None:
        self._most = most
        self._steps: dict[tuple[str, str], _Steps] = {}  # by worker and version
        self._of: dict[str, dict[Part, _Steps]] = {}  # by rollout: where its steps are
        self._names: dict[str, int] = {}  # of task types, embedders, keys and organisations

    def __len__(self) -> int:
        """The number of steps."""
        return sum(map(len, self._steps.values()))

    def knows(self, rollout_id: str, part: Part, changed_us: int) -> bool:
        """Whether a step is here as it was stored at that time."""
        steps = self._of.get(rollout_id, {}).get(part)
        return steps is not None and steps.changed_us((rollout_id, part)) == changed_us

    def replace(self, rollout_id: str, steps: Iterable[JudgedStep]) -> None:
        """Forget the steps of a rollout, and learn these."""
        for part, old in self._of.pop(rollout_id, {}).items():
            old.drop((rollout_id, part))
        self.put(steps)

    def put(self, steps: Iterable[JudgedStep]) -> None:
        """Learn steps that are not here yet."""
        for one in steps:
            table = self._steps.setdefault((one.worker, one.version), _Steps(self._most))
            place = one.rollout_id, (one.round, one.step)
            gone = table.put(place, self._facts(one), one.vector)
            if gone != place:
                self._of.setdefault(one.rollout_id, {})[place[1]] = table
            if gone is not None:
                self._forget(*gone)

    def _forget(self, rollout_id: str, part: Part) -> None:
        """Forget where a step was."""
        parts = self._of.get(rollout_id, {})
        parts.pop(part, None)
        if not parts:
            self._of.pop(rollout_id, None)

    def _facts(self, one: JudgedStep) -> tuple[object, ...]:
        task_type = NO_TYPE if one.task_type is None else self._number(one.task_type)
        embedder = NO_TYPE if one.embedder is None or one.vector is None else self._number(one.embedder)
        names = task_type, embedder, self._number(one.key_id), self._number(one.org)
        newest = one.at_us, one.changed_us, int(one.rollout_id.replace("-", "")[:16], 16), one.round, one.step
        figures = one.weight, one.success, one.cost_nano, one.latency_ms
        return (*newest, *names, one.source == FAILURE, *figures)

    def _number(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def near(
        self, question: TaskQuestion, workers: Mapping[str, str], but_org: str | None = None
    ) -> Mapping[str, Placed]:
        """The steps of these workers in these versions, each worker's newest first. `but_org`: not of that one."""
        vector = question.vector if question.vector is not None and question.vector.any() else None
        embedder = self._names.get(question.embedder, UNKNOWN)
        task_type = UNKNOWN if question.task_type is None else self._names.get(question.task_type, UNKNOWN)
        org = UNKNOWN if but_org is None else self._names.get(but_org, UNKNOWN)
        placed = {}
        for worker, version in workers.items():
            steps = self._steps.get((worker, version))
            if steps:
                one = steps.placed(vector, embedder, task_type)
                placed[worker] = one if org == UNKNOWN else one.of(np.flatnonzero(one.steps.org != org))
        return {worker: one for worker, one in placed.items() if len(one.similar)}
