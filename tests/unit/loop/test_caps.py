"""Caps can only be lowered, and nonsense in one is an error that names it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loop.caps import CAP_HEADERS, Caps, caps_from_headers
from gateway.errors import BadRequest

NAMES = [field.name for field in fields(Caps)]
whole = st.integers(1, 10**12)
wanted_caps = st.fixed_dictionaries(
    {},
    optional={name: whole for name in NAMES if name not in ("depth", "wall_s")}
    | {"depth": st.integers(0, 99), "wall_s": whole | st.floats(0.001, 1e6)},
)


@given(wanted_caps, wanted_caps)
def test_narrowing_never_widens_and_its_order_does_not_matter(first: dict[str, Any], second: dict[str, Any]) -> None:
    caps = Caps()
    narrow = caps.narrow(first).narrow(second)
    assert narrow == caps.narrow(second).narrow(first)
    for name in NAMES:
        bounds = [value for value in (getattr(caps, name), first.get(name), second.get(name)) if value is not None]
        assert getattr(narrow, name) == min(bounds)


def test_nothing_wanted_changes_nothing() -> None:
    assert Caps().narrow({}) == Caps()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), float("-inf"), "3", None, True, [1]])
def test_nonsense_names_its_cap(name: str, value: object) -> None:
    with pytest.raises(BadRequest) as refused:
        Caps().narrow({name: value})
    assert refused.value.param == f"caps.{name}"


@pytest.mark.parametrize("name", NAMES)
def test_only_depth_may_be_nothing(name: str) -> None:
    if name == "depth":
        assert Caps().narrow({name: 0}).depth == 0
        return
    with pytest.raises(BadRequest, match="above 0"):
        Caps().narrow({name: 0})


@pytest.mark.parametrize("name", NAMES)
def test_only_seconds_may_be_a_fraction(name: str) -> None:
    if name == "wall_s":
        assert Caps().narrow({name: 0.5}).wall_s == 0.5
        return
    with pytest.raises(BadRequest, match="whole number"):
        Caps().narrow({name: 0.5})  # cut to a whole number it would be a cap of nothing


def test_an_unknown_cap_is_named_with_those_there_are() -> None:
    with pytest.raises(BadRequest, match="send one of calls, cost_nano, depth") as refused:
        Caps().narrow({"money": 1})
    assert refused.value.param == "caps.money"


def test_headers_become_caps() -> None:
    headers = {
        "x-baton-max-cost-usd": "0.05",
        "x-baton-max-depth": "0",
        "x-baton-max-rounds": "1",
        "x-baton-max-steps": "2",
        "x-baton-max-parallel": "3",
        "x-baton-max-calls": "4",
        "x-baton-max-tokens": "5000",
        "x-baton-timeout-s": "2.5",
        "x-other": "7",
    }
    wanted = caps_from_headers(headers)
    assert Caps().narrow(wanted) == Caps(0, 1, 2, 3, 4, 5000, 50_000_000, 2.5)
    assert caps_from_headers({}) == {}


def test_every_cap_has_a_header() -> None:
    assert sorted(CAP_HEADERS.values()) == sorted(NAMES)


@pytest.mark.parametrize("header", CAP_HEADERS)
@pytest.mark.parametrize("text", ["", "much", "-1", "nan", "inf", "1e999", "0x10", "9" * 5000, "1;2"])
def test_a_bad_header_is_named(header: str, text: str) -> None:
    with pytest.raises(BadRequest) as refused:
        caps_from_headers({header: text})
    assert refused.value.param == header
    assert refused.value.message.startswith(f"{header}: ")
    assert len(refused.value.message) < 150


@pytest.mark.parametrize("header", sorted(set(CAP_HEADERS) - {"x-baton-max-depth"}))
def test_a_header_of_nothing_is_an_error_not_a_cap(header: str) -> None:
    with pytest.raises(BadRequest) as refused:
        caps_from_headers({header: "0"})
    assert refused.value.param == header


def test_caps_are_recorded_whole() -> None:
    assert Caps(**Caps(depth=1).as_json()) == Caps(depth=1)
    assert set(Caps().as_json()) == set(NAMES)
