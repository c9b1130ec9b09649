"""Requests to workers as JSON: in UTF-8, and never with what JSON does not have."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.adapters.upstream.client import encode
from gateway.errors import UpstreamRefused

SCALAR = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())
VALUE = st.recursive(SCALAR, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(st.dictionaries(st.text(), VALUE))
def test_a_body_comes_back_as_it_was(body: dict[str, Any]) -> None:
    assert json.loads(encode(body)) == body


def test_text_is_sent_in_utf_8_and_half_a_pair_as_its_escape() -> None:
    assert encode({"content": "größer"}) == '{"content":"größer"}'.encode()
    assert json.loads(encode({"content": "half \ud83d"})) == {"content": "half \ud83d"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [{"deep": -float("inf")}], object()])
@pytest.mark.parametrize("beside", [None, "null", "text"])
def test_what_json_does_not_have_is_refused_before_it_is_sent(value: Any, beside: str | None) -> None:
    with pytest.raises(UpstreamRefused, match="cannot represent") as caught:
        encode({"temperature": value, "stop": beside})
    assert not caught.value.dispatched
