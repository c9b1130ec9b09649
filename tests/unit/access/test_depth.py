"""The depth header: believed only from those who share the secret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.access.depth import DEPTH_MAX, sign, verify


@given(st.integers(0, DEPTH_MAX), st.binary(max_size=40))
def test_a_signed_depth_is_verified(depth: int, secret: bytes) -> None:
    assert verify(sign(depth, secret), secret) == depth
    assert verify(sign(depth, secret), secret + b"x") is None


@given(st.text(max_size=90))
def test_nothing_else_is(value: str) -> None:
    assert verify(value, b"secret") is None


def test_a_changed_number_is_refused() -> None:
    assert verify(sign(3, b"s").replace("3", "0", 1), b"s") is None
    assert verify(None, b"s") is None


@pytest.mark.parametrize("depth", [-1, DEPTH_MAX + 1])
def test_depths_out_of_range_are_not_signed(depth: int) -> None:
    with pytest.raises(ValueError, match="depth"):
        sign(depth, b"s")
