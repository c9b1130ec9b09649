"""Fixtures and settings for every folder of tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings

from tests.sizes import sized
from tests.waiting import BOUND_S

pytest_plugins = ["tests.redis_server", "tests.postgres_server"]

# No deadline and no health check of speed: a busy machine must not fail a property.
settings.register_profile(
    "baton",
    max_examples=sized(small=40, ci=100, long=1000),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("baton")


# A client of a test that sets no timeout waits as long as any test does: httpx's five seconds are too few for a busy
# machine.
for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, BOUND_S)

HERE = Path(__file__).parent
QUICK = ("unit", "service", "bench")  # folders whose files take a second or two


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each property test `sized`: it tries more examples in `make test-all`. Files of quick tests come last: a
    process that gets a slow one at the end leaves the other idle."""
    items.sort(key=lambda item: Path(str(item.path)).relative_to(HERE).parts[0] in QUICK)
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.sized)
