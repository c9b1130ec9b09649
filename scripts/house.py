"""Measure the layout of the code: rooms, imports, names and functions. `--check` fails where a firm limit is exceeded.

A *room* is a folder of `gateway/` or `policy/`; a *floor* is the first folder below the package. Imports are read from
the source, those inside functions and under TYPE_CHECKING too. `__init__.py` files count as modules only in cycles.

    python -m scripts.house            the table
    python -m scripts.house --list     the table, then what each figure counts
    python -m scripts.house --check    nothing, or one line for each firm limit that is exceeded (exit status 1)
"""

from __future__ import annotations

import ast
import functools
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("gateway", "policy")
FLOORS_COUNTED = ("adapters", "service", "core")
ROOM_FILES_MAX = 12
ROOM_FILES_MAX_OF = {"gateway/adapters/postgres": 22}  # with its .sql files
CODE_IN_ROOMS = {".py", ".lua", ".sql"}
Graph = Mapping[str, set[str]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table: the value, its limit, and the things it counts."""

    name: str
    value: str
    limit: str
    good: bool
    firm: bool = False
    items: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file of the product."""

    name: str
    path: Path
    tree: ast.Module
    lines: int

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def room(self) -> str:
        """The folder, as a dotted name."""
        return self.name if self.is_package else self.name.rpartition(".")[0]


@functools.cache
def modules() -> dict[str, Module]:
    """Every module of the product by dotted name."""
    by_name = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        by_name[name] = Module(name, path, ast.parse(source), source.count("\n"))
    return by_name


def _targets(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            member = f"{node.module}.{alias.name}"
            yield member if member in modules() else node.module


@functools.cache
def imports() -> dict[str, set[str]]:
    """Module → the modules of the product it imports."""
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for name, module in modules().items():
        for node in ast.walk(module.tree):
            graph[name] |= {target for target in _targets(node) if target in graph and target != name}
    return graph


def cycles(graph: Graph) -> list[tuple[str, ...]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components of two or more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[tuple[str, ...]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            group = tuple(sorted(stack[at:]))
            del stack[at:]
            if len(group) > 1:
                groups.append(group)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return groups


def room_graph(of: Callable[[str], str | None]) -> dict[str, set[str]]:
    """Imports between the rooms that `of` gives for a module's name (None: not counted)."""
    graph: dict[str, set[str]] = defaultdict(set)
    for source, targets in imports().items():
        for target in targets:
            start, end = of(source), of(target)
            if start and end and start != end:
                graph[start].add(end)
    return graph


def _room_in(floor: str) -> Callable[[str], str | None]:
    """Rooms of one floor of the gateway: its folders, and each file that stands in no folder."""
    prefix = f"gateway.{floor}."

    def of(name: str) -> str | None:
        return name.removeprefix(prefix).split(".")[0] if name.startswith(prefix) else None

    return of


def _any_room(name: str) -> str:
    """A module's folder; a file that stands beside the folders, such as `errors.py`, is a room of its own."""
    room = modules()[name].room
    return name if room in PACKAGES else room


def sizes(package: str, modules_max: int, lines_max: int) -> Iterator[Figure]:
    members = [module for module in modules().values() if module.name.split(".")[0] == package]
    count = sum(not module.is_package for module in members)
    lines = sum(module.lines for module in members)
    yield Figure(f"{package}: modules", str(count), f"≤ {modules_max}", count <= modules_max)
    yield Figure(f"{package}: lines", f"{lines:,}", f"≤ {lines_max:,}", lines <= lines_max)


def rooms() -> Figure:
    counted: Counter[str] = Counter()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in CODE_IN_ROOMS and path.name != "__init__.py":
                counted[str(path.parent.relative_to(ROOT))] += 1
    crowded = {room: n for room, n in counted.items() if n > ROOM_FILES_MAX_OF.get(room, ROOM_FILES_MAX)}
    largest = max(n for room, n in counted.items() if room not in ROOM_FILES_MAX_OF)
    items = tuple(f"{room}: {n}" for room, n in counted.most_common())
    return Figure("files in one room", str(largest), f"≤ {ROOM_FILES_MAX}, postgres ≤ 22", not crowded, True, items)


def single_importers() -> Iterator[Figure]:
    """Files with one importer, which may belong into it; entry points are counted apart, for they never do."""
    importers: dict[str, set[str]] = defaultdict(set)
    for source, targets in imports().items():
        for target in targets:
            importers[target].add(source)
    single: dict[bool, list[str]] = {False: [], True: []}
    for name, module in sorted(modules().items()):
        if not module.is_package and len(importers[name]) == 1:
            (importer,) = importers[name]
            single[_starts(importer, name)].append(f"{name} ← {importer}")
    inner, entries = tuple(single[False]), tuple(single[True])
    yield Figure("files with one importer", str(len(inner)), "≤ 45", len(inner) <= 45, items=inner)
    yield Figure("  entry points, besides these", str(len(entries)), "none", True, items=entries)


def _starts(importer: str, name: str) -> bool:
    """Whether the importer is one that starts programs: the wiring, a `__main__`, or the table of a package's
    commands. What it alone imports is an entry point, or the adapter of a port."""
    is_table = modules()[importer].is_package and name.startswith(f"{importer}.")
    return is_table or importer.startswith("gateway.wiring.") or importer.endswith(".__main__")


def arrows() -> Iterator[Figure]:
    for floor, most in zip(FLOORS_COUNTED, (6, 10, 10), strict=True):
        graph = room_graph(_room_in(floor))
        pairs = tuple(sorted(f"{start} → {end}" for start, ends in graph.items() for end in ends))
        good = len(pairs) <= most
        yield Figure(f"arrows between rooms: {floor}", str(len(pairs)), f"≤ {most}", good, True, pairs)


def no_cycles() -> Iterator[Figure]:
    file_cycles = tuple(" ↔ ".join(group) for group in cycles(imports()))
    room_cycles = tuple(" ↔ ".join(group) for group in cycles(room_graph(_any_room)))
    yield Figure("cycles of files", str(len(file_cycles)), "0", not file_cycles, True, file_cycles)
    yield Figure("cycles of rooms", str(len(room_cycles)), "0", not room_cycles, True, room_cycles)


def class_names() -> Figure:
    places: dict[str, list[str]] = defaultdict(list)
    for name, module in modules().items():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    twice = tuple(f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1)
    return Figure("public class names used twice", str(len(twice)), "≤ 5", len(twice) <= 5, True, twice)


def _function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    doc = node.body[0]
    is_doc = isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    return (node.end_lineno or 0) - node.lineno + 1 - ((doc.end_lineno or 0) - doc.lineno + 1 if is_doc else 0)


def functions() -> Iterator[Figure]:
    lengths = {
        f"{name}:{node.lineno} {node.name}": _function_lines(node)
        for name, module in modules().items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    ordered = sorted(lengths.values())
    median, p90, longest = statistics.median(ordered), ordered[int(len(ordered) * 0.9)], ordered[-1]
    items = tuple(f"{n} {place}" for place, n in sorted(lengths.items(), key=lambda pair: -pair[1])[:20])
    yield Figure("function lines: median", f"{median:g}", "≤ 7", median <= 7)
    yield Figure("function lines: p90", str(p90), "≤ 20", p90 <= 20)
    yield Figure("function lines: longest", str(longest), "≤ 60", longest <= 60, True, items)


@functools.cache
def _words(source: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", source))


def _definitions(module: Module) -> Iterator[str]:
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.decorator_list:
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def unused() -> Figure:
    """Top-level definitions whose name occurs once in the product, scripts and pages included: where it is defined."""
    product: Counter[str] = Counter()
    for path in _product_texts():
        product += _words(path.read_text(encoding="utf-8"))
    dead = tuple(
        f"{name}.{definition}"
        for name, module in modules().items()
        for definition in _definitions(module)
        if product[definition] <= 1 and not definition.startswith("__")
    )
    return Figure("definitions without a caller in the product", str(len(dead)), "0", not dead, True, dead)


def _product_texts() -> Iterable[Path]:
    for folder in (*PACKAGES, "migrations", "scripts", "bench"):
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ""} and path.is_file())
    yield ROOT / "pyproject.toml"


def figures() -> list[Figure]:
    """Every row of the table."""
    return [
        *sizes("gateway", 165, 26_100),
        *sizes("policy", 130, 20_000),
        rooms(),
        *single_importers(),
        *arrows(),
        *no_cycles(),
        class_names(),
        unused(),
        *functions(),
    ]


def main(arguments: list[str]) -> int:
    """Print the table, or only the firm limits that are exceeded. Returns 1 if there are any, else 0."""
    rows = figures()
    broken = [row for row in rows if row.firm and not row.good]
    if "--check" in arguments:
        for row in broken:
            print(f"house: {row.name} is {row.value}, the limit is {row.limit}: {'; '.join(row.items[:8])}")
        return 1 if broken else 0
    for row in rows:
        mark = "ok" if row.good else ("BROKEN" if row.firm else "over")
        print(f"{row.name:46} {row.value:>8}   {row.limit:22} {mark}")
        if "--list" in arguments:
            print("".join(f"    {item}\n" for item in row.items), end="")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
