"""A training run as one call: from the spec to a policy directory that appears in one step."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from pydantic import ValidationError

from gateway.core.loop.prompt import PROMPT_VERSION, QUALITY_MAX, Profile, prompt_hash, shows_quality
from gateway.core.policies.manifest import Manifest
from gateway.core.pool.workers import NANO_PER_USD
from gateway.errors import ConfigError, Unavailable
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from policy.dataset.curate import load
from policy.dataset.refusals import listed
from policy.dataset.row import Row
from policy.environments.base import Spend
from policy.environments.executor import FREE, Executor
from policy.environments.live import LiveEnvironment
from policy.environments.sampling import sample
from policy.reward import taught_dial
from policy.spec import first_of
from policy.start.recorded.school import Schooling
from policy.start.recorded.start import StartSettings, warm_start
from policy.train.run import export
from policy.train.run.checkpoint import Progress, note_spent
from policy.train.run.initial import Initial, initial_weights
from policy.train.run.loop import Trainer, unless_stopped
from policy.train.run.rollouts import ServedConductor
from policy.train.run.searched import searched
from policy.train.settings import Settings
from policy.train.sources.conductor import BatchConductor, Sampler
from policy.train.sources.live import read_pool
from policy.train.sources.logged import LoggedSource, TrainableRows, exported, likely, of_database, of_dataset
from policy.train.sources.sampled import PLAN_TIMEOUT_S, Conductors, SampledSource, Source
from policy.train.sources.scene import Scene, executor_of, open_replay, scene_of
from policy.train.sources.taught import (
    TaughtLessons,
    TaughtSource,
    Tutor,
    demonstrations,
    drawn,
    lessons_of,
    winners,
)
from policy.train.spec import TrainSpec, chosen
from policy.train.step.grpo import learn
from policy.train.step.masks import Masks
from policy.train.step.region import learn_near, scored
from policy.train.step.supervised import SupervisedStep
from policy.train.weights.large import LargeWeights

Say = Callable[[str], None]
Close = Callable[[], Awaitable[None]]
NEARLY_GREEDY = 0.05  # temperature: as it will be served, but for ties
ROLLOUTS = "rollouts"  # in the work directory: adapters on their way to vLLM
LIVE_WAIT_S = 0.02  # for calls to come together where the network decides when


@dataclass(frozen=True, slots=True)
class TrainResult:
    """`manifest` of the directory that was written; `capped`: money ended it before the last step."""

    out: Path
    manifest: Manifest
    steps: int
    rollouts: int
    spent_nano: int
    capped: bool


def train(
    spec: TrainSpec, out: Path, work: Path, resume: bool, say: Say, progress_file: Path | None = None
) -> TrainResult:
    """Train and write `out`. Raises BatonError (one line), Stopped after SIGTERM."""
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; give another name, or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"{error.filename}: {error.strerror}") from None
    torch.set_num_threads(spec.settings.threads)
    spec = _taught(spec, work, resume, say)
    initial = _rendering(initial_weights(spec), spec)
    spec = _dialled(spec, initial)
    masks, lessons = Masks(initial.tokens), None
    if spec.method == "sft":
        lessons, spec, initial = _lessons(spec, initial, masks, say)
    return asyncio.run(_trained(spec, initial, masks, lessons, out, work, resume, say, progress_file))


def _taught(spec: TrainSpec, work: Path, resume: bool, say: Say) -> TrainSpec:
    """The spec with weights to begin with: recorded answers are enough to make them (docs/adr/0014), kept in `work`."""
    if spec.env != "replay" or spec.init is not None or spec.method == "sft":
        return spec
    start, aside = work / "start", work / "start.tmp"
    for stale in (aside, *(() if resume else (start,))):
        shutil.rmtree(stale, ignore_errors=True)
    if not start.exists():
        environment = open_replay(spec, executor_of(spec))
        settings = StartSettings(
            seed=spec.settings.seed,
            usd_per_1k_max=spec.settings.usd_per_1k_max,
            school=Schooling(seed=spec.settings.seed, threads=spec.settings.threads),
        )
        prompts = environment.prompts("train", environment.count("train"), 0)
        try:
            warm_start(environment, prompts, settings, aside, say)
            aside.rename(start)
        except OSError as error:
            raise Unavailable(f"{work}: cannot be written ({error.strerror}); make room and run again") from None
    return spec.model_copy(update={"init": start})


def _rendering(initial: Initial, spec: TrainSpec) -> Initial:
    """The weights with the prompt that they are to be taught, where the spec names another than theirs. Raises
    ConfigError where plans are sampled: they would be plans of a prompt that the weights do not know."""
    if spec.prompt is None or spec.prompt == initial.profile:
        return initial
    if spec.method != "sft":
        raise ConfigError(
            f"--prompt {spec.prompt}: these weights know {initial.profile}; teach it first (--method sft)"
        )
    version, known = f"{spec.prompt}-{PROMPT_VERSION}", prompt_hash(spec.prompt)
    manifest = replace(initial.manifest, prompt_version=version, prompt_hash=known)
    return replace(initial, profile=spec.prompt, manifest=manifest)


def _dialled(spec: TrainSpec, initial: Initial) -> TrainSpec:
    """The spec with the dial that the weights know, where it sets none: a place must not come to mean another price."""
    try:
        dial = spec.settings.dial or taught_dial(initial.manifest.config)
        values = {**spec.settings.model_dump(), "dial": dial}
        return spec.model_copy(update={"settings": Settings.model_validate(values)})
    except (TypeError, ValueError) as error:
        reason = first_of(error) if isinstance(error, ValidationError) else error
        raise ConfigError(f"--init {initial.directory}/manifest.json: settings.dial: {reason}") from None


async def _trained(
    spec: TrainSpec,
    initial: Initial,
    masks: Masks,
    lessons: TaughtLessons | None,
    out: Path,
    work: Path,
    resume: bool,
    say: Say,
    progress_file: Path | None,
) -> TrainResult:
    if isinstance(initial.weights, LargeWeights) and initial.weights.unshared:
        say(f"each plan reads its prompt anew, which is slow: {initial.weights.unshared}")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    source, spend, close, dial = await _source(spec, initial, masks, lessons, work, say)
    near = learn_near if spec.env == "logged" else learn
    method = SupervisedStep(lessons.held_out).learn if lessons else near
    places = (work, spec.digest(), progress_file)
    trainer = Trainer(initial.weights, masks, source, spec.settings, spend, *places, method)
    try:
        progress = await trainer.run(resume, stop, say)
        quality = await unless_stopped(dial(), stop)
    finally:
        await close()
    manifest = _written(spec, initial, masks, out, progress, quality)
    capped = progress.step < spec.settings.steps
    return TrainResult(out, manifest, progress.step, progress.rollouts, progress.spent_nano, capped)


async def _source(
    spec: TrainSpec, initial: Initial, masks: Masks, lessons: TaughtLessons | None, work: Path, say: Say
) -> tuple[Source, Spend, Close, Callable[[], Awaitable[int | None]]]:
    """Where the batches come from, the meter of what they cost, what to call at the end, and who then sets the dial."""

    async def inherited() -> int | None:
        return initial.manifest.quality

    if lessons is not None:
        return TaughtSource(lessons, spec.settings), Spend(), _nothing, inherited
    if spec.env == "logged":
        log_rows = _found(spec, initial, masks)
        source = LoggedSource(log_rows, initial.version, spec.settings.requests_min)
        left_out = f"; left out: {listed(Counter(log_rows.refused))}" if log_rows.refused else ""
        say(f"{len(log_rows.rows)} plans of {log_rows.rollouts} requests{left_out}")
        return source, Spend(), _nothing, inherited
    scene = await scene_of(spec)
    live = isinstance(scene.environment, LiveEnvironment)
    conductor = _conductor(spec, initial, masks, work, live=live)
    if live:  # reserved on disk before an episode starts: what a kill leaves open counts in full
        scene.environment.spend.on_change = partial(note_spent, work)
    if scene.about:
        say(scene.about)
    sampled = SampledSource(scene, conductor, spec.settings, initial.profile)

    async def close() -> None:
        if isinstance(conductor, ServedConductor):
            await conductor.close()
        if isinstance(scene.environment, LiveEnvironment):
            await scene.environment.close()

    async def within_budget() -> int | None:
        settings = spec.settings
        await conductor.refresh()
        return await affordable(scene, conductor, initial.profile, settings, settings.usd_per_1k_max, say)

    dialled = spec.env == "replay" and spec.settings.quality is not None
    return sampled, scene.environment.spend, close, within_budget if dialled else inherited


def _conductor(
    spec: TrainSpec, initial: Initial, masks: Masks, work: Path, *, live: bool
) -> BatchConductor | ServedConductor:
    """What samples the plans: the vLLM of --rollouts, else these weights in this process. Raises ConfigError."""
    name, settings = _name(spec, initial), spec.settings
    if spec.rollouts:
        return ServedConductor(spec.rollouts, initial, masks, work / ROLLOUTS, name, settings.rollout_drift_max)
    sampler = Sampler(initial.weights, initial.tokens, masks, settings.tokens_max)
    conductor = BatchConductor(sampler, initial.tokens, masks, initial.weights.context, name)
    conductor.apart, conductor.wait_s = live, LIVE_WAIT_S if live else 0.0
    return conductor


async def _nothing() -> None:
    """What has nothing to close."""


def _found(spec: TrainSpec, initial: Initial, masks: Masks) -> TrainableRows:
    """The log's rows. What the rule drew gets the log-probs of the weights that training begins with."""
    known, settings = initial.manifest.prompt_hash, spec.settings
    if spec.export is None and not spec.database:
        raise ConfigError("--env logged needs --database URL, or --export FILE of `traces export`")
    rows = exported(spec.export) if spec.export else of_database(spec.database, spec.filters)
    tutor = Tutor(initial.tokens, masks, initial.profile, initial.weights.context)
    log_rows = of_dataset(rows, known, settings.reward, partial(drawn, tutor=tutor))
    rows_scored = scored(initial.weights, masks, log_rows.rows, settings.tokens_max)
    return likely(replace(log_rows, rows=rows_scored), settings.weight_max)


