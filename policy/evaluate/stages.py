"""Where policies are compared: the environment, the questions that are asked, and others to learn from, never both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from gateway.adapters.engines.sealed import file_sha256
from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.experience.likeness import question_text
from gateway.core.pool.workers import MODEL_KINDS, Price
from gateway.errors import ConfigError
from gateway.service.loop.state import Planner
from policy.environments.arena import ArenaEnvironment, truth_of
from policy.environments.base import Prompt, Split, fraction
from policy.environments.executor import CAPS, UNHURRIED_S, ExecutedEnvironment, Executor
from policy.environments.replay import ReplayEnvironment, caps_above
from policy.environments.sampling import SamplingProgress
from policy.evaluate.options import ARENA_QUESTIONS, EvaluationOptions
from policy.simulators import HANDLES
from policy.simulators.recordings import BadRecording, Recordings, load, models_in, question_key, read_prices
from policy.start.synthetic.label import needed_skills
from policy.statistics import tuning
from policy.statistics.tuning import Nearest

SPLITS: tuple[Split, ...] = ("train", "validation")
TRUE_OUTCOMES, TRUE_COST_NANO, TRUE_LATENCY_MS = 20, 400_000, 300  # shown beside a true success
OnProgress = Callable[[str, SamplingProgress], None]


@dataclass(frozen=True, slots=True)
class Lessons:
    """What tuned policies and experience come from: questions that are not evaluated, each asked of every worker."""

    source: str
    observed: Sequence[tuning.Observation]
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

    def oracle_plan(self, prompt: Prompt) -> Planner | str:
        """The arena's plan for the question, not cross-fitted. Raises ConfigError elsewhere."""
        ...

    def lessons(self, file: Path | None) -> tuple[ExecutedEnvironment, list[Prompt], Lessons]:
        """Questions to learn from and where to ask them; `Lessons.observed` is still empty. Raises ConfigError."""
        ...


class EvaluationScene:
    """A stage with what is learnt beside it; each source is observed once."""

    def __init__(
        self,
        options: EvaluationOptions,
        on_progress: OnProgress,
        files: Sequence[Path] = (),
        stage: Stage | None = None,
    ) -> None:
        """`files`: those that policies name to be tuned on. `stage`: one of another kind, open. Raises ConfigError."""
        self._train = options.train or next(iter(files), None)
        self.stage: Stage = stage or _stage(options, self._train)
        self._true_experience = options.true_experience
        self._on_progress = on_progress
        self._lessons: dict[Path | None, Lessons] = {}

    @property
    def workers(self) -> list[str]:
        """Names of the model workers that every question may use, sorted."""
        pools = ({spec.name for spec in prompt.pool if spec.kind in MODEL_KINDS} for prompt in self.stage.prompts)
        return sorted(set.intersection(*pools))

    @property
    def sources(self) -> list[Lessons]:
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

    async def with_experience(self, neighbours: int) -> list[Prompt]:
        """The evaluated questions with what the workers did on the nearest others. The questions as they are with 0
        neighbours, where they show true experience already, where there are no others, or where each question has its
        own workers."""
        if not neighbours or self._true_experience or not self.workers:
            return self.stage.prompts
        try:
            near = Nearest((await self.lessons()).observed, neighbours)
        except NothingToLearn:
            return self.stage.prompts
        return [replace(prompt, experience=near.of(question_text(prompt.messages))) for prompt in self.stage.prompts]


def _stage(options: EvaluationOptions, train: Path | None) -> Stage:
    return _ArenaStage(options) if options.env == "arena" else _ReplayStage(options, train)


# ---------------------------------------------------------------- recorded answers


class _ReplayStage:
    def __init__(self, options: EvaluationOptions, train: Path | None) -> None:
        if options.data is None or options.prices is None:
            raise ConfigError("--env replay needs --data FILE and --prices FILE")
        self._options, self._data = options, options.data
        recordings = _load(options.data, options.workers)
        self._prices = _prices(options.prices, recordings.models)
        caps = replace(caps_above(recordings), wall_s=UNHURRIED_S)
        self.environment = _replay(recordings, self._prices, Executor(caps, options.rounds))
        other = train is not None and not _same(train, options.data)
        self.split = options.split or ("all" if other else "validation")
        self.prompts = self._choose(SPLITS if self.split == "all" else (self.split,))
        self._asked_keys = {question_key(question_text(prompt.messages)) for prompt in self.prompts}
        self.facts = {
            "file": str(options.data),
            "sha256": sha256_of(options.data),
            "prices": str(options.prices),
            "left_out": self.environment.left_out,
        }

    def _choose(self, splits: Sequence[Split]) -> list[Prompt]:
        prompts = _every(self.environment, splits, self._options.seed)
        n = len(prompts) if self._options.n is None else self._options.n
        if not prompts or n > len(prompts):
            problem = f"{n} questions asked for" if prompts else "no question to evaluate"
            raise ConfigError(f"{self._data}: {problem}: split {self.split} has {len(prompts)}; change --n or --split")
        return prompts[:n]

    def oracle(self, prompt: Prompt) -> str:
        return self.environment.oracle(prompt)

    def oracle_plan(self, prompt: Prompt) -> str:
        raise ConfigError("--policy oracle-plan is for --env arena; give oracle")

    def lessons(self, file: Path | None) -> tuple[ExecutedEnvironment, list[Prompt], Lessons]:
        if file is None or _same(file, self._data):
            source, environment, splits = f"the train split of {self._data}", self.environment, SPLITS[:1]
            names: Sequence[str] = environment.models
        else:
            names = [name for name in self.environment.models if name in _models_in(file)]
            if not names:
                raise ConfigError(f"{file}: says nothing of any of {', '.join(self.environment.models)}")
            lessons = _load(file, names)
            environment = _replay(lessons, self._prices, Executor(caps_above(lessons), rounds=1))
            source, splits = str(file), SPLITS
        every = _every(environment, splits, self._options.seed)
        prompts = [prompt for prompt in every if question_key(question_text(prompt.messages)) not in self._asked_keys]
        absent = tuple(name for name in self.environment.models if name not in names)
        return environment, prompts[: self._options.train_n], Lessons(source, (), len(every) - len(prompts), absent)


