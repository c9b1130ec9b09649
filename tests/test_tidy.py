"""House rules that no linter knows, over every file git tracks."""

from __future__ import annotations

import ast
import functools
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINES_MAX = 400
FUNCTION_LINES_MAX = 70
MEDIAN_LINES_MAX = 10
ENVIRONMENT_READERS = {
    "gateway/config/settings.py",
    "gateway/adapters/upstream/litellm.py",
}  # the second: LiteLLM's own switch
SQL_ROOMS = re.compile(r"^(gateway/adapters/postgres/|migrations/|tests/|bench/)")
SQL = re.compile(r"\b(SELECT\s.+\sFROM|INSERT\s+INTO|UPDATE\s+\w+\s+SET|DELETE\s+FROM|CREATE\s+(TABLE|INDEX))\b", re.S)
MONEY_FILES = re.compile(r"^gateway/(core/(money/|loop/meter)|adapters/redis/budgets).*\.py$")
HERE_ONLY = ("/wo" + "rk/", "/ro" + "ot/", "sha" + "red/")
UNFINISHED = tuple(word[::-1] for word in ("ODOT", "EMXIF", "XXX ", "rorrEdetnemelpmItoN"))
PAGE_LINE_MAX = 140
GENERATED_PAGES = {f"docs/{name}.md" for name in ("api", "configuration", "metrics", "responses")}
HEADING = re.compile(r"^#+ (.+)$", re.M)
ANCHOR = re.compile(r"\[[^\]]*\]\(((?!\w+:)[^)#\s]*)#([^)\s]+)\)")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


@functools.cache
def tracked() -> tuple[str, ...]:
    """Paths git tracks (or would, were it asked), as far as they exist."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return tuple(sorted(path for path in set(listed) if (ROOT / path).is_file()))


@functools.cache
def text(path: str) -> str:
    """A file, or nothing where it is not text."""
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse(text(path))


def python(prefix: str = "") -> list[str]:
    return [path for path in tracked() if path.endswith(".py") and path.startswith(prefix)]


def product() -> list[str]:
    """Python that is not a test and not a migration."""
    return [path for path in python() if not path.startswith(("tests/", "migrations/versions/"))]


def functions(path: str) -> Iterator[tuple[str, int]]:
    """Each function as (place, lines), its docstring not counted."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            first = node.body[0]
            doc = first.value if isinstance(first, ast.Expr) else None
            written = isinstance(doc, ast.Constant) and isinstance(doc.value, str) and doc.end_lineno
            docstring = first.end_lineno - first.lineno + 1 if written and first.end_lineno else 0
            yield f"{path}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1 - docstring


def test_the_walk_finds_the_code() -> None:
    assert {"gateway/config/settings.py", "gateway/core/loop/plan.py", "policy/__init__.py"} <= set(product())


def test_files_stay_short() -> None:
    assert [f"{p}: {n}" for p in product() if (n := text(p).count("\n")) > LINES_MAX] == []


def test_functions_stay_short() -> None:
    lengths = [item for path in product() for item in functions(path)]
    assert [f"{place}: {lines}" for place, lines in lengths if lines > FUNCTION_LINES_MAX] == []
    assert statistics.median(lines for _, lines in lengths) <= MEDIAN_LINES_MAX


def test_every_module_says_what_it_is_for() -> None:
    assert [path for path in python() if text(path).strip() and not ast.get_docstring(tree(path))] == []


def test_annotations_are_postponed_everywhere() -> None:
    wanted = "from __future__ import annotations"
    annotatable = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.AnnAssign)
    has_code = [path for path in python() if any(isinstance(node, annotatable) for node in ast.walk(tree(path)))]
    assert [path for path in has_code if wanted not in text(path)] == []


def test_the_environment_has_one_reader() -> None:
    reads = re.compile(r"\bos\.(environ|getenv|putenv)\b|from os import .*(environ|getenv)")
    found = {path for path in product() if path.startswith(("gateway/", "policy/")) and reads.search(text(path))}
    assert found <= ENVIRONMENT_READERS


def test_sql_stays_in_its_files() -> None:
    def strings(path: str) -> Iterator[str]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value

    outside = [path for path in product() if not SQL_ROOMS.match(path)]
    assert [path for path in outside if any(SQL.search(value) for value in strings(path))] == []


def test_sql_is_never_built_from_strings() -> None:
    """What makes a statement of a string takes a constant, or what psycopg or SQLAlchemy composed."""
    makers = {"text", "exec_driver_sql", "execute", "executemany", "SQL", "DDL"}

    def is_built(node: ast.expr) -> bool:
        if isinstance(node, ast.JoinedStr):
            return any(isinstance(part, ast.FormattedValue) for part in node.values)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return isinstance(node.func.value, ast.Constant)  # "…".format(), "…".join()
        return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod)

    def built(path: str) -> Iterator[int]:
        for node in ast.walk(tree(path)):
            makes = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in makers
            if isinstance(node, ast.Call) and makes and node.args and is_built(node.args[0]):
                yield node.lineno

    ours = [path for path in product() if path.startswith(("gateway/", "policy/"))]
    assert [f"{path}:{line}" for path in ours for line in built(path)] == []


def test_a_broad_except_gives_its_reason() -> None:
    broad = re.compile(r"except\*?\s+(\(?\s*)?(Base)?Exception(Group)?\b")
    lines = [
        f"{path}:{number}"
        for path in product()
        for number, line in enumerate(text(path).splitlines(), 1)
        if broad.search(line) and "# boundary:" not in line
    ]
    bare = [path for path in product() if re.search(r"except\s*:", text(path))]
    assert lines + bare == []


