"""The policies directory: NAME@N, one directory a version, complete and never changed; and the shelf in PostgreSQL from
which other hosts fetch it.

A directory is copied next to its place, checked there (so that the checked bytes are those that will be served), and
gets its name by one rename. These calls block. On the shelf a file lies under its sha256, in pieces of PIECE_BYTES; its
row in `policy_blobs` is written last, and only while all its pieces are there, so a file that has a row is complete.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import delete, func, literal_column, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.engines.files import check, write_null_adapter
from gateway.adapters.engines.sealed import read_document
from gateway.adapters.postgres.admin_tables import policy_blobs, policy_gateways, policy_pieces
from gateway.adapters.postgres.database import transaction
from gateway.core.policies.manifest import MANIFEST_FILE
from gateway.core.policies.versions import Holder
from gateway.errors import Unavailable, VersionRefused
from gateway.files import NotPlain, open_plain, sync_directory, write_atomic

INCOMING = ".incoming-"
LISTED_MAX = 256  # files of one version
SAFE_MODE = 0o700
PIECE_BYTES = 1 << 20
STORED_BYTES_MAX = 1 << 30  # of one version on the shelf
LOCK_CLASS = 0x73686C66  # "shlf": a class of advisory locks of our own, by digest
FORGOTTEN = timedelta(days=1)
KEPT_DAYS = 7  # of files on the shelf that no version needs any more


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
        reading = open_plain(source)
    except NotPlain as wrong:
        raise VersionRefused("manifest", f"{wrong}; publish a directory of plain files") from None
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


# ---------------------------------------------------------------- the shelf


class PolicyShelf:
    """Files of versions in PostgreSQL. `bytes_max`: of all files of one version. Every call raises Unavailable when
    PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine, bytes_max: int = STORED_BYTES_MAX) -> None:
        self._engine = engine
        self._bytes_max = bytes_max
        self._unfinished: dict[str, tuple[int, int]] = {}  # uploads without a row as the last sweep saw them

    async def lacks(self, digests: Collection[str]) -> set[str]:
        """Return those of the digests whose files are not on the shelf."""
        query = select(policy_blobs.c.sha256).where(policy_blobs.c.sha256.in_(digests))
        async with transaction(self._engine) as connection:
            return set(digests) - set(await connection.scalars(query))

    async def store(self, home: Path, sha256: Mapping[str, str]) -> bool:
        """Put the files of a version on the shelf: `sha256` maps their names in `home` to their digests. Return False,
        and store nothing, where they are more than `bytes_max` or one is missing. Raises VersionRefused(checksum) for
        a file that is not what its digest says, Unavailable where a sweep took the upload for one that was broken
        off."""
        missing = await self.lacks(set(sha256.values()))
        if not missing:
            return True
        try:
            sizes = await asyncio.to_thread(lambda: [(home / name).stat().st_size for name in sha256])
        except OSError:
            return False
        if sum(sizes) > self._bytes_max:
            return False
        for name, digest in sha256.items():
            if digest in missing:
                await self._store(home / name, digest)
        return True

    async def _store(self, path: Path, digest: str) -> None:
        piece = policy_pieces.c
        hasher, n, size = hashlib.sha256(), 0, 0
        with await asyncio.to_thread(path.open, "rb") as file:
            while data := await asyncio.to_thread(file.read, PIECE_BYTES):
                hasher.update(data)
                put = insert(policy_pieces).values(sha256=digest, n=n, data=data)
                async with transaction(self._engine) as connection:  # one a piece: a long one would hold back VACUUM
                    await connection.execute(
                        put.on_conflict_do_update(index_elements=[piece.sha256, piece.n], set_={"data": data})
                    )
                n, size = n + 1, size + len(data)
        if hasher.hexdigest() != digest:
            async with transaction(self._engine) as connection:
                await connection.execute(delete(policy_pieces).where(piece.sha256 == digest))
            raise VersionRefused("checksum", f"{path}: does not match its sha256; publish a whole directory")
        async with transaction(self._engine) as connection:
            await _lock(connection, digest)
            count = select(func.count()).select_from(policy_pieces).where(piece.sha256 == digest)
            if await connection.scalar(count) != n:
                problem = f"{path.name}: its upload took too long; it is uploaded again"
                raise Unavailable(problem, code="store_unavailable")
            row = insert(policy_blobs).values(sha256=digest, size_bytes=size, created_at=func.now())
            await connection.execute(row.on_conflict_do_nothing())

    async def fetch(self, manifest: Mapping[str, Any], directory: Path) -> bool:
        """Make the directory of a version from its manifest and the shelf; every byte is checked before it has its
        name. Return False where the shelf lacks a file. Raises VersionRefused(missing) for a stored file that is torn,
        Unavailable where the disk cannot take it; then nothing is left of it."""
        listed = {str(name): str(digest) for name, digest in dict(manifest.get("sha256") or {}).items()}
        if not listed or len(listed) > LISTED_MAX or any(Path(name).name != name for name in listed):
            raise VersionRefused("missing", f"{directory}: its manifest lists no files, or files elsewhere")
        document = dict(manifest)
        if document.get("kind") == "base" and await asyncio.to_thread(_all_lie, document.get("source"), listed):
            listed = {}
        elif await self.lacks(set(listed.values())):
            return False
        elif "source" in document:
            document["source"] = ""
        try:
            directory.parent.mkdir(mode=SAFE_MODE, parents=True, exist_ok=True)
            place = Path(tempfile.mkdtemp(prefix=INCOMING, dir=directory.parent))
            try:
                for name, digest in listed.items():
                    await self._fetch(digest, place / name)
                await asyncio.to_thread(_seal, place, document, directory)
            finally:
                await asyncio.to_thread(discard, place)
        except OSError as error:
            raise Unavailable(f"{directory}: {error.strerror or error}; make room on this host", code="disk") from None
        return True

    async def _fetch(self, digest: str, path: Path) -> None:
        hasher, n = hashlib.sha256(), 0
        with await asyncio.to_thread(path.open, "wb") as file:
            while True:
                query = select(policy_pieces.c.data).where(policy_pieces.c.sha256 == digest, policy_pieces.c.n == n)
                async with transaction(self._engine) as connection:
                    data = await connection.scalar(query)
                if data is None:
                    break
                hasher.update(data)
                await asyncio.to_thread(file.write, data)
                n += 1
            await asyncio.to_thread(_sync, file)
        if hasher.hexdigest() != digest:
            raise VersionRefused("missing", f"{path.name}: the copy in PostgreSQL does not match its sha256")

    async def sweep(self, needed: Collection[str], limit: int) -> int:
        """Delete files that are KEPT_DAYS old and not among the `needed` digests, and uploads that have not gone on
        since the last sweep; return their number, at most `limit` of each."""
        blob = policy_blobs.c
        old = blob.created_at < func.now() - timedelta(days=KEPT_DAYS)
        async with transaction(self._engine) as connection:
            lost = list(
                await connection.scalars(select(blob.sha256).where(old, blob.sha256.not_in(needed)).limit(limit))
            )
            for table in (policy_blobs, policy_pieces):  # the row first: a file without one does not exist
                await connection.execute(delete(table).where(table.c.sha256.in_(lost)))
        return len(lost) + await self._sweep_unfinished(limit)

    async def _sweep_unfinished(self, limit: int) -> int:
        """Delete pieces of files that have no row, unless one was written since the last sweep; return the number of
        files. An upload that was only slow finds at its end that pieces are missing."""
        piece, whole = policy_pieces.c, select(policy_blobs.c.sha256)
        latest: Any = func.max(literal_column("xmin::text::bigint"))  # of the transactions that wrote its pieces
        query = select(piece.sha256, func.count(), latest).where(piece.sha256.not_in(whole)).group_by(piece.sha256)
        async with transaction(self._engine) as connection:
            now = {digest: (n, written) for digest, n, written in await connection.execute(query)}
        before, self._unfinished = self._unfinished, now
        broken = [digest for digest, state in self._unfinished.items() if before.get(digest) == state][:limit]
        for digest in broken:
            async with transaction(self._engine) as connection:
                await _lock(connection, digest)
                gone = delete(policy_pieces).where(piece.sha256 == digest, piece.sha256.not_in(whole))
                await connection.execute(gone)
        return len(broken)


