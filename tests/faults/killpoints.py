"""Named points of a request's way at which a gateway's process can be killed, as `kill -9` would.

They are wrapped around the product's own functions in the process that is to die; the product knows nothing of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from typing import Any

from gateway.adapters.journal import segments
from gateway.adapters.journal.spool import Spool
from gateway.adapters.redis.budgets import RedisBudgets
from gateway.adapters.upstream.http import HttpWorkers
from gateway.adapters.upstream.replies import Pieces
from gateway.service.request.complete import Completer

POINTS = (
    "before the hold",
    "hold granted, not written",
    "hold written",
    "dispatch about to be written",
    "dispatch written, call not sent",
    "reply half read",
    "reply read",
    "before the log",
    "log written, not synced",
    "logged, not settled",
    "settled, not answered",
    "stored, not marked",
    "marked, segments not deleted",
)


KILLED = "killed by the test at: "


def arm(point: str, nth: int) -> None:
    """Die the `nth` time (from 1) that this process comes to the point. Its log says so."""
    left = nth

    def here() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            os.write(2, f"{KILLED}{point}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    _ARM[point](here)


Here = Callable[[], None]


def _around(
    owner: Any, name: str, here: Here, *, after: bool = False, when: Callable[..., bool] = lambda *_: True
) -> None:
    """Call `here` before (or after) each call of a coroutine function for which `when` is true."""
    real = getattr(owner, name)

    @wraps(real)
    async def wrapped(*args: Any, **given: Any) -> Any:
        wanted = when(*args)
        if wanted and not after:
            here()
        result = await real(*args, **given)
        if wanted and after:
            here()
        return result

    setattr(owner, name, wrapped)


def _plain(owner: Any, name: str, here: Here, *, after: bool) -> None:
    """The same for a plain function."""
    real = getattr(owner, name)

    @wraps(real)
    def wrapped(*args: Any, **given: Any) -> Any:
        if not after:
            here()
        result = real(*args, **given)
        if after:
            here()
        return result

    setattr(owner, name, wrapped)


def _of_kind(kind: str) -> Callable[..., bool]:
    return lambda _spool, *events: any(event.kind == kind for event in events)


def _half_a_body(here: Here) -> None:
    real = Pieces.next

    async def following(*args: Any) -> bytes | None:
        piece = await real(*args)
        if piece is not None:
            here()
        return piece

    setattr(Pieces, "next", following)  # noqa: B010 - as `_around` does


_ARM: dict[str, Callable[[Here], None]] = {
    "before the hold": lambda here: _around(RedisBudgets, "hold", here),
    "hold granted, not written": lambda here: _around(RedisBudgets, "hold", here, after=True),
    "hold written": lambda here: _around(Spool, "append", here, after=True, when=_of_kind("hold")),
    "dispatch about to be written": lambda here: _around(Spool, "append", here, when=_of_kind("dispatch")),
    "dispatch written, call not sent": lambda here: _around(HttpWorkers, "complete", here),
    "reply half read": _half_a_body,
    "reply read": lambda here: _around(HttpWorkers, "complete", here, after=True),
    "before the log": lambda here: _around(Completer, "_log", here),
    "log written, not synced": lambda here: _plain(os, "fdatasync", here, after=False),
    "logged, not settled": lambda here: _around(Completer, "_settle", here),
    "settled, not answered": lambda here: _around(Completer, "_settle", here, after=True),
    "stored, not marked": lambda here: _around(Spool, "acknowledge", here),
    "marked, segments not deleted": lambda here: _plain(segments, "write_mark", here, after=True),
}
assert tuple(_ARM) == POINTS