def _lessons(spec: TrainSpec, initial: Initial, masks: Masks, say: Say) -> tuple[TaughtLessons, TrainSpec, Initial]:
    """Plans that won, out of the log or found by search on recorded answers, and demonstrations; with the dial and its
    place that a search sets. Raises ConfigError where there is no lesson."""
    tutor = Tutor(initial.tokens, masks, initial.profile, initial.weights.context)
    if spec.env == "replay":
        found = searched(spec, tutor, say)
        dialled = spec.settings.model_copy(update={"dial": found.dial})
        spec = spec.model_copy(update={"settings": dialled})
        quality = found.quality if shows_quality(initial.profile) else None
        initial = replace(initial, manifest=replace(initial.manifest, quality=quality))
        rows, refused = found.rows, found.refused
    elif spec.database or spec.export or spec.demonstrations:
        rows, refused = winners(_calls(spec), tutor, spec.settings)
    else:
        raise ConfigError(
            "--method sft needs --database URL, --export FILE of `traces export`, --demonstrations FILE or --env replay"
        )
    if spec.demonstrations is not None:
        pool = read_pool(spec.pool_file or Path(), spec.pool)
        shown, unusable = demonstrations(spec.demonstrations, pool, Executor(), tutor, spec.settings.seed)
        rows, refused = rows + shown, refused + unusable
    lessons = lessons_of(rows, refused, spec.settings)
    left_out = f"; left out: {listed(refused)}" if refused else ""
    say(f"{len(lessons.train)} lessons of {lessons.requests} requests, {len(lessons.held_out)} held out{left_out}")
    return lessons, spec, initial


