"""Lessons: samples, which are prompts with the plans that they call for, and the drills that come before them.

A sample has the prompt as the server renders it and the plan as the server decodes it. It is a pure function of (seed,
index) and draws a fresh pool: for the first round of an arena question (train phrasings), the prompt of a child loop, a
later round with digests of simulated replies, or a general question.

Drills teach how a pool is read: bare pool lines, then skill by skill the handle of the best worker. Reading is one
circuit (find the lines with this tag, compare, copy the handle). On texts as long as whole prompts the model did not
find it in 36,000 lessons (docs/conductor.md). So the first part of a run is drills, from two lines of one tag up to
whole pools with experience; plans then only have to learn what a question needs. No request ever asks for a drill.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from gateway.core.loop.compose import step_messages
from gateway.core.loop.digest import digest
from gateway.core.loop.plan import PlanLimits
from gateway.core.loop.prompt import Profile, render
from gateway.core.loop.shown import PromptInput, ShownReply, ShownWorker
from policy.simulators.arena.families.family import SKILLS
from policy.simulators.arena.families.tasks import INSTRUCTIONS, Task, make_task
from policy.simulators.arena.oracle import VOTERS_MAX
from policy.simulators.arena.workers import Pool
from policy.simulators.arena.world import run_plan
from policy.start.synthetic.config import WORKERS_MAX, WORKERS_MIN
from policy.start.synthetic.label import (
    VOTED_SKILL,
    Piece,
    Plan,
    arena_label,
    believed_pool,
    general_label,
    needed_skills,
    offset,
    purposes,
    ranked,
)
from policy.start.synthetic.shown import Drawn, draw_pool, is_model
from policy.start.synthetic.tokenizer import END, prompt_text
from policy.start.synthetic.wording import add_courtesy, add_noise, conversation, general_question, reword

_HANDLE = re.compile(r'(?<="worker":")([a-z0-9]+)')
PROFILE: Profile = "compact"
KIND_SHARES = (("first", 0.79), ("child", 0.10), ("later", 0.06), ("general", 0.04), ("long", 0.01))
STEPS_MAX_SHARES = ((5, 0.85), (4, 0.05), (3, 0.05), (2, 0.03), (1, 0.02))
REWORDED_SHARE = 0.85
DOUBLE_SHARE = 0.05  # of arena questions are double ones, beside those that the arena draws
FAILED_SHARE = 0.35  # of later rounds, the last step has failed


@dataclass(frozen=True)
class Sample:
    """`plan` is the label, `purposes` the tag each of its workers was chosen for; `pool` and `task` (None for a general
    question) let a plan be run."""

    shown: PromptInput
    plan: Plan
    allowed: PlanLimits
    pool: Pool
    task: Task | None
    purposes: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """The text of the one user message."""
        return render(PROFILE, self.shown)[0]["content"]

    @property
    def text(self) -> str:
        """The prompt in the chat template, ready to be answered."""
        return prompt_text(self.prompt)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The label, cut at its handles, and the end token."""
        cut = _HANDLE.split(self.label)
        hints = {2 * at + 1: f" {tag}" for at, tag in enumerate(self.purposes) if tag}
        return (*(Piece(text, hint=hints.get(at, "")) for at, text in enumerate(cut)), Piece(END))

    @property
    def label(self) -> str:
        """The plan as constrained decoding writes it."""
        return plan_text(self.plan)


def plan_text(plan: Plan) -> str:
    """JSON without white space: the only form that the server's grammar lets through."""
    return json.dumps(plan, separators=(",", ":"), ensure_ascii=False)


def make_sample(seed: int, index: int, workers_max: int = WORKERS_MAX) -> Sample:
    """Sample number `index`, with at most `workers_max` model workers in its pool."""
    rng = Random(f"warm start {seed} {index}")
    kind = rng.choices([k for k, _ in KIND_SHARES], [w for _, w in KIND_SHARES])[0]
    workers = rng.randint(WORKERS_MIN, workers_max)
    if kind in ("general", "long"):
        return _general(rng, workers, long=kind == "long")
    task = _double_task(rng) if rng.random() < DOUBLE_SHARE else make_task(rng.getrandbits(40))
    if kind == "child":
        return _child(rng, workers)
    if kind == "later":
        return _later(rng, workers, task)
    return _first(rng, workers, task)


