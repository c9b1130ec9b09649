"""The policies directory: NAME@N, one directory a version, complete and never changed.

A directory is copied next to its place, checked there (so that the checked bytes are those that will be served), and
gets its name by one rename. Every call blocks.
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

from gateway.adapters.engines.files import check, write_null_adapter
from gateway.adapters.engines.sealed import read_document
from gateway.core.policies.manifest import MANIFEST_FILE
from gateway.errors import Unavailable, VersionRefused
from gateway.files import sync_directory, write_atomic

INCOMING = ".incoming-"
LISTED_MAX = 256  # files of one version
SAFE_MODE = 0o700


@dataclass(frozen=True, slots=True)
class Incoming:
    """A checked copy in the policies directory that has no name yet."""

    place: Path
    manifest: Mapping[str, Any]


def take_in(source: Path, policies: Path) -> Incoming:
    """Make a durable, checked copy of a policy directory: the files that its manifest lists, and the manifest. The
    files of a base stay where they lie: its manifest names that directory. Raises VersionRefused if no engine may load
    it, Unavailable if the disk cannot take it; then nothing is left of the copy."""
    manifest = read_document(source)
    is_base = manifest.get("kind") == "base"
    if is_base:
        manifest["source"] = manifest.get("source") or str(source.resolve())
    listed = manifest.get("sha256")
    if not isinstance(listed, dict) or not 0 < len(listed) <= LISTED_MAX:
        raise VersionRefused("manifest", f"{source}: its manifest lists no files; train or export this version again")
    try:
        policies.mkdir(mode=SAFE_MODE, parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=INCOMING, dir=policies))
    except OSError as error:
        raise _disk(error, policies) from None
    try:
        for name in sorted(() if is_base else listed):
            if Path(str(name)).name != name:
                raise VersionRefused("manifest", f"{source}: its manifest names `{name}`, which is not a file in it")
            _copy(source / name, place / name)
        write_manifest(place, manifest)
        files = check(place)
        if is_base:
            write_null_adapter(files, place)
        return Incoming(place, files.sealed.document)
    except OSError as error:
        discard(place)
        raise _disk(error, policies) from None
    except VersionRefused as refused:  # name the offered directory, not the copy
        discard(place)
        raise VersionRefused(refused.reason, refused.message.replace(str(place), str(source))) from None
    except BaseException:  # boundary: half a copy is deleted, the error goes on
        discard(place)
        raise


def write_manifest(place: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of an incoming copy; it is on disk when this returns."""
    write_atomic(place / MANIFEST_FILE, json.dumps(dict(manifest), indent=2, sort_keys=True))


def settle(incoming: Path, target: Path) -> None:
    """Give an incoming copy its name. A directory of that name is left over from a publication that never ended, and is
    deleted. Raises Unavailable."""
    try:
        if target.exists():
            discard(target)
        incoming.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        raise _disk(error, target.parent) from None


def discard(place: Path) -> None:
    """Delete a directory, as far as that is possible."""
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
