"""Mutation testing of the modules that decide on money: `python -m scripts.mutants [--sample N] [--seed S] [MODULE …]`.

Each mutant is one module with one small change (a comparison, a sign, a constant, a condition). It lives in a forked
process that runs the module's own tests until the first failure; a mutant that all of them pass has survived, and is
printed with its line. Writes build/mutants.json. Exit status 1 below `SCORE_MIN`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import hypothesis  # noqa: F401 - imported once, for all that are forked
import pytest

from gateway.files import write_atomic

ROOT = Path(__file__).resolve().parents[1]
SUMMARY = ROOT / "build" / "mutants.json"
SCORE_MIN = 0.9
MUTANT_S = 120
TESTS = {
    "tests.models.ledger": ("tests/unit/money/test_ledger.py", "tests/contract/test_budgets.py"),
    "gateway.core.money.amounts": ("tests/unit/money/test_money.py",),
    "gateway.core.loop.plan": ("tests/unit/loop/test_plan_schema.py", "tests/unit/loop/test_plan.py"),
    "gateway.core.loop.reader": ("tests/unit/loop/test_plan_reader.py", "tests/unit/loop/test_plan.py"),
}
QUIET = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore::pytest.PytestAssertRewriteWarning")
ONLY = {"tests.models.ledger": ("-k", "not redis")}
COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed module."""

    module: str
    line: int
    change: str
    tree: ast.Module


class Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a syntax tree in place of its file."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        return importlib.util.spec_from_file_location(
            name, _file(name), loader=self
        )  # with a path, for code that reads it

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._mutant.tree, self._mutant.module, "exec"), module.__dict__)  # noqa: S102 - that is the job


def mutants_of(module: str) -> Iterator[Mutant]:
    """Yield every one-step change of the module's code, except in annotations, texts and raised errors."""
    tree = _tree(module)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)]
    docstrings = {id(part) for node in nodes for top in _told(node) for part in ast.walk(top)}
    for number, node in enumerate(nodes):
        if id(node) in docstrings:
            continue
        for change in range(_changes(node)):
            mutated = copy.deepcopy(tree)
            twin = [each for each in ast.walk(mutated) if isinstance(each, ast.expr | ast.stmt)][number]
            source = _apply(twin, change)
            yield Mutant(module, node.lineno, source, ast.fix_missing_locations(mutated))


def _told(node: ast.AST) -> list[ast.expr]:
    """Parts of a node that only people and type checkers read: decorators, annotations, texts."""
    if isinstance(node, ast.JoinedStr):
        return [node]
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.decorator_list
    return [node.annotation] if isinstance(node, ast.AnnAssign) else []


def _tree(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text(encoding="utf-8"))


def _file(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def _changes(node: ast.AST) -> int:
    """Return the number of ways to change a node."""
    if isinstance(node, ast.Compare):
        return len(node.ops)
    if isinstance(node, ast.BinOp | ast.AugAssign):
        return int(type(node.op) in ARITHMETIC)
    if isinstance(node, ast.BoolOp | ast.If | ast.While | ast.IfExp):
        return 1
    if isinstance(node, ast.Constant):
        return int(type(node.value) in (int, bool))
    if isinstance(node, ast.UnaryOp):
        return int(isinstance(node.op, ast.Not | ast.USub))
    if isinstance(node, ast.Call):
        return int(isinstance(node.func, ast.Name) and node.func.id in ("min", "max", "any", "all"))
    return int(isinstance(node, ast.Continue | ast.Break))


def _apply(node: ast.AST, change: int) -> str:
    """Change a node in place; return a description of the change."""
    before = ast.unparse(node).splitlines()[0][:70]
    if isinstance(node, ast.Compare):
        node.ops[change] = COMPARE[type(node.ops[change])]()
    elif isinstance(node, ast.BinOp | ast.AugAssign):
        node.op = ARITHMETIC[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else int(str(node.value)) + 1
    elif isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd()  # a `not` becomes its operand as a number: true where that is
    elif isinstance(node, ast.Call):
        swap = {"min": "max", "max": "min", "any": "all", "all": "any"}
        node.func = ast.Name(swap[ast.unparse(node.func)], ast.Load())
    else:
        node.__class__ = ast.Pass
    return f"{before}  →  {ast.unparse(node).splitlines()[0][:70]}"


def survives(mutant: Mutant, tests: Sequence[str]) -> bool:
    """Return whether every test passes on the mutant. A hang or a failed import counts as noticed."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(MUTANT_S)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.meta_path.insert(0, Replaced(mutant))
        status = 1
        try:
            status = int(pytest.main([*tests, *QUIET]))
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return status == 0


def main() -> int:
    """Run all mutants, or a sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(TESTS), help=f"of {', '.join(TESTS)}; default: all")
    parser.add_argument("--sample", type=int, default=0, help="so many of each module, drawn evenly; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.chdir(ROOT)
    summary: dict[str, dict[str, object]] = {}
    for module in options.modules:
        mutants = list(mutants_of(module))
        if not survives(Mutant(module, 0, "none", _tree(module)), [*TESTS[module], *ONLY.get(module, ())]):
            raise SystemExit(f"{module}: its tests fail without any change; mend them first")
        sample = random.Random(options.seed).sample(mutants, min(options.sample or len(mutants), len(mutants)))  # noqa: S311
        began_s = time.monotonic()
        alive = []
        for mutant in sample:
            if survives(mutant, [*TESTS[module], *ONLY.get(module, ())]):
                alive.append(f"{mutant.line}: {mutant.change}")
                print(f"survived {module}:{alive[-1]}", flush=True)
        score = round(1 - len(alive) / len(sample), 3)
        took_s = round(time.monotonic() - began_s)
        summary[module] = {"mutants": len(mutants), "tried": len(sample), "score": score, "survived": alive}
        print(f"{module}: {len(sample) - len(alive)} of {len(sample)} noticed ({score:.1%}) in {took_s} s", flush=True)
    SUMMARY.parent.mkdir(exist_ok=True)
    write_atomic(SUMMARY, json.dumps(summary, indent=2) + "\n")
    return int(any(float(str(each["score"])) < SCORE_MIN for each in summary.values()))


if __name__ == "__main__":
    raise SystemExit(main())