def _first(rng: Random, workers: int, task: Task) -> Sample:
    depth = rng.choice((0, 1, 2, 2, 2))
    draw = draw_pool(rng, workers, needed_skills(task.text, None), depth > 0)
    steps_max = _steps_max(rng)
    plan = arena_label(task.text, None, draw.shown, steps_max)
    messages = conversation(rng, add_courtesy(rng, _asked(rng, task)))
    why = purposes(task.text, None, plan, draw.shown)
    return replace(_sample(messages, draw, steps_max, depth, plan, task), purposes=tuple(why))


def _child(rng: Random, workers: int) -> Sample:
    """What a child loop is asked: a part of a double question, named by the step's task text."""
    task = _double_task(rng)
    part = rng.randrange(2)
    depth = rng.choice((0, 1, 1))
    draw = draw_pool(rng, workers, needed_skills(task.text, INSTRUCTIONS[part]), depth > 0)
    steps_max = _steps_max(rng)
    plan = arena_label(task.text, INSTRUCTIONS[part], draw.shown, steps_max)
    messages = step_messages(conversation(rng, _asked(rng, task)), INSTRUCTIONS[part], [])
    why = purposes(task.text, INSTRUCTIONS[part], plan, draw.shown)
    return replace(_sample(messages, draw, steps_max, depth, plan, task.parts[part]), purposes=tuple(why))


def _asked(rng: Random, task: Task) -> str:
    """The task's question in these or other words, some of them lost."""
    return add_noise(rng, reword(rng, task.text) if rng.random() < REWORDED_SHARE else task.text)


def _double_task(rng: Random) -> Task:
    """A double question."""
    while True:
        task = make_task(rng.getrandbits(40))
        if task.shape == "child":
            return task


def _general(rng: Random, workers: int, long: bool) -> Sample:
    depth = rng.choice((0, 1, 2))
    draw = draw_pool(rng, workers, rng.sample(("logic", "arithmetic", "strings", "lists"), 2), depth > 0)
    messages = conversation(rng, general_question(rng, long=long))
    return _sample(messages, draw, _steps_max(rng), depth, general_label(draw.shown), None)


def _later(rng: Random, workers: int, task: Task) -> Sample:
    """Round 2: a first plan has run. Ship what is right to ship; go on from a partial result; redo what failed."""
    depth = rng.choice((0, 1, 2, 2))
    draw = draw_pool(rng, workers, needed_skills(task.text, None), depth > 0)
    ran = arena_label(task.text, None, draw.shown, 5)["steps"]
    ran = ran[: rng.randint(1, len(ran))]
    replies = run_plan({"steps": ran}, task.text, draw.pool).replies
    failed = {len(ran) - 1} if rng.random() < FAILED_SHARE else set()
    shown = shown_replies([s["worker"] for s in ran], replies, failed)
    rest = _rest(task, draw.shown, ran, shown)
    sample = _sample(conversation(rng, _asked(rng, task)), draw, 5, depth, rest, task)
    return replace(
        sample,
        shown=replace(sample.shown, round=2, replies=shown),
        allowed=replace(sample.allowed, first_index=len(ran)),
    )


def _rest(task: Task, pool: Sequence[ShownWorker], ran: list[Any], replies: Sequence[ShownReply]) -> Plan:
    last = replies[-1]
    if last.answer is not None and last.answer.startswith("Partial"):
        whole = arena_label(task.text, None, pool, 5)["steps"][len(ran) :]
        if whole:
            return {"steps": whole}
    elif last.answer is not None and not {"failed", "refused"} & set(last.flags) and _enough(ran, replies):
        return {"steps": []}
    tried = {step["worker"] for step in ran}
    fresh = [worker for worker in pool if worker.handle not in tried or not is_model(worker)]
    usable = fresh if any(map(is_model, fresh)) else list(pool)
    return offset(arena_label(task.text, None, usable, 5), len(ran))


