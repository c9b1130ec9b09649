"""The directory of a job, kept at a URL too: what a worker on another machine needs to go on where this one was.

`state.json` lists the files with their digests, and each file lies under its digest in `files/`. The list is written
last, so a reader finds the state before an upload or the state after it, and never a part of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.adapters.engines.sealed import file_sha256
from gateway.adapters.host.urls import below, exists, fetch, read_text, remove, send, send_text
from gateway.errors import BatonError, Conflict, Unavailable
from gateway.files import write_atomic

STATE, FILES = "state.json", "files"
SENT = ".sent.json"  # the list that this machine wrote or fetched last
KEPT = (
    "selected.json", "rows.parquet", "gate.json", "gate.md", "candidate/*", "train/checkpoint", "train/spent_nano",
    "train/metrics.jsonl", "train/start/*",
)  # fmt: skip

DONE = ("selected.json", "gate.json", "manifest.json")  # say that what they belong to is complete


class Mirror:
    """The directory `place` of a job at `url`, for its attempt number `attempt`."""

    def __init__(self, url: str, place: Path, attempt: int) -> None:
        self._url = url
        self._place = place
        self._attempt = attempt
        self._digests: dict[Path, tuple[tuple[int, int, int], str]] = {}

    def restore(self) -> int:
        """Fetch what another worker left there; return the number of files. Where this machine wrote the list itself,
        its own files are as new or newer, and stay. Raises Unavailable, VersionRefused."""
        state = self._state()
        if state is None or state == _object(self._place / SENT):
            return 0
        for name, digest in sorted(state["files"].items(), key=lambda file: file[0].endswith(DONE)):
            fetch(self._at(digest), self._place / name, digest)
        self._note(state)
        return len(state["files"])

    def keep(self) -> bool:
        """Upload what is new, then the list; return whether anything was. Files that the list names no more are
        deleted. Raises Conflict where a later attempt has written there, Unavailable."""
        before = self._state()
        if before is not None and before["attempt"] > self._attempt:
            raise Conflict(f"{self._url}: attempt {before['attempt']} has taken the job over", code="job_overtaken")
        files = dict(before["files"]) if before else {}
        digests = self._found()
        there = set(files.values())
        for name, digest in digests.items():
            if digest not in there and send(self._place / name, self._at(digest)) != digest:
                remove(self._at(digest))
                digests[name] = files.get(name, "")  # it was replaced meanwhile: its next state is for the next time
        entries = {name: digest for name, digest in digests.items() if digest}
        state = {"attempt": self._attempt, "files": entries}
        if state == before:
            return False
        send_text(json.dumps(state, indent=2, sort_keys=True), below(self._url, STATE))
        self._note(state)
        for digest in there - set(entries.values()):
            remove(self._at(digest))
        return True

    def _state(self) -> dict[str, Any] | None:
        place = below(self._url, STATE)
        if not exists(place):
            return None
        try:
            state: Any = json.loads(read_text(place))
            return {"attempt": int(state["attempt"]), "files": {str(k): str(v) for k, v in state["files"].items()}}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Unavailable(f"{place}: cannot be read; delete it to begin the job anew") from None

    def _found(self) -> dict[str, str]:
        """The files to keep, with their digests; one is read again only where it was replaced."""
        digests: dict[str, str] = {}
        for path in sorted(path for pattern in KEPT for path in self._place.glob(pattern) if path.is_file()):
            try:
                stat = path.stat()
                stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                if self._digests.get(path, (None, ""))[0] != stamp:
                    self._digests[path] = (stamp, file_sha256(path))
            except FileNotFoundError:
                continue
            digests[os.fspath(path.relative_to(self._place))] = self._digests[path][1]
        return digests

    def _at(self, digest: str) -> str:
        return below(below(self._url, FILES), digest)

    def _note(self, state: Mapping[str, Any]) -> None:
        write_atomic(self._place / SENT, json.dumps(state, sort_keys=True), durable=False)


def why(error: BatonError | OSError) -> str:
    """A failure of `keep` in one line, for the log of a job that goes on."""
    return error.message if isinstance(error, BatonError) else f"{error.filename or 'the disk'}: {error.strerror}"


def _object(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
