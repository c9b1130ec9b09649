"""TaughtLessons for supervised training: plans that won, out of the log, and demonstrations.

Rejection sampling (RAFT, Dong et al., arXiv:2304.06767): of the plans that were made for a question, those whose
outcome is above a bound, the best by reward first. Any planner's plans do, hosted ones too: their prompt is rendered
anew with the student's own profile, and prompt and plan are cut into the student's tokens. Nothing of the planner's
tokens or log-probs is needed.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.core.loop.plan import Plan, PlanLimits, Step, validate
from gateway.core.loop.prompt import PROMPTED, QUALITY_MAX, Profile, render, schema_of
from gateway.core.loop.replies.answers import extract_answer, normalise
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import ConfigError, PlanRefused
from gateway.service.loop.conducting import prompt_input, without_toolboxes
from policy.dataset import row as dataset
from policy.dataset.refusals import RowRefused, listed
from policy.dataset.rendered import limits_of, prompt_of
from policy.dataset.rules import reward_of, unparsed, value_of
from policy.environments.base import Prompt, draw_pool, fraction, rng_for
from policy.environments.executor import Executor
from policy.serve.tokens import BadSchema, Tokens
from policy.spec import first_of
from policy.train.metrics import Value
from policy.train.settings import Settings
from policy.train.sources.sampled import Batch
from policy.train.step.masks import Masks, OutsideGrammar
from policy.train.step.rows import TrainingRow

DEMONSTRATIONS_MAX = 200_000
LINE_BYTES_MAX = 4 << 20
DEMONSTRATED = 1.0  # its reward, for the record; supervised training weighs all lessons alike


@dataclass(frozen=True, slots=True)
class TaughtLessons:
    """Rows of both sides, split by question, and why other calls were left out."""

    train: list[TrainingRow]
    held_out: list[TrainingRow]
    refused: Counter[str]

    @property
    def requests(self) -> int:
        """Requests and demonstrations behind the rows that train."""
        return len({row.episode for row in self.train})


class Tutor:
    """Turns prompts and plans into rows of one student."""

    def __init__(self, tokens: Tokens, masks: Masks, profile: Profile, context: int) -> None:
        self.profile = profile
        self._tokens = tokens
        self._masks = masks
        self._context = context

    def row(
        self, messages: Sequence[Mapping[str, str]], plan: Plan, allowed: PlanLimits, reward: float, *ids: str
    ) -> TrainingRow:
        """One lesson. `ids`: of the request, of the question, its category. Raises RowRefused where the plan is not one
        that the student could be served with, or where both are too long for it."""
        if self.profile != "checked" and any(
            step.needs_checks or step.worker in allowed.toolboxes for step in plan.steps
        ):
            raise RowRefused("other_steps")
        allowed = allowed if self.profile == "checked" else allowed.without_toolboxes()
        try:
            prompt_ids = tuple(self._tokens.encode_chat(messages))
            plan_ids = (*self._tokens.encode_text(self._text(plan)), self._tokens.eos_ids[0])
            schema = schema_of(self.profile, allowed)
            self._masks.of(schema, plan_ids)
        except (OutsideGrammar, BadSchema, ValueError):
            raise RowRefused("other_form") from None
        if len(prompt_ids) + len(plan_ids) > self._context:
            raise RowRefused("too_long")
        none, every = (0.0,) * len(plan_ids), (True,) * len(plan_ids)
        episode, question, category = ids
        return TrainingRow(prompt_ids, plan_ids, none, every, schema, 1.0, reward, episode, question, category)

    def _text(self, plan: Plan) -> str:
        """The plan as the student's grammar lets it through: JSON without white space, with `why` where its prompt asks
        for one."""
        why = {"why": plan.why} if self.profile in PROMPTED else {}
        return json.dumps({**why, "steps": plan.as_json()["steps"]}, separators=(",", ":"), ensure_ascii=False)


# ---------------------------------------------------------------- out of the log


def drawn(row: dataset.Row, reward: float, tutor: Tutor) -> TrainingRow:
    """The plan that the rule drew as the student would have written it, with the propensity that the rule logged. Its
    log-probs are not known yet. Raises RowRefused."""
    if row.plan is None:
        raise RowRefused("no_plan")
    allowed = limits_of(row)
    plan, messages = _plan(row.plan, allowed), prompt_of(row, tutor.profile)
    lesson = tutor.row(messages, plan, allowed, reward, row.root_id, row.group, row.task_type or "")
    return replace(lesson, propensity=row.propensity)


def winners(rows: Sequence[dataset.Row], tutor: Tutor, settings: Settings) -> tuple[list[TrainingRow], Counter[str]]:
    """(lessons, calls left out by reason). Of the calls of one question and round at most `plans_max` different plans,
    demonstrated ones first, then by reward."""
    refused_plans = unparsed(rows)
    refused: Counter[str] = Counter()
    offered: dict[tuple[str, int, int], list[tuple[float, dataset.Row, Plan]]] = defaultdict(list)
    for row in rows:
        try:
            reward, plan = _won(row, row.root_id not in refused_plans, settings)
            offered[row.group, row.depth, row.round].append((reward, row, plan))
        except RowRefused as error:
            refused[error.reason] += 1
    lessons: list[TrainingRow] = []
    for calls in offered.values():
        calls.sort(key=lambda one: (-one[0], one[1].call))
        lessons += _best(calls, tutor, settings.plans_max, refused)
    return lessons, refused


def _won(row: dataset.Row, parsed: bool, settings: Settings) -> tuple[float, Plan]:
    """(reward, plan) of a call that is worth learning. Raises RowRefused."""
    shown = demonstrated(row)
    if shown is not None:
        return DEMONSTRATED, shown
    if value_of(row, parsed) <= settings.outcome_above:
        raise RowRefused("lost")
    if row.plan is None or row.refusal is not None:
        raise RowRefused("no_plan")
    return reward_of(row, parsed, settings.reward), _plan(row.plan, limits_of(row))


def _plan(value: object, allowed: PlanLimits) -> Plan:
    try:
        return validate(value, allowed)
    except PlanRefused:
        raise RowRefused("no_plan") from None


def demonstrated(row: dataset.Row) -> Plan | None:
    """The plan that a person's demonstration asks for: the demonstration itself where it is a plan; else the worker of
    this plan whose reply gives the demonstrated answer, asked alone. None where it says nothing of plans."""
    if row.demonstration is None or row.round != 1 or row.depth:
        return None
    allowed = limits_of(row)
    try:
        return validate(row.demonstration, allowed)
    except PlanRefused:
        wanted = normalise(extract_answer(row.demonstration))
    said = {int(one["index"]): one["answer"] or "" for one in row.replies}
    bare = [step for step in row.steps if step.task is None and not step.see and step.handle in allowed.handles]
    right = next((step for step in bare if wanted and normalise(said.get(step.step, "")) == wanted), None)
    return None if right is None else Plan((Step(right.handle, None),))


def _best(
    calls: Iterable[tuple[float, dataset.Row, Plan]], tutor: Tutor, plans_max: int, refused: Counter[str]
) -> list[TrainingRow]:
    found: list[TrainingRow] = []
    seen: set[str] = set()
    for reward, row, plan in calls:
        kind = _in_names(row, plan)
        if len(found) >= plans_max or kind in seen:
            refused["worse_plan"] += 1
            continue
        try:
            messages = prompt_of(row, tutor.profile)
            found.append(tutor.row(messages, plan, limits_of(row), reward, row.root_id, row.group, row.task_type or ""))
            seen.add(kind)
        except RowRefused as error:
            refused[error.reason] += 1
    return found


def _in_names(row: dataset.Row, plan: Plan) -> str:
    """The plan with workers by name: requests may know a worker by other handles."""
    names = {str(one.get("handle")): str(one.get("name")) for one in row.pool}
    return json.dumps([{**step, "worker": names.get(step["worker"])} for step in plan.as_json()["steps"]])


# ---------------------------------------------------------------- out of a file


class DemonstrationLine(BaseModel):
    """A line of a demonstrations file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field("", max_length=200)
    question: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    plan: dict[str, Any]
    task_type: str = Field("", max_length=200)
    quality: int | None = Field(None, ge=0, le=QUALITY_MAX)


