"""What each of several processes gets of the gateway's limits."""

from __future__ import annotations

import pytest

from gateway.cli.process.processes import share_of, watching
from gateway.config.settings import Settings


@pytest.mark.parametrize("processes", [2, 3, 64])
def test_the_processes_that_serve_share_the_work_that_waits(processes: int) -> None:
    settings = Settings(processes=processes, batch_lines_max=8, background_max=64)
    parts = [share_of(settings, index) for index in range(1, processes + 1)]
    for name in ("batch_lines_max", "background_max"):
        assert sum(part[name] for part in parts) == getattr(settings, name)
        assert max(part[name] for part in parts) - min(part[name] for part in parts) <= 1
        assert getattr(watching(settings), name) == 0
