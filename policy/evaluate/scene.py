"""Where policies are compared: the environment, the questions to be asked, and others to learn from, never both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from gateway.adapters.engines.sealed import file_sha256
from gateway.core.loop.experience import question_text
from gateway.core.pool.workers import Price
from gateway.errors import ConfigError
from policy.environments.arena import ArenaEnvironment
from policy.environments.base import MODEL_KINDS, Planner, Prompt, Split, fraction
from policy.environments.executed import ExecutedEnvironment
from policy.environments.executor import Executor
from policy.environments.replay import ReplayEnvironment
from policy.environments.sampling import Progress
from policy.evaluate.asked import ARENA_QUESTIONS, Asked
from policy.evaluate.nearest import Nearest
from policy.simulators.handles import HANDLES
from policy.simulators.replay import BadRecording, Recordings, load, models_in, question_key, read_prices
from policy.statistics import tuning

SPLITS: tuple[Split, ...] = ("train", "validation")
OnProgress = Callable[[str, Progress], None]


@dataclass(frozen=True, slots=True)
class Lessons:
    """What tuned policies and experience come from: questions that are not evaluated, each asked of every worker."""

    source: str
    observed: Sequence[tuning.Observed]
    left_out: int  # questions of the source that are evaluated
    absent: tuple[str, ...]  # workers that it says nothing of

    def facts(self) -> dict[str, Any]:
        """For the report."""
        return {
            "source": self.source,
            "questions": len(self.observed),
            "left_out_because_evaluated": self.left_out,
            "workers_absent": list(self.absent),
        }


class NothingToLearn(ConfigError):
    """Every question of the source is evaluated."""


class Stage(Protocol):
    """One kind of environment with its questions."""

    @property
    def environment(self) -> ExecutedEnvironment:
        """Where plans run."""
        ...

    @property
    def prompts(self) -> list[Prompt]:
        """The questions that are evaluated."""
        ...

    @property
    def split(self) -> str:
        """Which split they are of."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """Where they come from, for the report."""
        ...

    def oracle(self, prompt: Prompt) -> Planner | str:
        """The environment's."""
        ...

    def lessons(self, file: Path | None) -> tuple[ExecutedEnvironment, list[Prompt], Lessons]:
        """Questions to learn from and where to ask them; `Lessons.observed` is still empty. Raises ConfigError."""
        ...


class Scene:
    """A stage with what is learnt beside it; each source is observed once."""

    def __init__(self, asked: Asked, on_progress: OnProgress, files: Sequence[Path] = ()) -> None:
        """`files`: those that policies name to be tuned on. Raises ConfigError."""
        self._train = asked.train or next(iter(files), None)
        self.stage: Stage = _ArenaStage(asked) if asked.env == "arena" else _ReplayStage(asked, self._train)
        self._on_progress = on_progress
        self._lessons: dict[Path | None, Lessons] = {}

    @property
    def workers(self) -> list[str]:
        """Names of the model workers, sorted."""
        return sorted({spec.name for spec in self.stage.prompts[0].pool if spec.kind in MODEL_KINDS})

    @property
    def learnt(self) -> list[Lessons]:
        """Every source that was used."""
        return list(self._lessons.values())

    async def lessons(self, file: Path | None = None) -> Lessons:
        """From `file`; None: from the default source. Raises ConfigError; NothingToLearn where none is left."""
        file = file or self._train
        if file not in self._lessons:
            environment, prompts, lessons = self.stage.lessons(file)
            if not prompts:
                raise NothingToLearn(
                    f"{lessons.source}: no question is left to learn from, for all are evaluated; give another --train "
                    "FILE, or --split validation"
                )
            observed = await tuning.observe(
                environment, prompts, lambda progress: self._on_progress(f"learning from {lessons.source}", progress)
            )
            self._lessons[file] = replace(lessons, observed=observed)
        return self._lessons[file]

    async def experienced(self, neighbours: int) -> list[Prompt]:
        """The evaluated questions with what the workers did on the nearest others; bare with 0 neighbours, or where
        there are no others."""
        if not neighbours:
            return self.stage.prompts
        try:
            near = Nearest((await self.lessons()).observed, neighbours)
        except NothingToLearn:
            return self.stage.prompts
        return [replace(prompt, experience=near.of(question_text(prompt.messages))) for prompt in self.stage.prompts]


# ---------------------------------------------------------------- recorded answers


