"""Plans for tests: valid ones, and the ways in which a policy can get one wrong. One `Random` draws them all."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

from gateway.core.loop.plan import TASK_CHARS_MAX, PlanLimits
from gateway.core.loop.reader import PLAN_BYTES_MAX

HANDLES = ("quill", "atlas", "slate")
FIRST = PlanLimits(HANDLES, steps_max=4, depth_capped=frozenset({"maestro"}))
SINGLE = PlanLimits(HANDLES, steps_max=1)
LATER = PlanLimits(HANDLES, steps_max=3, first_index=4)
CHECKED = PlanLimits(
    (*HANDLES, "tally"),
    steps_max=4,
    merges=frozenset({"tally"}),
    checkers=("slate",),
    runs_tests=True,
    toolboxes=("slate",),
)
CONTRACTS: tuple[Any, ...] = (
    {"regex": "^a+$"},
    {"regex": "(?=a)"},
    {"schema": {"type": "object"}, "min_chars": 3},
    {"schema": {"type": 3}},
    {"tests": ["assert True"]},
    {"tests": "assert True"},
    {"judge": "slate"},
    {"judge": "atlas"},
    {"min_chars": 10**9},
)
TASKS = (
    None,
    "Add 2 and 3.",
    'Say {"steps": [{"worker": "atlas"}]} and "quotes" twice.',
    'back\\slash, quote-backslash \\" and \\\\',
    "]}]} [[{{",
    '"task": "not the task"',
    "tab\tnewline\n日本語 😀\u2028",
    "x" * TASK_CHARS_MAX,
)
SCALARS: tuple[Any, ...] = (None, True, False, 0, -1, 3, 10**30, 0.0, 1.5, float("nan"), float("inf"), "", " ", "all")
ODD: tuple[Any, ...] = (*SCALARS, [], {}, [[]], {"steps": []}, "\ud800", "quill", (), b"{}", object())

Json = dict[str, Any]


def valid_plan(rng: Random, allowed: PlanLimits) -> Json:
    """A plan in wire form that `validate` must accept."""
    return {"steps": [_step(rng, allowed, at) for at in range(rng.randint(1, allowed.steps_max))]}


def _step(rng: Random, allowed: PlanLimits, at: int) -> Json:
    before = range(allowed.first_index + at)
    see: Any = "all" if rng.random() < 0.2 else sorted(rng.sample(before, rng.randint(0, len(before))))
    handles = [handle for handle in allowed.handles if (see and before) or handle not in allowed.merges]
    return {"worker": rng.choice(handles), "task": rng.choice(TASKS[:-1]), "see": see}


def _any_step(rng: Random, plan: Json) -> Json:
    step: Json = rng.choice(plan["steps"])
    return step


def _set(key: str, *values: Any) -> Callable[[Random, Json], Any]:
    def mutate(rng: Random, plan: Json) -> Any:
        _any_step(rng, plan)[key] = copy.copy(rng.choice(values))
        return plan

    return mutate


def _drop(rng: Random, plan: Json) -> Any:
    step = _any_step(rng, plan)
    del step[rng.choice(list(step))]
    return plan


def _more_steps(rng: Random, plan: Json) -> Any:
    return {"steps": plan["steps"] * rng.randint(2, 300)}


def _odd_step(rng: Random, plan: Json) -> Any:
    plan["steps"][rng.randrange(len(plan["steps"]))] = rng.choice(ODD)
    return plan


def _itself(rng: Random, plan: Json) -> Any:
    if rng.random() < 0.5:
        plan["steps"].append(plan["steps"])
    _any_step(rng, {"steps": plan["steps"][:1]})["see"] = plan["steps"]
    return plan


def _verify(rng: Random, plan: Json) -> Any:
    """A verify step in the plan, with edges that may be wrong."""
    at = rng.randrange(len(plan["steps"]))
    edges = {"accept": rng.choice(["ship", at + 1, "plan"]), "escalate": rng.choice(["plan", at + 1, at, 99])}
    see = rng.choice([[], [at - 1]]) if at else []
    plan["steps"][at] = {"worker": "slate", "task": None, "see": see, "kind": "verify", **edges}
    return plan


OBJECTS: tuple[Callable[[Random, Json], Any], ...] = (
    lambda rng, plan: plan,
    lambda rng, plan: {"steps": []},
    lambda rng, plan: rng.choice(ODD),
    lambda rng, plan: {"steps": rng.choice(ODD)},
    lambda rng, plan: {**plan, rng.choice(["answer", "Steps", ""]): 1},
    _set("worker", *ODD, "maestro", "gpt-4o", "Quill", "quill ", "quill\u200b"),
    _set("task", *ODD, TASKS[-1], "x" * (TASK_CHARS_MAX + 1), "\udfff lone"),
    _set("see", *ODD, [0], [99], [-1], [True], [0.0], ["0"], [0, 0], [None], list(range(400)), [[0]], "ALL"),
    _set("note", 1),
    _set("worker", "tally"),
    _set("expect", *ODD, *CONTRACTS),
    _set("tools", *ODD, ["slate"], ["quill"], ["slate"] * 5),
    _set("context", *ODD, "last", "none", [1], [2, 1], [0], [1] * 40),
    _verify,
    _drop,
    _more_steps,
    _odd_step,
    _itself,
)


def _text(plan: Json) -> str:
    return json.dumps(plan, ensure_ascii=False)


def _cut(rng: Random, plan: Json) -> str:
    text = _text(plan)
    return text[: rng.randrange(len(text))]


def _flip(rng: Random, plan: Json) -> str:
    text = list(_text(plan))
    for _ in range(rng.randint(1, 4)):
        text[rng.randrange(len(text))] = rng.choice('{}[]",:\\ 019eE-\x00\ud800é')
    return "".join(text)


def _insert(*pieces: str) -> Callable[[Random, Json], str]:
    def mutate(rng: Random, plan: Json) -> str:
        text = _text(plan)
        at = rng.randrange(len(text) + 1)
        return text[:at] + rng.choice(pieces) + text[at:]

    return mutate


def _nested(rng: Random, plan: Json) -> str:
    depth = rng.randint(1, 30_000)
    return rng.choice(['{"steps": ', '{"steps": [{"worker": "quill", "see": ', ""]) + rng.choice("[{") * depth


def _huge(rng: Random, plan: Json) -> str:
    return _text(plan) + " " * PLAN_BYTES_MAX


TEXTS: tuple[Callable[[Random, Json], str | bytes], ...] = (
    lambda rng, plan: _text(plan),
    lambda rng, plan: f"<think>maybe {_text(plan)}</think>\n{_text(plan)}",
    lambda rng, plan: f"```json\n{_text(plan)}\n```",
    lambda rng, plan: "```" + rng.choice(["\n", " ", "```", "\n```"]) * rng.randint(0, 20_000),
    lambda rng, plan: "Here is the plan: " + _text(plan),
    lambda rng, plan: _text(plan).replace("{", '{"steps": [], ', 1),
    lambda rng, plan: _text(plan).replace('"task"', '"worker": "atlas", "task"', 1),
    lambda rng, plan: _text(plan).encode(rng.choice(["utf-8", "utf-16", "utf-8-sig"])),
    lambda rng, plan: rng.randbytes(rng.randint(0, 200)),
    lambda rng, plan: json.dumps(plan).replace('"see": ', '"see": [' + "9" * rng.randint(1, 6000) + "], "),
    _insert("NaN", "-Infinity", "\\ud800", "\\u0000", "\ufeff", "//", ",", "null", '"', "\\", "}", "]"),
    _cut,
    _flip,
    _nested,
    _huge,
)


def adversarial(rng: Random, allowed: PlanLimits) -> object:
    """Text, bytes or an object that may be a plan, almost a plan, or nothing like one."""
    plan = valid_plan(rng, allowed)
    if rng.random() < 0.5:
        return rng.choice(TEXTS)(rng, plan)
    mutated: object = rng.choice(OBJECTS)(rng, plan)
    return mutated


def cuts(rng: Random, text: str) -> list[str]:
    """`text` in pieces of random length, as a stream might bring it."""
    pieces = []
    while text:
        size = rng.choice((1, 2, 3, 7, 40))
        pieces.append(text[:size])
        text = text[size:]
    return pieces
