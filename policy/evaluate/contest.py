"""Every policy on every question, with progress; finished policies are kept, so that an interrupted run goes on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from gateway import __version__
from gateway.core.pool.workers import NANO_PER_USD
from gateway.errors import ConfigError
from gateway.files import write_atomic
from gateway.service.loop.state import Planner
from policy.engines.opening import engine_losses, first_of, open_engine
from policy.environments.base import Episode, PlanSource, Prompt
from policy.environments.sampling import CONCURRENCY, SamplingProgress, sample
from policy.evaluate.entrants import ORACLE_PLAN, TUNED, Entrant, router
from policy.evaluate.options import EvaluationOptions
from policy.evaluate.stages import EvaluationScene, digest_of
from policy.statistics.baselines import fixed

SAY_EVERY_S = 5.0  # where standard error is no terminal
REDRAW_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class QuestionResult:
    """One policy on one question."""

    prompt_id: str
    category: str
    outcome: float  # in [0, 1]
    cost_nano: int
    latency_s: float
    calls: int  # attempts at workers and tools
    rounds: int  # planned rounds that had steps
    planning_tokens: int  # prompt and plan, of all planning calls
    parsed: bool
    workers: tuple[str, ...]  # of its steps, tools included
    error: str | None  # code of what left it without an answer
    refusals: tuple[str, ...]  # why plans were refused

    @classmethod
    def of(cls, prompt: Prompt, episode: Episode) -> QuestionResult:
        """Return the result of one episode."""
        loops = (episode.record, *episode.children)
        planned = [each for loop in loops for each in loop.rounds]
        return cls(
            prompt_id=prompt.id,
            category=prompt.category or "",
            outcome=episode.outcome,
            cost_nano=episode.cost_nano,
            latency_s=episode.latency_s,
            calls=episode.calls,
            rounds=sum(bool(each.plan and each.plan["steps"]) for each in episode.record.rounds),
            planning_tokens=sum(each.prompt_tokens + each.completion_tokens for each in planned),
            parsed=episode.parsed,
            workers=episode.workers,
            error=episode.error,
            refusals=tuple(each.refusal for each in planned if each.refusal is not None),
        )


class ProgressPrinter:
    """Progress on standard error: one line redrawn on a terminal, a line every few seconds elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._last_s = 0.0 if self._terminal else time.monotonic()
        self._drawn = 0
        self._began: dict[str, int] = {}

    def progress(self, what: str, now: SamplingProgress) -> None:
        """Print the progress after an episode, at most every few seconds."""
        began_nano = self._began.setdefault(what, now.spent_nano)
        every_s = REDRAW_EVERY_S if self._terminal else SAY_EVERY_S
        if time.monotonic() - self._last_s < every_s:
            return
        usd = (now.spent_nano - began_nano) / NANO_PER_USD / now.done * 1000
        count = f"{now.done}/{now.total}" if now.total else f"{now.done}"
        self._line(f"{what}: {count}, right {now.outcome_mean:.3f}, ${usd:.3f} per 1,000, {now.elapsed_s:.0f} s")

    def done(self, text: str) -> None:
        """Print a line that stays."""
        self._line(text)
        if self._terminal:
            self._stream.write("\n")
            self._drawn = 0

    def _line(self, text: str) -> None:
        self._last_s = time.monotonic()
        if self._terminal:
            self._stream.write("\r" + text.ljust(self._drawn))
            self._drawn = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()


