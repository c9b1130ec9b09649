"""`baton rollouts` and `baton explain`: what they ask, and what they print."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway import cli
from gateway.cli.admin import rollouts

LINE = {
    **{"id": "r1", "created_at": "2026-01-01T00:00:00Z", "key_id": "k1", "key_name": "app", "policy_used": "rule"},
    **{"workers": ["small", "large"], "status": "done", "cost_nano": 1_500_000, "latency_ms": 12.6},
}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that a command asks for."""
    paths: list[str] = []

    class Client:
        def __init__(self, *_: Any) -> None: ...

        def ask(self, method: str, path: str) -> Any:
            paths.append(f"{method} {path}")
            return {"data": [LINE], "next": "7.x"} if "?" in path else {"id": "r1"}

    monkeypatch.setattr(rollouts, "AdminClient", Client)
    return paths


def test_a_list_is_a_table_with_the_next_page(requests: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rollouts", "list", "--key", "k 1", "--status", "done"]) == 0
    assert requests == ["GET /admin/rollouts?key=k+1&status=done&limit=20"]
    printed = capsys.readouterr().out
    assert "small,large" in printed
    assert "0.0015" in printed
    assert "more: --before 7.x" in printed


def test_a_list_and_an_explanation_are_json_too(requests: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rollouts", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == [LINE]
    for words in (["explain"], ["rollouts", "explain"], ["rollouts", "show"]):
        assert cli.main([*words, "a/b", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"id": "r1"}
    assert requests[1:] == ["GET /admin/rollouts/a%2Fb/explain"] * 2 + ["GET /admin/rollouts/a%2Fb"]