def _enough(ran: list[Any], replies: Sequence[ShownReply]) -> bool:
    """Independent replies must agree, at least two of them; anything else that ended in an answer is enough."""
    independent = len(ran) > 1 and not any(step["see"] for step in ran) and all(s["task"] is None for s in ran)
    return not independent or any(flag.startswith("agrees") for reply in replies for flag in reply.flags)


def shown_replies(handles: Sequence[str], replies: Sequence[str], failed: set[int]) -> tuple[ShownReply, ...]:
    """Digests of replies as the gateway shows them in later rounds; a failed step has no reply."""
    texts = ["" if index in failed else reply for index, reply in enumerate(replies)]
    facts = digest(texts)
    flags: list[list[str]] = [["failed"] if index in failed else [] for index in range(len(texts))]
    for group in facts["agree"]:
        for index in group[1:]:
            flags[index].append(f"agrees:{group[0]}")
    for index in facts["refused"]:
        flags[index].append("refused")
    return tuple(
        ShownReply(index, handle, facts["answers"][index] or None, tuple(flags[index]))
        for index, handle in enumerate(handles)
    )


def _sample(
    messages: list[dict[str, Any]], drawn: Drawn, steps_max: int, depth: int, plan: Plan, task: Task | None
) -> Sample:
    shown = PromptInput(messages, drawn.shown, steps_max, depth)
    handles = tuple(worker.handle for worker in drawn.shown)
    return Sample(shown, plan, PlanLimits(handles, steps_max), drawn.pool, task)


def _steps_max(rng: Random) -> int:
    return rng.choices([n for n, _ in STEPS_MAX_SHARES], [w for _, w in STEPS_MAX_SHARES])[0]


# ---------------------------------------------------------------- drills


@dataclass(frozen=True, slots=True)
class Level:
    """How hard a drill is: pool size, tags a line, experience and built-in workers or not, one best or a ranking."""

    workers_max: int
    tags_max: int
    experience: bool
    ranking: bool


LEVELS = (
    Level(3, 1, False, False),
    Level(4, 2, False, False),
    Level(8, 4, False, False),
    Level(8, 4, True, True),
)


@dataclass(frozen=True, slots=True)
class Drill:
    """Pool lines, and pieces of text: a skill (given), its best handles (learnt), the next skill …"""

    text: str
    pieces: tuple[Piece, ...]


def make_drill(seed: int, index: int, level: Level) -> Drill:
    """Drill number `index` of that level: a pure function of its arguments."""
    rng = Random(f"drill {seed} {index}")
    needed = rng.sample(SKILLS, 1)
    workers = rng.randint(WORKERS_MIN, level.workers_max)
    draw = draw_pool(rng, workers, needed, loops=True, plain=not level.experience)
    pool = [worker for worker in draw.shown if level.experience or is_model(worker)]
    pool = [_simpler(worker, level) for worker in pool]
    shown = PromptInput([], tuple(pool), 5, 0)
    lines = render(PROFILE, shown)[0]["content"].split("\n")[1 : len(pool) + 1]
    return Drill("\n".join([*lines, ""]), tuple(_pieces(rng, pool, level)))


def _simpler(worker: ShownWorker, level: Level) -> ShownWorker:
    experience = worker.experience if level.experience else None
    return replace(worker, tags=worker.tags[: level.tags_max], experience=experience)


def _pieces(rng: Random, pool: list[ShownWorker], level: Level) -> list[Piece]:
    pieces: list[Piece] = []
    for skill in rng.sample(SKILLS, len(SKILLS)):
        most = VOTERS_MAX if level.ranking and skill == VOTED_SKILL else 1
        best = ranked(believed_pool(pool, {skill}), skill)[:most]
        if best:
            pieces.append(Piece(f" {skill}", learnt=False))
            pieces += [Piece(worker.handle, hint=f" {skill}") for worker in best]
    return pieces