def demonstrations(
    path: Path, pool: tuple[WorkerSpec, ...], executor: Executor, tutor: Tutor, seed: int
) -> tuple[list[TrainingRow], Counter[str]]:
    """TaughtLessons of a file of questions with the plan that each should get; its workers by name or by handle. Raises
    ConfigError naming line and field."""
    found: list[TrainingRow] = []
    refused: Counter[str] = Counter()
    for number, line in _demonstration_lines(path):
        place = f"--demonstrations {path}:{number}"
        messages: tuple[Mapping[str, Any], ...] = line.messages or ({"role": "user", "content": line.question},)
        if not (line.messages or line.question.strip()):
            raise ConfigError(f"{place}: needs `question` or `messages`")
        name = line.id or f"line {number}"
        prompt = Prompt(name, messages, pool, "", quality=line.quality)
        posed = executor.pose(draw_pool(prompt, rng_for("demonstration", seed, number), None, None))
        allowed = posed.situation.allowed
        try:
            plan = validate(_by_handle(line.plan, pool), allowed)
        except PlanRefused as error:
            raise ConfigError(f"{place}: plan: {error.message}") from None
        try:
            situation = posed.situation if tutor.profile == "checked" else without_toolboxes(posed.situation)
            rendered = render(tutor.profile, prompt_input(situation))
            found.append(tutor.row(rendered, plan, allowed, DEMONSTRATED, f"{path}:{number}", name, line.task_type))
        except RowRefused as error:
            refused[error.reason] += 1
    return found, refused


