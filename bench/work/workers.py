"""Scripted workers over HTTP, whose error rates are known: three models that answer, and one that judges.

A task is easy or hard, one as often as the other, and a worker is right on it with the probability of that (SKILLS).
The same worker says the same of the same task, whoever asks. The judge finds out what is right, and errs in the share
of replies that it is started with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from bench.work.coding import coding_task
from bench.work.prose import figures_of, is_faithful, prose_task
from bench.work.tasks import WorkTask, short_task
from policy.graders import texts
from policy.simulators.arena.server import pieces
from policy.simulators.server import RequestRefusal, SimulatedReply, content_text

CRITIC = "critic"  # the model that judges
KINDS = {"short": short_task, "code": coding_task, "prose": prose_task}
SKILLS = {"cheap": (0.90, 0.45), "middle": (0.95, 0.65), "best": (0.99, 0.87)}  # on easy tasks, on hard ones
PRICES_USD = {"cheap": (0.15, 0.60), "middle": (0.60, 2.40), "best": (3.0, 15.0), "critic": (0.15, 0.60)}  # in, out
HANDLES = {"cheap": "ember", "middle": "quill", "best": "fjord", "critic": "umpire"}
BYTES_PER_TOKEN = 4
_REPLY = re.compile(r"<reply>(.*?)</reply>", re.DOTALL)
_QUOTED_REPLY = re.compile(r"^Reply:\n((?:> ?[^\n]*\n?)+)", re.MULTILINE)


def make_tasks(kind: str, numbers: Iterable[int], seed: int) -> list[WorkTask]:
    """Tasks of one kind of work."""
    return [KINDS[kind](number, seed) for number in numbers]


def is_right(worker: str, task: WorkTask, seed: int) -> bool:
    """Whether a worker means to be right on a task."""
    hard = Random(f"{seed} hard {task.id}").random() < 0.5
    return Random(f"{seed} {worker} {task.id}").random() < SKILLS[worker][hard]


def reply_of(worker: str, task: WorkTask, seed: int) -> str:
    """What a worker replies to a task."""
    return task.reply(is_right(worker, task, seed), Random(f"{seed} words {worker} {task.id}"))


class ScriptedWorkers:
    """The Speaker of the server under all of them (policy/simulators/server.py)."""

    workers: Sequence[str] = (*SKILLS, CRITIC)

    def __init__(self, tasks: Iterable[WorkTask], seed: int, judge_errs: float) -> None:
        self._tasks = {task.text: task for task in tasks}
        self._seed, self._judge_errs = seed, judge_errs

    def say(self, worker: str, body: Mapping[str, Any]) -> SimulatedReply:
        """What the worker says. Raises RequestRefusal where the task is none of those it knows."""
        texts = [content_text(message.get("content")) for message in body["messages"]]
        text = self._judged(texts) if worker == CRITIC else reply_of(worker, self._task(texts), self._seed)
        tokens = sum(len(each.encode()) for each in texts) // BYTES_PER_TOKEN
        return SimulatedReply([pieces(text)], tokens)

    def _task(self, texts: Sequence[str]) -> WorkTask:
        task = next((self._tasks[text] for text in texts if text in self._tasks), None)
        if task is None:
            raise RequestRefusal(400, "unknown_task", "this worker knows only the tasks of the bench")
        return task

    def _judged(self, texts: Sequence[str]) -> str:
        """The verdict on the last reply that a judge's prompt shows: of a step's, or of the grader `judge`. Of two
        replies that are to be compared, whether they say the same."""
        everything = "\n".join(texts[1:])  # the instructions speak of blocks, too
        blocks, quoted = _REPLY.findall(everything), _QUOTED_REPLY.findall(everything)
        if "compare two replies" in texts[0]:
            pair = blocks[-2:]
            same = self._draws(say_the_same(self._task(texts), *pair), *pair)
            return json.dumps({"reason": "the figures were compared", "verdict": "same" if same else "different"})
        if blocks:
            reply, task = blocks[-1], self._task(texts)
        elif quoted:
            unquoted = "\n".join(line.removeprefix("> ") for line in everything.splitlines())
            reply = "\n".join(line.removeprefix("> ") for line in quoted[-1].splitlines())
            task = next(task for text, task in self._tasks.items() if text in unquoted)
        else:
            raise RequestRefusal(400, "no_reply", "there is no reply to judge")
        right = self._draws(seems_right(task, reply), "step" if blocks else "grader", reply)
        return json.dumps({"reason": "every figure was looked up", "verdict": "right" if right else "wrong"})

    def _draws(self, truth: bool, *of: str) -> bool:
        """What the critic says, where this is the truth: the same of the same replies."""
        return truth != (Random(f"{self._seed} judge {of}").random() < self._judge_errs)


def say_the_same(task: WorkTask, first: str, second: str) -> bool:
    """Whether two replies say the same: the same figures, or of code the same text."""
    return figures_of(first) == figures_of(second) if task.kind == "prose" else first.split() == second.split()


def seems_right(task: WorkTask, reply: str) -> bool:
    """What the judge finds, before it errs. It runs no code: a program it believes."""
    if task.kind == "prose":
        return is_faithful(task.text, reply)
    if task.kind == "short":
        return texts.numeric(texts.numeric_reference(task.reference), reply)[0] == 1.0
    return True
