"""`baton backup` and `baton restore`: an installation as one file, and back.

The file is a tar of the database's dump, the journal, policies, jobs, the pepper, the keys and the pool file, with a
manifest that names each by its SHA-256. The journal is copied before the dump: what leaves it in between is in the
dump, and what is in both counts once. Weights are copied after it, so that no version of the dump lacks its own.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from gateway.adapters.host.servers import EmbeddedPostgres, postgres_programs
from gateway.adapters.postgres.upkeep.dump import dump, is_used, ledger_sums, load
from gateway.cli.process.datadir import FACTS, DataDir
from gateway.cli.process.processes import PROCESSES
from gateway.cli.process.worker import WORKER
from gateway.config import settings as config
from gateway.config.settings import Settings
from gateway.errors import ConfigError, Conflict, Unavailable

MANIFEST, DUMP = "manifest.json", "postgres.dump"
JOURNAL, POLICIES, DATA, POOL = "journal", "policies", "data", "pool.yaml"
LEFT_OUT = frozenset(  # of the data directory: made anew at each start, or copied by itself
    {"postgres", "postgres.new", "run", "lock", "logs", "bases", "spool", "policies", PROCESSES, FACTS, WORKER}
)
FORMAT = 1
CHUNK_BYTES = 1 << 20
NAME_CHARS_MAX = 100


def run_backup(options: argparse.Namespace) -> int:
    """Write the file; it is complete or it is not there. Raises Conflict where it exists, Unavailable."""
    settings = config.load(data_dir=options.data_dir)
    target: Path = options.file
    if target.exists():
        raise Conflict(f"{target} exists; name another file")
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".baton-backup-") as place:
        root = Path(place) / "backup"
        root.mkdir(mode=0o700)
        facts = _collect(settings, root)
        archive = Path(place) / "archive"
        with os.fdopen(os.open(archive, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                tar.add(root, arcname=".")
            os.fsync(file.fileno())
        archive.rename(target)
    facts |= {"file": str(target), "bytes": target.stat().st_size}
    print(json.dumps(facts) if options.json else _line("backed up", facts))
    return 0


def run_restore(options: argparse.Namespace) -> int:
    """Lay an installation back. Raises Conflict where the data directory or the database is not empty, ConfigError for
    a file that is no whole backup, Unavailable; then the data directory is empty, so that the next try begins anew."""
    settings = config.load(data_dir=options.data_dir)
    _refuse_used(settings)
    with tempfile.TemporaryDirectory(prefix=".baton-restore-") as place:
        root = Path(place)
        try:
            with tarfile.open(options.file) as tar:
                _unpack(tar, root)
        except (OSError, tarfile.TarError) as error:
            raise ConfigError(f"{options.file}: no backup: {error}") from None
        manifest = _checked(root)
        data = DataDir(settings.data_dir)
        with _database(settings, data, new=True) as url:
            load(url, root / DUMP, postgres_programs)
            ledger, expected = ledger_sums(url), manifest["ledger"]
            if ledger != expected:
                raise Unavailable(
                    f"the ledger is {ledger}, the backup's was {expected}: restore it into an empty database"
                )
            _lay_out(settings, data, root)
    print(json.dumps(manifest["ledger"]) if options.json else _line("restored", {**manifest, "file": options.file}))
    return 0


def _line(title: str, facts: Mapping[str, Any]) -> str:
    ledger = facts["ledger"]
    money = f"{ledger['rows']} ledger rows, {ledger['charged_nano']} nano-dollars charged"
    return f"{title} {facts['file']}: version {facts['version']}, {money}"


# ---------------------------------------------------------------- what is in it


def _collect(settings: Settings, root: Path) -> dict[str, Any]:
    """Copy everything below `root`; return the manifest without the files."""
    data = DataDir(settings.data_dir)
    policies = settings.policies_path or data.path / "policies"
    with _database(settings, data) as url:
        _copy(settings.spool_path, root / JOURNAL)
        ledger = dump(url, root / DUMP, postgres_programs)
    _copy(policies, root / POLICIES)
    for path in sorted(data.path.iterdir()):
        if path.name not in LEFT_OUT:
            _copy(path, root / DATA / path.name)
    if settings.pool:
        _copy(settings.pool, root / POOL)
    facts = {"format": FORMAT, "version": version("baton"), "at": datetime.now(UTC).isoformat(), "ledger": ledger}
    files = {str(path.relative_to(root)): _digest(path) for path in sorted(root.rglob("*")) if path.is_file()}
    (root / MANIFEST).write_text(json.dumps({**facts, "files": files}, indent=2))
    return facts


def _copy(source: Path, target: Path) -> None:
    """A file or a directory, if it is there. A file that vanishes meanwhile (the shipper deletes what is stored) is
    left out."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(source.iterdir()):
            _copy(path, target / path.name)
    elif source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copy2(source, target)
        except FileNotFoundError:
            target.unlink(missing_ok=True)