def _calls(spec: TrainSpec) -> list[Row]:
    """Logged planning calls, whoever planned them: with or without tokens, judged or demonstrated."""
    if spec.export is not None:
        return exported(spec.export)
    if not spec.database:
        return []
    selection, rules = chosen(spec.filters)
    return load(spec.database, replace(selection, min_outcomes=0), replace(rules, tokens_required=False)).train


def _name(spec: TrainSpec, initial: Initial) -> str:
    version = spec.version or initial.manifest.next_version
    return f"{spec.name or initial.manifest.name}@{version}"


def _written(
    spec: TrainSpec, initial: Initial, masks: Masks, out: Path, progress: Progress, quality: int | None
) -> Manifest:
    """The policy directory, written aside and moved into place."""
    name, _, version = _name(spec, initial).partition("@")
    parent = initial.manifest
    manifest = Manifest(
        name=name,
        version=version,
        prompt_version=parent.prompt_version,
        prompt_hash=parent.prompt_hash,
        seed=spec.settings.seed,
        data=_data(spec, progress),
        command=f"python -m policy train --spec {out.name}/manifest.json --out DIR",
        created=export.now(),
        params=0,
        pools=parent.pools,
        parent=initial.parent,
        rollouts=progress.rollouts,
        rounds=spec.settings.rounds if spec.env in ("arena", "replay") else parent.rounds,  # it was sampled with
        quality=quality,
        config=export.as_plain(spec.model_dump(mode="json", exclude={"database"})),  # its URL may hold a password
        revision=export.revision(),
        probe=export.probe_of(initial.weights, initial.tokens, masks, initial.profile),
    )
    aside = out.parent / f".{out.name}.tmp"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        written = export.write(aside, initial, manifest, spec.settings)
        aside.rename(out)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise Unavailable(f"--out {out}: cannot be written ({error.strerror}); run again with --resume") from None
    return written