class _ReplayStage:
    def __init__(self, asked: Asked, train: Path | None) -> None:
        if asked.data is None or asked.prices is None:
            raise ConfigError("--env replay needs --data FILE and --prices FILE")
        self._asked, self._data = asked, asked.data
        recordings = _loaded(asked.data, asked.workers)
        self._prices = _prices(asked.prices, recordings.models)
        self.environment = _replay(recordings, self._prices, Executor(rounds=asked.rounds))
        other = train is not None and not _same(train, asked.data)
        self.split = asked.split or ("all" if other else "validation")
        self.prompts = self._chosen(SPLITS if self.split == "all" else (self.split,))
        self._asked_keys = {question_key(question_text(prompt.messages)) for prompt in self.prompts}
        self.facts = {"file": str(asked.data), "sha256": sha256_of(asked.data), "prices": str(asked.prices)}

    def _chosen(self, splits: Sequence[Split]) -> list[Prompt]:
        found = _every(self.environment, splits, self._asked.seed)
        n = len(found) if self._asked.n is None else self._asked.n
        if not found or n > len(found):
            wanted = f"{n} questions asked for" if found else "no question to evaluate"
            raise ConfigError(f"{self._data}: {wanted}: split {self.split} has {len(found)}; change --n or --split")
        return found[:n]

    def oracle(self, prompt: Prompt) -> str:
        return self.environment.oracle(prompt)

    def lessons(self, file: Path | None) -> tuple[ExecutedEnvironment, list[Prompt], Lessons]:
        if file is None or _same(file, self._data):
            source, environment, splits = f"the train split of {self._data}", self.environment, SPLITS[:1]
            names: Sequence[str] = environment.models
        else:
            names = [name for name in self.environment.models if name in _models_in(file)]
            if not names:
                raise ConfigError(f"{file}: says nothing of any of {', '.join(self.environment.models)}")
            environment = _replay(_loaded(file, names), self._prices, Executor(rounds=1))
            source, splits = str(file), SPLITS
        every = _every(environment, splits, self._asked.seed)
        kept = [prompt for prompt in every if question_key(question_text(prompt.messages)) not in self._asked_keys]
        absent = tuple(name for name in self.environment.models if name not in names)
        return environment, kept[: self._asked.train_n], Lessons(source, (), len(every) - len(kept), absent)


class _Replay(ReplayEnvironment):
    """With the names of its models."""

    models: tuple[str, ...] = ()


def _replay(recordings: Recordings, prices: Mapping[str, Any], executor: Executor) -> _Replay:
    try:
        made = _Replay(recordings, prices, executor=executor)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"the pool of these workers: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except BadRecording as error:
        raise ConfigError(str(error)) from None
    made.models = recordings.models
    return made


def _every(environment: ReplayEnvironment, splits: Sequence[Split], seed: int) -> list[Prompt]:
    """All questions of the splits, in the order of a hash of (seed, id): the order within one split is the same."""
    found = [prompt for split in splits for prompt in environment.prompts(split, environment.count(split), seed)]
    return sorted(found, key=lambda prompt: (fraction("prompts", seed, prompt.id), prompt.id))


def _loaded(path: Path, models: Sequence[str]) -> Recordings:
    known = _models_in(path)
    if len(models or known) > len(HANDLES):
        raise ConfigError(f"{path}: {len(models or known)} workers; a pool has at most {len(HANDLES)}: give --workers")
    try:
        return load(path, models)
    except BadRecording as error:
        if "has no answers of" in str(error):
            raise ConfigError(f"{error} (it has {', '.join(known)})") from None
        raise ConfigError(str(error)) from None


def _models_in(path: Path) -> tuple[str, ...]:
    try:
        return models_in(path)
    except BadRecording as error:
        raise ConfigError(str(error)) from None


def _prices(path: Path, models: Sequence[str]) -> dict[str, Any]:
    try:
        prices = read_prices(path)
    except BadRecording as error:
        raise ConfigError(str(error)) from None
    for model in models:
        found = prices.get(model)
        if not isinstance(found, dict):
            raise ConfigError(f"{path}: no price of `{model}`; add input_usd_per_mtok and output_usd_per_mtok")
        try:
            Price(**{key: f"{found[key]}" for key in ("input_usd_per_mtok", "output_usd_per_mtok")})
        except (KeyError, ValidationError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error.errors()[0]["msg"]
            raise ConfigError(f"{path}: the price of `{model}` cannot be used: {what}") from None
    return prices


def _same(one: Path, other: Path) -> bool:
    """Whether two paths hold the same bytes. Raises ConfigError."""
    return one.resolve() == other.resolve() or sha256_of(one) == sha256_of(other)


def sha256_of(path: Path) -> str:
    """Hex digest of a file. Raises ConfigError."""
    try:
        return file_sha256(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def digest_of(value: object) -> str:
    """Hex digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


# ---------------------------------------------------------------- the arena


class _ArenaStage:
    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self.environment = ArenaEnvironment(staff=asked.staff, executor=Executor(rounds=asked.rounds))
        split: Split = "train" if asked.split == "train" else "validation"
        self.split = split
        self.prompts = self.environment.prompts(split, asked.n or ARENA_QUESTIONS, asked.seed)
        self.facts = {"staff": asked.staff, "prices": "simulated"}

    def oracle(self, prompt: Prompt) -> Planner:
        return self.environment.oracle(prompt)

    def lessons(self, file: Path | None) -> tuple[ExecutedEnvironment, list[Prompt], Lessons]:
        if file is not None:
            raise ConfigError(f"{file}: the arena tunes on its own questions; drop the file")
        texts = {question_text(prompt.messages) for prompt in self.prompts}
        every = self.environment.prompts("train", min(self._asked.train_n, 2 * ARENA_QUESTIONS), self._asked.seed)
        kept = [prompt for prompt in every if question_text(prompt.messages) not in texts]
        source = "arena questions in the phrasings of the train split"
        return self.environment, kept, Lessons(source, (), len(every) - len(kept), ())
