"""Durations read as Go's `time.ParseDuration` reads them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.service.ports.request import go_duration

UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (-1, "0s"), (0.0001, "1ms"), (0.12, "120ms"), (1, "1s"), (6.25, "6.25s"), (60, "1m0s"), (360, "6m0s"),
     (90.5, "1m30.5s"), (3600, "1h0m0s"), (86_399.999, "23h59m59.999s")],
)  # fmt: skip
def test_examples(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text


@given(st.integers(0, 10**9))
def test_it_reads_back(milliseconds: int) -> None:
    found = re.findall(r"([\d.]+)(ms|h|m|s)", go_duration(milliseconds / 1000))
    assert round(sum(float(number) * UNITS[unit] for number, unit in found) * 1000) in (milliseconds, milliseconds + 1)
