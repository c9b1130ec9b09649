"""Files and policy directories by URL: `file:///…`, `s3://bucket/key`, and whatever else fsspec has a package for.

A policy directory counts once its `manifest.json` is there, which is written last, and its files count if they have the
manifest's digests. So neither a cut upload nor a torn file is ever loaded. Every call blocks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from gateway.core.policies.manifest import MANIFEST_FILE
from gateway.errors import Conflict, NotFound, Unavailable, VersionRefused
from gateway.files import replacing

URL = re.compile(r"^(?P<scheme>[a-z][a-z0-9+]{1,15}):/{1,3}(?P<rest>.+)$")
BLOCK_BYTES = 8 << 20
TEXT_BYTES_MAX = 16 << 20  # of a manifest, or of a list of files
INSTALL = "run `pip install '.[urls]'`"
FULL = (errno.ENOSPC, errno.EDQUOT)


def as_url(place: object) -> str | None:
    """The URL that a text or a path is; None for a plain path. One that went through pathlib has lost a slash, which it
    gets back."""
    match = URL.match(str(place))
    if match is None:
        return None
    slashes = "///" if match["scheme"] == "file" else "//"
    return f"{match['scheme']}:{slashes}{match['rest']}"


def below(url: str, name: str) -> str:
    """The URL of `name` in the directory `url`."""
    return f"{url.rstrip('/')}/{name}"


def exists(url: str) -> bool:
    """Whether a file is there. Raises Unavailable."""
    system, path = _opened(url)
    with _named(url, "read"):
        return bool(system.exists(path))


def fetch(url: str, path: Path, sha256: str = "") -> None:
    """Replace the file `path` by that at `url`; with `sha256`, only if it has that digest. Raises NotFound,
    Unavailable, VersionRefused(checksum); `path` is then as it was."""
    system, remote = _opened(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _named(url, "fetched"), system.open(remote, "rb") as source, replacing(path) as sink:
        if _copy(source, sink) != sha256 and sha256:
            raise VersionRefused("checksum", f"{url}: does not match its sha256; upload it again")


def send(path: Path, url: str) -> str:
    """Write a file to `url`; return its digest. A reader may see a part of it until this returns: what names it comes
    after, by `send_text`. Raises NotFound for a lost file, Unavailable."""
    system, remote = _opened(url)
    with _named(url, "written"), path.open("rb") as source, system.open(remote, "wb") as sink:
        return _copy(source, sink)


def send_text(text: str, url: str) -> None:
    """Replace a small file by a text in one step: it is written under another name and moved. Raises Unavailable."""
    system, remote = _opened(url)
    aside = f"{remote}.{secrets.token_hex(4)}.part"
    with _named(url, "written"):
        try:
            system.pipe_file(aside, text.encode())
            system.mv(aside, remote)
        except BaseException:  # boundary: half a file is deleted, the error goes on
            with suppress(Exception):
                system.rm_file(aside)
            raise


def read_text(url: str) -> str:
    """A small file. Raises NotFound, Unavailable."""
    system, remote = _opened(url)
    with _named(url, "read"), system.open(remote, "rb") as file:
        return str(file.read(TEXT_BYTES_MAX).decode(errors="replace"))


def remove(url: str) -> None:
    """Delete a file, as far as that is possible."""
    system, remote = _opened(url)
    with suppress(OSError):
        system.rm_file(remote)


# ---------------------------------------------------------------- policy directories


def send_policy(directory: Path, url: str) -> None:
    """Upload a policy directory, a base with the files at its source. The same version again is no upload. Raises
    Conflict where another version is there, Unavailable; then nothing is there that loads."""
    document = _document(directory)
    home, place = Path(document.get("source") or directory), below(url, MANIFEST_FILE)
    manifest = _manifest(place) if exists(place) else None
    if manifest is not None:
        if manifest.get("sha256") != document.get("sha256"):
            raise Conflict(
                f"{url}: another version is there ({manifest.get('name')}@{manifest.get('version')}); name a new URL"
            )
        return
    for name in document["sha256"]:
        send(home / name, below(url, name))
    send_text(json.dumps({**document, "source": ""}, indent=2, sort_keys=True) + "\n", place)


def fetch_policy(url: str, directory: Path) -> Path:
    """Bring a policy directory here, and beside it the base of an adapter where `url` has that beside it. One that is
    here already is left alone. Raises NotFound, Unavailable, VersionRefused; then `directory` is not made."""
    if not (directory / MANIFEST_FILE).is_file():
        document = _manifest(below(url, MANIFEST_FILE))
        part = directory.with_name(f".{directory.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        try:
            for name, digest in _listed(document, url).items():
                fetch(below(url, name), part / name, digest)
            (part / MANIFEST_FILE).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
            part.rename(directory)
        except OSError as error:
            raise Unavailable(f"{directory}: cannot be written ({error.strerror}); make room and try again") from None
        finally:
            shutil.rmtree(part, ignore_errors=True)
    base = str(_document(directory).get("base") or "")
    beside = below(url.rstrip("/").rpartition("/")[0], base)
    if (
        base
        and Path(base).name == base
        and not (directory.parent / base).exists()
        and exists(below(beside, MANIFEST_FILE))
    ):
        fetch_policy(beside, directory.parent / base)
    return directory


def _manifest(url: str) -> dict[str, Any]:
    return _object(read_text(url), url)


def _document(directory: Path) -> dict[str, Any]:
    place = directory / MANIFEST_FILE
    try:
        return _object(place.read_text(encoding="utf-8"), place)
    except (OSError, UnicodeError):
        raise VersionRefused("missing", f"{place}: cannot be read; give a policy directory") from None


def _object(text: str, place: object) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise VersionRefused("manifest", f"{place}: not a JSON object; upload the policy directory again")
    return value


def _listed(document: Mapping[str, Any], url: str) -> Mapping[str, str]:
    digest = document.get("sha256")
    if not isinstance(digest, dict) or any(Path(name).name != name for name in digest):
        raise VersionRefused("manifest", f"{url}: its manifest lists no files, or files elsewhere; upload it again")
    return digest


# ---------------------------------------------------------------- fsspec


def _opened(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it. S3 is pyarrow's, which is in the `train` extra anyway; credentials,
    region and endpoint are those of the AWS_… variables. Raises Unavailable."""
    try:
        if url.startswith("s3://"):
            from fsspec.implementations.arrow import ArrowFSWrapper
            from pyarrow.fs import FileSystem

            system, path = FileSystem.from_uri(url)
            return ArrowFSWrapper(system, skip_instance_cache=True), str(path)
        from fsspec.core import url_to_fs

        filesystem, path = url_to_fs(url, **({"auto_mkdir": True} if url.startswith("file:") else {}))
        return filesystem, str(path)
    except ImportError as error:
        raise Unavailable(f"{url}: needs the Python package {error.name or error}; {INSTALL}") from None
    except (ValueError, OSError) as error:
        raise Unavailable(f"{url}: {_reason(error)}; give file:///PATH, s3://BUCKET/KEY or a path") from None


@contextmanager
def _named(url: str, verb: str) -> Iterator[None]:
    """Errors of a file system as ours, with the URL and a fix."""
    try:
        yield
    except FileNotFoundError as error:
        lost = error.filename if isinstance(error.filename, str) and Path(error.filename).is_absolute() else url
        raise NotFound(f"{lost}: there is no such file; check the name") from None
    except PermissionError as error:
        raise Unavailable(f"{url}: may not be {verb} ({_reason(error)}); check the credentials") from None
    except OSError as error:
        fix = "make room and try again" if error.errno in FULL else "check the network, the URL and AWS_ENDPOINT_URL"
        raise Unavailable(f"{url}: cannot be {verb} ({_reason(error)}); {fix}") from None


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0] if text else type(error).__name__


def _copy(source: BinaryIO, sink: BinaryIO) -> str:
    """Copy in blocks; return the hex digest of what was copied."""
    digest = hashlib.sha256()
    while block := source.read(BLOCK_BYTES):
        digest.update(block)
        sink.write(block)
    return digest.hexdigest()
