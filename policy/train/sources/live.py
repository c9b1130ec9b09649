"""Questions from a file or out of the log, answered by real workers through a running gateway, under a dollar cap.

Logged questions are posed as they were served: with the experience that their prompt showed of workers that are still
of that version, and judged by their own grader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gateway.adapters.host.poolfile import resolve_secret
from gateway.adapters.upstream.tools import ToolWorkers
from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.experience.likeness import question_text
from gateway.core.money.amounts import usd_to_nano, worst_case_nano
from gateway.core.pool.workers import JUDGE_URL, MODEL_KINDS, VOTE_URL, PoolFile, WorkerSpec
from gateway.errors import ConfigError
from policy import graders
from policy.environments.base import Prompt, Spend
from policy.environments.executor import Executor
from policy.environments.live import JUDGE_TOKENS_MAX, JUDGE_TRIES, LiveEnvironment
from policy.graders.base import GraderError, GraderFailed, Tools
from policy.record.questions import JUDGE, RecordQuestion, of_file, of_log
from policy.train.spec import TrainSpec, chosen

KEY_BYTES_MAX = 4096
FILE_BYTES_MAX = 1 << 20
JUDGED_TOKENS_MAX = 60_000  # of what a judge reads: question, reference and reply, each cut to what it is shown of them


@dataclass(frozen=True, slots=True)
class LiveQuestions:
    """What is asked, and how replies are graded: prompt id → (grader, its version, reference). `about`: how many, and
    what was left out."""

    prompts: list[Prompt]
    grading: Mapping[str, tuple[str, str, Any]]
    about: str = ""

    async def grade(self, prompt: Prompt, reply: str, tools: Tools) -> float:
        """The outcome of a reply. Raises GraderFailed where no judgement could be made, ConfigError where none can."""
        name, version, reference = self.grading[prompt.id]
        try:
            return (await graders.grade(name, reference, reply, version=version, tools=tools)).value
        except GraderFailed:
            raise
        except GraderError as error:
            raise ConfigError(f"question {prompt.id}: {name}: {error}") from None


def open_live(spec: TrainSpec, executor: Executor) -> tuple[LiveEnvironment, LiveQuestions]:
    """The environment that the spec names, and its questions. Raises ConfigError for whatever is missing or cannot be
    read."""
    executor = replace(executor, caps=replace(executor.caps, cost_nano=usd_to_nano(spec.episode_usd_max)))
    for name in ("url", "key_file", "pool_file", "usd_max"):
        if not getattr(spec, name):
            raise ConfigError(f"--env live needs --{name.replace('_', '-')}: `--help` says what")
    if bool(spec.prompts_file) == bool(spec.database):
        raise ConfigError("--env live needs --prompts FILE, or --database URL of the log that has the questions")
    file = _pool_file(spec.pool_file or Path())
    pool = _pool(file, spec.pool, spec.pool_file)
    questions = _questions(spec, pool)
    judge = _judge(spec, file, questions)
    judge_nano = 0 if judge is None else worst_case_nano(_priced(judge), JUDGED_TOKENS_MAX, JUDGE_TOKENS_MAX)
    episode_nano = executor.caps.cost_nano + JUDGE_TRIES * judge_nano
    key = _text(spec.key_file or Path(), KEY_BYTES_MAX).strip()
    environment = LiveEnvironment(
        spec.url,
        key,
        questions.prompts,
        questions.grade,
        _spend(spec.usd_max, episode_nano),
        validation_share=0.0,
        executor=executor,
        tools=_tools(pool),
        judge="" if judge is None else judge.name,
        judge_nano_max=judge_nano,
    )
    return environment, questions


# ---------------------------------------------------------------- questions


def _questions(spec: TrainSpec, pool: tuple[WorkerSpec, ...]) -> LiveQuestions:
    """Those that can be graded, in the order of the file or of the log."""
    rubric, left_out = spec.rubric if spec.judge else None, Counter[str]()
    if spec.prompts_file is not None:
        found, left_out["asked in an earlier line"] = of_file(spec.prompts_file, spec.grader, rubric)
    else:
        selection, _ = chosen(spec.filters)
        settings = spec.settings
        found, left_out = of_log(spec.database, selection, 1.0, settings.seed, rubric, settings.candidates, graded=True)
    graded = [one for one in found if one.grader is not None]
    if not graded:
        raise ConfigError("no question can be graded: name a grader and a reference, or a --judge")
    grading = {one.id: (*str(one.grader).split("@"), one.reference) for one in graded}
    if len(grading) < len(graded):
        raise ConfigError(f"{spec.prompts_file}: two questions have the same `id`; make it unique")
    left_out["without a grader"] = len(found) - len(graded)
    told = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()) if count)
    about = f"{len(graded)} questions" + (f"; left out: {told}" if told else "")
    return LiveQuestions([_prompt(one, pool) for one in graded], grading, about)


def _prompt(question: RecordQuestion, pool: tuple[WorkerSpec, ...]) -> Prompt:
    reference = question.gold or question_text(question.messages)
    past = {one.worker: one for one in _shown(question.pool, pool)}
    domain = question.domain
    return Prompt(question.id, question.messages, pool, reference, domain, domain, experience=past)


def _shown(entries: Sequence[Mapping[str, Any]], pool: Sequence[WorkerSpec]) -> list[WorkerExperience]:
    """The experience that a logged prompt showed, of workers that have the same version today."""
    versions = {spec.name: spec.version for spec in pool if spec.kind in MODEL_KINDS}
    return [
        WorkerExperience(one["name"], past["n"], past["success"], past["cost_nano"], past["ms"])
        for one in entries
        if (past := one.get("experience")) and versions.get(one["name"]) == one["version"]
    ]


# ---------------------------------------------------------------- workers


def read_pool(path: Path, name: str) -> tuple[WorkerSpec, ...]:
    """The workers of a pool of a pool file; its default pool where `name` is empty. Raises ConfigError."""
    return _pool(_pool_file(path), name, path)


def _pool_file(path: Path) -> PoolFile:
    try:
        return PoolFile.model_validate(yaml.safe_load(_text(path, FILE_BYTES_MAX)))
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"--pool-file {path}: no pool file ({str(error).splitlines()[0]})") from None


def _pool(file: PoolFile, name: str, path: Path | None) -> tuple[WorkerSpec, ...]:
    try:
        return tuple(_as_priced(spec, file) for spec in file.pool(name or file.default))
    except KeyError:
        raise ConfigError(f"--pool {name}: not in {path}") from None


def _as_priced(spec: WorkerSpec, file: PoolFile) -> WorkerSpec:
    """A judge with the price and the context of its model, as the gateway has it; any other worker as it is. Raises
    ConfigError."""
    if spec.url != JUDGE_URL:
        return spec
    name = str(spec.params.get("model"))
    model = next((one for one in file.workers if one.name == name and one.kind in MODEL_KINDS), None)
    if model is None:
        raise ConfigError(f"worker {spec.name} needs `params: {{model: NAME}}`, a model of the pool file")
    return spec.model_copy(update={"price": model.price, "context_tokens": model.context_tokens})


def _judge(spec: TrainSpec, file: PoolFile, questions: LiveQuestions) -> WorkerSpec | None:
    if not spec.judge:
        if any(name == JUDGE for name, _, _ in questions.grading.values()):
            raise ConfigError("a question has the grader `judge`: name the worker that judges with --judge")
        return None
    try:
        return file.worker(spec.judge)
    except KeyError:
        raise ConfigError(f"--judge {spec.judge}: no such worker in {spec.pool_file}") from None


def _priced(worker: WorkerSpec) -> Any:
    if worker.price is None:
        raise ConfigError(f"worker {worker.name} has no price: give it one in the pool file")
    return worker.price


def _tools(pool: Sequence[WorkerSpec]) -> ToolWorkers | None:
    """The client of the pool's tools that are programs behind a URL. Raises ConfigError for a key that is not a file's:
    a trainer may run where the gateway's environment is not."""
    programs = [spec for spec in pool if spec.kind == "tool" and spec.url != VOTE_URL]
    for spec in programs:
        if spec.api_key and not spec.api_key.startswith("file:"):
            raise ConfigError(f"tool {spec.name}: --env live takes its key from a file; write `api_key: file:PATH`")
    secrets = {spec.name: resolve_secret(spec.api_key, {}) for spec in programs if spec.api_key}
    return ToolWorkers(secrets, b"") if programs else None


def _spend(usd_max: str, episode_nano: int) -> Spend:
    try:
        return Spend(cap_nano=usd_to_nano(usd_max), episode_nano_max=episode_nano)
    except ValueError as error:
        raise ConfigError(f"--usd-max {usd_max}: {error}") from None


def _text(path: Path, bytes_max: int) -> str:
    try:
        with path.open("rb") as file:
            return file.read(bytes_max).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: cannot be read ({why})") from None
