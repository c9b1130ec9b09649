"""The commands of administration, on a real database: what they print, what they change, and who it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from gateway import cli
from gateway.adapters.postgres.database import driver_url
from gateway.cli.admin import orgs
from gateway.cli.admin.client import AdminClient
from gateway.cli.pool import pools
from gateway.core.loop.replies.errors import CheckerErrors, Share

POOL = """
workers:
  - {name: one, handle: atlas, kind: openai, model: m, url: "http://127.0.0.1:1/v1",
     price: {input_usd_per_mtok: 1, output_usd_per_mtok: 2}}
pools: {main: [one]}
default: main
"""
Run = Callable[..., Any]


@pytest.fixture
def run(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command with --json and gives what it printed; another exit status than `status` fails."""
    (tmp_path / "pool.yaml").write_text(POOL)
    for name, value in (("DATABASE_URL", database_url), ("BATON_POOL", str(tmp_path / "pool.yaml"))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BATON_DATA_DIR", str(tmp_path / "data"))

    def command(*arguments: str, status: int = 0, plain: bool = False) -> Any:
        assert cli.main([*arguments, *([] if plain else ["--json"])]) == status
        said = capsys.readouterr()
        return said.out if plain or status else json.loads(said.out)

    return command


def test_an_organisation_lives_and_is_closed(run: Run) -> None:
    made = run("orgs", "create", "acme", "--budget-month-usd", "10", "--user-budget-day-usd", "0.5", "--rpm", "60")
    assert (made["name"], made["budget_month_usd"], made["user_budget_day_usd"], made["budget_usd"]) == (
        *("acme", "10", "0.5"),
        None,
    )
    changed = run("orgs", "update", "acme", "--rpm", "none", "--budget-usd", "99", "--why", "ticket 12")
    assert (changed["rpm"], changed["budget_usd"], changed["budget_month_usd"]) == (None, "99", "10")
    assert run("orgs", "show", "acme") == changed
    assert [org["name"] for org in run("orgs", "list")] == ["acme", "default"]
    assert run("orgs", "close", "acme")["closed_at"]
    assert "acme" in run("orgs", "list", plain=True)
    run("orgs", "update", "acme", "--rpm", "1", status=1)
    run("orgs", "create", "no spaces", status=2)
    acts = [(entry["act"], entry["why"]) for entry in run("audit", "list", "--target", "org:acme")]
    assert acts == [("org.closed", ""), ("org.changed", "ticket 12"), ("org.created", "")]


def test_a_key_is_made_changed_rotated_and_revoked_and_the_audit_has_no_secret(run: Run) -> None:
    made = run("keys", "create", "--name", "app", "--budget-day-usd", "1", "--caps", '{"steps": 2}', "--no-train")
    assert (made["org"], made["budget_day_usd"], made["train"], made["caps"]) == ("default", "1", False, {"steps": 2})
    changed = run("keys", "update", made["key"], "--tpm", "5", "--train", "--budget-day-usd", "none")
    assert (changed["id"], changed["tpm"], changed["train"], changed["budget_day_usd"]) == (made["id"], 5, True, None)
    turned = run("keys", "rotate", made["id"], "--grace-s", "60")
    assert turned["key"] != made["key"]
    assert turned["key"].split("_")[2] == made["id"]
    assert turned["previous_until"]
    assert run("keys", "show", made["id"])["previous_until"] == turned["previous_until"]
    assert run("keys", "revoke", made["id"])["revoked_at"]
    run("keys", "rotate", made["id"], status=1)
    run("keys", "create", "--name", "app", "--org", "nowhere", status=2)
    run("keys", "update", made["id"], "--rpm", "0", status=2)
    entries = run("audit", "list")
    assert [entry["act"] for entry in entries] == ["key.revoked", "key.rotated", "key.changed", "key.created"]
    assert all(entry["actor"].startswith("local:") for entry in entries)
    told = json.dumps(entries)
    assert not any(one["key"] in told or one["key"].split("_")[3] in told for one in (made, turned))
    assert "digest" not in {name for entry in entries for name in (entry["after"] or {})}


def test_verify_says_what_is_wrong_and_ends_with_one(run: Run, database_url: str) -> None:
    run("orgs", "create", "acme")
    run("orgs", "update", "acme", "--rpm", "2")
    assert run("audit", "verify")["ok"]
    engine = create_engine(driver_url(database_url))
    with engine.begin() as connection:
        connection.execute(text("SET session_replication_role = replica"))
        connection.execute(text("UPDATE audit SET actor = 'local:eve' WHERE seq = 1"))
    engine.dispose()
    said = run("audit", "verify", status=1, plain=True)
    assert said.startswith("entry 1: changed: its content is not what was written")
    assert "NOT whole: 1 faults" in said


def test_retention_says_what_it_would_delete(run: Run) -> None:
    assert run("retention", "run", "--dry-run") == {
        **{"deleted": False, "total": 0, "months": [], "held": []},
        **{"rollouts": {}, "shadows": 0, "dead_letters": 0},
    }
    assert "rollouts deleted: none" in run("retention", "run", plain=True)


def test_credits_and_pools_ask_the_gateway(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []
    made = {"id": "c1", "created": True, "usd": "5", "scopes": ["org:acme:2026-11"], "counts": "now"}
    pool = {"default": "main", "pools": {"main": ["one"]}, "workers": [], "hash": "ab", "loaded_at": "then"}
    checks = [CheckerErrors("check", Share(3, 20), Share(0, 4), Share(3, 40)).as_json()]
    workers = {"data": [], "checks": checks, "checks_at": "noon"}

    def ask(self: AdminClient, method: str, path: str, body: Any = None, more: Any = None) -> Any:
        asked.append((method, path, body, more))
        return {"POST": made}.get(method) or (pool if path.endswith("pools") else workers)

    monkeypatch.setattr(AdminClient, "__init__", lambda self, url, key_file, **more: None)
    monkeypatch.setattr(AdminClient, "ask", ask)
    give = ["credits", "give", "--org", "acme", "--window", "month", "--usd", "5", "--once", "t1", "--why", "w"]
    assert cli.main(give) == 0
    body = {"org": "acme", "usd": "5", "window": "month", "why": "w"}
    assert asked == [("POST", orgs.CREDITS, body, {"idempotency-key": "t1"})]
    assert capsys.readouterr().out == "credit c1: $5 was given to org:acme:2026-11; counts now\n"
    assert cli.main(["credits", "list", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"
    assert cli.main(["pools", "show"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed.pop(1) == (
        "checker check: wrong replies accepted 3 of 20 (5 to 36 %), right ones rejected unknown (4 judged), "
        "accepted ones wrong 3 of 40 (3 to 20 %)"
    )
    assert printed.pop(1) == "checkers counted at noon"
    assert " ".join(printed).split() == [*pools.COLUMNS, "default", "pool:", "main", "ab", "since", "then"]


def test_sessions_are_listed_and_changed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []
    used = {name: {"limit": 3, "spent": 1, "held": 0, "left": 2} for name in ("usd", "calls", "minutes")}
    free = used | {"minutes": {"limit": None, "spent": 7, "left": 9}}
    one = {"key": "k1", "id": "run-1", "state": "open", "ends_at": "then", **free}

    def ask(self: AdminClient, method: str, path: str, body: Any = None, more: Any = None) -> Any:
        asked.append((method, path, body))
        return {"data": [one]} if method == "GET" and path.count("/") == 2 else one

    monkeypatch.setattr(AdminClient, "__init__", lambda self, url, key_file, **more: None)
    monkeypatch.setattr(AdminClient, "ask", ask)
    assert cli.main(["sessions", "list", "--key", "k1"]) == 0
    assert "run-1  open   2 of 3 left  2 of 3 left  7 spent  then" in capsys.readouterr().out
    for words, change in (
        (["raise", "--usd", "0.5", "--minutes", "none"], {"usd": "0.5", "minutes": None}),
        (["freeze"], {"state": "frozen"}),
        (["thaw"], {"state": "open"}),
        (["kill"], {"state": "killed"}),
    ):
        assert cli.main(["sessions", words[0], "k1", "run-1", *words[1:], "--why", "w"]) == 0
        assert asked[-1] == ("PATCH", "/admin/sessions/k1/run-1", change | {"why": "w"})
    assert "session run-1 of key k1 is open; usd 2 of 3 left" in capsys.readouterr().out
    assert cli.main(["sessions", "show", "k1", "run-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == one
