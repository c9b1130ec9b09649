"""The drawn tree is the tree, and every error carries what an OpenAI client reads."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gateway import errors
from gateway.errors import (
    BadRequest,
    BatonError,
    BudgetExceeded,
    CapReached,
    ConductorError,
    ConfigError,
    PlanRefused,
    RateLimited,
    UpstreamError,
    UpstreamProtocol,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamTimeout,
)

_LINE = re.compile(r"^(?P<bars>[│├└─ ]*)(?P<name>[A-Z]\w+) +(?P<status>\d{3}) +(?P<type>\w+) +(?P<code>.+)$")


def classes(base: type[BatonError] = BatonError) -> dict[str, type[BatonError]]:
    found = {base.__name__: base}
    for child in base.__subclasses__():
        found |= classes(child)
    return found


def drawn() -> list[tuple[int, str, str, str, str]]:
    """(depth, name, status, type, code) of each line of the tree in the module's docstring."""
    matches = [_LINE.match(line) for line in str(errors.__doc__).splitlines()]
    return [(len(m["bars"]) // 4, m["name"], m["status"], m["type"], m["code"]) for m in matches if m]


def test_the_drawn_tree_is_the_tree() -> None:
    ours = {name for name, cls in classes().items() if cls.__module__ == errors.__name__}
    assert {name for _, name, *_ in drawn()} == ours - {"BatonError"}
    path: list[type[BatonError]] = []
    for depth, name, status, kind, code in drawn():
        cls = classes()[name]
        path = [*path[: depth - 1], cls]
        assert cls.__bases__ == (path[-2] if depth > 1 else BatonError,)
        assert (cls.status, cls.type) == (int(status), kind), name
        if not code.startswith("("):
            assert cls.code in [word.strip() for word in code.split("(")[0].split("|")], name


def test_a_body_has_openais_four_keys_always() -> None:
    assert BatonError("oh").body() == {
        "error": {"message": "oh", "type": "server_error", "param": None, "code": "internal_error"}
    }
    named = BadRequest("bad", param="n", code="invalid_type")
    assert named.body() == {
        "error": {"message": "bad", "type": "invalid_request_error", "param": "n", "code": "invalid_type"}
    }
    assert BadRequest.code == "invalid_request"  # the class keeps its own
    assert str(named) == "bad"


def test_headers_are_the_errors_own() -> None:
    headers = {"retry-after": "1"}
    error = ConfigError("bad", headers=headers)
    error.headers["x"] = "y"
    assert headers == {"retry-after": "1"}
    assert BatonError("oh").headers == {}


@pytest.mark.parametrize(
    ("retry_after_s", "seconds", "milliseconds"),
    [(0.0, "1", "1"), (0.25, "1", "250"), (1.2, "2", "1200"), (60, "60", "60000")],
)
def test_rate_limits_say_when_in_both_headers_never_too_early(
    retry_after_s: float, seconds: str, milliseconds: str
) -> None:
    error = RateLimited("slow down", retry_after_s=retry_after_s)
    assert error.headers == {"retry-after": seconds, "retry-after-ms": milliseconds}
    assert error.retry_after_s == retry_after_s


def test_errors_that_a_retry_cannot_help_say_so() -> None:
    budget = BudgetExceeded("no money", scope="key:a")
    cap = CapReached("depth", "too deep")
    assert budget.headers == cap.headers == {"x-should-retry": "false"}
    assert budget.scope == "key:a"
    assert cap.cap == "depth"


@pytest.mark.parametrize(
    ("cls", "retryable"),
    [
        (UpstreamError, False),
        (UpstreamTimeout, True),
        (UpstreamRateLimited, True),
        (UpstreamRefused, False),
        (UpstreamProtocol, True),
    ],
)
def test_upstream_errors_know_whether_to_try_again(cls: type[UpstreamError], retryable: bool) -> None:
    error = cls("failed")
    assert error.retryable is retryable
    assert error.dispatched
    assert (error.upstream_status, error.retry_after_s) == (None, None)
    told: dict[str, Any] = {
        "upstream_status": 503,
        "retry_after_s": 2.0,
        "dispatched": False,
        "code": "x",
        "param": "p",
    }
    other = cls("failed", retryable=not retryable, **told)
    assert other.retryable is not retryable
    assert {name: getattr(other, name) for name in told} == told
    assert cls.retryable is retryable


def test_errors_carry_their_reason() -> None:
    assert PlanRefused("bad_see", "no", param="steps[0].see").reason == "bad_see"
    assert ConductorError("slow", "no plan").reason == "slow"