def _data(spec: TrainSpec, progress: Progress) -> str:
    if spec.method == "sft":
        log = "log" if spec.database else str(spec.export or spec.data or "")
        sources = [str(one) for one in (log, spec.demonstrations) if one]
        return f"plans of {progress.rollouts} requests: {' and '.join(sources)}"
    where = {"replay": spec.data, "arena": spec.staff, "live": spec.prompts_file}.get(spec.env) or ""
    return f"{progress.rollouts} rollouts: {spec.env} {where}".strip()


# ---------------------------------------------------------------- the dial


async def affordable(
    scene: Scene, conductor: Conductors, profile: Profile, settings: Settings, usd_per_1k_max: float,
    say: Callable[[str], None],
) -> int:  # fmt: skip
    """The highest place of the dial whose plans cost no more on training questions, shown where a request sets none; 0
    where none does. Stops once two places in a row were too dear."""
    asking = ConductorSettings(profile, FREE, PLAN_TIMEOUT_S, settings.plan_tokens, NEARLY_GREEDY, trained=True)
    best, too_dear = 0, 0
    say(f"asking {min(settings.dial_questions, len(scene.prompts))} training questions at each place of the dial")
    for quality in range(QUALITY_MAX + 1):
        posed = [
            replace(scene.posed(prompt, settings, -1).prompt, quality=quality)
            for prompt in scene.prompts[: settings.dial_questions]
        ]
        planners = [ConductorPlanner(conductor.of("dial", quality, prompt.id), asking) for prompt in posed]
        work = [(prompt, [planner]) for prompt, planner in zip(posed, planners, strict=True)]
        found = (await sample(scene.environment, work, concurrency=len(work))).episodes
        usd = fmean(episode.cost_nano for episode in found) / NANO_PER_USD * 1000
        right = fmean(episode.outcome for episode in found)
        say(f"dial {quality}: right {right:.3f} of {len(found)} training questions, ${usd:.2f} per 1,000")
        best, too_dear = (quality, 0) if usd <= usd_per_1k_max else (best, too_dear + 1)
        if too_dear == 2:
            break
    return best
