"""Fixtures and settings for every folder of tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.sizes import sized

pytest_plugins = ["tests.redis_server", "tests.postgres_server"]

# No deadline and no health check of speed: a busy machine must not fail a property.
settings.register_profile(
    "baton",
    max_examples=sized(small=40, ci=100, long=1000),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("baton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each property test `sized`: it tries more examples in `make test-all`."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.sized)
