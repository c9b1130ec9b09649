"""`baton worker`: carry out jobs and grade replies. `baton serve` starts one worker; this command runs another.

A worker uses the database of the gateway on the data directory, or DATABASE_URL. Several may run: one job has one
worker at a time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from gateway.adapters.host import yamlfile
from gateway.adapters.host.supervisor import Server
from gateway.cli.process.datadir import FACTS, JUDGE, DataDir
from gateway.cli.process.services import conductor_offered, database_of, require_policy
from gateway.config import settings as config
from gateway.config.settings import Settings
from gateway.errors import ConfigError

WORKER = "worker.json"  # its settings; they may hold the password of the database
STOP_S = 60.0  # for a checkpoint
COMMAND = ("-m", "policy", "jobs", "work", "--settings")


def run(options: argparse.Namespace) -> int:
    """Become the worker, with its signals and exit status. Raises ConfigError without a database."""
    settings = config.load(data_dir=options.data_dir)
    data = DataDir(settings.data_dir)
    url = database_of(settings, data)
    require_policy("run the worker")
    path = write_settings(settings, data, url)
    os.execv(sys.executable, [sys.executable, *COMMAND, str(path)])  # noqa: S606 - our own program


def write_settings(settings: Settings, data: DataDir, database_url: str) -> Path:
    """Write the settings of a worker to a file that only this user can read; return its path. Raises ConfigError."""
    data.write(WORKER, worker_settings(settings, data, database_url))
    return data.path / WORKER


def worker_settings(settings: Settings, data: DataDir, database_url: str) -> dict[str, Any]:
    """The fields of `policy.jobs.worker.WorkerSettings`. Raises ConfigError for arguments that cannot be split."""
    try:
        retrain = shlex.split(settings.retrain_arguments)
    except ValueError as error:
        raise ConfigError(f"BATON_RETRAIN_ARGUMENTS: {error}; write them as on a command line") from None
    ours = settings.conductor_kind in ("embedded", "directory")
    return {
        "database_url": database_url,
        "data_dir": str(data.path),
        "policies": str((settings.policies_path or data.path / "policies").resolve()),
        "shipped": str(conductor_offered(settings)[0]) if ours else None,
        "python": str(settings.train_python.absolute()) if settings.train_python else sys.executable,
        "retrain_outcomes_min": settings.retrain_outcomes_min,
        "retrain_every_s": settings.retrain_every_s,
        "retrain_arguments": retrain,
        "retrain_auto": settings.retrain_auto,
        "gate_usd_max": settings.gate_usd_max,
        "facts": str(data.path / FACTS),
        "judge": _judge(settings, data),
        "stop_s": STOP_S,
        "jobs_url": settings.jobs_url,
        "policies_url": settings.policies_url,
        "policies_stored_bytes_max": settings.policies_stored_bytes_max,
    }


def _judge(settings: Settings, data: DataDir) -> dict[str, Any] | None:
    """The fields of `policy.jobs.judging.JudgeSettings`; None where nobody judges. Raises ConfigError for rubrics that
    cannot be used."""
    if settings.judge_worker is None:
        return None
    places = {"facts": str(data.path / FACTS), "key_file": str(data.path / JUDGE)}
    rubrics = {} if settings.judge_rubrics is None else _rubrics(settings.judge_rubrics)
    return {"worker": settings.judge_worker, "share": settings.judge_share, "rubrics": rubrics, **places}


def _rubrics(path: Path) -> dict[str, str]:
    document = yamlfile.read(path)
    if not isinstance(document.data, dict):
        raise document.error((), "write one line for each task type: `invoices: what a good reply has`")
    for kind, text in document.data.items():
        if not isinstance(kind, str) or not isinstance(text, str) or not text.strip():
            raise document.error((kind,), "a rubric is a text under the type of its tasks")
    return document.data


class EmbeddedWorker(Server):
    """The worker as a child of the gateway: restarted when it ends, stopped with the gateway. The gateway serves before
    it has started."""

    fix = "`baton worker` shows it alone"

    def __init__(self, data_dir: Path, settings: Path) -> None:
        super().__init__("worker", data_dir, stop_s=STOP_S + 10)
        self._settings = settings

    async def command(self) -> list[str]:
        """The gateway's own interpreter; training may have another."""
        return [sys.executable, *COMMAND, str(self._settings)]

    async def probe(self) -> bool:
        """A worker that runs is ready: it serves nothing."""
        return True
