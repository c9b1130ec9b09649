"""Whether two programs do the same, by what their functions return for the same arguments. Pure: it writes the program
that a jail runs, and reads what that printed.

Arguments are drawn from the annotations of parameters, without one from numbers, texts and lists. Programs that return
the same wherever both return are taken for the same. Arguments may lie outside of what was asked for, so a single
difference proves nothing: programs differ where most returns do.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from random import Random
from typing import Any

from gateway.core.loop.replies.agreement import Agreement
from gateway.core.loop.replies.code import python_tree

CALLS_MAX = 24
RETURNS_MIN = 4  # of both programs, below which nothing is known
MARK = "\x1ebaton trial "  # begins the line of results
Call = tuple[str, list[Any]]  # a function's name, and its arguments as JSON
_OF: dict[str, list[Any]] = {
    "int": [0, 1, 2, 3, 7, 10, 25, -4],
    "float": [0.0, 1.0, 2.5, 10.0, -1.5],
    "str": ["", "a", "abc", "Hello World", "racecar", "a-b c", "12"],
    "bool": [True, False],
    "list[str]": [[], ["a"], ["b", "a", "c"], ["x", "x", "yy"]],
    "list": [[], [1], [3, 1, 2], [5, 5, 2, -1], [10, 20, 30, 40]],
    "dict": [{}, {"a": 1}, {"b": 2, "a": 1}],
}
_ANY = [*_OF["int"], *_OF["str"][:4], *_OF["list"]]
_PROGRAM = """
import json as _json
def _plain(value):
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return repr(value)[:400]
_space = {"__name__": "candidate"}
exec(compile(open("candidate.py").read(), "candidate.py", "exec"), _space)
_found = []
for _name, _given in _json.loads(open("calls.json").read()):
    try:
        _found.append([_plain(_space[_name](*_given))])
    except BaseException:  # boundary: a candidate may raise anything
        _found.append(None)
print()
print(MARK + _json.dumps(_found))
"""


def shared_calls(programs: Sequence[str]) -> list[Call]:
    """The calls to make of every program: of the functions that all of them define with as many parameters. Empty where
    there are none."""
    defined = [_functions(program) for program in programs]
    names = [name for name in defined[0] if all(name in one for one in defined)] if defined else []
    common = [name for name in names if len({len(one[name]) for one in defined}) == 1 and defined[0][name]]
    draw, calls = Random(0), []  # noqa: S311 - the same arguments everywhere, no secret
    for name in common:
        kinds = [next(filter(None, (one[name][at] for one in defined)), "") for at in range(len(defined[0][name]))]
        calls += [(name, [draw.choice(_values(kind)) for kind in kinds]) for _ in range(CALLS_MAX // len(common))]
    return calls


def _functions(program: str) -> dict[str, list[str]]:
    """The functions that a program defines, with the annotations of their parameters; without those that take more."""
    tree = python_tree(program)
    functions = {}
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.FunctionDef) and not (node.args.vararg or node.args.kwarg or node.args.kwonlyargs):
            parameters = [*node.args.posonlyargs, *node.args.args]
            needed = parameters[: len(parameters) - len(node.args.defaults)]
            functions[node.name] = [ast.unparse(one.annotation).lower() if one.annotation else "" for one in needed]
    return functions


def _values(kind: str) -> list[Any]:
    return next((values for name, values in _OF.items() if kind.startswith(name)), _ANY)


def trial_program() -> str:
    """The program that makes the calls in `calls.json` of the code in `candidate.py` and prints what they returned."""
    return _PROGRAM.replace("MARK", json.dumps(MARK))


def returns_of(stdout: str) -> list[Any]:
    """What each call returned, as a list of one text, None where it raised; empty where the program got no result."""
    line = next((line for line in reversed(stdout.split("\n")) if line.startswith(MARK)), "")
    try:
        value = json.loads(line.removeprefix(MARK))
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []


def by_returns(a: Sequence[Any], b: Sequence[Any]) -> Agreement:
    """Whether two programs do the same, by what they returned for the same calls."""
    both = [x == y for x, y in zip(a, b, strict=False) if x is not None and y is not None]
    if len(both) < RETURNS_MIN:
        return "unknown"
    return "same" if all(both) else ("different" if sum(both) < len(both) / 2 else "unknown")
