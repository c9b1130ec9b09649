"""A sealed policy directory, read once: its manifest, and every listed file, checked against its sha256.

Callers pass the value on and read nothing again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.core.policies.manifest import (
    FIX,
    MANIFEST_FILE,
    NEEDED,
    Manifest,
    check_complete,
    manifest_of,
)
from gateway.errors import VersionRefused

JSON_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class SealedPolicy:
    """A policy directory whose files match its manifest. `document`: the manifest as it is written."""

    directory: Path
    manifest: Manifest
    document: Mapping[str, Any]

    @property
    def files(self) -> Path:
        """The directory of the files: that of the manifest, or a base's source."""
        return Path(self.manifest.source or self.directory)


def read_policy(
    directory: Path, needed: Mapping[str, tuple[str, ...]] = NEEDED, *, complete: bool = False
) -> SealedPolicy:
    """Read the manifest and hash every file. `needed`: the files that the manifest must list, by its kind; `complete`:
    it must have every field and no other. Raises VersionRefused(missing | manifest | checksum). Blocks: it reads every
    byte."""
    document = read_document(directory)
    place = directory / MANIFEST_FILE
    if complete:
        check_complete(document, place)
    manifest = manifest_of(document)
    if manifest.kind not in needed:
        raise VersionRefused("manifest", f"{place}: of kind {manifest.kind!r}, not {' or '.join(needed)}; {FIX}")
    if unlisted := [name for name in needed[manifest.kind] if name not in manifest.sha256]:
        raise VersionRefused("manifest", f"{place}: it lists no sha256 of {', '.join(unlisted)}; {FIX}")
    if manifest.source and (manifest.kind != "base" or not Path(manifest.source).is_absolute()):
        raise VersionRefused("manifest", f"{place}: `source` is the absolute directory of a base's files; {FIX}")
    policy = SealedPolicy(directory, manifest, document)
    _check_files(policy.files, manifest)
    return policy


def read_document(directory: Path) -> dict[str, Any]:
    """Read only the manifest of a policy directory, as it is written. Raises VersionRefused."""
    if not directory.is_dir():
        raise VersionRefused("missing", f"{directory / MANIFEST_FILE}: there is no such directory; give another one")
    return read_object(directory / MANIFEST_FILE)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises VersionRefused(missing | manifest)."""
    try:
        if not path.is_file() and path.exists():
            raise ValueError("no file")  # a pipe would be waited for
        if path.stat().st_size > JSON_BYTES_MAX:
            raise ValueError(f"longer than {JSON_BYTES_MAX} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise VersionRefused("missing", f"{path}: there is no such file; give a policy directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise VersionRefused("manifest", f"{path}: not readable as JSON ({error}); {FIX}") from None
    if not isinstance(value, dict):
        raise VersionRefused("manifest", f"{path}: not a JSON object; {FIX}")
    return value


def file_sha256(path: Path) -> str:
    """The hex digest of a file, which is read in blocks. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_files(directory: Path, manifest: Manifest) -> None:
    unlisted = {path.name for path in directory.glob("*.safetensors")} - set(manifest.sha256)
    if unlisted:  # an engine loads every such file it finds
        place = directory / MANIFEST_FILE
        raise VersionRefused("manifest", f"{place}: {sorted(unlisted)} beside it and not listed; remove them")
    for name, expected in sorted(manifest.sha256.items()):
        path = directory / name
        if Path(name).name != name or not path.is_file():
            raise VersionRefused("missing", f"{path}: named in the manifest and not there; publish the version again")
        if file_sha256(path) != expected:
            raise VersionRefused("checksum", f"{path}: does not match its sha256; publish the version again")
