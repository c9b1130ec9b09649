"""SIGHUP: the pool file is read anew. Several that come while one is being read count as one."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from gateway.core.access.audit import Act
from gateway.errors import BatonError
from gateway.service.admin.pools import Pools

ACTOR = Act("signal:SIGHUP")
log = logging.getLogger("gateway.pools")


class Hangups:
    """One that comes before there is a pool to reload is kept until there is."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    def heard(self) -> None:
        """The signal came."""
        self._asked.set()

    async def serve(self, pools: Pools) -> None:
        """For ever. What cannot be taken is one line in the log, and the pool of before goes on."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                found = await pools.reload(ACTOR)
            except BatonError as error:
                log.error("the pool file was not taken: %s", error.message)
                continue
            except Exception:  # boundary: a signal must not end a gateway that serves
                log.exception("the pool file was not taken")
                continue
            if not found["changed"]:
                log.info("the pool file says what it said before: %s", found["hash"][:12])


def goes_with_terminal() -> bool:
    """Whether this process is to end with its terminal: it has one, and nobody said `nohup`."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and has_terminal()


def has_terminal() -> bool:
    """Whether a terminal controls this process; one that was closed does not any more."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