async def _lock(connection: AsyncConnection, digest: str) -> None:
    """Exclude others that end the upload of this file, or delete it, until the transaction ends."""
    await connection.execute(select(func.pg_advisory_xact_lock(LOCK_CLASS, func.hashtext(digest))))


class Holders:
    """The port PolicyGateways. The database's clock decides who was seen when."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def attend(self, gateway: Holder) -> None:
        c = policy_gateways.c
        put = insert(policy_gateways).values(**asdict(gateway) | {"held": dict(gateway.held)}, seen_at=func.now())
        again = put.on_conflict_do_update(
            index_elements=[c.id], set_={"held": put.excluded.held, "seen_at": func.now()}
        )
        async with transaction(self._engine) as connection:
            await connection.execute(again)
            await connection.execute(delete(policy_gateways).where(c.seen_at < func.now() - FORGOTTEN))

    async def attending(self, within_s: float) -> Sequence[Holder]:
        c = policy_gateways.c
        recent = select(c.id, c.host, c.held).where(c.seen_at > func.now() - timedelta(seconds=within_s))
        async with transaction(self._engine) as connection:
            return [Holder(*row) for row in await connection.execute(recent.order_by(c.host, c.id))]

    async def leave(self, gateway: str) -> None:
        async with transaction(self._engine) as connection:
            await connection.execute(delete(policy_gateways).where(policy_gateways.c.id == gateway))


def _all_lie(home: object, names: Collection[str]) -> bool:
    return bool(home) and all((Path(str(home)) / name).is_file() for name in names)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _seal(place: Path, manifest: Mapping[str, Any], directory: Path) -> None:
    """Write the manifest beside fetched files, and give the directory its name unless another process was first."""
    write_manifest(place, manifest)
    if manifest.get("kind") == "base":
        write_null_adapter(check(place), place)
    sync_directory(place)
    if not directory.exists():
        place.rename(directory)
        sync_directory(directory.parent)