def test_money_is_never_a_float() -> None:
    def floats(path: str) -> Iterator[int]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "float":
                yield node.lineno
            if isinstance(node, ast.Constant) and type(node.value) is float and path.startswith("gateway/core/"):
                yield node.lineno  # elsewhere a float may be a time

    assert [f"{path}:{line}" for path in filter(MONEY_FILES.match, python()) for line in floats(path)] == []


def test_nothing_is_left_for_later() -> None:
    assert [
        (p, w) for p in tracked() if p.endswith((".py", ".md", ".lua", ".sql")) for w in UNFINISHED if w in text(p)
    ] == []


def test_the_project_speaks_only_of_itself() -> None:
    assert [(path, word) for path in tracked() for word in HERE_ONLY if word in text(path)] == []


def test_links_between_pages_resolve() -> None:
    broken = []
    for page in (path for path in tracked() if path.endswith(".md")):
        for target in LINK.findall(text(page)):
            if not re.match(r"[a-z]+:", target) and not ((ROOT / page).parent / target).exists():
                broken.append(f"{page}: {target}")
    assert broken == []


def test_lines_of_pages_fit_a_terminal() -> None:
    pages = [path for path in tracked() if path.endswith(".md") and path not in GENERATED_PAGES]
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} <= set(pages)
    lines = [(page, number, line) for page in pages for number, line in enumerate(text(page).splitlines(), 1)]
    assert [f"{page}:{number}" for page, number, line in lines if len(line) > PAGE_LINE_MAX] == []


def test_links_to_headings_resolve() -> None:
    pages = {path for path in tracked() if path.endswith(".md")}
    lost = []
    for page in sorted(pages):
        for target, heading in ANCHOR.findall(text(page)):
            path = str((ROOT / page).parent.joinpath(target).resolve().relative_to(ROOT)) if target else page
            if path in pages and heading not in {anchor(title) for title in HEADING.findall(text(path))}:
                lost.append(f"{page}: {target}#{heading}")
    assert lost == []


def anchor(title: str) -> str:
    """The name that a heading has in a link."""
    words = re.sub(r"\]\([^)]*\)", "", title).lower()
    return re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")


def test_every_page_is_in_the_index() -> None:
    linked = {f"docs/{target}" for target in LINK.findall(text("docs/README.md"))}
    pages = {path for path in tracked() if re.match(r"docs/[^/]+\.md$", path)} - {"docs/README.md"}
    assert sorted(pages - linked) == []


def test_every_decision_is_linked_from_a_page() -> None:
    linked = {
        Path(target).name
        for page in tracked()
        if re.match(r"docs/[^/]+\.md$", page)
        for target in LINK.findall(text(page))
    }
    decisions = [path for path in tracked() if re.match(r"docs/adr/\d{4}-", path)]
    assert [path for path in decisions if Path(path).name not in linked] == []


def test_files_that_pages_name_exist() -> None:
    """Paths in code spans, from the top of the checkout or from gateway/; the changelog speaks of older trees."""
    tops = "gateway|policy|migrations|tests|scripts|bench|docs|deploy|core|service|adapters|api|wiring|cli|config"
    named = re.compile(rf"`((?:{tops})/[\w./-]+\.(?:py|md|lua|sql|toml|yaml|json|svg))`")
    pages = [path for path in tracked() if path.endswith(".md") and path != "CHANGELOG.md"]
    lost = [(page, path) for page in pages for path in named.findall(text(page)) if not _is_a_file(path)]
    assert lost == []


def _is_a_file(path: str) -> bool:
    return any((ROOT / top / path).is_file() for top in (".", "gateway"))


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = sorted(int(Path(path).name[:4]) for path in tracked() if re.match(r"docs/adr/\d{4}-", path))
    assert numbers == list(range(1, len(numbers) + 1))


def test_locks_pin_hashes_and_name_no_index() -> None:
    locks = [path for path in tracked() if re.match(r"requirements/.+\.lock$", path)]
    assert len(locks) == 18
    for path in locks:
        assert "://" not in text(path), path
        entries = re.split(r"\n(?=\S)", text(path).strip())
        assert all("==" in entry and "--hash=sha256:" in entry for entry in entries), path
        assert not re.search(r"^litellm==1\.82\.[78]\b", text(path), re.M), f"{path}: a release with malware"


def test_locks_agree_with_each_other() -> None:
    def pins(name: str) -> set[str]:
        return set(re.findall(r"^[a-z0-9][^\s;]*==\S+", text(f"requirements/{name}.lock"), re.M))

    assert pins("serve") <= pins("litellm") <= pins("dev")
    assert pins("serve") <= pins("train")


def test_the_configuration_page_is_current() -> None:
    from scripts.config_reference import PAGE, render

    assert PAGE.read_text(encoding="utf-8") == render(), "run `make docs`"


@pytest.mark.parametrize(
    "name",
    ["install", "serve", "check", "test", "lock", "test-vllm", "test-train", "test-clients", "peers"],
)
def test_scripts_stop_at_the_first_failure(name: str) -> None:
    head = text(f"scripts/{name}").splitlines()
    assert head[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in head
    assert (ROOT / "scripts" / name).stat().st_mode & 0o111
