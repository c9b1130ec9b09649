"""Settings: where they come from, what is refused, and how a mistake reads."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.config import settings as config
from gateway.config.planning import HASHING, MINILM
from gateway.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in config.Settings.model_fields:
        monkeypatch.delenv(config.variable(name), raising=False)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("REDIS_URL", raising=False)


def _message(**given: object) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(**given)
    return caught.value.message


def test_defaults_need_nothing() -> None:
    settings = config.load()
    assert settings.conductor_kind == "embedded"
    assert settings.database_url is None
    assert settings.spool_path == Path(".baton/spool")
    assert settings.caps_cost_nano_max == 500_000_000


def test_the_environment_is_read_and_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "9000")
    monkeypatch.setenv("BATON_HOST", "0.0.0.0")  # noqa: S104 - a string, nothing listens
    settings = config.load(port=9001, host=None)
    assert (settings.port, settings.host) == (9001, "0.0.0.0")  # noqa: S104


@pytest.mark.parametrize("wrong", ["", "bert", "http://h:1/v1", "ftp://h/v1#m", "http:///v1#m"])
def test_an_embedder_is_hashing_or_a_url_with_a_model(wrong: str) -> None:
    assert config.load().embedder == MINILM
    assert config.load(embedder=HASHING).embedder == HASHING
    assert config.load(embedder="http://h:1/v1#m").embedder == "http://h:1/v1#m"
    assert "http://host:port/v1#model" in _message(embedder=wrong)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config.load().port = 1  # type: ignore[misc]


def test_the_servers_are_read_under_their_common_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:p@h/d")
    monkeypatch.setenv("REDIS_URL", "redis://h:6379/0")
    settings = config.load()
    assert (settings.database_url, settings.redis_url) == ("postgresql://u:p@h/d", "redis://h:6379/0")


def test_the_prefixed_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://plain")
    monkeypatch.setenv("BATON_REDIS_URL", "redis://prefixed")
    assert config.load().redis_url == "redis://prefixed"


def test_an_unknown_variable_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_DRIAN_S", "1")
    assert _message() == "BATON_DRIAN_S: no such setting; did you mean BATON_DRAIN_S?"


def test_an_unknown_variable_like_nothing_is_told_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_QQQQQQQQ", "1")
    assert "docs/configuration.md" in _message()


def test_an_unknown_argument_is_refused() -> None:
    assert _message(colour="red") == "colour: no such setting; docs/configuration.md lists every setting"


def test_every_mistake_has_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "99999")
    monkeypatch.setenv("BATON_DRAIN_S", "soon")
    lines = _message().splitlines()
    assert sorted(line.split(":")[0] for line in lines) == ["BATON_DRAIN_S=soon", "BATON_PORT=99999"]
    assert all("default" in line for line in lines)


@pytest.mark.parametrize("amount", ["-1", "much", "NaN", "10000000000"])
def test_money_is_an_amount_in_dollars(amount: str) -> None:
    assert "BATON_CAPS_COST_USD_MAX" in _message(caps_cost_usd_max=amount)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REDIS_URL", "http://user:hunter2@host"),
        ("BATON_PEPPER", "hunter2"),
        ("BATON_CONDUCTOR_API_KEY", "hunter2"),
    ],
)
def test_a_secret_in_a_wrong_value_is_not_echoed(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert "hunter2" not in _message()


@pytest.mark.parametrize(
    ("conductor", "kind"),
    [
        ("embedded", "embedded"),
        ("worker:gpt", "worker"),
        ("policies/conductor@7", "directory"),
        ("https://host/v1#model", "url"),
    ],
)
def test_the_four_forms_of_a_conductor(conductor: str, kind: str) -> None:
    settings = config.load(
        conductor=conductor, conductor_input_usd_per_mtok="0.1", conductor_output_usd_per_mtok=Decimal(0)
    )
    assert settings.conductor_kind == kind


def test_a_conductor_by_url_needs_a_model_and_a_price() -> None:
    assert "#model" in _message(conductor="http://host/v1")
    assert "BATON_CONDUCTOR_INPUT_USD_PER_MTOK" in _message(conductor="http://host/v1#m")


def test_the_environment_is_handed_out_as_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "value")
    config.environment()["SOME_KEY"] = "other"
    assert config.environment()["SOME_KEY"] == "value"


def test_every_field_is_in_one_section_and_described() -> None:
    listed = [name for section in config.SECTIONS for name in section.model_fields]
    assert sorted(listed) == sorted(config.Settings.model_fields)
    assert all(field.description for field in config.Settings.model_fields.values())


def test_a_webhook_is_http_and_signed_and_its_url_is_not_repeated() -> None:
    wrong = _message(alerts_url="ftp://host/hook?token=hidden", alerts_secret="env:HOOK")
    assert "http:// or https://" in wrong
    assert "BATON_ALERTS_SECRET" in _message(alerts_url="https://host/hook?token=hidden")
    assert "hidden" not in wrong + _message(alerts_url="https://host/hook?token=hidden")
    assert "`fire` is no kind of alert" in _message(alerts_kinds="budget,fire")
    assert config.load(alerts_url="https://host/hook", alerts_secret="env:HOOK").alerts_kinds.startswith("budget,")


def test_a_login_needs_its_client_its_address_and_https() -> None:
    whole = {
        "oidc_issuer": "https://id.example.com",
        "oidc_client_id": "baton",
        "oidc_redirect_url": "https://baton.example.com/login/callback",
        "oidc_admins": "chiefs, Big Chiefs",
    }
    roles = config.load(**whole).oidc_roles
    assert roles == {"admin": ("chiefs", "Big Chiefs"), "operator": (), "auditor": ()}
    assert config.load().oidc_roles == {"admin": (), "operator": (), "auditor": ()}
    assert "BATON_OIDC_CLIENT_ID" in _message(**whole | {"oidc_client_id": ""})
    assert "ends with /login/callback" in _message(**whole | {"oidc_redirect_url": "https://baton.example.com/"})
    assert "BATON_OIDC_ISSUER must be https" in _message(**whole | {"oidc_issuer": "http://id.example.com"})
    away = "http://baton.example.com/login/callback"
    assert "BATON_OIDC_REDIRECT_URL must be https" in _message(**whole | {"oidc_redirect_url": away})
    assert "`openid`" in _message(**whole | {"oidc_scopes": "email"})
    here = {"oidc_issuer": "http://127.0.0.1:9", "oidc_redirect_url": "http://localhost:8081/login/callback"}
    assert config.load(**whole | here).oidc_issuer == "http://127.0.0.1:9"
