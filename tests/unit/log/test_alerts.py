"""What alerts say, when they are tried again, and their signature."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.core.log.alerts import (
    Alert,
    DueAlert,
    Fate,
    Receipt,
    body_of,
    is_over,
    pause_s,
    secret_bytes,
    signed,
)
from gateway.core.money.ledger import Balance, Scope
from gateway.core.pool.drift import Drift
from gateway.errors import ConfigError
from gateway.service.admin.alerts import budget_alerts, drift_alert

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
USD = 10**9


def alerts_of(
    posted: int, *, limit: int = 10 * USD, refused: bool = False, scope: str = "key:abc:2026-11"
) -> list[Alert]:
    return list(budget_alerts(Scope(scope, limit), Balance(posted, 0), refused, NOW))


@pytest.mark.parametrize(
    ("posted", "refused", "percents"),
    [
        (0, True, []),
        (5 * USD - 1, False, []),
        (5 * USD, False, [50]),
        (7 * USD, True, [50]),  # one large request was refused: the budget goes on
        (8 * USD, False, [50, 80]),
        (8 * USD, True, [50, 80, 100]),  # less is left than a request needs
        (10 * USD, False, [50, 80, 100]),
        (-USD, False, []),
    ],
)
def test_the_thresholds_of_a_budget(posted: int, refused: bool, percents: list[int]) -> None:
    one_after_the_other = sorted(alerts_of(posted, refused=refused), key=lambda one: one.at)
    assert [one.data["percent"] for one in one_after_the_other] == percents


def test_a_threshold_is_one_subject_a_period_and_limit() -> None:
    (first,), (again,), (more,) = alerts_of(5 * USD), alerts_of(6 * USD), alerts_of(11 * USD, limit=20 * USD)
    assert first.subject == again.subject != more.subject
    assert first.data == {
        **{"scope": "key:abc:2026-11", "window": "month", "percent": 50},
        **{"spent_usd": "5", "limit_usd": "10"},
    }
    assert (first.lasting, alerts_of(5 * USD, scope="key:abc")[0].lasting) == (False, True)


def test_a_flag_is_told_once_a_month() -> None:
    flag = Drift("atlas", "1", "code", "outcome", 0.1, 0.45, 80)
    first, later = drift_alert(flag, NOW), drift_alert(flag, NOW + timedelta(days=1))
    assert first.subject == later.subject != drift_alert(flag, NOW + timedelta(days=30)).subject
    assert (first.data["worker"], first.data["signal"], first.data["now"]) == ("atlas", "outcome", 0.45)


def test_the_signature_is_that_of_standard_webhooks() -> None:
    """The vector of the specification's reference implementations."""
    key = secret_bytes("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    at = datetime.fromtimestamp(1614265330, UTC)
    headers = signed(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", at, b'{"test": 2432232314}')
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_the_page_shows_how_to_verify() -> None:
    page = (Path(__file__).parents[3] / "docs" / "webhooks.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```python")[1].split("```")[0], names)  # noqa: S102 - the page's own example
    secret = "whsec_" + base64.b64encode(bytes(32)).decode()
    headers = signed(secret_bytes(secret), "a", datetime.now(UTC), b"{}")
    assert names["is_genuine"](secret, headers, b"{}")
    assert not names["is_genuine"](secret, headers, b"{ }")


@pytest.mark.parametrize("secret", ["", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_a", "whsec_?", "whsec_" + "A" * 400])
def test_a_secret_of_another_form_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(ConfigError) as refused:
        secret_bytes(secret)
    assert not secret.removeprefix("whsec_") or secret not in str(refused.value)
    assert len(secret_bytes("whsec_" + base64.b64encode(bytes(32)).decode())) == 32


def test_pauses_grow_and_an_alert_is_given_up_after_a_day_or_five_refusals() -> None:
    assert [pause_s(n) for n in (1, 2, 3, 8, 9, 1000)] == [5.0, 10.0, 20.0, 640.0, 900.0, 900.0]

    def over(hours: float, attempts: int, fate: Fate) -> bool:
        return is_over(DueAlert("a", "job", NOW - timedelta(hours=hours), {}, attempts), fate, NOW)

    assert not over(23, 90, "failed")
    assert over(24, 90, "failed")
    assert (over(0, 4, "refused"), over(0, 5, "refused")) == (False, True)


@pytest.mark.parametrize(
    ("status", "fate"),
    [
        (200, "sent"),
        (204, "sent"),
        (302, "failed"),
        (400, "refused"),
        (429, "failed"),
        (500, "failed"),
        (None, "failed"),
    ],
)
def test_what_came_back(status: int | None, fate: Fate) -> None:
    assert Receipt(status, "ConnectError").fate == fate


def test_the_body_is_the_same_at_each_attempt() -> None:
    first, second = (body_of(DueAlert("a", "job", NOW, {"state": "done", "job": "b"}, n)) for n in (1, 2))
    assert first == second
    assert json.loads(first) == {
        **{"type": "baton.job", "id": "a", "timestamp": "2026-11-23T12:00:00+00:00"},
        "data": {"state": "done", "job": "b"},
    }
