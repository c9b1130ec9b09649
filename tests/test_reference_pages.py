"""The generated pages say what the code says, and the guarantees name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from fastapi.routing import APIRoute

from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.api.public.chat import OpenAIApi
from gateway.config.settings import Settings, variable
from gateway.core.openai.chat import FIELDS
from scripts import (
    api_reference,
    chat_table,
    faults,
    metrics_reference,
    reference,
    responses_reference,
    training_reference,
)

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GUARANTEES = DOCS / "guarantees"
PROMISES = {  # page → the fewest promises it holds
    "conductor": 4,
    "gate": 14,
    "jobs": 10,
    "keys": 19,
    "log": 18,
    "loop": 10,
    "money": 16,
    "security": 11,
    "turns": 10,
    "versions": 18,
}
PROMISE_LINES = ["Promise", "Mechanism", "Test"]
LINES = {"security": ["Promise", "Number", "Test"]}
LINE = re.compile(r"^- \*\*(.+?)\.\*\* ", re.M)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
PLACE = re.compile(r"`([\w./-]+\.\w+)`\s+\(([^)]*)\)")  # a file, and names in it
FILE = re.compile(r"`((?:gateway|policy|migrations|tests)/[\w./-]+\.\w+)`")


def test_the_api_page_is_current() -> None:
    assert api_reference.PAGE.read_text(encoding="utf-8") == api_reference.render(), "run `make docs`"


def test_the_metrics_page_is_current() -> None:
    assert metrics_reference.PAGE.read_text(encoding="utf-8") == metrics_reference.render(), "run `make docs`"


def test_the_responses_page_is_current() -> None:
    assert responses_reference.PAGE.read_text(encoding="utf-8") == responses_reference.render(), "run `make docs`"


def test_the_settings_on_the_training_page_are_current() -> None:
    assert training_reference.PAGE.read_text(encoding="utf-8") == training_reference.render(), "run `make docs`"


def test_every_metric_is_on_its_page() -> None:
    page = metrics_reference.render()
    families = [family.name for family in PrometheusMetrics().registry.collect()]
    assert len(families) > 10
    assert [name for name in families if f"`{name}`" not in page and f"`{name}_total`" not in page] == []


def test_the_chat_headers_of_the_page_are_those_of_the_route() -> None:
    routes = OpenAIApi.router(object.__new__(OpenAIApi)).routes
    chat = next(route for route in routes if isinstance(route, APIRoute) and route.path == "/v1/chat/completions")
    documented = (chat.openapi_extra or {})["parameters"]
    assert [header["name"] for header in documented] == api_reference.chat_headers()


def test_every_route_is_on_the_page() -> None:
    page = api_reference.render()
    paths = {path for _, _, path, _ in api_reference.routes()}
    assert {"/v1/chat/completions", "/admin/keys", "/readyz"} <= paths
    assert [path for path in paths if f"`{path}`" not in page] == []


def test_a_header_without_its_sentence_stops_the_page() -> None:
    with pytest.raises(ValueError, match="x-new"):
        api_reference.told(["x-new"], {})
    with pytest.raises(ValueError, match="x-gone"):
        api_reference.told([], {"x-gone": "meaning"})


def test_codes_given_where_an_error_is_raised_are_found() -> None:
    codes = api_reference.given_codes()
    assert "model_not_found" in codes["NotFound"]
    assert "invalid_json" in codes["BadRequest"]


@pytest.fixture(scope="module")
def texts() -> dict[ModuleType, str]:
    """Every generated page, made once."""
    return {page: page.render() for page in reference.PAGES}


@pytest.mark.parametrize("page", reference.PAGES)
def test_check_notices_a_stale_page(
    page: ModuleType,
    texts: dict[ModuleType, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for one, content in texts.items():
        monkeypatch.setattr(one, "PAGE", tmp_path / one.__name__)
        monkeypatch.setattr(one, "render", lambda content=content: content)
    monkeypatch.setattr("sys.argv", ["reference"])
    assert reference.main() == 0
    monkeypatch.setattr("sys.argv", ["reference", "--check"])
    assert reference.main() == 0
    page.PAGE.write_text("old")
    assert reference.main() == 1
    assert "make docs" in capsys.readouterr().err


@pytest.mark.parametrize("page", PROMISES)
def test_every_promise_names_a_file_and_tests_that_exist(page: str) -> None:
    sections = headed((GUARANTEES / f"{page}.md").read_text(encoding="utf-8"))
    assert len(sections) >= PROMISES[page]
    assert [fault for title, body in sections for fault in faults_of(title, body, LINES.get(page, PROMISE_LINES))] == []


def test_a_promise_without_its_lines_is_noticed() -> None:
    promise = "- **Promise.** Holds.\n"
    mechanism = "- **Mechanism.** `gateway/errors.py` says so.\n"
    tested = "- **Test.** `tests/test_reference_pages.py::test_every_route_is_on_the_page`\n"
    (title, body), *more = headed(f"# Page\n\n### One\n\n{promise}{mechanism}{tested}\n## Limits\n\n- None.\n")
    assert (title, more) == ("One", [])
    assert faults_of(title, body, PROMISE_LINES) == []
    assert faults_of("One", promise + mechanism, PROMISE_LINES) == ["One: Promise, Mechanism"]
    assert faults_of("One", promise + mechanism + "- **Test.** none\n", PROMISE_LINES) == ["One: no test"]
    assert faults_of("One", body.replace("errors.py", "gone.py"), PROMISE_LINES) == ["One: gateway/gone.py"]
    assert faults_of("One", body.replace("::test_every", "::test_no"), PROMISE_LINES) == [
        "One: tests/test_reference_pages.py::test_no_route_is_on_the_page"
    ]


def test_the_pages_of_guarantees_are_listed() -> None:
    index = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    pages = sorted(path.stem for path in GUARANTEES.iterdir())
    assert pages == sorted([*PROMISES, "faults"])
    assert [page for page in pages if f"(guarantees/{page}.md)" not in index] == []


def test_every_row_of_the_fault_matrix_has_its_lines_and_can_be_run() -> None:
    rows = headed((GUARANTEES / "faults.md").read_text(encoding="utf-8"))
    assert [title for title, body in rows if len(LINE.findall(body)) != 4] == []
    assert [title for title, body in rows if LINE.findall(body)[::3] != ["Promise", "Command"]] == []
    named = {title.partition(":")[0] for title, _ in rows}
    commands = {row if row in faults.ROWS else row.split()[0] for row in named}  # F11 is two rows
    assert commands == set(faults.ROWS) - {"B1"} | {"B2"}  # B1 is in the security matrix, B2 is `make fuzz`


def test_every_room_is_in_the_drawing_and_on_its_page() -> None:
    drawn = (DOCS / "architecture.svg").read_text(encoding="utf-8")
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    floors = [ROOT / "gateway" / floor for floor in ("core", "service", "adapters", "api")]
    rooms = {room.parent.name for floor in [*floors, ROOT / "policy"] for room in floor.glob("*/__init__.py")}
    assert [room for room in sorted(rooms) if not re.search(rf">{room}[</]", drawn)] == []
    assert [room for room in sorted(rooms) if f"`{room}`" not in page and f"/{room}/" not in page] == []


def test_commands_and_settings_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    settings = {variable(name) for name in Settings.model_fields}
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        made = re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M)
        run = re.findall(r"python3? -m ((?:gateway|policy|bench|scripts|tests)[\w.]*)", text)
        modules = [ROOT.joinpath(*name.split(".")) for name in run]
        assert [name for name in made if name not in targets] == [], page
        assert [
            path for path in modules if not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file())
        ] == [], page
        assert [name for name in re.findall(r"\bBATON_[A-Z0-9_]*[A-Z0-9]\b", text) if name not in settings] == [], page


def test_where_to_change_names_what_is_there() -> None:
    page = (DOCS / "where.md").read_text(encoding="utf-8")
    places = [
        (path, names) for path, inside in PLACE.findall(page) for names in re.findall(r"`([A-Za-z_]\w+)`", inside)
    ]
    assert len(places) > 30
    assert [f"{path}: {name}" for path, name in places if name not in (ROOT / path).read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(("page", "least"), [("openai.md", 40), ("anthropic.md", 30)])
def test_a_contract_names_tests_that_exist(page: str, least: int) -> None:
    named = TEST.findall((DOCS / page).read_text(encoding="utf-8"))
    assert len(named) > least
    assert [f"{path}::{test}" for path, test in named if not _has(path, test)] == []


@pytest.mark.parametrize(("page", "vendor", "least"), [("openai.md", "OpenAI", 40), ("anthropic.md", "Anthropic", 30)])
def test_every_probe_of_a_contract_is_held_by_a_test(page: str, vendor: str, least: int) -> None:
    probes = (DOCS / page).read_text(encoding="utf-8").split("\n- Probe: ")[1:]
    assert len(probes) > least
    held = [re.findall(rf"^  - ({vendor}|Baton|Test): ", probe, re.M) for probe in probes]
    assert [probe for probe, lines in zip(probes, held, strict=True) if lines != [vendor, "Baton", "Test"]] == []
    assert [probe for probe in probes if not TEST.findall(probe.partition("  - Test: ")[2])] == []


def test_the_table_of_properties_is_the_specifications() -> None:
    assert [name for name, _, _ in chat_table.rows()] == [f"`{name}`" for name in FIELDS]


def headed(page: str) -> list[tuple[str, str]]:
    """(title, text below it) of each third heading of a page."""
    parts = re.split(r"^(#{1,3}) (.+)$", page, flags=re.M)[1:]
    return [
        (title, body) for level, title, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True) if level == "###"
    ]


def faults_of(title: str, body: str, lines: list[str]) -> list[str]:
    """What a promise lacks: one of its lines, a test, or a file or test that it names and that is not there."""
    if LINE.findall(body) != lines:
        return [f"{title}: {', '.join(LINE.findall(body))}"]
    tested = TEST.findall(body.partition("- **Test.**")[2])
    if not tested:
        return [f"{title}: no test"]
    lost = [f"{title}: {path}" for path in FILE.findall(body) if not (ROOT / path).is_file()]
    if "Mechanism" in lines and not FILE.findall(body.partition("- **Mechanism.**")[2].partition("- **Test.**")[0]):
        lost.append(f"{title}: no file")
    return lost + [f"{title}: {path}::{test}" for path, test in tested if not _has(path, test)]


def _has(path: str, test: str) -> bool:
    file = ROOT / path
    return file.is_file() and re.search(rf"def {test}\(", file.read_text(encoding="utf-8")) is not None
