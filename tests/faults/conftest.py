"""Fixtures of the fault tests."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.site import Site, Zygote, site

Make = Callable[..., Any]


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """What forks the gateways of this run."""
    one = Zygote(tmp_path_factory.mktemp("zygote") / "zygote.log")
    yield one
    one.close()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="baton-faults-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
async def here(place: Path, zygote: Zygote, database_url: str) -> AsyncIterator[Site]:
    """A site without gateways yet."""
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(site(place, zygote, database_url))
