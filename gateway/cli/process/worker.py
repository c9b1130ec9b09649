"""Carry out jobs and grade replies: the worker that `baton serve` starts, on its own.

Works on the database of the running gateway (found through the data directory) or on DATABASE_URL. Several may run;
a job is one worker's at a time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gateway.adapters.host.servers import Server
from gateway.cli.process.datadir import FACTS, JUDGE, DataDir
from gateway.cli.process.services import conductor_directory, database_of
from gateway.config import settings as config
from gateway.config.settings import Settings
from gateway.errors import ConfigError

WORKER = "worker.json"  # what the worker is told; it may hold the database's password
STOP_S = 60.0  # for a checkpoint
COMMAND = ("-m", "policy", "jobs", "work", "--settings")


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments."""
    parser.add_argument("--data-dir", type=Path, help="where its state lies; default .baton (BATON_DATA_DIR)")


def run(options: argparse.Namespace) -> int:
    """Become that program: its signals and exit status are ours. Raises ConfigError without a database."""
    settings = config.load(data_dir=options.data_dir)
    data = DataDir(settings.data_dir)
    url = database_of(settings, data)
    if find_spec("policy") is None:
        raise ConfigError("this installation has no policy package; run the worker where it is installed")
    path = tell(settings, data, url)
    os.execv(sys.executable, [sys.executable, *COMMAND, str(path)])  # noqa: S606 - our own program


def tell(settings: Settings, data: DataDir, database_url: str) -> Path:
    """Write down what a worker is told; readable by this user only. Raises ConfigError."""
    data.write(WORKER, facts_of(settings, data, database_url))
    return data.path / WORKER


def facts_of(settings: Settings, data: DataDir, database_url: str) -> dict[str, Any]:
    """As `policy.jobs.worker.WorkerSettings` reads it. Raises ConfigError for arguments that cannot be split."""
    try:
        retrain = shlex.split(settings.retrain_arguments)
    except ValueError as error:
        raise ConfigError(f"BATON_RETRAIN_ARGUMENTS: {error}; write them as on a command line") from None
    ours = settings.conductor_kind in ("embedded", "directory")
    return {
        "database_url": database_url,
        "data_dir": str(data.path),
        "policies": str((settings.policies_path or data.path / "policies").resolve()),
        "shipped": str(conductor_directory(settings)) if ours else None,
        "python": str(settings.train_python.absolute()) if settings.train_python else sys.executable,
        "retrain_outcomes_min": settings.retrain_outcomes_min,
        "retrain_every_s": settings.retrain_every_s,
        "retrain_arguments": retrain,
        "retrain_auto": settings.retrain_auto,
        "judge_model": settings.judge_model,
        "judge_facts": str(data.path / FACTS),
        "judge_key_file": str(data.path / JUDGE),
        "stop_s": STOP_S,
    }


class EmbeddedWorker(Server):
    """The worker as a child of the gateway: restarted when it ends, stopped with it. Nobody waits for its start."""

    fix = "`baton worker` shows it alone"

    def __init__(self, data_dir: Path, told: Path) -> None:
        super().__init__("worker", data_dir, stop_s=STOP_S + 10)
        self._told = told

    async def command(self) -> list[str]:
        """The same interpreter; training has its own."""
        return [sys.executable, *COMMAND, str(self._told)]

    async def probe(self) -> bool:
        """It serves nothing, so it is ready when it runs."""
        return True