class _Replay(ReplayEnvironment):
    """With the names of its models."""

    models: tuple[str, ...] = ()


def _replay(recordings: Recordings, prices: Mapping[str, Any], executor: Executor) -> _Replay:
    try:
        environment = _Replay(recordings, prices, executor=executor)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"the pool of these workers: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except BadRecording as error:
        raise ConfigError(str(error)) from None
    environment.models = recordings.models
    return environment


def _every(environment: ReplayEnvironment, splits: Sequence[Split], seed: int) -> list[Prompt]:
    """All questions of the splits, in the order of a hash of (seed, id): the order within one split is the same."""
    prompts = [prompt for split in splits for prompt in environment.prompts(split, environment.count(split), seed)]
    return sorted(prompts, key=lambda prompt: (fraction("prompts", seed, prompt.id), prompt.id))


def _load(path: Path, models: Sequence[str]) -> Recordings:
    names = _models_in(path)
    if len(models or names) > len(HANDLES):
        raise ConfigError(f"{path}: {len(models or names)} workers; a pool has at most {len(HANDLES)}: give --workers")
    try:
        return load(path, models)
    except BadRecording as error:
        if "has no answers of" in str(error):
            raise ConfigError(f"{error} (it has {', '.join(names)})") from None
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
        price = prices.get(model)
        if not isinstance(price, dict):
            raise ConfigError(f"{path}: no price of `{model}`; add input_usd_per_mtok and output_usd_per_mtok")
        try:
            Price(**{key: f"{price[key]}" for key in ("input_usd_per_mtok", "output_usd_per_mtok")})
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
    def __init__(self, options: EvaluationOptions) -> None:
        self._options = options
        caps = replace(CAPS, wall_s=UNHURRIED_S)
        self.environment = ArenaEnvironment(staff=options.staff, executor=Executor(caps, options.rounds))
        split: Split = "train" if options.split == "train" else "validation"
        self.split = split
        prompts = self.environment.prompts(split, options.n or ARENA_QUESTIONS, options.seed)
        self.prompts = [_with_true_experience(prompt) for prompt in prompts] if options.true_experience else prompts
        self.facts = {"staff": options.staff, "prices": "simulated", "true_experience": options.true_experience}

    def oracle(self, prompt: Prompt) -> Planner:
        return self.environment.oracle(prompt)

    def oracle_plan(self, prompt: Prompt) -> Planner:
        return self.environment.children(prompt)

    def lessons(self, file: Path | None) -> tuple[ExecutedEnvironment, list[Prompt], Lessons]:
        if file is not None:
            raise ConfigError(f"{file}: the arena tunes on its own questions; drop the file")
        texts = {question_text(prompt.messages) for prompt in self.prompts}
        every = self.environment.prompts("train", min(self._options.train_n, 2 * ARENA_QUESTIONS), self._options.seed)
        prompts = [prompt for prompt in every if question_text(prompt.messages) not in texts]
        source = "arena questions in the phrasings of the train split"
        return self.environment, prompts, Lessons(source, (), len(every) - len(prompts), ())


def _with_true_experience(prompt: Prompt) -> Prompt:
    """The prompt with each model's true success on such questions, as if it had been seen on TRUE_OUTCOMES of them."""
    skills = needed_skills(question_text(prompt.messages), None)
    experience = {}
    for name, worker in truth_of(prompt).workers.items():
        if worker.kind == "openai":
            useful = [worker.skills[skill] for skill in sorted(skills) if skill in worker.skills]
            success = sum(useful) / len(useful) if useful else 0.0
            experience[name] = WorkerExperience(name, TRUE_OUTCOMES, success, TRUE_COST_NANO, TRUE_LATENCY_MS)
    return replace(prompt, experience=experience)