def _unpack(tar: tarfile.TarFile, root: Path) -> None:
    """Unpack a backup below `root`: plain files and directories, each for this user alone. Raises ConfigError for
    anything else, and for a name that leads out. `extractall` has its filters from Python 3.11.4 on only."""
    for member in tar:
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts or not (member.isfile() or member.isdir()):
            raise ConfigError(f"no backup: it holds {member.name[:NAME_CHARS_MAX]!a}, which no backup writes")
        target = root / name
        (target if member.isdir() else target.parent).mkdir(mode=0o700, parents=True, exist_ok=True)
        content = tar.extractfile(member)
        if content is not None:
            with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                shutil.copyfileobj(content, file, CHUNK_BYTES)
            target.chmod(member.mode & 0o700)


def _digest(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            sha.update(chunk)
    return sha.hexdigest()


def _checked(root: Path) -> dict[str, Any]:
    """The manifest of an unpacked backup. Raises ConfigError where a file is missing or differs."""
    try:
        manifest: dict[str, Any] = json.loads((root / MANIFEST).read_text())
        files = manifest["files"]
    except (OSError, ValueError, KeyError):
        raise ConfigError("no backup: it has no manifest") from None
    if manifest["format"] != FORMAT:
        raise ConfigError(f"a backup of format {manifest['format']}; this version reads {FORMAT}")
    for name, digest in files.items():
        if not (root / name).is_file() or _digest(root / name) != digest:
            raise ConfigError(f"the backup is damaged: {name}; take another one")
    return manifest


def _refuse_used(settings: Settings) -> None:
    """Raises Conflict where a restore would overwrite something."""
    if settings.data_dir.exists() and any(settings.data_dir.iterdir()):
        raise Conflict(f"{settings.data_dir} is not empty; move it away, or name another --data-dir")
    if settings.database_url and is_used(settings.database_url):
        raise Conflict("DATABASE_URL names a database with tables of Baton; name an empty one")


def _lay_out(settings: Settings, data: DataDir, root: Path) -> None:
    """Put journal, policies and files in their places. The pool file goes beside the data."""
    _copy(root / JOURNAL, settings.spool_path)
    _copy(root / POLICIES, settings.policies_path or data.path / "policies")
    _copy(root / DATA, data.path)
    _copy(root / POOL, data.path / POOL)


# ---------------------------------------------------------------- PostgreSQL


@contextmanager
def _database(settings: Settings, data: DataDir, *, new: bool = False) -> Iterator[str]:
    """The database's URL: DATABASE_URL, that of the gateway that serves, or the embedded server, started for the time.
    `new`: it may be made, and an error empties the data directory. Raises ConfigError where there is none."""
    served = (data.read(FACTS) or {}).get("database_url")
    with ExitStack() as stack:
        if new:
            stack.enter_context(data.locked())
            stack.enter_context(_emptied_after_error(data))
        if settings.database_url:
            yield settings.database_url
            return
        try:
            stack.enter_context(nullcontext() if new else data.locked())
        except Conflict:
            if not served:
                raise
            yield str(served)
            return
        if not new and not (data.path / "postgres").exists():
            raise ConfigError(f"{data.path} has no database; set DATABASE_URL, or name another --data-dir")
        runner = stack.enter_context(asyncio.Runner())
        server = EmbeddedPostgres(data.path)
        runner.run(server.start())
        stack.callback(lambda: runner.run(server.stop()))
        yield server.url


@contextmanager
def _emptied_after_error(data: DataDir) -> Iterator[None]:
    """Delete what a restore that failed has left in a data directory, which was empty before it."""
    try:
        yield
    except BaseException:  # boundary: raised again
        for path in data.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise
