"""Questions from a file, answered by real workers through a running gateway, under a dollar cap."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.core.money.amounts import usd_to_nano
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.errors import ConfigError
from policy import graders
from policy.environments.base import Prompt, Spend
from policy.environments.executor import Executor
from policy.environments.live import LiveEnvironment
from policy.graders.base import GraderError
from policy.spec import first_of
from policy.train.spec import TrainSpec

PROMPTS_MAX = 200_000
FILE_BYTES_MAX = 256 << 20
KEY_BYTES_MAX = 4096


class PromptLine(BaseModel):
    """A line of the prompts file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1, max_length=200)
    question: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    reference: str
    category: str = ""


def open_live(spec: TrainSpec, executor: Executor) -> tuple[LiveEnvironment, int]:
    """The environment that the spec names, and how many questions it has. Raises ConfigError for whatever is missing or
    cannot be read."""
    executor = replace(executor, caps=replace(executor.caps, cost_nano=usd_to_nano(spec.episode_usd_max)))
    for name in ("url", "key_file", "prompts_file", "pool_file", "usd_max"):
        if not getattr(spec, name):
            raise ConfigError(f"--env live needs --{name.replace('_', '-').removesuffix('-file')}: `--help` says what")
    pool = read_pool(spec.pool_file or Path(), spec.pool)
    prompts = _prompts(spec.prompts_file or Path(), pool, spec.grader)
    spend = _spend(spec.usd_max, executor)

    def judged(prompt: Prompt, reply: str) -> float:
        return _judged(spec.grader, prompt.reference, reply)

    key = _text(spec.key_file or Path(), KEY_BYTES_MAX).strip()
    return LiveEnvironment(spec.url, key, prompts, judged, spend, validation_share=0.0, executor=executor), len(prompts)


def _judged(grader: str, reference: str, reply: str) -> float:
    """In a thread with an event loop of its own: graders are asynchronous, the environment's port is not."""
    try:
        with ThreadPoolExecutor(1) as apart:
            return apart.submit(asyncio.run, graders.grade(grader, reference, reply)).result().value
    except GraderError as error:
        raise ConfigError(f"--grader {grader}: {error}") from None


def _spend(usd_max: str, executor: Executor) -> Spend:
    try:
        return Spend(cap_nano=usd_to_nano(usd_max), episode_nano_max=executor.caps.cost_nano)
    except ValueError as error:
        raise ConfigError(f"--usd-max {usd_max}: {error}") from None


def read_pool(path: Path, name: str) -> tuple[WorkerSpec, ...]:
    """The workers of a pool of a pool file; its default pool where `name` is empty. Raises ConfigError."""
    try:
        document = PoolFile.model_validate(yaml.safe_load(_text(path, 1 << 20)))
        return document.pool(name or document.default)
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"--pool-file {path}: no pool file ({str(error).splitlines()[0]})") from None
    except KeyError:
        raise ConfigError(f"--pool {name}: not in {path}") from None


def _prompts(path: Path, pool: tuple[WorkerSpec, ...], grader: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, text in enumerate(_text(path, FILE_BYTES_MAX).splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = PromptLine.model_validate(json.loads(text))
            graders.check_reference(grader, line.reference)
        except (ValueError, GraderError) as error:
            why = first_of(error) if isinstance(error, ValidationError) else str(error)
            raise ConfigError(f"--prompts {path}:{number}: {why}") from None
        prompts.append(_prompt(line, pool, f"{path}:{number}"))
        if len(prompts) > PROMPTS_MAX:
            raise ConfigError(f"--prompts {path}: over {PROMPTS_MAX} lines; give fewer")
    if not prompts:
        raise ConfigError(f"--prompts {path}: holds no question")
    return prompts


def _prompt(line: PromptLine, pool: tuple[WorkerSpec, ...], where: str) -> Prompt:
    messages: tuple[Mapping[str, Any], ...] = line.messages or ({"role": "user", "content": line.question},)
    if not (line.messages or line.question):
        raise ConfigError(f"--prompts {where}: needs `question` or `messages`")
    return Prompt(line.id, messages, pool, line.reference, line.category or None)


def _text(path: Path, bytes_max: int) -> str:
    try:
        with path.open("rb") as file:
            return file.read(bytes_max).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: cannot be read ({why})") from None
