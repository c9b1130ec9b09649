"""Which admin API a command asks: a gateway by URL, the one on the data directory, or DATABASE_URL without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import cli
from gateway.cli.admin.client import AdminClient, LocalApi
from gateway.cli.process.datadir import FACTS, DataDir
from gateway.errors import BadRequest, BatonError, ConfigError, Unavailable

DATABASE = "postgresql://u@h/d"
FACTS_OF_ONE = {"admin_url": "http://127.0.0.1:9", "admin_key": "bt_admin_y", "database_url": DATABASE}


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("DATABASE_URL", raising=False)


@pytest.fixture
def serving(tmp_path: Path) -> None:
    DataDir(tmp_path / "data").write(FACTS, FACTS_OF_ONE)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was sent over HTTP; `reply` at its end makes the replies."""
    log: list[Any] = [lambda: httpx.Response(200, json={"data": []})]

    def request(method: str, url: str, **more: Any) -> httpx.Response:
        reply = log[0]()
        log.append((method, url, more["headers"]["authorization"], more["trust_env"]))
        assert isinstance(reply, httpx.Response)
        return reply

    monkeypatch.setattr(httpx, "request", request)
    return log


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that were answered without a gateway."""
    paths: list[str] = []

    def ask(self: LocalApi, method: str, path: str, body: Any) -> httpx.Response:
        paths.append(path)
        return httpx.Response(200, json={"data": []})

    monkeypatch.setattr(LocalApi, "ask", ask)
    return paths


@pytest.mark.usefixtures("serving")
def test_a_gateway_on_the_data_directory_is_asked_past_any_proxy(sent: list[Any], local: list[str]) -> None:
    AdminClient(None, None).ask("GET", "/admin/keys")
    assert sent[1:] == [("GET", "http://127.0.0.1:9/admin/keys", "Bearer bt_admin_y", False)]
    assert local == []


def test_a_gateway_by_url_is_asked_with_the_key_of_the_file(sent: list[Any], tmp_path: Path) -> None:
    (tmp_path / "key").write_text("bt_admin_z\n")
    AdminClient("http://gateway:8081/", tmp_path / "key").ask("GET", "/admin/orgs")
    assert sent[1:] == [("GET", "http://gateway:8081/admin/orgs", "Bearer bt_admin_z", True)]
    with pytest.raises(ConfigError, match="needs a file with an admin key"):
        AdminClient("http://gateway:8081", None)


@pytest.mark.usefixtures("serving")
def test_another_database_than_the_gateways_is_administered_itself(
    sent: list[Any], local: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://u@h/other")
    AdminClient(None, None).ask("GET", "/admin/keys")
    assert (sent[1:], local) == ([], ["/admin/keys"])


@pytest.mark.usefixtures("serving")
def test_a_killed_gateway_is_passed_by_where_the_database_is_known(
    sent: list[Any], local: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> httpx.Response:
        raise httpx.ConnectError("Connection refused")

    sent[0] = refuse
    with pytest.raises(Unavailable, match=r"the gateway at http://127.0.0.1:9 does not answer: Connection refused"):
        AdminClient(None, None).ask("GET", "/admin/keys")
    monkeypatch.setenv("DATABASE_URL", DATABASE)
    AdminClient(None, None).ask("GET", "/admin/keys?x=1")
    assert local == ["/admin/keys?x=1"]
    with pytest.raises(Unavailable):
        AdminClient(None, None).ask("GET", "/admin/credits")  # balances need a gateway


@pytest.mark.parametrize(("status", "kind"), [(400, BadRequest), (409, BatonError)])
@pytest.mark.usefixtures("serving")
def test_a_refusal_keeps_its_words(sent: list[Any], status: int, kind: type[BatonError]) -> None:
    sent[0] = lambda: httpx.Response(status, json={"error": {"message": "no", "code": "why"}})
    with pytest.raises(kind) as refused:
        AdminClient(None, None).ask("GET", "/admin/keys")
    assert (refused.value.message, refused.value.code) == ("no", "why")


@pytest.mark.usefixtures("serving")
def test_a_revoked_key_of_the_gateway_says_what_to_do(sent: list[Any]) -> None:
    sent[0] = lambda: httpx.Response(401, json={"error": {"message": "Incorrect API key provided"}})
    with pytest.raises(BatonError, match="start it again, or give its URL and another key"):
        AdminClient(None, None).ask("GET", "/admin/keys")


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["keys", "create", "--name", "x"], "start it (`baton serve`), set DATABASE_URL, or give its admin URL"),
        (["audit", "verify"], "start it (`baton serve`), set DATABASE_URL, or give its admin URL"),
        (["credits", "list"], "start it (`baton serve`), or give its admin URL"),
        (["retention", "run"], "start it (`baton serve`), or set DATABASE_URL"),
    ],
)
def test_without_a_gateway_one_line_says_how_to_get_one(
    arguments: list[str], fix: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == f"no gateway serves from {tmp_path / 'data'}: {fix}\n"


@pytest.mark.usefixtures("serving")
def test_the_audit_is_listed_in_pages(
    sent: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gateway.cli.admin.audit.PAGE_MAX", 2)
    pages = iter([[5, 4], [3, 2], [1]])
    sent[0] = lambda: httpx.Response(200, json={"data": [{"seq": seq} for seq in next(pages)]})
    assert cli.main(["audit", "list", "--limit", "3", "--target", "org:a b", "--json"]) == 0
    assert [entry["seq"] for entry in json.loads(capsys.readouterr().out)] == [5, 4, 3]
    paths = [url.removeprefix("http://127.0.0.1:9/admin/audit?") for _, url, _, _ in sent[1:]]
    assert paths == ["limit=2&target=org%3Aa+b", "limit=2&target=org%3Aa+b&before=4"]
