"""Logged rows for the gate's tests: a policy at temperature 1 in the arena, as the gateway would have logged it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.core.log.rollout import RolloutRecord, RoundRecord
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from policy.dataset import parquet
from policy.dataset.row import Row, StepRow
from policy.engines.choice import EngineChoice
from policy.engines.directory import read_conductors
from policy.engines.opening import open_engine
from policy.environments.arena import ArenaEnvironment
from policy.environments.base import Episode, Prompt
from policy.environments.executor import FREE
from policy.environments.sampling import EpisodeGroups, sample


def arena_rows(directory: Path, n: int, *, seed: int = 0, temperature: float = 1.0) -> list[Row]:
    """`n` requests, as rows of all their planning calls."""
    found = arena_episodes(directory, n, seed=seed, temperature=temperature)
    return [row for prompt, episode in found for row in rows_of(prompt, episode)]


def arena_episodes(directory: Path, n: int, *, seed: int = 0, temperature: float = 1.0) -> list[tuple[Prompt, Episode]]:
    """`n` questions with what the policy made of each."""
    environment = ArenaEnvironment()
    prompts = environment.prompts("train", n, seed)
    found = asyncio.run(_sampled(environment, prompts, directory, temperature))
    return [(prompt, group[0]) for prompt, group in zip(prompts, found.groups, strict=True)]


async def _sampled(
    environment: ArenaEnvironment, prompts: Sequence[Prompt], directory: Path, temperature: float
) -> EpisodeGroups:
    settings = ConductorSettings("compact", FREE, 600.0, temperature=temperature)
    async with open_engine(read_conductors([directory])[directory], EngineChoice()) as engine:
        planner = ConductorPlanner(engine, settings)
        return await sample(environment, [(prompt, [planner]) for prompt in prompts], concurrency=4)


def rows_of(prompt: Prompt, episode: Episode) -> Iterable[Row]:
    root = episode.record
    for loop in (root, *episode.children):
        for planned in loop.rounds:
            yield _row(prompt, episode, root, loop, planned)


def _row(prompt: Prompt, episode: Episode, root: RolloutRecord, loop: RolloutRecord, planned: RoundRecord) -> Row:
    names = ("messages", "prompt_token_ids", "plan_token_ids", "plan_logprobs", "decision_mask", "plan_text", "plan")
    more = ("sampling", "schema_hash", "allowed", "quality", "prompt_version", "prompt_hash", "planner")
    rest = ("policy_version", "refusal", "round")
    copied: dict[str, Any] = {name: getattr(planned, name) for name in (*names, *more, *rest)}
    return Row(
        **copied,
        rollout_id=loop.id,
        root_id=root.id,
        parent_id=loop.parent_id,
        depth=loop.depth,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        key_id="key",
        log_mode="full",
        pool_name="arena",
        pool=loop.pool,
        caps=loop.caps,
        workers_used=(),
        task_type=prompt.category,
        tags={},
        group=hashlib.sha256(prompt.id.encode()).hexdigest()[:32],
        request_messages=list(prompt.messages),
        steps=tuple(_steps(loop, planned.round)),
        outcome=episode.outcome,
        outcome_n=1,
        outcome_sources=("client",),
        grader_versions=(),
        outcome_metadata={},
        cost_nano=episode.cost_nano,
        latency_ms=1000 * episode.latency_s,
        status=root.status,
        fallback=None,
        capped=None,
        verdicts=episode.verdicts,
    )


def _steps(loop: RolloutRecord, number: int) -> Iterable[StepRow]:
    for step in loop.steps:
        if step.round == number:
            yield StepRow(
                step.step, step.worker, step.handle, step.kind, step.worker_version, step.task, tuple(step.see),
                step.status, step.error, step.prompt_tokens, step.completion_tokens, step.cost_nano, 1.0,
            )  # fmt: skip


def export(path: Path, rows: Sequence[Row]) -> Path:
    with path.open("wb") as file:
        parquet.write(file, parquet.row_schema(), map(parquet.row_record, rows), {"shape": "parquet"})
    return path
