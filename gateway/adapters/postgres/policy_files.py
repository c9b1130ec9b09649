"""The policies directory: NAME@N, one directory a version, each whole or not there, never changed.

A directory is copied beside its place, checked there (the bytes that will be served, not those that were offered),
and takes its name by one rename. Everything blocks.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.adapters.engines.files import check
from gateway.adapters.engines.sealed import read_document
from gateway.core.policies.manifest import MANIFEST_FILE
from gateway.errors import Unavailable, VersionRefused
from gateway.files import sync_directory, write_atomic

INCOMING = ".incoming-"
LISTED_MAX = 256  # files of one version
SAFE_MODE = 0o700


@dataclass(frozen=True, slots=True)
class Incoming:
    """A checked copy on the disk of the policies directory that has no name yet."""

    place: Path
    manifest: Mapping[str, Any]


def take_in(source: Path, policies: Path) -> Incoming:
    """A durable, checked copy of a policy directory: what its manifest lists, and the manifest. Raises VersionRefused
    for what no engine may be shown, Unavailable when the disk can't take it; then nothing is left of it."""
    manifest = read_document(source)
    listed = manifest.get("sha256")
    if not isinstance(listed, dict) or not 0 < len(listed) <= LISTED_MAX:
        raise VersionRefused("manifest", f"{source}: its manifest lists no files; train or export this version again")
    try:
        policies.mkdir(mode=SAFE_MODE, parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=INCOMING, dir=policies))
    except OSError as error:
        raise _disk(error, policies) from None
    try:
        for name in sorted(listed):
            if Path(str(name)).name != name:
                raise VersionRefused("manifest", f"{source}: its manifest names `{name}`, which is no file of its own")
            _copy(source / name, place / name)
        write_manifest(place, manifest)
        return Incoming(place, check(place).sealed.document)
    except OSError as error:
        discard(place)
        raise _disk(error, policies) from None
    except VersionRefused as refused:  # said of what was offered, not of the copy
        discard(place)
        raise VersionRefused(refused.reason, refused.message.replace(str(place), str(source))) from None
    except BaseException:  # boundary: half a copy is removed, and the error goes on
        discard(place)
        raise


def write_manifest(place: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of an incoming copy; it is on disk when this returns."""
    write_atomic(place / MANIFEST_FILE, json.dumps(dict(manifest), indent=2, sort_keys=True))


def settle(incoming: Path, target: Path) -> None:
    """Give an incoming copy its name. What lies there without being registered is left over from a publication that
    never ended, and goes. Raises Unavailable."""
    try:
        if target.exists():
            discard(target)
        incoming.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        raise _disk(error, target.parent) from None


def discard(place: Path) -> None:
    """Remove a directory; what cannot be removed is left."""
    shutil.rmtree(place, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    try:
        reading = source.open("rb")
    except FileNotFoundError:
        fix = "publish a whole directory"
        raise VersionRefused("missing", f"{source}: named in the manifest and not there; {fix}") from None
    with reading, target.open("wb") as writing:
        shutil.copyfileobj(reading, writing, 1 << 20)
        writing.flush()
        os.fsync(writing.fileno())


def _disk(error: OSError, policies: Path) -> Unavailable:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "make room and publish again" if full else "check the policies directory and publish again"
    return Unavailable(f"{policies}: {error.strerror or error}; nothing was published; {fix}", code="disk")