class PartialResults:
    """Rows of finished policies beside the report, while it is not written yet: OUT.partial/HASH.json."""

    def __init__(self, out: Path) -> None:
        """Raises ConfigError where nothing can be written there."""
        if not out.name or out.is_dir():
            raise ConfigError(f"--out {out}: is a folder; name a file in it")
        self.folder = out.with_name(out.name + ".partial")
        try:
            self.folder.mkdir(exist_ok=True)
            probe = self.folder / "probe.tmp"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"--out {out}: cannot be written ({error.strerror}); name a file in a folder that is there"
            ) from None

    def rows(self, key: str) -> list[QuestionResult] | None:
        """Return the rows stored under the key; None where none can be read."""
        try:
            record = json.loads((self.folder / f"{key}.json").read_text())
            return [_result(each) for each in record]
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def questions(self, key: str) -> dict[str, QuestionResult]:
        """Return the finished questions of a policy that has not finished, by prompt id."""
        rows: dict[str, QuestionResult] = {}
        try:
            lines = (self.folder / f"{key}.jsonl").read_text().splitlines()
        except (OSError, ValueError):
            return {}
        for line in lines:
            with suppress(ValueError, TypeError, KeyError):  # a line that was cut off
                row = _result(json.loads(line))
                rows[row.prompt_id] = row
        return rows

    def keep_question(self, key: str, row: QuestionResult) -> None:
        """Add a finished question. Raises ConfigError on a full disk."""
        path = self.folder / f"{key}.jsonl"
        try:
            with path.open("a") as file:
                file.write(f"\n{json.dumps(asdict(row))}")  # on a line of its own, also behind one that was cut off
        except OSError as error:
            raise _write_error(path, error) from None

    def keep(self, key: str, rows: Sequence[QuestionResult]) -> None:
        """Store rows under the key in one step. Raises ConfigError on a full disk."""
        write_file(self.folder / f"{key}.json", json.dumps([asdict(row) for row in rows]))
        (self.folder / f"{key}.jsonl").unlink(missing_ok=True)

    def drop(self) -> None:
        """Delete the rows once the report is written; files of others in the folder stay."""
        for path in (*self.folder.glob("*.json"), *self.folder.glob("*.jsonl")):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def drop_if_empty(self) -> None:
        """Delete the folder if it is empty, as after a refusal."""
        with suppress(OSError):
            self.folder.rmdir()


def write_file(path: Path, text: str) -> None:
    """Replace a file in one step. Raises ConfigError where it cannot be written."""
    try:
        write_atomic(path, text, durable=False)
    except OSError as error:
        raise _write_error(path, error) from None