def _by_handle(plan: Mapping[str, Any], pool: Sequence[WorkerSpec]) -> object:
    handles = {spec.name: spec.handle for spec in pool}
    steps = plan.get("steps")
    if not isinstance(steps, list):
        return dict(plan)
    return {**plan, "steps": [_step_by_handle(step, handles) if isinstance(step, dict) else step for step in steps]}


def _step_by_handle(step: Mapping[str, Any], handles: Mapping[str, str]) -> dict[str, Any]:
    named = {**step, "worker": handles.get(str(step.get("worker")), step.get("worker"))}
    contract, boxes = step.get("expect"), step.get("tools")
    if isinstance(contract, dict) and "judge" in contract:
        named["expect"] = {**contract, "judge": handles.get(str(contract["judge"]), contract["judge"])}
    if isinstance(boxes, list):
        named["tools"] = [handles.get(str(box), box) for box in boxes]
    return named


def _demonstration_lines(path: Path) -> Iterable[tuple[int, DemonstrationLine]]:
    try:
        with path.open("rb") as file:
            for number, text in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX), b""), 1):
                if number > DEMONSTRATIONS_MAX:
                    raise ConfigError(f"--demonstrations {path}: over {DEMONSTRATIONS_MAX} lines; give fewer")
                if text.strip():
                    yield number, DemonstrationLine.model_validate(json.loads(text))
    except ValidationError as error:
        raise ConfigError(f"--demonstrations {path}:{number}: {first_of(error)}") from None
    except ValueError:
        raise ConfigError(f"--demonstrations {path}:{number}: not JSON; write one object a line") from None
    except OSError as error:
        raise ConfigError(f"--demonstrations {path}: cannot be read ({error.strerror})") from None


# ---------------------------------------------------------------- batches of both


def lessons_of(rows: Sequence[TrainingRow], refused: Counter[str], settings: Settings) -> TaughtLessons:
    """Split by question: which are held out is a hash. Raises ConfigError where nothing is left to train on."""
    held = {row.question for row in rows if fraction("held out", settings.seed, row.question) < settings.held_out_share}
    train = [row for row in rows if row.question not in held]
    if not train:
        raise ConfigError(f"no plan is left to learn from: {listed(refused) or 'none was selected'}")
    return TaughtLessons(train, [row for row in rows if row.question in held], refused)


class TaughtSource:
    """Every batch is `prompts` lessons; each pass over all of them has an order of its own, in which the lessons of a
    question stay together, so that the beginning of their prompts is computed once."""

    def __init__(self, lessons: TaughtLessons, settings: Settings) -> None:
        self.lessons = lessons
        self._settings = settings
        self._size = min(settings.prompts, len(lessons.train))
        self._groups: dict[str, list[int]] = defaultdict(list)
        for index, row in enumerate(lessons.train):
            self._groups[row.question].append(index)
        self._metrics: dict[str, Value] = {
            "lessons": float(len(lessons.train)),
            "held_out": float(len(lessons.held_out)),
            "refused": {name: float(count) for name, count in sorted(lessons.refused.items())},
        }

    async def batch(self, step: int) -> Batch:
        """As the interface says."""
        train = self.lessons.train
        places = range(step * self._size, (step + 1) * self._size)
        orders = {number: self._order(number) for number in {place // len(train) for place in places}}
        rows = [train[orders[place // len(train)][place % len(train)]] for place in places]
        return Batch(rows, 0 if step else self.lessons.requests, {**self._metrics, "epoch": places[0] / len(train)})

    def _order(self, number: int) -> list[int]:
        groups = list(self._groups.values())
        return list(chain(*rng_for("lessons", self._settings.seed, number).sample(groups, len(groups))))

    def state(self) -> dict[str, Any]:
        """Empty: the order follows from the step."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """As the interface says."""
