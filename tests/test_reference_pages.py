"""The generated pages say what the code says, and the guarantees name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from fastapi.routing import APIRoute

from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.api.public.chat import OpenAIApi
from gateway.core.openai.chat import FIELDS
from scripts import api_reference, chat_table, metrics_reference, reference, responses_reference, training_reference

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


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


@pytest.mark.parametrize("page", reference.PAGES)
def test_check_notices_a_stale_page(
    page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for one in reference.PAGES:
        monkeypatch.setattr(one, "PAGE", tmp_path / one.__name__)
    monkeypatch.setattr("sys.argv", ["reference"])
    assert reference.main() == 0
    monkeypatch.setattr("sys.argv", ["reference", "--check"])
    assert reference.main() == 0
    page.PAGE.write_text("old")
    assert reference.main() == 1
    assert "make docs" in capsys.readouterr().err


@pytest.mark.parametrize(("page", "least"), [("guarantees.md", 20), ("openai.md", 40)])
def test_every_promise_names_tests_that_exist(page: str, least: int) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", (DOCS / page).read_text(encoding="utf-8"))
    assert len(named) > least
    missing = [f"{path}::{test}" for path, test in named if not _has(path, test)]
    assert missing == []


def test_every_probe_of_openais_contract_is_held_by_a_test() -> None:
    lines = (DOCS / "openai.md").read_text(encoding="utf-8").splitlines()
    probes = [line for line in lines if line.startswith("| ") and not line.startswith("| probe |")]
    assert len(probes) > 40
    assert [line for line in probes if "`tests/" not in line.split(" | ")[-1]] == []


def test_the_table_of_properties_is_the_specifications() -> None:
    assert [name for name, _, _ in chat_table.rows()] == [f"`{name}`" for name in FIELDS]


def _has(path: str, test: str) -> bool:
    file = ROOT / path
    return file.is_file() and re.search(rf"def {test}\(", file.read_text(encoding="utf-8")) is not None