def _write_error(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: cannot be written ({error.strerror}); make room, or name another --out")


def _result(record: Mapping[str, Any]) -> QuestionResult:
    """Raises TypeError or KeyError for a row of another shape."""
    return QuestionResult(**{**record, **{name: tuple(record[name]) for name in ("workers", "refusals")}})


async def contest(
    options: EvaluationOptions,
    scene: EvaluationScene,
    policies: Sequence[Entrant],
    partial: PartialResults,
    say: ProgressPrinter,
) -> Mapping[str, list[QuestionResult]]:
    """Return rows by policy name, each in the order of the questions. Raises ConfigError."""
    sees = any(entrant.reads_experience for entrant in policies)
    prompts = await scene.with_experience(options.neighbours if sees else 0)
    planners = {
        entrant.name: await _planner(options, scene, entrant) for entrant in policies
    }  # refused before any is run
    common = digest_of(
        [__version__, options.env, options.rounds, scene.stage.facts, [_identity_of(prompt) for prompt in prompts]]
    )
    results: dict[str, list[QuestionResult]] = {}
    for number, entrant in enumerate(policies, 1):
        key = digest_of([common, entrant.identity, await _lesson(scene, entrant), options.seed])[:32]
        rows = partial.rows(key)
        again = rows is not None
        if rows is None:
            what = f"[{number}/{len(policies)}] {entrant.name}"
            if entrant.directory is not None or entrant.endpoint is not None:
                rows = await _ModelRun(options, scene, entrant, partial, key).rows(prompts, what, say)
            else:
                rows = await _run_policy(options, scene, entrant, planners[entrant.name], prompts, what, say)
            partial.keep(key, rows)
        results[entrant.name] = rows
        right = sum(row.outcome for row in rows) / len(rows)
        usd = sum(row.cost_nano for row in rows) / NANO_PER_USD / len(rows) * 1000
        before = ", from before" if again else ""
        say.done(f"[{number}/{len(policies)}] {entrant.name}: right {right:.3f}, ${usd:.3f} per 1,000{before}")
    return results


def _identity_of(prompt: Prompt) -> list[object]:
    past = sorted((name, asdict(experience)) for name, experience in prompt.experience.items())
    return [prompt.id, [(spec.name, spec.handle) for spec in prompt.pool], past]


async def _lesson(scene: EvaluationScene, entrant: Entrant) -> str:
    """Return a digest of the lessons of a tuned policy: part of the key of its rows."""
    if entrant.kind != "tuned":
        return ""
    return digest_of([asdict(each) for each in (await scene.lessons(entrant.file)).observed])


async def _run_policy(
    options: EvaluationOptions,
    scene: EvaluationScene,
    entrant: Entrant,
    planner: Planner | None,
    prompts: Sequence[Prompt],
    what: str,
    say: ProgressPrinter,
) -> list[QuestionResult]:
    own = scene.stage.oracle_plan if entrant.identity == ORACLE_PLAN else scene.stage.oracle
    sources: list[PlanSource] = [planner or own(prompt) for prompt in prompts]
    return await _rows(scene, prompts, sources, what, say, CONCURRENCY)


async def _planner(options: EvaluationOptions, scene: EvaluationScene, entrant: Entrant) -> Planner | None:
    """Return the planner of an entrant; None for the oracles and for directories, which are opened later."""
    if entrant.kind == "fixed":
        return fixed(entrant.worker)
    if entrant.kind == "router" and entrant.identity != ORACLE_PLAN:
        return router(entrant.identity, options.seed)
    if entrant.kind != "tuned":
        return None
    lessons = await scene.lessons(entrant.file)
    try:
        return TUNED[entrant.identity.partition(":")[0]](lessons.observed, entrant.usd_weight)
    except ValueError as error:
        raise ConfigError(f"--policy {entrant.name}: {error}") from None


async def _rows(
    scene: EvaluationScene,
    prompts: Sequence[Prompt],
    sources: Sequence[PlanSource],
    what: str,
    say: ProgressPrinter,
    concurrency: int,
) -> list[QuestionResult]:
    work = [(prompt, [source]) for prompt, source in zip(prompts, sources, strict=True)]
    episodes = await sample(
        scene.stage.environment, work, concurrency=concurrency, on_progress=lambda now: say.progress(what, now)
    )
    return [QuestionResult.of(prompt, group[0]) for prompt, group in zip(prompts, episodes.groups, strict=True)]


class _ModelRun:
    """A model on every question. It is an environment for `sample`, and stores each question when it ends."""

    def __init__(
        self, options: EvaluationOptions, scene: EvaluationScene, entrant: Entrant, partial: PartialResults, key: str
    ) -> None:
        self._options, self._entrant = options, entrant
        self._environment = scene.stage.environment
        self._partial, self._key = partial, key
        self._rows = partial.questions(key)
        self.spend = self._environment.spend

    async def rows(self, prompts: Sequence[Prompt], what: str, say: ProgressPrinter) -> list[QuestionResult]:
        """Ask the questions that are not stored. Raises ConductorError when the server is lost."""
        left = [prompt for prompt in prompts if prompt.id not in self._rows]
        if len(left) < len(prompts):
            say.done(f"{what}: {len(prompts) - len(left)} of {len(prompts)} questions from before")
        full: ConfigError | None = None
        folder = self._partial.folder
        try:
            with engine_losses(lambda: f"{len(self._rows)} of {len(prompts)} questions are kept in {folder}"):
                async with self._opened(what, say) as (planner, calls_max):
                    work = [(prompt, [planner]) for prompt in left]
                    await sample(self, work, concurrency=calls_max, on_progress=lambda now: say.progress(what, now))
        except* ConfigError as group:  # a full disk
            full = first_of(group)
        if full is not None:
            raise full
        return [self._rows[prompt.id] for prompt in prompts]

    @asynccontextmanager
    async def _opened(self, what: str, say: ProgressPrinter) -> AsyncIterator[tuple[Planner, int]]:
        """The planner, and how many questions to ask it at once."""
        entrant = self._entrant
        if entrant.endpoint is not None:
            async with entrant.endpoint.open(entrant.quality) as planner:
                yield planner, entrant.endpoint.calls_max
        elif entrant.directory is not None:
            async with open_engine(entrant.directory, self._options.engine_choice) as engine:
                yield entrant.directory.planner(engine, entrant.quality), 2 * engine.calls_max
                if engine.plan_ms is not None:
                    say.done(f"{what}: {engine.plan_ms:.1f} ms a plan")

    async def episode(self, prompt: Prompt, source: PlanSource, sample: int = 0) -> Episode:
        """As the environment does, and store the result."""
        episode = await self._environment.episode(prompt, source, sample)
        row = QuestionResult.of(prompt, episode)
        self._partial.keep_question(self._key, row)
        self._rows[prompt.id] = row
        return episode


def facts_of(scene: EvaluationScene, options: EvaluationOptions, prompts: int) -> dict[str, Any]:
    """Return what was evaluated, for the report."""
    return {
        **scene.stage.facts,
        "environment": options.env,
        "split": scene.stage.split,
        "questions": prompts,
        "seed": options.seed,
        "workers": scene.workers,
    }
