"""The ports of files and batches: where they are stored, what serves a line, and how much room live requests leave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.core.access.keys import Principal
from gateway.core.money.ledger import Scope
from gateway.core.openai.batches.objects import BatchLine, LineResult, OpenBatch, UploadedFile


class FileStore(Protocol):
    """Files, one key at a time. An expired file is gone. Every call raises Unavailable when the store is away."""

    async def add(self, file: UploadedFile, pieces: AsyncIterator[bytes], key_bytes_max: int) -> UploadedFile:
        """Store a file and return it with its size. Raises TooLarge where the files of its key would hold more than
        `key_bytes_max`; then nothing is stored."""
        ...

    async def get(self, key_id: str, file_id: str) -> UploadedFile | None: ...

    async def page(
        self, key_id: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> Sequence[UploadedFile]:
        """At most `limit` files behind the file `after`. Raises NotFound if the key has no such file."""
        ...

    def content(self, file_id: str) -> AsyncIterator[bytes]:
        """The bytes of a file, in pieces."""
        ...

    async def delete(self, key_id: str, file_id: str) -> bool:
        """Delete a file with its content. Return whether the key had it."""
        ...

    async def sweep(self, limit: int) -> int:
        """Delete up to `limit` expired files; return how many."""
        ...


class BatchStore(Protocol):
    """Batches and their lines. `runner` is the id of one gateway process; what it claims is its own until `lease_s`
    after the last `renew`. Every call raises Unavailable when the store is away."""

    async def create(self, batch: OpenBatch, open_max: int) -> None:
        """Store a new batch. Raises RateLimited for a key with `open_max` batches that have not ended."""
        ...

    async def get(self, key_id: str, batch_id: str) -> OpenBatch | None: ...

    async def page(self, key_id: str, *, after: str | None, limit: int) -> Sequence[OpenBatch]:
        """At most `limit` batches, newest first, behind the batch `after`. Raises NotFound as `FileStore.page`."""
        ...

    async def cancel(self, key_id: str, batch_id: str, now_s: int) -> OpenBatch | None:
        """Begin to cancel a batch that has not ended, and return it as it is then. None: the key has no such batch."""
        ...

    async def claim(self, runner: str, lease_s: float) -> OpenBatch | None:
        """Claim a batch that is to be validated, or whose lines are done, or cannot go on: cancelled or out of time,
        and none of its lines is being served."""
        ...

    async def add_lines(self, lines: Sequence[BatchLine]) -> None:
        """Store lines of a batch that is being validated. Those that are stored already stay."""
        ...

    async def begin(self, batch_id: str, runner: str, total: int, now_s: int) -> bool:
        """Let a validated batch run. False, without a change, if the claim is lost or the batch was cancelled."""
        ...

    async def refuse(self, batch_id: str, runner: str, errors: Sequence[Mapping[str, Any]], now_s: int) -> bool:
        """End a batch as `failed`. False as `begin`."""
        ...

    async def end(
        self, batch: OpenBatch, runner: str, file_ids: tuple[str, str], reason: tuple[str, str] | None, now_s: int
    ) -> bool:
        """End a batch with its `status`, write its output and its error file under these ids, and delete its lines.
        Those without a result get `reason`. A file without lines is not written. False, without a change, if the claim
        is lost."""
        ...

    async def note_finalizing(self, batch_id: str, runner: str, now_s: int) -> bool:
        """Note that the output of a batch is being written. False as `begin`."""
        ...

    async def take(self, runner: str, limit: int, lease_s: float) -> Sequence[BatchLine]:
        """Claim up to `limit` lines of running batches whose time has come, the first lines of every batch before the
        later ones of any: a short batch does not wait for a long one. Lines that another runner has claimed come once
        its lease is over."""
        ...

    async def owner(self, batch_id: str) -> OpenBatch | None:
        """A batch of any key."""
        ...

    async def keep(self, line: BatchLine, runner: str, result: LineResult) -> bool:
        """Store the result of a line. False, without a change, if another runner has claimed it or it has a result."""
        ...

    async def postpone(self, line: BatchLine, runner: str, delay_s: float, *, counts: bool) -> None:
        """Give a line back for `delay_s`. `counts`: whether that was one of its attempts."""
        ...

    async def renew(self, runner: str, lines: Sequence[BatchLine], batch_id: str | None, lease_s: float) -> None:
        """Renew the claims that this runner has on these lines and on this batch."""
        ...

    async def release(self, runner: str) -> None:
        """Give up the claims of this runner."""
        ...


@dataclass(frozen=True, slots=True)
class LineReply:
    """The reply to a line's request, as a client would get it. `retry_after_s`: when to try again, if ever."""

    status: int
    request_id: str
    body: Any
    retry_after_s: float | None = None


class LineServer(Protocol):
    """Serves the request of one line as a live one: the same checks, planning, money and log."""

    async def serve(
        self, who: Principal, endpoint: str, body: Any, options: Mapping[str, str], scopes: Sequence[Scope]
    ) -> LineReply:
        """The reply, errors included. `options`: headers; `scopes`: budgets beside those of the key. Raises nothing of
        Baton's."""
        ...


LiveRequests = Callable[[], int]  # the number of requests under way, lines included
