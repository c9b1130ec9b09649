"""The world in one process: what a worker replies, what a plan gives, and whether that is right. Pure and quick.

Rules every worker keeps (docs/arena.md): one part of a question a call; a wrong reply is a pure function of (worker,
question, salt), so asking twice in other words changes nothing; without the skill it is confidently wrong, and six
times in ten falls for the same tempting error as others, which is why a vote of the unskilled does not help.

A worker reads its prompt back. The gateway renders seen steps as `<step …><task>…</task><reply>…</reply></step>` blocks
in a user message and, for a step with a task of its own, the client's conversation as a `<request>` block. Anything
else is a plain question.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import lru_cache
from random import Random
from typing import Any

from gateway.core.loop.compose import SeenStep, step_messages
from gateway.core.loop.replies.agreement import majority
from gateway.core.loop.replies.answers import extract_answer, normalise
from gateway.core.money.amounts import Usage
from policy.simulators.arena.families.family import GOODS, Kind, split_words
from policy.simulators.arena.families.tasks import JOIN_SKILL, Problem, Task, focus, grade, ordinal
from policy.simulators.arena.oracle import oracle_plan
from policy.simulators.arena.workers import ArenaWorker, Pool, cost_of

_STEP = re.compile(
    r"<step\b[^>]*>\s*(?:<task>(?P<task>.*?)</task>)?\s*<reply>(?P<reply>.*?)</reply>\s*</step>", re.DOTALL
)
_REQUEST = re.compile(r"<request>(.*?)</request>", re.DOTALL)
_JOINER = "\u200d"  # the gateway splits our tag names with it inside quoted text
_NO_TASK = "(the request)"

Seen = Sequence[tuple[str | None, str]]  # (task, reply) of the steps a step may see, oldest first
Planner = Callable[[str, str | None, Pool], Mapping[str, Any]]  # (question, task) of a child loop → its plan
Messages = Sequence[Mapping[str, Any]]  # texts alone, no parts

STRANGE = (
    "This is a simulated worker, which knows nothing but exercises in arithmetic, units, dates, tables, strings, "
    "lists, logic and formats in fixed wordings.\nAnswer: unknown"
)
TEMPTED = 0.6  # share of unskilled replies that make the common error
FIXES_MAX = 2  # wrong fields of a draft that a reviewer can still repair
MESSAGE_TOKENS = 4  # beside its text
DEPTH_MAX = 2
_PARTIAL = re.compile(r"^Partial (\d+) of \d+: (.+)$", re.MULTILINE)
_TOKEN = re.compile(r"\w{1,6}|[^\w\s]")
_WEEKDAYS = split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_REASONS = (
    "I read the question and did my part of it.",
    "Each value was taken from the text as given and the work was done in order.",
    "I went through it again and the result stayed the same.",
)


# ---------------------------------------------------------------- what a worker is sent


@dataclass(frozen=True, slots=True)
class WorkerPrompt:
    """What one call holds. `task` None: only the question. `seen`: (task, reply), oldest first."""

    question: str
    task: str | None
    seen: tuple[tuple[str | None, str], ...]


def read_prompt(messages: Sequence[Mapping[str, object]], text_of: Sequence[str]) -> WorkerPrompt:
    """The prompt in `messages`, whose texts are `text_of`. Raises ValueError where there is no user message."""
    users = [text for message, text in zip(messages, text_of, strict=True) if message.get("role") == "user"]
    if not users:
        raise ValueError("no user message")
    earlier, last = users[:-1], users[-1]
    steps = tuple(
        (None if hit["task"] in (None, _NO_TASK) else _plain(hit["task"]), _plain(hit["reply"]))
        for text in earlier
        for hit in _STEP.finditer(text)
    )
    requests = [hit[1] for text in earlier for hit in _REQUEST.finditer(text)]
    if requests:
        return WorkerPrompt(_plain("\n".join(requests)), last, steps)
    return WorkerPrompt(last, None, steps)


def _plain(text: str) -> str:
    return text.replace(_JOINER, "").strip()


# ---------------------------------------------------------------- what it replies


@dataclass
class Run:
    """What running a plan gave. `reply` is the last step's; money in nano-dollars, time along the critical path.
    `calls` counts workers and tools, child loops included."""

    reply: str
    replies: list[str]
    cost_nano: int = 0
    latency_s: float = 0.0
    calls: int = 0
    children: list[Run] = field(default_factory=list)


@lru_cache(maxsize=65_536)
def count_tokens(text: str) -> int:
    """Tokens of a text as the simulated workers bill them: runs of up to six letters, and signs."""
    return len(_TOKEN.findall(text))


def chance(*key: object) -> float:
    """A number in [0, 1) that is a pure function of the key."""
    data = "\x1f".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest()) / 2**56


def run_step(worker: ArenaWorker, question: str, task: str | None, seen: Seen, salt: str = "") -> str:
    """The reply of a worker to `question` (the client's words), told `task` (None: nothing), seeing `seen`."""
    problem = focus(question, task)
    if problem is None:
        return STRANGE
    lines = [*_REASONS[: worker.sentences], _result_line(worker, problem, seen, salt)]
    return "\n".join(lines)


def _result_line(worker: ArenaWorker, problem: Problem, seen: Seen, salt: str) -> str:
    try:
        if problem.family is None:
            return f"Answer: {_join(worker, problem, seen, salt)}"
        if problem.family.shape == "check" and "format" not in worker.skills and "review" in worker.skills:
            return f"Answer: {_review(worker, problem, seen, salt)}"
        return _next_part(worker, problem, seen, salt)
    except (ValueError, KeyError, IndexError, OverflowError):
        return "Answer: unknown"  # impossible values, or a reply before it that makes no sense


def _next_part(worker: ArenaWorker, problem: Problem, seen: Seen, salt: str) -> str:
    """Do the first part that no seen reply has done; the last part's result is the answer."""
    assert problem.family is not None  # noqa: S101 (callers checked)
    parts = problem.family.parts
    done, before = _progress(seen, len(parts))
    part = parts[done]
    right = part.solve(problem.slots, before)
    result = _attempt(worker, part.skill, part.kind, right, f"{problem.key} {done}", salt)
    if done + 1 < len(parts) and part.skill in worker.skills:
        return f"Partial {done + 1} of {len(parts)}: {result}"
    return f"Answer: {result}"  # the unskilled do not even see that there is more to do


def _progress(seen: Seen, parts: int) -> tuple[int, str]:
    """How many parts the seen replies have done, and the result to go on from (the latest of that many)."""
    done, result = 0, ""
    for _task, reply in seen:
        for hit in _PARTIAL.finditer(reply):
            if done <= int(hit[1]) < parts:
                done, result = int(hit[1]), hit[2].strip()
    return done, result


def _attempt(worker: ArenaWorker, skill: str, kind: Kind, right: str, key: str, salt: str) -> str:
    if skill in worker.skills:
        if chance("skilled", worker.name, key, salt) < worker.skills[skill]:
            return right
        return wrong(kind, right, Random(f"slip {worker.name} {key} {salt}"), fields=1)
    if chance("unskilled", worker.name, key, salt) < TEMPTED:
        return wrong(kind, right, Random(f"tempting {key}"))
    return wrong(kind, right, Random(f"guess {worker.name} {key} {salt}"))


def _review(worker: ArenaWorker, problem: Problem, seen: Seen, salt: str) -> str:
    """A reviewer compares a draft field by field and repairs up to FIXES_MAX; with no draft it has nothing to go on."""
    right = problem.answer()
    key = f"{problem.key} review"
    drafts = [extract_answer(reply) for _task, reply in seen]
    if not drafts:
        return wrong("record", right, Random(f"tempting {key}"))
    have, want = drafts[-1].split(" | "), right.split(" | ")
    off = sum(normalise(a) != normalise(b) for a, b in zip(have, want, strict=False))
    if len(have) != len(want) or off > min(FIXES_MAX, len(want) - 1):
        return drafts[-1]
    if chance("review", worker.name, key, salt) < worker.skills["review"]:
        return right
    return wrong("record", right, Random(f"slip {worker.name} {key} {salt}"), fields=1)


def _join(worker: ArenaWorker, problem: Problem, seen: Seen, salt: str) -> str:
    """Answers seen for each question, put together; a worker cannot do several questions in one call."""
    answers: list[str | None] = [None] * len(problem.parts)
    for task, reply in seen:
        if _PARTIAL.search(reply) and "Answer:" not in reply:
            continue
        place = ordinal(task)
        if place is None:
            place = next((i for i, answer in enumerate(answers) if answer is None), None)
        if place is not None and place < len(answers):
            answers[place] = extract_answer(reply)
    right = "; ".join(answer for answer in answers if answer is not None)
    if None in answers:
        first = problem.parts[0].answer()
        return wrong("number" if first.isdigit() else "word", first, Random(f"guess {worker.name} {problem.key}"))
    done = chance("join", worker.name, problem.key, salt) < worker.skills.get(JOIN_SKILL, 0.0)
    return right if done else "; ".join(reversed([answer or "" for answer in answers]))


def wrong(kind: Kind, right: str, rng: Random, fields: int | None = None) -> str:
    """A plausible wrong result of that kind, never `right` itself. `fields`: how many of a record's fields are off."""
    if kind == "number":
        value = int(right) + rng.choice((-1, 1)) * rng.randint(1, 97)
        return str(value if value >= 0 else int(right) + abs(value) + 1)
    if kind == "date":
        return (date.fromisoformat(right) + timedelta(days=rng.choice((-1, 1)) * rng.randint(1, 60))).isoformat()
    if kind in ("good", "weekday"):
        return rng.choice([other for other in (GOODS if kind == "good" else _WEEKDAYS) if other != right])
    if kind == "record":
        return _wrong_record(right.split(" | "), rng, fields)
    return _shuffled(right, ", " if ", " in right else "", rng)


def _shuffled(right: str, joint: str, rng: Random) -> str:
    items = right.split(joint) if joint else list(right)
    for _ in range(8):
        rng.shuffle(items)
        if joint.join(items) != right:
            return joint.join(items)
    return f"{right}{joint or 'e'}{items[0] if joint else ''}"


def _wrong_record(parts: list[str], rng: Random, fields: int | None) -> str:
    off = rng.sample(range(len(parts)), min(fields or len(parts), len(parts)))
    for index in off:
        digits = [at for at, sign in enumerate(parts[index]) if sign.isdigit()]
        if digits:
            at = rng.choice(digits)
            parts[index] = (
                parts[index][:at] + str((int(parts[index][at]) + rng.randint(1, 9)) % 10) + parts[index][at + 1 :]
            )
        else:
            parts[index] = _shuffled(parts[index], "", rng)
    return " | ".join(parts)


def prompt_tokens(texts: Sequence[str]) -> int:
    """Tokens that a worker bills for a prompt with these message texts."""
    return sum(count_tokens(text) + MESSAGE_TOKENS for text in texts)


def run_plan(
    plan: Mapping[str, Any], question: str, pool: Pool, salt: str = "", *, planner: Planner = oracle_plan
) -> Run:
    """Run a plan (DESIGN §3; assumed valid for this pool) in this process. Each call sends the messages that the
    gateway would send, so replies, cost and seconds are those of the served executor. A `self` step asks `planner` for
    the plan of its child loop, whose pool has no `self` at DEPTH_MAX. Raises KeyError on a handle that the pool of the
    loop does not have."""
    return _run(plan, [{"role": "user", "content": question}], pool, salt, planner, 0)


def _run(plan: Mapping[str, Any], conversation: Messages, pool: Pool, salt: str, planner: Planner, depth: int) -> Run:
    by_handle = {worker.handle: worker for worker in pool}
    run = Run("", [])
    done: list[SeenStep] = []
    finished_s: list[float] = []
    for index, step in enumerate(plan["steps"]):
        worker = by_handle[step["worker"]]
        see = list(range(index)) if step["see"] == "all" else list(step["see"])
        seen = [done[i] for i in see]
        started_s = max((finished_s[i] for i in see), default=0.0)
        if worker.kind == "tool":
            reply, seconds = _vote(seen), 0.0
            run.calls += 1
        elif worker.kind == "self":
            reply, seconds = _child(run, step_messages(conversation, step["task"], seen), pool, salt, planner, depth)
        else:
            reply, seconds = _call(run, worker, step_messages(conversation, step["task"], seen), salt)
        run.replies.append(reply)
        done.append(SeenStep(index, worker.handle, step["task"], reply))
        finished_s.append(started_s + seconds)
    run.reply = run.replies[-1] if run.replies else ""
    run.latency_s = max(finished_s, default=0.0)
    return run


def _vote(seen: Sequence[SeenStep]) -> str:
    replies = [step.reply for step in seen]
    return replies[majority(replies)] if replies else "There is nothing to vote on."


def _child(run: Run, messages: Messages, pool: Pool, salt: str, planner: Planner, depth: int) -> tuple[str, float]:
    prompt = read_prompt(messages, [message["content"] for message in messages])
    child_pool = pool if depth + 1 < DEPTH_MAX else tuple(worker for worker in pool if worker.kind != "self")
    plan = planner(prompt.question, prompt.task, child_pool)
    child = _run(plan, messages, child_pool, salt, planner, depth + 1)
    run.children.append(child)
    run.cost_nano += child.cost_nano
    run.calls += child.calls
    return child.reply, child.latency_s


def _call(run: Run, worker: ArenaWorker, messages: Messages, salt: str) -> tuple[str, float]:
    texts = [message["content"] for message in messages]
    prompt = read_prompt(messages, texts)
    reply = run_step(worker, prompt.question, prompt.task, prompt.seen, salt)
    usage = Usage(prompt_tokens(texts), count_tokens(reply))
    run.cost_nano += cost_of(worker, usage)
    run.calls += 1
    return reply, worker.latency_s(usage.completion_tokens)


def solve_rate(plan: Mapping[str, Any], task: Task, pool: Pool, samples: int, planner: Planner = oracle_plan) -> float:
    """Share of `samples` runs (salts 0, 1, …) in which the plan gives the right answer to the task."""
    if samples < 1:
        raise ValueError("samples must be at least 1")
    runs = (run_plan(plan, task.text, pool, str(salt), planner=planner) for salt in range(samples))
    return sum(grade(task, run.reply) for run in runs) / samples
