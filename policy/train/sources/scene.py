"""Where a run's questions come from: an environment, its training questions, and what is shown of the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import fmean

from pydantic import ValidationError

from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.experience.likeness import question_text
from gateway.core.pool.workers import MODEL_KINDS
from gateway.errors import ConfigError
from policy.environments.arena import ArenaEnvironment, Truth
from policy.environments.base import Environment, PosedPrompt, Prompt, fraction, rng_for
from policy.environments.executor import CAPS, Executor
from policy.environments.replay import ReplayEnvironment
from policy.simulators.recordings import BadRecording, read_prices
from policy.spec import first_of
from policy.start.synthetic.label import needed_skills
from policy.statistics import tuning
from policy.statistics.tuning import Nearest
from policy.train.settings import Settings
from policy.train.sources.live import open_live
from policy.train.spec import TrainSpec

WALL_S = 3_600.0  # of one episode: many are decoded side by side, and nobody waits for a reply
COUNTED_NANO = 400_000  # the prompt shows success and speed, not dollars
FOLDS = 4  # a question's experience comes from the others' folds


Experienced = Callable[[Prompt, Random], Mapping[str, WorkerExperience]]


@dataclass(frozen=True, slots=True)
class Scene:
    """`prompts`: the training questions that the curriculum chooses from. `agreeing`: ids of those that every worker
    gets right, or every worker wrong. `experience`: what may be shown of the workers on a question, by name. `about`:
    what to tell of where they come from."""

    environment: Environment
    prompts: Sequence[Prompt]
    experience: Experienced
    agreeing: frozenset[str] = frozenset()
    about: str = ""

    def posed(self, prompt: Prompt, settings: Settings, step: int) -> PosedPrompt:
        """The question as this step asks it: pool, handles, experience and dial drawn from (seed, step, question)."""
        rng = rng_for(settings.seed, "pose", step, prompt.id)
        if rng.random() < settings.experience_share:
            prompt = replace(prompt, experience=self.experience(prompt, rng))
        if settings.quality is not None:
            prompt = replace(prompt, quality=rng.randint(*settings.quality))
        k = rng.randint(*settings.k_of_n) if settings.k_of_n else None
        return self.environment.situation(prompt, rng, k, settings.redraw_handles)


def executor_of(spec: TrainSpec) -> Executor:
    """How episodes are carried out."""
    return Executor(caps=replace(CAPS, wall_s=WALL_S), rounds=spec.settings.rounds)


async def scene_of(spec: TrainSpec) -> Scene:
    """The environment that the spec names, looked at as far as training needs. Raises ConfigError."""
    executor = executor_of(spec)
    if spec.env == "arena":
        return await _arena(spec, executor)
    if spec.env == "replay":
        return await _replay(spec, executor)
    return _live(spec, executor)


def _live(spec: TrainSpec, executor: Executor) -> Scene:
    environment, questions = open_live(spec, executor)
    count = min(spec.settings.candidates, len(questions.prompts))
    prompts = environment.prompts("train", count, spec.settings.seed)
    shown = {prompt.id: prompt.experience for prompt in prompts}
    bare = [replace(prompt, experience={}) for prompt in prompts]
    return Scene(environment, bare, lambda prompt, _: shown[prompt.id], about=questions.about)


async def _arena(spec: TrainSpec, executor: Executor) -> Scene:
    settings = spec.settings
    environment = ArenaEnvironment(staff=spec.staff, executor=executor)
    prompts = environment.prompts("train", settings.candidates, settings.seed + 1)
    if spec.staff == "fresh" or not settings.observed:
        return Scene(environment, prompts, partial(_counted, settings.neighbours))
    others = environment.prompts("train", settings.observed, settings.seed)
    near = Nearest(await tuning.observe(environment, others), settings.neighbours)
    return Scene(environment, prompts, lambda prompt, _: near.of(question_text(prompt.messages)))


def _counted(n: int, prompt: Prompt, rng: Random) -> dict[str, WorkerExperience]:
    """As if each worker had been asked `n` such questions: draws from its true skill. For pools that no other question
    has, so that nothing was observed of them."""
    truth = prompt.truth
    if not isinstance(truth, Truth):
        return {}
    skills = sorted(needed_skills(truth.task.text, None))
    found: dict[str, WorkerExperience] = {}
    for spec in prompt.pool:
        if spec.kind in MODEL_KINDS:
            known = truth.workers[spec.name].skills
            useful = [known[skill] for skill in skills if skill in known]
            rate = fmean(useful) if useful else 0.0
            right = sum(rng.random() < rate for _ in range(n))
            latency_ms = round(1000 * (spec.latency_hint_s or 0.0))
            found[spec.name] = WorkerExperience(spec.name, n, right / n, COUNTED_NANO, latency_ms)
    return found


async def _replay(spec: TrainSpec, executor: Executor) -> Scene:
    settings = spec.settings
    environment = open_replay(spec, executor)
    prompts = environment.prompts("train", min(settings.candidates, environment.count("train")), settings.seed)
    if not prompts:
        raise ConfigError(f"{spec.data}: its train split is empty; give a larger file")
    observed = await tuning.observe(environment, prompts)
    agreeing = frozenset(prompt.id for prompt, each in zip(prompts, observed, strict=True) if _agree(each))
    crossed = _crossed(prompts, observed, settings.neighbours)
    return Scene(environment, prompts, lambda prompt, _: crossed[prompt.id], agreeing)


def open_replay(spec: TrainSpec, executor: Executor) -> ReplayEnvironment:
    """The recorded answers that the spec names. Raises ConfigError."""
    if spec.data is None or spec.prices is None:
        raise ConfigError("--env replay needs --data FILE and --prices FILE")
    try:
        return ReplayEnvironment.open(spec.data, read_prices(spec.prices), spec.workers, executor=executor)
    except BadRecording as error:
        raise ConfigError(str(error)) from None
    except ValidationError as error:
        raise ConfigError(f"the pool of these workers: {first_of(error)}") from None


def _agree(observed: tuning.Observation) -> bool:
    return len({result.outcome for result in observed.results.values()}) < 2


def _crossed(
    prompts: Sequence[Prompt], observed: Sequence[tuning.Observation], neighbours: int
) -> dict[str, Mapping[str, WorkerExperience]]:
    """Experience of each question from questions of other folds: its own answers must not be in it."""
    folds = [int(FOLDS * fraction("fold", prompt.id)) for prompt in prompts]
    found: dict[str, Mapping[str, WorkerExperience]] = {}
    for which in range(FOLDS):
        others = [each for each, fold in zip(observed, folds, strict=True) if fold != which]
        near = Nearest(others, neighbours) if others else None
        for prompt, fold in zip(prompts, folds, strict=True):
            if fold == which:
                found[prompt.id] = near.of(question_text(prompt.messages)) if near else {}
    return found
